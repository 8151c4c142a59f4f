"""Random batches for properties: within the claims of a kernel, with the options that the property is about."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from twinattn.kit import combinations, landmarks
from twinattn.kit.example import SELECTED, Arguments, Example
from twinattn.kit.kernel import Kernel, Shape
from twinattn.kit.property import OTHER_LENGTHS, Draw

SCALES, CAPS = (0.3, 1.0, 0.0, -0.3, 0.0437), (1.0, 5.3, 30.0)
DEEPEST = 7  # prefixes one inside another
FAR_BLOCK, MOST_ELEMENTS = 2**16, 2**26  # the first block of a batch in a large pool, and the most elements of a pool


def draw_example(
    draw: Draw,
    kernel: Kernel,
    lens: Any = None,
    *,
    options: Arguments | None = None,
    shapes: list[Shape] | None = None,
    **more: Any,
) -> Example:
    """Draw a batch that a kernel claims, of its few shapes or of those given, with the required options of its path."""
    claims, path = kernel.claims, kernel.path
    heads, (head_size, value_head_size), block_size = draw(st.sampled_from(shapes or claims.few_shapes))
    options = dict(options or {})
    pairs = list(draw(sequences(kernel) if lens is None else lens))
    if path == "sliding_window" and "window_size" not in options:
        options["window_size"] = (draw(st.integers(0, 20)), 0)
    if path == "local":
        options["chunk_size"] = block_size * draw(st.integers(1, 2))
        if options.get("window_size", (-1, -1))[0] >= 0:  # several chunks of new tokens, and a window in each
            options["chunk_size"] = min(options["chunk_size"], max(block_size, 16 // block_size * block_size))
    if path == "cascade":
        shared = options["shared"] = draw_prefixes(draw, kernel, len(pairs))
        prefixes = ((0, len(pairs), shared),) if isinstance(shared, int) else shared
        deepest = [max([0, *(n for first, last, n in prefixes if first <= i < last)]) for i in range(len(pairs))]
        pairs = [(q, max(q, s) + n * block_size) for n, (q, s) in zip(deepest, pairs, strict=True)]
    if path == "interval" and "seen" not in options:
        options["seen"] = draw(st.sampled_from(("spans", "prefix", "drawn")))
    if path in (*SELECTED, "select") and "topk" not in options:
        options["topk"] = draw(st.sampled_from((8, 1, 16)))
    if path == "merge":
        options["parts"] = draw(st.sampled_from(claims.parts))
    if path == "recurrent":
        if claims.layers[0] != "gdn":
            options.setdefault("layer", claims.layers[0])
        if not kernel.knows_beginnings:
            pairs = [(q, max(s, q + 1)) for q, s in pairs]
    return Example(
        path,
        tuple(pairs),
        heads,
        head_size,
        0 if value_head_size == head_size else value_head_size,
        block_size,
        options=options,
        seed=draw(st.integers(0, 3)),
        **more,
    )


def draw_prefixes(draw: Draw, kernel: Kernel, count: int) -> int | tuple[tuple[int, int, int], ...]:
    """Draw how many blocks all sequences share; for a kernel that takes prefixes, also nested prefixes of some."""
    if count < 2 or not kernel.takes("prefixes") or draw(st.booleans()):
        return draw(st.integers(0, 2))
    if count > 3 and draw(st.booleans()):  # groups side by side, as those of several prompts
        edges = sorted(draw(st.sets(st.integers(0, count), min_size=2, max_size=DEEPEST)))
        pairs = [(first, last) for first, last in itertools.pairwise(edges) if last > first + 1]
        return tuple((first, last, draw(st.integers(1, 3))) for first, last in pairs)
    first, last, blocks, found = 0, count, 0, list[tuple[int, int, int]]()
    for _ in range(draw(st.integers(1, DEEPEST))):  # each inside of the one before
        first = draw(st.integers(first, last - 2))
        last, blocks = draw(st.integers(first + 2, last)), blocks + draw(st.integers(1, 2))
        found.append((first, last, blocks))
    return tuple(found)


def sequences(kernel: Kernel, *, longest: int = 50, most: int = 3) -> Any:
    """Return a strategy for lengths: decodes, whole prompts and chunks; each number of sequences is equally likely."""
    queries = min(8 if kernel.path == "speculative" else 12, kernel.claims.max_query_len or 12)
    short = kernel.claims.max_query_len is not None or kernel.path == "speculative"
    return _sequences(queries, max(1, kernel.claims.min_seq_len), longest, most, short)


@functools.cache  # making the strategy takes longer than drawing from it
def _sequences(queries: int, least: int, longest: int, most: int, short: bool) -> Any:
    """Return the strategy of `sequences`; with `short`, without whole prompts."""
    decodes = st.tuples(st.just(1), st.integers(least, longest))
    chunks = st.tuples(st.integers(1, queries), st.integers(0, longest - queries)).map(
        lambda pair: (pair[0], max(least, pair[0] + pair[1]))
    )
    prompts = st.integers(least, longest).map(lambda s: (s, s))
    kinds = (decodes, chunks) if short else (decodes, chunks, prompts)
    return st.one_of(*(st.tuples(*[st.one_of(*kinds)] * count) for count in range(1, most + 1)))


def plain(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch without options."""
    return draw_example(draw, kernel)


