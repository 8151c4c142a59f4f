"""Draw random workloads, and shrink them.

Kernels compile for some parameters, and not for others: `draw` takes the former (types, head sizes, block sizes, the
set of options) from a `Palette` for many workloads, and draws the latter anew (lengths, tables, windows, numbers).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from twinattn.kit.workload import (
    ATTENTION,
    DEFAULTS,
    EXACT,
    INTERVALS,
    LARGEST,
    NANS,
    OPERATIONS,
    OUTS,
    PLANS,
    POISON,
    POOLS,
    ROWS,
    SLOTS,
    STATES,
    STORED,
    TABLES,
    Workload,
)

NEVER = {  # options that every kernel refuses; drawn seldom
    "context_parallel": {"alibi", "alibi_sqrt"},
    "mla_prefill": {"batch_invariant"},
}


@dataclass(frozen=True)
class Palette:
    """The parameters that kernels compile for; many workloads share them."""

    dtype: str
    head_size: int
    value_head_size: int
    block_size: int
    heads: tuple[int, int]
    stored: str
    options: frozenset[str]
    sides: tuple[bool, bool] = (False, False)  # whether the left and the right side of a window are bounded
    alibi: str = "float32"
    pools: tuple[str, ...] = ("NHD",)  # Triton specializes on strides that are 1, or multiples of 16
    rows: tuple[str, ...] = ("plain",)
    tables: tuple[str, ...] = ("plain",)
    outs: tuple[str, ...] = ("new",)
    plan_of: str = ""
    scales: str = "number"
    query_scale: bool = False
    ranks: int = 2
    parts: tuple[int, ...] = (2,)
    state_dtype: str = "float32"
    delta: bool = True
    per_channel: bool = False


def draw_palette(random: Random, path: str, dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")) -> Palette:
    """Draw the parameters that kernels compile for.

    Args:
        random: the source of all numbers.
        path: one of `PATHS`.
        dtypes: those of queries.
    """
    head_size = random.choice((64, 128, 128, 96, 256, 16, 32, 40, 72, 80, 192))
    value_head_size = 0 if random.random() < 0.8 else random.choice((16, 32, 64, 128, 24))
    hk = random.choice((1, 1, 2, 2, 3, 4))
    h = hk * random.choice((1, 1, 2, 3, 4, 5, 7, 8, 16))
    block_size = random.choice((16, 16, 32, 64, 128, 256, 1, 8, 24))
    stored = "numbers"
    if path == "differential":
        head_size, value_head_size, hk, h = random.choice((16, 32, 64, 96, 128)), 0, 2 * hk, 2 * h
    if path in ("mla", "mla_prefill"):
        head_size, value_head_size = random.choice(((576, 512), (576, 512), (40, 32), (96, 64), (136, 128), (24, 16)))
        hk, stored = 1, random.choice(("numbers", "numbers", "e4m3", "e5m2"))
        h = random.choice((1, 2, 5, 8, 16, 16, 32, 128)) if path == "mla" else random.choice((1, 2, 3, 8))
    if path == "sparse" and random.random() < 0.5:
        head_size, value_head_size = random.choice(((576, 512), (40, 32), (96, 64), (24, 16)))
        h, hk, stored = random.choice((1, 2, 5, 16)), 1, random.choice(("numbers", "e4m3", "e5m2"))
    if path == "compressed":
        head_size, value_head_size = random.choice((16, 24, 64, 512, 512, 40)), 0
        h, hk, stored = random.choice((1, 2, 5, 16)), 1, random.choice(("numbers", "numbers", "e4m3", "e5m2"))
        h = random.choice((h, 64, 128)) if head_size == 512 else h
    if path in STATES:
        head_size, value_head_size = random.choice((16, 32, 64, 128, 5, 24)), random.choice((0, 0, 16, 64, 7))
        hk = random.choice((1, 1, 2, 3))
        h = hk * random.choice((1, 1, 2, 4))
    if path == "context_parallel":
        h = hk * random.choice((4, 8, 12))
    if path in ("quantized", "kv_cache"):
        stored = random.choice(STORED[1:])
    often = ("softcap", "alibi", "sinks", "window", "not-causal", "scale")
    options = {name for name in often if random.random() < 0.3}
    options |= {name for name in ("alibi_sqrt", "batch_invariant") if random.random() < 0.12}
    if "window" in options and random.random() < 0.4:
        options.add("not-causal")  # otherwise the right side of the window has no effect

    def two(choices: tuple[Any, ...], share: float) -> tuple[Any, ...]:
        return (choices[0], random.choice(choices[1:])) if random.random() < share else choices[:1]

    dtype = random.choice(dtypes)
    return Palette(
        dtype,
        head_size,
        value_head_size,
        block_size,
        (h, hk),
        stored,
        frozenset(options),
        sides=random.choice(((True, True), (True, True), (True, False), (True, False), (False, True))),
        alibi=random.choice(("float32", "float32", "bfloat16", "float64")),
        pools=two(POOLS, 0.8),
        rows=two(ROWS, 0.7),
        tables=two(TABLES, 0.8),
        outs=two(OUTS, 0.7),
        plan_of=random.choice(PLANS.get(path, ("",))),
        scales=random.choice(("number", "heads", "sequences")),
        query_scale=random.random() < 0.2,
        ranks=random.choice((1, 2, 2, 4)),
        parts=(random.choice((1, 2, 2)), random.choice((3, 5, 33))),
        state_dtype=random.choice(("float32", "float32", dtype)),
        delta=random.random() < 0.6,
        per_channel=random.random() < 0.4,
    )


def draw_lens(random: Random, *, most_seqs: int = 6, longest: int = 4097) -> tuple[tuple[int, int], ...]:
    """Draw the lengths of a ragged batch: first chunks, later chunks, decodes, sequences without queries or keys.

    Args:
        random: the source of all numbers.
        most_seqs: sequences at most.
        longest: tokens of a sequence at most.

    Returns:
        `(query_len, seq_len)` of each sequence; there may be more queries than keys.
    """

    def length(most: int) -> int:
        some = random.randint(0, min(20, most))
        return random.choice((0, min(1, most), some, random.randint(0, most), random.randint(0, most)))

    size = min(longest, random.choice((20, 90, 90, 300)))
    kind = random.choice(("mixed", "mixed", "decodes", "verification", "chunks"))
    lens = []
    for _ in range(random.randint(1, most_seqs)):
        s = length(size)
        q = length(size if random.random() < 0.3 else min(longest, 40))
        if kind == "decodes":
            q = 1 if random.random() < 0.9 else 0
        elif kind == "verification":
            q = random.randint(1, 5)
        elif kind == "chunks":
            q = min(q, s)
        lens.append((q, s))
    if random.random() < 0.06:  # a long one among short ones
        q, s = lens[-1]
        lens[-1] = (min(q, 2), min(longest, random.choice((1000, 2500, 4097))))
    return tuple(lens)


def draw(random: Random, path: str, palette: Palette, *, longest: int = 4097) -> Workload:
    """Draw a workload.

    Args:
        random: the source of all numbers.
        path: one of `PATHS`.
        palette: the parameters that kernels compile for.
        longest: approximate limit on the tokens of a sequence.
    """

    def now_and_then(choices: tuple[Any, ...], share: float) -> Any:
        return random.choice(choices[1:]) if random.random() < share else choices[0]

    has = palette.options - (NEVER.get(path, set()) if random.random() < 0.9 else set())
    work = Workload(
        path,
        operation=random.choice(OPERATIONS.get(path, ("",))),
        lens=draw_lens(random, longest=longest),
        heads=palette.heads,
        head_size=palette.head_size,
        value_head_size=palette.value_head_size,
        block_size=palette.block_size,
        dtype=palette.dtype,
        seed=random.randint(0, 9999),
        padding_rows=now_and_then((0, 1, 3, 17), 0.3),
        pool=random.choice(palette.pools),
        rows=random.choice(palette.rows),
        table=random.choice(palette.tables),
        out=random.choice(palette.outs),
        poison=random.choice(POISON[:3]),
        nan_at=now_and_then(NANS, 0.04),
        says_num_tokens=random.random() < 0.8,
        says_num_keys=random.random() < 0.7,
        more_queries=now_and_then((0, 1, 30, 500), 0.2),
        more_keys=now_and_then((0, 1, 30, 500), 0.2),
        causal="not-causal" not in has,
        window=_window(random, palette.sides)
        if "window" in has or path in ("sliding_window", "compressed")
        else (-1, -1),
        chunk_blocks=random.choice((1, 1, 2, 3, 7, 1000)),
        trees=random.choice(("bushy", "bushy", "star", "deep", "")),
        growing=now_and_then((0, 1, 3, 20), 0.2),
        plan_of=palette.plan_of,
        stored=palette.stored,
        scales=palette.scales,
        query_scale=palette.query_scale,
        cache_scale=now_and_then((1.0, 0.25, 3.0), 0.5),
        workspace=random.choice((1, 2, 7, 64, 300)),
        ranks=palette.ranks,
        interleave=random.choice((1, 1, 2, 3, palette.block_size)),
        parts=random.choice(palette.parts),
        softmax_scale=random.choice((1.0, 0.05, 0.3, -0.3, 0.0, 2.0)) if "scale" in has else None,
        softcap=random.choice((1.0, 0.1, 5.0, 50.0)) if "softcap" in has else 0.0,
        alibi=palette.alibi if has & {"alibi", "alibi_sqrt"} else "",
        alibi_sqrt="alibi_sqrt" in has,
        sinks=random.choice(("small", "large", "mixed")) if "sinks" in has else "",
        batch_invariant="batch_invariant" in has,
        intervals=random.choice(INTERVALS),
        topk=random.choice((1, 3, 8, 40, 64)),
        slots=random.choice(SLOTS),
        ring=random.choice((1, 2, 4, 5, 8, 16)),
        state_dtype=palette.state_dtype,
        delta=palette.delta,
        per_channel=palette.per_channel,
    )
    if path == "compressed":
        chosen = Random(f"{work.seed}/entries")
        work = replace(work, ratio=chosen.choice((1, 2, 4, 4, 7, 16, 128)), overlap=chosen.random() < 0.5)
    if work.plan_path == "speculative" or work.operation in ("compact", "trees", "accept"):
        work = _drafting(random, work)
    if work.plan_path == "cascade":
        work = _sharing(random, work)
    if path in ("mla_prefill", "context_parallel"):
        work = replace(work, lens=tuple((min(q, s), s) for q, s in work.lens))
    return bounded(normalized(work))


MOST_PARTS = 80  # parts of a prefill over latents
MOST_PRODUCTS = 2e7  # products of query and key elements, so that oracle and reference take milliseconds
MOST_TOKENS = 150  # tokens of a recurrent layer, which are computed one by one


def bounded(work: Workload) -> Workload:
    """Return the workload, with fewer queries or shorter contexts if it has too many products."""
    if work.is_exact or work.path == "merge":
        return work

    if work.path == "mla_prefill":  # each chunk of context of each sequence is a part to merge
        parts = len(work.lens) * max(s - q for q, s in work.lens)
        work = replace(work, workspace=max(work.workspace, -(-parts // MOST_PARTS)))

    def products(work: Workload) -> int:
        if work.path in STATES:
            tokens = work.num_tokens if work.operation == "attention" else 1
            states = tokens + len(work.lens) * max(q for q, _ in work.lens)
            too_many = MOST_PRODUCTS / MOST_TOKENS * (work.num_tokens - 1) if work.num_tokens > MOST_TOKENS else 0
            return max(int(too_many) + 1, work.heads[0] * work.head_size * work.value_size * states)
        per_key = 40 if work.path == "mla_prefill" else 1  # keys are expanded from latents
        return work.heads[0] * work.head_size * sum((q + per_key) * s for q, s in work.lens)

    while products(work) > MOST_PRODUCTS:
        lens = [(q // 2, max(s // 2, s - q + q // 2)) if q > 4 else (q, s * 3 // 4) for q, s in work.lens]
        fewer = normalized(replace(work, lens=tuple(lens)))
        if fewer.lens == work.lens:
            break
        work = fewer
    return work


def _window(random: Random, sides: tuple[bool, bool]) -> tuple[int, int]:
    def side() -> int:
        return random.choice((0, 1, 2, 15, 16, random.randint(0, 100), random.randint(0, 400), LARGEST, LARGEST - 1))

    left, right = side(), random.choice((0, side(), side()))
    return left if sides[0] else -1, right if sides[1] else -1


def _drafting(random: Random, work: Workload) -> Workload:
    """Draw small trees for most sequences, and in some workloads trees with more nodes than one or two mask words."""
    most = random.choice((5, 16, 16, 40, 70, 140)) if work.trees else 16
    lens = tuple(
        (q, max(s, q))
        for q, s in ((min(random.randint(0, most), 40 if i else most), s) for i, (_, s) in enumerate(work.lens))
    )
    return replace(work, lens=lens)


def _sharing(random: Random, work: Workload) -> Workload:
    """Make adjacent sequences share their first blocks, in nested groups."""
    p, b = work.block_size, len(work.lens)
    prefixes: list[tuple[int, int, int]] = []

    def split(first: int, last: int, above: int) -> None:
        if last - first < 2 or random.random() < 0.2:
            return
        blocks = above + random.choice((1, 1, 2, 3))
        prefixes.append((first, last, blocks))
        if random.random() < 0.6:
            cut = random.randint(first, last)
            split(first, cut, blocks)
            split(cut, last, blocks)

    cut = random.randint(0, b)
    split(0, cut, 0)
    split(cut, b, 0)
    lens = list(work.lens)
    for first, last, blocks in prefixes:
        for i in range(first, last):
            q, s = lens[i]
            lens[i] = (q, max(s, blocks * p + q))  # a prefix ends before the first query
    return replace(work, lens=tuple(lens), prefixes=tuple(prefixes))


def _is_shared(work: Workload, first: int, last: int, blocks: int) -> bool:
    """Return whether a prefix ends before the first query of each of its sequences, all of which are there."""
    return last <= len(work.lens) and all(s - q >= blocks * work.block_size for q, s in work.lens[first:last])


def normalized(work: Workload) -> Workload:
    """Return a valid workload: reset all fields that its path does not take."""
    path, plan = work.path, work.plan_path
    changes: dict[str, Any] = {}
    if plan == "speculative" or work.operation in ("compact", "trees", "accept"):
        changes["lens"] = tuple((q, max(q, s)) for q, s in work.lens)
        if work.operation in ("compact", "accept"):
            changes["growing"] = 0
    most = work.ring if path == "replay" and work.slots == "drafts" else LARGEST  # drafts that a ring has room for
    if most < LARGEST or path in ("mla_prefill", "context_parallel"):
        changes["lens"] = tuple((min(q, s, most), s) for q, s in work.lens)
    changes["prefixes"] = tuple(prefix for prefix in work.prefixes if plan == "cascade" and _is_shared(work, *prefix))
    if plan in ("local", "cascade") or path in ("mla", "mla_prefill", "context_parallel") or work.has_trees:
        changes["causal"] = True
    if path == "sparse":
        changes |= _of_selection(work)
    operation = changes.get("operation", work.operation)
    takes_no_window = path in ("mla", "mla_prefill", "merge", *STATES) or work.is_exact or "attention" in operation
    if (takes_no_window and plan != "speculative") or plan == "interval":
        changes["window"] = (-1, -1)
    if plan == "interval" or path in (*STATES, "compressed") or work.is_exact or "attention" in operation:
        changes["causal"] = True
    if path in ("mla", "mla_prefill") or operation == "latent_attention":
        changes["softmax_scale"] = 0.1 if work.softmax_scale is None else work.softmax_scale
    if path == "varlen":
        changes["table"] = "plain"
    if path == "merge" and work.rows.startswith("expanded"):
        changes["rows"] = "plain"  # each head has its own empty rows
    changes |= _of_storage(work, operation)
    if path == "context_parallel":
        h, hk = work.heads
        changes["interleave"] = min(work.interleave, work.block_size)
        per_rank, group = h // work.ranks, h // hk
        if h % work.ranks or (per_rank % group and group % per_rank):
            changes["ranks"] = 1
    if not work.alibi:
        changes["alibi_sqrt"] = False
    drafts = plan == "speculative" or work.operation in ("compact", "trees", "accept")
    takes = dict(
        chunk_blocks=plan == "local",
        trees=drafts,
        growing=drafts and bool(work.trees) and work.operation not in ("compact", "accept"),
        workspace=path == "mla_prefill",
        ranks=path == "context_parallel" or work.operation == "ranks",
        interleave=path == "context_parallel" or work.operation == "ranks",
        parts=path == "merge",
        scales=work.stored in ("e4m3", "e5m2") and (path == "quantized" or work.operation == "write_quantized"),
        query_scale=work.stored in ("e4m3", "e5m2") and (path == "quantized" or operation == "scores"),
        cache_scale=work.stored in ("e4m3", "e5m2")
        and (path in ("mla", "mla_prefill") or operation in ("write_latents", "latent_attention", "all", "selected")),
        nan_at=path in ATTENTION
        and path not in ("mla_prefill", "context_parallel", *STATES)
        and operation not in EXACT
        and work.stored == "numbers",
        intervals=plan == "interval",
        topk=path == "sparse" and operation not in ("scores", "write_index") or operation == "selected",
        **dict.fromkeys(("ratio", "overlap"), path == "compressed"),
        slots=path in STATES,
        ring=path == "replay",
        state_dtype=path in (*STATES, "state_cache"),
        **dict.fromkeys(("delta", "per_channel"), path in STATES and operation == "attention"),
    )
    changes |= {name: DEFAULTS[name] for name, is_taken in takes.items() if not is_taken}
    if plan == "cascade" and work.window[0] >= 0:
        changes["nan_at"] = ""  # a NaN that one sequence of a group sees may show in the others
    if path in ("sparse", "compressed"):
        changes |= dict(alibi="", alibi_sqrt=False)  # a list of slots has no positions, and an entry has none
    no_options = work.is_exact or operation in ("scores", "convolve")
    if path == "merge" or no_options or path in STATES:
        changes |= dict(alibi="", alibi_sqrt=False, softcap=0.0, batch_invariant=False)
    if path == "merge" or no_options:
        changes |= dict(softmax_scale=None)
    if path == "merge" or work.is_exact or path in STATES:
        changes |= dict(nan_at="")
    if no_options or path in STATES:
        changes["sinks"] = ""
    return replace(work, **changes)


def _of_storage(work: Workload, operation: str) -> dict[str, Any]:
    """Return the changes by what the pools hold: sizes of whole groups, and scales that the path takes."""
    path, plan = work.path, work.plan_path
    changes: dict[str, Any] = {}
    if work.stored == "nvfp4" or (work.stored == "int4" and work.value_size % 2):
        sizes = ("head_size", "value_head_size")
        changes |= {name: -(-getattr(work, name) // 16) * 16 for name in sizes}  # whole groups
    if path not in ("quantized", "mla", "mla_prefill") and operation not in (
        *("write_latents", "write_quantized", "copy_blocks", "swap_blocks"),
        *("latent_attention", "scores", "write_index", "all", "selected"),
    ):
        changes["stored"] = "numbers"
    if (
        work.stored != "numbers"
        and path not in ("mla", "mla_prefill")
        and plan == "cascade"
        and work.scales == "sequences"
    ):
        changes["scales"] = "heads"
    if path == "kv_cache" and work.operation == "write_quantized" and work.scales == "sequences":
        changes["scales"] = "heads"
    return changes


def _of_selection(work: Workload) -> dict[str, Any]:
    """Return the changes that make a workload of `sparse` valid: its operation follows from its heads and sizes."""
    if "attention" in work.operation:
        are_latents = work.heads[1] == 1 and work.value_size < work.head_size
        return dict(operation="latent_attention" if are_latents else "attention")
    if work.operation in ("scores", "write_index"):
        return dict(stored="numbers" if work.stored == "numbers" else "e4m3", pool="NHD")
    return {}


# --- shrinking ---


_COMPILED = (  # parameters that kernels compile for; shrunk last, because that takes longest
    *("head_size", "value_head_size", "block_size", "dtype", "pool", "rows", "table", "out", "causal", "query_scale"),
    *("scales", "ranks", "parts", "softcap", "alibi", "alibi_sqrt", "sinks", "batch_invariant", "trees"),
)


def smaller(work: Workload) -> Iterator[Workload]:
    """Yield slightly smaller or simpler workloads, first those that need no compilation."""
    lens = work.lens
    for i in reversed(range(len(lens))):
        if len(lens) > 1:
            yield replace(work, lens=lens[:i] + lens[i + 1 :], prefixes=_without(work.prefixes, i))
    fixed = {"operation", "lens", "heads", "seed", "plan_of", "stored"}
    fixed |= {"head_size", "value_head_size"} if work.path in ("mla", "mla_prefill") else set()
    fixed |= {name for name in ("block_size", "workspace", "ranks", "parts") if getattr(work, name) < DEFAULTS[name]}

    def simpler(names: Iterable[str]) -> Iterator[Workload]:
        for name in names:
            if name not in fixed and getattr(work, name) != DEFAULTS[name]:
                change: dict[str, Any] = {name: DEFAULTS[name]}
                yield replace(work, **change)

    yield from simpler(name for name in DEFAULTS if name not in _COMPILED)
    for i in range(len(work.prefixes)):
        yield replace(work, prefixes=work.prefixes[:i] + work.prefixes[i + 1 :])
    for i, (q, s) in enumerate(lens):
        for fewer_q in _fewer(q):
            yield replace(work, lens=(*lens[:i], (fewer_q, s), *lens[i + 1 :]))
        for fewer_s in _fewer(s):
            yield replace(work, lens=(*lens[:i], (q, fewer_s), *lens[i + 1 :]))
        if q and s:
            yield replace(work, lens=(*lens[:i], (q - 1, s - 1), *lens[i + 1 :]))
    for side in (0, 1):
        for value in _fewer(work.window[side]):
            yield replace(work, window=(value, work.window[1]) if side == 0 else (work.window[0], value))
    yield from _fewer_of(work, ("padding_rows", "workspace", "interleave", "chunk_blocks", "growing"))
    if work.seed:
        yield replace(work, seed=0)
    yield from simpler(_COMPILED)
    h, hk = work.heads
    unit = 2 if work.path == "differential" else 1
    for fewer in ((unit, unit), (h // hk * unit, unit), (hk, hk), (h // 2, hk)):
        if fewer != work.heads and fewer[0] >= unit and fewer[0] % fewer[1] == 0 and fewer < work.heads:
            yield replace(work, heads=fewer)
    yield from _fewer_of(work, ("block_size", "parts", "ranks"))


def _fewer_of(work: Workload, names: Sequence[str]) -> Iterator[Workload]:
    for name in names:
        for value in _fewer(getattr(work, name)):
            change: dict[str, Any] = {name: value}
            if value > 0:
                yield replace(work, **change)


def _fewer(count: int) -> list[int]:
    return [x for x in dict.fromkeys((0, 1, count // 2, count - 1)) if 0 <= x < count]


def _without(prefixes: tuple[tuple[int, int, int], ...], i: int) -> tuple[tuple[int, int, int], ...]:
    moved = [(first - (i < first), last - (i < last), blocks) for first, last, blocks in prefixes]
    return tuple(prefix for prefix in moved if prefix[1] - prefix[0] > 1)
