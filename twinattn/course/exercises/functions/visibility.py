"""Who may see whom: masks, and the tables of windows and chunks."""

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from refattn import local, masks, metadata, sliding_window, sparse
from twinattn.course.exercises.exercise import Exercise, Function, Trial
from twinattn.kit import Case, masks_by_hand

ROWS = "The queries are the last tokens of the sequence: query row i stands at position seq_len - query_len + i."


def mask_of(rule: Callable[..., bool]) -> Function:
    """Return the function that draws a mask by a rule on two positions and the other arguments."""

    def draw(query_len: int, seq_len: int, **sizes: int) -> Bool[Tensor, "t s"]:
        return masks_by_hand(Case("", ((query_len, seq_len),)), lambda i, j: rule(i, j, **sizes))[0]

    return draw


def top_left(mask: Function) -> Function:
    """Return a mask with its queries at positions 0, 1, ... instead of at the end."""

    def draw(query_len: int, seq_len: int, **sizes: int) -> Bool[Tensor, "t s"]:
        square: Tensor = mask(max(query_len, seq_len), max(query_len, seq_len), **sizes)
        return square[:query_len, :seq_len]

    return draw


def _lens(*lens: tuple[int, int], **sizes: int) -> list[dict[str, int]]:
    return [dict(query_len=q, seq_len=s, **sizes) for q, s in lens]


def _mask_trials(*arguments: dict[str, int]) -> Callable[[], Iterator[Trial]]:
    def trials() -> Iterator[Trial]:
        for each in arguments:
            yield Trial(", ".join(f"{name} {size}" for name, size in each.items()), each)

    return trials


def _causal(i: int, j: int) -> bool:
    return j <= i


CAUSAL_MASK = Exercise(
    "causal_mask",
    mask_of(_causal),
    _mask_trials(*_lens((2, 4), (3, 3), (1, 5), (2, 1), (0, 3))),
    {
        f"the mask is aligned at the top left. {ROWS}": top_left(masks.causal),
        "a token sees itself, too": mask_of(lambda i, j: j < i),
        "a query may not see the keys after its own position": masks.full,
    },
    (
        ROWS,
        "With the positions of queries as a column and those of keys as a row, one comparison makes the mask.",
    ),
    in_page=True,
)


def _window(i: int, j: int, window: int) -> bool:
    return i - window < j <= i


WINDOW_MASK = Exercise(
    "window_mask",
    mask_of(_window),
    _mask_trials(*_lens((2, 5), (4, 4), window=3), *_lens((3, 3), (1, 4), window=1), *_lens((2, 4), window=9)),
    {
        "the window shows W + 1 keys; itself included, it is to show W": mask_of(
            lambda i, j, window: i - window <= j <= i
        ),
        "a query may not see the keys after its own position": mask_of(lambda i, j, window: i - window < j),
        f"the mask is aligned at the top left. {ROWS}": top_left(mask_of(_window)),
    },
    ("Two comparisons: not after the query, and less than `window` before it.",),
    in_page=True,
)


def _trim_window(query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int) -> Any:
    batch = metadata.make_batch([query_len], [seq_len], [blocks])
    plan = sliding_window.plan(batch, window_size=(window - 1, 0), block_size=block_size)
    assert plan.first_keys is not None and plan.batch.block_table is not None  # it cuts pages
    return int(plan.first_keys), int(plan.batch.seq_lens), plan.batch.block_table[0].tolist()


def _trim_by_last_query(query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int) -> Any:
    return _trim_window(1, seq_len, blocks, block_size, window)


def _trim_tokens(query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int) -> Any:
    _, _, left = _trim_window(query_len, seq_len, blocks, block_size, window)
    first = max(0, seq_len - query_len - window + 1)
    return first, seq_len - first, left


def _trim_rounded_up(query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int) -> Any:
    cut = ceil(max(0, seq_len - query_len - window + 1) / block_size)
    return cut * block_size, seq_len - cut * block_size, blocks[cut : ceil(seq_len / block_size)]


def _trim_below_0(query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int) -> Any:
    cut = (seq_len - query_len - window + 1) // block_size
    return cut * block_size, seq_len - cut * block_size, blocks[max(0, cut) : ceil(seq_len / block_size)]


def _trim_one_more(query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int) -> Any:
    return _trim_window(query_len, seq_len, blocks, block_size, window + 1)


