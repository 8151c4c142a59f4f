"""Drafted tokens: who sees whom in every small tree, what a verification keeps, and where it is kept."""

import dataclasses
import functools
import itertools
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn.kv_cache
import fastattn.quantized
import fastattn.speculative
import refattn.chunked_prefill
import refattn.metadata
import refattn.speculative
from fastattn.kernels import order
from fastattn.kernels.problem import attention_problem
from refattn import masks
from refattn.batch import Batch
from refattn.keys import Pages
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import Accepted, TreePlan, Trees
from tests.helpers.batches import HARMLESS, POISON, Case, assert_same_masks, build, plan_and_attend, read_masks
from tests.helpers.kernels_present import PRESENT, each_kernel
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree
from tests.helpers.trees import CONTEXTS, case_of, draw_tree, masks_of_trees, path_to

TWINS = [refattn.speculative, fastattn.speculative]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])


def forests(nodes: int) -> list[tuple[int, ...]]:
    """List every forest of so many nodes, each after its parent."""
    return list(itertools.product(*(range(-1, node) for node in range(nodes))))


SMALL = [parents for nodes in range(1, 6) for parents in forests(nodes)]  # 153, and 34 of them have one root


LARGE = [
    draw_tree(64, 0),
    tuple(range(-1, 63)),  # a chain that fills a word
    (-1, *[0] * 63),
    draw_tree(65, 1),
    draw_tree(64, 2, roots=5),
    draw_tree(130, 3),
    draw_tree(7, 4),
]


# --- the mask, read out ---


def check_masks(twin, trees, device, *, window=-1, queries=None, contexts=CONTEXTS, heads=(2, 1)):
    case = case_of(trees, contexts=contexts, queries=queries, heads=heads)
    options = dict(trees=twin.make_trees(trees, device=device))
    if window >= 0:
        options["window_size"] = (window, 0)
    read = read_masks(partial(plan_and_attend, twin), case, device=device, **options)
    assert_same_masks(read, masks_of_trees(case, trees, window))


@pytest.mark.core
@pytest.mark.covers("D147", "D148")
def test_every_small_tree_by_the_reference(device):
    check_masks(refattn.speculative, SMALL, device)


@pytest.mark.core
@pytest.mark.covers("D147", "D148")
@each_kernel
def test_every_small_tree(kernel, device):
    """Of up to five nodes, with one root or several, after contexts that end inside of a block and with it."""
    trees = [tree for tree in SMALL if tree.count(-1) == 1 or not kernel.is_interpreted]

    def check():
        check_masks(fastattn.speculative, trees, device)

    with kernel.forced():
        kernel.check(check)


@pytest.mark.covers("D148")
@each_kernel
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_large_trees(kernel, heads, device):
    """Of 64 nodes and more, whose masks are words of 64 bits, one or several; as tiles of 16 rows, 64 and 128."""

    def check():
        few = (LARGE[3:4] + LARGE[5:],) if heads == (4, 1) else (LARGE[1:3], LARGE[4:5])
        for trees in ([draw_tree(3, 0)], *few):
            check_masks(fastattn.speculative, trees, device, contexts=(40, 3, 64), heads=heads)

    with kernel.forced():
        kernel.check(check)


@pytest.mark.core
@pytest.mark.covers("D146")
@each_twin
def test_every_node_of_a_chain_sees_what_a_causal_chunk_shows(twin, device):
    chains = [tuple(range(-1, n - 1)) for n in (1, 5, 16, 3)]
    check_masks(twin, chains, device)
    case = case_of(chains)
    for mask, (q, s) in zip(masks_of_trees(case, chains), case.lens, strict=True):
        assert torch.equal(mask, torch.ones(q, s, dtype=torch.bool).tril(s - q))


@pytest.mark.core
@pytest.mark.covers("D143")
@each_twin
def test_blocks_before_every_window_are_not_in_the_table(twin, device):
    """A root at position 20 sees from 14 on, the end of block 3; one at position 2 everything; one at 8 from 2 on."""
    trees = twin.make_trees([(-1, 0, 0), (-1,), (-1, 0)], device=device)
    tables = [[7, 1, 9, 4, 2, 6], [3], [5, 8, 0]]
    batch = make_batch([3, 1, 2], [23, 3, 10], tables, device=device)
    plan = twin.plan(batch, block_size=4, trees=trees, window_size=(6, 0))
    for level, seq_lens in ((plan.whole, [11, 3, 10]), (plan.prefix, [8, 2, 8])):
        assert level.first_keys.tolist() == [12, 0, 0]
        assert level.batch.seq_lens.tolist() == seq_lens
        assert [row[:n] for row, n in zip(level.batch.block_table.tolist(), (3, 1, 3), strict=True)] == [
            *([4, 2, 6], [3], [5, 8, 0])
        ]


@pytest.mark.core
@pytest.mark.covers("D142")
@each_twin
@pytest.mark.parametrize("window", [0, 3, 20])
def test_a_window_counts_along_the_branch(twin, window, device):
    """Siblings stand at one position, so each sees as many keys as the other, whatever their rows are."""
    trees = [SMALL[i] for i in range(0, len(SMALL), 12)] + [(-1, 0, 0, 0, 1, 2, 2, 4)]
    check_masks(twin, trees, device, window=window)
    check_masks(twin, trees, device, window=window, queries=2)


