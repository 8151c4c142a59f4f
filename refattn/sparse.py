"""Selected keys: a query scores all keys cheaply and attends only to the best of them.

Besides its latent (or its key and value), a token has an index key, a short vector in another pool. A small network,
the indexer, scores every visible key; the query attends to the `topk` best, for example 2048 of 131072:

    scores       0.7  0.0  0.0  2.1  0.0  0.3           of the keys at positions 0 to 5, for one query
    select 4     0    1    .    3    .    5             0.0 is a tie: the lower position wins
    slots        36   37   .    23   .    9             their slots in the pool, with blocks of 4
    plan         a sequence of one query and 4 keys with block table 36 37 23 9, in blocks of one token

The last line is the point: with blocks of one token, a list of slots *is* a block table, and each query is a sequence
of its own. So selection needs no new attention: as in local attention, the plan has virtual sequences, over pages,
quantized values or latents.

    allocate, write       the pool of index keys: in 16 bits, or in fp8 with one scale per token, as servers lay it out
    scores                of every visible key
    select                the best of them, with a deterministic rule for ties
    slots, plan           their slots, and the plan of attention to them
    attention             over pages; `latent_attention` over latents

Ties are common: a score is a sum of ReLUs, so many scores are exactly 0, and the `topk` boundary often falls among
these. Without a rule, the selection would differ from run to run and from rank to rank.

Source: DeepSeek-AI 2025, "DeepSeek-V3.2".
"""

from dataclasses import replace

import torch
from einops import einsum
from jaxtyping import Float, Float32, Int32, Int64, Shaped
from torch import Tensor

from refattn import allocation, chunked_prefill, masks, mla
from refattn.batch import Batch
from refattn.index_keys import (
    INDEX_FORMAT,
    SCALE_BYTES,
    SMALLEST,
    check_index_read,
    check_index_write,
    check_scores,
    check_select,
    check_selected,
    check_selected_options,
    holds_fp8,
    index_size_of,
)
from refattn.metadata import make_batch
from refattn.modes import without_autocast
from refattn.options import AttentionOptions
from refattn.plan import Plan

allocate = allocation.allocate_index_keys


@without_autocast
def write(key: Float[Tensor, "t d"], index_cache: Shaped[Tensor, "n p c"], slot_mapping: Int64[Tensor, "t"]) -> None:
    """Write index keys of new tokens into their pool, in place.

    In an fp8 pool, a key is divided by its scale, `max(1e-4, max |x|) / 448`, and rounded.

    Args:
        key: the new index keys, after their norm and rotation; in the type of the pool, or any floating point type for
            an fp8 pool.
        index_cache: the pool, changed in place.
        slot_mapping: the slot of each token, each slot at most once; -1 is padding and is not written.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.
        NotImplementedError: if a key to be quantized requires a gradient.
    """
    check_index_write(key, index_cache, slot_mapping)
    block_size, size = index_cache.shape[1], index_size_of(index_cache)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block, row = divmod(slot, block_size)
        if not holds_fp8(index_cache):
            index_cache[block, row] = key[token]
            continue
        largest = torch.finfo(INDEX_FORMAT).max
        scale = key[token].float().abs().amax().clamp(min=SMALLEST) / torch.full((), largest, device=key.device)
        quantized = (key[token].float() / scale).clamp(-largest, largest).to(INDEX_FORMAT)
        page = index_cache[block].flatten()
        page[row * size : (row + 1) * size] = quantized.view(torch.uint8)
        at_scale = block_size * size + row * SCALE_BYTES
        page[at_scale : at_scale + SCALE_BYTES] = scale.reshape(1).view(torch.uint8)


def read(index_cache: Shaped[Tensor, "n p c"], slots: Int64[Tensor, "s"]) -> Float[Tensor, "s d"]:
    """Return the index keys in the given slots of a pool: dequantized to float32 from an fp8 pool, else in its type.

    Args:
        index_cache: the pool.
        slots: the slots of the keys, `block * p + row`.

    Returns:
        One key per slot.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if a slot is outside the pool.
    """
    check_index_read(index_cache, slots)
    blocks, rows = slots // index_cache.shape[1], slots % index_cache.shape[1]
    if not holds_fp8(index_cache):
        return index_cache[blocks, rows]
    p, size = index_cache.shape[1], index_size_of(index_cache)
    pages = index_cache.flatten(1)
    quantized = pages[:, : p * size].unflatten(1, (p, size))[blocks, rows].view(INDEX_FORMAT)
    scales = pages[:, p * size :].unflatten(1, (p, SCALE_BYTES))[blocks, rows].view(torch.float32)
    return quantized.float() * scales


