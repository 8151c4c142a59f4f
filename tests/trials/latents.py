"""Trials of decodes over latents on Hopper: calls to be timed, with a check of what they return.

The benchmark's rows (64 sequences of 8192 latents, 128 heads, bfloat16 and fp8), one sequence, many shorter ones,
ragged ones whose keys are split, and float16. Blocks of no sequence, and rows past the last key, are NaN.
"""

import torch

import fastattn
import fastattn.mla
import refattn.mla
from fastattn.metadata import make_batch
from refattn.options import AttentionOptions
from twinattn.kit.tolerance import assert_close

RANK, ROPE, BLOCK, SCALE, FP8_SCALE = 512, 64, 64, 192**-0.5, 1 / 64
CHECKED = 4  # sequences that are compared with the reference
DEVICE = "cuda"


def decodes(lens, *, heads=128, dtype=torch.bfloat16, stored=None, query_len=1, sinks=False):
    """Return a case: decodes of sequences with some lengths."""

    def case():
        generator = torch.Generator(DEVICE).manual_seed(0)
        counts = [-(-n // BLOCK) for n in lens]
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        cache = torch.randn(sum(counts) + 1, BLOCK, RANK + ROPE, generator=generator, device=DEVICE, dtype=dtype)
        if stored is not None:
            cache = (cache / FP8_SCALE).clamp(-400, 400).to(stored)
        cache[order[0]] = float("nan")
        for n, table in zip(lens, tables, strict=True):
            cache[table[-1], (n - 1) % BLOCK + 1 :] = float("nan")
        size = len(lens) * query_len, heads, RANK + ROPE
        query = torch.randn(*size, generator=generator, device=DEVICE, dtype=dtype)
        of_heads = dict(sinks=torch.linspace(-2, 3, heads, device=DEVICE)) if sinks else {}
        options = AttentionOptions(softmax_scale=SCALE, **of_heads)
        plan = fastattn.mla.plan(make_batch([query_len] * len(lens), lens, tables, device=DEVICE), block_size=BLOCK)
        of_cache = dict(latent_rank=RANK, cache_scale=1.0 if stored is None else FP8_SCALE, return_lse=True)

        def call():
            with fastattn.use_kernel("triton"):
                return fastattn.mla.attention(query, cache, plan, options, **of_cache)

        def check(result):
            for i in sorted({*range(0, len(lens), max(len(lens) // CHECKED, 1)), len(lens) - 1}):
                own = slice(i * query_len, (i + 1) * query_len)
                blocks = cache.view(torch.uint8)[tables[i]].view(cache.dtype)
                alone = make_batch([query_len], [lens[i]], [list(range(counts[i]))], device=DEVICE)
                by = refattn.mla.plan(alone, block_size=BLOCK)
                found = []
                for kind in (torch.float32, dtype):
                    pool = blocks if stored is not None else blocks.to(kind)
                    found.append(refattn.mla.attention(query[own].to(kind), pool, by, options, **of_cache))
                try:
                    for name, came, wide, low in zip(("out", "lse"), result, *found, strict=True):
                        assert_close(came[own], wide, low, name=f"{name} of sequence {i}")
                except AssertionError as error:
                    return str(error)
            return None

        return call, check

    return case


RAGGED = [100, 8192, 3000, 64, 517, 12000, 1, 2048, 7000, 4096, 333, 65, 9000, 1500, 6001, 128]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {
    "64x8192-bf16": decodes([8192] * 64),
    "64x8192-e4m3": decodes([8192] * 64, stored=E4M3),
    "64x8192-fp16": decodes([8192] * 64, dtype=torch.float16),
    "64x8192-e5m2": decodes([8192] * 64, stored=E5M2),
    "1x8192-bf16": decodes([8192]),
    "1x8192-e4m3": decodes([8192], stored=E4M3),
    "128x4096-bf16": decodes([4096] * 128),
    "128x4096-e4m3": decodes([4096] * 128, stored=E4M3),
    "16-ragged-bf16": decodes(RAGGED),
    "16-ragged-e4m3": decodes(RAGGED, stored=E4M3),
    "16-ragged-sinks-fp16": decodes(RAGGED, dtype=torch.float16, sinks=True),
    "64x2048-two-queries-bf16": decodes([2048] * 64, query_len=2),
}
