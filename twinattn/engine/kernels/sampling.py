"""Draw a token from each row of logits, without waiting for the device; the kernel `triton` of `sample`.

    _sum        a program for a row and `BLOCK` tokens: its largest logit, the first token that has it, its weights' sum
    _draw       a program for a row: the block in which its position lies, and the token in the block

That is all for greedy rows and for rows without top-p, and nothing of a row depends on another row. With top-p, the
least likely token of the nucleus is found in between, by its logit as an integer of 16, 32 or 64 bits, in their order:

    _bisect     for a row and a block, once for each four bits: the weights by the value of these bits, of those tokens
                whose higher bits are known to be the threshold's
    _cut        for a row and a block: the weights above the threshold, and how many tokens are equal to it

A program adds up the blocks of its row by itself, always in one order: there are no atomics, and no launch for that.
Sums are in float64, as the formula's, and so are the same but for their last bits.

Source: the formula of `twinattn.engine.sampling`; radix selection: Alabi et al. 2012, "Fast K-Selection Algorithms for
GPUs".
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

BLOCK = 4096  # tokens of a program
NUM_WARPS = 8


class Column(NamedTuple):
    """A number of each row, and its stride."""

    at: Any
    stride: Any


class Logits(NamedTuple):
    """Logits [b, v], their strides, and the temperature of each row."""

    at: Any
    strides: Any
    temperature: Any


class Blocks(NamedTuple):
    """Of each block of each row: its largest logit, the first token that has it, and the sum of its weights."""

    maxima: Any
    first: Any
    sums: Any


class Found(NamedTuple):
    """The weights of each block by the next four bits, the threshold's bits so far, and the weights above these."""

    bins: Any
    prefixes: Any
    masses: Any


class Nucleus(NamedTuple):
    """Of each row the threshold and the weights above it; of each block these, the ties, and the weight of one."""

    threshold: Any
    mass: Any
    above: Any
    ties: Any
    weight: Any


def sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, "b"],
    top_p: Float[Tensor, "b"] | None,
    uniform: Float[Tensor, "b"],
) -> Int64[Tensor, "b"]:
    """Draw a token from each row, in two launches, or with `top_p` in 7 for logits of 16 bits and 11 of 32 bits."""
    (b, v), device = logits.shape, logits.device
    tokens = torch.empty(b, dtype=torch.int64, device=device)
    if not b:
        return tokens
    num_blocks = triton.cdiv(v, BLOCK)
    sizes = dict(NUM_BLOCKS=num_blocks, PADDED=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, num_warps=NUM_WARPS)
    maxima, sums, above, weight = torch.empty(4, b, num_blocks, dtype=torch.float64, device=device)
    first, ties = torch.empty(2, b, num_blocks, dtype=torch.int32, device=device)
    rows = Logits(logits, logits.stride(), Column(temperature, temperature.stride(0)))
    blocks = Blocks(maxima, first, sums)
    _sum_kernel[(b, num_blocks)](rows, blocks, v, **sizes)
    cuts = rows.temperature  # is not read without top-p, and the threshold neither
    threshold, mass = tokens, sums
    if top_p is not None:
        cuts = Column(top_p, top_p.stride(0))
        # Two of each, as a launch reads what the one before it has written.
        bins = torch.empty(2, b, num_blocks, 16, dtype=torch.float64, device=device)
        prefixes = torch.empty(2, b, dtype=torch.int64, device=device)
        masses = torch.empty(2, b, dtype=torch.float64, device=device)
        found, wanted = map(Found, bins, prefixes, masses)
        first_shift = 8 * logits.element_size() - 4
        for shift in range(first_shift, -1, -4):
            is_first = shift == first_shift
            _bisect_kernel[(b, num_blocks)](rows, cuts, blocks, found, wanted, v, shift, IS_FIRST=is_first, **sizes)
            found, wanted = wanted, found
        threshold, mass = wanted.prefixes, wanted.masses
    nucleus = Nucleus(threshold, mass, above, ties, weight)
    if top_p is not None:
        _cut_kernel[(b, num_blocks)](rows, cuts, blocks, found, nucleus, v, **sizes)
    place = Column(uniform, uniform.stride(0))
    _draw_kernel[(b,)](rows, cuts, place, blocks, nucleus, tokens, v, int(top_p is not None), **sizes)
    return tokens


@triton.jit
@no_type_check
def _of_row(column, row):
    """Load the number of a row, in float64."""
    return tl.load(column.at + row * column.stride).to(tl.float64)


