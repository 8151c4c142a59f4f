"""Compressed keys beside a window: entries from rows in pages, who sees which, and one softmax over both sets."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastattn.compressed
import fastattn.sparse
import refattn.compressed
import refattn.sparse
from fastattn.kernels.order import use_kernel
from fastattn.kernels.replay import memo_of
from refattn import mla
from refattn.entries import CompressedPlan, most_entries
from refattn.metadata import make_batch, slot_mapping
from refattn.modes import computing_in
from refattn.options import AttentionOptions
from tests.helpers.entries import BLOCK, ENTRY_BLOCK, Layer, Pools, twin_of
from tests.helpers.kernels_present import PRESENT_FOR_LATENTS
from tests.helpers.states import DEVICE, KERNELS
from twinattn.kit import assert_close

COMPUTERS = ["reference", *KERNELS]  # of entries
ATTENDERS = ["reference", *(kernel.name for kernel in PRESENT_FOR_LATENTS if kernel.name in ("cpu", "triton"))]
each_computer = pytest.mark.parametrize("kernel", COMPUTERS)
each_attender = pytest.mark.parametrize("kernel", ATTENDERS)
each_twin = pytest.mark.parametrize("package", ["refattn", "fastattn"])
each_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
INVARIANT = AttentionOptions(batch_invariant=True)


def pools_for(kernel, layer, **more):
    """Return the pools of a layer, where the kernel computes."""
    return Pools(layer, device="cpu" if kernel in ("reference", "refattn") else DEVICE, **more)


def entries_of(kernel, layer, parts, **more):
    """Return the new entries of one step with all rows before it in their pages, and the plan."""
    pools = pools_for(kernel, layer, **more)
    before = [(0, first) for first, _ in parts]
    pools.write(pools.plan("refattn", before), before)
    with use_kernel(kernel) if kernel in KERNELS else computing_in(None):
        plan = pools.plan(kernel, parts)
        pools.write(plan, parts)
        return twin_of(kernel).compress(pools.rows, plan, bias=layer.bias.to(pools.device)), plan


def in_steps(kernel, layer, ends, options=AttentionOptions(), pools=None, first=0):
    """Step one sequence: return all its entries, and the outputs and log-sum-exps of all its tokens."""
    pools = pools_for(kernel, layer) if pools is None else pools
    parts = [pools.step(kernel, [part], options) for part in pairwise([first, *ends])]
    return [torch.cat(x) for x in zip(*parts, strict=True)]


# --- entries ---


@pytest.mark.covers("F230")
@each_computer
@each_overlap
@pytest.mark.parametrize("ratio", [1, 3, 4, 20])
def test_entries_are_the_formula_in_float64(kernel, overlap, ratio):
    """Of several sequences, in blocks that do not end where entries do; the first entry has no tokens before it."""
    layer = Layer.draw(43, 9, 2, ratio=ratio, overlap=overlap, size=5)
    parts = [(6, 43), (0, 9), (2, 2)]
    new, plan = entries_of(kernel, layer, parts)
    expected = torch.cat(
        [layer.entries_by_hand(i)[first // ratio : end // ratio] for i, (first, end) in enumerate(parts)]
    )
    is_entry = plan.slots.cpu() >= 0
    assert int(is_entry.sum()) == len(expected) and not new.cpu()[~is_entry].any()
    torch.testing.assert_close(new.cpu()[is_entry].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.core
@pytest.mark.covers("F230")
@each_twin
@each_overlap
def test_entries_in_float64_are_exact_and_without_bias_too(package, overlap):
    layer = Layer.draw(13, overlap=overlap, dtype=torch.float64)
    pools = Pools(layer)
    plan = pools.plan(package, [(0, 13)])
    pools.write(plan, [(0, 13)])
    for bias in (layer.bias, None):
        layer.bias = torch.zeros_like(layer.bias) if bias is None else bias
        new = twin_of(package).compress(pools.rows, plan, bias=bias)
        torch.testing.assert_close(new[:3], layer.entries_by_hand(0), rtol=1e-12, atol=1e-13)


@pytest.mark.core
@pytest.mark.covers("F230")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_entries_of_16_bits_are_within_the_tolerance(kernel, dtype):
    layer = Layer.draw(64, 31, ratio=16, overlap=True, size=40, dtype=dtype)
    parts = [(0, 64), (20, 31)]
    new, _ = entries_of(kernel, layer, parts)
    expected = torch.cat([layer.entries_by_hand(0), layer.entries_by_hand(1)[1:]])
    with computing_in(dtype):
        low, _ = entries_of("reference", layer, parts)
    assert_close(new.cpu()[: len(expected)], expected.to(new.dtype), low[: len(expected)])


@pytest.mark.core
@pytest.mark.covers("F230")
@each_computer
def test_gates_of_any_size_saturate_and_hide_as_in_a_softmax(kernel):
    """Up to infinity: a gate of `-inf` hides its token, of +inf or NaN gives NaN, and so does an entry without any."""
    layer = Layer.draw(40, ratio=20, size=6)
    gate, layer.bias = layer.gates[0], torch.zeros_like(layer.bias)
    gate[:17, 0], gate[3, 1], gate[4, 2], gate[:20, 3] = -math.inf, math.nan, math.inf, -math.inf
    gate[5, 4], gate[6, 5] = 1e4, -1e4
    new, _ = entries_of(kernel, layer, [(0, 40)])
    expected = torch.stack(
        [(x.softmax(0) * v).sum(0) for x, v in zip(gate.split(20), layer.values[0].split(20), strict=True)]
    )
    torch.testing.assert_close(new[:2].cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert new[0].cpu().isnan().tolist() == [False, True, True, True, False, False] and not new[1].isnan().any()


@pytest.mark.core
@pytest.mark.covers("F231")
@each_computer
@each_overlap
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e4])
def test_no_row_is_read_but_those_of_the_new_entries(kernel, overlap, poison):
    """Others hold poison, and blocks before them are gone from the table."""
    layer, parts = Layer.draw(31, 18, overlap=overlap, left=1), [(21, 31), (16, 18)]
    clean, _ = entries_of(kernel, layer, parts, poison=0.0)
    pools = pools_for(kernel, layer, poison=poison)
    with use_kernel(kernel) if kernel in KERNELS else computing_in(None):
        first = 16 if overlap else 20
        plan = pools.plan("refattn", [(first, 20), (0, 0)])
        pools.write(plan, [(first, 20), (0, 0)])
        pools.write(pools.plan("refattn", [(20, 21), (0, 0)]), [(20, 21), (0, 0)])
        batch = pools.batch(parts)
        batch.block_table[0, : first // BLOCK] = -7
        batch.block_table[1, : 15 // BLOCK] = -7
        plan = pools.plan(kernel, parts, batch=batch)
        pools.write(plan, parts)
        new = twin_of(kernel).compress(pools.rows, plan, bias=layer.bias.to(pools.device))
    assert plan.slots.tolist()[2:] == [-1] * (len(new) - 2) and not new[2:].any()
    assert torch.equal(new, clean)


# --- a step ---


@pytest.mark.covers("F232")
@each_attender
@each_overlap
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.7, -1.0])], ids=["", "sinks"])
def test_attention_is_one_softmax_over_the_window_the_entries_and_the_sink(kernel, overlap, sinks):
    """Against arithmetic over the whole sequence: a sink that counts in both parts shows, and so does an average."""
    layer = Layer.draw(23, 6, overlap=overlap)
    pools = pools_for(kernel, layer)
    options = AttentionOptions(sinks=None if sinks is None else sinks.to(pools.device))
    pools.step(kernel, [(0, 9), (0, 1)])
    _, out, lse = pools.step(kernel, [(9, 23), (1, 6)], options)
    row = 0
    for i, (first, end) in enumerate([(9, 23), (1, 6)]):
        entries = layer.entries_by_hand(i)
        for t in range(first, end):
            expected = layer.attended_by_hand(i, t, entries, sinks=sinks)
            torch.testing.assert_close(out[row].double(), expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[row].double(), expected[1], rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.covers("F231")
@each_attender
@pytest.mark.parametrize("steps", [[29], [1, 8, 29], list(range(1, 30))], ids=["whole", "chunks", "steps"])
def test_an_entry_is_visible_from_its_last_token_on(kernel, steps):
    """Scores are 0, so the log-sum-exp is the log of the number of visible keys; values say how many are entries."""
    layer = Layer.draw(29, left=5)
    layer.queries[0].zero_()
    layer.keys[0].zero_()
    layer.values[0].fill_(1.0)
    _, out, lse = in_steps(kernel, layer, steps)
    for t in range(29):
        window, entries = min(t, 5) + 1, (t + 1) // 4
        torch.testing.assert_close(lse[t].exp(), torch.full((2,), float(window + entries)), rtol=1e-5, atol=0)
        torch.testing.assert_close(out[t], torch.full((2, 8), entries / (window + entries)), rtol=1e-5, atol=1e-7)


@pytest.mark.covers("F233")
@each_twin
@each_overlap
def test_whole_chunked_and_stepped_have_the_same_bits(package, overlap):
    layer = Layer.draw(26, overlap=overlap)
    whole = in_steps(package, layer, [26], INVARIANT)
    for ends in ([3, 4, 5, 26], [8, 9, 26], list(range(1, 27))):
        found = in_steps(package, layer, ends, INVARIANT)
        assert torch.equal(whole[0], found[0]), "entries"
        if package == "refattn":
            assert all(map(torch.equal, whole, found)), ends
        for one, other in zip(whole[1:], found[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@each_computer
@settings(deadline=None, max_examples=8)
@given(st.sets(st.integers(1, 20)), st.integers(1, 6), st.booleans(), st.integers(0, 7), st.integers(1, 30))
def test_entries_have_the_same_bits_however_a_sequence_is_cut(kernel, ends, ratio, overlap, left, length):
    layer = Layer.draw(length, ratio=ratio, overlap=overlap, left=left, size=3)
    cut = sorted({end for end in ends if end < length} | {length})
    pools, whole = pools_for(kernel, layer), entries_of(kernel, layer, [(0, length)])[0]
    parts = []
    with use_kernel(kernel) if kernel in KERNELS else computing_in(None):
        for part in pairwise([0, *cut]):
            plan = pools.plan(kernel, [part])
            pools.write(plan, [part])
            new = twin_of(kernel).compress(pools.rows, plan, bias=layer.bias.to(pools.device))
            parts.append(new[plan.slots >= 0])
    assert torch.equal(torch.cat(parts), whole[: length // ratio])


@pytest.mark.covers("F233")
@each_twin
@each_overlap
@pytest.mark.parametrize("crop", [4, 10, 11, 12, 15])
def test_a_sequence_that_is_cropped_goes_on_as_if_the_rest_had_never_been(package, overlap, crop):
    """Drafts that are rejected, a prefix that is found again: there is nothing to roll back but the length.

    Where open rows are a buffer beside the pages, cropping the cache leaves it as it was, and entries are of the rows
    of tokens that are gone.
    """
    other, layer = Layer.draw(17, overlap=overlap, seed=1), Layer.draw(22, overlap=overlap)
    for name in ("values", "gates", "keys", "queries"):
        getattr(other, name)[0][:crop] = getattr(layer, name)[0][:crop]
    other.bias = layer.bias
    expected = in_steps(package, layer, [crop, 22], INVARIANT)
    pools = pools_for(package, layer)
    pools.layer = other
    before = in_steps(package, other, [13, 17], INVARIANT, pools)
    pools.layer = layer
    found = in_steps(package, layer, [22], INVARIANT, pools, first=crop)
    assert torch.equal(torch.cat([before[0][: crop // 4], found[0]]), expected[0])
    for a, b, c in zip(before[1:], found[1:], expected[1:], strict=True):
        whole = torch.cat([a[:crop], b])
        assert torch.equal(whole, c) or package == "fastattn"
        torch.testing.assert_close(whole, c, rtol=1e-5, atol=1e-6)


@pytest.mark.core
@pytest.mark.covers("F233")
@each_twin
def test_blocks_of_the_last_rows_are_all_that_has_to_be_kept(package):
    """Copied with the blocks of entries, they go on with the same bits: a fork, a swap, a prefix hit."""
    layer = Layer.draw(30, overlap=True, left=3)
    pools = pools_for(package, layer)
    in_steps(package, layer, [21], INVARIANT, pools)
    expected = in_steps(package, layer, [30], INVARIANT, pools, first=21)
    copy = pools_for(package, layer, seed=5)
    for mine, theirs in zip(pools.blocks[0][4:6], copy.blocks[0][4:6], strict=True):  # of tokens 16 to 23
        copy.rows[theirs], copy.cache[theirs] = pools.rows[mine], pools.cache[mine]
    for mine, theirs in zip(pools.entry_blocks[0][:3], copy.entry_blocks[0][:3], strict=True):
        copy.entries[theirs] = pools.entries[mine]
    assert all(map(torch.equal, expected, in_steps(package, layer, [30], INVARIANT, copy, first=21)))


@pytest.mark.covers("F231")
@each_attender
@pytest.mark.parametrize("poison", [math.inf, 1e4, -1e4])
def test_no_bit_depends_on_memory_that_nobody_may_see(kernel, poison):
    """Keys before the window, rows and entries that are not complete, blocks of nobody: NaN or anything else."""
    layer, answers = Layer.draw(19, 30, 4, overlap=True, left=4), []
    for harm in (math.nan, poison):
        pools = pools_for(kernel, layer, poison=harm)
        pools.step(kernel, [(0, 11), (0, 13), (0, 3)])
        answers.append(pools.step(kernel, [(11, 12), (13, 30), (3, 3)]))
    assert all(map(torch.equal, *answers))
    assert all(x.isfinite().all() for x in answers[0])


@each_attender
def test_attention_in_16_bits_is_within_the_tolerance(kernel):
    if kernel == "reference":
        return
    layer = Layer.draw(40, 21, overlap=True, size=16, dtype=torch.float16)
    parts, pools = [(0, 40), (0, 21)], pools_for(kernel, layer, poison=0.0)
    options = AttentionOptions(sinks=torch.randn(2, device=pools.device), softcap=3.0, softmax_scale=0.4)
    new, out, lse = pools.step(kernel, parts, options)

    def formula(dtype):
        path, plan = refattn.compressed, Pools.plan(pools, "refattn", parts)
        tensors = (x.to(dtype) for x in (pools.of(parts, layer.queries), pools.cache, pools.entries))
        with computing_in(dtype):
            return path.attention(*tensors, plan, options, return_lse=True)

    (expected, expected_lse), (low, low_lse) = formula(torch.float64), formula(torch.float16)
    assert_close(out, expected.to(out.dtype).cpu(), low.cpu())
    assert_close(lse, expected_lse.float().cpu(), low_lse.float().cpu(), name="lse")


@pytest.mark.parametrize("apart", [512, 520, 528])
@pytest.mark.parametrize("which", range(3), ids=["query", "cache", "entries"])
def test_rows_of_512_elements_may_lie_apart(apart, which, device):
    """On Hopper one launch takes 64 heads of 512 elements, if rows lie at multiples of 16: others are two launches."""
    batch = make_batch([2, 1], [39, 24], [[2, 0], [1, 3]], device=device)
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    sizes = dict(ratio=4, window_size=(8, 0), entry_table=table, block_size=32, entry_block_size=16)
    shapes, generator = [(3, 64), (4, 32), (2, 16)], torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, 512, generator=generator).half().to(device) for shape in shapes]
    apart_in_memory = torch.full((*shapes[which], apart), torch.nan, dtype=torch.half, device=device)[..., :512]
    given = [apart_in_memory.copy_(x) if i == which else x for i, x in enumerate(tensors)]
    out, lse = fastattn.compressed.attention(*given, fastattn.compressed.plan(batch, **sizes), return_lse=True)

    def formula(dtype):
        plan = refattn.compressed.plan(batch, **sizes)
        with computing_in(dtype):
            return refattn.compressed.attention(*(x.to(dtype) for x in tensors), plan, return_lse=True)

    (expected, expected_lse), (low, low_lse) = formula(torch.float64), formula(torch.half)
    assert_close(out, expected.half(), low)
    assert_close(lse, expected_lse.float(), low_lse.float(), name="lse")


@pytest.mark.core
@pytest.mark.covers("F240")
@each_attender
@pytest.mark.parametrize("stored", [("e4m3fn", "e4m3fn"), ("e5m2", ""), ("", "e4m3fn")], ids="-".join)
@pytest.mark.parametrize("chosen", [None, [[0], [-1], [1]]], ids=["all", "selected"])
def test_pools_of_fp8_are_those_of_their_dequantized_values(kernel, stored, chosen):
    """Each pool has its own scale; the write saturates, and slots outside all sequences are NaN."""
    layer, parts = Layer.draw(12, 9, overlap=True, size=16, dtype=torch.float16), [(10, 12), (8, 9)]
    pools = pools_for(kernel, layer)
    pools.step(kernel, [(0, 12), (0, 9)])
    names, numbers, stores = ("cache_scale", "entry_scale"), [], []
    scales = {name: scale for name, scale, kind in zip(names, (0.02, 0.5), stored, strict=True) if kind}
    for pool, kind, name in zip((pools.cache, pools.entries), stored, names, strict=True):
        if not kind:
            numbers.append(pool)
            stores.append(pool)
            continue
        rows, store = pool.flatten(0, 1), torch.full_like(pool, math.nan).to(getattr(torch, f"float8_{kind}"))
        slots = torch.arange(len(rows)).where(rows.isfinite().all(1).cpu(), -1).to(pool.device)
        mla.write(rows, rows[:, :0], store, slots, cache_scale=scales[name])
        stores.append(store)
        numbers.append(store.float() * scales[name])
    options = AttentionOptions(sinks=torch.tensor([0.3, -0.2], device=pools.device))
    query = pools.of(parts, layer.queries)

    def attend(package, query, tensors, **scales):
        path, plan = twin_of(package), pools.plan(package, parts)
        if chosen is not None:
            plan = path.select_entries(plan, torch.tensor(chosen, dtype=torch.int32, device=pools.device))
        return path.attention(query, *tensors, plan, options, return_lse=True, **scales)

    with nullcontext() if kernel == "reference" else use_kernel(kernel):
        out, lse = attend(kernel, query, stores, **scales)
    expected, expected_lse = attend("refattn", query.double(), [x.double() for x in numbers])
    with computing_in(torch.float16):
        low, low_lse = attend("refattn", query, [x.half() for x in numbers])
    assert_close(out.cpu(), expected.to(out.dtype).cpu(), low.cpu())
    assert_close(lse.cpu(), expected_lse.float().cpu(), low_lse.float().cpu(), name="lse")


# --- selected entries ---


@pytest.mark.covers("F234")
@each_attender
def test_a_query_sees_its_window_and_the_entries_that_were_selected_for_it(kernel):
    layer, parts = Layer.draw(23, 9, overlap=True), [(17, 23), (3, 9)]
    pools, chosen = pools_for(kernel, layer), [[0, 3], [4, 1], [], [2, 2], [0, 1], [4], [], [0], [0], [], [1, 0], [1]]
    table = torch.full((12, 3), -1, dtype=torch.int32)
    for row, entries in enumerate(chosen):
        for column, entry in enumerate(entries):
            table[row, 2 - column] = entry
    pools.step(kernel, [(0, 17), (0, 3)])
    sinks = torch.tensor([0.3, -0.2])
    options = AttentionOptions(sinks=sinks.to(pools.device))
    _, out, lse = pools.step(kernel, parts, options, select=lambda plan: table.to(pools.device))
    row = 0
    for i, (first, end) in enumerate(parts):
        entries = layer.entries_by_hand(i)
        for t in range(first, end):
            expected = layer.attended_by_hand(i, t, entries, sinks=sinks, chosen=chosen[row])
            torch.testing.assert_close(out[row].double(), expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[row].double(), expected[1], rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.covers("F234")
@each_attender
def test_an_indexer_selects_only_complete_entries_and_all_of_them_if_there_are_few(kernel):
    """Scores over the plan of entries are `-inf` for those that are not complete, so `select` leaves them out."""
    layer, parts = Layer.draw(30, 7), [(12, 30), (0, 7)]
    pools = pools_for(kernel, layer)
    sparse = refattn.sparse if kernel == "reference" else fastattn.sparse
    pools.step(kernel, [(0, 12), (0, 0)])
    index = torch.randn(len(pools.entries), ENTRY_BLOCK, 16, device=pools.device)
    query, weights = torch.randn(25, 3, 16, device=pools.device), torch.rand(25, 3, device=pools.device)
    seen = []

    def select(plan, topk=7):
        scores = sparse.scores(query, weights, index, plan.entries)
        seen.append(scores.isfinite().sum(1).tolist())
        return sparse.select(scores, topk)

    whole = pools.step(kernel, parts)
    found = pools.step(kernel, parts, select=select)
    assert seen == [[*((t + 1) // 4 for t in range(12, 30)), *((t + 1) // 4 for t in range(7))]]
    for one, other in zip(whole, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    few = pools.step(kernel, parts, select=lambda plan: select(plan, 2))
    assert not torch.allclose(few[1][:18], whole[1][:18]) and torch.allclose(few[1][18:], whole[1][18:], atol=1e-6)


# --- what layers share ---


@pytest.mark.covers("F232", "F234")
@each_attender
@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
def test_a_layer_without_a_compressor_attends_to_the_entries_of_an_earlier_one(kernel, selects):
    """Its queries, keys and sinks are its own; entries, their plan, and what was selected are those of the other."""
    first, second = (Layer.draw(23, 9, seed=seed) for seed in (0, 1))
    parts, pools = [(17, 23), (3, 9)], pools_for(kernel, first)
    chosen = [[0, 3], [4, 1], [], [2, 0], [0, 1], [4], [], [0], [0], [], [1, 0], [1]] if selects else [None] * 12
    pools.step(kernel, [(0, 17), (0, 3)])
    pools.step(kernel, parts)
    path, plan = twin_of(kernel), pools.plan(kernel, parts)
    if selects:
        lists = torch.tensor([x + [-1] * (2 - len(x)) for x in chosen], dtype=torch.int32, device=pools.device)
        plan = path.select_entries(plan, lists)
    own = pools_for(kernel, second)
    for step in ([(0, 17), (0, 3)], parts):
        key = own.of(step, second.keys)
        mla.write(key, key[:, :0], own.cache, slot_mapping(own.batch(step), len(key), block_size=BLOCK))
    sinks = torch.tensor([0.3, -0.2])
    options = AttentionOptions(sinks=sinks.to(pools.device))
    query = own.of(parts, second.queries)
    with nullcontext() if kernel == "reference" else use_kernel(kernel):
        out, lse = path.attention(query, own.cache, pools.entries, plan, options, return_lse=True)
    row = 0
    for i, (begin, end) in enumerate(parts):
        entries = first.entries_by_hand(i)
        for t in range(begin, end):
            expected = second.attended_by_hand(i, t, entries, sinks=sinks, chosen=chosen[row])
            torch.testing.assert_close(out[row].cpu().double(), expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[row].cpu().double(), expected[1], rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.core
@pytest.mark.covers("F241")
@each_twin
@pytest.mark.parametrize("size", [1, 3, 8, 40, 2**31 - 1])
@pytest.mark.parametrize("topk", [1, 2, 5, 50])
def test_candidates_are_the_blocks_with_the_highest_scores_and_the_newest(package, size, topk):
    """Scores are small integers, so that many are equal; the last row has a NaN, and the one before sees nothing."""
    scores = torch.randint(0, 4, (9, 29), generator=torch.Generator().manual_seed(3)).float()
    for row, seen in enumerate((29, 28, 1, 5, 8, 9, 16, 0, 29)):
        scores[row, seen:] = -torch.inf
    scores[8, 4] = math.nan
    found = twin_of(package).candidates(scores.to(DEVICE) if package == "fastattn" else scores, size=size, topk=topk)
    for row, numbers in enumerate(scores.tolist()):
        seen = [j for j, score in enumerate(numbers) if score != -math.inf]
        ranks = {}
        for j in seen:
            rank = 5 if math.isnan(numbers[j]) else 4 if j // size == seen[-1] // size else numbers[j]
            ranks[j // size] = max(rank, ranks.get(j // size, -1))
        best = sorted(ranks, key=lambda block: (-ranks[block], block))[:topk]
        assert found[row].cpu().tolist() == [j // size in best for j in range(29)]


@pytest.mark.core
@pytest.mark.covers("F241")
@each_twin
def test_a_later_indexer_selects_inside_the_candidates(package):
    sparse = refattn.sparse if package == "refattn" else fastattn.sparse
    scores = torch.tensor([[3.0, 0.0, 1.0, 2.0, 9.0, 4.0, 0.0, 0.0, 1.0, -math.inf]])
    found = twin_of(package).candidates(scores, size=2, topk=3)
    assert found.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0, 1, 1]]
    later = torch.tensor([[0.0, 1.0, 9.0, 9.0, 2.0, 3.0, 9.0, 9.0, 0.0, -math.inf]])
    assert sparse.select(later.masked_fill(~found, -math.inf), 3).tolist() == [[1, 4, 5]]
    none = twin_of(package).candidates(scores[:, :0], size=2, topk=3)
    assert none.shape == (1, 0) and none.dtype == torch.bool


def test_a_sequence_without_entries_selects_none():
    for package in ("refattn", "fastattn"):
        layer = Layer.draw(3)
        pools, path = Pools(layer), refattn.sparse if package == "refattn" else fastattn.sparse

        def select(plan, path=path, pools=pools):
            index = torch.randn(len(pools.entries), ENTRY_BLOCK, 16)
            return path.select(path.scores(torch.randn(3, 1, 16), torch.rand(3, 1), index, plan.entries), 2)

        _, out, lse = pools.step(package, [(0, 3)], select=select)
        for t in range(3):
            expected = layer.attended_by_hand(0, t, torch.zeros(0, 8))
            torch.testing.assert_close(out[t].double(), expected[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse[t].double(), expected[1], rtol=1e-5, atol=1e-6)


# --- the layers of a model ---


def make_layer(kind):
    """Return an attention layer of DeepSeek-V4 with random weights, its rotary embedding, and its configuration."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=12,
        o_groups=2,
        o_lora_rank=6,
        num_hidden_layers=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=6,
        index_n_heads=16,  # so that no score is a sum of zeros: torch.topk has no rule for ties
        index_head_dim=16,
        index_topk=3,
        num_local_experts=4,
        moe_intermediate_size=16,
        vocab_size=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = model.DeepseekV4Attention(config, config.layer_types.index(kind)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0))
    return layer, model.DeepseekV4RotaryEmbedding(config), config, model.apply_rotary_pos_emb


