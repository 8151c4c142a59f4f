"""The slots of layers that replay their inputs (`refattn.replay`): a checkpoint, and a ring of the inputs since.

A request has one slot, and a second one while a step computes: a checkpoint that moves is written there. So a step
writes no memory that it reads, and one that fails can be computed again. A decode of a request with room for 3 inputs:

    step    tokens    slot    cursor    writes
    1       0 .. 8    -       -         slot 0: a prompt is computed by chunks, and leaves a state
    2       9         0       0         the ring of slot 0
    3       10        0       1         the ring of slot 0
    4       11        0       2         slot 1, as the ring is full
    5       12        1       0         the ring of slot 1, and slot 0 is free

Drafts go into the ring, all of them, and those that are accepted stay there by the cursor: no slot per draft. A
checkpoint is written once. So the state at the end of a block costs nothing: a step that ends there moves the
checkpoint, the request goes on in that slot, and the slot is kept for prefix caching, too. Where drafts cross the end
of a block, the inputs up to it are folded into a slot of their own before the next step, as are those of a slot that
several requests begin with, or that a prompt goes on from. With drafts there is a slot more per request, as such a fold
reads the slot of a request that has just ended, while another begins in its place.

The host knows each cursor, as it knows how many tokens were accepted. It passes them with the slots, so one captured
graph serves any cursor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from refattn.checks import check_sizes
from twinattn.engine.block_pool import BlockContent
from twinattn.engine.request import Request
from twinattn.engine.slots import SlotPool

RING_SIZE = 16  # inputs, by default; room for more costs more than it saves
FEW = 4  # decodes of a step up to which a ring saves nothing (H200, `docs/results/tried`, 2026-11-28)


class Fold(NamedTuple):
    """A state that is written before a step: the checkpoint in a slot, and its first inputs, go to another slot."""

    slot: int
    num_inputs: int
    target: int


class Row(NamedTuple):
    """The slots of a request in a step, as its plans take them; -1 where there is none.

    Attributes:
        slot: of a decode, where its checkpoint and its ring are.
        cursor: how many inputs the ring holds.
        target: where its checkpoint goes, if it moves to another slot.
        flush: whether it has to move.
        plain: of a decode by plain steps, the slot that gets its state.
        start: and the one that has it; that slot itself if the entry is -1.
        prefill: of a prefill, the slot of its state.
        block: of a prefill, the block at whose end a state is kept.
        kept: the slot of that state.
    """

    slot: int = -1
    cursor: int = 0
    target: int = -1
    flush: int = 0
    plain: int = -1
    start: int = -1
    prefill: int = -1
    block: int = -1
    kept: int = -1


@dataclass
class RingSlots:
    """The slots of a request in a step.

    Attributes:
        first: tokens before the step.
        slot: where the checkpoint before it is; None without any.
        cursor: how many inputs its ring holds.
        target: where the checkpoint goes if it moves; None between steps.
        query_len: new tokens.
        block: the block that a decode without drafts ends, so that its state is kept; None for none.
        checkpoint: of a prefill, the block at whose end a state is kept, and the slot; None for none.
        planned: from `plan`: the slot after the step, how many inputs its ring holds before the new tokens, and whether
            these are pushed into it.
        latest: what the kept state of its answer is the state after; None without one.
    """

    first: int
    slot: int | None = None
    cursor: int = 0
    target: int | None = None
    query_len: int = 0
    block: int | None = None
    checkpoint: tuple[int, int] | None = None
    planned: tuple[int, int, bool] | None = None
    latest: BlockContent | None = None

    def after(self, count: int) -> tuple[int, int]:
        """Return the slot after the planned step, and its cursor, if `count` of the new tokens are accepted."""
        assert self.planned is not None  # the step has been computed
        slot, held, pushes = self.planned
        return slot, held + count if pushes else 0


class RingPool(SlotPool):
    """Allocates slots for checkpoints and rings, and finds the states that were kept.

    Attributes:
        ring_size: inputs that a ring has room for.
        few: decodes of a step up to which states are read and written instead, without drafts.

    Args:
        num_requests: most requests that run at once.
        num_kept: states that are kept besides.
        block_size: tokens in a block.
        ring_size: as above.
        few: as above.
        decode_len: most new tokens of a decode, its drafts included.
        ahead: whether steps are launched ahead.

    Raises:
        ValueError: naming the argument that is out of range, also a ring without room for the tokens of a decode.
    """

    def __init__(
        self,
        num_requests: int,
        num_kept: int,
        *,
        block_size: int,
        ring_size: int,
        few: int = 0,
        decode_len: int = 1,
        ahead: bool = False,
    ) -> None:
        check_sizes(ring_size=ring_size)
        if ring_size < decode_len:
            raise ValueError(
                f"state_ring_size: expected room for the {decode_len} tokens of a decode with drafts, got {ring_size}"
            )
        self.ring_size, self.block_size, self.decode_len = ring_size, block_size, decode_len
        self.few = few if decode_len == 1 else 0
        folds = int(decode_len > 1)  # the slot of a request that has ended is read once more, for a state that is kept
        super().__init__(num_requests * (2 + ahead + folds) + num_kept, num_kept)

    def reset(self) -> None:
        """Free all slots, and forget what they hold."""
        super().reset()
        self._folds: list[Fold] = []  # kept states that are written before the next step

    def is_shared(self, slot: int) -> bool:
        """Return whether several requests have the checkpoint in a slot."""
        return self._users[slot] - sum(fold.slot == slot for fold in self._folds) > 1

    def begin(self, contents: Sequence[BlockContent]) -> RingSlots:
        """Return the slots of a new request that starts after some blocks: its checkpoint is the state after them."""
        slots = RingSlots(len(contents) * self.block_size)
        if contents:
            slots.slot = self.kept[contents[-1]]
            self._use(slots.slot)
        return slots

    def fork(self, slots: RingSlots) -> RingSlots:
        """Return the slots of another sample: it begins with the same checkpoint and ring."""
        if slots.slot is not None:
            self._use(slots.slot)
        return RingSlots(slots.first, slots.slot, slots.cursor)

    def hold(self, request: Request, slots: RingSlots, query_len: int, seq_len: int) -> None:
        """Take the slots that a step writes to; called again with more tokens, drafts, it takes none for them."""
        slots.query_len = query_len
        if slots.target is None:
            slots.target = self._take()
        block = (seq_len - (seq_len == request.prompt_len)) // self.block_size - 1
        if (block + 1) * self.block_size <= slots.first or not self.num_kept:
            return
        if query_len <= self.decode_len:
            slots.block = block if self.decode_len == 1 else None
        elif slots.checkpoint is None and self._pending < self.num_kept:
            slots.checkpoint = block, self._take()
            self._pending += 1

    def hold_ahead(self, request: Request, slots: RingSlots, launched: int, query_len: int) -> RingSlots:
        """Take the slots that the step after this one writes to, and return them, before this one has been read."""
        ahead = RingSlots(slots.first + launched, *slots.after(launched))
        self.hold(request, ahead, query_len, ahead.first + query_len)
        return ahead

    def follow(self, slots: RingSlots, ahead: RingSlots) -> None:
        """Go on to the step that was launched ahead; what came of the one before it is settled."""
        assert (slots.slot, slots.cursor) == (ahead.slot, ahead.cursor)  # all of its tokens were accepted
        slots.target, slots.query_len, slots.planned = ahead.target, ahead.query_len, ahead.planned
        slots.block, slots.checkpoint = ahead.block, ahead.checkpoint

    def settle(self, request: Request, slots: RingSlots) -> None:
        """Take note of what came of a step: `request.num_computed_tokens` are computed."""
        count, now = request.num_computed_tokens - slots.first, request.num_computed_tokens
        if count:
            before, target = slots.slot, slots.target
            slots.slot, slots.cursor = slots.after(count)
            self._keep_states(request, slots, now)
            if before is not None and before != slots.slot:
                self._release(before)
            if target is not None and target != slots.slot:
                self._release(target)
        elif slots.target is not None:
            self._release(slots.target)
        self._drop_checkpoint(slots)
        slots.first, slots.target, slots.block, slots.planned = now, None, None, None

    def drop(self, ahead: RingSlots) -> None:
        """Free the slots of a step that was launched ahead, and whose output is not read."""
        assert ahead.target is not None  # it was held
        self._release(ahead.target)
        self._drop_checkpoint(ahead)

    def release(self, slots: RingSlots) -> None:
        """Free the slot of a request that is settled, and ends or is preempted."""
        if slots.slot is not None:
            self._release(slots.slot)

    def plan(self, requests: Iterable[tuple[RingSlots, int]], *, plain: bool) -> tuple[list[Row], list[Fold]]:
        """Return the slots of a step, and the states that are written before it, in order; then call `folded`.

        Args:
            requests: the slots and the new tokens of each.
            plain: compute decodes by plain steps, which read a state and write one.
        """
        folds = [*self._folds]
        return [self._row(slots, query_len, folds, plain=plain) for slots, query_len in requests], folds

    def folded(self) -> None:
        """Take note that the states of the last `plan` are written; if that has failed, the next one has them again."""
        folds, self._folds = self._folds, []
        for fold in folds:
            self._release(fold.slot)

    def _row(self, slots: RingSlots, query_len: int, folds: list[Fold], *, plain: bool) -> Row:
        slot, cursor, target = slots.slot, slots.cursor, slots.target
        assert target is not None  # it was held
        is_prefill = query_len > self.decode_len
        if slot is not None and (is_prefill or self.is_shared(slot) or (plain and cursor)):
            folds.append(Fold(slot, cursor, target))
            slot, cursor = target, 0
        if is_prefill:
            slots.planned = target, 0, False
            block, kept = slots.checkpoint or (-1, -1)
            return Row(prefill=target, block=block, kept=kept)
        if plain:
            slots.planned = target, 0, False
            return Row(plain=target, start=-1 if slot in (None, target) else slot)
        has_drafts, total = self.decode_len > 1, cursor + query_len
        is_full = total > self.ring_size if has_drafts else total >= self.ring_size
        moves = slot is None or is_full or slots.block is not None
        here = target if slot is None else slot
        slots.planned = (target, 0, has_drafts) if moves else (here, cursor, True)
        return Row(here, cursor, target if moves and here != target else -1, int(slots.block is not None))

    def _keep_states(self, request: Request, slots: RingSlots, now: int) -> None:
        """Register the states that a step leaves at the end of a block."""
        if slots.checkpoint is not None:
            self._keep(request, slots, *slots.checkpoint)
        elif slots.block is not None:
            assert slots.slot is not None  # it is computed
            self._keep(request, slots, slots.block, slots.slot)
        elif self.decode_len > 1 and self.num_kept and slots.cursor:
            block = (now - (now == request.prompt_len)) // self.block_size - 1
            end, checkpoint = (block + 1) * self.block_size, now - slots.cursor
            if max(slots.first, checkpoint) < end and request.contents[block] not in self.kept:
                assert slots.slot is not None
                self._use(slots.slot)  # until it is read
                target = self._take()
                self._folds.append(Fold(slots.slot, end - checkpoint, target))
                self._keep(request, slots, block, target)
                self._release(target)

    def _keep(self, request: Request, slots: RingSlots, block: int, slot: int) -> None:
        """Register a request's state at the end of a block for prefix caching, unless there is one."""
        is_answer = (block + 1) * self.block_size > request.prompt_len
        slots.latest = self._register(request.contents[block], slot, slots.latest, is_answer=is_answer)

    def _drop_checkpoint(self, slots: RingSlots) -> None:
        if slots.checkpoint is not None:
            self._release(slots.checkpoint[1])
            self._pending -= 1
            slots.checkpoint = None


def in_groups(folds: Iterable[Fold]) -> list[list[Fold]]:
    """Divide folds into groups that can be computed at once: no slot is read twice, and none that is written."""
    groups: list[list[Fold]] = []
    seen: set[int] = set()
    for fold in folds:
        if not groups or fold.slot in seen or fold.target in seen:
            groups.append([])
            seen = set()
        groups[-1].append(fold)
        seen |= {fold.slot, fold.target}
    return groups
