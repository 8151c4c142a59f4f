"""Mistakes to plant into source: how, and those for `by_hand.py`. mutations.py has those for the twins themselves.

The kernel, what the kit should call the mistake, the property that finds it, the line, and the line with the mistake.
"""

from pathlib import Path


def replace_lines(source: str, old: str | tuple[str, ...], new: str | tuple[str, ...], file: str) -> str:
    """Replace text of a source file by other text, each piece of which must be there exactly once."""
    for before, after in zip(*((x,) if isinstance(x, str) else x for x in (old, new)), strict=True):
        count = source.count(before)
        assert count == 1, f"{file} has {before!r} {count} times, not once"
        source = source.replace(before, after)
    return source


SOURCE = Path(__file__).with_name("by_hand.py").read_text()


def plant(name, old, new, **numbers):
    """Return a kernel by hand with some of its lines replaced, and the numbers of its file, as TILE."""
    source = replace_lines(SOURCE, old, new, "by_hand.py")
    names = {"__name__": "planted"}
    exec(compile(source, "planted", "exec"), names)
    names.update(numbers)
    return names[name]


TILES = "range(begin, min(begin + SPLIT, s), TILE)"
SPLITS, SPLITS_OF_BLOCKS = "range(0, max(s, 1), SPLIT)", "range(0, max(-(-s // p) * p, 1), SPLIT)"
TILES_OF_BLOCKS = "range(begin, min(begin + SPLIT, -(-s // p) * p), TILE)"
TILE_END = "end = min(tile + TILE, s, begin + SPLIT)"
WHOLE_BLOCKS = "end = min(tile + TILE, -(-s // p) * p, begin + SPLIT)"
HIDE = "scores = scores.masked_fill(~see, -torch.inf)"
ALIBI = "if alibi_slopes is not None:"
UNSEEN_VALUES = "v = v.masked_fill(~see.any(0)[:, None, None], 0.0)"

