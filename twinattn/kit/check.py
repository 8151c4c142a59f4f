"""Check every property that a kernel claims on drawn batches, shrink a failure, and find its probable cause."""

import ast
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from torch import Tensor

from twinattn.kit import checks, draws, gradients, landmarks, mistakes, properties
from twinattn.kit.adapters import kernel_of
from twinattn.kit.bits import bits_of
from twinattn.kit.drawn import Drawn
from twinattn.kit.example import PATHS, Answers, Arguments, Example
from twinattn.kit.finding import ENDS, FAILED, Finding, Report
from twinattn.kit.kernel import BadKernelError, Kernel, NoMemoryError, as_arguments, check_device, notes_on
from twinattn.kit.landmarks import is_huge, is_large, without_an_option
from twinattn.kit.operations import Case, OperationProperty
from twinattn.kit.property import READ_OUT, Broken, Check, CrashedError, Draw, NotClaimedError, Property, RefusedError
from twinattn.kit.reference import expected
from twinattn.kit.tolerance import Distance, bound, distance, on_cpu

SEED = 3  # the seed of the batches
EVIDENCE = 6  # more batches, to tell mistakes apart
SHRINKING = 10.0  # seconds, at most; 0: failures are not shrunk
AGAIN = 0.2  # times SHRINKING, once another property has found a mistake
PROBABLE = 0.75  # the share of failures, and of passes, that a mistake has to explain
REPEATS, REPEATING = 40, 2.0  # most repeats of a failed call, and seconds for them
RACE = (
    "not-deterministic",
    "The same call gives other numbers each time: a race, or memory that is read before it is written.",
)


def check(
    target: str | Callable[..., Any] | ModuleType | Kernel,
    path: str | None = None,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    examples: int = 20,
    only: Iterable[str] | None = None,
    seconds: float = math.inf,
    stop_at_first: bool = False,
    repeat: int = 1,
    limits: Mapping[str, Any] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    on_example: Callable[[str, Example], None] | None = None,
) -> Report:
    """Check a kernel against the contract of its path.

    A wrong log-sum-exp is one finding, that of the property `lse`: the others then compare outputs alone. If `lse` is
    not in `only`, it is checked once another property fails.

    Args:
        target: the kernel, as `twinattn.kit.kernel.find` takes it.
        path: which path it computes.
        device: where the tensors are: any that torch has, "cpu", "cuda:1", "mps", "xpu".
        dtypes: of them; those that the kernel claims if None.
        examples: batches per property in the first type, and fewer in each other type.
        only: names of properties; all if None.
        seconds: time after which no further property is started.
        stop_at_first: end with the first failure.
        repeat: how often each batch is tried: a race shows in some calls.
        limits: claims that replace those of the kernel, by name: `dict(heads=((32, 2),))`.
        on_finding: called with every finding, as it is made.
        on_example: called before the kernel, with the name of the property and the batch.

    Returns:
        The report.

    Raises:
        BadKernelError: if the kernel cannot be called at all, or there is no such device.
    """
    kernel = kernel_of(target, path)
    kernel = replace(kernel, limits={**kernel.limits, **limits}) if limits else kernel
    check_device(device)
    drawn, tell = Drawn(kernel.path), on_example
    report = Report(kernel.name, kernel.path, device, claims=claims_as_words(kernel), drawn=drawn)
    report.asked, report.notes = dict(examples=examples, repeat=repeat, seed=SEED), notes_on(kernel)

    def on_batch(name: str, example: Example) -> None:
        drawn.add(example)
        if tell is not None:
            tell(name, example)

    began = time.monotonic()
    chosen = properties.of_path(kernel.path)
    if only is not None:
        only = list(only)
        unknown = set(only) - {x.name for x in chosen}
        if unknown:
            names = ", ".join(x.name for x in chosen)
            raise BadKernelError(f"{kernel.path} has no property {sorted(unknown)[0]!r}; there are {names}")
        chosen = [x for x in chosen if x.name in only]
    kinds = [dtype for dtype in dtypes or kernel.claims.dtypes if dtype in kernel.claims.dtypes]
    if not kinds:
        raise BadKernelError(f"{kernel.name} claims none of the types asked for")
    drawn.dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in kinds)
    blamed: list[str] = []
    look = partial(_look, kinds, device, examples, blamed, repeat)
    ended = ""  # why no further property is checked
    lse = next((x for x in properties.of_path(kernel.path) if x.name == "lse"), None)
    if "lse" in kernel.claims.not_claimed:
        kernel = replace(kernel, without_lse=True)
    is_lse_known = kernel.without_lse  # `lse` is checked in its turn, or once a property that compares it fails
    for prop in chosen:
        why = prop.not_asked(kernel, device)
        if why is not None:
            finding = Finding(prop.name, prop.promise, "not claimed", why)
        elif ended:
            finding = Finding(prop.name, prop.promise, "not reached", ended)
        elif time.monotonic() - began > seconds:
            finding = Finding(prop.name, prop.promise, "not reached", "the time was over")
        else:
            finding = look(kernel, prop, on_batch)
            if prop is lse:
                kernel, is_lse_known = replace(kernel, without_lse=finding.outcome == "wrong"), True
            elif lse is not None and prop.compares_lse and finding.outcome == "wrong" and not is_lse_known:
                kernel, is_lse_known = replace(kernel, without_lse=look(kernel, lse, None).outcome == "wrong"), True
                finding = look(kernel, prop, on_batch) if kernel.without_lse else finding
        if prop.name in ENDS and finding.outcome in FAILED:
            ended = ENDS[prop.name]
        report.findings.append(finding)
        blamed += [name for name, _ in finding.mistakes[:1]]
        if on_finding is not None:
            on_finding(finding)
        if stop_at_first and finding.outcome in FAILED:
            break
    report.seconds = round(time.monotonic() - began, 1)
    return report


