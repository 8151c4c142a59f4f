"""Layers that keep a state in the engine: slots, chunks of prompts, kept states, preemption, drafts, and failures.

`test_engine_models.py` compares the logits of every family. Here answers are those of transformers' own `generate`.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import refattn
import refattn.state_cache
from tests.helpers.engines import SYSTEM, TWINS, transformers_outputs
from tests.helpers.going_on import tokens_of
from tests.helpers.state_engines import (
    GREEDY,
    PROMPTS,
    assert_all_free,
    drafts_of,
    make_engine,
    make_hybrid,
    outputs,
    run,
)
from tests.helpers.tiny_models import STATES, make_family
from twinattn.engine import CudaGraphs, Engine, NGram, SamplingParams, calibrate
from twinattn.engine.block_pool import BlockContent
from twinattn.engine.state_layers import StateLayer
from twinattn.engine.state_pool import StatePool


@pytest.fixture(scope="module")
def qwen(device):
    return make_hybrid("qwen3_next", device)


@pytest.fixture(scope="module")
def expected(qwen):
    answers = transformers_outputs(qwen, PROMPTS, 6, "eager")
    assert len(set(map(tuple, answers))) == len(PROMPTS), "the model should not always say the same"
    return answers


SCHEDULES = {
    "all at once": {},
    "odd blocks, short steps": dict(block_size=3, max_num_batched_tokens=5, max_num_seqs=3, num_kept_states=1),
    "drafts in a small pool": dict(num_blocks=9, max_num_batched_tokens=19, drafts=True),
}


@pytest.mark.covers("R209")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("twin", TWINS)
def test_greedy_is_generate(qwen, expected, twin, schedule):
    """Prompts in chunks beside decodes, preemptions, and the second time what is there of the first."""
    options = dict(SCHEDULES[schedule])
    if options.pop("drafts", False):
        options["speculation"] = drafts_of(PROMPTS, expected)
    engine = make_engine(qwen, twin, **options)
    assert outputs(engine) == expected
    cached = engine.counters.cached_tokens
    assert outputs(engine, PROMPTS[1:]) == expected[1:]
    assert engine.counters.cached_tokens > cached
    assert engine.counters.preemptions or "small" not in schedule


# The first with either twin, as its layers are of a kind of their own; test_engine_models.py has both for all.
FAMILIES = (
    *(("minimax", twin) for twin in TWINS),
    ("kimi_linear", "fastattn"),
    ("nemotron_h", "refattn"),
    ("bamba", "fastattn"),
    ("falcon_h1", "refattn"),
    ("granitemoehybrid", "fastattn"),
    ("olmo_hybrid", "refattn"),
    ("qwen3_5_text", "fastattn"),
)


@pytest.mark.core
@pytest.mark.covers("R212")
@pytest.mark.parametrize(("family", "twin"), FAMILIES)
def test_greedy_is_generate_for_every_family(family, twin, device):
    """With chunks, preemptions, cached prefixes and drafts at once."""
    model = make_hybrid(family, device)
    expected = transformers_outputs(model, PROMPTS[1:], 6, "eager")
    drafts = drafts_of(PROMPTS[1:], expected)
    engine = make_engine(model, twin, num_blocks=9, max_num_batched_tokens=19, speculation=drafts)
    assert outputs(engine, PROMPTS[1:]) == expected
    counters = engine.counters
    assert counters.preemptions and counters.cached_blocks and counters.accepted_tokens < counters.drafted_tokens


# Prefix caching.


def cached(engine, prompt):
    before = engine.counters.cached_tokens
    engine.generate([prompt], SamplingParams(max_tokens=1))
    return engine.counters.cached_tokens - before


@pytest.mark.core
@pytest.mark.covers("R210")
@pytest.mark.parametrize("twin", TWINS)
def test_a_prefix_is_found_where_a_state_was_kept_and_nowhere_else(qwen, twin):
    engine = make_engine(qwen, twin)
    assert cached(engine, PROMPTS[1]) == 0
    assert cached(engine, PROMPTS[1]) == cached(engine, PROMPTS[3]) == 12  # the last block end before its last token
    assert cached(engine, [*SYSTEM[:11], 60, 61]) == 0, "the keys of two blocks are there, but no state after them"
    assert len(engine.pool.find([*SYSTEM[:11], 70])) == 2
    assert cached(engine, PROMPTS[1][:12]) == 0, "its last token has to go through the model"
    assert cached(engine, PROMPTS[1][:12]) == 8, "which has now kept the state before it"
    in_chunks = make_engine(qwen, twin, max_num_batched_tokens=9)
    assert cached(in_chunks, PROMPTS[1]) == 0
    assert cached(in_chunks, [*SYSTEM[:11], 60, 61]) == 8, "each step keeps its last one"
    without = make_engine(qwen, twin, num_kept_states=0, max_num_seqs=1)
    assert [cached(without, PROMPTS[1]) for _ in range(2)] == [0, 0]


@pytest.mark.core
@pytest.mark.covers("R210", "R219")
@pytest.mark.parametrize("ring_size", [0, 9])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_a_conversation_goes_on_after_its_answer(qwen, twin, ring_size, drafts):
    """The state at the end of its last block is there, though its drafts went past it."""
    (expected,) = transformers_outputs(qwen, [PROMPTS[1]], 12, "eager")
    speculation = drafts_of([PROMPTS[1]], [[*expected, 1, 2, 3]]) if drafts else None
    engine = make_engine(qwen, twin, num_kept_states=8, state_ring_size=ring_size, speculation=speculation)
    (answer,) = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=12, stop_token_ids=()))
    assert answer.output_ids == expected
    states = engine.scheduler.states
    lengths = sorted(len(tokens_of(content)) for content in (states.rings or states).kept)
    assert lengths == [12, 24], "of an answer the latest one stays: others are of no use to the next question"
    longer = [*answer.tokens, 33, 34]
    engine.drafting = None
    (again,) = engine.generate([longer], GREEDY)
    assert engine.counters.cached_tokens == 24
    assert [again.output_ids] == transformers_outputs(qwen, [longer], 6, "eager")
    assert_all_free(engine)


@pytest.mark.core
@pytest.mark.covers("R210", "R219")
@pytest.mark.parametrize("ring_size", [0, 4])
@pytest.mark.parametrize("twin", TWINS)
def test_several_requests_begin_with_one_state(qwen, expected, twin, ring_size, caplog):
    """In one step, two as decodes and two as prefills: the kept state is there for the next one, too."""
    (after,) = transformers_outputs(qwen, [SYSTEM], 6, "eager")
    engine = make_engine(qwen, twin, num_kept_states=1, state_ring_size=ring_size)
    engine.generate([SYSTEM], SamplingParams(max_tokens=1))
    states = engine.scheduler.states
    (slot,) = (states.rings or states).kept.values()
    kept = [pools.states[slot].clone() for pools in engine.state_caches.values()]
    prompts = [SYSTEM, PROMPTS[1], SYSTEM, PROMPTS[4]]
    assert outputs(engine, prompts) == [after, expected[1], after, expected[4]]
    assert engine.counters.cached_tokens == 4 * 12 and not caplog.records, "no pass failed, and was repeated"
    assert all(torch.equal(pools.states[slot], x) for pools, x in zip(engine.state_caches.values(), kept, strict=True))


# The pool alone.


@pytest.mark.core
@pytest.mark.covers("R210")
def test_the_least_recently_used_state_goes_first():
    pool = StatePool(1, 2, block_size=4)
    *old, new = ([BlockContent(None, (i,), i)] for i in range(4))
    for contents in (*old, old[0]):  # the first one is used again
        pool.release(run(pool, 6, contents))
    assert [pool.usable(contents) for contents in (*old, new)] == [1, 1, 1, 0], "more than two, as no request runs"
    pool.release(run(pool, 6, new))
    assert [pool.usable(contents) for contents in (*old, new)] == [1, 0, 1, 1]
    pool.reset()
    assert not pool.usable(new) and pool.free == [0, 1, 2, 3]


@pytest.mark.core
@pytest.mark.covers("R209", "R211")
def test_a_step_that_did_not_succeed_leaves_the_state_where_it_was():
    pool = StatePool(2, 2, block_size=4, decode_len=3)
    request = run(pool, 6, [BlockContent(None, (1,), 1)])
    pool.settle(request)
    start, kept = pool.slots[request].start, dict(pool.kept)
    request.tokens += [6]
    pool.hold(request, 1, 7)
    pool.hold(request, 3, 9)  # with two drafts
    assert start not in pool.slots[request].targets and len({*pool.slots[request].targets}) == 3
    assert pool.slots[request].checkpoint is not None
    pool.settle(request)
    assert pool.slots[request].start == start and pool.kept == kept and not pool.slots[request].targets
    pool.hold(request, 3, 9)
    targets = list(pool.slots[request].targets)
    request.num_computed_tokens += 1  # both drafts are wrong, so the end of the block is not reached
    pool.settle(request)
    assert pool.slots[request].start == targets[0] and pool.kept == kept
    pool.release(request)
    assert len(pool.free) == pool.num_slots
    pool.release(request)  # has none


BAD_POOLS = {
    "no requests": ((0, 1), {}, "num_requests: expected a positive int, got 0"),
    "less than none kept": ((1, -1), {}, "num_kept: expected a Python int of at least 0, got -1"),
    "no tokens": ((1, 1), dict(decode_len=0), "decode_len: expected a positive int, got 0"),
}


@pytest.mark.parametrize("name", BAD_POOLS)
def test_bad_pools(name):
    sizes, options, message = BAD_POOLS[name]
    with pytest.raises(ValueError, match=message):
        StatePool(*sizes, **dict(block_size=4) | options)


# Drafts.


@pytest.mark.covers("R211")
@pytest.mark.parametrize("twin", TWINS)
def test_rejected_drafts_are_rolled_back(qwen, expected, twin):
    """A state cannot be shortened: the one after the last right draft goes on."""
    engine = make_engine(qwen, twin, speculation=drafts_of(PROMPTS, expected), max_num_batched_tokens=30)
    assert outputs(engine) == expected
    assert 0 < engine.counters.accepted_tokens < engine.counters.drafted_tokens
    assert engine.counters.steps < 9


# Failures.


@pytest.mark.lets_a_pass_fail
@pytest.mark.covers("R209")
@pytest.mark.parametrize("twin", TWINS)
def test_a_pass_that_fails_is_computed_again(qwen, expected, twin):
    """One request makes the last layer raise, when the states of the layers before it have been computed."""
    engine, last = make_engine(qwen, twin, max_num_batched_tokens=9), qwen.model.layers[-1]
    seen = []

    def note(module, arguments):
        seen[:] = arguments[0].flatten().tolist()

    def refuse(module, arguments):
        if 66 in seen:
            raise RuntimeError("no such token")

    hooks = qwen.get_input_embeddings().register_forward_pre_hook(note), last.register_forward_pre_hook(refuse)
    try:
        requests = engine.generate([*PROMPTS[:2], [1, 2, 66], *PROMPTS[2:]], GREEDY)
    finally:
        for hook in hooks:
            hook.remove()
    assert requests[2].error == "RuntimeError: no such token" and not requests[2].output_ids
    assert [request.output_ids for request in requests if request is not requests[2]] == expected
    assert_all_free(engine)


@pytest.mark.core
@pytest.mark.covers("R209", "R219")
@pytest.mark.parametrize("ring_size", [0, 5])
def test_an_interrupted_step_is_undone(qwen, expected, ring_size):
    """And a request that is aborted gives its slots back."""
    options = dict(speculation=NGram(max_drafts=2), state_ring_size=ring_size)
    engine, calls = make_engine(qwen, max_num_batched_tokens=9, **options), []

    def interrupt(module, arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    requests = [engine.add(prompt, GREEDY) for prompt in (*PROMPTS, [1, 2, 3] * 5)]
    hook = qwen.model.layers[-1].register_forward_pre_hook(interrupt)
    with hook, pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert_all_free(engine)
    for _ in range(3):
        engine.step()
    engine.abort(requests.pop())
    while engine.running or engine.waiting:
        engine.step()
    assert [request.output_ids for request in requests] == expected
    assert_all_free(engine)


# What an engine is made of, and what it refuses.


def test_states_are_float32_beside_pages(qwen, device):
    engine = make_engine(qwen, kv_cache_dtype="fp8_e4m3", max_num_seqs=3, num_kept_states=1)
    assert {*engine.state_caches} == {0, 2} and len(engine.layers) == 1 and engine.places == {1: 0}
    for pools in engine.state_caches.values():
        assert pools.states.shape == (7, 4, 12, 8) and pools.states.dtype == torch.float32
        assert pools.inputs.shape == (7, 3, 2 * 16 + 48)
    layer = engine.state_layers[0]
    assert layer == StateLayer(4, 12, 8, 4, 80, 2)
    of_pages = 2 * 64 * 4 * 2 * 16
    assert engine.pool_bytes == of_pages + 2 * 7 * layer.bytes_per_slot(torch.float32)
    assert layer.bytes_per_slot(torch.float16) == 4 * 12 * 8 * 4 + 3 * 80 * 2
    assert [len(answer) for answer in outputs(engine)] == [6] * len(PROMPTS)
    (amax,) = calibrate(qwen, PROMPTS)
    assert amax.key.shape == (2, 16)


def test_a_model_is_what_it_was_without_an_engine(qwen, expected):
    make_engine(qwen)
    assert transformers_outputs(qwen, PROMPTS, 6, "eager") == expected


def test_steps_are_captured_on_a_gpu(qwen):
    """Those of `fastattn`; `test_captured_states.py` computes them."""
    for twin in TWINS:
        engine = make_engine(qwen, twin)
        on_gpu = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")), twin=engine.twin)
        assert CudaGraphs.can_record(on_gpu) is (twin == "fastattn")


REFUSED = {
    "batch invariance": (
        dict(batch_invariant=True),
        NotImplementedError,
        "batch_invariant: expected False with layers",
    ),
    "trees": (
        dict(speculation=NGram(max_branches=2)),
        ValueError,
        "speculation: expected max_branches=1 with layers that keep a state, .* got 2",
    ),
    "less than none": (dict(num_kept_states=-1), ValueError, "num_kept_states: expected None or .* at least 0, got -1"),
    "no number": (dict(num_kept_states=True), ValueError, "num_kept_states: expected None or .* got True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(qwen, name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make_engine(qwen, **options)


def test_layers_with_an_unknown_state(device):
    model = make_family("jamba", device, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)
    with pytest.raises(
        ValueError, match="model: expected layers that keep a state to be of Qwen.*, got another in layer 0"
    ):
        Engine(model, num_blocks=8, trust_model=True)


def test_another_activation(device):
    model = make_family("qwen3_next", device, **STATES["qwen3_next"] | dict(hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"model: expected SiLU after the convolution of model.layers.0.*, got gelu"):
        Engine(model, num_blocks=8)


def test_states_without_memory(qwen, monkeypatch):
    monkeypatch.setattr(
        refattn.state_cache, "allocate", mock.Mock(side_effect=torch.OutOfMemoryError("out of memory."))
    )
    size = r"max_num_seqs: expected states that fit .*, got 48 slots of 0.00476 MiB. out of memory."
    with pytest.raises(torch.OutOfMemoryError, match=size):
        make_engine(qwen, max_num_seqs=16)


@pytest.mark.parametrize("option", ["attention_mask", "cache", "cache_params", "seq_idx"])
def test_options_that_the_engine_does_not_know(qwen, option):
    """An option that a new transformers passes to such a layer is not left out."""
    pools = make_engine(qwen).layer_pools
    given = {"hidden_states": torch.zeros(1, 1, 48), "layer_pools": pools, "step": None, option: torch.ones(1)}
    with pytest.raises(ValueError, match=f"{option}: expected"):
        qwen.model.layers[0].linear_attn(**given)


def test_an_argument_without_a_name_is_not_left_out(qwen):
    hidden, engine = torch.zeros(1, 1, 48), make_engine(qwen)
    with pytest.raises(ValueError, match="hidden_states: expected all other arguments by name, got 1 without one"):
        qwen.model.layers[0].linear_attn(hidden, torch.ones(1), layer_pools=engine.layer_pools, step=None)
