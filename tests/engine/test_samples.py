"""Several samples of a prompt: it is computed once, its blocks are shared, and a block is copied before a write.

Sample i has the random numbers of the seed of its request and i, so its tokens are those of a request with that seed.
"""

from dataclasses import replace
from itertools import chain

import pytest
import torch

import twinattn.engine.choice
import twinattn.engine.cuda_graphs
import twinattn.engine.outputs
from tests.helpers.engines import MODELS, SYSTEM, TWINS, Watched, assert_nothing_is_held, make_engine, outputs
from tests.helpers.pairs import every_pair
from tests.helpers.samples import alone, assert_the_prefix_is_shared, samples_of
from tests.helpers.tiny_models import byte_tokenizer, make_llama, make_model
from twinattn.engine import NGram, Request, SamplingParams, WindowPool
from twinattn.engine.scheduler import Scheduler

WARM = SamplingParams(max_tokens=6, temperature=1.0, seed=5, stop_token_ids=())
FOUR = replace(WARM, n=4)
LONG = [*SYSTEM, 40, 41]  # three full blocks of 4, and three tokens of a fourth
PROMPTS = [LONG, [7, 3] * 6, [11]]  # with a partly filled last block, a full one, and a single token


@pytest.fixture(scope="module")
def llama(device):
    return make_llama().to(device)


# --- the tokens ---


@pytest.mark.covers("G228")
@pytest.mark.parametrize("twin", TWINS)
def test_a_sample_is_a_request_with_its_seed(llama, twin):
    engine = make_engine(llama, twin)
    requests = engine.generate(PROMPTS, FOUR)
    found = [[sample.output_ids for sample in request.samples] for request in requests]
    assert found == [alone(llama, twin, prompt, FOUR) for prompt in PROMPTS]
    assert all(len({*map(tuple, samples)}) == 4 for samples in found), "they differ"
    assert samples_of(engine, PROMPTS, FOUR) == found, "and with the same seed they are the same again"
    assert_nothing_is_held(engine)


SCHEDULES = {
    "chunks": dict(max_num_batched_tokens=5),
    "few blocks": dict(num_blocks=8, max_num_batched_tokens=16),
    "few requests": dict(max_num_seqs=4, block_size=3),
    "one token per step": dict(max_num_batched_tokens=1),
}


@pytest.mark.covers("G228")
@pytest.mark.parametrize(
    ("schedule", "layers", "twin"), every_pair(SCHEDULES, ["plain", "window and full, softcap, scale"], TWINS)
)
def test_chunks_preemptions_and_other_requests_change_nothing(llama, schedule, layers, twin, device):
    """Greedy requests come before and after; few blocks preempt samples, which are computed again one by one."""
    model = llama if layers == "plain" else make_model(*MODELS[layers], device)
    engine = make_engine(model, twin, **SCHEDULES[schedule])
    greedy = SamplingParams(max_tokens=4, stop_token_ids=())
    samplings = [greedy, FOUR, replace(FOUR, n=3, seed=9), greedy]
    prompts = [[2, 3], LONG, PROMPTS[1], [*LONG, 50]]
    expected = [alone(model, twin, *case) for case in zip(prompts, samplings, strict=True)]
    assert samples_of(engine, prompts, samplings) == expected
    assert (engine.counters.preemptions > 0) == (schedule == "few blocks")
    assert_nothing_is_held(engine)


def test_drafts_change_nothing(llama):
    prompts = [[5, 6, 7, 8] * 3, [9]]
    expected = samples_of(make_engine(llama), prompts, FOUR)
    for branches in (1, 3):
        engine = make_engine(llama, speculation=NGram(max_drafts=3, max_branches=branches, max_ngram=1))
        assert samples_of(engine, prompts, FOUR) == expected
        assert engine.counters.drafted_tokens > 0
        assert_nothing_is_held(engine)


