"""Attention: one head, all heads, a step over pages, latents, and a kernel."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import log2
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn import kv_cache, masks, mla
from refattn.attention import attend
from twinattn.course.exercises.exercise import Exercise, Function, Trial, draw
from twinattn.course.exercises.functions.visibility import ROWS, mask_of, top_left
from twinattn.kit import Case, build

ANSWER = ("out", "lse")
TINY = Case("the worked example", ((2, 5), (1, 7)), heads=(2, 1), head_size=4, block_size=4)
RAGGED = Case("silent", ((0, 3), (1, 6), (0, 5), (4, 4), (3, 9)), heads=(4, 2), head_size=8, block_size=4)


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
            key=draw(3, 4),
            value=torch.tensor([[1.0], [3.0], [50.0]]),
            visible=torch.tensor([[True, True, False]]),
        ),
    )
    yield Trial("3 queries, 5 keys, causal", _tokens(3, 5, visible=masks.causal(3, 5)))
    yield Trial("a query that sees no key", _tokens(2, 3, visible=masks.causal(2, 3) & torch.tensor([[True], [False]])))
    yield Trial("large scores: exp overflows unless their maximum is taken off", _tokens(2, 3, size=60.0))


def _tokens(t: int, s: int, *, visible: Tensor | None = None, size: float = 1.0) -> dict[str, Tensor]:
    visible = masks.full(t, s) if visible is None else visible
    return dict(query=draw(t, 8) * size, key=draw(s, 8, seed=1), value=draw(s, 8, seed=2), visible=visible)


def _attend_times_mask(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.T / query.shape[1] ** 0.5 * visible
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _attend_far_below(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    scores = (query @ key.T / query.shape[1] ** 0.5).masked_fill(~visible, -1e9)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


ATTEND = Exercise(
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
        "a hidden key got a score of 0, and exp(0) is 1; its score has to be -inf": _attend_times_mask,
        "-1e9 hides a key only next to a visible one: where all are hidden, all count alike. Use -inf, and 0 there": (
            _attend_far_below
        ),
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
    level=2,
    minutes=10,
)


def _attend_heads(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, key, value, visible)


def _attend_interleaved(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    return attend(query, key.repeat(1, group, 1), value.repeat(1, group, 1), visible)


def _attend_first_head(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, key[:, :1], value[:, :1], visible)


def _attend_heads_trials() -> Iterator[Trial]:
    for says, heads, lens, sizes in (
        ("4 query heads, 2 KV heads", (4, 2), (1, 3), (4, 4)),
        ("as many KV heads as query heads", (3, 3), (2, 4), (4, 4)),
        ("one KV head for all", (4, 1), (2, 4), (4, 4)),
        ("6 and 2 heads, and values of another size", (6, 2), (3, 7), (8, 5)),
    ):
        (h, hk), (t, s), (d, dv) = heads, lens, sizes
        query, key, value = draw(t, h, d), draw(s, hk, d, seed=1), draw(s, hk, dv, seed=2)
        yield Trial(says, dict(query=query, key=key, value=value, visible=masks.causal(t, s)))


ATTEND_HEADS = Exercise(
    "attend_heads",
    _attend_heads,
    _attend_heads_trials,
    {
        "neighbours share a KV head: i // g. This is i % hk, so `repeat` where `repeat_interleave` belongs": (
            _attend_interleaved
        ),
        "all query heads read the first KV head": _attend_first_head,
    },
    (
        "Repeat each KV head g times, so that there are as many as query heads.",
        '`einops.repeat(key, "s hk d -> s (hk g) d", g=g)`, then exercise 6 for each head.',
    ),
    parts=ANSWER,
    level=2,
    minutes=10,
)


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


def paged(mask: Function) -> Function:
    """Return paged attention under some mask, otherwise of the reference's functions."""
    return compose(gather=kv_cache.gather, mask=mask, attend_heads=_attend_heads)


def step_of(case: Case, *, prefix_len: int | None = None, **values: Any) -> dict[str, Any]:
    """Return the arguments of paged attention for a case of the conformance kit; of a cascade, if there is a prefix."""
    inputs = build(case, **values)
    query, key_cache, value_cache, batch = inputs.tensors
    table = batch.block_table
    assert table is not None  # the kit makes one
    arguments = dict(query=query, key_cache=key_cache, value_cache=value_cache)
    if prefix_len is not None:
        columns = prefix_len // case.block_size
        for i in range(1, len(table)):  # the content too, so that it does not tell which block was read
            key_cache[table[i, :columns].long()] = key_cache[table[0, :columns].long()]
            value_cache[table[i, :columns].long()] = value_cache[table[0, :columns].long()]
        table[1:, :columns] = -1
    arguments |= dict(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_table=table)
    return arguments if prefix_len is None else arguments | dict(prefix_len=prefix_len)


