"""Both softmaxes of a pair of heads over one read of keys and values, step by step, for a consumer on Hopper.

A consumer warpgroup of `differential_hopper` has 64 rows here, and goes from one softmax to the other: the product of
the last weights of one with the values goes on beside the other, so only one tile of scores is in registers at a time:

    scores      | q1 k1 of step 1 |              | q2 k2 of step 1 |              | q1 k1 of step 2 |
    values      |  += p2 v of step 0             |  += p1 v of step 1             |  += p2 v of step 1
    softmax                       |      1       |                 |      2       |                 |      1

An output is rescaled only where a new score is far above what the weights of its row are relative to (`SLACK`): then it
is what they are relative to from there on. Weights are below 2 ** SLACK, and the result is the same.

Source: Shah et al. 2024, "FlashAttention-3"; rare rescaling: FlashAttention-4, "flash_fwd_sm100.py".
"""

from typing import Any, NamedTuple, no_type_check

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastattn.kernels.triton.hopper import leave
from fastattn.kernels.triton.load_hopper import parity
from fastattn.kernels.triton.prompts_hopper import (
    give_turn,
    here,
    in_16_bits,
    mask_keys,
    sums_of_threads,
    take_turn,
)

SLACK = tl.constexpr(8.0)  # by how much a score, in base 2, may be above what its row's weights are relative to


class Softmax(NamedTuple):
    """One of the two softmaxes under way.

    Attributes:
        acc: the weighted sum of the values.
        row_max: what the weights of each row are relative to: its highest score, in base 2, or `SLACK` less.
        row_sum: [rows, 4], the sums of each row's threads.
    """

    acc: Any
    row_max: Any
    row_sum: Any