@pytest.mark.core
@pytest.mark.covers("F230", "F231", "F232", "F234")
@each_twin
@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
@pytest.mark.parametrize("ends", [[37], [5, 20, 21, 22, 37]], ids=["whole", "chunks"])
@torch.no_grad()
def test_a_layer_of_deepseek_v4_is_that_of_transformers(package, kind, ends, shapes_unchecked):
    """Its projections, norms and rotations are its own; entries, the selection and attention are ours."""
    layer, rotary, config, rotate = make_layer(kind)
    sparse = refattn.sparse if package == "refattn" else fastattn.sparse
    path, compressor, left = twin_of(package), layer.compressor, config.sliding_window - 1
    overlap, ratio, size = kind.startswith("compressed"), compressor.compress_rate, config.head_dim
    hidden, where = torch.randn(1, 37, config.hidden_size), torch.arange(37)[None]
    angles = {name: rotary(hidden, where, layer_type=name) for name in ("main", "compress")}
    distance = where[0][:, None] - where[0]
    hides = torch.where((distance < 0) | (distance > left), -torch.inf, 0.0)[None, None]
    expected, _ = layer(hidden, position_embeddings=angles, position_ids=where, attention_mask=hides, cache=None)

    blocks, entry_blocks, width = [list(range(10))], torch.arange(5, dtype=torch.int32)[None], size * (1 + overlap)
    rows, index_rows = (torch.full((10, 4, 2 * width), math.nan) for _ in range(2))
    cache, entries, index = torch.full((10, 4, size), math.nan), *torch.full((2, 5, 2, size), math.nan)
    found = []
    for first, end in pairwise([0, *ends]):
        x, at = hidden[:, first:end], where[:, first:end]
        plan = path.plan(
            make_batch([end - first], [end], blocks),
            ratio=ratio,
            overlap=overlap,
            window_size=(left, 0),
            entry_table=entry_blocks,
            block_size=4,
            entry_block_size=2,
        )
        cos, sin = rotary(x, at, layer_type="compress")
        of_entries = rotary(x, plan.positions[None], layer_type="compress")
        slots = torch.arange(first, end)

        def store(module, row_cache, pool, x=x, plan=plan, slots=slots, of_entries=of_entries):
            mla.write(module.kv_proj(x)[0], module.gate_proj(x)[0], row_cache, slots)
            new = module.kv_norm(path.compress(row_cache, plan, bias=module.position_bias))
            new = rotate(new[None, None], *of_entries)[0, 0]
            mla.write(new, new[:, :0], pool, plan.slots)

        residual = layer.q_a_norm(layer.q_a_proj(x))
        query = layer.q_b_norm(layer.q_b_proj(residual).view(1, -1, 4, size).transpose(1, 2))
        query = rotate(query, cos, sin)[0].transpose(0, 1)
        key = rotate(layer.kv_norm(layer.kv_proj(x))[:, None], cos, sin)[0, 0]
        mla.write(key, key[:, :0], cache, slots)
        store(compressor, rows, entries)
        if overlap:
            indexer = compressor.indexer
            store(indexer, index_rows, index)
            of_index = rotate(indexer.q_b_proj(residual).view(1, -1, 16, size).transpose(1, 2), cos, sin)[0].transpose(
                0, 1
            )
            weights = indexer.scorer.weights_proj(x)[0] * 16**-0.5 * size**-0.5
            scores = sparse.scores(of_index, weights, index, plan.entries)
            plan = path.select_entries(plan, sparse.select(scores, config.index_topk))
        out = path.attention(query, cache, entries, plan, AttentionOptions(sinks=layer.sinks))
        out = rotate(out.transpose(0, 1)[None], cos, -sin).transpose(1, 2)
        found.append(layer.o_b_proj(layer.o_a_proj(out.reshape(1, end - first, config.o_groups, -1)).flatten(2)))
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


