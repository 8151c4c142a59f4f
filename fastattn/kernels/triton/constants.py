"""Functions of constants, which kernels call while they are compiled."""

import triton


@triton.constexpr_function
def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not less than a size.

    SGLang puts a plain function in the place of `triton.next_power_of_2`, which no kernel can call after that.
    """
    return 1 << (size - 1).bit_length()
