"""Layers with latent attention in the engine: one pool of latents, decodes absorbed, prompts in chunks of a workspace.

`test_engine_models.py` compares the logits of every family, and `test_engine.py` records the decodes of one.
"""

import importlib
import itertools
import random
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

import refattn.mla
import twinattn.engine.cuda_graphs
import twinattn.engine.graph_shapes
import twinattn.engine.layers
from refattn.options import AttentionOptions
from tests.helpers import engines
from tests.helpers.engines import SYSTEM, TWINS, UNSTOPPED, assert_answers_twice, make_engine, transformers_outputs
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import LATENT_SIZES, YARN, make_family
from twinattn.engine import CPU, CalibrationStats, NGram, calibrate
from twinattn.engine.layers import Causal, Layer
from twinattn.engine.storages import LatentStorage
from twinattn.engine.twin import Twin

RANK, ROPE = LATENT_SIZES["kv_lora_rank"], LATENT_SIZES["qk_rope_head_dim"]
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 6, [*SYSTEM, 50], list(range(60, 85))]


def make_deepseek(device):
    """Make a model without experts, which could not be recorded."""
    changes = dict(first_k_dense_replace=2, rope_parameters=YARN, eos_token_id=None)
    return make_family("deepseek_v3", device, **LATENT_SIZES | changes)


@pytest.fixture(scope="module")
def deepseek(device):
    return make_deepseek(device)


@pytest.fixture(scope="module")
def expected(deepseek):
    answers = transformers_outputs(deepseek, PROMPTS, attention="eager")
    assert len(set(map(tuple, answers))) == len(PROMPTS), "the model should not always say the same"
    return answers


def outputs(engine, prompts=PROMPTS):
    return engines.outputs(engine, prompts, UNSTOPPED)


@pytest.fixture
def calls(monkeypatch):
    """Note the new tokens of each sequence that either twin plans, absorbed or not, by the function that does.

    While a GPU records nothing may be read from it, and None stands for them.
    """
    noted = []

    def watch(path, name):
        function = getattr(path, name)

        def watched(batch, **arguments):
            recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            noted.append((name, None if recording else batch.query_lens.tolist(), arguments))
            return function(batch, **arguments)

        monkeypatch.setattr(path, name, watched)

    for twin in TWINS:
        watch(importlib.import_module(f"{twin}.chunked_prefill"), "plan")
        watch(importlib.import_module(f"{twin}.mla"), "plan_prefill")
    return noted


SCHEDULES = {
    "all at once": {},
    "short steps": dict(max_num_batched_tokens=7, max_num_seqs=3),
    "small workspace": dict(max_num_batched_tokens=11, workspace=5),
    "smallest pool, small workspace": dict(num_blocks=8, max_num_batched_tokens=7, workspace=1),
    "odd blocks": dict(block_size=7, num_blocks=6, max_num_batched_tokens=9, workspace=4),
}


@pytest.mark.parametrize(
    ("twin", "schedule"),
    [*zip(itertools.cycle(TWINS), SCHEDULES, strict=False), ("fastattn", "small workspace")],
)
def test_greedy_is_generate(deepseek, expected, twin, schedule, monkeypatch, calls):
    """Prompts in chunks over their context in chunks, decodes, preemptions, and shared prefixes the second time."""
    sizes = dict(SCHEDULES[schedule])
    workspace = sizes.pop("workspace", twinattn.engine.layers.WORKSPACE)
    monkeypatch.setattr(twinattn.engine.layers, "WORKSPACE", workspace)
    engine = make_engine(deepseek, twin, **sizes)
    assert_answers_twice(engine, PROMPTS, expected, UNSTOPPED)
    assert engine.counters.preemptions or not schedule.startswith("smallest pool")
    rooms = {(arguments["workspace"], len(lengths)) for name, lengths, arguments in calls if name == "plan_prefill"}
    assert rooms and all(room == max(workspace, sequences) for room, sequences in rooms)


