"""Host-side work before a step: batches made from requests, their order, and shared prefixes.

Nothing here computes attention; both twins use these functions.

    make_batch                      requests as a `Batch`
    order_decodes_first             decodes before prefills, the order that `split_decodes_and_prefills` expects
    update_block_table              the same step over another pool
    make_cross_batch                the same queries over an encoder's keys
    make_buffers, refill            successive steps in the tensors of a captured graph
    find_prefixes                   keys shared by several requests, for a cascade
    make_trees, accepted_batch      draft trees, and the step over the accepted drafts
"""

import dataclasses
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.batch import Batch, Part, Prefix, check_batch
from refattn.checks import check, check_device, check_int, check_sizes
from refattn.checks_of_steps import check_encoder_lens, check_refill, check_requests, check_split
from refattn.trees import Trees, check_accepted_lens, check_parents


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Batch:
    """Build a batch from the lengths and blocks of its requests.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: pool blocks of each request, in order; None without a cache.
        device: device of the tensors of the batch.

    Returns:
        The batch; shorter rows of the block table are padded with -1.

    Raises:
        ValueError: if the arguments differ in length, a length is negative, or a length or a block is not an int32.
    """
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


def order_decodes_first(query_lens: Sequence[int], *, decode_len: int = 1) -> list[int]:
    """Return an order of a step's requests with the decodes first, as `split_decodes_and_prefills` expects.

        new tokens    9 1 3 1        decode_len 1    1 3 0 2        with up to 2 drafts, decode_len 3    1 2 3 0

    Args:
        query_lens: the new tokens of each request.
        decode_len: a request with at most this many new tokens is a decode; with speculative decoding, one more than
            the maximum number of drafts.

    Returns:
        Indices into `query_lens`; decodes keep their order, and so do prefills.

    Raises:
        ValueError: if a length is not an int of at least 0, or `decode_len` is negative.

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
        batch: a batch with all decodes before all prefills (`order_decodes_first`), or after them.
        query_lens: the new tokens of each sequence, on the host, so that nothing synchronizes.
        decode_len: a sequence with at most this many new tokens is a decode (above 1 with speculative decoding).
        seq_lens: tokens of each sequence, if known on the host: each part then has its own `max_seq_len` and
            `num_keys`. None: parts keep the batch's `max_seq_len`, as for a batch that grows.

    Returns:
        The decodes and the prefills, each a `Part(batch, tokens)`; `tokens` is its slice of the query rows.

    Raises:
        ValueError: if decodes and prefills are mixed, if `query_lens` or `seq_lens` does not have one entry per
            sequence, or (on a CPU) differs from the batch.

    Source: the reordered batches of vLLM (decodes first since V1, prefills first in V0).
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


def update_block_table(batch: Batch, block_table: Int32[Tensor, "b m"]) -> Batch:
    """Return the batch with the block table of another cache group (layers with their own pool).

    Args:
        batch: the batch of one group.
        block_table: the blocks of the same sequences in the other group's pool.

    Returns:
        A batch that shares the other tensors; use it to compute the `slot_mapping` of its group.

    Raises:
        ValueError: if the table has another type, device or number of rows.
    """
    check_batch(batch)
    check(dict(b=batch.num_seqs), block_table=(block_table, "int32 b m"))
    return dataclasses.replace(batch, block_table=block_table)


def make_cross_batch(
    batch: Batch, encoder_lens: Sequence[int], block_tables: Sequence[Sequence[int]] | None = None
) -> Batch:
    """Return the batch of cross attention: the query rows of the decoder's batch over the keys of the encoder.

    Plan it without a causal mask: `chunked_prefill.plan(cross, block_size=p, causal=False)`; without a cache,
    `varlen.plan`. The encoder's keys have their own pages and are written once, in the step that encodes them, to the
    slots of `make_batch(encoder_lens, encoder_lens, block_tables)`.

    Args:
        batch: the decoder's batch in this step.
        encoder_lens: encoder tokens of each request; 0 for a request without any.
        block_tables: the blocks of each request's encoder tokens; None without a cache.

    Returns:
        A batch with the same query rows over the encoder's keys.

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


