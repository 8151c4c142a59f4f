"""Sliding windows: exactly their keys, only their blocks, and a pool that is no larger than they are."""

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from batches import (
    GARBAGE,
    STALE,
    Case,
    Paged,
    assert_same_masks,
    build,
    each_case,
    masks_by_hand,
    ragged_cases,
    read_masks,
)
from hypothesis import given
from hypothesis import strategies as st
from kernels_present import each_kernel
from test_chunked_prefill import BAD_INPUT, OPTIONS, per_head
from tolerance import assert_twins_agree
from torch.nn import functional

import fastattn.dense
import fastattn.kernels
import fastattn.kv_cache
import fastattn.sliding_window
import refattn.chunked_prefill
import refattn.dense
import refattn.kv_cache
import refattn.metadata
import refattn.sliding_window
from fastattn.kernels import triton_tables

TWINS = [refattn.sliding_window, fastattn.sliding_window]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])
each_dense = pytest.mark.parametrize("dense", [refattn.dense, fastattn.dense], ids=["ref", "fast"])

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
    """Say in words of one pair of positions who sees whom."""
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
        if context == seq_len:  # no new tokens: nobody looks
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
    """Give the blocks that each sequence of a batch uses."""
    rows = zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True)
    return [row[: -(-seq_len // block_size)] for row, seq_len in rows]


# --- the mask, read out ---


@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_window_shows_exactly_its_keys(twin, window, causal, device):
    case = Case("mixed", ((4, 6), (1, 70), (10, 57), (20, 20), (5, 2), (1, 49)), heads=(2, 1), padding_rows=2)
    masks = read_masks(twin.attention, case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees(window, causal)))


@each_twin
@each_trimmed
@pytest.mark.parametrize("left", [0, 16, 17])
def test_windows_deep_in_the_context(twin, case, left, device):
    case = replace(case, heads=(2, 1))
    masks = read_masks(twin.attention, case, device=device, window_size=(left, 0))
    assert_same_masks(masks, masks_by_hand(case, sees((left, 0))))


@each_twin
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 64, 99, 100, 101, 5000], ids=lambda w: f"W={w}")
def test_a_window_of_W_tokens_shows_exactly_W_keys(twin, tokens, device):
    """W = 1, and W of the sequence's length and above, included (V#3385, HF#39408, V#9679)."""
    inputs = build(Case("count", ((100, 100), (1, 100), (3, 100)), heads=(2, 1)), device=device)
    _, lse = twin.attention(
        torch.zeros_like(inputs.query), *inputs.tensors[1:], window_size=(tokens - 1, 0), return_lse=True
    )
    positions = [*range(100), 99, 97, 98, 99]
    expected = [min(tokens, position + 1) for position in positions]
    assert lse[:, 0].exp().tolist() == pytest.approx(expected, rel=1e-6)


@each_twin
def test_a_noncausal_window_over_long_keys(twin, device):
    """300 queries, 4096 keys, 333 to the left and all to the right (FI#4972)."""
    inputs = build(Case("long", ((300, 4096),), heads=(2, 1)), device=device)
    _, lse = twin.attention(
        torch.zeros_like(inputs.query), *inputs.tensors[1:], causal=False, window_size=(333, -1), return_lse=True
    )
    assert lse[:, 1].exp().tolist() == pytest.approx([333 + 300 - i for i in range(300)], rel=1e-5)


@each_twin
@pytest.mark.parametrize("window", [(-1, 300), (3, 300), (0, 1), (300, 300)], ids=str)
def test_a_right_window_larger_than_a_sequence_with_more_queries_than_keys(twin, window, device):
    """No key is dropped (FA#895)."""
    case = Case("more-queries", ((39, 1), (5, 2), (5, 0), (7, 6)), heads=(2, 1))
    masks = read_masks(twin.attention, case, device=device, causal=False, window_size=window)
    assert_same_masks(masks, masks_by_hand(case, sees(window, causal=False)))


