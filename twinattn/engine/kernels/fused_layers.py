"""What stands between the products of a Llama layer, each in one launch: norms, rotary positions, SwiGLU.

Written with torch's operations, a norm is eight launches in bfloat16 and a rotation ten, and each reads and writes all
tokens. Here each of these lines is one launch, which reads the output of a packed product where it lies:

    rms_norm        [t, c] (+ a residual [t, c])                 ->  the normed rows [t, c], and the sum
    qk_norm_rope    [t, heads of queries | of keys | of values]  ->  queries [t, h, d], keys [t, hk, d]
    silu_mul        [t, gates | ups]                             ->  silu(gates) * ups [t, c]

They round where transformers' code does: a norm is computed in float32, rounded to the type of the rows, and times the
weight rounded again; each product and the sum of a rotation are rounded, and so is `silu` before its product. Only the
order of a sum, and the last bits of `exp` and `rsqrt`, are their own, so that a result differs by a rounding at most.
Every row is computed by itself: its bits do not depend on the others.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Su et al. 2021, "RoFormer"; Shazeer 2020, "GLU
Variants Improve Transformer".
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.launch import Launch

BLOCK_HEADS = 16
BLOCK_ELEMENTS = 1024
MAX_LAUNCHES = 1024  # that are remembered; with one more, all are forgotten
ALIGNMENT = 16  # bytes


def rms_norm(
    x: Float[Tensor, "*n c"], weight: Float[Tensor, "c"], eps: float, residual: Float[Tensor, "*n c"] | None = None
) -> tuple[Float[Tensor, "*n c"], Float[Tensor, "*n c"]]:
    """Norm each row by its root mean square: `x * rsqrt(mean(x ** 2) + eps) * weight`.

    Args:
        x: the rows; any strides, as all tensors here.
        weight: one factor per element, in the type of the rows.
        eps: is added to the mean square.
        residual: is added to the rows first, and the sum is rounded to their type.

    Returns:
        The normed rows, and the rows that were normed: `x` itself, or the sum.
    """
    width = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(out)
    rows, row_strides = _rows(x)
    others, residual_strides = (None, (0, 0)) if residual is None else _rows(residual)
    block = 1 << (width - 1).bit_length()
    _launch(
        _rms_norm_kernel,
        (x.numel() // max(width, 1),),
        dict(x=rows, residual=others, weight=weight, out=out, total=total),
        dict(
            x_strides=row_strides,
            residual_strides=residual_strides,
            weight_stride=weight.stride(0),
            eps=eps,
            WIDTH=width,
            BLOCK=block,
        ),
        num_warps=max(1, min(16, block // 256)),
    )
    return out, x if total is None else total


def qk_norm_rope(
    qkv: Float[Tensor, "*n width"],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    cos: Float[Tensor, "*m d"] | None = None,
    sin: Float[Tensor, "*m d"] | None = None,
    query_weight: Float[Tensor, "d"] | None = None,
    key_weight: Float[Tensor, "d"] | None = None,
    eps: float = 0.0,
) -> tuple[Float[Tensor, "*n h d"], Float[Tensor, "*n hk d"]]:
    """Norm the heads of queries and keys, then rotate them by their positions; each of the two is optional.

    Element `i` of a head turns with element `i + d / 2`, as in Llama: `x * cos + (-second half, first half) * sin`.

    Args:
        qkv: the heads of queries, keys and values of each token, one after another; the values are not read.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: elements of a head, an even number.
        cos: cosines of each token, in the type of `qkv`, for all heads; one row of tokens stands for all of a batch.
            None rotates nothing.
        sin: sines, in the same shape and type.
        query_weight: the weight of the norm of each query head; None norms nothing.
        key_weight: that of each KV head.
        eps: of the norms.

    Returns:
        The queries and the keys: new tensors, or views where nothing changes them.

    Raises:
        ValueError: if the cosines are of another head size.
    """
    if cos is not None and cos.shape[-1] != head_size:
        raise ValueError(f"cos: expected [.., {head_size}], as heads have so many elements, got {tuple(cos.shape)}")
    tokens, num_changed = qkv.shape[:-1], num_heads + num_kv_heads
    if cos is None and query_weight is None:
        heads = qkv.unflatten(-1, (-1, head_size))
        return heads[..., :num_heads, :], heads[..., num_heads:num_changed, :]
    query, key = qkv.new_empty(*tokens, num_heads, head_size), qkv.new_empty(*tokens, num_kv_heads, head_size)
    rows, strides = _rows(qkv)
    no_strides = (0, 0)
    (cos, cos_strides), (sin, sin_strides) = (
        (None, no_strides) if x is None else _rows(x if x.shape[:-1] == tokens else x.expand(*tokens, head_size))
        for x in (cos, sin)
    )
    num_rows, norms = tokens.numel() * num_changed, (query_weight, key_weight)
    _launch(
        _qk_norm_rope_kernel,
        (-(-num_rows // BLOCK_HEADS),),
        {"qkv": rows, "rotary.cos": cos, "rotary.sin": sin}
        | {"weights.query": query_weight, "weights.key": key_weight, "query": query, "key": key},
        dict(
            qkv_strides=strides,
            rotary=Rotary(None, None, cos_strides, sin_strides),
            weights=Weights(None, None, *(0 if x is None else x.stride(0) for x in norms)),
            num_rows=num_rows,
            eps=eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            BLOCK_HEADS=BLOCK_HEADS,
        ),
        num_warps=4,
    )
    return query, key


def silu_mul(gate_up: Float[Tensor, "*n two_c"]) -> Float[Tensor, "*n c"]:
    """Multiply `silu(gate) = gate / (1 + exp(-gate))` by the elements beside it.

    Args:
        gate_up: in each row all gates, and then what they are multiplied with.
    """
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows, strides = _rows(gate_up)
    _launch(
        _silu_mul_kernel,
        (gate_up.shape[:-1].numel(), -(-width // BLOCK_ELEMENTS)),
        dict(gate_up=rows, out=out),
        dict(strides=strides, WIDTH=width, BLOCK=BLOCK_ELEMENTS),
        num_warps=4,
    )
    return out


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return a tensor as rows of its last dimension, a copy only where it has to be, with the strides of the rows."""
    if x.is_contiguous():
        return x, (x.shape[-1], 1)
    rows = x.reshape(-1, x.shape[-1])
    return rows, (rows.stride(0), rows.stride(1))