def make_buffers(
    num_seqs: int, *, columns: int | None, max_query_len: int, max_seq_len: int, device: torch.device | str = "cpu"
) -> Batch:
    """Make a batch of padding with fixed tensors, which `refill` overwrites in each step.

    A plan made from it on a device is recomputed when a captured graph is replayed. The division of the work depends
    only on the maxima, so it is the same for every step.

    Args:
        num_seqs: capacity in sequences, `b`.
        columns: columns of the block table, `m`; None for a batch without a cache.
        max_query_len: the most new tokens of a sequence in any step.
        max_seq_len: the most keys of a sequence in any step.
        device: device of the tensors.

    Returns:
        A batch of sequences without queries or keys.

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
    """Write a step into the buffers of a captured graph, in place; unused sequences get no queries and no keys.

    Args:
        buffers: from `make_buffers`.
        batch: the step: at most as many sequences as the buffers, with lengths up to their maxima.

    Raises:
        ValueError: if the step has more sequences or columns than the buffers, or larger maxima. Nothing is written
            then.

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


def find_prefixes(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
) -> list[Prefix]:
    """Find every prefix that consecutive sequences share, as a tree: outer prefixes before those that they enclose.

    Shared means the same blocks: equal tokens in other blocks would be read again, so they do not count. Nor does a
    block with the key of a new token. For the drawing in `refattn.cascade`:

        Prefix(first=0, last=3, end=2 blocks), Prefix(first=0, last=2, end=3 blocks)

    Only neighbouring requests are compared, so sort requests by their block tables.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: pool blocks of each request, in order.
        block_size: tokens in a block, `p`.

    Returns:
        The prefixes; an empty list if no keys are shared.

    Raises:
        ValueError: if the arguments differ in length, a length is negative, or a request has too few blocks.
    """
    check_sizes(block_size=block_size)
    check_requests(query_lens, seq_lens, block_tables, block_size=block_size)
    full_blocks = [max(0, s - q) // block_size for q, s in zip(query_lens, seq_lens, strict=True)]
    found: list[Prefix] = []
    growing: list[tuple[int, int]] = []  # prefixes that the next sequence may share: (blocks, first sequence)
    for i in range(len(seq_lens)):
        count = 0
        if i + 1 < len(seq_lens):
            count = _common_length(block_tables[i], block_tables[i + 1], min(full_blocks[i], full_blocks[i + 1]))
        first = i
        while growing and growing[-1][0] > count:
            blocks, first = growing.pop()
            found.append(Prefix(first, i + 1, blocks * block_size))
        if count and (not growing or growing[-1][0] < count):
            growing.append((count, first))
    return sorted(found, key=lambda prefix: (prefix.first, -prefix.last))


def _common_length(blocks: Sequence[int], others: Sequence[int], limit: int) -> int:
    """Return how many of the first `limit` blocks are equal, by bisection: comparing slices is fastest."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def make_trees(parents: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> Trees:
    """Build draft trees from lists of parents.

    Args:
        parents: the parent of each node, per sequence; -1 for a root. A chain is `[-1, 0, 1, ..]`.
        device: device of the tensors.

    Returns:
        The trees; shorter rows are padded with -1.

    Raises:
        ValueError: if a node does not come after its parent.
    """
    check_parents(parents)
    check_device(device)
    b, w = len(parents), max(map(len, parents), default=0)
    padded = ((*nodes, *[-1] * (w - len(nodes))) for nodes in parents)
    numbers = [*map(len, parents), *chain.from_iterable(padded)]
    packed = torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device)  # one copy to the device instead of two
    return Trees(packed[b:].view(b, w), packed[:b])


def accepted_batch(batch: Batch, trees: Trees, lens: Int32[Tensor, "b"]) -> Batch:
    """Return the draft model's step over the accepted tokens, for its own cache: a causal chunk per sequence.

    Its query rows are the accepted nodes, in order. Each sequence has as many rows as accepted nodes, so `cu_seqlens_q`
    differs from that of the verification.

    Args:
        batch: the batch of the verification.
        trees: its trees.
        lens: the number of accepted nodes of each sequence, `Accepted.lens`.

    Returns:
        A batch of the same sequences, with upper bounds as its maxima.

    Raises:
        ValueError: if the trees do not fit the batch; on a CPU also if a sequence has more accepted nodes than nodes.
    """
    check_accepted_lens(batch, trees, lens)
    return dataclasses.replace(
        batch,
        cu_seqlens_q=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
        seq_lens=batch.seq_lens - trees.lens + lens,
        max_query_len=trees.max_len,
        num_keys=None,
        num_tokens=None,
    )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the device's pending work."""
    if torch.device(device).type == "cuda" and tensor.is_cpu:
        return tensor.pin_memory().to(device, non_blocking=True)  # a copy from pageable memory waits for the stream
    return tensor.to(device)
