"""A learner's functions serve a model in the engine, and whose function computed is said truly."""

from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import refattn
from refattn.exercises import __main__ as command
from refattn.exercises import serve
from refattn.serving import Engine, SamplingParams
from tests.helpers.tiny_models import byte_tokenizer, make_llama

FOLDER = Path(__file__).parent / "solutions"
PROMPT = list(range(40))


def functions(*names):
    tasks = {task.name: task for task in command.all_tasks(FOLDER)}
    return {name: tasks[name].function() for name in names}


def outputs(twin):
    machine = replace(serve.EAGER, tile_keys=4)
    engine = Engine(make_llama(), num_blocks=32, block_size=4, max_num_batched_tokens=24, twin=twin, machine=machine)
    prompts = [[*PROMPT, 1, 2], [*PROMPT, 3]]
    requests = engine.generate(prompts, SamplingParams(max_tokens=4))
    return [request.output_ids for request in requests], engine.counters


@cache
def by_reference():
    return outputs(refattn)


@pytest.mark.parametrize(
    "names", [serve.USED, ("write", "gather"), ("causal_mask", "attend_heads", "merge"), ()], ids=len
)
def test_the_answers_are_those_of_the_reference(names, shapes_unchecked):
    twin = serve.LearnersTwin(functions(*names))
    answers, counters = outputs(twin)
    assert (answers, counters) == by_reference()
    assert counters.saved_key_reads > 0, "no cascade, so no merge was tried"
    unused = {"causal_mask", "attend_heads"} if "paged_attention" in names else set()
    assert {name for name in serve.USED if not twin.calls[name]} == unused


def test_a_wrong_function_gives_other_words(shapes_unchecked):
    right = functions("slot_mapping")["slot_mapping"]
    twin = serve.LearnersTwin({"slot_mapping": lambda *arguments: [slot ^ 1 for slot in right(*arguments)]})
    assert outputs(twin)[0] != by_reference()[0]


def test_the_command_shows_both_answers(monkeypatch, tmp_path, shapes_unchecked):
    """With a tiny model in the place of SmolLM2: whose functions, both answers, and whether they are the same."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(serve, "model_file", lambda: tmp_path)
    monkeypatch.setattr(serve, "load", lambda file: (make_llama(vocab_size=257, eos_token_id=256), tokenizer))
    monkeypatch.setattr(serve, "SYSTEM", "Guide children.")
    monkeypatch.setattr(serve, "MAX_TOKENS", 3)
    console = Console(file=StringIO(), width=100)
    assert serve.serve(console, functions("write"), dict.fromkeys(serve.USED, "5"))
    text = console.file.getvalue()
    assert "write " in text and "your function" in text and "exercise 5 is not done" in text
    assert text.count("yours") == text.count("transformers  ") == 2 and "The same tokens" in text


def test_a_missing_model_is_said(monkeypatch, capsys):
    def missing():
        raise FileNotFoundError("it is not here")

    monkeypatch.setattr(serve, "model_file", missing)
    assert command.main(["--serve", "--folder", str(FOLDER)]) == 2
    assert "`make demo` brings both" in " ".join(capsys.readouterr().out.split())
