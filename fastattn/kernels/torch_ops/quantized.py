"""Scales of quantized caches in plain torch, on a CPU: fold them into queries and outputs, and quantize.

fp8     (key scale * query) . quantized        one number per sequence and head: folded into the query
int8    query . (scale * quantized)            one number per key: left to the kernel
out     value scale * (weights . quantized)    per sequence and head, or per head and channel: applied to the output
"""

import torch
from jaxtyping import Float, Float32, Int8, Int64, Shaped
from torch import Tensor

from fastattn.kernels.problem import compute_dtype
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales


def fold_scales(
    query: Float[Tensor, "t h d"], scales: Fp8Scales | Int8Scales, plan: Plan, group: int
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "#t #h #dv"]]:
    """Round queries where the scales require it, and fold in the key scales that all keys of a head share.

    Args:
        query: query rows of all sequences, not quantized.
        scales: those of the cache.
        plan: the sequences, for scales per sequence.
        group: query heads per KV head.

    Returns:
        The queries in float32, float64 for float64 ones; and the factor of the outputs.
    """
    compute = compute_dtype(query.dtype)
    if isinstance(scales, Fp8Scales):
        scaled_query = query.to(compute)
        if scales.query is not None:
            of_query = _per_row(scales.query, plan, query.shape[0], group)
            scaled_query = to_fp8(query, of_query, scales.format).to(compute) * of_query.to(compute)
        of_key, of_value = (_per_row(scale, plan, query.shape[0], group) for scale in (scales.key, scales.value))
        return scaled_query * of_key.to(compute), of_value.to(compute)
    of_query = row_scale(query)
    scaled_query = to_int8(query, of_query).to(compute) * of_query.to(compute)
    if scales.value is None:
        return scaled_query, scaled_query.new_ones(1, 1, 1)
    return scaled_query, scales.value.repeat_interleave(group, 0)[None].to(compute)


def _per_row(
    scale: float | Float32[Tensor, "..."], plan: Plan, rows: int, group: int
) -> Float32[Tensor, "#rows #heads 1"]:
    """Return the scale of each query row and query head, 1 for padding rows."""
    if not isinstance(scale, Tensor):
        return torch.full((1, 1, 1), scale, dtype=torch.float32, device="cpu")
    scale = scale.repeat_interleave(group, -1)
    if scale.ndim == 1:
        return scale[None, :, None]
    sequences = _sequences(plan)
    of_rows = scale.new_ones(rows, scale.shape[1])
    of_rows[: len(sequences)] = scale.index_select(0, sequences)
    return of_rows[..., None]


def _sequences(plan: Plan) -> Int64[Tensor, "_"]:
    batch = plan.batch
    numbers = torch.arange(batch.num_seqs, device="cpu") if plan.sequences is None else plan.sequences.long()
    return numbers.repeat_interleave(batch.query_lens.long())


def to_fp8(
    x: Float[Tensor, "t heads size"], scale: Float32[Tensor, "*#rows #heads 1"], kind: torch.dtype
) -> Shaped[Tensor, "t heads size"]:
    """Round to fp8, saturating, under a scale for each head."""
    largest = torch.finfo(kind).max
    return x.float().div(scale).clamp_(-largest, largest).to(kind)


def to_int8(
    x: Float[Tensor, "t heads size"], scale: Float32[Tensor, "*#rows heads #size"]
) -> Int8[Tensor, "t heads size"]:
    """Round to int8, saturating, under a scale for each row or for each channel; NaN becomes 0."""
    return x.float().div(scale).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)


def row_scale(x: Float[Tensor, "t heads size"]) -> Float32[Tensor, "t heads 1"]:
    """Return the scale by which the largest element of each row becomes 127; 1 for a row of zeros."""
    scale = x.float().abs().amax(-1, keepdim=True).div_(127)
    return scale.masked_fill_(scale == 0, 1.0)
