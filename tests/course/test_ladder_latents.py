"""The ladder of latents: each rung is right; that it is one small change is a test of all ladders."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from refattn.modes import computing_in
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.tolerance import assert_close
from twinattn.course import ladder
from twinattn.course.batches import Latents
from twinattn.kit import Case, build
from twinattn.kit.check import check
from twinattn.kit.tolerance import WIDER

RUNGS = ladder.rungs("latents")
FP8 = RUNGS[-1]
PROPERTIES = ("call", "writes", "mask", "answer", "empty rows", "blocks", "tail", "table", "scale")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies matrices of bfloat16 wrongly
RANK, ROPE, NOPE, VALUE_SIZE = 64, 16, 24, 40
CASES = {
    "few-heads": Case("few-heads", tuple((1, n) for n in (5, 33, 0, 64, 17)), heads=(8, 1)),
    "many-heads": Case("many-heads", ((1, 65), (1, 40)), heads=(20, 1), block_size=24),
    "one-head": Case("one-head", ((1, 3), (1, 48)), heads=(1, 1), block_size=1),
    "nothing": Case("nothing", ((1, 0),), heads=(4, 1)),
}
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)


@pytest.fixture(autouse=True)
def few_keys_are_split(monkeypatch):
    """Make steps, splits and tiles so small that a few keys take several steps, and twenty heads two tiles."""
    shapes = {
        "64_heads": ((16, 16, 4, 3, 2), (16, 16, 8, 2, 4)),
        "halves": ((16, 16, 4, 3, 2, 1), (16, 16, 4, 1, 4, 2)),
    }
    for rung in RUNGS:
        small = dict(KEYS=16, FEWEST_KEYS=16, SPLITS=2, PER_SM=8)
        small |= dict(zip(("FEW", "MANY"), shapes.get(rung.name, ()), strict=False))
        for name, value in small.items():
            if hasattr(rung.load(), name):
                monkeypatch.setattr(rung.load(), name, value)


def latents_of(case, dtype, device="cpu"):
    """Return the arguments of a rung, with poison in all memory that no query may see."""
    paged = build(case, dtype=dtype, device=device)  # keys are latents and rotary keys, of one head
    generator = torch.Generator().manual_seed(1)
    heads = case.heads[0]
    query = torch.randn(len(case.lens), heads, NOPE + ROPE, generator=generator)
    matrices = dict(key_projection=NOPE, value_projection=VALUE_SIZE)
    given = {
        name: torch.randn(heads, size, RANK, generator=generator) / RANK**0.5 for name, size in matrices.items()
    } | dict(query=query)
    given = {name: x.to(device, dtype) for name, x in given.items()}
    tables = dict(seq_lens=paged.batch.seq_lens, block_table=paged.batch.block_table)
    return given | tables | dict(cache=paged.key_cache[:, :, 0].contiguous(), softmax_scale=0.2)


def wider(given, dtype):
    """Return arguments in a wider type."""
    return {x: y.to(WIDER[dtype]) if torch.is_tensor(y) and y.is_floating_point() else y for x, y in given.items()}


def expect(given, dtype):
    """Return the output of the formula, in a wider type and in its own."""
    attention = RUNGS[0].load().attention
    with computing_in(dtype):
        low = attention(**given)
    return attention(**wider(given, dtype)), low


def attend(rung, given):
    """Call a rung; the last one takes values that fp8 holds, as fp8."""
    cache = given["cache"]
    if rung is not FP8:
        return rung.load().attention(**given)
    own = {name: x for name, x in given.items() if name != "cache"}
    return rung.load().attention(**own, fp8_cache=(2 * cache.float()).to(torch.float8_e4m3fn), cache_scale=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
@each_rung
def test_each_rung_is_right(rung, name, dtype, device):
    case = CASES[name]
    case = Case(name, case.lens, case.heads, head_size=RANK + ROPE, block_size=case.block_size)
    given = latents_of(case, dtype, device)
    if rung is FP8:  # values that fp8 holds: there is nothing else to differ
        given["cache"] = given["cache"].clamp(-200, 200).to(torch.float8_e4m3fn).to(dtype)
    ref, low = expect({x: y.cpu() if torch.is_tensor(y) else y for x, y in given.items()}, dtype)
    assert_close(attend(rung, given).cpu(), ref, low)


def test_absorbing_is_algebra():
    """Without rounding, the second rung has the outputs of the first: the matrix is applied to the query."""
    given = wider(
        latents_of(Case("a", ((1, 33), (1, 7)), heads=(3, 1), head_size=RANK + ROPE), torch.float32), torch.float32
    )
    torch.testing.assert_close(RUNGS[1].load().attention(**given), RUNGS[0].load().attention(**given))


def as_mla(rung):
    """Return a rung as a function of the path `mla`, whose queries are absorbed: both projections are identities.

    Rows of a pool of that path may be longer than a latent and a rotary key, and those of a rung are not.
    """

    def attend(query, cache, seq_lens, block_table, latent_rank, softmax_scale, **scales):
        one = torch.eye(latent_rank, dtype=query.dtype, device=query.device).repeat(query.shape[1], 1, 1)
        cache = cache[..., : query.shape[2]].contiguous()
        return rung.load().attention(query, cache, seq_lens, block_table, one, one, softmax_scale, **scales)

    def decode(query, cache, seq_lens, block_table, latent_rank, softmax_scale):
        return attend(query, cache, seq_lens, block_table, latent_rank, softmax_scale)

    def decode_fp8(query, cache, seq_lens, block_table, latent_rank, softmax_scale, cache_scale):
        return attend(query, cache, seq_lens, block_table, latent_rank, softmax_scale, cache_scale=cache_scale)

    return decode_fp8 if rung is FP8 else decode


@pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles each of the shapes")
@each_rung
def test_each_rung_keeps_the_contract(rung):
    few = dict(heads=((18, 1),), head_sizes=((80, 64),), block_sizes=(16,))
    only = ("call", "fp8 latents") if rung is FP8 else PROPERTIES
    report = check(as_mla(rung), "mla", dtypes=[torch.float32], examples=1, only=only, limits=few)
    assert {found.property: found.outcome for found in report.findings} == dict.fromkeys(only, "honoured")


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("query", lambda x: x.transpose(0, 1), "query: expected|block_table: expected|seq_lens: expected"),
        ("cache", lambda x: x[..., :72].contiguous(), "cache: expected a latent and a rotary key in each row"),
        ("seq_lens", lambda x: x.long(), r"seq_lens: expected int32 \[b"),
        ("block_table", lambda x: x[:1], "block_table: expected"),
        ("value_projection", lambda x: x[:1], "value_projection: expected"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(argument, wrong, message):
    given = latents_of(Case("a", ((1, 33), (1, 7)), heads=(3, 1), head_size=RANK + ROPE), torch.float32)
    given[argument] = wrong(given[argument])
    for rung in RUNGS[2:-1]:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            rung.load().attention(**given)


@pytest.mark.skipif(not INTERPRETED, reason="the tensors are on a CPU")
def test_each_rung_is_timed_on_the_same_numbers():
    """The pool of fp8 has those of the pool of bfloat16, so that one reference judges all rungs."""
    batch = Latents(((1, 40), (1, 20)), heads=4, rank=32, rope=16, nope=16, value_size=16, block_size=16)
    inputs = batch.make_inputs(torch.device("cpu"))
    assert torch.equal(inputs["cache"].float(), inputs["fp8_cache"].float())
    inputs = {x: y.float() if torch.is_tensor(y) and y.dtype == torch.bfloat16 else y for x, y in inputs.items()}
    expected = ladder.call_of(RUNGS[0], batch, inputs)()
    for rung in RUNGS[1:]:
        torch.testing.assert_close(ladder.call_of(rung, batch, inputs)(), expected, atol=1e-4, rtol=1e-4)
