"""The kernels of fused layers, against the formulas in torch: odd sizes, strides, and where numbers are rounded."""

import os

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton comes for Linux only")

from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from twinattn.engine.kernels import fused_layers

DTYPES = [torch.float32, torch.float16]
if os.environ.get("TRITON_INTERPRET") != "1":
    DTYPES.append(torch.bfloat16)


def assert_rounded_alike(out, expected):
    """Equal but for the order of sums and the last bits of functions, which change the rounding of few numbers."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    if not out.numel():
        return
    ulp = torch.finfo(out.dtype).eps * (4 if out.dtype == torch.float32 else 1)
    torch.testing.assert_close(out, expected, rtol=2 * ulp, atol=ulp * float(expected.abs().max()))
    if out.dtype != torch.float32:  # where these are the last bits
        assert (out != expected).float().mean() < 0.02, "it is rounded elsewhere"


def norm(x, weight, eps):
    """Norm as transformers' code does."""
    numbers = x.float()
    return weight * (numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, cos, sin):
    """Rotate heads [.., h, d] as transformers' code does."""
    first, second = x.chunk(2, -1)
    return x * cos[..., None, :] + torch.cat([-second, first], -1) * sin[..., None, :]


def numbers(*shape, dtype, device, seed=0):
    """Make random numbers that are no view of contiguous memory: every other element of rows that overlap nothing."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(*shape[:-1], 2 * shape[-1] + 3, generator=generator)
    return whole.to(device, dtype)[..., 3::2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 100), (1, 3, 1024), (0, 8), (2, 3, 1)], ids=str)
def test_rms_norm(shape, dtype, device):
    """With a large eps, too: it is added to the mean square, and not to its root."""
    x, residual = (numbers(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = numbers(shape[-1], dtype=dtype, device=device, seed=2)
    for rows, eps in ((x, 1e-6), (x.contiguous(), 0.5)):
        out, same = fused_layers.rms_norm(rows, weight, eps)
        assert same is rows
        assert_rounded_alike(out, norm(rows, weight, eps))
        out, total = fused_layers.rms_norm(rows, weight, eps, residual)
        assert torch.equal(total, rows + residual)
        assert_rounded_alike(out, norm(total, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(5, 1, 6), (4, 2, 96), (3, 3, 64)])
@pytest.mark.parametrize("does", ["both", "norm", "rope"])
def test_qk_norm_rope(does, heads, kv_heads, head_size, dtype, device):
    """The second half of cosines is another one here, so that each element shows which one it was multiplied by."""
    width = (heads + 2 * kv_heads) * head_size
    qkv = numbers(2, 7, width, dtype=dtype, device=device)
    cos, sin = (numbers(2, 7, head_size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weights = [numbers(head_size, dtype=dtype, device=device, seed=seed) for seed in (3, 4)]
    of_rope = (cos, sin) if does != "norm" else (None, None)
    of_norm = weights if does != "rope" else (None, None)
    split = qkv.unflatten(-1, (-1, head_size)).split([heads, kv_heads, kv_heads], -2)
    for given in (qkv, qkv.contiguous()):
        outs = fused_layers.qk_norm_rope(given, heads, kv_heads, head_size, *of_rope, *of_norm, 1e-3)
        for out, x, weight in zip(outs, split, of_norm, strict=False):
            expected = x if weight is None else norm(x, weight, 1e-3)
            if does != "norm":
                expected = rotate(expected, cos, sin)
            assert_rounded_alike(out, expected)
            assert does != "rope" or torch.equal(out, expected), "no sum of it has another order"


def test_qk_norm_rope_of_one_row_of_positions_for_a_batch(device):
    qkv, cos, sin = (numbers(b, 3, 16, dtype=torch.float32, device=device, seed=b) for b in (2, 1, 1))
    query, key = fused_layers.qk_norm_rope(qkv, 1, 1, 4, cos[..., :4], sin[..., 1:5])
    expected = rotate(qkv[..., :8].unflatten(-1, (2, 4)), cos[..., :4], sin[..., 1:5])
    assert torch.equal(torch.cat([query, key], 2), expected)
    with pytest.raises(ValueError, match=r"cos: expected \[.., 4\], .*, got \(1, 3, 2\)"):
        fused_layers.qk_norm_rope(qkv, 1, 1, 4, cos[..., :2], sin[..., :2])


def test_qk_norm_rope_of_nothing_launches_nothing(device):
    """In a layer without rotary positions and norms, queries and keys are where they were."""
    qkv = numbers(5, 24, dtype=torch.float16, device=device)
    query, key = fused_layers.qk_norm_rope(qkv, 3, 1, 4)
    assert torch.equal(query.flatten(1), qkv[:, :12]) and torch.equal(key.flatten(1), qkv[:, 12:16])
    assert query.data_ptr() == qkv.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 1100), (0, 4), (5, 1)], ids=str)
def test_silu_mul(shape, dtype, device):
    gate_up = numbers(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device) * 5
    gate, up = gate_up.chunk(2, -1)
    for given in (gate_up, gate_up.contiguous()):
        assert_rounded_alike(fused_layers.silu_mul(given), F.silu(gate) * up)


def test_launches_are_replayed_with_the_tensors_of_each_call(device, monkeypatch):
    """A launch of other numbers is another one, and so is one whose tensors begin elsewhere: it is not remembered."""
    monkeypatch.setattr(fused_layers, "_launches", {})
    monkeypatch.setattr(fused_layers, "MAX_LAUNCHES", 3)
    weights = [numbers(32, dtype=torch.float32, device=device, seed=seed).contiguous() for seed in (1, 2)]
    memory = torch.randn(4 * 32 + 1, generator=torch.Generator().manual_seed(0)).to(device)
    for x in (memory[:128].view(4, 32), memory[1:].view(4, 32), memory[:64].view(2, 32)):
        for weight in weights:
            for eps in (1e-5, 0.5):
                assert_rounded_alike(fused_layers.rms_norm(x, weight, eps)[0], norm(x, weight, eps))
    assert 0 < len(fused_layers._launches) <= 3, (
        "there are four, and they are forgotten where one more would be too many"
    )
