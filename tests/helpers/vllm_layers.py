"""Calls of our vLLM backend as vLLM's layers make them, over doubles of its classes."""

from functools import partial

import torch

from tests.helpers import vllm_doubles

R, ROPE, NOPE, DV, H = 24, 8, 12, 10, 3


def vllm_pool(inputs, layout):
    """Lay keys and values side by side as vLLM does: `[n, hk, p, 2 d]`, in the order of memory of a layout."""
    pool = torch.cat([inputs.key_cache, inputs.value_cache], dim=-1)  # [n, p, hk, 2 d], LBNHC
    return pool.transpose(1, 2) if layout == "LBNHC" else pool.transpose(1, 2).contiguous()


def forward(impl, layer, query, key, value, pool, step, output, **quantized):
    """Attend as vLLM's layer does."""
    tensors = dict(query=query, key=key, value=value, kv_cache=pool)
    call = partial(vllm_doubles.call, impl, "AttentionImpl.forward", layer=layer, attn_metadata=step, output=output)
    return call(**tensors, **quantized)


def update(impl, layer, key, value, pool, slots):
    """Write new keys and values as vLLM's layer does."""
    tensors = dict(key=key, value=value, kv_cache=pool, slot_mapping=slots)
    vllm_doubles.call(impl, "AttentionImpl.do_kv_cache_update", layer=layer, **tensors)


def common_metadata(batch, query_rows, **changes):
    slots = torch.full((query_rows,), -1, device=batch.device)
    arguments = dict(
        query_start_loc=batch.cu_seqlens_q,
        query_start_loc_cpu=batch.cu_seqlens_q.cpu(),
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_seqs,
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.block_table,
        slot_mapping=slots,
    )
    return vllm_doubles.CommonAttentionMetadata(**arguments | changes)


def vllm_layer(backend, device, key=0.37, value=2.3):
    """Make a layer with the scales that vLLM gives it: buffers of one number, without a dimension."""
    layer = torch.nn.Module()
    for name, scale in (("_k_scale", key), ("_v_scale", value)):
        layer.register_buffer(name, torch.tensor(scale, device=device))
    return layer


def latent_layer(backend, **changes):
    """Make a layer with a weight that is drawn, as vLLM does."""
    sizes = dict(kv_lora_rank=R, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, qk_head_dim=NOPE + ROPE, v_head_dim=DV)
    given = dict(num_heads=H, head_size=R + ROPE, scale=0.3, num_kv_heads=1, kv_cache_dtype="auto", q_lora_rank=None)
    nothing = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"))
    projection = torch.nn.Linear(R, H * (NOPE + DV), bias=False)
    kind = dict(attn_type=vllm_doubles.AttentionType.DECODER, kv_b_proj=projection)
    layer = backend.FastMLAImpl(**nothing | given | sizes | kind | changes)
    layer.process_weights_after_loading(torch.float32)
    return layer, projection.weight.detach().view(H, NOPE + DV, R).split([NOPE, DV], 1)
