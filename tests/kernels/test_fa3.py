"""FlashAttention-3: what it is asked, what it refuses, and what becomes of its answers.

Where there is no GPU a double stands in for each build: the operator of vLLM's library under its own schema, the module
of FlashAttention's own package by its signatures. They compute with the formula of the reference and answer as the
library does, tiles and all. With `--device cuda` these tests run on the library itself.
"""

import importlib
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from einops import repeat
from torch import Tensor

import refattn.chunked_prefill
import refattn.speculative
import refattn.varlen
import twinattn.kit
from fastattn import speculative
from fastattn.kernels import Problem, order, schedule
from fastattn.kernels import device as devices
from fastattn.kernels.flash import fa2, fa3
from refattn import masks
from refattn.attention import attend
from refattn.batch import Batch
from refattn.merge import merge
from refattn.options import AttentionOptions
from refattn.plan import Plan
from tests.helpers.batches import CASES, STALE, Case, build
from tests.helpers.gpu_package_doubles import FA3_FORWARD, FA3_SCHEDULE, by_name
from tests.helpers.options import given
from tests.helpers.tolerance import assert_matches_reference

TILE = 128  # rows, and keys, of the doubles

TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")  # tensors that a call may have

ON_GPU = os.environ["TWINATTN_TEST_DEVICE"] == "cuda"
OURS = [
    Case(
        "large-pages", ((60, 200), (1, 130), (130, 130), (0, 4), (3, 0)), heads=(4, 2), block_size=128, padding_rows=2
    ),
    Case("wide-values-256", ((5, 37), (1, 18), (20, 20)), head_size=64, value_head_size=256),
    Case("mla-heads", ((5, 37), (1, 18), (20, 20)), head_size=192, value_head_size=128, heads=(2, 2)),
    Case("odd-head-size", ((5, 37), (1, 18), (20, 20)), head_size=72, heads=(4, 1)),
]
LAYOUTS = ("more-queries-than-keys", "empty-rows", "mixed", "odd-blocks", "heads-first")  # all that a double can miss
THEIRS = [case for case in CASES if case.name in LAYOUTS or (ON_GPU and case.name != "narrow-values")]
# Windows that end within tiles of 64, 80, 96, 128 and 160 keys, and those that end with them.
LONG_WINDOWS = [(355, 0), (100, 0), (63, 0), (127, 0), (0, 0), (200, 37), (-1, 37), (299, -1)]
LONG_HEADS = [((2, 1), 64), ((4, 1), 128), ((2, 2), 128), ((2, 2), 192), ((2, 1), 256)]
if not ON_GPU:
    LONG_WINDOWS, LONG_HEADS = [(100, 0), (200, 37), (-1, 37)], LONG_HEADS[:1]
