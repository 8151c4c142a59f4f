"""9 · What `fastattn` launches for a step of prompts or of decodes.

Two kinds of steps have kernels of their own. Where no sequence has more than 16 new tokens, the loop of rung 3, token
by token; otherwise the launches of rung 8 for decays per head and per key channel, with and without the delta rule,
with checkpoints at the ends of blocks. By the delta rule with decays per head, the first takes all to be finite, in at
most 128 registers per thread, and one more between both computes chunks again that are not, so that NaN reaches later
tokens and no others. Rounded sums of logarithms are never subtracted there, so a decay of 0 clears a state and leaves
no NaN behind. On Hopper, in bfloat16 with keys of 128, warps of the chain have roles for such layers: four load the
next chunks while four, or eight where there are many sequences, fold these.

Gain: for a decode, what the rungs since 4 had lost, and half as many rows in a program where there are few sequences.
Prompts on Hopper take about a fifth less time than by rung 8. In a trial before the last changes to it (b40fccb8) the
chain alone took three quarters of its time there, of eight prompts two thirds. The launch before took a tenth more,
although four of its programs fit on an SM: logarithms are summed in two parts, and a launch looks for NaN.

Source: fastattn/kernels/triton/recurrent.py, `recurrent`; fastattn/kernels/triton/chunks.py and chunks_hopper.py.
"""

from jaxtyping import Bool, Float, Int32
from torch import Tensor

import fastattn
from fastattn import recurrent
from refattn.batch import Batch
from refattn.options import RecurrentOptions
from refattn.states import StatePlan
from twinattn.course.ladder import check_states


def plan(
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    max_query_len: int,
    max_seq_len: int,
) -> StatePlan:
    """Plan a step, once for all layers."""
    batch = Batch(cu_seqlens_q, seq_lens, None, max_query_len, max_seq_len)
    return recurrent.plan(batch, state_indices=state_indices, has_initial_state=has_initial_state)


def attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    seq_lens: Int32[Tensor, "b"],
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    step: StatePlan | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Fold the new tokens of each sequence into its state, and read the state after each."""
    tensors, tables = (query, key, value, log_decay, beta, states), (state_indices, has_initial_state)
    check_states(*tensors, cu_seqlens_q, *tables)
    step = plan(cu_seqlens_q, seq_lens, *tables, max_query_len, max_seq_len) if step is None else step
    with fastattn.use_kernel("triton"):
        return recurrent.attention(*tensors, step, RecurrentOptions(scale))
