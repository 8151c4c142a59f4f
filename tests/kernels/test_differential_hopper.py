"""Prompts of differential attention by warps with roles: which they are, and that they are right.

A Hopper GPU runs the kernel, and a CPU interprets it, in drawn orders. At the end, mistakes that are planted in it.
"""

import importlib
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

import fastattn
import fastattn.differential
import fastattn.varlen
import refattn.differential
import refattn.varlen
from fastattn.kernels import device as devices
from fastattn.kernels.problem import Subtraction
from fastattn.kernels.triton import differential, differential_hopper, hopper, launch, load_hopper, prompts_hopper
from fastattn.kernels.triton.merge import Out
from fastattn.kernels.triton.tuning import LaunchConfig
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from tests.helpers.batches import Case, build, of_batches, ragged_cases, with_a_prompt
from tests.helpers.tolerance import assert_close, assert_matches_reference
from twinattn.course.gluon.interpret import Interpreted, hopper_on_a_cpu
from twinattn.course.gluon.values import KernelError
from twinattn.kit import plan_and_attend

ROWS = torch.zeros(66, dtype=torch.int32)
CALLS = {  # whether the kernel takes them, and what they are but 33 queries of two pairs each, causal, in pages of 16
    "plain": (True, {}),
    "window": (True, dict(plan=dict(window_size=(8, 0)))),
    "all-keys": (True, dict(plan=dict(causal=False))),
    "sinks": (True, dict(options=AttentionOptions(sinks=torch.zeros(4)))),
    "scale": (True, dict(options=AttentionOptions(softmax_scale=-0.3))),
    "float16": (True, dict(dtype=torch.float16)),
    "few-rows": (False, dict(query_len=32)),
    "softcap": (False, dict(options=AttentionOptions(softcap=5.0))),
    "alibi": (False, dict(options=AttentionOptions(alibi_slopes=torch.ones(4)))),
    "batch-invariant": (False, dict(options=AttentionOptions(batch_invariant=True))),
    "intervals": (False, dict(plan=dict(causal=False, first_visible=ROWS, last_visible=ROWS))),
    "positions": (False, dict(plan=dict(positions=ROWS))),
    "heads-of-128": (False, dict(size=128)),
    "float32": (False, dict(dtype=torch.float32)),
    "another-type-of-keys": (False, dict(stored=torch.float16)),
    "rows-that-are-not-aligned": (False, dict(row=72)),
    "elements-apart": (False, dict(row=128, step=2)),
    "splits": (False, dict(splits=2)),
    "another-gpu": (False, dict(capability=(10, 0))),
    "a-later-triton": (False, dict(version="3.10.0")),
}


@pytest.mark.core
@pytest.mark.parametrize(("taken", "changed"), CALLS.values(), ids=CALLS)
def test_which_calls_are_for_warps_with_roles(taken, changed, monkeypatch):
    """Whatever that kernel does not compute, or the compiler does not know to be aligned, goes to the other one."""
    monkeypatch.setattr(devices, "capability", lambda device: changed.get("capability", (9, 0)))
    monkeypatch.setattr(hopper.triton, "__version__", changed.get("version", "3.7.1"))
    query_len, size = changed.get("query_len", 33), changed.get("size", 64)
    dtype = changed.get("dtype", torch.bfloat16)
    query = torch.zeros(2 * query_len, 4, size, dtype=dtype)
    rows = torch.zeros(2, 2, 10, 16, 1, changed.get("row", size), dtype=changed.get("stored", dtype))
    cache = rows[..., :: changed.get("step", 1)][..., :size]
    plan = Plan(make_batch([query_len] * 2, [70] * 2, [[0, 1, 2, 3, 4]] * 2), 16, **changed.get("plan", {}))
    tuning = LaunchConfig(64, 64, 4, 2, 1, changed.get("splits", 1))
    options = changed.get("options", AttentionOptions())
    assert differential_hopper.takes(query, cache, plan, options, tuning) is taken


LENS = ((70, 330), (0, 40), (3, 150), (130, 250), (64, 64), (20, 9))
CASES = {
    "groups-of-two": Case("groups-of-two", LENS, heads=(8, 4), head_size=64, padding_rows=3),
    "groups-of-three": Case("groups-of-three", LENS, heads=(6, 2), head_size=64, block_size=24),
    "tokens": Case("tokens", LENS, heads=(2, 2), head_size=64, block_size=1),
    "heads-first": Case("heads-first", LENS, heads=(4, 4), head_size=64, layout="HND"),
    "blocks-of-steps": Case("blocks-of-steps", LENS, heads=(8, 4), head_size=64, block_size=128, padding_rows=2),
    "heads-first-in-blocks": Case("blocks", LENS, heads=(4, 4), head_size=64, block_size=256, layout="HND"),
}
ASKED = {
    "causal": {},
    "norm": dict(norm_weight=True, norm_eps=1e-2),
    "window": dict(window_size=(100, 0)),
    "two-sided-window": dict(causal=False, window_size=(40, 25)),
    "all-keys": dict(causal=False),
    "negative-scale": dict(softmax_scale=-0.3),
    "negative-lambda": dict(lambda_full=-0.6, lambda_init=0.8),
    "sinks": dict(sinks=True, norm_weight=True),
}


