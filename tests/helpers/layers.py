"""Each path with what a layer passes to it, and the plan of a step: what is replayed, bound and refused alike."""

from dataclasses import fields
from importlib import import_module

import pytest
import torch

from refattn.options import PER_HEAD, AttentionOptions
from refattn.scales import Fp8Scales
from tests.helpers.batches import Case, build
from tests.helpers.stored import store
from tests.table import COMPOSED, pairs, share

CASE = Case("layers", ((2, 20), (1, 40), (0, 9)), heads=(4, 2), padding_rows=1)
SHARED = Case("shared", ((2, 36), (1, 40), (1, 33)), heads=(4, 2), padding_rows=1)
OPTIONS = dict(softmax_scale=0.2)  # latents have no default
NUMBERS = {x.name: x.default for x in fields(AttentionOptions) if x.name not in PER_HEAD}
PATHS = {name: import_module(f"fastattn.{path.attention.partition('.')[0]}") for name, path in COMPOSED.items()}
in_each_path = pytest.mark.parametrize("name", PATHS)


def lay_out(name, seed=0, dtype=torch.float16, device="cpu"):
    """Make the tensors of a layer of a path, the batch, and what its call takes besides; numbers follow the seed."""
    number = 0.5 + seed / 8
    if name.startswith(("e4m3", "int8", "int4")):
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
        cache = pairs(*pools)
        weight = torch.rand(2 * cache.shape[-1], device=device)
        more = dict(lambda_full=torch.tensor(number, device=device), lambda_init=number / 2, norm_weight=weight)
        if name == "fp8 differential":
            cache, more["scales"] = cache.to(torch.float8_e4m3fn), Fp8Scales(number, 3 * number)
        return inputs.query, cache, inputs.rows[3] if "rows" in name else inputs.batch, more
    tensors = inputs.rows if name == "varlen" else inputs.tensors
    return *tensors[:3], shared(tensors[3], case), {}


def shared(batch, case):
    """Make the sequences of a cascade share their first two blocks."""
    return share(batch, 16) if case is SHARED else batch


def plan_of(name, batch):
    """Plan a step of a path."""
    return COMPOSED[name].made_plan("fastattn", batch, 0 if "rows" in COMPOSED[name].keys else 16)
