"""Rows for tables of bad input: requests of a scheduler, prefixes that they share, and tensors with their options."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Prefix

MOST = 2**31 - 1

REQUESTS_BAD = [  # the argument, what is wrong with it, the bad value, the error
    ("query_lens", "None", None, "query_lens: expected a list of lengths, got None"),
    ("query_lens", "a tensor", torch.tensor([2, 1]).int(), "query_lens: expected a list of lengths, got int32 [2]"),
    ("query_lens", "fractions", [2, 1.0], "query_lens: expected Python ints, got 1.0"),
    ("query_lens", "a bool", [2, True], "query_lens: expected Python ints, got True"),
    ("query_lens", "too few", [2], "query_lens: expected 2 lengths, one per sequence, got 1"),
    ("query_lens", "a negative one", [2, -1], "query_lens: expected lengths of at least 0, got [2, -1]"),
    ("query_lens", "no int32", [2, 2**31], f"query_lens: expected lengths of at most {MOST}, got {2**31}"),
    ("seq_lens", "None", None, "seq_lens: expected a list of lengths, got None"),
    ("seq_lens", "a string", "ab", "seq_lens: expected a list of lengths, got 'ab'"),
    ("seq_lens", "a fraction", [5, 20.5], "seq_lens: expected Python ints, got 20.5"),
    ("seq_lens", "a negative one", [-5, 20], "seq_lens: expected lengths of at least 0, got [-5, 20]"),
    ("seq_lens", "no int32", [5, 2**31], f"seq_lens: expected lengths of at most {MOST}, got {2**31}"),
    (
        "query_lens",
        "too many together",
        [MOST, 1],
        f"query_lens: expected at most {MOST} tokens together, got {2**31}",
    ),
]
PREFIXES = [
    ("prefixes", "None", None, "prefixes: expected a list of prefixes, got None"),
    ("prefixes", "tuples", [(0, 2, 4)], "prefixes[0]: expected a Prefix of Python ints, got tuple"),
    (
        "prefixes",
        "a fraction",
        [Prefix(0, 2, 4.0)],
        "prefixes[0]: expected a Prefix of Python ints, got Prefix(first=0, last=2, end=4.0)",
    ),
]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in some arguments, in batches and lists too, but for those without strides."""
    if isinstance(value, Tensor):
        has_strides = value.layout is torch.strided and not value.is_nested
        return [value] if value.device.type == "cpu" and has_strides else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    return [tensor for one in value for tensor in tensors_in(one)] if isinstance(value, (list, tuple)) else []


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) for tensor in tensors]
