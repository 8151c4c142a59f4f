"""Drafted trees over latents, quantized or not: who sees whom, what no query sees, the formula, and every kernel."""

import importlib
import math
import re
from contextlib import nullcontext
from functools import partial
from types import ModuleType

import pytest
import torch

import fastattn.mla
import fastattn.speculative
import refattn.mla
import refattn.speculative
from fastattn import metadata
from fastattn.kernels import order
from fastattn.kernels.problem import attention_problem
from refattn import keys
from refattn.options import AttentionOptions
from refattn.trees import Trees
from tests.helpers.batches import HARMLESS, POISON, Case
from tests.helpers.kernels_present import PRESENT_FOR_LATENTS
from tests.helpers.latents import (
    EVEN,
    OF_LATENTS,
    OPTIONS,
    RANK,
    REAL,
    SCALE,
    SMALL,
    Latents,
    assert_latents_seen,
    filled,
    in_8_bits,
)
from tests.helpers.steps import ROOM, record
from tests.helpers.tolerance import assert_matches_reference
from tests.helpers.trees import case_of, draw_tree, masks_of_trees
from twinattn.kit.tolerance import on_cpu

LEFT = 9  # tokens before a node that a window shows
TREES = [(-1, 0, 0, 1, 2, 2), (), (-1, 0, 1), draw_tree(17, 1), (-1, -1, 0, 1, 1)]
CASES = {  # and how many of their nodes are query rows
    "verification": (TREES, case_of(TREES, contexts=(17, 40, 33, 0, 64), heads=(4, 1))),
    "tips": (TREES, case_of(TREES, contexts=(7, 30, 0, 16, 2), heads=(16, 1), queries=2)),
    "two-words": ([draw_tree(66, 5), (-1,)], case_of([draw_tree(66, 5), (-1,)], contexts=(5, 30), heads=(2, 1))),
    "odd-blocks": (TREES[2:4], case_of(TREES[2:4], contexts=(40, 7), heads=(20, 1), block_size=24)),
}
IN_TREES = OPTIONS | {"window": dict(window=LEFT, alibi_slopes=True)}
KERNELS = [kernel for kernel in PRESENT_FOR_LATENTS if kernel.name in ("cpu", "triton")]
READERS = [
    pytest.param("refattn", nullcontext, id="ref"),
    *(pytest.param("fastattn", kernel.forced, id=kernel.name) for kernel in KERNELS),
]
each_reader = pytest.mark.parametrize(("package", "forced"), READERS)
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"], ids=["ref", "fast"])
# NumPy multiplies for the interpreter, by bits that depend on where a row stands; and it would take minutes.
each_compiled = pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if not kernel.is_interpreted], ids=lambda kernel: kernel.name
)
each_case = pytest.mark.parametrize("name", CASES)
each_store = pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn], ids=["numbers", "quantized"])


def modules(package: str) -> tuple[ModuleType, ModuleType]:
    return tuple(importlib.import_module(f"{package}.{path}") for path in ("mla", "speculative"))


def verify(package, query, cache, batch, *, trees, window=-1, latent_rank=RANK, return_lse=True, out=None, **options):
    path, drafts = modules(package)
    plan = drafts.plan(batch, block_size=cache.shape[1], trees=trees, window_size=(window, 0))
    of_cache = dict(latent_rank=latent_rank, cache_scale=options.pop("cache_scale", 1.0))
    return path.attention(query, cache, plan, AttentionOptions(**options), **of_cache, return_lse=return_lse, out=out)


