"""The kit that proves a path: how it calls one."""

import pytest
import torch

from refattn import chunked_prefill, metadata
from refattn.conformance import CASES, Case, Example, Workload, attend, prepare


def inputs():
    """Make a query, a pool of two blocks of 8 tokens, and a batch of one decode."""
    cache = torch.zeros(2, 8, 1, 64)
    return torch.zeros(1, 1, 64), cache, cache, metadata.make_batch([1], [5], [[1]])


def test_the_block_size_is_that_of_the_cache():
    assert prepare(chunked_prefill, *inputs()).args[-2].block_size == 8


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_block_size_that_is_given_asks_nothing_of_the_cache():
    query, key_cache, _, batch = inputs()
    with pytest.raises(ValueError, match="^value_cache: expected"):
        attend(chunked_prefill, query, key_cache, None, batch, block_size=8)


def test_what_is_computed_prints_as_code():
    """So a failing batch of a test or of the kit can be copied."""
    known = {kind.__name__: kind for kind in (Case, Example, Workload)}
    example = Example("local", ((1, 5),), (4, 2), options={"chunk_size": 16}, seed=3)
    drawn = Workload("mla", ((1, 5),), plan_of="speculative", trees="bushy", window=(4, 0))
    for workload in (*CASES, example, drawn):
        assert eval(repr(workload), known) == workload
    assert repr(CASES[0]) == "Case('decode', lens=((1, 1),))" and str(CASES[0]) == "decode"


def test_an_example_has_the_mask_of_its_options():
    example = Example("sliding_window", ((3, 5),), options={"window_size": (1, 0)})
    assert example.masks()[0].int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
