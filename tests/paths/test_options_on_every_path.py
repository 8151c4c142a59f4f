"""What every path takes alike: memory for its answer, `batch_invariant`, ALiBi by the root of the distance.

And what it does not depend on: the default type and the autocast of the process.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastattn
from fastattn.kernels import order
from fastattn.kernels.problem import Problem
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers import ranks
from tests.helpers.alone import alone
from tests.helpers.batches import build
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair
from tests.helpers.tolerance import assert_close
from tests.table import (
    CASE,
    LENS,
    PATHS,
    each_package,
    each_path,
    lay_out,
)

BIAS = torch.linspace(0.1, 0.5, 4)


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


def only(inputs, path, sequence):
    """Return one sequence of a batch as a batch of its own."""
    begin, end = inputs.batch.query_rows()[sequence]
    batch = replace(alone(inputs.batch, sequence, *LENS[sequence]), num_tokens=end - begin)
    if path == "cascade":
        batch.block_table[:, :2] = inputs.batch.block_table[0, :2]
    return replace(
        inputs,
        query=inputs.query[begin:end],
        batch=batch,
        keys=inputs.keys[sequence : sequence + 1],
        values=inputs.values[sequence : sequence + 1],
    )


@pytest.mark.covers("B73", "D128", "E176")
@pytest.mark.parametrize(
    ("package", "path"),
    [
        *(("refattn", path) for path in PATHS if path != "cascade"),  # where a group of sequences is computed as one
        *(("fastattn", path) for path in PATHS),
    ],
)
def test_rows_do_not_change_with_the_rest_of_the_batch(path, package, device):
    inputs = lay_out(path, device, padding_rows=0)
    many = PATHS[path](package, inputs, batch_invariant=True, return_lse=True)
    for sequence, (begin, end) in enumerate(inputs.batch.query_rows()):
        one = only(inputs, path, sequence)
        for whole, part in zip(many, PATHS[path](package, one, batch_invariant=True, return_lse=True), strict=True):
            assert torch.equal(whole[begin:end], part)


# --- what a process sets ---


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    on_gpu = torch.autocast("cuda", dtype) if torch.cuda.is_available() else nullcontext()
    with torch.autocast("cpu", dtype), on_gpu:
        yield


SURROUNDINGS = {  # as DeepSeek's scripts and as training loops set them
    "default-bfloat16": partial(default_type, torch.bfloat16),
    "default-float64": partial(default_type, torch.float64),
    "autocast-bfloat16": partial(autocast, torch.bfloat16),
    "autocast-float16": partial(autocast, torch.float16),
}


@pytest.mark.parametrize(
    ("path", "package", "dtype"),
    every_pair(PATHS, ["refattn", "fastattn"], [torch.float32, torch.float16, torch.float64]),
)
def test_answers_do_not_depend_on_what_the_process_sets(path, package, dtype, device, monkeypatch):
    if path.startswith("quantized"):
        device = "cpu"
    if device != "cpu" and dtype == torch.float64 and package == "fastattn":
        pytest.skip("no kernel of a GPU computes in float64")
    inputs = build(CASE, dtype=dtype, device=device)
    inputs = SimpleNamespace(**vars(inputs), tensors=inputs.tensors, rows=inputs.rows)  # put together before
    softcap = dict(softcap=3.0)  # by products of our own on a CPU
    expected = [PATHS[path](package, inputs, return_lse=True, **options) for options in ({}, softcap)]
    prepare_rank = ranks.prepare_rank
    for name, surrounding in SURROUNDINGS.items():

        def prepared(*arguments: Any, within: Any = surrounding, **options: Any) -> Callable[[], Any]:
            return within()(prepare_rank(*arguments, **options))  # ranks are threads, with an autocast of their own

        monkeypatch.setattr(ranks, "prepare_rank", prepared)
        with surrounding():
            answers = [PATHS[path](package, inputs, return_lse=True, **options) for options in ({}, softcap)]
        for answer, same in zip(answers, expected, strict=True):
            assert all(map(torch.equal, answer, same)), name


@each_package
def test_what_is_written_and_merged_does_not_depend_on_what_the_process_sets(package):
    """Scales as plain numbers and as calibrated, halves in a pool of fp8, products with projections, merges."""
    mla, pairs, quantized, kv_cache, merge = (
        importlib.import_module(f"{package}.{name}")
        for name in ("mla", "differential", "quantized", "kv_cache", "merge")
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 64, generator=generator, dtype=torch.float32)
    vectors = torch.randn(4, 64, generator=generator, dtype=torch.float32)
    slots, table = torch.tensor([3, 0, 6, 1, 7]), torch.tensor([1, 0], dtype=torch.int32)
    matrices = torch.randn(2, 2, 48, 48, generator=generator, dtype=torch.float32)

    def results() -> list[torch.Tensor]:
        made = []
        for kind in (torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
            pools = kv_cache.allocate(2, 4, 2, 64, dtype=kind)
            if kind.itemsize > 1:
                kv_cache.write(x.to(kind), x.to(kind), *pools, slots)
            else:
                quantized.write(x.half(), x.half(), *pools, slots, scales=Fp8Scales(0.3, 0.7, format=kind))
                latents = mla.allocate(2, 4, 48, 16, dtype=kind)
                mla.write(x[:, 0, :48], x[:, 1, :16], latents, slots, cache_scale=0.3)
                made.append(latents)
            made += [*pools, kv_cache.gather(pools[0], table, 8)]
        *pools, of_keys = quantized.allocate_int8(2, 4, 2, 64)
        of_values = quantized.value_scales([x, x[:0], x.half()])
        quantized.write(x, x, *pools, slots, scales=Int8Scales(of_keys, of_values))
        made += [*pools, of_keys, of_values]
        for kind in (torch.float32, torch.float64, torch.float16):
            latent, to_key, to_value = x[..., :48].to(kind), *(y.to(kind) for y in matrices)
            made += [mla.absorb(x.to(kind), to_key), mla.project(latent, to_value)]
            lses = [y.to(torch.promote_types(kind, torch.float32)) for y in (x[..., 0], x[..., 1])]
            outs = [x.to(kind), -x.to(kind)]
            made += [*merge.merge(outs, lses), *merge.add_sinks(outs[0], lses[0], x[0, :, 2])]
            made += [pairs.compute_lambda(*vectors.to(kind), lambda_init=0.2), pairs.interleave_halves(x.to(kind))]
        return [y.view(torch.uint8) if y.dtype.itemsize == 1 else y for y in made]

    expected = results()
    for name, surrounding in SURROUNDINGS.items():
        with surrounding():
            found = results()
        for i, (same, y) in enumerate(zip(expected, found, strict=True)):
            assert same.dtype == y.dtype and torch.equal(same, y), (name, i)


# --- what a path does not take ---

REFUSED = [(path, package, option) for path in PATHS for package, option in PATHS[path].refuses]


@pytest.mark.parametrize(("path", "package", "option"), REFUSED)
def test_an_option_that_a_path_does_not_take_is_refused_by_name(path, package, option, device):
    slopes = dict(alibi_slopes=BIAS.to(device))
    asked = dict(alibi_slopes=slopes, alibi_sqrt=dict(**slopes, alibi_sqrt=True), causal=dict(causal=False))
    for one in [package] if package else ["refattn", "fastattn"]:
        kind, message = PATHS[path].refusal(one, option)
        with pytest.raises(kind, match=message):
            PATHS[path](one, lay_out(path, device), **asked[option])


# --- ALiBi by the root ---


@pytest.mark.covers("B58")
@pytest.mark.parametrize(
    ("path", "package"),
    [
        (path, package)
        for path, package in product(PATHS, ["refattn", "fastattn"])
        if PATHS[path].accepts(package, "alibi_slopes", "alibi_sqrt")
    ],
)
def test_the_root_of_the_distance(path, package, device):
    """One key at a distance: with queries of zeros and one slope, the weights are those of the bias alone."""
    inputs = lay_out(path, device)
    inputs.query.zero_()
    call = partial(PATHS[path], package, inputs, return_lse=True)
    slopes = BIAS.to(inputs.query.device)
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
@pytest.mark.skipif("triton" not in [kernel.name for kernel in PRESENT], reason="needs Triton")
@pytest.mark.parametrize(
    "path", [path for path in PATHS if PATHS[path].accepts("fastattn", "alibi_slopes", "alibi_sqrt")]
)
def test_our_own_kernel_takes_the_root_where_it_takes_the_distance(path, device):
    inputs = build(replace(CASE, padding_rows=2), device=device)
    slopes = BIAS.to(device)
    some = partial(PATHS[path], alibi_slopes=slopes, return_lse=True)
    with fastattn.use_kernel("triton"):
        out, lse = some("fastattn", inputs, alibi_sqrt=True)
        by_distance, _ = some("fastattn", inputs)
    expected, expected_lse = some("refattn", inputs, alibi_sqrt=True)
    tolerance = 0.03 if path == "quantized-int8" else 2e-3  # where our kernel rounds queries and weights
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not torch.allclose(by_distance, expected, rtol=0.05, atol=0.05, equal_nan=True)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_root_without_slopes_is_named():
    with pytest.raises(ValueError, match="alibi_sqrt: expected alibi_slopes with it, got none"):
        AttentionOptions(alibi_sqrt=True)
    with pytest.raises(ValueError, match="alibi_sqrt: expected True or False, got 1"):
        AttentionOptions(alibi_slopes=BIAS, alibi_sqrt=1)


# --- devices that only plain PyTorch computes on ---


@pytest.mark.parametrize("kind", ["mps", "xpu", "meta"])
def test_everything_beside_attention_is_plain_pytorch_on_such_a_device(kind):
    others = ("merge", "add_sinks", "write", "copy_blocks", "compact", "slot_mapping", "trim", "cut_chunks")
    for operation in others:
        chosen = order.choose(Problem(operation, torch.device(kind), torch.float32))
        assert chosen.name == "torch"
    attention = Problem("attend", torch.device(kind), torch.float16, "pages", 1, False, 4, 2, 64, 64, 16, 1, 100, 3)
    with pytest.raises(NotImplementedError, match=f"attention to pages: torch: .*; on {kind} take refattn, which is"):
        order.choose(attention)
    with fastattn.use_kernel("triton"), pytest.raises(NotImplementedError, match=f"the tensors are on {kind}"):
        order.choose(attention)
