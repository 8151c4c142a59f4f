"""Numbers near 2**31: windows, positions, lengths and strides, by every path and kernel; no sum of them overflows.

Triton's interpreter takes a sum that overflows for an error, see `interpreted`.
"""

import functools
import importlib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import fastattn.kv_cache
import fastattn.local
from fastattn.kernels.triton import attention as triton_attention
from fastattn.kernels.triton.tuning import LaunchConfig
from refattn.batch import Batch
from refattn.metadata import make_batch
from refattn.ranks import Shard
from tests.helpers.bad_input import MOST
from tests.helpers.batches import Case, build
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.states import assert_twins_agree, attend, convolve, draw, draw_states, each_kernel, ints
from tests.helpers.strides import far_apart
from tests.table import CASE, PATHS

TWINS = ["refattn", "fastattn"]
each_twin = pytest.mark.parametrize("package", TWINS)
BY = ["refattn", "fastattn", *(kernel.name for kernel in PRESENT if kernel.name not in ("cpu", "torch_flash"))]


def call(by, path, *arguments, **options):
    """Call a path of a twin, or of the fast one by a kernel."""
    if by in TWINS:
        return path(by, *arguments, **options, return_lse=True)
    with fastattn.use_kernel(by):
        return path("fastattn", *arguments, **options, return_lse=True)


# --- windows ---

WINDOWED = [path for path in PATHS if PATHS[path].takes("window_size")]
WINDOWS = [(MOST, 0), (MOST - 1, MOST), (0, MOST), (3, MOST - 1), (MOST, MOST)]


@pytest.mark.parametrize(("path", "window", "by"), every_pair_on_cpu(WINDOWED, WINDOWS, BY), ids=str)
def test_a_side_as_wide_as_an_int32_is_no_limit(path, by, window, device):
    attention, given = PATHS[path], dict(causal=False) if PATHS[path].takes("causal") else {}
    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = build(replace(CASE, padding_rows=1), dtype=dtype, device=device)
    unlimited = tuple(-1 if side >= MOST - 1 else side for side in window)
    try:
        wide = call(by, attention, inputs, window_size=window, **given)
    except NotImplementedError as refusal:
        assert by not in ("refattn", "fastattn", "triton")  # a package, of what it has not
        assert str(refusal)
        return
    expected = call("refattn", attention, inputs, window_size=unlimited, **given)
    for one, other in zip(wide, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-3, atol=1e-3 if device == "cpu" else 1e-2)


@each_twin
def test_a_window_hides_nothing_of_a_rank_that_is_as_long_as_the_sequence(package):
    """So it needs no positions, and a plan on a device no number of tokens."""
    batch = build(CASE).batch
    path = importlib.import_module(f"{package}.context_parallel")
    for left in (69, 70, MOST):
        plan = path.plan(batch, shard=Shard(1, 2), block_size=16, window_size=(left, 0))
        assert plan.context.positions is None and plan.context.window == (-1, -1)
    plan = path.plan(batch, shard=Shard(1, 2), block_size=16, window_size=(68, 0))
    assert plan.context.window == (0, -1)
    assert plan.context.positions.tolist() == [0] * 24  # the first key that each query sees, as its rank counts
    assert int(plan.context.positions.max()) == 0


@each_twin
def test_a_rank_counts_positions_from_its_own_first_key(package):
    """Position 9 sees the keys from 5 on; of 0 to 8 rank 1 has 1, 3, 5 and 7, and 5 is its key 2."""
    metadata, path = (importlib.import_module(f"{package}.{name}") for name in ("metadata", "context_parallel"))
    batch = metadata.make_batch([1], [10], [[0, 1]])
    plan = path.plan(batch, shard=Shard(1, 2), block_size=4, window_size=(4, 0))
    assert plan.context.positions.tolist() == [2]
    assert plan.context.window_size == (0, -1)


# --- positions: sequences of nearly 2**31 keys, of which a window shows some ---

PAGE, LENGTH = 2**14, 2**31 - 2048
LONG = (LENGTH, PAGE + 50)  # the window of the second one lies in two blocks


