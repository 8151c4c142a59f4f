"""11 · What `fastattn` launches for replayed decodes.

The same reads in two launches. What all programs of a head share is computed once by the first: the products of the key
and the query with the keys of the ring, and the decays. The second begins while it runs (programmatic launch), loads
its part of the checkpoint, and reads. Steps of several tokens, and drafts, go through the ring as well.

Gain: the arithmetic that sixteen programs had repeated. Of few sequences it saves nothing: there a decode waits for one
load after the other, and a second launch is one more.

Source: fastattn/kernels/triton/replay.py, `_share_kernel` and `_decode_kernel`; CUDA C++ Programming Guide,
"Programmatic Dependent Launch".
"""

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

import fastattn
from fastattn import replay
from refattn.batch import Batch
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring
from twinattn.course.ladder import check_states


def plan(
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    cursors: Int32[Tensor, "n"],
    ring_size: int,
    max_seq_len: int,
) -> ReplayPlan:
    """Plan a step of decodes, once for all layers."""
    batch, slots = Batch(cu_seqlens_q, seq_lens, None, 1, max_seq_len), dict(state_indices=state_indices)
    return replay.plan(batch, **slots, cursors=cursors, ring_size=ring_size, has_initial_state=has_initial_state)


def attention(
    query: Float[Tensor, "b h dk"],
    key: Float[Tensor, "b h dk"],
    value: Float[Tensor, "b hv dv"],
    log_decay: Float[Tensor, "b hv"],
    beta: Float[Tensor, "b hv"],
    checkpoints: Float[Tensor, "n hv dv dk"],
    ring_key: Float[Tensor, "n l h dk"],
    ring_written: Float[Tensor, "n l hv dv"],
    ring_log_decay: Float[Tensor, "n l hv"],
    cursors: Int32[Tensor, "n"],
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    scale: float | None = None,
    step: ReplayPlan | None = None,
) -> Float[Tensor, "b hv dv"]:
    """Read the state of each sequence after its newest token, and keep the token in a ring or in the checkpoint."""
    tensors, tables = (query, key, value, log_decay, beta, checkpoints), (state_indices, has_initial_state)
    ring = dict(ring_key=ring_key, ring_written=ring_written, ring_log_decay=ring_log_decay, cursors=cursors)
    b, room = check_states(*tensors, None, *tables, **ring).b, ring_key.shape[1]
    if step is None:
        ends = torch.arange(b + 1, dtype=torch.int32, device=query.device)
        step = plan(ends, torch.full_like(ends[1:], 2), *tables, cursors, room, 2)
    with fastattn.use_kernel("triton"):
        ring = Ring(ring_key, ring_written, ring_log_decay)
        return replay.attention(*tensors, ring, step, RecurrentOptions(scale))
