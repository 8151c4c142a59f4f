"""Drafts by look-up: the answers are those without them, whatever is drafted, in fewer steps where text repeats."""

import copy
import importlib
import re
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import twinattn.engine
import twinattn.engine.cuda_graphs
from tests.helpers.drafts import Oracle, Wild
from tests.helpers.engines import MODELS, PROMPTS, SIZES, TWINS, assert_nothing_is_held, make_engine, outputs
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import make_model
from twinattn.engine import CudaGraphs, Draft, Drafter, DraftModel, NGram, SamplingParams

CHAIN = NGram(max_drafts=4)
TREE = NGram(max_drafts=3, max_branches=3, max_ngram=2)
KINDS = {"chain": CHAIN, "tree": TREE}
LONG = SamplingParams(max_tokens=9)  # long enough to repeat itself
REPEATING = [[5, 6, 7, 8] * 3, [9, 3, 9, 3, 9, 4, 9, 3], [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2], PROMPTS[0]]


# --- what is drafted ---


@pytest.mark.parametrize(
    ("settings", "tokens", "drafted", "parents"),
    [
        (NGram(), [1, 2, 3, 9, 1, 2], (3, 9, 1, 2), (-1, 0, 1, 2, 3)),
        (NGram(max_drafts=2), [1, 2, 3, 9, 1, 2], (3, 9), (-1, 0, 1)),
        (NGram(), [7, 1, 2, 4, 1, 2, 5, 8, 1, 2], (5, 8, 1, 2), (-1, 0, 1, 2, 3)),  # the latest
        (NGram(max_ngram=3), [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], (4, 9, 2, 3), (-1, 0, 1, 2, 3)),  # the longest match
        (NGram(min_ngram=2), [1, 2, 3, 2], None, None),
        (NGram(), [1, 2, 3, 4], None, None),
        (NGram(), [1], None, None),
        (
            NGram(max_drafts=2, max_branches=3),
            [1, 2, 6, 1, 2, 5, 1, 2, 6, 7, 1, 2],
            (6, 7, 5, 1, 1),
            (-1, 0, 1, 0, 3, 1),
        ),
    ],
    ids=str,
)
def test_what_followed_the_last_tokens_is_drafted(settings, tokens, drafted, parents):
    draft = settings.propose(tokens, depth=10, nodes=100)
    assert draft == (None if drafted is None else Draft(drafted, parents))


def test_a_draft_has_the_room_that_there_is():
    tokens = [1, 2, 6, 1, 2, 5, 1, 2, 6, 7, 1, 2]
    settings = NGram(max_drafts=3, max_branches=3)
    assert settings.propose(tokens, depth=1, nodes=100) == Draft((6, 5), (-1, 0, 0))
    assert settings.propose(tokens, depth=3, nodes=2) == Draft((6, 7), (-1, 0, 1))
    assert settings.propose(tokens, depth=3, nodes=9, branches=1) == Draft((6, 7, 1), (-1, 0, 1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_drafts=0), "max_drafts: expected a positive int, got 0"),
        (dict(max_branches=-1), "max_branches: expected a positive int, got -1"),
        (dict(min_ngram=4), "min_ngram: expected at most max_ngram=3, got 4"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NGram(**changes)


# --- the answers ---


@pytest.fixture(scope="module")
def llama(request):
    return make_model(LlamaForCausalLM, LlamaConfig(**SIZES), request.config.getoption("--device"))


@pytest.mark.covers("D152")
@pytest.mark.parametrize(("kind", "temperature", "twin"), every_pair(KINDS, [0.0, 1.2], TWINS))
def test_answers_are_those_without_drafts(llama, twin, kind, temperature):
    """Greedy ones, and drawn ones too: a token has its random number, whatever drafted it."""
    sampling = [
        SamplingParams(max_tokens=10, temperature=temperature, top_p=0.9, seed=i) for i in range(len(REPEATING))
    ]
    plain, drafting = make_engine(llama, twin), make_engine(llama, twin, speculation=KINDS[kind])
    expected = [request.output_ids for request in plain.generate(REPEATING, sampling)]
    found = drafting.generate(REPEATING, sampling)
    assert [request.output_ids for request in found] == expected
    assert [request.finish_reason for request in found] == ["length"] * len(found)
    counters = drafting.counters
    assert counters.drafted_tokens > 0
    assert counters.steps <= plain.counters.steps
    assert_nothing_is_held(drafting)


@pytest.mark.covers("D152")
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("kind", "branches"), [("plain", 1), ("window", 3), ("latents", 3)])
def test_right_drafts_save_steps(llama, kind, branches, twin, device):
    """All of them are accepted: 13 tokens after the first come out of 4 steps, and the cache is that of a plain run."""
    model = llama if kind == "plain" else make_model(*MODELS[kind], device)
    sampling = SamplingParams(max_tokens=14)
    plain = make_engine(model, twin)
    whole = [request.tokens for request in plain.generate(PROMPTS, sampling)]
    drafts = Oracle(max_drafts=3, max_branches=branches)
    object.__setattr__(drafts, "answers", whole)
    engine = make_engine(model, twin, speculation=drafts)
    assert [request.tokens for request in engine.generate(PROMPTS, sampling)] == whole
    assert engine.counters.accepted_tokens * branches == engine.counters.drafted_tokens
    assert engine.counters.steps <= plain.counters.steps - 9


