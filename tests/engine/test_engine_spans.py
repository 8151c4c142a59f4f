"""Spans of prompts in the engine: tokens of an image, or of a prefix, that see one another.

The tokens stand for themselves, as no encoder of images is served. Each logit is compared with those of transformers,
which are given the spans as `token_type_ids`.
"""

from functools import partial

import pytest
import torch

import twinattn.engine.choice
import twinattn.engine.cuda_graphs
import twinattn.engine.scheduler
from tests.helpers.drafts import Wild
from tests.helpers.engines import TWINS, Watched, make_engine
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import CHANGES, make_family, make_llama
from twinattn.engine import CudaGraphs, Prompt, Request, SamplingParams
from twinattn.engine.block_pool import block_key
from twinattn.engine.planner import StepPlanner

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=())
START, FIRST, SECOND = [5, 9, 2, 6], [81, 80, 83, 84, 85, 86], [31, 30, 33, 34, 35, 36]
IMAGES = [
    Prompt([*START, *FIRST, 7, 8, 50], [(2, 9)]),  # from the middle of a block on, longer than the window
    Prompt([*START, *SECOND, 7, 8, 50], [(2, 9)]),  # the same first block, but other tokens see one another
    Prompt([*START, *SECOND, 7, 8, 51], [(2, 9)]),
    Prompt([*START, *SECOND, 7, 8, 51]),
    Prompt([3, *range(60, 78)], [(1, 4), (6, 6), (9, 16)]),
]
PREFIXES = [
    Prompt([*START, *FIRST, 7, 8], [(0, 7)]),
    Prompt([*START, *FIRST, 7, 9], [(0, 11)]),  # all of it
    Prompt([*START, *FIRST, 7, 8, 50], [(0, 7)]),
    Prompt([*START, *FIRST], []),
]
MODELS = {"gemma3": IMAGES, "paligemma": PREFIXES}