@without_autocast
def scores(
    query: Float[Tensor, "t h d"],
    weights: Float[Tensor, "t h"],
    index_cache: Shaped[Tensor, "n p c"],
    plan: Plan,
) -> Float32[Tensor, "t s"]:
    """Score every visible key: `sum_h weights[h] * relu(query[h] . key)`.

    A positive factor commutes with ReLU. So the scale of an fp8 query is multiplied into its weights, like
    `head_size ** -0.5` and `heads ** -0.5`, and the scale of a key can be applied after the sum.

    Args:
        query: index queries of the new tokens, after their rotation: unquantized, or fp8 (e4m3) with their scales in
            the weights.
        weights: the weights of the index heads, with all factors; they may be negative.
        index_cache: the pool of index keys, the new ones included.
        plan: from `chunked_prefill.plan` or `interval.plan`; keys that it hides are not scored.

    Returns:
        Scores in float32, one column per position up to the batch's `max_seq_len`; `-inf` for hidden keys and past the
        end of a sequence.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", equation 1 (the "lightning indexer").
    """
    check_scores(query, weights, index_cache, plan)
    batch, block_size = plan.batch, index_cache.shape[1]
    assert batch.block_table is not None  # a plan over pages has one
    result = torch.full((len(query), batch.max_seq_len), -torch.inf, dtype=torch.float32, device=query.device)
    for i, ((q0, q1), seq_len) in enumerate(zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True)):
        places = torch.arange(seq_len, device=query.device)
        key = read(index_cache, batch.block_table[i, places // block_size].long() * block_size + places % block_size)
        products = einsum(query[q0:q1].float(), key.float(), "t h d, s d -> t h s")
        sums = einsum(weights[q0:q1].float(), products.relu(), "t h, t h s -> t s")
        result[q0:q1, :seq_len] = sums.masked_fill(~masks.visible(plan, i), -torch.inf)
    return result


def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t {topk}"]:
    """Select the keys with the highest scores for each query; ties go to lower positions.

    The selection depends only on the scores of the query, not on the batch, and is deterministic. +0 and -0 are equal;
    NaN ranks above every number, as in `torch.topk`, and NaNs are ties; a score of `-inf` is never selected.

    Args:
        scores: by position, from `scores`.
        topk: the maximum number of keys. If fewer have a score, all of them are selected, and attention is dense.

    Returns:
        Positions in ascending order; -1 past the last.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_select(scores, topk)
    selected = torch.full((len(scores), topk), -1, dtype=torch.int32, device=scores.device)
    for row, numbers in enumerate(scores.tolist()):
        keys = [j for j, score in enumerate(numbers) if score != -torch.inf]
        best = sorted(keys, key=lambda j: (numbers[j] == numbers[j], -numbers[j], j))[:topk]  # NaN first
        selected[row, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    return selected


def slots(batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int) -> Int32[Tensor, "t k"]:
    """Return the slots of selected keys in the pool, `block * p + row`; -1 for positions of -1 and padding rows.

    Args:
        batch: the lengths and the block table.
        positions: positions of the selected keys of each query row, in its sequence; entries of -1 select no key.
        block_size: tokens in a block, `p`.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if a position is outside the sequence.
    """
    block_table = check_selected(batch, positions, block_size=block_size)
    result = torch.full_like(positions, -1)
    for (q0, q1), blocks in zip(batch.query_rows(), block_table.tolist(), strict=True):
        for row in range(q0, q1):
            for column, j in enumerate(positions[row].tolist()):
                if j >= 0:
                    result[row, column] = blocks[j // block_size] * block_size + j % block_size
    return result


def plan(batch: Batch, *, positions: Int32[Tensor, "t k"], block_size: int) -> Plan:
    """Plan attention of each query to its selected keys.

    Args:
        batch: the lengths and the block table.
        positions: from `select`, or any others: entries of -1 select no key, and a position that is listed twice counts
            twice.
        block_size: tokens in a block of the pool, `p`.

    Returns:
        A plan with one sequence per query row, whose block table holds slots, in blocks of one token, for `attention`
        and `latent_attention`. `sequences` has the batch's sequence of each row.

    Raises:
        ValueError: as `slots`.
    """
    lists = [[slot for slot in row if slot >= 0] for row in slots(batch, positions, block_size=block_size).tolist()]
    rows = [(row, i) for i, (q0, q1) in enumerate(batch.query_rows()) for row in range(q0, q1)]
    one_by_one = make_batch(
        [1] * len(rows), [len(lists[row]) for row, _ in rows], [lists[row] for row, _ in rows], device=batch.device
    )
    longest = replace(one_by_one, max_seq_len=positions.shape[1])
    sequences = torch.tensor([i for _, i in rows], dtype=torch.int32, device=batch.device)
    return Plan(longest, 1, causal=False, sequences=sequences)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from each new token to its selected keys, over pages.

    Args:
        query: new tokens of all sequences, one after the other; rows after the last sequence are padding.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        plan: from `plan`.
        options: the layer's options, without ALiBi.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        As `chunked_prefill.attention`.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.
    """
    check_selected_options(options)
    keys, values = by_token("key_cache", key_cache), by_token("value_cache", value_cache)
    return chunked_prefill.attention(query, keys, values, plan, options, return_lse=return_lse, out=out)


def latent_attention(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "n p c"],
    plan: Plan,
    options: AttentionOptions,
    *,
    latent_rank: int,
    cache_scale: float = 1.0,
    return_lse: bool = False,
    out: Float[Tensor, "t h {latent_rank}"] | None = None,
) -> Float[Tensor, "t h {latent_rank}"] | tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend from absorbed queries to their selected latents: DeepSeek sparse attention.

    Arguments, results and errors are those of `mla.attention`; the plan is from `plan`, and there is no ALiBi.
    """
    check_selected_options(options)
    return mla.attention(
        query,
        by_token("cache", cache),
        plan,
        options,
        latent_rank=latent_rank,
        cache_scale=cache_scale,
        return_lse=return_lse,
        out=out,
    )


def by_token(name: str, pool: Shaped[Tensor, "n p ..."]) -> Shaped[Tensor, "slots 1 ..."]:
    """Return a pool with blocks of one token: block `slot` is row `slot % p` of block `slot // p`.

    Raises:
        ValueError: if it is not a tensor of at least 3 dimensions.
    """
    if not isinstance(pool, Tensor) or pool.ndim < 3:
        raise ValueError(f"{name}: expected a pool of blocks of tokens, got {pool!r:.60}")
    return pool.flatten(0, 1).unsqueeze(1)
