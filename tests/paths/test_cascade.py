"""Cascade attention: shared prefixes attended once, level by level."""

import dataclasses
import importlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import fastattn.cascade
import fastattn.chunked_prefill
import refattn.cascade
import refattn.chunked_prefill
from fastattn import dispatch
from fastattn.kernels import order
from fastattn.kernels.cpu import attention as cpu
from fastattn.kernels.triton import attention as triton_attention
from refattn.batch import Batch, Prefix
from refattn.metadata import make_batch
from refattn.plan import CascadePlan, Plan
from tests.helpers.batches import Case, assert_same_masks, build, masks_by_hand, of_batches, plan_and_attend, read_masks
from tests.helpers.kernels_present import PRESENT, each_kernel
from tests.helpers.options import per_head
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.shared_prefixes import SHARED
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree

each_twin = pytest.mark.parametrize("twin", [refattn.cascade, fastattn.cascade], ids=["ref", "fast"])

# Each with its prefixes: sequences first to last - 1 share their first `end` keys.
OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.3),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "sinks": dict(sinks=True),
    "window": dict(window_size=(40, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "everything": dict(softmax_scale=0.2, softcap=5.0, alibi_slopes=True, sinks=True),
    "alibi-in-a-window": dict(alibi_slopes=True, window_size=(40, 0)),
    "everything-in-a-window": dict(softmax_scale=0.2, softcap=5.0, alibi_slopes=True, sinks=True, window_size=(50, 3)),
}
WINDOWS = [(0, 0), (5, 0), (40, 0), (47, -1), (60, 3), (-1, 0)]
each_sharing = pytest.mark.parametrize("sharing", SHARED.values(), ids=SHARED)


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch whose sequences share blocks, as tensors and as what a scheduler knows of it."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]
    requests: tuple[list[int], list[int], list[list[int]]]  # query lengths, sequence lengths, block tables
    prefixes: list[Prefix]
    block_size: int

    def plan(self, twin, **options) -> CascadePlan:
        """Plan the step with a twin."""
        return twin.plan(self.tensors[3], prefixes=self.prefixes, block_size=self.block_size, **options)


def share(query, key_cache, value_cache, batch, prefixes) -> Step:
    """Give the members of each prefix the blocks of its first sequence, and put NaN into the others."""
    block_size, table = key_cache.shape[1], batch.block_table.clone()
    before = set(used_blocks(batch, block_size))
    for first, last, end in prefixes:
        table[first:last, : end // block_size] = table[first, : end // block_size].clone()
    batch = dataclasses.replace(batch, block_table=table)
    for block in before - set(used_blocks(batch, block_size)):
        key_cache[block], value_cache[block] = float("nan"), float("nan")
    requests = batch.query_lens.tolist(), batch.seq_lens.tolist(), table.tolist()
    return Step((query, key_cache, value_cache, batch), requests, [Prefix(*p) for p in prefixes], block_size)


def used_blocks(batch, block_size) -> list[int]:
    rows = zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True)
    return [block for blocks, seq_len in rows for block in blocks[: -(-seq_len // block_size)]]


def used(level: Plan) -> list[list[int]]:
    """List the blocks that each group of a level reads."""
    rows = zip(level.batch.block_table.tolist(), level.batch.seq_lens.tolist(), strict=True)
    return [blocks[: -(-seq_len // level.block_size)] for blocks, seq_len in rows]


def lay_out(sharing, **options) -> Step:
    case, prefixes = sharing
    return share(*build(case, **options).tensors, prefixes)


def filled(options: dict, step: Step, device: str) -> dict:
    """Fill in the prefixes of a step, and the options that have one number per head."""
    case = Case("heads", (), heads=(step.tensors[0].shape[1], 1))
    return dict(prefixes=step.prefixes, **per_head(options, case, device))


# --- the mask, read out ---


@pytest.mark.core
@pytest.mark.covers("B76", "B77", "B78")
@each_twin
@each_sharing
def test_every_query_sees_the_keys_up_to_its_position_once(twin, sharing, device):
    case = dataclasses.replace(sharing[0], head_size=64, value_head_size=64)

    def attention(*tensors, **options):
        step = share(*tensors, sharing[1])
        return plan_and_attend(twin, *step.tensors, prefixes=step.prefixes, **options)

    assert_same_masks(read_masks(attention, case, device=device), masks_by_hand(case, lambda i, j: j <= i))


@pytest.mark.parametrize(
    ("window", "name", "package"),
    every_pair_on_cpu(
        WINDOWS, ["tree", "three-levels", "prefills-and-decodes", "silent-and-empty"], ["refattn", "fastattn"]
    ),
    ids=str,
)
def test_windows_stand_at_absolute_positions(window, name, package, device):
    """The sequences of a group have other lengths, so each sees other keys of what they share."""
    case, prefixes = SHARED[name]

    def attention(*tensors, **options):
        step = share(*tensors, prefixes)
        twin = importlib.import_module(f"{package}.cascade")
        return plan_and_attend(twin, *step.tensors, prefixes=step.prefixes, window_size=window, **options)

    masks = read_masks(attention, case, device=device)
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i and (window[0] < 0 or i - window[0] <= j)))


# --- arithmetic that shares no code with the reference ---


@pytest.mark.covers("B77")
@pytest.mark.parametrize(
    ("sharing", "options"),  # each of them with every second one of the others
    [
        pytest.param(sharing, options, id=f"{name}-{asked}")
        for i, (name, sharing) in enumerate(SHARED.items())
        for j, (asked, options) in enumerate(OPTIONS.items())
        if (i + j) % 2 == 0
    ],
)
def test_split_equals_whole(sharing, options, device):
    """With levels and without: the same answer and the same LSE, so every sink is counted once."""
    step = lay_out(sharing, device=device, dtype=torch.float64)
    options = filled(options, step, device)
    split = plan_and_attend(refattn.cascade, *step.tensors, **options, return_lse=True)
    del options["prefixes"]
    whole = plan_and_attend(refattn.chunked_prefill, *step.tensors, **options, return_lse=True)
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- the twin against the reference ---


@pytest.mark.parametrize(
    ("sharing", "kernel", "options"), every_pair_on_cpu(SHARED, PRESENT, ["plain", "everything-in-a-window"]), ids=str
)
def test_twins_agree(sharing, kernel, options, device):
    step = lay_out(SHARED[sharing], device=device, dtype=kernel.dtypes[0])
    options = filled(OPTIONS[options], step, device)
    with kernel.forced():
        kernel.check(assert_twins_agree, "cascade", *step.tensors, **options)


@each_kernel
@pytest.mark.parametrize("options", OPTIONS)
def test_twins_agree_in_every_type(options, kernel, device):
    """On a CPU with the options that hold most; an option is computed in one type there, float32."""
    for dtype in kernel.dtypes if device != "cpu" or options.startswith(("plain", "everything")) else kernel.dtypes[:1]:
        step = lay_out(SHARED["tree"], device=device, dtype=dtype)
        with kernel.forced():
            kernel.check(assert_twins_agree, "cascade", *step.tensors, **filled(OPTIONS[options], step, device))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Case, list[tuple[int, int, int]]]:
    """Draw groups of sequences with a common prefix, some of them with a longer one inside."""
    p = draw(st.sampled_from((1, 16, 24)))
    lens, prefixes = [], []
    for _ in range(draw(st.integers(1, 3))):
        blocks, members, first = draw(st.integers(0, 3)), draw(st.integers(1, 4)), len(lens)
        inner = draw(st.integers(0, 2)) if blocks and members > 2 else 0
        for i in range(members):
            query_len = draw(st.integers(0, 20))
            shared = blocks + (inner if i < 2 else 0)
            lens.append((query_len, shared * p + query_len + draw(st.integers(0, 30))))
        if blocks:
            prefixes.append((first, first + members, blocks * p))
        if inner:
            prefixes.append((first, first + 2, (blocks + inner) * p))
    hk = draw(st.integers(1, 3))
    heads = (hk * draw(st.integers(1, 4)), hk)
    layout, padding = draw(st.sampled_from(("NHD", "HND"))), draw(st.integers(0, 3))
    return Case("drawn", tuple(lens), heads=heads, block_size=p, layout=layout, padding_rows=padding), prefixes


@of_batches
@given(sharing=steps(), options=st.sampled_from(list(OPTIONS)), seed=st.integers(0, 2**16))
def test_twins_agree_on_drawn_batches(sharing, options, seed, device):
    step = lay_out(sharing, device=device, seed=seed)
    options = filled(OPTIONS[options], step, device)
    assert_twins_agree("cascade", *step.tensors, **options)


@each_kernel
def test_a_long_prefix_and_a_short_suffix(kernel, device):
    """3072 and 64 tokens: an LSE of another base than the merge's shows where one part outweighs the other."""
    sharing = Case("c", ((1, 3136), (1, 3100)), heads=(2, 1)), [(0, 2, 3072)]
    step = lay_out(sharing, device=device, dtype=kernel.dtypes[0])

    def assert_equals_no_cascade():
        out, lse = plan_and_attend(fastattn.cascade, *step.tensors, prefixes=step.prefixes, return_lse=True)
        assert_matches_reference(out, lse, partial(plan_and_attend, refattn.chunked_prefill), *step.tensors)

    with kernel.forced():
        kernel.check(assert_equals_no_cascade)


@pytest.mark.parametrize("size", [1, 2**11, 2**13], ids=str)
def test_shared_keys_go_through_a_buffer_of_any_size(size, monkeypatch):
    """The CPU kernel gathers what every query sees some blocks at a time; the last of them may be half full."""
    monkeypatch.setattr(cpu, "BUFFER", size)
    step = lay_out(SHARED["tree"])
    assert_twins_agree("cascade", *step.tensors, prefixes=step.prefixes)
    inputs = build(Case("c", ((5, 77), (3, 40), (40, 97)), heads=(4, 2)))
    assert_twins_agree("chunked_prefill", *inputs.tensors, causal=False)


@pytest.mark.core
@pytest.mark.covers("B82")
@pytest.mark.parametrize("splits", [(1, 4), (2, 7), (3, 3)], ids=str)
@pytest.mark.parametrize("options", ["sinks", "everything-in-a-window"])
def test_levels_with_more_splits_than_their_number(splits, options, monkeypatch, device):
    """A long sequence may get more splits than the tuning's number: the next level's parts lie past all of them."""
    choose = triton_attention.tune
    chosen = dict(splits=splits[0], most_splits=splits[1], block_n=16)
    monkeypatch.setattr(triton_attention, "tune", lambda *arguments: choose(*arguments)._replace(**chosen))
    step = lay_out((Case("c", ((1, 150), (2, 113), (1, 97)), heads=(2, 1)), [(0, 3, 48), (0, 2, 96)]), device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("cascade", *step.tensors, again=False, **filled(OPTIONS[options], step, device))


@each_kernel
def test_caches_and_queries_with_padded_strides(kernel, device):
    step = lay_out(SHARED["three-levels"], device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = step.tensors
    query = functional.pad(query, (0, 8, 0, 1))[:, :-1, :-8]
    key_cache = functional.pad(key_cache, (0, 8, 0, 2, 0, 1))[:, :-1, :-2, :-8]
    value_cache = functional.pad(value_cache, (0, 16, 0, 1))[:, :, :-1, :-16]
    with kernel.forced():
        kernel.check(assert_twins_agree, "cascade", query, key_cache, value_cache, batch, prefixes=step.prefixes)


@pytest.mark.core
@pytest.mark.covers("B80")
@each_twin
@pytest.mark.parametrize("sink", [40.0, -40.0], ids=["far-above-every-score", "far-below"])
def test_a_sink_is_counted_once(twin, sink, device):
    step = lay_out(SHARED["three-levels"], device=device)
    sinks = torch.full((4,), sink, device=device)
    out, lse = plan_and_attend(twin, *step.tensors, prefixes=step.prefixes, sinks=sinks, return_lse=True)
    assert_matches_reference(out, lse, partial(plan_and_attend, refattn.chunked_prefill), *step.tensors, sinks=sinks)


@each_kernel
def test_levels_that_are_advanced_in_place_are_read_again(kernel, device):
    """As in a CUDA graph: the next step has longer sequences in the same tensors, and the same prefixes.

    A batch that is written to takes a new plan. On a device the tables of a plan may be written to as well: they are
    read when a layer attends, and the maxima say how long sequences may get.
    """
    step = lay_out((Case("c", ((1, 70), (1, 49), (2, 66)), heads=(4, 2)), [(0, 3, 32)]), device=device)
    *tensors, batch = (x.to(kernel.dtypes[0]) if x is not step.tensors[3] else x for x in step.tensors)
    batch.seq_lens.sub_(1)
    plan = step.plan(fastattn.cascade)

    def assert_read_again():
        out, lse = fastattn.cascade.attention(*tensors, plan, return_lse=True)
        assert_matches_reference(out, lse, partial(plan_and_attend, refattn.chunked_prefill), *tensors, batch)

    for _ in range(2):
        with kernel.forced():
            kernel.check(assert_twins_agree, "cascade", *tensors, batch, prefixes=step.prefixes)
            if kernel.name != "cpu":  # a plan of cpu fixes how the work is shared out, by the old lengths
                kernel.check(assert_read_again)
        batch.seq_lens.add_(1)
        plan.levels[-1].batch.seq_lens.add_(1)


@pytest.mark.core
@pytest.mark.covers("B79")
@each_kernel
@pytest.mark.parametrize("window", [(3, 0), (40, -1), (88, 0), (89, 0), (5000, -1), (-1, 7)], ids=str)
def test_twins_agree_on_a_window(window, kernel, device):
    """The first hides all that is shared, the fourth nothing: the longest sequence has 90 tokens."""
    step = lay_out(SHARED["tree"], device=device, dtype=kernel.dtypes[0])
    with kernel.forced():
        kernel.check(assert_twins_agree, "cascade", *step.tensors, prefixes=step.prefixes, window_size=window)


@each_kernel
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e4], ids=str)
def test_keys_before_every_window_may_hold_anything(junk, kernel, device):
    """A shared key that is before the window of each query, and own keys that are."""
    case, prefixes = Case("c", ((1, 90), (3, 73), (1, 70)), heads=(4, 2)), [(0, 3, 32), (1, 3, 64)]
    step = lay_out((case, prefixes), device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = step.tensors
    left = 30

    def call():
        return plan_and_attend(
            fastattn.cascade,
            query,
            key_cache,
            value_cache,
            batch,
            prefixes=step.prefixes,
            window_size=(left, 0),
            return_lse=True,
        )

    def assert_unchanged():
        before = call()
        seen: dict[tuple[int, int], bool] = {}
        for (query_len, seq_len), blocks in zip(case.lens, batch.block_table.tolist(), strict=True):
            for j in range(seq_len):
                place = blocks[j // case.block_size], j % case.block_size
                seen[place] = seen.get(place, False) or j >= seq_len - query_len - left
        for place, is_seen in seen.items():
            if not is_seen:
                key_cache[place], value_cache[place] = junk, junk
        assert not all(seen.values())
        assert all(torch.equal(*pair) for pair in zip(before, call(), strict=True))
        its_window = dict(prefixes=step.prefixes, window_size=(left, 0))
        assert_twins_agree("cascade", *step.tensors, again=not kernel.is_interpreted, **its_window)

    with kernel.forced():
        kernel.check(assert_unchanged)


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({}, None),
        (dict(softcap=2.0, window_size=(89, 0)), None),
        (dict(window_size=(88, 0)), [79, 65, 34, 6, 59, 89]),
        (dict(alibi_slopes=True), [79, 65, 34, 6, 59, 89]),
    ],
    ids=["plain", "a-window-of-all", "window", "alibi"],
)
def test_a_kernel_is_told_positions_where_they_matter(options, positions, monkeypatch, device):
    """They cost some launches and leave fewer kernels, so a level without a need for them comes without."""
    step, asked, given = lay_out(SHARED["tree"], device=device), [], []
    choose, compute = order.choose, dispatch.compute

    def note_problem(problem):
        asked.append(problem)
        return choose(problem)

    def note_plan(*arguments):
        given.append(arguments[2])
        return compute(*arguments)

    monkeypatch.setattr(order, "choose", note_problem)
    monkeypatch.setattr(dispatch, "compute", note_plan)
    plan_and_attend(fastattn.cascade, *step.tensors, **filled(options, step, device))
    (plan,) = given
    *shared, own = (problem for problem in asked if problem.keys == "pages" and problem.levels == 1)
    firsts = ([0] * 6, [32, 32, 32, 0, 48, 48])
    for problem, level, first_keys in zip(shared, plan.levels[:-1], firsts, strict=True):
        assert problem.window[1] == -1 and not level.causal and not problem.sinks
        assert problem.positions == (positions is not None)
        if positions is None:
            assert problem.window == (-1, -1)
        else:
            assert level.positions.dtype == torch.int32
            assert level.positions.tolist() == positions
            assert level.first_keys.repeat_interleave(level.batch.query_lens).tolist() == first_keys
    assert not own.positions and plan.levels[-1].positions is None and plan.levels[-1].causal


def test_levels_are_planned_without_asking_the_device():
    """Tensors without contents are enough, so nothing waits for them."""
    for name in ("prefills-and-decodes", "three-levels", "nothing-shared"):
        step = lay_out(SHARED[name])
        batch = step.tensors[3]
        tables = ("cu_seqlens_q", "seq_lens", "block_table")
        unknown = dataclasses.replace(batch, **{table: getattr(batch, table).to("meta") for table in tables})
        shapes = dataclasses.replace(step, tensors=(*step.tensors[:3], unknown)).plan(fastattn.cascade)
        for level, known in zip(shapes.levels, step.plan(fastattn.cascade).levels, strict=True):
            for table in tables:
                assert getattr(level.batch, table).is_meta
                assert getattr(level.batch, table).shape == getattr(known.batch, table).shape
            assert level.first_keys.shape == known.first_keys.shape
            assert level.batch.max_query_len == known.batch.max_query_len
            assert level.batch.max_seq_len == known.batch.max_seq_len
        for level in shapes.levels[:-1]:
            assert level.positions.shape == (sum(step.requests[0]),)


def test_a_window_without_a_shared_level(device):
    step = lay_out(SHARED["nothing-shared"], device=device)
    assert_twins_agree("cascade", *step.tensors, prefixes=step.prefixes, window_size=(20, 0))


# --- who shares what ---

DRAWING = ([1, 1, 1, 1], [13, 18, 11, 7], [[7, 3, 5, 9], [7, 3, 5, 2, 8], [7, 3, 4], [6, 1]])


@each_twin
def test_the_prefixes_of_the_drawing(twin):
    assert twin.find_prefixes(*DRAWING, block_size=4) == [Prefix(0, 3, 8), Prefix(0, 2, 12)]


@each_twin
def test_the_levels_of_the_drawing(twin):
    plan = twin.plan(make_batch(*DRAWING), prefixes=[Prefix(0, 2, 12), Prefix(0, 3, 8)], block_size=4)
    levels = plan.levels
    assert [level.batch.cu_seqlens_q.tolist() for level in levels] == [[0, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [level.batch.seq_lens.tolist() for level in levels] == [[8, 0], [4, 0, 0], [1, 6, 3, 7]]
    assert [level.first_keys.tolist() for level in levels] == [[0, 0], [8, 8, 0], [12, 12, 8, 0]]
    assert list(map(used, levels)) == [[[7, 3], []], [[5], [], []], [[9], [2, 8], [4], [6, 1]]]
    assert [level.causal for level in levels] == [False, False, True]
    assert [level.positions.tolist() for level in levels[:-1]] == [[12, 17, 10, 6]] * 2
    assert levels[-1].positions is None


@each_twin
def test_equal_content_in_other_blocks_is_not_shared(twin):
    """The second request has the same tokens, computed again into blocks of its own."""
    assert twin.find_prefixes([1, 1], [9, 9], [[0, 1, 2], [3, 4, 5]], block_size=4) == []


@each_twin
def test_only_the_beginning_is_a_prefix(twin):
    assert twin.find_prefixes([1, 1], [13, 13], [[9, 1, 2, 3], [8, 1, 2, 4]], block_size=4) == []


@each_twin
@pytest.mark.parametrize(
    ("query_len", "end"), [(1, 8), (3, 8), (4, 8), (5, 4), (8, 4), (9, 0), (13, 0)], ids=lambda x: f"{x}"
)
def test_a_prefix_ends_before_the_first_query_of_everyone(twin, query_len, end):
    """12 keys in 3 blocks, all shared: a block counts only if all its keys lie before the longest chunk."""
    found = twin.find_prefixes([1, query_len], [13, 12], [[0, 1, 2, 3], [0, 1, 2]], block_size=4)
    assert found == ([Prefix(0, 2, end)] if end else [])


@each_twin
def test_sharing_requests_must_be_neighbours_and_sorting_makes_them(twin):
    tables = [[1, 2], [5, 6], [1, 3], [5, 7]]
    assert twin.find_prefixes([1] * 4, [6] * 4, tables, block_size=4) == []
    assert twin.find_prefixes([1] * 4, [6] * 4, sorted(tables), block_size=4) == [Prefix(0, 2, 4), Prefix(2, 4, 4)]


@each_twin
def test_no_request_and_one_request_share_nothing(twin):
    assert twin.find_prefixes([], [], [], block_size=4) == []
    assert twin.find_prefixes([1], [9], [[0, 1, 2]], block_size=4) == []


tables_drawn = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 1), min_size=4, max_size=4)), min_size=0, max_size=7
)


@given(drawn=tables_drawn)
def test_find_prefixes_by_definition(drawn):
    """Each maximal run of neighbours with what all of them share, found by trying every run."""
    p, tables = 2, [[10 * j + block for j, block in enumerate(blocks)] for _, blocks in drawn]
    query_lens, seq_lens = [q for q, _ in drawn], [8] * len(drawn)

    def shared(first, last):
        count = 0
        while all(8 - q >= (count + 1) * p for q in query_lens[first:last]) and (
            len({table[count] for table in tables[first:last]}) == 1
        ):
            count += 1
        return count

    expected = []
    for first in range(len(drawn)):
        for last in range(first + 2, len(drawn) + 1):
            count = shared(first, last)
            grows_left = first > 0 and shared(first - 1, last) == count
            grows_right = last < len(drawn) and shared(first, last + 1) == count
            if count and not grows_left and not grows_right:
                expected.append(Prefix(first, last, count * p))
    expected.sort(key=lambda x: (x.first, -x.last, x.end))
    for twin in (refattn.cascade, fastattn.cascade):
        assert twin.find_prefixes(query_lens, seq_lens, tables, block_size=p) == expected


@pytest.mark.core
@pytest.mark.covers("B75")
@of_batches
@given(sharing=steps(), window=st.sampled_from([(-1, -1), (20, 0), (5, 3)]))
def test_levels_hold_every_key_once_and_both_twins_make_the_same(sharing, window):
    step = lay_out(sharing)
    ours, theirs = (step.plan(twin, window_size=window).levels for twin in (refattn.cascade, fastattn.cascade))
    assert len(ours) == len(theirs)
    for level, other in zip(ours, theirs, strict=True):
        assert torch.equal(level.first_keys, other.first_keys)
        for field in ("cu_seqlens_q", "seq_lens"):
            assert torch.equal(getattr(level.batch, field), getattr(other.batch, field)), field
        assert used(level) == used(other)
        assert (level.block_size, level.causal) == (other.block_size, other.causal)
        assert level.batch.max_query_len <= other.batch.max_query_len
        assert level.batch.max_seq_len <= other.batch.max_seq_len
        last = level is ours[-1]
        assert level.causal == last and (level.positions is None) == last and (other.positions is None) == last
        assert last or torch.equal(level.positions, other.positions)
    keys = sum(int(level.batch.seq_lens.sum()) for level in ours)
    saved = 0
    for first, last, end in step.prefixes:
        begin = max((p.end for p in step.prefixes if p.encloses(Prefix(first, last, end))), default=0)
        saved += (last - first - 1) * (end - begin)
    assert keys == sum(step.requests[1]) - saved


@each_twin
def test_prefixes_that_overlap_are_named(twin):
    requests = [1] * 3, [60] * 3, [[1, 2, 3, 4]] * 3
    with pytest.raises(ValueError, match=r"prefixes\[1\]: expected to be apart"):
        twin.plan(make_batch(*requests), prefixes=[Prefix(0, 2, 16), Prefix(1, 3, 32)], block_size=16)