@functools.cache
def few_of_many(device, query_lens=(1, 1)):
    """Lay out queries, a pool of two blocks, and a table that leads to the first again and again."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(sum(query_lens), 2, 16, generator=generator).to(device)
    pools = torch.randn(2, 2, PAGE, 1, 16, generator=generator).to(device)
    columns = -(-LENGTH // PAGE)
    table = torch.zeros(2, columns, dtype=torch.int32)
    table[1, 1] = 1
    lens = torch.tensor(LONG, dtype=torch.int32)
    rows = torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32)
    batch = Batch(rows.to(device), lens.to(device), table.to(device), max(query_lens), LENGTH)
    return query, *pools, batch


@functools.cache
def attend_at_the_end(path, window, query_lens, device):
    """Attend by a path, once where it is the reference."""
    module, tensors = importlib.import_module(path), few_of_many(device, query_lens)
    plan = module.plan(tensors[-1], block_size=PAGE, window_size=window, causal=False)
    return module.attention(*tensors[:-1], plan, return_lse=True)


@pytest.mark.parametrize(
    ("called", "window", "query_lens"),
    every_pair_on_cpu(
        [("chunked_prefill", "triton"), ("sliding_window", "triton"), ("sliding_window", "fastattn")],
        [(100, 0), (100, 7), (100, MOST)],
        [(1, 1), (3, 20)],
    ),
    ids=str,
)
def test_a_window_at_the_end_of_as_many_keys(called, window, query_lens, device, monkeypatch):
    path, by = called
    monkeypatch.setattr(triton_attention, "tune", lambda *_: LaunchConfig(16, 16, 4, 2, 1, 1))
    expected = attend_at_the_end("refattn.sliding_window", window, query_lens, device)
    with fastattn.use_kernel("triton") if by == "triton" else nullcontext():
        answer = attend_at_the_end.__wrapped__(f"fastattn.{path}", window, query_lens, device)
    for one, other in zip(answer, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@each_twin
def test_slots_of_the_last_tokens_that_an_int32_counts(package, device):
    path = importlib.import_module(f"{package}.metadata")
    table = torch.full((1, 2**17), 7, dtype=torch.int32, device=device)
    table[0, -1] = MOST
    batch = replace(path.make_batch([2], [MOST], [[]], device=device), block_table=table)
    last = MOST * PAGE + MOST - 1 - (2**17 - 1) * PAGE
    assert path.positions(batch, 2).tolist() == [MOST - 2, MOST - 1]
    for window, slots in ((None, [last - 1, last]), (1, [-1, last]), (MOST, [last - 1, last])):
        assert path.slot_mapping(batch, 2, block_size=PAGE, window=window).tolist() == slots


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_no_sequence_outgrows_an_int32(package):
    path = importlib.import_module(f"{package}.metadata")
    table = torch.zeros(1, 2**17 + 1, dtype=torch.int32)
    batch = replace(path.make_batch([1], [MOST - 1], [[]]), block_table=table)
    slots = torch.zeros(1, dtype=torch.int64)
    longer = path.advance(batch, slots, block_size=PAGE)
    assert longer.seq_lens.tolist() == [MOST] and longer.max_seq_len == MOST
    with pytest.raises(ValueError, match=f"seq_lens: expected at most {MOST} after the step, got "):
        path.advance(longer, slots, block_size=PAGE)
    assert batch.seq_lens.tolist() == [MOST]


# --- lengths and maxima: memory is taken for what there is ---


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("function", ["plan", "slot_mapping"])
def test_a_rank_of_a_long_sequence_is_refused_before_memory_is_taken(package, function):
    """2**31 - 1 keys in a table of one block; a list of their positions would be 16 GiB."""
    metadata, path = (importlib.import_module(f"{package}.{name}") for name in ("metadata", "context_parallel"))
    batch = metadata.make_batch([1], [MOST], [[0]])
    arguments = (batch,) if function == "plan" else (batch, 1)
    with pytest.raises(ValueError, match="block_table: expected at least 268435456 columns"):
        getattr(path, function)(*arguments, shard=Shard(0, 2), block_size=4)


@each_twin
@pytest.mark.parametrize("interleave", [1, 3, MOST])
def test_the_share_of_a_rank_of_any_length(package, interleave):
    path = importlib.import_module(f"{package}.context_parallel")
    lens = torch.tensor([0, 1, 9, MOST], dtype=torch.int32)
    counts = [path.local_lens(lens, Shard(rank, 3, interleave)) for rank in range(3)]
    assert torch.equal(sum(x.long() for x in counts), lens.long())
    assert counts[0][3] == {1: MOST // 3 + 1, 3: MOST // 9 * 3 + 1, MOST: MOST}[interleave]


def test_chunks_are_as_many_as_queries_touch_whatever_the_maximum():
    batch = replace(build(CASE).batch, max_query_len=MOST, max_seq_len=MOST)
    known = fastattn.local.plan(build(CASE).batch, chunk_size=32, block_size=16)
    plan = fastattn.local.plan(batch, chunk_size=32, block_size=16)
    assert plan.batch.num_seqs == known.batch.num_seqs
    assert plan.batch.max_query_len == known.batch.max_query_len
    tables = {name: getattr(batch, name).to("meta") for name in ("cu_seqlens_q", "seq_lens", "block_table")}
    there = fastattn.local.plan(replace(batch, **tables), chunk_size=32, block_size=16)  # by the number of rows
    assert there.batch.num_seqs <= batch.num_seqs * 2


@each_twin
def test_groups_of_a_cascade_hold_as_many_queries_as_an_int32_counts(package):
    """The bound of a level is that of its sequences times their number."""
    batch = replace(build(CASE).batch, num_tokens=None, max_query_len=MOST)
    cascade, inputs = PATHS["cascade"], build(CASE)
    assert torch.equal(cascade(package, replace(inputs, batch=batch)), cascade(package, inputs))


@pytest.mark.parametrize(
    ("given", "chunks"),
    [
        (dict(max_context_len=200, max_seq_len=500), 7),
        (dict(max_context_len=69, max_seq_len=MOST), 3),
        (dict(max_context_len=200), 7),
        (dict(max_seq_len=MOST), 3),
    ],
    ids=["both", "sequence", "context", "maximum"],
)
def test_bounds_of_a_context_may_be_larger_than_its_table(given, chunks):
    """They cost chunks without a key, or nothing."""
    given = dict(given)
    batch = replace(build(CASE).batch, max_seq_len=given.pop("max_seq_len", 70))
    assert batch.block_table.shape[1] * 16 == 112
    plans = [
        importlib.import_module(f"{package}.mla").plan_prefill(batch, block_size=16, workspace=90, **given)
        for package in TWINS
    ]
    ours, theirs = (
        [(chunk.slots.tolist(), chunk.plan.batch.seq_lens.tolist()) for chunk in plan.chunks] for plan in plans
    )
    assert ours == theirs
    assert [lens for _, lens in ours] == [[30, 30, 30], [7, 30, 2], [0, 9, 0]] + [[0, 0, 0]] * (chunks - 3)


@each_kernel
@pytest.mark.parametrize(("length", "block_size"), [(4, 2**30 - 2), (40, 2**30 - 16)], ids=["few", "prompt"])
def test_states_at_the_last_positions(kernel, length, block_size):
    """The second block ends in this step, and a chunk of 16 tokens would end past the largest int32."""
    step, inputs, weight = draw(length), torch.randn(length, 5), torch.randn(5, 4)
    tables = dict(state_indices=ints([1]), checkpoint_indices=ints([[-1, 0]]), block_size=block_size)
    states, last = draw_states(2), torch.randn(2, 3, 5)
    kept = states.clone(), last.clone()
    batch = make_batch([length], [MOST])
    mixed = convolve("reference", inputs, weight, kept[1], batch, **tables)
    torch.testing.assert_close(convolve(kernel, inputs, weight, last, batch, **tables), mixed)
    attend("reference", step, kept[0], batch, **tables)
    assert not torch.equal(kept[0][0], states[0]), "nothing was kept at the end of a block"
    assert_twins_agree(kernel, step, states, batch, **tables)
    assert torch.equal(last, kept[1])


# --- strides ---


@pytest.mark.parametrize("path", ["chunked_prefill", "differential"])
@pytest.mark.parametrize("rows", [1, 20], ids=["decode", "chunk"])
def test_columns_of_a_table_that_are_far_apart(path, rows, device):
    """The third lies 2**31 entries after the first."""
    inputs = build(Case("one", ((rows, 40),), heads=(4, 2), head_size=16), device=device)
    table = far_apart((1, 3), (1, 2**30), torch.int32, device)
    table.copy_(inputs.batch.block_table[:, :3])
    far = replace(inputs, batch=replace(inputs.batch, block_table=table))
    expected = call("refattn", PATHS[path], inputs)
    for one, other in zip(call("triton", PATHS[path], far), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_elements_of_a_head_that_are_far_apart_are_written(device):
    cache = far_apart((2, 2, 1, 17), (4, 2, 1, 2**27), torch.float16, device)
    key, value, other = torch.randn(3, 2, 2, 17, device=device).half()
    key, value, other = key[:, :1], value[:, :1], other[:, :, None].clone()
    with fastattn.use_kernel("triton"):
        fastattn.kv_cache.write(key, value, cache, other, torch.tensor([3, 0], device=device))
    assert torch.equal(cache[1, 1], key[0]) and torch.equal(cache[0, 0], key[1])
