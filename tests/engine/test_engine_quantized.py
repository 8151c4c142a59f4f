"""Quantized caches in the engine: what both twins answer, calibration, the memory, and who is refused."""

import copy
import importlib
import os
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig

import fastattn.quantized
import refattn.chunked_prefill
import refattn.differential
import refattn.kv_cache
import refattn.local
import refattn.quantized
import twinattn.engine.cuda_graphs
import twinattn.engine.graph_shapes
import twinattn.engine.planner
from refattn.scales import Fp8Scales
from tests.helpers.drafts import Oracle, Wild
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import SHARED_CACHES, byte_tokenizer, make_family, make_llama
from tests.helpers.tolerance import assert_matches_reference
from twinattn.engine import CPU, CalibrationStats, Engine, NGram, SamplingParams, calibrate
from twinattn.engine.kv_cache_dtype import KV_CACHE_DTYPES
from twinattn.engine.layers import Chunk, Window
from twinattn.engine.storages import QuantizedStorage
from twinattn.kit.tolerance import on_cpu

SYSTEM = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 5, [*SYSTEM, 50], list(range(60, 85))]
OTHERS = [[17, 4, 88, 23, 51], list(range(95, 3, -2))]  # to calibrate on
GREEDY = SamplingParams(max_tokens=3, stop_token_ids=())
SIZES = dict(num_blocks=14, block_size=4, max_num_batched_tokens=24)  # small: prompts in chunks, and shared prefixes
SCARCE = dict(num_blocks=8, max_num_batched_tokens=19)  # and preemptions
CHUNKS = dict(
    layer_types=["chunked_attention", "full_attention"],
    no_rope_layers=[1, 0],
    attention_chunk_size=8,
    intermediate_size_mlp=64,
)
FAMILIES = {"llama": {}, "mistral": {}, "llama4_text": CHUNKS, "gemma3n_text": SHARED_CACHES}
KINDS = {"mistral": Window, "llama4_text": Chunk, "gemma3n_text": Window}
WAYS = [("fp8_e4m3", False), ("fp8_e4m3", True), ("fp8_e5m2", True), ("int8", False), ("int8", True)]
PACKAGES = ("refattn", "fastattn")
ON_CPU = os.environ["TWINATTN_TEST_DEVICE"] == "cpu"
TYPES = {"f32": torch.float32} | ({} if ON_CPU else {"f16": torch.float16, "bf16": torch.bfloat16})
IDS = [kind + "-calibrated" * calibrated for kind, calibrated in WAYS]
each_way = pytest.mark.parametrize(("kind", "calibrated"), WAYS, ids=IDS)
# Each way in one of the packages, for what the scheduler does with quantized values: it knows neither.
each_way_once = pytest.mark.parametrize(
    ("kind", "calibrated", "package"),
    [(*way, PACKAGES[i % 2]) for i, way in enumerate(WAYS)],
    ids=[f"{name}-{PACKAGES[i % 2]}" for i, name in enumerate(IDS)],
)
# Each kind of layer over fp8 and over int8, each way with some of them, as layers and ways of quantizing are written
# apart; every way is compared in every call by `test_twins_agree_in_every_layer_and_step`.
LAYERS_AND_WAYS = {
    "llama": (WAYS[0], WAYS[4]),
    "mistral": (WAYS[1], WAYS[3]),
    "llama4_text": (WAYS[2], WAYS[3]),
    "gemma3n_text": (WAYS[0], WAYS[4]),
}


def layers_and_ways(*families):
    """Take the cases of LAYERS_AND_WAYS for some families."""
    cases = [(family, *way) for family in families for way in LAYERS_AND_WAYS[family]]
    ids = [f"{family}-{IDS[WAYS.index((kind, calibrated))]}" for family, kind, calibrated in cases]
    return pytest.mark.parametrize(("family", "kind", "calibrated"), cases, ids=ids)


