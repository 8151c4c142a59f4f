"""A window and entries in one launch: the kernel for Hopper, interpreted on a CPU or on a card, against the reference."""

import importlib
import math
import re
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import NamedTuple

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
from fastattn.kernels.replay import memo_of
from fastattn.kernels.triton import compressed_hopper, latents_hopper, launch, load_latents_hopper
from refattn.batch import Batch
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
    reason="needs Triton's interpreter, or a card of Hopper",
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
    "decodes": Case(((1, 5), (1, 64), (1, 129), (1, 0), (1, 200)), padding=2),
    "decodes-of-128-heads": Case(((1, 260), (0, 40), (1, 3)), heads=128, block=24, entry_block=1, ratio=3),
    "chunks": Case(((3, 70), (2, 2), (0, 0), (5, 3)), left=20, block=1, entry_block=5, padding=1),
    "no-window-but-itself": Case(((2, 131), (1, 1)), left=0, ratio=1),
    "few-entries": Case(((3, 130), (1, 127)), ratio=128, block=256, entry_block=2),
    "all-tokens": Case(((2, 90),), left=-1, ratio=7),
    "selected": Case(((1, 300), (2, 9), (1, 3)), topk=70, padding=1),
    "selected-of-128-heads": Case(((0, 7), (2, 40)), topk=3, heads=128, left=9),
}


class Made(NamedTuple):
    """Tensors of a case, on the CPU: pools are NaN where nobody may look."""

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
    query = torch.full((rows + case.padding, case.heads + 1, 512 + 8), math.nan, dtype=dtype)[:, 1:, 8:]
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


def hold(case, kind=None, seed=0, *, sinks=False, scales=(1.0, 1.0), dtype=HALF, larger=1.0, **options):
    """Hold the kernel to the reference, and return what was launched."""
    made = make(case, seed, dtype, kind, scales if kind is not None else (1.0, 1.0), larger)
    scales = scales if kind is not None else (1.0, 1.0)
    options = AttentionOptions(softmax_scale=0.07 / larger, **options)
    if sinks:
        g = torch.Generator().manual_seed(seed)
        options = AttentionOptions(softmax_scale=0.07 / larger, sinks=torch.randn(case.heads, generator=g))
    theirs = (
        options
        if options.sinks is None
        else AttentionOptions(softmax_scale=options.softmax_scale, sinks=options.sinks.to(DEVICE))
    )
    given, named = Made(*map(on_device, made)), dict(cache_scale=scales[0], entry_scale=scales[1])
    with hopper_on_a_cpu(seed) if ON_A_CPU else nullcontext() as kernels, fastattn.use_kernel("triton"):
        out, lse = attend(fastattn.compressed, given, theirs, **named)
    (exact, exact_lse), (low, low_lse) = (by_reference(made, options, scales, x) for x in (torch.float64, dtype))
    rows = int(made.batch.cu_seqlens_q[-1])
    assert not out[rows:].any() and (lse[rows:] == -math.inf).all(), "padding"
    assert_close(out.cpu(), exact.to(dtype), low)
    assert_close(lse.cpu(), exact_lse.float(), low_lse.float(), name="lse")
    return kernels[-1].launched if ON_A_CPU else None


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_window_and_entries_are_one_softmax(case, kind, sinks):
    launched = hold(case, kind, sinks=sinks)
    assert launched is None or len(launched) == 1


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", ["decodes", "chunks", "selected"])
def test_splits_of_the_keys(name, kind, sinks, monkeypatch):
    """Of up to five steps, or of none; sinks count once."""
    monkeypatch.setattr(compressed_hopper, "sms_of", lambda device: 40)
    launched = hold(CASES[name], kind, sinks=sinks)
    assert launched is None or " x " in launched[0], "keys are not split"


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_hopper, "sms_of", lambda device: sms)
        hold(case, kind, seed, sinks=seed % 3 == 0, scales=scales)
