"""Schedule the work of a plan on a CPU: which sequences are computed together, and which blocks are read for them.

A call has a fixed overhead, so short sequences are computed together. A thread should read the keys that it has
gathered itself: where cores do not share a cache, keys written by another core may take longer to read than keys in
memory. All threads gather equal shares of the blocks, and ATen's call divides sequences and heads in the same way. With
two threads:

    decodes a to d           first call   a a a a a a | b b b b b b       a sequence for each thread, or several
                             second call  c c c c c c | d d d d d d
    short prompts e, f, g    one call     e e e e e e f f f . . . g g . . . .           padded to the longest
    all others               one by one

If a group of decodes has fewer KV heads than there are threads, its keys are cut into runs, and the outputs merged.

Each part is computed when a layer first needs it, and reused by all later layers of the step.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from fastattn.kernels.cpu.blocks import Blocks, KVChunk, side_by_side
from fastattn.kernels.replay import memo_of
from refattn.plan import Plan
from refattn.trees import TreePlan

RUN = 512  # least keys of a run
SHORT_PROMPT = 256  # most tokens of a prompt that is computed with others
FEWEST_ALIKE = 16  # fewest queries with intervals of one shape that get a call of their own
WASTE = 1.5  # decodes share a call while it reads at most this many times their keys


T = TypeVar("T")


class Schedule:
    """The schedule of a plan.

    Args:
        plan: the plan; its tables have been checked.
    """

    def __init__(self, plan: Plan) -> None:
        # Not the plan itself, which keeps this: the cycle would live until Python collects cycles.
        self.batch, self.block_size, self.window = plan.batch, plan.block_size, plan.window
        self.positions = plan.positions
        self.first_visible, self.last_visible = plan.first_visible, plan.last_visible
        self.lengths = [  # the query rows and the number of keys of each sequence
            (slice(q0, q1), seq_len)
            for (q0, q1), seq_len in zip(self.batch.query_rows(), self.batch.seq_lens.tolist(), strict=True)
        ]
        self.before = [0] * len(self.lengths) if plan.first_keys is None else plan.first_keys.tolist()
        self._apart: dict[bool, list[SingleSequence]] = {}
        self._views: dict[bool, list[tuple[slice, int, View]]] = {}
        self._kept: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once per name."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept

    def rows(self, positions: bool) -> list[tuple[slice, int, "View"]]:
        """Return the query rows, the first key row and the view of each sequence, where keys are in contiguous rows."""
        if positions not in self._views:
            first, views = 0, []
            for i, (rows, seq_len) in enumerate(self.lengths):
                views.append((rows, first, self._view(i, positions)))
                first += seq_len
            self._views[positions] = views
        return self._views[positions]

    def count_alike(self, num_rows: int, num_keys: int) -> int:
        """Return the number of sequences, if all have one length and a full or causal mask; else 0.

        Args:
            num_rows: query rows of the call; if more than those of the sequences, the result is 0.
            num_keys: key rows of the call; the same holds for them.
        """
        count = len(self.lengths)
        length = self.lengths[0][1] if count else 0
        if self.first_visible is not None or self.window not in ((-1, -1), (-1, 0)) or not length:
            return 0
        alike = all(rows.stop - rows.start == seq_len == length for rows, seq_len in self.lengths)
        return count if alike and num_rows == num_keys == count * length else 0

    def apart(self, positions: bool) -> list["SingleSequence"]:
        """Return the sequences with visible keys, one by one, at the positions of the plan or at consecutive ones."""
        if positions not in self._apart:
            self._apart[positions] = self._one_by_one(range(len(self.lengths)), positions)
        return self._apart[positions]

    def together(self, block: torch.Size, most: int, *, prompts: bool) -> list["Piece"]:
        """Return decodes and short prompts in groups with about equally many keys, and all other sequences one by one.

        Args:
            block: shape of a block of the pool, `[p, hk, d]`.
            most: elements of keys that a thread gathers at a time. A group has as many sequences as fit, and at least
                one per thread: outputs over keys that are gathered in parts have to be merged.
            prompts: whether prompts may be in groups, too.
        """
        return self.once(("together", block, most, prompts), lambda: self._together(block, most, prompts))

    def _together(self, block: torch.Size, most: int, prompts: bool) -> list["Piece"]:
        left, right = self.window
        lens = [(rows.stop - rows.start, seq_len) for rows, seq_len in self.lengths]
        num_keys = [seq_len if left < 0 else min(seq_len, left + 1) for _, seq_len in lens]
        decodes = [i for i, (query_len, _) in enumerate(lens) if query_len == 1 and num_keys[i]]
        whole = [i for i, (query_len, seq_len) in enumerate(lens) if 1 < query_len == seq_len <= SHORT_PROMPT]
        whole = whole if prompts and (left, right) == (-1, 0) else []
        most_keys = most // block[1:].numel()
        pieces: list[Piece] = [
            *(self._decodes(group, num_keys, block, most) for group in _of_like_length(decodes, num_keys, most_keys)),
            *(self._prompts(group, block) for group in _of_like_length(whole, num_keys, most_keys)),
        ]
        in_groups = {*decodes, *whole}
        return pieces + self._one_by_one([i for i in range(len(lens)) if i not in in_groups], False)

    def _decodes(self, group: list[int], num_keys: list[int], block: torch.Size, most: int) -> "Decodes":
        assert self.batch.block_table is not None  # a plan over pages has one
        threads, members = torch.get_num_threads(), torch.tensor(group, device="cpu")
        seq_lens = self.batch.seq_lens[members]
        first_keys = seq_lens - torch.tensor([num_keys[i] for i in group], dtype=torch.int32, device="cpu")
        heads = len(group) * block[1]  # units of work to divide among the threads
        runs = max(1, min(-(-threads // heads), max(num_keys[i] for i in group) // RUN))
        blocks = side_by_side(self.batch.block_table[members], first_keys, seq_lens, block[0], runs)
        step = max(1, threads * most // (len(blocks.table) * block.numel()))
        return Decodes(self._rows_of(group), runs, _parts(blocks, seq_lens.repeat_interleave(runs), step))

    def _prompts(self, group: list[int], block: torch.Size) -> "Prompts":
        assert self.batch.block_table is not None  # a plan over pages has one
        members = torch.tensor(group, device="cpu")
        seq_lens = self.batch.seq_lens[members]
        longest = int(seq_lens.max())
        blocks = side_by_side(self.batch.block_table[members], torch.zeros_like(seq_lens), seq_lens, block[0])
        (kv_chunk,) = blocks.kv_chunks(blocks.table.shape[1])
        places = (torch.arange(longest, device="cpu") < seq_lens[:, None]).flatten().nonzero()[:, 0]
        padded = len(places) < len(group) * longest
        return Prompts(self._rows_of(group), len(group), places if padded else None, Part(kv_chunk, slice(0, longest)))

    def _rows_of(self, group: list[int]) -> slice | Int64[Tensor, "rows"]:
        """Return the query rows of some sequences, in their order."""
        rows = [self.lengths[i][0] for i in group]
        if all(one.stop == following.start for one, following in pairwise(rows)):
            return slice(rows[0].start, rows[-1].stop)
        return torch.cat([torch.arange(one.start, one.stop, device="cpu") for one in rows])

    def _one_by_one(self, sequences: "range | list[int]", positions: bool) -> list["SingleSequence"]:
        batch, block_size = self.batch, self.block_size
        assert batch.block_table is not None and block_size is not None  # a plan over pages has them
        pieces = []
        for i in sequences:
            rows, seq_len = self.lengths[i]
            view = self._view(i, positions) if rows.stop > rows.start and seq_len else None
            if view is not None and view.num_keys:
                blocks = batch.block_table[i, view.first_key // block_size : -(-view.end_key // block_size)]
                pieces.append(SingleSequence(rows, blocks, view))
        return pieces

    def _view(self, sequence: int, positions: bool) -> "View":
        (rows, seq_len), before = self.lengths[sequence], self.before[sequence]
        given = None
        if positions:
            assert self.positions is not None
            given = self.positions[rows].long() - before
        intervals = None
        if self.first_visible is not None and self.last_visible is not None:
            first, last = (x[rows].long() - before for x in (self.first_visible, self.last_visible))
            intervals = _intervals(first.clamp(min=0), last.clamp(max=seq_len - 1))
        return replace(_view(rows, seq_len, self.window, given, intervals), before=before)


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan, which its memo stores for later layers."""
    memo = memo_of(plan)
    if memo.cpu_schedule is None:
        memo.cpu_schedule = Schedule(plan)
    schedule: Schedule = memo.cpu_schedule
    return schedule


