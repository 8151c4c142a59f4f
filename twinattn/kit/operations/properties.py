"""The properties of operations: one comparison, over random cases and several changes to the inputs.

output      the output is right for random sizes, with each option, and with several
past tiles  the same for dimensions that fill a tile of a kernel, or are past it
unread      NaN, infinity, large numbers and invalid indices in elements that may not be read
strides     tensors with other strides, and NaN between their elements
writes      only the output is written: no input, and no memory around a tensor
process     the process is unchanged: random numbers, default type, threads
again       other calls before and after, and new values in the same memory
in steps    the same bits, whether tokens come at once or in steps
nan         a NaN that an output depends on is not hidden
out         memory for the output
offsets     pools that span more than 2^31 elements
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.bits import bits_of
from twinattn.kit.example import Arguments
from twinattn.kit.kernel import NoMemoryError, as_arguments, synchronize
from twinattn.kit.operations.hold import agrees, hold
from twinattn.kit.operations.memory import LAYOUTS, Placed, far_apart, layout_of, place, poisoned
from twinattn.kit.operations.operation import (
    Answers,
    Case,
    Operation,
    OperationKernel,
    tensors_of,
    with_tensors,
    word_of,
)
from twinattn.kit.process import left_alone, restored
from twinattn.kit.property import Broken, CrashedError, RefusedError

SHOWN = 1e-3  # an output that changes by more, relative to the largest, depends on an input
EVIDENCE = 6  # calls that a mistake has to explain, in addition to the one that failed
REPEATS = 6  # repeats of a failed call
NOT_DETERMINISTIC = (
    "not-deterministic",
    "The same call gives other numbers each time: a race, or memory that is read before it is written.",
)


@dataclass
class Trial:
    """A call: a copy of its arguments, its outputs, and the size of their terms."""

    arguments: Arguments = field(default_factory=dict)
    came: Answers = field(default_factory=dict)
    size: float = 0.0


@dataclass(frozen=True)
class OperationProperty:
    """One guarantee of a function.

    Attributes:
        name: a word or two.
        promise: the guarantee in a sentence.
        operation: the operation of the function.
        check: calls the function on a case, and raises `Broken`.
        sizes: choices that replace those of the operation.
        needs: parameters that the function must have.
        most: the most cases.
        on_cpu: whether it is checked on a CPU only.
        once: whether its cases are large, and tried in the first type only.
        all_options: whether cases combine all options that the function takes.
        past_tiles: whether its cases are those of `Operation.dimensions`.
        compares_lse: always False, as in `Property`.
    """

    name: str
    promise: str
    operation: Operation
    check: Callable[["_Call"], None]
    sizes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    most: int = 1000
    on_cpu: bool = False
    once: bool = False
    all_options: bool = False
    past_tiles: bool = False
    compares_lse: bool = False

    def not_asked(self, kernel: OperationKernel, device: str) -> str | None:
        """Return why this does not apply to a function, or None if it does."""
        if self.name in kernel.claims.not_claimed:
            return kernel.claims.not_claimed[self.name]
        for word in self.needs:
            if not kernel.takes(word):
                return f"has no parameter {word}"
        for name, values in self.operation.only(kernel).items():
            lacking = self.operation.without.get(name)
            if lacking and name not in kernel.limits and not {*values} & {*self.sizes.get(name, values)}:
                return f"has no parameter {next(x for x in lacking.words if not kernel.takes(x))}"
        if self.on_cpu and device != "cpu":
            return "is asked on a CPU only"
        return None

    def attempt(self, kernel: OperationKernel, case: Case, dtype: torch.dtype, device: str) -> Trial:
        """Check one case, and return the last call.

        Raises:
            Broken: if the property does not hold; its `trial` is the last call.
            RefusedError: if the function refuses the case.
        """
        call = _Call(kernel, self.operation, case, dtype, device)
        try:
            self.check(call)
        except Broken as error:
            error.trial = call.trial  # type: ignore[attr-defined]
            raise
        return call.trial

    def look(
        self,
        kernel: OperationKernel,
        dtypes: Sequence[torch.dtype],
        device: str,
        examples: int,
        on_example: Callable[[str, Any], None] | None,
    ) -> dict[str, Any]:
        """Search for a case in which it does not hold, and return the fields of a finding."""
        tried, refused, reason, trials = 0, 0, "", []
        undrawn, no_memory = 0, ""
        chosen = dict(self.sizes)
        if self.all_options:
            taken = [name for name in self.operation.options if kernel.takes(name)]
            chosen = {name: self.operation.sizes[name] for name in taken}
        for i, dtype in enumerate(dtypes[:1] if self.once else dtypes):
            for case in self._cases(kernel, chosen, examples, i):
                tried += 1
                if on_example is not None:
                    on_example(self.name, case)
                try:
                    trials.append(self.attempt(kernel, case, dtype, device))
                except NoMemoryError as error:
                    undrawn, no_memory = undrawn + 1, str(error)
                except RefusedError as error:
                    refused, reason = refused + 1, str(error)
                except Broken as error:
                    return self._finding(kernel, case, dtype, device, error, trials) | dict(
                        examples=tried, refused=refused
                    )
        if tried and undrawn == tried:
            outcome, detail = "not claimed", no_memory
        elif tried and refused == tried - undrawn:
            outcome, detail = "refused", reason
        else:
            outcome, detail = "honoured", f"{refused} of {tried} cases refused: {reason}" if refused else ""
            detail = f"{undrawn} of {tried} cases {no_memory}" if undrawn and not refused else detail
        return dict(outcome=outcome, detail=detail, examples=tried, refused=refused)

    def _cases(self, kernel: OperationKernel, chosen: Mapping[str, Any], examples: int, i: int) -> list[Case]:
        """Draw cases for the type with index `i`, fewer after the first."""
        if self.past_tiles:  # few and cheap: all of them, whatever the number of examples
            return self.operation.cases_past_tiles(kernel, chosen)[: kernel.claims.max_examples]
        count = min(1 if self.once else self.most, examples, kernel.claims.max_examples or examples)
        return self.operation.cases(kernel, self.name, chosen, count if i == 0 else -(-count // 2))

    def _finding(
        self,
        kernel: OperationKernel,
        case: Case,
        dtype: torch.dtype,
        device: str,
        error: Broken,
        right: list[Trial],
    ) -> dict[str, Any]:
        case, error = self._smaller(kernel, case, dtype, device, error)
        trial: Trial = error.trial  # type: ignore[attr-defined]
        kind, where = str(dtype).removeprefix("torch."), "" if device == "cpu" else f", device={device!r}"
        mistakes: tuple[tuple[str, str], ...] = ()
        if self._differs(kernel, case, dtype, device, trial):
            mistakes = (NOT_DETERMINISTIC,)
        elif trial.came:
            evidence = [trial, *right[-EVIDENCE:]]
            known = self.operation.mistakes
            found = [x for x in known if all(agrees(self.operation, x, y.arguments, y.came, y.size) for y in evidence)]
            mistakes = tuple((x.name, x.says) for x in found)
        return dict(
            outcome="raises" if str(error).startswith("raised ") else "wrong",
            detail=str(error),
            example=repr(case),
            dtype=kind,
            mistakes=mistakes,
            asked=as_arguments({n: x for n, x in trial.arguments.items() if kernel.takes(n)}, case.sizes.keys()),
            lacking=kernel.lacking(),
            code=f"from twinattn.kit.check import reproduce; from twinattn.kit.operations import Case; "
            f"reproduce({kernel.name!r}, {self.name!r}, {case!r}, dtype={kind!r}{where})",
        )

    def _smaller(
        self, kernel: OperationKernel, case: Case, dtype: torch.dtype, device: str, error: Broken
    ) -> tuple[Case, Broken]:
        """Replace choices by simpler ones as long as the case still fails."""
        choices = {**self.operation.sizes, **self.sizes, **self.operation.only(kernel)}
        for name, value in case.sizes.items():
            values = choices[name]
            for simpler in values[: list(values).index(value)] if value in values else values:
                smaller = Case(case.path, {**case.sizes, name: simpler}, case.seed)
                try:
                    self.attempt(kernel, smaller, dtype, device)
                except RefusedError:
                    continue
                except Broken as broken:
                    case, error = smaller, broken
                    break
        return case, error

    def _differs(self, kernel: OperationKernel, case: Case, dtype: torch.dtype, device: str, first: Trial) -> bool:
        """Return whether the same case gives another result in another attempt."""
        for _ in range(1 if self.once else REPEATS):
            try:
                self.attempt(kernel, case, dtype, device)
            except Broken as error:
                came = error.trial.came  # type: ignore[attr-defined]
                if first.came.keys() != came.keys() or not all(_alike(x, came[n]) for n, x in first.came.items()):
                    return True
            except RefusedError:
                return False
            else:
                return True
        return False


def _alike(one: Any, other: Any) -> bool:
    """Return whether two outputs differ by no more than sums in different orders would."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not one.is_floating_point():
        return bool(torch.equal(one, other)) if isinstance(one, Tensor) else bool(one == other)
    return torch.allclose(one.double(), other.double(), rtol=0.02, atol=0.02, equal_nan=True)


