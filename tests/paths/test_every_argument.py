"""Each argument of every public function in turn, of a type that it never has, or elsewhere: refused by its name.

What else may be wrong with an argument stands in the tables of `test_bad_input`.
"""

import inspect
import re
import types
import typing
from collections.abc import Sequence

import pytest
import torch

from tests.helpers.legal_calls import legal_calls, public_functions
from tests.paths.test_bad_input import bits, tensors_in

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"])

WRONG = (None, object(), "nowhere", 0.5, [], torch.zeros(1, 1, dtype=torch.complex64), int)
NO_DEVICES = ("nowhere", "cuda:99", 0.5, None, True)
NAMES_OF_ITS_OWN = {"sparse.by_token": ("name",)}  # of what errors are about
ARE_ELSEWHERE = {  # arguments that say where a call computes, so that another one is elsewhere
}


def may_be(value: object, annotation: object) -> bool:
    """Return whether a value is one that an annotation allows, as far as its type tells."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        kind = typing.get_origin(option) or option
        if value is None and option in (None, types.NoneType):
            return True
        if isinstance(value, list) and kind is Sequence:
            return True
        if isinstance(value, float) and option is float or isinstance(value, str) and option is str:
            return True
    return False


def wrong_values(name: str, parameter: inspect.Parameter, legal: object) -> list:
    """List what a parameter cannot be: values of another type, and a tensor on another device."""
    if name == "device":
        return list(NO_DEVICES)
    if name == "layout":
        return [*WRONG]
    wrong = [value for value in WRONG if not may_be(value, parameter.annotation)]
    return wrong


def fault_of(function, arguments: dict, name: str, wrong: object) -> str:
    """Return what is wrong with how a value is refused: nothing if the error names the argument."""
    try:
        function(**arguments | {name: wrong})
    except (ValueError, TypeError) as error:
        return "" if re.match(rf"{name}\b", str(error)) else f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  # whatever it is, the other values are tried, too
        return f"{type(error).__name__}: {error}"
    return "taken"


@each_package
def test_every_function_has_a_legal_call(package):
    calls = legal_calls(package)
    functions = dict(public_functions(package))
    assert set(calls) == set(functions)
    for call, function in functions.items():
        arguments = calls[call]()
        assert set(arguments) == set(inspect.signature(function).parameters), call
        function(**arguments)
        required = {
            k: v
            for k, v in calls[call]().items()
            if inspect.signature(function).parameters[k].default is inspect.Parameter.empty
        }
        function(**required)


@each_package
def test_what_an_argument_can_never_be_is_refused_by_its_name_and_nothing_is_written(package):
    """In one test for all functions, as there are some thousand calls; what fails is named."""
    faults, calls = {}, legal_calls(package)
    for call, function in public_functions(package):
        parameters = inspect.signature(function).parameters
        every = calls[call]()
        required = {name: x for name, x in every.items() if parameters[name].default is inspect.Parameter.empty}
        tensors = tensors_in(list(every.values()))
        before = bits(tensors)
        for name, parameter in parameters.items():
            if name in NAMES_OF_ITS_OWN.get(call, ()):
                continue
            for wrong in wrong_values(name, parameter, every[name]):
                for arguments in (every, required):
                    if fault := fault_of(function, arguments, name, wrong):
                        faults[call, name, repr(wrong)[:30]] = fault
        if bits(tensors) != before:
            faults[call, "", ""] = "something was written"
    assert not faults, "\n".join(f"{key}: {fault}" for key, fault in faults.items())
