"""The reference against oracles that are not ours: ONNX's Attention in Python, and FlashAttention's formula by hand.

ONNX's convention is another one in one place: without a cache its causal mask is aligned top-left, so query `i` sees
key `j <= i` however many keys there are. With a cache (`past_key`, or `nonpad_kv_seqlen`) it is bottom-right, as ours.
"""

import math

import numpy as np
import onnx
import pytest
import torch
from einops import rearrange, repeat
from onnx.backend.test.case import node as onnx_cases
from onnx.backend.test.case.node import attention as _its_attention  # noqa: F401  which fills the list of cases
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_attention import _compute_attention as onnx_attention

from refattn import masks, varlen
from refattn.attention import attend
from refattn.metadata import make_batch
from twinattn.kit import plan_and_attend as call


def cases():
    """List ONNX's cases of attention that have heads in a dimension of their own."""
    found = {}
    for case in onnx_cases._NodeTestCases:
        node = case.model.graph.node
        if len(node) == 1 and node[0].op_type == "Attention" and len(case.model.graph.node[0].input) >= 3:
            shape = case.model.graph.input[0].type.tensor_type.shape
            if len(shape.dim) == 4:
                found[case.name] = case
    return list(found.values())


CASES = cases()


def tensor(array):
    if array.dtype == np.dtype("bfloat16"):
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(array))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx(case):
    """Each sequence of each case by `attend`, with the mask that ONNX's arguments ask for."""
    node = case.model.graph.node[0]
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs, _ = case.data_sets[0]
    given = dict(zip(node.input, [np.array(x) for x in _filled(node, inputs)], strict=True))
    by_place = dict(zip(PLACES, node.input, strict=False))
    feeds = {name: array for name, array in given.items() if name}
    answer = tensor(ReferenceEvaluator(case.model).run(None, feeds)[0])

    def argument(place):
        name = by_place.get(place)
        return tensor(given[name]) if name else None

    query, key, value = (argument(place) for place in PLACES[:3])
    past = argument("past_key")
    if past is not None:
        key, value = torch.cat([past, key], dim=2), torch.cat([argument("past_value"), value], dim=2)
    t, s = query.shape[2], key.shape[2]
    lengths = argument("nonpad_kv_seqlen")
    for b in range(len(query)):
        first = int(lengths[b]) - t if lengths is not None else 0 if past is None else past.shape[2]
        visible = torch.ones(t, s, dtype=torch.bool)
        if options.get("is_causal"):
            visible = torch.arange(s) <= torch.arange(t)[:, None] + first
        if lengths is not None:
            visible = visible & (torch.arange(s) < lengths[b])
        for name, sign in (("left_window_size", 1), ("right_window_size", -1)):
            if options.get(name, -1) >= 0:
                visible = visible & (sign * (torch.arange(t)[:, None] + first - torch.arange(s)) <= options[name])
        mask = argument("attn_mask")
        for head in range(query.shape[1]):
            seen, bias = visible, None
            if mask is not None:
                mine = mask
                while mine.ndim > 2:
                    place = (b if mine.ndim == 4 else head) if mine.shape[0] > 1 else 0
                    mine = mine[place]
                hidden = False if mine.dtype == torch.bool else -torch.inf
                mine = torch.nn.functional.pad(mine, (0, s - mine.shape[-1]), value=hidden)
                seen = visible & (mine if mine.dtype == torch.bool else mine > -torch.inf)
                bias = None if mine.dtype == torch.bool else mine.float().masked_fill(~seen, 0.0)[None]
            of_key = head * key.shape[1] // query.shape[1]
            out, _ = attend(
                query[b, head][:, None],
                key[b, of_key][:, None],
                value[b, of_key][:, None],
                seen,
                softmax_scale=options.get("scale"),
                softcap=options.get("softcap", 0.0),
                bias=bias,
            )
            torch.testing.assert_close(out[:, 0], answer[b, head], rtol=ROUNDING[out.dtype], atol=ROUNDING[out.dtype])


PLACES = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
ROUNDING = {
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}  # ONNX rounds the weights to the input's type


def _filled(node, inputs):
    """Give each name of the node its input; a name that is left out has none."""
    left = iter(inputs)
    return [next(left) if name else np.zeros(0) for name in node.input]


def test_there_are_cases():
    assert len(CASES) > 30


def test_a_causal_mask_without_a_cache_is_top_left_in_onnx():
    query, key = (np.random.default_rng(0).normal(size=(1, 1, n, 8)).astype(np.float32) for n in (2, 5))
    out = tensor(onnx_attention(query, key, key, is_causal=True)[0])
    rows = [tensor(x)[0, 0][:, None] for x in (query, key, key)]
    ours, theirs = (attend(*rows, mask)[0][:, 0] for mask in (masks.causal(2, 5), torch.ones(2, 5, dtype=bool).tril()))
    assert torch.allclose(theirs, out[0, 0], atol=1e-6)
    assert not torch.allclose(ours, out[0, 0], atol=1e-2)


def attention_ref(q, k, v, *, causal, window_size=(-1, -1), softcap=0.0):
    """Compute FlashAttention's formula: `b` sequences of one length, scores `[b, h, t, s]`."""
    t, s = q.shape[1], k.shape[1]
    k, v = (repeat(x, "b s hk d -> b s (hk g) d", g=q.shape[2] // x.shape[2]) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double() / math.sqrt(q.shape[-1]), k.double())
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    row, column = rearrange(torch.arange(t), "t -> t 1"), torch.arange(s)
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(t, s, dtype=torch.bool)
    if right >= 0:
        hidden = hidden | (column > row + s - t + right)
    if left >= 0:
        hidden = hidden | (column < row + s - t - left)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden.all(-1)[:, None], 0.0)
    return torch.einsum("bhts,bshd->bthd", weights, v.double())


@pytest.mark.parametrize(
    "options", [{}, dict(window_size=(7, 0)), dict(softcap=3.0), dict(window_size=(4, 6))], ids=str
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lens", [(1, 33), (13, 13), (7, 40), (9, 5)], ids=str)
def test_attention_ref(lens, causal, options):
    t, s = lens
    torch.manual_seed(t)
    q, k, v = (torch.randn(2, n, heads, 64, dtype=torch.float64) for n, heads in ((t, 6), (s, 2), (s, 2)))
    expected = attention_ref(q, k, v, causal=causal, **options)
    rows = (rearrange(x, "b n h d -> (b n) h d") for x in (q, k, v))
    out = call(varlen, *rows, make_batch([t, t], [s, s]), causal=causal, **options)
    torch.testing.assert_close(rearrange(out, "(b t) h d -> b t h d", b=2), expected, rtol=1e-12, atol=1e-12)


def test_masks_are_those_of_flash_attention():
    """The drawing in the docstring of its `flash_attn_func`: 2 queries and 5 keys, 5 queries and 2 keys."""
    assert masks.causal(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert masks.causal(5, 2).int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
