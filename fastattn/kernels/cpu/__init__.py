"""The CPU kernel: ATen's FlashAttention, called on pieces of a batch that it can compute."""

from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.cpu import attention, four_bits
from fastattn.kernels.cpu import quantized as over_quantized
from fastattn.kernels.kernel import ALL_OPTIONS, LATENTS, LEVELS, OWN_NORM, PACKED, PAGES, PLAN, QUANTIZED, TREE, Kernel
from fastattn.kernels.problem import Problem, latent_scales
from fastattn.kernels.replay import Run
from refattn.four_bits import Int4Pages, Nvfp4Pages
from refattn.keys import Keys, Latents, PackedLatents, Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan, TreePlan


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None: it computes nearly everything on a CPU."""
    if problem.device.type != "cpu":
        return f"computes on the CPU, the tensors are on {problem.device.type}"
    if problem.operation == "differential" and problem.positions:
        return "subtracts the answers of query rows that are the last of their sequences, at no other positions"
    if problem.operation == "differential" and problem.intervals:
        return "subtracts under causal masks and windows, and under no interval of keys for each query"
    return None


KERNEL = Kernel(
    "cpu",
    unsupported_reason,
    attends=("rows", "pages", "quantized", "int4", "nvfp4", "latents", "packed"),
    trees=("pages", "quantized", "int4", "nvfp4", "latents", "packed"),
    levels=("quantized", "int4", "nvfp4"),
    knows=ALL_OPTIONS | OWN_NORM | PLAN | LEVELS | TREE | PAGES | QUANTIZED | LATENTS | PACKED,
    functions={
        "attend": f"{__name__}:attend",
        "bind_attend": f"{__name__}:bind_attend",
        "differential": f"{__name__}.differential:differential",
        "write_quantized": f"{__name__}.quantized:write",
    },
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to any storage, to quantized pages in several levels, too; see `fastattn.dispatch`.

    Latents are gathered once, as keys and as values of the same size; the rotary columns of the output are cut off.
    """
    scales: Fp8Scales | Int8Scales | None = None
    if isinstance(keys, PackedLatents):
        return over_quantized.packed(query, keys, plan, options)
    if isinstance(keys, Int4Pages | Nvfp4Pages):
        return four_bits.attention(query, keys, plan, options)
    if isinstance(keys, Latents):
        key = value = keys.cache[:, :, None, : query.shape[2]]
        scales = latent_scales(keys.cache, keys.cache_scale, keys.query_scale)
    elif isinstance(keys, QuantizedPages):
        key, value, scales = keys
    else:
        key, value = keys
    if scales is not None:
        answer, lse = over_quantized.attention(query, key, value, plan, options, scales)
    elif isinstance(plan, TreePlan):
        answer, lse = attention.tree(query, key, value, plan, options)
    else:
        (level,) = plan.levels
        over = attention.varlen if isinstance(keys, Rows) else attention.paged
        answer, lse = over(query, key, value, level.own, options)
    return (answer[..., : keys.latent_rank].contiguous() if isinstance(keys, Latents) else answer), lse


def bind_attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
    return_lse: bool,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"], Run]:
    """Attend, and return the replay: for decodes over pages it may be a single call of ATen."""
    answer, lse = attend(query, keys, plan, options, out)
    again: Run | None = None
    if isinstance(keys, Pages) and isinstance(plan, Plan):
        again = attention.replay_of_decodes(query, *keys, plan, options, return_lse)
    return answer, lse, again or attend
