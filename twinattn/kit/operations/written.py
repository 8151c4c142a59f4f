"""Writes of new tokens that round: index keys, fp8 and int8 pools, latents.

A quotient that is halfway between two numbers, up to its own rounding in float32, may be rounded either way: so the
expected outputs are lists of tensors, and each element may be that of any of them. `ties` tests exact halves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refattn.scales import Fp8Scales, Int8Scales
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import Drawn
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special, Without
from twinattn.kit.operations.tiles import BLOCKS, of_size

HALF = 3e-7  # the relative error that a quotient in float32 may have
TIED = (7.0, 1.0, 13.0, 0.75, 41.0, 47.0, 3.0)  # scales that a write computes: 127 / largest is not their inverse
SMALLEST = (1e-12, 1e-10, 1e-8, 1e-6, 1e-5)  # what kernels add to a scale, so as not to divide by 0
EXACT = (1.0, 0.5, 4.0, 2.0**-7)  # given scales with an exact inverse, so that a kernel may multiply by it
MANY = 2**17 + 28  # more than 17 bits count
TOKENS = (5, 1, 17, 40)
PAST_TILES = dict(
    tokens=of_size("tokens"),
    padding=of_size("padding", tokens=5),
    block_size=of_size("block_size", BLOCKS, tokens=300),
)
EMPTY = Special("empty", "There may be no token, and no token with a slot.", dict(tokens=(0, 1)))
MANY_TOKENS = Special(
    "many", "There may be more tokens than 17 bits count.", dict(tokens=(MANY,), heads=(1,), head_size=(8,)), once=True
)
MAGNITUDES = {  # powers of two: a scale of a 127th is still a normal number
    torch.float32: (-112, 100),
    torch.bfloat16: (-112, 100),
    torch.float16: (-20, 10),
}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def to_fp8(quotient: Tensor, kind: torch.dtype, off: float = HALF) -> list[Tensor]:
    """Round quotients to a format, saturating, and do the same for slightly smaller and larger quotients."""
    largest = torch.finfo(kind).max
    near = [(quotient * (1 + sign * off)).clamp(-largest, largest).float() for sign in (-1, 0, 1)]
    return [x.to(kind).float() for x in near]


def fp8_ties(drawn: Drawn, shape: torch.Size, scale: Tensor, kind: torch.dtype) -> Tensor:
    """Draw scaled midpoints of neighbouring numbers of a format; 0 where the type of the case cannot hold them."""
    known = torch.arange(256, dtype=torch.uint8).view(kind).double()
    known = known[known.isfinite() & (known >= 0)].unique()
    middles = (known[:-1] + known[1:]) / 2
    at = drawn.whole(0, len(middles), *shape)
    return as_exact(middles[at] * drawn.whole(0, 2, *shape).mul(2).sub(1) * scale, drawn.dtype)


def as_exact(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers to a type, with 0 for those that are not exact in it."""
    return torch.where(x.to(dtype).double() == x, x, 0.0).to(dtype)


def to_int8(quotient: Tensor, off: float = HALF) -> list[Tensor]:
    """Round quotients to integers from -127 to 127, ties to even; also slightly smaller and larger quotients."""
    near = [(quotient * (1 + sign * off)).round().clamp(-127, 127) for sign in (-1, 0, 1)]
    return [x.nan_to_num(0.0).to(torch.int8) for x in near]


def written(pool: Tensor, rows: list[Tensor], slots: Tensor) -> list[Tensor]:
    """Return the pool `[n, p, ...]` after the write of each of several tensors of rows."""
    after = []
    for values in rows:
        flat = pool.flatten(0, 1).clone()
        flat[slots[slots >= 0]] = values[slots >= 0].to(pool.dtype)
        after.append(flat.unflatten(0, pool.shape[:2]))
    return after


def overwritten(pool: Tensor, slots: Tensor) -> Tensor:
    """Return a mask of the elements of a pool `[n, p, ...]` that a write overwrites."""
    lost = torch.zeros(pool.shape[0] * pool.shape[1], dtype=torch.bool)
    lost[slots[slots >= 0]] = True
    return lost.reshape(*pool.shape[:2], *[1] * (pool.ndim - 2)).expand(pool.shape)


def fp8_of(pool: Tensor, kind: torch.dtype) -> Tensor:
    """Return an fp8 pool, or its bytes, as float32."""
    return pool.contiguous().view(kind).float()