def lay_out(name: str, kind: torch.dtype | None, *, window: int = -1, poison=POISON, **arguments) -> tuple:
    """Lay a case out, with garbage in each slot that no query row sees; return it with what an attention takes."""
    parents, case = CASES[name]
    make = Latents if kind is None else partial(in_8_bits, kind=kind)
    given = make(case, poison=poison, **arguments)
    garbage = torch.tensor(poison, dtype=torch.float32).to(given.cache.dtype).to(given.cache.device)
    for i, (mask, (_, s)) in enumerate(zip(masks_of_trees(case, parents, window), case.lens, strict=True)):
        for j in set(range(s)) - set(mask.any(0).nonzero().flatten().tolist()):
            given.cache[given.batch.block_table[i, j // case.block_size], j % case.block_size] = garbage[
                j % len(poison)
            ]
    trees = refattn.speculative.make_trees(parents, device=str(given.cache.device))
    fixed = dict(trees=trees, window=window) | (dict(cache_scale=OF_LATENTS) if kind is not None else {})
    return given, (given.absorbed, given.cache, given.batch), fixed


# --- the mask, read out ---


@pytest.mark.covers("D156", "D223")
@each_reader
@each_case
@pytest.mark.parametrize("window", [-1, 1, LEFT])
def test_a_node_sees_the_latents_of_its_branch(package, forced, name, window, device):
    parents, case = CASES[name]
    fixed = dict(trees=refattn.speculative.make_trees(parents, device=device), window=window, softmax_scale=1.0)
    with forced():
        assert_latents_seen(partial(verify, package, **fixed), case, masks_of_trees(case, parents, window), device)


# --- memory that no query may see ---


@each_reader
@pytest.mark.parametrize(("name", "window"), [("verification", LEFT), ("tips", -1), ("two-words", -1)])
@each_store
def test_no_bit_depends_on_what_no_row_sees(package, forced, name, window, kind, device):
    """Blocks and slots of others, keys before a window, unused columns, and nodes of no tip's branch."""
    answers = []
    for poison in (POISON, HARMLESS):
        _, tensors, fixed = lay_out(name, kind, window=window, poison=poison, device=device)
        with forced():
            answers.append(verify(package, *tensors, **fixed, softmax_scale=SCALE))
    for poisonous, harmless in zip(*answers, strict=True):
        assert torch.equal(poisonous, harmless)


@each_reader
def test_nan_that_a_node_sees_comes_out(package, forced, device):
    """In the root of one tree, before another; the third has none."""
    given = Latents(Case("nan", ((4, 20), (3, 23), (2, 9)), heads=(3, 1)), device=device)
    table = given.batch.block_table
    given.cache[table[0, 1], 0, 3] = given.cache[table[1, 0], 5, RANK] = math.nan
    trees = refattn.speculative.make_trees([(-1, 0, 0, 1), (-1, 0, 0), (-1, 0)], device=device)
    with forced():
        out, lse = verify(package, given.absorbed, given.cache, given.batch, trees=trees, softmax_scale=SCALE)
    assert out[:7].isnan().any(-1).all() and lse[:7].isnan().all()
    assert out[7:].isfinite().all() and lse[7:].isfinite().all()


# --- the twins ---


def hold(tensors: tuple, fixed: dict, **options) -> None:
    """Hold the twin to the reference by the one tolerance; and into memory, and alone."""
    out, lse = verify("fastattn", *tensors, **fixed, **options)
    assert_matches_reference(out, lse, partial(verify, "refattn", **on_cpu(fixed)), *tensors, **options)
    memory = torch.full_like(out, math.nan)
    assert verify("fastattn", *tensors, **fixed, return_lse=False, out=memory, **options) is memory
    assert torch.equal(memory, out)


@pytest.mark.parametrize(
    ("kernel", "name", "options"),
    [
        pytest.param(kernel, name, options, id=f"{kernel.name}-{name}-{options}")
        for kernel in KERNELS
        for name in CASES
        for options in IN_TREES
        if options == "plain" or (name == "verification" and not kernel.is_interpreted) or options == "everything"
    ],
)
@each_store
def test_twins_agree(kernel, name, options, kind, device):
    options = dict(IN_TREES[options])
    arguments = dict(window=options.pop("window", -1), device=device, dtype=kernel.dtypes[0])
    _, tensors, fixed = lay_out(name, kind, **arguments)
    with kernel.forced():
        hold(tensors, fixed, **filled(options, CASES[name][1].heads[0], device))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [pytest.param(kernel, dtype, id=f"{kernel.name}-{dtype}") for kernel in KERNELS for dtype in kernel.dtypes],
)
@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["numbers", "e4m3", "e5m2"])
def test_twins_agree_in_every_type(kernel, dtype, kind, device):
    sizes = EVEN if kernel.is_interpreted or device == "cpu" else REAL
    given, tensors, fixed = lay_out("verification", kind, device=device, dtype=dtype, sizes=sizes)
    with kernel.forced():
        hold(tensors, fixed | dict(latent_rank=sizes.rank), softmax_scale=SCALE)


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in PRESENT_FOR_LATENTS if not kernel.is_interpreted], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize(("nodes", "heads"), [(4, 4), (5, 16), (16, 20), (66, 2)])
def test_trees_of_deepseeks_size_agree(kernel, nodes, heads, device):
    """As many nodes for each sequence, in tiles of 16 rows and of 64; a tree without anything before it."""
    parents = [draw_tree(nodes, seed) for seed in range(4)]
    case = case_of(parents, contexts=(700, 64, 0, 33), heads=(heads, 1), block_size=64)
    given = Latents(case, device=device, dtype=kernel.dtypes[0], sizes=REAL)
    fixed = dict(trees=refattn.speculative.make_trees(parents, device=device), latent_rank=REAL.rank)
    options = filled(OPTIONS["sinks"], heads, device)
    with kernel.forced():
        kernel.check(hold, (given.absorbed, given.cache, given.batch), fixed, **options)


