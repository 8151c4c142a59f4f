"""States that are rebuilt from a checkpoint and a ring of inputs: the plain step, however it is cut.

The reference and plain torch rebuild a state by the operations of the step, and have its bits. Triton's decodes read a
checkpoint and, beside it, the ring, in another order of sums, and have them where the ring has room for one input; what
they keep of a state, they fold by the step, too.
"""

import inspect
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastattn.replay
import refattn.replay
from fastattn.kernels.order import use_kernel
from fastattn.kernels.replay import memo_of
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring
from refattn.states import StatePlan
from tests.helpers.bad_input import MOST
from tests.helpers.rings import Slots
from tests.helpers.states import (
    DEVICE,
    KERNELS,
    attend,
    draw,
    draw_states,
    each_computer,
    each_kernel,
    ints,
    lengths,
    moved,
)
from tests.helpers.steps import record
from tests.helpers.stored import bits
from twinattn.kit import assert_close
from twinattn.kit.tolerance import WIDER

each_twin = pytest.mark.parametrize("twin", [refattn.replay, fastattn.replay], ids=["ref", "fast"])
LAYERS = {  # of the family: whether each key channel has a decay, and the options
    "gdn": (False, RecurrentOptions()),
    "kda": (True, RecurrentOptions(-0.7)),
    "mamba2": (False, RecurrentOptions(1.0, delta=False)),
}
each_rebuild = pytest.mark.parametrize("kernel", ["reference", *(name for name in KERNELS if name != "triton")])
each_layer = pytest.mark.parametrize(("per_channel", "options"), LAYERS.values(), ids=LAYERS)


def plainly(kernel, step, lens, contexts, slots, states, options=RecurrentOptions(), **tables):
    """Return the outputs of `recurrent.attention`, which writes the state of every step into the pool."""
    return attend(kernel, step, states, lengths(lens, contexts), options, state_indices=ints(slots), **tables)


