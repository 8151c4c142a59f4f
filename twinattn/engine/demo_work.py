"""What the demo serves, with which engines, and what came of it: the model, the prompts, the sizes, the results."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from twinattn.engine import CPU, CalibrationStats, Counters, CudaGraphs, Engine, NGram, Request, SamplingParams
from twinattn.engine.demo_model import MODEL, load, model_file
from twinattn.engine.demo_prompts import PROMPTS, TO_CALIBRATE
from twinattn.engine.models import max_positions

DRAFTS = ", with drafts"
SPECULATION = {"chain": NGram(max_drafts=5), "tree": NGram(max_drafts=5, max_branches=3)}
BLOCK_SIZE = 16
TOKEN_BUDGET = 96


class RequestError(RuntimeError):
    """An engine could not answer a request; the message is what went wrong, as the request has it."""


def check_answered(requests: Sequence[Request]) -> None:
    """Check that no request failed: a failed one has no answer to be shown or timed.

    Raises:
        RequestError: with the error of the first that failed.
    """
    for request in requests:
        if request.error is not None:
            raise RequestError(f"request of {request.prompt_len} tokens: {request.error}")


@dataclass(frozen=True)
class Work:
    """The prompts to serve, and what to serve them with.

    Attributes:
        model: the model of transformers.
        tokenizer: its tokenizer.
        questions: what was asked, in short.
        prompts: the token ids of each prompt.
        sampling: greedy, up to the most tokens of an answer.
        num_blocks: blocks in the pool.
        to_calibrate: the token ids of texts that are no prompts, for the scales of quantized values.
        speculate: how a run with drafts drafts.
        kv_cache_dtype: what the pool holds.
        calibration: how large keys and values become; None for a plain pool.
    """

    model: Any
    tokenizer: Any
    questions: list[str]
    prompts: list[list[int]]
    sampling: SamplingParams
    num_blocks: int
    to_calibrate: list[list[int]]
    speculate: str | None = None
    kv_cache_dtype: str = "auto"
    calibration: list[CalibrationStats] | None = None

    def engine(self, name: str, twin: Any = None) -> Any:
        """Make the engine of a package for this work, with drafts if its name says so."""
        package = name.removesuffix(DRAFTS)
        on_gpu = self.model.device.type == "cuda"
        return Engine(
            self.model,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=TOKEN_BUDGET,
            kv_cache_dtype=self.kv_cache_dtype,
            calibration=self.calibration,
            tokenizer=self.tokenizer,
            twin=importlib.import_module(package) if twin is None else twin,
            # A prefix as short as the demo's is hardly worth another launch; shown here as if launches were free.
            machine=replace(CPU, launch_seconds=0.0),
            runner=CudaGraphs() if on_gpu and twin is None and package == "fastattn" else None,
            speculation=SPECULATION[self.speculate] if self.speculate and name.endswith(DRAFTS) else None,
        )


def prepare(console: Console, questions: Sequence[str] | None, max_tokens: int, device: str) -> Work:
    """Load the model, tokenize the prompts, and size a pool that is too small for all of them at once.

    Raises:
        ValueError: if the model has not positions for all tokens.
    """
    file = model_file()
    with stages(console) as progress:
        loading = progress.add_task(f"Loading {MODEL}, about 8 seconds", total=None)
        model, tokenizer = load(file)
        model.to(device)
        progress.update(loading, total=1, completed=1)
    pairs = [(None, question.strip()) for question in questions] if questions else PROMPTS

    def tokens_of(system: str | None, question: str) -> list[int]:
        turns = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": question}]
        tokens: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        return tokens

    prompts = [tokens_of(*pair) for pair in pairs]
    room = max_positions(model.config) + 1 - max(map(len, prompts))  # the last token never goes through the model
    if max_tokens > room:
        raise ValueError(f"max_tokens: expected at most {room}, as the model has positions for, got {max_tokens}")
    wanted = [-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt in prompts]
    return Work(
        model,
        tokenizer,
        [question.splitlines()[0] for _, question in pairs],
        prompts,
        SamplingParams(max_tokens=max_tokens),
        num_blocks=max(*wanted, sum(wanted) // 2),
        to_calibrate=[tokens_of(None, text) for text in TO_CALIBRATE],
    )


@dataclass(frozen=True)
class Run:
    """The result of serving all prompts with one twin.

    Attributes:
        name: of the twin.
        outputs: the generated tokens of each prompt.
        seconds: the time of all steps.
        decode_seconds: the time of those steps that only decoded.
        decode_tokens: the tokens that those steps generated.
        counters: of the engine.
        peak_bytes: most memory at a time, above the model's; None where that can't be measured.
        pool_bytes: the pools of all layers.
    """

    name: str
    outputs: list[list[int]]
    seconds: float
    decode_seconds: float
    decode_tokens: int
    counters: Counters
    peak_bytes: int | None
    pool_bytes: int


def stages(console: Console) -> Progress:
    """Make a line that shows what is running, how far it is, and for how long it has run."""
    return Progress(
        SpinnerColumn(finished_text="✓"), *Progress.get_default_columns()[:2], TimeElapsedColumn(), console=console
    )
