"""Steps that are launched before the tokens of the one before are read: their order, and that nothing else changes.

On a CPU a capture is the step itself, run again, and a launch is over when it returns; everything else is as on a GPU.
"""

import gc
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

import twinattn.engine.cuda_graphs
import twinattn.engine.graph_shapes
from fastattn.kernels.device import on_gpu
from tests.helpers import engines
from tests.helpers.engines import MODELS, SYSTEM, Watched, assert_nothing_is_held, make_engine
from tests.helpers.tiny_models import make_llama, make_model
from twinattn.engine import CPU, CudaGraphs, NGram, SamplingParams
from twinattn.engine.decode_rows import DecodeRows

# Longer than elsewhere, so that several launches are ahead, and prompts wait for others.
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 10, [*SYSTEM, 50], list(range(60, 93)), [*SYSTEM, 40, 41, 42, 43, 44]]
GREEDY = SamplingParams(max_tokens=9)
LONG = [SamplingParams(max_tokens=count, temperature=0.7 * (count % 2), seed=count) for count in range(6, 12)]


def outputs(engine, prompts, sampling=GREEDY):
    return engines.outputs(engine, prompts, sampling)


@pytest.fixture(scope="module")
def llama(device):
    return make_llama().to(device)


@pytest.fixture
def ahead(steps_as_recordings, device):
    """Make engines whose decodes are watched."""
    return lambda model, **options: make_engine(model, "fastattn", runner=Watched(device), **options)


@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS[1:5]], ids=["one", "more than one step takes"])
def test_the_next_step_is_launched_before_a_token_is_read(llama, ahead, prompts):
    """A prompt's step, the chunk of a prompt beside a decode, and the decode after it."""
    engine = ahead(llama, max_num_batched_tokens=40)
    requests = engine.generate(prompts, SamplingParams(max_tokens=5, stop_token_ids=()))
    assert [len(request.output_ids) for request in requests] == [5] * len(prompts)
    steps = engine.counters.steps
    order = [f"{verb} {n}" for i in range(1, steps) for verb, n in (("launch", i + 1), ("read", i))]
    assert engine.runner.said == ["launch 1", *order, f"read {steps}"], "none is computed for nothing"
    assert engine.runner.ahead == ([[1, 1, 9, 29], [1, 1, 1, 4]] if len(prompts) > 1 else [])
    assert_nothing_is_held(engine)