class _Call:
    """The calls of a function on one case; `trial` is the last of them."""

    def __init__(
        self, kernel: OperationKernel, operation: Operation, case: Case, dtype: torch.dtype, device: str
    ) -> None:
        self.kernel, self.operation, self.case, self.dtype, self.device = kernel, operation, case, dtype, device
        self.inputs = operation.draw(case, dtype)
        self.placed: dict[str, Placed] = {}
        self.size = operation.size(self.inputs.arguments) if operation.size is not None else 0.0
        self.trial = Trial(size=self.size)

    def place(self, arguments: Arguments, layout: str = "dense") -> Arguments:
        """Copy the tensors into memory with margins, and with other strides where they may have any."""

        def put(name: str, x: Tensor) -> Tensor:
            self.placed[name] = place(x, layout_of(name, layout, self.inputs.dense), self.device)
            return self.placed[name].view

        return with_tensors(arguments, put)

    def ask(self, arguments: Arguments) -> Answers:
        """Call the function, and translate what it raises into `RefusedError`, `CrashedError` or `Broken`."""
        before = with_tensors(arguments, lambda _, x: x.detach().cpu().clone(memory_format=torch.contiguous_format))
        self.trial = Trial(before, size=self.size)
        try:
            came = self.kernel(arguments)
            if self.device != "cpu":
                synchronize({"device": torch.empty(0, device=self.device)})
        except NoMemoryError:
            raise
        except NotImplementedError as error:
            raise RefusedError(str(error)) from error
        except Exception as error:  # another author's function may raise anything
            says = (str(error).strip().splitlines() or [""])[0]
            if any(text in str(error) for text in self.kernel.claims.refusals):
                raise RefusedError(says) from error
            try:
                torch.ones(2, device=self.device).sum().item()
            except RuntimeError as broken:
                raise CrashedError(f"{type(error).__name__}: {says}") from broken
            raise Broken(f"raised {type(error).__name__}: {says}") from error
        self.trial.came = {name: x.detach().cpu().clone() if isinstance(x, Tensor) else x for name, x in came.items()}
        return came

    def hold(self) -> None:
        """Compare the output of the last call with the right one."""
        hold(self.operation, self.trial.arguments, self.trial.came, self.trial.size)


