"""Fused layers compute what a model's own code does, alone and in the engine, and leave alone what they do not know."""

import copy
import logging
from functools import wraps

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama import modeling_llama

pytest.importorskip("triton", reason="Triton comes for Linux only")

from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.engines import make_engine, outputs
from tests.helpers.tiny_models import CHANGES, make_family
from twinattn.engine import CudaGraphs, NGram, SamplingParams, fuse, fused, unfuse
from twinattn.engine.kernels import fused_layers

TOKENS = torch.tensor([[3, 14], [27, 18]])
PROMPTS, FEW = [[3, 14, 3], [27]], SamplingParams(max_tokens=2)
FAMILIES = {  # by `config.model_type`, with what the tiny model of a family has besides
    "cwm": {},
    "llama": dict(attention_bias=True, mlp_bias=True),
    "ministral": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "smollm3": dict(no_rope_layers=[1, 0]),
}
ALL = ["model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp", "model.norm"]  # the modules of one layer


def tiny(family, device, **changes):
    return make_family(family, device, **CHANGES.get(family, {}) | FAMILIES[family] | changes)


@pytest.fixture
def llama(device):
    """A model of one layer."""
    return make_family("llama", device, num_hidden_layers=1)


@torch.no_grad()
def logits(model, **options):
    return model(TOKENS.to(model.device), use_cache=False, **options).logits


def assert_same(out, expected):
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5 * float(expected.std()))


def fused_parts(model):
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), fused._Fused)]


@pytest.fixture
def calls(monkeypatch):
    """List what the kernels are called for."""
    calls = []

    def counted(name, function):
        return lambda *args: (calls.append(name), function(*args))[1]

    for name in ("rms_norm", "qk_norm_rope", "silu_mul"):
        monkeypatch.setattr(fused_layers, name, counted(name, getattr(fused_layers, name)))
    return calls


# What is fused.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_and_the_tokens_of_its_own_code(family, device, calls):
    model = tiny(family, device)
    expected, tokens = logits(model), outputs(make_engine(model, "fastattn"), PROMPTS, FEW)
    model.set_attn_implementation("sdpa")
    assert fuse(model) is model
    calls.clear()
    assert_same(logits(model), expected)
    layer = ["qk_norm_rope", "rms_norm", *["silu_mul"] * (family != "qwen3_moe"), "rms_norm"]
    assert calls == ["rms_norm", *layer * 2], "a layer norms for the next one, and the last one for the last norm"
    assert outputs(make_engine(model, "fastattn"), PROMPTS, FEW) == tokens


def test_it_can_be_undone(llama, calls):
    expected = logits(llama)
    assert fused_parts(fuse(llama)) == ALL
    assert fused_parts(fuse(llama)) == ALL, "once more is no other"
    assert unfuse(llama) is llama and not fused_parts(llama)
    calls.clear()
    assert_same(logits(llama), expected)
    assert not calls


def test_the_engine_has_all_it_had(device):
    """Windows, trees of drafts, quantized pools, CUDA graphs on a GPU: attention is called with what it needs."""
    model = tiny("qwen3", device)
    options = dict(speculation=NGram(max_branches=2), kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=5)
    options |= dict(max_num_seqs=2)
    expected = outputs(make_engine(model, "fastattn", runner=CudaGraphs(), **options), PROMPTS, FEW)
    engine = make_engine(fuse(model), "fastattn", runner=CudaGraphs(), **options)
    assert outputs(engine, PROMPTS, FEW) == expected
    assert engine.window_pools and len(fused_parts(model)) == 7


def test_half_precision_is_rounded_in_the_same_places(llama):
    expected = logits(llama.half())
    out = logits(fuse(llama))
    torch.testing.assert_close(out, expected, rtol=0, atol=0.01 * float(expected.float().std()))
    if llama.device.type == "cpu":  # a packed product may be added up in another order on a GPU
        assert (out != expected).float().mean() < 0.1


def test_a_cache_hidden_states_and_attention_weights_are_those_of_the_own_code(device):
    """Hooks that transformers puts on layers and attentions see what they saw."""
    model = tiny("qwen3", device)
    ids, options = TOKENS.to(device), dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    wants = dict(output_hidden_states=True, output_attentions=True)

    @torch.inference_mode()
    def results():
        out = model(ids, use_cache=False, **wants)
        return model.generate(ids, **options), [*out.hidden_states, *out.attentions]

    tokens, tensors = results()
    fuse(model)
    again, fused_tensors = results()
    assert torch.equal(again, tokens) and len(tensors) == len(fused_tensors) == 5
    for out, expected in zip(fused_tensors, tensors, strict=True):
        assert_same(out, expected)


# Weights.


