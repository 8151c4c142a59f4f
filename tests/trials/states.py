"""Trials of prompts over states on Hopper: calls to be timed, with a check of what they return.

The benchmark's rows of prompts (32 value heads and 16 of keys, bfloat16), and ragged prompts: sequences that begin or
end inside a chunk, with states of their own, one that is idle, and states that are kept at ends of blocks. Rows and
states of no sequence are NaN.
"""

from functools import cache

import torch

import fastattn
import fastattn.recurrent
import refattn.recurrent
from fastattn.metadata import make_batch
from refattn.modes import computing_in
from refattn.options import RecurrentOptions
from twinattn.bench.states import States
from twinattn.kit.tolerance import assert_close

DEVICE, HALF = "cuda", torch.bfloat16
VALUES = [0, 63, 64, 127]  # values of each head that are computed token by token: of both groups that fold
PADDING = 5  # rows past the last sequence


def held(*each):
    """Return None, or by how much one is off: each is a result, the exact one, a rounded one, and a name."""
    try:
        for came, exact, low, name in each:
            assert_close(came, exact, low, name=name)
    except AssertionError as error:
        return str(error)
    return None


def token_by_token(inputs, dtype):
    """Compute some values of all heads: outputs [t, hv, sampled] and states [b, hv, sampled, dk], from zeros."""
    work, group = inputs.work, inputs.work.heads[0] // inputs.work.heads[1]

    def by_sequence(x):
        return x.to(dtype).unflatten(0, (work.num_seqs, -1)).unbind(1)

    query, key = (by_sequence(x.repeat_interleave(group, 1)) for x in (inputs.query, inputs.key))
    value, decay, beta = map(by_sequence, (inputs.value[..., VALUES], inputs.log_decay.exp(), inputs.beta))
    state = torch.zeros(work.num_seqs, work.heads[0], len(VALUES), work.head_size, dtype=dtype, device=DEVICE)
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g[..., None, None]
        written = (v - (state * k[..., None, :]).sum(-1)) * b[..., None]
        state = state + written[..., None] * k[..., None, :]
        outs.append((state * q[..., None, :]).sum(-1) * work.head_size**-0.5)
    return torch.stack(outs, 1).flatten(0, 1), state


def prompts(num_seqs, query_len):
    """Return a case: a row of the benchmark, `recurrent/prefill-*`."""

    def case():
        inputs = States(num_seqs, query_len, (32, 16)).draw(torch.device(DEVICE), HALF, seed=0)
        slots, pool = inputs.slots[:, 1].contiguous(), torch.full_like(inputs.states, torch.nan)
        plan = fastattn.recurrent.plan(inputs.batch, state_indices=slots)

        def call():
            with fastattn.use_kernel("triton"):
                return fastattn.recurrent.attention(*inputs[1:6], pool, plan)

        @cache
        def expected():
            return [token_by_token(inputs, dtype) for dtype in (torch.float64, HALF)]

        def check(out):
            exact, low = expected()
            states = pool[slots.long()][..., VALUES, :]
            return held((out[..., VALUES], exact[0], low[0], "out"), (states, exact[1], low[1], "states"))

        return call, check

    return case


def ragged(lens, *, idle, block_size=None):
    """Return a case of sequences, each of some new tokens and as many in all; states are put back before each call."""

    def case():
        rows = States(1, sum(q for q, _ in lens) + PADDING, (32, 16)).draw(torch.device(DEVICE), HALF, seed=1)
        step, first = rows[1:6], 0
        for i, (query_len, _) in enumerate(lens):
            if i in idle:
                for x in step:
                    x[first : first + query_len] = torch.nan
            first += query_len
        for x in step:
            x[first:] = torch.nan
        generator = torch.Generator(DEVICE).manual_seed(2)
        pool = torch.randn(3 * len(lens), 32, 128, 128, device=DEVICE, generator=generator)
        order = torch.randperm(len(pool), device=DEVICE, generator=generator).int()
        slots, more = order[: len(lens)].clone(), {}
        if block_size is not None:
            kept = torch.full(
                (len(lens), max(s for _, s in lens) // block_size + 1), -1, dtype=torch.int32, device=DEVICE
            )
            for i, (query_len, seq_len) in enumerate(lens):
                if seq_len // block_size > (seq_len - query_len) // block_size:
                    kept[i, seq_len // block_size - 1] = order[len(lens) + i]
            more = dict(block_size=block_size, checkpoint_indices=kept)
        pool[order[len(lens) :].long()] = torch.nan
        slots[list(idle)] = -1
        tables = dict(state_indices=slots, has_initial_state=torch.tensor([s > q for q, s in lens], device=DEVICE))
        batch = make_batch([q for q, _ in lens], [s for _, s in lens], device=DEVICE)
        plan, own = fastattn.recurrent.plan(batch, **tables, **more), torch.empty_like(pool)
        out = torch.empty_like(step[2])

        def call():
            own.copy_(pool)
            with fastattn.use_kernel("triton"):
                return fastattn.recurrent.attention(*step, own, plan, out=out)

        @cache
        def expected():
            found = []
            for dtype in (torch.float64, HALF):
                states = pool.to(torch.promote_types(pool.dtype, dtype)).clone()
                by = refattn.recurrent.plan(batch, **tables, **more)
                with computing_in(dtype):
                    made = refattn.recurrent.attention(
                        *(x.to(torch.promote_types(x.dtype, dtype)) for x in step), states, by, RecurrentOptions()
                    )
                found.append((made, states))
            return found

        def check(result):
            exact, low = expected()
            if not torch.equal(own.isnan(), exact[1].isnan()):
                return "states of no sequence are other ones"
            states = (x.nan_to_num() for x in (own, exact[1], low[1]))
            return held((result, exact[0], low[0], "out"), (*states, "states"))

        return call, check

    return case


MIXED = ((1000, 1500), (64, 64), (700, 700), (333, 400), (1, 90), (2048, 2048))
CASES = {
    "1x8192": prompts(1, 8192),
    "1x32768": prompts(1, 32768),
    "8x1024": prompts(8, 1024),
    "ragged": ragged(MIXED, idle=(2,)),
    "ragged-kept": ragged(MIXED, idle=(2,), block_size=128),
    "1x100": ragged(((100, 130),), idle=()),
}
