"""12 · What `fastattn` launches on Hopper: roles for warps.

Until here the warps of a program load, multiply and take exponentials in step. On Hopper products are asynchronous
(`wgmma`), so three groups of four warps (warpgroups) get roles (warp specialisation): one copies keys and values into
slots of shared memory, two multiply, each 64 of the 128 rows. For each slot a barrier says that it is full, and one
that it is empty; keys and values have slots of their own. The two groups that multiply take turns (ping-pong), by named
barriers: while one is at its softmax, the products of the other go on. Its own product with the values of the step
before goes on, too: a group waits for that after half of the exponentials. Steps go from the last keys to the first, so
those with a mask come first. Registers go from the group that copies to those that multiply. A program draws tile after
tile from a counter (a persistent program), so that the keys of the next one come while this one is stored. A group
leaves a slot thread by thread: that its warps meet first would cost a barrier right behind the products.

Gain: tensor cores wait less, as exponentials, loads and stores run beside their products. Out of pages of 16 tokens
each thread copies 16 bytes; from rows, and from blocks that hold whole steps, one instruction copies a tile (TMA), as
in FlashAttention-3.

Source: Shah et al. 2024, "FlashAttention-3" (3.1 and 3.2); fastattn/kernels/triton/prompts_hopper.py and
load_hopper.py; NVIDIA, PTX ISA, `wgmma`, `mbarrier`, `bar`, `setmaxnreg`.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import fastattn
from fastattn import chunked_prefill
from fastattn.kernels.triton import hopper
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from twinattn.course.ladder import check_pages


def missing(device: torch.device) -> str | None:
    """Return the GPU that this rung needs, or None if the device is one."""
    has_it = hopper.is_there(device)
    return None if has_it else "a Hopper GPU (compute capability 9.0)"


def plan(
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    max_query_len: int,
    block_size: int,
) -> Plan:
    """Plan a step, once for all layers."""
    most = dict(max_query_len=max_query_len, max_seq_len=block_table.shape[1] * block_size)
    return chunked_prefill.plan(Batch(cu_seqlens_q, seq_lens, block_table, **most), block_size=block_size)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    max_query_len: int,
    softmax_scale: float | None = None,
    step: Plan | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    check_pages(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    if step is None:
        step = plan(cu_seqlens_q, seq_lens, block_table, max_query_len, key_cache.shape[1])
    needed = missing(query.device)
    if needed is not None:
        raise NotImplementedError(f"query: expected to be on {needed}, got {query.device}")
    options = AttentionOptions(softmax_scale=softmax_scale)
    with fastattn.use_kernel("triton"):  # whatever FlashAttention is installed
        return chunked_prefill.attention(query, key_cache, value_cache, step, options)
