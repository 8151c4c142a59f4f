"""Compressed keys: entries from the rows of their tokens, and attention to a window and to entries in one softmax."""

from itertools import accumulate

import torch
from torch import Tensor

from refattn import compressed
from refattn.entries import CompressedPlan
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, LENS, ODD_LENS, Drawn, batch_of, padding_of, rows_of, slots_of
from twinattn.kit.operations.operation import IN, Answers, Case, Inputs, Mistake, Operation, Special, Without
from twinattn.kit.operations.scores import EMPTY, PADDING, expanded, options_of, paged
from twinattn.kit.operations.tiles import BLOCKS, Dimension, of_lengths, of_size
from twinattn.kit.operations.written import FP8

CONTENTS = {**IN, "plan": ("window_size", "positions", "ratio", "overlap")}
ENTRY_LENS = (*LENS, ((5, 12), (1, 8), (2, 7)), ((9, 30), (3, 3)))


def entries_of(a: Arguments) -> list[tuple[int, int]]:
    """List how many entries of each sequence are complete before the step, and after it."""
    return [(max(s - q1 + q0, 0) // a["ratio"], s // a["ratio"]) for q0, q1, s in rows_of(a)]


def draw_tables(drawn: Drawn) -> tuple[Arguments, dict[str, Tensor], Tensor, Tensor, tuple[int, int]]:
    """Draw a batch, its blocks and those of its entries; return masks of unused slots and both numbers of blocks."""
    case = drawn.case
    a, past, free, n = paged(drawn)
    a |= dict(ratio=case["ratio"], entry_block_size=case["entry_block_size"])
    lens = [after for _, after in entries_of(a)]
    table, past_entries, m = drawn.table(lens, case["entry_block_size"])
    a["entry_table"] = table["block_table"]
    past["entry_table"] = past_entries["block_table"]
    free_entries = torch.ones(m, case["entry_block_size"], dtype=torch.bool)
    return a, past, free, free_entries, (n, m)


def entry_slots(a: Arguments, i: int, count: int) -> list[int]:
    """List the slots of the entries of a sequence."""
    return slots_of(dict(block_table=a["entry_table"]), i, count, a["entry_block_size"])


def plan_of(a: Arguments) -> CompressedPlan:
    """Return the plan of a step, with selected entries if there are positions."""
    plan = compressed.plan(
        batch_of(a),
        ratio=a["ratio"],
        overlap=a.get("overlap", False),
        window_size=a.get("window_size", (0, 0)),
        entry_table=a["entry_table"],
        block_size=a["block_size"],
        entry_block_size=a["entry_block_size"],
    )
    return plan if a.get("positions") is None else compressed.select_entries(plan, a["positions"])


# --- entries ---


def draw_entries(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw rows of values and gates, of which those of the new entries are read."""
    drawn = Drawn(case, dtype)
    a, past, free, _, (n, _) = draw_tables(drawn)
    size, p = case["head_size"], case["block_size"]
    width = 2 * size if case["overlap"] else size
    a |= dict(
        block_size=p,
        overlap=case["overlap"],
        row_cache=drawn.normal(n, p, 2 * width),
        bias=drawn.normal(case["ratio"], width, dtype=torch.float32) if case["bias"] else None,
    )
    unread = torch.ones_like(free)
    for i, (before, after) in enumerate(entries_of(a)):
        if after > before:
            first = max(before - case["overlap"], 0) * case["ratio"]
            for slot in slots_of(a, i, after * case["ratio"], p)[first:]:
                unread[slot // p, slot % p] = False
    return Inputs(a, past | dict(row_cache=expanded(unread, a["row_cache"])))


def entries(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return the new entries of all sequences, one after the other, and zeros up to the most that there may be."""
    ratio, overlap, p = a["ratio"], a["overlap"], a["row_cache"].shape[1]
    width = a["row_cache"].shape[2] // 2
    size = width // 2 if overlap else width
    rows = a["row_cache"].flatten(0, 1).to(compute)
    bias = torch.zeros(ratio, width, dtype=compute) if a["bias"] is None else a["bias"].to(compute)
    bias = bias * 0 if form == "no bias" else bias
    out = torch.zeros(num_rows(a), size, dtype=compute)
    row = 0
    for i, ((before, after), (q0, q1, s)) in enumerate(zip(entries_of(a), rows_of(a), strict=True)):
        slots = slots_of(a, i, after * ratio, p)
        for entry in range(before, after):
            first = max(entry - 1, 0) * ratio if overlap else entry * ratio
            tokens = torch.arange(first, (entry + 1) * ratio)
            read, own = rows[slots][tokens], tokens >= entry * ratio
            value, gate = read[:, :width], read[:, width:] + bias[tokens % ratio]
            if form == "bias by row":
                gate = read[:, width:] + bias[(tokens % p) % ratio]
            if form == "one step":
                gate = gate.masked_fill((tokens < s - (q1 - q0))[:, None], -torch.inf)
            if overlap:
                later = ~own if form == "halves swapped" else own
                value, gate = (torch.where(later[:, None], x[:, size:], x[:, :size]) for x in (value, gate))
                if entry == 0 and form == "zeros before":
                    value, gate = (torch.cat([torch.zeros(ratio, size, dtype=compute), x]) for x in (value, gate))
            weight = gate.softmax(1 if form == "over channels" else 0)
            out[row] = (weight * value).sum(0)
            row += 1
    return dict(out=out)


def num_rows(a: Arguments) -> int:
    """Return the rows of the output: enough for any lengths of as many sequences and tokens."""
    tokens, sequences = int(a["cu_seqlens_q"][-1]), len(a["seq_lens"])
    return min(tokens, (tokens + sequences * (a["ratio"] - 1)) // a["ratio"])


def in_steps(a: Arguments) -> list[tuple[Arguments, dict[str, tuple[list[int], list[int]]]]]:
    """Split a step into two: return the arguments of each, and the rows of the whole output with those in the step."""
    lens, whole = rows_of(a), entries_of(a)
    firsts = [0, *accumulate(after - before for before, after in whole)]
    steps: list[tuple[Arguments, dict[str, tuple[list[int], list[int]]]]] = []
    for ends in ([s - (q1 - q0 - (q1 - q0) // 2) for q0, q1, s in lens], [s for _, _, s in lens]):
        begins = steps[-1][0]["seq_lens"].tolist() if steps else [s - (q1 - q0) for q0, q1, s in lens]
        new = [end - begin for begin, end in zip(begins, ends, strict=True)]
        cu_seqlens_q = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
        step = a | dict(cu_seqlens_q=cu_seqlens_q, seq_lens=torch.tensor(ends, dtype=torch.int32))
        step |= dict(max_query_len=max(new, default=0), max_seq_len=max(ends, default=0))
        completed = [
            first + entry - before
            for first, (before, _), (now, after) in zip(firsts, whole, entries_of(step), strict=False)
            for entry in range(now, after)
        ]
        steps.append((step, dict(out=(completed, list(range(len(completed)))))))
    return steps


ENTRIES = Operation(
    name="compress",
    function="compress",
    signature="`row_cache` `[n, p, 2w]`, a value and its gate per token; `bias` `[ratio, w]` of the gates, or None; "
    "`ratio`, `overlap` (an entry has `w / 2` elements then), `cu_seqlens_q`, `seq_lens`, `block_table` and the like, "
    "or a `plan`; it returns `[e, d]`, the entries that the new tokens complete, then zeros up to `e = min(t, (t + b * "
    "(ratio - 1)) // ratio)` rows",
    draw=draw_entries,
    oracle=entries,
    sizes=dict(
        lens=ENTRY_LENS,
        block_size=(4, 1, 16, 3),
        entry_block_size=(2, 1, 5),
        ratio=(4, 1, 2, 3, 8),
        overlap=(False, True),
        head_size=(16, 64, 5),
        bias=(True, False),
    ),
    without=dict(bias=Without(False, ("bias",)), overlap=Without(False, ("overlap",))),
    contents=CONTENTS,
    dimensions=of_lengths(keys=2049, queries=513, sequences=129, block_size=4, head_size=5)
    | dict(ratio=Dimension(lambda n: dict(ratio=n, lens=((n, 2 * n), (3, n + 1)), head_size=5), 257))
    | {name: of_size(name, BLOCKS, lens=((2, 300), (1, 9))) for name in ("block_size", "entry_block_size")}
    | dict(head_size=of_size("head_size", 513)),
    specials=(
        Special("empty", "Sequences may have no token, and a step no entry.", dict(lens=(*ODD_LENS, ((1, 3),)))),
        Special("one by one", "The tokens of an entry come in steps.", dict(lens=(((1, 8), (1, 4), (1, 16), (1, 7)),))),
        Special(
            "first entry", "Entry 0 has no tokens before its own.", dict(lens=(((9, 9), (1, 4)),), overlap=(True,))
        ),
    ),
    derived={**BATCH, "plan": plan_of},
    strided=("row_cache", "bias"),
    pools=("row_cache",),
    nan=("row_cache",),
    types=dict(out="row_cache"),
    steps=in_steps,
    size=lambda a: 4.0,
    mistakes=(
        Mistake(
            "entry-of-one-step",
            "Rows of earlier steps are lost, so that an entry is made of those of the last step.",
            lambda a, c: entries(a, c, "one step"),
        ),
        Mistake(
            "zeros-before-entry-0",
            "Entry 0 also has zeros under gates of 0, for tokens that do not exist.",
            lambda a, c: entries(a, c, "zeros before"),
        ),
        Mistake(
            "halves-swapped",
            "The first halves of rows are those of an entry's own tokens.",
            lambda a, c: entries(a, c, "halves swapped"),
        ),
        Mistake(
            "bias-by-row-of-block",
            "The bias of a token is chosen by its row in a block.",
            lambda a, c: entries(a, c, "bias by row"),
        ),
        Mistake("gates-without-bias", "The bias is not added.", lambda a, c: entries(a, c, "no bias")),
        Mistake(
            "softmax-over-channels",
            "The softmax of gates is over channels.",
            lambda a, c: entries(a, c, "over channels"),
        ),
    ),
)


# --- attention ---


def draw_compressed(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw queries, keys of windows, and entries, all of which or some of which a query sees."""
    drawn = Drawn(case, dtype)
    a, past, free, free_entries, (n, m) = draw_tables(drawn)
    t, h, size, p = int(a["cu_seqlens_q"][-1]) + case["padding"], case["heads"], case["head_size"], case["block_size"]
    kind, scales = FP8.get(case["stored"]), (0.0713, 0.13)
    if kind is None:
        scales = 1.0, 1.0

    def stored(*shape: int, scale: float) -> Tensor:
        return drawn.normal(*shape) if kind is None else (drawn.normal(*shape, dtype=torch.float32) / scale).to(kind)

    a |= dict(
        query=drawn.normal(t, h, size),
        cache=stored(n, p, size, scale=scales[0]),
        entry_cache=stored(m, case["entry_block_size"], size, scale=scales[1]),
        cache_scale=scales[0],
        entry_scale=scales[1],
        block_size=p,
        window_size=case["window_size"],
        softmax_scale=size**-0.5 if case["softmax_scale"] is None else case["softmax_scale"],
        softcap=case["softcap"],
        sinks=drawn.normal(h, dtype=torch.float32) if case["sinks"] else None,
        alibi_slopes=None,
        return_lse=True,
        positions=None,
    )
    unread = {"query": padding_of(a, a["query"])}
    if case["positions"]:
        a["positions"] = torch.full((t, 3), -1, dtype=torch.int32)
        for (q0, q1, _), (_, after) in zip(rows_of(a), entries_of(a), strict=True):
            for row in range(q0, q1):
                chosen = drawn.order(after)[: int(drawn.whole(0, 4, 1))]
                a["positions"][row, 3 - len(chosen) :] = torch.tensor(chosen, dtype=torch.int32)
        unread["positions"] = padding_of(a, a["positions"])
    hidden, hidden_entries = torch.ones_like(free), free_entries
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        window, complete = seen_of(a, i)
        for mask, slots, pool in (
            (window, slots_of(a, i, s, p), hidden),
            (complete, entry_slots(a, i, complete.shape[1]), hidden_entries),
        ):
            for j in mask.any(0).nonzero().flatten().tolist() if q1 > q0 else []:
                pool[slots[j] // pool.shape[1], slots[j] % pool.shape[1]] = False
    unread |= dict(cache=expanded(hidden, a["cache"]), entry_cache=expanded(hidden_entries, a["entry_cache"]))
    return Inputs(a, past | unread)


def seen_of(a: Arguments, i: int, form: str = "right") -> tuple[Tensor, Tensor]:
    """Return the masks of the window `[q, s]` and of the entries `[q, s // ratio]` of a sequence."""
    q0, q1, s = rows_of(a)[i]
    at, count, left = torch.arange(s - q1 + q0, s)[:, None], s // a["ratio"], a["window_size"][0]
    ahead = torch.arange(s) - at
    window = (ahead <= 0) & ((ahead >= -left) | (left < 0))
    ends = (at + 1).div(a["ratio"], rounding_mode="floor")
    if form == "early":
        ends = at.div(a["ratio"], rounding_mode="floor") + 1
    if form == "late":
        ends = at.div(a["ratio"], rounding_mode="floor")
    seen = torch.arange(count) < ends
    if a["positions"] is not None:
        seen = torch.zeros_like(seen)
        for row, chosen in enumerate(a["positions"][q0:q1].tolist()):
            seen[row, [x for x in chosen if x >= 0]] = True
    return window, seen


def attention(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Attend to the keys of the window and to the entries, as one list of keys that are their values, and a sink."""
    query = a["query"].to(compute)
    out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
    pools = [a[name].flatten(0, 1).double() for name in ("cache", "entry_cache")]
    scales = a["cache_scale"], a["cache_scale" if form == "one scale" else "entry_scale"]
    pools = [(pool * scale).to(compute) for pool, scale in zip(pools, scales, strict=True)]
    sink = None if a["sinks"] is None else a["sinks"].to(compute)
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        masks = seen_of(a, i, form)
        slots = slots_of(a, i, s, a["block_size"]), entry_slots(a, i, masks[1].shape[1])
        keys = [pool[own] for pool, own in zip(pools, slots, strict=True)]
        parts = list(zip(keys, masks, strict=True))
        if form not in ("averaged", "sink in both"):
            parts = [(torch.cat(keys), torch.cat(masks, 1))]
        for row in range(q0, q1):
            found = []
            for key, mask in parts:
                seen = key[mask[row - q0]]
                scores = query[row] @ seen.T * a["softmax_scale"]  # [h, s]
                scores = a["softcap"] * torch.tanh(scores / a["softcap"]) if a["softcap"] else scores
                if sink is not None and form != "no sink":
                    scores = torch.cat([scores, sink[:, None]], 1)
                total = scores.logsumexp(1)
                weight = (scores - total[:, None]).exp()[:, : len(seen)]  # none of no key
                found.append((weight @ seen, total))
            out[row], lse[row] = found[0]
            if len(found) > 1:
                lses = torch.stack([x for _, x in found])
                weight = lses.softmax(0).nan_to_num(0.0)[..., None] if form == "sink in both" else 0.5
                out[row] = (torch.stack([x for x, _ in found]) * weight).sum(0)
                lse[row] = lses.logsumexp(0)
    return dict(out=out, lse=lse)


COMPRESSED = Operation(
    name="compressed",
    function="attention",
    signature="`query` `[t, h, d]`, `cache` `[n, p, d]` and `entry_cache` `[m, p2, d]`, keys that are their values; "
    "`cu_seqlens_q`, `seq_lens`, `block_table`, `entry_table`, `ratio`, `window_size`, and `positions` `[t, k]` of "
    "selected entries (-1 for none; None for all that are complete), or a `plan`; `softmax_scale`, `softcap`, `sinks`, "
    "or `options`; `cache_scale` and `entry_scale`, over pools of fp8; `out`",
    draw=draw_compressed,
    oracle=attention,
    sizes=dict(
        lens=ENTRY_LENS,
        block_size=(4, 1, 16, 3),
        entry_block_size=(2, 1, 5),
        ratio=(4, 1, 2, 3, 8),
        heads=(2, 1, 5),
        head_size=(16, 64, 20),
        window_size=((2, 0), (0, 0), (20, 0)),
        positions=(False, True),
        softmax_scale=(0.21, None),
        softcap=(0.0, 2.0),
        sinks=(False, True),
        padding=(0, 2),
        stored=("numbers",),
    ),
    without=dict(softmax_scale=Without(None, ("softmax_scale",)), positions=Without(False, ("positions",))),
    options=dict(softcap=0.0, sinks=False),
    contents=CONTENTS,
    dimensions=of_lengths(keys=1025, queries=257, sequences=129)
    | {name: of_size(name, BLOCKS, lens=((2, 300), (1, 9))) for name in ("block_size", "entry_block_size")}
    | dict(padding=of_size("padding", 1025))
    | dict(heads=of_size("heads", 129), head_size=of_size("head_size", 513))
    | dict(ratio=Dimension(lambda n: dict(ratio=n, lens=((3, 2 * n + 1), (1, n))), 257)),
    specials=(
        EMPTY,
        PADDING,
        Special(
            "first entry",
            "An entry is visible from its last token on.",
            dict(lens=(((5, 5), (1, 4), (1, 3), (2, 8)),), positions=(False,)),
        ),
        Special("one softmax", "A sink counts once, and parts merge by their sums.", dict(sinks=(True,)), ("sinks",)),
        Special("selected", "A query sees the entries in its list alone.", dict(positions=(True,)), ("positions",)),
        Special(
            "fp8",
            "Pools may hold fp8, each under a scale of its own.",
            dict(stored=("e4m3", "e5m2")),
            ("cache_scale", "entry_scale"),
        ),
    ),
    derived={**BATCH, "plan": plan_of, "options": options_of},
    outputs=("out", "lse"),
    optional=frozenset({"lse"}),
    types=dict(out="query"),
    strided=("query", "cache"),
    pools=("cache", "entry_cache"),
    nan=("query", "cache", "entry_cache"),
    has_out=True,
    size=lambda a: 4.0,
    mistakes=(
        Mistake("entry-too-early", "A query sees the entry of its own token.", lambda a, c: attention(a, c, "early")),
        Mistake(
            "entry-too-late",
            "An entry is visible from the token after its last.",
            lambda a, c: attention(a, c, "late"),
        ),
        Mistake(
            "two-softmaxes-averaged",
            "The window and the entries have a softmax each, and the outputs are averaged.",
            lambda a, c: attention(a, c, "averaged"),
        ),
        Mistake("sink-in-both-parts", "The sink counts in both parts.", lambda a, c: attention(a, c, "sink in both")),
        Mistake(
            "entries-under-the-scale-of-keys",
            "Entries are dequantized with the scale of the keys.",
            lambda a, c: attention(a, c, "one scale"),
        ),
        Mistake("sink-left-out", "The sink is not counted.", lambda a, c: attention(a, c, "no sink")),
    ),
)

OPERATIONS: tuple[Operation, ...] = (ENTRIES, COMPRESSED)
