"""Intervals: each query sees one run of keys, and nothing else, whichever mask the run comes from."""

import importlib
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn.cascade
import fastattn.interval
import fastattn.varlen
import refattn.attention
import refattn.cascade
import refattn.chunked_prefill
import refattn.interval
import refattn.metadata
import refattn.varlen
import twinattn.integrations.ops
from fastattn import dispatch
from fastattn.kernels import order
from fastattn.kernels.cpu.schedule import schedule_of
from fastattn.kernels.problem import Problem
from refattn.keys import Pages, Rows
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Intervals, Plan
from refattn.trees import TreePlan
from tests.helpers.batches import (
    CASES,
    HARMLESS,
    POISON,
    Case,
    build,
    of_batches,
    plan_and_attend,
    ragged_cases,
    read_masks,
)
from tests.helpers.kernels_present import each_kernel
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree

TWINS = [refattn.interval, fastattn.interval]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])
NAMES = ("chunk", "mixed", "more-queries-than-keys", "empty-rows", "odd-blocks", "verification")
SOME = [case for case in CASES if case.name in NAMES]
BLOCKS = [Case("whole-blocks", ((6, 12), (12, 12), (1, 18), (0, 6), (48, 96)), heads=(4, 2), padding_rows=2)]
SPANS = ((2, 6), (7, 7), (15, 40), (60, 190))  # first and last tokens, as far as a sequence has them


def spans_of(case):
    """Return the spans of each sequence, cut at its end; where it has none, -1."""
    rows = [[(a, min(b, s - 1)) if a < s else (-1, -1) for a, b in SPANS] for _, s in case.lens]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), len(SPANS), 2)


def together(i, j):
    """Whether two positions are in one span."""
    return any(a <= i <= b and a <= j <= b for a, b in SPANS)


def prefix_of(case):
    return torch.tensor([min(20, s) for _, s in case.lens], dtype=torch.int32)


RULES = {  # per mask: its intervals, and whether query i sees key j
    "causal": (lambda twin, case, *where: twin.causal(*where), lambda i, j: j <= i),
    "window": (lambda twin, case, *where: twin.causal(*where, window_size=(9, 0)), lambda i, j: i - 9 <= j <= i),
    "spans": (
        lambda twin, case, batch, t: twin.image_spans(batch, spans_of(case).to(batch.device), t),
        lambda i, j: j <= i or together(i, j),
    ),
    "spans-in-a-window": (
        lambda twin, case, batch, t: twin.image_spans(batch, spans_of(case).to(batch.device), t, window_size=(9, -1)),
        lambda i, j: (j <= i or together(i, j)) and i - j <= 9,
    ),
    "spans-in-a-window-to-both-sides": (
        lambda twin, case, batch, t: twin.image_spans(batch, spans_of(case).to(batch.device), t, window_size=(9, 4)),
        lambda i, j: (j <= i or together(i, j)) and i - j <= 9 and j - i <= 4,
    ),
    "whole-spans-and-a-window": (
        lambda twin, case, batch, t: twin.image_spans(
            batch, spans_of(case).to(batch.device), t, window_size=(9, 0), whole_spans=True
        ),
        lambda i, j: (i - 9 <= j <= i) or together(i, j),
    ),
    "prefix": (
        lambda twin, case, batch, t: twin.prefix_lm(batch, prefix_of(case).to(batch.device), t),
        lambda i, j: j <= i or (0 <= i < 20 and j < 20),
    ),
    "blocks": (
        lambda twin, case, *where: twin.diffusion_blocks(*where, diffusion_block=6),
        lambda i, j: i >= 0 and j // 6 <= i // 6,
    ),
}
each_rule = pytest.mark.parametrize("rule", RULES)


def cases_of(rule):
    return BLOCKS if rule == "blocks" else SOME


def intervals_of(rule, twin, case, batch):
    return RULES[rule][0](twin, case, batch, sum(q for q, _ in case.lens) + case.padding_rows)


def masks_of(rule, case):
    """Draw the masks by hand."""
    sees = RULES[rule][1]
    return [[[sees(s - q + i, j) for j in range(s)] for i in range(q)] for q, s in case.lens]


