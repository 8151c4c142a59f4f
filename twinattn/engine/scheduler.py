"""Which tokens of which requests go into a step: decodes first, then chunks of prompts; preemption if room is short.

Source: Yu et al. 2022, "Orca" (batching by step); Kwon et al. 2023, "PagedAttention" (preemption by recomputation);
Agrawal et al. 2024, "Sarathi-Serve" (chunks of prompts beside decodes).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twinattn.engine.block_pool import BlockPool, block_key
from twinattn.engine.request import Request
from twinattn.engine.sampling import GREEDY
from twinattn.engine.state_pool import StatePool
from twinattn.engine.window_pool import WindowPool


@dataclass
class Counters:
    """Counters of an engine.

    Attributes:
        steps: forward passes.
        computed_tokens: tokens that went through the model.
        chunks: pieces in which prompts, and requests to recompute, went through it.
        cached_tokens: tokens that did not have to, because their blocks were still in the pool.
        cached_blocks: those blocks.
        preemptions: how often a request lost its blocks to an older one.
        key_reads: keys that the requests had in all steps, in tokens: what one full layer reads without a cascade.
        saved_key_reads: those of them that a cascade did not have to read again.
        drafted_tokens: tokens that were drafted, and went through the model.
        accepted_tokens: those of them that were accepted.
        copied_blocks: blocks that several samples of a prompt had, copied before one of them wrote to its own.
    """

    steps: int = 0
    computed_tokens: int = 0
    chunks: int = 0
    cached_tokens: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    key_reads: int = 0
    saved_key_reads: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    copied_blocks: int = 0


class Scheduler:
    """Chooses the tokens of a step, and keeps track of requests and blocks.

    A request has its blocks in the pool, and for those inside its window also one in each window pool. So a cached
    prefix can be used only as far as the blocks of its last window are still in all of them, and only up to a block
    at whose end the state was kept, if there are layers with a state.

    Samples of one prompt are one request until it is computed (`fork`). From then on each is scheduled, preempted and
    ended by itself, and all have the blocks of the prompt. The last one of them may be partly filled. A sample that is
    to write to it while others have it gets a copy (`_copy_on_write`). Two samples of a prompt of 6 tokens, in blocks
    of 4:

        blocks of sample                 0       1       users of 9, 2, 5
        the prompt is computed           9 2     -       1 1 -
        both have a first token          9 2     9 2     2 2 -
        sample 0 is to write it          9 5     9 2     2 1 1     2 is copied to 5
        sample 1 is to write it          9 5     9 2     2 1 1     no other sample has 2

    Attributes:
        pool: the blocks.
        window_pools: the blocks of layers with a smaller pool.
        states: the slots of layers that keep a state; None without such layers.
        waiting: requests that wait, oldest first, and all of them younger than those that run.
        running: requests that run, oldest first.
        counters: the counters so far.
        copies: blocks to copy before the next step, as in `LayerPools.copy_blocks`.

    Args:
        num_blocks: blocks in the pool of each layer.
        block_size: tokens in a block.
        max_num_batched_tokens: most tokens in a step.
        max_num_seqs: most requests that run at once.
        window_pools: pools that have room for what any step sees of them.
        states: slots for `max_num_seqs` requests, or for as many as there are blocks; None without such layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        window_pools: Iterable[WindowPool] = (),
        states: StatePool | None = None,
    ) -> None:
        self.block_size, self.max_num_batched_tokens = block_size, max_num_batched_tokens
        self.max_num_seqs, self.window_pools = max_num_seqs, tuple(window_pools)
        self.pool, self.states = BlockPool(num_blocks, block_size), states
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = Counters()
        self.copies: dict[WindowPool | None, list[tuple[int, int]]] = {}

    def schedule(self) -> dict[Request, int]:
        """Choose how many tokens of which requests go into this step, and allocate the blocks for them."""
        scheduled: dict[Request, int] = {}
        preemptions = self.counters.preemptions
        for pool in self.window_pools:
            for request in self.running:
                pool.trim(request, request.num_computed_tokens, request.blocks)
        if self.states is not None:
            for request in self.running:
                self.states.settle(request)
        for request in list(self.running):  # by age; only the youngest may be a prompt, so decodes go first
            count = request.cut(self.max_num_batched_tokens - sum(scheduled.values()))
            if request.status == "running" and count and self._allocate_or_preempt(request, count):
                scheduled[request] = count
        while self._has_room() and self.counters.preemptions == preemptions:
            count = self.max_num_batched_tokens - sum(scheduled.values())
            if not count or not self._start(self.waiting[0], self._find(self.waiting[0])):
                break
            request = self.waiting.popleft()
            count = request.cut(count)
            if count:  # else it waits for a step with room for a whole span
                scheduled[request] = count
                self._allocate_or_preempt(request, count)
        return _together(scheduled)

    def _allocate_or_preempt(self, request: Request, count: int) -> bool:
        """Give a request the blocks for `count` more tokens, preempting the youngest request while too few are free.

        False if the youngest was the request itself. The oldest always gets its blocks, so there is always one that
        goes on; and a preempted request loses its keys and values only, not its tokens or its random numbers.
        """
        while not self.allocate(request, count):
            youngest = self.running[-1]
            self._stop(youngest, "waiting")
            self.waiting.appendleft(youngest)
            self.counters.preemptions += 1
            if youngest is request:
                return False
        return True

    def _has_room(self) -> bool:
        """Return whether the oldest request that waits may run now, with all of its samples."""
        if not self.waiting:
            return False
        coming = sum(len(request.unforked) for request in self.running if request.others)
        return len(self.running) + coming + 1 + len(self.waiting[0].unforked) <= self.max_num_seqs

    def allocate(self, request: Request, count: int) -> bool:
        """Allocate the blocks for `count` new tokens of a request, drafts included; False if too few are free."""
        if not self._allocate_blocks(request, count):
            return False
        if self.states is not None:
            self.states.hold(request, count, request.num_computed_tokens + count)
        return True

    def schedule_ahead(self, launched: Mapping[Request, int]) -> dict[Request, int]:
        """Choose the tokens of the step after one that is launched and not read, and allocate the blocks for them.

        They are those that `schedule` will choose if each request of that step gets its tokens and none ends early; one
        that has all its tokens then is left out. Nothing is chosen where that step has to be read first: where blocks
        are short, where a request that waits begins like one under way, whose blocks it will find, or has spans, where
        several samples of a prompt are to begin, and where window pools, which hold the blocks of both steps, have room
        for one. None is preempted, and what was allocated before any of that turned out stays allocated: its turn
        comes.

        Args:
            launched: the new tokens of each request in that step, which has no drafts.
        """
        scheduled: dict[Request, int] = {}
        room = self.max_num_batched_tokens - (sum(launched.values()) if self.window_pools else 0)
        for request in self.running:
            before, pending = launched.get(request, 0), request.num_pending
            if request.others and request.unforked and pending - before <= room:
                return {}
            if before >= pending:  # it gets a token
                if request.num_outputs + 1 == request.sampling.max_tokens:
                    continue
                pending += 1
            elif request.spans:
                return {}
            pending -= before
            count = min(pending, room)
            if count < pending and self.window_pools:
                return {}
            if count:
                if not self._allocate_ahead(request, before, count):
                    return {}
                scheduled[request] = count
                room -= count
        filling: list[tuple[Request, int]] = []
        if self.waiting:
            ends = [(one, (one.num_computed_tokens + count) // self.block_size) for one, count in launched.items()]
            filling = [(one, full) for one, full in ends if full > len(one.contents)]
        while room and self._has_room():
            request, cached = self.waiting[0], self._find(self.waiting[0])
            if request.spans or request.unforked or self._begins_like_one_of(filling, request, len(cached)):
                return {}
            if self.window_pools and len(request.tokens) > room:
                return {}
            if not self._start(request, cached):
                break
            self.waiting.popleft()
            scheduled[request] = min(request.num_pending, room)
            self.allocate(request, scheduled[request])
            room -= scheduled[request]
        return _together(scheduled)

    def _allocate_ahead(self, request: Request, launched: int, count: int) -> bool:
        """Allocate the blocks for the tokens of a request in a step under way and the next; False if they are short."""
        if not launched:
            return self.allocate(request, count)
        is_short = request.num_computed_tokens + launched + count > len(request.blocks) * self.block_size
        if is_short and not self._allocate_blocks(request, launched + count):
            return False
        if self.states is not None:
            self.states.hold_ahead(request, launched, count)
        return True

    def _begins_like_one_of(self, filling: Iterable[tuple[Request, int]], request: Request, found: int) -> bool:
        """Return whether a request will find more blocks, or states, as soon as a step under way has been read.

        Args:
            filling: who fills blocks in that step, and its full blocks after it.
            request: one that waits.
            found: blocks that it finds now.
        """
        end = (found + 1) * self.block_size
        if end >= len(request.tokens):  # the last token is not looked for
            return False
        start = request.tokens[:end]
        return any(full > found and other.tokens[:end] == start for other, full in filling)

    def follow(self, requests: Iterable[Request]) -> None:
        """Go on to a step that `schedule_ahead` was called for; what came of the one before it is recorded."""
        if self.states is not None:
            for request in requests:
                self.states.follow(request)

    def _allocate_blocks(self, request: Request, count: int) -> bool:
        """Allocate the blocks for `count` new tokens of a request; False if too few are free."""
        needed = max(0, self.blocks_for(request.num_computed_tokens + count) - len(request.blocks))
        is_shared = self._writes_to_shared(request)
        if needed + is_shared > len(self.pool.free):
            return False
        if is_shared:
            self._copy_on_write(request)
        request.blocks += self.pool.allocate(needed)
        for pool in self.window_pools:
            pool.hold(request, count, request.num_computed_tokens + count, request.blocks)
        return True

    def _writes_to_shared(self, request: Request) -> bool:
        """Return whether the next token of a request goes into a block that others have, too."""
        place = request.num_computed_tokens // self.block_size
        return place < len(request.blocks) and self.pool.users[request.blocks[place]] > 1

    def _copy_on_write(self, request: Request) -> None:
        """Give a request a block of its own instead of the shared one that it is about to write to."""
        place = request.num_computed_tokens // self.block_size
        shared, (own,) = request.blocks[place], self.pool.allocate(1)
        request.blocks[place] = own
        self.pool.release([shared])
        self.copies.setdefault(None, []).append((shared, own))
        for pool in self.window_pools:
            self.copies.setdefault(pool, []).append(pool.copy(request, shared, own))
        self.counters.copied_blocks += 1

    def take_copies(self) -> dict[WindowPool | None, list[tuple[int, int]]]:
        """Return the blocks to copy before a step, once."""
        copies, self.copies = self.copies, {}
        return copies

    def fork(self, request: Request) -> None:
        """Let the other samples of a request run, now that its prompt is computed: they have its blocks and state."""
        others = request.unforked
        if not others:
            return
        for other in others:
            other.status, other.num_computed_tokens = "running", request.num_computed_tokens
            other.blocks, other.contents = [*request.blocks], [*request.contents]
            self.pool.share(other.blocks)
            for pool in self.window_pools:
                pool.fork(request, other)
            if self.states is not None:
                self.states.fork(request, other)
        place = self.running.index(request) + 1
        self.running[place:place] = others  # they are as old as it is

    def _start(self, request: Request, cached: list[int]) -> bool:
        """Start a request after its cached prefix, if there are blocks for all its tokens so far."""
        unused = sum(self.pool.users[block] == 0 for block in cached)  # free so far
        if self.blocks_for(len(request.tokens)) - len(cached) > len(self.pool.free) - unused:
            return False
        self.pool.share(cached)
        for pool in self.window_pools:
            pool.share(request, cached)
        self.running.append(request)
        request.status, request.blocks, request.num_computed_tokens = "running", cached, len(cached) * self.block_size
        request.contents = [self.pool.contents[block] for block in cached]
        if self.states is not None:
            self.states.share(request, request.contents)
        self.counters.cached_blocks += len(cached)
        self.counters.cached_tokens += request.num_computed_tokens
        return True

    def _find(self, request: Request) -> list[int]:
        """Find the blocks of the longest cached prefix after which a request can go on in all pools.

        Its last token has to go through the model, for its logits, and a span as a whole.
        """
        found = self.pool.find(request.tokens[:-1], request.spans)
        count = None
        while count != len(found):
            count = len(found)
            for first, last in request.spans:
                if first < len(found) * self.block_size <= last:
                    found = found[: first // self.block_size]
            for pool in self.window_pools:
                found = found[: pool.usable(found)]
            if self.states is not None:
                found = found[: self.states.usable([self.pool.contents[block] for block in found])]
        return found

    def keep(self, request: Request, count: int) -> None:
        """Record what a step computed for a request, and register its full blocks for prefix caching."""
        self.counters.computed_tokens += count
        self.counters.chunks += request.num_pending > 1 or not request.num_outputs
        self._advance(request, count)

    def keep_drafts(self, request: Request, count: int) -> None:
        """Record the accepted drafts of a request, which are now among its tokens."""
        assert request.draft is not None
        self.counters.computed_tokens += len(request.draft.tokens)
        self.counters.drafted_tokens += len(request.draft.tokens)
        self.counters.accepted_tokens += count
        self._advance(request, count)

    def _advance(self, request: Request, count: int) -> None:
        """Count more tokens of a request as computed, and register its blocks that are full now."""
        request.num_computed_tokens += count
        for i in range(len(request.contents), request.num_computed_tokens // self.block_size):
            tokens = block_key(request.tokens, i * self.block_size, self.block_size, request.spans)
            parent = request.contents[-1] if request.contents else None
            request.contents.append(self.pool.remember(request.blocks[i], parent, tokens))

    def finish(self, request: Request, reason: str) -> None:
        """End a request and store the reason."""
        request.finish_reason = reason
        self._stop(request, "finished")

    def _stop(self, request: Request, status: str) -> None:
        """Take a request out of those that run or wait, and its blocks from it."""
        if request.status == "running":
            self.running.remove(request)
        elif request in self.waiting:  # else it is a sample whose prompt is not computed yet
            self.waiting.remove(request)
        self.pool.release(request.blocks)
        for pool in self.window_pools:
            pool.release(request)
        if self.states is not None:
            self.states.release(request)
        request.status, request.num_computed_tokens, request.blocks, request.contents = status, 0, [], []

    def hold_one_token(self) -> Request:
        """Return a request of one token that has the first block, though it does not run; `undo` frees the block."""
        request = Request([0], 1, GREEDY, blocks=[0])
        for pool in self.window_pools:
            pool.hold(request, 1, 1, request.blocks)
        if self.states is not None:
            self.states.share(request, [])
            self.states.hold(request, 1, 1)
        return request

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for some tokens."""
        return -(-num_tokens // self.block_size)

    def undo(
        self,
        unfinished: Sequence[Request],
        before: Mapping[Request, tuple[int, tuple[int, int] | None]] | None = None,
        counted: Mapping[str, int] | None = None,
    ) -> None:
        """Restore a consistent state after an interrupted step: all requests wait, and no block is used.

        Args:
            unfinished: the requests that were not finished before, oldest first.
            before: how many tokens some of them had, and which of them had been decoded last: `progress_of` then.
            counted: the counters.
        """
        self.pool, self.copies = BlockPool(len(self.pool.users), self.block_size), {}
        for pool in self.window_pools:
            pool.reset()
        if self.states is not None:
            self.states.reset()
        for request, (num_tokens, decoded) in (before or {}).items():
            del request.tokens[request.prompt_len + num_tokens :], request.pieces[num_tokens:]
            request.decoded = decoded
        known = dict.fromkeys([*unfinished, *(before or ())])  # samples whose prompt was not computed yet among them
        new = [request for request in self.waiting if request not in known]  # added since
        for request in known:
            request.status, request.finish_reason, request.error = "waiting", None, None
            request.num_computed_tokens, request.blocks, request.contents = 0, [], []
            request.draft, request.accepted = None, []
        self.running, self.waiting = [], deque([*unfinished, *new])
        vars(self.counters).update(counted or {})


def progress_of(requests: Iterable[Request]) -> dict[Request, tuple[int, tuple[int, int] | None]]:
    """Return how far the outputs and the texts of requests are, and of their samples, for `undo`.

    Not in a step itself: from Python 3.12 on, `except` and `finally` may miss an interrupt inside of a comprehension.
    """
    return {request: (request.num_outputs, request.decoded) for request in with_samples(requests)}


def with_samples(requests: Iterable[Request]) -> list[Request]:
    """Return requests, and after each its samples that begin when its prompt is computed."""
    return [each for request in requests for each in ((request, *request.unforked) if request.others else (request,))]


def _together(scheduled: Mapping[Request, int]) -> dict[Request, int]:
    """Bring requests together that share blocks."""
    return dict(sorted(scheduled.items(), key=lambda item: item[0].blocks))
