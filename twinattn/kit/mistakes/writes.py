"""The write into pages in steps, and mistakes in it."""

from twinattn.kit.example import Answers
from twinattn.kit.mistakes.formula import Formula


class Write(Formula, is_base=True):
    """The write of new tokens."""

    paths: tuple[str, ...] = ("kv_cache",)

    def answers(self) -> Answers:
        """Write."""
        a = self.arguments
        pools = {name: a[name].clone() for name in ("key_cache", "value_cache")}
        for token, slot in enumerate(a["slot_mapping"].tolist()):
            self._put(pools, token, slot)
        return pools

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        """Write one token."""
        if slot >= 0:
            self._store(pools, token, *divmod(slot, self.example.block_size))

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        """Store one token."""
        pools["key_cache"][block, row] = self.arguments["key"][token]
        pools["value_cache"][block, row] = self.arguments["value"][token]


class PaddingWritesLast(Write):
    """A slot of -1 is used as an index from the end: padding overwrites the last slot of the pool."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        super()._put(pools, token, slot if slot >= 0 else pools["key_cache"].shape[0] * self.example.block_size - 1)


class PaddingWritesFirst(Write):
    """A slot of -1 is clamped to 0: padding overwrites the first slot of the pool."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        super()._put(pools, token, max(slot, 0))


class KeysForValues(Write):
    """Keys are written into both pools."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row] = self.arguments["key"][token]
        pools["value_cache"][block, row] = self.arguments["key"][token]


class PoolsSwapped(Write):
    """Keys are written into the pool of values, and values into that of keys."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row] = self.arguments["value"][token]
        pools["value_cache"][block, row] = self.arguments["key"][token]


class ValuesUnwritten(Write):
    """Values are not written."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row] = self.arguments["key"][token]


class SlotOneLate(Write):
    """Tokens are written one slot late."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        slots = pools["key_cache"].shape[0] * self.example.block_size
        super()._put(pools, token, min(slot + 1, slots - 1) if slot >= 0 else slot)


class LastTokenUnwritten(Write):
    """The last token is not written."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        if token < self.example.num_tokens - 1:
            super()._put(pools, token, slot)


class PaddingEnds(Write):
    """The first slot of -1 ends the writes: tokens after it are not written."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        if (self.arguments["slot_mapping"][:token] >= 0).all():
            super()._put(pools, token, slot)


class TokensBySlot(Write):
    """Tokens are counted over slots other than -1: after a -1 each slot gets an earlier token."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        super()._store(pools, int((self.arguments["slot_mapping"][:token] >= 0).sum()), block, row)


class TokensPastACount(Write):
    """Tokens past a count are not written."""

    past = ("sequences", "rows")
    variants = (32, 64, 128)

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        if token < self.variant:
            super()._put(pools, token, slot)


class SlotOfSixteenBits(Write):
    """Slots have 16 bits: larger ones wrap around, or count from the end."""

    variants = (-(2**15), 0)  # the lowest number

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        if slot >= 0:
            self._store(pools, token, *divmod((slot - self.variant) % 2**16 + self.variant, self.example.block_size))


class FirstHeadOnly(Write):
    """Only the first KV head is written."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row, 0] = self.arguments["key"][token, 0]
        pools["value_cache"][block, row, 0] = self.arguments["value"][token, 0]


class RowForBlock(Write):
    """Block and row are swapped: slot % n and slot // n, with the number of blocks instead of the block size."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        n = pools["key_cache"].shape[0]
        if slot >= 0 and slot // n < self.example.block_size:
            self._store(pools, token, slot % n, slot // n)
