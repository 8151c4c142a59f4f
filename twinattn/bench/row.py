"""A row of the benchmark: what is computed, who computes it, and what the twin should reach."""

from dataclasses import dataclass
from typing import Any

from twinattn.bench.contender import Contender
from twinattn.bench.work import Attention, Work, workload


@dataclass(frozen=True)
class Row:
    """One work, and who computes it.

    Attributes:
        path: the twin that is measured.
        name: the workload in short.
        work: what is computed.
        contenders: the twin first, then its peers.
        clock: on CUDA, what is timed: see `measure.on_gpu`. Of a "graph", the row is timed by events if some contender
            cannot be captured.
        aim: what the twin should reach, in words.
        memory: measure the peak memory of a call too.
        launches: on CUDA, count what a call launches too.
    """

    path: str
    name: str
    work: Work
    contenders: tuple[Contender, ...]
    clock: str = "graph"
    aim: str = ""
    memory: bool = False
    launches: bool = False

    def __str__(self) -> str:
        """Name the row, as `--rows` finds it."""
        return f"{self.path}/{self.name}"


def row_of(name: str, work: Attention, *contenders: Contender, **more: Any) -> Row:
    """Make a row of the path of its work."""
    return Row(work.path, name, work, contenders, **more)


def work_of(
    shrink: int, *lens: tuple[int, int], window: int = 0, chunk: int = 0, shared: int = 0, **more: Any
) -> Attention:
    """Make a workload out of numbers of tokens, divided by `shrink`."""
    return workload(
        tuple((max(1, query_len // shrink), seq_len // shrink) for query_len, seq_len in lens),
        window=window // shrink,
        chunk=chunk // shrink,
        shared=shared // shrink,
        **more,
    )
