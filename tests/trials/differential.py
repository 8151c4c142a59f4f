"""Prompts of differential attention to be timed on a GPU: the row of the benchmark, and three others.

`CASES` has functions without arguments that return `(call, check)`: `call()` is what is timed, and `check(result)`
returns what is wrong with it, or None. A check holds a few rows of each sequence to the reference.
"""

from functools import partial

import torch

import fastattn.differential
import refattn.differential
import refattn.varlen
from fastattn.metadata import make_batch
from tests.helpers.tolerance import assert_matches_reference

SAMPLE = 8  # query rows that are checked at a time


def case(lens, heads, block_size, device="cuda", window_size=(-1, -1), padding=0, norm_weight=False):
    """Return a call and its check: shuffled blocks, and NaN wherever no token is."""
    generator = torch.Generator().manual_seed(0)
    h, hk = heads
    counts = [-(-seq_len // block_size) for _, seq_len in lens]
    order, tables = torch.randperm(sum(counts) + 2, generator=generator).tolist(), []
    for count in counts:
        tables.append([order.pop() for _ in range(count)])
    cache = torch.full((2, 2, sum(counts) + 2, block_size, hk // 2, 64), torch.nan, dtype=torch.bfloat16)
    rows = []
    for (_, seq_len), table in zip(lens, tables, strict=True):
        own = torch.randn(2, 2, seq_len, hk // 2, 64, generator=generator).bfloat16()
        padded = own.new_full((2, 2, len(table) * block_size, hk // 2, 64), torch.nan)
        padded[:, :, :seq_len] = own
        cache[:, :, table] = padded.unflatten(2, (len(table), block_size))
        rows.append(own)
    num_tokens = sum(query_len for query_len, _ in lens) + padding
    query = torch.randn(num_tokens, h, 64, generator=generator).bfloat16().to(device)
    cache = cache.to(device)
    batch = make_batch([q for q, _ in lens], [s for _, s in lens], tables, device=device)
    plan = fastattn.differential.plan(batch, block_size=block_size, window_size=window_size)
    more = dict(lambda_full=torch.tensor(0.6, device=device), lambda_init=0.4, norm_eps=1e-5)
    if norm_weight:
        more["norm_weight"] = torch.linspace(0.5, 2.0, 128, device=device)
    call = partial(fastattn.differential.attention, query, cache, plan, return_lse=True, **more)
    return call, partial(check, lens, rows, query, window_size, more)


def check(lens, rows, query, window_size, more, result):
    """Return what is wrong with a result, or None."""
    out, lse = result
    first = 0
    for (query_len, seq_len), own in zip(lens, rows, strict=True):
        for end in sorted({min(SAMPLE, query_len), query_len // 2, query_len}):
            count, keys = min(SAMPLE, end), seq_len - query_len + end
            if count < 1 or keys < 1:
                continue
            at = slice(first + end - count, first + end)
            batch = make_batch([count], [keys])
            plan = refattn.varlen.plan(batch, window_size=window_size)

            def by_reference(query, cache, *, return_lse, plan=plan, **asked):
                return refattn.differential.attention(query, cache, plan, return_lse=return_lse, **asked)

            try:
                given = query[at], own[:, :, :keys]
                assert_matches_reference(out[at], lse[at], by_reference, *given, **more)
            except AssertionError as error:
                return f"rows {at.start} to {at.stop}: {error}"
        first += query_len
    if out[first:].any() or not (lse[first:] == -torch.inf).all():
        return "padding rows"
    return None


RAGGED = ((3000, 3000), (700, 9000), (1, 5000), (0, 100), (2048, 4096), (129, 129), (65, 1))
CASES = {
    "prefill-8192": partial(case, ((8192, 8192),), (32, 32), 16),
    "prefill-2x8192-groups-of-4-blocks-of-128": partial(case, ((8192, 8192),) * 2, (32, 8), 128, norm_weight=True),
    "ragged": partial(case, RAGGED, (32, 16), 16, padding=5),
    "window-1024-2x8192": partial(case, ((8192, 8192),) * 2, (32, 16), 16, window_size=(1024, 0)),
}
