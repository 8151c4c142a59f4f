"""FlashQLA: prompts under the gated delta rule, Qwen's kernels in TileLang from the wheel `flash-qla`.

It takes queries, keys and values of 128 elements and a decay per head, by chunks of 64 tokens. Where sequences and
heads are too few for the GPU, it divides sequences into parts: what each part adds to a state, and how it maps one, is
computed first, then the state before every part, and then all parts at once. States between parts are in the type of
the keys. Where the decays of a part leave less than `exp(-10)` of the state before it, that state is left out.

What it does not support is added here:

    slots           the states of a step are gathered, zeros for new sequences, and written back; no other slot is read
    lengths         it reads them on the host, which waits for the GPU and can't be captured. A launch makes its tables
                    instead, with room for as many chunks and parts as there may be; the plan stores them
    padding         rows that no sequence has are 0
    decays of 0     it subtracts sums of logarithms, and `-inf - -inf` is NaN, so no logarithm is less than -30
    a scale of 0    which it takes for the default
    strides         it reads contiguous tensors, so others are copied

Source: The Qwen team 2026, "FlashQLA"; github.com/QwenLM/FlashQLA.
"""

import importlib
from functools import cache, lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.device import cannot_import, capability, num_sms
from fastattn.kernels.kernel import BATCH, Kernel, fields_of
from fastattn.kernels.problem import Problem
from fastattn.kernels.schedule import schedule_of
from refattn.options import RecurrentOptions
from refattn.states import StatePlan

PACKAGE = "flash-qla"
CONTEXT = "flash_qla.ops.gated_delta_rule.chunk.cp"  # how sequences are divided into parts
DECISION = f"{CONTEXT}.autocp"  # whether they should be
SIZE = 128  # elements of a key, and of a value
CHUNK = 64  # tokens
LEAST_LOG_DECAY = -30.0  # such a token leaves 1e-13 of the state before it


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel can't compute a problem, or None."""
    if problem.device.type != "cuda":
        return f"computes on CUDA, the tensors are on {problem.device.type}"
    major, minor = capability(problem.device)
    if (major, minor) != (9, 0):
        return f"needs a GPU of compute capability 9.0, not {major}.{minor}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, not {problem.dtype}"
    if (problem.head_size, problem.value_head_size) != (SIZE, SIZE):
        return f"keys and values of {SIZE} elements, not {problem.head_size} and {problem.value_head_size}"
    if problem.per_channel:
        return "has a decay per head, and none per key channel: take triton"
    if "RecurrentOptions.delta" in problem.asks:
        return "computes the delta rule, and no layer that writes whole values: take triton"
    if problem.per_draft or "StatePlan.num_accepted" in problem.asks:
        return "keeps one state per sequence, and none per draft: take triton"
    if "StatePlan.checkpoint_indices" in problem.asks:
        return "keeps no states where blocks end: take triton"
    return _cannot_load()


def recurrent(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions,
    out: Float[Tensor, "t hv dv"] | None,
) -> Float[Tensor, "t hv dv"]:
    """Fold new tokens into states; see `fastattn.dispatch`."""
    from fastattn.kernels.flash.states import gather_states, scatter_states

    if not len(query) or not plan.batch.num_seqs:
        return torch.zeros_like(value) if out is None else out.zero_()
    scale = query.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    num_tokens, num_heads = value.shape[:2]
    name = ("flash_qla", num_tokens, num_heads)
    result, after = _forward(
        *(_compact(x)[None] for x in (query, key, value)),
        log_decay.float().clamp(min=LEAST_LOG_DECAY).contiguous()[None],
        _compact(beta.float() if beta.dtype == torch.float64 else beta)[None],
        scale=scale or 1.0,
        initial_state=gather_states(states, plan, num_tokens),
        cp_context=schedule_of(plan, name, partial(_context_of, plan, num_tokens, num_heads)),
    )
    if scale == 0:
        result.mul_(0.0)
    scatter_states(after, states, result, plan)
    return result if out is None else out.copy_(result)


def _forward(*tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Call its forward pass, and return the outputs and the states after the step."""
    module = importlib.import_module("flash_qla")
    _, _, result, _, after, _ = module.chunk_gated_delta_rule_fwd(
        *tokens, output_final_state=True, state_v_first=True, **options
    )
    return result[0], after


def _compact(x: Tensor) -> Tensor:
    """Return elements without gaps that begin at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _context_of(plan: StatePlan, num_tokens: int, num_heads: int) -> Any:
    """Return the lengths of a step, and how its sequences are divided into parts, as it takes both."""
    from fastattn.kernels.flash.states import lengths_of

    batch = plan.batch
    longest = min(batch.max_query_len, num_tokens)
    chunks = _chunks_in_part(longest, num_tokens, batch.num_seqs, num_heads, num_sms(batch.device))
    part = chunks * CHUNK if chunks else max(num_tokens, 1)
    lengths = lengths_of(batch.cu_seqlens_q, num_tokens, chunk=CHUNK, part=part)
    for ends in (lengths.cu_seqlens, lengths.cu_parts):
        # Where it finds chunks that were prepared. Their offsets say where states after chunks are stored: none is.
        prepared = (CHUNK, ends.view(-1), len(lengths.chunks), lengths.chunks)
        ends._flash_qla_prepared_varlen = prepared  # type: ignore[attr-defined]
    kind = importlib.import_module(CONTEXT).FlashQLACPContext
    if not chunks:
        return kind(cu_seqlens=lengths.cu_seqlens)
    return kind(
        is_intra=True,
        cu_seqlens=lengths.cu_seqlens,
        intra_cp_cu_seqlens=lengths.cu_parts,
        seq_map_r2c=lengths.first_parts,
        seq_map_c2r=lengths.sequences,
        ht_mask=lengths.is_last,
    )


@lru_cache(maxsize=4096)
def _chunks_in_part(longest: int, num_tokens: int, num_seqs: int, num_heads: int, sms: int) -> int:
    """Return how many chunks FlashQLA's own rule gives a part; 0 for sequences that are not divided.

    The rule takes all lengths. The host knows the longest one, and divides the other tokens evenly; a wrong length
    costs time and does not change the output.
    """
    others = num_seqs - 1
    even = -(-(num_tokens - longest) // others) if others else 0
    chunks = [max(1, -(-length // CHUNK)) for length in (longest, *[min(even, longest)] * others)]
    decide = importlib.import_module(DECISION).decide
    divided, size = decide(num_chunks=chunks, num_v_heads=num_heads, P=sms, chunk=CHUNK, is_train=False)
    return int(size) if divided else 0


@cache
def _cannot_load() -> str | None:
    """Return why FlashQLA can't be loaded, or None once it is."""
    for module, names in (
        ("flash_qla", ("chunk_gated_delta_rule_fwd",)),
        (CONTEXT, ("FlashQLACPContext",)),
        (DECISION, ("decide",)),
    ):
        try:
            reason = cannot_import(module, PACKAGE, *names)
        except (AttributeError, RuntimeError, ValueError) as error:  # it looks at the GPU while it is imported
            reason = f"the package {PACKAGE} can't be imported: {error}"
        if reason is not None:
            return reason
    return None


KERNEL = Kernel(
    "flash_qla",
    unsupported_reason,
    attends=(),
    functions={"recurrent": f"{__name__}:recurrent"},
    knows=BATCH
    | fields_of(StatePlan, "batch", "state_indices", "has_initial_state", "num_accepted", "checkpoint_indices")
    | fields_of(StatePlan, "block_size")
    | fields_of(RecurrentOptions, "scale", "delta"),
)
