"""SGLang's attention backends as SGLang constructs them: its pools, a layer, a step's `ForwardBatch`, then the call.

    a backend    is made of a model runner: here of an object with what these backends read of one
    a write      `pool.set_kv_buffer(layer, KVWriteLoc(slots), key, value)`, as a backend does it in a step
    a step       `backend.init_forward_metadata(batch)`, then `backend.forward(q, None, None, layer, batch)`

No model is made, and nothing is distributed. A sequence without new tokens has no request in a step of SGLang, and its
layers see no padding: both are left out here, and their rows are 0.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.libraries import Call, cannot_import

BACKENDS = {
    "torch_native": ("sglang.srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend"),
    "fastattn": ("twinattn.integrations.sglang", "FastAttentionBackend"),
}


def available() -> str | None:
    """Return why SGLang cannot be used."""
    return cannot_import("sglang", "sglang.srt.layers.attention.torch_native_backend")


def prepare(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    backend: str,
) -> Call:
    """Prepare a layer of a backend, which is causal: write the pool as a backend does, and describe the step.

    Args:
        query: `[t, h, d]`.
        key_cache: `[n, p, hk, d]`.
        value_cache: `[n, p, hk, dv]`.
        batch: the step.
        softmax_scale: `d ** -0.5` if None.
        window_size: of the mask; a layer of SGLang has one to the left alone.
        softcap: of the scores.
        sinks: `[h]`.
        backend: a name of `BACKENDS`.

    Raises:
        NotImplementedError: for what layers of SGLang do not have.
    """
    if window_size[1] > 0 or window_size[0] == 0:
        raise NotImplementedError("a layer of SGLang has a window to the left alone, and takes 0 for none")
    lens = batch.query_lens.tolist()
    of_requests = [i for i, count in enumerate(lens) if count]
    runner = _runner(key_cache, value_cache, batch)
    layer = _layer(query, key_cache, value_cache, softmax_scale, window_size[0], softcap)
    _write(runner.token_to_kv_pool, layer, key_cache, value_cache)
    made = _make(backend, runner)
    step = _step(batch, of_requests, [lens[i] for i in of_requests])
    rows = query[: sum(lens)].flatten(1)
    more = {} if sinks is None else dict(sinks=sinks)

    def call() -> Tensor:
        out = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
        if of_requests:  # SGLang runs no step without requests
            made.init_forward_metadata(step)
            found = made.forward(rows, None, None, layer, step, save_kv_cache=False, **more)
            out[: len(rows)] = found.view(len(rows), *out.shape[1:])
        return out

    return call


def _runner(key_cache: Tensor, value_cache: Tensor, batch: Batch) -> Any:
    """Make the parts of a model runner that backends read: the table of slots, and the pool of keys and values."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    blocks, page, kv_heads, size = key_cache.shape
    device, table = str(key_cache.device), batch.block_table
    assert table is not None
    requests = ReqToTokenPool(batch.num_seqs, max(1, table.shape[1]) * page, device, False)
    slots = table[..., None].clamp(0, blocks - 1) * page + torch.arange(page, device=table.device)
    requests.req_to_token[1 : 1 + batch.num_seqs, : slots.shape[1] * page] = slots.flatten(1).to(torch.int32)
    pool = MHATokenToKVPool(
        *((blocks - 1) * page, page, key_cache.dtype, kv_heads, size, 1, device, False),
        v_head_dim=value_cache.shape[-1],
        enable_alt_stream=False,
    )
    return SimpleNamespace(device=device, page_size=page, req_to_token_pool=requests, token_to_kv_pool=pool)


def _layer(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float | None, window: int, softcap: float
) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    size = query.shape[2]
    return RadixAttention(
        *(query.shape[1], size, size**-0.5 if scale is None else scale, key_cache.shape[2], 0),
        logit_cap=softcap,
        v_head_dim=value_cache.shape[-1],
        sliding_window_size=window,
    )


def _write(pool: Any, layer: Any, key_cache: Tensor, value_cache: Tensor) -> None:
    """Write all slots of the pool, also those of no sequence."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    tokens = [cache.flatten(0, 1).contiguous() for cache in (key_cache, value_cache)]
    slots = torch.arange(len(tokens[0]), device=key_cache.device)
    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), *tokens)


def _make(backend: str, runner: Any) -> Any:
    """Make a backend of a model runner."""
    module, name = BACKENDS[backend]
    return getattr(import_module(module), name)(runner)


def _step(batch: Batch, of_requests: list[int], lens: list[int]) -> Any:
    """Make SGLang's batch of the sequences that have new tokens; request 0 of its table is that of padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    device = batch.seq_lens.device
    chosen = torch.tensor(of_requests, dtype=torch.int64, device=device)
    seq_lens = batch.seq_lens[chosen].to(torch.int64)
    is_decode = set(lens) == {1}
    step = ForwardBatch(
        forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        batch_size=len(lens),
        input_ids=torch.zeros(sum(lens), dtype=torch.int64, device=device),
        req_pool_indices=chosen + 1,
        seq_lens=seq_lens,
        out_cache_loc=torch.zeros(sum(lens), dtype=torch.int64, device=device),
        seq_lens_sum=int(seq_lens.sum()),
        seq_lens_cpu=seq_lens.cpu(),
    )
    if not is_decode:
        step.extend_seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        step.extend_prefix_lens = seq_lens.to(torch.int32) - step.extend_seq_lens
        step.extend_seq_lens_cpu, step.extend_prefix_lens_cpu = lens, step.extend_prefix_lens.tolist()
        step.extend_num_tokens = sum(lens)
    return step
