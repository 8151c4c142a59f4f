"""The blocks of window layers: a separate, smaller pool, in which blocks that no query can see are freed."""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from refattn.batch import Batch, check_block_table
from refattn.checks import check, check_int, check_list, check_sizes, check_window, describe, is_int
from twinattn.engine.cache_kinds import WINDOWS, Extent


class WindowPool:
    """The blocks of window layers, in a separate, smaller pool: a block that no query can see is freed.

    A block of the full pool has a counterpart in the window pool while a sequence may still see it. One sequence
    under a window of 4 tokens, in blocks of 2:

        tokens          4        5          7
        full pool       9 2      9 2 4      9 2 4 7
        window pool     0 1      0 1 2      . 1 2 0      block 0 was freed and is used again

    A token keeps its row in its block, so its slot in the window pool follows from its slot in the full pool. All is
    decided on the host: a step calls `hold` for each of its sequences, then translates its slots and its batch.

    A freed block keeps its keys until it is used again; the one freed first is used first. So a prefix found in the
    full pool can be shared here too, as long as the blocks of its last window are still there: the tokens after it see
    no others. `usable` returns how much of it can be used, and `share` takes those blocks.

    Args:
        num_blocks: blocks in the window pool; a sequence holds at most those of `left + query_len + block_size - 1`
            tokens.
        num_full_blocks: blocks in the full pool.
        window_size: `(left, right)` in tokens, of the layers that use the pool.
        block_size: tokens in a block of either pool, `p`.

    Raises:
        ValueError: if a size is out of range.

    Source: the hybrid caches of vLLM and SGLang.
    """

    def __init__(self, num_blocks: int, num_full_blocks: int, *, window_size: tuple[int, int], block_size: int) -> None:
        check_window(window_size)
        check_sizes(num_blocks=num_blocks, num_full_blocks=num_full_blocks, block_size=block_size)
        self.left, self.block_size, self.num_blocks = window_size[0], block_size, num_blocks
        self.window_block = array("i", [-1]) * num_full_blocks  # by full block; -1 if none is held
        self._map: Int32[Tensor, "n"] | None = None  # the same on the device where slots and batches are translated
        self.reset()

    @property
    def free(self) -> list[int]:
        """The free blocks, the next one to be used first."""
        return list(self._free)

    def reset(self) -> None:
        """Free all blocks, and discard their contents."""
        # By free block: the full block whose keys it still holds; -1 for none.
        self._free: OrderedDict[int, int] = OrderedDict.fromkeys(range(self.num_blocks), -1)
        self._kept: dict[int, int] = {}  # by full block that is no longer held: the block that still has its keys
        self.users = [0] * len(self.window_block)  # sequences that hold it: a shared prefix has several
        self.held: dict[Hashable, set[int]] = {}  # full blocks of each sequence that have one here for it
        self.window_block[:] = array("i", [-1]) * len(self.window_block)
        self._is_current = False

    def hold(self, sequence: Hashable, query_len: int, seq_len: int, blocks: Sequence[int]) -> None:
        """Free the blocks that left a sequence's window, then take one for each that its new tokens see or fill.

        Args:
            sequence: any name of the sequence.
            query_len: its new tokens in this step, at least 1.
            seq_len: its tokens, the new ones included.
            blocks: its blocks in the full pool, in order.

        Raises:
            ValueError: if lengths or blocks do not fit, too few blocks are free, or the window reaches back to tokens
                whose block was freed (a prefix found in the full pool only): compute those again. Nothing is taken
                then.
        """
        _check_held(query_len, seq_len, blocks, block_size=self.block_size, num_full_blocks=len(self.users))
        first = _first_block(seq_len - query_len, self.left, self.block_size)
        seen = blocks[first : -(-seq_len // self.block_size)]
        for place, block in enumerate(seen, start=first):
            if self.window_block[block] < 0 and place * self.block_size < seq_len - query_len:
                raise ValueError(
                    f"blocks: expected block {block} in the window pool, with older tokens, it was given back"
                )

        before = self.held.pop(sequence, set())
        self._give_back(before.difference(seen))
        self.held[sequence] = before.intersection(seen)
        new = [block for block in seen if block not in before]
        needed = sum(self.window_block[block] < 0 for block in new)
        if needed > len(self._free):
            raise ValueError(f"blocks: expected at most {len(self._free)} new ones, as many as are free, got {needed}")
        for block in new:
            if self.window_block[block] < 0:
                self._take(block)
            self.users[block] += 1
        self.held[sequence].update(new)

    def trim(self, sequence: Hashable, num_tokens: int, blocks: Sequence[int]) -> None:
        """Free the blocks that no token of a sequence after its first `num_tokens` can see."""
        first = _first_block(num_tokens, self.left, self.block_size)
        held = self.held.get(sequence, set())
        self._give_back(held.difference(blocks[first:]))
        held.intersection_update(blocks[first:])

    def usable(self, blocks: Sequence[int]) -> int:
        """Return after how many of some full blocks a sequence can begin, as the blocks of its window are still here.

        Args:
            blocks: full blocks that hold the start of the sequence, in order.
        """
        result = run = 0  # blocks up to here that are in the window pool, without a gap
        for count, block in enumerate(blocks, 1):
            run = run + 1 if self.window_block[block] >= 0 or block in self._kept else 0
            if run >= count - _first_block(count * self.block_size, self.left, self.block_size):
                result = count
        return result

    def share(self, sequence: Hashable, blocks: Sequence[int]) -> None:
        """Reference the cached prefix blocks that are still inside a new sequence's window, as many as are `usable`."""
        seen = blocks[_first_block(len(blocks) * self.block_size, self.left, self.block_size) :]
        for block in seen:
            if self.window_block[block] < 0:
                self.window_block[block] = self._kept.pop(block)
                del self._free[self.window_block[block]]
                self._is_current = False
            self.users[block] += 1
        self.held[sequence] = set(seen)

    def fork(self, sequence: Hashable, other: Hashable) -> None:
        """Let another sequence hold all that a sequence holds, as it goes on from the same tokens."""
        self.held[other] = set(self.held.get(sequence, ()))
        for block in self.held[other]:
            self.users[block] += 1

    def copy(self, sequence: Hashable, block: int, to: int) -> tuple[int, int]:
        """Let a sequence hold a new full block instead of one that others hold, too; the caller copies its keys.

        Returns:
            The block of this pool to copy from, and the one to copy to.
        """
        source = self.window_block[block]
        self._take(to)
        self.users[to] = 1
        self.held[sequence].add(to)
        self.held[sequence].remove(block)
        self._give_back({block})
        return source, self.window_block[to]

    def release(self, sequence: Hashable) -> None:
        """Free all blocks of a finished or preempted sequence; it may hold none."""
        self._give_back(self.held.pop(sequence, set()))

    def translate_slots(self, slot_mapping: Int64[Tensor, "t"]) -> Int64[Tensor, "t"]:
        """Turn slots of the full pool into slots of the window pool: -1 for padding and for blocks that have none."""
        _check_translated(slot_mapping, num_slots=len(self.users) * self.block_size)
        block = self.refresh(slot_mapping.device)[slot_mapping.clamp(min=0) // self.block_size].long()
        slots = block * self.block_size + slot_mapping % self.block_size
        return slots.masked_fill((block < 0) | (slot_mapping < 0), -1)

    def translate_batch(self, batch: Batch) -> Batch:
        """Turn the block table of the full pool into that of the window pool: -1 for blocks that have none."""
        block_table = check_block_table(batch, block_size=self.block_size)
        outside = (block_table < 0) | (block_table >= len(self.users))
        translated = self.refresh(batch.device)[block_table.masked_fill(outside, 0)]
        return replace(batch, block_table=translated.masked_fill(outside, -1))

    def refresh(self, device: torch.device) -> Int32[Tensor, "n"]:
        """Update the map from full to window blocks on a device, without waiting, and return it.

        It is the same tensor every time, so that a captured CUDA graph reads the latest map.
        """
        if self._map is None or self._map.device != device:
            self._map, self._is_current = torch.empty(len(self.window_block), dtype=torch.int32, device=device), False
        if not self._is_current:
            host = torch.frombuffer(self.window_block, dtype=torch.int32)
            self._map.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
            self._is_current = True
        return self._map

    def _take(self, block: int) -> None:
        """Give a full block the block here that was freed first."""
        self._kept.pop(block, None)  # it gets other tokens
        taken, last = self._free.popitem(last=False)
        if self._kept.get(last) == taken:
            del self._kept[last]
        self.window_block[block] = taken
        self._is_current = False

    def _give_back(self, blocks: set[int]) -> None:
        for block in sorted(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self._kept[block] = self.window_block[block]
                self._free[self.window_block[block]] = block
                self.window_block[block] = -1
                self._is_current = False


def _first_block(position: int, left: int, block_size: int) -> int:
    """Return the index of the block with the first key that a query at a position sees."""
    return WINDOWS.first_block(position, Extent(left + 1), block_size)


def _check_held(query_len: int, seq_len: int, blocks: Sequence[int], *, block_size: int, num_full_blocks: int) -> None:
    """Check what a window pool takes for a sequence: its lengths in tokens, and its blocks in the full pool.

    Raises:
        ValueError: if there are no new tokens or more than tokens, or too few blocks, or one outside the pool.
    """
    check_int("seq_len", seq_len)
    if not is_int(query_len) or not 1 <= query_len <= seq_len:
        raise ValueError(f"query_len: expected 1..{seq_len}, the tokens of the sequence, got {describe(query_len)}")
    check_list("blocks", blocks, "blocks")
    if len(blocks) * block_size < seq_len:
        raise ValueError(f"blocks: expected {-(-seq_len // block_size)} for {seq_len} tokens, got {len(blocks)}")
    outside = [block for block in blocks if not is_int(block) or not 0 <= block < num_full_blocks]
    if outside:
        raise ValueError(f"blocks: expected entries in 0..{num_full_blocks - 1}, got {describe(outside[0])}")


def _check_translated(slot_mapping: Tensor, *, num_slots: int) -> None:
    """Check slots of one pool that are to become slots of another.

    Raises:
        ValueError: if they are no int64 `[t]`; on a CPU also if one is outside the pool, -1 for padding excepted.
    """
    check(slot_mapping=(slot_mapping, "int64 t"))
    if slot_mapping.is_cpu and slot_mapping.numel():
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        if low < -1 or high >= num_slots:
            wrong = low if low < -1 else high
            raise ValueError(f"slot_mapping: expected slots in 0..{num_slots - 1}, or -1 for padding, got {wrong}")
