"""FlashInfer: its wrappers, each planned on the host before the step. Its log-sum-exps are to the base 2."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.libraries import Call, missing

WORKSPACE = 2**27  # bytes that it wants for its partial results


def available() -> str | None:
    """Return why it cannot be used."""
    return missing("flashinfer")


def prepare(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    *,
    custom_mask: Tensor | None = None,
    backend: str = "auto",
) -> Call:
    """Prepare its paged prefill.

    Args:
        query: `[t, h, d]`.
        key_cache: pages.
        value_cache: pages.
        batch: with a block table.
        softmax_scale: `d ** -0.5` if None.
        causal: of the mask.
        window_size: of the mask.
        softcap: of the scores.
        return_lse: also return the log-sum-exp.
        custom_mask: of each pair of a query and a key, sequence by sequence, in the place of the mask.
        backend: "fa3" for Hopper, or "fa2".

    Raises:
        NotImplementedError: for a window to the right.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    if window_size[1] > 0:
        raise NotImplementedError("FlashInfer's prefill has windows to the left only")
    mask: dict[str, Any] = dict(causal=causal or window_size[1] == 0, window_left=window_size[0])
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(query), "NHD", backend=backend)
    wrapper.plan(
        batch.cu_seqlens_q,
        *_flat_table(batch, key_cache.shape[1]),
        *_sizes(query, key_cache),
        **(mask if custom_mask is None else dict(custom_mask=custom_mask)),
        sm_scale=softmax_scale,
        logits_soft_cap=softcap or None,
        **_types(query, key_cache),
    )
    return _run(wrapper, return_lse, query, (key_cache, value_cache))


def prepare_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Call:
    """Prepare its paged decode, on tensor cores, as it is meant for grouped heads."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(query), "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_flat_table(batch, key_cache.shape[1]),
        *_sizes(query, key_cache),
        window_left=window_size[0],
        sm_scale=softmax_scale,
        logits_soft_cap=softcap or None,
        **_types(query, key_cache),
    )
    return _run(wrapper, return_lse, query, (key_cache, value_cache))


def prepare_latents(
    query: Tensor,
    cache: Tensor,
    batch: Batch,
    latent_rank: int,
    softmax_scale: float,
    return_lse: bool = False,
    *,
    backend: str = "auto",
) -> Call:
    """Prepare its latent attention: "fa3" for Hopper, or "fa2"."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    indptr, indices, _ = _flat_table(batch, cache.shape[1])
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(query), backend=backend)
    wrapper.plan(
        qo_indptr=batch.cu_seqlens_q,
        kv_indptr=indptr,
        kv_indices=indices,
        kv_len_arr=batch.seq_lens,
        num_heads=query.shape[1],
        head_dim_ckv=latent_rank,
        head_dim_kpe=query.shape[2] - latent_rank,
        page_size=cache.shape[1],
        causal=True,
        sm_scale=softmax_scale,
        **_types(query, cache),
    )
    return _run(
        wrapper,
        return_lse,
        q_nope=query[..., :latent_rank],
        q_pe=query[..., latent_rank:],
        ckv_cache=cache[..., :latent_rank],
        kpe_cache=cache[..., latent_rank : query.shape[2]],
    )


