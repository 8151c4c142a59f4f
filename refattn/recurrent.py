"""Recurrent layers: the keys of a sequence are folded into one matrix, which every token reads and updates.

Attention keeps every key and value. A recurrent layer keeps one matrix per head, and each token updates it:

    state    <- decay * state                             forget a little of everything
    seen      = state @ key                               the value that the state returns for this key
    state    <- state + beta * (value - seen) key^T       write the difference (the delta rule), or the whole value
    out       = scale * state @ query                     read after the write: a token sees itself

    layer                             decay                    delta   beta        query, key, value
    GDN (Qwen3-Next)                  one per head             yes     sigmoid     normalised to length 1; grouped
    KDA (Kimi Linear)                 one per key channel      yes     sigmoid     as GDN
    Mamba-2 (Nemotron-H, Granite 4)   exp(A dt), per head      no      dt          C, B, x
    lightning (MiniMax-01), RetNet    a constant per head      no      1           any

Where are the keys? In one `dv x dk` matrix per head, whatever the length: a sequence has a slot in a pool, not blocks.
Who may see whom? Token `i` sees token `j <= i`; without the delta rule the weight is `beta_j (q_i . k_j)` times the
decays between them, and with it later keys also overwrite earlier ones. How do partial outputs combine? Consecutive
tokens apply an affine map `state -> state M + N`, and two maps compose, `(N1 M2 + N2, M1 M2)`, as partial outputs of
attention merge by their log-sum-exps (`state_map`, `compose`). There is no softmax, and so no log-sum-exp.

The twin uses the chunked form, the same idea inside 64 tokens: what a token writes depends on what earlier tokens of
the chunk wrote, a triangular system of 64 equations whose solution is linear in the state before the chunk. So a chunk
is a few matrix products, and only the states between chunks are sequential.

Before the layer, `convolve` mixes each channel with its last few inputs, a second state with the same slots.

Source: Yang et al. 2024, "Gated Delta Networks"; Kimi Team 2025, "Kimi Linear"; Dao and Gu 2024, "Transformers are
SSMs"; Qin et al. 2024, "Lightning Attention-2"; Yang et al. 2024, "Parallelizing Linear Transformers with the Delta
Rule over Sequence Length".
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.nn.functional import silu as apply_silu

from refattn.batch import Batch, check_batch
from refattn.modes import compute_dtype, without_autocast
from refattn.options import RecurrentOptions
from refattn.states import StateMap, StatePlan, check_compose, check_convolution, check_recurrent, check_state_map


def plan(
    batch: Batch,
    *,
    state_indices: Int32[Tensor, "b"] | Int32[Tensor, "b c"],
    has_initial_state: Bool[Tensor, "b"] | None = None,
    num_accepted: Int32[Tensor, "b"] | None = None,
    checkpoint_indices: Int32[Tensor, "b m"] | None = None,
    block_size: int | None = None,
) -> StatePlan:
    """Plan a step of all recurrent layers.

    Args:
        batch: the lengths; it needs no block table.
        state_indices: the slot of each sequence; with drafts, the slots of the states after each token. A sequence
            whose first slot is negative is padding.
        has_initial_state: which sequences have a state; others start from zeros. None: the sequences with a context.
        num_accepted: with a slot per token, how many tokens of the previous step were accepted; all 1 if None.
        checkpoint_indices: the slot that saves the state at the end of each block; negative for none.
        block_size: tokens in a block, with `checkpoint_indices`.

    Returns:
        A plan for every layer of this step; `StatePlan` documents the tables.

    Raises:
        ValueError: naming the argument that does not fit; the contents are checked on a CPU.
    """
    check_batch(batch)
    if has_initial_state is None:
        has_initial_state = batch.context_lens > 0
    return StatePlan(batch, state_indices, has_initial_state, num_accepted, checkpoint_indices, block_size)


@without_autocast
def attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions = RecurrentOptions(),
    *,
    out: Float[Tensor, "t hv dv"] | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Fold the new tokens of each sequence into its state, one by one, and read the state after each.

    Args:
        query: query rows of all sequences, one after the other; rows after the last sequence are padding.
        key: the keys. With the delta rule, normalise them to length 1 first, or the state may grow.
        value: the values; `hv` is a multiple of `h`, and `hv // h` consecutive value heads share a query and a key
            head.
        log_decay: natural logarithm of the decay, per head or per key channel: 0 keeps the state, `-inf` clears it.
        beta: how much of a token is written.
        states: the pool, changed in place: any strides, any floating point type. The state is held in float32 (float64
            for float64 input) during the step, and rounded when it is written.
        plan: from `plan`, once per step.
        options: the layer's options.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs, in the type of the query; 0 for padding rows.

    Raises:
        ValueError: naming the argument that does not fit, or shares memory with the pool. Nothing is written then.
    """
    check_recurrent(query, key, value, log_decay, beta, states, plan, options, out)
    dtype, compute = query.dtype, compute_dtype(query.dtype)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    group = value.shape[1] // query.shape[1]
    query, key = (repeat(x.to(compute), "t h dk -> t (h g) dk", g=group) for x in (query, key))
    value, decay, beta = value.to(compute), log_decay.to(compute).exp(), beta.to(compute)

    result = torch.zeros(value.shape, dtype=compute, device=value.device)
    for sequence in _sequences(plan):
        state = _read(states, sequence.start, compute)
        for row, slots in zip(sequence.rows, sequence.kept, strict=True):
            state, _ = _step(state, key[row], value[row], decay[row], beta[row], delta=options.delta)
            result[row] = einsum(state, query[row] * scale, "hv dv dk, hv dk -> hv dv")
            for slot in slots:
                states[slot] = state
    return result.to(dtype) if out is None else out.copy_(result)