@triton.jit
@no_type_check
def _load(rows, row, block, v, BLOCK: tl.constexpr):
    """Load a block of a row: the ids of its tokens and their logits, `-inf` past the end."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    at = rows.at + row * rows.strides[0] + ids.to(tl.int64) * rows.strides[1]
    return ids, tl.load(at, mask=ids < v, other=float("-inf"))


@triton.jit
@no_type_check
def _weights(logits, largest, temperature):
    """Return `exp((logits - largest) / temperature)` in float64; of a row or block of `-inf` alone, all 0."""
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.exp((logits.to(tl.float64) - base) / temperature)


@triton.jit
@no_type_check
def _row(blocks, row, temperature, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """Return the largest logit of a row, whether there is a token in it to draw, and the sum of each block."""
    block = tl.arange(0, PADDED)
    of_blocks = tl.load(blocks.maxima + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=float("-inf"))
    largest = tl.max(of_blocks, 0)
    is_sound = (largest > float("-inf")) & (largest < float("inf"))
    added = tl.zeros([PADDED], tl.float64)
    if is_sound & (temperature > 0):
        added = tl.load(blocks.sums + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=0.0)
        added *= _weights(of_blocks, largest, temperature)
    return of_blocks, largest, is_sound, added


@triton.jit
@no_type_check
def _in_order(logits):
    """Return integers in the order of the logits, equal where these are."""
    BITS: tl.constexpr = logits.dtype.primitive_bitwidth
    LOWER: tl.constexpr = 2 ** (BITS - 1) - 1  # all bits but the sign
    if BITS == 16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int64)
    elif BITS == 32:
        bits = logits.to(tl.int32, bitcast=True).to(tl.int64)
    else:
        bits = logits.to(tl.int64, bitcast=True)
    order = tl.where(bits < 0, bits ^ LOWER, bits)
    return tl.where(order == -1, 0, order)  # -0.0 is 0.0


@triton.jit
@no_type_check
def _narrow(bins, prefix, mass, goal, row, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """Choose the value of four bits: the largest one with which the weights from it upwards reach the goal.

    Returns:
        The bits so far with those behind them, and the weights of all that is above them.
    """
    block, bin = tl.arange(0, PADDED)[:, None], tl.arange(0, 16)
    of_blocks = tl.load(bins + (row * NUM_BLOCKS + block) * 16 + bin[None, :], mask=block < NUM_BLOCKS, other=0.0)
    weights = tl.sum(of_blocks, 0)
    from_here = tl.sum(tl.where(bin[:, None] >= bin[None, :], weights[:, None], 0.0), 0)
    chosen = tl.max(tl.where(mass + from_here >= goal, bin, -1), 0)
    # By rounding none may reach it; then it is the smallest one that some token has.
    chosen = tl.where(chosen < 0, tl.min(tl.where(weights > 0, bin, 15), 0), chosen)
    return prefix + chosen, mass + tl.sum(tl.where(bin == chosen + 1, from_here, 0.0), 0)


@triton.jit
@no_type_check
def _first(ends, weights, position, places, NONE: tl.constexpr):
    """Return the first place with some weight that ends after a position; by rounding past all of them, the last."""
    first = tl.min(tl.where((weights > 0) & (ends > position), places, NONE), 0)
    return tl.minimum(first, tl.max(tl.where(weights > 0, places, 0), 0))


@triton.jit(do_not_specialize=["v"])
@no_type_check
def _sum_kernel(
    rows,
    blocks,
    v,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, x = _load(rows, row, block, v, BLOCK)
    if x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    is_bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    largest = tl.max(x, 0)
    at = row * NUM_BLOCKS + block
    tl.store(blocks.first + at, tl.min(tl.where(x == largest, ids, (block + 1) * BLOCK - 1), 0))
    tl.store(blocks.maxima + at, tl.where(is_bad, float("inf"), largest.to(tl.float64)))
    t = _of_row(rows.temperature, row)
    if t > 0:
        tl.store(blocks.sums + at, tl.sum(_weights(x, largest.to(tl.float64), t), 0))


@triton.jit(do_not_specialize=["v", "shift"])
@no_type_check
def _bisect_kernel(
    rows,
    cuts,
    blocks,
    found,
    wanted,
    v,
    shift,
    IS_FIRST: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = _of_row(rows.temperature, row)
    p = _of_row(cuts, row)
    if (t > 0) & (p < 1):
        of_blocks, largest, is_sound, added = _row(blocks, row, t, NUM_BLOCKS, PADDED)
        if is_sound:
            if IS_FIRST:
                prefix = tl.full([], -8, tl.int64)  # the highest four bits are a number of -8 to 7
                mass = tl.full([], 0.0, tl.float64)
            else:
                prefix, mass = tl.load(found.prefixes + row), tl.load(found.masses + row)
                prefix, mass = _narrow(found.bins, prefix, mass, p * tl.sum(added, 0), row, NUM_BLOCKS, PADDED)
                prefix *= 16
            if block == 0:
                tl.store(wanted.prefixes + row, prefix)
                tl.store(wanted.masses + row, mass)
            ids, x = _load(rows, row, block, v, BLOCK)
            # The next four bits, 0 to 15, of a token whose higher bits are the threshold's.
            value = (_in_order(x) >> shift) - prefix
            value = tl.where((value >= 0) & (value < 16), value, 16).to(tl.int32)
            bin = tl.arange(0, 16)
            weights_of_bins = tl.zeros([16], tl.float64)
            if tl.min(value, 0) < 16:
                weights = _weights(x, largest, t)
                for i in tl.static_range(16):
                    weight = tl.sum(tl.where(value == i, weights, 0.0), 0)
                    weights_of_bins = tl.where(bin == i, weight, weights_of_bins)
            tl.store(wanted.bins + (row * NUM_BLOCKS + block) * 16 + bin, weights_of_bins)


@triton.jit(do_not_specialize=["v"])
@no_type_check
def _cut_kernel(
    rows,
    cuts,
    blocks,
    found,
    nucleus,
    v,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = _of_row(rows.temperature, row)
    p = _of_row(cuts, row)
    if (t > 0) & (p < 1):
        of_blocks, largest, is_sound, added = _row(blocks, row, t, NUM_BLOCKS, PADDED)
        if is_sound:
            prefix, mass = tl.load(found.prefixes + row), tl.load(found.masses + row)
            last, mass = _narrow(found.bins, prefix, mass, p * tl.sum(added, 0), row, NUM_BLOCKS, PADDED)
            if block == 0:
                tl.store(nucleus.threshold + row, last)
                tl.store(nucleus.mass + row, mass)
            ids, x = _load(rows, row, block, v, BLOCK)
            order, weights = _in_order(x), _weights(x, largest, t)
            at = row * NUM_BLOCKS + block
            tl.store(nucleus.above + at, tl.sum(tl.where(order > last, weights, 0.0), 0))
            tl.store(nucleus.ties + at, tl.sum((order == last).to(tl.int32), 0))
            tl.store(nucleus.weight + at, tl.max(tl.where(order == last, weights, 0.0), 0))


@triton.jit(do_not_specialize=["v", "has_cuts"])
@no_type_check
def _draw_kernel(
    rows,
    cuts,
    place,
    blocks,
    nucleus,
    tokens,
    v,
    has_cuts,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t = _of_row(rows.temperature, row)
    of_blocks, largest, is_sound, added = _row(blocks, row, t, NUM_BLOCKS, PADDED)
    number = tl.arange(0, PADDED)
    is_block = number < NUM_BLOCKS
    token = tl.load(blocks.first + row * NUM_BLOCKS + tl.min(tl.where(of_blocks == largest, number, NUM_BLOCKS - 1), 0))
    if is_sound & (t > 0):
        p = tl.full([], 1.0, tl.float64)
        if has_cuts != 0:
            p = _of_row(cuts, row)
        last = tl.full([], -(2**63), tl.int64)  # every logit is above it
        taken = tl.zeros([PADDED], tl.int64)  # tokens of each block that are equal to the threshold, and in the nucleus
        if p < 1:
            at = row * NUM_BLOCKS + number
            last = tl.load(nucleus.threshold + row)
            equal = tl.load(nucleus.ties + at, mask=is_block, other=0).to(tl.int64)
            each = tl.max(tl.load(nucleus.weight + at, mask=is_block, other=0.0), 0)
            missing = p * tl.sum(added, 0) - tl.load(nucleus.mass + row)
            needed = tl.maximum(tl.ceil(tl.minimum(missing / each, v)), 1.0).to(tl.int64)
            earlier = tl.cumsum(equal, 0) - equal
            taken = tl.minimum(tl.maximum(needed - earlier, 0), equal)
            added = tl.load(nucleus.above + at, mask=is_block, other=0.0) + taken.to(tl.float64) * each
        ends = tl.cumsum(added, 0)
        position = _of_row(place, row) * tl.max(ends, 0)
        block = _first(ends, added, position, number, PADDED)
        position -= tl.sum(tl.where(number == block, ends - added, 0.0), 0)
        ids, x = _load(rows, row, block, v, BLOCK)
        order = _in_order(x)
        is_tie = (order == last).to(tl.int32)
        rank = tl.cumsum(is_tie, 0)  # from 1
        room = tl.sum(tl.where(number == block, taken, 0), 0)
        is_in = (order > last) | ((is_tie > 0) & (rank <= room))
        weights = tl.where(is_in, _weights(x, largest, t), 0.0)
        token = _first(tl.cumsum(weights, 0), weights, position, ids, (block + 1) * BLOCK)
    tl.store(tokens + row, tl.where(is_sound, token.to(tl.int64), -1))
