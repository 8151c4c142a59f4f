"""Edges at which servers broke, on every path: far scores and sinks, padding sequences, and strides."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fastattn
from tests.helpers.batches import Case, build
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.strides import STRIDES
from tests.helpers.tolerance import assert_close
from tests.table import CASE, LENS, PATHS, each_package, lay_out

OURS = [kernel.name for kernel in PRESENT if kernel.name == "triton"]
BY_OURS = ("chunked_prefill", "sliding_window", "local", "cascade", "mla", "mla-trees", "speculative")
FAR = [path for path in PATHS if path != "mla-prefill"]  # the keys of mla-prefill are products
BOTH = ("refattn", "fastattn")


def each(inputs: Any, change) -> Any:
    """Change all tensors of a batch."""
    names = ("query", "key_cache", "value_cache", "more_keys", "more_values")
    changed = {name: change(getattr(inputs, name)) for name in names}
    return replace(
        inputs, **changed, **{name: [change(x) for x in getattr(inputs, name)] for name in ("keys", "values")}
    )


def wide(inputs: Any) -> Any:
    """Copy a batch in float64, its elements side by side."""
    return each(inputs, lambda x: x.double().contiguous())


def by_kernel(kernel: str | None, *call: Any, **options: Any) -> Any:
    """Call a path, by a kernel if one is asked for."""
    path, package, inputs = call
    if kernel is None:
        return PATHS[path](package, inputs, **options, return_lse=True)
    with fastattn.use_kernel(kernel):
        return PATHS[path](package, inputs, **options, return_lse=True)


@pytest.mark.parametrize(
    ("package", "path", "kernel"),
    [
        *(pytest.param(package, path, None, id=f"{path}-{package}") for path in FAR for package in BOTH),
        *(pytest.param("fastattn", path, kernel, id=f"{path}-{kernel}") for kernel in OURS for path in BY_OURS),
    ],
)
def test_scores_below_any_mask_are_scores(package, path, kernel, device):
    """Of less than -100000, all alike: the answers are those to queries of zero, in which no hidden key shows either.

    A kernel that hides a key by a finite score, such as -60000, shows it beside these (FlashInfer 4450).
    """
    dtype = torch.float32 if kernel is None else torch.float16
    inputs = build(CASE, dtype=dtype, device="cpu" if path.startswith("quantized") else device)

    key, far = (7.5, -2e3) if PATHS[path].keys == "int4" else (-9.0, 2e3)  # rows that the storage holds exactly

    def low(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < 100, key, x)  # poison stays what it is

    inputs = replace(inputs, key_cache=low(inputs.key_cache), keys=[low(key) for key in inputs.keys])
    (out, lse), (plain, plain_lse) = (
        by_kernel(kernel, path, package, replace(inputs, query=torch.full_like(inputs.query, x))) for x in (far, 0.0)
    )
    score = 64 * far * key * PATHS[path].arguments.get("softmax_scale", 0.125)
    off = 4 * 2.0**16 * torch.finfo(torch.float32).eps  # a few roundings of such a score, and so of a weight
    torch.testing.assert_close(out, plain, rtol=off, atol=off)
    torch.testing.assert_close(lse.double(), plain_lse.double() + score, rtol=0, atol=off)


@pytest.mark.parametrize(("path", "package", "sink"), every_pair_on_cpu(PATHS, BOTH, [1e4, 89.0, -1e4]))
def test_a_sink_far_from_every_score(path, package, sink, device):
    """Far above them the keys have no weight that float32 knows; far below, the sink has none."""
    inputs = lay_out(path, device)
    sinks = torch.tensor([sink, 0.0, sink, -sink], device=inputs.query.device)
    out, lse = PATHS[path](package, inputs, sinks=sinks, return_lse=True)
    low, low_lse = PATHS[path]("refattn", inputs, sinks=sinks, return_lse=True)
    exact, exact_lse = PATHS[path]("refattn", wide(inputs), return_lse=True)
    if path == "differential":  # differential attention norms what the sinks have changed
        exact, _ = PATHS[path]("refattn", wide(inputs), sinks=sinks, return_lse=True)
    else:
        exact = exact / (1 + torch.exp(sinks.double() - exact_lse))[..., None]
    queries = slice(int(inputs.batch.cu_seqlens_q[-1]))
    assert_close(out[queries], exact[queries], low[queries])
    expected = torch.logaddexp(exact_lse, sinks.double())
    assert_close(lse[queries], expected[queries], low_lse[queries], name="lse")
    torch.testing.assert_close(low_lse[queries].double(), expected[queries], rtol=1e-6, atol=1e-5)


@each_package
@pytest.mark.parametrize("path", [path for path in PATHS if path != "cascade"])  # where all share 32 keys
def test_padding_sequences_change_nothing(path, package, device):
    """Without a token, with one token that asks, and with one that does not (vLLM 38436, SGLang 1469)."""
    case = Case("padded", (*LENS, (0, 0), (1, 1), (0, 1)), heads=CASE.heads)
    inputs = build(case, device="cpu" if path.startswith("quantized") else device)
    real, rows, batch = len(LENS), sum(q for q, _ in LENS), inputs.batch
    few = replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q[: real + 1],
        seq_lens=batch.seq_lens[:real],
        block_table=batch.block_table[:real],
        num_tokens=rows,
    )
    alone = replace(inputs, query=inputs.query[:rows], batch=few, keys=inputs.keys[:real], values=inputs.values[:real])
    padded = PATHS[path](package, inputs, return_lse=True)
    low = PATHS[path]("refattn", alone, return_lse=True)
    for one, exact, other in zip(padded, PATHS[path]("refattn", wide(alone), return_lse=True), low, strict=True):
        assert_close(one[:rows], exact, other)
        assert package == "fastattn" or torch.equal(one[:rows], other)


@pytest.mark.parametrize(
    ("path", "package", "name"), every_pair_on_cpu(PATHS, BOTH, ["plain", "softcap-and-slopes", "invariant"])
)
def test_another_default_device_changes_nothing(path, package, name, device):
    """A process may make its tensors elsewhere; what a path makes for itself is where its arguments are."""
    inputs = lay_out(path, device)
    slopes = dict(alibi_slopes=torch.rand(4).to(inputs.query)) if PATHS[path].accepts(package, "alibi_slopes") else {}
    given = {"plain": {}, "softcap-and-slopes": dict(softcap=5.0, **slopes), "invariant": dict(batch_invariant=True)}
    expected = PATHS[path](package, inputs, **given[name], return_lse=True)
    with torch.device("meta"):
        answer = PATHS[path](package, inputs, **given[name], return_lse=True)
    assert all(map(torch.equal, answer, expected))


@pytest.mark.parametrize(
    ("path", "package", "change"),
    [
        pytest.param(path, package, change, id=f"{name}-{path}-{package}")
        for i, path in enumerate(PATHS)
        for j, (name, change) in enumerate(STRIDES.items())
        for package in BOTH
        if package == "fastattn" or (i + j) % 3 == 0  # the reference indexes, whatever the strides are
    ],
)
def test_tensors_of_any_strides(path, package, change, device):
    """Queries, pools and rows, and latents of which two chunks of a context are read (vLLM 42642)."""
    strided = each(each(lay_out(path, device), lambda x: x.nan_to_num(0.5, 0.5, 0.5)), change)
    side_by_side = each(strided, torch.Tensor.contiguous)
    pool = strided.key_cache
    if package == "fastattn" and PATHS[path].file == "sparse" and pool.stride(0) != pool.shape[1] * pool.stride(1):
        with pytest.raises(NotImplementedError, match="a pool is read token by token"):
            PATHS[path](package, strided)
        return
    answer = PATHS[path](package, strided, return_lse=True)
    low = PATHS[path]("refattn", side_by_side, return_lse=True)
    exact = PATHS[path]("refattn", wide(strided), return_lse=True)
    for one, right, other in zip(answer, exact, low, strict=True):
        seen = right.isfinite()
        assert torch.equal(one.isfinite(), seen)
        assert_close(one[seen], right[seen], other[seen])
