"""The plan of a step: where the keys are and who may see whom, computed once and used by every layer.

    batch     from the scheduler: lengths, block table                one per step
    plan      derived from it by a path: tables, masks, positions     one per step and kind of layer
    options   fixed for a layer: scale, softcap, slopes, sinks        one per layer

A plan describes sequences of keys, each with its query rows: the sequences of the batch, or others made from them:

    path              its sequences                              position of a sequence's first key
    chunked prefill   those of the batch                         0
    sliding window    without the blocks that no query sees      start of the first remaining block
    local             one for each chunk with new tokens         start of the chunk
    cascade           groups that share keys, level by level     end of the previous level
    interval          those of the batch                         0
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from refattn.batch import Batch, check_batch, check_contents, check_lengths
from refattn.checks import (
    check,
    check_flag,
    check_list,
    check_side_by_side,
    check_sizes,
    check_window,
    describe,
    same_device,
)
from refattn.ranks import Shard


class Needs(NamedTuple):
    """The minimum sizes of the tensors of an attention call under a plan.

    Attributes:
        query_rows: rows of the query.
        key_rows: rows of keys and values, without a cache.
        blocks: blocks of the pool.
    """

    query_rows: int
    key_rows: int
    blocks: int


class Intervals(NamedTuple):
    """The contiguous range of keys that each query row sees: by position, both ends included.

    Attributes:
        first_visible: the position of the first key; negative values count as 0.
        last_visible: the position of the last key; less than the first for a fully masked query.
    """

    first_visible: Int32[Tensor, "t"]
    last_visible: Int32[Tensor, "t"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Sequences of keys, and which of them each query row may see.

    Query row `i` of a sequence with `q` queries and `s` keys has position `first_key + s - q + i`, or the one given by
    `positions`. It sees key `j`, at position `first_key + j`, if `causal` and `window_size` allow it, or if `j`'s
    position is in the row's interval, from `first_visible` to `last_visible`, both included.

    Attributes:
        batch: the query rows of each sequence, its number of keys, and the blocks that hold them.
        block_size: tokens in a block; None where keys are in contiguous rows (`varlen`).
        causal: hide the keys after a query's own position.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit: a window of W tokens is `(W - 1, 0)`.
        first_keys: the position of each sequence's first key; None if all are 0.
        positions: the position of each query row; None where a sequence's queries are its last tokens. Padding rows may
            hold anything.
        sequences: the sequence of the batch that each sequence of the plan belongs to, for tensors with one row per
            sequence of the batch; None if both have the same sequences.
        first_visible: the position of the first key that each query row sees, in place of a causal mask and a window;
            None if `causal` and `window_size` are the mask. Padding rows may hold anything.
        last_visible: the position of the last key that it sees; `last < first` is an empty row. Intervals are clipped
            to the keys of the sequence.
        extends_causal: every interval begins at 0 and ends at the query itself or later: a causal mask plus later keys.
            It lets a kernel take a faster way and does not change the output.
        needs: the minimum sizes of the tensors; None if the tables are on a device, where they are not read.

    Tables with one entry per sequence or query row are contiguous, like the lengths: kernels read them in place.

    On a CPU the contents of the tables are checked here, once, and not in every layer: if a table changes, make a new
    plan.

    Raises:
        ValueError: naming the argument that does not fit.
    """

    batch: Batch
    block_size: int | None = None
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    first_keys: Int32[Tensor, "b"] | None = None
    positions: Int32[Tensor, "t"] | None = None
    sequences: Int32[Tensor, "b"] | None = None
    first_visible: Int32[Tensor, "t"] | None = None
    last_visible: Int32[Tensor, "t"] | None = None
    extends_causal: bool = False
    needs: Needs | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments, and the contents of the tables where they are on the host."""
        check_flag("causal", self.causal)
        check_flag("extends_causal", self.extends_causal)
        check_window(self.window_size)
        if self.block_size is not None:
            check_sizes(block_size=self.block_size)
        check_batch(self.batch)
        lengths = (self.batch.seq_lens, "int32 b")
        check(
            seq_lens=lengths,
            first_keys=(self.first_keys, "int32 b or None"),
            positions=(self.positions, "int32 t or None"),
        )
        check(seq_lens=lengths, sequences=(self.sequences, "int32 b or None"))
        for name in ("first_visible", "last_visible"):
            check(seq_lens=lengths, **{name: (getattr(self, name), "int32 t or None")})
        for name in ("first_keys", "positions", "sequences", "first_visible", "last_visible"):
            if getattr(self, name) is not None:
                check_side_by_side(name, getattr(self, name))
        self._check_intervals()
        needs = check_contents(self.batch, self.block_size, self.first_keys)
        for name in ("positions", "first_visible"):
            numbers = getattr(self, name)
            if needs is not None and numbers is not None and numbers.shape[0] < needs[0]:
                raise ValueError(
                    f"{name}: expected at least {needs[0]}, one for each query row of the batch, got {numbers.shape[0]}"
                )
        if needs is not None and self.extends_causal:
            self._check_extension()
        object.__setattr__(self, "needs", None if needs is None else Needs(*needs))

    def _check_extension(self) -> None:
        """Check that the interval of every row begins at 0 and ends at the row itself or later."""
        assert self.first_visible is not None and self.last_visible is not None  # checked
        batch, used = self.batch, int(self.batch.cu_seqlens_q[-1])
        ends = (batch.seq_lens - batch.cu_seqlens_q[1:]).repeat_interleave(batch.query_lens)
        wrong = (self.first_visible[:used] > 0) | (self.last_visible[:used] < torch.arange(used) + ends)
        if wrong.any():
            row = int(wrong.int().argmax())
            raise ValueError(
                f"extends_causal: expected intervals from 0 up to each query or past it, got "
                f"{int(self.first_visible[row])} to {int(self.last_visible[row])} in query row {row}"
            )

    def _check_intervals(self) -> None:
        """Check that intervals have both ends and are not combined with another mask."""
        if self.first_visible is None and self.last_visible is None:
            if self.extends_causal:
                raise ValueError("extends_causal: expected intervals with it, got none")
            return
        if self.first_visible is None or self.last_visible is None:
            name, other = ("first", "last") if self.first_visible is None else ("last", "first")
            raise ValueError(f"{name}_visible: expected int32 [t], as {other}_visible is given, got None")
        check(first_visible=(self.first_visible, "int32 t"), last_visible=(self.last_visible, "int32 t"))
        if self.window != (-1, -1):
            raise ValueError(
                f"causal, window_size: expected False and (-1, -1) where each query row has its interval, "
                f"got {self.causal} and {self.window_size}"
            )

    @property
    def window(self) -> tuple[int, int]:
        """The window, with `causal` as a right side of 0."""
        left, right = self.window_size
        return left, 0 if self.causal else right

    @property
    def levels(self) -> "tuple[Plan, ...]":
        """The levels of the plan: this one only."""
        return (self,)

    @property
    def own(self) -> "Plan":
        """The plan over the keys not shared, new tokens included: this one."""
        return self


@dataclass(frozen=True, eq=False)
class CascadePlan:
    """Several plans over the same query rows, whose outputs merge; the keys of a level follow those of earlier levels.

    Attributes:
        batch: the lengths and the block table of the step.
        levels: the plans, the outermost prefixes first and the keys not shared last. A sequence of a level is a group
            of consecutive sequences of the batch; `positions` has the positions of their queries.

    Raises:
        ValueError: if there is no level, a level is not a plan over pages, block sizes differ, or a shared level has a
            mask but no positions (its queries are not its last tokens); on a CPU also if the levels belong to another
            batch, omit or repeat keys, or a shared one extends into the queries.
    """

    batch: Batch
    levels: tuple[Plan, ...]

    @property
    def own(self) -> Plan:
        """The last level: the plan over the keys not shared, new tokens included."""
        return self.levels[-1]

    def __post_init__(self) -> None:
        """Check the types, and on a CPU that the levels hold every key of the batch once."""
        check_batch(self.batch)
        check_list("levels", self.levels, "plans")
        if not self.levels:
            raise ValueError("levels: expected at least one, the keys not shared, got none")
        for i, level in enumerate(self.levels):
            if not isinstance(level, Plan) or level.block_size is None:
                came = "one over rows" if isinstance(level, Plan) else describe(level)
                raise ValueError(f"levels[{i}]: expected a Plan over pages, got {came}")
            if level.block_size != self.levels[0].block_size:
                size = self.levels[0].block_size
                raise ValueError(f"levels[{i}]: expected blocks of {size} tokens, got {level.block_size}")
            same_device(seq_lens=self.batch.seq_lens, **{f"levels[{i}]": level.batch.seq_lens})
        if self.batch.seq_lens.is_cpu:
            check_lengths(self.batch)
            _check_levels(self.batch, self.levels)
        for i, level in enumerate(self.levels[:-1]):
            if level.window != (-1, -1) and level.positions is None:
                raise ValueError(f"levels[{i}]: expected the positions of its queries, as it has a mask, got None")


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """A chunk of the context of each sequence, to be gathered into contiguous rows.

    Attributes:
        plan: the plan over those rows, without a causal mask; a sequence may have no key in a chunk.
        slots: the slot of each row in the pool, one sequence after the other; unused entries past the last are 0.
    """

    plan: Plan
    slots: Int64[Tensor, "_"]


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """New tokens that attend to one another, and to their context in the cache chunk by chunk.

    Attributes:
        own: the plan over the rows of the new tokens, causal.
        chunks: the chunks of the context, in order; all of one size, so the last ones may be empty.
        block_size: tokens in a block of the cache.
        blocks: the minimum number of blocks in the pool; None if the tables are on a device.
    """

    own: Plan
    chunks: tuple[ContextChunk, ...]
    block_size: int
    blocks: int | None


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """New tokens that attend to one another, and to a rank's share of their context.

    Attributes:
        batch: the lengths, the same on all ranks, and the rank's own block table.
        shard: which rank this is, and which tokens are its own.
        context: the plan over the pages of the rank, without a causal mask. Keys are numbered as stored on the rank.
            With a window, `positions` has the first key that each query sees, in this numbering, and the window is
            `(0, -1)`.
        own: the plan over the rows of the new tokens, causal or not.
    """

    batch: Batch
    shard: Shard
    context: Plan
    own: Plan


def _check_levels(batch: Batch, levels: tuple[Plan, ...]) -> None:
    """Check that the levels of a cascade cover the keys of a batch: shared keys first, the keys not shared last."""
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    keys = [0] * len(seq_lens)  # keys per sequence, in the levels so far
    for i, level in enumerate(levels):
        is_last = i == len(levels) - 1
        edges, lengths = level.batch.cu_seqlens_q.tolist(), level.batch.seq_lens.tolist()
        first_keys = [0] * len(lengths) if level.first_keys is None else level.first_keys.tolist()
        if edges[-1] != starts[-1] or not set(edges) <= set(starts) or (is_last and edges != starts):
            raise ValueError(f"levels[{i}]: expected groups of the sequences at query rows {starts}, got {edges}")
        group = 0
        for member, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue  # without queries a sequence reads no keys, whatever its group
            while edges[group + 1] <= start:
                group += 1
            if not lengths[group]:
                continue
            if first_keys[group] != keys[member]:
                raise ValueError(
                    f"levels[{i}].first_keys: expected {keys[member]} for sequence {member}, as the levels before hold "
                    f"so many of its keys, got {first_keys[group]}"
                )
            keys[member] += lengths[group]
            before = seq_lens[member] - (end - start)
            if not is_last and keys[member] > before:
                raise ValueError(
                    f"levels[{i}]: expected to end before the first query of each sequence, at {before} of sequence "
                    f"{member}, got {keys[member]} keys"
                )
    for member, (start, end) in enumerate(pairwise(starts)):
        if end > start and keys[member] != seq_lens[member]:
            raise ValueError(f"levels: expected the {seq_lens[member]} keys of sequence {member}, got {keys[member]}")
