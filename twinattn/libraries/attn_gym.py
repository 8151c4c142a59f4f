"""attention-gym: the package `attn-gym`. Recurrent layers over slots, and attention to a window and to selected keys.

Of states slot 0 is padding, as every index that is not positive. States are `[n, hv, dv, dk]`, and change in place; a
call returns the outputs `[t, hv, dv]`.

Its `gather_attn` has one softmax over a window, selected keys and a sink. It knows no pages: its window is over rows of
the new tokens, so a decode has to list the slots of its window with the others.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from twinattn.libraries import Call, missing


def available() -> str | None:
    """Return why it cannot be used."""
    return missing("attn_gym.linear")


def cannot_gather() -> str | None:
    """Return why `gather_attn` cannot be used."""
    return missing("attn_gym.sparse")


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    state_indices: Tensor,
    cu_seqlens_q: Tensor,
    has_initial_state: Tensor,
    scale: float | None = None,
    *,
    layer: str = "gdn",
    form: str = "chunk",
) -> Call:
    """Prepare one of its kernels over slots.

    Args:
        query: `[t, h, dk]`.
        key: `[t, h, dk]`.
        value: `[t, hv, dv]`.
        log_decay: `[t, hv]`, of "kda" `[t, hv, dk]`.
        beta: `[t, hv]`.
        states: the pool.
        state_indices: the slot of each sequence, `[b]`.
        cu_seqlens_q: where sequences begin, `[b + 1]`.
        has_initial_state: which have a state, `[b]`.
        scale: `dk ** -0.5` if None.
        layer: "gdn" or "kda".
        form: "chunk" for prompts, or "recurrent", token by token.

    Raises:
        NotImplementedError: for another scale, of the chunks of "kda".
    """
    module: Any = importlib.import_module(f"attn_gym.linear.{layer}")
    rows = [x[None] for x in (query, key, value, log_decay, beta)]
    options: dict[str, Any] = dict(cu_seqlens=cu_seqlens_q, has_initial_state=has_initial_state)
    if form == "recurrent":
        step = getattr(module, f"recurrent_{layer}")
        options |= dict(scale=scale, state_indices=state_indices)
        return lambda: step(*rows, states, **options)[0][0]
    if layer == "kda" and scale not in (None, query.shape[-1] ** -0.5):
        raise NotImplementedError("paged_chunk_kda has no scale")
    if layer == "gdn":
        options["scale"] = scale
    chunks = getattr(module, f"paged_chunk_{layer}")
    return lambda: chunks(*rows, states, state_indices, **options)[0]


def prepare_decode(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, state_indices: Tensor
) -> Call:
    """Prepare its decode of one token each, which makes the gates, and the lengths of 1 of queries and keys, itself."""
    module: Any = importlib.import_module("attn_gym.linear.gdn")
    packed = torch.cat([x.flatten(1) for x in (query, key, value)], 1)
    gate = (-log_decay).clamp_min(1e-30).expm1().log()[None]  # its softplus is the decay
    zeros = torch.zeros(value.shape[1], device=states.device)
    raw = gate, beta.logit()[None], zeros, zeros.clone()
    return lambda: module.recurrent_gdn_decode(packed, *raw, states, state_indices)[0]


def prepare_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    before: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    *,
    layer: str = "gdn",
    form: str = "recurrent",
) -> Call:
    """Prepare its functions in PyTorch, which run on a CPU.

    They know no slots: `before` has the states before the step `[b, hv, dv, dk]`, and the call returns those after it,
    too.
    """
    function = getattr(importlib.import_module(f"attn_gym.linear.{layer}"), f"{form}_{layer}")
    rows = [x[None] for x in (query, key, value, log_decay, beta)]

    def call() -> tuple[Tensor, Tensor]:
        options = dict(cu_seqlens=cu_seqlens_q, scale=scale, output_final_state=True, impl="reference")
        out, after = function(*rows, before, **options)
        return out[0], after

    return call


def prepare_gather(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    *,
    impl: str = "fused",
) -> Call:
    """Prepare `gather_attn` over one list of slots per query `[t, k]`, -1 for none, in a pool of rows `[n, d]`.

    Its window has no token. `impl="reference"` runs on a CPU.
    """
    rows = query.transpose(0, 1)[None].contiguous()
    local = query.new_zeros(1, 1, len(query), query.shape[2])
    lists = dict(sliding_window_size=0, impl=impl, scale=softmax_scale)
    return _gather(rows, local, pool[None, None], slots[None], sinks, lists, return_lse)


def prepare_window(
    query: Tensor,
    key: Tensor,
    entries: Tensor,
    lists: Tensor,
    cu_seqlens_q: Tensor,
    cu_entries: Tensor,
    window: int,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    *,
    impl: str = "fused",
) -> Call:
    """Prepare `gather_attn` over whole prompts: a window over the rows of their keys, and a list of entries each.

    Args:
        query: `[t, h, d]`.
        key: `[t, d]`, keys that are their values.
        entries: `[e, d]`, those of one sequence after the other.
        lists: `[t, k]`, entries of its sequence for each query, -1 for none.
        cu_seqlens_q: where sequences begin, `[b + 1]`.
        cu_entries: where their entries begin, `[b + 1]`.
        window: tokens of the window, the query's own included.
        sinks: `[h]`.
        softmax_scale: `d ** -0.5` if None.
        return_lse: whether to return the log-sum-exp.
        impl: "fused", or "reference", which runs on a CPU.
    """
    rows, options = (
        query.transpose(0, 1)[None].contiguous(),
        dict(sliding_window_size=window, impl=impl, scale=softmax_scale),
    )
    options |= dict(cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_entries)
    return _gather(rows, key[None, None], entries[None, None], lists[None], sinks, options, return_lse)


def _gather(
    query: Tensor,
    local: Tensor,
    entries: Tensor,
    lists: Tensor,
    sinks: Tensor | None,
    options: dict[str, Any],
    return_lse: bool,
) -> Call:
    module: Any = importlib.import_module("attn_gym.sparse")
    if not return_lse:
        return lambda: module.gather_attn(query, local, entries, lists, sinks, **options)

    def both() -> tuple[Tensor, Tensor]:
        asked = module.AuxRequest(lse=True)
        out, aux = module.gather_attn(query, local, entries, lists, sinks, return_aux=asked, **options)
        return out[0].transpose(0, 1), aux.lse[0].T

    return both
