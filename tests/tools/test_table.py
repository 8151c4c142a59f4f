"""The table of paths, `tests/table.py`, has all of them: those of the packages, of kit, search and benchmark."""

import inspect
from itertools import pairwise

import pytest
import torch

from fastattn.kernels import order
from fastattn.kernels.problem import Problem
from tests.helpers.batches import build
from tests.helpers.kernels_present import has_to_compute
from tests.helpers.legal_calls import MODULES, public_functions
from tests.helpers.twin_files import OVER_STATES, TWINS
from tests.helpers.twin_files import PATHS as FILES
from tests.table import CASE, PATHS, PLANS, SPECS, rule
from twinattn.bench.rows import rows
from twinattn.kit import example, workload
from twinattn.kit.operations import OPERATIONS
from twinattn.kit.search import trial


def test_every_path_of_the_packages_is_in_the_table():
    """Each function that attends: with a plan of keys, and a log-sum-exp."""
    attend = {
        name
        for name, function in public_functions("refattn")
        if {"plan", "return_lse"} <= {*inspect.signature(function).parameters}
    }
    assert {path.attention for path in PATHS.values()} == attend | {"interval.attention"}
    assert {path.file for path in PATHS.values()} == {*FILES}
    assert {*MODULES} == {*TWINS}


@pytest.mark.parametrize(("name", "paths"), [("kit", {*example.PATHS, *OPERATIONS}), ("search", {*workload.PATHS})])
def test_kit_and_search_have_every_path(name, paths):
    assert paths >= {*FILES, "mla_prefill", *OVER_STATES}
    assert {*workload.ATTENTION} == {*FILES, "mla_prefill", *OVER_STATES}
    assert {plan for plans in workload.PLANS.values() for plan in plans} <= {*FILES}
    assert {*trial.REFERENCE} == {*TWINS}


def test_every_path_is_measured():
    assert {row.path for row in rows("cuda", quick=True)} >= {*FILES, *OVER_STATES}
    assert {row.path for row in rows("cpu", quick=True)} >= {*FILES} - {"context_parallel"}  # it takes several GPUs


def test_it_is_said_of_every_kernel_what_it_has_to_compute():
    problem = Problem("attend", torch.device("cpu"), torch.float16, "pages", 1, False, 4, 2, 64, 64, 16, 1, 100, 3)
    for name in {*order.NAMES} - {"torch", "flash_qla", "flash_mla"}:  # these attend to nothing, or to latents alone
        assert has_to_compute(name, problem) in (True, False)
    with pytest.raises(AssertionError):
        has_to_compute("another", problem)


def test_plans_have_a_rule_and_specs_follow_from_it():
    """The pictures of the docstring of `refattn.masks`, by the rule of the table."""

    def drawn(**arguments):
        sees = rule(**arguments)
        return ["".join(str(int(sees(i, j))) for j in range(5)) for i in range(2, 5)]

    assert drawn() == ["11100", "11110", "11111"]
    assert drawn(window_size=(1, 0)) == ["01100", "00110", "00011"]
    assert drawn(chunk_size=2) == ["00100", "00110", "00001"]
    assert drawn(causal=False) == ["11111", "11111", "11111"]
    assert drawn(causal=False, window_size=(0, 1)) == ["00110", "00011", "00001"]
    assert {path for path, _ in PLANS.values()} | {spec.name for spec in SPECS} <= {*FILES}


def test_a_prefill_of_the_table_has_its_context_in_several_chunks():
    path, batch = PATHS["mla-prefill"], build(CASE).batch
    chunks = [chunk.plan.batch.seq_lens for chunk in path.made_plan("refattn", batch, 16).chunks]
    assert len(chunks) == 2 and all((a >= b).all() for a, b in pairwise(chunks)) and chunks[-1].any()