@pytest.fixture
def one_processor(monkeypatch):
    """As many tiles as there are processors, so that keys are not split."""
    monkeypatch.setattr(differential, "sms_of", lambda device: 1)


@pytest.fixture
def has_roles(device):
    """Whether warps have roles there: on Hopper, and on a CPU, which interprets the same kernel."""
    on_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    with hopper_on_a_cpu() if device == "cpu" else nullcontext():
        yield on_hopper or device == "cpu"


def filled(asked, case, device):
    """Fill in lambda, and what has one number per head or element."""
    result = {"lambda_full": 0.35, "lambda_init": 0.2, **asked}
    result["lambda_full"] = torch.tensor(result["lambda_full"], device=device)
    if "norm_weight" in asked:
        result["norm_weight"] = torch.linspace(0.5, 2.0, 2 * case.head_size, device=device)
    if "sinks" in asked:
        result["sinks"] = torch.linspace(-2.0, 3.0, case.heads[0], device=device)
    return result


def in_halves(inputs):
    """Return the queries, the pool of pairs and the batch."""
    pools = inputs.key_cache, inputs.value_cache
    cache = torch.stack([torch.stack([pool[:, :, half::2] for pool in pools]) for half in (0, 1)])
    return inputs.query, cache, inputs.batch


def pair_up(case):
    """Return a case with two heads for each of its heads."""
    h, hk = case.heads
    return replace(case, heads=(2 * h, 2 * hk))


@contextmanager
def counting():
    """Count the launches."""
    launched, of_pairs = [], differential_hopper.launch
    counted = lambda *given: launched.append(1) or of_pairs(*given)  # noqa: E731
    with mock.patch.object(differential_hopper, "launch", counted), fastattn.use_kernel("triton"):
        yield launched


@pytest.mark.parametrize(
    ("name", "asked"),
    [*((name, "causal") for name in CASES), *product(("groups-of-two", "blocks-of-steps"), list(ASKED)[1:])],
)
def test_prompts_of_as_many_tiles_as_there_are_processors(name, asked, one_processor, has_roles, device):
    """On Hopper they are for warps with roles, on other GPUs not."""
    case = CASES[name]
    inputs = build(
        case, dtype=torch.bfloat16 if device == "cuda" else torch.float16, device=device, poison=(torch.nan,)
    )
    given, more = in_halves(inputs), filled(ASKED[asked], case, device)
    with counting() as launched:
        out, lse = plan_and_attend(fastattn.differential, *given, **more, return_lse=True)
    assert_matches_reference(
        out, lse, lambda *x, **its: plan_and_attend(refattn.differential, *x, **its), *given, **more
    )
    assert len(launched) == has_roles


@pytest.mark.parametrize("name", ["groups-of-two", "blocks-of-steps", "heads-first-in-blocks"])
def test_other_layers_of_a_plan(name, one_processor, has_roles, device, monkeypatch):
    """Each has its own tensors, lambda and norm; what a replay writes is all rows, also into memory that is given."""
    packed, lay_out = [], launch.PackedLaunch.of
    monkeypatch.setattr(launch.PackedLaunch, "of", lambda *given: packed.append(lay_out(*given)) or packed[-1])
    case, dtype = CASES[name], torch.bfloat16 if device == "cuda" else torch.float16
    built = dict(dtype=dtype, device=device, poison=(torch.nan,))
    first = build(case, **built)
    turned = [[x.cpu().flip(-1) for x in rows] for rows in (first.keys, first.values)]
    other = build(case, keys=turned[1], values=turned[0], **built)
    plan = fastattn.differential.plan(first.batch, block_size=case.block_size)
    with counting() as launched:
        for i, layer in enumerate((first, other, first, other)):
            given = in_halves(layer)
            more = filled(dict(norm_weight=True, lambda_full=0.35 - 0.4 * i), case, device)
            more["norm_weight"] *= 1 + i
            memory = torch.full_like(layer.query, torch.nan) if i > 1 else None
            out, lse = fastattn.differential.attention(*given[:2], plan, **more, return_lse=True, out=memory)
            assert memory is None or out is memory
            assert_matches_reference(
                out, lse, lambda *x, **its: plan_and_attend(refattn.differential, *x, **its), *given, **more
            )
    assert len(launched) == 2 * has_roles, "the second is a replay of the first, the fourth of the third"
    assert not (has_roles and device == "cuda") or (packed and None not in packed), (
        "Triton's launcher takes longer on the CPU"
    )


