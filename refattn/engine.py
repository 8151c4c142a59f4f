"""Continuous batching: serve many requests of a transformers causal LM at once, over any twin's paged attention.

A step is one forward pass over one flat row of tokens, at most `token_budget` of them. Decodes come first, and what is
left of the budget goes to chunks of prompts. With a budget of 8, and prompts of 8 tokens (c) and 5 (d):

    step 7    a17 | b5 | c0 c1 c2 c3 c4 c5
    step 8    a18 | b6 | c6 c7 | d0 d1 d2 d3       the logits of c7 give c its first token
    step 9    a19 | b7 | c8 | d4                   and those of d4 the first of d

The model's own code runs. Only its attention is replaced: transformers hands the queries, keys and values of each layer
to `paged_attention`, and the engine writes them into the pool and attends over it with the twin that it was given. It
computes nothing itself, so `fastattn.engine` is this file with another twin. The path is the one of the layer: windows
go to `sliding_window`, chunks to `local`, pairs of softmaxes to `differential`, and all else to `chunked_prefill`, or
to `cascade` in a step whose requests share so many blocks that reading them once is worth it.

Source: Yu et al. 2022, "Orca" (batching by step); Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention" (blocks, blocks shared by hash, preemption by recomputation); Agrawal et al. 2024,
"Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (chunks of prompts beside decodes).
"""

import importlib
import logging
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import accumulate
from math import inf
from operator import index
from random import Random
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor

from refattn.batch import Batch, Level, Machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draw from the fewest, most likely tokens whose probabilities add up to this.
        seed: of the request's own random numbers. Each of its tokens has its own, whatever else is in the batch.
        stop_token_ids: tokens that end the answer, as its last; None for the end tokens that the model names.

    Raises:
        ValueError: naming the attribute that has another type or is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        rules = dict(
            max_tokens=(type(self.max_tokens) is int and self.max_tokens >= 1, "an int of at least 1"),
            temperature=(
                type(self.temperature) in (int, float) and 0 <= self.temperature < inf,
                "0 (greedy) or more, and finite",
            ),
            top_p=(type(self.top_p) in (int, float) and 0 < self.top_p <= 1, "a probability above 0, at most 1"),
            seed=(type(self.seed) is int, "an int"),
            stop_token_ids=(
                stops is None or (type(stops) is tuple and all(type(token) is int for token in stops)),
                "a tuple of ints, or None",
            ),
        )
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")


