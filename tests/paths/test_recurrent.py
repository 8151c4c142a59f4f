"""Layers that keep a state: the formula, who influences whom, slots, drafts, checkpoints, and the convolution."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import fastattn.recurrent
import refattn.recurrent
from fastattn.kernels.order import use_kernel
from fastattn.kernels.replay import memo_of
from refattn.options import RecurrentOptions
from refattn.states import StatePlan
from tests.helpers.bad_input import MOST
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.states import (
    DEVICE,
    KERNELS,
    Step,
    assert_twins_agree,
    attend,
    convolve,
    draw,
    draw_states,
    each_computer,
    each_kernel,
    ints,
    lengths,
    moved,
)
from tests.helpers.steps import record
from twinattn.kit import assert_close
from twinattn.kit.search.tensors import laid

each_twin = pytest.mark.parametrize("twin", [refattn.recurrent, fastattn.recurrent], ids=["ref", "fast"])
PLAIN = RecurrentOptions(delta=False)


def maps_by_hand(step, head, rows, scale):
    """Return `M` and `N` of some tokens of a head, `state -> state M + N`, in float64 and without a state."""
    _, key, value, log_decay, beta = step.to(torch.float64)
    dk, dv, group = key.shape[-1], value.shape[-1], value.shape[1] // key.shape[1]
    map_, added = torch.eye(dk, dtype=torch.float64), torch.zeros(dv, dk, dtype=torch.float64)
    for row in rows:
        k, decay = key[row, head // group], log_decay[row, head].exp() * torch.ones(dk, dtype=torch.float64)
        one = torch.diag(decay) @ (torch.eye(dk, dtype=torch.float64) - beta[row, head] * torch.outer(k, k))
        map_, added = map_ @ one, added @ one + beta[row, head] * torch.outer(value[row, head], k)
    return map_, added


# --- the formula ---


@pytest.mark.core
@pytest.mark.covers("R203", "R208")
@pytest.mark.parametrize("per_channel", [False, True], ids=["per-head", "per-channel"])
def test_tokens_are_affine_maps_of_the_state_and_neighbours_compose(per_channel):
    """The third question: partial outputs of attention merge by LSE, runs of tokens by `(M1 M2, N1 M2 + N2)`."""
    step, states = draw(9, per_channel=per_channel), draw_states(3).double()
    before, scale = states[1].clone(), 8**-0.5
    out = attend("reference", step.to(torch.float64), states, lengths([9], [4]), state_indices=ints([1]))
    for head in range(4):
        (m1, n1), (m2, n2) = (maps_by_hand(step, head, rows, scale) for rows in (range(5), range(5, 9)))
        after = before[head] @ (m1 @ m2) + (n1 @ m2 + n2)
        torch.testing.assert_close(states[1, head], after)
        query = step.query[8, head // 2].double()
        torch.testing.assert_close(out[8, head], after @ query * scale)


def test_without_the_delta_rule_it_is_attention_with_decay_and_no_softmax():
    step = draw(7, h=1, hv=2)
    out = attend(
        "reference",
        step.to(torch.float64),
        draw_states(1, 2).double(),
        lengths([7], [0]),
        PLAIN,
        state_indices=ints([0]),
    )
    query, key, value, log_decay, beta = step.to(torch.float64)
    for head in range(2):
        decays = torch.zeros(7, 7, dtype=torch.float64)
        for i in range(7):
            for j in range(i + 1):
                decays[i, j] = log_decay[j + 1 : i + 1, head].exp().prod()
        scores = query[:, 0] @ key[:, 0].T * 8**-0.5 * decays * beta[:, head]
        torch.testing.assert_close(out[:, head], scores @ value[:, head])


def test_equals_the_gated_delta_rule_of_transformers():
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    step, states = draw(70), draw_states(2)
    step.log_decay.clamp_(min=-5)  # theirs subtracts sums of logarithms
    initial = states[1].transpose(1, 2)[None].clone()
    ours = attend("reference", step, states, lengths([70], [3]), state_indices=ints([1]))
    query, key = (x.repeat_interleave(2, dim=1) for x in step[:2])  # some versions want as many heads as of values
    for theirs in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        tensors = (x[None] for x in (query, key, *step[2:]))
        out, state = theirs(*tensors, initial_state=initial, output_final_state=True)
        torch.testing.assert_close(ours, out[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[1], state[0].transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_equals_kimi_delta_attention_of_transformers():
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    step, states = draw(20, h=4, per_channel=True), draw_states(2)
    initial = states[1].transpose(1, 2)[None].clone()
    ours = attend("reference", step, states, lengths([20], [3]), state_indices=ints([1]))
    out, state = kimi.recurrent_kimi_delta_attention(*(x[None] for x in step), initial, True)
    torch.testing.assert_close(ours, out[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[1], state[0].transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_equals_mamba2_of_transformers():
    from transformers.models.mamba2 import modeling_mamba2 as mamba

    step, states = draw(21), draw_states(2)
    rate, dt = -torch.rand(4), step.beta  # A, and the size of a step: both gates come from it
    step = step._replace(log_decay=dt * rate)
    options = RecurrentOptions(scale=1.0, delta=False)
    initial = states[1:].clone()
    ours = attend("reference", step, states, lengths([21], [3]), options, state_indices=ints([1]))
    arguments = step.value[None], dt[None], rate, step.key[None], step.query[None]
    out, state = mamba.mamba2_chunk_scan(*arguments, 8, initial_states=initial, return_final_states=True)
    torch.testing.assert_close(ours, out[0].view(ours.shape), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[1:], state, atol=1e-5, rtol=1e-5)


@pytest.mark.core
@pytest.mark.covers("R204")
@each_computer
def test_the_convolution_is_that_of_transformers(kernel):
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    inputs, weight, bias = torch.randn(9, 5), torch.randn(5, 4), torch.randn(5)
    states = torch.full((3, 3, 5), torch.nan)
    out = convolve(kernel, inputs[:7], weight, states, lengths([7], [0]), bias=bias, state_indices=ints([2]))
    theirs = qwen.causal_conv1d_fn(inputs[None].mT, weight, bias, "silu")[0].T
    torch.testing.assert_close(out, theirs[:7])
    assert torch.equal(states[2], inputs[4:7]) and states[:2].isnan().all()
    out = convolve(kernel, inputs[7:], weight, states, lengths([2], [7]), bias=bias, state_indices=ints([2]))
    torch.testing.assert_close(out, theirs[7:])
    assert torch.equal(states[2], inputs[6:9])


# --- who influences whom ---


@each_computer
def test_the_influence_of_values_is_causal_and_decays(kernel):
    """Values of one-hot rows: the output is the weight of each token, `d out_i / d v_j`; gates are powers of two."""
    lens, total = (3, 0, 19), 22
    key = normalize(torch.ones(total, 1, 8), dim=-1)
    gates = torch.randint(0, 4, (total, 1), generator=torch.Generator().manual_seed(0))
    step = Step(key, key, torch.eye(total)[:, None], -gates * torch.tensor(2.0).log(), torch.full((total, 1), 0.5))
    options = RecurrentOptions(scale=1.0, delta=False)
    out = attend(
        kernel,
        step,
        torch.full((4, 1, total, 8), torch.nan),
        lengths(lens, (0, 0, 0)),
        options,
        state_indices=ints([3, 1, 0]),
    )
    expected = torch.zeros(total, total, dtype=torch.float64)
    for first, end in ((0, 3), (3, 22)):
        for i in range(first, end):
            for j in range(first, i + 1):
                expected[i, j] = 0.5 * 2.0 ** -int(gates[j + 1 : i + 1].sum())
    assert torch.equal(out[:, 0] != 0, expected != 0), "the support is not the causal mask of each sequence"
    torch.testing.assert_close(out[:, 0].double(), expected, rtol=1e-5, atol=0)


@each_computer
def test_under_the_delta_rule_a_key_written_twice_has_its_last_value(kernel):
    key = torch.zeros(20, 1, 8)
    key[:, 0, 0] = 1.0
    key[7, 0, :2] = torch.tensor([0.0, 1.0])  # another key, which stays
    step = Step(key + (key == 0), key, torch.eye(20)[:, None], torch.zeros(20, 1), torch.ones(20, 1))
    out = attend(
        kernel, step, torch.zeros(1, 1, 20, 8), lengths([20], [0]), RecurrentOptions(1.0), state_indices=ints([0])
    )
    others = torch.arange(20) != 7
    assert torch.equal(out[others, 0][:, others], torch.eye(19)), "an overwritten value is still there"
    assert torch.equal(out[:, 0, 7], (torch.arange(20) >= 7).float())


def test_gradients_of_the_reference_and_no_backward_pass_of_the_twin():
    step, states = draw(5, h=1, hv=2, dk=3, dv=2).to(torch.float64), draw_states(1, 2, 2, 3).double()
    step.log_decay.clamp_(min=-3)
    inputs = [x.clone().requires_grad_() for x in step]

    def outputs(*tokens):
        return attend("reference", Step(*tokens), states.clone(), lengths([5], [1]), state_indices=ints([0]))

    assert torch.autograd.gradcheck(outputs, inputs)
    plan = fastattn.recurrent.plan(moved(lengths([5], [1]), DEVICE), state_indices=moved(ints([0]), DEVICE))
    inputs = [moved(x.detach().float(), DEVICE).requires_grad_() for x in step]
    with pytest.raises(NotImplementedError, match="query: requires_grad"):
        fastattn.recurrent.attention(*inputs, moved(states.float(), DEVICE), plan)


# --- memory that no query may see ---


def poisoned(kernel, poison):
    """Return the outputs and the states of a step in which all that may not be read holds poison."""
    batch = lengths((11, 3, 0, 1, 20), (0, 5, 9, 0, 30))  # then two rows of padding
    step = draw(37, h=1, hv=2)
    padding = [*range(11, 14), 35, 36]  # sequence 1 is padding
    for x in step:
        x[padding] = poison
    inputs = torch.randn(37, 7, generator=torch.Generator().manual_seed(3))
    inputs[padding] = poison
    states, last = draw_states(8, 2), torch.randn(8, 3, 7, generator=torch.Generator().manual_seed(4))
    free = [0, 2, 3, 4, 6, 7]
    states[free], last[free] = poison, poison  # 6 and 4 belong to sequences that have no state yet
    tables = dict(
        state_indices=ints([4, -1, 1, 6, 1]),  # the one without new tokens still names the slot of another
        has_initial_state=torch.tensor([False, True, False, False, True]),
        checkpoint_indices=ints([[99] * 3, [99] * 3, [99] * 3, [99] * 3, [99, 5, -7]]),
        block_size=16,
    )
    out = attend(kernel, step, states, batch, **tables)
    mixed = convolve(kernel, inputs, torch.ones(7, 4), last, batch, **tables)
    return out, mixed, states, last


@pytest.mark.core
@pytest.mark.covers("R201", "R202")
@each_computer
def test_memory_that_no_query_may_see_changes_no_bit(kernel):
    """Free slots, slots of sequences that begin, padding rows and sequences, and entries that the step does not use.

    vLLM 57720: a prompt of one token was computed from what the slot held before. vLLM 37728: the entries of a finished
    request were reached by a sequence without tokens. TensorRT-LLM 13278: padding shared the slot of a live request.
    """
    clean, spoilt = poisoned(kernel, 0.5), poisoned(kernel, torch.nan)
    for answers in (spoilt, poisoned(kernel, 1e4)):
        for before, after in zip(clean, answers, strict=True):
            used = [1, 4, 5, 6] if len(before) == 8 else slice(None)
            assert torch.equal(before[used], after[used])
    out, mixed, states, last = spoilt
    assert not out[[11, 12, 13, 35, 36]].any() and not mixed[[11, 12, 13, 35, 36]].any()
    assert out.isfinite().all() and mixed.isfinite().all()
    assert states[[0, 2, 3, 7]].isnan().all() and last[[0, 2, 3, 7]].isnan().all(), "a free slot was written"
    assert states[[1, 4, 5, 6]].isfinite().all() and last[[1, 4, 5, 6]].isfinite().all()


@pytest.mark.covers("R202")
@each_computer
@pytest.mark.parametrize("length", [2, 20])
def test_a_sequence_without_tokens_leaves_the_slot_of_another_alone(kernel, length):
    step, states, has_state = draw(length), draw_states(2), torch.tensor([False, True, False])
    alone = states.clone()
    tables = dict(state_indices=ints([1, 1, 1]), has_initial_state=has_state)
    out = attend(kernel, step, states, lengths((0, length, 0), (9, 3, 0)), **tables)
    assert torch.equal(out, attend(kernel, step, alone, lengths([length], [3]), state_indices=ints([1])))
    assert torch.equal(states, alone)


def beside_idle_sequences(kernel, length, entries, per_channel, drafts):
    """Return the outputs and the states of a step in which each sequence without new tokens has an entry everywhere."""
    lens, contexts = (0, length, 0, 1, 0), (9, 3, 0, 15, 40)
    step, states = draw(length + 1, h=1, hv=2, per_channel=per_channel), draw_states(12, 2)
    inputs, weight, last = torch.randn(length + 1, 5), torch.randn(5, 4), torch.randn(12, 3, 5)
    columns = dict(
        state_indices=ints([[4, 5], [0, 1], [6, 7], [2, 3], [9, 9]]),
        checkpoint_indices=ints([[-1, -1], [10, -1], [-1, -1], [11, -1], [-1, -1]]),
        num_accepted=ints([1, 2, 1, 2, 1]),
    )
    for table in columns.values():
        table[[0, 2, 4]] = ints(entries).view(-1, *[1] * (table.ndim - 1))
    if not drafts:
        columns["state_indices"] = columns["state_indices"][:, 0].contiguous()
        del columns["num_accepted"]
    tables = dict(columns, block_size=16, has_initial_state=torch.tensor([True, True, False, True, True]))
    out = attend(kernel, step, states, lengths(lens, contexts), **tables)
    return out, convolve(kernel, inputs, weight, last, lengths(lens, contexts), **tables), states, last


@pytest.mark.covers("R202")
@each_computer
@pytest.mark.parametrize("per_channel", [False, True], ids=["per-head", "per-channel"])
@pytest.mark.parametrize(("length", "drafts"), [(2, False), (2, True), (20, False)], ids=["few", "drafts", "prompt"])
def test_entries_of_a_sequence_without_tokens_may_be_anything(kernel, length, drafts, per_channel):
    """None of them is followed, neither a slot nor the column of a draft that was accepted."""
    torch.manual_seed(0)
    expected = beside_idle_sequences(kernel, length, (-1, -1, -1), per_channel, drafts)
    assert expected[0].any(-1).all() and expected[1].any(-1).all()
    for entries in ((MOST, 12, -MOST - 1), (-MOST - 1, MOST, 12)):
        torch.manual_seed(0)
        answers = beside_idle_sequences(kernel, length, entries, per_channel, drafts)
        assert all(map(torch.equal, answers, expected))


@pytest.mark.core
@pytest.mark.covers("R203")
@each_computer
@pytest.mark.parametrize(
    ("name", "per_channel"),
    [("key", False), ("value", False), ("log_decay", False), ("key", True), ("log_decay", True)],
)
def test_nan_reaches_the_tokens_after_it_and_none_before(kernel, name, per_channel):
    """In a chunk, all of whose tokens meet in one product, it would be 0 times NaN."""
    step, states = draw(20, h=1, hv=1, per_channel=per_channel), draw_states(1, 1)
    getattr(step, name)[12] = torch.nan
    out = attend(kernel, step, states, lengths([20], [0]), state_indices=ints([0]))
    assert out[:12].isfinite().all() and out[12:].isnan().any(-1).all() and states.isnan().any()


@pytest.mark.core
@pytest.mark.covers("R203")
@each_computer
@pytest.mark.parametrize(
    ("name", "number"),
    [("log_decay", torch.nan)]
    + [(name, number) for name in ("query", "key", "value", "beta", "states") for number in (torch.nan, torch.inf)],
)
def test_what_is_not_finite_is_where_the_reference_has_it(kernel, name, number):
    """It is in the first, a middle and the last token of a chunk of 16, and of a sequence; chunks beside it are finite.

    Triton takes chunks to be finite at first. The last row of what it solved tells which ones are not.
    """
    batch = lengths((0, 40, 20, 3), (5, 13, 0, 0))  # chunks begin at rows 0, 3, 19 and 35 of the second, at 40 and 56
    tables = dict(state_indices=ints([0, 1, 2, -1]), block_size=16, checkpoint_indices=ints([[-1] * 4] * 4))
    clean, before = draw(63, h=1, hv=2), draw_states(4, 2)
    for token in (1,) if name == "states" else (2, 3, 10, 18, 39, 40, 59):
        step, pool = type(clean)(*(x.clone() for x in clean)), before.clone()
        if name == "states":
            pool[token, 1, 0, 3] = number
        else:
            row = getattr(step, name)[token]
            (row[0] if name in ("query", "key") else row[1:]).view(-1)[-1] = number
        ours, wide, low = pool.clone(), pool.double(), pool.clone()
        found = ours, attend(kernel, step, ours, batch, **tables)
        expected = wide, attend("reference", step.to(torch.float64), wide, batch, **tables)
        rounded = low, attend("reference", step, low, batch, **tables)
        assert not expected[1].isfinite().all() and expected[1][:, 0].isfinite().any()
        for where, answer, ref, of_low in zip(("states", "out"), found, expected, rounded, strict=True):
            is_finite = ref.isfinite()
            assert torch.equal(answer.isfinite(), is_finite), f"{where}, token {token}"
            assert_close(answer[is_finite], ref[is_finite], of_low[is_finite], name=where)


@pytest.mark.covers("R202")
@each_computer
def test_slot_0_is_a_slot_and_a_negative_one_is_padding_alone(kernel):
    """FlashInfer's -1 has two meanings: one kernel writes to slot 0 for it, another skips and returns 0."""
    step, states = draw(2), draw_states(2)
    before = states.clone()
    out = attend(kernel, step, states, lengths((1, 1), (5, 5)), state_indices=ints([-1, 0]))
    assert not out[0].any() and out[1].any()
    assert torch.equal(states[1], before[1]) and not torch.equal(states[0], before[0])