@pytest.mark.usefixtures("steps_as_recordings")
def test_steps_launched_ahead_change_nothing(llama, device):
    """The step in which samples begin is read before the next one; all others are launched ahead as ever."""
    prompts = [*PROMPTS, [7, 3] * 20]  # the last one in chunks, and a step with one of them is under way
    expected = samples_of(make_engine(llama, "fastattn"), prompts, FOUR)
    engine = make_engine(llama, "fastattn", runner=Watched(device), max_num_batched_tokens=16)
    assert samples_of(engine, prompts, FOUR) == expected
    said = engine.runner.said
    ahead = [said.index(f"launch {i + 1}") < said.index(f"read {i}") for i in range(1, engine.runner.count)]
    assert {True, False} == {*ahead} and len(engine.runner.rows) >= 4
    assert_nothing_is_held(engine)


# --- the blocks ---


@pytest.mark.covers("G228")
@pytest.mark.parametrize("twin", TWINS)
def test_a_prompt_is_computed_and_found_once(llama, twin):
    """Then each sample computes what it has drawn; its last token never goes through the model."""
    engine = make_engine(llama, twin)
    samples_of(engine, [LONG], FOUR)
    assert engine.counters.computed_tokens == len(LONG) + 4 * 5
    assert (engine.counters.copied_blocks, engine.counters.chunks) == (3, 1)
    samples_of(engine, [LONG], FOUR)
    assert (engine.counters.cached_blocks, engine.counters.cached_tokens) == (3, 12)
    assert engine.counters.computed_tokens == len(LONG) + 3 + 2 * 4 * 5


