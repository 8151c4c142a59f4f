"""The backend for vLLM where ranks share the keys of a sequence, over doubles of vLLM's classes and of its ranks.

`make vllm-gpu-test` runs the same inside vLLM over two GPUs (`vllm_gpu.py`).
"""

import multiprocessing
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from refattn import chunked_prefill, context_parallel, metadata
from refattn.ranks import Shard, simulate_ranks
from refattn.scales import Fp8Scales
from tests.helpers import vllm_doubles
from tests.helpers.ranks import attend_on_all, deal
from tests.helpers.tolerance import assert_matches_reference
from tests.helpers.vllm_layers import (
    DV,
    NOPE,
    ROPE,
    R,
    common_metadata,
    forward,
    latent_layer,
    update,
    vllm_layer,
    vllm_pool,
)
from tests.helpers.vllm_one_card import OverGloo
from twinattn.kit import HARMLESS, Case, build, plan_and_attend

CASE = Case("mixed", ((1, 20), (4, 33), (10, 17), (7, 7), (1, 1), (0, 0)), heads=(4, 1), head_size=32, padding_rows=3)
DECODES = Case("decodes", ((1, 20), (1, 2), (1, 1), (1, 40)), heads=(4, 1), head_size=32)
VARIANTS = {
    "plain": ({}, {}),
    "softcap and sinks": (dict(logits_soft_cap=5.0), dict(softcap=5.0)),
    "alibi": (dict(alibi_slopes=[0.5, 0.25, 1.0, 0.1]), dict(alibi_slopes=torch.tensor([0.5, 0.25, 1.0, 0.1]))),
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
HEADS = 2  # of a rank, over latents


@pytest.fixture
def backend(monkeypatch):
    return vllm_doubles.install(monkeypatch)


@pytest.fixture
def over_latents(monkeypatch):
    return vllm_doubles.install_over_latents(monkeypatch)


def config_of(interleave):
    return SimpleNamespace(parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave))


def on_ranks(num_ranks, function):
    """Call a function of a rank once per rank, each of which vLLM's functions then know."""

    def call(group):
        vllm_doubles.RANKS.set(vllm_doubles.GroupCoordinator(group))
        return function(group)

    return simulate_ranks(num_ranks, call)


def step_of_rank(builder, batch, table, shard, query_rows):
    """Make a step as vLLM does on a rank: the whole lengths, those of the rank, and its own table."""
    lens = context_parallel.local_lens(batch.seq_lens, shard)
    common = common_metadata(
        batch, query_rows, block_table_tensor=table, dcp_local_seq_lens=lens, seq_lens_cpu_upper_bound=batch.seq_lens
    )
    return builder.build(0, common)


@pytest.mark.parametrize("case", [CASE, DECODES], ids=lambda case: case.name)
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_of_two_ranks_give_what_the_reference_gives(backend, variant, cache, interleave, case):
    """Each rank writes its share of the new tokens, and has half of the query heads."""
    of_vllm, of_ours = VARIANTS[variant]
    of_ours = of_ours | (dict(sinks=SINKS) if "sinks" in variant else {})
    inputs, spec = build(case, poison=HARMLESS), SimpleNamespace(block_size=16, dcp_sharded=True)
    batch, pools = inputs.batch, (inputs.key_cache, inputs.value_cache)
    scales = Fp8Scales(0.37, 2.3)
    if cache == "fp8":
        pools = tuple(x.clamp(-400, 400).to(torch.float8_e4m3fn) for x in pools)
    new = [of_tokens(x, batch, len(inputs.query)) for x in (inputs.key_cache, inputs.value_cache)]

    def attend(group):
        shard, mine = Shard(group.rank, group.size, interleave), slice(2 * group.rank, 2 * group.rank + 2)
        dealt = SimpleNamespace()
        (dealt.key_cache, table), (dealt.value_cache, _) = (deal(x, batch, shard, seed=group.rank) for x in pools)
        pool = vllm_pool(dealt, "LBNHC")
        pool = pool.view(torch.uint8) if cache == "fp8" else pool
        builder = backend.FastAttentionMetadataBuilder(spec, ["0"], config_of(interleave), torch.device("cpu"))
        step = step_of_rank(builder, batch, table, shard, len(inputs.query))
        own = {name: x[mine] if name == "alibi_slopes" else x for name, x in of_vllm.items()}
        own |= dict(sinks=SINKS[mine]) if "sinks" in variant else {}
        impl = backend.FastAttentionImpl(2, 32, 0.2, num_kv_heads=1, kv_cache_dtype=cache, **own)
        layer, output = vllm_layer(backend, "cpu"), torch.full((len(inputs.query), 2, 32), 7.0)
        whole = metadata.make_batch(batch.query_lens.tolist(), batch.seq_lens.tolist(), table.tolist())
        slots = context_parallel.slot_mapping(whole, len(inputs.query), shard=shard, block_size=16)
        update(impl, layer, *new, pool, slots)
        forward(impl, layer, inputs.query[:, mine], *new, pool, step, output)
        assert not step.plans and list(step.over_ranks) == [False]
        return output

    output = torch.cat(on_ranks(2, attend), dim=1)
    rows = slice(0, batch.num_tokens)
    assert (output[batch.num_tokens :] == 7.0).all(), "padding is not written"
    arguments = inputs.query[rows], inputs.key_cache, inputs.value_cache, batch
    reference = partial(plan_and_attend, chunked_prefill)
    if cache == "fp8":
        stored = dict(quantized=pools, scales=scales, interleave=interleave)
        reference = partial(attend_on_all, "refattn", 2, **stored)
    lse = reference(*arguments, softmax_scale=0.2, **of_ours, return_lse=True)[1]
    assert_matches_reference(output[rows], lse, reference, *arguments, softmax_scale=0.2, **of_ours)


