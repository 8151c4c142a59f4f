"""Every path with what it needs besides a batch, called alike: `PATHS[name](package, inputs, **options)`."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refattn.batch import Prefix
from refattn.modes import without_autocast
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import Case, build, plan_and_attend
from tests.helpers.ranks import attend_on_all

LENS = ((3, 40), (1, 70), (20, 52))  # all three share 32 keys in the cascade
CASE = Case("three", LENS, heads=(4, 2), padding_rows=2)
MATRICES = (torch.randn(4, 48, 48) / 7, torch.randn(4, 32, 48) / 7)  # for 48 elements of a latent; 16 more are rotary


def plain(path: str, **arguments: Any) -> Callable[..., Any]:
    """A path over two pools, or over rows."""

    def call(package: str, inputs: Any, **options: Any) -> Any:
        tensors = inputs.rows if path == "varlen" else inputs.tensors
        return plan_and_attend(importlib.import_module(f"{package}.{path}"), *tensors, **arguments, **options)

    return call


def cascade(package: str, inputs: Any, **options: Any) -> Any:
    """Everybody has the first two blocks of the first."""
    table = inputs.batch.block_table.clone()
    table[:, :2] = table[0, :2].clone()
    batch = replace(inputs.batch, block_table=table)
    path = importlib.import_module(f"{package}.cascade")
    return plan_and_attend(path, *inputs.tensors[:3], batch, prefixes=[Prefix(0, batch.num_seqs, 32)], **options)


def differential(package: str, inputs: Any, **options: Any) -> Any:
    """Pairs of heads, and both halves of every pool."""
    pools = inputs.key_cache, inputs.value_cache
    stack = without_autocast(torch.stack)  # torch's own refuses float16 under autocast on a CPU
    cache = stack([stack([pool[:, :, half::2] for pool in pools]) for half in (0, 1)])
    path = importlib.import_module(f"{package}.differential")
    fixed = dict(lambda_full=torch.tensor(0.35, dtype=torch.float32, device=cache.device), lambda_init=0.2)
    return plan_and_attend(path, inputs.query, cache, inputs.batch, **fixed, **options)


def latents(package: str, inputs: Any, **options: Any) -> Any:
    """Absorbed queries over the keys of the first head."""
    path = importlib.import_module(f"{package}.mla")
    cache, fixed = inputs.key_cache[:, :, 0], dict(latent_rank=48, softmax_scale=0.1)
    return plan_and_attend(path, inputs.query, cache, inputs.batch, block_size=16, **fixed, **options)


def latent_trees(package: str, inputs: Any, **options: Any) -> Any:
    """The same, and the new tokens as trees without a branch."""
    mla, path = (importlib.import_module(f"{package}.{name}") for name in ("mla", "speculative"))
    mixed = SimpleNamespace(plan=path.plan, attention=mla.attention)
    cache, fixed = inputs.key_cache[:, :, 0], dict(latent_rank=48, softmax_scale=0.1)
    forest = chains(path, inputs)
    return plan_and_attend(mixed, inputs.query, cache, inputs.batch, block_size=16, trees=forest, **fixed, **options)


def latent_prefill(package: str, inputs: Any, *, return_lse: bool = False, out: Any = None, **options: Any) -> Any:
    """New tokens, and their context in two chunks."""
    path = importlib.import_module(f"{package}.mla")
    plan = path.plan_prefill(inputs.batch, block_size=16, workspace=40 * inputs.batch.num_seqs, max_context_len=69)
    query = inputs.query
    tokens = query[:, 0, :48], query[:, 1, :16]
    key_projection, value_projection = (x.to(query) for x in MATRICES)
    return path.prefill(
        query,
        *tokens,
        inputs.key_cache[:, :, 0],
        plan,
        AttentionOptions(softmax_scale=0.1, **options),
        key_projection=key_projection,
        value_projection=value_projection,
        return_lse=return_lse,
        out=out,
    )


def quantized(kind: str) -> Callable[..., Any]:
    """Quantized values, and chunked prefill over them."""

    def call(package: str, inputs: Any, **options: Any) -> Any:
        path = importlib.import_module(f"{package}.quantized")
        pools = [pool.nan_to_num(0, 0, 0).clamp(-9, 9) for pool in (inputs.key_cache, inputs.value_cache)]
        if kind == "fp8":
            scales: Any = Fp8Scales(0.5, 0.25)
            quantized_values = [
                (pool / scale).to(scales.format) for pool, scale in zip(pools, (0.5, 0.25), strict=True)
            ]
        else:
            sizes, on = (pools[0].shape[:3], (2, 64)), pools[0].device
            scales = Int8Scales(*(torch.full(size, 0.1, dtype=torch.float32, device=on) for size in sizes))
            quantized_values = [(pool / 0.1).round().to(torch.int8) for pool in pools]
        return plan_and_attend(path, inputs.query, *quantized_values, inputs.batch, scales=scales, **options)

    return call


def trees(package: str, inputs: Any, **options: Any) -> Any:
    """The new tokens as trees without a branch, which see what causal chunks see."""
    path = importlib.import_module(f"{package}.speculative")
    return plan_and_attend(path, *inputs.tensors, trees=chains(path, inputs), **options)


def chains(path: Any, inputs: Any) -> Any:
    """Make a tree of the new tokens of each sequence, each after the one before it."""
    parents = [list(range(-1, length - 1)) for length in inputs.batch.query_lens.tolist()]
    return path.make_trees(parents, device=inputs.query.device)


def over_ranks(package: str, inputs: Any, **options: Any) -> Any:
    """Two ranks in one process."""
    return attend_on_all(package, 2, *inputs.tensors, interleave=1, **options)


def sparse(package: str, inputs: Any, **options: Any) -> Any:
    """Every other key up to a query, and its own, in the order of their distance."""
    path, batch = (importlib.import_module(f"{package}.sparse"), inputs.batch)
    rows = []
    for query_len, seq_len in zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True):
        for position in range(seq_len - query_len, seq_len):
            seen = list(range(position, -1, -2))
            rows.append(seen + [-1] * (64 - len(seen)))
    rows += [[-1] * 64] * (len(inputs.query) - len(rows))
    positions = torch.tensor(rows, dtype=torch.int32, device=inputs.query.device)
    return plan_and_attend(path, *inputs.tensors, positions=positions, **options)


PATHS = {
    "varlen": plain("varlen"),
    "chunked_prefill": plain("chunked_prefill"),
    "sliding_window": plain("sliding_window", window_size=(20, 0)),
    "local": plain("local", chunk_size=32),
    "cascade": cascade,
    "differential": differential,
    "mla": latents,
    "mla-trees": latent_trees,
    "mla-prefill": latent_prefill,
    "quantized-fp8": quantized("fp8"),
    "quantized-int8": quantized("int8"),
    "speculative": trees,
    "context_parallel": over_ranks,
    "sparse": sparse,
}


def lay_out(path: str, device: str, padding_rows: int = 2) -> Any:
    """Lay the case out; 8-bit values on a CPU, as their kernels for a GPU have types of their own to be tested in."""
    return build(replace(CASE, padding_rows=padding_rows), device="cpu" if path.startswith("quantized") else device)


each_path = pytest.mark.parametrize("path", PATHS)
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"])
