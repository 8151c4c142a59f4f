"""Quantised caches in the engine: the answers of both twins, the memory, and who is refused."""

import importlib
from types import ModuleType

import pytest
import torch
from tiny_models import LATENT_SIZES, make_family

from refattn.serving import Engine, SamplingParams
from refattn.serving.layers import KV_CACHE_DTYPES, LocalLayer, QuantizedLayer, WindowLayer

SYSTEM = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 10, [*SYSTEM, 50], list(range(60, 93))]
GREEDY = SamplingParams(max_tokens=4, stop_token_ids=())
SIZES = dict(num_blocks=14, block_size=4, max_num_batched_tokens=24)  # small: prompts in chunks, and preemptions
FAMILIES = {"llama": None, "mistral": WindowLayer, "llama4_text": LocalLayer}
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def only_on_cpu(device):
    if device != "cpu":
        pytest.skip("of what a GPU computes, tests/paths/test_quantized_triton.py is the proof")


@pytest.fixture(scope="module")
def models():
    return {family: make_family(family, "cpu") for family in FAMILIES}


def answers(model, **options) -> tuple[list[list[int]], Engine]:
    engine = Engine(model, **SIZES, **options)
    requests = engine.generate(PROMPTS, GREEDY)
    assert all(request.error is None for request in requests)
    return [request.output_ids for request in requests], engine


@each_family
@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
def test_twins_answer_alike(models, family, kind):
    model = models[family]
    (ref, engine), (fast, _) = (
        answers(model, kv_cache_dtype=kind, twin=importlib.import_module(package))
        for package in ("refattn", "fastattn")
    )
    assert ref == fast
    assert all(isinstance(layer, QuantizedLayer) for layer in engine.layers)
    if FAMILIES[family] is not None:
        assert any(isinstance(layer.layer, FAMILIES[family]) for layer in engine.layers)


@each_family
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_a_plain_cache_of_rounded_numbers_answers_the_same(models, family, kind):
    """What fp8 does to a model is the rounding of its keys and values, and nothing else."""

    def write(key, value, key_cache, value_cache, slots):
        rounded = (x.to(KV_CACHE_DTYPES[kind]).to(x.dtype) for x in (key, value))
        refattn_cache.write(*rounded, key_cache, value_cache, slots)

    refattn_cache = importlib.import_module("refattn.kv_cache")
    rounding = ModuleType("refattn")
    rounding.kv_cache = ModuleType("kv_cache")
    rounding.kv_cache.__dict__.update({**vars(refattn_cache), "write": write})
    expected, _ = answers(models[family], twin=rounding)
    got, engine = answers(models[family], kv_cache_dtype=kind)
    assert got == expected
    assert engine.counters.preemptions or engine.counters.chunks > len(PROMPTS)


@pytest.mark.parametrize(("kind", "share"), [("fp8_e4m3", 1 / 4), ("fp8_e5m2", 1 / 4), ("int8", (16 + 4 + 64) / 128)])
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_the_pool_takes_less_memory(models, kind, share, package):
    """Of float32 a quarter, measured as the tensors have it; int8 keys bring a scale, and values stay."""
    twin = importlib.import_module(package)
    plain, coded = (Engine(models["llama"], **SIZES, twin=twin, kv_cache_dtype=name) for name in ("auto", kind))
    assert coded.pool_bytes == plain.pool_bytes * share
    tokens = SIZES["num_blocks"] * SIZES["block_size"]
    for engine in (plain, coded):
        assert engine.pool_bytes == sum(layer.bytes_per_token(torch.float32) for layer in engine.layers) * tokens


@pytest.mark.parametrize(
    ("family", "sizes", "what"),
    [("deepseek_v3", LATENT_SIZES, "latents"), ("diffllama", {}, "pairs")],
    ids=["latents", "pairs"],
)
def test_layers_without_such_a_pool_are_refused_at_once(family, sizes, what):
    model = make_family(family, "cpu", **sizes)
    with pytest.raises(NotImplementedError, match=f"^kv_cache_dtype: no path reads {what} from a pool of fp8_e4m3"):
        Engine(model, **SIZES, kv_cache_dtype="fp8_e4m3")


def test_a_type_that_is_not_there_is_named(models):
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: expected auto, fp8_e4m3, fp8_e5m2, int8, got 'fp8'"):
        Engine(models["llama"], **SIZES, kv_cache_dtype="fp8")
