"""A line on standard error that says how far a long run is."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

REWRITE, REPEAT = 0.2, 10.0  # seconds between two looks on a terminal, and between two lines elsewhere
ERASE = "\r\x1b[K"


class Progress:
    """Shows how far a run is while it goes on, in a `with` block: `12 of 40 properties, 31 s`.

    On a terminal one line is rewritten, and erased at the end. Elsewhere, in a log or a pipe, a plain line is written
    every ten seconds. What the run prints on standard output stays as it is.

    Args:
        says: returns how far the run is; a thread calls it while the block runs.
        out: where to write; standard error if None.
        every: seconds between two lines; `REWRITE` on a terminal and `REPEAT` elsewhere if None.
    """

    def __init__(self, says: Callable[[], str], out: TextIO | None = None, every: float | None = None) -> None:
        self.says, self.out = says, sys.stderr if out is None else out
        self.is_terminal = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.every = every if every is not None else REWRITE if self.is_terminal else REPEAT
        self.began, self.is_shown = time.monotonic(), False
        self.ends, self.lock = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ends.set()
        self.thread.join()
        self.erase()

    def erase(self) -> None:
        """Erase the line on a terminal, before something else is printed there."""
        with self.lock:
            if self.is_shown:
                self._write(ERASE)
            self.is_shown = False

    def _run(self) -> None:
        while not self.ends.wait(self.every):
            text = f"{self.says()}, {time.monotonic() - self.began:.0f} s"
            with self.lock:
                if self.is_terminal:
                    self._write(ERASE + text[: shutil.get_terminal_size().columns - 1])
                    self.is_shown = True
                else:
                    self._write(text + "\n")

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
