"""Layers that replay their last inputs: pools, rings with any cursors, a step, and all slots flushed after it.

One step with any cursors meets each case of a checkpoint that moves, in its slot or to another. Its outputs are
compared, and the states of its slots after `advance` and `flush`; and no byte of any memory may change, except those
that the step pushes or moves. Where checkpoints move to other slots, the states of a step are flushed to slots of their
own, and the slots that it left are flushed in place: they still hold what it began with.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from refattn.options import RecurrentOptions
from refattn.rings import Ring
from twinattn.kit.oracle import Answer
from twinattn.kit.search.exact import MovedWronglyError
from twinattn.kit.search.inputs import Call, Modules, make_batch
from twinattn.kit.search.recurrent import layer_tokens, poison
from twinattn.kit.search.tensors import copied, laid, memory
from twinattn.kit.workload import Workload


@dataclass(frozen=True)
class Slot:
    """The slot of a sequence in a step.

    Attributes:
        number: of the slot; None of a sequence that is padding or has no new tokens.
        held: inputs in its ring; 0 where it begins.
        begins: whether it starts from zeros and an empty ring.
        asked: whether the plan asks for its checkpoint at the end.
        accepted: new tokens that are kept: all, except of drafts.
        target: the slot that its checkpoint goes to if it moves.
        copy: where its state is flushed to after the step; None if in place.
    """

    number: int | None
    held: int
    begins: bool
    asked: bool
    accepted: int
    target: int
    copy: int | None


def slots_of(work: Workload) -> tuple[list[Slot], dict[str, Any], Tensor]:
    """Draw the slots of a step; return them, the arguments of its plan except batch and cursors, and the cursors."""
    chosen, drafts = Random(f"{work.seed}/rings"), work.slots == "drafts"
    has_targets = chosen.random() < 0.4
    num_slots = len(work.lens) * (3 if has_targets else 1) + 3
    free = list(range(num_slots))
    chosen.shuffle(free)
    cursors = [chosen.choice((-9, 1_000_000, 2**31 - 1)) for _ in range(num_slots)]  # no step reads most of them
    indices, states, asked, targets, slots = [], [], [], [], []
    for q, s in work.lens:
        number, has = free.pop(), chosen.random() < 0.8 if work.seed % 2 else s > q
        held = chosen.choice((0, work.ring, chosen.randint(0, work.ring)))
        flush = work.slots in ("checkpoints", "both") and chosen.random() < 0.4
        is_padding = chosen.random() < 0.1
        indices.append(-1 - chosen.randint(0, 3) if is_padding else number)
        states.append(has)
        asked.append(flush)
        is_met = q > 0 and not is_padding
        if has and is_met:
            cursors[number] = held
        kept = chosen.randint(0, q) if drafts else q
        target = free.pop() if has_targets and chosen.random() < 0.8 else number
        copy = free.pop() if has_targets else None
        none = number if chosen.random() < 0.3 else -1 - chosen.randint(0, 3)  # its own slot, said in two ways
        targets.append(none if target == number else target if is_met else chosen.choice((target, -7, 2**31 - 1)))
        slots.append(Slot(number if is_met else None, held if has else 0, not has, flush, kept, target, copy))
    plan: dict[str, Any] = dict(ring_size=work.ring, state_indices=torch.tensor(indices, dtype=torch.int32))
    if work.seed % 2:
        plan["has_initial_state"] = torch.tensor(states)
    if work.slots in ("checkpoints", "both"):
        plan["flush"] = torch.tensor(asked)
    if drafts:
        plan["drafts"] = True
    if has_targets:
        plan["target_indices"] = torch.tensor(targets, dtype=torch.int32)
    return slots, plan, torch.tensor(cursors, dtype=torch.int32)


def call(work: Workload, generator: torch.Generator) -> Call:
    """Make the tensors of a layer, its rings, and those of the step."""
    slots, arguments, cursors = slots_of(work)
    tensors = layer_tokens(work, generator)
    hv, dv, dk = tensors.pop("states").shape[1:]
    n, h, size = len(cursors), work.heads[1], work.ring

    def pool(x: Tensor, dtype: str, slots_read: list[int], layout: str) -> Tensor:
        unread = [slot for slot in range(n) if slot not in slots_read]
        x[unread] = poison(work, len(unread)).view(-1, *[1] * (x.ndim - 1))
        return laid(x.to(getattr(torch, dtype)), layout)

    def normal(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator)

    read = [slot.number for slot in slots if slot.number is not None and not slot.begins]
    layout = "NHD" if work.pool in ("expanded", "HND") else work.pool
    decay = -torch.rand(n, size, hv, *([dk] if work.per_channel else []), generator=generator)
    rows = dict(
        key=(normalize(normal(size, h, dk), dim=-1), work.dtype),
        written=(normal(size, hv, dv), work.state_dtype),
        log_decay=(decay.masked_fill(torch.rand(decay.shape, generator=generator) < 0.03, -torch.inf), "float32"),
    )
    for slot in slots:  # no step reads what lies past a cursor
        if slot.number in read:
            for x, _ in rows.values():
                x[slot.number, slot.held :] = poison(work, size - slot.held).view(-1, *[1] * (x.ndim - 2))
    tensors["states"] = pool(normal(hv, dv, dk), work.state_dtype, read, layout)
    tensors["ring"] = [pool(x, dtype, read, "plain") for x, dtype in rows.values()]
    tensors |= dict(cursors=cursors, tables=arguments, batch=replace(make_batch(work, None), num_keys=None))
    tensors["accepted"] = torch.tensor([slot.accepted for slot in slots], dtype=torch.int32)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        path, own = modules("replay"), {**tensors, "states": copied(tensors["states"])}
        ring = Ring(*copied(tensors["ring"]))
        names = ("query", "key", "value", "log_decay", "beta", "states")
        options = RecurrentOptions(work.softmax_scale, work.delta)
        given = {name: x for name, x in more.items() if name == "out"}
        out = path.attention(*(own[name] for name in names), ring, plan, options, **given)
        _nothing_else(work, slots, (own["states"], *ring), (tensors["states"], *tensors["ring"]))
        if not more.get("return_lse"):
            return out
        after = tensors["cursors"].clone()
        path.advance(after, plan, tensors["accepted"] if work.slots == "drafts" else None)
        _right_cursors(work, slots, after, tensors["cursors"])
        for read, written in _flushes(work, slots):
            expected = after.clone()
            expected[written] = 0  # a copy leaves the ring that it is made of
            tables = [torch.tensor([*x, -1], dtype=torch.int32, device=after.device) for x in (read, written)]
            path.flush([own["states"]], [ring], after, *tables[: 1 if read == written else 2])
            _same_cursors(after, expected)
        return out, own["states"]

    return Call(
        tensors,
        ("query", "key", "value"),
        lambda modules, tensors: modules("replay").plan(
            tensors["batch"], cursors=tensors["cursors"], **tensors["tables"]
        ),
        run,
        lambda: Answer(*_replayed(work, tensors, slots), torch.zeros(0, dtype=torch.bool)),
        (work.num_tokens + work.padding_rows, hv, dv),
        answers=("out", "states"),
    )


def _moves(work: Workload, slot: Slot, query_len: int) -> tuple[bool, bool]:
    """Return whether a checkpoint moves to before the step, and whether to its end."""
    inputs = slot.held + query_len
    if work.slots == "drafts":
        return slot.begins or inputs > work.ring, False
    return False, slot.begins or slot.asked or inputs >= work.ring


def _ends(work: Workload, slot: Slot, query_len: int) -> int:
    """Return the slot in which a sequence goes on after a step."""
    assert slot.number is not None
    return slot.target if any(_moves(work, slot, query_len)) else slot.number


def _flushes(work: Workload, slots: list[Slot]) -> list[tuple[list[int], list[int]]]:
    """List the flushes after a step: slots, and where their states go. First of all sequences, then of slots left."""
    met = [
        (slot, _ends(work, slot, q)) for slot, (q, _) in zip(slots, work.lens, strict=True) if slot.number is not None
    ]
    ends, copies = [end for _, end in met], [end if slot.copy is None else slot.copy for slot, end in met]
    left = [slot.number for slot, end in met if slot.number not in (None, end) and not slot.begins]
    return [(ends, copies), (left, left)]


def _nothing_else(work: Workload, slots: list[Slot], after: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> None:
    """Check that no memory has changed, except the inputs that were pushed and the checkpoints that moved.

    Raises:
        MovedWronglyError: if anything else has changed.
    """
    expected = [copied(x) for x in before]
    for slot, (q, _) in zip(slots, work.lens, strict=True):
        if slot.number is None:
            continue
        (earlier, later), end = _moves(work, slot, q), _ends(work, slot, q)
        first = 0 if earlier else slot.held
        if earlier or later:
            expected[0][end] = after[0][end]
        for other, x in zip(expected[1:], after[1:], strict=True):
            pushed = slice(0, None) if later else slice(first, first + q)
            other[end, pushed] = x[end, pushed]
    for name, x, right in zip(("states", *Ring._fields), after, expected, strict=True):
        for piece, other in zip(memory(x).values(), memory(right).values(), strict=True):
            if not torch.equal(piece, other):
                raise MovedWronglyError(
                    f"{name}: byte {int((piece != other).nonzero()[0])} of their memory was written"
                )


def _right_cursors(work: Workload, slots: list[Slot], after: Tensor, before: Tensor) -> None:
    """Check the cursors after a step. That of a checkpoint that has to move is 0, so a ring cannot make up for it.

    Raises:
        MovedWronglyError: naming one that is wrong.
    """
    expected = before.clone()
    for slot, (q, _) in zip(slots, work.lens, strict=True):
        if slot.number is not None:
            earlier, later = _moves(work, slot, q)
            expected[_ends(work, slot, q)] = 0 if later else (0 if earlier else slot.held) + slot.accepted
    _same_cursors(after, expected)


def _same_cursors(cursors: Tensor, expected: Tensor) -> None:
    """Compare cursors.

    Raises:
        MovedWronglyError: naming one that is wrong.
    """
    for number, (one, right) in enumerate(zip(cursors.tolist(), expected.tolist(), strict=True)):
        if one != right:
            raise MovedWronglyError(f"cursors: expected {right} for slot {number}, got {one}")


# --- the oracle ---


def _replayed(work: Workload, tensors: dict[str, Any], slots: list[Slot]) -> tuple[Tensor, Tensor]:
    """Fold one token after the other into matrices of keys by values, in float64."""
    query, key, value, log_decay, beta = (
        tensors[name].double() for name in ("query", "key", "value", "log_decay", "beta")
    )
    states, (keys, rows, decays) = tensors["states"].double(), (x.double() for x in tensors["ring"])
    out, row, group = torch.zeros(value.shape, dtype=torch.float64), 0, work.heads[0] // work.heads[1]
    of_key = torch.arange(work.heads[0]) // group
    scale = work.head_size**-0.5 if work.softmax_scale is None else work.softmax_scale

    def rounded(matrix: Tensor) -> Tensor:
        return matrix.to(tensors["states"].dtype).double()

    def fold(matrix: Tensor, decay: Tensor, key: Tensor, written: Tensor) -> Tensor:
        return matrix * decay.exp().view(len(written), 1, -1) + written[:, :, None] * key[of_key, None]

    for slot, (q, _) in zip(slots, work.lens, strict=True):
        if slot.number is not None:
            matrix = torch.zeros_like(states[0]) if slot.begins else states[slot.number].clone()
            (earlier, later), end = _moves(work, slot, q), _ends(work, slot, q)
            pushed = list(zip(*(x[slot.number, : slot.held] for x in (decays, keys, rows)), strict=True))
            checkpoint, live = matrix, matrix
            for one in pushed:
                live = fold(live, *one)
            if not slot.begins and end != slot.number:  # the slot that is left
                states[slot.number] = rounded(live)
            if earlier:
                checkpoint = live = rounded(live)
                pushed = []
            for token in range(row, row + q):
                faded = live * log_decay[token].exp().view(len(live), 1, -1)
                seen = (faded * key[token, of_key][:, None]).sum(-1)
                written = beta[token][:, None] * (value[token] - (seen if work.delta else 0))
                live = faded + written[:, :, None] * key[token, of_key][:, None]
                out[token] = scale * (live * query[token, of_key][:, None]).sum(-1)
                if token < row + slot.accepted:
                    pushed.append((log_decay[token], key[token], written.to(tensors["ring"][1].dtype).double()))
            if not later:
                live = checkpoint
                for one in pushed:
                    live = fold(live, *one)
            live = rounded(live)
            states[end] = live if later or slot.copy is None else checkpoint
            states[end if slot.copy is None else slot.copy] = live
        row += q
    return out, states
