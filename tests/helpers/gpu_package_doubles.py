"""Stand-ins for packages that need a GPU: their signatures, as far as the benchmark goes, and the reference inside.

With them, what a peer gets (tables, lengths, plans) is checked where there is no GPU.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from refattn import masks, merge, recurrent
from refattn.attention import attend
from refattn.batch import Batch
from refattn.options import RecurrentOptions
from refattn.packed_latents import packed_parts

# Operators of the wheel vllm 0.33.0, as its library registers them.
FA3 = "_vllm_fa3_C"
FA3_FORWARD = """
    Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q,
    Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,
    int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,
    Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
    float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k
"""
FA3_SCHEDULE = """
    int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v,
    ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
    Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left,
    int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin
"""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the packages of FlashAttention, FlashInfer, FlashMLA, FlashQLA, FLA and attention-gym by these."""
    fa2, fa4, flashinfer = (ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flashinfer"))
    flashinfer_mla, flash_mla = ModuleType("flashinfer.mla"), ModuleType("flash_mla")
    fa2.__path__ = flashinfer.__path__ = []
    flashinfer_mla.BatchMLAPagedAttentionWrapper = Latents
    flash_mla.flash_mla_with_kvcache = flash_mla_with_kvcache
    flash_mla.get_mla_metadata = lambda: (FlashMLASchedMeta(), None)
    flash_mla.__path__, quantized = [], ModuleType("flash_mla.flash_mla_interface")
    quantized.flash_mla_with_kvcache, quantized.FlashMLASchedMeta = flash_mla_with_kvcache, FlashMLASchedMeta
    quantized.get_mla_decoding_metadata, quantized.flash_mla_sparse_fwd = (
        get_mla_decoding_metadata,
        flash_mla_sparse_fwd,
    )
    fa2.flash_attn_varlen_func, fa2.flash_attn_with_kvcache = fa2_varlen, fa2_with_kvcache
    fa4.flash_attn_varlen_func = fa4_varlen
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = Prefill
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = Decode
    flashinfer.MultiLevelCascadeAttentionWrapper = Cascade
    flashinfer.merge_states = merge_states
    fla, fla_kda, fla_gla = (ModuleType(f"fla.ops.{name}") for name in ("gated_delta_rule", "kda", "simple_gla"))
    fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule = fla_fold, fla_recurrent_gdn
    fla_kda.chunk_kda = fla_kda.fused_recurrent_kda = fla_fold
    fla_gla.chunk_simple_gla = fla_gla.fused_recurrent_simple_gla = fla_simple_gla
    gdn, kda = (ModuleType(f"attn_gym.linear.{name}") for name in ("gdn", "kda"))
    gdn.paged_chunk_gdn, gdn.recurrent_gdn, gdn.recurrent_gdn_decode = gym_chunk, gym_recurrent, gdn_decode
    kda.paged_chunk_kda, kda.recurrent_kda = gym_chunk_kda, gym_recurrent
    flash_qla, prefill, decode = map(ModuleType, ("flash_qla", "flashinfer.gdn_prefill", "flashinfer.gdn_decode"))
    flash_qla.chunk_gated_delta_rule, prefill.chunk_gated_delta_rule = qla_chunk, flashinfer_chunk
    decode.gated_delta_rule_decode_pretranspose = flashinfer_decode
    of_states = fla, fla_kda, fla_gla, gdn, kda, flash_qla, prefill, decode
    gym = ModuleType("attn_gym.sparse")
    gym.gather_attn, gym.AuxRequest = gather_attn, AuxRequest
    for module in (fa2, fa4, flashinfer, flashinfer_mla, flash_mla, quantized, gym, *of_states):
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
    """Gather the rows of each sequence; what its table has past its last block is not looked at."""
    pages = [table[: -(-int(length) // cache.shape[1])].long() for table, length in zip(tables, lengths, strict=True)]
    return [cache[table].flatten(0, 1)[:length] for table, length in zip(pages, lengths, strict=True)]


def fa4_varlen(
    q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, page_table=None,
    causal=False, window_size=(None, None), softmax_scale=None, softcap=0.0, return_lse=False, deterministic=False,
    learnable_sink=None,
):  # fmt: skip
    assert softmax_scale is None and not softcap and learnable_sink is None
    if page_table is None:
        keys, values = (x.split(cu_seqlens_k.diff().tolist()) for x in (k, v))
    else:
        keys, values = (from_pages(x, page_table, seqused_k) for x in (k, v))
    assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= max(map(len, keys))
    out, lse = over_rows(q, cu_seqlens_q, keys, values, causal, window_size)
    return out, lse.T.contiguous() if return_lse else None


def fa2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, window_size=(-1, -1),
    softmax_scale=None, softcap=0.0, alibi_slopes=None, return_attn_probs=False, block_table=None, deterministic=False,
):  # fmt: skip
    assert alibi_slopes is None
    pages = dict(seqused_k=cu_seqlens_k.diff(), page_table=block_table)
    out, lse = fa4_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
        **(dict(cu_seqlens_k=cu_seqlens_k) if block_table is None else pages),
    )
    return (out, lse, None) if return_attn_probs else out


def fa2_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, block_table, causal=False, window_size=(-1, -1), softmax_scale=None,
    softcap=0.0, alibi_slopes=None, return_softmax_lse=False,
):  # fmt: skip
    assert k_cache.shape[1] % 256 == 0, "FA2 has pages of a multiple of 256"
    assert softmax_scale is None and not softcap and alibi_slopes is None
    keys, values = (from_pages(x, block_table, cache_seqlens) for x in (k_cache, v_cache))
    cu_seqlens_q = torch.arange(len(q) + 1) * q.shape[1]
    out, lse = over_rows(q.flatten(0, 1), cu_seqlens_q, keys, values, causal, window_size)
    lse = lse.unflatten(0, q.shape[:2]).transpose(1, 2)  # [b, h, t]
    return (out.view_as(q), lse) if return_softmax_lse else out.view_as(q)


def over_latents(query, cache, rank, cu_seqlens_q, tables, lengths, softmax_scale, *, causal=True):
    """Attend from rows `[t, h, d]` to pages `[n, p, d]` whose rows begin with the values."""
    answers = []
    for (q0, q1), key in zip(cu_seqlens_q.unfold(0, 2, 1).tolist(), from_pages(cache, tables, lengths), strict=True):
        visible = (masks.causal if causal else masks.full)(q1 - q0, len(key))
        answers.append(attend(query[q0:q1], key[:, None], key[:, None, :rank], visible, softmax_scale=softmax_scale))
    outs, lses = zip(*answers, strict=True)
    return torch.cat(outs), torch.cat(lses)


class FlashMLASchedMeta:
    """FlashMLA's schedule: empty until its first call, and then of the lengths that it has found."""

    tile_scheduler_metadata = num_splits = None


def get_mla_decoding_metadata(seqlens_k, num_q_tokens, h_k, h_q, is_fp8_kvcache, topk, *, use_legacy):
    """Share out the work over quantized values, whose first call does not."""
    assert use_legacy and is_fp8_kvcache and topk is None and h_k == 1
    return torch.Size([num_q_tokens // h_q, h_q]), seqlens_k.clone()


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink=None, *, use_legacy):
    """Attend to lists of slots; a sink is in the outputs, and not in the log-sum-exp."""
    assert use_legacy and kv.shape[1] == indices.shape[1] == 1 and indices.dtype == torch.int32
    assert indices.min() >= -1 and indices.max() < len(kv), "a slot outside of the pool is followed"
    assert indices.shape[2] % 128 == 0
    tables = [row[row >= 0] for row in indices[:, 0]]
    where = torch.arange(len(q) + 1), tables, [len(table) for table in tables], sm_scale
    out, lse = over_latents(q, kv, d_v, *where, causal=False)
    if attn_sink is not None:
        assert attn_sink.dtype == torch.float32 and attn_sink.shape == q.shape[1:2]
        out = (out * torch.sigmoid(lse - attn_sink)[..., None]).to(out.dtype)
    return out, None, lse


class AuxRequest:
    """What `gather_attn` is asked to return beside the outputs."""

    def __init__(self, *, lse: bool = False) -> None:
        self.lse = lse


def gather_attn(
    query, local_kv, sparse_kv, kv_indices, attention_sink=None, *, sliding_window_size=512, cu_seqlens=None,
    cu_seqlens_k=None, impl="fused", scale=None, return_aux=None,
):  # fmt: skip
    """Attend as attention-gym does: `query` is `[1, h, t, d]`, the log-sum-exp `[1, h, t]`, sinks included."""
    (heads, t, size), rows = query.shape[1:], local_kv[0, 0]
    assert local_kv.shape == (1, 1, t, size) and kv_indices.shape[:2] == (1, t) and scale != 0
    begins, firsts = (torch.tensor([0, n]) if x is None else x for x, n in (
        (cu_seqlens, t), (cu_seqlens_k, sparse_kv.shape[2])))  # fmt: skip
    outs, lses = query.new_zeros(t, heads, size), query.new_zeros(t, heads, dtype=torch.float32)
    for (q0, q1), (e0, e1) in zip(begins.unfold(0, 2, 1).tolist(), firsts.unfold(0, 2, 1).tolist(), strict=True):
        for row in range(q0, q1):
            chosen = kv_indices[0, row][kv_indices[0, row] >= 0].long()
            assert not len(chosen) or chosen.max() < e1 - e0
            keys = torch.cat([rows[max(q0, row - sliding_window_size + 1) : row + 1 if sliding_window_size else q0],
                              sparse_kv[0, 0][e0 + chosen]])  # fmt: skip
            options = dict(softmax_scale=scale, sinks=attention_sink)
            one = attend(query[0, :, row][None], keys[:, None], keys[:, None], masks.full(1, len(keys)), **options)
            outs[row], lses[row] = one[0][0], one[1][0]
    out, lse = outs.transpose(0, 1)[None], lses.T[None]
    return out if return_aux is None else (out, SimpleNamespace(lse=lse))


def fold(query, key, value, log_decay, beta, ends, states, scale=None, *, delta=True) -> tuple[Tensor, Tensor]:
    """Fold the tokens of each sequence into its state `[b, hv, dv, dk]`, with two slots for each: before and after."""
    num_seqs = len(ends) - 1
    lens = ends.diff().int()
    pool, rows = torch.cat((states, states)), torch.arange(2 * num_seqs, dtype=torch.int32)
    before = Batch(ends.int(), lens + 1, None, int(lens.max()), int(lens.max()) + 1)
    plan = recurrent.plan(before, state_indices=rows[num_seqs:])
    tokens = query, key, value, log_decay.float(), beta.float()
    out = recurrent.attention(*tokens, pool, plan, RecurrentOptions(scale, delta))
    return out, pool[num_seqs:]


def fla_fold(q, k, v, g, beta=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
             cu_seqlens=None):  # fmt: skip
    """All of FLA's kernels; that of Mamba-2 has no beta."""
    assert os.environ.get("FLA_FLASH_QLA") == "0", "it would call FlashQLA"
    return fold_rows(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fold_rows(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens):
    assert output_final_state and state_v_first and cu_seqlens.dtype == torch.int64 and len(q) == 1
    if initial_state is None:
        initial_state = q.new_zeros(len(cu_seqlens) - 1, v.shape[2], v.shape[3], q.shape[3])
    assert len(initial_state) == len(cu_seqlens) - 1
    written = torch.ones(v.shape[:3]) if beta is None else beta
    out, states = fold(q[0], k[0], v[0], g[0], written[0], cu_seqlens, initial_state, scale, delta=beta is not None)
    return out[None], states


def fla_recurrent_gdn(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
                      output_final_state=False, state_v_first=False, cu_seqlens=None):  # fmt: skip
    """Its order of arguments is another one."""
    assert gk is gv is None
    return fla_fold(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fla_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                   state_v_first=False, cu_seqlens=None):  # fmt: skip
    """Values have as many heads as queries."""
    assert g_gamma is None and q.shape[2] == v.shape[2]
    return fla_fold(q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def qla_chunk(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, head_first=False, state_v_first=False, auto_cp=True, enable_fwd_cp_cache=True, cp_context=None,
    force_intra_cp=False,
):  # fmt: skip
    """FlashQLA, of heads of 128; its kernels take a scale of 0 for none."""
    assert auto_cp and cp_context is None and not (use_qk_l2norm_in_kernel or head_first or force_intra_cp)
    assert q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1] == 128
    return fold_rows(q, k, v, g, beta, scale or None, initial_state, output_final_state, state_v_first, cu_seqlens)


def flashinfer_chunk(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    use_qk_l2norm_in_kernel=False, output=None, output_state=None, state_checkpoints=None, checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0, use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None,
):  # fmt: skip
    """FlashInfer's prompts: decays instead of their logarithms, and an output state that the caller gives."""
    assert output_final_state and output is state_indices is None and not use_qk_l2norm_in_kernel
    assert g.dtype == beta.dtype == output_state.dtype == torch.float32 and q.shape[-1] == v.shape[-1] == 128
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, cu_seqlens, output_state))
    if initial_state is None:
        initial_state = torch.zeros_like(output_state)
    assert initial_state.shape == output_state.shape and initial_state.is_contiguous()
    out, after = fold(q, k, v, (g + 1e-10).log(), beta, cu_seqlens, initial_state, scale or None)
    return out, output_state.copy_(after)


def flashinfer_decode(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None,
    initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None, disable_state_update=False,
    backend="auto",
):  # fmt: skip
    """FlashInfer's decode over slots of float32; gates in the type of the query; a negative slot is padding."""
    assert state is output is output_state_indices is intermediate_states_buffer is None and not disable_state_update
    assert q.shape[1] == 1 and q.dtype == a.dtype == b.dtype and not use_qk_l2norm
    assert A_log.dtype == dt_bias.dtype == initial_state.dtype == torch.float32
    gate = -A_log.exp() * softplus(a.float() + dt_bias)
    is_real, ends = initial_state_indices >= 0, torch.arange(len(q) + 1)
    before = initial_state[initial_state_indices.clamp(min=0).long()]
    rows = (x[:, 0] for x in (q, k, v, gate, b.float().sigmoid()))
    out, after = fold(*rows, ends, before, scale)
    initial_state[initial_state_indices[is_real].long()] = after[is_real]
    return (out * is_real[:, None, None])[:, None], initial_state


def gym_chunk(q, k, v, gate, beta, state_cache, state_indices, *, cu_seqlens, has_initial_state, scale=None):
    """Non-positive slots are padding: 0 comes out, and no slot changes."""
    assert state_indices.is_contiguous() and state_indices.dtype == torch.int32 and has_initial_state.is_contiguous()
    before = state_cache[state_indices.clamp(min=0).long()] * has_initial_state[:, None, None, None]
    out, after = fold(q[0], k[0], v[0], gate[0], beta[0], cu_seqlens, before, scale)
    is_real = state_indices > 0
    state_cache[state_indices[is_real].long()] = after[is_real]
    return (out * is_real.repeat_interleave(cu_seqlens.diff())[:, None, None])[None]


def gym_chunk_kda(q, k, v, gate, beta, state_cache, state_indices, *, cu_seqlens, has_initial_state):
    """It has no scale, and a decay for each key channel."""
    assert gate.shape == q.shape
    more = dict(cu_seqlens=cu_seqlens, has_initial_state=has_initial_state)
    return gym_chunk(q, k, v, gate, beta, state_cache, state_indices, **more)


def gym_recurrent(q, k, v, gate, beta, initial_state, *, cu_seqlens, scale, state_indices, has_initial_state):
    more = dict(cu_seqlens=cu_seqlens, has_initial_state=has_initial_state, scale=scale)
    return gym_chunk(q, k, v, gate, beta, initial_state, state_indices, **more), None


def gdn_decode(packed_qkv, raw_gate, raw_beta, A_log, dt_bias, state_cache, state_indices):
    num_seqs, (heads, dv, dk) = len(packed_qkv), state_cache.shape[1:]
    qk, value = packed_qkv.split((packed_qkv.shape[1] - heads * dv, heads * dv), 1)
    query, key = (normalize(x.unflatten(1, (-1, dk)), dim=-1) for x in qk.chunk(2, 1))
    rows = query[None], key[None], value.unflatten(1, (heads, dv))[None]
    gate, ends = -A_log.exp() * softplus(raw_gate + dt_bias), torch.arange(num_seqs + 1)
    more = dict(cu_seqlens=ends, has_initial_state=torch.ones(num_seqs, dtype=torch.bool))
    return gym_chunk(*rows, gate, raw_beta.sigmoid(), state_cache, state_indices, **more)


def over_packed(q, k_cache, indices, rank, softmax_scale) -> tuple[Tensor, Tensor]:
    """Attend from each query `[b, 1, h, d]` to the packed rows in its slots, -1 but none; the scales have 16 bits."""
    rope = q.shape[-1] - rank
    rows, slots = k_cache.reshape(-1, k_cache.shape[-1]), indices[:, 0]
    assert slots.min() >= -1 and slots.max() < len(rows), "a slot outside of the pool is followed"
    quantized, scales, rope_key = packed_parts(rows, rank, rope)
    scales = scales.to(q.dtype).float()[..., None]
    latents = (quantized.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128)) * scales).flatten(1)
    pool = torch.cat([latents, rope_key.float()], 1).to(q.dtype)[:, None]
    tables = [row[row >= 0] for row in slots]
    where = (rank, torch.arange(len(q) + 1), tables, [len(table) for table in tables], softmax_scale)
    out, lse = over_latents(q[:, 0], pool, *where, causal=False)
    return out.to(q.dtype)[:, None], lse[..., None]


