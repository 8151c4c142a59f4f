"""Deal the keys of a case out to ranks, each with a pool of its own, and attend there, in one process or in several."""

import random
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refattn.batch import Batch
from refattn.kv_cache import gather
from refattn.metadata import make_batch
from refattn.options import PER_HEAD, AttentionOptions
from refattn.ranks import DistributedGroup, Group, Shard, simulate_ranks
from refattn.scales import Int8Scales
from twinattn.kit import Case, build
from twinattn.kit.call import OPTIONS

CASES = [  # sequences shorter than the ranks are many, without a context, without new tokens
    Case("padded", ((4, 6), (1, 70), (10, 17), (0, 9), (1, 1), (1, 2)), heads=(4, 1), padding_rows=2),
    Case("odd-blocks", ((7, 50), (1, 49), (33, 33)), (8, 4), head_size=96, value_head_size=64, block_size=24),
    Case("heads-first", ((0, 0), (2, 97), (1, 130)), (4, 4), value_head_size=128, layout="HND", padding_rows=1),
]
CUTS = {  # where the part of each rank ends, in each sequence
    1: [[20], [0], [9]],
    2: [[13, 20], [0, 0], [0, 9]],
    3: [[0, 17, 20], [0, 0, 0], [9, 9, 9]],
    4: [[2, 2, 19, 20], [0, 0, 0, 0], [3, 4, 8, 9]],
}


