"""Continuous batching: serve many requests of a transformers causal LM at once, over any twin's paged attention.

A step is one forward pass over one flat row of tokens, at most `max_num_batched_tokens` of them. Decodes come first;
the rest of the budget goes to chunks of prompts. With a budget of 8, and prompts of 8 tokens (c) and 5 (d):

    step 7    a17 | b5 | c0 c1 c2 c3 c4 c5
    step 8    a18 | b6 | c6 c7 | d0 d1 d2 d3       the logits of c7 give c its first token
    step 9    a19 | b7 | c8 | d4                   and those of d4 the first of d

The engine runs the model's own code and replaces only its attention: transformers passes the queries, keys and values
of each layer to `models.paged_attention`, and the engine writes them into the pool and attends over it with the given
twin. It computes nothing itself. A layer is a mask over a storage (`layers`): windows are planned by `sliding_window`,
chunks by `local`, all else by `chunked_prefill`, or by `cascade` in a step whose requests share so many blocks that it
is worth reading them once; pairs of softmaxes are computed by `differential`, latents by `mla`, selected ones by
`sparse`, 8 bits by `quantized`.

A layer with a window or with chunks has a smaller pool (`WindowPool`) if no step can need all of its blocks: a block is
freed as soon as no later token can see it. A layer that keeps a state has no keys at all, and slots in a `StatePool`.

A runner may launch a step before the tokens of the one before it are read (`AsyncRunner`), so that the device waits
for the host no more:

    host      launch 7 | launch 8 | read 7, book | launch 9 | read 8, book | launch 10 | ...
    device             | 7                   | 8                   | 9                   | ...

Step 8 takes the tokens of step 7 on the device, and those of prompts from the host. It is what the scheduler would
choose if step 7 ended no request early (`Scheduler.schedule_ahead`, which also says when it has to wait for step 7). A
request that step 7 turns out to end is in step 8 for nothing: its row is not read.

With `speculation`, a decode also verifies drafted tokens. A draft is right if the model chooses the same token with the
same random number that the token would have without drafts. So the answers are the same, in fewer steps.

Source: Yu et al. 2022, "Orca" (batching by step); Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention" (blocks, blocks shared by hash, preemption by recomputation); Agrawal et al. 2024,
"Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (chunks of prompts beside decodes).
"""

import gc
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from itertools import chain
from math import ceil
from typing import Any, ParamSpec, TypeVar

import torch
from einops import reduce
from jaxtyping import Float, Int32, Int64
from torch import Tensor

