"""11 · Latents of eight bits, converted by those that load them.

The same call over a pool of fp8: half of the bytes. Tensor cores multiply 16 bits here, as queries and weights are not
rounded, so each element has to be converted. On Hopper the group of warps that loads does it, on the way from registers
to a slot; with few heads, both products convert the tile that they read.

Gain: with 16 heads, where bytes are the limit, up to half of the time. With 128 heads operations are, and there are as
many as before: what is gained is room for twice as many tokens, for the price of the conversion.

Source: fastattn/kernels/triton/load_latents_hopper.py, `bring`; docs/paths/mla.md, "What was tried over quantized
    values".
"""

import torch
from jaxtyping import Float, Int32, Shaped
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
    fp8_cache: Shaped[Tensor, "n p c"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    softmax_scale: float,
    cache_scale: float = 1.0,
    step: Plan | None = None,
) -> Float[Tensor, "b h dv"]:
    """Attend from the newest token of each sequence to its latents."""
    rank = check_latents(query, fp8_cache, seq_lens, block_table, key_projection, value_projection).rank
    step = plan(seq_lens, block_table, fp8_cache.shape[1]) if step is None else step
    absorbed, options = mla.absorb(query, key_projection), AttentionOptions(softmax_scale=softmax_scale)
    with fastattn.use_kernel("triton"):  # whatever else is installed
        out = mla.attention(absorbed, fp8_cache, step, options, latent_rank=rank, cache_scale=cache_scale)
    return mla.project(out, value_projection)