each_way = pytest.mark.parametrize("over", ["pages", "rows"])
MIXED = Case("mixed", ((4, 6), (1, 70), (10, 17), (0, 9), (40, 40), (5, 2)), heads=(6, 2), padding_rows=3)
OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.3),
    "negative-scale": dict(softmax_scale=-0.3),
    "no-scale": dict(softmax_scale=0.0),
    "not-causal": dict(causal=False),
    "window": dict(window_size=(20, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "right-window": dict(causal=False, window_size=(-1, 2)),
    "softcap": dict(softcap=1.0),
    "sinks": dict(sinks=True),
    "large-sinks": dict(sinks=True, softmax_scale=0.01),
}


class Double:
    """Answers as the library does, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.schedules = 0

    def fwd(self, *arguments):
        """Answer as `torch.ops._vllm_fa3_C.fwd`."""
        asked = by_name(FA3_FORWARD, arguments)
        self.calls.append(asked)
        used = {*TENSORS, "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "softcap", "num_splits"}
        used |= {
            "window_size_left",
            "window_size_right",
            "is_rotary_interleaved",
            "sm_margin",
            "cp_world_size",
            "cp_rank",
        }
        made = asked["scheduler_metadata"]
        if made is not None:
            q, k, v = (asked[name] for name in "qkv")
            sizes = q.shape[1], k.shape[2], q.shape[2], v.shape[3], k.shape[1], q.dtype.itemsize
            made_of = asked | dict(sizes=sizes, has_softcap=asked["softcap"] > 0)
            assert made.tolist() == described(made_of), "a schedule of another call"
            used.add("scheduler_metadata")
        assert not [name for name, x in asked.items() if name not in used and x is not None], "what we have no use for"
        assert (asked["sm_margin"], asked["cp_world_size"], asked["cp_rank"]) == (0, 1, 0)
        window = asked["window_size_left"], asked["window_size_right"]
        tensors = {name: asked[name] for name in TENSORS}
        lengths = asked["max_seqlen_q"], asked["max_seqlen_k"]
        numbers = {name: asked[name] for name in ("softmax_scale", "softcap", "num_splits")}
        return self._answer(**tensors, lengths=lengths, window=window, **numbers)

    def get_scheduler_metadata(self, *arguments):
        """Write down what a schedule was made of, as `torch.ops._vllm_fa3_C.get_scheduler_metadata` shares it out."""
        asked = by_name(FA3_SCHEDULE, arguments)
        self.schedules += 1
        unused = ("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k", "pack_gqa")
        assert all(asked[name] is None for name in unused) and asked["sm_margin"] == asked["max_seqlen_k_new"] == 0
        assert asked["batch_size"] == len(asked["seqused_k"]) and asked["qkv_dtype"] in (torch.float16, torch.bfloat16)
        names = ("num_heads", "num_heads_k", "headdim", "headdim_v", "page_size")
        sizes = *(asked[name] for name in names), asked["qkv_dtype"].itemsize
        return torch.tensor(described(asked | dict(sizes=sizes)), dtype=torch.int32)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
        return_attn_probs=False,
    ):  # fmt: skip
        """Answer as FlashAttention's own package over rows."""
        assert return_attn_probs
        self.calls.append(dict(causal=causal, num_splits=num_splits))
        return self._answer(
            q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, (max_seqlen_q, max_seqlen_k), window_size, softmax_scale,
            softcap, num_splits,
        )[:2]  # fmt: skip

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        """Answer as FlashAttention's own package over pages."""
        assert return_softmax_lse and k is None and v is None and cache_leftpad is None
        self.calls.append(dict(causal=causal, num_splits=num_splits))
        lengths = max_seqlen_q, page_table.shape[1] * k_cache.shape[1]
        return self._answer(
            q, k_cache, v_cache, cu_seqlens_q, None, cache_seqlens, page_table, lengths, window_size, softmax_scale,
            softcap, num_splits,
        )  # fmt: skip

    def _answer(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, lengths, window, softmax_scale, softcap,
        num_splits,
    ):  # fmt: skip
        """Attend, with all that a tile touches; rows of no sequence are never written."""
        assert softmax_scale > 0, "it looks for the largest score before it scales"
        for x in (q, k, v):
            assert x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
        for x in (cu_seqlens_q, cu_seqlens_k, seqused_k):
            assert x is None or (x.dtype == torch.int32 and x.is_contiguous())
        assert page_table is None or page_table.stride(-1) == 1
        max_seqlen_q, max_seqlen_k = lengths
        left, right = (
            side if side < most - 1 else -1 for side, most in zip(window, (max_seqlen_k, max_seqlen_q), strict=True)
        )

        out = q.new_full((*q.shape[:2], v.shape[-1]), math.nan)
        lse = q.new_full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float32)
        for i, (first, last) in enumerate(cu_seqlens_q.unfold(0, 2, 1).tolist()):
            if page_table is None:
                start, end = cu_seqlens_k[i : i + 2].tolist()
                s, key, value = end - start, k[start:], v[start:]
                tile = value[s : -(-s // TILE) * TILE]
            else:
                s, p = int(seqused_k[i]), k.shape[1]
                pages = page_table[i, : -(-s // p)].long()
                key, value = (x[pages].flatten(0, 1) for x in (k, v))
                tile = value[s:] if p % TILE == 0 and left < 0 else value[:0]
            assert last - first <= max_seqlen_q and s <= max_seqlen_k
            visible = masks.window(last - first, s, (left, right))
            asked = dict(softmax_scale=softmax_scale, softcap=softcap)
            answer, logs = attend(q[first:last], key[:s], value[:s], visible, **asked)
            if num_splits != 1 and s > 1:
                splits = [slice(0, s // 2), slice(s // 2, s)]
                parts = [attend(q[first:last], key[x], value[x], visible[:, x], **asked) for x in splits]
                outs, lses = zip(*parts, strict=True)
                answer, logs = merge(outs, [lse.nan_to_num(-math.inf) for lse in lses])  # it drops a split with NaN
            touched = (0 * tile).sum(0)  # 0, or NaN
            answer[(-TILE if right == 0 else 0) :] += repeat(touched, "hk dv -> (hk g) dv", g=q.shape[1] // k.shape[-2])
            out[first:last] = torch.where((logs == -math.inf)[..., None], math.nan, answer)
            lse[:, first:last] = torch.where(logs.isnan(), -math.inf, logs).T  # as it says where the sum is NaN
        return [out, lse, q.new_empty(0), q.new_empty(0)]


def described(asked: dict) -> list[int]:
    """Return what a schedule depends on, as numbers: those of a call, or those that it was made of."""
    lengths = asked["seqused_k"].tolist(), asked["cu_seqlens_q"].tolist()
    return [
        *(len(lengths[0]), asked["max_seqlen_q"], asked["max_seqlen_k"], asked["num_splits"], asked["is_causal"]),
        *(asked["window_size_left"], asked["window_size_right"], *asked["sizes"], asked["has_softcap"]),
        *(number for some in lengths for number in some),
    ]


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """Forget before each test which packages were found."""
    remembered = (fa3._cannot_load, fa3._refusal, devices.cannot_import)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture
def vllm(device):
    """The library of vLLM: a double of it on a CPU, on a GPU the one that is there."""
    if device == "cuda":
        reason = fa3.unsupported_reason(usual(device=torch.device(device)))
        if reason is not None:
            pytest.skip(reason)
        yield None
        return
    double = Double()
    library = torch.library.Library(fa3.LIBRARY, "DEF")
    library.define(f"fwd({FA3_FORWARD}) -> Tensor[]")
    library.impl("fwd", double.fwd, "CPU")
    library.define(f"get_scheduler_metadata({FA3_SCHEDULE}) -> Tensor")
    library.impl("get_scheduler_metadata", double.get_scheduler_metadata, "CPU")
    yield double
    library._destroy()


@pytest.fixture
def interface(monkeypatch, device):
    """The module of FlashAttention's own package: a double of it; there is none for the machines that we have."""
    if device == "cuda":
        pytest.skip("a double of it computes on a CPU")
    double, module = Double(), ModuleType(fa3.INTERFACE)
    module.flash_attn_varlen_func = double.flash_attn_varlen_func
    module.flash_attn_with_kvcache = double.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, fa3.INTERFACE, module)
    return double


def usual(**changes) -> Problem:
    """Describe a chunk of a prompt over pages of 16 tokens."""
    problem = Problem(
        "attend", torch.device("cuda"), torch.float16, "pages", 1, False, 32, 8, 128, 128, 16, 512, 4096, 4, (-1, 0)
    )
    return problem._replace(**changes)


def call(inputs, over: str, **options) -> tuple[Tensor, Tensor]:
    """Call the kernel, past the choice."""
    arguments = inputs.tensors if over == "pages" else inputs.rows
    return (fa3.paged if over == "pages" else fa3.varlen)(*given(*arguments, **options), None)


def hold_to_the_reference(inputs, over: str, **options) -> None:
    """Call the kernel, and hold its answers to the rule."""
    out, lse = call(inputs, over, **options)
    path = refattn.chunked_prefill if over == "pages" else refattn.varlen
    arguments = inputs.tensors if over == "pages" else inputs.rows
    assert_matches_reference(out, lse, partial(twinattn.kit.plan_and_attend, path), *arguments, **options)


# --- its answers ---


@each_way
@pytest.mark.parametrize("name", ["plain", "negative-scale", "two-sided-window", "softcap"])
def test_its_own_package_agrees_with_the_reference(name, over, interface, device):
    hold_to_the_reference(build(MIXED, device=device, dtype=torch.float16), over, **OPTIONS[name])


@pytest.mark.covers("D129")
@each_way
@pytest.mark.parametrize("case", [*OURS, *THEIRS], ids=str)
def test_it_agrees_with_the_reference(case, over, vllm, device):
    hold_to_the_reference(build(case, device=device, dtype=torch.float16), over)


@each_way
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(options, over, vllm, device):
    inputs = build(MIXED, device=device, dtype=torch.float16)
    if "sinks" in options:
        options = options | dict(sinks=torch.linspace(-2.0, 120.0, 6, device=device))
    hold_to_the_reference(inputs, over, **options)


@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window_size=(20, 0))], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128, 192] if ON_GPU else [128])
def test_nan_that_a_page_holds_past_a_sequences_end_stays_there(block_size, options, vllm, device):
    """An earlier request has left it."""
    case = Case("ends", ((20, 140), (1, 130), (5, 40)), heads=(2, 1), block_size=block_size)
    inputs = build(case, device=device, dtype=torch.float16)
    pools = [torch.where(x == STALE, math.nan, x) for x in (inputs.key_cache, inputs.value_cache)]
    hold_to_the_reference(replace(inputs, key_cache=pools[0], value_cache=pools[1]), "pages", **options)


@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window_size=(20, 0))], ids=str)
def test_nan_of_the_next_sequence_stays_there(options, vllm, device):
    inputs = build(Case("rows", ((20, 140), (1, 130), (5, 40)), heads=(2, 1)), device=device, dtype=torch.float16)
    clean, clean_lse = call(inputs, "rows", **options)
    query, key, value, batch = inputs.rows
    key[-40:] = value[-40:] = math.nan
    out, lse = fa3.varlen(*given(query, key, value, batch, **options), None)
    assert out[-5:].isnan().all() and lse[-5:].isnan().all(), "a NaN that a query sees is hidden"
    out[-5:], lse[-5:] = clean[-5:], clean_lse[-5:]
    reference = partial(twinattn.kit.plan_and_attend, refattn.varlen)
    assert_matches_reference(out, lse, reference, *inputs.rows, **options)


