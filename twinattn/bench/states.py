"""Rows of layers that keep a state: what they compute, the right answer, and who computes it.

A decode moves the state of a request in place, so each call of a measurement answers another question than the one
before it; the first answer is judged. A prompt's calls all begin without a state.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from refattn.batch import Batch
from refattn.states import StatePlan
from twinattn.bench.contender import Contender, call_with
from twinattn.bench.measure import Call
from twinattn.bench.work import Judge, hold
from twinattn.libraries import attn_gym, fla, flash_qla, flashinfer

SAMPLED_VALUES = 4  # rows of a state whose answer is checked: none depends on another


@dataclass(frozen=True)
class States:
    """Requests with as many new tokens each, under the gated delta rule.

    Attributes:
        num_seqs: requests.
        query_len: new tokens of each: 1 with a state before it, or a prompt without one.
        heads: heads of values, and of queries and keys.
        head_size: elements of a query, a key and a value.
        per_channel: each key channel has a decay of its own.
        steps: decodes of a call, one after the other, each of one token of every request.
    """

    num_seqs: int
    query_len: int
    heads: tuple[int, int] = (16, 16)
    head_size: int = 128
    per_channel: bool = False
    steps: int = 1

    @property
    def tokens(self) -> int:
        """New tokens of all requests, in all steps."""
        return self.num_seqs * self.query_len * self.steps

    def flops(self) -> int:
        """Count three products of a vector and the state for each token: what it answers, the write, the output."""
        return 6 * self.tokens * self.heads[0] * self.head_size**2

    def reads(self, itemsize: int) -> int:
        """Count the tokens, their gates in float32, and the states before them."""
        hv, h = self.heads
        gates = 4 * hv * (1 + (self.head_size if self.per_channel else 1))
        rows = self.tokens * (itemsize * (2 * h + hv) * self.head_size + gates)
        return rows + (self.steps * self._state_bytes() if self.query_len == 1 else 0)

    def writes(self, itemsize: int) -> int:
        """Count the outputs, and the states after them, once: no step has to write what the next one can compute."""
        return itemsize * self.tokens * self.heads[0] * self.head_size + self._state_bytes()

    def _state_bytes(self) -> int:
        return 4 * self.num_seqs * self.heads[0] * self.head_size**2

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "StateInputs":
        """Draw tokens with queries and keys of length 1, gates that keep most, and states in shuffled slots."""
        generator = torch.Generator(device).manual_seed(seed)
        (hv, h), d, t = self.heads, self.head_size, self.tokens

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        log_decay = -0.1 * torch.rand(t, hv, *([d] if self.per_channel else []), device=device, generator=generator)
        states = normal(2 * self.num_seqs, hv, d, d)
        slots = torch.randperm(2 * self.num_seqs, device=device, generator=generator).int().view(-1, 2)
        context = int(self.query_len == 1)
        ends = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=device) * self.query_len
        lens = torch.full_like(ends[1:], self.query_len + context)
        return StateInputs(
            self,
            normalize(normal(t, h, d), dim=-1).to(dtype),
            normalize(normal(t, h, d), dim=-1).to(dtype),
            normal(t, hv, d).to(dtype),
            log_decay,
            torch.rand(t, hv, device=device, generator=generator),
            states,
            slots,
            Batch(ends, lens, None, self.query_len, self.query_len + context),
        )

    def judge(self, inputs: "StateInputs") -> Judge:
        """Compute some values of the last head of each request, token by token, in float64 and in the inputs' type."""
        exact, low = (self._by_formula(inputs, dtype) for dtype in (torch.float64, inputs.query.dtype))

        def judge(out: Tensor, lse: Tensor | None = None) -> None:
            hold(out[:, -1, :SAMPLED_VALUES], exact, low, name="out")

        return judge

    def _by_formula(self, inputs: "StateInputs", dtype: torch.dtype) -> Float[Tensor, "t sampled"]:
        """Compute the same without any code of ours."""
        query, key, value = (x[:, -1].to(dtype).unflatten(0, (self.num_seqs, -1)) for x in inputs[1:4])
        gates = inputs.log_decay[:, -1].to(dtype).exp(), inputs.beta[:, -1].to(dtype)
        decay, beta = (x.unflatten(0, (self.num_seqs, -1)) for x in gates)
        state = inputs.states[inputs.slots[:, 1].long(), -1, :SAMPLED_VALUES].to(dtype)  # [b, sampled, d]
        state = state * (self.query_len == 1)
        outs = []
        for i in range(self.query_len * self.steps):
            state = state * decay[:, i].view(self.num_seqs, 1, -1)
            written = value[:, i, :SAMPLED_VALUES] - (state * key[:, None, i]).sum(-1)
            state = state + (beta[:, i, None] * written)[..., None] * key[:, None, i]
            outs.append((state * query[:, None, i]).sum(-1) * self.head_size**-0.5)
        return torch.stack(outs, 1).flatten(0, 1)