# --- cut, roll back, begin again ---


@pytest.mark.core
@pytest.mark.covers("R201")
def test_a_sequence_that_is_cut_anywhere_has_the_same_bits():
    """See transformers 46190 and FLA 285: a forward pass over all, and prefill and decode, gave other answers."""
    step, inputs, weight = draw(9), torch.randn(9, 5), torch.randn(5, 4)

    def in_parts(*ends):
        states, last, outs, mixed = torch.full((2, 4, 6, 8), torch.nan), torch.full((2, 3, 5), torch.nan), [], []
        states = states.transpose(2, 3).contiguous().transpose(2, 3)  # keys first in memory
        for first, end in zip((0, *ends), (*ends, 9), strict=True):
            batch, rows = lengths([end - first], [first]), slice(first, end)
            outs.append(attend("reference", step.rows(rows), states, batch, state_indices=ints([1])))
            mixed.append(convolve("reference", inputs[rows], weight, last, batch, state_indices=ints([1])))
        return torch.cat(outs), torch.cat(mixed), states[1], last[1]

    whole = in_parts()
    for cuts in [(i,) for i in range(10)] + [(1, 2, 5), tuple(range(1, 9))]:
        assert all(map(torch.equal, whole, in_parts(*cuts))), cuts


@pytest.mark.parametrize("kernel", ["reference", *(name for name in KERNELS if name == "triton")])
@pytest.mark.parametrize("lens", [(1, 3), (17, 20)], ids=["decodes", "prompts"])
def test_other_requests_change_no_bit(kernel, lens):
    """See vLLM 45819: a request alone was answered otherwise than in a batch. Here, all are decodes or prompts."""
    contexts, step, states = (5, 0), draw(sum(lens)), draw_states(4)
    together, first = states.clone(), 0
    out = attend(kernel, step, together, lengths(lens, contexts), state_indices=ints(range(len(lens))))
    for i, (length, context) in enumerate(zip(lens, contexts, strict=True)):
        alone, rows = states.clone(), slice(first, first + length)
        one = attend(kernel, step.rows(rows), alone, lengths([length], [context]), state_indices=ints([i]))
        assert torch.equal(one, out[rows]) and torch.equal(alone[i], together[i])
        first += length


