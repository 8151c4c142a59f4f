"""Our Triton kernels, interpreted on a CPU and compiled on a GPU: what the paths' own tests do not reach."""

import importlib
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl

import fastattn
import fastattn.chunked_prefill
import fastattn.kv_cache
import fastattn.local
import fastattn.merge
import fastattn.metadata
import fastattn.mla
import fastattn.sliding_window
import fastattn.speculative
import refattn.attention
import refattn.chunked_prefill
import refattn.kv_cache
import refattn.merge
import refattn.mla
import refattn.varlen
import twinattn.kit
from fastattn.kernels import Problem, order, triton
from fastattn.kernels import device as devices
from fastattn.kernels.flash import fixup as gpu_adapt
from fastattn.kernels.flash import recompute as gpu_repair
from fastattn.kernels.flash.fixup import empty_output, fix_up
from fastattn.kernels.problem import Subtraction
from fastattn.kernels.replay import memo_of
from fastattn.kernels.triton import attention as triton_attention
from fastattn.kernels.triton import cache as triton_cache
from fastattn.kernels.triton import differential as triton_differential
from fastattn.kernels.triton import hopper, latents_hopper
from fastattn.kernels.triton import launch as triton_launch
from fastattn.kernels.triton import merge as split
from fastattn.kernels.triton import merge as triton_merge
from fastattn.kernels.triton import recurrent as triton_recurrent
from fastattn.kernels.triton import tuning as triton_tuning
from fastattn.kernels.triton.expand import repage
from fastattn.kernels.triton.launch import Launch
from fastattn.kernels.triton.quantized import UNQUANTIZED, Quantization
from fastattn.kernels.triton.queries import count_tiles
from fastattn.kernels.triton.tuning import SCRATCH_BYTES, LaunchConfig, fit_shared_memory, is_wide
from refattn.keys import Pages
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import Accepted
from tests.helpers import (
    interpreted,
    kernels_present,  # noqa: F401 (quickens the interpreter)
    states,
)
from tests.helpers.alone import alone, assert_rows_do_not_change
from tests.helpers.batches import Case, assert_same_masks, build, masks_by_hand, read_masks
from tests.helpers.options import OPTIONS, WINDOWS, given, per_head
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.positions import answer_by_hand
from tests.helpers.tolerance import assert_close, assert_matches_reference
from twinattn.kit.search.tensors import laid


def attend(query, key, value, plan, options, out=None, **asked):
    """Attend in one level."""
    return triton_attention.attend_levels(query, key, value, [plan], options, out, **asked)[:2]


MIXED = Case("mixed", ((4, 6), (1, 60), (10, 17), (0, 9), (5, 2)), heads=(3, 1), padding_rows=3)


def launched_as(**changes):
    """Change what is chosen for a launch."""
    chosen = triton_attention.tune
    return mock.patch.object(triton_attention, "tune", lambda *arguments: chosen(*arguments)._replace(**changes))


# --- when it is taken ---


@pytest.mark.parametrize(
    ("taken", "lens", "heads", "options"),
    [
        (True, ((1, 8192),) * 64, (32, 8), {}),
        (True, ((4096, 8192),) * 8, (32, 8), dict(batch_invariant=True)),
        (True, ((256, 256),) * 32, (9, 3), {}),
        (False, ((512, 512),) * 16, (32, 8), {}),
        (True, ((8, 32768),) * 8, (32, 8), {}),
        (False, ((8, 32768),) * 9, (32, 8), {}),
        (True, ((512, 8704),), (9, 3), {}),
        (False, ((512, 8704),), (32, 8), {}),
        (False, ((8192, 8192),) * 2, (32, 8), {}),
    ],
    ids=[
        *("decodes", "invariant", "short-prompts", "longer-prompts", "few-small-tiles", "more-small-tiles"),
        *("few-tiles", "more-tiles", "long-prompts"),
    ],
)
def test_it_is_taken_where_it_answers_first(taken, lens, heads, options, monkeypatch):
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    problem = Problem(
        "attend",
        torch.device("cuda"),
        torch.bfloat16,
        *("pages", 1, False),
        *heads,
        *(128, 128) if heads == (32, 8) else (64, 64),
        block_size=16,
        max_query_len=max(q for q, _ in lens),
        max_seq_len=max(s for _, s in lens),
        num_seqs=len(lens),
        **options,
    )
    names = order.priorities(problem)
    for other in ("fa4", "fa3"):
        assert (names.index("triton") < names.index(other)) == taken
    assert names.index("triton") < names.index("fa2") < names.index("torch_flash"), "on Hopper in any case"


# --- attention ---


