"""Prefill chunks and decodes in one batch over the paged cache."""

import dataclasses
import importlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import fastattn.chunked_prefill
import fastattn.sliding_window
import fastattn.varlen
import refattn.chunked_prefill
import refattn.metadata
import refattn.varlen
from fastattn import dispatch
from fastattn.kernels import cpu as cpu_kernel
from fastattn.kernels.cpu import attention as cpu
from fastattn.kernels.cpu import schedule as cpu_schedule
from fastattn.kernels.flash import fa4
from fastattn.kernels.triton import expand
from refattn import masks
from refattn.batch import Batch
from refattn.keys import Pages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from tests.helpers.alone import alone, assert_rows_do_not_change
from tests.helpers.batches import (
    Case,
    assert_same_masks,
    build,
    each_case,
    masks_by_hand,
    of_batches,
    plan_and_attend,
    ragged_cases,
    read_masks,
)
from tests.helpers.kernels_present import PRESENT, each_kernel
from tests.helpers.options import OPTIONS, SMALL, WINDOWS, each_kernel_case_and_option, per_head
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.positions import answer_by_hand, seen_from
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree

each_twin = pytest.mark.parametrize("twin", [refattn.chunked_prefill, fastattn.chunked_prefill], ids=["ref", "fast"])


# --- the mask, read out ---


@pytest.mark.core
@pytest.mark.covers("A28", "D121")
@each_twin
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_query_sees_the_keys_up_to_its_position(twin, case, device):
    case = Case(**{**case.__dict__, "head_size": 64, "value_head_size": 64})
    assert_same_masks(
        read_masks(partial(plan_and_attend, twin), case, device=device), masks_by_hand(case, lambda i, j: j <= i)
    )


@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_window_shows_exactly_its_keys(twin, window, causal, device):
    case = Case("mixed", ((4, 6), (1, 70), (10, 17), (40, 40), (5, 2), (1, 64)), heads=(2, 1), padding_rows=2)
    left, right = window

    def sees(i, j):
        return (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)

    masks = read_masks(partial(plan_and_attend, twin), case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees))


@pytest.mark.core
@pytest.mark.covers("A10")
@each_twin
def test_a_softcap_does_not_unmask(twin, device):
    case = Case("softcap", ((10, 17), (1, 9), (6, 6)), heads=(2, 1))
    masks = read_masks(partial(plan_and_attend, twin), case, device=device, softcap=1.0, window_size=(3, 0))
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: i - 3 <= j <= i))


# --- arithmetic that shares no code with the reference ---


@pytest.mark.core
@pytest.mark.covers("A12", "A26")
@each_case
def test_reference_equals_torch_sdpa_with_a_mask(case, device):
    inputs = build(case, device=device, dtype=torch.float64)
    out = plan_and_attend(refattn.chunked_prefill, *inputs.tensors)
    row = 0
    for (q, s), key, value in zip(case.lens, inputs.keys, inputs.values, strict=True):
        mine = out[row : row + q]
        seeing = max(q - s, 0)  # the queries before it see nothing, which sdpa answers with NaN
        assert not mine[:seeing].any()
        if q and s:
            mask = torch.ones(q, s, dtype=torch.bool, device=device).tril(s - q)[seeing:]
            expected = functional.scaled_dot_product_attention(
                inputs.query[row + seeing : row + q].transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                attn_mask=mask,
                enable_gqa=True,
            )
            torch.testing.assert_close(mine[seeing:], expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
        row += q
    assert not out[row:].any()


@pytest.mark.covers("B183")
def test_reference_equals_a_sum_by_hand():
    """One query, three keys, every option, in plain Python floats."""
    case = Case("by-hand", ((1, 3),), heads=(1, 1), head_size=2, block_size=2)
    inputs = build(case, dtype=torch.float64)
    scale, cap, slope, sink = 0.7, 1.5, 0.25, 0.4
    scores = []
    for j in range(3):
        dot = sum(float(inputs.query[0, 0, c]) * float(inputs.keys[0][j, 0, c]) for c in range(2))
        scores.append(cap * math.tanh(scale * dot / cap) - slope * (2 - j))
    total = sum(math.exp(score) for score in scores) + math.exp(sink)
    expected = [sum(math.exp(s) * float(inputs.values[0][j, 0, c]) for j, s in enumerate(scores)) for c in range(2)]
    out, lse = plan_and_attend(
        refattn.chunked_prefill,
        *inputs.tensors,
        softmax_scale=scale,
        softcap=cap,
        alibi_slopes=torch.tensor([slope], dtype=torch.float64),
        sinks=torch.tensor([sink], dtype=torch.float64),
        return_lse=True,
    )
    assert out[0, 0].tolist() == pytest.approx([x / total for x in expected], rel=1e-13)
    assert float(lse) == pytest.approx(math.log(total), rel=1e-13)


# --- the twin against the reference ---


@pytest.mark.covers("A8", "A10", "A11", "A12", "A26", "A27", "A28", "D121", "D122", "E177", "B184", "D188")
@each_kernel_case_and_option(("mixed", "decodes-ragged"))
def test_twins_agree(case, options, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.forced():
        kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **per_head(options, case, device))


@pytest.mark.parametrize(
    ("options", "kernel"),  # the interpreted kernel has met each option above, in its only type
    [(name, kernel) for name in OPTIONS for kernel in PRESENT if not kernel.is_interpreted or name == "everything"],
    ids=str,
)
def test_twins_agree_in_every_type(options, kernel, device):
    """On a CPU with the options that hold most; an option is computed in one type there, float32."""
    case = Case("mixed", ((40, 60), (1, 170), (10, 17), (1, 64), (33, 33)), heads=(4, 2), padding_rows=3)
    filled = per_head(OPTIONS[options], case, device)
    for dtype in kernel.dtypes if device != "cpu" or options in ("plain", "everything") else kernel.dtypes[:1]:
        inputs = build(case, device=device, dtype=dtype)
        with kernel.forced():
            kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **filled)