def _rescaling(size: int) -> tuple[str, str]:
    """Return instructions that multiply a thread's elements by factors, unless all of its warp are 1; and operands.

    Elements 0 and 2 are of the two rows that a thread has of a product.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * size + i};" for i in range(size))
    is_one = f"setp.neu.f32 p, ${2 * size}, 0f3F800000; setp.neu.or.f32 p, ${2 * size + 2}, 0f3F800000, p;"
    asm = f"{{ .reg .pred p; {is_one} vote.sync.any.pred p, p, -1; @!p bra ENDED; {products} ENDED: }}"
    return asm, ",".join(["=f"] * size + [str(i) for i in range(size)] + ["f"] * size)


RESCALE, OPERANDS = map(tl.constexpr, _rescaling(64))


@gluon.jit
@no_type_check
def _take_scores(products, mine, step, seen, unit, MASKED: gl.constexpr):
    """Return a softmax that has taken the scores of a step, but for the values, and the weights of these."""
    OUTPUT: gl.constexpr = mine.acc.type.layout
    HALF: gl.constexpr = products.shape[0]
    KEYS: gl.constexpr = products.shape[1]
    if MASKED:
        products = mask_keys(products, step, seen)
    # Of each thread's pairs first, so that fewer instructions wait for one another.
    highest = gl.max(gl.max(products.reshape([HALF, KEYS // 8, 4, 2]), 3), 1)
    row_max = gl.convert_layout(gl.max(highest, 1), mine.row_max.type.layout, assert_trivial=True) * unit
    row_max = gl.where(row_max - mine.row_max > SLACK, row_max, mine.row_max)
    start = gl.where(row_max == float("-inf"), 0.0, row_max)  # -inf - -inf would be NaN
    rescale = gl.exp2(mine.row_max - start)
    of_rows = gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
    acc = gl.inline_asm_elementwise(RESCALE, OPERANDS, [mine.acc, of_rows], dtype=gl.float32, is_pure=False, pack=64)
    x = gl.exp2(products * unit - start[:, None])
    own_sums = sums_of_threads(x)
    row_sum = gl.convert_layout(mine.row_sum, own_sums.type.layout, assert_trivial=True)
    of_sums = gl.convert_layout(rescale, gl.SliceLayout(1, own_sums.type.layout))
    row_sum = here(row_sum * of_sums[:, None] + own_sums)
    return Softmax(acc, row_max, row_sum), x


@gluon.jit
@no_type_check
def _rounded(x, TYPE: gl.constexpr, OUTPUT: gl.constexpr):
    """Return weights as an operand of their product with the values."""
    return gl.convert_layout(in_16_bits(x, TYPE), gl.DotOperandLayout(0, OUTPUT, 2))


@gluon.jit
@no_type_check
def half_of(rows, NUMBER: gl.constexpr):
    """Return the elements of the first or the second head in rows in shared memory."""
    SIZE: gl.constexpr = rows.shape[1] // 2
    return rows.slice(NUMBER * SIZE, SIZE, 1)


@gluon.jit
@no_type_check
def start_pairs(q, room, items, seen, unit, OUTPUT: gl.constexpr):
    """Return both softmaxes after the first scores of the first one, and its weights."""
    KEYS: gl.constexpr = room.key.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    KEY_SLOTS: gl.constexpr = room.key.shape[0]
    HALF: gl.constexpr = q.shape[0]
    DV: gl.constexpr = room.value.shape[2]
    slot = items % KEY_SLOTS
    mbarrier.wait(room.has_keys.index(slot), parity(items, KEY_SLOTS))
    fence_async_shared()  # queries come by `cp.async`, which products see only behind a fence
    products = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    keys = half_of(room.key.index(slot), 0).permute((1, 0))
    products = warpgroup_mma(half_of(q, 0), keys, products, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    row_max = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = sums_of_threads(gl.zeros([HALF, KEYS], gl.float32, SCORES))
    nothing = Softmax(gl.zeros([HALF, DV], gl.float32, OUTPUT), row_max, row_sum)
    first, x = _take_scores(products, nothing, 0, seen, unit, True)
    return first, nothing, _rounded(x, room.key.dtype, OUTPUT)


@gluon.jit
@no_type_check
def attend_half(mine, other, weights, at, q, room, seen, HOW: gl.constexpr):
    """Attend with one softmax to the keys of a step, and add the values of the other one's last weights.

    `HOW` says which consumer it is, which softmax, and whether the step is masked.
    """
    NUMBER: gl.constexpr = HOW[1]
    HALF: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = room.key.shape[1]
    KEY_SLOTS: gl.constexpr = room.key.shape[0]
    SCORES: gl.constexpr = mine.row_max.type.layout.parent
    OUTPUT: gl.constexpr = mine.acc.type.layout
    step, items, unit = at
    slot = items % KEY_SLOTS
    value_slot = (items - 1 + NUMBER) % KEY_SLOTS  # the first softmax is a step ahead
    if NUMBER == 0:  # and for the other softmax
        mbarrier.wait(room.has_keys.index(slot), parity(items, KEY_SLOTS))
        mbarrier.wait(room.has_values.index(slot), parity(items, KEY_SLOTS))
        if not room.IN_BULK:
            fence_async_shared()
    take_turn(HOW[0])
    keys = half_of(room.key.index(slot), NUMBER).permute((1, 0))
    products = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    products = warpgroup_mma(half_of(q, NUMBER), keys, products, use_acc=False, is_async=True)
    sums = warpgroup_mma(weights, room.value.index(value_slot), other.acc, is_async=True)
    give_turn(HOW[0])
    products = warpgroup_mma_wait(1, deps=[products])
    if NUMBER == 1:
        leave(room.no_keys.index(slot))
    mine, x = _take_scores(products, mine, step, seen, unit, HOW[2])
    sums, _, x = warpgroup_mma_wait(0, deps=[sums, weights, x])
    if NUMBER == 0:
        leave(room.no_values.index(value_slot))
    weights = _rounded(x, room.key.dtype, OUTPUT)  # only now, into the registers of the weights before
    return mine, Softmax(sums, other.row_max, other.row_sum), weights


@gluon.jit
@no_type_check
def attend_both(state, steps, q, room, seen, unit, WHO: gl.constexpr, MASKED: gl.constexpr):
    """Attend with both softmaxes to the keys of some steps."""
    first, second, weights, items = state
    for step in range(steps[0], steps[1]):
        at = step, items, unit
        first, second, weights = attend_half(first, second, weights, at, q, room, seen, (WHO, 0, MASKED))
        second, first, weights = attend_half(second, first, weights, at, q, room, seen, (WHO, 1, MASKED))
        items += 1
    return first, second, weights, items


@gluon.jit
@no_type_check
def add_last(softmax, weights, items, room):
    """Add the values of the last step."""
    KEY_SLOTS: gl.constexpr = room.key.shape[0]
    slot = (items - 1) % KEY_SLOTS
    mbarrier.wait(room.has_values.index(slot), parity(items - 1, KEY_SLOTS))
    fence_async_shared()
    sums = warpgroup_mma(weights, room.value.index(slot), softmax.acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[sums, weights])
    leave(room.no_values.index(slot))
    return Softmax(acc, softmax.row_max, softmax.row_sum)
