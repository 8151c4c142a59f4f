"""What one request cannot do to another: its memory, its NaN, and the way in which its tensors lie.

A cache outlives the request that wrote it. So no bit of an answer may depend on hidden memory, and what is wrong
with one sequence stays with it. But NaN that a query does see comes out: nothing hides a broken model.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from refattn.batch import Batch, Prefix
from refattn.modes import computing_in
from tests.helpers.batches import FINITE_POISON, HARMLESS, POISON, Case, Paged, build, plan_and_attend, poisoned
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.strides import STRIDES
from tests.helpers.tolerance import assert_close, assert_matches_reference, assert_twins_agree
from tests.table import PATHS, pairs

# Decodes that end in the middle of a block, at its end and after one token of it; keys of a sequence without queries.
CASE = Case(
    "isolated",
    ((1, 5), (1, 33), (20, 37), (0, 7), (1, 48), (1, 41), (3, 3)),
    heads=(4, 2),
    padding_rows=3,
)
SHARED = 4, 5, 32  # in a cascade, sequences 4 and 5 share 32 keys
CHUNK = 16

# By name: the path is what stands before the first dash.
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked_prefill": {},
    "chunked_prefill-window": dict(window_size=(11, 0)),
    "varlen-window": dict(window_size=(11, 0)),
    "sliding_window": dict(window_size=(11, 0)),
    "local": dict(chunk_size=CHUNK),
    "cascade": {},
    "cascade-window": dict(window_size=(11, 0)),
    "differential-window": dict(window_size=(11, 0)),
    # Triton's interpreter is slow, and its kernel does not hide keys in another way for these.
    "chunked_prefill-both-ways": dict(causal=False, window_size=(11, 3)),
    "chunked_prefill-softcap": dict(softcap=2.0, window_size=(11, 0)),
    "chunked_prefill-one-key": dict(window_size=(0, 0), alibi_slopes=True),
    "chunked_prefill-invariant": dict(window_size=(11, 0), batch_invariant=True),
    "chunked_prefill-scale": dict(softmax_scale=-0.3, sinks=True),
    "varlen-both-ways": dict(causal=False),
    "local-alibi": dict(chunk_size=CHUNK, alibi_slopes=True),
    "differential": dict(sinks=True, softcap=2.0),
}
SLOW = list(OPTIONS)[8:]
SEEING = {  # where those queries that are to see NaN do
    "chunked_prefill": {},
    "chunked_prefill-softcap": dict(softcap=2.0),
    "chunked_prefill-invariant": dict(batch_invariant=True),
    "chunked_prefill-no-scale": dict(softmax_scale=0.0),
    "varlen": {},
    "varlen-no-scale": dict(softmax_scale=0.0),
    "sliding_window": dict(window_size=(40, 0)),
    "local": dict(chunk_size=48),
    "cascade": {},
    "differential": {},
    "differential-softcap": dict(softcap=2.0),
    "differential-no-scale": dict(softmax_scale=0.0),
}


@dataclass(frozen=True)
class Twin:
    """The reference, or the fast twin by a kernel."""

    name: str
    kernel: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.kernel is None else self.kernel.dtypes[0]

    @property
    def package(self) -> str:
        return "refattn" if self.kernel is None else "fastattn"

    def call(self, path: str, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        module = importlib.import_module(f"{self.package}.{path}")
        return plan_and_attend(module, *arguments, **options, return_lse=True)

    def check(self, assertion: Callable[[], None]) -> None:
        if self.kernel is None:
            assertion()
        else:
            with self.kernel.forced():
                self.kernel.check(assertion)


TWINS = [Twin("reference"), *(Twin(kernel.name, kernel) for kernel in PRESENT)]
INTERPRETED = "triton" if os.environ["TWINATTN_TEST_DEVICE"] == "cpu" else None


def first_seen(path: str, options: dict, query_len: int, seq_len: int) -> int:
    """Return the first key of a sequence that one of its queries sees."""
    context = seq_len - query_len
    if not query_len:
        return seq_len
    if path == "local":
        return max(0, context) // options["chunk_size"] * options["chunk_size"]
    left = options.get("window_size", (-1, -1))[0]
    return max(0, context - left) if left >= 0 else 0


def lay_out(path: str, options: dict, twin: Twin, device: str, poison=POISON) -> tuple[tuple, dict]:
    """Lay out the arguments of a path, with poison in every place that no query sees; and its options."""
    inputs = build(CASE, dtype=twin.dtype, device=device, poison=poison)
    firsts = [first_seen(path, options, q, s) for q, s in CASE.lens]
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.1, 0.5, CASE.heads[0], device=device)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2.0, 3.0, CASE.heads[0], device=device)
    if path == "varlen":
        query, *rows, batch = inputs.rows
        seen = torch.zeros(len(rows[0]), dtype=torch.bool)
        for first, (begin, end) in zip(firsts, batch.key_rows(), strict=True):
            seen[begin + first : end] = True
        rows = [poison_all_but(x, seen, poison, kind) for kind, x in enumerate(rows)]
        return (query, *rows, batch), options

    query, *pools, batch = inputs.tensors
    if path == "cascade":
        batch = PATHS["cascade"].batch(inputs)
        options["prefixes"] = shared_by(twin, batch)
    seen = torch.zeros(pools[0].shape[:2], dtype=torch.bool)
    for first, (_, s), blocks in zip(firsts, CASE.lens, batch.block_table.tolist(), strict=True):
        for j in range(first, s):
            seen[blocks[j // CASE.block_size], j % CASE.block_size] = True
    pools = [
        poison_all_but(x.flatten(0, 1), seen.flatten(), poison, kind).view(x.shape) for kind, x in enumerate(pools)
    ]
    if path == "differential":
        pools = paired(options, *pools)
    return (query, *pools, batch), options


def paired(options: dict, *pools: torch.Tensor) -> list[torch.Tensor]:
    """Return one pool of both heads of each pair, and add to the options what differential attention takes besides."""
    options |= dict(lambda_full=torch.tensor(0.35, device=pools[0].device), lambda_init=0.2)
    return [pairs(*pools)]


def poison_all_but(rows: torch.Tensor, seen: torch.Tensor, poison, kind: int) -> torch.Tensor:
    junk = poisoned(len(rows), *rows.shape[1:], poison, first=kind).to(rows)
    return torch.where(seen.to(rows.device)[:, None, None], rows, junk)


def shared_by(twin: Twin, batch: Batch) -> list[Prefix]:
    module = importlib.import_module(f"{twin.package}.cascade")
    requests = batch.query_lens.tolist(), batch.seq_lens.tolist(), batch.block_table.tolist()
    prefixes = module.find_prefixes(*requests, block_size=CASE.block_size)
    assert prefixes == [Prefix(SHARED[0], SHARED[1] + 1, SHARED[2])]
    return prefixes


# --- memory that no query may see ---


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        pytest.param(name, twin, id=f"{name}-{twin.name}")
        for name in OPTIONS
        for twin in TWINS
        if twin.name != INTERPRETED or name not in SLOW
    ],
)
def test_no_bit_depends_on_what_no_query_may_see(name, twin, device):
    """In turn NaN, both infinities and 1e4, which moves an answer a little: the weight of such a key has to be 0.

    What NaN has spoilt in the answer of a kernel that multiplies by that weight is computed again, to the tolerance.
    """
    path, options = name.partition("-")[0], OPTIONS[name]
    recomputed = twin.kernel is not None and twin.kernel.recomputed

    def assert_isolated():
        arguments, filled = lay_out(path, options, twin, device)
        answer = twin.call(path, *arguments, **filled)
        if recomputed:
            arguments, filled = lay_out(path, options, twin, device, poison=FINITE_POISON)
        others, _ = lay_out(path, options, twin, device, poison=HARMLESS)
        exact = twin.call(path, *arguments, **filled) if recomputed else answer
        for one, other in zip(exact, twin.call(path, *others, **filled), strict=True):
            assert torch.equal(one, other)
        if twin.kernel is not None:
            reference = partial(plan_and_attend, importlib.import_module(f"refattn.{path}"))
            assert_matches_reference(*answer, reference, *others, **filled)

    twin.check(assert_isolated)


# --- NaN that a query sees ---


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize("name", SEEING)
def test_nan_stays_with_its_sequence_and_comes_out_there(name, twin, device):
    """In a query over 5 keys, in a key of a prompt of 3, and in a value among 37."""
    path, options = name.partition("-")[0], SEEING[name]

    def assert_isolated():
        arguments, filled = lay_out(path, options, twin, device)
        clean = twin.call(path, *arguments, **filled)
        query, *stores, batch = (x.clone() if isinstance(x, torch.Tensor) else x for x in arguments)
        query[0, 1, 7] = torch.nan
        for kind, (sequence, j) in enumerate(((6, 0), (2, 10))):
            if path == "varlen":
                row = sum(s for _, s in CASE.lens[:sequence]) + j
                stores[kind][row, 1, 7] = torch.nan
            else:
                block = int(batch.block_table[sequence, j // CASE.block_size])
                pool = stores[0][1, kind] if path == "differential" else stores[kind]
                pool[block, j % CASE.block_size, -1, 7] = torch.nan
        broken = query, *stores, batch
        out, lse = twin.call(path, *broken, **filled)
        reference, _ = Twin("reference").call(path, *broken, **filled)
        assert reference.isnan().any(-1).any(-1).nonzero()[:, 0].tolist() == [0, *range(2, 22), 24, 25, 26]
        assert out[reference.isnan()].isnan().all(), "a NaN is hidden"
        healthy = [1, 22, 23, 27, 28, 29]  # with three padding rows
        assert torch.equal(out[healthy], clean[0][healthy]) and torch.equal(lse[healthy], clean[1][healthy])

    twin.check(assert_isolated)


@pytest.mark.parametrize(
    "twin", [twin for twin in TWINS if twin.name in ("reference", "cpu", "triton")], ids=lambda twin: twin.name
)
@pytest.mark.parametrize("path", ["chunked_prefill", "varlen"])
def test_scores_of_minus_infinity(path, twin, device):
    """Those of some keys have no weight. Where all are, the reference says NaN, and our kernels that nothing is seen.

    See docs/proof/conventions.md.
    """

    def hold():
        inputs = build(Case("endless", ((1, 7), (2, 20), (20, 45)), heads=(4, 2)), dtype=twin.dtype, device=device)
        query, *stores, batch = inputs.rows if path == "varlen" else inputs.tensors
        query, key, value = query.abs(), stores[0].clone(), stores[1]
        for i, j in ((0, 0), *((2, j) for j in range(25))):  # the third sequence's whole context
            key[(27 * (i > 0) + j,) if path == "varlen" else (batch.block_table[i, j // 16], j % 16)] = -torch.inf
        query[1, 1, 7] = torch.inf  # the second sequence, in the first group
        places = slice(7, 27) if path == "varlen" else batch.block_table[1, :2].long()
        key[places, ..., 0, 7] = -1.0
        out, lse = twin.call(path, query, key, value, batch)
        stores = (query, key, value)
        wide = Twin("reference").call(path, *(x.double() for x in stores), batch)
        with computing_in(twin.dtype):
            low = Twin("reference").call(path, *stores, batch)
        others = torch.ones_like(lse, dtype=torch.bool)
        others[1, 1] = False
        for one, right, of_low, name in zip((out, lse), wide, low, ("out", "lse"), strict=True):
            assert_close(one[others], right[others], of_low[others], name=name)
        out, lse = out.cpu(), lse.cpu()
        if twin.name == "reference":
            assert out[1, 1].isnan().all() and lse[1, 1] == -torch.inf
        else:
            assert not out[1, 1].any() and lse[1, 1] == -torch.inf

    twin.check(hold)


# --- tensors of any strides ---


@pytest.mark.parametrize(
    ("change", "path", "kernel"),
    every_pair_on_cpu(STRIDES, ["chunked_prefill", "varlen", "differential"], PRESENT),
    ids=str,
)
def test_tensors_of_any_strides(change, path, kernel, device):
    """Queries, keys and values; a block table whose columns lie apart."""
    case = Case("strides", ((3, 20), (1, 5), (1, 7)), heads=(4, 2))
    inputs = build(case, dtype=kernel.dtypes[0], device=device, poison=HARMLESS)
    query, *pools, batch = inputs.rows if path == "varlen" else inputs.tensors
    options = {}
    if path == "differential":
        pools = paired(options, *pools)
    table = torch.stack([batch.block_table, torch.full_like(batch.block_table, 10**6)], dim=-1)[..., 0]
    assert table.stride(1) == 2
    arguments = *(STRIDES[change](x) for x in (query, *pools)), replace(batch, block_table=table)
    with kernel.forced():
        kernel.check(assert_twins_agree, path, *arguments, **options)


# --- no queries ---


@pytest.mark.covers("A34", "B60", "D187")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
@pytest.mark.parametrize("path", [path for path in PATHS if PATHS[path].keys in ("rows", "pages", "pairs")])
def test_without_sequences_all_rows_are_padding(path, twin, device):
    """Also without rows: the answer is as empty as the question. The memory holds poison."""
    table = torch.zeros(0, 2, dtype=torch.int32, device=device)
    cu_seqlens_q, seq_lens = (torch.zeros(size, dtype=torch.int32, device=device) for size in (1, 0))
    batch = Batch(cu_seqlens_q, seq_lens, table, 0, 0)
    query, *rows = (poisoned(count, heads, 64).to(device, twin.dtype) for count, heads in ((3, 4), (32, 2), (32, 2)))
    pools = [x.view(2, 16, 2, 64) for x in rows]

    def assert_empty():
        for t in (0, 3):
            inputs = Paged(query[:t], *pools, batch, [], [], *rows)
            out, lse = PATHS[path](twin.package, inputs, return_lse=True)
            assert out.shape == (t, 4, 64) and not out.any()
            assert lse.shape == (t, 4) and (lse == -torch.inf).all()

    twin.check(assert_empty)