@pytest.mark.core
@pytest.mark.covers("R201", "R203")
@each_kernel
def test_prefill_and_decode_agree_with_the_whole(kernel):
    step, states = draw(40), draw_states(2)
    ref, low = (x.clone() for x in (states.double(), states))
    whole = attend("reference", step.to(torch.float64), ref, lengths([40], [0]), state_indices=ints([1]))
    low_out = attend("reference", step, low, lengths([40], [0]), state_indices=ints([1]))
    outs = []
    for first, end in ((0, 23), (23, 38), (38, 39), (39, 40)):
        batch = lengths([end - first], [first])
        outs.append(attend(kernel, step.rows(slice(first, end)), states, batch, state_indices=ints([1])))
    assert_close(torch.cat(outs), whole, low_out)
    assert_close(states[1], ref[1], low[1], name="states")


@pytest.mark.core
@pytest.mark.covers("R205")
@each_computer
def test_rejected_drafts_are_rolled_back(kernel):
    """The state after the last accepted token goes on, as if nothing else had been drafted; of both states.

    transformers 49036: cropping a cache left the drafts in the state. vLLM 53912: with drafts, what a prefix hit began
    from was the state of another token.
    """
    step, inputs, weight = draw(12, h=1, hv=2), torch.randn(12, 5), torch.randn(5, 4)

    def compute(tokens, pools, batch, **tables):
        out = attend(kernel, step.rows(tokens), pools[0], batch, **tables)
        return out, convolve(kernel, inputs[tokens], weight, pools[1], batch, **tables)

    columns = ints([[2, 5, 3], [1, 0, 6]])
    for accepted in (1, 2, 3):
        pools = draw_states(8, 2), torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(2))
        alone = [pool.clone() for pool in pools]
        # Two sequences verify three tokens each; the second begins after two accepted ones of the step before.
        verified = compute(
            slice(0, 6), pools, lengths((3, 3), (4, 4)), state_indices=columns, num_accepted=ints([1, 2])
        )
        going_on = compute(
            slice(6, 12),
            pools,
            lengths((3, 3), (4 + accepted, 4 + accepted)),
            state_indices=columns,
            num_accepted=ints([accepted, accepted]),
        )
        # Without drafts: the accepted tokens alone, then the others, in the slots where the states were.
        tokens = torch.tensor([*range(accepted), *range(3, 3 + accepted)])
        slots = dict(state_indices=ints([2, 0]))
        first = compute(tokens, alone, lengths((accepted, accepted), (4, 4)), **slots)
        then = compute(slice(6, 12), alone, lengths((3, 3), (4 + accepted, 4 + accepted)), **slots)
        for drafted, plain in zip(verified, first, strict=True):
            torch.testing.assert_close(drafted[tokens], plain)
        for drafted, plain in zip(going_on, then, strict=True):
            torch.testing.assert_close(drafted, plain)
        for pool, other in zip(pools, alone, strict=True):
            assert torch.equal(pool[[4, 7]], other[[4, 7]]), "an unused slot was written"
            torch.testing.assert_close(pool[[3, 6]], other[[2, 0]])