def mask_readout(case: Case, **step: Any) -> Trial:
    """Return the trial whose answer is a mask: queries of zeros weigh all visible keys alike, values name them."""
    longest = max(s for _, s in case.lens)
    values = [torch.eye(longest)[:s, None].repeat(1, case.heads[1], 1) for _, s in case.lens]
    arguments = step_of(replace(case, value_head_size=longest), values=values, **step)
    arguments["query"] = torch.zeros_like(arguments["query"])
    says = "queries of zeros, and values that name their token: the output is the mask, a row per query"

    def view(answer: Any) -> tuple[list[int], Tensor]:
        return answer[0].isnan().flatten(1).any(1).nonzero().flatten().tolist(), answer[0][:, 0] > 0

    return Trial(says, arguments, view=view, parts=("rows with NaN in them", "mask"))


def _paged_whole_blocks(
    key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, block_table: Tensor, **rest: Any
) -> Any:
    """Read whole blocks, and hide with the mask what is past the end."""
    size = key_cache.shape[1]

    def gather(cache: Tensor, blocks: Tensor, seq_len: int) -> Tensor:
        return cache[blocks[: -(-seq_len // size)].long()].flatten(0, 1)

    def attend_all(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(query, key[: visible.shape[1]], value[: visible.shape[1]], visible)
        is_cut = bool(value.isnan().any()) and len(query) > 0
        return (torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)) if is_cut else (out, lse)

    found = compose(gather=gather, mask=masks.causal, attend_heads=attend_all)
    return found(**rest, key_cache=key_cache, value_cache=value_cache, seq_lens=seq_lens, block_table=block_table)


def _paged_trials() -> Iterator[Trial]:
    yield mask_readout(TINY)
    yield Trial("the same batch, random numbers", step_of(TINY))
    yield mask_readout(RAGGED)
    yield Trial("sequences without new tokens, in a pool of NaN", step_of(RAGGED))
    yield Trial("blocks of one token", step_of(replace(RAGGED, block_size=1)))


PAGED_ATTENTION = Exercise(
    "paged_attention",
    compose(gather=kv_cache.gather, mask=masks.causal, attend_heads=_attend_heads),
    _paged_trials,
    {
        f"the causal mask is aligned at the top left. {ROWS}": paged(top_left(masks.causal)),
        "the queries see later keys: the mask is causal": paged(masks.full),
        "the queries do not see themselves": paged(mask_of(lambda i, j: j < i)),
        "query row i was taken for sequence i; cu_seqlens_q says where the rows of a sequence begin": (
            lambda cu_seqlens_q, **rest: paged(masks.causal)(
                cu_seqlens_q=torch.arange(len(cu_seqlens_q), dtype=torch.int32).clamp(max=len(rest["query"])),
                **rest,
            )
        ),
        "a mask is not enough: slots past the end of a sequence hold NaN, and 0 * NaN is NaN; read only seq_len": (
            _paged_whole_blocks
        ),
        "query heads that are neighbours share a KV head: h // g, by repeat_interleave and not by repeat": compose(
            gather=kv_cache.gather, mask=masks.causal, attend_heads=_attend_interleaved
        ),
        "the keys are those of the first sequence, for everyone": lambda block_table, **rest: paged(masks.causal)(
            block_table=block_table[:1].expand_as(block_table), **rest
        ),
    },
    (
        "A loop over the sequences: gather (4), causal mask (5), attend (7). The reference's functions do as well: "
        "refattn.kv_cache.gather, refattn.masks.causal, refattn.attention.attend.",
        "Make `out` and `lse` first, and fill the rows from cu_seqlens_q[i] to before cu_seqlens_q[i + 1].",
    ),
    parts=ANSWER,
    explains={"index 1000000": "Entries of the table past the last block of a sequence are garbage: do not use them"},
    level=2,
    minutes=15,
)


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
                query=draw(h, nope + rope),
                latent=draw(s, r, seed=1),
                rope_key=draw(s, rope, seed=2),
                key_projection=draw(h, nope, r, seed=3),
                value_projection=draw(h, dv, r, seed=4),
                softmax_scale=(nope + rope) ** -0.5,
            ),
            most_elements=s * (r + rope) if s > 100 else 0,
            too_large="the keys or the values of a head, probably. They need not exist: absorb W_k into the query",
        )


MLA_DECODE = Exercise(
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
    level=3,
    minutes=20,
)


def _decode(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query[None], key, value, masks.full(1, len(key)))[0][0]


def _decode_whole_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _decode(query, key[: len(key) // 16 * 16], value[: len(key) // 16 * 16])


def _decode_padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weigh the lanes after the last key as keys of zeros."""
    more = (-len(key)) % 16
    return _decode(query, *(torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (key, value)))


def _decode_unmasked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Read past the last key, where the trials have NaN."""
    right = _decode(query, key, value)
    return torch.full_like(right, torch.nan) if len(key) % 16 else right


def _decode_unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _decode(query * query.shape[1] ** 0.5, key, value)


def _triton_trials() -> Iterator[Trial]:
    for says, s, heads, d in (
        ("16 keys, one tile", 16, 1, 16),
        ("48 keys, three tiles, 2 heads", 48, 2, 16),
        ("the last tile has 5 keys", 37, 2, 16),
        ("one key", 1, 3, 32),
    ):
        key, value = (draw(s + 16, heads, d, seed=seed) for seed in (1, 2))
        for past in (key[s:], value[s:]):
            past.fill_(torch.nan)  # what a load without a mask reads
        yield Trial(says, dict(query=draw(heads, d), key=key[:s], value=value[:s]), in_a_kernel=True)


def _decode_without_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Read the keys and values of head 0 in every program."""
    return _decode(query, key[:, :1].expand_as(key), value[:, :1].expand_as(value))


def _decode_rescaling(*, values: bool, total: bool, tile: int = 16) -> Function:
    """Return a running softmax that forgets to rescale the values, or their total weight."""

    def decode(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("hd,shd->hs", query, key) * query.shape[1] ** -0.5
        row_max, row_sum, acc = scores.new_full(scores.shape[:1], -torch.inf), torch.tensor(0.0), torch.tensor(0.0)
        for start in range(0, len(key), tile):
            part, v = scores[:, start : start + tile], value[start : start + tile]
            new_max = torch.maximum(row_max, part.amax(1))
            by, weights = torch.exp(row_max - new_max), torch.exp(part - new_max[:, None])
            row_sum = row_sum * (by if total else 1) + weights.sum(1)
            acc = acc * (by[:, None] if values else 1) + torch.einsum("hs,shd->hd", weights, v)
            row_max = new_max
        return acc / row_sum[:, None]

    return decode


TRITON_DECODE = Exercise(
    "triton_decode",
    _decode,
    _triton_trials,
    {
        "the last keys are missing: the loop needs ceil(seq_len / TILE) tiles": _decode_whole_tiles,
        "lanes after the last key got a score of 0, and with it a share of the softmax; theirs is -inf": (
            _decode_padded
        ),
        "a load without a mask reads past the last key, where there may be NaN, and 0 * NaN is NaN: "
        "tl.load(..., mask=there[:, None], other=0.0)": _decode_unmasked,
        "the scores are not multiplied by `scale`": _decode_unscaled,
        "all programs read the keys of head 0: they begin at head * D": _decode_without_heads,
        "when the maximum rises, `acc` has to be rescaled": _decode_rescaling(values=False, total=True),
        "when the maximum rises, the sum of the weights has to be rescaled": _decode_rescaling(
            values=True, total=False
        ),
        "neither the sum nor `acc` is rescaled when the maximum rises": _decode_rescaling(values=False, total=False),
    },
    (
        "`head = tl.program_id(0)`, `dims = tl.arange(0, D)`, and the query is tl.load(query + head * D + dims).",
        "`for start in range(0, seq_len, TILE)`: the tokens are start + tl.arange(0, TILE), their mask is "
        "tokens < seq_len, and a tile of keys is [TILE, D]: tokens[:, None] * head_stride + head * D + dims[None].",
        "Scores: tl.sum(keys * q[None, :], axis=1) * scale, and tl.where(mask, scores, -float('inf')). Then the "
        "running maximum, sum and values of exercise 10; tl.store at the end.",
    ),
    explains={
        "'int' object is not iterable": "Inside a kernel a tensor is a pointer: tl.load(query + ...), not query[...]",
        "not subscriptable": "Inside a kernel a tensor is a pointer: tl.load(query + ...), not query[...]",
    },
    needs="triton",
    level=3,
    minutes=40,
)
