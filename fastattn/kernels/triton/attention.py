"""Attention over pages or rows in Triton: the keys split over programs, the parts merged by a second kernel.

One program takes a tile of query rows of one sequence, one key head, and a run of the keys that the tile can see:

                       keys  0        256       512       768  seq_len
    sequence 0, key head 0   | split 0 | split 1 | split 2 | s3 |
    sequence 1, key head 0   | split 0 | s1 |

Every split gives the softmax over its own keys and its log-sum-exp; `_reduce_kernel` merges them. How many splits a
sequence of average length gets is chosen on the host, from the number of tiles and multiprocessors; a longer one gets
more, a shorter one fewer, by its share of all keys, which the device counts: a captured graph stays right and balanced
when its sequences grow. All get the same number where the host knows that they are about as long.

Under `batch_invariant` no bit of an answer may depend on the others, nor on how many tokens of its own sequence come
with it. So a split is a fixed run of keys, whose place does not move, and parts are merged one after the other: then a
part in which a query sees nothing changes nothing.

Source: Dao et al. 2023, "Flash-Decoding"; the tiles of a ragged batch are found as in vLLM's Triton attention.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from fastattn.kernels.gpu.attention_kernel import (
    bytes_of_a_program,
    contiguous,
    has_scale_above_0,
    launch_attention,
    of_layer,
    spare_stages,
)
from fastattn.kernels.gpu.launch import Launch, SplitLaunches
from fastattn.kernels.gpu.quantize_query import quantize_query
from fastattn.kernels.gpu.quantized import (
    FORMATS,
    NO_CODES,
    Codes,
    are_pairs,
    codes_in_pairs,
    codes_of,
    in_pairs,
    size_of,
)
from fastattn.kernels.gpu.tile import CHANGING, can_overlap, fit, merge_parts, normalize, pad, store_rows
from fastattn.kernels.problem import latent_scales
from fastattn.kernels.triton import latents_hopper
from fastattn.kernels.triton.bind import recorder, recording
from fastattn.kernels.triton.tuning import share_sm, tune
from refattn.keys import Keys, Latents, PackedLatents, Pages, Rows
from refattn.options import AttentionOptions
from refattn.packed_latents import PACKED_FORMAT, packed_parts
from refattn.plan import Plan
from refattn.trees import AttentionPlan, TreePlan

SPLITS_PER_STEP = 64  # parts, of one head or of several
MERGED_ELEMENTS = 8192  # and elements of them, at most


def attend_to_keys(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to any storage under any plan, but to latents in one level; see `fastattn.kernels.dispatch`.

    A tree is one softmax with the keys before it, latents are loaded once as key and as value, and codes become numbers
    in registers.
    """
    key, value, codes = pools_of(query, keys)
    if isinstance(keys, Latents) and keys.query_scale is not None:
        # In the loop they would be converted with the latents to the type of the query; as float16 neither is.
        out = query.new_empty(*query.shape[:2], keys.latent_rank) if out is None else out
        kind = torch.float16 if query.itemsize == 2 else query.dtype
        query, codes = (
            quantize_query(query, keys.query_scale, keys.cache.dtype, kind),
            codes._replace(rounds_query=False),
        )
    plans = [level.whole for level in plan.levels]
    if codes.kind and codes.groups is None:
        key, value = codes_in_pairs(query, key, value, plans, options)
    tree, shared = plan if isinstance(plan, TreePlan) else None, isinstance(keys, Latents | PackedLatents)
    is_rounded = isinstance(keys, Latents) and keys.query_scale is not None  # which a replay would not do
    with recording(None) if is_rounded else nullcontext():
        return attend_levels(query, key, value, plans, options, out, shared=shared, codes=codes, tree=tree)


