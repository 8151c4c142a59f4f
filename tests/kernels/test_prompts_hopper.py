"""Prompts by warps with roles: which they are, and that they are right, on a card that has them and interpreted."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

import fastattn
import fastattn.chunked_prefill
import fastattn.metadata
import fastattn.mla
import fastattn.quantized
import fastattn.varlen
import refattn.chunked_prefill
import refattn.quantized
import refattn.varlen
from fastattn.kernels import device as devices
from fastattn.kernels.triton import expand, hopper, launch, load_hopper, prompts_hopper
from fastattn.kernels.triton import tuning as triton_tuning
from fastattn.kernels.triton.quantized import UNQUANTIZED, Quantization
from fastattn.kernels.triton.tuning import LaunchConfig
from refattn.keys import QuantizedPages
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import Case, build, of_batches, ragged_cases, with_a_prompt
from tests.helpers.latents import REAL, Latents, by_reference, filled, prefill
from tests.helpers.options import per_head
from tests.helpers.steps import record
from tests.helpers.stored import KINDS, assert_twins_agree_over_quantized, store
from tests.helpers.tolerance import assert_matches_reference
from twinattn.course.gluon.interpret import hopper_on_a_cpu
from twinattn.kit import plan_and_attend

ROWS = torch.zeros(66, dtype=torch.int32)
DEFAULT, SIZES = AttentionOptions(), ("sizes", (128, 128))
PROMPTS = {  # whether the kernel takes them, and what they are but 66 tokens, 4 heads of 128 numbers, causal, in pages
    "plain": (True, {}),
    "window": (True, dict(plan=dict(window_size=(8, 0)))),
    "all-keys": (True, dict(plan=dict(causal=False))),
    "sinks": (True, dict(options=AttentionOptions(sinks=torch.zeros(4)))),
    "heads-of-64": (True, dict(sizes=(64, 64))),
    "float16": (True, dict(dtype=torch.float16)),
    "softcap": (False, dict(options=AttentionOptions(softcap=5.0))),
    "alibi": (False, dict(options=AttentionOptions(alibi_slopes=torch.ones(4)))),
    "batch-invariant": (False, dict(options=AttentionOptions(batch_invariant=True))),
    "intervals": (False, dict(plan=dict(causal=False, first_visible=ROWS, last_visible=ROWS))),
    "positions": (False, dict(plan=dict(positions=ROWS))),
    "keys-of-192": (True, dict(sizes=(192, 128))),
    "keys-and-values-of-192": (False, dict(sizes=(192, 192))),
    "heads-of-96": (False, dict(sizes=(96, 96))),
    "heads-of-256": (False, dict(sizes=(256, 256))),
    "float32": (False, dict(dtype=torch.float32)),
    "another-type-of-keys": (False, dict(stored=torch.float16)),
    "quantized": (False, dict(quantization=Quantization("e4m3"))),
    "rows-that-are-not-aligned": (False, dict(row=136)),
    "elements-apart": (False, dict(row=256, step=2)),
    "few-rows": (False, dict(query_len=32)),
    "splits": (False, dict(splits=2)),
    "splits-of-smaller-tiles": (True, dict(sizes=(192, 128), splits=2, rows=64, sms=8)),
    "splits-of-whole-tiles": (False, dict(sizes=(192, 128), splits=2, sms=8)),
    "splits-for-many-sms": (False, dict(sizes=(192, 128), splits=2, rows=64, sms=9)),
    "another-gpu": (False, dict(capability=(10, 0))),
    "a-later-triton": (False, dict(version="3.10.0")),
}


@pytest.mark.core
@pytest.mark.parametrize(("taken", "changed"), PROMPTS.values(), ids=PROMPTS)
def test_which_prompts_are_for_warps_with_roles(taken, changed, monkeypatch):
    """Whatever that kernel does not compute, or the compiler does not know to be aligned, goes to the other one."""
    monkeypatch.setattr(devices, "capability", lambda device: changed.get("capability", (9, 0)))
    monkeypatch.setattr(devices, "num_sms", lambda device: changed.get("sms", 132))
    monkeypatch.setattr(hopper.triton, "__version__", changed.get("version", "3.7.1"))
    query_len, (size, value_size) = changed.get("query_len", 33), changed.get("sizes", (128, 128))
    dtype = changed.get("dtype", torch.bfloat16)
    stored = changed.get("stored", dtype)
    query = torch.zeros(2 * query_len, 4, size, dtype=dtype)
    key = torch.zeros(5, 64, 1, changed.get("row", size), dtype=stored)[..., :: changed.get("step", 1)][..., :size]
    value = torch.zeros(5, 64, 1, value_size, dtype=stored)
    plan = Plan(make_batch([query_len] * 2, [70] * 2, [[0, 1], [2, 1]]), 64, **changed.get("plan", {}))
    tuning = LaunchConfig(changed.get("rows", 128), 64, 8, 2, 1, changed.get("splits", 1))
    options, quantization = changed.get("options", AttentionOptions()), changed.get("quantization", UNQUANTIZED)
    assert prompts_hopper.takes(query, key, value, plan, options, tuning, quantization) is taken


LENS = ((70, 70), (0, 40), (3, 150), (130, 150), (64, 64), (20, 9))
CASES = [
    Case("groups-of-four", LENS, heads=(8, 2), head_size=128, padding_rows=3),
    Case("groups-of-seven", LENS, heads=(7, 1), head_size=64, block_size=24),
    Case("one-head-each", LENS, heads=(2, 2), head_size=128, block_size=1),
    Case("heads-first", LENS, heads=(4, 2), head_size=128, layout="HND"),
    Case("blocks-of-whole-steps", LENS, heads=(8, 2), head_size=128, block_size=128, padding_rows=2),
    Case("heads-first-in-blocks-of-two-steps", LENS, heads=(4, 4), head_size=64, block_size=256, layout="HND"),
    Case("keys-of-192", LENS, heads=(4, 2), head_size=192, value_head_size=128, padding_rows=2),
    Case(
        "keys-of-192-heads-first", LENS, heads=(3, 3), head_size=192, value_head_size=128, block_size=256, layout="HND"
    ),
]
MASKED = CASES[0], CASES[4], CASES[6]
ASKED = {
    "causal": {},
    "window": dict(window_size=(100, 0)),
    "two-sided-window": dict(causal=False, window_size=(40, 25)),
    "all-keys": dict(causal=False),
    "negative-scale": dict(softmax_scale=-0.3),
    "sinks": dict(sinks=True),
}


@pytest.fixture
def has_roles(device):
    """Whether warps have roles there: on Hopper, and on a CPU, which interprets the same kernel."""
    on_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    with hopper_on_a_cpu() if device == "cpu" else nullcontext():
        yield on_hopper or device == "cpu"


@pytest.fixture
def launched(has_roles, monkeypatch):
    """Return a function that counts launches of the kernel for Hopper; None where it is not there, and has none.

    Keys are not split, and pages of 8 bits are expanded for few rows.
    """
    found, of_prompts = [], prompts_hopper.launch
    monkeypatch.setattr(triton_tuning, "sms_of", lambda device: 1)
    monkeypatch.setattr(expand, "ROWS_TO_EXPAND", {4: 32, 8: 32})
    monkeypatch.setattr(prompts_hopper, "launch", lambda *args, **more: found.append(1) or of_prompts(*args, **more))

    def count() -> int | None:
        assert has_roles or not found
        return len(found) if has_roles else None

    return count


@pytest.mark.parametrize(
    ("case", "asked"),
    [
        *((case, ASKED["causal"]) for case in CASES),
        *((case, asked) for case in MASKED for asked in list(ASKED.values())[1:]),
    ],
    ids=[*(case.name for case in CASES), *(f"{name}-{case.name}" for case in MASKED for name in list(ASKED)[1:])],
)
def test_prompts_of_as_many_tiles_as_there_are_processors(case, asked, launched, device):
    """Tiles of 128 rows whose keys are not split; on Hopper they are for warps with roles, on other GPUs not."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    inputs = build(case, dtype=dtype, device=device)
    asked = per_head(asked, case, device)
    for path, reference, given in (
        (fastattn.chunked_prefill, refattn.chunked_prefill, inputs.tensors),
        (fastattn.varlen, refattn.varlen, inputs.rows),
    ):
        with fastattn.use_kernel("triton"):
            out, lse = plan_and_attend(path, *given, **asked, return_lse=True)
        assert_matches_reference(
            out, lse, lambda *x, path=reference, **more: plan_and_attend(path, *x, **more), *given, **asked
        )
    assert launched() in (2, None)


