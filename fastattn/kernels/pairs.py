"""Arguments of kernels of differential attention: paired keys and values in pages, and the subtraction."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fastattn.kernels.problem import Subtraction, cu_seqlens_k_of
from fastattn.kernels.replay import memo_of
from refattn.plan import Plan


def subtraction_of(
    *,
    lambda_full: Tensor,
    lambda_init: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Subtraction:
    """Return the path's arguments of a subtraction as a kernel takes them."""
    return Subtraction(lambda_full, norm_weight, float(norm_eps), 1.0 - lambda_init, norm)


def in_pages(cache: Tensor, plan: Plan) -> tuple[Tensor, Plan]:
    """Return rows and their plan as pages of one row each; return pages unchanged.

    On a CPU the memo stores that plan. On a GPU every call makes its table, so that a CUDA graph captures it.
    """
    if plan.block_size is not None:
        return cache, plan
    memo, num_rows = memo_of(plan), cache.shape[2]
    pages = memo.pages.get(num_rows)
    if pages is None:
        longest = min(plan.batch.max_seq_len, num_rows)
        columns = torch.arange(longest, dtype=torch.int32, device=plan.batch.device)
        batch = replace(plan.batch, block_table=cu_seqlens_k_of(plan)[:-1, None] + columns)
        pages = replace(plan, batch=batch, block_size=1)
        if plan.batch.device.type == "cpu":
            memo.pages[num_rows] = pages
    return cache[:, :, :, None], pages