@pytest.mark.parametrize(
    ("kind", "twin"),
    [("plain", "refattn"), ("window", "refattn"), *((kind, "fastattn") for kind in ("plain", *MODELS))],
)
def test_wild_drafts_change_no_answer(llama, kind, twin, device):
    """Whatever the layers: windows in smaller pools, chunks, pairs, latents, with chains where there are no trees."""
    model = llama if kind == "plain" else make_model(*MODELS[kind], device)
    takes_trees = kind in ("plain", "window", "window and full, softcap, scale", "latents", "differential")
    wild = Wild(max_drafts=3, max_branches=3 if takes_trees else 1)
    if not takes_trees:
        with pytest.raises(
            ValueError, match="speculation: expected max_branches=1, as .* over .* has no plan for trees"
        ):
            make_engine(model, twin, speculation=Wild(max_branches=2))
        wild = NGram(max_drafts=3)
    sizes = dict(max_num_batched_tokens=13, num_blocks=30)
    expected = outputs(make_engine(model, twin, **sizes), REPEATING, LONG)
    engine = make_engine(model, twin, **sizes, speculation=wild)
    assert outputs(engine, REPEATING, LONG) == expected
    assert engine.counters.drafted_tokens > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype", "twin"),
    every_pair(["window", "window and full, softcap, scale"], ["auto", "fp8_e4m3", "int8"], TWINS),
)
def test_trees_move_in_a_window_pool_that_has_given_blocks_back(llama, kind, kv_cache_dtype, twin, device):
    """Every accepted token moves, as wrong ones come first, in a pool without the blocks that left the window."""
    model, sampling = make_model(*MODELS[kind], device), SamplingParams(max_tokens=10)
    sizes = dict(max_num_seqs=3, max_num_batched_tokens=24, kv_cache_dtype=kv_cache_dtype)
    plain = make_engine(model, twin, **sizes)
    whole = [request.tokens for request in plain.generate(PROMPTS[:4], sampling)]
    drafts = Oracle(max_drafts=3, max_branches=2)
    object.__setattr__(drafts, "answers", whole)
    engine = make_engine(model, twin, **sizes, speculation=drafts)
    assert engine.window_pools, "the pool is not smaller: nothing is given back"
    answers = engine.generate(PROMPTS[:4], sampling)
    assert [request.error for request in answers] == [None] * len(answers)
    assert [request.tokens for request in answers] == whole
    assert engine.counters.accepted_tokens > 20
    assert_nothing_is_held(engine)


@pytest.mark.covers("B185")
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("kind", "plans"),
    [("latents", ["chunked_prefill.plan", "mla.plan_prefill"]), ("chunks and full", ["local.plan"])],
    ids=["latents", "chunks"],
)
def test_a_decode_with_drafts_is_planned_as_a_decode(kind, plans, twin, device, monkeypatch):
    """Beside the chunks of a prompt: with latents it is absorbed, and in chunks its kernel is one for few rows."""
    model = make_model(*MODELS[kind], device)
    prompts = [[5, 6, 7, 8] * 3, list(range(30, 75))]
    planned = []

    def watch(path, name):
        module = importlib.import_module(f"{twin}.{path}")
        plan = getattr(module, name)

        def watched(batch, **sizes):
            planned.append((name, batch.query_lens.tolist()))
            return plan(batch, **sizes)

        monkeypatch.setattr(module, name, watched)

    for plan in plans:
        watch(*plan.split("."))
    sizes = dict(max_num_batched_tokens=16)
    expected = outputs(make_engine(model, twin, **sizes), prompts)
    planned.clear()
    assert outputs(make_engine(model, twin, **sizes, speculation=CHAIN), prompts) == expected
    kinds = [(name, {length <= 1 + CHAIN.max_drafts for length in lengths}) for name, lengths in planned]
    assert all(len(found) == 1 for _, found in kinds), "decodes and prefills are planned together"
    assert any(1 < length <= 1 + CHAIN.max_drafts for _, lengths in planned for length in lengths)
    assert (plans[-1].split(".")[1], {False}) in kinds
    assert ("plan_prefill", {True}) not in kinds