@pytest.mark.core
@pytest.mark.covers("R206")
@each_computer
def test_a_checkpoint_at_a_blocks_end_is_where_another_request_begins(kernel):
    """Blocks are those of the sequence, not of the step; nothing is kept between them.

    modular 6681: a prefix hit skipped tokens whose state was not kept. vLLM 53142: the column was that of blocks of
    another size.
    """
    step, inputs, weight = draw(45, h=1, hv=2), torch.randn(45, 5), torch.randn(5, 4)
    pools = draw_states(6, 2), torch.randn(6, 3, 5)
    kept = dict(state_indices=ints([0]), block_size=16)
    for rows, slots in ((slice(0, 21), [4, -1]), (slice(21, 45), [1, 3])):  # in two steps, cut inside a block
        batch = lengths([rows.stop - rows.start], [rows.start])
        tables = kept | dict(checkpoint_indices=ints([slots]))
        attend(kernel, step.rows(rows), pools[0], batch, **tables)
        convolve(kernel, inputs[rows], weight, pools[1], batch, **tables)
    for slot, length in ((4, 16), (3, 32), (0, 45)):
        alone = torch.zeros(1, 2, 6, 8), torch.zeros(1, 3, 5)
        attend(kernel, step.rows(slice(0, length)), alone[0], lengths([length], [0]), state_indices=ints([0]))
        torch.testing.assert_close(pools[0][slot], alone[0][0], atol=1e-5, rtol=1e-5)
        assert torch.equal(pools[1][slot], inputs[length - 3 : length])
    # The column of the first block is not read in the second step, in which that block does not end.
    untouched = draw_states(6, 2)
    assert torch.equal(pools[0][[1, 2, 5]], untouched[[1, 2, 5]])


