"""31 · After attention: the next token."""

import torch
from jaxtyping import Float
from torch import Tensor


def sample(logits: Float[Tensor, "v"], temperature: float, top_p: float, u: float) -> int:
    """Return the next token, the one that a number u from 0 to 1 draws.

    With temperature 0 it is the most likely token. Else the probabilities are the softmax of logits / temperature. Of
    the tokens, from the most likely one down, the first ones are kept, up to and with the one at which their sum
    reaches top_p. Of those, in the same order, the first one is drawn at which the running sum is more than u times
    the sum of all that are kept.
    Logits [log 0.1, log 0.5, log 0.25, log 0.15] with temperature 1, top_p 1 and u 0.8: the tokens are 1, 2, 3, 0, the
    running sums 0.5, 0.75, 0.9, 1, and token 3 is drawn.
    """
    raise NotImplementedError
