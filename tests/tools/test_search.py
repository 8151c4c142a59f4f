"""The search over shapes: it finds what is wrong, calls right what is right, and says which call it was."""

import json
import os
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from random import Random
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from refattn.four_bits import Int4Scales, Nvfp4Scales
from refattn.options import AttentionOptions
from refattn.rounding import hadamard
from refattn.scales import Int8Scales
from tests.helpers import by_hand
from tests.helpers.planted import PLANTED, plant
from twinattn.kit.search import (
    PATHS,
    Search,
    Truth,
    Twin,
    Workload,
    draw,
    draw_palette,
    shrink,
    try_kernel,
    workload,
    workload_of,
)
from twinattn.kit.search import command as command
from twinattn.kit.search.draw import normalized, smaller
from twinattn.kit.search.loop import DTYPES
from twinattn.kit.search.trial import REFERENCE, OneAccumulator
from twinattn.kit.workload import LARGEST

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checking shapes takes as long as all the rest

FEW = 100  # workloads, among which each mistake has to show: most do within ten
LONGEST = 90  # more than a split of the kernels by hand


@cache
def truths(path):
    """Draw some workloads of a path; what each should return is computed once."""
    drawn = (workload(1, path, index, ("float32", "float16"), longest=LONGEST) for index in range(FEW))
    return [Truth(work) for work in drawn]


def first_fault(path, modules, few=FEW):
    """Return the first fault that a twin shows among some workloads, and how many it took."""
    twin = Twin(lambda name: modules.get(name, REFERENCE[name]))
    for count, truth in enumerate(truths(path)[:few], start=1):
        outcome = try_kernel(truth, twin, None)
        if outcome.is_fault:
            return outcome, count
    return None, few


# --- mistakes ---


def changed(path, **functions):
    """Return a reference with some functions in the place of its own."""
    return {path: SimpleNamespace(**{**vars(REFERENCE[path]), **functions})}


def paged_by_hand(paged):
    """Return a path of a kernel by hand, which knows no root of a distance."""

    def attention(query, key_cache, value_cache, plan, options=AttentionOptions(), *, return_lse=False, out=None):
        if options.alibi_sqrt:
            raise NotImplementedError("no kernel computes ALiBi by the root of the distance, as it was not written")
        b = plan.batch
        return paged(
            *(query, key_cache, value_cache, b.cu_seqlens_q, b.seq_lens, b.block_table, b.max_query_len, b.max_seq_len),
            softmax_scale=options.softmax_scale,
            causal=plan.causal,
            window_size=plan.window_size,
            softcap=options.softcap,
            alibi_slopes=None if options.alibi_slopes is None else options.alibi_slopes.float(),
            sinks=options.sinks,
            return_lse=return_lse,
            out=out,
        )

    return changed("chunked_prefill", attention=attention)


# What the kit draws and the search does not: two options together, forks, more than 64 parts, slots past 16 bits.
WIDER = (
    *("window-right-beats-causal", "softcap-lost-without-causal", "window-lost-beside-a-softcap"),
    *("prefix-taken-too-long", "merge-parts-past-a-count", "slot-of-sixteen-bits"),
)
OF_PAGES = [x for x in PLANTED if x[0] == "paged" and x[1] not in WIDER]


def test_kernels_by_hand_are_right():
    assert first_fault("chunked_prefill", paged_by_hand(by_hand.paged), 50)[0] is None
    assert first_fault("merge", changed("merge", merge=by_hand.merge), 50)[0] is None
    assert first_fault("kv_cache", changed("kv_cache", write=by_hand.write), 50)[0] is None


@pytest.mark.parametrize(("kernel", "mistake", "name", "old", "new"), OF_PAGES, ids=[x[1] for x in OF_PAGES])
def test_each_mistake_that_the_kit_knows_is_found(kernel, mistake, name, old, new):
    fault, _ = first_fault("chunked_prefill", paged_by_hand(plant(kernel, old, new)))
    assert fault is not None


OF_OTHERS = [x for x in PLANTED if x[0] in ("merge", "write") and x[1] not in WIDER]


