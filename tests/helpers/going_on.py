"""Requests that go on elsewhere, in engines whose bits can be compared, whatever else they compute.

The last bits of a matrix product depend on how many rows it has. `RowByRow` computes products, and functions of single
numbers, so that no bit of a row depends on other rows. Then a token has the same keys, states and logits in any step of
any engine, if what it goes on from has the right bits. `Bits` remembers them by the tokens up to there, and compares.
"""

import importlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.engines import MODELS, SYSTEM
from tests.helpers.state_engines import drafts_of, make_hybrid
from tests.helpers.tiny_models import COMPRESSED, INDEX_SIZES, make_family, make_llama, make_model
from twinattn.engine import Engine, Request, SamplingParams, models
from twinattn.engine.block_pool import BlockContent, block_key
from twinattn.engine.cache_kinds import BLOCK, INPUTS, RINGS, STATES

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm.default, ATEN.bmm.default}
NAMES = ("cos", "sin", "exp", "log", "log1p", "tanh", "sigmoid", "silu", "softplus", "gelu")
OF_NUMBERS = {getattr(ATEN, name).default for name in NAMES}  # vectors of numbers, and those left over, may differ
LANES = 64
GREEDY = SamplingParams(max_tokens=5, stop_token_ids=())
WARM = replace(GREEDY, temperature=1.0, seed=5)
PROMPT = [*SYSTEM[:9], 40, 41]


