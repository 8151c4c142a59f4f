"""Mistakes that random numbers of about 1, short sequences and powers of two do not show; `test_conformance_kinds.py`.

The kernel by hand, the property that finds it, the type in which it shows, the lines, and those with the mistake.
"""

from tests.helpers.planted import BLOCK, HIDE, LENGTHS, OF_SINKS, REPEAT, SEE

LOAD = "q = query[first:last].float()"
VALUES = "v = value_cache[block, j % p].float() * value_scale"
PRODUCTS = 'scores = torch.einsum("thd,jhd->htj", q, k) * scale'
SCALES = "k_scale, v_scale = scales.key, scales.value"
STATE = 'seen = torch.einsum("hvk,hk->hv", state, k[row]) if delta else 0.0'

KEPT = "    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()\n"
WRITTEN = "        out[first:last] = answer.transpose(0, 1).to(query.dtype)\n"
RIGHT = "see = see & (j <= pos + window_size[1])"

KINDS = {
    "a-buffer-of-the-longest": ("paged", "16 bits", "float32", BLOCK, BLOCK.replace("j // p", "(j % 2**12) // p")),
    "queries-are-cleared-past-64": ("paged", "answer", "float32", LOAD, LOAD + "\n        q[..., d // 64 * 64 :] = 0"),
    "groups-past-eight": (
        "paged",
        "answer",
        "float32",
        REPEAT,
        "k, v = (x[:, (torch.arange(h) // min(h // hk, 8)).clamp(max=hk - 1)] for x in (k, v))",
    ),
    "the-rest-of-a-head-of-80": (
        "paged",
        "answer",
        "float32",
        LOAD,
        LOAD.replace(".float()", ".float().clone()") + "\n        q[..., d // 64 * 64 :] = 0",
    ),
    "a-sink-per-split-past-4096": (
        "paged",
        "sinks",
        "float32",
        OF_SINKS,
        OF_SINKS.replace("+ torch", "+ (-(-s // 4096)) * torch"),
    ),
    "products-of-fp16": (
        "paged",
        "products",
        "float16",
        PRODUCTS,
        'scores = torch.einsum("thd,jhd->htj", q, k).to(query.dtype).float() * scale',
    ),
    "a-split-with-nan-is-dropped": (
        "paged",
        "nan",
        "float32",
        "whole = torch.stack([part[2] for part in parts]).amax(0)",
        "parts = [x for x in parts if s < 2048 or not x[0].isnan().any()]\n"
        "        whole = torch.stack([part[2] for part in parts]).amax(0)",
    ),
    "subnormal-values-are-zero": (
        "paged",
        "sizes of values",
        "float16",
        VALUES,
        VALUES + "\n                v = v.masked_fill(v.abs() < 2.0**-14, 0.0)",
    ),
    "out-is-cleared-first": (
        "paged",
        "out over the query",
        "float32",
        "query = query if out is None else query.clone()",
        "query = query if out is None else out.zero_().view_as(query)",
    ),
    "out-is-cleared-where-it-begins-elsewhere": (
        "paged",
        "out beside the query",
        "float32",
        "query = query if out is None else query.clone()",
        "query = query.clone() if out is not None and out.data_ptr() == query.data_ptr() else query\n"
        "    if out is not None:\n        out.zero_()",
    ),
    "a-seed-is-set": (
        "paged",
        "process",
        "float32",
        "    lse = torch.empty(t, h)\n",
        "    lse = torch.empty(t, h)\n    torch.manual_seed(0)\n",
    ),
    "positions-are-not-below-zero": (
        "paged",
        "more queries than keys",
        "float32",
        "see = see & (j <= pos + window_size[1])",
        "see = see & (j <= pos.clamp(min=0) + window_size[1])",
    ),
    "scale-of-the-values": (
        "paged",
        "sizes of models",
        "float32",
        "scale = d**-0.5 if",
        "scale = dv**-0.5 if",
    ),
    "rows-of-a-page-in-8-bits": (
        "paged",
        "sizes of models",
        "float32",
        VALUES,
        VALUES.replace("j % p", "j % p % 256"),
    ),
    "partial-outputs-overflow": (
        "paged",
        "sizes of values",
        "float16",
        "parts.append((acc, total, top))",
        "parts.append((acc.to(query.dtype).float(), total, top))",
    ),
    "slopes-as-they-come": (
        "paged",
        "slopes",
        "float32",
        "alibi_slopes = None if alibi_slopes is None else alibi_slopes.float()",
        "alibi_slopes = alibi_slopes",
    ),
    "values-as-large-as-keys": (
        "write",
        "sizes",
        "float32",
        "value_cache[slots // p, slots % p] = value[keep]",
        "d = key.shape[-1]\n    value_cache[slots // p, slots % p, :, :d] = value[keep][..., :d]",
    ),
    "a-zero-loses-its-sign": ("write", "answer", "float32", "= key[keep]", "= key[keep] + 0.0"),
    "a-nan-is-the-usual-one": ("write", "answer", "bfloat16", "= key[keep]", "= key[keep].float().to(key.dtype)"),
    "a-fixed-epsilon": ("differential", "numbers of a layer", "float32", "+ norm_eps)", "+ 1e-5)"),
    "a-fixed-lambda-of-the-beginning": (
        "differential",
        "numbers of a layer",
        "float32",
        "x = x * (1 - lambda_init)",
        "x = x * 0.8",
    ),
    "factors-above-zero": (
        "differential",
        "numbers of a layer",
        "float32",
        "x = x * norm_weight.float()",
        "x = x * norm_weight.float().clamp(min=0)",
    ),
    "one-form-of-scales": (
        "quantized",
        "scales mixed",
        "float32",
        SCALES,
        SCALES + "\n    if isinstance(v_scale, torch.Tensor) and not isinstance(k_scale, torch.Tensor):\n"
        "        v_scale = v_scale.flatten()[0].item()",
    ),
    "repeats-of-long-lists": (
        "sparse",
        "listed twice",
        "float32",
        "seen.append((chosen[:, :, None] == mine).sum(1))",
        "counts = (chosen[:, :, None] == mine).sum(1)\n"
        "        seen.append(counts.clamp(max=1) if chosen.shape[1] > 64 else counts)",
    ),
    "a-bin-of-16384": (
        "select",
        "many scores",
        "float32",
        "    order = torch.argsort(scores, dim=1,",
        "    near = scores > scores.amax(1, keepdim=True) - 2.0**-10\n"
        "    scores = scores.masked_fill(near & (near.cumsum(1) > 16384), 0.0)\n"
        "    order = torch.argsort(scores, dim=1,",
    ),
    "infinity-is-the-largest-number": (
        "select",
        "kinds of scores",
        "float32",
        "    order = torch.argsort(scores, dim=1,",
        "    scores = scores.where(scores != torch.inf, torch.finfo(torch.float32).max)\n"
        "    order = torch.argsort(scores, dim=1,",
    ),
    "a-list-of-2048": ("select", "many scores", "float32", "[:, :topk]", "[:, : min(topk, 2048)]"),
    "padding-is-minus-one": ("recurrent", "padding slot", "float32", "if slots[0] < 0 or", "if slots[0] == -1 or"),
    "a-factor-of-zero-hides-nan": (
        "recurrent",
        "nan before",
        "float32",
        "written = beta[row]",
        "value = torch.where(beta[..., None] == 0, 0.0, value)\n            written = beta[row]",
    ),
    "rows-of-32-bits": (
        "paged",
        "far rows",
        "float16",
        LOAD,
        "q = query[[i for i in range(first, last)]].float()\n"
        "        q[[i * query.stride(0) >= 2**31 for i in range(first, last)]] = 0.5",
    ),
    "window-of-32-bits": (
        "paged",
        "far windows",
        "float32",
        "if window_size[0] >= 0:",
        "if window_size[0] >= 0:\n"
        "                    width = torch.tensor([window_size[0]], dtype=torch.int32) + 1\n"
        "                    see = see & (j > pos - width)\n                if False:",
    ),
    "slopes-of-16-bits": (
        "paged",
        "slopes",
        "bfloat16",
        "alibi_slopes[:, None, None]",
        "alibi_slopes.to(query.dtype).float()[:, None, None]",
    ),
    "halves-of-32-bits": (
        "differential",
        "offsets",
        "float16",
        "wide = torch.cat([cache[0, 1], cache[1, 1]], dim=-1)",
        "wide = torch.cat([cache[0, 1], cache[1, 1]], dim=-1)\n"
        "    far = (block_table.long() * cache.stride(2)) >= 2**31\n    block_table = block_table.masked_fill(far, 0)",
    ),
    "heads-past-64-of-latents": (
        "mla",
        "answer",
        "float32",
        "    values = cache[..., :latent_rank].unsqueeze(2)\n",
        "    values = cache[..., :latent_rank].unsqueeze(2)\n    query = query[:, torch.arange(query.shape[1]) % 64]\n",
    ),
    "scales-of-bfloat16": (
        "quantized",
        "answer",
        "float32",
        SCALES,
        "k_scale, v_scale = (torch.tensor(x).bfloat16().item() if isinstance(x, float) else x"
        " for x in (scales.key, scales.value))",
    ),
    "scale-of-queries-in-scores": (
        "quantized",
        "query scale",
        "float32",
        SCALES,
        "k_scale, v_scale = scales.key * (scales.query or 1.0), scales.value",
    ),
    "two-words-of-ancestors": (
        "speculative",
        "large trees",
        "float32",
        "| 1 << node)",
        "| (1 << node if node < 128 else 0))",
    ),
    "tokens-past-a-grid": (
        "write",
        "many slots",
        "float32",
        "keep = slot_mapping >= 0",
        "keep = (slot_mapping >= 0) & (torch.arange(len(slot_mapping)) < 2**12)",
    ),
    "lists-of-2048": ("sparse", "long lists", "float32", "chosen = slots.long()", "chosen = slots.long()[:, :2048]"),
    "nan-is-lowest": (
        "select",
        "kinds of scores",
        "float32",
        "order = torch.argsort(scores, dim=1,",
        "order = torch.argsort(scores.nan_to_num(-torch.inf, torch.inf, -torch.inf), dim=1,",
    ),
    "a-bin-of-4096": (
        "select",
        "many scores",
        "float32",
        "    order = torch.argsort(scores, dim=1,",
        "    near = scores > scores.amax(1, keepdim=True) - 0.125\n"
        "    scores = scores.masked_fill(near & (near.cumsum(1) > 4096), 0.0)\n"
        "    order = torch.argsort(scores, dim=1,",
    ),
    "channels-past-128": (
        "recurrent",
        "answer",
        "float32",
        STATE,
        "few = min(128, state.shape[-1])\n"
        '            seen = torch.einsum("hvk,hk->hv", state[..., :few], k[row][..., :few]) if delta else 0.0',
    ),
    "sinks-lie-side-by-side": (
        "paged",
        "strides of options",
        "float32",
        OF_SINKS,
        OF_SINKS.replace("sinks.float()", "sinks.as_strided(sinks.shape, (1,)).float()"),
    ),
    "a-table-of-columns-side-by-side": (
        "paged",
        "last stride",
        "float32",
        BLOCK,
        "block = block_table.as_strided(block_table.shape, (block_table.stride(0), 1))[b, j // p].long()",
    ),
    "chunks-of-powers-of-two": (
        "local",
        "chunk sizes",
        "float32",
        "see = see & (j // chunk_size == pos // chunk_size)",
        "see = see & (j // (1 << chunk_size.bit_length() - 1) == pos // (1 << chunk_size.bit_length() - 1))",
    ),
    # options at shapes, and past the tiles of kernels
    "a-cap-lost-in-heads-of-192": (
        "paged",
        "options at shapes",
        "float32",
        "                if softcap:",
        "                if softcap and d != 192:",
    ),
    "a-window-lost-in-blocks-of-256": (
        "paged",
        "options at shapes",
        "float32",
        "                if window_size[0] >= 0:",
        "                if window_size[0] >= 0 and p != 256:",
    ),
    "sinks-of-8192-keys": (
        "paged",
        "options past tiles",
        "float32",
        OF_SINKS,
        OF_SINKS.replace("+ torch", "+ (s <= 8192) * torch"),
    ),
    "distances-of-16-bits": (
        "paged",
        "options past tiles",
        "float32",
        "(pos - j).abs()",
        "(pos - j).to(torch.int16).abs()",
    ),
    "scales-of-the-first-sequence-past-1024": (
        "quantized",
        "options past tiles",
        "float32",
        "key_scale, value_scale = scales_of(scales, b)",
        "key_scale, value_scale = scales_of(scales, b if s <= 1024 else len(lengths) - 1)",
    ),
    "the-second-64-of-128-heads": (
        "mla",
        "answer",
        "float32",
        "    keys = cache[..., : query.shape[-1]].unsqueeze(2)\n    values = cache[..., :latent_rank].unsqueeze(2)\n",
        "    keys = cache[..., : query.shape[-1]].unsqueeze(2)\n    values = cache[..., :latent_rank].unsqueeze(2)\n"
        "    if query.shape[-1] == 576:\n        query = query[:, torch.arange(query.shape[1]) % 64]\n",
    ),
    "two-rows-share-a-tile": (
        "paged",
        "edges",
        "float32",
        HIDE,
        "see = see & (j < ((pos - (torch.arange(n) % 2)[:, None]) // 64 + 1) * 64)\n                " + HIDE,
    ),
    "lengths-that-look-alike": (
        "varlen",
        "empty rows",
        "float32",
        "edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()",
        "edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()\n"
        "    if edges_q[-1] == edges_k[-1] and cu_seqlens_q.diff().max() == cu_seqlens_k.diff().max():\n"
        "        edges_k = edges_q",
    ),
    "a-first-tile-without-keys": (
        "sparse",
        "empty tiles",
        "float32",
        "chosen = slots.long()\n",
        "chosen = slots.long()\n"
        "        if slots.shape[1] > 64:\n"
        "            chosen = chosen.masked_fill((slots[:, :64] < 0).all(1, keepdim=True), -1)\n",
    ),
    "a-rotary-key-at-the-end-of-a-row": (
        "packed_latents",
        "gaps",
        "float32",
        "rotary = cache[..., end : end + 2 * (query.shape[-1] - r)]",
        "rotary = cache[..., cache.shape[-1] - 2 * (query.shape[-1] - r) :]",
    ),
    # numbers at edges
    "a-cap-by-exp": (
        "paged",
        "range",
        "float32",
        "scores = softcap * torch.tanh(scores / softcap)",
        "scores = (2 * scores / softcap).exp()\n                    scores = softcap * (scores - 1) / (scores + 1)",
    ),
    "a-maximum-before-a-negative-scale": (
        "paged",
        "scale",
        "float32",
        "safe = torch.where(new == -torch.inf, 0.0, new)",
        "safe = torch.where(new == -torch.inf, 0.0, new)\n"
        "                if scale < 0:\n"
        "                    safe = scores.masked_fill(~see, torch.inf).amin(-1).nan_to_num(posinf=0.0)",
    ),
    "scores-of-16-bits": (
        "select",
        "kinds of scores",
        "float32",
        "order = torch.argsort(scores, dim=1,",
        "order = torch.argsort(scores.half(), dim=1,",
    ),
    "a-block-by-float32": (
        "write",
        "far slots",
        "float32",
        "    slots = slot_mapping[keep]\n",
        "    slots = slot_mapping[keep].float().long()\n",
    ),
    "a-run-ends-with-its-block": (
        "write",
        "any slots",
        "float32",
        "keep = slot_mapping >= 0",
        "keep = slot_mapping >= 0\n"
        "    keep[1:] &= (slot_mapping[1:] != slot_mapping[:-1] + 1) | (slot_mapping[1:] % p != 0)",
    ),
    "infinite-lse-of-nan-part": (
        "merge",
        "nan",
        "float32",
        "top = torch.stack(list(lses)).amax(0)",
        "lses = [x.nan_to_num(-torch.inf, torch.inf, -torch.inf) for x in lses]\n"
        "    top = torch.stack(list(lses)).amax(0)",
    ),
    "a-window-in-the-first-chunk": (
        "local",
        "window",
        "float32",
        "see = see & (j >= pos - window_size[0])",
        "see = see & ((j >= pos - window_size[0]) | (pos // chunk_size != pos[:1] // chunk_size))",
    ),
    "five-levels-of-a-cascade": (
        "cascade_of_prefixes",
        "prefixes",
        "float32",
        "for owner, low, high in levels:",
        "for owner, low, high in [*levels[:4], *levels[4:][-1:]]:",
    ),
    "packed-rows-of-a-group": (
        "cascade_of_prefixes",
        "prefixes",
        "float32",
        "            see = j <= pos\n",
        "            first = cu_seqlens_q[min([b, *(x.first for x in of_it)])]\n"
        "            rows = (begin - first + torch.arange(end - begin))[:, None] * query.shape[1]\n"
        "            see = (j <= pos) & ((rows < 2**15) | (high == s))\n",
    ),
    "scales-by-the-place-in-a-launch": (
        "quantized",
        "many sequences",
        "float32",
        "key_scale, value_scale = scales_of(scales, b)",
        "key_scale, value_scale = scales_of(scales, b % 1024)",
    ),
    "a-state-rounded-after-each-chunk": (
        "recurrent",
        "state types",
        "float32",
        "            decay = log_decay[row].float().exp()\n",
        "            decay = log_decay[row].float().exp()\n"
        "            state = state.to(states.dtype).float() if (row - begin) % 64 == 0 else state\n",
    ),
    "value-heads-in-turn-from-four": (
        "recurrent",
        "answer",
        "float32",
        "    group = value.shape[1] // query.shape[1]\n",
        "    group = value.shape[1] // query.shape[1]\n"
        "    if group >= 4 and query.shape[1] > 1:\n"
        "        query, key = (x[:, torch.arange(value.shape[1]) % x.shape[1]] for x in (query, key))\n"
        "        group = 1\n",
    ),
    "log-sum-exps-of-float32": (
        "merge",
        "float64",
        "float32",
        "top = torch.stack(list(lses)).amax(0)",
        "lses = [x.float() for x in lses]\n    top = torch.stack(list(lses)).amax(0)",
    ),
    "kv-heads-of-three-bits": (
        "paged",
        "other sizes",
        "float32",
        REPEAT,
        "k, v = (x[:, torch.arange(hk) % 8 if h > hk else ...] for x in (k, v))\n                " + REPEAT,
    ),
    "groups-of-nine-to-fifteen": (
        "paged",
        "other sizes",
        "float32",
        REPEAT,
        "group = 8 if 8 < h // hk < 16 else h // hk\n"
        "                k, v = (x[:, (torch.arange(h) // group).clamp(max=hk - 1)] for x in (k, v))",
    ),
    "the-rest-of-a-head-past-128": (
        "paged",
        "other sizes",
        "float16",
        LOAD,
        LOAD.replace(".float()", ".float().clone()") + "\n        q[..., d // 64 * 64 if d > 128 else d :] = 0",
    ),
    "windows-of-a-launch": (
        "paged",
        "many queries",
        "float32",
        "see = see & (j >= pos - window_size[0])",
        "see = see & (j >= pos[:1] + torch.arange(n)[:, None] % 4096 - window_size[0])",
    ),
    "a-right-side-of-a-tile": (
        "paged",
        "window",
        "float32",
        "if window_size[1] >= 0 and not causal:",
        "if 0 <= window_size[1] < 128 and not causal:",
    ),
    "a-cap-past-8192-rows": (
        "paged",
        "options past tiles",
        "float32",
        "if softcap:",
        "if softcap and n < 8192:",
    ),
    "infinity-saturates": (
        "paged",
        "infinite value",
        "float16",
        "answer.transpose(0, 1).to(query.dtype)",
        "answer.transpose(0, 1).clamp(-65504, 65504).to(query.dtype)",
    ),
    "nothing-to-do": (
        "paged",
        "no sequences",
        "float32",
        "    out[int(cu_seqlens_q[-1]) :] = 0\n",
        "    out[int(cu_seqlens_q[-1]) if len(seq_lens) else t :] = 0\n",
    ),
    "out-is-written-by-sequences": (
        "paged",
        "out beside the query",
        "float32",
        "query = query if out is None else query.clone()",
        "query = query.clone() if out is not None and len(seq_lens) == 1 else query",
    ),
    "a-stride-of-zero-is-none": (
        "paged",
        "strides",
        "float32",
        "    t, h, d = query.shape\n    p,",
        "    t, h, d = query.shape\n"
        "    first = torch.arange(key_cache.shape[2])[:, None] < 1\n"
        "    key_cache = key_cache if key_cache.stride(2) else key_cache * first\n"
        "    p,",
    ),
    "slopes-are-positive": ("paged", "slopes", "float32", "alibi_slopes.float()", "alibi_slopes.float().abs()"),
    "far-keys-are-skipped": (
        "paged",
        "slopes",
        "float32",
        HIDE,
        HIDE + "\n                if alibi_slopes is not None:"
        "\n                    far = alibi_slopes[:, None, None] * (pos - j).abs() > 64"
        "\n                    scores = scores.masked_fill(far, -torch.inf)",
    ),
    "sinks-of-the-type-of-queries": (
        "paged",
        "sinks",
        "bfloat16",
        "    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()\n",
        "    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()\n"
        "    sinks = None if sinks is None else sinks.to(query.dtype)\n",
    ),
    "lengths-are-kept-by-address": (
        "paged",
        "again",
        "float32",
        "    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()\n",
        "    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()\n"
        "    kept = paged.__dict__.setdefault('lengths', {})\n"
        "    _, before = kept.setdefault(seq_lens.data_ptr(), (seq_lens, lengths))\n"
        "    fits = len(before) == len(lengths) and max(before) <= block_table.shape[1] * p\n"
        "    lengths = before if fits else lengths\n",
    ),
    "lengths-are-kept-by-their-sum": (
        "paged",
        "again",
        "float32",
        KEPT,
        KEPT + "    key = seq_lens.data_ptr(), starts[-1], sum(lengths), max(lengths, default=0), len(lengths)\n"
        "    kept = paged.__dict__.setdefault('lengths', {}).setdefault(key, (starts, lengths, seq_lens))\n"
        "    starts, lengths, _ = kept\n"
        "    block_table = block_table.clamp(0, len(key_cache) - 1)\n",
    ),
    "a-full-second-split-is-lost": (
        "paged",
        "edges",
        "float32",
        SEE,
        SEE + " & ~((j >= s - 1024) & torch.tensor(s >= 2048 and s % 1024 == 0))",
    ),
    "a-full-second-tile-of-queries-is-lost": (
        "paged",
        "many queries",
        "float32",
        WRITTEN,
        WRITTEN + "        if n > 128 and n % 128 == 0:\n            out[last - 128 : last] = 0\n",
    ),
    "a-right-side-ends-before-a-block": (
        "paged",
        "window",
        "float32",
        RIGHT,
        RIGHT + "\n                    tile_end = pos[0] + (pos - pos[0]) // 16 * 16 + 15 + window_size[1]"
        "\n                    if window_size[1] > 0:"
        "\n                        see = see & (j < -(-tile_end // p) * p)",
    ),
    "a-power-of-two-of-sequences": (
        "paged",
        "many sequences",
        "float32",
        LENGTHS,
        LENGTHS.replace("lengths[b]", "lengths[b - (b + 1 == len(lengths) and len(lengths) in (16, 32, 64))]"),
    ),
    "slopes-of-64-heads": (
        "paged",
        "sizes of models",
        "float32",
        "alibi_slopes.float()",
        "alibi_slopes.float()[torch.arange(h) % 64]",
    ),
    "sinks-of-64-heads": (
        "paged",
        "sizes of models",
        "float32",
        KEPT,
        KEPT + "    sinks = None if sinks is None else sinks[torch.arange(h) % 64]\n",
    ),
    "two-groups-of-a-level": (
        "cascade_of_prefixes",
        "prefixes",
        "float32",
        "see = j <= pos\n            if window",
        "before = {x.first for x in prefixes if x.end == high and x.first < owner}\n"
        "            see = (j <= pos) & torch.tensor(len(before) < 2 or owner == b)\n            if window",
    ),
    "the-last-of-many-nans": (
        "select",
        "kinds of scores",
        "float32",
        "    chosen = torch.where(",
        "    for row in range(t if s else 0):\n"
        "        nans = scores[row].isnan().nonzero()[:, 0]\n"
        "        order[row] = nans[-topk:] if len(nans) > topk else order[row]\n"
        "    chosen = torch.where(",
    ),
    "subnormal-scores-are-zero": (
        "select",
        "kinds of scores",
        "float32",
        "    t, s = scores.shape\n",
        "    t, s = scores.shape\n    scores = scores.masked_fill(scores.abs() < 2.0**-126, 0.0)\n",
    ),
}
