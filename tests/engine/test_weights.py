"""Weights that change under an engine: nothing that was computed from others is used any more."""

import pytest
import torch

import twinattn.engine.cuda_graphs
from tests.helpers.engines import MODELS, TWINS, Watched, assert_nothing_is_held, make_engine, outputs
from tests.helpers.state_engines import make_hybrid
from tests.helpers.tiny_models import make_llama, make_model
from twinattn.engine import DraftModel, SamplingParams, pack
from twinattn.engine.weights import Weights

PROMPT = list(range(5, 30))
GREEDY = SamplingParams(max_tokens=6, stop_token_ids=())


def shake(model):
    """Change all weights where they are, as a step of training does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(weight))


def load(model):
    model.load_state_dict({name: weight.roll(1, 0) for name, weight in model.state_dict().items()})


def assign(model):
    model.load_state_dict({name: weight.roll(1, 0) for name, weight in model.state_dict().items()}, assign=True)


def replace_a_weight(model):
    linear = model.model.layers[0].self_attn.k_proj
    linear.weight = torch.nn.Parameter(linear.weight.flip(0))


def replace_its_memory(model):
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data.flip(0)


def replace_a_module(model):
    old = model.model.layers[0].self_attn.v_proj
    model.model.layers[0].self_attn.v_proj = torch.nn.Linear(*old.weight.shape[::-1], bias=False)


CHANGES = [shake, load, assign, replace_a_weight, replace_its_memory, replace_a_module]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_cached_prefixes_do_not_outlive_the_weights(change):
    model = make_llama()
    engine = make_engine(model, "fastattn")
    before = outputs(engine, [PROMPT], GREEDY)
    assert outputs(engine, [PROMPT], GREEDY) == before and engine.counters.cached_tokens == 24
    change(model)
    after = outputs(engine, [PROMPT], GREEDY)
    assert engine.counters.cached_tokens == 24 and after != before
    assert after == outputs(make_engine(model), [PROMPT], GREEDY)
    assert outputs(engine, [PROMPT], GREEDY) == after and engine.counters.cached_tokens == 48
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["window", "latents", "states"])
def test_neither_do_window_pools_latents_and_states(kind):
    model = make_hybrid("qwen3_next", "cpu") if kind == "states" else make_model(*MODELS[kind], "cpu")
    engine = make_engine(model, "fastattn", max_num_seqs=2)
    outputs(engine, [PROMPT, PROMPT[:9]], GREEDY)
    shake(model)
    assert outputs(engine, [PROMPT], GREEDY) == outputs(
        make_engine(model, "fastattn", max_num_seqs=2), [PROMPT], GREEDY
    )


def test_a_request_that_runs_is_computed_again():
    """It keeps the tokens that it has, and the next ones are those of the weights that are there."""
    model = make_llama()
    engine = make_engine(model)
    request = engine.add(PROMPT, GREEDY)
    while request.num_outputs < 3:
        engine.step()
    shake(model)
    while request.status != "finished":
        engine.step()
    (rest,) = outputs(make_engine(model), [request.tokens[:-3]], SamplingParams(max_tokens=3, stop_token_ids=()))
    assert request.output_ids[3:] == rest
    assert_nothing_is_held(engine)


def test_scales_of_the_first_step_are_worked_out_anew():
    model = make_llama()
    engine = make_engine(model, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True)
    outputs(engine, [PROMPT], GREEDY)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(5)
    before = [layer.storage.value_scale.clone() for layer in engine.layers]
    assert outputs(engine, [PROMPT], GREEDY) == outputs(
        make_engine(model, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True), [PROMPT], GREEDY
    )
    assert all((layer.storage.value_scale > 2 * old).all() for layer, old in zip(engine.layers, before, strict=True))


def test_a_draft_model_and_packed_weights_follow():
    model, small = pack(make_llama()), make_llama(num_hidden_layers=1)
    engine = make_engine(model, "fastattn", speculation=DraftModel(make_engine(small, "fastattn")))
    outputs(engine, [PROMPT], GREEDY)
    shake(model)
    shake(small)
    fresh = make_engine(model, "fastattn", speculation=DraftModel(make_engine(small, "fastattn")))
    accepted = engine.counters.accepted_tokens
    assert outputs(engine, [PROMPT], GREEDY) == outputs(fresh, [PROMPT], GREEDY)
    assert engine.counters.accepted_tokens - accepted == fresh.counters.accepted_tokens


@pytest.fixture
def captured(monkeypatch):
    """Write down which decodes are captured; on a CPU a capture is the step itself, run again."""
    names = []

    def record(step, runner, name):
        names.append(name)
        return step

    monkeypatch.setattr(twinattn.engine.cuda_graphs, "_record", record)
    monkeypatch.setattr(twinattn.engine.CudaGraphs, "_is_worth_recording", lambda *_: False)
    return names


@pytest.mark.core
@pytest.mark.parametrize("change", [shake, assign], ids=["in place", "elsewhere"])
def test_captured_steps_are_captured_anew_where_weights_have_moved(change, captured):
    """A graph reads weights where they were: those that were written to are there, and others are not."""
    model = make_llama()
    engine = make_engine(model, "fastattn", runner=Watched("cpu"))
    outputs(engine, [PROMPT], GREEDY)
    count = len(captured)
    change(model)
    assert outputs(engine, [PROMPT], GREEDY) == outputs(make_engine(model), [PROMPT], GREEDY)
    assert len(captured) == count * (1 + (change is assign)) > 0


@pytest.mark.core
def test_a_weight_that_moves_while_others_are_written_to_is_seen(captured):
    model = make_llama()
    engine = make_engine(model, "fastattn", runner=Watched("cpu"))
    request = engine.add(PROMPT, GREEDY)
    while request.num_outputs < 3:
        engine.step()
    count = len(captured)
    replace_a_weight(model)
    shake(model)
    while request.status != "finished":
        engine.step()
    assert len(captured) == 2 * count > 0
    assert_nothing_is_held(engine)


def test_what_leaves_no_trace_is_forgotten_by_hand():
    model = make_llama()
    engine = make_engine(model)
    outputs(engine, [PROMPT], GREEDY)
    for weight in model.parameters():
        weight.data.mul_(-1.5)
    outputs(engine, [PROMPT], GREEDY)
    assert engine.counters.cached_tokens == 24
    engine.forget()
    assert outputs(engine, [PROMPT], GREEDY) == outputs(make_engine(model), [PROMPT], GREEDY)
    assert engine.counters.cached_tokens == 24


@pytest.mark.parametrize("twin", TWINS)
def test_what_a_model_changes_itself_is_no_weight(twin):
    """Such as frequencies of rotary positions, which are buffers that no checkpoint has."""
    model = make_llama()
    weights, engine = Weights(model), make_engine(model, twin)
    outputs(engine, [PROMPT], GREEDY)
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq.clone(), persistent=False)
    assert not weights.were_written() and not weights.were_moved()
    with torch.inference_mode():
        made_there = make_llama()
    assert not Weights(made_there).were_written()
