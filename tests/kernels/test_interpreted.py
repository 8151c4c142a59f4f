"""Triton's interpreter as the tests have it runs what its own would, and refuses what overflows."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)


@triton.jit
def _library_kernel(numbers, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    x = tl.load(numbers + places) + tl.zeros([SIZE], tl.float32)
    tl.store(out + places, tl.cumsum(tl.sort(x), 0) + tl.max(x, 0) * tl.sum(x, 0) + tl.argmax(x, 0) + tl.sigmoid(x))


def test_what_the_language_defines_by_itself_is_found():
    """It stands in other modules, which have to be patched, too."""
    numbers, out = torch.randn(16, generator=torch.Generator().manual_seed(0)), torch.empty(16)
    for _ in range(2):
        _library_kernel[1,](numbers, out, SIZE=16)
    expected = numbers.sort().values.cumsum(0) + numbers.max() * numbers.sum() + numbers.argmax() + numbers.sigmoid()
    torch.testing.assert_close(out, expected)


@triton.jit
def _broadcast_kernel(numbers, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(numbers + column).to(tl.int16)  # [COLUMNS]
    table = x * 2 + row[:, None] * 10  # a number, a row and a column, of three types
    table += tl.where(table > 15, column[None, :].to(tl.float16), 0.5)
    tl.static_assert(table.shape[0] == ROWS and table.shape[1] == COLUMNS and table.dtype == tl.float16)
    square = tl.dot(tl.trans(table), table)
    tl.static_assert(square.dtype == tl.float32)
    tl.store(out + column[:, None] * COLUMNS + column[None, :], square)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_types_and_shapes_are_those_of_the_values(rows, dtype):
    """Values of one type but other shapes, of one shape but other types, and of both: a type is made once only."""
    numbers, out = torch.arange(16, dtype=dtype), torch.empty(16, 16)
    _broadcast_kernel[1,](numbers, out, ROWS=rows, COLUMNS=16)
    table = torch.arange(16) * 2 + torch.arange(rows)[:, None] * 10
    table = (table + torch.where(table > 15, torch.arange(16.0), 0.5)).half().float()
    torch.testing.assert_close(out, table.T @ table)


@triton.jit
def _numbers_kernel(numbers, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    x = tl.load(numbers + places)
    first = tl.program_id(0) == 0  # one condition beside a block of them
    for _ in range(2):  # as it is found out, and as it is remembered
        tl.static_assert((x * 1).dtype == tl.int32 and (x * 1.0).dtype == tl.float32)
        tl.store(out + places, x * 1 // 2)
        tl.store(out + SIZE + places, x * 1.0 / 2)
        tl.store(out + 2 * SIZE + places, tl.where(first & (x < 3), 2, x))
        tl.store(out + 3 * SIZE + places, (x < 3) & True)
        tl.store(out + 4 * SIZE + places, x & 1)


def test_numbers_that_are_equal_are_not_taken_for_one_another():
    numbers, out = torch.arange(1, 5, dtype=torch.int32), torch.empty(5, 4)
    _numbers_kernel[1,](numbers, out, SIZE=4)
    expected = [numbers // 2, numbers / 2, torch.where(numbers < 3, 2, numbers), numbers < 3, numbers % 2]
    assert torch.equal(out, torch.stack([x.float() for x in expected]))


@triton.jit
def _compute(x, y, OPERATION: tl.constexpr):
    if OPERATION == "add":
        x = x + y
    elif OPERATION == "sub":
        x = x - y
    else:
        x = x * y
    return x


@triton.jit
def _compute_kernel(numbers, others, out, SIZE: tl.constexpr, OPERATION: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, _compute(tl.load(numbers + places), tl.load(others + places), OPERATION))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_an_overflow_is_an_error(operation, dtype):
    most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    out = torch.empty(4, dtype=dtype)

    def run(x, y):
        numbers = torch.tensor([0, 1, x, 1], dtype=dtype), torch.tensor([0, 1, y, 1], dtype=dtype)
        _compute_kernel[1,](*numbers, out, SIZE=4, OPERATION=operation)

    fits, too_far = {
        "add": ((most - 1, 1), (most, 1)),
        "sub": ((least + 1, 1), (least, 1)),
        "mul": ((most // 2, 2), (most // 2 + 1, 2)),
    }[operation]
    run(*fits)
    with pytest.raises(InterpreterError, match=f"overflow detected for operation {operation}"):
        run(*too_far)


def test_long_integers_may_wrap_around():
    numbers, out = torch.full((4,), 2**62), torch.empty(4, dtype=torch.int64)
    _compute_kernel[1,](numbers, numbers, out, SIZE=4, OPERATION="add")
    assert out.tolist() == [-(2**63)] * 4