def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Shaped[Tensor, "n p hk _"],
    value: Float[Tensor, "s hk dv"] | Shaped[Tensor, "n p hk _"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None = None,
    *,
    shared: bool = False,
    codes: Codes = NO_CODES,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages if `key` has four dimensions, else over ragged rows.

    Args:
        query: query rows of all sequences.
        key: the pool of keys, or the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        plan: the lengths, the block table for pages, and who may see whom.
        options: those of the layer.
        out: contiguous memory for the outputs; new memory if None.
        shared: `value` is a view of the first elements of each key: load them once, as key and as value.
        codes: what the pools hold, if it is codes; those of fp8 are seen as bytes, those of values as pairs of bytes,
            if they lie so (`fastattn.kernels.gpu.quantized.in_pairs`).

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: see the module.
    """
    return attend_levels(query, key, value, [plan], options, out, shared=shared, codes=codes)


def attend_levels(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Shaped[Tensor, "n p hk _"],
    value: Float[Tensor, "s hk dv"] | Shaped[Tensor, "n p hk _"],
    levels: Sequence[Plan],
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None = None,
    *,
    shared: bool = False,
    codes: Codes = NO_CODES,
    tree: TreePlan | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to the keys of several levels, each with a plan of its own over the same query rows, as one softmax.

    A level's splits are parts like any other, so all levels share one reduction; and a level need not wait for the one
    before it, as long as the reduction waits for all.

    Args:
        query: query rows of all sequences.
        key: as in `attend`.
        value: as in `attend`.
        levels: the plan of each level.
        options: those of the layer; sinks count once.
        out: as in `attend`.
        shared: as in `attend`.
        codes: as in `attend`.
        tree: the trees at the end of the sequences, of the only level.

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: the module; levels of a cascade: Ye et al. 2024, "Cascade Inference".
    """
    num_tokens, num_heads = query.shape[:2]
    value_head_size = size_of(value)
    out = query.new_empty(num_tokens, num_heads, value_head_size) if out is None else out
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    batch = levels[-1].batch
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return out.zero_(), lse.fill_(-torch.inf)

    row_bytes, key_bytes = bytes_of_a_program(query, key, value, shared)
    masked = tree is not None or any(level.first_visible is not None for level in levels)
    fewest_rows = 16 if shared or masked or key.ndim == 3 else 8  # of a tile: see `attend_few_rows`
    tunings = [tune(query, key, value, level, options, row_bytes, shared, fewest_rows) for level in levels]
    if len(levels) > 1:
        tunings = [share_sm(tuning, of_codes=bool(codes.kind)) for tuning in tunings]
    room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1)
    spare = spare_stages(query, shared, codes, tunings[0].block_m)
    tunings = [fit(tuning, query.device, **room, spare=spare) for tuning in tunings]
    num_parts = sum(tuning.most_splits for tuning in tunings)
    launch_level: Callable[..., Launch] = partial(launch_attention, shared=shared, tree=tree)
    is_plain = shared and tree is None and len(levels) == 1
    if is_plain and latents_hopper.takes(query, key, levels[0], options, tunings[0], codes):
        launch_level = latents_hopper.launch
    if num_parts == 1 and not options.batch_invariant:
        launch = launch_level(query, key, value, levels[0], options, tunings[0], out, lse, codes=codes)
        _record(out, [(launch, 0)], 1, None, options)
        return out, lse

    parts = query.new_empty(num_parts, *out.shape, dtype=torch.float32)
    part_lses = query.new_empty(num_parts, *lse.shape, dtype=torch.float32)
    overlap = can_overlap(query.device)
    launches, first = [], 0
    for level, tuning in zip(levels, tunings, strict=True):
        pays = codes.kind and tuning.block_m <= 16 and query.itemsize == 2 and not shared
        launch = launch_level(
            query,
            key,
            in_pairs(value) if pays and not are_pairs(value) else value,
            level,
            options,
            tuning,
            parts[first:] if first else parts,  # a slice takes the CPU as long as an allocation
            part_lses[first:] if first else part_lses,
            overlap=overlap,
            after=first > 0,
            codes=codes,
        )
        launches.append((launch, first))
        first += tuning.most_splits
    at_once = max(1, min(SPLITS_PER_STEP, MERGED_ELEMENTS // pad(value_head_size)))
    block_splits = 1 if options.batch_invariant else min(at_once, pad(num_parts))
    block_heads = min(at_once // block_splits, pad(num_heads))
    reduction = Launch(
        _reduce_kernel,
        (num_tokens, -(-num_heads // block_heads)),
        dict(parts=parts, part_lses=part_lses, out=out, lse=lse, sinks=contiguous(options.sinks)),
        dict(
            cu_seqlens_q=batch.cu_seqlens_q,
            num_tokens=num_tokens,
            num_seqs=batch.num_seqs,
            splits=num_parts,
            NUM_HEADS=num_heads,
            VALUE_HEAD_SIZE=value_head_size,
            BLOCK_HEADS=block_heads,
            BLOCK_SPLITS=block_splits,
            OVERLAP=overlap,
        ),
        dict(num_warps=4) | ({"launch_pdl": True} if overlap else {}),
    )
    _record(out, launches, num_parts, reduction, options)
    return out, lse


class Launches(SplitLaunches):
    """The launches of a call, which are called as a kernel is; see `fastattn.kernels.replay`."""

    def attend(
        self,
        query: Tensor,
        keys: Keys,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with other tensors, and other scales of the same layout; codes come as they are stored."""
        key, value, codes = pools_of(query, keys, addresses=True)
        of_reduction = (contiguous(options.sinks),)
        return self.replay((query, key, value), of_layer(query, options, codes).values(), of_reduction, out)


def pools_of(query: Tensor, keys: Keys, *, addresses: bool = False) -> tuple[Tensor, Tensor, Codes]:
    """Return keys, values and what turns them into numbers.

    Latents are pages of one head, whose values are the first elements of its keys; where addresses alone are asked
    for, they are the pool as it is, where both begin. Of packed latents keys are the rotary keys alone.
    """
    if isinstance(keys, (Pages, Rows)):
        return *keys, NO_CODES
    if isinstance(keys, PackedLatents):
        parts = packed_parts(keys.cache[:, :, None], keys.latent_rank, query.shape[2] - keys.latent_rank)
        return parts.rope_key, parts.codes, Codes(FORMATS[PACKED_FORMAT], groups=parts.scales[:, :, 0])
    if isinstance(keys, Latents):
        scales = latent_scales(keys.cache, keys.cache_scale, keys.query_scale)
        codes = NO_CODES if scales is None else codes_of(scales)
        if addresses:
            return keys.cache, keys.cache, codes
        pages = keys.cache[:, :, None, : query.shape[2]]
        return pages, pages[..., : keys.latent_rank], codes
    return keys.key_cache, keys.value_cache, codes_of(keys.scales)


def _record(
    out: Tensor,
    launches: Sequence[tuple[Launch, int]],
    num_parts: int,
    reduction: Launch | None,
    options: AttentionOptions,
) -> None:
    """Record how to replay the call that is under way; not if its scale is not positive, which changes the query."""
    into = recorder()
    if into is None or not has_scale_above_0(options):
        return
    t, h, dv = out.shape
    made = Launches(out.shape, (t, h, dv), launches, num_parts, reduction, with_lse=into.return_lse)
    into.replay = made.attend


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _reduce_kernel(
    parts,  # [splits, t, h, dv]
    part_lses,  # [splits, t, h]
    out,
    lse,
    cu_seqlens_q,
    sinks,
    num_tokens,
    num_seqs,
    splits,
    NUM_HEADS: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < NUM_HEADS
    is_query = token < tl.load(cu_seqlens_q + num_seqs)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD)
    places = token * NUM_HEADS + heads
    row_max = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_PAD], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)[None, :]
        part_places = split.to(tl.int64) * num_tokens * NUM_HEADS + places[:, None]
        # No part of a padding row was written, and no value of a split without keys. The values are loaded before that
        # is known, so that one load need not wait for the other.
        is_part = is_head[:, None] & (split < splits) & is_query
        logs = tl.load(part_lses + part_places, is_part, float("-inf"))
        values = tl.load(
            parts + part_places[:, :, None] * VALUE_HEAD_SIZE + at_dv[None, None, :],
            mask=is_part[:, :, None] & (at_dv < VALUE_HEAD_SIZE)[None, None, :],
            other=0.0,
        )
        values = tl.where((logs > float("-inf"))[:, :, None], values, 0.0)
        row_max, row_sum, acc = merge_parts(row_max, row_sum, acc, logs, values)
    sink = None
    if sinks is not None:
        sink = tl.where(is_query, tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32), float("-inf"))
    values, logs = normalize(row_max, row_sum, acc, sink)
    store_rows(values, logs, places, is_head, out, lse, VALUE_HEAD_SIZE)
