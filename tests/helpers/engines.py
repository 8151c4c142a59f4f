"""Engines over tiny models, what they are asked, and what they hold."""

import importlib

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

import twinattn.engine.choice
from tests.helpers.tiny_models import LATENT_SIZES, SIZES, YARN
from twinattn.engine import CudaGraphs, Engine, SamplingParams

TWINS = ("refattn", "fastattn")
SYSTEM = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 7, [*SYSTEM, 50], list(range(60, 85))]
GREEDY = SamplingParams(max_tokens=5)
UNSTOPPED = SamplingParams(max_tokens=5, stop_token_ids=())


def make_engine(model, twin="refattn", **options):
    """Make an engine over a twin: its name, or a module that stands in for one."""
    sizes = dict(num_blocks=64, block_size=4, max_num_batched_tokens=64) | options
    return Engine(model, twin=importlib.import_module(twin) if isinstance(twin, str) else twin, **sizes)


def outputs(engine, prompts, sampling=GREEDY):
    requests = engine.generate(prompts, sampling)
    assert [request.error for request in requests] == [None] * len(prompts)
    return [request.output_ids for request in requests]


def assert_answers_twice(engine, prompts, expected, sampling=GREEDY):
    """Hold an engine to its answers, the second time over blocks of the first, which some prompts begin with."""
    assert outputs(engine, prompts, sampling) == expected
    cached = engine.counters.cached_blocks
    assert outputs(engine, prompts[1:4], sampling) == expected[1:4]
    assert engine.counters.cached_blocks > cached


def first_logits(engine, prompts, monkeypatch):
    """Return the logits that the first tokens of some prompts are chosen from."""
    rows, choose = {}, twinattn.engine.choice.choose

    def watch(logits, requests, **how):
        rows.update(zip(requests, logits, strict=True))
        return choose(logits, requests, **how)

    with monkeypatch.context() as watched:
        watched.setattr(twinattn.engine.choice, "choose", watch)
        requests = engine.generate(prompts, SamplingParams(max_tokens=1))
    return torch.stack([rows[request] for request in requests]).float()


def transformers_outputs(model, prompts, max_tokens=5, attention="sdpa"):
    """Return the tokens that transformers' own code generates for each prompt."""
    model.set_attn_implementation(attention)
    rows = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    answers = [model.generate(row, max_new_tokens=max_tokens, do_sample=False) for row in rows]
    return [answer[0, row.shape[1] :].tolist() for answer, row in zip(answers, rows, strict=True)]


def assert_nothing_is_held(engine):
    assert not engine.running
    assert not engine.waiting
    assert sorted(engine.pool.free) == list(range(len(engine.pool.users)))
    assert set(engine.pool.users) == {0}


MODELS = {
    "window": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
    "window and full, softcap, scale": (
        Gemma2ForCausalLM,
        Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=3.0, query_pre_attn_scalar=7),
    ),
    "chunks and full": (
        Llama4ForCausalLM,
        Llama4TextConfig(
            **SIZES | dict(num_hidden_layers=4),
            attention_chunk_size=8,
            num_local_experts=2,
            intermediate_size_mlp=64,
        ),
    ),
    "differential": (DiffLlamaForCausalLM, DiffLlamaConfig(**SIZES | dict(num_attention_heads=4), lambda_std_dev=0.5)),
    "latents": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **SIZES | LATENT_SIZES | dict(first_k_dense_replace=2), max_position_embeddings=128, rope_parameters=YARN
        ),
    ),
}


class Watched(CudaGraphs):
    """Writes down when steps are launched and when their tokens are read, by their number.

    Attributes:
        said: the launches and reads, in order.
        rows: of each decode.
        ahead: the steps with other tokens than those of a decode that were launched ahead, by their new tokens.
    """

    def __init__(self, device):
        super().__init__()
        self.records, self.said, self.count, self.rows, self.ahead = True, [], 0, [], []

    def launch(self, engine, scheduled):
        return self.watch(super().launch(engine, scheduled))

    def launch_next(self, engine, before, scheduled):
        return self.watch(super().launch_next(engine, before, scheduled))

    def watch(self, launched):
        if launched is not None:
            self.count += 1
            self.said.append(f"launch {self.count}")
            read, number = launched.tokens, self.count
            object.__setattr__(launched, "tokens", lambda: (self.said.append(f"read {number}"), read())[1])
        return launched

    def _launch(self, engine, scheduled, tokens, before):
        if before is not None and len(tokens.due) < len(tokens.input_ids):
            self.ahead.append(list(scheduled.values()))
        return super()._launch(engine, scheduled, tokens, before)

    def _replay(self, rows):
        self.rows.append(rows)
        return super()._replay(rows)
