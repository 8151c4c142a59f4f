"""Writes of new tokens into four-bit pages, int4 and nvfp4.

Pools are compared by what they are read as: the elements of int4 less their zero point, its scales without their last
four bits. Scales that are not finite are NaN, with zeros under them; a row of zeros, or a group, may have any scale.

The sums of a turned row may be added in any order: a quotient that is halfway between two numbers, up to their rounding
in float32, may be rounded either way. `ties` has rows with exact sums, and so exact halves.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refattn.four_bits import Int4Scales, Nvfp4Scales
from twinattn.kit.example import Arguments
from twinattn.kit.four_bits import GROUP, e2m1, elements_of, hadamard, in_bytes, interleaved, with_zero_points
from twinattn.kit.operations.four_bits import POOLS, by_group, by_head
from twinattn.kit.operations.inputs import Drawn
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special, Without
from twinattn.kit.operations.tiles import of_size
from twinattn.kit.operations.written import (
    EMPTY,
    HALF,
    MANY_TOKENS,
    PAST_TILES,
    SMALLEST,
    TOKENS,
    drawn_rows,
    overwritten,
    to_fp8,
    unread_rows,
    written,
)

LARGEST = 15  # an element of int4, and a zero point
ROUNDING = 2.0**-24  # the relative error of a sum in float32
NEAR = (0, -1, 1)  # as it is, a little smaller, and a little larger
FORMAT = torch.float8_e4m3fn  # the format of the scales of nvfp4
Change = Callable[[Tensor], Tensor]


def inputs_of(drawn: Drawn, a: Arguments, case: Case, n: int, scales: Callable[[int], Tensor]) -> Inputs:
    """Return the inputs of a write: new tokens, pools of random bytes, and scales for a head size."""
    for name in ("key", "value"):
        d = a[name].shape[-1]
        a[f"{name}_cache"] = drawn.whole(0, 256, n, case["block_size"], case["heads"], d // 2).to(torch.uint8)
        a[f"{name}_scales"] = scales(d)
    a["exact_halves"] = case["values"] == "ties"
    return Inputs(a, unread_rows(a) | {name: overwritten(a[name], a["slot_mapping"]) for name in POOLS})


def as_it_is(x: Tensor) -> Tensor:
    """Return a tensor."""
    return x


def swapped(elements: Tensor) -> Tensor:
    """Return elements in an order in which the even ones are in the high halves of the bytes."""
    return interleaved(elements[..., 1::2], elements[..., ::2])


def halves_apart(elements: Tensor) -> Tensor:
    """Return elements in an order in which the first half of a row is in the low halves of the bytes."""
    return interleaved(*elements.chunk(2, -1))


def heads_first(pool: Tensor, write: Change) -> Tensor:
    """Write into a pool of scales as if the heads of a page came before its tokens."""
    n, p, hk, *groups = pool.shape
    return write(by_head(pool)).transpose(1, 2).reshape(n, p, hk, *groups)


def groups_first(pool: Tensor, write: Change) -> Tensor:
    """Write into a pool of scales as if the groups of a page came before its tokens."""
    return write(by_group(pool)).permute(0, 2, 3, 1).reshape(pool.shape)


def in_place(pool: Tensor, write: Change) -> Tensor:
    """Write into a pool."""
    return write(pool)


# --- int4 ---


class Int4Rows(NamedTuple):
    """Quantized rows, and what is as right: bytes with scales and zero points, and scales alone."""

    parts: list[tuple[Tensor, Tensor]]
    scales: list[Tensor]


def draw_int4(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new keys and values, pools of bytes and the scales of their rows."""
    drawn, a, n = drawn_rows(case, dtype, case["more"])
    for name in ("key", "value"):
        rows, hk, d = a[name].shape
        if case["values"] == "one sign" and rows:  # turned, all elements are above 0, or all are below
            a[name] = 0.1 * a[name]
            a[name][::2, :, 0], a[name][1::2, :, 0] = 50, -50
        if case["values"] in ("ties", "even range"):  # turned, they are multiples of a half
            halves = drawn.whole(0, 12, rows, hk, d) * (drawn.whole(0, 3, rows, hk, d) == 0)
            halves[..., :1] = 2 * LARGEST  # from 0 to 15, so that the scale is 1
            if case["values"] == "even range":  # from -7.5 to 7.5, or a multiple of these in every other row
                halves[..., :1], halves[..., 1:2] = LARGEST, -LARGEST
                halves = halves.double()
                halves[::2] *= drawn.uniform(len(halves[::2]), hk, 1, low=0.5, dtype=torch.float32).double()
            a[name] = (halves.double() / 2 @ hadamard(d, torch.float64)).to(dtype)

    def scales(_: int) -> Tensor:
        sizes = drawn.uniform(n, case["block_size"], case["heads"], low=0.5, dtype=torch.float32)
        return with_zero_points(sizes, drawn.whole(0, 16, *sizes.shape))

    return inputs_of(drawn, a, case, n, scales)


