"""Multi-head latent attention: a token caches one short vector, from which each head's key and value are computed.

Only a token's latent `c` and its rotary key are cached, `r + rope` elements (512 + 64 in DeepSeek-V2 and V3):

    key of head h      [ W_k[h] c | rotary key ]        nope + rope elements, the rotary key shared by all heads
    value of head h      W_v[h] c                       dv elements

Two ways to the same output:

    prefill     compute keys and values from the latents, then attend: many queries share the cost
    attention   apply the matrix to the query: q . (W_k c) = (W_k^T q) . c, so heads read the cache directly; the output
                is a latent, too, which `project` turns into the head's output; no projection per key

The second has one KV head of size `r + rope` for all query heads; its values are the first `r` elements of its keys.

A pool may be fp8, `x = cache_scale * quantized`, with one scale per layer: a latent is both key and value, in one row
with its rotary key. A write then quantizes, like `quantized.write`.

A pool of bytes holds packed rows: fp8 latents with a scale per 128 elements, which the write computes, and unquantized
rotary keys (`refattn.packed_latents`; 656 bytes per token with the sizes above).
"""

from dataclasses import replace
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from refattn import allocation, kv_cache, quantized
from refattn.attention import attend_sequences, attend_to, finish
from refattn.batch import Batch
from refattn.checks import check_sizes, rows_with_slots
from refattn.checks_of_calls import check_latent_prefill, check_projection
from refattn.checks_of_steps import check_workspace
from refattn.checks_of_writes import check_latent_slots
from refattn.keys import latents_of, read_latents, read_packed
from refattn.merge import merge
from refattn.metadata import positions
from refattn.modes import compute_dtype, without_autocast
from refattn.options import AttentionOptions
from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, is_packed, packed_parts
from refattn.plan import ContextChunk, Plan, PrefillPlan
from refattn.rounding import group_scales, to_fp8
from refattn.scales import FP8_FORMATS, Fp8Scales
from refattn.trees import AttentionPlan


def plan(batch: Batch, *, block_size: int) -> Plan:
    """Plan `attention`: all tokens of each sequence in the cache, causal.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are checked on a CPU.
    """
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
    """Attend from absorbed queries to the latents of each sequence, the new ones included.

        score[j] = softmax_scale * (query[:r] . c[j] + query[r:] . rotary key[j])
        out      = sum_j softmax(score)[j] * c[j]

    Write the new latents first (`write`). Use it for decodes, drafted tokens, and wherever few queries read many keys.

    Args:
        query: absorbed queries of the new tokens (`absorb`), with `d = r + rope`.
        cache: the pool of latents, `c >= r + rope`; further elements are never read. In the type of the query, in fp8
            (`torch.float8_e4m3fn` or `torch.float8_e5m2`), or in packed rows (`torch.uint8`).
        plan: from `plan` or another path over pages, once per step; also a cascade or draft trees.
        options: the layer's options. `softmax_scale` is required, as it depends on the head size before absorption.
        latent_rank: elements of a latent, `r`.
        cache_scale: the scale of quantized values, above 0, one for latents and rotary keys; 1 for an unquantized pool.
        query_scale: quantize queries to the format of the pool under this scale, above 0, as in an fp8 kernel. None:
            queries are not quantized.
        fp8_weights: with a `query_scale`, let a kernel also round the softmax weights to that format before the product
            with the latents. This function does not. In such a kernel each weight differs by at most a sixteenth of
            itself (e4m3) or 2**-10 of the largest weight of its query, whichever is more.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        Latents, which `project` turns into the outputs of the heads; with `return_lse` also the natural log-sum-exp.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C; one scale: `k_scale` of vLLM's MLA backends.
    """
    keys = latents_of(cache, latent_rank, cache_scale, query_scale, fp8_weights)
    return attend_to(query, keys, plan, options, return_lse=return_lse, out=out)


