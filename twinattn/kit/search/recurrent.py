"""Layers that keep a state: tokens, pools of states, tables of slots, and a token-by-token oracle."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, sigmoid

from refattn.options import RecurrentOptions
from twinattn.kit.cases import POISON
from twinattn.kit.oracle import Answer
from twinattn.kit.search.exact import MovedWronglyError
from twinattn.kit.search.inputs import Call, Modules, make_batch
from twinattn.kit.search.tensors import copied, laid, memory
from twinattn.kit.workload import Workload

GARBAGE = (-7, 1_000_000, 2**31 - 1)  # entries of a table that no step reads


@dataclass(frozen=True)
class Tables:
    """The tables of a step, and the slots that it reads and writes.

    Attributes:
        arguments: of `recurrent.plan`, except the batch.
        starts: the slot of each sequence's initial state; None for zeros, or if none is read.
        kept: for each sequence, and each of its new tokens, the slots that store the state after it; None for padding.
        num_slots: of the pool.
    """

    arguments: dict[str, Any]
    starts: list[int | None]
    kept: list[list[list[int]] | None]
    num_slots: int


def tables(work: Workload) -> Tables:
    """Draw the slots of a step."""
    chosen, longest = Random(f"{work.seed}/slots"), max(q for q, _ in work.lens)
    drafts, blocks = work.slots in ("drafts", "both"), work.slots in ("checkpoints", "both")
    columns = max(1, longest) + chosen.randint(0, 2) if drafts else 1
    spans = [(max(0, s - q) // work.block_size, (max(0, s - q) + q) // work.block_size) for q, s in work.lens]
    most = max(1, *(end for _, end in spans)) if blocks else 0
    free = list(range(len(work.lens) * columns + sum(end - first for first, end in spans) * blocks + 3))
    num_slots = len(free)
    chosen.shuffle(free)
    indices, accepted, has_state, checkpoints = [], [], [], []
    starts: list[int | None] = []
    kept: list[list[list[int]] | None] = []
    for (q, s), (first, end) in zip(work.lens, spans, strict=True):
        is_padding, before = chosen.random() < 0.15, chosen.randint(1, columns)
        has = chosen.random() < 0.7 if work.seed % 2 else s > q
        row = [free.pop() for _ in range(columns)]
        for column in range(1, columns):
            if column != before - 1 and (column >= q or chosen.random() < 0.2):
                row[column] = chosen.choice(GARBAGE) if column >= q else -1
        of_blocks = [free.pop() if chosen.random() < 0.8 else -1 for _ in range(end - first)] if blocks else []
        after: list[list[int]] = [[] for _ in range(q)]
        for token in range(q) if drafts else ([q - 1] if q else []):
            after[token].append(row[token if drafts else 0])
        for block, slot in zip(range(first, end), of_blocks, strict=False):
            after[(block + 1) * work.block_size - max(0, s - q) - 1].append(slot)
        if is_padding:
            row[0], before = -1 - chosen.randint(0, 3), chosen.choice((-5, before))
        elif not q and chosen.random() < 0.5:
            row, before = [chosen.choice(GARBAGE) for _ in row], chosen.choice(GARBAGE)
        indices.append(row)
        accepted.append(before)
        has_state.append(has)
        of_others = [chosen.choice(GARBAGE) for _ in range(most)]
        checkpoints.append(of_others[:first] + of_blocks + of_others[end:] if blocks else [])
        is_read = q and has and not is_padding
        starts.append(row[before - 1 if drafts else 0] if is_read else None)
        kept.append(None if is_padding else [[slot for slot in slots if slot >= 0] for slots in after])

    def ints(rows: list[Any]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32)

    arguments: dict[str, Any] = dict(state_indices=ints(indices) if drafts else ints(indices)[:, 0])
    if work.seed % 2:
        arguments["has_initial_state"] = torch.tensor(has_state)
    if drafts:
        arguments["num_accepted"] = ints(accepted)
    if blocks:
        arguments |= dict(checkpoint_indices=ints(checkpoints).view(len(work.lens), most), block_size=work.block_size)
    return Tables(arguments, starts, kept, num_slots)


def call(work: Workload, generator: torch.Generator) -> Call:
    """Make the tensors of a layer, or of the convolution before it."""
    where = tables(work)
    tensors: dict[str, Any] = (_channels if work.operation == "convolve" else layer_tokens)(work, generator)
    rows = work.num_tokens + work.padding_rows
    shape = tuple(tensors["states"].shape[1:])
    states = torch.randn(where.num_slots, *shape, generator=generator)
    unread = [slot for slot in range(where.num_slots) if slot not in where.starts]
    states[unread] = poison(work, len(unread)).view(-1, *[1] * len(shape))
    pool = "NHD" if work.pool == "expanded" else work.pool
    tensors["states"] = laid(states.to(getattr(torch, work.state_dtype)), pool)
    tensors["tables"] = where.arguments
    tensors["batch"] = replace(make_batch(work, None), num_keys=None)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        states = copied(tensors["states"])  # states change in place
        given = {name: x for name, x in more.items() if name == "out"}
        path, own = modules("recurrent"), {**tensors, "states": states}
        if work.operation == "convolve":
            names: tuple[str, ...] = ("inputs", "weight", "states")
            numbers = dict(bias=own["bias"], silu=work.seed % 2 == 0)
            out = path.convolve(*(own[name] for name in names), plan, **numbers, **given)
        else:
            names = ("query", "key", "value", "log_decay", "beta", "states")
            options = RecurrentOptions(work.softmax_scale, work.delta)
            out = path.attention(*(own[name] for name in names), plan, options, **given)
        _nothing_else(states, tensors["states"], where)
        return (out, states) if more.get("return_lse") else out

    def expected() -> Answer:
        fold = _convolved if work.operation == "convolve" else _folded
        return Answer(*fold(work, tensors, where), torch.zeros(0, dtype=torch.bool))

    out_shape = (rows, shape[1]) if work.operation == "convolve" else (rows, *shape[:2])
    return Call(
        tensors,
        ("inputs", "weight") if work.operation == "convolve" else ("query", "key", "value"),
        lambda modules, tensors: modules("recurrent").plan(tensors["batch"], **tensors["tables"]),
        run,
        expected,
        out_shape,
        answers=("out", "states"),
    )


def poison(work: Workload, count: int) -> Tensor:
    """Return values `[count]` for memory that no query may see."""
    kinds = {"mixed": POISON, "nan": (torch.nan,), "finite": (1e4, -1e4), "none": (0.5,)}[work.poison]
    return torch.tensor([kinds[k % len(kinds)] for k in range(count)])


def _rows(work: Workload, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows in the layout of a workload, with poison after those of the last sequence."""
    if work.padding_rows:
        rows[work.num_tokens :] = poison(work, work.padding_rows).view(-1, *[1] * (rows.ndim - 1))
    return laid(rows.to(getattr(torch, work.dtype) if dtype is None else dtype), work.rows)


