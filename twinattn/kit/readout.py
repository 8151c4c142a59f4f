"""Recover the mask of a kernel exactly from its output, so that no wrong key can hide in a tolerance."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from twinattn.kit.cases import Case, build
from twinattn.kit.workload import Workload


def read_masks(
    attention: Callable[..., tuple[Tensor, Tensor]],
    case: Case,
    *,
    paged: bool = True,
    device: str = "cpu",
    **options: Any,
) -> list[Bool[Tensor, "t s"]]:
    """Read out which keys each query sees: zero queries weigh all visible keys equally, and one-hot values name them.

    The output is then the mask divided by its row count, exactly; the LSE is the log of that count, which is checked
    here. Each call names as many keys as a value has elements, so that any head size is enough for any length.

    Args:
        attention: called as `attention(query, key_cache, value_cache, batch, return_lse=True, **options)`; with `key`
            and `value` instead of the caches if not `paged`.
        case: the batch.
        paged: whether keys are in pages, or in rows.
        device: of the tensors.
        options: further arguments of `attention`.

    Returns:
        `[t, s]` of each sequence, the same for every head.

    Raises:
        AssertionError: if the weights of a row are not all equal to 1 / count or 0, or its LSE is wrong.
    """
    width = case.value_size
    longest = max(s for _, s in case.lens)
    pieces = []
    for first in range(0, max(longest, 1), width):
        inputs = build(case, device=device, values=one_hot_values(case, first))
        arguments = inputs.tensors if paged else inputs.rows
        out, lse = attention(torch.zeros_like(arguments[0]), *arguments[1:], **options, return_lse=True)
        pieces.append(out)
    weights = torch.cat(pieces, dim=-1).cpu()  # [t, h, s], and columns past s
    lse = lse.cpu()

    masks, row = [], 0
    for query_len, s in case.lens:
        mine = weights[row : row + query_len]
        if mine[..., s:].any():
            raise AssertionError("weight on a key that does not exist")
        mask = mine[:, 0, :s] > 0
        count = mask.sum(-1)
        for head in range(case.heads[0]):
            expected = mask / count.clamp(min=1)[:, None]
            torch.testing.assert_close(mine[:, head, :s], expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(lse[row : row + query_len, head], count.log().float(), rtol=1e-6, atol=1e-6)
        masks.append(mask)
        row += query_len
    if weights[row:].any() or not (lse[row:] == -torch.inf).all():
        raise AssertionError("a padding row is not empty")
    return masks


def one_hot_values(work: Workload, first: int) -> list[Float[Tensor, "s hk dv"]]:
    """Return one-hot values of each sequence: element `j` is 1 in key `first + j`."""
    named = torch.arange(first, first + work.value_size)
    return [(torch.arange(s)[:, None] == named).float()[:, None].repeat(1, work.heads[1], 1) for _, s in work.lens]


def masks_by_hand(case: Case, sees: Callable[[int, int], bool]) -> list[Bool[Tensor, "t s"]]:
    """Return the masks of a case by a rule `sees(i, j)` on positions, one pair at a time."""
    return [
        torch.tensor([[sees(s - q + i, j) for j in range(s)] for i in range(q)], dtype=torch.bool).reshape(q, s)
        for q, s in case.lens
    ]


def assert_same_masks(read: list[Tensor], expected: list[Tensor]) -> None:
    """Compare masks sequence by sequence.

    Raises:
        AssertionError: saying where the first difference is.
    """
    for i, (got, want) in enumerate(zip(read, expected, strict=True)):
        wrong = (got != want).nonzero()
        if len(wrong):
            row, key = wrong[0].tolist()
            raise AssertionError(
                f"sequence {i}: query row {row} should {'' if want[row, key] else 'not '}see key {key}"
            )