def reproduce(
    target: str | Callable[..., Any] | ModuleType,
    name: str,
    example: Example,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    times: int = 1,
) -> None:
    """Check one property of a kernel on one batch, `times` times: for a kernel with a race.

    Raises:
        Broken: if it does not hold.
    """
    kernel = kernel_of(target, example.path)
    prop = next(x for x in properties.of_path(example.path) if x.name == name)
    if isinstance(prop, OperationProperty):
        for _ in range(times):
            prop.attempt(kernel, example, getattr(torch, dtype), device)
        return
    checks = dict.fromkeys((prop.check, prop.check_landmark or prop.check))
    for _ in range(times):
        for check_of in checks:
            check_of(kernel, example, getattr(torch, dtype), device)
            kernel.calls.clear()


def claims_as_words(kernel: Kernel) -> dict[str, Any]:
    """Return the claims of a kernel as values for JSON."""
    values = {of.name: getattr(kernel.claims, of.name) for of in fields(kernel.claims)}
    values["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in kernel.claims.dtypes]
    return values | dict(not_claimed=dict(kernel.claims.not_claimed), takes=list(kernel.parameters))


@dataclass
class _Trial:
    """The calls of an example, and whether it failed."""

    example: Example
    calls: list[tuple[Arguments, Answers]]
    failed: bool


def _look(
    dtypes: Sequence[torch.dtype],
    device: str,
    examples: int,
    blamed: Sequence[str],
    repeat: int,
    kernel: Kernel,
    prop: Property,
    on_example: Callable[[str, Example], None] | None,
) -> Finding:
    """Search for a batch on which a property does not hold, one type after the other."""
    if isinstance(prop, OperationProperty):
        return Finding(prop.name, prop.promise, **prop.look(kernel, dtypes, device, examples, on_example))
    tried, refused, reason, undrawn, no_memory = 0, 0, "", 0, ""
    drawn = examples if prop.examples is None else prop.examples
    most = min(examples, drawn, kernel.claims.max_examples or examples)
    for i, dtype in enumerate(dtypes):
        search = _Search(kernel, prop, dtype, device, on_example, SHRINKING * (AGAIN if blamed else 1), repeat)
        marks = prop.in_type(kernel, i) if prop.in_type is not None else prop.landmarks(kernel)
        marks = marks[: min(2 * examples, kernel.claims.max_examples or 2 * examples)]
        if i and prop.in_type is None:  # all landmarks in the first type, and some in each other one
            marks = [mark for mark in marks[i % len(marks) :: len(dtypes)] if not is_huge(mark)] if marks else []
        failure = search.run(most if i == 0 else -(-most // 4)) or search.visit(marks)
        if search.not_claimed:
            return Finding(prop.name, prop.promise, "not claimed", search.reason)
        tried, refused, reason = tried + search.tried, refused + search.refused, search.reason or reason
        undrawn, no_memory = undrawn + search.undrawn, search.no_memory or no_memory
        if failure is not None:
            return search.finding(failure, blamed)
    if tried and undrawn == tried:
        return Finding(prop.name, prop.promise, "not claimed", no_memory, tried)
    if tried and refused == tried - undrawn:
        return Finding(prop.name, prop.promise, "refused", reason, tried, refused)
    detail = f"{refused} of {tried} batches refused: {reason}" if refused else ""
    detail = f"{undrawn} of {tried} batches {no_memory}" if undrawn and not refused else detail
    without_lse = kernel.without_lse and prop.compares_lse
    return Finding(prop.name, prop.promise, "honoured", detail, tried, refused, without_lse=without_lse)


class _Search:
    """A search for a batch on which a property does not hold, in one type."""

    def __init__(
        self,
        kernel: Kernel,
        prop: Property,
        dtype: torch.dtype,
        device: str,
        on_example: Callable[[str, Example], None] | None,
        shrinking: float,
        repeat: int,
    ) -> None:
        self.shrinking, self.repeat = shrinking, repeat
        self.kernel, self.prop, self.dtype, self.device, self.on_example = kernel, prop, dtype, device, on_example
        self.tried, self.refused, self.reason, self.not_claimed = 0, 0, "", False
        self.undrawn, self.no_memory = 0, ""
        self.trials: list[_Trial] = []
        self.failures: dict[str, Broken] = {}  # by batch
        self.smallest: Example | None = None
        self.ends = math.inf
        self.batches = _batches(prop, kernel)

    def visit(self, marks: Sequence[Example]) -> Broken | None:
        """Try the landmarks until one fails, and shrink that one."""
        drawn = self.prop
        self.prop = replace(drawn, check=drawn.check_landmark or drawn.check)
        for mark in map(self.kernel.as_claimed, marks):
            self._try(mark)
            if repr(mark) in self.failures:
                self.smallest = self._smaller(mark)
                return self.failures[repr(self.smallest)]
        self.prop = drawn
        return None

    def _smaller(self, failing: Example) -> Example:
        """Leave out sequences, queries and keys as long as the batch still fails and time is left."""
        ends, before = time.monotonic() + self.shrinking, None
        while failing is not before:
            before = failing
            for smaller in landmarks.smaller(failing):
                if time.monotonic() > ends:
                    return failing
                if repr(smaller) not in self.failures:
                    self._try(smaller)
                if repr(smaller) in self.failures:
                    failing = smaller
                    break
        return failing

    def run(self, examples: int) -> Broken | None:
        """Draw batches until one fails, and shrink that one."""
        if not examples:
            return None

        def test(example: Example) -> None:  # short, as hypothesis reads its source each time
            self._try_and_raise(example)

        run = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if self.shrinking else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
        )(seed(SEED)(given(self.batches)(test)))  # the same batches in every run
        try:
            run()
        except (Broken, Flaky):
            assert self.smallest is not None
            return self.failures[repr(self.smallest)]
        return None

    def _try_and_raise(self, example: Example) -> None:
        if time.monotonic() > self.ends:  # stop shrinking: from here on only the smallest batch so far fails
            if example == self.smallest:
                raise self.failures[repr(example)]
            return
        self._try(example)
        if repr(example) in self.failures:
            if self.ends == math.inf:
                self.ends = time.monotonic() + self.shrinking
            self.smallest = example
            raise self.failures[repr(example)]

    def _try(self, example: Example) -> None:
        """Check the property on a batch, and record its calls and a failure."""
        self.tried += 1
        if self.on_example is not None:
            self.on_example(self.prop.name, example)
        try:
            for _ in range(self.repeat):
                self._keep(example, self.prop.check)
        except NoMemoryError as error:
            self.undrawn, self.no_memory = self.undrawn + 1, str(error)
        except RefusedError as error:
            self.refused, self.reason = self.refused + 1, str(error)
            self.not_claimed = isinstance(error, NotClaimedError)
        except Broken as error:
            self.failures[repr(example)] = error

    def _keep(self, example: Example, check: Check) -> None:
        self.kernel.calls.clear()
        failed = False
        try:
            check(self.kernel, example, self.dtype, self.device)
        except Broken:
            failed = True
            raise
        finally:
            self.trials.append(_Trial(example, list(self.kernel.calls), failed))

    def finding(self, failure: Broken, blamed: Sequence[str]) -> Finding:
        """Describe a failure with its masks and probable mistakes; of equal ones, those in `blamed` come first."""
        example = self.smallest
        assert example is not None
        given = next((x.calls[-1][0] for x in self.trials if x.failed and x.example == example and x.calls), {})
        taken = {word: x for word, x in given.items() if self.kernel.takes(word) or word in self.kernel.parameters}
        is_race = self._differs_from_call_to_call(example)
        self._gather()
        name, where = (
            str(self.dtype).removeprefix("torch."),
            "" if self.device == "cpu" else f", device={self.device!r}",
        )
        return Finding(
            self.prop.name,
            self.prop.promise,
            "raises" if str(failure).startswith("raised ") else "wrong",
            str(failure),
            self.tried,
            self.refused,
            repr(example),
            name,
            (RACE,)
            if is_race
            else tuple((mistake.name, mistake.says) for mistake in probable(example, self.trials, blamed)),
            *(((), ()) if is_race else self._masks(example)),
            f"from twinattn.kit.check import Example, reproduce; "
            f"reproduce({self.kernel.name!r}, {self.prop.name!r}, {example!r}, dtype={name!r}{where}"
            f"{', times=1000' if is_race else ''})",
            self.kernel.without_lse and self.prop.compares_lse,
            as_arguments(taken, {*example.options}),
            self.kernel.lacking(example),
        )

    def _differs_from_call_to_call(self, example: Example) -> bool:
        """Return whether the kernel is sometimes right, or wrong in different ways, on the same inputs."""
        ends, failed, first = time.monotonic() + REPEATING, 0, None
        for count in range(1, REPEATS + 1):
            self.kernel.calls.clear()
            try:
                self.prop.check(self.kernel, example, self.dtype, self.device)
            except Broken:
                failed += 1
            except RefusedError:
                return False
            answers = self.kernel.calls[-1][1] if self.kernel.calls else {}
            first = answers if first is None else first
            if failed < count or not _nearly_alike(first, answers):
                return True
            if time.monotonic() > ends:
                break
        return False

    def _gather(self) -> None:
        """Try some more batches as evidence, each also with random numbers in ordinary memory."""
        run = settings(
            max_examples=EVIDENCE,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )(seed(0)(given(self.batches)(self._try)))
        self.trials = self.trials[-2 * EVIDENCE :] + self.trials[:EVIDENCE]
        before = len(self.trials)
        if self.smallest is not None and self.prop.draw is draws.in_combination:
            for fewer in without_an_option(self.smallest):
                self._try(fewer)
        run()
        if self.prop.check is not checks.everything:
            for trial in self.trials[before:]:
                with suppress(Broken, RefusedError):
                    self._keep(trial.example, checks.everything)

    def _masks(self, example: Example) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        """Return the expected masks of a batch and those of the kernel, if they can be read out and differ."""
        if example.path not in READ_OUT or max((s for _, s in example.lens), default=0) > 64:
            return (), ()
        try:
            weights = checks.seen_masks(self.kernel, example, self.dtype, self.device)
        except (Broken, RefusedError, CrashedError, KeyError):
            return (), ()
        want = example.masks()
        heads = [
            [(w[:, head, : m.shape[1]] != 0) for w, m in zip(weights, want, strict=True)]
            for head in range(example.heads[0])
        ]
        wrong = next((got for got in heads if any(not torch.equal(x, y) for x, y in zip(got, want, strict=True))), None)
        return ((), ()) if wrong is None else (_rows(want), _rows(wrong))


@st.composite  # at module level: hypothesis reads the source of each function that it decorates
def _batches(draw: Draw, prop: Property, kernel: Kernel) -> Example:
    """Draw the batches of a property."""
    return kernel.as_claimed(prop.draw(draw, kernel))


def _nearly_alike(one: Answers, other: Answers) -> bool:
    """Return whether two answers differ by no more than sums in different orders would."""
    return all(
        torch.allclose(one[name].float(), x.float(), rtol=0.05, atol=0.05, equal_nan=True)
        for name, x in other.items()
        if name in one and one[name].shape == x.shape
    )


def _rows(drawn: Sequence[Tensor]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple("".join("1" if x else "0" for x in row) for row in mask.tolist()) for mask in drawn)


# --- what is probably wrong ---


def probable(
    smallest: Example, trials: Sequence[_Trial], blamed: Sequence[str] = (), *, most: int = 3
) -> list[mistakes.Mistake]:
    """Find the known mistakes that give the same outputs as a kernel, on the same inputs.

    Args:
        smallest: the smallest batch that fails.
        trials: batches, with the calls of the kernel.
        blamed: names of mistakes that other properties of this kernel have shown.
        most: the number of mistakes to return.

    Returns:
        The mistakes that explain the most batches, one per name; none if no mistake explains most of the failures.
    """
    newest = [trial for trial in reversed(trials) if trial.calls]
    ordered = sorted(newest, key=lambda trial: (not trial.failed, trial.example != smallest))
    seen, trials = set(), []
    for trial in ordered:
        key = repr(trial.example), len(trial.calls), trial.failed
        if key not in seen:
            seen.add(key)
            trials.append(trial)
    wrong = sorted((trial for trial in trials if trial.failed), key=_cost)[: 2 * EVIDENCE]  # the cheapest
    right = [trial for trial in trials if not trial.failed]
    if any(len(trial.example.options) > 2 for trial in trials):  # passing batches with most of these options
        right.sort(key=lambda trial: -_in_common(trial, smallest))
        count = max(EVIDENCE // 2, len(smallest.options))
        right = right[:count] + right[count:][-(EVIDENCE // 2) :]  # and some with few of them
    else:
        right = right[: EVIDENCE // 2]
    nothing_wrong = mistakes.without_mistake(smallest.path)
    failing = [_Evidence(trial.example, *trial.calls[-1]) for trial in wrong]
    failing = [evidence for evidence in failing if not evidence.agrees(nothing_wrong)][:EVIDENCE]
    passing = [_Evidence(trial.example, *trial.calls[-1]) for trial in right]
    if not failing:
        return []
    scores: dict[str, tuple[float, mistakes.Mistake]] = {}
    best = 0.0
    size = is_large(smallest)
    of_path = [x for x in mistakes.of_path(smallest.path) if x.name in blamed or mistakes.shows_in(x, size)]
    for is_of_forward in (False, True):  # a mistake in the backward alone goes before one in the forward
        known = [mistake for mistake in of_path if mistake.is_of_forward == is_of_forward]
        explains_first = [] if best == len(failing) + len(passing) else [failing[0].agrees(x) for x in known]
        for explains in (True, False):
            if best == len(failing) + len(passing):
                break  # a mistake that misses the first failure explains less
            for mistake, does in zip(known, explains_first, strict=True):
                missed = 0 if does else 1
                for evidence in failing[1:] if does == explains else ():
                    if missed <= (1 - PROBABLE) * len(failing):
                        missed += not evidence.agrees(mistake)
                if does != explains or missed > (1 - PROBABLE) * len(failing):
                    continue
                agreed = sum(evidence.agrees(mistake) for evidence in passing)
                score = len(failing) - missed + agreed
                if agreed >= PROBABLE * len(passing) and score > scores.get(mistake.name, (0.0, mistake))[0]:
                    scores[mistake.name] = score, mistake
            best = max((score for score, _ in scores.values()), default=0.0)
    found = [mistake for score, mistake in scores.values() if score == best]
    return sorted(found, key=lambda mistake: mistake.name not in blamed)[:most]


def _in_common(trial: _Trial, example: Example) -> int:
    """Return how many options of an example the batch of a trial has, too."""
    return sum(trial.example.options.get(name) == value for name, value in example.options.items())


def _cost(trial: _Trial) -> int:
    return sum(q * s for q, s in trial.example.lens)


class _Evidence:
    """A call of the kernel, with its outputs and the distance that rounding allows."""

    def __init__(self, example: Example, arguments: Arguments, answers: Answers) -> None:
        self.example, self.arguments = example, on_cpu(arguments)
        self.answers = {name: x.detach().cpu() for name, x in answers.items()}
        without_out = {name: x for name, x in self.arguments.items() if name not in ("out", "first_block")}
        self.wide, self.low = expected(example, without_out)
        is_gradient = PATHS[example.path].differentiates
        self.sizes = gradients.sizes(example, self.arguments) if is_gradient else {}  # before terms cancel
        self.errors: dict[str, Distance] = {}  # by name

    @functools.cached_property
    def is_right(self) -> bool:
        """Whether the outputs are right."""
        return self.agrees(mistakes.without_mistake(self.example.path))

    def agrees(self, mistake: mistakes.Mistake) -> bool:
        """Return whether a mistake gives these outputs."""
        if not mistake.may_show(self.example, self.arguments):
            return self.is_right
        try:
            given = mistake.answers(self.example, self.arguments)
        except (IndexError, RuntimeError, ValueError, KeyError, TypeError, AssertionError):
            return False  # the mistake cannot be made on this batch
        return all(self._alike(name, came, given[name]) for name, came in self.answers.items() if name in given)

    def _alike(self, name: str, came: Tensor, given: Tensor) -> bool:
        if came.shape != given.shape:
            return came.numel() == given.numel() and self._alike(name, came.reshape(given.shape), given)
        if self.example.path == "kv_cache":
            return torch.equal(bits_of(came), bits_of(given.to(came.dtype)))
        if self.example.path == "select":  # in any order
            return torch.equal(came.long().sort().values, given.long().sort().values)
        given, came = given.to(came.dtype).double(), came.double()
        alike = (came == given) | (came.isnan() & given.isnan())
        off = (came - given).abs().masked_fill_(alike, 0.0)  # NaN or infinite where only one of the two is
        size = float(given.nan_to_num(0.0, posinf=0.0, neginf=0.0).abs().max()) if given.numel() else 0.0
        size = max(size, self.sizes.get(name, 0.0))
        return not off.numel() or float(off.max()) <= 4 * bound(self._error(name), size, self.answers[name].dtype).max

    def _error(self, name: str) -> Distance:
        """Return how far the reference in the type of the output is from the wide one, where both are finite."""
        if name == "lse" and not self.arguments.get("query", torch.ones(1)).any():
            return Distance(0.0, 0.0)  # the products are 0 in any type
        if name not in self.errors:
            right = self.wide[name].isfinite() & self.low[name].isfinite()
            self.errors[name] = distance(self.low[name][right], self.wide[name][right])
        return self.errors[name]


class _Numbers(ast.NodeTransformer):
    """Replace the names `nan` and `inf`, as Python prints these numbers, by constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace the two names."""
        return ast.Constant(float(node.id)) if node.id in ("nan", "inf") else node


def parse_example(text: str) -> Example | Case:
    """Parse the `repr` of an `Example`, as `Example('local', lens=((1, 5),), options={'chunk_size': 16})`, or a `Case`.

    Raises:
        ValueError: if the text is anything else.
    """
    node = _Numbers().visit(ast.parse(text.strip(), mode="eval")).body
    name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    if (name, len(getattr(node, "args", ()))) not in (("Example", 1), ("Case", 2)):
        raise ValueError(f"example: expected Example('path', lens=...), got {text}")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    values = [ast.literal_eval(value) for value in node.args]
    return Example(*values, **named) if name == "Example" else Case(*values, **named)