def right(call: _Call) -> None:
    """Compare the output with the right one."""
    call.ask(call.place(call.inputs.arguments))
    call.hold()


def unread(call: _Call) -> None:
    """Compare with poison in elements that may not be read."""
    spoiled = poisoned(call.operation, call.inputs.arguments, call.inputs.unread, call.case.seed)
    call.ask(call.place(spoiled))
    call.hold()


def strides(call: _Call) -> None:
    """Compare with tensors of other strides."""
    call.ask(call.place(call.inputs.arguments, LAYOUTS[call.case.seed % len(LAYOUTS)]))
    call.hold()


def writes(call: _Call) -> None:
    """Check that a call changes no input, and no memory around a tensor."""
    given = call.place(call.inputs.arguments, ("dense", *LAYOUTS)[call.case.seed % 4])
    if call.operation.has_out and call.kernel.takes("out"):
        given = _with_out(call, given)
    for placed in call.placed.values():
        placed.keep()
    call.ask(given)
    changed = {id(x) for name, x in tensors_of(given).items() if word_of(name) in (*call.operation.changes, "out")}
    for name, placed in call.placed.items():
        if id(placed.view) not in changed:
            if placed.was_written():
                raise Broken(f"{name}: was changed, and is an input")
        elif placed.was_written_outside():
            raise Broken(f"{name}: memory around it, or between its elements, was written")


