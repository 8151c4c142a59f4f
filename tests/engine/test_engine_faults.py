"""One bad request changes no other request's output, and an exception anywhere leaves an engine that goes on.

Whatever goes wrong, each request gets the answer that it gets alone, or it is one that something went wrong with, and
then it says so; and every block is free or counted for those who use it.
"""

import ast
import gc
import importlib
import inspect
import textwrap
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    run_state_machine_as_test,
)

import refattn.chunked_prefill
import twinattn.engine.block_pool
import twinattn.engine.choice
import twinattn.engine.cuda_graphs
import twinattn.engine.engine
import twinattn.engine.outputs
import twinattn.engine.scheduler
from tests.helpers.engines import MODELS
from tests.helpers.faults import (
    GREEDY,
    MIXED,
    PROMPTS,
    SYSTEM,
    WARM,
    EngineMachine,
    FastEngineMachine,
    Interrupt,
    Letters,
    Scripted,
    WindowMachine,
    assert_nothing_is_held,
    assert_the_books_are_right,
    finish,
    scripted_answers,
    scripted_model,
)
from tests.helpers.tiny_models import make_llama, make_model
from twinattn.engine import CudaGraphs, Engine, Event, Request, SamplingParams, fast_sampling, sampling

pytestmark = pytest.mark.lets_a_pass_fail
TWINS = ("refattn", "fastattn")
NAN = 96  # a token whose embedding is NaN, and so are the keys, values and logits of every query that sees it
BAD = [*SYSTEM, NAN, 41]
SHORT = SamplingParams(max_tokens=3)


def with_nan(model):
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN] = torch.nan
    return model


@pytest.fixture(scope="module")
def llama(device):
    return with_nan(make_llama(device))


def make_engine(model, twin="refattn", **options):
    sizes = dict(num_blocks=40, block_size=4, max_num_batched_tokens=64) | options
    return Engine(model, twin=importlib.import_module(twin), **sizes)


def answers_alone(model, prompts=PROMPTS, samplings=MIXED):
    """Answer each prompt in an engine of its own."""
    return [
        make_engine(model).generate([prompt], sampling)[0].output_ids
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(llama):
    return answers_alone(llama)


def ends(requests):
    return [request.finish_reason for request in requests]


# A request whose numbers are not finite.


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
@pytest.mark.parametrize("twin", TWINS)
def test_logits_that_are_not_finite_fail_their_request_only(llama, alone, twin, sampling, caplog):
    engine = make_engine(llama, twin)
    requests = engine.generate([BAD, *PROMPTS], [sampling, *MIXED])
    assert [request.output_ids for request in requests] == [[], *alone]
    assert ends(requests) == ["error", *["length"] * len(PROMPTS)]
    assert requests[0].error == "FloatingPointError: logits: expected finite numbers, got NaN or infinity"
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("value", "is_bad"), [(torch.nan, True), (torch.inf, True), (-torch.inf, False)], ids=["nan", "inf", "-inf"]
)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one token", "every token"])
def test_which_logits_are_an_error(value, is_bad, everywhere):
    """A token that cannot come has a logit of -inf; a request whose every token cannot come is an error."""
    requests = [Request([1], 1, sampling) for sampling in (GREEDY, WARM, GREEDY, WARM)]
    logits = torch.arange(5.0).expand(4, 5).clone()
    logits[:2, slice(None) if everywhere else 4] = value
    good = twinattn.engine.choice.choose(torch.arange(5.0).expand(4, 5), requests)
    chosen = twinattn.engine.choice.choose(logits, requests)
    assert chosen[2:] == good[2:]
    if is_bad or everywhere:
        assert chosen[:2] == [None, None]
    else:
        assert chosen[0] == 3 and chosen[1] in range(4)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("kind", ["full", *MODELS])