@pytest.fixture(scope="module")
def models(device):
    return {family: make_family(family, device, **changes) for family, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def calibrations(models):
    return {family: calibrate(model, OTHERS) for family, model in models.items()}


def answers(model, prompts=PROMPTS, **options) -> tuple[list[list[int]], Engine]:
    engine = Engine(model, **SIZES | options)
    requests = engine.generate(prompts, GREEDY)
    assert all(request.error is None for request in requests)
    return [request.output_ids for request in requests], engine


# --- what is computed ---


@layers_and_ways(*FAMILIES)
def test_twins_answer_alike(models, calibrations, family, kind, calibrated):
    calibration = calibrations[family] if calibrated else None
    (ref, engine), (fast, _) = (
        answers(models[family], kv_cache_dtype=kind, calibration=calibration, twin=importlib.import_module(package))
        for package in ("refattn", "fastattn")
    )
    assert ref == fast
    assert all(isinstance(layer.storage, QuantizedStorage) for layer in engine.layers)
    if family in KINDS:
        assert any(isinstance(layer.mask, KINDS[family]) for layer in engine.layers)


def checking_twin(steps):
    """Compute by `fastattn`: every write has the reference's bits, every output is within tolerance."""
    fast, reference = fastattn.quantized, refattn.quantized

    def write(*tensors, scales):
        *copies, of_copies = on_cpu(copy.deepcopy((*tensors, scales)))
        fast.write(*tensors, scales=scales)
        reference.write(*copies, scales=of_copies)
        pairs = [*zip(tensors[2:4], copies[2:4], strict=True)]
        if not isinstance(scales, Fp8Scales):
            pairs.append((scales.key, of_copies.key))
        for written, expected in pairs:
            assert torch.equal(as_bytes(written).cpu(), as_bytes(expected))

    def attention(query, key_cache, value_cache, plan, options, *, scales):
        out, lse = fast.attention(query, key_cache, value_cache, plan, options, scales=scales, return_lse=True)
        pools = [as_bytes(x) if isinstance(scales, Fp8Scales) else x for x in (key_cache, value_cache)]
        assert_matches_reference(out, lse, reference.attention, query, *pools, plan, options, scales=scales)
        steps.append(plan.batch.query_lens.tolist())
        return out

    twin = ModuleType("fastattn")
    twin.quantized = ModuleType("quantized")
    twin.quantized.__dict__.update({**vars(fast), "write": write, "attention": attention})
    return twin


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@each_way
def test_twins_agree_in_every_layer_and_step(calibrations, kind, calibrated, dtype, device):
    """Layers with windows and without, and some that share a cache; prefills and decodes together, and preemptions."""
    family = "gemma3n_text"
    model = make_family(family, device, **FAMILIES[family]).to(dtype)
    calibration = calibrations[family] if calibrated else None
    steps = []
    _, engine = answers(model, kv_cache_dtype=kind, calibration=calibration, twin=checking_twin(steps), **SCARCE)
    assert any(1 in lengths and max(lengths) > 1 for lengths in steps), "decodes beside a prefill"
    assert engine.counters.preemptions and engine.counters.chunks > len(PROMPTS)


def rounding_twin(calibration, kind):
    """Compute by `refattn` over a plain cache of the dequantized values, worked out number by number.

    A layer is known by its pool, in the order in which the layers first write.
    """
    seen = {}

    def write(key, value, key_cache, value_cache, slots):
        amax = calibration[seen.setdefault(key_cache.data_ptr(), len(seen))] if calibration else None
        if kind == "int8":
            key = by_row(key)
            value = value if amax is None else rounded(value, (amax.value / 127).to(value.device))
        else:
            largest = torch.finfo(KV_CACHE_DTYPES[kind]).max
            ones = [torch.ones(key.shape[1])] * 2
            scales = ones if amax is None else [x.amax(-1) / largest for x in amax]
            key, value = (
                ((x / scale).clamp(-largest, largest).to(KV_CACHE_DTYPES[kind]).to(x.dtype) * scale)
                for x, scale in zip((key, value), (scale.to(key.device)[:, None] for scale in scales), strict=True)
            )
        refattn.kv_cache.write(key, value, key_cache, value_cache, slots)

    def rounded(x, scale):
        return (x / scale).round().clamp(-127, 127) * scale

    def by_row(x):
        largest = x.abs().amax(-1, keepdim=True)
        return rounded(x, largest / torch.full_like(largest, 127.0))  # a GPU divides by a number in a way of its own

    twin = ModuleType("refattn")
    twin.kv_cache = ModuleType("kv_cache")
    twin.kv_cache.__dict__.update({**vars(refattn.kv_cache), "write": write})
    for path in (refattn.chunked_prefill, refattn.local) if kind == "int8" else ():
        name = path.__name__.removeprefix("refattn.")
        mixed = ModuleType(name)
        attend = path.attention
        mixed.__dict__.update({**vars(path), "attention": lambda query, *others, f=attend: f(by_row(query), *others)})
        setattr(twin, name, mixed)
    return twin


@layers_and_ways("llama", "mistral", "llama4_text")
def test_a_plain_cache_of_rounded_numbers_answers_the_same(models, calibrations, family, kind, calibrated):
    """8 bits change a model by rounding its keys and values, with int8 its queries, too, and by nothing else."""
    calibration = calibrations[family] if calibrated else None
    expected, _ = answers(models[family], twin=rounding_twin(calibration, kind))
    got, engine = answers(models[family], kv_cache_dtype=kind, calibration=calibration)
    assert got == expected
    assert engine.counters.chunks > len(PROMPTS)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"], ids=["softcap", "sinks", "alibi"])
def test_what_a_layer_fixes_reaches_it_over_quantized_values(family, kind, device):
    model = make_family(family, device)
    calibration = calibrate(model, OTHERS)
    expected, _ = answers(model, twin=rounding_twin(calibration, kind))
    for twin in (refattn, fastattn):
        assert answers(model, kv_cache_dtype=kind, calibration=calibration, twin=twin)[0] == expected


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
def test_recorded_decodes_change_nothing(models, calibrations, kind, recorder):
    """Scales are tensors that a recording reads."""
    options = dict(kv_cache_dtype=kind, calibration=calibrations["llama"], twin=fastattn)
    assert answers(models["llama"], **options, runner=recorder)[0] == answers(models["llama"], **options)[0]
    assert recorder.records and recorder._steps


@each_way_once
def test_a_cascade_reads_shared_quantized_values_once_and_changes_nothing(
    models, calibrations, kind, calibrated, package
):
    """Where a launch costs nothing a cascade is always worth it; on this machine it never is for so few keys."""
    options = dict(kv_cache_dtype=kind, calibration=calibrations["llama"] if calibrated else None)
    options |= dict(twin=importlib.import_module(package))
    expected, plain = answers(models["llama"], **options)
    got, engine = answers(models["llama"], **options, machine=replace(CPU, launch_seconds=0.0, tile_keys=4))
    assert got == expected
    assert 0 < engine.counters.saved_key_reads < engine.counters.key_reads == plain.counters.key_reads
    assert plain.counters.saved_key_reads == 0


def test_a_cascade_over_quantized_values_is_chosen_by_their_bytes(models, calibrations, monkeypatch):
    """A byte for an element of fp8; of int8 keys with a scale, and values in float32, two and a half: rounded up."""
    asked = []
    choose = twinattn.engine.planner.worthwhile_prefixes
    monkeypatch.setattr(
        twinattn.engine.planner,
        "worthwhile_prefixes",
        lambda *lens, **sizes: asked.append(sizes["element_size"]) or choose(*lens, **sizes),
    )
    for kind, calibrated, size in (("auto", False, 4), ("fp8_e4m3", True, 1), ("int8", True, 2), ("int8", False, 3)):
        asked.clear()
        calibration = calibrations["llama"] if calibrated else None
        answers(models["llama"], PROMPTS[:2], kv_cache_dtype=kind, calibration=calibration)
        assert {*asked} == {size}


@pytest.mark.parametrize(
    ("way", "family", "package"),
    every_pair([WAYS[1], WAYS[3], WAYS[4]], ["llama", "mistral"], PACKAGES),
    ids=lambda value: value if isinstance(value, str) else IDS[WAYS.index(value)],
)
def test_drafts_over_quantized_values_change_nothing(models, calibrations, family, way, package):
    """Trees with wrong tokens before the right ones: the values of accepted ones move, and their scales."""
    kind, calibrated = way
    options = dict(kv_cache_dtype=kind, calibration=calibrations[family] if calibrated else None, num_blocks=30)
    options |= dict(twin=importlib.import_module(package))
    sampling = SamplingParams(max_tokens=8, stop_token_ids=())
    plain = Engine(models[family], **SIZES | options)
    whole = [request.tokens for request in plain.generate(PROMPTS, sampling)]
    drafts = Oracle(max_drafts=3, max_branches=3)
    object.__setattr__(drafts, "answers", whole)
    engine = Engine(models[family], **SIZES | options, speculation=drafts)
    assert [request.tokens for request in engine.generate(PROMPTS, sampling)] == whole
    assert 0 < engine.counters.accepted_tokens < engine.counters.drafted_tokens
    assert engine.counters.steps < plain.counters.steps


def test_trees_over_quantized_values_are_for_layers_that_take_trees(models):
    with pytest.raises(
        ValueError, match="^speculation: expected max_branches=1, as Chunk over QuantizedPages has no plan for"
    ):
        Engine(models["llama4_text"], **SIZES, kv_cache_dtype="int8", speculation=NGram(max_branches=2))


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
def test_recorded_verifications_over_quantized_values_change_nothing(models, calibrations, kind, recorder):
    """As the recorded decodes above, with trees, whose parents are in the buffers of a recording, too."""
    options = dict(kv_cache_dtype=kind, calibration=calibrations["llama"], twin=fastattn)
    expected, _ = answers(models["llama"], **options)
    drafts = Wild(max_drafts=3, max_branches=3)
    got, engine = answers(models["llama"], **options, runner=recorder, speculation=drafts)
    assert got == expected and engine.counters.drafted_tokens > 0
    assert recorder.records and any(shape.trees for shape in recorder._steps)


# --- pairs of heads ---


@pytest.fixture(scope="module")
def pairs(device):
    """Four KV heads, so that the order of interleaved pairs is not that of the model."""
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, hidden_size=64, head_dim=8)
    return make_family("diffllama", device, **sizes)