def again(call: _Call) -> None:
    """Compare a call after one of other sizes, with new values in the same memory; earlier outputs must not change."""
    given = call.place(call.inputs.arguments)
    first = call.ask(given)
    kept = {n: x for n, x in first.items() if isinstance(x, Tensor) and word_of(n) not in call.operation.changes}
    before = {name: x.clone() for name, x in kept.items()}
    call.hold()
    choices = {**call.operation.sizes, **call.operation.only(call.kernel)}
    sizes = {name: values[(call.case.seed + 1) % len(values)] for name, values in choices.items()}
    other = Case(call.case.path, sizes | {name: call.case[name] for name in call.operation.options}, call.case.seed + 1)
    call.ask(call.place(call.operation.draw(other, call.dtype).arguments))
    for name, x in tensors_of(given).items():
        if word_of(name) in call.operation.flips:
            x.copy_(x.flip(0))
        elif word_of(name) in call.operation.strided and x.is_floating_point() and x.element_size() > 1:
            changed = x * 0.75 if (x > 0).all() else x.neg() + 0.25  # scales stay positive
            x.copy_(torch.where(x.isfinite(), changed, x))
    call.ask(given)
    try:
        call.hold()
    except Broken as error:
        raise Broken(f"with other numbers in the same memory, {error}") from None
    for name, x in before.items():
        if not torch.equal(bits_of(x), bits_of(kept[name])):
            raise Broken(f"{name}: a later call, or a write to an input, changed what an earlier call had returned")
    in_another_order(call, given)


def in_another_order(call: _Call, given: Arguments) -> None:
    """Compare a call after the same lengths in the opposite order were written into the tensors of the batch.

    Their sums and maxima, which a function may have kept, are the same.
    """
    lens = call.case.sizes.get("lens", ())
    if lens == lens[::-1]:
        return
    other = call.operation.draw(
        Case(call.case.path, {**call.case.sizes, "lens": lens[::-1]}, call.case.seed), call.dtype
    )
    mine, theirs = tensors_of(given), tensors_of(other.arguments)
    numbers = {name: x for name, x in other.arguments.items() if not isinstance(x, Tensor | list)}
    same = mine.keys() == theirs.keys() and all(mine[name].shape == x.shape for name, x in theirs.items())
    if not same or any(given[name] is not x and given[name] != x for name, x in numbers.items()):
        return
    if len(theirs) < sum(len(x) if isinstance(x, list) else isinstance(x, Tensor) for x in other.arguments.values()):
        return  # lists of numbers are no memory that a step shares with the next
    for name, x in theirs.items():
        mine[name].copy_(x)
    call.ask(given)
    try:
        call.hold()
    except Broken as error:
        raise Broken(f"with the same lengths in another order in the same tensors, {error}") from None


def process(call: _Call) -> None:
    """Compare the state of the process before and after a call."""
    with restored():  # the first call may import, and compile
        call.ask(call.place(call.inputs.arguments))
    given = call.place(call.inputs.arguments)
    with left_alone():
        call.ask(given)


def nan(call: _Call) -> None:
    """Put a NaN into an argument: every output that depends on it must be NaN."""
    words = [name for name in tensors_of(call.inputs.arguments) if word_of(name) in call.operation.nan]
    name = words[call.case.seed % len(words)]

    def other(n: str, x: Tensor, number: float) -> Tensor:
        if n != name or not x.numel():
            return x
        x = x.clone()
        x.view(-1)[call.case.seed * 7 % x.numel()] = number
        return x

    call.ask(call.place(with_tensors(call.inputs.arguments, lambda n, x: other(n, x, torch.nan))))
    before = call.operation.oracle(call.inputs.arguments, torch.float64)
    after = call.operation.oracle(with_tensors(call.inputs.arguments, lambda n, x: other(n, x, 3.0)), torch.float64)
    for output, x in before.items():
        if not isinstance(x, Tensor) or not x.numel() or not isinstance(call.trial.came.get(output), Tensor):
            continue
        moved = (after[output].double() - x.double()).abs() > SHOWN * x[x.isfinite()].abs().max()
        hidden = (moved & ~call.trial.came[output].isnan()).nonzero()
        if len(hidden):
            raise Broken(f"{output}: a number at {hidden[0].tolist()}, which depends on a NaN in {name}")


