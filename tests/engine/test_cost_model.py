"""The cost model of a cascade: measured times, numbers by hand, what is worth it, and what it refuses."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.batch import Prefix
from tests.helpers.bad_input import PREFIXES, REQUESTS_BAD
from twinattn.engine import cost_model
from twinattn.engine.cost_model import Machine

# --- whether it is worth it ---

SHAPE = dict(num_heads=32, num_kv_heads=8, head_size=128, element_size=2)


def decodes(count: int, shared: int, own: int) -> tuple[list[int], list[int], list[Prefix]]:
    return [1] * count, [shared + own] * count, [Prefix(0, count, shared)] if shared else []


def pays(query_lens: list[int], seq_lens: list[int], prefixes: list[Prefix], machine: Machine) -> bool:
    """Return whether a cascade over at most one prefix is estimated to be quicker than none, as the choice has it."""
    seconds, alone = (
        cost_model.estimate_seconds(query_lens, seq_lens, chosen, **SHAPE, machine=machine) for chosen in (prefixes, [])
    )
    kept = cost_model.worthwhile_prefixes(query_lens, seq_lens, prefixes, **SHAPE, machine=machine)
    assert kept == (prefixes if seconds < alone else [])
    return seconds < alone


@pytest.mark.parametrize(
    ("count", "shared", "own", "row"),
    [
        (64, 0, 8192, "chunked_prefill/decode-64x8192"),
        (1, 0, 8192, "chunked_prefill/decode-1x8192"),
        (1, 0, 131072, "chunked_prefill/decode-1x131072"),
        (8, 0, 8192, "chunked_prefill/decode-8x8192"),
        (256, 0, 1024, "chunked_prefill/decode-256x1024"),
        (64, 8192, 256, "cascade/decode-64-prefix-8192-own-256"),
    ],
)
def test_the_estimate_is_what_an_h200_took(count, shared, own, row):
    """The fast twin in the committed results of the benchmark."""
    results = json.loads((Path(__file__).parent.parent.parent / "docs/results/cuda-nvidia-h200.json").read_text())
    rows = {f"{one['path']}/{one['workload']}": one for run in results["runs"] for one in run["rows"]}
    estimate = cost_model.estimate_seconds(*decodes(count, shared, own), **SHAPE, machine=cost_model.H200)
    assert estimate == pytest.approx(rows[row]["contenders"][0]["median"], rel=0.2)


def test_the_estimate_by_hand():
    """Two levels on a machine of 3 workers with tiles of 8 rows and 10 keys.

    Shared: 5 queries of 2 heads a KV head are 10 rows, 2 tiles of rows; 40 keys are 4; with 2 KV heads 16 tiles, 6
    waves. Own: each of the 5 queries has 1 tile of rows and, for 25 keys, 3 of keys; with 2 KV heads 30, 10 waves.
    A tile reads 2 * 10 * 4 * 2 = 160 bytes and computes 4 * 8 * 10 * 4 = 1280 operations, on a third of the machine.
    """
    machine = Machine(3, 1.0, 100.0, 7.0, 8, 10)
    shape = dict(num_heads=4, num_kv_heads=2, head_size=4, element_size=2)
    estimate = cost_model.estimate_seconds([1] * 5, [65] * 5, [Prefix(0, 5, 40)], **shape, machine=machine)
    assert estimate == pytest.approx(2 * 7 + (6 + 10) * 3 * max(160 / 1, 1280 / 100))
    bound_by_products = dataclasses.replace(machine, flops_per_second=4.0)
    estimate = cost_model.estimate_seconds([1] * 5, [65] * 5, [Prefix(0, 5, 40)], **shape, machine=bound_by_products)
    assert estimate == pytest.approx(2 * 7 + (6 + 10) * 3 * max(160 / 1, 1280 / 4))


WORTH_IT = {
    "long-prefix-many-requests": (decodes(64, 8192, 256), True),
    "bench-row": (decodes(16, 4096, 64), True),
    "one-request": (decodes(1, 8192, 256), False),
    "short-prefix": (decodes(4, 16, 1000), False),
    "nothing-shared": (decodes(16, 0, 4096), False),
}


@pytest.mark.core
@pytest.mark.covers("B81")
@pytest.mark.parametrize("machine", ["H200", "CPU"])
@pytest.mark.parametrize(("requests", "worth_it"), WORTH_IT.values(), ids=WORTH_IT)
def test_a_cascade_is_used_where_it_is_worth_it(machine, requests, worth_it):
    assert pays(*requests, getattr(cost_model, machine)) is worth_it


def test_two_requests_fill_waves_that_were_empty_anyway():
    """On a large machine a cascade of two short requests saves reads that cost no time, and costs a launch."""
    assert not pays(*decodes(2, 256, 16), cost_model.H200)
    small = dataclasses.replace(cost_model.H200, workers=1, bytes_per_second=4.2e12 / 132)
    assert pays(*decodes(2, 256, 16), small)


def test_a_block_shared_by_chance_is_left_out():
    query_lens, seq_lens, (root,) = decodes(64, 8192, 256)
    chance = Prefix(10, 12, 8192 + 16)
    kept = cost_model.worthwhile_prefixes(query_lens, seq_lens, [chance, root], **SHAPE, machine=cost_model.H200)
    assert kept == [root]


def test_what_a_prefix_saves_does_not_count_what_another_saves_already():
    """The block shared by chance reaches further than the second prefix, and saves almost nothing beyond the root."""
    root, chance, second = Prefix(0, 64, 8192), Prefix(10, 12, 8192 + 16), Prefix(64, 66, 8000)
    query_lens, seq_lens, _ = decodes(66, 8192, 256)
    kept = cost_model.worthwhile_prefixes(
        query_lens, seq_lens, [root, chance, second], **SHAPE, machine=cost_model.H200
    )
    assert kept == [root, second]


def test_prefixes_that_pay_for_a_level_together_are_kept():
    """16 groups of 4: none of them saves as much as a launch costs, and all of them share one."""
    groups = [Prefix(4 * i, 4 * i + 4, 512) for i in range(16)]
    query_lens, seq_lens, _ = decodes(64, 0, 1024)
    assert not pays(query_lens, seq_lens, groups[:1], cost_model.H200)
    kept = cost_model.worthwhile_prefixes(query_lens, seq_lens, groups, **SHAPE, machine=cost_model.H200)
    assert sorted(kept) == groups


def test_a_short_root_over_long_groups_is_left_out():
    """16 tokens that everyone shares are not worth a level above two groups that share 4096."""
    root, groups = Prefix(0, 32, 16), [Prefix(0, 16, 4096), Prefix(16, 32, 4096)]
    query_lens, seq_lens, _ = decodes(32, 4096, 64)
    kept = cost_model.worthwhile_prefixes(query_lens, seq_lens, [root, *groups], **SHAPE, machine=cost_model.H200)
    assert sorted(kept) == groups


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[Prefix]]:
    """Draw groups of requests with a common prefix, some of them with a longer one inside."""
    query_lens, seq_lens, prefixes = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        first, members, shared = len(query_lens), draw(st.integers(1, 40)), 16 * draw(st.integers(0, 300))
        inner = 16 * draw(st.integers(0, 20)) if shared and members > 2 else 0
        for i in range(members):
            query_lens.append(draw(st.sampled_from((0, 1, 1, 1, 20))))
            seq_lens.append(shared + (inner if i < 2 else 0) + query_lens[-1] + draw(st.integers(0, 300)))
        prefixes += [Prefix(first, first + members, shared)] if shared else []
        prefixes += [Prefix(first, first + 2, shared + inner)] if inner else []
    return query_lens, seq_lens, prefixes


@given(requests=trees(), machine=st.sampled_from(["H200", "CPU"]))
def test_what_is_kept_is_estimated_to_be_quicker_than_all_and_than_none(requests, machine):
    query_lens, seq_lens, prefixes = requests
    arguments = dict(**SHAPE, machine=getattr(cost_model, machine))
    kept = cost_model.worthwhile_prefixes(query_lens, seq_lens, prefixes, **arguments)
    assert set(kept) <= set(prefixes) and len(set(kept)) == len(kept)
    seconds = cost_model.estimate_seconds(query_lens, seq_lens, kept, **arguments)
    for others in ([], prefixes):
        assert seconds <= cost_model.estimate_seconds(query_lens, seq_lens, others, **arguments)


# --- bad input ---

GOOD = dict(
    query_lens=[2, 1],
    seq_lens=[7, 20],
    prefixes=[Prefix(0, 2, 4)],
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    element_size=4,
    machine=Machine(3, 1.0, 100.0, 7.0, 8, 10),
)
each_function = pytest.mark.parametrize(
    "function", [cost_model.estimate_seconds, cost_model.worthwhile_prefixes], ids=lambda x: x.__name__
)
BAD = [
    *REQUESTS_BAD,
    *PREFIXES,
    *(
        (name, str(bad), bad, f"{name}: expected a positive int, got {bad!r}")
        for name in ("num_heads", "num_kv_heads", "head_size", "element_size")
        for bad in (0, -1, 1.0, None)
    ),
    ("machine", "a name", "H200", "machine: expected a Machine, got 'H200'"),
    ("machine", "None", None, "machine: expected a Machine, got None"),
]


@each_function
@pytest.mark.parametrize(
    ("argument", "bad", "message"),
    [(argument, bad, message) for argument, _, bad, message in BAD],
    ids=[f"{argument}-{what}".replace(" ", "-") for argument, what, _, _ in BAD],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(function, argument, bad, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(**{**GOOD, argument: bad})
    assert str(error.value).startswith(message)


@each_function
def test_the_good_arguments_are_good(function):
    """Else a row of the table might be refused for another reason than the one that it is there for."""
    function(**GOOD)
    assert set(inspect.signature(function).parameters) == set(GOOD)


@pytest.mark.core
@pytest.mark.covers("B81")
def test_a_cascade_may_pay_for_short_prefixes_and_for_few_requests():
    for count, shared, expected in ((512, 192, True), (4, 65536, True), (64, 8192, True), (4, 16, False)):
        assert pays(*decodes(count, shared, 64), cost_model.H200) is expected
    assert not pays([2] * 8, [256 + 64] * 8, [Prefix(0, 8, 256)], cost_model.H200)  # it saves less than a launch
