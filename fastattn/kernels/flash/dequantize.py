"""Attend over pages of codes by a kernel for numbers: the codes are expanded first, once, for all queries.

    a key, a value      scale * code, rounded into the type of the queries, in pages that load fastest
    a query             scale * code in its own type, where queries are rounded as keys are

Each key so costs a byte per element to read and four to write and to read again, instead of a conversion for every tile
of queries that meets it. What the type of the queries does not hold becomes infinite: float16 ends at 65504.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.flash.repage import repage
from fastattn.kernels.flash.schedule import UNKNOWN, where_called
from fastattn.kernels.gpu.quantized import Codes, codes_of, prepare_query, row_scale
from fastattn.kernels.gpu.tile import converts_fp8, find_tile
from fastattn.kernels.problem import EXPANDED_BLOCK
from fastattn.kernels.replay import memo_of
from refattn.keys import QuantizedPages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales

BLOCK_TOKENS = 32

Paged = Callable[
    [Tensor, Tensor, Tensor, Plan, AttentionOptions, Tensor | None],
    tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]],
]


def attend_dequantized(
    paged: Paged,
    query: Float[Tensor, "t h d"],
    keys: QuantizedPages,
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Expand codes, and attend over the pages that come of it.

    Args:
        paged: attends over pages of numbers by a kernel.
        query: query rows of all sequences.
        keys: the pools; values are codes, or numbers in the type of the queries.
        plan: the lengths, the block table, and who may see whom.
        options: those of the layer.
        out: contiguous memory for the outputs; new memory if None.

    Returns:
        The outputs, and their log-sum-exps in float32.
    """
    key_cache, value_cache, scales = keys
    codes = codes_of(scales)
    if isinstance(scales, Fp8Scales):
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    expanded, where = memo_of(plan).expanded, where_called()
    over_pages = expanded.get(where)  # of an earlier layer; the entries of its table are written anew
    table = None if over_pages is None else over_pages.batch.block_table
    _, of_key, of_value = codes.numbers
    expand = partial(repage, batch=plan.batch, block_size=EXPANDED_BLOCK, dtype=query.dtype, sequences=plan.sequences)
    numbers, table = expand(key_cache, table=table, codes=codes.kind, number=of_key, scales=codes.key)
    kind = "" if value_cache.is_floating_point() else codes.kind
    values, _ = expand(value_cache, table=table, codes=kind, number=of_value, scales=codes.value)
    if over_pages is None:
        batch = replace(plan.batch, block_table=table)
        over_pages = replace(plan, batch=batch, block_size=EXPANDED_BLOCK)
        if where is not UNKNOWN:
            expanded[where] = over_pages
    if codes.kind == "int8" or codes.rounds_query:
        query = round_queries(query, plan, codes)
    return paged(query, numbers, values, over_pages, options, out)


def round_queries(query: Float[Tensor, "t h d"], plan: Plan, codes: Codes) -> Float[Tensor, "t h d"]:
    """Return queries as their codes stand for them, in their own type; padding rows may hold anything.

    Args:
        query: query rows of all sequences.
        plan: the lengths.
        codes: the format, and the scale of fp8.
    """
    num_tokens, num_heads, head_size = query.shape
    batch, scales = plan.batch, codes.query
    rounded = torch.empty_like(query, memory_format=torch.contiguous_format)
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return rounded
    _round_kernel[batch.num_seqs + num_tokens // BLOCK_TOKENS, num_heads](
        query,
        rounded,
        scales,
        codes.numbers[0],
        plan.sequences,
        batch.cu_seqlens_q,
        query.stride(),
        () if scales is None else (0, *scales.stride()) if scales.ndim == 1 else scales.stride(),
        batch.num_seqs,
        NUM_HEADS=num_heads,
        GROUP=1 if scales is None else num_heads // scales.shape[-1],
        HEAD_SIZE=head_size,
        BLOCK_TOKENS=BLOCK_TOKENS,
        CODES=codes.kind,
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
    CODES: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    # A program rounds one head of a few tokens of a sequence.
    head = tl.program_id(1).to(tl.int64)
    sequence, first_row = find_tile(cu_seqlens_q, tl.program_id(0), num_seqs, 1, BLOCK_TOKENS, False)
    begin = tl.load(cu_seqlens_q + sequence)
    token = begin + first_row + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    is_token = token < tl.load(cu_seqlens_q + sequence + 1)
    at_d = tl.arange(0, triton.next_power_of_2(HEAD_SIZE)).to(tl.int64)
    mask = is_token[:, None] & (at_d < HEAD_SIZE)[None, :]
    at_query = (token * query_strides[0] + head * query_strides[1])[:, None] + (at_d * query_strides[2])[None, :]
    numbers = tl.load(query + at_query, mask, 0.0)
    if CODES == "int8":
        scale = row_scale(numbers.to(tl.float32))[:, None]
    elif scales is None:
        scale = number
    else:
        member = sequence
        if sequences is not None:
            member = tl.load(sequences + sequence)
        scale = tl.load(scales + member.to(tl.int64) * scale_strides[0] + head // GROUP * scale_strides[1])
    codes = prepare_query(numbers, scale, CODES, True, HAS_FP8_CVT).to(tl.float32)
    at_rounded = ((token * NUM_HEADS + head) * HEAD_SIZE)[:, None] + at_d[None, :]
    tl.store(rounded + at_rounded, (codes * scale).to(rounded.dtype.element_ty), mask)
