"""The engine against transformers: the demo's model answers some prompts, and its prefill or its decodes are timed.

There is more than one right answer, as the two best tokens can be closer than rounding. So each token is held against
the logits of a wider model that reads the same tokens: with `low` the model in its own type, a token may lie below the
best one by what two answers within the tolerance can differ,

    exact[best] - exact[token] <= 2 * 2 * max|low - exact|
"""

import copy
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from rich.console import Console

from fastattn import demo
from fastattn.bench.measure import Call, Timed
from fastattn.bench.peers import Contender
from fastattn.bench.work import Judge, WrongAnswerError

PARAMETERS = 134_515_008  # of SmolLM2-135M
PROMPT_TOKENS = 32  # kept of each of the demo's prompts


@dataclass(frozen=True)
class Generation:
    """Greedy answers to the demo's prompts, cut to one length.

    Attributes:
        max_tokens: tokens of each answer; the first one comes with the prefill.
        phase: what is timed: "prefill" or "decode".
    """

    max_tokens: int
    phase: str

    def flops(self) -> int:
        """Count a multiplication and an addition for each parameter and token."""
        tokens = PROMPT_TOKENS if self.phase == "prefill" else self.max_tokens - 1
        return 2 * PARAMETERS * tokens * len(demo.PROMPTS)

    def bytes(self, itemsize: int) -> int:
        """Count each parameter once a step."""
        return itemsize * PARAMETERS * (1 if self.phase == "prefill" else self.max_tokens - 1)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Prompts":
        """Load the model; the prompts are always the same."""
        model, prompts = _load(device, dtype)
        return Prompts(self, model, prompts)

    def judge(self, inputs: "Prompts") -> Judge:
        """Hold each token against a wider model."""
        model = inputs.model
        wider = copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)

        @cache
        def lag(prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[float, float]:
            """Say how far the worst token lies below the best one, and how far it may."""
            for one in (model, wider):
                one.set_attn_implementation("sdpa")
            tokens = torch.tensor([prompt + answer], device=model.device)
            exact, low = (one(tokens).logits[0, len(prompt) - 1 : -1].double() for one in (wider, model))
            chosen = exact.gather(1, tokens[:, len(prompt) :].T)[:, 0]
            return float((exact.amax(1) - chosen).max()), 4 * float((low - exact).abs().max())

        def judge(timed: Timed) -> None:
            for i, (prompt, answer) in enumerate(zip(inputs.prompts, timed.answer, strict=True)):
                if len(answer) != self.max_tokens:
                    raise WrongAnswerError(f"prompt {i}: {len(answer)} tokens, expected {self.max_tokens}")
                found, allowed = lag(tuple(prompt), tuple(answer))
                if found > allowed:
                    raise WrongAnswerError(f"prompt {i}: a token {found:.1e} below the best, allowed {allowed:.1e}")

        return judge


class Prompts(NamedTuple):
    """The inputs of a generation."""

    work: Generation
    model: Any
    prompts: Sequence[Sequence[int]]


def engine(package: str = "fastattn") -> Contender:
    """Our engine, with room for all prompts in one step."""

    def prepare(inputs: Prompts) -> Call:
        module = importlib.import_module(f"{package}.engine")
        tokens = sum(map(len, inputs.prompts)) + len(inputs.prompts) * (inputs.work.max_tokens + 16)
        sampling = module.Sampling(max_tokens=inputs.work.max_tokens, stop_token_ids=())

        def call() -> Timed:
            server = module.Engine(inputs.model, num_blocks=tokens // 16, token_budget=tokens)
            requests = [server.add(prompt, sampling) for prompt in inputs.prompts]
            stamps = [_now(inputs)]
            while server.running or server.waiting:
                server.step()
                stamps.append(_now(inputs))
            return _timed(inputs, [request.output_ids for request in requests], stamps)

        return call

    return Contender(package, prepare)


def transformers() -> Contender:
    """The `generate` of transformers over the same batch, with sdpa; prompts of one length need no padding."""

    def prepare(inputs: Prompts) -> Call:
        ids = torch.tensor(inputs.prompts, device=inputs.model.device)

        def call() -> Timed:
            inputs.model.set_attn_implementation("sdpa")
            stamps = [_now(inputs)]

            def stamp(tokens: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
                stamps.append(_now(inputs))
                return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

            length = inputs.work.max_tokens
            tokens = inputs.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                eos_token_id=inputs.model.config.vocab_size,  # no token ends an answer
                do_sample=False,
                stopping_criteria=[stamp],
            )
            return _timed(inputs, tokens[:, ids.shape[1] :].tolist(), stamps)

        return call

    return Contender("transformers sdpa", prepare)


def _timed(inputs: Prompts, answers: list[list[int]], stamps: list[float]) -> Timed:
    """Part the time at the first tokens, which come with the prefill."""
    start, first, *_, last = (*stamps, stamps[-1])
    return Timed(answers, first - start if inputs.work.phase == "prefill" else last - first)


def _now(inputs: Prompts) -> float:
    if inputs.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def _load(device: torch.device, dtype: torch.dtype) -> tuple[Any, list[list[int]]]:
    work = demo.prepare(Console(quiet=True), None, 1, str(device))
    return work.model.to(dtype), [prompt[-PROMPT_TOKENS:] for prompt in work.prompts]
