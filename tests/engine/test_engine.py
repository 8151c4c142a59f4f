"""The engine against transformers' `generate`, on tiny random models: whatever the scheduler does, the words stay."""

import functools
import importlib
import itertools
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy
import pytest
import torch
from torch.nn import functional

import fastattn
import twinattn.engine.block_pool
import twinattn.engine.choice
import twinattn.engine.cuda_graphs
import twinattn.engine.demo_comparison
import twinattn.engine.graph_shapes
import twinattn.engine.scheduler
from tests.helpers.engines import (
    GREEDY,
    MODELS,
    PROMPTS,
    SYSTEM,
    TWINS,
    assert_nothing_is_held,
    make_engine,
    outputs,
    transformers_outputs,
)
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import SHARED_CACHES, byte_tokenizer, make_family, make_llama, make_model
from twinattn.engine import (
    CPU,
    BlockPool,
    Counters,
    CudaGraphs,
    Draft,
    Engine,
    NGram,
    Request,
    SamplingParams,
    StepTokens,
)

TEMPERED = SamplingParams(max_tokens=5, temperature=0.9, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def llama(device):
    return make_llama(device)


@pytest.fixture(scope="module")
def expected(llama):
    return transformers_outputs(llama, PROMPTS)


@functools.cache
def other_layers(kind, device):
    """Make a model of MODELS, which engines share one after the other, and what transformers answers to PROMPTS."""
    model = make_model(*MODELS[kind], device)
    return model, transformers_outputs(model, PROMPTS, attention="eager")


# The words are those of transformers.


@pytest.mark.parametrize("twin", TWINS)
def test_greedy_is_generate(llama, expected, twin):
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the model should not always say the same"
    engine = make_engine(llama, twin)
    assert outputs(engine, PROMPTS) == expected
    assert_nothing_is_held(engine)


@pytest.mark.covers("D134")
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_is_generate_for_other_layers(kind, twin, device):
    model, expected = other_layers(kind, device)
    assert outputs(make_engine(model, twin, max_num_batched_tokens=11, num_blocks=12), PROMPTS) == expected


WINDOWED = ("window", "window and full, softcap, scale")
SMALL = dict(max_num_seqs=3, max_num_batched_tokens=7)


@pytest.mark.covers("D133", "D140")
@pytest.mark.parametrize(("kind", "num_blocks", "twin"), every_pair([*WINDOWED, "chunks and full"], [64, 8], TWINS))
def test_layers_with_a_window_have_a_smaller_pool(kind, num_blocks, twin, device):
    """Prompts in chunks, decodes, shared prefixes and preemptions, with blocks that come back."""
    model, expected = other_layers(kind, device)
    window = model.config.attention_chunk_size if kind == "chunks and full" else model.config.sliding_window
    seqs = 3 if num_blocks == 64 else 2
    engine = make_engine(model, twin, num_blocks=num_blocks, **SMALL | dict(max_num_seqs=seqs))
    small = (seqs * (window - 1 + 2 * 4 - 2) + 7) // 4
    assert {cache[0].shape[0] for cache in engine.caches} == ({small} if kind == "window" else {small, num_blocks})
    assert outputs(engine, PROMPTS) == expected
    assert outputs(engine, PROMPTS) == expected, "and with what it still has of them"
    assert (engine.counters.preemptions > 0) == (num_blocks == 8)
    assert_nothing_is_held(engine)


def test_a_window_that_any_step_may_need_has_the_whole_pool(device):
    model = make_model(*MODELS["window"], device)
    engine = make_engine(model, num_blocks=12, max_num_seqs=64)
    assert not engine.window_pools and {cache[0].shape[0] for cache in engine.caches} == {12}


@pytest.mark.parametrize("twin", TWINS)
def test_a_prefix_is_found_as_long_as_its_last_window_is_there(twin, device):
    """One answer after the other: the blocks of the window come back, but are used again only when others need them."""
    model = make_model(*MODELS["window"], device)
    prompt = [*SYSTEM, *SYSTEM, 7, 8]  # seven blocks, less what goes through the model for its logits: six full ones
    (expected,) = transformers_outputs(model, [prompt], attention="eager")
    engine = make_engine(model, twin, max_num_seqs=1, max_num_batched_tokens=7)
    assert outputs(engine, [prompt], SamplingParams(max_tokens=1)) == [expected[:1]]
    ((_, pool),) = engine.window_pools.items()
    found = []
    for others in ([], [], [[90] * 5], [[91] * 40]):
        engine.generate(others, SamplingParams(max_tokens=1))
        cached = engine.counters.cached_blocks
        assert outputs(engine, [prompt], SamplingParams(max_tokens=1)) == [expected[:1]]
        found.append(engine.counters.cached_blocks - cached)
    assert len(engine.pool.find(prompt)) == 7
    assert found[:2] == [6, 6], "all of it"
    assert found[-1] == 0, "the pool of the window holds another one's tokens; the blocks of the full pool do not do"
    assert outputs(engine, [prompt]) == [expected]


def first_step(engine, model):
    """Return a layer, the query, key and value of a token, and the step of a new request that has it alone."""
    tokens = [torch.randn(1, heads, 1, 16, device=model.device) for heads in (6, 2, 2)]
    request = engine.add([1])
    engine.scheduler._start(request, [])
    engine.scheduler._allocate_or_preempt(request, 1)
    return model.model.layers[0].self_attn, tokens, engine.make_inputs(StepTokens.of({request: 1}))["step"]


@pytest.mark.covers("D128")
@pytest.mark.parametrize("twin", TWINS)
def test_batch_invariance_reaches_every_layer(twin, llama, expected, monkeypatch):
    """And no output is computed in a cascade, which depends on who else begins with the same blocks."""
    path = importlib.import_module(f"{twin}.chunked_prefill")
    attention, seen = path.attention, []

    def watched(query, key_cache, value_cache, plan, options, **others):
        seen.append(options.batch_invariant)
        return attention(query, key_cache, value_cache, plan, options, **others)

    monkeypatch.setattr(path, "attention", watched)
    for batch_invariant in (True, False):
        free = replace(CPU, launch_seconds=0.0, workers=1, tile_keys=4)
        sizes = dict(max_num_batched_tokens=16)
        engine = make_engine(llama, twin, batch_invariant=batch_invariant, machine=free, **sizes)
        assert outputs(engine, PROMPTS) == expected
        module, tokens, step = first_step(engine, llama)
        engine.layer_pools.attend(
            module, *tokens, step=step, s_aux=torch.zeros(6, device=llama.device)
        )  # with tensors among them
        assert set(seen) == {batch_invariant}
        assert (engine.counters.saved_key_reads == 0) == batch_invariant
        seen.clear()


@pytest.mark.parametrize("twin", TWINS)
def test_local_layers_plan_decodes_and_prefills_apart(twin, device, monkeypatch):
    model, expected = other_layers("chunks and full", device)
    path = importlib.import_module(f"{twin}.local")
    plan, planned = path.plan, []

    def watched(batch, **sizes):
        planned.append(sorted(batch.query_lens.tolist()))
        return plan(batch, **sizes)

    monkeypatch.setattr(path, "plan", watched)
    assert outputs(make_engine(model, twin, max_num_batched_tokens=16), PROMPTS) == expected
    assert not any(1 in lengths and max(lengths) > 1 for lengths in planned)
    assert any(len(lengths) > 1 and max(lengths) == 1 for lengths in planned)
    assert any(max(lengths) > 1 for lengths in planned)


@pytest.mark.covers("B57", "D127")
@pytest.mark.parametrize("twin", TWINS)
def test_sinks_reach_the_path(llama, twin):
    """Sinks above every score leave nothing of the values."""
    engine = make_engine(llama, twin)
    module, tokens, step = first_step(engine, llama)
    sinks = torch.full((6,), 1e4, device=llama.device)
    for kernel in (None, "cpu") if llama.device.type == "cpu" else (None,):  # cpu decodes in its own way
        with nullcontext() if kernel is None else fastattn.use_kernel(kernel):
            plain = engine.layer_pools.attend(module, *tokens, step=step)
            sunk = engine.layer_pools.attend(module, *tokens, step=step, s_aux=sinks)
        assert plain.abs().max() > 0.1
        assert sunk.abs().max() == 0


# Whatever the scheduler does, the words stay.

SCHEDULES = {
    "one token a step": dict(max_num_batched_tokens=1),
    "one request at a time": dict(max_num_seqs=1),
    "short steps": dict(max_num_batched_tokens=7),
    "small pool": dict(num_blocks=10),
    "smallest pool, short steps": dict(num_blocks=8, max_num_batched_tokens=5),
    "blocks of one": dict(block_size=1, num_blocks=31, max_num_batched_tokens=16),
    "one block holds all": dict(block_size=64, num_blocks=2),
    "odd blocks": dict(block_size=7, num_blocks=5, max_num_batched_tokens=9),
}


@pytest.mark.parametrize(("schedule", "twin"), [*zip(SCHEDULES, itertools.cycle(TWINS), strict=False)])
def test_schedules_change_nothing(llama, expected, twin, schedule):
    """Each by one twin: the scheduler knows neither."""
    engine = make_engine(llama, twin, **SCHEDULES[schedule])
    assert outputs(engine, PROMPTS) == expected
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("twin", TWINS)
def test_preemption_keeps_the_random_numbers(llama, twin):
    expected = outputs(make_engine(llama), PROMPTS, TEMPERED)
    engine = make_engine(llama, twin, **SCHEDULES["smallest pool, short steps"])
    assert outputs(engine, PROMPTS, TEMPERED) == expected
    assert engine.counters.preemptions > 0


def test_long_prompts_go_in_chunks_beside_decodes(llama):
    engine = make_engine(llama, max_num_batched_tokens=8)
    short, long = engine.add([1, 2], GREEDY), engine.add(range(1, 25), GREEDY)
    engine.step()
    assert (len(short.output_ids), long.num_computed_tokens) == (1, 6)
    engine.step()
    assert (len(short.output_ids), long.num_computed_tokens) == (2, 13), (
        "the decode comes first, the chunk gets what is left"
    )
    engine.step()
    engine.step()
    assert (len(short.output_ids), len(long.output_ids)) == (4, 1)
    assert engine.counters.chunks == 5


def test_the_youngest_is_preempted_and_its_answer_stays(llama):
    prompts = [list(range(1, 9)), list(range(20, 28)), list(range(40, 48))]
    engine = make_engine(llama, num_blocks=7)
    requests = [engine.add(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
    for _ in range(2):
        engine.step()
    # 7 blocks of 4: 2 for each prompt, and then only the oldest gets a third one.
    assert [request.status for request in requests] == ["running", "running", "waiting"]
    while engine.waiting or engine.running:
        engine.step()
    assert engine.counters.preemptions == 2, "later the oldest needs a fourth block, and the second one has it"
    assert [request.output_ids for request in requests] == transformers_outputs(llama, prompts, 9)


def test_the_tokens_of_a_step():
    """A chunk of a prompt, whose logits are unwanted, a decode, and a decode with drafts, all of which have logits."""
    chunk = Request([1, 2, 3, 4, 5], 5, GREEDY, num_computed_tokens=1, blocks=[3, 0])
    decode = Request([7, 8], 1, GREEDY, num_computed_tokens=1, blocks=[2])
    drafted = Request([9], 1, GREEDY, blocks=[1], draft=Draft((4, 6), (-1, 0, 1)))
    tokens = StepTokens.of({chunk: 2, decode: 1, drafted: 3})
    tables = [[3, 0], [2], [1]]
    assert tokens == StepTokens([2, 1, 3], [3, 2, 3], tables, [2, 3, 8, 9, 4, 6], [2, 3, 4, 5], None)
    drafted.draft = Draft((4, 6), (-1, 0, 0))
    tree = StepTokens.of({chunk: 2, decode: 1, drafted: 3})
    assert tree == replace(tokens, parents=[range(-1, 1), range(-1, 0), (-1, 0, 0)])


@pytest.mark.covers("A34")
@pytest.mark.parametrize("twin", TWINS)
def test_padding_rows_change_nothing(llama, expected, twin):
    class PaddedEngine(Engine):
        def make_inputs(self, tokens, prefixes=()):
            inputs = super().make_inputs(tokens, prefixes)
            rows = inputs["input_ids"].shape[1] + 3
            batch = inputs["step"].batch
            padded = {name: functional.pad(inputs[name], (0, 3)) for name in ("input_ids", "position_ids")}
            return inputs | padded | dict(step=self.planner.plan(batch, rows, prefixes))

    sizes = dict(num_blocks=12, block_size=4, max_num_batched_tokens=10)
    engine = PaddedEngine(llama, twin=importlib.import_module(twin), **sizes)
    assert outputs(engine, PROMPTS) == expected


@pytest.fixture
def recording_engine(steps_as_recordings):
    """Make engines that record their decodes."""

    def make(model, **options):
        engine = make_engine(model, "fastattn", runner=CudaGraphs(), **options)
        engine.runner.records = True
        return engine

    return make


@pytest.mark.covers("A44", "D160")
def test_recorded_decodes_change_nothing(llama, expected, recording_engine, monkeypatch):
    """With more and fewer requests than rows, past a capacity, through preemptions, and once more."""
    monkeypatch.setattr(twinattn.engine.graph_shapes, "FEWEST_TOKENS", 16)
    engine = recording_engine(llama, num_blocks=9, max_num_batched_tokens=10)
    assert outputs(engine, PROMPTS) == expected
    assert engine.counters.preemptions > 0
    recorded = dict(engine.runner._steps)
    assert {shape.rows for shape in recorded if shape.queries == 1} <= {1, 2, 4, 8} and len(
        {shape.columns for shape in recorded}
    ) > 1
    assert outputs(engine, PROMPTS) == expected
    assert all(engine.runner._steps[size] is decode for size, decode in recorded.items()), "recorded twice"


def test_recorded_prompts_change_nothing(llama, expected, recording_engine):
    """In chunks that are not all complete, beside decodes, with padding tokens, once their shapes have come twice."""
    engine = recording_engine(llama, max_num_batched_tokens=10)
    for _ in range(3):  # from the second time on the starts of prompts are in the pool, and the shapes are others
        assert outputs(engine, PROMPTS) == expected
    recorded = [shape for shape in engine.runner._steps if shape.queries > 1]
    assert any(shape.rows > 1 for shape in recorded) and len(recorded) < len(engine.runner._seen)
    assert all(count > 1 for shape, count in engine.runner._seen.items() if shape in recorded)


def test_prompts_that_keep_a_gpu_busy_are_not_recorded(llama, expected, recording_engine):
    slow = replace(CPU, flops_per_second=1e6)
    engine = recording_engine(llama, machine=slow)
    for _ in range(3):
        assert outputs(engine, PROMPTS) == expected
    assert {shape.queries for shape in engine.runner._steps} == {1}


@pytest.mark.covers("D167")
def test_a_recording_serves_longer_sequences(llama, recording_engine):
    engine = recording_engine(llama)
    prompt = [[7, 3] * 4]
    assert outputs(engine, prompt, SamplingParams(max_tokens=40)) == transformers_outputs(llama, prompt, 40)
    assert [shape for shape in engine.runner._steps if shape.queries == 1] == [(1, 256, 1, 1, False)]


def test_a_second_model_of_the_same_config_is_served_too(device):
    """What the config says of the attention was said of the first model."""
    first, second = (make_model(*MODELS["differential"], device) for _ in range(2))
    assert first.config is second.config
    assert outputs(make_engine(second), PROMPTS[:2]) == outputs(make_engine(first), PROMPTS[:2])


@pytest.mark.covers("B69")
def test_only_what_fastattn_computes_on_cuda_is_recorded(llama):
    """The demo's comparison answers as `fastattn` does, but looks at every answer, which a recording cannot do."""
    engines = [make_engine(llama, "fastattn"), make_engine(llama, "refattn")]
    comparison = twinattn.engine.demo_comparison.Comparison()
    engines.append(Engine(llama, num_blocks=20, block_size=4, twin=comparison))
    is_on_cuda = llama.device.type == "cuda"
    assert [CudaGraphs.can_record(engine) for engine in engines] == [is_on_cuda, False, False]
    for engine in engines[is_on_cuda:]:
        runner = CudaGraphs()
        assert runner.run(engine, StepTokens.of({engine.add([1]): 1})) is None
        assert not runner.records


def test_a_runner_serves_one_engine(llama, recording_engine):
    """What it has recorded reads the pools of that engine."""
    first, second = recording_engine(llama), make_engine(llama, "fastattn")
    outputs(first, PROMPTS[:1])
    with pytest.raises(ValueError, match="engine: expected the one that this runner served before"):
        first.runner.run(second, StepTokens.of({second.add([1]): 1}))


@pytest.mark.parametrize("kind", [*WINDOWED, "chunks and full"])
def test_recorded_decodes_have_window_pools(kind, recording_engine, device):
    model, expected = other_layers(kind, device)
    engine = recording_engine(model, **SMALL)
    assert engine.window_pools
    assert outputs(engine, PROMPTS) == expected
    assert engine.runner._steps


@pytest.mark.covers("A45", "D169")
def test_padding_rows_of_a_recording_write_nothing(llama, recording_engine):
    """Pools begin as NaN: the token of padding is 0 in this model, and so are its key and its value."""
    engine = recording_engine(llama)
    for pool in itertools.chain.from_iterable(engine.caches):
        pool.fill_(torch.nan)
    prompts = [[11], [7, 3] * 10, [5, 9, 2]]  # three requests in four rows
    outputs(engine, prompts)
    assert (4, 256, 4, 1, False) in engine.runner._steps
    for key_cache, _ in engine.caches:
        written = (~key_cache.flatten(1).isnan()).any(1).sum()
        assert written == sum(-(-(len(prompt) + 4) // 4) for prompt in prompts)


@pytest.mark.covers("A44", "A45", "D169")
@pytest.mark.parametrize("lens", [(1, 20, 4), (1, 20, 5, 5)], ids=["rows", "tokens"])
def test_padding_rows_of_a_recorded_prompt_write_nothing(lens, llama, recording_engine):
    """Padding requests, or padding tokens alone, which come after the last request's."""
    engine = recording_engine(llama)
    for first in (10, 40, 70):  # a shape is recorded when it has come twice
        for pool in itertools.chain.from_iterable(engine.caches):
            pool.fill_(torch.nan)
        outputs(engine, [[first + i] * n for i, n in enumerate(lens)], SamplingParams(max_tokens=1))
        for key_cache, _ in engine.caches:
            written = (~key_cache.flatten(2).isnan()).any(2).sum()  # slots
            assert written == sum(lens)
    prompts = [shape for shape in engine.runner._steps if shape.queries > 1]
    assert [(shape.rows, shape.tokens > sum(lens)) for shape in prompts] == [(4, True)]


@pytest.mark.parametrize("kind", MODELS)
def test_recorded_decodes_of_other_layers(kind, recording_engine, device):
    model, expected = other_layers(kind, device)
    assert outputs(recording_engine(model), PROMPTS) == expected


@pytest.mark.covers("C114")
def test_recorded_decodes_of_layers_that_share_a_cache(recording_engine, device):
    """Gemma 3n: one plan and one table serve the layer that writes and those that read its pool."""
    model = make_family("gemma3n_text", device, **SHARED_CACHES)
    expected = transformers_outputs(model, PROMPTS, attention="eager")
    engine = recording_engine(model)
    assert outputs(engine, PROMPTS) == expected
    assert engine.runner._steps and engine.owners == [0, 1, 2, 0, 2]


# The prefix cache.


@pytest.mark.covers("A41")
@pytest.mark.parametrize("twin", TWINS)
def test_prefix_is_computed_once(llama, expected, twin):
    engine = make_engine(llama, twin)
    assert outputs(engine, PROMPTS[1:2]) == expected[1:2]
    assert outputs(engine, PROMPTS[3:4]) == expected[3:4]
    # 13 tokens are shared: 3 full blocks of 4.
    assert (engine.counters.cached_blocks, engine.counters.cached_tokens) == (3, 12)
    assert engine.counters.computed_tokens == len(PROMPTS[1]) + 4 + len(PROMPTS[3]) - 12 + 4


def test_running_requests_share_blocks(llama, expected):
    engine = make_engine(llama)
    first = engine.add(PROMPTS[1], GREEDY)
    engine.step()
    second = engine.add(PROMPTS[3], GREEDY)
    engine.step()
    assert first.blocks[:3] == second.blocks[:3]
    assert [engine.pool.users[block] for block in first.blocks[:3]] == [2, 2, 2]
    assert set(first.blocks[3:]).isdisjoint(second.blocks[3:])
    while engine.running:
        engine.step()
    assert [first.output_ids, second.output_ids] == [expected[1], expected[3]]


@pytest.mark.covers("A41")
def test_a_prompt_that_is_all_there_still_computes_its_last_token(llama):
    engine = make_engine(llama)
    prompt = list(range(1, 9))  # two blocks, full to the last token
    once, again = outputs(engine, [prompt]), outputs(engine, [prompt])
    assert once == again
    assert engine.counters.cached_tokens == 4


@pytest.mark.parametrize("twin", TWINS)
def test_the_last_token_of_an_answer_is_not_in_the_pool(llama, twin):
    """It never went through the model, even where it fills the last block: who goes on from it computes its keys."""
    engine, asked = make_engine(llama, twin), SamplingParams(max_tokens=7, stop_token_ids=())
    (first,) = engine.generate([range(1, 6)], asked)
    assert len(first.tokens) == 12, "the answer ends with a block"
    follow_up = [*first.tokens, 7]
    (second,) = engine.generate([follow_up], asked)
    assert engine.counters.cached_blocks == 2
    (alone,) = make_engine(llama, twin).generate([follow_up], asked)
    assert second.output_ids == alone.output_ids


@pytest.mark.parametrize("twin", TWINS)
def test_equal_hashes_give_right_answers(llama, expected, twin, monkeypatch):
    monkeypatch.setattr(twinattn.engine.block_pool, "_block_hash", lambda parent, tokens: 0)
    engine = make_engine(llama, twin, num_blocks=9)
    for _ in range(2):
        assert outputs(engine, PROMPTS) == expected
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("twin", TWINS)
def test_a_cascade_reads_what_is_shared_once_and_changes_nothing(llama, expected, twin):
    """Where a launch costs nothing a cascade is always worth it; on this machine it never is for so few keys."""
    free = replace(CPU, launch_seconds=0.0, workers=1, tile_keys=4)
    engine = make_engine(llama, twin, max_num_batched_tokens=16, machine=free)
    assert outputs(engine, PROMPTS) == expected
    assert 0 < engine.counters.saved_key_reads < engine.counters.key_reads
    plain = make_engine(llama, twin, max_num_batched_tokens=16)
    assert outputs(plain, PROMPTS) == expected
    assert plain.counters.saved_key_reads == 0
    assert plain.counters.key_reads == engine.counters.key_reads


def test_saved_key_reads_are_those_of_the_blocks_shared(llama):
    """Two requests with the same 12 tokens in three blocks, each decoding: one of them reads those 12 keys for both."""
    engine = make_engine(llama, machine=replace(CPU, launch_seconds=0.0, workers=1, tile_keys=4))
    engine.generate([SYSTEM], SamplingParams(max_tokens=1))
    engine.scheduler.counters = Counters()
    requests = [engine.add([*SYSTEM, token], SamplingParams(max_tokens=3)) for token in (40, 50)]
    for steps in (1, 2, 3):
        engine.step()
        assert engine.counters.saved_key_reads == 12 * steps
    assert all(request.status == "finished" for request in requests)
    assert engine.counters.key_reads == sum(2 * (14 + step) for step in range(3))


def test_blocks_are_found_by_all_that_comes_before_them():
    """Two prompts whose second blocks hold the same tokens: a hash without the parent's keeps one of the two only."""
    allocator = BlockPool(4, 2)
    chains = {(1, 2, 9, 9): allocator.allocate(2), (3, 4, 9, 9): allocator.allocate(2)}
    for tokens, blocks in chains.items():
        parent = allocator.remember(blocks[0], None, tokens[:2])
        allocator.remember(blocks[1], parent, tokens[2:])
    for tokens, blocks in chains.items():
        assert allocator.find(tokens) == blocks
    assert allocator.find([9, 9]) == [], "no prompt begins like this"
    assert allocator.find([1, 2, 9, 9, 9, 9]) == chains[1, 2, 9, 9]


def test_forgotten_blocks_are_not_found_and_their_users_keep_them():
    allocator = BlockPool(4, 2)
    blocks = allocator.allocate(2)
    parent = allocator.remember(blocks[0], None, (1, 2))
    allocator.remember(blocks[1], parent, (3, 4))
    allocator.share(blocks)
    allocator.forget(blocks[:1])
    assert allocator.find([1, 2, 3, 4]) == [], "it is not known what the second block continues"
    assert [allocator.users[block] for block in blocks] == [2, 2]
    again = allocator.allocate(1)
    allocator.remember(again[0], None, (1, 2))
    assert allocator.find([1, 2, 3, 4]) == again, "the old second block is none of a new first one"
    allocator.release(blocks)
    allocator.release(blocks)
    assert set(allocator.free) == set(range(4)) - set(again)


def test_equal_hashes_are_not_mistaken_for_one_another(monkeypatch):
    monkeypatch.setattr(twinattn.engine.block_pool, "_block_hash", lambda parent, tokens: 0)
    allocator = BlockPool(4, 2)
    a, b = allocator.allocate(2)
    allocator.remember(a, None, (1, 2))
    assert allocator.find([1, 2, 1, 2]) == [a], "the second block has the same tokens, but others before them"
    assert allocator.find([2, 1]) == []
    allocator.remember(b, None, (3, 4))
    assert allocator.find([3, 4]) == [b]
    assert allocator.find([1, 2]) == [], "one block a hash: the newer"


def test_blocks_are_reused_least_recently_used_first():
    allocator = BlockPool(5, 2)
    first, second = allocator.allocate(2), allocator.allocate(2)
    parent = allocator.remember(first[0], None, (1, 2))
    allocator.remember(first[1], parent, (3, 4))
    allocator.remember(second[0], None, (5, 6))
    allocator.release(first)
    allocator.release(second)
    assert allocator.find([1, 2, 3, 4]) == first
    unused = next(block for block in range(5) if block not in (*first, *second))
    # What holds nothing goes first; then the oldest, the end of a prefix before its start.
    assert allocator.allocate(2) in ([second[1], unused], [unused, second[1]])
    assert allocator.allocate(1) == [first[1]]
    assert allocator.find([1, 2, 3, 4]) == [first[0]]
    allocator.share([first[0]])
    assert allocator.allocate(1) == [second[0]], "a shared block is not free"
    assert allocator.find([5, 6]) == []


# SamplingParams.


def test_sampled_tokens_depend_on_the_request_alone(llama):
    samplings = [SamplingParams(max_tokens=5, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    together = outputs(make_engine(llama), PROMPTS, samplings)
    alone = [
        outputs(make_engine(llama), [prompt], [sampling])[0]
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    assert together == alone
    assert outputs(make_engine(llama), PROMPTS[::-1], samplings[::-1]) == alone[::-1]
    assert together != outputs(make_engine(llama), PROMPTS)
    assert together != outputs(make_engine(llama), PROMPTS, SamplingParams(max_tokens=5, temperature=1.0, seed=77))


@pytest.mark.parametrize(
    ("branches", "kind", "twin"),
    every_pair([None, 1, 3], ["window and full, softcap, scale", "latents"], TWINS),
)
def test_the_default_device_changes_nothing(kind, branches, twin, device):
    """An engine makes what it needs where its model is, or on the host."""
    model, prompts = make_model(*MODELS[kind], device), [[5, 6, 7, 8] * 3, SYSTEM]
    speculation = None if branches is None else NGram(max_drafts=3, max_branches=branches)
    expected = outputs(make_engine(model, twin, speculation=speculation), prompts)
    torch.set_default_device("meta" if device == "cpu" else device)
    try:
        found = make_engine(model, twin, speculation=speculation).generate(prompts, GREEDY)
    finally:
        torch.set_default_device(None)
    assert [(request.output_ids, request.error) for request in found] == [(answer, None) for answer in expected]


@pytest.mark.parametrize("kind", ["plain", "latents", "differential"])
def test_autocast_is_refused_and_changes_nothing(llama, kind, device):
    """It would store keys of one type and values of another, or multiply latents in a type that was not chosen."""
    model = llama if kind == "plain" else make_model(*MODELS[kind], device)
    expected = outputs(make_engine(model), PROMPTS[:2])
    engine = make_engine(model)
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:2]]
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        for refused in (engine.step, lambda: make_engine(model)):
            with pytest.raises(
                NotImplementedError, match="^torch.autocast: the engine runs a model in its own type, f"
            ):
                refused()
    assert engine.counters.steps == 0 and list(engine.waiting) == requests
    while engine.waiting or engine.running:
        engine.step()
    assert [request.output_ids for request in requests] == expected


def test_greedy_and_sampled_requests_go_together(llama, expected):
    samplings = [GREEDY, TEMPERED, GREEDY, TEMPERED, GREEDY]
    mixed = outputs(make_engine(llama), PROMPTS, samplings)
    assert mixed[::2] == expected[::2]
    assert mixed[1::2] == outputs(make_engine(llama), PROMPTS, TEMPERED)[1::2]


# The end, and the text.


@pytest.mark.parametrize("way", ["step", "stream"])
def test_the_last_token_of_an_answer_says_why_it_is_the_last(llama, expected, way):
    engine, samplings = make_engine(llama), [SamplingParams(max_tokens=5, stop_token_ids=(expected[1][3],)), GREEDY]
    if way == "stream":
        events = list(engine.stream(PROMPTS[1:3], samplings))
    else:
        for case in zip(PROMPTS[1:3], samplings, strict=True):
            engine.add(*case)
        events = [event for _ in range(8) for event in engine.step()]
    for request in {event.request for event in events}:
        reasons = [event.finish_reason for event in events if event.request is request]
        assert reasons == [None] * (len(request.output_ids) - 1) + [request.finish_reason]
    assert {event.finish_reason for event in events} == {None, "stop", "length"}
    failed = engine.add(PROMPTS[0], GREEDY)
    engine.abort(failed)
    assert failed.finish_reason == "abort" and engine.step() == []


@pytest.mark.parametrize("twin", TWINS)
def test_stop_tokens_end_an_answer(llama, expected, twin):
    stop = expected[1][3]
    cut = expected[1].index(stop) + 1
    request, other = make_engine(llama, twin).generate(
        [PROMPTS[1], PROMPTS[2]], [SamplingParams(max_tokens=5, stop_token_ids=(stop,)), GREEDY]
    )
    assert (request.output_ids, request.finish_reason) == (expected[1][:cut], "stop")
    assert (other.output_ids, other.finish_reason) == (expected[2], "length")


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_the_models_end_tokens_end_an_answer(llama, expected, several, monkeypatch):
    stop = expected[1][3]
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [96, stop] if several else stop)
    ended = transformers_outputs(llama, PROMPTS)
    assert outputs(make_engine(llama), PROMPTS) == ended
    assert ended != expected
    assert outputs(make_engine(llama), PROMPTS, SamplingParams(max_tokens=5, stop_token_ids=())) == expected


@pytest.fixture(scope="module")
def byte_llama(device):
    return make_llama(device, vocab_size=257, eos_token_id=256)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def scripted(monkeypatch, texts):
    """Make the model answer the requests with these bytes, in order."""
    scripts = {}

    def choose(logits, requests, **_):
        assert len(logits) == len(requests)
        for request in requests:
            if request not in scripts:
                scripts[request] = texts[len(scripts)]
        return [scripts[request][len(request.output_ids)] for request in requests]

    monkeypatch.setattr(twinattn.engine.choice, "choose", choose)


def test_pieces_of_text_are_whole_characters(byte_llama, tokenizer, monkeypatch):
    scripted(monkeypatch, [[*"aé€😀 é".encode(), 256]])
    events = list(make_engine(byte_llama, tokenizer=tokenizer).stream([[1]], SamplingParams(max_tokens=50)))
    assert [event.text for event in events] == ["a", "", "é", "", "", "€", "", "", "", "😀", " ", "", "é", ""]
    assert events[-1].request.text == "aé€😀 é"
    assert events[-1].request.finish_reason == "stop"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param("half a character: 😀".encode()[:-2], id="ends inside"),
        pytest.param(b"ab\xff\xfecd", id="no character"),
        pytest.param("honest \N{REPLACEMENT CHARACTER} sign".encode(), id="replacement character"),
    ],
)
def test_pieces_add_up_to_the_text(byte_llama, tokenizer, monkeypatch, said):
    scripted(monkeypatch, [list(said), list("ünïcödé".encode())])
    samplings = [SamplingParams(max_tokens=len(said)), SamplingParams(max_tokens=11)]
    engine = make_engine(byte_llama, tokenizer=tokenizer)
    pieces = {}
    for event in engine.stream([[1, 2], "ab"], samplings):
        pieces.setdefault(event.request, []).append(event.text)
    first, second = pieces
    assert "".join(pieces[first]) == first.text == tokenizer.decode(list(said))
    assert "".join(pieces[second]) == second.text == "ünïcödé"
    assert second.tokens[:2] == list(b"ab"), "a prompt may be text"


def test_who_stops_listening_frees_the_blocks(llama, expected):
    engine = make_engine(llama, max_num_batched_tokens=10)
    stream = engine.stream(PROMPTS, GREEDY)
    listened = [next(stream) for _ in range(5)]
    kept = engine.add(PROMPTS[4], GREEDY)
    stream.close()
    assert {event.request.finish_reason for event in listened} == {"abort"}
    while engine.running or engine.waiting:
        engine.step()
    assert kept.output_ids == expected[4]
    assert_nothing_is_held(engine)
    engine.abort(kept)
    assert kept.finish_reason == "length", "a finished request stays as it is"


# Bad input.

BAD_REQUESTS = {
    "empty": ([], GREEDY, r"prompt: expected at least one token"),
    "unknown token": ([3, 97], GREEDY, r"prompt: expected token ids in 0\.\.96, got 3\.\.97"),
    "negative token": ([3, -1], GREEDY, r"prompt: expected token ids in 0\.\.96, got -1\.\.3"),
    "too long": (list(range(80)), SamplingParams(max_tokens=2), r"prompt: .* 20 blocks of 4 .* need 21 blocks"),
    "too long with its answer": ([1], SamplingParams(max_tokens=81), r"prompt: .* max_tokens=81, which need 21 blocks"),
    "text without a tokenizer": ("hello", GREEDY, r"prompt: expected token ids"),
}
NO_REQUESTS = {
    "fractions": ([1, 1.5], GREEDY, r"prompt: expected token ids, which are ints, got 1\.5"),
    "a mask": ([True, False], GREEDY, r"prompt: expected token ids, which are ints, got True"),
    "texts": (["a"], GREEDY, r"prompt: expected token ids, which are ints, got 'a'"),
    "a row of rows": (torch.tensor([[1, 2]]), GREEDY, r"prompt: expected token ids, which are ints, got \[1, 2\]"),
    "floats": (torch.ones(2), GREEDY, r"prompt: expected token ids, which are ints, got 1\.0"),
    "one id": (5, GREEDY, r"prompt: expected token ids, got 5"),
    "one id in a tensor": (torch.tensor(5), GREEDY, r"prompt: expected token ids, got tensor\(5\)"),
    "bytes": (b"ab", GREEDY, r"prompt: expected token ids, got b'ab'"),
    "what a tokenizer returns": ({"input_ids": [1]}, GREEDY, r"prompt: expected token ids, got {'input_ids'"),
    "nothing": (None, GREEDY, r"prompt: expected token ids, got None"),
    "another sampling": ([1], dict(max_tokens=3), r"sampling: expected a SamplingParams, got"),
    "no sampling": ([1], None, r"sampling: expected a SamplingParams, got None"),
}


@pytest.mark.parametrize("bad", NO_REQUESTS)
def test_what_is_no_request_is_not_queued(llama, bad, shapes_unchecked):
    prompt, sampling, message = NO_REQUESTS[bad]
    engine = make_engine(llama, num_blocks=20)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, sampling)
    with pytest.raises(ValueError, match=message):
        engine.stream([PROMPTS[0], prompt], [GREEDY, sampling])
    assert_nothing_is_held(engine)


def test_bad_requests_leave_the_others_alone(llama, expected, shapes_unchecked):
    engine = make_engine(llama, num_blocks=20, max_num_batched_tokens=10)
    good = [engine.add(p, GREEDY) for p in PROMPTS]
    for prompt, sampling, message in BAD_REQUESTS.values():
        engine.step()
        caches = [cache.clone() for layer in engine.caches for cache in layer]
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, sampling)
        with pytest.raises(ValueError, match=message):
            engine.generate([PROMPTS[0], prompt], [GREEDY, sampling])
        assert [*engine.running, *engine.waiting] == [request for request in good if request.status != "finished"]
        assert all(map(torch.equal, caches, [cache for layer in engine.caches for cache in layer]))
    assert engine.running
    while engine.running or engine.waiting:
        engine.step()
    assert [request.output_ids for request in good] == expected


def test_the_largest_request_that_fits_is_served(llama):
    engine = make_engine(llama, num_blocks=6)
    assert len(outputs(engine, [list(range(24))], SamplingParams(max_tokens=1))[0]) == 1
    assert len(outputs(engine, [[1]], SamplingParams(max_tokens=24))[0]) == 24


ROWS = {"tuple": tuple, "iterator": iter, "tensor": torch.tensor, "array": numpy.array, "list of tensors": torch.tensor}


@pytest.mark.parametrize("kind", ROWS)
def test_prompts_may_be_any_row_of_ints(llama, expected, kind, shapes_unchecked):
    row = ROWS[kind](PROMPTS[1])
    (request,) = make_engine(llama).generate([list(row) if kind == "list of tensors" else row], GREEDY)
    assert request.output_ids == expected[1]
    assert all(type(token) is int for token in request.tokens)
    first, second = make_engine(llama).generate(torch.tensor([PROMPTS[0], PROMPTS[0]]), [GREEDY, GREEDY])
    assert first.output_ids == second.output_ids == expected[0]


def test_number_of_samplings(llama, shapes_unchecked):
    with pytest.raises(ValueError, match="sampling: expected one, or one for each of 2 prompts, got 3"):
        make_engine(llama).generate([[1], [2]], [GREEDY] * 3)
    with pytest.raises(ValueError, match="sampling: expected a SamplingParams, got 5"):
        make_engine(llama).generate([[1], [2]], 5)


@pytest.mark.parametrize("prompts", ["hello", 5, None])
def test_one_prompt_in_place_of_several(llama, prompts, shapes_unchecked):
    """Each letter of a text would be a prompt."""
    with pytest.raises(ValueError, match=f"prompts: expected a list of prompts, got {prompts!r}"):
        make_engine(llama).generate(prompts)


BAD_SAMPLINGS = {
    "max_tokens": (0, -3, 1.5, 2.0, True, "9", None),
    "temperature": (-1.0, float("nan"), float("inf"), "1", None, True),
    "top_p": (0.0, 1.5, -0.5, float("nan"), "1", None, True),
    "seed": (1.5, "a", None, True),
    "stop_token_ids": ([3], 3, (1.5,), ("a",), (True,), "ab", {3}),
}


@pytest.mark.parametrize("name", BAD_SAMPLINGS)
def test_bad_sampling(name, shapes_unchecked):
    for value in BAD_SAMPLINGS[name]:
        with pytest.raises(ValueError, match=f"{name}: expected .*, got") as error:
            SamplingParams(**{name: value})
        assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs"])
def test_bad_sizes(llama, name, shapes_unchecked):
    for size in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match=f"{name}: expected an int of at least 1, got {size}"):
            make_engine(llama, **{name: size})


