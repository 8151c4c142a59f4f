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
    _call_without_detours()
    _find_overflows_at_once()
    _make_types_once()
    _find_common_types_once()
    _run_in_one_piece_of_stack()


def _patch_functions_once() -> None:
    """Patch Triton's language once per kernel and function that it calls, and not at each launch or call.

    The interpreter does so each time, which takes a third of its own, and takes a kernel's patches back. Here they
    stay: nothing but kernels uses the language.
    """
    has_patched, patch = set(), interpreter._patch_lang

    def patch_once(function):
        if function not in has_patched:
            patch(function)
            has_patched.add(function)
        return interpreter._LangPatchScope()  # nothing to take back

    def call(self, *arguments, **options):
        patch_once(self.fn)
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = patch_once, call


def _call_without_detours() -> None:
    """Call an operation of the language from its patch, without two functions between them."""

    def patch(obj, name, member, builder, scope):
        operation = getattr(member, "__wrapped__", member)

        def call(*arguments, **options):
            options["_semantic"] = interpreter.interpreter_semantic
            return operation(*arguments, **options)

        scope.set_attr(obj, name, call)

    unwrap, are_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, type(None)}

    def unwrap_if_need_be(x):
        return x if type(x) in plain else unwrap(x)

    def is_same_or_equal(self, other):
        return self is other or are_equal(self, other)

    interpreter._patch_attr, core._unwrap_if_constexpr, core.dtype.__eq__ = patch, unwrap_if_need_be, is_same_or_equal


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
    blocks, values, in_numpy, with_elements, bits = {}, {}, {}, {}, {}
    make_block, make_value = core.block_type.__init__, core.tensor.__init__
    find_in_numpy, make_with_elements = interpreter._get_np_dtype, core.block_type.with_element_ty

    def block(self, element_ty, shape):
        name = element_ty.name, *[size.value if type(size) is core.constexpr else size for size in shape]
        if name not in blocks:
            make_block(self, element_ty, shape)
            blocks[name] = self.__dict__.copy()
        self.__dict__.update(blocks[name])
        self.element_ty = element_ty

    def with_element_ty(self, element_ty):
        name = self.name, element_ty.name
        if name not in with_elements:
            with_elements[name] = make_with_elements(self, element_ty)
        return with_elements[name]

    def value(self, handle, type):
        if type.name not in values:
            make_value(self, handle, type)
            values[type.name] = self.__dict__.copy()
        self.__dict__.update(values[type.name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def numpy_type(type):
        if type.name not in in_numpy:
            in_numpy[type.name] = find_in_numpy(type)
        return in_numpy[type.name]

    def fits(array, type):
        if type.name not in bits:
            bits[type.name] = np.inf if type.is_ptr() else max(type.primitive_bitwidth, 8)
        return 8 * array.itemsize <= bits[type.name]

    core.block_type.__init__, core.block_type.with_element_ty, core.tensor.__init__ = block, with_element_ty, value
    interpreter._get_np_dtype, interpreter._validate_np_data_size = numpy_type, fits


def _find_common_types_once() -> None:
    """Find out once to which types and shapes two operands go, and make a number of each type once."""
    find, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    found, found_shapes = {}, {}

    def name_of(operand):
        if type(operand) is core.tensor:
            return operand.type.name
        return type(operand), repr(operand)  # a number: -0.0 is no 0.0, and True no 1

    def what_becomes(before, after):
        """Return None for an operand that stays as it is, the value of a number, and the type that a value goes to."""
        if after is before:
            return None
        return after.type if type(before) is core.tensor else after

    def convert(semantic, operand, to, spread):
        if to is None or type(to) is core.tensor:
            return operand if to is None else to
        if operand.dtype != to.scalar:
            operand = semantic.cast(operand, to.scalar)
        if operand.type.name == to.name:
            return operand
        dtype = operand.dtype  # bool for a comparison: its handle has the type of the operands
        data = operand.handle.data.astype(interpreter._get_np_dtype(dtype), copy=False)
        return core.tensor(interpreter.TensorHandle(spread(data, to.shape), dtype), to)

    def left_to_numpy(data, shape):
        """Leave a value's shape to NumPy, which gives the answer of two operands that of both."""
        return data

    def find_once(self, lhs, rhs, *options, **more):
        names = name_of(lhs), name_of(rhs), options, *more.items()
        if names in found:
            left, right = found[names]
            return convert(self, lhs, left, left_to_numpy), convert(self, rhs, right, left_to_numpy)
        results = find(self, lhs, rhs, *options, **more)
        found[names] = what_becomes(lhs, results[0]), what_becomes(rhs, results[1])
        return results

    def broadcast_once(self, lhs, rhs):
        names = lhs.type.name, rhs.type.name
        if names in found_shapes:
            left, right = found_shapes[names]
            return convert(self, lhs, left, np.broadcast_to), convert(self, rhs, right, np.broadcast_to)
        results = broadcast(self, lhs, rhs)
        found_shapes[names] = what_becomes(lhs, results[0]), what_becomes(rhs, results[1])
        return results

    TritonSemantic.binary_op_type_checking_impl = find_once
    TritonSemantic.broadcast_impl_value = broadcast_once


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
    """Compute matrix products as sums in the order of their terms, wherever a row stands and whatever else is there.

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
