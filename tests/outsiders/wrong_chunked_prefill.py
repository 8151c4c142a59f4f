"""Kernels over pages that are wrong."""

from math import inf

import torch
from outsider_flash import alibi, flash, in_window, merged, paged, rows, slots_of, softmax_of

from twinattn.kit import claims


def partial_tile_skipped(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softmax_scale=None):
    """The number of key tiles is rounded down once there are more than two: the last, partial one is lost."""

    def span(i, s):
        return 0, s if s < 64 else s // 32 * 32

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], softmax_scale=softmax_scale, span=span)


def cap_before_scale(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softmax_scale, softcap):
    """The softcap bounds the raw products, and the scale follows."""
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    if not softcap:
        return flash(query, pages, value_size=value_cache.shape[3], softmax_scale=scale)
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, s, read in pages:
        key, value = read(torch.arange(s))
        group = query.shape[1] // key.shape[1]
        i, j = torch.arange(s - q1 + q0, s)[:, None], torch.arange(s)[None]
        x = torch.einsum("thd,shd->hts", query[q0:q1].float(), key.float().repeat_interleave(group, 1))
        x = (softcap * torch.tanh(x / softcap) * scale).masked_fill(j > i, -inf)
        weights = x.softmax(-1).nan_to_num(0.0)
        out[q0:q1] = torch.einsum("hts,shd->thd", weights, value.float().repeat_interleave(group, 1))
    return out.to(query.dtype)


def tail_unmasked_without_causal(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, causal=True, window_size=(-1, -1)
):
    """Only the causal mask hides the slots past the end in the last page; without it they are seen."""
    p = key_cache.shape[1]

    def span(i, s):
        return 0, -(-s // p) * p

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(causal=causal, window_size=window_size, span=span, tiles=(16, p))
    return flash(query, pages, value_size=value_cache.shape[3], **options)


def lse_without_sink(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, sinks=None, return_lse=False):
    """The output counts the sink, and the log-sum-exp does not."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(sinks=sinks, return_lse=return_lse, lse_with_sinks=False)
    return flash(query, pages, value_size=value_cache.shape[3], **options)


def window_rounded_to_tile(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1)):
    """The window skips tiles, and hides nothing inside the first tile that it reaches."""
    left, p = window_size[0], key_cache.shape[1]

    def sees(i, j, s):
        begin = (i - left).clamp(min=0) // p * p if left >= 0 else torch.zeros_like(i)
        return (j <= i) & (j >= begin)

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], sees=sees)


def first_tile_of_last_row(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1)):
    """A tile of queries begins at the tile of keys that its last row needs: its first rows lose the oldest keys."""
    left, p = window_size[0], key_cache.shape[1]

    def span(i, s):
        return (0 if left < 0 else max(0, int(i[-1]) - left) // p * p), s

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(window_size=window_size, span=span, tiles=(16, p))
    return flash(query, pages, value_size=value_cache.shape[3], **options)


def alibi_from_last_key(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, alibi_slopes=None, return_lse=False
):
    """The distance is counted from the end of the sequence: the outputs are right, the log-sum-exp is shifted."""
    parts = []
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):

        def bias(slopes, i, j, s=s):
            return slopes.float()[:, None, None] * (j - s + 1)

        one = iter([(0, q1 - q0, s, read)])
        options = dict(alibi_slopes=alibi_slopes, bias=bias, return_lse=True)
        parts.append(flash(query[q0:q1], one, value_size=value_cache.shape[3], **options))
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    for (q0, q1, _), (part, part_lse) in zip(rows(query, cu_seqlens_q, seq_lens), parts, strict=True):
        out[q0:q1], lse[q0:q1] = part, part_lse
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def alibi_without_abs(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, causal=True, alibi_slopes=None
):
    """Later keys, seen without a causal mask, get a bonus in the place of a malus."""

    def bias(slopes, i, j):
        return -slopes.float()[:, None, None] * (i - j)

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(causal=causal, alibi_slopes=alibi_slopes, bias=bias)
    return flash(query, pages, value_size=value_cache.shape[3], **options)


def slot_in_int16(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Slots are kept in 16 bits: past 32767 they wrap."""
    most = key_cache.shape[0] * key_cache.shape[1]

    def slots(table, j, p):
        return slots_of(table, j, p).to(torch.int16).long() % most

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, slots)
    return flash(query, pages, value_size=value_cache.shape[3])