def of_any_shape(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch without options, of any shape."""
    return draw_example(draw, kernel, shapes=kernel.claims.shapes)


def with_options(*names: str) -> Callable[[Draw, Kernel], Example]:
    """Return a function that draws batches with these options, each with a value that changes the output."""

    def drawn(draw: Draw, kernel: Kernel) -> Example:
        numbers = {
            "softmax_scale": st.sampled_from(SCALES),
            "softcap": st.sampled_from(CAPS),
            "alibi_slopes": st.just(True),
            "sinks": st.just(True),
            "causal": st.just(False),
            "window_size": st.tuples(st.integers(0, 20), st.just(0)),
            "scales": st.sampled_from(((0.4871, 0.2617), (2.0, 1.0), (1.0, 0.53))),
        }
        chosen = {name: draw(numbers[name]) for name in names if name == "scales" or kernel.takes(name)}
        if len(names) > 1:  # with several: a scale and a cap that show a wrong order
            chosen = {name: value for name, value in chosen.items() if name != "softmax_scale"} | (
                {"softmax_scale": 0.3} if "softmax_scale" in chosen else {}
            )
        return draw_example(draw, kernel, options=chosen)

    return drawn


def of_rows(kind: str) -> Callable[[Draw, Kernel], Example]:
    """Return a function that draws packed latents of a kind."""
    return lambda draw, kernel: draw_example(draw, kernel, options={"rows": kind})


def in_combination(draw: Draw, kernel: Kernel) -> Example:
    """Draw any of the options that a kernel takes, and how it is called."""
    chosen = {name: draw(st.sampled_from(values)) for name, values in combinations.choices(kernel).items()}
    options, shape, padding = combinations.said(kernel, chosen)
    return draw_example(draw, kernel, options=options, shapes=[shape], padding_rows=padding)


def windowed(draw: Draw, kernel: Kernel) -> Example:
    """Draw a window, on the left and, where a mask need not be causal, on both sides."""
    left = draw(st.integers(0, 20))
    right = draw(st.sampled_from((None, 4, 1, 9, 0, 23, -1))) if kernel.takes("causal") else None
    options = {"window_size": (left, 0)} if right is None else {"window_size": (left, right), "causal": False}
    return draw_example(draw, kernel, options=options)


def of_several_sequences(draw: Draw, kernel: Kernel) -> Example:
    """Draw three or four sequences, some of which share a prefix."""
    one = sequences(kernel, most=1).map(lambda pairs: pairs[0])
    return draw_example(draw, kernel, st.lists(one, min_size=3, max_size=9 if kernel.takes("prefixes") else 4))


def scales_of(several: str) -> Callable[[Draw, Kernel], Example]:
    """Return a function that draws scales per head ("heads"), or per sequence and head ("sequences")."""

    def drawn(draw: Draw, kernel: Kernel) -> Example:
        shapes = [shape for shape in kernel.claims.shapes if shape[0][1] > 1] if several == "heads" else None
        return draw_example(draw, kernel, options={"scales_of": several}, shapes=shapes)

    return drawn


def with_option(name: str, *values: Any) -> Callable[[Draw, Kernel], Example]:
    """Return a function that draws batches with an option of the path that is not a parameter of the kernel."""
    return lambda draw, kernel: draw_example(draw, kernel, options={name: draw(st.sampled_from(values))})


def of_two_sizes(draw: Draw, kernel: Kernel) -> Example:
    """Draw keys that are larger or smaller than values."""
    heads, _, block_size = draw(st.sampled_from(kernel.claims.few_shapes))
    sizes = draw(st.sampled_from(landmarks.TWO_SIZES))
    return draw_example(draw, kernel, shapes=[(heads, sizes, block_size)])


def listed_twice(draw: Draw, kernel: Kernel) -> Example:
    """Draw lists that contain some keys twice or more often."""
    return draw_example(draw, kernel, options={"topk": draw(st.sampled_from((8, 3, 16))), "twice": True})


def large_trees(draw: Draw, kernel: Kernel) -> Example:
    """Draw trees with more nodes than a word has bits."""
    nodes = st.integers(33, 160)
    return draw_example(draw, kernel, st.lists(nodes.map(lambda n: (n, n + 9)), min_size=1, max_size=2))


def growing_trees(draw: Draw, kernel: Kernel) -> Example:
    """Draw trees with only their last nodes as query rows."""
    growing = draw(st.sampled_from((4, 9, 1)))
    lens = st.tuples(st.integers(1, 6), st.integers(growing, growing + 20)).map(lambda x: (x[0], sum(x)))
    return draw_example(draw, kernel, st.lists(lens, min_size=1, max_size=3), options={"growing": growing})


def hidden_behind(draw: Draw, kernel: Kernel) -> Example:
    """Draw decodes and chunks with keys that a window or a chunk hides from all queries."""
    queries = min(4, kernel.claims.max_query_len or 4)
    pairs = st.lists(st.tuples(st.integers(1, queries), st.integers(30, 60)), min_size=1, max_size=2)
    options = {} if kernel.path == "local" else {"window_size": (draw(st.integers(0, 12)), 0)}
    return draw_example(draw, kernel, pairs, options=options)


def odd_lengths(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences without queries, without keys, and with more queries than keys."""
    pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=3)
    odd = draw(st.sampled_from(((0, 3), (2, 0), (3, 1))))
    most = kernel.claims.max_query_len or 6

    least = 0 if kernel.knows_query_lens else 1  # otherwise every sequence has one query

    def insert(drawn: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(max(least, min(q, most)), s) for q, s in [*drawn[:1], odd, *drawn[1:]]]

    return draw_example(draw, kernel, pairs.map(insert))


