"""Copies of tokens and blocks, bit for bit: `gather`, `copy_blocks`, `swap_blocks`."""

import torch
from torch import Tensor

from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import Drawn
from twinattn.kit.operations.operation import Case, Inputs, Mistake, Operation, Special
from twinattn.kit.operations.tiles import BLOCKS, Dimension, of_size

MOVED = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn),
    *(torch.float64, torch.int32),
)
OTHERS = (torch.int8, torch.float32, torch.bfloat16)  # types of pools, in addition to that of the case
MANY = 2**17 + 28  # more than 17 bits count


PAST_TILES = dict(
    pairs=of_size("pairs"),
    blocks=of_size("blocks"),
    caches=of_size("caches", 129),  # layers of a model
    elements=Dimension(lambda n: dict(block=(3, n))),
)

# --- gather ---


def draw_gather(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw a pool and the blocks of one sequence."""
    drawn, p, s = Drawn(case, dtype), case["block_size"], case["seq_len"]
    table, past, n = drawn.table([s], p, case["first_block"])
    blocks = table["block_table"][0]
    cache = drawn.numbers(n, p, case["heads"], case["head_size"])
    unread = torch.ones(cache.shape, dtype=torch.bool)
    for j in range(s):
        unread[blocks[j // p], j % p] = False
    return Inputs(dict(cache=cache, blocks=blocks, seq_len=s), dict(cache=unread, blocks=past["block_table"][0]))


def gathered(a: Arguments, compute: torch.dtype) -> dict[str, Tensor]:
    """Return the tokens of a sequence, one after the other."""
    p, tokens = a["cache"].shape[1], a["cache"].flatten(0, 1)
    j = torch.arange(a["seq_len"])
    return dict(out=tokens[a["blocks"].long()[j // p] * p + j % p])


GATHER = Operation(
    name="gather",
    function="gather",
    signature="`cache` `[n, p, hk, d]`, `blocks` `[m]`, `seq_len`; it returns a copy, `[s, hk, d]`",
    draw=draw_gather,
    oracle=gathered,
    sizes=dict(
        seq_len=(5, 1, 16, 17, 40, 64, 257),
        block_size=(4, 1, 16, 3),
        heads=(2, 1, 3),
        head_size=(8, 64, 5),
        first_block=(0,),
    ),
    dimensions=dict(
        tokens=of_size("seq_len"),
        block_size=of_size("block_size", BLOCKS, seq_len=300),
        heads=of_size("heads", seq_len=5, head_size=5),
        head_size=of_size("head_size", seq_len=5, heads=1),
    ),
    specials=(
        Special("empty", "A sequence may have no token.", dict(seq_len=(0,))),
        Special(
            "far blocks",
            "Numbers of blocks may need more than 17 bits.",
            dict(first_block=(MANY,), block_size=(2,)),
            once=True,
        ),
        Special(
            "long",
            "A sequence may have more tokens than 17 bits count.",
            dict(seq_len=(MANY,), heads=(1,)),
            once=True,
        ),
    ),
    exact=frozenset({"out"}),
    moves=True,
    types=dict(out="cache"),
    strided=("cache",),
    pools=("cache",),
    dtypes=MOVED,
    mistakes=(
        Mistake(
            "blocks-in-order",
            "Takes the first blocks of the pool, not those of the table.",
            lambda a, compute: gathered({**a, "blocks": torch.arange(len(a["blocks"]))}, compute),
        ),
        Mistake(
            "whole-blocks-only",
            "Tokens of a last block that is not full are missing: zeros.",
            lambda a, compute: dict(
                out=gathered(a, compute)["out"].index_fill(
                    0, torch.arange(a["seq_len"] // a["cache"].shape[1] * a["cache"].shape[1], a["seq_len"]), 0
                )
            ),
        ),
    ),
)


# --- copy_blocks ---


def layers(case: Case, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shape of a block in each pool: every second one has one dimension less, in some cases the first."""
    first = case.seed // 2 % 2
    return [shape[(i + first) % 2 :] for i in range(case["caches"])]


def pools(case: Case, drawn: Drawn, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Draw pools of these shapes; with several types, every second one has another."""
    others = [
        OTHERS[(i + case.seed) % len(OTHERS)] if case["types"] > 1 and i % 2 else None for i in range(len(shapes))
    ]
    return [drawn.numbers(*shape, dtype=other) for shape, other in zip(shapes, others, strict=True)]


def draw_copy(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw pools, and pairs in which some sources are destinations of other pairs."""
    drawn, k = Drawn(case, dtype), case["pairs"]
    n = case["blocks"] + k
    caches = pools(case, drawn, *((n, *shape) for shape in layers(case, case["block"])))
    to = drawn.order(n)[:k]
    pairs = _pairs(drawn, n, to)
    return Inputs(dict(caches=caches, pairs=pairs), _overwritten("caches", caches, set(to) - {*pairs[:, 0].tolist()}))


def _overwritten(name: str, pools: list[Tensor], blocks: set[int]) -> dict[str, Tensor]:
    """Return masks of the elements of pools in some blocks, which are overwritten, or never read."""
    lost = torch.tensor([i in blocks for i in range(len(pools[0]))] if pools else [], dtype=torch.bool)
    return {f"{name}[{i}]": lost.reshape(-1, *[1] * (x.ndim - 1)).expand(x.shape) for i, x in enumerate(pools)}


def _pairs(drawn: Drawn, sources: int, to: list[int]) -> Tensor:
    """Return a pair of a random source and each destination; in every second case sources are destinations, too."""
    k = len(to)
    among = [to[i] for i in drawn.order(k)] if drawn.case.seed % 2 and max(to, default=0) < sources else []
    sources_of = among or drawn.whole(0, max(1, sources), k).tolist()
    return torch.tensor(list(zip(sources_of, to, strict=True)), dtype=torch.int64).reshape(k, 2)


def copied(a: Arguments, compute: torch.dtype) -> dict[str, Tensor]:
    """Return each pool after the copies, all of them from the pool before."""
    after = {}
    for i, cache in enumerate(a["caches"]):
        origin = torch.arange(len(cache))
        origin[a["pairs"][:, 1]] = a["pairs"][:, 0]
        after[f"caches[{i}]"] = cache[origin]
    return after


def copied_in_order(a: Arguments, compute: torch.dtype) -> dict[str, Tensor]:
    """Return each pool after copies one after the other."""
    after = [cache.clone() for cache in a["caches"]]
    for cache in after:
        for source, destination in a["pairs"].tolist():
            cache[destination] = cache[source].clone()
    return {f"caches[{i}]": cache for i, cache in enumerate(after)}


COPY = Operation(
    name="copy_blocks",
    function="copy_blocks",
    signature="`caches`: a list of pools `[n, ...]`, changed in place; `pairs` `[k, 2]`: source and destination",
    draw=draw_copy,
    oracle=copied,
    sizes=dict(
        pairs=(3, 1, 8, 40), blocks=(5, 1, 12), caches=(2, 1, 3), block=((4, 2, 8), (3, 5), (1, 1)), types=(1, 2)
    ),
    dimensions=PAST_TILES,
    specials=(
        Special("empty", "There may be no pairs, and no pools.", dict(pairs=(0, 3), caches=(1, 0))),
        Special(
            "many",
            "There may be more pairs than 17 bits count.",
            dict(pairs=(MANY,), block=((1, 1),), caches=(1,)),
            once=True,
        ),
    ),
    outputs=(),
    changes=("caches",),
    exact=frozenset({"caches"}),
    moves=True,
    strided=("caches", "pairs"),
    pools=("caches",),
    flips=("pairs",),
    dtypes=MOVED,
    mistakes=(
        Mistake(
            "copied-one-after-another",
            "Copies one pair after the other: a source that is the destination of an earlier pair is lost.",
            copied_in_order,
        ),
        Mistake(
            "source-and-destination-exchanged",
            "Copies from the second of each pair to the first.",
            lambda a, compute: copied_in_order({**a, "pairs": a["pairs"].flip(1)}, compute),
        ),
        Mistake(
            "first-cache-only",
            "Copies in the first pool alone.",
            lambda a, compute: {
                name: x if name == "caches[0]" else a["caches"][i]
                for i, (name, x) in enumerate(copied(a, compute).items())
            },
        ),
    ),
)


# --- swap_blocks ---


def draw_swap(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw pools and other pools with another number of blocks; or the same pools twice."""
    drawn, k = Drawn(case, dtype), case["pairs"]
    n, n2 = case["blocks"], k + 4
    shapes = layers(case, case["block"])
    if case["same"]:  # blocks move inside each pool, and some sources are destinations of other pairs
        n += k
        caches, to = pools(case, drawn, *((n, *shape) for shape in shapes)), drawn.order(n)[:k]
        pairs = _pairs(drawn, n, to)
        unread = _overwritten("sources", caches, set(to) - {*pairs[:, 0].tolist()})
        return Inputs(dict(sources=caches, destinations=list(caches), pairs=pairs), unread)
    sources, destinations = (pools(case, drawn, *((count, *shape) for shape in shapes)) for count in (n, n2))
    pairs = torch.stack([drawn.whole(0, n, k), torch.tensor(drawn.order(n2)[:k], dtype=torch.int64)], dim=1)
    unread = _overwritten("destinations", destinations, {*pairs[:, 1].tolist()})
    unread |= _overwritten("sources", sources, {*range(n)} - {*pairs[:, 0].tolist()})
    return Inputs(dict(sources=sources, destinations=destinations, pairs=pairs), unread)


def swapped_in_order(a: Arguments, compute: torch.dtype) -> dict[str, Tensor]:
    """Return the destinations after copies one after the other."""
    if not all(x is y for x, y in zip(a["sources"], a["destinations"], strict=True)):
        return swapped(a, compute)
    caches = copied_in_order(dict(caches=a["sources"], pairs=a["pairs"]), compute)
    return {f"destinations[{i}]": x for i, x in enumerate(caches.values())}


def swapped(a: Arguments, compute: torch.dtype) -> dict[str, Tensor]:
    """Return the destinations after the copies."""
    after = {}
    for i, (source, destination) in enumerate(zip(a["sources"], a["destinations"], strict=True)):
        after[f"destinations[{i}]"] = destination.clone()
        after[f"destinations[{i}]"][a["pairs"][:, 1]] = source[a["pairs"][:, 0]]
    return after


SWAP = Operation(
    name="swap_blocks",
    function="swap_blocks",
    signature="`sources`, `destinations`: lists of pools, the second changed in place; `pairs` `[k, 2]`",
    draw=draw_swap,
    oracle=swapped,
    sizes=dict(
        pairs=(3, 1, 8, 40),
        blocks=(5, 1, 90),
        caches=(2, 1, 3),
        block=((4, 2, 8), (3, 5), (1, 1)),
        types=(1, 2),
        same=(False, True),
    ),
    dimensions=PAST_TILES,
    specials=(
        Special(
            "same pool",
            "A source may be a destination, too: all blocks are read before any is written.",
            dict(same=(True,), pairs=(8, 40)),
        ),
        Special("empty", "There may be no pairs, and no pools.", dict(pairs=(0, 3), caches=(1, 0))),
        Special(
            "many",
            "There may be more pairs than 17 bits count.",
            dict(pairs=(MANY,), block=((1, 1),), caches=(1,)),
            once=True,
        ),
    ),
    outputs=(),
    changes=("destinations",),
    exact=frozenset({"destinations"}),
    moves=True,
    strided=("sources", "destinations", "pairs"),
    pools=("sources", "destinations"),
    flips=("pairs",),
    dtypes=MOVED,
    mistakes=(
        Mistake(
            "swapped-one-after-another",
            "Copies one pair after the other: in one pool, a source that an earlier pair overwrites is lost.",
            swapped_in_order,
        ),
        Mistake(
            "same-block-in-both",
            "Writes to the block with the number of the source.",
            lambda a, compute: swapped({**a, "pairs": a["pairs"][:, [0, 0]]}, compute),
        ),
        Mistake(
            "first-cache-only",
            "Copies to the first pool alone.",
            lambda a, compute: {
                name: x if i == 0 else a["destinations"][i] for i, (name, x) in enumerate(swapped(a, compute).items())
            },
        ),
    ),
)

OPERATIONS = (GATHER, COPY, SWAP)
