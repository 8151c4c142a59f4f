"""Layers that replay their inputs in the engine: the tokens are those without rings, whatever a request goes through.

Cursors, folds and slots are those of `RingPool`; `test_replay.py` has the path itself.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.engines import SYSTEM, TWINS, transformers_outputs
from tests.helpers.going_on import tokens_of
from tests.helpers.state_engines import GREEDY, PROMPTS, assert_all_free, drafts_of, make_engine, make_hybrid, outputs
from twinattn.engine import NGram, SamplingParams
from twinattn.engine.block_pool import BlockContent
from twinattn.engine.request import Request
from twinattn.engine.ring_pool import Fold, RingPool, Row, in_groups
from twinattn.engine.state_pool import StatePool

LONG = SamplingParams(max_tokens=14, stop_token_ids=())
SHORTER = SamplingParams(max_tokens=8, stop_token_ids=())
FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "nemotron_h", "bamba", "falcon_h1"),
    *("granitemoehybrid", "minimax"),
)


@pytest.fixture(scope="module")
def qwen(device):
    return make_hybrid("qwen3_next", device)


@pytest.fixture(scope="module")
def expected(qwen):
    return transformers_outputs(qwen, PROMPTS, 14, "eager")


def answers(engine, prompts=PROMPTS, sampling=LONG):
    found = [request.output_ids for request in engine.generate(prompts, sampling)]
    assert_all_free(engine)
    return found


SCHEDULES = {
    "all at once": dict(state_ring_size=4),
    "room for one": dict(state_ring_size=1),
    "more room than tokens": dict(state_ring_size=32, num_kept_states=0),
    "odd blocks, short steps": dict(
        state_ring_size=3, block_size=3, max_num_batched_tokens=5, max_num_seqs=3, num_kept_states=1
    ),
    "a small pool": dict(state_ring_size=5, num_blocks=13, max_num_batched_tokens=19),
    "drafts": dict(state_ring_size=4, drafts=True),
    "drafts in a small pool": dict(
        state_ring_size=7, num_blocks=13, max_num_batched_tokens=19, drafts=True, block_size=4, num_kept_states=2
    ),
    "drafts in odd blocks": dict(state_ring_size=5, block_size=3, max_num_batched_tokens=9, drafts=True),
}


@pytest.mark.covers("R219")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("twin", TWINS)
def test_greedy_is_generate(qwen, expected, twin, schedule):
    """Prompts in chunks beside decodes, preemptions, and the second time with what is there of the first."""
    options = dict(SCHEDULES[schedule])
    if options.pop("drafts", False):
        options["speculation"] = drafts_of(PROMPTS, expected)
    engines = [make_engine(qwen, twin, **options), make_engine(qwen, twin, **options | dict(state_ring_size=0))]
    counters = [engine.counters for engine in engines]
    for prompts, right in ((PROMPTS, expected), (PROMPTS[1:], expected[1:])):
        assert [answers(engine, prompts) for engine in engines] == [right, right]
        if "drafts" not in schedule:
            assert counters[0] == counters[1], "as many tokens are found, and preempted"
    assert bool(counters[0].cached_tokens) == (options.get("num_kept_states") != 0)
    assert bool(counters[0].preemptions) == ("small" in schedule)
    assert counters[0].accepted_tokens < counters[0].drafted_tokens or "drafts" not in schedule


@pytest.mark.covers("R219")
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_it_says_without_rings(family, twin, device):
    """With chunks, preemptions, cached prefixes and drafts at once; and decodes alone."""
    model = make_hybrid(family, device)
    expected = answers(make_engine(model, twin), PROMPTS[1:], SHORTER)
    small = dict(num_blocks=10, max_num_batched_tokens=19, state_ring_size=4)
    engine = make_engine(model, twin, speculation=drafts_of(PROMPTS[1:], expected), **small)
    assert answers(engine, PROMPTS[1:], SHORTER) == expected
    counters = engine.counters
    assert counters.preemptions and counters.cached_blocks and counters.accepted_tokens < counters.drafted_tokens
    assert answers(make_engine(model, twin, **small), PROMPTS[1:], SHORTER) == expected


@pytest.mark.covers("R219")
@pytest.mark.parametrize("twin", TWINS)
def test_samples_begin_with_one_checkpoint_and_ring(qwen, twin):
    """The last chunk of the prompt is short, so that inputs are in the ring that all of them begin with."""
    drawn = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=3, stop_token_ids=())
    found = []
    for options in ({}, dict(state_ring_size=4), dict(state_ring_size=6, speculation=NGram(max_drafts=2))):
        engine = make_engine(qwen, twin, max_num_batched_tokens=13, **options)
        requests = engine.generate([PROMPTS[1], [7, 3] * 7], drawn)
        found.append([[sample.output_ids for sample in request.samples] for request in requests])
        assert_all_free(engine)
    assert found[0] == found[1] == found[2] and len({tuple(x) for x in found[0][0]}) == 3


@pytest.mark.covers("R219")
@pytest.mark.parametrize("twin", TWINS)
def test_a_few_decodes_are_plain_steps_and_more_are_not(qwen, expected, twin):
    """A request goes on either way: its ring is folded into the state before a plain step."""
    engine = make_engine(qwen, twin, state_ring_size=8)
    rings, kinds = engine.scheduler.states.rings, []
    rings.few = 2
    plan = rings.plan
    rings.plan = lambda requests, *, plain: kinds.append((plain, *plan(requests, plain=plain))) or kinds[-1][1:]
    lengths = [SamplingParams(max_tokens=count, stop_token_ids=()) for count in (14, 5, 14, 7, 6)]
    found = [request.output_ids for request in engine.generate(PROMPTS, lengths)]
    assert found == [answer[: one.max_tokens] for answer, one in zip(expected, lengths, strict=True)]
    assert [plain for plain, *_ in kinds] == sorted(plain for plain, *_ in kinds) and {x for x, *_ in kinds} == {0, 1}
    first = next(folds for plain, _, folds in kinds if plain)
    assert len(first) == 2 and all(fold.num_inputs for fold in first), "the rings of both were folded"
    assert_all_free(engine)


# --- prefix caching ---


@pytest.mark.core
@pytest.mark.covers("R219")
@pytest.mark.parametrize("drafts", [False, True])
def test_a_kept_state_is_the_plain_one_at_exactly_its_token(qwen, expected, drafts):
    """Whenever it was folded: before more inputs went into the ring, or out of the first ones of it."""
    plain = make_engine(qwen, num_kept_states=8)
    speculation = drafts_of(PROMPTS, expected) if drafts else None
    ring = make_engine(qwen, num_kept_states=8, state_ring_size=7, speculation=speculation)
    for engine in (plain, ring):
        engine.generate([PROMPTS[2]], LONG)
        engine.generate([[1]], SamplingParams(max_tokens=1))  # a step after it, before which its last state is written
    states, rings = plain.scheduler.states.kept, ring.scheduler.states.rings.kept
    kept = {tokens_of(content): slot for content, slot in states.items()}
    found = {tokens_of(content): slot for content, slot in rings.items()}
    assert max(map(len, kept)) == max(map(len, found)) == 32
    for tokens in kept.keys() & found.keys():
        for one, other in zip(plain.state_caches.values(), ring.state_caches.values(), strict=True):
            torch.testing.assert_close(one.states[kept[tokens]], other.states[found[tokens]], rtol=1e-5, atol=1e-6)


# --- failures ---


@pytest.mark.lets_a_pass_fail
@pytest.mark.covers("R219")
@pytest.mark.parametrize("ring_size", [1, 4])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_a_pass_that_fails_is_computed_again(qwen, expected, twin, ring_size, drafts):
    """The last layer raises every third time, when the layers before it have moved checkpoints, and pushed inputs."""
    if drafts:
        options = dict(speculation=drafts_of(PROMPTS, expected), state_ring_size=max(4, ring_size))
    else:
        options = dict(state_ring_size=ring_size)
    engine, calls = make_engine(qwen, twin, max_num_batched_tokens=9, **options), []

    def refuse(module, arguments):
        calls.append(len(arguments[0][0]))
        if len(calls) % 3 == 0 and len(engine.running) > 1 and calls[-1] > 1 and not engine.is_alone:
            raise RuntimeError("planted")

    compute = engine._compute

    def watched(scheduled, under_way=None):
        engine.is_alone = len(scheduled) == 1
        return compute(scheduled, under_way)

    engine.is_alone, engine._compute = False, watched
    with qwen.model.layers[-1].register_forward_pre_hook(refuse):
        assert answers(engine) == expected


# --- captured steps, and decodes ahead ---


CAPTURED = {
    "chunks and few requests": dict(block_size=3, max_num_batched_tokens=9, max_num_seqs=3, num_kept_states=1),
    "preemptions": dict(num_blocks=13, max_num_batched_tokens=19),
}


@pytest.mark.covers("R219")
@pytest.mark.parametrize("few", [0, 2])
@pytest.mark.parametrize("schedule", CAPTURED)
def test_one_graph_serves_any_cursor(captured, schedule, few, device):
    """Prompts in chunks beside decodes, decodes ahead, and plain ones: the second time after what is there."""
    model = make_hybrid("qwen3_5_text", device)
    engine = captured(model, state_ring_size=4, **CAPTURED[schedule])
    engine.scheduler.states.rings.few = few
    plain = make_engine(model, "fastattn", **CAPTURED[schedule])
    lengths = [SamplingParams(max_tokens=n, temperature=0.5 * (n % 2), seed=n) for n in (6, 13, 7, 14, 5)]
    for sampling in (LONG, lengths):
        assert answers(engine, sampling=sampling) == answers(plain, sampling=sampling)
    counters = engine.counters
    assert counters.cached_tokens and bool(counters.preemptions) == (schedule == "preemptions")
    assert any(rows.sources.max() >= 0 for rows in engine.runner.rows), "no decode was launched ahead"
    assert len(engine.passes) == 2 * len(engine.runner._steps) < counters.steps, "a step was not captured"


# --- the pool alone ---


def request_of(length):
    return Request(list(range(length)), length, GREEDY)


def step(pool, request, count, accepted=None):
    """Hold, plan and settle a step of one request; return its row and the folds before it."""
    slots = pool.slots[request].ring
    pool.hold(request, count, request.num_computed_tokens + count)
    (row,), folds = pool.rings.plan([(slots, count)], plain=False)
    pool.rings.folded()
    request.num_computed_tokens += count if accepted is None else accepted
    for i in range(len(request.contents), request.num_computed_tokens // pool.block_size):
        request.contents.append(BlockContent(None, (i,), i))
    pool.settle(request)
    return row, folds


def make_pool(ring_size, num_kept=2, decode_len=1, block_size=64, num_requests=2):
    sizes = dict(block_size=block_size, decode_len=decode_len)
    rings = RingPool(num_requests, num_kept, ring_size=ring_size, **sizes)
    return StatePool(num_requests, num_kept, rings=rings, **sizes)


@pytest.mark.core
@pytest.mark.covers("R219")
def test_a_decode_moves_its_checkpoint_when_the_ring_is_full():
    pool, request = make_pool(3), request_of(9)
    pool.share(request, [])
    assert step(pool, request, 9)[0] == Row(prefill=0)
    slots, found = pool.slots[request].ring, []
    for _ in range(5):
        row, folds = step(pool, request, 1)
        found.append((row.slot, row.cursor, row.target, slots.slot, slots.cursor))
        assert not folds and not row.flush and len(pool.rings.free) == pool.rings.num_slots - 1
    assert [x[:2] + x[3:] for x in found] == [
        (0, 0, 0, 1),
        (0, 1, 0, 2),
        (0, 2, *[found[2][2], 0]),
        *((found[2][2], i, found[2][2], i + 1) for i in range(2)),
    ]
    assert found[2][2] > 0 and [x[2] for x in found if x is not found[2]] == [-1] * 4
    pool.release(request)
    assert len(pool.rings.free) == pool.rings.num_slots


@pytest.mark.core
@pytest.mark.covers("R219")
def test_drafts_move_the_checkpoint_before_their_step_and_the_cursor_by_what_is_accepted():
    pool, request = make_pool(4, decode_len=3), request_of(9)
    pool.share(request, [])
    step(pool, request, 9)
    slots, found = pool.slots[request].ring, []
    for accepted in (1, 2, 0, 3):
        row, _ = step(pool, request, 3, accepted)
        found.append((row.cursor, row.target >= 0, slots.cursor))
    assert found == [(0, False, 1), (1, False, 3), (3, True, 3), (3, True, 3)]


@pytest.mark.core
@pytest.mark.covers("R219")
def test_the_end_of_a_block_is_folded_out_of_the_first_inputs_of_a_ring():
    pool, request = make_pool(8, decode_len=3, block_size=4), request_of(9)
    pool.share(request, [])
    step(pool, request, 9)
    slots = pool.slots[request].ring
    step(pool, request, 3, 2)  # 11
    step(pool, request, 3, 3)  # 14: the third block has ended after three inputs
    slot = slots.slot
    row, (fold,) = step(pool, request, 3, 1)
    assert fold == Fold(slot, 3, pool.rings.kept[request.contents[2]]) and row.cursor == 5
    pool.release(request)
    assert len(pool.rings.free) == pool.rings.num_slots


@pytest.mark.core
@pytest.mark.covers("R219")
def test_a_ring_is_folded_after_its_request_has_ended_while_another_begins():
    """It takes a slot that is kept, one to write to and one for the end of a block, and the ring has a slot, too."""
    pool, first = make_pool(8, num_kept=1, decode_len=3, block_size=4, num_requests=1), request_of(9)
    pool.share(first, [])
    for count, accepted in ((9, 9), (3, 2), (3, 3)):
        step(pool, first, count, accepted)
    pool.release(first)
    second = request_of(24)
    second.num_computed_tokens, second.contents = 12, first.contents[:3]
    pool.share(second, second.contents)
    pool.hold(second, 12, 24)
    assert pool.slots[second].ring.checkpoint is not None and not pool.rings.free


@pytest.mark.covers("R219")
def test_a_step_that_did_not_succeed_leaves_all_where_it_was():
    pool, request = make_pool(2, block_size=4), request_of(9)
    pool.share(request, [])
    step(pool, request, 9)
    step(pool, request, 1)
    slots = pool.slots[request].ring
    before, kept = (slots.slot, slots.cursor, slots.first), dict(pool.rings.kept)
    for _ in range(2):
        row, folds = step(pool, request, 1, 0)
        assert row[:2] == (slots.slot, 1) and row.target not in (-1, slots.slot) and not folds
        assert (slots.slot, slots.cursor, slots.first) == before and pool.rings.kept == kept
    assert len(pool.rings.free) == pool.rings.num_slots - 1


def test_folds_are_computed_at_once_where_they_do_not_meet():
    folds = [Fold(0, 1, 4), Fold(1, 2, 5), Fold(0, 3, 6), Fold(6, 1, 7), Fold(2, 0, 6)]
    assert in_groups(folds) == [folds[:2], folds[2:3], folds[3:4], folds[4:]]


# --- what an engine is made of, and what it refuses ---


def test_the_pools_of_an_engine_with_rings(qwen):
    engine = make_engine(qwen, max_num_seqs=3, num_kept_states=1, state_ring_size=5, speculation=NGram(max_drafts=2))
    for pools in engine.state_caches.values():
        assert pools.states.shape == (3 * 3 + 1, 4, 12, 8) and pools.inputs.shape[0] == 3 * 4 + 1
        assert [tuple(x.shape) for x in pools.ring] == [(10, 5, 2, 8), (10, 5, 4, 12), (10, 5, 4)]
    without = make_engine(qwen, max_num_seqs=3, num_kept_states=1, speculation=NGram(max_drafts=2))
    assert all(pools.states.shape[0] == 13 and pools.ring is None for pools in without.state_caches.values())
    assert engine.pool_bytes == sum(
        x.untyped_storage().nbytes()
        for x in (*engine.caches, *(x for pools in engine.state_caches.values() for x in pools.tensors))
        if isinstance(x, torch.Tensor)
    ) + sum(x.untyped_storage().nbytes() for cache in engine.caches if isinstance(cache, tuple) for x in cache)


def test_the_default_is_a_ring_where_it_was_measured(qwen, monkeypatch):
    """For more than four requests by `fastattn` on CUDA; there, steps of up to four decodes are plain."""
    rings = make_engine(qwen, "fastattn").scheduler.states.rings
    assert (rings is None) == (qwen.device.type == "cpu")


@pytest.mark.parametrize(
    ("kind", "twin", "most", "room"),
    [
        ("cuda", "fastattn", 5, 16),
        ("cuda", "fastattn", 4, 0),
        ("cuda", "refattn", 5, 0),
        ("cpu", "fastattn", 5, 0),
    ],
)
def test_where_rings_are_used_unless_something_else_is_asked_for(qwen, kind, twin, most, room, monkeypatch):
    pools = make_engine(qwen).layer_pools
    pools._where = dict(pools._where)
    allocated = []
    monkeypatch.setattr(type(pools.state_layers[0]), "allocate", lambda self, twin, slots, **_: allocated.append(slots))
    pools._where["device"], pools._twin = torch.device(kind), SimpleNamespace(package=importlib.import_module(twin))
    slots = pools.allocate_states(most, 0, None, block_size=4, decode_len=1, ahead=False)
    assert (slots.rings is None) == (room == 0) and (not room or (slots.rings.ring_size, slots.rings.few) == (room, 4))


REFUSED = {
    "less than none": (dict(state_ring_size=-1), "state_ring_size: expected None or an int of at least 0, got -1"),
    "no number": (dict(state_ring_size=True), "state_ring_size: expected None or an int of at least 0, got True"),
    "no room for drafts": (
        dict(state_ring_size=4, speculation=NGram(max_drafts=4)),
        "state_ring_size: expected room for the 5 tokens of a decode with drafts, got 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(qwen, name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_engine(qwen, **options)
    assert outputs(make_engine(qwen, state_ring_size=0), [SYSTEM])