def many_keys(draw: Draw, kernel: Kernel) -> Example:
    """Draw decodes over many keys, which kernels split."""
    pairs = st.lists(st.tuples(st.just(1), st.sampled_from((300, 513, 1100))), min_size=1, max_size=2)
    options: Arguments = {"window_size": (700, 0)} if kernel.path == "sliding_window" else {}
    if kernel.path in SELECTED:
        options["topk"] = draw(st.sampled_from((300, 150, 64)))
    return draw_example(draw, kernel, pairs, options=options)


def sinks_over_many_keys(draw: Draw, kernel: Kernel) -> Example:
    """Draw sinks: over few keys, and over many, which kernels split."""
    pairs = st.one_of(
        sequences(kernel), st.lists(st.tuples(st.just(1), st.sampled_from((300, 700))), min_size=1, max_size=1)
    )
    kind = draw(st.sampled_from((True, *(("bfloat16", "float64") if kernel.claims.conventions else ()))))
    options: Arguments = {"sinks": kind} | ({"window_size": (700, 0)} if kernel.path == "sliding_window" else {})
    return draw_example(draw, kernel, pairs, options=options)


def of_any_layout(draw: Draw, kernel: Kernel) -> Example:
    """Draw how tensors lie in memory."""
    layouts = (*landmarks.LAYOUTS, *landmarks.EXPANDED)
    return draw_example(draw, kernel, options={"layout": draw(st.sampled_from(layouts))})


def padded(draw: Draw, kernel: Kernel) -> Example:
    """Draw rows after the last sequence."""
    return draw_example(draw, kernel, padding_rows=draw(st.integers(1, 3)))


def loudly(draw: Draw, kernel: Kernel) -> Example:
    """Draw sinks, which may be far above and below all scores, softcaps and negative scales."""
    numbers = dict(sinks=(None, True, "large"), softcap=(None, 1.0, 30.0), softmax_scale=(None, -0.3))
    options = {name: draw(st.sampled_from(x)) for name, x in numbers.items() if kernel.takes(name)}
    return draw_example(draw, kernel, options={name: x for name, x in options.items() if x is not None})


