"""Prompts of recurrent layers by FlashQLA: what it is asked, what it refuses, what comes out.

Where there is no GPU, a double stands in for it. It reads the lengths and the parts as the package does, leaves
unwritten what the package leaves unwritten, and computes each part by the reference.
"""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import fastattn.recurrent
import refattn.recurrent
from fastattn.kernels import Problem, order
from fastattn.kernels.device import cannot_import
from fastattn.kernels.flash import flash_qla
from fastattn.kernels.flash.states import lengths_of
from fastattn.kernels.kernel import find
from fastattn.kernels.problem import problem_of
from refattn.batch import Batch
from refattn.metadata import make_batch
from refattn.options import RecurrentOptions
from tests.helpers.states import Step, assert_twins_agree, attend, draw, ints, lengths
from twinattn.kit import assert_close

CUDA = torch.device("cuda")
SIZE, CHUNK = 128, 64
LENS, CONTEXTS = (70, 0, 1, 130, 5, 3), (0, 9, 4, 3, 0, 6)  # the fourth and the last have slots of padding
SLOTS, PADDING_ROWS = (5, 0, 2, -1, 6, -3), 4


@dataclass
class Context:
    """`FlashQLACPContext`, as far as calls of one card go."""

    is_inter: bool = False
    is_intra: bool = False
    cu_seqlens: torch.Tensor | None = None
    intra_cp_cu_seqlens: torch.Tensor | None = None
    seq_map_r2c: torch.Tensor | None = None
    seq_map_c2r: torch.Tensor | None = None
    ht_mask: torch.Tensor | None = None


def fold(step: Step, rows: range, state, scale):
    """Return the outputs of some rows, and the state after them."""
    batch, pool = make_batch([len(rows)], [len(rows) + 1]), state[None].float().clone()
    plan = refattn.recurrent.plan(batch, state_indices=ints([0]))
    tokens = (x[rows.start : rows.stop].float() for x in step)
    return refattn.recurrent.attention(*tokens, pool, plan, RecurrentOptions(scale)), pool[0]


class FlashQLA:
    """Answers as the package does, and remembers what it was asked."""

    def __init__(self, chunks_in_part: int) -> None:
        self.chunks_in_part = chunks_in_part
        self.calls: list[dict] = []
        self.asked: list[dict] = []

    def decide(self, *, num_chunks, num_v_heads, P, chunk, is_train):
        assert min(num_chunks) > 0 and chunk == CHUNK and not is_train
        self.asked.append(dict(num_chunks=num_chunks, num_v_heads=num_v_heads, sms=P))
        return bool(self.chunks_in_part), self.chunks_in_part or None

    def forward(
        self, q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True,
        output_h=False, auto_cp=True, state_v_first=False, enable_fwd_cp_cache=False, cp_context=None, is_train=None,
    ):  # fmt: skip
        """Compute `chunk_gated_delta_rule_fwd`, whose 0 for a scale is the default."""
        self.calls.append(dict(tokens=(q, k, v, g, beta), scale=scale, context=cp_context))
        assert output_final_state and state_v_first and not (output_h or enable_fwd_cp_cache) and cu_seqlens is None
        for x in (q, k, v, g, beta, initial_state):
            assert x.is_contiguous() and x.data_ptr() % 16 == 0
        assert len(q) == 1 and q.shape[-1] == v.shape[-1] == SIZE and q.dtype == k.dtype == v.dtype
        assert g.dtype == torch.float32 and g[g.isfinite()].min() >= -30 and not g.isinf().any()
        step, scale, context = Step(q[0], k[0], v[0], g[0], beta[0]), scale or SIZE**-0.5, cp_context
        ends = context.cu_seqlens.tolist()
        self.check_chunks(context.cu_seqlens)
        out, after = torch.full_like(v, torch.nan), torch.full((len(ends) - 1, *v.shape[2:], SIZE), torch.nan)
        assert initial_state.shape == after.shape and initial_state.dtype == torch.float32
        before, cu_parts, sequences = initial_state, ends, range(len(ends) - 1)
        if context.is_intra:
            self.check_chunks(context.intra_cp_cu_seqlens, only_its_length=True)
            cu_parts, sequences = context.intra_cp_cu_seqlens.tolist(), context.seq_map_c2r.tolist()
            before = self.states_before(step, context, initial_state, scale)
        for part in reversed(range(len(cu_parts) - 1)):  # in any order, as programs of a grid are
            rows, sequence = range(cu_parts[part], cu_parts[part + 1]), sequences[part]
            out[0, rows.start : rows.stop], state = fold(step, rows, before[part], scale)
            if ends[sequence + 1] == cu_parts[part + 1]:
                after[sequence] = state
        return g, None, out, None, after, None

    @staticmethod
    def check_chunks(ends, *, only_its_length=False):
        """Read the tables that belong to lengths; without them, the package would read the lengths on the host."""
        size, offsets, count, chunks = ends._flash_qla_prepared_varlen
        assert size == CHUNK and offsets.shape == ends.shape and offsets.dtype == ends.dtype == torch.int32
        if only_its_length:
            return
        assert chunks.shape == (count, 2) and chunks.is_contiguous()
        covered = torch.zeros(int(ends[-1]), dtype=torch.int32)
        for sequence, number in chunks.tolist():
            begin = int(ends[sequence]) + CHUNK * number
            covered[begin : max(begin, min(begin + CHUNK, int(ends[sequence + 1])))] += 1
        assert (covered == 1).all(), "a token is in no chunk, or in several"

    @staticmethod
    def states_before(step, context, initial_state, scale):
        """Return the state before each part. The last part of a sequence is not computed for that: it leaves zeros."""
        ends, first, last = context.intra_cp_cu_seqlens.tolist(), context.seq_map_r2c.tolist(), context.ht_mask
        assert last.dtype == torch.bool and len(last) == len(ends) - 1 and len(first) == len(initial_state) + 1
        before = torch.full((len(last), *initial_state.shape[1:]), torch.nan)
        for sequence in range(len(first) - 1):
            state = initial_state[sequence]
            for part in range(first[sequence], first[sequence + 1]):
                before[part] = state
                rows = range(ends[part], ends[part + 1])
                assert last[part] or (len(rows) and len(rows) % CHUNK == 0), "a part before others is of whole chunks"
                state = torch.zeros_like(state) if last[part] else fold(step, rows, state, scale)[1]
        return before


