"""Steps without a scheduler: a batch in buffers of a fixed size, filled anew for each, and advanced by samples.

On a GPU every kind of step is captured once, its plan included, and replayed for smaller and longer ones.
"""

import importlib
from collections.abc import Callable

import pytest
import torch

import fastattn.metadata
import fastattn.speculative
import refattn.metadata
from refattn.batch import Batch
from refattn.scales import Fp8Scales
from refattn.trees import Trees
from tests.helpers.batches import Case, build, plan_and_attend
from tests.helpers.steps import ROOM, record
from tests.helpers.stored import over_quantized
from tests.helpers.tolerance import assert_matches_reference

TWINS = [refattn.metadata, fastattn.metadata]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])

# --- buffers ---


@pytest.mark.covers("D170")
@each_twin
def test_a_refilled_batch_is_the_step_and_padding_after_it(twin, device):
    buffers = twin.make_buffers(5, device=device, **ROOM)
    addresses = [x.data_ptr() for x in (buffers.cu_seqlens_q, buffers.seq_lens, buffers.block_table)]
    for lens in (((6, 40), (1, 300), (0, 0)), ((1, 5),), (), ((2, 2),) * 5):
        batch = build(Case("step", lens or ((0, 0),)), device=device).batch
        if not lens:
            batch = twin.make_batch([], [], [], device=device)
        twin.refill(buffers, batch)
        rest = 5 - batch.num_seqs
        assert buffers.query_lens.tolist() == batch.query_lens.tolist() + [0] * rest
        assert buffers.seq_lens.tolist() == batch.seq_lens.tolist() + [0] * rest
        for mine, theirs, s in zip(
            buffers.block_table.tolist(), batch.block_table.tolist(), batch.seq_lens.tolist(), strict=False
        ):
            assert mine[: -(-s // 16)] == theirs[: -(-s // 16)]
    assert addresses == [x.data_ptr() for x in (buffers.cu_seqlens_q, buffers.seq_lens, buffers.block_table)]


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_step_that_does_not_fit_is_refused_and_nothing_written(twin):
    buffers = twin.make_buffers(2, **ROOM)
    twin.refill(buffers, twin.make_batch([1], [7], [[3]]))
    before = buffers.seq_lens.clone(), buffers.block_table.clone(), buffers.cu_seqlens_q.clone()
    for message, batch in (
        (
            "a num_seqs of at most 2, what the buffers have room for, got 3",
            twin.make_batch([1] * 3, [1] * 3, [[0]] * 3),
        ),
        ("a max_query_len of at most 6", twin.make_batch([7], [7], [[0]])),
        ("a max_seq_len of at most 300", twin.make_batch([1], [301], [[0] * 19])),
        ("a block table, as in the buffers", twin.make_batch([1], [1])),
        ("a number of columns of at most 21", twin.make_batch([1], [7], [[0] * 22])),
    ):
        with pytest.raises(ValueError, match=f"batch: expected {message}"):
            twin.refill(buffers, batch)
    assert all(map(torch.equal, before, (buffers.seq_lens, buffers.block_table, buffers.cu_seqlens_q)))
    with pytest.raises(ValueError, match="num_seqs: expected a Python int of at least 0, got -1"):
        twin.make_buffers(-1, **ROOM)


KINDS: dict[str, tuple[str, dict, tuple[tuple[tuple[int, int], ...], ...]]] = {
    "decode": ("chunked_prefill", {}, (((1, 40), (1, 9)), ((1, 290), (1, 5), (1, 77), (1, 1)), ((1, 16),))),
    "extension": ("speculative", {}, (((3, 40), (1, 9)), ((6, 290), (2, 5), (4, 77)), ((1, 16),))),
    "block-draft": ("speculative", dict(causal=False), (((6, 40), (6, 9)), ((6, 290), (6, 6), (6, 77)))),
    "window": (
        "sliding_window",
        dict(window_size=(30, 0)),
        (((1, 40), (1, 9)), ((1, 290), (1, 5), (1, 77), (1, 1)), ((1, 16),)),
    ),
    "local": (
        "local",
        dict(chunk_size=64),
        (((1, 40), (1, 9)), ((1, 290), (3, 65), (1, 77), (1, 1)), ((1, 64),)),
    ),
    "encoder": (
        "chunked_prefill",
        dict(causal=False),
        (((1, 40), (1, 0)), ((6, 3), (2, 290), (1, 64)), ((1, 1),)),
    ),
}
TREE_STEPS = {
    "verification": (
        [((-1, 0, 0), 30), ((-1,), 5)],
        [((-1, 0, 0, 1, 2, 2), 290), ((-1, 0), 0), ((-1, 0, 1, 2), 77)],
        [((-1, 0, 1), 64)],
    ),
    "draft-decode": (
        [((-1, -1, 0, 1), 30), ((-1, -1), 5)],
        [((-1, -1, 0, 1, 2, 3), 290), ((-1, -1, 1, 1), 0)],
        [((-1, -1), 64)],
    ),
}


def check_steps(
    path: str,
    steps,
    arguments: dict,
    device: str,
    of_step: Callable[[int], dict] | None = None,
    *,
    scales: Fp8Scales | None = None,
) -> None:
    """Record the first step, replay it for the others, and compare each with the reference; padding rows hold 0.

    With scales the pools hold quantized values, and `quantized.attention` takes the plan of the path.
    """
    dtype = torch.float16 if device == "cuda" else torch.float32
    rows, blocks = 24, 80
    module, reference = (importlib.import_module(f"{package}.{path}") for package in ("fastattn", "refattn"))
    if scales is not None:
        module, reference = (over_quantized(package, path) for package in ("fastattn", "refattn"))
        arguments = {**arguments, "scales": scales}
    query = torch.zeros(rows, 4, 64, dtype=dtype, device=device)
    pools = torch.zeros(2, blocks, 16, 2, 64, dtype=dtype if scales is None else scales.format, device=device)
    buffers = fastattn.metadata.make_buffers(5, device=device, **ROOM)

    def step() -> torch.Tensor:
        return plan_and_attend(module, query, *pools, buffers, **arguments)

    replay = None
    for i, lens in enumerate(steps):
        inputs = build(Case("step", lens, heads=(4, 2)), dtype=dtype, device=device, seed=i)
        query.zero_()
        query[: len(inputs.query)] = inputs.query
        for pool, mine in zip(pools, (inputs.key_cache, inputs.value_cache), strict=True):
            pool.fill_(torch.nan)
            pool[: len(mine)] = mine
        fastattn.metadata.refill(buffers, inputs.batch)
        its_own = {} if of_step is None else of_step(i)
        replay = replay or record(step, device)
        out = replay()
        held = [inputs.key_cache, inputs.value_cache]
        if scales is not None:  # as bytes, which a cast of the test leaves alone
            held = [pool.to(scales.format).view(torch.uint8) for pool in held]
        asked = (inputs.query, *held, inputs.batch)
        _, lse = plan_and_attend(reference, *asked, **{**arguments, **its_own}, return_lse=True)
        assert_matches_reference(
            out[: len(inputs.query)],
            lse,
            lambda *a, **o: plan_and_attend(reference, *a, **o),
            *asked,
            **{**arguments, **its_own},
        )
        assert not out[len(inputs.query) :].any(), "a padding row holds something"


@pytest.mark.covers("B64", "B69", "D163", "D166", "D168", "D162")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_captured_once_and_replayed_for_any_other(kind, device):
    """With shorter and longer sequences, more of them and fewer; NaN in every unused slot."""
    path, arguments, steps = KINDS[kind]
    check_steps(path, steps, arguments, device)


@pytest.mark.covers("D161", "D164", "D165", "D168")
@pytest.mark.parametrize("kind", TREE_STEPS)
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=["numbers", "quantized"])
def test_trees_are_captured_once_and_replayed_for_any_others(kind, window, stored, device):
    """Other trees too: their masks, depths and positions are made of the parents inside of the graph."""
    parents = torch.zeros(5, 6, dtype=torch.int32, device=device)
    buffers = Trees(parents - 1, torch.zeros(5, dtype=torch.int32, device=device))
    drawn = TREE_STEPS[kind]
    queries = 2 if kind == "draft-decode" else 6
    steps = [tuple((min(queries, len(tree)), context + len(tree)) for tree, context in step) for step in drawn]

    def fill(i: int) -> dict:
        trees = fastattn.speculative.make_trees([tree for tree, _ in drawn[i]], device=device)
        buffers.lens.zero_()
        buffers.lens[: len(trees.lens)] = trees.lens
        buffers.parents[: len(trees.lens), : trees.max_len] = trees.parents
        return dict(trees=trees)

    arguments = dict(trees=buffers, window_size=(window, 0))
    scales = None
    if stored is not None:
        of_key, of_value = torch.tensor([[0.7, 1.3], [0.4, 1.9]], device=device)
        scales = Fp8Scales(of_key, of_value, format=stored)
    check_steps("speculative", steps, arguments, device, fill, scales=scales)


# --- V0's steps, and tables of other servers ---


@pytest.mark.covers("A47", "A46")
@each_twin
def test_prefills_turn_into_decodes_and_go_on_by_what_was_sampled(twin, device):
    """Two prefills, a decode and padding: the next step has one token of each, where the last one ended."""
    batch = twin.make_batch([5, 1, 0, 3], [5, 9, 0, 12], [[1, 2], [3, 4, 5], [0], [6, 7, 8, 9]], device=device)
    decodes = twin.turn_prefills_into_decodes(batch)
    assert decodes.query_lens.tolist() == [1, 1, 0, 1] and decodes.max_query_len == 1
    assert decodes.seq_lens.tolist() == [5, 9, 0, 12]
    rows = 5
    slots = twin.slot_mapping(decodes, rows, block_size=4)
    input_ids, positions = torch.full((2, rows), 77, device=device)
    sampled = torch.tensor([10, 11, 12, 13], device=device)
    given = dict(sampled_ids=sampled, input_ids=input_ids, input_positions=positions)
    longer = twin.advance(decodes, slots, block_size=4, **given)
    assert longer.seq_lens.tolist() == [6, 10, 0, 13]
    assert input_ids.tolist() == [10, 11, 13, 77, 77]
    assert positions.tolist() == [5, 9, 12, 0, 0]
    assert slots.tolist() == [2 * 4 + 1, 5 * 4 + 1, 9 * 4, -1, -1]
    assert longer.cu_seqlens_q is decodes.cu_seqlens_q and longer.seq_lens is decodes.seq_lens
    again = twin.advance(longer, slots, block_size=4, **{**given, "sampled_ids": sampled + 10})
    assert input_ids.tolist() == [20, 21, 23, 77, 77] and positions.tolist() == [6, 10, 13, 0, 0]
    assert again.seq_lens.tolist() == [7, 11, 0, 14]


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_advance_refuses_inputs_that_do_not_fit(twin):
    ids = torch.zeros(3, dtype=torch.int64)
    one, several = twin.make_batch([1, 1], [3, 3], [[0], [1]]), twin.make_batch([2, 1], [2, 2], [[0], [1]])
    for message, batch, given in (
        ("sampled_ids: expected with input_ids", one, dict(sampled_ids=ids[:2])),
        ("sampled_ids: expected int64 \\[b=2\\], got int64 \\[3\\]", one, dict(sampled_ids=ids, input_ids=ids)),
        ("sampled_ids: expected sequences with one new token", several, dict(sampled_ids=ids[:2], input_ids=ids)),
        ("input_ids: expected int64 \\[t\\], at least 2", one, dict(sampled_ids=ids[:2], input_ids=ids[:1])),
        ("input_positions: expected int64 \\[t\\], got float32", one, dict(input_positions=torch.zeros(3))),
    ):
        before = batch.seq_lens.clone()
        with pytest.raises(ValueError, match=message):
            twin.advance(batch, torch.zeros(3, dtype=torch.int64), block_size=4, **given)
        assert torch.equal(batch.seq_lens, before)


@pytest.mark.covers("A40")
@each_twin
@pytest.mark.parametrize("window", [1, 3, 4, 100])
def test_tokens_that_no_later_query_sees_get_no_slot(twin, window, device):
    """The last `window` tokens of each sequence, the others -1: a long prompt needs no block for those."""
    case = Case("cut", ((20, 20), (3, 40), (0, 7), (1, 9), (6, 4)), padding_rows=2)
    batch = build(case, device=device).batch
    whole = twin.slot_mapping(batch, 32, block_size=16).tolist()
    cut = twin.slot_mapping(batch, 32, block_size=16, window=window).tolist()
    row = 0
    for q, s in case.lens:
        for i in range(q):
            assert cut[row] == (whole[row] if s - q + i >= s - window else -1)
            row += 1
    assert cut[row:] == [-1] * (32 - row)
    with pytest.raises(ValueError, match="window: expected a positive int, got 0"):
        twin.slot_mapping(batch, 32, block_size=16, window=0)


@pytest.mark.covers("D119", "D120")
@each_twin
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_block_table_from_slots_of_tokens_leads_to_the_same_keys(twin, block_size, dtype, device):
    """Of any block size, with garbage past the last token (S#32902: a slot is no block)."""
    generator = torch.Generator().manual_seed(block_size)
    blocks = torch.randperm(64 // block_size * 4, generator=generator).view(4, -1)
    token_slots = (blocks[..., None] * block_size + torch.arange(block_size)).flatten(1)
    requests, seq_lens = torch.tensor([2, 0, 3]), torch.tensor([37, 0, 64], dtype=torch.int32)
    expected = [blocks[r, : -(-s // block_size)].tolist() for r, s in zip([2, 0, 3], [37, 0, 64], strict=True)]
    for request, seq_len in zip([2, 0, 3], [37, 0, 64], strict=True):
        token_slots[request, seq_len:] = 10**6
    columns = 64 // block_size
    given = (token_slots.to(device, dtype), requests.to(device), seq_lens.to(device))
    table = twin.block_table_from_slots(*given, block_size=block_size, columns=columns)
    assert table.dtype == torch.int32
    assert table.tolist() == [row + [0] * (columns - len(row)) for row in expected]


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_slots_that_are_no_blocks_are_refused(twin):
    slots = torch.arange(16).view(2, 8)
    good = dict(
        token_slots=slots,
        requests=torch.tensor([1]),
        seq_lens=torch.tensor([6], dtype=torch.int32),
        block_size=4,
        columns=2,
    )
    assert twin.block_table_from_slots(**good).tolist() == [[2, 3]]
    for message, bad in (
        (
            "token_slots: expected blocks of 4 slots one after the other, got slot 10 for token 1",
            slots[:, [0, 2, 1, 3, *range(4, 8)]],
        ),
        ("token_slots: expected blocks of 4 slots one after the other, got slot 9 for token 0", slots + 1),
        ("token_slots: expected int32 or int64", slots.float()),
    ):
        with pytest.raises(ValueError, match=message):
            twin.block_table_from_slots(**{**good, "token_slots": bad})
    for message, bad in (
        ("requests: expected rows in 0..1, got \\[2\\]", dict(requests=torch.tensor([2]))),
        ("seq_lens: expected 0..4 tokens, got \\[6\\]", dict(columns=1)),
        ("columns: expected at most 2", dict(columns=3)),
        ("block_size: expected a positive int", dict(block_size=0)),
        ("seq_lens: expected int32 \\[b=1\\]", dict(seq_lens=torch.tensor([1, 2], dtype=torch.int32))),
    ):
        with pytest.raises(ValueError, match=message):
            twin.block_table_from_slots(**{**good, **bad})


def test_twins_make_the_same_buffers():
    ours, theirs = (twin.make_buffers(3, **ROOM) for twin in TWINS)
    assert isinstance(ours, Batch)
    for name in ("cu_seqlens_q", "seq_lens", "block_table"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert (ours.max_query_len, ours.max_seq_len) == (theirs.max_query_len, theirs.max_seq_len)
