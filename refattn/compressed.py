"""Compressed keys beside a window: a query sees its last tokens, and of all earlier ones an entry for each few.

Four tokens, or 128, become one entry, which all later queries see in their place. Tokens inside the window are also
seen as they are, so that nothing is lost before its entry is complete. With a ratio of 4 and a window of 3, a query at
position 10 has two entries, and one from the next token on:

    tokens    0  1  2  3  4  5  6  7  8  9 10 11
    window    .  .  .  .  .  .  .  .  1  1  1            (2, 0)
    entries   0           1           .                  entry 2, of tokens 8 to 11, is complete at position 11

Query `t` sees entry `e` if `e < (t + 1) // ratio`: if all tokens of the entry are at `t` or before it. **One softmax**
is over both sets of keys and the sink. It is computed as two that are merged by their log-sum-exps, with the sink in
one of them.

The three questions. Where are the keys? In two pools: a block table of tokens, and one of entries. Who may see whom? A
window in one, an interval from entry 0, or selected entries, in the other. How do partial outputs combine? They merge.
So attention is what the other paths compute, and only the entries are new:

    entry w    = sum_j softmax_j(gate_j + bias_j) * value_j        over its tokens j, each channel by itself
    overlap                                                       the same over its tokens and as many before them

Values and gates are projections of each token. With `overlap` both have two halves: entry `w` is made of the first
halves of the tokens of entry `w - 1`, and the second halves of its own; entry 0 has its own alone.

    value and gate of a token      a b                 a first half, a second half
    entry 1                        a b  a b  a b  a b | a b  a b  a b  a b
                                   ^    ^    ^    ^       ^    ^    ^    ^

**The state of a compressor is pages.** An entry needs the rows (value and gate) of its tokens, which come in several
steps. So rows are written to a pool by slots, like keys, and read when the last token of an entry is there. How many
entries there are, and which rows are open, follows from the length alone. So a sequence that is cropped, resumed,
copied or found by its prefix goes on from the same bits, as long as the blocks of its last `ratio` tokens (`2 * ratio`
with overlap) are there. Earlier rows are never read again.

    mla.write             the row of each new token, into its pool: the value as a latent, the gate as its rotary key
    plan                  once per step: the new entries and their slots, who sees which keys
    compress              the new entries, from the rows
    (norm, rotation)      by the layer; `plan.positions` has the position of each new entry
    mla.write             them, by `plan.slots`
    sparse.scores, select, and `select_entries` here       which entries each query sees, if not all
    attention             over the window and the entries

**Layers share entries** in DeepSeek-V4.1: a layer without a compressor attends to the entries of an earlier one, under
its plan, and one without an indexer to the entries that an earlier one has selected. So both are calls of `attention`
with tensors of another layer. `candidates` is how later indexers select inside what an earlier one has found.

Source: DeepSeek-AI 2026, "DeepSeek-V4": heavily compressed attention (a ratio of 128, all entries), and compressed
sparse attention (a ratio of 4, with overlap, selected entries).
"""

from dataclasses import replace
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Float32, Int32, Shaped
from torch import Tensor

