"""FlashMLA: attention over latents on Hopper, DeepSeek's kernels from the wheel `sgl-flash-mla`.

It takes a rectangle of queries (the same number of new tokens for every sequence) over pages of 64 tokens, for latents
of 512 elements and rotary keys of 64. A tile is 64 rows of `tokens x heads`. The keys are split over all
multiprocessors by a schedule, which a separate kernel computes from the lengths; the plan keeps it for the whole step.

It loads whole pages and gives what lies past a sequence's end a weight of 0; NaN that results from it is repaired. It
drops a split whose scores are NaN, so NaN in a latent reaches the output only if the sequence is not split. Of a
sequence that ends with a drafted tree it reads the latents before the tree.

Source: DeepSeek-AI 2025, "FlashMLA"; github.com/deepseek-ai/FlashMLA.
"""

import importlib
from functools import cache

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fastattn.kernels.device import cannot_import, capability
from fastattn.kernels.flash import NO_CODES, NO_INTERVALS, NO_POSITIONS, NOT_ALIGNED, side_by_side
from fastattn.kernels.flash.schedule import schedule_of
from fastattn.kernels.kernel import Kernel
from fastattn.kernels.problem import Problem
from refattn.interface import AttentionOptions, AttentionPlan, Keys, Latents, Plan, TreePlan

INTERFACE = "flash_mla.flash_mla_interface"
PACKAGE = "sgl-flash-mla"
LATENT = (64, 512)  # sizes of rotary keys and of latents
BLOCK_SIZE = 64  # tokens in a page


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel can't compute a problem, or None."""
    if problem.device.type != "cuda":
        return f"computes on CUDA, the tensors are on {problem.device.type}"
    major, minor = capability(problem.device)
    if (major, minor) != (9, 0):
        return f"needs a GPU of compute capability 9.0, not {major}.{minor}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, not {problem.dtype}"
    if problem.stored is not None:
        return NO_CODES
    sizes = (problem.head_size - problem.value_head_size, problem.value_head_size)
    if sizes != LATENT:
        return f"latents of {LATENT[1]} elements and rotary keys of {LATENT[0]}, not {sizes[1]} and {sizes[0]}"
    if problem.block_size != BLOCK_SIZE:
        return f"pages of {BLOCK_SIZE} tokens, not {problem.block_size}: take fa3 or triton"
    if problem.softcap or problem.alibi:
        return f"has no {'softcap' if problem.softcap else 'ALiBi'}: take triton"
    if problem.window not in ((-1, -1), (-1, 0)):
        return f"has no windows, not even {problem.window}"
    if problem.positions:
        return NO_POSITIONS
    if problem.intervals:
        return NO_INTERVALS
    if problem.batch_invariant:
        return "splits the keys of a sequence by the lengths of all: take triton"
    if not problem.uniform:
        return "takes as many new tokens of every sequence, known on the host (`num_tokens`): take fa3 or triton"
    if not problem.aligned:
        return NOT_ALIGNED
    return _cannot_load()


KERNEL = Kernel(
    "flash_mla",
    unsupported_reason,
    attends=("latents",),
    trees=("latents",),
    functions={"attend": f"{__name__}:attend"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to latents, before a tree and by a launch of ours to its nodes; see `fastattn.kernels.dispatch`."""
    assert isinstance(keys, Latents)  # of no other storage are its operations
    (level,) = plan.levels
    if isinstance(plan, TreePlan):
        return mla_tree(query, keys.cache, plan, options, keys.latent_rank, out)
    return mla(query, keys.cache, level.whole, options, keys.latent_rank, out)


def mla(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: Plan,
    options: AttentionOptions,
    latent_rank: int,
    out: Float[Tensor, "t h {latent_rank}"] | None,
) -> tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend to latents; see `fastattn.kernels.dispatch`."""
    from fastattn.kernels.gpu.adapt import adapt, empty_answer
    from fastattn.kernels.gpu.repair import repair_latents
    from fastattn.kernels.gpu.tile import with_positive_scale

    batch, table = plan.batch, plan.batch.block_table
    assert table is not None  # the path has checked it
    if 0 in (query.numel(), cache.numel(), batch.num_seqs, batch.max_query_len, batch.max_seq_len, table.shape[1]):
        return empty_answer(query, latent_rank, plan, options)
    num_rows = batch.num_seqs * batch.max_query_len
    # It masks scores, and looks for the largest, before it scales them.
    rows, scale = with_positive_scale(query[:num_rows], options.softmax_scale)
    module = importlib.import_module(INTERFACE)
    result, logs = module.flash_mla_with_kvcache(
        rearrange(rows, "(b t) h d -> b t h d", b=batch.num_seqs),
        cache[:, :, None, : query.shape[2]],
        side_by_side(table),
        batch.seq_lens,
        latent_rank,
        schedule_of(plan, ("flash_mla", query.shape[1], batch.max_query_len), module.FlashMLASchedMeta),
        softmax_scale=scale,
        causal=plan.causal,
        use_legacy=True,  # the half of the wheel for Hopper
    )
    result, lse = rearrange(result, "b t h r -> (b t) h r"), rearrange(logs, "b h t -> h (b t)")
    num_padding = query.shape[0] - num_rows
    if num_padding:
        result, lse = pad(result, (0, 0, 0, 0, 0, num_padding)), pad(lse, (0, num_padding))
    result, lse = adapt(result, lse, plan, options)
    repair_latents(result, query, cache, plan, options, latent_rank)
    return result, lse


def mla_tree(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: TreePlan,
    options: AttentionOptions,
    latent_rank: int,
    out: Float[Tensor, "t h {latent_rank}"] | None,
) -> tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend to latents before a tree, and by a launch of ours to its nodes; see `fastattn.kernels.dispatch`."""
    from fastattn.kernels.gpu.repair import attend_to_latent_nodes

    before = mla(query, cache, plan.prefix, options.without_sinks(), latent_rank, None)
    return attend_to_latent_nodes(query, cache, plan, options, latent_rank, before)


@cache
def _cannot_load() -> str | None:
    """Return why there is no FlashMLA here, or that its half for Hopper is missing; None once it is loaded."""
    reason = cannot_import(INTERFACE, PACKAGE, "flash_mla_with_kvcache", "FlashMLASchedMeta")
    reason = reason or cannot_import("flash_mla", PACKAGE, "has_legacy")  # DeepSeek's own package has not
    if reason is not None:
        return reason
    if not importlib.import_module("flash_mla").has_legacy():
        return f"the package {PACKAGE} has no kernels for Hopper: it was built without its legacy half"
    return None
