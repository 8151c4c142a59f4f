"""Round queries to fp8 under one scale, in one launch: for a kernel that multiplies codes, or as the numbers they are.

Every code is a number of float16, so what is multiplied with latents in float16 loses nothing by it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Shaped
from torch import Tensor

from fastattn.kernels.gpu.quantized import FORMATS, dequantize, to_fp8
from fastattn.kernels.gpu.tile import converts_fp8

BLOCK = 2048  # elements of a program


def quantize_query(x: Tensor, scale: float, kind: torch.dtype, dtype: torch.dtype) -> Shaped[Tensor, "..."]:
    """Return the codes nearest to `x / scale`, as codes or as the numbers that they are, without the scale.

    Args:
        x: numbers of any shape and strides; padding rows may hold anything.
        scale: above 0.
        kind: the format, `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        dtype: `kind` for the codes, `torch.float16` or `torch.float32` for the numbers.
    """
    x = x.contiguous()
    codes = torch.empty_like(x, dtype=torch.uint8 if dtype == kind else dtype)
    if x.numel():
        _round_to_codes_kernel[-(-x.numel() // BLOCK),](
            x, codes, scale, x.numel(), BLOCK=BLOCK, CODES=FORMATS[kind], HAS_FP8_CVT=converts_fp8(x.device)
        )
    return codes.view(kind) if dtype == kind else codes


@triton.jit  # which asks whether the elements are a multiple of 16: then it moves several at a time
@no_type_check
def _round_to_codes_kernel(
    x, codes, scale, num_elements, BLOCK: tl.constexpr, CODES: tl.constexpr, HAS_FP8_CVT: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, at < num_elements, 0.0).to(tl.float32)
    rounded = to_fp8(tl.div_rn(numbers, tl.zeros([BLOCK], tl.float32) + scale), CODES, HAS_FP8_CVT)
    if codes.dtype.element_ty != tl.uint8:
        rounded = dequantize(rounded, CODES, HAS_FP8_CVT)
    tl.store(codes + at, rounded.to(codes.dtype.element_ty), at < num_elements)
