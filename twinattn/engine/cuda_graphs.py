"""Steps replayed as CUDA graphs: a runner for `twinattn.engine.Engine`.

On a GPU a small model is bound by CPU launch overhead: a step is some twenty launches per layer, and each takes the GPU
less time than the CPU. So a step is captured as a CUDA graph, once for each shape, and replayed as one launch:

    requests       1, 2, 4, 8, 16, 24, ..: a step with fewer has padding rows, which see and write nothing
    tokens         one per request in a decode; else rounded up by less than an eighth, with padding rows likewise
    all steps      launched before the tokens of the one before are read, which they find on the device
    drafts         trees of any shape, whose parents are in buffers, too; each of their nodes has logits
    states         the slots that a step reads, writes and keeps are in buffers, too, and those of padding rows are -1;
                   each request of a decode reads one slot and writes another, ahead a third one. So are the cursors of
                   rings: a graph serves any of them
    their order    the longest sequence first: the GPU ends with short ones then, on all of its SMs
    what changes   tokens, lengths, blocks and the maps of window pools are in buffers that the graph reads, filled
                   anew for each step; plans are derived from them on the device, once per step
    capacity       a power of two; a step with a longer sequence is captured anew, for twice the length

A decode is captured at once, as more of its shape follow. A step with prompts is captured when its shape comes again,
and only if the host takes longer for it than the GPU; else it is launched one by one, while the GPU is still at the
step before it, and so is a decode that shares a prefix. A model whose own code synchronizes with the device cannot be
captured: its steps run launch by launch, and a warning says so.

Source: CUDA graphs over a paged cache as in vLLM and SGLang, which pad to captured sizes too.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import accumulate, chain
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

import fastattn
from fastattn.kernels.device import on_gpu
from refattn.batch import Batch, Part, Prefix
from refattn.steps import to_device
from refattn.trees import Trees
from twinattn.engine.decode_rows import DecodeRows
from twinattn.engine.engine import Engine
from twinattn.engine.fast_sampling import sample
from twinattn.engine.graph_shapes import Shape, columns_for, doublings, rounded_up, shape_of, shape_of_decode
from twinattn.engine.planner import DeviceTokens
from twinattn.engine.request import Request, StepTokens, fill_in
from twinattn.engine.runner import UnderWay
from twinattn.engine.sampling import settings_of
from twinattn.engine.state_layers import StateParts, copy_states, is_plain, part_of, row_len, rows_of

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", "_Step", "_Decode")

LAYER_SECONDS = 3e-4  # what a layer that is not replayed costs the host, so what a cascade has to save


def _on_gpu_of_model(
    method: Callable[Concatenate["CudaGraphs", Engine, P], T],
) -> Callable[Concatenate["CudaGraphs", Engine, P], T]:
    """Run a runner's method on the GPU of its engine's model, whichever one is current."""

    @wraps(method)
    def call(runner: "CudaGraphs", engine: Engine, /, *arguments: P.args, **options: P.kwargs) -> T:
        with on_gpu(engine.model.device):
            return method(runner, engine, *arguments, **options)

    return call


class CudaGraphs:
    """Records steps and replays them; one runner serves one engine, whose twin is `fastattn`.

    Attributes:
        records: whether steps are captured: the result of `can_record`, until it turns out that the model cannot be
            captured. None before the first step.
    """

    def __init__(self) -> None:
        self.records: bool | None = None
        self._engine: Engine | None = None
        self._steps: dict[Shape, _Step | _Decode] = {}
        self._seen: Counter[Shape] = Counter()  # steps with prompts, by shape
        self._last: _Launched | None = None  # the step whose tokens are in `chosen`

    @staticmethod
    def can_record(engine: Engine) -> bool:
        """Return whether everything is computed by `fastattn` on CUDA: another twin may synchronize with the device."""
        return engine.model.device.type == "cuda" and engine.twin.package is fastattn

    @_on_gpu_of_model
    def launch(self, engine: Engine, scheduled: Mapping[Request, int]) -> UnderWay | None:
        """Launch a step all of whose tokens the host knows; None if steps are not captured.

        Raises:
            ValueError: if the runner has served another engine.
        """
        if not self._is_recording(engine):
            return None
        engine.mark("tables")
        return self._launch(engine, scheduled, StepTokens.of(scheduled), None)

    @_on_gpu_of_model
    def launch_next(self, engine: Engine, before: UnderWay, scheduled: Mapping[Request, int]) -> UnderWay | None:
        """Launch the step after one whose tokens have not been read; None if another one was launched since."""
        if self._last is None or before is not self._last or not self._is_recording(engine):
            return None
        engine.mark("tables")
        if self._last.rows is not None:
            rows = [row for row, request in enumerate(before.requests) if request in scheduled]
            if len(rows) == len(scheduled):  # a decode after a decode
                states = engine.scheduler.states
                return self._replay(self._last.rows.next(rows, block_size=engine.block_size, states=states))
        rows_of = {request: row for row, request in enumerate(before.requests)}
        tokens = StepTokens.of(scheduled, before.scheduled, rows_of, self.chosen)
        return self._launch(engine, scheduled, tokens, rows_of)

    def _launch(
        self,
        engine: Engine,
        scheduled: Mapping[Request, int],
        tokens: StepTokens,
        before: Mapping[Request, int] | None,
    ) -> UnderWay | None:
        """Launch a step, and the choice of its next tokens.

        Args:
            engine: the engine.
            scheduled: the new tokens of each request.
            tokens: the same.
            before: of a step that is launched ahead, the row of each request that gets a token in the step before.
        """
        due = tokens.due
        if len(due) == len(tokens.input_ids):  # a decode
            prefixes = self._find_prefixes(tokens)
            if not prefixes:
                longest_first = sorted(due, key=lambda request: -len(request.tokens))
                return self._replay(DecodeRows.of(longest_first, engine.scheduler.states, before))
            logits = engine.run_model(engine.make_inputs(tokens, prefixes))
        else:
            logits = engine.logits_of(tokens)
        settings = settings_of(due, [int(request in (before or ())) for request in due])
        chosen = _choose(logits, settings, to_device(settings, logits.device))
        self.chosen[: len(due)] = chosen
        self._last = _Launched(scheduled, due, _read_later(chosen), None)
        return self._last

    @_on_gpu_of_model
    @torch.no_grad()
    def warm_up(self, engine: Engine, num_tokens: int) -> None:
        """Capture the decodes of as many requests as may run, up to a length; they compute padding rows alone.

        Args:
            engine: the engine, which runs nothing now.
            num_tokens: tokens of the longest sequence.
        """
        if not self._is_recording(engine):
            return
        counts = sorted({rounded_up(count) for count in range(1, engine.max_num_seqs + 1)}, reverse=True)
        lengths = sorted({columns_for(engine, length) for length in (1, *doublings(num_tokens))})
        try:
            for shape in (Shape(count, columns, count, 1) for count in counts for columns in lengths):
                self._step_of(shape, _Decode).capture()
        except _RecordingError as error:
            self._give_up(error)

    def forget(self) -> None:
        """Drop all captured steps: they read weights where those were, and scales as they were."""
        if self._engine is not None and self._engine.model.device.type == "cuda":
            torch.cuda.synchronize(self._engine.model.device)  # one may be under way
        self._steps.clear()
        self._seen.clear()
        self._last = None
        vars(self).pop("memory", None)

    def _replay(self, rows: DecodeRows) -> "_Launched | None":
        """Launch a decode as a graph; None if it cannot be captured."""
        assert self._engine is not None  # a step has come
        shape = shape_of_decode(self._engine, rows)
        try:
            self._last = self._step_of(shape, _Decode).launch(rows)
        except _RecordingError as error:
            self._give_up(error)
        return self._last

    @_on_gpu_of_model
    def run(self, engine: Engine, tokens: StepTokens) -> Float[Tensor, "rows v"] | None:
        """Run a step and return the logits of its `logits_rows`; None if it is not captured.

        Raises:
            ValueError: if the runner has served another engine.
        """
        if not self._is_recording(engine):
            return None
        shape = shape_of(engine, tokens)
        if not self._is_worth_recording(engine, shape):
            return None
        prefixes = self._find_prefixes(tokens)
        if prefixes:
            return engine.run_model(engine.make_inputs(tokens, prefixes))
        try:
            return self._step_of(shape, _Step).run(tokens)
        except _RecordingError as error:
            self._give_up(error)
            return engine.run_model(engine.make_inputs(tokens))

    def _step_of(self, shape: Shape, kind: type[S]) -> S:
        """Return the step of a shape, which is captured when it is first run."""
        assert self._engine is not None  # a step has come
        if shape not in self._steps:
            self._steps[shape] = kind(self._engine, self, shape)
        step = self._steps[shape]
        assert isinstance(step, kind)  # decodes have one token per request, and others do not
        return step

    def _is_recording(self, engine: Engine) -> bool:
        """Return whether steps of this engine are captured."""
        if self._engine not in (None, engine):
            raise ValueError("engine: expected the one that this runner served before, got another")
        self._engine = engine
        if self.records is None:
            self.records = self.can_record(engine)
        return self.records

    def _give_up(self, error: "_RecordingError") -> None:
        logger.warning("%s: its steps are not recorded any more", error, exc_info=True)
        self.records, self._last = False, None

    def _find_prefixes(self, tokens: StepTokens) -> list[Prefix]:
        """Return the shared prefixes for which it is worth it to launch a step one by one."""
        assert self._engine is not None  # a step has come
        machine = self._engine.machine
        machine = replace(machine, launch_seconds=max(LAYER_SECONDS, machine.launch_seconds))
        return self._engine.find_prefixes(tokens, machine)

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
    def chosen(self) -> Int64[Tensor, "rows"]:
        """The tokens of the last step, on the device, where the next one reads them."""
        assert self._engine is not None  # a step has come
        rows = rounded_up(self._engine.max_num_seqs)
        return torch.zeros(rows, dtype=torch.int64, device=self._engine.model.device)

    @cached_property
    def memory(self) -> Any:
        """The pool of memory that all graphs share, as one is replayed at a time."""
        return torch.cuda.graph_pool_handle()


class _RecordingError(RuntimeError):
    """A step runs, but it cannot be captured as a CUDA graph."""


@dataclass(frozen=True)
class _Launched(UnderWay):
    """A step under way; of a replayed decode with the rows that the next one follows from."""

    rows: DecodeRows | None


def _choose(
    logits: Float[Tensor, "b v"], known: Float64[Tensor, "3 b"], settings: Float64[Tensor, "3 b"]
) -> Int64[Tensor, "b"]:
    """Choose the next tokens on the device, where the settings are; the host knows whether there is any nucleus."""
    temperature, top_p, uniform = settings
    return sample(logits, temperature, top_p if bool((known[1] < 1).any()) else None, uniform)


def _read_later(tokens: Int64[Tensor, "b"]) -> Callable[[], list[int | None]]:
    """Copy tokens to the host as soon as they are there; return the function that waits for them."""
    host = torch.empty_like(tokens, device="cpu", pin_memory=tokens.is_cuda)
    host.copy_(tokens, non_blocking=True)
    done = _record_event(tokens.device)

    def read() -> list[int | None]:
        if done is not None:
            done.synchronize()
        return [None if token < 0 else token for token in host.tolist()]

    return read


class _Decode:
    """A decode of some shape, captured when it is first launched.

    Everything that changes from decode to decode is copied at once, from memory of the host that the device can read.
    There are two pieces of it, in turns, as one may still be on its way.

    Args:
        server: the engine that runs the model.
        runner: whose graphs share their memory.
        shape: what it has room for.
    """

    def __init__(self, server: Engine, runner: CudaGraphs, shape: Shape) -> None:
        self.server, self.runner, self.shape = server, runner, shape
        device = server.model.device
        slots, host = _slots_len(server), torch.device("cpu")
        self.inputs = _Inputs.allocate(shape, slots, device)
        self.staged = [_Inputs.allocate(shape, slots, host, pinned=device.type == "cuda") for _ in range(2)]
        self.copied: list[Any] = [None, None]  # the event after the last copy of each
        self.batch = Batch(
            cu_seqlens_q=self.inputs.cu_seqlens_q,
            seq_lens=self.inputs.seq_lens,
            block_table=self.inputs.block_table,
            max_query_len=1,
            max_seq_len=shape.columns * server.block_size,
        )
        self.replay: Callable[[], Tensor] | None = None

    def launch(self, rows: DecodeRows) -> _Launched:
        """Launch the decode of some rows, and the choice of their next tokens."""
        replay = self.capture()
        self.server.mark("copies")
        self._copy(rows)
        self.server.mark("forward")
        count = len(rows.requests)
        tokens = _choose(replay()[:count], rows.settings, self.inputs.settings[:, :count])
        self.runner.chosen[:count] = tokens
        return _Launched(dict.fromkeys(rows.requests, 1), rows.requests, _read_later(tokens), rows)

    def capture(self) -> Callable[[], Tensor]:
        """Return what launches the model and returns its logits, captured when it is first asked for.

        A capture computes the step once before: so no request is there yet, whose state would change twice.
        """
        if self.replay is None:
            self.replay = _record(self._step, self.runner, type(self.server.model).__name__)
        return self.replay

    def _copy(self, rows: DecodeRows) -> None:
        """Write the rows where the graph reads them; rows without a request have no query."""
        self.staged.reverse()
        self.copied.reverse()
        if self.copied[0] is not None:
            self.copied[0].synchronize()
        self.staged[0].fill(rows)
        self.inputs.memory.copy_(self.staged[0].memory, non_blocking=True)
        self.copied[0] = _record_event(self.inputs.memory.device)
        states = self.server.scheduler.states
        if states is not None:
            copy_states(self.server.twin, rows.copies, states, list(self.server.state_caches.values()))
        for pool in self.server.window_pools.values():
            pool.refresh(self.inputs.memory.device)

    def _step(self) -> Float[Tensor, "rows v"]:
        """Make the inputs of the model on the device, and run it. A row that failed goes on with token 0, unread."""
        sources, given = self.inputs.sources.long(), self.inputs.input_ids
        input_ids = self.runner.chosen[sources.clamp(min=0)].clamp(min=0).where(sources >= 0, given)
        rows, states = torch.arange(len(sources), device=sources.device), _plan_states(self, self.inputs.slots)
        return self.server.run_model(
            self.server.planner.inputs_of(DeviceTokens(self.batch, input_ids, rows, states=states))
        )


@dataclass(frozen=True)
class _Inputs:
    """What changes from decode to decode, in one piece of memory; attributes as in `DecodeRows` and `Batch`."""

    memory: Int32[Tensor, "n"]
    settings: Float64[Tensor, "3 rows"]
    seq_lens: Int32[Tensor, "rows"]
    cu_seqlens_q: Int32[Tensor, "_"]
    sources: Int32[Tensor, "rows"]
    input_ids: Int32[Tensor, "rows"]
    block_table: Int32[Tensor, "rows columns"]
    slots: Int32[Tensor, "rows slots"]

    @classmethod
    def allocate(cls, shape: Shape, slots_len: int, device: torch.device, *, pinned: bool = False) -> "_Inputs":
        """Allocate the memory for a shape; floats come first, as they begin at multiples of 8 bytes."""
        rows, columns = shape.rows, shape.columns
        sizes = [6 * rows, rows, rows + 1, rows, rows, rows * columns, rows * slots_len]
        memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pinned)
        settings, seq_lens, cu_seqlens_q, sources, input_ids, table, slots = memory.split(sizes)
        floats = settings.view(torch.float64).view(3, rows)
        tables = table.view(rows, columns), slots.fill_(-1).view(rows, slots_len)
        return cls(memory, floats, seq_lens, cu_seqlens_q, sources, input_ids, *tables)

    def fill(self, rows: DecodeRows) -> None:
        """Write some rows, and padding after them."""
        count, columns = len(rows.requests), min(rows.block_table.shape[1], self.block_table.shape[1])
        self.settings[:, :count] = rows.settings
        torch.arange(len(self.cu_seqlens_q), out=self.cu_seqlens_q).clamp_(max=count)
        for mine, given in (
            (self.seq_lens, rows.seq_lens),
            (self.sources, rows.sources),
            (self.input_ids, rows.input_ids),
        ):
            mine[:count], mine[count:] = given, 0
        self.block_table[:count, :columns] = rows.block_table[:, :columns]  # more are of tokens to come, or who left
        self.slots[:count], self.slots[count:] = rows.slots, -1


def _slots_len(server: Engine) -> int:
    """Return the numbers that say where the states of a request are; 0 without layers that keep one."""
    pool = server.scheduler.states
    return 0 if pool is None else row_len(pool)


def _plan_states(step: "_Decode | _Step", slots: Int32[Tensor, "rows slots"]) -> StateParts:
    """Plan the layers that keep a state on the device, from the slots of each row.

    Decodes and prefills have a plan each, over all rows: which rows are which is not known yet.
    """
    pool = step.server.scheduler.states
    if pool is None:
        return ()
    kinds = ["decode", "prefill"][: 1 if step.shape.queries <= pool.decode_len else 2]
    if step.shape.queries == 1 and is_plain(pool, step.shape.rows):
        kinds = ["plain"]
    num_blocks, part = step.shape.columns if pool.num_kept else 0, Part(step.batch, slice(None))
    return tuple(part_of(step.server.twin, part, slots, pool, num_blocks, kind) for kind in kinds)


def _record_event(device: torch.device) -> Any:
    """Return an event for what was launched so far; None on a device that has done it by now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


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
        nodes, slots_len = queries if has_trees else 0, _slots_len(server)
        sizes = [tokens, rows + 1, rows, self.most_logits, rows, rows * slots_len, rows * nodes]
        self.numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.input_ids, cu_seqlens_q, seq_lens, self.logits_rows, tree_lens, slots, parents = self.numbers.split(sizes)
        self.slots = slots.fill_(-1).view(rows, slots_len)
        self.trees = Trees(parents.fill_(-1).view(rows, nodes), tree_lens) if has_trees else None
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
        if self.replay is None:  # capturing computes the step once, before there is any request
            self.replay = _record(self._step, self.runner, type(self.server.model).__name__)
        self.server.mark("copies")
        self._fill(tokens)
        self.server.mark("forward")
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
        states = self.server.scheduler.states
        if states is not None:
            slots = [states.slots_of(request, tokens.chosen is not None) for request in tokens.requests]
            of_states, copies = rows_of(slots, tokens.query_lens, states)
            numbers += chain(*of_states, [-1] * (row_len(states) * len(unused)))
            copy_states(self.server.twin, copies, states, list(self.server.state_caches.values()))
        if tokens.parents is not None:  # the shape has room for trees then
            for parents in tokens.parents:
                numbers += [*parents, *[-1] * (nodes - len(parents))]
            numbers += [-1] * (nodes * len(unused))
        self.numbers.copy_(to_device(torch.tensor(numbers, dtype=torch.int32), self.numbers.device))
        columns = min(max(map(len, tokens.block_tables)), self.shape.columns)  # more are of tokens to come
        table = [blocks[:columns] + [-1] * (columns - len(blocks)) for blocks in tokens.block_tables]
        self.block_table[:count, :columns] = to_device(torch.tensor(table, dtype=torch.int32), self.numbers.device)
        for pool in self.server.window_pools.values():
            pool.refresh(self.block_table.device)

    def _step(self) -> Float[Tensor, "rows v"]:
        """Make the inputs of the model on the device, and run it."""
        states, rows = _plan_states(self, self.slots), self.logits_rows.long()
        input_ids = fill_in(self.input_ids, self.runner.chosen)
        tokens = DeviceTokens(self.batch, input_ids, rows, self.trees, states=states)
        return self.server.run_model(self.server.planner.inputs_of(tokens))


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
        with _no_garbage_collected(), torch.cuda.graph(graph, pool=runner.memory):
            logits = step()
    except Exception as error:
        torch.cuda.set_stream(here)  # a capture that fails may leave its own stream behind
        raise _RecordingError(f"{name} cannot be recorded") from error

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Pause garbage collection: it could free a graph of another engine, which no capture survives."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