@pytest.mark.parametrize("twin", TWINS)
def test_a_pool_without_memory(llama, twin, monkeypatch):
    kv_cache = importlib.import_module(f"{twin}.kv_cache")
    monkeypatch.setattr(kv_cache, "allocate", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    # 2 layers of keys and values for 2**20 blocks of 4 tokens, with 2 heads of 16 numbers of 4 bytes: 2 GiB.
    with pytest.raises(torch.OutOfMemoryError, match=r"num_blocks: .* 1048576 blocks .* 2 GiB. CUDA out of memory."):
        make_engine(llama, twin, num_blocks=2**20)


BAD_MODELS = {
    "KV heads": (dict(num_key_value_heads=4), "num_attention_heads to be a multiple of 4 KV heads, got 6"),
    "heads": (dict(head_dim=None, num_attention_heads=7, num_key_value_heads=7), "hidden_size .* 7 heads, got 48"),
}


@pytest.mark.parametrize("bad", BAD_MODELS)
def test_heads_that_do_not_divide(bad, llama, monkeypatch):
    changes, message = BAD_MODELS[bad]
    for name, value in changes.items():
        monkeypatch.setattr(llama.config, name, value)
    with pytest.raises(ValueError, match=f"model: expected {message}"):
        make_engine(llama)


def test_the_model_is_the_engines_until_it_is_given_back(llama, expected):
    engine = make_engine(llama)
    assert outputs(engine, PROMPTS) == expected
    with pytest.raises(ValueError, match="engine: expected one to run this model"):
        llama(torch.tensor([[1, 2]], device=llama.device))
    assert transformers_outputs(llama, PROMPTS) == expected
    assert outputs(engine, PROMPTS) == expected, "and the engine takes it again"


def test_a_model_with_a_mask_of_its_own(llama):
    engine = make_engine(llama)
    outputs(engine, PROMPTS)
    mask = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match="attention_mask: expected None"):
        llama(torch.tensor([[1, 2]], device=llama.device), attention_mask=mask, layer_pools=engine.layer_pools)


def test_an_engine_takes_any_package_with_the_paths(llama, expected):
    engine = Engine(llama, num_blocks=64, block_size=4, twin=importlib.import_module("fastattn"))
    assert engine.twin.chunked_prefill.__name__ == "fastattn.chunked_prefill"
    assert outputs(engine, PROMPTS) == expected