GREEDY = Sampling()


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer.

    Attributes:
        tokens: the prompt, then what was generated.
        prompt_len: how many of them are the prompt.
        sampling: how the next token is chosen.
        status: "waiting", "running" or "finished".
        finish_reason: of a finished request: "stop" (a stop token), "length" (max_tokens), "abort", or "error".
        error: what went wrong, for a `finish_reason` of "error": the exception's type and message.
        pieces: the text that came with each generated token; empty strings if the engine has no tokenizer.
        decoded: which of the generated tokens the last piece was decoded from: the first one, and one past the last.
        num_computed: how many of the tokens have their keys and values in the pool.
        blocks: the blocks of the pool that hold them, in order.
        prefixes: what those of the blocks hold that are full, in order.
    """

    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    status: str = "waiting"
    finish_reason: str | None = None
    error: str | None = None
    pieces: list[str] = field(default_factory=list)
    decoded: tuple[int, int] = (0, 0)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    prefixes: list["Prefix"] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, a stop token included."""
        return self.tokens[self.prompt_len :]

    @property
    def text(self) -> str:
        """The answer so far, if the engine has a tokenizer."""
        return "".join(self.pieces)

    @property
    def num_pending(self) -> int:
        """Tokens that have yet to go through the model: 1 for a decode, more for a prompt."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Event:
    """A request got a token, or it failed.

    Attributes:
        request: the request.
        token_id: the token; None if the request failed.
        text: what can be shown since its last event: nothing that ends in half a character.
        error: what went wrong if the request failed, as in `Request.error`.
    """

    request: Request
    token_id: int | None = None
    text: str = ""
    error: str | None = None


@dataclass
class Counters:
    """What an engine has done so far.

    Attributes:
        steps: forward passes.
        computed_tokens: tokens that went through the model.
        chunks: pieces in which prompts, and requests to recompute, went through it.
        cached_tokens: tokens that did not have to, as the pool still had their blocks.
        cached_blocks: those blocks.
        preemptions: times that a request lost its blocks to an older one.
        key_reads: keys that the requests had in all steps, in tokens: what one full layer reads without a cascade.
        saved_key_reads: those of them that a cascade did not have to read again.
    """

    steps: int = 0
    computed_tokens: int = 0
    chunks: int = 0
    cached_tokens: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    key_reads: int = 0
    saved_key_reads: int = 0


class Engine:
    """Serves requests on a model whose attention `twin` computes.

    Args:
        model: a causal LM of transformers, of one of the families in `VERIFIED`. Its attention is the engine's from now
            on; `model.set_attn_implementation("sdpa")` gives it back.
        num_blocks: blocks in the pool of each layer.
        block_size: tokens in a block.
        token_budget: most tokens in a step, so that no decode waits long for the prompts beside it.
        max_seqs: most requests that run at once.
        tokenizer: makes text of tokens, where text is wanted.
        twin: the package that computes, with its modules `kv_cache`, `metadata` and those of `PATHS` that the layers
            take; None for the package that the engine is imported from.
        machine: for which hardware to decide whether a shared prefix is worth a cascade; None for the one of `cascade`
            that stands for the kind of the model's device.
        trust_model: serve a model of another family too. Nobody has compared its answers with transformers' own: do
            that before you rely on them.

    Raises:
        ValueError: naming the argument, for a size that is no int of at least 1, or a model that would be served
            wrongly.
        torch.OutOfMemoryError: if a GPU has no room for the pool.
    """

    package = "refattn"

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        token_budget: int = 256,
        max_seqs: int = 64,
        tokenizer: Any = None,
        twin: Any = None,
        machine: Machine | None = None,
        trust_model: bool = False,
    ) -> None:
        sizes = dict(num_blocks=num_blocks, block_size=block_size, token_budget=token_budget, max_seqs=max_seqs)
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")
        _check_model(model, trust_model)
        self.model, self.config, self.tokenizer = model.eval(), model.config.get_text_config(), tokenizer
        self.block_size, self.token_budget, self.max_seqs = block_size, token_budget, max_seqs
        twin = twin or importlib.import_module(self.package)
        self.kv_cache, self.metadata = _load(twin, "kv_cache"), _load(twin, "metadata")
        self.kinds = _layer_kinds(self.config, max(num_blocks * block_size, token_budget))
        self.paths = {kind: _load(twin, PATHS[kind]) for kind in set(self.kinds)}
        self.cascade = _load(twin, "cascade") if "full_attention" in self.kinds else None
        self.machine = machine
        if self.cascade:
            self.machine = machine or (self.cascade.CPU if model.device.type == "cpu" else self.cascade.H200)
        self.num_kv_heads, self.head_size = _cache_heads(self.config)
        self.vocab_size = min(self.config.vocab_size, len(model.get_input_embeddings().weight))
        self.max_positions = _max_positions(self.config)
        self.end_token_ids = _end_token_ids(model)
        try:
            self.caches = [
                (self.paths[kind] if kind == "differential_attention" else self.kv_cache).allocate(
                    num_blocks, block_size, self.num_kv_heads, self.head_size, dtype=model.dtype, device=model.device
                )
                for kind in self.kinds
            ]
        except torch.OutOfMemoryError as error:
            numbers = 2 * len(self.kinds) * num_blocks * block_size * self.num_kv_heads * self.head_size
            raise torch.OutOfMemoryError(
                f"num_blocks: expected a pool that fits into the memory of {model.device}, got {num_blocks} blocks of "
                f"{block_size} tokens, which are {numbers * model.dtype.itemsize / 2**30:.3g} GiB. {error}"
            ) from error
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.waiting: deque[Request] = deque()  # oldest first, and all of them younger than those that run
        self.running: list[Request] = []  # oldest first
        self.counters = Counters()
        self._is_stepping = False
        self._aborted: deque[Request] = deque()  # to be ended as soon as no step is under way
        self._attended: list[int] = []  # the layers whose attention this pass has computed
        self._try_model()

    def generate(
        self, prompts: Iterable[str | Iterable[int]], sampling: Sampling | Sequence[Sampling] = GREEDY
    ) -> list[Request]:
        """Answer all prompts together, and return their finished requests in order.

        One that failed has a `finish_reason` of "error"; the others have their answers all the same. Arguments and
        errors are those of `add`, with one `sampling` for all or one for each. If one prompt is in error, none is
        queued.
        """
        events = self._events_of(prompts, sampling)
        requests: list[Request] = next(events)
        for _ in events:
            pass
        return requests

    def stream(
        self, prompts: Iterable[str | Iterable[int]], sampling: Sampling | Sequence[Sampling] = GREEDY
    ) -> Generator[Event, None, None]:
        """Answer all prompts together, as `generate` does, and yield every token as it comes.

        Whether it is closed or only dropped, before its first token or after, what is not finished then is aborted.
        """
        events = self._events_of(prompts, sampling)
        next(events)  # queues the requests; a generator that never began would end without its `finally`
        return events

    def add(self, prompt: str | Iterable[int], sampling: Sampling = GREEDY) -> Request:
        """Queue a prompt: token ids, or text if the engine has a tokenizer.

        Raises:
            ValueError: naming the argument, if the prompt is empty, is not made of tokens that the model knows, or can
                never fit into the pool, or into the model's positions, with `max_tokens` after it. Nothing is queued
                then.
        """
        return self._add_all([prompt], sampling)[0]

    def abort(self, request: Request) -> None:
        """End a request where it is, and free its blocks; a finished one stays as it is.

        During a step (from a hook of the model, say) it is ended right after the step.

        Raises:
            ValueError: if the request is one of another engine.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request: expected one that this engine's add returned, got {request!r}")
        ours = self._is_stepping or request in self.running or request in self.waiting
        if request.status != "finished" and not ours:
            raise ValueError(f"request: expected one of this engine, got one of another, which is {request.status}")
        self._abort_all([request])

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Run the model once over what is scheduled, and give each request with nothing left to compute a token.

        A request that makes the model, the sampler or the tokenizer raise an exception, or whose logits are not finite,
        ends with a `finish_reason` of "error", and the others get their tokens. Whatever else is raised, say by Ctrl-C,
        is raised here, and then the step has not happened: its requests wait, with the tokens that they had.
        """
        unfinished = [*self.running, *self.waiting]
        counted = vars(self.counters).copy()
        before: dict[Request, tuple[int, tuple[int, int]]] = {}
        try:
            self._is_stepping = True
            scheduled = self._schedule()
            before = {request: (len(request.output_ids), request.decoded) for request in scheduled}
            if not scheduled:
                return []
            events = self._compute(scheduled)
            for request, event in events.items():
                self._commit(request, scheduled[request], event)
            self.counters.steps += 1
            return [event for event in events.values() if event]
        except BaseException:
            self._undo(unfinished, before, counted)
            raise
        finally:
            self._is_stepping = False
            self._abort_all([])

    def _add_all(
        self, prompts: Iterable[str | Iterable[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Request]:
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts: expected a list of prompts, got {prompts!r}")
        prompts = list(prompts)
        samplings = list(sampling) if isinstance(sampling, Iterable) else [sampling] * len(prompts)
        if len(samplings) != len(prompts):
            raise ValueError(f"sampling: expected one, or one for each of {len(prompts)} prompts, got {len(samplings)}")
        requests = [self._make_request(*pair) for pair in zip(prompts, samplings, strict=True)]
        self.waiting.extend(requests)
        return requests

    def _make_request(self, prompt: str | Iterable[int], sampling: Sampling) -> Request:
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling: expected a Sampling, got {sampling!r}")
        if isinstance(prompt, str) and self.tokenizer is None:
            raise ValueError("prompt: expected token ids, as the engine has no tokenizer, got text")
        tokens = _token_ids(self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)
        if not tokens:
            raise ValueError("prompt: expected at least one token, got none")
        last_id = self.vocab_size - 1
        if min(tokens) < 0 or max(tokens) > last_id:
            raise ValueError(f"prompt: expected token ids in 0..{last_id}, got {min(tokens)}..{max(tokens)}")
        # One less, as the last token of an answer never goes through the model.
        length = len(tokens) + sampling.max_tokens - 1
        needed, num_blocks = self._blocks_for(length), len(self.allocator.users)
        asked = f"got {len(tokens)} tokens and max_tokens={sampling.max_tokens}, which need"
        if needed > num_blocks:
            raise ValueError(
                f"prompt: expected to fit in the pool of {num_blocks} blocks of {self.block_size} tokens, "
                f"{asked} {needed} blocks"
            )
        if length > self.max_positions:
            raise ValueError(f"prompt: expected to fit in the model's {self.max_positions} positions, {asked} {length}")
        return Request(tokens, len(tokens), sampling)

    def _events_of(
        self, prompts: Iterable[str | Iterable[int]], sampling: Sampling | Sequence[Sampling]
    ) -> Generator[Any, None, None]:
        """Queue some prompts, yield the list of their requests, then every token, whoever makes the steps."""
        requests: list[Request] = []
        try:
            requests = self._add_all(prompts, sampling)
            yield requests
            shown = dict.fromkeys(requests, 0)
            while shown:
                for request in requests:
                    if request not in shown:
                        continue
                    is_last, pieces = request.status == "finished", request.pieces[shown[request] :]
                    for token, piece in zip(request.output_ids[shown[request] :], pieces, strict=True):
                        yield Event(request, token, piece)
                    shown[request] += len(pieces)
                    if is_last:
                        del shown[request]
                        if request.error is not None:
                            yield Event(request, error=request.error)
                if shown:
                    self.step()
        finally:
            self._abort_all(requests)

    def _abort_all(self, requests: Iterable[Request]) -> None:
        """End requests, and those whose end had to wait for a step to be over; what has finished stays as it is."""
        self._aborted.extend(requests)
        while self._aborted and not self._is_stepping:
            unfinished = [*self.running, *self.waiting]
            try:
                if self._aborted[0] in unfinished:
                    self._finish(self._aborted[0], "abort")
                self._aborted.popleft()
            except BaseException:
                self._undo(unfinished)
                raise

    def _undo(
        self,
        unfinished: Sequence[Request],
        before: Mapping[Request, tuple[int, tuple[int, int]]] | None = None,
        counted: Mapping[str, int] | None = None,
    ) -> None:
        """Go back to before something that an exception has left half done: all requests wait, with no blocks.

        What is in the pool is not trusted any more, so they are computed again, as after a preemption.

        Args:
            unfinished: the requests that were not finished before, oldest first.
            before: of those that may have got a token since: the length of their output, and their `decoded`.
            counted: the counters.
        """
        self.allocator = BlockAllocator(len(self.allocator.users), self.block_size)
        for request, (num_tokens, decoded) in (before or {}).items():
            del request.tokens[request.prompt_len + num_tokens :], request.pieces[num_tokens:]
            request.decoded = decoded
        known = set(unfinished)
        new = [request for request in self.waiting if request not in known]  # added since
        for request in unfinished:
            request.status, request.finish_reason, request.error = "waiting", None, None
            request.num_computed, request.blocks, request.prefixes = 0, [], []
        self.running, self.waiting = [], deque([*unfinished, *new])
        vars(self.counters).update(counted or {})

    def _schedule(self) -> dict[Request, int]:
        """Pick how many tokens of which requests go into this step, and give them the blocks for those."""
        scheduled: dict[Request, int] = {}
        preemptions = self.counters.preemptions
        for request in sorted(self.running, key=lambda request: request.num_pending > 1):  # decodes first, then by age
            count = min(request.num_pending, self.token_budget - sum(scheduled.values()))
            if request.status == "running" and count and self._make_room(request, count, scheduled):
                scheduled[request] = count
        while self.waiting and len(self.running) < self.max_seqs and self.counters.preemptions == preemptions:
            count = self.token_budget - sum(scheduled.values())
            if not count or not self._start(self.waiting[0]):
                break
            request = self.waiting.popleft()
            scheduled[request] = min(request.num_pending, count)
            self._make_room(request, scheduled[request], scheduled)
        return dict(sorted(scheduled.items(), key=lambda item: item[0].blocks))  # who shares blocks stands together

    def _make_room(self, request: Request, count: int, scheduled: dict[Request, int]) -> bool:
        """Give a request the blocks for `count` more tokens, taking those of the youngest ones when none are left.

        False if the youngest was the request itself. The oldest always gets its blocks, so there is always one that
        goes on; and a preempted request loses its keys and values only, not its tokens or its random numbers.
        """
        needed = self._blocks_for(request.num_computed + count) - len(request.blocks)
        while needed > len(self.allocator.free):
            youngest = self.running[-1]
            scheduled.pop(youngest, None)
            self._stop(youngest, "waiting")
            self.waiting.appendleft(youngest)
            self.counters.preemptions += 1
            if youngest is request:
                return False
        request.blocks += self.allocator.allocate(needed)
        return True

    def _start(self, request: Request) -> bool:
        """Let a request run, behind what the pool still has of it, if there are blocks for all its tokens so far."""
        cached = self.allocator.find(request.tokens[:-1])  # the last token has to go through the model: for its logits
        unused = sum(self.allocator.users[block] == 0 for block in cached)  # free so far
        if self._blocks_for(len(request.tokens)) - len(cached) > len(self.allocator.free) - unused:
            return False
        self.allocator.share(cached)
        self.running.append(request)
        request.status, request.blocks, request.num_computed = "running", cached, len(cached) * self.block_size
        request.prefixes = [self.allocator.prefixes[block] for block in cached]
        self.counters.cached_blocks += len(cached)
        self.counters.cached_tokens += request.num_computed
        return True

    def _compute(self, scheduled: dict[Request, int]) -> dict[Request, Event | None]:
        """Run the model over what is scheduled, and return what came of each request: no books are changed yet.

        That is its next token, or that it failed; None if it has more to compute before it is due a token. A pass that
        raises does not say which of its requests is at fault, so each of them goes through the model alone then, and
        writes the same keys and values into the same slots.
        """
        due = [request for request, count in scheduled.items() if count == request.num_pending]
        counted = vars(self.counters).copy()
        try:
            tokens = dict(zip(due, _choose(self._forward(scheduled), due), strict=True))
        except Exception as error:
            logger.exception("a pass over %d requests failed", len(scheduled))
            vars(self.counters).update(counted)
            failure = _describe(error)  # in words: the exception itself would keep all tensors of the pass alive
        else:
            return {
                request: self._next_event(request, tokens[request]) if request in tokens else None
                for request in scheduled
            }
        if len(scheduled) == 1:
            return {request: Event(request, error=failure) for request in scheduled}
        outcomes: dict[Request, Event | None] = {}
        for request, count in scheduled.items():
            outcomes |= self._compute({request: count})
        return outcomes

    def _forward(self, scheduled: dict[Request, int]) -> Float[Tensor, "b v"]:
        """Run the model over what is scheduled, and return the logits of each request with nothing left to compute."""
        return self._run_model(self._make_inputs(scheduled, self._make_levels(scheduled, self.machine)))

    def _make_inputs(self, scheduled: dict[Request, int], levels: list[Level] | None = None) -> dict[str, Any]:
        """Make what the model is called with: all that a step needs to know, once for all layers."""
        device = self.caches[0][0].device
        query_lens, seq_lens, input_ids = [], [], []
        for request, count in scheduled.items():
            query_lens.append(count)
            seq_lens.append(request.num_computed + count)
            input_ids += request.tokens[request.num_computed : request.num_computed + count]
        block_tables = [request.blocks for request in scheduled]
        batch = self.metadata.make_batch(query_lens, seq_lens, block_tables, device=device)
        num_rows = self._num_rows(len(input_ids))
        input_ids += [0] * (num_rows - len(input_ids))
        due = [
            row - 1
            for row, request, count in zip(accumulate(query_lens), scheduled, query_lens, strict=True)
            if count == request.num_pending
        ]
        return dict(
            input_ids=torch.tensor([input_ids], device=device),
            position_ids=rearrange(self.metadata.positions(batch, num_rows), "t -> 1 t"),
            logits_to_keep=torch.tensor(due, dtype=torch.int64, device=device),
            batch=batch,
            slot_mapping=self.metadata.slot_mapping(batch, num_rows, block_size=self.block_size),
            levels=levels,
        )

    def _make_levels(self, scheduled: dict[Request, int], machine: Machine | None) -> list[Level] | None:
        """Make the levels of a cascade over what the requests of a step share; None if that is not worth it."""
        query_lens = list(scheduled.values())
        seq_lens = [request.num_computed + count for request, count in scheduled.items()]
        block_tables = [request.blocks for request in scheduled]
        self.counters.key_reads += sum(seq_lens)
        if not self.cascade or machine is None:
            return None
        found = self.cascade.find_prefixes(query_lens, seq_lens, block_tables, block_size=self.block_size)
        prefixes = self.cascade.worthwhile_prefixes(
            query_lens,
            seq_lens,
            found,
            num_heads=self.config.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            element_size=self.model.dtype.itemsize,
            machine=machine,
        )
        if not prefixes:
            return None
        levels: list[Level] = self.cascade.make_levels(
            query_lens, seq_lens, block_tables, prefixes, block_size=self.block_size, device=self.model.device
        )
        self.counters.saved_key_reads += sum(seq_lens) - sum(int(level.batch.seq_lens.sum()) for level in levels)
        return levels

    def _num_rows(self, num_tokens: int) -> int:
        """Say how many rows a step of `num_tokens` tokens has, with padding; here it has none."""
        return num_tokens

    def _run_model(self, inputs: dict[str, Any]) -> Float[Tensor, "b v"]:
        """Run the model once; its keyword arguments reach `attend` in every layer."""
        if self.config._attn_implementation != ATTENTION:
            _replace_attention(self.model)
        self._attended.clear()
        logits = self.model(**inputs, engine=self, use_cache=False).logits[0]
        if sorted(self._attended) != list(range(len(self.kinds))):
            raise ValueError(
                f"model: expected every one of {len(self.kinds)} layers to attend once, got layers {self._attended}"
            )
        return logits

    def _try_model(self) -> None:
        """Run the model over one token in the first block, so that one that cannot be served is refused at once."""
        request = Request([0], 1, GREEDY, blocks=[0])
        before = self.config._attn_implementation
        try:
            _replace_attention(self.model)  # even if the config says so: another model may have the same config
            with torch.no_grad():
                self._run_model(self._make_inputs({request: 1}))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.model.set_attn_implementation(before)
            raise ValueError(
                f"model: expected one whose attention the engine can take over, got {type(self.model).__name__}, "
                f"which fails over one token with {type(error).__name__}: {error}"
            ) from error

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 h t d"],
        key: Float[Tensor, "1 hk t d"],
        value: Float[Tensor, "1 hk t dv"],
        batch: Batch,
        slot_mapping: Int64[Tensor, "t"],
        levels: Sequence[Level] | None = None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Float[Tensor, "h"] | None = None,
        **others: Any,
    ) -> Float[Tensor, "1 t h dv"]:
        """Compute the attention of a layer: write its keys and values into its pool, and attend on its path.

        Args:
            layer: which layer.
            query: of all new tokens; transformers has the heads in front, and a batch of one.
            key: of all new tokens.
            value: of all new tokens.
            batch: the lengths and blocks of the step.
            slot_mapping: where the new tokens go.
            levels: of the step's cascade; None where there is none.
            scaling: the softmax scale.
            sliding_window: how many tokens each one sees, itself included; None for all.
            softcap: bound on the scores.
            s_aux: the sinks.
            others: what else transformers passes, of what is `HARMLESS`.

        Returns:
            The outputs as transformers wants them.

        Raises:
            ValueError: for an option that the engine does not know, or a window where the layer's kind has none.
        """
        _check_options(others)
        window, kind = sliding_window or 0, self.kinds[layer]
        if (window > 0) != (kind == "sliding_attention"):
            raise ValueError(
                f"sliding_window: expected a window in layers of kind sliding_attention and in no other, "
                f"got {sliding_window} in layer {layer} of kind {kind}"
            )
        key_cache, value_cache = self.caches[layer]
        query, key, value = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
        self.kv_cache.write(key, value, key_cache, value_cache, slot_mapping)
        path, where = self.paths[kind], {}
        if kind == "chunked_attention":
            where = dict(chunk_size=self.config.attention_chunk_size)
        elif kind == "sliding_attention":
            where = dict(window_size=(window - 1, 0))
        elif levels:
            path, where = self.cascade, dict(levels=levels)
        options = dict(softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
        out = path.attention(query, key_cache, value_cache, batch, **where, **options)
        return rearrange(out, "t h d -> 1 t h d").contiguous()  # as transformers' own: some models view it

    def attend_differential(
        self,
        module: Any,
        query: Float[Tensor, "1 h t d"],
        key: Float[Tensor, "1 hk t d"],
        value: Float[Tensor, "1 hk t d"],
        batch: Batch,
        slot_mapping: Int64[Tensor, "t"],
        levels: None = None,
        **others: Any,
    ) -> Float[Tensor, "1 t h d"]:
        """Compute the attention of a layer of DiffLlama, as `attend` does of others; it ends with the layer's norm."""
        _check_options(others)
        path, cache = self.paths["differential_attention"], self.caches[module.layer_idx]
        query, key, value = (path.interleave_halves(rearrange(x, "1 h t d -> t h d")) for x in (query, key, value))
        path.write(key, value, cache, slot_mapping)
        vectors = (module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2)
        out = path.attention(
            query,
            cache,
            batch,
            lambda_full=path.compute_lambda(*vectors, lambda_init=module.lambda_init),
            lambda_init=module.lambda_init,
            norm_weight=module.groupnorm.weight,
            norm_eps=module.groupnorm.eps,
            softmax_scale=module.scaling,
        )
        return rearrange(out, "t h d -> 1 t h d")

    def _next_event(self, request: Request, token: int | None) -> Event:
        """Return the event of a request's next token, or of its failure if there is no token or no text of it."""
        if token is None:
            return Event(request, error="FloatingPointError: logits: expected finite numbers, got NaN or infinity")
        try:
            return Event(request, token, self._new_text(request, token) if self.tokenizer else "")
        except Exception as error:
            logger.exception("a request of %d tokens failed", len(request.tokens))
            return Event(request, error=_describe(error))

    def _new_text(self, request: Request, token: int) -> str:
        """Return the text that comes with a token, but not half a character: its other bytes come with the next token.

        Decoding starts one piece earlier, as a tokenizer may treat the first token of a text in its own way.
        """
        output_ids, (start, end) = [*request.output_ids, token], request.decoded
        before = self.tokenizer.decode(output_ids[start:end], skip_special_tokens=True)
        text = self.tokenizer.decode(output_ids[start:], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and self._reason_to_end(request, token) is None:
            return ""
        request.decoded = end, len(output_ids)
        return str(text[len(before) :])

    def _reason_to_end(self, request: Request, token: int) -> str | None:
        """Return the reason why a token is the last of its request, or None if it is not."""
        stops = request.sampling.stop_token_ids
        if token in (self.end_token_ids if stops is None else stops):
            return "stop"
        return "length" if len(request.output_ids) + 1 == request.sampling.max_tokens else None

    def _commit(self, request: Request, count: int, event: Event | None) -> None:
        """Enter into the books what came of a request."""
        if event is not None and event.error is not None:
            request.error = event.error
            self.allocator.forget(request.blocks)  # nobody can say what they hold
            self._finish(request, "error")
            return
        self._keep(request, count)
        if event is not None and event.token_id is not None:
            reason = self._reason_to_end(request, event.token_id)
            request.tokens.append(event.token_id)
            request.pieces.append(event.text)
            if reason:
                self._finish(request, reason)

    def _keep(self, request: Request, count: int) -> None:
        """Count what a step computed of a request, and let its blocks be found that are full now."""
        self.counters.computed_tokens += count
        self.counters.chunks += request.num_pending > 1 or not request.output_ids
        request.num_computed += count
        for i in range(len(request.prefixes), request.num_computed // self.block_size):
            tokens = tuple(request.tokens[i * self.block_size : (i + 1) * self.block_size])
            parent = request.prefixes[-1] if request.prefixes else None
            request.prefixes.append(self.allocator.remember(request.blocks[i], parent, tokens))

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._stop(request, "finished")

    def _stop(self, request: Request, status: str) -> None:
        """Take a request out of those that run or wait, and its blocks from it."""
        (self.running if request.status == "running" else self.waiting).remove(request)
        self.allocator.release(request.blocks)
        request.status, request.num_computed, request.blocks, request.prefixes = status, 0, [], []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a full block holds: its tokens, behind those of all blocks before it.

    A prefix is one object however many requests begin with it, so to compare a block and all before it takes the
    block's own tokens and the identity of its parent.
    """

    parent: "Prefix | None"
    tokens: tuple[int, ...]
    hash: int


def _block_hash(parent: Prefix | None, tokens: tuple[int, ...]) -> int:
    """Hash the tokens of a block and, through the hash of its parent, all tokens before them."""
    return hash((parent and parent.hash, tokens))


class BlockAllocator:
    """Hands out the blocks of the pool, and finds those again that hold the start of a prompt.

    Any number of requests may use a block. One that nobody uses is free, but keeps what it holds until its turn comes
    to be handed out: blocks that hold nothing of use go first, then the least recently used.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.users = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be handed out first
        self.prefixes: dict[int, Prefix] = {}  # of the blocks that can be found
        self.block_of: dict[int, int] = {}  # those blocks, by hash

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Find the blocks that hold the start of `tokens`, as far as there are any."""
        blocks: list[int] = []
        parent = None
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = self._look_up(parent, tuple(tokens[start : start + self.block_size]))
            if block is None:
                break
            blocks.append(block)
            parent = self.prefixes[block]
        return blocks

    def remember(self, block: int, parent: Prefix | None, tokens: tuple[int, ...]) -> Prefix:
        """Let a block be found that is full now, unless another one holds the same; the prefix is the one of both."""
        same = self._look_up(parent, tokens)
        if same is not None:
            return self.prefixes[same]
        prefix = Prefix(parent, tokens, _block_hash(parent, tokens))
        if prefix.hash in self.block_of:  # other tokens with the same hash: the newer ones stay
            del self.prefixes[self.block_of[prefix.hash]]
        self.prefixes[block], self.block_of[prefix.hash] = prefix, block
        return prefix

    def _look_up(self, parent: Prefix | None, tokens: tuple[int, ...]) -> int | None:
        block = self.block_of.get(_block_hash(parent, tokens))
        if block is None:
            return None
        prefix = self.prefixes[block]  # an equal hash is a hint, not a proof
        return block if prefix.parent is parent and prefix.tokens == tokens else None

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of blocks that were found."""
        for block in blocks:
            self.users[block] += 1
            self.free.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """Hand out free blocks to write to, which are not found any more; there must be as many."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
        self.forget(blocks)
        return blocks

    def forget(self, blocks: Sequence[int]) -> None:
        """Let blocks not be found any more."""
        for block in blocks:
            if block in self.prefixes:
                del self.block_of[self.prefixes.pop(block).hash]

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each block of a request, and free those that have none left.

        The last block goes first, so that what a prefix is built on outlives it.
        """
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.prefixes)


def _choose(logits: Float[Tensor, "b v"], requests: Sequence[Request]) -> list[int | None]:
    """Choose the next token of each request, from its own row of logits and its own random numbers.

    There is none in a row with NaN or `+inf`, or with nothing above `-inf`.
    """
    settings = [request.sampling for request in requests]
    is_sound = logits.amax(-1).isfinite()
    if all(setting.temperature == 0 for setting in settings):
        tokens = logits.argmax(-1)
    else:
        uniform = [_uniform(request) for request in requests]
        columns = ([s.temperature for s in settings], [s.top_p for s in settings], uniform)
        tokens = sample(
            logits.where(rearrange(is_sound, "b -> b 1"), 0.0),
            *(torch.tensor(column, dtype=torch.float64, device=logits.device) for column in columns),
        )
    return [None if token < 0 else token for token in tokens.where(is_sound, -1).tolist()]


def _uniform(request: Request) -> float:
    """Return the random number in [0, 1) of a request's next token.

    It follows from the seed and the token's place alone, so a step that is run again, or a request that is computed
    again, draws the same.
    """
    return Random(f"{request.sampling.seed}/{len(request.output_ids)}").random()


def sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, "b"],
    top_p: Float[Tensor, "b"],
    uniform: Float[Tensor, "b"],
) -> Int64[Tensor, "b"]:
    """Draw a token from each row, with one random number of [0, 1) each.

    The tokens of a row lie on a line by their probabilities, the most likely first. The line is cut behind the token
    that reaches `top_p`, and the random number is a place on what remains:

        |-------- the --------|---- a ----|-- one --|- my -|·····
        0                                        top_p          1

    Args:
        logits: a row for each request, each with a finite largest one.
        temperature: divides the logits; a row with 0 gives its most likely token.
        top_p: where to cut the line.
        uniform: the random numbers.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    temperature, top_p, uniform = (rearrange(x, "b -> b 1") for x in (temperature, top_p, uniform))
    # The largest is taken off first: divided by a very small temperature it would be infinite.
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.where(temperature > 0, 1.0)
    probabilities, token_ids = scaled.softmax(-1).sort(descending=True, stable=True)
    ends = probabilities.cumsum(-1)  # [b, v], where each token ends on the line
    length = ends.where(ends - probabilities < top_p, 0.0).amax(-1, keepdim=True)
    drawn = token_ids.gather(-1, torch.searchsorted(ends, uniform * length, right=True))
    return rearrange(drawn.where(temperature > 0, logits.argmax(-1, keepdim=True)), "b 1 -> b")


# What ties the engine to transformers.

ATTENTION = "twinattn"  # the name of `paged_attention` there
PATHS = {  # of each kind of layer
    "full_attention": "chunked_prefill",
    "sliding_attention": "sliding_window",
    "chunked_attention": "local",
    "differential_attention": "differential",
}


# The families of models, by `config.model_type`, whose logits have been compared with those of transformers' own eager
# attention. The test that does it, tests/test_engine_models.py, fails if this list is not what it compares.
VERIFIED = tuple(  # a sentence reads better here than a list of its words
    """
    afmoe apertus arcee aria_text beam bert bert-generation biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm
    diffllama dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 kolibri1 laguna llama llama4_text
    mellum minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma
    """.split()  # noqa: SIM905
)

# What some of the others do that the engine does not. Nothing but their own code would show it.
UNSERVED = {
    "bloom": "whose scores have an ALiBi bias, added outside of transformers' AttentionInterface",
    "mpt": "whose scores have an ALiBi bias, added outside of transformers' AttentionInterface",
    "gemma4": "whose layers have heads of different sizes",
    "gemma4_text": "whose layers have heads of different sizes",
    "nemotron": "whose attention is not passed the keyword arguments of its model",
    "stablelm": "whose attention is not passed the keyword arguments of its model",
}
HARMLESS = {  # options of an attention that change nothing in a decoder that only infers
    "dropout",  # 0 then
    "encoder_hidden_states",  # None then
    "output_attentions",
    "output_router_logits",
    "past_key_values",  # None then
    "position_ids",  # the model itself has used them
    "use_cache",
}
# Types of rotary positions with fixed frequencies, and types whose frequencies change with the longest sequence in the
# batch once it is longer than `_max_positions`.
STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")
DYNAMIC_ROPE = ("dynamic", "longrope")


def _check_model(model: Any, trust_model: bool) -> None:
    """Check that the engine serves a model as it is meant: a causal decoder whose positions are its `position_ids`.

    Raises:
        ValueError: saying what the model does that the engine does not, or that nobody has tried its family yet.
    """
    reason = _reason_to_refuse(model)
    if reason:
        raise ValueError(f"model: expected a causal decoder of transformers, got {type(model).__name__}, {reason}")
    family = model.config.model_type
    if family not in VERIFIED and not trust_model:
        raise ValueError(
            f"model: expected one of a family whose answers were compared with transformers' own, got {family}. To try "
            "it, pass trust_model=True and compare its answers with those of model.generate; served are "
            f"{', '.join(VERIFIED)}"
        )


def _reason_to_refuse(model: Any) -> str | None:
    """Return what a model does that the engine would get wrong; None if nothing is known."""
    configs = (model.config, model.config.get_text_config())
    parameters = signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        return "which has an encoder"
    if model.config.model_type in UNSERVED:
        return UNSERVED[model.config.model_type]
    if not model._can_set_attn_implementation():
        return "which is not built on transformers' AttentionInterface"
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            return f"whose forward takes no {name}"
    for option in ("alibi", "add_cross_attention", "use_bidirectional_attention"):
        if any(getattr(config, option, None) for config in configs):
            return f"with {option}"
    if any(getattr(config, "kv_lora_rank", None) for config in configs):
        return "which has latent attention (MLA): its keys and values have heads of different sizes"
    if any(getattr(config, "is_causal", True) is False for config in configs):
        return "with is_causal=False"
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False:
            return f"whose attention {name} is not causal; a model that can be both needs is_decoder=True"
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return f"whose positions begin past padding_idx={module.padding_idx}"
    for rope_type in _rope_types(configs[-1]):
        if rope_type not in STATIC_ROPE + DYNAMIC_ROPE:
            return f"whose rotary positions are of type {rope_type}, not {', '.join(STATIC_ROPE + DYNAMIC_ROPE)}"
    return None


def _rope_types(config: Any) -> dict[str, Any]:
    """Return the types of a model's rotary positions, with their settings: one for all layers, or for each kind."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_kind = settings.values() if all(isinstance(value, dict) for value in settings.values()) else [settings]
    return {one.get("rope_type") or "default": one for one in by_kind}


