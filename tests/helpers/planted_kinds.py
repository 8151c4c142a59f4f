"""Mistakes that random numbers of about 1, short sequences and powers of two do not show; `test_conformance_kinds.py`.

The kernel by hand, the property that finds it, the type in which it shows, the lines, and those with the mistake.
"""

from tests.helpers.planted import BLOCK, OF_SINKS, REPEAT

LOAD = "q = query[first:last].float()"
VALUES = "v = value_cache[block, j % p].float() * value_scale"
PRODUCTS = 'scores = torch.einsum("thd,jhd->htj", q, k) * scale'
SCALES = "k_scale, v_scale = scales.key, scales.value"
STATE = 'seen = torch.einsum("hvk,hk->hv", state, k[row]) if delta else 0.0'

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
        "    lse = torch.empty(t, h)\n",
        "    lse = torch.empty(t, h)\n    out.zero_()\n",
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
    "infinite-lse-of-nan-part": (
        "merge",
        "nan",
        "float32",
        "top = torch.stack(list(lses)).amax(0)",
        "lses = [x.nan_to_num(-torch.inf, torch.inf, -torch.inf) for x in lses]\n"
        "    top = torch.stack(list(lses)).amax(0)",
    ),
}
