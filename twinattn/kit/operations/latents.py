"""Latents: a write of new ones, and a prefill over keys and values expanded from them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from refattn import mla
from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE, packed_parts, packed_size
from twinattn.kit import packed
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, LENS, Drawn, batch_of, padding_of, rows_of, slots_of, unused
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special
from twinattn.kit.operations.scores import PADDING, biased, expanded, options_of, softmax, sunk, visible
from twinattn.kit.operations.tiles import BLOCKS, of_lengths, of_size
from twinattn.kit.operations.written import (
    EMPTY,
    EXACT,
    FP8,
    HALF,
    MANY,
    MANY_TOKENS,
    PAST_TILES,
    TOKENS,
    between,
    fp8_ties,
    overwritten,
    to_fp8,
    written,
)

LARGEST = torch.finfo(torch.float8_e4m3fn).max
PACKED_RANK = 2 * LATENT_GROUP  # elements of a packed latent


def draw_latents(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw latents and rotary keys, and a pool, unquantized or fp8, with unused elements at the end of rows."""
    drawn, t, p, r, rope = Drawn(case, dtype), case["tokens"], case["block_size"], case["rank"], case["rope"]
    n, rows = t // p + 3, t + case["padding"]
    latent, rope_key = drawn.normal(rows, r), drawn.normal(rows, rope)
    if case["values"] == "large" and rows:
        latent[::2] *= 1000
        rope_key[1::2, :1] = torch.inf
        latent[1::3, :1], latent[::3, 1:2] = torch.inf, -torch.inf
    shape = (n, p, r + rope + case["more"])
    kind, scale = FP8.get(case["stored"]), 0.0713
    if case["stored"] == "packed":
        return packed_inputs(drawn, t, n)
    if case["values"] == "ties" and kind is not None:
        scale = EXACT[case.seed % len(EXACT)]
        latent, rope_key = (fp8_ties(drawn, x.shape, torch.tensor(scale).double(), kind) for x in (latent, rope_key))
    cache = drawn.normal(*shape) if kind is None else drawn.whole(0, 120, *shape).to(torch.uint8).view(kind)
    slots = drawn.slots(t, n * p)
    padding = torch.ones(rows, dtype=torch.bool)
    padding[:t] = slots < 0
    arguments: Arguments = dict(
        latent=latent,
        rope_key=rope_key,
        cache=cache,
        slot_mapping=slots,
        cache_scale=1.0 if kind is None else scale,
        exact_halves=case["values"] == "ties",
    )
    unread = {name: padding[:, None].expand(arguments[name].shape) for name in ("latent", "rope_key")}
    written_rows = overwritten(cache, slots) & (torch.arange(shape[-1]) < r + rope)
    return Inputs(arguments, unread | dict(cache=written_rows))


def packed_inputs(drawn: Drawn, t: int, n: int) -> Inputs:
    """Draw latents of whole groups of 128, some of one size and some of another, and a pool of packed rows.

    Of the values "zeros" some groups are, and of "infinite" some have an infinity, or a NaN.
    """
    case, p = drawn.case, drawn.case["block_size"]
    rows, rank, rope = t + case["padding"], case["groups"] * LATENT_GROUP, case["rope"] + case["rope"] % 2
    sizes = 2.0 ** drawn.whole(-9, 6, rows, case["groups"], 1).to(torch.float32)
    latent = (drawn.normal(rows, case["groups"], LATENT_GROUP, dtype=torch.float32) * sizes).to(drawn.dtype)
    which = drawn.whole(0, 3, rows, case["groups"])
    if case["values"] == "zeros":
        latent[which == 0] = 0.0
    if case["values"] == "infinite":
        latent[..., 5][which == 0], latent[..., 77][which == 1] = torch.inf, -torch.inf
        latent[..., 1][(which == 0) & (torch.arange(rows) % 2 == 1)[:, None]] = torch.nan
    latent, rope_key = latent.flatten(1), drawn.normal(rows, rope)
    low, _, high = to_fp8(latent.double() / scales_of({}, "packed", latent), PACKED_FORMAT)
    latent[(low != high) & ~low.isnan()] = 0
    c = packed_size(rank, rope) + 4 * case["more"]
    cache, slots = drawn.whole(0, 120, n, p, c).to(torch.uint8), drawn.slots(t, n * p)
    padding = torch.ones(rows, dtype=torch.bool)
    padding[:t] = slots < 0
    arguments: Arguments = dict(latent=latent, rope_key=rope_key, cache=cache, slot_mapping=slots, cache_scale=1.0)
    unread = {name: padding[:, None].expand(arguments[name].shape) for name in ("latent", "rope_key")}
    return Inputs(arguments | dict(exact_halves=False), unread, frozenset({"cache"}))


