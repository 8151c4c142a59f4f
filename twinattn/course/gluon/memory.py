"""Shared memory, and the barriers in it: `mbarrier`; and named barriers, which are not in memory."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from twinattn.course.gluon.machine import Group, Machine
from twinattn.course.gluon.values import Kind, Value, poison, require

HERE = Path(__file__).parent
Slot = tuple[int, ...]
_UNUSED = "a barrier is used before `mbarrier.init`"


class Shared:
    """A tensor in shared memory, or a part of one.

    Args:
        data: its elements.
        written: when threads of which warpgroup wrote the last time, by slot.
        slot: the slot that it is in, an index for each axis that is indexed.
    """

    def __init__(self, data: Tensor, written: dict[Slot, dict[Group, int]], slot: Slot = ()) -> None:
        self.data, self._written, self._slot = data, written, slot

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> Kind:
        """The type of an element."""
        return Kind(self.data.dtype)

    def index(self, at: Any) -> "Shared":
        """Return one slot."""
        at = int(at)
        require(0 <= at < self.data.shape[0], f"slot {at} of {self.data.shape[0]}")
        return Shared(self.data[at], self._written, (*self._slot, at))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        """Return a part of an axis."""
        return Shared(self.data.narrow(dim, start, length), self._written, self._slot)

    def permute(self, order: Sequence[int]) -> "Shared":
        """Return the same memory with the axes in another order."""
        return Shared(self.data.permute(tuple(order)), self._written, self._slot)

    def _reinterpret(self, kind: Kind, shape: Sequence[int], layout: Any) -> "Shared":
        return Shared(self.data.view(kind.torch).view(tuple(shape)), self._written, self._slot)

    def load(self, layout: Any = None) -> Value:
        """Read, by all threads of the warpgroup."""
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        """Write, by all threads of the warpgroup."""
        self.write_by_threads(value.data, Machine.now.current)

    def write_by_threads(self, data: Tensor, group: Group) -> None:
        """Write elements, which products may read only after a fence."""
        self._write(data)
        self._written.setdefault(self._slot, {})[group] = Machine.now.tick()

    def write_tile(self, data: Tensor) -> None:
        """Write a whole tile, which products may read without a fence."""
        self._write(data)
        self._written.pop(self._slot, None)

    def _write(self, data: Tensor) -> None:
        require(
            (data.shape, data.dtype) == (self.data.shape, self.data.dtype),
            f"{list(data.shape)} in {data.dtype} is written to {list(self.shape)} in {self.data.dtype}",
        )
        self.data.copy_(data)

    def read_by_product(self, reader: Group) -> Tensor:
        """Return the operand of a product; a warpgroup needs a fence after writes by threads."""
        for slot, writers in self._written.items():
            overlaps = all(x == y for x, y in zip(slot, self._slot, strict=False))  # one is a part of the other
            require(
                not overlaps or all(max(reader.fenced_at, writer.fenced_at) > when for writer, when in writers.items()),
                "a product reads what threads have written, without a fence after it",
            )
        return self.data


class Barrier:
    """A barrier in shared memory: the arrivals and the bytes that its phase still expects."""

    def __init__(self) -> None:
        self._count = self._missing = self._bytes = self._phase = 0

    def init(self, count: int) -> None:
        """Set how many arrivals end a phase."""
        self._count = self._missing = count

    def arrive(self, count: int = 1) -> None:
        """Count arrivals."""
        require(self._count, _UNUSED)
        self._missing -= count
        require(self._missing >= 0, f"a barrier that expects {self._count} arrivals has more")
        self._settle()

    def expect_arrivals(self, count: int) -> None:
        """Expect more arrivals in this phase."""
        self._missing += count

    def expect_bytes(self, size: int) -> None:
        """Arrive, and expect bytes of tiles."""
        self._bytes += size
        self.arrive()

    def receive(self, size: int) -> None:
        """Count bytes of a tile."""
        self._bytes -= size
        self._settle()

    def _settle(self) -> None:
        if not (self._missing or self._bytes):
            self._phase += 1
            self._missing = self._count

    def wait(self, parity: int) -> None:
        """Wait until the phase of a parity is over."""
        require(self._count, _UNUSED)
        require(parity in (0, 1), f"a wait for the parity {parity}, which is neither 0 nor 1")
        frame = sys._getframe()

        def what() -> str:
            missing = f"{self._missing} are missing" + f", and {self._bytes} bytes" * bool(self._bytes)
            return f"phase {self._phase} of a barrier, of whose {self._count} arrivals {missing}, in {_where(frame)}"

        Machine.now.wait(lambda: self._phase & 1 != parity, what)


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, number: int) -> None:
        self._each = [Barrier() for _ in range(number)]

    def index(self, at: Any) -> Barrier:
        """Return one of them."""
        at = int(at)
        require(0 <= at < len(self._each), f"barrier {at} of {len(self._each)}")
        return self._each[at]


def allocate(kind: Kind, shape: Sequence[int], layout: Any, value: Value | None = None) -> Shared | Barriers:
    """Allocate shared memory, that holds a value or NaN, or barriers."""
    if isinstance(layout, mbarrier.MBarrierLayout):
        return Barriers(shape[0])
    memory = Shared(poison(kind.torch, shape), {})
    if value is not None:
        memory.store(value)
    return memory


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    """Arrive at a barrier, once for all threads of the warpgroup."""
    if pred:
        barrier.arrive(count)
    Machine.now.wait()


def fence(cluster: bool = False) -> None:
    """Make earlier writes by threads visible to products, as `fence_async_shared`."""
    Machine.now.current.fenced_at = Machine.now.tick()


def meet(number: int, threads: int, *, waits: bool) -> None:
    """Arrive at a named barrier, which completes when the expected number of threads has arrived.

    Args:
        number: of the barrier.
        threads: that it expects.
        waits: whether the warpgroup waits for them (`bar.sync`), or goes on (`bar.arrive`).
    """
    machine = Machine.now
    group = machine.current
    state = group.program.named.setdefault(number, [0, threads, 0])
    require(
        threads == state[1] or not state[0], f"named barrier {number} expects {state[1]} threads, and here {threads}"
    )
    arrived, this_round = state[0] + 32 * group.num_warps, state[2]
    require(arrived <= threads, f"named barrier {number} expects {threads} threads and has more")
    state[:] = (0, threads, this_round + 1) if arrived == threads else (arrived, threads, this_round)
    frame = sys._getframe()
    machine.wait(lambda: not waits or state[2] > this_round, lambda: f"named barrier {number}, in {_where(frame)}")


def _where(frame: FrameType | None) -> str:
    """Return the names of the kernel's functions on the call stack, innermost first."""
    names: list[str] = []
    while frame is not None and "threading.py" not in frame.f_code.co_filename:
        if Path(frame.f_code.co_filename).parent != HERE:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return ", of ".join(names[:3])
