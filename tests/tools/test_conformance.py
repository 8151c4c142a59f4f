"""The kit that proves a path: how it calls one."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.nn.attention import varlen

from refattn import chunked_prefill, metadata
from twinattn.kit import CASES, Case, Example, Workload, field, plan_and_attend, prepare
from twinattn.kit.adapters import ADAPTERS


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
        plan_and_attend(chunked_prefill, query, key_cache, None, batch, block_size=8)


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


@pytest.mark.parametrize(("name", "default"), [("fa3", 0), ("varlen", None)])
def test_adapters_that_claim_batch_invariance_ask_for_one_split(name, default, monkeypatch):
    """By the arguments of their documentation; on a CPU, none of them runs."""
    asked = []

    def records(query, key, value, *args, num_splits, **named):
        asked.append(num_splits)
        return torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])

    module = ModuleType("flash_attn_interface")
    module.__spec__, module.flash_attn_varlen_func = ModuleSpec("flash_attn_interface", None), records
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(varlen, "varlen_attn", records)
    kernel = ADAPTERS[name].kernel()
    assert kernel.takes("batch_invariant")
    example = Example("varlen", ((1, 5), (2, 3)), (4, 2))
    for options in ({}, {"batch_invariant": True}):
        kernel(example, example.tensors(torch.float16) | options)
    assert asked == [default, 1]


def test_what_is_not_claimed_is_listed_with_its_reason():
    def finding(name, outcome="not claimed"):
        return {"property": name, "outcome": outcome, "detail": "plans on the host"}

    found = {
        "reports": [{"kernel": "one", "findings": [finding("graph"), finding("mask", "honoured"), finding("out")]}]
    }
    assert field.list_not_claimed(found) == "- `one`: *graph, out*: plans on the host."
    assert field.list_not_claimed({"reports": []}) == "Everything was claimed."
