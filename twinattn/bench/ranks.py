"""Several processes, each with a GPU, share the keys of a workload: the row of context parallelism.

The processes draw the same inputs, keep their shares, and measure the time themselves: on GPUs, of replays of a CUDA
graph that includes the collectives. For comparison, this process alone attends to all pages, timed in the same way.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from fastattn import chunked_prefill, context_parallel
from refattn.ranks import DistributedGroup, Shard
from twinattn.bench.contender import Contender
from twinattn.bench.measure import Call, Timed
from twinattn.bench.work import Attention, Inputs

SAMPLES = 30
REPLAYS = 5  # for a sample


def ranks(num_ranks: int) -> Contender:
    """Our path on some processes, or alone; it runs when it is prepared, and a call gives one of the times it took."""

    def prepare_call(inputs: Inputs) -> Call:
        if num_ranks == 1:
            answer, seconds = _measured(_alone(inputs), inputs.query.device)
        else:
            answer, seconds = run_ranks(inputs.work, inputs.query.dtype, inputs.query.device.type, num_ranks)
        samples = itertools.cycle(seconds)
        return lambda: Timed(answer.to(inputs.query.device, copy=True), next(samples))

    def judge(inputs: Inputs) -> Callable[..., None]:
        accept = inputs.work.judge(inputs)
        return lambda timed: accept(timed.answer)

    return Contender("fastattn" if num_ranks > 1 else "fastattn, one GPU", prepare_call, judge=judge)


def run_ranks(work: Attention, dtype: torch.dtype, device_type: str, num_ranks: int) -> tuple[Tensor, list[float]]:
    """Run a process for each rank, and return the heads of all of them side by side, and the seconds of each sample.

    Args:
        work: drawn with the seed 0.
        dtype: type of its tensors.
        device_type: "cuda", with NCCL and a GPU for each rank, or "cpu", with gloo.
        num_ranks: how many processes.

    Raises:
        RuntimeError: if there are fewer GPUs than ranks.
    """
    if device_type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise RuntimeError(f"needs {num_ranks} GPUs, and there are {torch.cuda.device_count()}")
    if device_type == "cuda":
        torch.cuda.empty_cache()  # the first of them has the GPU of this process
    with TemporaryDirectory() as folder:
        spawn(_run_rank, (num_ranks, folder, work, dtype, device_type), nprocs=num_ranks)
        answers = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(num_ranks)]
    return torch.cat([answer for answer, _ in answers], 1), answers[0][1]


def _run_rank(rank: int, num_ranks: int, folder: str, work: Attention, dtype: torch.dtype, device_type: str) -> None:
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=num_ranks)
    with torch.no_grad():
        answer, seconds = _measured(_share(work.draw(device, dtype, 0), DistributedGroup()), device)
    torch.save((answer.cpu(), seconds), Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


def _alone(inputs: Inputs) -> Call:
    """Return the call of one process that has all keys."""
    plan = chunked_prefill.plan(inputs.batch, block_size=inputs.work.block_size)
    return partial(chunked_prefill.attention, inputs.query, inputs.key_cache, inputs.value_cache, plan)


def _share(inputs: Inputs, group: DistributedGroup) -> Call:
    """Return the call of a rank, over a pool with its share of the contexts."""
    work, batch = inputs.work, inputs.batch
    shard = Shard(group.rank, group.size)
    mine, new = [], []
    for (query_len, _), (begin, end) in zip(work.lens, work.key_rows(), strict=True):
        mine.append(begin + context_parallel.own_positions(end - begin - query_len, shard))
        new.append(torch.arange(end - query_len, end))
    places, own = torch.cat(mine).to(batch.device), replace(work, lens=tuple((1, len(share)) for share in mine))
    new_rows = torch.cat(new).to(batch.device)
    key, value = inputs.key[new_rows], inputs.value[new_rows]
    key_cache, value_cache, of_share = own.pages(inputs.key[places], inputs.value[places], work.block_size)
    plan = context_parallel.plan(
        replace(batch, block_table=of_share.block_table), shard=shard, block_size=work.block_size
    )
    query = inputs.query.chunk(group.size, dim=1)[group.rank].contiguous()
    return lambda: context_parallel.attention(query, key, value, key_cache, value_cache, plan, group=group)


def _replayed(call: Call) -> tuple[Tensor, list[float]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    seconds = []
    for _ in range(SAMPLES + 10):  # the first ones let the clock come up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(1e-3 * begin.elapsed_time(end) / REPLAYS)
    return answer, seconds[10:]


def _measured(call: Call, device: torch.device) -> tuple[Tensor, list[float]]:
    """Return an answer and how long it takes: replays on a GPU, one call on a CPU."""
    if device.type == "cuda":
        return _replayed(call)
    begin = time.perf_counter()
    return call(), [time.perf_counter() - begin]