def test_all_that_a_runner_does_is_on_the_gpu_of_the_model(llama, ahead, monkeypatch):
    """Captures, events and launches are of the current GPU, which need not be that of the model."""
    graphs, current, done = twinattn.engine.cuda_graphs, [], Counter()

    @contextmanager
    def on_gpu(device):
        current.append(device)
        try:
            yield
        finally:
            current.pop()

    def there(function, name):
        def call(*arguments):
            assert current and set(current) == {llama.device}, name
            done[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(graphs, "on_gpu", on_gpu)
    for place, name in (
        (graphs, "_record"),
        (graphs, "_record_event"),
        (graphs, "_choose"),
        (graphs._Decode, "_copy"),
        (graphs._Step, "_fill"),
        (CudaGraphs, "_launch"),
    ):
        monkeypatch.setattr(place, name, there(getattr(place, name), name))
    monkeypatch.setattr(CudaGraphs, "_is_worth_recording", lambda *_: True)
    engine = ahead(llama)
    engine.warm_up(20)
    assert outputs(engine, PROMPTS[:3]) == outputs(make_engine(llama, "fastattn"), PROMPTS[:3])
    assert min(done.values()) > 1 and len(done) == 6 and not current


def test_a_gpu_is_made_the_current_one_for_a_model_on_it():
    with mock.patch.object(torch.cuda, "device") as device, on_gpu(torch.device("cpu")):
        device.assert_not_called()
    with mock.patch.object(torch.cuda, "device") as device, on_gpu(torch.device("cuda", 1)):
        device.assert_called_once_with(torch.device("cuda", 1))
        device.return_value.__enter__.assert_called_once()


@pytest.mark.parametrize("sampling", [LONG, SamplingParams(max_tokens=9)], ids=["sampled", "greedy"])
def test_answers_are_those_of_an_engine_that_waits(llama, ahead, sampling):
    """Requests of different lengths leave one after the other, and the rows of the others move up."""
    engine, waiting = ahead(llama), make_engine(llama, "fastattn")
    expected = outputs(waiting, PROMPTS, sampling)
    assert outputs(engine, PROMPTS, sampling) == expected
    assert any(rows.sources.max() >= 0 for rows in engine.runner.rows)
    for rows in engine.runner.rows:
        assert rows.seq_lens.tolist() == sorted(rows.seq_lens.tolist(), reverse=True), "the longest begins first"
    counted = vars(engine.counters)
    assert counted == vars(waiting.counters), "a launch ahead counts when it is read"


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_layer(kind, ahead, device):
    model = make_model(*MODELS[kind], device)
    engine = ahead(model, num_blocks=40, max_num_batched_tokens=24)
    assert outputs(engine, PROMPTS, LONG) == outputs(
        make_engine(model, "fastattn", num_blocks=40, max_num_batched_tokens=24), PROMPTS, LONG
    )
    assert any(rows.sources.max() >= 0 for rows in engine.runner.rows)


def test_a_stop_token_ends_a_request_whose_next_token_is_under_way(llama, ahead):
    """Its row is computed for nothing, and never read; its blocks go to others at once."""
    plain = outputs(make_engine(llama), PROMPTS)
    stop = next(token for token in plain[4][1:-1] if token not in plain[1])
    stopping = SamplingParams(max_tokens=9, stop_token_ids=(stop,))
    expected = outputs(make_engine(llama), PROMPTS, stopping)
    assert len(expected[4]) < 9 == len(expected[1])
    engine = ahead(llama, num_blocks=30)
    for _ in range(2):  # the second time, prefixes are found: only blocks that hold what they say
        assert outputs(engine, PROMPTS, stopping) == expected
        assert_nothing_is_held(engine)


def test_who_is_aborted_or_added_while_a_decode_is_under_way(llama, ahead):
    alone = [outputs(make_engine(llama), [prompt])[0] for prompt in PROMPTS]
    engine = ahead(llama, num_blocks=30)
    first, second = (engine.add(PROMPTS[i], SamplingParams(max_tokens=9)) for i in (1, 2))
    while len(first.output_ids) < 3:
        engine.step()
    assert engine._under_way is not None
    engine.abort(second)
    third = engine.add(PROMPTS[4], SamplingParams(max_tokens=9))  # takes the blocks that the row under way writes to
    engine.step()
    assert engine._under_way is not None and third.status == "running" and not third.output_ids
    assert engine.runner.ahead == [[1, len(PROMPTS[4])]], "it starts beside a token that has not been read"
    while engine.running or engine.waiting:
        engine.step()
    assert (first.output_ids, third.output_ids) == (alone[1], alone[4])
    assert second.output_ids == alone[2][: len(second.output_ids)] and second.finish_reason == "abort"
    assert_nothing_is_held(engine)
    assert outputs(engine, PROMPTS) == alone, "and a decode that no request waits for is forgotten"


def test_a_waiting_request_starts_where_another_ends(llama, ahead):
    engine = ahead(llama, max_num_seqs=2)
    assert outputs(engine, PROMPTS, LONG) == outputs(make_engine(llama), PROMPTS, LONG)
    ahead_of = [rows for rows in engine.runner.rows if rows.sources.max() >= 0]
    assert ahead_of, "while two run and no other request may, the next decode does not depend on who waits"


def test_too_few_blocks_for_two_tokens(llama, ahead):
    engine = ahead(llama, num_blocks=15, max_num_batched_tokens=10)
    assert outputs(engine, PROMPTS, LONG) == outputs(make_engine(llama), PROMPTS, LONG)
    assert engine.counters.preemptions > 0
    assert_nothing_is_held(engine)


def test_drafts_follow_tokens_that_are_known(llama, ahead):
    engine = ahead(llama, speculation=NGram(max_drafts=3))
    assert outputs(engine, PROMPTS, LONG) == outputs(make_engine(llama), PROMPTS, LONG)
    assert not any(rows.sources.max() >= 0 for rows in engine.runner.rows)


def test_a_row_that_fails_while_the_next_token_is_under_way(llama, ahead, monkeypatch):
    """NaN has no token: the decode after it goes on with token 0 in that row, and the others do not notice."""
    alone, sample = outputs(make_engine(llama), PROMPTS), twinattn.engine.cuda_graphs.sample
    engine, calls = ahead(llama), []

    def spoil(logits, *settings):
        calls.append(len(logits))
        if len(calls) == 3:
            logits = logits.clone()
            logits[1] = torch.nan
        return sample(logits, *settings)

    monkeypatch.setattr(twinattn.engine.cuda_graphs, "sample", spoil)
    requests = engine.generate(PROMPTS, SamplingParams(max_tokens=9))
    (failed,) = (request for request in requests if request.finish_reason == "error")
    assert "logits: expected finite numbers" in failed.error
    for request, answer in zip(requests, alone, strict=True):
        assert request.output_ids == answer[: len(request.output_ids)]
        assert len(request.output_ids) == 9 or request is failed
    assert len(failed.output_ids) < 9
    assert calls[3] == len(PROMPTS), "the next decode was under way"
    assert_nothing_is_held(engine)


def test_a_launch_ahead_that_raises_is_made_again_in_its_own_step(llama, ahead, monkeypatch, caplog):
    engine = ahead(llama)
    alone, launch_next, raised = outputs(make_engine(llama), PROMPTS), engine.runner.launch_next, []

    def raise_once(*args):
        if len(engine.runner.rows) == 4 and not raised:
            raised.append(True)
            raise RuntimeError("planted")
        return launch_next(*args)

    monkeypatch.setattr(engine.runner, "launch_next", raise_once)
    assert outputs(engine, PROMPTS) == alone
    assert raised and "could not be launched ahead" in caplog.text


def test_an_interrupt_undoes_the_step_and_forgets_what_is_under_way(llama, ahead, monkeypatch):
    engine = ahead(llama)
    alone, requests = (
        outputs(make_engine(llama), PROMPTS),
        [engine.add(p, SamplingParams(max_tokens=9)) for p in PROMPTS],
    )
    while len(requests[0].output_ids) < 4:
        engine.step()
    assert engine._under_way is not None
    monkeypatch.setattr(engine, "_read", lambda under_way: exec("raise KeyboardInterrupt"))
    before = [request.output_ids for request in requests]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine._under_way is None and [request.output_ids for request in requests] == before
    engine.runner.records = False
    while engine.running or engine.waiting:
        engine.step()
    assert [request.output_ids for request in requests] == alone


def test_a_prompt_that_begins_like_one_under_way_waits_for_its_blocks(llama, ahead):
    """Else it would compute them again; one with another beginning does not wait."""
    found = []
    for second in ([*PROMPTS[4][:32], 1, 2, 3], PROMPTS[4][::-1]):
        engine = ahead(llama, max_num_batched_tokens=33)
        assert outputs(engine, [PROMPTS[4], second]) == outputs(make_engine(llama), [PROMPTS[4], second])
        found.append((engine.counters.cached_tokens, engine.runner.ahead))
    assert found == [(32, []), (0, [[1, 32]])]


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("kind", ["window", "latents"])
def test_a_step_that_cannot_be_read_is_computed_again_whatever_is_under_way(kind, ahead, device, monkeypatch):
    """A prompt is under way after it, or a decode; a window pool holds the blocks of both steps."""
    model, options = make_model(*MODELS[kind], device), dict(num_blocks=60, max_num_batched_tokens=40, max_num_seqs=5)
    expected = outputs(make_engine(model, **options), PROMPTS, LONG)
    for longest in (1, 2):
        engine, failed = ahead(model, **options), []
        assert bool(engine.window_pools) == (kind == "window")

        def fail_once(under_way, engine=engine, read=engine._read, failed=failed, longest=longest):
            counts = (
                [] if engine._under_way is None else [min(count, 2) for count in engine._under_way.scheduled.values()]
            )
            if counts and max(counts) == longest and not failed:
                failed.append(under_way)
                raise RuntimeError("planted")
            return read(under_way)

        monkeypatch.setattr(engine, "_read", fail_once)
        requests = [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, LONG, strict=True)]
        while engine.running or engine.waiting:
            before = len(failed)
            engine.step()
            assert len(failed) == before or engine._under_way is None, "it took tokens that could not be read"
        assert [request.output_ids for request in requests] == expected and failed
        assert_nothing_is_held(engine)


