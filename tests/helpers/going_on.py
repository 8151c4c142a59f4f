"""Requests that go on elsewhere, in engines whose bits can be compared, whatever else they compute.

The last bits of a matrix product depend on how many rows it has. `RowByRow` computes products, and functions of single
numbers, so that no bit of a row depends on other rows. Then a token has the same keys, states and logits in any step of
any engine, if what it goes on from has the right bits. `Bits` remembers them by the tokens up to there, and compares.
"""

import importlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinattn.engine import Engine, Request, SamplingParams, models
from twinattn.engine.block_pool import BlockContent, block_key
from twinattn.engine.cache_kinds import BLOCK, ENTRIES, INPUTS, RINGS, STATES

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm.default, ATEN.bmm.default}
OF_NUMBERS = {  # the processor computes vectors of numbers in one way, and what is left over in another
    getattr(ATEN, name).default for name in "cos sin exp log log1p tanh sigmoid silu softplus gelu".split()
}
LANES = 64
GREEDY = SamplingParams(max_tokens=6, stop_token_ids=())


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
        if function in OF_NUMBERS and args[0].numel() % LANES:
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
    """Make an engine in which no bit of a row depends on others, and whose pools hold NaN."""
    sizes = dict(num_blocks=32, block_size=4, max_num_batched_tokens=64)
    invariant = {} if models.state_layers(model) else dict(batch_invariant=True)
    engine = Engine(model, twin=importlib.import_module(twin), **sizes | invariant | options)
    engine.layer_pools._batch_invariant = True  # of layers with states, too: all is computed row by row
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
        """Compare all that an engine computes from now on; a step in which something has other bits fails."""
        logits_of, step = engine.logits_of, engine.step

        def noted_logits(tokens):
            with RowByRow():
                logits = logits_of(tokens)
            rows = iter(logits)
            for request in tokens.due:
                for prefix in prefixes_of(request):
                    self.note("logits", prefix, next(rows))
            return logits

        def noted_step():
            events = step()
            self.compare_caches(engine)
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
    """Let the youngest request lose its blocks, as if others had needed them, and wait."""
    request, before = engine.running[-1], engine.counters.preemptions
    taken = engine.pool.allocate(len(engine.pool.free))
    request_needs_more = request.num_computed_tokens % engine.block_size == 0 or request.num_pending > 1
    try:
        if request_needs_more:
            engine.step()
    finally:
        engine.pool.release(taken)
    return engine.counters.preemptions > before


# --- moving a request to other pools: what an engine that swaps, or ranks that hand over, would have to copy ---


def saved(engine, request, leave_out=()):
    """Return what is there of a request at its position, in each cache, by `twinattn.engine.cache_kinds`."""
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
    tokens = engine.block_size // per_block  # of a row
    first, end = cache.kind.begin(position, cache.layer.extent) // tokens, position // tokens
    pool, rows = engine.window_pools.get(cache.layer), torch.arange(first, end)
    blocks = [request.blocks[row // per_block] for row in rows.tolist()]
    if pool is not None:
        blocks = [pool.window_block[block] for block in blocks]
    return torch.tensor(blocks, dtype=torch.int64), rows % per_block


def moved(engine, request, other, leave_out=()):
    """Let a request that is between two steps go on in another engine of the model; return it there.

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
    """Give a request slots for its state at a position; nothing is kept of what is on the way there."""
    slots = states.slots[request]
    if slots.checkpoint is not None:
        states._release(slots.checkpoint[1])
        states._pending, slots.checkpoint = states._pending - 1, None
    if slots.ring is not None:
        states.rings._drop_checkpoint(slots.ring)
        slots.ring.block, slots.ring.planned = None, (slots.ring.target, 0, False)
    request.num_computed_tokens = position
    states.settle(request)
