"""Latents by warps with roles: the kernel for Hopper, interpreted on a CPU, against the reference.

On a card, every test of latents with 64 rows or more launches it.
"""

import importlib
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import fastattn
import fastattn.mla
from fastattn.kernels import order
from fastattn.kernels import triton as kernels_in_triton
from fastattn.kernels.triton import attention, latents_hopper, launch, load_latents_hopper
from fastattn.kernels.triton import tuning as triton_tuning
from tests.helpers.batches import Case
from tests.helpers.latents import OF_LATENTS, REAL, Latents, attend, by_reference, filled, in_8_bits
from tests.helpers.stored import E4M3, E5M2
from tests.helpers.tolerance import assert_matches_reference
from twinattn.course.gluon import interpret
from twinattn.course.gluon.interpret import hopper_on_a_cpu

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted; on a card the tests of paths launch it")

CASES = {  # lengths, heads, tokens in a block, and rows of padding
    "decodes": Case("decodes", ((1, 5), (1, 64), (1, 65), (1, 200)), heads=(64, 1), padding_rows=2),
    "two-tiles-each": Case("two-tiles-each", ((1, 130), (0, 40), (1, 3)), heads=(128, 1), block_size=24),
    "chunks": Case("chunks", ((3, 70), (2, 2), (5, 3)), heads=(64, 1), block_size=1, padding_rows=1),
    "queries-of-a-tile-that-end-in-two-steps": Case("queries", ((10, 136), (7, 195)), heads=(16, 1), block_size=16),
    "queries-of-a-tile-before-the-first-key": Case("no-keys", ((6, 3), (9, 70)), heads=(16, 1), padding_rows=1),
}
KINDS = {"float16": None, "e4m3": E4M3, "e5m2": E5M2}


def hold(case, kind, options, seed, dtype=torch.float16, larger=1.0):
    """Hold the kernel to the reference, and say whether it was launched; queries may be larger, and the scale less."""
    made = dict(dtype=dtype, sizes=REAL._replace(spare=64))
    given = Latents(case, **made) if kind is None else in_8_bits(case, kind, **made)
    given.query *= larger
    fixed = dict(latent_rank=REAL.rank, cache_scale=1.0 if kind is None else OF_LATENTS)
    options = filled(options, case.heads[0], "cpu") | dict(softmax_scale=0.07 / larger)
    arguments = given.absorbed, given.cache, given.batch
    with hopper_on_a_cpu(seed) as (_, kernel, *_), fastattn.use_kernel("triton"):
        out, lse = attend(fastattn.mla, *arguments, **fixed, **options)
    assert_matches_reference(out, lse, by_reference(attend, **fixed), *arguments, **options)
    return kernel.launched


