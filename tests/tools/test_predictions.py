"""Predictions: what is right stands in the stored answer, and the site and Jupyter judge alike."""

import json
import random
from pathlib import Path

import pytest
from py_mini_racer import MiniRacer

from twinattn.course.exercises import predict

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELLS = {path.stem: json.loads(path.read_text())["cells"] for path in NOTEBOOKS}
QUESTIONS = {number: each for cells in CELLS.values() for number, each in predict.questions(cells).items()}


@pytest.fixture(scope="module")
def judge():
    with MiniRacer() as racer:
        racer.eval((ROOT / "docs/assets/predict.js").read_text())
        yield lambda function, *given: json.loads(
            racer.eval(f"JSON.stringify(predictions.{function}(...{json.dumps(given)}))")
        )


def guesses(question: dict, rng: random.Random) -> list:
    """Return the right answer, and wrong ones of its kind."""
    right = question["right"]
    if "choose" in question:
        return question["choose"]
    if "mask" in question:
        flipped = ["".join(rng.choice([cell, cell, "1" if cell == "0" else "0"]) for cell in row) for row in right]
        return [right, ["1" * len(row) for row in right], flipped]
    return [right, [x + 1 for x in right], [x * 1.15 for x in right], [rng.choice([x, x / 3]) for x in right]]


def test_most_questions_take_a_prediction():
    assert len(QUESTIONS) > 80
    for path, cells in CELLS.items():
        numbers = list(predict.questions(cells))
        assert numbers == [f"{int(path[:2])}.{i}" for i in range(1, len(numbers) + 1)] != []


def test_the_site_judges_as_jupyter_does(judge):
    rng = random.Random(0)
    for question in QUESTIONS.values():
        for i, guess in enumerate(guesses(question, rng)):
            same, count = predict.judge(question, guess)
            assert judge("judge", question, guess) == [same, count], question["number"]
            assert (same == count) == (i == 0) or "within" in question or guess == question["right"], question["number"]


@pytest.mark.parametrize(
    ("typed", "numbers"),
    [
        ("0, 2, 3, 6", [0, 2, 3, 6]),
        ("[0 2 3 6]", [0, 2, 3, 6]),
        ("1 073 741 824", [1073741824]),
        ("1,073,741,824", [1073741824]),
        ("8256, 1,073,741,824", [8256, 1073741824]),
        ("about 90.1 %, 5.2%, .1", [90.1, 5.2, 0.1]),
        ("-2", [-2]),
        ("none", []),
    ],
)
def test_numbers_are_read_as_typed(judge, typed, numbers):
    assert judge("numbers", typed) == numbers


def test_how_to_answer_is_said_and_the_answer_is_not(monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "notebooks")
    predict.predict("1.2", ...)
    predict.predict("1.2", 7)
    printed = capsys.readouterr().out
    assert "how many of the 21 places" in printed and "✗ Not quite" in printed and "6" not in printed
    predict.predict("1.2", 6)
    assert "✓ Right" in capsys.readouterr().out
    predict.predict("1.5", [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert "9 of 10 are right" in capsys.readouterr().out
    predict.predict("1.7", ...)
    letter = next(line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" no"))
    predict.predict("1.7", letter.lower())
    assert "✓ Right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "guess", "says"),
    [
        ("1.99", 1, "number: expected that of a question"),
        ("1.3", [0, 2], "guess: expected 4 numbers, got 2"),
        ("1.5", ["111"], "guess: expected 2 rows of 5"),
        ("1.7", "Z", "guess: expected a letter from A to B"),
    ],
)
def test_what_is_no_answer_is_refused(number, guess, says):
    with pytest.raises(ValueError, match=says):
        predict.predict(number, guess)


def test_a_question_whose_answer_changed_is_found():
    cells = json.loads(json.dumps(CELLS["01_ragged_batch"]))
    for cell in cells:
        for output in cell.get("outputs", ()):
            output["text"] = [line.replace("to compute: 6", "all of them") for line in output.get("text", ())]
    with pytest.raises(ValueError, match="in the stored answer"):
        predict.questions(cells)


def test_nothing_is_given_away_in_jupyter():
    """Its outputs are collapsed, and so is code that gives the answer away."""
    for cells in CELLS.values():
        for cell in cells:
            tags, hidden = cell["metadata"].get("tags", ()), cell["metadata"].get("jupyter", {})
            if "answer" in tags and cell["cell_type"] == "code":
                assert hidden.get("outputs_hidden") and cell["metadata"]["collapsed"]
            if "answer-code" in tags or ("answer" in tags and cell["cell_type"] == "markdown"):
                assert hidden.get("source_hidden"), cell["source"]
