"""A right function that lacks an optional parameter passes: nothing is asked that only the parameter could say."""

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

from refattn.ranks import Shard
from tests.helpers.drawn import drawn_batches
from tests.helpers.operations import MODULES
from twinattn.kit import properties
from twinattn.kit.check import check
from twinattn.kit.example import PATHS, Example
from twinattn.kit.kernel import NEUTRAL, Kernel
from twinattn.kit.operations import OPERATIONS, Case, of_operation

MODULE_OF = {path: module for module, paths in MODULES.items() for path in paths}
SLOW = ("many", "many keys", "long", "large vocabulary", "large trees", "offsets", "process", "past tiles")
DEFAULTS: dict[str, dict[str, Any]] = {  # of each parameter that a caller of the reference may leave out
    "fp8_write": dict(format=torch.float8_e4m3fn),
    "int8_write": dict(value_scales=None),
    "nvfp4_write": dict(key_scale=1.0, value_scale=1.0),
    "convolve": dict(bias=None, silu=True, num_accepted=None, has_initial_state=None, out=None),
    "state_map": dict(delta=True),
    "replay": dict(
        scale=None, delta=True, flush=None, drafts=False, target_indices=None, has_initial_state=None, out=None
    ),
    "cursors": dict(flush=None, drafts=False, target_indices=None, num_accepted=None, has_initial_state=None),
    "int8_attention": dict(
        softmax_scale=None,
        value_scales=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        sinks=None,
        return_lse=False,
        out=None,
    ),
    "int4_attention": dict(
        softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0, sinks=None, return_lse=False, out=None
    ),
    "nvfp4_attention": dict(
        softmax_scale=None,
        key_scale=1.0,
        value_scale=1.0,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        sinks=None,
        return_lse=False,
        out=None,
    ),
    "compress": dict(bias=None, overlap=False),
    "compressed": dict(
        positions=None,
        softmax_scale=None,
        softcap=0.0,
        sinks=None,
        cache_scale=1.0,
        entry_scale=1.0,
        return_lse=False,
        out=None,
    ),
    "mla_write": dict(cache_scale=1.0),
    "mla_prefill": dict(
        sinks=None, alibi_slopes=None, softcap=0.0, cache_scale=1.0, max_context_len=None, return_lse=False, out=None
    ),
    "context_parallel": dict(interleave=1, softmax_scale=None, sinks=None, window_size=(-1, -1), return_lse=False),
    "make_batch": dict(block_tables=None),
    "slot_mapping": dict(window=None),
    "advance": dict(sampled_ids=None, input_positions=None),
    "order_decodes_first": dict(decode_len=1),
    "split_decodes_and_prefills": dict(decode_len=1),
    "accept_sampled": dict(draft_probs=None),
}
WITH = {"sampled_ids": "input_ids"}  # what means nothing without another parameter
NOT_FLAT = ("plan", "options", "scales", "device", "out", "seq_lens", "input_ids")  # made of others, or not an option


def first_arguments(path: str) -> dict[str, Any]:
    operation = OPERATIONS[path]
    sizes = {name: choices[0] for name, choices in operation.sizes.items()} | dict(operation.options)
    return operation.draw(Case(path, sizes), operation.dtypes[0]).arguments


def lacking(path: str, name: str) -> Any:
    """Return the reference's function without a parameter, which keeps its default, and all others flat."""
    operation = OPERATIONS[path]
    function = getattr(import_module(f"refattn.{MODULE_OF[path]}"), operation.function)
    default = {name: DEFAULTS[path][name]} | ({WITH[name]: None} if name in WITH else {})
    words = [x for x in (*first_arguments(path), "out") if x not in default and x != "exact_halves"]
    words = list(dict.fromkeys(words if operation.has_out or "out" in first_arguments(path) else words[:-1]))
    words += ["rank", "group"] if path == "context_parallel" else []

    def called(**came: Any) -> Any:
        arguments = {**default, **came}
        if path == "context_parallel":
            arguments["shard"] = Shard(arguments["rank"], arguments["ranks"], arguments["interleave"])
        names = inspect.signature(function).parameters
        derived = {x: operation.derived[x](arguments) for x in names if x not in arguments and x in operation.derived}
        return function(**{x: y for x, y in {**derived, **arguments}.items() if x in names})

    keyword = inspect.Parameter.KEYWORD_ONLY
    called.__signature__ = inspect.Signature([inspect.Parameter(x, keyword) for x in words])  # type: ignore[attr-defined]
    called.__name__ = f"{path}_without_{name}"
    return called


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, of in DEFAULTS.items() for name in of])
def test_an_operation_without_an_optional_parameter_passes(path, name):
    operation = OPERATIONS[path]
    asked = [x.name for x in of_operation(operation) if x.name not in SLOW]
    report = check(lacking(path, name), path, examples=6, only=asked, dtypes=operation.dtypes[:1])
    assert [(x.property, x.detail, x.example) for x in report.failures] == []
    assert any(x.outcome == "honoured" for x in report.findings)


def test_each_optional_parameter_of_the_reference_is_tried():
    for path, operation in OPERATIONS.items():
        function = getattr(import_module(f"refattn.{MODULE_OF[path]}"), operation.function)
        words = {x.name for x in inspect.signature(function).parameters.values() if x.default is not x.empty}
        words |= {*operation.options, *operation.without} | ({"softmax_scale"} & {*first_arguments(path)})
        words -= {"softmax_scale"} if path == "mla_prefill" else set()  # it does not follow from the size of latents
        assert words - {*NOT_FLAT} <= DEFAULTS.get(path, {}).keys(), path


# --- paths ---

ALWAYS = ("chunk_size", "prefixes", "trees", "positions", "first_visible", "last_visible")
SET_BY = {"num_accepted": "drafts", "cache_scale": "stored"}  # the options of a batch that make an argument
OPTIONAL = [
    (path.name, name)
    for path in PATHS.values()
    for name in (*path.options, *path.planned, "cache_scale", "query_scale")
    if name in Kernel("all", path.name, lambda: None).words()
    and name not in ALWAYS
    and (path.name, name) != ("sliding_window", "window_size")
]


def asks_for(example: Example, name: str) -> bool:
    """Return whether a batch sets an option to anything but its neutral value."""
    if name == "alibi_sqrt":
        return example.options.get("alibi_slopes") == "root"
    value = example.options.get(SET_BY.get(name, name))
    return value is not None and value != NEUTRAL.get(name) and value is not False


@pytest.mark.parametrize(("path", "name"), OPTIONAL)
def test_no_batch_of_a_path_sets_an_option_that_a_function_lacks(path, name):
    words = [x for x in Kernel("all", path, lambda: None).words() if x not in (name, "plan", "options", "out", "lse")]

    def mine(**arguments): ...

    keyword = inspect.Parameter.KEYWORD_ONLY
    mine.__signature__ = inspect.Signature([inspect.Parameter(x, keyword) for x in words])
    kernel = Kernel("mine", path, mine)
    assert not kernel.takes(name)
    found = [
        (prop.name, example)
        for prop in properties.of_path(path)
        if prop.not_asked(kernel, "cpu") is None
        for example in drawn_batches(kernel, prop)
        if asks_for(example, name)
    ]
    assert found[:1] == []
