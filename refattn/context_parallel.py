"""Context parallelism: each rank has a share of the keys of a sequence and attends to it; the partial outputs merge.

Two ranks, `interleave=2`, and a sequence of 9 tokens, the last 2 of them new:

    position      0 1 2 3 4 5 6 | 7 8
    rank 0        0 1 . . 4 5 . | . 8      stores these keys, and has half of the query heads
    rank 1        . . 2 3 . . 6 | 7 .

    1. every rank gathers the queries of all heads          all_gather(query)
    2. and attends to its share of the context              no mask: all keys precede all new tokens
    3. the partial outputs merge by their LSE               all_gather(lse), then reduce_scatter(weight * part)
    4. each rank keeps its own heads, and merges in the new tokens, which every rank has

A rank without keys of a context contributes 0 with an LSE of `-inf`, which has no weight.

Recurrent layers have no keys to distribute. There each rank has consecutive new tokens, and the ranks exchange maps of
the state (`recurrent_attention`) and, for the convolution, its last inputs (`recurrent_convolve`).
"""

from dataclasses import replace

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from refattn import recurrent
from refattn.attention import attend, attend_one_by_one, attend_plan, finish, of_layer
from refattn.batch import Batch, check_block_table, check_written_blocks
from refattn.checks import check_int, check_window
from refattn.checks_of_calls import check_context_parallel
from refattn.checks_of_steps import check_contexts, check_local_lens, check_num_tokens, check_shard
from refattn.keys import Pages, QuantizedPages, Rows, read, read_query
from refattn.merge import merge
from refattn.metadata import positions
from refattn.modes import compute_dtype, without_autocast
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import ContextParallelPlan, Plan
from refattn.ranks import Group, Shard, check_is_shard
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan, check_convolution, check_ranks, check_recurrent


