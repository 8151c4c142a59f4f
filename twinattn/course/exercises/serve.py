"""Answer with a real model and a learner's own functions, in the server of `nanoserve`, beside transformers' answers.

It serves two questions four times, so that each of the 26 functions computes something:

    every layer another way    attention is the same whatever computes it, so the answers have to be
    with guesses               so they have to be here
    other models' layers       windows, chunks and sinks change the answers; transformers gets the same masks and sinks
    eight bits                 keys and values are rounded, so a token may change; nothing is required
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from refattn import masks
from twinattn.course.exercises.exercise import Function
from twinattn.course.exercises.functions import EXERCISES
from twinattn.course.exercises.nanoserve import CHUNK, EXACT, OTHERS, WINDOW, Server
from twinattn.engine.demo_model import MODEL, load, model_file

SYSTEM = """\
You are the guide of a small science museum. Your visitors are children and their parents, so you answer in one or two \
short and friendly sentences, with plain words. When you are not sure, you say so."""
QUESTIONS = ("Why is the sky blue?", "Why do cats purr?")
MAX_TOKENS = 8
MIXED = ("paged", *OTHERS)  # layers of other models between those of its own
ELSEWHERE = (
    "span_mask",
    "select_keys",
    "fold",
    "rollback",
    "backward",
    "replay",
    "own_block",
    "entries",
    "triton_reduce",
    "triton_group",
    "triton_causal",
    "triton_fold",
    "go_on",
    "int4_decode",
    "gluon_pipeline",
)  # for images, an indexer, a state, training, several answers, compressed keys, ladders, hybrids, four bits, barriers
SERVED = tuple(exercise for exercise in EXERCISES if exercise.name not in ELSEWHERE)


def serve(console: Console, functions: Mapping[str, Function], numbers: Mapping[str, str]) -> bool:
    """Answer two questions with a learner's functions, and show transformers' answers beside them.

    Args:
        console: where to print.
        functions: the learner's, by the names of the exercises; the reference's take the place of the others.
        numbers: the number of each exercise.

    Returns:
        Whether all answers that have to be are transformers' own, token by token.

    Raises:
        ImportError: if transformers is not installed.
        twinattn.engine.demo_model.MissingModelError: if the model is not.
    """
    file = model_file()
    with console.status(f"Loading {MODEL}"):
        model, tokenizer = load(file)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]
    calls, counted = count_calls(functions)
    with console.status("transformers answers"):
        own = [by_transformers(model, prompt) for prompt in prompts]
        mixed = [by_transformers(model, prompt, ways=MIXED) for prompt in prompts]
    served = {}
    for says, ways, guesses, expected in (
        ("every layer another way", EXACT, False, own),
        ("with guesses", ("heads",), True, own),
        ("other models' layers", MIXED, False, mixed),
        ("eight bits", ("int8",), False, None),
    ):
        with console.status(f"The server answers: {says}"):
            served[says] = Server(model, counted, ways=ways, guesses=guesses).serve(prompts, MAX_TOKENS), expected
    yours = sum(exercise.name in functions for exercise in SERVED)
    others = len(SERVED) - yours
    console.print(f"{MODEL}, served by {yours} of your functions and {others} of the reference's\n")
    console.print(_whose(functions, numbers, calls))
    is_right = True
    for says, (answers, expected) in served.items():
        same = expected is None or answers == expected
        is_right &= same
        mark = "·" if expected is None else "✓" if same else "✗"
        console.print(Text.assemble(("\n" + mark, "green" if same else "red"), (f" {says}", "bold")))
        for question, answer, theirs in zip(QUESTIONS, answers, expected or own, strict=True):
            console.print(f"  {question}")
            shown = [tokenizer.decode(tokens, skip_special_tokens=True).split() for tokens in (answer, theirs)]
            console.print(Text.assemble(("    this server   ", "green" if same else "red"), " ".join(shown[0])))
            console.print(Text.assemble(("    transformers  ", "dim"), " ".join(shown[1])))
    if is_right:
        console.print("\n[green]✓ The same tokens as transformers', but for eight bits, which may differ.[/green]")
    else:
        console.print("\n[red]✗ Other tokens than transformers'.[/red]")
    return is_right


def count_calls(functions: Mapping[str, Function]) -> tuple[Counter[str], dict[str, Function]]:
    """Return all functions of the exercises, the learner's or else the reference's, and a counter of their calls."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Function) -> Function:
        def call(*arguments: Any, **sizes: int) -> Any:
            calls[name] += 1
            return function(*arguments, **sizes)

        return call

    names = {exercise.name: functions.get(exercise.name, exercise.reference) for exercise in SERVED}
    return calls, {name: counted(name, function) for name, function in names.items()}


@torch.no_grad()
def by_transformers(model: Any, prompt: list[int], *, ways: Sequence[str] = ("paged",)) -> list[int]:
    """Return transformers' own answer; with `ways`, that of its attention under the masks and sinks of such layers.

    Those are not cached: the model runs over all tokens for each new one.
    """
    from transformers import AttentionInterface

    if set(ways) <= {"paged"}:
        model.set_attn_implementation("eager")
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
        answer: list[int] = found[0, len(prompt) :].tolist()
        return answer
    AttentionInterface.register("masked", _masked(ways))
    model.set_attn_implementation("masked")
    tokens, end = list(prompt), model.generation_config.eos_token_id
    for _ in range(MAX_TOKENS):
        if len(tokens) > len(prompt) and tokens[-1] == end:
            break
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _masked(ways: Sequence[str]) -> Callable[..., Any]:
    """Return the eager attention of transformers' gpt-oss, which has sinks, under the mask of a layer's way."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **rest: Any
    ) -> Any:
        way, t, heads = ways[module.layer_idx % len(ways)], query.shape[2], query.shape[1]
        rules = {"window": masks.window(t, t, (WINDOW - 1, 0)), "chunk": masks.chunk(t, t, CHUNK)}
        hidden = ~rules.get(way, masks.causal(t, t))
        scores = torch.zeros(1, 1, t, t).masked_fill(hidden, -torch.inf)
        sinks = torch.linspace(-2.0, 2.0, heads) if way == "sinks" else torch.full((heads,), -torch.inf)
        layer = SimpleNamespace(sinks=sinks, num_key_value_groups=module.num_key_value_groups, training=False)
        return eager_attention_forward(layer, query, key, value, scores, scaling=scaling)

    return attend


def _whose(functions: Mapping[str, Function], numbers: Mapping[str, str], calls: Mapping[str, int]) -> Table:
    """List who computed what, and how often."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    for _ in range(3):
        table.add_column()
    table.add_column(justify="right")
    for exercise in SERVED:
        is_yours = exercise.name in functions
        whose = Text("yours", style="green") if is_yours else Text("the reference's", style="dim")
        name = Text(exercise.name, style="bold")
        table.add_row(numbers[exercise.name], name, whose, f"{calls.get(exercise.name, 0):,} calls")
    return table
