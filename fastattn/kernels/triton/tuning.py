"""Choose the shape of a launch of attention: rows of a tile, keys of a step, warps, and how often keys are split."""

from functools import cache

import torch
from torch import Tensor

from fastattn.kernels.gpu.attention_kernel import bytes_of_a_row, count_tiles
from fastattn.kernels.gpu.quantized import are_pairs, size_of
from fastattn.kernels.gpu.tile import LATENT_16, LATENT_64, LaunchConfig, multiprocessors, step_for
from fastattn.kernels.problem import uses_positions
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan

FEWEST_KEYS = 256  # that are worth a program of their own
FEWEST_LATENTS = 64  # likewise: a step
MOST_KEYS = 2048  # of a sequence in one program: one much longer than the others must not run alone at the end
MOST_PART_BYTES = 2**28  # that the parts of all splits may take
TOO_FEW = {1: 1.1, 2: 1.03, 3: 1.03}  # how much longer so few programs take that a multiprocessor could hold more of
LONG_RUN = 3072 * 256  # bytes of the keys of a program, from which on two of them are enough
MOSTLY = 0.9  # of the multiprocessors
EVEN = 1.25  # times the average is the longest sequence, at most, of some that need no balance
INVARIANT_RUN = 2048  # keys of a split under `batch_invariant`