@pytest.mark.parametrize("options", [{}, dict(sinks=True)], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_latents_of_64_rows_and_more(case, kind, options):
    """Numbers and quantized ones, tiles that are not full, keys of one step and of several, splits of them."""
    assert hold(case, kind, options, seed=0)


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@drawn(
    case=st.sampled_from(list(CASES.values())), kind=st.sampled_from(list(KINDS.values())), seed=st.integers(0, 10**6)
)
def test_in_any_order(case, kind, seed):
    """Whoever is first, warpgroups and what is asynchronous."""
    assert hold(case, kind, {}, seed)


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Accept calls in bfloat16, which Triton's interpreter multiplies wrongly, and the interpreter of Gluon rightly."""
    order.forget()
    monkeypatch.setattr(kernels_in_triton, "float_types", lambda device: [torch.bfloat16])
    yield
    order.forget()


@pytest.mark.parametrize("kind", KINDS.values(), ids=["bfloat16", *list(KINDS)[1:]])
def test_queries_in_bfloat16(kind, in_bfloat16):
    """Over quantized values products are of float16, in which these queries would be infinite: rows are divided."""
    assert hold(CASES["decodes"], kind, {}, seed=0, dtype=torch.bfloat16, larger=2.0**20)


@pytest.mark.parametrize("options", [{}, dict(sinks=True)], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_splits_of_a_sequence(kind, options, monkeypatch):
    """Each program has some steps of a long sequence, or none of a short one; sinks count once."""
    monkeypatch.setattr(triton_tuning, "sms_of", lambda device: 8)
    case = Case("splits", ((1, 700), (1, 5)), heads=(64, 1))
    (launched,) = hold(case, kind, options, seed=1)
    assert " x " in launched, "keys are not split"


WRONG, FENCE, DEADLOCK, MORE, END = "max error|NaN at", "without a fence", "deadlock", "has more", "under way"
MISTAKES = {  # the file, what stands there, what stands there instead, and what is found
    "keys-of-the-first-not-waited-for": (
        *(latents_hopper, "    mbarrier.wait(room.full.index(0), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}",
    ),
    "keys-of-the-second-not-waited-for": (
        *(latents_hopper, "    mbarrier.wait(room.full.index(1), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}",
    ),
    "a-parity-of-the-round-before": (
        *(latents_hopper, "room.full.index(1), now)", "room.full.index(1), now ^ 1)"),
        f"{WRONG}|{FENCE}|{DEADLOCK}",
    ),
    "weights-of-the-first-not-waited-for": (
        *(latents_hopper, "    mbarrier.wait(room.ready.index(0), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}",
    ),
    "weights-of-the-second-not-waited-for": (
        *(latents_hopper, "    mbarrier.wait(room.ready.index(1), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}",
    ),
    "weights-stored-while-the-second-reads-others": (
        *(latents_hopper, "    mbarrier.wait(room.read.index(1), now ^ 1)", "    pass"),
        f"{WRONG}|{FENCE}|{MORE}",
    ),
    "weights-stored-while-the-first-reads-others": (
        *(latents_hopper, "    mbarrier.wait(room.read.index(0), now)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}",
    ),
    "weights-that-are-never-ready": (
        latents_hopper,
        "    mbarrier.arrive(room.ready.index(WHO))",
        "    pass",
        DEADLOCK,
    ),
    "weights-that-the-first-never-gives-back": (latents_hopper, "    leave(room.read.index(0))\n", "", DEADLOCK),
    "weights-that-the-second-never-gives-back": (latents_hopper, "    leave(room.read.index(1))\n", "", DEADLOCK),
    "keys-that-the-first-never-gives-back": (
        *(latents_hopper, "    leave(room.empty.index(0))\n    leave(room.read", "    leave(room.read"),
        DEADLOCK,
    ),
    "keys-that-the-second-never-gives-back": (
        *(latents_hopper, "    leave(room.empty.index(1))\n    leave(room.read", "    leave(room.read"),
        DEADLOCK,
    ),
    "keys-given-back-before-their-products": (
        latents_hopper,
        """    acc, x, own_sums = warpgroup_mma_wait(0, deps=[outputs, x, own_sums])
    leave(room.empty.index(0))""",
        """    leave(room.empty.index(0))
    acc, x, own_sums = warpgroup_mma_wait(0, deps=[outputs, x, own_sums])""",
        f"{WRONG}|{FENCE}",
    ),
    "scores-not-waited-for": (
        *(
            latents_hopper,
            "return warpgroup_mma_wait(0, deps=[products])",
            "return warpgroup_mma_wait(1, deps=[products])",
        ),
        "before it is waited for",
    ),
    "sums-of-the-other-not-waited-for": (*(latents_hopper, "    mbarrier.wait(room.summed.index(0), 0)\n", "", WRONG),),
    "a-slot-filled-while-it-is-read": (
        *(load_latents_hopper, "        mbarrier.wait(room.empty.index(slot), (step >> 1 & 1) ^ 1)\n", ""),
        f"{WRONG}|{FENCE}|{MORE}|{DEADLOCK}",
    ),
    "keys-that-are-never-full": (
        load_latents_hopper,
        "            leave(room.full.index(slot))\n        else",
        "            pass\n        else",
        DEADLOCK,
    ),
    "quantized-keys-that-are-never-full": (
        *(load_latents_hopper, "            mbarrier.arrive(room.full.index(slot))\n", "            pass\n"),
        DEADLOCK,
    ),
    "copies-not-waited-for": (
        *(load_latents_hopper, "            async_copy.wait_group(0)\n        else", "        else"),
        f"{WRONG}|{FENCE}|{END}",
    ),
    "no-fence-after-keys": (load_latents_hopper, "        fence_async_shared()\n        if", "        if", FENCE),
    "no-fence-after-weights": (latents_hopper, "    fence_async_shared()\n    mbarrier", "    mbarrier", FENCE),
    "a-barrier-for-one-of-two-consumers": (latents_hopper, "count=256)", "count=128)", f"{MORE}|{DEADLOCK}"),
    "one-thread-for-all-copies": (latents_hopper, "count=128 if", "count=1 if", MORE),
    "one-thread-that-has-read": (
        latents_hopper,
        "room.read.index(slot), count=128",
        "room.read.index(slot), count=1",
        MORE,
    ),
    "sums-of-one": (latents_hopper, "count=2)", "count=1)", f"{WRONG}|{MORE}|{DEADLOCK}"),
    "a-step-without-its-mask": (latents_hopper, "context + tile.first_row", "context + 1 + tile.first_row", WRONG),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Launch the kernel with another line in one of its files."""

    def plant(file, right, wrong):
        for module in (load_latents_hopper, latents_hopper):
            name, text = module.__name__.rpartition(".")[2], Path(module.__file__).read_text()
            if module is file:
                assert text.count(right) == 1, f"{name}.py: {right!r} is there {text.count(right)} times"
                text = text.replace(right, wrong)
            monkeypatch.delitem(sys.modules, f"planted_{name}", raising=False)
            text = text.replace(load_latents_hopper.__name__, "planted_load_latents_hopper")
            (tmp_path / f"planted_{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module("planted_latents_hopper")
        for user in (attention, interpret):
            monkeypatch.setattr(user, "latents_hopper", module)

    return plant


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, planted):
    """In one of a few orders, with keys of three steps and more, and with queries that see different keys."""
    *mistake, says = MISTAKES[name]
    planted(*mistake)
    cases = CASES["decodes"], CASES["queries-of-a-tile-that-end-in-two-steps"]
    kinds = [KINDS["e4m3"]] if "quantized" in name else [None]
    found = []
    for seed, case, kind in product(range(12), cases, kinds):
        try:
            hold(case, kind, {}, seed)
        except AssertionError as error:
            found.append(str(error))
            break
    assert found and re.search(says, found[0]), found
