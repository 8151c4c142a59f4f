"""Attend over quantized pages by a kernel for unquantized pages: dequantize them first, once for all queries.

    a key, a value      scale * quantized, rounded into the type of the queries, in pages that load fastest
    int4                the same, turned back first
    a query             scale * quantized in its own type, where queries are rounded as keys are

Each key costs a byte per element to read, and four to write and to read again, instead of a conversion for every tile
of queries. Values that are too large for the type of the queries become infinite: float16 ends at 65504. Unquantized
pages are copied as well, for a kernel that loads whole tiles and reads pages of its tile size fastest.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

from fastattn.kernels.problem import EXPANDED_BLOCK, MOST_EXPANDED_BYTES
from fastattn.kernels.replay import memo_of
from fastattn.kernels.schedule import UNKNOWN, where_called
from fastattn.kernels.triton import prompts_hopper
from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.four_bits import int4_quantization
from fastattn.kernels.triton.hopper import is_aligned
from fastattn.kernels.triton.int4_elements import zero_points
from fastattn.kernels.triton.launch import converts_fp8
from fastattn.kernels.triton.quantized import Quantization, dequantize, prepare_query, quantization_of, row_scale
from fastattn.kernels.triton.queries import find_rows
from fastattn.kernels.triton.tuning import pad, tune
from fastattn.kernels.triton.turned_rows import turn
from refattn.batch import Batch
from refattn.four_bits import Int4Pages, turned_size
from refattn.keys import QuantizedPages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales
from refattn.trees import AttentionPlan, TreePlan

BLOCK_ROWS = 16
MOST_ELEMENTS = 16384  # elements of a program: with more, registers run out
BLOCK_TOKENS = 32
ROWS_TO_EXPAND = {4: 128, 8: 512}  # query rows per key from which pages of 4 or 8 bits are expanded; 128 is an estimate

Paged = Callable[
    [Tensor, Tensor, Tensor, Plan, AttentionOptions, Tensor | None],
    tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]],
]


def expands(
    query: Float[Tensor, "t h d"], keys: QuantizedPages | Int4Pages, plan: AttentionPlan, options: AttentionOptions
) -> bool:
    """Return whether our own kernels dequantize pages into memory: where a key meets many queries, and room is bounded.

    Prompts of 2 x 8192 tokens take the kernel that dequantizes in registers 5.7 ms over int4 pages, while
    FlashAttention-3 dequantizes and computes them in 1.9 ms (NVIDIA H200, c07fa68, 2026-11-28).

    Pages of 8 bits are for `fastattn.kernels.triton.prompts_hopper` alone. Expanded, a key and its value, n elements,
    move 3 n bytes: at 4.2 TB/s 0.7 ps per element. A row that sees them has 2 n operations. Of these ours does 254e12
    per second over fp8 and 311e12 over int8, as each tile of 128 rows dequantizes all its keys again, between two
    products that wait for it (2 x 8192 tokens take 4.3 and 3.5 ms: 54821ec, 2026-11-27), and 580e12 over 16 bits (1.9
    ms: b40fccb, 2026-11-29). So a row saves 4.4 or 3.0 fs per element, and it pays from 160 or 240 rows that see a key.
    Of 512 rows of a causal prompt half see an average key; what is left is for the launches. Measured, 16 chunks of 128
    tokens of 4 heads per KV head, those 512 rows, take 326 in place of 566 us after 4096 tokens over fp8, and 359 in
    place of 456 over int8 (cb4aaa1, 2026-11-29); fewer rows were not measured.
    """
    batch, own, (num_tokens, num_heads, head_size) = plan.own.batch, plan.own, query.shape
    num_kv_heads, size = keys.key_cache.shape[2], head_size + keys.value_head_size
    if isinstance(plan, TreePlan) or len(plan.levels) > 1 or options.batch_invariant or query.itemsize != 2:
        return False
    bits, (left, right) = 4 if isinstance(keys, Int4Pages) else 8, own.window
    rows = num_tokens * (num_heads // num_kv_heads)
    if bits == 8 and min(left, right) >= 0:  # a window: other rows do not see the key
        rows = rows * min(left + 1 + right, batch.max_seq_len) // max(1, batch.max_seq_len)
    tokens = batch.num_seqs * -(-batch.max_seq_len // EXPANDED_BLOCK) * EXPANDED_BLOCK
    if rows < max(1, ROWS_TO_EXPAND[bits] * batch.num_seqs):
        return False
    if tokens * num_kv_heads * size * query.itemsize > MOST_EXPANDED_BYTES:
        return False
    if isinstance(keys, Int4Pages):
        return True
    if keys.value_cache.dtype not in (keys.key_cache.dtype, query.dtype):  # values beside int8 keys
        return False
    if not is_aligned(query, *query.stride()[:-1]):
        return False
    tuning = tune(query, *keys[:2], own, options, pad(max(head_size, keys.value_head_size)) * query.itemsize)
    return prompts_hopper.suits(query, num_kv_heads, keys.value_head_size, own, options, tuning)


def attend_dequantized(
    paged: Paged,
    query: Float[Tensor, "t h d"],
    keys: QuantizedPages | Int4Pages,
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Dequantize pages, and attend over them.

    Args:
        paged: the function of a kernel over unquantized pages.
        query: query rows of all sequences.
        keys: the pools; values are quantized, or in the type of the queries.
        plan: the lengths, the block table, and the mask.
        options: the layer's options.
        out: contiguous memory for the outputs; new memory if None.

    Returns:
        The outputs, and their log-sum-exps in float32.
    """
    key_cache, value_cache, scales = keys
    quantization = int4_quantization(keys.scales) if isinstance(keys, Int4Pages) else quantization_of(keys.scales)
    if isinstance(scales, Fp8Scales):
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    expanded, where = memo_of(plan).expanded, where_called()
    over_pages = expanded.get(where)  # the plan of an earlier layer; its table is written again
    table = None if over_pages is None else over_pages.batch.block_table
    _, of_key, of_value = quantization.numbers
    expand = partial(repage, batch=plan.batch, block_size=EXPANDED_BLOCK, dtype=query.dtype, sequences=plan.sequences)
    numbers, table = expand(key_cache, table=table, kind=quantization.kind, number=of_key, scales=quantization.key)
    kind = "" if value_cache.is_floating_point() else quantization.kind
    values, _ = expand(value_cache, table=table, kind=kind, number=of_value, scales=quantization.value)
    if over_pages is None:
        batch = replace(plan.batch, block_table=table)
        over_pages = replace(plan, batch=batch, block_size=EXPANDED_BLOCK)
        if where is not UNKNOWN:
            expanded[where] = over_pages
    if quantization.kind == "int8" or quantization.rounds_query:
        query = round_queries(query, plan, quantization)
    return paged(query, numbers, values, over_pages, options, out)