def drawn(batch, t, seed=0):
    """Draw intervals, of which some are empty, and some begin before the sequence or at its end."""
    random = torch.Generator().manual_seed(seed)
    ends = torch.zeros(t, dtype=torch.int64)
    used = int(batch.cu_seqlens_q[-1])
    ends[:used] = batch.seq_lens.long().repeat_interleave(batch.query_lens)
    first = (torch.rand(t, generator=random) * (ends + 5)).long() - 3
    last = torch.minimum(first + (torch.rand(t, generator=random) ** 2 * (ends + 3)).long() - 1, ends - 1)
    return Intervals(first.int(), last.int())


# --- the masks ---


@pytest.mark.core
@pytest.mark.covers("F218")
@each_rule
def test_intervals_are_the_mask_and_the_same_in_both_packages(rule):
    for case in cases_of(rule):
        batch = build(case).batch
        ours, theirs = (intervals_of(rule, twin, case, batch) for twin in TWINS)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype == torch.int32
            assert torch.equal(one, other), case
        row = 0
        for mask, (q, s) in zip(masks_of(rule, case), case.lens, strict=True):
            for i in range(q):
                first, last = int(ours.first_visible[row + i]), int(ours.last_visible[row + i])
                assert [first <= j <= last for j in range(s)] == mask[i]
            row += q
        assert (ours.first_visible[row:] == 0).all() and (ours.last_visible[row:] == -1).all()


def test_spans_are_those_of_the_masks_of_transformers():
    """Gemma 3 and 4: `sliding_window and (causal or same image)`, token by token."""
    masks = pytest.importorskip("transformers.masking_utils")
    image = torch.tensor([[-1, 0, 0, 0, 0, 0, -1, -1, 1, 1, 1, -1]])
    sees = masks.and_masks(
        masks.sliding_window_overlay(4),
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(image)),
    )
    batch = refattn.metadata.make_batch([12], [12])
    spans = torch.tensor([[[1, 5], [8, 10]]], dtype=torch.int32)
    first, last = refattn.interval.image_spans(batch, spans, 12, window_size=(3, -1))
    for i in range(12):
        seen = [bool(sees(0, 0, torch.tensor(i), torch.tensor(j))) for j in range(12)]
        assert seen == [int(first[i]) <= j <= int(last[i]) for j in range(12)]


@pytest.mark.covers("F219")
@each_twin
@pytest.mark.parametrize("rule", ["spans-in-a-window", "prefix"])
def test_each_query_sees_its_interval_and_nothing_else(twin, rule, device):
    for case in SOME:
        case = replace(case, heads=(2, 1), head_size=64, value_head_size=64)
        check_mask(twin, rule, case, device)


@pytest.mark.core
@pytest.mark.covers("F219")
@each_kernel
@each_rule
def test_each_kernel_keeps_to_the_intervals(kernel, rule, device):
    with kernel.forced():
        for case in cases_of(rule)[-1 if kernel.is_interpreted else -3 :]:
            kernel.check(check_mask, fastattn.interval, rule, replace(case, heads=(2, 1), value_head_size=64), device)


def check_mask(twin, rule, case, device):
    def attention(*tensors, **options):
        return plan_and_attend(twin, *tensors, **intervals_of(rule, twin, case, tensors[-1])._asdict(), **options)

    read = read_masks(attention, replace(case, head_size=64), device=device)
    for mask, expected, (q, s) in zip(read, masks_of(rule, case), case.lens, strict=True):
        assert mask.tolist() == torch.tensor(expected, dtype=torch.bool).reshape(q, s).tolist()


# --- the formula ---


@each_twin
def test_a_window_and_a_causal_mask_are_intervals(twin, device):
    inputs = build(SOME[0], device=device)
    for window_size in ((-1, -1), (30, 0)):
        plain = plan_and_attend(refattn.chunked_prefill, *inputs.tensors, window_size=window_size)
        intervals = twin.causal(inputs.batch, len(inputs.query), window_size=window_size)
        torch.testing.assert_close(
            plan_and_attend(twin, *inputs.tensors, **intervals._asdict()), plain, rtol=1e-5, atol=1e-5
        )


OPTIONS = {
    "plain": {},
    "everything": dict(softmax_scale=-0.2, softcap=5.0, alibi_slopes=torch.rand(6), sinks=torch.randn(6)),
    "alone": dict(batch_invariant=True),
}


