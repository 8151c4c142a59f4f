"""An operation other than attention: its random inputs, its right output by plain arithmetic, and what it changes.

Case        sizes and options by name, and a seed: printed in reports, and passed to `reproduce`
Inputs      arguments drawn for a case, and their elements on which no output may depend
Operation   a row of the table `OPERATIONS`
OperationKernel    a function that computes one, called with the arguments that its parameters name
"""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinattn.kit.example import Arguments
from twinattn.kit.kernel import BadKernelError, Claims, filled_memory, named_parameters
from twinattn.kit.names import wrong_names
from twinattn.kit.operations.tiles import Dimension

Answers = dict[str, Any]  # tensors, lists of tensors that are all right, numbers
Oracle = Callable[[Arguments, torch.dtype], Answers]  # takes the arguments, and the type to compute in


@dataclass(frozen=True)
class Case:
    """A call as plain numbers.

    Attributes:
        path: name of the operation.
        sizes: sizes and options by name.
        seed: of the random numbers.
    """

    path: str
    sizes: Mapping[str, Any]
    seed: int = 0

    def __getitem__(self, name: str) -> Any:
        """Return a size."""
        return self.sizes[name]

    def __repr__(self) -> str:
        return f"Case({self.path!r}, {dict(self.sizes)!r}, seed={self.seed})"


@dataclass
class Inputs:
    """The arguments of a call, on the CPU.

    Attributes:
        arguments: tensors, lists of tensors, and numbers by name.
        unread: masks by the name of a tensor (`caches[0]` in a list), True at elements on which no output may depend.
        dense: names of tensors that have to be contiguous in this call.
    """

    arguments: Arguments
    unread: dict[str, Tensor] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Mistake:
    """A known mistake: its name, a sentence, and its output."""

    name: str
    says: str
    oracle: Oracle


class Without(NamedTuple):
    """What a function gets that lacks one of some parameters.

    Attributes:
        value: the only value of a size.
        words: the names of the parameters.
    """

    value: Any
    words: tuple[str, ...]


IN: Mapping[str, tuple[str, ...]] = {  # arguments that contain others
    "plan": ("window_size", "num_accepted", "has_initial_state", "causal"),
    "options": ("softmax_scale", "scale", "delta", "sinks", "softcap", "alibi_slopes"),
    "scales": ("key_scales", "value_scales", "key_scale", "value_scale", "format"),
    "shard": ("interleave",),
}


