"""Several samples of a prompt over every kind of layer, and in engines in which things go wrong."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.helpers import engines, faults
from tests.helpers.engines import MODELS, SYSTEM, TWINS, Watched, make_engine
from tests.helpers.pairs import every_pair
from tests.helpers.samples import alone, assert_the_prefix_is_shared, samples_of
from tests.helpers.state_engines import assert_all_free, drafts_of, make_hybrid
from tests.helpers.tiny_models import CHANGES, INDEX_SIZES, LATENT_SIZES, STATES, make_family, make_llama, make_model
from twinattn.engine import NGram, Prompt, SamplingParams

pytestmark = pytest.mark.lets_a_pass_fail
WARM = SamplingParams(max_tokens=6, temperature=1.0, seed=5, stop_token_ids=())
FOUR = replace(WARM, n=4)
PROMPTS = [[*SYSTEM, 40, 41], [7, 3] * 6, [11]]

# --- every kind of layer ---

LAYERS = {
    "fp8": dict(kv_cache_dtype="fp8_e4m3"),
    "int8": dict(kv_cache_dtype="int8"),
    **dict.fromkeys(MODELS, {}),
    "packed latents": dict(kv_cache_dtype="fp8_ds_mla"),
    "selected latents": {},
    "shared caches": {},
    **dict.fromkeys(("bamba", "falcon_h1", "kimi_linear", "qwen3_5_text"), {}),
}
SCHEDULES = {
    "chunks": dict(max_num_batched_tokens=7),
    "few blocks": dict(num_blocks=8, max_num_batched_tokens=16),
    "drafts": dict(speculation=NGram(max_drafts=2, max_ngram=1)),
    "small blocks": dict(block_size=2, max_num_seqs=5),
}


@pytest.fixture(scope="module")
def made(device):
    """Models, each made once."""
    models = {}

    def make(name):
        if name not in models:
            if name in ("fp8", "int8"):
                model = make_llama().to(device)
            elif name in MODELS:
                model = make_model(*MODELS[name], device)
            elif name == "packed latents":
                model = make_family("deepseek_v3", device, **LATENT_SIZES | dict(kv_lora_rank=128, eos_token_id=None))
            elif name == "selected latents":
                model = make_family("deepseek_v32", device, **INDEX_SIZES | dict(first_k_dense_replace=3))
            elif name == "shared caches":
                model = make_family("gemma3n_text", device, **CHANGES["gemma3n_text"] | dict(eos_token_id=None))
            else:
                model = make_hybrid(name, device)
            models[name] = model
        return models[name]

    return make


@pytest.mark.covers("G228")
@pytest.mark.parametrize(("name", "schedule", "twin"), every_pair(LAYERS, SCHEDULES, TWINS))
def test_samples_are_requests_of_their_seeds(made, name, schedule, twin):
    """Also those of greedy requests beside them, and the second time, with what is cached of the first."""
    options = LAYERS[name]
    engine = make_engine(made(name), twin, **options | SCHEDULES[schedule])
    samplings = [replace(FOUR, seed=index) for index in range(3)]
    expected = [alone(made(name), twin, *case, **options) for case in zip(PROMPTS, samplings, strict=True)]
    for _ in range(2):
        assert samples_of(engine, PROMPTS, samplings) == expected
    assert engine.counters.copied_blocks > 0
    engines.assert_nothing_is_held(engine)
    if name in STATES:
        assert_all_free(engine)


@pytest.mark.parametrize("name", ["fp8", "int8", "window", "differential", "latents", "selected latents"])
def test_nothing_that_others_write_is_seen(made, name):
    """Blocks that are copied hold the prompt's end alone, then what each sample has written."""
    engine = make_engine(made(name), "fastattn", **LAYERS[name])
    request = engine.add(PROMPTS[0], FOUR)
    for _ in range(3):
        engine.step()
    assert_the_prefix_is_shared(engine, request)
    (again,) = engine.generate([request.samples[2].tokens], replace(WARM, max_tokens=1))
    assert again.error is None
    while engine.running:
        engine.step()
    assert [sample.output_ids for sample in request.samples] == alone(
        made(name), "fastattn", PROMPTS[0], FOUR, **LAYERS[name]
    )


@pytest.mark.parametrize("twin", TWINS)
def test_spans_are_computed_once(device, twin):
    model = make_family("gemma3", device, **CHANGES["gemma3"])
    prompt = Prompt([5, 9, 2, 6, 81, 80, 83, 84, 85, 86, 7], [(2, 9)])
    engine = make_engine(model, twin)
    assert samples_of(engine, [prompt], FOUR) == [alone(model, twin, prompt, FOUR)]
    assert engine.counters.computed_tokens == 11 + 4 * 5


@pytest.mark.parametrize("twin", TWINS)
def test_drafts_of_states_are_accepted(made, twin):
    """Right drafts behind wrong ones: each sample goes on from the state of its own last token."""
    model = made("qwen3_5_text")
    four = replace(FOUR, seed=1)
    right = alone(model, twin, PROMPTS[0], four)
    engine = make_engine(model, twin, speculation=drafts_of([PROMPTS[0]] * 4, right))
    assert len({tuple(tokens[:1]) for tokens in right}) == 4, "else no draft tells them apart"
    assert samples_of(engine, [PROMPTS[0]], four) == [right]
    assert engine.counters.accepted_tokens > 4
    assert_all_free(engine)