def round_queries(query: Float[Tensor, "t h d"], plan: Plan, quantization: Quantization) -> Float[Tensor, "t h d"]:
    """Round queries to the format of the keys, and return them in their own type; padding rows may hold anything.

    Args:
        query: query rows of all sequences.
        plan: the lengths.
        quantization: the format, and the scale of fp8.
    """
    num_tokens, num_heads, head_size = query.shape
    batch, scales = plan.batch, quantization.query
    rounded = torch.empty_like(query, memory_format=torch.contiguous_format)
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return rounded
    _round_kernel[batch.num_seqs + num_tokens // BLOCK_TOKENS, num_heads](
        query,
        rounded,
        scales,
        quantization.numbers[0],
        plan.sequences,
        batch.cu_seqlens_q,
        query.stride(),
        () if scales is None else (0, *scales.stride()) if scales.ndim == 1 else scales.stride(),
        batch.num_seqs,
        NUM_HEADS=num_heads,
        GROUP=1 if scales is None else num_heads // scales.shape[-1],
        HEAD_SIZE=head_size,
        BLOCK_TOKENS=BLOCK_TOKENS,
        FORMAT=quantization.kind,
        HAS_FP8_CVT=converts_fp8(query.device),
    )
    return rounded


@triton.jit(do_not_specialize=["cu_seqlens_q", "num_seqs"])
@no_type_check
def _round_kernel(
    query,
    rounded,
    scales,
    number,
    sequences,
    cu_seqlens_q,
    query_strides,
    scale_strides,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    # A program rounds one head of a few tokens of a sequence.
    head = tl.program_id(1).to(tl.int64)
    sequence, first_row = find_rows(cu_seqlens_q, tl.program_id(0), num_seqs, 1, BLOCK_TOKENS, False)
    begin = tl.load(cu_seqlens_q + sequence)
    token = begin + first_row + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    is_token = token < tl.load(cu_seqlens_q + sequence + 1)
    at_d = tl.arange(0, next_power_of_2(HEAD_SIZE)).to(tl.int64)
    mask = is_token[:, None] & (at_d < HEAD_SIZE)[None, :]
    at_query = (token * query_strides[0] + head * query_strides[1])[:, None] + (at_d * query_strides[2])[None, :]
    numbers = tl.load(query + at_query, mask, 0.0)
    if FORMAT == "int8":
        scale = row_scale(numbers.to(tl.float32))[:, None]
    elif scales is None:
        scale = number
    else:
        member = sequence
        if sequences is not None:
            member = tl.load(sequences + sequence)
        scale = tl.load(scales + member.to(tl.int64) * scale_strides[0] + head // GROUP * scale_strides[1])
    quantized = prepare_query(numbers, scale, FORMAT, True, HAS_FP8_CVT).to(tl.float32)
    at_rounded = ((token * NUM_HEADS + head) * HEAD_SIZE)[:, None] + at_d[None, :]
    tl.store(rounded + at_rounded, (quantized * scale).to(rounded.dtype.element_ty), mask)


def repage(
    cache: Shaped[Tensor, "n p hk stored"],
    batch: Batch,
    *,
    block_size: int,
    table: Int32[Tensor, "b m2"] | None = None,
    dtype: torch.dtype | None = None,
    kind: str = "",
    number: float = 1.0,
    scales: Float32[Tensor, "..."] | None = None,
    sequences: Int32[Tensor, "b"] | None = None,
) -> tuple[Shaped[Tensor, "n2 p2 hk d"], Int32[Tensor, "b m2"]]:
    """Copy the tokens of a batch into a pool of their own, with larger blocks, in order; see `kernels.flash.fa4`.

    Args:
        cache: the pool; fp8 and int4 as bytes.
        batch: the lengths and the block table.
        block_size: tokens in a new block, a multiple of `BLOCK_ROWS`.
        table: where to write the new table; new memory if None.
        dtype: the type of the new pool; that of the old one if None.
        kind: what the pool holds, "e4m3", "e5m2", "int8" or "int4", whose bytes hold two elements; "" for unquantized
            values, which are copied as they are.
        number: the scale of all quantized values, without `scales`.
        scales: of fp8 per head `[hk]`, or per sequence and head `[b, hk]`; of int8 per head and channel `[hk, d]`, or
            per token of the pool and head `[n, p, hk]`, as of int4.
        sequences: for each sequence of `batch`, the sequence that its scales belong to; None where they are the same.

    Returns:
        The new pool, with zeros past a sequence's end in its last block and anything in blocks after that, and its
        block table.
    """
    _, old_block_size, num_kv_heads, size = cache.shape
    head_size = 2 * size if kind == "int4" else size
    assert batch.block_table is not None  # the path has checked it
    columns = -(-batch.max_seq_len // block_size)
    pool = cache.new_empty(batch.num_seqs * columns, block_size, num_kv_heads, head_size, dtype=dtype)
    table = batch.block_table.new_empty(batch.num_seqs, columns) if table is None else table
    if not len(pool):
        return pool, table
    rows = min(BLOCK_ROWS, max(1, MOST_ELEMENTS // (pad(num_kv_heads) * pad(head_size))))
    _repage_kernel[len(pool) * block_size // rows,](
        cache,
        pool,
        table,
        batch.block_table,
        batch.seq_lens,
        _quantized_of(kind, head_size, number, scales, sequences),
        cache.stride(),
        batch.block_table.stride(),
        columns,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        OLD_BLOCK_SIZE=old_block_size,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=rows,
        HAS_FP8_CVT=converts_fp8(cache.device),
    )
    return pool, table


class Quantized(NamedTuple):
    """How the values of a pool are quantized, as the kernel takes it.

    Attributes:
        scales: the scales; None for one number.
        number: the scale of all values, without `scales`.
        sequences: as for `repage`.
        strides: of the scales.
        FORMAT: the kind; "" for unquantized values.
        PER: "number", "sequence", "channel" or "token".
        TURNED: elements that are turned back together, of int4.
        STAGES: log2(TURNED).
    """

    scales: Any
    number: Any
    sequences: Any
    strides: Any
    FORMAT: Any
    PER: Any
    TURNED: Any
    STAGES: Any


def _quantized_of(
    kind: str, head_size: int, number: float, scales: Tensor | None, sequences: Tensor | None
) -> Quantized:
    """Return how a pool is quantized; the arguments are those of `repage`."""
    per, strides = _layout_of(scales, kind)
    turned = turned_size(head_size)
    constants = map(tl.constexpr, (kind, per, turned, turned.bit_length() - 1))
    return Quantized(scales, number, sequences, strides, *constants)


def _layout_of(scales: Tensor | None, kind: str) -> tuple[str, tuple[int, ...]]:
    """Return the granularity of scales, and their strides, with 0 for the sequences where all have the same scales."""
    if scales is None:
        return "number", ()
    if kind in ("int8", "int4"):
        return "token" if scales.ndim == 3 else "channel", scales.stride()
    return "sequence", (0, *scales.stride()) if scales.ndim == 1 else scales.stride()


@triton.jit(do_not_specialize=["table", "block_table", "seq_lens", "columns"])
@no_type_check
def _repage_kernel(
    cache,
    pool,
    table,
    block_table,
    seq_lens,
    quantized,
    cache_strides,
    table_strides,
    columns,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OLD_BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    # A program copies a few tokens of a sequence, with all their heads.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    if first_row % BLOCK_SIZE == 0:
        tl.store(table + first_row // BLOCK_SIZE, (first_row // BLOCK_SIZE).to(tl.int32))
    sequence = first_row // (columns * BLOCK_SIZE)
    token = first_row % (columns * BLOCK_SIZE) + tl.arange(0, BLOCK_ROWS)
    seq_len = tl.load(seq_lens + sequence)
    if first_row % (columns * BLOCK_SIZE) >= tl.cdiv(seq_len, BLOCK_SIZE) * BLOCK_SIZE:
        return
    is_token = token < seq_len
    block = tl.load(
        block_table + sequence * table_strides[0] + token // OLD_BLOCK_SIZE * table_strides[1], is_token, 0
    ).to(tl.int64)
    HEADS_PAD: tl.constexpr = next_power_of_2(NUM_KV_HEADS)
    HEAD_PAD: tl.constexpr = next_power_of_2(HEAD_SIZE)
    column = tl.arange(0, HEADS_PAD * HEAD_PAD)
    head, at_d = (column // HEAD_PAD).to(tl.int64), (column % HEAD_PAD).to(tl.int64)
    is_column = (head < NUM_KV_HEADS) & (at_d < HEAD_SIZE)
    place = token % OLD_BLOCK_SIZE
    source = block * cache_strides[0] + place * cache_strides[1]
    within = head * cache_strides[2] + (at_d // 2 if quantized.FORMAT == "int4" else at_d) * cache_strides[3]
    mask = is_token[:, None] & is_column[None, :]
    rows = tl.load(cache + source[:, None] + within[None, :], mask, 0)
    if quantized.FORMAT != "":
        if quantized.PER == "token":
            at_head = tl.arange(0, HEADS_PAD).to(tl.int64)
            of_tokens = block * quantized.strides[0] + place * quantized.strides[1]
            at_scale = of_tokens[:, None] + (at_head * quantized.strides[2])[None, :]
            of_heads = tl.load(quantized.scales + at_scale, is_token[:, None] & (at_head < NUM_KV_HEADS)[None, :], 0.0)
            scale = tl.broadcast_to(of_heads[:, :, None], [BLOCK_ROWS, HEADS_PAD, HEAD_PAD])
            scale = tl.reshape(scale, [BLOCK_ROWS, HEADS_PAD * HEAD_PAD])
        elif quantized.PER == "channel":
            scale = tl.load(
                quantized.scales + head * quantized.strides[0] + at_d * quantized.strides[1], is_column, 0.0
            )[None, :]
        elif quantized.PER == "sequence":
            member = sequence
            if quantized.sequences is not None:
                member = tl.load(quantized.sequences + sequence).to(tl.int64)
            scale = tl.load(
                quantized.scales + member * quantized.strides[0] + head * quantized.strides[1], is_column, 0.0
            )[None, :]
        else:
            scale = quantized.number
        if quantized.FORMAT == "int4":
            elements = (rows >> ((at_d % 2) * 4)[None, :].to(tl.uint8)) & 15
            numbers = (elements.to(tl.float32) - zero_points(scale)) * scale
            numbers = turn(tl.reshape(numbers, [BLOCK_ROWS * HEADS_PAD, HEAD_PAD]), quantized.TURNED, quantized.STAGES)
            rows = tl.reshape(numbers, [BLOCK_ROWS, HEADS_PAD * HEAD_PAD])
        else:
            rows = dequantize(rows, quantized.FORMAT, HAS_FP8_CVT).to(tl.float32) * scale
    target = (first_row + tl.arange(0, BLOCK_ROWS)) * (NUM_KV_HEADS * HEAD_SIZE)
    at_target = target[:, None] + (head * HEAD_SIZE + at_d)[None, :]
    tl.store(pool + at_target, rows.to(pool.dtype.element_ty), mask=is_column[None, :])
