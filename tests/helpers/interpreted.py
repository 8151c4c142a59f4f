"""Triton's interpreter, as tests need it: quicker, and with products whose bits do not depend on the machine."""

import numpy as np
import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def quicken() -> None:
    """Take from Triton's interpreter what it does over and over again, and let an overflow be an error."""
    _patch_functions_once()
    _find_overflows_at_once()
    _make_types_once()
    _run_in_one_piece_of_stack()


def _patch_functions_once() -> None:
    """Let a function that kernels call patch Triton's language once, and not at each call.

    The interpreter does so each time, which takes a third of its own. What a kernel's launch has patched is there, and
    what such a function patches besides, for Triton's own library, is never taken back.
    """
    has_patched = set()

    def call(self, *arguments, **options):
        if self not in has_patched:
            interpreter._patch_lang(self.fn)
            has_patched.add(self)
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _find_overflows_at_once() -> None:
    """Find out by one operation whether a sum, a difference or a product of integers overflows.

    The interpreter takes ten operations of its own, and lets what overflows pass all the same. Here it is an error.
    """

    def refuse_overflow(self, lhs, rhs, binary_op):
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            exact = OPERATIONS[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"{kind} overflow detected for operation {binary_op.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = refuse_overflow


def _make_types_once() -> None:
    """Make the type of a block and the shape of a value once, and not for each value anew: nothing writes to them."""
    blocks, values, in_numpy = {}, {}, {}
    make_block, make_value = core.block_type.__init__, core.tensor.__init__
    find_in_numpy, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value

    def block(self, element_ty, shape):
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        name = sizes, element_ty.name
        if name not in blocks:
            make_block(self, element_ty, shape)
            blocks[name] = vars(self).copy()
        vars(self).update(blocks[name], element_ty=element_ty)

    def value(self, handle, type):
        if type.name not in values:
            make_value(self, handle, type)
            values[type.name] = vars(self).copy()
        vars(self).update(values[type.name], handle=handle, type=type, dtype=type.scalar)

    def numpy_type(type):
        if type.name not in in_numpy:
            in_numpy[type.name] = find_in_numpy(type)
        return in_numpy[type.name]

    def broadcast_if_need_be(self, lhs, rhs):
        have_one_shape = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if have_one_shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block, value
    interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value = numpy_type, broadcast_if_need_be


def _run_in_one_piece_of_stack() -> None:
    """Give each launch a stack of its own that all its calls fit on.

    Python's stack grows by pieces of 16 KiB, which are given back at once. Where a loop's calls cross the end of one,
    each of them asks the system for memory and returns it.
    """
    launch = interpreter.GridExecutor.__call__

    def launch_on_a_large_frame(self, *arguments, **options):
        return launch(self, *arguments, **options)

    code = launch_on_a_large_frame.__code__  # a piece is twice as large as the frame that it begins with
    launch_on_a_large_frame.__code__ = code.replace(co_stacksize=2**16)
    interpreter.GridExecutor.__call__ = launch_on_a_large_frame


def add_products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of matrices be sums in the order of their terms, wherever a row stands and whatever else is there.

    NumPy leaves them to BLAS, whose order depends on the processor and, on many, on a row's place in the matrix. One
    product of 16- or 32-bit numbers is exact in float64; one sum after the other rounds alike everywhere.
    """

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = np.zeros(d.data.shape)
        for column, row in zip(a.data.T.astype(np.float64), b.data.astype(np.float64), strict=True):
            total += column[:, None] * row[None, :]
        return interpreter.TensorHandle(total.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Note the address of everything that kernels read from now on, in the list that is returned."""
    addresses, load = [], interpreter.InterpreterBuilder.create_masked_load

    def load_and_note(self, ptrs, mask, *arguments):
        addresses.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        return load(self, ptrs, mask, *arguments)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", load_and_note)
    return addresses