def plan(
    batch: Batch, *, shard: Shard, block_size: int, window_size: tuple[int, int] = (-1, -1), causal: bool = True
) -> ContextParallelPlan:
    """Plan the work of one rank: its share of each context, and the new tokens among themselves.

    A window that begins at position `i - left` begins, on the rank, at its first stored key from there on. The plan
    gives the index of that key as the query's position, with a window of `(0, -1)`.

    Args:
        batch: the lengths, the same on all ranks, and the rank's own block table, with blocks for the rank's tokens.
        shard: which rank this is, and which tokens are its own.
        block_size: tokens in a block, `p`.
        window_size: `(left, right)` in tokens of the whole sequence, both inclusive, -1 for no limit.
        causal: hide the new tokens after a query's own position; False shows every new token of the sequence. The
            context is visible in both cases.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are checked on a CPU.
    """
    block_table = check_shard(batch, shard, block_size=block_size)
    check_contexts(batch)
    left, _ = check_window(window_size)
    seq_lens = local_lens(batch.context_lens, shard)
    left = -1 if left >= batch.max_seq_len - 1 else left  # such a window hides nothing
    longest = -(-batch.max_seq_len // (shard.num_ranks * shard.interleave)) * shard.interleave
    longest = min(longest, batch.max_seq_len)
    keys = Batch(batch.cu_seqlens_q, seq_lens, block_table, batch.max_query_len, longest, num_tokens=batch.num_tokens)
    where = None
    if left >= 0:
        begins = positions(batch, int(batch.cu_seqlens_q[-1])) - left
        where = local_lens(begins.clamp(min=0).int(), shard)
    context = Plan(keys, block_size, causal=False, window_size=(0 if left >= 0 else -1, -1), positions=where)
    query_lens = batch.query_lens
    new = Batch(
        batch.cu_seqlens_q, query_lens, None, batch.max_query_len, batch.max_query_len, num_tokens=batch.num_tokens
    )
    return ContextParallelPlan(batch, shard, context, Plan(new, causal=causal, window_size=window_size))


@without_autocast
def attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: ContextParallelPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    group: Group,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
    scales: Fp8Scales | Int8Scales | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend with the heads of this rank to all tokens of each sequence, on whatever rank their keys are.

    The model's query heads are those of the ranks, concatenated; each rank has all `hk` KV heads of its tokens. The new
    tokens need not be in the caches, as their keys and values are passed.

    Args:
        query: new tokens of all sequences, the heads of this rank; rows after the last sequence are padding.
        key: keys of the new tokens, all KV heads.
        value: values of the new tokens.
        key_cache: the rank's own pool of keys; any strides.
        value_cache: the rank's own pool of values.
        plan: from `plan`, once per step.
        options: the layer's options, for the heads of this rank; sinks count once.
        group: the ranks; `plan.shard` is this rank's share.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.
        scales: the scales of quantized caches, as in `quantized.attention`; for int8 keys, those of the rank's own
            pool. New tokens attend to one another unquantized. None: the caches are in the type of the query.

    Returns:
        The outputs of this rank's heads; with `return_lse` also the natural log-sum-exp.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written and nothing exchanged then.

    Source: decode context parallelism of vLLM; Yang et al. 2024, "Context Parallelism for Scalable Million-Token
        Inference".
    """
    key_heads = check_context_parallel(
        query, key, value, key_cache, value_cache, plan, options, out, return_lse, group=group, scales=scales
    )
    all_heads = group.all_gather(query, dim=1)
    options_of_all = options.without_sinks().with_per_head(lambda x: group.all_gather(x, dim=0))
    part, lse = _attend_to_own_context(all_heads, key_cache, value_cache, plan, options_of_all, scales)

    lse_of_ranks = group.all_gather(rearrange(lse, "t h -> 1 t h"), dim=0)
    nothing = lse_of_ranks.amax(0) == -torch.inf  # no rank has a key: -inf - -inf would be NaN
    total = lse_of_ranks.masked_fill(nothing, 0.0).logsumexp(0)  # [t, h of all ranks]
    weight = torch.exp(lse - total).to(part.dtype)
    context = group.reduce_scatter(rearrange(weight, "t h -> t h 1") * part, dim=1)  # [t, h, dv]
    context_lse = total.masked_fill(nothing, -torch.inf).chunk(group.size, dim=1)[group.rank]

    new, new_lse = attend_plan(query, Rows(key[:, key_heads], value[:, key_heads]), plan.own, options)
    result, lse = merge([context, new], [context_lse, new_lse])
    return finish(result, lse, query.dtype, return_lse=return_lse, out=out)


def _attend_to_own_context(
    query: Float[Tensor, "t all_h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: ContextParallelPlan,
    options: AttentionOptions,
    scales: Fp8Scales | Int8Scales | None,
) -> tuple[Float[Tensor, "t all_h dv"], Float[Tensor, "t all_h"]]:
    """Attend with all heads to the keys of this rank, at their positions in the full sequence."""
    compute = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:2], value_cache.shape[-1], dtype=compute)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(compute, torch.float32))
    formula = attend_one_by_one if options.batch_invariant else attend
    (left, _), slopes = plan.own.window_size, options.alibi_slopes
    places = positions(plan.batch, len(query))
    pools = key_cache, value_cache
    stored = Pages(*pools) if scales is None else QuantizedPages(*pools, scales)
    query, sequences = read_query(query, stored, plan.context), read(query, stored, plan.context)
    for (q0, q1), context_len, (keys, values) in zip(
        plan.batch.query_rows(), plan.batch.context_lens.tolist(), sequences, strict=True
    ):
        j = rearrange(own_positions(context_len, plan.shard).to(query.device), "s -> 1 s")
        i = rearrange(places[q0:q1], "t -> t 1")
        distance = (i - j).to(compute).sqrt() if options.alibi_sqrt else (i - j).to(compute)
        out[q0:q1], lse[q0:q1] = formula(
            query[q0:q1].to(compute),
            keys,
            values,
            j >= i - left if left >= 0 else j < i,  # all keys of the context precede all new tokens
            bias=None if slopes is None else -rearrange(slopes.to(compute), "h -> h 1 1") * distance,
            **of_layer(options),
        )
    return out, lse


@without_autocast
def recurrent_attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions = RecurrentOptions(),
    *,
    group: Group,
    out: Float[Tensor, "t hv dv"] | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Fold new tokens into states, as `recurrent.attention`; each rank has consecutive tokens of each sequence.

    A state passes from token to token, so rank 1 would wait for rank 0. But the tokens of a rank apply a map to the
    state, which the rank can compute alone (`recurrent.state_map`), and maps compose:

        rank 0    tokens 0 .. 3    state -> state F0 + A0
        rank 1    tokens 4 .. 7    state -> state F1 + A1      begins with  state F0 + A0
        rank 2    tokens 8, 9      state -> state F2 + A2      begins with (state F0 + A0) F1 + A1

    The ranks exchange their maps once, whatever the number of tokens, and each then computes its own outputs.

    Args:
        query: as in `recurrent.attention`. All arguments have the rank's own tokens, possibly none.
        key: the rank's keys.
        value: the rank's values.
        log_decay: natural logarithm of the rank's decays.
        beta: how much of each token is written.
        states: the rank's own pool, changed in place. Before the call, the slot of a sequence holds the state before
            the tokens of all ranks, if there is one; afterwards, on every rank, the state after all of them. So any
            rank can decode.
        plan: from `recurrent.plan` over the rank's own tokens, with one slot per sequence. All ranks have the same
            sequences; their slots may differ. `has_initial_state` is taken from rank 0, which has the first tokens. The
            rank with the last token of a block saves its state.
        options: the layer's options.
        group: the ranks, in the order of their tokens.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs of the rank's tokens, in the type of the query; 0 for padding rows.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written and nothing exchanged then.

    Source: the context parallelism of flash-linear-attention, which composes the same maps.
    """
    check_recurrent(query, key, value, log_decay, beta, states, plan, options, out)
    check_ranks(plan, group)
    own = recurrent.state_map(key, value, log_decay, beta, plan, options)
    lens, has_state = _lengths_of_ranks(plan, group)
    factors = group.all_gather(rearrange(own.factor, "b hv i dk -> 1 b hv i dk"), dim=0)
    added = group.all_gather(rearrange(own.added, "b hv dv dk -> 1 b hv dv dk"), dim=0)

    after = {}
    for i, slot in enumerate(plan.state_indices.tolist()):
        if slot < 0 or not lens[:, i].any():
            continue
        state = states[slot].to(own.added.dtype) if has_state[0, i] else torch.zeros_like(own.added[i])
        for rank in range(group.size):
            if rank == group.rank:
                states[slot] = state
            state = einsum(state, factors[rank, i], "hv dv j, hv j dk -> hv dv dk") + added[rank, i]
        after[slot] = state
    begun = replace(plan, has_initial_state=torch.ones_like(plan.has_initial_state))
    result = recurrent.attention(query, key, value, log_decay, beta, states, begun, options, out=out)
    for slot, state in after.items():
        states[slot] = state
    return result


@without_autocast
def recurrent_convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    *,
    group: Group,
    bias: Float[Tensor, "c"] | None = None,
    silu: bool = True,
    out: Float[Tensor, "t c"] | None = None,
) -> Float[Tensor, "t c"]:
    """Convolve new tokens, as `recurrent.convolve`; each rank has consecutive tokens of each sequence.

    A rank needs the last `width - 1` inputs before its own. They may come from several ranks, as a rank may have few
    tokens:

        width 4    rank 0 has a b c d      begins with the inputs in the slot
                   rank 1 has e            begins with b c d
                   rank 2 has nothing
                   rank 3 has f g          begins with c d e; afterwards every slot holds e f g

    So the ranks exchange their last `width - 1` inputs once, and each assembles the inputs before its own.

    Args:
        inputs: as in `recurrent.convolve`, of the rank's own tokens, possibly none.
        weight: the weights of each channel, the same on all ranks.
        states: the rank's own pool, changed in place. Before the call, the slot of a sequence holds the last inputs
            before the tokens of all ranks, if there are any; afterwards, the last inputs of all ranks. If the pool has
            a narrower type than the inputs, inputs from earlier ranks are rounded to it.
        plan: the same as for `recurrent_attention`.
        group: the ranks, in the order of their tokens.
        bias: added before SiLU.
        silu: apply SiLU to the sum.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs of the rank's tokens, in the type of the inputs; 0 for padding rows.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written and nothing exchanged then.
    """
    check_convolution(inputs, weight, bias, states, plan, silu, out)
    check_ranks(plan, group)
    kept, compute = states.shape[1], torch.promote_types(inputs.dtype, states.dtype)
    ends = inputs.new_zeros(plan.batch.num_seqs, *states.shape[1:])  # the rank's last inputs, right-aligned
    for i, (q0, q1) in enumerate(plan.batch.query_rows()):
        part = inputs[max(q0, q1 - kept) : q1]
        ends[i, kept - len(part) :] = part
    lens, has_state = _lengths_of_ranks(plan, group)
    ends = group.all_gather(rearrange(ends, "b w c -> 1 b w c"), dim=0).to(compute)

    after = {}
    for i, slot in enumerate(plan.state_indices.tolist()):
        if slot < 0 or not lens[:, i].any():
            continue
        last = states[slot].to(compute) if has_state[0, i] else torch.zeros_like(ends[0, i])
        for rank in range(group.size):
            if rank == group.rank:
                states[slot] = last
            new = min(int(lens[rank, i]), kept)
            last = torch.cat([last[new:], ends[rank, i, kept - new :]])
        after[slot] = last
    begun = replace(plan, has_initial_state=torch.ones_like(plan.has_initial_state))
    result = recurrent.convolve(inputs, weight, states, begun, bias=bias, silu=silu, out=out)
    for slot, last in after.items():
        states[slot] = last
    return result


