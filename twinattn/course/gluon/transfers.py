"""Copies into shared memory and products out of it: issued now, and done at a drawn time.

Copies are done in any order; those of a thread before it waits for them, and before an arrival that it has bound to
them. The products of a warpgroup are done in the order in which they were issued.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twinattn.course.gluon.machine import Event, Machine
from twinattn.course.gluon.memory import Barrier, Shared
from twinattn.course.gluon.values import Value, address_of, load, moved, require


def copy_by_threads(place: Shared, address: Value, mask: Value | None = None, **hints: Any) -> None:
    """Start to copy elements, zeros where a mask is false, as `async_copy.async_copy_global_to_shared`."""
    machine = Machine.now
    group = machine.current

    def copy() -> None:
        place.write_by_threads(load(address, mask, None if mask is None else 0).data, group)

    group.copies[-1] = [*(one for one in group.copies[-1] if not one.done), machine.issue(Event("copy", copy))]


def commit_copies() -> None:
    """End a group of copies: `wait_for_copies` counts groups, and does not know what is in none."""
    Machine.now.current.copies.append([])


def arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    """Arrive at a barrier with every thread, once its earlier copies are done, as `async_copy.mbarrier_arrive`.

    Threads that have no copies under way arrive at once.
    """
    machine = Machine.now
    group = machine.current
    threads = 32 * group.num_warps
    if increment_count:
        barrier.expect_arrivals(threads)
    copies = [one for some in group.copies for one in some if not one.done]
    arrival = Event("copy", partial(barrier.arrive, threads), copies)
    if copies:
        machine.issue(arrival)
    else:
        arrival.finish()
    machine.wait()


def wait_for_copies(left: int = 0) -> None:
    """Wait for the copies of the warpgroup's threads that are committed, but for the last few groups."""
    group = Machine.now.current
    over = max(len(group.copies) - 1 - left, 0)
    for one in (one for some in group.copies[:over] for one in some):
        one.finish()
    group.copies = group.copies[over:]
    Machine.now.wait()


def copy_tile(tiles: Any, at: Sequence[Any], barrier: Barrier, place: Shared, pred: Any = True) -> None:
    """Start to copy a tile, zeros past the borders of its matrix, as `tma.async_copy_global_to_shared`."""
    if not pred:
        return
    if len(at) != 2 or tiles.padding != "zero":
        raise NotImplementedError(f"tensor map: expected a matrix with zeros around it, got {tiles}")
    first = [int(one) for one in at]

    def copy() -> None:
        rows, columns = (begin + torch.arange(size) for begin, size in zip(first, tiles.block_shape, strict=True))
        inside = ((rows >= 0) & (rows < tiles.shape[0]))[:, None] & ((columns >= 0) & (columns < tiles.shape[1]))
        offsets = rows[:, None] * tiles.strides[0] + columns * tiles.strides[1]
        place.write_tile(load(moved(address_of(tiles.base), offsets), Value(inside), 0).data)
        barrier.receive(place.data.numel() * place.data.element_size())

    Machine.now.issue(Event("copy", copy))
    Machine.now.wait()


def multiply(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False, **hints: Any) -> Value:
    """Start the product of a tile, in registers or shared memory, with one in shared memory, as `warpgroup_mma`."""
    machine = Machine.now
    group = machine.current

    def compute() -> Tensor:
        left, right = a.data if isinstance(a, Value) else a.read_by_product(group), b.read_by_product(group)
        require(left.dtype == right.dtype, f"a product of {left.dtype} and {right.dtype}")
        found = left.to(torch.float32) @ right.to(torch.float32)
        return found + (acc.data if acc.product is None else acc.product.result) if use_acc else found

    event = machine.issue(Event("product", compute, [one.product for one in group.products[-1:]]))
    result = Value(None, acc.layout, product=event)
    group.products.append(result)
    if not is_async:
        _finish_products(0)
    return result


def _finish_products(left: int) -> None:
    group = Machine.now.current
    over = max(len(group.products) - left, 0)
    for one in group.products[:over]:
        one.product.finish()
        one.become(one.product.result)
    group.products = group.products[over:]


def wait_for_products(left: int, deps: Sequence[Any] = ()) -> Any:
    """Wait for all products of the warpgroup but the last few; return what is passed on, as `warpgroup_mma_wait`."""
    _finish_products(left)
    Machine.now.wait()
    return deps[0] if len(deps) == 1 else tuple(deps)
