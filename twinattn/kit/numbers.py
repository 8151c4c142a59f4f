"""Properties of extreme numbers, large, subnormal, infinite or NaN, and of the types of options and of the process.

Random numbers of about 1 have no product that overflows 16 bits, and no value that is nearly 0.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from refattn.scales import Fp8Scales
from twinattn.kit import landmarks
from twinattn.kit.checks import answer, counted, everything, glance, loud, without_queries
from twinattn.kit.draws import draw_example, padded, plain, with_option
from twinattn.kit.example import PACKED, TYPES_OF_OPTIONS, Arguments, Example
from twinattn.kit.hold import ask, hold
from twinattn.kit.kernel import Kernel, untouched
from twinattn.kit.property import (
    ATTENDS,
    LOUDLY,
    READ_OUT,
    Broken,
    Draw,
    NotClaimedError,
    Property,
    RefusedError,
    outputs_alone,
)
from twinattn.kit.reference import expected
from twinattn.kit.tolerance import assert_close

FP8_NAMES = ("float8_e4m3fn", "float8_e5m2")
LARGE_PRODUCT = 40.0  # elements of a query and a key: 64 products are beyond 65504, the largest number of fp16
SIZES = {torch.float16: (2.0**-16, 1e4), torch.bfloat16: (1e-30, 1e30), torch.float32: (1e-30, 1e30)}  # magnitudes
LARGEST_SQUARED = 1e15
LEVELS = (10.3, -110.7, -20_000.4, 317.1)  # log-sum-exps of parts
LSE_ROUNDINGS = 16  # ulps of float32 that a log-sum-exp may be off
FAR_SLOT = 2**24
BELOW = 200.0  # difference of two log-sum-exps: the weight of the lower part is then 0 in float32
ROTARY = 300.0  # elements of the rotary part, which is not in the values


@outputs_alone
def large_products(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare where all products are equal, and overflow fp16 before they are scaled: each row is a mean."""

    def alike(arguments: Arguments) -> Arguments:
        signs = torch.arange(example.head_size, device=device) % 3 - 1.0
        signs[signs == 0] = 1.0
        query = (LARGE_PRODUCT * signs.to(dtype)).expand_as(arguments["query"])
        changed = dict(arguments, query=query.clone())
        if "cache" in arguments:
            rank = arguments["latent_rank"]
            changed["query"][..., :rank] = 0.0
            changed["cache"] = arguments["cache"].clone()
            changed["cache"][..., rank : example.head_size] = ROTARY * signs[rank:].to(dtype)
            return changed
        word = "key" if "key" in arguments else "key_cache"
        changed[word] = query[:1, :1, :].expand_as(arguments[word]).clone()
        return changed

    try:
        glance(kernel, example, dtype, device, alike, off=0.05)
    except Broken as error:
        raise Broken(f"with keys that are alike, and products beyond 65504 before the scale, {error}") from None