@pytest.fixture(params=[0, 1], ids=["whole", "in-parts"])
def package(request, monkeypatch, device):
    """A double of the package, which divides sequences into parts of so many chunks, or does not."""
    if device == "cuda":
        pytest.skip("a double of it computes on a CPU; the last tests of this file run the package itself")
    double = FlashQLA(request.param)
    modules = {name: ModuleType(name) for name in ("flash_qla", flash_qla.CONTEXT, flash_qla.DECISION)}
    modules["flash_qla"].chunk_gated_delta_rule_fwd = double.forward
    modules[flash_qla.CONTEXT].FlashQLACPContext = Context
    modules[flash_qla.DECISION].decide = double.decide
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_qla, "num_sms", lambda device: 132)
    flash_qla._chunks_in_part.cache_clear()
    yield double
    flash_qla._chunks_in_part.cache_clear()


def drawn(*, hv=2, pool=torch.float32):
    """Draw a ragged step with padding, idle sequences and gates of every kind; unused slots and rows are NaN."""
    num_rows = sum(LENS) + PADDING_ROWS
    step = draw(num_rows, h=1, hv=hv, dk=SIZE, dv=SIZE)
    step = Step(*(x.half() for x in step[:3]), *step[3:])
    states = torch.full((8, hv, SIZE, SIZE), torch.nan, dtype=pool)
    states[2] = torch.randn(hv, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    batch = make_batch(list(LENS), [q + c for q, c in zip(LENS, CONTEXTS, strict=True)])
    for x in step:
        x[sum(LENS) :] = torch.nan
        x[71:201] = torch.nan  # those of the first sequence of padding
    return step, states, batch


def planned(batch, module=fastattn.recurrent, **tables):
    return module.plan(batch, state_indices=ints(SLOTS), **tables)


@pytest.mark.covers("R201", "R202", "R208")
@pytest.mark.parametrize(
    "pool", [pytest.param(torch.float32, marks=pytest.mark.core), torch.float16], ids=["float32", "float16"]
)
@pytest.mark.parametrize("scale", [None, 0.0, -0.3], ids=["usual", "zero", "negative"])
def test_it_agrees_with_the_reference(package, scale, pool):
    """With ragged lengths, padding, idle sequences, decays of exactly 0, and NaN in all memory that nobody may see."""
    step, states, batch = drawn(pool=pool)
    options, strided = RecurrentOptions(scale), states.mT.contiguous().mT
    out = flash_qla.recurrent(*step, strided, planned(batch), options, None)
    answers = []
    for dtype in (torch.float64, torch.float16):
        after = states.to(torch.promote_types(states.dtype, dtype))
        plan = planned(batch, refattn.recurrent)
        answers.append((refattn.recurrent.attention(*(x.to(dtype) for x in step), after, plan, options), after))
    (expected, after), (low, low_after) = answers
    assert_close(out, expected, low, name="out")
    used = [5, 2, 6]
    assert_close(strided[used], after[used], low_after[used], name="states")
    assert strided[[0, 1, 3, 4, 7]].isnan().all(), "a slot was written that no sequence has"
    padding = torch.cat((torch.arange(71, 201), torch.arange(206, 213)))
    assert not out[padding].any()
    assert package.calls[0]["scale"] == (scale or (1.0 if scale == 0 else SIZE**-0.5))


def test_out_is_written_and_returned(package):
    step, states, batch = drawn()
    memory = torch.full((len(step.value), SIZE, 2), torch.nan, dtype=torch.float16).transpose(1, 2)
    copy = states.clone()
    out = flash_qla.recurrent(*step, states, planned(batch), RecurrentOptions(), memory)
    assert out is memory
    assert torch.equal(out, flash_qla.recurrent(*step, copy, planned(batch), RecurrentOptions(), None))


def test_rows_with_gaps_and_gates_of_other_types_are_copied(package):
    step, states, batch = drawn()
    wide = Step(*(torch.stack((x, x), -1)[..., 0] for x in step[:3]), step.log_decay.double(), step.beta.double())
    shifted = torch.empty(step.key.numel() + 1, dtype=torch.float16)[1:].view_as(step.key).copy_(step.key)
    copies = states.clone(), states.clone()
    out = flash_qla.recurrent(*step, states, planned(batch), RecurrentOptions(), None)
    for other, pool in zip((wide, step._replace(key=shifted)), copies, strict=True):
        assert torch.equal(out, flash_qla.recurrent(*other, pool, planned(batch), RecurrentOptions(), None))


def test_layers_of_a_step_share_its_tables(package):
    """Lengths that are written in place are divided again."""
    step, states, batch = drawn()
    plan = planned(batch)
    for _ in range(2):
        flash_qla.recurrent(*step, states.clone(), plan, RecurrentOptions(), None)
    first, second = (call["context"] for call in package.calls)
    assert first is second
    batch.cu_seqlens_q[3] += 0
    flash_qla.recurrent(*step, states.clone(), plan, RecurrentOptions(), None)
    assert package.calls[-1]["context"] is not first
    (asked,) = package.asked  # by sizes that the host knows, once
    assert asked == dict(num_chunks=[3, *[1] * 5], num_v_heads=2, sms=132)


@pytest.mark.parametrize("package", [0], indirect=True)
@pytest.mark.parametrize(("lens", "rows"), [((), 3), ((0, 0), 0)], ids=["no sequence", "no row"])
def test_a_step_of_nothing_asks_for_nothing(package, lens, rows):
    ends = torch.zeros(len(lens) + 1, dtype=torch.int32)
    batch = Batch(ends, torch.ones(len(lens), dtype=torch.int32), None, 0, 1)
    plan = fastattn.recurrent.plan(batch, state_indices=torch.arange(len(lens)).int())
    step = draw(rows, h=1, hv=1, dk=SIZE, dv=SIZE)
    states = torch.full((2, 1, SIZE, SIZE), torch.nan)
    out = flash_qla.recurrent(*step, states, plan, RecurrentOptions(), None)
    assert out.shape == (rows, 1, SIZE) and not out.any() and states.isnan().all() and not package.calls


@pytest.mark.parametrize("lens", [(1,), (64, 64), (0, 0, 200, 1), (63, 65, 129), (7,) * 40], ids=str)
@pytest.mark.parametrize("part", [64, 128, 4096])
def test_chunks_and_parts_hold_each_token_once(lens, part, device):
    rows = sum(lens) + 9
    cu = torch.tensor([0, *lens], device=device).cumsum(0, dtype=torch.int32)
    tables = lengths_of(cu, rows, chunk=CHUNK, part=part)
    ends, chunks, cu_parts, sequences, first_parts, is_last = (x.tolist() for x in tables)
    b = len(lens)
    assert ends == [*cu.tolist(), sum(lens)]
    found = [pair for pair in chunks if pair[0] < b]
    assert found == [[i, j] for i, length in enumerate(lens) for j in range(-(-length // CHUNK))]
    assert [pair for pair in chunks if pair[0] >= b] == [[b, 0]] * (len(chunks) - len(found))
    assert len(is_last) == len(sequences) == len(cu_parts) - 1 == first_parts[-1] and cu_parts[-1] == sum(lens)
    for i, length in enumerate([*lens, 0]):
        mine = range(first_parts[i], first_parts[i + 1])
        sizes = [cu_parts[p + 1] - cu_parts[p] for p in mine]
        needed = max(1, -(-length // part))
        assert cu_parts[first_parts[i]] == ends[i] and sum(sizes) == length
        assert sizes[: needed - 1] == [part] * (needed - 1) and not any(sizes[needed:])
        assert [sequences[p] for p in mine] == [i] * needed + [b] * (len(mine) - needed)
        assert [is_last[p] for p in mine] == [False] * (needed - 1) + [True] * (len(mine) - needed + 1)


# --- the choice ---


USUAL = Problem(
    "recurrent",
    CUDA,
    torch.bfloat16,
    head_size=SIZE,
    value_head_size=SIZE,
    max_query_len=8192,
    num_tokens=8192,
    num_seqs=1,
)
MANY = USUAL._replace(max_query_len=1024, num_seqs=8)


@pytest.fixture
def on_hopper(monkeypatch):
    """FlashQLA is there, on a Hopper GPU."""
    monkeypatch.setattr(flash_qla, "capability", lambda device: (9, 0))
    monkeypatch.setattr("fastattn.kernels.triton.capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_qla, "_cannot_load", lambda: None)
    monkeypatch.setattr("fastattn.kernels.triton.cannot_import", lambda *_: None)
    order.forget()
    yield
    order.forget()


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(device=torch.device("cpu")), "computes on CUDA"),
        (dict(dtype=torch.float32), "computes float16 and bfloat16, not torch.float32"),
        (dict(head_size=64), "keys and values of 128 elements, not 64 and 128"),
        (dict(value_head_size=256), "not 128 and 256"),
        (dict(per_channel=True), "a decay per head"),
        (dict(per_draft=True), "none per draft"),
        (dict(asks=frozenset({"StatePlan.num_accepted"})), "none per draft"),
        (dict(asks=frozenset({"RecurrentOptions.delta"})), "computes the delta rule"),
        (dict(asks=frozenset({"StatePlan.checkpoint_indices"})), "keeps no states where blocks end"),
        (dict(asks=frozenset({"StatePlan.new"})), "does not know StatePlan.new"),
    ],
    ids=str,
)
def test_it_refuses_by_name(changed, reason):
    assert order.unsupported_reason("flash_qla", USUAL) is None
    assert reason in order.unsupported_reason("flash_qla", USUAL._replace(**changed))


def test_it_needs_hopper(monkeypatch):
    monkeypatch.setattr(flash_qla, "capability", lambda device: (8, 0))
    assert "compute capability 9.0, not 8.0" in order.unsupported_reason("flash_qla", USUAL)


@pytest.mark.usefixtures("on_hopper")
def test_it_is_chosen_for_long_prompts_where_it_is():
    assert order.choose(MANY).name == "flash_qla"
    assert order.choose(MANY._replace(max_query_len=order.LONG_PROMPT - 1)).name == "triton"
    assert order.choose(MANY._replace(per_channel=True)).name == "triton"
    with order.use_kernel("triton"):
        assert order.choose(MANY).name == "triton"


@pytest.mark.usefixtures("on_hopper")
def test_one_prompt_that_is_not_very_long_is_for_ours():
    assert order.choose(USUAL).name == "triton"
    assert order.choose(USUAL._replace(max_query_len=order.UNDIVIDED + 1)).name == "flash_qla"
    assert order.choose(USUAL._replace(dtype=torch.float16)).name == "flash_qla"


def test_where_it_is_not_ours_is_chosen(monkeypatch, on_hopper):
    monkeypatch.setattr(flash_qla, "_cannot_load", lambda: "the package flash-qla can't be imported: no module")
    assert order.choose(MANY).name == "triton"


def test_a_package_that_breaks_while_it_is_imported_is_not_there(monkeypatch):
    """FlashQLA looks at the GPU then, and TileLang for a compiler."""
    flash_qla._cannot_load.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_qla", ModuleType("flash_qla"))
    cannot_import.cache_clear()
    assert "has no chunk_gated_delta_rule_fwd" in flash_qla._cannot_load()

    def breaks(*_):
        raise RuntimeError("no GPU")

    flash_qla._cannot_load.cache_clear()
    monkeypatch.setattr(flash_qla, "cannot_import", breaks)
    assert flash_qla._cannot_load() == "the package flash-qla can't be imported: no GPU"
    flash_qla._cannot_load.cache_clear()
    cannot_import.cache_clear()


def test_a_problem_says_what_it_has_to_know():
    step, states, batch = drawn()
    plan = planned(batch)
    arguments = dict(zip(Step._fields, step, strict=True)) | dict(states=states, plan=plan, options=RecurrentOptions())
    problem = problem_of("recurrent", arguments)
    assert (problem.num_tokens, problem.num_seqs, problem.max_query_len) == (len(step.query), len(LENS), 130)
    assert not problem.per_channel and not problem.per_draft
    arguments["log_decay"] = step.log_decay[..., None].expand(-1, -1, SIZE)
    arguments["plan"] = fastattn.recurrent.plan(make_batch([1], [2]), state_indices=ints([[0, 1]]))
    problem = problem_of("recurrent", arguments)
    assert problem.per_channel and problem.per_draft


def test_its_function_is_found():
    module, name = find(flash_qla.KERNEL.functions["recurrent"])
    assert getattr(module, name) is flash_qla.recurrent


# --- the package itself, on a GPU ---


@pytest.fixture
def on_gpu(device):
    """The package, if it is here."""
    if device != "cuda":
        pytest.skip("the package runs on a GPU; above, a double of it computes on a CPU")
    reason = order.unsupported_reason("flash_qla", USUAL)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("lens", "contexts", "heads"),
    [
        *(((length,), (0,), (1, 2)) for length in (1, 63, 64, 65, 1000)),
        ((4096,), (7,), (1, 2)),  # in parts
        ((4096, 0, 1, 3000, 64, 500), (0, 3, 9, 1, 0, 2), (2, 4)),
        ((300,) * 24, (0, 5) * 12, (1, 4)),  # enough programs for a GPU
    ],
    ids=str,
)
def test_the_package_agrees_with_the_reference(lens, contexts, heads, dtype):
    h, hv = heads
    step = draw(sum(lens) + 3, h=h, hv=hv, dk=SIZE, dv=SIZE)
    step = Step(*(x.to(dtype) for x in step[:3]), *step[3:])
    states = torch.randn(len(lens) + 2, hv, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(len(lens) + 2, generator=torch.Generator().manual_seed(2))[: len(lens)].int()
    assert_twins_agree("flash_qla", step, states, lengths(lens, contexts), state_indices=slots)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e4], ids=str)
def test_the_package_reads_no_memory_that_nobody_may_see(poison):
    """Outputs and states of the others are the same bits, whatever unused slots and the rows of padding hold."""
    step, states, batch = drawn()
    unused, rows = states.isnan(), step.value.isnan().any(-1).any(-1)
    answers = []
    for value in (0.0, poison):
        for x in step:
            x[rows] = value
        pool = states.masked_fill(unused, value)
        out = attend("flash_qla", step, pool, batch, state_indices=ints(SLOTS))
        assert not out[rows].any()
        answers.append((out, pool[[5, 2, 6]]))
    assert all(map(torch.equal, *answers)) and answers[0][0].isfinite().all()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("length", [700, 4096], ids=["whole", "in-parts"])
def test_a_captured_step_replays_with_other_lengths_and_slots(length):
    """The first eager call has prepared all that depends on sizes; all else is read on the GPU."""
    step = Step(*(x.to("cuda") for x in draw(2 * length, h=1, hv=2, dk=SIZE, dv=SIZE)))
    step = Step(*(x.bfloat16() for x in step[:3]), *step[3:])
    first = torch.randn(6, 2, SIZE, SIZE, device="cuda")
    batch = make_batch([length, length], [length, length + 5], device="cuda")
    slots, states, has_state = ints([1, 4]).cuda(), first.clone(), torch.tensor([False, True], device="cuda")
    tables = dict(state_indices=slots, has_initial_state=has_state)

    def call(pool, plan):
        with order.use_kernel("flash_qla"):
            return fastattn.recurrent.attention(*step, pool, plan)

    plan = fastattn.recurrent.plan(batch, **tables)
    call(states, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(states, plan)
    batch.cu_seqlens_q.copy_(ints([0, 130, 200]))
    batch.seq_lens.copy_(ints([150, 70]))
    slots.copy_(ints([3, 0]))
    has_state.copy_(torch.tensor([True, False]))
    states.copy_(first)
    graph.replay()
    expected_states = first.clone()
    expected = call(expected_states, fastattn.recurrent.plan(batch, **tables))
    assert torch.equal(out, expected) and torch.equal(states, expected_states)
    assert not out[200:].any() and out[:200].any()
