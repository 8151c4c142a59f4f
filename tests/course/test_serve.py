"""A learner's functions serve a model, all of them compute something, and whose they are is said truly."""

from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.tiny_models import byte_tokenizer, make_llama
from twinattn.course.exercises import __main__ as command
from twinattn.course.exercises import serve
from twinattn.course.exercises.nanoserve import EXACT, Server

FOLDER = Path(__file__).parent / "solutions"
PREFIX = list(range(40))
PROMPTS = [[*PREFIX, 1, 2], [*PREFIX, 3], [5, 6, 5, 6, 5]]
SIZES = dict(block_size=4, budget=24)
NAMES = [exercise.name for exercise in serve.SERVED]


def tiny():
    return make_llama(num_hidden_layers=len(serve.MIXED))


@cache
def solutions():
    tasks = {task.name: task for task in command.all_tasks(FOLDER)}
    pytest.importorskip("triton", reason="Triton comes for Linux only, and the last exercise is written in it")
    return {name: tasks[name].function() for name in NAMES}


@cache
def by_transformers(ways=("paged",)):
    return [serve.by_transformers(tiny(), prompt, ways=ways) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def as_a_learner_runs_them(shapes_unchecked, monkeypatch):
    monkeypatch.setattr(serve, "MAX_TOKENS", 4)


def answers(functions, **options):
    return Server(tiny(), functions, **SIZES, **options).serve(PROMPTS, 4)


@pytest.mark.parametrize("way", EXACT)
def test_each_way_gives_the_answers_of_transformers(way):
    assert answers(solutions(), ways=[way]) == by_transformers()


def test_guesses_change_nothing():
    assert answers(solutions(), ways=["heads"], guesses=True) == by_transformers()


def test_other_layers_give_the_answers_of_transformers_with_their_masks():
    mixed = by_transformers(serve.MIXED)
    assert answers(solutions(), ways=serve.MIXED) == mixed != by_transformers()


@pytest.mark.parametrize("way", ["window", "chunk", "sinks"])
def test_each_other_layer_does(way):
    assert answers(solutions(), ways=[way]) == by_transformers((way,)) != by_transformers()


def test_every_function_computes_something():
    calls, counted = serve.count_calls({})
    answers(counted, ways=EXACT[:4])
    answers(counted, ways=EXACT[4:8])
    answers(counted, ways=EXACT[8:])
    answers(counted, ways=serve.MIXED)
    answers(counted, ways=["int8"], guesses=True)
    assert [name for name in NAMES if not calls[name]] == []


@pytest.mark.parametrize("name", ["slot_mapping", "causal_mask", "shared_prefix"])
def test_a_wrong_function_gives_other_tokens(name):
    right = solutions()[name]
    wrong = {
        "slot_mapping": lambda *arguments: [slot ^ 1 for slot in right(*arguments)],
        "causal_mask": lambda query_len, seq_len: right(query_len, seq_len).roll(1, 1),
        "shared_prefix": lambda *arguments: max(0, right(*arguments) - 4),
    }[name]
    got = answers(solutions() | {name: wrong}, ways=["heads", "cascade"])
    assert (got == by_transformers()) == (name == "shared_prefix"), "a shorter prefix is right, too"


def test_prompts_share_their_blocks():
    server = Server(tiny(), solutions(), ways=["cascade"], **SIZES)
    server.serve(PROMPTS[:1], 1)
    before = len(server.free)
    server.serve(PROMPTS[1:2], 1)
    assert before - len(server.free) == 1, "ten blocks are those of the first prompt"


def test_the_command_shows_both_answers(monkeypatch, tmp_path):
    """With a tiny model in the place of SmolLM2: whose functions, both answers, and whether they are the same."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(serve, "model_file", lambda: tmp_path)
    monkeypatch.setattr(serve, "load", lambda file: (make_llama(vocab_size=257, eos_token_id=256), tokenizer))
    monkeypatch.setattr(serve, "SYSTEM", "Guide children, kindly.")
    monkeypatch.setattr(serve, "MAX_TOKENS", 3)
    console = Console(file=StringIO(), width=120)
    numbers = {name: str(i) for i, name in enumerate(NAMES, 1)}
    assert serve.serve(console, {"write": solutions()["write"]}, numbers)
    text = console.file.getvalue()
    assert "served by 1 of your functions and 25 of the reference's" in text
    assert [line.split()[2] for line in text.splitlines()[2:28]].count("yours") == 1
    assert text.count("this server") == text.count("transformers  ") == 8 and "✓ The same tokens" in text


def test_a_missing_model_is_said(monkeypatch, capsys):
    def missing():
        raise FileNotFoundError("it is not here")

    monkeypatch.setattr(serve, "model_file", missing)
    monkeypatch.setattr(command.Task, "check", lambda task: command.Outcome("to do"))
    assert command.main(["--serve", "--folder", str(FOLDER)]) == 2
    assert "`make demo` brings both" in " ".join(capsys.readouterr().out.split())
