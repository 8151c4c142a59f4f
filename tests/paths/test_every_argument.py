"""Each argument of every public function in turn, of a type that it never has, or elsewhere: refused by its name.

The error is of a type that the docstring names, that of the reference where a twin refers to it. What else may be wrong
with an argument stands in the tables of `test_bad_input`.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.helpers.bad_input import bits, tensors_in
from tests.helpers.legal_calls import legal_calls, legal_types, public_functions
from tests.helpers.twin_files import shared_types
from tests.table import each_package

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

WRONG = (None, object(), "nowhere", 0.5, [], torch.zeros(1, 1, dtype=torch.complex64), int)
NO_DEVICES = ("nowhere", "cuda:99", 0.5, None, True)
NAMED_BY_THE_CALLER = ("sparse.by_token", "name")  # what errors call the pool
ALONE = {  # tensors that say themselves where all is, so that on another device they are no mistake
    *("differential.interleave_halves", "differential.pools", "sparse.by_token", "sparse.select"),
    *("speculative.parents_from_mask", "context_parallel.local_lens", "AttentionOptions", "Int8Scales"),
    *("Int4Scales", "Nvfp4Scales", "compressed.candidates"),
    *("kv_cache.copy_blocks", "kv_cache.swap_blocks", "state_cache.copy"),  # pairs may be anywhere
}


def may_be(value: object, annotation: object) -> bool:
    """Return whether an annotation allows a value, as far as the types tell."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        kind = typing.get_origin(option) or option
        if value is None and option in (None, types.NoneType):
            return True
        if isinstance(value, list) and kind is Sequence:
            return True
        if isinstance(value, float) and option is float:
            return True
    return False


def wrong_values(call: str, name: str, annotation: object, legal: object) -> Iterator[object]:
    """List what an argument cannot be: values of another type, and a tensor on another device than the rest."""
    if name == "device":
        yield from NO_DEVICES
        return
    yield from (value for value in WRONG if not may_be(value, annotation))
    if isinstance(legal, torch.Tensor) and call not in ALONE:
        yield legal.to("meta")


def types_in(docstring: str | None) -> set[str]:
    """Return the types of error that a docstring names."""
    section = re.search(r"^Raises:\n((?:    .*\n?|\n)*)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    return set(re.findall(r"^    (\w+):", section[1], re.MULTILINE)) if section else set()


def raised_by(call: str) -> set[str]:
    """Return the types of error that the docstring of a function of the reference names, or the one it refers to."""
    functions = dict(public_functions("refattn"))
    docstring = functions[call].__doc__ or ""
    other = re.search(r"errors are those of `([\w.]+)`", docstring)
    return types_in(docstring) | (raised_by(other[1]) if other else set())


def fault_of(function: Callable[..., Any], arguments: dict, name: str, wrong: object, raised: set[str]) -> str:
    """Return what is wrong with how a value is refused: nothing if an error of a type that is named begins so."""
    try:
        function(**arguments | {name: wrong})
    except Exception as error:  # noqa: BLE001  # whatever it is, the other values are tried, too
        is_elsewhere = isinstance(wrong, torch.Tensor) and wrong.device.type == "meta"  # or all the others are
        is_named = is_elsewhere or re.match(rf"(\w+[._])?{name}\b", str(error))
        return "" if type(error).__name__ in raised and is_named else f"{type(error).__name__}: {error}"
    return "taken"


@each_package
def test_every_function_has_a_legal_call(package):
    """Else an argument might be refused for another reason than that it is wrong."""
    calls, functions = legal_calls(package), dict(public_functions(package))
    assert set(calls) == set(functions)
    for call, function in functions.items():
        arguments = calls[call]()
        assert set(arguments) == set(inspect.signature(function).parameters), call
        function(**arguments)


def test_every_function_says_that_it_refuses():
    assert {call for call, _ in public_functions("refattn") if "ValueError" not in raised_by(call)} == set()


@each_package
def test_what_an_argument_can_never_be_is_refused_by_its_name_and_nothing_is_written(package):
    """In one test for all functions, as there are some thousand calls; what fails is named."""
    faults, calls = {}, legal_calls(package)
    for call, function in public_functions(package):
        parameters, every = inspect.signature(function).parameters, calls[call]()
        required = {name: x for name, x in every.items() if parameters[name].default is inspect.Parameter.empty}
        before, raised = bits(tensors_in(list(every.values()))), raised_by(call) - {"NotImplementedError"}
        for name, parameter in parameters.items():
            if (call, name) == NAMED_BY_THE_CALLER:
                continue
            for wrong in wrong_values(call, name, parameter.annotation, every[name]):
                for arguments in (every, required):
                    if fault := fault_of(function, arguments, name, wrong, raised):
                        faults[call, name, repr(wrong)[:30]] = fault
        if bits(tensors_in(list(every.values()))) != before:
            faults[call, "", ""] = "something was written"
    assert not faults, "\n".join(f"{key}: {fault}" for key, fault in faults.items())


def test_what_a_field_of_batches_plans_and_options_can_never_be_is_refused_by_its_name():
    """Of each type that checks what it is made of."""
    checked = {
        name
        for name, kind in shared_types().items()
        if dataclasses.is_dataclass(kind) and "ValueError" in types_in(kind.__doc__)
    }
    made = {type(instance).__name__: instance for instance in legal_types()}
    assert set(made) == checked
    faults = {}
    for kind, instance in made.items():
        fields = {field.name: field for field in dataclasses.fields(instance) if field.init}
        legal = {name: getattr(instance, name) for name in fields}
        for name, field in fields.items():
            for wrong in wrong_values(kind, name, field.type, legal[name]):
                if fault := fault_of(type(instance), legal, name, wrong, {"ValueError"}):
                    faults[kind, name, repr(wrong)[:30]] = fault
    assert not faults, "\n".join(f"{key}: {fault}" for key, fault in faults.items())


@each_package
def test_what_a_docstring_says_of_gradients_is_so(package):
    """Where it names NotImplementedError, an argument that requires a gradient raises it."""
    calls = legal_calls(package)
    for call, function in public_functions(package):
        named = types_in(function.__doc__) | (types_in(dict(public_functions("refattn"))[call].__doc__))
        if "NotImplementedError" not in named or call == "sparse.by_token":
            continue
        arguments = calls[call]()
        if call == "sparse.write":
            arguments["index_cache"] = torch.zeros(5, 4, 12, dtype=torch.uint8)
        name = next(name for name in ("query", "inputs", "key", "row_cache") if name in arguments)
        arguments[name] = arguments[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=name):
            function(**arguments)
