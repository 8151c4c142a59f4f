"""Let a real model answer with a learner's own functions, and compare its words with transformers' own.

The engine of `refattn.serving` takes anything with modules of the twins' names. Here they are the reference's, less the
functions that the learner has written:

    kv_cache.write              3  write
    metadata.slot_mapping       2  slot_mapping
    chunked_prefill.attention   8  paged_attention, or what it is made of: 4 gather, 5 causal_mask, 7 attend_heads
    cascade.attention           the last level as above, and 9  merge
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from refattn import cascade, chunked_prefill, kv_cache, metadata
from refattn.attention import attend_sequences
from refattn.exercises.exercise import Function
from refattn.exercises.functions import EXERCISES
from refattn.exercises.functions.attention import compose
from refattn.interface import AttentionOptions, Batch, CascadePlan, Plan
from refattn.serving import CPU, Engine, SamplingParams
from refattn.serving.demo_model import MODEL, load, model_file

SYSTEM = """\
You are the guide of a small science museum. Your visitors are children and their parents, so you answer in one or two \
short and friendly sentences, with plain words. When you are not sure, you say so."""
QUESTIONS = ("Why is the sky blue?", "Why do cats purr?")
MAX_TOKENS = 24
EAGER = replace(CPU, workers=1, launch_seconds=0.0)  # a prefix of a few blocks is worth a cascade
BUDGET = 48  # tokens in a step: the first prompt takes several, so the second finds some of its blocks there
INSIDE = ("gather", "causal_mask", "attend_heads")  # what paged attention is made of where it is not the learner's
USED = ("slot_mapping", "write", "paged_attention", *INSIDE, "merge")


class Instead:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **functions: Function) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        """Return what the module has."""
        return getattr(self._module, name)


@dataclass
class LearnersTwin:
    """A twin whose functions are a learner's, and the reference's where there are none.

    Attributes:
        functions: the learner's, by the names of the exercises.
        calls: how often each function of `USED` was called by the engine.
    """

    functions: Mapping[str, Function]

    def __post_init__(self) -> None:
        """Make the modules that an engine takes."""
        self.calls: Counter[str] = Counter()
        reference = {exercise.name: exercise.reference for exercise in EXERCISES}
        of = {name: self._counted(name, self.functions.get(name, reference[name])) for name in USED}
        if "paged_attention" not in self.functions:
            parts = {name.removeprefix("causal_"): of[name] for name in INSIDE}
            of["paged_attention"] = self._counted("paged_attention", compose(**parts))

        def slot_mapping(batch: Batch, num_tokens: int, *, block_size: int) -> Tensor:
            assert batch.block_table is not None  # an engine's batch has one
            lens = batch.query_lens.tolist(), batch.seq_lens.tolist()
            slots = of["slot_mapping"](*lens, batch.block_table.tolist(), block_size)
            return torch.tensor([*slots, *[-1] * (num_tokens - len(slots))], dtype=torch.int64)

        def attend(query: Tensor, keys: Tensor, values: Tensor, plan: Plan, options: AttentionOptions) -> Any:
            size = query.shape[-1]
            is_plain = not options.softcap and options.alibi_slopes is None and options.sinks is None
            if not is_plain or options.softmax_scale not in (None, size**-0.5):
                raise NotImplementedError(f"paged_attention of exercise 8: expected no options, got {options}")
            batch = plan.batch
            return of["paged_attention"](query, keys, values, batch.cu_seqlens_q, batch.seq_lens, batch.block_table)

        def attention(
            query: Tensor, keys: Tensor, values: Tensor, plan: Plan, options: AttentionOptions = AttentionOptions()
        ) -> Tensor:
            out: Tensor = attend(query, keys, values, plan, options)[0]
            return out

        def attend_levels(
            query: Tensor,
            keys: Tensor,
            values: Tensor,
            plan: CascadePlan,
            options: AttentionOptions = AttentionOptions(),
        ) -> Tensor:
            answers = []
            for level in plan.levels[:-1]:
                assert level.batch.block_table is not None  # a level is a plan over pages
                tables = zip(level.batch.block_table, level.batch.seq_lens.tolist(), strict=True)
                sequences = (
                    (of["gather"](keys, blocks, seq_len), of["gather"](values, blocks, seq_len))
                    for blocks, seq_len in tables
                )
                answers.append(attend_sequences(query, sequences, level, options, value_head_size=values.shape[-1]))
            answers.append(attend(query, keys, values, plan.levels[-1], options))
            out: Tensor = of["merge"](*map(list, zip(*answers, strict=True)))[0]
            return out

        self.kv_cache = Instead(kv_cache, write=of["write"])
        self.metadata = Instead(metadata, slot_mapping=slot_mapping)
        self.chunked_prefill = Instead(chunked_prefill, attention=attention)
        self.cascade = Instead(cascade, attention=attend_levels)

    def _counted(self, name: str, function: Function) -> Function:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call


def serve(console: Console, functions: Mapping[str, Function], numbers: Mapping[str, str]) -> bool:
    """Answer two questions with a learner's functions in the engine, and show transformers' answers beside them.

    Args:
        console: where to print.
        functions: the learner's, by the names of the exercises.
        numbers: the number of each exercise.

    Returns:
        Whether both answers are transformers' own, token by token.

    Raises:
        ImportError: if transformers is not installed.
        refattn.serving.demo_model.MissingModelError: if the model is not.
    """
    file = model_file()
    with console.status(f"Loading {MODEL}"), redirect_stderr(StringIO()):  # transformers draws bars of its own
        model, tokenizer = load(file)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]
    with console.status("transformers answers"):
        expected = [_generate(model, prompt) for prompt in prompts]
    twin = LearnersTwin(functions)
    with console.status("Your functions answer"):
        engine = Engine(
            model, num_blocks=64, max_num_batched_tokens=BUDGET, tokenizer=tokenizer, twin=twin, machine=EAGER
        )
        warm = twin.calls.copy()  # the engine tries the model when it is made
        requests = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    console.print(_used_table(twin, functions, numbers, twin.calls - warm))
    for question, request, tokens in zip(QUESTIONS, requests, expected, strict=True):
        console.print(Text.assemble("\n", (question, "bold")))
        answer = request.text if request.error is None else f"failed: {request.error}"
        same = request.output_ids == tokens
        console.print(Text.assemble(("  yours         ", "green" if same else "red"), " ".join(answer.split())))
        console.print(Text.assemble(("  transformers  ", "dim"), " ".join(tokenizer.decode(tokens).split())))
    right = [request.output_ids for request in requests] == expected
    console.print("\n[green]✓ The same tokens.[/green]" if right else "\n[red]✗ Other tokens than transformers'.[/red]")
    return right


def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    generated: list[int] = tokens[0, len(prompt) :].tolist()
    return generated


def _used_table(
    twin: LearnersTwin, functions: Mapping[str, Function], numbers: Mapping[str, str], calls: Mapping[str, int]
) -> Table:
    """List who computed what."""
    table = Table(box=None, padding=(0, 1), title=f"{MODEL}, its attention by", title_justify="left")
    for name, justify in (("", "left"), ("", "left"), ("calls", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in USED:
        if not calls.get(name) and name in INSIDE:  # its work is done inside of the learner's paged attention
            continue
        if name in functions:
            whose = Text("your function", style="green")
        else:
            maker = "the next three" if name == "paged_attention" else "the reference"
            whose = Text(f"by {maker}: exercise {numbers[name]} is not done", style="dim")
        table.add_row(Text(name, style="bold"), whose, f"{calls.get(name, 0):,}")
    return table
