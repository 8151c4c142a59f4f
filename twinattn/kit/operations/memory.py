"""Memory layouts of tensors: other strides, poison around and between their elements, large offsets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinattn.kit.bits import bits_of
from twinattn.kit.example import Arguments
from twinattn.kit.kernel import LARGE, untouched
from twinattn.kit.operations.operation import Operation, with_tensors, word_of

MARGIN = 64  # elements before and after each tensor
POISON = (torch.nan, torch.inf, 1e4)  # one per case, in floating-point tensors
NONSENSE = (-1, 2**30, -7)  # one per case, in tables
SIDE_BY_SIDE = ("cu_seqlens_q", "seq_lens", "tree_lens")  # lengths: kernels read them in place
LAYOUTS = ("reversed", "gaps", "apart")


@dataclass
class Placed:
    """A tensor in the middle of a larger memory, and a copy of that memory before the call."""

    view: Tensor
    memory: Tensor
    before: Tensor | None = None

    def keep(self) -> None:
        """Copy the memory, to compare it after the call."""
        self.before = self.memory.clone()

    def was_written_outside(self) -> bool:
        """Return whether memory around the tensor, or between its elements, has changed."""
        assert self.before is not None
        now = self.memory.clone()
        for x in (now, self.before):
            bits_of(x.as_strided(self.view.shape, self.view.stride(), MARGIN)).zero_()
        return not torch.equal(bits_of(now), bits_of(self.before))

    def was_written(self) -> bool:
        """Return whether any of the memory has changed."""
        assert self.before is not None
        return not torch.equal(bits_of(self.memory), bits_of(self.before))


def place(x: Tensor, layout: str, device: str) -> Placed:
    """Copy a tensor to memory with margins: "dense", dimensions "reversed", rows with "gaps", or elements "apart"."""
    sizes = list(x.shape)
    if layout == "reversed":
        strides = _side_by_side(sizes[::-1])[::-1]
    elif layout == "gaps":
        strides = _side_by_side([size + 4 for size in sizes])
    else:
        strides = [stride * (2 if layout == "apart" else 1) for stride in _side_by_side(sizes)]
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if x.numel() else 0
    count = (span + 2 * MARGIN) * x.element_size()
    fill = 0 if x.dtype == torch.bool else 255  # NaN in every floating-point type, -1 in signed integers
    memory = torch.full((count,), fill, dtype=torch.uint8, device=device).view(x.dtype)
    view = memory.as_strided(sizes, strides, MARGIN)
    bits_of(view).copy_(bits_of(x.contiguous()))
    return Placed(view, memory)


def _side_by_side(sizes: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return strides[::-1]


def layout_of(name: str, layout: str, dense: frozenset[str]) -> str:
    """Return the layout of a tensor: `layout`, of slots and block numbers, too, unless it has to be contiguous."""
    return "dense" if {name, word_of(name)} & {*dense, *SIDE_BY_SIDE} else layout


def far_apart(operation: Operation, arguments: Arguments) -> Arguments:
    """Return the arguments with pools that span more than 2^31 elements, in memory that is mostly never written."""

    def far(name: str, x: Tensor) -> Tensor:
        if word_of(name) not in operation.pools or len(x) < 2:
            return x
        stride = (LARGE // (len(x) - 1) // 4096 + 2) * 4096
        memory = untouched(stride * (len(x) - 1) + x[0].numel(), x.dtype, "cpu")
        return memory.as_strided(x.shape, (stride, *x.contiguous().stride()[1:])).copy_(x)

    return with_tensors(arguments, far)


def poisoned(operation: Operation, arguments: Arguments, unread: dict[str, Tensor], turn: int) -> Arguments:
    """Return the arguments with NaN, infinity or a large number in unread elements, and invalid entries in tables."""

    def spoil(name: str, x: Tensor) -> Tensor:
        if name not in unread:
            return x
        if x.dtype in (torch.int32, torch.int64):
            return x.masked_fill(unread[name], NONSENSE[turn % len(NONSENSE)])
        if x.element_size() > 1:
            return x.masked_fill(unread[name], POISON[turn % len(POISON)])
        spoiled = bits_of(x.clone())
        spoiled[unread[name]] = (127, 255, 126)[turn % 3]  # NaN, NaN and the largest number of e4m3
        return spoiled.view(x.dtype)

    return with_tensors(arguments, spoil)
