"""Batches over latents, for the tests of `mla`: pools with garbage where no query may look, new tokens, projections."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from einops import rearrange

import refattn.mla
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from tests.helpers.batches import POISON, Case, build, poisoned
from tests.helpers.stored import decoded

RANK, ROPE, NOPE, VALUE = 32, 8, 16, 24  # elements of a latent, of a rotary key, of the rest of a key, of a value
SPARE = 3  # unused columns of the pool
SCALE = (NOPE + ROPE) ** -0.5
OPTIONS = {
    "plain": {},
    "negative-scale": dict(softmax_scale=-0.3),
    "softcap": dict(softcap=1.0),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi_slopes=True),
    "invariant": dict(batch_invariant=True),
    "everything": dict(softcap=5.0, alibi_slopes=True, sinks=True),
}


class Sizes(NamedTuple):
    """Elements of a latent, a rotary key, the rest of a key, a value, and unused columns of the pool."""

    rank: int = RANK
    rope: int = ROPE
    nope: int = NOPE
    value: int = VALUE
    spare: int = SPARE


SMALL, REAL = Sizes(), Sizes(512, 64, 128, 128, 8)  # DeepSeek's: FlashAttention-3 and FlashMLA have no others


class Latents:
    """A case as latents: the pool with poison in all that no query may see, the new tokens, and the projections."""

    def __init__(self, case: Case, *, dtype=torch.float32, device="cpu", seed=0, poison=POISON, sizes=SMALL):
        heads, rank, rope, nope, value, spare = case.heads[0], *sizes
        one_head = replace(case, heads=(heads, 1), head_size=rank + rope, value_head_size=1)
        inputs = build(one_head, dtype=dtype, device=device, seed=seed, poison=poison)
        n, p = inputs.key_cache.shape[:2]
        unused = poisoned(n * p, 1, spare, poison).view(n, p, spare).to(inputs.key_cache)
        self.cache = torch.cat([rearrange(inputs.key_cache, "n p 1 d -> n p d"), unused], dim=-1)
        self.batch, self.keys = inputs.batch, [rearrange(key, "s 1 d -> s d") for key in inputs.keys]
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        t = len(inputs.query)
        self.query = draw(t, heads, nope + rope)
        self.query[t - case.padding_rows :] = poisoned(case.padding_rows, heads, nope + rope, poison).to(self.query)
        small = 1.4 * rank**-0.5
        self.projections = dict(
            key_projection=draw(heads, nope, rank) * small, value_projection=draw(heads, value, rank) * small
        )
        new = [key[s - q :] for (q, s), key in zip(case.lens, self.keys, strict=True)]
        padding = rearrange(poisoned(case.padding_rows, 1, rank + rope, poison), "t 1 d -> t d").to(self.cache)
        self.new = torch.cat([*new, padding])
        self.block_size, self.rope = p, rope

    @property
    def absorbed(self):
        """The queries that meet the latents."""
        return refattn.mla.absorb(self.query, self.projections["key_projection"])


def filled(options, heads, device):
    """Fill in the options with one number per head, and the scale."""
    slopes, sinks = torch.linspace(0.5, 0.01, heads, device=device), torch.linspace(-2.0, 3.0, heads, device=device)
    return (
        dict(softmax_scale=SCALE)
        | options
        | (dict(alibi_slopes=slopes) if "alibi_slopes" in options else {})
        | (dict(sinks=sinks) if "sinks" in options else {})
    )


def attend(
    twin,
    query,
    cache,
    batch,
    *,
    latent_rank=RANK,
    cache_scale=1.0,
    query_scale=None,
    fp8_weights=False,
    return_lse=True,
    out=None,
    **options,
):
    plan, of_cache = twin.plan(batch, block_size=cache.shape[1]), dict(latent_rank=latent_rank, cache_scale=cache_scale)
    of_cache |= dict(query_scale=query_scale, fp8_weights=fp8_weights)
    return twin.attention(query, cache, plan, AttentionOptions(**options), **of_cache, return_lse=return_lse, out=out)


def prefill(
    twin,
    query,
    new,
    cache,
    key_projection,
    value_projection,
    batch,
    *,
    workspace,
    cache_scale=1.0,
    return_lse=True,
    out=None,
    **options,
):
    plan = twin.plan_prefill(batch, block_size=cache.shape[1], workspace=workspace)
    rank = key_projection.shape[-1]
    return twin.prefill(
        query,
        new[:, :rank],
        new[:, rank:],
        cache,
        plan,
        AttentionOptions(**options),
        key_projection=key_projection,
        value_projection=value_projection,
        cache_scale=cache_scale,
        return_lse=return_lse,
        out=out,
    )


def by_reference(function, **fixed):
    return lambda *arguments, **options: function(refattn.mla, *arguments, **fixed, **options)


def assert_latents_seen(attend, case: Case, masks: list[torch.Tensor], device, *, number=1.0, dtype=torch.float32):
    """Read out who sees which latent, of a case without padding.

    With queries of zeros and latents of one-hot rows, the output is the mask over its row count.

    Args:
        attend: called with queries, the pool, the batch and the rank of latents; returns outputs and log-sum-exps.
        case: the lengths and the block size.
        masks: of each sequence, `[t, s]`.
        device: where it computes.
        number: the element that is not 0, as it is stored.
        dtype: of the pool, where every other row is NaN.
    """
    lens, p, heads = case.lens, case.block_size, case.heads[0]
    longest = max(s for _, s in lens)
    cache = torch.full((sum(-(-s // p) for _, s in lens) + 1, p, longest + 2), math.nan)
    tables, free = [], iter(range(len(cache) - 1, -1, -1))
    for _, s in lens:
        tables.append([next(free) for _ in range(-(-s // p))])
        for j in range(s):
            cache[tables[-1][j // p], j % p] = number * torch.eye(longest + 2)[j]
    batch = make_batch([q for q, _ in lens], [s for _, s in lens], tables, device=device)
    query = torch.zeros(sum(q for q, _ in lens), heads, longest + 2, device=device)
    out, lse = attend(query, cache.to(dtype).to(device), batch, latent_rank=longest)
    row = 0
    for (q, s), mask in zip(lens, masks, strict=True):
        counts = mask.sum(-1).float()
        expected = (mask / counts.clamp(min=1)[:, None])[:, None].expand(-1, heads, -1)
        torch.testing.assert_close(out[row : row + q, :, :s].cpu(), expected.float(), rtol=1e-6, atol=1e-7)
        assert not out[row : row + q, :, s:].any()
        torch.testing.assert_close(lse[row : row + q, 0].cpu(), counts.log(), rtol=1e-6, atol=1e-6)
        row += q


OF_LATENTS = 0.7  # the scale of a pool, which is neither 1 nor a power of two
EVEN = SMALL._replace(spare=8)  # rows of an even number of bytes, whose quantized values our kernel reads in pairs


def in_8_bits(case: Case, kind: torch.dtype, **arguments) -> Latents:
    """Lay a case out in 8 bits: garbage becomes quantized values of NaN, of infinity and of large numbers."""
    given = Latents(case, **{"sizes": EVEN} | arguments)
    given.cache = given.cache.to(kind)
    given.keys = [key.to(kind).cpu().view(torch.uint8).long() for key in given.keys]
    given.keys = [decoded(kind)[quantized] * float(torch.tensor(OF_LATENTS)) for quantized in given.keys]
    return given
