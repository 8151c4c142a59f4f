"""Layers that replay their inputs: a step over checkpoints and rings, and the cursors after it."""

import torch
from torch import Tensor

from refattn import replay
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, Drawn, batch_of
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special, Without
from twinattn.kit.operations.states import EMPTY, OF_CONTEXT, draw_steps, with_context
from twinattn.kit.operations.tiles import of_lengths, of_size

LENS = (((1, 5), (2, 9)), ((1, 4),), ((3, 3), (0, 6), (1, 20)), ((1, 12), (1, 1), (2, 30)), ((4, 70), (1, 8)))
RING = ("key", "written", "log_decay")
CONTENTS = {"plan": ("has_initial_state", "flush", "drafts", "target_indices"), "options": ("scale", "delta")}


def draw_slots(case: Case, drawn: Drawn) -> tuple[Arguments, Tensor]:
    """Draw the lengths of sequences, their slots, cursors, flushes and targets; return which slots are read, too."""
    a, n = draw_steps(case, drawn)
    a["target_indices"], n = draw_targets(case, drawn, a["state_indices"].tolist(), n)
    lens = [q for q, _ in case["lens"]]
    size = max([case["ring_size"], *lens]) if case["drafts"] else case["ring_size"]
    read = torch.zeros(n, dtype=torch.bool)
    read[[slot for _, _, slot, has_state, _ in steps_of(a) if has_state]] = True
    a |= dict(
        cursors=drawn.whole(0, size + 1, n, dtype=torch.int32),
        ring_size=size,
        drafts=case["drafts"],
        flush=drawn.whole(0, 2, len(lens), dtype=torch.bool) if case["flush"] and not case["drafts"] else None,
    )
    del a["num_accepted"]
    return a, read


def draw_targets(case: Case, drawn: Drawn, slots: list[int], num_slots: int) -> tuple[Tensor | None, int]:
    """Draw where checkpoints go that move: to free slots, every third to its own; return how many slots there are."""
    if not case["target_indices"]:
        return None, num_slots
    num_slots += len(slots)
    free = iter([slot for slot in drawn.order(num_slots) if slot not in slots])
    own = [(slot, -1 - slot)[case.seed % 2] for slot in slots]
    targets = [own[i] if (i + case.seed) % 3 == 0 else next(free) for i in range(len(slots))]
    return torch.tensor(targets, dtype=torch.int32), num_slots


def steps_of(a: Arguments) -> list[tuple[int, int, int, bool, int]]:
    """List of each sequence with new tokens its rows, its slot, whether it has a state, and its number."""
    ends, tables = a["cu_seqlens_q"].tolist(), (a["state_indices"].tolist(), a["has_initial_state"].tolist())
    rows = zip(ends[:-1], ends[1:], *tables, range(len(ends) - 1), strict=True)
    return [x for x in rows if x[1] > x[0] and x[2] >= 0]


def moves_of(a: Arguments, tokens: int, slot: int, has_state: bool, i: int) -> tuple[int, bool, bool]:
    """Return how many inputs the ring of a sequence holds, and whether its checkpoint moves, before or after."""
    held = int(a["cursors"][slot]) if has_state else 0
    if a["drafts"]:
        return held, not has_state or held + tokens > a["ring_size"], False
    asked = a["flush"] is not None and bool(a["flush"][i])
    return held, False, not has_state or asked or held + tokens >= a["ring_size"]


def end_of(a: Arguments, slot: int, i: int, moves: bool) -> int:
    """Return the slot in which a sequence goes on."""
    target = -1 if a.get("target_indices") is None else int(a["target_indices"][i])
    return target if moves and target >= 0 else slot


def plan_of(a: Arguments) -> ReplayPlan:
    """Return the plan of a step."""
    names = ("state_indices", "cursors", "ring_size", "has_initial_state", "flush", "drafts", "target_indices")
    return replay.plan(batch_of(a), **{name: a[name] for name in names})


def ring_of(a: Arguments) -> Ring:
    """Return the ring of a call, in the memory that it is given in."""
    return Ring(*(a[f"ring_{name}"] for name in RING))