def packed_written(a: Arguments, form: str = "right") -> Answers:
    """Return the parts of packed rows after the write: values, scales, the bits of rotary keys, and unused bytes."""
    t, rank, rope = len(a["slot_mapping"]), a["latent"].shape[1], a["rope_key"].shape[1]
    latent, parts = a["latent"][:t], seen_rows(a["cache"], rank, rope)
    scale = scales_of(a, "packed", latent)
    if form == "one scale":
        scale = scale.amax(-1, keepdim=True).expand_as(scale)
    if form == "infinity saturates":
        finite = latent.masked_fill(~latent.isfinite(), 0.0)
        latent = torch.where(latent.isinf(), latent.sign() * finite.abs().amax(), latent)
        scale = scales_of(a, "packed", latent)
    near = [scale[:, ::LATENT_GROUP].float() * (1 + off) for off in (-HALF, 0.0, HALF)]
    rope_key = a["rope_key"][:t].to(torch.bfloat16)
    if form == "rope bits" and a["rope_key"].itemsize == 2:
        rope_key = a["rope_key"][:t].contiguous().view(torch.bfloat16)
    after: Answers = dict(
        values=written(parts["values"], to_fp8(latent.double() / scale, PACKED_FORMAT), a["slot_mapping"]),
        scales=between(written(parts["scales"], near, a["slot_mapping"])),
        rope_key=written(parts["rope_key"], [rope_key.view(torch.int16)], a["slot_mapping"])[0],
        rest=parts["rest"],
    )
    if form == "zero by zero":
        zeros = (latent.unflatten(1, (-1, LATENT_GROUP)).abs().amax(-1) == 0).float()
        (empty,) = written(torch.zeros_like(parts["scales"]), [zeros], a["slot_mapping"])
        by_element = empty.repeat_interleave(LATENT_GROUP, -1) > 0
        after["scales"] = [x.masked_fill(empty > 0, 0.0) for x in after["scales"]]
        after["values"] = [x.masked_fill(by_element, torch.nan) for x in after["values"]]
    return without_lost_values(after, after["scales"][0])


def seen_rows(cache: Tensor, rank: int, rope: int) -> dict[str, Tensor]:
    """Return the parts of packed rows as numbers, except rotary keys, which are bits."""
    rows = cache.detach().cpu().contiguous()
    values, scales, rope_key = packed_parts(rows, rank, rope)
    numbers = values.contiguous().view(PACKED_FORMAT).float()
    found = dict(values=numbers, scales=scales.clone(), rope_key=rope_key.contiguous().view(torch.int16))
    return found | dict(rest=rows[..., packed_size(rank, rope) :])


def without_lost_values(parts: dict[str, Any], scales: Tensor) -> Answers:
    """Zero the values under a scale that is not finite, which are all read as NaN, and let each such scale be NaN."""
    lost = ~scales.isfinite()
    by_element = lost.repeat_interleave(LATENT_GROUP, -1)

    def hide(x: Any, of: Tensor, number: float) -> Any:
        return [y.masked_fill(of, number) for y in x] if isinstance(x, list) else x.masked_fill(of, number)

    return parts | dict(values=hide(parts["values"], by_element, 0.0), scales=hide(parts["scales"], lost, torch.nan))