@dataclass(frozen=True)
class Special:
    """A property of one operation: the common check over some sizes, options or values.

    Attributes:
        name: a word or two.
        promise: the guarantee in a sentence.
        sizes: choices that replace those of the operation.
        needs: parameters that a function must have.
        once: whether it is one large case, tried in the first type only.
    """

    name: str
    promise: str
    sizes: Mapping[str, tuple[Any, ...]]
    needs: tuple[str, ...] = ()
    once: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation, with everything that its properties need.

    Attributes:
        name: of the path.
        function: name of the function in a module.
        signature: the arguments that a function may take, with shapes, as text.
        draw: makes inputs of a case, in a type.
        oracle: returns the right outputs, and the right content of changed tensors, by name. If it returns a list of
            tensors, each element may be that of any of them.
        sizes: choices of each size, the simplest first.
        dimensions: by name, the sizes that are also drawn past those of tiles.
        options: the neutral value of each option; the others are those in `sizes`. A function without a parameter of
            that name gets only calls with the neutral value.
        without: for a size that a function can only follow through some parameters, their names, and the only value
            that a function without one of them gets.
        contents: arguments that contain others, such as a plan, each with the names of those.
        specials: more properties.
        derived: arguments that are made of others for a function that takes them, such as a plan.
        outputs: names of the returned values, in order; none if a function only changes arguments.
        changes: arguments that are changed in place.
        exact: names that are compared bit by bit; the others by the tolerance.
        moves: whether data only moves, so that a NaN keeps its bits, too.
        optional: outputs that a function need not return.
        types: for an output that must have the type of an argument, the name of that argument.
        strided: tensors whose numbers are others in the second of two calls.
        pools: tensors with a first dimension that may span more than 2^31 elements.
        flips: tensors of integers that stay valid if they are flipped.
        seen: makes the named outputs from the returned value and the arguments after the call, if `outputs` does not.
        invoke: calls the function, if one call with the arguments is not enough.
        steps: splits a call into those of several steps, each with rows of outputs by name: rows of the whole call, and
            the rows of the step that have the same bits.
        nan: arguments in which a NaN must show in the output.
        has_out: whether it takes memory for the output as `out`.
        dtypes: types of the numbers.
        size: the size of the terms of an output, which is their sum; the largest output if None.
        score: the size of a score, for a kernel that rounds keys to the type of the query; it is an error of the LSE.
        terms: the number of terms of an output: if no type is wider, so many roundings are allowed.
        mistakes: known mistakes.
    """

    name: str
    function: str
    signature: str
    draw: Callable[[Case, torch.dtype], Inputs]
    oracle: Oracle
    sizes: Mapping[str, tuple[Any, ...]]
    dimensions: Mapping[str, Dimension] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, "Without"] = field(default_factory=dict)
    contents: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: IN)
    specials: tuple[Special, ...] = ()
    derived: Mapping[str, Callable[[Arguments], Any]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("out",)
    changes: tuple[str, ...] = ()
    exact: frozenset[str] = frozenset()
    moves: bool = False
    optional: frozenset[str] = frozenset()
    types: Mapping[str, str] = field(default_factory=dict)
    strided: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    flips: tuple[str, ...] = ()
    seen: Callable[[Any, Arguments], Answers] | None = None
    invoke: Callable[["OperationKernel", Arguments], Any] | None = None
    steps: Callable[[Arguments], list[tuple[Arguments, dict[str, tuple[list[int], list[int]]]]]] | None = None
    nan: tuple[str, ...] = ()
    has_out: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    size: Callable[[Arguments], float] | None = None
    score: Callable[[Arguments], float] | None = None
    terms: Callable[[Arguments], int] | None = None
    mistakes: tuple[Mistake, ...] = ()

    def words(self) -> list[str]:
        """List the names that a parameter may have."""
        first = {name: choices[0] for name, choices in self.sizes.items()} | dict(self.options)
        drawn = self.draw(Case(self.name, first), self.dtypes[0]).arguments
        return [*drawn, *self.derived, *(["out"] if self.has_out else [])]

    def cases(self, kernel: "OperationKernel", about: str, chosen: Mapping[str, Any], count: int) -> list[Case]:
        """Draw cases: the first has the first choice of every size, and all choices of a size are equally frequent."""
        choices = {**self.sizes, **{name: (value,) for name, value in self.options.items()}, **chosen}
        choices |= self.only(kernel)
        drawn = random.Random(f"{self.name} {about}")
        columns = {name: _in_turn(values, drawn) for name, values in choices.items()}
        return [Case(self.name, {name: next(column) for name, column in columns.items()}, i) for i in range(count)]

    def only(self, kernel: "OperationKernel") -> dict[str, tuple[Any, ...]]:
        """Return the choices of the sizes that a function limits: by its claims, or as it lacks a parameter."""
        lacking = {x: (y.value,) for x, y in self.without.items() if kernel.lacks(y.words)}
        return lacking | {name: tuple(kernel.limits[name]) for name in kernel.limits.keys() & self.sizes.keys()}

    def cases_past_tiles(self, kernel: "OperationKernel", chosen: Mapping[str, Any]) -> list[Case]:
        """Draw cases in which each dimension in turn fills a tile, or is past it, with any other choices.

        Dimensions that need sizes which the function does not claim are left out.
        """
        large = [sizes for dimension in self.dimensions.values() for sizes in dimension.cases()]
        only = self.only(kernel)
        large = [x for x in large if all(x[n] in only[n] for n in only.keys() & x.keys())]
        drawn = self.cases(kernel, "past tiles", chosen, len(large))
        return [Case(self.name, {**case.sizes, **x}, i) for i, (case, x) in enumerate(zip(drawn, large, strict=True))]


def _in_turn(values: tuple[Any, ...], drawn: random.Random) -> Iterator[Any]:
    """Yield the first value, and then all of them repeatedly, each time in another order."""
    yield values[0]
    while True:
        yield from drawn.sample(values, len(values))


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """List the tensors of a call by name; those of a list as `name[i]`."""
    found = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            found[name] = x
        elif isinstance(x, list):
            found |= {f"{name}[{i}]": y for i, y in enumerate(x) if isinstance(y, Tensor)}
    return found


def with_tensors(arguments: Arguments, change: Callable[[str, Tensor], Tensor]) -> Arguments:
    """Return the arguments with each tensor replaced by `change(name, tensor)`.

    A tensor that is two arguments is replaced once, under its first name, and is again both.
    """
    changed, known = dict(arguments), dict[int, Tensor]()

    def once(name: str, x: Tensor) -> Tensor:
        if id(x) not in known:
            known[id(x)] = change(name, x)
        return known[id(x)]

    for name, x in arguments.items():
        if isinstance(x, Tensor):
            changed[name] = once(name, x)
        elif isinstance(x, list):
            changed[name] = [once(f"{name}[{i}]", y) if isinstance(y, Tensor) else y for i, y in enumerate(x)]
    return changed


def word_of(name: str) -> str:
    """Return the argument that a tensor belongs to: `caches` for `caches[1]`."""
    return name.partition("[")[0]


@dataclass
class OperationKernel:
    """A function that computes an operation.

    Attributes:
        name: for the report.
        operation: the operation that it computes.
        function: is called with the arguments that its parameters name.
        limits: sizes that replace those that the function claims.
    """

    name: str
    operation: Operation
    function: Callable[..., Any]
    without_lse: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the operation has an argument for every required parameter, and read the claims."""
        words = self.words()
        self.parameters = named_parameters(self.function, self.name, words)
        if wrong := wrong_names(self.name, self.path, self.parameters, words):
            raise BadKernelError(wrong)
        limits = {**getattr(self.function, "__claims__", {}), **self._asked_for()}
        known = {name: limits.pop(name) for name in ("not_claimed", "refusals", "max_examples") if name in limits}
        self.claims = Claims(dtypes=tuple(limits.pop("dtypes", self.operation.dtypes)), **known)
        unknown = limits.keys() - self.operation.sizes.keys()
        if unknown:
            sizes = ", ".join(self.operation.sizes)
            raise BadKernelError(
                f"{self.path} has no size {sorted(unknown)[0]!r}, which {self.name} claims or the command asks for; "
                f"there are {sizes}"
            )
        self.limits = limits

    @property
    def path(self) -> str:
        """Name of the operation."""
        return self.operation.name

    def words(self) -> list[str]:
        """List the names that a parameter may have."""
        return self.operation.words()

    def _asked_for(self) -> dict[str, Any]:
        """Return `limits` with the operation's names of sizes; those of the command line may be pairs."""
        sizes, found = self.operation.sizes, {}
        for name, values in self.limits.items():
            name = IN_CASES.get(name, name)
            is_pair = isinstance(sizes.get(name, ((),))[0], tuple)
            found[name] = tuple(x[-1] if isinstance(x, tuple) and not is_pair else x for x in values)
        return found

    def takes(self, word: str) -> bool:
        """Return whether the function has a parameter of this name, or one that includes it."""
        contents = self.operation.contents
        return word in self.parameters or any(word in contents[x] for x in contents.keys() & self.parameters.keys())

    def lacks(self, words: tuple[str, ...]) -> bool:
        """Return whether the function lacks one of these parameters."""
        return not all(self.takes(word) for word in words)

    def lacking(self) -> str:
        """Return the parameters that it does not have and whose default matters, each with what it is held to."""
        known = {word: x.value for x in self.operation.without.values() for word in x.words}
        known |= {name: x for name, x in self.operation.options.items() if x}
        words = [name for name in known if not self.takes(name)]
        says = {name: "its default" if known[name] in (None, "context") else repr(known[name]) for name in words}
        return ", ".join(f"{name} ({x} is expected)" for name, x in says.items())

    def asked(self, arguments: Arguments) -> Arguments:
        """Return an argument for each parameter, if there is one; None for an `out` without a default."""
        asked = {}
        for name, parameter in self.parameters.items():
            if name in arguments:
                asked[name] = arguments[name]
            elif name in self.operation.derived:
                asked[name] = self.operation.derived[name](arguments)
            elif name == "out" and self.operation.has_out and parameter.default is inspect.Parameter.empty:
                asked[name] = None
        return asked

    def __call__(self, arguments: Arguments) -> Answers:
        """Call the function, and return its outputs and the changed arguments by name."""
        with filled_memory():
            if self.operation.invoke is not None:
                came = self.operation.invoke(self, arguments)
            else:
                came = self.function(**self.asked(arguments))
        changed = {n: x for n, x in tensors_of(arguments).items() if word_of(n) in self.operation.changes}
        if self.operation.seen is not None:
            return {**self.operation.seen(came, arguments)}
        return {**named(came, self.operation.outputs, self.operation.optional), **changed}


IN_CASES = {"head_sizes": "head_size", "block_sizes": "block_size"}  # names of the command line -> names in cases


def named(came: Any, names: tuple[str, ...], optional: frozenset[str] = frozenset()) -> Answers:
    """Return the outputs of a function by name: one tensor, or several in order."""
    if not names:
        return {}
    parts = (came,) if isinstance(came, Tensor) else came
    least = len([name for name in names if name not in optional])
    if not isinstance(parts, tuple | list) or not least <= len(parts) <= len(names):
        expected = "a tensor" if len(names) == 1 else f"({', '.join(names)})"
        got = f"{len(parts)} of them" if isinstance(parts, tuple | list) else type(came).__name__
        raise TypeError(f"expected {expected}, got {got}")
    return dict(zip(names, parts, strict=False))
