"""Checks of shared memory: a tensor that a call writes shares no memory with its other tensors.

Views of one buffer may be interleaved and still share no byte, like the layers of one pool:

    buffer      k0 k0 v0 v0 k1 k1 v1 v1 | k0 k0 v0 v0 k1 k1 v1 v1        2 blocks, 2 layers of keys and values
    keys of 0   ^  ^                      ^  ^                           bytes 0 to 10; keys of 1: bytes 4 to 14

So where the byte ranges overlap, elements are compared by their strides.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """The memory layout of a tensor: the bytes of an element, the shape and the strides."""

    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes from the first to the last element, both included."""
        if 0 in self.shape:
            return 0
        steps = sum(stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True))
        return (steps + 1) * self.itemsize


Place = tuple[int, Layout]  # the address of the first element, and the layout


def check_apart(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Check that no written tensor shares memory with another tensor.

    Args:
        written: the tensors that are written, by name.
        read: the tensors that are read, by name.

    Raises:
        ValueError: naming the first tensor that shares memory with a written one.
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
    """Return the addresses of a tensor's first byte and past its last one; (0, 0) without an address."""
    begin = _address(tensor)
    if begin is None:
        return 0, 0
    return begin, begin + (tensor.nbytes if tensor.is_contiguous() else _layout(tensor).size)


def _address(tensor: Tensor) -> int | None:
    """Return the address of a tensor; None on `meta`, in torch.func transforms, for subclasses without memory."""
    if tensor.device.type == "meta" or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor inside `vmap`
        return None


def check_pools_apart(name: str, pools: Sequence[Tensor], others: tuple[str, Sequence[Tensor]] | None = None) -> None:
    """Check that written pools share no memory, so that no copy overwrites the source of another.

    Args:
        name: the name of the argument.
        pools: the pools that are written.
        others: the name of the source argument, and the source pools; a source may be its own destination, but no
            other.

    Raises:
        ValueError: naming the first pool that shares memory with an earlier one.
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
    """Return the address and the layout of a tensor; None without an address."""
    begin = _address(tensor)
    return None if begin is None else (begin, _layout(tensor))


def _layout(tensor: Tensor) -> Layout:
    return Layout(tensor.itemsize, tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=256)
def _first_in_common(
    written: tuple[Place | None, ...], read: tuple[Place | None, ...], partners: bool = False
) -> tuple[int, int] | None:
    """Return the indices of the first two tensors that share a byte, the first of them written; None if there are none.

    Indices of read tensors follow those of written ones. With `partners`, a written tensor may share memory with the
    read tensor of the same index.
    """
    places = [(*place, i) for i, place in enumerate((*written, *read)) if place is not None and place[1].size]
    count = len(written)
    found: list[tuple[int, int]] = []
    before: list[tuple[int, Layout, int]] = []  # tensors that end after the start of the next
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
    """Return whether two tensors whose addresses differ by `distance` bytes share a byte.

    The addresses of a tensor's bytes are `begin + sum(stride * index) + byte`. The tensors share a byte if the
    difference of two such sums equals the distance.
    """
    ranges: dict[int, tuple[int, int]] = {1: (1 - other.itemsize, one.itemsize - 1)}
    for layout, sign in ((one, 1), (other, -1)):
        for stride, size in zip(layout.strides, layout.shape, strict=True):
            step = stride * layout.itemsize
            least, most = ranges.get(step, (0, 0))
            ranges[step] = (least, most + size - 1) if sign > 0 else (least - size + 1, most)
    return _is_sum(distance, sorted(((step, *ends) for step, ends in ranges.items() if step), reverse=True))


def _is_sum(total: int, terms: list[tuple[int, int, int]]) -> bool:
    """Return whether `total` is a sum of `step * times` over all terms, with `times` between the term's two bounds."""
    if not terms:
        return total == 0
    (step, least, most), *rest = terms
    lowest, highest = (sum(term[0] * term[end] for term in rest) for end in (1, 2))
    first, last = max(least, -((highest - total) // step)), min(most, (total - lowest) // step)
    return any(_is_sum(total - step * times, rest) for times in range(first, last + 1))
