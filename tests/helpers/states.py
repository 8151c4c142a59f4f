"""Steps of layers that keep a state: drawn tokens, tables, and the twins held to the one tolerance."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import fastattn.recurrent
import refattn.recurrent
from fastattn.kernels.order import use_kernel
from refattn.metadata import make_batch
from refattn.modes import computing_in
from refattn.options import RecurrentOptions
from tests.helpers.kernels_present import PRESENT
from twinattn.kit import assert_close
from twinattn.kit.search import tensors as as_in_memory
from twinattn.kit.tolerance import WIDER

KERNELS = [name for name in ("torch", "triton") if os.environ["TWINATTN_TEST_DEVICE"] == "cpu" or name == "triton"]
if not any(kernel.name == "triton" for kernel in PRESENT):
    KERNELS.remove("triton")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_computer = pytest.mark.parametrize("kernel", ["reference", *KERNELS])
DEVICE = os.environ["TWINATTN_TEST_DEVICE"]


def ints(values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step(NamedTuple):
    """The tokens of a step, in the order of `recurrent.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def rows(self, rows: slice) -> "Step":
        """Return some of the tokens."""
        return Step(*(x[rows] for x in self))

    def to(self, *target) -> "Step":
        """Return the tokens in another type, or on another device."""
        return Step(*(x.to(*target) for x in self))


def draw(num_tokens, *, h=2, hv=4, dk=8, dv=6, per_channel=False, seed=0, dtype=torch.float32) -> Step:
    """Draw tokens with keys of length 1, and with gates of every kind: open, nearly, saturated, and exactly 0."""
    g = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, num_tokens, h, dk, generator=g)
    shape = (num_tokens, hv, dk) if per_channel else (num_tokens, hv)
    log_decay = -torch.rand(shape, generator=g)
    kind = torch.randint(0, 12, shape, generator=g)
    for number, gate in enumerate((0.0, -1000.0, -torch.inf)):
        log_decay[kind == number] = gate
    value, beta = torch.randn(num_tokens, hv, dv, generator=g), torch.rand(num_tokens, hv, generator=g)
    return Step(query, normalize(key, dim=-1), value, log_decay, beta).to(dtype)


def draw_states(num_slots, hv=4, dv=6, dk=8, seed=1) -> Tensor:
    return torch.randn(num_slots, hv, dv, dk, generator=torch.Generator().manual_seed(seed))


def lengths(query_lens, contexts):
    """Return the batch of sequences with so many new tokens and so many before them."""
    return make_batch(list(query_lens), [q + c for q, c in zip(query_lens, contexts, strict=True)])


def moved(x, device):
    """Return a batch, a table or a tensor on a device; tensors with their strides, and what lies in between."""
    if isinstance(x, Tensor):
        return as_in_memory.moved(x, device)
    if hasattr(x, "cu_seqlens_q"):
        return type(x)(x.cu_seqlens_q.to(device), x.seq_lens.to(device), None, x.max_query_len, x.max_seq_len)
    return x


def attend(kernel, step, states, batch, options=RecurrentOptions(), **tables) -> Tensor:
    """Plan and attend by the reference or by a kernel of the twin; the states are changed in place, on the CPU."""
    if kernel == "reference":
        plan = refattn.recurrent.plan(batch, **tables)
        return refattn.recurrent.attention(*step, states, plan, options)
    tables = {name: moved(x, DEVICE) for name, x in tables.items()}
    pool = moved(states, DEVICE)
    with use_kernel(kernel):
        plan = fastattn.recurrent.plan(moved(batch, DEVICE), **tables)
        out = fastattn.recurrent.attention(*(moved(x, DEVICE) for x in step), pool, plan, options)
    if pool is not states:
        states.copy_(pool)
    return out.cpu()


def convolve(kernel, inputs, weight, states, batch, *, bias=None, silu=True, **tables) -> Tensor:
    """Plan and convolve likewise."""
    if kernel == "reference":
        plan = refattn.recurrent.plan(batch, **tables)
        return refattn.recurrent.convolve(inputs, weight, states, plan, bias=bias, silu=silu)
    tables, pool = {name: moved(x, DEVICE) for name, x in tables.items()}, moved(states, DEVICE)
    inputs, weight, bias = (moved(x, DEVICE) for x in (inputs, weight, bias))
    with use_kernel(kernel):
        plan = fastattn.recurrent.plan(moved(batch, DEVICE), **tables)
        out = fastattn.recurrent.convolve(inputs, weight, pool, plan, bias=bias, silu=silu)
    if pool is not states:
        states.copy_(pool)
    return out.cpu()


def assert_twins_agree(kernel, step, states, batch, options=RecurrentOptions(), **tables) -> None:
    """Hold the outputs and the states of a kernel to the one tolerance; states are those of all slots."""
    dtype, wide = step.query.dtype, WIDER[step.query.dtype]
    ours = states.clone()
    out = attend(kernel, step, ours, batch, options, **tables)
    ref_states = states.to(torch.promote_types(states.dtype, wide)).clone()
    low_states = states.clone()
    ref = attend("reference", step.to(wide), ref_states, batch, options, **tables)
    with computing_in(dtype):
        low = attend("reference", step, low_states, batch, options, **tables)
    assert out.dtype == dtype
    assert_close(out, ref, low, name="out")
    assert_close(ours, ref_states, low_states, name="states")
