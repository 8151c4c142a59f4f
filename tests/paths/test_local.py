"""Local attention: chunks that know nothing of each other, as a mask and as virtual sequences."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn.local
import refattn.attention
import refattn.chunked_prefill
import refattn.local
import refattn.masks
import refattn.metadata
from fastattn.kernels.torch_ops import metadata as torch_metadata
from fastattn.kernels.triton import metadata as triton_metadata
from refattn.batch import Batch
from tests.helpers.batches import (
    GARBAGE,
    Case,
    Paged,
    assert_same_masks,
    build,
    first_keys,
    masks_by_hand,
    of_batches,
    plan_and_attend,
    ragged_cases,
    read_masks,
)
from tests.helpers.kernels_present import PRESENT, each_kernel
from tests.helpers.options import per_head
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.tolerance import assert_twins_agree

TWINS = [refattn.local, fastattn.local]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])

CHUNKED = [  # for chunks of 32 and 48 tokens
    Case("decodes", ((1, 130), (1, 96), (1, 97), (1, 33), (1, 3)), heads=(4, 2)),
    Case("prefills", ((7, 110), (33, 64), (96, 96), (16, 79)), heads=(2, 2)),
    Case("across-chunks", ((4, 97), (1, 100), (0, 90), (70, 70), (5, 2), (5, 0), (1, 1)), heads=(4, 1), padding_rows=3),
    Case("blocks-of-eight", ((3, 100), (1, 99), (50, 66)), heads=(2, 1), block_size=8),
    Case("blocks-of-one", ((3, 34), (1, 30), (40, 40)), heads=(3, 1), block_size=1),
    Case("long-heads-first", ((2, 98), (1, 90)), heads=(2, 2), layout="HND"),
]
each_chunked = pytest.mark.parametrize("case", CHUNKED, ids=str)
each_chunk_size = pytest.mark.parametrize("chunk_size", [32, 48], ids=lambda size: f"chunk={size}")
LOCAL_OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.3),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "sinks": dict(sinks=True),
    "everything": dict(softmax_scale=0.2, softcap=5.0, alibi_slopes=True, sinks=True),
}


def sees(chunk_size: int):
    """Return, for one pair of positions, whether it is seen."""
    return lambda i, j: j <= i and i // chunk_size == j // chunk_size


def real(virtual: Batch, block_size: int) -> list[tuple[int, int, list[int]]]:
    """List the virtual sequences that have queries: query length, key length, the blocks they use."""
    lens = zip(virtual.query_lens.tolist(), virtual.seq_lens.tolist(), virtual.block_table.tolist(), strict=True)
    return [(q, s, blocks[: -(-s // block_size)]) for q, s, blocks in lens if q]


def forget(inputs: Paged, chunk_size: int, block_size: int) -> Paged:
    """Take from each sequence the blocks of chunks that are over: garbage in the table, NaN in the pool."""
    table, pools = inputs.batch.block_table.clone(), (inputs.key_cache.clone(), inputs.value_cache.clone())
    shuffle = random.Random(0)
    for i, context in enumerate(inputs.batch.context_lens.tolist()):
        for column in range(max(0, context) // chunk_size * chunk_size // block_size):
            for pool in pools:
                pool[int(table[i, column])] = float("nan")
            table[i, column] = shuffle.choice(GARBAGE)
    return replace(inputs, key_cache=pools[0], value_cache=pools[1], batch=replace(inputs.batch, block_table=table))


# --- the mask, read out ---


@pytest.mark.covers("D136", "D137")
@each_twin
@each_chunked
@each_chunk_size
def test_a_query_sees_its_own_chunk_up_to_itself(twin, case, chunk_size, device):
    case = replace(case, heads=(2, 1))
    masks = read_masks(partial(plan_and_attend, twin), case, device=device, chunk_size=chunk_size)
    assert_same_masks(masks, masks_by_hand(case, sees(chunk_size)))


@each_twin
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64], ids=lambda size: f"chunk={size}")
def test_odd_chunks_in_blocks_of_one(twin, chunk_size, device):
    case = Case("odd-chunks", ((4, 6), (10, 17), (5, 9), (1, 11), (1, 10), (3, 3)), heads=(2, 1), block_size=1)
    masks = read_masks(partial(plan_and_attend, twin), case, device=device, chunk_size=chunk_size)
    assert_same_masks(masks, masks_by_hand(case, sees(chunk_size)))


@each_twin
def test_a_sequence_one_longer_than_the_chunk(twin, device):
    """8193 tokens in chunks of 8192: the last token is alone (V#16209, S#5173)."""
    inputs = build(Case("long", ((2, 8193), (1, 8192), (3, 8194)), heads=(2, 1), block_size=64), device=device)
    _, lse = plan_and_attend(
        twin, torch.zeros_like(inputs.query), *inputs.tensors[1:], chunk_size=8192, return_lse=True
    )
    assert lse[:, 0].exp().tolist() == pytest.approx([8192, 1, 8192, 8192, 1, 2], rel=1e-5)


@pytest.mark.core
@pytest.mark.covers("D131")
@each_twin
@pytest.mark.parametrize("chunk_size", [4096, 1_000_000_000 // 16 * 16])
def test_a_chunk_larger_than_every_sequence_is_causal_attention(twin, chunk_size, device):
    case = CHUNKED[2]
    inputs = build(case, device=device)
    masks = read_masks(
        partial(plan_and_attend, twin), replace(case, heads=(1, 1)), device=device, chunk_size=chunk_size
    )
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i))
    out = plan_and_attend(twin, *inputs.tensors, chunk_size=chunk_size)
    torch.testing.assert_close(out, plan_and_attend(refattn.chunked_prefill, *inputs.tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.covers("D132")
@each_twin
@each_chunked
def test_chunks_that_are_over_are_never_read(twin, case, device):
    """Their place in the table is garbage, their memory is NaN: a server may have given their blocks away."""
    inputs = build(case, device=device)
    gone = forget(inputs, 32, case.block_size)
    for options in ({}, {"softcap": 2.0, "sinks": True}):
        filled = per_head(options, case, device)
        expected = plan_and_attend(twin, *inputs.tensors, chunk_size=32, return_lse=True, **filled)
        out = plan_and_attend(twin, *gone.tensors, chunk_size=32, return_lse=True, **filled)
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])


# --- virtual batches ---


@pytest.mark.core
@pytest.mark.covers("D130")
@each_twin
def test_the_worked_example(twin, device):
    """Query lengths 4, 10, 5 and sequence lengths 6, 17, 9, chunk 4, blocks of 2."""
    tables = [list(range(0, 10)), list(range(10, 20)), list(range(20, 30))]
    batch = refattn.metadata.make_batch([4, 10, 5], [6, 17, 9], tables, device=device)
    plan = twin.plan(batch, chunk_size=4, block_size=2)
    virtual = plan.batch
    assert real(virtual, 2) == [
        (2, 4, [0, 1]),
        (2, 2, [2]),
        (1, 4, [12, 13]),
        (4, 4, [14, 15]),
        (4, 4, [16, 17]),
        (1, 1, [18]),
        (4, 4, [22, 23]),
        (1, 1, [24]),
    ]
    assert first_keys(plan) == [0, 4, 4, 8, 12, 16, 4, 8]
    rows = [row for row, q in zip(virtual.cu_seqlens_q.tolist(), virtual.query_lens.tolist(), strict=False) if q]
    assert [*rows, int(virtual.cu_seqlens_q[-1])] == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert (virtual.max_query_len, virtual.max_seq_len) == (4, 4)


@each_twin
def test_a_block_table_entry_is_a_block_and_not_a_slot(twin, device):
    """Block size 16, chunk 32, blocks in any order (S#32902)."""
    batch = refattn.metadata.make_batch([3, 1], [70, 33], [[8, 3, 11, 5, 2], [7, 4, 1]], device=device)
    virtual = twin.plan(batch, chunk_size=32, block_size=16).batch
    assert real(virtual, 16) == [(3, 6, [2]), (1, 1, [1])]


@each_twin
@each_chunked
@each_chunk_size
def test_virtual_sequences_are_the_chunks_with_new_tokens(twin, case, chunk_size, device):
    batch, p = build(case, device=device).batch, case.block_size
    expected, begins = [], []
    for (q, s), blocks in zip(case.lens, batch.block_table.tolist(), strict=True):
        positions = range(s - q, s)
        for chunk in sorted({position // chunk_size for position in positions}):
            keys = [j for j in range(s) if j // chunk_size == chunk]
            queries = [i for i in positions if i // chunk_size == chunk]
            expected.append((len(queries), len(keys), [blocks[j // p] for j in keys if j % p == 0]))
            begins.append(max(chunk, 0) * chunk_size)
    plan = twin.plan(batch, chunk_size=chunk_size, block_size=p)
    assert real(plan.batch, p) == expected
    assert first_keys(plan) == begins
    assert (plan.block_size, plan.window, plan.positions) == (p, (-1, 0), None)


@each_twin
@each_chunked
def test_the_query_rows_stay_where_they_are(twin, case, device):
    """Virtual sequences follow one another; those without queries lie between them and take no row."""
    batch = build(case, device=device).batch
    virtual = twin.plan(batch, chunk_size=32, block_size=case.block_size).batch
    assert (virtual.query_lens >= 0).all() and (virtual.seq_lens >= 0).all()
    assert int(virtual.cu_seqlens_q[0]) == 0
    assert int(virtual.cu_seqlens_q[-1]) == int(batch.cu_seqlens_q[-1])
    assert set(batch.cu_seqlens_q.tolist()) <= set(virtual.cu_seqlens_q.tolist())
    assert int(virtual.query_lens.max()) <= virtual.max_query_len
    assert int(virtual.seq_lens.max()) <= virtual.max_seq_len <= 32


@each_twin
@each_chunked
def test_slots_of_new_tokens_stay_what_they_are(twin, case, device):
    batch, t = build(case, device=device).batch, sum(q for q, _ in case.lens) + case.padding_rows
    virtual = twin.plan(batch, chunk_size=32, block_size=case.block_size).batch
    slots = (refattn.metadata.slot_mapping(x, t, block_size=case.block_size) for x in (batch, virtual))
    assert torch.equal(*slots)


@each_twin
@each_chunked
def test_virtual_batches_made_once_serve_every_layer(twin, case, device):
    inputs = build(case, device=device)
    virtual = twin.plan(inputs.batch, chunk_size=32, block_size=case.block_size).batch
    again = twin.plan(virtual, chunk_size=32, block_size=case.block_size).batch
    assert real(again, case.block_size) == real(virtual, case.block_size)
    out = plan_and_attend(twin, *inputs.tensors[:3], virtual, chunk_size=32)
    assert torch.equal(out, plan_and_attend(twin, *inputs.tensors, chunk_size=32))


@given(case=ragged_cases(), blocks=st.integers(1, 5))
def test_virtual_batches_agree_on_drawn_batches(case, blocks):
    batch, p = build(case).batch, case.block_size
    reference, twin = (module.plan(batch, chunk_size=blocks * p, block_size=p) for module in TWINS)
    if batch.max_seq_len > blocks * p:  # else the twin leaves the batch as it is
        assert real(twin.batch, p) == real(reference.batch, p)
        assert first_keys(twin) == first_keys(reference)
    most = len(case.lens) * (-(-max(batch.max_query_len - 1, 0) // (blocks * p)) + 1)
    assert twin.batch.num_seqs <= most, "more virtual sequences than the queries can touch chunks"


@of_batches
@given(case=ragged_cases(), blocks=st.integers(1, 5))
def test_one_launch_makes_the_same_tables_on_drawn_batches(case, blocks, device):
    batch, p = build(case, device=device).batch, case.block_size
    num_chunks = (max(batch.max_query_len, 1) + blocks * p - 2) // (blocks * p) + 1
    sizes = dict(block_size=p, num_chunks=num_chunks, columns=min(blocks, batch.block_table.shape[1]))
    pairs = [
        *zip(
            triton_metadata.cut_chunks(batch, blocks * p, **sizes),
            torch_metadata.cut_chunks(batch, blocks * p, **sizes),
            strict=True,
        )
    ]
    rows = sum(q for q, _ in case.lens) + case.padding_rows
    slots = [module.slot_mapping(batch, rows, block_size=p) for module in (triton_metadata, refattn.metadata)]
    assert all(torch.equal(*pair) for pair in [*pairs, slots])


def test_one_request_makes_more_virtual_sequences_than_there_were_requests(device):
    """The twin's buffers are sized for all of them (V#49980), from Python ints alone."""
    table = [list(range(100))]
    for query_len, chunk_size, most in ((97, 16, 7), (98, 16, 8), (96, 16, 7), (1, 16, 1), (17, 16, 2), (18, 16, 3)):
        for context in (0, 1, 15, 16, 17):
            batch = refattn.metadata.make_batch([query_len], [context + query_len], table, device=device)
            if batch.max_seq_len > chunk_size:
                virtual = fastattn.local.plan(batch, chunk_size=chunk_size, block_size=8).batch
                assert virtual.num_seqs == most
                assert int(virtual.query_lens.sum()) == query_len


@each_twin
@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_a_batch_without_queries_has_no_virtual_sequence_with_some(twin, chunk_size, device):
    batch = refattn.metadata.make_batch([0, 0], [5, 0], [list(range(5)), []], device=device)
    virtual = twin.plan(batch, chunk_size=chunk_size, block_size=1).batch
    assert not virtual.query_lens.any()
    empty = refattn.metadata.make_batch([], [], [], device=device)
    assert twin.plan(replace(empty, max_seq_len=9), chunk_size=chunk_size, block_size=1).batch.num_seqs == 0


@each_twin
@pytest.mark.parametrize("chunk_size", [4, 8, 16, 32], ids=lambda size: f"chunk={size}")
def test_a_sequence_without_queries_has_no_block_that_is_read(twin, chunk_size):
    """Its table may hold anything, whether one chunk holds every sequence or not."""
    batch = refattn.metadata.make_batch([0, 2, 0], [14, 9, 3], [[-1] * 4, [0, 1, 2, -1], [-1] * 4])
    plan = twin.plan(batch, chunk_size=chunk_size, block_size=4)
    assert plan.needs.blocks == 3
    lens = zip(plan.batch.query_lens.tolist(), plan.batch.seq_lens.tolist(), strict=True)
    assert all(keys == 0 for rows, keys in lens if rows == 0)


@pytest.mark.parametrize("chunk_size", [2**20, 2**30], ids=["chunk=2**20", "chunk=2**30"])
@pytest.mark.parametrize("kernel", ["ref", "torch", "triton"])
def test_as_many_keys_as_an_int32_counts(kernel, chunk_size, device):
    """The last chunk ends past the largest int32, also that of queries without keys."""
    twin = refattn.local if kernel == "ref" else fastattn.local
    keys, p = 2**31 - 1, 2**20
    lens = [3, 1, 2], [keys, keys - 5, 0]
    batch = refattn.metadata.make_batch(*lens, [range(2048), range(2048, 4096), []], device=device)
    last = chunk_size // p
    expected = [
        (q, s - 2**31 + chunk_size, blocks[-last:])
        for q, s, blocks in ((3, keys, [*range(2048)]), (1, keys - 5, [*range(2048, 4096)]))
    ]
    with fastattn.use_kernel("torch" if kernel == "ref" else kernel):
        plan = twin.plan(batch, chunk_size=chunk_size, block_size=p)
    assert real(plan.batch, p) == [*expected, (2, 0, [])]


@pytest.mark.core
@pytest.mark.covers("D138")
def test_captured_with_a_short_sequence_replayed_past_a_chunk(device):
    """Sizes depend on the stated maxima only, so what was captured for 5 tokens serves 500 (S#6162)."""
    tables = [list(range(32)), list(range(32, 64))]
    short, long = (
        replace(refattn.metadata.make_batch([1, 1], lens, tables, device=device), max_seq_len=512)
        for lens in ([5, 2], [500, 129])
    )
    captured, replayed = (fastattn.local.plan(batch, chunk_size=64, block_size=16).batch for batch in (short, long))
    assert captured.block_table.shape == replayed.block_table.shape == (2, 4)
    assert (captured.max_query_len, captured.max_seq_len) == (replayed.max_query_len, replayed.max_seq_len) == (1, 64)
    assert real(captured, 16) == [(1, 5, [0]), (1, 2, [32])]
    assert real(replayed, 16) == [(1, 52, [28, 29, 30, 31]), (1, 1, [40])]


@pytest.mark.core
@pytest.mark.covers("D137")
def test_the_twin_makes_virtual_batches_without_asking_the_device():
    """Tensors without contents are enough, so nothing waits for them."""
    batch = build(CHUNKED[2]).batch
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    unknown = replace(batch, **{name: getattr(batch, name).to("meta") for name in names})
    shapes = fastattn.local.plan(unknown, chunk_size=32, block_size=16).batch
    known = fastattn.local.plan(batch, chunk_size=32, block_size=16).batch
    assert all(getattr(shapes, name).shape == getattr(known, name).shape for name in names)
    assert (shapes.max_query_len, shapes.max_seq_len) == (known.max_query_len, known.max_seq_len)


@pytest.mark.core
@pytest.mark.covers("D137")
@pytest.mark.parametrize("longest", [1, 2, 31, 32, 33, 34, 64, 65])
def test_there_is_a_virtual_batch_for_each_chunk_that_queries_may_touch(longest):
    """Wherever in a chunk the first of them is: the lengths are on the device, and the plan must not wait for them."""
    most = max(len({position // 32 for position in range(first, first + longest)}) for first in range(32))
    batch = refattn.metadata.make_batch([longest] * 3, [200] * 3, [[*range(13)]] * 3)
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    unknown = replace(batch, **{name: getattr(batch, name).to("meta") for name in names})
    assert fastattn.local.plan(unknown, chunk_size=32, block_size=16).batch.num_seqs == 3 * most


# --- arithmetic that shares no code with the reference ---


@pytest.mark.covers("D130")
@each_twin
@each_chunked
@each_chunk_size
def test_attention_through_virtual_batches_equals_attention_under_the_chunk_mask(twin, case, chunk_size, device):
    """Each sequence whole, under the picture of `masks.chunk`, and causal attention that knows virtual ones only."""
    inputs = build(case, device=device, dtype=torch.float64)
    virtual = twin.plan(inputs.batch, chunk_size=chunk_size, block_size=case.block_size).batch
    out, lse = plan_and_attend(refattn.chunked_prefill, *inputs.tensors[:3], virtual, return_lse=True)
    row = 0
    for (q, s), key, value in zip(case.lens, inputs.keys, inputs.values, strict=True):
        rows = slice(row, row + q)
        picture = refattn.masks.chunk(q, s, chunk_size, device=key.device)
        expected, expected_lse = refattn.attention.attend(inputs.query[rows], key, value, picture)
        torch.testing.assert_close(out[rows], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[rows], expected_lse, rtol=1e-12, atol=1e-12)
        row += q
    assert not out[row:].any() and (lse[row:] == -torch.inf).all()


# --- the twin against the reference ---


@pytest.mark.parametrize(("kernel", "options", "case"), every_pair_on_cpu(PRESENT, LOCAL_OPTIONS, CHUNKED), ids=str)
def test_twins_agree(case, options, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    filled = per_head(LOCAL_OPTIONS[options], case, device)
    with kernel.forced():
        kernel.check(assert_twins_agree, "local", *inputs.tensors, chunk_size=32, **filled)


@pytest.mark.core
@pytest.mark.covers("D135")
@each_kernel
@pytest.mark.parametrize("case", CHUNKED[1:3], ids=str)
def test_twins_agree_with_a_window_in_a_chunk(case, kernel, device):
    """Extending layers of SGLang hand both over: a token sees what is in its window and in its chunk."""
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    options = per_head(dict(sinks=True), case, device)
    with kernel.forced():
        kernel.check(assert_twins_agree, "local", *inputs.tensors, chunk_size=32, window_size=(11, 0), **options)