def transformers_logits(model, prompt):
    """Return the logits of the generated tokens, and the tokens."""
    is_prefix = model.config.model_type == "paligemma"
    kinds = torch.full((1, len(prompt.tokens)), int(is_prefix), device=model.device)
    for first, last in prompt.spans:
        kinds[0, first : last + 1] = int(not is_prefix)
    model.set_attn_implementation("eager")
    answer = model.generate(
        torch.tensor([prompt.tokens], device=model.device),
        token_type_ids=kinds,
        max_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(answer.logits), answer.sequences[0, len(prompt.tokens) :].tolist()


@pytest.fixture(scope="module")
def expected(device):
    """Models, and what transformers says to each prompt."""
    models = {name: make_family(name, device, **CHANGES[name]) for name in MODELS}
    return {name: (model, [transformers_logits(model, p) for p in MODELS[name]]) for name, model in models.items()}


@pytest.fixture(scope="module")
def gemma(expected):
    return expected["gemma3"][0]


def answers(engine, prompts, monkeypatch):
    """Return the logits that each token was chosen from, and the tokens."""
    rows = {}

    def watch(choose, logits, requests, *others, **how):
        for request, row in zip(requests, logits, strict=True):
            rows.setdefault(request, []).append(row)
        return choose(logits, requests, *others, **how)

    with monkeypatch.context() as watched:
        watched.setattr(twinattn.engine.choice, "choose", partial(watch, twinattn.engine.choice.choose))
        requests = engine.generate(prompts, SAMPLING)
    assert [request.error for request in requests] == [None] * len(prompts)
    return [(torch.stack(rows[request]), request.output_ids) for request in requests]


def assert_close(found, expected):
    for (logits, tokens), (right, right_tokens) in zip(found, expected, strict=True):
        assert tokens == right_tokens
        torch.testing.assert_close(logits, right, rtol=0, atol=2e-5 * float(right.std()))


def test_what_sees_what_decides(gemma, expected):
    """Else nothing here would show that it is right."""
    logits = [logits[0] for logits, _ in expected["gemma3"][1]]
    without, _ = transformers_logits(gemma, Prompt(IMAGES[0].tokens))
    for other in (without[0], logits[1]):
        assert float((logits[0] - other).abs().max()) > 0.01 * float(logits[0].std())
    assert float((logits[2] - logits[3]).abs().max()) > 0.01 * float(logits[2].std())


SCHEDULES = {
    "as long as a span": dict(max_num_batched_tokens=12, max_num_seqs=2),  # with pools of their own for windows
    "smallest pool": dict(num_blocks=7, max_num_batched_tokens=12),
    "graphs": dict(runner=CudaGraphs()),
}


@pytest.mark.covers("F215")
@pytest.mark.parametrize(("name", "schedule", "twin"), every_pair(MODELS, SCHEDULES, TWINS))
def test_logits_are_those_of_transformers(expected, name, schedule, twin, monkeypatch):
    """In chunks, beside others, after a preemption; and with prefixes that are found the second time."""
    model, right = expected[name]
    options = dict(SCHEDULES[schedule])
    if "runner" in options:
        options["runner"] = CudaGraphs()
        options["runner"].records = False  # a runner would launch the steps and choose their tokens there
        monkeypatch.setattr(options["runner"], "run", lambda engine, tokens: check_no_spans(tokens))
        monkeypatch.setattr(options["runner"], "launch", lambda engine, requests: None)  # it chooses by itself
    engine = make_engine(model, twin, **options)
    assert engine.window_pools or name == "paligemma" or schedule != "as long as a span"
    assert_close(answers(engine, MODELS[name], monkeypatch), right)
    cached = engine.counters.cached_blocks
    assert_close(answers(engine, MODELS[name][:3], monkeypatch), right[:3])
    assert engine.counters.cached_blocks > cached or schedule != "graphs"


def test_a_prompt_with_spans_waits_for_the_step_under_way(expected, device, monkeypatch):
    """Its own step is launched, and decodes after it are launched ahead."""
    if device == "cpu":
        monkeypatch.setattr(twinattn.engine.cuda_graphs, "_record", lambda step, memory, name: step)
    model, _ = expected["paligemma"]
    prompts = [PREFIXES[0], Prompt(list(range(60, 73)), [(0, 7)]), Prompt(list(range(40, 53)))]
    plain = make_engine(model).generate(prompts, SAMPLING)
    engine = make_engine(model, "fastattn", runner=Watched(device), max_num_batched_tokens=12)
    requests = engine.generate(prompts, SAMPLING)
    assert [request.output_ids for request in requests] == [request.output_ids for request in plain]
    assert [sorted(counts) for counts in engine.runner.ahead] == [[1, 1, 4]], "the last one, which has no spans"


def check_no_spans(tokens):
    """Stand in for a runner, which replays steps without spans alone; None leaves the step to the engine."""
    assert tokens.spans is None


@pytest.mark.covers("F215")
def test_a_span_is_computed_as_a_whole(gemma, monkeypatch):
    """Whatever else a step has room for; and it begins as soon as there is room for all of it."""
    engine = make_engine(gemma, max_num_batched_tokens=9, max_num_seqs=2)
    schedule, steps = engine.scheduler.schedule, []

    def watched():
        scheduled = schedule()
        steps.append({r: (r.num_computed_tokens, r.num_computed_tokens + n) for r, n in scheduled.items()})
        return scheduled

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    first, second = (engine.add(prompt, SAMPLING) for prompt in (IMAGES[4], IMAGES[0]))
    while engine.running or engine.waiting:
        engine.step()
    assert [step.get(first) for step in steps][:3] == [(0, 9), (9, 18), (18, 19)]
    assert [step.get(second) for step in steps][:5] == [None, None, (0, 2), (2, 10), (10, 13)]


@pytest.mark.covers("F215")
def test_a_prefix_is_found_up_to_a_span_and_with_the_same_spans(gemma):
    """A block has the tokens of every span that it has a part of, so those that see other tokens are not found."""
    engine = make_engine(gemma)

    def found(tokens, *spans):
        request = Request([*tokens, 0], len(tokens) + 1, SAMPLING, spans=spans)
        return len(engine.scheduler._find(request))

    engine.generate([IMAGES[0]], SAMPLING)
    tokens = IMAGES[0].tokens
    others = [(), ((2, 8),), ((2, 9), (11, 12))]
    assert [found(tokens, *spans) for spans in (IMAGES[0].spans, *others)] == [3, 0, 0, 0]
    assert found(tokens[:9], (2, 9)) == 0, "which ends inside"
    assert found([*START, *SECOND, 7, 8], (2, 9)) == 0
    engine.generate([IMAGES[4]], SAMPLING)
    tokens = IMAGES[4].tokens
    assert len(engine.pool.find(tokens, IMAGES[4].spans)) == 4
    assert found(tokens, *IMAGES[4].spans) == 2, "as the fourth block ends inside of the last span"
    assert found([*tokens[:16], 0, 0, 0], *IMAGES[4].spans) == 2, "of which the first two hold nothing"


def test_drafts_are_chains_beside_a_span(gemma, expected):
    """A tree has no intervals."""
    engine = make_engine(gemma, max_num_batched_tokens=16, speculation=Wild(3, max_branches=3))
    sampling = [SamplingParams(max_tokens=tokens, stop_token_ids=()) for tokens in (30, 4, 4)]
    requests = engine.generate([[11, 12], *IMAGES[:2]], sampling)
    assert [request.error for request in requests] == [None] * 3
    assert [request.output_ids for request in requests[1:]] == [tokens for _, tokens in expected["gemma3"][1][:2]]
    assert engine.counters.drafted_tokens > 0


def test_spans_that_are_refused(gemma, shapes_unchecked):
    tokens, engine = list(range(1, 20)), make_engine(gemma, max_num_batched_tokens=8)
    for spans in ([(3, 2)], [(0, 19)], [(-1, 3)], [(5, 7), (7, 9)], [(5, 7), (1, 3)]):
        with pytest.raises(ValueError, match=r"spans: expected first and last tokens in 0\.\.18, rising"):
            engine.add(Prompt(tokens, spans))
    for spans in ([3], [(1, 2, 3)], [(1.0, 2)], [(True, 2)]):
        with pytest.raises(ValueError, match="spans: expected pairs of ints"):
            engine.add(Prompt(tokens, spans))
    with pytest.raises(ValueError, match="at most max_num_batched_tokens=8 tokens in a span, .* got 9"):
        engine.add(Prompt(tokens, [(3, 11)]))
    with pytest.raises(ValueError, match="spans: expected none in a model of the family llama"):
        make_engine(make_llama()).add(Prompt(tokens, [(3, 5)]))
    assert not engine.waiting


# --- mistakes, and that what is compared above shows them ---


def forgets_spans(monkeypatch):
    """A block is found by its tokens alone."""
    for module in (twinattn.engine.scheduler, twinattn.engine.block_pool):
        monkeypatch.setattr(module, "block_key", lambda tokens, start, size, spans=(): block_key(tokens, start, size))


def cuts_spans(monkeypatch):
    """A step takes as many tokens as there is room for."""
    monkeypatch.setattr(Request, "cut", lambda self, count: min(count, self.num_pending))


def sees_none(monkeypatch):
    """A step is planned as if it had no spans."""
    monkeypatch.setattr(StepPlanner, "plan_spans", lambda self, step, *_: step)


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("mistake", [forgets_spans, cuts_spans, sees_none])
def test_a_mistake_is_seen(gemma, expected, mistake, monkeypatch):
    mistake(monkeypatch)
    engine = make_engine(gemma, max_num_batched_tokens=9)
    with pytest.raises(AssertionError):
        for prompt, right in zip(IMAGES, expected["gemma3"][1], strict=True):
            assert_close(answers(engine, [prompt], monkeypatch), [right])
