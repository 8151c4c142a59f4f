"""Attention over four-bit pages, int4 and nvfp4: two elements per byte, and scales in pools of their own.

int4     rows turned by a Hadamard matrix, a scale and a zero point per token and KV head
nvfp4    e2m1 elements, an e4m3 scale per 16 of them, one number for all keys and one for all values

The bytes and the scales are drawn, not written by the reference. Scales differ by up to a factor of 32 between tokens,
heads and groups, so that one read in another place is far outside any tolerance.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refattn.four_bits import Int4Scales, Nvfp4Scales
from twinattn.kit.example import Arguments
from twinattn.kit.four_bits import GROUP, e2m1, hadamard, interleaved, with_zero_points
from twinattn.kit.operations.inputs import BATCH, LENS, Drawn, padding_of, rows_of, slots_of
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Oracle, Without
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
Scales = Callable[[Drawn, int, int, int, int], Tensor]  # draws the scales of a pool, from its sizes `n, p, hk, d`


def int4_scales(drawn: Drawn, n: int, p: int, hk: int, size: int) -> Tensor:
    """Draw a scale per row, with a zero point in its last four bits."""
    sizes = torch.exp2(drawn.uniform(n, p, hk, low=-7.0, high=-2.0, dtype=torch.float32))
    zeros = drawn.whole(0, 16, n, p, hk, dtype=torch.int32)
    return with_zero_points(sizes, zeros)


def nvfp4_scales(drawn: Drawn, n: int, p: int, hk: int, size: int) -> Tensor:
    """Draw an e4m3 scale per group of a row."""
    sizes = drawn.uniform(n, p, hk, size // GROUP, low=-8.0, high=0.0, dtype=torch.float32)
    return torch.exp2(sizes).to(torch.float8_e4m3fn)


def draw(case: Case, dtype: torch.dtype, scales: Scales) -> Inputs:
    """Draw queries, pools of bytes and their scales."""
    drawn = Drawn(case, dtype)
    a, past, free, n = paged(drawn)
    t, (h, hk), p = int(a["cu_seqlens_q"][-1]) + case["padding"], case["heads"], case["block_size"]
    d, dv = case["head_size"], case["head_size"] + case["more"]
    for name, size in (("key", d), ("value", dv)):
        a[f"{name}_cache"] = drawn.whole(0, 256, n, p, hk, size // 2).to(torch.uint8)
        a[f"{name}_scales"] = scales(drawn, n, p, hk, size)
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
    if "key_scale" in case.sizes:
        a |= {name: case[name] for name in ("key_scale", "value_scale")}
    unread = {name: expanded(free, a[name]) for name in POOLS}
    return Inputs(a, past | unread | dict(query=padding_of(a, a["query"])))


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
    d, dv = a["query"].shape[2], 2 * a["value_cache"].shape[-1]
    pools = []
    for name in ("key", "value"):
        quantized, scale = a[f"{name}_cache"].int(), a[f"{name}_scales"].contiguous()
        zero = (scale.view(torch.int32) & 15)[..., None].to(compute)
        numbers = pairs(quantized & 15, quantized >> 4).to(compute)
        pools.append(dequantize(numbers, scale.to(compute)[..., None], zero).flatten(0, 1))
    query = a["query"].to(compute)
    query = query @ hadamard(d, compute) * query_turn if query_turn else query
    out, lse = attended(a, query, *pools)
    turned_back = out @ hadamard(dv, compute) * output_turn if output_turn else out
    return sunk(a, turned_back, lse)


def attended(a: Arguments, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to dequantized pools, flattened to slots `[n * p, hk, d]`; return outputs without sinks, and LSEs."""
    h, dv = query.shape[1], values.shape[-1]
    out, lse = query.new_zeros(len(query), h, dv), query.new_full((len(query), h), -torch.inf)
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        slots = slots_of(a, i, s, a["key_cache"].shape[1])
        key, value = (x[slots].repeat_interleave(h // x.shape[1], dim=1).transpose(0, 1) for x in (keys, values))
        scores = query[q0:q1].transpose(0, 1) @ key.transpose(1, 2) * a["softmax_scale"]
        scores, (left, right) = biased(scores, a, q1 - q0), a["window_size"]
        ahead = torch.arange(s) - torch.arange(s - q1 + q0, s)[:, None]
        mask = (ahead <= 0) if a["causal"] else torch.ones_like(ahead, dtype=torch.bool)
        mask = mask & ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
        out[q0:q1], lse[q0:q1] = softmax(scores, mask, value)
    return out, lse


def each_group(scales: Tensor, size: int) -> Tensor:
    """Return the scale of each element of a row of some size, from those of its groups."""
    return scales.repeat_interleave(GROUP, -1)


def product(numbers: Tensor, scale: Tensor, of_all: float) -> Tensor:
    """Return dequantized elements."""
    return numbers * scale * of_all


def nvfp4_attention(
    a: Arguments,
    compute: torch.dtype,
    *,
    pairs: Callable[[Tensor, Tensor], Tensor] = interleaved,
    numbers: Callable[[Tensor], Tensor] = e2m1,
    spread: Callable[[Tensor, int], Tensor] = each_group,
    dequantize: Callable[[Tensor, Tensor, float], Tensor] = product,
) -> Answers:
    """Attend to dequantized keys and values.

    Args:
        a: the arguments of a call.
        compute: the type to compute in.
        pairs: puts the halves of the bytes together.
        numbers: the numbers of quantized elements.
        spread: the scale of each element from the scales of a row.
        dequantize: from numbers, their scales, and the number for all.
    """
    pools = []
    for name in ("key", "value"):
        quantized, scales = a[f"{name}_cache"].int(), a[f"{name}_scales"].to(compute)
        rows = numbers(pairs(quantized & 15, quantized >> 4)).to(compute)
        of_all = float(torch.tensor(a[f"{name}_scale"], dtype=torch.float32))
        pools.append(dequantize(rows, spread(scales, rows.shape[-1]), of_all).flatten(0, 1))
    return sunk(a, *attended(a, a["query"].to(compute), *pools))


# --- known mistakes ---


def by_head(scales: Tensor) -> Tensor:
    """Return scales read as if the heads of a page came before its tokens."""
    n, p, hk, *groups = scales.shape
    return scales.reshape(n, hk, p, *groups).transpose(1, 2)


def by_group(scales: Tensor) -> Tensor:
    """Return scales of nvfp4 read as if the groups of a page came before its tokens."""
    n, p, hk, groups = scales.shape
    return scales.reshape(n, hk, groups, p).permute(0, 3, 1, 2)


def with_scales(oracle: Oracle, *names: str, read: Callable[[Tensor], Tensor]) -> Oracle:
    """Return the oracle of a call in which some scales are read otherwise."""
    return lambda a, compute: oracle({**a, **{name: read(a[name]) for name in names}}, compute)


def of_the_keys(oracle: Oracle) -> Oracle:
    """Return the oracle of a call with the scales of keys for the values."""
    return lambda a, compute: oracle({**a, "value_scales": a["key_scales"]}, compute)


def first_head(scales: Tensor) -> Tensor:
    """Return the scales of the first head for all."""
    return scales[:, :, :1].expand(scales.shape)


def mistake(name: str, says: str, **wrong: Any) -> Mistake:
    """Return a mistake in a step of the formula."""
    oracle = int4_attention if name.startswith("int4-") else nvfp4_attention
    return Mistake(name, says, partial(oracle, **wrong))


def of_scales(kind: str, oracle: Oracle) -> tuple[Mistake, ...]:
    """Return the mistakes in reading the pools of scales."""
    return (
        Mistake(
            f"{kind}-value-scales-by-head",
            "The scales of values are read in another layout, heads before tokens (vLLM 50084).",
            with_scales(oracle, "value_scales", read=by_head),
        ),
        Mistake(
            f"{kind}-key-scales-by-head",
            "The scales of keys are read in another layout, heads before tokens.",
            with_scales(oracle, "key_scales", read=by_head),
        ),
        Mistake(
            f"{kind}-scales-of-first-head",
            "The scales of the first head are used for all heads of a token.",
            with_scales(oracle, "key_scales", "value_scales", read=first_head),
        ),
        Mistake(
            f"{kind}-value-scales-of-keys",
            "Values are multiplied by the scales of the keys.",
            of_the_keys(oracle),
        ),
    )


INT4 = Operation(
    name="int4_attention",
    function="attention",
    signature="as `quantized`, with pools of int4, two elements per byte, turned by a Hadamard matrix; `key_scales`, "
    "`value_scales` `[n, p, hk]`, each with its zero point in its last four bits, or both as `scales`; `causal`, "
    "`window_size`, `softcap`, `sinks`; queries are not rounded",
    draw=partial(draw, scales=int4_scales),
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
        mistake("int4-query-not-turned", "Keys are turned and queries are not.", query_turn=0.0),
        mistake("int4-output-not-turned", "The output is not turned back.", output_turn=0.0),
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
            "int4-halves-swapped",
            "The even elements are read from the high halves of the bytes.",
            pairs=lambda low, high: interleaved(high, low),
        ),
        mistake(
            "int4-halves-apart",
            "The low halves are read as the first half of a row, not as its even elements.",
            pairs=lambda low, high: torch.cat([low, high], -1),
        ),
        mistake(
            "int4-scale-twice",
            "Elements are multiplied by their scale twice (vLLM 48016).",
            dequantize=lambda x, scale, zero: scale * scale * (x - zero),
        ),
        mistake("int4-no-zero-point", "No zero point is taken off.", dequantize=lambda x, scale, zero: scale * x),
        mistake(
            "int4-zero-of-8", "All zero points are taken for 8.", dequantize=lambda x, scale, zero: scale * (x - 8)
        ),
        mistake(
            "int4-zero-unscaled", "The zero point is not scaled.", dequantize=lambda x, scale, zero: scale * x - zero
        ),
        mistake(
            "int4-signed",
            "Elements are read as signed numbers, from -8 to 7.",
            dequantize=lambda x, scale, zero: scale * (torch.where(x > 7, x - 16, x) - zero),
        ),
        *of_scales("int4", int4_attention),
    ),
)


