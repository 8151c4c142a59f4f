"""10 · What `fastattn` launches: on Hopper, roles for warps.

With 64 heads and more on a Hopper GPU, the warps of a program get roles (warp specialisation). One group of four copies
latents into one of two slots in shared memory; two groups multiply. Each of these computes the scores of every other
step and half of the columns of the output; they exchange their weights through shared memory.
Barriers say which slot is full and which is empty. Triton gives roles to no warps, so that kernel is written in Gluon.
With fewer heads, and on other GPUs, `fastattn` launches the loop of rung 8, in one body for all storages and masks.

Gain: copies, the softmax and products go on at the same time, and no score is computed twice. Products with keys read
both tiles from shared memory, which is the next limit.

Source: fastattn/kernels/triton/latents_hopper.py; DeepSeek's FlashMLA; NVIDIA, PTX ISA, `wgmma`, `mbarrier`.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import fastattn
from fastattn import mla
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from twinattn.course.ladder import check_latents


def plan(
    seq_lens: Int32[Tensor, "b"], block_table: Int32[Tensor, "b m"], block_size: int, num_keys: int | None = None
) -> Plan:
    """Plan a step of decodes, once for all layers; a scheduler knows how many keys they have."""
    b, columns = block_table.shape
    cu_seqlens_q = torch.arange(b + 1, dtype=torch.int32, device=seq_lens.device)
    most = dict(max_query_len=1, max_seq_len=columns * block_size)
    batch = Batch(cu_seqlens_q, seq_lens, block_table, **most, num_keys=num_keys, num_tokens=b)
    return mla.plan(batch, block_size=block_size)


def attention(
    query: Float[Tensor, "b h d"],
    cache: Float[Tensor, "n p c"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    softmax_scale: float,
    step: Plan | None = None,
) -> Float[Tensor, "b h dv"]:
    """Attend from the newest token of each sequence to its latents."""
    rank = check_latents(query, cache, seq_lens, block_table, key_projection, value_projection).rank
    step = plan(seq_lens, block_table, cache.shape[1]) if step is None else step
    absorbed, options = mla.absorb(query, key_projection), AttentionOptions(softmax_scale=softmax_scale)
    with fastattn.use_kernel("triton"):  # whatever else is installed
        out = mla.attention(absorbed, cache, step, options, latent_rank=rank)
    return mla.project(out, value_projection)