def over_two_pools(q, both, softmax_scale, sinks):
    """Attend to the slots of two pools of DeepSeek-V4; a sink is in the outputs, and not in the log-sum-exp."""
    keys = []
    for pages, slots in both:
        n, p = pages.shape[:2]
        assert pages.shape[2:] == (1, 584) and pages.stride(1) == 584 and pages.stride(0) % 576 == 0
        assert slots.shape[2] % 128 == 0 and slots.dtype == torch.int32
        rows, scales = pages.reshape(n, -1).split([p * 576, p * 8], 1)
        values, rest = rows.unflatten(1, (p, 576)).split([448, 128], 2)
        scales = scales.unflatten(1, (p, 8))[..., :7].float().sub(127).exp2()
        values = values.contiguous().view(torch.float8_e4m3fn).float().unflatten(2, (7, 64)) * scales[..., None]
        pool = torch.cat([values.flatten(2), rest.contiguous().view(torch.bfloat16).float()], 2).flatten(0, 1)
        keys.append((pool, slots[:, 0]))
    outs, lses = [], []
    for i, query in enumerate(q):
        own = torch.cat([pool[slots[i][slots[i] >= 0].long()] for pool, slots in keys]).to(q.dtype)[:, None]
        out, lse = attend(query, own, own, masks.full(1, len(own)), softmax_scale=softmax_scale)
        outs.append(out.float() * torch.sigmoid(lse - sinks)[..., None])
        lses.append(lse.T)
    return torch.stack(outs).to(q.dtype), torch.stack(lses)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, *, use_legacy=False, is_fp8_kvcache=False, descale_q=None, descale_k=None, indices=None,
    attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
):  # fmt: skip
    """Attend as FlashMLA does on Hopper: `q` is `[b, s, h, d]`, the log-sum-exp `[b, h, s]`.

    Quantized values are multiplied as what they are times their scales; no weight is rounded.
    """
    if indices is not None:
        assert use_legacy and is_fp8_kvcache and not causal and block_table is cache_seqlens is None
        if extra_k_cache is not None:
            both = (k_cache, indices), (extra_k_cache, extra_indices_in_kvcache)
            return over_two_pools(q, both, softmax_scale, attn_sink)
        return over_packed(q, k_cache, indices, head_dim_v, softmax_scale)
    if is_fp8_kvcache:
        assert q.dtype == k_cache.dtype == torch.float8_e4m3fn and descale_q.shape == descale_k.shape == (1,)
        q, k_cache = q.float() * descale_q, k_cache.float() * descale_k
    assert use_legacy and num_splits is None and k_cache.shape[2] == 1 and k_cache.shape[1] == 64
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1 and softmax_scale > 0
    schedule = tile_scheduler_metadata
    if schedule.num_splits is None:
        schedule.num_splits, schedule.tile_scheduler_metadata = cache_seqlens.clone(), q.shape[1:3]
    assert torch.equal(schedule.num_splits, cache_seqlens), "the schedule is of other lengths"
    assert schedule.tile_scheduler_metadata == q.shape[1:3], "the schedule is of other queries"
    b, s = q.shape[:2]
    where = (torch.arange(b + 1) * s, block_table, cache_seqlens)
    out, lse = over_latents(q.flatten(0, 1), k_cache[:, :, 0], head_dim_v, *where, softmax_scale, causal=causal)
    return out.unflatten(0, (b, s)), lse.unflatten(0, (b, s)).transpose(1, 2).contiguous()