def test_a_window_pool_has_room_for_one_step_of_prompts(ahead, device):
    """Two steps that it has no room for together follow one another as ever; their decodes are launched ahead."""
    model, options = make_model(*MODELS["window"], device), dict(max_num_batched_tokens=24, max_num_seqs=2)
    prompts = [PROMPTS[4], list(range(20, 34))]
    engine = ahead(model, **options)
    (pool,) = engine.window_pools.values()
    assert pool.num_blocks == 11, "and the prompts have 9 and 4"
    assert outputs(engine, prompts) == outputs(make_engine(model, **options), prompts)
    assert not engine.runner.ahead and any(rows.sources.max() >= 0 for rows in engine.runner.rows)


def test_the_longest_leaves_and_graphs_of_shorter_ones_follow(llama, ahead, monkeypatch, caplog):
    """The rows that follow from its own have as many columns as it had blocks, more than the graph has room for."""
    monkeypatch.setattr(twinattn.engine.graph_shapes, "FEWEST_TOKENS", 1)
    engine = ahead(llama)
    lengths = [SamplingParams(max_tokens=count) for count in (9, 9, 9, 9, 3, 9)]
    assert outputs(engine, PROMPTS, lengths) == outputs(make_engine(llama), PROMPTS, lengths)
    widths = {shape.columns for shape in engine.runner._steps if shape.queries == 1}
    assert {8, 16} <= widths and not caplog.text


