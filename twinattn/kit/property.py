"""A property: one guarantee of a kernel, how batches are drawn for it, and how it is checked.

A check calls the kernel on a batch, and raises `Broken` with what was seen and expected.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from twinattn.kit import landmarks
from twinattn.kit.example import PATHS, Example
from twinattn.kit.kernel import Kernel
from twinattn.kit.landmarks import Landmarks

Draw = st.DrawFn
Drawing = Callable[[Draw, Kernel], Example]
Check = Callable[[Kernel, Example, torch.dtype, str], None]
ATTENDS = tuple(path.name for path in PATHS.values() if path.attends)
LOUDLY = (*(name for name in ATTENDS if name != "differential"), "merge")  # its norm magnifies rounding
READ_OUT = tuple(name for name in ATTENDS if name not in ("differential", "quantized"))  # their output is the mask
PAGED = tuple(path.name for path in PATHS.values() if path.pools and path.attends)
OF_VIEWS = ("gaps", "far rows", "strides of options")  # properties of kernels that claim strides
OUTPUTS_ALONE = set[Check]()  # checks that compare no log-sum-exp
OTHER_LENGTHS = set[Drawing | Check]()  # sequences have no new token, or several, whatever a kernel claims


def outputs_alone(check: Check) -> Check:
    """Register a check that compares no log-sum-exp."""
    OUTPUTS_ALONE.add(check)
    return check


class Broken(AssertionError):
    """A property does not hold; the message says what was seen, and where."""


class RefusedError(Exception):
    """The kernel refused a batch: it raised NotImplementedError, or an error that it claims as a refusal."""


class NotClaimedError(RefusedError):
    """The property does not apply to the kernel, for the reason in the message."""


class CrashedError(BaseException):
    """The device no longer works: nothing else can be tried in this process."""


@dataclass(frozen=True)
class Property:
    """One guarantee of a kernel.

    Attributes:
        name: a word or two.
        promise: the guarantee in a sentence.
        draw: draws a batch for a kernel.
        check: calls the kernel on it, and raises `Broken`.
        needs: arguments that the kernel has to take.
        paths: the paths that have it; all if empty.
        examples: the most batches that are drawn; no limit if None.
        cuda: whether it is checked on CUDA only.
        landmarks: batches that are tried after the drawn ones, which are smaller.
        check_landmark: the check of the landmarks, if it is another.
        layer: the kind of layer with a state that has it; any if empty.
        in_type: makes the landmarks of a type by its index, where each type has its own.
    """

    name: str
    promise: str
    draw: Callable[[Draw, Kernel], Example]
    check: Check
    needs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    examples: int | None = None
    cuda: bool = False
    landmarks: Landmarks = landmarks.none
    check_landmark: Check | None = None
    layer: str = ""
    in_type: Callable[[Kernel, int], list[Example]] | None = None

    @property
    def compares_lse(self) -> bool:
        """Whether its check compares the log-sum-exp, too."""
        return self.check not in OUTPUTS_ALONE

    @property
    def draws_other_lengths(self) -> bool:
        """Whether its batches have sequences with no new token, or several, whatever a kernel claims."""
        return self.draw in OTHER_LENGTHS or self.check in OTHER_LENGTHS

    def not_asked(self, kernel: Kernel, device: str) -> str | None:
        """Return why this does not apply to a kernel, or None if it does."""
        if self.name in kernel.claims.not_claimed:
            return kernel.claims.not_claimed[self.name]
        if self.name in OF_VIEWS and "strides" in kernel.claims.not_claimed:
            return kernel.claims.not_claimed["strides"]
        for option in self.needs:
            if not kernel.takes(option):
                return f"has no parameter {option}"
        if self.cuda and not device.startswith("cuda"):
            return "is of CUDA"
        is_step = PATHS[kernel.path].attends or bool(PATHS[kernel.path].in_place)
        if self.name == "padding" and is_step and not kernel.knows_query_lens:
            return "has no parameter that says which rows are padding"
        if self.draws_other_lengths and kernel.claims.max_query_len == 1:
            return "every sequence has one token"
        if self.layer and self.layer not in kernel.claims.layers:
            return f"claims layers={kernel.claims.layers}, and not {self.layer!r}"
        return None
