"""The benchmark counts the least work right, gives no speed to a wrong answer, and survives failing contenders."""

import csv
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from torch.multiprocessing import start_processes
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

import fastattn.replay
import fastattn.sliding_window
import twinattn.bench
from fastattn.kernels import NAMES, order
from fastattn.kernels import device as devices
from fastattn.kernels.device import package_version
from fastattn.kernels.flash import fa2, fa3, fa4, flash_mla
from refattn import attention, chunked_prefill, kv_cache, masks
from tests.helpers import gpu_package_doubles
from twinattn.bench import Bench, entries, in_rows, measure, peers, ranks, reading, report, sparse, step_peers
from twinattn.bench.contender import (
    Contender,
    as_chain,
    check_no_tables,
    layers,
    over_plain_cache,
    plain_attention,
    twin,
    twin_in_fp8,
)
from twinattn.bench.measure import Ceilings
from twinattn.bench.row import Row
from twinattn.bench.rows import rows
from twinattn.bench.rows_on_gpu import rows_on_gpu
from twinattn.bench.states import States, steps_twin
from twinattn.bench.step_work import CacheWrite, Slots, VirtualBatches
from twinattn.bench.work import Attention, Layers, WrongAnswerError, drafts, latent_prefill, latents, workload
from twinattn.cli import main
from twinattn.kit import plan_and_attend
from twinattn.libraries import pytorch

CPU = torch.device("cpu")
SMALL = dict(heads=(4, 2), head_size=16, block_size=4)
WORKS = {
    "causal": workload(((5, 20), (1, 33), (7, 7)), **SMALL),
    "encoder": workload(((6, 6), (3, 3)), causal=False, **SMALL),
    "window": workload(((5, 20), (1, 33), (7, 7)), window=6, **SMALL),
    "chunk": workload(((5, 20), (1, 33), (7, 7)), chunk=8, **SMALL),
    "prefix": workload(((1, 18), (1, 21), (1, 16)), shared=12, **SMALL),
}


measured_once = functools.cache(measure.ceilings)


@pytest.fixture(autouse=True)
def one_measurement_of_ceilings(monkeypatch):
    """Measure what the machine reaches once for all tests."""
    monkeypatch.setattr(measure, "ceilings", measured_once)


@pytest.fixture(autouse=True)
def few_sets_of_inputs(monkeypatch):
    """Take two of each row, which need not be larger together than the caches of a CPU: no number means anything."""
    input_sets = measure.input_sets
    monkeypatch.setattr(measure, "input_sets", lambda *row: min(2, input_sets(*row)))


each_work = pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)


def picture(work: Attention, query_len: int, seq_len: int) -> torch.Tensor:
    """Draw who may see whom with the pictures of the reference."""
    visible = (masks.causal if work.causal else masks.full)(query_len, seq_len)
    if work.window[0] >= 0:
        visible &= masks.window(query_len, seq_len, (work.window[0], 0))
    if work.chunk:
        visible &= masks.chunk(query_len, seq_len, work.chunk)
    return visible


@each_work
def test_floors_count_each_visible_pair_and_each_visible_key_once(work):
    pairs = keys = 0
    for i, (query_len, seq_len) in enumerate(work.lens):
        visible = picture(work, query_len, seq_len)
        pairs += int(visible.sum())
        keys += int(visible.any(0)[work.shared if i else 0 :].sum())
    queries = sum(query_len for query_len, _ in work.lens)
    assert work.flops() == pairs * 4 * (2 + 2) * 16
    assert work.reads(2) == 2 * 16 * (queries * 4 + 2 * keys * 2)
    assert work.writes(2) == 2 * 16 * queries * 4


def test_floors_of_latents_count_each_once():
    """A latent is key and value in one; keys and values made of it are not read, but made."""
    work = latents(((2, 20), (1, 33)), heads=(4, 1), head_size=24, value_head_size=16)
    pairs, keys = 19 + 20 + 33, 20 + 33
    assert work.flops() == 2 * pairs * 4 * (24 + 16)
    assert work.reads(2) == 2 * 24 * (3 * 4 + keys) and work.writes(2) == 2 * 3 * 4 * 16
    work = replace(work, stored="e4m3")
    assert work.reads(2) == 24 * (2 * 3 * 4 + keys) and work.writes(2) == 2 * 3 * 4 * 16
    work = latent_prefill(((2, 20), (1, 33)), heads=(4, 4), head_size=24, value_head_size=16, made=(4, 6), workspace=10)
    assert work.flops() == 2 * pairs * 4 * (12 + 6) + 2 * keys * 16 * 4 * (4 + 6)
    assert work.reads(2) == 2 * (3 * 4 * 12 + keys * 24 + 16 * 4 * (4 + 6)) and work.writes(2) == 2 * 3 * 4 * 6


