"""A window and entries in one launch: the kernel for Hopper against the reference, on a card or interpreted on a CPU.

On a CPU tensors are float16 and warpgroups run in drawn orders; on a card they are bfloat16.
"""

import importlib
import math
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import fastattn
import fastattn.compressed
import refattn.compressed
from fastattn.kernels import order
from fastattn.kernels import triton as kernels_in_triton
from fastattn.kernels.problem import compressed_problem
from fastattn.kernels.replay import memo_of
from fastattn.kernels.triton import compressed_hopper, latents_hopper, launch, load_compressed_hopper
from refattn.batch import Batch
from refattn.keys import Latents
from refattn.modes import computing_in
from refattn.options import AttentionOptions
from tests.helpers.stored import E4M3, E5M2
from twinattn.course.gluon import interpret
from twinattn.course.gluon.interpret import hopper_on_a_cpu
from twinattn.kit import assert_close

ON_A_CPU = launch.INTERPRETED
DEVICE = "cpu" if ON_A_CPU else "cuda"
pytestmark = pytest.mark.skipif(
    not ON_A_CPU and not (torch.cuda.is_available() and compressed_hopper.is_there(torch.device("cuda"))),
    reason="needs Triton's interpreter or a Hopper GPU",
)
KINDS = {"16-bits": None, "e4m3": E4M3, "e5m2": E5M2}
HALF = torch.float16 if ON_A_CPU else torch.bfloat16


class Case(NamedTuple):
    """New tokens and length of each sequence, and who sees what; `topk` 0 is all entries."""

    lens: tuple[tuple[int, int], ...]
    left: int = 127
    ratio: int = 4
    heads: int = 64
    topk: int = 0
    block: int = 16
    entry_block: int = 4
    padding: int = 0


CASES = {
    "decodes": Case(((1, 5), (1, 64), (1, 129), (1, 0), (1, 199), (1, 0)), padding=2),
    "decodes-of-128-heads": Case(((1, 260), (0, 40), (1, 3)), heads=128, block=24, entry_block=1, ratio=3),
    "chunks": Case(((3, 70), (2, 2), (0, 0), (5, 3)), left=20, block=1, entry_block=5, padding=1),
    "no-window-but-itself": Case(((2, 131), (1, 1)), left=0, ratio=1),
    "few-entries": Case(((3, 130), (1, 127)), ratio=128, block=256, entry_block=2),
    "all-tokens": Case(((2, 90),), left=-1, ratio=7),
    "selected": Case(((1, 300), (2, 9), (1, 3)), topk=70, padding=1),
    "selected-of-128-heads": Case(((0, 7), (2, 40)), topk=3, heads=128, left=9),
}


class Made(NamedTuple):
    """Tensors of a case, on the CPU: pools hold NaN in every slot that no query sees."""

    query: torch.Tensor
    cache: torch.Tensor
    entry_cache: torch.Tensor
    batch: Batch
    plan: dict
    positions: torch.Tensor | None


