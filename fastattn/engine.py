"""Continuous batching over the fast twin: `refattn.engine`, over `fastattn`, with its decodes recorded on a GPU.

The engine computes nothing itself, and on a CPU nothing is done differently here. On a GPU a small model waits for its
host: a step of one token a request is some twenty launches a layer, each faster done than asked for. So such a step is
recorded, once for each number of rows, as a CUDA graph, and replayed as one launch:

    rows           1, 2, 4, 8, 16, 24, ..: a step with fewer requests has padding rows, which see and write nothing
    what changes   tokens, lengths and blocks are in buffers that the recording reads, filled anew for each step
    capacity       a power of two; a step with a longer sequence makes a recording of its own, for twice the length

A model whose own code synchronizes with the device cannot be recorded. Its decodes run launch by launch, and a warning
says so.

Source: CUDA graphs over a paged cache as in vLLM and SGLang, which pad to recorded sizes too.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from refattn import engine
from refattn.batch import Batch
from refattn.engine import BlockAllocator, Counters, Event, Prefix, Request, Sampling, paged_attention, sample

__all__ = [
    "BlockAllocator",
    "Counters",
    "Engine",
    "Event",
    "Prefix",
    "Request",
    "Sampling",
    "paged_attention",
    "sample",
]

logger = logging.getLogger(__name__)

FEWEST_TOKENS = 1024  # that a recording has room for, in each sequence
LAYER_SECONDS = 3e-4  # what a layer that is not replayed costs the host, so what a cascade has to save


class Engine(engine.Engine):
    """Serves requests on a model whose attention `fastattn` computes; see `refattn.engine.Engine`.

    Attributes:
        records: whether steps of single tokens are recorded and replayed; by default where the model is on CUDA, until
            it turns out that the model cannot be recorded.
    """

    package = "fastattn"

    @cached_property
    def records(self) -> bool:
        """Whether decodes are recorded and replayed."""
        return self.model.device.type == "cuda" and self.can_record

    @property
    def can_record(self) -> bool:
        """Whether all that computes is `fastattn`: another twin may ask the device, which cannot be recorded."""
        modules = (self.kv_cache, self.metadata, *self.paths.values())
        return all(isinstance(module, ModuleType) and module.__name__.startswith("fastattn.") for module in modules)

    def _forward(self, scheduled: dict[Request, int]) -> Float[Tensor, "b v"]:
        if not (self.records and all(request.num_pending == 1 for request in scheduled)):
            return super()._forward(scheduled)
        machine = self.machine and replace(self.machine, launch_seconds=max(LAYER_SECONDS, self.machine.launch_seconds))
        levels = self._make_levels(scheduled, machine)
        if levels is not None:
            return self._run_model(self._make_inputs(scheduled, levels))
        rows = _rounded_up(len(scheduled))
        longest = max(request.num_computed + 1 for request in scheduled)
        columns = 1 << (self._blocks_for(max(longest, FEWEST_TOKENS)) - 1).bit_length()
        if (rows, columns) not in self._decodes:
            self._decodes[rows, columns] = _Decode(self, rows, columns)
        try:
            return self._decodes[rows, columns].run(scheduled)
        except _RecordingError as error:
            logger.warning("%s: its decodes are not recorded any more", error, exc_info=True)
            self.records = False
            return self._run_model(self._make_inputs(scheduled))

    @cached_property
    def _decodes(self) -> "dict[tuple[int, int], _Decode]":
        return {}

    @cached_property
    def _memory(self) -> Any:
        """The pool of memory that all recordings share, as one is replayed at a time."""
        return torch.cuda.graph_pool_handle()


class _RecordingError(RuntimeError):
    """A step runs, but it cannot be recorded as a CUDA graph."""


class _Decode:
    """A step of one token for each of up to `rows` requests, recorded when it is first run.

    Args:
        server: the engine that runs the model.
        rows: how many requests it has room for.
        columns: how many blocks of each.
    """

    def __init__(self, server: Engine, rows: int, columns: int) -> None:
        self.server, self.rows = server, rows
        device = server.model.device
        self.numbers = torch.zeros(3 * rows + 1, dtype=torch.int32, device=device)
        self.block_table = torch.full((rows, columns), -1, dtype=torch.int32, device=device)
        self.batch = Batch(
            cu_seqlens_q=self.numbers[rows : 2 * rows + 1],
            seq_lens=self.numbers[2 * rows + 1 :],
            block_table=self.block_table,
            max_query_len=1,
            max_seq_len=columns * server.block_size,
        )
        self.replay: Callable[[], Tensor] | None = None

    def run(self, scheduled: dict[Request, int]) -> Float[Tensor, "b v"]:
        """Run the model over the next token of each request, and return its logits."""
        self._fill(scheduled)
        if self.replay is None:
            self.replay = _record(self._step, self.server)
        return self.replay()[: len(scheduled)]

    def _fill(self, scheduled: dict[Request, int]) -> None:
        """Write what a step has to know where the recording reads it; rows without a request have no query."""
        count = len(scheduled)
        unused = [0] * (self.rows - count)
        token_ids = [request.tokens[request.num_computed] for request in scheduled]
        seq_lens = [request.num_computed + 1 for request in scheduled]
        begins = [*range(count + 1), *(count for _ in unused)]
        self.numbers.copy_(torch.tensor([*token_ids, *unused, *begins, *seq_lens, *unused], dtype=torch.int32))
        columns = max(len(request.blocks) for request in scheduled)
        table = [request.blocks + [-1] * (columns - len(request.blocks)) for request in scheduled]
        self.block_table[:count, :columns] = torch.tensor(table, dtype=torch.int32)

    def _step(self) -> Float[Tensor, "rows v"]:
        """Make the rest of what the model is called with on the device, and run it."""
        server, metadata = self.server, self.server.metadata
        return server._run_model(
            dict(
                input_ids=self.numbers[None, : self.rows],
                position_ids=metadata.positions(self.batch, self.rows)[None],
                batch=self.batch,
                slot_mapping=metadata.slot_mapping(self.batch, self.rows, block_size=server.block_size),
            )
        )


def _record(step: Callable[[], Tensor], server: Engine) -> Callable[[], Tensor]:
    """Record what a step launches, and return the function that launches it again and returns the same tensor.

    Raises:
        _RecordingError: if the step runs, but its recording fails.
    """
    here = torch.cuda.current_stream()
    aside = torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # kernels are compiled and libraries set up before anything is recorded
        step()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=server._memory):
            logits = step()
    except Exception as error:
        torch.cuda.set_stream(here)  # a recording that fails may leave its own stream behind
        raise _RecordingError(f"{type(server.model).__name__} cannot be recorded") from error

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def _rounded_up(count: int) -> int:
    """Return the number of rows that a step of `count` requests is recorded with."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
