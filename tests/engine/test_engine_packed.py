"""Packed latents in the engine: a pool of bytes, with the index keys of a token beside it where keys are selected.

The models' latents have two groups of 128 numbers, of which those of the second are 65536 times as large; so an answer
shows which scale a number was multiplied with. What a layer does with a latent undoes the factor.
"""

from types import ModuleType

import pytest
import torch

import refattn.mla
import twinattn.engine.choice
import twinattn.engine.cuda_graphs
import twinattn.engine.graph_shapes
import twinattn.engine.layers
from tests.helpers import engines
from tests.helpers.drafts import Chains, Oracle
from tests.helpers.engines import SYSTEM, TWINS, UNSTOPPED, assert_answers_twice, first_logits, make_engine
from tests.helpers.tiny_models import INDEX_SIZES, LATENT_SIZES, YARN, make_family, make_llama
from twinattn.engine import NGram, calibrate
from twinattn.engine.layers import Causal, Layer
from twinattn.engine.storages import LatentStorage, SelectedLatentStorage

RANK, ROPE, INDEX = 256, INDEX_SIZES["qk_rope_head_dim"], INDEX_SIZES["index_head_dim"]
BYTES = RANK + 2 * 4 + ROPE * 2
PACKED = dict(kv_cache_dtype="fp8_ds_mla")
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 8, [*SYSTEM, 50], list(range(60, 84))]
WIDE = dict(kv_lora_rank=RANK, eos_token_id=None)
MODELS = {
    "deepseek_v32": INDEX_SIZES | WIDE | dict(first_k_dense_replace=2),
    "deepseek_v3": LATENT_SIZES | WIDE | dict(first_k_dense_replace=2, rope_parameters=YARN),
}


def make_model(name, device, **changes):
    model = make_family(name, device, **MODELS[name] | changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight[128:] *= 65536
            layer.self_attn.kv_b_proj.weight[:, 128:] /= 65536
    return model


@pytest.fixture(scope="module")
def models(device):
    return {name: make_model(name, device) for name in MODELS}


def outputs(engine, prompts=PROMPTS):
    return engines.outputs(engine, prompts, UNSTOPPED)


def rounded(latent, rope_key):
    """Round by the format alone: a scale for 128 numbers, the largest of which is 448; rotary keys in 16 bits."""
    groups = latent.unflatten(1, (-1, 128))
    scales = groups.abs().amax(2, keepdim=True).clamp(min=448 * 2.0**-126) / 448
    quantized = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (quantized.to(latent.dtype) * scales).flatten(1), rope_key.bfloat16().to(rope_key.dtype)


@pytest.fixture(scope="module")
def expected(models):
    """What the reference answers over pools of float32, into which it writes rounded latents."""
    rounding = ModuleType("refattn")
    rounding.mla = ModuleType("mla")

    def write(latent, rope_key, cache, slots, **_):
        refattn.mla.write(*rounded(latent, rope_key), cache, slots)

    def prefill(query, latent, rope_key, cache, plan, options, **projections):
        return refattn.mla.prefill(query, *rounded(latent, rope_key), cache, plan, options, **projections)

    rounding.mla.__dict__.update({**vars(refattn.mla), "write": write, "prefill": prefill})
    found = {name: outputs(make_engine(model, rounding)) for name, model in models.items()}
    assert all(len(set(map(tuple, answers))) == len(PROMPTS) for answers in found.values())
    return found


SCHEDULES = {
    "short steps": dict(max_num_batched_tokens=9, max_num_seqs=3, batch_invariant=True),
    "scarce, drafts": dict(block_size=7, num_blocks=7, max_num_batched_tokens=20, speculation=Chains(4)),
}
CASES = [
    ("deepseek_v32", "scarce, drafts", "fastattn"),
    ("deepseek_v3", "scarce, drafts", "fastattn"),
    ("deepseek_v3", "short steps", "refattn"),
]


@pytest.mark.covers("F217")
@pytest.mark.parametrize(("name", "schedule", "twin"), CASES)
def test_answers_are_those_over_rounded_latents(models, expected, name, schedule, twin, monkeypatch):
    """Prompts in chunks over their context in chunks, preemptions, rejected drafts, and prefixes the second time."""
    monkeypatch.setattr(twinattn.engine.layers, "WORKSPACE", 5)
    engine = make_engine(models[name], twin, **PACKED, **SCHEDULES[schedule])
    assert_answers_twice(engine, PROMPTS, expected[name], UNSTOPPED)
    counters = engine.counters
    if schedule == "scarce, drafts":
        assert counters.preemptions and counters.drafted_tokens > counters.accepted_tokens


def test_drafted_trees_are_read_and_moved(models, expected):
    """Over all keys there are trees, too: rows of what is accepted move to their places, scales and all."""
    drafts = Oracle(max_drafts=3, max_branches=3)
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected["deepseek_v3"], strict=True)]
    object.__setattr__(drafts, "answers", whole)
    engine = make_engine(models["deepseek_v3"], "fastattn", **PACKED, speculation=drafts)
    assert outputs(engine) == expected["deepseek_v3"]
    assert engine.counters.drafted_tokens > engine.counters.accepted_tokens > 0


