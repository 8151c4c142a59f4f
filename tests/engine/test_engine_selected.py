"""Layers that select keys in the engine: a pool of index keys beside the latents, with the same blocks and slots.

`test_engine_models.py` compares the logits of every family. Here a prompt is several times as long as what a query may
see, so that most keys are not selected, and each mistake at the end changes the answers.
"""

import pytest
import torch
from transformers import DynamicCache

from tests.helpers import engines
from tests.helpers.drafts import Chains
from tests.helpers.engines import SYSTEM, TWINS, UNSTOPPED, assert_answers_twice, make_engine, transformers_outputs
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import INDEX_SIZES, make_family
from twinattn.engine import NGram, calibrate, index_modules
from twinattn.engine.layers import Causal, Layer
from twinattn.engine.storages import SelectedLatentStorage

RANK, ROPE, INDEX = (INDEX_SIZES[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"))
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 8, [*SYSTEM, 50], list(range(60, 84))]
NO_EXPERTS = INDEX_SIZES | dict(first_k_dense_replace=3, eos_token_id=None)  # experts could not be captured
MODELS = {
    "deepseek_v32": NO_EXPERTS,
    "glm_moe_dsa": NO_EXPERTS | dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
}


@pytest.fixture(scope="module")
def models(device):
    """Models, and their answers by transformers' own code."""
    made = {name: make_family(name, device, **changes) for name, changes in MODELS.items()}
    return {name: (model, transformers_outputs(model, PROMPTS, attention="eager")) for name, model in made.items()}


@pytest.fixture(scope="module")
def deepseek(models):
    return models["deepseek_v32"][0]


@pytest.fixture(scope="module")
def expected(models):
    return models["deepseek_v32"][1]


def outputs(engine, prompts=PROMPTS):
    return engines.outputs(engine, prompts, UNSTOPPED)


def test_what_is_selected_decides(expected, device):
    """Else nothing here would show that it is right. With a topk past every length, attention is dense."""
    model = make_family("deepseek_v32", device, **NO_EXPERTS | dict(index_topk=100))
    some, every = expected, transformers_outputs(model, PROMPTS, attention="eager")
    assert outputs(make_engine(model, "fastattn")) == every
    assert sum(a != b for a, b in zip(some, every, strict=True)) >= 3
    assert len(set(map(tuple, some))) == len(PROMPTS)


SCHEDULES = {
    "short steps": dict(max_num_batched_tokens=9, max_num_seqs=3, batch_invariant=True),
    "smallest pool": dict(num_blocks=8, max_num_batched_tokens=13),
    "odd blocks, drafts": dict(block_size=7, num_blocks=12, speculation=Chains(4)),
}


@pytest.mark.covers("F216")
@pytest.mark.parametrize(("name", "schedule", "twin"), every_pair(MODELS, SCHEDULES, TWINS))
def test_greedy_is_generate(models, name, twin, schedule):
    """Prompts in chunks, preemptions, rejected drafts, and shared prefixes the second time."""
    model, expected = models[name]
    engine = make_engine(model, twin, **SCHEDULES[schedule])
    assert_answers_twice(engine, PROMPTS, expected, UNSTOPPED)
    counters = engine.counters
    assert counters.preemptions or schedule != "smallest pool"
    assert counters.drafted_tokens > counters.accepted_tokens or "drafts" not in schedule


def test_a_layer_keeps_latents_and_index_keys(models):
    """Those that see what another has selected have no index keys."""
    engine = make_engine(models["glm_moe_dsa"][0], num_blocks=20)
    full, shared = (Layer(Causal(), SelectedLatentStorage(RANK, ROPE, topk=5, index_size=size)) for size in (INDEX, 0))
    assert engine.layers == [full, shared, full]
    of_latents, of_keys = (20, 4, RANK + ROPE), (20, 4, INDEX)
    assert [[x.shape for x in cache] for cache in engine.caches] == [
        [of_latents, of_keys],
        [of_latents],
        [of_latents, of_keys],
    ]
    assert engine.pool_bytes == 20 * 4 * sum(layer.storage.bytes_per_token(torch.float32) for layer in engine.layers)


def stable_topk(scores, k, dim):
    best = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk([best.values[..., :k], best.indices[..., :k]])


@pytest.mark.core
def test_of_equal_scores_those_at_lower_positions_are_read(device, monkeypatch):
    """All scores are 0 here, and transformers selects by the same rule if its top-k is a stable sort."""
    model = make_family("deepseek_v32", device, **NO_EXPERTS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.indexer.weights_proj.weight.zero_()
    with monkeypatch.context() as stable:
        stable.setattr(torch.Tensor, "topk", stable_topk)
        expected = transformers_outputs(model, PROMPTS[1:3], attention="eager")
    for twin in TWINS:
        assert outputs(make_engine(model, twin), PROMPTS[1:3]) == expected


def test_over_quantized_latents_keys_are_selected_as_before(deepseek, monkeypatch):
    """Index keys stay in the model's type; a layer's first selection has not been changed by any rounding."""
    calibration, found = calibrate(deepseek, PROMPTS[:2]), {}
    for twin in TWINS:
        for kind in ("auto", "fp8_e4m3"):
            engine = make_engine(
                deepseek, twin, kv_cache_dtype=kind, calibration=None if kind == "auto" else calibration
            )
            dtype = torch.float32 if kind == "auto" else torch.float8_e4m3fn
            assert [[x.dtype for x in cache] for cache in engine.caches] == [[dtype, torch.float32]] * 2
            select, chosen = engine.layer_pools.select, []
            monkeypatch.setattr(
                engine.layer_pools, "select", lambda *a, s=select, c=chosen, **k: (c.append(s(*a, **k)), c[-1])[1]
            )
            answers = outputs(engine, PROMPTS[4:5])
            found[twin, kind] = answers, chosen[0]
    assert all(torch.equal(found[key][1], found["refattn", "auto"][1]) for key in found)
    assert found["refattn", "fp8_e4m3"][0] == found["fastattn", "fp8_e4m3"][0]


@pytest.mark.core
def test_recorded_steps_select(deepseek, expected, recorder):
    """Rows of padding select nothing, and a step serves others of its shape."""
    engine = make_engine(deepseek, "fastattn", runner=recorder, num_blocks=8, max_num_batched_tokens=10)
    assert outputs(engine) == expected
    assert engine.counters.preemptions > 0
    assert {shape.queries > 1 for shape in recorder._steps} == {False, True}


def test_what_selection_does_not_have_is_refused(deepseek):
    with pytest.raises(ValueError, match="max_branches=1, as Causal over SelectedLatents has no plan for trees"):
        make_engine(deepseek, speculation=NGram(max_drafts=3, max_branches=2))
    with pytest.raises(NotImplementedError, match="the engine keeps no latents in a pool of int8"):
        make_engine(deepseek, kv_cache_dtype="int8")


# --- mistakes, and that what is compared above shows them ---

SELECT = SelectedLatentStorage.select


def ignored(storage, twin, tokens, cache, slot_mapping, plan):
    """Every query sees all keys."""
    scores = twin.sparse.scores(tokens.query, tokens.weights * 0, cache[1], plan)
    return twin.sparse.select(scores, scores.shape[1])


def of_another_slot(storage, twin, tokens, cache, slot_mapping, plan):
    """The index key of a token lies where the next one's belongs."""
    return SELECT(storage, twin, tokens, cache, slot_mapping.roll(1), plan)


def left_behind(storage, twin, tokens, cache, slot_mapping, plan):
    """A block that a prefix is found in comes without its index keys."""
    context = int(plan.batch.context_lens.max())
    if context and int(plan.batch.query_lens.max()) > 1:
        cache[1][:] = 0.0
    return SELECT(storage, twin, tokens, cache, slot_mapping, plan)


def of_the_last_query(storage, twin, tokens, cache, slot_mapping, plan):
    """All queries see what the last one has selected, as far as they have it."""
    positions = SELECT(storage, twin, tokens, cache, slot_mapping, plan)
    ends = plan.batch.seq_lens.repeat_interleave(plan.batch.query_lens)[:, None]
    return positions[-1:].where(positions[-1:] < ends, -1)


@pytest.mark.parametrize("mistake", [ignored, of_another_slot, left_behind, of_the_last_query])
def test_a_mistake_is_seen(deepseek, expected, mistake, monkeypatch):
    monkeypatch.setattr(SelectedLatentStorage, "select", mistake)
    engine = make_engine(deepseek, "fastattn", max_num_batched_tokens=9)
    assert outputs(engine, PROMPTS[1:4]) != expected[1:4]


def test_a_cache_that_is_passed_to_an_indexer_is_not_left_out(deepseek, shapes_unchecked):
    indexer, running = deepseek.model.layers[0].self_attn.indexer, lambda: (None, None)
    with pytest.raises(ValueError, match="cache: expected None in the indexer of an engine, got DynamicCache"):
        index_modules._forward(indexer, index_modules.HALVES, running, None, None, None, cache=DynamicCache())
