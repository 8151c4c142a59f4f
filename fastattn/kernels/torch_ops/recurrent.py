"""Layers that keep a state in plain torch: long sequences by chunks, short ones token by token, many at once.

In a chunk, with `D[i, j]` for the product of the decays after token j up to token i, and S for the state before the
chunk, token i writes `u[i] = beta[i] (v[i] - (state before token i, decayed) k[i])`:

    u[i] + sum over j < i of beta[i] D[i, j] (k[i] . k[j]) u[j] = beta[i] v[i] - beta[i] (from_start[i] S) k[i]

That is a unit lower triangular system, `(1 + L) u = ...`, which is inverted once for the values and for the keys. The
rest is matrix products:

    out[i]   = (from_start[i] S) q[i] + sum over j <= i of D[i, j] (q[i] . k[j]) u[j]
    S_next   = (all decays) S + sum over j of u[j] (D[last, j] k[j])

Decays are multiplied, and logarithms never subtracted: a gate of 0 has the logarithm `-inf`, and the difference of two
sums with it is NaN; after a saturated gate such a difference has lost its digits. So `D` is a running product. With
decays per channel, `D` would be a matrix for each channel. There, a pair of tokens is split at a token between them,
`D[i, j] = D[i, middle] D[middle, j]`, and each half goes to one factor of a matrix product:

    i in the second half, j in the first     (q[i] D[i, middle]) . (k[j] D[middle, j])      of 2, 4, .. 64 tokens

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (the WY form).
"""

from math import gcd
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import conv1d
from torch.nn.functional import silu as apply_silu

from refattn.options import RecurrentOptions
from refattn.states import StatePlan

CHUNK = 64  # tokens of a chunk, whose triangular system is solved at once
SMALL = 16  # rows of a diagonal block that is inverted by substitution
FEW = 8  # tokens up to which a sequence goes token by token: a chunk would take at least as many products
AT_ONCE = 2**18  # elements of the largest intermediate result: more would not stay in the cache


class _Sequence(NamedTuple):
    """A sequence with new tokens and a slot."""

    number: int  # in the batch
    row: int  # its first query row
    length: int
    position: int  # its first token's position
    start: int  # the slot of its state; -1 without


def recurrent(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions,
    out: Float[Tensor, "t hv dv"] | None,
) -> Float[Tensor, "t hv dv"]:
    """Fold new tokens into states; see `fastattn.dispatch`."""
    compute = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    result = value.new_zeros(value.shape)
    sequences = _sequences(plan)
    tokens = _Tokens(query, key, value, log_decay, beta, compute, scale)
    is_short = [plan.per_draft or sequence.length <= FEW or not tokens.are_finite(sequence) for sequence in sequences]
    for some, run in ((True, _by_token), (False, _by_chunk)):
        chosen = [sequence for sequence, short in zip(sequences, is_short, strict=True) if short is some]
        if chosen:
            run(tokens, states, plan, chosen, options.delta, result)
    return result if out is None else out.copy_(result)


class _Tokens:
    """The tokens of a step, read some rows at a time in the compute type."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        compute: torch.dtype,
        scale: float,
    ) -> None:
        self.tensors = query, key, value, log_decay, beta
        self.compute, self.scale, self.per_channel = compute, scale, log_decay.ndim == 3
        self.group = value.shape[1] // query.shape[1]

    def are_finite(self, sequence: _Sequence) -> bool:
        """Return whether a sequence has no NaN or infinity: in a chunk it would reach earlier tokens, as 0 * NaN."""
        rows = slice(sequence.row, sequence.row + sequence.length)
        query, key, value, log_decay, beta = (x[rows] for x in self.tensors)
        are_finite = all(bool(x.sum(dtype=self.compute).isfinite()) for x in (query, key, value, beta))
        return are_finite and not bool(log_decay.isnan().any())

    def read(self, rows: Int64[Tensor, "..."]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, decays and beta of some rows; a negative row leaves the state unchanged.

        Queries and keys have `h` heads, the others `hv`; the shape of the rows comes first.
        """
        nothing = rows < 0
        some = bool(nothing.any())
        found = []
        for x in self.tensors:
            x = x.index_select(0, rows.clamp(min=0).flatten()).to(self.compute).unflatten(0, rows.shape)
            if some:
                x = x.masked_fill_(nothing[(...,) + (None,) * (x.ndim - rows.ndim)], 0.0)
            found.append(x)
        query, key, value, log_decay, beta = found
        return query.mul_(self.scale), key, value, log_decay.exp_(), beta