@each_computer
def test_a_step_of_fixed_size_replays_with_other_lengths_and_slots(kernel):
    """In vLLM 34874 a captured graph went on with the slots of the step that it was captured with."""
    step, states = draw(4), draw_states(6)
    device = "cpu" if kernel == "reference" else DEVICE
    package = refattn if kernel == "reference" else fastattn
    batch = moved(lengths((1, 1, 1, 1), (4, 4, 4, 4)), device)
    slots, has_state = ints([5, 1, 2, 4]).to(device), torch.ones(4, dtype=torch.bool, device=device)
    tokens, pool = step.to(device), states.to(device).clone()
    plan = package.recurrent.plan(batch, state_indices=slots, has_initial_state=has_state)

    def compute():
        with nullcontext() if kernel == "reference" else use_kernel(kernel):
            return package.recurrent.attention(*tokens, pool, plan)

    replay = record(compute, device)
    pool.copy_(states)
    slots.copy_(ints([2, -1, 0, -1]))
    has_state.copy_(torch.tensor([True, True, False, True]))
    out = replay().cpu()
    expected = states.clone()
    tables = dict(state_indices=ints([2, -1, 0, -1]), has_initial_state=torch.tensor([True, True, False, True]))
    assert torch.equal(out, attend(kernel, step, expected, lengths((1,) * 4, (4,) * 4), **tables))
    assert torch.equal(pool.cpu(), expected) and not out[[1, 3]].any()


# --- the twin ---

STEPS = {
    "decodes": ((1, 1, 0, 1), (5, 0, 3, 9)),
    "mixed": ((19, 0, 1, 34), (3, 0, 17, 0)),
}


