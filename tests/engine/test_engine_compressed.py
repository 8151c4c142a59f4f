"""Layers with entries beside a window in the engine: keys, rows and entries in the blocks of their tokens.

`test_engine_models.py` compares the logits of every family. Here prompts have several times as many entries as a query
may see, and each mistake at the end changes the answers.
"""

import pytest
import torch
from transformers import DynamicCache

import refattn.mla
from tests.helpers.drafts import Chains
from tests.helpers.engines import (
    SYSTEM,
    TWINS,
    UNSTOPPED,
    assert_answers_twice,
    make_engine,
    outputs,
    transformers_outputs,
)
from tests.helpers.pairs import every_pair
from tests.helpers.tiny_models import COMPRESSED, make_family
from twinattn.engine import NGram, SamplingParams, calibrate, compressed_modules
from twinattn.engine.compressed_storage import CompressedStorage, SharedStorage
from twinattn.engine.kv_cache_dtype import quantize
from twinattn.engine.layers import Entries, Layer, Window

PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 8, [*SYSTEM, 50], list(range(60, 84))]
NO_END = COMPRESSED | dict(eos_token_id=None)


@pytest.fixture(scope="module")
def model(device):
    return make_family("deepseek_v4", device, **NO_END)


@pytest.fixture(scope="module")
def expected(model):
    """The answers of transformers' own code, with its own caches."""
    return transformers_outputs(model, PROMPTS, attention="eager")


def test_what_is_selected_decides(expected, device):
    """Else nothing here would show that it is right. With a topk past every length, all entries are seen."""
    model = make_family("deepseek_v4", device, **NO_END | dict(index_topk=100))
    every = transformers_outputs(model, PROMPTS, attention="eager")
    assert outputs(make_engine(model, "fastattn"), PROMPTS, UNSTOPPED) == every
    assert sum(a != b for a, b in zip(expected, every, strict=True)) >= 2
    assert len(set(map(tuple, expected))) == len(PROMPTS)


SCHEDULES = {
    "short steps": dict(max_num_batched_tokens=9, batch_invariant=True),
    "smallest pool": dict(num_blocks=8, max_num_batched_tokens=13),
    "larger blocks, drafts": dict(block_size=8, num_blocks=10, speculation=Chains(4)),
}


@pytest.mark.covers("F235")
@pytest.mark.parametrize(("schedule", "twin"), every_pair(SCHEDULES, TWINS))
def test_greedy_is_generate(model, expected, twin, schedule):
    """Prompts in chunks, preemptions, rejected drafts, and shared prefixes the second time: nothing is rolled back."""
    engine = make_engine(model, twin, **SCHEDULES[schedule])
    assert_answers_twice(engine, PROMPTS, expected, UNSTOPPED)
    counters = engine.counters
    assert counters.preemptions or schedule != "smallest pool"
    assert counters.drafted_tokens > counters.accepted_tokens or "drafts" not in schedule


def test_a_layer_keeps_keys_rows_and_entries_in_the_blocks_of_their_tokens(model):
    engine = make_engine(model, num_blocks=20)
    selects = CompressedStorage(16, ratio=2, overlap=True, topk=3, index_size=16)
    alone = CompressedStorage(16, ratio=4, overlap=False, topk=0, index_size=0)
    assert engine.layers == [
        Layer(Window(5), SharedStorage(16)),
        Layer(Entries(5, 2, True), selects),
        Layer(Entries(5, 4, False), alone),
    ]
    keys, rows, entries = (20, 4, 16), (20, 4, 64), (20, 2, 16)
    assert [x.shape for x in engine.caches[1]] == [keys, rows, entries, rows, entries]
    assert [x.shape for x in engine.caches[2]] == [keys, (20, 4, 32), (20, 1, 16)]
    sizes = [layer.storage.bytes_per_token(torch.float32) for layer in engine.layers[1:]]
    assert [4 * 20 * size for size in sizes] == [sum(x.nbytes for x in cache) for cache in engine.caches[1:]]


@pytest.fixture
def rounded(monkeypatch):
    """Round what is written into plain pools of keys and of entries as fp8 would."""
    write, into_entries = refattn.mla.write, CompressedStorage._write_entries

    def round_to(dtype):
        def write_rounded(value, gate, cache, slots, **scale):
            if not gate.shape[1] and cache is not index:  # keys and entries have no second part
                value = value.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).to(value.dtype)
            write(value, gate, cache, slots, **scale)

        index = None

        def write_entries(storage, twin, module, hidden_states, rows, entries, *others):
            nonlocal index
            index = entries if type(module).__name__ == compressed_modules.INDEXER else None
            into_entries(storage, twin, module, hidden_states, rows, entries, *others)
            index = None

        monkeypatch.setattr(refattn.mla, "write", write_rounded)
        monkeypatch.setattr(CompressedStorage, "_write_entries", write_entries)

    return round_to


FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.covers("F240")
@pytest.mark.parametrize("kind", FP8)
def test_pools_of_fp8_answer_as_plain_pools_of_rounded_numbers(model, expected, kind, rounded):
    """So do both twins, in any chunks, and after preemptions."""
    ways = [(twin, {}) for twin in TWINS] + [("fastattn", SCHEDULES["smallest pool"])]
    answers = [
        outputs(make_engine(model, twin, kv_cache_dtype=kind, batch_invariant=True, **schedule), PROMPTS, UNSTOPPED)
        for twin, schedule in ways
    ]
    assert answers[0] == answers[1] == answers[2] != expected  # else nothing was rounded
    rounded(FP8[kind])
    assert outputs(make_engine(model, "refattn", batch_invariant=True), PROMPTS, UNSTOPPED) == answers[0]


@pytest.mark.core
@pytest.mark.covers("F240")
def test_pools_of_fp8_are_of_keys_and_entries_and_have_a_scale_by_a_calibration(model):
    calibration = calibrate(model, PROMPTS)
    engine = make_engine(model, num_blocks=20, kv_cache_dtype="fp8_e4m3", calibration=calibration)
    fp8, kept = torch.float8_e4m3fn, torch.float32
    assert [[x.dtype for x in cache] for cache in engine.caches] == [
        [fp8],
        [fp8, kept, fp8, kept, kept],
        [fp8, kept, fp8],
    ]
    sizes = [layer.storage.bytes_per_token(kept) for layer in engine.layers]
    assert [4 * 20 * size for size in sizes] == [sum(x.nbytes for x in cache) for cache in engine.caches]
    for layer, amax in zip(engine.layers, calibration, strict=True):
        assert layer.storage.cache_scale == pytest.approx(float(amax.key.max()) / 448)


def test_several_samples_share_blocks_and_copy_their_entries(model):
    """The block that several samples go on from holds rows of an open entry, which each needs."""
    sampling = dict(max_tokens=7, temperature=1.0, stop_token_ids=(), seed=3)
    engine = make_engine(model, "fastattn", max_num_batched_tokens=16)
    (together,) = engine.generate([PROMPTS[1]], SamplingParams(n=3, **sampling))
    alone = [
        make_engine(model, "fastattn").generate([PROMPTS[1]], SamplingParams(**sampling | dict(seed=3 + i)))[0]
        for i in range(3)
    ]
    assert [sample.output_ids for sample in together.samples] == [one.output_ids for one in alone]


def test_recorded_steps_complete_entries(model, expected, recorder, device):
    """A step that was recorded serves others of its shape, in which other sequences complete entries."""
    if device != "cpu":
        pytest.skip("steps are recorded by a stand-in; a CUDA graph does not capture the experts of transformers")
    engine = make_engine(model, "fastattn", runner=recorder, num_blocks=8, max_num_batched_tokens=10)
    assert outputs(engine, PROMPTS, UNSTOPPED) == expected
    assert {shape.queries > 1 for shape in recorder._steps} == {False, True}


def test_what_such_layers_do_not_have_is_refused(model, shapes_unchecked):
    with pytest.raises(ValueError, match="max_branches=1, as Window over SharedKeys has no plan for trees"):
        make_engine(model, speculation=NGram(max_drafts=3, max_branches=2))
    for kind in ("int8", "int4", "fp8_ds_mla"):
        with pytest.raises(NotImplementedError, match=r"the engine keeps no shared keys and values \(DeepSeek-V4\) in"):
            make_engine(model, kv_cache_dtype=kind)
    entries = [layer for layer in make_engine(model).layers if layer.storage.kind == "CompressedKeys"]
    with pytest.raises(
        NotImplementedError, match=r"the engine keeps no compressed keys \(DeepSeek-V4\) in a pool of int4"
    ):
        quantize(entries, "int4")
    with pytest.raises(ValueError, match="block_size: expected a multiple of 2, the tokens of an entry, got 3"):
        make_engine(model, block_size=3)
    compressor = model.model.layers[1].self_attn.compressor
    with pytest.raises(ValueError, match="cache: expected None in the compressor of an engine, got DynamicCache"):
        compressed_modules._forward(compressor, lambda: (None, None), None, None, None, DynamicCache(), 1)


# --- mistakes, and that what is compared above shows them ---

COMPRESS, WRITE = CompressedStorage.compress, CompressedStorage._write_entries


def sees_all(storage, *arguments):
    """Every query sees all entries."""
    COMPRESS(storage, *arguments)


def rows_of_a_step(storage, twin, module, hidden_states, rows, *others):
    """Rows of earlier steps are lost, as in a buffer that is not carried on."""
    rows.zero_()
    WRITE(storage, twin, module, hidden_states, rows, *others)


def entries_without_rotation(storage, twin, module, hidden_states, rows, entries, slots, plan):
    """Each entry is rotated as if it was the first one."""
    object.__setattr__(plan, "positions", plan.positions * 0)
    WRITE(storage, twin, module, hidden_states, rows, entries, slots, plan)


@pytest.mark.parametrize(
    ("method", "mistake"),
    [("compress", sees_all), ("_write_entries", rows_of_a_step), ("_write_entries", entries_without_rotation)],
)
def test_a_mistake_is_seen(model, expected, method, mistake, monkeypatch):
    monkeypatch.setattr(CompressedStorage, method, mistake)
    assert outputs(make_engine(model, "fastattn", max_num_batched_tokens=9), PROMPTS, UNSTOPPED) != expected