def prepare_cascade(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch, shared: int) -> Call:
    """Prepare its cascade of two levels, over `shared` blocks that all sequences have in common, and the others."""
    from flashinfer import MultiLevelCascadeAttentionWrapper

    block_size, table = key_cache.shape[1], batch.block_table
    assert table is not None

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=query.device)

    indptr, indices, last = _flat_table(batch, block_size, skip=shared)
    wrapper = MultiLevelCascadeAttentionWrapper(2, _workspace(query), "NHD")
    wrapper.plan(
        [ints(0, batch.num_seqs), batch.cu_seqlens_q],
        [ints(0, shared), indptr],
        [table[0, :shared].contiguous(), indices],
        [ints(block_size), last],
        *_sizes(query, key_cache),
        causal=True,
        **_types(query, key_cache),
    )
    return _run(wrapper, False, query, (key_cache, value_cache))


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Call `merge_states`."""
    from flashinfer import merge_states

    out, lse = merge_states(torch.stack(outs, dim=1), torch.stack(lses, dim=1) / math.log(2))
    return out, lse * math.log(2)


def prepare_gdn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    before: Tensor | None,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
) -> Call:
    """Prepare its gated delta rule for prompts, heads of 128 over states that lie one after the other.

    It takes decays, not their logarithms, and a scale of 0 for the default.

    Args:
        query: `[t, h, dk]`.
        key: `[t, h, dk]`.
        value: `[t, hv, dv]`.
        log_decay: `[t, hv]`.
        beta: `[t, hv]`.
        before: the states before the step, `[b, hv, dv, dk]`; zeros if None.
        cu_seqlens_q: where sequences begin, `[b + 1]`.
        scale: `dk ** -0.5` if None.

    Returns:
        A call that returns the outputs `[t, hv, dv]` and the states after the step `[b, hv, dv, dk]`.
    """
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    states = value.new_empty(len(cu_seqlens_q) - 1, *value.shape[1:], key.shape[-1], dtype=torch.float32)
    return partial(
        chunk_gated_delta_rule,
        *(x.contiguous() for x in (query, key, value, log_decay.float().exp(), beta.float())),
        scale=scale,
        initial_state=before,
        output_final_state=True,
        cu_seqlens=cu_seqlens_q.contiguous(),
        output_state=states,
    )


def prepare_gdn_decode(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, state_indices: Tensor
) -> Call:
    """Prepare its decode of one token each over slots, in float32 and in place; -1 is padding.

    It makes the gates itself, of numbers in the type of the query.

    Args:
        query: `[b, h, dk]`.
        key: `[b, h, dk]`.
        value: `[b, hv, dv]`.
        log_decay: `[b, hv]`.
        beta: `[b, hv]`.
        states: the pool, `[n, hv, dv, dk]`.
        state_indices: the slot of each sequence, `[b]`.

    Returns:
        A call that returns the outputs `[b, hv, dv]`.
    """
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    gate = (-log_decay).clamp_min(1e-30).expm1().log()  # its softplus is the decay
    raw = [x[:, None].to(query.dtype) for x in (gate, beta.logit())]
    zeros = torch.zeros(value.shape[1], device=states.device)
    rows = [x[:, None].contiguous() for x in (query, key, value)]
    call = partial(
        gated_delta_rule_decode_pretranspose,
        *(*rows, None, zeros, raw[0], zeros.clone(), raw[1]),
        use_qk_l2norm=False,
        initial_state=states,
        initial_state_indices=state_indices,
    )
    return lambda: call()[0][:, 0]


def _run(wrapper: Any, return_lse: bool, *tensors: Any, **named: Tensor) -> Call:
    call = partial(wrapper.run, *tensors, **named)
    if not return_lse:
        return call

    def both() -> tuple[Tensor, Tensor]:
        out, lse = call(return_lse=True)
        return out, lse * math.log(2)

    return both


def _workspace(x: Tensor) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=x.device)


def _sizes(query: Tensor, key_cache: Tensor) -> tuple[int, int, int, int]:
    return query.shape[1], key_cache.shape[2], query.shape[2], key_cache.shape[1]


def _types(query: Tensor, cache: Tensor) -> dict[str, torch.dtype]:
    return dict(q_data_type=query.dtype, kv_data_type=cache.dtype)


def _flat_table(batch: Batch, block_size: int, *, skip: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Write the block table as FlashInfer wants it: where each row begins, all blocks, tokens in each last block."""
    table, lengths = batch.block_table, batch.seq_lens.tolist()
    assert table is not None
    counts = [-(-s // block_size) for s in lengths]
    indices = torch.cat([row[skip:count] for row, count in zip(table, counts, strict=True)])
    indptr = torch.tensor([0, *(count - skip for count in counts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(s - 1) % block_size + 1 if s else 0 for s in lengths], dtype=torch.int32)
    return indptr.to(table.device), indices, last.to(table.device)
