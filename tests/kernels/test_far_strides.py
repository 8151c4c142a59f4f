"""Kernels over tensors whose last element of some dimension is 2**31 elements after the first, though no stride is.

An index times a stride is then computed in 64 bits. Triton's interpreter takes what overflows for an error, see
`interpreted`; `test_near_int32.py` has the paths.
"""

import functools
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

import fastattn.chunked_prefill
import fastattn.quantized
import fastattn.recurrent
import fastattn.sparse
from fastattn.kernels.flash.fixup import fix_up
from fastattn.kernels.order import use_kernel
from fastattn.kernels.triton.expand import repage, round_queries
from fastattn.kernels.triton.index_keys import _in_float16
from fastattn.kernels.triton.merge import merge
from fastattn.kernels.triton.quantized import Quantization
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.states import lengths, moved
from tests.helpers.strides import far_apart
from twinattn.engine.kernels import fused_layers

PAGES = [[1, 0, 2]]  # pages of a sequence of up to 48 keys
TOKENS, CHUNKS = ((1, 1, 2), (8, 0, 5)), ((17, 1, 1), (8, 0, 5))  # sequences with states: new tokens, earlier tokens
TABLES = ("state_indices", "has_initial_state", "num_accepted", "checkpoint_indices")


def plan_states(lens, tensors):
    """Plan a step over states by the tables among some tensors, which are taken out."""
    tables = {name: tensors.pop(name) for name in TABLES if name in tensors}
    size = {"block_size": 8} if "checkpoint_indices" in tables else {}
    return fastattn.recurrent.plan(moved(lengths(*lens), tensors["states"].device), **tables, **size)


def fold(lens, **tensors):
    plan = plan_states(lens, tensors)
    tensors["log_decay"].neg_()
    return fastattn.recurrent.attention(**tensors, plan=plan), tensors["states"]


def convolve(lens, **tensors):
    plan = plan_states(lens, tensors)
    return fastattn.recurrent.convolve(**tensors, plan=plan), tensors["states"]


def merge_two(out, lse):
    return merge([out, out.flip(0)], [lse, lse.flip(1)])


def copy_pages(kind, quantized_values, scales=None):
    """Copy the pages of three sequences, and return their keys one after the other."""
    lens = [40, 16, 33]
    batch = make_batch([1] * 3, lens, PAGES * 3, device=quantized_values.device)
    pool = quantized_values.view(torch.int8) if kind == "int8" else quantized_values
    pages, table = repage(pool, batch, block_size=32, kind=kind, scales=scales, dtype=torch.float32)
    return torch.cat([pages[row].flatten(0, 1)[:s] for row, s in zip(table.long(), lens, strict=True)])


def round_to_e4m3(query, scales):
    batch = make_batch([1, 2, 1], [1, 2, 1], [[]] * 3, device=query.device)
    return round_queries(query, Plan(batch), Quantization("e4m3", query=scales, rounds_query=True))


def score(query, weights, cache):
    plan = fastattn.chunked_prefill.plan(make_batch([3], [40], PAGES, device=query.device), block_size=16)
    return fastattn.sparse.scores(query, weights, cache, plan).nan_to_num(neginf=0.0)


def attend_int8(query, quantized_key, quantized_value, key, value):
    return attend(query, quantized_key.view(torch.int8), quantized_value.view(torch.int8), Int8Scales(key, value))


def attend_fp8(query, quantized_key, quantized_value, key, value, of_query):
    return attend(query, quantized_key, quantized_value, Fp8Scales(key, value, of_query))


def attend(query, quantized_key, quantized_value, scales):
    batch = make_batch([1, 2, 1], [40, 33, 3], PAGES * 3, device=query.device)
    plan = fastattn.quantized.plan(batch, block_size=16)
    return fastattn.quantized.attention(query, quantized_key, quantized_value, plan, scales=scales, return_lse=True)


def fix_up_lse(lse):
    plan = Plan(make_batch([1, 0, 2], [1, 5, 1], [[]] * 3, device=lse.device))
    return fix_up(lse.new_ones(4, 3, 8), lse, plan, AttentionOptions())


def of_heads(t, per_channel=False):
    """Return the shapes of the tokens of a step, and of states of 5 values and 4 keys."""
    decay = (t, 4, 4) if per_channel else (t, 4)
    queries = dict(query=(t, 2, 4), key=(t, 2, 4), value=(t, 4, 5), out=(t, 4, 5))
    return queries | dict(log_decay=decay, beta=(t, 4), states=(12, 4, 5, 4))


def of_channels(t):
    return dict(inputs=(t, 5), weight=(5, 4), bias=(5,), states=(12, 3, 5), out=(t, 5))


SLOTS = dict(state_indices=[2, 0, 1], has_initial_state=[True, False, True])
BLOCKS = SLOTS | dict(checkpoint_indices=[[-1, 9, 10], [-1] * 3, [8, 7, 6]])
DRAFTS = dict(state_indices=[[0, 1, 2], [3, 4, 5], [6, 7, 8]], num_accepted=[3, 1, 2])
PAGED = dict(query=(4, 4, 16), quantized_key=(3, 16, 4, 16), quantized_value=(3, 16, 4, 16))

