"""Attention that is not among the kit's paths: index scores, int8 pools, sinks added to an output."""

from typing import Any

import torch
from torch import Tensor

from refattn import chunked_prefill, quantized
from refattn.options import AttentionOptions
from refattn.scales import Int8Scales
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import (
    BATCH,
    LENS,
    ODD_LENS,
    Drawn,
    batch_of,
    padding_of,
    rows_of,
    slots_of,
    unused,
)
from twinattn.kit.operations.operation import (
    Answers,
    Case,
    Inputs,
    Mistake,
    Operation,
    Special,
    Without,
)
from twinattn.kit.operations.tiles import BLOCKS, Dimension, of_lengths, of_size
from twinattn.kit.operations.written import index_parts

EMPTY = Special("empty", "Sequences may have no query, no key, or more queries than keys.", dict(lens=ODD_LENS))
PADDING = Special("padding", "Rows after the last sequence return 0, and -inf as LSE.", dict(padding=(1, 3)))
LONG = Special("long", "There may be many keys, which kernels split.", dict(lens=(((1, 700), (1, 65)), ((2, 1100),))))


def visible(q: int, s: int) -> Tensor:
    """Return the causal mask of the last `q` of `s` tokens."""
    return torch.arange(s) <= torch.arange(s - q, s)[:, None]