def _trim_trials() -> Iterator[Trial]:
    blocks = [9, 2, 4, 7]
    for says, query_len, seq_len, block_size, window in (
        ("the worked example", 1, 14, 4, 5),
        ("several new tokens: the first of them sees furthest back", 6, 14, 4, 5),
        ("a window that begins with a block", 1, 13, 4, 5),
        ("a window longer than the sequence", 2, 14, 4, 100),
        ("a window of one token", 1, 13, 4, 1),
        ("blocks of 8", 3, 30, 8, 9),
    ):
        sizes = dict(block_size=block_size, window=window)
        yield Trial(says, dict(query_len=query_len, seq_len=seq_len, blocks=blocks, **sizes))


TRIM_WINDOW = Exercise(
    "trim_window",
    _trim_window,
    _trim_trials,
    {
        "the first new token sees furthest back; this leaves what the last one sees": _trim_by_last_query,
        "only whole blocks go: the first key that is left begins a block": _trim_tokens,
        "the window is one token too long: a query sees itself and window - 1 before it": _trim_one_more,
        "the block that holds the first visible key stays: round down, not up": _trim_rounded_up,
        "a window longer than the sequence begins at token 0, not before it": _trim_below_0,
        "nothing was cut off": lambda query_len, seq_len, blocks, block_size, window: (
            0,
            seq_len,
            blocks[: ceil(seq_len / block_size)],
        ),
    },
    (
        "The first query stands at seq_len - query_len, and sees as far back as window - 1 tokens before that.",
        "All blocks before the one with that key go.",
    ),
    parts=("first key", "tokens", "blocks"),
    level=2,
    minutes=15,
    in_page=True,
)


def _chunk(i: int, j: int, chunk_size: int) -> bool:
    return j <= i and i // chunk_size == j // chunk_size


CHUNK_MASK = Exercise(
    "chunk_mask",
    mask_of(_chunk),
    _mask_trials(*_lens((3, 5), chunk_size=2), *_lens((6, 6), (1, 4), chunk_size=4), *_lens((2, 3), chunk_size=9)),
    {
        "that is a window: a chunk begins where position // chunk_size changes, for all tokens alike": mask_of(
            lambda i, j, chunk_size: i - chunk_size < j <= i
        ),
        "a query may not see the keys after its own position": mask_of(
            lambda i, j, chunk_size: i // chunk_size == j // chunk_size
        ),
        "chunks are counted from position 0 of the sequence, and not from the first query": (
            lambda query_len, seq_len, chunk_size: mask_of(
                lambda i, j: (
                    j <= i and (i - seq_len + query_len) // chunk_size == (j - seq_len + query_len) // chunk_size
                )
            )(query_len, seq_len)
        ),
        f"the mask is aligned at the top left. {ROWS}": top_left(mask_of(_chunk)),
    },
    ("The chunk of position i is i // chunk_size.",),
    in_page=True,
)


