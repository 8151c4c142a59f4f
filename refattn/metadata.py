"""From requests to a `Batch`: the position and the slot of each new token, and the batch of the next step.

request   tokens so far   new now   blocks          query rows   positions   slots (blocks of 4)
a         3               2         9, 2            0 1          3 4         39 8
b         6               1         4, 7            2            6           30
padding                                             3            0           -1
"""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

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

    Args:
        batch: the lengths.
        num_tokens: query rows, `t`, the padding rows included.

    Returns:
        `seq_len - query_len + i` for query `i` of a sequence (negative where there are more queries than keys).

    Raises:
        ValueError: if `num_tokens` is negative, or (on a CPU) less than the query rows of the batch.
    """
    check_num_tokens(num_tokens, batch)
    result = torch.zeros(num_tokens, dtype=torch.int64, device=batch.device)
    for (q0, q1), seq_len in zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True):
        for row in range(q0, q1):
            result[row] = seq_len - q1 + row
    return result


def slot_mapping(batch: Batch, num_tokens: int, *, block_size: int, window: int | None = None) -> Int64[Tensor, "t"]:
    """Return the slot of each new token; -1 for padding rows and negative positions.

    A batch with no block table, or one without columns, has no cache yet, as in the profiling run that measures how
    much memory is left for it: all slots are -1.

    Args:
        batch: the lengths and the block table.
        num_tokens: query rows, `t`, the padding rows included.
        block_size: tokens in a block, `p`.
        window: write only the last `window` tokens of each sequence, as no later query sees earlier ones. For a prefill
            that attends to its new tokens as rows (`varlen`), followed by decodes with a window.

    Returns:
        `block * p + row` for each token.

    Raises:
        ValueError: if `num_tokens` is negative, or (on a CPU) if the table has too few columns for the lengths or no
            block for a token to be written, or the batch has more than `num_tokens` query rows.
    """
    check_num_tokens(num_tokens, batch)
    check_sizes(block_size=block_size)
    if window is not None:
        check_sizes(window=window)
    result = torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)
    if batch.block_table is None or batch.block_table.shape[1] == 0:
        return result
    block_table = check_block_table(batch, block_size=block_size)
    ends = batch.seq_lens.long()
    begins = ends - batch.query_lens if window is None else torch.maximum(ends - batch.query_lens, ends - window)
    check_written_blocks(block_table, begins, ends, block_size=block_size)
    place = positions(batch, num_tokens)
    for (q0, q1), blocks in zip(batch.query_rows(), block_table, strict=True):
        for row in range(q0, q1):
            if place[row] >= 0 and (window is None or place[row] >= place[q1 - 1] + 1 - window):
                block = blocks[place[row] // block_size].long()  # a slot may exceed int32
                result[row] = block * block_size + place[row] % block_size
    return result


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

    `seq_lens`, `slots` and the model inputs, if given, are overwritten in place, so that a captured CUDA graph reads
    the new values. A padding sequence (no new tokens) is not changed.

    Args:
        batch: the batch of the previous step; its block table already has blocks for the new tokens.
        slots: the slots of the previous step, overwritten.
        block_size: tokens in a block, `p`.
        sampled_ids: the token sampled for each sequence; sequences then have one new token per step.
        input_ids: the inputs of the previous step, overwritten by the sampled tokens; padding rows are kept.
        input_positions: the positions of the previous step, overwritten; 0 for padding rows.

    Returns:
        A batch with the same tensors and `max_seq_len` raised by `max_query_len`, up to the capacity of the block
        table.

    Raises:
        ValueError: if the slots are not int64 `[t]` on the device of the batch; if tokens were sampled and a sequence
            has several new ones; on a CPU also if there are fewer rows than query rows, or a sequence outgrows the
            block table. Nothing is changed then.

    Source: vLLM's multi-step decoding.
    """
    block_table = check_advance(batch, slots, block_size=block_size)
    check_next_inputs(batch, slots, sampled_ids, input_ids, input_positions)
    batch.seq_lens.add_(batch.query_lens)
    capacity = min(block_table.shape[1] * block_size, LARGEST_INT32)
    longer = dataclasses.replace(batch, max_seq_len=min(batch.max_seq_len + batch.max_query_len, capacity))
    slots.copy_(slot_mapping(longer, slots.shape[0], block_size=block_size))
    if input_positions is not None:
        input_positions.copy_(positions(longer, input_positions.shape[0]))
    if input_ids is not None and sampled_ids is not None:
        for (q0, q1), token in zip(batch.query_rows(), sampled_ids, strict=True):
            input_ids[q0:q1] = token
    return longer