def softmax(scores: Tensor, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[t, h, dv]` and the LSE `[t, h]` for scores `[h, t, s]` and values `[h, s, dv]`."""
    scores = scores.masked_fill(~mask, -torch.inf)
    most = (
        scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        if scores.shape[-1]
        else scores.new_zeros(*scores.shape[:2], 1)
    )
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total.masked_fill(total == 0, 1.0)) @ values
    return out.transpose(0, 1), (total.log() + most)[..., 0].transpose(0, 1)


def biased(scores: Tensor, a: Arguments, q: int) -> Tensor:
    """Apply the cap and the biases of a call to the scores of a sequence, `[h, t, s]`."""
    if a["softcap"]:
        scores = a["softcap"] * torch.tanh(scores / a["softcap"])
    if a["alibi_slopes"] is not None:
        s = scores.shape[-1]
        distance = (torch.arange(s - q, s)[:, None] - torch.arange(s)).abs()
        scores = scores - a["alibi_slopes"].to(scores.dtype)[:, None, None] * distance
    return scores


def sunk(a: Arguments, out: Tensor, lse: Tensor) -> Answers:
    """Return outputs and log-sum-exps with the sinks of a call, if it has some, but not in rows of padding."""
    if a["sinks"] is None:
        return dict(out=out, lse=lse)
    found = with_sinks(dict(out=out, lse=lse, sinks=a["sinks"]), out.dtype)
    end = int(a["cu_seqlens_q"][-1])
    found["out"], found["lse"] = found["out"].to(out.dtype), found["lse"].to(out.dtype)
    found["lse"][end:] = -torch.inf
    return found


def options_of(a: Arguments) -> AttentionOptions:
    """Return the options of a call."""
    names = ("softmax_scale", "softcap", "alibi_slopes", "sinks")
    return AttentionOptions(**{name: a[name] for name in names})


def paged(drawn: Drawn) -> tuple[Arguments, dict[str, Tensor], Tensor, int]:
    """Draw a ragged batch and its table; return both, masks of unused entries and slots, and the number of blocks."""
    case = drawn.case
    a, lens = drawn.lengths(case["lens"]), [s for _, s in case["lens"]]
    table, past, n = drawn.table(lens, case["block_size"])
    return a | table, past, unused(table["block_table"], lens, n, case["block_size"]), n


def expanded(free: Tensor, pool: Tensor) -> Tensor:
    """Return a mask of the elements of a pool in free slots."""
    return free.reshape(*free.shape, *[1] * (pool.ndim - 2)).expand(pool.shape)


# --- index scores ---


def draw_scores(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw index queries, weights of both signs, and a pool of index keys, unquantized or as bytes."""
    drawn = Drawn(case, dtype)
    a, past, free, n = paged(drawn)
    t, h, d, p = int(a["cu_seqlens_q"][-1]) + case["padding"], case["heads"], case["head_size"], case["block_size"]
    a |= dict(
        query=drawn.normal(t, h, d), weights=drawn.normal(t, h, dtype=torch.float32), index_cache=drawn.normal(n, p, d)
    )
    unread = dict(index_cache=expanded(free, a["index_cache"]))
    dense: frozenset[str] = frozenset()
    if case["bytes"]:
        pages = drawn.whole(0, 2, n, p, d).to(torch.uint8) * 128 + drawn.whole(30, 70, n, p, d).to(torch.uint8)
        scales = drawn.uniform(n, p, 1, low=0.3, dtype=torch.float32).view(torch.uint8)
        a["index_cache"] = torch.cat([pages.flatten(1), scales.flatten(1)], dim=1).reshape(n, p, d + 4)
        parts = [free[..., None].expand(n, p, size).flatten(1) for size in (d, 4)]
        unread, dense = dict(index_cache=torch.cat(parts, dim=1).reshape(n, p, d + 4)), frozenset({"index_cache"})
    for name in ("query", "weights"):
        unread[name] = padding_of(a, a[name])
    return Inputs(a, past | unread, dense)


def index_scores(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return the weighted sum over heads of the ReLU of the products."""
    pool, p = a["index_cache"], a["index_cache"].shape[1]
    keys = index_parts(pool)[0] * index_parts(pool)[1] if pool.dtype == torch.uint8 else pool
    keys = keys.flatten(0, 1).to(compute)
    out = torch.full((len(a["query"]), a["max_seq_len"]), -torch.inf, dtype=compute)
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        key, sums = keys[slots_of(a, i, s, p)], torch.zeros(q1 - q0, s, dtype=compute)
        for head in range(a["query"].shape[1]):
            products = a["query"][q0:q1, head].to(compute) @ key.T
            weight = a["weights"][q0:q1, head, None].to(compute)
            if form == "weights first":
                sums += (weight * products).relu()
            else:
                sums += weight * (products if form == "no relu" else products.relu())
        mask = visible(q1 - q0, s)
        if form == "top left":
            mask = torch.arange(s) <= torch.arange(q1 - q0)[:, None]
        out[q0:q1, :s] = sums if form == "all" else sums.masked_fill(~mask, -torch.inf)
    return dict(out=out)


INDEX_SCORES = Operation(
    name="index_scores",
    function="scores",
    signature="`query` `[t, h, d]`, `weights` `[t, h]`, `index_cache` (as `index_write`), and of the batch "
    "`cu_seqlens_q`, `seq_lens`, "
    "`block_table`, `max_seq_len` and the like; it returns float32 `[t, max_seq_len]`, -inf where a query may not see",
    draw=draw_scores,
    oracle=index_scores,
    sizes=dict(
        lens=LENS,
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 5),
        head_size=(16, 64, 20),
        bytes=(False, True),
        padding=(0, 2),
    ),
    dimensions=of_lengths(queries=1025, sequences=513)
    | dict(block_size=of_size("block_size", BLOCKS, lens=((2, 300), (1, 9))), padding=of_size("padding", 1025))
    | dict(heads=of_size("heads", 257), head_size=of_size("head_size", 513, 4)),
    specials=(
        EMPTY,
        Special("padding", "Rows after the last sequence are -inf.", dict(padding=(1, 3))),
        LONG,
        Special(
            "many keys",
            "A sequence may have more keys than 2^17.",
            dict(lens=(((2, 2**17 + 28),),), heads=(1,), head_size=(8,), block_size=(16,)),
            once=True,
        ),
        Special("many heads", "There may be 64 index heads and more.", dict(heads=(64, 70), head_size=(128,))),
    ),
    derived={**BATCH, "plan": lambda a: chunked_prefill.plan(batch_of(a), block_size=a["index_cache"].shape[1])},
    strided=("query", "weights", "index_cache"),
    pools=("index_cache",),
    nan=("query",),
    size=lambda a: (
        float(a["query"].double().norm(dim=-1).mul(a["weights"].double().abs()).sum(-1).amax()) * 6
        if len(a["query"])
        else 0.0
    ),
    mistakes=(
        Mistake(
            "weights-before-relu",
            "Products are multiplied by their weight before the ReLU: those with a negative weight vanish.",
            lambda a, c: index_scores(a, c, "weights first"),
        ),
        Mistake("without-relu", "There is no ReLU.", lambda a, c: index_scores(a, c, "no relu")),
        Mistake("scores-not-causal", "Keys after a query have scores.", lambda a, c: index_scores(a, c, "all")),
        Mistake(
            "scores-top-left",
            "The causal mask is aligned at the top left.",
            lambda a, c: index_scores(a, c, "top left"),
        ),
    ),
)


# --- int8 pools ---


TINY = {  # elements of queries under a large scale
    torch.float32: (1e-9, 1e-24, 1e-32, 1e-5),
    torch.bfloat16: (1e-9, 1e-24, 1e-32, 1e-5),
    torch.float16: (2.0**-12, 2.0**-6),
}


def draw_int8(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw queries, int8 pools and their scales."""
    drawn = Drawn(case, dtype)
    a, past, free, n = paged(drawn)
    t, (h, hk), p, d = (
        int(a["cu_seqlens_q"][-1]) + case["padding"],
        case["heads"],
        case["block_size"],
        case["head_size"],
    )
    dv = d + case["more"]
    values = drawn.whole(-127, 128, n, p, hk, dv).to(torch.int8) if case["value_scales"] else drawn.normal(n, p, hk, dv)
    a |= dict(
        query=drawn.normal(t, h, d),
        key_cache=drawn.whole(-127, 128, n, p, hk, d).to(torch.int8),
        value_cache=values,
        key_scales=drawn.uniform(n, p, hk, low=0.005, high=0.03, dtype=torch.float32),
        value_scales=drawn.uniform(hk, dv, low=0.005, high=0.03, dtype=torch.float32) if case["value_scales"] else None,
        softmax_scale=d**-0.5 if case["softmax_scale"] is None else case["softmax_scale"],
        return_lse=True,
        sinks=drawn.normal(h, dtype=torch.float32) if case["sinks"] else None,
        softcap=case["softcap"],
        alibi_slopes=None,
        causal=case["causal"],
        window_size=case["window_size"],
    )
    if case["values"] == "tiny":
        tiny = TINY[dtype][case.seed % len(TINY[dtype])]
        a["query"] = a["query"] * tiny
        a["softmax_scale"] /= 1.0 if case["softmax_scale"] is None else tiny
    quotient = a["query"].double() / (a["query"].double().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    a["query"][(quotient % 1 - 0.5).abs() < 1e-4] = 0  # near halves, which float32 and float64 may round differently
    if case["values"] == "zeros":
        a["query"][::2], a["query"][1::2, :1] = 0, 0
    unread = {name: expanded(free, a[name]) for name in ("key_cache", "value_cache", "key_scales")}
    return Inputs(a, past | unread | dict(query=padding_of(a, a["query"])))


def int8_plan(a: Arguments) -> Any:
    """Return the plan of a step."""
    more = dict(causal=a["causal"], window_size=a["window_size"])
    return quantized.plan(batch_of(a), block_size=a["key_cache"].shape[1], **more)


def int8_attention(a: Arguments, compute: torch.dtype, *, one_scale: bool = False, round_query: bool = True) -> Answers:
    """Round the queries to int8, as keys are, and attend over the dequantized keys and values."""
    query, (h, dv) = a["query"].double(), (a["query"].shape[1], a["value_cache"].shape[-1])
    scale = (query.abs().amax(-1, keepdim=True).float() / 127).double()
    scale = scale.masked_fill(scale == 0, 1.0)
    query = ((query / scale).round() * scale if round_query else query).to(compute)
    of_key = a["key_scales"][..., :1].expand(a["key_scales"].shape) if one_scale else a["key_scales"]
    keys = (a["key_cache"].to(compute) * of_key.to(compute)[..., None]).flatten(0, 1)
    values = a["value_cache"].to(compute)
    values = (values if a["value_scales"] is None else values * a["value_scales"].to(compute)).flatten(0, 1)
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
    return sunk(a, out, lse)


INT8 = Operation(
    name="int8_attention",
    function="attention",
    signature="as `quantized`, with pools of int8 (values of floating point without `value_scales`); "
    "`key_scales` `[n, p, hk]`, "
    "`value_scales` `[hk, dv]`, or both as `scales`; `causal`, `window_size`, `softcap`, `sinks`; queries are rounded "
    "as keys are",
    draw=draw_int8,
    oracle=int8_attention,
    sizes=dict(
        lens=LENS,
        block_size=(4, 1, 16, 3),
        heads=((2, 1), (1, 1), (6, 2), (3, 3), (10, 2), (32, 4), (12, 1)),
        head_size=(16, 64, 20),
        more=(0, 8),
        value_scales=(True, False),
        padding=(0, 2),
        values=("normal",),
        causal=(True, False),
        window_size=((-1, -1), (3, 0), (20, 2), (-1, 1)),
        softmax_scale=(0.21, None),
        softcap=(0.0, 2.0),
        sinks=(False, True),
    ),
    without=dict(softmax_scale=Without(None, ("softmax_scale",)), value_scales=Without(False, ("value_scales",))),
    options=dict(causal=True, window_size=(-1, -1), softcap=0.0, sinks=False),
    dimensions=of_lengths(queries=513, sequences=513)
    | dict(block_size=of_size("block_size", BLOCKS, lens=((2, 300), (1, 9))), padding=of_size("padding", 1025))
    | dict(heads=Dimension(lambda n: dict(heads=(n, 1)), 129))
    | {name: of_size(name, 513) for name in ("head_size", "more")},
    specials=(
        EMPTY,
        PADDING,
        LONG,
        Special("tiny", "Queries may be tiny.", dict(values=("tiny",))),
        Special("zeros", "Queries may be zeros: their scale is 1.", dict(values=("zeros",))),
    ),
    derived={
        **BATCH,
        "plan": int8_plan,
        "block_size": lambda a: a["key_cache"].shape[1],
        "scales": lambda a: Int8Scales(a["key_scales"], a["value_scales"]),
        "options": options_of,
    },
    outputs=("out", "lse"),
    optional=frozenset({"lse"}),
    types=dict(out="query"),
    strided=("query", "key_cache", "value_cache", "key_scales", "value_scales"),
    pools=("key_cache", "value_cache", "key_scales"),
    nan=("query", "key_scales"),
    has_out=True,
    size=lambda a: 8.0,
    mistakes=(
        Mistake(
            "int8-scale-of-first-head",
            "The scale of the first head is used for all heads of a token.",
            lambda a, c: int8_attention(a, c, one_scale=True),
        ),
        Mistake(
            "int8-query-not-rounded",
            "Queries are not rounded as keys are.",
            lambda a, c: int8_attention(a, c, round_query=False),
        ),
        Mistake(
            "int8-values-without-scale",
            "Values are not multiplied by their scales.",
            lambda a, c: int8_attention({**a, "value_scales": None}, c),
        ),
    ),
)


# --- sinks ---


def draw_sinks(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw outputs and log-sum-exps, in some cases with fully masked queries."""
    drawn, t, h = Drawn(case, dtype), case["tokens"], case["heads"]
    lse = drawn.normal(t, h, dtype=torch.float32) * case["spread"]
    sinks = drawn.normal(h, dtype=torch.float32) * case["spread"]
    if case["lse_dtype"] == "float64":  # differences that float32 loses
        lse, sinks = lse.double() + 1e5, sinks + 1e5
    if case["blind"]:
        lse[::2] = -torch.inf
    a = dict(out=drawn.normal(t, h, case["head_size"]), lse=lse, sinks=sinks)
    return Inputs(a, dict(out=(lse == -torch.inf)[..., None].expand(a["out"].shape)))


def with_sinks(a: Arguments, compute: torch.dtype, times: float = 1.0, base: float = 1.0) -> Answers:
    """Return the outputs with one more logit in the denominator."""
    compute = torch.promote_types(compute, a["lse"].dtype)
    lse, sink = a["lse"].to(compute), a["sinks"].to(compute) * base + torch.tensor(times, dtype=compute).log()
    weight = (lse - sink).sigmoid()
    out = a["out"].to(compute).masked_fill((lse == -torch.inf)[..., None], 0.0) * weight[..., None]
    return dict(out=out, lse=torch.logaddexp(lse, sink.expand_as(lse)))


ADD_SINKS = Operation(
    name="add_sinks",
    function="add_sinks",
    signature="`out` `[t, h, dv]`, `lse` `[t, h]`, `sinks` `[h]`; it returns both with the sinks counted once",
    draw=draw_sinks,
    oracle=with_sinks,
    sizes=dict(
        tokens=(5, 1, 64, 130),
        heads=(2, 1, 7),
        head_size=(8, 64, 5),
        spread=(1.0, 5.0),
        blind=(False, True),
        lse_dtype=("float32",),
    ),
    dimensions=dict(
        tokens=of_size("tokens"), heads=of_size("heads", tokens=5), head_size=of_size("head_size", tokens=5)
    ),
    specials=(
        Special(
            "blind",
            "A fully masked query returns 0, and the sink as LSE, whatever its output held.",
            dict(blind=(True,)),
        ),
        Special("range", "Log-sum-exps and sinks may be in the hundreds.", dict(spread=(60.0, 400.0))),
        Special("float64", "Log-sum-exps may be of float64: it computes in that.", dict(lse_dtype=("float64",))),
        Special("empty", "There may be no row.", dict(tokens=(0,))),
        Special("many", "There may be more rows than 16 bits count.", dict(tokens=(65600,), heads=(1,)), once=True),
    ),
    outputs=("out", "lse"),
    types=dict(out="out"),
    strided=("out", "lse", "sinks"),
    nan=("out", "lse"),
    size=lambda a: max(4.0, float(a["sinks"].abs().amax())),
    mistakes=(
        Mistake("sinks-twice", "Sinks count twice.", lambda a, c: with_sinks(a, c, 2.0)),
        Mistake(
            "sinks-in-base-2",
            "Sinks are treated as logarithms to base 2.",
            lambda a, c: with_sinks(a, c, base=0.6931471805599453),
        ),
        Mistake(
            "output-not-smaller",
            "The outputs are unchanged.",
            lambda a, c: with_sinks(a, c) | dict(out=a["out"].to(torch.float64)),
        ),
    ),
)


OPERATIONS = (INDEX_SCORES, INT8, ADD_SINKS)