def seen_latents(came: Any, a: Arguments) -> Answers:
    """Return the content of a pool: fp8 as numbers, packed rows by their parts."""
    if a["cache"].dtype != torch.uint8:
        return dict(cache=a["cache"].detach().cpu().float() if a["cache"].itemsize == 1 else a["cache"])
    parts = seen_rows(a["cache"], a["latent"].shape[1], a["rope_key"].shape[1])
    return without_lost_values(parts, parts["scales"])


def latents_written(
    a: Arguments, compute: torch.dtype, rope_scale: float | None = None, form: str = "right"
) -> Answers:
    """Return the pool after the write, an fp8 pool as float32."""
    cache, t = a["cache"], len(a["slot_mapping"])
    if cache.dtype == torch.uint8:
        return packed_written(a, form)
    parts = [x[:t].double() for x in (a["latent"], a["rope_key"])]
    width = sum(x.shape[1] for x in parts)
    if cache.dtype not in FP8.values():
        rows = [torch.cat(parts, dim=1)]
        numbers = cache
    else:
        scale = float(torch.tensor(a["cache_scale"], dtype=torch.float32))
        parts = [parts[0] / scale, parts[1] / (scale if rope_scale is None else rope_scale)]
        off = 0.0 if a["exact_halves"] else HALF
        rows, numbers = to_fp8(torch.cat(parts, dim=1), cache.dtype, off), cache.float()
    after = written(numbers[..., :width], rows, a["slot_mapping"])
    return dict(cache=[torch.cat([x, numbers[..., width:]], dim=-1) for x in after])


MLA_WRITE = Operation(
    name="mla_write",
    function="write",
    signature="`latent` `[rows, r]`, `rope_key` `[rows, rope]`, `cache` `[n, p, c]` of their type, of fp8 or of "
    "packed rows, changed in place; `slot_mapping` `[t]`; `cache_scale`",
    draw=draw_latents,
    oracle=latents_written,
    sizes=dict(
        tokens=TOKENS,
        block_size=(4, 1, 16, 3),
        rank=(16, 64, 5),
        rope=(8, 3),
        groups=(1, 4, 2),
        more=(0, 4),
        padding=(0, 3),
        stored=("numbers",),
        values=("normal",),
    ),
    dimensions=PAST_TILES | {name: of_size(name, tokens=5) for name in ("rank", "rope", "more")},
    specials=(
        Special("fp8", "A pool may hold fp8 under one scale.", dict(stored=("e4m3", "e5m2")), ("cache_scale",)),
        Special(
            "ties",
            "A quotient halfway between two numbers of fp8 is rounded to the even one.",
            dict(values=("ties",), stored=("e4m3", "e5m2")),
            ("cache_scale",),
        ),
        Special(
            "packed",
            "A pool may hold packed rows: a scale for each 128 elements, and rotary keys in bfloat16.",
            dict(stored=("packed",), values=("normal", "zeros")),
            ("cache_scale",),
        ),
        Special(
            "packed infinities",
            "In packed rows an infinity or a NaN makes all elements under its scale NaN, and no others.",
            dict(stored=("packed",), values=("infinite",)),
            ("cache_scale",),
        ),
        EMPTY,
        Special("many", MANY_TOKENS.promise, dict(tokens=(MANY,), rank=(5,)), once=True),
        Special(
            "saturates",
            "Numbers beyond fp8, infinity too, become its largest.",
            dict(values=("large",), stored=("e4m3", "e5m2")),
            ("cache_scale",),
        ),
    ),
    outputs=(),
    changes=("cache",),
    exact=frozenset({"cache", "values", "scales", "rope_key", "rest"}),
    strided=("latent", "rope_key", "cache", "slot_mapping"),
    pools=("cache",),
    flips=("slot_mapping",),
    seen=seen_latents,
    mistakes=(
        *(
            Mistake(
                name,
                says,
                partial(latents_written, form=form),
            )
            for name, says, form in (
                ("packed-one-scale", "All groups of a packed row have the scale of the largest.", "one scale"),
                (
                    "packed-zeros-by-zero",
                    "A group of zeros has a scale of 0, by which its elements are divided.",
                    "zero by zero",
                ),
                ("packed-infinity-saturates", "An infinity becomes the largest finite number.", "infinity saturates"),
                ("packed-rotary-bits", "The bits of a rotary key in fp16 are taken as bfloat16.", "rope bits"),
            )
        ),
        Mistake(
            "rope-without-scale", "Rotary keys are not divided by the scale.", lambda a, c: latents_written(a, c, 1.0)
        ),
        Mistake(
            "rope-before-latent",
            "The rotary key comes before the latent.",
            lambda a, c: latents_written({**a, "latent": a["rope_key"], "rope_key": a["latent"]}, c),
        ),
    ),
)