# --- the plan ---


@pytest.mark.core
@pytest.mark.covers("F231")
@each_twin
def test_the_plan_of_a_step(package):
    """Which entries become complete, where they go and who sees them; of the example in the docstring, and others."""
    batch = make_batch([3, 1, 1, 0, 6], [13, 8, 7, 9, 4], [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9, 10], [11]])
    table = torch.tensor([[5, 6], [2, -1], [9, 9], [3, -1], [8, -1]], dtype=torch.int32)
    plan = twin_of(package).plan(
        batch, ratio=4, window_size=(2, 0), entry_table=table, block_size=4, entry_block_size=2
    )
    assert isinstance(plan, CompressedPlan) and not plan.selected and not plan.overlap
    assert plan.new.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2, 3]
    assert plan.new.seq_lens.tolist() == plan.entries.batch.seq_lens.tolist() == [3, 2, 1, 2, 1]
    assert plan.slots.tolist() == [12, 5, 16, -1, -1, -1] and plan.positions.tolist() == [8, 4, 0, 0, 0, 0]
    assert plan.entries.last_visible.tolist() == [1, 2, 2, 1, 0, -2, -1, -1, -1, -1, 0]
    assert plan.entries.first_visible.tolist() == [0] * 11 and plan.entries.window == (-1, -1)
    assert plan.window.window == (2, 0) and plan.row_blocks == 12


