"""Kernels by hand, as a stranger writes them: tile by tile, split by split, sharing no code with any twin.

They are right. `test_kit.py` plants a mistake by replacing a line of this file.
"""

import math

import torch

from twinattn.kit import claims

TILE = 16  # keys at a time
SPLIT = 64  # keys of a part, merged at the end


def paged(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    max_query_len,
    max_seq_len,
    softmax_scale=None,
    causal=True,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
    *,
    chunk_size=0,
    scales=None,
):
    """Attention over pages: prefill chunks and decodes."""
    t, h, d = query.shape
    p, hk, dv = key_cache.shape[1], key_cache.shape[2], value_cache.shape[-1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    query = query if out is None else query.clone()  # they may overlap
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.float()
    if out is None:
        out = query.new_empty(t, h, dv)
    lse = torch.empty(t, h)
    out[int(cu_seqlens_q[-1]) :] = 0
    lse[int(cu_seqlens_q[-1]) :] = -torch.inf
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for b in range(len(lengths)):
        first, last, s = starts[b], starts[b + 1], lengths[b]
        n = last - first
        if n == 0:
            continue
        q = query[first:last].float()
        key_scale, value_scale = scales_of(scales, b)
        pos = torch.arange(s - n, s)[:, None]
        parts = []
        for begin in range(0, max(s, 1), SPLIT):
            top = torch.full((h, n), -torch.inf)
            total = torch.zeros(h, n)
            acc = torch.zeros(h, n, dv)
            for tile in range(begin, min(begin + SPLIT, s), TILE):
                end = min(tile + TILE, s, begin + SPLIT)
                j = torch.arange(tile, end)
                block = block_table[b, j // p].long()
                k = key_cache[block, j % p].float() * key_scale
                v = value_cache[block, j % p].float() * value_scale
                k = k.repeat_interleave(h // hk, dim=1)
                v = v.repeat_interleave(h // hk, dim=1)
                scores = torch.einsum("thd,jhd->htj", q, k) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores = scores - alibi_slopes[:, None, None] * (pos - j).abs()
                see = torch.ones(n, len(j), dtype=torch.bool)
                if causal:
                    see = see & (j <= pos)
                if window_size[0] >= 0:
                    see = see & (j >= pos - window_size[0])
                if window_size[1] >= 0 and not causal:
                    see = see & (j <= pos + window_size[1])
                if chunk_size:
                    see = see & (j // chunk_size == pos // chunk_size)
                v = v.masked_fill(~see.any(0)[:, None, None], 0.0)
                scores = scores.masked_fill(~see, -torch.inf)
                new = torch.maximum(top, scores.amax(-1))
                safe = torch.where(new == -torch.inf, 0.0, new)
                weights = torch.exp(scores - safe[..., None])
                shrink = torch.exp(top - safe)
                total = total * shrink + weights.sum(-1)
                acc = acc * shrink[..., None] + torch.einsum("htj,jhd->htd", weights, v)
                top = new
            parts.append((acc, total, top))
        whole = torch.stack([part[2] for part in parts]).amax(0)
        if sinks is not None:
            whole = torch.maximum(whole, sinks.float()[:, None].expand_as(whole))
        whole = torch.where(whole == -torch.inf, 0.0, whole)
        acc = sum(part[0] * torch.exp(part[2] - whole)[..., None] for part in parts)
        total = sum(part[1] * torch.exp(part[2] - whole) for part in parts)
        if sinks is not None:
            total = total + torch.exp(sinks.float()[:, None] - whole)
        empty = total == 0
        answer = torch.where(empty[..., None], 0.0, acc / total[..., None])
        out[first:last] = answer.transpose(0, 1).to(query.dtype)
        lse[first:last] = torch.where(empty, -torch.inf, torch.log(total) + whole).T
    return (out, lse) if return_lse else out


def varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=True, return_lse=False):
    """Attention over rows, a sequence at a time."""
    h, group = query.shape[1], query.shape[1] // key.shape[1]
    out, lse = query.new_zeros(*query.shape[:2], value.shape[-1]), torch.full(query.shape[:2], -torch.inf)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(edges_q) - 1):
        rows, keys = slice(edges_q[b], edges_q[b + 1]), slice(edges_k[b], edges_k[b + 1])
        q, k, v = query[rows].float(), key[keys].float(), value[keys].float()
        if not len(q) or not len(k):
            continue
        see = torch.ones(len(q), len(k), dtype=torch.bool)
        if causal:
            see = see.tril(len(k) - len(q))
        for head in range(h):
            scores = scale * q[:, head] @ k[:, head // group].T
            scores[~see] = -torch.inf
            sums = scores.logsumexp(-1)
            weights = torch.exp(scores - sums[:, None]).nan_to_num(0.0) if not scores.isnan().any() else scores
            values = v[:, head // group]
            out[rows, head] = (weights.masked_fill(~see, 0.0) @ values.masked_fill(~see.any(0)[:, None], 0.0)).to(
                out.dtype
            )
            lse[rows, head] = sums
    return (out, lse) if return_lse else out


def local(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    chunk_size,
    window_size=(-1, -1),
    return_lse=False,
):
    """Attention inside chunks, and inside windows in them."""
    batch = (cu_seqlens_q, seq_lens, block_table, 0, 0)
    options = dict(chunk_size=chunk_size, window_size=window_size, return_lse=return_lse)
    return paged(query, key_cache, value_cache, *batch, **options)


def sliding_window(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size, return_lse=False):
    """Attention to the last keys."""
    batch = (cu_seqlens_q, seq_lens, block_table, 0, 0)
    return paged(query, key_cache, value_cache, *batch, window_size=window_size, return_lse=return_lse)


def quantized(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    scales,
    softcap=0.0,
    sinks=None,
    return_lse=False,
):
    """Attention over quantized values of 8 bits."""
    batch = (cu_seqlens_q, seq_lens, block_table, 0, 0)
    options = dict(softcap=softcap, sinks=sinks, return_lse=return_lse)
    return paged(query, key_cache, value_cache, *batch, scales=scales, **options)


def scales_of(scales, b):
    """The scales of keys and of values of a sequence: numbers, or one for each head."""
    if scales is None:
        return 1.0, 1.0
    k_scale, v_scale = scales.key, scales.value
    return [(x[b] if x.ndim == 2 else x)[:, None] if isinstance(x, torch.Tensor) else x for x in (k_scale, v_scale)]


def mla(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale, return_lse=False):
    """Attention over latents."""
    keys = cache[..., : query.shape[-1]].unsqueeze(2)
    values = cache[..., :latent_rank].unsqueeze(2)
    batch = (cu_seqlens_q, seq_lens, block_table, 0, 0)
    return paged(query, keys, values, *batch, softmax_scale=softmax_scale, return_lse=return_lse)


def cascade(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, common_prefix_len, return_lse=False):
    """Attention over shared keys, over a sequence's own, and a merge."""
    common, blocks = common_prefix_len, common_prefix_len // key_cache.shape[1]
    own = paged(
        *(query, key_cache, value_cache, cu_seqlens_q, seq_lens - common, block_table[:, blocks:], 0, 0),
        return_lse=True,
    )
    if not common:
        return own if return_lse else own[0]
    everybody = torch.tensor([0, int(cu_seqlens_q[-1])])
    shared = paged(
        *(query, key_cache, value_cache, everybody, torch.tensor([common]), block_table[:1], 0, 0),
        causal=False,
        return_lse=True,
    )
    out, lse = merge([shared[0].float(), own[0].float()], [shared[1], own[1]])
    out = out.to(query.dtype)
    return (out, lse) if return_lse else out


SMALL = dict(heads=((1, 1), (4, 2)), head_sizes=((64, 64),), block_sizes=(16,))


@claims(**SMALL)
def cascade_of_prefixes(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    prefixes,
    window_size=(-1, -1),
    sinks=None,
    return_lse=False,
):
    """Attention over each prefix of a sequence, read from the blocks of its first sequence, and over its own keys."""
    p = key_cache.shape[1]
    out, lse = query.new_zeros(*query.shape[:2], value_cache.shape[-1]), torch.full(query.shape[:2], -torch.inf)
    for b, s in enumerate(seq_lens.tolist()):
        begin, end = cu_seqlens_q[b : b + 2].tolist()
        pos, of_it = torch.arange(s - end + begin, s)[:, None], [x for x in prefixes if x.first <= b < x.last]
        edges = sorted((min(x.end, s), x.first) for x in of_it)
        owners = [owner for _, owner in edges] + [b]
        levels = list(zip(owners, [0, *(x for x, _ in edges)], [*(x for x, _ in edges), s], strict=True))
        parts = []
        for owner, low, high in levels:
            j = torch.arange(low, high)
            see = j <= pos
            if window_size[0] > -1:
                see = see & (pos - j <= window_size[0])
            rows = (
                torch.tensor([0, end - begin]),
                torch.tensor([high - low]),
                block_table[owner : owner + 1, low // p :],
            )
            parts.append(masked(query[begin:end].float(), key_cache, value_cache, *rows, [see], True))
        if sinks is not None:
            parts.append((torch.zeros_like(parts[0][0]), sinks.float().expand(end - begin, -1)))
        of_rows, lse[begin:end] = merge(*zip(*parts, strict=True))
        out[begin:end] = of_rows.to(query.dtype)
    return (out, lse) if return_lse else out


@claims(**SMALL)
def speculative(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    trees,
    window_size=(-1, -1),
    return_lse=False,
):
    """Attention of nodes to what is before their tree, and to their ancestors, which are the bits of a number."""
    seen = []
    for b, parents in enumerate(trees.to_lists()):
        n, (begin, end) = len(parents), cu_seqlens_q[b : b + 2].tolist()
        context, words, depths = int(seq_lens[b]) - n, [], []
        for node, parent in enumerate(parents):
            words.append((words[parent] if parent >= 0 else 0) | 1 << node)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        tree = torch.tensor([[word >> node & 1 for node in range(n)] for word in words], dtype=torch.bool).view(n, n)
        see = torch.cat([torch.ones(n, context, dtype=torch.bool), tree], dim=1)
        stands = torch.tensor([*range(context), *(context + depth for depth in depths)])
        if window_size[0] > -1:
            see = see & (stands[context:, None] - stands <= window_size[0])
        seen.append(torch.zeros(len(query), context + n, dtype=torch.bool))
        seen[b][begin:end] = see[n - end + begin :]
    return masked(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, seen, return_lse)


def differential(
    query, cache, cu_seqlens_q, seq_lens, block_table, lambda_full, lambda_init, norm_weight, norm_eps, return_lse=False
):
    """Two attentions, one subtracted from the other, and a norm."""
    wide = torch.cat([cache[0, 1], cache[1, 1]], dim=-1)
    batch = (cu_seqlens_q, seq_lens, block_table, 0, 0)
    queries = query.float()
    first, lse1 = paged(queries[:, 0::2], cache[0, 0], wide, *batch, return_lse=True)
    second, lse2 = paged(queries[:, 1::2], cache[1, 0], wide, *batch, return_lse=True)
    x = first - lambda_full * second
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm_eps)
    x = x * norm_weight.float()
    x = x * (1 - lambda_init)
    out = x.reshape(query.shape).to(query.dtype)
    return (out, torch.stack([lse1, lse2], dim=-1).flatten(1)) if return_lse else out


def merge(outs, lses):
    """Merge partial outputs."""
    top = torch.stack(list(lses)).amax(0)
    base = torch.where(top == -torch.inf, 0.0, top)
    total = torch.zeros_like(base)
    acc = torch.zeros(outs[0].shape)
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - base)
        total = total + weight
        acc = acc + torch.where((weight == 0)[..., None], 0.0, out.float() * weight[..., None])
    safe = torch.where(total == 0, 1.0, total)
    return (acc / safe[..., None]).to(outs[0].dtype), torch.log(total) + base


def write(key, value, key_cache, value_cache, slot_mapping):
    """Write new tokens into the pools."""
    p = key_cache.shape[1]
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    key_cache[slots // p, slots % p] = key[keep]
    value_cache[slots // p, slots % p] = value[keep]


def interval(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, first_visible, last_visible, return_lse=False
):
    """Attention to an interval of keys for each query."""
    seen = []
    for s in seq_lens.tolist():
        j = torch.arange(s)
        low, high = first_visible[:, None], last_visible[:, None]
        seen.append((low <= j) & (j <= high))
    return masked(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, seen, return_lse)


def sparse(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, slots, return_lse=False, scale=None):
    """Attention to the slots of a pool that are listed for each query, -1 for none."""
    p, seen = key_cache.shape[1], []
    for b, s in enumerate(seq_lens.tolist()):
        j = torch.arange(s)
        mine = block_table[b, j // p].long() * p + j % p
        chosen = slots.long()
        chosen = chosen.masked_fill(chosen < 0, -7)
        seen.append((chosen[:, :, None] == mine).sum(1))
    return masked(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, seen, return_lse, scale)


def sparse_latents(
    query, cache, cu_seqlens_q, seq_lens, block_table, slots, latent_rank, softmax_scale, return_lse=False
):
    """Attention to the latents of a pool that are listed for each query."""
    keys, values = cache[:, :, None, : query.shape[-1]], cache[:, :, None, :latent_rank]
    return sparse(query, keys, values, cu_seqlens_q, seq_lens, block_table, slots, return_lse, softmax_scale)


@claims(heads=((4, 1),), head_sizes=((264, 256),), block_sizes=(16,))
def packed_latents(
    query, cache, cu_seqlens_q, seq_lens, block_table, slots, latent_rank, softmax_scale, return_lse=False
):
    """Attention to the packed latents of a pool that are listed for each query."""
    r, end = latent_rank, latent_rank + latent_rank // 128 * 4
    first = max(0, int(block_table.min()))  # only the used blocks of a large pool
    cache, block_table, slots = cache[first:], block_table - first, slots - first * cache.shape[1]
    quantized_values = cache[..., :r].contiguous().view(torch.float8_e4m3fn).float()
    scales = cache[..., r:end].contiguous().view(torch.float32)
    rotary = cache[..., end : end + 2 * (query.shape[-1] - r)].contiguous().view(torch.bfloat16).float()
    rows = torch.cat([quantized_values * scales.repeat_interleave(128, -1), rotary], -1)[:, :, None]
    return sparse(query, rows, rows[..., :r], cu_seqlens_q, seq_lens, block_table, slots, return_lse, softmax_scale)


def masked(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, seen, return_lse, scale=None):
    """Attention over pages; of each sequence it is known how often each query row sees each key."""
    p, h = key_cache.shape[1], query.shape[1]
    out, lse = query.new_zeros(*query.shape[:2], value_cache.shape[-1]), torch.full(query.shape[:2], -torch.inf)
    edges = cu_seqlens_q.tolist()
    for b, s in enumerate(seq_lens.tolist()):
        rows, j = slice(edges[b], edges[b + 1]), torch.arange(s)
        see = seen[b][rows]
        if see.numel() == 0:
            continue
        where = block_table[b, j // p].long(), j % p
        k, v = (pool[where].float().masked_fill(~see.any(0)[:, None, None], 0.0) for pool in (key_cache, value_cache))
        k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
        products = torch.einsum("thd,jhd->htj", query[rows].float(), k)
        products = products * (query.shape[-1] ** -0.5 if scale is None else scale)
        seen_scores = products + see.float().log()
        sums = seen_scores.logsumexp(-1)
        weights = torch.exp(seen_scores - sums[..., None]).masked_fill(see == 0, 0.0)
        out[rows] = torch.einsum("htj,jhd->thd", weights, v).to(out.dtype)
        lse[rows] = sums.T
    return (out, lse) if return_lse else out


def select(scores, topk):
    """Select the best scores, by a stable sort."""
    t, s = scores.shape
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :topk]
    chosen = torch.where(scores.gather(1, order) != -torch.inf, order, -1)
    return torch.cat([chosen, torch.full((t, max(0, topk - s)), -1)], dim=1)


LOG2E = math.log2(math.e)
LATER: dict = {}  # for a mistake that is planted


@claims(layers=("gdn", "kda"))
def recurrent(
    query,
    key,
    value,
    log_decay,
    beta,
    states,
    cu_seqlens_q,
    state_indices,
    has_initial_state,
    scale,
    num_accepted=None,
    delta=True,
):
    """Fold tokens into states, all heads of a token at once; slots are `[b]`, or `[b, columns]` for drafts."""
    out = torch.zeros(value.shape, dtype=torch.float32)
    group = value.shape[1] // query.shape[1]
    q, k = (x.float()[:, torch.arange(value.shape[1]) // group] for x in (query, key))
    for i, (begin, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        slots = state_indices[i].reshape(-1).tolist()
        if slots[0] < 0 or begin == end:
            continue
        start = slots[int(num_accepted[i]) - 1] if num_accepted is not None else slots[0]
        state = states[start].float() if has_initial_state[i] else torch.zeros(states.shape[1:])
        for row in range(begin, end):
            decay = log_decay[row].float().exp()
            state = state * decay.view(len(decay), 1, -1)
            seen = torch.einsum("hvk,hk->hv", state, k[row]) if delta else 0.0
            written = beta[row].float()[:, None] * (value[row].float() - seen)
            state = state + torch.einsum("hv,hk->hvk", written, k[row])
            out[row] = scale * torch.einsum("hvk,hk->hv", state, q[row])
            if len(slots) > 1 and slots[row - begin] >= 0:
                states[slots[row - begin]] = state
        if len(slots) == 1:
            states[slots[0]] = state
    return out.to(value.dtype)
