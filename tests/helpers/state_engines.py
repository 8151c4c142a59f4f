"""Engines over tiny models whose layers keep a state, what they are asked, and what they hold."""

import importlib
from dataclasses import dataclass

import torch

from tests.helpers.engines import SYSTEM
from tests.helpers.tiny_models import STATES, make_family
from twinattn.engine import Engine, NGram, Request, SamplingParams
from twinattn.engine.request import Draft

PROMPTS = [[11], [*SYSTEM, 40, 41], [7, 3] * 10, [*SYSTEM, 50], [*SYSTEM, 40, 41, 42]]
GREEDY = SamplingParams(max_tokens=6, stop_token_ids=())


def make_hybrid(family, device):
    return make_family(family, device, **STATES[family] | dict(eos_token_id=None))


@dataclass(frozen=True)
class Oracle(NGram):
    """Drafts the right answers, with a wrong token at a depth that changes."""

    answers: tuple = ()

    def propose(self, tokens, *, depth, nodes, branches=None):
        (right,) = {whole[len(tokens) :] for whole in self.answers if whole[: len(tokens)] == tuple(tokens)}
        right, wrong = right[: min(depth, nodes, self.max_drafts)], len(tokens) % 4
        drafted = tuple((token + 1) % 97 if i == wrong else token for i, token in enumerate(right))
        return Draft(drafted, tuple(range(-1, len(drafted)))) if drafted else None


def drafts_of(prompts, answers):
    return Oracle(max_drafts=3, answers=tuple((*p, *a) for p, a in zip(prompts, answers, strict=True)))


def make_engine(model, twin="refattn", **options):
    sizes = dict(num_blocks=64, block_size=4, max_num_batched_tokens=64)
    engine = Engine(model, twin=importlib.import_module(twin), **sizes | options)
    for pools in engine.state_caches.values():  # as after other requests
        for pool in pools.tensors:
            pool.fill_(torch.nan)
    return engine


def outputs(engine, prompts=PROMPTS):
    answers = [request.output_ids for request in engine.generate(prompts, GREEDY)]
    assert_all_free(engine)
    return answers


def assert_all_free(engine):
    pool = engine.scheduler.states
    assert not pool.slots
    read = [fold.slot for fold in pool.rings._folds] if pool.rings else []  # by states that the next step writes
    for each, used in ((pool, []), (pool.rings or pool, read)):
        assert each._users == [used.count(slot) for slot in range(each.num_slots)] and not each._pending
        assert sorted(each.free) == sorted({*range(each.num_slots)} - {*used})
        assert {slot: content for content, slot in each.kept.items()} == each._contents


def run(pool, length, contents=(), prompt=None):
    """Add a request, compute its tokens in one step, and return it."""
    tokens = list(range(length))
    request = Request(tokens, length if prompt is None else prompt, GREEDY)
    begin = pool.usable(contents)
    pool.share(request, contents[:begin])
    request.num_computed_tokens = begin * pool.block_size
    pool.hold(request, length - request.num_computed_tokens, length)
    request.num_computed_tokens, request.contents = length, list(contents)
    return request
