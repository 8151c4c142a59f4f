"""One thread that steps an engine, for requests that come from an event loop while it steps.

An engine belongs to one thread. What others want of it they put into a queue, which is emptied between two steps:

    event loop      submit(a)      submit(b)                hang-up of a
                        │              │                         │
    engine thread    add a | step | add b | step | step | ... abort a | step | ...
                              │             │      │                     │
    event loop              a: "The"     a: " sky" b: "Bees"          b: " fly"

A request that fails ends by itself, as in the engine. If a step raises, the engine has undone it. The requests that
were under way end in an error then, since the same step would only raise again, and later ones are served.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from refattn.checks import check_flag, describe
from twinattn.engine.engine import Engine
from twinattn.engine.request import Prompt, Request
from twinattn.engine.sampling import SamplingParams

logger = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """As many requests wait as may wait."""


@dataclass(frozen=True)
class Piece:
    """What a step adds to an answer.

    Attributes:
        text: more of its text, which may be empty: half a character, or the beginning of what may be a stop text.
        token_ids: the tokens of the step, up to the one that completes a stop text.
        time: when the step had ended, by `time.perf_counter`.
        finish_reason: of the last piece: "stop", "length", "abort" or "error"; else None.
        error: what went wrong, for "error".
        index: which sample of the prompt it belongs to, from 0.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    time: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    index: int = 0


@dataclass(eq=False)
class Answer:
    """A request as its client sees it: its pieces come out of `pieces`, one per step and sample, in the event loop.

    Attributes:
        tokens: makes the tokens of the prompt, in the engine's thread, as a tokenizer belongs to one thread, too.
        sampling: how the next token is chosen, and of how many samples.
        stop: texts that end a sample and are not part of it.
        takes_all: generate up to what the pool and the model have room for, whatever `sampling.max_tokens` is.
        continues: its text goes on where that of the prompt ends; else it stands alone, as a message.
        arrived: when it came, by `time.perf_counter`.
        request: the engine's request; None before the engine has taken it.
        pieces: first an empty one, or the error for which the engine refused the prompt; then one per step and sample.
        held: of each sample, the end of the text so far, if a stop text may begin there.
    """

    tokens: Callable[[], Any]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    takes_all: bool = False
    continues: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    request: Request | None = None
    pieces: "asyncio.Queue[Piece | ValueError]" = field(default_factory=asyncio.Queue)
    held: dict[int, str] = field(default_factory=dict)

    def cut(self, text: str, index: int = 0) -> tuple[str, bool]:
        """Return what of a sample's held text and `text` may be shown, and whether a stop text ends it."""
        text = self.held.pop(index, "") + text
        found = [(text.find(word) + len(word), text.find(word)) for word in self.stop if word in text]
        if found:  # the first to be complete, however the text is cut into pieces
            return text[: min(found)[1]], True
        prefixes = (word[:count] for word in self.stop for count in range(1, len(word)))
        count = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self.held[index] = text[len(text) - count :]
        return text[: len(text) - count], False


