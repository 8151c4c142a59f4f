"""The exercises, in order: what each function should compute, with what it is tried, and what people write instead."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from refattn import cascade, kv_cache, local, masks, merge, metadata, mla, sliding_window
from refattn.attention import attend
from refattn.check.exercise import Exercise, Function, Once, Trial
from refattn.conformance import Case, build, masks_by_hand

# Three requests in one step: a is at the last chunk of its prompt, b is generating, c is at the start of its prompt.
THREE: dict[str, list[Any]] = dict(query_lens=[2, 1, 3], seq_lens=[5, 7, 3], block_tables=[[9, 2], [4, 7], [1]])
TINY = Case("the worked example", ((2, 5), (1, 7)), heads=(2, 1), head_size=4, block_size=4)
RAGGED = Case("silent", ((0, 3), (1, 6), (0, 5), (4, 4), (3, 9)), heads=(4, 2), head_size=8, block_size=4)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- where are the keys ---


def slot(position: int, blocks: list[int], block_size: int) -> int:
    """Return the slot of a token."""
    return blocks[position // block_size] * block_size + position % block_size


def _slot_trials() -> Iterator[Trial]:
    yield Trial("token 5, blocks [9, 2] of 4 slots", dict(position=5, blocks=[9, 2], block_size=4))
    yield Trial("the first token", dict(position=0, blocks=[9, 2], block_size=4))
    yield Trial("the last token of a block", dict(position=3, blocks=[9, 2], block_size=4))
    yield Trial("the first token of the second block", dict(position=4, blocks=[9, 2], block_size=4))
    yield Trial("blocks of 16", dict(position=33, blocks=[7, 0, 5], block_size=16))
    yield Trial("blocks of one token", dict(position=2, blocks=[7, 0, 5], block_size=1))


def _slot_mapping(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> Any:
    batch = metadata.make_batch(query_lens, seq_lens, block_tables)
    return metadata.slot_mapping(batch, sum(query_lens), block_size=block_size).tolist()


def _slot_mapping_trials() -> Iterator[Trial]:
    two = {name: each[:2] for name, each in THREE.items()}
    yield Trial("the worked example", dict(**two, block_size=4))
    yield Trial("three requests, one at the start of its prompt", dict(**THREE, block_size=4))
    yield Trial(
        "a request without new tokens, and blocks of 2",
        dict(query_lens=[1, 0, 2], seq_lens=[3, 4, 4], block_tables=[[6, 1], [0, 3], [5, 2]], block_size=2),
    )


def _write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    kv_cache.write(key, value, key_cache, value_cache, slot_mapping)


def _write_rows(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    rearrange(cache, "n p hk d -> (n p) hk d")[slots] = new


def _write_to_last(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    _write_rows(key_cache, key, slot_mapping)
    _write_rows(value_cache, value, slot_mapping)


def _write_trials() -> Iterator[Trial]:
    def arguments(slots: list[int], heads: int = 1, sizes: tuple[int, int] = (2, 2)) -> dict[str, Any]:
        t = len(slots)
        key, value = (_draw(t, heads, size, seed=i).round(decimals=1) for i, size in enumerate(sizes))
        pools = kv_cache.allocate(3, 4, heads, sizes[0], value_head_size=sizes[1])
        return dict(
            key=key, value=value, key_cache=pools[0], value_cache=pools[1], slot_mapping=torch.tensor(slots).long()
        )

    yield Trial("one token, to slot 9", arguments([9]))
    yield Trial("three tokens, in any order", arguments([9, 0, 7]))
    yield Trial("a row of padding", arguments([3, -1]))
    yield Trial("two heads, values smaller than keys", arguments([4, 1, -1, 11], heads=2, sizes=(4, 3)))
    yield Trial("no token", arguments([]))


def _gather(cache: Tensor, blocks: Tensor, seq_len: int) -> Tensor:
    return kv_cache.gather(cache, blocks, seq_len)


def _gather_trials() -> Iterator[Trial]:
    cache = torch.arange(10 * 4, dtype=torch.float32).reshape(10, 4, 1, 1)  # each token is the number of its slot
    table = torch.tensor([9, 2, -1], dtype=torch.int32)
    yield Trial("5 tokens in the blocks 9 and 2; each token is the number of its slot", _of_cache(cache, table, 5))
    yield Trial("all 8 tokens", _of_cache(cache, table, 8))
    yield Trial("fewer tokens than a block", _of_cache(cache, table, 3))
    yield Trial("garbage after the last block", _of_cache(cache, torch.tensor([0, 999999, -1]).int(), 4))
    yield Trial("no token", _of_cache(cache, table, 0))
    poison = torch.full((10, 4, 2, 3), torch.nan)
    poison[[4, 1]] = _draw(2, 4, 2, 3)
    yield Trial("two heads, in a pool of NaN", _of_cache(poison, torch.tensor([4, 1, 7]).int(), 7))


def _of_cache(cache: Tensor, blocks: Tensor, seq_len: int) -> dict[str, Any]:
    return dict(cache=cache, blocks=blocks, seq_len=seq_len)


# --- who may see whom ---


def _mask_of(rule: Callable[..., bool]) -> Function:
    """Return the function that draws a mask by a rule on two positions and the other arguments."""

    def draw(query_len: int, seq_len: int, **sizes: int) -> Bool[Tensor, "t s"]:
        return masks_by_hand(Case("", ((query_len, seq_len),)), lambda i, j: rule(i, j, **sizes))[0]

    return draw


def _top_left(mask: Function) -> Function:
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


def _window(i: int, j: int, window: int) -> bool:
    return i - window < j <= i


def _chunk(i: int, j: int, chunk_size: int) -> bool:
    return j <= i and i // chunk_size == j // chunk_size


# --- attention ---


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None = None) -> Any:
    out, lse = attend(query[:, None], key[:, None], value[:, None], visible, softmax_scale=scale)
    return out[:, 0], lse[:, 0]


def _attend_naively(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    scores = (query @ key.T / query.shape[1] ** 0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _attend_then_mask(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.T / query.shape[1] ** 0.5
    return (scores.softmax(-1) * visible) @ value, scores.logsumexp(-1)


def _overflowing(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.T / query.shape[1] ** 0.5).exp() * visible
    total = weights.sum(-1)
    return weights @ value / total.clamp(min=1e-30)[:, None], total.log()


def _attend_trials() -> Iterator[Trial]:
    yield Trial(
        "query 0, two visible keys of the values 1 and 3",
        dict(
            query=torch.zeros(1, 4),
            key=_draw(3, 4),
            value=torch.tensor([[1.0], [3.0], [50.0]]),
            visible=torch.tensor([[True, True, False]]),
        ),
    )
    yield Trial("3 queries, 5 keys, causal", _tokens(3, 5, visible=masks.causal(3, 5)))
    yield Trial("a query that sees no key", _tokens(2, 3, visible=masks.causal(2, 3) & torch.tensor([[True], [False]])))
    yield Trial("large scores: exp overflows unless their maximum is taken off", _tokens(2, 3, size=60.0))


def _tokens(t: int, s: int, *, visible: Tensor | None = None, size: float = 1.0) -> dict[str, Tensor]:
    visible = masks.full(t, s) if visible is None else visible
    return dict(query=_draw(t, 8) * size, key=_draw(s, 8, seed=1), value=_draw(s, 8, seed=2), visible=visible)


def _attend_heads(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, key, value, visible)


def _attend_interleaved(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    return attend(query, key.repeat(1, group, 1), value.repeat(1, group, 1), visible)


def _attend_first_head(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, key[:, :1], value[:, :1], visible)


def _attend_heads_trials() -> Iterator[Trial]:
    for says, heads, lens, sizes in (
        ("4 query heads, 2 key heads", (4, 2), (1, 3), (4, 4)),
        ("as many key heads as query heads", (3, 3), (2, 4), (4, 4)),
        ("one key head for all", (4, 1), (2, 4), (4, 4)),
        ("6 and 2 heads, and values of another size", (6, 2), (3, 7), (8, 5)),
    ):
        (h, hk), (t, s), (d, dv) = heads, lens, sizes
        query, key, value = _draw(t, h, d), _draw(s, hk, d, seed=1), _draw(s, hk, dv, seed=2)
        yield Trial(says, dict(query=query, key=key, value=value, visible=masks.causal(t, s)))


def compose(*, gather: Function, mask: Function, attend_heads: Function) -> Function:
    """Return paged attention, the function of exercise 8, made of the functions of the exercises before it."""

    def paged_attention(
        query: Float[Tensor, "t h d"],
        key_cache: Float[Tensor, "n p hk d"],
        value_cache: Float[Tensor, "n p hk dv"],
        cu_seqlens_q: Int32[Tensor, "_"],
        seq_lens: Int32[Tensor, "b"],
        block_table: Int32[Tensor, "b m"],
    ) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
        out = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
        lse = query.new_full(query.shape[:2], -torch.inf)
        for (q0, q1), seq_len, blocks in zip(
            pairwise(cu_seqlens_q.tolist()), seq_lens.tolist(), block_table, strict=True
        ):
            key, value = (gather(cache, blocks, seq_len) for cache in (key_cache, value_cache))
            out[q0:q1], lse[q0:q1] = attend_heads(query[q0:q1], key, value, mask(q1 - q0, seq_len))
        return out, lse

    return paged_attention


def _paged(mask: Function) -> Function:
    return compose(gather=_gather, mask=mask, attend_heads=_attend_heads)


def _step_of(case: Case, *, prefix_len: int | None = None, **values: Any) -> dict[str, Any]:
    """Return the arguments of paged attention for a case of the conformance kit; of a cascade, if there is a prefix."""
    inputs = build(case, **values)
    query, key_cache, value_cache, batch = inputs.tensors
    table = batch.block_table
    assert table is not None  # the kit makes one
    arguments = dict(query=query, key_cache=key_cache, value_cache=value_cache)
    if prefix_len is not None:
        columns = prefix_len // case.block_size
        for i in range(1, len(table)):  # the content too, so that nobody can tell by it who read what
            key_cache[table[i, :columns].long()] = key_cache[table[0, :columns].long()]
            value_cache[table[i, :columns].long()] = value_cache[table[0, :columns].long()]
        table[1:, :columns] = -1
    arguments |= dict(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_table=table)
    return arguments if prefix_len is None else arguments | dict(prefix_len=prefix_len)


def _mask_readout(case: Case, **step: Any) -> Trial:
    """Return the trial whose answer is a mask: queries of zeros weigh all visible keys alike, values name them."""
    longest = max(s for _, s in case.lens)
    values = [torch.eye(longest)[:s, None].repeat(1, case.heads[1], 1) for _, s in case.lens]
    arguments = _step_of(replace(case, value_head_size=longest), values=values, **step)
    arguments["query"] = torch.zeros_like(arguments["query"])
    says = "queries of zeros, and values that name their token: the output is the mask, a row per query"
    return Trial(says, arguments, view=lambda answer: (answer[0][:, 0] > 0,), parts=("mask",))


def _paged_trials() -> Iterator[Trial]:
    yield _mask_readout(TINY)
    yield Trial("the same batch, random numbers", _step_of(TINY))
    yield _mask_readout(RAGGED)
    yield Trial("sequences without new tokens, in a pool of NaN", _step_of(RAGGED))
    yield Trial("blocks of one token", _step_of(replace(RAGGED, block_size=1)))


# --- how partial answers combine ---


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return merge.merge(outs, lses)


def _merge_naively(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.stack(list(lses)).logsumexp(0)
    return sum(torch.exp(each - lse)[..., None] * out for out, each in zip(outs, lses, strict=True)), lse  # type: ignore[return-value]


def _merge_parts(*parts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return dict(outs=[out for out, _ in parts], lses=[lse for _, lse in parts])


def _merge_trials() -> Iterator[Trial]:
    def part(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
        return _draw(*shape, seed=seed), _draw(*shape[:2], seed=seed + 9)

    def alike(value: float, count: float) -> tuple[Tensor, Tensor]:
        return torch.full((1, 1, 2), float(value)), torch.full((1, 1), float(count)).log()

    yield Trial("2 from two keys, 5 from one", _merge_parts(alike(2, 2), alike(5, 1)))
    yield Trial("three parts, 2 queries, 3 heads", _merge_parts(*(part(i, 2, 3, 4) for i in range(3))))
    yield Trial(
        "LSEs of 1000: exp overflows unless their maximum is taken off",
        _merge_parts(*((out, lse + 1000) for out, lse in (part(i, 2, 1, 4) for i in range(2)))),
    )
    yield Trial("a part that saw nothing, whose output is garbage", _merge_parts(alike(2, 2), alike(torch.nan, 0)))
    yield Trial("no part saw anything", _merge_parts(alike(0, 0), alike(0, 0)))


def _online_softmax(tiles: Any) -> tuple[Tensor, Tensor]:
    scores, values = (torch.cat(parts) for parts in zip(*tiles, strict=True))
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


def _online_naively(tiles: Any) -> tuple[Tensor, Tensor]:
    pairs = [(scores.exp(), values) for scores, values in tiles]
    total = sum(weights.sum() for weights, _ in pairs)
    return sum(weights @ values for weights, values in pairs) / total, torch.as_tensor(total).log()


def _online_trials() -> Iterator[Trial]:
    def tiles(*scores: list[float], d: int = 2) -> dict[str, Any]:
        return dict(
            tiles=Once((torch.tensor(each).float(), _draw(len(each), d, seed=i)) for i, each in enumerate(scores))
        )

    example = [(torch.zeros(2), torch.tensor([[1.0], [3.0]])), (torch.zeros(1), torch.tensor([[5.0]]))]
    yield Trial("the worked example", dict(tiles=Once(example)))
    yield Trial("the maximum rises: 0 1 | 3 2 | 5", tiles([0, 1], [3, 2], [5]))
    yield Trial("the maximum falls: 5 | 3 2 | 0 1", tiles([5], [3, 2], [0, 1]))
    yield Trial("scores of a thousand", tiles([1000, 999], [1001, 990], d=3))
    yield Trial("a first tile in which everything is hidden", tiles([-torch.inf, -torch.inf], [1, 2]))


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
        key, value = _draw(s, heads, 4, seed=1), _draw(s, heads, 4, seed=2)
        yield Trial(says, dict(query=_draw(heads, 4), key=key, value=value, num_splits=splits))


# --- windows, chunks, shared prefixes ---


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
    """Let a piece have all tokens of its chunk, also those that are not there yet."""
    queries, lens, tables = virtual_batches(**arguments)
    return queries, [arguments["chunk_size"]] * len(lens), tables


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


def _two_levels(combine: Function, prefix_mask: Function = masks.full) -> Function:
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
        prefix = _paged(prefix_mask)(*pools, everyone, one, block_table[:1])
        own = _paged(masks.causal)(*pools, cu_seqlens_q, seq_lens - prefix_len, block_table[:, columns:])
        answer: tuple[Tensor, Tensor] = combine([prefix[0], own[0]], [prefix[1], own[1]])
        return answer

    return attend_twice


def _cascade_trials() -> Iterator[Trial]:
    pair = Case("pair", ((1, 6), (2, 7)), heads=(2, 1), head_size=4, block_size=4)
    many = Case("many", ((1, 20), (3, 19), (1, 17), (2, 25)), heads=(4, 2), head_size=8, block_size=8)
    yield _mask_readout(pair, prefix_len=4)
    yield Trial("the same batch, random numbers", _step_of(pair, prefix_len=4))
    yield Trial("four sequences, two blocks shared", _step_of(many, prefix_len=16))
    yield Trial("no prefix", _step_of(many, prefix_len=0))


# --- what newer models add ---


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return merge.add_sinks(out, lse, sinks)


def _sinks_trials() -> Iterator[Trial]:
    four, log_three = torch.full((1, 1, 2), 4.0), torch.full((1, 1), 3.0).log()
    yield Trial("out 4 of three keys, a sink of score 0", dict(out=four, lse=log_three, sinks=torch.zeros(1)))
    answer = dict(out=_draw(3, 2, 4), lse=_draw(3, 2, seed=1))
    yield Trial("3 queries, 2 heads", dict(**answer, sinks=torch.tensor([0.5, -2.0])))
    yield Trial("a sink far above all scores", dict(**answer, sinks=torch.tensor([200.0, -200.0])))
    nothing = dict(out=torch.zeros(1, 1, 2), lse=torch.full((1, 1), -torch.inf))
    yield Trial("a query that saw nothing", dict(**nothing, sinks=torch.tensor([0.5])))


def _quantize(x: Tensor, *, largest: int = 127, rounding: Function = torch.round) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / largest
    scale = scale.masked_fill(scale == 0, 1.0)
    return rounding(x.float() / scale[..., None]).clamp(-128, 127).to(torch.int8), scale


def _quantize_by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max() / 127
    return torch.round(x / scale).to(torch.int8), scale.expand(x.shape[:2])


def _quantize_trials() -> Iterator[Trial]:
    yield Trial("the worked example", dict(x=torch.tensor([[[0.5, -2.0, 1.0]]])))
    yield Trial("2 tokens, 2 heads, of very different sizes", dict(
        x=_draw(2, 2, 5) * torch.tensor([[[1.0], [100.0]], [[0.01], [3.0]]])))  # fmt: skip
    yield Trial("a row of zeros", dict(x=torch.zeros(1, 1, 3)))


def _mla_decode(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    softmax_scale: float,
) -> Tensor:
    absorbed = mla.absorb(query[None], key_projection)
    keys = torch.cat([latent, rope_key], dim=-1)[:, None]
    answer, _ = attend(absorbed, keys, latent[:, None], masks.full(1, len(latent)), softmax_scale=softmax_scale)
    return mla.project(answer, value_projection)[0]


def _mla_without_rope(query: Tensor, rope_key: Tensor, **rest: Any) -> Tensor:
    return _mla_decode(query, rope_key=torch.zeros_like(rope_key), **rest)


def _mla_with_own_scale(latent: Tensor, rope_key: Tensor, softmax_scale: float, **rest: Any) -> Tensor:
    scale = (latent.shape[1] + rope_key.shape[1]) ** -0.5
    return _mla_decode(latent=latent, rope_key=rope_key, softmax_scale=scale, **rest)


def _mla_with_first_head(key_projection: Tensor, **rest: Any) -> Tensor:
    return _mla_decode(key_projection=key_projection[:1].expand_as(key_projection), **rest)


def _mla_trials() -> Iterator[Trial]:
    yield Trial(
        "the worked example",
        dict(
            query=torch.tensor([[1.0, 0.0]]),
            latent=torch.zeros(2, 1),
            rope_key=torch.ones(2, 1),
            key_projection=torch.full((1, 1, 1), 2.0),
            value_projection=torch.full((1, 1, 1), 2.0),
            softmax_scale=0.5,
        ),
    )
    for says, (h, nope, rope, r, dv, s) in (
        ("2 heads, 5 tokens", (2, 4, 2, 3, 4, 5)),
        ("4 heads, 1000 tokens", (4, 16, 4, 8, 16, 1000)),
    ):
        yield Trial(
            says,
            dict(
                query=_draw(h, nope + rope),
                latent=_draw(s, r, seed=1),
                rope_key=_draw(s, rope, seed=2),
                key_projection=_draw(h, nope, r, seed=3),
                value_projection=_draw(h, dv, r, seed=4),
                softmax_scale=(nope + rope) ** -0.5,
            ),
            most_elements=s * h * nope // 2 if s > 100 else 0,
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


def local_len(seq_len: int, rank: int, num_ranks: int, interleave: int) -> int:
    """Return how many tokens of a sequence a rank has."""
    return sum(j // interleave % num_ranks == rank for j in range(seq_len))


def _local_len_trials() -> Iterator[Trial]:
    for seq_len, rank, num_ranks, interleave in (
        (7, 0, 2, 2), (7, 1, 2, 2), (8, 1, 2, 2), (5, 2, 4, 1), (2, 3, 4, 1), (0, 0, 2, 16), (100, 1, 3, 16),
        (9, 0, 1, 4),
    ):  # fmt: skip
        says = f"rank {rank} of {num_ranks}, {seq_len} tokens in runs of {interleave}"
        yield Trial(says, dict(seq_len=seq_len, rank=rank, num_ranks=num_ranks, interleave=interleave))


def _decode(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query[None], key, value, masks.full(1, len(key)))[0][0]


def _decode_whole_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _decode(query, key[: len(key) // 16 * 16], value[: len(key) // 16 * 16])


def _decode_padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weigh the lanes after the last key as keys of zeros."""
    more = (-len(key)) % 16
    return _decode(query, *(torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (key, value)))


