"""States from chunk to chunk by warps with roles: the kernel for Hopper, against the chunks one by one, and in a call.

By itself it runs in the interpreter of Gluon. A call of the path launches it on a Hopper GPU in bfloat16, and elsewhere
in that interpreter in float16, in which Triton's interpreter can multiply for the launch before it.
"""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import fastattn.recurrent
import refattn.recurrent
from fastattn.kernels import device as devices
from fastattn.kernels.order import use_kernel
from fastattn.kernels.triton import chunks_hopper, launch, recurrent
from fastattn.kernels.triton.chunks_hopper import _round
from fastattn.kernels.triton.states import States, tables_of
from refattn.metadata import make_batch
from refattn.options import RecurrentOptions
from tests.helpers.states import assert_twins_agree, attend, draw, draw_states, ints, lengths, moved
from tests.helpers.tolerance import assert_close
from twinattn.course.gluon.interpret import Interpreted

interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="the interpreter of Gluon runs kernels on a CPU")

HEADS, KEY_HEADS, SLOTS, SCALE, CHUNK = 4, 2, 9, 0.7, chunks_hopper.CHUNK
HALF = torch.bfloat16


class Step:
    """A step of prompts: tokens, the intra-chunk terms of the first launch, a pool of states, and a plan."""

    def __init__(self, lens, seed=0, idle=(), block_size=None, padding=3, by_inverse=False):
        generator = torch.Generator().manual_seed(seed)
        self.lens, self.num_tokens = lens, sum(q for q, _ in lens) + padding

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        self.query = (draw(self.num_tokens, KEY_HEADS, 128) / 11).to(HALF)
        self.key = torch.nn.functional.normalize(draw(self.num_tokens, KEY_HEADS, 128), dim=-1).to(HALF)
        self.value = draw(self.num_tokens, HEADS, 128).to(HALF)
        self.pool = draw(SLOTS, HEADS, 128, 128) * 0.3
        self.slots = torch.randperm(SLOTS, generator=generator)
        self.index = self.slots[: len(lens)].int()
        self.index[list(idle)] = -1
        self.has_state = torch.tensor([s > q or (seed + i) % 2 > 0 for i, (q, s) in enumerate(lens)])
        form = dict(per_channel=False, delta=True, chunk=CHUNK, by_inverse=by_inverse)
        self.solved = recurrent._solved(self.query, self.value, **form)
        for name, size in (("written", 1), ("answered", 12), ("inverse", 8), ("weights", 8)):
            x = getattr(self.solved, name)
            if x is not None:
                x.copy_(draw(*x.shape) / size)
        if by_inverse:  # it is triangular: each token has those up to its own
            places = torch.cat([*(torch.arange(s - q, s) for q, s in lens), torch.zeros(padding)]) % CHUNK
            self.solved.inverse.mul_((torch.arange(CHUNK) <= places[:, None])[:, None])
        self.solved.decays.copy_(torch.rand(self.solved.decays.shape, generator=generator))
        self.block_size, more = block_size, {}
        if block_size:  # one state more is kept, at the last end of a block of the first sequence
            self.kept = torch.full((len(lens), max(s for _, s in lens) // block_size + 1), -1, dtype=torch.int32)
            self.kept[0, lens[0][1] // block_size - 1] = self.slots[-1]
            more = dict(block_size=block_size, checkpoint_indices=self.kept)
        batch = make_batch([q for q, _ in lens], [s for _, s in lens])
        self.plan = refattn.recurrent.plan(batch, state_indices=self.index, has_initial_state=self.has_state, **more)

    def launch(self, consumers, seed):
        """Return the outputs and the pool after a launch."""
        out, pool = torch.full((self.num_tokens, HEADS, 128), torch.nan, dtype=HALF), self.pool.clone()
        given = dict(
            tokens=recurrent._with_fixed_strides(recurrent._tokens_of(self.query, self.key, self.value)),
            states=States(pool, pool.stride()),
            output=chunks_hopper.Output(out, SCALE, *recurrent._fixed(out.stride())),
            tables=tables_of(self.plan, self.num_tokens),
            solved=self.solved,
            TILE=chunks_hopper.sizes_of(HEADS, consumers),
        )
        kernel = Interpreted(chunks_hopper._fold_kernel, seed)
        grid = len(self.lens) + 1, HEADS, 2 // consumers
        kernel[grid](*(given[name] for name in kernel.arg_names), num_warps=4)
        return out, pool

    def by_hand(self, dtype):
        """Return the same, one chunk after the other, with products in a type; operands are rounded as they are."""
        out, pool = torch.zeros(self.num_tokens, HEADS, 128, dtype=dtype), self.pool.to(dtype)
        row = 0
        for i, (query_len, seq_len) in enumerate(self.lens):
            for head in range(HEADS if query_len and self.index[i] >= 0 else 0):
                self._fold(i, head, row, query_len, seq_len - query_len, out, pool)
            row += query_len
        return out, pool

    def _fold(self, i, head, row, query_len, position, out, pool):
        dtype, solved, slot = out.dtype, self.solved, self.index[i]
        state = self.pool[slot, head].to(dtype) * self.has_state[i]
        for first in range(-(position % CHUNK), query_len, CHUNK):
            at = torch.arange(max(first, 0), min(first + CHUNK, query_len))
            rows, before = row + at, state.to(HALF).to(dtype)
            since, until = solved.decays[rows, head].to(dtype).unbind(1)
            if solved.inverse is None:
                values = solved.written[rows, head].to(dtype) - solved.answered[rows, head].to(dtype) @ before.T
            else:
                answers = self.key[rows, head // 2].to(dtype) @ before.T * since[:, None]
                more = (self.value[rows, head].to(dtype) - answers).to(HALF).to(dtype)
                values = solved.inverse[rows, head][:, at - first].to(dtype) @ more
            asked = self.query[rows, head // 2].to(dtype) @ before.T * since[:, None]
            weights = solved.weights[rows, head][:, at - first].to(dtype)
            out[rows, head] = (asked + weights @ values.to(HALF).to(dtype)) * SCALE
            kept = (values * until[:, None]).to(HALF).to(dtype)
            state = state * since[-1] + kept.T @ self.key[rows, head // 2].to(dtype)
            end = position + first + CHUNK
            if self.block_size and first + CHUNK <= query_len and end % self.block_size == 0:
                own = self.kept[i, end // self.block_size - 1]
                if own >= 0:
                    pool[own, head] = state
        pool[slot, head] = state


def hold(step, consumers, seed):
    out, pool = step.launch(consumers, seed)
    expected, low = step.by_hand(torch.float64), step.by_hand(torch.float32)
    assert_close(out, expected[0], low[0].to(HALF))
    assert_close(pool, expected[1], low[1])


each_form = pytest.mark.parametrize("by_inverse", [True, False], ids=["inverse", "products"])


@interpreted
@each_form
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize(
    ("lens", "more"),
    [
        (((64, 64),), {}),
        (((130, 230), (64, 64), (5, 70)), {}),
        (((1, 1), (63, 90), (0, 40), (65, 65)), dict(idle=(1,))),
        (((200, 256), (3, 128)), dict(block_size=128)),
    ],
    ids=["a-chunk", "ragged", "idle", "checkpoints"],
)
def test_chunks_are_folded_one_after_the_other(lens, more, consumers, by_inverse):
    """Sequences that begin inside a chunk and end inside one, states from zeros and from the pool, and padding."""
    hold(Step(lens, **more, by_inverse=by_inverse), consumers, seed=0)


@interpreted
@settings(max_examples=max(settings.default.max_examples // 2, 1))
@drawn(
    st.lists(
        st.tuples(st.sampled_from((0, 1, 3, 63, 64, 130)), st.sampled_from((0, 1, 64, 100))), min_size=1, max_size=4
    ),
    st.sampled_from((1, 2)),
    st.sampled_from((None, 64, 128)),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_prompts_in_any_order(lens, consumers, block_size, by_inverse, seed):
    """Whoever is first, warpgroups and what is asynchronous."""
    lens = [(q, q + more) for q, more in lens]
    if any(q for q, _ in lens):
        hold(Step(lens, seed % 100, block_size=block_size, by_inverse=by_inverse), consumers, seed)


@interpreted
@each_form
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_value_and_its_head(number, consumers, by_inverse):
    """A value that is NaN makes later outputs of it NaN, and no others; a key, those of its head.

    The first launch leaves NaN in all later rows of the chunk.
    """
    step = Step(((130, 130),), by_inverse=by_inverse)
    if by_inverse:
        step.value[70, 1, 5] = number
        step.solved.inverse[70:128, 2] = number
    else:
        step.solved.written[70:128, 1, 5] = number
        step.solved.answered[70:128, 2, 7] = number
    out, pool = step.launch(consumers, seed=0)
    bad = out[:130].isnan()
    assert not bad[:64].any() and not bad[:, 0].any() and not bad[:, 3].any()
    assert bad[70:, 1, 5].all() and not bad[:, 1, :5].any() and not bad[:, 1, 6:].any()
    assert bad[70:, 2].all() and pool[step.index[0]].isnan().flatten(1).any(1).tolist() == [False, True, True, False]


@gluon.jit
def round_to_16_bits(x, out, FINITE: gl.constexpr, dtype: gl.constexpr):
    at = gl.arange(0, 128, layout=gl.BlockedLayout([2], [32], [2], [0]))
    gl.store(out + at, _round(gl.load(x + at), FINITE, dtype))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_are_rounded_and_bounded_where_that_is_asked(dtype):
    """Of NaN and a bound the instructions return the bound, first the lowest number."""
    x = torch.cat([torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38]), torch.randn(123)])
    out, bounded = torch.zeros(2, 128, dtype=dtype)
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    Interpreted(round_to_16_bits)[(1,)](x, out, False, kind, num_warps=2)
    Interpreted(round_to_16_bits)[(1,)](x, bounded, True, kind, num_warps=2)
    ends = torch.finfo(dtype)
    assert torch.equal(out[1:], x.to(dtype)[1:]) and out[0].isnan() and torch.equal(bounded[5:], out[5:])
    assert bounded[:5].tolist() == [ends.min, ends.max, ends.min, ends.max, ends.min]


@pytest.fixture
def launched(monkeypatch, device):
    """Launch the kernel wherever it takes a call, and return the list of which calls it took."""
    taken, takes = [], chunks_hopper.takes
    if device == "cuda":
        if not chunks_hopper.is_there(torch.device(device)):
            pytest.skip("needs a Hopper GPU, or none")
    else:
        monkeypatch.setattr(chunks_hopper, "_fold_kernel", Interpreted(chunks_hopper._fold_kernel, 0))
        monkeypatch.setattr(chunks_hopper, "is_there", lambda device: True)
        monkeypatch.setattr(devices, "num_sms", lambda device: 1)
        monkeypatch.setattr(recurrent, "_operand", lambda query: torch.float16)
    monkeypatch.setattr(chunks_hopper, "takes", lambda *call: taken.append(takes(*call)) or taken[-1])
    return taken


@pytest.mark.parametrize("sms", [1, 1000], ids=["two-consumers", "one-consumer"])
@pytest.mark.parametrize("block_size", [None, 64, 128])
@each_form
def test_a_call_over_prompts_agrees_with_the_reference(launched, monkeypatch, device, sms, block_size, by_inverse):
    """Ragged prompts and a decode, new and old states, padding, rows of nobody, and states that are kept."""
    monkeypatch.setattr(devices, "num_sms", lambda device: sms)
    monkeypatch.setattr(chunks_hopper, "INVERSE", by_inverse)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    batch = lengths((130, 20, 0, 65, 1), (0, 70, 64, 127, 5))
    step, tables = draw(216 + 3, dk=128, dv=128, dtype=dtype), dict(state_indices=ints([2, 0, 5, -1, 1]))
    tables["has_initial_state"] = torch.tensor([False, True, True, True, True])
    if block_size is not None:
        kept = torch.full((5, 192 // block_size + 1), -1, dtype=torch.int32)
        kept[0, 128 // block_size - 1] = 6
        tables |= dict(block_size=block_size, checkpoint_indices=kept)
    assert_twins_agree("triton", step, draw_states(7, 4, 128, 128), batch, **tables)
    assert launched == [True]


@each_form
@pytest.mark.parametrize(
    ("name", "number"),
    [("log_decay", torch.nan)]
    + [(name, number) for name in ("query", "key", "value", "beta", "states") for number in (torch.nan, torch.inf)],
)
def test_what_is_not_finite_is_where_the_reference_has_it(launched, monkeypatch, device, name, number, by_inverse):
    """In the first, a middle and the last token of a chunk, and of a sequence; and in one value of one head."""
    monkeypatch.setattr(chunks_hopper, "INVERSE", by_inverse)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    batch, tables = lengths((0, 110, 3), (5, 30, 0)), dict(state_indices=ints([0, 1, 2]))  # chunks begin at 0, 34, 98
    clean, before = draw(113, h=1, hv=2, dk=128, dv=128, dtype=dtype), draw_states(3, 2, 128, 128)
    for token in (1,) if name == "states" else (0, 34, 50, 97, 109, 111):
        step, pool = type(clean)(*(x.clone() for x in clean)), before.clone()
        if name == "states":
            pool[token, 1, 0, 3] = number
        else:
            row = getattr(step, name)[token]
            (row[0] if name in ("query", "key") else row[1:]).view(-1)[-1] = number
        ours, wide = pool.clone(), pool.double()
        out = attend("triton", step, ours, batch, **tables)
        expected = attend("reference", step.to(torch.float64), wide, batch, **tables)
        assert not expected.isfinite().all() and expected[:, 0].isfinite().any()
        assert torch.equal(out.isfinite(), expected.isfinite()), f"outputs, token {token}"
        assert torch.equal(ours.isfinite(), wide.isfinite()), f"states, token {token}"
    assert any(launched)


def test_another_layer_replays_the_launch_with_its_own_tensors(launched, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    batch, tables = moved(lengths((70, 20), (0, 30)), device), dict(state_indices=ints([1, 0]).to(device))

    def attend(plan, layer):
        step, pool = draw(90, dk=128, dv=128, dtype=dtype, seed=layer), draw_states(2, 4, 128, 128, seed=layer)
        pool = pool.to(device)
        with use_kernel("triton"):
            out = fastattn.recurrent.attention(*(x.to(device) for x in step), pool, plan, RecurrentOptions())
        return torch.cat([out.flatten().float(), pool.flatten()])

    plan = fastattn.recurrent.plan(batch, **tables)
    layers = [attend(plan, layer) for layer in range(2)]
    assert launched == [True]
    again = [attend(fastattn.recurrent.plan(batch, **tables), layer) for layer in range(2)]
    assert all(map(torch.equal, layers, again)) and not torch.equal(*layers)
