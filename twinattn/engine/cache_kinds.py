"""What must be there to go on at position p: one row for each kind of cache.

A request of which `p` tokens are computed goes on at position `p` with the same bits, wherever it has been meanwhile:
it was preempted, began with a prefix of another request, became several samples, or moved to other pools. For each
cache of its layers that takes what `KINDS` says, and no more: anything else may hold NaN.

Beside the caches there are its tokens, from which its random numbers and its drafts follow, and the scales of quantized
layers, which are fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

BLOCK, SLOT, NOWHERE = "a block", "a slot", "nowhere"


class Extent(NamedTuple):
    """What the caches of a layer depend on, in tokens.

    Attributes:
        window: tokens that a query sees as they are, its own included; 0 for all.
        ratio: tokens of an entry; 1 without entries.
        overlap: whether an entry is computed from the `ratio` tokens before its own, too.
    """

    window: int = 0
    ratio: int = 1
    overlap: bool = False


@dataclass(frozen=True)
class CacheKind:
    """A kind of cache.

    Attributes:
        name: what it holds.
        unit: what of it is allocated, shared, copied and freed as one: a block of tokens, or a slot of a request.
        needed: what has to be there at position `p`.
        writer: who may write it.
        begin: of a kind in blocks, the first token whose row is needed at a position, of a layer with some extent. The
            last one is the token before the position; of entries, the last token of a complete one.
    """

    name: str
    unit: str
    needed: str
    writer: str
    begin: Callable[[int, Extent], int] | None = None

    def first_block(self, position: int, extent: Extent, block_size: int) -> int:
        """Return the index of the first block that is needed at a position."""
        assert self.begin is not None  # it is in blocks
        return self.begin(position, extent) // block_size


def _all(position: int, extent: Extent) -> int:
    return 0


def _window(position: int, extent: Extent) -> int:
    return max(0, position - extent.window + 1) if extent.window else 0


def _open_rows(position: int, extent: Extent) -> int:
    """Return the first token of the entry that is not complete, or with overlap of the entry before it."""
    return max(0, position // extent.ratio - extent.overlap) * extent.ratio


PAGES = CacheKind(
    "pages",
    BLOCK,
    "the keys and values (or latents, quantized values and their scales) of tokens `0` to `p - 1`",
    "a request, in the rows of its new tokens, if no other one has the block; a full block is never written again",
    _all,
)
WINDOWS = CacheKind(
    "sliding windows",
    BLOCK,
    "the keys and values of tokens `p - window + 1` to `p - 1`; a block before them may be free",
    "as pages, in a pool of their own, in which a free block keeps its keys until it is taken",
    _window,
)
INDEX_KEYS = CacheKind(
    "index keys",
    BLOCK,
    "those of tokens `0` to `p - 1`, as any of them may be selected",
    "as pages, of which they have the blocks; a layer that sees what an earlier one selects has none",
    _all,
)
ROWS = CacheKind(
    "compressor rows",
    BLOCK,
    "the values and gates of the `p % ratio` tokens of an entry that is not complete; with overlap, of `ratio` more",
    "as pages, of which they have the blocks",
    _open_rows,
)
ENTRIES = CacheKind(
    "compressed entries",
    BLOCK,
    "entries `0` to `p // ratio - 1`",
    "the request that computes the last token of an entry; the block of that token has the entry, too",
    _all,
)
STATES = CacheKind(
    "recurrent states",
    SLOT,
    "the state after exactly `p` tokens: no other one can be made of it",
    "a step, which reads one slot and writes another; no step writes one that is kept, or has several readers",
)
INPUTS = CacheKind(
    "convolution rows",
    SLOT,
    "the inputs of tokens `p - width + 1` to `p - 1`",
    "with the state: whatever copies, keeps or rejects one does so with the other",
)
RINGS = CacheKind(
    "rings of inputs",
    SLOT,
    "a state after some `c` tokens, and the inputs of tokens `c` to `p - 1`: as many rows as the cursor says",
    "a step, past the cursor; with several readers, or at the end of a block, it is first folded into another slot",
)
DRAFTS = CacheKind(
    "drafts",
    NOWHERE,
    "nothing: a row past `p` is written before it is read; the keys of a draft model are in an engine of its own",
    "a step with drafts, in blocks and slots of its request alone; what is accepted moves `p`",
)
KINDS = (PAGES, WINDOWS, INDEX_KEYS, ROWS, ENTRIES, STATES, INPUTS, RINGS, DRAFTS)
