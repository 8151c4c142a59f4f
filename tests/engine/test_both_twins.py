"""The engine over both twins: chunks beside decodes, windows and shared prefixes, as transformers computes them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.helpers.engines import GREEDY, PROMPTS, assert_nothing_is_held, make_engine, outputs
from tests.helpers.tiny_models import SIZES, make_model

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "window": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
}


def by_transformers(model, prompt):
    options = dict(max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_answers_as_transformers_does(name, twin):
    model = make_model(*MODELS[name])
    engine = make_engine(model, twin, max_num_batched_tokens=8)
    got = outputs(engine, PROMPTS)
    assert_nothing_is_held(engine)
    model.set_attn_implementation("eager")
    assert got == [by_transformers(model, prompt) for prompt in PROMPTS]