# --- a prefill over latents ---


def draw_prefill(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new tokens, and a pool with the latents of their context: slots of new tokens may not be read."""
    drawn = Drawn(case, dtype)
    lens = case["lens"]
    a = drawn.lengths(lens)
    table, past, n = drawn.table([s for _, s in lens], case["block_size"])
    a |= table
    free = unused(table["block_table"], [s - q for q, s in lens], n, case["block_size"])
    t, h, r, rope, nope = (
        int(a["cu_seqlens_q"][-1]) + case["padding"],
        *(case[x] for x in ("heads", "rank", "rope", "nope")),
    )
    kind, scale = FP8.get(case["stored"]), 1.0
    shape = n, case["block_size"], r + rope + case["more"]
    if kind is None:
        cache = drawn.normal(*shape)
    else:
        cache, scale = drawn.normal(*shape, dtype=torch.float32).mul(14).to(kind), 0.0713
    if case["stored"] == "packed":
        r, rope = PACKED_RANK, rope + rope % 2
        numbers = drawn.normal(n, case["block_size"], r + rope, dtype=torch.float32)
        cache = packed.pool(numbers, r, packed.KINDS[case.seed % len(packed.KINDS)], case.seed)
    a |= dict(
        query=drawn.normal(t, h, nope + rope),
        latent=drawn.normal(t, r),
        rope_key=drawn.normal(t, rope),
        cache=cache,
        cache_scale=scale,
        sinks=drawn.normal(h, dtype=torch.float32) if case["sinks"] else None,
        alibi_slopes=drawn.uniform(h, low=0.01, high=0.4, dtype=torch.float32) if case["alibi_slopes"] else None,
        softcap=case["softcap"],
        max_context_len=case["max_context_len"] and max((s - q for q, s in lens), default=0) + 5,
        key_projection=drawn.normal(h, nope, r) / r**0.5,
        value_projection=drawn.normal(h, case["value_size"], r) / r**0.5,
        softmax_scale=0.23,
        return_lse=True,
        workspace=case["workspace"],
    )
    without_ties(a, case["stored"])
    unread = expanded(free, a["cache"]).clone()
    unread[..., packed_size(r, rope) if case["stored"] == "packed" else r + rope :] = True
    dense = frozenset({"cache"}) if case["stored"] == "packed" else frozenset[str]()
    of_rows = {x: padding_of(a, a[x]) for x in ("query", "latent", "rope_key")}
    return Inputs(a, past | dict(cache=unread) | of_rows, dense)


def without_ties(a: Arguments, stored: str) -> None:
    """Zero the new latents that are halfway between two quantized values, up to the rounding of a quotient."""
    kind = torch.float8_e4m3fn if stored == "packed" else FP8.get(stored)
    for name in ("latent", "rope_key") if stored != "packed" else ("latent",):
        if kind is None:
            continue
        low, _, high = to_fp8(a[name].double() / scales_of(a, stored, a[name]), kind)
        a[name][low != high] = 0


def scales_of(a: Arguments, stored: str, latent: Tensor) -> Tensor:
    """Return the scale of each element of new latents: that of the pool, or of its group, computed."""
    if stored != "packed":
        return torch.tensor(a["cache_scale"], dtype=torch.float32).double()
    most = latent.double().unflatten(-1, (-1, LATENT_GROUP)).abs().amax(-1)
    return (most / LARGEST).float().clamp(min=SMALLEST_SCALE).double().repeat_interleave(LATENT_GROUP, -1)


def as_read(a: Arguments, *, rounded: bool = True, scaled: bool = True) -> tuple[Tensor, Tensor]:
    """Return the slots of the pool `[slots, r + rope]` and the new tokens `[t, r + rope]`, as numbers in float64."""
    cache, latent, rope_key = a["cache"].flatten(0, 1), a["latent"], a["rope_key"]
    rank, rope = latent.shape[1], rope_key.shape[1]
    if cache.dtype == torch.uint8:
        quantized, scales, rotary = packed_parts(cache, rank, rope)
        by_element = scales.double().repeat_interleave(LATENT_GROUP, -1)
        rows = torch.cat([quantized.view(torch.float8_e4m3fn).double() * by_element, rotary.double()], dim=1)
        if rounded:
            scale = scales_of(a, "packed", latent)
            latent = to_fp8(latent.double() / scale, torch.float8_e4m3fn)[1].double() * scale
            rope_key = rope_key.to(torch.bfloat16)
    elif cache.dtype in FP8.values():
        scale = scales_of(a, "", latent)
        rows = cache[:, : rank + rope].double() * (scale if scaled else 1.0)
        if rounded:
            latent, rope_key = (to_fp8(x.double() / scale, cache.dtype)[1].double() * scale for x in (latent, rope_key))
    else:
        rows = cache[:, : rank + rope].double()
    return rows, torch.cat([latent.double(), rope_key.double()], dim=1)


def prefilled(
    a: Arguments, compute: torch.dtype, *, context: bool = True, causal: bool = True, **reads: bool
) -> Answers:
    """Expand keys and values of all tokens of a sequence, and attend in one softmax."""
    rank, h = a["latent"].shape[1], a["query"].shape[1]
    query, (rows, new) = a["query"].to(compute), (x.to(compute) for x in as_read(a, **reads))
    to_key, to_value = a["key_projection"].to(compute), a["value_projection"].to(compute)
    out, lse = query.new_zeros(len(query), h, to_value.shape[1]), query.new_full((len(query), h), -torch.inf)
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        before = rows[slots_of(a, i, s, a["cache"].shape[1])[: s - q1 + q0]] if context else rows[:0]
        tokens = torch.cat([before, new[q0:q1]])
        latent, shared = tokens[:, :rank], tokens[:, rank:].expand(h, -1, -1)
        key = torch.cat([latent @ to_key.transpose(1, 2), shared], dim=-1)
        scores = query[q0:q1].transpose(0, 1) @ key.transpose(1, 2) * a["softmax_scale"]
        scores = biased(scores, a, q1 - q0)
        mask = visible(q1 - q0, len(tokens)) | (not causal)
        out[q0:q1], lse[q0:q1] = softmax(scores, mask, latent @ to_value.transpose(1, 2))
    return sunk(a, out, lse)


def prefill_plan(a: Arguments) -> Any:
    """Plan chunks of context for a workspace of some tokens per sequence."""
    b = max(1, len(a["seq_lens"]))
    more = dict(block_size=a["cache"].shape[1], max_context_len=a["max_context_len"] or None)
    return mla.plan_prefill(batch_of(a), workspace=a["workspace"] * b, **more)


MLA_PREFILL = Operation(
    name="mla_prefill",
    function="prefill",
    signature="`query` `[t, h, nope + rope]`, `latent` `[t, r]`, `rope_key` `[t, rope]`, `cache` `[n, p, c]`, "
    "`key_projection` "
    "`[h, nope, r]`, `value_projection` `[h, dv, r]`, `softmax_scale`, and of the batch as chunked_prefill, with "
    "`block_size`; `softcap`, `alibi_slopes`, `sinks`; `cache_scale`, over pools of fp8 and of packed rows, too; "
    "`return_lse`, `out`",
    draw=draw_prefill,
    oracle=prefilled,
    sizes=dict(
        lens=LENS,
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 3),
        rank=(16, 40),
        rope=(8, 4),
        more=(0, 4),
        workspace=(64, 5, 3),
        nope=(12, 5),
        value_size=(10, 20, 12),
        padding=(0, 2),
        stored=("numbers",),
        max_context_len=(False, True),
        sinks=(False, True),
        alibi_slopes=(False, True),
        softcap=(0.0, 3.0),
    ),
    options=dict(sinks=False, alibi_slopes=False, softcap=0.0),
    dimensions=of_lengths(1025, 257, 129, heads=1, workspace=64)
    | dict(block_size=of_size("block_size", BLOCKS), heads=of_size("heads", 129), padding=of_size("padding", 1025))
    | {name: of_size(name, 513) for name in ("rank", "rope", "more", "nope", "value_size")},
    specials=(
        Special(
            "empty", "Sequences may have no query, and no context.", dict(lens=((), ((0, 3), (2, 2)), ((0, 0), (1, 1))))
        ),
        Special(
            "fp8",
            "A pool may hold fp8: new tokens are rounded to what a write would store.",
            dict(stored=("e4m3", "e5m2"), max_context_len=(False,)),
            ("cache_scale",),
        ),
        Special(
            "packed",
            "A pool may hold packed rows: new tokens are rounded to what a write would store.",
            dict(stored=("packed",), max_context_len=(False,)),
            ("cache_scale",),
        ),
        PADDING,
        Special(
            "long",
            "A context may fill many workspaces.",
            dict(lens=(((2, 1500), (1, 2109), (2, 90)),), heads=(1,)),
            once=True,
        ),
        Special(
            "many keys",
            "A context may have more tokens than 2^17.",
            dict(lens=(((2, 2**17 + 28), (1, 9)),), heads=(1,), block_size=(16,), workspace=(4096,)),
            once=True,
        ),
    ),
    derived={
        **BATCH,
        "plan": prefill_plan,
        "block_size": lambda a: a["cache"].shape[1],
        "options": options_of,
    },
    outputs=("out", "lse"),
    optional=frozenset({"lse"}),
    types=dict(out="query"),
    strided=("query", "latent", "rope_key", "cache", "key_projection", "value_projection", "sinks"),
    pools=("cache",),
    nan=("query", "latent"),
    has_out=True,
    size=lambda a: 12.0,
    score=lambda a: a["softmax_scale"] * a["query"].shape[-1] ** 0.5 / 2,
    mistakes=(
        Mistake("context-left-out", "New tokens do not see the context.", lambda a, c: prefilled(a, c, context=False)),
        Mistake(
            "new-latents-not-rounded",
            "Over a quantized pool, new tokens are not rounded as a write would.",
            lambda a, c: prefilled(a, c, rounded=False),
        ),
        Mistake(
            "context-without-scale",
            "The context is not multiplied by the scale of the pool.",
            lambda a, c: prefilled(a, c, scaled=False),
        ),
        Mistake("new-tokens-not-causal", "New tokens see later ones.", lambda a, c: prefilled(a, c, causal=False)),
        Mistake(
            "rotary-part-left-out",
            "Rotary keys do not count.",
            lambda a, c: prefilled(
                {
                    **a,
                    "rope_key": a["rope_key"] * 0,
                    "cache": a["cache"] * (torch.arange(a["cache"].shape[-1]) < a["latent"].shape[1]),
                },
                c,
            ),
        ),
    ),
)


OPERATIONS = (MLA_WRITE, MLA_PREFILL)