def _step(
    state: Float[Tensor, "hv dv dk"],
    key: Float[Tensor, "hv dk"],
    value: Float[Tensor, "hv dv"],
    decay: Float[Tensor, "hv"] | Float[Tensor, "hv dk"],
    beta: Float[Tensor, "hv"],
    *,
    delta: bool,
) -> tuple[Float[Tensor, "hv dv dk"], Float[Tensor, "hv dv"]]:
    """Return the state after one token, and the row that the token wrote into it."""
    state = _fade(state, decay)
    seen = einsum(state, key, "hv dv dk, hv dk -> hv dv") if delta else 0.0
    written = beta[:, None] * (value - seen)
    return _write(state, written, key), written


def _fade(
    state: Float[Tensor, "hv dv dk"], decay: Float[Tensor, "hv"] | Float[Tensor, "hv dk"]
) -> Float[Tensor, "hv dv dk"]:
    """Return a state times its decay, per head or per key channel."""
    return state * (decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])


def _write(
    state: Float[Tensor, "hv dv dk"], written: Float[Tensor, "hv dv"], key: Float[Tensor, "hv dk"]
) -> Float[Tensor, "hv dv dk"]:
    """Return a state into which a row is written under a key."""
    return state + einsum(written, key, "hv dv, hv dk -> hv dv dk")