@each_dense
@pytest.mark.parametrize("reach", [0, 1, 5, 16, 100])
def test_an_encoder_window_is_symmetric(dense, reach, device):
    case = Case("encoders", ((40, 40), (7, 7), (1, 1), (0, 0), (17, 17)), heads=(2, 1))
    masks = read_masks(dense.attention, case, paged=False, device=device, causal=False, window_size=(reach, reach))
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: abs(i - j) <= reach))
    assert all(torch.equal(mask, mask.T) for mask in masks)


# --- only the blocks that a query can see ---


@each_twin
def test_the_example_of_the_docstring(twin, device):
    batch = refattn.metadata.make_batch([1], [14], [[9, 2, 4, 7]], device=device)
    trimmed = twin.trim(batch, (4, 0), block_size=4)
    assert used(trimmed, 4) == [[4, 7]]
    assert trimmed.seq_lens.tolist() == [6]
    assert trimmed.query_lens.tolist() == [1]


@each_twin
@each_trimmed
@pytest.mark.parametrize("left", [0, 15, 16, 100])
def test_trimming_keeps_the_blocks_from_the_first_visible_key_on(twin, case, left, device):
    batch, p = build(case, device=device).batch, case.block_size
    trimmed = twin.trim(batch, (left, 0), block_size=p)
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
                trimmed = twin.trim(batch, (left, 0), block_size=16)
                assert used(trimmed, 16)[0][0] == cut


@each_twin
@pytest.mark.parametrize("stale", [STALE, float("nan"), float("inf")], ids=str)
@each_trimmed
def test_blocks_that_fell_out_of_the_window_are_never_read(twin, case, stale, device):
    """Their place in the table is garbage, their memory is NaN; evicted blocks still in the table (V#42273).

    What is left of the keys before the window, in the first block that stays, may hold anything too.
    """
    inputs = build(case, device=device)
    for left in (0, 16, 25):
        gone = evict(inputs, left, block_size=case.block_size, stale=stale)
        for options in ({}, {"softcap": 2.0, "alibi_slopes": True}):
            filled = per_head(options, case, device)
            expected = twin.attention(*inputs.tensors, window_size=(left, 0), return_lse=True, **filled)
            out = twin.attention(*gone.tensors, window_size=(left, 0), return_lse=True, **filled)
            assert torch.equal(out[0], expected[0])
            assert torch.equal(out[1], expected[1])


