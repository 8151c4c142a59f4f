"""Usual sizes of tiles, launches and buffers: each dimension of an operation is drawn past all of them.

A kernel may be right up to the size of its tile, its thread block or its buffer, and wrong where the second tile
begins. One number past each is enough; small tiles are also filled exactly, and several tiles of most sizes are, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SMALL = (8, 16, 32)  # drawn with one less, exactly, and one more
TILES = (64, 128, 256, 512, 1024, 2048, 8192)  # drawn with one more
FILLED = 128  # tiles up to this size are also drawn exactly
MULTIPLES = (384, 2048)  # three tiles of 128, two of 1024, and more of smaller ones, exactly
BLOCKS = 256  # tokens in a block: the most in any server


@dataclass(frozen=True)
class Dimension:
    """A dimension of an operation that is drawn past the sizes of tiles.

    Attributes:
        sizes: returns the sizes of a case in which the dimension is a given number; all others are drawn.
        most: the largest number that is drawn.
    """

    sizes: Callable[[int], Mapping[str, Any]]
    most: int = TILES[-1] + 1

    def cases(self) -> list[Mapping[str, Any]]:
        """List the sizes of cases at the tiles and past them."""
        numbers = [n + more for n in SMALL for more in (-1, 0, 1)]
        numbers += [n + more for n in TILES for more in (0, 1) if more or n <= FILLED or n == self.most]
        return [self.sizes(n) for n in (*numbers, *MULTIPLES) if n <= self.most]


def of_size(name: str, most: int = TILES[-1] + 1, multiple: int = 1, **others: Any) -> Dimension:
    """Return the dimension of a size, rounded up to a multiple, with other sizes that keep the case small."""
    return Dimension(lambda n: {name: n + -n % multiple, **others}, most)


def of_lengths(
    keys: int = TILES[-1] + 1, queries: int = TILES[-1] + 1, sequences: int = TILES[-1] + 1, **others: Any
) -> dict[str, Dimension]:
    """Return the dimensions of a ragged batch, up to some numbers: keys of a few queries; queries; sequences."""
    return {
        "keys": Dimension(lambda n: dict(lens=((3, n + 1), (1, n), (2, n)), **others), keys),
        "queries": Dimension(lambda n: dict(lens=((n, n + 3), (1, 2)), **others), queries),
        "sequences": Dimension(
            lambda n: dict(lens=tuple((1 + i % 2, 2 + i % 5) for i in range(n)), **others), sequences
        ),
    }
