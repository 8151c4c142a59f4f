"""Latents by FlashMLA and by FlashAttention-3's second query: what they are asked, what they refuse, what they answer.

Where there is no GPU, doubles stand in for both. They compute with the formula of the reference and answer as the
packages do: whole pages are multiplied, and rows that see nothing have a log-sum-exp of `+inf`.
"""

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fastattn.sparse
import fastattn.speculative
import refattn.mla
import refattn.sparse
import refattn.speculative
from fastattn.kernels import Problem, attention_problem, order, schedule
from fastattn.kernels.flash import fa3, flash_mla
from refattn.batch import Batch
from refattn.keys import Latents, PackedLatents, Pages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from tests.helpers import gpu_package_doubles
from tests.helpers.batches import Case, build, poisoned
from tests.helpers.tolerance import assert_matches_reference

RANK, ROPE, SPARE = 512, 64, 8
UNIFORM = [
    Case("decodes", ((1, 5), (1, 33), (1, 0), (1, 130)), heads=(4, 1), block_size=64),
    Case("drafts", ((3, 70), (3, 3), (3, 1)), heads=(2, 1), block_size=64, padding_rows=2),
]
RAGGED = Case("ragged", ((4, 60), (1, 33), (0, 5), (2, 0)), heads=(2, 1), block_size=64, padding_rows=2)
OPTIONS = {
    "plain": {},
    "negative-scale": dict(softmax_scale=-0.05),
    "no-scale": dict(softmax_scale=0.0),
    "sinks": dict(sinks=True),
}
USUAL = Problem(
    "attend",
    torch.device("cuda"),
    torch.bfloat16,
    *("latents", 1, False),
    *(128, 1, RANK + ROPE, RANK, 64, 1, 4096, 4, (-1, 0)),
    uniform=True,
)