def turned(x: Tensor) -> Tensor:
    """Return rows of float64 that a Hadamard matrix turns."""
    return x @ hadamard(x.shape[-1], x.dtype)


def int4_rows(
    x: Tensor,
    is_exact: bool,
    *,
    turn: Change = turned,
    nearest: Change = torch.round,
    steps: int = LARGEST,
    with_zero: bool = True,
    symmetric: bool = False,
    keep_zero: bool = True,
    clamped: bool = True,
    smallest: float = torch.finfo(torch.float32).tiny,
    order: Change = as_it_is,
) -> Int4Rows:
    """Quantize rows.

    Args:
        x: the rows, in float64.
        is_exact: whether all sums are.
        turn: turns them.
        nearest: rounds elements.
        steps: how many there are from the smallest to the largest element.
        with_zero: whether every row has 0 in its range.
        symmetric: whether every zero point is 8, and the scale a seventh of the largest element.
        keep_zero: whether the zero point is written.
        clamped: whether an element above 15 becomes 15, and does not run over into its byte.
        smallest: the smallest scale.
        order: puts the elements into another order.
    """
    y, d = turn(x), x.shape[-1]
    off = 0.0 if is_exact else ROUNDING * (4 + (d & -d).bit_length())
    most = off * (x.abs() @ hadamard(d, x.dtype).abs())  # sums in no order are further apart
    edge = most.amax(-1, keepdim=True)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    low, high = (low.clamp(max=0), high.clamp(min=0)) if with_zero else (low, high)
    span = 2 * torch.maximum(high, -low) if symmetric else high - low

    def bits(sign: int) -> Tensor:
        scale = ((span + 2 * sign * edge) / (LARGEST - 1 if symmetric else steps)).float()
        return scale.clamp(min=smallest).view(torch.int32) & ~LARGEST

    def near(quotient: Tensor, most: Tensor, sign: int) -> Tensor:
        """Return a quotient, or a smaller or larger one: the last four bits of a scale may be zeros or not, too."""
        return quotient + sign * (most + (0 if is_exact else 32 * ROUNDING) * quotient.abs())

    scale, parts = bits(0).view(torch.float32).double(), []
    for of_zero in NEAR:
        zero = near(-low / scale, edge / scale, of_zero).round().nan_to_num(0.0).clamp(0, LARGEST)
        zero = torch.full_like(zero, 8) if symmetric else zero
        for sign in NEAR:
            quotient = near(y / scale, most / scale, sign)
            elements = (nearest(quotient) + zero).nan_to_num(0.0).clamp(0, LARGEST + (not clamped))
            stored = (bits(0) | (zero.int() if keep_zero else 0)).view(torch.float32)
            parts.append((in_bytes(order(elements.to(torch.int32))), stored[..., 0]))
    its_zero = parts[0][1].view(torch.int32)[..., None] & LARGEST
    scales = [(x | its_zero).view(torch.float32)[..., 0] for x in steps_between(bits(-1), bits(0), bits(1))]
    return Int4Rows(parts, scales)


