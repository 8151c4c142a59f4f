"""The ladder of states: each rung is right; that it is one small change is a test of all ladders."""

import os

import pytest
import torch
from torch.nn.functional import normalize

pytest.importorskip("triton", reason="Triton comes for Linux only")

from refattn import replay
from refattn.batch import Batch
from refattn.modes import computing_in
from refattn.rings import Ring
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.tolerance import assert_close
from twinattn.course import ladder
from twinattn.course.batches import States
from twinattn.kit.check import check
from twinattn.kit.tolerance import WIDER

RUNGS = ladder.rungs("states")
REPLAYED = RUNGS[10:]  # for decodes alone: a checkpoint, and a ring of inputs since
COPIES = 2  # the first rung that reads and writes states where they are
PROPERTIES = ("call", "writes", "answer", "free slots", "beginnings", "steps", "strong decays", "read scale")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies matrices of bfloat16 wrongly
CASES = {
    "prompts": States(((20, 20), (3, 9), (0, 5), (1, 1), (17, 40)), heads=4, key_heads=2, size=32),
    "one-head": States(((33, 40),), heads=1, key_heads=1, size=64),
    "decodes": States(((1, 2),) * 6, heads=4, key_heads=2, size=32, ring=4),
    "nothing": States(((0, 3), (0, 0)), heads=2, key_heads=2, size=32),
}
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)


@pytest.fixture(autouse=True)
def a_few_tokens_are_several_chunks(monkeypatch):
    """Make chunks small, so that short prompts have several."""
    for rung in RUNGS:
        for name, value in dict(CHUNK=16, VALUES=16, MORE_VALUES=32).items():
            if hasattr(rung.load(), name):
                monkeypatch.setattr(rung.load(), name, value)


def inputs_of(batch, dtype, device="cpu"):
    """Return the inputs of a batch, with NaN in slots of no sequence, in those of new ones, and past the cursors."""
    inputs = batch.make_inputs(torch.device("cpu"))
    unread = torch.ones(len(inputs["states"]), dtype=torch.bool)
    unread[inputs["state_indices"][inputs["has_initial_state"]].long()] = False
    for name in ("states", "checkpoints", "ring_key", "ring_written", "ring_log_decay"):
        if name in inputs:
            inputs[name][unread] = torch.nan
    if batch.ring:
        past = torch.arange(batch.ring) >= inputs["cursors"][:, None]
        for name in ("ring_key", "ring_written", "ring_log_decay"):
            inputs[name][past] = torch.nan
    inputs = {x: y.to(dtype) if torch.is_tensor(y) and y.dtype == torch.bfloat16 else y for x, y in inputs.items()}
    return {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}


def expect(batch, given, dtype):
    """Return the outputs of the formula and the states after it, in a wider type, and the outputs in its own."""
    wide = {x: y.to(WIDER[dtype]) if torch.is_tensor(y) and y.is_floating_point() else y for x, y in given.items()}
    wide |= {"states": wide["states"].clone()}
    ref = RUNGS[0].load().attention(**ladder._named(RUNGS[0].load().attention, wide))
    with computing_in(dtype):
        low = ladder.call_of(RUNGS[0], batch, given)()
    return ref, wide["states"], low


def states_after(given):
    """Return the states that a rung left: those of the pool, or what a checkpoint and its ring are."""
    if "checkpoints" not in given:
        return given["states"]
    plan_of = dict(state_indices=given["state_indices"], cursors=given["cursors"], ring_size=given["ring_key"].shape[1])
    batch = Batch(given["cu_seqlens_q"], given["seq_lens"], None, 1, given["max_seq_len"])
    plan = replay.plan(batch, **plan_of, has_initial_state=given["has_initial_state"])
    replay.advance(given["cursors"], plan)
    ring = Ring(given["ring_key"], given["ring_written"], given["ring_log_decay"])
    replay.flush([given["checkpoints"]], [ring], given["cursors"], given["state_indices"])
    return given["checkpoints"]


def run(rung, given):
    """Call a rung on copies, and return its outputs and the states after it, on the CPU."""
    given = {name: x.clone() if torch.is_tensor(x) else x for name, x in given.items()}
    if rung not in REPLAYED:
        given = {name: x for name, x in given.items() if name != "checkpoints"}
    out = rung.load().attention(**ladder._named(rung.load().attention, given)).cpu()
    return out, states_after({name: x.cpu() if torch.is_tensor(x) else x for name, x in given.items()})


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
@each_rung
def test_each_rung_is_right(rung, name, dtype, device):
    batch = CASES[name]
    torch.manual_seed(0)
    given = inputs_of(batch, dtype)
    if ladder.lacking(rung, given):
        assert rung in REPLAYED and name != "decodes"
        return
    ref, states, low = expect(batch, given, dtype)
    out, own = run(rung, {name: x.to(device) if torch.is_tensor(x) else x for name, x in given.items()})
    assert_close(out, ref, low)
    used = given["state_indices"][given["cu_seqlens_q"].diff() > 0].long()
    rounded = 1e-5 if dtype == torch.float32 else 1e-2  # the operands of products in a chunk have 16 bits
    torch.testing.assert_close(own[used].double(), states[used].double(), atol=rounded, rtol=rounded)
    others = torch.ones(len(own), dtype=torch.bool)
    others[used] = False
    assert rung in REPLAYED or torch.equal(own[others].nan_to_num(7.0), given["states"][others].nan_to_num(7.0))