def draw_replay(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw new tokens, checkpoints, and inputs in the rings."""
    drawn = Drawn(case, dtype)
    a, read = draw_slots(case, drawn)
    n, size, t = len(read), a["ring_size"], int(a["cu_seqlens_q"][-1]) + case["padding"]
    h, hv, dk, dv = case["heads"], case["heads"] * case["group"], case["key_size"], case["value_size"]
    gates, wide = (hv, dk) if case["per_channel"] else (hv,), torch.promote_types(dtype, torch.float32)

    def keys(*shape: int) -> Tensor:
        x = drawn.normal(*shape, dtype=torch.float32)
        return (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)).to(dtype)

    def decays(*shape: int) -> Tensor:
        return -drawn.uniform(*shape, low=0.01, high=0.7, dtype=wide)

    a |= dict(
        query=drawn.normal(t, h, dk),
        key=keys(t, h, dk),
        value=drawn.normal(t, hv, dv),
        log_decay=decays(t, *gates),
        beta=drawn.uniform(t, hv, low=0.1, high=0.9, dtype=wide),
        states=drawn.normal(n, hv, dv, dk, dtype=wide),
        ring_key=keys(n, size, h, dk),
        ring_written=drawn.normal(n, size, hv, dv, dtype=wide),
        ring_log_decay=decays(n, size, *gates),
        scale=dk**-0.5 if case["scale"] is None else case["scale"],
        delta=case["delta"],
    )
    padding, past = torch.ones(t, dtype=torch.bool), torch.arange(size) >= a["cursors"][:, None]
    for q0, q1, *_ in steps_of(a):
        padding[q0:q1] = False
    of_slots = {"states": ~read, "cursors": ~read} | {f"ring_{name}": past | ~read[:, None] for name in RING}
    masks = of_slots | dict.fromkeys(("query", "key", "value", "log_decay", "beta"), padding)
    unread = {
        name: x.reshape(*x.shape, *[1] * (a[name].ndim - x.ndim)).expand(a[name].shape) for name, x in masks.items()
    }
    return Inputs(a, unread)


def replayed(
    a: Arguments, compute: torch.dtype, *, fades: bool = True, pushes_values: bool = False, empties: bool = True
) -> Answers:
    """Return the outputs and all that a step leaves, head by head as matrices."""
    compute = torch.promote_types(compute, torch.float32)
    names = ("query", "key", "value", "log_decay", "beta")
    query, key, value, log_decay, beta = (a[name].to(compute) for name in names)
    states, ring = a["states"].clone(), {name: a[f"ring_{name}"].clone() for name in RING}
    group, out = value.shape[1] // query.shape[1], torch.zeros_like(value)

    def write(state: Tensor, decay: Tensor, row: Tensor, k: Tensor) -> Tensor:
        decay = decay[:, None, None] if decay.ndim == 1 else decay[:, None]
        return (
            state * (decay if fades else torch.ones_like(decay))
            + row[..., None] * k.repeat_interleave(group, 0)[:, None]
        )

    for q0, q1, slot, has_state, i in steps_of(a):
        held, before, after = moves_of(a, q1 - q0, slot, has_state, i)
        end = end_of(a, slot, i, before or after)
        if not empties and not has_state:
            held = min(int(a["cursors"][slot]), a["ring_size"] - q1 + q0)
        state = states[slot].to(compute) if has_state else torch.zeros_like(states[slot], dtype=compute)
        for at in range(held):
            k, row, log = (ring[name][slot, at].to(compute) for name in RING)
            state = write(state, log.exp(), row, k)
        if before:
            states[end] = state.to(states.dtype)
        for token in range(q1 - q0):
            row = q0 + token
            k, decay = key[row], log_decay[row].exp()
            faded = state * (decay[:, None, None] if decay.ndim == 1 else decay[:, None])
            seen = torch.einsum("hvk,hk->hv", faded, k.repeat_interleave(group, 0)) if a["delta"] else 0.0
            written = beta[row][:, None] * (value[row] - seen)
            state = faded + written[..., None] * k.repeat_interleave(group, 0)[:, None]
            out[row] = torch.einsum("hvk,hk->hv", state, query[row].repeat_interleave(group, 0) * a["scale"])
            if not after:
                at = (0 if before else held) + token
                pushed = key[row], value[row] if pushes_values else written, log_decay[row]
                for name, x in zip(RING, pushed, strict=True):
                    ring[name][end, at] = x.to(ring[name].dtype)
        if after:
            states[end] = state.to(states.dtype)
    return dict(out=out, states=states) | {f"ring_{name}": x for name, x in ring.items()}


REPLAY = Operation(
    name="replay",
    function="attention",
    signature="`query`, `key` `[t, h, dk]`, `value` `[t, hv, dv]`, `log_decay`, `beta` `[t, hv]`, `scale`, `delta`; "
    "`states` `[n, hv, dv, dk]` and `ring_key`, `ring_written`, `ring_log_decay` `[n, ring_size, ...]` (or a `ring` "
    "of these), changed in place; `state_indices` `[b]`, `has_initial_state`, `cursors` `[n]`, `flush` `[b]`, "
    "`drafts`, `target_indices` `[b]`, `cu_seqlens_q` and the like, or a `plan`; `out`",
    draw=draw_replay,
    oracle=replayed,
    sizes=dict(
        lens=LENS,
        heads=(1, 2),
        group=(1, 2, 3),
        key_size=(16, 8),
        value_size=(16, 5),
        ring_size=(4, 1, 2, 7),
        padding=(0, 2),
        idle=(False, True),
        has_initial_state=("context", "other"),
        num_accepted=(False,),
        flush=(False, True),
        drafts=(False, True),
        target_indices=(False, True),
        per_channel=(False, True),
        delta=(True, False),
        scale=(0.3, None, -0.7),
    ),
    without=OF_CONTEXT
    | dict(
        flush=Without(False, ("flush",)),
        drafts=Without(False, ("drafts",)),
        target_indices=Without(False, ("target_indices",)),
        delta=Without(True, ("delta",)),
        scale=Without(None, ("scale",)),
    ),
    contents=CONTENTS,
    dimensions={
        name: x for name, x in of_lengths(queries=65, sequences=129, heads=1, group=1).items() if name != "keys"
    }
    | {name: of_size(name, 65, lens=((1, 5), (1, 1))) for name in ("heads", "group", "ring_size")}
    | {name: of_size(name, 129, lens=((1, 5), (1, 1))) for name in ("key_size", "value_size")}
    | dict(padding=of_size("padding", 1025)),
    specials=(
        Special("empty", "A step may have no sequence, and a sequence no token.", dict(lens=EMPTY)),
        Special("idle", "A sequence whose slot is negative is padding.", dict(idle=(True,))),
        Special(
            "one input",
            "With room for one input the checkpoint moves in every step.",
            dict(ring_size=(1,), drafts=(False,)),
        ),
        Special("taken over", "A sequence that begins has zeros and an empty ring.", dict(lens=(((1, 1), (2, 2)),))),
        Special("accepted later", "Drafts get into the ring, and into no checkpoint.", dict(drafts=(True,))),
        Special(
            "moved",
            "A checkpoint moves to the slot that the plan names, and its own slot stays as it was.",
            dict(target_indices=(True,)),
            ("target_indices",),
        ),
    ),
    derived={**BATCH, "plan": plan_of, "ring": ring_of, "options": lambda a: RecurrentOptions(a["scale"], a["delta"])},
    outputs=("out",),
    changes=("states", "ring_key", "ring_written", "ring_log_decay"),
    exact=frozenset({"ring_key", "ring_log_decay"}),
    types=dict(out="query"),
    strided=("query", "key", "value", "log_decay", "beta", "states", "cursors", *(f"ring_{name}" for name in RING)),
    pools=("states",),
    nan=("query", "key", "value"),
    has_out=True,
    size=lambda a: 4.0,
    mistakes=(
        Mistake(
            "input-without-decay",
            "An input of a ring does not fade what is before it.",
            lambda a, c: replayed(a, c, fades=False),
        ),
        Mistake(
            "value-pushed",
            "The value is pushed, and not what the token wrote.",
            lambda a, c: replayed(a, c, pushes_values=True),
        ),
        Mistake(
            "old-ring-of-a-slot",
            "A sequence that begins reads the ring of its slot.",
            lambda a, c: replayed(a, c, empties=False),
        ),
        Mistake(
            "context-decides",
            "A sequence has a state if it has a context, and has_initial_state is ignored.",
            lambda a, c: replayed(with_context(a), c),
        ),
        Mistake(
            "moved-in-place",
            "A checkpoint moves in its own slot, whatever target_indices says.",
            lambda a, c: replayed({**a, "target_indices": None}, c),
        ),
    ),
)


# --- cursors ---


def draw_cursors(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw a step, and how many of its tokens are accepted."""
    drawn = Drawn(case, dtype)
    a, read = draw_slots(case, drawn)
    lens = torch.tensor([q for q, _ in case["lens"]], dtype=torch.int32)
    chance = drawn.uniform(len(lens), dtype=torch.float32)
    a["num_accepted"] = (chance * (lens + 1)).floor().clamp(max=lens).int() if case["drafts"] else None
    return Inputs(a, dict(cursors=~read))


def moved(a: Arguments, _: torch.dtype = torch.float64, *, rejects: bool = True) -> Answers:
    """Return the cursors after a step."""
    cursors = a["cursors"].clone()
    for q0, q1, slot, has_state, i in steps_of(a):
        held, before, after = moves_of(a, q1 - q0, slot, has_state, i)
        kept = int(a["num_accepted"][i]) if rejects and a.get("num_accepted") is not None else q1 - q0
        cursors[end_of(a, slot, i, before or after)] = 0 if after else kept + (0 if before else held)
    return dict(cursors=cursors)


CURSORS = Operation(
    name="cursors",
    function="advance",
    signature="`cursors` `[n]`, changed in place; a `plan`, or `state_indices`, `has_initial_state`, `ring_size`, "
    "`flush`, `drafts`, `target_indices`, `cu_seqlens_q` and the like; `num_accepted` `[b]` of drafts",
    draw=draw_cursors,
    oracle=moved,
    sizes=dict(
        lens=LENS,
        ring_size=(4, 1, 2, 7),
        idle=(False, True),
        has_initial_state=("context", "other"),
        num_accepted=(False,),
        flush=(False, True),
        drafts=(False, True),
        target_indices=(False, True),
    ),
    without=OF_CONTEXT
    | dict(
        flush=Without(False, ("flush",)),
        drafts=Without(False, ("drafts", "num_accepted")),
        target_indices=Without(False, ("target_indices",)),
    ),
    contents=CONTENTS,
    dimensions={name: x for name, x in of_lengths(queries=65, sequences=1025).items() if name != "keys"}
    | dict(ring_size=of_size("ring_size", 1025)),
    specials=(
        Special("empty", "A step may have no sequence, and a sequence no token.", dict(lens=EMPTY)),
        Special("idle", "The cursor of a sequence whose slot is negative is none.", dict(idle=(True,))),
        Special("accepted", "Of drafts those that are accepted are kept.", dict(drafts=(True,)), ("num_accepted",)),
        Special(
            "moved",
            "The cursor of the slot that a checkpoint moves to counts, and that of its own slot stays.",
            dict(target_indices=(True,)),
            ("target_indices",),
        ),
    ),
    derived={**BATCH, "plan": plan_of},
    outputs=(),
    changes=("cursors",),
    exact=frozenset({"cursors"}),
    strided=("cursors",),
    dtypes=(torch.float32,),
    mistakes=(
        Mistake(
            "context-decides",
            "A sequence has a state if it has a context, and has_initial_state is ignored.",
            lambda a, c: moved(with_context(a), c),
        ),
        Mistake("cursor-never-moves", "Cursors stay where they are.", lambda a, _: dict(cursors=a["cursors"].clone())),
        Mistake(
            "rejected-drafts-kept",
            "All drafts are kept, whatever was accepted.",
            lambda a, c: moved(a, c, rejects=False),
        ),
        Mistake(
            "moved-in-place",
            "A checkpoint moves in its own slot, whatever target_indices says.",
            lambda a, c: moved({**a, "target_indices": None}, c),
        ),
    ),
)

OPERATIONS: tuple[Operation, ...] = (REPLAY, CURSORS)
