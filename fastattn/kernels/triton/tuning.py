"""Choose the launch config of attention: rows of a tile, keys of a step, warps, stages, and splits of the keys."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.kernels import device as devices
from fastattn.kernels.problem import uses_positions
from fastattn.kernels.triton.launch import INTERPRETED
from fastattn.kernels.triton.quantized import Quantization
from fastattn.kernels.triton.queries import count_tiles
from refattn.options import AttentionOptions
from refattn.plan import Plan

SCRATCH_BYTES = 4096  # shared memory of a program besides its tile and its steps
FEWEST_KEYS = 256  # fewest keys of a split
FEWEST_LATENTS = 64  # fewest latents of a split: one step
MOST_KEYS = 2048  # most keys per program: a much longer sequence must not finish alone at the end
WARP_REGISTERS = 248  # most registers of a thread of a program of one warp; without a limit the compiler may aim at 168
MOST_PART_BYTES = 2**28  # most bytes of the partial outputs of all splits
TOO_FEW = {1: 1.1, 2: 1.03, 3: 1.03}  # slowdown with so few programs per SM where more would fit
LONG_RUN = 3072 * 256  # bytes of the keys of a program from which two programs per SM are enough
MOSTLY = 0.9  # the share of SMs that counts as nearly all
EVEN = 1.25  # longest sequence over the average, at most, of sequences that need no balance
INVARIANT_RUN = 2048  # keys of a split under `batch_invariant`


class LaunchConfig(NamedTuple):
    """The launch config of attention.

    Attributes:
        block_m: rows of a tile.
        block_n: keys of a step.
        num_warps: warps of a program.
        num_stages: pipeline stages, steps in flight.
        splits: splits of the keys of a sequence of average length.
        most_splits: splits of the longest sequence, at most.
        registers: most registers of a thread, so that programs of another launch fit beside it; None for any number.
        run: fixed size of a split in keys, under `batch_invariant`; 0 to divide the keys evenly.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    most_splits: int
    registers: int | None = None
    run: int = 0


LATENT_16 = LaunchConfig(16, 32, 4, 3, 1, 1)
LATENT_64 = LaunchConfig(64, 64, 8, 2, 1, 1)


def sms_of(device: torch.device) -> int:
    """Return the number of SMs; a few for the interpreter, so that its tests split keys too."""
    return 4 if INTERPRETED else devices.num_sms(device)


def fit(
    tuning: LaunchConfig,
    device: torch.device,
    *,
    row_bytes: int,
    key_bytes: int,
    fewest_stages: int = 1,
    spare: int = 0,
) -> LaunchConfig:
    """Shrink a launch to the shared memory of a device: its stages first, then keys of a step, then rows.

    Args:
        tuning: the launch.
        device: where it is to run.
        row_bytes: bytes of a row of the tile.
        key_bytes: bytes that a step reads for a key, those of its value included.
        fewest_stages: stages to keep: 2 where keys are values, as with one they would be stored twice.
        spare: stages that take no shared memory.

    Source: compiled for compute capability 8.0, 8.9 and 9.0, no launch took more than is counted here.
    """
    if INTERPRETED:
        return tuning
    return fit_shared_memory(tuning, row_bytes, key_bytes, devices.shared_memory(device), fewest_stages, spare)


