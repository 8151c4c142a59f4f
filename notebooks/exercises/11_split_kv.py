"""11 · Split-KV: one query, its keys shared out to many workers (flash decoding)."""

import torch
from jaxtyping import Float
from torch import Tensor


def split_kv(
    query: Float[Tensor, "h d"],
    key: Float[Tensor, "s h d"],
    value: Float[Tensor, "s h d"],
    num_splits: int,
) -> tuple[Float[Tensor, "splits h d"], Float[Tensor, "splits h"]]:
    """Return the partial outputs of the splits: outputs and log-sum-exps, each over its own keys.

    Split i has the keys from i * size to before (i + 1) * size, with size = ceil(s / num_splits); the last splits may
    have fewer, or none: then 0 and -inf. 5 keys in 4 splits: the keys 0 1 | 2 3 | 4 | none.
    """
    raise NotImplementedError
