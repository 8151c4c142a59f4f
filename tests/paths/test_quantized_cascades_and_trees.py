"""Cascades and drafted trees over 8 bits: levels merge, nodes see their branches, and scales stay where they belong."""

import importlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

import refattn.cascade
import refattn.chunked_prefill
import refattn.quantized
import refattn.speculative
from refattn.batch import Prefix
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import HARMLESS, POISON, Case, masks_by_hand, plan_and_attend
from tests.helpers.kernels_present import PRESENT, Kernel
from tests.helpers.shared_prefixes import SHARED
from tests.helpers.steps import record
from tests.helpers.stored import E4M3, E5M2, KINDS, Stored, attended_by_hand, over_quantized, store
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree
from tests.helpers.trees import case_of, draw_tree, masks_of_trees

LEFT = 29  # tokens before a query that a window shows


@dataclass(frozen=True)
class Step:
    """A step whose plan is that of a cascade, or of drafted trees.

    Attributes:
        path: whose plan it has.
        case: the lengths and sizes.
        shape: the prefixes, or the trees.
    """

    path: str
    case: Case
    shape: list

    def arguments(self, device: str) -> dict[str, Any]:
        """Return what the plan takes."""
        if self.path == "cascade":
            return dict(prefixes=[Prefix(*prefix) for prefix in self.shape])
        return dict(trees=refattn.speculative.make_trees(self.shape, device=device))

    def masks(self, left: int = -1) -> list[torch.Tensor]:
        """Draw who sees whom, one pair at a time."""
        if self.path == "speculative":
            return masks_of_trees(self.case, self.shape, left)
        return masks_by_hand(self.case, lambda i, j: j <= i and (left < 0 or i - left <= j))

    def store(self, kind: str, *, left: int = -1, poison=POISON, **options: Any) -> Stored:
        """Lay the step out in 8 bits: a prefix has the blocks of its first sequence; what no query sees is spoilt."""
        per = options.pop("per", "head" if self.path == "cascade" else "sequence")
        stored = store(self.case, kind, poison=poison, per=per, **options)
        stored.batch = self.share(stored.batch, stored.keys, stored.values)
        if poison is POISON:
            spoil(stored, self.masks(left))
        return stored

    def share(self, batch, *rows: list[torch.Tensor]):
        """Give the members of each prefix the blocks of its first sequence, and its keys and values."""
        table = batch.block_table.clone()
        for first, last, end in self.shape if self.path == "cascade" else ():
            blocks = end // self.case.block_size
            table[first:last, :blocks] = table[first, :blocks].clone()
            for row in rows:
                for i in range(first, last):
                    row[i][:end] = row[first][:end].clone()
        return replace(batch, block_table=table)