@pytest.mark.skipif(INTERPRETED, reason="for the chunks that are launched")
@each_rung
def test_each_rung_is_right_in_the_sizes_of_a_model(rung, device, monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(0)
    batch = States(((1, 2),) * 20, ring=16) if rung in REPLAYED else States(((300, 300), (64, 70), (1, 5)))
    given = inputs_of(batch, HALF)
    ref, _, low = expect(batch, given, HALF)
    out, _ = run(rung, {name: x.to(device) if torch.is_tensor(x) else x for name, x in given.items()})
    assert_close(out, ref, low)


@each_rung
def test_keys_may_be_alike(rung, device):
    """Then the matrix of a chunk is as far from 0 as it can be, and its powers are large."""
    torch.manual_seed(0)
    batch = CASES["decodes" if rung in REPLAYED else "one-head"]
    given = inputs_of(batch, torch.float32)
    given["key"] = normalize(torch.ones_like(given["key"]) + 1e-3 * given["key"], dim=-1)
    given |= dict(beta=torch.ones_like(given["beta"]), log_decay=torch.zeros_like(given["log_decay"]))
    ref, _, low = expect(batch, given, torch.float32)
    out, _ = run(rung, {name: x.to(device) if torch.is_tensor(x) else x for name, x in given.items()})
    assert_close(out, ref, low)


@pytest.mark.parametrize("rung", REPLAYED, ids=lambda rung: rung.name)
def test_rings_fill_and_empty_over_many_decodes(rung, device):
    """Ten steps, with rings of four: outputs are those of a state that is written in each."""
    torch.manual_seed(0)
    steps, room = 10, 4
    whole = States(((steps, steps + 1),) * 3, heads=4, key_heads=2, size=32)
    given = inputs_of(whole, torch.float32)
    ref, _, low = expect(whole, given, torch.float32)
    first = inputs_of(States(((1, 2),) * 3, heads=4, key_heads=2, size=32, ring=room), torch.float32)
    first |= dict(checkpoints=given["states"].clone(), state_indices=given["state_indices"])
    first |= dict(cursors=torch.zeros_like(first["cursors"]), has_initial_state=given["has_initial_state"])
    kept = {name: x.to(device) if torch.is_tensor(x) else x for name, x in first.items()}
    outs = []
    for step in range(steps):
        rows = torch.arange(3) * steps + step
        for name in ("query", "key", "value", "log_decay", "beta"):
            kept[name] = given[name][rows].to(device)
        outs.append(rung.load().attention(**ladder._named(rung.load().attention, kept)).cpu())
        slots = kept["state_indices"].long()
        kept["cursors"][slots] = (kept["cursors"][slots] + 1) % room
    assert_close(torch.stack(outs, 1).flatten(0, 1), ref, low)


def as_recurrent(rung):
    """Return a rung as a function of the path `recurrent`: with room for one input a checkpoint moves in every step."""
    attention = rung.load().attention
    if rung not in REPLAYED:
        return attention

    def decode(query, key, value, log_decay, beta, states, state_indices, has_initial_state, scale):
        n, heads, dv, dk = states.shape
        ring = dict(ring_key=key.new_full((n, 1, key.shape[1], dk), torch.nan))
        ring |= dict(ring_written=torch.full((n, 1, heads, dv), torch.nan, device=key.device))
        ring |= dict(ring_log_decay=torch.full((n, 1, heads), torch.nan, device=key.device))
        ring |= dict(cursors=torch.zeros(n, dtype=torch.int32, device=key.device), scale=scale)
        tables = dict(state_indices=state_indices, has_initial_state=has_initial_state)
        return attention(query, key, value, log_decay, beta, checkpoints=states, **ring, **tables)

    return decode


@pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles each of the shapes")
@each_rung
def test_each_rung_keeps_the_contract(rung):
    few = dict(heads=((4, 2),), head_sizes=((32, 32),), layers=("gdn",))
    only = PROPERTIES if rung.number < COPIES or rung in REPLAYED else (*PROPERTIES, "no tokens", "chunks")
    only = tuple(name for name in only if rung not in REPLAYED or name != "steps")
    report = check(as_recurrent(rung), "recurrent", dtypes=[torch.float32], examples=1, only=only, limits=few)
    assert {found.property: found.outcome for found in report.findings} == dict.fromkeys(only, "honoured")


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("query", lambda x: x.mT, "query: expected|key: expected"),
        ("value", lambda x: x[:, :3].contiguous(), "value: expected a multiple|log_decay: expected"),
        ("state_indices", lambda x: x.long(), r"state_indices: expected int32"),
        ("has_initial_state", lambda x: x[:1], "has_initial_state: expected"),
        ("beta", lambda x: x[:1], "beta: expected"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(argument, wrong, message):
    given = inputs_of(CASES["decodes"], torch.float32)
    given[argument] = wrong(given[argument])
    for rung in RUNGS[1:]:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            rung.load().attention(**ladder._named(rung.load().attention, given))
