"""What may run the steps of an engine in its own way, such as `twinattn.engine.CudaGraphs`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from twinattn.engine.request import Request, StepTokens

if TYPE_CHECKING:
    from twinattn.engine.engine import Engine


@runtime_checkable
class Runner(Protocol):
    """Runs some steps in its own way, over what of an engine is public."""

    def run(self, engine: "Engine", tokens: StepTokens) -> Float[Tensor, "rows v"] | None:
        """Run the model over the new tokens of a step; return the logits of `logits_rows`, None to leave it."""


@dataclass(frozen=True)
class UnderWay:
    """A step that has been launched, and whose tokens have not been read.

    Attributes:
        scheduled: its requests, with the number of new tokens of each.
        requests: those that get a token, one row each.
        tokens: waits for the token of each row, and returns them; None for one whose logits are not finite.
    """

    scheduled: Mapping[Request, int]
    requests: Sequence[Request]
    tokens: Callable[[], list[int | None]]

    @property
    def going_on(self) -> dict[Request, int]:
        """What is scheduled for requests that have not ended since it was launched."""
        return {request: count for request, count in self.scheduled.items() if request.status == "running"}


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """Launches steps without waiting for their tokens, which it chooses on the device, as `sampling` says."""

    def launch(self, engine: "Engine", scheduled: Mapping[Request, int]) -> UnderWay | None:
        """Launch a step without drafts, all of whose tokens the host knows; return None to leave it."""

    def launch_next(self, engine: "Engine", before: UnderWay, scheduled: Mapping[Request, int]) -> UnderWay | None:
        """Launch the step after one whose tokens have not been read; return None to leave it."""

    def warm_up(self, engine: "Engine", num_tokens: int) -> None:
        """Capture the decodes that may come, of sequences of up to `num_tokens` tokens."""


@runtime_checkable
class KeepingRunner(Runner, Protocol):
    """Keeps from step to step what depends on where the model's weights are."""

    def forget(self) -> None:
        """Drop all of it, before a step."""
