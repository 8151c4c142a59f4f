"""Our own Triton kernels, for what FlashAttention does less well: short queries over any pages, all options, tables."""

import os
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from fastattn.kernels.device import cannot_import, cannot_interpret, capability, is_rocm
from fastattn.kernels.problem import Problem, Subtraction
from refattn.interface import (
    Accepted,
    AttentionOptions,
    AttentionPlan,
    Batch,
    Fp8Scales,
    Int8Scales,
    Keys,
    Latents,
    Plan,
    TreePlan,
    Trees,
)

OPERATIONS = (
    *("dense", "paged", "levels", "tree", "differential", "mla", "mla_tree", "merge"),
    *("quantized", "quantized_levels", "quantized_tree"),
    *("write", "write_quantized", "copy_blocks", "compact", "slot_mapping", "trim", "cut_chunks", "draw_trees"),
)
LARGEST_HEAD = 256
LARGEST_LATENT = 512
LARGEST_ROPE = 128
MAX_PAIRS = 1024  # copies of blocks that one program can hold


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None."""
    interpreted = problem.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if problem.device.type != "cuda" and not interpreted:
        return f"computes on CUDA, the tensors are on {problem.device.type} (TRITON_INTERPRET=1 runs it on the CPU)"
    if not interpreted and not is_rocm() and capability(problem.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    if problem.operation == "differential" and problem.positions:
        return "subtracts the answers of query rows that are the last of their sequences, at no other positions"
    if problem.operation == "merge" and problem.dtype != torch.float32:
        return f"merges by log-sum-exps in float32, not {problem.dtype}"
    if problem.operation == "copy_blocks" and not problem.aligned:
        return "copies blocks whose elements lie side by side, without gaps"
    if problem.operation == "copy_blocks" and problem.num_pairs > MAX_PAIRS:
        return f"copies at most {MAX_PAIRS} blocks at once, not {problem.num_pairs}"
    if problem.operation == "compact" and not problem.aligned:
        return "moves tokens of pools of at most four dimensions"
    types = [torch.float16, torch.float32, torch.bfloat16]
    if interpreted:
        types.remove(torch.bfloat16)  # the interpreter multiplies matrices of it wrongly
    if problem.is_attention and problem.dtype not in types:
        return f"computes {', '.join(map(str, types))}, not {problem.dtype}"
    if problem.stored is not None and torch.float64 in problem.stored and problem.is_attention:
        return "multiplies values of up to 32 bits, not those of float64"
    rope = problem.head_size - problem.value_head_size
    if problem.operation in ("mla", "mla_tree"):
        if problem.value_head_size > LARGEST_LATENT or rope > LARGEST_ROPE:
            sizes = f"{problem.value_head_size} and {rope}"
            return f"latents of up to {LARGEST_LATENT} and rotary keys of up to {LARGEST_ROPE} elements, not {sizes}"
    elif max(problem.head_size, problem.value_head_size) > LARGEST_HEAD:
        return f"head sizes up to {LARGEST_HEAD}, not {problem.head_size} and {problem.value_head_size}"
    return cannot_import("triton", "triton", "jit") or (cannot_interpret() if interpreted else None)


# Triton is imported when a kernel is first called: it is not there on every machine. No file of this folder may have
# the name of an operation: its first import would put the file in the place of the function.


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to any storage under any plan, but to latents in one level; see `fastattn.kernels.dispatch`.

    A tree is one softmax with the keys before it, latents are loaded once as key and as value, and codes become numbers
    in registers.
    """
    from fastattn.kernels.gpu.codes import codes_in_pairs
    from fastattn.kernels.triton.attention import attend_levels, pools_of

    key, value, codes = pools_of(query, keys)
    plans = [level.whole for level in plan.levels]
    if codes.kind:
        key, value = codes_in_pairs(query, key, value, plans, options)
    tree, shared = plan if isinstance(plan, TreePlan) else None, isinstance(keys, Latents)
    return attend_levels(query, key, value, plans, options, out, shared=shared, codes=codes, tree=tree)


def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    subtraction: Subtraction,
    out: Float[Tensor, "t h d"] | None,
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend twice over pages and subtract, in one launch; see `fastattn.kernels.dispatch`."""
    from fastattn.kernels.triton.pairs import attend

    return attend(query, cache, plan, options, subtraction, out)


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine partial answers in one launch; see `fastattn.merge.merge`."""
    from fastattn.kernels.triton.parts import merge_states

    return merge_states(outs, lses)


def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> Callable[..., None] | None:
    """Write new tokens into the pool, in one launch; see `fastattn.kv_cache.write`."""
    from fastattn.kernels.triton import cache

    return cache.write(key, value, key_cache, value_cache, slot_mapping)


def write_quantized(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantise new tokens and write them into the pool, in one launch; see `fastattn.quantized.write`."""
    from fastattn.kernels.triton import cache

    cache.write_quantized(key, value, key_cache, value_cache, slot_mapping, scales)


def copy_blocks(pool: Shaped[Tensor, "n ..."], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy blocks inside a pool without a buffer, in one launch; see `fastattn.kv_cache.copy_blocks`."""
    from fastattn.kernels.triton import cache

    cache.copy_blocks(pool, pairs)


def compact(pool: Shaped[Tensor, "n p ..."], batch: Batch, trees: Trees, accepted: Accepted, block_size: int) -> None:
    """Move accepted nodes to the first slots of their trees, in one launch; see `fastattn.speculative.compact`."""
    from fastattn.kernels.triton import cache

    cache.compact(pool, batch, trees, accepted)


def slot_mapping(batch: Batch, num_tokens: int, block_size: int) -> Int64[Tensor, "t"]:
    """Compute the slot of each new token, in one launch; see `fastattn.metadata.slot_mapping`."""
    from fastattn.kernels.triton import tables

    return tables.slot_mapping(batch, num_tokens, block_size=block_size)


def trim(
    batch: Batch, left: int, block_size: int, columns: int
) -> tuple[Int32[Tensor, "b"], Int32[Tensor, "b"], Int32[Tensor, "b columns"]]:
    """Cut off the blocks that no query sees, in one launch; see `fastattn.kernels.torch_ops.trim`."""
    from fastattn.kernels.triton import tables

    return tables.trim(batch, left, block_size=block_size, columns=columns)


def cut_chunks(
    batch: Batch, chunk_size: int, block_size: int, num_chunks: int, columns: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "v"], Int32[Tensor, "v"], Int32[Tensor, "v columns"]]:
    """Cut sequences at the ends of chunks, in one launch; see `fastattn.kernels.torch_ops.cut_chunks`."""
    from fastattn.kernels.triton import tables

    return tables.cut_chunks(batch, chunk_size, block_size=block_size, num_chunks=num_chunks, columns=columns)


def draw_trees(
    batch: Batch, trees: Trees, num_tokens: int
) -> tuple[Int32[Tensor, "b w"], Int64[Tensor, "b w words"], Int32[Tensor, "t"]]:
    """Find the depths, the ancestors and the positions of nodes, in one launch; see `fastattn.kernels.torch_ops`."""
    from fastattn.kernels.triton import tables

    return tables.draw_trees(batch, trees, num_tokens)