class RowByRow(TorchDispatchMode):
    """Computes each row with the same bits, whatever other rows there are."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in PRODUCTS:
            return product(*args)
        if function is ATEN.addmm.default and not kwargs:
            return args[0] + product(*args[1:])
        if function is ATEN._grouped_mm.default:
            rows, matrices, ends = args[:3]
            parts = rows.tensor_split(ends[:-1].tolist())
            return torch.cat([product(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])
        if function in OF_NUMBERS and (args[0].numel() % LANES or not args[0].is_contiguous()):
            numbers = args[0].flatten()
            padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % LANES))
            return function(padded, *args[1:], **kwargs)[: len(numbers)].view(args[0].shape)
        return function(*args, **kwargs)


def product(a, b):
    """Multiply matrices: sums of two by two terms, in an order that depends on their number alone."""
    terms = a[..., :, None, :] * b.transpose(-1, -2)[..., None, :, :]
    size = terms.shape[-1]
    terms = torch.nn.functional.pad(terms, (0, (1 << max(0, size - 1).bit_length()) - size))
    while terms.shape[-1] > 1:
        terms = torch.add(*terms.chunk(2, -1))
    return terms[..., 0]


def exact_engine(model, twin="refattn", **options):
    """Make an engine in which no bit of a row depends on others, and whose pools hold NaN.

    So few requests run at once that layers with a window have a pool of their own.
    """
    sizes = dict(num_blocks=32, block_size=4, max_num_batched_tokens=16, max_num_seqs=3)
    invariant = {} if models.state_layers(model) else dict(batch_invariant=True)
    engine = Engine(model, twin=importlib.import_module(twin), **sizes | invariant | options)
    engine.layer_pools._batch_invariant = True  # layers with states, too: each row is computed alone
    for cache in engine.layer_pools.all_caches:
        if cache.pool.is_floating_point():
            cache.pool.fill_(torch.nan)
    return engine


@dataclass
class Bits:
    """The logits after some tokens, and what caches hold of them, as they were computed first.

    Attributes:
        found: those, by what they are and by the tokens.
        compared: how often something was there already.
        wrong: what had other bits then.
    """

    found: dict = field(default_factory=dict)
    compared: int = 0
    wrong: list = field(default_factory=list)

    def note(self, what, tokens, here):
        """Remember something, or compare it with what was there."""
        here = as_bytes(here)
        before = self.found.setdefault((what, tokens), here)
        if before is not here:
            self.compared += 1
            if before != here:
                self.wrong.append(f"{what} after {len(tokens)} tokens")

    def watch(self, engine):
        """Compare all that an engine computes from now on; a step in which something has other bits fails.

        Between two steps, all is spoiled that the table of caches does not have: of drafts that were rejected, say.
        """
        logits_of, step = engine.logits_of, engine.step

        def noted_logits(tokens):
            with RowByRow():
                logits = logits_of(tokens)
            assert logits.isfinite().all(), "NaN of the pools was read"
            rows = iter(logits)
            for request in tokens.due:
                for prefix in prefixes_of(request):
                    self.note("logits", prefix, next(rows))
            return logits

        def noted_step():
            events = step()
            self.compare_caches(engine)
            spoil(engine)
            wrong, self.wrong = self.wrong, []
            assert not [event.error for event in events if event.error] and not wrong, wrong
            return events

        engine.logits_of, engine.step = noted_logits, noted_step
        return engine

    def compare_caches(self, engine):
        """Compare what a later request would find: all blocks, and all states that were kept."""
        for place, cache in enumerate(engine.layer_pools.all_caches):
            what = f"{cache.kind.name} ({place}) in blocks of {engine.block_size}"
            where = kept_states(engine, cache) if cache.kind.unit != BLOCK else kept_blocks(engine, cache)
            for content, index in where.items():
                self.note(what, tokens_of(content), cache.pool[index])


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def prefixes_of(request):
    """Return the tokens before each row of logits of a request in a step, drafted ones included."""
    if request.draft is None:
        return [tuple(request.tokens)]
    paths = [tuple(request.tokens)]
    for token, parent in zip(request.draft.tokens, request.draft.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def tokens_of(content):
    """Return the tokens up to the end of a block."""
    before = () if content.parent is None else tokens_of(content.parent)
    return (*before, *content.tokens)


def kept_blocks(engine, cache):
    """Return where a pool has the blocks that a request can find."""
    pool = engine.window_pools.get(cache.layer)
    if pool is None:
        return {content: block for block, content in engine.pool.contents.items()}
    held = {content: max(pool.window_block[b], pool._kept.get(b, -1)) for b, content in engine.pool.contents.items()}
    return {content: block for content, block in held.items() if block >= 0}


def kept_states(engine, cache):
    """Return where a pool has the states that a request can find; a ring has no part of them."""
    states = engine.scheduler.states
    if cache.kind is RINGS:
        return {}
    if cache.kind is INPUTS or states.rings is None:
        return dict(states.kept)
    later = {fold.target for fold in states.rings._folds}  # they are written before the next step
    return {content: slot for content, slot in states.rings.kept.items() if slot not in later}


def spoil(engine):
    """Overwrite all that no running request needs at its position, and none can find."""
    going_on = [request for request in engine.running if request.num_computed_tokens]
    states = engine.scheduler.states
    for request in going_on if states is not None else ():
        states.settle(request)
    for cache in engine.layer_pools.all_caches:
        needed = list((kept_blocks if cache.kind.unit == BLOCK else kept_states)(engine, cache).values())
        needed += [place_of(engine, request, cache) for request in going_on]
        if states is not None and states.rings is not None and cache.kind in (STATES, RINGS):  # to be folded yet
            folds = states.rings._folds
            needed += [(x.slot, slice(0, x.num_inputs)) if cache.kind is RINGS else x.slot for x in folds]
        kept = cache.pool.clone()
        cache.pool.fill_(torch.nan if cache.pool.is_floating_point() else 77)
        for place in needed:
            cache.pool[place] = kept[place]


def run(engine, stops=lambda: False):
    """Make steps until nothing is left to do, or something is the case."""
    for _ in range(500):
        if stops() or not (engine.running or engine.waiting):
            return
        engine.step()
    raise AssertionError("it does not end")


def answers(engine, prompts, sampling=GREEDY):
    """Return the tokens of all samples of some prompts."""
    requests = [engine.add(prompt, sampling) for prompt in prompts]
    run(engine)
    return [sample.output_ids for request in requests for sample in request.samples]


def preempt(engine):
    """Make a step without free blocks; return whether the youngest request had to give up its own, and waits."""
    before, taken = engine.counters.preemptions, engine.pool.allocate(len(engine.pool.free))
    try:
        engine.step()
    finally:
        engine.pool.release(taken)
    return engine.counters.preemptions > before


# --- moving a request to other pools: what an engine that swaps, or ranks that hand over, would have to copy ---


def saved(engine, request, leave_out=()):
    """Return the contents of each cache that a request needs at its position, by `twinattn.engine.cache_kinds`."""
    if engine.scheduler.states is not None:
        engine.scheduler.states.settle(request)
    return [
        None if cache.kind in leave_out else cache.pool[place_of(engine, request, cache)].clone()
        for cache in engine.layer_pools.all_caches
    ]


def place_of(engine, request, cache):
    """Return where a cache has what a request needs to go on."""
    position = request.num_computed_tokens
    if cache.kind.unit == BLOCK:
        return rows_of(engine, request, cache, position)
    slots = engine.scheduler.states.slots[request]
    if cache.kind is INPUTS or slots.ring is None:
        return slots.start
    return (slots.ring.slot, slice(0, slots.ring.cursor)) if cache.kind is RINGS else slots.ring.slot


def rows_of(engine, request, cache, position):
    """Return the blocks and the rows in them of the tokens that a position needs, in a cache of rows."""
    per_block = cache.pool.shape[1]
    tokens = engine.block_size // per_block  # tokens per row
    first, end = cache.kind.begin(position, cache.layer.extent) // tokens, position // tokens
    pool, rows = engine.window_pools.get(cache.layer), torch.arange(first, end)
    blocks = [request.blocks[row // per_block] for row in rows.tolist()]
    if pool is not None:
        blocks = [pool.window_block[block] for block in blocks]
    return torch.tensor(blocks, dtype=torch.int64), rows % per_block


def moved(engine, request, other, leave_out=()):
    """Move a request between two steps to another engine of the same model, and return it there.

    Args:
        engine: where it runs.
        request: the request.
        other: where it goes on.
        leave_out: the kinds of caches that are forgotten.
    """
    parts, position, scheduler = saved(engine, request, leave_out), request.num_computed_tokens, other.scheduler
    there = Request([*request.tokens], request.prompt_len, request.sampling, pieces=[*request.pieces])
    assert scheduler._start(there, []) and scheduler.allocate(there, position)
    there.contents = contents_of(there, position // other.block_size, other.block_size)
    if scheduler.states is not None:
        settle_at(scheduler.states, there, position)
        mine, theirs = (e.scheduler.states.slots[r].ring for e, r in ((engine, request), (other, there)))
        if mine is not None:
            theirs.cursor = mine.cursor
    there.num_computed_tokens = position
    for cache, part in zip(other.layer_pools.all_caches, parts, strict=True):
        if part is not None:
            cache.pool[place_of(other, there, cache)] = part
    engine.abort(request, alone=True)
    return there


def contents_of(request, count, block_size):
    """Return the contents of the first blocks of a request, which can not be found by others."""
    contents = []
    for i in range(count):
        tokens = block_key(request.tokens, i * block_size, block_size)
        contents.append(BlockContent(contents[-1] if contents else None, tokens, 0))
    return contents


def settle_at(states, request, position):
    """Allocate the slots for the state of a request at a position, without states at earlier block ends."""
    slots = states.slots[request]
    if slots.checkpoint is not None:
        states._release(slots.checkpoint[1])
        states._pending, slots.checkpoint = states._pending - 1, None
    if slots.ring is not None:
        states.rings._drop_checkpoint(slots.ring)
        slots.ring.block, slots.ring.planned = None, (slots.ring.target, 0, False)
    request.num_computed_tokens = position
    states.settle(request)


# --- families of layers, and the ways on which a request goes on ---


@dataclass
class Family:
    """A tiny model with some kinds of layers, and its engines.

    Attributes:
        model: the model.
        options: of its engines.
        twin: the package that computes.
        bits: what all its engines have computed.
        answers: the tokens of requests alone in an engine, by prompt and sampling.
    """

    model: Any
    options: dict
    twin: str = "refattn"

    def __post_init__(self):
        self.bits, self.answers = Bits(), {}

    def engine(self, **options):
        """Make an engine whose bits are compared with those of all others."""
        return self.bits.watch(exact_engine(self.model, self.twin, **self.options | options))

    def alone(self, prompt, sampling=GREEDY):
        """Return the tokens of a request alone in an engine, and remember its bits at the end of each block."""
        key = tuple(prompt), sampling
        if key not in self.answers:
            kept = dict(num_kept_states=16) if models.state_layers(self.model) else {}
            engine = self.engine(max_num_batched_tokens=4, **kept)
            (self.answers[key],) = answers(engine, [prompt], sampling)
        return self.answers[key]

    @cached_property
    def kinds(self):
        """The kinds of its caches."""
        return list(dict.fromkeys(cache.kind for cache in self.engine().layer_pools.all_caches))


FEWER = dict(eos_token_id=None, hc_sinkhorn_iters=1)
FAMILIES = {
    "windows": (lambda: make_model(*MODELS["window and full, softcap, scale"]), {}),
    "selected keys": (lambda: make_family("deepseek_v32", **INDEX_SIZES | dict(first_k_dense_replace=3)), {}),
    "states": (lambda: make_hybrid("qwen3_5_text", "cpu"), {}),
    "rings": (lambda: make_hybrid("bamba", "cpu"), dict(state_ring_size=4)),
    "compressed keys": (
        lambda: make_family("deepseek_v4", **COMPRESSED | dict(eos_token_id=None, hc_sinkhorn_iters=1)),
        {},
    ),
}
MORE_FAMILIES = {
    "chunks": (lambda: make_model(*MODELS["chunks and full"]), {}),
    "differential": (lambda: make_model(*MODELS["differential"]), {}),
    "latents": (lambda: make_model(*MODELS["latents"]), {}),
    "int8": (make_llama, dict(kv_cache_dtype="int8")),
    "fp8": (make_llama, dict(kv_cache_dtype="fp8_e4m3")),
    "int4": (make_llama, dict(kv_cache_dtype="int4")),
    "nvfp4": (make_llama, dict(kv_cache_dtype="nvfp4")),
    "states and experts": (lambda: make_hybrid("qwen3_next", "cpu"), {}),
    "states in attention": (lambda: make_hybrid("falcon_h1", "cpu"), {}),
    "states, by steps": (lambda: make_hybrid("bamba", "cpu"), {}),
    "rings of states": (lambda: make_hybrid("qwen3_5_text", "cpu"), dict(state_ring_size=5)),
}


def family_of(name, twin="refattn"):
    make, options = (FAMILIES | MORE_FAMILIES)[name]
    return Family(make(), options, twin)


def after_a_prefix(family):
    """Its first two blocks are those of another request."""
    engine = family.engine()
    answers(engine, [[*PROMPT[:9], 1]])
    assert answers(engine, [PROMPT]) == [family.alone(PROMPT)]
    assert engine.counters.cached_tokens == 8


def after_whole_blocks(family):
    """Its prompt ends where a block does, and comes again; then a longer one does."""
    engine, two = family.engine(), replace(GREEDY, max_tokens=2)
    for _ in range(2):
        assert answers(engine, [PROMPT[:8]], two) == [family.alone(PROMPT[:8], two)]
    assert engine.counters.cached_tokens == 4
    assert answers(engine, [PROMPT]) == [family.alone(PROMPT)]


def after_preemption(family):
    """It waits, and goes on after those of its own blocks that are still there."""
    engine = family.engine()
    request = engine.add(PROMPT, GREEDY)
    run(engine, lambda: request.num_outputs > 1)
    while not preempt(engine):
        pass
    run(engine)
    assert request.output_ids == family.alone(PROMPT)
    assert engine.counters.cached_tokens >= 8


def as_samples(family):
    """Two samples go on from one prompt, whose last block both write to, and whose last token was computed alone."""
    engine = family.engine(max_num_batched_tokens=5)
    expected = [family.alone(PROMPT, WARM.of_sample(i)) for i in range(2)]
    assert answers(engine, [PROMPT], replace(WARM, n=2)) == expected
    assert engine.counters.copied_blocks == 1


def with_drafts(family):
    """Some drafts are right and some are wrong."""
    right = family.alone(PROMPT)
    engine = family.engine(speculation=drafts_of([PROMPT], [right]))
    assert answers(engine, [PROMPT]) == [right]
    assert 0 < engine.counters.accepted_tokens < engine.counters.drafted_tokens


def in_other_pools(family, leave_out=()):
    """It is moved in the middle of its prompt, and after some tokens; the other pools hold NaN elsewhere."""
    for stop in (7, 12, 14):
        engine, other = (family.engine(max_num_batched_tokens=7) for _ in range(2))
        request = engine.add(PROMPT, GREEDY)
        run(engine, lambda request=request, stop=stop: request.num_computed_tokens >= stop)
        there = moved(engine, request, other, leave_out)
        run(other)
        assert there.output_ids == family.alone(PROMPT)


WAYS = (after_a_prefix, after_whole_blocks, after_preemption, as_samples, with_drafts, in_other_pools)