@pytest.mark.parametrize("twin", TWINS)
def test_drafts_yield_where_blocks_are_short_and_prefixes_are_shared(llama, twin):
    """With preemptions, and with blocks that a later request finds: none of them holds what was rejected."""
    sizes = dict(num_blocks=12, max_num_seqs=3)
    expected = outputs(make_engine(llama, twin, num_blocks=64), REPEATING)
    engine = make_engine(llama, twin, **sizes, speculation=Wild(max_drafts=3, max_branches=3))
    for _ in range(2):
        assert outputs(engine, REPEATING) == expected
    assert engine.counters.preemptions > 0 and engine.counters.cached_blocks > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("twin", TWINS)
def test_an_answer_ends_at_a_stop_token_inside_of_a_draft(llama, twin):
    (whole,) = make_engine(llama, twin).generate([REPEATING[0]], SamplingParams(max_tokens=14))
    plain, drafts = whole.output_ids, Oracle(max_drafts=6)  # all of them right, also those after the end
    object.__setattr__(drafts, "answers", [whole.tokens])
    for stop in plain[2:5]:
        sampling = SamplingParams(max_tokens=14, stop_token_ids=(stop,))
        engine = make_engine(llama, twin, speculation=drafts)
        events = list(engine.stream([REPEATING[0]], sampling))
        expected = plain[: plain.index(stop) + 1]
        assert [event.token_id for event in events] == expected
        assert events[0].request.finish_reason == "stop"
        assert_nothing_is_held(engine)


def test_half_a_character_at_the_end_of_a_draft_is_said(llama):
    """Elsewhere it waits for its other bytes; here the last token comes with others of its step, and none follows."""
    (whole,) = make_engine(llama).generate([REPEATING[0]], SamplingParams(max_tokens=14))
    drafts, last = Oracle(max_drafts=6), whole.output_ids[-1]
    object.__setattr__(drafts, "answers", [whole.tokens])

    class Bytes:
        def decode(self, token_ids, skip_special_tokens):
            return bytes(0xC3 if token == last else 32 + token % 90 for token in token_ids).decode(errors="replace")

    engine = make_engine(llama, tokenizer=Bytes(), speculation=drafts)
    events = list(engine.stream([REPEATING[0]], SamplingParams(max_tokens=14)))
    assert [event.token_id for event in events] == whole.output_ids
    assert engine.counters.steps < 5  # one token of the first, and several of each other
    text = Bytes().decode(whole.output_ids, skip_special_tokens=True)
    assert text.endswith("\N{REPLACEMENT CHARACTER}")
    assert "".join(event.text for event in events) == events[0].request.text == text


@pytest.mark.parametrize("twin", TWINS)
def test_a_request_whose_logits_are_not_finite_fails_alone(llama, twin, monkeypatch):
    """After tokens of the same step that were still right."""
    choose, seen = twinattn.engine.choice.choose, []

    def spoil(logits, requests, *ahead, **how):
        seen.append(len(requests))
        if ahead and max(ahead[0]) >= 1:
            logits = logits.clone()
            last = max(range(len(requests)), key=lambda row: ahead[0][row])
            logits[last] = float("nan")
        return choose(logits, requests, *ahead, **how)

    monkeypatch.setattr(twinattn.engine.choice, "choose", spoil)
    engine = make_engine(llama, twin, speculation=CHAIN)
    requests = engine.generate(REPEATING, SamplingParams(max_tokens=14))
    expected = make_engine(llama, twin).generate(REPEATING, SamplingParams(max_tokens=14))
    for request, whole in zip(requests, expected, strict=True):
        assert request.output_ids == whole.output_ids[: len(request.output_ids)]
        assert request.finish_reason in ("length", "error")
    assert_nothing_is_held(engine)


