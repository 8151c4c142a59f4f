"""32 · A state: the last inputs, from which it is rebuilt."""

import torch
from jaxtyping import Float
from torch import Tensor


def replay(
    checkpoint: Float[Tensor, "dv dk"],
    decays: Float[Tensor, "m"],
    keys: Float[Tensor, "m dk"],
    written: Float[Tensor, "m dv"],
    query: Float[Tensor, "dk"],
    key: Float[Tensor, "dk"],
    value: Float[Tensor, "dv"],
    decay: float,
    beta: float,
    room: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (out, checkpoint, decays, keys, written) after one more token: its output, the checkpoint and the ring.

    The ring holds the m tokens since the checkpoint, the oldest first: the decay of each, its key, and the row that it
    wrote under the key. The state before this token is what these made of the checkpoint. Of the gated delta rule, this
    token writes beta times the difference between its value and what the state, once it has faded, answers to its key;
    then the query reads the state. The token joins the ring; if that has room tokens then, the state is the checkpoint,
    and the ring is empty. No argument is changed.
    """
    state = checkpoint
    for old_decay, old_key, old_row in zip(decays, keys, written, strict=True):
        state = old_decay * state + torch.outer(old_row, old_key)
    state = decay * state
    row = beta * (value - state @ key)
    state = state + torch.outer(row, key)
    decays = torch.cat([decays, torch.as_tensor([decay]).to(decays)])
    keys, written = torch.cat([keys, key[None]]), torch.cat([written, row[None]])
    if len(keys) == room:
        checkpoint, decays, keys, written = state, decays[:0], keys[:0], written[:0]
    return state @ query, checkpoint, decays, keys, written
