"""Checks of the host's input for a step: requests, prefixes, intervals, buffers, in-place updates.

They read lengths and tables on a CPU only, once per step: reading a device would synchronize. The checks of every batch
are in `refattn.batch`.
"""

from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.batch import (
    Batch,
    Prefix,
    _table_of,
    check_batch,
    check_block_table,
    check_contents,
    check_lengths,
    check_written_blocks,
)
from refattn.checks import LARGEST_INT32, check, check_int, check_list, check_sizes, describe, is_int
from refattn.overlap import check_apart
from refattn.ranks import Shard, check_is_shard


def check_num_tokens(num_tokens: int, batch: Batch) -> None:
    """Check `num_tokens`, the rows of a table: at least the query rows of the batch, the rest is padding.

    Raises:
        ValueError: if it is not an int of at least 0; on a CPU also if it is too small, or the lengths are not valid.
    """
    check_lengths(batch)
    check_int("num_tokens", num_tokens)
    if batch.seq_lens.is_cpu and num_tokens < int(batch.cu_seqlens_q[-1]):
        raise ValueError(
            f"num_tokens: expected at least {int(batch.cu_seqlens_q[-1])}, the query rows of the batch, "
            f"got {num_tokens}"
        )


def check_advance(batch: Batch, slots: Tensor, *, block_size: int) -> Int32[Tensor, "b m"]:
    """Check an in-place update: the slots, and that the block table has room for the next tokens.

    Returns:
        The block table.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    check_lengths(batch)
    check(seq_lens=(batch.seq_lens, "int32 b"), slots=(slots, "int64 t"))
    if batch.seq_lens.is_cpu and slots.shape[0] < int(batch.cu_seqlens_q[-1]):
        raise ValueError(
            f"slots: expected int64 [t], at least {int(batch.cu_seqlens_q[-1])} query rows, got {describe(slots)}"
        )
    block_table = check_block_table(batch, block_size=block_size, new_lens=batch.query_lens)
    if batch.seq_lens.is_cpu:
        ends = batch.seq_lens.long() + batch.query_lens
        if ends.numel() and int(ends.max()) > LARGEST_INT32:
            raise ValueError(f"seq_lens: expected at most {LARGEST_INT32} after the step, got {ends.tolist()}")
        check_written_blocks(block_table, batch.seq_lens.long(), ends, block_size=block_size)
    return block_table


def check_local_lens(lens: Tensor, shard: Shard) -> None:
    """Check the arguments of `context_parallel.local_lens`: lengths `[b]` and a shard.

    Raises:
        ValueError: naming what does not fit; on a CPU also if a length is negative.
    """
    check_is_shard(shard)
    check(lens=(lens, "int32 b"))
    if lens.is_cpu and (lens < 0).any():
        raise ValueError(f"lens: expected lengths of at least 0, got {lens.tolist()}")


def check_next_inputs(
    batch: Batch,
    slots: Tensor,
    sampled_ids: Tensor | None,
    input_ids: Tensor | None,
    input_positions: Tensor | None,
) -> None:
    """Check what an in-place update writes besides slots: inputs `[t]` from sampled tokens `[b]`, positions `[t]`.

    Raises:
        ValueError: if there are inputs without samples or samples without inputs, if they do not fit or share memory,
            or if a sampled sequence has more than one new token.
    """
    written = dict(seq_lens=batch.seq_lens, slots=slots)
    check(seq_lens=(batch.seq_lens, "int32 b"), sampled_ids=(sampled_ids, "int64 b or None"))
    for name, tensor in (("input_ids", input_ids), ("input_positions", input_positions)):
        if tensor is not None:
            written[name] = tensor
            rows = check(seq_lens=(batch.seq_lens, "int32 b"), **{name: (tensor, "int64 t")})["t"]
            if batch.seq_lens.is_cpu and rows < int(batch.cu_seqlens_q[-1]):
                raise ValueError(
                    f"{name}: expected int64 [t], at least {int(batch.cu_seqlens_q[-1])} query rows, "
                    f"got {describe(tensor)}"
                )
    if (sampled_ids is None) != (input_ids is None):
        raise ValueError("sampled_ids: expected with input_ids, which they are written to, got one without the other")
    if sampled_ids is not None and batch.max_query_len > 1:
        raise ValueError(
            f"sampled_ids: expected sequences with one new token, from turn_prefills_into_decodes, got up to "
            f"{batch.max_query_len}"
        )
    check_apart(written, dict(cu_seqlens_q=batch.cu_seqlens_q))


def check_slot_table(token_slots: Tensor, requests: Tensor, seq_lens: Tensor, *, block_size: int, columns: int) -> None:
    """Check the arguments of `metadata.block_table_from_slots`: slots `[r, s]`, requests `[b]`, lengths `[b]`.

    Raises:
        ValueError: naming what does not fit; on a CPU also if a block's tokens are not consecutive slots.
    """
    check_sizes(block_size=block_size)
    check_int("columns", columns)
    if not isinstance(token_slots, Tensor) or token_slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_slots: expected int32 or int64 [r, s], got {describe(token_slots)}")
    tables = dict(token_slots=(token_slots, "r s"), requests=(requests, "int64 b"), seq_lens=(seq_lens, "int32 b"))
    b = check(**tables)["b"]
    if columns * block_size > token_slots.shape[1] + block_size - 1:
        raise ValueError(
            f"columns: expected at most {-(-token_slots.shape[1] // block_size)}, for {token_slots.shape[1]} tokens in "
            f"blocks of {block_size}, got {columns}"
        )
    if not token_slots.is_cpu or not b:
        return
    if int(requests.min()) < 0 or int(requests.max()) >= len(token_slots):
        raise ValueError(f"requests: expected rows in 0..{len(token_slots) - 1}, got {requests.tolist()}")
    if int(seq_lens.min()) < 0 or int(seq_lens.max()) > columns * block_size:
        raise ValueError(f"seq_lens: expected 0..{columns * block_size} tokens, got {seq_lens.tolist()}")
    place = torch.arange(token_slots.shape[1], device=token_slots.device)
    slots = token_slots[requests].long()
    wrong = (place < seq_lens[:, None]) & (slots != slots[:, place // block_size * block_size] + place % block_size)
    wrong |= (place < seq_lens[:, None]) & (place % block_size == 0) & (slots % block_size != 0)
    if wrong.any():
        i, j = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"token_slots: expected blocks of {block_size} slots one after the other, got slot {int(slots[i, j])} for "
            f"token {j} of request {int(requests[i])}"
        )


def check_refill(buffers: Batch, batch: Batch) -> None:
    """Check that a batch fits into the buffers of a captured graph.

    Raises:
        ValueError: if it has more sequences or columns or larger maxima, or only one of them has a block table.
    """
    check_batch(buffers, name="buffers")
    check_lengths(batch)
    has_table = batch.block_table is not None
    if has_table != (buffers.block_table is not None):
        raise ValueError(f"batch: expected {'no ' if has_table else 'a '}block table, as in the buffers, got another")
    columns, room_for = (0 if x.block_table is None else x.block_table.shape[1] for x in (batch, buffers))
    sizes = [
        ("num_seqs", batch.num_seqs, buffers.num_seqs),
        ("max_query_len", batch.max_query_len, buffers.max_query_len),
        ("max_seq_len", batch.max_seq_len, buffers.max_seq_len),
        ("number of columns", columns, room_for),
    ]
    for name, asked, room in sizes:
        if asked > room:
            raise ValueError(f"batch: expected a {name} of at most {room}, what the buffers have room for, got {asked}")


def check_split(
    batch: Batch, query_lens: Sequence[int], decode_len: int, seq_lens: Sequence[int] | None = None
) -> None:
    """Check host-side query lengths, and sequence lengths if given, against a batch.

    Raises:
        ValueError: if there is not one per sequence; on a CPU also if they differ from the batch.
    """
    check_lengths(batch)
    check_requests(query_lens, query_lens, None, num_seqs=batch.num_seqs)
    check_int("decode_len", decode_len)
    if seq_lens is not None:
        check_list("seq_lens", seq_lens, "lengths")
        if len(seq_lens) != batch.num_seqs:
            raise ValueError(f"seq_lens: expected {batch.num_seqs} lengths, one per sequence, got {len(seq_lens)}")
        check_requests(query_lens, seq_lens, None)
        if batch.seq_lens.is_cpu and batch.seq_lens.tolist() != list(seq_lens):
            raise ValueError(f"seq_lens: expected {batch.seq_lens.tolist()}, as in the batch, got {list(seq_lens)}")
    if batch.seq_lens.is_cpu and batch.query_lens.tolist() != list(query_lens):
        raise ValueError(f"query_lens: expected {batch.query_lens.tolist()}, as in the batch, got {list(query_lens)}")


def check_encoder_lens(batch: Batch, encoder_lens: Sequence[int]) -> None:
    """Check the encoder lengths of the sequences of a decoder's batch.

    Raises:
        ValueError: naming what is not a length, or if there is not one per sequence.
    """
    check_batch(batch)
    check_list("encoder_lens", encoder_lens, "lengths")
    if len(encoder_lens) != batch.num_seqs:
        raise ValueError(f"encoder_lens: expected {batch.num_seqs}, one per sequence, got {len(encoder_lens)}")
    for length in encoder_lens:
        check_int("encoder_lens", length)


def check_encoder(batch: Batch, encoder_lens: Sequence[int], *, block_size: int) -> Int32[Tensor, "b m"]:
    """Check sequences that begin with encoder tokens, in whole blocks.

    Returns:
        The block table.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    block_table = check_block_table(batch, block_size=block_size)
    check_encoder_lens(batch, encoder_lens)
    for length in encoder_lens:
        if length % block_size:
            raise ValueError(f"encoder_lens: expected multiples of the block size {block_size}, got {length}")
    if batch.seq_lens.is_cpu:
        for i, (length, seq_len) in enumerate(zip(encoder_lens, batch.seq_lens.tolist(), strict=True)):
            if length > seq_len:
                raise ValueError(f"encoder_lens: expected at most the {seq_len} tokens of sequence {i}, got {length}")
    return block_table


