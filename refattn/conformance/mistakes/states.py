"""A layer that keeps a state once more, token by token in loops over heads, and mistakes in it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from refattn.conformance.example import Answers
from refattn.conformance.mistakes.formula import Formula


class State(Formula, is_base=True):
    """The gated delta rule over slots."""

    paths: tuple[str, ...] = ("recurrent",)

    def answers(self) -> Answers:
        """Fold all sequences, one after the other."""
        a = self.arguments
        self.states, self.out = a["states"].double().clone(), torch.zeros(a["value"].shape, dtype=torch.float64)
        ends = a["batch"].cu_seqlens_q.tolist()
        table = a["state_indices"] if a["state_indices"].ndim == 2 else a["state_indices"][:, None]
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

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        state = self.states[slots[accepted - 1]].clone()
        return state if has_state else torch.zeros_like(state)

    def _keep(self, slot: int, state: Tensor) -> None:
        if slot >= 0:
            self.states[slot] = state

    def _head(self, head: int) -> int:
        """Return the head of queries and keys of a head of values."""
        return head * self.arguments["query"].shape[1] // self.arguments["value"].shape[1]

    def _fold(self, state: Tensor, row: int) -> Tensor:
        """Change the state by one token, and read it; heads one by one."""
        a, new = self.arguments, []
        for head in range(len(state)):
            query, key = (a[name][row, self._head(head)].double() for name in ("query", "key"))
            decay, beta = float(a["log_decay"][row, head].double().exp()), float(a["beta"][row, head])
            one = self._step(state[head], key, a["value"][row, head].double(), decay, beta)
            read = self._read(state[head], one)
            self.out[row, head] = a["scale"] * (read @ query)
            new.append(one)
        return torch.stack(new)

    def _read(self, before: Tensor, after: Tensor) -> Tensor:
        return after

    def _step(self, state: Tensor, key: Tensor, value: Tensor, decay: float, beta: float) -> Tensor:
        state = decay * state
        seen = state @ key if self.arguments.get("delta", True) else 0.0
        return state + beta * torch.outer(value - seen, key)


class StateOfTheOneBefore(State):
    """A sequence that begins goes on from what its slot held: has_initial_state is ignored."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, True)


class StateForgotten(State):
    """Every step begins from zeros: the state of a slot is never read."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, False)


class StateNotKept(State):
    """The state after the step is not written to its slot."""

    def _keep(self, slot: int, state: Tensor) -> None:
        pass


class PaddingIsSlotZero(State):
    """A negative index is clamped to 0: padding changes slot 0, and its rows are not 0."""

    def _slots(self, slots: list[int]) -> list[int]:
        return [max(slot, 0) for slot in slots]


class PaddingIsTheLastSlot(State):
    """A negative index counts from the end: padding changes the last slot, and its rows are not 0."""

    def _slots(self, slots: list[int]) -> list[int]:
        return [slot % len(self.arguments["states"]) for slot in slots]


class SlotZeroIsPadding(State):
    """Slot 0 is taken for padding: the sequence that has it returns 0."""

    def _slots(self, slots: list[int]) -> list[int]:
        return [slot if slot > 0 else -1 for slot in slots]


class DraftsNotRolledBack(State):
    """A step begins after the first draft of the step before, however many were accepted."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, 1, has_state)


class ReadBeforeWritten(State):
    """A token reads the state before it is written, so it does not see itself."""

    def _read(self, before: Tensor, after: Tensor) -> Tensor:
        return before


class NeverFades(State):
    """The decay is ignored."""

    def _step(self, state: Tensor, key: Tensor, value: Tensor, decay: float, beta: float) -> Tensor:
        return super()._step(state, key, value, 1.0, beta)


class ValueAddedWhole(State):
    """The value is added, and not its difference to what the state answers: the delta rule is left out."""

    def _step(self, state: Tensor, key: Tensor, value: Tensor, decay: float, beta: float) -> Tensor:
        return decay * state + beta * torch.outer(value, key)


class AnswersBeforeItFades(State):
    """The state answers to a key before it fades, and is corrected by too much."""

    def _step(self, state: Tensor, key: Tensor, value: Tensor, decay: float, beta: float) -> Tensor:
        return decay * state + beta * torch.outer(value - state @ key, key)


class KeysBeforeValues(State):
    """States are taken as [dk, dv]: keys and values have changed places in the pool."""

    def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
        return super()._begin(slots, accepted, has_state).mT

    def _keep(self, slot: int, state: Tensor) -> None:
        super()._keep(slot, state.mT)


class HeadsInterleaved(State):
    """Value heads share queries and keys in turns, and not with their neighbours."""

    def _head(self, head: int) -> int:
        return head % int(self.arguments["query"].shape[1])


class LogarithmOfTwo(State):
    """The logarithms of decays are taken to the base 2."""

    def _step(self, state: Tensor, key: Tensor, value: Tensor, decay: float, beta: float) -> Tensor:
        return super()._step(state, key, value, decay ** torch.tensor(2.0).log().item(), beta)