def with_whole_pages(out, cache, rank, tables, lengths, queries):
    """Multiply what lies past each sequence's end in its last page by a weight of 0, where pages are whole tiles."""
    for i, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
        if cache.shape[1] >= fa3.SMALLEST_TILE and length % cache.shape[1]:
            past = cache[table[length // cache.shape[1]], length % cache.shape[1] :, :rank]
            rows = i if queries is None else queries == i
            out[rows] += (0 * past.float()).sum(0).to(out)
    return out


class FlashMLA:
    """Answers as the package does on Hopper, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.schedules = 0

    def make_schedule(self):
        self.schedules += 1
        return gpu_package_doubles.FlashMLASchedMeta()

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v, *, topk_length, use_legacy):
        """Attend from each query to the slots that it has, fewer than a multiple of 128, or outside of the pool."""
        self.calls.append(dict(q=q, kv=kv, indices=indices, topk_length=topk_length))
        assert use_legacy and sm_scale > 0 and d_v == RANK and q.shape[1] in (64, 128)
        assert indices.dtype == topk_length.dtype == torch.int32 and indices.shape[1] == kv.shape[1] == 1
        assert indices.stride(-1) == 1 and indices.shape[2] % 128 == 0 and topk_length.shape == (len(q),)
        assert all(x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (q, kv))
        table = torch.where(torch.arange(indices.shape[2]) < topk_length[:, None], indices[:, 0], -1)
        is_slot = (table >= 0) & (table < len(kv))
        tables = [row[some] for row, some in zip(table, is_slot, strict=True)]
        where = (RANK, torch.arange(len(q) + 1), tables, is_slot.sum(1), sm_scale)
        out, lse = gpu_package_doubles.over_latents(q, kv, *where, causal=False)
        return out.to(q.dtype), None, torch.where(lse == -math.inf, math.inf, lse)

    def get_mla_decoding_metadata(self, seqlens_k, num_q_tokens, h_k, h_q, is_fp8_kvcache, topk, use_legacy):
        assert use_legacy and is_fp8_kvcache and topk is None and h_k == 1 and num_q_tokens % h_q == 0
        assert seqlens_k.is_contiguous() and seqlens_k.min() > 0, "it would begin with the page before the first"
        self.schedules += 1
        return (num_q_tokens, h_q), seqlens_k.clone()

    def over_quantized(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, descale_q, descale_k, **options
    ):
        """Multiply quantized values, with weights that are not rounded here, so that the tolerance is that of any
        kernel.

        The package answers in bfloat16, in which the interpreter knows no NaN.
        """
        assert q.dtype == k_cache.dtype == torch.float8_e4m3fn and options.pop("is_fp8_kvcache")
        assert descale_q.shape == descale_k.shape == (1,) and descale_q.dtype == descale_k.dtype == torch.float32
        assert torch.equal(schedule.num_splits, cache_seqlens), "the schedule is of other lengths"
        assert schedule.tile_scheduler_metadata == (q.shape[1] * q.shape[2], q.shape[2])
        for table, length in zip(block_table, cache_seqlens.tolist(), strict=True):
            assert table[: -(-length // 64)].min() >= 0 and table[: -(-length // 64)].max() < len(k_cache)
        plain = gpu_package_doubles.FlashMLASchedMeta()
        numbers = q.float() * descale_q, k_cache.float() * descale_k
        out, lse = gpu_package_doubles.flash_mla_with_kvcache(
            *numbers, block_table, cache_seqlens, head_dim_v, plain, **options
        )
        return with_whole_pages(out.half(), numbers[1][:, :, 0], RANK, block_table, cache_seqlens, None), lse

    def of_packed(self, q, k_cache, head_dim_v, schedule, *, indices, softmax_scale, is_fp8_kvcache, use_legacy):
        """Attend from each query to packed rows, as the package does; it follows any slot but -1."""
        assert use_legacy and is_fp8_kvcache and softmax_scale > 0 and head_dim_v == RANK and q.shape[2] in (64, 128)
        assert q.shape[1] == indices.shape[1] == k_cache.shape[2] == 1 and k_cache.shape[3] == 656
        assert k_cache.is_contiguous() and k_cache.dtype == torch.uint8
        assert indices.dtype == torch.int32 and indices.stride(-1) == 1 and indices.shape[2] % 128 == 0
        if schedule.tile_scheduler_metadata is None:  # made by the first call, for these sizes
            schedule.tile_scheduler_metadata = (*q.shape[:3], indices.shape, k_cache.shape[1])
        assert schedule.tile_scheduler_metadata == (*q.shape[:3], indices.shape, k_cache.shape[1])
        out, lse = gpu_package_doubles.over_packed(q, k_cache, indices, head_dim_v, softmax_scale)
        return out, torch.where(lse == -math.inf, math.inf, lse)

    def flash_mla_with_kvcache(self, q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, **options):
        if options.get("indices") is not None:
            assert block_table is cache_seqlens is None
            self.calls.append(dict(q=q, k_cache=k_cache, schedule=schedule, **options))
            return self.of_packed(q, k_cache, head_dim_v, schedule, **options)
        self.calls.append(dict(q=q, k_cache=k_cache, block_table=block_table, schedule=schedule, **options))
        for x in (q, k_cache):
            assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            assert all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
        assert q.shape[-1] == k_cache.shape[-1] == RANK + ROPE and head_dim_v == RANK
        assert block_table.dtype == cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
        if "is_fp8_kvcache" in options:
            out, lse = self.over_quantized(q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, **options)
            return out, torch.where(lse == -math.inf, math.inf, lse)
        out, lse = gpu_package_doubles.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, **options
        )
        out = with_whole_pages(out, k_cache[:, :, 0], RANK, block_table, cache_seqlens, torch.arange(len(q)))
        return out, torch.where(lse == -math.inf, math.inf, lse)


class SecondQuery:
    """Answers as FlashAttention-3's operator does over latents."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def fwd(self, *arguments):
        asked = gpu_package_doubles.by_name(gpu_package_doubles.FA3_FORWARD, arguments)
        self.calls.append(asked)
        q, k, v, q_v = (asked[name] for name in ("q", "k", "v", "q_v"))
        for x in (q, k, v, q_v):
            assert x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
        assert [x.shape[-1] for x in (q, k, v, q_v)] == [ROPE, ROPE, RANK, RANK]
        assert (asked["window_size_left"], asked["window_size_right"]) == (-1, 0 if asked["is_causal"] else -1)
        assert asked["softmax_scale"] > 0 and asked["page_table"].stride(-1) == 1
        assert asked["num_splits"] == 1, "it would leave out a split whose scores are NaN"
        ends, table, lengths = asked["cu_seqlens_q"], asked["page_table"], asked["seqused_k"]
        cache = torch.cat([v, k], -1).squeeze(2)
        rows = torch.cat([q_v, q], -1)
        where = (RANK, ends, table, lengths, asked["softmax_scale"])
        out, lse = gpu_package_doubles.over_latents(rows, cache, *where, causal=asked["is_causal"])
        queries = torch.repeat_interleave(torch.arange(len(lengths)), ends.diff())
        answer = q.new_full((*q.shape[:2], RANK), math.nan)
        answer[: len(out)] = with_whole_pages(out, cache, RANK, table, lengths, queries)
        logs = torch.full((q.shape[1], q.shape[0]), math.nan)
        logs[:, : len(lse)] = torch.where(lse == -math.inf, math.inf, lse).T
        return [answer, logs, q.new_empty(0), q.new_empty(0)]


@pytest.fixture
def flash_mla_package(monkeypatch, device):
    """A double of the package."""
    if device == "cuda":
        pytest.skip("a double of it computes on a CPU; tests/paths/test_mla.py runs the package itself")
    double, package, module = FlashMLA(), ModuleType("flash_mla"), ModuleType(flash_mla.INTERFACE)
    package.__path__, package.has_legacy = [], lambda: True
    module.flash_mla_with_kvcache = double.flash_mla_with_kvcache
    module.FlashMLASchedMeta = double.make_schedule
    module.get_mla_decoding_metadata = double.get_mla_decoding_metadata
    module.flash_mla_sparse_fwd = double.flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    monkeypatch.setitem(sys.modules, flash_mla.INTERFACE, module)
    return double


@pytest.fixture
def fa3_library(device):
    """A double of vLLM's library."""
    if device == "cuda":
        pytest.skip("a double of it computes on a CPU; tests/paths/test_mla.py runs the library itself")
    double = SecondQuery()
    fa3._cannot_load.cache_clear()
    library = torch.library.Library(fa3.LIBRARY, "DEF")
    library.define(f"fwd({gpu_package_doubles.FA3_FORWARD}) -> Tensor[]")
    library.impl("fwd", double.fwd, "CPU")
    yield double
    library._destroy()
    fa3._cannot_load.cache_clear()


def latents(case: Case) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Lay a case out as queries, a pool with unused columns, and a batch, with poison all around."""
    inputs = build(replace(case, head_size=RANK + ROPE, value_head_size=1), dtype=torch.float16)
    n, p = inputs.key_cache.shape[:2]
    unused = poisoned(n * p, 1, SPARE).view(n, p, SPARE).half()
    return inputs.query, torch.cat([inputs.key_cache[:, :, 0], unused], -1), inputs.batch


def filled(options: dict, heads: int) -> AttentionOptions:
    sinks = dict(sinks=torch.linspace(-2.0, 30.0, heads)) if "sinks" in options else {}
    return AttentionOptions(**(dict(softmax_scale=0.05) | options | sinks))


def hold_to_the_reference(kernel: ModuleType, case: Case, options: dict) -> None:
    """Call a kernel, past the choice, and hold its answers to the rule."""
    query, cache, batch = latents(case)
    options = filled(options, case.heads[0])

    def by_reference(query, cache, batch, **asked):
        plan = refattn.mla.plan(batch, block_size=case.block_size)
        return refattn.mla.attention(query, cache, plan, options, latent_rank=RANK, **asked)

    out, lse = kernel.mla(query, cache, Plan(batch, case.block_size), options, RANK, None)
    assert_matches_reference(out, lse, by_reference, query, cache, batch)


# --- their answers ---


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", UNIFORM, ids=str)
def test_flash_mla_agrees_with_the_reference(case, options, flash_mla_package):
    hold_to_the_reference(flash_mla, case, options)
    (asked,) = flash_mla_package.calls
    assert asked["use_legacy"] and asked["causal"] and asked["q"].shape[:2] == (len(case.lens), case.lens[0][0])


QUANTIZED = dict(cache_scale=0.7, query_scale=0.013)


def in_8_bits(case: Case) -> tuple[torch.Tensor, Latents, Batch]:
    """Lay a case out as queries in float16 and latents in fp8, with quantized values of NaN all around."""
    query, cache, batch = latents(case)
    unused = torch.zeros(*cache.shape[:2], 8).half()  # a quantized row has to be a multiple of 16 bytes
    quantized = torch.cat([cache, unused], -1).to(torch.float8_e4m3fn)
    return query, Latents(quantized, RANK, **QUANTIZED, fp8_weights=True), batch


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", UNIFORM, ids=str)
def test_products_of_fp8_values_agree_with_the_reference(case, options, flash_mla_package):
    """A sequence without keys is one of a key there, whatever its table says; layers have scales of their own."""
    query, keys, batch = in_8_bits(case)
    options = filled(options, case.heads[0])
    assert batch.block_table is not None
    batch.block_table[batch.seq_lens == 0] = -1

    def by_reference(query, cache, batch, **asked):
        plan = refattn.mla.plan(batch, block_size=64)
        return refattn.mla.attention(query, cache, plan, options, latent_rank=RANK, **scales, **asked)

    plan = Plan(batch, 64)
    for scales in (QUANTIZED, dict(cache_scale=1.0, query_scale=0.1)):
        keys = keys._replace(**scales)
        out, lse = flash_mla.attend(query, keys, plan, options, None)
        assert_matches_reference(out, lse, by_reference, query, keys.cache, batch)
    first, second = flash_mla_package.calls
    assert first["schedule"] is second["schedule"] and first["k_cache"].data_ptr() == keys.cache.data_ptr()
    assert first["descale_k"] == torch.tensor(0.7) and second["descale_q"] == torch.tensor(0.1)
    batch.block_table[0, 0] = batch.block_table[0, 0].clone()  # a table that was written to is read again
    flash_mla.attend(query, keys, plan, options, None)
    assert flash_mla_package.calls[-1]["schedule"] is not second["schedule"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", [*UNIFORM, RAGGED, replace(RAGGED, name="small-pages", block_size=16)], ids=str)
def test_a_second_query_agrees_with_the_reference(case, options, fa3_library):
    hold_to_the_reference(fa3, case, options)


def test_no_pool_is_copied(flash_mla_package, fa3_library):
    query, cache, batch = latents(UNIFORM[0])
    for kernel in (flash_mla, fa3):
        kernel.mla(query, cache, Plan(batch, 64), filled({}, 4), RANK, None)
    (mla,), (second,) = flash_mla_package.calls, fa3_library.calls
    assert mla["k_cache"].data_ptr() == second["v"].data_ptr() == cache.data_ptr()
    assert second["k"].data_ptr() == cache[..., RANK:].data_ptr()
    assert mla["q"].data_ptr() == second["q_v"].data_ptr() == query.data_ptr()
    assert mla["softmax_scale"] == second["softmax_scale"] == 0.05


@pytest.mark.parametrize("case", [UNIFORM[0], replace(UNIFORM[0], name="one", lens=((1, 5), (1, 9)))], ids=str)
def test_a_table_whose_columns_lie_apart_is_copied(case, flash_mla_package, fa3_library):
    """One of a single column too, which torch takes for contiguous whatever its stride."""
    query, cache, batch = latents(case)
    columns = 1 if case.name == "one" else batch.block_table.shape[1]
    apart = replace(batch, block_table=batch.block_table.T.contiguous().T[:, :columns])
    assert apart.block_table.stride(-1) == batch.num_seqs
    for kernel in (flash_mla, fa3):
        both = [kernel.mla(query, cache, Plan(x, 64), filled({}, 4), RANK, None)[0] for x in (batch, apart)]
        assert torch.equal(*both)


@pytest.mark.parametrize("kernel", [flash_mla, fa3], ids=["flash_mla", "fa3"])
@pytest.mark.parametrize("lens", [((0, 5), (0, 0)), ((5, 0), (5, 0))], ids=["no-queries", "no-keys"])
def test_nothing_to_attend_to_asks_nothing(lens, kernel, flash_mla_package, fa3_library):
    query, cache, batch = latents(Case("nothing", lens, heads=(2, 1), block_size=64, padding_rows=2))
    out, lse = kernel.mla(query, cache, Plan(batch, 64), filled({}, 2), RANK, None)
    assert out.shape == (*query.shape[:2], RANK) and not out.any() and (lse == -math.inf).all()
    assert not flash_mla_package.calls and not fa3_library.calls


@pytest.mark.parametrize("options", [{}, dict(softmax_scale=-0.05), dict(sinks=True)], ids=["plain", "scale", "sinks"])
@pytest.mark.parametrize(("padding_rows", "topk"), [(0, 128), (3, 130)], ids=["all-rows", "padding"])
@pytest.mark.parametrize("rope", [64, 0], ids=["rotary", "alone"])
def test_selected_latents_agree_with_the_reference(rope, padding_rows, topk, options, flash_mla_package):
    """Some positions of each sequence, none, one twice, -1 between others; NaN in all latents that no query selects."""
    case = Case("", ((3, 70), (1, 33), (2, 260)), heads=(64, 1), block_size=64, padding_rows=padding_rows)
    query, cache, batch = latents(case)
    query, cache = (x[..., : RANK + rope].contiguous() for x in (query, cache))
    options = filled(options, 64)
    t = len(query)
    positions = torch.full((t, topk), -1, dtype=torch.int32)
    for row, (seq_len, count) in enumerate([(70, 60), (70, 0), (70, 70), (33, 33), (260, 128), (260, 1)]):
        positions[row, torch.randperm(topk)[:count]] = torch.randperm(seq_len)[:count].int()
    positions[0, :2] = positions[0].max()
    unseen = torch.ones(cache.shape[0] * 64, dtype=torch.bool)
    unseen[fastattn.sparse.slots(batch, positions, block_size=64).flatten().clamp(min=0).long()] = False
    cache.flatten(0, 1)[unseen] = math.nan

    def by_reference(query, cache, batch, **asked):
        plan = refattn.sparse.plan(batch, positions=positions, block_size=64)
        return refattn.sparse.latent_attention(query, cache, plan, options, latent_rank=RANK, **asked)

    plan = fastattn.sparse.plan(batch, positions=positions, block_size=64)
    keys = Latents(fastattn.sparse.by_token("cache", cache), RANK)
    out, lse = flash_mla.attend(query, keys, plan, options, None)
    assert_matches_reference(out, lse, by_reference, query, cache, batch)
    (asked,) = flash_mla_package.calls
    assert asked["kv"].data_ptr() == cache.data_ptr(), "the pool was copied"


@pytest.mark.covers("F214")
@pytest.mark.parametrize(
    ("heads", "padding_rows", "options"), [(64, 2, {}), (64, 0, OPTIONS["negative-scale"]), (128, 2, OPTIONS["sinks"])]
)
def test_packed_latents_agree_with_the_reference(heads, padding_rows, options, flash_mla_package):
    """Lists with -1, an empty one, garbage past each end, poison in every row that no query has selected."""
    case = Case("packed", ((3, 70), (2, 33), (1, 130)), heads=(heads, 1), block_size=24, padding_rows=padding_rows)
    query, cache, batch = latents(case)
    options, (n, p) = filled(options, heads), cache.shape[:2]
    packed = torch.full((n, p, 656), 0xFF, dtype=torch.uint8)
    positions = torch.full((len(query), 20), -1, dtype=torch.int32)
    for row, (seq_len, count) in enumerate([(70, 18), (70, 0), (70, 20), (33, 7), (33, 20), (130, 1)]):
        positions[row, torch.randperm(20)[:count]] = torch.randperm(seq_len)[:count].int()
    slots = fastattn.sparse.slots(batch, positions, block_size=p)
    seen = slots.flatten().unique()
    seen = seen[seen >= 0].long()
    rows = cache.flatten(0, 1)[seen]
    refattn.mla.write(rows[:, :RANK], rows[:, RANK : RANK + ROPE], packed, seen)

    def by_reference(query, packed, batch, **asked):
        plan = refattn.sparse.plan(batch, positions=positions, block_size=p)
        return refattn.sparse.latent_attention(query, packed, plan, options, latent_rank=RANK, **asked)

    keys = PackedLatents(fastattn.sparse.by_token("cache", packed), RANK)
    for _ in range(2):  # layers select anew, and share what depends on sizes alone
        plan = fastattn.sparse.plan(batch, positions=positions, block_size=p)
        table, lengths = plan.batch.block_table, plan.batch.seq_lens
        past = torch.arange(20) >= lengths[:, None]
        table[past] = torch.tensor([10**9, 0, -7]).repeat(40)[: int(past.sum())].int()
        out, lse = flash_mla.attend(query, keys, plan, options, None)
    assert_matches_reference(out, lse, by_reference, query, packed, batch)
    first, second = flash_mla_package.calls
    assert first["k_cache"].data_ptr() == packed.data_ptr(), "the pool was copied"
    assert first["schedule"] is second["schedule"]


def test_slots_of_a_prefill_end_with_the_list(flash_mla_package):
    """Its kernel reads what follows the list before it is left out, so a NaN there would spoil the answer."""
    case = Case("selected", ((1, 70), (1, 33)), heads=(64, 1), block_size=64)
    query, cache, batch = latents(case)
    positions = torch.tensor([[3, -1, 69], [5, 2, 8]], dtype=torch.int32)
    plan = fastattn.sparse.plan(batch, positions=positions, block_size=64)
    plan.batch.block_table[0, 2] = 1  # a slot of the pool, but past the end of the list
    flash_mla.attend(query, Latents(fastattn.sparse.by_token("cache", cache), RANK), plan, filled({}, 64), None)
    (asked,) = flash_mla_package.calls
    assert (asked["indices"][0, 0, :2] >= 0).all() and (asked["indices"][0, 0, 2:] == -1).all()
    assert (asked["indices"][1, 0, 3:] == -1).all()


# --- drafted trees: theirs is what lies before them ---


TREES = {
    "uniform": ([(-1, 0, 0), (-1, 0, 1), (-1, -1, 1)], Case("", ((3, 70), (3, 3), (3, 131)), (2, 1), block_size=64)),
    "many-rows": ([(-1, 0, 0)] * 2, Case("", ((3, 67), (3, 40)), (8, 1), block_size=64, padding_rows=2)),
    "tips": ([(-1, 0, 0, 1, 2), (-1, 0, 0)], Case("", ((2, 70), (2, 5)), (3, 1), block_size=64, padding_rows=1)),
}
RAGGED_TREES = (
    [(-1, 0, 0, 1), (-1,), (), (-1, 0)],
    Case("", ((4, 60), (1, 33), (0, 5), (2, 2)), (2, 1), padding_rows=2),
)


def verify(query, cache, batch, *, trees, options, twin=refattn, **asked):
    plan = twin.speculative.plan(batch, block_size=cache.shape[1], trees=trees)
    return twin.mla.attention(query, cache, plan, options, latent_rank=RANK, **asked)


@pytest.mark.covers("D156")
@pytest.mark.parametrize(
    ("kernel", "trees", "options"),
    [
        pytest.param(kernel, trees, options, id=f"{kernel.__name__.rpartition('.')[2]}-{name}-{asked}")
        for kernel in (flash_mla, fa3)
        for name, trees in {**TREES, "ragged": RAGGED_TREES}.items()
        if kernel is fa3 or name != "ragged"
        for asked, options in OPTIONS.items()
        if asked == "plain" or name == "uniform"
    ],
)
def test_trees_agree_with_the_reference(kernel, trees, options, flash_mla_package, fa3_library):
    parents, case = trees
    query, cache, batch = latents(case)
    options, made = filled(options, case.heads[0]), refattn.speculative.make_trees(parents)
    plan = fastattn.speculative.plan(batch, block_size=case.block_size, trees=made)
    for _ in range(2):  # the second layer has what the plan has kept
        out, lse = kernel.attend(query, Latents(cache, RANK), plan, options, None)
        assert_matches_reference(out, lse, verify, query, cache, batch, trees=made, options=options)
    asked = [*flash_mla_package.calls, *fa3_library.calls]
    assert len(asked) == 2 and not any(call.get("causal", call.get("is_causal")) for call in asked)


# --- the schedule ---


@pytest.mark.covers("B70")
def test_a_plan_keeps_the_schedule_of_its_step(flash_mla_package):
    """Layers share it; other lengths, also those written in place, other heads and another plan have another."""
    query, cache, batch = latents(UNIFORM[0])
    plan, options = Plan(batch, 64), filled({}, 4)
    for _ in range(3):
        flash_mla.mla(query, cache, plan, options, RANK, None)
    assert flash_mla_package.schedules == 1
    flash_mla.mla(query[:, :2], cache, plan, options, RANK, None)
    flash_mla.mla(query, cache, Plan(batch, 64), options, RANK, None)
    assert flash_mla_package.schedules == 3
    batch.seq_lens[1] += 1
    flash_mla.mla(query, cache, plan, options, RANK, None)  # the double refuses a schedule of other lengths
    assert flash_mla_package.schedules == 4


@pytest.mark.covers("B71")
def test_each_capture_has_a_schedule_of_its_own(flash_mla_package, monkeypatch):
    """One that a graph has made is made anew when that graph is replayed, and then only."""
    query, cache, batch = latents(UNIFORM[0])
    arguments = query, cache, Plan(batch, 64), filled({}, 4), RANK, None
    flash_mla.mla(*arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    for capture, schedules in ((7, 2), (7, 2), (8, 3), (None, 4), (None, 5)):
        monkeypatch.setattr(schedule, "_capture", lambda capture=capture: capture and ("capture", capture))
        flash_mla.mla(*arguments)
        assert flash_mla_package.schedules == schedules


# --- what they refuse ---


@pytest.fixture
def hopper(monkeypatch):
    """A machine that both run on."""
    for module in (flash_mla, fa3):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
        monkeypatch.setattr(module, "_cannot_load", lambda: None)
    monkeypatch.setattr(fa3, "_refusal", lambda *_, **__: None)


STORED = dict(stored=(torch.float8_e4m3fn, torch.float8_e4m3fn))
PACKED = STORED | dict(keys="packed", block_size=1, window=(-1, -1))
ALLOWED = STORED | dict(rounds_query=True, fp8_weights=True)


@pytest.mark.parametrize("name", ["flash_mla", "fa3"])
def test_what_they_compute(name, hopper):
    tree = USUAL._replace(tree=True, window=(-1, -1), max_query_len=16)
    assert order.unsupported_reason(name, tree) is None
    refused = order.unsupported_reason(name, tree._replace(positions=True, window=(9, -1)))
    assert "window" in refused
    for dtype in (torch.bfloat16, torch.float16):
        for changes in ({}, dict(sinks=True), dict(max_query_len=3), dict(num_heads=16), dict(window=(-1, -1))):
            assert order.unsupported_reason(name, USUAL._replace(dtype=dtype, **changes)) is None
    if name == "flash_mla":  # first of all, with so many heads
        quantized = USUAL._replace(**ALLOWED)
        assert order.unsupported_reason(name, quantized) is None and order.priorities(quantized)[0] == name
    softcap = USUAL._replace(softcap=True)
    assert (order.unsupported_reason(name, softcap) is None) == (name == "fa3")


def test_flash_mla_takes_selected_keys_that_are_their_values(hopper):
    """The entries of DeepSeek-V4, but not its window."""
    alone = USUAL._replace(head_size=512, dtype=torch.bfloat16)
    assert order.unsupported_reason("flash_mla", alone._replace(block_size=1)) is None
    refused = order.unsupported_reason("flash_mla", alone)
    assert refused == "latents of 512 elements and rotary keys of 64 (none over selected latents), not 512 and 0"
    assert "none over selected" in order.unsupported_reason("flash_mla", alone._replace(**PACKED))


BOTH = [
    ("computes on CUDA, the tensors are on cpu", dict(device=torch.device("cpu"))),
    ("float16 and bfloat16, not torch.float32", dict(dtype=torch.float32)),
    ("latents of 512 elements and rotary keys of 64, not 256 and 64", dict(head_size=320, value_head_size=256)),
    ("latents of 512 elements and rotary keys of 64, not 512 and 32", dict(head_size=544)),
    ("has no ALiBi", dict(alibi=True)),
    ("positions: take triton", dict(positions=True)),
    ("take triton", dict(batch_invariant=True)),
    ("16 bytes", dict(aligned=False)),
]


@pytest.mark.parametrize(
    ("name", "reason", "changes"),
    [
        *((name, *refusal) for name in ("flash_mla", "fa3") for refusal in BOTH),
        ("fa3", "no fp8 values: take triton", ALLOWED),
        ("flash_mla", "not allowed without query_scale: take triton", STORED),
        ("flash_mla", "not allowed without fp8_weights: take triton", STORED | dict(rounds_query=True)),
        ("flash_mla", "multiplies float8_e4m3fn values", ALLOWED | dict(stored=(torch.float8_e5m2,) * 2)),
        ("flash_mla", "returns bfloat16", ALLOWED | dict(dtype=torch.float16)),
        ("flash_mla", "no fp8 values: take triton", ALLOWED | dict(tree=True)),
        ("flash_mla", "pages of 64 tokens, not 16", dict(block_size=16)),
        ("flash_mla", "pages of 64 tokens, not 1", dict(block_size=1, max_query_len=2)),
        ("flash_mla", "bfloat16 over selected latents", dict(block_size=1, dtype=torch.float16)),
        ("flash_mla", "64 or 128 heads over selected latents, not 16", dict(block_size=1, num_heads=16)),
        ("flash_mla", "no fp8 values", dict(block_size=1) | ALLOWED),
        ("flash_mla", "where each sequence is one query with a list of slots", PACKED | dict(block_size=64)),
        ("flash_mla", "where each sequence is one query with a list of slots", PACKED | dict(max_query_len=2)),
        ("flash_mla", "bfloat16 over selected latents", PACKED | dict(dtype=torch.float16)),
        ("flash_mla", "64 or 128 heads over selected latents, not 32", PACKED | dict(num_heads=32)),
        ("flash_mla", "16 bytes", PACKED | dict(aligned=False)),
        ("flash_mla", "take triton", PACKED | dict(batch_invariant=True)),
        ("flash_mla", "does not compute attention to packed latents under", PACKED | dict(tree=True)),
        ("flash_mla", "as many new tokens of every sequence", dict(block_size=1, uniform=False)),
        ("flash_mla", "has no softcap", dict(softcap=True)),
        ("flash_mla", "has no windows", dict(window=(20, 0))),
        ("flash_mla", "as many new tokens of every sequence", dict(uniform=False)),
        ("flash_mla", "does not compute attention to pages", dict(keys="pages")),
    ],
)
def test_they_say_why_not(name, reason, changes, hopper):
    assert reason in order.unsupported_reason(name, USUAL._replace(**changes))


@pytest.mark.parametrize("card", [(8, 0), (10, 0), (12, 0)], ids=str)
def test_another_card_is_refused(card, hopper, monkeypatch):
    monkeypatch.setattr(flash_mla, "capability", lambda device: card)
    assert f"compute capability 9.0, not {card[0]}.{card[1]}" in flash_mla.unsupported_reason(USUAL)


def test_a_package_without_its_half_for_hopper_is_refused(flash_mla_package, monkeypatch):
    flash_mla._cannot_load.cache_clear()
    monkeypatch.setattr(flash_mla, "cannot_import", lambda *_: None)
    monkeypatch.setattr(sys.modules["flash_mla"], "has_legacy", lambda: False)
    assert "without its legacy half" in flash_mla._cannot_load()
    flash_mla._cannot_load.cache_clear()
    monkeypatch.setattr(flash_mla, "cannot_import", lambda *_: "there is no such package")
    assert flash_mla._cannot_load() == "there is no such package"
    flash_mla._cannot_load.cache_clear()


def test_a_build_is_asked_whether_it_has_latents(fa3_library, monkeypatch):
    cpu = torch.device("cpu")
    fa3._refusal.cache_clear()
    monkeypatch.setattr(gpu_package_doubles, "over_latents", lambda q, *_, **__: (q[..., :RANK], q[..., 0].float()))
    assert fa3._refusal(ROPE, RANK, torch.float16, cpu, latents=True) is None
    (asked,) = fa3_library.calls
    assert list(asked["q_v"].shape) == [1, 1, RANK] and list(asked["k"].shape) == [1, 1, 1, ROPE]
    fa3._refusal.cache_clear()


@pytest.mark.parametrize(
    ("lens", "num_tokens", "uniform"),
    [
        (((1, 5), (1, 9)), 2, True),
        (((3, 5), (3, 9)), 6, True),
        (((3, 5), (2, 9)), 5, False),
        (((1, 5), (0, 9)), 1, False),
        (((1, 5), (1, 9)), None, False),
        (((1, 5), (2, 9)), 3, False),
    ],
)
def test_a_batch_is_uniform_where_the_host_knows_it(lens, num_tokens, uniform):
    inputs = build(Case("uniform", lens, heads=(2, 1)))
    batch = replace(inputs.batch, num_tokens=num_tokens)
    asked = inputs.query, Pages(inputs.key_cache, inputs.value_cache)
    assert attention_problem(*asked, Plan(batch, 16), AttentionOptions()).uniform == uniform
    larger = replace(batch, max_query_len=batch.max_query_len + 1)  # a graph may grow to that
    assert not attention_problem(*asked, Plan(larger, 16), AttentionOptions()).uniform


def test_their_order(hopper, monkeypatch):
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    assert order.priorities(USUAL) == ("flash_mla", "triton", "fa3"), "which splits no keys"
    assert order.priorities(USUAL._replace(num_seqs=64)) == ("flash_mla", "triton", "fa3")
    assert order.priorities(USUAL._replace(num_seqs=64, even=True)) == ("flash_mla", "fa3", "triton")
    assert order.priorities(USUAL._replace(num_heads=16)) == ("triton", "flash_mla", "fa3")
    assert order.priorities(USUAL._replace(device=torch.device("cpu")))[:2] == ("native", "cpu")
    packed = USUAL._replace(**PACKED, num_seqs=8)
    assert order.priorities(packed) == ("flash_mla", "triton"), "whose kernel splits the keys of a few queries"
    assert order.priorities(packed._replace(num_seqs=1)) == ("triton", "flash_mla"), "as measured with 128 heads"
    assert order.unsupported_reason("flash_mla", packed) is None
    for num_seqs, first in ((15, "triton"), (16, "flash_mla")):  # with 128 heads
        assert order.priorities(USUAL._replace(block_size=1, num_seqs=num_seqs))[0] == first
    assert order.unsupported_reason("flash_mla", USUAL._replace(block_size=1, window=(-1, -1))) is None