def of_tokens(cache, batch, rows):
    """Read the keys of the new tokens out of a whole pool; padding holds NaN."""
    out, lists = (
        cache.new_full((rows, *cache.shape[2:]), torch.nan),
        (batch.block_table.tolist(), batch.seq_lens.tolist()),
    )
    for (q0, q1), blocks, seq_len in zip(batch.query_rows(), *lists, strict=True):
        for row in range(q0, q1):
            at = seq_len - (q1 - row)
            out[row] = cache[blocks[at // cache.shape[1]], at % cache.shape[1]]
    return out


@torch.no_grad()
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize(
    "lens", [((1, 20), (1, 1), (10, 37), (4, 4), (2, 30)), ((1, 20), (1, 2)), ((9, 20),), ((9, 9), (3, 3))]
)
def test_layers_over_latents_of_two_ranks_are_the_formula(over_latents, lens, interleave):
    """Each rank has half of the heads, and its share of the latents, new ones included."""
    torch.manual_seed(0)
    queries, lengths = zip(*lens, strict=True)
    weight = torch.nn.Linear(R, 2 * HEADS * (NOPE + DV), bias=False).weight.view(2, HEADS, NOPE + DV, R)
    latents = [torch.randn(s, R + ROPE) for s in lengths]
    query, new = (
        torch.randn(sum(queries), 2 * HEADS, NOPE + ROPE),
        torch.cat([x[-q:] for x, q in zip(latents, queries, strict=True)]),
    )
    columns = max(lengths)
    whole = metadata.make_batch(queries, lengths, [[*range(columns * i, columns * (i + 1))] for i in range(len(lens))])
    spec = SimpleNamespace(block_size=16, dcp_sharded=True)

    def attend(group):
        shard, mine = Shard(group.rank, group.size, interleave), slice(HEADS * group.rank, HEADS * (group.rank + 1))
        pool = torch.full((columns * len(lens), 16, R + ROPE), 3.0)
        for x, blocks, (q, s) in zip(latents, whole.block_table, lens, strict=True):
            own = context_parallel.own_positions(s - q, shard)
            pool[blocks[torch.arange(len(own)) // 16], torch.arange(len(own)) % 16] = x[own]
        projection = torch.nn.Linear(R, HEADS * (NOPE + DV), bias=False)
        projection.weight.copy_(weight[group.rank].flatten(0, 1))
        layer, _ = latent_layer(over_latents, num_heads=HEADS, kv_b_proj=projection)
        layer.need_to_return_lse_for_decode = True
        slots = context_parallel.slot_mapping(whole, len(query), shard=shard, block_size=16)
        written = dict(kv_c_normed=new[:, :R], k_pe=new[:, None, R:], kv_cache=pool, slot_mapping=slots)
        vllm_doubles.call(layer, "MLAAttentionImpl.do_kv_cache_update", **written, kv_cache_dtype="auto")
        builder = over_latents.FastMLAMetadataBuilder(spec, ["0"], config_of(interleave), torch.device("cpu"))
        step = step_of_rank(builder, whole, whole.block_table, shard, len(query))
        t, output = step.num_decode_tokens, torch.zeros(len(query), HEADS * DV)
        if step.num_prefills:
            tensors = dict(kv_c_normed=new[t:, :R], k_pe=new[t:, None, R:], kv_c_and_k_pe_cache=pool, output=output[t:])
            vllm_doubles.call(layer, "MLAAttentionImpl.forward_mha", q=query[t:, mine], attn_metadata=step, **tensors)
        if step.num_decodes:
            absorbed = torch.einsum("thn,hnr->thr", query[:t, mine, :NOPE], weight[group.rank, :, :NOPE])
            own = torch.cat([absorbed, query[:t, mine, NOPE:]], -1)
            given = dict(q=group.all_gather(own, 1), kv_c_and_k_pe_cache=pool, attn_metadata=step)
            part, lse = vllm_doubles.call(layer, "MLAAttentionImpl.forward_mqa", **given)
            assert torch.equal(step.decode.seq_lens == 0, lse.isneginf().all(1)), "vLLM looks for ranks without a key"
            weights = group.all_gather(lse[None], 0).softmax(0)[group.rank]
            merged = group.reduce_scatter(part * weights[..., None], 1)
            output[:t] = torch.einsum("thr,hvr->thv", merged, weight[group.rank, :, NOPE:]).flatten(1)
        return output.view(-1, HEADS, DV)

    output, row, heads = torch.cat(on_ranks(2, attend), dim=1), 0, weight.flatten(0, 1)
    for x, (q, s) in zip(latents, lens, strict=True):
        made = torch.einsum("sr,hnr->hsn", x[:, :R], heads[:, :NOPE])
        key = torch.cat([made, x[:, R:].expand(2 * HEADS, -1, -1)], -1)
        value = torch.einsum("sr,hvr->hsv", x[:, :R], heads[:, NOPE:])
        mask = torch.ones(q, s, dtype=torch.bool).tril(s - q)
        mine = query[row : row + q].transpose(0, 1)
        expected = scaled_dot_product_attention(mine, key, value, attn_mask=mask, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(output[row : row + q], expected, rtol=1e-4, atol=1e-5)
        row += q


def test_a_prompt_without_context_exchanges_nothing(over_latents):
    """All ranks know it, by the length of the whole sequence, and none waits for another."""
    spec, batch = SimpleNamespace(block_size=16, dcp_sharded=True), metadata.make_batch([9, 3], [9, 3], [[0], [1]])

    def plan(group):
        builder = over_latents.FastMLAMetadataBuilder(spec, ["0"], config_of(1), "cpu")
        return step_of_rank(builder, batch, batch.block_table, Shard(group.rank, group.size), 12).context

    assert on_ranks(2, plan) == [None, None]


def test_layers_whose_caches_are_whole_on_each_rank(backend, over_latents):
    """Those of a draft model may be, beside a model over ranks."""
    spec = SimpleNamespace(block_size=16, dcp_sharded=False)

    def shard(group):
        return [
            kind(spec, ["0"], None, torch.device("cpu")).shard
            for kind in (backend.FastAttentionMetadataBuilder, over_latents.FastMLAMetadataBuilder)
        ]

    assert on_ranks(2, shard) == [[None, None]] * 2


def test_a_capture_plans_anew(backend, monkeypatch):
    """A rank's lengths are computed from the whole ones, in the graph that a replay repeats."""
    batch = metadata.make_batch([1, 1], [5, 9], [[0], [1]])
    step = backend.FastAttentionMetadata(batch, 16, 2, shard=Shard(0, 2))
    plans = {}
    for captured in (False, True, False, True):
        monkeypatch.setattr(backend, "is_capturing", lambda device, captured=captured: captured)
        assert plans.setdefault(captured, step.plan_over_ranks()) is step.plan_over_ranks()
    assert plans[False] is not plans[True]


@pytest.mark.parametrize(
    ("name", "given"),
    [("sliding_window", 5), ("use_alibi_sqrt", True), ("kv_sharing_target_layer_name", "layers.0")],
)
def test_what_a_layer_over_ranks_refuses(backend, monkeypatch, name, given):
    assert backend.FastAttentionImpl(4, 32, 0.2, **{name: given})
    monkeypatch.setattr(vllm_doubles.AttentionImplBase, "dcp_world_size", 2)  # as vLLM does before __init__

    def make(group):
        assert backend.FastAttentionImpl(4, 32, 0.2)
        with pytest.raises(NotImplementedError, match=f"{name}: expected none over 2 ranks"):
            backend.FastAttentionImpl(4, 32, 0.2, **{name: given})

    on_ranks(2, make)


@pytest.mark.parametrize("disabled", [True, False])
def test_ranks_that_cannot_add_are_refused(backend, over_latents, monkeypatch, disabled):
    """VLLM would give both backends uninitialised memory for sums over ranks; one without ranks needs none."""
    communicator = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=disabled))
    assert backend.FastAttentionImpl(4, 32, 0.2)
    assert latent_layer(over_latents)
    monkeypatch.setattr(vllm_doubles.AttentionImplBase, "dcp_world_size", 2)

    def make(group):
        vllm_doubles.RANKS.set(vllm_doubles.GroupCoordinator(group, communicator))
        for layer in (lambda: backend.FastAttentionImpl(4, 32, 0.2), lambda: latent_layer(over_latents)):
            if disabled:
                with pytest.raises(RuntimeError, match="reduce_scatter: expected vLLM's NCCL communicator"):
                    layer()
            else:
                assert layer()

    on_ranks(2, make)


def drawn_of_rank(rank):
    """Draw what ranks on one GPU exchange: numbers of several types, one with strides, one without an element."""
    numbers = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 6, 4, generator=numbers)
    whole = torch.randint(-9, 9, (4, 2), generator=numbers)
    return [x, x.bfloat16(), x.to(torch.float8_e4m3fn), x.transpose(0, 2), whole, x[:0]]


def exchange(rank, folder):
    """Be one of two processes that gather and add up as those of `vllm_gpu.py` do, and leave what they get."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    group = OverGloo()
    group.device_group, group.world_size, group.rank_in_group = torch.distributed.group.WORLD, 2, rank
    names = ("all_gather", "all_reduce", "reduce_scatter")
    given = drawn_of_rank(rank)
    found = [[getattr(group, name)(x, *[1] * (name != "all_reduce")) for name in names] for x in given]
    assert all(torch.equal(x.double(), y.double()) for x, y in zip(given, drawn_of_rank(rank), strict=True))
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_on_one_gpu_gather_and_add_over_gloo(tmp_path):
    """What `make vllm-gpu-test ARGS="-k one_card"` puts in the place of NCCL, between two processes."""
    multiprocessing.set_forkserver_preload([OverGloo.__module__])
    torch.multiprocessing.start_processes(exchange, (str(tmp_path),), nprocs=2, start_method="forkserver")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for i, parts in enumerate(zip(*map(drawn_of_rank, range(2)), strict=True)):
        kind, (one, other) = parts[0].dtype, (x.double() for x in parts)
        total = (one + other).to(kind)
        for rank in range(2):
            gathered, reduced, scattered = found[rank][i]
            assert {x.dtype for x in found[rank][i]} == {kind}
            assert torch.equal(gathered.double(), torch.cat([one, other], 1))
            torch.testing.assert_close(reduced.double(), total.double(), rtol=1e-6, atol=1e-6)
            assert torch.equal(scattered.double(), reduced.double().chunk(2, 1)[rank]) and scattered.is_contiguous()


def test_prompts_over_ranks_are_refused(backend, monkeypatch):
    monkeypatch.setattr(vllm_doubles.AttentionImplBase, "pcp_world_size", 2)
    with pytest.raises(NotImplementedError, match="pcp_world_size: expected 1, got 2"):
        backend.FastAttentionImpl(4, 32, 0.2)


def test_lengths_of_a_rank_are_refused_where_there_is_one(backend):
    """A step with them, where no keys are shared, is one that is not understood."""
    builder = backend.FastAttentionMetadataBuilder(SimpleNamespace(block_size=16), ["0"], None, torch.device("cpu"))
    batch = metadata.make_batch([1], [5], [[0]])
    with pytest.raises(NotImplementedError, match="dcp_local_seq_lens: expected none, got Tensor"):
        builder.build(0, common_metadata(batch, 1, dcp_local_seq_lens=torch.tensor([3])))