def test_chunks_and_shared_keys_are_whole_blocks():
    with pytest.raises(ValueError, match="chunk, shared: expected multiples of block_size=16, got 24 and 0"):
        workload(((1, 100),), chunk=24)


def test_floors_know_the_size_of_values():
    work = workload(((2, 20),), heads=(4, 2), head_size=12, value_head_size=6)
    assert work.flops() == 2 * (19 + 20) * 4 * (12 + 6)
    assert work.reads(2) == 2 * (2 * 4 * 12 + 20 * 2 * (12 + 6)) and work.writes(2) == 2 * 2 * 4 * 6


def test_bytes_pass_as_in_a_copy_while_as_many_are_written_as_read():
    ceilings = Ceilings(copy=2.0, product=1.0, read=4.0)
    assert ceilings.seconds(reads=100, writes=100) == 200 / 2
    assert ceilings.seconds(reads=100, writes=0) == 100 / 4
    assert ceilings.seconds(reads=100, writes=20) == 40 / 2 + 80 / 4
    assert ceilings.seconds(reads=0, writes=20) == 20 / 2


@pytest.mark.parametrize("shape", reading.SHAPES, ids=str)
def test_what_measures_reading_reads_every_number(shape):
    """On a GPU every shape, on a CPU in Triton's interpreter."""
    device = os.environ["TWINATTN_TEST_DEVICE"]
    numbers = torch.arange(3 * shape[0] * shape[1], dtype=torch.float32, device=device) % 7
    numbers[-1] = 1000.0
    assert reading.sums(numbers, shape).tolist() == numbers.view(3, -1).sum(1).tolist()


def test_a_machine_reads_at_least_as_fast_as_it_copies():
    found = measure.ceilings(CPU, torch.float32, quick=True)
    assert found.read >= found.copy > 1e8 and found.product > 1e8


def test_a_sum_that_is_wrong_is_no_ceiling(monkeypatch):
    monkeypatch.setattr(measure, "_reads", lambda source: {"half of it": source[::2].sum})
    with pytest.raises(RuntimeError, match="half of it: expected a sum of 8388608, got 4194304"):
        measured_once.__wrapped__(CPU, torch.float32, quick=True)


