"""Recurrent layers: the plan of a step (`StatePlan`), state maps, and the checks of calls.

A state has a fixed size, independent of the length of its sequence, so a sequence has slots instead of blocks:

    state_indices [b]       [4, 0, -1]                  sequence 0 has slot 4, sequence 1 has slot 0, row 2 is padding
    state_indices [b, c]    [[4, 7, 2], [0, 5, -1]]     drafts: the state after token i of this step goes to column i

A negative index is padding, like -1 in a slot mapping: it is neither read nor written. Slot 0 is an ordinary slot.
(Some kernels reserve it, or take -1 as their last slot; see `docs/paths/recurrent.md`.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from refattn.batch import Batch, check_batch, check_lengths
from refattn.checks import (
    check,
    check_can_be_written,
    check_flag,
    check_floating,
    check_own_memory,
    check_sizes,
    describe,
    same_device,
)
from refattn.options import RecurrentOptions
from refattn.overlap import check_apart
from refattn.ranks import Group


@dataclass(frozen=True, eq=False)
class StatePlan:
    """The slots that a step reads states from and writes them to.

    Attributes:
        batch: the query rows of each sequence. Its `seq_lens` determine where blocks end; no block table is read.
        state_indices: the slot of each sequence, `[b]`: the state is read from it, and written back after the last
            token. Or `[b, c]` for a step with drafts, at most `c` tokens per sequence: the state after token `i` is
            written to column `i`, if that is not negative. A sequence whose first entry is negative is padding: its
            rows return 0, and none of its slots is read or written.
        has_initial_state: which sequences have a state; others start from zeros, and their slot is not read.
        num_accepted: with `[b, c]`, how many tokens of the previous step were accepted: the state is in column
            `num_accepted - 1`. All 1 if None. Entries of padding may be anything.
        checkpoint_indices: the slot that saves the state at the end of each block: column `j` after token
            `(j + 1) * block_size` of the sequence. A negative entry, or None for all, saves none. Only columns of
            blocks that end in this step are read.
        block_size: tokens in a block; None without checkpoints.
        num_rows: the minimum number of query rows; None if the tables are on a device, where they are not read.
        num_slots: the minimum number of slots in a pool; None on a device.

    Nothing is read or written for a sequence without new tokens, and entries that the step does not use may hold
    anything. On a CPU the contents are checked here, once: if a table changes, make a new plan. On a device, a sequence
    with an initial state but a negative slot in column `num_accepted - 1` counts as padding.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if two states of the step share a slot.
    """

    batch: Batch
    state_indices: Int32[Tensor, "b"] | Int32[Tensor, "b c"]
    has_initial_state: Bool[Tensor, "b"]
    num_accepted: Int32[Tensor, "b"] | None = None
    checkpoint_indices: Int32[Tensor, "b m"] | None = None
    block_size: int | None = None
    num_rows: int | None = field(default=None, init=False, repr=False)
    num_slots: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the tables, and their contents where they are on the host."""
        check_batch(self.batch)
        check_lengths(self.batch)
        per_draft = isinstance(self.state_indices, Tensor) and self.state_indices.ndim == 2
        sizes = check(
            seq_lens=(self.batch.seq_lens, "int32 b"),
            state_indices=(self.state_indices, "int32 b c" if per_draft else "int32 b"),
            has_initial_state=(self.has_initial_state, "bool b"),
            checkpoint_indices=(self.checkpoint_indices, "int32 b m or None"),
        )
        if per_draft and not sizes["c"]:
            raise ValueError("state_indices: expected at least one column, got none")
        if self.num_accepted is not None and not per_draft:
            raise ValueError("num_accepted: expected with state_indices [b, c] only, which has a state per token")
        check(seq_lens=(self.batch.seq_lens, "int32 b"), num_accepted=(self.num_accepted, "int32 b or None"))
        if self.block_size is not None:
            check_sizes(block_size=self.block_size)
        if (self.checkpoint_indices is None) != (self.block_size is None):
            raise ValueError("block_size: expected with checkpoint_indices, and only with them")
        if self.batch.device.type == "cpu":
            object.__setattr__(self, "num_rows", int(self.batch.cu_seqlens_q[-1]))
            object.__setattr__(self, "num_slots", self._check_contents())

    @property
    def per_draft(self) -> bool:
        """Whether a state is kept after each token of the step."""
        return self.state_indices.ndim == 2

    @property
    def first_positions(self) -> Int32[Tensor, "b"]:
        """The position of the first new token of each sequence."""
        return self.batch.context_lens.clamp(min=0)

    def _check_contents(self) -> int:
        """Check the slots that the step uses, and return the minimum number of slots in a pool."""
        rows = self.state_indices.tolist() if self.per_draft else [[slot] for slot in self.state_indices.tolist()]
        accepted = [1] * len(rows) if self.num_accepted is None else self.num_accepted.tolist()
        checkpoints = [[]] * len(rows) if self.checkpoint_indices is None else self.checkpoint_indices.tolist()
        has_state, positions = self.has_initial_state.tolist(), self.first_positions.tolist()
        owners: dict[int, int] = {}
        for i, (query_len, slots) in enumerate(zip(self.batch.query_lens.tolist(), rows, strict=True)):
            if not query_len or slots[0] < 0:
                continue
            if self.per_draft and query_len > len(slots):
                raise ValueError(
                    f"state_indices: expected a column for each of the {query_len} new tokens of sequence {i}, "
                    f"got {len(slots)}"
                )
            if not 1 <= accepted[i] <= len(slots):
                raise ValueError(
                    f"num_accepted: expected 1..{len(slots)}, a column of state_indices, got {accepted[i]} for "
                    f"sequence {i}"
                )
            if has_state[i] and slots[accepted[i] - 1] < 0:
                raise ValueError(
                    f"state_indices: expected a slot in column {accepted[i] - 1}, where the state of sequence {i} is, "
                    f"got {slots[accepted[i] - 1]}"
                )
            used = slots[:query_len] if self.per_draft else slots[:]
            if has_state[i] and slots[accepted[i] - 1] not in used:
                used.append(slots[accepted[i] - 1])
            if self.block_size is not None:
                ended = slice(positions[i] // self.block_size, (positions[i] + query_len) // self.block_size)
                if ended.stop > max(ended.start, len(checkpoints[i])):
                    raise ValueError(
                        f"checkpoint_indices: expected a column for each of the {ended.stop} blocks that sequence {i} "
                        f"ends, got {len(checkpoints[i])}"
                    )
                used += checkpoints[i][ended]
            for slot in used:
                if slot >= 0 and owners.setdefault(slot, i) != i or slot >= 0 and used.count(slot) > 1:
                    other = owners[slot]
                    raise ValueError(
                        f"state_indices: expected a slot for each state, got slot {slot} for "
                        + (f"sequences {other} and {i}" if other != i else f"two states of sequence {i}")
                    )
        return max(owners, default=-1) + 1


class StateMap(NamedTuple):
    """The effect of consecutive tokens on a state, `state -> state @ factor + added`.

    Attributes:
        factor: one matrix per sequence and head, in float32 or wider; diagonal without the delta rule.
        added: the state after the tokens, if it is zeros before them.
    """

    factor: Float[Tensor, "b hv dk dk"]
    added: Float[Tensor, "b hv dv dk"]


def check_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    plan: StatePlan,
    options: RecurrentOptions,
    out: Tensor | None,
) -> None:
    """Check a call of `recurrent.attention`, which documents the shapes.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    t = check(query=(query, "float t h dk"), key=(key, "query: t h dk"))["t"]
    sizes = _check_values(key, value, log_decay, beta)
    check(sizes, states=(states, "n hv dv dk"))
    if not isinstance(options, RecurrentOptions):
        raise ValueError(f"options: expected RecurrentOptions, got {describe(options)}")
    tensors = dict(query=query, key=key, value=value, log_decay=log_decay, beta=beta, states=states)
    _check_step("query", t, "states", states, plan, out, value, tensors)


def check_state_map(
    key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, plan: StatePlan, options: RecurrentOptions
) -> None:
    """Check a call of `recurrent.state_map`.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    t = check(key=(key, "float t h dk"))["t"]
    _check_values(key, value, log_decay, beta)
    if not isinstance(options, RecurrentOptions):
        raise ValueError(f"options: expected RecurrentOptions, got {describe(options)}")
    tensors = dict(key=key, value=value, log_decay=log_decay, beta=beta)
    _check_plan("key", t, plan, tensors)


