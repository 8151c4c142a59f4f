"""Checks for selected keys: the pool of index keys, scores, and selected positions."""

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.batch import Batch, check_block_table, check_lengths
from refattn.checks import (
    QUERY_TYPES,
    check,
    check_can_be_written,
    check_floating,
    check_memory,
    check_own_memory,
    check_sizes,
    describe,
    same_device,
)
from refattn.modes import refuse_gradients
from refattn.options import AttentionOptions
from refattn.overlap import check_apart
from refattn.plan import Plan

SCALE_BYTES = 4  # a token's scale, a float32
INDEX_FORMAT = torch.float8_e4m3fn  # the format of quantized index keys
ROUNDING = "rounding to fp8 has no gradient; use torch.no_grad(), or an unquantized pool"
SMALLEST = 1e-4  # lower bound on the largest element of a key when computing its scale


def holds_fp8(index_cache: Tensor) -> bool:
    """Return whether a pool of index keys holds fp8 values and scales, as bytes."""
    return index_cache.dtype == torch.uint8


def index_size_of(index_cache: Tensor) -> int:
    """Return the elements of an index key."""
    return index_cache.shape[-1] - (SCALE_BYTES if holds_fp8(index_cache) else 0)


def check_index_pool(
    num_blocks: int, block_size: int, index_size: int, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Check the sizes, dtype and device of a pool of index keys to be allocated.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    check_sizes(num_blocks=num_blocks, block_size=block_size, index_size=index_size)
    check_memory(dtype, device)
    if dtype == torch.uint8:
        if index_size % SCALE_BYTES:
            raise ValueError(f"index_size: expected a multiple of 4 in bytes, got {index_size}")
    elif dtype not in QUERY_TYPES:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(f"dtype: expected uint8, bfloat16, float16, float32 or float64, got {kind}")


def check_index_read(index_cache: Tensor, slots: Tensor) -> None:
    """Check a read of index keys by slots `[s]`.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if a slot is outside the pool.
    """
    check_index_cache(index_cache)
    check(index_cache=(index_cache, "n p c"), slots=(slots, "int64 s"))
    num_slots = index_cache.shape[0] * index_cache.shape[1]
    if slots.is_cpu and slots.numel():
        lowest, highest = (int(end) for end in slots.aminmax())
        if lowest < 0 or highest >= num_slots:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"slots: expected slots in 0..{num_slots - 1}, got {wrong}")


def check_index_cache(index_cache: Tensor) -> None:
    """Check a pool of index keys: unquantized `[n, p, d]`, or bytes `[n, p, d + 4]` of fp8 values and scales.

    Raises:
        ValueError: naming what does not fit. The bytes of a block must be contiguous and aligned to 4, because its
            scales follow the fp8 values of all its tokens.
    """
    sizes = check(index_cache=(index_cache, "n p d"))
    c = sizes["d"]
    check_sizes(block_size=sizes["p"])
    if not holds_fp8(index_cache):
        check_floating("index_cache", index_cache)
        if index_cache.element_size() < 2:
            raise ValueError(f"index_cache: expected numbers of 16 bits or more, or uint8, got {describe(index_cache)}")
        return
    if c <= SCALE_BYTES or c % SCALE_BYTES:
        raise ValueError(f"index_cache: expected a multiple of 4 fp8 values and 4 bytes of a scale, got c={c}")
    s0, s1, s2 = index_cache.stride()
    if (s1, s2) != (c, 1) or s0 % SCALE_BYTES or index_cache.storage_offset() % SCALE_BYTES:
        raise ValueError(
            "index_cache: expected the bytes of a block side by side, from a multiple of 4 on, got strides "
            f"{(s0, s1, s2)}"
        )


