"""Our own Triton kernel: what no FlashAttention does well, short queries over any pages, and every option."""

import os
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import Options, Problem, Subtraction
from fastattn.kernels.machine import cannot_import, cannot_interpret, capability, num_multiprocessors
from refattn.batch import Batch

LARGEST_HEAD = 256
FEW_OPERATIONS = 8e9  # of all products, at most, so that they are over before the host has launched others


def supports(problem: Problem) -> str | None:
    """Say why this kernel can't compute a problem, or None."""
    interpreted = problem.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if problem.device.type != "cuda" and not interpreted:
        return f"computes on CUDA, the tensors are on {problem.device.type} (TRITON_INTERPRET=1 runs it on the CPU)"
    if not interpreted and capability(problem.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    types = [torch.float16, torch.float32, torch.bfloat16]
    if interpreted:
        types.remove(torch.bfloat16)  # the interpreter multiplies matrices of it wrongly
    if problem.dtype not in types:
        return f"computes {', '.join(map(str, types))}, not {problem.dtype}"
    if max(problem.head_size, problem.value_head_size) > LARGEST_HEAD:
        return f"head sizes up to {LARGEST_HEAD}, not {problem.head_size} and {problem.value_head_size}"
    return cannot_import("triton", "triton") or (cannot_interpret() if interpreted else None)


def suits(problem: Problem) -> bool:
    """Say whether to take this kernel: where splitting the keys pays, or where the choice must not depend on the batch.

    Another kernel gives a tile of queries to one multiprocessor, with all its keys. With few tiles most of the card
    stays idle; with few rows a tile is mostly padding. And where there is little to compute it is the host that takes
    time, half as much for a prefill of ours as for one of flash-attn-4.

    Source: measured on an NVIDIA H200 against flash-attn-4, over prompts and chunks of 64 to 2048 tokens. What is taken
    from it for its few operations alone, it would compute up to 1.6 times as fast: in 13 us less at most.
    """
    if problem.device.type != "cuda":
        return False
    rows = problem.max_query_len * (problem.num_heads // problem.num_kv_heads)
    if problem.options.batch_invariant or rows <= 16:
        return True
    scores = problem.num_seqs * problem.num_heads * problem.max_query_len * problem.max_seq_len
    if 2 * scores * (problem.head_size + problem.value_head_size) <= FEW_OPERATIONS:
        return True
    tiles = problem.num_seqs * problem.num_kv_heads * -(-rows // 128)
    room = 2 if rows <= 64 else 2.5  # multiprocessors for each tile, from which on splitting the keys pays
    return tiles * room <= num_multiprocessors(problem.device)


def dense(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    batch: Batch,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; see `fastattn.kernels.dense`."""
    from fastattn.kernels.triton_attention import attend

    return attend(query, key, value, batch, options)


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; see `fastattn.kernels.paged`."""
    from fastattn.kernels.triton_attention import attend

    return attend(query, key_cache, value_cache, batch, options)


def levels(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    levels: Sequence[tuple[Batch, Options]],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over the pages of several levels, merged; see `fastattn.kernels.levels`."""
    from fastattn.kernels.triton_attention import attend_levels

    return attend_levels(query, key_cache, value_cache, levels)


def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    batch: Batch,
    options: Options,
    subtraction: Subtraction,
) -> tuple[Float[Tensor, "t half_h 2*d"], Float[Tensor, "t h"]]:
    """Attend twice over pages and subtract, in one launch; see `fastattn.kernels.differential`."""
    from fastattn.kernels.triton_differential import attend

    return attend(query, cache, batch, options, subtraction)