@pytest.mark.usefixtures("on_tape")
@pytest.mark.parametrize("name", ["qwen3_5_text", "window", "latents"])
def test_captured_steps_change_nothing(made, name, device):
    """A graph is a tape here: only what is in buffers changes from step to step, the copied blocks' tables too."""
    engine = make_engine(made(name), "fastattn", runner=Watched(device))
    for _ in range(2):
        assert samples_of(engine, PROMPTS, FOUR) == [alone(made(name), "fastattn", p, FOUR) for p in PROMPTS]
    assert len(engine.runner.rows) > 4
    engines.assert_nothing_is_held(engine)


# --- what goes wrong ---


@given(
    interrupts=st.lists(st.integers(0, 700), min_size=1, max_size=8),
    num_blocks=st.integers(5, 12),
    max_num_batched_tokens=st.integers(3, 20),
    max_num_seqs=st.integers(3, 6),
    window=st.sampled_from([0, 2]),
)
def test_an_interrupt_at_any_line_loses_no_sample(interrupts, num_blocks, max_num_batched_tokens, max_num_seqs, window):
    engine = faults.Scripted(
        faults.scripted_model(window),
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    three = replace(FOUR, n=3, stop_token_ids=None)
    prompts, samplings = faults.PROMPTS[:3], [three, replace(three, n=2), faults.GREEDY]
    requests = [engine.add(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    gone = engine.add([1, 2, 3], three)
    for nth in interrupts:
        engine.step()
        with suppress(KeyboardInterrupt), faults.Interrupt(nth):
            engine.step()
        faults.assert_the_books_are_right(engine)
        with suppress(KeyboardInterrupt), faults.Interrupt(nth % 50):
            engine.abort(gone)
        engine.abort(gone)  # once more, if it was not
        faults.assert_the_books_are_right(engine)
    assert {sample.status for sample in gone.samples} == {"finished"}
    faults.finish(engine)
    for request, prompt, sampling in zip(requests, prompts, samplings, strict=True):
        for sample in request.samples:
            fresh = faults.Scripted(faults.scripted_model(), num_blocks=40, block_size=4)
            (right,) = fresh.generate([prompt], sampling.of_sample(sample.index))
            assert (sample.output_ids, sample.finish_reason) == (right.output_ids, right.finish_reason)
    faults.assert_nothing_is_held(engine)


class SamplesMachine(faults.EngineMachine):
    """The life of an engine whose requests have several samples."""

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(0, 7),
        max_num_seqs=st.integers(3, 6),
        max_num_batched_tokens=st.integers(1, 12),
        records=st.booleans(),
    )
    def build(self, block_size, spare_blocks, max_num_seqs, max_num_batched_tokens, records):
        super().build(block_size, spare_blocks, max_num_seqs, max_num_batched_tokens, records)

    @rule(
        prompt=st.sampled_from(faults.TINY_PROMPTS),
        sampling=st.sampled_from(faults.TINY_SAMPLINGS),
        n=st.integers(1, 3),
    )
    def add(self, prompt, sampling, n=2):
        warm = replace(sampling, temperature=sampling.temperature or 1.0, n=n)
        self.requests += self.engine.add(list(prompt), warm).samples

    def abort_one(self, i):
        if self.live():
            request = self.live()[i % len(self.live())]
            self.aborted.update(request.samples)
            self.engine.abort(request)

    @precondition(lambda self: self.requests)
    @rule(i=st.integers(0, 99))
    def abort_again(self, i):
        request = self.requests[i % len(self.requests)]
        if request.status == "finished":
            reason = request.finish_reason
            self.engine.abort(request, alone=True)
            assert request.finish_reason == reason

    def attempt(self, fault, call, heard=()):
        """A request that is at fault takes those of its samples along that have not begun."""
        begun = {request: request.unforked for request in self.live()}
        blamed = set(self.faults.blamed)
        try:
            return super().attempt(fault, call, heard)
        finally:
            for request in self.faults.blamed - blamed:
                self.faults.blamed |= {each for each in begun.get(request, ()) if each.finish_reason == "error"}

    @invariant()
    def the_books_are_right(self):
        faults.assert_the_books_are_right(self.engine)
        assert len(self.engine.running) <= self.engine.max_num_seqs
        unforked = {each for request in self.requests for each in request.unforked}
        queued = [*self.engine.running, *self.engine.waiting]
        assert Counter(queued) == Counter(each for each in self.live() if each not in unforked)


class FastSamplesMachine(SamplesMachine):
    package = "fastattn"


class WindowSamplesMachine(FastSamplesMachine):
    """An engine with a layer whose pool is smaller."""

    window = 3


@pytest.mark.parametrize(
    "machine", [SamplesMachine, FastSamplesMachine, WindowSamplesMachine], ids=[*TWINS, "fastattn, window pool"]
)
def test_whatever_happens_every_sample_is_what_it_is_alone(machine):
    examples = settings.default.max_examples // 4
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20))
