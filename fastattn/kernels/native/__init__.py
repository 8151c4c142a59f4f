"""Our own C for the CPU: decodes that read pages in place, compiled at the first call if there is a C compiler.

ATen's FlashAttention takes keys at one stride, so the kernel `cpu` copies them out of their pages, which takes longer
than attending to them. This one loads a key once for up to four query heads that share it, and both keys and both
values of a differential head once.
"""

import torch

from fastattn.kernels.kernel import ALL_OPTIONS, LATENTS, LEVELS, OWN_NORM, PAGES, PLAN, QUANTIZED, Kernel
from fastattn.kernels.native.compiler import library
from fastattn.kernels.problem import Problem

# Most query rows per KV head: new tokens times heads of the group. With more rows, matrix products over copied keys are
# faster; in 16 bits the limit is lower, as some processors have matrix instructions for that.
MAX_ROWS = 32
MAX_ROWS_16 = 16


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None."""
    if problem.device.type != "cpu":
        return f"computes on the CPU, the tensors are on {problem.device.type}"
    if problem.dtype == torch.float64 or torch.float64 in (problem.stored or ()):
        return "computes in float32"
    rows = problem.max_query_len * (problem.num_heads // max(1, problem.num_kv_heads))
    most = MAX_ROWS if problem.dtype == torch.float32 or problem.stored else MAX_ROWS_16
    if rows > most:
        return f"computes at most {most} query rows per KV head, new tokens times heads of the group, not {rows}"
    if problem.positions:
        return "attends from the last tokens of each sequence, and from no other positions"
    if problem.intervals:
        return "knows causal masks and windows, and no interval of keys for each query"
    if problem.batch_invariant:
        return "is chosen by the longest query of the batch, so the choice depends on the batch"
    found = library()
    return found if isinstance(found, str) else None


KERNEL = Kernel(
    "native",
    unsupported_reason,
    attends=("pages", "quantized", "latents"),
    knows=ALL_OPTIONS | OWN_NORM | PLAN | LEVELS | PAGES | QUANTIZED | LATENTS,
    functions={
        "attend": "fastattn.kernels.native.attention:attend",
        "bind_attend": "fastattn.kernels.native.attention:bind_attend",
        "differential": "fastattn.kernels.native.attention:differential",
    },
)
