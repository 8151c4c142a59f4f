"""Select the keys with the best scores, in Triton; the kernel `triton` of `fastattn.sparse`.

    select          a program per query: find its threshold by counts of five bits at a time, then write in one pass;
                    for a long row, over candidates alone, which two earlier launches find
    plan_selected   a program per query: its sequence, and the slots of its keys, without gaps

The threshold is exact, and ties go to lower positions as they are counted in order: nothing is sorted, and no two
programs race.

Counting a row takes a pass for each five bits, up to seven. In a long row most scores are far below the threshold, and
a sample shows where that is:

    sample      4096 of 131072 scores: the 104th of them is the pivot, where the best 2048 would end with the 64th
    filter      one pass over the row, in splits: the positions of all scores not below the pivot, some 3400
    select      the exact threshold and the positions, from these candidates alone

The pivot is a guess that cannot change the result. The counts of the filter tell whether it was good:

    candidates above the pivot <= k <= candidates    the pivot is the threshold: a plateau, whose first ones are taken
    k <= candidates, and there is room for them      the threshold is that of the candidates
    else                                             it is that of the row, by up to seven passes: slow, but as exact

Source: radix selection and selection by a sample: Alabi et al. 2012, "Fast K-Selection Algorithms for GPUs".
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32
from torch import Tensor

from fastattn.kernels.triton.launch import CHANGING, overlapping, pdl_wait
from fastattn.kernels.triton.tuning import pad, sms_of
from refattn.batch import Batch

BLOCK = 4096  # scores that are read at a time, at most 2**15
BITS = 5  # bits per digit, at least 5: a warp counts 32 digits by a vote for each bit
SELECT_WARPS = 4
SHORT = 4096  # scores of a row up to which all are counted, without candidates
SHORT_OF_MANY = 16384  # the same where rows are many
ROWS_TO_FILL = 2  # rows per SM from which they are many
EVERY = 32  # the sample takes one score in 32
MOST_SAMPLED = 4096
SPARE = 8  # scores of the sample that may lie above the pivot beyond its rank
SAMPLE_WARPS = 8
FILTER_BLOCK = 2048  # scores that are filtered at a time, at most 2**15
FILTER_WARPS = 4
MOST_SPLITS = 64  # splits per row
CANDIDATE_COLUMNS = 64  # candidates of each split that are gathered at a time
CANDIDATE_BLOCK = 4096  # candidates that are read at a time, at most 2**15
CANDIDATE_WARPS = 8
MOST_FILTERED = 2**25  # most scores that are filtered in one launch, which bounds the memory
BLOCK_SEQS = 256  # sequences that are read at a time, to find that of a row
BLOCK_KEYS = 2048  # selected keys whose slots are looked up at a time
PLAN_WARPS = 8


class Candidates(NamedTuple):
    """The candidates of long rows.

    Attributes:
        pivots: [t].
        counts: [t, splits, 2]: candidates of each split, and how many of them are above the pivot.
        kept: [t, width]: the positions of the candidates of a split, from where the split begins.
        positions: [t, room]: the positions of all candidates of a row.
        scores: [t, room]: their scores.
        SPLITS: splits, padded to a power of two.
        COLUMNS: candidates of each split that are gathered at a time.
    """

    pivots: Any
    counts: Any
    kept: Any
    positions: Any
    scores: Any
    SPLITS: Any
    COLUMNS: Any


class NewPlan(NamedTuple):
    """A plan with a sequence for each query row, to be written: its lengths, and the row's sequence in the batch."""

    new_cu_seqlens_q: Any
    new_seq_lens: Any
    sequences: Any