@pytest.mark.parametrize(("kernel", "mistake", "name", "old", "new"), OF_OTHERS, ids=[x[1] for x in OF_OTHERS])
def test_mistakes_of_a_merge_and_of_a_write_are_found(kernel, mistake, name, old, new):
    path = {"merge": "merge", "write": "kv_cache"}[kernel]
    fault, _ = first_fault(path, changed(path, **{kernel: plant(kernel, old, new)}))
    assert fault is not None


def a_window_one_too_wide():
    def plan(batch, *, window_size=(-1, -1), **planned):
        left, right = window_size
        return REFERENCE["sliding_window"].plan(batch, window_size=(left + (0 <= left < LARGEST), right), **planned)

    return "sliding_window", changed("sliding_window", plan=plan)


def a_window_near_the_largest_number_that_overflows():
    def plan(batch, *, window_size=(-1, -1), **planned):
        left, right = window_size
        overflows = left + int(batch.max_seq_len) > LARGEST
        return REFERENCE["sliding_window"].plan(batch, window_size=(0 if overflows else left, right), **planned)

    return "sliding_window", changed("sliding_window", plan=plan)


def a_page_of_another_sequence():
    def plan(batch, **planned):
        table = batch.block_table.clone()
        if len(table) > 2:
            table[-1, 0] = table[0, 0] if int(batch.seq_lens[0]) and int(batch.seq_lens[-1]) else table[-1, 0]
        return REFERENCE["local"].plan(replace(batch, block_table=table), **planned)

    return "local", changed("local", plan=plan)


