"""The caller of vLLM's backends over doubles of vLLM's classes, with our backend in the place of one of vLLM's.

`make vllm-test` and `make vllm-gpu-test` make the same calls inside vLLM (`tests/integrations/vllm_kit.py`).
"""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from refattn import chunked_prefill, quantized
from refattn.scales import Fp8Scales
from tests.helpers import vllm_doubles
from tests.helpers.tolerance import assert_matches_reference
from twinattn.kit import HARMLESS, Case, build, plan_and_attend
from twinattn.kit.check import check
from twinattn.kit.finding import FAILED
from twinattn.libraries import vllm_backends

CASE = Case("mixed", ((4, 20), (1, 33), (10, 17)), heads=(4, 2), head_size=32, padding_rows=3)
OPTIONS = [
    {},
    dict(softcap=5.0, window_size=(6, 0)),
    dict(alibi_slopes=torch.tensor([0.5, 0.25, 1.0, 0.1]), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


class Attention(torch.nn.Module):
    """A layer, with what vLLM's has: an implementation by the backend, scales, and a cache's specification."""

    query_quant = None

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, *, cache_config, logits_soft_cap, **more
    ):
        super().__init__()
        self.attn_backend, window = more.pop("attn_backend"), more.pop("per_layer_sliding_window")
        assert more.pop("prefix") == vllm_backends.LAYER
        given = num_heads, head_size, scale, num_kv_heads, alibi_slopes, window
        self.impl = self.attn_backend.get_impl_cls()(*given, cache_config.cache_dtype, logits_soft_cap, **more)
        self.cache_config = cache_config
        for name in "qkv":
            self.register_buffer(f"_{name}_scale", torch.tensor(1.0))

    def get_kv_cache_spec(self, config):
        return SimpleNamespace(block_size=self.cache_config.block_size)


class EngineArgs:
    """The arguments of a server, of which these make a configuration."""

    made = 0

    def __init__(self, *, dtype, block_size, kv_cache_dtype, **more):
        EngineArgs.made += 1
        assert more["skip_tokenizer_init"] and more["enforce_eager"] and more["max_model_len"] == vllm_backends.LONGEST
        self.dtype, self.cache = dtype, SimpleNamespace(block_size=block_size, cache_dtype=kv_cache_dtype)

    def create_engine_config(self):
        compiled, model = SimpleNamespace(static_forward_context={}), SimpleNamespace(dtype=getattr(torch, self.dtype))
        return SimpleNamespace(cache_config=self.cache, compilation_config=compiled, model_config=model)


@pytest.fixture
def vllm(monkeypatch):
    """Put doubles where vLLM's modules are, with our backend under its name."""
    ours = vllm_doubles.install(monkeypatch)
    parts = {
        "vllm.config": dict(set_current_vllm_config=lambda config: nullcontext()),
        "vllm.engine.arg_utils": dict(EngineArgs=EngineArgs),
        "vllm.model_executor.layers.attention": dict(Attention=Attention),
        "vllm.v1.attention.backends.registry": dict(
            AttentionBackendEnum={"FASTATTN": SimpleNamespace(get_class=lambda: ours.FastAttentionBackend)}
        ),
        "vllm.v1.kv_cache_layout": dict(
            KVCacheLayout=SimpleNamespace(LBNHC=SimpleNamespace(layer_view_order=(0, 2, 1, 3)))
        ),
    }
    for name, members in parts.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_doubles.AttentionImplBase, "supports_quant_query_input", False, raising=False)
    monkeypatch.setattr(
        ours.FastAttentionBackend, "supported_kv_cache_layouts", classmethod(lambda cls: None), raising=False
    )
    monkeypatch.setattr(ours, "register", lambda: None)
    monkeypatch.setattr(vllm_backends, "available", lambda: None)
    vllm_backends._config.cache_clear()
    yield ours
    vllm_backends._config.cache_clear()


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "alibi and sinks"])
def test_a_layer_is_that_of_the_options(vllm, options):
    inputs = build(CASE, poison=HARMLESS)
    out = vllm_backends.prepare(*inputs.tensors, **options, softmax_scale=0.2, backend="FASTATTN")()
    assert not out[inputs.batch.num_tokens :].any(), "padding is not written"
    rows = slice(0, inputs.batch.num_tokens)

    def attend(*tensors, **more):
        return plan_and_attend(chunked_prefill, *tensors, **more)

    arguments, fixed = (inputs.query[rows], *inputs.tensors[1:]), dict(softmax_scale=0.2, **options)
    lse = attend(*arguments, **fixed, return_lse=True)[1]
    assert_matches_reference(out[rows], lse, attend, *arguments, **fixed)


def test_an_fp8_pool_is_laid_down_as_it_is(vllm):
    inputs, scales = build(CASE, poison=HARMLESS), Fp8Scales(0.37, 2.3)
    pools = [x.clamp(-400, 400).to(torch.float8_e4m3fn) for x in (inputs.key_cache, inputs.value_cache)]
    given = inputs.query[: inputs.batch.num_tokens], *pools, inputs.batch

    def attend(*tensors, **more):
        return plan_and_attend(quantized, *tensors, **more)

    out = vllm_backends.prepare(*given, scales=scales, backend="FASTATTN")()
    lse = attend(*given, scales=scales, return_lse=True)[1]
    assert_matches_reference(out, lse, attend, *given, scales=scales)
    for other, message in (
        (Fp8Scales(torch.ones(2), 1.0), "one number for all its keys"),
        (Fp8Scales(1.0, 1.0, 1.0), "queries in fp8: False for this backend, asked for True"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            vllm_backends.prepare(*given, scales=other, backend="FASTATTN")


def test_what_no_layer_of_vllm_has_is_refused(vllm, monkeypatch):
    inputs = build(CASE, poison=HARMLESS)
    with pytest.raises(NotImplementedError, match="a window to the left alone"):
        vllm_backends.prepare(*inputs.tensors, window_size=(3, 1), backend="FASTATTN")
    monkeypatch.setattr(vllm.FastAttentionBackend, "supports_head_size", classmethod(lambda cls, size: size != 32))
    with pytest.raises(NotImplementedError, match="vLLM refuses: head_size not supported"):
        vllm_backends.prepare(*inputs.tensors, backend="FASTATTN")


def test_a_configuration_is_made_once_for_its_sizes(vllm):
    inputs, before = build(CASE, poison=HARMLESS), EngineArgs.made
    for _ in range(2):
        vllm_backends.prepare(*inputs.tensors, backend="FASTATTN")
    assert EngineArgs.made == before + 1


@pytest.mark.parametrize("name", ["vllm-fastattn", "vllm-fastattn-fp8"])
def test_the_kit_calls_it(vllm, name):
    report = check(name, examples=3, only=("call", "answer", "window", "tail", "padding"))
    outcomes = {x.property: x.outcome for x in report.findings}
    assert not set(outcomes.values()) & set(FAILED) and outcomes["answer"] == "honoured", outcomes
