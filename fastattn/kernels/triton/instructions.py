"""Functions of numbers, written in fewer instructions of an NVIDIA GPU than Triton makes of them."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def exp(x, PTX: tl.constexpr):
    """Return the exponential function; by the instruction it is 0 below the smallest normal number of float32."""
    if PTX:
        x *= 1.4426950408889634  # log2(e)
        x = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        x = tl.exp(x)
    return x


# Two numbers at once, and not NaN: a maximum and a minimum return the other operand then. These are the lowest and the
# largest finite numbers of bfloat16, twice.
BOUND = tl.constexpr(
    """
    {
    .reg .b32 bound;
    mov.b32 bound, 0xff7fff7f;
    max.bf16x2 $0, $1, bound;
    mov.b32 bound, 0x7f7f7f7f;
    min.bf16x2 $0, $0, bound;
    }
    """
)


@triton.jit
@no_type_check
def round_finite(rows, OPERAND: tl.constexpr, PTX: tl.constexpr):
    """Round rows to operands of a product; what is not finite gets some finite value."""
    if PTX and tl.bfloat16 == OPERAND:
        rounded = tl.inline_asm_elementwise(BOUND, "=r,r", [rows.to(OPERAND)], tl.bfloat16, is_pure=True, pack=2)
    else:
        rounded = tl.where(tl.abs(rows) < float("inf"), rows, 0.0).to(OPERAND)
    return rounded
