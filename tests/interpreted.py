"""Triton's interpreter, as tests need it: quicker, and with products whose bits do not depend on the machine."""

import numpy as np
import pytest
from triton.runtime import interpreter


def quicken() -> None:
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