def make(case, seed=0, dtype=HALF, kind=None, scales=(1.0, 1.0), larger=1.0):
    """Make tensors in shuffled blocks, with gaps between the blocks of the pool and between queries."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    rows = int(lens[:, 0].sum())
    tables, pools = [], []
    for i, (block, many) in enumerate(((case.block, lens[:, 1]), (case.entry_block, lens[:, 1] // case.ratio))):
        columns = -(-many // block)
        number = torch.randperm(int(columns.sum()) + 2, generator=g).int()
        table = torch.full((len(lens), max(1, int(columns.max()))), 2**30, dtype=torch.int32)
        memory = torch.full((len(number), block + 1, 512), math.nan, dtype=dtype)
        pool = memory[:, :block]
        first = 0
        for s, (count, (new, length)) in enumerate(zip(many.tolist(), case.lens, strict=True)):
            table[s, : columns[s]] = number[first : first + columns[s]]
            first += int(columns[s])
            begin = 0 if i or case.left < 0 else max(0, length - new - case.left)
            for j in range(begin, count):
                pool[table[s, j // block], j % block] = torch.randn(512, generator=g).to(dtype) * (0.5 + 0.1 * (j % 7))
        tables.append(table)
        pools.append(pool)
    if case.topk:  # read slot by slot
        pools[1] = pools[1].contiguous()
    if kind is not None:
        pools = [
            (torch.empty_strided(x.shape, x.stride(), dtype=torch.uint8).view(kind)).copy_((x / scale).to(kind))
            for x, scale in zip(pools, scales, strict=True)
        ]
    query = torch.full((rows + case.padding, case.heads + 1, 512 + 16), math.nan, dtype=dtype)[:, 1:, 16:]
    query[:rows] = (torch.randn(rows, case.heads, 512, generator=g) * larger).to(dtype)
    ends = torch.nn.functional.pad(lens[:, 0].cumsum(0), (1, 0)).int()
    most = lens.amax(0).tolist()
    batch = Batch(ends, lens[:, 1].contiguous(), tables[0], *most, num_tokens=rows)
    positions = None
    if case.topk:
        positions = torch.full((rows + case.padding, case.topk), -1, dtype=torch.int32)
        row = 0
        for new, length in case.lens:
            for t in range(length - new, length):
                visible = max(t + 1, 0) // case.ratio
                chosen = torch.randperm(visible, generator=g)[: case.topk].int()
                at = torch.randperm(case.topk, generator=g)[: len(chosen)]
                positions[row, at] = chosen
                row += 1
    plan = dict(ratio=case.ratio, window_size=(case.left, 0), entry_table=tables[1], block_size=case.block)
    return Made(query, *pools, batch, plan | dict(entry_block_size=case.entry_block), positions)


def on_device(x):
    """Move tensors, keeping their strides."""
    if isinstance(x, torch.Tensor):
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
        return moved.view(torch.uint8).copy_(x.view(torch.uint8)).view(x.dtype) if x.itemsize == 1 else moved.copy_(x)
    if isinstance(x, Batch):
        tables = {name: on_device(getattr(x, name)) for name in ("cu_seqlens_q", "seq_lens", "block_table")}
        return Batch(**tables, max_query_len=x.max_query_len, max_seq_len=x.max_seq_len, num_tokens=x.num_tokens)
    return {name: on_device(one) for name, one in x.items()} if isinstance(x, dict) else x


def attend(path, made, options, **more):
    """Plan and attend."""
    plan = path.plan(made.batch, **made.plan)
    if made.positions is not None:
        plan = path.select_entries(plan, made.positions)
    return path.attention(made.query, made.cache, made.entry_cache, plan, options, return_lse=True, **more)


def by_reference(made, options, scales, dtype):
    """Return the formula in a type, over the dequantized values."""
    numbers = [(x.double() * s).to(dtype) for x, s in zip((made.cache, made.entry_cache), scales, strict=True)]
    rows = int(made.batch.cu_seqlens_q[-1])
    exact = made._replace(query=made.query.to(dtype), cache=numbers[0], entry_cache=numbers[1])
    with computing_in(dtype):
        out, lse = attend(refattn.compressed, exact, options)
    assert not out[rows:].any() and (lse[rows:] == -math.inf).all()
    return out, lse


@contextmanager
def launching(seed=0):
    """Run the kernel; yields a list of what was launched, the programs of each."""
    launched, launch_kernel = [], compressed_hopper._launch

    def noted(*arguments):
        done = launch_kernel(*arguments)
        launched.append(done._grid[:2])
        return done

    with (
        hopper_on_a_cpu(seed) if ON_A_CPU else nullcontext(),
        mock.patch.object(compressed_hopper, "_launch", noted),
        fastattn.use_kernel("triton"),
    ):
        yield launched


def options_for(case, seed=0, *, sinks=False, larger=1.0, **more):
    """Return options, those of the reference and those on the device."""
    more |= dict(softmax_scale=0.07 / larger)
    if not sinks:
        return [AttentionOptions(**more)] * 2
    numbers = torch.randn(case.heads, generator=torch.Generator().manual_seed(seed))
    return [AttentionOptions(**more, sinks=x) for x in (numbers, numbers.to(DEVICE))]


def hold(case, kind=None, seed=0, *, scales=(1.0, 1.0), dtype=HALF, larger=1.0, **more):
    """Hold the kernel to the reference, and return what was launched; queries may be larger, and the scale less."""
    scales = scales if kind is not None else (1.0, 1.0)
    made = make(case, seed, dtype, kind, scales, larger)
    options, theirs = options_for(case, seed, larger=larger, **more)
    with launching(seed) as launched:
        given = Made(*map(on_device, made))
        out, lse = attend(fastattn.compressed, given, theirs, cache_scale=scales[0], entry_scale=scales[1])
    assert_is(out, lse, made, options, scales)
    return launched


def assert_is(out, lse, made, options, scales=(1.0, 1.0)):
    """Compare with the reference in float64, as far as its formula is from it in the type of the queries."""
    dtype, rows = made.query.dtype, int(made.batch.cu_seqlens_q[-1])
    (exact, exact_lse), (low, low_lse) = (by_reference(made, options, scales, x) for x in (torch.float64, dtype))
    assert not out[rows:].any() and (lse[rows:] == -math.inf).all(), "NaN at padding rows, or numbers"
    assert_close(out.cpu(), exact.to(dtype), low)
    assert_close(lse.cpu(), exact_lse.float(), low_lse.float(), name="lse")


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_window_and_entries_are_one_softmax(case, kind, sinks):
    assert len(hold(case, kind, sinks=sinks)) == 1


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", ["decodes", "chunks", "selected"])
def test_splits_of_the_keys(name, kind, sinks, monkeypatch):
    """Of up to five steps, or of none; sinks count once."""
    monkeypatch.setattr(compressed_hopper, "sms_of", lambda device: 40)
    ((_, splits),) = hold(CASES[name], kind, sinks=sinks)
    assert splits > 1, "keys are not split"


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@drawn(
    lens=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 210)), min_size=1, max_size=3),
    left=st.sampled_from([0, 1, 62, 63, 64, 100, 127, 300, -1]),
    ratio=st.sampled_from([1, 2, 4, 50]),
    topk=st.sampled_from([0, 0, 1, 65, 130]),
    kind=st.sampled_from(list(KINDS.values())),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 0.5), (0.02, 1.3)]),
    sms=st.sampled_from([1, 9, 40]),
    seed=st.integers(0, 10**6),
)
def test_in_any_order(lens, left, ratio, topk, kind, scales, sms, seed):
    """Whoever is first, warpgroups and what is asynchronous; any lengths, windows and splits."""
    case = Case(tuple(lens), left, ratio, topk=topk, padding=seed % 2)
    with mock.patch.object(compressed_hopper, "sms_of", lambda device: sms):
        hold(case, kind, seed, sinks=seed % 3 == 0, scales=scales)


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Accept calls in bfloat16, which Triton's interpreter multiplies wrongly, and the interpreter of Gluon rightly."""
    order.forget()
    monkeypatch.setattr(kernels_in_triton, "float_types", lambda device: [torch.bfloat16])
    yield
    order.forget()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_queries_in_bfloat16(kind, in_bfloat16):
    """Over quantized values products are of float16, in which these queries would be infinite: rows are divided."""
    assert hold(CASES["decodes"], kind, dtype=torch.bfloat16, larger=2.0**20, scales=(0.1, 0.3))


