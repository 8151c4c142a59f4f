"""Kernels in Triton, each a step of a ladder: a reduction of splits, the heads of a group, causal tiles, a state."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from refattn import masks
from refattn.attention import attend
from refattn.merge import merge
from twinattn.course.exercises.exercise import Exercise, Function, Trial, draw
from twinattn.course.exercises.functions.attention import TRITON_DECODE

POINTERS = {
    "'int' object is not iterable": "Inside a kernel a tensor is a pointer: tl.load(query + ...), not query[...]",
    "not subscriptable": "Inside a kernel a tensor is a pointer: tl.load(query + ...), not query[...]",
}


# --- the reduction of splits ---


def _reduce(outs: Float[Tensor, "p h d"], lses: Float[Tensor, "p h"]) -> Float[Tensor, "h d"]:
    out, _ = merge([x[None] for x in outs], [x[None] for x in lses])
    return out[0]


def _reduce_trials() -> Iterator[Trial]:
    def trial(says: str, lses: Tensor) -> Trial:
        parts, heads = lses.shape
        past = torch.full((4, heads), torch.nan)  # what a load without a mask reads
        outs = torch.cat([draw(parts, heads, 16), past[..., None].expand(4, heads, 16)])
        return Trial(says, dict(outs=outs[:parts], lses=torch.cat([lses, past])[:parts]), in_a_kernel=True)

    yield trial("2 parts of one head, of equal weight", torch.zeros(2, 1))
    yield trial("4 parts of 2 heads, one tile", draw(4, 2, seed=1))
    yield trial("7 parts of 3 heads: the last tile has 3", draw(7, 3, seed=1))
    yield trial("log-sum-exps of a thousand, of which exp is infinite", 1000 + draw(5, 2, seed=1))
    last_alone = torch.full((6, 2), -torch.inf)
    last_alone[5] = 1.0
    one_empty = draw(6, 2, seed=1)
    one_empty[2:4, 0] = -torch.inf
    for says, lses in (
        ("parts that saw no key hold anything, here NaN", one_empty),
        ("only the last part saw a key", last_alone),
    ):
        tried = trial(says, lses)
        tried.arguments["outs"][lses == -torch.inf] = torch.nan
        yield tried


def _reduce_naively(outs: Tensor, lses: Tensor) -> Tensor:
    """Take exponentials without the maximum taken off."""
    weights = lses.exp()
    return (weights[..., None] * outs.where(lses[..., None] > -torch.inf, 0.0)).sum(0) / weights.sum(0)[:, None]


def _reduce_with_empty(outs: Tensor, lses: Tensor) -> Tensor:
    """Multiply the outputs of empty parts by 0."""
    return (lses.softmax(0)[..., None] * outs).sum(0)


def _reduce_whole_tiles(outs: Tensor, lses: Tensor) -> Tensor:
    count = len(outs) // 4 * 4
    return _reduce(outs[:count], lses[:count]) if count else torch.full_like(outs[0], torch.nan)


def _reduce_first_tile(outs: Tensor, lses: Tensor) -> Tensor:
    return _reduce(outs[:4], lses[:4])


def _reduce_padded(outs: Tensor, lses: Tensor) -> Tensor:
    """Weigh the lanes after the last part as parts with a log-sum-exp of 0."""
    more = -len(outs) % 4
    return _reduce(*(torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (outs, lses)))


def _reduce_past(outs: Tensor, lses: Tensor) -> Tensor:
    """Read past the last part, where the trials have NaN."""
    right = _reduce(outs, lses)
    return torch.full_like(right, torch.nan) if len(outs) % 4 else right


def _reduce_nan(outs: Tensor, lses: Tensor) -> Tensor:
    """Take the maximum of a first tile that is all -inf off itself."""
    right = _reduce(outs, lses)
    return right.where((lses[:4] > -torch.inf).any(0)[:, None], torch.nan)


TRITON_REDUCE = Exercise(
    "triton_reduce",
    _reduce,
    _reduce_trials,
    {
        "all parts count alike; each counts by the exponential of its log-sum-exp": lambda outs, lses: outs.mean(0),
        "the sum is not divided by the sum of the weights": lambda outs, lses: (
            (lses - lses.amax(0)).exp()[..., None] * outs.where(lses[..., None] > -torch.inf, 0.0)
        ).sum(0),
        "only the first tile of parts is read": _reduce_first_tile,
        "the last parts are missing: the loop needs ceil(num_parts / PARTS) tiles": _reduce_whole_tiles,
        "a load without a mask reads past the last part: tl.load(..., mask=part < num_parts, other=-float('inf'))": (
            _reduce_past
        ),
        "lanes after the last part got a weight; their log-sum-exp is -inf": _reduce_padded,
        "exp of a large log-sum-exp is inf: take the highest so far off first": _reduce_naively,
        "the weight of an empty part is 0, and 0 * NaN is NaN: do not load its output": _reduce_with_empty,
        "while no part has seen a key, the maximum is -inf, and -inf - -inf is NaN: take 0 off then": _reduce_nan,
    },
    (
        "It is exercise 10's running softmax: log-sum-exps are the scores, and partial outputs the values.",
        "`for first in range(0, num_parts, PARTS)`: the parts are first + tl.arange(0, PARTS), their log-sum-exps at "
        "lses + part * HEADS + head, with other=-float('inf').",
        "Load outputs with the mask `scores > -float('inf')`, other=0.0; and take `tl.where(new_max == -float('inf'), "
        "0.0, new_max)` off, not new_max.",
    ),
    explains=POINTERS,
    needs="triton",
    level=2,
    minutes=25,
)


# --- the heads of a group ---


def _of_group(decode: Function) -> Function:
    """Return a decode whose query heads share KV heads, given one in which each has its own."""

    def decode_group(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[0] // key.shape[1]
        out: Tensor = decode(query, *(x.repeat_interleave(group, 1) for x in (key, value)))
        return out

    return decode_group


_group = _of_group(TRITON_DECODE.reference)


def _group_trials() -> Iterator[Trial]:
    for says, s, heads, kv_heads, d in (
        ("16 keys, 2 heads over one KV head", 16, 2, 1, 16),
        ("48 keys, three tiles, 4 heads over 2", 48, 4, 2, 16),
        ("37 keys, the last tile has 5; 6 heads over 2", 37, 6, 2, 16),
        ("one key, 20 heads over one: more than 16 rows", 1, 20, 1, 16),
    ):
        key, value = (draw(s + 16, kv_heads, d, seed=seed) for seed in (1, 2))
        query = draw(heads + 32, d)
        for past in (key[s:], value[s:], query[heads:]):
            past.fill_(torch.nan)  # what a load without a mask reads
        yield Trial(says, dict(query=query[:heads], key=key[:s], value=value[:s]), in_a_kernel=True)


def _group_interleaved(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let every hk-th head share a KV head."""
    group = query.shape[0] // key.shape[1]
    out: Tensor = TRITON_DECODE.reference(query, *(x.repeat(1, group, 1) for x in (key, value)))
    return out


