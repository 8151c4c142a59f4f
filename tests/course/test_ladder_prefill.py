"""The ladder of prefills: each rung is right; that it is one small change is a test of all ladders."""

import inspect
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from fastattn.kernels.triton.tuning import LaunchConfig
from refattn import chunked_prefill
from refattn.modes import computing_in
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.tolerance import assert_close
from twinattn.course import ladder
from twinattn.kit import Case, build
from twinattn.kit.check import check
from twinattn.kit.tolerance import WIDER

RUNGS = ladder.rungs("prefill")
PAGES = 9  # the first rung over pages
PROPERTIES = ("call", "writes", "mask", "answer", "empty rows", "upper bounds")
OF_PAGES = ("blocks", "tail", "table")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies matrices of bfloat16 wrongly
CASES = {  # first rows at any place of a step of 16 keys: the last but one, the last, the first
    "ragged": Case("ragged", ((1, 33), (0, 7), (20, 20), (5, 40), (3, 3)), heads=(8, 2)),
    "one-head-each": Case("one-head-each", ((17, 40), (16, 16)), heads=(3, 3), block_size=24),
    "odd-group": Case("odd-group", ((20, 34), (3, 18), (18, 34)), heads=(6, 2), head_size=128, block_size=1),
    "more-queries-than-keys": Case("more-queries-than-keys", ((9, 4), (6, 0), (2, 2)), heads=(5, 1), block_size=64),
    "no-query": Case("no-query", ((0, 5), (0, 0)), heads=(4, 2)),
}


@pytest.fixture(autouse=True)
def a_few_rows_are_several_tiles(monkeypatch):
    """Make tiles and steps small, so that short sequences have several."""
    shape = LaunchConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, splits=1, most_splits=1)
    for rung in RUNGS:
        for name, value in dict(ROWS=16, KEYS=16, SHAPE=shape).items():
            if hasattr(rung.load(), name):
                monkeypatch.setattr(rung.load(), name, value)


def arguments_of(rung, paged):
    """Return the arguments of a rung by name, with poison wherever no query may look and past the last blocks."""
    names = inspect.signature(rung.load().attention).parameters
    batch, (_, key, value, _) = paged.batch, paged.rows
    given = dict(query=paged.query, key=key, value=value, key_cache=paged.key_cache, value_cache=paged.value_cache)
    given |= {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return {name: given[name] for name in names if name in given}


def attend(rung, paged, **more):
    return rung.load().attention(**arguments_of(rung, paged), **more)


def expect(case, paged, dtype):
    """Return the output by the reference, in a wider type and in its own."""
    plan = chunked_prefill.plan(paged.batch, block_size=case.block_size)
    wide = (x.to(WIDER[dtype]) for x in (paged.query, paged.key_cache, paged.value_cache))
    with computing_in(dtype):
        low = chunked_prefill.attention(paged.query, paged.key_cache, paged.value_cache, plan)
    return chunked_prefill.attention(*wide, plan), low


def is_refused(rung, paged):
    """Return whether a rung refuses a device, which it has to do by the name of what it needs."""
    needed = rung.missing(paged.query.device)
    if needed is not None:
        with pytest.raises(NotImplementedError, match=r"query: expected to be on a Hopper GPU"):
            attend(rung, paged)
    return needed is not None


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_is_right(rung, name, dtype, device):
    paged = build(CASES[name], dtype=dtype, device=device)
    if not is_refused(rung, paged):
        ref, low = expect(CASES[name], build(CASES[name], dtype=dtype), dtype)
        assert_close(attend(rung, paged).cpu(), ref, low)


@pytest.mark.skipif(INTERPRETED, reason="for the tiles that are launched")
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_is_right_with_the_tiles_of_the_product(rung, device, monkeypatch):
    """A few hundred queries are several tiles of 128 rows, and on Hopper go to the warps with roles."""
    monkeypatch.undo()
    case = Case("long", ((1, 300), (200, 333), (130, 130)), heads=(8, 2), head_size=128)
    paged = build(case, dtype=HALF, device=device)
    if not is_refused(rung, paged):
        ref, low = expect(case, build(case, dtype=HALF), HALF)
        assert_close(attend(rung, paged).cpu(), ref, low)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_the_scale_is_that_of_the_call(rung, scale, device):
    paged = build(CASES["odd-group"], device=device)
    if not is_refused(rung, paged):
        given = arguments_of(rung, paged) | dict(query=paged.query * (scale * 128**0.5))
        torch.testing.assert_close(attend(rung, paged, softmax_scale=scale), rung.load().attention(**given))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles each of the shapes")
@pytest.mark.parametrize("rung", RUNGS[:-1], ids=lambda rung: rung.name)
def test_each_rung_keeps_the_contract(rung):
    few = dict(heads=((6, 2),), head_sizes=((64, 64),), block_sizes=(16,))
    path, only = ("varlen", PROPERTIES) if rung.number < PAGES else ("chunked_prefill", PROPERTIES + OF_PAGES)
    report = check(rung.load().attention, path, dtypes=[torch.float32], examples=1, only=only, limits=few)
    assert {found.property: found.outcome for found in report.findings} == dict.fromkeys(only, "honoured")