@pytest.mark.parametrize("rows", [2, 40], ids=["turned", "many-rows"])
def test_nothing_is_read_between_the_windows_of_rows_that_stand_apart(rows, device):
    """NaN lies there in keys and values, and no row sees it."""
    generator = torch.Generator().manual_seed(0)
    query, (keys, values) = (
        torch.randn(rows, 1, 16, generator=generator).to(device),
        torch.randn(2, 16, 16, 1, 16, generator=generator).to(device),
    )
    keys[7], values[7] = torch.nan, torch.nan
    positions = torch.cat([torch.arange(20, 20 + rows // 2), torch.arange(250 - rows // 2, 250)]).int()

    def plan(device):
        batch = make_batch([rows], [256], [list(range(16))], device=device)
        return Plan(batch, block_size=16, window_size=(9, -1), positions=positions.to(device))

    def reference(query, keys, values, *, return_lse):
        return refattn.attention.attend_plan(query, Pages(keys, values), plan(query.device), AttentionOptions())

    out, lse = triton_attention.attend_to_keys(query, Pages(keys, values), plan(device), AttentionOptions(), None)
    assert_matches_reference(out, lse, reference, query, keys, values)


by_reference = partial(twinattn.kit.plan_and_attend, refattn.chunked_prefill)


def assert_agrees(path, *arguments, **options):
    """Hold one call of a twin on our kernel to the rule; what the paths' own tests show is not shown again."""
    twin, reference = (
        partial(twinattn.kit.plan_and_attend, importlib.import_module(f"{package}.{path}"))
        for package in ("fastattn", "refattn")
    )
    with fastattn.use_kernel("triton"):
        out, lse = twin(*arguments, **options, return_lse=True)
    assert_matches_reference(out, lse, reference, *arguments, **options)


@pytest.mark.covers("B70")
@pytest.mark.parametrize("splits", [1, 3])
def test_layers_of_a_step_are_launched_alike(splits, device):
    """The first layer prepares the launches, and others replay them with their own tensors and numbers per head."""
    case = Case("layers", ((2, 20), (1, 40), (0, 9)), heads=(2, 1), padding_rows=1)
    lay_out = partial(build, case, device=device, poison=(0.5,))
    first = lay_out()
    _, key_cache, _, plan, _ = given(*first.tensors)
    unaligned = torch.empty(key_cache.numel() + 1, device=device)[1:].view(key_cache.shape).copy_(key_cache)
    layers = [  # each with whether it is replayed
        (False, first, {}),
        (True, lay_out(seed=1), {}),
        (False, lay_out(seed=2), dict(sinks=torch.tensor([1.0, -2.0], device=device))),
        (True, first, dict(sinks=torch.tensor([3.0, 2.0], device=device))),
        (False, first, dict(alibi_slopes=torch.tensor([0.5, 0.1], device=device))),
        (True, lay_out(seed=3), dict(alibi_slopes=torch.tensor([0.2, 1.5], device=device))),
        (False, first, dict(softmax_scale=0.3)),
        (False, first, dict(softmax_scale=-0.3)),
        (False, lay_out(seed=3), dict(softmax_scale=-0.3)),  # the launch before changes the query
        (False, first, dict(softcap=2.0)),
        (False, first, dict(batch_invariant=True)),
        (False, replace(first, key_cache=key_cache.transpose(1, 3).contiguous().transpose(1, 3)), {}),
        (False, replace(first, key_cache=unaligned), {}),
        (False, lay_out(dtype=torch.float16), {}),
        (False, build(replace(case, heads=(4, 2)), device=device, poison=(0.5,)), {}),
        (True, first, {}),
    ]
    attend = partial(fastattn.chunked_prefill.attention, return_lse=True)
    with fastattn.use_kernel("triton"), launched_as(splits=splits, most_splits=splits, block_n=16):
        for is_replayed, layer, options in layers:
            tensors = layer.query, layer.key_cache, layer.value_cache
            with mock.patch.object(triton_attention, "launch_attend", wraps=triton_attention.launch_attend) as launch:
                answer = attend(*tensors, plan, AttentionOptions(**options))
                assert launch.called != is_replayed
                in_memory = torch.full_like(answer[0], torch.nan)
                assert attend(*tensors, plan, AttentionOptions(**options), out=in_memory)[0] is in_memory
                assert launch.call_count == 2 * (not is_replayed)
            assert torch.equal(in_memory, answer[0])
            *anew, options = given(*tensors, first.batch, **options)
            assert all(map(torch.equal, answer, attend(*anew, options)))


@pytest.mark.parametrize("splits", [1, 3])
def test_values_that_are_keys_have_launches_of_their_own(splits, device):
    """The same tensors, values read apart and read with their keys: a plan must not take one launch for the other."""
    inputs = build(Case("latents", ((2, 40), (1, 60)), heads=(2, 1)), device=device)
    query, key_cache, _, plan, _ = given(*inputs.tensors)
    options = AttentionOptions(softmax_scale=0.3)
    answers = []
    with fastattn.use_kernel("triton"), launched_as(splits=splits, most_splits=splits, block_n=16):
        for _ in range(2):
            answers.append(fastattn.chunked_prefill.attention(query, key_cache, key_cache[..., :48], plan, options))
            answers.append(fastattn.mla.attention(query, key_cache[:, :, 0], plan, options, latent_rank=48))
    assert len(memo_of(plan).bound) == 2
    assert all(map(torch.equal, answers[:2], answers[2:]))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stride", "wide"), [(2**27 - 1, False), (2**27, True)])
def test_tokens_of_a_block_that_32_bits_do_not_reach(stride, wide):
    assert is_wide(16, 1, stride) is is_wide(16, stride, 1) is wide


@pytest.mark.parametrize(
    ("tune", "programs", "visible", "expected"),
    [
        ("_tune", 8, 131072, (33, 4)),  # one sequence: two programs per SM
        ("_tune", 64, 8192, (8, 2)),  # eight of them: four
        ("_tune_quantized", 8, 131072, (49, 4)),  # and three over quantized values
        ("_tune_quantized", 64, 8192, (6, 4)),
        ("_tune_quantized", 512, 8192, (1, 2)),  # 64 decodes
        ("_tune_latents", 64, 8192, (2, 4)),  # 16 heads: one program per SM
        ("_tune_latents", 128, 2048, (1, 8)),  # and no splits
        ("_tune_latents", 28, 8192, (9, 4)),  # two, where one would leave too many without any
        ("_tune_latents", 8, 2048, (16, 4)),  # one query of 128 heads
    ],
)
def test_splits_that_were_measured(tune, programs, visible, expected):
    """On an H200 of 132 SMs, with as few rows as can be: how many splits, and the warps of a program."""
    if tune == "_tune_latents":
        chosen = triton_tuning._tune_latents(16, 1152, programs, visible, 132)
    else:
        is_quantized = tune == "_tune_quantized"
        chosen = triton_tuning._tune(8, 128 if is_quantized else 256, programs, visible, 132, is_quantized)
    assert (chosen.splits, chosen.num_warps) == expected


@pytest.mark.parametrize(
    ("seqs", "heads", "keys", "rows"),
    [(1, 128, 2048, 16), (2, 128, 1024, 16), (4, 128, 2048, 64), (1, 128, 8192, 64), (1, 16, 2048, 16)],
)
def test_few_latents_have_tiles_of_few_rows(seqs, heads, keys, rows, monkeypatch):
    """Where tiles of 64 rows and steps of 64 keys are fewer programs than there are SMs."""
    monkeypatch.setattr(triton_tuning, "sms_of", lambda device: 132)
    query, pool = torch.empty(seqs, heads, 576, dtype=torch.float16), torch.empty(1, 64, 1, 576, dtype=torch.float16)
    plan = refattn.mla.plan(make_batch([1] * seqs, [keys] * seqs, [[0] * (keys // 64)] * seqs), block_size=64)
    chosen = triton_tuning.tune(query, pool, pool[..., :512], plan, AttentionOptions(), 1152, shared=True)
    assert chosen.block_m == rows


NO_KEY = torch.zeros(2).int()
LATENTS = {  # whether the kernel takes them, and what they are but 128 heads of 576 numbers in bfloat16, causal
    "numbers": (True, {}),
    "quantized": (True, dict(quantization=Quantization("e4m3"), stored=torch.uint8, row=640)),
    "sinks": (True, dict(options=AttentionOptions(sinks=torch.zeros(128)))),
    "packed": (False, dict(quantization=Quantization("e4m3", groups=torch.ones(1)), stored=torch.uint8, row=640)),
    "rounded-queries": (False, dict(quantization=Quantization("e4m3", rounds_query=True), stored=torch.uint8, row=640)),
    "int8": (False, dict(quantization=Quantization("int8"), stored=torch.int8, row=640)),
    "another-type": (False, dict(stored=torch.float16)),
    "rows-that-are-not-aligned": (False, dict(row=584)),
    "elements-apart": (False, dict(row=1152, step=2)),
    "other-sizes": (False, dict(size=320)),
    "few-rows": (False, dict(rows=16)),
    "batch-invariant": (False, dict(run=2048)),
    "a-window": (False, dict(plan=dict(window_size=(8, 0)))),
    "later-keys": (False, dict(plan=dict(causal=False, window_size=(-1, 2**31 - 1)))),
    "all-keys": (False, dict(plan=dict(causal=False))),
    "intervals": (False, dict(plan=dict(causal=False, first_visible=NO_KEY, last_visible=NO_KEY))),
    "positions": (False, dict(plan=dict(positions=NO_KEY))),
    "softcap": (False, dict(options=AttentionOptions(softcap=5.0))),
    "alibi": (False, dict(options=AttentionOptions(alibi_slopes=torch.ones(128)))),
    "another-gpu": (False, dict(capability=(10, 0))),
    "a-later-triton": (False, dict(version="3.10.0")),
}


@pytest.mark.parametrize(("taken", "changed"), LATENTS.values(), ids=LATENTS)
def test_which_latents_are_for_warps_with_roles(taken, changed, monkeypatch):
    """Whatever that kernel does not compute, or the compiler does not know to be aligned, goes to the other one."""
    monkeypatch.setattr(devices, "capability", lambda device: changed.get("capability", (9, 0)))
    monkeypatch.setattr(hopper.triton, "__version__", changed.get("version", "3.7.1"))
    size, stored = changed.get("size", 576), changed.get("stored", torch.bfloat16)
    query = torch.zeros(2, 128, size, dtype=torch.bfloat16)
    pool = torch.zeros(3, 64, 1, changed.get("row", size), dtype=stored)[..., :: changed.get("step", 1)]
    plan = Plan(make_batch([1] * 2, [70] * 2, [[0, 1], [2, 1]]), 64, **changed.get("plan", {}))
    tuning = LaunchConfig(changed.get("rows", 64), 64, 8, 2, 1, 1, run=changed.get("run", 0))
    options, quantization = changed.get("options", AttentionOptions()), changed.get("quantization", UNQUANTIZED)
    assert latents_hopper.takes(query, pool[..., :size], plan, options, tuning, quantization) is taken


def test_warps_with_roles_get_what_the_layer_has_in_the_first_launch(monkeypatch):
    """The scales of a pool in fp8, and the sinks, are in it as they are in every replay."""
    launched, numbers, sinks = [], (0.25, 2.0, 0.5), torch.rand(128)
    monkeypatch.setattr(devices, "capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_launch, "compiled_for", lambda *_: mock.MagicMock(__getitem__=lambda *_: record))

    def record(*arguments):
        launched.append(dict(zip(latents_hopper._attend_kernel.arg_names, arguments, strict=True)))

    query, pool = torch.zeros(2, 128, 576, dtype=torch.bfloat16), torch.zeros(3, 64, 1, 640, dtype=torch.uint8)
    plan = Plan(make_batch([1] * 2, [70] * 2, [[0, 1], [2, 1]]), 64)
    options = AttentionOptions(softmax_scale=0.1, sinks=sinks)
    key, value = pool[..., :576], pool[..., :512]
    out, tuning = triton_merge.Out(torch.zeros(2, 128, 512), torch.zeros(2, 128)), LaunchConfig(64, 64, 8, 2, 1, 1)
    quantization, whole = Quantization("e4m3", numbers), triton_merge.whole()
    latents_hopper.launch(query, key, value, plan, options, tuning, out, whole, quantization=quantization)
    (given,) = launched
    keys, options = given["keys"], given["options"]
    assert (keys.query_number, keys.value_number) == (0.25, 0.5)
    assert options.scale == pytest.approx(0.1 * 2.0 * 0.25) and torch.equal(options.sinks, sinks)


@pytest.mark.parametrize("far", ["blocks", "places", "heads", "elements"])
def test_tensors_of_more_elements_than_32_bits_count(far, device):
    """Strides lead anywhere: to pages, rows of a page, heads, or the elements of a head."""
    if device == "cpu":
        pytest.skip("the interpreter would write all of the memory that is between")
    inputs = build(Case("c", ((3, 5), (1, 3)), heads=(3, 3), head_size=32, block_size=3), device=device)
    pools = []
    for pool in (inputs.key_cache, inputs.value_cache):
        n, p, hk, d = pool.shape
        strides = dict(blocks=p * hk * d, places=hk * d, heads=d, elements=1)
        strides[far] = -(-(2**31) // (dict(blocks=n, places=p, heads=hk, elements=d)[far] - 1)) + 64
        size = sum(stride * (count - 1) for stride, count in zip(strides.values(), pool.shape, strict=True)) + 1
        whole = torch.zeros(size, device=device)
        pools.append(whole.as_strided(pool.shape, tuple(strides.values())).copy_(pool))
    assert_agrees("chunked_prefill", inputs.query, *pools, inputs.batch)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_over_balanced_splits(options, device):
    inputs = build(MIXED, device=device, dtype=torch.float16)
    with launched_as(splits=1, most_splits=3, block_n=16):
        assert_agrees("chunked_prefill", *inputs.tensors, **per_head(options, MIXED, device))


@pytest.mark.covers("B72")
@pytest.mark.parametrize("splits", [(1, 1), (2, 2), (9, 9), (1, 9), (3, 9)], ids=str)
def test_any_number_of_splits(splits, device):
    """As many for each sequence, or up to as many for a long one."""
    case = Case("few-rows", ((2, 6), (1, 90), (3, 17), (0, 9), (5, 2)), heads=(1, 1), padding_rows=3)
    inputs = build(case, device=device)
    with launched_as(splits=splits[0], most_splits=splits[1], block_n=16):
        assert_agrees("chunked_prefill", *inputs.tensors, **per_head(OPTIONS["sinks"], case, device))


@pytest.mark.parametrize("sizes", [(16, 16), (64, 32), (80, 16)], ids=str)
def test_small_values_of_many_rows_in_a_pool_that_begins_anywhere(sizes, device):
    """Where they come through registers, Triton 3.6 on an H200 read other memory for products of 16 and 32 columns."""
    case = Case("small", ((31, 82), (1, 51), (4, 66)), heads=(2, 1), head_size=sizes[0], value_head_size=sizes[1])
    inputs = build(case, device=device, dtype=torch.float16)

    def moved(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape).copy_(x)

    tensors = inputs.query, moved(inputs.key_cache), moved(inputs.value_cache), inputs.batch
    for options in ({}, dict(softcap=1.0)):
        assert_agrees("chunked_prefill", *tensors, **options)


def test_a_batch_without_keys_has_a_split_of_its_own(device):
    """Whatever asks for it: with none there would be no launch, and nothing to make again in the next layer."""
    query, pool = torch.randn(3, 2, 16, device=device), torch.randn(2, 4, 1, 16, device=device)
    plan = fastattn.chunked_prefill.plan(make_batch([2], [0], [[]], device=device), block_size=4)
    for options in (AttentionOptions(), AttentionOptions(batch_invariant=True)):
        tuning = triton_attention.tune(query, pool, pool, plan, options, row_bytes=64)
        assert tuning.splits == tuning.most_splits == 1


def test_trees_without_a_node_have_no_row(device):
    """All rows are padding then: the nodes of an empty tree are attended to by no launch."""
    trees = fastattn.speculative.make_trees([[], []], device=device)
    batch = make_batch([0, 0], [0, 5], [[], [1, 0]], device=device)
    plan = fastattn.speculative.plan(batch, trees=trees, block_size=4)
    query, pool = torch.randn(3, 2, 16, device=device), torch.randn(2, 4, 1, 16, device=device)
    before = torch.full_like(query, torch.nan), torch.full((2, 3), torch.nan, device=device)
    out, lse = gpu_repair.attend_to_nodes(query, pool, pool, plan, AttentionOptions(), *before)
    assert not out.any() and lse.isneginf().all()


def test_a_long_sequence_gets_more_splits_among_short_ones(device):
    """By its share of all keys, of more sequences than are counted at a time; one with no queries has no share."""
    case = Case("long-one", ((1, 300), *[(1, 5)] * 9, (0, 500)), heads=(1, 1))
    inputs = build(case, device=device)
    noted = []

    class NotesParts(Launch):
        def __init__(self, kernel, grid, changing, arguments, options):
            if "part_lses" in changing:
                noted.append((changing["part_lses"] > -torch.inf).sum(0))
            super().__init__(kernel, grid, changing, arguments, options)

    with (
        launched_as(splits=2, most_splits=9, block_n=16),
        mock.patch.object(split, "SEQS_AT_ONCE", tl.constexpr(4)),
        mock.patch.object(triton_attention, "Launch", NotesParts),
    ):
        attend(*given(*inputs.tensors))
    assert noted[0].flatten().tolist() == [7, *[1] * 9], "19 steps of 28 in up to 9 runs of 3"


# The rows of a tile end with a token, or inside one; with two heads a tile of 128 is one token too small for 65.
EDGE = Case("edge", ((65, 70), (64, 64), (0, 3), (43, 90), (2, 2)), padding_rows=1)


@pytest.mark.parametrize(
    ("launch", "group"), [(dict(block_m=16), 3), (dict(block_m=64), 3), (dict(block_m=128, block_n=128), 2)], ids=str
)
def test_any_tile(launch, group, device):
    inputs = build(replace(EDGE, heads=(group, 1)), device=device)
    with launched_as(**launch):
        assert_agrees("chunked_prefill", *inputs.tensors)
        assert_agrees("chunked_prefill", *inputs.tensors, window_size=(9, 0), causal=False)


SHARED_MEMORY = {"H200": 232448, "A100": 166912, "RTX 4090": 101376}  # bytes that a program may have


@pytest.mark.parametrize("card", SHARED_MEMORY)
@pytest.mark.parametrize("row_bytes", [128, 256, 512, 1024], ids=lambda size: f"rows-of-{size}")
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_a_launch_fits_into_the_shared_memory(card, row_bytes, block_m):
    """A step of keys and its values, for each one in flight, beside the tile."""
    chosen = triton_tuning._tune(block_m, row_bytes, 64, 4096, 132)
    room = SHARED_MEMORY[card]
    fitted = fit_shared_memory(chosen, row_bytes, 2 * row_bytes, room)

    def needed(tuning):
        return (tuning.block_m + 2 * tuning.block_n * tuning.num_stages) * row_bytes

    assert needed(fitted) <= room
    if fitted != chosen:
        one_more = fitted._replace(num_stages=fitted.num_stages + 1)
        assert needed(one_more) > room - SCRATCH_BYTES, "shrunk further than needed"
    if card == "H200" and block_m * row_bytes <= 64 * 1024:
        assert fitted == chosen, "what was measured there is another launch"


def test_the_shared_memory_is_the_cards(monkeypatch):
    cards = {0: SimpleNamespace(shared_memory_per_block_optin=232448), 1: SimpleNamespace()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    devices.shared_memory.cache_clear()
    assert devices.shared_memory(torch.device("cuda", 0)) == 232448
    assert devices.shared_memory(torch.device("cuda", 1)) == 49152, "what every card has"
    devices.shared_memory.cache_clear()


def test_a_card_with_little_shared_memory(device):
    case = Case("c", ((1, 70), (20, 40)), heads=(4, 2))
    inputs = build(case, device=device)

    launched = []

    def fit(tuning, device, *, row_bytes, key_bytes, fewest_stages, spare):
        launched.append(fit_shared_memory(tuning, row_bytes, key_bytes, 20_000, fewest_stages, spare))
        assert launched[-1] != tuning, "the card has room for all of it"
        return launched[-1]

    with mock.patch.object(triton_attention, "fit", fit), launched_as(block_m=64):
        assert_agrees("chunked_prefill", *inputs.tensors)
    assert launched


@pytest.mark.parametrize(
    ("window", "causal"), [*((window, False) for window in WINDOWS), ((-1, -1), True), ((2, 3), True)], ids=str
)
def test_a_window_shows_exactly_its_keys(window, causal, device):
    case = Case("mixed", ((4, 6), (1, 64), (10, 17), (5, 2)), heads=(1, 1), padding_rows=2)
    left, right = window

    def sees(i, j):
        return (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)

    attention = partial(twinattn.kit.plan_and_attend, fastattn.chunked_prefill)
    with fastattn.use_kernel("triton"), launched_as(splits=1, most_splits=3, block_n=16):
        masks = read_masks(attention, case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 8192])
def test_a_chunk_shows_exactly_its_keys(chunk_size, device):
    lens, block_size = ((4, 6), (1, 64), (20, 40), (1, 63)), min(chunk_size, 16)
    case = Case("mixed", lens, heads=(1, 1), block_size=block_size, padding_rows=2)
    attention = partial(twinattn.kit.plan_and_attend, fastattn.local)
    with fastattn.use_kernel("triton"), launched_as(splits=1, most_splits=3, block_n=16):
        masks = read_masks(attention, case, device=device, chunk_size=chunk_size)
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i and i // chunk_size == j // chunk_size))


@pytest.mark.parametrize("sink", [1e4, 89.0, -1e4])
def test_a_sink_far_from_every_score(sink, device):
    """With large values, as a GPU takes an answer below 1e-38 for 0: the share of the keys may be as small as that."""
    inputs = build(Case("c", ((4, 6), (1, 40), (5, 2)), heads=(2, 2)), device=device)
    tensors = inputs.query, inputs.key_cache, inputs.value_cache * 1e12, inputs.batch
    for splits in (1, 3):
        with launched_as(splits=splits, most_splits=splits, block_n=16):
            assert_agrees("chunked_prefill", *tensors, sinks=torch.full((2,), sink, device=device))


# --- queries at any positions ---

GROUP = Case("group", ((5, 40), (3, 33), (30, 20), (0, 9), (1, 50), (2, 0)), heads=(4, 2), padding_rows=2)
SOMEWHERE = [60, 12, 39, 200, 5, *(33, 34, 35), *(7 * i % 31 - 5 for i in range(30)), 49, 0, 1]
POSITIONS = {
    "causal": {},
    "causal-bias": dict(alibi_slopes=True, softcap=5.0),
    "bias": dict(causal=False, alibi_slopes=True, sinks=True),
    "window": dict(window_size=(7, 0)),
    "two-sided-window": dict(causal=False, window_size=(7, 5), alibi_slopes=True),
}


def assert_right_at(positions, inputs, case, options, first_keys=None):
    """Hold our kernel to the rule, with the queries at some positions, and padding rows without an answer.

    `positions` are counted from the first key of each sequence; what the kernel is told begins at `first_keys`.
    """
    device, absolute = inputs.query.device, list(positions)
    if first_keys is not None:
        owners = [i for i, (q, _) in enumerate(case.lens) for _ in range(q)]
        absolute = [position + first_keys[i] for position, i in zip(positions, owners, strict=True)]
        first_keys = torch.tensor(first_keys, dtype=torch.int32, device=device)
    told = torch.tensor([*absolute, *[-7] * case.padding_rows], dtype=torch.int32, device=device)
    *tensors, plan, layer = given(*inputs.tensors, positions=told, first_keys=first_keys, **options)
    by_hand = inputs.query, inputs.keys, inputs.values, inputs.batch
    where = dict(positions=positions, window=plan.window, options=layer)
    assert_matches_reference(*attend(*tensors, plan, layer), answer_by_hand, *by_hand, **where)


@pytest.mark.parametrize(
    ("options", "first_keys", "launch"),
    every_pair_on_cpu(
        POSITIONS,
        [None, [0, 48, 1000, 5, 2**20, 16]],
        [dict(block_m=64), dict(splits=1, most_splits=3, block_n=16)],
    ),
    ids=str,
)
def test_queries_at_any_positions(first_keys, options, launch, device):
    """Past their keys, before them, in any order; a decode of each sequence would stand at its own."""
    inputs = build(GROUP, device=device)
    with launched_as(**launch):
        assert_right_at(SOMEWHERE, inputs, GROUP, per_head(POSITIONS[options], GROUP, device), first_keys)


@pytest.mark.parametrize("first_keys", [None, [5, 48]], ids=str)
@pytest.mark.parametrize("window_size", [(-1, -1), (70, 5)], ids=str)
def test_fixed_runs_of_keys_for_queries_at_any_positions(window_size, first_keys, device):
    """Also where the first step begins before the first key, and where a block begins within a step."""
    case = Case("far-apart", ((3, 200), (1, 130)), heads=(1, 1))
    inputs = build(case, device=device)
    options = dict(causal=False, window_size=window_size, batch_invariant=True)
    with mock.patch.object(triton_tuning, "INVARIANT_RUN", 64):
        assert_right_at([199, 20, 90, 140], inputs, case, options, first_keys)


def test_levels_with_more_splits_than_one_of_average_length(device):
    """The parts of a level lie after those of the one before it, as many as its longest sequence may have."""
    case = Case("c", ((1, 200), (1, 170), (1, 20), (2, 40)), heads=(2, 1))
    inputs = build(case, device=device)
    query_lens, seq_lens = zip(*case.lens, strict=True)
    tables = [row[: -(-s // 16)] for row, s in zip(inputs.batch.block_table.tolist(), seq_lens, strict=True)]
    tables[1][:8] = tables[0][:8]
    whole = make_batch(query_lens, seq_lens, tables, device=device)
    shared = make_batch([2, 1, 2], [128, 0, 0], [tables[0][:8], [], []], device=device)
    own = make_batch(query_lens, [72, 42, 20, 40], [tables[0][8:], tables[1][8:], *tables[2:]], device=device)
    tensors = inputs.tensors[:3]
    with launched_as(splits=1, most_splits=3, block_n=16):
        levels = [Plan(shared, 16, causal=False), Plan(own, 16)]
        out, lse, _ = triton_attention.attend_levels(*tensors, levels, AttentionOptions())
    assert_matches_reference(out, lse, by_reference, *tensors, whole)


def test_levels_keep_their_fixed_runs_of_keys(device):
    """Other levels must not change how many there are: the last ones would have no program."""
    inputs = build(Case("c", ((2, 400),), heads=(1, 1)), device=device)
    tables = [inputs.batch.block_table[0].tolist()[:25]]
    shared = Plan(make_batch([2], [320], [tables[0][:20]], device=device), 16, causal=False)
    own = Plan(make_batch([2], [80], [tables[0][20:]], device=device), 16)
    options = AttentionOptions(batch_invariant=True)
    with mock.patch.object(triton_tuning, "INVARIANT_RUN", 64):
        out, lse, _ = triton_attention.attend_levels(*inputs.tensors[:3], [shared, own], options)
    assert_matches_reference(out, lse, by_reference, *inputs.tensors)


# --- ALiBi ---


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, "strided"], ids=str)
def test_slopes_and_sinks_of_any_type_and_stride(kind, device):
    inputs = build(MIXED, device=device)
    numbers = torch.tensor([0.25, 0.5, 1.5], device=device)
    others = torch.stack([numbers, -numbers], dim=1)[:, 0] if kind == "strided" else numbers.to(kind)
    for splits in (1, 2):
        with launched_as(splits=splits, most_splits=splits, block_n=16):
            expected = attend(*given(*inputs.tensors, causal=False, alibi_slopes=numbers, sinks=numbers))
            answer = attend(*given(*inputs.tensors, causal=False, alibi_slopes=others, sinks=others))
        for one, other in zip(answer, expected, strict=True):
            torch.testing.assert_close(one, other)


# --- memory that no query may see ---


def spoil(inputs, first_seen, with_what):
    """Fill all that is before the first visible key of each sequence, and past its end, with something.

    The table has nothing where all of a block is before it.
    """
    block_size = inputs.key_cache.shape[1]
    pools = [inputs.key_cache.nan_to_num(with_what), inputs.value_cache.nan_to_num(with_what)]
    table = inputs.batch.block_table.clone()
    for blocks, first, keys in zip(table, first_seen, inputs.keys, strict=True):
        seen = range(max(first, 0), len(keys))
        for column in range(-(-len(keys) // block_size)):
            for place in range(block_size):
                if column * block_size + place not in seen:
                    for pool in pools:
                        pool[blocks[column], place] = with_what
        blocks[: max(first, 0) // block_size] = 1_000_000
    return replace(inputs, key_cache=pools[0], value_cache=pools[1], batch=replace(inputs.batch, block_table=table))


HIDDEN = {
    "past-the-end": (dict(), [0, 0, 0, 0], dict(block_m=64)),
    "decodes": (dict(window_size=(21, 0)), [278, 50, 14, 0], dict(block_m=16)),
    "phases": (dict(window_size=(21, 4), causal=False), [278, 50, 14, 0], dict(block_m=64)),
    "splits": (dict(window_size=(21, 0)), [278, 50, 14, 0], dict(splits=3, most_splits=3, block_n=16)),
    "fixed-runs": (dict(window_size=(21, 0), batch_invariant=True), [278, 50, 14, 0], {}),
    "bias": (dict(window_size=(21, 0), alibi_slopes=True, softcap=3.0), [278, 50, 14, 0], dict(block_m=64)),
}


@pytest.mark.parametrize(("options", "first_seen", "launch"), HIDDEN.values(), ids=HIDDEN)
def test_what_no_query_may_see_is_not_read(options, first_seen, launch, device):
    """A weight of 0 does not undo NaN; and before a window the table may lead nowhere."""
    case = Case("hidden", ((1, 300), (4, 75), (20, 55), (7, 2)), heads=(2, 1))
    inputs = build(case, device=device)
    options = per_head(options, case, device)
    with launched_as(**launch):
        clean = attend(*given(*spoil(inputs, first_seen, 0.0).tensors, **options))
        spoilt = attend(*given(*spoil(inputs, first_seen, torch.nan).tensors, **options))
    for one, other in zip(clean, spoilt, strict=True):
        assert torch.equal(one, other)
    assert torch.isfinite(clean[0]).all()


def addresses_of(tensor):
    """Return the address of each element of a tensor."""
    places = sum(
        torch.arange(size).mul(stride).view(-1, *[1] * (tensor.ndim - 1 - dim))
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )
    return tensor.data_ptr() + tensor.element_size() * places


@pytest.mark.parametrize(
    "launch",
    [
        *(dict(block_m=64), dict(splits=2, most_splits=2, block_n=16)),
        *("fixed-runs", "removed-blocks", "positions", "differential", "split-differential"),
    ],
    ids=str,
)
def test_no_table_entry_and_no_slot_is_read_that_no_query_sees(launch, device, monkeypatch):
    """Address by address: a table may be as long as it has to be, and what lies around it is another's."""
    if device != "cpu":
        pytest.skip("the interpreter alone says what is read")
    case = Case("read", ((1, 100), (4, 75), (20, 55), (7, 2)), heads=(2, 1), head_size=16)
    inputs = build(case)
    surroundings = torch.full((6, 12), -1, dtype=torch.int32)
    table = surroundings[1:5, 2:9]  # as many columns as 100 keys need
    table.copy_(inputs.batch.block_table[:, :7])
    batch, options = replace(inputs.batch, block_table=table), dict(window_size=(21, 0))
    keys = [(i, j) for i, (q, s) in enumerate(case.lens) for j in range(max(s - q - 21, 0), s)]
    if launch == "positions":  # those that the rows have anyway, but the last sequence stands before its keys
        positions = [*(range(s - q, s) for q, s in case.lens[:3]), range(-9, -2)]
        options["positions"] = torch.tensor([i for rows in positions for i in rows], dtype=torch.int32)
        keys = [(i, j) for i, j in keys if i < 3]
    noted = interpreted.note_reads(monkeypatch)
    if isinstance(launch, str) and "differential" in launch:
        splits = 1 if launch == "differential" else 2
        monkeypatch.setattr(triton_differential, "tune", lambda *_: LaunchConfig(16, 16, 4, 2, splits, splits))
        cache = torch.stack([torch.stack([inputs.key_cache, inputs.value_cache])] * 2)
        subtraction = Subtraction(torch.tensor(0.5), None, 1e-5, 1.0)
        triton_differential.differential(*given(inputs.query, cache, batch, **options), subtraction)
        pools = [cache.permute(2, 3, 0, 1, 4, 5)]  # the slot comes first
    else:
        options["batch_invariant"] = launch in ("fixed-runs", "removed-blocks")
        if launch == "removed-blocks":  # steps begin before the first key
            options["first_keys"] = torch.tensor([16, 0, 48, 5], dtype=torch.int32)
        with launched_as(**(launch if isinstance(launch, dict) else {})):
            attend(*given(*inputs.tensors[:3], batch, **options))
        pools = [inputs.key_cache, inputs.value_cache]
    read = torch.from_numpy(np.unique(np.concatenate([addresses.ravel() for addresses in noted])).astype(np.int64))

    entries = tuple(zip(*[(i, j // 16) for i, j in keys], strict=True))
    slots = tuple(zip(*[(int(table[i, j // 16]), j % 16) for i, j in keys], strict=True))
    for whole, part, seen in ((surroundings, table, entries), *((pool, pool, slots) for pool in pools)):
        inside = read[(read >= whole.data_ptr()) & (read < whole.data_ptr() + whole.nbytes)]
        assert torch.equal(inside, addresses_of(part)[seen].unique())


def test_nothing_of_the_next_sequence_is_read(device):
    case = Case("rows", ((20, 20), (3, 3), (30, 41)), heads=(2, 1))
    query, key, value, batch = build(case, device=device).rows
    clean, _ = attend(*given(query, key, value, batch, causal=False))
    value[20:23], key[20:23] = torch.nan, torch.nan
    spoilt, _ = attend(*given(query, key, value, batch, causal=False))
    assert torch.equal(clean[:20], spoilt[:20]) and torch.equal(clean[23:], spoilt[23:])
    assert spoilt[20:23].isnan().all(), "NaN that a query sees comes out"


@pytest.mark.parametrize("what", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("launch", [{}, dict(splits=3, most_splits=3, block_n=16)], ids=["whole", "splits"])
def test_nan_that_a_query_sees_comes_out(what, launch, device):
    """Of a key or of a value, also under a softcap, which does not bound it, and beside other splits."""
    inputs = build(Case("seen", ((1, 40), (3, 20)), heads=(2, 1)), device=device)
    for cache, options in ((0, dict(softcap=2.0)), (1, {})):
        pools = [inputs.key_cache.clone(), inputs.value_cache.clone()]
        pools[cache][inputs.batch.block_table[0, 1], 3] = what  # key 19 of the first sequence
        with launched_as(**launch):
            out, _ = attend(*given(inputs.query, *pools, inputs.batch, **options))
        assert not torch.isfinite(out[0]).any() and torch.isfinite(out[1:]).all()


# --- answers of other kernels, recomputed ---


REPAIRS = {  # tiles of 32 queries: 0, 1 and 2 belong to the first sequence, 3 to the second
    "nothing-spoilt": ({}, [], []),
    "what-no-key-past-the-end-spoils": ({}, [5, 40, 61], []),
    "last-rows": (dict(sinks=True, softcap=3.0), [5, 62, 71], [1, 3]),
    "not-causal": (dict(causal=False, alibi_slopes=True), [5], [0]),
    "right-window": (dict(causal=False, window_size=(-1, 3)), [5, 59], [1]),
    "window": (dict(window_size=(9, 0)), [7, 40, 69, 71], [0, 2, 3]),
    "what-others-see-in-a-window": (dict(window_size=(9, 0)), [8, 40, 61], []),
    "window-that-hides-no-key-from-all": (dict(window_size=(20, 0)), [0, 5, 40, 69], [2]),
    "two-sided-window": (dict(causal=False, window_size=(9, 2)), [7, 40, 60], [0, 1]),
}


@pytest.mark.parametrize(("options", "spoilt", "recomputed"), REPAIRS.values(), ids=REPAIRS)
@pytest.mark.parametrize("over", ["pages", "rows"])
def test_repair_computes_again_what_is_nan(options, spoilt, recomputed, over, device, monkeypatch):
    """And nothing else: other tiles keep what they have, even if it is wrong."""
    monkeypatch.setattr(split, "LARGEST_TILE", tl.constexpr(8))
    monkeypatch.setattr(triton_attention, "LARGEST_TILE", tl.constexpr(8))
    case = Case("c", ((70, 90), (0, 3), (4, 33)), heads=(2, 1), padding_rows=2)
    inputs = build(case, device=device, dtype=torch.float16)
    tensors = inputs.tensors if over == "pages" else inputs.rows
    asked = given(*tensors, **per_head(options, case, device))
    right, _ = attend(*asked)
    out = torch.full_like(right, 7.0)
    out[[*spoilt, 74, 75], 1, 5] = torch.nan  # padding rows are of no sequence
    expected = out.clone()
    for tile in recomputed:
        rows = (slice(0, 32), slice(32, 64), slice(64, 70), slice(70, 74))[tile]
        expected[rows] = right[rows]
    gpu_repair.recompute(out, *asked)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("window", [(-1, 0), (40, 0)], ids=["causal", "window"])
def test_repair_looks_at_the_ends_of_long_sequences_alone(window, device, monkeypatch):
    """Of 13 tiles of 32 queries the last ones, and before a window also the first ones; and each of them once."""
    monkeypatch.setattr(split, "LARGEST_TILE", tl.constexpr(8))
    monkeypatch.setattr(triton_attention, "LARGEST_TILE", tl.constexpr(8))
    case = Case("c", ((410, 520), (0, 3), (4, 33), (100, 160)), heads=(2, 1), padding_rows=2)
    inputs = build(case, device=device, dtype=torch.float16)
    asked = given(*inputs.tensors, causal=False, window_size=window)
    launches = []
    launch = triton_attention.launch_attend
    monkeypatch.setattr(gpu_repair, "launch_attend", lambda *a, **k: launches.append(launch(*a, **k)) or launches[0])
    right, _ = attend(*asked)
    out = torch.full_like(right, 7.0)
    spoilt = [0, 7, 40, 200, 370, 402, 409, 410, 413, 414, 500, 513]
    out[spoilt, 1, 5] = torch.nan
    gpu_repair.recompute(out, *asked)
    per_sequence = 2 if window[0] < 0 else 4
    assert launches[0]._grid[0] == 4 * per_sequence < count_tiles(inputs.batch, 516, 2, 64)
    ends = [402, 409, 410, 413, 513] + ([] if window[0] < 0 else [0, 7, 414])
    assert set(spoilt) - set(out[:, 1, 5].isnan().nonzero()[:, 0].tolist()) == set(ends)
    torch.testing.assert_close(out[ends], right[ends], rtol=2e-3, atol=1e-3)


def test_what_is_nan_rightly_stays_so(device):
    inputs = build(Case("c", ((5, 40), (3, 20)), heads=(2, 1)), device=device, dtype=torch.float16)
    inputs.value_cache[inputs.batch.block_table[0, 0], 3] = torch.nan
    out = torch.full_like(inputs.query, torch.nan)
    gpu_repair.recompute(out, *given(*inputs.tensors))
    assert out[:5].isnan().all() and torch.isfinite(out[5:]).all()


# --- batch invariance ---


@pytest.fixture
def fixed_products(device, monkeypatch):
    """Make bits those of the kernel: on a CPU the interpreter's own products change with a row's place."""
    if device == "cpu":
        interpreted.add_products_in_order(monkeypatch)


INVARIANT = {
    "plain": dict(batch_invariant=True),
    "window": dict(batch_invariant=True, window_size=(70, 0)),
    "sinks": dict(batch_invariant=True, sinks=torch.tensor([-2.0, 3.0]), softcap=5.0),
    "slopes": dict(batch_invariant=True, alibi_slopes=torch.tensor([0.01, 0.5])),
}
each_invariant = pytest.mark.parametrize("options", INVARIANT.values(), ids=INVARIANT)


def on(device, options):
    """Return the options with their tensors on a device."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.usefixtures("fixed_products")
@each_invariant
def test_rows_do_not_change_with_the_rest_of_the_batch(options, device):
    """Alone, a sequence has other tiles and fewer splits than beside a long one."""
    case = Case("company", ((1, 150), (1, 260), (20, 70), (4, 44)), heads=(2, 1))
    inputs = build(case, device=device)
    with mock.patch.object(triton_tuning, "INVARIANT_RUN", 128):
        assert_rows_do_not_change(lambda *call: attend(*given(*call, **on(device, options))), *inputs.tensors)


@pytest.mark.usefixtures("fixed_products")
@each_invariant
def test_rows_do_not_change_with_the_chunk_they_come_in(options, device):
    """The window of the first rows begins in another run of keys than that of the last ones."""
    inputs = build(Case("chunk", ((12, 330), (3, 2)), heads=(2, 1)), device=device)
    query, *pools, batch = inputs.tensors
    with mock.patch.object(triton_tuning, "INVARIANT_RUN", 128):
        expected = attend(*given(*inputs.tensors, **on(device, options)))
        for first, end in pairwise((0, 5, 6, 9, 10, 12)):  # the row at 9 begins a step of keys after the first ones
            chunk = query[first:end], *pools, alone(batch, 0, end - first, 318 + end)
            for one, whole in zip(attend(*given(*chunk, **on(device, options))), expected, strict=True):
                assert torch.equal(one, whole[first:end]), f"rows from {first}"


TRIMMED = {
    "window": ("sliding_window", {}, 16),
    "odd-blocks": ("sliding_window", dict(softcap=3.0, alibi_slopes=torch.tensor([0.01, 0.5])), 3),
    "large-blocks": ("sliding_window", dict(sinks=torch.tensor([-2.0, 3.0])), 64),
    "tree": ("speculative", {}, 16),
    "differential": ("differential", {}, 16),
}


@pytest.mark.usefixtures("fixed_products")
@pytest.mark.parametrize(("path", "options", "block_size"), TRIMMED.values(), ids=TRIMMED)
def test_rows_of_a_window_do_not_change_with_the_blocks_that_are_removed(path, options, block_size, device):
    """A chunk of a prompt begins with other blocks than the whole of it: steps and runs are placed by position."""
    inputs = build(Case("chunk", ((12, 330),), heads=(2, 1), block_size=block_size), device=device)
    options = on(device, options) | dict(batch_invariant=True)

    def answer(query, key_cache, value_cache, batch):
        planned = dict(window_size=(70, 0), block_size=block_size)
        if path == "speculative":
            chain = [tuple(range(-1, batch.max_query_len - 1))]
            trees = fastattn.speculative.make_trees(chain, device=device)
            plan = fastattn.speculative.plan(batch, **planned, trees=trees)
        else:
            plan = fastattn.sliding_window.plan(batch, **planned)
        if path == "differential":
            cache, lambda_full = torch.stack([torch.stack([key_cache, value_cache])] * 2), torch.tensor(0.5)
            subtraction = Subtraction(lambda_full.to(device), None, 1e-5, 1.0)
            return triton_differential.differential(query, cache, plan, AttentionOptions(**options), subtraction)
        pages = Pages(key_cache, value_cache)
        return triton_attention.attend_to_keys(query, pages, plan, AttentionOptions(**options), None)

    with mock.patch.object(triton_tuning, "INVARIANT_RUN", 128):
        expected = answer(*inputs.tensors)
        row = 0
        for size in (5, 1, 3, 1, 2):
            batch = alone(inputs.batch, 0, size, 318 + row + size)
            found = answer(inputs.query[row : row + size], inputs.key_cache, inputs.value_cache, batch)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other[row : row + size]), f"rows from {row}"
            row += size


@each_invariant
def test_what_does_not_change_is_right(options, device):
    """So that two equally wrong answers are not taken for one that does not change."""
    case = Case("long", ((33, 90), (1, 200), (0, 4), (5, 2)), heads=(2, 1), padding_rows=3)
    inputs = build(case, device=device)
    with mock.patch.object(triton_tuning, "INVARIANT_RUN", 64):
        assert_agrees("chunked_prefill", *inputs.tensors, **on(device, options))


GOOD = Problem(
    operation="attend",
    device=torch.device("cpu"),
    dtype=torch.float16,
    keys="pages",
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    value_head_size=64,
    block_size=16,
    max_query_len=1,
    max_seq_len=9,
    num_seqs=2,
)


@pytest.mark.covers("A13")
def test_what_is_refused_says_why(device):
    good = GOOD._replace(device=torch.device(device))
    assert triton.unsupported_reason(good) is None
    assert "float64" in triton.unsupported_reason(good._replace(dtype=torch.float64))
    assert "576" in triton.unsupported_reason(good._replace(head_size=576))
    assert "meta" in triton.unsupported_reason(good._replace(device=torch.device("meta")))
    there = good._replace(positions=True)
    assert triton.unsupported_reason(there) is None
    assert "no other positions" in triton.unsupported_reason(there._replace(operation="differential"))


def test_what_goes_with_attention_is_refused_by_its_own_reasons(device):
    """Of a merge, whose log-sum-exps are added in float32, and of copies, which one program holds; not of types."""

    def reason(operation, dtype=torch.float64, **asked):
        return triton.unsupported_reason(Problem(operation, torch.device(device), dtype, **asked))

    assert reason("merge", torch.float32) is None
    assert "log-sum-exps in float32, not torch.float64" in reason("merge")
    assert reason("copy_blocks", num_pairs=1024) is None
    assert "at most 1024 blocks at once, not 1025" in reason("copy_blocks", num_pairs=1025)
    assert reason("copy_blocks", num_pairs=1, contiguous_blocks=False) == (
        "copies blocks whose elements lie side by side, without gaps"
    )
    for operation in ("write", "slot_mapping", "trim", "cut_chunks"):
        assert reason(operation) is None
    assert reason("write", torch.bfloat16) is None, "it is moved, not multiplied"


@pytest.mark.parametrize(
    ("versions", "works"),
    [
        ({"triton": "3.6.0", "numpy": "2.3.5"}, True),
        ({"triton": "3.6.0", "numpy": "2.4.0"}, False),
        ({"triton": "3.6.0+git1", "numpy": "3.0"}, False),
        ({"triton": "3.7.1", "numpy": "2.5.5"}, True),
    ],
    ids=str,
)
def test_an_interpreter_that_fails_with_this_numpy_is_refused(monkeypatch, versions, works):
    monkeypatch.setattr(devices, "package_version", versions.get)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    devices.cannot_interpret.cache_clear()
    reason = triton.unsupported_reason(GOOD)
    devices.cannot_interpret.cache_clear()
    assert (reason is None) == works
    assert works or "install numpy<2.4" in reason


# --- the cache ---


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_write_moves_every_bit(layout, dtype, device):
    shape = dict(value_head_size=6, layout=layout, dtype=dtype, device=device)
    ours, theirs = refattn.kv_cache.allocate(5, 3, 3, 8, **shape), refattn.kv_cache.allocate(5, 3, 3, 8, **shape)
    fused = torch.randint(-9, 9, (40, 3, 14), device=device).to(dtype)
    slots = torch.full((40,), -1, device=device)
    slots[::3] = torch.randperm(15, device=device)[:14]
    triton_cache.write(fused[..., :8], fused[..., 8:], *ours, slots)
    refattn.kv_cache.write(fused[..., :8], fused[..., 8:], *theirs, slots)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.covers("A3")
@pytest.mark.parametrize(
    "pairs",
    [[[0, 4]], [[0, 1], [1, 2], [2, 0]], [[3, 5], [3, 6], [4, 3]], [], [[i, i + 33] for i in range(33)]],
    ids=str,
)
@pytest.mark.parametrize("layout", ["NHD", "HND", "in-a-larger-pool"])
def test_a_block_may_be_source_and_destination(pairs, layout, device):
    pool = torch.randn(70, 2, 5, 3, 24, device=device)
    pool = pool[:, 1] if layout == "in-a-larger-pool" else pool[:, 0].clone()
    pool = pool.transpose(1, 2) if layout == "HND" else pool
    pairs = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    expected = pool.clone()
    refattn.kv_cache.copy_blocks([expected], pairs)
    triton_cache.copy_blocks(pool, pairs)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("num_pairs", [3, triton.MAX_PAIRS + 1], ids=str)
@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "with-gaps"])
def test_copies_take_the_kernel_where_it_can(num_pairs, gaps, device, monkeypatch):
    """More copies than a program holds, and blocks with something of others between, go by way of a buffer."""
    monkeypatch.setattr(order, "priorities", lambda problem: ("triton", "torch"))  # as on a GPU
    pool = torch.randn(2 * num_pairs, 2, 8, device=device)[..., : 5 if gaps else 8]
    pairs = torch.randperm(2 * num_pairs, device=device).view(num_pairs, 2)
    expected = pool.clone()
    refattn.kv_cache.copy_blocks([expected], pairs)
    with mock.patch.object(triton_cache, "copy_blocks", wraps=triton_cache.copy_blocks) as kernel:
        fastattn.kv_cache.copy_blocks([pool], pairs)
    assert torch.equal(pool, expected)
    assert kernel.call_count == (num_pairs == 3 and not gaps)
    if not kernel.call_count:
        reason = "copies blocks whose elements lie side by side" if gaps else "copies at most 1024 blocks"
        with fastattn.use_kernel("triton"), pytest.raises(NotImplementedError, match=reason):
            fastattn.kv_cache.copy_blocks([pool], pairs)
        assert torch.equal(pool, expected)


def test_a_refused_pool_leaves_the_one_before_it_alone(device):
    """Of copies and of compactions: the kernel asked for takes the first pool, and not the second."""
    whole, gaps = torch.randn(4, 2, 1, 8, device=device), torch.randn(4, 2, 1, 16, device=device)[..., ::2]
    batch = make_batch([2], [2], [[1]], device=device)
    trees = fastattn.speculative.make_trees([(-1, -1)], device=device)
    nodes, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[1, -1]], [1]))
    accepted = Accepted(nodes, lens, torch.tensor([0], device=device))
    with fastattn.use_kernel("triton"):
        for pools, move in (
            ([whole, gaps], lambda pools: fastattn.kv_cache.copy_blocks(pools, torch.tensor([[0, 1]]))),
            (
                [whole, whole[..., None].clone()],
                lambda pools: fastattn.speculative.compact(pools, batch, trees, accepted, block_size=2),
            ),
        ):
            before = [pool.clone() for pool in pools]
            with pytest.raises(NotImplementedError):
                move(pools)
            for pool, untouched in zip(pools, before, strict=True):
                assert torch.equal(pool, untouched)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_repage_copies_all_tokens_in_order(layout, dtype, device):
    case = Case("c", ((0, 9), (0, 0), (0, 130), (0, 32)), heads=(3, 3), head_size=24, block_size=24, layout=layout)
    inputs = build(case, device=device, dtype=dtype)
    pool, table = repage(inputs.key_cache, inputs.batch, block_size=32)
    for keys, blocks, (_, seq_len) in zip(inputs.keys, table, case.lens, strict=True):
        used = pool[blocks[: -(-seq_len // 32)].long()].flatten(0, 1)
        assert torch.equal(used[:seq_len], keys) and not used[seq_len:].any()


# --- merging ---


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merge_states(num_parts, dtype, device):
    outs = [torch.randn(4, 7, 24, device=device, dtype=dtype).transpose(0, 1) for _ in range(num_parts)]
    lses = [torch.randn(7, 4, device=device) * 5 for _ in range(num_parts)]
    for part in range(num_parts):
        lses[part][part % 2], outs[part][part % 2] = -torch.inf, torch.nan
        lses[part][4], outs[part][4] = -torch.inf, torch.inf
    wide_outs = [out.double() for out in outs]
    ref, ref_lse = refattn.merge.merge(wide_outs, [lse.double() for lse in lses])
    low, low_lse = refattn.merge.merge(outs, lses)
    out, lse = triton_merge.merge(outs, lses)
    assert_close(out, ref, low, name="out")
    assert_close(lse, ref_lse, low_lse, name="lse")


ADAPTED = {
    "plain": dict(causal=False),
    "causal": {},
    "window": dict(causal=False, window_size=(3, 2)),
    "sinks": dict(sinks=torch.tensor([-1.0, 2.0, 300.0])),
    "far-sinks": dict(sinks=torch.tensor([-1e4, 89.0, 1e4])),
}


@pytest.mark.parametrize("options", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize(
    ("nothing", "programs"), [(torch.inf, 1024), (-torch.inf, 0), (torch.nan, 1024), (0.5, 0)], ids=str
)
def test_adapt_fixes_up_what_flash_attention_returns_otherwise(options, nothing, programs, device, monkeypatch):
    """It may say anything where nothing is seen, and its `inf` where NaN is seen is no reason to answer 0.

    A number too, if the lengths are to say it. One program may look at many tokens.
    """
    monkeypatch.setattr(gpu_adapt, "PROGRAMS", programs)
    by_lengths = nothing == 0.5
    query_lens = [3, 0, 40, 2, *[1] * 70, 5, 4]
    seq_lens = [9, 6, 0, 2, *[i % 2 for i in range(70)], 0, 2]
    batch = make_batch(query_lens, seq_lens, [[]] * len(seq_lens), device=device)
    plan, options = given(torch.zeros(0), batch, **on(device, options))[1:]
    left, right = plan.window
    sees = []
    for q, s in zip(query_lens, seq_lens, strict=True):
        for i in range(s - q, s):
            sees.append(any((left < 0 or j >= i - left) and (right < 0 or j <= i + right) for j in range(s)))
    sees = torch.tensor(sees)
    is_query = torch.arange(len(sees) + 9) < len(sees)
    blind = torch.cat([~sees, torch.ones(9, dtype=torch.bool)])
    out, lse = torch.randn(len(blind), 3, 24), torch.randn(3, len(blind)) * 3
    ref, ref_lse = out.double(), lse.T.double()
    ref[blind], ref_lse[blind] = 0.0, -torch.inf
    if options.sinks is not None:
        sinks = options.sinks.cpu().double()
        ref[is_query], ref_lse[is_query] = refattn.merge.add_sinks(ref[is_query], ref_lse[is_query], sinks)
    out[blind], lse[:, blind] = torch.nan, nothing
    out[1, 2], lse[2, 1] = torch.nan, torch.inf if by_lengths else nothing  # saw NaN
    got = fix_up(out.to(device), lse.to(device), plan, options, by_lengths=by_lengths)
    got, got_lse = (x.cpu() for x in got)
    assert got[1, 2].isnan().all() and got_lse[1, 2].isnan()
    got[1, 2], got_lse[1, 2] = ref[1, 2], ref_lse[1, 2]
    assert_close(got, ref, ref.float())
    assert_close(got_lse, ref_lse, ref_lse.float(), name="lse")


def test_padding_alone_is_a_reason_to_fix_up(device, monkeypatch):
    """Where one look at the log-sum-exps of many tokens finds nothing else."""
    monkeypatch.setattr(gpu_adapt, "PROGRAMS", 0)
    plan = Plan(make_batch([3, 4], [9, 4], [[]] * 2, device=device))
    out, lse = torch.ones(9, 2, 24, device=device), torch.ones(2, 9, device=device)
    got, got_lse = fix_up(out.clone(), lse.clone(), plan, AttentionOptions())
    assert torch.equal(got[:7], out[:7]) and not got[7:].any()
    assert (got_lse[:7] == 1).all() and (got_lse[7:] == -torch.inf).all()


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_where_there_is_no_key_the_sinks_are_all(has_sinks, device):
    """One row of padding after two sequences with queries and one without."""
    plan = refattn.varlen.plan(make_batch([2, 0, 1], [0, 0, 0], device=device))
    query, rows = torch.randn(4, 3, 24, device=device), torch.randn(0, 1, 24, device=device)
    options = AttentionOptions(sinks=torch.randn(3, device=device) if has_sinks else None)
    want = refattn.varlen.attention(query, rows, rows, plan, options, return_lse=True)
    got = empty_output(query, 24, plan, options)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert got[1].isfinite().sum() == (9 if has_sinks else 0)


@pytest.mark.parametrize("rows", ["every-other", "expanded-size", "offset", "padded", "heads-last"])
def test_chunks_of_states_are_read_16_bytes_at_a_time(rows, monkeypatch):
    """What a launch is given is looked at: an interpreter answers rightly however rows lie."""
    launches, launch = [], triton_recurrent.Launch

    def noted(kernel, grid, changing, given, options):
        launches.append(given)
        return launch(kernel, grid, changing, given, options)

    monkeypatch.setattr(triton_recurrent, "Launch", noted)
    step = states.Step(*(laid(x, rows) for x in states.draw(17, dk=40, dv=24, per_channel=True, dtype=torch.float16)))
    tables = dict(state_indices=states.ints([0]))
    states.attend("triton", step, states.draw_states(1, 4, 24, 40), states.lengths([17], [0]), **tables)
    assert len(launches) == 2
    for launch in launches:
        given = launch["tokens"]._asdict() | (launch["gates"]._asdict() if "gates" in launch else {})
        for name in {"query", "key", "value", "log_decay"} & given.keys():
            assert given[name].data_ptr() % 16 == 0 and given[name].stride(-1) == 1, name
            assert not any(stride % 16 for stride in given[f"{name}_strides"][:-1]), name
        for name in ("written", "answered", "queries_since", "keys_until"):
            assert getattr(launch["solved"], name).stride(1) % 16 == 0, name