def forked(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences of several blocks that begin with blocks of others, as after a fork of a prompt."""
    shape = draw(st.sampled_from(kernel.claims.few_shapes))
    most = min(6 if kernel.path == "speculative" else 12, kernel.claims.max_query_len or 12)
    longest = 5 * shape[2]
    lens = st.lists(st.tuples(st.integers(1, most), st.integers(shape[2], longest)), min_size=2, max_size=4)
    return draw_example(draw, kernel, lens, shapes=[shape], options={"forked": True})


def in_far_blocks(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch in the last blocks of a pool as large as a test can have."""
    drawn = draw_example(draw, kernel, options={"first_block": FAR_BLOCK})
    of_block = drawn.block_size * drawn.heads[1] * max(drawn.head_size, drawn.value_size)
    first = min(FAR_BLOCK, MOST_ELEMENTS // of_block)
    return replace(drawn, options={**drawn.options, "first_block": first})


def empty_parts(draw: Draw, kernel: Kernel) -> Example:
    """Draw parts in which some queries see no key, with garbage as their output."""
    garbage = draw(st.sampled_from((0.0, 1e4, float("nan"))))
    return draw_example(draw, kernel, options={"empty": True, "garbage": garbage})


def of_equal_scores(draw: Draw, kernel: Kernel) -> Example:
    """Draw scores that are all or mostly equal, so that only the rule for ties decides."""
    kind = draw(st.sampled_from(("zeros", "plateau", "negative")))
    return draw_example(draw, kernel, options={"kind": kind})


def fewer_than_asked_for(draw: Draw, kernel: Kernel) -> Example:
    """Draw queries that see fewer keys than are to be selected."""
    return draw_example(draw, kernel, options={"topk": 64, "kind": draw(st.sampled_from(("drawn", "negative")))})


def over_states(**options: Any) -> Callable[[Draw, Kernel], Example]:
    """Return a function that draws a step with these options; a list is a choice."""

    def drawn(draw: Draw, kernel: Kernel) -> Example:
        chosen = {name: draw(st.sampled_from(x)) if isinstance(x, list) else x for name, x in options.items()}
        return draw_example(draw, kernel, options=chosen)

    return drawn


def per_channel(draw: Draw, kernel: Kernel) -> Example:
    """Draw decays per key channel: weak ones, strong ones, and if claimed, decays that forget everything."""
    kinds = ("weak", "strong", *(() if "forgets" in kernel.claims.not_claimed else ("forget",)))
    return draw_example(draw, kernel, options={"layer": "kda", "decays": draw(st.sampled_from(kinds))})


def without_tokens(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences without new tokens among decodes and short prompts.

    One of them has 9 tokens before it, so that its next token would be in the middle of a chunk.
    """
    pairs = st.lists(st.tuples(st.sampled_from((1, 37, 5, 0)), st.integers(40, 50)), min_size=1, max_size=3)
    idle = draw(st.sampled_from((((0, 9), (0, 0)), ((0, 0),), ((0, 9),))))  # with a state, and without one
    options: dict[str, Any] = {"stale": True} if draw(st.booleans()) else {}
    if {"gdn", "kda"} <= {*kernel.claims.layers} and draw(st.booleans()):
        options["layer"] = "kda"
    return draw_example(draw, kernel, pairs.map(lambda drawn: [drawn[0], *idle, *drawn[1:]]), options=options)


def of_entries_unused(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences without new tokens with invalid slots, and in batches with drafts also invalid counts."""
    example = without_tokens(draw, kernel)
    drafts = {"drafts": True} if kernel.takes("num_accepted") and draw(st.booleans()) else {}
    return replace(example, options={**example.options, "stale": "anything", **drafts})


def of_several_chunks(draw: Draw, kernel: Kernel) -> Example:
    """Draw lengths of exactly a chunk of 64 tokens, one less and one more, with and without an initial state."""
    return draw_example(
        draw, kernel, st.sampled_from((((64, 64), (65, 130)), ((63, 70), (1, 9), (128, 128)), ((150, 200),)))
    )


OTHER_LENGTHS.update((without_tokens, of_entries_unused, of_several_chunks))
