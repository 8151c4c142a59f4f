"""Tensors that a GPU copies in tiles by one instruction (TMA, the tensor memory accelerator of Hopper).

A *tensor map* says where a matrix is, how far its rows are apart and how large a tile is; the instruction takes it and
the first row and column of a tile. Tiles end at the borders of the matrix: what is past them is 0. Triton's name for it
is a tensor descriptor. A map holds the address of its matrix, so another layer needs another one: `TensorMap.point_to`.

Source: `cuTensorMapEncodeTiled` in the CUDA driver API.
"""

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton._utils import canonicalize_dtype
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # as Hopper's products read a tile
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_L2_128_BYTES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_SIZE, _ALIGNMENT = 128, 64  # bytes of a map


def heads_as_columns(x: Tensor, rows: int, parts: int = 1) -> TensorDescriptor | None:
    """Return the map of rows `[s, hk, d]`, or of a pool `[n, p, hk, d]` with whole tiles in each block.

    A pool may have further dimensions before its blocks.

    The row of a head of a token is the token, and its column the stride of heads times the head; the token of a pool is
    the block times `rows_of_block`, plus the place in it. None if there is no such map.

    Args:
        x: 16-bit elements, contiguous ones of a head; strides and address are multiples of 16.
        rows: rows of a tile.
        parts: tiles that have the columns of a head together; a size of a tile is a power of two.
    """
    *blocks, row, head, _ = x.stride()
    if row <= 0 or (blocks and x.shape[-3] % rows) or any(stride % row for stride in blocks):
        return None
    columns = (x.shape[-2] - 1) * head + x.shape[-1]
    length = x.shape[-3] + sum((size - 1) * (stride // row) for size, stride in zip(x.shape, blocks, strict=False))
    if not 0 < length < 2**31 or not 0 < columns < 2**31 or head < 0:
        return None
    return TensorDescriptor(x, [length, columns], [row, 1], [rows, x.shape[-1] // parts], SWIZZLED)


def rows_of_block(x: Tensor) -> int:
    """Return how many rows of its map a block of a pool is apart from the next; 0 for rows without blocks."""
    return x.stride(0) // x.stride(1) if x.ndim == 4 else 0


def kind_of(tiles: TensorDescriptor) -> str:
    """Return the type of a map in a signature."""
    return f"tensordesc<{canonicalize_dtype(tiles.base.dtype)}{[*tiles.block_shape]},{tiles.layout!r}>"


def over(tiles: TensorDescriptor, tensor: Tensor) -> TensorDescriptor:
    """Return the map of another tensor with the same sizes."""
    return replace(tiles, base=tensor)


class TensorMap:
    """A tensor map as the driver reads it.

    Args:
        driver: the CUDA driver.
        tiles: the matrix and its tiles.
        copied: what the compiler says of an instruction's copy: `block_size`, rows and columns of it, and `swizzle`.

    Attributes:
        cell: the map.
        shape: of the matrix.
        strides: of the matrix, in elements.
    """

    def __init__(self, driver: Any, tiles: TensorDescriptor, copied: dict[str, Any]) -> None:
        memory = (ctypes.c_uint8 * (_SIZE + _ALIGNMENT))()
        start = -ctypes.addressof(memory) % _ALIGNMENT
        self.cell = (ctypes.c_uint8 * _SIZE).from_buffer(memory, start)
        self._encode = driver.cuTensorMapEncodeTiled
        self._type = _TYPES[tiles.base.dtype]
        rank, bytes_of_one = len(tiles.shape), tiles.base.element_size()
        self._sizes = (
            ctypes.byref((ctypes.c_uint64 * rank)(*reversed(tiles.shape))),
            ctypes.byref((ctypes.c_uint64 * rank)(*(bytes_of_one * n for n in reversed(tiles.strides[:-1])))),
            ctypes.byref((ctypes.c_uint32 * rank)(*reversed(copied["block_size"]))),
            ctypes.byref((ctypes.c_uint32 * rank)(*[1] * rank)),
        )
        self._rank, self._swizzle = rank, copied["swizzle"]
        self.shape, self.strides = tuple(tiles.shape), tuple(tiles.strides)

    def point_to(self, address: int) -> None:
        """Encode the map of a tensor at another address."""
        at = ctypes.c_void_p(address)
        how = 0, self._swizzle, _L2_128_BYTES, 0  # not interleaved; zeros past the borders
        status = self._encode(ctypes.byref(self.cell), self._type, self._rank, at, *self._sizes, *how)
        if status:
            raise RuntimeError(f"CUDA: the driver does not encode a tensor map, error {status}")
