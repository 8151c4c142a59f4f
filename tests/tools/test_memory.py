"""What a model keeps for each token, computed in the page from its config.json, is what the engine's pools take."""

import json
from pathlib import Path

import pytest
from py_mini_racer import MiniRacer

from tests.helpers.tiny_models import SHARED_CACHES, make_family, make_llama
from twinattn.engine import Engine
from twinattn.engine.kv_cache_dtype import FOUR_BITS

LOGIC = (Path(__file__).parent.parent.parent / "docs/explorer/memory.js").read_text()
DTYPES = {"fp8": "fp8_e4m3", "bfloat16": "auto", "int4": "int4", "nvfp4": "nvfp4"}


@pytest.fixture(scope="module")
def memory():
    with MiniRacer() as racer:
        racer.eval(LOGIC)

        def call(function, *given):
            arguments = ", ".join(json.dumps(each) for each in given)
            return json.loads(racer.eval(f"JSON.stringify(memory.{function}({arguments}))"))

        yield call


def config_of(model):
    return json.loads(model.config.to_json_string(use_diff=False))


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gpt2", "gemma3n_text"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_are_those_of_the_engine(memory, family, dtype):
    model = make_family(family, **(SHARED_CACHES if family == "gemma3n_text" else {})).bfloat16()
    sizes = dict(num_blocks=64, block_size=4, max_num_batched_tokens=16, max_num_seqs=3)
    calibration = dict(calculate_kv_scales=True) if dtype == "fp8" else {}
    refusal = memory("refusal", config_of(model), dtype)
    if refusal:
        with pytest.raises((NotImplementedError, ValueError), match="^kv_cache_dtype: .*(no latents|no multiple of)"):
            Engine(model, kv_cache_dtype=DTYPES[dtype], **sizes)
        assert refusal.startswith(f"{dtype}: ") and dtype in FOUR_BITS
        return
    engine = Engine(model, kv_cache_dtype=DTYPES[dtype], **sizes, **calibration)
    given = dict(blocks=64, block=4, maxTokens=16, maxSeqs=3, dtype=dtype)
    scales = sum(x.nbytes for layer in engine.layers for x in layer.fixed_scales)
    assert memory("poolBytes", config_of(model), given) == engine.pool_bytes - scales


def test_what_a_model_has_no_cache_of_is_refused(memory):
    config = dict(num_hidden_layers=2, num_attention_heads=4, head_dim=40)
    refused = {dtype: memory("refusal", config, dtype) for dtype in ("fp8", "int8", "int4", "nvfp4")}
    assert refused == dict(fp8="", int8="", int4="", nvfp4="nvfp4: heads have 40 elements, no multiple of 16")
    assert memory("refusal", config | dict(head_dim=33), "int4") == "int4: heads have 33 elements, no multiple of 2"
    latents = config | dict(kv_lora_rank=512, qk_rope_head_dim=64)
    refused = [memory("refusal", latents, dtype) for dtype in ("bfloat16", "fp8", "int8", "int4", "nvfp4")]
    assert refused == ["", "", *(f"{dtype}: there is none for latents" for dtype in ("int8", "int4", "nvfp4"))]


def test_int8_has_a_scale_per_key(memory):
    sizes = dict(blocks=8, block=4, maxTokens=16, maxSeqs=3, dtype="int8")
    model = make_llama()
    layers, tokens, heads = model.config.num_hidden_layers, 8 * 4, model.config.num_key_value_heads
    assert memory("poolBytes", config_of(model), sizes) == layers * tokens * heads * (2 * 16 + 4)


def test_a_conversation_of_llama_3_is_that_of_the_notebooks(memory):
    config = dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    found = memory("conversation", config, dict(tokens=8192, dtype="bfloat16"))
    assert found == dict(kept=8192 * 2 * 32 * 8 * 128 * 2, read=8192 * 2 * 32 * 8 * 128 * 2)


def test_a_window_bounds_what_is_kept_and_read(memory):
    config = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, sliding_window=100)
    config["layer_types"] = ["sliding_attention", "full_attention"]
    short, long, longer = (memory("conversation", config, dict(tokens=n, dtype="fp8")) for n in (64, 10_000, 20_000))
    per_token = 2 * 4 * 16
    assert short["read"] == 2 * 64 * per_token
    assert longer["read"] - long["read"] == 10_000 * per_token, "the window reads no more"
    assert long["read"] == (10_000 + 100) * per_token
    assert 100 * per_token <= long["kept"] - 10_000 * per_token <= (100 + 2 * 16) * per_token


def test_a_step_of_notebook_1(memory):
    """The same numbers: 64 requests of 2048 tokens on a GPU of 3.35 TB per second."""
    config = dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    how = dict(gpu="NVIDIA H100 SXM", tokens=2048, dtype="bfloat16", batch=64, parameters=8.03)
    found = memory("fit", config, how)
    assert round(1000 * found["seconds"], 1) == 9.9 and round(found["perSecond"]) == 6450
    assert found["fits"] == int((0.9 * 80e9 - 16.06e9) // (2048 * 131072))
    assert memory("fit", config, how | dict(parameters=80))["fits"] == 0


def test_experts_are_read_as_they_are_used(memory):
    config = dict(num_hidden_layers=1, num_attention_heads=1, head_dim=64)
    how = dict(gpu="NVIDIA H200", tokens=1, dtype="bfloat16", parameters=10, active=2)
    read = [memory("fit", config, how | dict(batch=batch))["of_weights"] for batch in (1, 2, 100)]
    assert read == [4e9, 8e9, 20e9]
