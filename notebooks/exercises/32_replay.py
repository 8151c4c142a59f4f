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
    raise NotImplementedError
