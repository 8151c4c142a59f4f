"""What becomes of the tokens that were chosen: events with their text, and the end of a request."""

import logging
from collections.abc import Sequence
from typing import Any

from twinattn.engine import models
from twinattn.engine.detokenize import new_text
from twinattn.engine.request import Event, Request
from twinattn.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Outputs:
    """Makes the events of requests out of their next tokens, and records them.

    Attributes:
        tokenizer: converts tokens to text; None if no text is needed.
        end_token_ids: what ends an output that has no stop tokens of its own.

    Args:
        model: says which tokens end an output; so does its tokenizer.
        tokenizer: as above.
        scheduler: keeps track of the requests.
    """

    def __init__(self, model: Any, tokenizer: Any, scheduler: Scheduler) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = {*models.end_token_ids(model), getattr(tokenizer, "eos_token_id", None)} - {None}
        self._scheduler = scheduler

    def events_of(self, request: Request, tokens: Sequence[int | None]) -> list[Event]:
        """Return the events of a request's next tokens, up to the one that ends it; they change nothing yet.

        Args:
            request: the request.
            tokens: its next ones; None for one whose logits are not finite.
        """
        events = []
        for token in tokens:
            event = self._next_event(request, token)
            events.append(event)
            if event.token_id is None or event.finish_reason:
                break
            request.accepted.append(event.token_id)
        request.accepted = []
        return events

    def commit(self, request: Request, count: int, events: Sequence[Event]) -> None:
        """Record the tokens or the failure of a request, and end it if it is complete.

        Args:
            request: the request.
            count: its new tokens in the step, drafts included; 0 for a sample of which another one computed the prompt.
            events: from `events_of`, or of its failure.
        """
        failure = events[-1].error if events else None
        tokens = events if failure is None else events[:-1]
        if count and (tokens or not events):
            self._scheduler.keep(request, count if request.draft is None else 1)  # drafts do not count yet
        if tokens and request.others:
            self._scheduler.fork(request)
        if tokens and request.status == "waiting":  # the first sample has failed, and its blocks are gone
            self._scheduler.waiting.appendleft(request)
        for event in tokens:
            assert event.token_id is not None  # it is no failure
            request.tokens.append(event.token_id)
            request.pieces.append(event.text)
        if request.draft is not None and tokens:
            self._scheduler.keep_drafts(request, len(tokens) - 1)
        request.draft = None
        if failure is not None:
            request.error = failure
            self._scheduler.pool.forget(request.blocks)  # their contents are not known
            self._scheduler.finish(request, "error")
        elif tokens and tokens[-1].finish_reason is not None:
            self._scheduler.finish(request, tokens[-1].finish_reason)

    def _next_event(self, request: Request, token: int | None) -> Event:
        """Return the event of a request's next token, or of its failure if there is no token or no text of it."""
        if token is None:
            return Event(request, error="FloatingPointError: logits: expected finite numbers, got NaN or infinity")
        reason = self._reason_to_end(request, token)
        try:
            text = new_text(self.tokenizer, request, token, reason) if self.tokenizer else ""
            return Event(request, token, text, finish_reason=reason)
        except Exception as error:
            logger.exception("a request of %d tokens failed", len(request.tokens))
            return Event(request, error=describe_error(error))

    def _reason_to_end(self, request: Request, token: int) -> str | None:
        """Return the reason why a token is the last of its request, or None if it is not."""
        stops = request.sampling.stop_token_ids
        if token in (self.end_token_ids if stops is None else stops):
            return "stop"
        length = request.num_outputs + len(request.accepted) + 1
        return "length" if length == request.sampling.max_tokens else None


def describe_error(error: Exception) -> str:
    """Return what `Event.error` says of an exception: its type and its message."""
    return f"{type(error).__name__}: {error}"