def _check_values(key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> dict[str, int]:
    """Check values and gates against the keys, and return the size of every letter except `t`."""
    sizes = check(key=(key, "t h dk"), value=(value, "key: t hv dv"))
    t, h, hv = sizes.pop("t"), sizes["h"], sizes["hv"]
    check_sizes(h=h, dk=sizes["dk"], hv=hv, dv=sizes["dv"])
    if hv % h:
        raise ValueError(f"value: expected a number of heads that h={h} divides, got hv={hv}")
    per_channel = isinstance(log_decay, Tensor) and log_decay.ndim == 3
    decay = (log_decay, "float t hv dk" if per_channel else "float t hv")
    check({**sizes, "t": t}, log_decay=decay, beta=(beta, "float t hv"))
    return sizes


def check_compose(maps: Sequence[StateMap]) -> None:
    """Check state maps that are to be composed.

    Raises:
        ValueError: if there is no map, or they differ in shape, type or device.
    """
    if not isinstance(maps, list | tuple) or not maps or not all(isinstance(one, StateMap) for one in maps):
        raise ValueError(f"maps: expected at least one StateMap, in a list, got {describe(maps)}")
    for i, one in enumerate(maps):
        check(
            factor=(maps[0].factor, "b hv dk dk"),
            added=(maps[0].added, "b hv dv dk"),
            **{f"maps[{i}].factor": (one.factor, "factor: b hv dk dk")},
            **{f"maps[{i}].added": (one.added, "factor: b hv dv dk")},
        )


def check_ranks(plan: StatePlan, group: Group) -> None:
    """Check a step of recurrent layers over several ranks.

    Raises:
        ValueError: if the plan has a slot per draft, or the group is not a `Group`.
    """
    if isinstance(plan, StatePlan) and plan.per_draft:
        raise ValueError("plan: expected one slot per sequence, as tokens on several ranks are no drafts, got several")
    if not isinstance(group, Group):
        raise ValueError(f"group: expected ranks, got {describe(group)}")


def check_convolution(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    plan: StatePlan,
    silu: bool,
    out: Tensor | None,
) -> None:
    """Check a call of `recurrent.convolve`, which documents the shapes.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    sizes = check(inputs=(inputs, "float t c"), weight=(weight, "float c width"), bias=(bias, "float c or None"))
    t, channels, width = sizes["t"], sizes["c"], sizes["width"]
    check_sizes(c=channels, width=width)
    tensors = dict(inputs=inputs, weight=weight, states=states) | ({} if bias is None else dict(bias=bias))
    check({"c": channels, "width - 1": width - 1}, states=(states, "n width-1 c"))
    check_flag("silu", silu)
    _check_step("inputs", t, "states", states, plan, out, inputs, tensors)


def _check_step(
    rows_name: str,
    num_rows: int,
    name: str,
    states: Tensor,
    plan: StatePlan,
    out: Tensor | None,
    like: Tensor,
    tensors: dict[str, Tensor],
) -> None:
    """Check a pool of states, the plan, the devices and `out`."""
    check_floating(name, states)
    _check_plan(rows_name, num_rows, plan, tensors)
    check_own_memory(name, states)
    check_can_be_written(**{name: states})
    if plan.num_slots is not None and plan.num_slots > states.shape[0]:
        raise ValueError(f"{name}: expected at least {plan.num_slots} slots, as the plan uses, got n={states.shape[0]}")
    check_apart({name: states}, {other: tensor for other, tensor in tensors.items() if other != name})
    if out is not None:
        check(out=(out, " ".join(map(str, like.shape)), like.dtype), seq_lens=(plan.batch.seq_lens, "int32 b"))
        check_own_memory("out", out)
        check_apart({name: states}, dict(out=out))
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out: expected memory that requires no gradient, got some that does")


def _check_plan(rows_name: str, num_rows: int, plan: StatePlan, tensors: dict[str, Tensor]) -> None:
    """Check a plan, its device, and that there are enough rows for it."""
    if not isinstance(plan, StatePlan):
        raise ValueError(f"plan: expected a StatePlan, from recurrent.plan, got {describe(plan)}")
    same_device(**tensors, seq_lens=plan.batch.seq_lens)
    if plan.num_rows is not None and plan.num_rows > num_rows:
        raise ValueError(
            f"{rows_name}: expected at least {plan.num_rows} rows, where cu_seqlens_q ends, got t={num_rows}"
        )


def check_accepted_slots(state_indices: Tensor, num_accepted: Tensor) -> None:
    """Check the arguments of `state_cache.accepted_slots`: slots `[b, c]` and numbers of accepted tokens `[b]`.

    Raises:
        ValueError: naming the argument; on a CPU also if a number is outside `1..c`, except for padding.
    """
    columns = check(state_indices=(state_indices, "int32 b c"), num_accepted=(num_accepted, "int32 b"))["c"]
    check_sizes(c=columns)
    if state_indices.is_cpu:
        wrong = ((num_accepted < 1) | (num_accepted > columns)) & (state_indices[:, 0] >= 0)
        if wrong.any():
            raise ValueError(f"num_accepted: expected 1..{columns}, got {int(num_accepted[wrong][0])}")
