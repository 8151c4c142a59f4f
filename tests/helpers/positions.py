"""Queries at any positions, answered by hand: who sees what is drawn from the positions, one pair at a time."""

import torch
from einops import rearrange

from refattn.attention import attend


def seen_from(positions: list[int], num_keys: int, window: tuple[int, int]) -> torch.Tensor:
    """Draw which of some keys are seen from some positions, one pair at a time."""
    left, right = window
    rows = [[(left < 0 or j >= i - left) and (right < 0 or j <= i + right) for j in range(num_keys)] for i in positions]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(positions), num_keys)


def answer_by_hand(query, keys, values, batch, *, positions, window, options, return_lse):
    """Attend in each sequence with a picture drawn from positions; the keys of a sequence are an entry of a list."""
    out = query.new_zeros(*query.shape[:2], values[0].shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    for (q0, q1), key, value in zip(batch.query_rows(), keys, values, strict=True):
        distance = torch.tensor(positions[q0:q1])[:, None] - torch.arange(len(key))
        slopes, sinks = (None if x is None else x.cpu() for x in (options.alibi_slopes, options.sinks))
        bias = None if slopes is None else -rearrange(slopes.to(lse.dtype), "h -> h 1 1") * distance.abs()
        out[q0:q1], lse[q0:q1] = attend(
            query[q0:q1],
            key.to(query.dtype),
            value.to(query.dtype),
            seen_from(positions[q0:q1], len(key), window),
            softmax_scale=options.softmax_scale,
            softcap=options.softcap,
            bias=bias,
            sinks=sinks,
        )
    return out, lse