def steps_between(first: Tensor, middle: Tensor, last: Tensor) -> list[Tensor]:
    """List the bits of all scales from the first to the last; their last four bits are zero."""
    found = [middle, first]
    while (found[-1] < last).any() and len(found) < 20:
        found.append(torch.minimum(found[-1] + LARGEST + 1, last))
    return found


def int4_read(pool: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a pool is read as: elements less their zero points, scales without them, and zero points."""
    bits = scales.contiguous().view(torch.int32)
    zero, scale = bits & LARGEST, (bits & ~LARGEST).view(torch.float32)
    elements, scale = under(elements_of(pool) - zero[..., None], scale)
    return elements, scale, zero.masked_fill((elements == 0).all(-1), 0)


def under(elements: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return elements, 0 under scales that are not finite, and the scales, NaN then, and 1 over zeros alone."""
    lost = ~scale.isfinite()
    elements = elements.masked_fill(lost[..., None], 0)
    return elements, scale.masked_fill((elements == 0).all(-1), 1.0).masked_fill(lost, torch.nan)


def int4_written(
    a: Arguments,
    compute: torch.dtype,
    *,
    value_turn: Change = turned,
    put: Callable[[Tensor, Change], Tensor] = in_place,
    of_values: str = "value",
    **wrong: Any,
) -> Answers:
    """Return the pools after the write, as they are read.

    Args:
        a: the arguments of a call.
        compute: not used, as everything is computed in float64.
        value_turn: turns values.
        put: writes into a pool of scales.
        of_values: the rows whose scales are written for values.
        wrong: other arguments of `int4_rows`.
    """
    slots, answers = a["slot_mapping"], dict[str, Any]()
    rows = {}
    for name in ("key", "value"):
        turn = dict(turn=value_turn) if name == "value" and value_turn is not turned else {}
        rows[name] = int4_rows(a[name][: len(slots)].double(), a["exact_halves"], **(wrong | turn))
    for name in ("key", "value"):
        mine, its_scales = rows[name], rows[of_values if name == "value" else name]

        def after(scale: Tensor, name: str = name) -> Tensor:
            return put(a[f"{name}_scales"], lambda x: written(x, [scale], slots)[0])

        pools = [written(a[f"{name}_cache"], [part], slots)[0] for part, _ in mine.parts]
        read = [int4_read(pool, after(scale)) for pool, (_, scale) in zip(pools, its_scales.parts, strict=True)]
        scales = [int4_read(pools[0], after(scale))[1] for scale in its_scales.scales]
        elements, _, zeros = zip(*read, strict=True)
        answers |= {f"{name} elements": [*elements], f"{name} scales": scales, f"{name} zero points": [*zeros]}
    return answers


def int4_seen(came: Any, a: Arguments) -> Answers:
    """Return what the pools are read as."""
    names, found = ("elements", "scales", "zero points"), dict[str, Any]()
    for name in ("key", "value"):
        parts = int4_read(a[f"{name}_cache"].detach().cpu(), a[f"{name}_scales"].detach().cpu())
        found |= {f"{name} {part}": x for part, x in zip(names, parts, strict=True)}
    return found


def away_from_zero(quotient: Tensor) -> Tensor:
    """Round halves away from zero."""
    return (quotient.abs() + 0.5).floor() * quotient.sign()


def int4_mistake(name: str, says: str, **wrong: Any) -> Mistake:
    """Return a mistake of a write of int4."""
    return Mistake(f"int4-{name}", says, partial(int4_written, **wrong))


def names_of(*parts: str) -> frozenset[str]:
    """Return the names of what is compared of both pools."""
    return frozenset(f"{name} {part}" for name in ("key", "value") for part in parts)


KEEPS_NAN = "A NaN makes the scale of its {} NaN."
INT4_WRITE = Operation(
    name="int4_write",
    function="write",
    signature="`key`, `value` `[rows, hk, d]`; `key_cache`, `value_cache` of bytes, two elements each, and "
    "`key_scales`, `value_scales` `[n, p, hk]`, each with its zero point in its last four bits, all changed in place; "
    "`slot_mapping` `[t]`; both pools of scales also as `scales`; rows are turned by a Hadamard matrix",
    draw=draw_int4,
    oracle=int4_written,
    sizes=dict(
        tokens=TOKENS,
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 3),
        head_size=(16, 64, 6),
        more=(8, 0, 32),
        padding=(0, 3),
        values=("normal",),
    ),
    dimensions=PAST_TILES
    | dict(heads=of_size("heads", tokens=5))
    | {name: of_size(name, 513, multiple=2, tokens=5) for name in ("head_size", "more")},
    specials=(
        Special(
            "ties",
            "A quotient halfway between two integers is rounded to the even one.",
            dict(values=("ties",), head_size=(16,), more=(0,)),
        ),
        Special("zeros", "A row of zeros stays zeros, under any scale.", dict(values=("zeros",))),
        Special(
            "one sign", "Turned rows of one sign have 0 in their range, too.", dict(values=("one sign",), more=(0,))
        ),
        Special(
            "even range",
            "A row whose range is as far below 0 as above has no element past 15.",
            dict(values=("even range",), head_size=(16,), more=(0,)),
        ),
        Special("any size", "A row may be of any size, its elements subnormal, too.", dict(values=("any size",))),
        Special("keeps nan", KEEPS_NAN.format("row"), dict(values=("nan",))),
        EMPTY,
        MANY_TOKENS,
    ),
    derived=dict(scales=lambda a: Int4Scales(a["key_scales"], a["value_scales"])),
    exact=names_of("elements", "scales", "zero points"),
    seen=int4_seen,
    outputs=(),
    changes=POOLS,
    strided=("key", "value", *POOLS, "slot_mapping"),
    pools=POOLS,
    flips=("slot_mapping",),
    mistakes=(
        int4_mistake("rows-not-turned", "Rows are not turned.", turn=as_it_is),
        int4_mistake("keys-turned-alone", "Keys are turned, and values are not.", value_turn=as_it_is),
        int4_mistake(
            "rows-turned-too-short",
            "The matrix is divided by the root of twice the head size (lmdeploy 4510).",
            turn=lambda x: 0.5**0.5 * turned(x),
            value_turn=lambda x: 0.5**0.5 * turned(x),
        ),
        int4_mistake("written-halves-swapped", "The even elements are in the high halves of the bytes.", order=swapped),
        int4_mistake(
            "written-halves-apart",
            "The first half of a row is in the low halves of the bytes, not its even elements.",
            order=halves_apart,
        ),
        int4_mistake("of-16-steps", "The range of a row is divided by 16, not by 15.", steps=16),
        int4_mistake("symmetric", "Every zero point is 8, whatever the range of the row.", symmetric=True),
        int4_mistake("range-without-zero", "A row of one sign has no 0 in its range.", with_zero=False),
        int4_mistake("zero-not-written", "The zero point is taken, and not written.", keep_zero=False),
        int4_mistake("not-clamped", "An element above 15 runs over into the other half of its byte.", clamped=False),
        *(
            int4_mistake(f"scale-at-least-{least:.0e}", f"A scale is at least {least:.0e}.", smallest=least)
            for least in SMALLEST
        ),
        int4_mistake("cut", "Quotients are cut, not rounded.", nearest=torch.trunc),
        int4_mistake("halves-away-from-zero", "Halves are rounded away from zero.", nearest=away_from_zero),
        int4_mistake(
            "written-scales-by-head", "Scales are written in another layout, heads before tokens.", put=heads_first
        ),
        int4_mistake("scales-of-keys-written", "Values get the scales of the keys.", of_values="key"),
    ),
)