def equal_lengths_share_blocks(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Gathered keys are kept by length: the second sequence of a length gets those of the first."""
    kept = {}

    def sequences():
        for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
            key, value = kept.setdefault(s, read(torch.arange(s)))
            yield q0, q1, s, lambda j, key=key, value=value: (key[j], value[j])

    return flash(query, sequences(), value_size=value_cache.shape[3])


def empty_sequences_compacted(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Sequences without queries are dropped from the row offsets, and not from the lengths and the table."""
    ends = torch.unique_consecutive(cu_seqlens_q)
    count = len(ends) - 1
    pages = paged(query, key_cache, value_cache, ends, seq_lens[:count], block_table)
    return flash(query, pages, value_size=value_cache.shape[3])


def row_sum_in_bfloat16(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """The sum of the weights is kept in bfloat16: from 4096 on, 16 more weights of 1 change nothing."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    dtype = torch.float32 if query.dtype == torch.float32 else torch.bfloat16
    return flash(query, pages, value_size=value_cache.shape[3], tiles=(16, 16), sum_type=dtype)


def hidden_by_minus_ten_thousand(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softmax_scale=None
):
    """A hidden score is -10000: where all visible ones are lower, the hidden keys win."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(softmax_scale=softmax_scale, hidden=-10000.0, tiles=(16, 1 << 20))
    out = flash(query, pages, value_size=value_cache.shape[3], **options)
    for q0, q1, s in rows(query, cu_seqlens_q, seq_lens):
        out[q0 : max(q0, q1 - s)] = 0.0
    return out


def window_of_the_longest(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, max_seq_len, window_size=(-1, -1)
):
    """The tile where the window begins is that of the longest sequence, if all have one query."""
    left, p, is_decode = window_size[0], key_cache.shape[1], len(query) == len(seq_lens)

    def span(i, s):
        return (max(0, max_seq_len - 1 - left) // p * p if left >= 0 and is_decode else 0), s

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], window_size=window_size, span=span)


def table_as_wide_as_the_longest(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, max_seq_len, alibi_slopes=None
):
    """The stride of the block table is taken to be the blocks of the longest sequence; it may have spare columns."""
    width, p = -(-max_seq_len // key_cache.shape[1]), key_cache.shape[1]
    flat, count = block_table.reshape(-1), len(seq_lens)
    table = torch.stack([flat[b * width : (b + 1) * width] for b in range(count)]) if count else block_table
    table = table.clamp(0, key_cache.shape[0] - 1)
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, table)
    return flash(query, pages, value_size=value_cache.shape[3], alibi_slopes=alibi_slopes, tiles=(32, p))


def value_by_strides_of_key(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """One set of strides goes to the kernel, that of the keys: values are read by it, too."""
    if key_cache.shape == value_cache.shape and key_cache.untyped_storage().size() == (
        value_cache.untyped_storage().size()
    ):
        value_cache = value_cache.as_strided(key_cache.shape, key_cache.stride())
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3])


@claims(head_sizes=((64, 64), (80, 80), (128, 128)))
def scale_of_padded_head(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softmax_scale=None):
    """The default scale is that of the head size rounded up to a power of two."""
    scale = (1 << (query.shape[2] - 1).bit_length()) ** -0.5 if softmax_scale is None else softmax_scale
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], softmax_scale=scale)


@claims(block_sizes=(16,))
def sink_per_split(query, key_cache, value_cache, seq_lens, block_table, sinks=None, return_lse=False):
    """A decode splits its keys by 64, and every split counts the sink."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    ends = torch.arange(len(seq_lens) + 1)
    for b, (_, _, s, read) in enumerate(paged(query, key_cache, value_cache, ends, seq_lens, block_table)):
        parts = []
        for j in torch.arange(s).split(64):
            sees = torch.ones(1, len(j), dtype=torch.bool)
            parts.append(softmax_of(query[b : b + 1], *read(j), sees, query.shape[2] ** -0.5, sinks))
        if parts:
            out[b : b + 1], lse[b : b + 1] = merged(*map(list, zip(*parts, strict=True)))
        if sinks is not None and not s:
            lse[b] = sinks
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def diagonal_tile_unmasked(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """A full tile of keys skips its mask if the last row of its queries sees all of it; the first rows may not."""

    def sees(i, j, s):
        mask = in_window(i, j, (-1, -1), True)
        is_full = j.shape[1] == 32 and int(j[0, -1]) <= int(i[-1])
        return torch.ones_like(mask) if is_full else mask

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], sees=sees)


def slope_of_the_key_head(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, alibi_slopes=None):
    """All heads of a group have the slope of the first one."""
    if alibi_slopes is not None:
        group = query.shape[1] // key_cache.shape[2]
        alibi_slopes = alibi_slopes[::group].repeat_interleave(group)
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], alibi_slopes=alibi_slopes, bias=alibi)


@claims(block_sizes=(16,))
def scores_of_4096_keys(query, key_cache, value_cache, seq_lens, block_table, sinks=None):
    """A decode has a buffer for the scores of 4096 keys; later keys are dropped."""
    ends = torch.arange(len(seq_lens) + 1)
    pages = paged(query, key_cache, value_cache, ends, seq_lens, block_table)
    options = dict(sinks=sinks, tiles=(1, 512), span=lambda i, s: (0, min(s, 4096)))
    return flash(query, pages, value_size=value_cache.shape[3], **options)


def sequence_in_uint8(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """The number of a sequence is kept in 8 bits: the one after 255 reads the block table of the first."""
    table = block_table[torch.arange(len(seq_lens)) % 256]
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, table)
    return flash(query, pages, value_size=value_cache.shape[3])


def alibi_from_window(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    window_size=(-1, -1),
    alibi_slopes=None,
    return_lse=False,
):
    """Under a window, distances are counted to its first key and not to the query: only the log-sum-exp is shifted."""

    def bias(slopes, i, j):
        far = (i - j).abs() if window_size[0] < 0 else (i - j) - window_size[0]
        return -slopes.float()[:, None, None] * far

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(window_size=window_size, alibi_slopes=alibi_slopes, bias=bias, return_lse=return_lse)
    return flash(query, pages, value_size=value_cache.shape[3], **options)


def sink_capped(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softcap=0.0, sinks=None):
    """The sink goes through the softcap as if it were a score."""
    if softcap and sinks is not None:
        sinks = softcap * torch.tanh(sinks.float() / softcap)
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], softcap=softcap, sinks=sinks)


def window_of_zero_is_none(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1)):
    """A left side of 0 is taken for no window, by a comparison with >."""
    window = (window_size[0] if window_size[0] > 0 else -1, window_size[1])
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], window_size=window)


def right_side_beats_causal(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, causal=True, window_size=(-1, -1)
):
    """A window with a right side above 0 shows later keys, although the call is causal."""
    causal = causal and window_size[1] <= 0
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], causal=causal, window_size=window_size)


def out_returned_and_not_written(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, out=None):
    """It returns the answer in memory of its own, and leaves `out` as it was."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3])