# A launch or two: what computes it, and its tensors by name, as tables or as shapes of what is drawn.
LAUNCHES = {
    "states by token": (lambda **x: fold(TOKENS, **x), of_heads(4) | BLOCKS),
    "states by token and channel": (lambda **x: fold(TOKENS, **x), of_heads(4, True) | SLOTS),
    "states of drafts": (lambda **x: fold(TOKENS, **x), of_heads(4) | DRAFTS),
    "states by chunk": (lambda **x: fold(CHUNKS, **x), of_heads(19) | BLOCKS),
    "states by chunk and channel": (lambda **x: fold(CHUNKS, **x), of_heads(19, True) | SLOTS),
    "convolution": (lambda **x: convolve(CHUNKS, **x), of_channels(19) | BLOCKS),
    "convolution of drafts": (lambda **x: convolve(TOKENS, **x), of_channels(4) | DRAFTS),
    "merge": (merge_two, dict(out=(4, 4, 5), lse=(4, 4))),
    "pages": (lambda **x: copy_pages("", **x), dict(quantized_values=(3, 16, 3, 8))),
    "pages of int8, by token": (
        lambda **x: copy_pages("int8", **x),
        dict(quantized_values=(3, 16, 3, 8), scales=(3, 16, 3)),
    ),
    "pages of int8, by channel": (
        lambda **x: copy_pages("int8", **x),
        dict(quantized_values=(3, 16, 3, 8), scales=(3, 8)),
    ),
    "pages of fp8": (lambda **x: copy_pages("e4m3", **x), dict(quantized_values=(3, 16, 3, 8), scales=(3, 3))),
    "round queries": (round_to_e4m3, dict(query=(4, 3, 8), scales=(3, 3))),
    "index scores": (score, dict(query=(3, 4, 16), weights=(3, 4), cache=(3, 16, 16))),
    "index queries in float16": (_in_float16, dict(query=(3, 4, 16), weights=(3, 4))),
    "keys of int8": (attend_int8, PAGED | dict(key=(3, 16, 4), value=(4, 16))),
    "keys of fp8": (attend_fp8, PAGED | dict(key=(3, 4), value=(3, 4), of_query=(3, 4))),
    "fix up": (fix_up_lse, dict(lse=(3, 4))),
    "norm": (lambda **x: fused_layers.rms_norm(**x, eps=1e-5), dict(x=(4, 8), residual=(4, 8), weight=(8,))),
    "rotate": (
        lambda **x: fused_layers.qk_norm_rope(num_heads=1, num_kv_heads=1, head_size=8, **x),
        dict(qkv=(4, 24), cos=(4, 8), sin=(4, 8), query_weight=(8,), key_weight=(8,)),
    ),
    "silu": (fused_layers.silu_mul, dict(gate_up=(4, 8))),
}


def draw(name, given, device):
    """Make a table of what it holds, or draw numbers or quantized values of a shape."""
    if isinstance(given, list):
        values = torch.tensor(given, device=device)
        return values if values.dtype == torch.bool else values.int()
    numbers = torch.rand(given, generator=torch.Generator().manual_seed(len(name))) + 0.1
    return ((100 * numbers).to(torch.uint8) if name.startswith("quantized") else numbers).to(device)


def draw_all(launch, device):
    return {name: draw(name, given, device) for name, given in LAUNCHES[launch][1].items()}


def compute(launch, tensors):
    with use_kernel("triton"):
        answers = LAUNCHES[launch][0](**tensors)
    return (answers,) if isinstance(answers, torch.Tensor) else answers


@functools.cache
def expected(launch, device):
    return compute(launch, draw_all(launch, device))


def far_dims(launch):
    """List dimensions of the tensors of a launch. On a CPU, where huge tensors take no memory, each has one at once.

    It is another one of the next tensor: where keys and values have the same strides, they are read by one of them.
    """
    sizes = {name: x.ndim for name, x in draw_all(launch, "cpu").items()}
    most = max(sizes.values())
    far = [{name: (turn + i) % most for i, name in enumerate(sizes)} for turn in range(most)]
    if os.environ["TWINATTN_TEST_DEVICE"] != "cpu":
        far = [{name: turn[name]} for name in sizes for turn in far]
    far = [{name: dim for name, dim in turn.items() if dim < sizes[name]} for turn in far]
    return [pytest.param(launch, turn, id=f"{launch}-{i}") for i, turn in enumerate(filter(None, far))]


@pytest.mark.parametrize(("launch", "far"), [case for launch in LAUNCHES for case in far_dims(launch)])
def test_elements_that_are_far_apart(launch, far, device):
    tensors = draw_all(launch, device)
    for name, dim in far.items():
        x, strides = tensors[name], list(tensors[name].stride())
        strides[dim] = max(-(-(2**31) // (x.shape[dim] - 1)), x.numel())
        tensors[name] = far_apart(x.shape, strides, x.dtype, device).copy_(x)
    for one, other in zip(compute(launch, tensors), expected(launch, device), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