def a_table_that_is_read_past_its_end():
    def plan(batch, *, block_size, **planned):
        whole = -(-batch.seq_lens // block_size) * block_size
        longer = replace(batch, seq_lens=whole.int(), max_seq_len=max(int(whole.max()), batch.max_seq_len))
        return REFERENCE["chunked_prefill"].plan(longer, block_size=block_size, **planned)

    return "chunked_prefill", changed("chunked_prefill", plan=plan)


def a_sink_for_each_level():
    def attention(query, key_cache, value_cache, plan, options=AttentionOptions(), *, return_lse=False, out=None):
        answer, lse = REFERENCE["cascade"].attention(query, key_cache, value_cache, plan, options, return_lse=True)
        if options.sinks is not None and len(plan.levels) > 1:
            answer, lse = REFERENCE["merge"].add_sinks(answer, lse, options.sinks)
        answer = answer if out is None else out.copy_(answer)
        return (answer, lse) if return_lse else answer

    return "cascade", changed("cascade", attention=attention)


def the_scale_of_another_sequence():
    def attention(query, key_cache, value_cache, plan, options=AttentionOptions(), *, scales, **more):
        if not isinstance(scales, Int8Scales) and isinstance(scales.key, torch.Tensor) and scales.key.ndim == 2:
            scales = replace(scales, key=scales.key[:1].expand(scales.key.shape).contiguous())
        right = REFERENCE["quantized"].attention
        return right(query, key_cache, value_cache, plan, options, scales=scales, **more)

    return "quantized", changed("quantized", attention=attention)


def over_int4(change):
    """Return the reference with other arguments over int4 pages."""

    def attention(query, key_cache, value_cache, plan, options=AttentionOptions(), *, scales, **more):
        if isinstance(scales, Int4Scales):
            query, scales = change(query, scales)
        right = REFERENCE["quantized"].attention
        return right(query, key_cache, value_cache, plan, options, scales=scales, **more)

    return "quantized", changed("quantized", attention=attention)


def value_scales_of_int4_with_heads_before_tokens():
    def by_head(query, scales):
        n, p, hk = scales.value.shape
        return query, replace(scales, value=scales.value.reshape(n, hk, p).transpose(1, 2))

    return over_int4(by_head)


def a_turn_of_queries_by_twice_the_head_size():
    return over_int4(lambda query, scales: (query * 0.5**0.5, scales))


def a_scale_of_nvfp4_that_counts_twice():
    def attention(query, key_cache, value_cache, plan, options=AttentionOptions(), *, scales, **more):
        if isinstance(scales, Nvfp4Scales):
            scales = replace(scales, of_values=scales.of_values**2)
        right = REFERENCE["quantized"].attention
        return right(query, key_cache, value_cache, plan, options, scales=scales, **more)

    return "quantized", changed("quantized", attention=attention)


def keys_that_are_turned_alone():
    def write(key, value, key_cache, value_cache, slots, *, scales):
        value = hadamard(value.float()) if isinstance(scales, Int4Scales) else value
        key = key.float() if isinstance(scales, Int4Scales) else key
        REFERENCE["quantized"].write(key, value, key_cache, value_cache, slots, scales=scales)

    return "kv_cache", changed("quantized", write=write)


def scales_of_nvfp4_that_no_write_sets():
    def write(*arguments, scales):
        if isinstance(scales, Nvfp4Scales):
            scales = replace(scales, value=scales.value.clone())
        REFERENCE["quantized"].write(*arguments, scales=scales)

    return "kv_cache", changed("quantized", write=write)


def unseen_memory_times_0():
    def attention(query, cache, plan, options, **more):
        answer = REFERENCE["mla"].attention(query, cache, plan, options, **more)
        (answer[0] if more.get("return_lse") else answer).add_(0 * cache.float().sum())
        return answer

    return "mla", changed("mla", attention=attention)


def no_merge_of_an_empty_part():
    def attention(*arguments, group, out=None, return_lse=False, **more):
        answer, lse = REFERENCE["context_parallel"].attention(*arguments, group=group, return_lse=True, **more)
        saw_nothing = arguments[5].context.batch.seq_lens.sum() == 0  # this rank has no key of any context
        answer = torch.full_like(answer, torch.nan) if saw_nothing else answer
        answer = answer if out is None else out.copy_(answer)
        return (answer, lse) if return_lse else answer

    return "context_parallel", changed("context_parallel", attention=attention)


def a_plan_that_remembers_its_first_values():
    kept = {}

    def attention(query, key, value, plan, options=AttentionOptions(), **more):
        value = kept.setdefault(id(plan), (plan, value))[1]
        return REFERENCE["varlen"].attention(query, key, value, plan, options, **more)

    return "varlen", changed("varlen", attention=attention)


def an_output_that_is_written_with_what_is_around_it():
    def attention(query, cache, plan, options=AttentionOptions(), *, out=None, **more):
        if out is not None:
            torch.empty(0, dtype=out.dtype).set_(out.untyped_storage()).zero_()
        return REFERENCE["differential"].attention(query, cache, plan, options, out=out, **more)

    return "differential", changed("differential", attention=attention)


def a_tree_whose_siblings_see_one_another():
    def make_trees(parents, **options):
        chains = [list(range(-1, len(nodes) - 1)) for nodes in parents]
        return REFERENCE["speculative"].make_trees(chains, **options)

    return "speculative", changed("speculative", make_trees=make_trees)


def an_error_that_torch_raises():
    def prefill(query, *arguments, **more):
        if query.stride(-1) != 1:
            query.view(torch.uint8)
        return REFERENCE["mla"].prefill(query, *arguments, **more)

    return "mla_prefill", changed("mla", prefill=prefill)


def a_position_below_0():
    def positions(batch, num_tokens):
        return REFERENCE["metadata"].positions(batch, num_tokens).clamp(min=0)

    return "metadata", changed("metadata", positions=positions)


def an_interval_that_ends_a_key_early():
    def plan(batch, *, last_visible, **planned):
        last = torch.where(last_visible > 0, last_visible - 1, last_visible)
        return REFERENCE["interval"].plan(batch, last_visible=last, **planned)

    return "interval", changed("interval", plan=plan)


def a_first_key_that_wraps():
    def plan(batch, *, first_visible, **planned):
        return REFERENCE["interval"].plan(batch, first_visible=first_visible & LARGEST, **planned)

    return "interval", changed("interval", plan=plan)


def a_key_that_is_listed_twice_and_counts_once():
    def plan(batch, *, positions, **planned):
        once = positions.clone()
        for row in once:
            for column, j in enumerate(row.tolist()):
                row[column] = -1 if j in row[:column].tolist() else j
        return REFERENCE["sparse"].plan(batch, positions=once, **planned)

    return "sparse", changed("sparse", plan=plan)


def of_equal_scores_the_last():
    def select(scores, topk):
        s = scores.shape[1]
        mirrored = REFERENCE["sparse"].select(scores.flip(1), topk)
        turned = torch.where(mirrored >= 0, s - 1 - mirrored, s)
        selected = turned.sort(1).values
        return selected.masked_fill(selected == s, -1)

    return "sparse", changed("sparse", select=select)


def scores_of_later_keys():
    def scores(query, weights, pool, plan):
        left, right = plan.window
        return REFERENCE["sparse"].scores(query, weights, pool, replace(plan, causal=False, window_size=(left, -1)))

    return "sparse", changed("sparse", scores=scores)


def a_sum_over_index_heads_that_ends_early():
    """Of keys past some position the last heads are left out, so that of many the sum is 0."""

    def scores(query, weights, pool, plan):
        whole, few = (REFERENCE["sparse"].scores(query, x, pool, plan) for x in (weights, weights * 0))
        return torch.where(torch.arange(whole.shape[1]) < 16, whole, few)

    return "sparse", changed("sparse", scores=scores)


def an_index_scale_twice_as_large():
    def write(key, pool, slots):
        REFERENCE["sparse"].write(key * (2 if pool.dtype == torch.uint8 else 1), pool, slots)

    return "sparse", changed("sparse", write=write)


def the_state_of_a_rejected_draft():
    def plan(batch, *, num_accepted=None, **tables):
        return REFERENCE["recurrent"].plan(batch, **tables, num_accepted=None)

    return "recurrent", changed("recurrent", plan=plan)


def a_checkpoint_that_is_not_kept():
    def plan(batch, *, checkpoint_indices=None, **tables):
        if checkpoint_indices is not None:
            checkpoint_indices = checkpoint_indices.masked_fill(checkpoint_indices >= 0, -1)
        return REFERENCE["recurrent"].plan(batch, checkpoint_indices=checkpoint_indices, **tables)

    return "recurrent", changed("recurrent", plan=plan)


def a_decay_after_the_write():
    def attention(query, key, value, log_decay, beta, states, plan, options, **more):
        later = torch.cat([log_decay[1:], log_decay[:1]])
        return REFERENCE["recurrent"].attention(query, key, value, later, beta, states, plan, options, **more)

    return "recurrent", changed("recurrent", attention=attention)


def a_byte_after_the_states():
    def attention(*arguments, **more):
        out, states = REFERENCE["recurrent"].attention(*arguments, **more), arguments[5]
        states.untyped_storage()[-1] = 1
        return out

    return "recurrent", changed("recurrent", attention=attention)


def a_convolution_that_forgets_what_was_before():
    def convolve(inputs, weight, states, plan, **more):
        nothing = torch.zeros_like(plan.has_initial_state)
        return REFERENCE["recurrent"].convolve(inputs, weight, states, replace(plan, has_initial_state=nothing), **more)

    return "recurrent", changed("recurrent", convolve=convolve)


def an_input_in_a_ring_that_is_left_out():
    def attention(*arguments, **more):
        *rest, ring, plan, options = arguments
        few = replace(plan, cursors=(plan.cursors - 1).clamp(min=0))
        return REFERENCE["replay"].attention(*rest, ring, few, options, **more)

    return "replay", changed("replay", attention=attention)


def drafts_that_are_all_kept():
    def advance(cursors, plan, num_accepted=None):
        kept = None if num_accepted is None else plan.batch.query_lens.int()
        REFERENCE["replay"].advance(cursors, plan, kept)

    return "replay", changed("replay", advance=advance)


def a_snapshot_that_is_not_taken():
    def plan(batch, *, flush=None, **tables):
        return REFERENCE["replay"].plan(batch, **tables)

    return "replay", changed("replay", plan=plan)


def a_flush_of_an_empty_ring():
    def flush(states, rings, cursors, state_indices, target_indices=None):
        cursors.zero_()
        REFERENCE["replay"].flush(states, rings, cursors, state_indices, target_indices)

    return "replay", changed("replay", flush=flush)


def a_checkpoint_that_stays_in_its_slot():
    def plan(batch, *, target_indices=None, **tables):
        return REFERENCE["replay"].plan(batch, **tables)

    return "replay", changed("replay", plan=plan)


def a_flush_to_another_slot_that_empties_the_ring():
    def flush(states, rings, cursors, state_indices, target_indices=None):
        REFERENCE["replay"].flush(states, rings, cursors, state_indices, target_indices)
        cursors[state_indices[state_indices >= 0]] = 0

    return "replay", changed("replay", flush=flush)


def copies_of_states_one_after_the_other():
    def copy(pools, pairs):
        for pair in pairs.split(1):
            REFERENCE["state_cache"].copy(pools, pair)

    return "state_cache", changed("state_cache", copy=copy)


def the_slot_after_the_last_accepted_one():
    def accepted_slots(state_indices, num_accepted):
        later = torch.minimum(num_accepted + 1, torch.tensor(state_indices.shape[1])).int()
        return REFERENCE["state_cache"].accepted_slots(state_indices, torch.where(state_indices[:, 0] >= 0, later, 1))

    return "state_cache", changed("state_cache", accepted_slots=accepted_slots)


MISTAKES = [
    a_window_one_too_wide,
    a_window_near_the_largest_number_that_overflows,
    a_page_of_another_sequence,
    a_table_that_is_read_past_its_end,
    a_sink_for_each_level,
    the_scale_of_another_sequence,
    value_scales_of_int4_with_heads_before_tokens,
    a_turn_of_queries_by_twice_the_head_size,
    a_scale_of_nvfp4_that_counts_twice,
    keys_that_are_turned_alone,
    scales_of_nvfp4_that_no_write_sets,
    unseen_memory_times_0,
    no_merge_of_an_empty_part,
    a_plan_that_remembers_its_first_values,
    an_output_that_is_written_with_what_is_around_it,
    a_tree_whose_siblings_see_one_another,
    an_error_that_torch_raises,
    a_position_below_0,
    an_interval_that_ends_a_key_early,
    a_first_key_that_wraps,
    a_key_that_is_listed_twice_and_counts_once,
    of_equal_scores_the_last,
    scores_of_later_keys,
    a_sum_over_index_heads_that_ends_early,
    an_index_scale_twice_as_large,
    the_state_of_a_rejected_draft,
    a_checkpoint_that_is_not_kept,
    a_decay_after_the_write,
    a_byte_after_the_states,
    a_convolution_that_forgets_what_was_before,
    an_input_in_a_ring_that_is_left_out,
    drafts_that_are_all_kept,
    a_snapshot_that_is_not_taken,
    a_flush_of_an_empty_ring,
    a_checkpoint_that_stays_in_its_slot,
    a_flush_to_another_slot_that_empties_the_ring,
    copies_of_states_one_after_the_other,
    the_slot_after_the_last_accepted_one,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake):
    fault, _ = first_fault(*mistake())
    assert fault is not None
    if mistake is an_error_that_torch_raises:
        assert fault.kind == "raw error"


@pytest.mark.parametrize("path", ["varlen", "recurrent"])
def test_an_output_that_is_written_before_all_is_read_is_a_mistake(path):
    """It shows where the output is asked for in the memory of an input, and nowhere else."""
    of_path = REFERENCE[path].attention

    def attention(*arguments, out=None, **options):
        return of_path(*arguments, out=None if out is None else out.zero_(), **options)

    outcome, _ = first_fault(path, changed(path, attention=attention))
    assert outcome and outcome.detail.startswith("out: other bits into the memory of the ")


def test_a_mistake_is_made_small():
    path, modules = a_window_one_too_wide()
    twin = Twin(lambda name: modules.get(name, REFERENCE[name]))
    found = next(truth.work for truth in truths(path) if try_kernel(truth, twin, None).is_fault)

    def fails(work):
        outcome = try_kernel(Truth(work), twin, None)
        return outcome if outcome.is_fault else None

    smallest, outcome = shrink(found, fails, seconds=60)
    assert smallest.lens == ((1, 2),) and smallest.window[0] == 0
    assert workload_of(smallest.as_line()) == smallest
    assert outcome.kind == "wrong"


# --- what is no fault ---

LATENTS = Workload("mla", lens=((2, 9), (1, 5)), heads=(2, 1), head_size=40, value_head_size=32, softmax_scale=0.1)


def of_latents(change, name="flash_mla"):
    """Return a twin with a kernel of that name, whose answers are changed."""

    def attention(*arguments, **more):
        answer = REFERENCE["mla"].attention(*arguments, **more)
        for x in answer if isinstance(answer, tuple) else (answer,):
            change(x)
        return answer

    modules = changed("mla", attention=attention)
    return Twin(lambda path: modules.get(path, REFERENCE[path]), asking=lambda _: nullcontext([name]), **KNOWN)


KNOWN = dict(without_nan={"flash_mla": "it leaves out what is NaN"})


def no_nan(x):
    x.nan_to_num_(0.0)


def test_a_nan_that_a_kernel_is_known_to_leave_out_is_counted_by_itself():
    work = replace(LATENTS, nan_at="key", seed=3)
    outcome = try_kernel(Truth(work), of_latents(no_nan), None)
    assert outcome.kind == "exception" and outcome.detail == "it leaves out what is NaN"
    assert try_kernel(Truth(work), of_latents(no_nan, "triton"), None).kind == "wrong"
    assert try_kernel(Truth(work), of_latents(lambda x: None), None).kind == "right"


def test_nothing_else_is_excused_in_a_kernel_that_leaves_out_nan():
    work = replace(LATENTS, nan_at="key", seed=3)
    assert Truth(work).expected.out[0].isnan().any() and not Truth(work).expected.out[2].isnan().any()

    def another_row_is_off(x):
        no_nan(x)
        x[2] += 1

    def nan_elsewhere(x):
        no_nan(x)
        x[2] = torch.nan

    for change in (another_row_is_off, nan_elsewhere):
        assert try_kernel(Truth(work), of_latents(change), None).kind == "wrong"
    assert try_kernel(Truth(replace(LATENTS, seed=3)), of_latents(another_row_is_off), None).kind == "wrong"


def test_a_batch_that_does_not_say_its_rows_may_be_refused_on_a_device_and_no_other():
    def plan(batch, **planned):
        raise ValueError("alibi_slopes: expected a plan that knows its positions, got one that does not say num_tokens")

    modules = changed("chunked_prefill", plan=plan)
    twin = Twin(lambda name: modules.get(name, REFERENCE[name]))
    work = Workload("chunked_prefill", says_num_tokens=False)
    assert try_kernel(Truth(work, "meta"), twin, None).kind == "refused"
    assert try_kernel(Truth(work), twin, None).kind == "raw error"


ONE_NUMBER = dict(path="mla_prefill", head_size=40, value_head_size=32, dtype="bfloat16", stored="e4m3", workspace=1)


@pytest.mark.parametrize(
    "more",
    [
        dict(block_size=64, seed=3946, softmax_scale=0.1),
        dict(padding_rows=17, seed=2529, softmax_scale=2.0),
        dict(lens=((1, 1), (1, 1)), block_size=64, seed=2684, cache_scale=3.0, softmax_scale=0.1),
    ],
    ids=["one-number", "one-number-and-padding", "two-numbers"],
)
def test_a_number_by_which_the_formula_is_right_by_chance_is_no_measure(more):
    """Found on a GPU: a key is rounded, and the LSE of one key with it; the formula's errors happen to cancel."""
    work = Workload(**{**ONE_NUMBER, **more})
    assert try_kernel(Truth(work), command.twin([None]), None).kind == "right"

    def prefill(*arguments, **more):
        answer = REFERENCE["mla"].prefill(*arguments, **more)
        return (answer[0], answer[1] + 0.5) if more.get("return_lse") else answer

    modules = changed("mla", prefill=prefill)
    assert try_kernel(Truth(work), Twin(lambda name: modules.get(name, REFERENCE[name])), None).kind == "wrong"


def test_float32_may_be_added_up_in_any_order_and_not_in_fewer_bits():
    """Found on a GPU: 576 products in one accumulator, by whose error times a score of 30 a weight is off."""
    work = Workload("mla", ((2, 61),), (1, 1), 576, 512, 1, seed=31, stored="e5m2", cache_scale=3.0, softmax_scale=0.1)
    right = REFERENCE["mla"].attention

    def one_by_one(*arguments, **more):
        with OneAccumulator():
            return right(*arguments, **more)

    def in_tf32(query, *arguments, **more):
        return right((query.view(torch.int32) & ~0x1FFF).view(torch.float32), *arguments, **more)

    for attention, kind in ((one_by_one, "right"), (in_tf32, "wrong")):
        modules = changed("mla", attention=attention)
        assert try_kernel(Truth(work), Twin(lambda name, m=modules: m.get(name, REFERENCE[name])), None).kind == kind


# --- the fast twin, and the generator ---


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_found_in_the_fast_twin(path):
    search = Search(path, command.twin([None]), seed=5, longest=40)
    for _ in search.run(workloads=8):
        pass
    assert not search.findings
    assert sum(search.calls.values()) == 8


def test_a_workload_follows_from_its_number_and_survives_its_line():
    for path in PATHS:
        work = workload(3, path, 41, ("float16",))
        assert work == workload(3, path, 41, ("float16",))
        assert workload_of(work.as_line()) == work


def test_everything_that_a_workload_can_say_is_drawn():
    drawn = [draw(Random(n), path, draw_palette(Random(n), path)) for path in PATHS for n in range(150)]
    for field in fields(Workload):
        values = {getattr(work, field.name) for work in drawn}
        assert len(values) > 1, f"{field.name} is always {values}"
    assert {work.window[0] for work in drawn} >= {LARGEST, 0, -1}
    assert any(q > s for work in drawn for q, s in work.lens)
    assert any(work.has_trees and work.nodes(i) > 128 for work in drawn for i in range(len(work.lens)))


@pytest.mark.parametrize("path", PATHS)
def test_what_a_kernel_is_compiled_for_stays_and_all_else_is_drawn_anew(path):
    drawn = [workload(7, path, index, serves=100) for index in range(100)]

    def compiled(work):
        window = (work.window[0] < 0, work.window[1] < 0) if work.plan_path == "sliding_window" else ()
        return work.sizes.rsplit(" ", 1)[0], work.block_size, work.heads, work.plan_of, bool(work.softcap), window

    assert len({compiled(work) for work in drawn}) == 1
    assert len({(work.pool, work.rows, work.table, work.out) for work in drawn}) <= 16
    assert len({work.lens for work in drawn}) > 60 and len({work.seed for work in drawn}) > 90
    assert {workload(7, path, 100 * number, serves=100).dtype for number in range(3)} == set(DTYPES)


@pytest.mark.parametrize("path", PATHS)
def test_no_length_is_below_0(path):
    for index in range(100):
        work = workload(11, path, index)
        for candidate in (work, *(smaller(work) if index % 20 == 0 else ())):
            assert all(q >= 0 and s >= 0 for q, s in normalized(candidate).lens), candidate.as_line()


@pytest.mark.parametrize("line", ["{", "[]", '{"path": "nowhere"}', '{"path": "varlen", "length": 3}'])
def test_a_line_that_is_no_workload_is_refused(line, capsys):
    assert command.main(["--replay", line]) == 2
    assert "replay: expected" in capsys.readouterr().err


def test_the_command_tries_and_counts_and_writes_and_its_processes_need_no_typer(tmp_path, capsys, monkeypatch):
    (tmp_path / "typer.py").write_text(
        "raise ImportError('a machine with a GPU may have PyTorch and rich, and no more')"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    )
    results = tmp_path / "results.json"
    asked = ["--paths", "merge", "metadata", "--workloads", "4", "--seed", "1", "--jobs", "2", "--kernels", "default"]
    assert command.main([*asked, "--results", str(results)]) == 0
    found = json.loads(results.read_text())
    assert [path["path"] for path in found["paths"]] == ["merge", "metadata"]
    assert [sum(sum(kinds.values()) for kinds in path["calls"].values()) for path in found["paths"]] == [4, 4]
    assert found["seed"] == 1 and found["versions"]["torch"] == torch.__version__
    assert "merge" in capsys.readouterr().out


def test_our_triton_kernels_are_searched_without_a_gpu_where_the_interpreter_runs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.kernels_to_try("cpu", ()) == [None, "cpu", "triton"]
    search = Search("merge", command.twin([None, "triton"]), seed=2, longest=40)
    for _ in search.run(workloads=8):
        pass
    assert {"default", "triton"} == {asked for asked, _, _ in search.calls} and not search.findings
    monkeypatch.delenv("TRITON_INTERPRET")
    assert command.kernels_to_try("cpu", ()) == [None, "cpu"]
    assert {"cpu", "native"}.isdisjoint(command.kernels_to_try("cuda", ()))


def test_a_process_that_ends_is_a_finding(tmp_path):
    task = dict(path="merge", kernels=["no such kernel"], seed=1, device="cpu", dtypes=["float32"], longest=20)
    process = command._Process({**task, "seconds": 20.0, "workloads": 2, "threads": 1, "first": 0}, tmp_path)
    process.process.wait()
    while not process.is_over:
        process.look()
        process.process.wait()
    assert {finding["kind"] for finding in process.findings} <= {"raw error", "crash"}
    assert process.findings


def test_a_kernel_that_ended_a_process_is_not_asked_for_such_sizes_again(tmp_path, monkeypatch):
    """A process in the place of the search's, which ends at once, and in the third run finds nothing."""
    tasks = []

    class Ending:
        def __init__(self, command, **more):
            tasks.append(json.loads(command[-1]))
            self.ends_well = len(tasks) == 3
            with open(command[-2], "a") as log:
                for sizes in ("16/64 float16 numbers", "16/16 float16 numbers") if not self.ends_well else ():
                    log.write(json.dumps(dict(call="{}", kernel="fa4", sizes=sizes)) + "\n")
                log.write(json.dumps(dict(counts={}) if self.ends_well else dict(crashed="illegal access 7")) + "\n")

        def poll(self):
            return 0 if self.ends_well else command.CANNOT_GO_ON

    monkeypatch.setattr(command.subprocess, "Popen", Ending)
    task = dict(path="varlen", kernels=["fa4"], seed=1, device="cpu", dtypes=["float32"], longest=20)
    process = command._Process({**task, "seconds": 20.0, "workloads": None, "threads": 1, "first": 0}, tmp_path)
    while not process.is_over:
        process.look()
    assert [task["skipped"] for task in tasks[:2]] == [[], [["fa4", f"16/{n} float16 numbers"] for n in (64, 16)]]
    assert [task["first"] for task in tasks] == [0, 1, 2]
    assert len(process.findings) == 1 and set(process.faults.values()) == {2}
    assert process.as_dict()["skipped"][0] == dict(kernel="fa4", sizes="16/64 float16 numbers")


def test_a_search_leaves_out_what_it_is_told_to():
    sizes = {workload(5, "merge", index, serves=3).sizes for index in range(3)}
    search = Search("merge", command.twin([None]), seed=5, skipped=[(None, one) for one in sizes])
    assert list(search.run(workloads=3)) == [0, 1, 2] and not search.calls


def found(path, *findings):
    calls = dict(default=dict(right=3))
    listed = [dict(kernel=k, kind="wrong", detail=detail, line=line) for k, detail, line in findings]
    return dict(path=path, calls=calls, refused={}, exceptions={}, skipped=[], roundings=[], findings=listed)


def test_what_is_found_is_printed_once_for_each_message_before_the_table(capsys):
    paths = [
        found("varlen", (None, "out: NaN at [1, 2]", "a longer line"), ("fa4", "out: NaN at [0, 1]", "line")),
        found("mla", (None, "out: NaN at [7]", "the longest line"), (None, "lse: NaN at [7]", "another")),
    ]
    command._show(Console(width=200), paths)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "wrong, varlen by default, fa4; mla by default: out: NaN at [0, 1]",
        "    twinattn search --kernels fa4 --replay 'line'",
    ]
    assert said[4] == "FOUND 2 kinds of faults in 4 calls"
    assert not any("found nothing" in line for line in said)


def test_that_nothing_is_found_is_said(capsys):
    command._show(Console(width=200), [found("varlen")])
    assert capsys.readouterr().out.startswith("found nothing\n")