def _sequences(plan: StatePlan) -> list[_Sequence]:
    """List the sequences that have new tokens and are no padding, the longest first."""
    found = []
    first = plan.state_indices[:, 0] if plan.per_draft else plan.state_indices
    start = first
    if plan.num_accepted is not None:
        columns = (plan.num_accepted.long() - 1).clamp(0, plan.state_indices.shape[1] - 1)
        start = plan.state_indices.gather(1, columns[:, None])[:, 0]
    start = start.where(plan.has_initial_state, -1)
    tables = first.tolist(), start.tolist(), plan.first_positions.tolist(), plan.batch.query_rows()
    for i, (slot, begin, position, (q0, q1)) in enumerate(zip(*tables, strict=True)):
        if slot >= 0 and q1 > q0:
            found.append(_Sequence(i, q0, q1 - q0, position, begin))
    return sorted(found, key=lambda sequence: -sequence.length)


def _read_states(states: Tensor, sequences: list[_Sequence], compute: torch.dtype) -> Tensor:
    """Return the states before the step, zeros where there are none."""
    known = [i for i, sequence in enumerate(sequences) if sequence.start >= 0]
    found = states.index_select(0, torch.tensor([sequences[i].start for i in known], dtype=torch.int64)).to(compute)
    if len(known) == len(sequences):
        return found.contiguous()
    state = found.new_zeros(len(sequences), *states.shape[1:])
    state[known] = found
    return state