@pytest.mark.parametrize("twin", TWINS)
def test_decodes_are_absorbed_and_prompts_are_not(deepseek, expected, twin, calls):
    """Each once per step for all layers; what decodes share goes through a cascade, which is free here."""
    free = replace(CPU, launch_seconds=0.0, workers=1, tile_keys=4)
    engine = make_engine(deepseek, twin, max_num_batched_tokens=16, machine=free)
    calls.clear()
    assert outputs(engine) == expected
    assert 0 < engine.counters.saved_key_reads < engine.counters.key_reads
    for name, lengths, _ in calls:
        assert (set(lengths) == {1}) if name == "plan" else (min(lengths) > 1)
    names = [name for name, _, _ in calls]
    assert max(names.count("plan"), names.count("plan_prefill")) <= engine.counters.steps < len(names)


def test_layers_keep_latents_and_no_values(deepseek, monkeypatch):
    engine = make_engine(deepseek, num_blocks=20)
    assert set(engine.layers) == {Layer(Causal(), LatentStorage(RANK, ROPE))}
    assert [cache.shape for cache in engine.caches] == [(20, 4, RANK + ROPE)] * 2
    monkeypatch.setattr(refattn.mla, "allocate", mock.Mock(side_effect=torch.OutOfMemoryError("out of memory.")))
    # 2 layers of 2**22 blocks of 4 tokens with 32 numbers of 4 bytes: 4 GiB.
    with pytest.raises(torch.OutOfMemoryError, match=r"num_blocks: .* 4194304 blocks .* are 4 GiB. out of memory."):
        make_engine(deepseek, num_blocks=2**22)


def test_the_scale_is_the_modules(deepseek, monkeypatch):
    """With the factor of YaRN in it, and not what the sizes of a latent or of a head would give."""
    seen = []
    attention = refattn.mla.attention

    def watched(query, cache, plan, options, **sizes):
        seen.append(options.softmax_scale)
        return attention(query, cache, plan, options, **sizes)

    monkeypatch.setattr(refattn.mla, "attention", watched)
    outputs(make_engine(deepseek), PROMPTS[:1])
    module = deepseek.model.layers[0].self_attn
    assert set(seen) == {module.scaling} and module.scaling > 1.5 * module.qk_head_dim**-0.5


def test_recorded_steps_are_absorbed(deepseek, expected, recorder, calls):
    """Decodes and prompts alike: a recording has to serve steps of other lengths."""
    engine = make_engine(deepseek, "fastattn", runner=recorder, num_blocks=9, max_num_batched_tokens=10)
    calls.clear()
    for _ in range(2):
        assert outputs(engine) == expected
    assert engine.counters.preemptions > 0
    assert {name for name, _, _ in calls} == {"plan"}
    assert {shape.queries > 1 for shape in recorder._steps} == {False, True}


@pytest.mark.covers("E176")
@pytest.mark.parametrize("twin", TWINS)
def test_everything_is_absorbed_under_batch_invariance(deepseek, expected, twin, calls):
    """How many keys and values are made at a time would depend on who else is in the batch."""
    engine = make_engine(deepseek, twin, max_num_batched_tokens=16, batch_invariant=True)
    assert all(layer.storage.batch_invariant for layer in engine.layers)
    assert outputs(engine) == expected
    assert {name for name, _, _ in calls} == {"plan"}


@pytest.mark.parametrize("twin", TWINS)
def test_chunks_are_planned_for_the_contexts_of_prompts(twin, monkeypatch):
    """Not for a prompt without one, nor for the long context of a decode beside it."""
    monkeypatch.setattr(twinattn.engine.layers, "WORKSPACE", 8)
    package, layer = Twin(importlib.import_module(twin)), Layer(Causal(), LatentStorage(16, 8))

    def chunks(*lens):
        tables = [list(range(10 * i, 10 * i + 10)) for i in range(len(lens))]
        batch = package.metadata.make_batch(*zip(*lens, strict=True), tables)
        plans = [plan for _, plan in layer.plan(package, batch, 4, lens)]
        return [len(plan.chunks) for plan in plans if hasattr(plan, "chunks")]

    assert chunks((9, 9)) == [0]
    assert chunks((1, 40), (9, 9), (7, 7)) == [0]
    assert chunks((1, 40), (9, 22)) == [2]
    assert chunks((1, 40)) == []