@of_batches
@given(case=ragged_cases(), options=st.sampled_from(list(OPTIONS)), seed=st.integers(0, 2**16))
def test_twins_agree_on_drawn_batches(case, options, seed, device):
    inputs = build(case, device=device, seed=seed)
    assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(OPTIONS[options], case, device))


# --- bits that do not depend on the rest of the batch ---

# Some numbers of sinks, of queries and of keys are no multiple of a vector of any processor.
INVARIANT = {
    "plain": {},
    "sinks": dict(sinks=True),
    "not-causal": dict(causal=False, sinks=True),
    "window": dict(window_size=(37, 0), sinks=True),
    "two-sided-window": dict(causal=False, window_size=(20, 9), alibi_slopes=True),
    "softcap": dict(softcap=2.0, sinks=True, window_size=(70, 0)),
}


@pytest.mark.covers("B73")
@pytest.mark.parametrize("options", INVARIANT.values(), ids=INVARIANT)
def test_rows_do_not_change_with_the_rest_of_the_batch(options, device):
    """Nor with other queries of their own sequence; and they are right."""
    lens = ((1, 300), (1, 290), (30, 100), (1, 7), (0, 40), (5, 2), (4, 44), (19, 531))
    case = Case("company", lens, heads=(9, 3), padding_rows=2)
    inputs = build(case, device=device)
    filled = per_head(options, case, device) | dict(batch_invariant=True)
    attention = partial(plan_and_attend, fastattn.chunked_prefill, **filled, return_lse=True)
    answer = assert_rows_do_not_change(attention, *inputs.tensors)
    assert_matches_reference(*answer, partial(plan_and_attend, refattn.chunked_prefill), *inputs.tensors, **filled)


@of_batches
@given(case=ragged_cases(), options=st.sampled_from(list(INVARIANT)), seed=st.integers(0, 2**16))
def test_rows_of_drawn_batches_do_not_change(case, options, seed):
    inputs = build(case, seed=seed)
    filled = per_head(INVARIANT[options], case, "cpu") | dict(batch_invariant=True, return_lse=True)
    assert_rows_do_not_change(partial(plan_and_attend, fastattn.chunked_prefill, **filled), *inputs.tensors)


@pytest.mark.parametrize("options", ["plain", "window", "softcap"])
def test_rows_do_not_change_with_the_chunk_they_come_in(options, device):
    """A prompt of 90 tokens whole, and in chunks that end in the middle of a tile, as a decode, and at the end."""
    case = Case("chunks", ((90, 90),), heads=(9, 3))
    inputs = build(case, device=device)
    filled = per_head(INVARIANT[options], case, device) | dict(batch_invariant=True)
    whole = plan_and_attend(fastattn.chunked_prefill, *inputs.tensors, **filled)
    for begin, end in ((0, 37), (37, 38), (38, 90)):
        chunk = alone(inputs.batch, 0, end - begin, end)
        out = plan_and_attend(
            fastattn.chunked_prefill, inputs.query[begin:end], inputs.key_cache, inputs.value_cache, chunk, **filled
        )
        assert torch.equal(out, whole[begin:end])


