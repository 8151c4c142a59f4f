"""Drafts: what followed the last tokens when they stood in the same text before, or what a smaller model would say.

Look-up needs no other model:

    tokens      the cat sat on the mat . the cat        the last two stood here before: "the cat"
    drafts                                sat on the mat

This works well for text that repeats itself (summaries, edited code, answers that repeat their question). A wrong draft
costs only a few rows of a step that waits for memory anyway. Several occurrences give several branches; common
beginnings are merged, which gives a tree. A draft model works for any text, and takes time itself.

A drafter of your own is an object with a `propose`, as `Drafter` says.

A draft is right if the model chooses the same token with the same random number that the token would have without
drafts. So the answers are the same, in fewer steps.

Source: Saxena 2023, "Prompt Lookup Decoding"; the n-gram drafts of vLLM; trees: Miao et al. 2024, "SpecInfer"; a draft
model: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from refattn.batch import Batch
from refattn.checks import check_sizes, describe
from refattn.trees import MOST_NODES, Accepted, Trees
from twinattn.engine.request import Draft, Request
from twinattn.engine.sampling import SamplingParams
from twinattn.engine.twin import Twin

logger = logging.getLogger(__name__)


@runtime_checkable
class DraftEngine(Protocol):
    """The engine of a smaller model, as far as drafts need it.

    Attributes:
        vocab_size: tokens that it knows.
    """

    vocab_size: int

    @property
    def max_request_tokens(self) -> int | float:
        """The most tokens of a request that may go through its model."""

    def generate(self, prompts: Iterable[Sequence[int]], sampling: SamplingParams) -> list[Request]:
        """Answer prompts, and return their finished requests."""


@runtime_checkable
class Drafter(Protocol):
    """Drafts what may follow the tokens of a request: `NGram`, `DraftModel`, or an object of your own.

    A drafter decides how many steps an answer takes, and never its tokens: the model verifies each draft in the step
    that it is made for. This one looks up the last token in a dictionary:

        class Phrases:
            max_drafts, max_branches = 3, 1

            def __init__(self, phrases):
                self.phrases = phrases

            def propose(self, tokens, *, depth, nodes, branches):
                return self.phrases.get(tokens[-1], [])[:depth]

        Engine(model, speculation=Phrases({12: [7, 9, 4]}), ...)

    It is called between two steps, in the engine's thread, once for each request that decodes. State, if it has some,
    has to follow from `tokens`: nothing says that a request begins, has ended or was preempted, and no call resets
    anything. After a rejected draft, the next call has the tokens that were accepted; after a step that was undone, the
    same ones again. A request whose draft is wrong, or whose `propose` raises, ends with an error; the others go on.

    Attributes:
        max_drafts: most tokens of a draft after one another, at least 1; read once, when the engine is made.
        max_branches: 1 if drafts are chains, more if some are trees; read once, too.
    """

    @property
    def max_drafts(self) -> int:
        """The most tokens of a draft after one another."""

    @property
    def max_branches(self) -> int:
        """1 if drafts are chains."""

    def propose(self, tokens: list[int], *, depth: int, nodes: int, branches: int) -> "Draft | Sequence[int] | None":
        """Draft what may follow some tokens.

        Args:
            tokens: all tokens of a request, the prompt and what was generated, in a list of the drafter's own.
            depth: most tokens after one another: `max_drafts`, or fewer where the step or the answer has less room.
            nodes: most tokens of all branches of a tree, at least `depth`.
            branches: `max_branches`, or 1 in a step that takes only chains.

        Returns:
            The ids of a chain, in order; or a `Draft`, which may be a tree; or None, or no ids, for no draft.
        """


@dataclass(frozen=True)
class NGram:
    """Drafts by look-up of the last tokens.

    Attributes:
        max_drafts: most tokens of a branch.
        max_branches: most branches; with 1 a draft is a chain.
        max_ngram: how many of the last tokens must have occurred before, at first.
        min_ngram: and at least, if more of them have not.

    Raises:
        ValueError: naming the attribute that is not an int of at least 1, or a `min_ngram` above `max_ngram`.
    """

    max_drafts: int = 4
    max_branches: int = 1
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_sizes(
            max_drafts=self.max_drafts,
            max_branches=self.max_branches,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram: expected at most max_ngram={self.max_ngram}, got {self.min_ngram}")

    def propose(self, tokens: Sequence[int], *, depth: int, nodes: int, branches: int | None = None) -> Draft | None:
        """Draft what may follow some tokens; None if their last tokens have not occurred before.

        Args:
            tokens: the prompt and what was generated.
            depth: most tokens of a branch, if that is fewer than `max_drafts`.
            nodes: most tokens of all branches.
            branches: most branches, if that is fewer than `max_branches`.
        """
        depth = min(depth, self.max_drafts)
        branches = self.max_branches if branches is None else min(branches, self.max_branches)
        found: list[Sequence[int]] = []
        for length in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            end = tokens[len(tokens) - length :]
            for start in range(len(tokens) - length - 1, -1, -1):  # the latest first
                if len(found) < branches and tokens[start] == end[0] and tokens[start : start + length] == end:
                    branch = tokens[start + length : start + length + depth]
                    if not any(list(other[: len(branch)]) == list(branch) for other in found):
                        found.append(branch)
        return _merge(found, nodes)


@dataclass(frozen=True, eq=False)
class DraftModel:
    """Drafts by a smaller model: the tokens that it finds most likely, one after the other.

    It is served by an engine of its own, whose cached prefixes hold what a text had before: a draft computes what has
    been accepted since, and itself. One request is drafted for at a time. Give the engine a `max_num_seqs` of 1, and
    room for the texts of all requests, or they are computed again for each draft.

    Attributes:
        engine: of the smaller model, which has the same tokens; by either twin, and without anything else to do.
        max_drafts: most tokens of a draft.

    Raises:
        ValueError: if `engine` is none, or `max_drafts` is not an int of at least 1.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
    """

    max_branches: ClassVar[int] = 1
    engine: DraftEngine
    max_drafts: int = 4

    def __post_init__(self) -> None:
        """Check the engine and the size."""
        if not isinstance(self.engine, DraftEngine):
            raise ValueError(f"engine: expected an Engine of the smaller model, got {describe(self.engine)}")
        check_sizes(max_drafts=self.max_drafts)

    def propose(self, tokens: Sequence[int], *, depth: int, nodes: int, branches: int | None = None) -> Draft | None:
        """Draft what the model says after some tokens; None if they are too many for its engine, or it fails.

        Args:
            tokens: the prompt and what was generated.
            depth: most tokens of the draft, if that is fewer than `max_drafts`.
            nodes: likewise.
            branches: not used, as there is one.
        """
        room = self.engine.max_request_tokens + 1 - len(tokens)  # the last drafted token does not go through the model
        if min(depth, nodes, room) < 1:
            return None
        count = int(min(self.max_drafts, depth, nodes, room))
        (request,) = self.engine.generate([tokens], SamplingParams(max_tokens=count))
        return _merge([request.output_ids], nodes)


def _merge(branches: Sequence[Sequence[int]], nodes: int) -> Draft | None:
    """Make a tree of branches, the beginnings that they share once; a branch that has no room ends early."""
    tokens: list[int] = []
    parents = [-1]
    children: dict[tuple[int, int], int] = {}
    for branch in branches:
        at = 0
        for token in branch:
            if (at, token) not in children:
                if len(tokens) == nodes:
                    break
                tokens.append(token)
                parents.append(at)
                children[at, token] = len(tokens)
            at = children[at, token]
    return Draft(tuple(tokens), tuple(parents)) if tokens else None


@dataclass(frozen=True)
class Drafting:
    """Adds the drafts of a drafter to steps.

    Attributes:
        drafter: the drafter.
        max_drafts: the drafter's, when the engine was made.
        max_branches: likewise.
        vocab_size: tokens that the model knows.
    """

    drafter: Drafter
    max_drafts: int
    max_branches: int
    vocab_size: int

    @classmethod
    def of(cls, drafter: Drafter | None, vocab_size: int) -> "Drafting | None":
        """Return what adds the drafts of a drafter; None without one."""
        return None if drafter is None else cls(drafter, drafter.max_drafts, drafter.max_branches, vocab_size)

    def add(
        self, scheduled: dict[Request, int], room: int, allocate: Callable[[Request, int], bool]
    ) -> dict[Request, Exception]:
        """Add drafts to the decodes of a step, as far as step, pool and output have room.

        Args:
            scheduled: the number of new tokens of each request, which grow by its draft.
            room: how many tokens the step has room for.
            allocate: allocates the blocks for new tokens of a request; False if too few are free.

        Returns:
            What was wrong with a draft, by request; those are no longer scheduled.
        """
        has_spans = any(request.spans and request.has_span(count) for request, count in scheduled.items())
        are_chains = has_spans or max(scheduled.values(), default=0) > MOST_NODES
        branches = 1 if are_chains else self.max_branches
        wrong: dict[Request, Exception] = {}
        for request, count in scheduled.items():
            request.draft, request.accepted = None, []
            left = request.sampling.max_tokens - request.num_outputs - 1
            if count != 1 or request.num_pending != 1 or left < 1 or room < 1 or request.unforked:
                continue
            nodes = min(room, MOST_NODES - 1)
            try:
                draft = self._propose(request, min(self.max_drafts, left, nodes), nodes, branches)
            except Exception as error:  # whatever a drafter raises, it is the fault of one request
                logger.exception("a draft after %d tokens failed", len(request.tokens))
                wrong[request] = error
                continue
            if draft is not None and allocate(request, 1 + len(draft.tokens)):
                request.draft, scheduled[request] = draft, 1 + len(draft.tokens)
                room -= len(draft.tokens)
        for request in wrong:
            del scheduled[request]
        return wrong

    def _propose(self, request: Request, depth: int, nodes: int, branches: int) -> Draft | None:
        limits = dict(depth=depth, nodes=nodes, branches=branches)
        proposed = self.drafter.propose([*request.tokens], **limits)
        return None if proposed is None else check_draft(proposed, **limits, vocab_size=self.vocab_size)


def check_draft(proposed: Any, *, depth: int, nodes: int, branches: int, vocab_size: int) -> Draft | None:
    """Check what a drafter has proposed, and return it as a draft; None if it is empty.

    Raises:
        ValueError: if it is no draft, has more tokens than it may have, or tokens that the model does not know.
    """
    draft = proposed if isinstance(proposed, Draft) else _chain_of(proposed)
    if not draft.tokens:
        return None
    parents = draft.parents
    are_ints = all(type(number) is int for number in (*draft.tokens, *parents))
    is_tree = are_ints and len(parents) == len(draft.tokens) + 1 and parents[0] == -1
    if not is_tree or not all(0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
        raise ValueError(
            f"draft: expected ints as tokens, and as parents -1 and an earlier node for each of them, got {draft}"
        )
    if branches == 1 and not draft.is_chain:
        raise ValueError(f"draft: expected a chain, as branches=1, got parents={list(parents)}")
    if max(draft.depths) > depth:
        raise ValueError(f"draft: expected at most depth={depth} tokens after one another, got {max(draft.depths)}")
    if len(draft.tokens) > nodes:
        raise ValueError(f"draft: expected at most nodes={nodes} tokens, got {len(draft.tokens)}")
    unknown = [token for token in draft.tokens if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(f"draft: expected token ids in 0..{vocab_size - 1}, got {unknown[0]}")
    return draft


def _chain_of(proposed: Any) -> Draft:
    """Return the draft of some token ids, each of which follows the one before it."""
    ids = proposed.tolist() if hasattr(proposed, "tolist") else proposed
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"draft: expected a sequence of token ids, a Draft or None, got {describe(proposed)}")
    wrong = [token for token in ids if isinstance(token, bool) or not hasattr(token, "__index__")]
    if wrong:
        raise ValueError(f"draft: expected token ids, which are ints, got {wrong[0]!r}")
    return Draft(tuple(map(index, ids)), tuple(range(-1, len(ids))))


class Verified(NamedTuple):
    """What came of the drafts of a step.

    Attributes:
        tokens: the next tokens of each request: those of its draft that the model chose, too, and one more.
        batch: the lengths and blocks of the requests, on the model's device.
        trees: their new tokens, on the host.
        accepted: those that were accepted, on the host.
    """

    tokens: dict[Request, list[int | None]]
    batch: Batch
    trees: Trees
    accepted: Accepted


def verify(
    requests: Sequence[Request], drafts: Sequence[Draft], chosen: Sequence[int | None], twin: Twin, device: torch.device
) -> Verified:
    """Compare drafts with what the model chose after each of their nodes.

    Args:
        requests: those that get a token.
        drafts: of each, the root alone if nothing is drafted.
        chosen: the token after each node of all drafts; None for one whose logits are not finite.
        twin: the package that computes.
        device: the model's.
    """
    path, metadata = twin.speculative, twin.metadata
    trees = path.make_trees([draft.parents for draft in drafts])
    sizes = [len(draft.parents) for draft in drafts]
    seq_lens = [request.num_computed_tokens + size for request, size in zip(requests, sizes, strict=True)]
    accepted = path.accept(
        metadata.make_batch(sizes, seq_lens),
        trees,
        torch.tensor([token for draft in drafts for token in (0, *draft.tokens)]),
        torch.tensor([-1 if token is None else token for token in chosen]),
    )
    batch = metadata.make_batch(sizes, seq_lens, [request.blocks for request in requests], device=device)
    nodes, next_tokens = accepted.nodes.tolist(), accepted.next_tokens.tolist()
    tokens = {
        request: [*(draft.tokens[node - 1] for node in path if node > 0), token if token >= 0 else None]
        for request, draft, path, token in zip(requests, drafts, nodes, next_tokens, strict=True)
    }
    return Verified(tokens, batch, trees, accepted)