@pytest.mark.covers("F217")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close_to_those_over_16_bits(name, device, monkeypatch):
    """Off by what fp8 rounds, where one scale for all would lose the smaller half of each latent."""
    model = make_model(name, device).bfloat16()
    of_one_scale = dict(kv_cache_dtype="fp8_e4m3", calibration=calibrate(model, PROMPTS))
    exact, packed, one_scale = (
        first_logits(make_engine(model, "fastattn", **options), PROMPTS[1:4], monkeypatch)
        for options in ({}, PACKED, of_one_scale)
    )
    off, lost = ((found - exact).norm() / exact.norm() for found in (packed, one_scale))
    assert 0 < off < 2 / 16 < lost, "two layers, each of which rounds a number by a sixteenth of it at most"


@pytest.mark.core
@pytest.mark.covers("F217")
@pytest.mark.parametrize("twin", TWINS)
def test_a_token_has_a_row_of_bytes(models, twin):
    """And its index key in the type of the model beside it, with the same block and slot."""
    for name, kind in (("deepseek_v32", SelectedLatentStorage), ("deepseek_v3", LatentStorage)):
        engine = make_engine(models[name], twin, num_blocks=20, **PACKED)
        more = dict(topk=INDEX_SIZES["index_topk"], index_size=INDEX) if kind is SelectedLatentStorage else {}
        assert set(engine.layers) == {Layer(Causal(), kind(RANK, ROPE, dtype=torch.uint8, **more))}
        for cache in engine.caches:
            pools = list(cache) if more else [cache]
            assert [(x.shape, x.dtype) for x in pools] == [
                ((20, 4, BYTES), torch.uint8),
                ((20, 4, INDEX), torch.float32),
            ][: len(pools)]
        assert engine.pool_bytes == 20 * 4 * 2 * (BYTES + 4 * INDEX * bool(more))
        of_a_token = [layer.storage.bytes_per_token(torch.float32) for layer in engine.layers]
        assert engine.pool_bytes == 20 * 4 * sum(of_a_token)


@pytest.mark.covers("F217")
@pytest.mark.parametrize(("name", "twin"), [*zip(MODELS, TWINS, strict=True)])
def test_what_others_left_in_the_pools_is_not_read(models, expected, name, twin):
    """Bytes that are NaN as a quantized value, as a scale and as a number."""
    engine = make_engine(models[name], twin, num_blocks=15, max_num_batched_tokens=10, **PACKED)
    for cache in engine.caches:
        for pool in cache if isinstance(cache, tuple) else (cache,):
            pool.fill_(0xFF if pool.dtype == torch.uint8 else torch.nan)
    assert outputs(engine) == expected[name]


@pytest.mark.covers("F217")
@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_read_and_write_packed_rows(models, expected, name, recorder):
    sizes = dict(num_blocks=8, max_num_batched_tokens=10)
    engine = make_engine(models[name], "fastattn", runner=recorder, **sizes, **PACKED)
    assert outputs(engine) == expected[name]
    assert engine.counters.preemptions > 0
    assert {shape.queries > 1 for shape in recorder._steps} == {False, True}


def test_what_packed_rows_do_not_have_is_refused(models, device):
    deepseek = models["deepseek_v32"]
    with pytest.raises(NotImplementedError, match=r"^kv_cache_dtype: the engine keeps no pages in the packed rows of"):
        make_engine(make_llama(device), **PACKED)
    few = make_family("deepseek_v32", device, **INDEX_SIZES)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: .* fp8_ds_mla .* a multiple of 128 .*, got 24$"):
        make_engine(few, **PACKED)
    with pytest.raises(ValueError, match="^calibration: expected None, as a write finds the scales of fp8_ds_mla"):
        make_engine(deepseek, **PACKED, calibration=calibrate(deepseek, PROMPTS[:1]))
    with pytest.raises(ValueError, match=r"^calculate_kv_scales: .* got True and kv_cache_dtype='fp8_ds_mla'"):
        make_engine(deepseek, **PACKED, calculate_kv_scales=True)
    with pytest.raises(NotImplementedError, match=r"no latents in a pool of int8, only of .*, fp8_e5m2, fp8_ds_mla$"):
        make_engine(deepseek, kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="max_branches=1, as Causal over SelectedLatents has no plan for trees"):
        make_engine(deepseek, **PACKED, speculation=NGram(max_drafts=3, max_branches=2))