@pytest.mark.parametrize("softmax_scale", [0.0, -0.05])
def test_any_scale(softmax_scale):
    case = CASES["chunks"]
    made = make(case)
    options = AttentionOptions(softmax_scale=softmax_scale)
    with launching() as launched:
        out, lse = attend(fastattn.compressed, Made(*map(on_device, made)), options)
    assert_is(out, lse, made, options)
    assert launched


@pytest.mark.parametrize("sms", [1, 40], ids=["whole", "split"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_layers_replay_a_launch(kind, sms, monkeypatch):
    """With tensors, scales and sinks of their own, into memory that is given or not."""
    monkeypatch.setattr(compressed_hopper, "sms_of", lambda device: sms)
    case, plan = CASES["decodes"], None
    with launching() as launched:
        for seed, scales in enumerate(((0.5, 0.1), (0.2, 0.9), (0.3, 0.7))):
            scales = scales if kind is not None else (1.0, 1.0)
            made = make(case, seed, kind=kind, scales=scales)
            tables = make(case)  # all layers share the tables of a step
            made = made._replace(batch=tables.batch, plan=tables.plan)
            made = made._replace(
                **{name: nothing_is_nan(getattr(made, name)) for name in ("query", "cache", "entry_cache")}
            )
            given = Made(*map(on_device, made))
            plan = fastattn.compressed.plan(given.batch, **given.plan) if plan is None else plan
            options, theirs = options_for(case, seed, sinks=True)
            memory = torch.full(made.query.shape, math.nan, dtype=HALF, device=DEVICE) if seed else None
            out, lse = fastattn.compressed.attention(
                *given[:3], plan, theirs, cache_scale=scales[0], entry_scale=scales[1], return_lse=True, out=memory
            )
            assert memory is None or out is memory
            assert_is(out, lse, made, options, scales)
    assert len(launched) == 2, "one without memory for the output, one with it"
    assert len(memo_of(plan).bound) == 2


def nothing_is_nan(x):
    """Return a tensor with 0.5 in place of NaN, as tables of another tensor lead to any of its rows."""
    numbers = torch.where(x.float().isnan(), 0.5, x.float()).to(x.dtype)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(numbers)


def test_memory_that_is_not_contiguous_or_the_query_itself():
    made = make(CASES["chunks"])
    options = AttentionOptions(softmax_scale=0.07)
    for seed in range(2):
        given = Made(*map(on_device, made))
        memory = given.query if seed else torch.zeros(12, 66, 512, dtype=HALF, device=DEVICE)[1:, 1:65]
        with launching(seed) as launched:
            out, lse = attend(fastattn.compressed, given, options, out=memory[: len(made.query)])
        assert launched and out.data_ptr() == memory.data_ptr()
        assert_is(out, lse, made, options)


@pytest.mark.parametrize("sms", [1, 40], ids=["whole", "split"])
def test_a_batch_without_queries_or_sequences(sms, monkeypatch):
    monkeypatch.setattr(compressed_hopper, "sms_of", lambda device: sms)
    hold(Case(((0, 9),), padding=3), sinks=True)
    made = make(Case(((0, 9),), padding=3))
    empty = replace(
        made.batch,
        cu_seqlens_q=made.batch.cu_seqlens_q[:1],
        seq_lens=made.batch.seq_lens[:0],
        block_table=made.batch.block_table[:0],
    )
    made = made._replace(batch=empty, plan=made.plan | dict(entry_table=made.plan["entry_table"][:0]))
    with launching() as launched:
        out, lse = attend(fastattn.compressed, Made(*map(on_device, made)), AttentionOptions(softmax_scale=0.1))
    assert not launched and not out.any() and (lse == -math.inf).all()


def test_no_bit_depends_on_the_batch_if_it_must_not(monkeypatch):
    """Nothing is split then."""
    monkeypatch.setattr(compressed_hopper, "sms_of", lambda device: 40)
    ((_, splits),) = hold(CASES["decodes"], batch_invariant=True)
    assert splits == 1


# --- what is computed in two calls ---

REFUSED = {  # what is changed in a call that is taken, and the reason
    "heads": (dict(case=CASES["chunks"]._replace(heads=32)), "multiples of 64 heads of 512, not 32 of 512"),
    "a-cap": (dict(softcap=5.0), "without a cap"),
    "two-types": (dict(kinds=(E4M3, E5M2)), "one type of fp8"),
    "one-pool-of-fp8": (dict(kinds=(None, E5M2)), "one type of fp8"),
    "scales-far-apart": (dict(kinds=(E4M3, E4M3), scales=(1e-4, 1.0)), "scales that are not far apart"),
}


@pytest.mark.parametrize(("changes", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_two_calls(changes, why):
    case, kinds = changes.pop("case", CASES["chunks"]), changes.pop("kinds", (None, None))
    scales = changes.pop("scales", (1.0, 1.0))
    made, options = make(case), AttentionOptions(softmax_scale=0.07, **changes)
    pools = [x if kind is None else (x / s).to(kind) for x, kind, s in zip(made[1:3], kinds, scales, strict=True)]
    made = made._replace(cache=pools[0], entry_cache=pools[1])
    with launching() as launched:
        given = Made(*map(on_device, made))
        plan = fastattn.compressed.plan(given.batch, **given.plan)
        keys = [Latents(x, 512, s) for x, s in zip(given[1:3], scales, strict=True)]
        problem = compressed_problem(given.query, *keys, plan, options)
        assert why in order.unsupported_reason("triton", problem) and why in order.explain(problem)
        out, lse = attend(fastattn.compressed, given, options, cache_scale=scales[0], entry_scale=scales[1])
    assert not launched
    assert_is(out, lse, made, options, scales)


def test_who_is_forced():
    """Our kernel may be; if another one that attends to such keys is, or nothing is on Hopper, there are two calls."""
    made = Made(*map(on_device, make(CASES["chunks"])))
    keys = Latents(made.cache, 512), Latents(made.entry_cache, 512)
    plan = fastattn.compressed.plan(made.batch, **made.plan)
    problem = compressed_problem(made.query, *keys, plan, AttentionOptions(softmax_scale=0.1))
    with hopper_on_a_cpu() if ON_A_CPU else nullcontext():
        chosen = {name: order.choose_fused(problem, name) for name in ("triton", "flash_mla", "fa2", None)}
    ours = kernels_in_triton.KERNEL
    assert chosen == {"triton": ours, "flash_mla": None, "fa2": ours, None: ours}, "fa2 attends to no latents"
    if ON_A_CPU:
        assert order.choose_fused(problem, None) is None


# --- mistakes ---

WRONG, FENCE, DEADLOCK, MORE, END = (
    "max error|NaN at|of a memory of",
    "without a fence",
    "deadlock",
    "has more",
    "under way",
)
MISTAKES = {  # the file, what stands there, what stands there instead, and what is found
    "queries-not-copied": (
        *(load_compressed_hopper, "        _copy_query(queries, room, tile, LAYOUT, TILE)\n", "        pass\n", WRONG),
    ),
    "heads-of-the-first-tile": (
        *(
            load_compressed_hopper,
            "index(0), rows[:, None] + at)",
            "index(0), rows[:, None] - tile.head * queries.strides[1] + at)",
            WRONG,
        ),
    ),
    "a-slot-filled-while-it-is-read": (
        *(load_compressed_hopper, "        mbarrier.wait(room.empty.index(slot), (pairs + (step >> 1) & 1) ^ 1)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}|{DEADLOCK}",
    ),
    "no-fence-after-quantized-keys": (
        *(load_compressed_hopper, "            fence_async_shared()\n        _fill", "        _fill", FENCE),
    ),
    "no-fence-of-the-first-before-its-keys": (
        *(latents_hopper, "full.index(0), now)\n    see_copies(room)\n", "full.index(0), now)\n", FENCE),
    ),
    "no-fence-of-the-second-before-its-keys": (
        *(latents_hopper, "full.index(1), now)\n    see_copies(room)\n", "full.index(1), now)\n", FENCE),
    ),
    "no-fence-of-the-first-before-other-keys": (
        *(latents_hopper, "ready.index(1), now)\n    see_copies(room)\n", "ready.index(1), now)\n", FENCE),
    ),
    "no-fence-before-the-keys-of-a-last-step": (
        *(compressed_hopper, "ready.index(0), now)\n    see_copies(room)\n", "ready.index(0), now)\n", FENCE),
    ),
    "keys-of-the-first-not-waited-for": (
        *(latents_hopper, "    mbarrier.wait(room.full.index(0), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}|{DEADLOCK}|{END}",
    ),
    "keys-of-the-second-not-waited-for": (
        *(latents_hopper, "    mbarrier.wait(room.full.index(1), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}|{DEADLOCK}|{END}",
    ),
    "keys-that-are-never-full": (
        *(load_compressed_hopper, "        leave(room.full.index(slot))\n", "        pass\n", DEADLOCK),
    ),
    "quantized-keys-that-are-never-full": (
        *(load_compressed_hopper, "        mbarrier.arrive(room.full.index(slot))\n", "        pass\n", DEADLOCK),
    ),
    "a-last-step-left-out": (compressed_hopper, "span.steps % 2 == 1", "span.steps % 2 == 2", f"{WRONG}|{DEADLOCK}"),
    "weights-of-a-last-step-not-waited-for": (
        *(compressed_hopper, "    mbarrier.wait(room.ready.index(0), now)\n", "", f"{WRONG}|{FENCE}|{DEADLOCK}"),
    ),
    "a-last-step-without-rescaling": (
        *(compressed_hopper, "    acc, sums = shrink(acc, sums, old_max, row_max)\n", "", WRONG),
    ),
    "a-last-step-of-the-other-slot": (compressed_hopper, "acc, 1, slot ^ 1)", "acc, 1, slot)", f"{WRONG}|{FENCE}"),
    "sums-of-the-other-not-waited-for": (
        *(compressed_hopper, "        mbarrier.wait(room.summed.index(0), tiles & 1)\n", "", WRONG),
    ),
    "sums-of-a-tile-over-those-of-the-last-one": (
        *(compressed_hopper, "mine = (tiles & 1) * 2", "mine = tiles * 0", WRONG),
    ),
    "queries-copied-over-those-of-the-last-tile": (
        *(load_compressed_hopper, "    mbarrier.wait(room.query_read.index(0), (tiles & 1) ^ 1)\n    _tell(beside, s"),
        *("    _tell(beside, s", f"{WRONG}|{FENCE}|{MORE}|{DEADLOCK}"),
    ),
    "queries-left-too-early": (
        latents_hopper,
        "step + 2 >= span.until",
        "step + 4 >= span.until",
        f"{WRONG}|{DEADLOCK}",
    ),
    "queries-that-are-never-left": (latents_hopper, "step + 2 >= span.until", "step >= span.until", DEADLOCK),
    "queries-that-are-not-left-without-keys": (
        *(compressed_hopper, "            leave(room.query_read.index(0))\n", "            pass\n", DEADLOCK),
    ),
    "a-tile-that-is-not-waited-for": (
        *(load_compressed_hopper, "    mbarrier.wait(beside.known.index(0), tiles & 1)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}|{DEADLOCK}|{END}",
    ),
    "an-end-that-is-not-told": (
        *(load_compressed_hopper, "    _tell(beside, tiles * 0 - 1, tiles, tiles)\n", "", DEADLOCK),
    ),
    "pairs-of-the-last-tile-not-counted": (
        compressed_hopper,
        "hear(beside, tiles, count >> 2",
        "hear(beside, tiles, tiles * 0",
        f"{WRONG}|{DEADLOCK}",
    ),
    "a-slot-that-the-first-does-not-skip": (
        *(compressed_hopper, "    leave(room.empty.index(1))\n    return state", "    return state", DEADLOCK),
    ),
    "a-slot-that-the-second-does-not-skip": (
        *(compressed_hopper, "    leave(room.empty.index(1))\n    mbarrier.arrive", "    mbarrier.arrive", DEADLOCK),
    ),
    "weights-that-the-second-does-not-skip": (
        *(compressed_hopper, "    mbarrier.arrive(room.ready.index(1))\n", "", f"{WRONG}|{FENCE}|{DEADLOCK}"),
    ),
    "a-slot-that-the-producer-does-not-skip": (
        *(load_compressed_hopper, "        _fill(room, 1, TILE)\n", "", f"{WRONG}|{DEADLOCK}"),
    ),
    "a-window-of-one-more-token": (load_compressed_hopper, "border - tokens, end", "border - tokens - 1, end", WRONG),
    "a-window-of-one-token-less": (load_compressed_hopper, "border - tokens, end", "border - tokens + 1, end", WRONG),
    "a-step-without-its-mask": (
        *(latents_hopper, "if (first < span.first) | (first + scores.shape[1] > span.end)", "if first < span.first"),
        WRONG,
    ),
    "a-window-without-its-mask": (
        *(latents_hopper, "if (first < span.first) | (first + scores.shape[1] > span.end)", "if first + 64 > span.end"),
        WRONG,
    ),
    "the-token-after-a-query": (load_compressed_hopper, "(end - 1 - token)", "(end - 2 - token)", WRONG),
    "an-entry-too-early": (load_compressed_hopper, "seen // sight.RATIO", "(seen + 1) // sight.RATIO", WRONG),
    "entries-from-the-pool-of-tokens": (
        *(
            load_compressed_hopper,
            "_find_rows(entries, source.entry_table",
            "_find_rows(keys, source.entry_table",
            WRONG,
        ),
    ),
    "entries-by-the-table-of-tokens": (
        *(load_compressed_hopper, "_find_rows(entries, source.entry_table", "_find_rows(entries, source.table", WRONG),
    ),
    "selected-entries-of-a-sequence": (
        load_compressed_hopper,
        "        row = token\n",
        "        row = sequence\n",
        WRONG,
    ),
    "quantized-entries-by-the-scale-of-keys": (
        load_compressed_hopper,
        "ratio = entries.ratio",
        "ratio = keys.ratio",
        WRONG,
    ),
    "the-scale-of-the-next-step-quantized": (
        *(load_compressed_hopper, "numbers.to(gl.float32) * factor", "numbers.to(gl.float32) * ratio", WRONG),
    ),
    "a-quantized-output-without-its-scale": (
        *(compressed_hopper, "        share *= sight.number\n", "        pass\n", WRONG),
    ),
    "padding-left-as-it-is": (
        *(
            load_compressed_hopper,
            "    if not TILE.SPLIT:\n        at = gl",
            "    if TILE.SPLIT:\n        at = gl",
            WRONG,
        ),
    ),
    "a-sequence-too-late": (load_compressed_hopper, "(end <= token)", "(end < token)", WRONG),
    "sinks-of-other-heads": (compressed_hopper, "options.sinks + tile.head + rows", "options.sinks + rows", WRONG),
    "a-split-with-sinks": (compressed_hopper, "is not None and not TILE.SPLIT", "is not None", WRONG),
    "a-split-of-too-few-steps": (
        *(load_compressed_hopper, "gl.cdiv(steps, split.splits)", "gl.maximum(steps // split.splits, 1)", WRONG),
    ),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Launch the kernel with another line in one of its files."""

    def plant(file, right, wrong):
        for module in (latents_hopper, load_compressed_hopper, compressed_hopper):
            name, text = module.__name__.rpartition(".")[2], Path(module.__file__).read_text()
            if module is file:
                assert text.count(right) == 1, f"{name}.py: {right!r} is there {text.count(right)} times"
                text = text.replace(right, wrong)
            monkeypatch.delitem(sys.modules, f"planted_{name}", raising=False)
            for other in (latents_hopper, load_compressed_hopper):
                text = text.replace(other.__name__, f"planted_{other.__name__.rpartition('.')[2]}")
            (tmp_path / f"planted_{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module("planted_compressed_hopper")
        monkeypatch.setattr(interpret, "compressed_hopper", module)
        monkeypatch.setattr(compressed_hopper, "attend_compressed", module.attend_compressed)
        monkeypatch.setattr(compressed_hopper, "is_there", lambda device: True)
        return module

    return plant


@pytest.mark.skipif(not ON_A_CPU, reason="a planted mistake may hang a GPU; the interpreter raises")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, planted, monkeypatch):
    """In one of a few orders, over all entries and over selected ones, of 64 heads and of 128."""
    *mistake, says = MISTAKES[name]
    module = planted(*mistake)
    monkeypatch.setattr(module, "sms_of", lambda device: 20 if "split" in name else 1)
    cases = CASES["decodes"], CASES["selected-of-128-heads"]
    kind = KINDS["e4m3"] if "quantized" in name else None
    found = []
    for seed, case in product(range(6), cases):
        try:
            hold(case, kind, seed, sinks=True, scales=(0.05, 0.6))
        except AssertionError as error:
            found.append(str(error))
            break
    assert found and re.search(says, found[0]), found