def spoil(stored: Stored, masks: list[torch.Tensor]) -> None:
    """Put quantized values of NaN, or scales of NaN, into each slot that no query sees."""
    n, p = stored.key_cache.shape[:2]
    seen = torch.zeros(n * p, dtype=torch.bool)
    for mask, blocks in zip(masks, stored.batch.block_table.tolist(), strict=True):
        for j in mask.any(0).nonzero().flatten().tolist():
            seen[blocks[j // p] * p + j % p] = True
    unseen = ~seen.view(n, p).to(stored.key_cache.device)
    for pool in (stored.key_cache, stored.value_cache):
        if pool.is_floating_point() and pool.itemsize > 1:
            pool[unseen] = torch.nan
        else:
            pool.view(torch.uint8)[unseen] = 0x7F
    if isinstance(stored.scales, Int8Scales):
        stored.scales.key[unseen] = torch.nan


STEPS = {
    **{f"cascade-{name}": Step("cascade", *SHARED[name]) for name in ("tree", "prefills-and-decodes", "odd-blocks")},
    "cascade-silent": Step("cascade", *SHARED["silent-and-empty"]),
    "trees": Step(
        "speculative",
        case_of(
            trees := [(-1, 0, 0, 1, 2, 2), (), (-1, 0, 1), (-1, 0, 0, 0), (-1, -1, 0, 1, 1)],
            contexts=(17, 40, 33, 0, 64),
            heads=(4, 2),
        ),
        trees,
    ),
    "large-trees": Step(
        "speculative",
        case_of(
            trees := [draw_tree(17, 1), draw_tree(66, 5)],
            contexts=(30, 5),
            heads=(3, 1),
            head_size=96,
            value_head_size=64,
            block_size=24,
            layout="HND",
        ),
        trees,
    ),
    "tips": Step(  # a tree that grows; its older nodes are in the cache
        "speculative",
        case_of(trees := [(-1, 0, 0, 1, 2, 2), draw_tree(66, 5), (-1,)], contexts=(7, 30, 0), queries=2, heads=(4, 2)),
        trees,
    ),
}
FEW = ["cascade-tree", "trees"]
ON_CPU = PRESENT[0].name == "cpu"
KERNELS = [kernel for kernel in PRESENT if kernel.name in ("cpu", "triton")]
WHO = [*([None] if ON_CPU else []), *KERNELS]  # None is the reference
each_who = pytest.mark.parametrize("who", WHO, ids=lambda who: who.name if who else "reference")
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"], ids=["ref", "fast"])


def call(package: str, step: Step, stored: Stored, **options: Any) -> Any:
    """Plan the step, attend over its quantized values, and return outputs and log-sum-exps."""
    arguments = step.arguments(str(stored.query.device))
    return plan_and_attend(
        over_quantized(package, step.path),
        *stored.tensors,
        **arguments,
        **options,
        scales=stored.scales,
        return_lse=True,
    )


def forced(who: Kernel | None) -> tuple[str, Any]:
    """Return the package that computes, and what asks for its kernel."""
    return ("refattn", nullcontext()) if who is None else ("fastattn", who.forced())


# --- who sees whom, and memory that no query may see ---


@each_who
@pytest.mark.parametrize(
    ("kind", "left", "step"),
    [
        pytest.param(kind, left, step, id=f"{kind}{'' if left < 0 else '-in-a-window'}-{name}")
        for i, (name, step) in enumerate(STEPS.items())
        for j, (kind, left) in enumerate((("e4m3", -1), ("int8", LEFT)))
        if name in FEW or i % 2 == j
    ],
)
def test_poison(who, step, kind, left, device):
    """NaN in blocks that no sequence owns, past sequences, before windows, and in nodes of no row's branch."""
    package, context = forced(who)
    options = dict(dtype=torch.float32 if who is None else who.dtypes[0], left=left, device=device)
    with context:
        answers = [
            call(package, step, step.store(kind, poison=poison, **options), window_size=(left, 0))
            for poison in (HARMLESS, POISON)
        ]
    for clean, dirty in zip(*answers, strict=True):
        assert torch.equal(clean, dirty)


# --- the formula ---


@each_step
@pytest.mark.parametrize(("kind", "left"), [*zip(KINDS, [-1, LEFT, LEFT, -1], strict=True)])
@pytest.mark.skipif(not ON_CPU, reason="in float64, on a CPU")
def test_formula(step, kind, left):
    step = replace(step, case=replace(step.case, head_size=16, value_head_size=24))
    stored = step.store(kind, left=left, dtype=torch.float64)
    expected = attended_by_hand(stored, step.masks(left))
    for package in ("refattn", "fastattn"):
        for one, other in zip(call(package, step, stored, window_size=(left, 0)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- the twins ---


def hold(kernel: Kernel, step: Step, stored: Stored, **options: Any) -> None:
    arguments = dict(step.arguments(str(stored.query.device)), **options, scales=stored.scales)
    with kernel.forced():
        kernel.check(assert_twins_agree, partial(over_quantized, path=step.path), *stored.in_bytes, **arguments)


@each_kernel
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "e4m3") for name in STEPS),
        *(("trees", kind) for kind in KINDS if kind != "e4m3"),
        ("cascade-tree", "int8"),
    ],
)
def test_twins(kernel, name, kind, device):
    step = STEPS[name]
    for dtype in kernel.dtypes[:1] if kernel.is_interpreted else kernel.dtypes:
        hold(kernel, step, step.store(kind, dtype=dtype, device=device))


@each_kernel
@pytest.mark.parametrize(
    ("name", "per", "round_query"),
    [("cascade-tree", "number", True), ("trees", "head", False)],
    ids=["cascade-tree-number", "trees-query-as-it-is"],
)
def test_scales_of_fp8(kernel, per, round_query, name, device):
    stored = STEPS[name].store("e4m3", per=per, round_query=round_query, dtype=kernel.dtypes[0], device=device)
    hold(kernel, STEPS[name], stored)


@each_kernel
@each_kind
def test_a_chain_answers_as_a_chunk_over_the_same_bytes(kernel, kind, device):
    """From 88 to 256 keys, where others read the same bytes in two ways (vLLM 54035)."""
    case = Case("chains", tuple((5, s) for s in (88, 97, 129, 256)), heads=(4, 2), head_size=32)
    step = Step("speculative", case, [range(-1, 4)] * 4)
    stored = step.store(kind, dtype=kernel.dtypes[0], device=device)
    pools = [x.view(torch.uint8) if x.dtype in (E4M3, E5M2) else x for x in (stored.key_cache, stored.value_cache)]
    chunk = partial(plan_and_attend, over_quantized("refattn", "chunked_prefill"))
    with kernel.forced():
        answer = call("fastattn", step, stored)
    assert_matches_reference(*answer, chunk, stored.query, *pools, stored.batch, scales=stored.scales)