@dataclass(frozen=True)
class Segment:
    """Neighbouring queries of one sequence with intervals of one kind.

    Attributes:
        rows: which queries of the sequence.
        kind: "same" if all see the same keys, "causal" if each sees one more than the one before it; else "any".
        first_key: the first key that some of them see.
        end_key: the one past the last.
    """

    rows: slice
    kind: str
    first_key: int
    end_key: int


@dataclass(frozen=True)
class Intervals:
    """The interval of keys that each query of one sequence sees.

    Attributes:
        first: the first key of each query; 0 if it sees nothing.
        last: the last key; -1 if it sees nothing.
        segments: the queries that see some key, by the kind of their intervals.
    """

    first: Int64[Tensor, "t"]
    last: Int64[Tensor, "t"]
    segments: list[Segment]


def _intervals(first: Int64[Tensor, "t"], last: Int64[Tensor, "t"]) -> Intervals:
    """Cut the queries of a sequence where the kind of their intervals changes.

    Neighbouring segments of few queries are joined: a masked call is faster than a call for each.
    """
    if not len(first):
        return Intervals(first, last, [])
    sees = first <= last
    first, last = first.masked_fill(~sees, 0), last.masked_fill(~sees, -1)
    step, same_first = last.diff(), first.diff() == 0
    both_see = sees[1:] & sees[:-1]
    alike = torch.where(both_see & same_first & (step == 0), 0, 2)
    alike = torch.where(both_see & same_first & (step == 1), 1, alike)
    values, counts = (x.tolist() for x in alike.unique_consecutive(return_counts=True))
    cuts: list[tuple[int, int, str]] = []  # query rows (begin, end), and their kind
    begin = seen = 0

    def cut(end: int, kind: str) -> int:
        if begin < end and end - begin < FEWEST_ALIKE:
            kind = "any"
        if cuts and kind == cuts[-1][2] == "any":
            cuts[-1] = (cuts[-1][0], end, kind)
        elif begin < end:
            cuts.append((begin, end, kind))
        return end

    for value, count in zip(values, counts, strict=True):
        seen += count  # steps so far; a step of 0 or 1 joins the row after it
        begin = cut(seen + (value < 2), ("same", "causal", "any")[value])
    cut(len(first), "any")
    segments = []
    for begin, end, kind in cuts:
        some = sees[begin:end]
        if some.any():
            keys = int(first[begin:end][some].min()), int(last[begin:end].max()) + 1
            segments.append(Segment(slice(begin, end), "same" if end - begin == 1 else kind, *keys))
    return Intervals(first, last, segments)


