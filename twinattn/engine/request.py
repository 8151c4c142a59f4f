"""A request on its way through the engine: its prompt, its drafted tokens, and the events that report on it."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import index
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Int64
from torch import Tensor

from refattn.checks import check_flag, describe
from twinattn.engine.block_pool import BlockContent, Span
from twinattn.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """A prompt in which some tokens see one another, the later ones included: those of an image, or a whole prefix.

    Attributes:
        tokens: token ids, or text if the engine has a tokenizer.
        spans: the first and the last one of those tokens, by position, for each run of them.
        continues: the output's text goes on where that of the prompt ends, so its first word keeps the space before it.
            Otherwise it stands alone, as the message of a chat does. None: for text, but not for token ids.
    """

    tokens: str | Iterable[int]
    spans: Sequence[Span] = ()
    continues: bool | None = None

    @property
    def is_continued(self) -> bool:
        """Whether the output's text goes on where that of the prompt ends.

        Raises:
            ValueError: if `continues` is none of its values.
        """
        if self.continues is None:
            return isinstance(self.tokens, str)
        check_flag("continues", self.continues)
        return self.continues


AnyPrompt = str | Iterable[int] | Prompt


@dataclass(frozen=True)
class Draft:
    """Drafted tokens, as a tree after the last confirmed token.

    Attributes:
        tokens: of each node but the root, node 0.
        parents: of each node, the root included: the node that it follows.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depths(self) -> list[int]:
        """How many nodes are above each node, the root included."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it, so that a causal mask shows what it may see."""
        return self.parents == tuple(range(-1, len(self.tokens)))


@dataclass(eq=False)
class Request:
    """A prompt and its answer so far.

    Attributes:
        tokens: the prompt, then what was generated.
        prompt_len: how many of them are the prompt.
        sampling: how the next token is chosen.
        status: "waiting", "running" or "finished".
        finish_reason: of a finished request: "stop" (a stop token), "length" (max_tokens), "abort", or "error".
        error: what went wrong, for a `finish_reason` of "error": the exception's type and message.
        pieces: the text that came with each generated token; empty strings if the engine has no tokenizer.
        decoded: the last tokens whose text has been shown: the first of them, and one past the last; None before any.
        num_computed_tokens: how many of the tokens have their keys and values in the pool.
        blocks: the blocks of the pool that hold them, in order.
        contents: the contents of the full ones among them, in order.
        draft: drafted tokens after the last token, during a step; None if nothing is drafted.
        accepted: accepted tokens of that step that are not yet recorded.
        spans: as in `Prompt`.
        continues: whether its text goes on where that of the prompt ends.
        index: which sample of its prompt it is, from 0.
        others: of sample 0, the other samples of its prompt, in order.
    """

    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    status: str = "waiting"
    finish_reason: str | None = None
    error: str | None = None
    pieces: list[str] = field(default_factory=list)
    decoded: tuple[int, int] | None = None
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    contents: list[BlockContent] = field(default_factory=list)
    draft: Draft | None = None
    accepted: list[int] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    continues: bool = False
    index: int = 0
    others: "list[Request]" = field(default_factory=list)

    @property
    def samples(self) -> "list[Request]":
        """All samples of its prompt, this one first: one per answer, for the request that `Engine.add` returns."""
        return [self, *self.others]

    @property
    def unforked(self) -> "list[Request]":
        """Its other samples, until its prompt is computed: they are not scheduled, and have no blocks."""
        if not self.others or self.num_outputs or self.status == "finished":
            return []
        return [other for other in self.others if other.status != "finished"]

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, a stop token included."""
        return self.tokens[self.prompt_len :]

    @property
    def num_outputs(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.prompt_len

    @property
    def text(self) -> str:
        """The text so far, if the engine has a tokenizer; a stop token has none."""
        return "".join(self.pieces)

    @property
    def num_pending(self) -> int:
        """Tokens that must still go through the model: 1 for a decode, more for a prompt."""
        return len(self.tokens) - self.num_computed_tokens

    def cut(self, count: int) -> int:
        """Return how many tokens, up to `count`, go into a step: not a part of a span, as its tokens see all of it."""
        count = min(count, self.num_pending)
        if not self.spans:
            return count
        end = self.num_computed_tokens + count
        return next((first - self.num_computed_tokens for first, last in self.spans if first < end <= last), count)

    def has_span(self, count: int) -> bool:
        """Return whether some of the next `count` tokens are in a span of several."""
        start = self.num_computed_tokens
        return any(first < start + count and last >= start and last > first for first, last in self.spans)


@dataclass(frozen=True)
class StepTokens:
    """The new tokens of a step: what a runner, or the engine itself, makes the inputs of the model of.

    Attributes:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: blocks of each request.
        input_ids: the new tokens of all requests, one after the other.
        logits_rows: the query rows whose logits are wanted: the last one of each request with nothing left to compute;
            of one with a draft all.
        parents: the new tokens of each request as a tree, confirmed ones as a chain; None if all drafts are chains.
        requests: whose they are.
        due: those whose last token is among them, and who get a next one.
        spans: of each request; None if no new token is in one.
        chosen: of a step that is launched ahead, the tokens of the step before it, on the device. The host does not
            know them yet, so its `input_ids` say -1 for the first of them, -2 for the second, and so on. None where all
            tokens are known.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    input_ids: list[int]
    logits_rows: list[int]
    parents: list[Sequence[int]] | None
    requests: list[Request] = field(default_factory=list, compare=False)
    due: list[Request] = field(default_factory=list, compare=False)
    spans: list[tuple[Span, ...]] | None = None
    chosen: Int64[Tensor, "rows"] | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        scheduled: Mapping[Request, int],
        launched: Mapping[Request, int] = MappingProxyType({}),
        rows: Mapping[Request, int] = MappingProxyType({}),
        chosen: Int64[Tensor, "rows"] | None = None,
    ) -> "StepTokens":
        """Return the tokens of a step, from its requests with the number of new tokens of each.

        Args:
            scheduled: those.
            launched: the new tokens of each request in a step before it that has not been read.
            rows: the row of each request that gets a token in that step.
            chosen: the tokens of those rows, on the device.
        """
        tables = [request.blocks for request in scheduled]
        has_spans = any(request.spans and request.has_span(count) for request, count in scheduled.items())
        spans = [request.spans for request in scheduled] if has_spans else None
        tokens = cls(list(scheduled.values()), [], tables, [], [], None, list(scheduled), [], spans, chosen)
        for request, count in scheduled.items():
            first = request.num_computed_tokens + launched.get(request, 0)
            drafted = () if request.draft is None else request.draft.tokens
            tokens.seq_lens.append(first + count)
            tokens.input_ids.extend((*request.tokens[first : first + count - len(drafted)], *drafted))
            known = len(request.tokens)
            if request in rows and first + count > known:
                tokens.input_ids.append(-1 - rows[request])
            if first + count >= known + (request in rows):
                tokens.due.append(request)
                end = len(tokens.input_ids)
                tokens.logits_rows.extend(range(end - (1 if request.draft is None else count), end))
        if all(request.draft is None or request.draft.is_chain for request in scheduled):
            return tokens
        return replace(
            tokens,
            parents=[range(-1, count - 1) if r.draft is None else r.draft.parents for r, count in scheduled.items()],
        )