def test_what_a_bad_request_leaves_in_the_pool_is_not_read(kind, twin, device):
    """Its NaN is in blocks that the others get next, and past their own keys in the last of them."""
    model = with_nan(make_llama(device) if kind == "full" else make_model(*MODELS[kind], device))
    expected = [request.output_ids for request in make_engine(model).generate(PROMPTS, SHORT)]
    for block_size, num_blocks in ((4, 9), (8, 5)):
        engine = make_engine(model, twin, num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=30)
        assert ends(engine.generate([[3, *[NAN] * 32]], SHORT)) == ["error"]
        assert all(cache[..., -1].isnan().any() for cache in engine.caches[0])
        assert [request.output_ids for request in engine.generate(PROMPTS, SHORT)] == expected


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf, 1e4])
def test_what_others_left_in_the_pool_is_not_read(llama, alone, twin, rubbish):
    engine = make_engine(llama, twin, num_blocks=12, max_num_batched_tokens=11)
    for key_cache, value_cache in engine.caches:
        key_cache.fill_(rubbish)
        value_cache.fill_(rubbish)
    assert [request.output_ids for request in engine.generate(PROMPTS, MIXED)] == alone


def test_blocks_of_a_failed_request_are_not_found(llama, alone):
    """Others that use them keep them, and what was there before the failure is computed again."""
    engine = make_engine(llama)
    first = engine.add(PROMPTS[1], WARM)
    engine.step()
    assert len(engine.pool.find(SYSTEM)) == 2
    bad = engine.add(BAD, GREEDY)
    engine.step()
    assert (bad.finish_reason, engine.counters.cached_blocks) == ("error", 2), "it had found the first two blocks"
    assert engine.pool.find(SYSTEM) == []
    second = engine.add(PROMPTS[3], WARM)
    finish(engine)
    assert [first.output_ids, second.output_ids] == [alone[1], alone[3]]
    assert engine.counters.cached_blocks == 2, "no request found what the bad one had used"
    assert_nothing_is_held(engine)


# A request that makes something raise.


def raising_over(model, token, error, *, only_with_others=False):
    """Make the model raise over every batch with a token in it."""

    def check(_module, arguments):
        if (arguments[0] == token).any() and (not only_with_others or arguments[0].shape[1] > 1):
            raise error

    return model.get_input_embeddings().register_forward_pre_hook(check)


@pytest.fixture
def hooks():
    """Hooks of a model that are taken out after the test."""
    added = []
    yield added
    for hook in added:
        hook.remove()


@pytest.mark.parametrize(
    "error", [RuntimeError("no such row"), torch.OutOfMemoryError("CUDA out of memory."), AssertionError()], ids=repr
)
@pytest.mark.parametrize("twin", TWINS)
def test_a_pass_that_raises_fails_only_who_raises_alone(llama, alone, twin, error, hooks, caplog):
    engine = make_engine(llama, twin, max_num_batched_tokens=20)
    hooks.append(raising_over(llama, 77, error))
    requests = engine.generate([*PROMPTS[:2], [77, 1, 2], *PROMPTS[2:]], [*MIXED[:2], GREEDY, *MIXED[2:]])
    bad = requests.pop(2)
    assert (bad.finish_reason, bad.error, bad.output_ids) == ("error", f"{type(error).__name__}: {error}", [])
    assert [request.output_ids for request in requests] == alone
    assert "a pass over 1 requests failed" in caplog.text and type(error).__name__ in caplog.text
    assert_nothing_is_held(engine)


def test_a_step_that_is_too_large_is_run_in_pieces(llama, hooks, monkeypatch):
    """No request is at fault where each of them runs alone, and the counters count what was computed, once."""
    prompts = [[77, 1, 2], [3, 77]]
    expected = make_engine(llama)
    answers = [request.output_ids for request in expected.generate(prompts, GREEDY)]
    engine = make_engine(llama)
    run = engine.run_model

    def run_some(inputs):
        if inputs["step"].batch.num_seqs > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(inputs)

    monkeypatch.setattr(engine, "run_model", run_some)
    requests = engine.generate(prompts, GREEDY)
    assert [request.output_ids for request in requests] == answers
    assert engine.counters == expected.counters