def layer_tokens(work: Workload, generator: torch.Generator) -> dict[str, Any]:
    """Draw the tokens of a layer, their gates, and `states` of the right sizes without any slot."""
    (hv, h), dk, dv, t = work.heads, work.head_size, work.value_size, work.num_tokens + work.padding_rows

    def normal(*shape: int) -> Tensor:
        return torch.randn(t, *shape, generator=generator)

    decay = -torch.rand(t, hv, dk, generator=generator) * (0.1, 1.0, 5.0)[work.seed % 3]
    decay = decay if work.per_channel else decay[..., 0]
    decay = decay.masked_fill(torch.rand(decay.shape, generator=generator) < 0.03, -torch.inf)  # forgets everything
    return dict(
        query=_rows(work, normal(h, dk)),
        key=_rows(work, normalize(normal(h, dk), dim=-1)),
        value=_rows(work, normal(hv, dv)),
        log_decay=_rows(work, decay, torch.float32),
        beta=_rows(work, sigmoid(normal(hv)), torch.float32),
        states=torch.empty(0, hv, dv, dk),
    )


def _channels(work: Workload, generator: torch.Generator) -> dict[str, Any]:
    channels, width, dtype = work.heads[0] * work.head_size, 2 + work.head_size % 3, getattr(torch, work.dtype)
    inputs = torch.randn(work.num_tokens + work.padding_rows, channels, generator=generator)
    bias = torch.randn(channels, generator=generator).to(dtype) if work.seed % 3 else None
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    return dict(inputs=_rows(work, inputs), weight=weight, bias=bias, states=torch.empty(0, width - 1, channels))