@pytest.mark.parametrize("twin", TWINS)
def test_batch_invariance_is_to_the_bit(twin, device, monkeypatch):
    """A prompt alone, beside decodes, and beside another prompt; its products with the weights are exact here."""
    monkeypatch.setattr(twinattn.engine.layers, "WORKSPACE", 8)
    rank, rope, nope, value, heads = 16, 8, 16, 12, 2
    made_by = torch.nn.Linear(rank, heads * (nope + value), bias=False, device=device)
    torch.manual_seed(0)
    with torch.no_grad():  # one number of the latent each, and of the query for each of the latent
        chosen = torch.cat([torch.randperm(rank)[:size] for _ in range(heads) for size in (nope, value)])
        made_by.weight.copy_(torch.nn.functional.one_hot(chosen, rank))
    layer = Layer(Causal(), LatentStorage(rank, rope, batch_invariant=True))
    package = Twin(importlib.import_module(twin))
    options = AttentionOptions(0.2, batch_invariant=True)
    cache = layer.storage.allocate(package, 40, 4, dtype=torch.float32, device=torch.device(device))
    cache.normal_()
    lengths = {"decode": (1, 21), "prompt": (7, 19), "other": (9, 9), "first": (1, 1)}  # new tokens, and all
    blocks = {name: list(range(10 * i, 10 * i + 6)) for i, name in enumerate(lengths)}
    new = {
        name: [torch.randn(count, h, d, device=device) for h, d in ((heads, nope + rope), (1, rank), (1, rope))]
        for name, (count, _) in lengths.items()
    }

    def attend(*names):
        query_lens, seq_lens = zip(*(lengths[name] for name in names), strict=True)
        tables = [blocks[name] for name in names]
        batch = package.metadata.make_batch(query_lens, seq_lens, tables, device=device)
        slots = package.metadata.slot_mapping(batch, sum(query_lens), block_size=4)
        plan = layer.plan(package, batch, 4, [lengths[name] for name in names])
        rows = [torch.cat(x) for x in zip(*(new[name] for name in names), strict=True)]
        with torch.no_grad():
            out = layer.attend(package, SimpleNamespace(kv_b_proj=made_by), *rows, cache, slots, plan, options)
        return dict(zip(names, out.split(query_lens), strict=True))

    alone = {name: attend(name)[name] for name in lengths}
    for company in (("decode", "first", "prompt", "other"), ("prompt", "other"), ("decode", "other"), ("other",)):
        for name, out in attend(*company).items():
            assert torch.equal(out, alone[name]), (name, company)


@pytest.mark.parametrize("twin", TWINS)
def test_weights_may_change(twin, device):
    """Nothing is copied from them, and without an engine the model is what it was."""
    model = make_deepseek(device)
    engine = make_engine(model, twin)
    before = outputs(engine, PROMPTS[:3])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1.5)
    expected = transformers_outputs(model, PROMPTS[:3], attention="eager")
    assert expected != before
    assert outputs(make_engine(model, twin), PROMPTS[:3]) == expected
    engine.pool.forget(list(range(64)))
    assert outputs(engine, PROMPTS[:3]) == expected


@pytest.mark.lets_a_pass_fail
def test_what_makes_keys_and_values_has_to_be_one_matrix(device):
    """Whatever else it does, as an adapter or a quantized type would, is in no view of its weight."""

    class Adapted(torch.nn.Linear):
        """A Linear that does more."""

    model = make_deepseek(device)
    engine = make_engine(model)
    attention = model.model.layers[1].self_attn
    sizes = attention.kv_b_proj.in_features, attention.kv_b_proj.out_features
    for made_by in (Adapted(*sizes, bias=False), torch.nn.Linear(*sizes, bias=True)):
        attention.kv_b_proj = made_by.to(device)
        assert "kv_b_proj that is a Linear without a bias" in engine.generate(PROMPTS[:1], UNSTOPPED)[0].error
        with pytest.raises(ValueError, match=r"model: expected one whose .* kv_b_proj that is a Linear without a bias"):
            make_engine(model)


