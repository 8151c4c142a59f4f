"""Five proofs of every path, from what it promises; and that the plans of the twins are the same."""

from importlib import import_module
from types import ModuleType

import pytest
import torch

from tests.helpers.batches import build, first_keys, plan_and_attend
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.tolerance import assert_matches_reference
from tests.table import ODD, SPECS, each_package
from twinattn.kit import prepare

each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
each_odd = pytest.mark.parametrize("case", ODD, ids=str)


@each_package
@each_odd
@each_spec
def test_mask(spec, case, package, device):
    spec.check_mask(package, case, device=device)


@each_odd
@each_spec
def test_poison_of_the_reference(spec, case, device):
    spec.check_poison("refattn", case, device=device)


@pytest.mark.parametrize(("kernel", "case", "spec"), every_pair_on_cpu(PRESENT, ODD, SPECS), ids=str)
def test_poison(spec, case, kernel, device):
    with kernel.forced():
        kernel.check(
            spec.check_poison, "fastattn", case, device=device, dtype=kernel.dtypes[0], recomputed=kernel.recomputed
        )


@each_odd
@each_spec
def test_formula(spec, case):
    spec.check_formula(case)


@pytest.mark.parametrize(("kernel", "case", "spec"), every_pair_on_cpu(PRESENT, ODD, SPECS), ids=str)
def test_twins(spec, case, kernel, device):
    with kernel.forced():
        kernel.check(spec.check_twins, case, device=device, dtype=kernel.dtypes[0])


@each_package
@each_spec
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments(spec, package):
    spec.check_bad_arguments(package)


def test_every_path_has_bad_arguments():
    assert {spec.name for spec in SPECS if spec.bad_arguments} == {spec.name for spec in SPECS}


# --- plans ---


@pytest.mark.parametrize(("kernel", "case", "spec"), every_pair_on_cpu(PRESENT, ODD, SPECS), ids=str)
def test_a_plan_of_one_twin_serves_the_other(spec, case, kernel, device):
    """A server plans once, whatever computes; the answers are those by a plan of one's own."""
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    tensors = inputs.tensors if spec.paged else inputs.rows
    reference, twin = (spec.module(package) for package in ("refattn", "fastattn"))

    def by_reference(*tensors, **options):
        return plan_and_attend(reference, *tensors, **options)

    def assert_served():
        for plans, attends in ((reference, twin), (twin, reference)):
            mixed = ModuleType("mixed")
            mixed.plan, mixed.attention = plans.plan, attends.attention
            out, lse = plan_and_attend(mixed, *tensors, **spec.arguments, return_lse=True)
            assert_matches_reference(out, lse, by_reference, *tensors, **spec.arguments)

    with kernel.forced():
        kernel.check(assert_served)


@each_odd
@each_spec
def test_twins_begin_at_the_same_keys(spec, case, device):
    """Where the twin cuts nothing, as one window or one chunk holds every sequence, the reference has to start at 0."""
    inputs = build(case, device=device)
    tensors = inputs.tensors if spec.paged else inputs.rows
    plans = [
        prepare(import_module(f"{package}.{spec.name}"), *tensors, **spec.arguments).args[-2]
        for package in ("refattn", "fastattn")
    ]
    if spec.name == "cascade":
        plans = [plan.levels[-1] for plan in plans]
    ours, theirs = plans
    assert first_keys(ours) == first_keys(theirs)
    assert (ours.block_size, ours.window, ours.positions) == (theirs.block_size, theirs.window, theirs.positions)
    assert torch.equal(
        ours.batch.query_lens[ours.batch.query_lens > 0], theirs.batch.query_lens[theirs.batch.query_lens > 0]
    )
