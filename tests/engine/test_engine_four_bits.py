"""Pages of four bits in the engine: the twins produce the same tokens under every schedule; the size of a token."""

import importlib
import os

import pytest
import torch

import fastattn
import refattn
from tests.helpers.drafts import Oracle
from tests.helpers.engines import first_logits
from tests.helpers.tiny_models import make_family, make_llama
from twinattn.engine import Engine, NGram, SamplingParams, arguments, calibrate
from twinattn.engine.layers import Window
from twinattn.engine.storages import FourBitStorage

SYSTEM = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 5, [*SYSTEM, 50], list(range(60, 85))]
GREEDY = SamplingParams(max_tokens=4, stop_token_ids=())
SIZES = dict(num_blocks=14, block_size=4, max_num_batched_tokens=24)  # prompts in chunks, and shared prefixes
KINDS = ("int4", "nvfp4") if os.environ["TWINATTN_TEST_DEVICE"] == "cpu" else ("int4",)  # a GPU refuses nvfp4
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def models(device):
    return {"llama": make_llama(device), "mistral": make_family("mistral", device)}


def answers(model, package="fastattn", prompts=PROMPTS, **options):
    engine = Engine(model, **SIZES | dict(twin=importlib.import_module(package)) | options)
    requests = engine.generate(prompts, GREEDY)
    assert all(request.error is None for request in requests)
    return [request.output_ids for request in requests], engine


@each_kind
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_twins_answer_alike(models, family, kind):
    """Over full attention and windows; in other words than 16 bits do, or four bits would not be read."""
    (ref, engine), (fast, _) = (
        answers(models[family], package, kv_cache_dtype=kind) for package in ("refattn", "fastattn")
    )
    assert ref == fast
    assert all(isinstance(layer.storage, FourBitStorage) for layer in engine.layers)
    assert any(isinstance(layer.mask, Window) for layer in engine.layers) == (family == "mistral")


@each_kind
def test_drafts_change_no_answer(models, kind):
    """Chains and trees: what is accepted moves to its slots, scales and all."""
    expected, _ = answers(models["llama"], kv_cache_dtype=kind)
    drafts = Oracle(max_drafts=3, max_branches=3)
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    object.__setattr__(drafts, "answers", whole)
    for speculation in (NGram(max_drafts=2), drafts):
        found, engine = answers(models["llama"], kv_cache_dtype=kind, speculation=speculation)
        assert found == expected
    assert engine.counters.drafted_tokens > engine.counters.accepted_tokens > 0


@each_kind
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_a_token_takes_so_many_bytes(models, package, kind):
    """Half a byte per element, and the scales: a float32 per row, or a byte per 16 elements."""
    _, engine = answers(models["llama"], package, kv_cache_dtype=kind)
    storage = engine.layers[0].storage
    of_scales = 4 if kind == "int4" else storage.head_size // 16
    of_a_token = 2 * storage.num_kv_heads * (storage.head_size // 2 + of_scales)
    assert storage.bytes_per_token(torch.float32) == of_a_token
    assert engine.pool_bytes == SIZES["num_blocks"] * SIZES["block_size"] * of_a_token * len(engine.layers)


def test_logits_are_farther_from_those_of_the_model_than_with_8_bits(models, monkeypatch):
    calibration, found, off = calibrate(models["llama"], PROMPTS), {}, {}
    for kind in ("auto", *KINDS, "int8"):
        options = {} if kind in ("auto", "int4") else dict(calibration=calibration)
        engine = Engine(models["llama"], **SIZES, kv_cache_dtype=kind, **options)
        found[kind] = first_logits(engine, PROMPTS[1:], monkeypatch)
        off[kind] = ((found[kind] - found["auto"]).norm() / found["auto"].norm()).item()
    assert off["int8"] > 0 and all(4 * off["int8"] < off[kind] < 1 for kind in KINDS)


def test_what_four_bits_do_not_have_is_refused(models, device):
    model = models["llama"]
    with pytest.raises(ValueError, match=r"^calibration: expected None, as a write finds the scales of int4, got some"):
        answers(model, kv_cache_dtype="int4", calibration=calibrate(model, PROMPTS[:1]))
    with pytest.raises(ValueError, match=r"^calculate_kv_scales: .* got True and kv_cache_dtype='int4'"):
        answers(model, kv_cache_dtype="int4", calculate_kv_scales=True)
    with pytest.raises(ValueError, match="^kv_cache_dtype: expected auto, .*, int4, nvfp4, fp8_ds_mla, got 'int2'"):
        answers(model, kv_cache_dtype="int2")
    latents = make_family("deepseek_v3", device)
    with pytest.raises(NotImplementedError, match=r"^kv_cache_dtype: the engine keeps no latents in a pool of int4$"):
        answers(latents, kv_cache_dtype="int4")


def test_nvfp4_is_refused_where_no_kernel_reads_it(models, device):
    """When the engine is built, not when a request fails; the reference computes it everywhere."""
    message = r"^kv_cache_dtype: fastattn attends to nvfp4 on a CPU alone, not on cuda; int4 has a kernel there$"
    for twin, where, kind in ((fastattn, "cpu", "nvfp4"), (refattn, "cuda", "nvfp4"), (fastattn, "cuda", "int4")):
        arguments.check_cache(kind, None, False, twin, torch.device(where))
    with pytest.raises(NotImplementedError, match=message):
        arguments.check_cache("nvfp4", None, False, fastattn, torch.device("cuda"))
    if device != "cpu":
        with pytest.raises(NotImplementedError, match=message):
            Engine(models["llama"], **SIZES, kv_cache_dtype="nvfp4", twin=fastattn)
