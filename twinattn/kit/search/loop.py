"""Draw workloads one after the other, try each with every kernel, and shrink those that fail."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from twinattn.kit.search.draw import draw, draw_palette, normalized, smaller
from twinattn.kit.search.trial import Outcome, Truth, Twin, normal, try_kernel
from twinattn.kit.workload import Workload

DTYPES = ("float32", "float16", "bfloat16")
SERVES = 200  # workloads per palette on a GPU, where compiling takes a thousand times as long as a call
SERVES_ON_CPU = 3  # the same where nothing is compiled
SHRINKS = 2  # findings of one kind that are shrunk; further ones are only counted
SMALLEST_IN = 20.0  # seconds to shrink one
ASKED = 0.4  # the share of workloads that a kernel is tried with by name, once it has computed one
ASKED_AGAIN = 0.1  # the same, if the twin has just chosen it
IDLE_AFTER, REFUSED_AFTER, ASKED_STILL = 8, 40, 0.1


class Finding(NamedTuple):
    """A failed call: the kernel, the kind of fault, its detail, the smallest failing workload and the original one."""

    kernel: str | None
    kind: str
    detail: str
    line: str
    found_in: str


def workload(
    seed: int,
    path: str,
    index: int,
    dtypes: Sequence[str] = DTYPES,
    *,
    longest: int = 4097,
    serves: int = SERVES_ON_CPU,
) -> Workload:
    """Return the workload with an index, the same one in every run with a seed.

    Args:
        seed: of the run.
        path: one of `PATHS`.
        index: of the workload.
        dtypes: of queries.
        longest: approximate limit on the tokens of a sequence.
        serves: workloads per palette.
    """
    random = Random(f"{seed}/{path}/{index}")
    number = index // serves
    first = Random(f"{seed}/{path}").randrange(len(dtypes))
    dtype = dtypes[(first + number) % len(dtypes)]  # in turn, so that a short run tries all types
    palette = draw_palette(Random(f"{seed}/{path}/palette {number}"), path, (dtype,))
    return draw(random, path, palette, longest=longest)


def shrink(
    work: Workload, fails: Callable[[Workload], Outcome | None], seconds: float = SMALLEST_IN
) -> tuple[Workload, Outcome | None]:
    """Return the smallest failing workload that is found in some seconds, and its outcome if it is another one.

    Args:
        work: a failing workload.
        fails: returns the outcome of a workload if it fails in the same way, else None.
        seconds: time limit.
    """
    end, known, outcome = time.monotonic() + seconds, {work}, None
    improved = True
    while improved and time.monotonic() < end:
        improved = False
        for candidate in smaller(work):
            candidate = normalized(candidate)
            if candidate in known or time.monotonic() > end:
                continue
            known.add(candidate)
            came = fails(candidate)
            if came is not None:
                work, outcome, improved = candidate, came, True
                break
    return work, outcome


class Search:
    """A search of one path, workload by workload, with counts of the outcomes.

    Attributes:
        calls: counts by the requested kernel, the kernels that computed, and the outcome.
        refused: counts by the requested kernel and the reason.
        exceptions: counts of calls that are right except for a known exception, by the requested kernel and the reason.
        findings: the faults.
        roundings: calls slightly over the tolerance that are within it for other random numbers.
    """

    def __init__(
        self,
        path: str,
        twin: Twin,
        *,
        seed: int = 0,
        device: str = "cpu",
        dtypes: Sequence[str] = DTYPES,
        longest: int = 4097,
        before: Callable[[Workload, str | None], None] = lambda work, kernel: None,
        skipped: Collection[tuple[str | None, str]] = (),
    ) -> None:
        """Start with nothing counted.

        Args:
            path: one of `PATHS`.
            twin: the kernels to search.
            seed: of all workloads.
            device: where they are computed.
            dtypes: of queries.
            longest: approximate limit on the tokens of a sequence; use a small one for interpreted kernels.
            before: called before each call, to log it, because a kernel may end the process.
            skipped: pairs of a kernel and `Workload.sizes` that have ended a process.
        """
        self.path, self.twin, self.seed, self.device, self.dtypes = path, twin, seed, device, dtypes
        self.longest, self.before, self.skipped = longest, before, frozenset(skipped)
        self.serves = SERVES_ON_CPU if device == "cpu" else SERVES
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.exceptions: Counter[tuple[str, str]] = Counter()
        self.findings: list[Finding] = []
        self.roundings: list[Finding] = []
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._asked: Counter[str | None] = Counter()
        self._computed: Counter[str | None] = Counter()
        self._refused: Counter[str | None] = Counter()

    def run(self, *, seconds: float | None = None, workloads: int | None = None, first: int = 0) -> Iterator[int]:
        """Try workloads until the time is over or their number is reached, and yield the index of each when done."""
        end = None if seconds is None else time.monotonic() + seconds
        index = first
        while (end is None or time.monotonic() < end) and (workloads is None or index < first + workloads):
            drawn = workload(self.seed, self.path, index, self.dtypes, longest=self.longest, serves=self.serves)
            self.try_workload(drawn, index)
            yield index
            index += 1

    def try_workload(self, work: Workload, index: int = 0) -> None:
        """Try a workload with each kernel."""
        truth = Truth(work, self.device)
        chosen: tuple[str, ...] = ()
        for kernel in self.twin.kernels:
            if (kernel, work.sizes) in self.skipped or not self._is_asked(kernel, index, chosen):
                continue
            self.before(work, kernel)
            outcome = try_kernel(truth, self.twin, kernel)
            chosen = outcome.chosen if kernel is None else chosen
            self._note(work, kernel, outcome)

    def _is_asked(self, kernel: str | None, index: int, chosen: tuple[str, ...]) -> bool:
        """Return whether to try a kernel: not if it lacks the operation, and seldom if it has refused all calls so far.

        Args:
            kernel: its name; None for the twin's choice.
            index: of the workload.
            chosen: the kernels that the twin has chosen for this workload.
        """
        if kernel is None or kernel == self.twin.kernels[0]:
            return True
        if self._computed[kernel]:
            return Random(f"{index}/{kernel}").random() < (ASKED_AGAIN if chosen == (kernel,) else ASKED)
        asked, refused = self._asked[kernel], self._refused[kernel]
        if asked >= IDLE_AFTER and not refused:
            return False
        return refused < REFUSED_AFTER or Random(f"{index}/{kernel}").random() < ASKED_STILL

    def _note(self, work: Workload, kernel: str | None, outcome: Outcome) -> None:
        name = kernel or "default"
        self._asked[kernel] += 1
        if outcome.kind == "refused":
            self._refused[kernel] += 1
            self.refused[name, outcome.detail] += 1
        elif outcome.is_fault or kernel in outcome.chosen:
            self._computed[kernel] += 1
        if outcome.kind == "exception":
            self.exceptions[name, outcome.detail] += 1
        self.calls[name, "+".join(outcome.chosen), outcome.kind] += 1
        if outcome.kind == "rounding":
            self.roundings.append(Finding(kernel, outcome.kind, outcome.detail, work.as_line(), work.as_line()))
        if not outcome.is_fault:
            return
        about = (kernel, outcome.kind, normal(outcome.detail)[:120])
        self._seen[about] += 1
        if self._seen[about] > SHRINKS:
            return

        def fails(candidate: Workload) -> Outcome | None:
            if (kernel, candidate.sizes) in self.skipped:
                return None
            self.before(candidate, kernel)
            came = try_kernel(Truth(candidate, self.device), self.twin, kernel)
            same = came.kind == outcome.kind and (came.kind == "wrong" or normal(came.detail)[:60] == about[2][:60])
            return came if same else None

        smallest, its_outcome = shrink(work, fails)
        detail = (its_outcome or outcome).detail
        if smallest.as_line() not in {finding.line for finding in self.findings if finding.kernel == kernel}:
            self.findings.append(Finding(kernel, outcome.kind, detail, smallest.as_line(), work.as_line()))

    @property
    def faults(self) -> dict[tuple[Any, ...], int]:
        """The number of faults of each kind."""
        return dict(self._seen)
