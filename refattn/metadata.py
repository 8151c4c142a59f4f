"""From requests to a `Batch`: the position of each token, the slot it is written to, and the batch of the next step.

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
    """Return the slot that each new token is written to; -1 for padding rows and for positions below 0.

    A batch without a block table, or with one without a column, has no cache yet, as in the run that finds out how much
    memory is left for it: all slots are -1, and nothing is written.

    Args:
        batch: the lengths and the block table.
        num_tokens: query rows, `t`, the padding rows included.
        block_size: tokens in a block, `p`.
        window: write the last so many tokens of each sequence only, as no later query sees those before them. For a
            prefill that attends to its new tokens where they are (`varlen`), before decodes under a window.

    Returns:
        `block * p + row` for the token's place in the pool.

    Raises:
        ValueError: if `num_tokens` is negative, or (on a CPU) the table has too few columns for the lengths, or no
            block for a token that is to be written, or the batch has more than `num_tokens` query rows.
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
                block = blocks[place[row] // block_size].long()  # a slot may be more than an int32 counts
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
    """Update a batch in place for the next step: each sequence keeps its number of new tokens and grows by as many.

    `seq_lens` and `slots` are overwritten where they are, so that a captured CUDA graph sees the new values, and so are
    the inputs of the model, if they are given. A padding sequence (no new tokens) is not changed.

    Args:
        batch: the batch of the step before, whose block table has blocks for the new tokens already.
        slots: the slots of the step before, overwritten.
        block_size: tokens in a block, `p`.
        sampled_ids: the token that was sampled for each sequence, which has one new token per step.
        input_ids: the inputs of the step before, overwritten by the sampled tokens; padding rows stay.
        input_positions: the positions of the step before, overwritten; 0 for padding rows.

    Returns:
        A batch of the same tensors, with `max_seq_len` raised as far as the block table allows.

    Raises:
        ValueError: if the slots are no int64 `[t]` where the batch is; if a sequence has several new tokens and one was
            sampled; on a CPU also if there are fewer rows than query rows, or a sequence outgrows the block table.
            Nothing is changed then.

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
    """Split sequences that begin with their encoder's tokens into what cross attention and self-attention read.

        row of request a    e e e e e e e e | d d d d d      8 tokens of the encoder, 5 of the decoder, blocks of 4
        block table         7       2         9       1      cross attention: 7 2, self-attention: 9 1

    Args:
        batch: both kinds of tokens in one row of the block table, the encoder's first, in whole blocks; `seq_lens`
            counts both.
        encoder_lens: tokens of each request's encoder.
        block_size: tokens in a block, `p`.

    Returns:
        The batch of cross attention, to be planned without a causal mask, and that of the decoder's self-attention.

    Raises:
        ValueError: if there are more or fewer lengths than sequences, if one ends inside of a block, or (on a CPU) past
            its sequence.

    Source: SGLang's rows of `req_to_token`, whose encoder tokens come first.
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
    """Return the batch with one new token per sequence, the last: after a step with prefills, each of them decodes.

    A sequence with no new token keeps none. `advance` continues from there, with the token sampled for each.

    Args:
        batch: the batch of a step, prefills among its sequences.

    Returns:
        A batch that shares `seq_lens` and the block table.

    Raises:
        ValueError: if that is no batch; on a CPU also if its lengths are none.

    Source: the first of several steps without the scheduler in vLLM V0, with chunked prefills in it.
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
    """Return the block table of some requests from a map of each token to its slot, for any block size.

    Args:
        token_slots: the slot of each token of every request that a server knows, int32 or int64; anything past a
            request's last token.
        requests: the rows of it that are in the batch.
        seq_lens: tokens of each of those.
        block_size: tokens in a block, `p`; with 1 a block is a slot.
        columns: of the table, `m`.

    Returns:
        `slot // p` of the first token of each block; 0 past a request's last block.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if the tokens of a block do not lie one after
            the other, from its first row on.

    Source: SGLang's `req_to_token`, of which it takes every `p`-th column.
    """
    check_slot_table(token_slots, requests, seq_lens, block_size=block_size, columns=columns)
    table = torch.zeros(len(requests), columns, dtype=torch.int32, device=requests.device)
    for i, (request, seq_len) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        for column in range(-(-seq_len // block_size)):
            table[i, column] = token_slots[request, column * block_size] // block_size
    return table