def check_requests(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]] | None,
    *,
    num_seqs: int | None = None,
    block_size: int | None = None,
) -> None:
    """Check the lengths and blocks of requests.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request.
        block_tables: blocks of each request; None only without a block size.
        num_seqs: number of requests; that of `seq_lens` if None.
        block_size: tokens in a block, if each request needs blocks for all its tokens.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        check_list(name, lengths, "lengths")
    expected = len(seq_lens) if num_seqs is None else num_seqs
    if len(query_lens) != expected:
        raise ValueError(f"query_lens: expected {expected} lengths, one per sequence, got {len(query_lens)}")
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if not {*map(type, lengths)} <= {int}:
            wrong = next(length for length in lengths if type(length) is not int)
            raise ValueError(f"{name}: expected Python ints, got {describe(wrong)}")
        if lengths and min(lengths) < 0:
            raise ValueError(f"{name}: expected lengths of at least 0, got {list(lengths)}")
        if lengths and max(lengths) > LARGEST_INT32:
            raise ValueError(f"{name}: expected lengths of at most {LARGEST_INT32}, got {max(lengths)}")
    if sum(query_lens) > LARGEST_INT32:
        raise ValueError(f"query_lens: expected at most {LARGEST_INT32} tokens together, got {sum(query_lens)}")
    if block_tables is None:
        if block_size is None:
            return
        raise ValueError("block_tables: expected a list of lists of blocks, got None")
    check_list("block_tables", block_tables, "lists of blocks")
    if len(block_tables) != expected:
        raise ValueError(f"block_tables: expected {expected} rows, one per sequence, got {len(block_tables)}")
    for i, blocks in enumerate(block_tables):
        check_list(f"block_tables[{i}]", blocks, "blocks")
        try:
            array("i", blocks)  # the fastest way to check all of them
        except (TypeError, OverflowError):
            fits = range(-LARGEST_INT32 - 1, LARGEST_INT32 + 1)
            bad: object = next((block for block in blocks if not isinstance(block, int) or block not in fits), blocks)
            raise ValueError(f"block_tables[{i}]: expected int32 blocks, got {describe(bad)}") from None
        if block_size is not None and len(blocks) * block_size < seq_lens[i]:
            needed = -(-seq_lens[i] // block_size)
            raise ValueError(f"block_tables[{i}]: expected {needed} blocks for {seq_lens[i]} tokens, got {len(blocks)}")


def check_prefixes(prefixes: Sequence[Prefix], batch: Batch, *, block_size: int) -> Int32[Tensor, "b m"]:
    """Check prefixes: whole blocks, disjoint or nested; on a CPU also that blocks are equal and before the queries.

    Returns:
        The block table.

    Raises:
        ValueError: naming the prefix, what was expected and what was given.
    """
    check_contents(batch, block_size)
    check_prefix_types(prefixes)
    block_table = check_block_table(batch, block_size=block_size)
    is_read = batch.seq_lens.is_cpu
    tables: list[list[int]] = block_table.tolist() if is_read else []
    context_lens: list[int] = batch.context_lens.tolist() if is_read else []
    room = min(block_table.shape[1] * block_size, LARGEST_INT32)
    for i, prefix in enumerate(prefixes):
        first, last, end = prefix
        if not 0 <= first < last <= batch.num_seqs:
            raise ValueError(f"prefixes[{i}]: expected sequences in 0..{batch.num_seqs}, got {first}..{last}")
        if end < 1 or end % block_size:
            raise ValueError(f"prefixes[{i}]: expected a multiple of the block size {block_size}, got {end} keys")
        for member in range(first, last) if is_read else ():
            if end > context_lens[member]:
                raise ValueError(
                    f"prefixes[{i}]: expected to end before the first query of each sequence, "
                    f"at {context_lens[member]} of sequence {member}, got {end} keys"
                )
            if tables[member][: end // block_size] != tables[first][: end // block_size]:
                raise ValueError(f"prefixes[{i}]: expected sequences {first} and {member} to share {end} keys by block")
        if end > room:
            raise ValueError(f"prefixes[{i}]: expected at most {room} keys, as the block table holds, got {end}")
        for other in prefixes[:i]:
            apart = last <= other.first or other.last <= first
            if not apart and not other.encloses(prefix) and not prefix.encloses(other):
                raise ValueError(f"prefixes[{i}]: expected to be apart from {other} or nested with it, got {prefix}")
    return block_table


def check_workspace(batch: Batch, workspace: int, max_context_len: int | None) -> int:
    """Check the workspace of an MLA prefill: at least one token per sequence.

    Returns:
        An upper bound on the contexts: `max_context_len` if given.

    Raises:
        ValueError: naming the argument that does not fit; the lengths are read on a CPU only.
    """
    check_lengths(batch)
    check_sizes(workspace=workspace)
    if workspace < batch.num_seqs:
        raise ValueError(f"workspace: expected a token for each of {batch.num_seqs} sequences, got {workspace}")
    if max_context_len is not None:
        check_int("max_context_len", max_context_len)
    if not batch.seq_lens.is_cpu:
        return max(0, batch.max_seq_len - 1) if max_context_len is None else max_context_len
    check_contexts(batch)
    longest = max(batch.context_lens.tolist(), default=0)
    if max_context_len is not None and max_context_len < longest:
        raise ValueError(f"max_context_len: expected at least {longest}, the longest context, got {max_context_len}")
    return longest if max_context_len is None else max_context_len


def check_contexts(batch: Batch) -> None:
    """Check on a CPU that the lengths of all sequences include their new tokens.

    Raises:
        ValueError: if a sequence has more queries than keys.
    """
    if batch.seq_lens.is_cpu and (batch.context_lens < 0).any():
        raise ValueError(
            f"seq_lens: expected the new tokens in them, {batch.query_lens.tolist()}, got {batch.seq_lens.tolist()}"
        )


def check_shard(batch: Batch, shard: Shard, *, block_size: int) -> Int32[Tensor, "b m"]:
    """Check a shard and a batch with the rank's own block table; the plan checks its columns.

    Returns:
        The block table.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    check_is_shard(shard)
    check_lengths(batch)
    check_sizes(block_size=block_size)
    if shard.interleave > block_size:
        raise ValueError(
            f"shard: expected runs of at most block_size={block_size} tokens, got interleave={shard.interleave}"
        )
    return _table_of(batch)