def fill_in(input_ids: Tensor, chosen: Int64[Tensor, "rows"]) -> Tensor:
    """Scatter the previous step's tokens into `input_ids` where `StepTokens` says so; 0 for one that is missing."""
    row = (-1 - input_ids).clamp(min=0).long()
    return chosen[row].clamp(min=0).where(input_ids < 0, input_ids)


class Event(NamedTuple):
    """A request got a token, or it failed.

    Attributes:
        request: the request.
        token_id: the token; None if the request failed.
        text: the text to show since its last event; it never ends in half a character.
        error: what went wrong if the request failed, as in `Request.error`.
        finish_reason: of the last token of a request, why it is the last: "stop" or "length".
    """

    request: Request
    token_id: int | None = None
    text: str = ""
    error: str | None = None
    finish_reason: str | None = None


def tokenize(prompt: str | Iterable[int], tokenizer: Any) -> list[int]:
    """Return a prompt's tokens: of a text by the tokenizer, otherwise the given ones.

    Raises:
        ValueError: if it is text and there is no tokenizer, or as `token_ids`.
    """
    if isinstance(prompt, str) and tokenizer is None:
        raise ValueError("prompt: expected token ids, as there is no tokenizer, got text")
    return token_ids(tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)


def check_spans(spans: Sequence[Span], num_tokens: int, most: int) -> tuple[Span, ...]:
    """Check the spans of a prompt, and return them.

    Args:
        spans: as in `Prompt`.
        num_tokens: tokens of the prompt.
        most: tokens of a step, through which a span goes as a whole.

    Raises:
        ValueError: if they are no pairs of positions in the prompt, rising, or a span has more tokens than a step.
    """
    if not isinstance(spans, Sequence):
        raise ValueError(f"spans: expected a sequence of pairs of ints, got {describe(spans)}")
    before = -1
    for span in spans:
        if not isinstance(span, Sequence) or [type(x) for x in span] != [int, int]:
            raise ValueError(f"spans: expected pairs of ints, the first and the last token of each, got {span!r}")
        first, last = span
        if not before < first <= last < num_tokens:
            raise ValueError(f"spans: expected first and last tokens in 0..{num_tokens - 1}, rising, got {list(spans)}")
        if last - first >= most:
            raise ValueError(
                f"spans: expected at most max_num_batched_tokens={most} tokens in a span, which are computed in one "
                f"step, got {last - first + 1}"
            )
        before = last
    return tuple((first, last) for first, last in spans)


def token_ids(prompt: Iterable[int]) -> list[int]:
    """Return a prompt's tokens as a list of ints, from a list, an array or a tensor.

    Raises:
        ValueError: if it does not hold ints, in one row.
    """
    tokens: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(tokens, (str, bytes, Mapping, Set)) or not isinstance(tokens, Iterable):
        raise ValueError(f"prompt: expected token ids, got {prompt!r}")
    tokens = list(tokens)
    wrong = [token for token in tokens if isinstance(token, bool) or not hasattr(token, "__index__")]
    if wrong:
        raise ValueError(f"prompt: expected token ids, which are ints, got {wrong[0]!r}")
    return [index(token) for token in tokens]