_launches: dict[tuple[object, ...], Launch] = {}


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Mapping[str, Tensor | None],
    arguments: Mapping[str, Any],
    num_warps: int,
) -> None:
    """Launch a kernel on the GPU of its tensors, by the replay of a launch of the same numbers if there was one.

    The layers of a step differ in their tensors only.

    Args:
        kernel: the kernel.
        grid: how many programs.
        tensors: all its tensors by name, of one type.
        arguments: its other arguments by name; a NamedTuple has None in the place of a tensor.
        num_warps: warps of a program.
    """
    if 0 in grid:
        return
    first = next(iter(tensors.values()))
    assert first is not None
    device = first.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, grid, tensors, arguments, num_warps)
    types: list[torch.dtype | None] = []
    address = 0
    for x in tensors.values():
        types.append(None if x is None else x.dtype)
        address |= 0 if x is None else x.data_ptr()
    key = (id(kernel), device, *types, grid, *arguments.values())
    can_replay = address % ALIGNMENT == 0  # Triton compiles anew for other addresses
    launch = _launches.get(key) if can_replay else None
    if launch is not None:
        return launch.replay(*tensors.values())
    # A product is rounded before it is added, as in torch.
    launch = Launch(kernel, grid, tensors, arguments, dict(num_warps=num_warps, enable_fp_fusion=False))
    if can_replay:
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    return None


class Rotary(NamedTuple):
    """Cosines and sines, rows [tokens, d], or None; and their strides."""

    cos: Any
    sin: Any
    cos_strides: Any
    sin_strides: Any


class Weights(NamedTuple):
    """The weights of the norms of queries and of keys, or None; and their strides."""

    query: Any
    key: Any
    query_stride: Any
    key_stride: Any


