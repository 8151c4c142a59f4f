"""Elements of int4 in a kernel: what is in a unit of a pool, and how it becomes numbers that a tensor core multiplies.

    a byte           second first                     a unit of two bytes       fourth third second first

A tile of units becomes two or four tiles, of every second or every fourth element. Nothing is converted: the bits of an
element are the last four bits of a number of 16 bits, or the four before them, as if it were 16 times as large.

    float16          a very small number, 2**-24 of the element
    bfloat16         a yet smaller one, 2**-133 of it; or 16 + element, of four bits at the place of the first digits
    float32          the element, converted

Source: bits as numbers: Kim et al. 2022, "Who Says Elephants Can't Run".
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from refattn.four_bits import LARGEST

LAST = tl.constexpr(LARGEST)  # the last four bits

# PTX to take the elements of two units, of four bytes: two, or four, times as many numbers of 16 bits. They are the
# bits of small numbers, of a float16 or a bfloat16, or 16 + element in bfloat16.
OF_BYTES = tl.constexpr("""
    {
        .reg .b32 low, high;
        and.b32 low, $4, 0x0f0f0f0f;
        and.b32 high, $4, 0xf0f0f0f0;
        prmt.b32 $0, low, 0, 0x4140;
        prmt.b32 $1, low, 0, 0x4342;
        prmt.b32 $2, high, 0, 0x4140;
        prmt.b32 $3, high, 0, 0x4342;
    }
""")
OF_UNITS = tl.constexpr("""
    {
        .reg .b32 high;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, high, 0x000f000f;
        and.b32 $3, high, 0x00f000f0;
    }
""")
SIXTEEN_AND_BYTES = tl.constexpr("""
    {
        .reg .b32 low, high, sixteen;
        mov.b32 sixteen, 0x41414141;
        shl.b32 low, $4, 3;
        shr.u32 high, $4, 1;
        lop3.b32 low, low, 0x78787878, 0x80808080, 0xea;
        lop3.b32 high, high, 0x78787878, 0x80808080, 0xea;
        prmt.b32 $0, low, sixteen, 0x4140;
        prmt.b32 $1, low, sixteen, 0x4342;
        prmt.b32 $2, high, sixteen, 0x4140;
        prmt.b32 $3, high, sixteen, 0x4342;
    }
""")
SIXTEEN_AND_UNITS = tl.constexpr("""
    {
        .reg .b32 first, second, third, fourth;
        shl.b32 first, $4, 3;
        shr.u32 second, $4, 1;
        shr.u32 third, $4, 5;
        shr.u32 fourth, $4, 9;
        lop3.b32 $0, first, 0x00780078, 0x41804180, 0xea;
        lop3.b32 $1, second, 0x00780078, 0x41804180, 0xea;
        lop3.b32 $2, third, 0x00780078, 0x41804180, 0xea;
        lop3.b32 $3, fourth, 0x00780078, 0x41804180, 0xea;
    }
""")

# Triton's interpreter finds a function only if it is defined above its caller.


class Parts(NamedTuple):
    """Of each unit the first element, the second, the third and the fourth; the last two are 0 where units have two."""

    first: Any
    second: Any
    third: Any
    fourth: Any


@triton.jit
@no_type_check
def by_ptx(units, BYTES: tl.constexpr, UNITS: tl.constexpr, dtype: tl.constexpr):
    """Take the parts of units by PTX, one text for units that are bytes and one for those of two."""
    if units.dtype == tl.uint8:
        first, second = tl.inline_asm_elementwise(
            BYTES, "=&r,=&r,=&r,=&r,r", (units,), dtype=(dtype.value,) * 2, is_pure=True, pack=4
        )
        parts = Parts(first, second, 0, 0)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            UNITS, "=&r,=&r,=&r,=&r,r", (units,), dtype=(dtype.value,) * 4, is_pure=True, pack=2
        )
        parts = Parts(first, second, third, fourth)
    return parts


@triton.jit
@no_type_check
def as_number(bits, dtype: tl.constexpr):
    """Return 16 bits as the number that they are, or in float32 as an integer."""
    return bits.to(dtype) if dtype == tl.float32 else bits.to(dtype, bitcast=True)


@triton.jit
@no_type_check
def parts_of(units, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """Take the parts of units: elements, and 16 times elements for the second and the fourth.

    In 16 bits they are in units of the smallest number: 2**-24 in float16, 2**-133 in bfloat16.
    """
    if HAS_PTX and dtype != tl.float32:
        parts = by_ptx(units, OF_BYTES, OF_UNITS, dtype)
    else:
        bits = units.to(tl.uint16)
        third, fourth = 0, 0
        if units.dtype == tl.uint16:
            third, fourth = as_number((bits >> 8) & 0x0F, dtype), as_number((bits >> 8) & 0xF0, dtype)
        parts = Parts(as_number(bits & 0x0F, dtype), as_number(bits & 0xF0, dtype), third, fourth)
    return parts


@triton.jit
@no_type_check
def sixteen_more(bits, SHIFT: tl.constexpr):
    """Return 16 + the element from the bit `SHIFT` on, in bfloat16."""
    return ((((bits >> SHIFT) & 0x0F) << 3) | 0x4180).to(tl.bfloat16, bitcast=True)


@triton.jit
@no_type_check
def parts_sixteen_more(units, HAS_PTX: tl.constexpr):
    """Take the parts of units, each element 16 more, in bfloat16."""
    if HAS_PTX:
        parts = by_ptx(units, SIXTEEN_AND_BYTES, SIXTEEN_AND_UNITS, tl.bfloat16)
    else:
        bits = units.to(tl.uint16)
        third, fourth = 0, 0
        if units.dtype == tl.uint16:
            third, fourth = sixteen_more(bits, 8), sixteen_more(bits, 12)
        parts = Parts(sixteen_more(bits, 0), sixteen_more(bits, 4), third, fourth)
    return parts


@triton.jit
@no_type_check
def scaled(part, LARGER: tl.constexpr, zero, scale):
    """Return elements, `LARGER` times too large, in float16 in units of 2**-24, less zero points, times scales."""
    UNITS: tl.constexpr = 2.0**24 if part.dtype == tl.float16 else 1.0
    return ((part.to(tl.float32) * (UNITS / LARGER) - zero) * scale).to(part.dtype)


@triton.jit
@no_type_check
def scaled_parts(units, zero, scale, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """Take the parts of units, less zero points, times scales: numbers of any size in float16 or float32."""
    parts = parts_of(units, dtype, HAS_PTX)
    third, fourth = 0, 0
    if units.dtype == tl.uint16:
        third, fourth = scaled(parts.third, 1, zero, scale), scaled(parts.fourth, 16, zero, scale)
    return Parts(scaled(parts.first, 1, zero, scale), scaled(parts.second, 16, zero, scale), third, fourth)


@triton.jit
@no_type_check
def zero_points(scale):
    """Return the zero point of each scale."""
    return (scale.to(tl.int32, bitcast=True) & LAST).to(tl.float32)
