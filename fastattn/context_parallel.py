"""Context parallelism by the fastest kernel for each part; the twin of `refattn.context_parallel`.

Partial outputs are sent and summed in float32. Nothing synchronizes with the host. With an NCCL group, a CUDA graph
captures the collectives together with the kernels.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch, recurrent
from fastattn.kernels.kernel import PLAN, fields_of
from fastattn.kernels.order import refuse_unknown
from fastattn.kernels.problem import compute_dtype, places
from fastattn.metadata import positions
from fastattn.sparse import by_token
from refattn.batch import Batch, check_block_table, check_written_blocks
from refattn.checks import check_int, check_window
from refattn.checks_of_calls import check_context_parallel
from refattn.checks_of_steps import check_contexts, check_local_lens, check_num_tokens, check_shard
from refattn.keys import Pages, QuantizedPages, Rows
from refattn.modes import refuse_gradients, without_autocast
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import ContextParallelPlan, Plan
from refattn.ranks import Group, Shard
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan, check_convolution, check_ranks, check_recurrent

# The plan fields that `attention` reads.
OVER_RANKS = PLAN | fields_of(Shard, "rank", "num_ranks", "interleave")
OVER_RANKS |= fields_of(ContextParallelPlan, "batch", "shard", "context", "own")


def plan(
    batch: Batch, *, shard: Shard, block_size: int, window_size: tuple[int, int] = (-1, -1), causal: bool = True
) -> ContextParallelPlan:
    """Plan the work of one rank; the twin of `refattn.context_parallel.plan`.

    A window needs query positions, so a batch on a device must have `num_tokens`, or this raises a ValueError.
    """
    block_table = check_shard(batch, shard, block_size=block_size)
    check_contexts(batch)
    left, _ = check_window(window_size)
    left = -1 if left >= batch.max_seq_len - 1 else left  # such a window hides nothing
    longest = -(-batch.max_seq_len // (shard.num_ranks * shard.interleave)) * shard.interleave
    longest = min(longest, batch.max_seq_len)
    query_len, num_tokens = batch.max_query_len, batch.num_tokens
    keys = Batch(
        batch.cu_seqlens_q,
        local_lens(batch.context_lens, shard),
        block_table,
        query_len,
        longest,
        num_tokens=num_tokens,
    )
    where = None
    if left >= 0:
        rows = int(batch.cu_seqlens_q[-1]) if batch.device.type == "cpu" else num_tokens
        if rows is None:
            raise ValueError(
                "num_tokens: expected the number of query rows, which a window needs, got None: a batch on a device "
                "is not read, so make the plan of dataclasses.replace(batch, num_tokens=...)"
            )
        where = local_lens((positions(batch, rows) - left).clamp(min=0).int(), shard)
    context = Plan(keys, block_size, causal=False, window_size=(0 if left >= 0 else -1, -1), positions=where)
    new = Batch(batch.cu_seqlens_q, batch.query_lens, None, query_len, query_len, num_tokens=num_tokens)
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
    """Attend with the heads of this rank to all tokens of each sequence; the twin of `refattn.context_parallel`.

    Arguments, results and errors are those of `refattn.context_parallel.attention`.

    Raises:
        NotImplementedError: for `alibi_sqrt`; for ALiBi with `interleave` above 1 over a pool whose tokens are not
            evenly spaced, as in the layout HND; and if no kernel computes the combination, with the reason of each.
    """
    key_heads = check_context_parallel(
        query, key, value, key_cache, value_cache, plan, options, out, return_lse, group=group, scales=scales
    )
    refuse_unknown("context_parallel.attention", OVER_RANKS, plan)
    if options.alibi_sqrt:
        raise NotImplementedError("no kernel computes the root of the distance to keys of which others lie elsewhere")
    rows, pools = dict(query=query, key=key, value=value), dict(key_cache=key_cache, value_cache=value_cache)
    refuse_gradients(dispatch.NO_BACKWARD, **rows, **pools, options=options)
    all_heads = group.all_gather(query, dim=1)
    keys = Pages(key_cache, value_cache) if scales is None else QuantizedPages(key_cache, value_cache, scales)
    options_of_all = options.without_sinks().with_per_head(lambda x: group.all_gather(x, dim=0))
    slopes = options_of_all.alibi_slopes
    if slopes is None:
        part, lse = dispatch.compute(all_heads, keys, plan.context, options_of_all)
    else:
        part, lse = _attend_by_distance(all_heads, keys, plan, options_of_all, slopes)

    total = group.all_gather(lse[None], dim=0).logsumexp(0)  # [t, h of all ranks]
    weight = (lse - total).exp_()[..., None]  # NaN if no rank has a key; the merge ignores such a part
    context = group.reduce_scatter(part * weight, dim=1)  # float32, as the parts are summed
    context_lse = total.chunk(group.size, dim=1)[group.rank].contiguous()

    new, new_lse = dispatch.compute(query, Rows(key[:, key_heads], value[:, key_heads]), plan.own, options)
    answer, lse = dispatch.run("merge", outs=[context, new.to(context.dtype)], lses=[context_lse, new_lse])
    out = answer.to(query.dtype) if out is None else out.copy_(answer)
    return (out, lse) if return_lse else out


def _attend_by_distance(
    query: Float[Tensor, "t all_h d"],
    keys: Pages | QuantizedPages,
    plan: ContextParallelPlan,
    options: AttentionOptions,
    slopes: Float[Tensor, "all_h"],
) -> tuple[Float[Tensor, "t all_h dv"], Float[Tensor, "t all_h"]]:
    """Attend with all heads to the context of this rank under ALiBi, by `interleave` calls.

    A rank's tokens with the same offset in their run are a `period` apart: the m-th is at `m * period + place`. So a
    kernel for consecutive keys can compute them with slopes times the period, and the remainder is one number per
    query, which only changes the LSE:

        slope * (i - (m * period + place))
            = slope * period * ((i - place) // period - m) + slope * ((i - place) % period)
    """
    shard, where = plan.shard, positions(plan.batch, len(query))
    period, slopes = shard.num_ranks * shard.interleave, slopes.to(compute_dtype(query.dtype))
    steeper = replace(options, alibi_slopes=slopes * period)
    outs, lses = [], []
    for offset in range(shard.interleave):
        far = where - (shard.rank * shard.interleave + offset)
        its_keys, its_plan = _of_runs(keys, plan.context, (far // period).int(), offset, shard.interleave)
        out, lse = dispatch.compute(query, its_keys, its_plan, steeper)
        outs.append(out.to(lse.dtype))
        lses.append(lse - slopes * (far % period)[:, None])
    return (outs[0], lses[0]) if len(outs) == 1 else dispatch.run("merge", outs=outs, lses=lses)


def _of_runs(
    keys: Pages | QuantizedPages, context: Plan, where: Int32[Tensor, "t"], offset: int, interleave: int
) -> tuple[Pages | QuantizedPages, Plan]:
    """Return the tokens at one offset of each run of a rank, and a plan over them for queries at positions `where`."""
    batch, block_size, table = context.batch, context.block_size, context.batch.block_table
    assert block_size is not None and table is not None  # a plan over pages has both
    if interleave > 1:
        tokens = torch.arange(offset, max(batch.max_seq_len, offset + 1), interleave, device=batch.device)
        table = table[:, (tokens // block_size).clamp(max=max(0, table.shape[1] - 1))] * block_size
        lens = ((batch.seq_lens - offset + interleave - 1) // interleave).clamp(min=0)
        table = table + (tokens % block_size).int()
        batch = replace(batch, seq_lens=lens, block_table=table, max_seq_len=len(tokens), num_keys=None)
        pools = by_token("key_cache", keys.key_cache), by_token("value_cache", keys.value_cache)
        if isinstance(keys, Pages):
            keys = Pages(*pools)
        elif isinstance(keys.scales, Int8Scales):
            keys = QuantizedPages(*pools, replace(keys.scales, key=by_token("scales.key", keys.scales.key)))
        else:
            keys = QuantizedPages(*pools, keys.scales)
        block_size = 1
    if context.positions is None:
        return keys, Plan(batch, block_size, causal=False, positions=where)
    first = ((context.positions - offset + interleave - 1) // interleave).clamp(min=0)  # the first key of its window
    where, last = where[: len(first)], torch.full_like(first, batch.max_seq_len)
    plan = Plan(batch, block_size, causal=False, positions=where, first_visible=first, last_visible=last)
    return keys, plan


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
    """Fold the tokens of all ranks into states; the twin of `refattn.context_parallel.recurrent_attention`.

    Ranks exchange their maps in float32, or float64 for float64 input.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_recurrent(query, key, value, log_decay, beta, states, plan, options, out)
    check_ranks(plan, group)
    tokens = dict(query=query, key=key, value=value, log_decay=log_decay, beta=beta, states=states)
    refuse_gradients(dispatch.NO_BACKWARD, **tokens)
    own = recurrent.state_map(key, value, log_decay, beta, plan, options)
    lens, has_state = _lengths_of_ranks(plan, group)
    sizes = own.factor.shape[2], own.added.shape[2]
    maps = group.all_gather(torch.cat(own, dim=2)[None], dim=0)  # [ranks, b, hv, dk + dv, dk]

    state, is_written = _first(states, plan, lens, has_state, own.added.dtype)
    for rank, one in enumerate(maps):
        factor, added = one.split(sizes, dim=2)
        if rank == group.rank:
            _put(states, plan.state_indices, is_written, state)
        state = state @ factor + added
    begun = replace(plan, has_initial_state=torch.ones_like(plan.has_initial_state))
    out = recurrent.attention(query, key, value, log_decay, beta, states, begun, options, out=out)
    _put(states, plan.state_indices, is_written, state)
    return out


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
    """Convolve the tokens of all ranks; the twin of `refattn.context_parallel.recurrent_convolve`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_convolution(inputs, weight, bias, states, plan, silu, out)
    check_ranks(plan, group)
    refuse_gradients(dispatch.NO_BACKWARD, inputs=inputs, weight=weight, states=states, bias=bias)
    kept = states.shape[1]
    place = torch.arange(kept, device=inputs.device)
    rows = plan.batch.cu_seqlens_q[1:, None] + place - kept  # [b, w], the last rows of each sequence; some use fewer
    ends = inputs[rows.clamp(min=0).long()] if len(inputs) else inputs.new_zeros(*rows.shape, inputs.shape[1])
    lens, has_state = _lengths_of_ranks(plan, group)
    ends = group.all_gather(ends[None], dim=0)

    last, is_written = _first(states, plan, lens, has_state, torch.promote_types(inputs.dtype, states.dtype))
    for rank, (new, end) in enumerate(zip(lens, ends, strict=True)):
        if rank == group.rank:
            _put(states, plan.state_indices, is_written, last)
        source = place + new[:, None]  # [b, w]: kept inputs shift to the left
        stays = last.gather(1, source.clamp(max=kept - 1).long()[..., None].expand_as(last))
        last = stays.where((source < kept)[..., None], end.to(last.dtype))
    begun = replace(plan, has_initial_state=torch.ones_like(plan.has_initial_state))
    out = recurrent.convolve(inputs, weight, states, begun, bias=bias, silu=silu, out=out)
    _put(states, plan.state_indices, is_written, last)
    return out


def _lengths_of_ranks(plan: StatePlan, group: Group) -> tuple[Int32[Tensor, "ranks b"], Int32[Tensor, "ranks b"]]:
    """Return each rank's number of new tokens of each sequence, and each rank's `has_initial_state`."""
    own = torch.stack([plan.batch.query_lens, plan.has_initial_state.int()])
    lens, has_state = group.all_gather(own[None], dim=0).unbind(1)
    return lens, has_state


def _first(
    states: Float[Tensor, "n ..."], plan: StatePlan, lens: Tensor, has_state: Tensor, dtype: torch.dtype
) -> tuple[Float[Tensor, "b ..."], Bool[Tensor, "b"]]:
    """Return the states before the tokens of all ranks, zeros without one, and which sequences have new tokens."""
    is_written = (plan.state_indices >= 0) & (lens.sum(0) > 0)
    first = states[plan.state_indices.where(is_written, 0).long()].to(dtype)  # other sequences' entries may be anything
    has_any = (is_written & has_state[0].bool()).view(-1, *[1] * (states.ndim - 1))
    return first.where(has_any, 0.0), is_written


def _put(states: Float[Tensor, "n ..."], slots: Int32[Tensor, "b"], wanted: Bool[Tensor, "b"], values: Tensor) -> None:
    """Write the states of the `wanted` sequences to their slots, without synchronizing.

    Every row writes: an unwanted one, whose slot may be anything, repeats the first wanted write, or if there is none
    rewrites slot 0 with its own contents.
    """
    if not len(slots):
        return
    rows = torch.arange(len(slots), device=slots.device).where(wanted, wanted.int().argmax())
    slots = slots.where(wanted, 0)[rows].long()
    states.index_copy_(0, slots, values[rows].to(states.dtype).where(wanted.any(), states[slots]))


def own_positions(length: int, shard: Shard) -> Int64[Tensor, "s"]:
    """Return the positions of a rank's tokens of a sequence; the twin of `refattn.context_parallel.own_positions`."""
    check_int("length", length)
    count = int(local_lens(torch.tensor([length], dtype=torch.int32, device="cpu"), shard))
    place = torch.arange(count, device="cpu")
    turns, in_run = place // shard.interleave, place % shard.interleave
    return turns * shard.num_ranks * shard.interleave + shard.rank * shard.interleave + in_run


def local_lens(lens: Int32[Tensor, "b"], shard: Shard) -> Int32[Tensor, "b"]:
    """Return how many of the first `lens` tokens a rank has; the twin of `refattn.context_parallel.local_lens`."""
    check_local_lens(lens, shard)
    period, lens = shard.num_ranks * shard.interleave, lens.long()  # a period may exceed int32
    last_round = (lens % period - shard.rank * shard.interleave).clamp(0, shard.interleave)
    return (lens // period * shard.interleave + last_round).int()


def slot_mapping(batch: Batch, num_tokens: int, *, shard: Shard, block_size: int) -> Int64[Tensor, "t"]:
    """Return the slot of each new token in this rank's pool; the twin of `refattn.context_parallel.slot_mapping`."""
    check_num_tokens(num_tokens, batch)
    block_table = check_shard(batch, shard, block_size=block_size)
    seq_lens = local_lens(batch.seq_lens, shard)
    check_block_table(
        Batch(batch.cu_seqlens_q, seq_lens, block_table, batch.max_query_len, batch.max_seq_len), block_size=block_size
    )
    if not block_table.numel():
        return torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)
    begins = local_lens(batch.context_lens.clamp(min=0), shard)
    check_written_blocks(block_table, begins, seq_lens, block_size=block_size)
    sequence, place, padding = places(batch, num_tokens)
    elsewhere = padding | (place < 0) | (place // shard.interleave % shard.num_ranks != shard.rank)
    period = shard.num_ranks * shard.interleave
    local = (place // period * shard.interleave + place % shard.interleave).masked_fill(elsewhere, 0)
    block = block_table[sequence, local // block_size].long()
    return (block * block_size + local % block_size).masked_fill(elsewhere, -1)