def _decode_unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _decode(query * query.shape[1] ** 0.5, key, value)


def _triton_trials() -> Iterator[Trial]:
    for says, s, heads, d in (
        ("16 keys, one tile", 16, 1, 16),
        ("48 keys, three tiles, 2 heads", 48, 2, 16),
        ("the last tile has 5 keys", 37, 2, 16),
        ("one key", 1, 3, 32),
    ):
        yield Trial(says, dict(query=_draw(heads, d), key=_draw(s, heads, d, seed=1), value=_draw(s, heads, d, seed=2)))


ANSWER = ("out", "lse")
ROWS = "The queries are the last tokens of the sequence: query row i stands at position seq_len - query_len + i."

EXERCISES = (
    Exercise(
        "slot",
        slot,
        _slot_trials,
        {
            "the block of a token is blocks[position // block_size], and not always the first": (
                lambda position, blocks, block_size: blocks[0] * block_size + position % block_size
            ),
            "the blocks of a sequence are not side by side in the pool: look up the one that the token is in": (
                lambda position, blocks, block_size: blocks[0] * block_size + position
            ),
            "a block is block_size slots long, so block b begins at slot b * block_size": (
                lambda position, blocks, block_size: blocks[position // block_size] + position % block_size
            ),
            "the position alone is the slot only if the sequence owns the first blocks of the pool; look in blocks": (
                lambda position, blocks, block_size: position
            ),
        },
        (
            "In which of its blocks is the token, and in which row? `divmod(position, block_size)` says both.",
            "Block b begins at slot b * block_size; the row comes on top.",
        ),
    ),
    Exercise(
        "slot_mapping",
        _slot_mapping,
        _slot_mapping_trials,
        {
            "the new tokens are the last ones of a sequence; these are the slots of its first ones": (
                lambda query_lens, seq_lens, block_tables, block_size: _slot_mapping(
                    query_lens, query_lens, block_tables, block_size
                )
            ),
            "these are the slots of all tokens; only the new ones are written": (
                lambda query_lens, seq_lens, block_tables, block_size: _slot_mapping(
                    seq_lens, seq_lens, block_tables, block_size
                )
            ),
            "each position is one too high: the last token stands at seq_len - 1": (
                lambda query_lens, seq_lens, block_tables, block_size: [
                    slot(position, [*blocks, -1], block_size)
                    for q, s, blocks in zip(query_lens, seq_lens, block_tables, strict=True)
                    for position in range(s - q + 1, s + 1)
                ]
            ),
        },
        (
            "The new tokens of a sequence stand at the positions from seq_len - query_len to before seq_len.",
            "Exercise 1 turns each position into a slot.",
        ),
    ),
    Exercise(
        "write",
        _write,
        _write_trials,
        {
            "Python counts -1 from the end, so padding went to the last slot of the pool": _write_to_last,
            "the values were not written": lambda value, value_cache, **rest: _write(
                value=value[:0].new_zeros(value.shape), value_cache=value_cache, **rest
            ),
            "block and row are the other way round: slot // p is the block, slot % p the row": (
                lambda key, value, key_cache, value_cache, slot_mapping: [
                    cache.__setitem__((slot % cache.shape[1], slot // cache.shape[1]), new)
                    for cache, rows in ((key_cache, key), (value_cache, value))
                    for slot, new in zip(slot_mapping.tolist(), rows, strict=True)
                    if slot >= 0
                ]
            ),
            "nothing was written: does it change key_cache and value_cache themselves, or copies?": (
                lambda **arguments: None
            ),
        },
        (
            "Loop over the tokens: `for token, slot in enumerate(slot_mapping.tolist())`.",
            "`divmod(slot, block_size)` is the block and the row; the block size is key_cache.shape[1].",
        ),
        changes=("key_cache", "value_cache"),
    ),
    Exercise(
        "gather",
        _gather,
        _gather_trials,
        {
            "these are the first slots of the pool; the block table says which blocks are the sequence's": (
                lambda cache, blocks, seq_len: rearrange(cache, "n p hk d -> (n p) hk d")[:seq_len]
            ),
            "these are whole blocks; the last one is only partly filled, so stop at seq_len tokens": (
                lambda cache, blocks, seq_len: rearrange(
                    cache[blocks[: ceil(seq_len / cache.shape[1])].long()], "m p hk d -> (m p) hk d"
                )
            ),
            "the blocks are in the order of their numbers; their order in the table is the order of the tokens": (
                lambda cache, blocks, seq_len: _gather(
                    cache, blocks[: ceil(seq_len / cache.shape[1])].sort().values, seq_len
                )
            ),
        },
        (
            "How many blocks hold seq_len tokens? Look at no entry of `blocks` after those.",
            "`cache[block_ids]` picks blocks; merge its first two dimensions, and cut at seq_len.",
        ),
    ),
    Exercise(
        "causal_mask",
        _mask_of(_causal),
        _mask_trials(*_lens((2, 4), (3, 3), (1, 5), (2, 1), (0, 3))),
        {
            f"the mask is aligned at the top left. {ROWS}": _top_left(masks.causal),
            "a token sees itself, too": _mask_of(lambda i, j: j < i),
            "a query may not see the keys after its own position": masks.full,
        },
        (
            ROWS,
            "With the positions of queries as a column and those of keys as a row, one comparison makes the mask.",
        ),
    ),
    Exercise(
        "attend",
        _attend,
        _attend_trials,
        {
            "the scores are not divided by the square root of the head size": (
                lambda query, **rest: _attend(query, scale=1.0, **rest)
            ),
            "a row of softmax over -inf alone is NaN; its answer has to be 0": _attend_naively,
            "hidden keys have a share of the denominator: mask the scores before the softmax": _attend_then_mask,
            "exp of a large score is inf: take the largest score off first, or use logsumexp": _overflowing,
            "the log-sum-exp is to be a natural log, and this is one of base 2": (
                lambda **arguments: (_attend(**arguments)[0], _attend(**arguments)[1] * log2(torch.e))
            ),
        },
        (
            "Hide keys by a score of -inf: `scores.masked_fill(~visible, -torch.inf)`.",
            "`lse = scores.logsumexp(-1)` is -inf where nothing is visible; the weights are exp(scores - lse).",
            "-inf - -inf is NaN: fill the weights of hidden keys with 0 once more.",
        ),
        parts=ANSWER,
    ),
    Exercise(
        "attend_heads",
        _attend_heads,
        _attend_heads_trials,
        {
            "neighbours share a key head: i // g. This is i % hk, so `repeat` where `repeat_interleave` belongs": (
                _attend_interleaved
            ),
            "all query heads read the first key head": _attend_first_head,
        },
        (
            "Repeat each key head g times, so that there are as many as query heads.",
            '`einops.repeat(key, "s hk d -> s (hk g) d", g=g)`, then exercise 6 for each head.',
        ),
        parts=ANSWER,
    ),
    Exercise(
        "paged_attention",
        compose(gather=_gather, mask=masks.causal, attend_heads=_attend_heads),
        _paged_trials,
        {
            f"the causal mask is aligned at the top left. {ROWS}": _paged(_top_left(masks.causal)),
            "the queries see later keys: the mask is causal": _paged(masks.full),
            "the queries do not see themselves": _paged(_mask_of(lambda i, j: j < i)),
            "query row i was taken for sequence i; cu_seqlens_q says where the rows of a sequence begin": (
                lambda cu_seqlens_q, **rest: _paged(masks.causal)(
                    cu_seqlens_q=torch.arange(len(cu_seqlens_q), dtype=torch.int32).clamp(max=len(rest["query"])),
                    **rest,
                )
            ),
            "the keys are those of the first sequence, for everyone": lambda block_table, **rest: _paged(masks.causal)(
                block_table=block_table[:1].expand_as(block_table), **rest
            ),
        },
        (
            "A loop over the sequences: gather (4), causal mask (5), attend (7). The reference's functions do as well: "
            "refattn.kv_cache.gather, refattn.masks.causal, refattn.attention.attend.",
            "Make `out` and `lse` first, and fill the rows from cu_seqlens_q[i] to before cu_seqlens_q[i + 1].",
        ),
        parts=ANSWER,
    ),
    Exercise(
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
    ),
    Exercise(
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
            "exp of a large score is inf: keep the largest score so far, and take it off": _online_naively,
            "-inf - -inf is NaN: a tile in which everything is hidden leaves the maximum at -inf": _online(),
        },
        (
            "Keep three things: the largest score so far, the sum of exp(score - maximum), and the sum of those times "
            "the values.",
            "When the maximum rises from m to m', multiply both sums by exp(m - m').",
            "While the maximum is -inf, skip the tile.",
        ),
        parts=ANSWER,
    ),
    Exercise(
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
    ),
    Exercise(
        "window_mask",
        _mask_of(_window),
        _mask_trials(*_lens((2, 5), (4, 4), window=3), *_lens((3, 3), (1, 4), window=1), *_lens((2, 4), window=9)),
        {
            "the window shows W + 1 keys; itself included, it is to show W": _mask_of(
                lambda i, j, window: i - window <= j <= i
            ),
            "a query may not see the keys after its own position": _mask_of(lambda i, j, window: i - window < j),
            f"the mask is aligned at the top left. {ROWS}": _top_left(_mask_of(_window)),
        },
        ("Two comparisons: not after the query, and less than `window` before it.",),
    ),
    Exercise(
        "trim_window",
        _trim_window,
        _trim_trials,
        {
            "the first new token sees furthest back; this leaves what the last one sees": _trim_by_last_query,
            "only whole blocks go: the first key that is left begins a block": _trim_tokens,
            "the window is one token too long: a query sees itself and window - 1 before it": _trim_one_more,
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
    ),
    Exercise(
        "chunk_mask",
        _mask_of(_chunk),
        _mask_trials(*_lens((3, 5), chunk_size=2), *_lens((6, 6), (1, 4), chunk_size=4), *_lens((2, 3), chunk_size=9)),
        {
            "that is a window: a chunk begins where position // chunk_size changes, for all tokens alike": _mask_of(
                lambda i, j, chunk_size: i - chunk_size < j <= i
            ),
            "a query may not see the keys after its own position": _mask_of(
                lambda i, j, chunk_size: i // chunk_size == j // chunk_size
            ),
            "chunks are counted from position 0 of the sequence, and not from the first query": (
                lambda query_len, seq_len, chunk_size: _mask_of(
                    lambda i, j: (
                        j <= i and (i - seq_len + query_len) // chunk_size == (j - seq_len + query_len) // chunk_size
                    )
                )(query_len, seq_len)
            ),
            f"the mask is aligned at the top left. {ROWS}": _top_left(_mask_of(_chunk)),
        },
        ("The chunk of position i is i // chunk_size.",),
    ),
    Exercise(
        "virtual_batches",
        virtual_batches,
        _virtual_trials,
        {
            "these chunks begin at the first new token; they begin at position 0 of the sequence": (
                _chunks_from_first_query
            ),
            "each piece has the first blocks of its sequence; it needs those of its own chunk": (
                _chunks_with_whole_tables
            ),
            "a piece ends with its last new token, even if its chunk has room for more": _chunks_filled,
        },
        (
            "Walk from the first new token: the piece ends at the end of its chunk, or with the sequence.",
            "The piece has the tokens from the beginning of its chunk, position // chunk_size * chunk_size.",
        ),
        parts=("query_lens", "seq_lens", "block_tables"),
    ),
    Exercise(
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
    ),
    Exercise(
        "cascade",
        _two_levels(_merge),
        _cascade_trials,
        {
            "the parts count alike; merge them by their LSEs (exercise 9)": _two_levels(
                lambda outs, lses: (sum(outs) / 2, torch.stack(lses).logsumexp(0))
            ),
            "the prefix is hidden from some queries: it lies before all of them, so there is nothing to mask": (
                _two_levels(_merge, prefix_mask=masks.causal)
            ),
            "the prefix is left out": _two_levels(lambda outs, lses: (outs[1], lses[1])),
        },
        (
            "Two parts: all query rows over the prefix, with no mask, and each sequence over the rest of its tokens.",
            "The second is paged attention (8) with shorter seq_lens and the table without its first columns; a "
            "causal mask aligned at the end needs no change. The first is attend (7) over the gathered prefix.",
            "merge([prefix, own], ...) as in exercise 9, or refattn.merge.merge.",
        ),
        parts=ANSWER,
    ),
    Exercise(
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
            "The output shrinks by exp(old lse - new lse).",
        ),
        parts=ANSWER,
    ),
    Exercise(
        "quantize",
        _quantize,
        _quantize_trials,
        {
            "a cast cuts off what is after the point; round first": lambda x: _quantize(x, rounding=torch.trunc),
            "one scale for the whole tensor; each token and head has its own": _quantize_by_tensor,
            "the largest code is 127, so the scale is the largest number / 127": lambda x: _quantize(x, largest=128),
        },
        (
            "The scale of a row is its largest absolute value / 127: `x.abs().amax(-1)`.",
            "Where the scale is 0, take 1, or 0 / 0 makes NaN.",
        ),
        parts=("codes", "scale"),
    ),
    Exercise(
        "mla_decode",
        _mla_decode,
        _mla_trials,
        {
            "the rotary part of the query has not met the rotary keys": _mla_without_rope,
            "the scale is the one that was given: it belongs to the head size before absorption": _mla_with_own_scale,
            "the head has to be the same in query, keys and values: einsum's letter h": _mla_with_first_head,
        },
        (
            'Absorb: `einsum("hn,hnr->hr", query[:, :nope], key_projection)`; the rotary part stays as it is.',
            "Scores: absorbed @ latents plus rotary query @ rotary keys, times the scale; then softmax.",
            "The weights times the latents are a latent per head; value_projection turns it into the output.",
        ),
    ),
    Exercise(
        "tree_mask",
        _tree_mask,
        _tree_trials,
        {
            "siblings do not see each other: earlier is not enough, it has to be an ancestor": (
                lambda parents: masks.causal(len(parents), len(parents))
            ),
            "all ancestors are visible, not only the parent": _tree_of_parents,
            "Python counts -1 from the end, so a token that begins a branch has got the last row": _tree_with_last,
            "a token sees itself, too": lambda parents: _tree_mask(parents) & ~torch.eye(len(parents)).bool(),
        },
        ("A token sees what its parent sees, and itself; parents come first, so one pass is enough.",),
    ),
    Exercise(
        "local_len",
        local_len,
        _local_len_trials,
        {
            "tokens are dealt out in runs, and the last run may be cut short": (
                lambda seq_len, rank, num_ranks, interleave: ceil(seq_len / num_ranks)
            ),
            "these are contiguous shares; runs of `interleave` tokens go round the ranks": (
                lambda seq_len, rank, num_ranks, interleave: len(
                    range(seq_len)[rank * ceil(seq_len / num_ranks) :][: ceil(seq_len / num_ranks)]
                )
            ),
            "only whole rounds were counted: what is left over goes to the first ranks": (
                lambda seq_len, rank, num_ranks, interleave: seq_len // (num_ranks * interleave) * interleave
            ),
        },
        (
            "Token j is in run j // interleave, and run k is on rank k % num_ranks.",
            "Whole rounds give `interleave` tokens each; of the last one, a rank has between 0 and `interleave`.",
        ),
    ),
    Exercise(
        "triton_decode",
        _decode,
        _triton_trials,
        {
            "the last keys are missing: the loop needs ceil(seq_len / TILE) tiles": _decode_whole_tiles,
            "lanes after the last key got a score of 0, and with it a share of the softmax; theirs is -inf": (
                _decode_padded
            ),
            "the scores are not multiplied by `scale`": _decode_unscaled,
        },
        (
            "`head = tl.program_id(0)`, `dims = tl.arange(0, D)`, and the query is tl.load(query + head * D + dims).",
            "`for start in range(0, seq_len, TILE)`: the tokens are start + tl.arange(0, TILE), their mask is "
            "tokens < seq_len, and a tile of keys is [TILE, D]: tokens[:, None] * head_stride + head * D + dims[None].",
            "Scores: tl.sum(keys * q[None, :], axis=1) * scale, and tl.where(mask, scores, -float('inf')). Then the "
            "running maximum, sum and values of exercise 10; tl.store at the end.",
        ),
    ),
)