def virtual_batches(
    query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], chunk_size: int, block_size: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the lengths and the blocks of each chunk that has new tokens."""
    batch = local.plan(
        metadata.make_batch(query_lens, seq_lens, block_tables), chunk_size=chunk_size, block_size=block_size
    ).batch
    assert batch.block_table is not None  # it cuts pages
    lens = batch.seq_lens.tolist()
    tables = [row[: ceil(s / block_size)] for row, s in zip(batch.block_table.tolist(), lens, strict=True)]
    return batch.query_lens.tolist(), lens, tables


def _chunks_from_first_query(query_lens: list[int], seq_lens: list[int], **rest: Any) -> Any:
    """Cut as if the first new token began a chunk."""
    return virtual_batches(query_lens, query_lens, **rest)


def _chunks_with_whole_tables(block_tables: list[list[int]], block_size: int, **rest: Any) -> Any:
    """Give each piece the beginning of its sequence's table."""
    queries, lens, _ = virtual_batches(block_tables=block_tables, block_size=block_size, **rest)
    whole = [[[blocks[0]] * len(blocks), blocks] for blocks in block_tables]
    owner = [i for i, (q, s) in enumerate(zip(rest["query_lens"], rest["seq_lens"], strict=True))
             for _ in range((s - q) // rest["chunk_size"], ceil(s / rest["chunk_size"])) if q]  # fmt: skip
    return queries, lens, [whole[i][1][: ceil(s / block_size)] for i, s in zip(owner, lens, strict=True)]


def _chunks_filled(**arguments: Any) -> Any:
    """Give a piece all tokens of its chunk, also those that are not there yet."""
    queries, lens, tables = virtual_batches(**arguments)
    return queries, [arguments["chunk_size"]] * len(lens), tables


def _chunks_all(query_lens: list[int], seq_lens: list[int], **rest: Any) -> Any:
    """Make a piece of every chunk, also of those without new tokens."""
    queries, lens, tables = virtual_batches(seq_lens, seq_lens, **rest)
    new: list[int] = []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        begins = range(0, seq_len, rest["chunk_size"])
        ends = [min(begin + rest["chunk_size"], seq_len) for begin in begins]
        new += [max(0, end - max(begin, seq_len - query_len)) for begin, end in zip(begins, ends, strict=True)]
    return new, lens, tables


def _chunks_of_silent(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], **rest: Any) -> Any:
    """Make a piece of the last chunk of a sequence without new tokens, too."""
    pieces: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
        found: Any = virtual_batches([query_len or 1], [seq_len], [blocks], **rest)
        for part, more in zip(pieces, found, strict=True):
            part.extend(more if query_len or part is not pieces[0] else [0])
    return pieces


def _virtual_trials() -> Iterator[Trial]:
    yield Trial("the worked example", dict(
        query_lens=[2], seq_lens=[5], block_tables=[[9, 2]], chunk_size=4, block_size=4))  # fmt: skip
    yield Trial("one new token, in the middle of its chunk", dict(
        query_lens=[1], seq_lens=[7], block_tables=[[4, 7]], chunk_size=4, block_size=4))  # fmt: skip
    yield Trial("three sequences, chunks of two blocks", dict(
        query_lens=[4, 10, 5], seq_lens=[6, 17, 9],
        block_tables=[[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17]],
        chunk_size=4, block_size=2))  # fmt: skip
    yield Trial("a sequence that ends with its chunk, and one without new tokens", dict(
        query_lens=[8, 0], seq_lens=[8, 3], block_tables=[[5, 1], [3]], chunk_size=4, block_size=4))  # fmt: skip
    yield Trial("one token past the chunk", dict(
        query_lens=[1], seq_lens=[9], block_tables=[[5, 1, 6]], chunk_size=8, block_size=4))  # fmt: skip


VIRTUAL_BATCHES = Exercise(
    "virtual_batches",
    virtual_batches,
    _virtual_trials,
    {
        "these chunks begin at the first new token; they begin at position 0 of the sequence": (
            _chunks_from_first_query
        ),
        "each piece has the first blocks of its sequence; it needs those of its own chunk": (_chunks_with_whole_tables),
        "a piece ends with its last new token, even if its chunk has room for more": _chunks_filled,
        "a chunk without new tokens is no piece: begin with the chunk of the first new token": _chunks_all,
        "a sequence without new tokens has no piece": _chunks_of_silent,
        "every token was taken for a new one: only the last query_len are new": (
            lambda query_lens, seq_lens, **rest: virtual_batches(seq_lens, seq_lens, **rest)
        ),
    },
    (
        "Walk from the first new token: the piece ends at the end of its chunk, or with the sequence.",
        "The piece has the tokens from the beginning of its chunk, position // chunk_size * chunk_size.",
    ),
    parts=("query_lens", "seq_lens", "block_tables"),
    level=3,
    minutes=20,
    in_page=True,
)


def _tree_mask(parents: list[int]) -> Bool[Tensor, "n n"]:
    visible = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            visible[i] |= visible[parent]
    return visible


def _tree_of_parents(parents: list[int]) -> Bool[Tensor, "n n"]:
    visible = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            visible[i, parent] = True
    return visible


def _tree_with_last(parents: list[int]) -> Bool[Tensor, "n n"]:
    visible = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        visible[i] |= visible[parent]  # -1 is the last row
    return visible


def _tree_trials() -> Iterator[Trial]:
    for says, parents in (
        ("the worked example: two siblings", [-1, 0, 0]),
        ("a chain", [-1, 0, 1, 2]),
        ("two branches that meet nowhere", [-1, -1, 0, 1, 2]),
        ("a bushy tree", [-1, 0, 0, 1, 1, 2, 3]),
        ("no token", []),
    ):
        yield Trial(says, dict(parents=parents))


TREE_MASK = Exercise(
    "tree_mask",
    _tree_mask,
    _tree_trials,
    {
        "siblings do not see each other: earlier is not enough, it has to be an ancestor": (
            lambda parents: masks.causal(len(parents), len(parents))
        ),
        "all ancestors are visible, not only the parent": _tree_of_parents,
        "Python counts -1 from the end, so a token that begins a branch has got the last row": _tree_with_last,
        "rows and columns are swapped: a row is the token that sees, and it sees its ancestors, not its descendants": (
            lambda parents: _tree_mask(parents).T
        ),
        "a token sees itself, too": lambda parents: _tree_mask(parents) & ~torch.eye(len(parents)).bool(),
    },
    ("A token sees what its parent sees, and itself; parents come first, so one pass is enough.",),
    level=2,
    minutes=10,
    in_page=True,
)


def _span(i: int, j: int, spans: list[tuple[int, int]]) -> bool:
    return any(first <= i <= last and first <= j <= last for first, last in spans)


def _spans_under(rule: Callable[..., bool]) -> Function:
    def draw(query_len: int, seq_len: int, spans: list[tuple[int, int]], window: int) -> Bool[Tensor, "t s"]:
        return mask_of(lambda i, j: rule(i, j, spans, window))(query_len, seq_len)

    return draw


def _span_and_window(i: int, j: int, spans: list[tuple[int, int]], window: int) -> bool:
    return (j <= i or _span(i, j, spans)) and i - j < window


def _span_trials() -> Iterator[Trial]:
    for says, sizes, spans, window in (
        ("the worked example: an image of two tokens", (4, 5), [(2, 3)], 3),
        ("an image longer than the window", (8, 9), [(1, 7)], 3),
        ("two images", (10, 12), [(2, 5), (8, 10)], 6),
        ("no image", (3, 6), [], 2),
        ("a decode after an image", (1, 8), [(2, 6)], 9),
    ):
        yield Trial(says, dict(query_len=sizes[0], seq_len=sizes[1], spans=spans, window=window))


SPAN_MASK = Exercise(
    "span_mask",
    _spans_under(_span_and_window),
    _span_trials,
    {
        "an OR where an AND belongs: the window hides the early keys of a span, too": _spans_under(
            lambda i, j, spans, window: (j <= i and i - j < window) or _span(i, j, spans)
        ),
        "the tokens of an image see its later tokens": _spans_under(
            lambda i, j, spans, window: j <= i and i - j < window
        ),
        "the window is to hide early keys": _spans_under(lambda i, j, spans, window: j <= i or _span(i, j, spans)),
        "two images do not see each other's later tokens: a key has to be in the same span as the query": _spans_under(
            lambda i, j, spans, window: (j <= i or (_span(i, i, spans) and _span(j, j, spans))) and i - j < window
        ),
        f"the mask is aligned at the top left. {ROWS}": lambda query_len, seq_len, spans, window: _spans_under(
            _span_and_window
        )(seq_len, seq_len, spans, window)[:query_len],
    },
    ("Draw the causal mask, OR the square of each span, AND the window: in this order.",),
    in_page=True,
)


def _select_keys(scores: list[float], topk: int) -> list[int]:
    selected: list[int] = sparse.select(torch.tensor([scores], dtype=torch.float32), topk)[0].tolist()
    return selected


def _select_higher(scores: list[float], topk: int) -> list[int]:
    best = _select_keys(scores[::-1], topk)
    keys = [len(scores) - 1 - j for j in best if j >= 0]
    return sorted(keys) + [-1] * (topk - len(keys))


def _select_unsorted(scores: list[float], topk: int) -> list[int]:
    best = [j for j in _select_keys(scores, topk) if j >= 0]
    return sorted(best, key=lambda j: -scores[j]) + [-1] * (topk - len(best))


def _select_without_keys(scores: list[float], topk: int) -> list[int]:
    best = sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:topk])
    return best + [-1] * (topk - len(best))