# --- nvfp4 ---


def draw_nvfp4(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new keys and values, pools of bytes, the scales of their groups, and one number for all of each."""
    drawn, a, n = drawn_rows(case, dtype, case["more"])
    numbers = {name: case[name] for name in ("key_scale", "value_scale")}
    for name in ("key", "value"):
        rows, hk, d = a[name].shape
        if case["values"] == "ties":
            shape = (rows, hk, d // GROUP, 1)
            scale = drawn.whole(8, 16, *shape).double() / 8 * 2.0 ** drawn.whole(-2, 3, *shape).double()
            middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
            elements = middles[drawn.whole(0, len(middles), *shape[:-1], GROUP)]
            elements = elements * drawn.whole(0, 2, *elements.shape).mul(2).sub(1)
            elements[..., :1] = 6
            # in every other group it is the scale that is halfway between two numbers of its format
            of_scales = torch.zeros_like(elements)
            of_scales[..., :1] = 6 * (1 + drawn.whole(0, 2, *shape).double() / 8 + 2.0**-4)
            is_power = drawn.whole(0, 2, *shape) == 0
            scale = torch.where(is_power, scale.log2().floor().exp2(), scale)
            elements = torch.where(is_power, of_scales, elements)
            a[name] = (elements * scale * numbers[f"{name}_scale"]).flatten(2).to(dtype)
        if case["values"] == "small groups":  # scales from 0.3 down to half of the smallest number of their format
            sizes = 2.0 ** -drawn.whole(0, 10, rows, hk, d // GROUP, 1).double() * numbers[f"{name}_scale"]
            a[name] = (a[name].double().unflatten(-1, (-1, GROUP)) * sizes).flatten(2).to(dtype)

    def scales(d: int) -> Tensor:
        sizes = drawn.uniform(n, case["block_size"], case["heads"], d // GROUP, low=0.1, dtype=torch.float32)
        return sizes.to(FORMAT)

    inputs = inputs_of(drawn, a, case, n, scales)
    inputs.arguments.update(numbers)
    return inputs


def to_e2m1(size: Tensor, nearest: Change = torch.round) -> Tensor:
    """Round sizes to nvfp4, to nearest, ties to even: 0 to 7."""
    size = size.clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return nearest(size / step).nan_to_num(0.0).int() + 2 * (size >= 2).int() + 2 * (size >= 4).int()


def to_scale(quotient: Tensor, off: float) -> list[Tensor]:
    """Round the scales of groups to e4m3, saturating; also slightly smaller and larger ones."""
    return to_fp8(quotient, FORMAT, off)


def nvfp4_rows(
    x: Tensor,
    number: float,
    is_exact: bool,
    *,
    nearest: Change = torch.round,
    round_scale: Callable[[Tensor, float], list[Tensor]] = to_scale,
    late: bool = False,
    elements_by_number: bool = True,
    scales_by_number: bool = True,
    order: Change = as_it_is,
) -> list[tuple[Tensor, Tensor]]:
    """Quantize rows, and return bytes and scales; each element may be that of any of them.

    Args:
        x: the rows, in float64.
        number: the number for all rows.
        is_exact: whether halves are exact.
        nearest: rounds elements.
        round_scale: rounds the scales of groups.
        late: whether elements are divided by a scale before it is rounded.
        elements_by_number: whether elements are divided by the number, too.
        scales_by_number: whether scales are.
        order: puts the elements into another order.
    """
    groups, off = x.unflatten(-1, (-1, GROUP)), 0.0 if is_exact else HALF
    of_all = float(torch.tensor(number, dtype=torch.float32))
    quotient = groups.abs().amax(-1, keepdim=True) / (6 * (of_all if scales_by_number else 1.0))
    parts = []
    for scale in round_scale(quotient, off):
        divisor = (quotient if late else scale.double()) * (of_all if elements_by_number else 1.0)
        for sign in NEAR:
            steps = to_e2m1((groups / divisor).abs() * (1 + sign * off), nearest)
            elements = (steps | groups.signbit().int() << 3).flatten(-2)
            parts.append((in_bytes(order(elements)), scale[..., 0].to(FORMAT)))
    return parts


def nvfp4_read(pool: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a pool is read as: numbers, and the scales of their groups."""
    numbers, scale = e2m1(elements_of(pool)).unflatten(-1, (-1, GROUP)), scales.float()
    numbers, scale = under(numbers.masked_fill((scale == 0)[..., None], 0), scale)
    return numbers.flatten(-2) + 0.0, scale  # and 0 for -0


def nvfp4_written(
    a: Arguments,
    compute: torch.dtype,
    *,
    put: Callable[[Tensor, Change], Tensor] = in_place,
    value_number: str = "value_scale",
    **wrong: Any,
) -> Answers:
    """Return the pools after the write, as they are read.

    Args:
        a: the arguments of a call.
        compute: not used, as everything is computed in float64.
        put: writes into a pool of scales.
        value_number: the number for all values.
        wrong: other arguments of `nvfp4_rows`.
    """
    slots, answers = a["slot_mapping"], dict[str, Any]()
    for name, number in (("key", a["key_scale"]), ("value", a[value_number])):
        read = []
        for pairs, scale in nvfp4_rows(a[name][: len(slots)].double(), number, a["exact_halves"], **wrong):
            pool = written(a[f"{name}_cache"], [pairs], slots)[0]

            def write(scales: Tensor, scale: Tensor = scale) -> Tensor:
                return written(scales.float(), [scale.float()], slots)[0].to(FORMAT)

            read.append(nvfp4_read(pool, put(a[f"{name}_scales"], write)))
        numbers, scales = zip(*read, strict=True)
        answers |= {f"{name} numbers": [*numbers], f"{name} scales": [*scales]}
    return answers


def nvfp4_seen(came: Any, a: Arguments) -> Answers:
    """Return what the pools are read as."""
    found = dict[str, Any]()
    for name in ("key", "value"):
        parts = nvfp4_read(a[f"{name}_cache"].detach().cpu(), a[f"{name}_scales"].detach().cpu())
        found |= dict(zip((f"{name} numbers", f"{name} scales"), parts, strict=True))
    return found


def to_power_of_two(quotient: Tensor, off: float) -> list[Tensor]:
    """Round the scales of groups up to powers of two."""
    return [x.clamp(min=2.0**-9).log2().ceil().exp2() for x in to_scale(quotient, off)]


def to_scale_or_nan(quotient: Tensor, off: float) -> list[Tensor]:
    """Round the scales of groups to e4m3, with NaN for those that are too large."""
    return [x.masked_fill(quotient > 464, torch.nan) for x in to_scale(quotient, off)]


def nvfp4_mistake(name: str, says: str, **wrong: Any) -> Mistake:
    """Return a mistake of a write of nvfp4."""
    return Mistake(f"nvfp4-{name}", says, partial(nvfp4_written, **wrong))


NVFP4_WRITE = Operation(
    name="nvfp4_write",
    function="write",
    signature="`key`, `value` `[rows, hk, d]`; `key_cache`, `value_cache` of bytes, two e2m1 elements each, and "
    "`key_scales` `[n, p, hk, d/16]`, `value_scales` in e4m3, all changed in place; `slot_mapping` `[t]`; `key_scale`, "
    "`value_scale`, one number for all keys and one for all values; the pools of scales and the numbers also as "
    "`scales`",
    draw=draw_nvfp4,
    oracle=nvfp4_written,
    sizes=dict(
        tokens=TOKENS,
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 3),
        head_size=(16, 64, 48),
        more=(16, 0),
        padding=(0, 3),
        key_scale=(0.037, 1.0, 0.52),
        value_scale=(0.61, 1.0, 0.0021),
        values=("normal",),
    ),
    without=dict(key_scale=Without(1.0, ("key_scale",)), value_scale=Without(1.0, ("value_scale",))),
    dimensions=PAST_TILES
    | dict(heads=of_size("heads", tokens=5))
    | {name: of_size(name, 513, multiple=GROUP, tokens=5) for name in ("head_size", "more")},
    specials=(
        Special(
            "ties",
            "A quotient halfway between two numbers, and a scale, is rounded to the even one.",
            dict(values=("ties",), key_scale=(0.5, 1.0, 4.0), value_scale=(2.0, 1.0)),
        ),
        Special("zeros", "A group of zeros stays zeros, under any scale.", dict(values=("zeros",))),
        Special(
            "small groups",
            "The scale of a group may be subnormal in its format, or 0.",
            dict(values=("small groups",), key_scale=(0.037, 1.0), value_scale=(0.61, 1.0)),
        ),
        Special(
            "saturates",
            "Numbers beyond the format, infinity too, become its largest.",
            dict(values=("large",), key_scale=(0.037, 1.0)),
        ),
        Special("keeps nan", KEEPS_NAN.format("group"), dict(values=("nan",))),
        EMPTY,
        replace(MANY_TOKENS, sizes={**MANY_TOKENS.sizes, "head_size": (16,)}),
    ),
    derived=dict(
        scales=lambda a: Nvfp4Scales(a["key_scales"], a["value_scales"], a["key_scale"], a["value_scale"]),
    ),
    exact=names_of("numbers", "scales"),
    seen=nvfp4_seen,
    outputs=(),
    changes=POOLS,
    strided=("key", "value", *POOLS, "slot_mapping"),
    pools=POOLS,
    flips=("slot_mapping",),
    mistakes=(
        nvfp4_mistake(
            "scale-rounded-late", "Elements are divided by the scale of their group before it is rounded.", late=True
        ),
        nvfp4_mistake(
            "written-number-ignored",
            "The number for all keys, or values, is left out.",
            elements_by_number=False,
            scales_by_number=False,
        ),
        nvfp4_mistake(
            "elements-without-number",
            "Elements are divided by the scale of their group alone.",
            elements_by_number=False,
        ),
        nvfp4_mistake("number-of-keys", "Values are divided by the number of the keys.", value_number="key_scale"),
        nvfp4_mistake(
            "scales-of-mxfp4", "The scales of groups are powers of two, as in mxfp4.", round_scale=to_power_of_two
        ),
        nvfp4_mistake(
            "no-subnormal-scales",
            "A scale is at least the smallest normal number of its format.",
            round_scale=lambda quotient, off: [x.clamp(min=2.0**-6) for x in to_scale(quotient, off)],
        ),
        nvfp4_mistake("does-not-saturate", "A scale beyond its format becomes NaN.", round_scale=to_scale_or_nan),
        nvfp4_mistake(
            "written-halves-swapped", "The even elements are in the high halves of the bytes.", order=swapped
        ),
        nvfp4_mistake(
            "written-halves-apart",
            "The first half of a row is in the low halves of the bytes, not its even elements.",
            order=halves_apart,
        ),
        nvfp4_mistake("cut", "Quotients are cut, not rounded.", nearest=torch.trunc),
        nvfp4_mistake("halves-up", "Halves are rounded away from zero.", nearest=lambda x: (x + 0.5).floor()),
        nvfp4_mistake(
            "written-scales-by-head", "Scales are written in another layout, heads before tokens.", put=heads_first
        ),
        nvfp4_mistake(
            "written-scales-by-group", "Scales are written in another layout, groups before tokens.", put=groups_first
        ),
    ),
)
OPERATIONS = (INT4_WRITE, NVFP4_WRITE)