PLANTED = [
    # who may see whom
    ("paged", "causal-top-left", "mask", "pos = torch.arange(s - n, s)[:, None]", "pos = torch.arange(n)[:, None]"),
    (
        "paged",
        "causal-padded",
        "mask",
        "pos = torch.arange(s - n, s)[:, None]",
        "pos = torch.arange(n)[:, None] + max(lengths) - n",
    ),
    (
        "paged",
        "causal-max-query",
        "mask",
        "pos = torch.arange(s - n, s)[:, None]",
        "pos = torch.arange(n)[:, None] + s - max_query_len",
    ),
    ("paged", "causal-sees-next", "mask", "see = see & (j <= pos)", "see = see & (j <= pos + 1)"),
    ("paged", "causal-hides-itself", "mask", "see = see & (j <= pos)", "see = see & (j < pos)"),
    ("paged", "causal-ignored", "mask", "                if causal:", "                if False:"),
    ("paged", "causal-always", "not causal", "                if causal:", "                if True:"),
    ("paged", "window-one-too-many", "window", "j >= pos - window_size[0]", "j >= pos - window_size[0] - 1"),
    ("paged", "window-one-too-few", "window", "j >= pos - window_size[0]", "j > pos - window_size[0]"),
    ("paged", "window-ignored", "window", "if window_size[0] >= 0:", "if window_size[0] > 1000:"),
    ("paged", "window-of-sequence", "window", "j >= pos - window_size[0]", "j >= s - 1 - window_size[0]"),
    ("paged", "window-of-first-query", "window", "j >= pos - window_size[0]", "j >= s - n - window_size[0]"),
    ("paged", "window-top-left", "window", "j >= pos - window_size[0]", "j >= pos - (s - n) - window_size[0]"),
    ("paged", "window-right-ignored", "window", "if window_size[1] >= 0 and not causal:", "if False:"),
    ("paged", "window-right-zero", "window", "j <= pos + window_size[1]", "j <= pos"),
    (
        "sliding_window",
        "window-of-blocks",
        "mask",
        "j >= pos - window_size[0]",
        "j // p >= (pos - window_size[0]) // p",
    ),
    ("local", "chunk-ignored", "mask", "if chunk_size:", "if False:"),
    ("local", "chunk-as-window", "mask", "j // chunk_size == pos // chunk_size", "j > pos - chunk_size"),
    (
        "local",
        "chunk-from-first-query",
        "mask",
        "j // chunk_size == pos // chunk_size",
        "(j - s + n) // chunk_size == (pos - s + n) // chunk_size",
    ),
    (
        "local",
        "chunk-one-early",
        "mask",
        "j // chunk_size == pos // chunk_size",
        "(j + 1) // chunk_size == (pos + 1) // chunk_size",
    ),
    (
        "local",
        "chunk-of-last-query",
        "mask",
        "j // chunk_size == pos // chunk_size",
        "j // chunk_size == (s - 1) // chunk_size",
    ),
    (
        "paged",
        "first-key-dropped",
        "mask",
        "see = torch.ones(n, len(j), dtype=torch.bool)",
        "see = (j > 0).expand(n, -1)",
    ),
    (
        "paged",
        "last-key-dropped",
        "mask",
        "see = torch.ones(n, len(j), dtype=torch.bool)",
        "see = (j < s - 1).expand(n, -1)",
    ),
    (
        "paged",
        "new-tokens-unseen",
        "mask",
        "see = torch.ones(n, len(j), dtype=torch.bool)",
        "see = (j < s - n).expand(n, -1)",
    ),
    # where the keys are
    ("paged", "table-ignored", "mask", "block = block_table[b, j // p].long()", "block = j // p"),
    (
        "paged",
        "table-of-first",
        "mask",
        "block = block_table[b, j // p].long()",
        "block = block_table[0, j // p].long()",
    ),
    (
        "paged",
        "table-one-column-late",
        "mask",
        "block = block_table[b, j // p].long()",
        "block = block_table[b, (j // p + 1).clamp(max=block_table.shape[1] - 1)].long()",
    ),
    (
        "paged",
        "first-block-only",
        "mask",
        "block = block_table[b, j // p].long()",
        "block = block_table[b, j * 0].long()",
    ),
    (
        "paged",
        "last-block-dropped",
        "mask",
        "see = torch.ones(n, len(j), dtype=torch.bool)",
        "see = (j < s // p * p).expand(n, -1)",
    ),
    ("paged", "values-are-keys", "mask", "v = value_cache[block, j % p]", "v = key_cache[block, j % p]"),
    ("paged", "values-in-order", "mask", "v = value_cache[block, j % p]", "v = value_cache[j // p, j % p]"),
    (
        "paged",
        "block-for-slot",
        "mask",
        "k = key_cache[block, j % p].float() * key_scale\n                v = value_cache[block, j % p]",
        "k = key_cache.flatten(0, 1)[block + j % p].float()\n                v = value_cache.flatten(0, 1)[block + j % p]",
    ),
    (
        "paged",
        "strides-assumed",
        "strides",
        "p, hk, dv =",
        "query = query.as_strided(query.shape, (h * d, d, 1))\n    p, hk, dv =",
    ),
    # heads
    (
        "paged",
        "groups-interleaved",
        "answer",
        "k = k.repeat_interleave(h // hk, dim=1)\n                v = v.repeat_interleave(h // hk, dim=1)",
        "k, v = k.repeat(1, h // hk, 1), v.repeat(1, h // hk, 1)",
    ),
    (
        "paged",
        "first-key-head",
        "answer",
        "k = k.repeat_interleave(h // hk, dim=1)\n                v = v.repeat_interleave(h // hk, dim=1)",
        "k, v = k[:, :1].expand(-1, h, -1), v[:, :1].expand(-1, h, -1)",
    ),
    (
        "varlen",
        "groups-interleaved",
        "answer",
        ("k[:, head // group]", "v[:, head // group]"),
        ("k[:, head % k.shape[1]]", "v[:, head % k.shape[1]]"),
    ),
    # scores
    ("paged", "scale-missing", "answer", "q, k) * scale", "q, k)"),
    ("paged", "scale-fixed", "scale", "scale = d**-0.5 if softmax_scale is None else softmax_scale", "scale = d**-0.5"),
    (
        "paged",
        "scale-zero-is-default",
        "scale",
        "d**-0.5 if softmax_scale is None else softmax_scale",
        "softmax_scale or d**-0.5",
    ),
    ("paged", "scale-twice", "answer", "q, k) * scale", "q, k) * scale * scale"),
    ("paged", "softcap-ignored", "softcap", "if softcap:", "if False:"),
    (
        "paged",
        "softcap-unscaled",
        "softcap",
        'torch.einsum("thd,jhd->htj", q, k) * scale\n                if softcap:\n                    scores = softcap * torch.tanh(scores / softcap)',
        'torch.einsum("thd,jhd->htj", q, k)\n                if softcap:\n                    scores = softcap * torch.tanh(scores / softcap)\n                scores = scores * scale',
    ),
    (
        "paged",
        "softcap-without-factor",
        "softcap",
        "softcap * torch.tanh(scores / softcap)",
        "torch.tanh(scores / softcap)",
    ),
    (
        "paged",
        "softcap-unmasks",
        "softcap",
        (HIDE, UNSEEN_VALUES),
        (
            "scores = scores.masked_fill(~see, -softcap if softcap else -torch.inf)",
            "v = v if softcap else v.masked_fill(~see.any(0)[:, None, None], 0.0)",
        ),
    ),
    ("paged", "alibi-ignored", "alibi", "if alibi_slopes is not None:", "if False:"),
    ("paged", "alibi-added", "alibi", "scores = scores - alibi_slopes", "scores = scores + alibi_slopes"),
    (
        "paged",
        "alibi-relative",
        "alibi",
        "alibi_slopes[:, None, None] * (pos - j).abs()",
        "alibi_slopes[:, None, None] * -j",
    ),
    ("paged", "alibi-top-left", "alibi", "(pos - j).abs()", "(pos - s + n - j).abs()"),
    # two options at once, and how a kernel is called
    ("paged", "alibi-signed", "together", "(pos - j).abs()", "(pos - j)"),
    (
        "paged",
        "alibi-from-window",
        "together",
        "alibi_slopes[:, None, None] * (pos - j).abs()",
        "alibi_slopes[:, None, None] * ((pos - j).abs() - max(0, window_size[0]))",
    ),
    (
        "paged",
        "window-right-beats-causal",
        "together",
        ("                if causal:", "if window_size[1] >= 0 and not causal:"),
        (
            "                if causal and window_size[1] <= 0:",
            "if window_size[1] >= 0 and (window_size[1] > 0 or not causal):",
        ),
    ),
    ("paged", "alibi-lost-under-a-window", "together", ALIBI, "if alibi_slopes is not None and window_size[0] < 0:"),
    ("paged", "softcap-lost-without-causal", "together", "if softcap:", "if softcap and causal:"),
    ("paged", "softcap-lost-beside-alibi", "together", "if softcap:", "if softcap and alibi_slopes is None:"),
    (
        "paged",
        "scale-lost-beside-sinks",
        "together",
        "scale = d**-0.5 if softmax_scale is None else",
        "scale = d**-0.5 if softmax_scale is None or sinks is not None else",
    ),
    (
        "paged",
        "window-lost-beside-a-softcap",
        "together",
        ("if window_size[0] >= 0:", "if window_size[1] >= 0 and not causal:"),
        ("if window_size[0] >= 0 and not softcap:", "if window_size[1] >= 0 and not causal and not softcap:"),
    ),
    (
        "paged",
        "sinks-lost-under-a-window",
        "together",
        "p, hk, dv =",
        "sinks = sinks if window_size[0] < 0 else None\n    p, hk, dv =",
    ),
    (
        "paged",
        "values-by-strides-of-keys",
        "strides",
        "v = value_cache[block, j % p]",
        "v = value_cache.as_strided(value_cache.shape, key_cache.stride())[block, j % p]",
    ),
    (
        "paged",
        "prefix-taken-too-long",
        "shared blocks",
        "block = block_table[b, j // p].long()",
        "same = b and lengths[b - 1] >= s and block_table[b, 0] == block_table[b - 1, 0]\n"
        "                other = (j // p < (s - n) // p) & bool(same)\n"
        "                block = block_table[torch.where(other, b - 1, b), j // p].long()",
    ),
    (
        "paged",
        "sinks-not-in-maximum",
        "range",
        "whole = torch.maximum(whole, sinks.float()[:, None].expand_as(whole))",
        "pass",
    ),
    # softmax and splits
    (
        "paged",
        "no-maximum",
        "range",
        "safe = torch.where(new == -torch.inf, 0.0, new)",
        "new = safe = torch.zeros_like(new)",
    ),
    (
        "paged",
        "not-normalized",
        "mask",
        "acc / total[..., None])\n        out[first:last]",
        "acc)\n        out[first:last]",
    ),
    ("paged", "not-rescaled", "answer", "acc = acc * shrink[..., None] + ", "acc = acc + "),
    (
        "paged",
        "last-split-dropped",
        "many keys",
        "whole = torch.stack([part[2] for part in parts]).amax(0)",
        "parts = parts[:-1] or parts\n        whole = torch.stack([part[2] for part in parts]).amax(0)",
    ),
    # sinks
    ("paged", "sinks-ignored", "sinks", "total = total + torch.exp(sinks.float()[:, None] - whole)", "pass"),
    (
        "paged",
        "sinks-of-every-split",
        "sinks",
        "total = total + torch.exp(sinks.float()[:, None] - whole)",
        "total = total + len(parts) * torch.exp(sinks.float()[:, None] - whole)",
    ),
    (
        "paged",
        "sinks-scaled",
        "sinks",
        "total = total + torch.exp(sinks.float()[:, None] - whole)",
        "total = total + torch.exp(scale * sinks.float()[:, None] - whole)",
    ),
    (
        "paged",
        "sinks-not-shifted",
        "sinks",
        "total = total + torch.exp(sinks.float()[:, None] - whole)",
        "total = total + torch.exp(sinks.float()[:, None])",
    ),
    (
        "paged",
        "sinks-of-first-head",
        "sinks",
        "torch.exp(sinks.float()[:, None] - whole)",
        "torch.exp(sinks.float()[:1, None] - whole)",
    ),
    # log-sum-exp
    ("paged", "lse-base-two", "lse", "torch.log(total) + whole).T", "(torch.log(total) + whole) * LOG2E).T"),
    ("paged", "lse-of-base-two-scores", "lse", "torch.log(total) + whole).T", "(torch.log(total) + whole) / LOG2E).T"),
    (
        "paged",
        "lse-transposed",
        "lse",
        "return (out, lse) if return_lse else out\n\n\ndef varlen",
        "return (out, lse.T.contiguous().view(t, h)) if return_lse else out\n\n\ndef varlen",
    ),
    ("paged", "lse-without-maximum", "lse", "torch.log(total) + whole).T", "torch.log(total)).T"),
    ("paged", "lse-is-maximum", "lse", "torch.log(total) + whole).T", "whole).T"),
    ("paged", "lse-is-sum", "lse", "torch.log(total) + whole).T", "total).T"),
    # rows that see nothing
    (
        "paged",
        "empty-is-nan",
        "empty rows",
        "torch.where(empty[..., None], 0.0, acc / total[..., None])",
        "acc / total[..., None]",
    ),
    ("paged", "empty-lse", "empty rows", "torch.where(empty, -torch.inf,", "torch.where(empty, 0.0,"),
    ("paged", "empty-unwritten", "empty rows", "if n == 0:", "if n == 0 or s == 0:"),
    # memory that no query may see
    (
        "paged",
        "past-the-end",
        "mask",
        (SPLITS, TILES, TILE_END, UNSEEN_VALUES),
        (SPLITS_OF_BLOCKS, TILES_OF_BLOCKS, WHOLE_BLOCKS, "see = see | (j >= s)\n                " + UNSEEN_VALUES),
    ),
    (
        "paged",
        "zero-times-nan",
        "tail",
        (TILES, TILE_END, HIDE, UNSEEN_VALUES),
        (TILES_OF_BLOCKS, WHOLE_BLOCKS, "see = see & (j < s)\n                " + HIDE, "pass"),
    ),
    ("sliding_window", "hidden-times-nan", "outside the window", UNSEEN_VALUES, "pass"),
    ("paged", "padding-unwritten", "padding", "out[int(cu_seqlens_q[-1]) :] = 0", "pass"),
    ("paged", "nan-hidden", "nan", "out[first:last] = answer.", "out[first:last] = answer.nan_to_num(0.0)."),
    # cascade
    (
        "cascade",
        "prefix-dropped",
        "mask",
        "    out, lse = merge([shared[0].float(), own[0].float()], [shared[1], own[1]])",
        "    out, lse = own",
    ),
    (
        "cascade",
        "own-keys-dropped",
        "mask",
        "    out, lse = merge([shared[0].float(), own[0].float()], [shared[1], own[1]])",
        "    out, lse = shared",
    ),
    (
        "cascade",
        "levels-averaged",
        "mask",
        "    out, lse = merge([shared[0].float(), own[0].float()], [shared[1], own[1]])",
        "    out, lse = merge([shared[0].float(), own[0].float()], [shared[1], own[1]])\n    out = (shared[0].float() + own[0].float()) / 2",
    ),
    (
        "cascade",
        "levels-merged-base-two",
        "mask",
        "[shared[1], own[1]])",
        "[shared[1] * LOG2E, own[1] * LOG2E])\n    lse = lse / LOG2E",
    ),
    (
        "cascade_of_prefixes",
        "prefix-of-everyone",
        "prefixes",
        "[x for x in prefixes if x.first <= b < x.last]",
        "prefixes[:1]",
    ),
    (
        "cascade_of_prefixes",
        "keys-between-prefixes-lost",
        "prefixes",
        "for owner, low, high in levels:",
        "for owner, low, high in [*levels[:1], *levels[1:][-1:]]:",
    ),
    (
        "cascade_of_prefixes",
        "window-ignored-in-shared-level",
        "window",
        "            if window_size[0] > -1:\n                see = see & (pos",
        "            if window_size[0] > -1 and high == s:\n                see = see & (pos",
    ),
    (
        "cascade_of_prefixes",
        "sinks-of-every-level",
        "sinks",
        "parts.append((torch.zeros_like(parts[0][0]), sinks.float().expand(end - begin, -1)))",
        "parts += len(parts) * [(torch.zeros_like(parts[0][0]), sinks.float().expand(end - begin, -1))]",
    ),
    # trees
    (
        "speculative",
        "window-by-slot",
        "window",
        "*(context + depth for depth in depths)",
        "*range(context, context + n)",
    ),
    (
        "speculative",
        "window-ignored",
        "window",
        "see = see & (stands[context:, None] - stands <= window_size[0])",
        "pass",
    ),
    (
        "speculative",
        "ancestors-in-one-word",
        "large trees",
        ("1 << node)", "word >> node & 1"),
        ("1 << node % 32)", "word >> node % 32 & 1"),
    ),
    (
        "speculative",
        "branch-past-a-count",
        "large trees",
        "        see = torch.cat([torch.ones(n, context",
        "        deep = torch.tensor(depths)\n        tree = tree & (deep[:, None] - deep <= 16)\n"
        "        see = torch.cat([torch.ones(n, context",
    ),
    (
        "speculative",
        "tree-of-the-queries",
        "growing trees",
        "        stands = torch.tensor([*range(context)",
        "        see[:, context : context + n - end + begin] = True\n        stands = torch.tensor([*range(context)",
    ),
    # latents
    (
        "mla",
        "row-padded",
        "gaps",
        "keys = cache[..., : query.shape[-1]].unsqueeze(2)",
        "query = torch.nn.functional.pad(query, (0, cache.shape[-1] - query.shape[-1]))\n    keys = cache.unsqueeze(2)",
    ),
    (
        "mla",
        "rank-fixed",
        "answer",
        "values = cache[..., :latent_rank].unsqueeze(2)",
        "values = torch.nn.functional.pad(cache[..., :64], (0, latent_rank - 64)).unsqueeze(2)",
    ),
    (
        "mla",
        "rotary-dropped",
        "answer",
        "keys = cache[..., : query.shape[-1]].unsqueeze(2)",
        "query = query[..., :latent_rank]\n    keys = cache[..., :latent_rank].unsqueeze(2)",
    ),
    ("mla", "scale-fixed", "answer", "*batch, softmax_scale=softmax_scale,", "*batch,"),
    (
        "mla",
        "values-from-the-end",
        "mask",
        "cache[..., :latent_rank].unsqueeze(2)",
        "cache[..., query.shape[-1] - latent_rank : query.shape[-1]].unsqueeze(2)",
    ),
    # quantized caches
    (
        "quantized",
        "key-scale-ignored",
        "scales",
        "k_scale, v_scale = scales.key, scales.value",
        "k_scale, v_scale = 1.0, scales.value",
    ),
    (
        "quantized",
        "value-scale-ignored",
        "scales",
        "k_scale, v_scale = scales.key, scales.value",
        "k_scale, v_scale = scales.key, 1.0",
    ),
    (
        "quantized",
        "scales-swapped",
        "scales",
        "k_scale, v_scale = scales.key, scales.value",
        "v_scale, k_scale = scales.key, scales.value",
    ),
    (
        "quantized",
        "key-scale-for-both",
        "scales",
        "k_scale, v_scale = scales.key, scales.value",
        "k_scale, v_scale = scales.key, scales.key",
    ),
    (
        "quantized",
        "format-ignored",
        "format",
        "return paged(query, key_cache, value_cache, *batch, scales=scales",
        "caches = [x.view(torch.float8_e4m3fn) for x in (key_cache, value_cache)]\n"
        "    return paged(query, *caches, *batch, scales=scales",
    ),
    (
        "quantized",
        "key-scale-after-softcap",
        "softcap",
        "softcap=softcap, sinks",
        "softcap=softcap * scales.key, sinks",
    ),
    (
        "quantized",
        "sinks-under-key-scale",
        "sinks",
        "sinks=sinks, return_lse",
        "sinks=None if sinks is None else sinks * scales.key, return_lse",
    ),
    (
        "quantized",
        "scale-of-first-head",
        "scales per head",
        "(x[b] if x.ndim == 2 else x)[:, None]",
        "x.flatten()[0]",
    ),
    ("quantized", "scale-of-first-sequence", "scales per sequence", "(x[b] if x.ndim", "(x[0] if x.ndim"),
    # differential
    ("differential", "not-subtracted", "answer", "first - lambda_full * second", "first"),
    ("differential", "lambda-ignored", "answer", "first - lambda_full * second", "first - second"),
    (
        "differential",
        "lambda-not-below-zero",
        "answer",
        "first - lambda_full * second",
        "first - lambda_full.clamp(min=0) * second",
    ),
    ("differential", "lambda-added", "answer", "first - lambda_full * second", "first + lambda_full * second"),
    (
        "differential",
        "lambda-init-for-lambda",
        "answer",
        "first - lambda_full * second",
        "first - lambda_init * second",
    ),
    (
        "differential",
        "not-normed",
        "answer",
        "x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm_eps)",
        "x = x * 1",
    ),
    ("differential", "factor-missing", "answer", "x = x * (1 - lambda_init)", "x = x * 1"),
    ("differential", "norm-weight-ignored", "answer", "x = x * norm_weight.float()", "x = x * 1"),
    (
        "differential",
        "value-of-first-half",
        "answer",
        "torch.cat([cache[0, 1], cache[1, 1]], dim=-1)",
        "torch.cat([cache[0, 1], cache[0, 1]], dim=-1)",
    ),
    # merge
    ("merge", "merge-base-two", "answer", "weight = torch.exp(lse - base)", "weight = torch.exp2(lse - base)"),
    (
        "merge",
        "merge-averages",
        "answer",
        "return (acc / safe[..., None]).to(outs[0].dtype)",
        "return (sum(x.float() for x in outs) / len(outs)).to(outs[0].dtype)",
    ),
    ("merge", "merge-not-normalized", "answer", "return (acc / safe[..., None]).to", "return acc.to"),
    ("merge", "merge-empty-is-nan", "empty parts", "base = torch.where(top == -torch.inf, 0.0, top)", "base = top"),
    (
        "merge",
        "merge-garbage-times-zero",
        "empty parts",
        "torch.where((weight == 0)[..., None], 0.0, out.float() * weight[..., None])",
        "out.float() * weight[..., None]",
    ),
    ("merge", "merge-lse-is-maximum", "lse", "torch.log(total) + base", "top"),
    ("merge", "merge-two-parts", "answer", "zip(outs, lses, strict=True)", "zip(outs[:2], lses[:2], strict=True)"),
    (
        "merge",
        "merge-overflows",
        "range",
        "base = torch.where(top == -torch.inf, 0.0, top)",
        "base = torch.zeros_like(top)",
    ),
    (
        "merge",
        "merge-parts-past-a-count",
        "many parts",
        "zip(outs, lses, strict=True)",
        "zip(outs[:64], lses[:64], strict=True)",
    ),
    (
        "merge",
        "merge-rows-past-a-count",
        "many sequences",
        "return (acc / safe",
        "acc[128:] = 0\n    return (acc / safe",
    ),
    # writes
    (
        "write",
        "padding-ends",
        "holes",
        "keep = slot_mapping >= 0",
        "keep = (slot_mapping >= 0).long().cumprod(0).bool()",
    ),
    (
        "write",
        "tokens-by-slot",
        "holes",
        ("    key_cache[slots // p, slots % p] = key[keep]", "    value_cache[slots // p, slots % p] = value[keep]"),
        (
            "    key_cache[slots // p, slots % p] = key[: len(slots)]",
            "    value_cache[slots // p, slots % p] = value[: len(slots)]",
        ),
    ),
    (
        "write",
        "tokens-past-a-count",
        "many sequences",
        "keep = slot_mapping >= 0",
        "keep = (slot_mapping >= 0) & (torch.arange(len(slot_mapping)) < 128)",
    ),
    (
        "write",
        "slot-of-sixteen-bits",
        "many slots",
        "slots = slot_mapping[keep]",
        "slots = slot_mapping[keep].to(torch.int16).long()",
    ),
    ("write", "padding-writes-last", "padding", "keep = slot_mapping >= 0", "keep = slot_mapping >= -1"),
    (
        "write",
        "keys-for-values",
        "answer",
        "value_cache[slots // p, slots % p] = value[keep]",
        "value_cache[slots // p, slots % p] = key[keep]",
    ),
    ("write", "values-unwritten", "answer", "value_cache[slots // p, slots % p] = value[keep]", "pass"),
    (
        "write",
        "slot-one-late",
        "answer",
        "slots = slot_mapping[keep]",
        "slots = (slot_mapping[keep] + 1).clamp(max=key_cache.shape[0] * p - 1)",
    ),
    (
        "write",
        "last-token-unwritten",
        "answer",
        "keep = slot_mapping >= 0",
        "keep = slot_mapping >= 0\n    keep[keep.nonzero()[-1]] = False",
    ),
    (
        "write",
        "first-head-only",
        "answer",
        "key_cache[slots // p, slots % p] = key[keep]\n    value_cache[slots // p, slots % p] = value[keep]",
        "key_cache[slots // p, slots % p, 0] = key[keep][:, 0]\n    value_cache[slots // p, slots % p, 0] = value[keep][:, 0]",
    ),
    # intervals, and selected keys
    ("interval", "interval-end-hidden", "mask", "(low <= j) & (j <= high)", "(low <= j) & (j < high)"),
    ("interval", "interval-or", "mask", "(low <= j) & (j <= high)", "(low <= j) | (j <= high)"),
    (
        "interval",
        "interval-causal",
        "mask",
        "(low <= j) & (j <= high)",
        "(low <= j) & (j <= high) & (j <= (s + torch.arange(len(low)) - int(cu_seqlens_q[len(seen) + 1]))[:, None])",
    ),
    (
        "interval",
        "interval-of-first-query",
        "mask",
        "low, high = first_visible[:, None], last_visible[:, None]",
        "low, high = (x[min(int(cu_seqlens_q[len(seen)]), len(x) - 1)].expand(len(x))[:, None] for x in (first_visible, last_visible))",
    ),
    ("interval", "interval-wraps", "mask", "(low <= j)", "(low - 1 < j)"),
    ("sparse", "list-past-a-count", "many keys", "chosen = slots.long()", "chosen = slots.long()[:, :128]"),
    ("sparse", "listed-twice-counts-once", "listed twice", "mine).sum(1)", "mine).any(1)"),
    (
        "sparse",
        "minus-one-followed",
        "mask",
        "chosen.masked_fill(chosen < 0, -7)",
        "torch.where(chosen < 0, mine[0], chosen)",
    ),
    (
        "sparse",
        "minus-one-from-the-end",
        "mask",
        "chosen.masked_fill(chosen < 0, -7)",
        "torch.where(chosen < 0, mine[-1], chosen)",
    ),
    (
        "sparse",
        "minus-one-ends",
        "mask",
        "chosen.masked_fill(chosen < 0, -7)",
        "chosen.masked_fill((chosen < 0).cumsum(1) > 0, -7)",
    ),
    (
        "sparse_latents",
        "values-from-the-end",
        "mask",
        "cache[:, :, None, :latent_rank]",
        "cache[:, :, None, query.shape[-1] - latent_rank : query.shape[-1]]",
    ),
    (
        "packed_latents",
        "first-scale-for-all",
        "answer",
        "scales.repeat_interleave(128, -1)",
        "scales[..., :1]",
    ),
    ("packed_latents", "scales-of-sixteen-bits", "answer", "view(torch.float32)", "view(torch.float32).bfloat16()"),
    (
        "packed_latents",
        "scale-beside-its-group",
        "answer",
        "    quantized_values = cache[..., :r]",
        "    cache = torch.cat([*(cache[..., i : i + 128] for i in range(0, end, 132)), *(cache[..., i : i + 4] for i in range(128, end, 132)), cache[..., end:]], -1)\n"
        "    quantized_values = cache[..., :r]",
    ),
    (
        "packed_latents",
        "rows-too-short",
        "answer",
        "    quantized_values = cache[..., :r]",
        "    cache = cache.reshape(-1).as_strided(cache.shape, (cache.shape[1] * query.shape[-1], query.shape[-1], 1))\n"
        "    quantized_values = cache[..., :r]",
    ),
    (
        "packed_latents",
        "rotary-scaled",
        "rotary keys",
        "view(torch.bfloat16).float()",
        "view(torch.bfloat16) * scales[..., -1:]",
    ),
    (
        "packed_latents",
        "small-scales-are-zero",
        "group scales",
        "view(torch.float32)",
        "view(torch.float32)\n    scales = torch.where(scales < 2.0**-14, 0.0, scales)",
    ),
    (
        "packed_latents",
        "largest-codes-clipped",
        "largest codes",
        "float()\n    scales",
        "float().clamp(-240, 240)\n    scales",
    ),
    (
        "select",
        "ties-to-higher",
        "ties",
        "torch.argsort(scores, dim=1, descending=True, stable=True)",
        "s - 1 - torch.argsort(scores.flip(1), dim=1, descending=True, stable=True)",
    ),
    ("select", "position-of-sixteen-bits", "many scores", "torch.cat([chosen,", "torch.cat([chosen.short().long(),"),
    (
        "select",
        "no-key-selected",
        "few keys",
        "torch.where(scores.gather(1, order) != -torch.inf, order, -1)",
        "order",
    ),
    (
        "select",
        "zero-is-no-key",
        "ties",
        "torch.where(scores.gather(1, order) != -torch.inf, order, -1)",
        "torch.where(scores.gather(1, order) > 0, order, -1)",
    ),
    (
        "select",
        "negative-zero-below",
        "ties",
        "torch.argsort(scores, dim=1",
        "torch.argsort(torch.where((scores == 0) & scores.signbit(), -1e-30, scores), dim=1",
    ),
    (
        "select",
        "lowest-selected",
        "answer",
        "torch.argsort(scores, dim=1, descending=True, stable=True)",
        "torch.argsort(torch.where(scores == -torch.inf, torch.inf, scores), dim=1, stable=True)",
    ),
    # layers that keep a state
    (
        "recurrent",
        "context-decides",
        "beginnings",
        ("    cu_seqlens_q,\n    state_indices,", "if has_initial_state[i] else"),
        ("    cu_seqlens_q,\n    context_lens,\n    state_indices,", "if context_lens[i] > 0 else"),
    ),
    ("recurrent", "state-of-the-one-before", "answer", "if has_initial_state[i] else", "if True else"),
    (
        "recurrent",
        "states-cleared-first",
        "no tokens",
        "    q, k = (x.float()[:, torch.arange",
        "    states[state_indices.view(len(has_initial_state), -1)[~has_initial_state, 0].long()] = 0\n"
        "    q, k = (x.float()[:, torch.arange",
    ),
    (
        "recurrent",
        "states-strides-assumed",
        "strides",
        "    q, k = (x.float()[:, torch.arange",
        "    states = states.as_strided(states.shape, torch.empty(states.shape).stride())\n"
        "    q, k = (x.float()[:, torch.arange",
    ),
    (
        "recurrent",
        "sequences-past-a-count",
        "many sequences",
        "if slots[0] < 0 or begin == end:",
        "if slots[0] < 0 or begin == end or i >= 128:",
    ),
    ("recurrent", "scale-of-value", "sizes", "out[row] = scale *", "out[row] = value.shape[-1] ** -0.5 *"),
    (
        "recurrent",
        "beta-at-most-one",
        "answer",
        "beta[row].float()[:, None]",
        "beta[row].float().clamp(max=1)[:, None]",
    ),
    ("recurrent", "state-forgotten", "answer", "if has_initial_state[i] else", "if False else"),
    ("recurrent", "state-not-kept", "answer", "            states[slots[0]] = state", "            pass"),
    (
        "recurrent",
        "padding-is-slot-zero",
        "padding slot",
        "slots = state_indices[i].reshape(-1).tolist()",
        "slots = state_indices[i].clamp(min=0).reshape(-1).tolist()",
    ),
    ("recurrent", "padding-is-the-last-slot", "padding slot", "if slots[0] < 0 or begin == end", "if begin == end"),
    ("recurrent", "slot-zero-is-padding", "answer", "if slots[0] < 0 or", "if slots[0] <= 0 or"),
    (
        "recurrent",
        "drafts-not-rolled-back",
        "drafts",
        "slots[int(num_accepted[i]) - 1] if num_accepted is not None else slots[0]",
        "slots[0]",
    ),
    (
        "recurrent",
        "read-before-written",
        "answer",
        ("            state = state + torch.einsum", 'einsum("hvk,hk->hv", state, q[row])'),
        ("            before, state = state, state + torch.einsum", 'einsum("hvk,hk->hv", before, q[row])'),
    ),
    ("recurrent", "never-fades", "answer", "log_decay[row].float().exp()", "torch.ones_like(log_decay[row].float())"),
    ("recurrent", "value-added-whole", "answer", "if delta else 0.0", "if False else 0.0"),
    (
        "recurrent",
        "heads-interleaved",
        "answer",
        "torch.arange(value.shape[1]) // group",
        "torch.arange(value.shape[1]) % query.shape[1]",
    ),
    (
        "recurrent",
        "answers-before-it-fades",
        "answer",
        (
            "            decay = log_decay[row].float().exp()\n            state = state * decay.view(len(decay), 1, -1)\n",
            'seen = torch.einsum("hvk,hk->hv", state, k[row]) if delta else 0.0\n',
        ),
        (
            "",
            'seen = torch.einsum("hvk,hk->hv", state, k[row]) if delta else 0.0\n'
            "            decay = log_decay[row].float().exp()\n            state = state * decay.view(len(decay), 1, -1)\n",
        ),
    ),
    (
        "recurrent",
        "keys-before-values",
        "answer",
        ("states[start].float() if", "            states[slots[0]] = state"),
        ("states[start].float().mT if", "            states[slots[0]] = state.mT"),
    ),
    ("recurrent", "logarithm-of-two", "answer", "log_decay[row].float().exp()", "log_decay[row].float().exp2()"),
    ("recurrent", "values-fade", "decay per channel", "decay.view(len(decay), 1, -1)", "decay.view(len(decay), -1, 1)"),
    (
        "recurrent",
        "channels-fade-alike",
        "decay per channel",
        "decay.view(len(decay), 1, -1)",
        "decay.view(len(decay), 1, -1).mean(-1, keepdim=True)",
    ),
    (
        "recurrent",
        "state-between-chunks-lost",
        "chunks",
        ("        for row in range(begin, end):\n", "            decay = log_decay[row]"),
        (
            "        first = state\n        for row in range(begin, end):\n",
            "            state = state if (row - begin) % 64 else first\n            decay = log_decay[row]",
        ),
    ),
    (
        "paged",
        "groups-past-a-tile",
        "other sizes",
        "k = k.repeat_interleave(h // hk, dim=1)\n                v = v.repeat_interleave(h // hk, dim=1)",
        "heads = (torch.arange(h) // min(h // hk, 4)).clamp(max=hk - 1)\n                k, v = k[:, heads], v[:, heads]",
    ),
    (
        "paged",
        "kv-heads-wrap",
        "answer",
        "k = k.repeat_interleave(h // hk, dim=1)\n                v = v.repeat_interleave(h // hk, dim=1)",
        "heads = (torch.arange(h) // (h // hk)) % 8\n                k, v = k[:, heads], v[:, heads]",
    ),
    (
        "paged",
        "part-of-head-dropped",
        "other sizes",
        'torch.einsum("thd,jhd->htj", q, k) * scale',
        'torch.einsum("thd,jhd->htj", q[..., : d // 32 * 32], k[..., : d // 32 * 32]) * scale',
    ),
    ("paged", "window-right-past-a-tile", "window", "if window_size[1] >= 0 and", "if 0 <= window_size[1] < 128 and"),
    ("paged", "alibi-of-positive-slopes", "slopes", "alibi_slopes.float()", "alibi_slopes.float().abs()"),
    (
        "paged",
        "alibi-hides-far-keys",
        "slopes",
        "scores = scores.masked_fill(~see, -torch.inf)",
        "far = 0.0 if alibi_slopes is None else alibi_slopes[:, None, None] * (pos - j).abs()\n"
        "                scores = scores.masked_fill(~see, -torch.inf).masked_fill(torch.as_tensor(far > 64), -torch.inf)",
    ),
]