@pytest.mark.core
@pytest.mark.covers("F219")
@each_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_drawn_intervals_agree_with_the_reference(kernel, options, device):
    case = Case("drawn", ((40, 71), (1, 30), (18, 18), (0, 5), (4, 2)), heads=(6, 3), padding_rows=2)
    inputs = build(case, dtype=kernel.dtypes[0], device=device)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    intervals = Intervals(*(x.to(device) for x in drawn(build(case).batch, len(inputs.query))))
    with kernel.forced():
        kernel.check(assert_twins_agree, "interval", *inputs.tensors, **intervals._asdict(), **options)


@each_kernel
def test_keys_that_are_split_over_programs_agree(kernel, device):
    """Some splits have no key of an interval, and some rows none of a split's."""
    case = Case("long", ((3, 900), (1, 40), (70, 300)), heads=(2, 1))
    inputs = build(case, dtype=kernel.dtypes[0], device=device)
    intervals = Intervals(*(x.to(device) for x in drawn(build(case).batch, len(inputs.query), seed=3)))
    with kernel.forced():
        kernel.check(assert_twins_agree, "interval", *inputs.tensors, **intervals._asdict())


@of_batches
@given(case=ragged_cases(head_sizes=(64,)), seed=st.integers(0, 9))
def test_drawn_batches_and_intervals_on_a_cpu(case, seed):
    inputs = build(case)
    intervals = drawn(inputs.batch, len(inputs.query), seed)
    with order.use_kernel("cpu"):
        assert_twins_agree("interval", *inputs.tensors, again=False, **intervals._asdict())


@pytest.mark.core
@pytest.mark.covers("F219")
def test_queries_that_share_an_interval_are_computed_together_and_each_shape_is_right():
    """Runs of one interval, of growing ones, of empty ones, and of windows: one call each, where the CPU can."""
    case = Case("shapes", ((140, 160),), heads=(4, 2))
    inputs = build(case)
    first, last = torch.zeros(140, dtype=torch.int32), torch.full((140,), 40, dtype=torch.int32)
    last[30:60] = torch.arange(60, 90)  # one key more each
    first[60:80], last[60:80] = 9, 3  # nothing
    first[80:110], last[80:110] = torch.arange(5, 35), torch.arange(50, 80)  # a window
    first[110:111], last[110:111] = 159, 159
    first[111:], last[111:] = 17, 100
    plan = fastattn.interval.plan(inputs.batch, **Intervals(first, last)._asdict(), block_size=16)
    (piece,) = schedule_of(plan).apart(False)
    kinds = [(segment.rows.start, segment.rows.stop, segment.kind) for segment in piece.view.intervals.segments]
    assert kinds == [(0, 30, "same"), (30, 60, "causal"), (60, 111, "any"), (111, 140, "same")]
    with order.use_kernel("cpu"):
        assert_twins_agree("interval", *inputs.tensors, **Intervals(first, last)._asdict())


# --- what no query sees, and nothing to see ---


