"""Operations beside attention past the sizes of tiles, at the edges of numbers, and over stale or strided inputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refattn import context_parallel, kv_cache, mla, quantized, recurrent, sparse, speculative
from refattn.metadata import advance, make_batch, positions, slot_mapping
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales, Int8Scales
from twinattn.kit import claims
from twinattn.kit.check import check
from twinattn.kit.kernel import BadKernelError
from twinattn.kit.operations import OPERATIONS, find_operation
from twinattn.kit.operations.memory import SIDE_BY_SIDE, layout_of, place
from twinattn.kit.operations.operation import Case, tensors_of, word_of
from twinattn.kit.operations.tiles import TILES
from twinattn.kit.report import of_drawn


def simplest(operation):
    sizes = {name: choices[0] for name, choices in operation.sizes.items()} | dict(operation.options)
    return Case(operation.name, sizes)


NO_DIMENSION = {  # sizes that no kernel cuts into tiles, and why
    "blocks": "a limit of numbers of blocks",
    "first_block": "see the property far blocks",
    "first_token": "a token",
    "width": "taps of a convolution, of which there are few",
    "decode_len": "a limit of lengths",
    "seed": "of random numbers",
    "workspace": "a limit of tokens at a time",
    "types": "of pools, of which there are one or two",
    "apart": "between tokens",
    "groups": "scales of a packed row, of which there are up to four",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_size_is_a_dimension(name):
    """What is drawn up to 40 alone is right in kernels whose tiles have 64."""
    operation = OPERATIONS[name]
    sizes = {n for n, x in operation.sizes.items() if isinstance(x[0], int | tuple) and not isinstance(x[0], bool)}
    made = {n for x in operation.dimensions.values() for n in x.sizes(TILES[0])}
    assert sizes - {"window_size"} <= made | NO_DIMENSION.keys() | operation.options.keys()
    for dimension in operation.dimensions.values():
        assert dimension.most > TILES[0] or "ranks" in dimension.sizes(1)
        assert len(dimension.cases()) >= 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_tensor_has_other_strides(name):
    """Numbers, slots, blocks and indices; lengths alone lie side by side, as kernels read them in place."""
    operation = OPERATIONS[name]
    seen = set[str]()
    for choice in range(3):
        sizes = {n: x[choice % len(x)] for n, x in operation.sizes.items()}
        inputs = operation.draw(Case(name, sizes), operation.dtypes[0])
        for word, x in tensors_of(inputs.arguments).items():
            if x.ndim and x.numel() > 1 and word_of(word) not in inputs.dense:
                placed = place(x, layout_of(word, "apart", inputs.dense), "cpu").view
                assert placed.is_contiguous() == (word_of(word) in SIDE_BY_SIDE), word
                seen.add(word_of(word))
    assert seen or name in ("make_batch", "order_decodes_first")


def test_a_claim_keeps_a_dimension_small():
    def mine(cache, blocks, seq_len): ...

    mine.__claims__ = dict(heads=(2,))
    kernel = find_operation(mine, "gather")
    cases = kernel.operation.cases_past_tiles(kernel, {})
    assert {case["heads"] for case in cases} == {2} and max(case["seq_len"] for case in cases) == TILES[-1] + 1


def test_sizes_of_the_command_line_are_those_of_cases():
    """Heads and head sizes come as pairs, of queries and keys, and of keys and values."""
    limits = dict(heads=((8, 2),), head_sizes=((40, 40),), block_sizes=(48,))
    report = check("refattn.kv_cache", "gather", limits=limits, examples=2, only=["output"])
    assert report.drawn.largest | dict(heads=2, head_size=40, block_size=48) == report.drawn.largest
    assert "not drawn: " in "\n".join(of_drawn(report)) and not report.failures
    with pytest.raises(BadKernelError, match="make_batch has no size 'heads', .* there are lens, block_size, blocks"):
        check("refattn.metadata", "make_batch", limits=dict(heads=((8, 2),)))


# --- wrong past a size ---


def scores_of_two_rows(query, weights, index_cache, plan):
    """Two rows share the tiles of the first."""
    out = sparse.scores(query, weights, index_cache, plan)
    for i, (q0, q1) in enumerate(plan.batch.query_rows()):
        for row in range(q0 + 1, q1, 2):
            last = int(plan.batch.seq_lens[i]) - q1 + row - 1
            out[row, (last // 64 + 1) * 64 :] = -torch.inf
    return out


def positions_of_1024(batch, num_tokens):
    out = positions(batch, num_tokens)
    for q0, q1 in batch.query_rows():
        out[q0 + 1024 : q1] = 0
    return out


def slots_of_1024(batch, num_tokens, block_size):
    out = slot_mapping(batch, num_tokens, block_size=block_size)
    for q0, q1 in batch.query_rows():
        out[q0 + 1024 : q1] = -1
    return out


def accept_of_256(batch, trees, drafts, chosen):
    nodes, lens, following = speculative.accept(batch, trees, drafts, chosen)
    return nodes, torch.where(torch.arange(len(lens)) < 256, lens, 0), following


@claims(more=(0,), padding=(0,), nodes=((3, 1),))
def sampled_by_1024(batch, trees, drafts, target_probs, uniforms):
    """The sums of several parts of the vocabulary carry over once."""
    nodes, lens, following = speculative.accept_sampled(batch, trees, drafts, target_probs, uniforms)
    return nodes, lens, torch.where(following >= 1024, 1024 + following % 1024, following)


@claims(tokens=(5,), block_size=(4,), padding=(0,))
def fp8_of_1024_elements(key, value, key_cache, value_cache, slot_mapping, scales):
    x = key.flatten(1).clone()
    x[:, 1024:] = 0
    quantized.write(x.view(key.shape), value, key_cache, value_cache, slot_mapping, scales=scales)


def latents_of_512(latent, rope_key, cache, slot_mapping):
    mla.write(latent[:, :512], rope_key, cache, slot_mapping)


# --- wrong at an edge ---


def sampled_at_zero(batch, trees, drafts, target_probs, uniforms):
    """A random number of 0 accepts a token of probability 0: `u <= p`."""
    return speculative.accept_sampled(batch, trees, drafts, target_probs + 1e-30, uniforms)


def sampled_at_one(batch, trees, drafts, target_probs, uniforms):
    nodes, lens, following = speculative.accept_sampled(batch, trees, drafts, target_probs, uniforms)
    ones = (uniforms[batch.cu_seqlens_q[:-1].long()] == 1) & (following >= 0)
    return nodes, lens, torch.where(ones, target_probs.shape[1] - 1, following)


def accept_in_float32(batch, trees, drafts, chosen):
    nodes, lens, following = speculative.accept(batch, trees, drafts.float().long(), chosen.float().long())
    return nodes, lens, following


def index_write_without_nan(key, index_cache, slot_mapping):
    sparse.write(key.nan_to_num(0.0), index_cache, slot_mapping)


# --- wrong where memory is stale, or strided ---


def advance_over_stale_padding(batch, slots, block_size):
    before, end = slots.clone(), int(batch.cu_seqlens_q[-1])
    advance(batch, slots, block_size=block_size)
    slots[end:] = before[end:]


def swap_times_a_mask(sources, destinations, pairs):
    for source, destination in zip(sources, destinations, strict=True):
        wide = destination.float() if destination.itemsize > 1 else destination
        destination[pairs[:, 1]] = (source[pairs[:, 0]].to(wide) + wide[pairs[:, 1]] * 0).to(destination.dtype)


def fp8_by_scales_side_by_side(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, format):
    def flat(x):
        return x.as_strided(x.shape, (1,)).nan_to_num(1.0).abs() if isinstance(x, torch.Tensor) else x

    scales = Fp8Scales(flat(key_scale), flat(value_scale), format=format)
    quantized.write(key, value, key_cache, value_cache, slot_mapping, scales=scales)


def fp8_in_runs(key, value, key_cache, value_cache, slot_mapping, scales):
    """Slots that follow one another are written as one piece, which ends with its block."""
    slots, p = slot_mapping.clone(), key_cache.shape[1]
    for i in range(1, len(slots)):
        if slots[i] >= 0 and slots[i] == slots[i - 1] + 1 and slots[i] % p == 0:
            slots[i] = -1
    quantized.write(key, value, key_cache, value_cache, slots, scales=scales)


# --- wrong where there are more queries than keys, or no cache, or another type is returned ---


def positions_from_0(batch, num_tokens):
    return positions(batch, num_tokens).clamp(min=0)


def positions_of_32_bits(batch, num_tokens):
    return positions(batch, num_tokens).int()


def slot_0_below_position_0(batch, num_tokens, block_size):
    below = positions(batch, num_tokens) < 0
    return slot_mapping(batch, num_tokens, block_size=block_size).masked_fill(below, 0)


def slots_without_a_cache(batch, num_tokens, block_size):
    slots = slot_mapping(batch, num_tokens, block_size=block_size)
    return slots if batch.block_table.shape[1] else torch.zeros_like(slots)


def batch_of_64_bits(query_lens, seq_lens, block_tables):
    batch = make_batch(query_lens, seq_lens, block_tables)
    return replace(batch, seq_lens=batch.seq_lens.long())


def advance_over_old_positions(batch, slots, block_size, input_positions=None):
    before, end = None if input_positions is None else input_positions.clone(), int(batch.cu_seqlens_q[-1])
    advance(batch, slots, block_size=block_size, input_positions=input_positions)
    if before is not None:
        input_positions[end:] = before[end:]


def scores_before_the_first_key(query, weights, index_cache, plan):
    out = sparse.scores(query, weights, index_cache, plan)
    out[: plan.batch.num_tokens, :1] = out[: plan.batch.num_tokens, :1].nan_to_num(neginf=0.5)
    return out


# --- wrong for pools that differ, sizes without a tile, and numbers that are seldom ---


def copy_as_much_as_of_the_first(caches, pairs):
    size = min([x[0].numel() for x in caches[:1]], default=0)
    for cache in caches:
        before = cache.clone()
        for source, destination in pairs.tolist():
            rows = before[destination].flatten()
            rows[:size] = before[source].flatten()[:size]
            cache[destination] = rows.view(cache.shape[1:])


def sampled_of_32768(batch, trees, drafts, target_probs, uniforms):
    most = torch.arange(target_probs.shape[1]) < 32768
    return speculative.accept_sampled(batch, trees, drafts, target_probs * most, uniforms)


def scores_of_16384(query, weights, index_cache, plan):
    out = sparse.scores(query, weights, index_cache, plan)
    out[:, 16384:] = -torch.inf
    return out


def values_as_large_as_keys(query, latent, rope_key, cache, key_projection, value_projection, softmax_scale, plan):
    value_projection = value_projection.clone()
    value_projection[:, key_projection.shape[1] :] = 0
    options = AttentionOptions(softmax_scale=softmax_scale)
    return mla.prefill(query, latent, rope_key, cache, key_projection, value_projection, plan, options)


def convolve_of_four_taps(inputs, weight, states, plan):
    weight = weight * (torch.arange(weight.shape[1]) >= weight.shape[1] - 4)
    return recurrent.convolve(inputs, weight, states, plan)


def convolve_as_the_pool_holds(inputs, weight, states, plan):
    return recurrent.convolve(inputs.to(states.dtype).to(inputs.dtype), weight, states, plan)


def map_of_factors_up_to_1(key, value, log_decay, beta, plan):
    return recurrent.state_map(key, value, log_decay, beta.clamp(max=1), plan)


def map_that_forgets_little(key, value, log_decay, beta, plan):
    return recurrent.state_map(key, value, log_decay.clamp(min=-8), beta, plan)


def one_head_for_all_ranks(query, key, value, key_cache, value_cache, plan, group, softmax_scale):
    if 1 < key.shape[1] < group.size:
        key, value = (x[:, :1].expand_as(x) for x in (key, value))
    options = AttentionOptions(softmax_scale=softmax_scale)
    return context_parallel.attention(query, key, value, key_cache, value_cache, plan, options, group=group)


def latents_without_infinity(latent, rope_key, cache, slot_mapping, cache_scale):
    latent = latent.masked_fill(latent.isinf(), 0.0)
    mla.write(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)


# --- wrong for numbers, types and sizes that few draw ---


def int8_of_nonzero_queries(query, key_cache, value_cache, plan, scales, options):
    zeros = (query == 0).all(-1, keepdim=True)
    return quantized.attention(query, key_cache, value_cache, plan, options, scales=scales).masked_fill(
        zeros, torch.nan
    )


def accept_in_16_bits(batch, trees, drafts, chosen):
    nodes, lens, _ = speculative.accept(batch, trees, drafts & 0xFFFF, chosen & 0xFFFF)
    return nodes, lens, speculative.accept(batch, trees, drafts, chosen).next_tokens


def advance_in_16_bits(batch, slots, block_size, input_ids=None, sampled_ids=None):
    ids = None if sampled_ids is None else sampled_ids & 0xFFFF
    advance(batch, slots, block_size=block_size, input_ids=input_ids, sampled_ids=ids)


def sampled_of_2_17(batch, trees, drafts, target_probs, uniforms):
    nodes, lens, following = speculative.accept_sampled(batch, trees, drafts, target_probs, uniforms)
    return nodes, lens, following.clamp(max=2**17 - 1)


def fp8_with_ties_away(key, value, key_cache, value_cache, slot_mapping, scales):
    """The smallest number of the format comes of a half of it, too."""
    rows = []
    for x, scale in ((key, scales.key), (value, scales.value)):
        x = x.float() / torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1)
        least = torch.finfo(scales.format).smallest_normal * torch.finfo(scales.format).eps
        rows.append(torch.where(x.abs() == least / 2, x * 2, x))
    quantized.write(*rows, key_cache, value_cache, slot_mapping, scales=Fp8Scales(1.0, 1.0, format=scales.format))


def latents_with_ties_away(latent, rope_key, cache, slot_mapping, cache_scale):
    x = latent.float() / cache_scale
    if cache.itemsize == 1:
        least = torch.finfo(cache.dtype).smallest_normal * torch.finfo(cache.dtype).eps
        x = torch.where(x.abs() == least / 2, x * 2, x)
    mla.write(x, rope_key.float() / cache_scale, cache, slot_mapping, cache_scale=1.0)


def int8_by_inverse(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales):
    most = key.float().abs().amax(-1)
    quantized.write(key, value, key_cache, value_cache, slot_mapping, scales=Int8Scales(key_scales, value_scales))
    p = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            rounded = (key[row].float() * (127 / most[row].clamp(min=1e-30))[:, None]).round()
            key_cache[slot // p, slot % p] = rounded.nan_to_num(0.0).to(torch.int8)


def compact_of_one_type(batch, trees, accepted, caches, block_size):
    alike = [x for x in caches if x.dtype == caches[0].dtype]
    speculative.compact(alike, batch, trees, accepted, block_size=block_size)


def gather_of_float32(cache, blocks, seq_len):
    out = kv_cache.gather(cache, blocks, seq_len)
    return out.float().to(out.dtype) if out.dtype == torch.float64 else out


def swap_of_usual_nan(sources, destinations, pairs):
    for source, destination in zip(sources, destinations, strict=True):
        rows = source[pairs[:, 0]]
        destination[pairs[:, 1]] = rows.where(~rows.isnan(), torch.nan) if rows.is_floating_point() else rows


def convolve_without_a_last_tile(inputs, weight, states, plan):
    before = states.clone()
    out = recurrent.convolve(inputs, weight, states, plan)
    for n, slot in zip(plan.batch.query_lens.tolist(), plan.state_indices.tolist(), strict=True):
        if n == 8 * weight.shape[1] and slot >= 0:
            states[slot] = before[slot]
    return out


def prefill_of_16384(
    query, latent, rope_key, cache, key_projection, value_projection, softmax_scale, batch, block_size
):
    plan = mla.plan_prefill(batch, block_size=block_size, workspace=16384 * max(1, batch.num_seqs))
    plan = replace(plan, chunks=plan.chunks[:1])
    options = AttentionOptions(softmax_scale=softmax_scale)
    return mla.prefill(query, latent, rope_key, cache, key_projection, value_projection, plan, options)


def batch_of_float32(query_lens, seq_lens, block_tables):
    batch = make_batch(query_lens, seq_lens, block_tables)
    ends = torch.tensor([0, *query_lens], dtype=torch.float32).cumsum(0).int()
    return replace(batch, cu_seqlens_q=ends)


def positions_with_a_seed(batch, num_tokens):
    torch.manual_seed(0)
    return positions(batch, num_tokens)


def state_map_of_float64(key, value, log_decay, beta, plan):
    torch.set_default_dtype(torch.float64)
    return recurrent.state_map(key, value, log_decay, beta, plan)


WRONG = [
    ("int8_attention", int8_of_nonzero_queries, "zeros"),
    ("accept", accept_in_16_bits, "output"),
    ("advance", advance_in_16_bits, "sampled ids"),
    ("accept_sampled", sampled_of_2_17, "last token"),
    ("fp8_write", fp8_with_ties_away, "ties"),
    ("mla_write", latents_with_ties_away, "ties"),
    ("int8_write", int8_by_inverse, "ties"),
    ("compact", compact_of_one_type, "output"),
    ("swap_blocks", swap_of_usual_nan, "output"),
    ("convolve", convolve_without_a_last_tile, "filled tiles"),
    ("mla_prefill", prefill_of_16384, "many keys"),
    ("make_batch", batch_of_float32, "large"),
    ("positions", positions_with_a_seed, "process"),
    ("state_map", state_map_of_float64, "process"),
    ("positions", positions_from_0, "empty"),
    ("positions", positions_of_32_bits, "output"),
    ("slot_mapping", slot_0_below_position_0, "empty"),
    ("slot_mapping", slots_without_a_cache, "no cache"),
    ("make_batch", batch_of_64_bits, "output"),
    ("advance", advance_over_old_positions, "input positions"),
    ("index_scores", scores_before_the_first_key, "empty"),
    ("copy_blocks", copy_as_much_as_of_the_first, "output"),
    ("accept_sampled", sampled_of_32768, "large vocabulary"),
    ("index_scores", scores_of_16384, "many keys"),
    ("mla_prefill", values_as_large_as_keys, "output"),
    ("convolve", convolve_of_four_taps, "output"),
    ("convolve", convolve_as_the_pool_holds, "output"),
    ("state_map", map_of_factors_up_to_1, "gates"),
    ("state_map", map_that_forgets_little, "gates"),
    ("context_parallel", one_head_for_all_ranks, "few KV heads"),
    ("mla_write", latents_without_infinity, "saturates"),
    ("index_scores", scores_of_two_rows, "past tiles"),
    ("positions", positions_of_1024, "past tiles"),
    ("slot_mapping", slots_of_1024, "past tiles"),
    ("accept", accept_of_256, "past tiles"),
    ("accept_sampled", sampled_by_1024, "past tiles"),
    ("fp8_write", fp8_of_1024_elements, "past tiles"),
    ("mla_write", latents_of_512, "past tiles"),
    ("accept_sampled", sampled_at_zero, "zeros"),
    ("accept_sampled", sampled_at_one, "ones"),
    ("accept", accept_in_float32, "output"),
    ("index_write", index_write_without_nan, "keeps nan"),
    ("advance", advance_over_stale_padding, "unread"),
    ("swap_blocks", swap_times_a_mask, "unread"),
    ("fp8_write", fp8_by_scales_side_by_side, "strides"),
    ("fp8_write", fp8_in_runs, "output"),
]


@pytest.mark.parametrize(("path", "function", "name"), WRONG, ids=[x[1].__name__ for x in WRONG])
def test_a_wrong_function_is_found(path, function, name):
    (finding,) = check(function, path, only=[name], dtypes=OPERATIONS[path].dtypes[:1]).findings
    assert finding.outcome in ("wrong", "raises"), finding


def test_a_pool_of_float64_keeps_all_digits():
    (finding,) = check(gather_of_float32, "gather", only=["output"], dtypes=[torch.float64]).findings
    assert finding.outcome == "wrong", finding


# --- right ---


def compose_in_pairs(factors, added):
    maps = [recurrent.StateMap(*x) for x in zip(factors, added, strict=True)]
    while len(maps) > 1:
        pairs = [recurrent.compose(maps[i : i + 2]) for i in range(0, len(maps) - 1, 2)]
        maps = [*pairs, *maps[2 * len(pairs) :]]
    return maps[0].factor, maps[0].added


def test_another_order_of_a_sum_in_float64_is_right():
    """There is no wider type to compare with: a rounding per term is allowed."""
    report = check(compose_in_pairs, "compose", only=["output", "runs"], dtypes=[torch.float64])
    assert not report.failures, report.failures


def test_halves_of_int8_are_rounded_to_the_even_number():
    """The reference says it, both pages say it, and the kit asks for it where a half is exact."""
    key_cache, value_cache, key_scales = quantized.allocate_int8(1, 4, 1, 4)
    x = torch.tensor([[[0.5, 1.5, -2.5, 127.0]]])
    scales = Int8Scales(key_scales, torch.ones(1, 4))
    quantized.write(x, x, key_cache, value_cache, torch.tensor([0]), scales=scales)
    assert key_cache[0, 0, 0].tolist() == value_cache[0, 0, 0].tolist() == [0, 2, -2, 127]
    pages = [
        " ".join(Path(f"docs/proof/{page}.md").read_text().split()) for page in ("conventions", "prove_your_kernel")
    ]
    assert "ties to even" in pages[0] and "an exact half is rounded to even" in pages[1]
    assert "even" in next(x.promise for x in OPERATIONS["int8_write"].specials if x.name == "ties")
