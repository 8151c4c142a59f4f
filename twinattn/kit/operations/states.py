"""Layers that keep a state: the convolution before them, and the map that a step's tokens apply to a state."""

from typing import Any

import torch
from torch.nn.functional import silu as apply_silu

from refattn import recurrent
from refattn.options import RecurrentOptions
from refattn.states import StateMap
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, Drawn, batch_of
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special, Without, named
from twinattn.kit.operations.tiles import of_lengths, of_size

LENS = (((5, 5), (1, 9)), ((1, 4),), ((3, 3), (0, 6), (1, 20)), ((9, 12), (4, 4), (2, 30)), ((70, 70),))
FEWER = (((1, 9), (2, 7)), ((2, 2), (1, 3), (1, 1)), ((1, 1),))
FILLED = (  # numbers of tokens that fill tiles of many sizes exactly or nearly
    tuple((n, n + i % 2) for i, n in enumerate(range(1, 65))),
    tuple((n, n + i % 2) for i, n in enumerate(n + more for n in range(72, 257, 8) for more in (-1, 0, 1))),
)
NEGATIVE = (-1, -2, -(2**31))  # slots of padding
EMPTY = ((), ((0, 0),), ((0, 5), (2, 2)))
OF_CONTEXT = dict(has_initial_state=Without("context", ("has_initial_state",)))


def draw_steps(case: Case, drawn: Drawn) -> tuple[Arguments, int]:
    """Draw the lengths of sequences, their slots, in some cases with one as padding, and which have a state."""
    lens, drafts = case["lens"], case["num_accepted"]
    a, b = drawn.lengths(lens), len(lens)
    columns = max([1, *(q for q, _ in lens)]) if drafts else 1
    n = b * columns + 3
    slots = torch.tensor(drawn.order(n)[: b * columns], dtype=torch.int32).reshape(b, columns)
    if case["idle"] and b > 1:
        slots[drawn.whole(0, b, 1)] = NEGATIVE[case.seed % len(NEGATIVE)]
    other = case.sizes.get("has_initial_state", "context") == "other"  # some forget their context, or resume without
    has_state = [(s > q) != (other and i % 3 < 2) for i, (q, s) in enumerate(lens)]
    a["has_initial_state"] = torch.tensor(has_state, dtype=torch.bool)
    a["num_accepted"] = drawn.whole(1, columns + 1, b, dtype=torch.int32) if drafts else None
    a["state_indices"] = slots if drafts else slots[:, 0].contiguous()
    return a, n


def with_context(a: Arguments) -> Arguments:
    """Return the arguments with a state for each sequence that has a context, and for no other."""
    return {**a, "has_initial_state": a["seq_lens"] > a["cu_seqlens_q"].diff()}


def paths_of(a: Arguments) -> list[tuple[int, int, int | None, list[int]]]:
    """List for each sequence with new tokens its rows, its initial slot, and the slot after each token, or -1."""
    found, ends = [], a["cu_seqlens_q"].tolist()
    for i, (q0, q1) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        drafts = a["num_accepted"] is not None
        slots = a["state_indices"][i].tolist() if drafts else [-1] * (q1 - q0 - 1) + [int(a["state_indices"][i])]
        first = slots[0] if drafts else slots[-1]
        if q1 == q0 or first < 0:
            continue
        start = slots[int(a["num_accepted"][i]) - 1] if drafts else first
        found.append((q0, q1, start if a["has_initial_state"][i] else None, slots))
    return found


def plan_of(a: Arguments) -> Any:
    """Return the plan of a step."""
    tables = {name: a[name] for name in ("state_indices", "has_initial_state", "num_accepted")}
    return recurrent.plan(batch_of(a), **tables)


