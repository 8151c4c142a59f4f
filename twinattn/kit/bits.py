"""Tensors as bits: a copy may lose -0, infinities, subnormal numbers and the payload of a NaN."""

import torch
from torch import Tensor

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
NAN_BITS = 0b1001  # the last bits of a NaN that is not the usual one


def bits_of(x: Tensor) -> Tensor:
    """View a tensor as integers of the same size: NaN is then equal to itself, and -0 is not 0."""
    return x if x.dtype == torch.bool else x.view(WHOLE[x.element_size()])


def with_odd_bits(x: Tensor) -> Tensor:
    """Put -0, infinities, subnormal numbers, and NaN of either sign with a payload, among the elements, in place."""
    flat = x.view(-1)
    flat[::17], flat[5::23], flat[7::29], flat[11::37] = -0.0, torch.finfo(x.dtype).tiny / 4, torch.inf, -torch.inf
    flat[3::19], flat[9::31] = torch.nan, -torch.nan
    bits_of(flat)[3::19] |= NAN_BITS
    return x
