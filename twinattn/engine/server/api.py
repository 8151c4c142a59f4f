"""The routes of the server, and the JSON that they answer with."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from twinattn.engine import Engine
from twinattn.engine.engine_thread import Answer, EngineThread, Piece, QueueFullError
from twinattn.engine.server.ask import Ask, read_ask, short
from twinattn.engine.server.metrics import Metrics


class Api:
    """The routes, over one engine.

    Args:
        engine: the engine, with the model's tokenizer.
        name: what clients call the model.
        max_waiting: most requests that wait; more get 429.
        log_steps: log a line per step.
    """

    def __init__(self, engine: Engine, name: str, *, max_waiting: int = 256, log_steps: bool = False) -> None:
        self.thread = EngineThread(engine, max_waiting=max_waiting, log_steps=log_steps)
        if engine.tokenizer is None:
            raise ValueError("engine: expected one with a tokenizer, as clients send text, got none")
        self.name, self.created = _sayable(name), int(time.time())
        self.measured = Metrics(self.thread)
        self.watchers: set[asyncio.Task[None]] = set()
        self.app = Starlette(
            routes=[
                Route("/v1/completions", partial(self.complete, is_chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self.complete, is_chat=True), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
            ],
            exception_handlers={HTTPException: _http_error, ClientDisconnect: _hung_up},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            await self.thread.stop()

    async def models(self, request: Request) -> Response:
        """Describe the model, alone or in a list."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "twinattn"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        return JSONResponse(model) if name == self.name else self._no_such_model(name)

    async def health(self, _: Request) -> Response:
        """Return 200 while the engine's thread runs."""
        is_alive = self.thread.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def metrics(self, _: Request) -> Response:
        """Return all numbers in Prometheus' text."""
        return Response(self.measured.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def complete(self, request: Request, is_chat: bool) -> Response:
        """Answer a prompt or a chat."""
        if not self.thread.is_alive:
            return _error(503, "the engine has stopped")
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return _error(400, f"body: expected JSON, got what does not parse: {error}")
        if isinstance(body, dict) and body.get("model") != self.name:
            return self._no_such_model(body.get("model"))
        try:
            ask = read_ask(body, self.thread.engine.tokenizer, is_chat)
            await self.thread.submit(ask.answer)
        except ValueError as error:
            return _error(400, str(error))
        except QueueFullError as error:
            return _error(429, str(error))
        watcher = asyncio.create_task(self._abort_on_hang_up(request, ask.answer))
        self.watchers.add(watcher)  # the loop itself would let it be collected
        watcher.add_done_callback(self.watchers.discard)
        response = _Response(ask, self.name, int(time.time()))
        if ask.streams:
            return StreamingResponse(self._stream(response), media_type="text/event-stream")
        pieces = [piece async for piece in self._pieces(ask.answer)]
        errors = [piece.error for piece in pieces if piece.error is not None]
        return _error(500, errors[0]) if errors else JSONResponse(response.whole(pieces))

    async def _abort_on_hang_up(self, request: Request, answer: Answer) -> None:
        """Abort an answer when its client hangs up; the end of its response ends this, too, and aborts nothing."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.thread.abort(answer)

    async def _pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of an answer up to the last one of each sample, and measure them."""
        before: dict[int, float | None] = dict.fromkeys(range(answer.sampling.n))  # by sample that has not ended
        try:
            while before:
                piece = await answer.pieces.get()
                assert isinstance(piece, Piece)  # a refusal comes before the first piece
                before[piece.index] = self.measured.observe(answer, before[piece.index], piece)
                if piece.finish_reason is not None:
                    del before[piece.index]
                yield piece
        finally:
            for last in before.values():  # the client has hung up
                self.measured.observe(answer, last, Piece(finish_reason="abort"))

    async def _stream(self, response: "_Response") -> AsyncIterator[str]:
        """Yield the server-sent events of an answer."""
        count, left = 0, response.ask.answer.sampling.n
        if response.ask.is_chat:
            for index in range(left):
                yield _event(response.chunk(index, {"role": "assistant", "content": ""}))
        async with aclosing(self._pieces(response.ask.answer)) as pieces:
            async for piece in pieces:
                count += len(piece.token_ids)
                if piece.error is not None:
                    yield _event(_error_body(500, piece.error))
                    break
                if piece.text:
                    yield _event(response.chunk(piece.index, {"content": piece.text}))
                if piece.finish_reason is not None:
                    yield _event(response.chunk(piece.index, {}, piece.finish_reason))
                    left -= 1
                if not left and response.ask.usage:
                    yield _event(response.body(chunk=True) | {"choices": [], "usage": response.usage(count)})
        yield "data: [DONE]\n\n"

    def _no_such_model(self, name: Any) -> Response:
        return _error(404, f"model: expected {self.name!r}, got {short(name)}", code="model_not_found")


class _Response:
    """Makes the JSON of one response."""

    def __init__(self, ask: Ask, model: str, created: int) -> None:
        self.ask, self.model, self.created = ask, model, created
        self.id = f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def body(self, *, chunk: bool) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' * chunk}" if self.ask.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, index: int, delta: Mapping[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        """Return a chunk of a sample's stream; of a completion only the text of `delta` counts."""
        choice = {"delta": delta} if self.ask.is_chat else {"text": delta.get("content", "")}
        return self.body(chunk=True) | {"choices": [self._choice(index, choice, finish_reason)]}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choices = []
        for index in range(self.ask.answer.sampling.n):
            own = [piece for piece in pieces if piece.index == index]
            text = "".join(piece.text for piece in own)
            message = {"message": {"role": "assistant", "content": text}} if self.ask.is_chat else {"text": text}
            choices.append(self._choice(index, message, own[-1].finish_reason))
        count = sum(len(piece.token_ids) for piece in pieces)
        return self.body(chunk=False) | {"choices": choices, "usage": self.usage(count)}

    def _choice(self, index: int, content: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def usage(self, count: int) -> dict[str, int]:
        """Return the numbers of tokens, of which the prompt counts once."""
        assert self.ask.answer.request is not None  # the engine has taken it
        prompt = self.ask.answer.request.prompt_len
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _sayable(text: str) -> str:
    """Return a text with the halves of surrogate pairs escaped: JSON may bring them, and UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    kind = {429: "rate_limit_error"}.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": _sayable(message), "type": kind, "param": None, "code": code}}


def _error(status: int, message: str, code: str | None = None) -> Response:
    return JSONResponse(_error_body(status, message, code), status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _hung_up(_: Request, __: Exception) -> Response:
    return Response()  # the client hung up before its request had come; this is not read
