"""Options at every claimed shape, and beyond the sizes of tiles.

A kernel has an instance per head size, block size and group of heads, and another code path for long sequences: one of
them may lack an option that all others have. Pairs of options (`combinations`) are drawn for two shapes only.
"""

from dataclasses import replace
from typing import Any

from twinattn.kit import landmarks
from twinattn.kit.checks import combined, everything
from twinattn.kit.combinations import choices, said
from twinattn.kit.draws import plain
from twinattn.kit.example import PATHS, SELECTED, Example
from twinattn.kit.kernel import Kernel
from twinattn.kit.property import ATTENDS, Property

CALLS = ("shape", "padding_rows", "layout", "poison", "num_keys", "return_lse", "out")  # choices that are not options
PAST_TILES: tuple[landmarks.Lens, ...] = (  # more sequences, queries and keys than tiles have
    ((1, 8270), (3, 2100)),
    (landmarks.LATE_QUERIES, (150, 160)),
    tuple((1, 1 + (7 * i) % 19) for i in range(landmarks.PAST_8_BITS)),
    ((1, 40_000), (2, 9)),  # distances past 16 bits
)

FEWER_PAST_TILES: tuple[landmarks.Lens, ...] = (PAST_TILES[0], ((130, 140),), PAST_TILES[3])  # each query has a list


def at_every_shape(kernel: Kernel, type_number: int) -> list[Example]:
    """Return two batches for each head size and each block size, with one half of the options in each.

    So each size occurs with each option, in every type, as a single instance of a kernel may be wrong. Each type
    combines block sizes and numbers of heads with other head sizes; every number of heads occurs in some type.
    """
    claims, lens = kernel.claims, ((1, 300), (5, 40), (2, 67))
    heads = sorted(claims.heads, key=lambda x: -x[1])
    sizes, block_sizes = sorted(claims.head_sizes), sorted(claims.block_sizes)
    block_sizes = block_sizes if PATHS[kernel.path].pools else block_sizes[:1]
    count = max(len(sizes), len(block_sizes), -(-len(heads) // len(claims.dtypes)))
    rows = [(i, i + type_number * count) for i in range(count)]
    shapes = [
        (heads[n % len(heads)], sizes[i % len(sizes)], block_sizes[(i + type_number) % len(block_sizes)])
        for i, n in rows
    ]
    shapes.append((max(heads), sizes[-1], claims.block_sizes[0]))
    return [
        replace(landmarks.example(kernel, lens, shape, **options), seed=i % 2)
        for i, shape in enumerate(dict.fromkeys(shapes), type_number * count)
        for options in _halves(kernel, i)
    ]


def past_tiles(kernel: Kernel) -> list[Example]:
    """Return batches with more sequences, queries and keys than tiles have, each with one half of the options.

    Windows are nearly as wide as the sequences, and biases are small, so that far keys have weight.
    """
    heads = next((x for x in kernel.claims.heads if x[0] > 1), kernel.claims.heads[0])
    shape = heads, kernel.claims.head_sizes[0], kernel.claims.block_sizes[0]
    batches = []
    for i, lens in enumerate(PAST_TILES if kernel.path not in SELECTED else FEWER_PAST_TILES):
        if landmarks.LATE_QUERIES in lens and not landmarks.sees_nothing(kernel):
            lens = ((1030, 1100),)
        far = dict(window_size=(max(s for _, s in lens) * 7 // 8, 0), alibi_slopes="far", sinks=True)
        for options in _halves(kernel, i):
            options.pop("batch_invariant", None)  # batch invariance has batches of its own
            batches.append(landmarks.example(kernel, lens, shape, **options | {n: far[n] for n in far if n in options}))
    return batches


def _halves(kernel: Kernel, i: int) -> list[dict[str, Any]]:
    """Return two halves of the options for batch `i`: each option is in one of them, with others in each batch."""
    of = {name: values for name, values in choices(kernel).items() if name not in CALLS}
    halves = []
    for half in (0, 1):
        chosen = {name: values[0] for name, values in of.items()}
        for n, (name, (_, *others)) in enumerate(of.items()):
            if (n + (i >> n % 3) + half) % 2:
                chosen[name] = others[i % len(others)]
        halves.append(said(kernel, chosen)[0])
    return halves


PROPERTIES = (
    Property(
        "empty tiles",
        "Entries of a list that are no keys may fill tiles, also the first.",
        plain,
        everything,
        paths=SELECTED,
        examples=0,
        landmarks=landmarks.empty_tiles,
    ),
    Property(
        "options at shapes",
        "Each option holds at every head size and every block size in each type, and at every number of heads.",
        plain,
        combined,
        paths=ATTENDS,
        examples=0,
        landmarks=lambda kernel: at_every_shape(kernel, 0),
        in_type=at_every_shape,
    ),
    Property(
        "options past tiles",
        "Each option holds for more keys, queries and sequences than a tile has, and for far distances.",
        plain,
        combined,
        paths=ATTENDS,
        examples=0,
        landmarks=past_tiles,
    ),
)