def _nothing_else(states: Tensor, before: Tensor, where: Tables) -> None:
    """Check that no memory of a pool has changed, except the slots that a step writes.

    Raises:
        MovedWronglyError: if anything else has changed.
    """
    expected = copied(before)
    for slot in {slot for rows in where.kept for slots in rows or () for slot in slots}:
        expected[slot] = states[slot]
    for piece, other in zip(memory(states).values(), memory(expected).values(), strict=True):
        if not torch.equal(piece, other):
            raise MovedWronglyError(f"states: byte {int((piece != other).nonzero()[0])} of their memory was written")


# --- the oracle ---


def _folded(work: Workload, tensors: dict[str, Any], where: Tables) -> tuple[Tensor, Tensor]:
    """Fold one token after the other into matrices of keys by values, in float64."""
    query, key, value, log_decay, beta = (
        tensors[name].double() for name in ("query", "key", "value", "log_decay", "beta")
    )
    states, (hv, h) = tensors["states"].double(), work.heads
    out, row = torch.zeros(value.shape, dtype=torch.float64), 0
    scale = work.head_size**-0.5 if work.softmax_scale is None else work.softmax_scale
    of_key = torch.arange(hv) // (hv // h)
    for (q, _), start, kept in zip(work.lens, where.starts, where.kept, strict=True):
        matrix = torch.zeros(hv, work.head_size, work.value_size, dtype=torch.float64)
        if start is not None and kept is not None:
            matrix = states[start].transpose(1, 2).clone()
        for slots, token in zip(kept or (), range(row, row + q), strict=False):
            matrix *= log_decay[token].exp().view(hv, -1, 1)
            k, new = key[token, of_key][:, :, None], value[token][:, None]  # [hv, dk, 1] and [hv, 1, dv]
            if work.delta:
                new = new - (k * matrix).sum(1, keepdim=True)
            matrix += k * (beta[token].view(hv, 1, 1) * new)
            out[token] = scale * (query[token, of_key][:, :, None] * matrix).sum(1)
            for slot in slots:
                states[slot] = matrix.transpose(1, 2).to(tensors["states"].dtype).double()
        row += q
    return out, states


def _convolved(work: Workload, tensors: dict[str, Any], where: Tables) -> tuple[Tensor, Tensor]:
    """Convolve token by token, in float64."""
    inputs, weight, states = (tensors[name].double() for name in ("inputs", "weight", "states"))
    out, row, width = torch.zeros(inputs.shape, dtype=torch.float64), 0, weight.shape[1]
    for (q, _), start, kept in zip(work.lens, where.starts, where.kept, strict=True):
        before = torch.zeros_like(states[0]) if start is None or kept is None else states[start].clone()
        seen = torch.cat([before, inputs[row : row + q]])
        for k, slots in enumerate(kept or ()):
            total = (seen[k : k + width] * weight.T).sum(0) + (
                0 if tensors["bias"] is None else tensors["bias"].double()
            )
            out[row + k] = total * torch.sigmoid(total) if work.seed % 2 == 0 else total
            for slot in slots:
                states[slot] = seen[k + 1 : k + width].to(tensors["states"].dtype).double()
        row += q
    return out, states
