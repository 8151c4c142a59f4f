"""A property: one thing that a kernel promises, how batches are drawn for it, and how it is checked.

A check calls the kernel on a batch. It returns nothing, or raises `Broken` with what was seen and expected.
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
OF_VIEWS = ("gaps", "far rows", "strides of options")  # what is asked of who takes strides
OUTPUTS_ALONE = set[Check]()  # checks that compare no log-sum-exp
OTHER_LENGTHS = set[Drawing | Check]()  # where a sequence has no new token, or several, whatever a kernel claims


def outputs_alone(check: Check) -> Check:
    """Note that a check compares no log-sum-exp."""
    OUTPUTS_ALONE.add(check)
    return check


class Broken(AssertionError):
    """A property that does not hold: what was seen, and where."""


class RefusedError(Exception):
    """The kernel raised NotImplementedError: it says itself that it does not compute this."""


class NotClaimedError(RefusedError):
    """The kernel returns nothing that this could be asked of."""


class CrashedError(BaseException):
    """The device does not answer any more: nothing else can be tried in this process."""


@dataclass(frozen=True)
class Property:
    """One thing that a kernel promises.

    Attributes:
        name: in a word or two.
        promise: in a sentence.
        draw: draws a batch for a kernel.
        check: calls the kernel on it, and raises `Broken`.
        needs: what the kernel must take, for this to be asked.
        paths: where it is asked; everywhere if empty.
        examples: the most batches that are drawn; as many as are asked for if None.
        cuda: whether it is asked of CUDA only.
        landmarks: batches that are tried after those that are drawn, which are smaller.
        check_landmark: the check of these, if it is another.
        layer: of those that keep a state, the one that it is about.
        in_type: makes the landmarks of a type by its number, where each type has its own.
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
        """Whether it compares the log-sum-exp too, where there is one."""
        return self.check not in OUTPUTS_ALONE

    @property
    def draws_other_lengths(self) -> bool:
        """Whether a sequence has no new token in it, or several, whatever a kernel claims."""
        return self.draw in OTHER_LENGTHS or self.check in OTHER_LENGTHS

    def not_asked(self, kernel: Kernel, device: str) -> str | None:
        """Return why this is not asked of a kernel, or None if it is."""
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