def rounding_pairs_twin(calibration, kind):
    """Compute by `refattn` over a plain cache of pairs, of numbers that are rounded head by head."""
    seen, largest = {}, torch.finfo(KV_CACHE_DTYPES[kind]).max

    def write(key, value, cache, slots, *, scales):
        layer = seen.setdefault(cache.data_ptr(), len(seen))
        amax = calibration[layer] if calibration else [torch.full((4, 8), largest)] * 2
        rounded = []
        for x, of_channels in zip((key, value), amax, strict=True):
            of_heads = of_channels[[0, 2, 1, 3]].amax(-1) / largest  # first heads 0 and 1, second heads 2 and 3
            scale = of_heads[:, None].to(x.device)
            rounded.append((x / scale).clamp(-largest, largest).to(KV_CACHE_DTYPES[kind]).to(x.dtype) * scale)
        refattn.differential.write(*rounded, cache, slots)

    twin = ModuleType("refattn")
    twin.differential = ModuleType("differential")
    twin.differential.__dict__.update({**vars(refattn.differential), "write": write})
    return twin


@pytest.mark.parametrize(
    ("kind", "calibrated"), WAYS[:3], ids=["fp8_e4m3", "fp8_e4m3-calibrated", "fp8_e5m2-calibrated"]
)
def test_pairs_in_fp8_answer_as_a_plain_cache_of_rounded_numbers(pairs, kind, calibrated):
    """Either twin, through preemptions and shared prefixes."""
    calibration = calibrate(pairs, OTHERS) if calibrated else None
    expected, _ = answers(pairs, twin=rounding_pairs_twin(calibration, kind))
    for twin in (refattn, fastattn):
        got, engine = answers(pairs, kv_cache_dtype=kind, calibration=calibration, twin=twin, **SCARCE)
        assert got == expected
        assert engine.counters.preemptions and engine.counters.cached_blocks
        assert {cache.dtype for cache in engine.caches} == {KV_CACHE_DTYPES[kind]}


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_drafted_trees_and_shared_prefixes_change_no_answer_of_pairs(pairs, kind):
    """What is accepted moves in all four pools; a cascade is free on this machine."""
    options = dict(kv_cache_dtype=kind, calibration=None if kind == "auto" else calibrate(pairs, OTHERS))
    drafts = Oracle(max_drafts=3, max_branches=3)
    expected, engine = answers(pairs, **options)
    assert engine.counters.saved_key_reads == 0
    whole = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]
    object.__setattr__(drafts, "answers", whole)
    for twin in (refattn, fastattn):
        got, engine = answers(pairs, **options, twin=twin, speculation=drafts)
        assert got == expected and engine.counters.accepted_tokens > 0
        free = replace(CPU, launch_seconds=0.0, workers=1, tile_keys=4)
        got, engine = answers(pairs, **options, twin=twin, machine=free)
        assert got == expected and engine.counters.saved_key_reads > 0


