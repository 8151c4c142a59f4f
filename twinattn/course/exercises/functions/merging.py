"""How partial outputs combine: by their log-sum-exp, in one pass, over splits, with a sink, under a shared prefix."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from refattn import cascade, masks, merge
from refattn.attention import attend
from twinattn.course.exercises.exercise import Exercise, Function, Once, Trial, draw
from twinattn.course.exercises.functions.attention import ANSWER, mask_readout, paged, step_of
from twinattn.course.exercises.functions.visibility import ROWS, top_left
from twinattn.kit import Case


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return merge.merge(outs, lses)


def _merge_naively(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.stack(list(lses)).logsumexp(0)
    return sum(torch.exp(each - lse)[..., None] * out for out, each in zip(outs, lses, strict=True)), lse  # type: ignore[return-value]


def _merge_parts(*parts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return dict(outs=[out for out, _ in parts], lses=[lse for _, lse in parts])


def _merge_trials() -> Iterator[Trial]:
    def part(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
        return draw(*shape, seed=seed), draw(*shape[:2], seed=seed + 9)

    def alike(value: float, count: float) -> tuple[Tensor, Tensor]:
        return torch.full((1, 1, 2), float(value)), torch.full((1, 1), float(count)).log()

    yield Trial("2 from two keys, 5 from one", _merge_parts(alike(2, 2), alike(5, 1)))
    yield Trial("three parts, 2 queries, 3 heads", _merge_parts(*(part(i, 2, 3, 4) for i in range(3))))
    yield Trial(
        "LSEs of 1000: exp overflows unless their maximum is subtracted",
        _merge_parts(*((out, lse + 1000) for out, lse in (part(i, 2, 1, 4) for i in range(2)))),
    )
    yield Trial("a part that saw nothing, whose output is garbage", _merge_parts(alike(2, 2), alike(torch.nan, 0)))
    yield Trial("no part saw anything", _merge_parts(alike(0, 0), alike(0, 0)))


MERGE = Exercise(
    "merge",
    _merge,
    _merge_trials,
    {
        "a part with an LSE of -inf: -inf - -inf is NaN, and so is 0 * NaN. Such a part counts 0": _merge_naively,
        "the parts count alike; the share of each is exp(lse - lse of all)": (
            lambda outs, lses: (torch.stack(list(outs)).mean(0), torch.stack(list(lses)).logsumexp(0))
        ),
        "the shares are the LSEs themselves; take exp of them": lambda outs, lses: (
            sum(lse[..., None] * out for out, lse in zip(outs, lses, strict=True))
            / torch.stack(list(lses)).sum(0)[..., None],
            torch.stack(list(lses)).logsumexp(0),
        ),
        "exp of a large LSE is inf: take off the largest first, or use logsumexp": lambda outs, lses: (
            sum(lse.exp()[..., None] * out for out, lse in zip(outs, lses, strict=True))
            / sum(lse.exp() for lse in lses)[..., None],
            sum(lse.exp() for lse in lses).log(),
        ),
    },
    (
        "lse = log(sum_i exp(lse_i)), and out = sum_i exp(lse_i - lse) * out_i: `torch.logsumexp` over the parts.",
        "Fill a part's contribution with 0 where its LSE is -inf, whatever its output holds.",
    ),
    parts=ANSWER,
    level=2,
    minutes=15,
)


def _online_softmax(tiles: Any) -> tuple[Tensor, Tensor]:
    items = tiles.items if isinstance(tiles, Once) else tiles
    scores, values = (torch.cat(parts) for parts in zip(*items, strict=True))
    ones = scores.new_ones(1, 1)
    out, lse = attend(ones[None], scores[:, None, None], values[:, None], scores[None] > -torch.inf, softmax_scale=1.0)
    return out[0, 0], lse[0, 0]


def _online(*, rescale_sum: bool = True, rescale_values: bool = True) -> Function:
    """Return the running softmax without one of its two rescalings."""

    def online_softmax(tiles: Any) -> tuple[Tensor, Tensor]:
        row_max, row_sum, acc = -torch.inf, torch.tensor(0.0), torch.tensor(0.0)
        for scores, values in tiles:
            new_max = max(row_max, float(scores.max()))
            by = torch.exp(torch.tensor(row_max - new_max))
            weights = torch.exp(scores - new_max)
            row_sum = row_sum * (by if rescale_sum else 1) + weights.sum()
            acc = acc * (by if rescale_values else 1) + weights @ values
            row_max = new_max
        return acc / row_sum, row_max + row_sum.log()

    return online_softmax


def _online_kept(tiles: Any) -> tuple[Tensor, Tensor]:
    kept = list(tiles)
    return _online_softmax(Once(kept))


def _online_average(tiles: Any) -> tuple[Tensor, Tensor]:
    answers = [_online_softmax(Once([tile])) for tile in tiles.items]
    return torch.stack([out for out, _ in answers]).mean(0), torch.stack([lse for _, lse in answers]).logsumexp(0)


def _online_naively(tiles: Any) -> tuple[Tensor, Tensor]:
    pairs = [(scores.exp(), values) for scores, values in tiles.items]
    total = sum(weights.sum() for weights, _ in pairs)
    return sum(weights @ values for weights, values in pairs) / total, torch.as_tensor(total).log()


def _online_trials() -> Iterator[Trial]:
    def tiles(*scores: list[float], d: int = 2) -> dict[str, Any]:
        return dict(
            tiles=Once((torch.tensor(each).float(), draw(len(each), d, seed=i)) for i, each in enumerate(scores))
        )

    example = [(torch.zeros(2), torch.tensor([[1.0], [3.0]])), (torch.zeros(1), torch.tensor([[5.0]]))]
    yield Trial("the worked example", dict(tiles=Once(example)))
    yield Trial("the maximum rises: 0 1 | 3 2 | 5", tiles([0, 1], [3, 2], [5]))
    yield Trial("the maximum falls: 5 | 3 2 | 0 1", tiles([5], [3, 2], [0, 1]))
    yield Trial("scores of a thousand", tiles([1000, 999], [1001, 990], d=3))
    yield Trial("a first tile in which everything is hidden", tiles([-torch.inf, -torch.inf], [1, 2]))


ONLINE_SOFTMAX = Exercise(
    "online_softmax",
    _online_softmax,
    _online_trials,
    {
        "when the maximum rises, what was summed before has to shrink: the values were not rescaled": _online(
            rescale_values=False
        ),
        "when the maximum rises, what was summed before has to shrink: the sum was not rescaled": _online(
            rescale_sum=False
        ),
        "neither sum was rescaled when the maximum rose": _online(rescale_sum=False, rescale_values=False),
        "exp of a large score is inf: subtract the running maximum": _online_naively,
        "the tiles were kept, and the memory of one is used again for the next: use a tile up before the next": (
            _online_kept
        ),
        "the tiles count alike; each counts as much as exp of its LSE": _online_average,
        "-inf - -inf is NaN: a tile in which everything is hidden leaves the maximum at -inf": _online(),
    },
    (
        "Keep three things: the largest score so far, the sum of exp(score - maximum), and the sum of those times "
        "the values.",
        "When the maximum rises from m to m', multiply both sums by exp(m - m').",
        "While the maximum is -inf, skip the tile.",
    ),
    parts=ANSWER,
    level=3,
    minutes=20,
    in_page=True,
)


def _split(round_up: bool = True) -> Function:
    def split_kv(query: Tensor, key: Tensor, value: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
        size = ceil(len(key) / num_splits) if round_up else len(key) // num_splits
        answers = []
        for i in range(num_splits):
            keys = slice(i * size, (i + 1) * size)
            answers.append(attend(query[None], key[keys], value[keys], masks.full(1, len(key[keys]))))
        return torch.cat([out for out, _ in answers]), torch.cat([lse for _, lse in answers])

    return split_kv


def _split_kv(query: Tensor, key: Tensor, value: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    answer: tuple[Tensor, Tensor] = _split()(query, key, value, num_splits)
    return answer


def _split_with_one_lse(query: Tensor, key: Tensor, value: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    outs, lses = _split_kv(query, key, value, num_splits)
    return outs, lses.logsumexp(0).expand_as(lses)


def _split_trials() -> Iterator[Trial]:
    for says, s, splits, heads in (
        ("4 keys, 2 splits", 4, 2, 1),
        ("5 keys, 2 splits: 3 and 2", 5, 2, 2),
        ("5 keys, 4 splits: the last has none", 5, 4, 2),
        ("one split", 7, 1, 2),
        ("97 keys, 8 splits", 97, 8, 3),
    ):
        key, value = draw(s, heads, 4, seed=1), draw(s, heads, 4, seed=2)
        yield Trial(says, dict(query=draw(heads, 4), key=key, value=value, num_splits=splits))


SPLIT_KV = Exercise(
    "split_kv",
    _split_kv,
    _split_trials,
    {
        "the last keys are lost: a split has ceil(s / num_splits) keys, not floor": _split(round_up=False),
        "every split has the LSE of the whole; a part needs the one over its own keys": _split_with_one_lse,
        "an empty split is NaN; it returns 0 and -inf": lambda **arguments: tuple(
            each.masked_fill(
                _split_kv(**arguments)[1].isinf().reshape(each.shape[:2] + (1,) * (each.ndim - 2)), torch.nan
            )
            for each in _split_kv(**arguments)
        ),
    },
    (
        "Slices past the end are empty in Python, and `logsumexp` over nothing is -inf: mind only the weights.",
        "exercise 7 with a mask of ones answers each slice; torch.stack the parts.",
    ),
    parts=("outs", "lses"),
    level=2,
    minutes=10,
)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return merge.add_sinks(out, lse, sinks)


def _sinks_trials() -> Iterator[Trial]:
    four, log_three = torch.full((1, 1, 2), 4.0), torch.full((1, 1), 3.0).log()
    yield Trial("out 4 of three keys, a sink of score 0", dict(out=four, lse=log_three, sinks=torch.zeros(1)))
    answer = dict(out=draw(3, 2, 4), lse=draw(3, 2, seed=1))
    yield Trial("3 queries, 2 heads", dict(**answer, sinks=torch.tensor([0.5, -2.0])))
    yield Trial("a sink far above all scores", dict(**answer, sinks=torch.tensor([200.0, -200.0])))
    nothing = dict(out=torch.zeros(1, 1, 2), lse=torch.full((1, 1), -torch.inf))
    yield Trial("a query that saw nothing", dict(**nothing, sinks=torch.tensor([0.5])))


ADD_SINKS = Exercise(
    "add_sinks",
    _add_sinks,
    _sinks_trials,
    {
        "only the LSE was changed: the sink takes its share of the output, too": (
            lambda out, lse, sinks: (out, torch.logaddexp(lse, sinks.expand_as(lse)))
        ),
        "the sink is counted twice": lambda out, lse, sinks: _add_sinks(*_add_sinks(out, lse, sinks), sinks),
        "only the output was changed: a merge that follows needs the LSE with the sink": (
            lambda out, lse, sinks: (_add_sinks(out, lse, sinks)[0], lse)
        ),
    },
    (
        "The new denominator is exp(lse) + exp(sink): `torch.logaddexp`.",
        "The output is rescaled by exp(old lse - new lse).",
    ),
    parts=ANSWER,
    level=2,
)


def shared_prefix(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> int:
    """Return how many tokens all sequences share before any of their new ones."""
    rest = dict(block_size=block_size)
    found = cascade.find_prefixes(query_lens, seq_lens, block_tables, **rest)
    return max((end for first, last, end in found if (first, last) == (0, len(seq_lens))), default=0)


def _shared_trials() -> Iterator[Trial]:
    for says, query_lens, seq_lens, tables in (
        ("the worked example", [1, 1], [10, 9], [[5, 0, 3], [5, 0, 8]]),
        ("nothing is shared", [1, 1], [10, 9], [[5, 0, 3], [6, 0, 8]]),
        ("the same tokens sent again: the last shared block holds new tokens", [2, 3], [8, 8], [[5, 0], [5, 0]]),
        ("three requests, of which two share more", [1, 1, 2], [13, 14, 11], [[5, 0, 1, 2], [5, 0, 1, 3], [5, 0, 4]]),
        ("the same block again, after another one", [1, 1], [14, 13], [[5, 6, 1, 2], [5, 7, 1, 3]]),
        ("one request is new: all its tokens are", [1, 6], [9, 6], [[5, 0, 1], [5, 0]]),
    ):
        yield Trial(says, dict(query_lens=query_lens, seq_lens=seq_lens, block_tables=tables, block_size=4))


SHARED_PREFIX = Exercise(
    "shared_prefix",
    shared_prefix,
    _shared_trials,
    {
        "the prefix reaches into the new tokens of a sequence, which then see later keys": (
            lambda query_lens, seq_lens, block_tables, block_size: shared_prefix(
                [0] * len(seq_lens), seq_lens, block_tables, block_size
            )
        ),
        "a prefix ends at the first block that differs; later blocks are another text": (
            lambda query_lens, seq_lens, block_tables, block_size: (
                sum(
                    len(set(column)) == 1
                    for column in list(zip(*block_tables, strict=False))[
                        : min(s - q for q, s in zip(query_lens, seq_lens, strict=True)) // block_size
                    ]
                )
                * block_size
            )
        ),
        "that is the number of blocks; the prefix is counted in tokens": (
            lambda query_lens, seq_lens, block_tables, block_size: (
                shared_prefix(query_lens, seq_lens, block_tables, block_size) // block_size
            )
        ),
    },
    (
        "How many whole blocks of context has the sequence with the shortest one?",
        "Go through the columns of the table, and stop where not all sequences have the same block.",
    ),
    level=2,
    minutes=10,
    in_page=True,
)


def _two_levels(combine: Function, prefix_mask: Function = masks.full, own_mask: Function = masks.causal) -> Function:
    """Return a cascade of two levels that combines their answers somehow."""

    def attend_twice(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        prefix_len: int,
    ) -> tuple[Tensor, Tensor]:
        columns, everyone = prefix_len // key_cache.shape[1], cu_seqlens_q[[0, -1]]
        pools = (query, key_cache, value_cache)
        one = torch.tensor([prefix_len], dtype=torch.int32)
        prefix = paged(prefix_mask)(*pools, everyone, one, block_table[:1])
        own = paged(own_mask)(*pools, cu_seqlens_q, seq_lens - prefix_len, block_table[:, columns:])
        answer: tuple[Tensor, Tensor] = combine([prefix[0], own[0]], [prefix[1], own[1]])
        return answer

    return attend_twice


def _cascade_trials() -> Iterator[Trial]:
    pair = Case("pair", ((1, 6), (2, 7)), heads=(2, 1), head_size=4, block_size=4)
    many = Case("many", ((1, 20), (3, 19), (1, 17), (2, 25)), heads=(4, 2), head_size=8, block_size=8)
    yield mask_readout(pair, prefix_len=4)
    yield Trial("the same batch, random numbers", step_of(pair, prefix_len=4))
    blocks = 16 // many.block_size + sum(ceil((s - 16) / many.block_size) for _, s in many.lens)
    yield Trial(
        "four sequences, two blocks shared",
        step_of(many, prefix_len=16),
        most_reads=2 * blocks * many.block_size * many.heads[1] * many.head_size,
        read_from=("key_cache", "value_cache"),
    )
    yield Trial("no prefix", step_of(many, prefix_len=0))


def _prefix_twice(query: Tensor, seq_lens: Tensor, block_table: Tensor, prefix_len: int, **rest: Any) -> Any:
    """Merge the prefix with attention over all keys, which has the prefix already."""
    columns = prefix_len // rest["key_cache"].shape[1]
    everyone = block_table.clone()
    everyone[:, :columns] = block_table[:1, :columns]
    pools = (query, rest["key_cache"], rest["value_cache"])
    one = torch.tensor([prefix_len], dtype=torch.int32)
    prefix = paged(masks.full)(*pools, rest["cu_seqlens_q"][[0, -1]], one, block_table[:1])
    whole = paged(masks.causal)(*pools, rest["cu_seqlens_q"], seq_lens, everyone)
    return _merge([prefix[0], whole[0]], [prefix[1], whole[1]])


CASCADE = Exercise(
    "cascade",
    _two_levels(_merge),
    _cascade_trials,
    {
        "the parts count alike; merge them by their LSEs (exercise 9)": _two_levels(
            lambda outs, lses: (sum(outs) / 2, torch.stack(lses).logsumexp(0))
        ),
        "the outputs are added: each is a mean of its own keys, so weigh them by their LSEs (exercise 9)": _two_levels(
            lambda outs, lses: (sum(outs), torch.stack(lses).logsumexp(0))
        ),
        "queries see later keys of their own: the first key after the prefix is at position prefix_len, so the mask is "
        "that of the shorter sequence": _two_levels(_merge, own_mask=masks.full),
        "the prefix is hidden from some queries: it lies before all of them, so there is nothing to mask": (
            _two_levels(_merge, prefix_mask=masks.causal)
        ),
        "the prefix is left out": _two_levels(lambda outs, lses: (outs[1], lses[1])),
        "the prefix is counted twice: the rest of a sequence begins after it": _prefix_twice,
        f"the causal mask is aligned at the top left. {ROWS}": _two_levels(_merge, own_mask=top_left(masks.causal)),
    },
    (
        "Two parts: all query rows over the prefix, with no mask, and each sequence over the rest of its tokens.",
        "The second is paged attention (8) with shorter seq_lens and the table without its first columns; a "
        "causal mask aligned at the end needs no change. The first is attend (7) over the gathered prefix.",
        "merge([prefix, own], ...) as in exercise 9, or refattn.merge.merge.",
    ),
    parts=ANSWER,
    level=3,
    minutes=20,
)
