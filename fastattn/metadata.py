"""From requests to a `Batch`, vectorized and without synchronizing; the twin of `refattn.metadata`."""

import dataclasses
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from fastattn.kernels.problem import places
from refattn import steps
from refattn.batch import Batch, check_block_table, check_lengths, check_written_blocks
from refattn.checks import LARGEST_INT32, check_sizes
from refattn.checks_of_steps import (
    check_advance,
    check_encoder,
    check_next_inputs,
    check_num_tokens,
    check_slot_table,
)

make_batch = steps.make_batch
order_decodes_first = steps.order_decodes_first
split_decodes_and_prefills = steps.split_decodes_and_prefills
update_block_table = steps.update_block_table
make_cross_batch = steps.make_cross_batch
make_buffers = steps.make_buffers
refill = steps.refill


def positions(batch: Batch, num_tokens: int) -> Int64[Tensor, "t"]:
    """Return the position of each query row in its sequence, in tokens; 0 for padding rows.

    Arguments, results and errors are those of `refattn.metadata.positions`.
    """
    check_num_tokens(num_tokens, batch)
    _, place, padding = places(batch, num_tokens)
    return place.masked_fill(padding, 0)


def slot_mapping(batch: Batch, num_tokens: int, *, block_size: int, window: int | None = None) -> Int64[Tensor, "t"]:
    """Return the slot of each new token; -1 for padding rows and negative positions.

    Arguments, results and errors are those of `refattn.metadata.slot_mapping`.
    """
    check_num_tokens(num_tokens, batch)
    check_sizes(block_size=block_size)
    if window is not None:
        check_sizes(window=window)
    if batch.block_table is None or batch.block_table.numel() == 0:
        return torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)
    block_table = check_block_table(batch, block_size=block_size)
    if block_table.is_cpu:
        lens = batch.query_lens if window is None else batch.query_lens.clamp(max=window)
        check_written_blocks(block_table, batch.seq_lens - lens, batch.seq_lens, block_size=block_size)
    slots = dispatch.run("slot_mapping", batch=batch, num_tokens=num_tokens, block_size=block_size)
    if window is None:
        return slots
    sequence, place, _ = places(batch, num_tokens)
    return slots.masked_fill(place < (batch.seq_lens - window)[sequence], -1)


def advance(
    batch: Batch,
    slots: Int64[Tensor, "t"],
    *,
    block_size: int,
    sampled_ids: Int64[Tensor, "b"] | None = None,
    input_ids: Int64[Tensor, "t"] | None = None,
    input_positions: Int64[Tensor, "t"] | None = None,
) -> Batch:
    """Update a batch in place for the next step: each sequence gets as many new tokens again.

    Arguments, results and errors are those of `refattn.metadata.advance`.
    """
    block_table = check_advance(batch, slots, block_size=block_size)
    check_next_inputs(batch, slots, sampled_ids, input_ids, input_positions)
    batch.seq_lens.add_(batch.query_lens)
    capacity = min(block_table.shape[1] * block_size, LARGEST_INT32)
    longer = dataclasses.replace(batch, max_seq_len=min(batch.max_seq_len + batch.max_query_len, capacity))
    slots.copy_(slot_mapping(longer, slots.shape[0], block_size=block_size))
    if input_positions is not None:
        input_positions.copy_(positions(longer, input_positions.shape[0]))
    if input_ids is not None and sampled_ids is not None and batch.num_seqs:
        sequence, _, padding = places(longer, input_ids.shape[0])
        input_ids.copy_(torch.where(padding, input_ids, sampled_ids[sequence]))
    return longer


def split_encoder(batch: Batch, encoder_lens: Sequence[int], *, block_size: int) -> tuple[Batch, Batch]:
    """Split sequences that begin with encoder tokens into the batches of cross attention and self-attention.

    Arguments, results and errors are those of `refattn.metadata.split_encoder`.
    """
    block_table = check_encoder(batch, encoder_lens, block_size=block_size)
    lens = torch.frombuffer(array("i", encoder_lens or [0]), dtype=torch.int32)[: batch.num_seqs].to(batch.device)
    shortest, num_encoder = min(encoder_lens, default=0), sum(encoder_lens)
    m = block_table.shape[1]
    column = torch.arange(m - shortest // block_size, device=batch.device) + lens[:, None] // block_size
    own_blocks = block_table.gather(1, column.clamp(max=max(m - 1, 0)))  # clamped columns are past a row's last block
    cross = dataclasses.replace(batch, seq_lens=lens, max_seq_len=max(encoder_lens, default=0), num_keys=num_encoder)
    return cross, dataclasses.replace(
        batch,
        seq_lens=batch.seq_lens - lens,
        block_table=own_blocks,
        max_seq_len=batch.max_seq_len - shortest,
        num_keys=None if batch.num_keys is None else max(0, batch.num_keys - num_encoder),
    )


def turn_prefills_into_decodes(batch: Batch) -> Batch:
    """Return the batch with the last new tokens only; the twin of `refattn.metadata.turn_prefills_into_decodes`."""
    check_lengths(batch)
    has_query = batch.query_lens.clamp(max=1).cumsum(0, dtype=torch.int32)
    cu_seqlens_q = torch.nn.functional.pad(has_query, (1, 0))
    return dataclasses.replace(
        batch, cu_seqlens_q=cu_seqlens_q, max_query_len=min(1, batch.max_query_len), num_tokens=None
    )


def block_table_from_slots(
    token_slots: Shaped[Tensor, "r s"],
    requests: Int64[Tensor, "b"],
    seq_lens: Int32[Tensor, "b"],
    *,
    block_size: int,
    columns: int,
) -> Int32[Tensor, "b {columns}"]:
    """Return a block table from token slots; the twin of `refattn.metadata.block_table_from_slots`."""
    check_slot_table(token_slots, requests, seq_lens, block_size=block_size, columns=columns)
    first = torch.arange(0, columns * block_size, block_size, device=requests.device)
    table = (token_slots[requests[:, None], first] // block_size).int()
    return table.masked_fill(first >= seq_lens[:, None], 0)
