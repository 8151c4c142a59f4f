"""The ladder: each rung is right, and differs from the one before by little."""

import difflib
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from refattn import chunked_prefill
from refattn.modes import computing_in
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.tolerance import assert_close
from twinattn.course import ladder
from twinattn.kit import Case, build
from twinattn.kit.tolerance import WIDER

RUNGS = ladder.rungs("decode")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies matrices of bfloat16 wrongly
MOST_LINES = 48  # that a rung adds to the one before: the reduction is a kernel of its own
CASES = {
    "group": Case("group", tuple((1, n) for n in (5, 33, 0, 64, 17)), heads=(8, 2)),
    "one-head-each": Case("one-head-each", ((1, 40), (1, 32)), heads=(3, 3), block_size=24),
    "odd-group": Case("odd-group", ((1, 3), (1, 48)), heads=(6, 2), head_size=128, block_size=1),
    "large-pages": Case("large-pages", ((1, 65), (1, 64)), heads=(5, 1), block_size=64),
    "nothing": Case("nothing", ((1, 0),), heads=(4, 2)),
}


@pytest.fixture(autouse=True)
def few_keys_are_split(monkeypatch):
    """Let a few keys be several tiles and splits."""
    small = dict(KEYS=16, FEWEST_KEYS=16, MOST_KEYS=16, SPLITS=2, SEQUENCES=2)
    for rung in RUNGS:
        for name, value in small.items():
            if hasattr(rung.load(), name):
                monkeypatch.setattr(rung.load(), name, value)


def arguments_of(paged):
    """Return what a rung takes; poison is wherever no query may look, and in the table past a last block."""
    return paged.query, paged.key_cache, paged.value_cache, paged.batch.seq_lens, paged.batch.block_table


def expect(case, paged, dtype):
    """Return the output by the reference, in a wider type and in its own."""
    plan = chunked_prefill.plan(paged.batch, block_size=case.block_size)
    wide = (x.to(WIDER[dtype]) for x in (paged.query, paged.key_cache, paged.value_cache))
    with computing_in(dtype):
        low = chunked_prefill.attention(paged.query, paged.key_cache, paged.value_cache, plan)
    return chunked_prefill.attention(*wide, plan), low


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_is_right(rung, name, dtype, device):
    paged = build(CASES[name], dtype=dtype, device=device)
    out = rung.load().attention(*arguments_of(paged))
    ref, low = expect(CASES[name], build(CASES[name], dtype=dtype), dtype)
    assert_close(out.cpu(), ref, low)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_the_scale_is_that_of_the_call(rung, device):
    paged = build(CASES["odd-group"], device=device)
    out = rung.load().attention(*arguments_of(paged), softmax_scale=0.3)
    same = rung.load().attention(paged.query * (0.3 * 128**0.5), *arguments_of(paged)[1:])
    torch.testing.assert_close(out, same, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled")
def test_long_sequences_get_the_splits():
    """By shares, the splits of a ragged batch have about the same number of keys; before, all had as many splits."""
    paged = build(CASES["group"])
    seen = {}
    for rung in RUNGS[8:10]:
        module, launched = rung.load(), []
        reduce = module.reduce

        class Seen:
            def __getitem__(self, grid, reduce=reduce, launched=launched):
                def launch(parts, lses, *arguments, **sizes):
                    launched.append((lses > -torch.inf).sum(-1)[:, 0].tolist())
                    reduce[grid](parts, lses, *arguments, **sizes)

                return launch

        module.reduce = Seen()
        module.attention(*arguments_of(paged))
        module.reduce = reduce
        seen[rung.name] = launched[0]
    assert seen == {"splits": [1, 1, 0, 1, 1], "balance": [1, 2, 0, 4, 1]}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        (0, lambda x: x[..., :48].contiguous(), "query: expected|key_cache: expected"),
        (1, lambda x: x.transpose(1, 2), "key_cache: expected|value_cache: expected"),
        (3, lambda x: x.long(), r"seq_lens: expected int32 \[b"),
        (4, lambda x: x[:1], "block_table: expected"),
    ],
)
def test_bad_input_is_named(argument, wrong, message):
    given = list(arguments_of(build(CASES["group"])))
    given[argument] = wrong(given[argument])
    for rung in RUNGS[1:]:
        with pytest.raises(ValueError, match=message):
            rung.load().attention(*given)


def code(rung):
    """Return the lines of a rung below its docstring."""
    return rung.file.read_text().split('"""', 2)[2].splitlines()


@pytest.mark.parametrize("below", range(1, len(RUNGS) - 2))
def test_a_rung_is_one_change(below):
    """The first and the last are calls of the packages, and no change of a file."""
    lines = list(difflib.ndiff(code(RUNGS[below]), code(RUNGS[below + 1])))
    assert 1 <= sum(line.startswith("+ ") for line in lines) <= MOST_LINES
    assert sum(line.startswith("- ") for line in lines) <= MOST_LINES // 2


def test_rungs_are_short_and_say_what_they_gain():
    assert [rung.number for rung in RUNGS] == list(range(12))
    for rung in RUNGS:
        assert 30 <= rung.file.read_text().count("\n") <= 150
        idea, gain, source = rung.about
        assert idea and gain.startswith("Gain: ") and source.startswith("Source: ")


def test_an_unknown_ladder_is_refused():
    with pytest.raises(ValueError, match="ladder: expected one of decode, got 'prefil'"):
        ladder.rungs("prefil")