@each_work
def test_pages_hold_the_rows(work):
    inputs = work.draw(CPU, torch.float32, seed=3)
    for key_cache, value_cache, batch in (inputs[4:7], inputs.paged(8)):
        for i, (begin, end) in enumerate(work.key_rows()):
            for rows_, cache in ((inputs.key, key_cache), (inputs.value, value_cache)):
                assert torch.equal(kv_cache.gather(cache, batch.block_table[i], end - begin), rows_[begin:end])
    table = inputs.batch.block_table
    assert (table[:, : work.shared // 4] == table[0, : work.shared // 4]).all()
    assert len(inputs.key_cache) == len({*table.flatten().tolist()} | {0}), "a block that no sequence owns"


@each_work
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_judge_accepts_the_reference(work, dtype):
    inputs = work.draw(CPU, dtype, seed=0)
    outs, lses = [], []
    for (q0, q1), (k0, k1), lens in zip(work.query_rows(), work.key_rows(), work.lens, strict=True):
        out, lse = attention.attend(inputs.query[q0:q1], inputs.key[k0:k1], inputs.value[k0:k1], picture(work, *lens))
        outs.append(out)
        lses.append(lse)
    work.judge(inputs)(torch.cat(outs), torch.cat(lses))


@pytest.mark.parametrize("mistake", ["window", "page", "unwritten", "lse", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_judge_rejects(mistake, dtype):
    work = workload(((300, 700), (1, 512)), heads=(4, 2), head_size=64, window=400)
    inputs = work.draw(CPU, dtype, seed=0)
    wrong = inputs.batch.block_table.clone()
    wrong[1, 30] = wrong[1, 29]  # one stale page in the window of one sequence
    batch = replace(inputs.batch, block_table=wrong) if mistake == "page" else inputs.batch
    left = 400 if mistake == "window" else 399
    tensors = inputs.query, inputs.key_cache, inputs.value_cache
    out, lse = plan_and_attend(chunked_prefill, *tensors, batch, window_size=(left, 0), return_lse=True)
    if mistake == "unwritten":
        out[123, 0, 0] = torch.nan
    if mistake == "lse":
        lse[300] /= torch.log(torch.tensor(2.0))  # base 2
    if mistake == "rows":
        out = out[:-1]
    with pytest.raises(WrongAnswerError, match="lse" if mistake == "lse" else "out"):
        work.judge(inputs)(out, lse)


def test_the_judge_of_latents_rejects_another_scale():
    """One made of the size after absorption; and it accepts the right one in the same type."""
    inputs = LATENTS.draw(CPU, torch.bfloat16, seed=0)
    for scale_of, is_right in ((24, True), (40, False)):
        asked = inputs._replace(work=replace(LATENTS, softmax_scale=scale_of**-0.5))
        out, lse = twin(package="refattn").prepare(asked)(return_lse=True)
        if is_right:
            LATENTS.judge(inputs)(out, lse)
            continue
        with pytest.raises(WrongAnswerError):
            LATENTS.judge(inputs)(out, lse)


def test_the_judge_of_trees_rejects_a_chain():
    inputs = TREES.draw(CPU, torch.float32, seed=0)
    out = plan_and_attend(chunked_prefill, inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch)
    with pytest.raises(WrongAnswerError, match="out"):
        TREES.judge(inputs)(out)


def test_the_floor_of_a_tree_counts_branches():
    """A node sees the keys before its tree and its branch; and every key is read once."""
    work = drafts(((3, 10), (4, 4)), heads=(2, 1), head_size=16)
    depths = 0
    for parents in map(work.parents, range(2)):
        assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
        for node in range(len(parents)):
            while node >= 0:
                node, depths = parents[node], depths + 1
    assert work.flops() == 4 * 16 * 2 * (3 * 7 + depths)
    assert work.reads(2) == workload(work.lens, heads=(2, 1), head_size=16).reads(2)


def test_an_accepted_answer_is_not_left_in_memory():
    work = WORKS["causal"]
    inputs = work.draw(CPU, torch.float32, seed=0)
    out = plan_and_attend(chunked_prefill, inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch)
    work.judge(inputs)(out)
    assert out.isnan().all()


def test_the_judge_of_a_cache_write_sees_every_element():
    work = CacheWrite(32, num_kv_heads=2, head_size=8, block_size=4)
    inputs = work.draw(CPU, torch.float32, seed=0)
    judge = work.judge(inputs)
    kv_cache.write(*inputs)
    judge(None)
    with pytest.raises(WrongAnswerError, match="key_cache: 512 elements"):
        judge(None)  # it was not written again
    kv_cache.write(*inputs)
    inputs.value_cache[3, 1, 1, 7] += 1e-3
    with pytest.raises(WrongAnswerError, match="value_cache: 1 elements"):
        judge(None)


def test_the_judges_of_a_selection_reject_another_choice_among_equal_scores():
    """And scores of one head too few, and attention to one key too many."""
    best = sparse.Selection(3, 200, 150)
    inputs = best.draw(CPU, torch.float32, 0)
    with pytest.raises(WrongAnswerError, match="positions differ"):
        best.judge(inputs)(199 - sparse.select_twin().prepare((inputs[0].flip(1), 150))().flip(1))
    index = sparse.IndexScores(3, 100, num_heads=4, size=16, block_size=16)
    indexed = index.draw(CPU, torch.float32, 0)
    indexed.weights[:, 3] = 1.0
    judge = index.judge(indexed)
    indexed.weights[:, 3] = 0.0
    with pytest.raises(WrongAnswerError, match="scores"):
        judge(sparse.scores_twin().prepare(indexed)())
    latents = sparse.SelectedLatents(3, 200, 40, num_heads=4, rank=32, rope=8, block_size=16)
    selected = latents.draw(CPU, torch.float32, 0)
    judge = latents.judge(selected)
    selected.positions[:, 0] = -1
    with pytest.raises(WrongAnswerError, match="out"):
        judge(sparse.selected_twin().prepare(selected)())


SIZES = dict(heads=(4, 2), head_size=16, block_size=16)
PREFILL, DECODE = ((256, 256),) * 2, ((1, 300),) * 3
WINDOW = workload(((256, 256),), window=70, **SIZES)
CHUNKS, LAST_CHUNK = workload(((256, 256),), chunk=64, **SIZES), workload(((1, 200),) * 3, chunk=64, **SIZES)
PREFIX = workload(((1, 96 + 40),) * 3, shared=96, **SIZES)
NEW_TOKENS = workload(((16, 16 + 120),) * 3, **SIZES)
PAIRS = workload(((1, 300),) * 3, path="differential", **SIZES)
LATENTS = latents(((1, 300), (1, 70)), heads=(4, 1), head_size=40, value_head_size=32, size_before=24)
QUANTIZED_LATENTS = replace(LATENTS, stored="e4m3")
DRAFTS = replace(LATENTS, lens=((3, 200), (3, 65)))
LATENT_TREES = replace(LATENTS, lens=((6, 200), (6, 65)), plan_of="speculative", trees="rooted")
TREES = drafts(((6, 200), (20, 65), (1, 33)), **SIZES)
QUANTIZED_TREES = replace(TREES, lens=((6, 200), (20, 65)), path="quantized", plan_of="speculative", stored="e4m3")
INT4 = workload(((1, 300), (2, 70)), path="quantized", stored="int4", **SIZES)
QUANTIZED_PREFIX = replace(PREFIX, path="quantized", plan_of="cascade", stored="int8")
PROMPTS = latent_prefill(
    ((20, 150), (5, 70)), heads=(4, 4), head_size=40, value_head_size=32, made=(16, 24), workspace=25
)
CONTENDERS = [
    *(
        (workload(PREFILL, **SIZES), peer)
        for peer in (peers.fa4(), peers.fa4(block_size=128), peers.fa4(block_size=None))
    ),
    *(
        (workload(PREFILL, **SIZES), peer)
        for peer in (peers.fa2(), peers.fa2(block_size=None), peers.flashinfer_prefill())
    ),
    *(
        (workload(PREFILL, **SIZES), peer)
        for peer in (peers.fa3(), peers.fa3(block_size=128), peers.fa3(block_size=None), peers.fa3(is_scheduled=True))
    ),
    *((replace(WINDOW, lens=DECODE), peer) for peer in (peers.fa3(), peers.fa3(block_size=64, is_scheduled=True))),
    *((NEW_TOKENS, peer) for peer in (peers.fa3(), peers.fa3(is_scheduled=True), peers.flashinfer_prefill("fa2"))),
    *((work, peers.fa3_chunks()) for work in (CHUNKS, LAST_CHUNK)),
    (workload(DECODE, **SIZES), twin(kernel="cpu")),
    (workload(PREFILL, path="varlen", **SIZES), twin(kernel="cpu")),
    *((Layers(replace(WINDOW, lens=DECODE), 3), layers(3, **how)) for how in ({}, dict(plan_in_each=True))),
    *((workload(PREFILL, **SIZES), peer) for peer in (peers.aten_cpu(), peers.sdpa(), peers.sdpa(masked=True))),
    *(
        (workload(DECODE, **SIZES), peer)
        for peer in (peers.fa4(), peers.fa2(), peers.flashinfer_decode(), peers.sdpa())
    ),
    *((workload(DECODE, **SIZES), peer) for peer in (peers.aten_cpu(), peers.aten_cpu(grouped=True))),
    *((INT4, peer) for peer in (twin(), twin(package="refattn"))),
    *((WINDOW, peer) for peer in (peers.fa4(), peers.fa2(block_size=None), peers.flashinfer_prefill())),
    *((replace(WINDOW, lens=DECODE), peer) for peer in (peers.flashinfer_decode(), peers.aten_cpu_visible())),
    *((CHUNKS, peer) for peer in (peers.fa4_chunks(), peers.aten_cpu_chunks(), peers.aten_cpu_masked())),
    *((LAST_CHUNK, peer) for peer in (peers.fa4_chunks(), peers.aten_cpu_visible())),
    *((PREFIX, peer) for peer in (twin(), peers.fa4_cascade(), peers.flashinfer_cascade())),
    *((PAIRS, peer) for peer in (twin(), twin(package="refattn"), plain_attention())),
    *((PAIRS, peer) for peer in (peers.fa4_differential(wide=False), peers.fa4_differential(wide=True))),
    *(
        (work, peer)
        for work in (LATENTS, DRAFTS)
        for peer in (
            *(twin(), twin(package="refattn"), twin(kernel="cpu")),
            *(peers.flash_mla(), peers.fa3_latents(), peers.flashinfer_latents(), peers.flashinfer_latents("fa2")),
        )
    ),
    *(
        (QUANTIZED_LATENTS, peer)
        for peer in (
            *(twin(), twin(package="refattn"), twin(kernel="cpu")),
            *(over_plain_cache(peer) for peer in (twin(), peers.flash_mla())),
            *(twin_in_fp8(), peers.flash_mla_fp8()),
        )
    ),
    (replace(LATENTS, lens=((1, 256),) * 3), peers.aten_cpu_latents()),
    *(
        (LATENT_TREES, peer)
        for peer in (
            *(twin(), twin(package="refattn"), twin(kernel="cpu")),
            as_chain(peers.flash_mla()),
        )
    ),
    *(
        (TREES, peer)
        for peer in (
            *(twin(), twin(package="refattn"), twin(kernel="cpu"), peers.flashinfer_tree()),
            *(as_chain(peer) for peer in (peers.fa3(), peers.fa4(), twin("chunked_prefill"))),
        )
    ),
    *((QUANTIZED_TREES, peer) for peer in (twin(), over_plain_cache(twin()))),
    *((QUANTIZED_PREFIX, peer) for peer in (twin(), over_plain_cache(twin()))),
    *((PROMPTS, peer) for peer in (twin(), twin(package="refattn"), peers.latents_by_hand())),
    (replace(PROMPTS, lens=((20, 20), (5, 5))), peers.latents_by_hand()),
    (replace(PROMPTS, lens=((20, 150),)), peers.aten_cpu_latent_prefill()),
    (VirtualBatches(5, 256, 64), step_peers.virtual_batches_twin()),
    (VirtualBatches(5, 256, 64), step_peers.virtual_batches_numpy()),
    (Slots(5, 256, 64), step_peers.slots_twin()),
    (CacheWrite(32, 2, 8, 4), step_peers.write_twin()),
    (CacheWrite(32, 2, 8, 4), step_peers.write_index_put()),
    *(
        (sparse.Spans(lens=((64, 64),) * 2, heads=(4, 2), head_size=16, every=32, image=20), contender)
        for contender in (
            *(sparse.spans_twin(), sparse.spans_twin("refattn"), sparse.causal_call()),
            peers.sdpa(masked=True),
        )
    ),
    *(
        (sparse.IndexScores(3, 100, num_heads=4, size=16, block_size=16), contender)
        for contender in (sparse.scores_twin(), sparse.scores_twin("refattn"), sparse.scores_einsum())
    ),
    *(
        (sparse.Selection(3, 200, 150), contender)
        for contender in (sparse.select_twin(), sparse.select_twin("refattn"), sparse.torch_topk())
    ),
    *(
        (sparse.SelectedLatents(3, 200, 40, num_heads=4, rank=32, rope=8, block_size=16), contender)
        for contender in (sparse.selected_twin(), sparse.selected_twin("refattn"), sparse.gathered())
    ),
    *(
        (sparse.SelectedLatents(3, 200, 40, num_heads=4, rank=128, rope=8, block_size=16, packed=True), contender)
        for contender in (sparse.selected_twin(), sparse.gathered(), sparse.selected_flash_mla_packed())
    ),
    *(
        (work, contender)
        for topk in (0, 5)
        for work in (
            entries.CompressedKeys(3, 160, 4, topk, num_heads=4, size=16, block_size=16),
            entries.CompressedKeys(2, 40, 8, topk, num_heads=4, size=16, block_size=16, query_len=40),
        )
        for contender in (
            *(entries.compressed_twin(), entries.compressed_twin("refattn")),
            *(entries.compressed_flash_mla(), entries.compressed_attn_gym()),
            entries.compressed_gathered() if work.query_len == 1 else entries.compressed_attn_gym_prompts(),
        )
    ),
    *(
        (entries.CompressedKeys(2, 160, 4, topk, num_heads=2, block_size=16, fp8=True), contender)
        for topk in (0, 5)
        for contender in (
            *(entries.compressed_twin(), entries.compressed_twin("refattn")),
            entries.compressed_flash_mla_fp8(),
        )
    ),
    *(
        (work, contender)
        for work in (
            entries.NewEntries(2, 40, 40, size=16, block_size=16),
            entries.NewEntries(2, 40, 1, ratio=8, overlap=False, size=16, block_size=16),
        )
        for contender in (
            *(entries.compress_twin(), entries.compress_twin("refattn")),
            entries.compress_gathered(work),
        )
    ),
]


@pytest.fixture
def fa3_library():
    """Install a double of FlashAttention-3."""
    fa3._cannot_load.cache_clear()
    with gpu_package_doubles.fa3_library():
        yield
    fa3._cannot_load.cache_clear()


@pytest.mark.parametrize(
    ("work", "contender"), CONTENDERS, ids=[f"{i}-{contender.name}" for i, (_, contender) in enumerate(CONTENDERS)]
)
def test_contenders_compute_their_row(work, contender, fa3_library, monkeypatch):
    gpu_package_doubles.install(monkeypatch)
    inputs = work.draw(CPU, torch.float32, seed=1)
    judge = (contender.judge or work.judge)(inputs)
    call = contender.prepare(inputs)
    judge(in_rows(contender, call()))
    if contender.lse:
        judge(*call(return_lse=True))


@pytest.mark.parametrize("moves", [True, False])
def test_a_benchmark_that_never_moves_its_cursor_is_no_measurement(moves, monkeypatch):
    """SGLang 38398: each step read the checkpoint alone, and none wrote it. All outputs of the steps are judged."""
    inputs = States(2, 1, (2, 1), head_size=8, steps=6).draw(CPU, torch.float32, seed=0)
    contender, plan = steps_twin("replay", 4), fastattn.replay.plan
    if not moves:
        still = {"cursors": torch.zeros(4, dtype=torch.int32)}
        monkeypatch.setattr(fastattn.replay, "plan", lambda batch, **tables: plan(batch, **tables | still))
    out = in_rows(contender, contender.prepare(inputs)())
    with nullcontext() if moves else pytest.raises(WrongAnswerError):
        contender.judge(inputs)(out)


def test_a_library_that_is_not_there_has_no_speed(monkeypatch):
    monkeypatch.setattr(peers.fa3_package, "available", lambda: "there is no library")
    row = Row("chunked_prefill", "small", WORKS["causal"], (twin("chunked_prefill"), peers.fa3()))
    ours, missing = Bench(CPU, torch.float32, quick=True).measure(row)["contenders"]
    assert ours["median"] > 0 and missing["error"] == "ImportError: there is no library"


@pytest.mark.parametrize("contender", [twin(kernel="fa4"), twin("varlen", kernel="fa4")])
def test_a_kernel_that_is_asked_for_is_the_one(contender):
    inputs = WORKS["causal"].draw(CPU, torch.float32, seed=0)
    with pytest.raises(NotImplementedError, match="fa4: computes on CUDA"):
        contender.prepare(inputs)()
    assert contender.name == "fastattn, fa4"


@pytest.mark.parametrize(("plan_in_each", "plans"), [(False, 1), (True, 5)])
def test_a_step_plans_once_or_in_each_layer(plan_in_each, plans, monkeypatch):
    made, attended = [], []
    for name, calls in (("plan", made), ("attention", attended)):
        function = getattr(fastattn.sliding_window, name)

        def count(*arguments, function=function, calls=calls, **options):
            calls.append(options)
            return function(*arguments, **options)

        monkeypatch.setattr(fastattn.sliding_window, name, count)
    inputs = replace(WINDOW, lens=DECODE).draw(CPU, torch.float32, seed=0)
    layers(5, plan_in_each=plan_in_each).prepare(inputs)()
    assert (len(made), len(attended)) == (plans, 5)


def test_a_layer_that_makes_tables_is_found(monkeypatch):
    monkeypatch.setattr(measure, "launches", lambda call: Counter(call()))
    check_no_tables(lambda: ["trim"], lambda: ["attend", "reduce"])
    with pytest.raises(RuntimeError, match="expected no kernels of a plan in a layer, got trim"):
        check_no_tables(lambda: ["trim"], lambda: ["attend", "trim"])
    with pytest.raises(RuntimeError, match="the profiler saw Counter"):
        check_no_tables(lambda: [], lambda: ["attend"])


def shifted(inputs, by):
    """A peer that answers too much, by a fixed amount."""
    return plan_and_attend(chunked_prefill, inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch) + by


def broken(_):
    raise OSError("no compiler\n    and a second line")


def test_only_right_answers_have_a_speed():
    row = Row(
        "chunked_prefill",
        "small",
        WORKS["causal"],
        (
            twin("chunked_prefill"),
            Contender("right", lambda inputs: partial(shifted, inputs, 0.0)),
            Contender("wrong", lambda inputs: partial(shifted, inputs, 1e-3)),
            Contender("broken", broken),
        ),
        memory=True,
    )
    record = Bench(CPU, torch.float32, quick=True).measure(row)
    ours, right, wrong, missing = record["contenders"]
    assert ours["ratio"] == 1 and ours["low"] <= ours["median"] <= ours["high"]
    assert right["ratio"] == pytest.approx(right["median"] / ours["median"])
    assert record["share_of_floor"] == pytest.approx(record["floor"] / ours["median"])
    assert "WrongAnswerError: out: max error 1.000e-03" in wrong["error"] and "median" not in wrong
    assert missing["error"] == "OSError: no compiler and a second line" and "median" not in missing
    assert right["peak_bytes"] is None or right["peak_bytes"] >= 0


def test_an_answer_that_turns_wrong_later_has_no_speed():
    def prepare(inputs):
        calls = itertools.count()
        return lambda: shifted(inputs, 0.0 if next(calls) < 1 else 1e-3)

    peers_ = (twin("chunked_prefill"), Contender("worn", prepare))
    record = Bench(CPU, torch.float32, quick=True).measure(Row("chunked_prefill", "small", WORKS["causal"], peers_))
    ours, worn = record["contenders"]
    assert ours["ratio"] == 1
    assert "WrongAnswerError: out: max error 1.000e-03" in worn["error"] and not {"median", "ratio"} & {*worn}


def test_a_row_that_fails_does_not_end_the_run(monkeypatch):
    row = Row("chunked_prefill", "small", WORKS["causal"], (twin("chunked_prefill"),))
    monkeypatch.setattr(Attention, "draw", broken)
    record = Bench(CPU, torch.float32, quick=True).measure(row)
    assert record["error"].startswith("TypeError") and "median" not in record["contenders"][0]


def test_a_slow_contender_is_timed_at_least_once():
    calls = {"quick": [lambda: None], "slow": [lambda: torch.randn(10**6)]}
    timings = measure.take_turns(calls, seconds=1e-6)
    assert timings["slow"].median > timings["quick"].median > 0


def test_contenders_of_a_gpu_take_turns(monkeypatch):
    """A card that has rested is fast for a round: the first contender must not win by it. One that fails is left."""
    calls = {"first": [lambda: None], "second": [lambda: None], "broken": [lambda: None]}
    turns = []

    def on_gpu(its_calls, *, clock, milliseconds):
        turns.append(next(name for name, some in calls.items() if some is its_calls))
        if turns[-1] == "broken":
            raise RuntimeError("out of registers")
        return [1.0 if len(turns) == 1 else 2.0] * 5

    monkeypatch.setattr(measure, "on_gpu", on_gpu)
    bench = Bench(CPU, torch.float32, quick=True)
    bench.device = torch.device("cuda")
    row = Row("chunked_prefill", "small", WORKS["causal"], ())
    record = {"contenders": [{"name": name} for name in calls]}
    timings = bench._time(row, record, calls)
    turns_of_a_clock = ["first", "second", "broken", "first", "second", "first", "second"]
    assert turns == turns_of_a_clock * 2  # by graphs; and by events, to see whether that one works so
    assert {name: timing.median for name, timing in timings.items()} == {"first": 2.0, "second": 2.0}
    assert record["contenders"][2]["error"] == "RuntimeError: out of registers"
    turns.clear()
    bench._time(replace(row, clock="own"), {"contenders": [{"name": "second"}]}, {"second": calls["second"]})
    assert turns == ["second"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_rows_have_names_of_their_own(device_type, quick):
    listed = rows(device_type, quick=quick)
    assert len({str(row) for row in listed}) == len(listed)
    for row in listed:
        names = [contender.name for contender in row.contenders]
        assert names[0] == "fastattn" and len({*names}) == len(names), row
        assert row.work.reads(2) > 0 and row.work.writes(2) >= 0


FEW = 8  # sequences; with more it takes long, and their contenders are those of other rows
ROWS = [row for row in rows_on_gpu(128) if row.path != "engine" and len(getattr(row.work, "lens", ())) <= FEW]
ROWS = [row for row in ROWS if not (isinstance(row.work, States) and row.work.num_seqs > FEW)]


@pytest.fixture
def forked_ranks(monkeypatch):
    """Fork the processes of the ranks from one that has imported PyTorch, as in their own tests."""
    multiprocessing.set_forkserver_preload([ranks.__name__])
    monkeypatch.setattr(ranks, "spawn", partial(start_processes, start_method="forkserver"))


@pytest.mark.parametrize("row", [row for row in ROWS if not row.name.endswith("-graph")], ids=str)
def test_contenders_of_a_gpu_fit_their_rows(row, fa3_library, forked_ranks, monkeypatch):
    """In small, on a CPU, with doubles of the packages that need a GPU."""
    gpu_package_doubles.install(monkeypatch)
    inputs = row.work.draw(CPU, torch.float32, seed=0)
    judge = row.work.judge(inputs)
    for contender in row.contenders:
        if contender.name in {f"fastattn, {kernel}" for kernel in NAMES}:
            continue  # kernels for a GPU
        if contender.name.startswith(("FlexAttention", "torch sdpa cudnn", "torch sdpa flash")):
            continue  # they compile for long, or are on a GPU alone
        (contender.judge(inputs) if contender.judge else judge)(in_rows(contender, contender.prepare(inputs)()))


def test_results_are_written_and_rows_of_other_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "all_cores", torch.get_num_threads)  # other tests keep the threads that they have
    monkeypatch.setattr(pytorch, "flex", lambda: flex_attention)  # not compiled, which takes longer than all the rest
    twinattn.bench.run("cpu", ["decode-1x", "kv_cache"], out=tmp_path, quick=True)
    twinattn.bench.run("cpu", ["kv_cache"], out=tmp_path, quick=True)
    (file,) = tmp_path.glob("*.json")
    first, second = json.loads(file.read_text())["runs"]
    assert [record["workload"] for record in first["rows"]] == ["decode-1x512"]
    assert [record["path"] for record in second["rows"]] == ["kv_cache"]
    assert torch.__version__.startswith(first["versions"]["torch"]) and {*first["ceilings"]} == {
        "copy",
        "product",
        "read",
    }
    with file.with_suffix(".csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert {line["contender"] for line in table if line["path"] == "kv_cache"} == {
        "fastattn",
        "torch index_put",
        "refattn",
    }
    missing = [line for line in table if not line["median"]]
    assert {line["contender"] for line in missing} <= {"vLLM, blocks of 128"} and all(line["error"] for line in missing)
    assert all(float(line["median"]) > 0 for line in table if line not in missing)
    assert file.with_suffix(".svg").read_text().count("<svg") == 1


def test_what_is_measured_besides_the_time_is_shown():
    timing = dict(median=2e-3, low=1e-3, high=3e-3, ratio=1.0)
    record = dict(path="local", workload="step", floor=1e-3, limit="bytes", aim="")
    ours = dict(name="fastattn", launches=dict(trim=1, attend=32), **timing)
    faster = dict(name="fastattn, fa3", launches=dict(attend=31), **timing | dict(ratio=0.9))
    peer = dict(name="FA3, rows", peak_bytes=3 * 2**20, **timing | dict(ratio=1.5))
    console = Console(record=True, width=120, file=io.StringIO())
    report.print_row(console, record | dict(contenders=[ours, faster]))
    report.print_row(console, record | dict(contenders=[ours, peer]))
    report.print_summary(console, [record | dict(contenders=[ours, faster, peer])], 1.0)
    shown = console.export_text().splitlines()
    assert next(line for line in shown if "launches" in line) and any(line.split()[-1:] == ["33"] for line in shown)
    assert any("3 MiB" in line for line in shown)
    assert "1 of 1 rows measured in 1 s; fastattn ahead of all its peers in 1; " in shown[-2]
    assert shown[-1] == "Faster than what was chosen in local/step: fastattn, fa3, 0.9 of its time."


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (1.234e-3, "1.23 ms"), (11e-6, "11 µs"), (0.0, "0 µs")])
def test_durations_have_units(seconds, text):
    assert report.duration(seconds) == text


def test_the_command_names_what_is_wrong(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    unknown = CliRunner().invoke(main, ["bench", "--quick", "--rows", "nonsense"])
    assert unknown.exit_code == 2 and "rows: expected part of the name of a row, got 'nonsense'" in unknown.output
    missing = CliRunner().invoke(main, ["bench", "--quick", "--device", "cuda"])
    assert missing.exit_code == 2 and "device: expected cpu, or cuda where torch finds a GPU" in missing.output


def test_the_doctor_knows_every_kernel():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in NAMES)
    assert "softcap" in result.output and "decode" in result.output
    assert "CPU: prompts are computed by" in result.output.splitlines()[0]


def test_the_command_says_its_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0 and re.fullmatch(r"twinattn \d+\.\d+\S*", result.output.strip())


def test_the_doctor_cuts_no_word_of_a_narrow_terminal():
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "40"})
    assert result.exit_code == 0, result.output
    words = set(re.sub(r"[│┃]", " ", result.output).split())
    assert {"attention", "softcap", "torch_flash", "copy_blocks", "compute"} <= words
    assert "…" not in result.output and max(map(len, result.output.splitlines())) <= 40