# --- quantized values ---

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
each_fp8 = pytest.mark.parametrize("kind", FP8)


@pytest.mark.parametrize(
    ("kind", "calibrated", "schedule", "twin"),
    [
        (*case, twin)
        for case, twin in zip(
            every_pair(FP8, [False, True], ["smallest pool, small workspace", "all at once"]), 2 * TWINS, strict=True
        )
    ],
)
def test_over_quantized_values_an_engine_answers_as_over_rounded_latents(
    deepseek, kind, schedule, calibrated, twin, monkeypatch
):
    """What fp8 does to a model is the rounding of its latents and rotary keys, and nothing else."""
    sizes = dict(SCHEDULES[schedule])
    monkeypatch.setattr(twinattn.engine.layers, "WORKSPACE", sizes.pop("workspace", 16384))
    calibration = calibrate(deepseek, PROMPTS[:2]) if calibrated else None
    largest_value, order = torch.finfo(FP8[kind]).max, {}

    def rounded(latent, rope_key, cache):
        layer = order.setdefault(cache.data_ptr(), len(order))  # in which the layers first write
        largest = max(x.max() for x in calibration[layer]) if calibrated else largest_value
        scale = torch.full_like(latent[:1, :1], float(largest) / largest_value)
        quantized = (
            (x / scale).clamp(-largest_value, largest_value).to(FP8[kind]).to(x.dtype) for x in (latent, rope_key)
        )
        return [x * scale for x in quantized]

    def write(latent, rope_key, cache, slots, **_):
        refattn.mla.write(*rounded(latent, rope_key, cache), cache, slots)

    def prefill(query, latent, rope_key, cache, plan, options, **projections):
        return refattn.mla.prefill(query, *rounded(latent, rope_key, cache), cache, plan, options, **projections)

    rounding = ModuleType("refattn")
    rounding.mla = ModuleType("mla")
    rounding.mla.__dict__.update({**vars(refattn.mla), "write": write, "prefill": prefill})
    plain = make_engine(deepseek, rounding, **sizes)
    expected = (
        outputs(plain),
        outputs(plain, PROMPTS[1:4]),
    )  # with a prefix that is found, and so is read as 8-bit values
    engine = make_engine(deepseek, twin, kv_cache_dtype=kind, calibration=calibration, **sizes)
    assert {cache.dtype for cache in engine.caches} == {FP8[kind]}
    assert len({layer.storage.cache_scale for layer in engine.layers}) == (2 if calibrated else 1)
    assert outputs(engine) == expected[0]
    cached = engine.counters.cached_blocks
    assert outputs(engine, PROMPTS[1:4]) == expected[1]
    assert engine.counters.cached_blocks > cached
    assert engine.counters.preemptions or not schedule.startswith("smallest pool")


CUTS = {
    "chunks of 16": dict(max_num_batched_tokens=16, max_num_seqs=1),
    "chunks of 32": dict(max_num_batched_tokens=32, max_num_seqs=1),
    "beside others": dict(max_num_batched_tokens=23, max_num_seqs=4),
    "preempted": dict(max_num_batched_tokens=16, num_blocks=18),
    "drafted": dict(max_num_batched_tokens=32, speculation=NGram(max_drafts=3, max_ngram=1)),
    "drafted as trees": dict(max_num_batched_tokens=32, speculation=NGram(max_drafts=3, max_branches=3, max_ngram=1)),
}