def _max_positions(config: Any) -> int | float:
    """Return how many positions a model has, in tokens: infinity if it does not say.

    Past them a table of positions ends, and dynamic rotary positions change for every request in the batch. "longrope"
    does so earlier, past the length that the model was first trained with.
    """
    found = [getattr(config, "max_position_embeddings", None)]
    for rope_type, settings in _rope_types(config).items():
        if rope_type == "longrope":
            found.append(settings["original_max_position_embeddings"])
    return min((number for number in found if number), default=inf)


def _replace_attention(model: Any) -> None:
    """Let the layers of a model call `paged_attention`.

    Raises:
        ValueError: if the code of the model does not let its attention be replaced.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    model.set_attn_implementation(ATTENTION)
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        raise ValueError(f"model: expected one built on transformers' AttentionInterface, got {type(model).__name__}")
    for module in model.modules():
        if type(module).__name__ == "DiffLlamaAttention":  # it subtracts and norms around two calls of the interface
            module.forward = partial(_differential_attention, module)


def paged_attention(
    module: Any,
    query: Float[Tensor, "1 h t d"],
    key: Float[Tensor, "1 hk t d"],
    value: Float[Tensor, "1 hk t dv"],
    attention_mask: Tensor | None,
    *,
    engine: Engine | None = None,
    **step: Any,
) -> tuple[Float[Tensor, "1 t h dv"], None]:
    """Hand the attention of a layer to the engine that runs the model; transformers calls this in place of its own.

    Raises:
        ValueError: if no engine runs the model, or the model has a mask of its own.
    """
    if engine is None:
        raise ValueError(
            'engine: expected one to run this model; model.set_attn_implementation("sdpa") frees it, got None'
        )
    if attention_mask is not None:
        raise ValueError(f"attention_mask: expected None, as the batch says who sees whom, got {attention_mask.shape}")
    engine._attended.append(module.layer_idx)
    return engine.attend(module.layer_idx, query, key, value, **step), None


def _differential_attention(
    module: Any,
    hidden_states: Float[Tensor, "1 t width"],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    engine: Engine | None = None,
    **step: Any,
) -> tuple[Float[Tensor, "1 t width"], Tensor | None]:
    """Hand a layer of DiffLlama to the engine between its projections; without an engine it is what it was."""
    if engine is None:
        return type(module).forward(module, hidden_states, position_embeddings, attention_mask, **step)
    query, key, value = (
        rearrange(projection(hidden_states), "1 t (h d) -> 1 h t d", d=module.head_dim)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    engine._attended.append(module.layer_idx)
    out = engine.attend_differential(module, query, key, value, **step)
    return module.o_proj(rearrange(out, "1 t h d -> 1 t (h d)")), None


def _check_options(options: Mapping[str, Any]) -> None:
    """Check that an attention has no option that the engine would not honour.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if name not in HARMLESS:
            raise ValueError(f"{name}: expected no option of attention that the engine does not know, got {value!r}")
    for name in ("dropout", "encoder_hidden_states", "past_key_values"):
        if options.get(name):
            raise ValueError(f"{name}: expected none in a decoder that only infers, got {options[name]!r}")


