"""Selections that are wrong."""

import torch


def zeros_of_two_signs(scores, topk):
    """Scores are ordered by their bits, as a radix sort does: -0 is below +0, and loses a tie at a lower position."""
    bits = scores.view(torch.int32)
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    order = torch.where(scores.isnan(), 1 << 40, order)
    found = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for row, (keys, numbers) in enumerate(zip(order, scores, strict=True)):
        best = torch.argsort(keys, descending=True, stable=True)
        best = best[numbers[best] != -torch.inf][:topk].sort().values
        found[row, : len(best)] = best.int()
    return found