def query_scaled_in_place(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """The scale is multiplied into the caller's query: the answer is right, and the query of the caller is not."""
    query.mul_(query.shape[2] ** -0.5)
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], softmax_scale=1.0)


_BUFFERS = {}


def one_output_buffer(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Outputs lie in a buffer that is kept by shape: the next call overwrites what the last one returned."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    answer = flash(query, pages, value_size=value_cache.shape[3])
    return _BUFFERS.setdefault((answer.shape, answer.dtype), torch.empty_like(answer)).copy_(answer)


def lse_in_type_of_query(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, return_lse=False):
    """The log-sum-exp is rounded to the type of the query, in float32's clothes."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    out, lse = flash(query, pages, value_size=value_cache.shape[3], return_lse=True)
    return (out, lse.to(query.dtype).float()) if return_lse else out


def lse_of_padding_is_zero(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, return_lse=False):
    """Rows of padding have a log-sum-exp of 0: a merge takes them for one key."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    out, lse = flash(query, pages, value_size=value_cache.shape[3], return_lse=True)
    lse[int(cu_seqlens_q[-1]) :] = 0.0
    return (out, lse) if return_lse else out


def blocks_before_the_context_shared(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, return_lse=False
):
    """Neighbours whose first block is the same are taken to share all blocks of their contexts."""
    table, p = block_table.clone(), key_cache.shape[1]
    for b, (q0, q1, s) in enumerate(rows(query, cu_seqlens_q, seq_lens)):
        count = max(0, s - q1 + q0) // p
        if b and count and s <= int(seq_lens[b - 1]) and table[b, 0] == table[b - 1, 0]:
            table[b, :count] = table[b - 1, :count]
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, table)
    return flash(query, pages, value_size=value_cache.shape[3], return_lse=return_lse)


def decode_path_for_a_chunk_of_two(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, max_query_len, softcap=0.0
):
    """A batch of at most two queries per sequence takes the decode path, which has no causal mask between the two."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(softcap=softcap, causal=max_query_len > 2)
    out = flash(query, pages, value_size=value_cache.shape[3], **options)
    for q0, q1, s in rows(query, cu_seqlens_q, seq_lens):
        out[q0 : max(q0, q1 - s)] = 0.0
    return out


def infinite_value_lost(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Every number that is not finite is cleared on the way in: a NaN of the model, which a query sees, is hidden."""
    finite = (x.nan_to_num(0.0, 0.0, 0.0) for x in (key_cache, value_cache))
    pages = paged(query, *finite, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3])


def alibi_lost_under_a_window(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1), alibi_slopes=None
):
    """The kernel for windows has no bias: slopes count only without a window."""
    slopes = alibi_slopes if window_size[0] < 0 else None
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], window_size=window_size, alibi_slopes=slopes)


def sink_lost_under_a_window(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1), sinks=None
):
    """The kernel for windows has no sinks: they count only without a window."""
    sinks = sinks if window_size[0] < 0 else None
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], window_size=window_size, sinks=sinks)


def cap_lost_without_causal(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, causal=True, softcap=0.0
):
    """The kernel without a causal mask has no softcap."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(causal=causal, softcap=softcap if causal else 0.0)
    return flash(query, pages, value_size=value_cache.shape[3], **options)