def test_scales_of_pairs_are_in_the_order_of_interleaved_pairs(pairs):
    calibration = calibrate(pairs, OTHERS)
    for twin in (refattn, fastattn):
        engine = Engine(pairs, **SIZES, kv_cache_dtype="fp8_e4m3", calibration=calibration, twin=twin)
        for layer, amax in zip(engine.layers, calibration, strict=True):
            of_key, of_value = (x.amax(-1)[[0, 2, 1, 3]] / 448 for x in amax)
            assert torch.equal(layer.storage.key_scale.cpu(), of_key) and len({*of_key.tolist()}) == 4
            assert torch.equal(layer.storage.value_scale.cpu(), of_value)


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_scales_of_pairs_are_those_of_the_first_step(pairs, package, monkeypatch):
    options = dict(kv_cache_dtype="fp8_e4m3", twin=importlib.import_module(package))
    engine, largest = watched_engine(pairs, monkeypatch, **options)
    found = [request.output_ids for request in engine.generate(PROMPTS, GREEDY)]
    for i, layer in enumerate(engine.layers):
        assert_scales(layer.storage, *(x.amax(-1)[[0, 2, 1, 3]] for x in largest[i]))
    given = Engine(pairs, **SIZES, **options)
    given.layers[:] = engine.layers
    assert [request.output_ids for request in given.generate(PROMPTS, GREEDY)] == found