def same(kernel, one, other):
    """Return whether two results are one: bit for bit, except where a kernel reads beside a checkpoint."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6) if kernel == "triton" else torch.equal(one, other)


# --- the plain step ---


@pytest.mark.covers("R214")
@each_computer
@each_layer
def test_with_room_for_one_input_it_is_the_plain_step_bit_for_bit(kernel, per_channel, options):
    """Outputs and checkpoints, in states of 32 and of 16 bits: each step moves the checkpoint, and pushes nothing."""
    for dtype in (torch.float32, torch.bfloat16):
        step = draw(12, h=1, hv=2, per_channel=per_channel)
        slots = Slots.like(kernel, step, 4, 1, dtype=dtype)
        states = slots.states.clone()
        for first in range(0, 12, 2):
            rows, contexts = step.rows(slice(first, first + 2)), (first // 2, first // 2)
            out = slots.step(rows, (1, 1), contexts, [3, 1], options)
            assert torch.equal(out, plainly(kernel, rows, (1, 1), contexts, [3, 1], states, options))
            assert torch.equal(bits(slots.states), bits(states))
        assert slots.cursors.tolist() == [77, 0, 77, 0] and all(field.isnan().all() for field in slots.ring)


@pytest.mark.core
@pytest.mark.covers("R214")
@each_rebuild
@each_layer
@pytest.mark.parametrize("ring_size", [2, 3, 5, 16])
def test_a_rebuilt_state_has_the_bits_of_the_one_that_was_never_taken_apart(kernel, per_channel, options, ring_size):
    """The fold is the step: an open-loop fold, right within a tolerance, made long answers loop (SGLang 28695)."""
    step = draw(22, h=1, hv=2, per_channel=per_channel)
    slots, states = Slots.like(kernel, step, 3, ring_size), draw_states(3, 2)
    for first in range(0, 22, 2):
        rows, contexts = step.rows(slice(first, first + 2)), (first // 2, first // 2)
        out = slots.step(rows, (1, 1), contexts, [2, 0], options)
        assert torch.equal(out, plainly(kernel, rows, (1, 1), contexts, [2, 0], states, options)), first
    slots.flush(0, -1, 2)
    assert torch.equal(slots.states[[0, 2]], states[[0, 2]]) and slots.states[1].isnan().all()
    assert slots.cursors.tolist() == [0, 77, 0]


@pytest.mark.covers("R214")
@each_computer
@each_layer
@pytest.mark.parametrize("ring_size", [2, 5, 16])
def test_a_checkpoint_has_the_same_bits_whenever_it_moves(kernel, per_channel, options, ring_size):
    """At the end of a step, or by a flush after it, when what the step wrote was in the ring."""
    step = draw(2 * ring_size, h=1, hv=2, per_channel=per_channel)
    slots = Slots.like(kernel, step, 3, ring_size)
    for slot, state in zip((2, 0), draw_states(2, 2), strict=True):
        slots.begin(slot, state)
    for token in range(ring_size - 1):
        rows, before = step.rows(slice(2 * token, 2 * token + 2)), slots.copy()
        contexts = (token + 3, token + 7)
        before.step(rows, (1, 1), contexts, [2, 0], options, flush=torch.tensor([True, True]))
        slots.step(rows, (1, 1), contexts, [2, 0], options)
        assert int(slots.cursors[0]) == token + 1
        later = slots.copy()
        later.flush(0, 2)
        assert torch.equal(later.states[[0, 2]], before.states[[0, 2]]), token


@each_kernel
@each_layer
def test_a_long_answer_is_as_exact_as_by_plain_steps(kernel, per_channel, options):
    """Errors of what is read beside a checkpoint do not add up over its moves (SGLang 28695: answers that looped)."""
    step = draw(120, h=1, hv=2, per_channel=per_channel)
    wide, low = step.to(torch.float64), torch.full((2, 2, 6, 8), torch.nan)
    exact, slots = low.double(), Slots.like(kernel, step, 2, 7)
    expected = plainly("reference", wide, [120], [0], [1], exact, options)
    rounded = plainly("reference", step, [120], [0], [1], low, options)
    outs = [slots.step(step.rows(slice(i, i + 1)), [1], [i], [1], options) for i in range(120)]
    slots.flush(1)
    assert_close(torch.cat(outs), expected, rounded)
    assert_close(slots.states[1], exact[1], low[1], name="states")


def in_steps(kernel, step, ring_size, ends, flushed=(), options=RecurrentOptions()):
    """Return the outputs of a sequence that is cut into steps, some of which flush, and the state after it."""
    slots, outs = Slots.like(kernel, step, 2, ring_size), []
    total = len(step.query)
    for first, end in zip((0, *ends), (*ends, total), strict=True):
        flush = torch.tensor([end in flushed])
        outs.append(slots.step(step.rows(slice(first, end)), [end - first], [first], [1], options, flush=flush))
    slots.flush(1)
    return torch.cat(outs), slots.states[1]


def test_whole_chunked_and_stepped_have_the_same_bits_for_any_flush_times():
    step, states = draw(11), torch.full((2, 4, 6, 8), torch.nan)
    expected = plainly("reference", step, [11], [0], [1], states), states[1]
    for ring_size in (1, 2, 4, 32):
        for ends in ((), (1, 2, 7), tuple(range(1, 11))):
            for flushed in ((), (2, 3), (7,), range(12)):
                found = in_steps("reference", step, ring_size, ends, flushed)
                assert all(map(torch.equal, expected, found)), (ring_size, ends, flushed)


@each_kernel
@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 8), unique=True), st.sets(st.integers(1, 9)), st.integers(1, 6), st.booleans())
def test_whole_chunked_and_stepped_agree_for_any_flush_times(kernel, ends, flushed, ring_size, per_channel):
    step = draw(9, h=1, hv=2, dk=5, dv=3, per_channel=per_channel)
    wide, states = draw(9, h=1, hv=2, dk=5, dv=3, per_channel=per_channel).to(torch.float64), torch.zeros(2, 2, 3, 5)
    reference, low = states.double(), states.clone()
    expected = plainly("reference", wide, [9], [0], [1], reference)
    rounded = plainly("reference", step, [9], [0], [1], low)
    out, state = in_steps(kernel, step, ring_size, sorted(ends), flushed)
    assert_close(out, expected, rounded)
    assert_close(state, reference[1], low[1], name="states")


# --- when the checkpoint moves ---


@pytest.mark.core
@pytest.mark.covers("R215")
@each_computer
def test_a_snapshot_holds_exactly_the_tokens_up_to_its_step(kernel):
    """A step that flushes ends with the plain state after the same tokens; before it the checkpoint lags behind.

    SGLang 28511 set the cursor instead of flushing, and read rows of the ring that nothing had written.
    """
    step, states = draw(8), draw_states(2)
    slots = Slots.like(kernel, step, 2, 6)
    for token in range(8):
        row, is_last = step.rows(slice(token, token + 1)), token == 4
        slots.step(row, [1], [token], [1], flush=torch.tensor([is_last]))
        plainly(kernel, row, [1], [token], [1], states)
        assert same(kernel, slots.states[1], states[1]) == (token in (0, 4)), token
        assert int(slots.cursors[1]) == (0, 1, 2, 3, 0, 1, 2, 3)[token]
    snapshot = slots.copy()
    slots.flush(1)
    assert same(kernel, slots.states[1], states[1])
    assert all(map(torch.equal, map(bits, slots.ring), map(bits, snapshot.ring))), "a flush only reads the ring"


@pytest.mark.core
@pytest.mark.covers("R215")
@each_computer
def test_a_full_ring_moves_the_checkpoint_and_a_step_before_writes_the_ring_alone(kernel):
    step = draw(9)
    slots = Slots.like(kernel, step, 3, 3)
    moves, cursors = [], []
    for token in range(9):
        before = slots.copy()
        slots.step(step.rows(slice(token, token + 1)), [1], [token], [1])
        moves.append(not torch.equal(bits(slots.states), bits(before.states)))
        cursors.append(int(slots.cursors[1]))
        changed = [not torch.equal(bits(x), bits(y)) for x, y in zip(slots.ring, before.ring, strict=True)]
        assert changed == [not moves[-1]] * 3, "a step writes the checkpoint, or the ring"
        others = (x[[0, 2]] for x in (slots.states, *slots.ring))
        assert all(x.isnan().all() for x in others), "the slot of another was written"
    assert moves == [True, False, False, True, False, False, True, False, False]
    assert cursors == [0, 1, 2, 0, 1, 2, 0, 1, 2]


@pytest.mark.covers("R215")
@each_computer
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
def test_a_slot_that_is_taken_over_begins_with_zeros_and_an_empty_ring(kernel, drafts):
    """Whatever its checkpoint, its ring and its cursor hold; and the next step begins from its own checkpoint."""
    step, states = draw(4), torch.full((2, 4, 6, 8), torch.nan)
    slots = Slots.like(kernel, step, 2, 8)
    slots.cursors[1] = 5
    for first, end in ((0, 2), (2, 3), (3, 4)):
        rows, accepted = step.rows(slice(first, end)), [end - first] if drafts else None
        out = slots.step(rows, [end - first], [first], [1], accepted=accepted)
        assert same(kernel, out, plainly(kernel, rows, [end - first], [first], [1], states)), first
    assert int(slots.cursors[1]) == (4 if drafts else 2)


@pytest.mark.covers("R218")
@each_computer
@each_layer
@pytest.mark.parametrize("drafts", [0, 1, pytest.param(3, marks=pytest.mark.core)], ids=["tokens", "a draft", "drafts"])
def test_a_checkpoint_moves_to_another_slot_and_what_was_read_is_left(kernel, per_channel, options, drafts):
    """The step can be computed again from the slot that it has read, though it was computed to its end.

    Its sequence goes on in the other slot as it would have gone on in its own.
    """
    lens = [max(drafts, 1)] * 2
    step = draw(10 * sum(lens), h=1, hv=2, per_channel=per_channel)
    slots = Slots.like(kernel, step, 4, 4, poison=0.0)
    slots.cursors.zero_()
    in_place, here, moves = slots.copy(), [2, 0], 0
    for number in range(10):
        rows = step.rows(slice(number * sum(lens), (number + 1) * sum(lens)))
        contexts, accepted = [number, number], [lens[0], lens[0] // 2] if drafts else None
        flush = {} if drafts else dict(flush=torch.tensor([number == 5, False]))
        there = [slot ^ 1 for slot in here]
        expected = in_place.step(rows, lens, contexts, [2, 0], options, accepted, **flush)
        before = slots.copy()
        for _ in range(2):
            read = [(before.states[s], *(x[s, : int(before.cursors[s])] for x in before.ring)) for s in here]
            slots.cursors[here] = before.cursors[here]
            out = slots.step(rows, lens, contexts, here, options, accepted, target_indices=ints(there), **flush)
            assert torch.equal(out, expected)
            left = [(slots.states[s], *(x[s, : int(before.cursors[s])] for x in slots.ring)) for s in here]
            assert all(map(torch.equal, map(bits, chain(*read)), map(bits, chain(*left))))
        full = [number == 0 or int(before.cursors[s]) + lens[0] > 4 - (not drafts) for s in here]
        has_moved = [full[0] or (number == 5 and not drafts), full[1]]
        here = [t if moved else s for s, t, moved in zip(here, there, has_moved, strict=True)]
        moves += sum(has_moved)
        assert torch.equal(slots.cursors[here], in_place.cursors[[2, 0]]), number
        assert torch.equal(slots.states[here], in_place.states[[2, 0]]), number
    assert moves >= 4


@pytest.mark.core
@pytest.mark.covers("R218")
@each_computer
def test_a_flush_to_another_slot_is_a_state_after_as_many_inputs_as_asked(kernel):
    """A snapshot in the middle of a ring: its sequence keeps its checkpoint, its ring and its cursor."""
    step, states = draw(5), draw_states(4)
    slots = Slots.like(kernel, step, 4, 8)
    slots.begin(1, states[1])
    for token in range(5):
        slots.step(step.rows(slice(token, token + 1)), [1], [token + 1], [1])
        if token == 2:
            after_three = slots.copy()
    plainly(kernel, step.rows(slice(0, 3)), [3], [1], [1], states)
    before = slots.copy()
    slots.cursors[1] = 3
    slots.flush(1, -1, to=(3, 77))
    assert int(slots.cursors[3]) == 0 and int(slots.cursors[1]) == 3
    assert torch.equal(bits(slots.states[1]), bits(before.states[1]))
    assert all(map(torch.equal, map(bits, slots.ring), map(bits, before.ring))), "a flush only reads the ring"
    assert same(kernel, slots.states[3], states[1])
    after_three.flush(1)
    assert torch.equal(slots.states[3], after_three.states[1])


# --- drafts ---


@pytest.mark.covers("R216")
@each_computer
@each_layer
@pytest.mark.parametrize("ring_size", [3, pytest.param(4, marks=pytest.mark.core), 7])
def test_drafts_push_all_and_accept_by_moving_the_cursor(kernel, per_channel, options, ring_size):
    """As if the rejected drafts had never been: outputs of the next step, and the checkpoint, bit for bit.

    Of two sequences each verifies three tokens in a step; the second accepts other numbers of them.
    """
    step = draw(30, h=1, hv=2, per_channel=per_channel)
    slots, states = Slots.like(kernel, step, 4, ring_size), draw_states(4, 2)
    for slot in (3, 1):
        slots.begin(slot, states[slot])
    contexts = [4, 9]
    for number, accepted in enumerate(([1, 3], [3, 2], [2, 0], [3, 3], [1, 1])):
        rows = step.rows(slice(6 * number, 6 * number + 6))
        out = slots.step(rows, (3, 3), contexts, [3, 1], options, accepted)
        verified = plainly(kernel, rows, (3, 3), contexts, [3, 1], states.clone(), options)
        assert torch.equal(out, verified), number
        tokens = torch.tensor([*range(accepted[0]), *range(3, 3 + accepted[1])])
        plainly(kernel, rows.rows(tokens), accepted, contexts, [3, 1], states, options)
        contexts = [context + kept for context, kept in zip(contexts, accepted, strict=True)]
    slots.flush(3, 1)
    assert torch.equal(slots.states[[3, 1]], states[[3, 1]]), "a rejected draft has left a trace"


@pytest.mark.core
@pytest.mark.covers("R216")
@each_computer
def test_a_rejected_draft_is_never_read_again(kernel):
    """Rows past the cursor hold NaN before the next step, as in memory that nobody owns."""
    step = draw(5)
    clean = Slots.like(kernel, step, 1, 4)
    clean.begin(0, draw_states(1)[0])
    clean.step(step.rows(slice(0, 3)), [3], [6], [0], accepted=[1])
    spoilt = clean.copy()
    for field in spoilt.ring:
        assert not field[0, 1:3].isnan().any(), "the drafts were not pushed"
        field[0, 1:] = torch.nan
    for first in (3, 4):
        outs = [x.step(step.rows(slice(first, first + 1)), [1], [first + 4], [0]) for x in (clean, spoilt)]
        assert torch.equal(*outs) and outs[0].isfinite().all()
    for slots in (clean, spoilt):
        slots.flush(0)
    assert torch.equal(clean.states, spoilt.states)


# --- memory that no sequence may see ---


def poisoned(kernel, poison, drafts):
    """Return the outputs and the slots of a step in which all that may not be read holds poison."""
    step = draw(11, h=1, hv=2)
    padding = [3, 4, 9, 10]  # sequence 1 is padding, and two rows after the last one
    for x in step:
        x[padding] = poison
    slots = Slots.like(kernel, step, 7, 6, poison=poison)
    states, rows = draw_states(7, 2), draw(7 * 6, h=1, hv=2, seed=5)
    for slot, cursor in ((5, 2), (2, 3), (0, 6)):
        slots.begin(slot, states[slot])
        slots.cursors[slot] = cursor
        inputs = (rows.key, rows.value, rows.log_decay)
        for field, x in zip(slots.ring, inputs, strict=True):
            field[slot, :cursor] = x.view(7, 6, *x.shape[1:])[slot, :cursor]
    lens, contexts = (3, 2, 0, 2, 1, 1), (5, 7, 9, 8, 4, 0)
    accepted = [2, 99, -99, 1, 1, 1] if drafts else None
    out = slots.step(step, lens, contexts, [5, -1, 2, 2, 0, 6], accepted=accepted)  # the idle one names another's slot
    return out, slots


@pytest.mark.core
@pytest.mark.covers("R217")
@each_computer
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
def test_memory_that_nobody_owns_changes_no_bit(kernel, drafts):
    """Rings past their cursors, rings of sequences that begin, free slots, and padding, in rows and in sequences."""
    clean, spoilt = poisoned(kernel, 0.5, drafts), poisoned(kernel, torch.nan, drafts)
    used = [0, 2, 5, 6]
    for out, slots in (spoilt, poisoned(kernel, 1e4, drafts)):
        assert torch.equal(out, clean[0])
        assert torch.equal(slots.states[used], clean[1].states[used])
        assert torch.equal(slots.cursors, clean[1].cursors)
    out, slots = spoilt
    assert out.isfinite().all() and not out[[3, 4, 9, 10]].any()
    assert slots.cursors.tolist() == ([1, 77, 4, 77, 77, 4, 1] if drafts else [0, 77, 5, 77, 77, 5, 0])
    free = [1, 3, 4]
    assert all(x[free].isnan().all() for x in (slots.states, *slots.ring)), "a free slot was written"
    assert slots.states[used].isfinite().all()
    for slot in (2, 5, 6):
        held = int(slots.cursors[slot]) + (drafts and {5: 1, 2: 1}.get(slot, 0))  # rejected drafts, too
        assert all(field[slot, held:].isnan().all() for field in slots.ring if held), "past the cursor was written"


@pytest.mark.core
@pytest.mark.covers("R217")
@each_computer
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
def test_entries_of_a_sequence_without_tokens_may_be_anything(kernel, drafts):
    """No slot of an idle sequence is followed, and no cursor behind it."""
    step, found = draw(2), []
    for entry in (-1, MOST, -MOST - 1, 0, 2):
        slots = Slots.like(kernel, step, 3, 4)
        slots.begin(0, draw_states(3)[0])
        accepted = [entry, 1, entry, 1] if drafts else None
        flush = dict(flush=torch.tensor([True, False, True, False])) if not drafts else {}
        out = slots.step(step, (0, 1, 0, 1), (9, 3, 0, 0), [entry, 0, entry, 2], accepted=accepted, **flush)
        found.append((out, slots.states[[0, 2]], slots.cursors))
        assert slots.states[1].isnan().all()
    for answers in found[1:]:
        assert all(map(torch.equal, found[0], answers))


@pytest.mark.core
@pytest.mark.covers("R217")
@each_computer
def test_slot_0_is_a_slot_and_a_negative_one_is_padding_alone(kernel):
    step, states = draw(2), draw_states(2)
    slots = Slots.like(kernel, step, 2, 3)
    slots.begin(0, states[0])
    slots.begin(1, states[1])
    out = slots.step(step, (1, 1), (5, 5), [-1, 0])
    assert not out[0].any() and out[1].any() and slots.cursors.tolist() == [1, 0]
    assert torch.equal(slots.states, states) and slots.ring.key[1].isnan().all()


@pytest.mark.parametrize("kernel", ["reference"])
def test_other_requests_change_no_bit(kernel):
    step, contexts = draw(12), [5, 0]
    together = Slots.like(kernel, step, 2, 4)
    together.begin(0, draw_states(2)[0])
    alone = together.copy()
    for first in range(0, 12, 2):
        rows = step.rows(slice(first, first + 2))
        out = together.step(rows, (1, 1), contexts, [0, 1])
        assert torch.equal(out[:1], alone.step(rows.rows(slice(0, 1)), [1], contexts[:1], [0]))
        contexts = [context + 1 for context in contexts]
    assert torch.equal(together.states[0], alone.states[0])


@each_computer
def test_a_step_of_fixed_size_replays_with_other_cursors_and_slots(kernel):
    """One captured graph serves every cursor: it is read where it is, and moved by the last launch of the step."""
    step, states = draw(3), draw_states(4)
    slots = Slots.like(kernel, step, 4, 3)
    for slot in range(4):
        slots.begin(slot, states[slot])
    expected = slots.copy()
    device = "cpu" if kernel == "reference" else DEVICE
    table, has_state = ints([0, 1, 2]).to(device), torch.ones(3, dtype=torch.bool, device=device)
    pool, cursors = slots.states.to(device), slots.cursors.to(device)
    ring, tokens = Ring(*(x.to(device) for x in slots.ring)), step.to(device)
    batch = moved(lengths((1, 1, 1), (4, 4, 4)), device)
    tables = dict(state_indices=table, has_initial_state=has_state, cursors=cursors, ring_size=3)
    plan = slots.path.plan(batch, **tables)

    def compute():
        with nullcontext() if kernel == "reference" else use_kernel(kernel):
            out = slots.path.attention(*tokens, pool, ring, plan)
            slots.path.advance(cursors, plan)
            return out

    replayed = record(compute, device)
    for mine, before in zip((pool, *ring, cursors), (expected.states, *expected.ring, expected.cursors), strict=True):
        mine.copy_(before)
    for indices, begins in (((3, 0, -1), 9), ((3, -1, 2), 9), ((0, 3, 1), 9), ((3, 2, 0), 1), ((2, 3, -1), 9)):
        table.copy_(ints(indices))
        has_state.copy_(torch.arange(3) != begins)
        out = replayed().cpu()
        is_known = torch.arange(3) != begins
        assert torch.equal(out, expected.step(step, (1, 1, 1), (4, 4, 4), indices, has_initial_state=is_known))
        now = (pool, *ring, cursors)
        for mine, theirs in zip(now, (expected.states, *expected.ring, expected.cursors), strict=True):
            assert torch.equal(bits(mine.cpu()), bits(theirs))


# --- the twin ---


@pytest.mark.skipif("triton" not in KERNELS, reason="launches are of Triton")
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
def test_layers_share_a_plan_and_what_it_has_launched(drafts):
    """What the first layer launched, the next one replays with its own tensors, and its bits are those without."""
    batch, cursors = moved(lengths((2, 1), (4, 4)), DEVICE), ints([2, 3]).to(DEVICE)
    tables = dict(state_indices=ints([1, 0]).to(DEVICE), cursors=cursors, ring_size=3, drafts=drafts)
    plan = fastattn.replay.plan(batch, **tables)
    for layer in range(3):
        step, pool = draw(3, seed=layer).to(DEVICE), draw_states(2, seed=layer).to(DEVICE)
        inputs, found = draw(6, seed=9 + layer), []
        for own in (plan, replace(plan)):  # and by a plan that has no memo
            ring = fastattn.replay.allocate(2, 3, 2, 4, 6, 8, device=DEVICE)
            for field, x in zip(ring, (inputs.key, inputs.value, inputs.log_decay), strict=True):
                field.copy_(x.view(field.shape))
            states = pool.clone()
            with use_kernel("triton"):
                found.append((fastattn.replay.attention(*step, states, ring, own), states, *ring))
        assert all(map(torch.equal, *found)), layer
        assert len(memo_of(plan).launches) == 1


@pytest.mark.core
@pytest.mark.covers("R214")
@each_kernel
@each_layer
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_twins_agree(kernel, per_channel, options, drafts, dtype):
    """Over steps of several sequences, with every kind of gate; outputs and, in the end, the states."""
    step = draw(40, h=1, hv=2, dk=5, dv=3, per_channel=per_channel, dtype=dtype)
    results = []
    for name, tokens in ((kernel, step), ("reference", step.to(WIDER[dtype])), ("reference", step)):
        slots, contexts, outs = Slots.like(name, tokens, 3, 5), [2, 0, 7], []
        for slot, state in zip((2, 0, 1), draw_states(3, 2, 3, 5), strict=True):
            slots.begin(slot, state)
        for first, lens in ((0, (2, 5, 1)), (8, (1, 1, 0)), (10, (3, 2, 3)), (18, (1, 1, 1)), (21, (4, 0, 4))):
            accepted = [min(length, 2) for length in lens] if drafts else None
            rows = tokens.rows(slice(first, first + sum(lens)))
            outs.append(slots.step(rows, lens, contexts, [2, 0, 1], options, accepted))
            contexts = [context + kept for context, kept in zip(contexts, accepted or lens, strict=True)]
        slots.flush(0, 1, 2)
        results.append((torch.cat(outs), slots.states))
    (out, states), (expected, expected_states), (low, low_states) = results
    assert out.dtype == dtype
    assert_close(out, expected, low)
    assert_close(states, expected_states, low_states, name="states")


@pytest.mark.core
@pytest.mark.covers("R215")
@each_computer
def test_rings_of_16_bits_are_folded_in_float32(kernel):
    """What a ring rounded when it was pushed is widened first: the fold rounds nothing else."""
    torch.manual_seed(0)
    states = torch.randn(2, 2, 3, 5)
    fields = torch.randn(2, 6, 1, 5), torch.randn(2, 6, 2, 3), -torch.rand(2, 6, 2)
    ring = Ring(*(x.half() for x in fields))
    slots = Slots(kernel, states.clone(), ring, torch.tensor([6, 4], dtype=torch.int32))
    slots.flush(0, 1)
    for slot, cursor in ((0, 6), (1, 4)):
        state = states[slot].double()
        for at in range(cursor):
            key, written, log_decay = (field[slot, at].double() for field in ring)
            state = state * log_decay.exp()[:, None, None] + written[..., None] * key
        torch.testing.assert_close(slots.states[slot].double(), state, rtol=1e-5, atol=1e-5)


@each_kernel
def test_tensors_may_have_any_strides(kernel):
    """Slots last in memory, every second input of a ring, keys before values in a checkpoint."""
    step, found = draw(8, h=2, hv=4, per_channel=True), []
    for is_odd in (False, True):
        slots = Slots.like(kernel, step, 2, 3)
        if is_odd:
            strided = (x.repeat_interleave(2, 1)[:, ::2].transpose(0, -1).clone().transpose(0, -1) for x in slots.ring)
            slots.ring = Ring(*strided)
            slots.states = slots.states.mT.contiguous().mT
            step = type(step)(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in step))
        outs = [slots.step(step.rows(slice(i, i + 1)), [1], [i], [1]) for i in range(8)]
        found.append((torch.cat(outs), slots.states[1]))
    assert all(same(kernel, *pair) for pair in zip(*found, strict=True))


@each_computer
def test_outputs_may_be_written_over_inputs(kernel):
    step = draw(3, hv=2, dv=8)
    outs = []
    for over in (False, True):
        slots = Slots.like(kernel, step, 1, 8)
        outs.append(slots.step(step._replace(value=step.value.clone()), [3], [0], [0], is_over=over))
    assert torch.equal(*outs)


def test_the_paths_are_called_alike_and_plan_alike():
    batch, slots = lengths((2, 1, 0), (0, 4, 2)), ints([2, 0, 1])
    for package in (refattn.replay, fastattn.replay):
        plan = package.plan(batch, state_indices=slots, cursors=ints([1, 0, 9]), ring_size=4)
        assert plan.slots.has_initial_state.tolist() == [False, True, True] and not plan.drafts and plan.flush is None
        names = list(inspect.signature(package.attention).parameters)
        assert names[0] == "query" and names[-4:] == ["ring", "plan", "options", "out"]
        ring = package.allocate(2, 3, 1, 2, 4, 5, per_channel=True, dtype=torch.bfloat16)
        assert [(tuple(x.shape[2:]), x.dtype) for x in ring] == [
            ((1, 5), torch.bfloat16),
            ((2, 4), torch.float32),
            ((2, 5), torch.float32),
        ]


def test_gradients_of_the_reference_and_no_backward_pass_of_the_twin():
    step = draw(4, h=1, hv=2, dk=3, dv=2).to(torch.float64)
    step.log_decay.clamp_(min=-3)
    before = Slots.like("reference", step, 1, 3)
    before.begin(0, draw_states(1, 2, 2, 3).double()[0])

    def outputs(*tokens):
        slots = before.copy()
        return torch.cat([slots.step(type(step)(*(x[i : i + 1] for x in tokens)), [1], [i + 1], [0]) for i in range(4)])

    assert torch.autograd.gradcheck(outputs, [x.clone().requires_grad_() for x in step])
    step = step.to(torch.float32)
    slots = Slots.like("torch" if DEVICE == "cpu" else "triton", step, 1, 3)
    ring, cursors = Ring(*(x.to(DEVICE) for x in slots.ring)), slots.cursors.zero_().to(DEVICE)
    tables = dict(state_indices=ints([0]).to(DEVICE), cursors=cursors, ring_size=3)
    plan = fastattn.replay.plan(moved(lengths([4], [0]), DEVICE), **tables)
    query, *others = step.to(DEVICE)
    with pytest.raises(NotImplementedError, match="query: requires_grad"):
        fastattn.replay.attention(query.requires_grad_(), *others, slots.states.to(DEVICE), ring, plan)


# --- bad input ---

WRONG_TABLES = {
    "cursors: expected int32 [n], got int64 [3]": dict(cursors=torch.zeros(3, dtype=torch.int64)),
    "cursors: expected one for each of the 3 slots of the plan, got n=2": dict(cursors=ints([0, 0])),
    "cursors: expected 0..4 for slot 0, got 5": dict(cursors=ints([5, 0, 0])),
    "cursors: expected 0..4 for slot 0, got -1": dict(cursors=ints([-1, 0, 0])),
    "ring_size: expected a positive int, got 0": dict(ring_size=0),
    "flush: expected bool [b=3], got float32 [3]": dict(flush=torch.ones(3)),
    "flush: expected None with drafts": dict(flush=torch.ones(3, dtype=torch.bool), drafts=True),
    "drafts: expected True or False, got 1": dict(drafts=1),
    "drafts: expected at most ring_size=1 tokens of a sequence, got 2 of sequence 0": dict(ring_size=1, drafts=True),
    "target_indices: expected int32 [b=3], got int64 [3]": dict(target_indices=torch.zeros(3, dtype=torch.int64)),
    "target_indices: expected a slot in 0..2 that no other sequence has, got 0 for sequence 0": dict(
        target_indices=ints([0, -1, 9])
    ),
    "target_indices: expected a slot in 0..2 that no other sequence has, got 1 for sequence 1": dict(
        target_indices=ints([1, 1, 9])
    ),
    "target_indices: expected a slot in 0..2 that no other sequence has, got 3": dict(target_indices=ints([3, -1, 9])),
    "state_indices: expected [b], as drafts are in the ring": dict(state_indices=ints([[2, 3], [0, 4], [1, 5]])),
    "state_indices: expected a slot for each state, got slot 2 for sequences 0 and 1": dict(
        state_indices=ints([2, 2, 1])
    ),
}


@each_twin
@pytest.mark.parametrize("message", WRONG_TABLES)
def test_a_wrong_table_is_refused(twin, message, shapes_unchecked):
    tables = dict(state_indices=ints([2, 0, 1]), cursors=ints([0, 1, 9]), ring_size=4) | WRONG_TABLES[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.plan(lengths((2, 1, 0), (0, 7, 2)), **tables)


WRONG_TENSORS = {
    "key: expected float32 [t=3, h=2, dk=8], got float32 [3, 1, 8]": lambda a: dict(key=a["key"][:, :1]),
    "states: expected a slot for each of the 3 cursors, got n=4": lambda a: dict(states=draw_states(4)),
    "ring: expected a Ring, from replay.allocate, got None": lambda a: dict(ring=None),
    "ring.key: expected [n=3, l=4, h=2, dk=8], got float32 [3, 5, 2, 8]": lambda a: dict(
        ring=a["ring"]._replace(key=torch.zeros(3, 5, 2, 8))
    ),
    "ring.key: expected a floating point type": lambda a: dict(ring=a["ring"]._replace(key=a["ring"].key.int())),
    "ring.written: expected [n=3, l=4, hv=4, dv=6], got float32 [3, 4, 4, 8]": lambda a: dict(
        ring=a["ring"]._replace(written=torch.zeros(3, 4, 4, 8))
    ),
    "ring.log_decay: expected [n=3, l=4, hv=4], got float32 [3, 4, 4, 8]": lambda a: dict(
        ring=a["ring"]._replace(log_decay=torch.zeros(3, 4, 4, 8))
    ),
    "ring.key: expected memory for each element": lambda a: dict(
        ring=a["ring"]._replace(key=torch.zeros(1, 4, 2, 8).expand(3, 4, 2, 8))
    ),
    "value: expected memory of its own, got some of ring.written": lambda a: dict(value=a["ring"].written[0, :3]),
    "out: expected memory of its own, got some of ring.written": lambda a: dict(out=a["ring"].written[0, :3]),
    "plan: expected a ReplayPlan, from replay.plan, got None": lambda a: dict(plan=None),
    "options: expected RecurrentOptions, got None": lambda a: dict(options=None),
}


@each_twin
@pytest.mark.parametrize("message", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused_and_nothing_is_written(twin, message, shapes_unchecked):
    cursors, states, ring = ints([0, 1, 2]), draw_states(3), twin.allocate(3, 4, 2, 4, 6, 8)
    plan = twin.plan(lengths((2, 1, 0), (0, 7, 2)), state_indices=ints([2, 0, 1]), cursors=cursors, ring_size=4)
    arguments = {**draw(3)._asdict(), "states": states, "ring": ring, "plan": plan, "options": RecurrentOptions()}
    arguments |= WRONG_TENSORS[message](arguments)
    before = states.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.attention(**arguments)
    assert torch.equal(states, before) and not any(field.any() for field in ring)


@each_twin
def test_a_wrong_flush_is_refused_and_nothing_is_written(twin, shapes_unchecked):
    cursors, states, ring = ints([0, 3, 5]), torch.ones(3, 4, 6, 8), twin.allocate(3, 4, 2, 4, 6, 8)
    for message, arguments in (
        ("states: expected the pool of at least one layer, got none", ([], [], cursors, ints([1]))),
        ("rings: expected one for each pool of states, got 1 for 2", ([states] * 2, [ring], cursors, ints([1]))),
        ("rings: expected a Ring for each layer, got None", ([states], [None], cursors, ints([1]))),
        ("states: expected a slot for each of the 3 cursors, got n=2", ([states[:2]], [ring], cursors, ints([1]))),
        ("cursors: expected int32 [n], got float32 [3]", ([states], [ring], cursors.float(), ints([1]))),
        ("cursors: expected 0..4 for slot 2, got 5", ([states], [ring], cursors, ints([1, 2]))),
        ("state_indices: expected slots in 0..2, got 3", ([states], [ring], cursors, ints([1, 3]))),
        ("state_indices: expected each slot once, got [1, 1]", ([states], [ring], cursors, ints([1, 1]))),
        ("target_indices: expected int32 [b=1], got int32 [2]", ([states], [ring], cursors, ints([1]), ints([2, 0]))),
        ("target_indices: expected slots in 0..2", ([states], [ring], cursors, ints([1]), ints([3]))),
        ("none of state_indices, got 1", ([states], [ring], cursors, ints([0, 1]), ints([2, 1]))),
        ("each once and none of state_indices, got 2", ([states], [ring], cursors, ints([0, 1]), ints([2, 2]))),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.flush(*arguments)
    assert torch.equal(states, torch.ones(3, 4, 6, 8)) and cursors.tolist() == [0, 3, 5]


@each_twin
def test_a_wrong_advance_is_refused_and_nothing_is_written(twin, shapes_unchecked):
    cursors = ints([0, 1, 2])
    tables = dict(state_indices=ints([2, 0]), cursors=cursors, ring_size=4)
    plan, drafted = (twin.plan(lengths((2, 1), (4, 7)), **tables, drafts=drafts) for drafts in (False, True))
    for message, arguments in (
        ("plan: expected a ReplayPlan, from replay.plan, got None", (cursors, None)),
        ("cursors: expected int32 [n=3], got int32 [2]", (cursors[:2], plan)),
        ("num_accepted: expected with drafts, and only with them", (cursors, plan, ints([1, 1]))),
        ("num_accepted: expected with drafts, and only with them", (cursors, drafted)),
        ("num_accepted: expected int32 [b=2], got int32 [1]", (cursors, drafted, ints([1]))),
        ("num_accepted: expected 0..2, new tokens of sequence 0, got 3", (cursors, drafted, ints([3, 1]))),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.advance(*arguments)
    assert cursors.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="checkpoint_indices: expected None"):
        kept = dict(checkpoint_indices=ints([[-1], [-1]]), block_size=64)
        slots = StatePlan(plan.batch, ints([2, 0]), torch.tensor([True, True]), **kept)
        ReplayPlan(slots, cursors, 4)
    with pytest.raises(ValueError, match="slots: expected a StatePlan"):
        replace(plan, slots=None)
