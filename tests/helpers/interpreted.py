"""Triton's interpreter, as tests need it: quicker, and with products whose bits do not depend on the machine."""

import inspect

import numpy as np
import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def quicken() -> None:
    """Take from Triton's interpreter what it does over and over again, and let an overflow be an error.

    Most of its time goes into the types of what it computes, and little into the numbers. No number changes.
    """
    _patch_functions_once()
    _patch_builtins_by_name()
    _find_overflows_at_once()
    _make_types_once()
    _let_numpy_broadcast()
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


def _patch_builtins_by_name() -> None:
    """Let each launch patch Triton's language by what the first found in it, with functions made once.

    The interpreter looks at every name of three modules anew, and each call of what it puts there goes through three
    functions and a copy of its keywords.
    """
    semantic = TritonSemantic(interpreter.interpreter_builder)
    found: dict = {}

    def direct(member):
        function = getattr(member, "__wrapped__", member)  # without the check that there is a semantic

        def call(*arguments, **options):
            options["_semantic"] = semantic
            return function(*arguments, **options)

        return call

    def patch(package, builder, scope):
        if package not in found:
            members = inspect.getmembers(package)
            found[package] = [(name, member, direct(member)) for name, member in members if core.is_builtin(member)]
        for name, member, call in found[package]:
            if getattr(package, name) is member:
                scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch


def _find_overflows_at_once() -> None:
    """Find out by one operation whether a sum, a difference or a product of integers overflows.

    The interpreter takes ten operations of its own, and lets what overflows pass all the same. Here it is an error.
    """

    def refuse_overflow(self, lhs, rhs, binary_op):
        kind = lhs.dtype
        if kind.int_bitwidth < 64:
            exact = OPERATIONS[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            least, most = np.minimum.reduce(exact, None), np.maximum.reduce(exact, None)
            fits = kind.get_int_min_value() <= least and most <= kind.get_int_max_value()
            assert fits, f"{kind} overflow detected for operation {binary_op.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = refuse_overflow


def _make_types_once() -> None:
    """Make the type of a block and the shape of a value once, and not for each value anew: nothing writes to them."""
    blocks, values, in_numpy, bytes_of, retyped = {}, {}, {}, {}, {}
    make_block, make_value = core.block_type.__init__, core.tensor.__init__
    find_in_numpy, unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def block(self, element_ty, shape):
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        name = sizes, element_ty.name
        if name not in blocks:
            make_block(self, element_ty, shape)
            blocks[name] = vars(self) | {"sizes": sizes}
        vars(self).update(blocks[name], element_ty=element_ty)

    def with_element_type(self, element_ty):
        name = self.sizes, element_ty.name
        if name not in retyped:
            retyped[name] = core.block_type(element_ty, self.shape)
        return retyped[name]

    def value(self, handle, type):
        if type.name not in values:
            make_value(self, handle, type)
            values[type.name] = vars(self).copy()
        vars(self).update(values[type.name], handle=handle, type=type, dtype=type.scalar)

    def numpy_type(type):
        if type.name not in in_numpy:
            in_numpy[type.name] = find_in_numpy(type)
        return in_numpy[type.name]

    def fits(array, type):
        if type.name not in bytes_of:
            bytes_of[type.name] = 8 if type.is_ptr() else max(type.primitive_bitwidth, 8) // 8
        return array.itemsize <= bytes_of[type.name]

    core.block_type.__init__, core.tensor.__init__ = block, value
    core.block_type.with_element_ty = with_element_type
    core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)
    interpreter._get_np_dtype, interpreter._validate_np_data_size = numpy_type, fits


def _let_numpy_broadcast() -> None:
    """Give both sides of an operation their common type, and leave it to NumPy to repeat their numbers.

    Both are of one type already, or one is an address or a number: then nothing is promoted, and the interpreter takes
    thirty calls to find that out, and copies what it repeats. All else is left to it, errors included.
    """
    check, constant = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    numbers: dict = {}

    def constant_once(self, value, dtype):
        name = value, dtype.name
        if name not in numbers:
            numbers[name] = constant(self, value, dtype).handle.data
        return core.tensor(interpreter.TensorHandle(numbers[name], dtype), dtype)

    def common_sizes(one, other):
        """Return the shape of an operation on two types, or None where one may not be repeated."""
        if not one.is_block():
            return other.sizes if other.is_block() else ()
        if not other.is_block() or one.sizes == other.sizes:
            return one.sizes
        if len(one.sizes) != len(other.sizes):
            return None
        sizes = tuple([b if a == 1 else a for a, b in zip(one.sizes, other.sizes, strict=True)])
        fit = all(b in (1, size) for b, size in zip(other.sizes, sizes, strict=True))
        return sizes if fit else None

    shapes: dict = {}

    def repeated(lhs, rhs):
        """Return both with the type that they have when repeated, or None."""
        one, other = lhs.type, rhs.type
        if one.name == other.name:
            return lhs, rhs
        name = one.name, other.name
        if name not in shapes:
            sizes = common_sizes(one, other)
            kinds = (core.block_type(x, list(sizes)) if sizes else x for x in (lhs.dtype, rhs.dtype))
            shapes[name] = None if sizes is None else tuple(kinds)
        if shapes[name] is None:
            return None
        return tuple(
            x if x.type.name == kind.name else core.tensor(x.handle, kind)
            for x, kind in zip((lhs, rhs), shapes[name], strict=True)
        )

    def as_constant(number, dtype, semantic):
        """Return a number in the type of the other side, or itself where that is not the type of the operation."""
        if dtype.is_floating():
            keeps = type(number) is float or (type(number) is int and abs(number) < 2**31)
        else:
            keeps = type(number) is int and not dtype.is_ptr() and dtype.name != "int1"
            keeps = keeps and dtype.get_int_min_value() <= number <= dtype.get_int_max_value()
        return semantic.scalar_constant(number, dtype) if keeps else number

    def quick_check(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        one, other, answer = lhs, rhs, None
        if arithmetic_check:
            if type(one) is core.tensor and type(other) is not core.tensor:
                other = as_constant(other, one.dtype, self)
            elif type(other) is core.tensor and type(one) is not core.tensor:
                one = as_constant(one, other.dtype, self)
            if type(one) is type(other) is core.tensor:
                left, right = one.dtype, other.dtype
                is_address = allow_lhs_ptr and left.is_ptr() and right.is_int()
                is_divided_in_float32 = div_or_mod and left.name in ("fp16", "bf16")
                if is_address or (left.name == right.name and not left.is_ptr() and not is_divided_in_float32):
                    answer = repeated(one, other)
        if answer is None:
            answer = check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        return answer

    def expand(self, x, axis):
        return interpreter.TensorHandle(x.data[(slice(None),) * axis + (None,)], x.dtype.scalar)

    TritonSemantic.binary_op_type_checking_impl = quick_check
    TritonSemantic.scalar_constant = constant_once
    interpreter.InterpreterBuilder.create_expand_dims = expand


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
