"""Sliding windows: exactly their keys, only their blocks, and a pool that is no larger than they are."""

import importlib
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import fastattn.kv_cache
import fastattn.sliding_window
import fastattn.varlen
import refattn.chunked_prefill
import refattn.kv_cache
import refattn.metadata
import refattn.sliding_window
import refattn.varlen
from fastattn.kernels.triton import metadata as triton_metadata
from tests.helpers.batches import (
    GARBAGE,
    STALE,
    Case,
    Paged,
    assert_same_masks,
    build,
    masks_by_hand,
    plan_and_attend,
    read_masks,
)
from tests.helpers.kernels_present import PRESENT
from tests.helpers.options import per_head
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.tolerance import assert_twins_agree

TWINS = [refattn.sliding_window, fastattn.sliding_window]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])
each_varlen = pytest.mark.parametrize("varlen", [refattn.varlen, fastattn.varlen], ids=["ref", "fast"])

WINDOWS = [(0, 0), (1, 0), (15, 0), (16, 0), (31, 2), (5000, 0), (0, 5), (-1, 0), (-1, 3), (3, -1)]
TRIMMED = [
    Case("long-decodes", ((1, 130), (1, 122), (1, 16), (1, 17), (1, 3)), heads=(4, 2)),
    Case("long-chunks", ((7, 110), (33, 64), (16, 79)), heads=(2, 2)),
    Case("long-mixed", ((4, 97), (1, 120), (0, 90), (40, 40), (5, 2), (5, 0), (1, 1)), heads=(4, 1), padding_rows=3),
    Case("long-prefills", ((75, 150), (90, 90)), heads=(3, 1)),
    Case("long-odd-blocks", ((3, 100), (1, 99), (20, 26)), heads=(2, 1), block_size=24),
    Case("blocks-of-one", ((3, 40), (1, 30)), heads=(3, 1), block_size=1),
    Case("long-heads-first", ((2, 133), (1, 90)), heads=(2, 2), layout="HND", block_size=64),
]
each_trimmed = pytest.mark.parametrize("case", TRIMMED, ids=str)
WINDOW_OPTIONS = {
    "window": dict(window_size=(20, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "no-limit": dict(window_size=(-1, -1)),
    "both-sides-with-sinks": dict(window_size=(33, 5), causal=False, sinks=True),
    "alibi": dict(window_size=(20, 0), alibi_slopes=True),
    "everything": dict(softmax_scale=0.2, window_size=(30, 0), softcap=5.0, alibi_slopes=True, sinks=True),
}


def sees(window: tuple[int, int], causal: bool = True):
    """Return, for one pair of positions, whether it is seen."""
    left, right = window
    return lambda i, j: (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)


def evict(inputs: Paged, left: int, *, block_size: int, stale: float = STALE) -> Paged:
    """Take from each sequence the blocks before its window: garbage in the table, NaN in the pool.

    In the blocks that stay, the rows before the window hold 1e4, or another number.
    """
    table, pools = inputs.batch.block_table.clone(), (inputs.key_cache.clone(), inputs.value_cache.clone())
    shuffle = random.Random(0)
    contexts = inputs.batch.context_lens.tolist()
    for i, (context, seq_len) in enumerate(zip(contexts, inputs.batch.seq_lens.tolist(), strict=True)):
        if context == seq_len:  # no new tokens: no query looks
            continue
        for j in range(max(0, context - left)):
            block = int(inputs.batch.block_table[i, j // block_size])
            gone = (j // block_size + 1) * block_size <= context - left
            for pool in pools:
                pool[block, j % block_size] = float("nan") if gone else stale
            if gone:
                table[i, j // block_size] = shuffle.choice(GARBAGE)
    return replace(inputs, key_cache=pools[0], value_cache=pools[1], batch=replace(inputs.batch, block_table=table))


def used(batch, block_size: int) -> list[list[int]]:
    """Return the blocks that each sequence of a batch uses."""
    rows = zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True)
    return [row[: -(-seq_len // block_size)] for row, seq_len in rows]


# --- the mask, read out ---


@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_window_shows_exactly_its_keys(twin, window, causal, device):
    case = Case("mixed", ((4, 6), (1, 70), (10, 57), (20, 20), (5, 2), (1, 49)), heads=(2, 1), padding_rows=2)
    masks = read_masks(partial(plan_and_attend, twin), case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees(window, causal)))


@pytest.mark.core
@pytest.mark.covers("A9", "D124")
@each_twin
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 64, 99, 100, 101, 5000], ids=lambda w: f"W={w}")
def test_a_window_of_W_tokens_shows_exactly_W_keys(twin, tokens, device):
    """W = 1, and W of the sequence's length and above, included (V#3385, HF#39408, V#9679)."""
    inputs = build(Case("count", ((100, 100), (1, 100), (3, 100)), heads=(2, 1)), device=device)
    _, lse = plan_and_attend(
        twin, torch.zeros_like(inputs.query), *inputs.tensors[1:], window_size=(tokens - 1, 0), return_lse=True
    )
    positions = [*range(100), 99, 97, 98, 99]
    expected = [min(tokens, position + 1) for position in positions]
    assert lse[:, 0].exp().tolist() == pytest.approx(expected, rel=1e-6)


@each_twin
def test_a_noncausal_window_over_long_keys(twin, device):
    """300 queries, 4096 keys, 333 to the left and all to the right (FI#4972)."""
    inputs = build(Case("long", ((300, 4096),), heads=(2, 1)), device=device)
    _, lse = plan_and_attend(
        twin, torch.zeros_like(inputs.query), *inputs.tensors[1:], causal=False, window_size=(333, -1), return_lse=True
    )
    assert lse[:, 1].exp().tolist() == pytest.approx([333 + 300 - i for i in range(300)], rel=1e-5)


@each_twin
@pytest.mark.parametrize("window", [(-1, 300), (3, 300), (0, 1), (300, 300)], ids=str)
def test_a_right_window_larger_than_a_sequence_with_more_queries_than_keys(twin, window, device):
    """No key is dropped (FA#895)."""
    case = Case("more-queries", ((39, 1), (5, 2), (5, 0), (7, 6)), heads=(2, 1))
    masks = read_masks(partial(plan_and_attend, twin), case, device=device, causal=False, window_size=window)
    assert_same_masks(masks, masks_by_hand(case, sees(window, causal=False)))


@pytest.mark.core
@pytest.mark.covers("B56")
@each_varlen
@pytest.mark.parametrize("reach", [0, 1, 5, 16, 100])
def test_an_encoder_window_is_symmetric(varlen, reach, device):
    case = Case("encoders", ((40, 40), (7, 7), (1, 1), (0, 0), (17, 17)), heads=(2, 1))
    masks = read_masks(
        partial(plan_and_attend, varlen), case, paged=False, device=device, causal=False, window_size=(reach, reach)
    )
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: abs(i - j) <= reach))
    assert all(torch.equal(mask, mask.T) for mask in masks)


# --- only the blocks that a query can see ---


@each_twin
def test_the_example_of_the_docstring(twin, device):
    batch = refattn.metadata.make_batch([1], [14], [[9, 2, 4, 7]], device=device)
    trimmed = twin.plan(batch, window_size=(4, 0), block_size=4).batch
    assert used(trimmed, 4) == [[4, 7]]
    assert trimmed.seq_lens.tolist() == [6]
    assert trimmed.query_lens.tolist() == [1]


@pytest.mark.core
@pytest.mark.covers("A39")
@each_twin
@each_trimmed
@pytest.mark.parametrize("left", [0, 15, 16, 100])
def test_trimming_keeps_the_blocks_from_the_first_visible_key_on(twin, case, left, device):
    batch, p = build(case, device=device).batch, case.block_size
    trimmed = twin.plan(batch, window_size=(left, 0), block_size=p).batch
    assert torch.equal(trimmed.cu_seqlens_q, batch.cu_seqlens_q)
    lens = zip(case.lens, used(batch, p), used(trimmed, p), trimmed.seq_lens.tolist(), strict=True)
    for (q, s), before, after, seq_len in lens:
        visible = [j for j in range(s) if any(s - q + i - left <= j for i in range(q))]
        if visible:
            assert after == before[visible[0] // p :]
            assert seq_len == s - visible[0] // p * p
        assert len(after) * p <= left + q + 2 * (p - 1) + 1
        assert seq_len <= trimmed.max_seq_len
        assert q <= trimmed.max_query_len


@each_twin
@pytest.mark.parametrize("query_len", [1, 3, 16, 17])
def test_a_block_goes_with_the_step_after_which_no_query_sees_it(twin, query_len, device):
    for left in (0, 7, 15, 16):
        last = left + query_len + 15  # the first query still sees the last key of the first block
        for seq_len, cut in ((last, 0), (last + 1, 1), (last + 16, 1), (last + 17, 2)):
            if query_len <= seq_len:
                batch = refattn.metadata.make_batch([query_len], [seq_len], [range(40)], device=device)
                trimmed = twin.plan(batch, window_size=(left, 0), block_size=16).batch
                assert used(trimmed, 16)[0][0] == cut


@pytest.mark.parametrize(
    ("case", "stale", "package"),
    every_pair_on_cpu(TRIMMED, [STALE, float("nan"), float("inf")], ["refattn", "fastattn"]),
    ids=str,
)
def test_blocks_that_fell_out_of_the_window_are_never_read(case, stale, package, device):
    """Their place in the table is garbage, their memory is NaN; evicted blocks still in the table (V#42273).

    What is left of the keys before the window, in the first block that stays, may hold anything too.
    """
    inputs, twin = build(case, device=device), importlib.import_module(f"{package}.sliding_window")
    for left in (0, 16, 25):
        gone = evict(inputs, left, block_size=case.block_size, stale=stale)
        for options in ({}, {"softcap": 2.0, "alibi_slopes": True}):
            filled = per_head(options, case, device)
            expected = plan_and_attend(twin, *inputs.tensors, window_size=(left, 0), return_lse=True, **filled)
            out = plan_and_attend(twin, *gone.tensors, window_size=(left, 0), return_lse=True, **filled)
            assert torch.equal(out[0], expected[0])
            assert torch.equal(out[1], expected[1])


@each_trimmed
@pytest.mark.parametrize("left", [0, 15, 40])
def test_one_launch_trims_the_same(case, left, device):
    """What `fastattn` launches on CUDA; on the CPU, Triton's interpreter runs it."""
    batch, p = build(case, device=device).batch, case.block_size
    left = min(left, batch.max_seq_len - p - 1)  # where there is something to cut
    columns = min(-(-(left + batch.max_query_len + p - 1) // p), batch.block_table.shape[1])
    first_keys, seq_lens, block_table = triton_metadata.trim(batch, left, block_size=p, columns=columns)
    launched = replace(batch, seq_lens=seq_lens, block_table=block_table)
    plan = refattn.sliding_window.plan(batch, window_size=(left, 0), block_size=p)
    by_loops = plan.batch
    assert torch.equal(seq_lens, by_loops.seq_lens)
    assert torch.equal(first_keys, plan.first_keys)
    assert block_table.shape[1] == columns
    assert used(launched, p) == used(by_loops, p)


@pytest.mark.parametrize("kernel", ["ref", "torch", "triton"])
def test_as_many_keys_as_an_int32_counts(kernel, device):
    """The window of queries without keys begins before the smallest int32."""
    p, keys, blocks = 2**20, 2**31 - 1, range(2048)
    batch = refattn.metadata.make_batch([1, p + 5], [keys, 0], [blocks, []], device=device)
    twin = refattn.sliding_window if kernel == "ref" else fastattn.sliding_window
    with fastattn.use_kernel("torch" if kernel == "ref" else kernel):
        plan = twin.plan(batch, window_size=(keys - 1 - p, 0), block_size=p)
    assert plan.first_keys.tolist() == [p, 0]
    assert used(plan.batch, p) == [list(blocks[1:]), []]


@each_twin
@each_trimmed
def test_slots_of_new_tokens_stay_what_they_are(twin, case, device):
    batch, t = build(case, device=device).batch, sum(q for q, _ in case.lens) + case.padding_rows
    slots = refattn.metadata.slot_mapping(batch, t, block_size=case.block_size)
    trimmed = twin.plan(batch, window_size=(8, 0), block_size=case.block_size).batch
    assert torch.equal(refattn.metadata.slot_mapping(trimmed, t, block_size=case.block_size), slots)


@each_twin
@each_trimmed
def test_a_batch_trimmed_once_serves_every_layer(twin, case, device):
    inputs = build(case, device=device)
    trimmed = twin.plan(inputs.batch, window_size=(20, 0), block_size=case.block_size).batch
    out = plan_and_attend(twin, *inputs.tensors[:3], trimmed, window_size=(20, 0))
    assert torch.equal(out, plan_and_attend(twin, *inputs.tensors, window_size=(20, 0)))
    again = twin.plan(trimmed, window_size=(20, 0), block_size=case.block_size).batch
    assert used(again, case.block_size) == used(trimmed, case.block_size)
    assert torch.equal(again.seq_lens, trimmed.seq_lens)


@each_twin
def test_a_batch_without_sequences_has_nothing_to_trim(twin, device):
    empty = replace(refattn.metadata.make_batch([], [], [], device=device), max_query_len=3, max_seq_len=90)
    assert twin.plan(empty, window_size=(7, 0), block_size=16).batch.num_seqs == 0


@pytest.mark.core
@pytest.mark.covers("B68", "D139")
@each_twin
def test_layers_with_different_windows_share_one_batch(twin, device):
    """Each trims for itself, and none changes what the others see (V#54374)."""
    case = TRIMMED[2]
    inputs = build(case, device=device)
    table, seq_lens = inputs.batch.block_table.clone(), inputs.batch.seq_lens.clone()
    layers = [(20, 0), (-1, 0), (3, 0), (100, 0), (20, 0)]
    together = [plan_and_attend(twin, *inputs.tensors, window_size=window) for window in layers]
    for window, out in zip(layers, together, strict=True):
        assert torch.equal(out, plan_and_attend(twin, *build(case, device=device).tensors, window_size=window))
        torch.testing.assert_close(out, plan_and_attend(refattn.chunked_prefill, *inputs.tensors, window_size=window))
    assert torch.equal(inputs.batch.block_table, table)
    assert torch.equal(inputs.batch.seq_lens, seq_lens)


@pytest.mark.parametrize("context", [2_000, 64_000])
def test_the_twin_reads_no_more_of_a_longer_context(context, device):
    """Sizes follow from the window: what a kernel is given is the same after 2k and after 64k tokens."""
    batch = replace(
        refattn.metadata.make_batch([1, 3], [context, context - 7], [range(4000)] * 2, device=device), max_query_len=3
    )
    trimmed = fastattn.sliding_window.plan(batch, window_size=(127, 0), block_size=16).batch
    assert trimmed.max_seq_len == 127 + 3 + 15
    assert list(trimmed.block_table.shape) == [2, 10]
    assert int(trimmed.seq_lens.max()) <= 145


def test_the_twin_trims_without_asking_the_device():
    """Tensors without contents are enough, so nothing waits for them; captured short it has the sizes of long."""
    batch = replace(build(TRIMMED[0]).batch, max_seq_len=10_000)
    unknown = replace(
        batch, **{name: getattr(batch, name).to("meta") for name in ("cu_seqlens_q", "seq_lens", "block_table")}
    )
    shapes = fastattn.sliding_window.plan(unknown, window_size=(31, 0), block_size=16).batch
    known = fastattn.sliding_window.plan(batch, window_size=(31, 0), block_size=16).batch
    assert shapes.block_table.shape == known.block_table.shape
    assert shapes.max_seq_len == known.max_seq_len


# --- arithmetic that shares no code with the reference ---


@each_trimmed
def test_reference_equals_the_same_mask_without_trimming(case, device):
    inputs = build(case, device=device, dtype=torch.float64)
    options = per_head(dict(softcap=3.0, alibi_slopes=True, sinks=True), case, device)
    for window, causal in (((0, 0), True), ((40, 2), True), ((16, 3), False)):
        masked = dict(window_size=window, causal=causal, return_lse=True, **options)
        out, lse = plan_and_attend(refattn.sliding_window, *inputs.tensors, **masked)
        whole = plan_and_attend(refattn.chunked_prefill, *inputs.tensors, **masked)
        torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


# --- the twin against the reference ---


@pytest.mark.parametrize(("kernel", "options", "case"), every_pair_on_cpu(PRESENT, WINDOW_OPTIONS, TRIMMED), ids=str)
def test_twins_agree(case, options, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    options = per_head(WINDOW_OPTIONS[options], case, device)
    with kernel.forced():
        kernel.check(assert_twins_agree, "sliding_window", *inputs.tensors, **options)


@each_twin
def test_a_sequence_without_queries_has_no_block_before_its_window(twin):
    """Its next token, at position 20, sees the keys from 4 on: column 0 may hold anything, though one window is all."""
    batch = refattn.metadata.make_batch([0, 1], [20, 3], [[-1, 1, 2, 3, 4], [0, -1, -1, -1, -1]])
    plan = twin.plan(batch, window_size=(16, 0), block_size=4)
    assert plan.needs.blocks == 5 and plan.first_keys.tolist() == [4, 0]