def test_captured_decodes_over_pairs_in_fp8_change_nothing(pairs, recorder):
    options = dict(kv_cache_dtype="fp8_e4m3", calibration=calibrate(pairs, OTHERS), twin=fastattn)
    assert answers(pairs, **options, runner=recorder)[0] == answers(pairs, **options)[0]
    assert recorder.records and recorder._steps


def test_pairs_in_fp8_take_a_quarter_of_the_memory_of_float32(pairs):
    plain, quantized = (Engine(pairs, **SIZES, kv_cache_dtype=kind) for kind in ("auto", "fp8_e5m2"))
    assert quantized.pool_bytes == plain.pool_bytes / 4
    tokens = SIZES["num_blocks"] * SIZES["block_size"]
    for engine in (plain, quantized):
        per_token = sum(layer.storage.bytes_per_token(torch.float32) for layer in engine.layers)
        assert engine.pool_bytes == per_token * tokens


# --- calibration ---


@pytest.mark.core
@pytest.mark.covers("B96")
@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_a_calibration_is_the_largest_of_what_transformers_computes(models, family, package):
    """Its own attention and its own cache, one prompt at a time; windows longer than the prompts, or it drops keys."""
    changes = FAMILIES[family] | (dict(sliding_window=128) if family in KINDS else {})
    model = make_family(family, models[family].device, **changes)
    found = calibrate(model, [[3], *PROMPTS], twin=importlib.import_module(package))
    model.set_attn_implementation("eager")
    largest = {}
    with torch.no_grad():
        for prompt in [[3], *PROMPTS]:
            cache = model(torch.tensor([prompt], device=model.device), use_cache=True).past_key_values
            for i, layer in enumerate(cache.layers):
                if layer.keys is None:  # one that has those of another layer
                    continue
                here = [x[0].abs().amax(1).cpu() for x in (layer.keys, layer.values)]
                largest[i] = list(map(torch.maximum, largest.get(i, here), here))
    owners = [0, 1] if family == "llama" else [0, 1, 2, 0, 2]
    assert len(found) == len(owners) and len(largest) == len(set(owners))
    for amax, owner in zip(found, owners, strict=True):
        assert isinstance(amax, CalibrationStats)
        for one, other in zip(amax, largest[owner], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.max()))
    assert len({float(amax.value.max()) for amax in found}) == len(set(owners))


def test_large_numbers_fit_once_they_are_calibrated(device):
    """Values and keys 1024 times as large, and queries and projections that much smaller, are the same model.

    Under a scale of 1 most of them saturate.
    """
    small, large = make_llama(device), make_llama(device)
    with torch.no_grad():
        for layer in large.model.layers:
            for weight, factor in (("q", -10), ("k", 10), ("v", 10), ("o", -10)):
                getattr(layer.self_attn, f"{weight}_proj").weight.mul_(2.0**factor)
    assert answers(large)[0] == answers(small)[0]
    pairs = [(model, calibrate(model, OTHERS[:1])) for model in (small, large)]
    for kind in ("fp8_e4m3", "int8"):
        (of_small, _), (of_large, engine) = (
            answers(model, kv_cache_dtype=kind, calibration=calibration) for model, calibration in pairs
        )
        assert of_small == of_large
    assert engine.layers[0].storage.value_scale.min() > 1
    (of_small, _), (of_large, _) = (answers(model, kv_cache_dtype="fp8_e4m3") for model in (small, large))
    assert of_small != of_large


