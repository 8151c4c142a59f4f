"""Selected keys by the fastest kernels, without synchronizing; the twin of `refattn.sparse`."""

from jaxtyping import Float, Float32, Int32, Int64, Shaped
from torch import Tensor

from fastattn import chunked_prefill, dispatch, mla
from fastattn.kernels import order
from fastattn.kernels.memory import in_memory
from fastattn.kernels.problem import problem_of
from refattn import allocation
from refattn.batch import Batch
from refattn.index_keys import (
    check_index_read,
    check_index_write,
    check_scores,
    check_select,
    check_selected,
    check_selected_options,
)
from refattn.modes import refuse_gradients
from refattn.options import AttentionOptions
from refattn.plan import Plan

allocate = allocation.allocate_index_keys


def write(key: Float[Tensor, "t d"], index_cache: Shaped[Tensor, "n p c"], slot_mapping: Int64[Tensor, "t"]) -> None:
    """Write index keys of new tokens into their pool, in place; the twin of `refattn.sparse.write`."""
    check_index_write(key, index_cache, slot_mapping)
    refuse_gradients(dispatch.NO_BACKWARD, key=key)
    dispatch.run("write_index", key=key, index_cache=index_cache, slot_mapping=slot_mapping)


def read(index_cache: Shaped[Tensor, "n p c"], slots: Int64[Tensor, "s"]) -> Float[Tensor, "s d"]:
    """Return the index keys in some slots of a pool; the twin of `refattn.sparse.read`."""
    check_index_read(index_cache, slots)
    index_cache = in_memory("index_cache", index_cache)
    return order.choose(problem_of("read_index", dict(index_cache=index_cache))).read_index(index_cache, slots)


def scores(
    query: Float[Tensor, "t h d"],
    weights: Float[Tensor, "t h"],
    index_cache: Shaped[Tensor, "n p c"],
    plan: Plan,
) -> Float32[Tensor, "t s"]:
    """Score every visible key, in one pass over the index keys; the twin of `refattn.sparse.scores`.

    Scores are bit-identical in any batch, as each product has one query.
    """
    check_scores(query, weights, index_cache, plan)
    return dispatch.run("score_index", query=query, weights=weights, index_cache=index_cache, plan=plan)


def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t {topk}"]:
    """Select the keys with the highest scores, ties to lower positions; the twin of `refattn.sparse.select`."""
    check_select(scores, topk)
    return dispatch.run("select", scores=scores, topk=topk)


def slots(batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int) -> Int32[Tensor, "t k"]:
    """Return the slots of selected keys in the pool; the twin of `refattn.sparse.slots`.

    On a device, positions outside the sequence give -1, so that no kernel reads them.
    """
    check_selected(batch, positions, block_size=block_size)
    return dispatch.run("selected_slots", batch=batch, positions=positions, block_size=block_size)


def plan(batch: Batch, *, positions: Int32[Tensor, "t k"], block_size: int) -> Plan:
    """Plan attention of each query to its selected keys; the twin of `refattn.sparse.plan`.

    Padding rows become sequences without queries.
    """
    check_selected(batch, positions, block_size=block_size)
    made = dispatch.run("plan_selected", batch=batch, positions=positions, block_size=block_size)
    rows, seq_lens, table, sequences = made
    one_by_one = Batch(
        cu_seqlens_q=rows,
        seq_lens=seq_lens,
        block_table=table,
        max_query_len=1,
        max_seq_len=positions.shape[1],
        num_tokens=batch.num_tokens,
    )
    return Plan(one_by_one, 1, causal=False, sequences=sequences)


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
    """Attend from each new token to its selected keys; the twin of `refattn.sparse.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each; if the pool cannot be
            viewed as blocks of one token without a copy.
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
    """Attend from absorbed queries to selected latents; the twin of `refattn.sparse.latent_attention`.

    Raises:
        NotImplementedError: as `attention`.
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
    """Return a view of a pool with blocks of one token; the twin of `refattn.sparse.by_token`.

    Raises:
        NotImplementedError: if consecutive tokens are not evenly spaced across blocks, as in the layout HND.
    """
    if not isinstance(pool, Tensor) or pool.ndim < 3:
        raise ValueError(f"{name}: expected a pool of blocks of tokens, got {pool!r:.60}")
    if len(pool) > 1 and pool.stride(0) != pool.shape[1] * pool.stride(1):
        raise NotImplementedError(
            f"{name}: a pool is read token by token where its tokens follow one another, as in NHD; the strides of "
            f"this one are {tuple(pool.stride()[:2])} with blocks of {pool.shape[1]} tokens, and it would be copied"
        )
    return pool.flatten(0, 1).unsqueeze(1)
