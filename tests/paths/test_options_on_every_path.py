"""What every path takes alike: memory for its answer, `batch_invariant`, ALiBi by the root of the distance."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import Case, attend, build
from ranks import attend_on_all
from tolerance import assert_close

import fastattn
from refattn.interface import AttentionOptions, Fp8Scales, Int8Scales, Prefix
from refattn.interface.batch import Batch

LENS = ((3, 40), (1, 70), (20, 52))  # all three share 32 keys in the cascade
CASE = Case("three", LENS, heads=(4, 2), padding_rows=2)
MATRICES = (torch.randn(4, 48, 48) / 7, torch.randn(4, 32, 48) / 7)  # of 48 numbers of a latent, beside 16 rotary ones
BIAS = torch.linspace(0.1, 0.5, 4)


def plain(path: str, **arguments: Any) -> Callable[..., Any]:
    """A path over two pools, or over rows."""

    def call(package: str, inputs: Any, **options: Any) -> Any:
        tensors = inputs.rows if path == "dense" else inputs.tensors
        return attend(importlib.import_module(f"{package}.{path}"), *tensors, **arguments, **options)

    return call


def cascade(package: str, inputs: Any, **options: Any) -> Any:
    """Everybody has the first two blocks of the first."""
    table = inputs.batch.block_table.clone()
    table[:, :2] = table[0, :2].clone()
    batch = replace(inputs.batch, block_table=table)
    path = importlib.import_module(f"{package}.cascade")
    return attend(path, *inputs.tensors[:3], batch, prefixes=[Prefix(0, batch.num_seqs, 32)], **options)


def differential(package: str, inputs: Any, **options: Any) -> Any:
    """Pairs of heads, and both halves of every pool."""
    pools = inputs.key_cache, inputs.value_cache
    cache = torch.stack([torch.stack([pool[:, :, half::2] for pool in pools]) for half in (0, 1)])
    path = importlib.import_module(f"{package}.differential")
    fixed = dict(lambda_full=torch.tensor(0.35, device=cache.device), lambda_init=0.2)
    return attend(path, inputs.query, cache, inputs.batch, **fixed, **options)


def latents(package: str, inputs: Any, **options: Any) -> Any:
    """Absorbed queries over the keys of the first head."""
    path = importlib.import_module(f"{package}.mla")
    cache, fixed = inputs.key_cache[:, :, 0], dict(latent_rank=48, softmax_scale=0.1)
    return attend(path, inputs.query, cache, inputs.batch, block_size=16, **fixed, **options)


def latent_trees(package: str, inputs: Any, **options: Any) -> Any:
    """The same, and the new tokens as trees without a branch."""
    mla, path = (importlib.import_module(f"{package}.{name}") for name in ("mla", "speculative"))
    mixed = SimpleNamespace(plan=path.plan, attention=mla.attention)
    cache, fixed = inputs.key_cache[:, :, 0], dict(latent_rank=48, softmax_scale=0.1)
    forest = chains(path, inputs)
    return attend(mixed, inputs.query, cache, inputs.batch, block_size=16, trees=forest, **fixed, **options)


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
    """Codes, and chunked prefill over them."""

    def call(package: str, inputs: Any, **options: Any) -> Any:
        path = importlib.import_module(f"{package}.quantized")
        pools = [pool.nan_to_num(0, 0, 0).clamp(-9, 9) for pool in (inputs.key_cache, inputs.value_cache)]
        if kind == "fp8":
            scales: Any = Fp8Scales(0.5, 0.25)
            codes = [(pool / scale).to(scales.format) for pool, scale in zip(pools, (0.5, 0.25), strict=True)]
        else:
            scales = Int8Scales(
                *(torch.full(size, 0.1, device=pools[0].device) for size in (pools[0].shape[:3], (2, 64)))
            )
            codes = [(pool / 0.1).round().to(torch.int8) for pool in pools]
        return attend(path, inputs.query, *codes, inputs.batch, scales=scales, **options)

    return call


def trees(package: str, inputs: Any, **options: Any) -> Any:
    """The new tokens as trees without a branch, which see what causal chunks see."""
    path = importlib.import_module(f"{package}.speculative")
    return attend(path, *inputs.tensors, trees=chains(path, inputs), **options)


def chains(path: Any, inputs: Any) -> Any:
    """Make a tree of the new tokens of each sequence, each after the one before it."""
    parents = [list(range(-1, length - 1)) for length in inputs.batch.query_lens.tolist()]
    return path.make_trees(parents, device=inputs.query.device)


def over_ranks(package: str, inputs: Any, **options: Any) -> Any:
    """Two ranks in one process."""
    return attend_on_all(package, 2, *inputs.tensors, interleave=1, **options)


PATHS = {
    "dense": plain("dense"),
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
}


def lay_out(path: str, device: str, padding_rows: int = 2) -> Any:
    """Lay the case out; codes on a CPU, as their kernels for a GPU have types of their own to be tested in."""
    return build(replace(CASE, padding_rows=padding_rows), device="cpu" if path.startswith("quantized") else device)


each_path = pytest.mark.parametrize("path", PATHS)
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"])


def test_no_path_is_left_out():
    root = Path(importlib.import_module("refattn").__file__).parent
    names = {file.stem for file in root.glob("*.py") if "\ndef attention(" in file.read_text()}
    assert {path.partition("-")[0] for path in PATHS} == names


# --- out ---


@pytest.mark.covers("A16", "B60")
@each_package
@each_path
def test_out_is_written_and_nothing_beside_it(path, package, device):
    """Into a view of a larger buffer, whose elements do not lie side by side; padding rows become 0, as ever."""
    inputs = lay_out(path, device)
    expected, lse = PATHS[path](package, inputs, return_lse=True)
    t, h, dv = expected.shape
    for shape, view in (
        ((t + 4, h, dv), lambda x: x[2:-2]),  # the rows of a layer's larger buffer
        ((t, h + 2, 2 * dv), lambda x: x[:, 1:-1, ::2]),
        ((h, t, dv), lambda x: x.transpose(0, 1)),
    ):
        buffer = torch.full(shape, 7.0, device=expected.device)
        out = view(buffer)
        given = PATHS[path](package, inputs, out=out)
        assert given is out
        assert torch.equal(out, expected)
        out.fill_(7.0)
        assert bool((buffer == 7.0).all()), "what is beside the answer was written to"
        same, same_lse = PATHS[path](package, inputs, out=out, return_lse=True)
        assert same is out and torch.equal(out, expected) and torch.equal(same_lse, lse)
    assert (expected[-CASE.padding_rows :] == 0).all()


# --- batch_invariant ---


@pytest.mark.covers("B73", "D128", "E176")
@pytest.mark.parametrize("sequence", range(3))
@pytest.mark.parametrize(
    ("package", "path"),
    [
        *(("refattn", path) for path in PATHS if path != "cascade"),  # where a group of sequences is computed as one
        *(("fastattn", path) for path in PATHS),
    ],
)
def test_rows_do_not_change_with_the_rest_of_the_batch(path, sequence, package, device):
    inputs = lay_out(path, device, padding_rows=0)
    begin, end = inputs.batch.query_rows()[sequence]
    query_len, seq_len = LENS[sequence]
    alone = Batch(
        torch.tensor([0, query_len], dtype=torch.int32, device=inputs.batch.device),
        inputs.batch.seq_lens[sequence : sequence + 1],
        inputs.batch.block_table[sequence : sequence + 1],
        query_len,
        seq_len,
        num_tokens=query_len,
    )
    one = replace(
        inputs,
        query=inputs.query[begin:end],
        batch=alone,
        keys=inputs.keys[sequence : sequence + 1],
        values=inputs.values[sequence : sequence + 1],
    )
    if path == "cascade":
        table = alone.block_table.clone()
        table[:, :2] = inputs.batch.block_table[0, :2]
        one = replace(one, batch=replace(alone, block_table=table))
    if (package, path) == ("fastattn", "mla-prefill"):
        with pytest.raises(
            NotImplementedError, match="batch_invariant: prefill computes keys and values by one matrix"
        ):
            PATHS[path](package, inputs, batch_invariant=True)
        return
    many = PATHS[path](package, inputs, batch_invariant=True, return_lse=True)
    for whole, part in zip(many, PATHS[path](package, one, batch_invariant=True, return_lse=True), strict=True):
        assert torch.equal(whole[begin:end], part)


# --- ALiBi by the root ---


@pytest.mark.covers("B58")
@each_package
@each_path
def test_the_root_of_the_distance(path, package, device):
    """One key at a distance: with queries of zeros and one slope, the weights are those of the bias alone."""
    inputs = lay_out(path, device)
    inputs.query.zero_()
    call = partial(PATHS[path], package, inputs, return_lse=True)
    slopes = BIAS.to(inputs.query.device)
    if package == "fastattn" and (path == "context_parallel" or inputs.query.is_cuda):
        with pytest.raises(NotImplementedError, match="no kernel computes"):
            call(alibi_slopes=slopes, alibi_sqrt=True)
        return
    out, lse = call(alibi_slopes=slopes, alibi_sqrt=True)
    if path == "differential":  # its answer has no LSE of one softmax per head
        wide = replace(
            inputs, **{name: getattr(inputs, name).double() for name in ("query", "key_cache", "value_cache")}
        )
        exact, low = (
            PATHS[path]("refattn", some, alibi_slopes=slopes, alibi_sqrt=True, return_lse=True)[0]
            for some in (wide, inputs)
        )
        assert_close(out, exact, low)
        return
    row = 0
    for q, s in LENS:
        for i in range(s - q, s):
            first = {"sliding_window": max(0, i - 20), "local": i // 32 * 32}.get(path, 0)
            far = (i - torch.arange(first, i + 1)).double()
            expected = torch.logsumexp(-BIAS[:, None].double() * far.sqrt(), -1)
            torch.testing.assert_close(lse[row].cpu().double(), expected, rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.covers("B58")
@pytest.mark.parametrize(
    ("kernel", "path"),
    [
        *((kernel, path) for kernel in ("triton", "fa2", "fa3", "fa4") for path in ("dense", "chunked_prefill")),
        *(("triton", path) for path in ("local", "cascade", "mla", "differential")),
        *(("torch_flash", "dense"), ("flash_mla", "mla")),
    ],
)
def test_a_kernel_without_the_root_refuses_it(kernel, path):
    with fastattn.use_kernel(kernel), pytest.raises(NotImplementedError, match=f"{kernel}: "):
        PATHS[path]("fastattn", build(CASE), alibi_slopes=BIAS, alibi_sqrt=True)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_root_without_slopes_is_named():
    with pytest.raises(ValueError, match="alibi_sqrt: expected alibi_slopes with it, got none"):
        AttentionOptions(alibi_sqrt=True)
    with pytest.raises(ValueError, match="alibi_sqrt: expected True or False, got 1"):
        AttentionOptions(alibi_slopes=BIAS, alibi_sqrt=1)
