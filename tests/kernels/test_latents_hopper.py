"""Latents by warps with roles: the kernel for Hopper, interpreted on a CPU, against the reference.

On a card, every test of latents with 64 rows or more launches it.
"""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import fastattn
import fastattn.mla
from fastattn.kernels.triton import launch
from tests.helpers.batches import Case
from tests.helpers.latents import OF_LATENTS, REAL, Latents, attend, by_reference, filled, in_8_bits
from tests.helpers.stored import E4M3, E5M2
from tests.helpers.tolerance import assert_matches_reference
from twinattn.course.gluon.interpret import hopper_on_a_cpu

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted; on a card the tests of paths launch it")

CASES = {  # lengths, heads, tokens in a block, and rows of padding
    "decodes": Case("decodes", ((1, 5), (1, 64), (1, 65), (1, 200)), heads=(64, 1), padding_rows=2),
    "two-tiles-each": Case("two-tiles-each", ((1, 130), (0, 40), (1, 3)), heads=(128, 1), block_size=24),
    "chunks": Case("chunks", ((3, 70), (2, 2), (5, 3)), heads=(64, 1), block_size=1, padding_rows=1),
}
KINDS = {"float16": None, "e4m3": E4M3, "e5m2": E5M2}


def hold(case, kind, options, seed):
    """Hold the kernel to the reference, and say whether it was launched."""
    made = dict(dtype=torch.float16, sizes=REAL._replace(spare=64))
    given = Latents(case, **made) if kind is None else in_8_bits(case, kind, **made)
    fixed = dict(latent_rank=REAL.rank, cache_scale=1.0 if kind is None else OF_LATENTS)
    options = filled(options, case.heads[0], "cpu") | dict(softmax_scale=0.07)
    arguments = given.absorbed, given.cache, given.batch
    with hopper_on_a_cpu(seed) as (_, kernel, _), fastattn.use_kernel("triton"):
        out, lse = attend(fastattn.mla, *arguments, **fixed, **options)
    assert_matches_reference(out, lse, by_reference(attend, **fixed), *arguments, **options)
    return kernel.launched


@pytest.mark.parametrize("options", [{}, dict(sinks=True)], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_latents_of_64_rows_and_more(case, kind, options):
    """Numbers and quantized ones, tiles that are not full, keys of one step and of several, splits of them."""
    assert hold(case, kind, options, seed=0)


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@drawn(
    case=st.sampled_from(list(CASES.values())), kind=st.sampled_from(list(KINDS.values())), seed=st.integers(0, 10**6)
)
def test_in_any_order(case, kind, seed):
    """Whoever is first, warpgroups and what is asynchronous."""
    assert hold(case, kind, {}, seed)