def test_a_pass_that_failed_holds_no_memory_when_it_is_run_again(llama, hooks, monkeypatch):
    """What it had allocated is gone, or the second try would be out of memory too."""
    monkeypatch.setattr(
        twinattn.engine.engine.logger, "disabled", True
    )  # pytest keeps what is logged, with all its frames
    large = []

    def allocate(_module, arguments):
        assert not large or large[-1]() is None
        mine = torch.zeros(1000)
        large.append(ref(mine))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    engine = make_engine(llama)
    hooks.append(llama.get_input_embeddings().register_forward_pre_hook(allocate))
    assert ends(engine.generate(PROMPTS, MIXED)) == ["error"] * len(PROMPTS)
    assert len(large) == len(PROMPTS) + 1


def test_where_everything_fails_everybody_is_told_and_the_engine_goes_on(llama, alone, monkeypatch):
    engine = make_engine(llama, max_num_batched_tokens=10)
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, MIXED, strict=True)]
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(refattn.chunked_prefill, "attention", lambda *_, **__: 1 / 0)
        events = engine.step()
    failed = {event.request for event in events}
    assert {(event.token_id, event.error) for event in events} == {(None, "ZeroDivisionError: division by zero")}
    assert failed == {request for request in requests if request.error == "ZeroDivisionError: division by zero"}
    assert 1 < len(failed) < len(requests) and not engine.running
    finish(engine)
    for request, answer in zip(requests, alone, strict=True):
        assert request.output_ids == (answer[: len(request.output_ids)] if request in failed else answer)
        assert request.finish_reason == ("error" if request in failed else "length")
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("twin", TWINS)
def test_a_sampler_that_raises_fails_only_who_raises_alone(llama, alone, twin, monkeypatch):
    module = dict(refattn=sampling, fastattn=fast_sampling)[twin]
    sample = module.sample

    def picky(logits, temperature, top_p, uniform):
        if (temperature == 5.0).any():
            raise RuntimeError("too hot")
        return sample(logits, temperature, top_p, uniform)

    monkeypatch.setattr(module, "sample", picky)
    engine = make_engine(llama, twin)
    requests = engine.generate([[1, 2], *PROMPTS], [SamplingParams(temperature=5.0), *MIXED])
    assert requests[0].error == "RuntimeError: too hot"
    assert [request.output_ids for request in requests] == [[], *alone]
    assert_nothing_is_held(engine)


def test_a_tokenizer_that_raises_fails_the_request_it_raised_for(llama, alone):
    unknown = alone[2][3]
    engine = make_engine(llama, tokenizer=Letters(unknown))
    requests = engine.generate(PROMPTS, MIXED)
    for request, answer in zip(requests, alone, strict=True):
        if unknown in answer:
            assert (request.finish_reason, request.error) == ("error", "KeyError: 'no such letter'")
            answer = answer[: answer.index(unknown)]
        assert request.output_ids == answer
        assert request.text == Letters().decode(answer, True)
    assert len(set(ends(requests))) == 2, "some should fail, and some not"
    assert_nothing_is_held(engine)


def test_a_stream_says_what_failed(llama, alone):
    engine = make_engine(llama)
    events = list(engine.stream([PROMPTS[0], BAD], GREEDY))
    assert [event.token_id for event in events if event.error is None] == alone[0]
    (failed,) = (event for event in events if event.error is not None)
    assert failed == Event(failed.request, None, "", failed.request.error)
    assert failed.request.tokens == BAD


def test_a_model_that_cannot_be_recorded_is_served_all_the_same(llama, alone, monkeypatch, caplog):
    def refuse(step, runner, name):
        raise twinattn.engine.cuda_graphs._RecordingError("LlamaForCausalLM cannot be recorded")

    monkeypatch.setattr(twinattn.engine.cuda_graphs, "_record", refuse)
    engine = make_engine(llama, "fastattn", runner=CudaGraphs())
    engine.runner.records = True
    assert [request.output_ids for request in engine.generate(PROMPTS, MIXED)] == alone
    assert not engine.runner.records
    assert caplog.text.count("its steps are not recorded any more") == 1