@pytest.mark.covers("G228")
@pytest.mark.parametrize(("prompt", "copies"), [(LONG, 3), (PROMPTS[1], 0), ([11], 3)])
def test_blocks_are_shared_until_somebody_writes(llama, prompt, copies):
    engine = make_engine(llama, "fastattn")
    request = engine.add(prompt, FOUR)
    engine.step()
    count = -(-len(prompt) // 4)
    assert [sample.blocks for sample in request.samples] == [request.blocks] * 4 and len(request.blocks) == count
    assert [engine.pool.users[block] for block in request.blocks] == [4] * count
    assert len(engine.pool.users) - len(engine.pool.free) == count
    shared = request.blocks[len(prompt) // 4 :]
    keys = [cache[0][shared].clone() for cache in engine.caches]
    engine.step()
    assert engine.counters.copied_blocks == copies
    assert_the_prefix_is_shared(engine, request)
    for cache, before in zip(engine.caches, keys, strict=True):  # what was copied, and written behind it
        for sample in request.samples:
            for old, block in zip(before, sample.blocks[len(prompt) // 4 :], strict=bool(copies)):
                torch.testing.assert_close(cache[0][block, : len(prompt) % 4], old[: len(prompt) % 4])
    engine.abort(request)
    assert_nothing_is_held(engine)


def test_the_last_one_writes_in_place(llama):
    """Those that end before they write free their share."""
    engine = make_engine(llama)
    request = engine.add(LONG, FOUR)
    engine.step()
    last = request.blocks[-1]
    for sample in request.samples[1:]:
        engine.abort(sample)
    engine.step()
    assert engine.counters.copied_blocks == 0 and request.blocks[3] == last
    assert engine.pool.users[last] == 1


def test_blocks_and_users_are_those_of_the_drawing():
    """The one in the docstring of the scheduler, with a window pool beside."""
    window = WindowPool(6, 8, window_size=(3, 0), block_size=4)
    scheduler = Scheduler(8, 4, max_num_batched_tokens=16, max_num_seqs=4, window_pools=[window])
    window.hold("another sequence", 5, 5, [6, 7])  # so that blocks have other numbers here
    first, second = (Request([1, 2, 3, 4, 5, 6], 6, WARM, index=i) for i in range(2))
    first.others = [second]
    scheduler.waiting.append(first)
    assert scheduler.schedule() == {first: 6} and first.unforked == [second]
    scheduler.keep(first, 6)
    scheduler.fork(first)
    for request in first.samples:
        request.tokens.append(7)
    nine, two = first.blocks
    assert (second.blocks, second.status, scheduler.running) == ([nine, two], "running", [first, second])
    assert [scheduler.pool.users[block] for block in (nine, two)] == [2, 2]
    assert scheduler.schedule() == {first: 1, second: 1}
    five = first.blocks[1]
    assert (first.blocks, second.blocks) == ([nine, five], [nine, two]) and five not in (nine, two)
    assert [scheduler.pool.users[block] for block in (nine, two, five)] == [2, 1, 1]
    places = window.window_block[two], window.window_block[five]
    assert scheduler.take_copies() == {None: [(two, five)], window: [places]} and places[0] != places[1]
    assert scheduler.take_copies() == {}
    del window.held["another sequence"]
    assert window.held == {first: {nine, five}, second: {nine, two}}


def test_samples_start_when_all_of_them_have_room(llama):
    engine = make_engine(llama, max_num_seqs=4)
    alone_at_first, several = engine.add([1, 2, 3], WARM), engine.add(LONG, FOUR)
    for _ in range(5):
        engine.step()
        assert (several.status, engine.running) == ("waiting", [alone_at_first])
    for _ in range(2):
        engine.step()
    assert engine.running == several.samples


# --- their ends ---


def test_each_sample_ends_by_itself(llama):
    """By a stop token or by its length; the first token may be the last one."""
    whole = samples_of(make_engine(llama), [LONG], FOUR)[0]
    stop = whole[0][0]
    engine = make_engine(llama)
    (request,) = engine.generate([LONG], replace(FOUR, stop_token_ids=(stop, whole[2][3])))
    for sample, tokens in zip(request.samples, whole, strict=True):
        ends = [place for place, token in enumerate(tokens) if token in (stop, whole[2][3])]
        assert sample.output_ids == tokens[: ends[0] + 1 if ends else None]
        assert sample.finish_reason == ("stop" if ends else "length")
    assert len(request.output_ids) == 1 and {sample.finish_reason for sample in request.samples} == {"stop", "length"}
    (request,) = engine.generate([LONG], replace(FOUR, max_tokens=1))
    assert [sample.output_ids for sample in request.samples] == [tokens[:1] for tokens in whole]
    assert_nothing_is_held(engine)


def test_a_stream_has_the_tokens_of_all_samples(llama):
    engine = make_engine(llama, tokenizer=byte_tokenizer())
    events = list(engine.stream([LONG, [11]], [FOUR, WARM]))
    requests = list(dict.fromkeys(event.request for event in events))
    assert [request.index for request in requests] == [0, 1, 2, 3, 0]
    for request in requests:
        own = [event for event in events if event.request is request]
        assert [event.finish_reason for event in own] == [None] * 5 + ["length"]
        assert [event.token_id for event in own] == request.output_ids and len(own) == 6
        assert "".join(event.text for event in own) == request.text != ""
    assert len({request.text for request in requests}) == 5


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "in chunks", "forked"])
@pytest.mark.parametrize("which", ["request", "sample", "alone"])
def test_samples_are_aborted_together_or_alone(llama, steps, which):
    """Before its prompt is computed, the first sample stands for all."""
    engine = make_engine(llama, max_num_batched_tokens=8)
    request = engine.add(LONG, FOUR)
    for _ in range(steps):
        engine.step()
    assert request.status == ("running" if steps else "waiting")
    if which == "sample":
        engine.abort(request.samples[2])
    else:
        engine.abort(request, alone=which == "alone")
    gone = {"request": [0, 1, 2, 3], "sample": [2], "alone": [0, 1, 2, 3] if steps < 3 else [0]}[which]
    assert [i for i, sample in enumerate(request.samples) if sample.finish_reason == "abort"] == gone
    while engine.running or engine.waiting:
        engine.step()
    for sample, tokens in zip(request.samples, alone(llama, "refattn", LONG, FOUR), strict=True):
        assert sample.output_ids == tokens[: len(sample.output_ids) if sample.index in gone else None]
    assert_nothing_is_held(engine)


def test_a_stream_that_is_left_ends_all_samples(llama):
    engine = make_engine(llama)
    stream = engine.stream([LONG], FOUR)
    request = next(stream).request
    stream.close()
    assert [sample.finish_reason for sample in request.samples] == ["abort"] * 4
    assert_nothing_is_held(engine)


# --- what is refused, and what fails ---


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2"])
def test_a_number_of_samples_is_an_int_of_at_least_1(n):
    with pytest.raises(ValueError, match=f"n: expected an int of at least 1, got {n!r}"):
        SamplingParams(temperature=1.0, n=n)


def test_what_cannot_be_is_refused_and_nothing_is_queued(llama):
    with pytest.raises(ValueError, match="n: expected 1 with temperature=0, as greedy samples are all equal, got 2"):
        SamplingParams(n=2)
    engine = make_engine(llama, max_num_seqs=3)
    message = "n: expected at most max_num_seqs=3 samples, which run at once, got 4"
    for call in (engine.add, lambda *asked: engine.generate([[1], asked[0]], [WARM, asked[1]])):
        with pytest.raises(ValueError, match=message):
            call(LONG, FOUR)
    assert not engine.waiting
    assert samples_of(engine, [LONG], replace(FOUR, n=3)) == [alone(llama, "refattn", LONG, replace(FOUR, n=3))]


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("how", ["the model raises", "logits are not finite"])
def test_a_prompt_that_fails_fails_for_all_of_its_samples(llama, how, monkeypatch):
    engine, choose = make_engine(llama), twinattn.engine.choice.choose
    run = engine.run_model

    def run_model(inputs):
        if how == "the model raises" and 66 in inputs["input_ids"]:
            raise RuntimeError("no such row")
        return run(inputs)

    def spoil(logits, requests, *ahead, **options):
        rows = torch.tensor([66 in request.tokens for request in requests], device=logits.device)
        return choose(logits.masked_fill(rows[:, None], torch.nan), requests, *ahead, **options)

    bad, good = engine.add([66, 2, 3], FOUR), engine.add(LONG, FOUR)
    with monkeypatch.context() as broken:
        broken.setattr(engine, "run_model", run_model)
        if how != "the model raises":
            broken.setattr(twinattn.engine.choice, "choose", spoil)
        events = engine.step()
    error = "RuntimeError: no such row" if how == "the model raises" else "FloatingPointError: logits"
    assert {event.request for event in events if event.error} == {*bad.samples}
    assert all(sample.finish_reason == "error" and sample.error.startswith(error) for sample in bad.samples)
    while engine.running:
        engine.step()
    assert [sample.output_ids for sample in good.samples] == alone(llama, "refattn", LONG, FOUR)
    assert_nothing_is_held(engine)


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("index", [0, 2])
def test_a_sample_without_a_text_fails_alone(llama, index, monkeypatch):
    """If it is the first one, the others compute the prompt again: its blocks are gone."""
    new_text = twinattn.engine.outputs.new_text

    def broken(tokenizer, request, *others):
        if request.index == index:
            raise UnicodeError("no such token")
        return new_text(tokenizer, request, *others)

    monkeypatch.setattr(twinattn.engine.outputs, "new_text", broken)
    engine = make_engine(llama, tokenizer=byte_tokenizer())
    request = engine.add(LONG, FOUR)
    for _ in range(20):
        engine.step()
    for sample, tokens in zip(request.samples, alone(llama, "refattn", LONG, FOUR), strict=True):
        fails = sample.index == index
        assert (sample.output_ids, sample.finish_reason) == (([], "error") if fails else (tokens, "length"))
    assert_nothing_is_held(engine)


def test_a_step_that_is_interrupted_forks_again(llama, monkeypatch):
    """Ctrl-C after the first samples have got their tokens."""
    engine = make_engine(llama, max_num_batched_tokens=10)
    request, commit, count = engine.add(LONG, FOUR), engine.outputs.commit, []

    def interrupt(*arguments):
        commit(*arguments)
        count.append(arguments[0])
        if len(count) == 4:
            raise KeyboardInterrupt

    engine.step()
    monkeypatch.setattr(engine.outputs, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [*engine.waiting] == [request] and [sample.tokens for sample in request.samples] == [LONG] * 4
    monkeypatch.setattr(engine.outputs, "commit", commit)
    while engine.waiting or engine.running:
        engine.step()
    assert [sample.output_ids for sample in request.samples] == alone(llama, "refattn", LONG, FOUR)
    assert_nothing_is_held(engine)


def test_one_sample_is_the_request_itself(llama):
    engine = make_engine(llama)
    (request,) = engine.generate([LONG], WARM)
    assert (request.samples, request.index, request.sampling) == ([request], 0, WARM)
    assert [*chain.from_iterable(outputs(engine, [LONG], WARM))] == request.output_ids