@dataclass(frozen=True)
class View:
    """The keys that the queries of one sequence see.

    Attributes:
        positions: positions of the queries.
        consecutive: the queries are the last rows of the sequence.
        window: `(left, right)` as in `Plan.window`, -1 for a side that hides nothing.
        first_key: the first key that a query sees.
        end_key: the one past the last key that a query sees.
        intervals: the interval of each query; None under a window.
        before: tokens of the sequence before the first key of the table, whose blocks a window has removed. Positions
            are counted from that key.
    """

    positions: Int64[Tensor, "t"]
    consecutive: bool
    window: tuple[int, int]
    first_key: int
    end_key: int
    intervals: Intervals | None = None
    before: int = 0

    @property
    def num_keys(self) -> int:
        """Keys from the first visible one to the last."""
        return max(0, self.end_key - self.first_key)


def _view(
    rows: slice,
    seq_len: int,
    window: tuple[int, int],
    given: Int64[Tensor, "t"] | None,
    intervals: Intervals | None = None,
) -> View:
    left, right = window
    positions = torch.arange(seq_len - (rows.stop - rows.start), seq_len, device="cpu")
    consecutive = given is None
    if given is not None:
        positions = given
    if not len(positions):
        return View(positions, consecutive, (left, right), 0, 0)
    if intervals is not None:
        first_key = min((segment.first_key for segment in intervals.segments), default=0)
        end_key = max((segment.end_key for segment in intervals.segments), default=0)
        return View(positions, consecutive, (-1, -1), first_key, end_key, intervals)
    lowest, highest = int(positions.min()), int(positions.max())
    left = -1 if left >= highest else left
    right = -1 if lowest + right >= seq_len - 1 else right
    first_key = 0 if left < 0 else max(0, lowest - left)
    end_key = seq_len if right < 0 else min(seq_len, highest + right + 1)
    return View(positions, consecutive, (left, right), first_key, end_key)


@dataclass(frozen=True)
class Decodes:
    """Sequences with one query each that are computed together."""

    rows: Int64[Tensor, "b"] | slice  # their query rows
    runs: int  # runs of the keys of each sequence; each run is a row of its own in `parts`
    parts: list["Part"]


@dataclass(frozen=True)
class Prompts:
    """Whole prompts that are computed together, each padded to the longest."""

    rows: Int64[Tensor, "rows"] | slice  # their query rows
    count: int
    places: Int64[Tensor, "rows"] | None  # where those rows are among the padded ones; None without padding
    part: "Part"


