"""Plans of batches on a device, where tensors are not read: what a plan needs besides has to be said.

A tensor on the device "meta" holds nothing, so it stands for one on a GPU.
"""

import importlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

import fastattn.cascade
import fastattn.mla
import fastattn.quantized
import fastattn.speculative
from refattn.batch import Batch, Prefix
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan
from refattn.ranks import Shard
from refattn.scales import Fp8Scales
from tests.helpers.batches import build
from tests.table import CASE, PATHS, share

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
BATCH = build(CASE).batch
TOKENS = BATCH.num_tokens
TABLES = ("cu_seqlens_q", "seq_lens", "block_table")
UNKNOWN = replace(BATCH, num_tokens=None, **{name: getattr(BATCH, name).to("meta") for name in TABLES})
KNOWN = replace(UNKNOWN, num_tokens=TOKENS)
SHARED = [Prefix(0, 3, 32)]
NEEDED = "num_tokens: expected the number of query rows, which a window needs, got None"
SLOPES = dict(alibi_slopes=torch.zeros(4, device="meta"))


def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(path: str, batch: Batch, **arguments):
    return importlib.import_module(f"fastattn.{path}").plan(batch, **arguments)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("cascade", dict(prefixes=SHARED, block_size=16, window_size=(33, 2))),
        ("cascade", dict(prefixes=SHARED, block_size=16, window_size=(0, -1))),
        ("context_parallel", dict(shard=Shard(0, 2), block_size=16, window_size=(33, 0))),
    ],
    ids=["cascade", "cascade-narrow", "context_parallel"],
)
def test_a_window_over_keys_of_others_needs_the_number_of_tokens(path, arguments):
    """Where queries are not the last tokens of their keys; before, a cascade took them for that."""
    with pytest.raises(ValueError, match=NEEDED) as error:
        plan_of(path, UNKNOWN, **arguments)
    assert "dataclasses.replace(batch, num_tokens=...)" in str(error.value)
    plan = plan_of(path, KNOWN, **arguments)
    levels = plan.levels[:-1] if path == "cascade" else (plan.context,)
    assert all(level.positions.shape == (TOKENS,) for level in levels)


NEED_NONE = {
    "cascade": ("cascade", dict(prefixes=SHARED, block_size=16)),
    "cascade-wide": ("cascade", dict(prefixes=SHARED, block_size=16, window_size=(69, 0))),
    "empty-cascade": ("cascade", dict(prefixes=(), block_size=16, window_size=(3, 0))),
    "context_parallel": ("context_parallel", dict(shard=Shard(0, 2), block_size=16)),
    "context_parallel-wide": ("context_parallel", dict(shard=Shard(0, 2), block_size=16, window_size=(69, 0))),
    "chunked_prefill": ("chunked_prefill", dict(block_size=16, window_size=(3, 2), causal=False)),
    "differential": ("differential", dict(block_size=16, window_size=(3, 0))),
    "quantized": ("quantized", dict(block_size=16, window_size=(3, 0))),
    "varlen": ("varlen", dict(window_size=(3, 0))),
    "sliding_window": ("sliding_window", dict(block_size=16, window_size=(3, 0))),
    "local": ("local", dict(block_size=16, chunk_size=32, window_size=(3, 0))),
    "mla": ("mla", dict(block_size=16)),
}


@pytest.mark.parametrize(("path", "arguments"), NEED_NONE.values(), ids=NEED_NONE)
def test_no_other_plan_needs_it(path, arguments):
    """Their queries are the last tokens of their keys, or see all of them."""
    plan = plan_of(path, UNKNOWN, **arguments)
    plans = {"cascade": lambda: plan.levels, "context_parallel": lambda: (plan.context, plan.own)}
    assert all(one.positions is None for one in plans.get(path, lambda: (plan,))())


def test_positions_of_trees_are_as_many_as_their_nodes_can_be():
    """A bound, and not a guess: where rows of padding stand does not matter. A maximum of rows may be any number."""
    trees = fastattn.speculative.make_trees([[-1, 0, 0], [-1], [-1, *range(19)]], device="meta")
    for batch, rows in ((UNKNOWN, 60), (replace(UNKNOWN, max_query_len=2**31 - 1), 60), (KNOWN, TOKENS)):
        plan = fastattn.speculative.plan(batch, block_size=16, trees=trees, window_size=(3, 0))
        assert plan.whole.positions.shape == (rows,)


