"""From requests to a `Batch`, for all tokens at once and without synchronizing; the twin of `refattn.metadata`."""

import dataclasses
from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from fastattn.kernels.device import to_device
from fastattn.kernels.problem import places
from refattn.batch import Batch, Part, check_batch, check_block_table, check_lengths, check_written_blocks
from refattn.checks import LARGEST_INT32, check, check_device, check_int, check_sizes
from refattn.checks_of_steps import (
    check_advance,
    check_encoder,
    check_encoder_lens,
    check_next_inputs,
    check_num_tokens,
    check_refill,
    check_requests,
    check_slot_table,
    check_split,
)


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Batch:
    """Build the batch of some requests, by one copy to the device; the twin of `refattn.metadata.make_batch`."""
    check_requests(query_lens, seq_lens, block_tables)
    check_device(device)
    b, columns = len(seq_lens), max(map(len, block_tables or ()), default=0)
    numbers = array("i", [0, *accumulate(query_lens), *seq_lens])
    for blocks in block_tables or ():
        numbers += array("i", blocks) + array("i", [-1]) * (columns - len(blocks))
    # One copy to the device instead of three.
    packed = to_device(torch.frombuffer(numbers, dtype=torch.int32), device)
    return Batch(
        cu_seqlens_q=packed[: b + 1],
        seq_lens=packed[b + 1 : 2 * b + 1],
        block_table=None if block_tables is None else packed[2 * b + 1 :].view(b, columns),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        num_keys=sum(seq_lens),
        num_tokens=sum(query_lens),
    )


def positions(batch: Batch, num_tokens: int) -> Int64[Tensor, "t"]:
    """Return the position of each query row in its sequence, in tokens; 0 for padding rows.

    Arguments, results and errors are those of `refattn.metadata.positions`.
    """
    check_num_tokens(num_tokens, batch)
    _, place, padding = places(batch, num_tokens)
    return place.masked_fill(padding, 0)


def slot_mapping(batch: Batch, num_tokens: int, *, block_size: int, window: int | None = None) -> Int64[Tensor, "t"]:
    """Return the slot that each new token is written to; -1 for padding rows and for positions below 0.

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


def order_decodes_first(query_lens: Sequence[int], *, decode_len: int = 1) -> list[int]:
    """Return the order of a step with its decodes first; the twin of `refattn.metadata.order_decodes_first`."""
    check_requests(query_lens, query_lens, None)
    check_int("decode_len", decode_len)
    decodes = [request for request, length in enumerate(query_lens) if length <= decode_len]
    return decodes + [request for request, length in enumerate(query_lens) if length > decode_len]


def split_decodes_and_prefills(
    batch: Batch, query_lens: Sequence[int], *, decode_len: int = 1, seq_lens: Sequence[int] | None = None
) -> tuple[Part, Part]:
    """Split a batch into its decodes and its prefills, which use different kernels.

    Arguments, results and errors are those of `refattn.metadata.split_decodes_and_prefills`.
    """
    check_split(batch, query_lens, decode_len, seq_lens)
    kinds = [length <= decode_len for length in query_lens]
    changes = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
    if len(changes) > 1:
        raise ValueError(
            f"query_lens: expected all decodes (at most {decode_len} tokens) before or after all prefills, "
            f"got {list(query_lens)}"
        )
    decodes_first = kinds[:1] == [True] or not changes
    cut = sum(kinds) if decodes_first else changes[0]
    head, tail = _part(batch, query_lens, seq_lens, 0, cut), _part(batch, query_lens, seq_lens, cut, len(kinds))
    return (head, tail) if decodes_first else (tail, head)


def advance(
    batch: Batch,
    slots: Int64[Tensor, "t"],
    *,
    block_size: int,
    sampled_ids: Int64[Tensor, "b"] | None = None,
    input_ids: Int64[Tensor, "t"] | None = None,
    input_positions: Int64[Tensor, "t"] | None = None,
) -> Batch:
    """Update a batch in place for the next step: each sequence keeps its number of new tokens and grows by as many.

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


def update_block_table(batch: Batch, block_table: Int32[Tensor, "b m"]) -> Batch:
    """Return the same batch with the block table of another cache group (layers with a pool of their own).

    Arguments, results and errors are those of `refattn.metadata.update_block_table`.
    """
    check_batch(batch)
    check(dict(b=batch.num_seqs), block_table=(block_table, "int32 b m"))
    return dataclasses.replace(batch, block_table=block_table)