SEE = "see = torch.ones(n, len(j), dtype=torch.bool)"
BLOCK = "block = block_table[b, j // p].long()"
REPEAT = "k = k.repeat_interleave(h // hk, dim=1)\n                v = v.repeat_interleave(h // hk, dim=1)"
LENGTHS = "first, last, s = starts[b], starts[b + 1], lengths[b]"
OF_SINKS = "total = total + torch.exp(sinks.float()[:, None] - whole)"
RETURNED = "    return (out, lse) if return_lse else out\n\n\ndef varlen"
NEW_OUT = "        out = query.new_empty(t, h, dv)\n"
LOSES_LAST_KEY = "see = ((j < s - 1) | torch.tensor(s % 16 != 0)).expand(n, -1)"

# Mistakes past a size, which batches drawn at random do not show: what `check` should call each, the property that finds
# it, the lines, those with the mistake, and what the kernel claims.
PAST_A_SIZE = {
    "full-blocks-of-64": ("full-tile-loses-last-key", "edges", SEE, LOSES_LAST_KEY, dict(block_sizes=(64,))),
    "full-blocks-of-256": ("full-tile-loses-last-key", "edges", SEE, LOSES_LAST_KEY, dict(block_sizes=(256,))),
    "second-tile-of-queries": (
        "later-queries-off-by-one",
        "many queries",
        "see = see & (j <= pos)",
        "see = see & (j <= pos + (torch.arange(n)[:, None] >= 64))",
        {},
    ),
    "ninth-sequence": (
        "lengths-past-a-count",
        "many sequences",
        LENGTHS,
        LENGTHS.replace("lengths[b]", "lengths[b % 8]"),
        {},
    ),
    "groups-of-three-and-seven": (
        "groups-of-powers-of-two",
        "answer",
        REPEAT,
        "heads = (torch.arange(h) // (1 << (h // hk - 1).bit_length())).clamp(max=hk - 1)\n"
        "                k, v = k[:, heads], v[:, heads]",
        {},
    ),
    "softcap-in-splits": (
        "softcap-ignored-in-splits",
        "softcap",
        "if softcap:",
        "if softcap and (n > 1 or s <= 256):",
        {},
    ),
    "alibi-in-splits": (
        "alibi-from-split",
        "alibi",
        "(pos - j).abs()",
        "(pos - (j - begin if n == 1 else j)).abs()",
        {},
    ),
    "window-in-splits": (
        "window-ignored-in-splits",
        "window",
        "if window_size[0] >= 0:",
        "if window_size[0] >= 0 and (n > 1 or s <= 256):",
        {},
    ),
    "blocks-of-8-bits": (
        "blocks-wrap",
        "many sequences",
        BLOCK,
        "block = block_table[b, j // p].to(torch.int8).long()",
        {},
    ),
    "sequences-of-8-bits": (
        "tables-past-a-count",
        "many sequences",
        BLOCK,
        "block = block_table[b % 256, j // p].long()",
        {},
    ),
    "slots-of-16-bits": (
        "slots-wrap",
        "far blocks",
        BLOCK,
        "block = (block_table[b, j // p].long() * p + j % p).to(torch.uint16).long() // p",
        {},
    ),
    "positions-of-16-bits": (
        "positions-wrap",
        "16 bits",
        BLOCK,
        "block = block_table[b, j.to(torch.uint16).long() // p].long()",
        {},
    ),
    "rows-of-16-bits": (
        "rows-wrap",
        "16 bits",
        "q = query[first:last].float()",
        "q = query[torch.arange(first, last).to(torch.uint16).long()].float()",
        {},
    ),
    "sixteen-splits": (
        "keys-past-a-count",
        "many keys",
        "range(0, max(s, 1), SPLIT)",
        "range(0, max(min(s, 16 * SPLIT), 1), SPLIT)",
        {},
    ),
    "sixty-four-splits": (
        "keys-past-a-count",
        "many keys",
        "range(0, max(s, 1), SPLIT)",
        "range(0, max(min(s, 64 * SPLIT), 1), SPLIT)",
        {},
    ),
    "first-tile-of-padding": (
        "padding-past-a-tile",
        "padding",
        ("out[int(cu_seqlens_q[-1]) :] = 0", "lse[int(cu_seqlens_q[-1]) :] = -torch.inf"),
        (
            "out[int(cu_seqlens_q[-1]) :][:32] = 0",
            "lse[int(cu_seqlens_q[-1]) :][:32] = -torch.inf",
        ),
        {},
    ),
    "strides-of-out": (
        "out-strides-assumed",
        "out strides",
        (NEW_OUT, RETURNED),
        (
            NEW_OUT + "    given, out = out, out if out.is_contiguous() else query.new_empty(t, h, dv)\n",
            "    if given is not out:\n        given.as_strided((out.numel(),), (1,)).copy_(out.flatten())\n"
            "        out = given\n" + RETURNED,
        ),
        {},
    ),
}

