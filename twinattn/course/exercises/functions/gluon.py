"""Kernels in Gluon, which run on a CPU in drawn orders: a producer and a consumer with slots between them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from twinattn.course.exercises.exercise import Exercise, Trial, WrongAnswerError, draw, kind

SIZE = 64  # queries, keys of a tile, and numbers of each


def _pipeline(query: Float[Tensor, "64 64"], key: Float[Tensor, "s 64"]) -> Float[Tensor, "orders 64 s"]:
    return _by_tiles(query, key, lambda tiles, i: tiles[i])


def _by_tiles(query: Tensor, key: Tensor, scores_of: Callable[[list[Tensor], int], Tensor]) -> Tensor:
    """Return scores as a function has them: of those of all tiles, each [64, 64], and the number of a tile."""
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    tiles = [pad(query.to(wide) @ each.to(wide).T, (0, SIZE - len(each))) for each in key.split(SIZE)]
    return torch.cat([scores_of(tiles, i) for i in range(len(tiles))], 1)[None, :, : len(key)]


def _instead(tiles: list[Tensor], i: int, *, by: int) -> Tensor:
    """Return the scores of another tile, if there is one."""
    return tiles[i + by] if 0 <= i + by < len(tiles) else tiles[i]


def _of(scores_of: Callable[[list[Tensor], int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(_by_tiles, scores_of=scores_of)


def _pipeline_transposed(query: Tensor, key: Tensor) -> Tensor:
    """Multiply with the keys of each tile as they lie in a slot."""
    whole = pad(key, (0, 0, 0, -len(key) % SIZE))
    return _pipeline(query, torch.cat([tile.T for tile in whole.split(SIZE)]))[..., : len(key)]


def _pipeline_from_key_i(query: Tensor, key: Tensor) -> Tensor:
    """Take SIZE keys from key i on for tile i."""
    whole = pad(key, (0, 0, 0, SIZE))
    return _pipeline(query, torch.cat([whole[i : i + SIZE] for i in range(-(-len(key) // SIZE))]))[..., : len(key)]


def _pipeline_whole_tiles(query: Tensor, key: Tensor) -> Tensor:
    right = _pipeline(query, key)
    right[..., len(key) // SIZE * SIZE :] = 0.0
    return right


def _pipeline_trials() -> Iterator[Trial]:
    query = draw(SIZE, SIZE).half()
    for says, s in (
        ("64 keys: one tile", 64),
        ("128 keys: a tile for each slot", 128),
        ("384 keys: three rounds of two tiles", 384),
        ("150 keys: the last tile has 22", 150),
        ("one key", 1),
    ):
        arguments = dict(query=query, key=draw(s, SIZE, seed=s).half())
        count = -(-s // SIZE)
        parts = [f"tile {i}" for i in range(count)] if count > 1 else ()
        yield Trial(says, arguments, view=_first_wrong(**arguments), parts=parts)


def _first_wrong(query: Tensor, key: Tensor) -> Callable[[Tensor], Tensor | tuple[Tensor, ...]]:
    """Return a view of scores in many orders: of each tile those of the first order in which they are wrong."""
    right = _pipeline(query.double(), key.double())[0]

    def view(scores: Tensor) -> Tensor | tuple[Tensor, ...]:
        if not isinstance(scores, Tensor) or scores.shape[1:] != right.shape:
            raise WrongAnswerError(f"expected scores of the shape [orders, {SIZE}, {len(key)}], got {kind(scores)}")
        tiles = []
        for each, expected in zip(scores.split(SIZE, 2), right.split(SIZE, 1), strict=True):
            is_wrong = ~torch.isclose(each.double(), expected, rtol=1e-4, atol=1e-4).flatten(1).all(1)
            tiles.append(each[int(is_wrong.int().argmax())])
        return tuple(tiles) if len(tiles) > 1 else tiles[0]

    return view


GLUON_PIPELINE = Exercise(
    "gluon_pipeline",
    _pipeline,
    _pipeline_trials,
    {
        "nothing is in a slot when it is read: tile i is copied into slot i % SLOTS, and `multiply` waits for `full`, "
        "in round 0 with parity 0": _of(lambda tiles, i: torch.full_like(tiles[i], torch.nan)),
        "no scores are stored": _of(lambda tiles, i: torch.zeros_like(tiles[i])),
        "a product takes a tile as [numbers, keys]: keys.index(slot).permute((1, 0))": _pipeline_transposed,
        "nothing is in slot 1 when it is read: tile 1 has round 0, as tile 0 has": _of(
            lambda tiles, i: torch.full_like(tiles[i], torch.nan) if i % 2 else tiles[i]
        ),
        "a tile has the scores of the one before: tile i begins at key i * SIZE, and lies in slot i % SLOTS": _of(
            partial(_instead, by=-1)
        ),
        "tile i begins at key i * SIZE: that is the row of its copy": _pipeline_from_key_i,
        "a tile has the scores of the next one: both were copied into one slot": _of(partial(_instead, by=1)),
        "a tile has the scores of all before it, too: a product begins with use_acc=False": _of(
            lambda tiles, i: torch.stack(tiles[: i + 1]).sum(0)
        ),
        "a slot is read in the next round while it has the tile of this one: the parity of a wait is that of the "
        "round, i // SLOTS & 1": _of(partial(_instead, by=-2)),
        "a slot is filled again while its product is under way: give it back after warpgroup_mma_wait": _of(
            partial(_instead, by=2)
        ),
        "the last keys are missing: there are gl.cdiv(num_keys, SIZE) tiles": _pipeline_whole_tiles,
    },
    (
        "Both functions go through the same tiles, `for tile in range(gl.cdiv(num_keys, SIZE))`, and `slot = tile % "
        "SLOTS`. `load`: wait for `empty`, expect the bytes at `full`, start the copy. `multiply`: wait for `full`, "
        "multiply, wait for the product, arrive at `empty`, store.",
        "`full` has parity tile // SLOTS & 1. `load` waits for the round before, which is the other parity: "
        "(tile // SLOTS & 1) ^ 1. In round 0 that wait is over at once, as slots are empty then.",
        "mbarrier.expect(full.index(slot), BYTES) comes before the copy, which is "
        "tma.async_copy_global_to_shared(key_tiles, [tile * SIZE, 0], full.index(slot), keys.index(slot)).",
    ),
    explains={
        "before it is waited for": "warpgroup_mma starts a product and goes on: its scores are there after "
        "`scores = warpgroup_mma_wait(0, deps=[scores])`",
        "arrivals has more": "`load` arrives at a `full` barrier twice in one round. mbarrier.expect is its one "
        "arrival, and before it fills a slot again it waits for `empty`; has each wait the parity of its round?",
        "of pipeline_kernel; load (1)": "Both wait: has each tile one arrival at `empty`, after its product, and each "
        "wait the parity of its round? In round 0 no slot was given back yet",
        "the other warpgroups; load (1)": "`multiply` has ended before `load`: does it wait for `full` before each "
        "product, and arrive at `empty` after it, and has each wait the parity of its round? Do both go through the "
        "same tiles?",
        "deadlock": "`load` has ended, and `multiply` waits for a tile: does it wait for the parity of the round? Is "
        "mbarrier.expect called with all BYTES of each copy? If `load` fills a slot before it is empty, a phase is "
        "skipped; and both go through the same tiles",
        "copy is under way": "A tile that `load` copies was not waited for: `multiply` waits for each, with the "
        "parity of its round",
        "product under way": "`multiply` has to wait for its last product: warpgroup_mma_wait(0, deps=[scores])",
        "object has no attribute": "The interpreter has what the kernels for Hopper in fastattn use of Gluon; the "
        "docstrings here name what is needed",
    },
    needs="triton",
    level=3,
    minutes=40,
)