@each_way
@pytest.mark.parametrize("window", LONG_WINDOWS, ids=str)
@pytest.mark.parametrize(("heads", "head_size"), LONG_HEADS, ids=str)
def test_a_long_window_shows_exactly_its_keys(heads, head_size, window, over, vllm, device):
    """With queries of zeros the log-sum-exp is the log of the number of visible keys; windows end within tiles."""
    lens = ((1, 640), (1, 500), (1, 430)) if window[0] >= 0 else ((640, 640), (1, 500), (70, 430))
    case = Case("long", lens, heads=heads, head_size=head_size)
    inputs = build(case, device=device, dtype=torch.float16)
    inputs = replace(inputs, query=torch.zeros_like(inputs.query))
    _, lse = call(inputs, over, window_size=window, causal=window[1] == 0)
    counts = torch.cat([masks.window(q, s, window).sum(-1) for q, s in case.lens])
    expected = repeat(counts.log(), "t -> t h", h=heads[0])
    torch.testing.assert_close(lse.cpu(), expected, rtol=0, atol=1e-5)


@each_way
@pytest.mark.parametrize(
    "lens", [((0, 5), (0, 0)), ((5, 0), (3, 0)), ()], ids=["no-queries", "no-keys", "no-sequences"]
)
def test_nothing_to_attend_to_asks_nothing(lens, over, vllm, device):
    case = Case("nothing", lens or ((0, 0),), padding_rows=2)
    inputs = build(case, device=device, dtype=torch.float16)
    if not lens:
        batch = inputs.batch
        none = dict(cu_seqlens_q=batch.cu_seqlens_q[:1], seq_lens=batch.seq_lens[:0], block_table=batch.block_table[:0])
        inputs = replace(inputs, batch=replace(batch, **none))
    out, lse = call(inputs, over)
    assert not out.any() and (lse == -math.inf).all() and out.shape[0] == lse.shape[0] == inputs.query.shape[0]
    assert vllm is None or not vllm.calls


