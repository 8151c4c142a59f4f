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
    """Build the batch of some requests from what a scheduler knows of them.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: pool blocks of each request, in order; None where there is no cache.
        device: device of the tensors of the batch.

    Returns:
        The batch; shorter rows of the block table are filled up with -1.

    Raises:
        ValueError: if the arguments differ in length, a length is negative, or a length or a block is not an int32.
    """
    check_requests(query_lens, seq_lens, block_tables)
    check_device(device)
    table = None
    if block_tables is not None:
        columns = max((len(blocks) for blocks in block_tables), default=0)
        table = torch.full((len(seq_lens), columns), -1, dtype=torch.int32, device="cpu")
        for i, blocks in enumerate(block_tables):
            table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device="cpu")
        table = table.to(device)
    return Batch(
        cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        num_keys=sum(seq_lens),
        num_tokens=sum(query_lens),
    )


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
            prefill that attends to its new tokens where they are (`dense`), before decodes under a window.

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


def order_decodes_first(query_lens: Sequence[int], *, decode_len: int = 1) -> list[int]:
    """Return the order of a step's requests with its decodes first, as `split_decodes_and_prefills` takes them.

        new tokens    9 1 3 1        decode_len 1    1 3 0 2        with up to 2 drafts, decode_len 3    1 2 3 0

    Args:
        query_lens: the new tokens of each request.
        decode_len: a request with at most this many new tokens is a decode: with speculative decoding one more than
            there may be drafts, as a decode brings its drafts along.

    Returns:
        The requests by their places in `query_lens`; decodes stay in their order, and so do prefills.

    Raises:
        ValueError: if a length is none, or `decode_len` is negative.

    Source: vLLM's `reorder_batch_to_split_decodes_and_prefills`, with the threshold of each backend.
    """
    check_requests(query_lens, query_lens, None)
    check_int("decode_len", decode_len)
    return sorted(range(len(query_lens)), key=lambda request: query_lens[request] > decode_len)


def split_decodes_and_prefills(
    batch: Batch, query_lens: Sequence[int], *, decode_len: int = 1, seq_lens: Sequence[int] | None = None
) -> tuple[Part, Part]:
    """Split a batch into its decodes and its prefills, which use different kernels.

    Args:
        batch: a batch with all its decodes before all its prefills (`order_decodes_first`), or after them.
        query_lens: the new tokens of each sequence, known on the host, so that nothing synchronizes.
        decode_len: a sequence with at most this many new tokens is a decode (above 1 with speculative decoding).
        seq_lens: tokens of each sequence, where they are known, too: each part then says how long its own longest
            sequence is, and how many keys it has. Without them, as in a batch that grows, the maximum of the whole.

    Returns:
        The decodes and the prefills, each a `Part(batch, tokens)`; `tokens` is its slice of the query rows.

    Raises:
        ValueError: if decodes and prefills are mixed, or `query_lens` or `seq_lens` has another length than the batch,
            or (on a CPU) other lengths.

    Source: the reordered batches of vLLM (decodes first since V1, prefills first in V0).
    """
    check_split(batch, query_lens, decode_len, seq_lens)
    is_decode = [length <= decode_len for length in query_lens]
    decodes = sum(is_decode)
    if is_decode == sorted(is_decode, reverse=True):
        return _part(batch, query_lens, seq_lens, 0, decodes), _part(
            batch, query_lens, seq_lens, decodes, batch.num_seqs
        )
    if is_decode == sorted(is_decode):
        prefills = batch.num_seqs - decodes
        return _part(batch, query_lens, seq_lens, prefills, batch.num_seqs), _part(
            batch, query_lens, seq_lens, 0, prefills
        )
    raise ValueError(
        f"query_lens: expected all decodes (at most {decode_len} tokens) before or after all prefills, "
        f"got {list(query_lens)}"
    )


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


