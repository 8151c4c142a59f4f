"""Multi-head latent attention by the fastest kernel; the twin of `refattn.mla`.

`prefill` computes keys and values from latents with one matrix product each, and attends over rows. `attention` uses a
kernel that reads each latent once, as key and as value.
"""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from fastattn.kernels import order
from fastattn.kernels.kernel import PLAN, fields_of
from fastattn.kernels.memory import in_memory
from fastattn.kernels.order import refuse_unknown
from fastattn.kernels.problem import Problem, latent_scales
from fastattn.kernels.replay import memo_of
from fastattn.metadata import positions, slot_mapping
from refattn import allocation
from refattn.batch import Batch
from refattn.checks import check_sizes, rows_with_slots
from refattn.checks_of_calls import check_latent_prefill, check_projection
from refattn.checks_of_steps import check_workspace
from refattn.checks_of_writes import check_latent_slots
from refattn.keys import Pages, Rows, latents_of
from refattn.modes import refuse_gradients, without_autocast
from refattn.options import AttentionOptions
from refattn.packed_latents import is_packed
from refattn.plan import ContextChunk, Plan, PrefillPlan
from refattn.scales import FP8_FORMATS
from refattn.trees import AttentionPlan

TILE = 128  # tokens per product of keys and values under `batch_invariant`
PREFILL = PLAN  # the plan fields that `prefill` reads
PREFILL |= fields_of(PrefillPlan, "own", "chunks", "block_size", "blocks") | fields_of(ContextChunk, "plan", "slots")


def plan(batch: Batch, *, block_size: int) -> Plan:
    """Plan `attention`: all tokens of each sequence in the cache, causal; the twin of `refattn.mla.plan`."""
    check_sizes(block_size=block_size)
    return Plan(batch, block_size)


def attention(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "n p c"],
    plan: AttentionPlan,
    options: AttentionOptions,
    *,
    latent_rank: int,
    cache_scale: float = 1.0,
    query_scale: float | None = None,
    fp8_weights: bool = False,
    return_lse: bool = False,
    out: Float[Tensor, "t h {latent_rank}"] | None = None,
) -> Float[Tensor, "t h {latent_rank}"] | tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend from absorbed queries to the latents of each sequence; the twin of `refattn.mla.attention`.

    Arguments, results and errors are those of `refattn.mla.attention`. With `fp8_weights`, FlashMLA may be chosen,
    which rounds the softmax weights.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    keys = latents_of(cache, latent_rank, cache_scale, query_scale, fp8_weights)
    return dispatch.attend(query, keys, plan, options, out, return_lse)