def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    row_bytes: int,
    shared: bool = False,
    fewest_rows: int = 16,
) -> LaunchConfig:
    """Choose the shape of a launch from sizes that the host knows.

    Under `batch_invariant` nothing depends on the batch: not the tile, not the step, and not where a split begins.
    """
    batch, num_kv_heads = plan.batch, key.shape[-2]
    group = query.shape[1] // num_kv_heads
    visible = _most_visible_keys(plan, options)
    by_fma = query.dtype == torch.float32 and not shared
    if options.batch_invariant:
        may_begin_inside = plan.window[0] >= 0 or plan.first_visible is not None
        splits = max(1, -(-visible // INVARIANT_RUN) + may_begin_inside)
        if shared:
            return LATENT_64._replace(splits=splits, most_splits=splits, run=INVARIANT_RUN)
        tuning = LaunchConfig(64, step_for(64, row_bytes), 4, 3, splits, splits, run=INVARIANT_RUN)
        return _without_tensor_cores(tuning) if by_fma else tuning
    rows = batch.max_query_len * group
    many_rows = 64 if rows <= 64 or row_bytes > 256 or shared or by_fma else 128
    block_m = fewest_rows if rows <= fewest_rows else 16 if rows <= 16 else many_rows
    tiles, num_multiprocessors = count_tiles(batch, query.shape[0], group, block_m), multiprocessors(query.device)
    of_codes = key.dtype != query.dtype or value.dtype != query.dtype
    if shared and not of_codes and tiles * max(1, visible // FEWEST_LATENTS) < num_multiprocessors:
        block_m = 16  # tiles of 64 would leave some of them idle, however short their runs
        tiles = count_tiles(batch, query.shape[0], group, block_m)
    tune_tiles = _tune_latents if shared else _tune
    if block_m <= 16 and of_codes and query.dtype != torch.float32:  # steps of as many bytes, be they codes
        row_bytes = max(bytes_of_a_row(key), bytes_of_a_row(value))
    tuning = tune_tiles(block_m, row_bytes, tiles * num_kv_heads, visible, num_multiprocessors, of_codes)
    if shared and are_pairs(value):
        tuning = tuning._replace(block_n=2 * tuning.block_n)  # steps of as many bytes
    if by_fma and block_m > 16:
        tuning = _without_tensor_cores(tuning)
    if batch.num_seqs == 1 or rows > block_m or _about_as_long(batch, visible):  # there is nothing to balance
        return tuning
    room = MOST_PART_BYTES // (4 * query.shape[0] * query.shape[1] * size_of(value))
    return tuning._replace(most_splits=max(tuning.splits, min(room, -(-visible // MOST_KEYS))))


def _without_tensor_cores(tuning: LaunchConfig) -> LaunchConfig:
    """Give each thread a quarter of the numbers: their operands take registers, too, as products are its own FMAs.

    In float32, 64 rows of 64 elements by steps of 64 keys spill 10 KB and take the compiler four times as long.
    """
    return tuning._replace(block_n=max(16, tuning.block_n // 2), num_warps=8)


def _about_as_long(batch: Batch, visible: int) -> bool:
    """Return whether the sequences are known to have about as many keys each, of those that are visible."""
    return batch.num_keys is not None and EVEN * batch.num_keys >= visible * batch.num_seqs


@cache
def _tune(
    block_m: int, row_bytes: int, programs: int, visible: int, num_multiprocessors: int, of_codes: bool = False
) -> LaunchConfig:
    """Choose the splits that keep all multiprocessors busy to the end, and how a program works then.

    As long as all programs run at once, the time is that of the multiprocessor with the most keys to read; it takes
    about 100 KB on their way to it to keep the memory busy. More programs than fit come and go, at a small loss. One
    sequence of 131072 keys takes 127 us in 33 splits, two programs each, and 132 us in 66; of codes of 8 bits, 70 us in
    49 and 76 us in 66 (5e34b75, 2026-11-22).

    Source: measured on an NVIDIA H200 with bfloat16 and head size 128; wider rows get shorter steps.
    """
    few_rows = block_m <= 16
    at_once = 3 if block_m == 8 and of_codes else 4 if few_rows else 128 // block_m  # that a multiprocessor holds

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_multiprocessors)
        if on_one > at_once:
            return 1.05 * programs / num_multiprocessors
        is_long = on_one == 2 and visible * row_bytes >= splits * LONG_RUN  # and there are fewer parts to merge
        return on_one / splits * (1.0 if not few_rows or on_one == at_once or is_long else TOO_FEW[on_one])

    splits = min(range(1, max(1, visible // FEWEST_KEYS) + 1), key=time)
    on_one = -(-programs * splits // num_multiprocessors)
    block_n = step_for(64, row_bytes)
    if few_rows and on_one > 3:
        return LaunchConfig(block_m, block_n, 2, 2, splits, splits)
    return LaunchConfig(block_m, block_n, 8 if block_m == 128 else 4, 2 if at_once == 3 else 3, splits, splits)


@cache
def _tune_latents(
    block_m: int, row_bytes: int, programs: int, visible: int, num_multiprocessors: int, of_codes: bool = False
) -> LaunchConfig:
    """Choose how often to split the keys where each is a value, too, and how a program works then.

    A multiprocessor holds two programs of 16 rows, or one of 64. One of 16 with longer steps is as good, if nearly all
    have one: 64 sequences of 8192 keys take 144 us in two splits each, and 148 us in four (5e34b75, 2026-11-22). One
    query of 128 heads that sees 2048 keys takes 18 us in tiles of 16 rows and 16 splits, and in tiles of 64 23 us in 32
    splits, 33 us in 8.

    Source: measured on an NVIDIA H200 with bfloat16, latents of 512 elements and rotary keys of 64. With 64 rows the
    compiler (Triton 3.6) lets both halves of a program compute the same scores, as it lays the warps of a product along
    its rows if the result goes into another product.
    """
    tuning, at_once = (LATENT_16, 2) if block_m == 16 else (LATENT_64, 1)
    splits = min(num_multiprocessors // programs, visible // FEWEST_LATENTS)
    if block_m == 16 and not of_codes and programs * splits >= MOSTLY * num_multiprocessors:
        return tuning._replace(block_n=64, splits=splits, most_splits=splits)

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_multiprocessors)
        if on_one > at_once:
            return 1.05 * programs / num_multiprocessors
        return on_one / splits * (1.0 if on_one == at_once else 1.2)

    splits = min(range(1, max(1, visible // FEWEST_LATENTS) + 1), key=time)
    return tuning._replace(splits=splits, most_splits=splits)


def share_sm(tuning: LaunchConfig, of_codes: bool = False) -> LaunchConfig:
    """Change a launch so that those of other levels have room beside it: one multiplies while the other reads.

    A level of codes keeps all its splits: 64 decodes after a prefix of 8192 keys in fp8, with 256 of their own, take 46
    us so, 50 us with 7 of 8 splits, and 57 us in tiles of 64 rows (d99386b, 2026-11-24).

    Source: measured on an NVIDIA H200; with all registers or all multiprocessors taken, one level waits for the other.
    8 warps with 168 registers per thread leave 4 warps 176; the compiler takes fewer by itself
    (tests/kernels/test_compile.py).
    """
    if tuning.run:
        return tuning  # which keys a split has must not depend on other levels either
    if tuning.block_m <= 16:
        return tuning._replace(num_warps=4, num_stages=2)
    registers = 168 if tuning.num_warps == 8 else None
    if of_codes and tuning.block_m == 128:
        return tuning._replace(registers=registers)
    splits = max(1, tuning.splits * 7 // 8)
    return tuning._replace(splits=splits, most_splits=max(splits, tuning.most_splits * 7 // 8), registers=registers)


def _most_visible_keys(plan: Plan, options: AttentionOptions) -> int:
    """Bound the keys that the queries of one sequence see, together; those at any positions may see all."""
    batch, (left, right) = plan.batch, plan.window
    visible = batch.max_seq_len
    if not uses_positions(plan, options) and left >= 0 and right >= 0:
        visible = min(visible, left + batch.max_query_len + right)
    return visible