@pytest.mark.core
@pytest.mark.covers("R203", "R208")
@each_kernel
@pytest.mark.parametrize("options", [RecurrentOptions(), RecurrentOptions(-0.7, delta=False)], ids=["delta", "plain"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per-head", "per-channel"])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_twins_agree(kernel, options, per_channel, lens):
    """With every kind of gate, among them exactly 0 and saturated ones (FLA 99, 389, 1007): no NaN, no lost digits."""
    batch, total = lengths(*lens), sum(lens[0]) + 1
    step = draw(total, h=1, hv=2, dk=5, dv=3, per_channel=per_channel)
    tables = dict(checkpoint_indices=ints([[5, 6], [-1, -1], [-1, 7], [8, 9]]), block_size=16)
    assert_twins_agree(
        kernel, step, draw_states(10, 2, 3, 5), batch, options, state_indices=ints([3, 1, 0, 2]), **tables
    )


@each_kernel
def test_twins_agree_over_a_whole_chunk_and_more(kernel):
    step = draw(131, h=1, hv=1, dk=17, dv=18)
    assert_twins_agree(kernel, step, draw_states(1, 1, 18, 17), lengths([131], [7]), state_indices=ints([0]))


STRONG = {  # logarithms of decays, by token and channel
    "none": lambda gates: gates.zero_(),
    "strong": lambda gates: gates.fill_(-80.0),
    "strong for some tokens": lambda gates: gates[::3].fill_(-80.0),
}


@pytest.mark.core
@pytest.mark.covers("R203", "R208")
@each_kernel
@pytest.mark.parametrize("gates", STRONG.values(), ids=STRONG)
def test_chunks_with_a_decay_per_channel(kernel, gates):
    """Whole chunks and parts of them: `exp(80)` to the power of a few tokens would not be a number."""
    step = draw(92, h=1, hv=2, dk=9, dv=3, per_channel=True)
    gates(step.log_decay)
    tables = dict(state_indices=ints([2, 0]), checkpoint_indices=ints([[-1, 1], [3, -1]]), block_size=32)
    assert_twins_agree(kernel, step, draw_states(4, 2, 3, 9), lengths((71, 20), (7, 13)), **tables)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["float32-states", "bfloat16-states"])
def test_twins_agree_in_16_bits(kernel, dtype, stored):
    if kernel == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        with pytest.raises(NotImplementedError, match="triton: computes torch.float16"):
            assert_twins_agree(kernel, draw(2, dtype=dtype), draw_states(1), lengths([2], [0]), state_indices=ints([0]))
        return
    states = draw_states(2, 1).to(stored)
    step = draw(21, h=1, hv=1, dtype=dtype)
    tables = dict(state_indices=ints([1, 0]), checkpoint_indices=ints([[-1, -1], [-1, -1]]), block_size=16)
    assert_twins_agree(kernel, step, states, lengths((20, 1), (0, 6)), **tables)


@each_kernel
def test_tensors_may_have_any_strides(kernel):
    """Queries, keys and values side by side, one decay for all tokens, keys first in a state, every second slot."""
    step = draw(19, h=2, hv=2, dk=6, dv=6)
    joined = torch.stack([step.query, step.key, step.value], dim=1)
    decay = torch.tensor([-0.1, -0.5]).expand(19, 2)
    strided = Step(*joined.unbind(1), decay, torch.ones(()).expand(19, 2))
    plain = Step(*(x.contiguous() for x in strided))
    pool = torch.full((6, 2, 6, 6), torch.nan)
    pool[::2] = draw_states(3, 2, 6, 6)
    states, dense = pool.transpose(2, 3)[::2], pool.transpose(2, 3)[::2].contiguous()
    batch, tables = lengths((17, 2), (3, 4)), dict(state_indices=ints([[0, 9], [2, 9]])[:, 0])
    out = attend(kernel, strided, states, batch, PLAIN, **tables)
    torch.testing.assert_close(out, attend(kernel, plain, dense, batch, PLAIN, **tables))
    torch.testing.assert_close(states, dense)
    assert pool[1::2].isnan().all()


@pytest.mark.parametrize(
    ("kernel", "rows", "per_channel", "dtype", "sizes"),
    every_pair_on_cpu(
        KERNELS,
        ["every-other", "expanded-size", "offset", "padded", "heads-last"],
        [False, True],
        [torch.float32, torch.bfloat16],
        [(64, 32), (40, 24)],
    ),
    ids=str,
)
def test_rows_of_a_chunk_may_lie_in_any_way(kernel, rows, dtype, per_channel, sizes):
    """Where rows of 16 bits did not begin at multiples of 16 bytes, answers on Hopper were wrong, or none came."""
    if kernel == "triton" and DEVICE == "cpu":
        dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    dk, dv = sizes
    step = draw(40, dk=dk, dv=dv, per_channel=per_channel, dtype=dtype)
    step = Step(*step[:3], step.log_decay.float(), step.beta.float())
    strided = Step(*(laid(x, rows) for x in step))
    plain, batch = Step(*(x.contiguous() for x in strided)), lengths((17, 1, 22), (0, 9, 70))
    states, dense = (draw_states(3, 4, dv, dk) for _ in range(2))
    out = attend(kernel, strided, states, batch, PLAIN, state_indices=ints([2, 0, 1]))
    assert torch.equal(out, attend(kernel, plain, dense, batch, PLAIN, state_indices=ints([2, 0, 1])))
    assert torch.equal(states, dense)


@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
def test_a_decode_has_the_bits_that_it_has_alone():
    """On a GPU a program has fewer values where there are few of them, and the sums of each are the same."""
    count, size = (24, 128) if DEVICE == "cuda" else (3, 16)
    step, states = draw(count, h=2, hv=4, dk=size, dv=size), draw_states(count, 4, size, size)
    alone = states[:1].clone()
    together = attend("triton", step, states, lengths([1] * count, [5] * count), state_indices=ints(list(range(count))))
    first = Step(*(x[:1] for x in step))
    assert torch.equal(attend("triton", first, alone, lengths([1], [5]), state_indices=ints([0])), together[:1])
    assert torch.equal(alone, states[:1])


@settings(max_examples=15)
@given(st.data())
def test_twins_agree_on_drawn_steps(data):
    lens = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 80)), min_size=1, max_size=3))
    block_size = data.draw(st.sampled_from([3, 16, 48, 64]))
    slots = data.draw(st.permutations(range(len(lens))))
    slots = [-1 if data.draw(st.integers(0, 4)) == 0 else slot for slot in slots]
    columns = 1 + max(q + c for q, c in lens) // block_size
    checkpoints = torch.full((len(lens), columns), -1, dtype=torch.int32)
    checkpoints.view(-1)[:] = torch.arange(checkpoints.numel()) + len(lens)
    step = draw(sum(q for q, _ in lens), h=1, hv=2, dk=4, dv=3, per_channel=data.draw(st.booleans()), seed=len(lens))
    states = draw_states(len(lens) + checkpoints.numel(), 2, 3, 4)
    tables = dict(state_indices=ints(slots), checkpoint_indices=checkpoints, block_size=block_size)
    options = RecurrentOptions(delta=data.draw(st.booleans()))
    kernel = "torch" if DEVICE == "cpu" else "triton"
    assert_twins_agree(kernel, step, states, lengths(*zip(*lens, strict=True)), options, **tables)