@pytest.mark.core
@pytest.mark.covers("F193")
@each_kernel
def test_keys_that_no_query_sees_may_hold_anything(kernel, device):
    """Between the intervals of a tile, too: the keys that some tile loads, and no query sees."""
    case = Case("gaps", ((40, 200), (1, 90), (3, 60)), heads=(2, 1), padding_rows=1)
    first = torch.tensor([5] * 20 + [150] * 20 + [33] + [0, 50, 9] + [0], dtype=torch.int32)
    last = torch.tensor([29] * 20 + [181] * 20 + [60] + [7, 52, 2] + [99], dtype=torch.int32)
    answers = []
    for poison in (HARMLESS, POISON):
        inputs = build(case, dtype=kernel.dtypes[0], poison=poison)
        row = 0
        for i, (q, s) in enumerate(case.lens):
            seen = {j for r in range(row, row + q) for j in range(int(first[r]), int(last[r]) + 1)}
            row += q
            for at, j in enumerate(j for j in range(s) if j not in seen):
                block = int(inputs.batch.block_table[i, j // 16])
                for pool in (inputs.key_cache, inputs.value_cache):
                    pool[block, j % 16] = poison[at % len(poison)]
        tensors = [x.to(device) for x in inputs.tensors[:3]]
        batch = build(case, dtype=kernel.dtypes[0], device=device).batch
        intervals = Intervals(first.to(device), last.to(device))
        with kernel.forced():
            kernel.check(
                lambda tensors=tensors, batch=batch, intervals=intervals: answers.append(
                    plan_and_attend(fastattn.interval, *tensors, batch, **intervals._asdict(), return_lse=True)
                )
            )
        reference = plan_and_attend(refattn.interval, *tensors, batch, **intervals._asdict(), return_lse=True)
        assert all(x.isfinite().all() for x in (reference[0], reference[1][:43]))
    if answers:
        assert all(map(torch.equal, *answers))


@each_twin
def test_a_query_with_an_empty_interval_sees_nothing(twin, device):
    inputs = build(Case("empty", ((4, 20), (1, 5))), device=device)
    first = torch.tensor([3, 0, 19, 2**31 - 1, 1], dtype=torch.int32, device=device)
    last = torch.tensor([2, -1, -(2**31), -5, 0], dtype=torch.int32, device=device)
    sinks = torch.randn(4, device=device)
    for options, expected in (({}, torch.full((4,), -math.inf)), (dict(sinks=sinks), sinks.cpu())):
        out, lse = plan_and_attend(
            twin, *inputs.tensors, **Intervals(first, last)._asdict(), **options, return_lse=True
        )
        assert not out.any()
        # A GPU takes sinks to base 2 and back: half an ulp for the product, two for its division.
        rounding = 3 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(lse.cpu(), expected.expand(5, 4), rtol=rounding, atol=0)


@each_kernel
def test_numbers_at_the_ends_of_int32_and_levels_of_a_cascade(kernel, device):
    """Positions count from the sequence's first token, in each level; a first key may be any number below 0."""
    case = Case("far", ((3, 70), (2, 40)), heads=(2, 1))
    inputs = build(case, dtype=kernel.dtypes[0], device=device)
    first = torch.tensor([-(2**31), 10, 40, -7, 35], dtype=torch.int32, device=device)
    last = torch.tensor([20, 50, 69, 39, 39], dtype=torch.int32, device=device)
    whole = fastattn.interval.plan(inputs.batch, **Intervals(first, last)._asdict(), block_size=16)
    table, lens = inputs.batch.block_table, inputs.batch.seq_lens
    shared = replace(inputs.batch, seq_lens=torch.full_like(lens, 32), max_seq_len=32, num_keys=None)
    own = replace(inputs.batch, seq_lens=lens - 32, block_table=table[:, 2:], max_seq_len=38, num_keys=None)
    of_rows = dict(first_visible=first, last_visible=last)
    levels = (
        Plan(shared, 16, False, **of_rows),
        Plan(own, 16, False, first_keys=torch.full_like(lens, 32), **of_rows),
    )
    cut = CascadePlan(inputs.batch, levels)
    tensors = inputs.tensors[:3]
    wide = [x.float() for x in tensors]
    torch.testing.assert_close(refattn.cascade.attention(*wide, cut), refattn.interval.attention(*wide, whole))

    def hold():
        for twin, reference, plan in (
            (fastattn.interval, refattn.interval, whole),
            (fastattn.cascade, refattn.cascade, cut),
        ):
            answer = twin.attention(*tensors, plan, return_lse=True)
            assert_matches_reference(*answer, reference.attention, *tensors, plan)

    with kernel.forced():
        kernel.check(hold)


@each_kernel
def test_an_interval_that_begins_at_the_end_of_int32_in_a_tile_of_many_rows(kernel, device):
    """A kernel that counts steps up to where all rows see all keys may not count up to there."""
    case = Case("many rows", ((1, 1), (20, 40)), heads=(16, 1))
    inputs = build(case, dtype=kernel.dtypes[0], device=device)
    first, last = torch.zeros(21, dtype=torch.int32), torch.full((21,), 39, dtype=torch.int32)
    last[0] = 0
    first[5], last[5] = 2**31 - 1, 7  # sees nothing
    first[9], last[9] = 2**31 - 1, -1
    intervals = Intervals(first.to(device), last.to(device))

    def hold():
        plan = fastattn.interval.plan(inputs.batch, **intervals._asdict(), block_size=case.block_size)
        answer = fastattn.interval.attention(*inputs.tensors[:3], plan, return_lse=True)
        assert_matches_reference(*answer, refattn.interval.attention, *inputs.tensors[:3], plan)
        assert (answer[0][[5, 9]] == 0).all()

    with kernel.forced():
        kernel.check(hold)


# --- other ways to the same plan, and bad input ---


def test_an_operator_for_the_compiler_takes_the_intervals_along(device):
    inputs = build(SOME[1], device=device)
    intervals = intervals_of("prefix", fastattn.interval, SOME[1], inputs.batch)
    plan = fastattn.interval.plan(inputs.batch, **intervals._asdict(), block_size=16)
    out = twinattn.integrations.ops.chunked_prefill(*inputs.tensors[:3], plan)
    assert torch.equal(out, fastattn.interval.attention(*inputs.tensors[:3], plan))


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flash_mla", "torch_flash"])
def test_packages_without_such_a_mask_refuse_it_by_name(name, monkeypatch):
    kernel = order.load(name)
    monkeypatch.setattr(sys.modules[kernel.unsupported_reason.__module__], "capability", lambda device: (9, 0))
    latents = name == "flash_mla"
    problem = Problem(
        "attend",
        torch.device("cuda", 0),
        torch.bfloat16,
        keys="latents" if latents else "rows" if name == "torch_flash" else "pages",
        num_heads=8,
        num_kv_heads=1 if latents else 8,
        head_size=576 if latents else 128,
        value_head_size=512 if latents else 128,
        block_size=None if name == "torch_flash" else 256 if name == "fa2" else 64,
        uniform=True,
        intervals=True,
    )
    assert "no interval of keys for each query" in kernel.unsupported_reason(problem)
    assert "no interval" not in (kernel.unsupported_reason(problem._replace(intervals=False)) or "")


@pytest.mark.core
@pytest.mark.covers("F194")
@each_twin
def test_a_chunk_of_a_prompt_does_not_end_inside_a_span(twin):
    """The later keys of the span are not in the cache yet: to cut the interval there would answer wrongly."""
    whole, cut = (refattn.metadata.make_batch([length], [length], [[0, 1]]) for length in (12, 9))
    spans = torch.tensor([[[4, 11]]], dtype=torch.int32)
    twin.plan(whole, **twin.image_spans(whole, spans, 12)._asdict(), block_size=16)
    with pytest.raises(ValueError, match="expected to end before key 9, where the sequence of query row 4 ends, got 1"):
        twin.plan(cut, **twin.image_spans(cut, spans, 9)._asdict(), block_size=16)
    before = refattn.metadata.make_batch([4], [4], [[0, 1]])
    twin.plan(before, **twin.image_spans(before, spans, 4)._asdict(), block_size=16)


# --- intervals that extend a causal mask ---


@pytest.mark.core
@pytest.mark.covers("F219")
@each_twin
@pytest.mark.parametrize("rule", ["spans", "prefix", "causal"])
def test_without_first_keys_each_query_sees_what_is_before_it(twin, rule, device):
    """The same plan as of both ends, whatever stands in place of ends before the queries."""
    case = next(case for case in SOME if case.name == "mixed")
    batch = build(case, device=device).batch
    ends = intervals_of(rule, twin, case, batch)
    behind = torch.where(torch.arange(len(ends.last_visible), device=device) % 3 == 0, -5, ends.last_visible)
    keeps = ends.last_visible == intervals_of("causal", twin, case, batch).last_visible
    plan = twin.plan(batch, last_visible=torch.where(keeps, behind, ends.last_visible), block_size=case.block_size)
    assert plan.extends_causal and not twin.plan(batch, **ends._asdict(), block_size=16).extends_causal
    used = int(batch.cu_seqlens_q[-1])
    assert torch.equal(plan.first_visible[:used], ends.first_visible[:used])
    assert torch.equal(plan.last_visible[:used], ends.last_visible[:used])
    for name, wrong in (("first_visible", ends.first_visible + 1), ("last_visible", ends.last_visible - 1)):
        if device == "cpu":
            with pytest.raises(ValueError, match="extends_causal: expected intervals from 0 up to each query"):
                replace(plan, **{name: wrong})
    with pytest.raises(ValueError, match="extends_causal: expected intervals with it, got none"):
        Plan(batch, 16, extends_causal=True)


EXTENDED = {
    "plain": {},
    "everything": dict(softcap=5.0, sinks=torch.linspace(-2.0, 3.0, 4)),
    "negative-scale": dict(softmax_scale=-0.2),
}


@pytest.mark.core
@pytest.mark.covers("F219")
@pytest.mark.parametrize(
    ("rule", "over_rows", "options"), every_pair_on_cpu(["spans", "prefix"], [False, True], EXTENDED)
)
def test_a_causal_kernel_and_the_keys_after_it_are_all(rule, over_rows, options, device):
    """Any kernel up to each query, ours after it: one softmax, sinks counted once, other rows left alone."""
    pytest.importorskip("triton")
    from fastattn.kernels.flash.interval import attend_up_to_and_after

    lens = ((6, 70), (80, 80), (5, 3), (0, 9), (1, 40))
    case = Case("extended", tuple((s, s) for _, s in lens) if over_rows else lens, heads=(4, 2), padding_rows=3)
    given = build(case, dtype=torch.float16, device=device)
    options = AttentionOptions(
        **{name: x.to(device) if name == "sinks" else x for name, x in EXTENDED[options].items()}
    )
    seen = []

    def up_to(query, keys, plan, options, out):
        assert plan.window == (-1, 0) and plan.first_visible is None
        with order.use_kernel("triton"):
            answer = dispatch.compute(query, keys, plan, options, out)
        seen.append([x.clone() for x in answer])
        return answer

    def plan_of(twin, batch):
        ends = intervals_of(rule, twin, case, batch)
        return twin.plan(batch, last_visible=ends.last_visible, block_size=None if over_rows else case.block_size)

    keys = Rows(*given.rows[1:3]) if over_rows else Pages(given.key_cache, given.value_cache)
    batch = given.rows[3] if over_rows else given.batch
    if over_rows:
        batch = replace(batch, block_table=None)
    plan, query = plan_of(fastattn.interval, batch), given.rows[0] if over_rows else given.query
    out, lse = attend_up_to_and_after(up_to, query, keys, plan, options, None)
    attention = refattn.varlen.attention if over_rows else refattn.interval.attention

    def by_reference(query, key, value, batch, **asked):
        there = options if options.sinks is None else replace(options, sinks=options.sinks.to(query.device))
        return attention(query, key, value, plan_of(refattn.interval, batch), there, **asked)

    assert_matches_reference(out, lse, by_reference, query, *keys, batch)
    see_more = plan.last_visible > fastattn.interval.causal(batch, len(query)).last_visible
    (before,) = seen
    assert see_more.any() and not torch.equal(before[0][see_more], out[see_more])
    torch.testing.assert_close(before[0][~see_more], out[~see_more], rtol=0, atol=1e-3)


def test_a_causal_kernel_takes_intervals_that_extend_it(monkeypatch):
    """Where FlashAttention is asked first for prompts; not for others, and over no quantized values."""
    from fastattn.kernels.flash import fa3, fa4

    for module in (fa3, fa4):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fa3, "_cannot_load", lambda: None)
    monkeypatch.setattr(fa3, "_refusal", lambda *_, **__: None)
    monkeypatch.setattr(fa4, "cannot_import", lambda *_: None)
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    sizes = ("pages", 1, False, 32, 8, 128, 128, 16, 8192, 8192, 2)
    prompts = Problem("attend", torch.device("cuda"), torch.bfloat16, *sizes, intervals=True, extends_causal=True)
    assert order.priorities(prompts)[0] == "fa4"
    for name in ("fa3", "fa4"):
        assert order.unsupported_reason(name, prompts) is None
        assert order.unsupported_reason(name, prompts._replace(keys="rows", block_size=None)) is None
        others = dict(extends_causal=False), dict(keys="quantized", stored=(torch.int8, torch.int8))
        for changes in others:
            assert order.unsupported_reason(name, prompts._replace(**changes)) is not None
    decodes = prompts._replace(max_query_len=1, num_seqs=64)
    assert order.priorities(decodes)[0] == "triton"


I32 = partial(torch.tensor, dtype=torch.int32)
GOOD = Intervals(I32([0, 0, 0]), I32([3, 4, 5]))
BAD = {
    "of-64-bits": (dict(first_visible=torch.zeros(3).long()), r"first_visible: expected int32 \[t\], got int64"),
    "unequal": (dict(last_visible=I32([3, 4])), r"last_visible: expected int32 \[t=3\], got int32 \[2\]"),
    "too-few": (
        dict(first_visible=I32([0, 0]), last_visible=I32([3, 4])),
        "first_visible: expected at least 3, one for each query row",
    ),
    "past-the-end": (dict(last_visible=I32([3, 4, 6])), "last_visible: expected to end before key 6"),
    "block-size": (dict(block_size=0), "block_size: expected"),
}


@pytest.mark.core
@pytest.mark.covers("F194")
@each_twin
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_intervals_are_refused(twin, arguments, message, shapes_unchecked):
    batch = refattn.metadata.make_batch([3], [6], [[0]])
    twin.plan(batch, **GOOD._asdict(), block_size=16)
    with pytest.raises(ValueError, match=message):
        twin.plan(batch, **{**GOOD._asdict(), "block_size": 16, **arguments})


@each_twin
def test_bad_masks_are_refused(twin, shapes_unchecked):
    batch = refattn.metadata.make_batch([3], [6], [[0]])
    for call, message in (
        (lambda: twin.image_spans(batch, torch.zeros(1, 1, 3).int(), 3), r"spans: expected int32 \[b=1, n, 2\]"),
        (lambda: twin.image_spans(batch, I32([[[3, 2]]]), 3), "spans: expected first and last tokens, rising"),
        (lambda: twin.image_spans(batch, I32([[[0, 3], [3, 5]]]), 3), "spans: expected first and last tokens, rising"),
        (lambda: twin.image_spans(batch, I32([[[0, 3]]]), 2), "num_tokens: expected at least 3"),
        (lambda: twin.image_spans(batch, I32([[[0, 3]]]), 3, whole_spans=1), "whole_spans: expected True or False"),
        (lambda: twin.causal(batch, 3, window_size=(-2, 0)), "window_size: expected"),
        (lambda: twin.prefix_lm(batch, torch.tensor([3]), 3), r"prefix_lens: expected int32 \[b=1\]"),
        (lambda: twin.prefix_lm(batch, I32([-1]), 3), "prefix_lens: expected lengths of at least 0"),
        (lambda: twin.diffusion_blocks(batch, 3, diffusion_block=0), "diffusion_block: expected a positive int"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_plan_has_both_ends_and_no_other_mask(shapes_unchecked):
    batch = refattn.metadata.make_batch([3], [6], [[0]])
    for arguments, message in (
        (dict(first_visible=GOOD.first_visible), "last_visible: expected int32"),
        (dict(last_visible=GOOD.last_visible), "first_visible: expected int32"),
        (dict(first_visible=GOOD.first_visible, last_visible=GOOD.last_visible[:2]), "last_visible: expected int32"),
        (
            dict(first_visible=GOOD.first_visible[:2], last_visible=GOOD.last_visible[:2]),
            "first_visible: expected at least 3",
        ),
        (
            dict(first_visible=GOOD.first_visible, last_visible=GOOD.last_visible, causal=True),
            "causal, window_size: expected False",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(batch, 16, **{"causal": False, **arguments})
    speculative = importlib.import_module("refattn.speculative")
    tree = speculative.plan(batch, block_size=16, trees=speculative.make_trees([[-1, 0, 0]]))
    masked = replace(tree.whole, first_visible=GOOD.first_visible, last_visible=GOOD.last_visible)
    with pytest.raises(ValueError, match="whole: expected no intervals"):
        TreePlan(masked, tree.prefix, tree.trees, tree.depths, tree.ancestors)


def test_a_second_layer_replays_the_first(device):
    inputs = build(SOME[1], device=device)
    intervals = intervals_of("prefix", fastattn.interval, SOME[1], inputs.batch)
    plan = fastattn.interval.plan(inputs.batch, **intervals._asdict(), block_size=16)
    first, second = (fastattn.interval.attention(*inputs.tensors[:3], plan, AttentionOptions()) for _ in range(2))
    assert torch.equal(first, second)