@pytest.mark.parametrize("token", [NAN, 77], ids=["nan", "raises"])
def test_recorded_decodes_fail_alone_too(llama, alone, token, steps_as_recordings, monkeypatch, hooks, device):
    engine = make_engine(llama, "fastattn", runner=CudaGraphs())
    engine.runner.records = True
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, MIXED, strict=True)]
    with monkeypatch.context() as waiting:
        waiting.setattr(engine, "_launch_next", lambda before: None)  # its first decode is under way else
        engine.step()
    assert all(request.num_pending == 1 for request in requests)
    requests[2].tokens[-1] = token  # as if it had been its first token
    if token == 77:
        hooks.append(raising_over(llama, 77, RuntimeError("no such row")))
        engine.runner.records = device == "cpu"  # a hook that looks at the tokens cannot be recorded
    finish(engine)
    bad, answer = requests.pop(2), [*alone[:2], *alone[3:]]
    assert bad.finish_reason == "error"
    assert [request.output_ids for request in requests] == answer
    assert_nothing_is_held(engine)


# What ends a step from outside.


@pytest.mark.parametrize("twin", TWINS)
def test_a_step_that_is_interrupted_loses_nothing(llama, alone, twin, monkeypatch):
    """Ctrl-C in the middle of the model; then on as if nothing had been."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    engine = make_engine(llama, twin, max_num_batched_tokens=10)
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, MIXED, strict=True)]
    for _ in range(4):
        engine.step()
        outputs, counters = [request.output_ids for request in requests], replace(engine.counters)
        with monkeypatch.context() as broken:
            broken.setattr(importlib.import_module(f"{twin}.chunked_prefill"), "attention", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert_the_books_are_right(engine)
        assert [request.output_ids for request in requests] == outputs
        assert engine.counters == counters
    finish(engine)
    assert [request.output_ids for request in requests] == alone


@given(
    interrupts=st.lists(st.integers(0, 500), min_size=1, max_size=8),
    num_blocks=st.integers(5, 12),
    max_num_batched_tokens=st.integers(3, 20),
    max_num_seqs=st.integers(1, 5),
    window=st.sampled_from([0, 2]),
)
def test_an_interrupt_at_any_line_loses_nothing(interrupts, num_blocks, max_num_batched_tokens, max_num_seqs, window):
    engine = Scripted(
        scripted_model(window),
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        tokenizer=Letters(),
    )
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, MIXED, strict=True)]
    gone = engine.add([1, 2, 3], GREEDY)
    for nth in interrupts:
        engine.step()
        with suppress(KeyboardInterrupt), Interrupt(nth):
            engine.step()
        assert_the_books_are_right(engine)
        if gone.status != "finished":
            with suppress(KeyboardInterrupt), Interrupt(nth % 50):
                engine.abort(gone)
            engine.abort(gone)  # once more, if it was not
        assert_the_books_are_right(engine)
    finish(engine)
    assert [request.output_ids for request in requests] == scripted_answers()
    assert [request.text for request in requests] == [Letters().decode(answer, True) for answer in scripted_answers()]
    assert_nothing_is_held(engine)


def test_a_step_has_no_comprehension():
    """Python 3.12 runs one in the frame around it, and an interrupt in it may miss that frame's except and finally."""
    step = ast.parse(textwrap.dedent(inspect.getsource(Engine.step)))
    assert any(isinstance(node, ast.Try) for node in ast.walk(step))
    assert not [node for node in ast.walk(step) if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)]


# Streams that are not read to the end, and requests that are aborted during a step.


@pytest.mark.parametrize("reads", [0, 1, 7])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_is_left_frees_its_blocks(llama, alone, reads, how):
    engine = make_engine(llama, max_num_batched_tokens=10)
    kept = engine.add(PROMPTS[4], MIXED[4])
    stream = engine.stream(PROMPTS[:4], MIXED[:4])
    started = [*engine.running, *engine.waiting][1:]
    assert len(started) == 4
    for _ in range(reads):
        next(stream)
    if how == "close":
        stream.close()
    del stream
    assert [request.status for request in started] == ["finished"] * 4
    assert [*engine.running, *engine.waiting] == [kept]
    assert_the_books_are_right(engine)
    finish(engine)
    assert kept.output_ids == alone[4]
    assert_nothing_is_held(engine)