@each_compiled
@pytest.mark.parametrize("window", [-1, LEFT])
@each_store
def test_trees_are_captured_once_and_replayed_for_any_others(kernel, window, kind, device):
    """Other trees, longer contexts: tables and masks are made inside of the graph; padding rows hold 0."""
    dtype, rank, width = kernel.dtypes[0], SMALL.rank, SMALL.rank + SMALL.rope
    steps = [
        [((-1, 0, 0), 30), ((-1,), 5)],
        [((-1, 0, 0, 1, 2, 2), 290), ((-1, 0), 0), ((-1, 0, 1, 2), 77)],
        [((-1, 0, 1), 64)],
    ]
    query = torch.zeros(24, 4, width, dtype=dtype, device=device)
    pool = torch.zeros(80, 16, width, dtype=dtype if kind is None else kind, device=device)
    buffers = metadata.make_buffers(5, device=device, **ROOM)
    parents = torch.full((5, 6), -1, dtype=torch.int32, device=device)
    trees = Trees(parents, torch.zeros(5, dtype=torch.int32, device=device))
    fixed = dict(window=window) | (dict(cache_scale=OF_LATENTS) if kind is not None else {})

    def step() -> torch.Tensor:
        call = partial(verify, "fastattn", query, pool, buffers, trees=trees, **fixed)
        return call(latent_rank=rank, return_lse=False, softmax_scale=SCALE)

    replay = None
    with kernel.forced():
        for i, drawn in enumerate(steps):
            case = Case("step", tuple((len(t), s + len(t)) for t, s in drawn), heads=(4, 1))
            make = partial(in_8_bits, kind=kind) if kind is not None else Latents
            given = make(case, device=device, dtype=dtype, seed=i, sizes=SMALL._replace(spare=0))
            rows = len(given.query)
            query.zero_()
            query[:rows] = given.absorbed
            pool.copy_(torch.full(pool.shape, math.nan))
            pool[: len(given.cache)] = given.cache
            metadata.refill(buffers, given.batch)
            made = refattn.speculative.make_trees([t for t, _ in drawn], device=device)
            trees.lens.zero_()
            trees.lens[: len(made.lens)] = made.lens
            parents[: len(made.lens), : made.max_len] = made.parents
            replay = replay or record(step, device)
            out = replay()
            tensors = on_cpu((given.absorbed, given.cache, given.batch))
            reference = partial(verify, "refattn", **on_cpu(dict(trees=made, latent_rank=rank, **fixed)))
            _, lse = reference(*tensors, softmax_scale=SCALE)
            assert_matches_reference(out[:rows], lse, reference, *tensors, softmax_scale=SCALE)
            assert not out[rows:].any(), "a padding row holds something"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_chooser_says_who_verifies_trees(device_type, monkeypatch):
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    given, (query, cache, _), fixed = lay_out("verification", None)
    plan = fastattn.speculative.plan(given.batch, block_size=given.block_size, trees=fixed["trees"])
    options = AttentionOptions(softmax_scale=SCALE)
    problem = attention_problem(query, keys.Latents(cache, RANK), plan, options)
    if device_type == "cpu":
        assert "chosen: cpu" in order.explain(problem)
        return
    on_gpu = problem._replace(device=torch.device("cuda"))
    assert order.priorities(on_gpu) == ("flash_mla", "triton", "fa3"), "FlashAttention-3 splits no keys"
    assert order.priorities(on_gpu._replace(num_seqs=256, even=True)) == ("flash_mla", "fa3", "triton")
    assert order.priorities(on_gpu._replace(max_query_len=4))[0] == "triton"  # 16 rows
    assert order.unsupported_reason("fa4", problem) == "does not compute attention to latents under drafted trees"


# --- bad input ---


def of_others(plan):
    return refattn.mla.plan_prefill(plan.whole.batch, block_size=plan.whole.block_size, workspace=40)


BAD = {
    "plan: expected a Plan, a CascadePlan or a TreePlan, got None": dict(plan=lambda plan: None),
    "plan: expected a Plan, a CascadePlan or a TreePlan, got refattn.plan.PrefillPlan": dict(plan=of_others),
    "query: expected at least 31 rows": dict(query=lambda x: x[:30]),
}


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "changes"), BAD.items(), ids=BAD)
def test_bad_input_is_named(package, message, changes):
    given, (query, cache, _), fixed = lay_out("verification", None, poison=HARMLESS)
    path, drafts = modules(package)
    plan = drafts.plan(given.batch, block_size=given.block_size, trees=fixed["trees"])
    arguments = dict(query=query, cache=cache, plan=plan, options=AttentionOptions(softmax_scale=SCALE))
    arguments |= dict(latent_rank=RANK, cache_scale=1.0, out=torch.full((33, 4, RANK), 7.0))
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        path.attention(**arguments)
    assert (arguments["out"] == 7.0).all()
