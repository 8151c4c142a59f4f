"""The first engine gives the tokens of the whole one, of transformers, and of the other twin, by one import."""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.helpers.engines import TWINS, make_engine, outputs
from tests.helpers.tiny_models import byte_tokenizer, make_follower, make_llama
from twinattn.course import first_engine
from twinattn.engine import SamplingParams
from twinattn.kit import assert_close

FILE = Path(first_engine.__file__)
PROMPTS = [[11], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 40, 41], [7, 3] * 7, list(range(60, 85))]
SIZES = dict(num_blocks=32, block_size=4, max_num_batched_tokens=16)


@cache
def module_of(twin):
    """Return the file as a reader has it who changes the import."""
    source, changes = re.subn(
        r"^from refattn import (.*)  # or: from fastattn.*$", rf"from {twin} import \1", SOURCE, flags=re.M
    )
    assert changes == 1
    spec = importlib.util.spec_from_loader(f"first_engine_{twin}", loader=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    exec(compile(source, str(FILE), "exec"), module.__dict__)
    return module


SOURCE = FILE.read_text()


@cache
def by_the_whole_engine():
    return outputs(make_engine(make_llama()), PROMPTS, SamplingParams(max_tokens=6))


def test_it_is_one_sitting():
    assert len(SOURCE.splitlines()) <= 300


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("twin", TWINS)
def test_the_tokens_are_those_of_the_whole_engine(twin):
    engine = module_of(twin).FirstEngine(make_llama(), **SIZES)
    assert engine.generate(PROMPTS, 6) == by_the_whole_engine()
    assert sorted(engine.free) == list(range(32)), "all blocks are free again"


def test_the_logits_are_those_of_transformers():
    model, tokens = make_llama(rope_parameters=dict(rope_type="default", rope_theta=500.0)), torch.tensor(PROMPTS[3])

    def attend(layer, query, key, value):
        key, value = (x.repeat_interleave(3, 1) for x in (key, value))
        heads = (x.transpose(0, 1) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)

    places = torch.arange(len(tokens))
    with torch.no_grad():
        low = model(tokens[None]).logits[0]
        mine = first_engine.Llama(model).forward(tokens, places, places, attend)
        exact = model.double()(tokens[None]).logits[0]
    assert_close(mine, exact, low)


def test_prompts_in_chunks_share_steps_with_decodes():
    engine, steps = first_engine.FirstEngine(make_llama(), **SIZES), []
    schedule = engine.schedule

    def noted():
        steps.append(schedule())
        return [*steps[-1]]

    engine.schedule = noted
    engine.generate(PROMPTS, 6)
    counts = [[count for _, count in step] for step in steps]
    assert counts[0] == [1, 15], "two prompts"
    assert counts[1] == [1, 1, 14], "two decodes, then a prompt"
    assert counts[2] == [1, 1, 1, 13] and counts[3] == [1, 1, 1, 12], "a prompt in two chunks"


def test_without_blocks_the_newest_request_waits_and_begins_again():
    engine, given_up = first_engine.FirstEngine(make_llama(), **SIZES | dict(num_blocks=9)), []
    preempt = engine.preempt
    engine.preempt = lambda request: (given_up.append(request.prompt), preempt(request))
    assert engine.generate(PROMPTS, 6) == by_the_whole_engine()
    assert PROMPTS[3] in given_up and PROMPTS[0] not in given_up


def test_a_request_ends_at_the_end_token():
    model = make_follower([1, 2, 3, 0, 0, 0, 0, 0], eos_token_id=3)
    assert first_engine.FirstEngine(model, **SIZES).generate([[0], [2]], 6) == [[1, 2, 3], [3]]


@pytest.mark.parametrize("prompt", [[], [1] * 60])
def test_a_prompt_that_never_fits_is_refused(prompt):
    with pytest.raises(ValueError, match=f"prompts: expected 1 to 58 tokens in each, got {len(prompt)}"):
        first_engine.FirstEngine(make_llama(), **SIZES | dict(num_blocks=16)).generate([prompt], 6)


def test_a_model_with_other_positions_is_refused():
    rope = dict(rope_type="linear", factor=2.0, rope_theta=1e4)
    with pytest.raises(ValueError, match="model: expected a Llama with plain rotary positions, got LlamaForCausalLM"):
        first_engine.Llama(make_llama(rope_parameters=rope))


def test_the_command_answers(monkeypatch, capsys, tmp_path):
    from twinattn.engine import demo_model

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(demo_model, "model_file", lambda: tmp_path)
    monkeypatch.setattr(demo_model, "load", lambda file: (make_llama(vocab_size=257, eos_token_id=256), tokenizer))
    first_engine.main(["Why?"])
    assert capsys.readouterr().out.startswith("Why?\n    ")