@each_kernel
@pytest.mark.parametrize(("kind", "heads"), [("int8", (4, 2)), ("e4m3", (32, 2))], ids=["few-rows", "many-rows"])
def test_a_captured_cascade_goes_on(kernel, kind, heads, device):
    """Recorded once and replayed with the next token of each sequence, whose lengths are written to in place.

    Without a GPU a kernel reads the tables of the plan again all the same, but for the CPU's, whose plan says how the
    work is shared out.
    """
    step = Step("cascade", Case("c", ((1, 70), (1, 52), (1, 66), (1, 130)), heads=heads), [(0, 4, 48)])
    stored = step.store(kind, dtype=kernel.dtypes[0], device=device)
    twin, arguments = over_quantized("fastattn", step.path), step.arguments(device)
    stored.batch.seq_lens.sub_(2)
    plan = twin.plan(stored.batch, block_size=16, **arguments)
    with kernel.forced():
        replay = record(
            lambda: twin.attention(*stored.tensors[:3], plan, scales=stored.scales, return_lse=True), device
        )
        for _ in range(3):
            if kernel.name == "cpu":
                plan = twin.plan(stored.batch, block_size=16, **arguments)
            out, lse = replay()
            pools = [x.view(torch.uint8) if x.dtype == E4M3 else x for x in (stored.key_cache, stored.value_cache)]
            assert_matches_reference(
                out,
                lse,
                partial(plan_and_attend, over_quantized("refattn", step.path)),
                stored.query,
                *pools,
                stored.batch,
                **arguments,
                scales=stored.scales,
            )
            stored.batch.seq_lens.add_(1)
            if kernel.name != "cpu":
                plan.levels[-1].batch.seq_lens.add_(1)


# --- bad input ---


def good(package: str) -> dict[str, Any]:
    """Return a cascade and the arguments of a call over it."""
    stored = STEPS["cascade-tree"].store("e4m3")
    plan = over_quantized(package, STEPS["cascade-tree"].path).plan(
        stored.batch, block_size=16, **STEPS["cascade-tree"].arguments("cpu")
    )
    return dict(
        zip(("query", "key_cache", "value_cache"), stored.tensors, strict=False), plan=plan, scales=stored.scales
    )


def per_sequence(**changes: torch.Tensor) -> Callable[[dict], dict]:
    return lambda arguments: dict(scales=replace(arguments["scales"], **changes))


BAD = {
    "plan: expected a Plan, a CascadePlan or a TreePlan, got None": lambda arguments: dict(plan=None),
    "plan: expected a Plan, a CascadePlan or a TreePlan, got list": lambda arguments: dict(
        plan=list(arguments["plan"].levels)
    ),
    "scales.key: expected a number or float32 [hk=2], as a group of a cascade is of several sequences, got float32 [6, "
    "2]": per_sequence(key=torch.ones(6, 2)),
    "scales.value: expected a number or float32 [hk=2], as a group of a cascade is of": per_sequence(
        value=torch.ones(6, 2)
    ),
    "scales.query: expected a number or float32 [hk=2], as a group of a cascade is of": per_sequence(
        query=torch.ones(6, 2)
    ),
    "scales.key: expected a number or float32 [hk=2] or [b=6, hk=2], got float32 [3]": per_sequence(key=torch.ones(3)),
    "key_cache: expected at least": lambda arguments: dict(
        key_cache=arguments["key_cache"][:2], value_cache=arguments["value_cache"][:2]
    ),
    "key_cache: expected blocks of 16 tokens, as in the plan, got p=8": lambda arguments: {
        name: arguments[name][:, :8] for name in ("key_cache", "value_cache")
    },
    "query: expected at least 6 rows": lambda arguments: dict(query=arguments["query"][:3]),
    "scales: expected Fp8Scales or Int8Scales, got None": lambda arguments: dict(scales=None),
}


@each_package
@pytest.mark.parametrize("message", BAD)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_named_and_nothing_is_written(package, message):
    attention, arguments = importlib.import_module(f"{package}.quantized").attention, good(package)
    out = torch.full_like(arguments["query"], torch.nan)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        attention(**{**arguments, **BAD[message](arguments), "out": out})
    assert out.isnan().all()
    attention(**arguments, out=out)
    assert out.isfinite().all()


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_scales_of_a_batch_of_trees_are_as_many_as_its_sequences(package):
    step = STEPS["trees"]
    stored = step.store("e4m3")
    for rows in (4, 6):
        stored.scales = Fp8Scales(torch.ones(rows, 2), 1.0)
        with pytest.raises(ValueError, match=r"^scales.key: expected a number or float32 \[hk=2\] or \[b=5, hk=2\]"):
            call(package, step, stored)