NVFP4 = Operation(
    name="nvfp4_attention",
    function="attention",
    signature="as `quantized`, with pools of nvfp4, two e2m1 elements per byte; `key_scales` `[n, p, hk, d/16]`, "
    "`value_scales` `[n, p, hk, dv/16]` in e4m3, `key_scale`, `value_scale`, one number for all keys and one for all "
    "values, or all four as `scales`; `causal`, `window_size`, `softcap`, `sinks`; queries are not rounded",
    draw=partial(draw, scales=nvfp4_scales),
    oracle=nvfp4_attention,
    sizes={
        **INT4.sizes,
        **dict(head_size=(48, 16, 64), more=(0, 16), key_scale=(0.37, 1.0, 0.052), value_scale=(1.9, 1.0, 0.21)),
    },
    without={
        **INT4.without,
        **{name: Without(1.0, (name,)) for name in ("key_scale", "value_scale")},
    },
    options=INT4.options,
    dimensions={**INT4.dimensions, **{name: of_size(name, 513, multiple=GROUP) for name in ("head_size", "more")}},
    specials=INT4.specials,
    derived={
        **INT4.derived,
        "scales": lambda a: Nvfp4Scales(a["key_scales"], a["value_scales"], a["key_scale"], a["value_scale"]),
    },
    outputs=INT4.outputs,
    optional=INT4.optional,
    types=INT4.types,
    strided=INT4.strided,
    pools=POOLS,
    nan=INT4.nan,
    has_out=True,
    size=INT4.size,
    mistakes=(
        mistake(
            "nvfp4-halves-swapped",
            "The even elements are read from the high halves of the bytes.",
            pairs=lambda low, high: interleaved(high, low),
        ),
        mistake(
            "nvfp4-halves-apart",
            "The low halves are read as the first half of a row, not as its even elements.",
            pairs=lambda low, high: torch.cat([low, high], -1),
        ),
        mistake(
            "nvfp4-equal-steps",
            "Elements are read as sizes from 0 to 7 with a sign, of equal steps.",
            numbers=lambda x: (x & 7) * (1 - 2 * (x >> 3)),
        ),
        mistake("nvfp4-no-sign", "The sign is left out.", numbers=lambda x: e2m1(x & 7)),
        mistake(
            "nvfp4-groups-interleaved",
            "Element i has the scale i modulo the number of groups.",
            spread=lambda scales, size: scales.repeat(*[1] * (scales.ndim - 1), size // scales.shape[-1]),
        ),
        mistake(
            "nvfp4-first-group",
            "The scale of the first group is used for the whole row.",
            spread=lambda scales, size: scales[..., :1].expand(*scales.shape[:-1], size),
        ),
        mistake(
            "nvfp4-groups-of-32",
            "A scale is used for 32 elements, as in mxfp4.",
            spread=lambda scales, size: scales.repeat_interleave(2 * GROUP, -1)[..., :size],
        ),
        mistake(
            "nvfp4-scale-twice",
            "Elements are multiplied by the scale of their group twice (vLLM 48016).",
            dequantize=lambda x, scale, of_all: x * scale * scale * of_all,
        ),
        mistake(
            "nvfp4-number-ignored",
            "The number for all keys, or values, is left out.",
            dequantize=lambda x, scale, of_all: x * scale,
        ),
        mistake(
            "nvfp4-number-inverted",
            "Elements are divided by the number for all.",
            dequantize=lambda x, scale, of_all: x * scale / of_all,
        ),
        mistake(
            "nvfp4-number-twice",
            "Elements are multiplied by the number for all twice.",
            dequantize=lambda x, scale, of_all: x * scale * of_all**2,
        ),
        *of_scales("nvfp4", nvfp4_attention),
        Mistake(
            "nvfp4-value-scales-by-group",
            "The scales of values are read in another layout, groups before tokens.",
            with_scales(nvfp4_attention, "value_scales", read=by_group),
        ),
    ),
)
OPERATIONS = (INT4, NVFP4)