@each_trimmed
@pytest.mark.parametrize("left", [0, 15, 40])
def test_one_launch_trims_the_same(case, left, device):
    """What `fastattn` launches on CUDA; on the CPU, Triton's interpreter runs it."""
    batch, p = build(case, device=device).batch, case.block_size
    left = min(left, batch.max_seq_len - p - 1)  # where there is something to cut
    columns = min(-(-(left + batch.max_query_len + p - 1) // p), batch.block_table.shape[1])
    seq_lens, block_table = triton_tables.trim(batch, left, block_size=p, columns=columns)
    launched = replace(batch, seq_lens=seq_lens, block_table=block_table)
    by_loops = refattn.sliding_window.trim(batch, (left, 0), block_size=p)
    assert torch.equal(seq_lens, by_loops.seq_lens)
    assert block_table.shape[1] == columns
    assert used(launched, p) == used(by_loops, p)


@each_twin
@each_trimmed
def test_slots_of_new_tokens_stay_what_they_are(twin, case, device):
    batch, t = build(case, device=device).batch, sum(q for q, _ in case.lens) + case.padding_rows
    slots = refattn.metadata.slot_mapping(batch, t, block_size=case.block_size)
    trimmed = twin.trim(batch, (8, 0), block_size=case.block_size)
    assert torch.equal(refattn.metadata.slot_mapping(trimmed, t, block_size=case.block_size), slots)


@each_twin
@each_trimmed
def test_a_batch_trimmed_once_serves_every_layer(twin, case, device):
    inputs = build(case, device=device)
    trimmed = twin.trim(inputs.batch, (20, 0), block_size=case.block_size)
    out = twin.attention(*inputs.tensors[:3], trimmed, window_size=(20, 0))
    assert torch.equal(out, twin.attention(*inputs.tensors, window_size=(20, 0)))
    again = twin.trim(trimmed, (20, 0), block_size=case.block_size)
    assert used(again, case.block_size) == used(trimmed, case.block_size)
    assert torch.equal(again.seq_lens, trimmed.seq_lens)


@each_twin
def test_a_batch_without_sequences_has_nothing_to_trim(twin, device):
    nobody = replace(refattn.metadata.make_batch([], [], [], device=device), max_query_len=3, max_seq_len=90)
    assert twin.trim(nobody, (7, 0), block_size=16).num_seqs == 0


@each_twin
def test_layers_with_different_windows_share_one_batch(twin, device):
    """Each trims for itself, and none changes what the others see (V#54374)."""
    case = TRIMMED[2]
    inputs = build(case, device=device)
    table, seq_lens = inputs.batch.block_table.clone(), inputs.batch.seq_lens.clone()
    layers = [(20, 0), (-1, 0), (3, 0), (100, 0), (20, 0)]
    together = [twin.attention(*inputs.tensors, window_size=window) for window in layers]
    for window, out in zip(layers, together, strict=True):
        assert torch.equal(out, twin.attention(*build(case, device=device).tensors, window_size=window))
    assert torch.equal(inputs.batch.block_table, table)
    assert torch.equal(inputs.batch.seq_lens, seq_lens)


@pytest.mark.parametrize("context", [2_000, 64_000])
def test_the_twin_reads_no_more_of_a_longer_context(context, device):
    """Sizes follow from the window: what a kernel is given is the same after 2k and after 64k tokens."""
    batch = replace(
        refattn.metadata.make_batch([1, 3], [context, context - 7], [range(4000)] * 2, device=device), max_query_len=3
    )
    trimmed = fastattn.sliding_window.trim(batch, (127, 0), block_size=16)
    assert trimmed.max_seq_len == 127 + 3 + 15
    assert list(trimmed.block_table.shape) == [2, 10]
    assert int(trimmed.seq_lens.max()) <= 145


def test_the_twin_trims_without_asking_the_device():
    """Tensors without contents are enough, so nothing waits for them; captured short it has the sizes of long."""
    batch = replace(build(TRIMMED[0]).batch, max_seq_len=10_000)
    unknown = replace(
        batch, **{name: getattr(batch, name).to("meta") for name in ("cu_seqlens_q", "seq_lens", "block_table")}
    )
    shapes = fastattn.sliding_window.trim(unknown, (31, 0), block_size=16)
    known = fastattn.sliding_window.trim(batch, (31, 0), block_size=16)
    assert shapes.block_table.shape == known.block_table.shape
    assert shapes.max_seq_len == known.max_seq_len
    pool = fastattn.sliding_window.WindowPool(4, 8, window_size=(31, 0), block_size=16)
    assert pool.translate_batch(unknown).block_table.shape == batch.block_table.shape
    assert pool.translate_slots(torch.zeros(5, dtype=torch.int64, device="meta")).shape == (5,)


# --- arithmetic that shares no code with the reference ---


@each_trimmed
@pytest.mark.parametrize("window", [(20, 0), (16, 3)], ids=str)
def test_reference_equals_torch_sdpa_with_a_mask_and_a_bias(case, window, device):
    """With ALiBi as part of the mask, on absolute positions: trimming must not shift a distance."""
    inputs = build(case, device=device, dtype=torch.float64)
    slopes = torch.tensor([0.5 / (head + 1) for head in range(case.heads[0])], dtype=torch.float64, device=device)
    out = refattn.sliding_window.attention(*inputs.tensors, window_size=window, causal=False, alibi_slopes=slopes)
    row, left_right = 0, sees(window, causal=False)
    for (q, s), key, value in zip(case.lens, inputs.keys, inputs.values, strict=True):
        for query_row in range(q):
            position = s - q + query_row
            mask = torch.tensor([left_right(position, j) for j in range(s)], dtype=torch.bool, device=device)
            if not mask.any():
                assert not out[row + query_row].any()
                continue
            distance = position - torch.arange(s, dtype=torch.float64, device=device)
            bias = (-slopes[:, None, None] * distance.abs()).masked_fill(~mask, -torch.inf)
            expected = functional.scaled_dot_product_attention(
                inputs.query[row + query_row, :, None],
                key.transpose(0, 1),
                value.transpose(0, 1),
                bias,
                enable_gqa=True,
            )
            torch.testing.assert_close(out[row + query_row], expected[:, 0], rtol=1e-12, atol=1e-12)
        row += q


@each_trimmed
def test_reference_equals_the_same_mask_without_trimming(case, device):
    inputs = build(case, device=device, dtype=torch.float64)
    options = per_head(dict(softcap=3.0, alibi_slopes=True, sinks=True), case, device)
    for window in ((0, 0), (40, 2)):
        out, lse = refattn.sliding_window.attention(*inputs.tensors, window_size=window, return_lse=True, **options)
        whole = refattn.chunked_prefill.attention(*inputs.tensors, window_size=window, return_lse=True, **options)
        torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


# --- the twin against the reference ---


@each_kernel
@pytest.mark.parametrize("options", WINDOW_OPTIONS.values(), ids=WINDOW_OPTIONS)
@each_trimmed
def test_twins_agree(case, options, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "sliding_window", *inputs.tensors, **per_head(options, case, device))


@each_kernel
@each_case
def test_twins_agree_on_the_shared_list(case, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "sliding_window", *inputs.tensors, window_size=(20, 0))


@each_kernel
def test_twins_agree_in_every_type(kernel, device):
    case = replace(TRIMMED[2], heads=(6, 3))
    for dtype in kernel.dtypes:
        inputs = build(case, device=device, dtype=dtype)
        options = per_head(WINDOW_OPTIONS["everything"], case, device)
        with kernel.asked_for():
            kernel.check(assert_twins_agree, "sliding_window", *inputs.tensors, **options)


@given(
    case=ragged_cases(),
    left=st.integers(-1, 90),
    right=st.integers(-1, 20),
    options=st.sampled_from(list(OPTIONS)),
    seed=st.integers(0, 2**16),
)
def test_twins_agree_on_drawn_batches(case, left, right, options, seed, device):
    inputs = build(case, device=device, seed=seed)
    if left >= 0:
        inputs = evict(inputs, left, block_size=case.block_size)
    drawn = {**per_head(OPTIONS[options], case, device), "window_size": (left, right)}
    assert_twins_agree("sliding_window", *inputs.tensors, **drawn)


@each_twin
def test_rows_do_not_change_with_the_company(twin, device):
    """Alone, a sequence that is not longer than its window is not trimmed; beside longer ones it is."""
    case = Case("company", ((1, 300), (1, 36), (30, 100), (1, 32), (4, 44), (1, 33)), heads=(4, 2))
    inputs = build(case, device=device)
    together = twin.attention(*inputs.tensors, window_size=(31, 0), batch_invariant=True)
    rows = [0, *inputs.batch.cu_seqlens_q[1:].tolist()]
    for i, (first, last) in enumerate(pairwise(rows)):
        q, s = case.lens[i]
        batch = refattn.metadata.make_batch([q], [s], [used(inputs.batch, 16)[i]], device=device)
        alone = twin.attention(
            inputs.query[first:last],
            inputs.key_cache,
            inputs.value_cache,
            batch,
            window_size=(31, 0),
            batch_invariant=True,
        )
        assert torch.equal(alone, together[first:last]), f"sequence {i} changed"


def test_the_kernel_is_asked_for_invariance_and_given_the_trimmed_batch(monkeypatch, device):
    """A kernel may skip blocks by itself, or be invariant without being asked, so look at the question."""
    paged, asked = fastattn.kernels.paged, []

    def listen(*arguments):
        batch, options = arguments[-2:]
        asked.append((options.batch_invariant, batch.seq_lens.tolist(), batch.max_seq_len))
        return paged(*arguments)

    monkeypatch.setattr(fastattn.kernels, "paged", listen)
    inputs = build(Case("small", ((2, 5), (1, 90))), device=device)
    for batch_invariant in (True, False):
        fastattn.sliding_window.attention(*inputs.tensors, window_size=(31, 0), batch_invariant=batch_invariant)
    assert asked == [(True, [5, 42], 48), (False, [5, 42], 48)]


# --- the window layers' own pool ---


@each_twin
def test_the_pool_of_the_docstring(twin):
    pool = twin.WindowPool(3, 10, window_size=(3, 0), block_size=2)
    blocks = [9, 2, 4, 7]
    seen = []
    for query_len, seq_len in ((4, 4), (1, 5), (1, 6), (1, 7)):
        pool.hold("a", query_len, seq_len, blocks)
        seen.append([pool.window_block[block] for block in blocks])
    assert len(set(seen[0][:2])) == 2 and seen[0][2:] == [-1, -1]
    assert seen[1][:2] == seen[0][:2] and seen[1][3] == -1
    assert seen[3] == [-1, *seen[1][1:3], seen[0][0]], "the block that came back is used again"


@each_twin
@pytest.mark.parametrize("block_size", [1, 2, 16, 24])
def test_locations_are_translated_and_not_block_ids(twin, block_size, device):
    """A slot of the full pool is a slot of the window pool, whatever the block size (S#16267)."""
    pool = twin.WindowPool(3, 50, window_size=(2 * block_size, 0), block_size=block_size)
    pool.hold("a", 1, 1, [0])
    pool.hold("b", block_size + 1, block_size + 1, [7, 49])
    of = {block: pool.window_block[block] for block in (0, 7, 49)}
    assert sorted(of.values()) == [0, 1, 2]
    last = block_size - 1
    slots = [0, 7 * block_size + last, 49 * block_size, -1, 3 * block_size, 49 * block_size + last]
    expected = [of[0] * block_size, of[7] * block_size + last, of[49] * block_size, -1, -1, of[49] * block_size + last]
    assert pool.translate_slots(torch.tensor(slots, device=device)).tolist() == expected
    tables = [[0, 1_000_000, -1, 50], [7, 49, 3]]
    translated = pool.translate_batch(refattn.metadata.make_batch([1, 1], [1, 2 * block_size], tables, device=device))
    assert translated.block_table.tolist() == [[of[0], -1, -1, -1], [of[7], of[49], -1, -1]]
    assert translated.block_table.dtype == torch.int32


@each_twin
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_small_pool_serves_long_sequences(twin, block_size, device):
    """Prompts in chunks, then decodes, with a window pool much smaller than the full pool (S#24617).

    A block that comes back is filled with NaN, one that is handed out with 1e4. The oracle has all keys, in plain rows.
    """
    kv_cache = fastattn.kv_cache if twin is fastattn.sliding_window else refattn.kv_cache
    left, chunk, lengths = 19, 10, {"a": 75, "b": 64, "c": 31}
    generator = torch.Generator().manual_seed(0)
    tokens = {
        name: torch.randn(3, length, 2, 8, generator=generator).to(device) for name, length in lengths.items()
    }  # queries, keys, values
    needed = {name: -(-length // block_size) for name, length in lengths.items()}
    free = list(range(sum(needed.values()) + 5))
    random.Random(0).shuffle(free)
    blocks = {name: [free.pop() for _ in range(count)] for name, count in needed.items()}
    num_full_blocks = sum(needed.values()) + 5
    num_blocks = len(lengths) * (-(-(left + chunk + block_size - 1) // block_size))
    pool = twin.WindowPool(num_blocks, num_full_blocks, window_size=(left, 0), block_size=block_size)
    caches = kv_cache.allocate(num_blocks, block_size, 2, 8, device=device)
    for cache in caches:
        cache.fill_(float("nan"))

    done = dict.fromkeys(lengths, 0)
    while done:
        step = {name: min(chunk if done[name] < 40 else 1, lengths[name] - done[name]) for name in done}
        for name, count in step.items():
            before = set(pool.free)
            pool.hold(name, count, done[name] + count, blocks[name])
            for cache in caches:
                cache[list(set(pool.free) - before)] = float("nan")
                cache[list(before - set(pool.free))] = STALE
        assert not {pool.window_block[b] for held in pool.held.values() for b in held} & set(pool.free)
        seq_lens = [done[name] + count for name, count in step.items()]
        batch = refattn.metadata.make_batch(list(step.values()), seq_lens, [blocks[n] for n in step], device=device)
        slots = refattn.metadata.slot_mapping(batch, sum(step.values()), block_size=block_size)
        query, key, value = (
            torch.cat([tokens[name][kind, done[name] : done[name] + count] for name, count in step.items()])
            for kind in range(3)
        )
        kv_cache.write(key, value, *caches, pool.translate_slots(slots))
        out = twin.attention(query, *caches, pool.translate_batch(batch), window_size=(left, 0))
        row = 0
        for name, count in step.items():
            _, keys, values = tokens[name]
            for position in range(done[name], done[name] + count):
                rows = slice(max(0, position - left), position + 1)
                expected = functional.scaled_dot_product_attention(
                    query[row].unsqueeze(1), keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
                )
                torch.testing.assert_close(out[row], expected.squeeze(1), rtol=1e-5, atol=1e-5)
                row += 1
            done[name] += count
            if done[name] == lengths[name]:
                del done[name]
                pool.release(name)
    assert sorted(pool.free) == list(range(num_blocks)), "all blocks came back"
    assert num_blocks < num_full_blocks or block_size == 16


@each_twin
def test_a_shared_prefix_stays_until_its_last_reader_has_passed(twin):
    pool = twin.WindowPool(6, 20, window_size=(3, 0), block_size=2)
    pool.hold("a", 4, 4, [5, 6])
    pool.hold("b", 2, 6, [5, 6, 8])  # shares the first two blocks of "a"
    shared = [pool.window_block[5], pool.window_block[6]]
    pool.hold("a", 5, 9, [5, 6, 9, 10, 11])
    pool.hold("a", 1, 10, [5, 6, 9, 10, 11])  # "a" is past both now
    assert [pool.window_block[5], pool.window_block[6]] == shared
    pool.release("b")
    assert [pool.window_block[5], pool.window_block[6]] == [-1, -1]
    with pytest.raises(ValueError, match="blocks: expected block 5 in the window pool, with older tokens"):
        pool.hold("c", 1, 5, [5, 6, 14])
    assert "c" not in pool.held


@each_twin
def test_a_pool_that_is_full_says_so(twin):
    pool = twin.WindowPool(3, 20, window_size=(3, 0), block_size=2)
    pool.hold("a", 4, 4, [5, 6])
    before = list(pool.window_block)
    with pytest.raises(ValueError, match="blocks: expected at most 1 new ones, as many as are free, got 2"):
        pool.hold("b", 4, 4, [7, 8])
    assert list(pool.window_block) == before
    pool.release("a")
    pool.release("a")  # nothing is given back twice
    pool.release("nobody")
    assert sorted(pool.free) == [0, 1, 2]
    pool.hold("b", 4, 4, [7, 8])


@given(
    left=st.integers(-1, 9),
    block_size=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 7)), max_size=25),
)
def test_pools_agree_on_drawn_steps(left, block_size, steps):
    """Both twins hand out the same blocks; none belongs to two, and none is lost."""
    pools = [twin.WindowPool(60, 90, window_size=(left, 0), block_size=block_size) for twin in TWINS]
    blocks = {name: list(range(30 * i, 30 * i + 30)) for i, name in enumerate("abc")}
    seq_lens = dict.fromkeys("abc", 0)
    for name, count in steps:
        for pool in pools:
            if count == 0 or seq_lens[name] + count > 20:
                pool.release(name)
            else:
                pool.hold(name, count, seq_lens[name] + count, blocks[name])
        seq_lens[name] = 0 if count == 0 or seq_lens[name] + count > 20 else seq_lens[name] + count
        reference, fast = pools
        assert list(reference.window_block) == list(fast.window_block)
        assert (reference.free, reference.held) == (fast.free, fast.held)
        taken = [block for block in reference.window_block if block >= 0]
        assert sorted(taken + reference.free) == list(range(60))
        slots = torch.arange(-1, 90 * block_size)
        assert torch.equal(*(pool.translate_slots(slots) for pool in pools))


# --- bad input ---


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "change"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_named(twin, message, change, device):
    inputs = build(Case("small", ((2, 5), (1, 20))), device=device)
    good = dict(query=inputs.query, key_cache=inputs.key_cache, value_cache=inputs.value_cache, batch=inputs.batch)
    with pytest.raises(ValueError, match=message):
        twin.attention(**change({"window_size": (3, 0), **good}))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_block_outside_the_pool_is_named_if_a_query_sees_it(twin):
    inputs = build(Case("small", ((2, 5), (1, 40))))
    inputs.batch.block_table[1, 0] = 99  # out of the window
    twin.attention(*inputs.tensors, window_size=(3, 0))
    inputs.batch.block_table[1, 2] = 99
    with pytest.raises(ValueError, match=r"block_table: expected entries in 0..6 .* sequence 1 uses, got 99"):
        twin.attention(*inputs.tensors, window_size=(3, 0))


BAD_HOLDS = {
    "no-new-tokens": ("query_len: expected 1..4", (0, 4, [5, 6])),
    "more-new-tokens-than-tokens": ("query_len: expected 1..4", (5, 4, [5, 6])),
    "too-few-blocks": ("blocks: expected 3 for 5 tokens, got 2", (1, 5, [5, 6])),
    "a-block-outside": (r"blocks: expected entries in 0..9, got 10", (4, 4, [5, 10])),
    "block--1": (r"blocks: expected entries in 0..9, got -1", (4, 4, [5, -1])),
    "a-fraction": (r"blocks: expected entries in 0..9, got 0.5", (4, 4, [5, 0.5])),
    "a-tensor": (r"blocks: expected a list of blocks, got int64", (4, 4, torch.tensor([5, 6]))),
    "half-a-token": ("query_len: expected 1..4, .* got 0.5", (0.5, 4, [5, 6])),
    "a-length-of-another-type": ("seq_len: expected a Python int of at least 0, got '4'", (1, "4", [5, 6])),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "arguments"), BAD_HOLDS.values(), ids=BAD_HOLDS)
def test_a_bad_hold_is_named_and_takes_nothing(twin, message, arguments):
    pool = twin.WindowPool(4, 10, window_size=(3, 0), block_size=2)
    with pytest.raises(ValueError, match=message):
        pool.hold("a", *arguments)
    assert len(pool.free) == 4 and not pool.held


BAD_SLOTS = {
    "a-list": ([0, 1], "slot_mapping: expected int64 [t], got list"),
    "int32": (torch.zeros(2, dtype=torch.int32), "slot_mapping: expected int64 [t], got int32 [2]"),
    "slot-n": (torch.tensor([0, 20]), "slot_mapping: expected slots in 0..19, or -1 for padding, got 20"),
    "slot--2": (torch.tensor([0, -2]), "slot_mapping: expected slots in 0..19, or -1 for padding, got -2"),
    "both": (torch.tensor([20, -1]), "slot_mapping: expected slots in 0..19, or -1 for padding, got 20"),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("slots", "message"), BAD_SLOTS.values(), ids=BAD_SLOTS)
def test_bad_slots_are_named(twin, slots, message):
    pool = twin.WindowPool(4, 10, window_size=(3, 0), block_size=2)
    assert pool.translate_slots(torch.tensor([19, 0, -1])).tolist() == [-1, -1, -1]
    assert pool.translate_slots(torch.tensor([], dtype=torch.int64)).tolist() == []
    with pytest.raises(ValueError, match=re.escape(message)):
        pool.translate_slots(slots)


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_sizes_are_named(twin):
    batch = build(Case("small", ((2, 5), (1, 20)))).batch
    with pytest.raises(ValueError, match="window_size: expected"):
        twin.trim(batch, (-2, 0), block_size=16)
    with pytest.raises(ValueError, match="block_size: expected a positive int"):
        twin.trim(batch, (3, 0), block_size=0)
    with pytest.raises(ValueError, match="block_table: expected"):
        twin.trim(replace(batch, block_table=None), (3, 0), block_size=16)
    with pytest.raises(ValueError, match="num_blocks: expected a positive int"):
        twin.WindowPool(0, 10, window_size=(3, 0), block_size=2)