def test_a_window_of_several_steps(launched, device):
    """Of its steps the last have a mask, those that all rows see have none, and the first ones have one again."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    inputs = build(Case("window", ((150, 800),), heads=(4, 2), head_size=64), dtype=dtype, device=device)
    with fastattn.use_kernel("triton"):
        out, lse = plan_and_attend(fastattn.varlen, *inputs.rows, window_size=(500, 0), return_lse=True)
    reference = partial(plan_and_attend, refattn.varlen)
    assert_matches_reference(out, lse, reference, *inputs.rows, window_size=(500, 0))
    assert launched() in (1, None)


@pytest.mark.parametrize("case", [CASES[0], *CASES[4:]], ids=lambda case: case.name)
def test_other_layers_of_a_plan(case, has_roles, device, monkeypatch):
    """Each has its own tensors, and NaN behind the keys of a sequence, where tiles that are copied as a whole end."""
    monkeypatch.setattr(triton_tuning, "sms_of", lambda device: 1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    packed, lay_out = [], launch.PackedLaunch.of
    monkeypatch.setattr(launch.PackedLaunch, "of", lambda *given: packed.append(lay_out(*given)) or packed[-1])
    built = dict(dtype=dtype, device=device, poison=(torch.nan,))
    first = build(case, **built)
    others = (first.values, first.keys) if case.head_size == case.value_size else (first.keys, first.values)
    keys, values = ([x.cpu().flip(-1) for x in rows] for rows in others)
    layers = [first, build(case, keys=keys, values=values, **built), first]
    for path, reference, tensors_of, block in (
        (fastattn.chunked_prefill, refattn.chunked_prefill, "tensors", dict(block_size=case.block_size)),
        (fastattn.varlen, refattn.varlen, "rows", {}),
    ):
        plan = path.plan(first.batch, **block)
        for layer in layers:
            given = getattr(layer, tensors_of)
            with fastattn.use_kernel("triton"):
                out, lse = path.attention(*given[:3], plan, return_lse=True)
            assert_matches_reference(
                out, lse, lambda *x, path=reference, **more: plan_and_attend(path, *x, **more), *given
            )
    assert not (has_roles and device == "cuda") or (len(packed) >= 2 and None not in packed), (
        "Triton's launcher takes longer on the CPU"
    )


@pytest.mark.parametrize("options", [{}, dict(sinks=True)], ids=["plain", "sinks"])
def test_prompts_over_latents(options, launched, device):
    """Keys of 192 and values of 128 are made chunk by chunk: new tokens are causal, their context is seen whole."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    lens = (70, 70), (0, 40), (3, 150), (130, 150), (64, 64)
    given = Latents(Case("latents", lens, heads=(2, 1), padding_rows=2), dtype=dtype, device=device, sizes=REAL)
    arguments = given.query, given.new, given.cache, *given.projections.values(), given.batch
    options = filled(options, 2, device) | dict(softmax_scale=192**-0.5)
    with fastattn.use_kernel("triton"):
        answer = prefill(fastattn.mla, *arguments, workspace=200, **options)
    assert_matches_reference(*answer, by_reference(prefill, workspace=200), *arguments, **options)
    assert launched() in (1 + 4, None), "the new tokens, and chunks of 40 tokens of a context of up to 147"