def test_one_calibration_is_that_of_both_twins_and_of_every_engine(models, calibrations):
    engines = [
        Engine(models["llama"], **SIZES, kv_cache_dtype=kind, calibration=calibrations["llama"], twin=twin)
        for kind in ("fp8_e4m3", "int8")
        for twin in (refattn, fastattn)
    ]
    for i, amax in enumerate(calibrations["llama"]):
        of_fp8, same, of_int8, same_too = (engine.layers[i].storage for engine in engines)
        assert torch.equal(of_fp8.key_scale, same.key_scale) and torch.equal(of_fp8.value_scale, same.value_scale)
        assert torch.equal(of_int8.value_scale, same_too.value_scale)
        assert torch.equal(of_fp8.key_scale.cpu(), amax.key.amax(-1) / 448)
        assert torch.equal(of_int8.value_scale.cpu(), amax.value / 127)
        assert len({*of_fp8.key_scale.tolist(), *of_fp8.value_scale.tolist()}) == 4, "all different"
    first, second = engines[0].layers
    assert first == second and not torch.equal(first.storage.key_scale, second.storage.key_scale), (
        "no plan depends on scales"
    )


def test_a_layer_that_reads_the_pool_of_another_has_its_scales(models, calibrations):
    wrong = [*calibrations["gemma3n_text"][:3], *[amax()] * 2]
    engine = Engine(models["gemma3n_text"], **SIZES, kv_cache_dtype="fp8_e4m3", calibration=wrong)
    for layer, owner in zip(engine.layers, (0, 1, 2, 0, 2), strict=True):
        assert torch.equal(layer.storage.key_scale, engine.layers[owner].storage.key_scale)


def test_a_head_of_zeros_has_a_scale_of_1(models):
    zeros = [CalibrationStats(torch.zeros(2, 16), torch.zeros(2, 16))] * 2
    for kind in KV_CACHE_DTYPES:
        engine = Engine(models["llama"], **SIZES, kv_cache_dtype=kind, calibration=zeros)
        assert all((scale == 1).all() for layer in engine.layers for scale in layer.fixed_scales)


# --- scales worked out while serving ---


def watched_engine(model, monkeypatch, **options) -> tuple[Engine, dict[int, CalibrationStats]]:
    """Make an engine, and note the largest keys and values of its first step by layer."""
    engine, largest = Engine(model, **SIZES | dict(calculate_kv_scales=True) | options), {}
    attend = engine.layer_pools.attend

    def watched(module, query, key, value, **step):
        if engine.counters.steps == 0:
            largest[module.layer_idx] = CalibrationStats(*(x[0].float().abs().amax(1).cpu() for x in (key, value)))
        return attend(module, query, key, value, **step)

    monkeypatch.setattr(engine.layer_pools, "attend", watched)
    return engine, largest


def assert_scales(storage, key, value):
    """To the bit, divided where the scales are: PyTorch multiplies by the inverse of 200 on a GPU."""
    assert torch.equal(storage.key_scale, key.to(storage.key_scale) / 200)
    assert torch.equal(storage.value_scale, value.to(storage.value_scale) / 100)