def plan_prefill(batch: Batch, *, block_size: int, workspace: int, max_context_len: int | None = None) -> PrefillPlan:
    """Plan `prefill`: the new tokens among themselves, and their context in chunks that fit into a workspace.

    Each chunk has `workspace // b` tokens of every sequence, fewer where a context ends:

        context of a    0 1 2 3 4 5 6        workspace 6, two sequences: 3 tokens each
        context of b    0 1                  chunk 0: a 0 1 2, b 0 1 | chunk 1: a 3 4 5 | chunk 2: a 6

    Args:
        batch: the lengths and the block table; `seq_lens` must include the new tokens.
        block_size: tokens in a block, `p`.
        workspace: the most tokens whose keys and values are computed at a time, at least one per sequence.
        max_context_len: the longest context to make chunks for; the last chunks are empty if no context is that long.
            None: the longest context of the batch, or on a device, where lengths are not read, `max_seq_len - 1`.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are checked on a CPU.
    """
    check_sizes(block_size=block_size)
    whole = Plan(batch, block_size)
    longest = check_workspace(batch, workspace, max_context_len)
    assert batch.block_table is not None  # a plan over pages has checked it
    query_lens, contexts = batch.query_lens.tolist(), batch.context_lens.tolist()
    where = positions(batch, sum(query_lens)).int()

    def rows(lengths: list[int], longest: int, first_keys: list[int], *, causal: bool) -> Plan:
        seq_lens, first = (torch.tensor(x, dtype=torch.int32, device=batch.device) for x in (lengths, first_keys))
        keys = Batch(batch.cu_seqlens_q, seq_lens, None, batch.max_query_len, longest, num_tokens=batch.num_tokens)
        return Plan(keys, None, causal, first_keys=first, positions=None if causal else where)

    chunks = []
    size = max(1, min(workspace // max(1, batch.num_seqs), longest))
    for start in range(0, longest, size):
        counts = [max(0, min(size, context - start)) for context in contexts]
        slots = torch.zeros(batch.num_seqs * size, dtype=torch.int64, device=batch.device)
        row = 0
        for sequence, count in enumerate(counts):
            for j in range(start, start + count):
                slots[row] = batch.block_table[sequence, j // block_size].long() * block_size + j % block_size
                row += 1
        chunks.append(ContextChunk(rows(counts, size, [start] * batch.num_seqs, causal=False), slots))
    own = rows(query_lens, batch.max_query_len, contexts, causal=True)
    return PrefillPlan(own, tuple(chunks), block_size, None if whole.needs is None else whole.needs.blocks)


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
    """Attend from new tokens to themselves and to their context, over keys and values computed from latents.

    The new tokens need not be in the cache, but their context must be. The partial outputs of the new tokens and of
    each context chunk merge. Over a quantized pool the new tokens are first quantized and dequantized as `write` would,
    so the output does not depend on how a prompt was split into chunks.

    Args:
        query: new tokens, `d = nope + rope`, not absorbed.
        latent: latents of the new tokens.
        rope_key: rotary keys of the new tokens, shared by all heads.
        cache: the pool of latents, as for `attention`.
        plan: from `plan_prefill`, once per step.
        options: the layer's options, with `softmax_scale`; sinks count once.
        key_projection: the projection to each head's keys, `W_k`.
        value_projection: the projection to each head's values, `W_v`.
        cache_scale: the scale of quantized values, as for `attention`.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs of the heads; with `return_lse` also the natural log-sum-exp.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: DeepSeek-AI 2024, "DeepSeek-V2"; context in chunks of a workspace: vLLM's MLA backends.
    """
    projections = dict(key_projection=key_projection, value_projection=value_projection)
    tensors = query, latent, rope_key, cache
    check_latent_prefill(*tensors, plan, options, out, return_lse, **projections, cache_scale=cache_scale)
    rank, rope = latent.shape[1], rope_key.shape[1]
    rows = rearrange(cache, "n p c -> (n p) c")
    latent, rope_key = _as_read(latent, rope_key, cache, cache_scale)

    if options.batch_invariant:
        latent, rope_key, plan = _in_one_part(latent, rope_key, rows, plan, cache_scale, query.dtype)

    def part(latent: Tensor, rope_key: Tensor, plan: Plan, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        asks = (last > first for first, last in plan.batch.query_rows())
        seen = (slice(k0, k1 if some else k0) for (k0, k1), some in zip(plan.batch.key_rows(), asks, strict=True))
        one_by_one = options.batch_invariant
        sequences = (_keys_and_values(latent[x], rope_key[x], one_by_one=one_by_one, **projections) for x in seen)
        return attend_sequences(query, sequences, plan, options, value_head_size=value_projection.shape[1])

    answers = [part(latent, rope_key, plan.own, options)]
    for chunk in plan.chunks:
        read = _numbers(rows[chunk.slots], rank, rope, cache_scale, query.dtype)
        answers.append(part(read[:, :rank], read[:, rank:], chunk.plan, options.without_sinks()))
    result, lse = merge(*zip(*answers, strict=True))
    return finish(result, lse, query.dtype, return_lse=return_lse, out=out)


def _in_one_part(
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    rows: Float[Tensor, "slots c"],
    plan: PrefillPlan,
    cache_scale: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "s r"], Float[Tensor, "s rope"], PrefillPlan]:
    """Return the latents and rotary keys of each sequence in one part, context first, and a plan over them.

    The chunk size depends on the number of sequences, and the bits of partial outputs depend on the chunk size.
    """
    sizes = latent.shape[1], rope_key.shape[1]
    parts = [(chunk.plan, _numbers(rows[chunk.slots], *sizes, cache_scale, dtype)) for chunk in plan.chunks]
    parts.append((plan.own, torch.cat([latent, rope_key], dim=-1)))
    sequences = [
        torch.cat([tokens[slice(*part.batch.key_rows()[i])].to(compute_dtype(dtype)) for part, tokens in parts])
        for i in range(plan.own.batch.num_seqs)
    ]
    lens = torch.tensor([len(x) for x in sequences], dtype=torch.int32, device=latent.device)
    longest = max(map(len, sequences), default=0)
    batch = replace(plan.own.batch, seq_lens=lens, max_seq_len=longest, num_keys=None)
    whole = torch.cat(sequences) if sequences else torch.cat([latent, rope_key], dim=-1)
    return *whole.split(sizes, dim=-1), replace(plan, own=Plan(batch), chunks=())


def _as_read(
    latent: Float[Tensor, "t r"], rope_key: Float[Tensor, "t rope"], cache: Shaped[Tensor, "n p c"], cache_scale: float
) -> tuple[Float[Tensor, "t r"], Float[Tensor, "t rope"]]:
    """Return new latents and rotary keys as later steps read them: quantized and dequantized for a quantized pool."""
    if cache.dtype not in FP8_FORMATS and not is_packed(cache):
        return latent, rope_key
    (t, rank), rope = latent.shape, rope_key.shape[1]
    pool = allocate(max(1, t), 1, rank, rope, dtype=cache.dtype, device=cache.device)
    write(latent, rope_key, pool, torch.arange(t, device=cache.device), cache_scale=cache_scale)
    read = _numbers(pool[:t, 0], rank, rope, cache_scale, latent.dtype)
    return read[:, :rank], read[:, rank:]


def _numbers(
    rows: Shaped[Tensor, "s c"], rank: int, rope: int, cache_scale: float, dtype: torch.dtype
) -> Float[Tensor, "s {rank}+{rope}"]:
    """Return the latents and rotary keys in rows of a pool, in the compute type of queries of `dtype`."""
    if is_packed(rows):
        return read_packed(rows, rank, rope, dtype)
    return read_latents(rows[:, : rank + rope], cache_scale, dtype)


@without_autocast
def _keys_and_values(
    latent: Float[Tensor, "s r"],
    rope_key: Float[Tensor, "s rope"],
    *,
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    one_by_one: bool,
) -> tuple[Float[Tensor, "s h d"], Float[Tensor, "s h dv"]]:
    """Project latents to all heads' keys and values in the compute type; `one_by_one` is batch-invariant."""
    if one_by_one and len(latent) > 1:
        fixed: dict[str, Any] = dict(key_projection=key_projection, value_projection=value_projection, one_by_one=True)
        tokens = zip(latent.split(1), rope_key.split(1), strict=True)
        keys, values = zip(*(_keys_and_values(*token, **fixed) for token in tokens), strict=True)
        return torch.cat(keys), torch.cat(values)
    compute = compute_dtype(latent.dtype)
    c, to_key, to_value = (x.to(compute, copy=True) for x in (latent, key_projection, value_projection))
    shared = repeat(rope_key.to(compute), "s rope -> s h rope", h=len(to_key))
    key = torch.cat([einsum(c, to_key, "s r, h nope r -> s h nope"), shared], dim=-1)
    return key, einsum(c, to_value, "s r, h dv r -> s h dv")


@without_autocast
def absorb(query: Float[Tensor, "t h d"], key_projection: Float[Tensor, "h nope r"]) -> Float[Tensor, "t h absorbed"]:
    """Absorb the key projection into queries for `attention`: replace the `nope` part by `W_k[h]^T q`.

    Args:
        query: `d = nope + rope`, the rotary part last.
        key_projection: the projection from latents to keys, `W_k`.

    Returns:
        Queries of `r + rope` elements, in the type of `query`.

    Raises:
        ValueError: if the heads or sizes do not fit.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2.
    """
    check_projection(query, "query", key_projection, "key_projection", "h nope r")
    compute, nope = compute_dtype(query.dtype), key_projection.shape[1]
    latent = einsum(query[..., :nope].to(compute), key_projection.to(compute), "t h nope, h nope r -> t h r")
    return torch.cat([latent.to(query.dtype), query[..., nope:]], dim=-1)


@without_autocast
def project(latent: Float[Tensor, "t h r"], value_projection: Float[Tensor, "h dv r"]) -> Float[Tensor, "t h dv"]:
    """Turn the latents that `attention` returns into the outputs of the heads, `W_v[h] latent`.

    Args:
        latent: one per query and head.
        value_projection: the projection from latents to values, `W_v`.

    Returns:
        The outputs, in the type of `latent`.

    Raises:
        ValueError: if the heads or sizes do not fit.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2.
    """
    check_projection(latent, "latent", value_projection, "value_projection", "h dv r")
    compute = compute_dtype(latent.dtype)
    out = einsum(latent.to(compute), value_projection.to(compute), "t h r, h dv r -> t h dv")
    return out.to(latent.dtype)


allocate = allocation.allocate_latents


def write(
    latent: Shaped[Tensor, "rows r"],
    rope_key: Shaped[Tensor, "rows rope"],
    cache: Shaped[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    cache_scale: float = 1.0,
) -> None:
    """Write new latents and rotary keys into rows of the pool, in place; slot -1 is padding.

        quantized = cast(clamp(x / cache_scale, -largest, largest))        into an fp8 pool, as `quantized.write`
        quantized = cast(clamp(x / scale, -448, 448))                      into packed rows, which store the scales:
        scale of 128 elements = max |x| / 448, at least 2**-126       so zeros stay zeros
        rotary key = cast(x)                                          to bfloat16

    In packed rows, a NaN or an infinity turns all elements under its scale into NaN.

    Args:
        latent: latents of the new tokens, in the type of the pool, or any floating point type for an fp8 or packed
            pool. Rows after the last slot are padding.
        rope_key: their rotary keys, of the same type.
        cache: the pool; the first `r + rope` elements of a row are changed in place.
        slot_mapping: the slot of each token, each slot at most once; -1 is not written.
        cache_scale: the scale of quantized values, as for `attention`.

    Raises:
        ValueError: if types, shapes or devices do not match; on a CPU also if a slot is outside the pool or is given
            twice. Nothing is written then.
    """
    latent, rope_key = rows_with_slots(latent, rope_key, slot_mapping)
    check_latent_slots(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)
    if is_packed(cache):
        _write_packed(latent, rope_key, cache, slot_mapping)
        return
    rank, width = latent.shape[1], latent.shape[1] + rope_key.shape[1]
    pages = rearrange(cache, "n p c -> n p 1 c")  # as one KV head: the latent is its key, the rotary key its value
    key, value = (rearrange(x, "t c -> t 1 c") for x in (latent, rope_key))
    key_cache, value_cache = pages[..., :rank], pages[..., rank:width]
    if cache.dtype in FP8_FORMATS:
        scales = Fp8Scales(cache_scale, cache_scale, format=cache.dtype)
        quantized.write(key, value, key_cache, value_cache, slot_mapping, scales=scales)
    else:
        kv_cache.write(key, value, key_cache, value_cache, slot_mapping)


def _write_packed(
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: UInt8[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    quantized_values, scales, rotary = packed_parts(cache, latent.shape[1], rope_key.shape[1])
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block, row = divmod(slot, cache.shape[1])
        scale = group_scales(latent[token])
        groups = rearrange(latent[token], "(g e) -> g e", e=LATENT_GROUP)
        rounded = to_fp8(groups, rearrange(scale, "g -> g 1"), PACKED_FORMAT)
        quantized_values[block, row] = rearrange(rounded, "g e -> (g e)").view(torch.uint8)
        scales[block, row], rotary[block, row] = scale, rope_key[token].to(rotary.dtype)