def update_block_table(batch: Batch, block_table: Int32[Tensor, "b m"]) -> Batch:
    """Return the same batch with the block table of another cache group (layers with a pool of their own).

    Args:
        batch: the batch of one group.
        block_table: the blocks that the same sequences have in the other group's pool.

    Returns:
        A batch that shares the other tensors; take the slots of its group from it with `slot_mapping`.

    Raises:
        ValueError: if the table has another type, device or number of rows.
    """
    check_batch(batch)
    check(dict(b=batch.num_seqs), block_table=(block_table, "int32 b m"))
    return dataclasses.replace(batch, block_table=block_table)


def make_cross_batch(
    batch: Batch, encoder_lens: Sequence[int], block_tables: Sequence[Sequence[int]] | None = None
) -> Batch:
    """Return the batch of cross attention: the query rows of a decoder's batch, and the keys of its encoder.

    Plan it without a causal mask: `chunked_prefill.plan(cross, block_size=p, causal=False)`, or `dense.plan` over rows.
    The encoder's keys are in pages of their own, and are written once, when its tokens are there: their slots are
    those of `make_batch(encoder_lens, encoder_lens, block_tables)`.

    Args:
        batch: of the decoder in this step.
        encoder_lens: tokens that the encoder has of each request; 0 where there is none.
        block_tables: the blocks of each request's encoder tokens; None where there is no cache.

    Returns:
        A batch with as many sequences, whose keys are the encoder's.

    Raises:
        ValueError: if the arguments differ in length, a length is negative, or a length or a block is not an int32.
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


def make_buffers(
    num_seqs: int, *, columns: int | None, max_query_len: int, max_seq_len: int, device: torch.device | str = "cpu"
) -> Batch:
    """Make a batch of padding with fixed tensors, which `refill` fills with one step after the other.

    A plan made from it on a device is computed again whenever a captured graph is replayed; how the work is divided
    follows from the maxima, and so is the same for every step.

    Args:
        num_seqs: sequences that it has room for, `b`.
        columns: of the block table, `m`; None for a batch without a cache.
        max_query_len: most new tokens of a sequence, in any step.
        max_seq_len: most keys of a sequence, in any step.
        device: device of the tensors.

    Returns:
        A batch of sequences without queries and without keys.

    Raises:
        ValueError: if a size is negative.
    """
    for name, size in (("num_seqs", num_seqs), ("columns", 0 if columns is None else columns)):
        check_int(name, size)
    check_device(device)
    zeros = torch.zeros(2 * num_seqs + 1, dtype=torch.int32, device=device)
    table = None
    if columns is not None:
        table = torch.zeros(num_seqs, columns, dtype=torch.int32, device=device)
    return Batch(zeros[: num_seqs + 1], zeros[num_seqs + 1 :], table, max_query_len, max_seq_len)


def refill(buffers: Batch, batch: Batch) -> None:
    """Write a step into the buffers of a captured graph, in place; sequences past its last have no query and no key.

    Args:
        buffers: from `make_buffers`.
        batch: the step: any number of sequences up to that of the buffers, of any lengths up to their maxima.

    Raises:
        ValueError: if the step does not fit: more sequences or columns than the buffers have, or larger maxima. Nothing
            is written then.

    Source: the metadata of captured decodes in vLLM and SGLang.
    """
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
    rows = [0, *accumulate(query_lens)]
    part = Batch(
        cu_seqlens_q=batch.cu_seqlens_q[first : last + 1] - rows[first],
        seq_lens=batch.seq_lens[first:last],
        block_table=None if batch.block_table is None else batch.block_table[first:last],
        max_query_len=max(query_lens[first:last], default=0),
        max_seq_len=batch.max_seq_len if seq_lens is None else max(seq_lens[first:last], default=0),
        num_keys=None if seq_lens is None else sum(seq_lens[first:last]),
        num_tokens=sum(query_lens[first:last]),
    )
    return Part(part, slice(rows[first], rows[last]))
