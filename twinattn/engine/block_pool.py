"""The blocks of the pool: which requests use them, and prefix caching (which of them hold the start of a prompt)."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # the first and the last one of some tokens that see one another


@dataclass(frozen=True, eq=False)
class BlockContent:
    """The contents of a full block: its tokens, after those of all blocks before it.

    A prefix is one object, however many requests begin with it. So comparing a block and all before it takes only the
    block's own tokens and the identity of its parent.

    Attributes:
        parent: what is before them; None for the first block.
        tokens: from `block_key`.
        hash: of both.
    """

    parent: "BlockContent | None"
    tokens: "BlockKey"
    hash: int


BlockKey = tuple[int | tuple[int, ...], ...]


def block_key(tokens: Sequence[int], start: int, block_size: int, spans: Sequence[Span] = ()) -> BlockKey:
    """Return what the keys of a full block depend on, beside the blocks before it.

    Those are its own tokens. A token of a span sees those of the span that come later, too, in later blocks; so a whole
    span is a part of every block that has some of it.

    Args:
        tokens: of a sequence.
        start: the first one of the block.
        block_size: tokens in a block.
        spans: of the sequence.
    """
    end = start + block_size
    touched = (span for span in spans if span[0] < end and span[1] >= start)
    return *tokens[start:end], *((first, last, *tokens[first : last + 1]) for first, last in touched)


def _block_hash(parent: BlockContent | None, tokens: BlockKey) -> int:
    """Hash the tokens of a block and, through the hash of its parent, all tokens before them."""
    return hash((parent and parent.hash, tokens))


class BlockPool:
    """Allocates the blocks of the pool, and finds those that hold the start of a prompt.

    Any number of requests may use a block. An unused block is free, but keeps its contents until it is
    reused: blocks without useful contents first, then the least recently used.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.users = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be handed out first
        self.contents: dict[int, BlockContent] = {}  # what each block holds that can be found
        self.block_of: dict[int, int] = {}  # those blocks, by hash

    def find(self, tokens: Sequence[int], spans: Sequence[Span] = ()) -> list[int]:
        """Find the blocks that hold the start of `tokens`, as many as there are; the last one may end inside a span."""
        blocks: list[int] = []
        parent = None
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = self._look_up(parent, block_key(tokens, start, self.block_size, spans))
            if block is None:
                break
            blocks.append(block)
            parent = self.contents[block]
        return blocks

    def remember(self, block: int, parent: BlockContent | None, tokens: BlockKey) -> BlockContent:
        """Register a full block for prefix caching, unless another one has the same content; return that content."""
        same = self._look_up(parent, tokens)
        if same is not None:
            return self.contents[same]
        prefix = BlockContent(parent, tokens, _block_hash(parent, tokens))
        if prefix.hash in self.block_of:  # other tokens with the same hash: the newer ones stay
            del self.contents[self.block_of[prefix.hash]]
        self.contents[block], self.block_of[prefix.hash] = prefix, block
        return prefix

    def _look_up(self, parent: BlockContent | None, tokens: BlockKey) -> int | None:
        block = self.block_of.get(_block_hash(parent, tokens))
        if block is None:
            return None
        prefix = self.contents[block]  # an equal hash is a hint, not a proof
        return block if prefix.parent is parent and prefix.tokens == tokens else None

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of blocks that were found."""
        for block in blocks:
            self.users[block] += 1
            self.free.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """Allocate free blocks to write to; they are no longer registered. There must be enough."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
        self.forget(blocks)
        return blocks

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove blocks from prefix caching."""
        for block in blocks:
            if block in self.contents:
                del self.block_of[self.contents.pop(block).hash]

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less for each block of a request, and free those without users.

        The last block is freed first, so that the beginning of a prefix is kept longest.
        """
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.contents)
