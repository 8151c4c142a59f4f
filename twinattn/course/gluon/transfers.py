"""Copies into shared memory and products out of it: issued now, and done at a drawn time.

Copies are done in any order; those of a thread before it waits for them, and before an arrival that it has bound to
them. The products of a warpgroup are done in the order in which they were issued.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from twinattn.course.gluon.machine import Event, Machine
from twinattn.course.gluon.memory import Barrier, Shared
from twinattn.course.gluon.values import Value, address_of, load, moved


def copy_by_threads(place: Shared, address: Value, mask: Value | None = None, **hints: Any) -> None:
    """Start to copy elements, zeros where a mask is false, as `async_copy.async_copy_global_to_shared`."""
    machine = Machine.now
    group = machine.current

    def copy() -> None:
        place.write_by_threads(load(address, mask, None if mask is None else 0).data, group)

    group.copies = [*(one for one in group.copies if not one.done), machine.issue(Event("copy", copy))]


def arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    """Let each thread arrive at a barrier when its copies so far are done, as `async_copy.mbarrier_arrive`."""
    machine = Machine.now
    group = machine.current
    threads = 32 * group.num_warps
    if increment_count:
        barrier.expect_arrivals(threads)
    machine.issue(Event("copy", partial(barrier.arrive, threads), list(group.copies)))
    machine.wait()


def wait_for_copies(left: int) -> None:
    """Wait for the copies of the warpgroup's threads."""
    if left:
        raise NotImplementedError(f"wait_group: expected 0, got {left}: groups of copies are not counted")
    for one in Machine.now.current.copies:
        one.finish()
    Machine.now.wait()


def copy_tile(tiles: Any, at: Sequence[Any], barrier: Barrier, place: Shared) -> None:
    """Start to copy a tile, zeros past the borders of its matrix, as `tma.async_copy_global_to_shared`."""
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
    result = Value(None, acc.layout)

    def compute() -> None:
        left = a.data.to(torch.float32) if isinstance(a, Value) else a.read_by_product(group)
        found = left @ b.read_by_product(group)
        result.become(found + acc.data if use_acc else found)

    event = machine.issue(Event("product", compute, group.products[-1:]))
    group.products = [*(one for one in group.products if not one.done), event]
    if not is_async:
        event.finish()
    return result


def wait_for_products(left: int, deps: Sequence[Any] = ()) -> Any:
    """Wait for all products of the warpgroup but the last few; return what is passed on, as `warpgroup_mma_wait`."""
    products = Machine.now.current.products
    for one in products[: len(products) - left]:
        one.finish()
    Machine.now.wait()
    return deps[0] if len(deps) == 1 else tuple(deps)