def check_prefix_types(prefixes: Sequence[Prefix]) -> None:
    """Check the types of prefixes.

    Raises:
        ValueError: naming what is not a list, or not a `Prefix` of Python ints.
    """
    check_list("prefixes", prefixes, "prefixes")
    for i, prefix in enumerate(prefixes):
        if not isinstance(prefix, Prefix) or not all(map(is_int, prefix)):
            came = repr(prefix) if isinstance(prefix, Prefix) else describe(prefix)
            raise ValueError(f"prefixes[{i}]: expected a Prefix of Python ints, got {came}")


def check_intervals(batch: Batch, first_visible: Tensor | None, last_visible: Tensor) -> None:
    """Check the intervals of the query rows of a batch; on a CPU, also that none ends after its sequence.

    Without `first_visible`, intervals begin at 0.

    Raises:
        ValueError: if they are not int32 of one length on the device of the batch; on a CPU also if an interval ends
            after its sequence.
    """
    check_lengths(batch)
    if first_visible is None:
        check(last_visible=(last_visible, "int32 t"))
        first_visible = torch.zeros_like(last_visible)
    ends_of_rows = dict(first_visible=(first_visible, "int32 t"), last_visible=(last_visible, "int32 t"))
    rows = check(seq_lens=(batch.seq_lens, "int32 b"), **ends_of_rows)["t"]
    if not batch.seq_lens.is_cpu:
        return
    used = int(batch.cu_seqlens_q[-1])
    if rows < used:
        raise ValueError(f"first_visible: expected at least {used}, one for each query row of the batch, got {rows}")
    ends = batch.seq_lens.repeat_interleave(batch.query_lens)
    last = last_visible[:used]
    wrong = (first_visible[:used] <= last) & (last >= ends)
    if wrong.any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"last_visible: expected to end before key {int(ends[row])}, where the sequence of query row {row} ends, "
            f"got {int(last[row])}: a prompt is not cut inside a span, whose later keys are not there yet"
        )