@pytest.mark.covers("D162")
@pytest.mark.parametrize(("layers", "kind"), [("plain", "chain"), ("plain", "tree"), ("latents", "tree")])
def test_recorded_verifications_change_nothing(llama, layers, kind, monkeypatch, device):
    """Steps with drafts come from the buffers of a recording; on a CPU it runs the step itself."""
    model = llama if layers == "plain" else make_model(*MODELS[layers], device)
    expected = outputs(make_engine(model, "fastattn"), REPEATING, LONG)
    runner = CudaGraphs()
    if device != "cuda":
        monkeypatch.setattr(CudaGraphs, "can_record", staticmethod(lambda engine: True))
        monkeypatch.setattr(twinattn.engine.cuda_graphs, "_record", lambda step, memory, name: step)
    monkeypatch.setattr(CudaGraphs, "_is_worth_recording", lambda self, engine, shape: True)
    engine = make_engine(model, "fastattn", runner=runner, speculation=KINDS[kind])
    assert outputs(engine, REPEATING, LONG) == expected
    assert engine.counters.drafted_tokens > 0
    shapes = list(runner._steps)
    assert any(1 < shape.queries < 8 for shape in shapes), "no verification was recorded"
    assert any(shape.trees for shape in shapes) == (kind == "tree")


def test_bad_speculation_is_refused(llama, device):
    other = make_engine(make_model(LlamaForCausalLM, LlamaConfig(**SIZES | dict(vocab_size=50)), device), "refattn")
    with pytest.raises(ValueError, match=f"of the same {SIZES['vocab_size']} tokens, got one of 50"):
        make_engine(llama, "refattn", speculation=DraftModel(other))
    with pytest.raises(ValueError, match="max_drafts: expected a positive int, got 0"):
        DraftModel(other, max_drafts=0)


# --- a drafter of the user's own ---


class Phrases:
    """Drafts what a dictionary says of the last token.

    Attributes:
        asked: the tokens of each call, and its limits.
    """

    max_drafts, max_branches = 4, 1

    def __init__(self, phrases):
        self.phrases, self.asked = phrases, []

    def propose(self, tokens, *, depth, nodes, branches):
        self.asked.append(([*tokens], depth, nodes, branches))
        tokens.clear()  # they are its own
        return self.phrases.get(self.asked[-1][0][-1], [])[:depth]


@pytest.mark.covers("G229")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("twin", TWINS)
def test_a_drafter_of_ones_own_changes_no_token(llama, twin, n):
    """Greedy, drawn, and with several samples; its phrases are right, wrong, or right for a while."""
    samplings = [LONG, SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=n), LONG, LONG]
    whole = [sample.tokens for r in make_engine(llama, twin).generate(REPEATING, samplings) for sample in r.samples]
    phrases = {}
    for tokens in whole:
        for place, token in enumerate(tokens):
            phrases.setdefault(token, tokens[place + 1 : place + 3] + [90, 91])
    drafter = Phrases(phrases)
    engine = make_engine(llama, twin, speculation=drafter, max_num_batched_tokens=20)
    found = [sample.tokens for r in engine.generate(REPEATING, samplings) for sample in r.samples]
    assert found == whole
    assert 0 < engine.counters.accepted_tokens < engine.counters.drafted_tokens
    for tokens, depth, nodes, branches in drafter.asked:
        assert 1 <= depth <= 4 and depth <= nodes < 20 and branches == 1
        assert any(tokens == one[: len(tokens)] for one in whole), "it gets all tokens, and no other"
    assert_nothing_is_held(engine)


def test_samples_begin_with_no_draft(llama):
    """A prompt of one token is like a decode, but all samples have to begin after it."""
    sampling = SamplingParams(max_tokens=6, temperature=1.0, n=3)
    expected = [sample.output_ids for sample in make_engine(llama).generate([[9]], sampling)[0].samples]
    engine = make_engine(llama, block_size=2, speculation=Phrases({token: [5, 6, 7, 8] for token in range(97)}))
    assert [sample.output_ids for sample in engine.generate([[9]], sampling)[0].samples] == expected
    assert engine.counters.drafted_tokens > 0
    assert_nothing_is_held(engine)


