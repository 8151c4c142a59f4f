"""Pools of checkpoints and rings, stepped by the reference or by a kernel of the twin."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastattn.replay
import refattn.replay
from fastattn.kernels.order import use_kernel
from refattn.options import RecurrentOptions
from refattn.rings import Ring
from tests.helpers.states import DEVICE, Step, draw_states, lengths, moved


@dataclass
class Slots:
    """The checkpoints, the rings and the cursors of one layer, and what steps them."""

    kernel: str
    states: Tensor
    ring: Ring
    cursors: Tensor

    @classmethod
    def like(
        cls, kernel: str, step: Step, num_slots: int, ring_size: int, *, poison: float = torch.nan, dtype: Any = None
    ) -> "Slots":
        """Make slots that no sequence owns yet: all memory holds poison, and cursors hold an arbitrary number."""
        path = refattn.replay if kernel == "reference" else fastattn.replay
        (_, h, dk), (_, hv, dv) = step.key.shape, step.value.shape
        per_channel, wide = step.log_decay.ndim == 3, torch.promote_types(step.key.dtype, torch.float32)
        ring = path.allocate(num_slots, ring_size, h, hv, dv, dk, per_channel=per_channel, dtype=step.key.dtype)
        for field in ring:
            field.fill_(poison)
        states = draw_states(num_slots, hv, dv, dk).to(dtype or wide).fill_(poison)
        return cls(kernel, states, ring, path.allocate_cursors(num_slots).fill_(77))

    @property
    def path(self) -> Any:
        """The module under test."""
        return refattn.replay if self.kernel == "reference" else fastattn.replay

    def copy(self) -> "Slots":
        """Return slots with memory of their own."""
        return Slots(self.kernel, self.states.clone(), Ring(*(x.clone() for x in self.ring)), self.cursors.clone())

    def begin(self, slot: int, state: Tensor | None = None) -> None:
        """Give a slot a state, and an empty ring."""
        if state is not None:
            self.states[slot] = state
        self.cursors[slot] = 0

    def step(
        self,
        step: Step,
        query_lens: Any,
        contexts: Any,
        slots: Any,
        options: RecurrentOptions = RecurrentOptions(),
        accepted: Any = None,
        *,
        is_over: bool = False,
        **tables: Any,
    ) -> Tensor:
        """Plan a step, attend, with the outputs over the values if asked, and move the cursors."""
        ints = [torch.tensor(x, dtype=torch.int32) for x in (slots, accepted or [])]
        device = "cpu" if self.kernel == "reference" else DEVICE
        pool, ring, cursors = moved(self.states, device), Ring(*(moved(x, device) for x in self.ring)), self.cursors
        cursors = cursors.to(device)
        tables = {name: moved(x, device) for name, x in tables.items()}
        with nullcontext() if self.kernel == "reference" else use_kernel(self.kernel):
            plan = self.path.plan(
                moved(lengths(query_lens, contexts), device),
                state_indices=ints[0].to(device),
                cursors=cursors,
                ring_size=ring.key.shape[1],
                drafts=accepted is not None,
                **tables,
            )
            tokens = [moved(x, device) for x in step]
            out = self.path.attention(*tokens, pool, ring, plan, options, out=tokens[2] if is_over else None)
            self.path.advance(cursors, plan, None if accepted is None else ints[1].to(device))
        self._take(pool, ring, cursors)
        return out.cpu()

    def flush(self, *slots: int, to: tuple[int, ...] | None = None) -> None:
        """Move the checkpoints of some slots, or write their states to others."""
        device = "cpu" if self.kernel == "reference" else DEVICE
        pool, ring = moved(self.states, device), Ring(*(moved(x, device) for x in self.ring))
        cursors = self.cursors.to(device)
        with nullcontext() if self.kernel == "reference" else use_kernel(self.kernel):
            given = slots if to is None else slots + to
            indices = torch.tensor(given, dtype=torch.int32, device=device).split(len(slots))
            self.path.flush([pool], [ring], cursors, *indices)
        self._take(pool, ring, cursors)

    def _take(self, pool: Tensor, ring: Ring, cursors: Tensor) -> None:
        """Copy what a step wrote back to the CPU, if it was elsewhere."""
        for mine, theirs in zip((self.states, *self.ring, self.cursors), (pool, *ring, cursors), strict=True):
            if mine is not theirs:
                mine.copy_(theirs)