@pytest.mark.skipif(not launch.INTERPRETED, reason="for a drawn order; a GPU compiles each of the shapes")
@of_batches
@drawn(
    case=with_a_prompt(ragged_cases(head_sizes=(64,), longest=400), shortest=65),
    asked=st.sampled_from(list(ASKED.values())),
    over_rows=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_prompts_in_any_order(case, asked, over_rows, seed):
    """Whoever is first, warpgroups and what is asynchronous, over pages and rows, and with NaN past the keys.

    The counters of tiles are 0 again after it, for the next launch on a stream.
    """
    counters, case = torch.zeros(2, dtype=torch.int32), pair_up(case)
    inputs, paths = build(case, dtype=torch.float16, poison=(torch.nan,)), [fastattn.differential, refattn.differential]
    given = in_halves(inputs)
    if over_rows:
        query, key, value, batch = inputs.rows
        given = query, refattn.differential.split_halves(key, value), batch
        plans = fastattn.varlen.plan, refattn.varlen.plan
        both = zip(plans, paths, strict=True)
        paths = [SimpleNamespace(plan=plan, attention=path.attention) for plan, path in both]
    more = filled(asked, case, "cpu")
    with (
        mock.patch.object(differential, "sms_of", lambda device: 1),
        mock.patch.object(load_hopper, "counters_of", lambda device: counters),
        hopper_on_a_cpu(seed) as (*_, kernel, _),
        fastattn.use_kernel("triton"),
    ):
        out, lse = plan_and_attend(paths[0], *given, **more, return_lse=True)
    assert len(kernel.launched) == 1
    assert_matches_reference(out, lse, lambda *x, **its: plan_and_attend(paths[1], *x, **its), *given, **more)
    assert counters.tolist() == [0, 0]


@pytest.mark.skipif(not launch.INTERPRETED, reason="the interpreter of Gluon runs the kernel on a CPU")
def test_scores_that_grow_from_step_to_step(one_processor):
    """Outputs are rescaled in each step: steps go from the last keys to the first.

    Scores here rise towards the first keys, by a little in some rows and by much in others.
    """
    case = Case("growing", ((150, 600),), heads=(2, 2), head_size=64)
    inputs = build(case, dtype=torch.float16)
    query, cache, batch = in_halves(inputs)
    query.abs_().mul_(torch.logspace(-3, 0.5, 150)[:, None, None])
    growing = torch.linspace(1.5, 0.0, 600).half()
    table, page = batch.block_table[0], torch.arange(600) % case.block_size
    cache[:, 0, table[torch.arange(600) // case.block_size], page] = growing[:, None, None]
    given, more = (query, cache, batch), filled({}, case, "cpu")
    with hopper_on_a_cpu() as kernels, fastattn.use_kernel("triton"):
        out, lse = plan_and_attend(fastattn.differential, *given, **more, return_lse=True)
    assert any(kernel.launched for kernel in kernels)
    assert_matches_reference(
        out, lse, lambda *x, **its: plan_and_attend(refattn.differential, *x, **its), *given, **more
    )


# --- mistakes that are planted ---

WRONG, FENCE, DEADLOCK, MORE = "wrong", "without a fence", "deadlock", "arrivals has more"
ORDERS = 12  # that are tried at most
MISTAKES = {  # what stands there, what stands there instead, and what is found
    "queries-of-the-other-head": ("query_slot).slice(WHO * SIZE, SIZE, 1)", "query_slot).slice(0, SIZE, 1)", WRONG),
    "keys-of-the-other-head": ("key.slice(WHO * SIZE, SIZE, 1)", "key.slice(0, SIZE, 1)", WRONG),
    "values-not-cleared": (
        "        clear_rows(room.value.index(items % SLOTS), behind)\n\n",
        "        pass\n\n",
        WRONG,
    ),
    "last-values-not-waited-for": (
        "    mbarrier.wait(room.has_values.index(slot), parity(items - 1))\n    fence_async_shared()\n    sums",
        "    sums",
        f"{WRONG}|{FENCE}",
    ),
    "last-values-never-left": ("    leave(room.no_values.index(slot))\n    return", "    return", DEADLOCK),
    "the-other-sinks": ("2 * rows.pairs + WHO, rows.is_row)", "2 * rows.pairs, rows.is_row)", WRONG),
    "one-log-sum-exp-for-both": ("2 * rows.places + WHO, logs", "2 * rows.places, logs", WRONG),
    "padding-from-elsewhere-on": ("HEADS: gl.constexpr = 2 * queries.HEADS", "HEADS: gl.constexpr = 1", WRONG),
    "rows-beside-those-of-the-second-head": (
        *("        keys.half_stride,\n        keys.map_half,\n", "        64,\n        keys.map_half,\n"),
        WRONG,
    ),
    "tiles-of-the-first-head-twice": ("        keys.map_half,\n        0,\n", "        0,\n        0,\n", WRONG),
    "an-output-that-is-not-there": (
        *("            mbarrier.wait(exchange.full.index(0), parity(tiles, 1))\n", ""),
        f"{WRONG}|{DEADLOCK}|{MORE}",
    ),
    "an-output-over-one-that-is-read": (
        *("            mbarrier.wait(exchange.empty.index(0), parity(tiles, 1) ^ 1)\n", ""),
        f"{WRONG}|{MORE}|{DEADLOCK}",
    ),
    "an-output-never-given-back": (
        *("            mbarrier.arrive(exchange.empty.index(0))\n", ""),
        DEADLOCK,
    ),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Import the kernel with another line in one of its files."""

    def import_with(right="", wrong=""):
        texts = {module.__name__: Path(module.__file__).read_text() for module in (prompts_hopper, differential_hopper)}
        found = sum(text.count(right) for text in texts.values()) if right else 1
        assert found == 1, f"{right!r} is there {found} times"
        for name, text in texts.items():
            planted_name = f"planted_{name.rpartition('.')[2]}"
            monkeypatch.delitem(sys.modules, planted_name, raising=False)
            text = text.replace(right, wrong) if right else text
            (tmp_path / f"{planted_name}.py").write_text(
                text.replace(prompts_hopper.__name__, "planted_prompts_hopper")
            )
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module("planted_differential_hopper")

    return import_with


@pytest.fixture(scope="module")
def calls():
    """Prompts out of small pages, which come by threads, and of large ones, which come by whole tiles."""
    made = []
    layer = dict(lambda_full=torch.tensor(0.35), lambda_init=0.2, norm_eps=1e-3)
    for block_size, scale in ((24, 0.125), (128, 1.0)):  # weights of the second are rescaled in later steps, too
        lens = ((60, 64), (70, 330), (0, 40), (150, 250), (64, 64), (20, 9))
        case = Case("prompts", lens, heads=(4, 2), head_size=64, block_size=block_size, padding_rows=3)
        query, cache, batch = in_halves(build(case, dtype=torch.float16, poison=(torch.nan,)))
        plan = refattn.differential.plan(batch, block_size=block_size)
        options = AttentionOptions(softmax_scale=scale, sinks=torch.linspace(-2.0, 3.0, 4))
        expected = [
            refattn.differential.attention(x, y, plan, options, **layer, return_lse=True)
            for x, y in ((query.float(), cache.float()), (query, cache))
        ]
        made.append((query, cache, plan, options, list(zip(*expected, strict=True))))
    return made


def found_in(module, call, seed):
    """Launch the kernel of a module in a drawn order, and return what is found."""
    query, cache, plan, options, (expected, expected_lse) = call
    out = Out(torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan))
    layer_args, _ = differential._layer_args(options, Subtraction(torch.tensor(0.35), None, 1e-3, 0.8))
    with (
        mock.patch.object(module, "_attend_kernel", Interpreted(module._attend_kernel, seed)),
        mock.patch.object(devices, "num_sms", lambda device: 2),
    ):
        try:
            module.launch(query, cache, plan, options, options.softmax_scale, differential.NOT_GIVEN, layer_args, out)
        except KernelError as error:
            return str(error)
    try:
        assert_close(out.out, *expected)
        assert_close(out.lse, *expected_lse)
    except AssertionError:
        return WRONG
    return None


def finding(module, calls):
    """Return the first that is found in some orders of both calls."""
    tried = product(range(ORDERS), calls)
    return next((one for seed, call in tried if (one := found_in(module, call, seed)) is not None), None)


on_a_cpu = pytest.mark.skipif(not launch.INTERPRETED, reason="mistakes run in the interpreter: on a GPU they hang")


@on_a_cpu
def test_nothing_is_found_where_nothing_is_planted(planted, calls):
    assert finding(planted(), calls) is None


@on_a_cpu
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake, planted, calls):
    right, wrong, what = MISTAKES[mistake]
    found = finding(planted(right, wrong), calls)
    assert found is not None and any(one in found for one in what.split("|")), found