def _layer_kinds(config: Any, num_tokens: int) -> list[str]:
    """Give the kind of every layer, in transformers' words, where a sequence or a step has up to `num_tokens` tokens.

    Raises:
        ValueError: if the model has a kind of layer without a path.
    """
    every_layer = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = list(getattr(config, "layer_types", None) or [every_layer] * config.num_hidden_layers)
    if config.model_type == "diffllama":  # does not say so, but calls attention twice a layer
        kinds = ["differential_attention"] * len(kinds)
    for kind in kinds:
        if kind not in PATHS:
            raise ValueError(f"model: expected a decoder with layers of kind {' or '.join(PATHS)}, got {kind}")
    floor_scale = config.floor_scale if getattr(config, "attn_temperature_tuning", False) else num_tokens + 1
    if num_tokens >= floor_scale:  # the model's own code takes the row of a token for its position there
        raise ValueError(
            f"model: expected sequences and steps below floor_scale={floor_scale} tokens with attn_temperature_tuning, "
            f"got up to {num_tokens}"
        )
    return kinds


def _cache_heads(config: Any) -> tuple[int, int]:
    """Give the number of key heads, and their size.

    Raises:
        ValueError: if the query heads do not divide among the key heads, or the width among the query heads.
    """
    heads, width = config.num_attention_heads, config.hidden_size
    num_kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % num_kv_heads:
        raise ValueError(
            f"model: expected num_attention_heads to be a multiple of {num_kv_heads} key heads, got {heads}"
        )
    head_size = getattr(config, "head_dim", None)
    if head_size is None and width % heads:
        raise ValueError(f"model: expected hidden_size to be a multiple of {heads} heads, got {width}")
    return num_kv_heads, head_size or width // heads


def _end_token_ids(model: Any) -> tuple[int, ...]:
    """Give the tokens that end an answer, by the model's own account."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _load(twin: Any, module: str) -> Any:
    """Give a module of a twin, importing it by name if it has not been.

    By name, and not before it is needed: `fastattn.engine` builds on this file, and must not bring the oracle along.
    """
    return getattr(twin, module, None) or importlib.import_module(f"{twin.__name__}.{module}")


def _token_ids(prompt: Iterable[int]) -> list[int]:
    """Return a prompt's tokens as a list of ints, whatever holds them: a list, an array, a tensor.

    Raises:
        ValueError: if it does not hold ints, in one row.
    """
    tokens: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(tokens, (str, bytes, Mapping, Set)) or not isinstance(tokens, Iterable):
        raise ValueError(f"prompt: expected token ids, got {prompt!r}")
    tokens = list(tokens)
    wrong = [token for token in tokens if isinstance(token, bool) or not hasattr(token, "__index__")]
    if wrong:
        raise ValueError(f"prompt: expected token ids, which are ints, got {wrong[0]!r}")
    return [index(token) for token in tokens]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