class StateInputs(NamedTuple):
    """The inputs of such a step. Of several steps a request's tokens lie one after the other, as those of a prompt."""

    work: States
    query: Float[Tensor, "t h d"]
    key: Float[Tensor, "t h d"]
    value: Float[Tensor, "t hv d"]
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv d"]
    beta: Float[Tensor, "t hv"]
    states: Float[Tensor, "n hv d d"]
    slots: Tensor  # [b, 2]: where the state is written, and where it is
    batch: Batch


def states_twin(package: str = "fastattn", *, kernel: str | None = None) -> Contender:
    """Our layer; it plans once per step, before the time is taken.

    Args:
        package: "fastattn" or "refattn".
        kernel: ask for this kernel, to see whether the chosen one is the fastest.
    """

    def prepare(inputs: StateInputs) -> Call:
        path = importlib.import_module(f"{package}.recurrent")
        plan: StatePlan = path.plan(inputs.batch, state_indices=inputs.slots[:, 1].clone())
        call = partial(path.attention, *inputs[1:6], inputs.states.clone(), plan)
        return call if kernel is None else partial(call_with, kernel, call)

    return Contender(", ".join(filter(None, (package, kernel))), prepare, judge=_judge_of_the_first)


def steps_twin(path: str, ring_size: int = 0) -> Contender:
    """Our layer in several decodes: `recurrent`, or `replay` with a ring, whose cursor goes from none to full.

    Which inputs a ring holds is the same in all layers, so the cursor is moved once per step, outside of the layer.
    """

    def prepare(inputs: StateInputs) -> Call:
        module, states = importlib.import_module(f"fastattn.{path}"), inputs.states.clone()
        slots = inputs.slots[:, 1].clone()
        memory: tuple[Any, ...] = (states,)
        if ring_size:
            (hv, h), size = inputs.work.heads, inputs.work.head_size
            kind: dict[str, Any] = dict(per_channel=inputs.work.per_channel, dtype=inputs.key.dtype)
            memory += (module.allocate(len(states), ring_size, h, hv, size, size, **kind, device=states.device),)
        calls, outs = [], torch.empty_like(inputs.value.unflatten(0, (-1, inputs.work.steps)).transpose(0, 1))
        for step in range(inputs.work.steps):
            more: dict[str, Any] = {}
            if ring_size:
                cursors = torch.full((len(states),), step % ring_size, dtype=torch.int32, device=states.device)
                more = dict(cursors=cursors, ring_size=ring_size)
            plan = module.plan(inputs.batch, state_indices=slots, **more)
            calls.append(partial(module.attention, *_tokens_of_step(inputs, step), *memory, plan, out=outs[step]))

        def call() -> Tensor:
            for step in calls:
                step()
            return outs

        return call

    name = "fastattn" if ring_size else "fastattn, no ring"
    return Contender(name, prepare, rows="steps b h d -> (b steps) h d", judge=_judge_of_the_first)


def steps_attn_gym() -> Contender:
    """attention-gym over slots, one decode after the other."""

    def prepare(inputs: StateInputs) -> Call:
        states = torch.cat((inputs.states[:1], inputs.states))  # its slot 0 is padding
        slots = inputs.slots[:, 1].clone() + 1
        tokens = (_tokens_of_step(inputs, step) for step in range(inputs.work.steps))
        calls = [attn_gym.prepare_decode(*step, states, slots) for step in tokens]
        return lambda: torch.stack([call() for call in calls])

    return Contender("attention-gym", prepare, rows="steps b h d -> (b steps) h d", judge=_judge_of_the_first)


