"""Five proofs of every path, from what it promises; and that the plans of the twins are the same."""

from importlib import import_module

import pytest
import torch

from fastattn import dispatch
from refattn.options import AttentionOptions
from tests.helpers.batches import build, first_keys
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.tolerance import assert_matches_reference
from tests.table import CASE, ODD, PATHS, SPECS, each_package, each_path
from twinattn.kit import prepare
from twinattn.kit.tolerance import on_cpu

each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
OF_ONE_RANK = [path for path in PATHS if PATHS[path].keys != "ranks"]
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


# --- every storage ---


def hold(path, inputs, **options):
    """Hold the twin to the reference over a batch that is laid out in the storage of a path."""
    batch = PATHS[path].batch(inputs)

    def reference(*, return_lse, **tensors):
        return PATHS[path].attend("refattn", on_cpu(batch), tensors, return_lse=return_lse)

    answer = PATHS[path]("fastattn", inputs, return_lse=True, **options)
    assert_matches_reference(*answer, reference, **PATHS[path].tensors(inputs))


@pytest.mark.parametrize(("path", "kernel"), every_pair_on_cpu(PATHS, PRESENT), ids=str)
def test_twins_agree_in_every_type(path, kernel, device):
    for dtype in kernel.dtypes:
        with kernel.forced():
            kernel.check(hold, path, build(CASE, device=device, dtype=dtype))


@pytest.mark.parametrize(("path", "kernel"), every_pair_on_cpu(OF_ONE_RANK, PRESENT), ids=str)
def test_a_plan_of_one_twin_serves_the_other(path, kernel, device):
    """A server plans once, whatever computes; the answers are those by a plan of one's own."""
    inputs = build(CASE, device=device, dtype=kernel.dtypes[0])

    def assert_served():
        hold(path, inputs, planned_by="refattn")
        answer, own = (PATHS[path]("refattn", inputs, planned_by=name) for name in ("fastattn", "refattn"))
        torch.testing.assert_close(answer, own)

    with kernel.forced():
        kernel.check(assert_served)


@each_path
def test_a_kernel_is_asked_whether_it_is_invariant(path, device, monkeypatch):
    """It may be so on this machine without being asked, so look at the question."""
    asked, compute = [], dispatch.compute

    def listen(*arguments, **more):
        asked.extend(x.batch_invariant for x in arguments if isinstance(x, AttentionOptions))
        return compute(*arguments, **more)

    monkeypatch.setattr(dispatch, "compute", listen)
    for batch_invariant in (True, False):
        PATHS[path]("fastattn", build(CASE, device=device), batch_invariant=batch_invariant)
        assert asked and {*asked} == {batch_invariant}
        asked.clear()


# --- plans ---


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
