"""The options that every path and kernel is tested with."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from tests.helpers.batches import CASES, Case
from tests.helpers.kernels_present import PRESENT

PLANNED = ("causal", "window_size", "first_keys", "positions")
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (16, 0), (5000, 0), (2, 3), (-1, 2), (4, -1), (0, 16)]
OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.3),
    "negative-scale": dict(softmax_scale=-0.3),
    "not-causal": dict(causal=False),
    "window": dict(window_size=(20, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "alibi-both-ways": dict(causal=False, alibi_slopes=True),
    "sinks": dict(sinks=True),
    "everything": dict(softmax_scale=0.2, window_size=(30, 0), softcap=5.0, alibi_slopes=True, sinks=True),
}


def per_head(options: dict, case: Case, device: str) -> dict:
    """Fill in the options that have one number per head."""
    h = case.heads[0]
    filled = dict(options)
    if "alibi_slopes" in options:
        filled["alibi_slopes"] = torch.tensor([2.0 ** -(i + 1) for i in range(h)], device=device)
    if "sinks" in options:
        filled["sinks"] = torch.linspace(-2.0, 3.0, h, device=device)
    return filled


def given(*tensors_and_batch: Tensor | Batch, **options: Any) -> tuple[Any, ...]:
    """Return what a kernel is called with: the tensors, the plan of the batch, and what the layer fixes.

    Args:
        tensors_and_batch: the query, keys and values in rows or in pages (of differential attention, one cache), and
            the batch.
        options: those of `Plan` and of `AttentionOptions`, in any order.
    """
    *tensors, batch = tensors_and_batch
    planned = {name: options.pop(name) for name in PLANNED if name in options}
    block_size = tensors[-1].shape[-3] if tensors[-1].ndim > 3 else None  # [.., p, hk, d]
    return *tensors, Plan(batch, block_size, **planned), AttentionOptions(**options)


SMALL = [case for case in CASES if max(s for _, s in case.lens) < 300]


def each_kernel_case_and_option(all_options, some_options=("plain", "everything")):
    """Parametrize with each kernel, case and option; on a CPU all options with the cases `all_options`.

    With the others there are those that hold most of them, one of these in turn where a kernel is interpreted, and of
    the rest, where kernels are not, every eighth, so that each option meets cases of several kinds.
    """
    on_gpu = os.environ["TWINATTN_TEST_DEVICE"] != "cpu"

    def is_chosen(kernel, i, name, j):
        is_next = not kernel.is_interpreted and (i + j) % 8 == 0
        is_in_turn = name == some_options[i % len(some_options)] if kernel.is_interpreted else name in some_options
        return on_gpu or CASES[i].name in all_options or is_in_turn or is_next

    return pytest.mark.parametrize(
        ("kernel", "case", "options"),
        [
            pytest.param(kernel, case, OPTIONS[name], id=f"{case}-{name}-{kernel.name}")
            for kernel in PRESENT
            for i, case in enumerate(CASES)
            for j, name in enumerate(OPTIONS)
            if is_chosen(kernel, i, name, j)
        ],
    )