@pytest.mark.skipif(not launch.INTERPRETED, reason="for a drawn order; a GPU compiles each of the shapes")
@of_batches
@drawn(
    case=with_a_prompt(ragged_cases(head_sizes=(64, 128, 192), longest=400), shortest=129).map(
        lambda case: replace(case, value_head_size=min(case.head_size, 128))
    ),
    asked=st.sampled_from(list(ASKED.values())),
    over_rows=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_prompts_in_any_order(case, asked, over_rows, seed):
    """Whoever is first, warpgroups and what is asynchronous, and with NaN behind the keys of each sequence.

    The counters of tiles are 0 again after it, for the next launch on a stream.
    """
    counters = torch.zeros(2, dtype=torch.int32)
    path, reference = (
        (fastattn.varlen, refattn.varlen) if over_rows else (fastattn.chunked_prefill, refattn.chunked_prefill)
    )
    inputs = build(case, dtype=torch.float16, poison=(torch.nan,))
    given = inputs.rows if over_rows else inputs.tensors
    asked = per_head(asked, case, "cpu")
    with (
        mock.patch.object(triton_tuning, "sms_of", lambda device: 1),
        mock.patch.object(load_hopper, "counters_of", lambda device: counters),
        hopper_on_a_cpu(seed) as (kernel, *_),
        fastattn.use_kernel("triton"),
    ):
        out, lse = plan_and_attend(path, *given, **asked, return_lse=True)
    assert len(kernel.launched) == 1
    assert_matches_reference(out, lse, lambda *x, **more: plan_and_attend(reference, *x, **more), *given, **asked)
    assert counters.tolist() == [0, 0]


# --- caches of 8 bits, which are dequantized into memory first ---

SCALED = [(kind, per) for kind in ("e4m3", "e5m2") for per in ("number", "head", "sequence")]
SCALED += [("int8", "token"), ("int8-half", "token")]


@pytest.mark.parametrize(("kind", "per"), SCALED, ids=["-".join(pair) for pair in SCALED])
@pytest.mark.parametrize("round_query", [False, True], ids=["query-as-it-is", "query-rounded"])
def test_prompts_over_8_bits(kind, per, round_query, launched, device):
    """Each key is dequantized once, whatever its scale belongs to, and NaN past the keys of a sequence is not read."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    case = Case("pools", LENS, heads=(4, 2), head_size=64, block_size=24, layout="HND", padding_rows=2)
    stored = store(case, kind, dtype=dtype, per=per, round_query=round_query, spread=True, device=device)
    if kind == "int8-half":
        stored.value_cache = stored.value_cache.to(dtype)
    with fastattn.use_kernel("triton"):
        assert_twins_agree_over_quantized(stored, again=False)
    assert launched() in (1, None)


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("plan", ["all", "window", "untrimmed-window"])
def test_prompts_of_each_mask_over_8_bits(plan, kind, launched, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    case = Case("masks", LENS, heads=(8, 2), head_size=128, padding_rows=2)
    with fastattn.use_kernel("triton"), mock.patch.object(expand, "ROWS_TO_EXPAND", {8: 1}):
        assert_twins_agree_over_quantized(store(case, kind, dtype=dtype, device=device), plan, again=False)
    assert launched() in (1, None)


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_a_step_of_prompts_over_8_bits_is_replayed_for_others(kind, launched, device):
    """A captured step dequantizes what the pools hold then: other keys, other lengths and other scales."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    buffers = fastattn.metadata.make_buffers(3, device=device, columns=12, max_query_len=100, max_seq_len=160)
    steps = [((100, 100), (1, 9)), ((70, 150), (90, 90), (2, 2)), ((16, 160),)]
    stores = [
        store(Case("step", lens, heads=(4, 2)), kind, dtype=dtype, per="head", seed=i, device=device)
        for i, lens in enumerate(steps)
    ]
    query = torch.zeros(162, 4, 64, dtype=dtype, device=device)
    blocks = max(len(stored.key_cache) for stored in stores)
    pools = [stores[0].key_cache.new_zeros(blocks, 16, 2, 64) for _ in "kv"]
    tensors = {name: x for name, x in vars(stores[0].scales).items() if isinstance(x, torch.Tensor)}
    if kind == "int8":
        tensors["key"] = torch.zeros(blocks, 16, 2, device=device)
    scales = replace(stores[0].scales, **tensors)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with fastattn.use_kernel("triton"):
            return plan_and_attend(fastattn.quantized, query, *pools, buffers, scales=scales, return_lse=True)

    replay = None
    for stored in stores:
        rows = len(stored.query)
        fastattn.metadata.refill(buffers, stored.batch)
        query.zero_()[:rows] = stored.query
        for pool, mine in zip(pools, (stored.key_cache, stored.value_cache), strict=True):
            pool.view(torch.uint8)[: len(mine)] = mine.view(torch.uint8)
        for name, x in tensors.items():
            mine = getattr(stored.scales, name)
            x[: len(mine)] = mine
        replay = replay or record(step, device)
        out, lse = replay()
        on_host = {name: x.cpu() for name, x in vars(stored.scales).items() if isinstance(x, torch.Tensor)}
        reference = partial(plan_and_attend, refattn.quantized, scales=replace(stored.scales, **on_host))
        assert_matches_reference(out[:rows], lse[:rows], reference, *stored.in_bytes)
        assert not out[rows:].any(), "a padding row holds something"
    assert launched() in (2 if device == "cuda" else len(stores), None)


@pytest.mark.parametrize(
    ("expanded", "changed"),
    [
        (True, {}),
        (True, dict(kind="int8")),
        (True, dict(sizes=(64, 64))),
        (True, dict(plan=dict(window_size=(2000, 0)))),
        (True, dict(plan=dict(window_size=(255, 0)))),  # a key meets an eighth of 4096 rows
        (False, dict(plan=dict(window_size=(254, 0)))),
        (True, dict(query_len=128)),  # 512 rows per key, which were measured
        (False, dict(query_len=127)),
        (False, dict(query_len=1)),
        (False, dict(num_seqs=65)),  # more memory than a call may take
        (False, dict(sizes=(96, 96))),
        (False, dict(row=136)),
        (False, dict(options=AttentionOptions(softcap=5.0))),
        (False, dict(options=AttentionOptions(batch_invariant=True))),
        (False, dict(dtype=torch.float32)),
        (False, dict(kind="int8", values=torch.bfloat16)),
        (False, dict(capability=(8, 0))),
    ],
    ids=str,
)
@pytest.mark.core
def test_which_prompts_over_8_bits_are_dequantized_into_memory(expanded, changed, monkeypatch):
    """Those whose keys meet many queries, where the kernel that reads the copy is the one for Hopper."""
    monkeypatch.setattr(devices, "capability", lambda device: changed.get("capability", (9, 0)))
    monkeypatch.setattr(triton_tuning, "sms_of", lambda device: 132)
    query_len, num_seqs, (size, value_size) = (changed.get(*x) for x in (("query_len", 1024), ("num_seqs", 9), SIZES))
    kind, dtype = changed.get("kind", "e4m3"), changed.get("dtype", torch.float16)
    query = torch.empty(num_seqs * query_len, 32, changed.get("row", size), dtype=dtype)[..., :size]
    key, value = (torch.empty(1, 16, 8, n, dtype=KINDS[kind]) for n in (size, value_size))
    value = value.to(changed.get("values", value.dtype))
    of_heads = torch.ones(8)
    scales = Int8Scales(torch.ones(1, 16, 8), None) if kind == "int8" else Fp8Scales(of_heads, of_heads)
    batch = make_batch([query_len] * num_seqs, [2048] * num_seqs, [[0] * 128] * num_seqs)
    plan = Plan(batch, 16, **changed.get("plan", {}))
    assert expand.expands(query, QuantizedPages(key, value, scales), plan, changed.get("options", DEFAULT)) is expanded


@pytest.mark.core
def test_counters_are_of_a_stream_and_of_a_captured_launch(monkeypatch):
    """Launches on two streams, or of two graphs, may run at once: none may draw tiles of the other."""
    now = dict(stream=7, captures=False)
    zeros = torch.zeros
    monkeypatch.setattr(load_hopper, "_counters", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captures"])
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **more: zeros(*size, **more))
    gpus = [torch.device("cuda", index) for index in range(2)]
    first = load_hopper.counters_of(gpus[0])
    assert first.tolist() == [0, 0] and first.dtype == torch.int32
    assert load_hopper.counters_of(gpus[0]) is first
    assert load_hopper.counters_of(gpus[1]) is not first
    now["stream"] = 8
    assert load_hopper.counters_of(gpus[0]) is not first
    now.update(stream=7, captures=True)
    captured = [load_hopper.counters_of(gpus[0]) for _ in range(2)]
    assert captured[0] is not captured[1] and not any(x is first for x in captured)


def test_streams_and_a_graph_draw_tiles_of_their_own(device, monkeypatch):
    """One plan, launched on two streams at once and in a graph beside them, gives the same numbers each time."""
    if device != "cuda":
        pytest.skip("needs a GPU: the kernel runs on two CUDA streams and in a CUDA graph")
    monkeypatch.setattr(triton_tuning, "sms_of", lambda device: 1)
    case = Case("many-tiles", ((3000, 3000), (700, 4000)), heads=(16, 4), head_size=128)
    inputs = build(case, dtype=torch.bfloat16, device=device)
    given = inputs.rows[:3]
    plan = fastattn.varlen.plan(inputs.batch)
    with fastattn.use_kernel("triton"):
        expected = fastattn.varlen.attention(*given, plan).clone()
        torch.cuda.synchronize()
        streams, graph, found = [torch.cuda.Stream() for _ in range(2)], torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            captured = fastattn.varlen.attention(*given, plan)
        for _ in range(8):
            graph.replay()
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(fastattn.varlen.attention(*given, plan))
        torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert len(found) == 16 and all(torch.equal(out, expected) for out in found)
