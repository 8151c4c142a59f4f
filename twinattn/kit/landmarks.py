"""Landmarks: batches that are always tried, because kernels change their code path there.

A random batch is small, and seldom has such a size: a second tile of queries, a length that fills a tile or a block
exactly, more than eight sequences, a group of seven heads, an option in a decode over split keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from twinattn.kit.example import CALLED, CHAINS, HOLES, PATHS, SELECTED, Example
from twinattn.kit.kernel import Kernel, Shape

Lens = tuple[tuple[int, int], ...]
Landmarks = Callable[[Kernel], list[Example]]

ATTENDS = tuple(path.name for path in PATHS.values() if path.attends)
CROWDED = (*ATTENDS, "merge", "kv_cache", "recurrent")  # paths with the landmark of many sequences
TILES = (16, 32, 64, 128, 256)  # keys, or queries, that kernels take at a time
MOST_NODES = 8  # nodes per tree
LAYOUTS = (1, 2, 3, 4, 5)  # layouts of tensors in memory, by their number in `memory.laid_out`
EXPANDED = (6, 7, 8)  # ways to repeat numbers without memory for each, by their number in `memory.expanded`
OPTIONAL = (*CALLED, *PATHS["varlen"].options, "causal", "window_size")  # a batch may have them, or not
PAST_8_BITS, PAST_16_BITS = 2**8 + 5, 2**16 + 9
PAST_A_MODEL = 2**18 + 77  # keys: more than the longest sequences of most models
FAR = 2**12  # keys: for longer sequences windows and chunks are long, too
LONG_STEP = 577  # tokens of a step
LONG_LIST = 2048  # selected keys
WIDE_WINDOW = 4095
LONG_CHUNK = (290, 411)  # new tokens and keys: more than a right side of a window of two tiles
LONG_PROMPT = (4217, 4330)  # new tokens and keys: more rows than 12 bits can count
LATE_QUERIES = (8300, 300)  # most of them have positions below 0, and cost little
TWO_SIZES = ((64, 32), (32, 64), (128, 64), (256, 80), (80, 128))  # sizes of a state's keys and values
PAST_2048 = 2**11 + 5  # sequences of a batch
SPLIT = (1500, 2500, 4200)  # numbers of keys that kernels split; no powers of two
FULL_SPLITS = ((1, 768), (1, 2048), (2, 1536))  # several tiles, or splits, of 256, 512 and 1024 keys, all of them full
FULL_TILES = ((256, 256), (384, 391))  # several tiles of 64 and 128 new tokens, all of them full
COUNTS = (16, 17, 31, 32, 64, 65, 128)  # sequences: sizes of CUDA graphs, and their neighbours
RIGHT_SIDES = ((4, 1), (-1, 2))  # windows
FARTHEST = 2**31 - 1  # the largest side of a window: some callers pass it for no limit


def none(kernel: Kernel) -> list[Example]:
    """Return no landmarks."""
    return []


def example(kernel: Kernel, lens: Lens, shape: Shape | None = None, **options: Any) -> Example:
    """Make a batch that a kernel claims, with lengths as near to the given ones as its path and claims allow."""
    claims, path = kernel.claims, kernel.path
    heads, (head_size, value_head_size), block_size = shape or claims.shapes[0]
    longest = max((q for q, _ in lens), default=0)
    most = min(claims.max_query_len or longest, MOST_NODES if path == "speculative" else 10**6)
    pairs = [(min(q, most), max(s, claims.min_seq_len, 0 if path != "speculative" else min(q, most))) for q, s in lens]
    longest = max((s for _, s in pairs), default=0)
    if path == "sliding_window":
        options.setdefault("window_size", (300, 0) if longest < FAR else (longest * 7 // 8, 0))
    if path == "local":
        options.setdefault("chunk_size", block_size * (3 if longest < FAR else longest // block_size + 1))
    if path == "cascade":
        n = len(pairs)
        options["shared"] = ((0, n, 1), (n // 2, n, 2)) if kernel.takes("prefixes") and n > 2 else 1
        pairs = [(q, max(q, s) + 2 * block_size) for q, s in pairs]
    if path == "recurrent":
        if claims.layers[0] != "gdn":
            options.setdefault("layer", claims.layers[0])
        if not kernel.knows_beginnings:
            pairs = [(q, max(s, q + 1)) for q, s in pairs]
    sizes = (head_size, 0 if value_head_size == head_size else value_head_size, block_size)
    return Example(path, tuple(pairs), heads, *sizes, options=options)


def every_shape(kernel: Kernel) -> list[Example]:
    """Return batches that together have every number of heads, head size and block size that a kernel claims."""
    return [example(kernel, ((3, 20), (1, 2 * shape[2] + 1)), shape) for shape in different_shapes(kernel)]


def different_shapes(kernel: Kernel) -> list[Shape]:
    """Return shapes that together have every number of heads, head size and block size, none of them very large.

    The most heads come with small blocks, and once with the largest head size.
    """
    claims = kernel.claims
    heads = sorted(claims.heads, key=lambda x: -x[1])
    sizes, block_sizes = sorted(claims.head_sizes), sorted(claims.block_sizes)
    block_sizes = block_sizes if PATHS[kernel.path].pools else block_sizes[:1]
    count = max(len(heads), len(sizes), len(block_sizes))
    zipped = [(heads[i % len(heads)], sizes[i % len(sizes)], block_sizes[i % len(block_sizes)]) for i in range(count)]
    return list(dict.fromkeys([*zipped, (max(heads), sizes[-1], claims.block_sizes[0])]))


def edges(kernel: Kernel) -> list[Example]:
    """Return decodes over keys that fill tiles and blocks exactly, one less and one more, for some block sizes.

    The last batch has sequences of a few queries on both sides of the end of a tile.
    """
    batches = []
    for block_size in dict.fromkeys((kernel.claims.block_sizes[0], kernel.claims.block_sizes[-1])):
        filled = sorted({*TILES, block_size, 2 * block_size, 3 * block_size, 512})
        lens = tuple((1, s + more) for s in filled for more in (-1, 0, 1))
        heads, sizes, _ = kernel.claims.shapes[0]
        batches.append(example(kernel, lens, (heads, sizes, block_size)))
    drafts = tuple((2 + (s + more) % 3, s + more) for s in (*TILES, 512) for more in (0, 1, 2))
    return [*batches, example(kernel, drafts), example(kernel, FULL_SPLITS)]


def without_queries(kernel: Kernel) -> list[Example]:
    """Return sequences without queries among decodes, and sequences without keys.

    One batch has as many queries as keys in total, and the same maximum of both, but not in each sequence: a kernel may
    confuse them.
    """
    least = 0 if kernel.knows_query_lens else 1
    batches = ((0, 7), (1, 9), (0, 3), (1, 40)), ((5, 2), (0, 0), (2, 0), (3, 30)), ((3, 7), (7, 3), (5, 5))
    found = [example(kernel, tuple((max(least, q), s) for q, s in lens)) for lens in batches]
    if kernel.knows_query_lens and "padding" not in kernel.claims.not_claimed:  # as in a CUDA graph of decodes
        found.append(replace(example(kernel, ((1, 9), (0, 3), (1, 40), (0, 0), (1, 21))), padding_rows=3))
    return found


def very_long(kernel: Kernel) -> list[Example]:
    """Return decodes over split keys, one over more keys than 64 splits of 64, and a few queries over as many."""
    return [*long()(kernel), example(kernel, ((1, SPLIT[2]),), most_heads(kernel)), example(kernel, ((3, SPLIT[2]),))]


def some(kernel: Kernel) -> list[Example]:
    """Return a batch of three sequences, with each of two seeds."""
    batch = example(kernel, ((3, 20), (1, 33), (2, 40)))
    return [batch, replace(batch, seed=1)]


def each(**choices: tuple[Any, ...]) -> Landmarks:
    """Return landmarks of three sequences with each value of each option: random batches may miss one."""
    return lambda kernel: [
        example(kernel, ((3, 20), (1, 33), (2, 40)), **{name: value})
        for name, values in choices.items()
        if name not in OPTIONAL or kernel.takes(name)
        for value in values
    ]


def both(*several: Landmarks) -> Landmarks:
    """Return the landmarks of several functions as one."""
    return lambda kernel: [mark for landmarks in several for mark in landmarks(kernel)]


def of_layouts(kernel: Kernel) -> list[Example]:
    """Return three sequences, in each layout, and with tensors that are expanded over heads, rows or elements."""
    lens = ((3, 20), (1, 33), (2, 40))
    heads = next((x for x in kernel.claims.heads if x[0] > x[1] > 1), kernel.claims.heads[0])
    shape = heads, kernel.claims.head_sizes[0], kernel.claims.block_sizes[0]
    batches = [example(kernel, lens, layout=layout) for layout in LAYOUTS]
    return batches + [example(kernel, lens, shape, layout=layout) for layout in EXPANDED]


def many_sequences(kernel: Kernel) -> list[Example]:
    """Return batches of many sequences of different lengths: decodes, and some chunks.

    One batch has more decodes than 8 bits can count, over each number of keys up to their number; another more than
    2048 decodes. Others have as many as a CUDA graph: powers of two, and their neighbours.
    """
    decodes = tuple((1, 1 + (7 * i) % PAST_8_BITS) for i in range(PAST_8_BITS))
    most = 3 if kernel.path == "speculative" else 1  # a tree of one node is as good as any other
    crowd = tuple((1 + i % most, most + (5 * i) % 9) for i in range(PAST_2048))
    mixed = tuple((1 + i % 3, 3 + (5 * i) % 23) for i in range(19))
    of_graphs = [tuple((1, most + (5 * i) % 9) for i in range(n)) for n in COUNTS]
    batches = [example(kernel, lens) for lens in (mixed, decodes, crowd, *of_graphs)]
    if kernel.path == "quantized" and "scales per sequence" not in kernel.claims.not_claimed:
        batches = [replace(x, options={**x.options, "scales_of": "sequences"}) for x in batches]
    return batches


def many_slots(kernel: Kernel) -> list[Example]:
    """Return a batch in the last blocks of a pool of more than 2^16 slots."""
    shape = min(kernel.claims.heads), kernel.claims.head_sizes[0], max(kernel.claims.block_sizes)
    tokens = replace(example(kernel, ((PAST_16_BITS, PAST_16_BITS),), ((1, 1), (8, 8), 16)), seed=1)
    return [example(kernel, ((5, 90), (1, 7)), shape, first_block=2**16 // shape[2]), tokens]


def many_queries(kernel: Kernel) -> list[Example]:
    """Return prompts and chunks of several tiles of queries, some that fill them exactly, and of each small number."""
    batches = ((64, 64), (65, 130), (129, 129)), ((200, 333),), ((257, 300), (128, 150))
    each_number = tuple((n, n + n % 3) for n in range(1, 50))
    found = [example(kernel, lens) for lens in (*batches, each_number, FULL_TILES)]
    is_short = kernel.path in ("speculative", "differential", "quantized")  # or its output does not show the mask
    return found if is_short else [*a_long_prompt(kernel), *found]


def a_long_prompt(kernel: Kernel) -> list[Example]:
    """Return a prompt of more than 4096 tokens, under a window if a kernel takes one: its first rows see few keys."""
    if kernel.claims.max_query_len is not None:
        return []
    shape = min(kernel.claims.heads), kernel.claims.head_sizes[0], kernel.claims.block_sizes[0]
    options: dict[str, Any] = dict(window_size=(100, 0)) if kernel.takes("window_size") else {}
    if options and kernel.takes("causal"):
        options = dict(window_size=(100, 4100), causal=False)
    if kernel.path == "local":
        options["chunk_size"] = 7 * shape[2]
    return [example(kernel, (LONG_PROMPT,), shape, **options)]


def of_large_trees(kernel: Kernel) -> list[Example]:
    """Return trees with as many nodes as a word of 32 or 64 bits, one more, and more than two or four such words."""
    batches = ((33, 33), (65, 90), (64, 64)), ((129, 150),), ((140, 155), (20, 29)), ((300, 340),)
    seeds = (1, 0, 1, CHAINS)
    trees = [replace(example(kernel, lens), lens=lens, seed=seed) for lens, seed in zip(batches, seeds, strict=True)]
    counted: dict[str, Any] = dict(window_size=(40, 0), alibi_slopes=True)  # distances are along a branch
    return trees + [
        replace(trees[-1], options={**trees[-1].options, name: x}) for name, x in counted.items() if kernel.takes(name)
    ]


def of_two_sizes(kernel: Kernel) -> list[Example]:
    """Return keys that are larger or smaller than values."""
    heads, _, block_size = kernel.claims.shapes[0]
    return [example(kernel, ((3, 20), (1, 9)), (heads, sizes, block_size)) for sizes in TWO_SIZES]


def of_chunks(kernel: Kernel) -> list[Example]:
    """Return chunks of a few blocks, and one longer than all sequences, over short and long sequences."""
    p = kernel.claims.shapes[0][2]
    lens = ((3, 20), (1, 7 * p + 1), (1, 1100))
    return [example(kernel, lens, chunk_size=n * p) for n in (1, 5, 7, 2**20)]


def of_windows(kernel: Kernel) -> list[Example]:
    """Return windows over keys that kernels split, and, without a causal mask, sides of up to several tiles of keys."""
    sides = ((-1, 129), (255, 16), (17, 257), (0, 64), (130, 33), (-1, 271)) if kernel.takes("causal") else ()
    both_sides = [example(kernel, (LONG_CHUNK, (1, 9)), window_size=x, causal=False) for x in sides]
    return [*long(window_size=(90, 0))(kernel), *both_sides, *of_right_sides(kernel)]


def of_right_sides(kernel: Kernel) -> list[Example]:
    """Return windows with a right side, over chunks whose tiles of queries end anywhere in a block of keys.

    The context of a chunk is one token longer than that of the one before: so the last key that a tile of up to 128
    queries sees is once the first of a block of 16, and once the last.
    """
    if not kernel.takes("causal") or kernel.claims.max_query_len is not None:
        return []
    lens = tuple((130, 130 + i) for i in range(16))
    return [example(kernel, lens, window_size=x, causal=False) for x in RIGHT_SIDES]


def of_far_windows(kernel: Kernel) -> list[Example]:
    """Return a window of thousands of keys, and windows wider than all sequences, as callers pass for no limit."""
    windows: list[dict[str, Any]] = [dict(window_size=(FARTHEST, 0)), dict(window_size=(2**20, 0))]
    if kernel.takes("causal"):
        far = ((FARTHEST, FARTHEST), (5, FARTHEST), (FARTHEST, 2), (-1, 3), (3, -1))
        windows += [dict(window_size=window, causal=False) for window in far]
    wide = [example(kernel, ((1, WIDE_WINDOW + 1905), (3, WIDE_WINDOW + 405)), window_size=(WIDE_WINDOW, 0))]
    return wide + [example(kernel, ((3, 20), (1, 33), (2, 700)), **window) for window in windows]


def of_windows_in_chunks(kernel: Kernel) -> list[Example]:
    """Return windows over several chunks of new tokens, decodes in the middle of a chunk, and a window of 0."""
    p = kernel.claims.shapes[0][2]
    batches = (
        (((7 * p + 3, 9 * p), (1, 5 * p + 2)), 2),
        (((5 * p, 5 * p), (2, 40 * p + 9), (3, 3)), 1),
        (((1, 1100),), 30),
    )
    windows = (p // 2 + 1, 0), (0, 0), (p + p // 2, 0)
    return [
        example(kernel, lens, chunk_size=blocks * p, window_size=window)
        for lens, blocks in batches
        for window in windows
    ]


def long_lists(kernel: Kernel) -> list[Example]:
    """Return queries with lists of more than 2048 keys, of exactly 2048, and of 2049."""
    shape = min(kernel.claims.heads), kernel.claims.head_sizes[0], kernel.claims.block_sizes[0]
    n = LONG_LIST
    lists = ((1, n + 952), n + 452), ((1, n + 52), n), ((2, n + 4), n + 1)
    return [example(kernel, (pair,), shape, topk=topk, full=True) for pair, topk in lists]


def empty_tiles(kernel: Kernel) -> list[Example]:
    """Return lists with several tiles of -1 at their beginning, in the middle, or at their end."""
    lens = ((1, 300), (2, 90))
    batches = [example(kernel, lens, topk=LONG_LIST // 4, holes=where) for where in HOLES]
    more: dict[str, Any] = dict(sinks=True, softcap=2.0, softmax_scale=0.3)
    taken = {name: x for name, x in more.items() if kernel.takes(name)}
    return [*batches, example(kernel, lens, topk=130, holes="first", **taken)]


def invariant(kernel: Kernel) -> list[Example]:
    """Return batches of short sequences and sequences that kernels split, and prompts of several tiles."""
    short = kernel.claims.max_query_len == 1
    prompts = ((70, 130), (1, 9), (200, 333)) if not short else ((1, 130), (1, 9), (1, 333))
    return [
        example(kernel, tuple((1, s) for s in (SPLIT[0], 9, SPLIT[1]))),
        example(kernel, ((1, SPLIT[2]), (1, 5), (1, 700), (1, 9), (1, 30)), most_heads(kernel)),
        example(kernel, prompts),
        example(kernel, (*((1 + i % 3, 3 + (5 * i) % 23) for i in range(19)), (1, SPLIT[2]))),
    ]


def with_nan(kernel: Kernel) -> list[Example]:
    """Return sequences that kernels split, with a NaN in the first, a middle or the last of their keys."""
    lens = ((1, SPLIT[1]), (1, 20)), ((1, SPLIT[2]), (1, 700)), ((1, SPLIT[1]),), ((70, 200), (3, 30))
    return [
        replace(example(kernel, pairs, nan_at=at), seed=i % 2)
        for i, (pairs, at) in enumerate(zip(lens, (0.0, 0.6, 1.0, 0.4), strict=True))
    ]


def long_steps(kernel: Kernel) -> list[Example]:
    """Return prompts of many chunks and a rest, and prompts that fill one chunk or nearly."""
    filled = [*range(1, 34), *(n + more for n in (64, 128, 256) for more in (-1, 0, 1))]
    each_number = tuple((n, n + i % 2) for i, n in enumerate(filled))
    return [example(kernel, lens) for lens in (((LONG_STEP, LONG_STEP + 7), (67, 67)), each_number)]


def of_two_tiles(kernel: Kernel) -> list[Example]:
    """Return a prompt that is longer than a tile of any kernel, and a short one."""
    return [example(kernel, ((300, 303), (2, 9)))]


def one_small(kernel: Kernel) -> list[Example]:
    """Return one query over a few keys."""
    return [example(kernel, ((1, 5),))]


def most_heads(kernel: Kernel) -> Shape:
    """Return the shape with the most query heads."""
    claims = kernel.claims
    return max(claims.heads), claims.head_sizes[0], claims.block_sizes[0]


def of_prefixes(kernel: Kernel) -> list[Example]:
    """Return prefixes on three levels, one of many blocks; two prefixes with another sequence in between; and more.

    One batch has several groups of sequences on each level, one has 17 prefixes one inside another, and one has more
    rows of queries times heads in a group than 16 bits count.
    """
    p = kernel.claims.shapes[0][2]
    nested, apart = ((0, 6, 1), (0, 4, 2), (0, 2, 640 // p), (4, 6, 3)), ((0, 2, 2), (3, 5, 1))
    groups = ((0, 6, 1), (6, 9, 2), (9, 11, 1), (0, 2, 2), (2, 4, 3), (4, 6, 2), (11, 13, 1))
    several = tuple((1 + i % 3, 3 * p + 5 + i) for i in range(14))
    lens = ((1, 700), (2, 690), (1, 650), (3, 140), (1, 400), (1, 330))
    many = min(130, 2**16 // (64 * max(kernel.claims.heads)[0]) + 2)  # sequences: of 64 rows, times the heads
    deep = tuple((i // 2, 20 - i // 3, i + 1) for i in range(17))
    made = [
        (example(kernel, lens), nested),
        (example(kernel, lens[1:]), apart),
        (example(kernel, several), groups),
        (example(kernel, tuple((1 + i % 2, 20 * p + 3 + i) for i in range(20))), deep),
        (example(kernel, ((64, 70),) * many, most_heads(kernel)), ((0, many, 3), (5, many, 5))),
    ]
    return [replace(x, options={**x.options, "shared": of}) for x, of in made]


def one_part(kernel: Kernel) -> list[Example]:
    """Return merges of one part, without and with empty rows, if a kernel takes more than two parts."""
    if max(kernel.claims.parts) == 2:
        return []
    nothing: dict[str, Any] = dict(empty=True, garbage=float("nan"))
    return [example(kernel, ((3, 3),), parts=1, **more) for more in ({}, nothing)]


def many_parts(kernel: Kernel) -> list[Example]:
    """Return a merge of more parts than a word has bits, if a kernel takes more than two."""
    return [example(kernel, ((3, 3),), parts=n) for n in (70, 139)] if max(kernel.claims.parts) > 2 else []


def many_scores(kernel: Kernel) -> list[Example]:
    """Return queries with more than 2^16 scores, queries that select many keys, and nearly equal scores."""
    return [
        example(kernel, ((1, PAST_A_MODEL),)),
        example(kernel, ((3, 900),), topk=300),
        example(kernel, ((1, 9000),), topk=5000),
        example(kernel, ((1, 40_000),), topk=64, kind="near"),
        example(kernel, ((2, 20_000),), topk=64, kind="crowded"),
        example(kernel, ((1, 70_000),), topk=2048, kind="crowded"),
        example(kernel, ((2, 5000),), topk=2047, kind="zeros"),
        example(kernel, ((2, 3000),), topk=300, kind="apart"),
        example(kernel, ((2, 9000),), topk=64, kind="near"),
        example(kernel, ((1, 9000),), topk=2048, kind="near"),
    ]


def kinds_of_scores(kernel: Kernel) -> list[Example]:
    """Return scores with NaN, also more than are selected, of any size, all subnormal, and nearly equal ones."""
    kinds = ("nan", "nans", "apart", "subnormal", "crowded", "near")
    return [example(kernel, ((3, 50), (1, 9)), kind=kind) for kind in kinds]


def padded(kernel: Kernel) -> list[Example]:
    """Return more rows of padding than a tile has."""
    return [replace(example(kernel, ((3, 20), (1, 33))), padding_rows=300)]


def past_16_bits(kernel: Kernel) -> list[Example]:
    """Return more keys than 16 bits can count, and more query rows, most of them fully masked to cost little."""
    rows = ((PAST_16_BITS, 5), (3, 20)) if sees_nothing(kernel) and kernel.path not in SELECTED else ()
    smallest = min(kernel.claims.shapes, key=lambda shape: (shape[0][0] * sum(shape[1]), shape[0][1]))
    return [example(kernel, ((1, PAST_A_MODEL), (1, 20)), smallest), *([example(kernel, rows)] if rows else [])]


def sees_nothing(kernel: Kernel) -> bool:
    """Return whether a kernel can be tested with fully masked queries."""
    cannot = kernel.path in ("cascade", "speculative") or kernel.claims.max_query_len is not None
    return not cannot and kernel.knows_query_lens and "empty rows" not in kernel.claims.not_claimed


def long(**options: Any) -> Landmarks:
    """Return landmarks with these options: decodes over keys that kernels split, and a chunk of several tiles."""

    def batches(kernel: Kernel) -> list[Example]:
        claims = kernel.claims
        shape = max(claims.heads), claims.head_sizes[-1], claims.block_sizes[-1]
        return [
            example(kernel, ((1, 700), (1, 9), (1, 1100)), **options),
            example(kernel, ((1, 520),), shape, **options),
            example(kernel, ((130, 333),), **options),
            example(kernel, tuple((1, s) for s in SPLIT[1:]), **options),
            example(kernel, ((5, SPLIT[1]), (1, 9)), **options),
        ]

    return batches


def of_sinks(kernel: Kernel) -> list[Example]:
    """Return sinks over keys that kernels split, and without visible keys, where the LSE of a row is its sink."""
    beside_nothing = ((2, 0), (3, 30)) if kernel.path not in ("cascade", "speculative") else ((3, 30),)
    return [*long(sinks=True)(kernel), example(kernel, beside_nothing, sinks=True)]


def is_large(example: Example) -> str:
    """Return "sequences" or "rows" if a batch has very many of them, else ""."""
    if len(example.lens) > 100:
        return "sequences"
    return "rows" if max((max(pair) for pair in example.lens), default=0) >= 2**12 else ""


def is_huge(example: Example) -> bool:
    """Return whether a batch takes so long that it is tried in one type only."""
    return is_large(example) == "sequences" or max((max(pair) for pair in example.lens), default=0) >= 2**14


def without_an_option(example: Example) -> Iterator[Example]:
    """Yield the batch without each of its options in turn."""
    needed = ("first_block",) if example.path != "sliding_window" else ("first_block", "window_size")
    for name in OPTIONAL:
        if name in example.options and name not in needed:
            yield replace(example, options={other: x for other, x in example.options.items() if other != name})


def smaller(example: Example) -> Iterator[Example]:
    """Yield batches with fewer sequences, queries, keys or options, the much smaller ones first."""
    yield from without_an_option(example)
    if example.padding_rows:
        yield replace(example, padding_rows=0)
    lens, shared = example.lens, example.options.get("shared", 0)
    least = shared * example.block_size if isinstance(shared, int) else 0
    for size in (len(lens) // 2, len(lens) // 4, 1):
        if size and size < len(lens):
            for first in range(0, len(lens), size):
                rest, options = lens[:first] + lens[first + size :], example.options
                if not isinstance(shared, int):  # prefixes of the sequences that are left
                    left = [tuple(i - min(max(i - first, 0), size) for i in x[:2]) + x[2:] for x in shared]
                    options = {**options, "shared": tuple(left)}
                yield replace(example, lens=rest, options=options)
    for i, (q, s) in enumerate(lens if len(lens) < MOST_NODES else ()):
        for pair in ((1, s), (q // 2, s), (q, s // 2), (q, s - s // 4), (q - 1, s - 1), (q - 1, s), (q, s - 1)):
            before = max(least, int(example.path == "recurrent" and q < s))  # a sequence with a state keeps it
            if pair != (q, s) and 1 <= pair[0] <= pair[1] - before:
                yield replace(example, lens=(*lens[:i], pair, *lens[i + 1 :]))