@pytest.mark.covers("B183")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_rows_of_a_window_do_not_change_with_the_blocks_that_are_removed(softcap):
    """On a CPU: a chunk of a prompt begins with other blocks than the whole of it."""
    inputs = build(Case("chunks", ((90, 90),), heads=(6, 2), block_size=3))
    given = dict(window_size=(37, 0), softcap=softcap, batch_invariant=True)
    tensors = inputs.query, inputs.key_cache, inputs.value_cache
    whole = plan_and_attend(fastattn.sliding_window, *tensors, inputs.batch, **given)
    for begin in range(0, 90, 7):
        end = min(begin + 7, 90)
        chunk = alone(inputs.batch, 0, end - begin, end)
        out = plan_and_attend(fastattn.sliding_window, tensors[0][begin:end], *tensors[1:], chunk, **given)
        assert torch.equal(out, whole[begin:end]), begin


@pytest.mark.parametrize(
    ("package", "broken", "options"),
    every_pair_on_cpu(
        ["refattn", "fastattn"],
        [("key", torch.nan), ("value", torch.nan), ("value", -torch.inf)],
        INVARIANT,
    ),
    ids=str,
)
def test_rows_do_not_change_with_what_is_broken_in_another_token_of_their_chunk(package, broken, options):
    """Not a bit of the rows from which it is hidden, as they are without it; who sees it says so."""
    (of, junk), twin = broken, importlib.import_module(f"{package}.chunked_prefill")
    case = Case("broken", ((90, 90), (20, 31)), heads=(4, 2))
    inputs = build(case)
    filled = per_head(INVARIANT[options], case, "cpu") | dict(batch_invariant=True, return_lse=True)
    clean = plan_and_attend(twin, *inputs.tensors, **filled)
    pool = inputs.key_cache if of == "key" else inputs.value_cache
    for i, j in ((0, 40), (1, 29)):
        pool[inputs.batch.block_table[i, j // 16], j % 16, :, 3] = junk
    out, lse = plan_and_attend(twin, *inputs.tensors, **filled)
    left, right = filled.get("window_size", (-1, -1))
    window = left, 0 if filled.get("causal", True) else right
    see = [masks.window(q, s, window)[:, j] for (q, s), j in zip(case.lens, (40, 29), strict=True)]
    broken = torch.cat(see)
    healthy = ~broken
    assert broken.all() if options == "not-causal" else 10 < broken.sum() < 60
    assert torch.equal(out[healthy], clean[0][healthy]) and torch.equal(lse[healthy], clean[1][healthy])
    assert not out[broken].isfinite().all(-1).any()


@pytest.mark.parametrize(
    ("path", "window_size"),
    [("chunked_prefill", (-1, -1)), ("chunked_prefill", (37, 0)), ("sliding_window", (37, 0))],
    ids=str,
)
def test_a_row_stands_where_its_position_says_in_products_of_one_shape(path, window_size, monkeypatch):
    """On the CPU, where most processors multiply alike in all places of a matrix, but none has to.

    Also where the table of a sequence begins with the window of its first query.
    """
    monkeypatch.setattr(cpu, "INVARIANT_SLAB", 64)
    seen = []

    def rectangle(query, key, value, bias, options):
        shapes = query.shape[0], key.shape[0], value.shape[0], bias.shape[1:]
        assert shapes == (cpu.INVARIANT_TILE, 64, 64, (cpu.INVARIANT_TILE, 64))
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        for rows in (query, key):
            positions = rows[:, 0, 0].int()
            there = positions.nonzero()[:, 0]
            assert torch.equal(there, positions[there] % len(rows))
            seen.append(positions[there])
        return query.new_zeros(query.shape), query.new_zeros(query.shape[:2])

    monkeypatch.setattr(cpu.rectangles, "attend", rectangle)
    inputs = build(Case("places", ((30, 200), (1, 90), (17, 17)), heads=(2, 1)))
    query = torch.cat([torch.arange(s - q, s) for q, s in ((30, 200), (1, 90), (17, 17))])
    for i, s in enumerate((200, 90, 17)):  # queries, keys and values are their own positions
        for j in range(s):
            for cache in (inputs.key_cache, inputs.value_cache):
                cache[inputs.batch.block_table[i, j // 16], j % 16] = float(j)
    query = query.float()[:, None, None].expand(-1, 2, 128)[..., ::2]
    options, twin = dict(batch_invariant=True, window_size=window_size), importlib.import_module(f"fastattn.{path}")
    plan_and_attend(twin, query, inputs.key_cache, inputs.value_cache, inputs.batch, **options)
    assert set(range(1, 17)) | {89} | set(range(170, 200)) <= set(torch.cat(seen).tolist())


@pytest.mark.parametrize(
    ("head_size", "options"),
    [(7, {}), *((33, options) for options in INVARIANT.values()), (65, {})],
    ids=["7", *INVARIANT, "65"],
)
def test_rows_of_the_reference_do_not_change_with_the_rest_of_the_batch(head_size, options, device):
    """Nor with other queries of their own sequence; of an odd size, rows begin anywhere in memory."""
    case = Case("company", ((1, 130), (5, 71), (3, 2), (7, 7)), heads=(6, 3), head_size=head_size)
    inputs = build(case, device=device)
    filled = per_head(options, case, device) | dict(return_lse=True)
    attention = partial(plan_and_attend, refattn.chunked_prefill, **filled)
    answer = assert_rows_do_not_change(partial(attention, batch_invariant=True), *inputs.tensors)
    for one, other in zip(attention(*inputs.tensors), answer, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("head_size", [7, 33, 65])
def test_rows_of_the_reference_do_not_change_with_the_rows_before_them(head_size, device):
    """Over rows of keys, which begin where those of the sequence before end."""
    lens = ((3, 5), (7, 7), (1, 90), (6, 21))
    inputs = build(Case("rows", lens, heads=(4, 2), head_size=head_size), device=device)
    query, key, value, batch = inputs.rows
    answer = plan_and_attend(refattn.varlen, query, key, value, batch, batch_invariant=True, return_lse=True)
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(batch.query_rows(), batch.key_rows(), strict=True)):
        for first in {q0, (q0 + q1) // 2}:
            tensors = query[first:q1].clone(), key[k0:k1].clone(), value[k0:k1].clone()
            one = alone(batch, i, q1 - first, k1 - k0)
            again = plan_and_attend(refattn.varlen, *tensors, one, batch_invariant=True, return_lse=True)
            for one, other in zip(again, answer, strict=True):
                assert torch.equal(one, other[first:q1])


# --- queries at other positions than the last of their sequences ---

POSITIONS = {
    "plain": {},
    "not-causal": dict(causal=False),
    "alibi": dict(causal=False, alibi_slopes=True),
    "window": dict(causal=False, window_size=(12, -1)),
    "two-sided-window": dict(causal=False, window_size=(12, 4), sinks=True),
    "right-window": dict(causal=False, window_size=(-1, 2)),
    "everything": dict(window_size=(30, 0), alibi_slopes=True, softcap=3.0, sinks=True, softmax_scale=-0.2),
    "invariant": dict(causal=False, window_size=(12, 4), batch_invariant=True),
    "invariant-softcap": dict(causal=False, window_size=(12, 4), batch_invariant=True, softcap=3.0),
}
SOMEWHERE = [25, 40, 2, 33, 16, 15, 90, -3, 16, 100, 41, 0]  # past the keys, before them, twice, in any order
GROUPS = Case("groups", ((3, 20), (1, 33), (5, 17), (2, 70), (0, 9), (1, 1)), heads=(4, 2), padding_rows=2)


@pytest.mark.parametrize(
    ("options", "over", "kernel"), every_pair_on_cpu(POSITIONS, ["pages", "rows"], PRESENT), ids=str
)
def test_queries_at_any_positions(over, options, kernel, device):
    """With NaN where no query looks; on a CPU between two windows, too, which no path asks of a kernel."""
    filled = per_head(POSITIONS[options], GROUPS, device)
    mask = dict(causal=filled.pop("causal", True), window_size=filled.pop("window_size", (-1, -1)))
    options = AttentionOptions(**filled)
    inputs = build(GROUPS, device=device, dtype=kernel.dtypes[0])
    window = Plan(inputs.batch, **mask).window
    row = 0
    for i, (q, s) in enumerate(GROUPS.lens):
        places = SOMEWHERE[row : row + q]
        if kernel.name != "cpu" and places:
            places = list(range(min(places), max(places) + 1))
        seen = seen_from(places, s, window).any(0)
        for j in (~seen).nonzero()[:, 0].tolist():
            block, place = inputs.batch.block_table[i, j // GROUPS.block_size], j % GROUPS.block_size
            for cache, lists in ((inputs.key_cache, inputs.keys), (inputs.value_cache, inputs.values)):
                cache[block, place] = lists[i][j] = torch.nan
        row += q
    rows = torch.tensor([*SOMEWHERE, 7, 7], dtype=torch.int32, device=device)
    storage = Pages if over == "pages" else Rows
    *arguments, batch = inputs.tensors if over == "pages" else inputs.rows
    block_size = GROUPS.block_size if over == "pages" else None
    begins = torch.arange(0, 100 * batch.num_seqs, 100, dtype=torch.int32, device=device)  # positions count from there
    offsets = [begin for begin, (q, _) in zip(begins.tolist(), GROUPS.lens, strict=True) for _ in range(q)]
    rows[: len(offsets)] += torch.tensor(offsets, dtype=torch.int32, device=device)
    plan = Plan(batch, block_size, **mask, first_keys=begins, positions=rows)

    def assert_right():
        query, *keys = arguments
        out, lse = dispatch.compute(query, storage(*keys), plan, options)
        assert_matches_reference(
            out,
            lse,
            answer_by_hand,
            inputs.query,
            inputs.keys,
            inputs.values,
            inputs.batch,
            positions=[*SOMEWHERE, 7, 7],
            window=window,
            options=options,
        )

    with kernel.forced():
        kernel.check(assert_right)


# --- scales, and what is kept of a batch ---


@pytest.mark.core
@pytest.mark.covers("A11")
@each_kernel
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["no-cap", "cap"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale, softcap, kernel, device):
    """Of causal prompts that are short and that are not, a chunk with context, and decodes."""
    case = Case("scale", ((5, 5), (17, 17), (9, 37), (1, 33), (1, 30)), heads=(2, 1))
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.forced():
        options = dict(softmax_scale=scale, softcap=softcap)
        kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **options)


@pytest.mark.parametrize("scale", [-1e-42, 1e-320, -40.0])
def test_a_scale_that_is_hardly_a_number_and_a_large_one(scale):
    """ATen's call takes the scale in float32, where the first two are 0, or are taken for it."""
    inputs = build(Case("scale", ((5, 5), (17, 17), (9, 37), (1, 33), (1, 30)), heads=(2, 1)))
    assert_twins_agree("chunked_prefill", *inputs.tensors, softmax_scale=scale)


LAYERS = [  # query heads over two KV heads, and what else a layer fixes
    *((2, {}), (6, {}), (2, dict(softcap=2.0)), (2, {}), (6, dict(alibi_slopes=True)), (2, dict(batch_invariant=True))),
    *((2, dict(softcap=2.0, alibi_slopes=True)), (6, dict(sinks=True)), (2, {})),
]


@pytest.mark.parametrize(
    ("planned", "kernel", "over"),
    every_pair_on_cpu(
        [{}, dict(window_size=(4, 0)), dict(window_size=(20, 0)), dict(causal=False, window_size=(20, -1))],
        [kernel for kernel in PRESENT if not kernel.is_interpreted],
        ["pages", "rows"],
    ),
    ids=str,
)
def test_layers_of_one_plan(planned, over, kernel, device):
    """With other options and heads in turn: nothing that one of them keeps is taken for what another asks.

    What our Triton kernel keeps has a test of its own.
    """
    reference, twin = (
        (refattn.chunked_prefill, fastattn.chunked_prefill) if over == "pages" else (refattn.varlen, fastattn.varlen)
    )

    def lay_out(heads):
        case = Case("layers", ((1, 40), (1, 33), (3, 27), (1, 38)), heads=(heads, 2))
        inputs = build(case, device=device, dtype=kernel.dtypes[0])
        return case, *(inputs.tensors if over == "pages" else inputs.rows)

    *_, batch = lay_out(2)
    plan = twin.plan(batch, **planned, **(dict(block_size=16) if over == "pages" else {}))

    def assert_right(tensors, options):
        answer = twin.attention(*tensors, plan, AttentionOptions(**options), return_lse=True)
        assert_matches_reference(*answer, partial(plan_and_attend, reference), *tensors, batch, **planned, **options)

    with kernel.forced():
        for heads, options in LAYERS:
            case, *tensors, _ = lay_out(heads)
            kernel.check(assert_right, tensors, per_head(options, case, device))


# --- where the CPU kernel cuts ---


@pytest.mark.parametrize(
    ("threads", "columns", "options"),
    every_pair_on_cpu([1, 2, 20, 50], [1, 2, 5], ["plain", "window", "window-of-one", "alibi", "sinks"]),
)
def test_decodes_of_any_groups_and_runs_through_a_buffer_of_any_size(threads, columns, options, monkeypatch):
    """Shorter sequences see nothing in the last columns or runs, where longer ones do; some end with a block."""
    case = Case("buffer", ((1, 90), (1, 65), (1, 64), (1, 83), (1, 61), (1, 80)), heads=(4, 2))
    monkeypatch.setattr(cpu, "BUFFER", columns * case.block_size * case.heads[1] * case.head_size)
    monkeypatch.setattr(cpu_schedule, "RUN", 17)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inputs = build(case)
    assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(OPTIONS[options], case, "cpu"))


def test_a_long_decode_is_cut_into_runs_if_it_has_fewer_heads_than_there_are_threads(monkeypatch):
    def shapes_of_calls(threads, lens):
        calls = []
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(
            cpu.rectangles, "FLASH", lambda *args, **options: calls.append(args[1].shape) or flash(*args, **options)
        )
        with fastattn.use_kernel("cpu"):
            plan_and_attend(fastattn.chunked_prefill, *build(Case("runs", lens, heads=(4, 2))).tensors)
        return calls

    flash, run = cpu.rectangles.FLASH, cpu_schedule.RUN
    assert shapes_of_calls(2, ((1, 3 * run),)) == [(1, 2, 3 * run, 64)]
    assert shapes_of_calls(3, ((1, 4 * run),)) == [(2, 2, 2 * run, 64)]
    assert shapes_of_calls(6, ((1, 3 * run),)) == [(3, 2, run, 64)]
    assert shapes_of_calls(16, ((1, 3 * run),)) == [(3, 2, run, 64)]  # shorter ones would not pay for their merge
    assert shapes_of_calls(8, ((1, run),)) == [(1, 2, run, 64)]
    assert shapes_of_calls(8, ((1, 4 * run),) * 2) == [(4, 2, 2 * run, 64)]


@pytest.mark.parametrize("lens", [((1, 90), (1, 65)), ((20, 20), (18, 18))], ids=["decodes", "prompts"])
def test_threads_that_share_a_plan_gather_into_memory_of_their_own(lens, monkeypatch):
    """Neither begins its product before the other has gathered, too."""
    query, *pools, batch = build(Case("threads", lens, heads=(4, 2))).tensors
    plan = fastattn.chunked_prefill.plan(batch, block_size=pools[0].shape[1])
    asked = [(query, *pools, plan), (query, *(2 * pool for pool in pools), plan)]
    expected = [fastattn.chunked_prefill.attention(*one) for one in asked]
    flash, barrier = cpu.rectangles.FLASH, threading.Barrier(2, timeout=60)
    monkeypatch.setattr(cpu.rectangles, "FLASH", lambda *args, **options: (barrier.wait(), flash(*args, **options))[1])
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda one: fastattn.chunked_prefill.attention(*one), asked))
    assert all(map(torch.equal, answers, expected))


PROMPTS = {
    "alike": ((30, 30), (30, 30)),
    "neighbours": ((30, 30), (25, 25), (1, 40), (2, 2)),
    "apart": ((20, 20), (1, 40), (33, 33), (5, 20), (30, 30), (0, 8), (2, 2), (3, 3), (257, 257)),
}


@pytest.mark.parametrize(
    ("lens", "most", "options"),
    every_pair_on_cpu(PROMPTS, [1, 2**9, 2**20], ["plain", "window", "alibi", "sinks", "softcap", "scale"]),
)
def test_short_prompts_in_one_call(lens, most, options, monkeypatch):
    """Shorter ones are padded with rows, whose outputs are dropped, and with keys that lie behind their last query."""
    monkeypatch.setattr(cpu, "BUFFER", most)
    case = Case("prompts", PROMPTS[lens], heads=(4, 2), padding_rows=2)
    assert_twins_agree("chunked_prefill", *build(case).tensors, **per_head(OPTIONS[options], case, "cpu"))


def test_how_many_calls_prompts_need(monkeypatch):
    calls, flash = [], cpu.rectangles.FLASH
    monkeypatch.setattr(
        cpu.rectangles, "FLASH", lambda *args, **options: calls.append(args[0].shape) or flash(*args, **options)
    )
    lens = ((30, 30), (1, 40), (20, 20), (200, 200), (300, 300), (1, 41))
    plan_and_attend(fastattn.chunked_prefill, *build(Case("prompts", lens, heads=(4, 2))).tensors)
    assert calls == [(2, 2, 2, 64), (1, 4, 200, 64), (2, 4, 30, 64), (1, 4, 300, 64)]


TILES = {  # sizes: queries, keys, the queries of a band, both under `batch_invariant`
    "small": dict(TILE=8, SLAB=16, BAND_TILE=4, INVARIANT_TILE=4, INVARIANT_SLAB=16),
    "odd": dict(TILE=13, SLAB=65, BAND_TILE=5, INVARIANT_TILE=16, INVARIANT_SLAB=65),
    "as-long-as-a-sequence": dict(TILE=65, SLAB=129, BAND_TILE=65, INVARIANT_TILE=1, INVARIANT_SLAB=129),
}


EDGES = OPTIONS | {
    "right-window": dict(causal=False, window_size=(-1, 3)),
    "invariant": dict(batch_invariant=True, window_size=(70, 0), sinks=True),
}
HARD_EDGES = "plain", "two-sided-window", "everything", "invariant"  # together they take every branch


@pytest.mark.parametrize(
    ("tiles", "options"),
    [
        *(("odd", options) for options in EDGES),
        *((tiles, options) for tiles in TILES if tiles != "odd" for options in HARD_EDGES),
    ],
)
def test_queries_and_keys_on_either_side_of_the_end_of_a_tile(tiles, options, monkeypatch):
    for name, size in TILES[tiles].items():
        monkeypatch.setattr(cpu, name, size)
    case = Case("edges", ((65, 129), (64, 128), (66, 65), (2, 130), (13, 13), (1, 66)), heads=(4, 2))
    assert_twins_agree("chunked_prefill", *build(case).tensors, **per_head(EDGES[options], case, "cpu"))


@pytest.mark.parametrize("options", ["alibi", "softcap", "window"])
def test_one_query_and_one_key_more_than_a_tile_holds(options):
    case = Case("long", ((cpu.TILE + 1, cpu.SLAB + 1),), heads=(2, 1))
    assert_twins_agree("chunked_prefill", *build(case).tensors, **per_head(OPTIONS[options], case, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shown", [1, 3])
def test_with_a_scale_of_0_the_lse_counts_the_keys(dtype, shown):
    """ATen's exponentials of 16 bits are off by 5e-5, also where the others of 16 keys are hidden."""
    key = torch.randn(1, 1, 16, 8, dtype=dtype)
    bias = torch.full((1, 1, 2, 16), -torch.inf)
    bias[..., :shown] = 0.0
    out, lse = cpu.rectangles.call_aten(torch.randn(1, 2, 2, 8, dtype=dtype), key, key, 0.0, bias=bias)
    assert torch.equal(lse, torch.full((1, 2, 2), float(shown)).log())
    assert torch.allclose(out.float(), key[:, :, :shown].float().mean(2, keepdim=True), atol=0.02)


@pytest.mark.parametrize("over", ["pages", "rows"])
def test_no_heads_and_no_queries_have_an_empty_answer(over):
    """ATen's call would divide by the number of heads."""
    inputs = build(Case("none", ((2, 5), (1, 20))))
    query, *stores, batch = inputs.tensors if over == "pages" else inputs.rows
    empty = dataclasses.replace(batch, cu_seqlens_q=torch.zeros_like(batch.cu_seqlens_q), num_tokens=0)
    attention = cpu.paged if over == "pages" else cpu.varlen
    block_size = stores[0].shape[1] if over == "pages" else None
    for rows, those in ((query[:, :0], batch), (query[:0], empty)):
        out, lse = attention(rows, *stores, Plan(those, block_size), AttentionOptions())
        assert out.shape == (*rows.shape[:2], 64) and lse.shape == rows.shape[:2]


# --- adapters ---


@pytest.mark.parametrize(
    ("kernel", "case", "options"),
    [
        pytest.param(kernel, case, options, id=f"{case}-{options}-{kernel.name}")
        for kernel in PRESENT
        for case in SMALL
        for options in ("plain", "sinks")
        if case.head_size <= 128 and (kernel.name == "fa4" or (case.name, options) == ("empty-rows", "sinks"))
    ],
)
def test_pages_that_are_copied_into_larger_ones(case, options, kernel, device, monkeypatch):
    """As flash-attn-4 does before long prefills, and here before all."""
    monkeypatch.setattr(fa4, "QUERY_ROWS", 0)
    copies = mock.Mock(wraps=expand.repage)
    monkeypatch.setattr(expand, "repage", copies)
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.forced():
        kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **per_head(OPTIONS[options], case, device))
    assert copies.called == (kernel.name == "fa4")


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("max_query_len", [1, 63, 64, 65, 1000])
def test_pages_before_the_first_are_looked_up_in_memory_of_the_table(max_query_len, block_size, monkeypatch):
    """As flash-attn-4 does over pages of a tile where a sequence has fewer keys than queries: an illegal access."""
    batch = refattn.metadata.make_batch([max_query_len, 1], [0, 3], [[2], [1]])
    pool, query = torch.zeros(3, block_size, 1, 64), torch.zeros(max_query_len + 1, 1, 64)
    answers = mock.Mock(return_value=(query, query[..., 0]))
    monkeypatch.setattr(fa4, "_attend", answers)
    fa4.paged(query, pool, pool, Plan(batch, block_size), AttentionOptions(), None)
    table = answers.call_args.kwargs["page_table"]
    assert torch.equal(table, batch.block_table)
    for tile in (
        range(64, 193, 16) if block_size > 16 else ()
    ):  # a smaller page is no tile: what is looked up is checked
        first = math.ceil((1 + 0 - max_query_len) / tile) - 1  # with a tile of one query and no key
        assert table.storage_offset() + first >= 0


LONG_PROMPTS = dict(lens=((8192, 8192),) * 2, heads=(32, 8), head_size=128, block_size=16, left=-1)


@pytest.mark.parametrize(
    ("change", "copies"),
    [
        ({}, True),
        (dict(left=1023), False),
        (dict(block_size=128), False),
        (dict(head_size=256), False),
        (dict(lens=((1024, 8192),) * 2), False),
        (dict(lens=((8192, 2**17),) * 2), False),
        (dict(lens=()), False),
    ],
    ids=["long", "window", "large-pages", "large-heads", "few-queries", "many-keys", "no-query"],
)
def test_pages_are_copied_where_it_pays(change, copies):
    """From sizes alone; tensors on `meta` have no contents to read."""
    lens, (h, hk), d, p, left = (LONG_PROMPTS | change).values()
    longest = max((s for _, s in lens), default=0)
    batch = Batch(
        torch.empty(len(lens) + 1, dtype=torch.int32, device="meta"),
        torch.empty(len(lens), dtype=torch.int32, device="meta"),
        torch.empty(len(lens), -(-longest // p), dtype=torch.int32, device="meta"),
        max((q for q, _ in lens), default=0),
        longest,
    )
    query = torch.empty(sum(q for q, _ in lens), h, d, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(8, p, hk, d, dtype=torch.bfloat16, device="meta")
    assert fa4._should_copy(query, pool, pool, Plan(batch, p, window_size=(left, 0))) == copies


@each_kernel
def test_a_batch_that_is_advanced_in_place_is_read_again(kernel, device):
    """Nothing that a twin keeps of a batch may outlive a write to its tensors."""
    inputs = build(Case("steps", ((1, 40), (1, 20), (3, 47)), heads=(4, 2)), device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = inputs.tensors
    key_cache, value_cache = key_cache.nan_to_num(0.5), value_cache.nan_to_num(0.5)
    with kernel.forced():
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, batch)
        batch.seq_lens.sub_(1)
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, batch)
        batch.block_table[0, 0] = batch.block_table[1, 0]
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, batch)


@each_kernel
def test_one_length_may_have_any_stride(kernel, device):
    """A single length out of a table of the scheduler, whose stride means nothing but is looked at."""
    inputs = build(Case("column", ((30, 40),), heads=(4, 2)), device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = inputs.tensors
    column = torch.stack([batch.seq_lens, batch.seq_lens], dim=1)[:, 0]
    assert column.stride() == (2,)
    with kernel.forced():
        one = dataclasses.replace(batch, seq_lens=column)
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, one)


# --- bad input ---


@pytest.mark.parametrize("twin", [refattn.chunked_prefill, fastattn.chunked_prefill], ids=["ref", "fast"])
def test_what_was_written_to_is_checked_by_the_next_plan(twin):
    inputs = build(Case("decodes", ((1, 20), (1, 9))))
    plan_and_attend(twin, *inputs.tensors)
    kept = inputs.batch.block_table.clone()
    inputs.batch.block_table[1, 0] = 10**6
    with pytest.raises(ValueError, match="key_cache: expected at least 1000001 blocks"):
        plan_and_attend(twin, *inputs.tensors)
    inputs.batch.block_table.copy_(kept)
    inputs.batch.seq_lens[0] = 10**6
    with pytest.raises(ValueError, match="max_seq_len: expected at least 1000000"):
        plan_and_attend(twin, *inputs.tensors)


def test_a_kernel_without_memory_says_what_helps(monkeypatch):
    inputs = build(Case("c", ((2, 6),)))
    monkeypatch.setattr(
        cpu_kernel, "attend", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB"))
    )
    helps = r"query: .* max_num_batched_tokens.*num_blocks\). CUDA .* 9 GiB"
    with fastattn.use_kernel("cpu"), pytest.raises(torch.OutOfMemoryError, match=helps):
        plan_and_attend(fastattn.chunked_prefill, *inputs.tensors)
