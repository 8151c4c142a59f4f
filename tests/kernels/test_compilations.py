"""Steps with prompts over fp8 compile nothing that a server has not compiled before its first request."""

import pytest

from tests.helpers.compilations import launched, schedule
from twinattn.bench.load import BUDGET, MOST, NUM_REQUESTS, Load
from twinattn.engine.warm_up import lengths_of_prompts

pytest.importorskip("triton", reason="needs Triton")
ROUNDS = 2  # as many as `twinattn load` serves
LONGEST = 4 * MOST  # as `twinattn.bench.load_vllm` has it


def rounds_of_load():
    """Return the steps with prompts of some rounds of the load."""
    drawn = [Load.draw(seed) for seed in range(ROUNDS)]
    steps = [schedule([*map(len, load.prompts)], load.max_tokens, BUDGET, NUM_REQUESTS) for load in drawn]
    return [step for its in steps for step in its if max(step)[0] > 1]


def of_engine():
    """Return the steps of `Engine.warm_up`, as `twinattn load` calls it."""
    answered = lengths_of_prompts(2 * MOST, BUDGET, NUM_REQUESTS)
    return [step for lengths in answered for step in schedule(lengths, [2] * len(lengths), BUDGET, NUM_REQUESTS)]


def of_vllm():
    """Return the steps that our backend computes before vLLM serves."""
    from twinattn.integrations.vllm_warm_up import steps_with_prompts

    return [[(length, length) for length in step] for step in steps_with_prompts(BUDGET, NUM_REQUESTS, LONGEST)]


@pytest.mark.parametrize("fa3", [True, False], ids=["fa3", "triton"])
def test_the_first_requests_find_all_kernels_compiled(fa3):
    rounds = rounds_of_load()
    cold = launched(rounds, fa3=fa3)
    assert sum(map(len, cold)) >= 2, "without a warm-up there is something to compile"
    for before in (of_engine(), of_vllm()):
        compiled = launched(before + rounds, fa3=fa3)
        assert any(compiled[: len(before)]) and not any(compiled[len(before) :])