def test_two_streams_get_all_their_tokens(llama, alone):
    """Each of them makes steps for both."""
    engine = make_engine(llama)
    streams = [engine.stream(PROMPTS[:2], MIXED[:2]), engine.stream(PROMPTS[2:], MIXED[2:])]
    texts = {}
    for _ in range(40):
        for stream in streams:
            for event in [event for event in [next(stream, None)] if event]:
                texts.setdefault(event.request, []).append(event.token_id)
    assert sorted(texts.values()) == sorted(alone)
    assert_nothing_is_held(engine)


def during_a_step(engine, monkeypatch, action):
    """Do something in the middle of the next step, while the model runs."""
    run = engine.run_model

    def run_and_act(inputs):
        monkeypatch.setattr(engine, "run_model", run)
        action()
        return run(inputs)

    monkeypatch.setattr(engine, "run_model", run_and_act)
    engine.step()


@pytest.mark.parametrize("place", ["running", "waiting", "last token"])
def test_a_request_aborted_during_a_step_ends_after_it(llama, alone, place, monkeypatch):
    engine = make_engine(llama, max_num_batched_tokens=12)
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, MIXED, strict=True)]
    while len(requests[0].output_ids) < (5 if place == "last token" else 1):
        engine.step()
    gone = engine.waiting[-1] if place == "waiting" else requests[0]
    statuses = []
    during_a_step(engine, monkeypatch, lambda: statuses.append((engine.abort(gone), gone.status)))
    assert statuses == [(None, "waiting" if place == "waiting" else "running")], "its blocks are in use"
    assert gone.finish_reason == ("length" if place == "last token" else "abort")
    finish(engine)
    for request, answer in zip(requests, alone, strict=True):
        assert request.output_ids == (answer[: len(request.output_ids)] if request is gone else answer)
    assert_nothing_is_held(engine)


def test_a_stream_that_is_collected_during_a_step(llama, alone, monkeypatch):
    """The garbage collector runs when it likes."""
    engine = make_engine(llama, max_num_batched_tokens=12)
    kept = engine.add(PROMPTS[4], MIXED[4])
    holder = SimpleNamespace(stream=engine.stream(PROMPTS[:4], MIXED[:4]))
    holder.itself = holder
    next(holder.stream)
    del holder
    during_a_step(engine, monkeypatch, gc.collect)
    assert [*engine.running, *engine.waiting] == [kept]
    finish(engine)
    assert kept.output_ids == alone[4]
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("status", ["waiting", "running"])
def test_a_request_of_another_engine(llama, status, shapes_unchecked):
    ours, theirs = make_engine(llama), make_engine(llama)
    mine, request = ours.add([1, 2]), theirs.add([1, 2])
    for _ in range(status == "running"):
        ours.step()
        theirs.step()
    with pytest.raises(
        ValueError, match=f"request: expected one of this engine, got one of another, which is {status}"
    ):
        ours.abort(request)
    with pytest.raises(ValueError, match="request: expected one that this engine's add returned, got 3"):
        ours.abort(3)
    assert (mine.status, request.status) == (status, status)
    assert_the_books_are_right(ours)
    assert_the_books_are_right(theirs)


# All of it together: requests come and go, are listened to and left, and something fails, anywhere in a step.


@pytest.mark.parametrize(
    "machine", [EngineMachine, FastEngineMachine, WindowMachine], ids=[*TWINS, "fastattn, window pool"]
)
def test_whatever_happens_everybody_gets_the_answer_that_he_gets_alone(machine):
    """An example is a whole life of an engine, so there are few of them; the profile `search` runs more."""
    examples = settings.default.max_examples // 4
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20))
