"""Inputs of paths other than attention: partial outputs to merge, new tokens and their slots, scores to select from."""

from collections.abc import Mapping
from typing import Any

import torch

from refattn.metadata import slot_mapping
from twinattn.kit.bits import with_odd_bits
from twinattn.kit.cases import HARMLESS, build


def partials(example: Any, dtype: torch.dtype, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Make partial outputs of the same queries; where a part is empty, its output is garbage or 0."""
    generator = torch.Generator().manual_seed(example.seed)
    shape = (example.num_tokens, example.heads[0])
    outs, lses = [], []
    for part in range(example.options.get("parts", 2)):
        outs.append(torch.randn(*shape, example.head_size, generator=generator, dtype=torch.float32).to(dtype))
        lses.append(torch.randn(shape, generator=generator, dtype=torch.float32) * 2 + 3 * (part % 2))
        if example.options.get("lse_dtype"):  # differences that float32 loses
            lses[-1] = lses[-1].double() / 20 + 1e6
        if example.options.get("empty"):
            nothing = torch.rand(shape, generator=generator, dtype=torch.float32) < 0.5
            lses[-1][nothing] = -torch.inf
            outs[-1][nothing] = example.options.get("garbage", 0.0)
    return dict(outs=outs, lses=lses)


def new_tokens(example: Any, dtype: torch.dtype, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Draw new keys and values with unusual bits, a pool of such values, and the slots of the tokens."""
    generator = torch.Generator().manual_seed(example.seed)
    drawn = build(example, dtype=dtype, seed=example.seed, poison=HARMLESS)
    t = example.num_tokens
    slots = slot_mapping(drawn.batch, t + example.padding_rows, block_size=example.block_size)
    room, order = len(drawn.key_cache) * example.block_size, example.options.get("slots")
    if order:
        first = max(0, min(room - t, room - example.block_size - (t + 1) // 2))  # so that a run crosses a block's end
        places = {
            "run": torch.arange(first, first + t),
            "backwards": torch.arange(room - 1, room - 1 - t, -1),
            "anywhere": torch.randperm(room, generator=generator)[:t],
        }
        slots[:t] = places[order]
    if example.options.get("holes"):
        slots[example.seed % 2 :: 3] = -1
    before = example.options.get("first_block", 0)
    slots = torch.where(slots < 0, slots, slots + before * example.block_size)
    pools = {
        name: torch.randn(pool.shape, generator=generator, dtype=torch.float32).to(dtype)
        for name, pool in (("key_cache", drawn.key_cache), ("value_cache", drawn.value_cache))
    }
    if before:
        pools = {name: torch.cat([pool[:1].expand(before, -1, -1, -1), pool]) for name, pool in pools.items()}
    rows = {
        name: torch.randn(
            t + example.padding_rows, *pools[f"{name}_cache"].shape[2:], generator=generator, dtype=torch.float32
        ).to(dtype)
        for name in ("key", "value")
    }
    for x in (*rows.values(), *pools.values()):
        with_odd_bits(x)  # a write is compared bit for bit
    return dict(**rows, **pools, slot_mapping=slots)


def scores(example: Any, dtype: torch.dtype, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Draw scores, most of them on a plateau of exact zeros, as sums of ReLUs are."""
    generator = torch.Generator().manual_seed(example.seed)
    t, s = example.num_tokens, max((s for _, s in example.lens), default=0)
    scores = torch.randn(t, s, generator=generator, dtype=torch.float32)
    kind = example.options.get("kind", "plateau")
    if kind == "crowded":  # in one binade, and many of them nearly alike, on either side of 0
        scores = torch.where(scores > 0, 1.0, -1.0) * (1.0 + 0.1 * torch.rand(t, s, generator=generator))
    if kind == "near":  # all equal when rounded to 16 bits
        scores = 1.0 + 2.0**-12 * torch.rand(t, s, generator=generator, dtype=torch.float32)
    if kind == "apart":  # any size, down to subnormal numbers, and infinite ones
        scores = scores.sign() * 2.0 ** (250 * torch.rand(t, s, generator=generator) - 140)
        scores[:, ::7], scores[:, 3::11] = torch.inf, -torch.inf
        scores[:, 1::7] = torch.finfo(torch.float32).max  # below infinity
    if kind == "subnormal":
        scores = scores * 2.0**-140
    if kind == "nans":  # more than are selected, of either sign, infinities among them
        scores = torch.where(torch.rand(t, s, generator=generator) < 0.6, torch.nan, scores)
        scores[:, ::5] = scores[:, ::5].copysign(torch.tensor(-1.0))
        scores[:, 2::9] = torch.inf
    if kind == "nan":
        scores = scores.relu()
        scores[torch.rand(t, s, generator=generator) < 0.1] = torch.nan
        scores[:, ::5] = scores[:, ::5].copysign(torch.tensor(-1.0))
    if kind == "plateau":
        scores = (scores - 1.0).relu()
    if kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    if kind == "negative":
        scores = -(scores - 1.0).relu()
    for (_, length), rows in zip(
        example.lens, torch.arange(t).split([q for q, _ in example.lens]), strict=True
    ):  # a query sees no keys after itself
        position = torch.arange(length - len(rows), length)
        scores[rows] = scores[rows].masked_fill(torch.arange(s) > position[:, None], -torch.inf)
    return dict(scores=scores, topk=example.options.get("topk", 8))