def steps_flashinfer() -> Contender:
    """FlashInfer over slots, one decode after the other."""

    def prepare(inputs: StateInputs) -> Call:
        states, slots = inputs.states.clone(), inputs.slots[:, 1].clone()
        tokens = (_tokens_of_step(inputs, step) for step in range(inputs.work.steps))
        calls = [flashinfer.prepare_gdn_decode(*step, states, slots) for step in tokens]
        return lambda: torch.stack([call() for call in calls])

    return Contender("FlashInfer", prepare, rows="steps b h d -> (b steps) h d", judge=_judge_of_the_first)


def _tokens_of_step(inputs: StateInputs, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, log_decay, beta = (
        x.unflatten(0, (-1, inputs.work.steps))[:, step].contiguous() for x in inputs[1:6]
    )
    return query, key, value, log_decay, beta


def states_transformers() -> Contender:
    """The functions of transformers in PyTorch: by chunks, and token by token for a decode, without any slots."""

    def prepare(inputs: StateInputs) -> Call:
        module: Any = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
        is_decode = inputs.work.query_len == 1
        name = "torch_recurrent_gated_delta_rule" if is_decode else "torch_chunk_gated_delta_rule"
        function: Callable[..., tuple[Tensor, Tensor]] = getattr(module, name)
        rows = [x.unflatten(0, (inputs.work.num_seqs, -1)) for x in inputs[1:6]]
        before = inputs.states[inputs.slots[:, 1].long()].mT.contiguous() if is_decode else None
        return lambda: function(*rows, initial_state=before, output_final_state=True)[0].flatten(0, 1)

    return Contender("transformers", prepare)


def states_fla() -> Contender:
    """Flash Linear Attention, over states that lie one after the other: it knows no slots."""

    def prepare(inputs: StateInputs) -> Call:
        is_decode, tokens = inputs.work.query_len == 1, inputs[1:6]
        before = inputs.states[inputs.slots[:, 1].long()] if is_decode else None
        form = "recurrent" if is_decode else "chunk"
        call = fla.prepare(*tokens, before, inputs.batch.cu_seqlens_q, form=form)
        return lambda: call()[0]

    return Contender("FLA", prepare)


def states_flash_qla() -> Contender:
    """FlashQLA, which has prompts, over states that lie one after the other."""

    def prepare(inputs: StateInputs) -> Call:
        call = flash_qla.prepare(*inputs[1:6], None, inputs.batch.cu_seqlens_q)
        return lambda: call()[0]

    return Contender("FlashQLA", prepare)


def states_flashinfer() -> Contender:
    """FlashInfer: its prompts over states that lie one after the other, its decode, which makes the gates, in slots."""

    def prepare(inputs: StateInputs) -> Call:
        if inputs.work.query_len == 1:
            return flashinfer.prepare_gdn_decode(*inputs[1:6], inputs.states.clone(), inputs.slots[:, 1].clone())
        call = flashinfer.prepare_gdn(*inputs[1:6], None, inputs.batch.cu_seqlens_q)
        return lambda: call()[0]

    return Contender("FlashInfer", prepare, judge=_judge_of_the_first)


def states_attn_gym() -> Contender:
    """attention-gym over slots. Its decode makes the gates and the lengths of 1 itself."""

    def prepare(inputs: StateInputs) -> Call:
        is_decode, tokens = inputs.work.query_len == 1, inputs[1:6]
        states = torch.cat((inputs.states[:1], inputs.states))  # its slot 0 is padding
        of_step = inputs.slots[:, int(is_decode)].contiguous() + 1
        if is_decode:
            return attn_gym.prepare_decode(*tokens, states, of_step)
        begins = torch.zeros(inputs.work.num_seqs, dtype=torch.bool, device=states.device)
        return attn_gym.prepare(*tokens, states, of_step, inputs.batch.cu_seqlens_q, begins)

    return Contender("attention-gym", prepare, judge=_judge_of_the_first)


def _judge_of_the_first(inputs: StateInputs) -> Judge:
    """Hold the first answer to the right one: where states are moved in place, the next is to another question."""
    judge = inputs.work.judge(inputs)
    held: list[bool] = []

    def judge_of_the_first(out: Tensor, lse: Tensor | None = None) -> None:
        if not held or inputs.work.query_len > 1:
            judge(out, lse)
            held.append(True)

    return judge_of_the_first