def test_what_a_launch_ahead_allocates_is_used_by_whatever_comes_instead(llama, ahead, monkeypatch, caplog):
    """A request that started for a step that could not be launched runs in the next one; blocks may be there early."""
    monkeypatch.setattr(twinattn.engine.graph_shapes, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(CudaGraphs, "_is_worth_recording", lambda self, engine, shape: True)
    options = dict(max_num_batched_tokens=30, num_blocks=34)
    engine, expected = ahead(llama, **options), outputs(make_engine(llama, **options), PROMPTS, LONG)
    launch_next, failed = engine.runner.launch_next, []

    def raise_often(*args):
        failed.append(list(args[-1].values()))
        if len(failed) % 2:
            raise RuntimeError("planted")
        return launch_next(*args)

    monkeypatch.setattr(engine.runner, "launch_next", raise_often)
    assert outputs(engine, PROMPTS, LONG) == expected
    assert any(max(counts) > 1 for counts in failed[::2]), "one that a prompt would have started in"
    assert caplog.text.count("could not be launched") == caplog.text.count("RuntimeError: planted") > 2
    assert_nothing_is_held(engine)


def test_a_prompt_whose_logits_are_not_finite_while_its_next_token_is_under_way(llama, ahead, monkeypatch):
    sample, calls = twinattn.engine.cuda_graphs.sample, []

    def spoil(logits, *settings):
        calls.append(len(logits))
        if len(calls) == 1:
            logits = logits.clone()
            logits[1] = torch.nan
        return sample(logits, *settings)

    prompts = [PROMPTS[i] for i in (0, 1, 2, 4)]  # no two of which begin alike
    alone, engine = outputs(make_engine(llama), prompts), ahead(llama)
    monkeypatch.setattr(twinattn.engine.cuda_graphs, "sample", spoil)
    requests = engine.generate(prompts, GREEDY)
    assert [request.finish_reason for request in requests] == ["length", "error", "length", "length"]
    assert [request.output_ids for request in requests] == [alone[0], [], *alone[2:]]
    assert engine.runner.said[:3] == ["launch 1", "launch 2", "read 1"]
    assert_nothing_is_held(engine)


def test_decodes_that_share_a_prefix_are_launched_ahead(llama, ahead, monkeypatch):
    """A cascade is free on this machine, so all of these decodes are launched one by one."""
    monkeypatch.setattr(twinattn.engine.cuda_graphs, "LAYER_SECONDS", 0.0)
    prompts = [[*SYSTEM, 40, 41], [*SYSTEM, 50], [*SYSTEM, 60]]
    engine = ahead(llama, machine=replace(CPU, launch_seconds=0.0, workers=1, tile_keys=4))
    engine.generate([SYSTEM], SamplingParams(max_tokens=1))
    assert outputs(engine, prompts) == outputs(make_engine(llama), prompts)
    steps = engine.counters.steps
    saved = engine.counters.saved_key_reads
    assert saved >= 12 * 2 * 7 and not any(len(rows.requests) > 2 for rows in engine.runner.rows)
    said = engine.runner.said
    assert all(said.index(f"launch {i + 1}") < said.index(f"read {i}") for i in range(5, steps))


@pytest.mark.covers("A44")
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_rows_of_the_next_decode_are_those_of_its_requests(llama, block_size, monkeypatch, ahead):
    """What follows from the rows before equals what is made anew from the requests, but for the unknown token."""
    engine, found = ahead(llama, block_size=block_size, num_blocks=150), []
    replay = engine.runner._replay

    def compare(rows):
        if rows.sources.max() >= 0:
            known = [len(request.tokens) for request in rows.requests]
            for request in rows.requests:
                request.tokens.append(3)
            anew = DecodeRows.of(rows.requests)
            for request in rows.requests:
                request.tokens.pop()
            assert anew.seq_lens.tolist() == rows.seq_lens.tolist() == [count + 1 for count in known]
            for row, length in enumerate(rows.seq_lens.tolist()):
                blocks = -(-length // block_size)
                assert anew.block_table[row, :blocks].tolist() == rows.block_table[row, :blocks].tolist()
            torch.testing.assert_close(rows.settings, anew.settings, rtol=0, atol=0)
            found.append(len(known))
        return replay(rows)

    monkeypatch.setattr(engine.runner, "_replay", compare)
    engine.generate(PROMPTS, LONG)
    assert len(set(found)) > 2, "requests leave one after the other"


@pytest.fixture
def collected():
    """Undo `gc.freeze` after a test."""
    yield
    gc.unfreeze()


def test_warming_up_leaves_nothing_behind_and_nothing_to_capture(llama, ahead, collected, monkeypatch):
    engine, steps = ahead(llama, max_num_seqs=9, num_blocks=150), []
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda e, tokens: (steps.append(tokens.query_lens), run(e, tokens))[1])
    fresh = vars(engine.counters).copy()
    engine.warm_up(300)
    assert gc.get_freeze_count()
    assert any(min(lens) == 1 < max(lens) for lens in steps), "a chunk of a prompt beside a decode"
    assert vars(engine.counters) == fresh and not engine.pool.contents
    assert_nothing_is_held(engine)
    shapes = {shape for shape in engine.runner._steps if shape.queries == 1}
    assert {(shape.rows, shape.columns) for shape in shapes} == {(r, 256) for r in (1, 2, 4, 8, 16)}
    assert all(engine.runner._steps[shape].replay is not None for shape in shapes)
    assert outputs(engine, PROMPTS) == outputs(make_engine(llama), PROMPTS)
    assert {shape for shape in engine.runner._steps if shape.queries == 1} == shapes


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
def test_warming_up_is_for_an_engine_without_requests(llama, twin, collected):
    engine = make_engine(llama, twin)
    engine.warm_up()
    assert_nothing_is_held(engine)
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="num_tokens: expected an int of at least 1"):
            engine.warm_up(wrong)
    run = engine.run_model
    engine.run_model = lambda inputs: run(inputs) * torch.nan
    with pytest.raises(RuntimeError, match="warm_up: 3 of 3 requests failed: FloatingPointError: logits"):
        engine.warm_up()
    engine.run_model = run
    assert_nothing_is_held(engine)
    engine.add([1, 2])
    with pytest.raises(ValueError, match="warm_up: expected no requests, got 1"):
        engine.warm_up()