def test_nan_that_a_query_sees_comes_out(vllm, device):
    inputs = build(Case("nan", ((3, 9), (2, 20)), heads=(2, 1)), device=device, dtype=torch.float16)
    inputs.query[0, 1] = math.nan
    out, lse = call(inputs, "pages")
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    assert out.isnan().sum() == out.shape[-1] and lse.isnan().sum() == 1


@each_way
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("build_of", ["vllm", "interface"])
def test_nan_in_a_long_sequence_comes_out_of_every_query_that_sees_it(build_of, where, over, request, device):
    """Were the keys split, a split whose scores are NaN would be left out, and the answer be a number."""
    request.getfixturevalue(build_of)
    long = 20000 if device == "cuda" else 200
    case = Case("long", ((1, long), (9, long + 7), (1, 30)), heads=(8, 2), block_size=64)
    inputs = build(case, device=device, dtype=torch.float16)
    rows, pool = inputs.rows, inputs.key_cache if where == "key" else inputs.value_cache
    for i, place in ((0, long - 9), (1, 5)):
        rows[1 if where == "key" else 2][(0, long)[i] + place] = math.nan
        pool[inputs.batch.block_table[i, place // 64], place % 64] = math.nan
    if over == "rows":
        out, lse = fa3.varlen(*given(*rows), None)
    else:
        out, lse = fa3.paged(*given(*inputs.tensors), None)
    assert out[:10].isnan().all() and not out[10].isnan().any(), "a NaN is hidden"
    assert where == "value" or (lse[:10].isnan().all() and not lse[10].isnan().any())


TREES = [(-1, 0, 0, 1, 2, 2), (-1,), (-1, 0, 1, 0), (-1, *range(19)), ()]
TREE_LENS = ((6, 150), (1, 33), (4, 4), (20, 84), (0, 9))  # one without a context, and one without a tree


def verify(inputs, **options) -> tuple[Tensor, Tensor]:
    """Call the kernel over pages that end with trees, past the choice."""
    trees = speculative.make_trees(TREES, device=str(inputs.query.device))
    plan = speculative.plan(inputs.batch, block_size=inputs.key_cache.shape[1], trees=trees)
    asked = (inputs.query, inputs.key_cache, inputs.value_cache, plan, AttentionOptions(**options), None)
    out, lse = fa3.tree(*asked)
    again = fa3.tree(*asked)  # by what the plan keeps
    assert torch.equal(out.nan_to_num(7.0), again[0].nan_to_num(7.0))
    assert torch.equal(lse.nan_to_num(7.0), again[1].nan_to_num(7.0))
    return out, lse


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", ["plain", "negative-scale", "softcap", "sinks"])
def test_it_reads_what_is_before_a_tree_and_ours_takes_in_its_answer(name, block_size, vllm, device):
    """Without a mask, and the sinks once; poison lies past each end, and in the pages of sequences without a tree."""
    options = dict(sinks=torch.linspace(-2.0, 120.0, 4, device=device)) if name == "sinks" else OPTIONS[name]
    case = Case("trees", TREE_LENS, heads=(4, 2), block_size=block_size, padding_rows=3)
    inputs = build(case, device=device, dtype=torch.float16)
    out, lse = verify(inputs, **options)
    trees = refattn.speculative.make_trees(TREES, device=device)
    reference = partial(twinattn.kit.plan_and_attend, refattn.speculative)
    assert_matches_reference(out, lse, reference, *inputs.tensors, trees=trees, **options)
    if vllm is not None:
        asked = vllm.calls[0]
        assert not asked["is_causal"] and asked["seqused_k"].tolist() == [144, 32, 0, 64, 9]
        assert (asked["window_size_left"], asked["window_size_right"]) == (-1, -1)


def test_nan_before_a_tree_comes_out_of_every_node(vllm, device):
    inputs = build(Case("trees", TREE_LENS, heads=(2, 1)), device=device, dtype=torch.float16)
    inputs.key_cache[inputs.batch.block_table[0, 0], 3] = math.nan
    out, lse = verify(inputs)
    assert out[:6].isnan().all() and lse[:6].isnan().all()
    assert not out[6:].isnan().any() and not lse[6:].isnan().any()


def test_trees_without_anything_before_them(vllm, device):
    case = Case("trees", tuple((len(tree), len(tree)) for tree in TREES), heads=(2, 1), padding_rows=1)
    inputs = build(case, device=device, dtype=torch.float16)
    trees = refattn.speculative.make_trees(TREES, device=device)
    reference = partial(twinattn.kit.plan_and_attend, refattn.speculative)
    assert_matches_reference(*verify(inputs), reference, *inputs.tensors, trees=trees)


# --- what it is asked ---


def test_vllms_operator_is_asked_with_what_the_batch_says(vllm, device):
    if vllm is None:
        pytest.skip("the library does not say what it was asked")
    case = Case("asked", ((4, 6), (1, 70), (0, 9)), heads=(4, 2), padding_rows=1)
    inputs = build(case, device=device, dtype=torch.float16)
    batch = replace(inputs.batch, max_query_len=7, max_seq_len=100)  # a graph may grow to that
    on_pages = dict(window_size=(20, 5), softcap=2.0, sinks=torch.zeros(4))
    fa3.paged(*given(*inputs.tensors[:3], batch, **on_pages), None)
    on_rows = dict(causal=False, window_size=(3, 4), softmax_scale=-0.5)
    fa3.varlen(*given(*inputs.rows[:3], batch, **on_rows), None)
    over_pages, over_rows = vllm.calls

    assert over_pages["k"] is not None and over_pages["k"].data_ptr() == inputs.key_cache.data_ptr(), (
        "a copy of the pool"
    )
    assert torch.equal(over_pages["seqused_k"], batch.seq_lens)
    assert torch.equal(over_pages["page_table"], batch.block_table)
    assert over_pages["cu_seqlens_k"] is None
    assert over_pages["is_causal"] and (over_pages["window_size_left"], over_pages["window_size_right"]) == (20, 0)
    assert (over_pages["softcap"], over_pages["softmax_scale"]) == (2.0, 64**-0.5)
    assert over_pages["s_aux"] is None, "sinks are the adapter's"

    assert over_rows["seqused_k"] is None and over_rows["page_table"] is None
    assert over_rows["cu_seqlens_k"].tolist() == [0, 6, 76, 85]
    assert not over_rows["is_causal"] and (over_rows["window_size_left"], over_rows["window_size_right"]) == (3, 4)
    assert over_rows["softmax_scale"] == 0.5
    torch.testing.assert_close(over_rows["q"], -inputs.query, rtol=0, atol=0, equal_nan=True)  # the padding rows
    for asked in vllm.calls:
        assert torch.equal(asked["cu_seqlens_q"], batch.cu_seqlens_q)
        assert (asked["max_seqlen_q"], asked["max_seqlen_k"]) == (7, 100)
        assert asked["num_splits"] == 1 and asked["pack_gqa"] is None


@each_way
def test_its_own_package_may_not_split_the_keys_either(over, interface, device):
    call(build(CASES[2], device=device, dtype=torch.float16), over)
    assert interface.calls == [dict(causal=True, num_splits=1)], "the package itself would, over pages"


@pytest.mark.parametrize("block_size", [16, 128], ids=["many-columns", "one-column"])
def test_a_table_whose_columns_lie_apart_is_copied(block_size, vllm, device):
    """One of a single column too, which torch takes for contiguous whatever its stride."""
    case = Case("table", ((3, 70), (1, 33)), heads=(2, 1), block_size=block_size)
    inputs = build(case, device=device, dtype=torch.float16)
    columns = 1 if block_size == 128 else 5
    table = inputs.batch.block_table
    batch = replace(inputs.batch, block_table=table[:, :columns].clone())
    apart = replace(batch, block_table=table.T.contiguous().T[:, :columns])
    assert apart.block_table.stride(-1) == 2
    hold_to_the_reference(replace(inputs, batch=apart), "pages")
    trees = speculative.make_trees([(-1, 0, 0), (-1,)], device=device)
    answers = []
    for one in (batch, apart):
        plan = speculative.plan(one, block_size=block_size, trees=trees)
        answers.append(fa3.tree(inputs.query, inputs.key_cache, inputs.value_cache, plan, AttentionOptions(), None))
    assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize(
    ("block_size", "window", "recomputed"), [(16, (-1, -1), False), (64, (-1, -1), True), (16, (20, 0), True)]
)
def test_small_pages_are_not_looked_at_again(block_size, window, recomputed, vllm, device, monkeypatch):
    """From pages smaller than any tile it loads row by row: there is nothing to recompute, but before a window."""
    looked = []
    monkeypatch.setattr("fastattn.kernels.flash.recompute.recompute", lambda *arguments: looked.append(arguments))
    case = Case("small", ((4, 70), (1, 33)), heads=(2, 1), block_size=block_size)
    call(build(case, device=device, dtype=torch.float16), "pages", window_size=window)
    assert bool(looked) == recomputed


@pytest.mark.covers("B70")
def test_a_plan_keeps_the_schedule_of_its_step(vllm, device):
    """Layers share it; other lengths, also those written in place, other heads, a softcap and another plan do not.

    The double refuses a schedule that was made of anything else than its call.
    """
    if vllm is None:
        pytest.skip("the library does not say what it was asked")
    inputs = build(MIXED, device=device, dtype=torch.float16)
    query, key_cache, value_cache, plan, options = given(*inputs.tensors)
    for _ in range(3):
        fa3.paged(query, key_cache, value_cache, plan, options, None)
    assert vllm.schedules == 1
    fa3.paged(query[:, :2], key_cache[:, :, :1], value_cache[:, :, :1], plan, options, None)
    fa3.paged(query, key_cache, value_cache, plan, AttentionOptions(softcap=2.0), None)
    assert vllm.schedules == 3
    for window in ((20, 0), (-1, -1), (3, 4)):
        windowed = Plan(plan.batch, 16, causal=window[1] == 0, window_size=window)
        for _ in range(2):
            fa3.paged(query, key_cache, value_cache, windowed, options, None)
    assert vllm.schedules == 6
    plan.batch.seq_lens[1] -= 1
    fa3.paged(query, key_cache, value_cache, plan, options, None)
    fa3.paged(query, key_cache, value_cache, plan, options, None)
    assert vllm.schedules == 7
    fa3.varlen(*given(*inputs.rows), None)
    assert vllm.schedules == 7, "over rows none is made"


def test_lengths_that_do_not_count_their_versions_keep_no_schedule(vllm, device):
    """Those of inference mode can be advanced in place, and nothing tells."""
    if vllm is None:
        pytest.skip("the library does not say what it was asked")
    with torch.inference_mode():
        inputs = build(MIXED, device=device, dtype=torch.float16)
        asked = given(*inputs.tensors)
        fa3.paged(*asked, None)
        inputs.batch.seq_lens[1] -= 1
        fa3.paged(*asked, None)  # the double refuses a schedule of other lengths
    assert vllm.schedules == 2


@pytest.mark.core
@pytest.mark.covers("B71")
def test_each_capture_has_a_schedule_of_its_own(vllm, device, monkeypatch):
    """Streams, too: a call counts in it which tiles are done."""
    if vllm is None:
        pytest.skip("the library does not say what it was asked")
    asked = given(*build(MIXED, device=device, dtype=torch.float16).tensors)
    stream = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for number, schedules in ((1, 1), (1, 1), (2, 2), (1, 2)):
        stream.cuda_stream = number
        fa3.paged(*asked, None)
        assert vllm.schedules == schedules
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for capture, schedules in ((7, 3), (7, 3), (8, 4), (None, 5), (None, 6)):
        monkeypatch.setattr(schedule, "_capture", lambda capture=capture: capture and ("capture", capture))
        fa3.paged(*asked, None)
        assert vllm.schedules == schedules


def test_a_library_without_schedules_makes_them_in_each_call(device):
    if device == "cuda":
        pytest.skip("the library has them")
    double, library = Double(), torch.library.Library(fa3.LIBRARY, "DEF")
    library.define(f"fwd({FA3_FORWARD}) -> Tensor[]")
    library.impl("fwd", double.fwd, "CPU")
    try:
        hold_to_the_reference(build(MIXED, device=device, dtype=torch.float16), "pages")
        assert double.calls and double.calls[0]["scheduler_metadata"] is None
    finally:
        library._destroy()


# --- what it refuses ---


@pytest.fixture
def hopper(monkeypatch):
    """A machine that it runs on."""
    monkeypatch.setattr(fa3, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fa3, "_cannot_load", lambda: None)
    monkeypatch.setattr(fa3, "_refusal", lambda *_, **__: None)


def test_it_computes_what_it_says(hopper):
    for dtype in (torch.float16, torch.bfloat16):
        for sizes in ((8, 8), (64, 64), (72, 72), (96, 96), (128, 128), (192, 192), (256, 256), *fa3.UNEQUAL_HEADS):
            for block_size in (None, 1, 16, 24, 128):
                problem = usual(head_size=sizes[0], value_head_size=sizes[1], block_size=block_size, dtype=dtype)
                for window, queries in (((-1, 4), 8192), ((3, 4), 1)):
                    problem = problem._replace(window=window, max_query_len=queries, softcap=True, sinks=True)
                    assert fa3.unsupported_reason(problem) is None


@pytest.mark.core
@pytest.mark.covers("A14")
def test_it_is_taken_where_flash_attention_4_is_not(hopper, monkeypatch):
    """And ours before FlashAttention-2; what short queries ask goes to ours, too, which has split its keys."""
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    names = order.priorities(usual())
    assert names.index("fa4") < names.index("fa3") < names.index("triton") < names.index("fa2")
    names = order.priorities(usual(block_size=128))
    assert names.index("fa3") < names.index("fa4"), "from pages of its tile it loads faster"
    names = order.priorities(usual(block_size=128, window=(-1, -1)))
    assert names.index("fa4") < names.index("fa3"), "whose tile is another without a causal mask"
    drafts = usual(max_query_len=16, num_seqs=64, max_seq_len=8208, even=True)
    names = order.priorities(drafts)
    assert names.index("fa3") < names.index("triton") < names.index("fa4"), "drafted tokens of many sequences"
    for drafted in (drafts._replace(even=False), drafts._replace(num_seqs=12)):
        names = order.priorities(drafted)
        assert names.index("triton") < names.index("fa3"), "which splits no keys, so that one long sequence takes long"
    trees = drafts._replace(tree=True)
    assert order.priorities(trees)[0] == "fa3"
    assert order.priorities(trees._replace(even=False))[0] == order.priorities(trees._replace(num_seqs=1))[0]
    assert order.priorities(trees._replace(num_seqs=1))[0] == "triton"
    names = order.priorities(usual(max_query_len=1))
    assert names.index("triton") < names.index("fa4") < names.index("fa3") < names.index("fa2")


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("computes on CUDA, the tensors are on cpu", dict(device=torch.device("cpu"))),
        ("float16 and bfloat16, not torch.float32", dict(dtype=torch.float32)),
        ("keys before the window", dict(window=(355, 0), max_query_len=2)),
        ("multiples of 8 up to 256, not 264", dict(head_size=264, value_head_size=264)),
        ("multiples of 8 up to 256, not 60", dict(head_size=60, value_head_size=60)),
        ("or 64 and 128, 64 and 256, 192 and 128, not 128 and 64", dict(value_head_size=64)),
        ("not 64 and 512", dict(head_size=64, value_head_size=512)),
        ("ALiBi: take fa2 or triton", dict(alibi=True)),
        ("positions: take triton", dict(positions=True)),
        ("tiles follow the longest query", dict(batch_invariant=True)),
        ("16 bytes", dict(aligned=False)),
    ],
)
def test_it_says_why_not(reason, changes, hopper):
    assert reason in fa3.unsupported_reason(usual(**changes))


