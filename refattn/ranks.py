"""Ranks that share the keys of a sequence: which rank has which keys, and how ranks exchange partial outputs.

A path for several ranks is called once on each of them, and communicates through a `Group`. `DistributedGroup` uses
torch.distributed; `simulate_ranks` calls a function once per rank inside one process, for tests and lessons.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from refattn.checks import check_int, check_sizes, describe

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A rank's share of every sequence: each `interleave` consecutive tokens go to the next rank in turn.

    With 2 ranks and `interleave=2`:

        position            0 1 2 3 4 5 6 7 8
        rank                0 0 1 1 0 0 1 1 0
        index on its rank   0 1 0 1 2 3 2 3 4

    Attributes:
        rank: this rank, from 0.
        num_ranks: ranks that share each sequence.
        interleave: consecutive tokens on a rank, from 1 to the block size.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: decode context parallelism of vLLM (`dcp_rank`, `dcp_world_size`, `cp_kv_cache_interleave_size`).
    """

    rank: int
    num_ranks: int
    interleave: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_sizes(num_ranks=self.num_ranks, interleave=self.interleave)
        check_int("rank", self.rank)
        if self.rank >= self.num_ranks:
            raise ValueError(f"rank: expected 0..{self.num_ranks - 1}, got {self.rank}")


def check_is_shard(shard: Shard) -> None:
    """Check that an argument is a `Shard`; its numbers were checked when it was made.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(shard, Shard):
        raise ValueError(f"shard: expected a Shard, got {describe(shard)}")


@runtime_checkable
class Group(Protocol):
    """The collectives of a path. Each rank calls the same ones in the same order, with tensors of the same shape.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
    """

    rank: int
    size: int

    def all_gather(self, part: Shaped[Tensor, "..."], dim: int) -> Shaped[Tensor, "..."]:
        """Return the tensors of all ranks, concatenated along a dimension in rank order."""

    def reduce_scatter(self, part: Shaped[Tensor, "..."], dim: int) -> Shaped[Tensor, "..."]:
        """Return this rank's chunk, along a dimension, of the sum over all ranks."""


class DistributedGroup:
    """The ranks of a process group of torch.distributed.

    Args:
        process_group: the group; the default group if None.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """

    def __init__(self, process_group: Any = None) -> None:
        """Read the rank and the size once, as they do not change."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ValueError("process_group: expected torch.distributed to be initialised, got none that is")
        self.process_group = process_group
        self.rank: int = torch.distributed.get_rank(process_group)
        self.size: int = torch.distributed.get_world_size(process_group)

    def all_gather(self, part: Shaped[Tensor, "..."], dim: int) -> Shaped[Tensor, "..."]:
        """Return the tensors of all ranks, concatenated along a dimension in rank order."""
        _refuse_gradient(part)
        parts = part.new_empty(self.size * part.numel())
        _collective("all_gather_single", "all_gather_into_tensor")(parts, part.reshape(-1), group=self.process_group)
        return torch.cat(parts.view(self.size, *part.shape).unbind(), dim)

    def reduce_scatter(self, part: Shaped[Tensor, "..."], dim: int) -> Shaped[Tensor, "..."]:
        """Return this rank's chunk, along a dimension, of the sum over all ranks."""
        _refuse_gradient(part)
        shares = torch.stack(part.chunk(self.size, dim))
        own = torch.empty_like(shares[0])
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(
            own.view(-1), shares.view(-1), group=self.process_group
        )
        return own


def _refuse_gradient(part: Tensor) -> None:
    if part.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "group: requires_grad, but nothing goes back over torch.distributed; use simulate_ranks, or torch.no_grad()"
        )


def _collective(name: str, older_name: str) -> Callable[..., Any]:
    """Return a collective of torch.distributed by its new name (torch 2.13) or its old one."""
    collective: Callable[..., Any] = getattr(torch.distributed, name, None) or getattr(torch.distributed, older_name)
    return collective


def simulate_ranks(num_ranks: int, function: Callable[[Group], T]) -> list[T]:
    """Call a function once per rank, with groups that exchange tensors inside this process.

    The ranks are threads. One runs at a time, until it waits for the others in a collective. Gradients flow between
    ranks, if the caller records them.

    Args:
        num_ranks: the number of ranks.
        function: the function that each rank calls with its group.

    Returns:
        The results of the function, in rank order.

    Raises:
        ValueError: if the number of ranks is not positive. An error that the function raises on a rank is raised here,
            too.
    """
    check_sizes(num_ranks=num_ranks)
    meeting, is_recorded = _Meeting(), torch.is_grad_enabled()

    def run(rank: int) -> T:
        with meeting.turn, torch.set_grad_enabled(is_recorded):  # grad mode is per thread
            try:
                return function(_SimulatedGroup(rank, num_ranks, meeting))
            except BaseException as error:
                meeting.error = meeting.error or error
                raise
            finally:
                meeting.over.add(rank)
                meeting.turn.notify_all()

    with ThreadPoolExecutor(num_ranks) as threads:
        ranks = [threads.submit(copy_context().run, run, rank) for rank in range(num_ranks)]
    if meeting.error is not None:
        raise meeting.error
    return [rank.result() for rank in ranks]


class _Meeting:
    """The shared state of simulated ranks: lock, tensors of each collective, finished ranks, first error."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.parts: dict[int, dict[int, Tensor]] = {}
        self.over: set[int] = set()
        self.error: BaseException | None = None


class _SimulatedGroup:
    """One rank of a simulation."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._collectives = meeting, 0

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(part), dim)

    def reduce_scatter(self, part: Tensor, dim: int) -> Tensor:
        return sum(self._exchange(part)).chunk(self.size, dim)[self.rank]  # type: ignore[union-attr]

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Contribute a tensor, wait for the other ranks, and return the tensors of all."""
        parts = self._meeting.parts.setdefault(self._collectives, {})
        self._collectives += 1
        parts[self.rank] = part
        self._meeting.turn.notify_all()
        self._meeting.turn.wait_for(lambda: len(parts) == self.size or self._meeting.over - parts.keys())
        if len(parts) < self.size:
            raise RuntimeError(f"rank {self.rank} waits for ranks that are done: {self._meeting.over - parts.keys()}")
        return [parts[rank] for rank in range(self.size)]
