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
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor

from refattn.batch import Batch, Level, Machine


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draw from the fewest, most likely tokens whose probabilities add up to this.
        seed: of the request's own random numbers. It uses one a token, so its company in the batch changes nothing.
        stop_token_ids: tokens that end the answer, as its last; None for the end tokens that the model names.

    Raises:
        ValueError: naming the attribute that is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a probability above 0, at most 1, got {self.top_p}")


GREEDY = Sampling()


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer.

    Attributes:
        tokens: the prompt, and behind it what was generated.
        prompt_len: how many of them are the prompt.
        sampling: how the next token is chosen.
        generator: the request's own random numbers.
        status: "waiting", "running" or "finished".
        finish_reason: of a finished request: "stop" (a stop token), "length" (max_tokens) or "abort".
        text: the answer so far, if the engine has a tokenizer.
        decoded: the generated tokens behind the last piece of `text`: the first one, and the one after the last.
        num_computed: how many of the tokens have their keys and values in the pool.
        blocks: the blocks of the pool that hold them, in order.
        prefixes: what those of the blocks hold that are full, in order.
    """

    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    generator: torch.Generator
    status: str = "waiting"
    finish_reason: str | None = None
    text: str = ""
    decoded: tuple[int, int] = (0, 0)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    prefixes: list["Prefix"] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, a stop token included."""
        return self.tokens[self.prompt_len :]

    @property
    def num_pending(self) -> int:
        """Tokens that have yet to go through the model: 1 for a decode, more for a prompt."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Event:
    """A request got a token, and `text` is what can be shown since: nothing after half a character."""

    request: Request
    token_id: int
    text: str


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
        model: a causal LM of transformers. Its attention is the engine's from the first step on;
            `model.set_attn_implementation("sdpa")` gives it back.
        num_blocks: blocks in the pool of each layer.
        block_size: tokens in a block.
        token_budget: most tokens in a step, so that no decode waits long for the prompts beside it.
        max_seqs: most requests that run at once.
        tokenizer: makes text of tokens, where text is wanted.
        twin: the package that computes, with its modules `kv_cache`, `metadata` and those of `PATHS` that the layers
            take; None for the package that the engine is imported from.
        machine: for which hardware to decide whether a shared prefix is worth a cascade; None for the one of `cascade`
            that stands for the kind of the model's device.

    Raises:
        ValueError: naming the argument, for a size below 1 or a model with layers that no path of the engine computes.
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
    ) -> None:
        sizes = dict(num_blocks=num_blocks, block_size=block_size, token_budget=token_budget, max_seqs=max_seqs)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
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

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | Sequence[Sampling] = GREEDY
    ) -> list[Request]:
        """Answer all prompts together, and give their finished requests in order.

        Arguments and errors are those of `add`, with one `sampling` for all or one for each. If one prompt is in error,
        none is queued.
        """
        requests = self._add_all(prompts, sampling)
        for _ in self._events_of(requests):
            pass
        return requests

    def stream(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | Sequence[Sampling] = GREEDY
    ) -> Iterator[Event]:
        """Answer all prompts together, as `generate` does, and give every token as it comes.

        Closing the iterator early aborts what is not finished.
        """
        return self._events_of(self._add_all(prompts, sampling))

    def add(self, prompt: str | Sequence[int], sampling: Sampling = GREEDY) -> Request:
        """Queue a prompt: token ids, or text if the engine has a tokenizer.

        Raises:
            ValueError: naming the argument, if the prompt is empty, has a token that the model does not know, or can
                never fit into the pool with `max_tokens` behind it. Nothing is queued then.
        """
        return self._add_all([prompt], sampling)[0]

    def abort(self, request: Request) -> None:
        """End a request where it is, and free its blocks; a finished one stays as it is."""
        if request.status == "waiting":
            self.waiting.remove(request)
        if request.status != "finished":
            self._finish(request, "abort")

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Run the model once over what is scheduled, and give each request with nothing left to compute a token."""
        scheduled = self._schedule()
        if not scheduled:
            return []
        logits = self._forward(scheduled)
        self._keep(scheduled)
        due = [request for request in scheduled if request.num_pending == 0]
        return [self._take(request, token) for request, token in zip(due, _choose(logits, due), strict=True)]

    def _add_all(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Request]:
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        if len(samplings) != len(prompts):
            raise ValueError(f"sampling: expected one, or one for each of {len(prompts)} prompts, got {len(samplings)}")
        requests = [self._make_request(*pair) for pair in zip(prompts, samplings, strict=True)]
        self.waiting.extend(requests)
        return requests

    def _make_request(self, prompt: str | Sequence[int], sampling: Sampling) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, as the engine has no tokenizer, got text")
            prompt = self.tokenizer(prompt).input_ids
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise ValueError("prompt: expected at least one token, got none")
        last_id = self.config.vocab_size - 1
        if min(tokens) < 0 or max(tokens) > last_id:
            raise ValueError(f"prompt: expected token ids in 0..{last_id}, got {min(tokens)}..{max(tokens)}")
        # One less, as the last token of an answer never goes through the model.
        needed, num_blocks = self._blocks_for(len(tokens) + sampling.max_tokens - 1), len(self.allocator.users)
        if needed > num_blocks:
            raise ValueError(
                f"prompt: expected to fit in the pool of {num_blocks} blocks of {self.block_size} tokens, "
                f"got {len(tokens)} tokens and max_tokens={sampling.max_tokens}, which need {needed} blocks"
            )
        return Request(tokens, len(tokens), sampling, torch.Generator().manual_seed(sampling.seed))

    def _events_of(self, requests: Sequence[Request]) -> Iterator[Event]:
        try:
            while any(request.status != "finished" for request in requests):
                yield from (event for event in self.step() if event.request in requests)
        finally:
            for request in requests:
                self.abort(request)

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

    def _forward(self, scheduled: dict[Request, int]) -> Float[Tensor, "b v"]:
        """Run the model over what is scheduled, and give the logits of each request with nothing left to compute."""
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
        if not self.counters.steps or self.config._attn_implementation != ATTENTION:
            _replace_attention(self.model)  # another model may have the same config, so what that says is not enough
        return self.model(**inputs, engine=self, use_cache=False).logits[0]

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
        **_: Any,
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
            _: what else transformers hands over, which does not change the attention of a decoder that only infers.

        Returns:
            The outputs as transformers wants them.
        """
        key_cache, value_cache = self.caches[layer]
        query, key, value = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
        self.kv_cache.write(key, value, key_cache, value_cache, slot_mapping)
        path, where = self.paths[self.kinds[layer]], {}
        if self.kinds[layer] == "chunked_attention":
            where = dict(chunk_size=self.config.attention_chunk_size)
        elif self.kinds[layer] == "sliding_attention":
            where = dict(window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1))
        elif levels:
            path, where = self.cascade, dict(levels=levels)
        options = dict(softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
        out = path.attention(query, key_cache, value_cache, batch, **where, **options)
        return rearrange(out, "t h d -> 1 t h d")

    def attend_differential(
        self,
        module: Any,
        query: Float[Tensor, "1 h t d"],
        key: Float[Tensor, "1 hk t d"],
        value: Float[Tensor, "1 hk t d"],
        batch: Batch,
        slot_mapping: Int64[Tensor, "t"],
        **_: Any,
    ) -> Float[Tensor, "1 t h d"]:
        """Compute the attention of a layer of DiffLlama, as `attend` does of others; it ends with the layer's norm."""
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

    def _keep(self, scheduled: dict[Request, int]) -> None:
        """Count what the step computed, and let the blocks be found that are full now."""
        self.counters.steps += 1
        for request, count in scheduled.items():
            self.counters.computed_tokens += count
            self.counters.chunks += request.num_pending > 1 or not request.output_ids
            request.num_computed += count
            for i in range(len(request.prefixes), request.num_computed // self.block_size):
                tokens = tuple(request.tokens[i * self.block_size : (i + 1) * self.block_size])
                parent = request.prefixes[-1] if request.prefixes else None
                request.prefixes.append(self.allocator.remember(request.blocks[i], parent, tokens))

    def _take(self, request: Request, token: int) -> Event:
        """Give a request its next token, and end it if that was its last."""
        request.tokens.append(token)
        stops = request.sampling.stop_token_ids
        if token in (_end_token_ids(self.model) if stops is None else stops):
            self._finish(request, "stop")
        elif len(request.output_ids) == request.sampling.max_tokens:
            self._finish(request, "length")
        piece = self._new_text(request) if self.tokenizer else ""
        request.text += piece
        return Event(request, token, piece)

    def _new_text(self, request: Request) -> str:
        """Give the text that was not there yet, but not half a character: its other bytes come with the next token.

        Decoding starts one piece earlier, as a tokenizer may treat the first token of a text in its own way.
        """
        output_ids, (start, end) = request.output_ids, request.decoded
        before = self.tokenizer.decode(output_ids[start:end], skip_special_tokens=True)
        text = self.tokenizer.decode(output_ids[start:], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and request.status != "finished":
            return ""
        request.decoded = end, len(output_ids)
        return text[len(before) :]

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._stop(request, "finished")

    def _stop(self, request: Request, status: str) -> None:
        """Take a request out of those that run, and its blocks from it."""
        if request.status == "running":
            self.running.remove(request)
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
        """Hand out free blocks to write to; there must be as many."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
            if block in self.prefixes:
                del self.block_of[self.prefixes.pop(block).hash]
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each block of a request, and free those that have none left.

        The last block goes first, so that what a prefix is built on outlives it.
        """
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.prefixes)


def _choose(logits: Float[Tensor, "b v"], requests: Sequence[Request]) -> list[int]:
    """Choose the next token of each request, from its own row of logits and its own random numbers."""
    settings = [request.sampling for request in requests]
    if all(setting.temperature == 0 for setting in settings):
        return logits.argmax(-1).tolist()
    uniform = [torch.rand((), generator=request.generator, dtype=torch.float64) for request in requests]
    columns = ([s.temperature for s in settings], [s.top_p for s in settings], uniform)
    return sample(
        logits, *(torch.tensor(column, dtype=torch.float64, device=logits.device) for column in columns)
    ).tolist()


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
        logits: a row for each request.
        temperature: divides the logits; a row with 0 gives its most likely token.
        top_p: where to cut the line.
        uniform: the random numbers.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    temperature, top_p, uniform = (rearrange(x, "b -> b 1") for x in (temperature, top_p, uniform))
    scaled = logits.double() / temperature.where(temperature > 0, 1.0)
    probabilities, token_ids = scaled.softmax(-1).sort(descending=True, stable=True)
    ends = probabilities.cumsum(-1)  # [b, v], where each token ends on the line
    length = (probabilities * (ends - probabilities < top_p)).sum(-1, keepdim=True)
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
    out = engine.attend_differential(module, query, key, value, **step)
    return module.o_proj(rearrange(out, "1 t h d -> 1 t (h d)")), None


def _layer_kinds(config: Any, num_tokens: int) -> list[str]:
    """Give the kind of every layer, in transformers' words, where a sequence or a step has up to `num_tokens` tokens.

    Raises:
        ValueError: if the model is no decoder, or has a kind of layer without a path.
    """
    every_layer = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = list(getattr(config, "layer_types", None) or [every_layer] * config.num_hidden_layers)
    if config.model_type == "diffllama":  # does not say so, but calls attention twice a layer
        kinds = ["differential_attention"] * len(kinds)
    if config.is_encoder_decoder:
        kinds = ["encoder_decoder"]
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
    ends = model.generation_config.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _load(twin: Any, module: str) -> Any:
    """Give a module of a twin, importing it by name if it has not been.

    By name, and not before it is needed: `fastattn.engine` builds on this file, and must not bring the oracle along.
    """
    return getattr(twin, module, None) or importlib.import_module(f"{twin.__name__}.{module}")