@pytest.mark.covers("A179")
@pytest.mark.parametrize(("family", "kind", "package"), every_pair(FAMILIES, ["fp8_e4m3", "fp8_e5m2"], PACKAGES))
def test_scales_are_those_of_the_first_step(models, family, kind, package, monkeypatch):
    """Of its largest key and value per KV head; they never change again, and the answers are those of such scales."""
    model, twin = models[family], importlib.import_module(package)
    engine, largest = watched_engine(model, monkeypatch, kv_cache_dtype=kind, twin=twin)
    assert all(layer.storage.key_scale == layer.storage.value_scale == 1.0 for layer in engine.layers), (
        "of the token that it tries"
    )
    found = [request.output_ids for request in engine.generate(PROMPTS, GREEDY)]
    for layer, owner in zip(engine.layers, engine.owners, strict=True):
        assert_scales(layer.storage, *(x.amax(-1) for x in largest[owner]))
    before = list(engine.layers)
    engine.generate([OTHERS[1]], GREEDY)
    assert all(now is then for now, then in zip(engine.layers, before, strict=True))
    given = Engine(model, **SIZES, kv_cache_dtype=kind, twin=twin)
    given.layers[:] = before
    assert [request.output_ids for request in given.generate(PROMPTS, GREEDY)] == found


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_after_the_first_step_no_answer_depends_on_what_else_is_served(models, package):
    engine = Engine(
        models["llama"],
        **SIZES,
        kv_cache_dtype="fp8_e4m3",
        calculate_kv_scales=True,
        twin=importlib.import_module(package),
    )
    engine.generate([OTHERS[0]], GREEDY)
    together = [request.output_ids for request in engine.generate(PROMPTS, GREEDY)]
    assert [engine.generate([prompt], GREEDY)[0].output_ids for prompt in PROMPTS] == together


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("how", ["nan", "raises"])
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_a_request_that_fails_leaves_no_scales_behind(how, package, device):
    """With NaN for its keys, or an exception in the second layer, after the first has worked out its scales."""
    model, twin = make_llama(device), importlib.import_module(package)
    good, bad = PROMPTS[1], [9, 95, 95]
    with torch.no_grad():
        model.model.embed_tokens.weight[95] = torch.nan if how == "nan" else 1e3
    if how == "raises":

        def fail(layer, arguments):
            if float(arguments[0].abs().max()) > 900:
                raise RuntimeError("too large")

        model.model.layers[1].register_forward_pre_hook(fail)
    options = dict(kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True, twin=twin)
    alone = Engine(model, **SIZES, **options)
    (expected,) = alone.generate([good], GREEDY)
    engine = Engine(model, **SIZES, **options)
    failed, answer = engine.generate([bad, good], GREEDY)
    assert failed.finish_reason == "error" and answer.output_ids == expected.output_ids
    for layer, other in zip(engine.layers, alone.layers, strict=True):
        torch.testing.assert_close(layer.storage.key_scale, other.storage.key_scale)
        torch.testing.assert_close(layer.storage.value_scale, other.storage.value_scale)