@contextmanager
def fa3_library() -> Iterator[None]:
    """Replace FlashAttention-3's operators in vLLM's library by these, under their own schemas."""
    library = torch.library.Library(FA3, "DEF")
    library.define(f"fwd({FA3_FORWARD}) -> Tensor[]")
    library.define(f"get_scheduler_metadata({FA3_SCHEDULE}) -> Tensor")
    library.impl("fwd", lambda *values: fa3_forward(**by_name(FA3_FORWARD, values)), "CPU")
    library.impl("get_scheduler_metadata", lambda *values: fa3_schedule(**by_name(FA3_SCHEDULE, values)), "CPU")
    try:
        yield
    finally:
        library._destroy()


def by_name(arguments: str, values: tuple) -> dict:
    return dict(zip([argument.split()[-1] for argument in arguments.split(",")], values, strict=True))


def fa3_forward(
    *, q, k, v, q_v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale,
    is_causal, window_size_left, window_size_right, softcap, scheduler_metadata, num_splits, **others,
):  # fmt: skip
    assert not softcap
    if q_v is not None:
        assert is_causal and window_size_left == -1 and max_seqlen_q >= cu_seqlens_q.diff().max()
        rows, pages = torch.cat([q_v, q], -1), torch.cat([v, k], -1).squeeze(2)
        where = (cu_seqlens_q, page_table, seqused_k)
        out, lse = over_latents(rows, pages, v.shape[-1], *where, softmax_scale)
        return [out, lse.T.contiguous(), q.new_empty(0), q.new_empty(0)]
    assert softmax_scale == q.shape[-1] ** -0.5
    others |= dict(is_rotary_interleaved=None) if others["is_rotary_interleaved"] else {}
    descales = [others.pop(name) for name in ("q_descale", "k_descale", "v_descale")]
    assert others.pop("cp_world_size") == 1 and not any(others.values()), "what the benchmark has no use for"
    window_size = window_size_left, window_size_right
    if q.dtype == torch.float8_e4m3fn:  # scales [b, hk], the same for all sequences here
        assert all((scale == scale[0]).all() for scale in descales) and (descales[0] == 1).all()
        q, k, v = q.float(), k.float() * descales[1][0][:, None], v.float() * descales[2][0][:, None]
    else:
        assert descales == [None] * 3
    if scheduler_metadata is not None:
        assert scheduler_metadata.tolist() == [
            *(len(seqused_k), max_seqlen_q, max_seqlen_k, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]),
            *(int(seqused_k.sum()), int(cu_seqlens_q[-1]), k.shape[1], is_causal, *window_size, num_splits),
        ]
    out, lse = fa4_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        page_table=page_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=is_causal,
        window_size=window_size,
        return_lse=True,
    )
    return [out, lse, q.new_empty(0), q.new_empty(0)]


