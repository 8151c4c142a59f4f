"""A layer that keeps a state, token by token, and mistakes in it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.formula import Formula


class State(Formula, is_base=True):
    """The gated delta rule over slots."""

    paths: tuple[str, ...] = ("recurrent",)

    def answers(self) -> Answers:
        """Fold all sequences, one after the other."""
        a = self.arguments
        self.states, self.out = a["states"].double().clone(), torch.zeros(a["value"].shape, dtype=torch.float64)
        self.read = self.states
        ends = a["batch"].cu_seqlens_q.tolist()
        table = a["state_indices"] if a["state_indices"].ndim == 2 else a["state_indices"][:, None]
        for i, slots in enumerate(table.tolist()):
            self._prepare(i, slots)
        for i, slots in enumerate(table.tolist()):
            slots = self._slots(slots)
            if ends[i] == ends[i + 1] or slots[0] < 0:
                continue
            accepted = int(a["num_accepted"][i]) if "num_accepted" in a else 1
            state = self._begin(slots, accepted, bool(a["has_initial_state"][i]))
            for token, row in enumerate(range(ends[i], ends[i + 1])):
                state = self._fold(state, row)
                if a["state_indices"].ndim == 2:
                    self._keep(slots[token], state)
            if a["state_indices"].ndim == 1:
                self._keep(slots[0], state)
        return {"out": self.out.to(a["value"].dtype), "states": self.states.to(a["states"].dtype)}

    def _slots(self, slots: list[int]) -> list[int]:
        return slots

    def _prepare(self, i: int, slots: list[int]) -> None:
        """Prepare the slots of a sequence before the step."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        state = self.read[slots[accepted - 1]].clone()
        return state if has_state else torch.zeros_like(state)

    def _keep(self, slot: int, state: Tensor) -> None:
        if slot >= 0:
            self.states[slot] = state

    def _heads(self, num_heads: int, num_value_heads: int) -> Tensor:
        """Return the query and key head of each value head."""
        return torch.arange(num_value_heads) * num_heads // num_value_heads

    def _fold(self, state: Tensor, row: int) -> Tensor:
        """Update the states of all heads `[hv, dv, dk]` with one token, and read them."""
        a = self.arguments
        heads = self._heads(a["query"].shape[1], a["value"].shape[1])
        query, key = (a[name][row].double()[heads] for name in ("query", "key"))
        decay, beta = self._decay(a["log_decay"][row].double()), a["beta"][row].double()
        faded = self._fade(state, decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])
        after = self._write(state, faded, key, a["value"][row].double(), beta)
        self.out[row] = a["scale"] * (self._read(faded, after) @ query[..., None])[..., 0]
        return after

    def _decay(self, log_decay: Tensor) -> Tensor:
        return log_decay.exp()

    def _fade(self, state: Tensor, decay: Tensor) -> Tensor:
        return decay * state

    def _write(self, before: Tensor, faded: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
        """Return the state after a token is written to it."""
        seen = (self._answering(before, faded) @ key[..., None])[..., 0] if self.arguments.get("delta", True) else 0.0
        return faded + (beta[:, None] * (value - seen))[..., None] * key[:, None, :]

    def _answering(self, before: Tensor, faded: Tensor) -> Tensor:
        return faded

    def _read(self, faded: Tensor, after: Tensor) -> Tensor:
        return after


class StateOfTheOneBefore(State):
    """has_initial_state is ignored: a new sequence continues from the old state in its slot."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, True)


class ContextDecides(State):
    """A sequence has a state if it has a context, and has_initial_state is ignored."""

    def _prepare(self, i: int, slots: list[int]) -> None:
        self.sequence = -1

    def _slots(self, slots: list[int]) -> list[int]:
        self.sequence += 1
        return slots

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, bool(self.arguments["batch"].context_lens[self.sequence] > 0))


class StatesClearedFirst(State):
    """The slots of new sequences are cleared before the step, also of those without new tokens."""

    def _prepare(self, i: int, slots: list[int]) -> None:
        if slots[0] >= 0 and not self.arguments["has_initial_state"][i]:
            self.states[slots[0]] = 0.0


class SequencesPastACount(State):
    """From some sequence on, nothing is computed."""

    past = ("sequences",)
    variants = (32, 64, 128)

    def _slots(self, slots: list[int]) -> list[int]:
        self.count = getattr(self, "count", 0) + 1
        return slots if self.count <= self.variant else [-1]


class StatesStridesAssumed(State):
    """The pool of states is assumed to be contiguous: its strides are ignored."""

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: None) -> bool:
        """Return whether the pool has gaps, and is small enough to copy."""
        pool = arguments["states"]
        return not pool.is_contiguous() and pool.untyped_storage().nbytes() < 2**30

    def answers(self) -> Answers:
        """Fold over the memory of the pool."""
        pool = self.arguments["states"]
        span = 1 + sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
        memory = pool.as_strided((span,), (1,)).clone()
        self.arguments = {**self.arguments, "states": memory[: pool.numel()].view(pool.shape)}
        answers = super().answers()
        memory[: pool.numel()] = answers["states"].flatten()
        return answers | {"states": memory.as_strided(pool.shape, pool.stride())}


class StateForgotten(State):
    """Every step begins from zeros: the state of a slot is never read."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, False)


class StateNotKept(State):
    """The state after the step is not written to its slot."""

    def _keep(self, slot: int, state: Tensor) -> None:
        pass


class PaddingHasASlot(State, is_base=True):
    """A base: padding uses a slot. If a live sequence has the same slot, the result depends on the order of both."""

    variants = ("one after the other", "all at once")

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        if self.variant == "all at once" and self.read is self.states:
            self.read = self.states.clone()
        return super()._begin(slots, accepted, has_state)


class PaddingIsSlotZero(PaddingHasASlot):
    """A negative index is clamped to 0: padding changes slot 0, and its rows are not 0."""

    def _slots(self, slots: list[int]) -> list[int]:
        return [max(slot, 0) for slot in slots]


class PaddingIsTheLastSlot(PaddingHasASlot):
    """A negative index counts from the end: padding changes the last slot, and its rows are not 0."""

    def _slots(self, slots: list[int]) -> list[int]:
        return [slot % len(self.arguments["states"]) for slot in slots]


class SlotZeroIsPadding(State):
    """Slot 0 is treated as padding: the sequence that has it returns 0."""

    def _slots(self, slots: list[int]) -> list[int]:
        return [slot if slot > 0 else -1 for slot in slots]


class DraftsNotRolledBack(State):
    """A step begins after the first draft of the step before, however many were accepted."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, 1, has_state)


class ScaleOfValue(State):
    """The scale is computed from the size of the values, not of the keys."""

    def _fold(self, state: Tensor, row: int) -> Tensor:
        dk, dv = self.example.head_size, self.example.value_size
        is_default = self.arguments["scale"] == dk**-0.5
        self.arguments = {**self.arguments, "scale": dv**-0.5} if is_default else self.arguments
        return super()._fold(state, row)


class BetaAtMostOne(State):
    """beta is bounded by 1."""

    def _write(self, before: Tensor, faded: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
        return super()._write(before, faded, key, value, beta.clamp(max=1.0))


class ReadBeforeWritten(State):
    """A token reads the state before its own key and value are written, so it does not see itself."""

    def _read(self, faded: Tensor, after: Tensor) -> Tensor:
        return faded


class NeverFades(State):
    """The decay is ignored."""

    def _decay(self, log_decay: Tensor) -> Tensor:
        return torch.ones_like(log_decay)


class LogarithmOfTwo(State):
    """The logarithms of decays are treated as base 2."""

    def _decay(self, log_decay: Tensor) -> Tensor:
        return log_decay.exp2()


class ValueAddedWhole(State):
    """The value itself is written, not its difference to the value that the state holds: the delta rule is missing."""

    def _answering(self, before: Tensor, faded: Tensor) -> Tensor:
        return torch.zeros_like(faded)


class AnswersBeforeItFades(State):
    """The delta rule reads the state before its decay, and subtracts too much."""

    def _answering(self, before: Tensor, faded: Tensor) -> Tensor:
        return before


class KeysBeforeValues(State):
    """States are read and written as [dk, dv] instead of [dv, dk]."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, has_state).mT

    def _keep(self, slot: int, state: Tensor) -> None:
        super()._keep(slot, state.mT)


class HeadsInterleaved(State):
    """Value head h uses query and key head h % heads, instead of sharing one with adjacent heads."""

    def _heads(self, num_heads: int, num_value_heads: int) -> Tensor:
        return torch.arange(num_value_heads) % num_heads


class HeadsInterleavedInLargeGroups(State):
    """Value heads take the query heads in turn where many of them share one."""

    variants = (3, 4, 5, 8)

    def _heads(self, num_heads: int, num_value_heads: int) -> Tensor:
        large = num_value_heads // num_heads >= self.variant
        return torch.arange(num_value_heads) % num_heads if large else super()._heads(num_heads, num_value_heads)


class ValuesFade(State):
    """A decay per key channel is applied to the channels of the value."""

    def _fade(self, state: Tensor, decay: Tensor) -> Tensor:
        per_channel = decay.shape[-1] > 1 and state.shape[1] == state.shape[2]
        return super()._fade(state, decay.mT if per_channel else decay)


class ChannelsFadeAlike(State):
    """Decays per key channel are replaced by one per head: that of the first channel, or their mean."""

    variants = ("first", "mean")

    def _fade(self, state: Tensor, decay: Tensor) -> Tensor:
        alike = decay[..., :1] if self.variant == "first" else decay.mean(-1, keepdim=True)
        return super()._fade(state, alike)


class StateBetweenChunksLost(State):
    """A chunk does not begin with the state after the chunk before it."""

    variants = (16, 32, 64, 128)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: int) -> bool:
        """Return whether there is a second chunk."""
        return any(q > variant for q, _ in example.lens)

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        self.token, self.before = 0, super()._begin(slots, accepted, has_state)
        return self.before

    def _fold(self, state: Tensor, row: int) -> Tensor:
        state = state if self.token % self.variant else self.before
        self.token += 1
        return super()._fold(state, row)


class StateRoundedBetweenChunks(State):
    """A state is rounded to the type of its pool after each chunk, not at the end of a step."""

    variants = (1, 16, 32, 64, 128)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: int) -> bool:
        """Return whether there is a second chunk, and a pool of 16 bits."""
        return arguments["states"].itemsize == 2 and any(q > variant for q, _ in example.lens)

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        self.token = 0
        return super()._begin(slots, accepted, has_state)

    def _fold(self, state: Tensor, row: int) -> Tensor:
        if self.token and self.token % self.variant == 0:
            state = state.to(self.arguments["states"].dtype).double()
        self.token += 1
        return super()._fold(state, row)
