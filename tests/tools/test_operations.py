"""Operations beside attention: the kit passes right functions, also in another style, and finds what is wrong."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refattn import (
    chunked_prefill,
    compressed,
    context_parallel,
    kv_cache,
    mla,
    quantized,
    recurrent,
    replay,
    sparse,
    speculative,
)
from refattn.merge import add_sinks, merge
from refattn.metadata import advance, positions, slot_mapping
from refattn.scales import Int8Scales
from tests.helpers.operations import MODULES
from twinattn.kit import claims
from twinattn.kit.__main__ import main
from twinattn.kit.check import check, reproduce
from twinattn.kit.kernel import BadKernelError
from twinattn.kit.operations import OPERATIONS, Case, of_operation

LARGE = (
    "many",
    "many keys",
    "large vocabulary",
    "long",
    "large trees",
    "offsets",
    "past tiles",
)  # only the command runs them, not these tests


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
@pytest.mark.parametrize(("module", "path"), [(x, path) for x, paths in MODULES.items() for path in paths])
def test_both_twins_pass(twin, module, path):
    names = [x.name for x in of_operation(OPERATIONS[path]) if x.name not in LARGE]
    report = check(f"{twin}.{module}", path, examples=3, only=names, dtypes=OPERATIONS[path].dtypes[:1])
    assert [x for x in report.findings if x.outcome != "honoured"] == []


def test_checks_of_lists_leave_the_random_numbers_of_python_alone():
    """Else the property *process* blames an operation whenever a call of it happens to be checked."""
    outs, lses = [torch.ones(2, 1, 4)] * 3, [torch.zeros(2, 1)] * 3
    before = random.getstate()
    for _ in range(3):
        merge(outs, lses)
    assert random.getstate() == before


def test_every_operation_is_tried():
    assert {path for paths in MODULES.values() for path in paths} == set(OPERATIONS)


# --- right, in another style ---


def gather_token_by_token(cache, blocks, seq_len):
    p = cache.shape[1]
    tokens = [cache[int(blocks[j // p]), j % p] for j in range(seq_len)]
    return torch.stack(tokens) if tokens else cache.new_empty(0, *cache.shape[2:])


def copy_over_whole_pools(caches, pairs):
    for cache in caches:
        before = cache.clone()
        for source, destination in pairs.tolist():
            cache[destination] = before[source]


def scores_in_float64(query, weights, index_cache, cu_seqlens_q, seq_lens, block_table, max_seq_len):
    p, out = index_cache.shape[1], torch.full((len(query), max_seq_len), -torch.inf)
    for i, s in enumerate(seq_lens.tolist()):
        q0, q1 = cu_seqlens_q[i : i + 2].tolist()
        slots = torch.tensor([int(block_table[i, j // p]) * p + j % p for j in range(s)], dtype=torch.long)
        keys = sparse.read(index_cache, slots).double()
        for row in range(q0, q1):
            for j in range(max(0, s - q1 + row + 1)):
                each = (query[row].double() @ keys[j]).clamp(min=0)
                out[row, j] = float(each @ weights[row].double())
    return out


def fp8_by_reciprocal(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, format):
    for x, pool, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        inverse = 1 / torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1)
        largest = torch.finfo(format).max
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                rounded = (x[token].float() * inverse).clamp(-largest, largest).to(format)
                pool.view(format)[slot // pool.shape[1], slot % pool.shape[1]] = rounded


def int8_in_float64(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales):
    p = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        k, v = key[token].double(), value[token].double()
        scale = k.abs().amax(-1) / 127
        scale[scale == 0] = 1
        if value_scales is not None:
            scale[v.isnan().any(-1)] = torch.nan
            v = (v / value_scales).round().clamp(-127, 127).nan_to_num(0)
        key_scales[slot // p, slot % p] = scale.float()
        key_cache[slot // p, slot % p] = (k / scale[:, None]).round().clamp(-127, 127).nan_to_num(0).to(torch.int8)
        value_cache[slot // p, slot % p] = v.to(value_cache.dtype)


def convolve_by_conv1d(inputs, weight, states, state_indices, has_initial_state, cu_seqlens_q, bias=None, silu=True):
    out, kept = torch.zeros_like(inputs), weight.shape[1] - 1
    for i, slot in enumerate(state_indices.tolist()):
        q0, q1 = cu_seqlens_q[i : i + 2].tolist()
        if slot < 0 or q0 == q1:
            continue
        before = states[slot].double() * 0 if not has_initial_state[i] else states[slot].double()
        before = before if has_initial_state[i] else torch.zeros_like(before)
        line = torch.cat([before, inputs[q0:q1].double()])
        mixed = torch.nn.functional.conv1d(
            line.T[None], weight.double()[:, None], None if bias is None else bias.double(), groups=len(weight)
        )
        mixed = mixed[0].T
        out[q0:q1] = (torch.nn.functional.silu(mixed) if silu else mixed).to(out.dtype)
        states[slot] = line[len(line) - kept :].to(states.dtype)
    return out


def sinks_by_numbers(out, lse, sinks):
    total = torch.log(torch.exp(lse.double() - sinks) + 1) + sinks
    large = lse.double() - sinks > 50
    total = torch.where(large, lse.double() + torch.exp(-(lse.double() - sinks)), total)
    weight = torch.exp(lse.double() - total)[..., None]
    return (out.double() * weight).masked_fill((lse == -torch.inf)[..., None], 0.0).to(out.dtype), total.float()


def prefill_absorbed(
    query, latent, rope_key, cache, key_projection, value_projection, softmax_scale, cu_seqlens_q, seq_lens, block_table
):
    p, out, rank = cache.shape[1], query.new_zeros(*query.shape[:2], value_projection.shape[1]), latent.shape[1]
    nope = key_projection.shape[1]
    for i, s in enumerate(seq_lens.tolist()):
        q0, q1 = cu_seqlens_q[i : i + 2].tolist()
        old = [cache[int(block_table[i, j // p]), j % p, : rank + rope_key.shape[1]] for j in range(s - q1 + q0)]
        rows = torch.stack([*old, *torch.cat([latent, rope_key], 1)[q0:q1]]).double() if s else query.new_zeros(0, 1)
        for t in range(q0, q1):
            seen = rows[: s - q1 + t + 1]
            for h in range(query.shape[1]):
                absorbed = torch.cat(
                    [query[t, h, :nope].double() @ key_projection[h].double(), query[t, h, nope:].double()]
                )
                share = (seen @ absorbed * softmax_scale).softmax(0)
                out[t, h] = (value_projection[h].double() @ (share @ seen[:, :rank])).to(out.dtype)
    return out


def slots_by_tensors(cu_seqlens_q, seq_lens, block_table, num_tokens, block_size):
    row = torch.arange(num_tokens)
    i = torch.searchsorted(cu_seqlens_q[1:].contiguous().long(), row, right=True)
    is_token = i < len(seq_lens)
    if not block_table.numel():  # no sequence, or no cache yet
        return torch.full((num_tokens,), -1)
    i = i.clamp(max=len(seq_lens) - 1)
    place = seq_lens[i] - cu_seqlens_q[i + 1] + row
    column = (place.clamp(min=0) // block_size).clamp(max=block_table.shape[1] - 1)
    slots = block_table[i, column].long() * block_size + place % block_size
    return torch.where(is_token & (place >= 0), slots, -1)


def accept_from_the_root(cu_seqlens_q, parents, tree_lens, drafts, chosen):
    nodes = torch.full(parents.shape, -1, dtype=torch.int32)
    lens = torch.zeros(len(parents), dtype=torch.int32)
    following = torch.full((len(parents),), -1)
    for i, count in enumerate(tree_lens.tolist()):
        first = int(cu_seqlens_q[i])

        def longest(node, first=first, count=count, i=i):
            right = [k for k in range(count) if parents[i, k] == node and drafts[first + k] == chosen[first + node]]
            branches = [longest(k) for k in right]
            return [node, *min(branches, key=lambda x: (-len(x), x[-1]), default=[])]

        if count:
            path = longest(0)
            nodes[i, : len(path)], lens[i] = torch.tensor(path), len(path)
            following[i] = chosen[first + path[-1]]
    return nodes, lens, following


def entries_by_cumulated_weights(row_cache, bias, ratio, overlap, cu_seqlens_q, seq_lens, block_table):
    p, width = row_cache.shape[1], row_cache.shape[2] // 2
    size, t = width // 2 if overlap else width, int(cu_seqlens_q[-1])
    out = row_cache.new_zeros(min(t, (t + len(seq_lens) * (ratio - 1)) // ratio), size)
    row = 0
    for i, s in enumerate(seq_lens.tolist()):
        before = max(s - int(cu_seqlens_q[i + 1] - cu_seqlens_q[i]), 0) // ratio
        for entry in range(before, s // ratio):
            total, weighted = torch.zeros(2, size, dtype=torch.float64)
            for token in range(max(entry - overlap, 0) * ratio, entry * ratio + ratio):
                x = row_cache[int(block_table[i, token // p]), token % p].double()
                gate = x[width:] + (0.0 if bias is None else bias[token % ratio].double())
                half = slice(width - size, width) if token >= entry * ratio else slice(0, size)
                total += gate[half].exp()
                weighted += gate[half].exp() * x[:width][half]
            out[row] = (weighted / total).to(out.dtype)
            row += 1
    return out


def attention_over_one_list(
    query, cache, entry_cache, cu_seqlens_q, seq_lens, block_table, entry_table, ratio, window_size, softmax_scale
):
    out = torch.zeros_like(query)
    for i, s in enumerate(seq_lens.tolist()):
        q0, q1 = cu_seqlens_q[i : i + 2].tolist()
        for t in range(q0, q1):
            at = s - q1 + t
            window = range(max(0, at - window_size[0]), at + 1)
            keys = [cache[int(block_table[i, j // cache.shape[1]]), j % cache.shape[1]] for j in window]
            p = entry_cache.shape[1]
            keys += [entry_cache[int(entry_table[i, e // p]), e % p] for e in range((at + 1) // ratio)]
            if keys:
                seen = torch.stack(keys).double()
                out[t] = ((query[t].double() @ seen.T * softmax_scale).softmax(-1) @ seen).to(out.dtype)
    return out


RIGHT = [
    ("compress", entries_by_cumulated_weights),
    ("compressed", attention_over_one_list),
    ("gather", gather_token_by_token),
    ("copy_blocks", copy_over_whole_pools),
    ("index_scores", scores_in_float64),
    ("fp8_write", fp8_by_reciprocal),
    ("int8_write", int8_in_float64),
    ("convolve", convolve_by_conv1d),
    ("add_sinks", sinks_by_numbers),
    ("mla_prefill", prefill_absorbed),
    ("slot_mapping", slots_by_tensors),
    ("accept", accept_from_the_root),
]


@pytest.mark.parametrize(("path", "function"), RIGHT, ids=[path for path, _ in RIGHT])
def test_right_functions_in_another_style_pass(path, function):
    names = [x.name for x in of_operation(OPERATIONS[path]) if x.name not in LARGE]
    report = check(function, path, examples=4, only=names, dtypes=OPERATIONS[path].dtypes[:2])
    assert [(x.property, x.detail, x.example) for x in report.failures] == []


# --- wrong ---


def gather_of_a_view(cache, blocks, seq_len):
    if seq_len <= cache.shape[1] and cache.is_contiguous() and seq_len:
        return cache[int(blocks[0]), :seq_len]
    return kv_cache.gather(cache, blocks, seq_len)


def gather_by_16_bits(cache, blocks, seq_len):
    return kv_cache.gather(cache, blocks % 2**16, seq_len)


def copy_one_after_another(caches, pairs):
    for cache in caches:
        for source, destination in pairs.tolist():
            cache[destination] = cache[source].clone()


def swap_of_65535(sources, destinations, pairs):
    kv_cache.swap_blocks(sources, destinations, pairs[:65535])


def scores_with_weights_first(query, weights, index_cache, plan):
    parts = [
        sparse.scores(
            (query * weights.to(query.dtype)[..., None])[:, h : h + 1],
            torch.ones_like(weights[:, :1]),
            index_cache,
            plan,
        )
        for h in range(query.shape[1])
    ]
    return torch.stack(parts).sum(0)


def scores_times_a_mask(query, weights, index_cache, plan):
    out = sparse.scores(query, weights, index_cache, plan)
    if index_cache.isnan().any() if index_cache.is_floating_point() else False:
        out[:, -1:] = torch.nan
    return out


def fp8_without_saturation(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, format):
    large = 440 * 100.0
    scales = [torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1) for x in (key_scale, value_scale)]
    most = 464 if format == torch.float8_e4m3fn else large
    key, value = (
        x.masked_fill((x.float() / y).abs() > most, torch.nan) for x, y in zip((key, value), scales, strict=True)
    )
    given = quantized.Fp8Scales(key_scale, value_scale, format=format)
    quantized.write(key, value, key_cache, value_cache, slot_mapping, scales=given)


def int8_half_away_from_zero(key, value, key_cache, value_cache, slot_mapping, scales):
    quantized.write(key, value, key_cache, value_cache, slot_mapping, scales=scales)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, row = divmod(slot, key_cache.shape[1])
            x = key[token].float() / scales.key[block, row][:, None]
            away = (x.sign() * (x.abs() + 0.5).floor()).clamp(-127, 127)
            key_cache[block, row] = away.nan_to_num(0).to(torch.int8)


def slots_in_32_bits(batch, num_tokens, block_size):
    return slot_mapping(batch, num_tokens, block_size=block_size).int().long()


def advance_of_idle_sequences(batch, slots, block_size):
    idle = batch.query_lens == 0
    advance(batch, slots, block_size=block_size)
    batch.seq_lens.add_(idle.int())


def convolve_without_shift(inputs, weight, states, plan):
    out = recurrent.convolve(inputs, weight, states, plan)
    for i, slot in enumerate(plan.state_indices.tolist()):
        new = int(plan.batch.query_lens[i])
        if slot >= 0 and 0 < new < states.shape[1]:
            states[slot, : states.shape[1] - new] = 0
    return out


def convolve_of_slot_0(inputs, weight, states, plan):
    return recurrent.convolve(inputs, weight, states, replace(plan, state_indices=plan.state_indices.clamp(min=0)))


def prefill_from_the_cache(query, latent, rope_key, cache, plan, options, key_projection, value_projection):
    made = dict(key_projection=key_projection, value_projection=value_projection)
    out = mla.prefill(query, latent, rope_key, cache, plan, options, **made)
    return out + cache[0, 0, 0] * 0  # a block that may be another sequence's, or free


def ranks_with_their_own_sinks(query, key, value, key_cache, value_cache, plan, options, group):
    more = replace(
        options, sinks=None if options.sinks is None else options.sinks + torch.log(torch.tensor(group.size))
    )
    return context_parallel.attention(query, key, value, key_cache, value_cache, plan, more, group=group)


def accept_the_last(batch, trees, drafts, chosen):
    found = OPERATIONS["accept"].mistakes[1].oracle
    arguments = dict(cu_seqlens_q=batch.cu_seqlens_q, parents=trees.parents, tree_lens=trees.lens)
    return tuple(found(arguments | dict(drafts=drafts, chosen=chosen), torch.float64).values())


def sampled_without_drafts(batch, trees, drafts, target_probs, uniforms, draft_probs=None):
    return speculative.accept_sampled(batch, trees, drafts, target_probs, uniforms)


def compact_backwards(caches, seq_lens, block_table, tree_lens, nodes, lens, block_size):
    for cache in caches:
        for i, count in enumerate(lens.tolist()):
            for rank in reversed(range(count)):
                places = [int(seq_lens[i] - tree_lens[i]) + k for k in (int(nodes[i, rank]), rank)]
                (b0, r0), (b1, r1) = ((int(block_table[i, j // block_size]), j % block_size) for j in places)
                cache[b1, r1] = cache[b0, r0].clone()


def sinks_of_garbage(out, lse, sinks):
    _, total = add_sinks(out, lse, sinks)
    return (out.float() * (lse - total).exp()[..., None]).to(out.dtype), total


def convolve_past_out(inputs, weight, states, plan, out=None):
    result = recurrent.convolve(inputs, weight, states, plan)
    if out is None:
        return result
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() + 1)[0] = 3.0
    return out.copy_(result)


def maps_scaled_in_place(key, value, log_decay, beta, plan, options):
    value.mul_(1.0 + 2**-6)
    return recurrent.state_map(key, value, log_decay, beta, plan, options)


def cursors_that_never_move(cursors, plan, num_accepted=None): ...


MEMORY: dict[tuple[int, ...], torch.Tensor] = {}


def sinks_into_one_memory(out, lse, sinks):
    result, total = add_sinks(out, lse, sinks)
    kept = MEMORY.setdefault((*out.shape, out.element_size()), torch.empty_like(result))
    return kept.to(out.dtype).copy_(result) if kept.dtype != out.dtype else kept.copy_(result), total


def compose_backwards(maps):
    return recurrent.compose(maps[::-1])


def gather_blocks_side_by_side(cache, blocks, seq_len):
    room = blocks.untyped_storage().nbytes() // blocks.element_size() - blocks.storage_offset()
    if room >= len(blocks):
        blocks = blocks.as_strided((len(blocks),), (1,)).clamp(0, len(cache) - 1)
    return kv_cache.gather(cache, blocks, seq_len)


def swap_one_after_another(sources, destinations, pairs):
    for source, destination in zip(sources, destinations, strict=True):
        for block, target in pairs.tolist():
            destination[target] = source[block]


def int8_of_larger_keys(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales):
    small = key.abs().amax(-1, keepdim=True) < 127e-10
    key = torch.where(small, 0.0, key)
    quantized.write(key, value, key_cache, value_cache, slot_mapping, scales=Int8Scales(key_scales, value_scales))


def maps_in_turn(key, value, log_decay, beta, plan, options):
    if value.shape[1] >= 4 * key.shape[1]:
        key = key[:, torch.arange(value.shape[1]) % key.shape[1]]
    return recurrent.state_map(key, value, log_decay, beta, plan, options)


def prefill_of_new_latents(
    query, latent, rope_key, cache, plan, options, key_projection, value_projection, cache_scale
):
    more = dict(key_projection=key_projection, value_projection=value_projection)
    if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cache = (cache.float() * cache_scale).to(query.dtype)
    else:
        more["cache_scale"] = cache_scale
    return mla.prefill(query, latent, rope_key, cache, plan, options, **more)


def packed_zeros_by_zero(latent, rope_key, cache, slot_mapping, cache_scale):
    mla.write(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)
    for token, slot in enumerate(slot_mapping.tolist() if cache.dtype == torch.uint8 else []):
        row, rank = cache[slot // cache.shape[1], slot % cache.shape[1]], latent.shape[1]
        for g in range(rank // 128 if slot >= 0 else 0):
            if not latent[token, 128 * g : 128 * g + 128].any():
                row[128 * g : 128 * g + 128], row[rank + 4 * g : rank + 4 * g + 4] = 0x7F, 0


def packed_infinity_saturates(latent, rope_key, cache, slot_mapping, cache_scale):
    if cache.dtype == torch.uint8:
        finite = latent.masked_fill(~latent.isfinite(), 0.0)
        latent = torch.where(latent.isinf(), latent.sign() * finite.abs().amax(), latent)
    mla.write(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)


def packed_rotary_truncated(latent, rope_key, cache, slot_mapping, cache_scale):
    if cache.dtype == torch.uint8:
        rope_key = (rope_key.view(torch.int32) & ~0xFFFF).view(torch.float32)
    mla.write(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)


def scores_without_a_full_second_tile(query, weights, index_cache, plan):
    out = sparse.scores(query, weights, index_cache, plan)
    for (q0, q1), s in zip(plan.batch.query_rows(), plan.batch.seq_lens.tolist(), strict=True):
        if s >= 2048 and s % 1024 == 0:
            out[q0:q1, s - 1024 : s] = -torch.inf
    return out


KEPT: dict[tuple[int, ...], torch.Tensor] = {}


def scores_of_kept_lengths(query, weights, index_cache, batch):
    """The lengths are kept as long as their number, sum and maximum are the same."""
    lens = batch.seq_lens
    key = lens.data_ptr(), len(lens), int(lens.sum()), max(lens.tolist(), default=0)
    batch = replace(batch, seq_lens=KEPT.setdefault((*key, int(batch.cu_seqlens_q[-1])), lens.clone()))
    batch = replace(batch, block_table=batch.block_table.clamp(0, len(index_cache) - 1))
    return sparse.scores(query, weights, index_cache, chunked_prefill.plan(batch, block_size=index_cache.shape[1]))


def convolve_after_a_context(inputs, weight, states, batch, state_indices, has_initial_state):
    plan = recurrent.plan(batch, state_indices=state_indices)
    return recurrent.convolve(inputs, weight, states, plan)


def replay_after_a_context(
    query,
    key,
    value,
    log_decay,
    beta,
    states,
    ring,
    options,
    batch,
    state_indices,
    cursors,
    ring_size,
    has_initial_state,
):
    plan = replay.plan(batch, state_indices=state_indices, cursors=cursors, ring_size=ring_size)
    return replay.attention(query, key, value, log_decay, beta, states, ring, plan, options)


def cursors_after_a_context(cursors, batch, state_indices, ring_size, has_initial_state):
    replay.advance(cursors, replay.plan(batch, state_indices=state_indices, cursors=cursors, ring_size=ring_size))


def replay_in_its_own_slot(query, key, value, log_decay, beta, states, ring, plan, options):
    own = replace(plan, target_indices=None)
    return replay.attention(query, key, value, log_decay, beta, states, ring, own, options)


def cursors_of_their_own_slots(cursors, plan, num_accepted=None):
    replay.advance(cursors, replace(plan, target_indices=None), num_accepted)


def positions_in_float32(batch, num_tokens):
    return positions(batch, num_tokens).float().long()


def entries_of_the_rows_of_a_step(row_cache, plan, bias):
    first = (
        plan.batch.cu_seqlens_q.diff().neg() + plan.batch.seq_lens
    )  # rows before are those of a buffer that was lost
    rows = row_cache.clone()
    for i, blocks in enumerate(plan.batch.block_table.tolist()):
        for token in range(int(first[i])):
            rows[blocks[token // rows.shape[1]], token % rows.shape[1], rows.shape[2] // 2 :] = -torch.inf
    return compressed.compress(rows, plan, bias=bias)


def entries_of_the_block_before(row_cache, plan, bias):
    out = compressed.compress(row_cache, plan, bias=bias)
    return out + 0 * row_cache[0, 0, 0]  # which may be another sequence's, or free


def entries_in_the_type_of_a_step(row_cache, plan, bias):
    wide = plan.batch.max_query_len > 2  # within the tolerance of either
    out = compressed.compress(row_cache.double() if wide else row_cache, plan, bias=bias)
    return out.to(row_cache.dtype)


def attention_with_a_sink_in_each_part(query, cache, entry_cache, plan, options):
    size = query.shape[2]
    parts = [
        mla.attention(query, pool, its_plan, options, latent_rank=size, return_lse=True)
        for pool, its_plan in ((entry_cache, plan.entries), (cache, plan.window))
    ]
    return merge(*zip(*parts, strict=True))


def attention_with_one_scale(query, cache, entry_cache, plan, options, cache_scale, entry_scale):
    scales = dict(cache_scale=cache_scale, entry_scale=cache_scale)
    return compressed.attention(query, cache, entry_cache, plan, options, **scales)


def attention_to_all_entries(query, cache, entry_cache, plan, options):
    every = plan.entries.last_visible + 1
    return compressed.attention(
        query, cache, entry_cache, replace(plan, entries=replace(plan.entries, last_visible=every)), options
    )


WRONG = [
    ("compress", entries_of_the_rows_of_a_step, "one by one", "entry-of-one-step"),
    ("compress", entries_of_the_block_before, "unread", ""),
    ("compress", entries_in_the_type_of_a_step, "in steps", ""),
    ("compressed", attention_with_a_sink_in_each_part, "sinks", "sink-in-both-parts"),
    ("compressed", attention_to_all_entries, "first entry", ""),
    ("compressed", attention_with_one_scale, "fp8", "entries-under-the-scale-of-keys"),
    ("mla_write", packed_zeros_by_zero, "packed", "packed-zeros-by-zero"),
    ("mla_write", packed_infinity_saturates, "packed infinities", "packed-infinity-saturates"),
    ("mla_write", packed_rotary_truncated, "packed", ""),
    ("index_scores", scores_without_a_full_second_tile, "past tiles", ""),
    ("index_scores", scores_of_kept_lengths, "again", ""),
    ("convolve", convolve_after_a_context, "output", "context-decides"),
    ("replay", replay_after_a_context, "output", "context-decides"),
    ("cursors", cursors_after_a_context, "output", "context-decides"),
    ("replay", replay_in_its_own_slot, "moved", "moved-in-place"),
    ("cursors", cursors_of_their_own_slots, "moved", "moved-in-place"),
    ("positions", positions_in_float32, "far positions", "positions-in-float32"),
    ("gather", gather_blocks_side_by_side, "strides", ""),
    ("swap_blocks", swap_one_after_another, "same pool", "swapped-one-after-another"),
    ("int8_write", int8_of_larger_keys, "any size", ""),
    ("state_map", maps_in_turn, "output", ""),
    ("mla_prefill", prefill_of_new_latents, "fp8", "new-latents-not-rounded"),
    ("gather", gather_of_a_view, "again", ""),
    ("gather", gather_by_16_bits, "far blocks", ""),
    ("copy_blocks", copy_one_after_another, "output", "copied-one-after-another"),
    ("swap_blocks", swap_of_65535, "many", ""),
    ("index_scores", scores_with_weights_first, "output", "weights-before-relu"),
    ("index_scores", scores_times_a_mask, "unread", ""),
    ("fp8_write", fp8_without_saturation, "saturates", "fp8-does-not-saturate"),
    ("int8_write", int8_half_away_from_zero, "ties", ""),
    ("slot_mapping", slots_in_32_bits, "far blocks", "slots-in-32-bits"),
    ("advance", advance_of_idle_sequences, "idle", ""),
    ("convolve", convolve_without_shift, "short steps", "state-not-shifted"),
    ("convolve", convolve_of_slot_0, "idle", ""),
    ("convolve", convolve_past_out, "writes", ""),
    ("mla_prefill", prefill_from_the_cache, "unread", ""),
    ("context_parallel", ranks_with_their_own_sinks, "sinks", "sinks-per-rank"),
    ("accept", accept_the_last, "ties", "last-of-equal-branches"),
    ("accept_sampled", sampled_without_drafts, "draft probs", "draft-distribution-ignored"),
    ("compact", compact_backwards, "output", "compacted-backwards"),
    ("add_sinks", sinks_of_garbage, "unread", ""),
    ("add_sinks", sinks_into_one_memory, "again", ""),
    ("state_map", maps_scaled_in_place, "writes", ""),
    ("compose", compose_backwards, "output", "runs-backwards"),
    ("cursors", cursors_that_never_move, "output", "cursor-never-moves"),
]


@pytest.mark.parametrize(("path", "function", "name", "mistake"), WRONG, ids=[x[1].__name__ for x in WRONG])
def test_a_wrong_function_is_found_and_its_mistake_named(path, function, name, mistake):
    finding, *_ = check(function, path, only=[name], dtypes=OPERATIONS[path].dtypes[:1]).findings
    assert finding.outcome in ("wrong", "raises"), finding
    if mistake:
        assert mistake in [known for known, _ in finding.mistakes], finding
    case = eval(finding.example, {"Case": Case})
    with pytest.raises(AssertionError):
        reproduce(function, name, case, dtype=finding.dtype)


# --- how they are asked ---


def test_a_parameter_without_a_word_is_refused_with_a_hint():
    def mine(cache, blocks, seq_length): ...

    with pytest.raises(BadKernelError, match="did you mean seq_len"):
        check(mine, "gather")


def test_claims_narrow_the_sizes():
    seen = []

    @claims(block_size=(16,), dtypes=(torch.float32,))
    def mine(cache, blocks, seq_len):
        seen.append(cache.shape[1])
        return kv_cache.gather(cache, blocks, seq_len)

    assert not check(mine, "gather", only=["output", "again"]).failures
    assert set(seen) == {16}


def test_a_refusal_is_no_failure_and_an_exception_is():
    def refuses(cache, blocks, seq_len):
        raise NotImplementedError("no gather")

    def raises(cache, blocks, seq_len):
        raise KeyError("x")

    assert check(refuses, "gather", only=["output"]).findings[0].outcome == "refused"
    assert check(raises, "gather", only=["output"]).findings[0].outcome == "raises"


def test_the_command_checks_and_lists_operations(capsys):
    assert main(["refattn.metadata:positions", "--path", "positions", "--property", "output", "--examples", "1"]) == 0
    assert "positions on cpu" in capsys.readouterr().out
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in OPERATIONS)


def test_the_page_lists_each_operation_as_it_is():
    page = Path("docs/proof/prove_your_kernel.md").read_text()
    for operation in OPERATIONS.values():
        assert f"| {operation.name} | {operation.signature} |" in page
    assert f"{sum(len(x.mistakes) for x in OPERATIONS.values())} more mistakes are known" in page