import refattn
from refattn.batch import Batch, Prefix
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import MOST_NODES, Accepted, Trees
from twinattn.engine import arguments, models
from twinattn.engine.block_pool import BlockPool, Span
from twinattn.engine.cost_model import CPU, H200, Machine, saved_key_reads, worthwhile_prefixes
from twinattn.engine.detokenize import new_text
from twinattn.engine.index_modules import IndexTokens
from twinattn.engine.kv_cache_dtype import KEY_RANGE, VALUE_RANGE, quantize, set_scales
from twinattn.engine.layers import Layer, Lens, Parts
from twinattn.engine.request import AnyPrompt, Draft, Event, Prompt, Request, StepTokens, check_spans, fill_in, tokenize
from twinattn.engine.runner import AsyncRunner, KeepingRunner, Runner, UnderWay
from twinattn.engine.sampling import GREEDY, SamplingParams, choose
from twinattn.engine.scheduler import Counters, Scheduler
from twinattn.engine.speculation import DraftModel, NGram
from twinattn.engine.state_layers import Recurrence, StateParts, StatePools, plan_states
from twinattn.engine.state_pool import StatePool
from twinattn.engine.storages import CalibrationStats, SelectedLatentStorage
from twinattn.engine.twin import Twin
from twinattn.engine.weights import Weights
from twinattn.engine.window_pool import WindowPool

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def _cpu_by_default(function: Callable[P, T]) -> Callable[P, T]:
    """Make tensors on the CPU where no device is named, whatever `torch.set_default_device` says."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":
            return function(*args, **options)
        with torch.device("cpu"):
            return function(*args, **options)

    return call


@dataclass(frozen=True)
class Step:
    """A step, as all layers of a model see it.

    Attributes:
        batch: the lengths and blocks of its requests.
        slot_mappings: where the new tokens go, in the pool of each kind of layer.
        plans: the plans of each kind of layer, with the query rows of each.
        states: the plans of all layers that keep a state, likewise.
    """

    batch: Batch
    slot_mappings: dict[Layer, Int64[Tensor, "t"]]
    plans: dict[Layer, Parts]
    states: StateParts = ()


@lru_cache(maxsize=64, typed=True)
def _plain_options(scale: float, softcap: float, batch_invariant: bool) -> AttentionOptions:
    """Make the options of a layer without tensors once: they are checked each time that they are made."""
    return AttentionOptions(scale, softcap, batch_invariant=batch_invariant)


def _unmarked(phase: str) -> None:
    """Ignore a step: the default callback."""


class Engine:
    """Serves requests with a model; its attention is computed by `twin`.

    Attributes:
        mark: called with what a step does from here on, for a profile: "scheduling", "tables", "copies", "forward",
            "sampling" or "bookkeeping", and "done" when it is over.

    Args:
        model: a causal LM of transformers, of one of the families in `models.VERIFIED`. Its attention is replaced by
            the engine's; `model.set_attn_implementation("sdpa")` restores it.
        num_blocks: blocks in the pool of each layer; a layer with a window has fewer where no step can need so many.
        block_size: tokens in a block.
        max_num_batched_tokens: most tokens in a step, so that no decode waits long for the prompts beside it.
        max_num_seqs: most requests that run at once.
        tokenizer: converts tokens to text, if text is needed. What it calls an end ends an output, too.
        twin: the package that computes, `refattn` or `fastattn`.
        machine: for which hardware to decide whether a shared prefix is worth a cascade; None for the one of
            `cost_model` that stands for the kind of the model's device.
        runner: runs some steps in its own way, for example by replaying CUDA graphs; None runs the model.
        batch_invariant: compute the attention of every row bit-identically, whatever else is in the batch. There is no
            cascade then, as it depends on the other requests. The model's own matrix products are not covered.
        speculation: how to draft tokens, which the model verifies next to the confirmed ones; None drafts nothing. More
            than one branch needs layers that take trees: all but those of local chunks.
        kv_cache_dtype: what the pools hold: "auto", the model's own type; or quantized values of 8 bits, "fp8_e4m3",
            "fp8_e5m2" or "int8", for twice as many tokens in the same memory and answers that may differ. Latents and
            pairs have no int8. Of latents also "fp8_ds_mla", packed rows: a scale for each 128 numbers of a latent, and
            rotary keys that stay in 16 bits. The index keys beside them are always in the model's own type.
        calibration: how large keys and values become, from `calibrate`, for the scales. None: fp8 has scales of 1, and
            saturates at its largest number; of int8 only the keys are quantized, and values stay as they are. Packed
            rows take none.
        calculate_kv_scales: work out the scales of fp8 while serving, where there is no calibration: by the largest
            keys and values of the first step, with room for larger ones to come (`layers.KEY_RANGE`). From then on they
            are fixed, so no later answer depends on what else is served, but all depend on the first step.
        num_kept_states: states that are kept for cached prefixes in a model with layers that keep a state, besides
            those of the requests that run; None for as many as those. Other models have none.
        trust_model: serve a model of another family too. Its answers have not been compared with transformers' own:
            do that before you rely on them.

    Raises:
        ValueError: naming the argument, for one of another type, a size that is not an int of at least 1, an unknown
            type of cache, a calibration of another model, or a model that would be served wrongly.
        NotImplementedError: if the model has layers that the engine keeps in no such cache; for `batch_invariant` with
            layers that keep a state; or under `torch.autocast`.
        torch.OutOfMemoryError: if a GPU has no room for the pool.
    """

    @_cpu_by_default
    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_batched_tokens: int = 256,
        max_num_seqs: int = 64,
        tokenizer: Any = None,
        twin: Any = refattn,
        machine: Machine | None = None,
        runner: Runner | None = None,
        batch_invariant: bool = False,
        speculation: NGram | DraftModel | None = None,
        kv_cache_dtype: str = "auto",
        calibration: Sequence[CalibrationStats] | None = None,
        calculate_kv_scales: bool = False,
        num_kept_states: int | None = None,
        trust_model: bool = False,
    ) -> None:
        sizes = dict(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        arguments.check_sizes(sizes)
        arguments.check_parts(
            tokenizer=tokenizer,
            twin=twin,
            machine=machine,
            runner=runner,
            speculation=speculation,
            batch_invariant=batch_invariant,
            calculate_kv_scales=calculate_kv_scales,
            trust_model=trust_model,
        )
        arguments.check_module(model)
        models.check_model(model, trust_model)
        arguments.check_scales(kv_cache_dtype, calibration, calculate_kv_scales)
        _check_autocast(model)
        self.model, self.config, self.tokenizer = model.eval(), model.config.get_text_config(), tokenizer
        self.block_size, self.max_num_batched_tokens = block_size, max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.twin, self.runner, self.batch_invariant = Twin(twin), runner, batch_invariant
        most_tokens = max(num_blocks * block_size, max_num_batched_tokens)
        layers = models.layers_of(self.config, most_tokens, batch_invariant=batch_invariant)
        self.layers = quantize(layers, kv_cache_dtype)
        self.owners = models.owners_of(self.config)  # for each layer, the layer whose pool it reads
        self.places = {index: place for place, index in enumerate(models.attention_layers(self.config))}
        self.state_layers = models.state_layers(model)
        if batch_invariant and self.state_layers:
            raise NotImplementedError(
                "batch_invariant: expected False with layers that keep a state, none of whose kernels is, got True"
            )
        if calibration is not None:
            self.layers = set_scales(self.layers, calibration, self.twin, self.owners, model.device)
        self.speculation = speculation
        without = [layer for layer in self.layers if not layer.takes_trees]
        if speculation is not None and speculation.max_branches > 1 and without:
            raise ValueError(
                f"speculation: expected max_branches=1, as {without[0]} has no plan for trees, "
                f"got {speculation.max_branches}"
            )
        if speculation is not None and speculation.max_branches > 1 and self.state_layers:
            raise ValueError(
                "speculation: expected max_branches=1 with layers that keep a state, as a state follows one token, "
                f"got {speculation.max_branches}"
            )
        self.machine = machine or (CPU if model.device.type == "cpu" else H200)
        self.vocab_size = min(self.config.vocab_size, len(model.get_input_embeddings().weight))
        self.max_positions = models.max_positions(self.config)
        if isinstance(speculation, DraftModel) and speculation.engine.vocab_size != self.vocab_size:
            raise ValueError(
                f"speculation: expected a draft model of the same {self.vocab_size} tokens, got one of "
                f"{speculation.engine.vocab_size}"
            )
        self.end_token_ids = {*models.end_token_ids(model), getattr(tokenizer, "eos_token_id", None)} - {None}
        limits = dict(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        pool_blocks = {layer: layer.pool_blocks(num_blocks, block_size, **limits) for layer in self.layers}
        self.window_pools = {
            layer: WindowPool(count, num_blocks, window_size=(layer.mask.reach - 1, 0), block_size=block_size)
            for layer, count in pool_blocks.items()
            if count < num_blocks
        }
        try:
            self.caches: list[Any] = []
            for owner, layer in zip(self.owners, self.layers, strict=True):
                own = owner == len(self.caches)
                where = dict(dtype=model.dtype, device=model.device)
                blocks = pool_blocks[layer], block_size
                self.caches.append(layer.storage.allocate(self.twin, *blocks, **where) if own else self.caches[owner])
        except RuntimeError as error:
            arguments.check_out_of_memory(error)
            owning = [self.layers[owner] for owner in sorted({*self.owners})]
            size = sum(block_size * pool_blocks[x] * x.storage.bytes_per_token(model.dtype) for x in owning)
            raise torch.OutOfMemoryError(
                f"num_blocks: expected a pool that fits into the memory of {model.device}, got {num_blocks} blocks of "
                f"{block_size} tokens, which are {size / 2**30:.3g} GiB. {error}"
            ) from error
        slots = self._allocate_states(num_blocks, num_kept_states)
        self.scheduler = Scheduler(
            num_blocks, block_size, **limits, window_pools=self.window_pools.values(), states=slots
        )
        self.mark: Callable[[str], None] = _unmarked
        self._is_stepping = False
        self._under_way: UnderWay | None = None  # a step that is launched, and not read yet
        self._aborted: deque[Request] = deque()  # to be ended as soon as no step is under way
        self._attended: list[int] = []  # the layers whose attention this pass has computed
        self._folded: list[int] = []  # and those whose states
        self._calculates_scales = False  # in every pass, until one over requests has succeeded
        self._try_model()
        self._calculates_scales = self._has_scales_of_first_step = calculate_kv_scales
        self.weights, self._has_new = Weights(model), False  # and requests since they were looked at

    @property
    def waiting(self) -> deque[Request]:
        """Requests that wait, oldest first."""
        return self.scheduler.waiting

    @property
    def running(self) -> list[Request]:
        """Requests that run, oldest first."""
        return self.scheduler.running

    @property
    def counters(self) -> Counters:
        """The counters so far."""
        return self.scheduler.counters

    @property
    def pool_bytes(self) -> int:
        """The bytes of all layers' pools, scales included, as the tensors have them."""
        tensors = [x for cache in self.caches for x in _pools_of(cache)]
        tensors += [x for layer in self.layers for x in layer.fixed_scales]
        tensors += [x for pools in self.state_caches.values() for x in pools if x is not None]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    @property
    def decode_len(self) -> int:
        """The most new tokens of a decode: one, and the chain of its drafts."""
        return 1 if self.speculation is None else 1 + self.speculation.max_drafts

    @property
    def max_request_tokens(self) -> int | float:
        """The most tokens of a request that may go through the model: what the pool holds, and it has positions for."""
        return min(len(self.pool.users) * self.block_size, self.max_positions)

    @property
    def pool(self) -> BlockPool:
        """The blocks, and the requests that use them."""
        return self.scheduler.pool

    def generate(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[Request]:
        """Answer all prompts together, and return their finished requests in order.

        A request that failed has a `finish_reason` of "error"; the others still get their answers. Arguments and
        errors are those of `add`, with one `sampling` for all or one for each. If one prompt is in error, none is
        queued.
        """
        events = self._events_of(prompts, sampling)
        requests: list[Request] = next(events)
        for _ in events:
            pass
        return requests

    def stream(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> Generator[Event, None, None]:
        """Answer all prompts together, as `generate` does, and yield every token as it comes.

        If it is closed or dropped, before or after its first token, unfinished requests are aborted.
        """
        events = self._events_of(prompts, sampling)
        next(events)  # queues the requests; a generator that never began would end without its `finally`
        return events

    def add(self, prompt: AnyPrompt, sampling: SamplingParams = GREEDY) -> Request:
        """Queue a prompt: token ids, text if the engine has a tokenizer, or a `Prompt` with spans.

        Raises:
            ValueError: naming the argument, if the prompt is empty, is not made of tokens that the model knows, or can
                never fit into the pool, or into the model's positions, with `max_tokens` after it; if it has spans and
                the model is of no family in `models.SPANNED`, or a step has not room for one. Nothing is queued then.
        """
        return self._add_all([prompt], sampling)[0]

    def abort(self, request: Request) -> None:
        """End a request at once and free its blocks; a finished one is not changed.

        During a step (from a hook of the model, say) it is ended right after the step.

        Raises:
            ValueError: if the request belongs to another engine.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request: expected one that this engine's add returned, got {request!r}")
        ours = self._is_stepping or request in self.running or request in self.waiting
        if request.status != "finished" and not ours:
            raise ValueError(f"request: expected one of this engine, got one of another, which is {request.status}")
        self._abort_all([request])

    def warm_up(self, num_tokens: int = 1024) -> None:
        """Do now what the first steps would do else: compile kernels, capture decodes. What it computes is discarded.

        Prompts are computed whole, in chunks and beside decodes. The objects that are there then are taken out of
        Python's garbage collection, which would look at each of them now and then, for a tenth of a second.

        Args:
            num_tokens: tokens of the longest sequence to be ready for.

        Raises:
            ValueError: if there are requests, or `num_tokens` is not an int of at least 1.
            RuntimeError: if the model fails.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            raise ValueError(f"num_tokens: expected an int of at least 1, got {num_tokens!r}")
        if self.running or self.waiting:
            raise ValueError(f"warm_up: expected no requests, got {len(self.running) + len(self.waiting)}")
        num_tokens = int(min(num_tokens, self.max_request_tokens))
        counted = vars(self.counters).copy()
        try:
            length, count = max(1, num_tokens - 1), self.max_num_batched_tokens // num_tokens + 2
            prompts = [[i % self.vocab_size] * length for i in range(min(count, self.max_num_seqs))]
            requests = self.generate([[0], *prompts], SamplingParams(max_tokens=min(2, num_tokens), stop_token_ids=()))
            failed = [request.error for request in requests if request.error is not None]
            if failed:
                raise RuntimeError(f"warm_up: {len(failed)} of {len(requests)} requests failed: {failed[0]}")
            if isinstance(self.runner, AsyncRunner):
                self.runner.warm_up(self, num_tokens)
        finally:
            self.scheduler.undo([], None, counted)
        gc.collect()
        gc.freeze()

    @_cpu_by_default
    @torch.no_grad()
    def step(self) -> list[Event]:
        """Run the model once over the scheduled tokens, and append a token to each request that is ready for one.

        With an `AsyncRunner`, the next step may be under way when it returns.

        A request that makes the model, the sampler or the tokenizer raise an exception, or whose logits are not finite,
        ends with a `finish_reason` of "error", and the others get their tokens. Any other exception, for example from
        Ctrl-C, is raised here and the step is undone: its requests wait, with the tokens that they had.

        Raises:
            NotImplementedError: under `torch.autocast`. Nothing is computed then.
        """
        _check_autocast(self.model)
        self.mark("scheduling")
        unfinished = [*self.running, *self.waiting]
        counted = vars(self.counters).copy()
        before: dict[Request, tuple[int, tuple[int, int] | None]] = {}
        try:
            self._is_stepping = True
            self._check_weights(unfinished)
            scheduled, under_way = self._next_pass()
            before = _progress(scheduled)
            if not scheduled:
                return []
            under_way = under_way or self._launch(scheduled)
            if under_way is not None:
                self._under_way = self._launch_next(under_way)
            events = self._compute(scheduled, under_way)
            for request, its_events in events.items():
                self._commit(request, scheduled[request], its_events)
            self.counters.steps += 1
            return list(chain.from_iterable(events.values()))  # in Python 3.12 no except is sure after a comprehension
        except BaseException:
            self._under_way = None
            self.scheduler.undo(unfinished, before, counted)
            raise
        finally:
            self._is_stepping = False
            self._abort_all([])
            self.mark("done")

    def forget(self) -> None:
        """Compute anew, from the next step on, all that was computed from the model's weights.

        Those are cached prefixes and states, the keys and values of requests that run, scales of the first step, and
        captured graphs. The engine does so by itself where weights were written to or replaced. Call it after a change
        that leaves no trace: a write through `weight.data`, or a switch in the model's own code. After such a write,
        call `twinattn.engine.pack` again, too, and `forget` of a draft model's engine if its weights were meant.
        """
        self.weights.is_trusted = False

    def _check_weights(self, unfinished: Sequence[Request]) -> None:
        """Begin anew with all requests if the weights are not those of the step before."""
        are_trusted, were_written = self.weights.is_trusted, self.weights.were_written()
        were_moved = not are_trusted or ((self._has_new or were_written) and self.weights.were_moved())
        if were_moved or were_written:
            self._under_way = None
            self.scheduler.undo(unfinished)
            self._calculates_scales = self._has_scales_of_first_step
            if isinstance(self.runner, KeepingRunner) and (were_moved or self._calculates_scales):
                self.runner.forget()
            self.weights.remember()
            logger.info("the weights of the model have changed: nothing that was computed from others is used")
        self._has_new = False

    def _add_all(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts: expected a list of prompts, got {prompts!r}")
        prompts = list(prompts)
        samplings = list(sampling) if isinstance(sampling, Iterable) else [sampling] * len(prompts)
        if len(samplings) != len(prompts):
            raise ValueError(f"sampling: expected one, or one for each of {len(prompts)} prompts, got {len(samplings)}")
        requests = [self._make_request(*pair) for pair in zip(prompts, samplings, strict=True)]
        self._has_new = True
        self.waiting.extend(requests)
        return requests

    def _make_request(self, prompt: AnyPrompt, sampling: SamplingParams) -> Request:
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling: expected a SamplingParams, got {sampling!r}")
        given = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        tokens = tokenize(given.tokens, self.tokenizer)
        if not tokens:
            raise ValueError("prompt: expected at least one token, got none")
        family = self.model.config.model_type
        spans = check_spans(given.spans, len(tokens), self.max_num_batched_tokens)
        if spans and family not in models.SPANNED:
            raise ValueError(
                f"spans: expected none in a model of the family {family}, which has no such mask, only of "
                f"{', '.join(models.SPANNED)}, got {given.spans}"
            )
        last_id = self.vocab_size - 1
        if min(tokens) < 0 or max(tokens) > last_id:
            raise ValueError(f"prompt: expected token ids in 0..{last_id}, got {min(tokens)}..{max(tokens)}")
        # One less, as the last token of an answer never goes through the model.
        length = len(tokens) + sampling.max_tokens - 1
        needed, num_blocks = self.scheduler.blocks_for(length), len(self.pool.users)
        asked = f"got {len(tokens)} tokens and max_tokens={sampling.max_tokens}, which need"
        if needed > num_blocks:
            raise ValueError(
                f"prompt: expected to fit in the pool of {num_blocks} blocks of {self.block_size} tokens, "
                f"{asked} {needed} blocks"
            )
        if length > self.max_positions:
            raise ValueError(f"prompt: expected to fit in the model's {self.max_positions} positions, {asked} {length}")
        return Request(tokens, len(tokens), sampling, spans=spans, continues=given.is_continued)

    def _events_of(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[Any, None, None]:
        """Queue some prompts, yield the list of their requests, then every token, whichever thread makes the steps."""
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
                    for token, piece in zip(request.tokens[request.prompt_len + shown[request] :], pieces, strict=True):
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
        """Abort requests, including deferred aborts; what has finished is not changed."""
        self._aborted.extend(requests)
        while self._aborted and not self._is_stepping:
            unfinished = [*self.running, *self.waiting]
            try:
                if self._aborted[0] in unfinished:
                    self.scheduler.finish(self._aborted[0], "abort")
                self._aborted.popleft()
            except BaseException:
                self.scheduler.undo(unfinished)
                raise

    def _next_pass(self) -> tuple[dict[Request, int], UnderWay | None]:
        """Return the step that is under way if a request is left in it, else schedule the next one."""
        under_way, self._under_way = self._under_way, None
        scheduled = {} if under_way is None else _going_on(under_way)
        if scheduled:
            self.scheduler.follow(scheduled)
        else:
            scheduled, under_way = self._in_order(self._add_drafts(self.scheduler.schedule())), None
        self.counters.key_reads += sum(request.num_computed_tokens + count for request, count in scheduled.items())
        return scheduled, under_way

    def _in_order(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """Bring the requests of a step into the order of its rows."""
        splits = self.state_layers or any(layer.splits_decodes for layer in self.layers)
        return self._decodes_first(scheduled) if splits else scheduled

    def _add_drafts(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """Add drafts to decodes, as far as step, pool and output have room."""
        if self.speculation is None:
            return scheduled
        room = self.max_num_batched_tokens - sum(scheduled.values())
        has_spans = any(request.spans and request.has_span(count) for request, count in scheduled.items())
        branches = 1 if has_spans or max(scheduled.values(), default=0) > MOST_NODES else None
        for request, count in scheduled.items():
            request.draft, request.accepted = None, []
            depth = request.sampling.max_tokens - request.num_outputs - 1
            if count != 1 or request.num_pending != 1 or depth < 1 or room < 1:
                continue
            nodes = min(room, MOST_NODES - 1)
            draft = self.speculation.propose(request.tokens, depth=depth, nodes=nodes, branches=branches)
            if draft is not None and self.scheduler.allocate(request, 1 + len(draft.tokens)):
                request.draft, scheduled[request] = draft, 1 + len(draft.tokens)
                room -= len(draft.tokens)
        return scheduled

    def _decodes_first(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """Bring the decodes of a step before its prefills: each kind is one slice of query rows then, with a plan."""
        requests, counts = list(scheduled), list(scheduled.values())
        order = self.twin.metadata.order_decodes_first(counts, decode_len=self.decode_len)
        return {requests[i]: counts[i] for i in order}

    def _compute(self, scheduled: dict[Request, int], under_way: UnderWay | None = None) -> dict[Request, list[Event]]:
        """Run the model over what is scheduled, and return the events of each request, which change nothing yet.

        A request gets its next token, or several if drafts were right, or a failure; none if it has more to compute
        first. A pass that raises does not say which of its requests is at fault, so each of them goes through the model
        alone then, and writes the same keys and values into the same slots.

        Args:
            scheduled: the number of new tokens of each request.
            under_way: the pass, if it has been launched.
        """
        due = [request for request, count in scheduled.items() if count >= request.num_pending]
        counted = vars(self.counters).copy()
        try:
            tokens = self._choose(self._forward(scheduled), due) if under_way is None else self._read(under_way)
        except Exception as error:
            logger.exception("a pass over %d requests failed", len(scheduled))
            vars(self.counters).update(counted)
            self._under_way = None
            failure = _describe(error)  # in words: the exception itself would keep all tensors of the pass alive
        else:
            self._calculates_scales = False
            self.mark("bookkeeping")
            return {request: self._next_events(request, tokens.get(request, [])) for request in scheduled}
        if len(scheduled) == 1:
            return {request: [Event(request, error=failure)] for request in scheduled}
        outcomes: dict[Request, list[Event]] = {}
        for request, count in scheduled.items():
            outcomes |= self._compute({request: count})
        return outcomes

    def _launch(self, scheduled: Mapping[Request, int]) -> UnderWay | None:
        """Launch a step; None if there is no runner for it, or if that fails: then it is computed without one."""
        if not isinstance(self.runner, AsyncRunner) or self._calculates_scales:
            return None
        if self.speculation is not None and any(max(count, r.num_pending) > 1 for r, count in scheduled.items()):
            return None  # drafts are accepted on the host
        counted, launched = vars(self.counters).copy(), None
        try:
            launched = self.runner.launch(self, scheduled)
        except Exception:
            logger.exception("a step of %d requests could not be launched", len(scheduled))
        if launched is None:
            vars(self.counters).update(counted)
        return launched

    def _launch_next(self, before: UnderWay) -> UnderWay | None:
        """Launch the step after one that is under way, unless the scheduler needs the tokens of that one."""
        assert isinstance(self.runner, AsyncRunner)  # it has launched the one before
        if self.speculation is not None:
            return None
        self.mark("scheduling")
        scheduled = self._in_order(self.scheduler.schedule_ahead(_going_on(before)))
        if not scheduled:
            return None
        try:
            return self.runner.launch_next(self, before, scheduled)
        except Exception:  # it is computed in a step of its own then, where its failure belongs
            logger.exception("a step of %d requests could not be launched ahead", len(scheduled))
            return None

    def _read(self, under_way: UnderWay) -> dict[Request, list[int | None]]:
        """Wait for the tokens of a step that was launched."""
        self.mark("sampling")
        return {request: [token] for request, token in zip(under_way.requests, under_way.tokens(), strict=True)}

    def _choose(self, logits: Float[Tensor, "rows v"], due: Sequence[Request]) -> dict[Request, list[int | None]]:
        """Choose the next tokens of requests: one, or those of the drafts that the model chose, too, and one more."""
        self.mark("sampling")
        sample = self.twin.sample
        if not any(request.draft for request in due):
            return {request: [token] for request, token in zip(due, choose(logits, due, sample=sample), strict=True)}
        drafts = [request.draft or Draft((), (-1,)) for request in due]
        rows = [request for request, draft in zip(due, drafts, strict=True) for _ in draft.parents]
        chosen = choose(logits, rows, [depth for draft in drafts for depth in draft.depths], sample=sample)
        path, metadata = self.twin.speculative, self.twin.metadata
        trees = path.make_trees([draft.parents for draft in drafts])
        sizes = [len(draft.parents) for draft in drafts]
        seq_lens = [request.num_computed_tokens + size for request, size in zip(due, sizes, strict=True)]
        accepted = path.accept(
            metadata.make_batch(sizes, seq_lens),
            trees,
            torch.tensor([token for draft in drafts for token in (0, *draft.tokens)]),
            torch.tensor([-1 if token is None else token for token in chosen]),
        )
        blocks = [request.blocks for request in due]
        self._compact(metadata.make_batch(sizes, seq_lens, blocks, device=self.model.device), trees, accepted)
        nodes, next_tokens = accepted.nodes.tolist(), accepted.next_tokens.tolist()
        return {
            request: [*(draft.tokens[node - 1] for node in path if node > 0), token if token >= 0 else None]
            for request, draft, path, token in zip(due, drafts, nodes, next_tokens, strict=True)
        }

    def _compact(self, batch: Batch, trees: Trees, accepted: Accepted) -> None:
        """Move what was accepted to where the next step looks for it; of chains it is there already."""
        node = torch.arange(trees.max_len)
        if bool(((accepted.nodes < 0) | (accepted.nodes == node)).all()):
            return
        here = Trees(trees.parents.to(batch.device), trees.lens.to(batch.device))
        there = Accepted(*(tensor.to(batch.device) for tensor in accepted))
        for layer in dict.fromkeys(self.layers):
            pool = self.window_pools.get(layer)
            owned = [i for i, own in enumerate(self.layers) if own == layer and self.owners[i] == i]
            caches = [x for i in owned for x in _pools_of(self.caches[i])]
            where = batch if pool is None else pool.translate_batch(batch)
            self.twin.speculative.compact(caches, where, here, there, block_size=self.block_size)

    def _forward(self, scheduled: dict[Request, int]) -> Float[Tensor, "b v"]:
        """Run the model over what is scheduled, and return the logits of each request with nothing left to compute.

        A request with a draft has a row for each of its nodes.
        """
        self.mark("tables")
        return self.logits_of(StepTokens.of(scheduled))

    def logits_of(self, tokens: StepTokens) -> Float[Tensor, "rows v"]:
        """Run the model over the new tokens of a step, in the runner's way if it has one; return its logits."""
        logits = None
        if self.runner is not None and tokens.spans is None and not self._calculates_scales:
            logits = self.runner.run(self, tokens)
        if logits is None:
            logits = self.run_model(self.make_inputs(tokens, self.find_prefixes(tokens, self.machine)))
        return logits

    def make_inputs(self, tokens: StepTokens, prefixes: Sequence[Prefix] = ()) -> dict[str, Any]:
        """Make the inputs of the model for the new tokens of a step.

        Args:
            tokens: the new tokens.
            prefixes: the shared keys that a cascade reads once.
        """
        self.mark("copies")
        device, trees = self.model.device, None
        lens = tokens.query_lens, tokens.seq_lens
        batch = self.twin.metadata.make_batch(*lens, tokens.block_tables, device=device)
        if tokens.parents is not None:
            trees = self.twin.speculative.make_trees(tokens.parents, device=device)
        input_ids, rows = (_on_device(numbers, device) for numbers in (tokens.input_ids, tokens.logits_rows))
        if tokens.chosen is not None:
            input_ids = fill_in(input_ids, tokens.chosen)
        pool = self.scheduler.states
        states: StateParts = ()
        if pool is not None:
            slots = [pool.slots_of(request, tokens.chosen is not None) for request in tokens.requests]
            states = plan_states(self.twin, batch, slots, tokens.query_lens, pool, list(self.state_caches.values()))
        inputs = self.inputs_of(batch, input_ids, rows, trees, prefixes, list(zip(*lens, strict=True)), states)
        if tokens.spans is not None:
            inputs["step"] = self.plan_spans(inputs["step"], len(input_ids), tokens.spans)
        return inputs

    def inputs_of(
        self,
        batch: Batch,
        input_ids: Int64[Tensor, "t"] | Int32[Tensor, "t"],
        logits_rows: Int64[Tensor, "rows"],
        trees: Trees | None = None,
        prefixes: Sequence[Prefix] = (),
        lens: Lens | None = None,
        states: StateParts = (),
    ) -> dict[str, Any]:
        """Make the inputs of the model from tensors, without waiting for the device: a graph may capture it.

        Args:
            batch: the lengths and blocks of the requests.
            input_ids: the new tokens of all requests, padding included.
            logits_rows: the query rows whose logits are wanted.
            trees: the new tokens of all requests as trees; None if all drafts are chains.
            prefixes: the shared keys that a cascade reads once.
            lens: the new tokens and all tokens of each request; None if there is padding, or only the device knows.
            states: the plans of all layers that keep a state.
        """
        self.mark("tables")
        num_tokens = len(input_ids)
        if trees is None:
            positions = self.twin.metadata.positions(batch, num_tokens)
        else:
            positions = self.twin.speculative.positions(batch, trees, num_tokens)
        return dict(
            input_ids=input_ids[None],
            position_ids=positions[None],
            logits_to_keep=logits_rows,
            step=replace(self.plan_step(batch, num_tokens, prefixes, lens, trees), states=states),
        )

    def plan_step(
        self,
        batch: Batch,
        num_tokens: int,
        prefixes: Sequence[Prefix] = (),
        lens: Lens | None = None,
        trees: Trees | None = None,
    ) -> "Step":
        """Plan a step, once for all equal layers.

        Args:
            batch: the lengths and blocks of the requests.
            num_tokens: query rows, padding included.
            prefixes: the shared keys that a cascade reads once.
            lens: the new tokens and all tokens of each request; None if there is padding, or only the device knows.
            trees: the new tokens of all requests as trees; None if all drafts are chains.
        """
        slots = self.twin.metadata.slot_mapping(batch, num_tokens, block_size=self.block_size)
        step = Step(batch, {}, {})
        for layer in dict.fromkeys(self.layers):
            pool = self.window_pools.get(layer)
            step.slot_mappings[layer] = slots if pool is None else pool.translate_slots(slots)
            where = batch if pool is None else pool.translate_batch(batch)
            if trees is None:
                step.plans[layer] = layer.plan(self.twin, where, self.block_size, lens, self.decode_len)
            else:
                step.plans[layer] = layer.plan_trees(self.twin, where, trees, self.block_size)
        if prefixes:
            cascade = self.twin.cascade.plan(batch, prefixes=prefixes, block_size=self.block_size)
            step.plans.update({layer: ((slice(None), cascade),) for layer in step.plans if layer.takes_cascades})
        return step

    def plan_spans(self, step: "Step", num_tokens: int, spans: Sequence[Sequence[Span]]) -> "Step":
        """Plan a step anew whose requests have spans, once for all equal layers.

        Args:
            step: from `plan_step`.
            num_tokens: query rows.
            spans: of each request.
        """
        most = max(map(len, spans))
        rows = [[*its_spans, *[(-1, -1)] * (most - len(its_spans))] for its_spans in spans]
        device = step.batch.device
        table = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        plans = {}
        for layer in step.plans:
            pool = self.window_pools.get(layer)
            where = step.batch if pool is None else pool.translate_batch(step.batch)
            plans[layer] = layer.plan_spans(self.twin, where, table, num_tokens, self.block_size)
        return replace(step, plans=plans)

    def find_prefixes(self, tokens: StepTokens, machine: Machine) -> list[Prefix]:
        """Return the shared prefixes of a step for which a cascade is worth it on a machine."""
        lens = tokens.query_lens, tokens.seq_lens
        layer = next((layer for layer in self.layers if layer.takes_cascades), None)
        if layer is None or self.batch_invariant or tokens.parents is not None or tokens.spans is not None:
            return []
        if layer.expands_prefills and max(tokens.query_lens, default=0) > self.decode_len:
            return []  # a prefill that computes keys and values reads its context once anyway
        full = layer.storage
        found = self.twin.cascade.find_prefixes(*lens, tokens.block_tables, block_size=self.block_size)
        prefixes = worthwhile_prefixes(
            *lens,
            found,
            num_heads=self.config.num_attention_heads,
            num_kv_heads=full.num_kv_heads,
            head_size=full.head_size,
            element_size=ceil(full.bytes_per_token(self.model.dtype) / (2 * full.num_kv_heads * full.head_size)),
            machine=machine,
        )
        self.counters.saved_key_reads += saved_key_reads(prefixes)
        return prefixes

    def run_model(self, inputs: dict[str, Any]) -> Float[Tensor, "b v"]:
        """Run the model once; its keyword arguments reach `attend` in every layer."""
        self.mark("forward")
        if not models.is_replaced(self.model):
            models.replace_attention(self.model)
        self._attended.clear()
        self._folded.clear()
        logits = models.run(self.model, inputs, self)
        if sorted(self._attended) != sorted(self.places):
            raise ValueError(
                f"model: expected every one of {len(self.layers)} layers to attend once, got layers {self._attended}"
            )
        if sorted(self._folded) != sorted(self.state_layers):
            raise ValueError(
                f"model: expected every one of the layers {[*self.state_layers]} to change its state once, got layers "
                f"{self._folded}"
            )
        return logits

    def recurrence(self, module: Any, step: "Step", **others: Any) -> Recurrence:
        """Return what a layer that keeps a state computes with in a step.

        Args:
            module: the layer's module in the model.
            step: the plans of the step, from `make_inputs`.
            others: other arguments that transformers passes, of those in `models.HARMLESS`.

        Raises:
            ValueError: for an unknown option.
        """
        models.check_options(others)
        self._folded.append(module.layer_idx)
        return Recurrence(self.twin, self.state_caches[module.layer_idx], step.states)

    def select(self, module: Any, tokens: IndexTokens, *, step: "Step") -> Int32[Tensor, "t k"]:
        """Write the index keys of a layer into its pool, and select the keys that its queries are to see.

        Args:
            module: the layer's indexer in the model.
            tokens: what the indexer makes of the new tokens.
            step: the batch and the plans of the step.

        Returns:
            Positions, -1 past the last, for `attend`.
        """
        index: Any = self.places[module.layer_idx]
        layer = self.layers[index]
        ((_, plan),) = step.plans[layer]  # they are not planned in parts
        assert isinstance(layer.storage, SelectedLatentStorage) and isinstance(plan, Plan)
        return layer.storage.select(self.twin, tokens, self.caches[index], step.slot_mappings[layer], plan)

    def attend(
        self,
        module: Any,
        query: Float[Tensor, "1 h t d"],
        key: Float[Tensor, "1 hk t dk"],
        value: Float[Tensor, "1 hk t dv"],
        *,
        step: "Step",
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Float[Tensor, "h"] | None = None,
        alibi_slopes: Float[Tensor, "h"] | None = None,
        indices: Int32[Tensor, "1 t k"] | None = None,
        **others: Any,
    ) -> Float[Tensor, "1 t h dout"]:
        """Compute the attention of a layer: write its keys and values into its pool, and attend on its path.

        Each layer checks its own sizes.

        Args:
            module: the layer's attention in the model.
            query: of all new tokens; transformers has the heads in front, and a batch of one.
            key: of all new tokens; of a latent layer their latents, as one head.
            value: of all new tokens; of a latent layer their rotary keys, as one head.
            step: the batch and the plans of the step.
            scaling: the softmax scale.
            sliding_window: how many tokens each one sees, itself included; None for all.
            softcap: bound on the scores.
            s_aux: the sinks.
            alibi_slopes: one per query head; None for no ALiBi.
            indices: from `select`, of this layer or an earlier one; None where all keys are seen.
            others: other arguments that transformers passes, of those in `models.HARMLESS`.

        Returns:
            The outputs in the layout of transformers.

        Raises:
            ValueError: for an unknown option, or a window other than the layer's.
        """
        models.check_options(others)
        index: Any = self.places[module.layer_idx]
        self._attended.append(module.layer_idx)
        if self._calculates_scales and self.owners[index] == index:
            self._calculate_scales(index, key, value)
        layer = self.layers[index]
        if (sliding_window or 0) != layer.mask.window:
            raise ValueError(
                f"sliding_window: expected {layer.mask.window or None} in layer {module.layer_idx}, {layer}, "
                f"got {sliding_window}"
            )
        scale = module.scaling if scaling is None else scaling
        if alibi_slopes is None and s_aux is None:
            options = _plain_options(scale, softcap or 0.0, self.batch_invariant)
        else:
            options = AttentionOptions(scale, softcap or 0.0, alibi_slopes, s_aux, self.batch_invariant)
        tokens: list[Tensor | None] = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]  # [t, h, d]
        if self.owners[index] != index:  # its keys are those of an earlier layer, which has written them
            tokens[1:] = [None, None]
        slots, plan = step.slot_mappings[layer], step.plans[layer]
        positions = None if indices is None else indices[0]
        out = layer.attend(self.twin, module, *tokens, self.caches[index], slots, plan, options, positions)
        return out.unsqueeze(0).contiguous()  # [1, t, h, d], as transformers' own: some models view it

    def _calculate_scales(self, index: int, key: Float[Tensor, "1 hk t dk"], value: Float[Tensor, "1 hk t dv"]) -> None:
        """Set the scales of a layer, and of those that read its pool, by the new keys and values.

        NaN and infinity do not count: they are the fault of one request, which ends in an error.
        """
        sizes = (x.float().abs().nan_to_num(nan=0.0, posinf=0.0) for x in (key, value))
        amax = CalibrationStats(*(reduce(x, "1 hk t d -> hk d", "max") for x in sizes))
        for i, owner in enumerate(self.owners):
            if owner == index:
                ranges = KEY_RANGE, VALUE_RANGE
                self.layers[i] = self.layers[i].calibrated(self.twin, amax, self.model.device, ranges)

    def _allocate_states(self, num_blocks: int, num_kept: int | None) -> StatePool | None:
        """Make the pools of the layers that keep a state, and return their slots; None without such layers.

        Raises:
            ValueError: if `num_kept` is not an int of at least 0.
            torch.OutOfMemoryError: if a GPU has no room for the pools.
        """
        if num_kept is not None and (type(num_kept) is not int or num_kept < 0):
            raise ValueError(f"num_kept_states: expected None or an int of at least 0, got {num_kept!r}")
        self.state_caches: dict[int, StatePools] = {}
        if not self.state_layers:
            if num_kept is not None:
                raise ValueError(f"num_kept_states: expected None without layers that keep a state, got {num_kept}")
            return None
        most = min(self.max_num_seqs, num_blocks)
        pool = StatePool(
            most,
            most if num_kept is None else num_kept,
            block_size=self.block_size,
            decode_len=self.decode_len,
            ahead=isinstance(self.runner, AsyncRunner) and self.speculation is None,
        )
        where = dict(dtype=self.model.dtype, device=self.model.device)
        try:
            for index, layer in self.state_layers.items():
                self.state_caches[index] = layer.allocate(self.twin, pool.num_slots, **where)
        except RuntimeError as error:
            arguments.check_out_of_memory(error)
            size = sum(layer.bytes_per_slot(self.model.dtype) for layer in self.state_layers.values())
            raise torch.OutOfMemoryError(
                f"max_num_seqs: expected states that fit into the memory of {self.model.device}, got {pool.num_slots} "
                f"slots of {size / 2**20:.3g} MiB. {error}"
            ) from error
        return pool

    def _try_model(self) -> None:
        """Run the model over one token in the first block, so that one that cannot be served is refused at once."""
        request = Request([0], 1, GREEDY, blocks=[0])
        before = self.config._attn_implementation
        try:
            for pool in self.window_pools.values():
                pool.hold(request, 1, 1, request.blocks)
            if self.scheduler.states is not None:
                self.scheduler.states.share(request, [])
                self.scheduler.states.hold(request, 1, 1)
            models.replace_attention(self.model)  # even if the config says so: another model may have the same config
            with torch.no_grad():
                self.run_model(self.make_inputs(StepTokens.of({request: 1})))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.config._attn_implementation != before:
                self.model.set_attn_implementation(before)
            raise ValueError(
                f"model: expected one whose attention the engine can take over, got {type(self.model).__name__}, "
                f"which fails over one token with {type(error).__name__}: {error}"
            ) from error
        for pool in self.window_pools.values():
            pool.reset()
        if self.scheduler.states is not None:
            self.scheduler.states.reset()

    def _next_events(self, request: Request, tokens: Sequence[int | None]) -> list[Event]:
        """Return the events of a request's next tokens, up to the one that ends it."""
        events = []
        for token in tokens:
            events.append(self._next_event(request, token))
            if events[-1].token_id is None or self._reason_to_end(request, events[-1].token_id):
                break
            request.accepted.append(events[-1].token_id)
        request.accepted = []
        return events

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
        """Return the text that comes with a token."""
        return new_text(self.tokenizer, request, token, self._reason_to_end(request, token))

    def _reason_to_end(self, request: Request, token: int) -> str | None:
        """Return the reason why a token is the last of its request, or None if it is not."""
        stops = request.sampling.stop_token_ids
        if token in (self.end_token_ids if stops is None else stops):
            return "stop"
        length = request.num_outputs + len(request.accepted) + 1
        return "length" if length == request.sampling.max_tokens else None

    def _commit(self, request: Request, count: int, events: Sequence[Event]) -> None:
        """Record the tokens or the failure of a request, and end it if it is complete."""
        if request.draft is not None:
            count = 1  # its tokens so far; drafts do not count yet
        tokens, failure = [event for event in events if event.error is None], events[-1:]
        if tokens or not events:
            self.scheduler.keep(request, count)
        for event in tokens:
            assert event.token_id is not None  # it is no failure
            reason = self._reason_to_end(request, event.token_id)
            request.tokens.append(event.token_id)
            request.pieces.append(event.text)
            if reason:
                failure = []
        if request.draft is not None and tokens:
            self.scheduler.keep_drafts(request, len(tokens) - 1)
        request.draft = None
        if failure and failure[0].error is not None:
            request.error = failure[0].error
            self.pool.forget(request.blocks)  # their contents are not known
            self.scheduler.finish(request, "error")
        elif tokens and reason:
            self.scheduler.finish(request, reason)


def _check_autocast(model: Any) -> None:
    """Check that no code changes the types of a model's keys and values, which are stored in the model's own type.

    Raises:
        NotImplementedError: under `torch.autocast` for the model's device.
    """
    if torch.is_autocast_enabled(model.device.type):
        raise NotImplementedError(
            f"torch.autocast: the engine runs a model in its own type, {str(model.dtype).removeprefix('torch.')}; "
            "leave autocast for it, or convert the model"
        )


def _pools_of(cache: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the pools of a layer, by blocks: keys and values, scales besides, one of latents, or the four of pairs."""
    if isinstance(cache, tuple):
        return cache
    return (cache,) if cache.ndim == 3 else tuple(pool for half in cache for pool in half)


def _going_on(under_way: UnderWay) -> dict[Request, int]:
    """Return what is scheduled in a step for requests that have not ended since it was launched."""
    return {request: count for request, count in under_way.scheduled.items() if request.status == "running"}


def _on_device(numbers: Sequence[int], device: torch.device) -> Int64[Tensor, "n"]:
    """Copy numbers to the device, without waiting for what it computes."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _progress(requests: Iterable[Request]) -> dict[Request, tuple[int, tuple[int, int] | None]]:
    """Return how far the outputs and the texts of requests are.

    Not in `step`: from Python 3.12 on, `except` and `finally` may miss an interrupt inside of a comprehension.
    """
    return {request: (request.num_outputs, request.decoded) for request in requests}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
