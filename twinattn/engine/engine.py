"""Continuous batching: serve many requests of a transformers causal LM at once, over any twin's paged attention.

A step is one forward pass over one flat row of tokens, at most `max_num_batched_tokens` of them. Decodes come first;
the rest of the budget goes to chunks of prompts. With a budget of 8, and prompts of 8 tokens (c) and 5 (d):

    step 7    a17 | b5 | c0 c1 c2 c3 c4 c5
    step 8    a18 | b6 | c6 c7 | d0 d1 d2 d3       the logits of c7 give c its first token
    step 9    a19 | b7 | c8 | d4                   and those of d4 the first of d

The engine runs the model's own code and replaces only its attention: transformers passes the queries, keys and values
of each layer to `models.paged_attention`, and the engine writes them into the pool and attends over it with the given
twin. It computes nothing itself. This file is the loop; its parts have files of their own:

    admission      which prompts become requests               planner        the plans of a step
    scheduler      which tokens go into a step                 layer_pools    where the keys of all layers are
    speculation    what is drafted, and which of it is right   outputs        events, text, and the end of a request

A runner may launch a step before the tokens of the one before it are read (`AsyncRunner`), so that the device waits
for the host no more:

    host      launch 7 | launch 8 | read 7, book | launch 9 | read 8, book | launch 10 | ...
    device             | 7                   | 8                   | 9                   | ...

Step 8 takes the tokens of step 7 on the device, and those of prompts from the host. It is what the scheduler would
choose if step 7 ended no request early (`Scheduler.schedule_ahead`, which also says when it has to wait for step 7). A
request that step 7 turns out to end is in step 8 for nothing: its row is not read.

Source: Yu et al. 2022, "Orca" (batching by step); Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention" (blocks, blocks shared by hash, preemption by recomputation); Agrawal et al. 2024,
"Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (chunks of prompts beside decodes).
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import refattn
from refattn.batch import Prefix
from twinattn.engine import arguments, models
from twinattn.engine.admission import Admission
from twinattn.engine.block_pool import BlockPool
from twinattn.engine.choice import Chosen, choose_tokens
from twinattn.engine.cost_model import CPU, H200, Machine, saved_key_reads
from twinattn.engine.default_device import cpu_by_default
from twinattn.engine.kv_cache_dtype import quantize, set_scales
from twinattn.engine.layer_pools import LayerPools
from twinattn.engine.outputs import Outputs, describe_error
from twinattn.engine.planner import StepPlanner
from twinattn.engine.request import AnyPrompt, Event, Request, StepTokens
from twinattn.engine.runner import AsyncRunner, KeepingRunner, Runner, UnderWay
from twinattn.engine.sampling import GREEDY, SamplingParams
from twinattn.engine.scheduler import Counters, Scheduler, progress_of, with_samples
from twinattn.engine.speculation import Drafter, Drafting
from twinattn.engine.storages import CalibrationStats
from twinattn.engine.twin import Twin
from twinattn.engine.warm_up import warm_up
from twinattn.engine.weights import Weights

logger = logging.getLogger(__name__)


def _unmarked(phase: str) -> None:
    """Ignore a step: the default callback."""


class Engine:
    """Serves requests with a model; its attention is computed by `twin`.

    Attributes:
        mark: called with what a step does from here on, for a profile: "scheduling", "tables", "copies", "forward",
            "sampling" or "bookkeeping", and "done" when it is over.
        decode_len: the most new tokens of a decode: one, and the chain of its drafts.

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
        speculation: drafts tokens, which the model verifies next to the confirmed ones: `NGram`, `DraftModel`, or any
            other `Drafter`; None drafts nothing. More than one branch needs layers that take trees: all but those of
            local chunks.
        kv_cache_dtype: what the pools hold: "auto", the model's own type; or quantized values of 8 bits, "fp8_e4m3",
            "fp8_e5m2" or "int8", for twice as many tokens in the same memory and answers that may differ; of 4 bits,
            "int4" (turned, with scales per token and head) or "nvfp4", for more than three times as many. Latents and
            pairs have no int8 and no 4 bits. Of latents also "fp8_ds_mla", packed rows: a scale for each 128 numbers of
            a latent, and rotary keys in 16 bits. The index keys beside them are always in the model's own type.
        calibration: how large keys and values become, from `calibrate`, for the scales. None: fp8 has scales of 1, and
            saturates at its largest number; of int8 only the keys are quantized, and values stay as they are. Packed
            rows take none.
        calculate_kv_scales: work out the scales of fp8 while serving, where there is no calibration: by the largest
            keys and values of the first step, with room for larger ones to come (`layers.KEY_RANGE`). From then on they
            are fixed, so no later answer depends on what else is served, but all depend on the first step.
        num_kept_states: states that are kept for cached prefixes in a model with layers that keep a state, besides
            those of the requests that run; None for as many as those. Other models have none.
        state_ring_size: inputs that such layers push into a ring, instead of writing their states in each decode
            (`refattn.replay`): a ring that is full is folded into the state. Drafts take no states then. 0 has no
            rings; None has room for 16 inputs where that was measured to be faster, for more than four requests by
            `fastattn` on CUDA, and no rings elsewhere.
        trust_model: serve a model of another family too. Its answers have not been compared with transformers' own:
            do that before you rely on them.

    Raises:
        ValueError: naming the argument, for one of another type, a size that is not an int of at least 1, an unknown
            type of cache, a calibration of another model, or a model that would be served wrongly.
        NotImplementedError: if the model has layers that the engine keeps in no such cache, or the twin has no kernel
            for it on the model's device; for `batch_invariant` with layers that keep a state; or under
            `torch.autocast`.
        torch.OutOfMemoryError: if a GPU has no room for the pool.
    """

    @cpu_by_default
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
        speculation: Drafter | None = None,
        kv_cache_dtype: str = "auto",
        calibration: Sequence[CalibrationStats] | None = None,
        calculate_kv_scales: bool = False,
        num_kept_states: int | None = None,
        state_ring_size: int | None = None,
        trust_model: bool = False,
    ) -> None:
        limits = dict(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        sizes = dict(num_blocks=num_blocks, block_size=block_size, **limits)
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
        arguments.check_cache(kv_cache_dtype, calibration, calculate_kv_scales, twin, model.device)
        arguments.check_autocast(model)
        self.model, self.tokenizer, self.block_size = model.eval(), tokenizer, block_size
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.twin, self.runner, self.batch_invariant = Twin(twin), runner, batch_invariant
        self.speculation, self.machine = speculation, machine or (CPU if model.device.type == "cpu" else H200)
        config = model.config.get_text_config()
        self.admission = Admission.of(model, tokenizer, **sizes)
        self.vocab_size = self.admission.vocab_size
        layers = models.layers_of(config, block_size=block_size, batch_invariant=batch_invariant)
        layers = quantize(layers, kv_cache_dtype)
        state_layers = models.state_layers(model)
        if batch_invariant and state_layers:
            raise NotImplementedError(
                "batch_invariant: expected False with layers that keep a state, none of whose kernels is, got True"
            )
        if calibration is not None:
            layers = set_scales(layers, calibration, self.twin, models.owners_of(config), model.device)
        arguments.check_speculation(speculation, layers, bool(state_layers), self.vocab_size)
        self.drafting = Drafting.of(speculation, self.vocab_size)
        self.decode_len = 1 if self.drafting is None else 1 + self.drafting.max_drafts
        self.layer_pools = LayerPools(
            model,
            self.twin,
            layers,
            state_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            limits=limits,
            batch_invariant=batch_invariant,
        )
        self.layers, self.owners, self.places = layers, self.layer_pools.owners, self.layer_pools.places
        self.caches, self.window_pools = self.layer_pools.caches, self.layer_pools.window_pools
        self.state_layers, self.state_caches = state_layers, self.layer_pools.state_caches
        slots = self.layer_pools.allocate_states(
            min(max_num_seqs, num_blocks),
            num_kept_states,
            state_ring_size,
            block_size=block_size,
            decode_len=self.decode_len,
            ahead=isinstance(runner, AsyncRunner) and speculation is None,
        )
        self.scheduler = Scheduler(
            num_blocks, block_size, **limits, window_pools=self.window_pools.values(), states=slots
        )
        self.planner = StepPlanner(
            model, self.twin, self.layer_pools, slots, block_size=block_size, decode_len=self.decode_len
        )
        self.outputs = Outputs(model, tokenizer, self.scheduler)
        self.mark: Callable[[str], None] = _unmarked
        self._is_stepping = False
        self._under_way: UnderWay | None = None  # a step that is launched, and not read yet
        self._aborted: deque[Request] = deque()  # to be ended as soon as no step is under way
        self._try_model()
        # In every pass, until one over requests has succeeded.
        self.layer_pools.calculates_scales = self._has_scales_of_first_step = calculate_kv_scales
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
        return self.layer_pools.nbytes

    @property
    def max_request_tokens(self) -> int | float:
        """The most tokens of a request that may go through the model: what the pool holds, and it has positions for."""
        return self.admission.max_request_tokens

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

    def abort(self, request: Request, *, alone: bool = False) -> None:
        """End a request at once, with all samples of its prompt, and free its blocks; finished ones are not changed.

        During a step (from a hook of the model, say) it is ended right after the step.

        Args:
            request: the request that `add` returned; of the other samples each ends by itself.
            alone: leave the other samples, if its prompt is computed; before, they are one request, and all end.

        Raises:
            ValueError: if the request belongs to another engine.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request: expected one that this engine's add returned, got {request!r}")
        queued = [*self.running, *self.waiting]
        ours = self._is_stepping or any(request in one.samples for one in queued)
        if request.status != "finished" and not ours:
            raise ValueError(f"request: expected one of this engine, got one of another, which is {request.status}")
        self._abort_all([request] if alone else request.samples)

    def warm_up(self, num_tokens: int = 1024) -> None:
        """Do now what the first steps would do else: compile kernels, capture decodes. What it computes is discarded.

        Prompts are computed whole, in chunks, beside few decodes and beside many. The objects that are there then are
        taken out of Python's garbage collection, which would look at each of them now and then, for a tenth of a
        second.

        Args:
            num_tokens: tokens of the longest sequence to be ready for.

        Raises:
            ValueError: if there are requests, or `num_tokens` is not an int of at least 1.
            RuntimeError: if the model fails.
        """
        warm_up(self, num_tokens)

    @cpu_by_default
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
        arguments.check_autocast(self.model)
        self.mark("scheduling")
        unfinished = [*self.running, *self.waiting]
        counted = vars(self.counters).copy()
        before: dict[Request, tuple[int, tuple[int, int] | None]] = {}
        try:
            self._is_stepping = True
            self._check_weights(unfinished)
            scheduled, under_way, events = self._next_pass()
            before = progress_of(scheduled)
            if scheduled:
                under_way = under_way or self._launch(scheduled)
                if under_way is not None:
                    self._under_way = self._launch_next(under_way)
                events |= self._compute(scheduled, under_way)
                self.counters.steps += 1
            for request, its_events in events.items():
                self.outputs.commit(request, scheduled.get(request, 0), its_events)
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
            self.layer_pools.calculates_scales = self._has_scales_of_first_step
            if isinstance(self.runner, KeepingRunner) and (were_moved or self.layer_pools.calculates_scales):
                self.runner.forget()
            self.weights.remember()
            logger.info("the weights of the model have changed: nothing that was computed from others is used")
        self._has_new = False

    def _add_all(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        requests = self.admission.make_requests(prompts, sampling)
        self._has_new = True
        self.waiting.extend(requests)
        return requests

    def _events_of(
        self, prompts: Iterable[AnyPrompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[Any, None, None]:
        """Queue some prompts, yield the list of their requests, then every token, whichever thread makes the steps."""
        requests: list[Request] = []
        try:
            requests = self._add_all(prompts, sampling)
            yield requests
            shown = dict.fromkeys((sample for request in requests for sample in request.samples), 0)
            while shown:
                for request in [*shown]:
                    is_last, first, count = request.status == "finished", shown[request], request.num_outputs
                    for place in range(first, count):
                        ends = is_last and place == count - 1 and request.finish_reason in ("stop", "length")
                        token, text = request.tokens[request.prompt_len + place], request.pieces[place]
                        yield Event(request, token, text, finish_reason=request.finish_reason if ends else None)
                    shown[request] = count
                    if is_last:
                        del shown[request]
                        if request.error is not None:
                            yield Event(request, error=request.error)
                if shown:
                    self.step()
        finally:
            self._abort_all(chain.from_iterable(request.samples for request in requests))

    def _abort_all(self, requests: Iterable[Request]) -> None:
        """Abort requests, including deferred aborts; what has finished is not changed."""
        self._aborted.extend(requests)
        while self._aborted and not self._is_stepping:
            unfinished = [*self.running, *self.waiting]
            try:
                for request in (*self._aborted[0].unforked, self._aborted[0]):
                    if request.status != "finished":
                        self.scheduler.finish(request, "abort")
                self._aborted.popleft()
            except BaseException:
                self.scheduler.undo(unfinished)
                raise

    def _next_pass(self) -> tuple[dict[Request, int], UnderWay | None, dict[Request, list[Event]]]:
        """Return the step that is under way if a request is left in it, else schedule the next one.

        The events are those of requests whose drafts were wrong, and which are in no step any more.
        """
        failures: dict[Request, list[Event]] = {}
        under_way, self._under_way = self._under_way, None
        scheduled = {} if under_way is None else under_way.going_on
        if scheduled:
            self.scheduler.follow(scheduled)
        else:
            scheduled, under_way = self.scheduler.schedule(), None
            failures = self._add_drafts(scheduled)
            scheduled = self.planner.in_order(scheduled)
            self._copy_blocks()
        self.counters.key_reads += sum(request.num_computed_tokens + count for request, count in scheduled.items())
        return scheduled, under_way, failures

    def _copy_blocks(self) -> None:
        """Copy the blocks that several samples have, and one of them is about to write to."""
        copies = self.scheduler.take_copies()
        if copies:
            self.layer_pools.copy_blocks(copies)

    def _add_drafts(self, scheduled: dict[Request, int]) -> dict[Request, list[Event]]:
        """Add drafts to decodes, if there is speculation; return the failures of requests whose drafts were wrong."""
        if self.drafting is None:
            return {}
        room = self.max_num_batched_tokens - sum(scheduled.values())
        wrong = self.drafting.add(scheduled, room, self.scheduler.allocate)
        return {request: [Event(request, error=describe_error(error))] for request, error in wrong.items()}

    def _compute(self, scheduled: dict[Request, int], under_way: UnderWay | None = None) -> dict[Request, list[Event]]:
        """Run the model over what is scheduled, and return the events of each request, which change nothing yet.

        A request gets its next token, or several if drafts were right, or a failure; none if it has more to compute
        first. As soon as its prompt is computed, its other samples get their first tokens, too. A pass that raises does
        not say which of its requests is at fault, so each of them goes through the model alone then, and writes the
        same keys and values into the same slots.

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
            failure = describe_error(error)  # in words: the exception itself would keep all tensors of the pass alive
        else:
            self.layer_pools.calculates_scales = False
            self.mark("bookkeeping")
            return {each: self.outputs.events_of(each, tokens.get(each, [])) for each in with_samples(scheduled)}
        if len(scheduled) == 1:
            return {each: [Event(each, error=failure)] for each in with_samples(scheduled)}
        outcomes: dict[Request, list[Event]] = {}
        for request, count in scheduled.items():
            outcomes |= self._compute({request: count})
        return outcomes

    def _launch(self, scheduled: Mapping[Request, int]) -> UnderWay | None:
        """Launch a step; None if there is no runner for it, or if that fails: then it is computed without one."""
        if not isinstance(self.runner, AsyncRunner) or self.layer_pools.calculates_scales:
            return None
        if self.speculation is not None and any(max(count, r.num_pending) > 1 for r, count in scheduled.items()):
            return None  # drafts are accepted on the host
        if any(r.others and r.unforked and count >= r.num_pending for r, count in scheduled.items()):
            return None  # a row of logits gives tokens to several samples
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
        scheduled = self.planner.in_order(self.scheduler.schedule_ahead(before.going_on))
        self._copy_blocks()
        if not scheduled:
            return None
        try:
            return self.runner.launch_next(self, before, scheduled)
        except Exception:  # it is computed in a step of its own then, where its failure belongs
            logger.exception("a step of %d requests could not be launched ahead", len(scheduled))
            return None

    def _read(self, under_way: UnderWay) -> Chosen:
        """Wait for the tokens of a step that was launched."""
        self.mark("sampling")
        return {request: [token] for request, token in zip(under_way.requests, under_way.tokens(), strict=True)}

    def _choose(self, logits: Float[Tensor, "rows v"], due: Sequence[Request]) -> Chosen:
        """Choose the next tokens of requests, and the first ones of samples that begin with them."""
        self.mark("sampling")
        return choose_tokens(logits, due, self.twin, self.layer_pools, self.model.device)

    def _forward(self, scheduled: dict[Request, int]) -> Float[Tensor, "b v"]:
        """Run the model over what is scheduled, and return the logits of each request with nothing left to compute.

        A request with a draft has a row for each of its nodes.
        """
        self.mark("tables")
        return self.logits_of(StepTokens.of(scheduled))

    def logits_of(self, tokens: StepTokens) -> Float[Tensor, "rows v"]:
        """Run the model over the new tokens of a step, in the runner's way if it has one; return its logits."""
        logits = None
        if self.runner is not None and tokens.spans is None and not self.layer_pools.calculates_scales:
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
        on_device = self.planner.copy(tokens)
        self.mark("tables")
        inputs = self.planner.inputs_of(on_device, prefixes)
        if tokens.spans is not None:
            inputs["step"] = self.planner.plan_spans(inputs["step"], len(tokens.input_ids), tokens.spans)
        return inputs

    def find_prefixes(self, tokens: StepTokens, machine: Machine) -> list[Prefix]:
        """Return the shared prefixes of a step for which a cascade is worth it on a machine."""
        prefixes = [] if self.batch_invariant else self.planner.find_prefixes(tokens, machine)
        self.counters.saved_key_reads += saved_key_reads(prefixes)
        return prefixes

    def run_model(self, inputs: dict[str, Any]) -> Float[Tensor, "b v"]:
        """Run the model once; its keyword arguments reach `LayerPools.attend` in every layer."""
        self.mark("forward")
        if not models.is_replaced(self.model):
            models.replace_attention(self.model)
        self.layer_pools.begin_pass()
        logits = models.run(self.model, inputs, self.layer_pools)
        self.layer_pools.end_pass()
        return logits

    def _try_model(self) -> None:
        """Run the model over one token in the first block, so that one that cannot be served is refused at once."""
        with models.one_token_tried(self.model), torch.no_grad():
            self.run_model(self.make_inputs(StepTokens.of({self.scheduler.hold_one_token(): 1})))
        self.scheduler.undo([])
