"""How the packages speak: a comment names its subject, and who does something is said by name."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("refattn", "fastattn", "twinattn")
WITHOUT_A_NOUN = re.compile(r"#\s+(?:of|whose|which)\b", re.IGNORECASE)
WITHOUT_A_NAME = re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", re.IGNORECASE)
A_STORY = "nobody here dares|Nobody minds"  # texts of the demo


def without_a_noun(source: str) -> list[str]:
    """List the lines whose comment begins so; a comment may go on so in its next line."""
    lines = source.splitlines()
    goes_on = [False, *(line.lstrip().startswith("#") for line in lines)]
    return [
        line
        for line, before in zip(lines, goes_on, strict=False)
        if WITHOUT_A_NOUN.search(line) and not (before and line.lstrip().startswith("#"))
    ]


def test_no_comment_begins_without_its_noun():
    for package in (*PACKAGES, "notebooks", "docs"):
        for file in sorted((ROOT / package).rglob("*.py")):
            found = without_a_noun(file.read_text())
            assert not found, f"{file.relative_to(ROOT)}: name the subject in {found}"


def test_who_does_something_has_a_name():
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            found = [line for line in file.read_text().splitlines() if WITHOUT_A_NAME.search(line)]
            found = [line for line in found if not re.search(A_STORY, line)]
            assert not found, f"{file.relative_to(ROOT)}: name who it is, or leave it out, in {found}"


PRIVATE = {  # what the field calls by another name
    r"partial answers?": "partial output",
    r"\bcodes\b": "quantized values",
    r"(?<!query and )\bkey heads?\b": "KV head",
    r"\bis (?:told|handed)\b": "takes, receives",
    r"\basks? the device\b": "synchronizes with the device",
    r"\blimited by memory\b": "memory-bound",
    r"\bmade keys\b": "materialised keys",
    r"\bsilent (?:request|sequence)s?\b": "zero-length query, a sequence with no queries",
    r"\bwith the company\b": "independent of the rest of the batch",
}
A_NAME = "largest codes"  # of a property, in reports that are stored


def private_words(text: str) -> dict[str, str]:
    """Return the private words of a text, each with the words of the field."""
    return {
        found[0]: better for words, better in PRIVATE.items() if (found := re.search(words, text.replace(A_NAME, "")))
    }


def test_the_field_has_other_words_for_it():
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").rglob("*.ipynb"), ROOT / "README.md"]
    assert len(files) > 400
    found = {str(file.relative_to(ROOT)): private_words(file.read_text()) for file in sorted(files)}
    assert not {file: words for file, words in found.items() if words}


def test_a_private_word_is_found():
    assert private_words("each key head has codes, and\nis told") == {
        "codes": "quantized values",
        "key head": "KV head",
        "is told": "takes, receives",
    }
    assert not private_words("the query and key head of a value head; status code 404; largest codes")


def test_such_a_comment_is_found():
    for line in ("f(x)  # of a tree", "    # Which of them it is", "f(x)  # whose nodes they are"):
        assert without_a_noun(f"# A sentence.\n\n{line}\n") == [line]
    assert not without_a_noun("f(x)  # nodes of a tree, which is cut")
    assert not without_a_noun("# A sentence about the nodes\n# of a tree.")
    assert not without_a_noun('name = "#of"')