from refattn import sliding_window, sparse
from refattn.attention import attend_plan, finish
from refattn.batch import Batch
from refattn.entries import (
    CompressedPlan,
    check_candidates,
    check_compress,
    check_compressed,
    check_compressed_plan,
    check_entries,
    check_is_compressed,
    most_entries,
)
from refattn.keys import Latents
from refattn.merge import merge
from refattn.metadata import positions, slot_mapping
from refattn.modes import compute_dtype, without_autocast
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(
    batch: Batch,
    *,
    ratio: int,
    overlap: bool = False,
    window_size: tuple[int, int],
    entry_table: Int32[Tensor, "b m"],
    block_size: int,
    entry_block_size: int,
) -> CompressedPlan:
    """Plan a step of all layers with entries of one ratio.

    Args:
        batch: the lengths, and the block table of tokens: keys of the window, and rows. Blocks before the window, and
            before the rows of the last entry, may be gone.
        ratio: tokens of an entry.
        overlap: whether an entry is also computed from the `ratio` tokens before its own.
        window_size: `(left, 0)`: the tokens that a query sees as they are; a window of W tokens is `(W - 1, 0)`.
        entry_table: the blocks of the entries of each sequence, in the pool of entries. If a block of tokens has a
            block of their entries of the same number, this is the block table of the tokens, with blocks of
            `block_size // ratio` entries.
        block_size: tokens in a block.
        entry_block_size: entries in a block.

    Returns:
        A plan for every layer of this step; `CompressedPlan` documents it.

    Raises:
        ValueError: naming the argument that does not fit; the contents are checked on a CPU.
    """
    check_compressed_plan(
        batch,
        ratio=ratio,
        overlap=overlap,
        window_size=window_size,
        entry_table=entry_table,
        block_size=block_size,
        entry_block_size=entry_block_size,
    )
    query_lens, seq_lens = batch.query_lens.tolist(), batch.seq_lens.tolist()
    after = [seq_len // ratio for seq_len in seq_lens]
    before = [max(seq_len - query_len, 0) // ratio for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
    completed = [0, *accumulate(now - earlier for now, earlier in zip(after, before, strict=True))]
    cu_entries, entry_lens = (torch.tensor(x, dtype=torch.int32, device=batch.device) for x in (completed, after))
    longest = batch.max_seq_len // ratio
    entries = replace(batch, seq_lens=entry_lens, block_table=entry_table, max_seq_len=longest, num_keys=None)
    most = -(-batch.max_query_len // ratio)
    new = replace(entries, cu_seqlens_q=cu_entries, max_query_len=most, num_tokens=completed[-1])

    where = positions(batch, sum(query_lens)).int()
    last_visible = (where + 1) // ratio - 1
    num_rows = most_entries(sum(query_lens), batch.num_seqs, ratio)
    return CompressedPlan(
        batch,
        block_size,
        ratio,
        overlap,
        sliding_window.plan(batch, window_size=window_size, block_size=block_size),
        Plan(
            entries,
            entry_block_size,
            causal=False,
            first_visible=torch.zeros_like(last_visible),
            last_visible=last_visible,
        ),
        new,
        entry_block_size,
        slot_mapping(new, num_rows, block_size=entry_block_size),
        positions(new, num_rows) * ratio,
    )


@without_autocast
def compress(
    row_cache: Float[Tensor, "n p c"], plan: CompressedPlan, *, bias: Float[Tensor, "ratio w"] | None = None
) -> Float[Tensor, "e d"]:
    """Compute the entries that the new tokens complete, from the rows of their tokens.

        entry[i] = sum_j softmax_j(gate[j, i] + bias[j, i]) * value[j, i]        over the tokens j of the entry

    Write the rows of the new tokens first, with `mla.write(value, gate, row_cache, slots)`.

    Args:
        row_cache: the pool of rows: a value and its gate, `c = 2 * w`. An entry has `d = w` elements, with overlap
            `d = w / 2`. Only the rows of new entries are read.
        plan: from `plan`, once per step.
        bias: added to the gate of each token of an entry, in order; with overlap the first half of its columns for the
            tokens before. None adds nothing.

    Returns:
        The new entries, before their norm and rotation, in the type of the pool and the order of `plan.slots`; 0 for
        padding rows, whose slot is -1.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    width, size = check_compress(row_cache, plan, bias)
    compute, ratio = compute_dtype(row_cache.dtype), plan.ratio
    table = plan.batch.block_table
    assert table is not None  # checked
    added = row_cache.new_zeros(ratio, width, dtype=compute) if bias is None else bias.to(compute)
    result = row_cache.new_zeros(len(plan.slots), size)

    def rows(blocks: Int32[Tensor, "m"], entry: int) -> tuple[Float[Tensor, "ratio w"], Float[Tensor, "ratio w"]]:
        """Return the values and the gates of the tokens of an entry."""
        tokens = torch.arange(entry * ratio, (entry + 1) * ratio, device=row_cache.device)
        read = row_cache[blocks[tokens // plan.block_size].long(), tokens % plan.block_size].to(compute)
        return read[:, :width], read[:, width:] + added

    for (e0, e1), end, blocks in zip(plan.new.query_rows(), plan.new.seq_lens.tolist(), table, strict=True):
        for row, entry in zip(range(e0, e1), range(end - (e1 - e0), end), strict=True):
            value, gate = rows(blocks, entry)
            if plan.overlap:
                value, gate = value[:, size:], gate[:, size:]
            if plan.overlap and entry > 0:
                earlier = rows(blocks, entry - 1)
                value, gate = (torch.cat([a[:, :size], b]) for a, b in zip(earlier, (value, gate), strict=True))
            result[row] = (gate.softmax(0) * value).sum(0)
    return result


def select_entries(plan: CompressedPlan, positions: Int32[Tensor, "t k"]) -> CompressedPlan:
    """Return the plan with the selected entries of each query in place of all.

    Args:
        plan: from `plan`. Scores of its entries are `sparse.scores(query, weights, index_cache, plan.entries)`, with an
            index key per entry, from a compressor of its own.
        positions: the entries that each query row sees, from `sparse.select`; -1 is none.

    Returns:
        A plan of this layer for `attention`.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if an entry is not one of its sequence.
    """
    check_is_compressed(plan, selected=False)
    selected = sparse.plan(plan.entries.batch, positions=positions, block_size=plan.entry_block_size)
    return replace(plan, entries=selected, selected=True)


def candidates(scores: Float32[Tensor, "t s"], *, size: int, topk: int) -> Bool[Tensor, "t s"]:
    """Return the entries among which the indexers of later layers select: the blocks with the highest scores.

    The score of a block of `size` entries is the highest of its entries. The block of the newest entry that a query
    sees has a score of infinity.

        scores, size 2      3 0 | 1 2 | 9 4 | 0 0 | 1 -       of one query; - is -inf: not complete
        blocks              3     2     9     0     inf
        topk 3              1 1 | 0 0 | 1 1 | 0 0 | 1 1

    A later layer hides all others from its own scores, and selects:

        positions = sparse.select(scores.masked_fill(~candidates, -torch.inf), topk)

    Args:
        scores: of entries, from `sparse.scores`.
        size: entries in a block.
        topk: the maximum number of blocks. Ties go to lower blocks, and NaN ranks first, as in `sparse.select`.

    Returns:
        True for the entries of selected blocks. A block without an entry that the query sees is never selected.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: DeepSeek-AI 2026, DeepSeek-V4.1; github.com/sgl-project/sglang/pull/39648.
    """
    check_candidates(scores, size=size, topk=topk)
    found = torch.zeros_like(scores, dtype=torch.bool)
    for row, numbers in enumerate(scores):
        seen = (numbers != -torch.inf).nonzero()[:, 0]
        if len(seen):
            blocks = torch.stack([block.amax() for block in numbers.split(size)])
            blocks[seen[-1] // size] = torch.inf
            for block in sparse.select(blocks[None], topk)[0].tolist():
                found[row, block * size : (block + 1) * size] |= block >= 0  # -1 is none
    return found


def attention(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "n p d"],
    entry_cache: Shaped[Tensor, "m p2 d"],
    plan: CompressedPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    cache_scale: float = 1.0,
    entry_scale: float = 1.0,
    return_lse: bool = False,
    out: Float[Tensor, "t h d"] | None = None,
) -> Float[Tensor, "t h d"] | tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend from each query to its window and to its entries, with one softmax over both.

        scores = [softmax_scale * query . key of the window | softmax_scale * query . entry | sink]
        out    = sum over the window and the entries of softmax(scores) times the key or the entry

    Keys are also the values, and there is one KV head. Write new keys and entries first, with `mla.write`. Each pool
    may be fp8, `x = scale * quantized`, with a scale of its own; rows of values and gates are not quantized.

    Args:
        query: the new tokens, rotated.
        cache: the pool of keys by token, rotated; in the type of the query, or in fp8 (`torch.float8_e4m3fn` or
            `torch.float8_e5m2`).
        entry_cache: the pool of entries, rotated; in the type of the query, or in fp8.
        plan: from `plan`, or from `select_entries`.
        options: the layer's options, without ALiBi. The sink counts once.
        cache_scale: the scale of quantized keys, above 0; 1 for an unquantized pool.
        entry_scale: the scale of quantized entries, above 0; 1 for an unquantized pool.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs, in the type of `query`; with `return_lse` also the log-sum-exps over both sets of keys.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.
    """
    check_entries(entry_cache, plan)
    entries = sparse.by_token("entry_cache", entry_cache) if plan.selected else entry_cache
    scales = dict(cache_scale=cache_scale, entry_scale=entry_scale)
    check_compressed(query, cache, entries, plan, options, out, return_lse, **scales)
    size = query.shape[2]
    parts = [
        attend_plan(query, Latents(entries, size, entry_scale), plan.entries, options.without_sinks()),
        attend_plan(query, Latents(cache, size, cache_scale), plan.window, options),
    ]
    result, lse = merge(*zip(*parts, strict=True))
    return finish(result, lse, query.dtype, return_lse=return_lse, out=out)
