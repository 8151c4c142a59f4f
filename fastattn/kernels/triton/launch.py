"""Launches that are made again: the same kernel, grid and numbers, with the tensors of another layer.

At each launch Triton finds out anew what its arguments would compile to, which takes the host longer than many a kernel
takes the GPU. Layers of a step differ in their tensors only, so the plan of the step keeps what the first one launched.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastattn.kernels.triton.run import INTERPRETED

ALIGNMENT = 16  # bytes: Triton compiles another kernel for a pointer that is no multiple of it


class Launch:
    """A launch of a kernel, which is made at once and can be made again.

    Args:
        kernel: a function of `triton.jit`.
        grid: how many programs, in one or two dimensions.
        tensors: the arguments that change, by name; a float may be among them. Those that come later have to be of the
            same type, to be aligned as `is_aligned` says if these are, and None where these are.
        arguments: all others, by name.
        options: warps, stages, and what else is not an argument.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: Mapping[str, Tensor | float | None],
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        compiled = kernel[grid](**tensors, **arguments, **options)
        names = kernel.arg_names
        self._arguments = [arguments.get(name) for name in names]  # without the tensors, which others want to free
        self._places = [names.index(name) for name in tensors]
        self._launch = kernel[grid] if INTERPRETED else compiled[(*grid, 1, 1)[:3]]

    def again(self, *tensors: Tensor | float | None) -> None:
        """Launch with other tensors, in the order in which they were given first."""
        arguments = self._arguments.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        self._launch(*arguments)


def is_aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether all tensors begin at multiples of 16 bytes."""
    return not any(x.data_ptr() % ALIGNMENT for x in tensors if x is not None)
