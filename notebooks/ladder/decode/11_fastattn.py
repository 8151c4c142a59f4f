"""11 · What `fastattn` launches, and a replay.

The product: the same loop, in one body for all storages and masks (fastattn/kernels/triton/attention.py). Tiles, warps,
stages and splits are chosen by the sizes of the call; the reduction is put in place while the last programs run
(programmatic launch).

Gain: on the GPU from the choice of sizes, most where lengths differ. On the CPU a plan keeps what its first layer
launched, and later layers replay it. In a CUDA graph, which the times here are taken from, the CPU does nothing.

Source: fastattn/kernels/triton/tuning.py and launch.py; programmatic dependent launch: CUDA C++ Programming Guide.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import fastattn
from fastattn import chunked_prefill
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from twinattn.course.ladder import check_decode


def plan(
    seq_lens: Int32[Tensor, "b"], block_table: Int32[Tensor, "b m"], block_size: int, num_keys: int | None = None
) -> Plan:
    """Plan a step of decodes, once for all layers; a scheduler knows how many keys they have."""
    b, columns = block_table.shape
    cu_seqlens_q = torch.arange(b + 1, dtype=torch.int32, device=seq_lens.device)
    most = dict(max_query_len=1, max_seq_len=columns * block_size)
    return chunked_prefill.plan(
        Batch(cu_seqlens_q, seq_lens, block_table, **most, num_keys=num_keys, num_tokens=b), block_size=block_size
    )


def attention(
    query: Float[Tensor, "b h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    softmax_scale: float | None = None,
    step: Plan | None = None,
) -> Float[Tensor, "b h d"]:
    """Attend from the newest token of each sequence to its tokens in the cache."""
    check_decode(query, key_cache, value_cache, seq_lens, block_table)
    step = plan(seq_lens, block_table, key_cache.shape[1]) if step is None else step
    with fastattn.use_kernel("triton"):
        options = AttentionOptions(softmax_scale=softmax_scale)
        return chunked_prefill.attention(query, key_cache, value_cache, step, options)
