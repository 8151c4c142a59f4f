"""38 · A state in registers, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@triton.jit
@no_type_check
def fold_kernel(
    query, key, value, decay, beta, state, out, after, num_tokens,
    DV: tl.constexpr, DK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the tokens of one head into ROWS rows of its state, one by one, and read the state after each.

    Program i has the rows from i * ROWS on; no row depends on another. Row r of the state begins at `state + r * DK`,
    and after the last token it goes to `after + r * DK`. The key of token t begins at `key + t * DK`, its query
    at `query + t * DK`, its value and its output at `value + t * DV` and `out + t * DV`, and its gates are at
    `decay + t` and `beta + t`. By the gated delta rule a token lets the state fade, writes beta times the difference
    between its value and what the faded state returns for its key, under that key, and reads the state with its query.
    """
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DK)
    places = rows[:, None] * DK + columns[None, :]
    tile = tl.load(state + places)
    for token in range(0, num_tokens):
        k = tl.load(key + token * DK + columns)
        q = tl.load(query + token * DK + columns)
        v = tl.load(value + token * DV + rows)
        tile = tile * tl.load(decay + token)
        written = tl.load(beta + token) * (v - tl.sum(tile * k[None, :], 1))
        tile = tile + written[:, None] * k[None, :]
        tl.store(out + token * DV + rows, tl.sum(tile * q[None, :], 1))
    tl.store(after + places, tile)


def triton_fold(
    query: Float[Tensor, "t dk"],
    key: Float[Tensor, "t dk"],
    value: Float[Tensor, "t dv"],
    decay: Float[Tensor, "t"],
    beta: Float[Tensor, "t"],
    state: Float[Tensor, "dv dk"],
) -> tuple[Float[Tensor, "t dv"], Float[Tensor, "dv dk"]]:
    """Launch the kernel, one program per four rows; return (out, state), and leave the state that came as it is."""
    out, after = torch.full_like(value, torch.nan), torch.full_like(state, torch.nan)
    fold_kernel[(len(state) // 4,)](
        *(query, key, value, decay, beta, state, out, after, len(key)), DV=len(state), DK=state.shape[1], ROWS=4
    )
    return out, after