def _lengths_of_ranks(plan: StatePlan, group: Group) -> tuple[Int32[Tensor, "ranks b"], Int32[Tensor, "ranks b"]]:
    """Return each rank's number of new tokens of each sequence, and each rank's `has_initial_state`."""
    own = torch.stack([plan.batch.query_lens, plan.has_initial_state.int()])
    lens, has_state = rearrange(group.all_gather(own, dim=0), "(ranks two) b -> two ranks b", two=2)
    return lens, has_state


def own_positions(length: int, shard: Shard) -> Int64[Tensor, "s"]:
    """Return the positions of a rank's tokens of a sequence, in the order of its cache.

    Args:
        length: tokens of the sequence.
        shard: which rank, and how tokens are distributed.

    Returns:
        The position of each token of the rank: tokens `r * interleave` to `(r + 1) * interleave - 1` are on rank
        `r % num_ranks`.

    Raises:
        ValueError: if the length is not an int of at least 0.
    """
    check_int("length", length)
    check_is_shard(shard)
    place = torch.arange(length, device="cpu")
    return place[place // shard.interleave % shard.num_ranks == shard.rank]


def local_lens(lens: Int32[Tensor, "b"], shard: Shard) -> Int32[Tensor, "b"]:
    """Return how many of the first `lens` tokens of each sequence a rank has.

    Apply it to the context, not to the whole sequence and the new tokens separately: `local(a - b)` is not
    `local(a) - local(b)`, let alone `local(a) - b`.

    Args:
        lens: tokens of each sequence, from its first one.
        shard: which rank, and how tokens are distributed.

    Returns:
        The rank's tokens among them.

    Raises:
        ValueError: if the lengths are not int32 `[b]`, or (on a CPU) negative.
    """
    check_local_lens(lens, shard)
    counts = [_count_own(length, shard) for length in lens.tolist()]
    return torch.tensor(counts, dtype=torch.int32, device=lens.device)


def _count_own(length: int, shard: Shard) -> int:
    """Return `len(own_positions(length, shard))` without the list, as an unchecked length may be huge."""
    runs = range(shard.rank * shard.interleave, length, shard.num_ranks * shard.interleave)  # first token of each
    if not runs:
        return 0
    return (len(runs) - 1) * shard.interleave + min(shard.interleave, length - runs[-1])  # the last may be shorter


def slot_mapping(batch: Batch, num_tokens: int, *, shard: Shard, block_size: int) -> Int64[Tensor, "t"]:
    """Return the slot of each new token in this rank's pool; -1 for tokens of other ranks and for padding rows.

    Args:
        batch: the lengths, and the rank's own block table.
        num_tokens: query rows, `t`, the padding rows included.
        shard: which rank this is, and which tokens are its own.
        block_size: tokens in a block, `p`.

    Returns:
        `block * p + row` in the rank's pool.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are read on a CPU.
    """
    check_num_tokens(num_tokens, batch)
    block_table = check_shard(batch, shard, block_size=block_size)
    seq_lens = local_lens(batch.seq_lens, shard)
    check_block_table(
        Batch(batch.cu_seqlens_q, seq_lens, block_table, batch.max_query_len, batch.max_seq_len), block_size=block_size
    )
    begins = local_lens(batch.context_lens.clamp(min=0), shard)
    check_written_blocks(block_table, begins, seq_lens, block_size=block_size)
    result = torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)
    place = positions(batch, num_tokens).tolist()
    for (q0, q1), blocks in zip(batch.query_rows(), block_table, strict=True):
        for row in range(q0, q1):
            i = _count_own(place[row], shard)  # tokens of the rank before this one
            if _count_own(place[row] + 1, shard) > i:
                result[row] = blocks[i // block_size].long() * block_size + i % block_size
    return result