def in_steps(call: _Call) -> None:
    """Compare the bits of a call with those of its steps; each step is right, too."""
    assert call.operation.steps is not None
    call.ask(call.place(call.inputs.arguments))
    whole = call.trial.came
    for number, (arguments, rows) in enumerate(call.operation.steps(call.inputs.arguments), start=1):
        call.ask(call.place(arguments))
        call.hold()
        for name, (of_whole, of_step) in rows.items():
            one, other = bits_of(whole[name][of_whole]), bits_of(call.trial.came[name][of_step])
            if not torch.equal(one, other):
                row = of_whole[int((one != other).flatten(1).any(1).nonzero()[0])]
                raise Broken(f"{name}: row {row} has other bits if its tokens come in steps: it is of step {number}")


def _with_out(call: _Call, given: Arguments) -> Arguments:
    """Return the arguments with memory for the output."""
    right = call.operation.oracle(call.inputs.arguments, torch.float64)["out"]
    like = call.inputs.arguments[call.operation.types["out"]]
    memory = torch.full(right.shape, 7.0, dtype=like.dtype)
    call.placed["out"] = place(memory, ("dense", "reversed", "gaps", "apart")[call.case.seed % 4], call.device)
    return {**given, "out": call.placed["out"].view}


def out(call: _Call) -> None:
    """Pass memory for the output: all of it is written, and it is returned."""
    given = _with_out(call, call.place(call.inputs.arguments))
    came = call.ask(given)
    call.hold()
    call.trial.came["out"] = given["out"].detach().cpu().clone()
    call.hold()
    if isinstance(came["out"], Tensor) and came["out"].numel() and came["out"].data_ptr() != given["out"].data_ptr():
        raise Broken("out: what is returned is not the memory that was given")


def offsets(call: _Call) -> None:
    """Compare with pools that span more than 2^31 elements."""
    call.ask(far_apart(call.operation, call.inputs.arguments))
    call.hold()


def of_operation(operation: Operation) -> list[OperationProperty]:
    """List the properties of an operation, in the order in which they are checked."""
    found = [OperationProperty("output", "Outputs and changed arguments are right.", operation, right)]
    for name, neutral in operation.options.items():
        values = tuple(x for x in operation.sizes[name] if x != neutral)
        promise = f"The same with {name}."
        found.append(OperationProperty(name.replace("_", " "), promise, operation, right, {name: values}, (name,)))
    if len(operation.options) > 1:
        says = "The same with several options at once."
        found.append(OperationProperty("together", says, operation, right, all_options=True))
    if operation.dimensions:
        says = "Any dimension may fill a tile of a kernel exactly, or be past it, up to 8,193."
        found.append(
            OperationProperty("past tiles", says, operation, right, once=True, all_options=True, past_tiles=True)
        )
    for x in operation.specials:
        found.append(OperationProperty(x.name, x.promise, operation, right, x.sizes, x.needs, once=x.once))
    says = "No output depends on memory that no token has, on entries past the last block, or on rows of padding."
    if operation.draw(_first(operation), operation.dtypes[0]).unread:
        found.append(OperationProperty("unread", says, operation, unread))
    if any(x.numel() for x in tensors_of(operation.draw(_first(operation), operation.dtypes[0]).arguments).values()):
        says = "Tensors may have any strides; memory between their elements is not read."
        found.append(OperationProperty("strides", says, operation, strides))
    says = "Inputs are not changed, and nothing is written around a tensor or between its elements."
    found.append(OperationProperty("writes", says, operation, writes))
    says = "A call leaves the process as it was: random numbers, default type, threads, and how numbers are computed."
    found.append(OperationProperty("process", says, operation, process, most=2))
    if operation.has_out:
        says = "out= is written whole, and returned."
        found.append(OperationProperty("out", says, operation, out, {}, ("out",)))
    if operation.nan:
        found.append(OperationProperty("nan", "A NaN that an output depends on is not hidden.", operation, nan))
    says = "A call does not depend on earlier calls, and does not change what they returned."
    found.append(OperationProperty("again", says, operation, again, most=6))
    if operation.steps is not None:
        says = "The bits are the same, whether tokens come at once or in steps."
        found.append(OperationProperty("in steps", says, operation, in_steps))
    if operation.pools:
        says = "Offsets into a pool may be larger than 2^31."
        found.append(OperationProperty("offsets", says, operation, offsets, most=3, on_cpu=True))
    return sorted(found, key=lambda x: x.past_tiles or x.once)  # the slowest come last


def _first(operation: Operation) -> Case:
    """Return the simplest case."""
    first = {name: choices[0] for name, choices in operation.sizes.items()} | dict(operation.options)
    return Case(operation.name, first)