@pytest.mark.parametrize("card", [(8, 0), (8, 9), (9, 1), (10, 0), (12, 0)], ids=str)
def test_another_card_is_refused(card, hopper, monkeypatch):
    monkeypatch.setattr(fa3, "capability", lambda device: card)
    assert f"compute capability 9.0, not {card[0]}.{card[1]}" in fa3.unsupported_reason(usual())


def test_a_build_is_asked_whether_it_has_a_head_size(vllm, device, monkeypatch):
    device = torch.device(device)
    assert fa3._refusal(128, 128, torch.float16, device) is None
    fa3._refusal.cache_clear()

    def refuse(*arguments, **options):
        raise RuntimeError("This flash attention build does not support it.\nAt line 1")

    monkeypatch.setattr(fa3, "_forward", refuse)
    reason = fa3._refusal(256, 256, torch.float16, device)
    assert (
        reason
        == "this build refuses head sizes 256 and 256, torch.float16: This flash attention build does not support it."
    )


@pytest.mark.parametrize("package", [fa2, fa3], ids=["fa2", "fa3"])
def test_a_build_is_asked_on_the_gpu_that_it_is_asked_about(package, monkeypatch):
    """On another a launch fails, and that would be remembered as the build's own answer."""
    current = []

    @contextmanager
    def on_gpu(device):
        current.append(device)
        try:
            yield
        finally:
            current.pop()

    def asked(*arguments, **options):
        assert current == [torch.device("cpu")]
        raise RuntimeError("has been asked")

    monkeypatch.setattr(package, "on_gpu", on_gpu)
    monkeypatch.setattr(fa3, "_forward", asked)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=asked))
    sizes = (64,) if package is fa2 else (64, 64)
    package._refusal.cache_clear()
    assert package._refusal(*sizes, torch.float16, torch.device("cpu")).endswith(": has been asked")
    assert not current
    package._refusal.cache_clear()


