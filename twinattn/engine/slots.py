"""Slots of states: which are free, which are used, and which hold a state that is kept for prefix caching.

A kept state is free memory: it stays until its slot is needed, and the least recently used one goes first.
"""

from collections import OrderedDict

from twinattn.engine.block_pool import BlockContent


class SlotPool:
    """Counts the users of slots, and knows the states that were kept.

    Attributes:
        num_slots: slots in the pools of all layers.
        num_kept: states that are kept besides those of requests that run.
        kept: the slots of kept states, by what is before them.

    Args:
        num_slots: as above.
        num_kept: as above.
    """

    def __init__(self, num_slots: int, num_kept: int) -> None:
        self.num_slots, self.num_kept = num_slots, num_kept
        self.reset()

    @property
    def free(self) -> list[int]:
        """The unused slots, the next one to be used first; those of kept states are among them."""
        return list(self._free)

    def reset(self) -> None:
        """Free all slots, and forget what they hold."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_slots))
        self._users = [0] * self.num_slots
        self._contents: dict[int, BlockContent] = {}  # what each slot of a kept state holds
        self.kept: dict[BlockContent, int] = {}
        self._pending = 0  # states that the step under way keeps

    def is_shared(self, slot: int) -> bool:
        """Return whether several requests begin with the state in a slot."""
        return self._users[slot] > 1

    def _register(
        self, content: BlockContent, slot: int, latest: BlockContent | None, *, is_answer: bool
    ) -> BlockContent | None:
        """Keep a state for prefix caching, unless there is one; return what is the latest one of an answer then.

        Args:
            content: what the state is the state after.
            slot: where it is.
            latest: the one of the same answer before it, which is forgotten.
            is_answer: whether its last block has tokens of an answer.
        """
        if content not in self.kept:
            self.kept[content], self._contents[slot] = slot, content
        if not is_answer:
            return latest
        if latest is not None and latest != content and latest in self.kept:
            self._forget(self.kept[latest])
        return content

    def _take(self) -> int:
        slot, _ = self._free.popitem(last=False)
        self._forget(slot)
        self._users[slot] = 1
        return slot

    def _use(self, slot: int) -> None:
        """Count one user more of a slot."""
        self._users[slot] += 1
        self._free.pop(slot, None)

    def _forget(self, slot: int) -> None:
        """Forget what a slot holds; if it is unused, it is the next one that is taken."""
        content = self._contents.pop(slot, None)
        if content is not None:
            del self.kept[content]
        if slot in self._free:
            self._free.move_to_end(slot, last=False)

    def _release(self, slot: int) -> None:
        """Count one user less of a slot; a free one with a kept state is taken after all others."""
        self._users[slot] -= 1
        if not self._users[slot]:
            self._free[slot] = None
            self._free.move_to_end(slot, last=slot in self._contents)