@dataclass(frozen=True)
class Part:
    """The keys that sequences of one group read at a time."""

    kv_chunk: KVChunk
    keys: slice  # the keys of the KV chunk that some sequence sees
    distance: Int32[Tensor, "b s"] | None = None  # how far each key lies before the query, in decodes
    bias: Float[Tensor, "b 1 1 s"] | None = None  # -inf on hidden keys; None without any
    all_see_some: bool = True  # each query sees at least one key
    scratch: dict[Hashable, "Scratch"] = field(default_factory=dict)  # buffers, by thread and layout


@dataclass(frozen=True)
class Scratch:
    """Views of the buffers for the keys and values of a part; one of each if values are the keys."""

    blocks: list[Float[Tensor, "m p hk _"]]  # keys, then values
    rows: list[Float[Tensor, "*both rows hk _"]]  # rows of both in one tensor, if they have one shape
    rectangles: list[Float[Tensor, "b hk s _"]]  # keys and values of a call


@dataclass(frozen=True)
class SingleSequence:
    """One sequence that is computed by itself, and the blocks that it reads."""

    rows: slice
    blocks: Int32[Tensor, "m"]  # blocks with a visible key
    view: View


Piece = Decodes | Prompts | SingleSequence


@dataclass(frozen=True)
class Branches:
    """The nodes of one tree, and which of them each query row sees."""

    rows: slice
    blocks: Int32[Tensor, "m"]  # blocks that hold the nodes
    first_row: int  # the nodes' first row in those blocks
    seen: Bool[Tensor, "t nodes"]
    distance: Int64[Tensor, "t nodes"]  # how far each node lies before the query along a branch: negative after it


def branches_of(plan: TreePlan) -> Iterator[Branches]:
    """Find the nodes of each tree that has query rows."""
    whole, block_size = plan.whole.batch, plan.whole.block_size
    assert whole.block_table is not None and block_size is not None  # a plan over pages has them
    rows = zip(whole.query_rows(), whole.seq_lens.tolist(), plan.trees.lens.tolist(), strict=True)
    for i, ((q0, q1), seq_len, num_nodes) in enumerate(rows):
        if q0 == q1:
            continue
        first, node = seq_len - num_nodes, torch.arange(num_nodes, device="cpu")
        mine = slice(num_nodes - (q1 - q0), num_nodes)
        words = plan.ancestors[i, mine][:, node // 64]
        depths = plan.depths[i, :num_nodes].long()
        yield Branches(
            slice(q0, q1),
            whole.block_table[i, first // block_size : -(-seq_len // block_size)],
            first % block_size,
            (words >> node % 64 & 1).bool(),
            depths[mine, None] - depths,
        )


def _of_like_length(sequences: list[int], num_keys: list[int], most: int) -> Iterator[list[int]]:
    """Group sequences that see about equally many keys: the most are at most `WASTE` times the fewest.

    Args:
        sequences: indices of sequences.
        num_keys: keys that each one sees.
        most: keys per thread. A group has as many sequences as fit, and at least one per thread.
    """
    group: list[int] = []
    for i in sorted(sequences, key=lambda i: -num_keys[i]):
        if group:
            longest = num_keys[group[0]]
            room = torch.get_num_threads() * max(1, most // longest)
            if longest > WASTE * num_keys[i] or len(group) >= room:
                yield sorted(group)
                group = []
        group.append(i)
    if group:
        yield sorted(group)


def _parts(blocks: Blocks, seq_lens: Int32[Tensor, "b"], step: int) -> list[Part]:
    """Cut blocks into parts of some columns, without the keys on either side that no sequence sees."""
    seen = (~blocks.hidden).any(0).nonzero()
    first, end = int(seen[0]), int(seen[-1]) + 1
    stale = torch.zeros_like(blocks.stale)
    stale[:, first:end] = blocks.stale[:, first:end]  # only these are passed on
    parts = []
    for kv_chunk in replace(blocks, stale=stale).kv_chunks(step):
        here = slice(max(first, kv_chunk.keys.start), min(end, kv_chunk.keys.stop))
        hidden = blocks.hidden[:, here]
        bias = (
            torch.zeros(hidden.shape, dtype=torch.float32, device="cpu").masked_fill_(hidden, -torch.inf)[:, None, None]
            if hidden.any()
            else None
        )
        keys = slice(here.start - kv_chunk.keys.start, here.stop - kv_chunk.keys.start)
        distance = seq_lens[:, None] - 1 - blocks.positions[:, here]
        parts.append(Part(kv_chunk, keys, distance, bias, not hidden.all(1).any()))
    return parts