# --- where it is found ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path, with nothing of FlashAttention on the rest of it."""
    for name in (fa3.INTERFACE, fa3.LIBRARY, "vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not has_it(p))])
    importlib.invalidate_caches()
    return tmp_path


def has_it(folder: str) -> bool:
    """Return whether a folder of the path has one of the builds."""
    names = (f"{fa3.INTERFACE}.py", f"{fa3.LIBRARY}.abi3.so", "vllm")
    return any(Path(folder, name).exists() for name in names)


@pytest.mark.core
@pytest.mark.covers("E178")
def test_without_it_both_ways_are_named(folder, monkeypatch):
    monkeypatch.setattr(fa3, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fa3.torch, "ops", ModuleType("ops"))
    fa3.torch.ops._vllm_fa3_C = ModuleType("nothing")
    reason = fa3.unsupported_reason(usual())
    assert "flash_attn_3 can't be imported: No module named 'flash_attn_interface'" in reason
    assert "no _vllm_fa3_C.abi3.so on the path or in the package vllm" in reason


def test_vllm_is_searched_and_not_imported(folder):
    library = folder / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (folder / "vllm" / "__init__.py").write_text("raise AssertionError('vllm was imported')")
    importlib.invalidate_caches()
    assert fa3._find_library() == library


def test_the_library_alone_is_found_on_the_path(folder):
    assert fa3._find_library() is None
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()  # without FlashAttention
    library = folder / "_vllm_fa3_C.abi3.so"
    library.touch()
    importlib.invalidate_caches()
    assert fa3._find_library() == library


def test_a_library_that_cannot_be_loaded_says_so(folder, device):
    if device == "cuda":
        pytest.skip("it is loaded already")
    (folder / "_vllm_fa3_C.abi3.so").write_bytes(b"no library")
    importlib.invalidate_caches()
    reason = fa3._cannot_load()
    assert f"{folder / '_vllm_fa3_C.abi3.so'} can't be loaded: " in reason


def test_what_vllm_has_loaded_is_not_loaded_again(folder, vllm):
    assert fa3._cannot_load() is None


def test_its_own_package_goes_first(interface, vllm, device):
    assert fa3._cannot_load() is None
    call(build(CASES[0], device=device, dtype=torch.float16), "pages")
    assert interface.calls and not vllm.calls


def test_a_batch_of_one_row_is_what_a_build_is_asked_with(vllm, device):
    if vllm is None:
        pytest.skip("the library does not say what it was asked")
    assert fa3._refusal(192, 128, torch.float16, torch.device(device)) is None
    (asked,) = vllm.calls
    assert list(asked["k"].shape) == [1, 1, 192] and list(asked["v"].shape) == [1, 1, 128]
    assert isinstance(Batch(asked["cu_seqlens_q"], asked["cu_seqlens_k"][1:], None, 1, 1), Batch)
