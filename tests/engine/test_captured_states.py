"""Layers that keep a state in captured steps, and in decodes that are launched ahead.

A graph is a tape here (`tests/helpers/tape.py`): only what is in buffers changes from step to step.
"""

import pytest
import torch

from tests.helpers.engines import SYSTEM
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
from twinattn.engine import SamplingParams
from twinattn.engine.block_pool import BlockContent
from twinattn.engine.state_pool import StatePool

LONG = SamplingParams(max_tokens=14, stop_token_ids=())
LENGTHS = [SamplingParams(max_tokens=count, temperature=0.5 * (count % 2), seed=count) for count in (6, 3, 7, 4, 5)]


@pytest.fixture(scope="module")
def qwen(device):
    return make_hybrid("qwen3_5_text", device)


def captures(engine):
    """Return the plans of states in each captured step, with its shape."""
    return zip(engine.passes[::2], engine.runner._steps, strict=True)


def answers(engine, prompts=PROMPTS, sampling=GREEDY):
    found = [request.output_ids for request in engine.generate(prompts, sampling)]
    assert_all_free(engine)
    assert not engine.scheduler.states._pending
    return found


SCHEDULES = {
    "chunks and few requests": dict(block_size=3, max_num_batched_tokens=9, max_num_seqs=3, num_kept_states=1),
    "preemptions": dict(num_blocks=9, max_num_batched_tokens=19),
}


@pytest.mark.covers("R209", "A44")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_are_those_of_steps_launch_by_launch(qwen, captured, schedule):
    """Prompts in chunks beside decodes, and decodes ahead; the second time with what is there of the first."""
    engine, plain = captured(qwen, **SCHEDULES[schedule]), make_engine(qwen, "fastattn", **SCHEDULES[schedule])
    for sampling in (GREEDY, LENGTHS):
        assert answers(engine, sampling=sampling) == answers(plain, sampling=sampling)
    counters = engine.counters
    assert counters.cached_tokens and bool(counters.preemptions) == (schedule == "preemptions")
    assert any(rows.sources.max() >= 0 for rows in engine.runner.rows), "no decode was launched ahead"
    assert len(engine.passes) == 2 * len(engine.runner._steps) < counters.steps, "a step was not captured"
    assert {len(states) for states in engine.passes} == {1, 2}, "decodes alone, and with prefills"


@pytest.mark.core
@pytest.mark.covers("R211", "R219")
@pytest.mark.parametrize("ring_size", [0, 5])
def test_drafts_in_captured_steps(qwen, captured, ring_size):
    expected = answers(make_engine(qwen))
    options = dict(speculation=drafts_of(PROMPTS, expected), state_ring_size=ring_size)
    engine = captured(qwen, num_blocks=12, max_num_batched_tokens=19, **options)
    assert answers(engine, PROMPTS[1:2]) + answers(engine) == [expected[1], *expected]
    counters = engine.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens and counters.preemptions and counters.cached_tokens
    assert len(engine.passes) == 2 * len(engine.runner._steps), "a step was not captured"
    assert any(len(states) == 1 and shape.queries == 4 for states, shape in captures(engine)), "a step of decodes alone"


@pytest.mark.core
@pytest.mark.covers("R210")
def test_several_requests_begin_with_one_state_in_a_captured_decode(qwen, captured):
    """It is copied before the graph is launched; and what a graph computes when it is captured changes no state."""
    (after,) = answers(make_engine(qwen), [SYSTEM])
    engine = captured(qwen, num_kept_states=1)
    engine.generate([SYSTEM], SamplingParams(max_tokens=1))
    (slot,) = engine.scheduler.states.kept.values()
    kept = [pools.states[slot].clone() for pools in engine.state_caches.values()]
    assert answers(engine, [SYSTEM] * 3) == [after] * 3
    assert engine.counters.cached_tokens == 3 * 12
    now = [pools.states[slot] for pools in engine.state_caches.values()]
    assert all(map(torch.equal, now, kept)), "a kept state was written"


@pytest.mark.covers("R202")
@pytest.mark.parametrize("ring_size", [0, 4], ids=["states", "rings"])
def test_padding_rows_read_and_write_no_slot(qwen, captured, ring_size):
    """Five requests are eight rows: unused slots hold what they held, NaN, and slot 0 is one of them."""
    engine = captured(qwen, num_kept_states=0, state_ring_size=ring_size)
    pool = engine.scheduler.states
    lengths = [SamplingParams(max_tokens=count, stop_token_ids=()) for count in (7, 5, 5, 3, 7)]
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, lengths, strict=True)]
    for each in (pool, *([pool.rings] if ring_size else [])):
        each._free.move_to_end(0)  # it is not needed
    used, of_checkpoints = set(), set()
    while engine.running or engine.waiting:
        engine.step()
        for step in () if ring_size else engine.runner._steps.values():
            table = step.inputs.slots if step.shape.queries == 1 else step.slots
            assert (table[step.batch.query_lens == 0] == -1).all(), "of rows that others had before, too"
        for slots in pool.slots.values():
            used |= {slots.start, *slots.targets, *(slots.ahead.targets if slots.ahead else [])} - {None}
            rings = [x.ring for x in (slots, slots.ahead) if x is not None and x.ring is not None]
            of_checkpoints |= {slot for ring in rings for slot in (ring.slot, ring.target)} - {None}
    assert {len(rows.requests) for rows in engine.runner.rows} >= {2, 4, 5}
    assert all(request.error is None for request in requests)
    unused = sorted(set(range(pool.num_slots)) - used)
    of_states = sorted(set(range(pool.rings.num_slots)) - of_checkpoints) if ring_size else unused
    assert unused[0] == of_states[0] == 0
    for pools in engine.state_caches.values():
        assert pools.states[of_states].isnan().all() and pools.inputs[unused].isnan().all()
        assert all(ring[of_states].isnan().all() for ring in pools.ring or ())


