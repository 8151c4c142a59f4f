"""Tensor maps: their coordinates are those of heads and tokens, and the driver gets their sizes."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from fastattn.kernels.triton import tensor_map
from fastattn.kernels.triton.tensor_map import TensorMap, heads_as_columns, over, rows_of_block

TYPE = torch.bfloat16


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)


POOLS = {
    "tokens first": numbered(3, 8, 2, 64),
    "heads first": numbered(3, 2, 8, 64).transpose(1, 2),
    "a gap between tokens": numbered(3, 8, 2, 80)[..., :64],
    "keys beside values": numbered(3, 2, 8, 2, 64)[:, 1],
    "a part of the blocks": numbered(6, 8, 2, 64)[::2],
}


@pytest.mark.parametrize("name", POOLS)
def test_a_head_of_a_token_of_a_pool_is_at_its_row_and_column(name):
    pool = POOLS[name]
    tiles = heads_as_columns(pool, 4)
    matrix = torch.as_strided(pool, tiles.shape, tiles.strides, pool.storage_offset())
    for block in range(3):
        for token in range(8):
            for head in range(2):
                row, column = block * rows_of_block(pool) + token, head * pool.stride(2)
                assert torch.equal(matrix[row, column : column + 64], pool[block, token, head])
    assert tiles.block_shape == [4, 64]


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_pool_with_halves_has_one_map(heads_first):
    pool = numbered(2, 2, 3, 2, 8, 64).transpose(3, 4) if heads_first else numbered(2, 2, 3, 8, 2, 64)
    tiles = heads_as_columns(pool, 4)
    matrix = torch.as_strided(pool, tiles.shape, tiles.strides)
    *apart, row, head, _ = pool.stride()
    for half, kind, block, token, pair in ((0, 0, 2, 3, 1), (1, 0, 0, 7, 0), (0, 1, 1, 0, 1), (1, 1, 2, 7, 1)):
        at = token + sum(n * stride // row for n, stride in zip((half, kind, block), apart, strict=True))
        assert torch.equal(matrix[at, pair * head : pair * head + 64], pool[half, kind, block, token, pair])
    assert matrix.shape[0] * row <= pool.numel()


def test_a_head_of_a_row_is_too():
    rows = numbered(5, 3, 2, 64)[:, 1]
    tiles = heads_as_columns(rows, 4)
    matrix = torch.as_strided(rows, tiles.shape, tiles.strides, rows.storage_offset())
    assert len(matrix) == 5 and rows_of_block(rows) == 0
    assert torch.equal(matrix[3, rows.stride(1) : rows.stride(1) + 64], rows[3, 1])


def test_a_head_may_be_several_tiles():
    tiles = heads_as_columns(numbered(5, 3, 192), 4, 3)
    assert tiles.block_shape == [4, 64] and tiles.shape == [5, 3 * 192]


NONE = {
    "a tile in two blocks": numbered(3, 6, 2, 64),
    "no rows": numbered(0, 2, 64),
    "blocks that are no whole rows apart": numbered(9000).as_strided((2, 8, 2, 64), (8 * 144 + 16, 144, 64, 1)),
    "halves that are no whole rows apart": numbered(9000).as_strided(
        (2, 3, 8, 2, 64), (3 * 1024 + 16, 1024, 128, 64, 1)
    ),
    "one row for all": numbered(1, 2, 64).expand(4, 2, 64),
}


@pytest.mark.parametrize("name", NONE)
def test_where_there_is_no_map_there_is_none(name):
    assert heads_as_columns(NONE[name], 4) is None


def test_the_driver_is_told_the_sizes_and_each_address():
    calls = []

    def encode(map, dtype, rank, address, sizes, strides, box, steps, *how):
        read = [[*x._obj] for x in (sizes, strides, box, steps)]
        calls.append((dtype, rank, address.value, *read, how))
        return 0

    x = torch.zeros(7, 2, 64, dtype=TYPE)
    tiles = heads_as_columns(x, 4)
    one = TensorMap(SimpleNamespace(cuTensorMapEncodeTiled=encode), tiles, dict(block_size=[4, 64], swizzle=3))
    one.point_to(4096)
    ((dtype, rank, address, sizes, strides, box, steps, how),) = calls
    assert (dtype, rank, address) == (tensor_map._TYPES[TYPE], 2, 4096)
    assert sizes == [128, 7] and strides[0] == 256 and box == [64, 4] and steps == [1, 1]
    assert how == (0, 3, 2, 0) and ctypes.addressof(one.cell) % 64 == 0 and len(one.cell) == 128
    assert (one.shape, one.strides) == ((7, 128), (128, 1))


def test_a_driver_that_refuses_is_an_error():
    tiles = heads_as_columns(torch.zeros(7, 2, 64, dtype=TYPE), 4)
    driver = SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 1)
    with pytest.raises(RuntimeError, match="does not encode a tensor map, error 1"):
        TensorMap(driver, tiles, dict(block_size=[4, 64], swizzle=3)).point_to(0)


def test_the_map_of_another_tensor_has_the_same_sizes():
    one, other = torch.zeros(7, 2, 64, dtype=TYPE), torch.ones(7, 2, 64, dtype=TYPE)
    tiles = over(heads_as_columns(one, 4), other)
    assert tiles.base is other and tiles.shape == [7, 128]