def make_cross_batch(
    batch: Batch, encoder_lens: Sequence[int], block_tables: Sequence[Sequence[int]] | None = None
) -> Batch:
    """Return the batch of cross attention: the query rows of a decoder's batch, and the keys of its encoder.

    Arguments, results and errors are those of `refattn.metadata.make_cross_batch`.
    """
    check_encoder_lens(batch, encoder_lens)
    keys = make_batch(encoder_lens, encoder_lens, block_tables, device=batch.device)
    return dataclasses.replace(
        batch,
        seq_lens=keys.seq_lens,
        block_table=keys.block_table,
        max_seq_len=keys.max_seq_len,
        num_keys=keys.num_keys,
    )


def split_encoder(batch: Batch, encoder_lens: Sequence[int], *, block_size: int) -> tuple[Batch, Batch]:
    """Split sequences that begin with their encoder's tokens into what cross attention and self-attention read.

    Arguments, results and errors are those of `refattn.metadata.split_encoder`.
    """
    block_table = check_encoder(batch, encoder_lens, block_size=block_size)
    lens = torch.frombuffer(array("i", encoder_lens or [0]), dtype=torch.int32)[: batch.num_seqs].to(batch.device)
    shortest, num_encoder = min(encoder_lens, default=0), sum(encoder_lens)
    m = block_table.shape[1]
    column = torch.arange(m - shortest // block_size, device=batch.device) + lens[:, None] // block_size
    own_blocks = block_table.gather(1, column.clamp(max=max(m - 1, 0)))  # past a row's last block: no key is there
    cross = dataclasses.replace(batch, seq_lens=lens, max_seq_len=max(encoder_lens, default=0), num_keys=num_encoder)
    return cross, dataclasses.replace(
        batch,
        seq_lens=batch.seq_lens - lens,
        block_table=own_blocks,
        max_seq_len=batch.max_seq_len - shortest,
        num_keys=None if batch.num_keys is None else max(0, batch.num_keys - num_encoder),
    )


def turn_prefills_into_decodes(batch: Batch) -> Batch:
    """Return the batch with one new token per sequence; the twin of `refattn.metadata.turn_prefills_into_decodes`."""
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
    """Return a block table from slots of tokens; the twin of `refattn.metadata.block_table_from_slots`."""
    check_slot_table(token_slots, requests, seq_lens, block_size=block_size, columns=columns)
    first = torch.arange(0, columns * block_size, block_size, device=requests.device)
    table = (token_slots[requests[:, None], first] // block_size).int()
    return table.masked_fill(first >= seq_lens[:, None], 0)


def make_buffers(
    num_seqs: int, *, columns: int | None, max_query_len: int, max_seq_len: int, device: torch.device | str = "cpu"
) -> Batch:
    """Make a batch of padding, which `refill` fills; the twin of `refattn.metadata.make_buffers`."""
    for name, size in (("num_seqs", num_seqs), ("columns", 0 if columns is None else columns)):
        check_int(name, size)
    check_device(device)
    zeros = torch.zeros(2 * num_seqs + 1, dtype=torch.int32, device=device)
    table = None
    if columns is not None:
        table = torch.zeros(num_seqs, columns, dtype=torch.int32, device=device)
    return Batch(zeros[: num_seqs + 1], zeros[num_seqs + 1 :], table, max_query_len, max_seq_len)


def refill(buffers: Batch, batch: Batch) -> None:
    """Write a step into the buffers of a captured graph, in place; the twin of `refattn.metadata.refill`."""
    check_refill(buffers, batch)
    b = batch.num_seqs
    if batch.block_table is not None and buffers.block_table is not None:
        columns = batch.block_table.shape[1]
        buffers.block_table[:b, :columns].copy_(batch.block_table[:, :columns])
    buffers.cu_seqlens_q[: b + 1].copy_(batch.cu_seqlens_q)
    buffers.cu_seqlens_q[b + 1 :].copy_(batch.cu_seqlens_q[-1:].expand(buffers.num_seqs - b))
    buffers.seq_lens[:b].copy_(batch.seq_lens)
    buffers.seq_lens[b:].zero_()


def _part(batch: Batch, query_lens: Sequence[int], seq_lens: Sequence[int] | None, first: int, last: int) -> Part:
    begin, end = sum(query_lens[:first]), sum(query_lens[:last])
    part = Batch(
        cu_seqlens_q=batch.cu_seqlens_q[first : last + 1] - begin,
        seq_lens=batch.seq_lens[first:last],
        block_table=None if batch.block_table is None else batch.block_table[first:last],
        max_query_len=max(query_lens[first:last], default=0),
        max_seq_len=batch.max_seq_len if seq_lens is None else max(seq_lens[first:last], default=0),
        num_keys=None if seq_lens is None else sum(seq_lens[first:last]),
        num_tokens=sum(query_lens[first:last]),
    )
    return Part(part, slice(begin, end))