def plan_prefill(batch: Batch, *, block_size: int, workspace: int, max_context_len: int | None = None) -> PrefillPlan:
    """Plan `prefill`: new tokens among themselves, and their context in chunks; the twin of `refattn.mla.plan_prefill`.

    All sizes follow from Python ints, so nothing synchronizes with a device. The slots that the chunks read take 8
    bytes per token of the longest context and sequence. ALiBi needs query positions, so a batch on a device must have
    `num_tokens`, or `prefill` raises a ValueError.
    """
    check_sizes(block_size=block_size)
    whole = Plan(batch, block_size)
    longest = check_workspace(batch, workspace, max_context_len)
    num_tokens = int(batch.cu_seqlens_q[-1]) if batch.device.type == "cpu" else batch.num_tokens
    where = None if num_tokens is None else positions(batch, num_tokens).int()
    contexts = batch.context_lens
    assert batch.block_table is not None  # a plan over pages has checked it
    room = min(batch.max_seq_len, batch.block_table.shape[1] * block_size)  # bounds chunks past all contexts

    def rows(lengths: Tensor, ends: Tensor, longest: int, first_keys: Tensor, *, causal: bool) -> Plan:
        keys = Batch(batch.cu_seqlens_q, lengths, None, batch.max_query_len, longest, num_tokens=batch.num_tokens)
        plan = Plan(keys, None, causal, first_keys=first_keys, positions=None if causal else where)
        memo_of(plan).cu_seqlens_k = ends  # computed once and not in every layer
        return plan

    chunks = []
    size = max(1, min(workspace // max(1, batch.num_seqs), longest))
    for start in range(0, longest, size):
        counts = (contexts - start).clamp(0, size)
        begins = torch.full_like(counts, start)
        ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        reads = Batch(ends, (begins + counts).clamp(max=room), batch.block_table, size, room)
        slots = slot_mapping(reads, batch.num_seqs * size, block_size=block_size).clamp(min=0)
        chunks.append(ContextChunk(rows(counts, ends, size, begins, causal=False), slots))
    own = rows(batch.query_lens, batch.cu_seqlens_q, batch.max_query_len, contexts, causal=True)
    return PrefillPlan(own, tuple(chunks), block_size, None if whole.needs is None else whole.needs.blocks)


@without_autocast
def prefill(
    query: Float[Tensor, "t h d"],
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: Shaped[Tensor, "n p c"],
    plan: PrefillPlan,
    options: AttentionOptions,
    *,
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    cache_scale: float = 1.0,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from new tokens to themselves and to their context; the twin of `refattn.mla.prefill`.

    Keys and values are computed for the new tokens, then chunk by chunk, and the output of each chunk is merged at once
    into a float32 output and its log-sum-exp. So whatever the context, it allocates at most these elements, where W is
    the workspace, at least one token per sequence:

        keys and values    max(t, W) * h * (nope + rope + dv)    in the type of the query
        latents            W * (r + rope) * 2                    as stored, and in the type of the query
        outputs            2 * t * h * dv                        in float32: before and after a merge
                           t * h * dv                            in the type of the query: the chunk's
        log-sum-exps       3 * t * h                             in float32

    The attention kernel may need memory of its own. With `batch_invariant` there are no chunks, as their sizes depend
    on the batch: the keys and values of all sequences, padded to the longest, are in memory at once. Arguments, results
    and errors are those of `refattn.mla.prefill`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    projections = dict(key_projection=key_projection, value_projection=value_projection)
    tensors = query, latent, rope_key, cache
    check_latent_prefill(*tensors, plan, options, out, return_lse, **projections, cache_scale=cache_scale)
    rows = dict(query=query, latent=latent, rope_key=rope_key, cache=cache)
    refuse_gradients(dispatch.NO_BACKWARD, **rows, **projections, options=options)
    refuse_unknown("mla.prefill", PREFILL, plan)
    rank, rope, cache = latent.shape[1], rope_key.shape[1], in_memory("cache", cache)
    projections = {name: projection.contiguous() for name, projection in projections.items()}  # once for all chunks
    latent, rope_key = _as_read(latent, rope_key, cache, cache_scale)
    if options.batch_invariant and plan.own.batch.num_seqs:
        tokens = torch.cat([latent, rope_key], dim=-1)
        answer, lse = _attend_in_one_part(query, tokens, cache, plan, options, rank, cache_scale, **projections)
        out = answer if out is None else out.copy_(answer)
        return (out, lse) if return_lse else out
    answer, lse = dispatch.compute(query, _keys_and_values(latent, rope_key, **projections), plan.own, options)
    if plan.chunks:
        answer = answer.to(lse.dtype)  # hundreds of merges in 16 bits would lose precision
    for chunk in plan.chunks:
        part, part_lse = _attend_to_chunk(query, cache, chunk, options, rank, rope, cache_scale, **projections)
        answer, lse = dispatch.run("merge", outs=[answer, part], lses=[lse, part_lse])
        del part, part_lse  # free it before the next chunk
    answer = answer.to(query.dtype)
    out = answer if out is None else out.copy_(answer)
    return (out, lse) if return_lse else out


def _attend_in_one_part(
    query: Float[Tensor, "t h d"],
    tokens: Float[Tensor, "t r+rope"],
    cache: Shaped[Tensor, "n p c"],
    plan: PrefillPlan,
    options: AttentionOptions,
    rank: int,
    cache_scale: float,
    **projections: Tensor,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to pages of keys and values that are computed by products of a fixed size, `TILE` tokens.

    The bits of a product depend on its shape, and the bits of a merge on how keys are split.
    """
    width, new = tokens.shape[1], plan.own.batch
    longest = sum(chunk.plan.batch.max_seq_len for chunk in plan.chunks) + new.max_query_len
    room = max(1, -(-longest // TILE)) * TILE  # rows of a sequence
    whole = tokens.new_zeros(new.num_seqs * room + 1, width)  # the last row is for padding
    counted = torch.zeros_like(new.seq_lens)
    parts = [(chunk.plan.batch.cu_seqlens_k, chunk.plan.batch.seq_lens, chunk.slots) for chunk in plan.chunks]
    for starts, lens, slots in (*parts, (new.cu_seqlens_q, new.query_lens, None)):
        rows = tokens if slots is None else _read_numbers(cache, slots, rank, width - rank, cache_scale, query.dtype)
        at = torch.arange(len(rows), device=rows.device)
        sequence = torch.searchsorted(starts[1:], at, right=True)
        known = sequence.clamp(max=new.num_seqs - 1)
        place = known * room + counted[known] + at - starts[known]
        whole[place.masked_fill(sequence >= new.num_seqs, new.num_seqs * room)] = rows
        counted = counted + lens
    made = [_keys_and_values(x[:, :rank], x[:, rank:], **projections) for x in whole[:-1].split(TILE)]
    pools = (torch.stack(x) for x in zip(*made, strict=True))
    table = torch.arange(new.num_seqs * room // TILE, dtype=torch.int32, device=query.device).view(new.num_seqs, -1)
    batch = replace(new, seq_lens=counted, block_table=table, max_seq_len=room, num_keys=None)
    return dispatch.compute(query, Pages(*pools), Plan(batch, TILE), options)


def _attend_to_chunk(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "n p c"],
    chunk: ContextChunk,
    options: AttentionOptions,
    rank: int,
    rope: int,
    cache_scale: float,
    *,
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from all new tokens to a chunk of their contexts; its keys and values are freed on return."""
    read = _read_numbers(cache, chunk.slots, rank, rope, cache_scale, query.dtype)
    projections = dict(key_projection=key_projection, value_projection=value_projection)
    keys = _keys_and_values(read[:, :rank], read[:, rank:], **projections)
    return dispatch.compute(query, keys, chunk.plan, options.without_sinks())


def _as_read(
    latent: Float[Tensor, "t r"], rope_key: Float[Tensor, "t rope"], cache: Shaped[Tensor, "n p c"], cache_scale: float
) -> tuple[Float[Tensor, "t r"], Float[Tensor, "t rope"]]:
    """Return new latents and rotary keys as later steps read them: quantized and dequantized for a quantized pool."""
    if cache.dtype not in FP8_FORMATS and not is_packed(cache):
        return latent, rope_key
    (t, rank), rope = latent.shape, rope_key.shape[1]
    pool = allocate(max(1, t), 1, rank, rope, dtype=cache.dtype, device=cache.device)  # kernels support blocks of 1
    slots = torch.arange(t, device=cache.device)
    write(latent, rope_key, pool, slots, cache_scale=cache_scale)
    read = _read_numbers(pool, slots, rank, rope, cache_scale, latent.dtype)
    return read[:, :rank], read[:, rank:]


def _read(cache: Shaped[Tensor, "n p c"], slots: Int64[Tensor, "s"]) -> Shaped[Tensor, "s c"]:
    """Read rows of the pool, by one index if its blocks are contiguous."""
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        return cache.flatten(0, 1).index_select(0, slots)
    return cache[slots // block_size, slots % block_size]


def _read_numbers(
    cache: Shaped[Tensor, "n p c"],
    slots: Int64[Tensor, "s"],
    rank: int,
    rope: int,
    cache_scale: float,
    dtype: torch.dtype,
) -> Float[Tensor, "s {rank}+{rope}"]:
    """Read the latents and rotary keys in the given slots, dequantized to `dtype` if the pool is quantized."""
    if is_packed(cache):
        rows = _read(cache, slots)
        kernel = order.choose(Problem("read_packed", rows.device, dtype))
        return kernel.read_packed(rows, rank, rope, dtype)
    if cache.dtype not in FP8_FORMATS:
        return _read(cache, slots)[:, : rank + rope]
    quantized = _read(cache.view(torch.uint8), slots).view(cache.dtype)[:, : rank + rope]
    return quantized.to(dtype).mul_(torch.tensor(cache_scale, dtype=torch.float32, device="cpu"))


def _keys_and_values(
    latent: Float[Tensor, "s r"],
    rope_key: Float[Tensor, "s rope"],
    *,
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
) -> Rows:
    """Project latents to the keys `[s, h, d]` and values `[s, h, dv]` of all heads, by one product each."""
    h, nope, _ = key_projection.shape
    key = latent.new_empty(latent.shape[0], h, nope + rope_key.shape[1])
    per_head = (latent.expand(h, -1, -1), key_projection.mT)
    torch.bmm(*per_head, out=key[..., :nope].transpose(0, 1))  # written in place, without a copy
    key[..., nope:] = rope_key[:, None]
    return Rows(key, (latent @ value_projection.flatten(0, 1).mT).unflatten(1, (h, -1)))


@without_autocast
def absorb(query: Float[Tensor, "t h d"], key_projection: Float[Tensor, "h nope r"]) -> Float[Tensor, "t h absorbed"]:
    """Absorb the key projection into queries, by one batched product; the twin of `refattn.mla.absorb`."""
    check_projection(query, "query", key_projection, "key_projection", "h nope r")
    nope, rank = key_projection.shape[1:]
    absorbed = query.new_empty(*query.shape[:2], rank + query.shape[2] - nope)
    absorbed[..., :rank] = rearrange(query[..., :nope], "t h nope -> h t nope").matmul(key_projection).transpose(0, 1)
    absorbed[..., rank:] = query[..., nope:]
    return absorbed


@without_autocast
def project(latent: Float[Tensor, "t h r"], value_projection: Float[Tensor, "h dv r"]) -> Float[Tensor, "t h dv"]:
    """Turn the latents that `attention` returns into the outputs of the heads; the twin of `refattn.mla.project`."""
    check_projection(latent, "latent", value_projection, "value_projection", "h dv r")
    return latent.transpose(0, 1).matmul(value_projection.mT).transpose(0, 1)


allocate = allocation.allocate_latents


def write(
    latent: Shaped[Tensor, "rows r"],
    rope_key: Shaped[Tensor, "rows rope"],
    cache: Shaped[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    cache_scale: float = 1.0,
) -> None:
    """Write new latents and rotary keys into the pool, in place, in one launch; the twin of `refattn.mla.write`."""
    latent, rope_key = rows_with_slots(latent, rope_key, slot_mapping)
    check_latent_slots(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)
    refuse_gradients(dispatch.NO_BACKWARD, latent=latent, rope_key=rope_key, cache=cache)
    if is_packed(cache):
        dispatch.run("write_packed", latent=latent, rope_key=rope_key, cache=cache, slot_mapping=slot_mapping)
        return
    rank, width = latent.shape[1], latent.shape[1] + rope_key.shape[1]
    pages, scales = cache[:, :, None], latent_scales(cache, cache_scale)
    tokens = dict(key=latent[:, None], value=rope_key[:, None])
    pools = dict(key_cache=pages[..., :rank], value_cache=pages[..., rank:width])
    if scales is None:
        dispatch.run("write", **tokens, **pools, slot_mapping=slot_mapping)
    else:
        dispatch.run("write_quantized", **tokens, **pools, slot_mapping=slot_mapping, scales=scales)