@triton.jit
@no_type_check
def _rounded(x, dtype: tl.constexpr):
    """Round numbers to a type, and go on in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["eps"])
@no_type_check
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_strides,
    residual_strides,
    weight_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK).to(tl.int64)
    in_row = at < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    values = tl.load(x + row * x_strides[0] + at * x_strides[1], in_row, 0.0).to(tl.float32)
    if residual is not None:
        others = tl.load(residual + row * residual_strides[0] + at * residual_strides[1], in_row, 0.0).to(tl.float32)
        values = _rounded(values + others, dtype)
        tl.store(total + row * WIDTH + at, values.to(dtype), in_row)
    mean_square = tl.sum(values * values, 0) / WIDTH
    normed = _rounded(values * tl.rsqrt(mean_square + eps), dtype)
    factors = tl.load(weight + at * weight_stride, in_row, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (normed * factors).to(dtype), in_row)


@triton.jit(do_not_specialize=["num_rows", "eps"])
@no_type_check
def _qk_norm_rope_kernel(
    qkv,
    rotary,
    weights,
    query,
    key,
    qkv_strides,
    num_rows,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Norm and rotate some heads; row `r` is token `r // HEADS`, head `r % HEADS`, and its halves are two tiles."""
    HEADS: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_SIZE // 2
    dtype: tl.constexpr = query.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    token, head = row // HEADS, row % HEADS
    at = tl.arange(0, next_power_of_2(HALF)).to(tl.int64)
    in_half = (at < HALF)[None, :]
    half = tl.full([], HALF, tl.int64)
    is_row = (row < num_rows)[:, None] & in_half
    is_query = (head < NUM_HEADS)[:, None]

    start = (qkv + token * qkv_strides[0] + head * HEAD_SIZE * qkv_strides[1])[:, None]
    first = tl.load(start + (at * qkv_strides[1])[None, :], is_row, 0.0).to(tl.float32)
    second = tl.load(start + ((at + HALF) * qkv_strides[1])[None, :], is_row, 0.0).to(tl.float32)
    if weights.query is not None:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_SIZE
        scale = tl.rsqrt(mean_square + eps)[:, None]
        of_query = (weights.query + at * weights.query_stride)[None, :]
        of_key = (weights.key + at * weights.key_stride)[None, :]
        factors = tl.where(is_query, tl.load(of_query, in_half, 0.0), tl.load(of_key, in_half, 0.0)).to(tl.float32)
        first = _rounded(_rounded(first * scale, dtype) * factors, dtype)
        of_query, of_key = of_query + half * weights.query_stride, of_key + half * weights.key_stride
        factors = tl.where(is_query, tl.load(of_query, in_half, 0.0), tl.load(of_key, in_half, 0.0)).to(tl.float32)
        second = _rounded(_rounded(second * scale, dtype) * factors, dtype)
    if rotary.cos is not None:
        of_cos = (rotary.cos + token * rotary.cos_strides[0])[:, None] + (at * rotary.cos_strides[1])[None, :]
        of_sin = (rotary.sin + token * rotary.sin_strides[0])[:, None] + (at * rotary.sin_strides[1])[None, :]
        cosine, sine = tl.load(of_cos, is_row, 0.0).to(tl.float32), tl.load(of_sin, is_row, 0.0).to(tl.float32)
        turned = _rounded(first * cosine, dtype) + _rounded(-second * sine, dtype)
        cosine = tl.load(of_cos + half * rotary.cos_strides[1], is_row, 0.0).to(tl.float32)
        sine = tl.load(of_sin + half * rotary.sin_strides[1], is_row, 0.0).to(tl.float32)
        second = _rounded(second * cosine, dtype) + _rounded(first * sine, dtype)
        first = turned

    to_query = (query + (token * NUM_HEADS + head) * HEAD_SIZE)[:, None] + at[None, :]
    tl.store(to_query, first.to(dtype), is_row & is_query)
    tl.store(to_query + HALF, second.to(dtype), is_row & is_query)
    to_key = (key + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_SIZE)[:, None] + at[None, :]
    tl.store(to_key, first.to(dtype), is_row & (is_query == 0))
    tl.store(to_key + HALF, second.to(dtype), is_row & (is_query == 0))


@triton.jit
@no_type_check
def _silu_mul_kernel(gate_up, out, strides, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply some elements of a row."""
    row, at = tl.program_id(0).to(tl.int64), (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    in_row = at < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + row * strides[0] + at * strides[1], in_row, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * strides[0] + (at + WIDTH) * strides[1], in_row, 0.0).to(tl.float32)
    silu = _rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out + row * WIDTH + at, (silu * up).to(dtype), in_row)