def _select_above_zero(scores: list[float], topk: int) -> list[int]:
    best = [j for j in _select_keys(scores, topk) if j >= 0 and scores[j] > 0]
    return best + [-1] * (topk - len(best))


def _select_without_fill(scores: list[float], topk: int) -> list[int]:
    return [j for j in _select_keys(scores, topk) if j >= 0]


def _select_trials() -> Iterator[Trial]:
    nothing = float("-inf")
    for says, scores, topk in (
        ("the worked example: two of three zeros are left out", [0.0, 2.0, 0.0, 1.0, 0.0], 3),
        ("fewer keys than are asked for", [nothing, 0.5], 3),
        ("a plateau of zeros", [0.0] * 6, 4),
        ("negative scores, and zeros of both signs", [-1.0, -0.0, -3.0, 0.0, -0.0], 2),
        ("no key", [nothing, nothing], 2),
        ("all different", [0.1, 0.9, 0.4, 0.7, 0.3], 2),
    ):
        yield Trial(says, dict(scores=scores, topk=topk))


SELECT_KEYS = Exercise(
    "select_keys",
    _select_keys,
    _select_trials,
    {
        "of equal scores the lower positions are selected": _select_higher,
        "the positions are to rise, whatever their scores": _select_unsorted,
        "a score of -inf is no key": _select_without_keys,
        "a score of 0 is one like any other": _select_above_zero,
        "-1 fills up the list to topk positions": _select_without_fill,
    },
    ("Python's sort is stable: what is equal keeps its order.", "Sort the positions by -score, cut, and sort again."),
    in_page=True,
)
