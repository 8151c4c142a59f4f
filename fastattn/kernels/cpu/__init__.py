"""The CPU kernel: ATen's FlashAttention, called on pieces of a batch that it can compute."""

from collections.abc import Sequence

from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from fastattn.kernels.cpu import attention, pairs
from fastattn.kernels.cpu import quantized as over_codes
from fastattn.kernels.problem import Problem, Subtraction
from refattn.interface import AttentionOptions, Fp8Scales, Int8Scales, Plan, TreePlan

OPERATIONS = (
    *("dense", "paged", "tree", "differential", "mla", "mla_tree"),
    *("quantized", "quantized_levels", "quantized_tree", "write_quantized"),
)


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None: almost everything that is on a CPU."""
    if problem.device.type != "cpu":
        return f"computes on the CPU, the tensors are on {problem.device.type}"
    if problem.operation == "differential" and problem.positions:
        return "subtracts the answers of query rows that are the last of their sequences, at no other positions"
    return None


def dense(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; see `fastattn.kernels.dispatch`."""
    return attention.dense(query, key, value, plan, options)


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; see `fastattn.kernels.dispatch`."""
    return attention.paged(query, key_cache, value_cache, plan, options)


def tree(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: TreePlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages that end with a tree; see `fastattn.kernels.dispatch`."""
    return attention.tree(query, key_cache, value_cache, plan, options)


def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    subtraction: Subtraction,
    out: Float[Tensor, "t h d"] | None,
) -> tuple[Float[Tensor, "t half_h 2*d"], Float[Tensor, "t h"]]:
    """Attend twice over pages and subtract; see `fastattn.kernels.dispatch`."""
    return pairs.differential(query, cache, plan, options, subtraction)


def mla(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: Plan,
    options: AttentionOptions,
    latent_rank: int,
    out: Float[Tensor, "t h {latent_rank}"] | None,
    scales: Fp8Scales | None = None,
) -> tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend to latents; see `fastattn.kernels.dispatch`.

    Values are the keys, so that they are gathered once and of one size; what their rotary part adds is cut off.
    """
    pages = cache[:, :, None, : query.shape[2]]
    if scales is None:
        answer, lse = attention.paged(query, pages, pages, plan, options)
    else:
        answer, lse = over_codes.attention(query, pages, pages, [plan], options, scales)
    return answer[..., :latent_rank].contiguous(), lse


def mla_tree(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: TreePlan,
    options: AttentionOptions,
    latent_rank: int,
    out: Float[Tensor, "t h {latent_rank}"] | None,
    scales: Fp8Scales | None = None,
) -> tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend to latents that end with a tree, with keys as values; see `fastattn.kernels.dispatch`."""
    pages = cache[:, :, None, : query.shape[2]]
    if scales is None:
        answer, lse = attention.tree(query, pages, pages, plan, options)
    else:
        answer, lse = over_codes.attention(query, pages, pages, [plan.whole], options, scales, tree=plan)
    return answer[..., :latent_rank].contiguous(), lse


def quantized(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    scales: Fp8Scales | Int8Scales,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over quantised pages; see `fastattn.kernels.dispatch`."""
    return over_codes.attention(query, key_cache, value_cache, [plan], options, scales)


def quantized_levels(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plans: Sequence[Plan],
    options: AttentionOptions,
    scales: Fp8Scales | Int8Scales,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over the quantised pages of several levels, merged; see `fastattn.kernels.dispatch`."""
    return over_codes.attention(query, key_cache, value_cache, plans, options, scales)


def quantized_tree(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: TreePlan,
    options: AttentionOptions,
    scales: Fp8Scales | Int8Scales,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over quantised pages that end with a tree; see `fastattn.kernels.dispatch`."""
    return over_codes.attention(query, key_cache, value_cache, [plan.whole], options, scales, tree=plan)


def write_quantized(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantise new tokens and write them into the pool; see `fastattn.quantized.write`."""
    over_codes.write(key, value, key_cache, value_cache, slot_mapping, scales)
