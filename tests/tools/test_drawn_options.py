"""Every option of a path is drawn by the kit, or named with a reason: a new one fails here."""

import inspect
from dataclasses import fields

import pytest
import torch

from refattn.options import AttentionOptions, RecurrentOptions
from tests.helpers.drawn import drawn_batches
from tests.helpers.operations import MODULES
from twinattn.kit import properties
from twinattn.kit.example import PATHS
from twinattn.kit.kernel import NOT_DRAWN, find
from twinattn.kit.operations import OPERATIONS

OF_CALLS = ("query", "plan", "options", "batch")
BY_NEED = ("out", "return_lse", "batch_invariant", "deterministic")  # a check passes them, to kernels that take them
PLANS = {"mla_prefill": "plan_prefill"}  # where it is not `plan`
OF_OTHERS = ("index_scores",)  # its plan is that of chunked_prefill
MODULE_OF = {path: module for module, paths in MODULES.items() for path in paths}


def options_of(*functions):
    """List the parameters of functions, and the fields of the options that one of them takes."""
    names = {name: None for function in functions for name in inspect.signature(function).parameters}
    if "options" in names:
        make = RecurrentOptions if "log_decay" in names else AttentionOptions
        names |= {field.name: None for field in fields(make)}
    return [name for name in names if name not in OF_CALLS]


def drawn_arguments(path):
    """Return the names of all arguments that some batch of a path sets."""
    kernel, smallest, names = find(PATHS[path].module, path), {}, set()
    for prop in properties.of_path(path):
        if prop.not_asked(kernel, "cpu") is not None:
            continue
        names.update(name for name in prop.needs if name in BY_NEED)
        for example in drawn_batches(kernel, prop):
            kind = frozenset((name, x if isinstance(x, str) else "") for name, x in example.options.items())
            size = sum(s for _, s in example.lens)
            if kind not in smallest or size < smallest[kind][0]:
                smallest[kind] = size, example
    for _, example in smallest.values():
        names |= example.tensors(torch.float32).keys()
    return names


@pytest.mark.parametrize("path", PATHS)
def test_a_path(path):
    of = PATHS[path]
    plan = [of.module.plan] if "plan" in inspect.signature(getattr(of.module, of.function)).parameters else []
    there = {*drawn_arguments(path), "block_size", *NOT_DRAWN.get(path, {})}
    there |= {"return_lse"} if of.differentiates else set()  # with a gradient of the log-sum-exp
    assert [x for x in options_of(getattr(of.module, of.function), *plan) if x not in there] == []


@pytest.mark.parametrize("path", [x for x in OPERATIONS if x in MODULE_OF])
def test_an_operation(path):
    module = pytest.importorskip(f"refattn.{MODULE_OF[path]}")
    operation = OPERATIONS[path]
    function = getattr(module, operation.function)
    plan = [getattr(module, PLANS.get(path, "plan"))] if "plan" in operation.derived and path not in OF_OTHERS else []
    there = {*operation.words(), "return_lse", *NOT_DRAWN.get(path, {})}
    assert [x for x in options_of(function, *plan) if x not in there] == []
    for name in operation.options:
        assert len(operation.sizes[name]) > 1, f"{name} has one value alone"


def test_no_reason_is_left_over():
    for path, names in NOT_DRAWN.items():
        words = OPERATIONS[path].words() if path in OPERATIONS else drawn_arguments(path)
        neutral = {"alibi_slopes"}  # an operation may pass None
        assert not {*names} & {*words} - neutral, path
