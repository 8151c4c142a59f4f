"""Rows without their padding, and back: what `flash_attn.bert_padding` has, in plain indexing.

    mask      1 1 0        unpad_input    a b d e f        pad_input    a b 0
              1 1 1                       indices 0 1 3 4 5             d e f

`twinattn.integrations.flash_attn.install` lets `import flash_attn.bert_padding` find this module. Gradients go through.

Source: the public interface of Dao et al., `flash_attn/bert_padding.py`, version 2.8.
"""

import torch
from einops import rearrange
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from refattn.checks import check, is_int, same_device


def index_first_axis(input: Shaped[Tensor, "rows ..."], indices: Int64[Tensor, "t"]) -> Shaped[Tensor, "t ..."]:
    """Return some rows of a tensor."""
    _check(input, indices, "input")
    return input[indices]


def index_put_first_axis(
    values: Shaped[Tensor, "t ..."], indices: Int64[Tensor, "t"], first_axis_dim: int
) -> Shaped[Tensor, "{first_axis_dim} ..."]:
    """Return a tensor of so many rows, of which some are given, and the others are 0."""
    _check(values, indices, "values")
    if len(values) != len(indices):
        raise ValueError(f"indices: expected one for each of {len(values)} rows of values, got {len(indices)}")
    if not is_int(first_axis_dim) or first_axis_dim < 0:
        raise ValueError(f"first_axis_dim: expected a number of rows, got {first_axis_dim!r}")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Shaped[Tensor, "b s ..."],
    attention_mask: Shaped[Tensor, "b s"],
    unused_mask: Shaped[Tensor, "b s"] | None = None,
) -> tuple[Shaped[Tensor, "t ..."], Int64[Tensor, "t"], Int32[Tensor, "_"], int, Int32[Tensor, "b"]]:
    """Return the rows of tokens, without those of padding.

    Args:
        hidden_states: rows of each sequence, padding among them.
        attention_mask: 1 where a token is, 0 for padding.
        unused_mask: 1 for rows that have memory and are not used: they are kept, and not counted as used.

    Returns:
        The rows; where they are among all rows; where those of each sequence begin; the longest sequence; and how many
        tokens each sequence uses.

    Raises:
        ValueError: if a mask has another shape than the rows.
    """
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim < 2:
        raise ValueError(f"hidden_states: expected [b, s, ...], got {getattr(hidden_states, 'shape', hidden_states)}")
    b, s = hidden_states.shape[:2]
    masks = dict(attention_mask=attention_mask) | ({} if unused_mask is None else dict(unused_mask=unused_mask))
    for name, mask in masks.items():
        check(dict(b=b, s=s), **{name: (mask, "b s")})
        same_device(hidden_states=hidden_states, **{name: mask})
    has_memory = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = has_memory.sum(-1, dtype=torch.int32)
    indices = has_memory.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if b else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(rearrange(hidden_states, "b s ... -> (b s) ..."), indices), indices, ends, longest, used


def pad_input(
    hidden_states: Shaped[Tensor, "t ..."], indices: Int64[Tensor, "t"], batch: int, seqlen: int
) -> Shaped[Tensor, "{batch} {seqlen} ..."]:
    """Return rows at their places among those of `batch` sequences of `seqlen` rows; padding is 0."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rearrange(rows, "(b s) ... -> b s ...", b=batch)


def _check(tensor: Tensor, indices: Tensor, name: str) -> None:
    """Check rows, and the places of some."""
    if not isinstance(tensor, Tensor) or not tensor.ndim:
        raise ValueError(f"{name}: expected a tensor [rows, ...], got {getattr(tensor, 'shape', tensor)}")
    check(indices=(indices, "int64 t"))
    same_device(**{name: tensor}, indices=indices)
