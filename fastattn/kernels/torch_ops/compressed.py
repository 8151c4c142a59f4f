"""Entries from the rows of their tokens, in plain torch: all new entries at once."""

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.problem import places
from refattn.entries import CompressedPlan


def compress(
    row_cache: Float[Tensor, "n p c"], bias: Float[Tensor, "ratio w"] | None, plan: CompressedPlan
) -> Float[Tensor, "e d"]:
    """Compute the new entries; see `fastattn.compressed.compress`. It never reads the lengths on the host."""
    compute, width = torch.promote_types(row_cache.dtype, torch.float32), row_cache.shape[2] // 2
    size, ratio, table = width // 2 if plan.overlap else width, plan.ratio, plan.batch.block_table
    assert table is not None  # the plan has checked it
    if not len(plan.slots) or not table.numel():
        return row_cache.new_zeros(len(plan.slots), size)
    sequence, entry, padding = places(plan.new, len(plan.slots))

    def part(first: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return some columns of the values and the gates of `ratio` tokens, `[e, ratio, d]`."""
        tokens = first[:, None] + torch.arange(ratio, device=first.device)
        is_there = (tokens >= 0) & ~padding[:, None]
        tokens = tokens.where(is_there, 0)
        blocks = table[sequence[:, None], tokens // plan.block_size].where(is_there, 0).long()
        read = row_cache[blocks, tokens % plan.block_size]
        value, gate = (x[..., columns].to(compute) for x in (read[..., :width], read[..., width:]))
        gate = gate if bias is None else gate + bias[:, columns].to(compute)
        hidden = ~is_there[..., None]
        return value.masked_fill(hidden, 0.0), gate.masked_fill(hidden, -torch.inf)

    value, gate = part(entry * ratio, slice(width - size, width))
    if plan.overlap:
        earlier = part((entry - 1) * ratio, slice(0, size))
        value, gate = (torch.cat([a, b], 1) for a, b in zip(earlier, (value, gate), strict=True))
    result = (gate.softmax(1) * value).sum(1)
    return result.masked_fill(padding[:, None], 0.0).to(row_cache.dtype)
