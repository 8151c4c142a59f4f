"""How the work of a plan is divided on a CPU: what is computed together, and which blocks are read for it.

Each part is computed when a layer first needs it, and reused by all later layers of the step.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from fastattn.kernels.cpu.blocks import Blocks, side_by_side
from refattn.interface import Plan, TreePlan

WASTE = 1.5  # decodes go into one call while that reads at most this many times the keys there are


T = TypeVar("T")


class Schedule:
    """How the work of a plan is shared out.

    Args:
        plan: the plan; its tables have been checked.
    """

    def __init__(self, plan: Plan) -> None:
        # Not the plan itself, which keeps this: neither would be freed before Python looks for cycles.
        self.batch, self.block_size, self.window = plan.batch, plan.block_size, plan.window
        self.positions, self.first_keys = plan.positions, plan.first_keys
        self._apart: dict[bool, list[Apart]] = {}
        self._views: dict[bool, list[tuple[slice, int, View]]] = {}
        self._kept: dict[Hashable, Any] = {}

    @cached_property
    def lengths(self) -> list[tuple[slice, int]]:
        """The query rows and the number of keys of each sequence."""
        return [
            (slice(q0, q1), seq_len)
            for (q0, q1), seq_len in zip(self.batch.query_rows(), self.batch.seq_lens.tolist(), strict=True)
        ]

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, which is called the first time that it is asked for by this name."""
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

    def apart(self, positions: bool) -> list["Apart"]:
        """Return the sequences that see something, one by one, by the positions of the plan or as they follow."""
        if positions not in self._apart:
            self._apart[positions] = self._one_by_one(range(len(self.lengths)), positions)
        return self._apart[positions]

    @cached_property
    def together(self) -> list["Decodes | Apart"]:
        """The decodes of like lengths in groups, and all other sequences one by one."""
        batch, block_size = self.batch, self.block_size
        assert batch.block_table is not None and block_size is not None  # a plan over pages has them
        decodes = [i for i, (rows, seq_len) in enumerate(self.lengths) if rows.stop - rows.start == 1 and seq_len]
        pieces: list[Decodes | Apart] = []
        for group in _of_like_length(decodes, [seq_len for _, seq_len in self.lengths]):
            members = torch.tensor(sorted(group))
            begins = [self.lengths[i][0].start for i in sorted(group)]
            neighbours = begins[-1] - begins[0] == len(begins) - 1
            rows = slice(begins[0], begins[-1] + 1) if neighbours else torch.tensor(begins)
            seen = batch.seq_lens[members], batch.block_table[members]
            pieces.append(_read_together(rows, *seen, block_size, self.window[0]))
        return pieces + self._one_by_one([i for i in range(len(self.lengths)) if i not in set(decodes)], False)

    def _one_by_one(self, sequences: "range | list[int]", positions: bool) -> list["Apart"]:
        batch, block_size = self.batch, self.block_size
        assert batch.block_table is not None and block_size is not None  # a plan over pages has them
        pieces = []
        for i in sequences:
            rows, seq_len = self.lengths[i]
            view = self._view(i, positions) if rows.stop > rows.start and seq_len else None
            if view is not None and view.num_keys:
                blocks = batch.block_table[i, view.first_key // block_size : -(-view.end_key // block_size)]
                pieces.append(Apart(rows, blocks, view))
        return pieces

    def _view(self, sequence: int, positions: bool) -> "View":
        rows, seq_len = self.lengths[sequence]
        given = None
        if positions:
            assert self.positions is not None
            first_key = 0 if self.first_keys is None else int(self.first_keys[sequence])
            given = self.positions[rows].long() - first_key
        return _view(rows, seq_len, self.window, given)


def schedule_of(plan: Plan) -> Schedule:
    """Return how the work of a plan is shared out, which the plan keeps for the layers that follow."""
    if "cpu" not in plan.kept:
        plan.kept["cpu"] = Schedule(plan)
    schedule: Schedule = plan.kept["cpu"]
    return schedule


@dataclass(frozen=True)
class View:
    """Which keys the queries of one sequence see.

    Attributes:
        positions: of the queries.
        consecutive: they are the last rows of the sequence.
        window: `(left, right)` as in `Plan.window`, where a limit that hides nothing is none.
        first_key: the first key that a query sees.
        end_key: the one past the last that a query sees.
    """

    positions: Int64[Tensor, "t"]
    consecutive: bool
    window: tuple[int, int]
    first_key: int
    end_key: int

    @property
    def num_keys(self) -> int:
        """Keys that some query sees, and those between them."""
        return max(0, self.end_key - self.first_key)


def _view(rows: slice, seq_len: int, window: tuple[int, int], given: Int64[Tensor, "t"] | None) -> View:
    left, right = window
    positions = torch.arange(seq_len - (rows.stop - rows.start), seq_len)
    consecutive = given is None
    if given is not None:
        positions = given
    if not len(positions):
        return View(positions, consecutive, (left, right), 0, 0)
    lowest, highest = int(positions.min()), int(positions.max())
    left = -1 if left >= highest else left
    right = -1 if lowest + right >= seq_len - 1 else right
    first_key = 0 if left < 0 else max(0, lowest - left)
    end_key = seq_len if right < 0 else min(seq_len, highest + right + 1)
    return View(positions, consecutive, (left, right), first_key, end_key)


@dataclass(frozen=True)
class Decodes:
    """Sequences with one query each that are computed together, and what they read."""

    rows: Int64[Tensor, "b"] | slice  # their query rows
    blocks: Blocks
    keys: slice  # those of the blocks that some sequence sees
    distance: Int32[Tensor, "b s"]  # how far each key of the blocks lies before the query
    bias: Float[Tensor, "b 1 1 s"] | None  # -inf on keys that are not to be seen, if there are any among `keys`


@dataclass(frozen=True)
class Apart:
    """One sequence that is computed by itself, and what it reads."""

    rows: slice
    blocks: Int32[Tensor, "m"]  # those with a key that a query sees
    view: View


@dataclass(frozen=True)
class Branches:
    """The nodes of one tree, and who of its query rows sees whom."""

    rows: slice
    blocks: Int32[Tensor, "m"]  # those that hold the nodes
    first_row: int  # of the nodes, in those blocks
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
        first, node = seq_len - num_nodes, torch.arange(num_nodes)
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


def _of_like_length(decodes: list[int], seq_lens: list[int]) -> Iterator[list[int]]:
    """Group sequences so that the longest of a group has at most `WASTE` times the keys of the shortest."""
    group: list[int] = []
    for i in sorted(decodes, key=lambda i: -seq_lens[i]):
        if group and seq_lens[group[0]] > WASTE * seq_lens[i]:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _read_together(
    rows: Int64[Tensor, "b"] | slice,
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b columns"],
    block_size: int,
    left: int,
) -> Decodes:
    first_keys = torch.zeros_like(seq_lens) if left < 0 else (seq_lens - 1 - left).clamp(min=0)
    blocks = side_by_side(block_table, first_keys, seq_lens, block_size)
    seen = (~blocks.hidden).any(0).nonzero()
    keys = slice(int(seen[0]), int(seen[-1]) + 1)
    stale = torch.zeros_like(blocks.stale)
    stale[:, keys] = blocks.stale[:, keys]  # others are not handed on
    bias = torch.zeros(blocks.hidden.shape).masked_fill_(blocks.hidden, -torch.inf)[:, None, None]
    return Decodes(
        rows,
        replace(blocks, stale=stale),
        keys,
        seq_lens[:, None] - 1 - blocks.positions,
        bias if blocks.hidden[:, keys].any() else None,
    )