def test_a_draft_may_be_a_tree_or_an_array(llama):
    class Trees(Phrases):
        max_branches = 2

        def propose(self, tokens, *, depth, nodes, branches):
            kinds = [torch.tensor([5, 6])[:depth], (7,), None, [], Draft((), (-1,)), Draft((5, 6), (-1, 0, 0))]
            return kinds[len(tokens) % len(kinds)]

    expected = outputs(make_engine(llama), PROMPTS, LONG)
    engine = make_engine(llama, speculation=Trees({}))
    assert outputs(engine, PROMPTS, LONG) == expected
    assert engine.counters.drafted_tokens > 0


def unchecked(**fields):
    """Make a draft of anything, as it can be made where no types are checked."""
    draft = Draft((), (-1,))
    for name, value in fields.items():
        object.__setattr__(draft, name, value)
    return draft


FORK, NO_TREE = (-1, 0, 0), "draft: expected ints as tokens, and as parents -1 and an earlier node"
WRONG = {
    "too many": ([5] * 9, "draft: expected at most depth=4 tokens after one another, got 9"),
    "too many branches": (
        Draft((5, 6), (-1, 0, 0)),
        r"draft: expected a chain, as branches=1, got parents=\[-1, 0, 0\]",
    ),
    "no tree": (Draft((5, 6), (-1, 0, 2)), NO_TREE),
    "no root": (Draft((5, 6), (0, 1)), NO_TREE),
    "no ints in a draft": (unchecked(tokens=(5.0,), parents=(-1, 0)), NO_TREE),
    "an unknown token": ([5, 97], "draft: expected token ids in 0..96, got 97"),
    "a negative token": ([-1], "draft: expected token ids in 0..96, got -1"),
    "fractions": ([5, 6.5], "draft: expected token ids, which are ints, got 6.5"),
    "flags": ([True], "draft: expected token ids, which are ints, got True"),
    "text": ("abc", "draft: expected a sequence of token ids, a Draft or None, got 'abc'"),
    "a number": (5, "draft: expected a sequence of token ids, a Draft or None, got 5"),
    "rows of tokens": (torch.tensor([[5, 6]]), r"draft: expected token ids, which are ints, got \[5, 6\]"),
    "an exception": (LookupError("no such phrase"), "LookupError: no such phrase"),
}


@pytest.mark.covers("G229")
@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize(("draft", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_draft_ends_its_request_alone(llama, draft, message):
    class Wrong(Phrases):
        def propose(self, tokens, *, depth, nodes, branches):
            if len(tokens) != 17:  # the second prompt's fourth token; others are shorter, or longer
                return super().propose(tokens, depth=depth, nodes=nodes, branches=branches)
            if isinstance(draft, Exception):
                raise draft
            return draft

    prompts = [[11], [*range(40, 53), 7], [7, 3] * 9]
    sampling = SamplingParams(max_tokens=9, stop_token_ids=())
    expected = outputs(make_engine(llama), prompts, sampling)
    engine = make_engine(llama, speculation=Wrong({token: [5, 6] for token in range(97)}))
    events = list(engine.stream(prompts, sampling))
    requests = list(dict.fromkeys(event.request for event in events))
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert [request.output_ids for request in requests] == [expected[0], expected[1][:3], expected[2]]
    (failure,) = [event for event in events if event.error]
    assert failure.request is requests[1] and failure.error == requests[1].error
    assert re.fullmatch(f"{'' if isinstance(draft, Exception) else 'ValueError: '}{message}.*", failure.error)
    assert_nothing_is_held(engine)
    assert outputs(engine, prompts[:1], sampling) == expected[:1], "the engine goes on"


class NoSize:
    max_drafts = 3

    def propose(self, tokens, *, depth, nodes, branches):
        return []


LACKS_ALL = "got 'ngram', which lacks max_drafts, max_branches, propose"
ARGUMENTS = "expected propose(tokens, *, depth, nodes, branches), got "


class OldArguments(Phrases):
    def propose(self, tokens, count):
        return []


@pytest.mark.covers("G229")
@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            "ngram",
            "expected a Drafter, such as NGram(), or None, got 'ngram', which lacks max_drafts, max_branches, propose",
        ),
        (NGram, "expected a Drafter, such as NGram(), or None, got <class '.*NGram'>, "),
        (NoSize(), "expected a Drafter, .* got .*NoSize object at .+, which lacks max_branches"),
        (mock.Mock(max_drafts=0, max_branches=1), "expected max_drafts to be an int of at least 1, got 0"),
        (mock.Mock(max_drafts=1, max_branches=True), "expected max_branches to be an int of at least 1, got True"),
        (
            OldArguments({}),
            "expected propose(tokens, *, depth, nodes, branches), got <bound method OldArguments.propose",
        ),
        (
            mock.Mock(max_drafts=1, max_branches=1, propose=3),
            "expected propose(tokens, *, depth, nodes, branches), got 3",
        ),
    ],
    ids=["text", "a class", "no size", "no drafts", "a flag", "arguments", "no function"],
)
def test_what_is_no_drafter_is_refused(llama, drafter, message):
    pattern = message.replace("(", r"\(").replace(")", r"\)").replace("*,", r"\*,")
    with pytest.raises(ValueError, match=f"^speculation: {pattern}"):
        make_engine(llama, speculation=drafter)


