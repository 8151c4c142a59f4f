"""Wrong answers, as changes of the solutions: what is replaced, by what, and what the check has to say of it."""

I = "i = torch.arange(seq_len - query_len, seq_len)[:, None]"  # noqa: E741
TOP_LEFT = "i = torch.arange(query_len)[:, None]"

WRONG = {
    "slot": [
        ("blocks[position // block_size]", "blocks[0]", "not always the first"),
        ("* block_size +", "+", "begins at slot b * block_size"),
        ("position % block_size\n", "position // block_size\n", "not the expected number"),
    ],
    "slot_mapping": [
        ("range(seq_len - query_len, seq_len)", "range(query_len)", "the slots of its first ones"),
        ("range(seq_len - query_len, seq_len)", "range(seq_len)", "only the new ones are written"),
        ("return slots", "slots", "is there a `return`?"),
    ],
    "write": [
        ("if slot < 0:", "if slot < -1:", "Python counts -1 from the end"),
        ("        value_cache[block, row] = value[token]\n", "", "the values were not written"),
        ("key_cache[block, row]", "key_cache.clone()[block, row]", "key_cache"),
        ("[block, row] =", "[row % 3, block] =", "key_cache: max error"),
    ],
    "gather": [
        ("[:seq_len]", "", "these are whole blocks"),
        ("[blocks[:num_blocks].long()]", "", "the first slots of the pool"),
        ("blocks[:num_blocks]", "blocks[:num_blocks].sort().values", "the order of the tokens"),
        ("blocks[:num_blocks]", "blocks", "IndexError"),
    ],
    "causal_mask": [
        (I, TOP_LEFT, "aligned at the top left"),
        ("<= i", "< i", "a token sees itself"),
        ("<= i", "<= seq_len + 0 * i", "after its own position"),
    ],
    "attend": [
        (" / query.shape[1] ** 0.5", "", "not divided by the square root"),
        (".masked_fill(~visible, 0.0)", "", "is NaN; its answer has to be 0"),
        ("scores.logsumexp(-1)", "scores.exp().sum(-1).log()", "exp of a large score is inf"),
        ("return weights @ value, lse", "return weights @ value, lse / 0.6931471805599453", "natural log"),
        ("    scores = scores.masked_fill(~visible, -torch.inf)\n", "", "a share of the denominator"),
        (
            "    scores = scores.masked_fill(~visible, -torch.inf)\n    lse = scores.logsumexp(-1)\n"
            "    weights = torch.exp(scores - lse[:, None]).masked_fill(~visible, 0.0)\n",
            "    scores = scores * visible\n    lse = scores.logsumexp(-1)\n    weights = scores.softmax(-1)\n",
            "a score of 0, and exp(0) is 1",
        ),
        (
            "-torch.inf)\n    lse = scores.logsumexp(-1)\n"
            "    weights = torch.exp(scores - lse[:, None]).masked_fill(~visible, 0.0)\n",
            "-1e9)\n    lse = scores.logsumexp(-1)\n    weights = scores.softmax(-1)\n",
            "-1e9 hides a key only next to a visible one",
        ),
    ],
    "attend_heads": [
        (".repeat_interleave(group, dim=1)", ".repeat(1, group, 1)", "neighbours share a KV head"),
        (
            "return torch.einsum",
            "return torch.einsum('hts->ths', weights), torch.einsum",
            "expected (out, lse), got 3 things",
        ),
        (", lse.T", ", lse", "expected the shape [1, 4], got [4, 1]"),
    ],
    "paged_attention": [
        (
            "attend(query[first:last], key, value, visible)",
            "attend(query[first:last], *(x.repeat(1, query.shape[1] // x.shape[1], 1) for x in (key, value)), visible)",
            "h // g, by repeat_interleave",
        ),
        ("masks.causal(", "masks.full(", "the queries see later keys"),
        ("masks.causal(last - first, seq_len)", "masks.causal(seq_len, seq_len)[: last - first]", "top left"),
        ("first, last = cu_seqlens_q[i : i + 2].tolist()", "first, last = i, i + 1", "was taken for sequence i"),
        ("gather(value_cache, blocks", "gather(value_cache, block_table[0]", "the first sequence"),
        (
            "key, value = gather(key_cache, blocks, seq_len), gather(value_cache, blocks, seq_len)",
            "whole = -(-seq_len // key_cache.shape[1]) * key_cache.shape[1]\n"
            "        key, value = gather(key_cache, blocks, whole), gather(value_cache, blocks, whole)\n"
            "        visible = torch.zeros(last - first, whole, dtype=torch.bool)\n"
            "        visible[:, :seq_len] = masks.causal(last - first, seq_len)\n"
            "        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))\n"
            "        scores = torch.einsum('thd,shd->ths', query[first:last], key) / query.shape[2] ** 0.5\n"
            "        scores = scores.masked_fill(~visible[:, None], -torch.inf)\n"
            "        out[first:last] = torch.einsum('ths,shd->thd', scores.softmax(-1), value)\n"
            "        continue",
            "a mask is not enough",
        ),
        (
            "key, value = gather(key_cache, blocks, seq_len)",
            "key_cache[block_table[i].long()]\n        key, value = gather(key_cache, blocks, seq_len)",
            "Entries of the table past the last block",
        ),
    ],
    "merge": [
        (".masked_fill((part_lse == -torch.inf)[..., None], 0.0)", "", "is NaN, and so is 0 * NaN"),
        ("torch.exp(part_lse - lse)[..., None]", "1 / len(outs)", "the parts count alike"),
        ("return out, lse", "return out, lse * 1.4426950408889634", "lse: max error"),
    ],
    "online_softmax": [
        ("acc * rescale", "acc", "the values were not rescaled"),
        ("row_sum * rescale", "row_sum", "the sum was not rescaled"),
        ("        if new_max == -torch.inf:\n            continue\n", "", "leaves the maximum at -inf"),
        ("    for scores", "    tiles = list(tiles) + list(tiles)\n    for scores", "gone through twice"),
        ("    for scores", "    tiles = list(tiles)\n    for scores", "the memory of one is used again"),
    ],
    "split_kv": [
        ("-(-len(key) // num_splits)", "len(key) // num_splits", "the last keys are lost"),
        ("torch.stack(lses)", "torch.stack(lses).logsumexp(0).expand(num_splits, -1)", "the LSE of the whole"),
    ],
    "window_mask": [
        ("(j > i - window)", "(j >= i - window)", "shows W + 1 keys"),
        ("(j <= i) & ", "", "after its own position"),
        (I, TOP_LEFT, "aligned at the top left"),
    ],
    "trim_window": [
        ("cut = first_visible // block_size", "cut = -(-first_visible // block_size)", "round down, not up"),
        ("max(0, seq_len - query_len - (window - 1))", "seq_len - query_len - (window - 1)", "begins at token 0"),
        ("seq_len - query_len -", "seq_len - 1 -", "sees furthest back"),
        (
            "return cut * block_size, seq_len - cut * block_size",
            "return first_visible, seq_len - first_visible",
            "whole",
        ),
        ("(window - 1)", "window", "one token too long"),
    ],
    "chunk_mask": [
        ("(j // chunk_size == i // chunk_size)", "(j > i - chunk_size)", "that is a window"),
        ("(j <= i) & ", "", "after its own position"),
        ("i // chunk_size)", "(i - i[0]) // chunk_size)", "cells of the mask wrong"),
    ],
    "virtual_batches": [
        ("position = seq_len - query_len", "seq_len = query_len; position = 0", "begin at the first new token"),
        ("lens.append(end - begin)", "lens.append(chunk_size)", "even if its chunk has room"),
        (
            "        position = seq_len - query_len\n",
            "        position = 0\n",
            "only the last query_len are new",
        ),
        (
            "        position = seq_len - query_len\n        while position < seq_len:\n"
            "            begin = position // chunk_size * chunk_size\n"
            "            end = min(begin + chunk_size, seq_len)\n            queries.append(end - position)\n",
            "        position = 0\n        while position < seq_len:\n"
            "            begin = position // chunk_size * chunk_size\n"
            "            end = min(begin + chunk_size, seq_len)\n"
            "            queries.append(max(0, end - max(begin, seq_len - query_len)))\n",
            "a chunk without new tokens is no piece",
        ),
        (
            "        position = seq_len - query_len\n",
            "        position = seq_len - max(query_len, 1)\n",
            "a sequence without new tokens has no piece",
        ),
        ("blocks[begin // block_size :", "blocks[0 :", "not the expected list"),
        (
            "blocks[begin // block_size : -(-end // block_size)]",
            "blocks[: -(-(end - begin) // block_size)]",
            "own chunk",
        ),
    ],
    "shared_prefix": [
        ("min(s - q for", "min(s for", "reaches into the new tokens"),
        ("count * block_size", "count", "the number of blocks"),
        (
            "    while count < columns and len({blocks[count] for blocks in block_tables}) == 1:\n        count += 1\n",
            "    for i in range(columns):\n        count += len({blocks[i] for blocks in block_tables}) == 1\n",
            "ends at the first block that differs",
        ),
    ],
    "cascade": [
        (
            "merge([prefix[0], own[0]], [prefix[1], own[1]])",
            "prefix[0] + own[0], torch.logaddexp(prefix[1], own[1])",
            "weigh them by their LSEs",
        ),
        (
            "own_batch, block_size=key_cache.shape[1])",
            "own_batch, block_size=key_cache.shape[1], causal=False)",
            "the mask is that of the shorter sequence",
        ),
        ("causal=False", "causal=True", "the prefix is hidden from some queries"),
        ("merge([prefix[0], own[0]], [prefix[1], own[1]])", "own", "the prefix is left out"),
        ("    return merge(", "    prefix = prefix[0], own[1]\n    return merge(", "out: max error"),
        (
            "    columns = prefix_len",
            "    block_table = block_table.clone()\n    block_table[:, : prefix_len // key_cache.shape[1]] = "
            "block_table[:1, : prefix_len // key_cache.shape[1]]\n"
            "    batch = Batch(cu_seqlens_q, seq_lens, block_table, len(query), int(seq_lens.max()))\n"
            "    plan = chunked_prefill.plan(batch, block_size=key_cache.shape[1])\n"
            "    return chunked_prefill.attention(query, key_cache, value_cache, plan, return_lse=True)\n"
            "    columns = prefix_len",
            "read what is shared once",
        ),
    ],
    "add_sinks": [
        ("out * torch.exp(lse - total)[..., None], total", "out, total", "takes its share of the output"),
        ("[..., None], total", "[..., None], lse", "only the output was changed"),
        ("torch.logaddexp(lse,", "torch.logaddexp(torch.logaddexp(lse, sinks.expand_as(lse)),", "counted twice"),
    ],
    "quantize": [
        ("torch.round(x / scale[..., None])", "(x / scale[..., None])", "round first"),
        ("x.abs().amax(-1) / 127", "(x.abs().max() / 127).expand(x.shape[:2])", "one scale for the whole tensor"),
        ("/ 127", "/ 128", "the largest value is 127"),
        ("    scale = torch.where(scale == 0, 1.0, scale)\n", "", "scale"),
    ],
    "mla_decode": [
        (" + query[:, nope:] @ rope_key.T", "", "has not met the rotary keys"),
        ("* softmax_scale", "/ (latent.shape[1] + rope_key.shape[1]) ** 0.5", "before absorption"),
        (
            "(absorbed @ latent.T +",
            '(torch.einsum("hn,shn->hs", query[:, :nope], torch.einsum("sr,hnr->shn", latent, key_projection)) +',
            "the keys or the values of a head",
        ),
        (
            "    scores = (absorbed @ latent.T + query[:, nope:] @ rope_key.T) * softmax_scale\n",
            "    scores = torch.stack([latent @ W.T @ q for W, q in zip(key_projection, query[:, :nope])])\n"
            "    scores = (scores + query[:, nope:] @ rope_key.T) * softmax_scale\n",
            "the keys or the values of a head",
        ),
    ],
    "tree_mask": [
        (
            "torch.eye(len(parents), dtype=torch.bool)",
            "torch.ones(len(parents), len(parents)).tril().bool()",
            "siblings",
        ),
        ("return visible", "return visible.T", "rows and columns are swapped"),
        ("|= visible[parent]", "= visible[i] | (torch.arange(len(parents)) == parent)", "not only the parent"),
        ("        if parent >= 0:\n            visible", "        visible", "Python counts -1 from the end"),
    ],
    "local_len": [
        (
            "    return rounds",
            "    return -(-seq_len // num_ranks)\n    return rounds",
            "the last run may be cut short",
        ),
        (" + min(max(rest - rank * interleave, 0), interleave)", "", "only whole rounds were counted"),
    ],
    "triton_decode": [
        ("tl.load(value + offsets, mask=there[:, None], other=0.0)", "tl.load(value + offsets)", "reads past the last"),
        ("range(0, seq_len, TILE)", "range(0, seq_len // TILE * TILE, TILE)", "the last keys are missing"),
        (
            'tl.where(there, tl.sum(keys * q[None, :], axis=1) * scale, -float("inf"))',
            "tl.sum(keys * q[None, :], axis=1) * scale",
            "lanes after the last key",
        ),
        (" * scale", "", "not multiplied by `scale`"),
        ("acc * rescale", "acc", "`acc` has to be rescaled"),
        ("head_stride + head * D", "head_stride", "all programs read the keys of head 0"),
        ("q = tl.load(query + head * D + dims)", "q = query[head]", "Inside a kernel a tensor is a pointer"),
        (
            "    decode_kernel[(heads,)]",
            "    scores = torch.einsum('hd,shd->hs', query, key) * size**-0.5\n"
            "    return torch.einsum('hs,shd->hd', scores.softmax(-1), value)\n    decode_kernel[(heads,)]",
            "all arithmetic belongs into the kernel",
        ),
    ],
    "span_mask": [
        (
            "    visible = j <= i\n",
            "    visible = (j <= i) & (j > i - window)\n    window = seq_len\n",
            "an OR where an AND belongs",
        ),
        (" & (j > i - window)", "", "the window is to hide early keys"),
        ("torch.arange(seq_len - query_len, seq_len)", "torch.arange(query_len)", "aligned at the top left"),
    ],
    "select_keys": [
        ("key=lambda j: -scores[j]", "key=lambda j: (-scores[j], -j)", "the lower positions"),
        ("sorted(best)", "best", "the positions are to rise"),
        (' if score > float("-inf")]', "]", "a score of -inf is no key"),
    ],
    "fold": [
        ("(value - state @ key)[:, None] * key[None, :]", "(value - state @ key) * key[:, None]", "transposed"),
        ("beta * (value", "decay * beta * (value", "is added whole"),
        ("value - state @ key", "value", "the delta rule writes its difference"),
        ("    state = decay * state\n    return state", "    return decay * state", "the state fades first"),
        ("beta * (value - state @ key)", "(beta * value - state @ key)", "beta is of the whole difference"),
    ],
    "rollback": [
        ("row[count - 1]", "row[-1]", "the rejected ones too"),
        ("row[count - 1]", "row[min(count, len(row) - 1)]", "end in column `count - 1`"),
        ("is_padding = row[0] < 0", "is_padding = False", "is padding, whatever else it holds"),
    ],
    "backward": [
        ("- delta)", ")", "delta is left out"),
        ("scale * weights * (", "weights * (", "the scale is left out"),
        (".masked_fill(~visible, 0.0)", "", "the mask is left out"),
        (".masked_fill(~visible, 0.0)", " * visible", "inf times 0 is NaN"),
        ("scale * weights * (", "scale**2 * weights * (", "the scale is there twice"),
    ],
    "rms_norm": [
        (".mean(-1, keepdim=True) + eps)", ".sum(-1, keepdim=True) + eps)", "divides by that of their mean"),
        (
            "torch.sqrt(x.square().mean(-1, keepdim=True) + eps)",
            "(x.square().mean(-1, keepdim=True).sqrt() + eps)",
            "under",
        ),
        (".mean(-1, keepdim=True)", ".mean()", "each token has its own"),
        (" * weight", "", "the weight is missing"),
    ],
    "rotate": [
        ("[..., :half], x[..., half:]", "[..., 0::2], x[..., 1::2]", "answer: max error"),
        ("a * angles.cos() - b", "a * angles.cos() + b", "answer: max error"),
        ("positions[:, None, None]", "torch.arange(len(x))[:, None, None]", "is not its position"),
        ("base ** (", "1.0 ** (", "all pairs turn at the same speed"),
        ("/ half)", "/ (2 * half))", "here it is -i / d"),
    ],
    "sample": [
        ("logits / temperature", "logits * temperature", "not multiplied"),
        ("u * total", "u", "has to sum to 1 again"),
        ("        if total >= top_p:\n            break\n", "", "top_p is not used"),
        ("    if temperature == 0:\n        return int(logits.argmax())\n", "", "not the expected number"),
        ("sorted(range(len(probabilities)), key=lambda token: -probabilities[token])", "range(len(logits))", "ids"),
    ],
    "replay": [
        ("old_decay * state", "state", "fades with each token in the ring"),
        ("written, row[None]", "written, value[None]", "here it is the value"),
        ("len(keys) == room", "len(keys) > room", "with the token that fills the ring"),
        ("state, decays[:0], keys[:0], written[:0]", "state, decays, keys, written", "or they count twice"),
    ],
    "own_block": [
        ("    elif users[blocks[place]] > 1:\n", "    else:\n", "is its own already"),
        ("        users[blocks[place]] -= 1\n", "", "it would never be free again"),
        ("blocks[place] = free.pop(0)", "blocks[place] = free.pop()", "this is the last"),
        ("users[blocks[place]] > 1", "users[blocks[place]] > 99", "before it writes"),
        ("        users[blocks[place]] = 1\n    elif", "    elif", "users: "),
    ],
    "entries": [
        ("[before, :d]", "[before, d:]", "answer: max error"),
        ("slice(max(e - 1, 0) * ratio, e * ratio)", "slice(max(e - 1, 0) * ratio, max(e, 1) * ratio)", "of its own"),
        ("gate.softmax(0)", "gate.softmax(1)", "one over the channels"),
        (
            "count = values.shape[1] // 2, len(values) // ratio",
            "count = values.shape[1] // 2, -(-len(values) // ratio)",
            "when all of its tokens are",
        ),
    ],
    "triton_reduce": [
        ("range(0, num_parts, PARTS)", "range(0, num_parts // PARTS * PARTS, PARTS)", "the last parts are missing"),
        ("range(0, num_parts, PARTS)", "range(0, PARTS, PARTS)", "only the first tile"),
        (
            'other=-float("inf"))\n        has_keys = (scores > -float("inf"))[:, None]',
            "other=0.0)\n        has_keys = (part < num_parts)[:, None]",
            "lanes after the last part got a weight",
        ),
        (', mask=part < num_parts, other=-float("inf")', "", "reads past the last part"),
        ("mask=has_keys, other=0.0", "mask=(part < num_parts)[:, None], other=0.0", "0 * NaN is NaN"),
        ('tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max", "take 0 off then"),
        ("acc / row_sum", "acc", "not divided by the sum of the weights"),
    ],
    "triton_group": [
        ("products * scale", "products", "not multiplied by `scale`"),
        ("(kv_head * GROUP + in_group)", "(kv_head + in_group * (kv_heads))", "neighbours share a KV head"),
        ("(tokens * kv_heads + kv_head)", "(tokens * kv_heads)", "the keys of KV head 0"),
        ("acc * rescale[:, None]", "acc", "`acc` has to be rescaled"),
        ("tl.load(value + offsets, mask=there[:, None], other=0.0)", "tl.load(value + offsets)", "past the last key"),
        ("tl.load(query + rows, mask=is_row, other=0.0)", "query[rows]", "Inside a kernel a tensor is a pointer"),
    ],
    "triton_causal": [
        ("j[None, :] <= positions", "j[None, :] < positions", "a token sees itself"),
        ("positions = seq_len - query_len + rows", "positions = rows", "aligned at the top left"),
        ("j[None, :] <= positions[:, None]", "j[None, :] < seq_len", "no key is hidden"),
        ("end = tl.minimum(seq_len - query_len + first_row + ROWS, seq_len)", "end = seq_len", "have to be skipped"),
        (" * scale", "", "not multiplied by `scale`"),
    ],
    "triton_fold": [
        ("tile = tile * tl.load(decay + token)", "tile = tile * 1.0", "never fades"),
        ("(v - tl.sum(tile * k[None, :], 1))", "v", "what is missing of it"),
        ("tl.program_id(0) * ROWS + tl.arange", "tl.arange", "all programs have the first rows"),
        (
            "        tile = tile + written[:, None] * k[None, :]\n"
            "        tl.store(out + token * DV + rows, tl.sum(tile * q[None, :], 1))\n",
            "        tl.store(out + token * DV + rows, tl.sum(tile * q[None, :], 1))\n"
            "        tile = tile + written[:, None] * k[None, :]\n",
            "read after the write",
        ),
    ],
    "go_on": [
        ("has_state[count - 1] and", "any(has_state[:count]) and", "kept at exactly that end"),
        ("in_window[first:count]", "in_window[:count]", "may be gone"),
        ("- window + 1", "- window", "sees one token less"),
        ("range(len(has_state), 0, -1)", "range(1, len(has_state) + 1)", "saves most"),
        ("in_window[first:count]", "in_window[count - 1 : count]", "over several blocks"),
        (" and all(in_window[first:count])", "", "have to be there, too"),
    ],
    "int4_decode": [
        ("[pairs & 15, pairs >> 4]", "[pairs >> 4, pairs & 15]", "have changed places"),
        (
            "torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)",
            "torch.cat([pairs & 15, pairs >> 4], -1)",
            "neighbours",
        ),
        ("(elements - zeros[..., None]) * scales[..., None]", "elements * scales[..., None]", "to be taken off"),
        (
            "(elements - zeros[..., None]) * scales[..., None]",
            "elements * scales[..., None] - zeros[..., None]",
            "before the scale",
        ),
        ("key @ (matrix @ query)", "key @ query", "keys are turned"),
        ("return matrix @ (weights @ value)", "return weights @ value", "values are turned"),
        ("* scales[..., None]", "* scales[..., None] ** 2", "once"),
        ("* scales[..., None]", "* scales[0][..., None]", "of their own"),
        (" * len(query) ** -0.5", "", "root of the head size"),
    ],
    "gluon_pipeline": [
        ("        mbarrier.wait(full.index(slot), tile // SLOTS & 1)\n", "", "wait for `full` before each product"),
        (
            "        mbarrier.wait(empty.index(slot), (tile // SLOTS & 1) ^ 1)\n",
            "",
            "before it fills a slot again it waits for `empty`",
        ),
        (
            "        scores = warpgroup_mma_wait(0, deps=[scores])\n        mbarrier.arrive(empty.index(slot))\n",
            "        mbarrier.arrive(empty.index(slot))\n        scores = warpgroup_mma_wait(0, deps=[scores])\n",
            "filled again while its product is under way",
        ),
        ("        scores = warpgroup_mma_wait(0, deps=[scores])\n", "", "warpgroup_mma starts a product and goes on"),
        ("(tile // SLOTS & 1) ^ 1", "tile // SLOTS & 1", "In round 0 no slot was given back yet"),
        ("(tile // SLOTS & 1) ^ 1", "1", "each wait the parity of its round"),
        ("tile // SLOTS & 1)\n        zeros", "0)\n        zeros", "each wait the parity of its round"),
        ("tile // SLOTS & 1)\n        zeros", "tile & 1)\n        zeros", "does it wait for the parity of the round"),
        ("        mbarrier.arrive(empty.index(slot))\n", "", "has each tile one arrival at `empty`"),
        ("        mbarrier.expect(full.index(slot), BYTES)\n", "", "mbarrier.expect called with all BYTES"),
        ("index(slot), BYTES", "index(slot), BYTES // 2", "mbarrier.expect called with all BYTES"),
        ("full.index(slot), keys.index(slot))", "full.index(slot), keys.index(0))", "copied into one slot"),
        ("full.index(slot), keys.index(slot))", "full.index(slot), keys.index(1 - slot))", "nothing is in a slot"),
        ("keys.index(slot).permute", "keys.index(0).permute", "the scores of the one before"),
        ("[tile * SIZE, 0]", "[tile, 0]", "begins at key i * SIZE"),
        (".permute((1, 0))", "", "takes a tile as [numbers, keys]"),
        ("gl.cdiv(num_keys, SIZE)", "num_keys // SIZE", "the last keys are missing"),
        ("        store(out, scores, tile, num_keys)\n", "", "no scores are stored"),
        ("= gl.zeros", "= gl.no_zeros", "docstrings here name what is needed"),
    ],
}
