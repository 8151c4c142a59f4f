"""The puzzles, in order: bugs that servers had, each planted in a few lines that otherwise work.

A puzzle's file has `broken`, which must not be changed, `failing_case`, which returns a small case that it gets wrong,
and `mended`. A case is a few sizes; `arguments` makes the arguments of the functions from them. The reference decides
which answer is right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from refattn import interval, masks, sparse
from refattn.attention import attend
from refattn.metadata import make_batch
from twinattn.course.exercises.exercise import Exercise, Function, Trial, draw
from twinattn.course.exercises.functions.cache import local_len, slot
from twinattn.course.exercises.functions.merging import shared_prefix
from twinattn.course.exercises.functions.visibility import virtual_batches

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Puzzle:
    """A bug to find and to mend.

    Attributes:
        name: of its file, after the number.
        reference: what `broken` and `mended` should compute.
        arguments: makes their arguments of a case; it takes the case's sizes by name, and refuses bad ones.
        contract: the cases that `mended` is tried on.
        hints: one after the other.
        parts: names of what the functions return, if they return several things.
        view: what of the answer counts; all of it if None. What it returns is named by `viewed`.
        viewed: names of what `view` returns.
    """

    name: str
    reference: Function
    arguments: Callable[..., dict[str, Any]]
    contract: Sequence[Case]
    hints: Sequence[str]
    parts: Sequence[str] = ()
    view: Callable[[Any], Any] | None = None
    viewed: Sequence[str] = ()

    def exercise(self, name: str, cases: Sequence[Case]) -> Exercise:
        """Return some cases as an exercise, in which `broken` or `mended` is the function to write."""

        def trials() -> Iterator[Trial]:
            for case in cases:
                yield Trial(describe(case), self.arguments(**case), view=self.view, parts=self.viewed)

        return Exercise(name, self.reference, trials, {}, self.hints, parts=self.parts)


def describe(case: Case) -> str:
    """Write a case in words."""
    return ", ".join(f"{name} {value}" for name, value in case.items())


def _grid(**sizes: Sequence[Any]) -> list[Case]:
    """Return every combination of some sizes."""
    return [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]


def _expect(**conditions: bool) -> None:
    """Check a case.

    Raises:
        ValueError: naming what does not fit.
    """
    for name, holds in conditions.items():
        if not holds:
            raise ValueError(f"not a valid case: {name.replace('_', ' ')}")


def _window(query_len: int, seq_len: int, window: int) -> dict[str, Any]:
    _expect(query_len_is_more_than_seq_len=0 <= query_len <= seq_len, window_is_less_than_1=window >= 1)
    return dict(query_len=query_len, seq_len=seq_len, window=window)


def _padding(num_slots: int, slots: list[int]) -> dict[str, Any]:
    inside = all(-1 <= slot < num_slots for slot in slots)
    real = [slot for slot in slots if slot >= 0]
    _expect(a_slot_is_outside_of_the_pool=inside, a_slot_comes_twice=len(set(real)) == len(real))
    return dict(pool=torch.zeros(num_slots, 2), new=1 + draw(len(slots), 2).abs(), slots=slots)


def _write(pool: Tensor, new: Tensor, slots: list[int]) -> Tensor:
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    return pool.index_copy(0, torch.tensor([slots[i] for i in kept], dtype=torch.long), new[kept])


def _empty_parts(lses: list[list[float]]) -> dict[str, Any]:
    _expect(there_is_no_part=len(lses) > 0, parts_differ_in_their_queries=len(set(map(len, lses))) == 1)
    numbers = torch.tensor(lses, dtype=torch.float32)
    _expect(an_LSE_is_infinity=bool((numbers != torch.inf).all()))
    return dict(outs=draw(*numbers.shape).masked_fill(numbers == -torch.inf, 0.0), lses=numbers)


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    lse = lses.logsumexp(0)
    shares = torch.exp(lses - lse).masked_fill(lses == -torch.inf, 0.0)
    return (shares * outs).sum(0), lse


def _log_base(prefix_len: int, suffix_len: int) -> dict[str, Any]:
    _expect(a_length_is_less_than_1=min(prefix_len, suffix_len) >= 1)
    return dict(prefix=draw(prefix_len, 2), suffix=draw(suffix_len, 2, seed=1))


def _silent_rows(query_lens: list[int]) -> dict[str, Any]:
    _expect(a_length_is_negative=min(query_lens, default=0) >= 0)
    return dict(query_lens=query_lens)


def _stale_memory(seq_len: int, block_size: int, stale: float) -> dict[str, Any]:
    _expect(a_size_is_less_than_1=min(seq_len, block_size) >= 1)
    num_blocks = -(-seq_len // block_size)
    blocks = list(range(num_blocks, 0, -1))
    pools = []
    for seed in (1, 2):
        pool = torch.full((num_blocks + 2, block_size, 4), float(stale))
        rows = draw(seq_len, 4, seed=seed)
        for j in range(seq_len):
            pool[blocks[j // block_size], j % block_size] = rows[j]
        pools.append(pool)
    return dict(query=draw(4), key_cache=pools[0], value_cache=pools[1], blocks=blocks, seq_len=seq_len)


def _read(query: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: list[int], seq_len: int) -> Tensor:
    key, value = (cache[blocks].flatten(0, 1)[:seq_len, None] for cache in (key_cache, value_cache))
    return attend(query[None, None], key, value, masks.full(1, seq_len))[0][0, 0]


def _chunk_ends(query_len: int, seq_len: int, chunk_size: int) -> dict[str, Any]:
    _expect(there_is_no_new_token=query_len >= 1, query_len_is_more_than_seq_len=query_len <= seq_len)
    _expect(chunk_size_is_less_than_1=chunk_size >= 1)
    return dict(query_len=query_len, seq_len=seq_len, chunk_size=chunk_size)


def _pieces(query_len: int, seq_len: int, chunk_size: int) -> list[tuple[int, int]]:
    blocks = list(range(-(-seq_len // chunk_size)))
    queries, keys, _ = virtual_batches([query_len], [seq_len], [blocks], chunk_size, chunk_size)
    return list(zip(queries, keys, strict=True))


def _prefix_reach(
    query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int
) -> dict[str, Any]:
    arguments = dict(query_lens=query_lens, seq_lens=seq_lens, block_tables=block_tables, block_size=block_size)
    one_each = len(query_lens) == len(seq_lens) == len(block_tables) > 0
    _expect(the_lists_differ_in_length=one_each, block_size_is_less_than_1=block_size >= 1)
    enough = all(len(blocks) * block_size >= s for blocks, s in zip(block_tables, seq_lens, strict=True))
    fit = all(0 <= q <= s for q, s in zip(query_lens, seq_lens, strict=True))
    _expect(a_sequence_has_too_few_blocks=enough, a_query_len_is_more_than_its_seq_len=fit)
    return arguments


def _sink_per_split(num_keys: int, num_splits: int, sink: float) -> dict[str, Any]:
    _expect(
        a_size_is_less_than_1=min(num_keys, num_splits) >= 1, there_are_more_splits_than_keys=num_splits <= num_keys
    )
    return dict(
        scores=draw(num_keys), values=draw(num_keys, seed=1), sink=torch.tensor(float(sink)), num_splits=num_splits
    )


def _with_sink(scores: Tensor, values: Tensor, sink: Tensor, num_splits: int) -> Tensor:
    weights = torch.exp(scores - torch.logaddexp(scores.logsumexp(0), sink))
    return (weights * values).sum()


def _softcap_order(query_len: int, seq_len: int, softcap: float) -> dict[str, Any]:
    _expect(query_len_is_not_between_1_and_seq_len=1 <= query_len <= seq_len, softcap_is_not_positive=softcap > 0)
    return dict(scores=draw(query_len, seq_len), visible=masks.causal(query_len, seq_len), softcap=softcap)


def _capped(scores: Tensor, visible: Tensor, softcap: float) -> Tensor:
    return (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, -torch.inf).softmax(-1)


def _one_scale(key_scale: float, value_scale: float) -> dict[str, Any]:
    _expect(a_scale_is_not_positive=min(key_scale, value_scale) > 0)
    quantized = [(draw(5, 4, seed=seed) * 40).round().to(torch.int8) for seed in (1, 2)]
    return dict(
        query=draw(4),
        quantized_key=quantized[0],
        quantized_value=quantized[1],
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _dequantized(
    query: Tensor, quantized_key: Tensor, quantized_value: Tensor, key_scale: float, value_scale: float
) -> Tensor:
    key, value = (
        quantized.to(query.dtype) * by for quantized, by in ((quantized_key, key_scale), (quantized_value, value_scale))
    )
    return attend(query[None, None], key[:, None], value[:, None], masks.full(1, len(key)))[0][0, 0]


def _rank_lengths(context_len: int, new_len: int, rank: int, num_ranks: int, interleave: int) -> dict[str, Any]:
    _expect(a_length_is_negative=min(context_len, new_len) >= 0, there_is_no_such_rank=0 <= rank < num_ranks)
    _expect(interleave_is_less_than_1=interleave >= 1)
    sizes = dict(rank=rank, num_ranks=num_ranks, interleave=interleave)
    return dict(context_len=context_len, new_len=new_len, **sizes)


def _block_or_slot(blocks: list[int], seq_len: int, block_size: int) -> dict[str, Any]:
    _expect(seq_len_is_negative=seq_len >= 0, block_size_is_less_than_1=block_size >= 1)
    _expect(there_are_too_few_blocks=len(blocks) * block_size >= seq_len)
    return dict(blocks=blocks, seq_len=seq_len, block_size=block_size)


def _frozen_splits(captured_len: int, replayed_len: int, num_splits: int) -> dict[str, Any]:
    _expect(a_size_is_less_than_1=min(captured_len, replayed_len, num_splits) >= 1)
    return dict(captured_len=captured_len, replayed_len=replayed_len, num_splits=num_splits)


def _splits(captured_len: int, replayed_len: int, num_splits: int) -> list[tuple[int, int]]:
    size = -(-replayed_len // num_splits)
    return [(min(i * size, replayed_len), min((i + 1) * size, replayed_len)) for i in range(num_splits)]


def _draft_stayed(num_tokens: int, accepted: int) -> dict[str, Any]:
    _expect(accepted_is_not_between_1_and_num_tokens=1 <= accepted <= num_tokens)
    tokens = dict(keys=draw(num_tokens, 3), values=draw(num_tokens, 2, seed=1))
    return dict(state=draw(2, 3, seed=2), **tokens, accepted=accepted)


def _rolled_back(state: Tensor, keys: Tensor, values: Tensor, accepted: int) -> tuple[Tensor, Tensor]:
    fades = 0.5 ** torch.arange(accepted).flip(0)
    return keys[:accepted], 0.5**accepted * state + (values[:accepted] * fades[:, None]).T @ keys[:accepted]


def _kept_states(num_cached: int, kept: list[int], block_size: int) -> dict[str, Any]:
    _expect(block_size_is_less_than_1=block_size >= 1, num_cached_is_negative=num_cached >= 0)
    _expect(a_state_was_kept_inside_a_block=all(length > 0 and length % block_size == 0 for length in kept))
    return dict(num_cached=num_cached, kept=kept, block_size=block_size)


def _tied_scores(scores: list[float], topk: int, slots: list[int]) -> dict[str, Any]:
    _expect(the_lists_differ_in_length=len(scores) == len(slots), a_slot_comes_twice=len(set(slots)) == len(slots))
    _expect(topk_is_not_between_1_and_the_number_of_keys=1 <= topk <= len(scores))
    _expect(a_score_is_not_finite=all(isfinite(score) for score in scores))
    return dict(scores=scores, topk=topk, slots=slots)


def _selected(scores: list[float], topk: int, slots: list[int]) -> list[int]:
    return [slots[j] for j in sparse.select(torch.tensor([scores], dtype=torch.float32), topk)[0].tolist()]


def _span_or_window(seq_len: int, first: int, last: int, window: int) -> dict[str, Any]:
    _expect(the_image_is_not_in_the_prompt=0 <= first <= last < seq_len, window_is_less_than_1=window >= 1)
    return dict(seq_len=seq_len, first=first, last=last, window=window)


def _intervals(seq_len: int, first: int, last: int, window: int) -> list[tuple[int, int]]:
    spans = torch.tensor([[[first, last]]], dtype=torch.int32)
    seen = interval.image_spans(make_batch([seq_len], [seq_len]), spans, seq_len, window_size=(window - 1, -1))
    return list(zip(*(ends.tolist() for ends in seen), strict=True))


INF = float("inf")

PUZZLES = (
    Puzzle(
        "window",
        lambda query_len, seq_len, window: masks.window(query_len, seq_len, (window - 1, 0)),
        _window,
        [*_grid(query_len=[1, 3], seq_len=[3, 7], window=[1, 2, 3, 9]), dict(query_len=0, seq_len=2, window=1)],
        ("How many keys does a query see with window 1?", "A sequence shorter than the window cannot show it."),
    ),
    Puzzle(
        "padding",
        _write,
        _padding,
        [dict(num_slots=4, slots=slots) for slots in ([], [0, 2], [-1], [1, -1, -1, 0], [3, -1], [-1, 3])],
        ("What is pool[-1] in Python?",),
    ),
    Puzzle(
        "empty_parts",
        _merge,
        _empty_parts,
        [
            dict(lses=[[0.0], [1.0]]),
            dict(lses=[[0.0, -INF], [1.0, -INF]]),
            dict(lses=[[-INF], [2.0]]),
            dict(lses=[[1000.0, -INF, 3.0]]),
            dict(lses=[[], []]),
            dict(lses=[[0.0, 1.0], [float("nan"), 2.0]]),  # a broken model: nothing hides it
        ],
        ("What is -inf - -inf?", "Which query has a largest LSE of -inf?"),
        parts=("out", "lse"),
    ),
    Puzzle(
        "log_base",
        lambda prefix, suffix: torch.cat([prefix, suffix]).mean(0),
        _log_base,
        _grid(prefix_len=[1, 8, 48], suffix_len=[1, 2, 8]),
        ("With equal lengths the shares are a half each, whatever the base.", "exp belongs to a natural log."),
    ),
    Puzzle(
        "silent_rows",
        lambda query_lens: [i for i, length in enumerate(query_lens) for _ in range(length)],
        _silent_rows,
        [dict(query_lens=lens) for lens in ([], [1, 1], [0, 1, 0, 1], [1, 0, 1], [3, 0, 1], [0, 0])],
        ("When is row i not sequence i, though no sequence has two new tokens?",),
    ),
    Puzzle(
        "stale_memory",
        _read,
        _stale_memory,
        _grid(seq_len=[1, 3, 4, 6], block_size=[4], stale=[0.0, 1e4, INF, float("nan")]),
        ("What is 0 * NaN?", "The weight of a hidden slot is 0. What does the sum over the values do with it?"),
    ),
    Puzzle(
        "chunk_ends",
        _pieces,
        _chunk_ends,
        _grid(query_len=[1, 2, 5], seq_len=[5, 8, 9, 11], chunk_size=[4, 8, 16]),
        ("Which sequences end in the middle of a chunk?", "The last piece is as long as what is left."),
    ),
    Puzzle(
        "prefix_reach",
        shared_prefix,
        _prefix_reach,
        [
            dict(query_lens=q, seq_lens=s, block_tables=tables, block_size=4)
            for q, s, tables in (
                ([1, 1], [10, 9], [[5, 0, 3], [5, 0, 8]]),
                ([2, 3], [8, 8], [[5, 0], [5, 0]]),
                ([1, 8], [9, 8], [[5, 0, 3], [5, 0]]),
                ([1, 1, 1], [9, 9, 5], [[5, 0, 1], [5, 0, 2], [5, 3]]),
                ([4, 4], [8, 8], [[5, 0], [5, 0]]),
            )
        ],
        ("What if two requests share the block that their new tokens are in?", "Count blocks of the context only."),
    ),
    Puzzle(
        "sink_per_split",
        _with_sink,
        _sink_per_split,
        _grid(num_keys=[1, 5, 8], num_splits=[1], sink=[0.0, -3.0])
        + _grid(num_keys=[5, 8], num_splits=[2, 3, 5], sink=[0.0, 4.0, -INF]),
        ("How often is the sink in the denominator?", "Merge the splits without it, and count it once at the end."),
    ),
    Puzzle(
        "softcap_order",
        _capped,
        _softcap_order,
        _grid(query_len=[1, 2, 3], seq_len=[3, 4], softcap=[1.0, 30.0]),
        (
            "What is tanh(-inf)?",
            "A query that sees every key cannot show it, and next to a cap of 30 a key that counts exp(-30) is lost.",
        ),
    ),
    Puzzle(
        "one_scale",
        _dequantized,
        _one_scale,
        _grid(key_scale=[0.01, 0.5, 1.0], value_scale=[0.01, 0.25, 1.0]),
        ("Which scales hide it?",),
    ),
    Puzzle(
        "rank_lengths",
        lambda context_len, new_len, **where: (
            local_len(context_len + new_len, **where) - local_len(context_len, **where)
        ),
        _rank_lengths,
        _grid(context_len=[0, 1, 5, 16], new_len=[0, 1, 3, 7], rank=[0, 1], num_ranks=[2], interleave=[1, 2, 4]),
        ("Which rank gets the first new token?", "local(a - b) is not local(a) - local(b)."),
    ),
    Puzzle(
        "block_or_slot",
        lambda blocks, seq_len, block_size: [slot(j, blocks, block_size) for j in range(seq_len)],
        _block_or_slot,
        _grid(blocks=[[3, 1, 0]], seq_len=[0, 1, 3], block_size=[1, 2, 16]),
        ("With which block size is a block a slot?",),
    ),
    Puzzle(
        "frozen_splits",
        _splits,
        _frozen_splits,
        _grid(captured_len=[1, 4, 9], replayed_len=[1, 4, 5, 9, 100], num_splits=[1, 2, 8]),
        ("What stays as it was when a graph is replayed?", "The number of splits may be fixed; their size may not."),
        view=lambda ranges: (
            [key for first, after_last in ranges for key in range(first, after_last)],
            len(ranges),
        ),
        viewed=("keys, split after split", "splits"),
    ),
    Puzzle(
        "draft_stayed",
        _rolled_back,
        _draft_stayed,
        [case for case in _grid(num_tokens=[1, 2, 4], accepted=[1, 2, 3, 4]) if case["accepted"] <= case["num_tokens"]],
        ("Which of the two can be cropped?", "The rejected tokens are inside a sum. When did it not have them yet?"),
        parts=("keys", "state"),
    ),
    Puzzle(
        "kept_states",
        lambda num_cached, kept, block_size: max(
            (length for length in kept if length <= num_cached // block_size * block_size), default=0
        ),
        _kept_states,
        _grid(num_cached=[0, 3, 8, 11], kept=[[], [4], [8], [12], [12, 4], [4, 8, 12]], block_size=[1, 2, 4]),
        (
            "Can the state after 4 tokens be computed from the keys of 8?",
            "A state may be kept after more tokens than there are keys for.",
        ),
    ),
    Puzzle(
        "tied_scores",
        _selected,
        _tied_scores,
        [
            dict(scores=scores, topk=topk, slots=[9, 4, 7, 0, 3, 12][: len(scores)])
            for scores in ([1.0, 3.0, 2.0], [0.0] * 6, [0.0, 2.0, 0.0, 0.0, -1.0, 0.0], [5.0, 0.0, 0.0, 0.0, 5.0])
            for topk in (1, 2, 3)
        ],
        ("How many scores may be equal to the lowest selected one?", "What is slots[-1] in Python, and in a kernel?"),
    ),
    Puzzle(
        "span_or_window",
        _intervals,
        _span_or_window,
        _grid(seq_len=[7], first=[0, 2], last=[2, 5], window=[1, 2, 3, 9]),
        ("How long is the image, and how long the window?", "A window hides tokens of the image, too."),
    ),
)
