"""What each path promises, in a few lines: `test_every_path` proves it in five ways.

Differential attention has arguments of its own, and its output is no weighted sum; its own tests have its proofs.
"""

import torch

from refattn.batch import Prefix
from twinattn.kit import Case, PathSpec

LEFT, RIGHT, CHUNK = 19, 3, 48  # tokens before and after a query, in a chunk

BAD_OPTIONS = {
    "softmax_scale: expected a finite number": dict(softmax_scale=float("nan")),
    "softcap: expected a finite number of at least 0": dict(softcap=-1.0),
    "sinks: expected floating point [h=4]": dict(sinks=torch.zeros(3)),
    "alibi_slopes: expected floating point [h], got int32 [4]": dict(alibi_slopes=torch.zeros(4, dtype=torch.int32)),
    "batch_invariant: expected True or False": dict(batch_invariant=1),
    "return_lse: expected True or False": dict(return_lse=None),
    "out: expected float32 [t=3, h=4, dv=64]": dict(out=torch.zeros(2, 4, 64)),
}
BAD_WINDOW = {"window_size: expected (left, right)": dict(window_size=(-2, 0))}
BAD_PAGES = {
    "block_size: expected a positive int": dict(block_size=0),
    "key_cache: expected blocks": dict(block_size=32),
}


def is_causal(i: int, j: int) -> bool:
    """Return whether key `j` is not after query `i`."""
    return j <= i


SPECS = [
    PathSpec("chunked_prefill", is_causal, bad_arguments=BAD_OPTIONS | BAD_PAGES | BAD_WINDOW),
    PathSpec("chunked_prefill", lambda i, j: i - LEFT <= j <= i, dict(window_size=(LEFT, 0))),
    PathSpec(
        "sliding_window",
        lambda i, j: i - LEFT <= j <= i,
        dict(window_size=(LEFT, 0)),
        bad_arguments=BAD_OPTIONS | BAD_PAGES | BAD_WINDOW,
    ),
    PathSpec("sliding_window", lambda i, j: i - LEFT <= j <= i + RIGHT, dict(window_size=(LEFT, RIGHT), causal=False)),
    PathSpec(
        "local",
        lambda i, j: j <= i and i // CHUNK == j // CHUNK,
        dict(chunk_size=CHUNK),
        bad_arguments=BAD_OPTIONS
        | {
            "block_size: expected a positive int": dict(block_size=0),
            "key_cache: expected blocks": dict(block_size=24),
            "chunk_size: expected a multiple of block_size=16, got 24": dict(chunk_size=24),
        }
        | BAD_WINDOW,
    ),
    PathSpec(
        "local",
        lambda i, j: i - LEFT <= j <= i and i // CHUNK == j // CHUNK,
        dict(chunk_size=CHUNK, window_size=(LEFT, 0)),
    ),
    PathSpec("varlen", is_causal, paged=False, bad_arguments=BAD_OPTIONS | BAD_WINDOW),
    PathSpec("varlen", lambda i, j: True, dict(causal=False), paged=False),
    PathSpec(  # without shared prefixes: these are an argument of each batch, and tested with the path
        "cascade",
        is_causal,
        dict(prefixes=()),
        bad_arguments=BAD_OPTIONS
        | BAD_PAGES
        | BAD_WINDOW
        | {
            "prefixes[0]: expected sequences in 0..2, got 0..3": dict(prefixes=[Prefix(0, 3, 16)]),
            "prefixes[0]: expected to end before the first query": dict(prefixes=[Prefix(0, 2, 16)]),
        },
    ),
]

# Any two of lengths, heads, sizes, layouts and padding stand together in one of these cases.
ODD = [
    Case("padded", ((4, 6), (1, 70), (10, 17), (0, 9), (5, 2)), heads=(4, 1), padding_rows=2),
    Case("odd-blocks", ((7, 50), (1, 49), (33, 33)), (6, 3), head_size=96, value_head_size=64, block_size=24),
    Case("empty", ((0, 5), (5, 0), (0, 0), (2, 97)), (3, 3), value_head_size=128, layout="HND", padding_rows=1),
    Case("blocks-of-one", ((3, 51), (1, 1), (60, 60)), (2, 1), head_size=96, block_size=1, layout="HND"),
]