def split_encoder(batch: Batch, encoder_lens: Sequence[int], *, block_size: int) -> tuple[Batch, Batch]:
    """Split sequences that begin with encoder tokens into the batches of cross attention and self-attention.

        row of request a    e e e e e e e e | d d d d d      8 tokens of the encoder, 5 of the decoder, blocks of 4
        block table         7       2         9       1      cross attention: 7 2, self-attention: 9 1

    Args:
        batch: encoder and decoder tokens in one row of the block table, the encoder's first, in whole blocks;
            `seq_lens` counts both.
        encoder_lens: encoder tokens of each request.
        block_size: tokens in a block, `p`.

    Returns:
        The batch of cross attention, to be planned with `causal=False`, and that of the decoder's self-attention.

    Raises:
        ValueError: if there is not one length per sequence, if one is not a multiple of the block size, or (on a CPU)
            exceeds its sequence.

    Source: the rows of SGLang's `req_to_token`, encoder tokens first.
    """
    block_table = check_encoder(batch, encoder_lens, block_size=block_size)
    cut = [length // block_size for length in encoder_lens]  # in blocks
    columns = block_table.shape[1] - min(cut, default=0)
    own_blocks = torch.full((batch.num_seqs, columns), -1, dtype=torch.int32, device=batch.device)
    for i, blocks in enumerate(block_table):
        own_blocks[i, : len(blocks) - cut[i]] = blocks[cut[i] :]
    lens = torch.tensor(encoder_lens, dtype=torch.int32, device=batch.device)
    longest, num_encoder = max(encoder_lens, default=0), sum(encoder_lens)
    cross = dataclasses.replace(batch, seq_lens=lens, max_seq_len=longest, num_keys=num_encoder)
    return cross, dataclasses.replace(
        batch,
        seq_lens=batch.seq_lens - lens,
        block_table=own_blocks,
        max_seq_len=batch.max_seq_len - min(encoder_lens, default=0),
        num_keys=None if batch.num_keys is None else max(0, batch.num_keys - num_encoder),
    )


def turn_prefills_into_decodes(batch: Batch) -> Batch:
    """Return the batch with only the last new token of each sequence: after a step with prefills, all of them decode.

    A sequence without new tokens stays so. `advance` continues from there with the sampled tokens.

    Args:
        batch: the batch of a step with prefills.

    Returns:
        A batch that shares `seq_lens` and the block table.

    Raises:
        ValueError: if `batch` is not a `Batch`; on a CPU also if its lengths are not valid.

    Source: multi-step scheduling of vLLM V0 with chunked prefills.
    """
    check_lengths(batch)
    query_lens = [min(query_len, 1) for query_len in batch.query_lens.tolist()]
    cu_seqlens_q = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=batch.device)
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
    """Return the block table of requests from a table of token slots, for any block size.

    Args:
        token_slots: the slot of each token of every request of a server, int32 or int64; entries past a request's last
            token may hold anything.
        requests: the rows of `token_slots` that are in the batch.
        seq_lens: tokens of each of these requests.
        block_size: tokens in a block, `p`; with 1 a block is a slot.
        columns: columns of the table, `m`.

    Returns:
        `slot // p` of the first token of each block; 0 past a request's last block.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if the tokens of a block are not consecutive
            slots from its first row on.

    Source: SGLang's `req_to_token`, every `p`-th column.
    """
    check_slot_table(token_slots, requests, seq_lens, block_size=block_size, columns=columns)
    table = torch.zeros(len(requests), columns, dtype=torch.int32, device=requests.device)
    for i, (request, seq_len) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        for column in range(-(-seq_len // block_size)):
            table[i, column] = token_slots[request, column * block_size] // block_size
    return table