def draw_convolution(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new inputs and the last inputs of each slot."""
    drawn = Drawn(case, dtype)
    a, n = draw_steps(case, drawn)
    c, width, t = case["channels"], case["width"], int(a["cu_seqlens_q"][-1])
    wide = dtype if case["states_dtype"] == "same" else getattr(torch, case["states_dtype"])
    a |= dict(
        inputs=drawn.normal(t + case["padding"], c),
        weight=drawn.normal(c, width),
        states=drawn.normal(n, width - 1, c, dtype=wide),
        bias=drawn.normal(c) if case["bias"] else None,
        silu=case["silu"],
    )
    unread = torch.ones(n, dtype=torch.bool)
    unread[[start for _, _, start, _ in paths_of(a) if start is not None]] = False
    rows = torch.ones(len(a["inputs"]), dtype=torch.bool)
    for q0, q1, _, _ in paths_of(a):
        rows[q0:q1] = False
    unread_of = dict(states=unread[:, None, None].expand(a["states"].shape), inputs=rows[:, None].expand(len(rows), c))
    return Inputs(a, unread_of)


def convolved(
    a: Arguments, compute: torch.dtype, *, shift: bool = True, zeros: bool = True, flip: bool = False
) -> Answers:
    """Return the outputs, tap by tap, and the states."""
    x, w = a["inputs"].to(compute), a["weight"].to(compute)
    w = w.flip(1) if flip else w
    kept = w.shape[1] - 1
    out, states = torch.zeros_like(x), a["states"].clone()
    for q0, q1, start, slots in paths_of(a):
        before = x.new_zeros(kept, x.shape[1])
        if start is not None:
            before = a["states"][start].to(compute)
        elif not zeros:
            before = a["states"][slots[-1]].to(compute)
        line = torch.cat([before, x[q0:q1]])
        total = sum((line[k : k + q1 - q0] * w[:, k] for k in range(kept + 1)), torch.zeros_like(x[q0:q1]))
        total = total if a["bias"] is None else total + a["bias"].to(compute)
        out[q0:q1] = apply_silu(total) if a["silu"] else total
        for token, slot in enumerate(slots[: q1 - q0]):
            if slot >= 0:
                states[slot] = line[token + 1 : token + 1 + kept].to(states.dtype)
            if slot >= 0 and not shift and token + 1 < kept:
                states[slot] = torch.cat([x.new_zeros(kept - token - 1, x.shape[1]), x[q0 : q0 + token + 1]])
    return dict(out=out, states=states)


CONVOLVE = Operation(
    name="convolve",
    function="convolve",
    signature="`inputs` `[t, c]`, `weight` `[c, width]`, `states` `[n, width - 1, c]`, changed in place; "
    "`state_indices` "
    "`[b]`, or `[b, columns]` with `num_accepted`; `has_initial_state`, `cu_seqlens_q` and the like; `bias`, "
    "`silu`, `out`",
    draw=draw_convolution,
    oracle=convolved,
    sizes=dict(
        lens=LENS,
        channels=(6, 1, 70, 300),
        width=(4, 2, 3, 5, 7),
        padding=(0, 2),
        idle=(False, True),
        states_dtype=("same", "float32", "bfloat16"),
        has_initial_state=("context", "other"),
        num_accepted=(False, True),
        bias=(False, True),
        silu=(True, False),
    ),
    without=OF_CONTEXT,
    dimensions={name: x for name, x in of_lengths(sequences=1025, channels=6).items() if name != "keys"}
    | dict(channels=of_size("channels"), padding=of_size("padding")),
    options=dict(bias=False, silu=True, num_accepted=False),
    specials=(
        Special("short steps", "With fewer new tokens than its width, older inputs of a state move.", dict(lens=FEWER)),
        Special(
            "filled tiles",
            "A sequence may have any number of new tokens, also one that fills a tile exactly.",
            dict(lens=FILLED, channels=(1, 6)),
        ),
        Special("no state", "A width of 1 keeps no inputs.", dict(width=(1,))),
        Special("empty", "A step may have no sequence, and a sequence no token.", dict(lens=EMPTY)),
        Special("idle", "A sequence whose slot is negative is padding.", dict(idle=(True,))),
        Special(
            "many",
            "There may be more tokens than 16 bits count.",
            dict(lens=(((1, 2), (65600, 65600)),), channels=(2,)),
            once=True,
        ),
    ),
    derived={**BATCH, "plan": plan_of},
    changes=("states",),
    exact=frozenset({"states"}),
    types=dict(out="inputs"),
    strided=("inputs", "weight", "states", "bias"),
    pools=("states",),
    nan=("inputs", "weight"),
    has_out=True,
    size=lambda a: (
        float(a["inputs"].double().abs().amax() * a["weight"].double().abs().sum(1).amax())
        if a["inputs"].numel()
        else 0.0
    ),
    mistakes=(
        Mistake(
            "state-not-shifted",
            "With fewer new tokens than the width, a state keeps the new inputs alone.",
            lambda a, compute: convolved(a, compute, shift=False),
        ),
        Mistake(
            "old-state-of-a-slot",
            "A new sequence reads the old state in its slot.",
            lambda a, compute: convolved(a, compute, zeros=False),
        ),
        Mistake(
            "weights-reversed", "The taps of the convolution are reversed.", lambda a, c: convolved(a, c, flip=True)
        ),
        Mistake(
            "context-decides",
            "A sequence has a state if it has a context, and has_initial_state is ignored.",
            lambda a, c: convolved(with_context(a), c),
        ),
        Mistake("bias-left-out", "The bias is not added.", lambda a, c: convolved({**a, "bias": None}, c)),
    ),
)


# --- maps of a state ---


def draw_map(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw the keys, values and gates of new tokens."""
    drawn = Drawn(case, dtype)
    a, _ = draw_steps(case, drawn)
    t, h, hv, dk = (
        int(a["cu_seqlens_q"][-1]) + case["padding"],
        case["heads"],
        case["heads"] * case["group"],
        case["key_size"],
    )
    key = drawn.normal(t, h, dk, dtype=torch.float32)
    key = key / key.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    per_channel = (dk,) if case["per_channel"] else ()
    log_decay = -drawn.uniform(t, hv, *per_channel, low=0.01, high=0.7, dtype=torch.float32)
    beta = drawn.uniform(t, hv, low=0.1, high=0.9)
    if case["gates"] != "usual":  # every third token forgets nearly everything, or all of it
        log_decay[1::3] = {"large": -40.0, "forget": -torch.inf}[case["gates"]]
        log_decay[2::5], beta = -9.3, beta * 2
    a |= dict(
        key=key.to(dtype),
        value=drawn.normal(t, hv, case["value_size"]),
        log_decay=log_decay,
        beta=beta,
        delta=case["delta"],
    )
    rows = torch.ones(t, dtype=torch.bool)
    for q0, q1, _, _ in paths_of(a):
        rows[q0:q1] = False
    names = ("key", "value", "log_decay", "beta")
    return Inputs(a, {x: rows.reshape(t, *[1] * (a[x].ndim - 1)).expand(a[x].shape) for x in names})


def mapped(a: Arguments, compute: torch.dtype, *, decay_last: bool = False) -> Answers:
    """Return the product of the matrices of all tokens, `decay (I - beta k k^T)`, and the state after zeros."""
    compute = torch.promote_types(compute, torch.float32)
    b, (hv, dv), dk = len(a["cu_seqlens_q"]) - 1, a["value"].shape[1:], a["key"].shape[-1]
    identity = torch.eye(dk, dtype=compute)
    factor, added = identity.expand(b, hv, dk, dk).clone(), torch.zeros(b, hv, dv, dk, dtype=compute)
    ends = a["cu_seqlens_q"].tolist()
    steps = {q0: q1 for q0, q1, _, _ in paths_of(a)}
    group = hv // a["key"].shape[1]
    for i in range(b):
        for row in range(ends[i], steps.get(ends[i], ends[i]) if ends[i + 1] > ends[i] else ends[i]):
            for head in range(hv):
                k, v = a["key"][row, head // group].to(compute), a["value"][row, head].to(compute)
                decay = a["log_decay"][row, head].to(compute).exp() * torch.ones(dk, dtype=compute)
                beta = a["beta"][row, head].to(compute)
                forget = identity - beta * torch.outer(k, k) if a["delta"] else identity
                step = forget * decay if decay_last else decay[:, None] * forget
                factor[i, head] = factor[i, head] @ step
                added[i, head] = added[i, head] @ step + beta * torch.outer(v, k)
    return dict(factor=factor, added=added)


STATE_MAP = Operation(
    name="state_map",
    function="state_map",
    signature="`key` `[t, h, dk]`, `value` `[t, hv, dv]`, `log_decay`, `beta` `[t, hv]`, `state_indices` (negative: "
    "padding), `cu_seqlens_q` and the like, `delta`; it returns `factor` `[b, hv, dk, dk]` and `added` `[b, hv, "
    "dv, dk]`",
    draw=draw_map,
    oracle=mapped,
    sizes=dict(
        lens=LENS[:4],
        heads=(1, 2, 3),
        group=(1, 2, 3, 4, 8),
        key_size=(16, 8),
        value_size=(16, 5),
        padding=(0, 2),
        idle=(False, True),
        num_accepted=(False,),
        per_channel=(False, True),
        delta=(True, False),
        gates=("usual",),
    ),
    without=dict(delta=Without(True, ("delta",))),
    dimensions={
        name: x for name, x in of_lengths(queries=513, sequences=129, heads=1, group=1).items() if name != "keys"
    }
    | {name: of_size(name, 65, lens=((2, 5), (1, 1))) for name in ("heads", "group")}
    | {name: of_size(name, 129, lens=((2, 5), (1, 1))) for name in ("key_size", "value_size")}
    | dict(padding=of_size("padding", 1025)),
    specials=(
        Special("empty", "A step may have no sequence, and a sequence no token.", dict(lens=EMPTY)),
        Special(
            "gates", "A token may be written with a factor up to 2, and forget nearly all.", dict(gates=("large",))
        ),
        Special("forgets", "A decay of 0, whose logarithm is -inf, forgets everything.", dict(gates=("forget",))),
        Special(
            "long",
            "Sequences may have several chunks of 64 tokens.",
            dict(lens=(((130, 130),), ((64, 70), (65, 65))), heads=(1,), group=(1,)),
        ),
    ),
    derived={**BATCH, "plan": plan_of, "options": lambda a: RecurrentOptions(delta=a["delta"])},
    outputs=("factor", "added"),
    strided=("key", "value", "log_decay", "beta"),
    nan=("key", "value"),
    size=lambda a: 4.0,
    mistakes=(
        Mistake(
            "decay-after-write",
            "The decay of a token is applied after it was written.",
            lambda a, c: mapped(a, c, decay_last=True),
        ),
        Mistake(
            "value-heads-in-turn",
            "Value heads take the keys in turn, where neighbours share one.",
            lambda a, c: mapped({**a, "key": a["key"][:, torch.arange(a["value"].shape[1]) % a["key"].shape[1]]}, c),
        ),
        Mistake("delta-left-out", "Old values are not subtracted.", lambda a, c: mapped({**a, "delta": False}, c)),
    ),
)


def draw_maps(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw the maps of consecutive runs of tokens."""
    drawn, shape = Drawn(case, dtype), (case["sequences"], case["heads"])
    dk, dv = case["key_size"], case["value_size"]
    factors = [drawn.normal(*shape, dk, dk) / dk**0.5 for _ in range(case["maps"])]
    return Inputs(dict(factors=factors, added=[drawn.normal(*shape, dv, dk) for _ in range(case["maps"])]))


def composed(a: Arguments, compute: torch.dtype, *, backwards: bool = False) -> Answers:
    """Return the map of all runs: each added part is multiplied by all later factors."""
    pairs = list(zip(a["factors"], a["added"], strict=True))
    factor = torch.eye(a["factors"][0].shape[-1], dtype=compute).expand(a["factors"][0].shape)
    added = torch.zeros(a["added"][0].shape, dtype=compute)
    for of_factor, of_added in reversed(pairs) if backwards else pairs:
        factor, added = factor @ of_factor.to(compute), added @ of_factor.to(compute) + of_added.to(compute)
    return dict(factor=factor, added=added)


COMPOSE = Operation(
    name="compose",
    function="compose",
    signature="`maps`: pairs of `factor` and `added`, the first tokens first; or `factors` and `added` as lists; "
    "it returns both",
    draw=draw_maps,
    oracle=composed,
    sizes=dict(maps=(2, 3, 5), sequences=(2, 1, 3), heads=(2, 1), key_size=(16, 8, 5), value_size=(16, 5)),
    dimensions=dict(maps=of_size("maps", 129), sequences=of_size("sequences", 1025), heads=of_size("heads", 129))
    | {name: of_size(name, 257) for name in ("key_size", "value_size")},
    specials=(
        Special("empty", "There may be no sequence.", dict(sequences=(0,))),
        Special("runs", "There may be one run, and many.", dict(maps=(1, 40, 70))),
    ),
    derived=dict(maps=lambda a: [StateMap(*x) for x in zip(a["factors"], a["added"], strict=True)]),
    outputs=("factor", "added"),
    seen=lambda came, a: named(tuple(came) if isinstance(came, tuple) else came, ("factor", "added")),
    types=dict(factor="factors", added="added"),
    strided=("factors", "added"),
    nan=("factors", "added"),
    terms=lambda a: len(a["factors"]) * (a["factors"][0].shape[-1] + 1),
    dtypes=(torch.float32, torch.float64),
    mistakes=(
        Mistake("runs-backwards", "The last run comes first.", lambda a, c: composed(a, c, backwards=True)),
        Mistake(
            "added-without-later-factor",
            "The added part of a run is not multiplied by the factors of later runs.",
            lambda a, c: composed(a, c) | dict(added=sum(x.to(c) for x in a["added"])),
        ),
    ),
)

OPERATIONS: tuple[Operation, ...] = (CONVOLVE, STATE_MAP, COMPOSE)