def of_any_size(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with small values (subnormal in fp16) and large ones, in some batches all of one sign."""
    for size in SIZES[dtype]:
        arguments = example.tensors(dtype, device)
        for word in ("value", "value_cache", "outs"):
            if word in arguments:
                x = arguments[word]
                signed = [y.abs() if example.seed % 2 else y for y in (x if isinstance(x, list) else [x])]
                arguments[word] = [y * size for y in signed] if isinstance(x, list) else signed[0] * size
        try:
            hold(example, arguments, ask(kernel, example, arguments))
        except Broken as error:
            raise Broken(f"with values of about {size:.1e}, {error}") from None


@outputs_alone
def normalised(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with large values: the norm cancels their size, and is as exact as before if squares are in float32."""
    arguments = example.tensors(dtype, device)
    before = expected(example, arguments)
    size = min(SIZES[dtype][1], LARGEST_SQUARED)
    arguments["cache"] = arguments["cache"].clone()
    arguments["cache"][:, 1] *= size
    out, want = ask(kernel, example, arguments)["out"].detach().cpu(), expected(example, arguments)[0]["out"]
    off = before[1]["out"].to(want) - before[0]["out"]  # the rounding error of the formula without overflow
    try:
        assert_close(out, want, want + off)
    except AssertionError as error:
        raise Broken(f"with values of about {size:.1e}, {error}") from None


def infinite_key(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare where the first key of a sequence has a score of -inf, for queries that see others, too."""
    arguments = example.tensors(dtype, device)
    last = example.head_size - 1
    arguments["query"][..., last] = 1.0
    word = next(word for word in ("key", "key_cache", "cache") if word in arguments)
    arguments[word] = arguments[word].clone()
    at: Any = 0 if word == "key" else (int(arguments["batch"].block_table[0, 0]), 0)
    arguments[word][at][..., last] = -torch.inf
    hold(example, arguments, ask(kernel, example, arguments))


@outputs_alone
def infinite_value(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put infinity, of either sign, into a value of each sequence: a query that sees it returns it, or NaN.

    All keys have the same weight. Queries that do not see it share a tile with it, and may return anything.
    """
    arguments = without_queries(example.tensors(dtype, device))
    word = next(word for word in ("value", "value_cache") if word in arguments)
    value = arguments[word] = arguments[word].clone()
    seen, first = list[Tensor](), 0
    for i, ((q, s), mask) in enumerate(zip(example.lens, example.masks(), strict=True)):
        key = (0, s // 2, s - 1)[i % 3] if s else 0
        if s:
            at: Any = first + key
            if word == "value_cache":
                at = int(arguments["batch"].block_table[i, key // example.block_size]), key % example.block_size
            value[at][..., 0], value[at][..., 1] = torch.inf, -torch.inf
        seen.append(mask[:, key] if s else torch.zeros(q, dtype=torch.bool))
        first += s
    out = ask(kernel, example, arguments)["out"].detach().cpu()[: example.num_tokens][torch.cat(seen)]
    for element, want in ((0, torch.inf), (1, -torch.inf)):
        wrong = ~((out[..., element] == want) | (out[..., element].isnan() & (not kernel.claims.conventions)))
        if wrong.any():
            raise Broken(f"out: {out[..., element][wrong][0]} where a query sees a value of {want}")


def options_in_compute_type(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare everything, and the log-sum-exp of biases or sinks alone in float32 precision, whatever the types are.

    A kernel may raise anything for slopes and sinks that are not float32, but not use wrong ones. With slopes of either
    sign scores may be in the hundreds, and are also compared where products are.
    """
    arguments = example.tensors(dtype, device)
    try:
        answers = ask(kernel, example, arguments)
    except Broken as error:
        kinds = {example.options.get(name) for name in ("alibi_slopes", "sinks")}
        if kernel.claims.conventions or not kinds & {*TYPES_OF_OPTIONS}:
            raise
        raise RefusedError(str(error)) from None
    has_far_scores = example.options.get("alibi_slopes") == "signs"
    hold(example, arguments, answers, is_loud=has_far_scores)
    if has_far_scores and example.path in LOUDLY:
        loud(kernel, example, dtype, device)
    elif "lse" in answers:
        counted(kernel, example, arguments)


def query_scale(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with queries that are rounded to fp8 under their own scale, if the kernel reads that scale."""
    arguments = example.tensors(dtype, device)
    scales = arguments["scales"]
    watched = Watched(scales.key, scales.value, scales.query, scales.format)
    READ.clear()
    answers = ask(kernel, example, arguments | dict(scales=watched))
    if not READ:
        raise NotClaimedError("does not look at scales.query")
    kernel.calls.clear()  # the calls so far name no such scale
    hold(example, arguments, answers)


READ: list[str] = []  # not empty once a kernel has read the scale of queries


class Watched(Fp8Scales):
    """Scales that record reads of `query`."""

    def __getattribute__(self, name: str) -> Any:
        """Record a read of `query`."""
        if name == "query":
            READ.append(name)
        return super().__getattribute__(name)


def codes_as_bytes(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with uint8 pools in both formats, if a kernel takes those of e4m3."""
    for format_of_values in ("e4m3", "e5m2"):
        given = replace(example, options={**example.options, "format": format_of_values, "bytes": True})
        arguments = given.tensors(dtype, device)
        try:
            hold(given, arguments, ask(kernel, given, arguments))
        except Broken as error:
            if format_of_values == "e4m3":
                raise NotClaimedError("takes pools of fp8, and not of their bytes") from error
            raise Broken(f"with pools of bytes in e5m2, {error}") from None


def ambient(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare under autocast, and with float64 as the default type of the process."""
    if not kernel.claims.conventions:
        raise NotClaimedError("claims nothing about autocast: @claims(conventions=True)")
    arguments = example.tensors(dtype, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        answers = ask(kernel, example, arguments)
    hold(example, arguments, answers)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        answers = ask(kernel, example, arguments)
    finally:
        torch.set_default_dtype(before)
    hold(example, arguments, answers)


@outputs_alone
def nan_part(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into a row of one part, in its output or its log-sum-exp: that row is NaN, and no other.

    If the conventions are claimed, this holds even where the weight of the part is 0 by rounding; many merges skip such
    parts.
    """
    rounds = [("outs", None), ("lses", None), *([("outs", BELOW)] if kernel.claims.conventions else [])]
    for word, below in rounds:
        arguments = example.tensors(dtype, device)
        if below is not None:
            arguments["lses"] = [x.clone() for x in arguments["lses"]]
            arguments["lses"][-1][0] = arguments["lses"][0][0] - below
        parts = arguments[word] = [x.clone() for x in arguments[word]]
        parts[-1][0] = torch.nan
        out = ask(kernel, example, arguments)["out"].detach().cpu()
        wide, low = expected(example, arguments)
        if not out[0].isnan().all():
            raise Broken(f"out: a number in row 0, which has NaN in {word}")
        try:
            assert_close(out[1:], wide["out"][1:], low["out"][1:])
        except AssertionError as error:
            raise Broken(f"with NaN in row 0 of {word}, {error}") from None


def at_levels(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare where all log-sum-exps of a row are far below 0, or above; that of the merge has float32 precision."""
    for level in LEVELS:
        arguments = example.tensors(dtype, device)
        arguments["lses"] = [x + level for x in arguments["lses"]]
        answers = ask(kernel, example, arguments)
        try:
            hold(example, arguments, answers, is_loud=True)
            if "lse" in answers:
                want = expected(example, arguments)[0]["lse"].double()
                off = (answers["lse"].detach().cpu().double() - want).abs().masked_fill(want.isinf(), 0.0)
                allowed = LSE_ROUNDINGS * torch.finfo(torch.float32).eps * want.abs().clamp(min=1.0)
                if not (off <= allowed).all():
                    raise Broken(
                        f"lse: off by {float(off.max()):.2e}: it is computed in float32, whatever the outputs are"
                    )
        except Broken as error:
            raise Broken(f"with log-sum-exps of about {level}, {error}") from None


@outputs_alone
def rising(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Check that positions are ascending, with -1 after the last."""
    if not kernel.claims.conventions:
        raise NotClaimedError("claims no order of positions: @claims(conventions=True)")
    out = ask(kernel, example, example.tensors(dtype, device))["out"].detach().cpu().long()
    order = out.where(out >= 0, torch.iinfo(torch.int64).max)
    if (order.diff(dim=1) < 0).any():
        row = int((order.diff(dim=1) < 0).any(1).nonzero()[0])
        raise Broken(f"out: the positions of row {row} do not rise: {out[row].tolist()}")


def fewer_slots(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare where the mapping ends before the rows of padding."""
    if not kernel.claims.conventions:
        raise NotClaimedError("claims as many slots as rows: @claims(conventions=True)")
    arguments = example.tensors(dtype, device)
    arguments["slot_mapping"] = arguments["slot_mapping"][: example.num_tokens]
    hold(example, arguments, ask(kernel, example, arguments))


def far_slots(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare writes to the last slots of a large pool, in memory that is mostly never written."""
    if device != "cpu":
        raise NotClaimedError("is asked on a CPU only, where memory that is not touched takes no room")
    first = FAR_SLOT // example.block_size + 1

    @functools.wraps(kernel.function)
    def write(**given: Any) -> None:
        pools = {}
        for name in ("key_cache", "value_cache"):
            shape = first + len(given[name]), *given[name].shape[1:]
            pools[name] = untouched(math.prod(shape), dtype, device).view(shape)
            pools[name][first:] = given[name]
        slots = given["slot_mapping"]
        far = torch.where(slots < 0, slots, slots + first * example.block_size)
        kernel.function(**{**given, **pools, "slot_mapping": far})
        for name, pool in pools.items():
            given[name].copy_(pool[first:])

    checked = replace(kernel, function=write)
    answer(checked, example, dtype, device)
    kernel.calls[:] = checked.calls


def drawn(**options: Any) -> Callable[[Draw, Kernel], Example]:
    """Return a function that draws a batch with these options; a tuple is a choice."""

    def draw_one(draw: Draw, kernel: Kernel) -> Example:
        chosen = {name: draw(st.sampled_from(x)) if isinstance(x, tuple) else x for name, x in options.items()}
        return draw_example(draw, kernel, options=chosen)

    return draw_one


def with_biases(draw: Draw, kernel: Kernel) -> Example:
    """Draw slopes of float32 and of other types, of either sign, and of `alibi_sqrt` if the kernel takes it."""
    kinds = (True, *TYPES_OF_OPTIONS, "signs", *(("root",) if kernel.takes("alibi_sqrt") else ()))
    return draw_example(draw, kernel, options={"alibi_slopes": draw(st.sampled_from(kinds))})


def of_slopes(kernel: Kernel) -> list[Example]:
    """Return decodes over many keys with slopes of other types, and of either sign, and a chunk with such slopes."""
    kinds = ("signs", *TYPES_OF_OPTIONS)
    decodes = [landmarks.example(kernel, ((1, 700), (1, 2500)), alibi_slopes=kind) for kind in kinds]
    mask: dict[str, Any] = {"causal": False} if kernel.takes("causal") else {}
    shape = landmarks.most_heads(kernel)
    return [landmarks.example(kernel, ((5, 90), (1, 300)), shape, alibi_slopes="signs", **mask), *decodes]


def summed(kernel: Kernel, type_number: int) -> list[Example]:
    """Return a few batches, and in each type one of many values of one sign, which add up to more than 65504."""
    many = replace(landmarks.example(kernel, ((1, 700), (1, 2500), (3, 300))), seed=1)
    return [*landmarks.some(kernel), many]


def beside_others(draw: Draw, kernel: Kernel) -> Example:
    """Draw queries that all see at least two keys."""
    few = min(6, kernel.claims.max_query_len or 6)
    least = max(2, kernel.claims.min_seq_len)
    lens = st.tuples(st.integers(1, few), st.integers(least, 40)).map(lambda x: (x[0], x[0] + x[1]))
    return draw_example(draw, kernel, st.lists(lens, min_size=1, max_size=3))


PROPERTIES = (
    Property(
        "products",
        "The product of a query and a key may be beyond 65504, the largest number of fp16, before it is scaled.",
        plain,
        large_products,
        paths=tuple(name for name in READ_OUT if name not in PACKED),
        landmarks=landmarks.some,
    ),
    Property(
        "sizes of values",
        "Values may be of any size, also below the normal numbers of fp16.",
        plain,
        of_any_size,
        paths=(*(name for name in READ_OUT if "latents" not in name and "mla" not in name), "merge"),
        landmarks=landmarks.some,
        in_type=summed,
    ),
    Property(
        "sizes of values",
        "Values may be of any size: squares of differences may be beyond 65504, the largest number of fp16.",
        plain,
        normalised,
        paths=("differential",),
        examples=4,
        landmarks=landmarks.some,
    ),
    Property(
        "levels",
        "All log-sum-exps of a row may be far below 0, or above; that of the merge is float32 in any type.",
        plain,
        at_levels,
        paths=("merge",),
        examples=6,
        landmarks=landmarks.some,
    ),
    Property(
        "infinite key",
        "A key whose score is -inf has no weight beside others.",
        beside_others,
        infinite_key,
        paths=("varlen", "chunked_prefill", "mla"),
        examples=4,
    ),
    Property(
        "infinite value",
        "A query that sees an infinite value returns infinity, or NaN: nothing hides a broken model.",
        plain,
        infinite_value,
        paths=tuple(name for name in READ_OUT if "latents" not in name and "mla" not in name),
        examples=4,
        landmarks=landmarks.some,
    ),
    Property(
        "slopes",
        "Biases are computed in float32, whatever the types of queries and slopes, and the signs of slopes.",
        with_biases,
        options_in_compute_type,
        ("alibi_slopes",),
        ATTENDS,
        landmarks=landmarks.both(of_slopes, landmarks.long(alibi_slopes=True)),
    ),
    Property(
        "root of the distance",
        "With alibi_sqrt a bias is -slope * |distance| ** 0.5.",
        with_option("alibi_slopes", "root"),
        options_in_compute_type,
        ("alibi_slopes", "alibi_sqrt"),
        ATTENDS,
        landmarks=landmarks.long(alibi_slopes="root"),
    ),
    Property(
        "query scale",
        "With scales.query, queries are rounded to the format of the quantized values under it.",
        drawn(query_scale=True, scales_of=("", "heads", "sequences"), format=("", "e5m2")),
        query_scale,
        paths=("quantized",),
        landmarks=lambda kernel: [
            replace(x, options={**x.options, "query_scale": True})
            for x in landmarks.each(scales_of=("heads", "sequences"), format=("e5m2",))(kernel)
        ],
    ),
    Property(
        "fp8 latents",
        "A pool of latents may hold fp8 under one scale.",
        drawn(stored=FP8_NAMES),
        everything,
        ("cache_scale",),
        ("mla", "sparse_latents"),
        landmarks=lambda kernel: landmarks.long(stored="float8_e4m3fn")(kernel)[:3],
    ),
    Property(
        "query scale",
        "Queries over latents in fp8 may be rounded to it, too, under a scale of their own.",
        drawn(stored=FP8_NAMES, query_scale=(True,)),
        everything,
        ("query_scale", "cache_scale"),
        ("mla",),
        examples=8,
    ),
    Property(
        "bytes",
        "A pool may be the bytes of its quantized values, in either format.",
        plain,
        codes_as_bytes,
        paths=("quantized",),
        examples=4,
    ),
    Property(
        "autocast",
        "No answer depends on autocast, or on the default type of the process.",
        plain,
        ambient,
        paths=(*ATTENDS, "merge", "recurrent"),
        examples=4,
    ),
    Property(
        "nan",
        "A NaN in an output or in a log-sum-exp of a part reaches its row, and no other.",
        plain,
        nan_part,
        paths=("merge",),
        examples=4,
    ),
    Property(
        "kinds of scores",
        "Scores may be infinite, of any size, or NaN, which is above all numbers.",
        with_option("kind", "nan", "nans", "apart", "subnormal", "crowded", "near"),
        answer,
        paths=("select",),
        landmarks=landmarks.kinds_of_scores,
    ),
    Property("order", "Positions rise, and -1 is past the last.", plain, rising, paths=("select",)),
    Property(
        "any slots",
        "Slots may be any: a run over the end of a block, backwards, or in no order.",
        with_option("slots", "run", "backwards", "anywhere"),
        answer,
        paths=("kv_cache",),
        landmarks=landmarks.each(slots=("run", "backwards", "anywhere")),
    ),
    Property(
        "far slots",
        "A slot may be larger than 2^24, where float32 does not tell one from the next.",
        plain,
        far_slots,
        paths=("kv_cache",),
        examples=2,
        landmarks=lambda kernel: [landmarks.example(kernel, ((70, 70), (17, 33)))],
    ),
    Property(
        "rows past the slots",
        "Rows of new keys after the last slot are padding.",
        padded,
        fewer_slots,
        paths=("kv_cache",),
        examples=4,
    ),
)
