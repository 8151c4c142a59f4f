"""The pool of states: slots are copied whole, and a step of drafts is rolled back by choosing one."""

import re

import pytest
import torch

import fastattn.kv_cache
import fastattn.state_cache
import refattn.kv_cache
import refattn.recurrent
import refattn.state_cache
from tests.helpers.states import attend, draw, ints, lengths
from tests.helpers.stored import bits

each_twin = pytest.mark.parametrize("twin", [refattn.state_cache, fastattn.state_cache], ids=["ref", "fast"])


@each_twin
def test_a_pool_has_values_before_keys_and_a_convolution_one_input_less_than_its_width(twin, device):
    states = twin.allocate(3, 4, 6, 8, dtype=torch.bfloat16, device=device)
    inputs = twin.allocate_inputs(3, 4, 10, device=device)
    assert states.shape == (3, 4, 6, 8) and states.dtype == torch.bfloat16 and not states.any()
    assert inputs.shape == (3, 3, 10) and inputs.dtype == torch.float32 and not inputs.any()
    assert twin.allocate_inputs(2, 1, 5).shape == (2, 0, 5)


@pytest.mark.covers("R207")
@each_twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_read_every_slot_before_they_write_one_in_all_pools(twin, dtype, device):
    """A fork copies one slot to two; a copy of pools keeps every bit, NaN too, and touches no other slot."""
    states = torch.randn(5, 2, 3, 4, device=device).to(dtype)
    states[2, 0, 0] = torch.nan
    inputs = torch.randn(5, 3, 6, device=device).to(dtype)
    before = states.clone(), inputs.clone()
    twin.copy([states, inputs], torch.tensor([[2, 0], [2, 4], [0, 2]], device=device))
    for pool, old in zip((states, inputs), before, strict=True):
        assert torch.equal(bits(pool), bits(old[[2, 1, 0, 3, 2]]))


@pytest.mark.covers("R207")
@each_twin
def test_a_fork_goes_on_like_the_request_that_it_left(twin):
    step, states = draw(6), twin.allocate(3, 4, 6, 8)
    attend("reference", step.rows(slice(0, 4)), states, lengths([4], [0]), state_indices=ints([1]))
    twin.copy([states], torch.tensor([[1, 2]]))
    twice = type(step)(*(torch.cat([x[4:], x[4:]]) for x in step))
    out = attend("reference", twice, states, lengths((2, 2), (4, 4)), state_indices=ints([1, 2]))
    assert torch.equal(out[:2], out[2:]) and torch.equal(states[1], states[2]) and not states[0].any()


@pytest.mark.parametrize("package", [refattn, fastattn], ids=["ref", "fast"])
def test_a_preempted_request_comes_back_with_its_state(package):
    """A slot moves to the host and back as a block does, into any slot."""
    step, states, host = draw(6), torch.zeros(3, 4, 6, 8), torch.full((2, 4, 6, 8), torch.nan)
    attend("reference", step.rows(slice(0, 4)), states, lengths([4], [0]), state_indices=ints([1]))
    expected = attend("reference", step.rows(slice(4, 6)), states.clone(), lengths([2], [4]), state_indices=ints([1]))
    package.kv_cache.swap_blocks([states], [host], torch.tensor([[1, 0]]))
    states.fill_(torch.nan)
    package.kv_cache.swap_blocks([host], [states], torch.tensor([[0, 2]]))
    out = attend("reference", step.rows(slice(4, 6)), states, lengths([2], [4]), state_indices=ints([2]))
    assert torch.equal(out, expected)


@pytest.mark.covers("R205")
@each_twin
def test_the_state_after_the_last_accepted_token_is_chosen(twin, device):
    columns = ints([[7, 2, 5], [0, 1, 3], [-1, 4, 6], [9, 8, -1]]).to(device)
    slots = twin.accepted_slots(columns, ints([1, 3, 0, 2]).to(device))
    assert slots.tolist() == [7, 3, -1, 8] and slots.dtype == torch.int32


@each_twin
def test_bad_input_is_refused_and_nothing_is_copied(twin, shapes_unchecked):
    pool = torch.ones(3, 2, 2, 2)
    for message, call in (
        ("num_slots: expected a positive int, got 0", lambda: twin.allocate(0, 1, 1, 1)),
        ("width: expected a positive int, got 0", lambda: twin.allocate_inputs(1, 0, 1)),
        ("dtype: expected a torch.dtype, got 'float'", lambda: twin.allocate(1, 1, 1, 1, dtype="float")),
        ("pairs: expected blocks in 0..2", lambda: twin.copy([pool], torch.tensor([[0, 3]]))),
        ("pairs: expected each destination once", lambda: twin.copy([pool], torch.tensor([[0, 1], [2, 1]]))),
        ("num_accepted: expected 1..2, got 0", lambda: twin.accepted_slots(ints([[1, 2]]), ints([0]))),
        ("num_accepted: expected 1..2, got 3", lambda: twin.accepted_slots(ints([[1, 2]]), ints([3]))),
        (
            "num_accepted: expected int32 [b=1], got int64 [1]",
            lambda: twin.accepted_slots(ints([[1, 2]]), torch.ones(1).long()),
        ),
        (
            "state_indices: expected int32 [b, c], got int32 [2]",
            lambda: twin.accepted_slots(ints([1, 2]), ints([1, 1])),
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert torch.equal(pool, torch.ones(3, 2, 2, 2))