@without_autocast
def state_map(
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    plan: StatePlan,
    options: RecurrentOptions = RecurrentOptions(),
) -> StateMap:
    """Return the map that the new tokens of each sequence apply to a state, `state -> state @ factor + added`.

        factor    the result for the identity, if all values are 0
        added     the result for zeros

    Args:
        key: the keys, as in `attention`.
        value: the values.
        log_decay: natural logarithm of the decay.
        beta: how much of a token is written.
        plan: from `plan`; only its lengths are used, no slot is read or written.
        options: the layer's options.

    Returns:
        The map of each sequence; the identity for padding and for sequences without new tokens.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_state_map(key, value, log_decay, beta, plan, options)
    compute, (hv, dv), dk = compute_dtype(key.dtype), value.shape[1:], key.shape[-1]
    key = repeat(key.to(compute), "t h dk -> t (h g) dk", g=hv // key.shape[1])
    value, decay, beta = value.to(compute), log_decay.to(compute).exp(), beta.to(compute)
    identity = repeat(torch.eye(dk, dtype=compute, device=key.device), "rows dk -> hv rows dk", hv=hv)
    factors = [identity] * plan.batch.num_seqs
    added = [identity.new_zeros(hv, dv, dk)] * plan.batch.num_seqs
    for sequence in _sequences(plan):
        i = sequence.number
        for row in sequence.rows:
            gates = key[row], decay[row], beta[row]
            factors[i], _ = _step(factors[i], gates[0], key.new_zeros(hv, dk), *gates[1:], delta=options.delta)
            added[i], _ = _step(added[i], gates[0], value[row], *gates[1:], delta=options.delta)
    if not factors:
        return StateMap(identity.new_zeros(0, hv, dk, dk), identity.new_zeros(0, hv, dv, dk))
    return StateMap(torch.stack(factors), torch.stack(added))


@without_autocast
def compose(maps: Sequence[StateMap]) -> StateMap:
    """Compose the maps of consecutive ranges of tokens into one, the counterpart of `merge`.

        state -> state F1 + A1 -> (state F1 + A1) F2 + A2 = state (F1 F2) + (A1 F2 + A2)

    Partial outputs of attention merge in any order; maps do not commute.

    Args:
        maps: the maps in the order of their tokens; at least one.

    Returns:
        The map of all tokens.

    Raises:
        ValueError: if there is no map, or they differ in shape, type or device.
    """
    check_compose(maps)
    factor, added = maps[0]
    for after in maps[1:]:
        factor = einsum(factor, after.factor, "b hv i j, b hv j dk -> b hv i dk")
        added = einsum(added, after.factor, "b hv dv j, b hv j dk -> b hv dv dk") + after.added
    return StateMap(factor, added)


@without_autocast
def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    *,
    bias: Float[Tensor, "c"] | None = None,
    silu: bool = True,
    out: Float[Tensor, "t c"] | None = None,
) -> Float[Tensor, "t c"]:
    """Apply a causal convolution to each channel, then SiLU.

        out[i] = silu(bias + sum over w of weight[:, w] * input[i - (width - 1) + w])

    Args:
        inputs: the channels of all tokens, queries, keys and values concatenated; rows as in `attention`.
        weight: `width` weights per channel, the last one for the token itself.
        states: the last `width - 1` inputs of each slot, oldest first, changed in place: any strides, any floating
            point type. Inputs before a sequence's first token are 0.
        plan: from `plan`, the same as for `attention`.
        bias: added before SiLU.
        silu: apply SiLU to the sum.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs, in the type of the inputs; 0 for padding rows.

    Raises:
        ValueError: naming the argument that does not fit, or shares memory with the pool. Nothing is written then.
    """
    check_convolution(inputs, weight, bias, states, plan, silu, out)
    dtype, compute = inputs.dtype, compute_dtype(inputs.dtype)
    inputs, weight = inputs.to(compute), weight.to(compute)
    result = torch.zeros(inputs.shape, dtype=compute, device=inputs.device)
    for sequence in _sequences(plan):
        last = _read(states, sequence.start, compute)  # [width - 1, c]
        for row, slots in zip(sequence.rows, sequence.kept, strict=True):
            window = torch.cat([last, inputs[row : row + 1]])
            total = einsum(window, weight, "width c, c width -> c")
            total = total if bias is None else total + bias.to(compute)
            result[row] = apply_silu(total) if silu else total
            last = window[1:]
            for slot in slots:
                states[slot] = last
    return result.to(dtype) if out is None else out.copy_(result)


class _Sequence(NamedTuple):
    """A sequence's number and query rows, the slot of its initial state, and the slots written after each row."""

    number: int
    rows: range
    start: int | None
    kept: list[list[int]]


def _sequences(plan: StatePlan) -> Iterator[_Sequence]:
    """Yield the sequences of a step that have new tokens and are not padding."""
    tables = plan.state_indices.tolist(), plan.has_initial_state.tolist(), plan.first_positions.tolist()
    for i, ((q0, q1), slots, has_state, first) in enumerate(zip(plan.batch.query_rows(), *tables, strict=True)):
        if q0 == q1 or (slots[0] if plan.per_draft else slots) < 0:
            continue
        kept: list[list[int]] = [[] for _ in range(q0, q1)]
        if plan.per_draft:
            accepted = 1 if plan.num_accepted is None else int(plan.num_accepted[i])
            start = slots[accepted - 1]
            for token in range(q1 - q0):
                kept[token].append(slots[token])
        else:
            start = slots
            kept[-1].append(slots)
        if plan.checkpoint_indices is not None and plan.block_size is not None:
            for token in range(q1 - q0):
                block, rest = divmod(first + token + 1, plan.block_size)
                if not rest:
                    kept[token].append(int(plan.checkpoint_indices[i, block - 1]))
        kept = [[slot for slot in slots if slot >= 0] for slots in kept]
        yield _Sequence(i, range(q0, q1), start if has_state else None, kept)


def _read(states: Float[Tensor, "n ..."], slot: int | None, dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return a contiguous copy of the state in a slot, whatever the strides of the pool; zeros without a slot."""
    if slot is None:
        return torch.zeros(states.shape[1:], dtype=dtype, device=states.device)
    return states[slot].to(dtype, memory_format=torch.contiguous_format, copy=True)
