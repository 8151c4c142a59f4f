"""The interpreter of Gluon: mistakes that are planted in our kernels for Hopper, and what it says of each.

A mistake is a line of the kernel's file that is another one. Which of them shows in how many orders is up to the draw:
a few orders find each.
"""

import importlib
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import refattn.chunked_prefill
import refattn.varlen
from fastattn.kernels import device as devices
from fastattn.kernels.triton import launch, load_hopper, prompts_hopper
from fastattn.kernels.triton.merge import Out, whole
from fastattn.kernels.triton.tuning import LaunchConfig
from refattn.options import AttentionOptions
from tests.helpers.batches import Case, build
from twinattn.course.gluon.interpret import Interpreted
from twinattn.course.gluon.values import FUNCTIONS, KernelError, Value, address_of, load, store, value_of
from twinattn.kit import assert_close

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="mistakes run in the interpreter: on a GPU they hang")

LENS = ((70, 330), (0, 40), (150, 250), (20, 9))
ORDERS = 12  # that are tried at most
WRONG, FENCE, DEADLOCK, MORE, END = "wrong", "without a fence", "deadlock", "arrivals has more", "under way"
COUNTED = "counters are not 0 again"
MISTAKES = {  # the file, what stands there, what stands there instead, and what is found
    "scores-not-waited-for": (
        *(prompts_hopper, "        products = warpgroup_mma_wait(1, deps=[products])\n", ""),
        "before it is waited for",
    ),
    "keys-given-back-before-their-products": (
        prompts_hopper,
        """        products = warpgroup_mma_wait(1, deps=[products])
        leave(room.no_keys.index(slot))""",
        """        leave(room.no_keys.index(slot))
        products = warpgroup_mma_wait(1, deps=[products])""",
        f"{WRONG}|{FENCE}",
    ),
    "keys-never-given-back": (
        *(prompts_hopper, "        leave(room.no_keys.index(slot))\n        if", "        if"),
        DEADLOCK,
    ),
    "queries-never-given-back": (
        *(prompts_hopper, "        mbarrier.arrive(room.no_queries.index(barrier))", "        pass"),
        DEADLOCK,
    ),
    "keys-not-waited-for": (
        prompts_hopper,
        "        mbarrier.wait(room.has_keys.index(slot), parity(items))\n        if not",
        "        if not",
        f"{WRONG}|{FENCE}",
    ),
    "a-parity-of-the-round-before": (
        prompts_hopper,
        "mbarrier.wait(room.has_values.index(value_slot), parity(items - 1))\n        if not",
        "mbarrier.wait(room.has_values.index(value_slot), parity(items - 1) ^ 1)\n        if not",
        DEADLOCK,
    ),
    "a-slot-filled-while-it-is-read": (
        *(load_hopper, "    mbarrier.wait(empty.index(slot), parity(item) ^ 1)\n", ""),
        f"{MORE}|{DEADLOCK}",
    ),
    "a-barrier-for-one-of-two-consumers": (
        *(prompts_hopper, "mbarrier.init(room.no_values.index(slot), count=2 * 128)"),
        *("mbarrier.init(room.no_values.index(slot), count=128)", f"{DEADLOCK}|{MORE}"),
    ),
    "a-thread-too-few": (prompts_hopper, "count=128 + 1)", "count=128)", MORE),
    "half-of-the-bytes": (
        *(load_hopper, "mbarrier.expect(full.index(slot), BYTES)", "mbarrier.expect(full.index(slot), BYTES // 2)"),
        DEADLOCK,
    ),
    "no-fence-after-copies-by-threads": (
        prompts_hopper,
        "        if not room.IN_BULK:\n            fence_async_shared()\n        _take_turn",
        "        _take_turn",
        FENCE,
    ),
    "no-fence-after-zeros-are-written": (
        load_hopper,
        "part.load(LAYOUT), 0))\n    fence_async_shared()",
        "part.load(LAYOUT), 0))",
        FENCE,
    ),
    "no-first-turn": (prompts_hopper, "        give_turn(WHO)  # the first", "        pass  # the first", DEADLOCK),
    "a-turn-kept": (prompts_hopper, "        give_turn(WHO)\n        products", "        products", DEADLOCK),
    "copies-never-waited-for": (load_hopper, "    async_copy.wait_group(0)", "    pass", END),
    "pairs-swapped": (prompts_hopper, 'f16x2.f32 $0, $2, $1;"\n', 'f16x2.f32 $0, $1, $2;"\n', WRONG),
    "a-tile-that-is-not-cleared": (
        *(prompts_hopper, "            clear_rows(room.value.index(items % SLOTS), behind)", "            pass"),
        WRONG,
    ),
    "a-key-too-few": (prompts_hopper, "column <= (seen.last", "column < (seen.last", WRONG),
    "a-step-without-its-mask": (load_hopper, "0) // TILE.KEYS, 1)", "0) // TILE.KEYS - 1, 1)", WRONG),
    "values-of-the-first-step": (load_hopper, "        value_at = next_at\n", "", WRONG),
    "a-factor-of-the-new-maximum": (prompts_hopper, "gl.exp2(old_max - start)", "gl.exp2(row_max - start)", WRONG),
    "copies-in-no-group": (load_hopper, "    async_copy.commit_group()\n", "", END),
    "a-turn-of-one-warpgroup": (prompts_hopper, "bar.sync 8, 256;", "bar.sync 8, 128;", "named barrier 8 expects"),
    "a-counter-that-is-not-set-back": (load_hopper, "        gl.store(counters, 0)\n", "", COUNTED),
    "all-panels-of-the-first": (prompts_hopper, "q[i], key", "q[0], key", WRONG),
    "a-panel-not-added": (prompts_hopper, "use_acc=i > 0", "use_acc=False", WRONG),
    "one-panel-of-a-tile": (load_hopper, "column + i * apart[1]]", "column]", WRONG),
    "one-panel-of-rows": (load_hopper, "head + i * apart", "head", WRONG),
    "a-half-that-waits-for-both": (prompts_hopper, "count=TILE.QUERY_SLOTS)", "count=2)", DEADLOCK),
    "another-instruction": (prompts_hopper, "bar.arrive 9, 256; mov", "membar.cta; mov", "inline assembly"),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Import the prompts on Hopper with another line in one of their files."""

    def import_with(file=None, right="", wrong=""):
        for module in (load_hopper, prompts_hopper):
            name, text = module.__name__.rpartition(".")[2], Path(module.__file__).read_text()
            if module is file:
                assert text.count(right) == 1, f"{name}.py: {right!r} is there {text.count(right)} times"
                text = text.replace(right, wrong)
            monkeypatch.delitem(sys.modules, f"planted_{name}", raising=False)
            (tmp_path / f"planted_{name}.py").write_text(text.replace(load_hopper.__name__, "planted_load_hopper"))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module("planted_prompts_hopper")

    return import_with


def found_in(module, given, plan, expected, seed):
    """Launch the kernel of a module in one order, and return what is found."""
    query, keys, values = given
    shape = *query.shape[:2], values.shape[-1]
    out = Out(query.new_full(shape, torch.nan), torch.full(query.shape[:2], torch.nan))
    kernel, tuning = Interpreted(module._attend_kernel, seed), LaunchConfig(128, 128, 4, 1, 1, 1)
    counters = torch.zeros(2, dtype=torch.int32)
    with (
        mock.patch.object(module, "_attend_kernel", kernel),
        mock.patch.object(sys.modules["planted_load_hopper"], "counters_of", lambda device: counters),
        mock.patch.object(devices, "num_sms", lambda device: 2),
    ):
        try:
            module.launch(query, keys, values, plan, AttentionOptions(), tuning, out, whole())
        except (KernelError, NotImplementedError) as error:
            return str(error)
    try:
        assert_close(out.out, *expected)
    except AssertionError:
        return WRONG
    return COUNTED if counters.any() else None


@pytest.fixture(scope="module")
def calls():
    """Prompts out of rows and large pages, which come by whole tiles, and out of small pages, which come by threads.

    Others have keys of 192, in three panels, beside one tile of queries.
    """
    case = Case("prompts", LENS, heads=(4, 2), head_size=64, block_size=24)
    inputs = build(case, dtype=torch.float16, poison=(torch.nan,))
    made = []
    large = build(replace(case, block_size=128), dtype=torch.float16, poison=(torch.nan,))
    wide_case = Case("wide", LENS, heads=(2, 1), head_size=192, value_head_size=128)
    wide = build(wide_case, dtype=torch.float16, poison=(torch.nan,))
    for path, given, block in (
        (refattn.varlen, inputs.rows, {}),
        (refattn.varlen, wide.rows, {}),
        (refattn.chunked_prefill, inputs.tensors, dict(block_size=24)),
        (refattn.chunked_prefill, large.tensors, dict(block_size=128)),
    ):
        *tensors, batch = given
        plan = path.plan(batch, **block)
        expected = path.attention(*(x.float() for x in tensors), plan), path.attention(*tensors, plan)
        made.append((tensors, plan, expected))
    return made


def finding(module, calls):
    """Return the first that is found in some orders of both calls."""
    tried = product(range(ORDERS), calls)
    return next((one for seed, call in tried if (one := found_in(module, *call, seed)) is not None), None)


def test_nothing_is_found_where_nothing_is_planted(planted, calls):
    assert finding(planted(), calls) is None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, planted, calls):
    *mistake, says = MISTAKES[name]
    assert re.search(says, str(finding(planted(*mistake), calls)))


@pytest.mark.core
def test_scalars_are_those_of_triton():
    """Integers are divided towards zero, what is wider holds the result, and a maximum leaves out NaN."""
    minus_seven = value_of(-7)
    assert [int(minus_seven // 2), int(minus_seven % 2), int(7 - minus_seven)] == [-3, -1, 14]
    wide = value_of(2**31) + minus_seven
    assert wide.data.dtype == torch.int64 and int(wide) == 2**31 - 7
    assert int(value_of(2**31 - 1) + 1) == -(2**31), "32 bits overflow"
    halves = Value(torch.tensor([1.0, torch.nan], dtype=torch.float16))
    assert (halves * 2.0).data.dtype == torch.float16
    functions = SimpleNamespace(**FUNCTIONS)
    assert functions.maximum(halves, 0.5).data.tolist() == [1.0, 0.5]
    assert functions.max(halves, 0).data.item() == 1.0
    assert functions.sum(halves.to(functions.int1).to(functions.int32), 0).data.dtype == torch.int32


@pytest.mark.core
def test_addresses_outside_of_a_tensor_are_refused():
    """Also before it; what a mask leaves out is not read, and is NaN unless another number is asked for."""
    memory = address_of(torch.arange(8.0)[2:6])
    at = Value(torch.arange(4, dtype=torch.int32))
    assert load(memory + at).data.tolist() == [2, 3, 4, 5]
    inside = load(memory + (at + 4), mask=at < 2).data
    assert inside[:2].tolist() == [6, 7] and inside[2:].isnan().all()
    assert load(memory + (at + 4), mask=at < 2, other=0.0).data.tolist() == [6, 7, 0, 0]
    for offsets in (at + 4, at - 3):
        with pytest.raises(KernelError, match=r"addresses -?\d+ to \d+ of a memory of 8 elements"):
            load(memory + offsets)
        with pytest.raises(KernelError, match="addresses"):
            store(memory + offsets, 1.0)