def test_the_drafters_here_are_drafters(llama):
    for drafter in (NGram(), DraftModel(make_engine(llama)), Phrases({})):
        assert isinstance(drafter, Drafter)
    assert not isinstance(NoSize(), Drafter)


# --- a draft model ---


def make_drafter(model, twin, **sizes):
    """Make a draft model's engine: one request at a time, and room for the texts of all."""
    return make_engine(model, twin, **dict(max_num_seqs=1, num_blocks=64) | sizes)


@pytest.mark.covers("D152")
@pytest.mark.parametrize(("twin", "temperature"), [*zip(TWINS, [0.0, 1.2], strict=True)])
def test_a_draft_model_changes_no_answer(llama, twin, temperature, device):
    """Another model, which is seldom right: through preemptions, and with other layers than the large one."""
    small = make_model(*MODELS["window"], device)
    sizes = dict(num_blocks=14, max_num_seqs=3)
    sampling = [
        SamplingParams(max_tokens=10, temperature=temperature, top_p=0.9, seed=i) for i in range(len(REPEATING))
    ]
    plain = make_engine(llama, twin, **sizes)
    engine = make_engine(llama, twin, **sizes, speculation=DraftModel(make_drafter(small, twin), max_drafts=3))
    expected = [request.output_ids for request in plain.generate(REPEATING, sampling)]
    assert [request.output_ids for request in engine.generate(REPEATING, sampling)] == expected
    assert engine.counters.drafted_tokens > engine.counters.accepted_tokens
    assert_nothing_is_held(engine)
    assert_nothing_is_held(engine.speculation.engine)


@pytest.mark.covers("D152")
@pytest.mark.parametrize("twin", TWINS)
def test_a_draft_model_that_is_right_saves_steps(llama, twin):
    """It finds full blocks of a text in its cache, and computes the rest of it, and its drafts."""
    drafter = make_drafter(copy.deepcopy(llama), twin)
    engine = make_engine(llama, twin, speculation=DraftModel(drafter, max_drafts=3))
    plain, sampling = make_engine(llama, twin), SamplingParams(max_tokens=13)
    expected = [request.output_ids for request in plain.generate(PROMPTS, sampling)]
    assert [request.output_ids for request in engine.generate(PROMPTS, sampling)] == expected
    assert engine.counters.accepted_tokens == engine.counters.drafted_tokens > 0
    assert engine.counters.steps <= plain.counters.steps - 8
    assert drafter.counters.cached_blocks > 0


@pytest.mark.lets_a_pass_fail
def test_a_draft_model_without_room_or_sense_drafts_nothing(llama, monkeypatch, device):
    """A text that is longer than its pool, a model that fails: the answers come without drafts."""
    expected = outputs(make_engine(llama, "refattn"), REPEATING)
    tiny = DraftModel(make_drafter(copy.deepcopy(llama), "refattn", num_blocks=2))
    assert tiny.propose([1] * 9, depth=3, nodes=3) is None
    assert len(tiny.propose([1] * 7, depth=9, nodes=9).tokens) == 2, "seven tokens and the first draft fill its pool"
    assert tiny.propose([1] * 7, depth=0, nodes=9) is None
    engine = make_engine(llama, "refattn", speculation=tiny)
    assert outputs(engine, REPEATING) == expected
    broken = make_drafter(copy.deepcopy(llama), "refattn")
    monkeypatch.setattr(broken, "run_model", lambda inputs: 1 / 0)
    engine = make_engine(llama, "refattn", speculation=DraftModel(broken))
    assert outputs(engine, REPEATING) == expected
    assert not engine.counters.drafted_tokens