def check_index_write(key: Tensor, index_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check a write of index keys `[t, d]` into their pool by slots `[t]`.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
        NotImplementedError: if a key to be quantized requires a gradient.
    """
    check_index_cache(index_cache)
    d = index_size_of(index_cache)
    check(dict(d=d), key=(key, "float t d"))
    if not holds_fp8(index_cache) and key.dtype != index_cache.dtype:
        raise ValueError(f"key: expected {index_cache.dtype}, the type of the pool, got {key.dtype}")
    check(key=(key, "t d"), index_cache=(index_cache, "n p c"), slot_mapping=(slot_mapping, "int64 t"))
    check_can_be_written(index_cache=index_cache)
    check_own_memory("index_cache", index_cache)
    check_apart(dict(index_cache=index_cache), dict(key=key))
    if holds_fp8(index_cache):
        refuse_gradients(ROUNDING, key=key)
    if not slot_mapping.is_cpu or not slot_mapping.numel():
        return
    last = index_cache.shape[0] * index_cache.shape[1] - 1
    ordered = slot_mapping.sort().values
    if int(ordered[0]) < -1 or int(ordered[-1]) > last:
        wrong = int(ordered[0]) if int(ordered[0]) < -1 else int(ordered[-1])
        raise ValueError(f"slot_mapping: expected slots in 0..{last}, or -1 for padding, got {wrong}")
    twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
    if len(twice):
        raise ValueError(f"slot_mapping: expected each slot once, got slot {int(twice[0])} for several tokens")


def check_scores(query: Tensor, weights: Tensor, index_cache: Tensor, plan: Plan) -> None:
    """Check the arguments of `sparse.scores`.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    t = check(query=(query, "t h d"))["t"]
    check_index_cache(index_cache)
    check_floating("query", query)
    if not query.shape[1]:
        raise ValueError(f"query: expected at least one index head, got {describe(query)}")
    if query.element_size() == 1 and query.dtype != INDEX_FORMAT:
        raise ValueError(f"query: expected 16- or 32-bit values, or {INDEX_FORMAT}, got {query.dtype}")
    of_query = dict(t=t, h=query.shape[1], d=index_size_of(index_cache))
    check(of_query, query=(query, "t h d"), weights=(weights, "float t h"), index_cache=(index_cache, "n p c"))
    if not isinstance(plan, Plan):
        raise ValueError(f"plan: expected a Plan, got {describe(plan)}")
    if plan.block_size is None:
        raise ValueError("plan: expected one over pages, with a block size, got one over rows, from varlen.plan")
    if plan.block_size != index_cache.shape[1]:
        raise ValueError(
            f"index_cache: expected blocks of {plan.block_size} tokens, as in the plan, got p={index_cache.shape[1]}"
        )
    if plan.first_keys is not None or plan.positions is not None:
        raise ValueError(
            "plan: expected sequences from their first token on, with their queries at the end, got others"
        )
    same_device(query=query, seq_lens=plan.batch.seq_lens)
    if plan.needs is not None and plan.needs.query_rows > t:
        raise ValueError(f"query: expected at least {plan.needs.query_rows} rows, where cu_seqlens_q ends, got t={t}")
    if plan.needs is not None and plan.needs.blocks > len(index_cache):
        raise ValueError(
            f"index_cache: expected at least {plan.needs.blocks} blocks, as the block table leads to block "
            f"{plan.needs.blocks - 1}, got n={len(index_cache)}"
        )


def check_select(scores: Tensor, topk: int) -> None:
    """Check the arguments of `sparse.select`: scores `[t, s]` and `topk`.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check(scores=(scores, "float32 t s"))
    check_sizes(topk=topk)


def check_selected(batch: Batch, positions: Tensor, *, block_size: int) -> Int32[Tensor, "b m"]:
    """Check selected positions `[t, k]`: on a CPU, that they are in the sequence of their query row.

    Returns:
        The block table.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    rows = check(seq_lens=(batch.seq_lens, "int32 b"), positions=(positions, "int32 t k"))["t"]
    if not batch.seq_lens.is_cpu:
        return block_table
    used = int(batch.cu_seqlens_q[-1])
    if rows < used:
        raise ValueError(f"positions: expected at least {used} rows, where cu_seqlens_q ends, got t={rows}")
    ends = batch.seq_lens.repeat_interleave(batch.query_lens)[:, None]
    wrong = (positions[:used] < -1) | (positions[:used] >= ends)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"positions: expected 0..{int(ends[row, 0]) - 1}, or -1 for none, of query row {row}, got "
            f"{int(positions[row, column])}"
        )
    return block_table


def check_selected_options(options: AttentionOptions) -> None:
    """Check that no option depends on the positions of keys, which a list of slots does not have.

    Raises:
        ValueError: if there are ALiBi slopes.
    """
    if isinstance(options, AttentionOptions) and options.alibi_slopes is not None:
        raise ValueError("alibi_slopes: expected None, as selected keys have no positions, got slopes")
