"""The engine against transformers: the demo's model answers prompts; the prefill, the decodes or everything is timed.

More than one answer can be right, because the two best tokens can be closer than rounding. So each token is compared
with the logits of the model in a wider type on the same tokens. With `low` for the model in its own type, a token may
be below the best one by as much as two answers within the tolerance can differ:

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

from twinattn.bench.contender import Contender
from twinattn.bench.measure import Call, Timed
from twinattn.bench.work import Judge, WrongAnswerError
from twinattn.engine import BlockPool, CudaGraphs, Engine, SamplingParams, pack
from twinattn.engine.demo_work import check_answered, prepare

PARAMETERS = 134_515_008  # parameters of SmolLM2-135M


@dataclass(frozen=True)
class Generation:
    """Greedy answers to prompts of one length, cut out of those of the demo.

    Attributes:
        max_tokens: tokens of each answer; the first one comes with the prefill.
        phase: what is timed: "prefill", "decode" or "both".
        num_prompts: how many prompts there are.
        prompt_tokens: how long they are.
    """

    max_tokens: int
    phase: str
    num_prompts: int = 8
    prompt_tokens: int = 32

    def flops(self) -> int:
        """Count a multiplication and an addition for each parameter and token."""
        tokens = {"prefill": self.prompt_tokens, "decode": self.max_tokens - 1}
        return 2 * PARAMETERS * self.num_prompts * tokens.get(self.phase, sum(tokens.values()))

    def reads(self, itemsize: int) -> int:
        """Count each parameter once a step."""
        steps = {"prefill": 1, "decode": self.max_tokens - 1}
        return itemsize * PARAMETERS * steps.get(self.phase, self.max_tokens)

    def writes(self, itemsize: int) -> int:
        """Count none: the new keys and values are small beside the parameters."""
        return 0

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Prompts":
        """Load the model; the prompts are always the same."""
        model, prompts = _load(device, dtype)
        return Prompts(self, model, [self.cut(prompts, i) for i in range(self.num_prompts)])

    def cut(self, prompts: Sequence[Sequence[int]], i: int) -> list[int]:
        """Cut prompt `i` out of all prompts in a row, from one after the other."""
        around, turn = i % len(prompts), i // len(prompts)
        tokens = [token for prompt in (*prompts[around + 1 :], *prompts[: around + 1]) for token in prompt]
        return tokens[: len(tokens) - 7 * turn][-self.prompt_tokens :]

    def judge(self, inputs: "Prompts") -> Judge:
        """Hold each token against a wider model."""
        model = inputs.model
        wider = copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)

        @cache
        def lag(prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[float, float]:
            """Return how far the worst token lies below the best one, and how far it may."""
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


def engine(package: str = "fastattn", *, packed: bool = False) -> Contender:
    """Our engine, with room for all prompts in one step; over a copy of the model with packed weights, if asked."""

    def prepare(inputs: Prompts) -> Call:
        twin = importlib.import_module(package)
        tokens = sum(map(len, inputs.prompts)) + len(inputs.prompts) * (inputs.work.max_tokens + 16)
        sampling = SamplingParams(max_tokens=inputs.work.max_tokens, stop_token_ids=())
        graphs = CudaGraphs() if package == "fastattn" and inputs.model.device.type == "cuda" else None
        model = pack(copy.deepcopy(inputs.model)) if packed else inputs.model
        server = Engine(model, num_blocks=tokens // 16, max_num_batched_tokens=tokens, twin=twin, runner=graphs)

        def call() -> Timed:
            server.scheduler.pool = BlockPool(tokens // 16, server.block_size)  # it knows no prompt any more
            requests = [server.add(prompt, sampling) for prompt in inputs.prompts]
            stamps = [_now(inputs)]
            while server.running or server.waiting:
                server.step()
                stamps.append(_now(inputs))
            check_answered(requests)
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


def continuous_batching() -> Contender:
    """The continuous batching of transformers, with its own times of the tokens."""

    def prepare(inputs: Prompts) -> Call:
        from transformers import GenerationConfig

        # No token ends an answer.
        config = GenerationConfig(max_new_tokens=inputs.work.max_tokens, do_sample=False, eos_token_id=-1)

        def call() -> Timed:
            inputs.model.set_attn_implementation("sdpa")
            results = inputs.model.generate_batch(
                [list(prompt) for prompt in inputs.prompts], generation_config=config, record_timestamps=True
            )
            by_prompt = {tuple(result.prompt_ids): result for result in results.values()}
            ordered = [by_prompt[tuple(prompt)] for prompt in inputs.prompts]
            bounds = [result.timestamps for result in ordered]
            stamps = [min(result.created_time for result in ordered), *(max(b[i] for b in bounds) for i in (0, -1))]
            return _timed(inputs, [result.generated_tokens for result in ordered], stamps)

        return call

    return Contender("transformers continuous batching", prepare)


def _timed(inputs: Prompts, answers: list[list[int]], stamps: list[float]) -> Timed:
    """Part the time at the first tokens, which come with the prefill."""
    start, first, *_, last = (*stamps, stamps[-1])
    begin, end = {"prefill": (start, first), "decode": (first, last), "both": (start, last)}[inputs.work.phase]
    return Timed(answers, end - begin)


def _now(inputs: Prompts) -> float:
    if inputs.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def _load(device: torch.device, dtype: torch.dtype) -> tuple[Any, list[list[int]]]:
    work = prepare(Console(quiet=True), None, 1, str(device))
    return work.model.to(dtype), work.prompts
