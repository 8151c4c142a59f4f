"""Our own Triton kernel: what no FlashAttention does well, short queries over any pages, and every option."""

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import Options, Problem
from fastattn.kernels.machine import capability, installed
from refattn.batch import Batch

SHORT = 16  # with more query tokens a sequence, a FlashAttention for Hopper is faster
LARGEST_HEAD = 256


def supports(problem: Problem) -> str | None:
    """Say why this kernel can't compute a problem, or None."""
    if not installed("triton"):
        return "the package triton is not installed"
    if problem.device.type == "cuda":
        if capability(problem.device) < (8, 0):
            return "needs a GPU of compute capability 8.0 or newer"
        types: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    else:
        from fastattn.kernels.triton_attention import INTERPRETED

        if problem.device.type != "cpu" or not INTERPRETED:
            return f"computes on CUDA, the tensors are on {problem.device.type} (TRITON_INTERPRET=1 runs it on the CPU)"
        types = (torch.float16, torch.float32)  # the interpreter multiplies bfloat16 matrices wrongly
    if problem.dtype not in types:
        return f"computes {', '.join(map(str, types))}, not {problem.dtype}"
    if max(problem.head_size, problem.value_head_size) > LARGEST_HEAD:
        return f"head sizes up to {LARGEST_HEAD}, not {problem.head_size} and {problem.value_head_size}"
    return None


def suits(problem: Problem) -> bool:
    """Say whether to take this kernel: for short queries, and where the choice must not depend on the batch."""
    if problem.device.type != "cuda":
        return False
    return problem.options.batch_invariant or problem.max_query_len <= SHORT


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