def test_weights_are_packed_but_not_doubled(llama, tmp_path):
    expected, state = logits(llama), copy.deepcopy(llama.state_dict())
    parameters = dict(llama.named_parameters())
    fuse(llama)
    assert all(parameters[name] is weight for name, weight in llama.named_parameters())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in llama.parameters()}
    assert sum(storages.values()) == sum(x.nbytes for x in llama.parameters())
    attention = llama.model.layers[0].self_attn
    assert len({x.weight.untyped_storage().data_ptr() for x in (attention.q_proj, attention.v_proj)}) == 1
    llama.save_pretrained(tmp_path)
    assert_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path).to(llama.device)), expected)
    for name, weight in llama.state_dict().items():
        assert torch.equal(weight, state[name])


def test_weights_may_change_and_move(llama, calls):
    """In place, as an optimizer or `load_state_dict` do; and to other memory, by `half`, `deepcopy` or `assign`."""
    fuse(llama)
    with torch.no_grad():
        llama.model.layers[0].self_attn.k_proj.weight.mul_(-2)
        llama.model.layers[0].mlp.gate_proj.weight.add_(0.3)
    other = copy.deepcopy(llama)
    state = {name: weight.flip(0) for name, weight in llama.state_dict().items()}
    copied = copy.deepcopy(llama)
    copied.load_state_dict(state)
    assigned = copy.deepcopy(llama)
    assigned.load_state_dict({name: weight.clone() for name, weight in state.items()}, assign=True)
    for model in (llama, other, copied, assigned, copy.deepcopy(llama).half()):
        calls.clear()
        out = logits(model)
        assert calls == ["rms_norm", "qk_norm_rope", "rms_norm", "silu_mul", "rms_norm"]
        assert_same(out.float(), logits(unfuse(model)).float())
    assert float((logits(llama) - logits(copied)).abs().max()) > 0.1


# Where the kernels may not compute, the model's own code does.


def test_gradients_are_those_of_the_own_code(llama, calls):
    llama.train(False)

    def gradients():
        llama.zero_grad()
        llama(TOKENS.to(llama.device), labels=TOKENS.to(llama.device)).loss.backward()
        return [x.grad.clone() for x in llama.parameters()]

    expected = gradients()
    fuse(llama)
    calls.clear()
    for out, gradient in zip(gradients(), expected, strict=True):
        assert_same(out, gradient)
    assert not calls


def test_training_and_autocast_have_the_own_code(llama, calls):
    expected = logits(llama)
    fuse(llama)
    calls.clear()
    with torch.autocast(llama.device.type, torch.bfloat16):
        logits(llama)
    assert_same(logits(llama.train()), expected)
    assert not calls


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_called(when, llama, calls):
    """On submodules whose own code would be skipped, and on those whose code is called."""
    layer, seen = llama.model.layers[0], []
    hooked = [layer.self_attn.q_proj, layer.mlp.act_fn, layer.post_attention_layernorm, layer.mlp, llama.model.norm]
    if when == "after":
        fuse(llama)
    for module in hooked:
        module.register_forward_hook(lambda module, args, out: (seen.append(module), 2 * out)[1])
    if when == "before":
        fuse(llama)
        assert fused_parts(llama) == ["model.norm"]
    calls.clear()
    out = logits(llama)
    assert {*seen} == {*hooked} and calls == ["rms_norm"]
    assert_same(out, logits(unfuse(llama)))


def test_a_layer_takes_what_it_is_given(device):
    """What a layer has normed for the next one is not used if its output is changed in between."""
    model = fuse(tiny("llama", device))
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: out.add_(1))
    changed = logits(model)
    assert_same(changed, logits(unfuse(model)))
    hook.remove()
    assert float((changed - logits(model)).abs().max()) > 0.1


class Lora(nn.Linear):
    """A linear layer that adds something of its own, and is one by its class and its weight."""

    def forward(self, x):
        return super().forward(x) + x.mean(-1, keepdim=True)


def add_lora(model):
    linear = model.model.layers[0].self_attn.v_proj
    other = Lora(linear.in_features, linear.out_features, bias=False)
    other.weight = linear.weight
    model.model.layers[0].self_attn.v_proj = other


class Quantized(torch.Tensor):
    """A weight that is multiplied in its own way."""


def quantize(model):
    linear = model.model.layers[0].mlp.gate_proj
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Quantized), requires_grad=False)


def parametrize(model):
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def tie(model):
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight


def replace_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def add_a_bias(model):
    linear = model.model.layers[0].mlp.up_proj
    linear.bias = nn.Parameter(torch.ones(linear.out_features, device=linear.weight.device))