def test_alibi_in_a_cascade_of_unknown_positions_is_refused():
    """Slopes are a layer's, so it is the layer that finds out."""
    query, pool = nothing(TOKENS + 2, 4, 64), nothing(40, 16, 2, 64)
    quantized_values = nothing(40, 16, 2, 64, dtype=torch.float8_e4m3fn)
    plan = plan_of("cascade", UNKNOWN, prefixes=SHARED, block_size=16)
    refusal = "alibi_slopes: expected a plan that knows the positions of its queries, got one .* num_tokens"
    with pytest.raises(ValueError, match=refusal):
        fastattn.cascade.attention(query, pool, pool, plan, AttentionOptions(**SLOPES))
    with pytest.raises(ValueError, match=refusal):
        options = AttentionOptions(**SLOPES)
        fastattn.quantized.attention(
            query, quantized_values, quantized_values, plan, options, scales=Fp8Scales(1.0, 1.0)
        )
    known = plan_of("cascade", KNOWN, prefixes=SHARED, block_size=16)
    Pages(pool, pool).check(query, known, AttentionOptions(**SLOPES), None, False)
    Pages(pool, pool).check(query, plan, AttentionOptions(), None, False)


def test_alibi_in_a_prefill_of_unknown_positions_is_refused():
    query, cache = nothing(TOKENS, 4, 64), nothing(40, 16, 64)
    projections = dict(key_projection=nothing(4, 48, 48), value_projection=nothing(4, 32, 48))

    def prefill(batch, **arguments):
        plan = fastattn.mla.plan_prefill(batch, block_size=16, workspace=60, **arguments)
        options = AttentionOptions(softmax_scale=0.1, **SLOPES)
        tokens = query[:, 0, :48], query[:, 1, :16]
        return fastattn.mla.prefill(query, *tokens, cache, plan, options, **projections)

    with pytest.raises(ValueError, match="alibi_slopes: expected a plan that knows the positions of its queries"):
        prefill(UNKNOWN)
    with pytest.raises(NotImplementedError, match="no kernel computes attention to rows"):  # it comes to the kernels
        prefill(KNOWN)
    with pytest.raises(NotImplementedError, match="no kernel computes attention to rows"):
        prefill(UNKNOWN, max_context_len=0)  # without a context there are no positions


def test_a_level_with_a_window_says_where_its_queries_stand():
    """Else a kernel would take them for the last of its tokens."""
    levels = plan_of("cascade", KNOWN, prefixes=SHARED, block_size=16, window_size=(33, 2)).levels
    without = replace(levels[0], positions=None)
    with pytest.raises(
        ValueError, match=r"levels\[0\]: expected the positions of its queries, as it has a mask, got N"
    ):
        CascadePlan(KNOWN, (without, *levels[1:]))
    assert isinstance(levels[1], Plan) and levels[1].positions is None


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
@pytest.mark.parametrize("num_tokens", [TOKENS - 1, TOKENS + 1])
def test_another_number_of_tokens_is_named_where_it_can_be_read(package, num_tokens):
    path = importlib.import_module(f"{package}.chunked_prefill")
    with pytest.raises(
        ValueError, match=f"num_tokens: expected {TOKENS}, the query rows of the batch, got {num_tokens}"
    ):
        path.plan(replace(BATCH, num_tokens=num_tokens), block_size=16)


@pytest.mark.parametrize("path", ["cascade", "local", "sliding_window", "sparse", "speculative"])
def test_the_reference_makes_each_batch_of_a_plan_on_the_device_of_the_step(path, monkeypatch):
    """Its plans read the lengths, so "meta" cannot stand for a GPU; and a device left out is right on a CPU."""
    planned = importlib.import_module(f"refattn.{path}")
    made = mock.Mock(wraps=planned.make_batch)
    monkeypatch.setattr(planned, "make_batch", made)
    PATHS[path].made_plan("refattn", share(BATCH, 16), 16)
    assert made.called
    assert all(call.kwargs.get("device") == BATCH.device for call in made.call_args_list)
