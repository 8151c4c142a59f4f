"""What attention in Triton binds: the launches of a call, to be made again with the tensors of another layer.

They are known where they are made, deep inside of `fastattn.kernels.triton.attention`, which notes them here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.replay import Run
from refattn.keys import Keys
from refattn.options import AttentionOptions
from refattn.trees import AttentionPlan


@dataclass
class Recorder:
    """Where the launches of the call that is under way are noted.

    Attributes:
        return_lse: later calls want the log-sum-exps, too; else the tensor in their place may hold anything.
        replay: makes the launches again, called as `attend` is; None if the call cannot be made so.
    """

    return_lse: bool
    replay: Run | None = None


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """Return where launches are noted; None if they will not be made again."""
    return _recorder.get()


@contextmanager
def recording(into: Recorder | None) -> Iterator[None]:
    """Note launches somewhere, or nowhere."""
    token = _recorder.set(into)
    try:
        yield
    finally:
        _recorder.reset(token)


def bind_attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
    return_lse: bool,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"], Run]:
    """Attend, and return what attends again with other tensors, too; see `fastattn.dispatch`."""
    from fastattn.kernels.triton.attention import attend_to_keys

    into = Recorder(return_lse)
    with recording(into):
        answer, lse = attend_to_keys(query, keys, plan, options, out)
    return answer, lse, into.replay or attend_to_keys