OF_DECODE = {  # mistakes of exercise 23 that can be made again
    says: _of_group(mistake) for says, mistake in TRITON_DECODE.mistakes.items() if "of head 0" not in says
}

TRITON_GROUP = Exercise(
    "triton_group",
    _group,
    _group_trials,
    {
        "neighbours share a KV head: those of KV head j begin at j * GROUP": _group_interleaved,
        "all programs read the keys of KV head 0: they begin at kv_head * D": _of_group(
            lambda query, key, value: TRITON_DECODE.reference(query, *(x[:, :1].expand_as(x) for x in (key, value)))
        ),
        **OF_DECODE,
    },
    (
        "Rows of the tile: in_group = tl.arange(0, ROWS), head = kv_head * GROUP + in_group, and only those with "
        "in_group < GROUP are loaded and stored.",
        "Scores are a product of tiles, [ROWS, TILE]: tl.dot(q, tl.trans(keys), input_precision='ieee') * scale; the "
        "output is [ROWS, D]: tl.dot(weights, values, acc * rescale[:, None], input_precision='ieee').",
        "row_max and row_sum have an element per row: tl.full([ROWS], -float('inf'), tl.float32), and tl.max(scores, "
        "1).",
    ),
    explains=POINTERS,
    needs="triton",
    level=3,
    minutes=40,
)


