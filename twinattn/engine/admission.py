"""Which prompts an engine takes: each becomes a request, or is refused before it waits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from twinattn.engine import models
from twinattn.engine.request import AnyPrompt, Prompt, Request, check_spans, tokenize
from twinattn.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Admission:
    """Makes requests of prompts that a model and the pools of an engine have room for.

    Attributes:
        tokenizer: converts text to tokens; None if prompts are token ids.
        family: the model's, which says whether tokens may see one another.
        vocab_size: tokens that the model knows.
        max_positions: positions that the model has.
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        max_num_batched_tokens: most tokens in a step, through which a span goes as a whole.
        max_num_seqs: most requests that run at once, so most samples of a prompt.
    """

    tokenizer: Any
    family: str
    vocab_size: int
    max_positions: int | float
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **sizes: int) -> "Admission":
        """Return what a model and the sizes of an engine admit."""
        config = model.config.get_text_config()
        vocab_size = min(config.vocab_size, len(model.get_input_embeddings().weight))
        return cls(tokenizer, model.config.model_type, vocab_size, models.max_positions(config), **sizes)

    @property
    def max_request_tokens(self) -> int | float:
        """The most tokens of a request that may go through the model: what the pool holds, and it has positions for."""
        return min(self.num_blocks * self.block_size, self.max_positions)

    def make_requests(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """Make a request of each prompt, with one `sampling` for all or one for each.

        Raises:
            ValueError: naming the argument, as `Engine.add`.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts: expected a list of prompts, got {prompts!r}")
        prompts = list(prompts)
        samplings = list(sampling) if isinstance(sampling, Iterable) else [sampling] * len(prompts)
        if len(samplings) != len(prompts):
            raise ValueError(f"sampling: expected one, or one for each of {len(prompts)} prompts, got {len(samplings)}")
        return [self._make_request(*pair) for pair in zip(prompts, samplings, strict=True)]

    def _make_request(self, prompt: AnyPrompt, sampling: SamplingParams) -> Request:
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling: expected a SamplingParams, got {sampling!r}")
        given = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        tokens = tokenize(given.tokens, self.tokenizer)
        if not tokens:
            raise ValueError("prompt: expected at least one token, got none")
        spans = check_spans(given.spans, len(tokens), self.max_num_batched_tokens)
        if spans and self.family not in models.SPANNED:
            raise ValueError(
                f"spans: expected none in a model of the family {self.family}, which has no such mask, only of "
                f"{', '.join(models.SPANNED)}, got {given.spans}"
            )
        last_id = self.vocab_size - 1
        if min(tokens) < 0 or max(tokens) > last_id:
            raise ValueError(f"prompt: expected token ids in 0..{last_id}, got {min(tokens)}..{max(tokens)}")
        # One less, as the last token of an answer never goes through the model.
        length = len(tokens) + sampling.max_tokens - 1
        needed = -(-length // self.block_size)
        asked = f"got {len(tokens)} tokens and max_tokens={sampling.max_tokens}, which need"
        if needed > self.num_blocks:
            raise ValueError(
                f"prompt: expected to fit in the pool of {self.num_blocks} blocks of {self.block_size} tokens, "
                f"{asked} {needed} blocks"
            )
        if length > self.max_positions:
            raise ValueError(f"prompt: expected to fit in the model's {self.max_positions} positions, {asked} {length}")
        if sampling.n > self.max_num_seqs:
            raise ValueError(
                f"n: expected at most max_num_seqs={self.max_num_seqs} samples, which run at once, got {sampling.n}"
            )
        samplings = [sampling] if sampling.n == 1 else map(sampling.of_sample, range(sampling.n))
        first, *first.others = (
            Request([*tokens], len(tokens), params, spans=spans, continues=given.is_continued, index=index)
            for index, params in enumerate(samplings)
        )
        return first
