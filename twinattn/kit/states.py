"""Inputs and expected outputs of layers that keep a state: tokens, a pool of states, and slots.

A call changes the states in place, so they are outputs, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from refattn import recurrent
from refattn.batch import Batch
from refattn.modes import computing_in
from refattn.options import RecurrentOptions
from twinattn.kit.tolerance import WIDER
from twinattn.kit.workload import Workload

TOKENS = ("query", "key", "value", "log_decay", "beta", "states")
TABLES = ("state_indices", "has_initial_state", "num_accepted")
NOWHERE = 2**31 - 1  # an index beyond every table and pool
NEGATIVE = (-1, -2, -(2**31))  # slots of padding
LAYERS = {
    "gdn": "a decay per head, and the delta rule",
    "kda": "a decay per key channel, and the delta rule",
    "mamba2": "a decay per head, and the value itself is written; lightning attention, too",
}


def tensors(example: Workload, options: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Draw the tokens of a step, states in shuffled slots, and the tables.

    Options: `layer`: one of `LAYERS`. `padding`: every second sequence is padding, beginning with the second. `drafts`:
    each sequence has a slot per token, and begins after some token of the step before. `stale`: sequences without new
    tokens have the slots of one that has some; "anything": invalid slots. `states`: the type of the pool; float32
    without it. `decays`: "weak"; "strong": some of them, down to e^-60; "forget": some are 0. `beginnings`: "other":
    some sequences with a context begin anew, and some without one have a state. `scale` of the queries, and `delta`:
    those of `RecurrentOptions`.
    """
    generator = torch.Generator().manual_seed(example.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    lens, (hv, h) = example.lens, example.heads
    b, t, dk, dv = len(lens), sum(q for q, _ in lens) + example.padding_rows, example.head_size, example.value_size
    queries = torch.tensor([q for q, _ in lens], dtype=torch.int32)
    seq_lens = torch.tensor([s for _, s in lens], dtype=torch.int32)
    ends = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
    columns = max([1, *queries.tolist()]) + 1 if options.get("drafts") else 1
    slots = torch.randperm(b * columns + 3, generator=generator)[: b * columns].int().view(b, columns)
    if options.get("padding"):
        slots[1::2] = torch.tensor(NEGATIVE, dtype=torch.int32).roll(example.seed)[torch.arange(b // 2) % 3][:, None]
    if options.get("stale") == "anything":
        slots[queries == 0] = NOWHERE
    elif options.get("stale") and queries.any():
        slots[queries == 0] = slots[int(queries.argmax())].clone()
    other = torch.tensor(options.get("beginnings") == "other")
    layer, decays = options.get("layer", "gdn"), options.get("decays", "weak")
    log_decay = -torch.rand(t, hv, *([dk] if layer == "kda" else []), generator=generator, dtype=torch.float32)
    if decays != "weak":
        chosen = torch.rand(log_decay.shape, generator=generator) < 0.1
        log_decay[chosen] = -torch.inf if decays == "forget" else 60 * log_decay[chosen]
    made: dict[str, Any] = dict(
        query=normal(t, h, dk).to(dtype),
        key=normalize(normal(t, h, dk), dim=-1).to(dtype),
        value=normal(t, hv, dv).to(dtype),
        log_decay=log_decay,
        beta=1.5 * torch.rand(t, hv, generator=generator, dtype=torch.float32),  # above 1 the delta rule overshoots
        states=normal(b * columns + 3, hv, dv, dk).to(getattr(torch, options.get("states", "float32"))),
        batch=Batch(ends, seq_lens, None, max([0, *queries.tolist()]), max([0, *seq_lens.tolist()])),
        state_indices=slots if options.get("drafts") else slots[:, 0].contiguous(),
        has_initial_state=(seq_lens > queries) != (other & (torch.arange(b) % 3 < 2)),
        scale=options.get("scale", dk**-0.5),
    )
    if options.get("drafts"):
        accepted = torch.randint(1, columns + 1, (b,), generator=generator, dtype=torch.int32)
        made["num_accepted"] = accepted.where(slots[:, 0] != NOWHERE, NOWHERE)
    if "delta" in options or layer == "mamba2":
        made["delta"] = options.get("delta", False)
    return made


def fold(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of the reference and the states after it."""
    states = arguments["states"].clone()
    tables = {name: arguments[name] for name in TABLES if name in arguments}
    plan = recurrent.plan(arguments["batch"], **tables)
    options = RecurrentOptions(arguments["scale"], arguments.get("delta", True))
    tokens = {name: arguments[name] for name in TOKENS[:-1]}
    return {"out": recurrent.attention(**tokens, states=states, plan=plan, options=options), "states": states}


def expected(arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the outputs of the reference in a wider type, and those of its formula in the type of the query."""
    dtype = arguments["query"].dtype
    wide = fold({**arguments, **{name: arguments[name].to(WIDER[dtype]) for name in TOKENS}})
    with computing_in(dtype):
        return wide, fold(arguments)