def test_decodes_need_no_intervals_and_layers_share_a_launch(device):
    """The one query of a sequence sees all its entries, so any kernel of decodes computes them."""
    layer = Layer.draw(12, 9)
    pools = pools_for("fastattn", layer)
    plan = pools.plan("fastattn", [(11, 12), (8, 9)])
    assert (
        plan.entries.first_visible is None
        and pools.plan("fastattn", [(0, 12), (8, 9)]).entries.first_visible is not None
    )
    if "triton" in KERNELS:
        with use_kernel("triton"):
            for _ in range(2):
                fastattn.compressed.compress(pools.rows, plan, bias=layer.bias.to(pools.device))
        assert len(memo_of(plan).launches) == 1


def test_a_batch_on_a_device_has_rows_for_all_entries_that_there_may_be():
    """The host does not read lengths there: rows follow from the number of tokens and of sequences."""
    for ratio in (1, 2, 4, 7):
        for lens in ([1], [1, 1, 1], [5, 0, 9], [ratio, ratio - 1, 1]):
            worst = sum((ratio - 1 + q) // ratio for q in lens)
            assert worst <= most_entries(sum(lens), len(lens), ratio) <= sum(lens)


# --- bad input ---


def call(package, function="attention", **changes):
    """Call a function of a package with legal arguments but some."""
    layer = Layer.draw(13, 6, overlap=True)
    pools = Pools(layer, poison=0.0)
    parts = [(5, 13), (0, 6)]
    path, plan = twin_of(package), pools.plan(package, parts)
    legal = dict(
        plan=dict(
            batch=plan.batch,
            ratio=4,
            overlap=True,
            window_size=(2, 0),
            entry_table=plan.new.block_table,
            block_size=BLOCK,
            entry_block_size=ENTRY_BLOCK,
        ),
        compress=dict(row_cache=pools.rows, plan=plan, bias=layer.bias),
        select_entries=dict(plan=plan, positions=torch.zeros(14, 1, dtype=torch.int32)),
        candidates=dict(scores=torch.zeros(3, 4), size=2, topk=1),
        attention=dict(query=pools.of(parts, layer.queries), cache=pools.cache, entry_cache=pools.entries, plan=plan)
        | dict(options=AttentionOptions(), out=torch.full((14, 2, 8), 7.0)),
    )[function]
    changed = {name: x(legal) if callable(x) else x for name, x in changes.items()}
    try:
        return getattr(path, function)(**legal | changed)
    finally:
        if function == "attention":
            assert bool((legal["out"] == 7.0).all()) or not changes
        assert not pools.rows.any() and not pools.entries.any()


BAD = {
    "ratio": (dict(function="plan", ratio=0), "ratio: expected a positive int, got 0"),
    "overlap": (dict(function="plan", overlap=1), "overlap: expected True or False, got 1"),
    "columns": (
        dict(function="plan", entry_table=lambda x: x["entry_table"][:, :1]),
        "entry_table: expected at least 2 columns for the 3 entries of sequence 0 in blocks of 2, got 1",
    ),
    "entry-blocks": (
        dict(function="plan", entry_table=lambda x: torch.full_like(x["entry_table"], -1)),
        "entry_table: expected blocks of at least 0 for the entries of sequence 0, got -1 in column 0",
    ),
    "sequences": (
        dict(function="plan", entry_table=lambda x: x["entry_table"][:1]),
        "entry_table: expected int32 [b=2, m], got int32 [1, 2]",
    ),
    "row-blocks": (
        dict(
            function="plan",
            batch=lambda x: replace(x["batch"], block_table=x["batch"].block_table.index_fill(1, torch.tensor(0), -1)),
            window_size=(0, 0),
        ),
        "block_table: expected entries of at least 0 for the blocks",
    ),
    "odd-rows": (
        dict(function="compress", row_cache=torch.zeros(9, BLOCK, 30)),
        "row_cache: expected rows of two halves of a value and two of its gate, a multiple of 4 elements, got c=30",
    ),
    "row-block-size": (
        dict(function="compress", row_cache=torch.zeros(9, 8, 32)),
        "row_cache: expected blocks of 4 tokens, as in the plan, got p=8",
    ),
    "few-row-blocks": (
        dict(function="compress", row_cache=torch.zeros(1, BLOCK, 32)),
        "row_cache: expected at least",
    ),
    "fp8-rows": (
        dict(function="compress", row_cache=torch.zeros(9, BLOCK, 32).to(torch.float8_e4m3fn)),
        "row_cache: expected a floating point type (bfloat16",
    ),
    "bias": (dict(function="compress", bias=torch.zeros(4, 8)), "bias: expected [ratio=4, c=16], got float32 [4, 8]"),
    "plan": (dict(function="compress", plan=3), "plan: expected a CompressedPlan, got 3"),
    "select-twice": (
        dict(function="select_entries", plan=lambda x: twin_of("refattn").select_entries(x["plan"], x["positions"])),
        "plan: expected one from plan, with all entries, got one with selected entries",
    ),
    "scores": (
        dict(function="candidates", scores=torch.zeros(3, 4).double()),
        "scores: expected float32 [t, s], got float64 [3, 4]",
    ),
    "block": (dict(function="candidates", size=0), "size: expected a positive int, got 0"),
    "topk": (dict(function="candidates", topk=-1), "topk: expected a positive int, got -1"),
    "not-complete": (
        dict(function="select_entries", positions=torch.full((14, 1), 3, dtype=torch.int32)),
        "positions: expected 0..2, or -1 for none, of query row 0, got 3",
    ),
    "entry-size": (
        dict(entry_cache=torch.zeros(8, ENTRY_BLOCK, 16)),
        "entry_cache: expected float32 [n, p, d=8], got float32 [8, 2, 16]",
    ),
    "entry-block-size": (
        dict(entry_cache=torch.zeros(8, 4, 8)),
        "entry_cache: expected blocks of 2 entries, as in the plan, got p=4",
    ),
    "few-entry-blocks": (dict(entry_cache=torch.zeros(1, ENTRY_BLOCK, 8)), "entry_cache: expected at least"),
    "entry-type": (
        dict(entry_cache=torch.zeros(8, ENTRY_BLOCK, 8).double()),
        "entry_cache: expected float32 [n, p, d=8], got float64 [8, 2, 8]",
    ),
    "cache": (dict(cache=torch.zeros(9, 8, 8)), "cache: expected blocks of 4 tokens, as in the plan, got p=8"),
    "scale": (
        dict(cache_scale=0.5),
        "cache_scale: expected 1 for a cache of float32, which holds no fp8 values, got 0.5",
    ),
    "entry-scale": (
        dict(entry_cache=torch.zeros(8, ENTRY_BLOCK, 8).to(torch.float8_e4m3fn), entry_scale=0.0),
        "entry_scale: expected",
    ),
    "entry-scale-of-float64": (
        dict(entry_cache=torch.zeros(8, ENTRY_BLOCK, 8).to(torch.float8_e4m3fn), entry_scale=1e39),
        "entry_scale: expected a number of float32, from 1.4e-45 to 3.4e+38, got 1e+39",
    ),
    "int8": (dict(cache=torch.zeros(9, BLOCK, 8, dtype=torch.int8)), "cache: expected"),
    "slopes": (
        dict(options=AttentionOptions(alibi_slopes=torch.ones(2))),
        "alibi_slopes: expected None, as an entry has no position of its own, got slopes",
    ),
    "sinks": (dict(options=AttentionOptions(sinks=torch.ones(3))), "sinks: expected floating point [h=2]"),
    "rows": (dict(query=torch.zeros(3, 2, 8)), "query: expected at least 14 rows"),
}


@each_twin
@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_and_nothing_is_written(package, changes, message, shapes_unchecked):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(package, **changes)


@each_twin
def test_what_the_bad_calls_change_is_legal_without_it(package):
    for function in ("plan", "compress", "select_entries", "candidates", "attention"):
        call(package, function)


def test_selected_entries_of_a_pool_that_would_be_copied_are_refused_by_name():
    layer = Layer.draw(13)
    pools = Pools(layer, poison=0.0)
    plan = pools.plan("fastattn", [(0, 13)])
    plan = fastattn.compressed.select_entries(plan, torch.zeros(13, 1, dtype=torch.int32).sub(1))
    apart = torch.zeros(len(pools.entries), 2 * ENTRY_BLOCK, 8)[:, ::2][:, :ENTRY_BLOCK].transpose(0, 1).contiguous()
    with pytest.raises(NotImplementedError, match="entry_cache: a pool is read token by token"):
        fastattn.compressed.attention(layer.queries[0], pools.cache, apart.transpose(0, 1), plan)


def test_float64_has_no_triton_kernel_and_says_so():
    if "triton" not in KERNELS:
        return
    layer = Layer.draw(5, dtype=torch.float64)
    pools = pools_for("triton", layer)
    plan = pools.plan("fastattn", [(0, 5)])
    with (
        use_kernel("triton"),
        pytest.raises(NotImplementedError, match="computes in float32, and rounds float64 to it"),
    ):
        fastattn.compressed.compress(pools.rows, plan)


def test_gradients_flow_in_the_reference():
    """From outputs to rows, entries, keys and queries; rows that no entry reads have a gradient of 0."""
    layer = Layer.draw(11, overlap=True, dtype=torch.float64)
    pools = Pools(layer, poison=0.0)
    plan = pools.plan("refattn", [(0, 11)])
    pools.write(plan, [(0, 11)])
    rows, cache, query = (x.clone().requires_grad_() for x in (pools.rows, pools.cache, layer.queries[0]))
    new = refattn.compressed.compress(rows, plan, bias=layer.bias)
    entries = (
        torch.zeros_like(pools.entries).flatten(0, 1).index_copy(0, plan.slots[:2], new[:2]).view_as(pools.entries)
    )
    refattn.compressed.attention(query, cache, entries, plan).square().sum().backward()
    by_token = rows.grad[pools.blocks[0]].flatten(0, 1).abs().sum(-1)
    assert (by_token[:8] > 0).all() and not by_token[8:].any() and query.grad.abs().sum() > 0 and cache.grad.any()