def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t {topk}"]:
    """Select the highest scores, ties from the left; see `fastattn.sparse.select`.

    It takes one launch for short rows, and three per `MOST_FILTERED` scores of long rows.
    """
    t, s = scores.shape
    selected = torch.empty(t, topk, dtype=torch.int32, device=scores.device)
    if not t or not s:
        return selected.fill_(-1)
    many = t >= ROWS_TO_FILL * sms_of(scores.device)
    if s <= (SHORT_OF_MANY if many else SHORT):
        early = overlapping(scores.device, after_ours=False)
        fixed = dict(BLOCK=min(BLOCK, max(pad(s), 4)), BITS=BITS, num_warps=SELECT_WARPS)
        _select_kernel[(t,)](scores, selected, None, scores.stride(), s, topk, 1, 1, 1, **fixed, **early)
        return selected
    rows = max(1, MOST_FILTERED // s)
    for first in range(0, t, rows):
        _select_long(scores[first : first + rows], topk, selected[first : first + rows])
    return selected


def _select_long(scores: Float32[Tensor, "t s"], topk: int, selected: Int32[Tensor, "t {topk}"]) -> None:
    """Select from long rows by their candidates.

    About `share` scores of the sample are expected above the threshold, with a deviation of `sqrt(share)`. So the pivot
    ranks four deviations further down, and 8 more for small shares.
    """
    (t, s), device = scores.shape, scores.device
    sample = min(MOST_SAMPLED, pad(s // EVERY))
    share = topk * sample / s
    rank = int(share + 4 * share**0.5 + 8)
    room = min(s, pad(2 * rank * (s // sample)))
    split_blocks = -(-s // (MOST_SPLITS * FILTER_BLOCK))
    splits = -(-s // (split_blocks * FILTER_BLOCK))
    candidates = Candidates(
        pivots=torch.empty(t, dtype=torch.float32, device=device),
        counts=torch.empty(t, splits, 2, dtype=torch.int32, device=device),
        kept=torch.empty(t, s, dtype=torch.int32, device=device),
        positions=torch.empty(t, room, dtype=torch.int32, device=device),
        scores=torch.empty(t, room, dtype=torch.float32, device=device),
        SPLITS=tl.constexpr(pad(splits)),
        COLUMNS=tl.constexpr(CANDIDATE_COLUMNS),
    )
    strides, early = scores.stride(), overlapping(device, after_ours=True)
    fixed = dict(SAMPLE=sample, SPARE=SPARE, BITS=BITS, num_warps=SAMPLE_WARPS)
    fixed |= overlapping(device, after_ours=False)
    pivots, counts, kept = candidates[:3]
    _sample_kernel[(t,)](scores, pivots, strides, s, rank, **fixed)
    _filter_kernel[(t, splits)](
        scores, pivots, counts, kept, strides, s, splits, split_blocks, FILTER_BLOCK, num_warps=FILTER_WARPS, **early
    )
    fixed = dict(BLOCK=CANDIDATE_BLOCK, BITS=BITS, num_warps=CANDIDATE_WARPS)
    split_length = split_blocks * FILTER_BLOCK
    _select_kernel[(t,)](scores, selected, candidates, strides, s, topk, splits, split_length, room, **fixed, **early)


def selected_slots(batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int) -> Int32[Tensor, "t k"]:
    """Return the slots of selected keys, in one launch; see `fastattn.sparse.slots`."""
    slots = torch.empty(positions.shape, dtype=torch.int32, device=batch.device)
    if slots.numel():
        _launch_plan(batch, positions, block_size, slots, None)
    return slots


def plan_selected(
    batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "t"], Int32[Tensor, "t k"], Int32[Tensor, "t"]]:
    """Make each query row a sequence, in one launch; see `fastattn.kernels.torch_ops.sparse.plan_selected`."""
    t, k = positions.shape
    rows, seq_lens, table, sequences = (
        torch.empty(shape, dtype=torch.int32, device=batch.device) for shape in ((t + 1,), (t,), (t, k), (t,))
    )
    if not t:
        return rows.zero_(), seq_lens, table, sequences
    _launch_plan(batch, positions, block_size, table, NewPlan(rows, seq_lens, sequences))
    return rows, seq_lens, table, sequences


def _launch_plan(
    batch: Batch, positions: Int32[Tensor, "t k"], block_size: int, slots: Int32[Tensor, "t k"], new: NewPlan | None
) -> None:
    """Look up the slots of selected keys: in the places of their positions, or without gaps, for a new plan."""
    t, k = positions.shape
    table = batch.block_table
    assert table is not None  # the path has checked it
    _plan_selected_kernel[(t,)](
        batch.cu_seqlens_q,
        batch.seq_lens,
        table,
        positions,
        slots,
        new,
        table.stride(),
        positions.stride(),
        batch.num_seqs,
        table.shape[1],
        k,
        block_size,
        BLOCK_SEQS=BLOCK_SEQS,
        BLOCK_KEYS=min(BLOCK_KEYS, pad(max(k, 1))),
        num_warps=PLAN_WARPS,
    )


# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def _in_order(numbers):
    """Map numbers to unsigned integers of the same order: both zeros are equal, NaN is the highest."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(numbers != numbers, 0x7FFFFFFF, order)
    return (order ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
@no_type_check
def _from_order(order):
    """Invert `_in_order`, for a number that is not NaN."""
    bits = order.to(tl.int32, bitcast=True) ^ -2147483648
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


class Row(NamedTuple):
    """The scores of one query, or of its candidates: the first of them, their stride, and how many there are."""

    scores: Any
    stride: Any
    width: Any


@triton.jit
@no_type_check
def _read_scores(row, j, MASKED: tl.constexpr):
    """Read scores, `-inf` past the last one. Full blocks are read without a mask, which would prevent wide loads."""
    at = row.scores + j.to(tl.int64) * row.stride
    return tl.load(at, mask=(j < row.width) if MASKED else None, other=float("-inf") if MASKED else None)


@triton.jit
@no_type_check
def _count_digits(order, lowest, step, BITS: tl.constexpr):
    """Count the digits of a step in a block of numbers in order, of those whose higher bits are the ones known so far.

    A digit is `BITS` bits. That of the last step repeats known bits if 32 is not a multiple. Scores of hidden keys are
    counted as the lowest number, and so never above a key.
    """
    shift = tl.maximum(32 - BITS - BITS * step, 0)
    known = tl.full([], 0xFFFFFFFF, tl.uint32) << (31 - BITS * step) << 1  # in two: none in the first step
    return tl.histogram(((order >> shift) & (2**BITS - 1)).to(tl.int32), 2**BITS, mask=(order & known) == lowest)


@triton.jit
@no_type_check
def _find_digit(counts, lowest, wanted, step, BITS: tl.constexpr):
    """Extend the threshold by a digit; return it, and how many numbers with its bits are wanted, and how many not."""
    digits = tl.arange(0, 2**BITS)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # numbers with a larger digit
    digit = tl.min(tl.where(above < wanted, digits, 2**BITS - 1), 0)
    wanted -= tl.sum(tl.where(digits == digit, above, 0), 0)
    spare = tl.sum(tl.where(digits == digit, counts, 0), 0) - wanted
    return lowest | (digit.to(tl.uint32) << tl.maximum(32 - BITS - BITS * step, 0)), wanted, spare


@triton.jit
@no_type_check
def _find_lowest(row, topk, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Return the threshold of a row, its lowest selected number, and how many of the numbers equal to it are wanted.

    Once all numbers with its known bits are wanted, the remaining bits stay 0.
    """
    lowest = tl.full([], 0, tl.uint32)  # its highest bits first
    wanted, spare = topk, row.width  # how many of the scores with these bits are wanted, and how many not
    whole, blocks = row.width // BLOCK, tl.cdiv(row.width, BLOCK)
    step = 0
    while (step < (31 + BITS) // BITS) & (spare > 0):
        counts = tl.zeros([2**BITS], tl.int32)
        for MASKED in tl.static_range(2):
            for block in range(whole if MASKED else 0, blocks if MASKED else whole):
                numbers = _read_scores(row, block * BLOCK + tl.arange(0, BLOCK), MASKED)
                counts += _count_digits(_in_order(numbers), lowest, step, BITS)
        lowest, wanted, spare = _find_digit(counts, lowest, wanted, step, BITS)
        step += 1
    return lowest, wanted


@triton.jit
@no_type_check
def _block_of(block, BLOCK: tl.constexpr):
    """Return the indices of a block, as rows of four, which a thread reads at once."""
    return block * BLOCK + 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
@no_type_check
def _sum_up(numbers):
    """Return the prefix sums of a block, in the order of `_block_of`, and its total.

    A thread sums up its own four, so that threads exchange only the sums of four.
    """
    of_rows = tl.sum(numbers, 1)
    before = tl.cumsum(of_rows, 0) - of_rows
    return tl.cumsum(numbers, 1) + before[:, None], tl.sum(of_rows, 0)


@triton.jit
@no_type_check
def _write_positions(row, positions, row_selected, lowest, wanted, BLOCK: tl.constexpr):
    """Write the selected positions of a row, in order; return how many there are.

    Numbers above the threshold and numbers equal to it are counted in one sum, in 16 bits each. For candidates, whose
    places are not their positions, `positions` has these.
    """
    above, ties = row.width * 0, row.width * 0
    whole, blocks = row.width // BLOCK, tl.cdiv(row.width, BLOCK)
    for MASKED in tl.static_range(2):
        for block in range(whole if MASKED else 0, blocks if MASKED else whole):
            j = _block_of(block, BLOCK)
            numbers = _read_scores(row, j, MASKED)
            order = _in_order(numbers)
            is_key = numbers != float("-inf")
            is_above, is_tie = is_key & (order > lowest), is_key & (order == lowest)
            both = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
            sums, total = _sum_up(both)
            place = ties + (sums >> 16)
            column = above + (sums & 0xFFFF) + tl.minimum(place, wanted) - 1
            is_selected = is_above | (is_tie & (place <= wanted))
            if positions is not None:
                j = tl.load(positions + j, is_selected, 0)
            tl.store(row_selected + column, j, is_selected)
            above += total & 0xFFFF
            ties += total >> 16
    return above + tl.minimum(ties, wanted)


@triton.jit(do_not_specialize=["width", "rank"])
@no_type_check
def _sample_kernel(
    scores,
    pivots,
    score_strides,
    width,
    rank,
    SAMPLE: tl.constexpr,
    SPARE: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the pivot of a row: the score of a given rank in a sample, which has one score of each part of the row.

    The offset of the score differs between parts, so that periodic scores do not bias the sample. Up to `SPARE` more
    scores may lie above the pivot, whose last bits are 0 then. It is finite or infinity, never `-inf` or NaN, so hidden
    keys are below it.
    """
    pdl_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SAMPLE)
    scattered = (i * 40503) & 0xFFFF  # Fibonacci hashing: a place in each part, in 65536ths
    j = i.to(tl.int64) * width // SAMPLE + (scattered.to(tl.int64) * (width // SAMPLE) >> 16)
    order = _in_order(tl.load(scores + row * score_strides[0] + j * score_strides[1]))
    lowest = tl.full([], 0, tl.uint32)
    wanted, spare, step = rank, width, 0
    while (step < (31 + BITS) // BITS) & (spare > SPARE):
        counts = _count_digits(order, lowest, step, BITS)
        lowest, wanted, spare = _find_digit(counts, lowest, wanted, step, BITS)
        step += 1
    lowest = tl.minimum(tl.maximum(lowest, 0x00800000), 0xFF800000)  # from the lowest finite number to infinity
    tl.store(pivots + row, _from_order(lowest))


@triton.jit(do_not_specialize=["width", "splits", "split_blocks"])
@no_type_check
def _filter_kernel(
    scores,
    pivots,
    counts,  # [t, splits, 2]: candidates, and how many of them are above the pivot
    kept,  # [t, width]: positions of the candidates of a split, from where the split begins
    score_strides,
    width,
    splits,
    split_blocks,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keep the positions of all scores of a split that are not below the pivot, in order."""
    pdl_wait(OVERLAP)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, pivot = Row(scores + row * score_strides[0], score_strides[1], width), tl.load(pivots + row)
    first, whole = split * split_blocks, width // BLOCK
    end = tl.minimum(first + split_blocks, tl.cdiv(width, BLOCK))
    split_kept = kept + row * width + first * BLOCK
    count, above = first * 0, first * 0
    for MASKED in tl.static_range(2):
        for block in range(tl.maximum(first, whole) if MASKED else first, end if MASKED else tl.minimum(end, whole)):
            j = _block_of(block, BLOCK)
            numbers = _read_scores(own, j, MASKED)
            is_kept, is_above = ~(numbers < pivot), ~(numbers <= pivot)  # NaN, too
            sums, total = _sum_up(is_kept.to(tl.int32) + (is_above.to(tl.int32) << 16))
            tl.store(split_kept + count + (sums & 0xFFFF) - 1, j, is_kept)
            count += total & 0xFFFF
            above += total >> 16
    row_counts = counts + (row * splits + split) * 2
    tl.store(row_counts, count)
    tl.store(row_counts + 1, above)


@triton.jit
@no_type_check
def _gather_candidates(row, candidates, number, counts, split_length, room):
    """Move the candidates of all splits of a row together, with their scores."""
    splits = tl.arange(0, candidates.SPLITS)[:, None]
    starts = (tl.cumsum(counts, 0) - counts)[:, None]
    row_kept = candidates.kept + number * row.width
    positions = candidates.positions + number * room
    scores = candidates.scores + number * room
    for first in range(0, tl.max(counts, 0), candidates.COLUMNS):
        at = first + tl.arange(0, candidates.COLUMNS)[None, :]
        is_kept = at < counts[:, None]
        j = tl.load(row_kept + splits * split_length + at, is_kept, 0)
        numbers = tl.load(row.scores + j.to(tl.int64) * row.stride, is_kept, 0.0)
        tl.store(positions + starts + at, j, is_kept)
        tl.store(scores + starts + at, numbers, is_kept)
    tl.debug_barrier()  # other threads of the program read them


@triton.jit(do_not_specialize=["width", "topk", "splits", "split_length", "room"])
@no_type_check
def _select_kernel(
    scores,
    selected,
    candidates,  # None for a short row
    score_strides,
    width,
    topk,
    splits,
    split_length,  # scores of a split
    room,  # candidates of a row, at most
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Select from a row; from its candidates alone, if they have all that is selected, and there is room for them."""
    pdl_wait(OVERLAP)
    number = tl.program_id(0).to(tl.int64)
    row_selected = selected + number * topk
    row = Row(scores + number * score_strides[0], score_strides[1], width)
    if candidates is None:
        lowest, wanted = _find_lowest(row, topk, BLOCK, BITS)
        count = _write_positions(row, None, row_selected, lowest, wanted, BLOCK)
    else:
        split = tl.arange(0, candidates.SPLITS)
        row_counts = candidates.counts + (number * splits + split) * 2
        counts = tl.load(row_counts, split < splits, 0)
        total = tl.sum(counts, 0)
        above = tl.sum(tl.load(row_counts + 1, split < splits, 0), 0)
        lowest = _in_order(tl.load(candidates.pivots + number))
        wanted = topk - above
        are_all = (total >= topk) | (lowest == 0x00800000)  # the lowest finite number: no key is left out
        is_gathered = are_all & (total <= room)
        gathered = Row(candidates.scores + number * room, 1, total)
        if is_gathered:
            _gather_candidates(row, candidates, number, counts, split_length, room)
        if (not are_all) | (wanted < 0):  # else the pivot is the threshold
            if is_gathered:
                lowest, wanted = _find_lowest(gathered, topk, BLOCK, BITS)
            else:
                lowest, wanted = _find_lowest(row, topk, BLOCK, BITS)
        if is_gathered:
            positions = candidates.positions + number * room
            count = _write_positions(gathered, positions, row_selected, lowest, wanted, BLOCK)
        else:
            count = _write_positions(row, None, row_selected, lowest, wanted, BLOCK)
    for first in range(count, topk, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(row_selected + column, tl.full([BLOCK], -1, tl.int32), column < topk)


@triton.jit(do_not_specialize=[*CHANGING, "positions", "columns", "k"])
@no_type_check
def _plan_selected_kernel(
    cu_seqlens_q,
    seq_lens,
    block_table,
    positions,
    slots,  # [t, k]
    new,  # None: every slot stays in the place of its position
    table_strides,
    position_strides,
    num_seqs,
    columns,
    k,
    block_size,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Look up the selected keys of one query row; a row of padding has none.

    Its sequence is found by counting those that end before it: all are read at once, while a binary search would wait
    for each.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(0) * 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        i = first + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(cu_seqlens_q + 1 + i, i < num_seqs, 0)
        sequence += tl.sum(((i < num_seqs) & (ends <= row)).to(tl.int32), 0)
    is_row = (sequence < num_seqs) & (columns > 0)
    seq_len = tl.load(seq_lens + sequence, is_row, 0)
    blocks = block_table + sequence.to(tl.int64) * table_strides[0]
    row_positions, row_slots = positions + row * position_strides[0], slots + row * k
    count = tl.program_id(0) * 0
    for first in range(0, k, BLOCK_KEYS):
        at = first + tl.arange(0, BLOCK_KEYS)
        position = tl.load(row_positions + at.to(tl.int64) * position_strides[1], at < k, -1)
        is_key = (position >= 0) & (position < seq_len)
        position = tl.where(is_key, position, 0)
        column = tl.minimum(position // block_size, columns - 1).to(tl.int64)
        block = tl.load(blocks + column * table_strides[1], is_key, 0)
        slot = block * block_size + position % block_size
        if new is None:
            tl.store(row_slots + at, tl.where(is_key, slot, -1), at < k)
        else:
            is_key &= slot >= 0
            place = count + tl.cumsum(is_key.to(tl.int32), 0) - 1
            tl.store(row_slots + place, slot, is_key)
            count += tl.sum(is_key.to(tl.int32), 0)
    if new is not None:
        for first in range(count, k, BLOCK_KEYS):
            at = first + tl.arange(0, BLOCK_KEYS)
            tl.store(row_slots + at, tl.zeros([BLOCK_KEYS], tl.int32), at < k)
        tl.store(new.new_seq_lens + row, count)
        tl.store(new.sequences + row, tl.maximum(tl.minimum(sequence, num_seqs - 1), 0))
        end = tl.load(cu_seqlens_q + num_seqs)
        tl.store(new.new_cu_seqlens_q + row + 1, tl.minimum(tl.program_id(0) + 1, end))
        if row == 0:
            tl.store(new.new_cu_seqlens_q, 0)