def take_gelu(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


CHANGED = {  # what is changed, and the part that is left alone
    add_lora: "self_attn",
    quantize: "mlp",
    parametrize: "mlp",
    tie: "self_attn",
    replace_forward: "mlp",
    add_a_bias: "mlp",
    take_gelu: "mlp",
}


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_what_is_not_plain_is_left_alone(change, llama, caplog):
    name = f"model.layers.0.{CHANGED[change]}"
    change(llama)
    expected = logits(llama)
    with caplog.at_level(logging.WARNING):
        fuse(llama)
    assert fused_parts(llama) == [part for part in ALL if part != name]
    assert f"1 of 4 parts are not fused, {name}" in caplog.text
    assert_same(logits(llama), expected)
    if change is tie:
        attention = llama.model.layers[0].self_attn
        assert attention.v_proj.weight is attention.k_proj.weight


def test_norms_of_different_eps_are_left_alone(device):
    """One launch norms queries and keys; over random tokens the difference does not show."""
    model = tiny("qwen3", device)
    model.model.layers[0].self_attn.q_norm.variance_epsilon *= 2
    assert "model.layers.0.self_attn" not in fused_parts(fuse(model))


@pytest.mark.parametrize("change", [add_lora, take_gelu, replace_forward], ids=lambda change: change.__name__)
def test_what_is_replaced_later_is_called(change, llama):
    fuse(llama)
    change(llama)
    assert_same(logits(llama), logits(unfuse(llama)))


# A part proves itself.


def another_mlp(monkeypatch):
    own = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: own(self, x) + 0.1 * x)


def another_rotation_of_keys(monkeypatch):
    own = modeling_llama.apply_rotary_pos_emb

    def rotate(query, key, cos, sin):
        return own(query, key, cos, sin)[0], own(query, key, cos, -sin)[1]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)


def another_residual(monkeypatch):
    own = modeling_llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(
        modeling_llama.LlamaDecoderLayer, "forward", lambda self, x, **given: own(self, x, **given) + 0.1 * x
    )


def another_norm(monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x * self.weight)


def another_key_in_the_cache(monkeypatch):
    """Without a cache, it computes what it did."""
    own = modeling_llama.LlamaAttention.forward

    @wraps(own)
    def forward(self, hidden_states, **given):
        has_cache = any(given.get(name) is not None for name in fused.CACHES)
        return own(self, 2 * hidden_states if has_cache else hidden_states, **given)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


def another_name_of_the_cache(monkeypatch):
    own = modeling_llama.LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, store=None, **others):
        return own(self, hidden_states, position_embeddings, attention_mask, **others)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


PLANTED = {
    another_mlp: ["mlp"],
    another_rotation_of_keys: ["self_attn"],
    another_key_in_the_cache: ["self_attn"],
    another_name_of_the_cache: ["self_attn"],
    another_residual: [""],
    another_norm: ["", "norm"],
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_code_of_another_version_is_left_alone(plant, llama, monkeypatch):
    plant(monkeypatch)
    expected = logits(llama)
    fuse(llama)
    left = {"model.norm" if part == "norm" else f"model.layers.0.{part}".rstrip(".") for part in PLANTED[plant]}
    assert {*ALL} - {*fused_parts(llama)} == left
    assert_same(logits(llama), expected)


def test_what_a_family_passes_to_attention_is_passed(device, monkeypatch):
    """Here one option more than any family has."""
    given = []
    functions, own = modeling_llama.ALL_ATTENTION_FUNCTIONS, modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(functions, "sdpa", lambda *args, **options: (given.append(options), own(*args, **options))[1])
    model = fuse(tiny("mistral", device))
    model.set_attn_implementation("sdpa")
    logits(model, cu_seq_lens_q="anything")
    options = dict(dropout=0.0, scaling=0.25, sliding_window=5, cu_seq_lens_q="anything")
    assert all(options.items() <= passed.items() for passed in given) and len(given) == 2
    assert fused.PROBE not in functions


@pytest.mark.parametrize("name", fused.CACHES)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@torch.no_grad()
def test_a_cache_by_either_name_is_updated_and_read(name, llama):
    """That of this version of transformers, and of the one before or after it, which the class knows or does not."""
    attention, x = llama.model.layers[0].self_attn, torch.randn(1, 4, llama.config.hidden_size, device=llama.device)
    places = torch.arange(4, device=llama.device)[None]

    def decode():
        cache = DynamicCache(config=llama.config)
        for new in (slice(0, 3), slice(3, 4)):
            angles = llama.model.rotary_emb(x, places[:, new])
            out, _ = attention(x[:, new], position_embeddings=angles, attention_mask=None, **{name: cache})
        return out, cache.get_seq_length()

    expected, length = decode()
    fuse(llama)
    out, again = decode()
    assert_same(out, expected)
    assert again == length


# What is refused.


def test_a_device_or_a_type_without_kernels(llama, monkeypatch):
    with pytest.raises(NotImplementedError, match=r"fuse: triton computes .*, not torch.float64"):
        fuse(llama.double())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fused._unsupported.cache_clear()
    with pytest.raises(NotImplementedError, match="fuse: triton computes on CUDA, the tensors are on cpu"):
        fuse(llama.cpu().float())
    fused._unsupported.cache_clear()


def test_a_model_without_such_layers(device):
    for family in ("gemma", "gpt2", "qwen3_next"):
        with pytest.raises(ValueError, match="model: expected one with layers of Cwm, .*: it has no such layer"):
            fuse(make_family(family, device))


def test_a_model_in_training(llama):
    with pytest.raises(ValueError, match=r"in training; call model.eval\(\) first"):
        fuse(llama.train())