def fa3_schedule(
    *, batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
    cu_seqlens_q, page_size, is_causal, window_size_left, window_size_right, num_splits, **others,
):  # fmt: skip
    """Write down what it was asked, for `fa3_forward` to compare with what it is asked."""
    assert not any(others.values())
    return torch.tensor(
        [
            *(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v),
            *(int(seqused_k.sum()), int(cu_seqlens_q[-1]), page_size, is_causal, window_size_left, window_size_right),
            num_splits,
        ],
        dtype=torch.int32,
    )


class Prefill:
    def __init__(self, workspace, kv_layout, *, backend="auto"):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        *, causal=False, window_left=-1, custom_mask=None, sm_scale=None, logits_soft_cap=None, q_data_type,
        kv_data_type,
    ):  # fmt: skip
        assert sm_scale is None and logits_soft_cap is None
        self.cu_seqlens_q, self.causal, self.window_left = qo_indptr, causal, window_left
        self.tables = indices.split(indptr.diff().tolist())
        self.lengths = ((indptr.diff() - 1) * page_size + last_page_len).tolist()
        self.masks = None
        if custom_mask is not None:
            sizes = list(zip(qo_indptr.diff().tolist(), self.lengths, strict=True))
            flat = custom_mask.split([query_len * length for query_len, length in sizes])
            self.masks = [mask.view(size) for mask, size in zip(flat, sizes, strict=True)]

    def answer(self, q, paged_kv_cache):
        keys, values = (from_pages(x, self.tables, self.lengths) for x in paged_kv_cache)
        if self.masks is not None:
            queries = q.split(self.cu_seqlens_q.diff().tolist())
            answers = zip(*(attend(*some) for some in zip(queries, keys, values, self.masks, strict=True)), strict=True)
            return tuple(map(torch.cat, answers))
        return over_rows(q, self.cu_seqlens_q, keys, values, self.causal, (self.window_left, None))

    def run(self, q, paged_kv_cache, *, k_scale=1.0, return_lse=False):
        if paged_kv_cache[0].itemsize == 1:
            keys, values = (pool.to(q.dtype) for pool in paged_kv_cache)
            paged_kv_cache = keys * k_scale, values
        else:
            assert k_scale == 1.0
        out, lse = self.answer(q, paged_kv_cache)
        return (out, lse / math.log(2)) if return_lse else out  # to the base 2


class Decode(Prefill):
    def __init__(self, workspace, kv_layout, *, use_tensor_cores):
        assert kv_layout == "NHD"

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        rows = torch.arange(len(indptr))
        super().plan(rows, indptr, indices, last_page_len, *sizes, causal=True, **options)


class Latents:
    def __init__(self, workspace, *, backend="auto"):
        pass

    def plan(
        self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal
        self.sizes = num_heads, head_dim_ckv, head_dim_kpe, page_size
        self.where = qo_indptr, kv_indices.split(kv_indptr.diff().tolist()), kv_len_arr, sm_scale

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, return_lse=False):
        assert self.sizes == (q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], ckv_cache.shape[1])
        query, pages = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        out, lse = over_latents(query, pages, q_nope.shape[-1], *self.where)
        return (out, lse / math.log(2)) if return_lse else out


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


def merge_states(v, s):
    """Merge as FlashInfer does: parts in the second dimension, log-sum-exps to the base 2."""
    out, lse = merge.merge(list(v.unbind(1)), [x * math.log(2) for x in s.unbind(1)])
    return out, lse / math.log(2)
