"""Steps replayed as CUDA graphs: a runner for `refattn.serving.Engine`.

On a GPU a small model is bound by CPU launch overhead: a step is some twenty launches per layer, and each takes the GPU
less time than the CPU. So a step is captured as a CUDA graph, once for each shape, and replayed as one launch:

    requests       1, 2, 4, 8, 16, 24, ..: a step with fewer has padding rows, which see and write nothing
    tokens         one per request in a decode; else rounded up by less than an eighth, with padding rows likewise
    drafts         trees of any shape, whose parents are in buffers, too; each of their nodes has logits
    what changes   tokens, lengths, blocks and the maps of window pools are in buffers that the graph reads, filled
                   anew for each step; plans are derived from them on the device, once per step
    capacity       a power of two; a step with a longer sequence is captured anew, for twice the length

A decode is captured at once, as more of its shape follow. A step with prompts is captured when its shape comes again,
and only if the host takes longer for it than the GPU. A model whose own code synchronizes with the device cannot be
captured: its steps run launch by launch, and a warning says so.

Source: CUDA graphs over a paged cache as in vLLM and SGLang, which pad to captured sizes too.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import fastattn
from refattn.interface import Batch, Trees
from refattn.serving import Engine, StepTokens

logger = logging.getLogger(__name__)

FEWEST_TOKENS = 1024  # that a graph has room for, in each sequence
LAYER_SECONDS = 3e-4  # what a layer that is not replayed costs the host, so what a cascade has to save


class Shape(NamedTuple):
    """The capacity of a captured graph.

    Attributes:
        rows: requests.
        columns: blocks of each.
        tokens: new tokens of all requests together.
        queries: new tokens of each, at most.
        trees: whether drafts are more than chains.
    """

    rows: int
    columns: int
    tokens: int
    queries: int
    trees: bool = False


class CudaGraphs:
    """Records steps and replays them; one runner serves one engine, whose twin is `fastattn`.

    Attributes:
        records: whether steps are captured: the result of `can_record`, until it turns out that the model cannot be
            captured. None before the first step.
    """

    def __init__(self) -> None:
        self.records: bool | None = None
        self._engine: Engine | None = None
        self._steps: dict[Shape, _Step] = {}
        self._seen: Counter[Shape] = Counter()  # steps with prompts, by shape

    @staticmethod
    def can_record(engine: Engine) -> bool:
        """Return whether everything is computed by `fastattn` on CUDA: another twin may synchronize with the device.

        A model with layers that keep a state runs launch by launch: the slots of a step are not in buffers yet.
        """
        if engine.state_layers:
            return False
        return engine.model.device.type == "cuda" and engine.twin.package is fastattn

    def run(self, engine: Engine, tokens: StepTokens) -> Float[Tensor, "rows v"] | None:
        """Run a step and return the logits of its `logits_rows`; None if it is not captured.

        Raises:
            ValueError: if the runner has served another engine.
        """
        if self._engine not in (None, engine):
            raise ValueError("engine: expected the one that this runner served before, got another")
        self._engine = engine
        if self.records is None:
            self.records = self.can_record(engine)
        if not self.records:
            return None
        shape = _shape_of(engine, tokens)
        if shape.queries > 1 and not self._is_worth_recording(engine, shape):
            return None
        machine = replace(engine.machine, launch_seconds=max(LAYER_SECONDS, engine.machine.launch_seconds))
        prefixes = engine.find_prefixes(tokens, machine)
        if prefixes:
            return engine.run_model(engine.make_inputs(tokens, prefixes))
        if shape not in self._steps:
            self._steps[shape] = _Step(engine, self, shape)
        try:
            return self._steps[shape].run(tokens)
        except _RecordingError as error:
            logger.warning("%s: its steps are not recorded any more", error, exc_info=True)
            self.records = False
            return engine.run_model(engine.make_inputs(tokens))

    def _is_worth_recording(self, engine: Engine, shape: Shape) -> bool:
        """Return whether a step with prompts takes the host longer than the GPU, and is not the first of its shape."""
        self._seen[shape] += 1
        on_gpu = 2 * self._parameters * shape.tokens / engine.machine.flops_per_second
        return self._seen[shape] > 1 and on_gpu < LAYER_SECONDS * len(engine.layers)

    @cached_property
    def _parameters(self) -> int:
        assert self._engine is not None  # a step has come
        return sum(weight.numel() for weight in self._engine.model.parameters())

    @cached_property
    def memory(self) -> Any:
        """The pool of memory that all graphs share, as one is replayed at a time."""
        return torch.cuda.graph_pool_handle()


class _RecordingError(RuntimeError):
    """A step runs, but it cannot be captured as a CUDA graph."""


class _Step:
    """A step of some shape, captured when it is first run.

    Args:
        server: the engine that runs the model.
        runner: whose graphs share their memory.
        shape: what it has room for.
    """

    def __init__(self, server: Engine, runner: CudaGraphs, shape: Shape) -> None:
        self.server, self.runner, self.shape = server, runner, shape
        rows, columns, tokens, queries, has_trees = shape
        device = server.model.device
        self.most_logits = rows if server.speculation is None else tokens  # every node of a draft has some
        nodes = queries if has_trees else 0
        sizes = [tokens, rows + 1, rows, self.most_logits, rows, rows * nodes]
        self.numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.input_ids, cu_seqlens_q, seq_lens, self.logits_rows, tree_lens, parents = self.numbers.split(sizes)
        self.trees = Trees(parents.view(rows, nodes), tree_lens) if has_trees else None
        self.block_table = torch.full((rows, columns), -1, dtype=torch.int32, device=device)
        self.batch = Batch(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=self.block_table,
            max_query_len=queries,
            max_seq_len=columns * server.block_size,
        )
        self.replay: Callable[[], Tensor] | None = None

    def run(self, tokens: StepTokens) -> Float[Tensor, "rows v"]:
        """Run the model over the new tokens of a step, and return the logits of its `logits_rows`."""
        self.server.mark("copies")
        self._fill(tokens)
        self.server.mark("forward")
        if self.replay is None:
            self.replay = _record(self._step, self.runner, type(self.server.model).__name__)
        return self.replay()[: len(tokens.logits_rows)]

    def _fill(self, tokens: StepTokens) -> None:
        """Write a step where the graph reads it; rows without a request have no query."""
        rows, _, num_tokens, nodes, _ = self.shape
        ends, count = list(accumulate(tokens.query_lens)), len(tokens.query_lens)
        unused = [0] * (rows - count)
        numbers = [
            *(*tokens.input_ids, *[0] * (num_tokens - ends[-1])),
            *(0, *ends, *[ends[-1]] * len(unused)),
            *(*tokens.seq_lens, *unused),
            *(*tokens.logits_rows, *[0] * (self.most_logits - len(tokens.logits_rows))),
            *(*tokens.query_lens, *unused),
        ]
        if tokens.parents is not None:  # the shape has room for trees then
            for parents in tokens.parents:
                numbers += [*parents, *[-1] * (nodes - len(parents))]
            numbers += [-1] * (nodes * len(unused))
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.int32))
        columns = max(map(len, tokens.block_tables))
        table = [blocks + [-1] * (columns - len(blocks)) for blocks in tokens.block_tables]
        self.block_table[:count, :columns] = torch.tensor(table, dtype=torch.int32)
        for pool in self.server.window_pools.values():
            pool.refresh(self.block_table.device)

    def _step(self) -> Float[Tensor, "rows v"]:
        """Make the inputs of the model on the device, and run it."""
        inputs = self.server.inputs_of(self.batch, self.input_ids, self.logits_rows.long(), self.trees)
        return self.server.run_model(inputs)


def _shape_of(engine: Engine, tokens: StepTokens) -> Shape:
    """Return the room for a step."""
    columns = _power_of_2(-(-max(*tokens.seq_lens, FEWEST_TOKENS) // engine.block_size))
    rows, queries = _rounded_up(len(tokens.query_lens)), _power_of_2(max(tokens.query_lens))
    if queries == 1:
        return Shape(rows, columns, rows, 1)
    unit = max(1, _power_of_2(len(tokens.input_ids)) // 16)
    num_tokens = -(-len(tokens.input_ids) // unit) * unit
    return Shape(rows, columns, num_tokens, queries, trees=tokens.parents is not None)


def _record(step: Callable[[], Tensor], runner: CudaGraphs, name: str) -> Callable[[], Tensor]:
    """Record what a step launches, and return the function that launches it again and returns the same tensor.

    Raises:
        _RecordingError: if the step runs, but its capture fails.
    """
    here = torch.cuda.current_stream()
    aside = torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # kernels are compiled and libraries set up before anything is captured
        step()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=runner.memory):
            logits = step()
    except Exception as error:
        torch.cuda.set_stream(here)  # a capture that fails may leave its own stream behind
        raise _RecordingError(f"{name} cannot be recorded") from error

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def _rounded_up(count: int) -> int:
    """Return the number of rows that a step of `count` requests is captured with."""
    return _power_of_2(count) if count <= 8 else -(-count // 8) * 8


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
