"""The warpgroups of a launch, and the order in which they run.

Each is a thread, and exactly one runs at a time, until it waits, arrives or starts to copy a tile: then the next is
drawn among those that can go on. Some are drawn hardly ever as long as another can go on, so that others run ahead of
them.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from twinattn.course.gluon.values import KernelError, Value, require

RESIDENT = 6  # programs that run at once
SLOW = 0.01  # how often a slow warpgroup is drawn, where another is drawn once
LAST_SECONDS = 1.0  # for a thread to end after an error


@dataclass(eq=False)
class Event:
    """Something asynchronous, "copy" or "product": it is done once, after others."""

    kind: str
    do: Callable[[], Any]
    after: "Sequence[Event]" = ()
    done: bool = False
    result: Any = None

    def finish(self) -> None:
        """Do it, and before it what it comes after."""
        if not self.done:
            self.done = True
            for event in self.after:
                event.finish()
            self.result = self.do()


@dataclass(eq=False)
class Program:
    """A program of the grid.

    Attributes:
        place: its place in the grid.
        grid: the number of programs in each dimension.
        named: by named barrier, the threads that have arrived in this round, those that it expects, and the rounds that
            are over.
    """

    place: tuple[int, ...]
    grid: tuple[int, ...]
    named: dict[int, list[int]] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    """A warpgroup, or all warps of a program that has no roles yet.

    Attributes:
        name: its role.
        program: the program that it is of.
        num_warps: its warps.
        speed: how often it is drawn.
        copies: what its threads copy, by group; the last group is not committed yet.
        products: the results of its products that it has not waited for, in the order of issue.
        fenced_at: when it executed a fence the last time.
        ended: whether it has.
    """

    name: str
    program: Program
    num_warps: int
    speed: float
    copies: list[list[Event]] = field(default_factory=lambda: [[]])
    products: list[Value] = field(default_factory=list)
    fenced_at: int = 0
    ended: bool = False
    thread: threading.Thread = field(init=False)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    waits_for: Callable[[], str] = lambda: "its turn"


class _Stop(BaseException):
    """Ends the threads of a machine after an error."""


class Machine:
    """What runs a launch.

    Args:
        seed: of the order.
    """

    now: "Machine"  # the one that runs

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # How often copies, and products, are done as soon as they are issued.
        self._at_once = {kind: self._random.choice((0.0, 0.5, 1.0)) for kind in ("copy", "product")}
        self._under_way: list[Event] = []
        self._groups: list[Group] = []
        self._turn = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._stops = False
        self._infers = torch.is_inference_mode_enabled()  # each thread has a mode of its own
        self.clock = 1
        self.current: Group

    def tick(self) -> int:
        """Return a time later than all before."""
        self.clock += 1
        return self.clock

    def start(self, name: str, program: Program, num_warps: int, function: Callable[[], Any]) -> Group:
        """Begin a warpgroup, which runs when it is drawn."""
        group = Group(name, program, num_warps, self._random.choice((1.0, 1.0, SLOW)))
        self._groups.append(group)
        group.thread = threading.Thread(target=self._live, args=(group, function), daemon=True)
        group.thread.start()
        return group

    def _live(self, group: Group, function: Callable[[], Any]) -> None:
        group.turn.acquire()
        try:
            if not self._stops:
                with torch.inference_mode(self._infers):
                    function()
                copies = all(one.done for some in group.copies for one in some)
                require(copies, f"{group.name} ends with a copy under way")
                require(not group.products, f"{group.name} ends with a product under way")
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001  # the thread that launches raises it
            error.add_note(f"in {group.name} of program {group.program.place}")
            self._error = self._error or error
        group.ended = True
        self._turn.release()

    def wait(self, ready: Callable[[], bool] = lambda: True, what: Callable[[], str] = lambda: "its turn") -> None:
        """Suspend the running warpgroup until `ready()` is true; the error of a deadlock quotes `what()`."""
        group = self.current
        group.ready, group.waits_for = ready, what
        self._turn.release()
        group.turn.acquire()
        if self._stops:
            raise _Stop

    def issue(self, event: Event) -> Event:
        """Begin something asynchronous."""
        self._under_way.append(event)
        if self._random.random() < self._at_once[event.kind]:
            event.finish()
        return event

    def run(self, programs: Sequence[Callable[[], Any]]) -> None:
        """Run programs until all have ended; each begins by a call.

        Raises:
            KernelError: for a deadlock, or another mistake in the kernel.
        """
        waiting = list(programs)[::-1]
        try:
            while waiting or self._groups:
                while waiting and len({id(one.program) for one in self._groups}) < RESIDENT:
                    waiting.pop()()
                if (group := self._draw()) is not None:
                    self._resume(group)
                if self._error is not None:
                    raise self._error
                self._groups = [one for one in self._groups if not one.ended]
            require(all(one.done for one in self._under_way), "a copy is under way when the kernel ends")
        finally:
            self._stop()

    def _resume(self, group: Group) -> None:
        """Run a warpgroup until it waits or ends."""
        self.current = group
        group.turn.release()
        self._turn.acquire()

    def _stop(self) -> None:
        """End the threads that an error has left, or an interrupt, which comes while one of them runs."""
        self._stops = True
        for group in self._groups:
            group.turn.release()
        for group in self._groups:
            group.thread.join(LAST_SECONDS)

    def _draw(self) -> Group | None:
        """Choose the warpgroup that runs next; None if a copy or product was done instead."""
        self._under_way = [one for one in self._under_way if not one.done]
        able = [one for one in self._groups if one.ready()]
        if self._under_way and (not able or self._random.random() < 0.1):
            self._random.choice(self._under_way).finish()
            return None
        if not able:
            each = (f"{one.name} of program {one.program.place} waits for {one.waits_for()}" for one in self._groups)
            raise KernelError(f"deadlock: {'; '.join(each)}")
        return self._random.choices(able, [one.speed for one in able])[0]


def specialize(parts: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int], registers: Sequence[int]) -> Any:
    """Run functions by warpgroups of their own, as `gl.warp_specialize`; return the result of the first.

    The caller's warps run the first function: what they have issued before, they may wait for in it.
    """
    machine = Machine.now
    caller = machine.current
    (first, arguments), *others = parts
    require(len(others) == len(warps) == len(registers), "warp_specialize: expected warps and registers of each worker")
    caller.name, name = f"{first.__name__} (0)", caller.name
    groups = [
        machine.start(f"{function.__name__} ({i})", caller.program, num_warps, partial(function, *its))
        for i, ((function, its), num_warps) in enumerate(zip(others, warps, strict=True), 1)
    ]
    machine.wait()
    result = first(*arguments)
    machine.wait(lambda: all(one.ended for one in groups), lambda: "the other warpgroups")
    caller.name = name
    return result