@pytest.mark.parametrize("columns", ["80", "60"])
def test_the_doctor_says_a_reason_once_per_table(columns):
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": columns})
    assert result.exit_code == 0, result.output
    tables = re.split(r"\n\n+", result.output.strip())
    assert len(tables) >= 2
    for table in tables:  # and its notes
        notes = re.findall(r"^\((\d+)\) (.*(?:\n[^(].*)*)", table, re.MULTILINE)
        cells = re.findall(r"│ (?:no|in part) \((\d+)\) ", table)
        assert [number for number, _ in notes] == list(dict.fromkeys(cells))
        assert len({reason for _, reason in notes}) == len(notes)


@pytest.mark.core
@pytest.mark.covers("B52")
def test_the_doctor_shows_what_runs_in_part(monkeypatch):
    """On a GPU that is not there, without the FlashAttention packages: torch's own kernel reads no pages."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # two of a kind; one is shown
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Hopper")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    for module in (fa2, fa4):
        monkeypatch.setattr(
            module, "cannot_import", lambda name, package, *names: f"the package {package} can't be imported"
        )
    for module in (fa3, flash_mla):
        monkeypatch.setattr(module, "_cannot_load", lambda: "there is no library")
    devices.capability.cache_clear()
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"})
    devices.capability.cache_clear()
    assert result.exit_code == 0, result.output
    kernels, _, features = result.output.partition("What runs on cuda:0, Hopper")
    assert "cuda:1" not in result.output
    (state,) = [line for line in kernels.splitlines() if "│ torch_flash" in line]
    note = re.search(r"in part (\(\d+\))", state)[1]
    assert f"\n{note} does not compute attention to pages\n" in kernels
    taken = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in features.splitlines() if "│" in line}
    assert taken["prefill, no pages"] == "triton" and taken["prefill, pages of 16"] == "triton"
    assert taken["decode"] == "triton" and taken["float64"] == "none"
    assert "over rows only" in features and "not hand softcap on" in " ".join(features.replace("│", " ").split())


def test_a_package_that_is_not_installed_has_the_version_that_it_says(monkeypatch, tmp_path):
    (tmp_path / "built_by_hand.py").write_text('__version__ = "2.8.3.post2"')
    monkeypatch.syspath_prepend(tmp_path)
    assert "built_by_hand" not in sys.modules
    assert package_version("built-by-hand") == "2.8.3.post2"
    assert torch.__version__.startswith(package_version("torch"))  # the wheel's version need not name its CUDA
    assert package_version("no-such-package") is None


def test_no_picture_holds_the_hosts_time_to_a_floor_of_the_gpu(tmp_path, monkeypatch):
    """A call comes back before the GPU is done, so it would stand far left of the floor."""
    contenders = [{"name": "fastattn", "median": 2e-3}]
    rows = [
        dict(path="local", workload=f"step-{clock}", clock=clock, floor=1e-3, contenders=contenders)
        for clock in ("host", "graph")
    ]
    file = tmp_path / "cuda.json"
    file.write_text(json.dumps({"runs": [{"rows": rows}]}))
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_yticks", lambda _, ticks, labels: drawn.extend(labels))
    report.draw(file)
    assert drawn == ["local  step-graph"]
