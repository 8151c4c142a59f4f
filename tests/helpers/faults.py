"""Engines in which something goes wrong on purpose: at any line, in any call, and in a whole life of requests."""

import importlib
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

import twinattn.engine.choice
import twinattn.engine.cuda_graphs
import twinattn.engine.engine
import twinattn.engine.outputs
import twinattn.engine.scheduler
from tests.helpers.tiny_models import SIZES, make_llama, make_model
from twinattn.engine import BlockPool, CudaGraphs, Engine, SamplingParams

SYSTEM = [5, 9, 2, 6, 5, 3, 5, 8, 9]
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 7, [*SYSTEM, 50], [*SYSTEM, 40, 41, 42]]
GREEDY = SamplingParams(max_tokens=6)
WARM = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=5)
MIXED = [GREEDY, WARM, GREEDY, WARM, GREEDY]


def finish(engine):
    while engine.running or engine.waiting:
        engine.step()
        assert_the_books_are_right(engine)


def assert_the_books_are_right(engine):
    """Check all that has to be true between two calls of an engine."""
    allocator, block_size = engine.pool, engine.block_size
    users = Counter(block for request in engine.running for block in request.blocks)
    assert allocator.users == [users[block] for block in range(len(allocator.users))]
    assert sorted(allocator.free) == [block for block, count in enumerate(allocator.users) if not count]
    assert not engine._is_stepping and not engine._aborted
    assert not set(engine.running) & set(engine.waiting)
    for status, requests in (("running", engine.running), ("waiting", engine.waiting)):
        assert len(set(requests)) == len(requests)
        for request in requests:
            assert (request.status, request.finish_reason, request.error) == (status, None, None)
            assert request.num_pending > 0, "it would never get another token"
            assert len(request.output_ids) == len(request.pieces) < request.sampling.max_tokens
            assert len(set(request.blocks)) == len(request.blocks) >= -(-request.num_computed_tokens // block_size)
            assert len(request.contents) == request.num_computed_tokens // block_size
            assert [token for prefix in request.contents for token in prefix.tokens] == request.tokens[
                : len(request.contents) * block_size
            ]
    assert all(request.num_computed_tokens == 0 and request.blocks == [] for request in engine.waiting)
    assert {prefix.hash: block for block, prefix in allocator.contents.items()} == allocator.block_of
    for pool in engine.scheduler.window_pools:
        assert_the_window_pool_is_right(engine, pool)


def assert_the_window_pool_is_right(engine, pool):
    """Check that requests hold what their next token sees, that no block is held twice, and that none is lost."""
    assert {request for request, blocks in pool.held.items() if blocks} <= set(engine.running)
    users = Counter(block for blocks in pool.held.values() for block in blocks)
    assert pool.users == [users[block] for block in range(len(pool.users))]
    mapped = {block: window for block, window in enumerate(pool.window_block) if window >= 0}
    assert set(mapped) == set(users)
    assert sorted([*mapped.values(), *pool.free]) == list(range(pool.num_blocks)), "none is lost, none has two users"
    assert all(pool._free[window] == block for block, window in pool._kept.items())
    for request in engine.running:
        first = max(0, request.num_computed_tokens - pool.left) // pool.block_size
        last = -(-request.num_computed_tokens // pool.block_size)
        assert set(request.blocks[first:last]) <= pool.held[request] <= set(request.blocks)


def assert_nothing_is_held(engine):
    assert_the_books_are_right(engine)
    assert not engine.running and not engine.waiting
    assert len(engine.pool.free) == len(engine.pool.users)
    assert all(len(pool.free) == pool.num_blocks for pool in engine.scheduler.window_pools)


class Letters:
    """A tokenizer with a letter for each token; some it cannot decode."""

    def __init__(self, *unknown):
        self.unknown = set(unknown)

    def __call__(self, text):
        return SimpleNamespace(input_ids=[ord(letter) - 256 for letter in text])

    def decode(self, tokens, skip_special_tokens):
        if self.unknown & set(tokens):
            raise KeyError("no such letter")
        return "".join(chr(256 + token) for token in tokens)


class Scripted(Engine):
    """An engine whose next token follows from the tokens before it, without the model: for what happens around it."""

    def _forward(self, scheduled):
        due = [request.tokens for request, count in scheduled.items() if count == request.num_pending]
        rows = [[(i * sum(tokens) + len(tokens)) % 97 for i in range(97)] for tokens in due]
        return torch.tensor(rows, dtype=torch.float32).reshape(-1, 97)


class Interrupt:
    """Raise KeyboardInterrupt at the n-th line of the engine's files that is run, but not where it cleans up itself."""

    CLEANS = ("undo", "reset")
    FILES = tuple(
        importlib.import_module(f"twinattn.engine.{name}").__file__
        for name in (
            *("engine", "admission", "scheduler", "block_pool", "window_pool", "request", "runner", "speculation"),
            *("planner", "layer_pools", "sampling", "choice", "outputs"),
        )
    )

    def __init__(self, nth):
        self.left = nth
        with open(self.FILES[0]) as file:
            lines = list(enumerate(file, 1))
        self.spared = {number for number, line in lines if line.strip() == "self._is_stepping = False"}

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in self.FILES or frame.f_code.co_name in self.CLEANS:
            return None
        if event == "line" and not (frame.f_code.co_filename == self.FILES[0] and frame.f_lineno in self.spared):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt(f"line {frame.f_lineno}")
        return self.trace


@cache
def scripted_model(window=0):
    return make_model(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=window)) if window else make_llama()


@cache
def scripted_answers():
    engine = Scripted(scripted_model(), num_blocks=40, block_size=4)
    return [engine.generate([pair[0]], pair[1])[0].output_ids for pair in zip(PROMPTS, MIXED, strict=True)]


TINY = dict(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TINY_NAN = 22
TINY_PROMPTS = (
    (1,),
    (3, 4, 5, 6, 7),
    (3, 4, 5, 6, 8, 9),
    (3, 4, 5, 6, 7, 8, 9, 10),
    (12,) * 7,
    (3, 4, TINY_NAN, 6),
    (2, 3),
)
TINY_SAMPLINGS = (
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=5),
    SamplingParams(max_tokens=4, temperature=1.5, seed=1),
    SamplingParams(max_tokens=6, stop_token_ids=(2, 5, 11, 17)),
)
LONGEST = 8 + 6 - 1  # most tokens that a request has in the pool
PASS = ("make_batch", "model", "attention", "write", "sampler")  # sites of one pass over some requests
BOOKS = ("allocate", "share", "find", "remember", "release", "forget")  # sites of the allocator
SAMPLE = twinattn.engine.cuda_graphs.sample
ERRORS = (RuntimeError("planted"), torch.OutOfMemoryError("planted"), ValueError("planted"), MemoryError("planted"))


@cache
def tiny_model(window):
    """Make a model of layers with full attention, or of one with full attention and one with a window."""
    model = make_llama(**TINY)
    if window:
        layers = dict(num_hidden_layers=2, sliding_window=window, layer_types=["full_attention", "sliding_attention"])
        model = make_model(Gemma2ForCausalLM, Gemma2Config(**SIZES | TINY | layers))
    with torch.no_grad():
        model.get_input_embeddings().weight[TINY_NAN] = torch.nan
    return model


@cache
def alone_in_an_engine(window, prompt, sampling):
    """Answer a prompt with nothing else in the engine and no faults."""
    (request,) = Engine(tiny_model(window), num_blocks=20, block_size=2).generate([prompt], sampling)
    return request.output_ids, request.finish_reason


@cache
def keys_alone(window, tokens):
    """Compute the keys of some tokens in each layer, with nothing else in the engine."""
    engine = Engine(tiny_model(window), num_blocks=1, block_size=len(tokens))
    engine.generate([tokens], SamplingParams(max_tokens=1))
    return [keys[0].clone() for keys, _ in engine.caches]


class Faults:
    """What is to go wrong, and whom to blame for it.

    Attributes:
        site: where.
        left: how often the site is passed before it does.
        action: what happens then: an exception to raise, or a function to call.
        culprit: it goes wrong wherever this request is; None for once only.
        current: the requests that the pass under way is over.
        rows: those whose tokens are chosen by the step that is being launched, in the order of its logits.
        blamed: the requests that have to fail.
    """

    def __init__(self):
        self.plan()
        self.current, self.rows, self.blamed = (), (), set()

    def plan(self, site=None, left=0, action=None, culprit=None):
        self.site, self.left, self.action, self.culprit = site, left, action, culprit

    def is_due(self, site, requests):
        """Return whether it goes wrong here and now."""
        if site != self.site or (self.culprit is not None and self.culprit not in requests):
            return False
        self.left -= self.culprit is None
        return self.left == -1 or self.culprit is not None

    def spoil(self, logits, requests):
        """Return logits, one row per request, with the fault in them if it is their turn."""
        for row, request in enumerate(requests):
            if self.is_due("logits", [request]):
                self.blamed.add(request)
                logits = logits.clone()
                logits[row, row % 23] = self.action
        return logits

    def passed(self, site, requests=None):
        """Raise if this step is to fail."""
        requests = self.current if requests is None else requests
        if not self.is_due(site, requests):
            return
        if callable(self.action):
            return self.action()
        if isinstance(self.action, Exception) and site not in BOOKS and len(requests) == 1:
            self.blamed.update(requests)
        raise self.action


class FaultyModule:
    """A module of a twin some of whose functions can go wrong."""

    def __init__(self, module, faults, **sites):
        self.module, self.faults, self.sites = module, faults, sites

    def __getattr__(self, name):
        function = getattr(self.module, name)
        if name not in self.sites:
            return function
        return lambda *args, **kwargs: (self.faults.passed(self.sites[name]), function(*args, **kwargs))[1]


def faulty_twin(package, faults):
    modules = {
        name: importlib.import_module(f"{package}.{name}") for name in ("kv_cache", "metadata", "chunked_prefill")
    }
    return SimpleNamespace(
        kv_cache=FaultyModule(modules["kv_cache"], faults, write="write"),
        metadata=FaultyModule(modules["metadata"], faults, make_batch="make_batch"),
        chunked_prefill=FaultyModule(modules["chunked_prefill"], faults, attention="attention"),
        sliding_window=importlib.import_module(f"{package}.sliding_window"),
        cascade=importlib.import_module(f"{package}.cascade"),
    )


def faulty_engine_class(base, faults):
    """Make a class of engines that pass the faults on their way."""

    class FaultyEngine(base):
        def _compute(self, scheduled, under_way=None):
            faults.current = tuple(scheduled)
            return super()._compute(scheduled, under_way)

        def _forward(self, scheduled):
            logits = super()._forward(scheduled)
            return faults.spoil(logits, [r for r, count in scheduled.items() if count == r.num_pending])

        def _launch(self, scheduled):
            due = [r for r, count in scheduled.items() if count == r.num_pending]
            if sum(scheduled.values()) == len(due):  # a decode, whose rows are the longest first
                due.sort(key=lambda request: -len(request.tokens))
            return self._blaming_no_request(super()._launch, scheduled, rows=due)

        def _launch_next(self, before):
            return self._blaming_no_request(super()._launch_next, before)

        def _blaming_no_request(self, launch, step, rows=()):
            """No request fails with a launch: its step is computed without one then. Tokens that are NaN fail it."""
            faults.current, faults.rows = (), rows
            return launch(step)

        def run_model(self, inputs):
            faults.passed("model")
            return super().run_model(inputs)

    return FaultyEngine


def faulty_allocator_class(faults):
    class FaultyAllocator(BlockPool):
        pass

    def guard(name):
        def guarded(self, *args):
            faults.passed(name)
            return getattr(BlockPool, name)(self, *args)

        return guarded

    for name in BOOKS:
        setattr(FaultyAllocator, name, guard(name))
    return FaultyAllocator


class EngineMachine(RuleBasedStateMachine):
    """The life of an engine."""

    package = "refattn"
    window = 0

    def __init__(self):
        super().__init__()
        self.faults = Faults()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(twinattn.engine.scheduler, "BlockPool", faulty_allocator_class(self.faults))
        choose = twinattn.engine.choice.choose
        self.patches.setattr(
            twinattn.engine.choice,
            "choose",
            lambda *args, **how: (self.faults.passed("sampler"), choose(*args, **how))[1],
        )
        self.patches.setattr(twinattn.engine.cuda_graphs, "sample", self.sample)
        for module in (twinattn.engine.engine, twinattn.engine.outputs):
            self.patches.setattr(module.logger, "disabled", True)
        new_text = twinattn.engine.outputs.new_text
        self.patches.setattr(
            twinattn.engine.outputs,
            "new_text",
            lambda tokenizer, request, *rest: (
                self.faults.passed("tokenizer", [request]),
                new_text(tokenizer, request, *rest),
            )[1],
        )
        self.patches.setattr(twinattn.engine.cuda_graphs, "_record", lambda step, memory, name: step)
        self.requests, self.aborted, self.streams = [], set(), []

    def sample(self, logits, *settings):
        """Choose the tokens of a decode that a runner launches."""
        self.faults.passed("sampler")
        return SAMPLE(self.faults.spoil(logits, self.faults.rows), *settings)

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(0, 7),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 12),
        records=st.booleans(),
    )
    def build(self, block_size, spare_blocks, max_num_seqs, max_num_batched_tokens, records):
        runner = CudaGraphs() if self.package == "fastattn" else None
        self.engine = faulty_engine_class(Engine, self.faults)(
            runner=runner,
            model=tiny_model(self.window),
            num_blocks=-(-LONGEST // block_size) + spare_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tokenizer=Letters(),
            twin=faulty_twin(self.package, self.faults),
        )
        if runner is not None:
            runner.records = records

    def live(self):
        return [request for request in self.requests if request.status != "finished"]

    def attempt(self, fault, call, heard=()):
        """Call something that makes a step in which something may go wrong, and check what came of it.

        A stream may make several steps, and an exception ends it, and so the requests that are heard by it.
        """
        before, counters = {request: request.output_ids for request in self.live()}, replace(self.engine.counters)
        if fault is not None:
            site, left, action, blames = fault
            if isinstance(action, str):
                action = partial(getattr(self, action), left)
            culprit = self.live()[left % len(before)] if before and blames and site not in BOOKS else None
            self.faults.plan(site, left, action, culprit)
        try:
            return call()
        except BaseException as error:
            if error is not self.faults.action:
                raise
            assert self.faults.site in BOOKS or isinstance(error, KeyboardInterrupt), "it is for one request to fail"
            self.aborted.update(request for request in heard if request.finish_reason == "abort")
            for request in set(before) - self.aborted:
                if heard:
                    assert request.status != "running"
                else:
                    assert (request.status, request.output_ids) == ("waiting", before[request]), "it did not happen"
                    assert self.engine.counters == counters
        finally:
            self.faults.plan()
            for request in self.faults.blamed:
                assert request.finish_reason == "error" and request.error, "a failure has to be reported"

    def remember_those_of(self, stream):
        self.aborted.update(request for request in stream.requests if request.status != "finished")

    # What may be done in the middle of a step.

    def abort_one(self, i):
        if self.live():
            request = self.live()[i % len(self.live())]
            self.aborted.add(request)
            self.engine.abort(request)

    def leave_one(self, i):
        if self.streams:
            stream = self.streams.pop(i % len(self.streams))
            if not stream.events.gi_running:
                self.remember_those_of(stream)
            del stream

    def add_one(self, i):
        self.add(TINY_PROMPTS[i % len(TINY_PROMPTS)], TINY_SAMPLINGS[i % len(TINY_SAMPLINGS)])

    SITES = (*PASS, *BOOKS, "tokenizer")
    FAULTS = (
        st.tuples(st.sampled_from(SITES), st.integers(0, 5), st.sampled_from(ERRORS), st.booleans())
        | st.tuples(st.sampled_from(SITES), st.integers(0, 5), st.builds(KeyboardInterrupt), st.booleans())
        | st.tuples(st.just("logits"), st.integers(0, 3), st.sampled_from([torch.nan, torch.inf]), st.booleans())
        | st.tuples(
            st.sampled_from(SITES),
            st.integers(0, 5),
            st.sampled_from(["abort_one", "leave_one", "add_one"]),
            st.just(False),
        )
    )

    @rule(prompt=st.sampled_from(TINY_PROMPTS), sampling=st.sampled_from(TINY_SAMPLINGS))
    def add(self, prompt, sampling):
        self.requests.append(self.engine.add(list(prompt), sampling))

    @rule(prompt=st.sampled_from([[], [23], [1] * 60, "\N{SNOWMAN}"]))
    def add_what_is_no_prompt(self, prompt):
        with pytest.raises(ValueError, match="prompt: expected"):
            self.engine.add(prompt, TINY_SAMPLINGS[1])

    @rule(fault=st.none() | FAULTS)
    def step(self, fault):
        computed, live = self.engine.counters.computed_tokens, self.live()
        self.attempt(fault, self.engine.step)
        computed = self.engine.counters.computed_tokens - computed
        assert computed <= self.engine.max_num_batched_tokens
        if fault is None and live:
            assert computed or any(request.error for request in live), "a request goes on"

    @precondition(lambda self: self.live())
    @rule(i=st.integers(0, 9))
    def abort(self, i):
        self.abort_one(i)

    @precondition(lambda self: self.requests)
    @rule(i=st.integers(0, 99))
    def abort_again(self, i):
        request = self.requests[i % len(self.requests)]
        if request.status == "finished":
            reason = request.finish_reason
            self.engine.abort(request)
            assert request.finish_reason == reason

    @rule(prompts=st.lists(st.sampled_from(TINY_PROMPTS), max_size=3), sampling=st.sampled_from(TINY_SAMPLINGS))
    def open_stream(self, prompts, sampling):
        events = self.engine.stream(prompts, sampling)
        requests = list(self.engine.waiting)[len(self.engine.waiting) - len(prompts) :]
        self.requests += requests
        self.streams.append(SimpleNamespace(events=events, requests=requests, got={r: [] for r in requests}))

    @precondition(lambda self: self.streams)
    @rule(i=st.integers(0, 9), fault=st.none() | FAULTS)
    def read(self, i, fault):
        stream = self.streams[i % len(self.streams)]
        event = self.attempt(fault, lambda: next(stream.events, None), stream.requests)
        if stream not in self.streams:  # it was left in the middle of the step
            self.remember_those_of(stream)
        if event is not None:
            stream.got[event.request].append(event)
        elif stream in self.streams:
            self.streams.remove(stream)
            assert all(request.status == "finished" for request in stream.requests)
            for request, events in stream.got.items():
                if request not in self.aborted:
                    assert [event.token_id for event in events if event.error is None] == request.output_ids
                    assert [event.error for event in events if event.error] == [request.error] * bool(request.error)

    @precondition(lambda self: self.streams)
    @rule(i=st.integers(0, 9), closes=st.booleans())
    def leave(self, i, closes):
        stream = self.streams.pop(i % len(self.streams))
        self.remember_those_of(stream)
        if closes:
            stream.events.close()
        requests = stream.requests
        del stream
        assert all(request.status == "finished" for request in requests)

    @invariant()
    def the_books_are_right(self):
        assert_the_books_are_right(self.engine)
        assert len(self.engine.running) <= self.engine.max_num_seqs
        assert [*self.engine.running, *self.engine.waiting] == self.live(), "the oldest first"

    @invariant()
    def blocks_hold_what_they_are_found_by(self):
        (key_cache, _), *others = self.engine.caches
        for block, prefix in self.engine.pool.contents.items():
            tokens = ()
            while prefix is not None:
                tokens, prefix = (*prefix.tokens, *tokens), prefix.parent
            expected = [keys[-self.engine.block_size :] for keys in keys_alone(self.window, tokens)]
            found = [key_cache[block]]
            for pool in self.engine.scheduler.window_pools:
                window_block = max(pool.window_block[block], pool._kept.get(block, -1))
                found += [others[0][0][window_block]] if window_block >= 0 else []
            for keys, right in zip(found, expected, strict=False):
                torch.testing.assert_close(keys, right, rtol=1e-4, atol=1e-4, equal_nan=True)

    def teardown(self):
        try:
            self.finish_everything()
        finally:
            self.patches.undo()

    def finish_everything(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if not self.live():
                break
            self.engine.step()
        assert_nothing_is_held(self.engine)
        for request in self.requests:
            prompt = tuple(request.tokens[: request.prompt_len])
            tokens, reason = alone_in_an_engine(self.window, prompt, request.sampling)
            is_ended = request.finish_reason == "stop"  # by a token, which is no text
            assert request.text == Letters().decode(request.output_ids[: len(request.output_ids) - is_ended], True)
            if request in self.faults.blamed or (request in self.aborted and request.finish_reason == "abort"):
                assert request.output_ids == tokens[: len(request.output_ids)]
                assert request.finish_reason == ("error" if request in self.faults.blamed else "abort")
            else:
                assert (request.output_ids, request.finish_reason) == (tokens, reason)


class FastEngineMachine(EngineMachine):
    package = "fastattn"


class WindowMachine(FastEngineMachine):
    """An engine with a layer whose pool is smaller."""

    window = 3
