"""20 · Latent attention (MLA): absorb the projection into the query."""

import torch
from jaxtyping import Float
from torch import Tensor


def mla_decode(
    query: Float[Tensor, "h nope+rope"],
    latent: Float[Tensor, "s r"],
    rope_key: Float[Tensor, "s rope"],
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    softmax_scale: float,
) -> Float[Tensor, "h dv"]:
    """Return the answer of one new token: head h has the keys [W_k[h] @ latent, rope_key], the values W_v[h] @ latent.

    All tokens are visible. Make no keys or values: q . (W_k c) = (W_k^T q) . c, so let the query go to the latents.
    One head, W_k = W_v = [[2]], query [1, 0], latents [0, 0]: scores 0 and 0, out 0.
    """
    raise NotImplementedError