@pytest.mark.parametrize(("kind", "twin"), [*zip(FP8, TWINS, strict=True)])
def test_over_quantized_values_no_answer_depends_on_how_a_prompt_was_cut(deepseek, kind, twin):
    """Nor on preemption, after which an answer is a prompt, or on drafts, which are new tokens beside others."""
    draw = random.Random(4)
    prompts = [[draw.randrange(30) for _ in range(draw.randint(34, 40))] for _ in range(3)]
    whole = make_engine(deepseek, twin, kv_cache_dtype=kind, num_blocks=256, max_num_batched_tokens=1024)
    expected = outputs(whole, prompts)
    for name, sizes in CUTS.items():
        engine = make_engine(deepseek, twin, kv_cache_dtype=kind, **dict(num_blocks=256) | sizes)
        assert outputs(engine, prompts) == expected, name
        assert engine.counters.chunks > len(prompts) or "drafted" in name
        assert (engine.counters.preemptions > 0) == (name == "preempted")
        assert (engine.counters.drafted_tokens > 0) == ("drafted" in name)


@pytest.mark.covers("A179")
@each_fp8
@pytest.mark.parametrize("twin", TWINS)
def test_one_scale_is_that_of_the_largest_number_of_the_first_step(deepseek, kind, twin, monkeypatch):
    """Of latents and rotary keys together; and the answers are those of an engine that was given it."""
    engine = make_engine(deepseek, twin, kv_cache_dtype=kind, calculate_kv_scales=True)
    attend, largest = engine.layer_pools.attend, {}

    def watched(module, query, key, value, **step):
        if engine.counters.steps == 0:
            largest[module.layer_idx] = [x[0].abs().amax(1).cpu() for x in (key, value)]
        return attend(module, query, key, value, **step)

    monkeypatch.setattr(engine.layer_pools, "attend", watched)
    found = outputs(engine, PROMPTS[1:4])
    scales = [max(float(x.max()) for x in largest[i]) / 200 for i in range(2)]
    assert [layer.storage.cache_scale for layer in engine.layers] == scales
    for other in TWINS:
        given = make_engine(deepseek, other, kv_cache_dtype=kind)
        given.layers[:] = engine.layers
        assert outputs(given, PROMPTS[1:4]) == found


def test_recorded_steps_over_quantized_values_are_absorbed(deepseek, recorder):
    """As an engine that absorbs everything answers, which reads the new tokens of a prompt from the pool, too."""
    quantized = dict(kv_cache_dtype="fp8_e4m3", num_blocks=9, max_num_batched_tokens=10)
    engine = make_engine(deepseek, "fastattn", runner=recorder, **quantized)
    assert outputs(engine) == outputs(make_engine(deepseek, batch_invariant=True, **quantized))
    assert recorder._steps


@each_fp8
@pytest.mark.parametrize("twin", TWINS)
def test_a_quantized_pool_takes_a_quarter_of_the_memory(deepseek, twin, kind):
    plain, quantized = (make_engine(deepseek, twin, kv_cache_dtype=name) for name in ("auto", kind))
    assert quantized.pool_bytes == plain.pool_bytes / 4  # a quarter of float32
    assert (
        quantized.pool_bytes == sum(layer.storage.bytes_per_token(torch.float32) for layer in quantized.layers) * 64 * 4
    )


def test_what_quantized_latents_do_not_have_is_refused(deepseek):
    with pytest.raises(
        NotImplementedError, match="the engine keeps no latents in a pool of int8, only of auto, fp8_e4m3"
    ):
        make_engine(deepseek, kv_cache_dtype="int8")
    calibration = calibrate(deepseek, PROMPTS[:1])
    wrong = [calibration[0], CalibrationStats(calibration[1].value, calibration[1].value)]
    with pytest.raises(ValueError, match=rf"calibration\[1\].key: expected float32 \[hk=1, d={RANK}\], got .*{ROPE}\]"):
        make_engine(deepseek, kv_cache_dtype="fp8_e4m3", calibration=wrong)
    with pytest.raises(ValueError, match='calibration: expected None, as pools of kv_cache_dtype="auto"'):
        make_engine(deepseek, calibration=calibration)
