"""Attention over int4 pages: rows turned by a Hadamard matrix, a scale and a zero point per token and KV head.

The bytes and the scales are drawn, not written by the reference. Scales differ by up to a factor of 32 between tokens,
so that one read in another place is far outside any tolerance.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refattn.four_bits import Int4Scales
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, LENS, Drawn, padding_of, rows_of, slots_of
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Without
from twinattn.kit.operations.scores import (
    EMPTY,
    LONG,
    PADDING,
    biased,
    expanded,
    int8_plan,
    options_of,
    paged,
    softmax,
    sunk,
)
from twinattn.kit.operations.tiles import BLOCKS, Dimension, of_lengths, of_size

POOLS = ("key_cache", "value_cache", "key_scales", "value_scales")


def draw(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw queries, pools of bytes and their scales, each with a zero point in its last four bits."""
    drawn = Drawn(case, dtype)
    a, past, free, n = paged(drawn)
    t, (h, hk), p = int(a["cu_seqlens_q"][-1]) + case["padding"], case["heads"], case["block_size"]
    d, dv = case["head_size"], case["head_size"] + case["more"]
    for name, size in (("key", d), ("value", dv)):
        sizes = torch.exp2(drawn.uniform(n, p, hk, low=-7.0, high=-2.0, dtype=torch.float32))
        zeros = drawn.whole(0, 16, n, p, hk, dtype=torch.int32)
        a[f"{name}_cache"] = drawn.whole(0, 256, n, p, hk, size // 2).to(torch.uint8)
        a[f"{name}_scales"] = (sizes.view(torch.int32) & ~15 | zeros).view(torch.float32)
    a |= dict(
        query=drawn.normal(t, h, d),
        softmax_scale=d**-0.5 if case["softmax_scale"] is None else case["softmax_scale"],
        return_lse=True,
        sinks=drawn.normal(h, dtype=torch.float32) if case["sinks"] else None,
        softcap=case["softcap"],
        alibi_slopes=None,
        causal=case["causal"],
        window_size=case["window_size"],
    )
    unread = {name: expanded(free, a[name]) for name in POOLS}
    return Inputs(a, past | unread | dict(query=padding_of(a, a["query"])))


def hadamard(size: int, dtype: torch.dtype) -> Tensor:
    """Return the orthonormal matrix of a head, in blocks of the largest power of two that divides its size."""
    block, matrix = size & -size, torch.ones(1, 1, dtype=dtype)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix] * (size // block)) * block**-0.5


def interleaved(low: Tensor, high: Tensor) -> Tensor:
    """Return elements of which the even ones are in the low halves of the bytes."""
    return torch.stack([low, high], -1).flatten(-2)


def less_zero(quantized: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return dequantized elements."""
    return scale * (quantized - zero)


def int4_attention(
    a: Arguments,
    compute: torch.dtype,
    *,
    pairs: Callable[[Tensor, Tensor], Tensor] = interleaved,
    dequantize: Callable[[Tensor, Tensor, Tensor], Tensor] = less_zero,
    query_turn: float = 1.0,
    output_turn: float = 1.0,
) -> Answers:
    """Attend to dequantized keys and values that stay turned, with turned queries; turn the output back.

    Args:
        a: the arguments of a call.
        compute: the type to compute in.
        pairs: puts the halves of the bytes together.
        dequantize: from quantized elements, scales and zero points.
        query_turn: the factor of the matrix for queries; 0 for none.
        output_turn: that of the matrix for outputs.
    """
    (h, d), dv = a["query"].shape[1:], 2 * a["value_cache"].shape[-1]
    pools = []
    for name in ("key", "value"):
        quantized, scale = a[f"{name}_cache"].int(), a[f"{name}_scales"].contiguous()
        zero = (scale.view(torch.int32) & 15)[..., None].to(compute)
        numbers = pairs(quantized & 15, quantized >> 4).to(compute)
        pools.append(dequantize(numbers, scale.to(compute)[..., None], zero).flatten(0, 1))
    query = a["query"].to(compute)
    query = query @ hadamard(d, compute) * query_turn if query_turn else query
    out, lse = query.new_zeros(len(query), h, dv), query.new_full((len(query), h), -torch.inf)
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        slots = slots_of(a, i, s, a["key_cache"].shape[1])
        key, value = (x[slots].repeat_interleave(h // x.shape[1], dim=1).transpose(0, 1) for x in pools)
        scores = query[q0:q1].transpose(0, 1) @ key.transpose(1, 2) * a["softmax_scale"]
        scores, (left, right) = biased(scores, a, q1 - q0), a["window_size"]
        ahead = torch.arange(s) - torch.arange(s - q1 + q0, s)[:, None]
        mask = (ahead <= 0) if a["causal"] else torch.ones_like(ahead, dtype=torch.bool)
        mask = mask & ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
        out[q0:q1], lse[q0:q1] = softmax(scores, mask, value)
    turned_back = out @ hadamard(dv, compute) * output_turn if output_turn else out
    return sunk(a, turned_back, lse)


# --- known mistakes ---


def by_head(scales: Tensor) -> Tensor:
    """Return scales read as if the heads of a page came before its tokens."""
    n, p, hk = scales.shape
    return scales.reshape(n, hk, p).transpose(1, 2)


def with_scales(a: Arguments, compute: torch.dtype, *names: str, read: Callable[[Tensor], Tensor]) -> Answers:
    """Return the outputs with some scales read otherwise."""
    return int4_attention({**a, **{name: read(a[name]) for name in names}}, compute)


def of_the_keys(a: Arguments, compute: torch.dtype) -> Answers:
    """Return the outputs with the scales of keys for the values."""
    return int4_attention({**a, "value_scales": a["key_scales"]}, compute)


def first_head(scales: Tensor) -> Tensor:
    """Return the scales of the first head for all."""
    return scales[..., :1].expand(scales.shape)


def mistake(name: str, says: str, **wrong: Any) -> Mistake:
    """Return a mistake in a step of the formula."""
    return Mistake(f"int4-{name}", says, partial(int4_attention, **wrong))


INT4 = Operation(
    name="int4_attention",
    function="attention",
    signature="as `quantized`, with pools of int4, two elements per byte, turned by a Hadamard matrix; `key_scales`, "
    "`value_scales` `[n, p, hk]`, each with its zero point in its last four bits, or both as `scales`; `causal`, "
    "`window_size`, `softcap`, `sinks`; queries are not rounded",
    draw=draw,
    oracle=int4_attention,
    sizes=dict(
        lens=LENS,
        block_size=(4, 1, 16, 3),
        heads=((2, 1), (1, 1), (6, 2), (3, 3), (10, 2), (32, 4), (12, 1)),
        head_size=(16, 64, 48),
        more=(0, 8),
        padding=(0, 2),
        softmax_scale=(0.21, None),
        causal=(True, False),
        window_size=((-1, -1), (3, 0), (20, 2), (-1, 1)),
        softcap=(0.0, 2.0),
        sinks=(False, True),
    ),
    without=dict(softmax_scale=Without(None, ("softmax_scale",))),
    options=dict(causal=True, window_size=(-1, -1), softcap=0.0, sinks=False),
    dimensions=of_lengths(queries=513, sequences=513)
    | dict(block_size=of_size("block_size", BLOCKS, lens=((2, 300), (1, 9))), padding=of_size("padding", 1025))
    | dict(heads=Dimension(lambda n: dict(heads=(n, 1)), 129))
    | {name: of_size(name, 513, multiple=2) for name in ("head_size", "more")},
    specials=(EMPTY, PADDING, LONG),
    derived={
        **BATCH,
        "plan": int8_plan,
        "block_size": lambda a: a["key_cache"].shape[1],
        "scales": lambda a: Int4Scales(a["key_scales"], a["value_scales"]),
        "options": options_of,
    },
    outputs=("out", "lse"),
    optional=frozenset({"lse"}),
    types=dict(out="query"),
    strided=("query", *POOLS),
    pools=POOLS,
    nan=("query", "key_scales", "value_scales"),
    has_out=True,
    size=lambda a: 8.0,
    mistakes=(
        mistake("query-not-turned", "Keys are turned and queries are not.", query_turn=0.0),
        mistake("output-not-turned", "The output is not turned back.", output_turn=0.0),
        Mistake(
            "int4-turned-too-short",
            "The matrix is divided by the root of twice the head size (lmdeploy 4510).",
            lambda a, c: int4_attention(a, c, query_turn=0.5**0.5, output_turn=0.5**0.5),
        ),
        Mistake(
            "int4-turn-not-normalized",
            "The matrix of queries has elements of 1 and -1.",
            lambda a, c: int4_attention(a, c, query_turn=float((a["query"].shape[2] & -a["query"].shape[2]) ** 0.5)),
        ),
        mistake(
            "halves-swapped",
            "The even elements are read from the high halves of the bytes.",
            pairs=lambda low, high: interleaved(high, low),
        ),
        mistake(
            "halves-apart",
            "The low halves are read as the first half of a row, not as its even elements.",
            pairs=lambda low, high: torch.cat([low, high], -1),
        ),
        mistake(
            "scale-twice",
            "Elements are multiplied by their scale twice (vLLM 48016).",
            dequantize=lambda x, scale, zero: scale * scale * (x - zero),
        ),
        mistake("no-zero-point", "No zero point is taken off.", dequantize=lambda x, scale, zero: scale * x),
        mistake("zero-of-8", "All zero points are taken for 8.", dequantize=lambda x, scale, zero: scale * (x - 8)),
        mistake("zero-unscaled", "The zero point is not scaled.", dequantize=lambda x, scale, zero: scale * x - zero),
        mistake(
            "signed",
            "Elements are read as signed numbers, from -8 to 7.",
            dequantize=lambda x, scale, zero: scale * (torch.where(x > 7, x - 16, x) - zero),
        ),
        Mistake(
            "int4-value-scales-by-head",
            "The scales of values are read in another layout, heads before tokens (vLLM 50084).",
            lambda a, c: with_scales(a, c, "value_scales", read=by_head),
        ),
        Mistake(
            "int4-key-scales-by-head",
            "The scales of keys are read in another layout, heads before tokens.",
            lambda a, c: with_scales(a, c, "key_scales", read=by_head),
        ),
        Mistake(
            "int4-scales-of-first-head",
            "The scales of the first head are used for all heads of a token.",
            lambda a, c: with_scales(a, c, "key_scales", "value_scales", read=first_head),
        ),
        Mistake("int4-value-scales-of-keys", "Values are multiplied by the scales of the keys.", of_the_keys),
    ),
)
OPERATIONS = (INT4,)