@pytest.mark.core
@pytest.mark.covers("D148")
@each_twin
def test_siblings_do_not_see_each_other(twin, device):
    """Whatever stands in a sibling, NaN too where a row is computed by itself, the others' answers are the same."""
    trees = twin.make_trees([(-1, 0, 0, 0)], device=device)
    inputs = build(Case("siblings", ((4, 21),)), device=device)
    before = plan_and_attend(twin, *inputs.tensors, trees=trees)
    block, row = inputs.batch.block_table[0, 18 // 16], 18 % 16
    inputs.key_cache[block, row], inputs.value_cache[block, row] = 100.0, -100.0
    after = plan_and_attend(twin, *inputs.tensors, trees=trees)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.core
@pytest.mark.covers("D145")
@each_twin
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_a_draft_that_grows_asks_from_its_newest_nodes(twin, queries, device):
    """Of a tree the last nodes are query rows, one or several (V#51848); the others are in the cache already."""
    check_masks(twin, SMALL[::6], device, queries=queries)
    check_masks(twin, LARGE[5:], device, queries=queries, contexts=(40, 3, 64))


def grow_by_hand(draw, contexts, num_steps, num_branches, p, window):
    """Draw the drafts of every pass, with what each of their rows sees: a context, then its own branch alone."""
    size, lens = 8, [s for s in contexts if s is not None]
    keys = [[torch.randn(2, size, generator=draw, dtype=torch.float64) for _ in range(s)] for s in lens]
    passes, branches = [], [[list(before) for _ in range(num_branches)] for before in keys]
    for _ in range(num_steps):
        new, queries, expected = [], [], []
        for branch in itertools.chain.from_iterable(branches):
            new.append(torch.randn(2, size, generator=draw, dtype=torch.float64))
            queries.append(torch.randn(size, generator=draw, dtype=torch.float64))
            branch.append(new[-1])
            key, value = torch.stack(branch[-window - 1 :] if window >= 0 else branch).unbind(1)
            expected.append((key @ queries[-1] * size**-0.5).softmax(0) @ value)
        passes.append((torch.stack(new), torch.stack(queries), torch.stack(expected)))
    return keys, passes


@pytest.mark.covers("D151")
@each_twin
@pytest.mark.parametrize("triton", [False] if PRESENT[0].name == "cpu" else [False, True], ids=lambda x: f"triton={x}")
@pytest.mark.parametrize("window", [-1, 2, 6])
@pytest.mark.parametrize(("num_steps", "num_branches"), [(1, 1), (4, 1), (1, 3), (4, 3), (3, 24)])
def test_all_steps_of_a_draft_are_planned_before_the_first(twin, triton, num_steps, num_branches, window, device):
    """Every pass then writes its tokens and attends: each sees its context and its branch, and no other branch.

    Slots that no pass has filled yet hold NaN; the third sequence is padding.
    """
    contexts, p, dtype = (5, 9, None, 0, 16), 4, torch.float32 if device != "cpu" else torch.float64
    seq_lens = [s or 0 for s in contexts]
    ends = [-(-(s + (c is not None) * num_steps * num_branches) // p) for s, c in zip(seq_lens, contexts, strict=True)]
    blocks = torch.randperm(sum(ends), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in ends]
    before = make_batch([2, 1, 0, 1, 1], [max(s, 1) for s in seq_lens], tables, device=device)
    before = dataclasses.replace(before, seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device))
    draw = torch.Generator().manual_seed(num_steps)
    keys, passes = grow_by_hand(draw, contexts, num_steps, num_branches, p, window)
    pools = torch.full((2, sum(ends), p, 1, 8), torch.nan, dtype=dtype, device=device)
    drafting = [i for i, context in enumerate(contexts) if context is not None]
    for i, context in zip(drafting, keys, strict=True):
        for j, key_and_value in enumerate(context):
            pools[:, tables[i][j // p], j % p, 0] = key_and_value.to(pools)
    options = dict(block_size=p, num_steps=num_steps, num_branches=num_branches, window_size=(window, 0))
    with fastattn.use_kernel("triton") if triton else nullcontext():
        steps = twin.plan_drafts(before, **options)
        assert len(steps) == num_steps
        for nth, (step, (new, queries, expected)) in enumerate(zip(steps, passes, strict=True)):
            t = len(queries)
            slots = refattn.metadata.slot_mapping(step.batch, t, block_size=p)
            refattn.kv_cache.write(*new.to(pools).unsqueeze(2).unbind(1), *pools, slots)
            places = twin.positions(step.batch, step.trees, t).tolist()
            assert places == [seq_lens[i] + nth for i in drafting for _ in range(num_branches)]
            out = twin.attention(queries[:, None].to(pools), *pools, step.plan)
            torch.testing.assert_close(out[:, 0].double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.covers("D191")
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("window", [-1, 9])
def test_twins_plan_drafts_alike(triton, window, device):
    batch = build(Case("drafts", ((3, 40), (0, 7), (1, 64), (2, 2))), device=device).batch
    table = torch.nn.functional.pad(batch.block_table.clamp(0, 9), (0, 2), value=3)  # blocks for the drafts
    batch = dataclasses.replace(batch, block_table=table)
    sizes = dict(block_size=16, num_steps=4, num_branches=5, window_size=(window, 0))
    with fastattn.use_kernel("triton" if triton else "torch"):
        ours, theirs = (twin.plan_drafts(batch, **sizes) for twin in TWINS)
    for one, other in zip(ours, theirs, strict=True):
        assert entries(one.plan) == entries(other.plan)
        assert one.trees.to_lists() == other.trees.to_lists()
        for name in ("cu_seqlens_q", "seq_lens"):
            assert torch.equal(getattr(one.batch, name), getattr(other.batch, name))


@each_twin
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("num_steps: expected a positive int, got 0", dict(num_steps=0)),
        ("num_branches: expected a positive int, got 1.5", dict(num_branches=1.5)),
        ("num_steps: expected at most 1024 nodes together, got 300 steps of 4", dict(num_steps=300, num_branches=4)),
        ("block_table: expected at least 4 columns for the 13 keys of sequence 0 in blocks of 4", dict(num_branches=2)),
        ("block_table: expected int32 \\[b, m\\], got None", dict(batch=make_batch([3, 1], [9, 4]))),
        ("window_size: expected", dict(window_size=(-2, 0))),
        ("batch: expected a Batch, got None", dict(batch=None)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_draft_that_does_not_fit_is_refused_by_name(twin, message, changes):
    good = dict(batch=make_batch([3, 1], [9, 4], [[0, 1, 2], [3, 4, 5]]), block_size=4, num_steps=2)
    assert len(twin.plan_drafts(**good)) == 2
    with pytest.raises(ValueError, match=message):
        twin.plan_drafts(**good | changes)


# --- poison ---


@pytest.mark.parametrize(
    ("kernel", "queries", "window"), every_pair_on_cpu([None, *PRESENT], [2, 200], [-1, 0, 4]), ids=str
)
def test_nothing_depends_on_what_no_row_sees(kernel, queries, window, device):
    """Slots of rejected drafts, blocks no sequence owns, keys before a window, nodes among them; other branches."""
    trees = [(-1, 0, 0, 1, 2, 2), draw_tree(66, 5), (-1,), (-1, -1, 0, 1, 1)]
    case = case_of(trees, contexts=(7, 30, 0, 16), queries=queries, heads=(4, 2))
    twin = refattn.speculative if kernel is None else fastattn.speculative
    dtype = torch.float32 if kernel is None else kernel.dtypes[0]
    options = dict(trees=twin.make_trees(trees, device=device), window_size=(window, 0))

    def lay_out(poison):
        inputs = build(case, device=device, dtype=dtype, poison=poison)
        for i, (mask, (_, s)) in enumerate(zip(masks_of_trees(case, trees, window), case.lens, strict=True)):
            for j in range(s):
                if not mask[:, j].any():
                    block = inputs.batch.block_table[i, j // case.block_size]
                    for kind, pool in enumerate((inputs.key_cache, inputs.value_cache)):
                        pool[block, j % case.block_size] = poison[(j + kind) % len(poison)]
        return inputs.tensors

    def check():
        clean = lay_out(HARMLESS)
        expected = plan_and_attend(twin, *clean, **options, return_lse=True)
        answer = plan_and_attend(twin, *lay_out(POISON), **options, return_lse=True)
        if kernel is not None and kernel.recomputed:
            assert_matches_reference(*answer, partial(plan_and_attend, refattn.speculative), *clean, **options)
        else:
            assert all(map(torch.equal, answer, expected))

    if kernel is None:
        check()
    else:
        with kernel.forced():
            kernel.check(check)


@each_twin
def test_nan_that_a_node_sees_comes_out(twin, device):
    inputs = build(Case("seeing", ((3, 20),)), device=device)
    inputs.key_cache[inputs.batch.block_table[0, 0], 5] = float("nan")
    out = plan_and_attend(twin, *inputs.tensors, trees=twin.make_trees([(-1, 0, 0)], device=device))
    assert out.isnan().all()


# --- the formula, and chains ---


OPTIONS = {
    "plain": {},
    "sinks": dict(sinks=True),
    "alibi": dict(alibi_slopes=True),
    "alibi-by-the-root": dict(alibi_slopes=True, alibi_sqrt=True),
    "window-with-alibi": dict(window_size=(9, 0), alibi_slopes=True),
    "softcap": dict(softcap=3.0, softmax_scale=-0.4),
    "invariant": dict(batch_invariant=True),
    "everything": dict(softcap=3.0, alibi_slopes=True, sinks=True, window_size=(30, 0), batch_invariant=True),
}
each_option = pytest.mark.parametrize("name", OPTIONS)


def options_of(name: str, heads: int, device: str) -> dict:
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2.0, 3.0, heads, device=device)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.1, 0.5, heads, device=device)
    return options


@pytest.mark.covers("D146")
@each_option
def test_a_tree_that_is_a_chain_is_a_causal_chunk_to_the_bit(name):
    chains = [tuple(range(-1, n - 1)) for n in (1, 5, 16, 70, 3)]
    inputs, options = build(case_of(chains, heads=(4, 2))), options_of(name, 4, "cpu")
    trees = refattn.speculative.make_trees(chains)
    as_tree = plan_and_attend(refattn.speculative, *inputs.tensors, **options, trees=trees, return_lse=True)
    as_chunk = plan_and_attend(refattn.chunked_prefill, *inputs.tensors, **options, return_lse=True)
    assert all(map(torch.equal, as_tree, as_chunk))


@pytest.mark.core
@pytest.mark.covers("D144")
@each_twin
def test_without_trees_a_draft_is_a_chain_or_a_block(twin, device):
    inputs = build(Case("chains", ((4, 20), (3, 3)), padding_rows=1), device=device)
    batch = inputs.batch
    for causal, window in ((True, (-1, -1)), (False, (-1, -1)), (False, (5, 2))):
        plan = twin.plan(batch, block_size=16, causal=causal, window_size=window)
        assert isinstance(plan, Plan) and plan.window == (window[0], 0 if causal else window[1])
        out = twin.attention(inputs.query, inputs.key_cache, inputs.value_cache, plan)
        expected = plan_and_attend(refattn.chunked_prefill, *inputs.tensors, causal=causal, window_size=window)
        torch.testing.assert_close(out, expected)


@pytest.mark.core
@pytest.mark.covers("D145")
@pytest.mark.parametrize("window", [-1, 6])
def test_a_draft_that_grows_answers_as_the_whole_tree_does(window):
    """Level by level, with the newest nodes as query rows; then the verification of all nodes at once."""
    parents = [-1, -1, -1, 0, 1, 1, 3, 4, 5]  # three branches, a top-k of 3
    inputs = build(Case("whole", ((9, 9 + 21),)), dtype=torch.float64)
    whole = plan_and_attend(
        refattn.speculative,
        *inputs.tensors,
        trees=refattn.speculative.make_trees([parents]),
        window_size=(window, 0),
    )
    for nodes in (3, 6, 9):
        batch = make_batch([3], [21 + nodes], [inputs.batch.block_table[0, :2].tolist()])
        trees = refattn.speculative.make_trees([parents[:nodes]])
        rows = slice(nodes - 3, nodes)
        tensors = (inputs.query[rows], inputs.key_cache, inputs.value_cache, batch)
        out = plan_and_attend(refattn.speculative, *tensors, trees=trees, window_size=(window, 0))
        torch.testing.assert_close(out, whole[rows])


# --- the twin against the reference ---


@pytest.mark.covers("D149")
@pytest.mark.parametrize(
    ("name", "shape", "kernel"), every_pair_on_cpu(OPTIONS, ["small", "wide", "odd"], PRESENT), ids=str
)
def test_the_twin_answers_as_the_reference_does(kernel, name, shape, device):
    trees, sizes = {
        "small": ([draw_tree(4, 1), (-1,), draw_tree(5, 2), (-1, 0, 0)], dict(heads=(4, 1))),
        "wide": (LARGE[:1] + LARGE[3:4] + LARGE[6:], dict(heads=(4, 2), head_size=128)),
        "odd": (
            [draw_tree(17, 1), draw_tree(20, 2), (-1, 0)],
            dict(heads=(3, 3), head_size=96, value_head_size=64, block_size=24, layout="HND"),
        ),
    }[shape]
    case = case_of(trees, contexts=(70, 140, 0, 5), **sizes)
    inputs = build(case, dtype=kernel.dtypes[0], device=device)
    made, options = fastattn.speculative.make_trees(trees, device=device), options_of(name, case.heads[0], device)
    with kernel.forced():
        if "alibi_sqrt" in options and kernel.name == "fa3":  # fa3 alone, among kernels with trees, has no root
            with pytest.raises(NotImplementedError, match="has no ALiBi|one head size"):
                plan_and_attend(fastattn.speculative, *inputs.tensors, trees=made, **options)
            return
        kernel.check(assert_twins_agree, "speculative", *inputs.tensors, trees=made, **options)


@pytest.mark.core
@pytest.mark.covers("D148")
@each_kernel
def test_a_step_of_128_keys_needs_two_words_of_a_mask(kernel, device):
    """Heads of 16 elements have such steps; a tree begins inside of one, and at its first key."""
    trees = [draw_tree(130, 3), draw_tree(64, 0)]
    inputs = build(case_of(trees, contexts=(40, 128), heads=(1, 1), head_size=16), dtype=torch.float32, device=device)
    with kernel.forced():
        made = fastattn.speculative.make_trees(trees, device=device)
        kernel.check(assert_twins_agree, "speculative", *inputs.tensors, trees=made)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_chooser_says_who_verifies_trees(device_type, monkeypatch):
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    inputs = build(Case("trees", ((3, 20),)))
    plan = fastattn.speculative.plan(inputs.batch, block_size=16, trees=fastattn.speculative.make_trees([(-1, 0, 0)]))
    keys = Pages(inputs.key_cache, inputs.value_cache)
    problem = attention_problem(inputs.query, keys, plan, AttentionOptions())
    if device_type == "cpu":
        assert "chosen: cpu" in order.explain(problem)
        return
    problem = problem._replace(device=torch.device("cuda"), dtype=torch.bfloat16, num_heads=32, num_kv_heads=8)
    assert order.priorities(problem._replace(max_query_len=4)) == ("triton", "fa3")
    many = problem._replace(max_query_len=16, num_seqs=64, even=True)
    assert order.priorities(many) == ("fa3", "triton"), "tiles for all SMs, of as many keys each"
    assert order.priorities(many._replace(even=False)) == order.priorities(many._replace(num_seqs=1))
    assert order.priorities(many._replace(even=False)) == ("triton", "fa3"), "FlashAttention-3 splits no keys"


# --- the plan ---


def entries(plan: TreePlan) -> dict[str, object]:
    """List what a plan holds, without what is beyond the ends of its sequences and trees."""
    held = {"depths": plan.depths.tolist(), "ancestors": plan.ancestors.tolist()}
    for name in ("whole", "prefix"):
        level = getattr(plan, name)
        lens, size = level.batch.seq_lens.tolist(), level.block_size
        rows = zip(level.batch.block_table.tolist(), lens, strict=True)
        held[name] = (
            lens,
            level.batch.query_lens.tolist(),
            [blocks[: -(-s // size)] for blocks, s in rows],
            [0] * len(lens) if level.first_keys is None else level.first_keys.tolist(),
            level.positions[: sum(level.batch.query_lens.tolist())].tolist(),
            (level.window, level.causal, size),
        )
    return held


PLANNED = [SMALL[i] for i in range(0, len(SMALL), 15)] + LARGE[1:]


@functools.cache
def planned_by_the_reference(window, queries, device):
    """Lay out a batch and its trees, and plan them: the batch, the trees, entries and positions."""
    batch = build(case_of(PLANNED, contexts=(40, 3, 64, 0), queries=queries), device=device).batch
    trees = refattn.speculative.make_trees(PLANNED, device=device)
    plan = refattn.speculative.plan(batch, block_size=16, trees=trees, window_size=(window, 0))
    places = refattn.speculative.positions(batch, trees, int(batch.cu_seqlens_q[-1]) + 3)
    return batch, trees, entries(plan), places.tolist()


@pytest.mark.parametrize(
    ("kernel", "window", "queries"), every_pair_on_cpu(["torch", "triton"], [-1, 0, 9, 40], [None, 2])
)
def test_twins_plan_alike(kernel, window, queries, device):
    batch, trees, expected, places = planned_by_the_reference(window, queries, device)
    assert trees.to_lists() == [list(parents) for parents in PLANNED]
    with fastattn.use_kernel(kernel):
        plan = fastattn.speculative.plan(batch, block_size=16, trees=trees, window_size=(window, 0))
        found = fastattn.speculative.positions(batch, trees, int(batch.cu_seqlens_q[-1]) + 3).tolist()
    assert entries(plan) == expected
    assert found == places


def test_the_example_of_the_docstring():
    trees = refattn.speculative.make_trees([(-1, 0, 0, 1, 2)])
    batch = make_batch([5], [7], [[0, 1]])
    assert refattn.speculative.positions(batch, trees, 6).tolist() == [2, 3, 3, 4, 4, 0]
    plan = refattn.speculative.plan(batch, block_size=4, trees=trees)
    assert plan.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101]
    drafts = torch.tensor([0, 7, 8, 9, 5])
    accepted = refattn.speculative.accept(batch, trees, drafts, torch.tensor([8, 1, 5, 1, 3]))
    assert accepted.nodes[0, : accepted.lens[0]].tolist() == [0, 2, 4]
    assert accepted.next_tokens.tolist() == [3]
    cache = torch.arange(8).view(2, 4)
    refattn.speculative.compact([cache], batch, trees, accepted, block_size=4)
    assert cache.flatten()[:5].tolist() == [0, 1, 2, 4, 6]  # two keys of context, then nodes 0, 2 and 4


@pytest.mark.core
@pytest.mark.covers("D148")
@each_twin
def test_a_mask_of_other_servers_has_parents(twin):
    for parents in (*SMALL, *LARGE):
        assert twin.parents_from_mask(masks.tree(parents)) == list(parents)
    assert twin.parents_from_mask(torch.zeros(0, 0, dtype=torch.bool)) == []
    for wrong in ([[1, 1], [1, 1]], [[0]], [[1, 0, 0], [0, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0], [0, 1, 1]]):
        with pytest.raises(ValueError, match="visible: expected the mask of a tree"):
            twin.parents_from_mask(torch.tensor(wrong, dtype=torch.bool))


# --- what is kept: by what the model chose ---


def draw_verification(seed: int, vocabulary: int = 3) -> tuple:
    """Draw trees, the tokens of their nodes, and what the model chose after each: alike often enough to go deep."""
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 2, 5, 9, 70]) for _ in range(draw.randint(1, 4))]
    trees = [draw_tree(n, draw.randrange(1000)) if n else () for n in sizes]
    batch = make_batch(sizes, [n + draw.choice([0, 5]) for n in sizes], [[0] * 80 for _ in sizes])
    drafts, chosen = (
        torch.tensor([draw.randrange(vocabulary) for _ in range(sum(sizes) + 1)]) for _ in range(2)
    )  # and a row of padding
    return trees, batch, drafts, chosen


@given(st.integers(0, 10**6))
def test_accepted_is_the_longest_branch_that_the_model_chose(seed):
    trees, batch, drafts, chosen = draw_verification(seed)
    made = refattn.speculative.make_trees(trees)
    ours, theirs = (twin.accept(batch, made, drafts, chosen) for twin in TWINS)
    assert all(map(torch.equal, ours, theirs))
    for i, (parents, (q0, q1)) in enumerate(zip(trees, batch.query_rows(), strict=True)):
        tokens, wanted = drafts[q0:q1].tolist(), chosen[q0:q1].tolist()
        branches = [path_to(parents, node) for node in range(len(parents))]
        agreed = [b for b in branches if all(tokens[k] == wanted[parents[k]] for k in b[1:])]
        longest = max(agreed, key=len, default=[])
        assert ours.nodes[i].tolist() == longest + [-1] * (made.max_len - len(longest))
        assert ours.lens[i] == len(longest)
        assert ours.next_tokens[i] == (wanted[longest[-1]] if longest else -1)


# --- what is kept: by rejection sampling ---


@given(st.integers(0, 10**6), st.booleans())
def test_twins_accept_the_same_samples(seed, drawn):
    trees, batch, drafts, _ = draw_verification(seed)
    made = refattn.speculative.make_trees(trees)
    generator = torch.Generator().manual_seed(seed)
    target, draft = (torch.rand(len(drafts), 3, generator=generator).softmax(-1) for _ in range(2))
    uniforms = torch.rand(len(drafts), generator=generator)
    ours, theirs = (
        twin.accept_sampled(batch, made, drafts, target, uniforms, draft if drawn else None) for twin in TWINS
    )
    assert all(map(torch.equal, ours, theirs))


P = torch.tensor([[0.5, 0.375, 0.125], [0.25, 0.25, 0.5], [0.125, 0.75, 0.125]])  # after a root, a token 0, 1
Q = torch.tensor([[0.25, 0.25, 0.5], [0.625, 0.125, 0.25], [0.25, 0.5, 0.25]])  # what the draft model says there


def many(parents: tuple[int, ...], count: int) -> tuple[Trees, Batch]:
    """Make the verification of the same tree for many sequences, which have no token before it."""
    nodes = len(parents)
    lens = torch.full((count,), nodes, dtype=torch.int32)
    trees = Trees(torch.tensor([parents], dtype=torch.int32).expand(count, -1).contiguous(), lens)
    edges = torch.arange(0, nodes * count + 1, nodes, dtype=torch.int32)
    return trees, Batch(edges, lens, torch.zeros(count, 1, dtype=torch.int32), nodes, nodes)


@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 0), (-1, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "looked-up"])
def test_the_next_token_has_the_distribution_of_the_model(parents, drawn):
    """Exactly, over all that can be drafted and a lattice of random numbers: no draw, so nothing to allow for.

    All probabilities are multiples of 1/8, and so the lattice decides each acceptance in the right proportion but for
    what one of its steps is.
    """
    steps = 24 if len(parents) < 4 else 12
    grid = (torch.arange(steps) + 0.5) / steps
    numbers = torch.cartesian_prod(*[grid] * len(parents))  # [cases, nodes]
    trees, batch = many(parents, len(numbers))
    answer = torch.zeros(3, dtype=torch.float64)
    total = 0.0
    children = len(parents) - 1
    for tokens in itertools.product(range(3), repeat=children):
        chance = 1.0
        for token in tokens:
            chance *= float(Q[0, token]) if drawn else 1 / 3**children
        if not drawn and tokens != tuple(range(children)):
            continue  # any choice of drafts will do, as they were not sampled
        drafts = torch.tensor([0, *tokens]).repeat(len(numbers))
        target = P[0].expand(len(drafts), 3)
        accepted = fastattn.speculative.accept_sampled(
            batch, trees, drafts, target, numbers.flatten(), Q[0].expand(len(drafts), 3) if drawn else None
        )
        child = drafts.view(len(numbers), -1).gather(1, accepted.nodes[:, 1:2].long().clamp(min=0))[:, 0]
        first = torch.where(accepted.lens > 1, child, accepted.next_tokens)
        answer += chance * torch.bincount(first, minlength=3).double() / len(numbers)
        total += chance
    torch.testing.assert_close(answer / total, P[0].double(), rtol=0, atol=2.5 / steps / 3)


def test_two_tokens_have_the_distribution_of_the_model():
    """A tree of two levels, drafted from another distribution: 200000 verifications against nine probabilities.

    The statistic is chi-squared with 8 degrees of freedom; above 40 it is once in 300000 times, and the seed is fixed.
    """
    count, generator = 200_000, torch.Generator().manual_seed(7)
    trees, batch = many((-1, 0, 0, 1, 2), count)
    tokens = torch.zeros(count, 5, dtype=torch.int64)
    tokens[:, 1:3] = torch.multinomial(Q[0], 2 * count, replacement=True, generator=generator).view(count, 2)
    after = torch.tensor([1, 2, 0])  # the row of P and Q that stands for what follows a token
    for node, parent in ((3, 1), (4, 2)):
        tokens[:, node] = torch.multinomial(Q[after[tokens[:, parent]]], 1, generator=generator)[:, 0]
    target = torch.stack([P[0].expand(count, 3), *(P[after[tokens[:, k]]] for k in range(1, 5))], 1)
    draft = torch.stack(
        [Q[0].expand(count, 3)] * 3 + [Q[after[tokens[:, k]]] for k in (1, 2)],
        1,
    )
    accepted = fastattn.speculative.accept_sampled(
        batch,
        trees,
        tokens.flatten(),
        target.flatten(0, 1),
        torch.rand(5 * count, generator=generator),
        draft.flatten(0, 1),
    )
    path = tokens.gather(1, accepted.nodes.long().clamp(min=0))
    first = torch.where(accepted.lens > 1, path[:, 1], accepted.next_tokens)
    second = torch.where(accepted.lens > 2, path[:, 2], accepted.next_tokens)
    alone = accepted.lens == 1  # one token came out, and the next verification would give the other
    second[alone] = torch.multinomial(P[after[first[alone]]], 1, generator=generator)[:, 0]
    expected = (P[0][:, None] * P[after]).flatten().double() * count
    found = torch.bincount(3 * first + second, minlength=9).double()
    assert ((found - expected) ** 2 / expected).sum() < 40
    assert accepted.lens.float().mean() > 1.8, "hardly a draft was accepted: the test would prove little"


@each_twin
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_no_token_is_drawn_from_past_the_vocabulary(twin, dtype, device):
    """A random number that was rounded up to 1 draws the last token with a probability: never one without, or none."""
    largest = 1 - torch.finfo(dtype).eps / 2
    rows = torch.tensor([[0.3, 0.6, 0.1], [0.2, 0.5, 0.0], [0.0, 0.7, 0.0], [1e-7, 0.0, 0.0]], dtype=dtype)
    target = rows.repeat(2, 1).to(device)
    numbers = torch.tensor([1.0] * 4 + [largest] * 4, dtype=dtype, device=device)
    batch, trees = make_batch([1] * 8, [1] * 8, device=device), twin.make_trees([[-1]] * 8, device=device)
    accepted = twin.accept_sampled(batch, trees, torch.zeros(8, dtype=torch.int64, device=device), target, numbers)
    assert accepted.next_tokens.tolist() == [2, 1, 1, 0] * 2


@each_twin
@pytest.mark.parametrize("where", ["target_probs", "draft_probs"])
@pytest.mark.parametrize("bad", [torch.nan, "zeros"], ids=str)
def test_no_token_is_drawn_from_what_is_no_distribution(twin, bad, where, device):
    """That sequence has none, and the others have theirs; a distribution that is not reached changes nothing."""
    parents = [[-1, 0], [-1, 0], [-1, 0], [-1]]
    batch, trees = make_batch([2, 2, 2, 1], [2, 2, 2, 1], device=device), twin.make_trees(parents, device=device)
    target, draft = torch.full((8, 4), 0.25, device=device), torch.full((8, 4), 0.25, device=device)
    target[2] = torch.tensor([0.0, 0.0, 0.5, 0.5])  # the draft of sequence 1, token 1, is rejected
    target[7] = draft[7] = torch.nan  # padding
    poisoned = dict(target_probs=target, draft_probs=draft)[where]
    poisoned[2 if where == "target_probs" else 3] = 0.0 if bad == "zeros" else bad
    numbers = torch.tensor([0.6, 0.9, 0.6, 0.9, 0.6, 0.9, 0.6, torch.nan], device=device)
    drafts = torch.ones(8, dtype=torch.int64, device=device)
    accepted = twin.accept_sampled(batch, trees, drafts, target, numbers, draft)
    tokens = accepted.next_tokens.tolist()
    assert [tokens[i] for i in (0, 2, 3)] == [2, 2, 2]
    if where == "target_probs":
        assert tokens[1] == -1
    else:
        assert tokens[1] == (3 if bad == "zeros" else -1)


# --- where it is kept ---


@each_twin
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_accepted_slots_that_are_not_consecutive_move_up(twin, triton, device):
    """To the slots after the context, in all pools alike and to the bit, and nothing else moves (S#15360)."""
    draw = random.Random(3)
    sizes, p = [0, 1, 6, 20, 9], 4
    trees = twin.make_trees([draw_tree(n, n) if n else () for n in sizes], device=device)
    seq_lens = [n + draw.randrange(9) for n in sizes]
    blocks = list(range(40))
    draw.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-s // p))] for s in seq_lens]
    batch = make_batch(sizes, seq_lens, tables, device=device)
    paths = [sorted(draw.sample(range(n), draw.randint(1, n))) if n else [] for n in sizes]
    nodes = torch.full(trees.parents.shape, -1, dtype=torch.int32)
    for i, path in enumerate(paths):
        nodes[i, : len(path)] = torch.tensor(path, dtype=torch.int32)
    lens = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    accepted = Accepted(nodes.to(device), lens.to(device), torch.zeros(5, dtype=torch.int64, device=device))
    caches = [
        torch.randn(40, p, 3, 64),
        torch.randn(40, 3, p, 70).transpose(1, 2),  # heads first
        torch.randint(-128, 128, (40, p, 2, 8), dtype=torch.int8),
        torch.randn(40, p, 2, 16).to(torch.float8_e4m3fn),
        torch.randn(40, p, 300, dtype=torch.float64),  # latents
        torch.randn(40, p),  # scales
    ]
    caches = [cache.to(device) for cache in caches]
    before = [cache.clone() for cache in caches]
    with fastattn.use_kernel("triton" if triton else "torch"):
        twin.compact(caches, batch, trees, accepted, block_size=p)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        for path, n, s, table in zip(paths, sizes, seq_lens, tables, strict=True):
            for target, node in enumerate(path):
                (to_block, to_row), (block, row) = (divmod(s - n + k, p) for k in (target, node))
                expected[table[to_block], to_row] = old[table[block], row]
        assert torch.equal(cache.float(), expected.float())


@each_twin
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize(("path", "tree_of"), [([0, 2], (-1, 0, 0)), ([0, 1], (-1, 0, 1)), ([0], (-1, 0, 0))], ids=str)
def test_blocks_between_which_nothing_moves_are_not_read(twin, triton, path, tree_of, device):
    """A pool of a window has no block (-1) for tokens that no query sees any more."""
    batch = make_batch([3], [11], [[-1, 0, 1] if path == [0, 2] else [-1, -1, -1]], device=device)
    trees = twin.make_trees([tree_of], device=device)
    nodes = torch.tensor([path + [-1] * (3 - len(path))], dtype=torch.int32, device=device)
    accepted = Accepted(nodes, nodes.new_tensor([len(path)]), nodes.new_tensor([9]).long())
    cache = torch.randn(2, 4, 1, 8, device=device)
    expected = cache.clone()
    if path == [0, 2]:
        expected[1, 1] = cache[1, 2]  # node 2, from slot 10 to slot 9
    with fastattn.use_kernel("triton" if triton else "torch"):
        twin.compact([cache], batch, trees, accepted, block_size=4)
    assert torch.equal(cache, expected)


@pytest.mark.core
@pytest.mark.covers("D150")
@each_twin
def test_a_draft_model_goes_on_from_what_was_accepted(twin):
    batch = make_batch([4, 3, 0], [14, 3, 0], [[0], [1], [2]])
    trees = twin.make_trees([(-1, 0, 0, 1), (-1, 0, 1), ()])
    step = twin.accepted_batch(batch, trees, torch.tensor([2, 3, 0], dtype=torch.int32))
    assert step.cu_seqlens_q.tolist() == [0, 2, 5, 5]
    assert step.seq_lens.tolist() == [12, 3, 0]
    assert step.max_query_len >= 3 and step.num_tokens is None


@pytest.mark.parametrize("kernel", PRESENT, ids=lambda kernel: kernel.name)
def test_after_compaction_the_next_step_answers_as_if_nothing_had_been_drafted(kernel, device):
    """The accepted branch as a chain that was written in order, with NaN in the slots of what was rejected."""
    parents, path = (-1, 0, 0, 1, 2, 2), [0, 2, 5]
    inputs = build(Case("accepted", ((6, 21),), heads=(4, 2)), dtype=kernel.dtypes[0], device=device)
    trees = fastattn.speculative.make_trees([parents], device=device)
    nodes = torch.tensor([[*path, -1, -1, -1]], dtype=torch.int32, device=device)
    accepted = Accepted(nodes, nodes.new_tensor([3]), nodes.new_tensor([1]).long())
    keys, values = (x[0][[*range(15), *(15 + k for k in path)]] for x in (inputs.keys, inputs.values))
    fastattn.speculative.compact([inputs.key_cache, inputs.value_cache], inputs.batch, trees, accepted, block_size=16)
    table = inputs.batch.block_table[0].tolist()
    for place in range(18, 21):
        for pool in (inputs.key_cache, inputs.value_cache):
            pool[table[place // 16], place % 16] = float("nan")
    in_order = build(
        Case("in-order", ((3, 18),), heads=(4, 2)), dtype=kernel.dtypes[0], device=device, keys=[keys], values=[values]
    )
    step = fastattn.speculative.accepted_batch(inputs.batch, trees, accepted.lens)
    query = inputs.query[path]

    def check():
        answer = plan_and_attend(
            fastattn.speculative, query, inputs.key_cache, inputs.value_cache, step, return_lse=True
        )
        assert_matches_reference(
            *answer, partial(plan_and_attend, refattn.chunked_prefill), query, *in_order.tensors[1:]
        )

    with kernel.forced():
        kernel.check(check)


# --- bad input ---


def small(twin, **changes):
    trees = changes.pop("trees", [(-1, 0, 0), (-1,)])
    batch = make_batch([3, 1], [9, 4], [[0, 1, 2], [3]])
    return dict(batch=batch, trees=twin.make_trees(trees)) | changes


BAD_PLANS = {
    "trees: expected Trees, from make_trees, got list": lambda twin: small(twin) | dict(trees=[[-1]]),
    "tree_lens: expected int32 \\[b=2\\], got int32 \\[1\\]": lambda twin: small(twin, trees=[(-1, 0, 0)]),
    "tree_lens: expected at least the 3 query rows of sequence 0": lambda twin: small(twin, trees=[(-1, 0), (-1,)]),
    "and at most its 4 keys, got 5 nodes": lambda twin: small(twin, trees=[(-1, 0, 0), (-1,) * 5]),
    "causal: expected True with trees": lambda twin: small(twin, causal=False),
    "causal: expected True or False": lambda twin: small(twin, causal=1),
    "window_size: expected": lambda twin: small(twin, window_size=(-2, 0)),
    "block_size: expected a positive int": lambda twin: small(twin, block_size=0),
    "block_table: expected int32 \\[b, m\\], got None": lambda twin: small(twin, batch=make_batch([3, 1], [9, 4])),
}


@each_twin
@pytest.mark.parametrize("message", BAD_PLANS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bad_plan_is_refused_by_name(twin, message):
    with pytest.raises(ValueError, match=message):
        twin.plan(**dict(block_size=4) | BAD_PLANS[message](twin))


BAD_TREES = {
    "parents: expected a node before it, or -1, for node 1 of sequence 0, got 1": [[-1, 1]],
    "parents: expected a node before it, or -1, for node 0 of sequence 1, got -2": [[-1], [-2]],
    "parents\\[0\\]: expected Python ints, got 0.5": [[0.5]],
    "parents: expected a list of trees": "tree",
    "parents: expected trees of at most 1024 nodes, got 1025": [[-1] * 1025],
}


@each_twin
@pytest.mark.parametrize("message", BAD_TREES)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bad_tree_is_refused_by_name(twin, message):
    with pytest.raises(ValueError, match=message):
        twin.make_trees(BAD_TREES[message])


BAD_CALLS = {
    "accept": {
        "drafts: expected int64 \\[t\\]": dict(drafts=torch.zeros(4)),
        "chosen: expected int64 \\[t=4\\]": dict(chosen=torch.zeros(3).long()),
        "drafts: expected at least the 4 query rows, got t=3": dict(
            drafts=torch.zeros(3).long(), chosen=torch.zeros(3).long()
        ),
        "parents: expected node 0 as the only root of sequence 0, got 2": dict(
            trees=refattn.speculative.make_trees([(-1, 0, -1), (-1,)])
        ),
        "tree_lens: expected \\[3, 1\\], as every node is a query row, got \\[4, 1\\]": dict(
            trees=refattn.speculative.make_trees([(-1, 0, 0, 0), (-1,)])
        ),
    },
    "accept_sampled": {
        "target_probs: expected \\[t=4, v\\]": dict(target_probs=torch.zeros(3, 5)),
        "target_probs: expected a floating point type": dict(target_probs=torch.zeros(4, 5).long()),
        "draft_probs: expected \\[t=4, v=5\\]": dict(draft_probs=torch.zeros(4, 6)),
        "uniforms: expected \\[t=4\\]": dict(uniforms=torch.zeros(5)),
        "uniforms: expected random numbers in \\[0, 1\\), got 1.5": dict(uniforms=torch.tensor([0, 0, 0, 1.5])),
        "uniforms: expected random numbers in \\[0, 1\\), got -0.5": dict(uniforms=torch.tensor([-0.5, 0, 0, 0])),
        "uniforms: expected random numbers in \\[0, 1\\), got nan": dict(uniforms=torch.full((4,), torch.nan)),
        "drafts: expected tokens in 0..4, got 0..9": dict(drafts=torch.tensor([0, 9, 0, 0])),
    },
    "compact": {
        "caches: expected a list of pools": dict(caches=torch.zeros(5, 4, 2)),
        "caches\\[0\\]: expected a pool \\[n, p=4, ...\\]": dict(caches=[torch.zeros(5, 3, 2)]),
        "caches\\[0\\]: expected at least 3 blocks": dict(caches=[torch.zeros(2, 4, 2)]),  # node 2 is in block 2
        "block_table: expected entries of at least 0 .* move in sequence 0, got -1 in column 2": dict(
            batch=make_batch([3, 1], [9, 4], [[0, 1, -1], [3]])
        ),
        "accepted: expected an Accepted": dict(accepted=[0]),
        "accepted.nodes: expected rising nodes in 0..2 of sequence 0, got \\[2, 1\\]": dict(accepted=([2, 1, 0], 2)),
        "accepted.nodes: expected rising nodes in 0..2 of sequence 0, got \\[0, 3\\]": dict(accepted=([0, 3, 0], 2)),
        "accepted.lens: expected at most \\[3, 1\\] nodes, got \\[4, 1\\]": dict(accepted=([0, 1, 2], 4)),
    },
    "accepted_batch": {
        "lens: expected int32 \\[b=2\\]": dict(lens=torch.zeros(3, dtype=torch.int32)),
        "lens: expected at most": dict(lens=torch.tensor([4, 0], dtype=torch.int32)),
    },
    "positions": {"num_tokens: expected at least 4": dict(num_tokens=3)},
}


def accepted_of(nodes, count) -> Accepted:
    return Accepted(
        torch.tensor([nodes, [0, -1, -1]], dtype=torch.int32),
        torch.tensor([count, 1], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
    )


@each_twin
@pytest.mark.parametrize(
    ("function", "message"), [(name, message) for name, bad in BAD_CALLS.items() for message in bad]
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bad_call_is_refused_by_name(twin, function, message):
    drafts = torch.zeros(4).long()
    arguments = (
        small(twin)
        | {
            "accept": dict(drafts=drafts, chosen=drafts),
            "accept_sampled": dict(drafts=drafts, target_probs=torch.full((4, 5), 0.2), uniforms=torch.zeros(4)),
            "compact": dict(caches=[torch.zeros(5, 4, 2)], accepted=accepted_of([0, 2, -1], 2), block_size=4),
            "accepted_batch": dict(lens=torch.tensor([1, 1], dtype=torch.int32)),
            "positions": dict(num_tokens=4),
        }[function]
    )
    getattr(twin, function)(**arguments)
    bad = dict(BAD_CALLS[function][message])
    if isinstance(bad.get("accepted"), tuple):
        bad["accepted"] = accepted_of(*bad["accepted"])
    caches = bad.get("caches", arguments.get("caches", []))
    before = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match=message):
        getattr(twin, function)(**arguments | bad)
    assert all(map(torch.equal, caches, before))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_attention_refuses_what_does_not_fit_the_plan(twin):
    inputs = build(Case("small", ((3, 9), (1, 4)), heads=(4, 2), head_size=8, block_size=4))
    plan = twin.plan(inputs.batch, block_size=4, trees=twin.make_trees([(-1, 0, 0), (-1,)]))
    tensors = (inputs.query, inputs.key_cache, inputs.value_cache)
    for message, arguments in (
        ("plan: expected a Plan or a TreePlan, from speculative.plan, got None", (*tensors, None)),
        ("query: expected at least 4 rows", (inputs.query[:3], *tensors[1:], plan)),
        ("key_cache: expected at least", (inputs.query, *(x[:2] for x in tensors[1:]), plan)),
    ):
        with pytest.raises(ValueError, match=message):
            twin.attention(*arguments)
    with pytest.raises(ValueError, match="whole: expected a Plan over pages with positions, got None"):
        dataclasses.replace(plan, whole=None)
    with pytest.raises(ValueError, match="depths: expected int32 \\[b=2, w=3\\]"):
        dataclasses.replace(plan, depths=plan.depths[:, :1])
    with pytest.raises(ValueError, match="prefix: expected the \\[6, 3\\] keys before the trees, got \\[9, 4\\]"):
        dataclasses.replace(plan, prefix=plan.whole)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("package", [refattn.speculative, fastattn.speculative], ids=["ref", "fast"])
def test_trees_are_not_blamed_for_the_rows_of_a_batch(package):
    trees = package.make_trees([[-1, 0], [-1]])
    batch = refattn.metadata.make_batch([2, 1], [9, 4], [[0, 1, 2], [3]])
    for starts in ((0, 3, 2), (1, 2, 3)):
        rows = torch.tensor(starts, dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seqlens_q: expected to rise from 0, got "):
            package.plan(dataclasses.replace(batch, cu_seqlens_q=rows), block_size=4, trees=trees)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("package", [refattn.speculative, fastattn.speculative], ids=["ref", "fast"])
def test_nodes_are_not_moved_in_memory_that_they_share(package):
    trees = package.make_trees([[-1, 0, 0]])
    batch = refattn.metadata.make_batch([3], [4], [[0]])
    accepted = package.accept(batch, trees, torch.tensor([5, 6, 7]), torch.tensor([7, 0, 9]))
    pool = torch.zeros(1, 1, 8).expand(1, 4, 8)
    with pytest.raises(ValueError, match=r"caches\[0\]: expected memory for each element, got strides of \(8, 0, 1\)"):
        package.compact([pool], batch, trees, accepted, block_size=4)
