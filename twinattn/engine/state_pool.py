"""The slots of layers that keep a state: those of the requests that run, and copies that prefix caching begins after.

A block of keys is written once. A state is overwritten by the next token, so two rules keep what is still needed:

    a step reads one slot and writes another      a step that fails has destroyed nothing, and can be computed again;
                                                  with drafts it writes one slot per token, and what was accepted says
                                                  which of them is the state
    a copy is kept at the end of a block          of each step its last one, before the token whose logits a prompt is
                                                  for; a later request with the same tokens begins there, nowhere else

One request with a prompt of 11 tokens, in blocks of 4 and steps of at most 9:

    step    tokens    reads     writes    keeps
    1       0 .. 8    -         slot 0    slot 1, after 8 tokens
    2       9, 10     slot 0    slot 2    -               slot 0 is free again
    3       11        slot 2    slot 0    slot 3, after 12

Of an answer only the latest one stays.

A step that is launched before the tokens of the one before it are read (`hold_ahead`) reads the slot that that one
writes, and writes a third one: the state before both is still there if the first of them has to be computed again.

With a `RingPool`, these are the slots of the convolutions alone, and states are in the slots of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from refattn.checks import check_int, check_sizes
from twinattn.engine.block_pool import BlockContent
from twinattn.engine.request import Request
from twinattn.engine.ring_pool import RingPool, RingSlots
from twinattn.engine.slots import SlotPool


@dataclass
class Slots:
    """The slots of a request in a step.

    Attributes:
        first: tokens before the step.
        start: where the state after those is; None without any.
        targets: where the state after each of its new tokens goes; one for more of them than a decode has: after all.
        checkpoint: the block at whose end a state is kept, by its place in the request, and the slot; None for none.
        latest: what the kept state of its answer is the state after; None without one.
        ahead: those of the step after this one, if it is launched already.
        ring: where the checkpoint and the ring are, if inputs are replayed.
    """

    first: int
    start: int | None = None
    targets: list[int] = field(default_factory=list)
    checkpoint: tuple[int, int] | None = None
    latest: BlockContent | None = None
    ahead: "Slots | None" = None
    ring: RingSlots | None = None


class StatePool(SlotPool):
    """Allocates slots for states, and finds the states that were kept.

    Every request that runs has a slot for its state, and slots that a step writes to, so none ever waits for one.

    Attributes:
        slots: of each request that runs.
        rings: the slots of checkpoints and rings, if inputs are replayed.

    Args:
        num_requests: most requests that run at once.
        num_kept: states that are kept besides; more of them while fewer requests run.
        block_size: tokens in a block, at whose ends states are kept.
        decode_len: most new tokens of a decode, its drafts included.
        ahead: whether steps are launched ahead, each of which writes to one slot more.
        rings: as above.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    def __init__(
        self,
        num_requests: int,
        num_kept: int,
        *,
        block_size: int,
        decode_len: int = 1,
        ahead: bool = False,
        rings: RingPool | None = None,
    ) -> None:
        check_sizes(num_requests=num_requests, block_size=block_size, decode_len=decode_len)
        check_int("num_kept", num_kept)
        self.block_size, self.decode_len, self.rings = block_size, decode_len, rings
        super().__init__(num_requests * (1 + decode_len + ahead) + num_kept, num_kept)

    def reset(self) -> None:
        """Free all slots, and forget what they hold."""
        super().reset()
        self.slots: dict[Request, Slots] = {}
        if self.rings is not None:
            self.rings.reset()

    def usable(self, contents: Sequence[BlockContent]) -> int:
        """Return after how many of some full blocks a request can begin: after the last one whose state was kept."""
        pools = (self,) if self.rings is None else (self, self.rings)
        kept = (count for count, content in enumerate(contents, 1) if all(content in pool.kept for pool in pools))
        return max(kept, default=0)

    def share(self, request: Request, contents: Sequence[BlockContent]) -> None:
        """Start a new request after some blocks, as many as are `usable`: it reads the state after the last one."""
        slots = self.slots[request] = Slots(len(contents) * self.block_size)
        if contents:
            slots.start = self.kept[contents[-1]]
            self._use(slots.start)
        if self.rings is not None:
            slots.ring = self.rings.begin(contents)

    def fork(self, request: Request, other: Request) -> None:
        """Let another sample go on from the state of a request: a step reads it, and writes to slots of its own."""
        self.settle(request)
        slots = self.slots[request]
        self.slots[other] = Slots(slots.first, slots.start)
        if slots.start is not None:
            self._use(slots.start)
        if self.rings is not None and slots.ring is not None:
            self.slots[other].ring = self.rings.fork(slots.ring)

    def hold(self, request: Request, query_len: int, seq_len: int) -> None:
        """Take the slots that a step writes to; called again with more tokens, drafts, it takes those for them, too.

        Args:
            request: one that `share` was called for.
            query_len: its new tokens in this step.
            seq_len: its tokens, the new ones included.
        """
        slots = self.slots[request]
        while len(slots.targets) < (query_len if query_len <= self.decode_len else 1):
            slots.targets.append(self._take())
        self._hold_checkpoint(request, slots, seq_len)
        if self.rings is not None and slots.ring is not None:
            self.rings.hold(request, slots.ring, query_len, seq_len)

    def hold_ahead(self, request: Request, launched: int = 1, query_len: int = 1) -> None:
        """Take the slots that the step after this one writes to, before this one has been read.

        Args:
            request: one that `hold` was called for, and has no drafts.
            launched: its new tokens in this step.
            query_len: and in the one after it.
        """
        slots = self.slots[request]
        if slots.ahead is None:
            (target,) = slots.targets  # there are no drafts
            slots.ahead = Slots(slots.first + launched, target, [self._take()])
            self._hold_checkpoint(request, slots.ahead, slots.first + launched + query_len)
            if self.rings is not None and slots.ring is not None:
                slots.ahead.ring = self.rings.hold_ahead(request, slots.ring, launched, query_len)

    def follow(self, request: Request) -> None:
        """Go on to the step that was launched ahead: what came of the one before it is known now."""
        ahead, self.slots[request].ahead = self.slots[request].ahead, None
        if ahead is None:  # it has just started
            return
        self.settle(request)
        slots = self.slots[request]
        slots.targets, slots.checkpoint = ahead.targets, ahead.checkpoint
        if self.rings is not None and slots.ring is not None and ahead.ring is not None:
            self.rings.follow(slots.ring, ahead.ring)

    def slots_of(self, request: Request, ahead: bool) -> Slots:
        """Return the slots of a request in this step, or in the one that is launched ahead."""
        slots = self.slots[request]
        return slots.ahead or slots if ahead else slots

    def _hold_checkpoint(self, request: Request, slots: Slots, seq_len: int) -> None:
        """Take a slot for the state at the last end of a block in a step, if there is one."""
        last = (seq_len - (seq_len == request.prompt_len)) // self.block_size
        if slots.checkpoint is None and last * self.block_size > slots.first and self._pending < self.num_kept:
            slots.checkpoint = last - 1, self._take()
            self._pending += 1

    def settle(self, request: Request) -> None:
        """Take note of what came of a step: how many tokens `request.num_computed_tokens` says are computed.

        The state after the last of them is the request's from now on, and the other slots of the step are free again.
        So are those of a step that was launched ahead: its output is not read.
        """
        slots = self.slots[request]
        if slots.ahead is not None:
            self._drop(slots.ahead)
            slots.ahead = None
        count = request.num_computed_tokens - slots.first
        if count:
            before, slots.start = slots.start, slots.targets.pop(min(count, len(slots.targets)) - 1)
            if before is not None:
                self._release(before)
        for slot in slots.targets:
            self._release(slot)
        if slots.checkpoint is not None:
            block, slot = slots.checkpoint
            if (block + 1) * self.block_size <= request.num_computed_tokens:
                self._keep(request, block, slot)
            self._release(slot)
            self._pending -= 1
        slots.first, slots.targets, slots.checkpoint = request.num_computed_tokens, [], None
        if self.rings is not None and slots.ring is not None:
            self.rings.settle(request, slots.ring)

    def release(self, request: Request) -> None:
        """Free all slots of a finished or preempted request; it may have none."""
        if request in self.slots:
            self.settle(request)
            slots = self.slots.pop(request)
            if slots.start is not None:
                self._release(slots.start)
            if self.rings is not None and slots.ring is not None:
                self.rings.release(slots.ring)

    def _drop(self, ahead: Slots) -> None:
        """Free the slots of a step whose output is not read."""
        for slot in ahead.targets:
            self._release(slot)
        if ahead.checkpoint is not None:
            self._release(ahead.checkpoint[1])
            self._pending -= 1
        if self.rings is not None and ahead.ring is not None:
            self.rings.drop(ahead.ring)

    def _keep(self, request: Request, block: int, slot: int) -> None:
        """Register a request's state at the end of a block for prefix caching, unless there is one."""
        slots, is_answer = self.slots[request], (block + 1) * self.block_size > request.prompt_len
        slots.latest = self._register(request.contents[block], slot, slots.latest, is_answer=is_answer)