@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
@pytest.mark.parametrize("query_len", [1, 20], ids=["decode", "prompt"])
def test_a_layer_replays_the_launches_of_another_under_the_same_plan(query_len, device):
    """With its own tensors, and only if options, shapes and strides are the same."""
    path, num_tokens = fastattn.recurrent, 2 * query_len
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    plan = path.plan(moved(lengths([query_len] * 2, [3, 0]), device), state_indices=slots)
    launches = []
    for layer, (options, silu) in enumerate([(RecurrentOptions(), True)] * 3 + [(PLAIN, False)]):
        step, pool = draw(num_tokens, seed=layer).to(device), draw_states(2, seed=layer).to(device)
        weight, inputs = step.query[0, 0, :, None] * torch.ones(4, device=device), step.key[:, 0]
        inputs, bias = inputs.contiguous() if layer == 2 else inputs, step.query[0, 1].clone()
        outputs = []
        for own in (plan, replace(plan)):  # and by a plan that has no memo
            states, last = pool.clone(), pool[:, 0, :3].clone()
            with use_kernel("triton"):
                out = path.attention(*step, states, own, options)
                mixed = path.convolve(inputs, weight, last, own, bias=bias, silu=silu)
            outputs.append((out, states, mixed, last))
        assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True)), layer
        launches.append(len(memo_of(plan).launches))
    assert launches == [2, 2, 3, 5]


@each_kernel
def test_outputs_go_where_they_are_asked_for(kernel):
    step, states, batch = draw(20), draw_states(2), lengths([19], [0])
    expected = attend(kernel, step, states.clone(), batch, state_indices=ints([1]))
    tables = dict(state_indices=ints([1]).to(DEVICE))
    out = torch.full((4, 20, 6), torch.nan, device=DEVICE).transpose(0, 1)
    with use_kernel(kernel):
        plan = fastattn.recurrent.plan(moved(batch, DEVICE), **tables)
        again = fastattn.recurrent.attention(*step.to(DEVICE), states.to(DEVICE), plan, out=out)
    assert again is out and torch.equal(out.cpu(), expected)


@pytest.mark.core
@each_computer
@pytest.mark.parametrize("count", [3, 40])
def test_outputs_may_be_written_over_inputs(kernel, count):
    """The rule and the convolution, over their own inputs, and one row further on.

    The bits are those in new memory: no kernel reads what it has written.
    """
    package = refattn.recurrent if kernel == "reference" else fastattn.recurrent
    device = "cpu" if kernel == "reference" else DEVICE
    step, batch = draw(count, hv=2, dv=8).to(device), moved(lengths([count], [0]), device)
    inputs, weight = torch.randn(count, 200, device=device), torch.randn(200, 4, device=device)
    plan = package.plan(batch, state_indices=ints([1]).to(device))

    def fold(tensors, out):
        states = draw_states(2, 2, 8).to(device)
        return package.attention(*tensors, states, plan, out=out), states

    def mix(tensors, out):
        states = torch.zeros(2, 3, 200, device=device)
        return package.convolve(*tensors, weight, states, plan, out=out), states

    with nullcontext() if kernel == "reference" else use_kernel(kernel):
        for call, tensors, places in ((fold, step, range(3)), (mix, (inputs,), [0])):
            expected, states = call(tensors, None)
            for place in places:
                for first in (0, 1):
                    memory = torch.zeros(count + first, *expected.shape[1:], device=device)
                    mine = memory[:count].copy_(tensors[place])
                    changed = (*tensors[:place], mine, *tensors[place + 1 :])
                    out, after = call(changed, memory[first:])
                    assert out.data_ptr() == memory[first:].data_ptr()
                    assert torch.equal(out, expected) and torch.equal(after, states)


# --- bad input ---