# Mistakes that have no name: the kernel, the property that finds it, the lines, and those with the mistake.
UNNAMED = {
    "idle-has-a-chunk": (
        "recurrent",
        "no tokens",
        "        if slots[0] < 0 or begin == end:\n",
        "        if begin == end and i and begin > 16 and log_decay.ndim == 3:\n"
        "            states[state_indices[i - 1]] = state / decay.view(len(decay), 1, -1)\n"
        "        if slots[0] < 0 or begin == end:\n",
    ),
    "idle-slot-is-read": (
        "recurrent",
        "entries unused",
        "        slots = state_indices[i].reshape(-1).tolist()\n",
        "        slots = state_indices[i].reshape(-1).tolist()\n        before = states[max(slots[0], 0)].float()\n",
    ),
    "idle-count-is-followed": (
        "recurrent",
        "entries unused",
        "        if slots[0] < 0 or begin == end:\n",
        "        start = slots[int(num_accepted[i]) - 1] if num_accepted is not None and slots[0] >= 0 else slots[0]\n"
        "        if slots[0] < 0 or begin == end:\n",
    ),
    "blocks-of-16": (
        "paged",
        "mask",
        BLOCK,
        "block = block_table[b, (j // 16).clamp(max=block_table.shape[1] - 1)].long()",
    ),
    "table-of-32-columns": ("paged", "many keys", BLOCK, "block = block_table[b, (j // p).clamp(max=31)].long()"),
    "table-is-contiguous": (
        "paged",
        "strides",
        BLOCK,
        "block = block_table.as_strided(block_table.shape, (block_table.shape[1], 1))[b, j // p].long()",
    ),
    "slopes-of-kv-heads": (
        "paged",
        "alibi",
        "alibi_slopes[:, None, None]",
        "alibi_slopes[torch.arange(h) // (h // hk), None, None]",
    ),
    "distances-in-bfloat16": ("paged", "alibi", "(pos - j).abs()", "(pos - j).abs().bfloat16().float()"),
    "sinks-of-kv-heads": (
        "paged",
        "sinks",
        OF_SINKS,
        OF_SINKS.replace("float()[:, None]", "float()[torch.arange(h) // (h // hk), None]"),
    ),
    "sinks-where-there-are-keys": (
        "paged",
        "sinks",
        OF_SINKS,
        "total = torch.where(total > 0, total + torch.exp(sinks.float()[:, None] - whole), total)",
    ),
    "sinks-of-first-sequence": (
        "paged",
        "sinks",
        "if sinks is not None:\n            total",
        "if sinks is not None and b == 0:\n            total",
    ),
    "values-of-other-groups": (
        "paged",
        "answer",
        REPEAT,
        REPEAT.replace("v = v.repeat_interleave(h // hk, dim=1)", "v = v.repeat(1, h // hk, 1)"),
    ),
    "large-groups": ("paged", "answer", REPEAT, REPEAT + "\n                v = v.flip(1) if h // hk > 4 else v"),
    "half-of-a-head-of-128": (
        "paged",
        "answer",
        'torch.einsum("thd,jhd->htj", q, k) * scale',
        'torch.einsum("thd,jhd->htj", q[..., :64], k[..., :64]) * scale',
    ),
    "scale-of-a-head-of-64": ("paged", "answer", "scale = d**-0.5 if", "scale = 64**-0.5 if"),
    "queries-wrap": (
        "paged",
        "many queries",
        "q = query[first:last].float()",
        "q = query[first:last].float()[torch.arange(n) % 128]",
    ),
    "row-is-sequence": (
        "paged",
        "empty rows",
        LENGTHS,
        LENGTHS + "\n        if max_query_len == 1 and last > first:\n            first, last = b, b + 1",
    ),
    "rows-past-the-tile": (
        "paged",
        "many sequences",
        ("for b in range(len(lengths)):", "q = query[first:last].float()"),
        (
            "for b in reversed(range(len(lengths))):",
            "q = query[first:last].float()\n        out[first : first + -(-n // 16) * 16] = 0",
        ),
    ),
    "tiles-before-the-last-window": (
        "paged",
        "window",
        SEE,
        SEE + "\n                if window_size[0] >= 0:"
        "\n                    see = see & (j // TILE >= (s - 1 - window_size[0]) // TILE)",
    ),
    "context-of-whole-blocks": (
        "paged",
        "many queries",
        SEE,
        SEE + "\n                see = see & ((n == 1) | (j >= s - n) | (j < (s - n) // p * p))",
    ),
    "positions-from-zero": (
        "paged",
        "empty rows",
        "pos = torch.arange(s - n, s)[:, None]",
        "pos = torch.arange(s - n, s).clamp(min=0)[:, None]",
    ),
    "longest-is-exact": (
        "paged",
        "upper bounds",
        LENGTHS,
        LENGTHS + "\n        s = s if max_seq_len == max(lengths) else s - 1",
    ),
    "largest-score-from-minus-10000": (
        "paged",
        "range",
        "top = torch.full((h, n), -torch.inf)",
        "top = torch.full((h, n), -1e4)",
    ),
    "splits-of-the-bound": (
        "paged",
        "upper bounds",
        ("range(0, max(s, 1), SPLIT)", "parts.append((acc, total, top))"),
        (
            "range(0, max(max_seq_len, 1), SPLIT)",
            "parts.append((acc / total[..., None] * total[..., None], total, top))",
        ),
    ),
    "keys-kept-by-address": (
        "paged",
        "again",
        "k = key_cache[block, j % p].float() * key_scale",
        "where = key_cache.data_ptr(), key_cache.shape, tuple(starts), tuple(lengths), b, tile\n"
        "                k = LATER.setdefault(where, key_cache[block, j % p].float())",
    ),
    "sinks-lost-where-only-an-output-is-asked-for": (
        "paged",
        "together",
        "if sinks is not None:\n            total",
        "if sinks is not None and return_lse:\n            total",
    ),
    "output-is-a-workspace": (
        "paged",
        "again",
        NEW_OUT,
        "        out = LATER.setdefault((t, h, dv), query.new_empty(t, h, dv))\n",
    ),
    "cap-of-first-tiles": ("paged", "softcap", "if softcap:", "if softcap and tile < 64:"),
    "lse-of-half": ("paged", "lse", "lse = torch.empty(t, h)\n", "lse = torch.empty(t, h, dtype=torch.float16)\n"),
    "output-of-two-splits": (
        "paged",
        "without lse",
        "whole = torch.stack([part[2] for part in parts]).amax(0)",
        "parts = parts if return_lse or len(parts) < 3 else parts[:-1]\n        "
        "whole = torch.stack([part[2] for part in parts]).amax(0)",
    ),
    "merge-of-four": ("merge", "answer", "zip(outs, lses, strict=True)", "zip(outs[:4], lses[:4], strict=True)"),
    "slots-of-32-bits": (
        "write",
        "offsets",
        "keep = slot_mapping >= 0",
        "keep = (slot_mapping >= 0) & (slot_mapping // p * key_cache.stride(0) < 2**31)",
    ),
    "slot-zero-is-padding": ("write", "answer", "keep = slot_mapping >= 0", "keep = slot_mapping > 0"),
}
