"""Shared memory, and the barriers in it: `mbarrier`; and named barriers, which are not in memory."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from twinattn.course.gluon.machine import Group, Machine
from twinattn.course.gluon.values import Kind, Value, poison, require

HERE = Path(__file__).parent


class Shared:
    """A tensor in shared memory, or a part of one.

    Args:
        data: its elements.
        written: when threads of which warpgroup wrote the last time, by slot.
        slot: the slot that it is in.
    """

    def __init__(self, data: Tensor, written: dict[Any, dict[Group, int]], slot: int | None = None) -> None:
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
        return Shared(self.data[at], self._written, at)

    def slice(self, start: int, length: int, axis: int) -> "Shared":
        """Return a part of an axis."""
        return Shared(self.data.narrow(axis, start, length), self._written, self._slot)

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
        """Write what products see only behind a fence."""
        self.data.copy_(data)
        self._written.setdefault(self._slot, {})[group] = Machine.now.tick()

    def write_tile(self, data: Tensor) -> None:
        """Write a whole tile, which products see without a fence."""
        self.data.copy_(data)
        self._written.pop(self._slot, None)

    def read_by_product(self, reader: Group) -> Tensor:
        """Return what a product of a warpgroup reads, in float32."""
        for writer, when in self._written.get(self._slot, {}).items():
            require(
                max(reader.fenced_at, writer.fenced_at) > when,
                "a product reads what threads have written, without a fence after it",
            )
        return self.data.to(torch.float32)


class Barrier:
    """A barrier in shared memory: the arrivals and the bytes that its phase still expects."""

    def __init__(self) -> None:
        self._count = self._missing = self._bytes = self._phase = 0

    def init(self, count: int) -> None:
        """Set how many arrivals end a phase."""
        self._count = self._missing = count

    def arrive(self, count: int = 1) -> None:
        """Count arrivals."""
        require(self._count, "a barrier is used before `mbarrier.init`")
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
        what = f"phase {self._phase} of a barrier, of whose {self._count} arrivals {self._missing} are missing"
        Machine.now.wait(lambda: self._phase & 1 != parity & 1, f"{what}, in {_where()}")


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, number: int) -> None:
        self._each = [Barrier() for _ in range(number)]

    def index(self, at: Any) -> Barrier:
        """Return one of them."""
        return self._each[int(at)]


def allocate(kind: Kind, shape: Sequence[int], layout: Any, value: Value | None = None) -> Shared | Barriers:
    """Allocate shared memory, that holds a value or NaN, or barriers."""
    if isinstance(layout, mbarrier.MBarrierLayout):
        return Barriers(shape[0])
    memory = Shared(poison(kind.torch, shape), {})
    if value is not None:
        memory.store(value)
    return memory


def arrive(barrier: Barrier, count: int = 1) -> None:
    """Arrive at a barrier, and let others run."""
    barrier.arrive(count)
    Machine.now.wait()


def fence() -> None:
    """Let products see what threads wrote before, as `fence_async_shared`."""
    Machine.now.current.fenced_at = Machine.now.tick()


def meet(number: int, threads: int, *, waits: bool) -> None:
    """Arrive at a named barrier, which lets all go on when so many threads have arrived.

    Args:
        number: of the barrier.
        threads: that it expects.
        waits: whether the warpgroup waits for them (`bar.sync`), or goes on (`bar.arrive`).
    """
    machine = Machine.now
    group = machine.current
    state = group.program.named.setdefault(number, [0, 0])
    state[0] += 32 * group.num_warps
    require(state[0] <= threads, f"named barrier {number} expects {threads} threads and has more")
    this_round = state[1]
    if state[0] == threads:
        state[:] = 0, state[1] + 1
    machine.wait(lambda: not waits or state[1] > this_round, f"named barrier {number}, in {_where()}")


def _where() -> str:
    """Return the functions of the kernel that run, from the innermost on."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "threading.py" not in frame.f_code.co_filename:
        if Path(frame.f_code.co_filename).parent != HERE:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return ", of ".join(names[:3])
