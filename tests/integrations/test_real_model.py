"""A real model of transformers: the words of eager, by the attention of the twin in every layer."""

import torch

import fastattn.varlen
from twinattn.engine import demo_model
from twinattn.integrations import transformers as integration


def test_a_real_model_gives_the_words_of_eager(monkeypatch):
    """SmolLM2, from the GGUF file of the demo: two questions of different lengths, padded on the left."""
    integration.register()
    calls, attention = [], fastattn.varlen.attention

    def counting(*args, **options):
        calls.append(None)
        return attention(*args, **options)

    monkeypatch.setattr(fastattn.varlen, "attention", counting)
    model, tokenizer = demo_model.load(demo_model.model_file())
    questions = ("Name three colours.", "Why is the sky blue? Answer a child of five, in one short sentence.")
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in questions
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    assert not inputs["attention_mask"].all()
    answers = {}
    for name in ("eager", "fastattn"):
        model.set_attn_implementation(name)
        answers[name] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(answers["fastattn"], answers["eager"])
    assert len(calls) == 6 * model.config.num_hidden_layers
    assert "Red" in tokenizer.decode(answers["fastattn"][0])
