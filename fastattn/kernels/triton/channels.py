"""Decays per key channel in the chunks of prompts, for `fastattn.kernels.triton.chunks`.

With a decay per channel, the weight of two tokens is a sum over channels, each with a product of decays of its own. The
usual way divides: `(q[i] exp(g[i])) . (k[j] exp(-g[j]))`, with g the sum of logarithms since some token, and `exp(-g)`
overflows after a few strong gates. Here a pair of tokens is split at a token between them, the middle of the smallest
block of 2, 4, 8 .. tokens that holds both: the decays up to the middle belong to the key, those after it to the query.

    a chunk of 8, the pairs of each product of matrices      j  0 1 2 3 4 5 6 7
                                                          i  1  a
    a   halves of 1 token                                    2  b b
    b   halves of 2                                          3  b b a
    c   halves of 4                                          4  c c c c
                                                             5  c c c c a
                                                             6  c c c c b b
                                                             7  c c c c b b a

So every exponent is a sum of logarithms of decays, and no factor is larger than 1, however strong the gates are.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

# Triton's interpreter finds a function only if it is defined above its caller.


class Channels(NamedTuple):
    """Logarithms of decays of some channels of a head: pointers to those of row 0, and the row stride."""

    log_decay: Any
    stride: Any
    is_channel: Any


@triton.jit
@no_type_check
def channels_of(gates, head, columns, is_column):
    """Return some channels of a head."""
    strides = gates.log_decay_strides
    return Channels(gates.log_decay + head * strides[1] + columns[None, :] * strides[2], strides[0], is_column)


@triton.jit
@no_type_check
def _read_logs(channels, chunk, BLOCK: tl.constexpr, TILE):
    """Return the logarithms of each token, and those of the token after it, 0 after the last one of a block."""
    at = tl.arange(0, TILE.CHUNK)
    of_tokens = channels.log_decay + (chunk.first_row + at)[:, None] * channels.stride
    is_channel = channels.is_channel[None, :]
    logs = tl.load(of_tokens, chunk.is_token[:, None] & is_channel, 0.0).to(tl.float32)
    following = chunk.first + at + 1
    has_next = (following >= 0) & (following < chunk.length) & (at % BLOCK != BLOCK - 1)
    later = tl.load(of_tokens + channels.stride, has_next[:, None] & is_channel, 0.0).to(tl.float32)
    return logs, later


@triton.jit
@no_type_check
def decays_of(channels, chunk, TILE):
    """Return the decays of channels since the start of a chunk, after each token up to its end, and of all tokens."""
    logs, later = _read_logs(channels, chunk, TILE.CHUNK, TILE)
    return tl.exp(tl.cumsum(logs, 0)), tl.exp(tl.cumsum(later, 0, reverse=True)), tl.exp(tl.sum(logs, 0))


@triton.jit
@no_type_check
def _pairs(left, right, channels, chunk, HALF: tl.constexpr, TILE):
    """Return the weight of tokens i and j, for i in the second half of a block, and j in the first."""
    PAD_K: tl.constexpr = left.shape[1]
    logs, later = _read_logs(channels, chunk, HALF, TILE)
    since = tl.cumsum(tl.reshape(logs, [TILE.CHUNK // HALF, HALF, PAD_K]), 1)
    until = tl.cumsum(tl.reshape(later, [TILE.CHUNK // HALF, HALF, PAD_K]), 1, reverse=True)
    left *= tl.exp(tl.reshape(since, [TILE.CHUNK, PAD_K]))
    right *= tl.exp(tl.reshape(until, [TILE.CHUNK, PAD_K]))
    return tl.dot(left, tl.trans(right), input_precision=TILE.PRECISION)


@triton.jit
@no_type_check
def weights_of(left, right, channels, chunk, TILE):
    """Return `sum over d of left[i, d] right[j, d] D[i, j, d]` for j <= i, and 0 for others."""
    at = tl.arange(0, TILE.CHUNK)
    left, right = left.to(tl.float32), right.to(tl.float32)
    weights = tl.where(at[:, None] == at[None, :], tl.sum(left * right, 1)[:, None], 0.0)
    for level in tl.static_range(TILE.LEVELS):
        products = _pairs(left, right, channels, chunk, 1 << level, TILE)
        half_i, half_j = at[:, None] >> level, at[None, :] >> level
        weights = tl.where((half_i > half_j) & (half_i // 2 == half_j // 2), products, weights)
    return weights