def test_nothing_is_recorded_before_there_are_scales(models, recorder):
    options = dict(kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True, twin=fastattn)
    expected, plain = answers(models["llama"], **options)
    found, engine = answers(models["llama"], **options, runner=recorder)
    assert found == expected and recorder._steps
    for layer, other in zip(engine.layers, plain.layers, strict=True):
        assert torch.equal(layer.storage.key_scale, other.storage.key_scale)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        (dict(kv_cache_dtype="auto"), "kv_cache_dtype='auto'"),
        (dict(kv_cache_dtype="int8"), "kv_cache_dtype='int8'"),
        (dict(kv_cache_dtype="fp8_e4m3", calibration=[]), "a calibration"),
        (dict(kv_cache_dtype="fp8_e4m3", calculate_kv_scales=1), "got 1$"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_scales_are_worked_out_where_there_are_no_others(models, options, got):
    with pytest.raises(ValueError, match=f"^calculate_kv_scales: expected .*{got}"):
        Engine(models["llama"], **SIZES, **dict(calculate_kv_scales=True) | options)


def test_texts_calibrate_as_their_tokens(device):
    model, tokenizer = make_llama(device, vocab_size=257), byte_tokenizer()
    texts = ["A diary.", "Name three colours."]
    by_text = calibrate(model, texts, tokenizer=tokenizer)
    by_tokens = calibrate(model, [list(text.encode()) for text in texts])
    assert all(
        torch.equal(x, y)
        for one, other in zip(by_text, by_tokens, strict=True)
        for x, y in zip(one, other, strict=True)
    )


# --- memory ---


SHARES = {  # shares of float32; values of int8 stay as they are, if they are not calibrated
    ("fp8_e4m3", False): 16 + 16,
    ("fp8_e5m2", False): 16 + 16,
    ("int8", False): 16 + 4 + 64,
    ("fp8_e4m3", True): 16 + 16,
    ("fp8_e5m2", True): 16 + 16,
    ("int8", True): 16 + 4 + 16,
}


@each_way_once
def test_the_pool_takes_less_memory(models, calibrations, kind, calibrated, package):
    """Measured as the tensors have it, with the scales of int8 keys, and those that are fixed for all tokens."""
    twin, calibration = importlib.import_module(package), calibrations["llama"] if calibrated else None
    plain = Engine(models["llama"], **SIZES, twin=twin)
    eight_bit = Engine(models["llama"], **SIZES, twin=twin, kv_cache_dtype=kind, calibration=calibration)
    tokens, heads, layers = SIZES["num_blocks"] * SIZES["block_size"], 2, 2
    fixed = layers * heads * 4 * (0 if not calibrated else 16 if kind == "int8" else 2)
    assert plain.pool_bytes == tokens * layers * heads * 128
    assert eight_bit.pool_bytes == tokens * layers * heads * SHARES[kind, calibrated] + fixed
    assert (
        sum(layer.storage.bytes_per_token(torch.float32) for layer in eight_bit.layers) * tokens
        == eight_bit.pool_bytes - fixed
    )


# --- who is refused ---


def test_pairs_of_int8_are_refused_at_once(pairs):
    with pytest.raises(
        NotImplementedError, match=r"^kv_cache_dtype: .* no pairs in a pool of int8, only of auto, fp8_e4m3, fp8_e5m2$"
    ):
        Engine(pairs, **SIZES, kv_cache_dtype="int8")


@pytest.mark.core
@pytest.mark.covers("A17", "B186")
def test_a_type_that_is_not_there_is_named(models):
    with pytest.raises(
        ValueError,
        match=r"^kv_cache_dtype: expected auto, fp8_e4m3, fp8_e5m2, int8, int4, nvfp4, fp8_ds_mla, got 'fp8'",
    ):
        Engine(models["llama"], **SIZES, kv_cache_dtype="fp8")


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
def test_a_model_with_an_encoder_is_refused_over_quantized_values_as_over_unquantized(kind):
    """Cross attention over quantized pages is there as a path; the engine's requests have no encoder."""
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(
        BartConfig(vocab_size=97, **sizes, encoder_ffn_dim=16, decoder_ffn_dim=16)
    )
    with pytest.raises(ValueError, match=r"^model: expected a causal decoder .*, got Bart.*, which has an encoder"):
        Engine(model, **SIZES, kv_cache_dtype=kind)


def amax(heads=2, size=16, **changes):
    return CalibrationStats(torch.ones(heads, size), torch.ones(heads, size))._replace(**changes)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([amax()], "calibration: expected CalibrationStats for each of 2 layers, got 1"),
        (3, "calibration: expected CalibrationStats for each of 2 layers, got int"),
        ([amax(), None], r"calibration\[1\]: expected CalibrationStats, got None"),
        ([amax(), amax(heads=6)], r"calibration\[1\].key: expected float32 \[hk=2, d=16\], got float32 \[6, 16\]"),
        ([amax(value=torch.ones(2)), amax()], r"calibration\[0\].value: expected float32 \[hk=2, d=16\], got"),
        ([amax(key=-torch.ones(2, 16)), amax()], r"calibration\[0\].key: expected finite magnitudes"),
        ([amax(value=torch.full((2, 16), torch.nan)), amax()], r"calibration\[0\].value: expected finite magnitudes"),
    ],
    ids=["one", "number", "none", "heads", "flat", "negative", "nan"],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_calibration_of_another_model_is_named(models, calibration, message):
    with pytest.raises(ValueError, match="^" + message):
        Engine(models["llama"], **SIZES, kv_cache_dtype="int8", calibration=calibration)


def test_a_plain_cache_takes_no_calibration(models, calibrations):
    with pytest.raises(
        ValueError, match="^calibration: expected None, as pools of kv_cache_dtype=.auto. have no scale"
    ):
        Engine(models["llama"], **SIZES, calibration=calibrations["llama"])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: expected at least one, got none"),
        ("text", "prompts: expected a list of prompts, got 'text'"),
        (["text"], "prompt: expected token ids, as there is no tokenizer, got text"),
        ([[1], []], "prompt: expected at least one token, got none"),
        ([[1], [97]], "prompt: expected token ids in 0..96, got 97..97"),
    ],
    ids=["none", "string", "no tokenizer", "empty", "unknown"],
)
def test_bad_prompts_are_named(models, prompts, message):
    with pytest.raises(ValueError, match="^" + message):
        calibrate(models["llama"], prompts)


@pytest.mark.lets_a_pass_fail
def test_a_prompt_that_fails_is_named(device):
    model = make_llama(device)

    def refuse(module, arguments):
        if (arguments[0] == 66).any():
            raise RuntimeError("no such row")

    model.get_input_embeddings().register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match=r"^prompts\[1\]: expected one that the model can read, got .* no such row"):
        calibrate(model, [[1, 2], [66, 3]])
