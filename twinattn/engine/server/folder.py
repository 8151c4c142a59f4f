"""A model and its tokenizer, from a folder of transformers: whole, or refused in a sentence that says what is wrong.

Transformers fills weights that a checkpoint lacks with random numbers, and goes on.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twinattn.engine.demo_model import without_bars

logger = logging.getLogger(__name__)

POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that git-lfs has not fetched
MOST_NAMED = 5  # weights in a sentence


def load_folder(folder: Path) -> tuple[Any, Any]:
    """Load a model, in its own type, and its tokenizer, from a folder of transformers.

    Raises:
        ValueError: if there is none, a file cannot be read, or weights are missing or have another shape than the
            configuration says. Weights that the model does not have are logged.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = f"model: expected a folder with a model of transformers, got {str(folder)!r}"
    if not folder.is_dir():
        raise ValueError(f"{start}: there is no such folder")
    pointers = [file.name for file in sorted(folder.iterdir()) if file.is_file() and _begins_with_pointer(file)]
    if pointers:
        raise ValueError(f"{start}: git-lfs has not fetched {_listed(pointers)}; `git lfs pull` brings what is missing")
    try:
        with without_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            options = dict(dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True)  # both refused below
            model, found = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # tokenizers raises no other type, and each kind of file has its own
        raise ValueError(f"{start}: {type(error).__name__}: {error}") from error
    if found["missing_keys"]:
        raise ValueError(f"{start}, which lacks the weights {_listed(found['missing_keys'])}")
    if found["mismatched_keys"]:
        shapes = [f"{name} {[*there]}, not {[*wanted]}" for name, there, wanted in found["mismatched_keys"]]
        raise ValueError(f"{start}, whose weights have other shapes than its config says: {_listed(shapes)}")
    if found["unexpected_keys"]:
        logger.warning("%s has weights that the model does not use: %s", folder, _listed(found["unexpected_keys"]))
    return model, tokenizer


def _begins_with_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER


def _listed(names: Iterable[str]) -> str:
    """Return some names, in order, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
