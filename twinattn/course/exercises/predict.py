r"""Predictions: type what you expect before you run a cell of a notebook, and have it compared with what is stored.

    predict("1.3", [0, 2, 3, 6])

A cell with `predict(...)` has in its metadata what kind of answer its question has. What is right is taken from the
answer that is stored in the notebook, so that it is never written twice:

    {"find": "to compute: (\d+)"}             numbers: those in the groups, in the outputs and texts of the answer
    {"find": "...", "within": 0.2}              about right is right, here to a fifth
    {"expect": [2], "find": "step 1 .*$"}       numbers that follow from what must stand in the answer
    {"choose": ["yes", "no"], "find": "True"}   the first is right; they are shown in the order of the alphabet
    {"mask": {"rows": [...], "columns": [...]}}   a mask: the ones and zeros, or points, of the answer
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDERS = (Path(), Path("notebooks"), Path(__file__).parents[3] / "notebooks")
LETTERS = "ABCDEFGH"
CELLS = re.compile(r"(?<![\w.-])([01.#])(?![\w.-])")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?")


def predict(number: str, guess: Any = ...) -> None:
    """Compare a guess with the stored answer of a question, and print whether it is right, but not what is.

    Args:
        number: of the question, as "1.3": the third of notebook 1.
        guess: a number, a list of numbers, a letter, or a mask as rows of ones and zeros; with `...` in its place, it
            is printed how to answer.

    Raises:
        ValueError: if there is no such question, or the guess is no answer to it.
    """
    question = find(number)
    sys.stdout.write((ask(question) if guess is ... else tell(judge(question, guess))) + "\n")


def find(number: str) -> dict[str, Any]:
    """Return a question of the notebooks: what its cell says of it, and what is `right`.

    Raises:
        ValueError: if there is none of that number.
    """
    chapter = number.partition(".")[0]
    for folder in FOLDERS:
        for path in sorted(folder.glob(f"{chapter:0>2}_*.ipynb")):
            found = questions(json.loads(path.read_text())["cells"])
            if number in found:
                return found[number]
    raise ValueError(f"number: expected that of a question, as 1.3, got {number!r}")


def questions(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the questions of a notebook that take a prediction, by number.

    Raises:
        ValueError: if an answer does not hold what its question says.
    """
    found: dict[str, dict[str, Any]] = {}
    for place, cell in enumerate(cells):
        question = cell["metadata"].get("predict")
        if question:
            number = re.findall(r'predict\("([\d.]+)"', "".join(cell["source"]))[0]
            found[number] = {**question, "number": number, "right": right(question, answer_of(cells[place + 1 :]))}
    return found


def answer_of(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return what an answer stores: the outputs of its cells, and their texts where they are no code."""
    texts: list[str] = []
    for cell in cells:
        if "answer" not in cell["metadata"].get("tags", ()):
            break
        if cell["cell_type"] == "markdown":
            texts.append("".join(cell["source"]))
        for output in cell.get("outputs", ()):
            texts.append("".join(output.get("text") or output.get("data", {}).get("text/plain", "")))
    return "\n".join(texts)


def right(question: Mapping[str, Any], stored: str) -> Any:
    """Return the right answer: numbers, the text of a choice, or a mask as rows of "1" and "0".

    Raises:
        ValueError: if it is not in what is stored.
    """
    match = re.search(question.get("find", ""), stored, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError(f"find: expected {question['find']!r} in the stored answer, got {stored!r}")
    if "choose" in question:
        return question["choose"][0]
    if "expect" in question:
        return question["expect"]
    if "mask" in question:
        rows = ["".join("0" if cell in ".0" else "1" for cell in CELLS.findall(line)) for line in stored.splitlines()]
        height, width = (len(question["mask"][side]) for side in ("rows", "columns"))
        mask = [row[-width:] for row in rows if len(row) >= width][:height]  # a number before it may be its name
        if len(mask) != height:
            raise ValueError(f"mask: expected {height} rows of {width} in the stored answer, got {rows}")
        return mask
    return [float(x.replace(",", "")) for group in match.groups() for x in NUMBER.findall(group)]


def ask(question: Mapping[str, Any]) -> str:
    """Return how to answer a question."""
    head = f"Your prediction for {question['number']}, in the place of the dots: "
    if "choose" in question:
        choices = [f"  {LETTERS[i]}  {text}" for i, text in enumerate(sorted(question["choose"]))]
        return "\n".join([head + "a letter, in quotes", *choices])
    if "mask" in question:
        height, width = (len(question["mask"][side]) for side in ("rows", "columns"))
        return head + f"a mask, {height} strings of {width} ones and zeros in a list"
    says = question.get("says", "")
    count = len(question["right"])
    return head + (says or ("a number" if count == 1 else f"{count} numbers in a list"))


def judge(question: Mapping[str, Any], guess: Any) -> tuple[int, int]:
    """Return how many parts of a guess are right, and how many there are.

    Raises:
        ValueError: if it is no answer to the question.
    """
    expected = question["right"]
    if "choose" in question:
        texts = sorted(question["choose"])
        place = LETTERS.find(str(guess).strip().upper() or "-")
        if guess not in texts and not 0 <= place < len(texts):
            raise ValueError(f"guess: expected a letter from A to {LETTERS[len(texts) - 1]}, got {guess!r}")
        return int((guess if guess in texts else texts[place]) == expected), 1
    if "mask" in question:
        rows = ["".join(str(int(cell)) for cell in row) for row in guess]
        if [*map(len, rows)] != [*map(len, expected)]:
            raise ValueError(f"guess: expected {len(expected)} rows of {len(expected[0])}, got {guess!r}")
        same = sum(a == b for row, other in zip(rows, expected, strict=True) for a, b in zip(row, other, strict=True))
        return same, sum(map(len, expected))
    numbers = [float(x) for x in (guess if isinstance(guess, list | tuple) else [guess])]
    if len(numbers) != len(expected):
        raise ValueError(f"guess: expected {len(expected)} numbers, got {len(numbers)}")
    within = question.get("within", 0)
    return sum(abs(a - b) <= within * abs(b) + 1e-9 for a, b in zip(numbers, expected, strict=True)), len(expected)


def tell(score: tuple[int, int]) -> str:
    """Return a score in words."""
    same, count = score
    if same == count:
        return "✓ Right. The cell below shows it."
    return f"✗ Not quite{f': {same} of {count} are right' * (count > 1)}. Try again, or run the cell below."
