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
from tests.helpers.states import assert_twins_agree, draw, draw_states, ints, lengths, moved
from tests.helpers.tolerance import assert_close
from twinattn.course.gluon.interpret import Interpreted

interpreted = pytest.mark.skipif(
    not launch.INTERPRETED, reason="needs Triton's interpreter, which is on where there is no GPU"
)

HEADS, KEY_HEADS, SLOTS, SCALE, CHUNK = 4, 2, 9, 0.7, chunks_hopper.CHUNK
HALF = torch.bfloat16


class Step:
    """A step of prompts: tokens, the intra-chunk terms of the first launch, a pool of states, and a plan."""

    def __init__(self, lens, seed=0, idle=(), block_size=None, padding=3):
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
        self.solved = recurrent._solved(self.query, self.value, per_channel=False, delta=True, chunk=CHUNK)
        for x, size in ((self.solved.written, 1), (self.solved.answered, 12), (self.solved.weights, 8)):
            x.copy_(draw(*x.shape) / size)
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
            values = solved.written[rows, head].to(dtype) - solved.answered[rows, head].to(dtype) @ before.T
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


@interpreted
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
def test_chunks_are_folded_one_after_the_other(lens, more, consumers):
    """Sequences that begin inside a chunk and end inside one, states from zeros and from the pool, and padding."""
    hold(Step(lens, **more), consumers, seed=0)


@interpreted
@settings(max_examples=max(settings.default.max_examples // 2, 1))
@drawn(
    st.lists(
        st.tuples(st.sampled_from((0, 1, 3, 63, 64, 130)), st.sampled_from((0, 1, 64, 100))), min_size=1, max_size=4
    ),
    st.sampled_from((1, 2)),
    st.sampled_from((None, 64, 128)),
    st.integers(0, 10**6),
)
def test_any_prompts_in_any_order(lens, consumers, block_size, seed):
    """Whoever is first, warpgroups and what is asynchronous."""
    lens = [(q, q + more) for q, more in lens]
    if any(q for q, _ in lens):
        hold(Step(lens, seed % 100, block_size=block_size), consumers, seed)


@interpreted
def test_what_is_not_finite_stays_with_its_value_and_its_head():
    """A value that is NaN makes later outputs of it NaN, and no others; a key, those of its head.

    The first launch leaves NaN in all later rows of the chunk, and weights of 0 for tokens after a row's own: earlier
    rows stay as they are.
    """
    step = Step(((130, 130),))
    step.solved.weights[:130] *= (torch.arange(CHUNK) <= torch.arange(130)[:, None] % CHUNK)[:, None]
    step.solved.written[70:128, 1, 5] = torch.nan
    step.solved.answered[70:128, 2, 7] = torch.nan
    out, pool = step.launch(consumers=2, seed=0)
    bad = out[:130].isnan()
    assert not bad[:70].any() and not bad[:, 0].any() and not bad[:, 3].any()
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
    taken, takes, solved = [], chunks_hopper.takes, recurrent._solved
    if device == "cuda":
        if not chunks_hopper.is_there(torch.device(device)):
            pytest.skip("needs a Hopper GPU, or no GPU, where the kernel is interpreted")
    else:

        def solved_in_16_bits(query, value, **sizes):
            made = solved(query, value, **sizes)
            return made._replace(**{name: getattr(made, name).half() for name in ("written", "answered", "weights")})

        monkeypatch.setattr(chunks_hopper, "_fold_kernel", Interpreted(chunks_hopper._fold_kernel, 0))
        monkeypatch.setattr(chunks_hopper, "is_there", lambda device: True)
        monkeypatch.setattr(devices, "num_sms", lambda device: 1)
        monkeypatch.setattr(recurrent, "_solved", solved_in_16_bits)
    monkeypatch.setattr(chunks_hopper, "takes", lambda *call: taken.append(takes(*call)) or taken[-1])
    return taken


@pytest.mark.parametrize("sms", [1, 1000], ids=["two-consumers", "one-consumer"])
@pytest.mark.parametrize("block_size", [None, 64, 128])
def test_a_call_over_prompts_agrees_with_the_reference(launched, monkeypatch, device, sms, block_size):
    """Ragged prompts, a decode, an idle sequence and one without a slot, initial states, padding rows, checkpoints."""
    monkeypatch.setattr(devices, "num_sms", lambda device: sms)
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