WRONG_TABLES = {
    "state_indices: expected int32 [b=3], got int64 [3]": dict(state_indices=torch.tensor([0, 1, 2])),
    "state_indices: expected int32 [b=3], got int32 [2]": dict(state_indices=ints([0, 1])),
    "state_indices: expected a slot for each state, got slot 1 for sequences 0 and 1": dict(
        state_indices=ints([1, 1, 2])
    ),
    "state_indices: expected a slot for each state, got slot 1 for two states of sequence 0": dict(
        state_indices=ints([[1, 1], [0, 3], [4, 4]])
    ),
    "state_indices: expected a column for each of the 2 new tokens of sequence 0, got 1": dict(
        state_indices=ints([[1], [0], [4]])
    ),
    "state_indices: expected a slot in column 1, where the state of sequence 1 is": dict(
        state_indices=ints([[1, 2], [0, -1], [4, 5]]), num_accepted=ints([1, 2, 0])
    ),
    "has_initial_state: expected bool [b=3], got float32 [3]": dict(
        state_indices=ints([0, 1, 2]), has_initial_state=torch.ones(3)
    ),
    "num_accepted: expected with state_indices [b, c] only": dict(
        state_indices=ints([0, 1, 2]), num_accepted=ints([1, 1, 1])
    ),
    "num_accepted: expected 1..2, a column of state_indices, got 3 for sequence 1": dict(
        state_indices=ints([[1, 2], [0, 3], [4, 5]]), num_accepted=ints([1, 3, 1])
    ),
    "block_size: expected with checkpoint_indices": dict(state_indices=ints([0, 1, 2]), block_size=16),
    "checkpoint_indices: expected a column for each of the 2 blocks that sequence 1 ends, got 1": dict(
        state_indices=ints([0, 1, 2]), checkpoint_indices=ints([[5], [6], [7]]), block_size=4
    ),
    "state_indices: expected a slot for each state, got slot 0 for sequences 0 and 1": dict(
        state_indices=ints([0, 1, 2]), checkpoint_indices=ints([[5, 5], [6, 0], [7, 7]]), block_size=4
    ),
}


@each_twin
@pytest.mark.parametrize("message", WRONG_TABLES)
def test_a_wrong_table_is_refused(twin, message, shapes_unchecked):
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.plan(lengths((2, 1, 0), (0, 7, 2)), **WRONG_TABLES[message])


WRONG_TENSORS = {
    "key: expected float32 [t=3, h=2, dk=8], got float32 [3, 1, 8]": lambda s, p: (s._replace(key=s.key[:, :1]), p, {}),
    "value: expected a number of heads that h=2 divides, got hv=3": lambda s, p: (
        s._replace(value=s.value[:, :3]),
        p,
        {},
    ),
    "value: expected float32 [t=3, hv, dv], got float64 [3, 4, 6]": lambda s, p: (
        s._replace(value=s.value.double()),
        p,
        {},
    ),
    "log_decay: expected [t=3, hv=4, dk=8], got float32 [3, 4, 6]": lambda s, p: (
        s._replace(log_decay=s.value),
        p,
        {},
    ),
    "beta: expected a floating point type, got int32 [3, 4]": lambda s, p: (s._replace(beta=s.beta.int()), p, {}),
    "states: expected [n, hv=4, dv=6, dk=8], got float32 [3, 4, 8, 6]": lambda s, p: (s, p.mT, {}),
    "states: expected at least 3 slots, as the plan uses, got n=2": lambda s, p: (s, p[:2], {}),
    "states: expected memory for each element": lambda s, p: (s, p[:1].expand(3, 4, 6, 8), {}),
    "states: expected memory to write to, got a leaf": lambda s, p: (s, p.requires_grad_(), {}),
    "query: expected at least 3 rows, where cu_seqlens_q ends, got t=2": lambda s, p: (s.rows(slice(2)), p, {}),
    "plan: expected a StatePlan, from recurrent.plan, got None": lambda s, p: (s, p, {"plan": None}),
    "options: expected RecurrentOptions, got None": lambda s, p: (s, p, {"options": None}),
    "out: expected float32 [3, 4, 6], got float32 [3, 4, 8]": lambda s, p: (s, p, {"out": torch.zeros(3, 4, 8)}),
}


@each_twin
@pytest.mark.parametrize("message", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused_and_nothing_is_written(twin, message, shapes_unchecked):
    plan = twin.plan(lengths((2, 1, 0), (0, 7, 2)), state_indices=ints([2, 0, 1]))
    step, states, others = WRONG_TENSORS[message](draw(3), draw_states(3))
    before = states.detach().clone()
    arguments = {"plan": plan} | others
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.attention(*step, states, **arguments)
    assert torch.equal(states.detach(), before)


@each_twin
def test_a_wrong_convolution_is_refused_and_nothing_is_written(twin, shapes_unchecked):
    plan = twin.plan(lengths((2, 1, 0), (0, 7, 2)), state_indices=ints([2, 0, 1]))
    states, inputs, weight = torch.zeros(3, 3, 5), torch.ones(3, 5), torch.ones(5, 4)
    for message, arguments, others in (
        ("weight: expected [c=5, width], got float32 [4, 5]", (inputs, weight.T, states), {}),
        ("states: expected [n, width - 1=3, c=5], got float32 [3, 2, 5]", (inputs, weight, states[:, :2]), {}),
        ("states: expected at least 3 slots", (inputs, weight, states[:2]), {}),
        ("bias: expected [c=5], got float32 [4]", (inputs, weight, states), {"bias": torch.ones(4)}),
        ("inputs: expected a floating point type", (inputs.int(), weight, states), {}),
        ("silu: expected True or False, got 1", (inputs, weight, states), {"silu": 1}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.convolve(*arguments, plan, **others)
    assert not states.any()


def test_a_wrong_option_is_refused(shapes_unchecked):
    for message, arguments in (("scale: expected a finite number", [torch.inf]), ("delta: expected True", [None, 1])):
        with pytest.raises(ValueError, match=message):
            RecurrentOptions(*arguments)
    assert isinstance(refattn.recurrent.plan(lengths([0], [0]), state_indices=ints([7])), StatePlan)
