"""Stand-ins for packages that need a GPU: their signatures, as far as the benchmark goes, and the reference inside.

With them, what a peer is handed (tables, lengths, plans) is checked where there is no GPU.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from refattn import masks, merge
from refattn.attention import attend


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `flash_attn`, `flash_attn.cute` and `flashinfer` be these."""
    fa2, fa4, flashinfer = (ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flashinfer"))
    fa2.__path__ = []
    fa2.flash_attn_varlen_func, fa2.flash_attn_with_kvcache = fa2_varlen, fa2_with_kvcache
    fa4.flash_attn_varlen_func = fa4_varlen
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = Prefill
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = Decode
    flashinfer.MultiLevelCascadeAttentionWrapper = Cascade
    for module in (fa2, fa4, flashinfer):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def over_rows(query, cu_seqlens_q, keys, values, causal, window_size) -> tuple[Tensor, Tensor]:
    """Attend in each sequence from its rows of `query` to its own keys."""
    left, right = (-1 if side is None else side for side in window_size)
    answers = []
    for (q0, q1), key, value in zip(cu_seqlens_q.unfold(0, 2, 1).tolist(), keys, values, strict=True):
        visible = masks.window(q1 - q0, len(key), (left, 0 if causal else right))
        answers.append(attend(query[q0:q1], key, value, visible))
    outs, lses = zip(*answers, strict=True)
    return torch.cat(outs), torch.cat(lses)


def from_pages(cache, tables, lengths) -> list[Tensor]:
    return [cache[table.long()].flatten(0, 1)[:length] for table, length in zip(tables, lengths, strict=True)]


def fa4_varlen(
    q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, page_table=None,
    causal=False, window_size=(None, None), return_lse=False,
):  # fmt: skip
    if page_table is None:
        keys, values = (x.split(cu_seqlens_k.diff().tolist()) for x in (k, v))
    else:
        keys, values = (from_pages(x, page_table, seqused_k) for x in (k, v))
    assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= max(map(len, keys))
    out, lse = over_rows(q, cu_seqlens_q, keys, values, causal, window_size)
    return out, lse.T.contiguous() if return_lse else None


def fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, window_size):
    return fa4_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_size=window_size,
    )[0]


def fa2_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal, window_size):
    assert k_cache.shape[1] % 256 == 0, "FA2 has pages of a multiple of 256"
    keys, values = (from_pages(x, block_table, cache_seqlens) for x in (k_cache, v_cache))
    cu_seqlens_q = torch.arange(len(q) + 1) * q.shape[1]
    return over_rows(q.flatten(0, 1), cu_seqlens_q, keys, values, causal, window_size)[0].view_as(q)


class Prefill:
    def __init__(self, workspace, kv_layout, *, backend):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        *, causal, window_left=-1, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.cu_seqlens_q, self.causal, self.window_left = qo_indptr, causal, window_left
        self.tables = indices.split(indptr.diff().tolist())
        self.lengths = ((indptr.diff() - 1) * page_size + last_page_len).tolist()

    def answer(self, q, paged_kv_cache):
        keys, values = (from_pages(x, self.tables, self.lengths) for x in paged_kv_cache)
        return over_rows(q, self.cu_seqlens_q, keys, values, self.causal, (self.window_left, None))

    def run(self, q, paged_kv_cache):
        return self.answer(q, paged_kv_cache)[0]


class Decode(Prefill):
    def __init__(self, workspace, kv_layout, *, use_tensor_cores):
        assert kv_layout == "NHD"

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        rows = torch.arange(len(indptr))
        super().plan(rows, indptr, indices, last_page_len, *sizes, causal=True, **options)


class Cascade:
    def __init__(self, num_levels, workspace, kv_layout):
        self.levels = [Prefill(workspace, kv_layout, backend="auto") for _ in range(num_levels)]

    def plan(self, qo_indptr_arr, indptr_arr, indices_arr, last_page_len_arr, *sizes, causal, **options):
        tables = zip(qo_indptr_arr, indptr_arr, indices_arr, last_page_len_arr, strict=True)
        for level, arguments in zip(self.levels, tables, strict=True):
            level.plan(*arguments, *sizes, causal=causal and level is self.levels[-1], **options)

    def run(self, q, paged_kv_cache):
        outs, lses = zip(*(level.answer(q, paged_kv_cache) for level in self.levels), strict=True)
        return merge.merge(outs, lses)[0]