def check_spans(batch: Batch, spans: Tensor) -> None:
    """Check spans of sequences; on a CPU, also that each has both ends, and that they are in order and disjoint.

    Raises:
        ValueError: if they are not int32 `[b, n, 2]` on the device of the batch; on a CPU also if a span ends before it
            begins, or overlaps the one before it.
    """
    check_lengths(batch)
    check(seq_lens=(batch.seq_lens, "int32 b"), spans=(spans, "int32 b n 2"))
    if not spans.is_cpu:
        return
    for i, pairs in enumerate(spans.tolist()):
        before = -1
        for first, last in (pair for pair in pairs if pair[0] >= 0):
            if not before < first <= last:
                raise ValueError(f"spans: expected first and last tokens, rising, of sequence {i}, got {pairs}")
            before = last


def check_prefix_lens(batch: Batch, prefix_lens: Tensor) -> None:
    """Check the prefix lengths of a prefix-LM mask.

    Raises:
        ValueError: if they are not int32 `[b]` on the device of the batch, or (on a CPU) negative.
    """
    check_lengths(batch)
    check(seq_lens=(batch.seq_lens, "int32 b"), prefix_lens=(prefix_lens, "int32 b"))
    if prefix_lens.is_cpu and (prefix_lens < 0).any():
        raise ValueError(f"prefix_lens: expected lengths of at least 0, got {prefix_lens.tolist()}")
