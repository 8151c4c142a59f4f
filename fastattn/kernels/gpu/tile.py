"""What one Triton program does: attend from a tile of queries to a run of keys, a step of keys at a time.

A tile's rows are the tokens of one sequence times the query heads that share a key head, so that all of them are rows
of one matrix product: row `r` is token `r // GROUP`, head `r % GROUP` of the group.

Source: Dao et al. 2022, "FlashAttention"; Kwon et al. 2023, "PagedAttention"; Ainslie et al. 2023, "GQA".
"""

from functools import cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.kernels import device as devices
from fastattn.kernels.gpu.quantized import (
    dequantize,
    dequantize_pairs,
    power_of_two,
    prepare_query,
    row_scale,
    scale_groups,
    value_type,
)

INTERPRETED = triton.knobs.runtime.interpret  # kernels run in Python, on CPU tensors

# What changes from batch to batch, which must not lead to another compilation.
CHANGING = (
    *("block_table", "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "query_positions", "first_keys", "table_row_stride"),
    *("num_tokens", "num_seqs", "splits", "left", "right", "first_visible", "last_visible"),
    *("tree_lens", "depths", "ancestors", "tree_width", "prefix_lse_head_stride"),
)


# Columns of a product of more than 16 rows with values, at least. With 16 and 32, Triton 3.6 reads memory that is not
# its own for values that come through registers: all of fp8, and others in a pool that begins anywhere.
FEWEST_COLUMNS = tl.constexpr(64)
SCRATCH_BYTES = 4096  # of shared memory that a program needs beside its tile and its steps


class LaunchConfig(NamedTuple):
    """The shape of a launch.

    Attributes:
        block_m: rows of a tile.
        block_n: keys of a step.
        num_warps: warps of a program.
        num_stages: steps in flight.
        splits: into how many runs the keys of a sequence of average length are divided.
        most_splits: and those of the longest, at most.
        registers: most registers of a thread, so that programs of another launch fit beside it; None for any number.
        run: keys of a split, if the splits are to begin at multiples of it whatever else there is; 0 to share the keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    most_splits: int
    registers: int | None = None
    run: int = 0


LATENT_16 = LaunchConfig(16, 32, 4, 3, 1, 1)
LATENT_64 = LaunchConfig(64, 64, 8, 2, 1, 1)


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; a few for the interpreter, so that its tests split keys too."""
    return 4 if INTERPRETED else devices.num_multiprocessors(device)


def fit(
    tuning: LaunchConfig,
    device: torch.device,
    *,
    row_bytes: int,
    key_bytes: int,
    fewest_stages: int = 1,
    spare: int = 0,
) -> LaunchConfig:
    """Shrink a launch to the shared memory of a device: its steps in flight first, then their keys, then its rows.

    Args:
        tuning: the launch.
        device: where it is to run.
        row_bytes: bytes of a row of the tile.
        key_bytes: bytes that a step reads for a key, those of its value included.
        fewest_stages: steps in flight that are left: 2 where keys are values, as alone they would be stored twice.
        spare: steps in flight that are known to take no shared memory.

    Source: compiled for compute capability 8.0, 8.9 and 9.0, no launch took more than is counted here.
    """
    if INTERPRETED:
        return tuning
    return fit_shared_memory(tuning, row_bytes, key_bytes, devices.shared_memory(device), fewest_stages, spare)


@cache
def fit_shared_memory(
    tuning: LaunchConfig, row_bytes: int, key_bytes: int, room: int, fewest_stages: int = 1, spare: int = 0
) -> LaunchConfig:
    """Shrink a launch to `room` bytes, as `fit` does."""
    asked = tuning

    def is_too_large(tuning: LaunchConfig) -> bool:
        in_flight = (tuning.num_stages - spare) * tuning.block_n * key_bytes
        return tuning.block_m * row_bytes + in_flight + SCRATCH_BYTES > room

    while is_too_large(tuning) and tuning.num_stages > fewest_stages:
        tuning = tuning._replace(num_stages=tuning.num_stages - 1)
    while is_too_large(tuning) and tuning.block_n > 16:
        tuning = tuning._replace(block_n=tuning.block_n // 2)
    while is_too_large(tuning) and tuning.block_m > 16:
        tuning = tuning._replace(block_m=tuning.block_m // 2)
    if tuning.block_m < asked.block_m:  # half of the rows may leave room for more stages
        more = (tuning._replace(num_stages=n) for n in range(asked.num_stages, tuning.num_stages, -1))
        tuning = next((larger for larger in more if not is_too_large(larger)), tuning)
    return tuning


def step_for(block_n: int, row_bytes: int) -> int:
    """Return the keys of a step that are as many bytes as `block_n` keys of 256 bytes."""
    return max(16, min(128, block_n * 256 // row_bytes))


def keeps_values_twice(device: torch.device) -> bool:
    """Return whether products of 64 rows and more keep values that are keys, too, once more: as tcgen05 reads them."""
    return (10, 0) <= devices.capability(device) < (12, 0)


def can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can be put in place while the one before it ends (programmatic dependent launch)."""
    return not INTERPRETED and devices.capability(device) >= (9, 0)


def overlapping(device: torch.device, *, after_ours: bool) -> dict[str, bool]:
    """Return how a kernel is launched that begins with `pdl_wait`.

    Args:
        device: where.
        after_ours: another such kernel was launched just before. Only then may this one be put in place early: it waits
            for that one alone, and a package's may be over before what was launched before it.
    """
    overlap = can_overlap(device)
    return {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap and after_ours else {})


def pad(size: int) -> int:
    """Return the next power of two; Triton's own function is slow outside a kernel."""
    return 1 << (size - 1).bit_length()


def converts_fp8(device: torch.device) -> bool:
    """Return whether a GPU has instructions that turn fp8 into float16, and float32 into fp8."""
    return not INTERPRETED and devices.capability(device) >= (8, 9)


def with_positive_scale(query: Tensor, softmax_scale: float | None) -> tuple[Tensor, float]:
    """Return a query and a positive scale whose products are those asked for, to the bit; NaN and infinity stay NaN."""
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def is_wide(block_size: int, *token_strides: int) -> bool:
    """Return whether tokens of a block may be so far apart that 32 bits don't hold the distance."""
    return any(block_size * abs(stride) >= 2**31 for stride in token_strides)


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def pdl_wait(OVERLAP: tl.constexpr):
    """Begin when the launch before has ended and can be read, and let the next one be put in place.

    Nothing may be read or written above this: memory of the launch before may be given to this one.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
@no_type_check
def _first_tile(cu_seqlens_q, sequence, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile to begin a sequence with: those before it have room for one tile that is not full each."""
    return tl.load(cu_seqlens_q + sequence) * GROUP // BLOCK_M + sequence


@triton.jit
@no_type_check
def find_tile(cu_seqlens_q, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ONE_TILE: tl.constexpr):
    """Return the sequence of a tile, and its first row there; past the last row if the sequence needs fewer tiles.

    The sequence is the last one whose first tile is not after this one, found by halving.
    """
    sequence = tile
    first_row = tile * 0
    if not ONE_TILE:
        sequence = tile * 0
        high = num_seqs - 1
        while sequence < high:
            middle = (sequence + high + 1) // 2
            if _first_tile(cu_seqlens_q, middle, GROUP, BLOCK_M) <= tile:
                sequence = middle
            else:
                high = middle - 1
        first_row = (tile - _first_tile(cu_seqlens_q, sequence, GROUP, BLOCK_M)) * BLOCK_M
    return sequence, first_row


@triton.jit
@no_type_check
def find_positions(
    query_positions,
    first_keys,
    sequence,
    tokens,
    rows,
    is_row,
    first_row,
    context,
    query_len,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the position of each row of a tile, the least and the largest of them.

    They are read from `query_positions`, by query row, and counted from the first key of the sequence; if that is None
    they follow one another from `context` on.
    """
    if query_positions is None:
        positions = context + rows // GROUP
        first_position = context + first_row // GROUP
        last_position = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)
    else:
        positions = tl.load(query_positions + tokens, mask=is_row, other=0)
        if first_keys is not None:
            positions -= tl.load(first_keys + sequence)
        first_position = tl.min(tl.where(is_row, positions, 2**31 - 1), 0)
        last_position = tl.max(tl.where(is_row, positions, -(2**31)), 0)
    return positions, first_position, last_position


@triton.jit
@no_type_check
def visible_keys(
    first_position,
    last_position,
    seq_len,
    left,
    right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Bound the keys that some queries see, of those between two positions: the first of them, and the end of them.

    The positions may be a tensor, one pair per sequence. A side of a window is cut to the keys that there are before a
    position is added to it: a side and a position may both be nearly 2**31.
    """
    first_key = first_position * 0
    last_key = seq_len
    if RIGHT:
        last_key = last_position + 1 + tl.minimum(right, seq_len - 1 - last_position)
    if LEFT:
        first_key = tl.maximum(first_position, 0)
        first_key -= tl.minimum(left, first_key)
    return first_key, last_key


@triton.jit
@no_type_check
def find_intervals(first_visible, last_visible, first_keys, sequence, tokens, is_row, seq_len):
    """Return the first and the last key that each row of a tile sees, and bound those that some row does.

    They are read by query row, and counted from the first key of the sequence. A row that sees nothing has a last key
    before its first one, and no part in the bounds. Positions are cut before one is subtracted from the other: both
    may be nearly 2**31.
    """
    begin = 0
    if first_keys is not None:
        begin = tl.load(first_keys + sequence)
    first = tl.maximum(tl.load(first_visible + tokens, mask=is_row, other=0), begin) - begin
    first = tl.minimum(first, seq_len)  # steps are counted up to it, and added to it
    last = tl.load(last_visible + tokens, mask=is_row, other=-1)
    last = tl.where(last < begin, -1, tl.minimum(tl.maximum(last, begin) - begin, seq_len - 1))
    sees = is_row & (first <= last)
    first_key = tl.min(tl.where(sees, first, seq_len), 0)
    last_key = tl.max(tl.where(sees, last, -1), 0) + 1
    return first, last, first_key, last_key


@triton.jit
@no_type_check
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    shrunk = tl.exp(-2.0 * size)
    large = (1.0 - shrunk) / (1.0 + shrunk)
    small = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))  # where 1 - shrunk would lose its digits
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(size < 0.05, small, large)


@triton.jit
@no_type_check
def finish_scores(
    scores,
    positions,
    j,
    is_key,
    all_seen,
    slopes,
    scale,
    softcap,
    left,
    right,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    seen=None,
    KEYS: tl.constexpr = 1,
    ALIBI_SQRT: tl.constexpr = False,
):
    """Turn the products of queries at `positions` and keys at `j` into scores of what is visible, up to a factor.

    `all_seen` says that every row sees every key of the step, so that nothing has to be compared; `seen`, if it is not
    None, hides keys besides. `update_softmax`
    multiplies by the factor, next to its subtraction: were that done here, the compiler could join the two only where
    nothing is compared, and a masked step would round otherwise. With slopes, those of ALiBi times log2(e), no factor
    is left, and scores are in base 2; `ALIBI_SQRT` takes the root of the distance. Keys lie along the axis `KEYS`.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    factor = scale
    if SOFTCAP:
        scores = _tanh(scores * (scale / softcap))
        factor = softcap
    distance = tl.expand_dims(positions, KEYS) - tl.expand_dims(j, 1 - KEYS)
    if slopes is not None:
        far = tl.abs(distance)
        if ALIBI_SQRT:
            far = tl.sqrt(far.to(tl.float32))
        scores = scores * (factor * LOG2E) - tl.expand_dims(slopes, KEYS) * far
    if not all_seen:
        visible = tl.expand_dims(is_key, 1 - KEYS)
        if RIGHT:
            visible = visible & (distance >= -right)
        if LEFT:
            visible = visible & (distance <= left)
        if seen is not None:
            visible = visible & seen
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
@no_type_check
def update_softmax(scores, row_max, row_sum, factor, IN_BASE_2: tl.constexpr, KEYS: tl.constexpr = 1):
    """Take a step of scores into the online softmax: its weights, and by how much what was summed so far shrinks.

    `factor` is what `finish_scores` left out, above 0; `IN_BASE_2` says that it left nothing. Keys lie along
    the axis `KEYS`.
    """
    unit = 1.0 if IN_BASE_2 else factor * 1.4426950408889634
    new_row_max = tl.maximum(row_max, tl.max(scores, KEYS) * unit)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
    weights = tl.exp2(scores * unit - tl.expand_dims(base, KEYS))
    alpha = tl.exp2(row_max - base)
    return weights, alpha, new_row_max, row_sum * alpha + tl.sum(weights, KEYS)


@triton.jit
@no_type_check
def phase_of_run(
    PHASE: tl.constexpr, PHASES: tl.constexpr, first_key, last_key, all_from, all_to, BLOCK_N: tl.constexpr
):
    """Bound the steps of a phase: in phase 1 of 3 every row of the tile sees every key, before and after it not.

    A branch in the loop would keep the products of one step from overlapping with the softmax of another.
    """
    begin, end = first_key, last_key
    if PHASES == 3:
        full_from = first_key + tl.cdiv(tl.maximum(all_from - first_key, 0), BLOCK_N) * BLOCK_N
        full_to = first_key + tl.maximum(all_to - first_key, 0) // BLOCK_N * BLOCK_N
        if PHASE == 0:
            end = tl.minimum(full_from, last_key)
        elif PHASE == 1:
            begin, end = full_from, full_to
        else:
            begin = tl.maximum(full_from, full_to)
    return begin, end


@triton.jit
@no_type_check
def unmasked_range(
    first_key,
    last_key,
    first_position,
    last_position,
    left,
    right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Bound the keys that every row of a tile sees, of a run of them; sums as in `visible_keys`."""
    if RIGHT:
        last_key = first_position + 1 + tl.minimum(right, last_key - 1 - first_position)
    if LEFT:
        last_position = tl.maximum(last_position, 0)
        first_key = tl.maximum(first_key, last_position - tl.minimum(left, last_position))
    return first_key, last_key


@triton.jit
@no_type_check
def _either(a, b):
    return a | b


@triton.jit
@no_type_check
def _see_in_tree(row_ancestors, words_of_rows, is_row, first_node, MASK_WORDS: tl.constexpr):
    """Return which of 64 keys each row sees, a bit for each: of a tree by the ancestor mask of the row, all before it.

    `first_node` is the place of the first key in the tree, negative before it. One word of a mask is loaded once for
    all steps, `words_of_rows`; of several, 64 keys need two: shifted together, they are one word that begins at the
    first key. A load for each row and key would be kept in shared memory.
    """
    first_bit = tl.maximum(first_node, 0)
    shift = (first_bit % 64).to(tl.uint64)
    if MASK_WORDS == 1:
        words = words_of_rows.to(tl.uint64, bitcast=True) >> shift
    else:
        at = first_bit // 64
        low = tl.load(row_ancestors + at, mask=is_row & (at < MASK_WORDS), other=0).to(tl.uint64, bitcast=True)
        high = tl.load(row_ancestors + at + 1, mask=is_row & (at + 1 < MASK_WORDS), other=0).to(tl.uint64, bitcast=True)
        words = (low >> shift) | ((high << (63 - shift)) << 1)  # a shift by 64 is undefined
    before = tl.minimum(tl.maximum(-first_node, 0), 64).to(tl.uint64)  # of the keys, how many stand before the tree
    half, others = before // 2, before - before // 2
    ones = tl.full([1], 0xFFFFFFFFFFFFFFFF, tl.uint64) >> (32 - half) >> (32 - others)
    return ((words << half) << others) | ones


@triton.jit
@no_type_check
def see_in_tree(row_ancestors, words_of_rows, is_row, first_node, in_step, MASK_WORDS: tl.constexpr):
    """Return which rows see which keys of a step, `[rows, keys]`, and which keys some row sees."""
    BLOCK_N: tl.constexpr = in_step.shape[0]
    tl.static_assert(BLOCK_N <= 128)
    bits = _see_in_tree(row_ancestors, words_of_rows, is_row, first_node, MASK_WORDS)
    of_any = tl.reduce(tl.where(is_row, bits, 0), 0, _either)
    offset = in_step.to(tl.uint64) % 64
    bits = bits[:, None]
    if BLOCK_N > 64:
        later = _see_in_tree(row_ancestors, words_of_rows, is_row, first_node + 64, MASK_WORDS)
        later_of_any = tl.reduce(tl.where(is_row, later, 0), 0, _either)
        bits = tl.where((in_step < 64)[None, :], bits, later[:, None])
        of_any = tl.where(in_step < 64, of_any, later_of_any)
    return (bits >> offset[None, :]) & 1 != 0, (of_any >> offset) & 1 != 0


@triton.jit
@no_type_check
def attend_kv_split(
    query_rows,
    query_stride,
    is_row,
    positions,
    first_position,
    last_position,
    key,
    value,
    block_table,
    cu_seqlens_k,
    sequence,
    kv_head,
    first_key,
    first_seen,
    last_key,
    slopes,
    query_scale,
    key_scales,
    key_strides,
    value_strides,
    key_scale_strides,
    table_row_stride,
    table_stride,
    scale,
    softcap,
    left,
    right,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CODES: tl.constexpr,
    ROUND_QUERY: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    tree_start=None,
    node_depths=None,
    row_ancestors=None,
    MASK_WORDS: tl.constexpr = 0,
    ALIBI_SQRT: tl.constexpr = False,
    first_of_rows=None,
    last_of_rows=None,
    group_scales=None,
    group_scale_strides=(),
    ROW_ALIGN: tl.constexpr = 0,
    ALIGNED: tl.constexpr = True,
    SPLIT: tl.constexpr = False,
):
    """Attend from a tile to the keys from `first_key` up to `last_key` of a sequence, by an online softmax in base 2.

    `first_key` is where a step begins, at a multiple of its keys if `ALIGNED`, and `first_seen` the first key that some
    row sees: what lies before it may be another's by now, or NaN, which no weight of 0 undoes, and is not read.

    `query_rows` point to the queries of the rows that `is_row`; `positions` lie between the first and the last one.
    `key` and `value` are pages that `block_table` leads to, or rows that `cu_seqlens_k` leads to (`BLOCK_SIZE` is 0).
    `INT64_OFFSETS` says that the last token of a block may be 2**31 elements or more from its first one: 64 bits for
    each key of a step take registers. If `VALUES_IN_KEYS`, a value is the first `VALUE_HEAD_SIZE` elements of its key,
    to which `value` points: they are loaded once for both. `slopes` are those of ALiBi times log2(e), one per row, or
    None.

    `CODES` says what the pools hold: numbers (""), or codes of a format, whose scales by head are in `scale` already or
    left to the caller. `key_scales` leads to one scale for each key of a page and head, or is None. Codes of values are
    read two at a time, side by side, if `value` points to 16 bits.

    `group_scales` leads to the scales of packed latents: then `key` points to rotary keys, which are numbers of a type
    of their own, and all that leads to a row is a multiple of `ROW_ALIGN` bytes.

    With `MASK_WORDS` the keys from `tree_start` on are nodes of a tree: they stand by `node_depths` after its root, and
    a row sees those whose bits `row_ancestors` point to. Only steps with such keys look at that. With `first_of_rows`
    and `last_of_rows` a row sees the keys between its two, and there is no other mask.

    It returns the highest score of each row, the sum of the weights relative to it, and the weighted sum of the values.
    """
    WHOLE: tl.constexpr = BLOCK_SIZE > 0 and ALIGNED
    ONE_PAGE: tl.constexpr = WHOLE and BLOCK_SIZE % BLOCK_N == 0  # holds all keys of a step
    STEPS_ALIKE: tl.constexpr = ONE_PAGE or (WHOLE and BLOCK_N % BLOCK_SIZE == 0)  # in the places of their keys
    in_step = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE > 0:  # the table is read a step ahead, so that loads of keys do not wait for it
        table = block_table + sequence.to(tl.int64) * table_row_stride
        if ONE_PAGE:
            column = (first_key // BLOCK_SIZE).to(tl.int64)
            next_blocks = tl.load(table + column * table_stride, mask=first_key < last_key, other=0)
        else:
            j = first_key + in_step
            is_key = (j >= first_seen) & (j < last_key)
            column = (j // BLOCK_SIZE).to(tl.int64)
            next_blocks = tl.load(table + column * table_stride, mask=is_key, other=0)
    else:
        first_key_row = tl.load(cu_seqlens_k + sequence).to(tl.int64)
    head = kv_head.to(tl.int64)

    all_from, all_to = unmasked_range(first_key, last_key, first_position, last_position, left, right, LEFT, RIGHT)
    if MASK_WORDS > 0:
        all_to = tl.minimum(all_to, tree_start)
        words_of_rows = None
        if MASK_WORDS == 1:
            words_of_rows = tl.load(row_ancestors, mask=is_row, other=0)
    INTERVALS: tl.constexpr = first_of_rows is not None
    if INTERVALS:
        all_from = tl.max(tl.where(is_row, first_of_rows, 0), 0)
        all_to = tl.minimum(last_key, tl.min(tl.where(is_row, last_of_rows, last_key), 0) + 1)
    PAIRS: tl.constexpr = value.dtype.element_ty == tl.uint16
    KEY_SIZE: tl.constexpr = HEAD_SIZE - VALUE_HEAD_SIZE if VALUES_IN_KEYS else HEAD_SIZE  # of what is no value
    LEAST: tl.constexpr = 32 if CODES == "int8" else 16  # of a product
    KEY_PAD: tl.constexpr = triton.next_power_of_2(KEY_SIZE) if KEY_SIZE > LEAST else LEAST
    PER_LOAD: tl.constexpr = 2 if PAIRS else 1  # elements of a value that are loaded as one
    VALUE_LEAST: tl.constexpr = FEWEST_COLUMNS if BLOCK_M > 16 else (16 * PER_LOAD if VALUES_IN_KEYS else 1)
    VALUE_PAD: tl.constexpr = max(triton.next_power_of_2(VALUE_HEAD_SIZE), VALUE_LEAST)
    at_dv = tl.arange(0, VALUE_PAD // PER_LOAD)
    at_d = tl.arange(0, KEY_PAD)
    in_key = at_d < KEY_SIZE
    at_key = at_d
    if VALUES_IN_KEYS:
        at_d += VALUE_HEAD_SIZE
        at_key = at_d if group_scales is None else at_key
        at_query = tl.arange(0, VALUE_PAD)
        query_values = tl.load(
            query_rows[:, None] + (at_query.to(tl.int64) * query_stride)[None, :],
            mask=is_row[:, None] & (at_query < VALUE_HEAD_SIZE)[None, :],
            other=0.0,
        )
    q = tl.load(
        query_rows[:, None] + (at_d.to(tl.int64) * query_stride)[None, :],
        mask=is_row[:, None] & in_key[None, :],
        other=0.0,
    )
    query_factors = None
    if CODES != "":
        AS_QUERY: tl.constexpr = VALUES_IN_KEYS and not PAIRS  # a changed query would be loaded anew for each product
        OF_QUERY: tl.constexpr = tl.float16 if ROUND_QUERY and q.dtype == tl.bfloat16 else q.dtype
        VALUE_TYPE: tl.constexpr = OF_QUERY if AS_QUERY else value_type(q.dtype, value.dtype.element_ty)
        if CODES == "int8":
            query_factors = row_scale(q.to(tl.float32))
        elif not ROUND_QUERY and q.dtype == tl.bfloat16 and not AS_QUERY:
            largest = tl.max(tl.abs(q.to(tl.float32)), 1)
            if VALUES_IN_KEYS:
                largest = tl.maximum(largest, tl.max(tl.abs(query_values.to(tl.float32)), 1))
            query_factors = power_of_two(largest)
        if query_factors is not None:
            q = prepare_query(q, query_factors[:, None], CODES, ROUND_QUERY, HAS_FP8_CVT)
            if VALUES_IN_KEYS:
                query_values = prepare_query(query_values, query_factors[:, None], CODES, ROUND_QUERY, HAS_FP8_CVT)
        elif ROUND_QUERY:
            q = prepare_query(q, query_scale, CODES, ROUND_QUERY, HAS_FP8_CVT)
            if VALUES_IN_KEYS:
                query_values = prepare_query(query_values, query_scale, CODES, ROUND_QUERY, HAS_FP8_CVT)
        if VALUES_IN_KEYS and PAIRS:
            query_values, query_seconds = tl.split(tl.reshape(query_values, [BLOCK_M, VALUE_PAD // 2, 2]))
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD // PER_LOAD], tl.float32)  # of the first of each pair
    if PAIRS:
        acc_of_seconds = tl.zeros([BLOCK_M, VALUE_PAD // 2], tl.float32)
    # Three copies of a loop over latents take registers that no copy has.
    MASKED: tl.constexpr = BLOCK_M > 16 and not VALUES_IN_KEYS and (LEFT or RIGHT or INTERVALS)
    PHASES: tl.constexpr = 3 if MASK_WORDS > 0 or MASKED else 1
    # Without a left side all rows see the first key, and phase 0 is empty. With one loop less the compiler reads the
    # block table without shared memory: 256 rows after 8192 keys, split, take 35 us in place of 39. Where keys are not
    # split it costs: 8 such sequences take 203 us in place of 181 (NVIDIA H200, Triton 3.6).
    FIRST_PHASE: tl.constexpr = 1 if PHASES == 3 and SPLIT and not (LEFT or INTERVALS) else 0
    for phase in tl.static_range(FIRST_PHASE, PHASES):
        begin, end = phase_of_run(phase, PHASES, first_key, last_key, all_from, all_to, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
            j = start + in_step
            is_key = j < last_key  # nothing from there on is read: it may be NaN, or no block at all
            if LEFT:
                is_key &= j >= first_seen
            key_positions = j
            seen = None
            if MASK_WORDS > 0 and phase != 1:
                seen, by_any = see_in_tree(
                    row_ancestors, words_of_rows, is_row, start - tree_start, in_step, MASK_WORDS
                )
                if LEFT or slopes is not None:
                    in_tree = (j >= tree_start) & is_key
                    depth = tl.load(node_depths + j - tree_start, mask=in_tree, other=0)
                    key_positions = tl.where(in_tree, tree_start + depth, j)
                if LEFT:
                    seen &= positions[:, None] - key_positions[None, :] <= left
                    by_any = tl.max((seen & is_row[:, None]).to(tl.int32), 0) > 0
                is_key &= by_any  # what no row sees is not read either
            if INTERVALS and phase != 1:
                seen = (first_of_rows[:, None] <= j[None, :]) & (j[None, :] <= last_of_rows[:, None])
                is_key &= tl.max((seen & is_row[:, None]).to(tl.int32), 0) > 0
            if BLOCK_SIZE > 0:
                blocks = next_blocks.to(tl.uint32).to(tl.int64)  # not negative: a product with a stride is shorter
                ahead = (start if ONE_PAGE else j) + BLOCK_N
                column = (ahead // BLOCK_SIZE).to(tl.int64)
                next_blocks = tl.load(table + column * table_stride, mask=ahead < last_key, other=0)
                first_place = start % BLOCK_SIZE if ONE_PAGE else 0
                places = (in_step if STEPS_ALIKE else j) % BLOCK_SIZE  # from there on
                if INT64_OFFSETS:
                    places = places.to(tl.int64)
                key_rows = places * key_strides[1] + head * key_strides[2]
                key_rows += blocks * key_strides[0] + first_place * key_strides[1]
                value_rows = places * value_strides[1] + head * value_strides[2]
                value_rows += blocks * value_strides[0] + first_place * value_strides[1]
                if group_scales is not None:  # which says how many bytes a load may have; a hint would be lost
                    key_rows = key_rows // (ROW_ALIGN // 2) * (ROW_ALIGN // 2)
            else:
                key_rows = (first_key_row + j) * key_strides[0] + head * key_strides[1]
                value_rows = (first_key_row + j) * value_strides[0] + head * value_strides[1]

            in_value = is_key[:, None] & (at_dv < VALUE_HEAD_SIZE // PER_LOAD)[None, :]
            if VALUES_IN_KEYS:
                at_value = value + value_rows[:, None] + (at_dv.to(tl.int64) * value_strides[-1])[None, :]
                v = tl.load(at_value, mask=in_value, other=0)  # [keys, dv]
                if CODES != "" and not PAIRS:
                    v = dequantize(v, CODES, HAS_FP8_CVT)
                    if group_scales is not None:
                        scale_rows = places * group_scale_strides[1] + blocks * group_scale_strides[0]
                        scale_rows += first_place * group_scale_strides[1]
                        scale_rows = scale_rows // (ROW_ALIGN // 4) * (ROW_ALIGN // 4)
                        v = scale_groups(v, group_scales, group_scale_strides[2], scale_rows, is_key, VALUE_HEAD_SIZE)
                    v = v.to(VALUE_TYPE)
            k = tl.load(
                key + key_rows[None, :] + (at_key.to(tl.int64) * key_strides[-1])[:, None],
                mask=is_key[None, :] & in_key[:, None],
                other=0.0,
            )  # [d, keys], without what is in the values
            if CODES == "":
                products = tl.dot(q, k, input_precision="ieee")
            elif group_scales is not None:
                products = tl.dot(q, k.to(q.dtype), input_precision="ieee")
            elif CODES == "int8":
                products = tl.dot(q, k).to(tl.float32)
            else:
                products = tl.dot(q, dequantize(k, CODES, HAS_FP8_CVT).to(q.dtype), input_precision="ieee")
            if VALUES_IN_KEYS:
                turned = tl.trans(v)
                if PAIRS:
                    turned, seconds = dequantize_pairs(turned, CODES, HAS_FP8_CVT)
                    products = tl.dot(query_seconds, seconds.to(VALUE_TYPE), products, input_precision="ieee")
                    turned = turned.to(VALUE_TYPE)
                products = tl.dot(query_values, turned, products, input_precision="ieee")
            if query_factors is not None:
                products = products * query_factors[:, None]
            if key_scales is not None:
                at_scale = places * key_scale_strides[1] + head * key_scale_strides[2]
                at_scale += blocks * key_scale_strides[0] + first_place * key_scale_strides[1]
                products = products * tl.load(key_scales + at_scale, mask=is_key, other=0.0)[None, :]
            all_seen = phase == 1 if PHASES == 3 else (start >= all_from) & (start + BLOCK_N <= all_to)
            scores = finish_scores(
                products,
                positions,
                key_positions,
                is_key,
                all_seen,
                slopes,
                scale,
                softcap,
                left,
                right,
                SOFTCAP,
                LEFT,
                RIGHT,
                seen,
                ALIBI_SQRT=ALIBI_SQRT,
            )
            weights, alpha, row_max, row_sum = update_softmax(
                scores, row_max, row_sum, softcap if SOFTCAP else scale, slopes is not None
            )
            if not VALUES_IN_KEYS:
                at_value = value + value_rows[:, None] + (at_dv.to(tl.int64) * value_strides[-1])[None, :]
                v = tl.load(at_value, mask=in_value, other=0)  # [keys, dv]
            if PAIRS:
                v, seconds = dequantize_pairs(v, CODES, HAS_FP8_CVT)
                acc_of_seconds = tl.dot(
                    weights.to(VALUE_TYPE),
                    seconds.to(VALUE_TYPE),
                    acc_of_seconds * alpha[:, None],
                    input_precision="ieee",
                )
            if CODES != "":
                if v.dtype == tl.int8 or v.dtype == tl.uint8:
                    v = dequantize(v, CODES, HAS_FP8_CVT)
                v = v.to(VALUE_TYPE)
            acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_of_seconds), [BLOCK_M, VALUE_PAD])
    return row_max, row_sum, acc


@triton.jit
@no_type_check
def merge_parts(row_max, row_sum, acc, logs, values):
    """Take more parts, `logs [rows, parts]` and `values [rows, parts, dv]`, into what `attend_kv_split` returns."""
    LOG2E: tl.constexpr = 1.4426950408889634
    new_row_max = tl.maximum(row_max, tl.max(logs, 1) * LOG2E)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(logs * LOG2E - base[:, None])
    alpha = tl.exp2(row_max - base)
    row_sum = row_sum * alpha + tl.sum(weights, 1)
    acc = acc * alpha[:, None] + tl.sum(weights[:, :, None] * values, 1)
    return new_row_max, row_sum, acc


@triton.jit
@no_type_check
def normalize(row_max, row_sum, acc, sink):
    """Return the outputs and the log-sum-exps of what `attend_kv_split` or `merge_parts` found, the sinks included."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if sink is not None:
        new_row_max = tl.maximum(row_max, sink * LOG2E)
        base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        alpha = tl.exp2((row_max - base) * 0.5)  # twice: a GPU takes a share below 1e-38 for 0, whatever it is of
        acc = acc * alpha[:, None] * alpha[:, None]
        row_sum = row_sum * alpha * alpha + tl.exp2(sink * LOG2E - base)
        row_max = new_row_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees nothing: 0, and -inf by `row_max`
    return acc / row_sum[:, None], (row_max + tl.log2(row_sum)) / LOG2E


@triton.jit
@no_type_check
def store_rows(values, logs, places, is_row, out, lse, VALUE_HEAD_SIZE: tl.constexpr):
    """Store answers in rows of `out [.., dv]` and, unless it is None, of `lse [..]`."""
    at_dv = tl.arange(0, values.shape[1])
    tl.store(
        out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        values.to(out.dtype.element_ty),
        mask=is_row[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
    )
    if lse is not None:
        tl.store(lse + places, logs, mask=is_row)