class _Keep:
    """The slots that keep states, by sequence and by the number of its tokens in the state."""

    def __init__(self, plan: StatePlan) -> None:
        self.per_draft, self.block_size = plan.per_draft, plan.block_size
        self.slots = plan.state_indices.tolist()
        self.checkpoints = [] if plan.checkpoint_indices is None else plan.checkpoint_indices.tolist()

    def write(self, states: Tensor, state: Tensor, sequences: list[_Sequence], counts: list[int]) -> None:
        """Write the states of some sequences to the slots that keep them."""
        sources, targets = [], []
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            slots = []
            if self.per_draft:
                slots.append(self.slots[sequence.number][count - 1])
            elif count == sequence.length:
                slots.append(self.slots[sequence.number])
            if self.block_size is not None and (sequence.position + count) % self.block_size == 0:
                slots.append(self.checkpoints[sequence.number][(sequence.position + count) // self.block_size - 1])
            for slot in slots:
                if slot >= 0:
                    sources.append(i)
                    targets.append(slot)
        if targets:
            kept = state if sources == list(range(len(state))) else state[sources]
            states.index_copy_(0, torch.tensor(targets), kept.to(states.dtype))


def _by_token(
    tokens: _Tokens, states: Tensor, plan: StatePlan, sequences: list[_Sequence], delta: bool, result: Tensor
) -> None:
    """Compute the first tokens of all sequences, then the second of those that have one, and so on."""
    state, keep = _read_states(states, sequences, tokens.compute), _Keep(plan)
    for token in range(sequences[0].length):
        sequences = [sequence for sequence in sequences if sequence.length > token]
        rows = torch.tensor([sequence.row + token for sequence in sequences])
        now = state[: len(sequences)]
        answer, _ = _fold(now, *tokens.read(rows), tokens.group, delta)
        result[rows] = answer.to(result.dtype)
        keep.write(states, now, sequences, [token + 1] * len(sequences))


def _fold(
    state: Float[Tensor, "b hv dv dk"],
    query: Float[Tensor, "b h dk"],
    key: Float[Tensor, "b h dk"],
    value: Float[Tensor, "b hv dv"],
    decay: Float[Tensor, "b hv"] | Float[Tensor, "b hv dk"],
    beta: Float[Tensor, "b hv"],
    group: int,
    delta: bool,
) -> tuple[Float[Tensor, "b hv dv"], Float[Tensor, "b hv dv"]]:
    """Fold one token of each sequence into its state, in place; return the outputs, and the rows that were written."""
    query, key = (x.repeat_interleave(group, 1)[..., None] for x in (query, key))  # [b, hv, dk, 1]
    _fade(state, decay)
    new = value[..., None]  # [b, hv, dv, 1]
    new = (new - state @ key if delta else new) * beta[..., None, None]
    _write(state, new, key)
    return (state @ query)[..., 0], new[..., 0]


def _fade(
    state: Float[Tensor, "b hv dv dk"], decay: Float[Tensor, "b hv"] | Float[Tensor, "b hv dk"]
) -> Float[Tensor, "b hv dv dk"]:
    """Multiply states by decays per head or per key channel, in place."""
    return state.mul_(decay[:, :, None, :] if decay.ndim == 3 else decay[:, :, None, None])


def _write(
    state: Float[Tensor, "b hv dv dk"], written: Float[Tensor, "b hv dv 1"], key: Float[Tensor, "b hv dk 1"]
) -> None:
    """Write a row under a key into each state, in place."""
    state.flatten(0, 1).baddbmm_(written.flatten(0, 1), key.mT.flatten(0, 1))


def _by_chunk(
    tokens: _Tokens, states: Tensor, plan: StatePlan, sequences: list[_Sequence], delta: bool, result: Tensor
) -> None:
    """Compute the first chunks of all sequences, then the second; intra-chunk terms of many chunks come at once.

    Chunks begin at multiples of their size in the sequence, so that each block ends with a chunk.
    """
    size = CHUNK if plan.block_size is None else gcd(CHUNK, plan.block_size)
    sequences = sorted(sequences, key=lambda sequence: -_num_chunks(sequence, size))
    state, keep = _read_states(states, sequences, tokens.compute), _Keep(plan)
    steps = [
        [sequence for sequence in sequences if _num_chunks(sequence, size) > chunk]
        for chunk in range(_num_chunks(sequences[0], size))
    ]
    heads, (dv, dk) = states.shape[1], states.shape[2:]
    per_chunk = heads * size * max(size, dv + dk)
    offsets = torch.arange(size)
    chunk = 0
    while chunk < len(steps):
        group: list[list[_Sequence]] = []
        total = 0
        while chunk + len(group) < len(steps) and (not group or total * per_chunk <= AT_ONCE):
            group.append(steps[chunk + len(group)])
            total += len(group[-1])
        rows = torch.cat([_rows(active, chunk + i, size, offsets) for i, active in enumerate(group)])
        local, first = _solve(tokens, rows, delta), 0
        for i, active in enumerate(group):
            part = slice(first, first + len(active))
            now = state[: len(active)]
            answers = local.advance(now, part)
            real = rows[part] >= 0
            result[rows[part][real]] = answers.transpose(1, 2)[real].to(result.dtype)
            ends = [min((chunk + i + 1) * size - sequence.position % size, sequence.length) for sequence in active]
            keep.write(states, now, active, ends)
            first += len(active)
        chunk += len(group)


def _num_chunks(sequence: _Sequence, size: int) -> int:
    return -(-(sequence.position % size + sequence.length) // size)


def _rows(sequences: list[_Sequence], chunk: int, size: int, offsets: Tensor) -> Int64[Tensor, "b size"]:
    """Return the query row of each token of a chunk, -1 for tokens before a sequence's first or after its last."""
    first = torch.tensor([chunk * size - sequence.position % size for sequence in sequences])
    begin, length = (torch.tensor([sequence[k] for sequence in sequences]) for k in (1, 2))
    token = first[:, None] + offsets
    return (begin[:, None] + token).where((token >= 0) & (token < length[:, None]), -1)


class _Local(NamedTuple):
    """The intra-chunk terms, which need no state, of `x` chunks of `c` tokens.

    Attributes:
        written: what each token writes if the state before the chunk is zero.
        answered: its product with the state before the chunk is subtracted from `written`; None without the delta rule.
        read: queries times the decays since the start of the chunk.
        weights: weights of each token on itself and earlier tokens.
        kept: keys times the decays up to the end of the chunk.
        decay: all decays of the chunk.
    """

    written: Float[Tensor, "x hv c dv"]
    answered: Float[Tensor, "x hv c dk"] | None
    read: Float[Tensor, "x hv c dk"]
    weights: Float[Tensor, "x hv c c"]
    kept: Float[Tensor, "x hv c dk"]
    decay: Float[Tensor, "x hv 1 _"]

    def advance(self, state: Float[Tensor, "b hv dv dk"], part: slice) -> Float[Tensor, "b hv c dv"]:
        """Return the outputs of some chunks, and advance their states in place."""
        written = self.written[part]
        if self.answered is not None:
            written = written - self.answered[part] @ state.mT
        out = self.read[part] @ state.mT
        out += self.weights[part] @ written
        state.mul_(self.decay[part]).add_(written.mT @ self.kept[part])
        return out


def _solve(tokens: _Tokens, rows: Int64[Tensor, "x c"], delta: bool) -> _Local:
    """Compute the intra-chunk terms."""
    query, key, value, decay, beta = (x.transpose(1, 2) for x in tokens.read(rows))  # [x, heads, c, ..]
    group, length = tokens.group, rows.shape[1]
    beta = beta[..., None]
    if tokens.per_channel:
        query, key = (x.repeat_interleave(group, 1) for x in (query, key))
        (weights, *answers), from_start, to_end = _halves((query, key)[: 1 + delta], key, decay)
    else:
        query, key = query.contiguous(), key.contiguous()
        before = torch.ones(length, length, dtype=torch.bool).tril(-1)
        between = decay[..., None].where(before, 1.0).cumprod(2).tril_()  # [x, hv, c, c]: D
        weights, *answers = ((x @ key.mT).repeat_interleave(group, 1).mul_(between) for x in (query, key)[: 1 + delta])
        query, key = (x.repeat_interleave(group, 1) for x in (query, key))
        from_start, to_end = decay.cumprod(2)[..., None], between[:, :, -1, :, None]
    total = from_start[:, :, -1:]
    read, kept, value = query * from_start, key * to_end, value * beta
    if not answers:
        return _Local(value, None, read, weights, kept, total)
    (system,) = (x.mul_(beta) for x in answers)
    right = torch.cat([value, key * from_start * beta], dim=-1)
    written, answered = (_inverse(system) @ right).split([value.shape[-1], key.shape[-1]], dim=-1)
    return _Local(written, answered, read, weights, kept, total)


def _inverse(system: Float[Tensor, "x hv c c"]) -> Float[Tensor, "x hv c c"]:
    """Return the inverse of `1 + L`, L strictly lower triangular: of blocks of 16 rows, then of twice as many.

        (A    )^-1   ( A^-1              )
        (C   B)    = (-B^-1 C A^-1   B^-1)

    Substitution goes row by row; joining blocks takes matrix products.
    """
    length = system.shape[-1]
    inverse = torch.zeros_like(system)
    size = min(SMALL, length)
    smallest = _diagonal_blocks(system, size).movedim(-1, 2)  # [x, hv, blocks, size, size]
    identity = torch.eye(size, dtype=system.dtype).expand_as(smallest)
    solved = torch.linalg.solve_triangular(smallest, identity, upper=False, unitriangular=True)
    _diagonal_blocks(inverse, size).copy_(solved.movedim(2, -1))
    while size < length:
        below = _diagonal_blocks(system, 2 * size)[:, :, size:, :size].movedim(-1, 2)
        first, second = solved[:, :, ::2], solved[:, :, 1::2]
        blocks = _diagonal_blocks(inverse, 2 * size)
        blocks[:, :, size:, :size] = (second @ below @ first).neg_().movedim(2, -1)
        size *= 2
        solved = blocks.movedim(-1, 2)
    return inverse


def _diagonal_blocks(matrix: Float[Tensor, "x hv c c"], size: int) -> Float[Tensor, "x hv size size n"]:
    """Return a view of the blocks on the diagonal."""
    chunks, heads, length, _ = matrix.shape
    blocks = matrix.view(chunks, heads, length // size, size, length // size, size)
    return blocks.diagonal(dim1=2, dim2=4)


def _halves(
    lefts: tuple[Float[Tensor, "x hv c dk"], ...], right: Float[Tensor, "x hv c dk"], decay: Float[Tensor, "x hv c dk"]
) -> tuple[list[Float[Tensor, "x hv c c"]], Float[Tensor, "x hv c dk"], Float[Tensor, "x hv c dk"]]:
    """Return `sum over d of left[i, d] right[j, d] D[i, j, d]` for j <= i and 0 for others, of each left factor.

    Also return the products of the decays since the start of the chunk, and after each token. Blocks of one token are
    joined to blocks of two, of four and so on; the number of tokens is a power of two.
    """
    chunks, heads, length, _ = right.shape
    since, after = decay.clone(), torch.ones_like(decay)
    all_weights = [torch.diag_embed((left * right).sum(-1)) for left in lefts]
    half = 1
    while half < length:
        split = (chunks, heads, length // (2 * half), 2, half, -1)
        since_1, since_2 = since.view(split).unbind(3)
        after_1, after_2 = after.view(split).unbind(3)
        late = (right.view(split)[:, :, :, 0] * after_1).mT
        for left, weights in zip(lefts, all_weights, strict=True):
            blocks = _diagonal_blocks(weights, 2 * half)[:, :, half:, :half]
            blocks.copy_(((left.view(split)[:, :, :, 1] * since_2) @ late).movedim(2, -1))
        after_1 *= since_2[..., -1:, :]
        since_2 *= since_1[..., -1:, :]
        half *= 2
    return all_weights, since, after


def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    bias: Float[Tensor, "c"] | None,
    silu: bool,
    out: Float[Tensor, "t c"] | None,
) -> Float[Tensor, "t c"]:
    """Convolve each channel with its last inputs; see `fastattn.dispatch`.

    States and new inputs of all sequences are concatenated for one convolution.
    """
    compute = torch.promote_types(inputs.dtype, torch.float32)
    result = inputs.new_zeros(inputs.shape)
    sequences, width = _sequences(plan), weight.shape[1]
    if not sequences:
        return result if out is None else out.zero_()
    last, keep = _read_states(states, sequences, compute), _Keep(plan)
    pieces, rows, kept = [], [], []
    for i, sequence in enumerate(sequences):
        own = slice(sequence.row, sequence.row + sequence.length)
        pieces += [last[i], inputs[own].to(compute)]
        rows.append(torch.arange(own.start, own.stop))
    joined = torch.cat(pieces)  # [sum of w + tokens, c]
    if bias is not None:
        bias = bias.to(compute)
    mixed = conv1d(joined.T[None], weight.to(compute)[:, None], bias, groups=weight.shape[0])[0].T
    mixed = apply_silu(mixed) if silu else mixed
    first = 0
    for sequence, places in zip(sequences, rows, strict=True):
        result[places] = mixed[first : first + sequence.length].to(result.dtype)
        for count in range(1, sequence.length + 1):
            ends_block = plan.block_size is not None and (sequence.position + count) % plan.block_size == 0
            if plan.per_draft or ends_block or count == sequence.length:
                kept.append((sequence, count, first + count))
        first += width - 1 + sequence.length
    windows = torch.stack([joined[end : end + width - 1] for _, _, end in kept])
    keep.write(states, windows, [sequence for sequence, _, _ in kept], [count for _, count, _ in kept])
    return result if out is None else out.copy_(result)
