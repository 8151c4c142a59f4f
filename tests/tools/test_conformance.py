"""The kit that proves a path: how it calls one."""

import pytest
import torch

from refattn import chunked_prefill, metadata
from refattn.conformance import attend, prepare


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