# --- index keys ---


def draw_index(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw index keys and their pool, unquantized or as bytes."""
    drawn, t, d, p = Drawn(case, dtype), case["tokens"], case["head_size"], case["block_size"]
    n = t // p + 3
    key = drawn.normal(t, d)
    if case["values"] == "tiny" and t:
        key = key * 2.0 ** -drawn.whole(0, 40, t, 1)  # on both sides of the smallest scale
        key[::3] = 0
    if case["values"] == "nan" and t:
        key[::2, 1] = torch.nan
    index_cache = drawn.normal(n, p, d)
    if case["bytes"]:
        index_cache = drawn.whole(0, 100, n, p, d + 4).to(torch.uint8)
    slots = drawn.slots(t, n * p)
    dense = frozenset({"index_cache"}) if case["bytes"] else frozenset()
    unread = dict(key=(slots < 0)[:, None].expand(t, d))
    unread |= {} if case["bytes"] else dict(index_cache=overwritten(index_cache, slots))
    return Inputs(dict(key=key, index_cache=index_cache, slot_mapping=slots), unread, dense)


def index_parts(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quantized values of a pool of bytes, `[n, p, d]`, and their scales, `[n, p, 1]`."""
    n, p, c = pool.shape
    pages = pool.reshape(n, p * c)
    values = pages[:, : p * (c - 4)].reshape(n, p, c - 4).view(torch.float8_e4m3fn).float()
    return values, pages[:, p * (c - 4) :].contiguous().view(torch.float32).reshape(n, p, 1)


def index_written(a: Arguments, compute: torch.dtype, smallest: float = 1e-4, largest: float = 448.0) -> Answers:
    """Return the pool after the write, or its values and scales if it holds bytes."""
    pool, slots = a["index_cache"], a["slot_mapping"]
    if pool.dtype != torch.uint8:
        return dict(index_cache=written(pool, [a["key"]], slots)[0])
    values, scales = index_parts(pool)
    scale = (a["key"].double().abs().amax(-1, keepdim=True).clamp(min=smallest) / largest).float()
    near = [scale * (1 + off) for off in (-HALF, 0.0, HALF)]
    rounded = to_fp8(a["key"].double() / scale.double(), torch.float8_e4m3fn)
    return dict(values=written(values, rounded, slots), scales=between(written(scales, near, slots)))


def between(near: list[Tensor]) -> list[Tensor]:
    """List all float32 numbers from the first to the last of three tensors."""
    found = [near[0]]
    while (found[-1] < near[-1]).any() and len(found) < 12:
        found.append(torch.minimum(found[-1].nextafter(near[-1]), near[-1]))
    return [*found[: len(found) // 2], near[1], *found[len(found) // 2 :]]


def seen_index(came: Any, a: Arguments) -> Answers:
    """Return the content of the pool, or its values and scales if it holds bytes."""
    pool = a["index_cache"].detach().cpu()
    return (
        dict(index_cache=pool)
        if pool.dtype != torch.uint8
        else dict(zip(("values", "scales"), index_parts(pool), strict=True))
    )


INDEX_WRITE = Operation(
    name="index_write",
    function="write",
    signature="`key` `[t, d]`, `index_cache`, changed in place: `[n, p, d]`, or bytes `[n, p, d + 4]`; "
    "`slot_mapping` `[t]`",
    draw=draw_index,
    oracle=index_written,
    sizes=dict(
        tokens=TOKENS, block_size=(4, 1, 16, 3), head_size=(16, 128, 20), bytes=(True, False), values=("normal",)
    ),
    dimensions={name: PAST_TILES[name] for name in ("tokens", "block_size")}
    | dict(head_size=of_size("head_size", multiple=4)),
    specials=(
        Special(
            "tiny",
            "The scale of a key of zeros, and of one below 1e-4, is 1e-4 / 448.",
            dict(values=("tiny",), bytes=(True,)),
        ),
        Special("keeps nan", "The scale of a key with a NaN is NaN.", dict(values=("nan",), bytes=(True,))),
        EMPTY,
        Special("many", MANY_TOKENS.promise, dict(tokens=(MANY,), head_size=(8,)), once=True),
    ),
    outputs=(),
    changes=("index_cache",),
    exact=frozenset({"index_cache", "values", "scales"}),
    strided=("key", "index_cache", "slot_mapping"),
    flips=("slot_mapping",),
    seen=seen_index,
    mistakes=(
        Mistake(
            "index-scale-without-limit",
            "The scale has no lower limit of 1e-4 / 448.",
            lambda a, c: index_written(a, c, 1e-30),
        ),
        Mistake(
            "index-scale-of-240",
            "Divides by 240, the largest number of another format.",
            lambda a, c: index_written(a, c, largest=240.0),
        ),
    ),
)


# --- fp8 and int8 ---


def drawn_rows(case: Case, dtype: torch.dtype, more: int = 8) -> tuple[Drawn, dict[str, Any], int]:
    """Draw new keys and values, with rows of padding, and their slots; return the blocks of a pool, too."""
    drawn, t, p = Drawn(case, dtype), case["tokens"], case["block_size"]
    n, rows, hk = t // p + 3, t + case["padding"], case["heads"]
    key, value = drawn.normal(rows, hk, case["head_size"]), drawn.normal(rows, hk, case["head_size"] + more)
    if case["values"] == "large" and rows:
        key[::2] *= 3000
        value[::3, :, 1:2] = torch.inf
        key[1::4, :, :1] = -torch.inf
    if case["values"] == "nan" and rows:
        key[::3, :, 2] = torch.nan
        value[1::3, 0, 1] = torch.nan
    if case["values"] == "zeros" and rows:
        key[::2], value[::2] = 0, 0
    if case["values"] == "any size" and rows:
        smallest, largest = MAGNITUDES[dtype]
        key = (key.double() * 2.0 ** drawn.whole(smallest, largest, rows, hk, 1).double()).to(dtype)
    return drawn, dict(key=key, value=value, slot_mapping=drawn.slots(t, n * p)), n


def unread_rows(a: dict[str, Any]) -> dict[str, Tensor]:
    """Return masks of the new keys and values that have no slot."""
    padding = torch.ones(len(a["key"]), dtype=torch.bool)
    padding[: len(a["slot_mapping"])] = a["slot_mapping"] < 0
    return {name: padding[:, None, None].expand(a[name].shape) for name in ("key", "value")}


def draw_fp8(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new keys and values, and pools of fp8 or uint8."""
    drawn, a, n = drawn_rows(case, dtype)
    kind, hk = FP8[case["format"]], case["heads"]
    pools = {
        f"{name}_cache": drawn.whole(0, 120, n, case["block_size"], *a[name].shape[1:])
        .to(torch.uint8)
        .view(torch.uint8 if case["bytes"] else kind)
        for name in ("key", "value")
    }
    numbers = (0.0713, 0.4131)
    scales = [drawn.uniform(hk, low=0.02, high=0.5, dtype=torch.float32) if case["per_head"] else x for x in numbers]
    for i, name in enumerate(("key", "value") if case["values"] == "ties" else ()):
        tied = torch.tensor(EXACT).roll(case.seed + i)[torch.arange(hk) % len(EXACT)]
        scales[i] = tied if case["per_head"] else float(tied[0])
        a[name] = fp8_ties(drawn, a[name].shape, torch.as_tensor(scales[i]).double().reshape(-1, 1), kind)
    arguments = {**a, **pools, "key_scale": scales[0], "value_scale": scales[1], "format": kind}
    arguments["exact_halves"] = case["values"] == "ties"
    return Inputs(arguments, unread_rows(a) | {name: overwritten(x, a["slot_mapping"]) for name, x in pools.items()})


def fp8_written(
    a: Arguments, compute: torch.dtype, change: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Answers:
    """Return the pools after the write as float32."""
    found = {}
    for name in ("key", "value"):
        scale = torch.as_tensor(a[f"{name}_scale"], dtype=torch.float32).double().reshape(-1, 1)
        x = a[name][: len(a["slot_mapping"])].double()
        quotient = x / scale if change is None else change(x, scale)
        pool = fp8_of(a[f"{name}_cache"], a["format"])
        rounded = to_fp8(quotient, a["format"], 0.0 if a["exact_halves"] else HALF)
        found[f"{name}_cache"] = written(pool, rounded, a["slot_mapping"])
    return found


FP8_WRITE = Operation(
    name="fp8_write",
    function="write",
    signature="`key`, `value` `[rows, hk, d]`; `key_cache`, `value_cache` of fp8 or bytes, changed in place; "
    "`slot_mapping` `[t]`; `key_scale`, `value_scale`, `format`, or all three as `scales`",
    draw=draw_fp8,
    oracle=fp8_written,
    sizes=dict(
        tokens=TOKENS,
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 3),
        head_size=(8, 64, 5),
        padding=(0, 3),
        format=("e4m3", "e5m2"),
        bytes=(False, True),
        per_head=(False, True),
        values=("normal",),
    ),
    without=dict(format=Without("e4m3", ("format",))),
    dimensions=PAST_TILES | dict(heads=of_size("heads", tokens=5), head_size=of_size("head_size", tokens=5)),
    specials=(
        Special("saturates", "Numbers beyond the format, infinity too, become its largest.", dict(values=("large",))),
        Special(
            "ties",
            "A quotient halfway between two numbers, subnormal ones too, is rounded to the even one.",
            dict(values=("ties",)),
        ),
        Special("keeps nan", "NaN stays NaN.", dict(values=("nan",))),
        EMPTY,
        MANY_TOKENS,
    ),
    derived=dict(scales=lambda a: Fp8Scales(a["key_scale"], a["value_scale"], format=a["format"])),
    outputs=(),
    changes=("key_cache", "value_cache"),
    exact=frozenset({"key_cache", "value_cache"}),
    strided=("key", "value", "key_cache", "value_cache", "slot_mapping", "key_scale", "value_scale"),
    pools=("key_cache", "value_cache"),
    flips=("slot_mapping",),
    seen=lambda came, a: {name: fp8_of(a[name].detach().cpu(), a["format"]) for name in ("key_cache", "value_cache")},
    mistakes=(
        Mistake(
            "fp8-multiplied", "Multiplies by the scale.", lambda a, c: fp8_written(a, c, lambda x, scale: x * scale)
        ),
        Mistake(
            "fp8-without-scale", "Does not divide by the scale.", lambda a, c: fp8_written(a, c, lambda x, scale: x)
        ),
        Mistake(
            "fp8-one-scale",
            "Takes the scale of the first head for all.",
            lambda a, c: fp8_written(a, c, lambda x, scale: x / scale[:1]),
        ),
        Mistake(
            "fp8-does-not-saturate",
            "Numbers beyond the format become NaN, or infinity.",
            lambda a, c: fp8_written(
                a, c, lambda x, scale: (x / scale).masked_fill((x / scale).abs() > 464, torch.nan)
            ),
        ),
    ),
)


def draw_int8(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new keys and values, pools of int8 and the scales of their keys."""
    drawn, a, n = drawn_rows(case, dtype)
    p, (_, hk, dv) = case["block_size"], a["value"].shape
    key_cache = drawn.whole(-127, 128, n, p, *a["key"].shape[1:]).to(torch.int8)
    value_cache = (
        drawn.whole(-127, 128, n, p, hk, dv).to(torch.int8) if case["value_scales"] else drawn.normal(n, p, hk, dv)
    )
    value_scales = drawn.uniform(hk, dv, low=0.005, high=0.05, dtype=torch.float32)
    if case["values"] == "ties":  # the largest element of each key is 127 times its scale, which is exact
        tied = torch.tensor([x for x in TIED if float(torch.tensor(127 * x).to(dtype)) == 127 * x]).roll(case.seed)
        scale = tied[torch.arange(len(a["key"])) % len(tied)][:, None, None].double()
        value_scales = torch.tensor(EXACT)[torch.arange(hk * dv) % len(EXACT)].view(hk, dv)
        for name, of in (("key", scale), ("value", value_scales.double())):
            a[name] = as_exact((drawn.whole(-120, 120, *a[name].shape) + 0.5) * of, dtype)
        a["key"][..., :1] = (127 * scale).to(dtype)
    arguments = {
        **a,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "key_scales": drawn.uniform(n, p, hk, low=0.5, dtype=torch.float32),
        "value_scales": value_scales if case["value_scales"] else None,
        "exact_halves": case["values"] == "ties",
    }
    pools = {name: arguments[name] for name in ("key_cache", "value_cache", "key_scales")}
    return Inputs(arguments, unread_rows(a) | {name: overwritten(x, a["slot_mapping"]) for name, x in pools.items()})


def int8_written(
    a: Arguments, compute: torch.dtype, largest: float = 127.0, of_zeros: float = 1.0, smallest: float = 0.0
) -> Answers:
    """Return the pools after the write; quantized values under a scale that is not finite are 0, to be ignored."""
    t, off = len(a["slot_mapping"]), 0.0 if a["exact_halves"] else HALF
    key, value = a["key"][:t].double(), a["value"][:t].double()
    most = key.abs().amax(-1)
    scale = torch.where(most == 0, of_zeros, (most / largest).clamp(min=smallest)).float()
    if a["value_scales"] is not None:
        scale = scale.masked_fill(value.isnan().any(-1), torch.nan)
        values = to_int8(value / a["value_scales"].double(), off)
    else:
        values = [a["value"][:t]]
    keys = to_int8(key / scale.double()[..., None], off)
    near = [scale * (1 + x) for x in (-off, 0.0, off)]
    after = dict(
        key_cache=written(a["key_cache"], keys, a["slot_mapping"]),
        value_cache=written(a["value_cache"], values, a["slot_mapping"]),
        key_scales=between(written(a["key_scales"], near, a["slot_mapping"])),
    )
    return hidden_where_not_finite(after, after["key_scales"][0])


def hidden_where_not_finite(pools: dict[str, Any], scales: Tensor) -> Answers:
    """Zero the quantized values under a scale that is not finite, where they mean nothing."""
    lost = ~scales.isfinite()
    names = [name for name, x in pools.items() if not (x[0] if isinstance(x, list) else x).is_floating_point()]
    return pools | {
        name: [x.masked_fill(lost[..., None], 0) for x in pools[name]]
        if isinstance(pools[name], list)
        else pools[name].masked_fill(lost[..., None], 0)
        for name in names
    }


INT8_WRITE = Operation(
    name="int8_write",
    function="write",
    signature="as `fp8_write`, with pools of int8 (values of floating point without `value_scales`); "
    "`key_scales` `[n, p, hk]`, changed in place, `value_scales` `[hk, dv]`, or both as `scales`",
    draw=draw_int8,
    oracle=int8_written,
    sizes=dict(
        tokens=TOKENS,
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 3),
        head_size=(8, 64, 5),
        padding=(0, 3),
        value_scales=(True, False),
        values=("normal",),
    ),
    without=dict(value_scales=Without(False, ("value_scales",))),
    dimensions=PAST_TILES | dict(heads=of_size("heads", tokens=5), head_size=of_size("head_size", tokens=5)),
    specials=(
        Special("ties", "Halves are rounded to the even number.", dict(values=("ties",))),
        Special("zeros", "A key of zeros has a scale of 1.", dict(values=("zeros",))),
        Special("any size", "A key may be of any size, its elements subnormal, too.", dict(values=("any size",))),
        Special("keeps nan", "The scale of a token and head with a NaN is NaN.", dict(values=("nan",))),
        EMPTY,
        MANY_TOKENS,
    ),
    derived=dict(scales=lambda a: Int8Scales(a["key_scales"], a["value_scales"])),
    outputs=(),
    changes=("key_cache", "value_cache", "key_scales"),
    exact=frozenset({"key_cache", "value_cache", "key_scales"}),
    strided=("key", "value", "key_cache", "value_cache", "key_scales", "value_scales", "slot_mapping"),
    pools=("key_cache", "value_cache", "key_scales"),
    flips=("slot_mapping",),
    seen=lambda came, a: hidden_where_not_finite(
        {name: a[name].detach().cpu() for name in ("key_cache", "value_cache", "key_scales")},
        a["key_scales"].detach().cpu(),
    ),
    mistakes=(
        Mistake("int8-of-128", "Divides by 128, not by 127.", lambda a, c: int8_written(a, c, 128.0)),
        *(
            Mistake(
                f"int8-scale-at-least-{least:.0e}",
                f"The scale of a key is at least {least:.0e}.",
                partial(int8_written, smallest=least),
            )
            for least in SMALLEST
        ),
        Mistake(
            "int8-scale-of-zeros", "The scale of a key of zeros is 0.", lambda a, c: int8_written(a, c, of_zeros=0.0)
        ),
        Mistake(
            "int8-nan-hidden",
            "A NaN in a value does not show in the scale of its token.",
            lambda a, c: int8_written({**a, "value": a["value"].nan_to_num(0.0)}, c),
        ),
    ),
)


OPERATIONS = (INDEX_WRITE, FP8_WRITE, INT8_WRITE)