@pytest.mark.core
@pytest.mark.lets_a_pass_fail
@pytest.mark.covers("R209", "R219")
@pytest.mark.parametrize("ring_size", [0, 1, 2, 5])
@pytest.mark.parametrize("failing", [3, 4, 6])
def test_a_decode_that_fails_while_the_next_is_under_way_is_computed_again(
    qwen, captured, monkeypatch, ring_size, failing
):
    """Its tokens cannot be read: what it began with is still there, though the next decode has run."""
    plain, engine = answers(make_engine(qwen), sampling=LONG), captured(qwen, state_ring_size=ring_size)
    read, calls = engine._read, []

    def fail_once(under_way):
        calls.append(engine._under_way)
        if len(calls) == failing:
            raise RuntimeError("planted")
        return read(under_way)

    monkeypatch.setattr(engine, "_read", fail_once)
    assert answers(engine, sampling=LONG) == plain
    assert calls[failing - 1] is not None, "the next decode was under way"


@pytest.mark.covers("R209")
def test_a_request_that_ends_leaves_the_slots_of_its_next_decode(qwen, captured):
    """By a stop token, and aborted: its row is under way, and its slots go to others at once."""
    prompts, plain = PROMPTS[1:4], make_engine(qwen)
    expected = answers(plain, prompts)
    stopping = SamplingParams(max_tokens=9, stop_token_ids=(expected[1][3],))
    engine = captured(qwen, max_num_seqs=2, num_kept_states=0)
    assert answers(engine, prompts, stopping) == answers(plain, prompts, stopping)
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    while engine._under_way is None:
        engine.step()
    engine.abort(requests[0])
    while engine.running or engine.waiting:
        engine.step()
    assert [request.output_ids for request in requests[1:]] == expected[1:]
    assert_all_free(engine)


@pytest.mark.core
@pytest.mark.covers("R209")
def test_slots_of_a_decode_ahead():
    """The pool alone: three slots in turns, a state at the end of a block, and a decode that is not read."""
    pool = StatePool(1, 1, block_size=4, ahead=True)
    assert pool.num_slots == 4
    contents = [BlockContent(None, (1,), 1), BlockContent(None, (2,), 2)]
    request = run(pool, 6, contents)
    pool.settle(request)
    pool.hold(request, 1, 7)
    slots = pool.slots[request]
    (target,), start = slots.targets, slots.start
    pool.hold_ahead(request)
    pool.hold_ahead(request)  # again, after it could not be launched
    ahead = slots.ahead
    assert (ahead.first, ahead.start) == (7, target) and len({start, target, *ahead.targets}) == 3
    assert slots.checkpoint is None and ahead.checkpoint[0] == 1, "the second block ends with the second token"
    (third,) = ahead.targets
    request.num_computed_tokens = 7
    pool.follow(request)
    assert (slots.first, slots.start, slots.targets) == (7, target, [third]) and slots.ahead is None
    pool.hold_ahead(request)
    request.num_computed_tokens = 8
    pool.settle(request)  # settling drops the state ahead
    assert slots.start == third and pool.usable(contents) == 2 and slots.ahead is None
    assert len(pool.free) == pool.num_slots - 1 and not pool._pending
    pool.release(request)
    assert len(pool.free) == pool.num_slots


def test_slots_for_decodes_ahead_are_there_where_some_are_launched(qwen, captured):
    sizes = dict(max_num_seqs=3, num_kept_states=0)
    assert captured(qwen, **sizes).scheduler.states.num_slots == 9
    drafts = drafts_of(PROMPTS[:1], [[1]])
    assert captured(qwen, **sizes, speculation=drafts).scheduler.states.num_slots == 3 * 5
    assert make_engine(qwen, "fastattn", **sizes).scheduler.states.num_slots == 6


def test_additions_are_captured(captured, device):
    model = make_hybrid("bamba", device)
    engine = captured(model, max_num_batched_tokens=9)
    assert answers(engine, PROMPTS[1:]) == outputs(make_engine(model), PROMPTS[1:])
    assert len(engine.passes) == 2 * len(engine.runner._steps)