# --- causal tiles ---


def _causal(query: Float[Tensor, "t d"], key: Float[Tensor, "s d"], value: Float[Tensor, "s d"]) -> Tensor:
    return _causal_by(masks.causal(len(query), len(key)), query, key, value)


def _causal_by(visible: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend under a mask; a value that a row does not see has no part in it, whatever it is."""
    rows = [
        attend(query[i : i + 1, None], key[:, None], value[:, None], visible[i : i + 1])[0] for i in range(len(query))
    ]
    return torch.cat(rows)[:, 0]


def _causal_trials() -> Iterator[Trial]:
    for says, t, s in (
        ("16 queries of 16 keys: one tile, on the diagonal", 16, 16),
        ("the last 20 of 40 tokens: two tiles, and a context", 20, 40),
        ("50 of 50 tokens: the last step has 2 keys", 50, 50),
        ("one query after 36 keys", 1, 37),
    ):
        yield _causal_trial(says, t, s)
    infinite = _causal_trial("33 of 33; the last value is infinite, which only the last query sees", 33, 33)
    infinite.arguments["value"][-1] = torch.inf
    yield infinite


def _causal_trial(says: str, t: int, s: int) -> Trial:
    query, key, value = draw(t + 16, 16), draw(s + 16, 16, seed=1), draw(s + 16, 16, seed=2)
    for past in (query[t:], key[s:], value[s:]):
        past.fill_(torch.nan)
    return Trial(says, dict(query=query[:t], key=key[:s], value=value[:s]), in_a_kernel=True)


def _causal_unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _causal(query * query.shape[1] ** 0.5, key, value)


def _causal_top_left(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    t, s = len(query), len(key)
    return _causal_by(torch.arange(s)[None] <= torch.arange(t)[:, None], query, key, value)


def _causal_strict(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    t, s = len(query), len(key)
    visible = masks.causal(t, s) & ~torch.eye(s, dtype=torch.bool)[s - t :]
    return _causal_by(visible, query, key, value).masked_fill(~visible.any(1)[:, None], torch.nan)


def _causal_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _causal_by(masks.full(len(query), len(key)), query, key, value)


def _causal_whole_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Leave out the steps that are not full, where the diagonal may be."""
    t, s = len(query), len(key)
    ends = (s - t + torch.arange(t) // 16 * 16 + 16).clamp(max=s) // 16 * 16
    return _causal_by(masks.causal(t, s) & (torch.arange(s)[None] < ends[:, None]), query, key, value)


def _causal_not_skipped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Multiply values after the last row of a tile by weights of 0."""
    right, t, s = _causal(query, key, value), len(query), len(key)
    ends = (s - t + torch.arange(t) // 16 * 16 + 16).clamp(max=s)
    is_infinite = value.isinf().any(1)
    after = (torch.arange(s)[None] >= ends[:, None]) & is_infinite[None]
    return right.masked_fill(after.any(1)[:, None], torch.nan)


TRITON_CAUSAL = Exercise(
    "triton_causal",
    _causal,
    _causal_trials,
    {
        "the scores are not multiplied by `scale`": _causal_unscaled,
        "no key is hidden: a query sees the keys up to its own position": _causal_all,
        "a token sees itself, too: j <= position": _causal_strict,
        "the mask is aligned at the top left: row i is at position seq_len - query_len + i": _causal_top_left,
        "the last step of a tile is missing: it ends after the last key that its last row sees": _causal_whole_tiles,
        "steps after the last row of a tile have to be skipped: a weight of 0 times an infinite value is NaN": (
            _causal_not_skipped
        ),
    },
    (
        "Rows of program i: first_row + tl.arange(0, ROWS), with first_row = i * ROWS; row r is at position "
        "seq_len - query_len + r.",
        "The loop ends at tl.minimum(seq_len - query_len + first_row + ROWS, seq_len), past the last key that some row "
        "sees. Load keys and values with the mask j < end.",
        "Hide keys after the products: tl.where(j[None, :] <= positions[:, None], scores, -float('inf')). The rest is "
        "exercise 36 with rows that are queries.",
    ),
    explains=POINTERS,
    needs="triton",
    level=3,
    minutes=40,
)


# --- a state ---


def _fold(
    query: Float[Tensor, "t dk"],
    key: Float[Tensor, "t dk"],
    value: Float[Tensor, "t dv"],
    decay: Float[Tensor, "t"],
    beta: Float[Tensor, "t"],
    state: Float[Tensor, "dv dk"],
    *,
    wrong: str = "",
) -> tuple[Tensor, Tensor]:
    outs = []
    for q, k, v, a, b in zip(query, key, value, decay, beta, strict=True):
        before = state
        faded = state if wrong == "never fades" else a * state
        seen = before @ k if wrong == "seen early" else 0.0 if wrong == "whole" else faded @ k
        state = faded + b * torch.outer(v - seen, k)
        outs.append((faded if wrong == "read early" else state) @ q)
    return torch.stack(outs), before if wrong == "last token" else state


def _fold_first_rows(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Let every program have the first rows; the others are never written."""
    out, after = _fold(query, key, value, decay, beta, state)
    out[:, 4:], after[4:] = torch.nan, torch.nan
    return out, after


def _fold_trials() -> Iterator[Trial]:
    for says, t, dv, dk in (
        ("one token, four rows: one program", 1, 4, 8),
        ("one token, eight rows: two programs", 1, 8, 8),
        ("six tokens", 6, 8, 16),
        ("three tokens; the second forgets everything before it", 3, 4, 8),
    ):
        decay, beta = 0.5 + 0.4 * torch.sigmoid(draw(t, seed=4)), torch.sigmoid(draw(t, seed=5))
        if says.endswith("before it"):
            decay[1] = 0.0
        rows = dict(query=draw(t, dk), key=normalize(draw(t, dk, seed=1), dim=1), value=draw(t, dv, seed=2))
        gates = dict(decay=decay, beta=beta, state=draw(dv, dk, seed=3))
        yield Trial(says, rows | gates, in_a_kernel=True)


TRITON_FOLD = Exercise(
    "triton_fold",
    _fold,
    _fold_trials,
    {
        "the state never fades": partial(_fold, wrong="never fades"),
        "the value is written whole; the delta rule writes what is missing of it": partial(_fold, wrong="whole"),
        "the state fades first, and then answers to the key": partial(_fold, wrong="seen early"),
        "a token sees itself: read after the write": partial(_fold, wrong="read early"),
        "the state that is stored lacks the last token": partial(_fold, wrong="last token"),
        "all programs have the first rows: those of program i begin at i * ROWS": _fold_first_rows,
    },
    (
        "The tile stays in registers: rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS), columns = tl.arange(0, DK), "
        "loaded before the loop and stored after it.",
        "Of a token a program needs the whole key and query, [DK], and its rows of the value, [ROWS]. What the state "
        "returns for a key is tl.sum(tile * k[None, :], 1).",
        "Write with an outer product: written[:, None] * k[None, :]. Every output goes to out + token * DV + rows.",
    ),
    parts=("out", "state"),
    explains=POINTERS,
    needs="triton",
    level=2,
    minutes=25,
)
