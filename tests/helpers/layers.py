"""Each path with what a layer passes to it, and the plan of a step: what is replayed, bound and refused alike."""

from dataclasses import fields, replace

import pytest
import torch

from fastattn import (
    cascade,
    chunked_prefill,
    differential,
    local,
    mla,
    quantized,
    sliding_window,
    speculative,
    varlen,
)
from refattn.batch import Prefix
from refattn.options import PER_HEAD, AttentionOptions
from refattn.scales import Fp8Scales
from tests.helpers.batches import Case, build
from tests.helpers.stored import store

CASE = Case("layers", ((2, 20), (1, 40), (0, 9)), heads=(4, 2), padding_rows=1)
SHARED = Case("shared", ((2, 20), (1, 40), (1, 19)), heads=(4, 2), padding_rows=1)
TREES = [(-1, 0), (-1,), ()]
OPTIONS = dict(softmax_scale=0.2)  # latents have no default
NUMBERS = {x.name: x.default for x in fields(AttentionOptions) if x.name not in PER_HEAD}
PATHS = {
    "varlen": varlen,
    "chunked_prefill": chunked_prefill,
    "sliding_window": sliding_window,
    "local": local,
    "cascade": cascade,
    "tree": speculative,
    "latents": mla,
    "tree of latents": mla,
    "fp8 latents": mla,
    "differential": differential,
    "differential rows": differential,
    "fp8 differential": differential,
    "e4m3": quantized,
    "int8": quantized,
    "int8 cascade": quantized,
    "int8 tree": quantized,
}
in_each_path = pytest.mark.parametrize("name", PATHS)


def lay_out(name, seed=0, dtype=torch.float16, device="cpu"):
    """Make the tensors of a layer of a path, the batch, and what its call takes besides; numbers follow the seed."""
    number = 0.5 + seed / 8
    if name.startswith(("e4m3", "int8")):
        case = SHARED if "cascade" in name else CASE
        stored = store(case, name.split()[0], dtype=dtype, seed=seed, poison=(0.5,), device=device, per="head")
        return *stored.tensors[:3], shared(stored.batch, case), dict(scales=stored.scales)
    case = SHARED if name == "cascade" else CASE
    inputs = build(case, seed=seed, dtype=dtype, device=device, poison=(0.5,))
    if "latents" in name:
        cache = torch.cat([inputs.key_cache[:, :, 0], inputs.value_cache[:, :, 0]], dim=-1)
        query = torch.cat([inputs.query, inputs.query], dim=-1)
        more = dict(latent_rank=cache.shape[-1] // 2)
        if name == "fp8 latents":
            cache, more["cache_scale"] = cache.to(torch.float8_e4m3fn), number
        return query, cache, inputs.batch, more
    if "differential" in name:
        torch.manual_seed(seed)
        pools = inputs.rows[1:3] if "rows" in name else inputs.tensors[1:3]
        cache = torch.stack([torch.stack([x[..., half::2, :] for x in pools]) for half in (0, 1)])
        weight = torch.rand(2 * cache.shape[-1], device=device)
        more = dict(lambda_full=torch.tensor(number, device=device), lambda_init=number / 2, norm_weight=weight)
        if name == "fp8 differential":
            cache, more["scales"] = cache.to(torch.float8_e4m3fn), Fp8Scales(number, 3 * number)
        return inputs.query, cache, inputs.rows[3] if "rows" in name else inputs.batch, more
    tensors = inputs.rows if name == "varlen" else inputs.tensors
    return *tensors[:3], shared(tensors[3], case), {}


def shared(batch, case):
    """Make the first two sequences of a cascade share their first block."""
    if case is not SHARED:
        return batch
    table = batch.block_table.clone()
    table[1, 0] = table[0, 0]
    return replace(batch, block_table=table)


def plan_of(name, batch):
    """Plan a step of a path."""
    if name == "varlen":
        return varlen.plan(batch)
    if name == "differential rows":
        return varlen.plan(batch)
    if "cascade" in name:
        return cascade.plan(batch, prefixes=[Prefix(0, 2, 16)], block_size=16)
    if "tree" in name:
        return speculative.plan(batch, block_size=16, trees=speculative.make_trees(TREES, device=str(batch.device)))
    planned = {"sliding_window": dict(window_size=(20, 0)), "local": dict(chunk_size=32)}.get(name, {})
    return PATHS[name].plan(batch, block_size=16, **planned)
