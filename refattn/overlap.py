"""Checks of where tensors lie: what a call writes has memory that none of its other tensors has.

Views of one buffer may lie between each other and still have no byte in common, as the layers of one pool do:

    buffer      k0 k0 v0 v0 k1 k1 v1 v1 | k0 k0 v0 v0 k1 k1 v1 v1        2 blocks, 2 layers of keys and values
    keys of 0   ^  ^                      ^  ^                           from byte 0 to 10, as keys of 1 from 4 to 14

So this compares elements, by their strides, where it does not suffice to compare the first and the last byte.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """How the elements of a tensor lie: the bytes of each, how many there are, and how far apart."""

    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes from the first element to the last one, both included."""
        if 0 in self.shape:
            return 0
        steps = sum(stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True))
        return (steps + 1) * self.itemsize


Place = tuple[int, Layout]  # the address of the first element, and the layout


def check_apart(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Check that each tensor that is written to has memory of its own.

    Args:
        written: the tensors that are written to, by the names that errors call them by.
        read: the tensors that are read.

    Raises:
        ValueError: naming the first tensor that shares memory with another that is written to.
    """
    others = {**written, **read}
    for name, tensor in written.items():
        del others[name]
        begin, end = _ends(tensor)
        for other_name, other in others.items():
            if other.device != tensor.device or begin == end:
                continue
            other_begin, other_end = _ends(other)
            if other_begin >= end or other_end <= begin:
                continue
            if _first_in_common((_place(tensor), _place(other)), ()) is not None:
                raise ValueError(f"{other_name}: expected memory of its own, got some of {name}, which is written to")


def _ends(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and that after the last one; the same of one without memory."""
    begin = _address(tensor)
    if begin is None:
        return 0, 0
    return begin, begin + (tensor.nbytes if tensor.is_contiguous() else _layout(tensor).size)


def _address(tensor: Tensor) -> int | None:
    """Return where a tensor lies; None on `meta`, in a transform of torch.func, and of subclasses without memory."""
    if tensor.device.type == "meta" or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # as `vmap` passes it
        return None


def check_pools_apart(name: str, pools: Sequence[Tensor], others: tuple[str, Sequence[Tensor]] | None = None) -> None:
    """Check that pools that are written to share no memory, so that what one copy has written is no other's source.

    Args:
        name: the name of the argument.
        pools: the pools that are written to.
        others: the pools that they are copied from, and the name of that argument: each may be the one that it is
            copied to, and no other.

    Raises:
        ValueError: naming the first pool that shares memory with one before it.
    """
    written = tuple(_place(pool) for pool in pools)
    pair = _first_in_common(written, ())
    if pair is not None:
        raise ValueError(
            f"{name}[{pair[1]}]: expected memory of its own, got some of {name}[{pair[0]}]; list each pool once"
        )
    if others is not None:
        sources = tuple(_place(pool) for pool in others[1])
        pair = _first_in_common(written, sources, partners=True)
        if pair is not None:
            raise ValueError(
                f"{name}[{pair[0]}]: expected memory that {others[0]}[{pair[1] - len(pools)}] has no part of, as it is "
                f"copied from {others[0]}[{pair[0]}], got some of it"
            )


def _place(tensor: Tensor) -> Place | None:
    """Return where a tensor lies, and how; None if it has no memory."""
    begin = _address(tensor)
    return None if begin is None else (begin, _layout(tensor))


def _layout(tensor: Tensor) -> Layout:
    return Layout(tensor.itemsize, tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=256)
def _first_in_common(
    written: tuple[Place | None, ...], read: tuple[Place | None, ...], partners: bool = False
) -> tuple[int, int] | None:
    """Return the numbers of the first two that have a byte in common, the first of which is written; None without any.

    Tensors that are read are counted after those that are written; `partners` have the same number in both.
    """
    places = [(*place, i) for i, place in enumerate((*written, *read)) if place is not None and place[1].size]
    count = len(written)
    found: list[tuple[int, int]] = []
    before: list[tuple[int, Layout, int]] = []  # those that reach as far as where the next one begins
    for begin, layout, i in sorted(places):
        before = [other for other in before if other[0] + other[1].size > begin]
        for other_begin, other_layout, k in before:
            first, second = sorted((i, k))
            is_asked = first < count and not (partners and second == first + count)
            if is_asked and _have_common_bytes(begin - other_begin, other_layout, layout):
                found.append((first, second))
        before.append((begin, layout, i))
    return min(found, default=None)


@lru_cache(maxsize=4096)
def _have_common_bytes(distance: int, one: Layout, other: Layout) -> bool:
    """Return whether two tensors that begin at some distance have a byte in common.

    A byte of each lies at `begin + sum(stride * index) + byte`. They are one byte where the sum of all strides of the
    first, times indices, less those of the second is the distance.
    """
    ranges: dict[int, tuple[int, int]] = {1: (1 - other.itemsize, one.itemsize - 1)}
    for layout, sign in ((one, 1), (other, -1)):
        for stride, size in zip(layout.strides, layout.shape, strict=True):
            step = stride * layout.itemsize
            least, most = ranges.get(step, (0, 0))
            ranges[step] = (least, most + size - 1) if sign > 0 else (least - size + 1, most)
    return _is_sum(distance, sorted(((step, *ends) for step, ends in ranges.items() if step), reverse=True))


def _is_sum(total: int, terms: list[tuple[int, int, int]]) -> bool:
    """Return whether a number is a sum of steps, each taken a number of times that is between its two ends."""
    if not terms:
        return total == 0
    (step, least, most), *rest = terms
    lowest, highest = (sum(term[0] * term[end] for term in rest) for end in (1, 2))
    first, last = max(least, -((highest - total) // step)), min(most, (total - lowest) // step)
    return any(_is_sum(total - step * times, rest) for times in range(first, last + 1))