def deal(cache: Tensor, batch: Batch, shard: Shard, *, seed: int) -> tuple[Tensor, Tensor]:
    """Lay a rank's share of every context into a pool of its own; all other memory holds what unowned blocks held.

    The new tokens are nowhere in it. What the rank has follows from counting here, not from the path.
    """
    n, p = cache.shape[:2]
    used = {
        block
        for blocks, length in zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True)
        for block in blocks[: -(-length // p)]
    }
    unowned = cache[min(set(range(n)) - used)]  # a block, of poison
    shares = []
    for blocks, seq_len, context in zip(
        batch.block_table, batch.seq_lens.tolist(), batch.context_lens.tolist(), strict=True
    ):
        mine = [j for j in range(context) if j // shard.interleave % shard.num_ranks == shard.rank]
        shares.append(gather(cache, blocks, seq_len)[mine])
    needed = [-(-len(share) // p) + 1 for share in shares]  # and one for new tokens
    free = list(range(sum(needed) + 2))
    random.Random(seed).shuffle(free)
    pool = unowned.expand(len(free), *unowned.shape).clone()
    table = torch.full((len(shares), max(needed) + 1), -1, dtype=torch.int32)
    for i, share in enumerate(shares):
        for column in range(needed[i]):
            table[i, column] = free.pop()
        for column, rows in enumerate(share.split(p) if len(share) else ()):
            pool[table[i, column], : len(rows)] = rows
    return pool, table.to(cache.device)


def prepare_rank(package: str, group: Group, tensors: tuple, *, interleave: int, **options) -> Callable[[], Any]:
    """Deal out a whole batch, and return the call that plans and attends on one rank, with its share of the heads.

    Of `quantized`, pools of a quantized key and value for each of the whole, the contexts are dealt out; new tokens are
    of the tensors.
    """
    query, key_cache, value_cache, batch = tensors
    path, shard = import_module(f"{package}.context_parallel"), Shard(group.rank, group.size, interleave)
    new_keys, new_values = (_new_rows(cache, batch, len(query)) for cache in (key_cache, value_cache))
    dealt = partial(deal, batch=batch, shard=shard, seed=group.rank)
    (keys, table), (values, _) = map(dealt, options.pop("quantized", (key_cache, value_cache)))
    if isinstance(options.get("scales"), Int8Scales):
        of_keys, _ = dealt(options["scales"].key[..., None])
        options["scales"] = Int8Scales(of_keys[..., 0], options["scales"].value)
    own_batch = Batch(
        batch.cu_seqlens_q,
        batch.seq_lens,
        table,
        batch.max_query_len,
        batch.max_seq_len,
        num_tokens=batch.num_tokens,
    )
    block_size = options.pop("block_size", key_cache.shape[1])
    masked = {name: options.pop(name) for name in ("window_size", "causal") if name in options}
    heads = slice(group.rank * query.shape[1] // group.size, (group.rank + 1) * query.shape[1] // group.size)
    fixed = {name: options.pop(name) for name in OPTIONS if name in options}
    fixed |= {name: fixed[name][heads] for name in PER_HEAD if isinstance(fixed.get(name), Tensor)}
    if isinstance(options.get("out"), Tensor):
        options["out"] = options["out"][:, heads]
    rows = query[:, heads], new_keys, new_values, keys, values

    def call() -> Any:
        plan = path.plan(own_batch, shard=shard, block_size=block_size, **masked)
        return path.attention(*rows, plan, AttentionOptions(**fixed), group=group, **options)

    return call


def attend_on_all(package: str, num_ranks: int, *tensors, return_lse: bool = False, **options):
    """Attend on simulated ranks, and put their heads side by side, as a path in one process returns them."""
    answers = simulate_ranks(
        num_ranks, lambda group: prepare_rank(package, group, tensors, return_lse=return_lse, **options)()
    )
    outs, lses = zip(*answers, strict=True) if return_lse else (answers, None)
    given = options.get("out")
    with torch.autocast("cpu", enabled=False):  # a test may have it on, and it cannot put halves together
        out = given if isinstance(given, Tensor) else torch.cat(outs, 1)
    return (out, torch.cat(lses, 1)) if return_lse else out


def part_of(step, batch: Batch, rank: int, cuts: list[list[int]]):
    """Return a rank's tokens of each sequence, and its batch; `cuts` has where each rank's part of a sequence ends."""
    rows, lens, ends = [], [], []
    for (q0, _), context, cut in zip(batch.query_rows(), batch.context_lens.tolist(), cuts, strict=True):
        first, end = (0, *cut)[rank], cut[rank]
        rows += range(q0 + first, q0 + end)
        lens.append(end - first)
        ends.append(context + end)
    return type(step)(*(x[rows] for x in step)), make_batch(lens, ends), rows


def fold_part(package: str, group: Group, step, states: Tensor, batch: Batch, cuts, options, **tables):
    """Fold a rank's tokens into a pool of its own; return the rows, the outputs and the pool."""
    own, own_batch, rows = part_of(step, batch, group.rank, cuts)
    pool, path = states.clone(), import_module(f"{package}.context_parallel")
    plan = import_module(f"{package}.recurrent").plan(own_batch, **tables)
    return rows, path.recurrent_attention(*own, pool, plan, options, group=group), pool


class Channels(NamedTuple):
    """The tokens of a step before the layer, as a convolution has them."""

    inputs: Tensor


def draw_channels(num_tokens, width=4, dtype=torch.float32):
    """Draw the inputs of a convolution, its weights, its bias, and the last inputs of four slots."""
    numbers = torch.Generator().manual_seed(7)
    inputs, last, weight = (torch.randn(shape, generator=numbers) for shape in ((num_tokens, 5), (4, 3, 5), (5, 4)))
    weights = weight[:, :width].to(dtype), torch.randn(5, generator=numbers).to(dtype), True
    return Channels(inputs.to(dtype)), weights, last[:, : width - 1].to(dtype)


def convolve_part(package: str, group: Group, step: Channels, states: Tensor, batch: Batch, cuts, weights, **tables):
    """Convolve a rank's tokens likewise; `weights` are those of the taps, the bias, and whether SiLU follows."""
    own, own_batch, rows = part_of(step, batch, group.rank, cuts)
    pool, path = states.clone(), import_module(f"{package}.context_parallel")
    plan = import_module(f"{package}.recurrent").plan(own_batch, **tables)
    weight, bias, silu = weights
    return rows, path.recurrent_convolve(*own, weight, pool, plan, group=group, bias=bias, silu=silu), pool


def fold_on_all(package: str, num_ranks: int, *arguments, of_part=fold_part, **tables) -> tuple[Tensor, list[Tensor]]:
    """Fold on simulated ranks; return the outputs of all tokens, and the pool of each rank."""
    parts = simulate_ranks(num_ranks, lambda group: of_part(package, group, *arguments, **tables))
    out = torch.cat([part for _, part, _ in parts])[torch.tensor(sum((rows for rows, _, _ in parts), [])).argsort()]
    return out, [pool for _, _, pool in parts]


def _new_rows(cache: Tensor, batch: Batch, num_rows: int) -> Tensor:
    """Read the keys of the new tokens out of a whole pool; padding rows hold NaN."""
    rows = cache.new_full((num_rows, *cache.shape[2:]), torch.nan)
    for (q0, q1), blocks, seq_len in zip(batch.query_rows(), batch.block_table, batch.seq_lens.tolist(), strict=True):
        rows[q0:q1] = gather(cache, blocks, seq_len)[seq_len - (q1 - q0) :]
    return rows


def replay(call: Callable[[], Any], seq_lens: Tensor, shortest: Tensor) -> Any:
    """Capture a step without any context in a CUDA graph, collectives and all, and replay it over the real one."""
    real = seq_lens.clone()
    seq_lens.copy_(shortest)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    seq_lens.copy_(real)
    graph.replay()
    torch.cuda.synchronize()
    return answer


def run_process(
    rank: int, size: int, folder: str, backend: str, calls: list[tuple[Case, torch.dtype, dict]], folded=()
) -> None:
    """Be one of several processes: attend in every case, fold and convolve some tokens, and leave the answers."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=size)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    answers = []
    for case, dtype, options in calls:
        inputs = build(case, dtype=dtype)
        tensors = tuple(x.to(device) for x in inputs.tensors[:3])
        b = inputs.batch
        batch = Batch(
            b.cu_seqlens_q.to(device),
            b.seq_lens.to(device),
            b.block_table.to(device),
            b.max_query_len,
            b.max_seq_len,
            num_tokens=b.num_tokens,
        )
        call = prepare_rank("fastattn", DistributedGroup(), (*tensors, batch), return_lse=True, **options)
        answer = call() if backend == "gloo" else replay(call, batch.seq_lens, batch.query_lens)
        answers.append(tuple(x.cpu() for x in answer))
    for of_part, arguments, tables in folded:
        answers.append(of_part("fastattn", DistributedGroup(), *arguments, **tables))
    torch.save(answers, Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()