class EngineThread:
    """Steps an engine while it has requests.

    Attributes:
        engine: the engine. Others may read its counters and the lengths of its queues, and nothing else.
        max_waiting: most requests that wait; one more is refused.

    Args:
        engine: the engine.
        max_waiting: most requests that wait.
        log_steps: log a line per step.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256, log_steps: bool = False) -> None:
        if not isinstance(engine, Engine):
            raise ValueError(f"engine: expected an Engine, got {describe(engine)}")
        check_flag("log_steps", log_steps)
        if type(max_waiting) is not int or max_waiting < 1:
            raise ValueError(f"max_waiting: expected an int of at least 1, got {max_waiting!r}")
        self.engine, self.max_waiting, self.log_steps = engine, max_waiting, log_steps
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: stop
        self._coming = 0  # requests that are submitted, and not in the engine's own queue yet
        self._count = threading.Lock()  # while one is counted, or goes from here to there
        self._answers: dict[Request, Answer] = {}  # by sample, under way; only the engine's thread knows them
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those on their way to the engine included."""
        return self._coming + len(self.engine.waiting)

    def start(self) -> None:
        """Start the thread, from the event loop that the answers belong to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every request, and the thread after its current step."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def submit(self, answer: Answer) -> None:
        """Hand a request over, and return when the engine has queued it: between two of its steps.

        Raises:
            QueueFullError: if too many wait.
            ValueError: naming the argument, if its prompt cannot be served. Nothing is queued then.
        """
        with self._count:
            if self.num_waiting >= self.max_waiting:
                raise QueueFullError(f"{self.num_waiting} requests wait, and no more may; try again later")
            self._coming += 1
        self._jobs.put(partial(self._add, answer))
        try:
            first = await answer.pieces.get()
        except asyncio.CancelledError:
            self.abort(answer)
            raise
        if isinstance(first, ValueError):
            raise first

    def abort(self, answer: Answer) -> None:
        """End an answer and free its blocks, after the current step; one that has ended is not changed."""
        self._jobs.put(partial(self._abort, answer))

    # The engine's thread.

    def _run(self) -> None:
        if self.engine.model.device.type == "cuda":
            torch.cuda.set_device(self.engine.model.device)  # every thread has a current device of its own
        try:
            while True:
                try:
                    job = self._jobs.get(block=not (self.engine.running or self.engine.waiting))
                except Empty:
                    self._deliver(self._step())
                    continue
                if job is None:
                    return
                job()
        finally:
            while not self._jobs.empty():  # no caller waits for ever
                job = self._jobs.get()
                if job is not None:
                    job()
            self._deliver(self._fail_all("the engine has stopped"))

    def _deliver(self, pieces: Iterable[tuple[Answer, Piece | ValueError]]) -> None:
        """Pass the pieces of a step to the event loop, which is woken once."""
        pieces = list(pieces)

        def put() -> None:
            for answer, piece in pieces:
                answer.pieces.put_nowait(piece)

        self._loop.call_soon_threadsafe(put)

    def _add(self, answer: Answer) -> None:
        first: Piece | ValueError = Piece()
        try:
            tokens, sampling = list(answer.tokens()), answer.sampling
            if answer.takes_all:
                room = min(self.engine.max_request_tokens, 10**9) - len(tokens) + 1  # the last one is never computed
                sampling = replace(sampling, max_tokens=max(1, int(room)))
        except ValueError as error:
            first = error
        except Exception as error:  # whatever a tokenizer raises, it is the fault of one prompt
            logger.exception("a prompt could not be read")
            first = ValueError(f"prompt: expected one that the tokenizer reads, got {type(error).__name__}: {error}")
        with self._count:
            self._coming -= 1
            if not isinstance(first, ValueError):
                try:
                    answer.request = self.engine.add(Prompt(tokens, continues=answer.continues), sampling)
                    self._answers.update(dict.fromkeys(answer.request.samples, answer))
                except ValueError as error:
                    first = error
        self._deliver([(answer, first)])

    def _abort(self, answer: Answer) -> None:
        under_way = [sample for sample in answer.request.samples if sample in self._answers] if answer.request else []
        for sample in under_way:
            del self._answers[sample]
            self.engine.abort(sample, alone=True)
        self._deliver([(answer, Piece(finish_reason="abort", index=sample.index)) for sample in under_way])

    def _step(self) -> list[tuple[Answer, Piece]]:
        """Make a step, and return what it adds to the answers."""
        start, before = time.perf_counter(), replace(self.engine.counters)
        try:
            events = self.engine.step()
        except Exception as error:  # whatever a model raises: no caller may be left waiting, and the thread goes on
            logger.exception("a step failed, and with it every request under way")
            return [*self._fail_all(f"{type(error).__name__}: {error}")]
        now = time.perf_counter()
        if self.log_steps:
            self._log(len(events), now - start, before)
        pieces = []
        for request in dict.fromkeys(event.request for event in events):
            answer = self._answers.get(request)
            if answer is None:
                continue  # added to the engine by another caller
            text, token_ids, stops = "", list[int](), False
            for event in (event for event in events if event.request is request):
                if (
                    event.token_id is not None and not stops
                ):  # what follows a stop text in a step with drafts is no part
                    token_ids.append(event.token_id)
                    shown, stops = answer.cut(event.text, request.index)
                    text += shown
            reason = "stop" if stops else request.finish_reason
            if stops:
                self.engine.abort(request, alone=True)
            elif reason is not None:
                text += answer.held.get(request.index, "")  # no stop text began there
            if reason is not None:
                del self._answers[request]
            failure = None if stops else request.error
            pieces.append((answer, Piece(text, tuple(token_ids), now, reason, failure, request.index)))
        return pieces

    def _fail_all(self, error: str) -> Iterable[tuple[Answer, Piece]]:
        for request in [*self.engine.running, *self.engine.waiting]:
            self.engine.abort(request)
        for request in [request for request in self._answers if request.status == "finished"]:
            yield self._answers.pop(request), Piece(finish_reason="error", error=error, index=request.index)

    def _log(self, num_tokens: int, seconds: float, before: Any) -> None:
        engine, pool = self.engine, self.engine.pool
        new = {name: value - vars(before)[name] for name, value in vars(engine.counters).items()}
        logger.info(
            "step %d: %d tokens computed in %.1f ms, %d chunks of prompts, %d tokens generated, %d tokens "
            "found in the cache, %d preemptions; now %d run, %d wait, %d of %d blocks are in use",
            engine.counters.steps,
            new["computed_tokens"],
            seconds * 1e3,
            new["chunks"],
            num_tokens,
            new["cached_tokens"],
            new["preemptions"],
            len(engine.running),
            len(engine.waiting),
            len(pool.users) - len(pool.free),
            len(pool.users),
        )