@cache
def fit_shared_memory(
    tuning: LaunchConfig, row_bytes: int, key_bytes: int, room: int, fewest_stages: int = 1, spare: int = 0
) -> LaunchConfig:
    """Shrink a launch to `room` bytes, as `fit` does."""
    asked = tuning

    def is_too_large(tuning: LaunchConfig) -> bool:
        in_flight = (tuning.num_stages - spare) * tuning.block_n * key_bytes
        return tuning.block_m * row_bytes + in_flight + SCRATCH_BYTES > room

    while is_too_large(tuning) and tuning.num_stages > fewest_stages:
        tuning = tuning._replace(num_stages=tuning.num_stages - 1)
    while is_too_large(tuning) and tuning.block_n > 16:
        tuning = tuning._replace(block_n=tuning.block_n // 2)
    while is_too_large(tuning) and tuning.block_m > 16:
        tuning = tuning._replace(block_m=tuning.block_m // 2)
    if tuning.block_m < asked.block_m:  # half of the rows may leave room for more stages
        more = (tuning._replace(num_stages=n) for n in range(asked.num_stages, tuning.num_stages, -1))
        tuning = next((larger for larger in more if not is_too_large(larger)), tuning)
    return tuning


def step_for(block_n: int, row_bytes: int) -> int:
    """Return the keys of a step that has as many bytes as `block_n` keys of 256 bytes."""
    return max(16, min(128, block_n * 256 // row_bytes))


def keeps_values_twice(device: torch.device) -> bool:
    """Return whether products of 64 rows and more store values that are keys a second time, as tcgen05 reads them."""
    return (10, 0) <= devices.capability(device) < (12, 0)


def pad(size: int) -> int:
    """Return the next power of two; Triton's own function is slow outside a kernel."""
    return 1 << (size - 1).bit_length()


def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    row_bytes: int,
    shared: bool = False,
    fewest_rows: int = 16,
    per_byte: int = 1,
    in_four_bits: bool = False,
) -> LaunchConfig:
    """Choose the launch config from sizes that the host knows.

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
    tiles, num_sms = count_tiles(batch, query.shape[0], group, block_m), sms_of(query.device)
    is_quantized = key.dtype != query.dtype or value.dtype != query.dtype
    if shared and not is_quantized and tiles * max(1, visible // FEWEST_LATENTS) < num_sms:
        block_m = 16  # tiles of 64 would leave SMs idle, however short the splits
        tiles = count_tiles(batch, query.shape[0], group, block_m)
    tune_tiles = _tune_latents if shared else _tune
    if block_m <= 16 and is_quantized and query.dtype != torch.float32:  # steps of as many bytes, quantized or not
        row_bytes = max(bytes_of_a_row(key), bytes_of_a_row(value))
    tuning = tune_tiles(block_m, row_bytes, tiles * num_kv_heads, visible, num_sms, is_quantized, in_four_bits)
    if shared and are_pairs(value):
        tuning = tuning._replace(block_n=2 * tuning.block_n)  # steps of as many bytes
    if by_fma:
        tuning = _without_tensor_cores(tuning) if block_m > 16 else tuning._replace(registers=None)
    num_seqs = batch.num_seqs
    even = batch.num_keys is not None and EVEN * batch.num_keys >= visible * num_seqs  # about equally many keys each
    if num_seqs == 1 or rows > block_m or even:  # there is nothing to balance
        return tuning
    room = MOST_PART_BYTES // (4 * query.shape[0] * query.shape[1] * size_of(value, per_byte))
    return tuning._replace(most_splits=max(tuning.splits, min(room, -(-visible // MOST_KEYS))))


def _without_tensor_cores(tuning: LaunchConfig) -> LaunchConfig:
    """Give each thread a quarter of the elements: without tensor cores, operands take registers, too.

    In float32, 64 rows of 64 elements by steps of 64 keys spill 10 KB and take the compiler four times as long.
    """
    return tuning._replace(block_n=max(16, tuning.block_n // 2), num_warps=8)


@cache
def _tune(
    block_m: int,
    row_bytes: int,
    programs: int,
    visible: int,
    num_sms: int,
    is_quantized: bool = False,
    in_four_bits: bool = False,
) -> LaunchConfig:
    """Choose the number of splits that keeps all SMs busy to the end, and the launch config for it.

    As long as all programs run at once, the time is that of the SM with the most keys to read; about 100 KB in flight
    per SM keep the memory busy. With more programs than fit, the loss is small. One sequence of 131072 keys takes 127
    us in 33 splits, two programs each, and 132 us in 66; of 8-bit values, 70 us in 49 and 76 us in 66 (5e34b75,
    2026-11-22). In four bits a program of one warp waits for no other: 58 us in 66 splits, and 60 us by two warps; 8 of
    8192 keys take 34 and 37 us, 64 of them 180 both (c07fa68, 2026-11-28). Two programs of it per SM are never enough,
    however long: 64 decodes of two KV heads per program take two splits each (docs/results/tried).

    Source: measured on an NVIDIA H200 with bfloat16 and head size 128; wider rows get shorter steps.
    """
    few_rows = block_m <= 16
    by_a_warp = in_four_bits and block_m == 8
    at_once = 4 if few_rows else 128 // block_m  # programs that an SM holds
    if is_quantized and block_m == 8 and not by_a_warp:
        at_once = 3

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_sms)
        if on_one > at_once:
            return 1.05 * programs / num_sms
        is_long = (
            not by_a_warp and on_one == 2 and visible * row_bytes >= splits * LONG_RUN
        )  # with fewer parts to merge
        return on_one / splits * (1.0 if not few_rows or on_one == at_once or is_long else TOO_FEW[on_one])

    splits = min(range(1, max(1, visible // FEWEST_KEYS) + 1), key=time)
    if by_a_warp:
        return LaunchConfig(block_m, step_for(16, row_bytes), 1, 3, splits, splits, registers=WARP_REGISTERS)
    on_one = -(-programs * splits // num_sms)
    block_n = step_for(64, row_bytes)
    if few_rows and on_one > 3:
        return LaunchConfig(block_m, block_n, 2, 2, splits, splits)
    return LaunchConfig(block_m, block_n, 8 if block_m == 128 else 4, 2 if at_once == 3 else 3, splits, splits)


@cache
def _tune_latents(
    block_m: int,
    row_bytes: int,
    programs: int,
    visible: int,
    num_sms: int,
    is_quantized: bool = False,
    in_four_bits: bool = False,
) -> LaunchConfig:
    """Choose the number of splits over latents, and the launch config for it.

    An SM holds two programs of 16 rows, or one of 64. One of 16 with longer steps is as good, if nearly all SMs have
    one: 64 sequences of 8192 keys take 144 us in two splits each, and 148 us in four (5e34b75, 2026-11-22). Where a
    sequence has one split, such a program has eight warps: 128 sequences of 2048 keys take 80 us so, and 87 us by four;
    in two splits 64 of 8192 take 154 us by eight, and 147 us by four (e70cef1, 2026-11-29). One query of 128 heads that
    sees 2048 keys takes 18 us in tiles of 16 rows and 16 splits, and in tiles of 64 23 us in 32 splits, 33 us in 8.

    Source: measured on an NVIDIA H200 with bfloat16, latents of 512 elements and rotary keys of 64. With 64 rows the
    compiler (Triton 3.6) makes both halves of a program compute the same scores, as it places the warps of a product
    along its rows if the result goes into another product.
    """
    tuning, at_once = (LATENT_16, 2) if block_m == 16 else (LATENT_64, 1)
    splits = min(num_sms // programs, visible // FEWEST_LATENTS)
    if block_m == 16 and not is_quantized and programs * splits >= MOSTLY * num_sms:
        num_warps = 8 if splits == 1 else tuning.num_warps
        return tuning._replace(block_n=64, num_warps=num_warps, splits=splits, most_splits=splits)

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_sms)
        if on_one > at_once:
            return 1.05 * programs / num_sms
        return on_one / splits * (1.0 if on_one == at_once else 1.2)

    splits = min(range(1, max(1, visible // FEWEST_LATENTS) + 1), key=time)
    return tuning._replace(splits=splits, most_splits=splits)


def share_sm(tuning: LaunchConfig, is_quantized: bool = False) -> LaunchConfig:
    """Limit a launch so that launches of other levels fit beside it on an SM: one multiplies while the other loads.

    A quantized level keeps all its splits: 64 decodes after a prefix of 8192 keys in fp8, with 256 of their own, take
    46 us so, 50 us with 7 of 8 splits, and 57 us in tiles of 64 rows (d99386b, 2026-11-24).

    Source: measured on an NVIDIA H200; with all registers or all SMs taken, one level waits for the other. 8 warps with
    168 registers per thread leave 4 warps 176; the compiler takes fewer by itself (tests/kernels/test_compile.py).
    """
    if tuning.run:
        return tuning  # the keys of a split must not depend on other levels either
    if tuning.block_m <= 16:
        return tuning._replace(num_warps=4, num_stages=2)
    registers = 168 if tuning.num_warps == 8 else None
    if is_quantized and tuning.block_m == 128:
        return tuning._replace(registers=registers)
    splits = max(1, tuning.splits * 7 // 8)
    return tuning._replace(splits=splits, most_splits=max(splits, tuning.most_splits * 7 // 8), registers=registers)


def _most_visible_keys(plan: Plan, options: AttentionOptions) -> int:
    """Bound the keys that the queries of one sequence see together; with positions of their own they may see all."""
    batch, (left, right) = plan.batch, plan.window
    visible = batch.max_seq_len
    if not uses_positions(plan, options) and left >= 0 and right >= 0:
        visible = min(visible, left + batch.max_query_len + right)
    return visible


def are_pairs(value: Tensor) -> bool:
    """Return whether values are pairs of quantized values."""
    return value.dtype == torch.uint16


def size_of(value: Tensor, per_byte: int = 1) -> int:
    """Return the elements of a value; `per_byte` of them in each byte, where a pool is of bytes or pairs of these."""
    size = value.shape[-1]
    return 2 * per_byte * size if are_pairs(value) else per_byte * size


def bytes_of_a_program(query: Tensor, key: Tensor, value: Tensor, shared: bool, per_byte: int = 1) -> tuple[int, int]:
    """Return the bytes of a row of a tile, the longer of query and value, and of a key of a step with its value."""
    head_size, value_head_size = query.shape[2], size_of(value, per_byte)
    if shared:
        elements = pad(head_size - value_head_size) + pad(value_head_size)
        row_bytes = elements * query.element_size()  # also those of a key, unless it is dequantized in registers
        key_bytes = elements * key.element_size() if are_pairs(value) else row_bytes
        return row_bytes, key_bytes
    row_bytes = max(pad(head_size), pad(value_head_size)) * query.element_size()
    if key.dtype != query.dtype:  # quantized values, and dequantized ones
        return row_bytes, 2 * row_bytes + bytes_of_a_row(key) + bytes_of_a_row(value)
    return row_bytes, 2 * row_bytes


def spare_stages(query: Tensor, shared: bool, quantization: Quantization, block_m: int) -> int:
    """Return how many pipeline stages take no shared memory; -1 if one takes it twice."""
    if not shared or quantization.kind or query.itemsize != 2:
        return 0
    if block_m == 16:
        return 1
    return -int(not INTERPRETED and keeps_values_twice(query.device))


def bytes_of_a_row(x: Tensor) -> int:
    """Return the bytes that a tile has for a key or a value."""
    return pad(x.shape[-1]) * x.element_size()


def is_wide(block_size: int, *token_strides: int) -> bool:
    """Return whether tokens of a block may be so far apart that 32 bits don't hold the distance."""
    return any(block_size * abs(stride) >= 2**31 for stride in token_strides)
