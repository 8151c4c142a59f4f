"""Lists of slots for kernels that do not check them: entries past the last slot or outside of the pool become -1.

A block table may hold anything past a sequence's end. FlashMLA loads the row of a slot before it compares the slot's
place with the length, so that NaN there spoils an output; and it reads slots outside of the pool.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor

from refattn.batch import Batch

BLOCK = 2048  # slots of a program


def slots_in_pool(batch: Batch, num_slots: int, *, step: int) -> Int32[Tensor, "b k"]:
    """Return the slots of each sequence, in one launch; the columns are a multiple of `step`.

    Args:
        batch: sequences whose blocks are single tokens.
        num_slots: slots of the pool.
        step: the number of columns is padded to a multiple of it.
    """
    table = batch.block_table
    assert table is not None  # the path has checked it
    columns = -(-table.shape[1] // step) * step
    slots = torch.empty(len(table), columns, dtype=torch.int32, device=table.device)
    if slots.numel():
        _slots_kernel[len(table), -(-columns // BLOCK)](
            table,
            batch.seq_lens,
            slots,
            table.stride(0),
            table.stride(1),
            table.shape[1],
            columns,
            num_slots,
            BLOCK=BLOCK,
        )
    return slots


@triton.jit(do_not_specialize=["block_table", "seq_lens", "row_stride", "num_slots"])
@no_type_check
def _slots_kernel(
    block_table, seq_lens, slots, row_stride, column_stride, table_columns, columns, num_slots, BLOCK: tl.constexpr
):
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_slot = (at < tl.load(seq_lens + sequence)) & (at < table_columns)
    slot = tl.load(block_table + sequence * row_stride + at.to(tl.int64) * column_stride, is_slot, -1)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, -1)
    tl.store(slots + sequence * columns + at, slot, at < columns)
