"""Index keys, their scores, and the selection of the best, in plain torch, on any device; part of the kernel `torch`.

All products have one shape, a query and `KEYS` index keys, so no bit of a score depends on the batch. The selection
compares scores as integers of the same order.
"""

import torch
from jaxtyping import Float, Float32, Int32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

from fastattn.kernels.problem import as_integers, places
from refattn.batch import Batch
from refattn.index_keys import INDEX_FORMAT, SCALE_BYTES, SMALLEST, holds_fp8, index_size_of
from refattn.plan import Plan

KEYS = 1024  # index keys of a product
ELEMENTS = 2**24  # scores that are selected from at a time
LARGEST_FP8 = torch.finfo(INDEX_FORMAT).max


def write_index(
    key: Float[Tensor, "t d"], index_cache: Shaped[Tensor, "n p c"], slot_mapping: Int64[Tensor, "t"]
) -> None:
    """Write index keys into their pool; see `fastattn.sparse.write`."""
    written = slot_mapping >= 0
    key, slot_mapping = key[written], slot_mapping[written]
    blocks, rows = slot_mapping // index_cache.shape[1], slot_mapping % index_cache.shape[1]
    if not holds_fp8(index_cache):
        as_integers(index_cache)[blocks, rows] = as_integers(key)
        return
    quantized, scales = _parts(index_cache)
    numbers = key.float()
    scale = numbers.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    scale = scale / torch.full_like(scale, LARGEST_FP8)  # a GPU divides by a scalar as a product with its reciprocal
    rounded = (numbers / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(INDEX_FORMAT)
    quantized[blocks, rows] = rounded.view(torch.uint8)
    scales[blocks, rows] = scale.view(torch.uint8)


def read_index(index_cache: Shaped[Tensor, "n p c"], slots: Int64[Tensor, "s"]) -> Float[Tensor, "s d"]:
    """Return the index keys in some slots; see `fastattn.sparse.read`."""
    blocks, rows = slots // index_cache.shape[1], slots % index_cache.shape[1]
    if not holds_fp8(index_cache):
        return index_cache[blocks, rows]
    quantized, scales = _parts(index_cache)
    return quantized[blocks, rows].view(INDEX_FORMAT).float() * scales[blocks, rows].view(torch.float32)


def _parts(index_cache: Shaped[Tensor, "n p c"]) -> tuple[Shaped[Tensor, "n p d"], Shaped[Tensor, "n p 4"]]:
    """Return views of the quantized values and of the bytes of the scales."""
    (n, p, _), size, block = index_cache.shape, index_size_of(index_cache), index_cache.stride(0)
    first = index_cache.storage_offset()
    quantized = index_cache.as_strided((n, p, size), (block, size, 1), first)
    scales = index_cache.as_strided((n, p, SCALE_BYTES), (block, SCALE_BYTES, 1), first + p * size)
    return quantized, scales


def score_index(
    query: Float[Tensor, "t h d"], weights: Float[Tensor, "t h"], index_cache: Shaped[Tensor, "n p c"], plan: Plan
) -> Float32[Tensor, "t s"]:
    """Score the visible keys of each query, `KEYS` of a sequence at a time; see `fastattn.sparse.scores`."""
    batch, block_size, device = plan.batch, index_cache.shape[1], query.device
    assert batch.block_table is not None  # the path has checked it
    result = torch.full((len(query), batch.max_seq_len), -torch.inf, dtype=torch.float32, device=device)
    queries, weights = query.float(), weights.float()
    left, right = plan.window
    for i, ((q0, q1), seq_len) in enumerate(zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True)):
        if q0 == q1:
            continue
        position = torch.arange(seq_len - (q1 - q0), seq_len, device=device)
        if plan.first_visible is not None and plan.last_visible is not None:
            first, last = plan.first_visible[q0:q1].long(), plan.last_visible[q0:q1].long()
        else:
            first = position - left if left >= 0 else torch.zeros_like(position)
            last = position + right if right >= 0 else torch.full_like(position, seq_len - 1)
        first, last = first.clamp(min=0), last.clamp(max=seq_len - 1)
        sees = first <= last
        begin, end = (int(first[sees].min()), int(last[sees].max()) + 1) if sees.any() else (0, 0)
        for k0 in range(begin // KEYS * KEYS, end, KEYS):
            place = torch.arange(k0, min(k0 + KEYS, end), device=device)
            slots = batch.block_table[i, place // block_size].long() * block_size + place % block_size
            key = pad(read_index(index_cache, slots).float(), (0, 0, 0, KEYS - len(place))).T.contiguous()
            visible = (first[:, None] <= place) & (place <= last[:, None])
            for row in visible.any(1).nonzero()[:, 0].tolist():
                sums = weights[q0 + row] @ (queries[q0 + row] @ key).relu_()
                numbers = sums[: len(place)].masked_fill_(~visible[row], -torch.inf)
                result[q0 + row, k0 : k0 + len(place)] = numbers
    return result


def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t {topk}"]:
    """Select the highest scores, ties from the left; see `fastattn.sparse.select`.

    `Tensor.topk` gives the threshold, the lowest selected score. Of the scores equal to it, the leftmost fill the
    places that are left.
    """
    t, s = scores.shape
    selected = torch.full((t, topk + 1), -1, dtype=torch.int32, device=scores.device)
    if not s:
        return selected[:, :topk]
    step = max(1, ELEMENTS // s)
    for first in range(0, t, step):
        numbers = scores[first : first + step]
        is_key = numbers != -torch.inf
        order = _in_order(numbers)
        lowest = order.topk(min(topk, s), dim=1).values[:, -1:]
        above, at = (order > lowest) & is_key, (order == lowest) & is_key
        chosen = above | (at & (at.cumsum(1) <= topk - above.sum(1, keepdim=True)))
        column = torch.where(chosen, chosen.cumsum(1) - 1, topk)
        positions = torch.arange(s, dtype=torch.int32, device=scores.device).expand_as(column)
        selected[first : first + step].scatter_(1, column, positions)
    return selected[:, :topk].contiguous()


def _in_order(numbers: Float32[Tensor, "t s"]) -> Int32[Tensor, "t s"]:
    """Map numbers to integers of the same order: both zeros are equal, NaN is the highest."""
    bits = numbers.masked_fill(numbers == 0, 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return order.masked_fill(numbers.isnan(), torch.iinfo(torch.int32).max)


def selected_slots(batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int) -> Int32[Tensor, "t k"]:
    """Return the slots of selected keys; see `fastattn.sparse.slots`."""
    block_table = batch.block_table
    assert block_table is not None  # the path has checked it
    if not batch.num_seqs or not block_table.numel():
        return torch.full_like(positions, -1)
    sequence, _, padding = places(batch, len(positions))
    is_key = (positions >= 0) & (positions < batch.seq_lens[sequence][:, None]) & ~padding[:, None]
    place = positions.clamp(min=0)
    column = (place // block_size).clamp(max=block_table.shape[1] - 1)
    found = block_table[sequence[:, None], column] * block_size + place % block_size
    return torch.where(is_key, found, -1)


def plan_selected(
    batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "t"], Int32[Tensor, "t k"], Int32[Tensor, "t"]]:
    """Make each query row a sequence of its own; see `fastattn.sparse.plan`.

    Returns:
        `cu_seqlens_q`, `seq_lens` and the block table of these sequences, and the sequence of each row.
    """
    found = selected_slots(batch, positions, block_size=block_size)
    t, k = found.shape
    is_key = found >= 0
    order = torch.where(is_key, is_key.cumsum(1) - 1, k)
    table = torch.zeros(t, k + 1, dtype=torch.int32, device=batch.device).scatter_(1, order, found)
    rows = torch.arange(t + 1, dtype=torch.int32, device=batch.device).minimum(batch.cu_seqlens_q[-1])
    sequences, _, _ = places(batch, t)
    return rows, is_key.sum(1, dtype=torch.int32), table[:, :k], sequences.int()
