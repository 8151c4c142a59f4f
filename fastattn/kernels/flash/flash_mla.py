"""FlashMLA: attention over latents on Hopper, DeepSeek's kernels from the wheel `sgl-flash-mla`.

It takes a rectangle of queries (the same number of new tokens for every sequence) over pages of 64 tokens, for latents
of 512 elements and rotary keys of 64. A tile is 64 rows of `tokens x heads`. The keys are split over all SMs by a
schedule, which a separate kernel computes from the lengths; the plan keeps it for the whole step.

Over latents in fp8 (e4m3) it multiplies quantized values, and rounds queries and softmax weights to fp8. So it takes
them only where both are allowed (`query_scale`, `fp8_weights` of `fastattn.mla.attention`). Its kernel reads the first
page of every sequence, even of one without keys, so such a sequence gets one key, and its output is fixed up.

Where a page is one token and a sequence one query, as in a plan of selected keys, the kernel for sparse prefills is
called, with any number of queries, also over latents without rotary keys (the entries of DeepSeek-V4). A program has 64
heads of a query and all its keys, so it takes many queries to fill the GPU. It fills with zeros where a query has fewer
keys, and reads no slot outside of the pool. It takes a sink, too, but its log-sum-exp is without it: sinks are added
afterwards.

Over packed latents the kernel for sparse decodes is called, which splits the keys. It rounds the scales to bfloat16,
and then the products with them. It checks slots for -1 only, and reads the rows of slots past the last one, so both
kernels get lists in which every slot that is not the query's is -1 (`fastattn.kernels.flash.slots`).

It loads whole pages and gives values past a sequence's end a weight of 0; NaN that results from it is recomputed. It
drops a split whose scores are NaN, so NaN in a latent reaches the output only if the sequence is not split. For a
sequence that ends with a drafted tree it reads the latents before the tree.

Source: DeepSeek-AI 2025, "FlashMLA"; github.com/deepseek-ai/FlashMLA.
"""

import importlib
from functools import cache, partial
from math import gcd
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fastattn.kernels.device import cannot_import, capability
from fastattn.kernels.flash import NO_FP8, NO_INTERVALS, NO_POSITIONS, NOT_ALIGNED, side_by_side
from fastattn.kernels.kernel import LATENTS, LEVELS, PACKED, PLAN, TREE, Kernel, options_of
from fastattn.kernels.problem import Problem, latent_scales
from fastattn.kernels.schedule import schedule_of, schedule_of_sizes
from refattn.keys import Keys, Latents, PackedLatents
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan, TreePlan

INTERFACE = "flash_mla.flash_mla_interface"
PACKAGE = "sgl-flash-mla"
FUNCTIONS = (
    "flash_mla_with_kvcache",
    "FlashMLASchedMeta",
    "get_mla_decoding_metadata",
    "flash_mla_sparse_fwd",
)  # functions of that module
LATENT = (64, 512)  # sizes of rotary keys and of latents
KEY = (0, 512)  # sizes of selected keys that are their values
BLOCK_SIZE = 64  # tokens in a page
SELECTED_HEADS = (64, 128)  # query heads, over selected latents
SELECTED_STEP = 128  # selected latents are padded to a multiple of it


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel can't compute a problem, or None."""
    if problem.device.type != "cuda":
        return f"computes on CUDA, the tensors are on {problem.device.type}"
    major, minor = capability(problem.device)
    if (major, minor) != (9, 0):
        return f"needs a GPU of compute capability 9.0, not {major}.{minor}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, not {problem.dtype}"
    packed = problem.keys == "packed"
    if not packed and problem.stored is not None and (rounded := _cannot_multiply_fp8(problem)) is not None:
        return rounded
    sizes = (problem.head_size - problem.value_head_size, problem.value_head_size)
    selected = is_of_selected(problem)
    if sizes != LATENT and (sizes != KEY or packed or not selected):
        more = " (none over selected latents)" if sizes == KEY else ""
        return f"latents of {LATENT[1]} elements and rotary keys of {LATENT[0]}{more}, not {sizes[1]} and {sizes[0]}"
    if packed and not selected:
        return (
            "reads packed latents where each sequence is one query with a list of slots, as in a plan of selected keys"
        )
    if selected and (refused := _cannot_select(problem)) is not None:
        return refused
    if problem.block_size != BLOCK_SIZE and not selected:
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


def is_of_selected(problem: Problem) -> bool:
    """Return whether each sequence is one query with its own list of latents, as in a plan of selected keys."""
    return problem.block_size == 1 and problem.max_query_len == 1 and not problem.tree


def _cannot_select(problem: Problem) -> str | None:
    """Return why the kernel for selected latents can't compute a problem, or None."""
    if problem.stored is not None and problem.keys != "packed":
        return NO_FP8
    if problem.dtype != torch.bfloat16:
        return f"computes bfloat16 over selected latents, not {problem.dtype}"
    if problem.num_heads not in SELECTED_HEADS:
        return f"64 or 128 heads over selected latents, not {problem.num_heads}"
    return None


def _cannot_multiply_fp8(problem: Problem) -> str | None:
    """Return why latents in fp8 can't be multiplied as they are, or None."""
    assert problem.stored is not None  # it is over a quantized cache
    if problem.tree:
        return NO_FP8
    if problem.stored[0] != torch.float8_e4m3fn:
        return f"multiplies float8_e4m3fn values, not {problem.stored[0]}: take triton"
    if not (problem.rounds_query and problem.fp8_weights):
        missing = "fp8_weights" if problem.rounds_query else "query_scale"
        return f"rounds queries and weights to fp8, which is not allowed without {missing}: take triton"
    if problem.dtype != torch.bfloat16:
        return f"returns bfloat16 over fp8 latents, not {problem.dtype}"
    return None


KERNEL = Kernel(
    "flash_mla",
    unsupported_reason,
    attends=("latents", "packed"),
    trees=("latents",),
    knows=options_of("softmax_scale", "sinks") | PLAN | LEVELS | TREE | LATENTS | PACKED,
    functions={"attend": f"{__name__}:attend"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to latents, before a tree and by a launch of ours to its nodes; see `fastattn.dispatch`."""
    (level,) = plan.levels
    if isinstance(keys, PackedLatents):
        return selected_packed(query, keys, level.own, options)
    assert isinstance(keys, Latents)  # the only other storage that it takes
    if isinstance(plan, TreePlan):
        from fastattn.kernels.flash.recompute import attend_to_latent_tree

        return attend_to_latent_tree(mla, query, keys, plan, options)
    if keys.query_scale is not None:
        return mla_fp8(query, keys, level.own, options)
    if level.own.block_size == 1:
        return selected(query, keys, level.own, options)
    return mla(query, keys.cache, level.own, options, keys.latent_rank, out)


def mla(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: Plan,
    options: AttentionOptions,
    latent_rank: int,
    out: Float[Tensor, "t h {latent_rank}"] | None,
) -> tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend to latents; see `fastattn.dispatch`."""
    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.recompute import recompute_latents
    from fastattn.kernels.problem import with_positive_scale

    batch, table = plan.batch, plan.batch.block_table
    assert table is not None  # the path has checked it
    if 0 in (query.numel(), cache.numel(), batch.num_seqs, batch.max_query_len, batch.max_seq_len, table.shape[1]):
        return empty_output(query, latent_rank, plan, options)
    num_rows = batch.num_seqs * batch.max_query_len
    # It masks scores, and takes their maximum, before it scales them.
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
    result, lse = fix_up(*_as_rows(result, logs, query.shape[0]), plan, options)
    recompute_latents(result, query, cache, plan, options, latent_rank)
    return result, lse


def mla_fp8(
    query: Float[Tensor, "t h d"], keys: Latents, plan: Plan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h {keys.latent_rank}"], Float[Tensor, "t h"]]:
    """Attend to latents in fp8 by products of quantized values, with queries and weights rounded; see the module."""
    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.recompute import recompute
    from fastattn.kernels.problem import with_positive_scale
    from fastattn.kernels.triton.quantized import quantization_of, quantize_query

    cache, rank, of_cache, of_query, _ = keys
    batch, table = plan.batch, plan.batch.block_table
    assert table is not None and of_query is not None  # the path has checked it
    if 0 in (query.numel(), cache.numel(), batch.num_seqs, batch.max_query_len, batch.max_seq_len, table.shape[1]):
        return empty_output(query, rank, plan, options)
    num_rows, num_heads = batch.num_seqs * batch.max_query_len, query.shape[1]
    rows, scale = with_positive_scale(query[:num_rows], options.softmax_scale)
    quantized_query = quantize_query(rows, of_query, cache.dtype, cache.dtype)
    module = importlib.import_module(INTERFACE)

    def make() -> Any:
        """Make a schedule, in which a sequence without keys has one, of page 0."""
        lengths = batch.seq_lens.clamp(min=1)
        pages = torch.where(batch.seq_lens[:, None] > 0, table, 0)
        meta = module.FlashMLASchedMeta()
        meta.tile_scheduler_metadata, meta.num_splits = module.get_mla_decoding_metadata(
            lengths, num_heads * batch.max_query_len, 1, num_heads, True, None, use_legacy=True
        )
        return lengths, pages, meta

    # `pages` is a copy: a table that was written in place has a new version.
    name = ("flash_mla of fp8", num_heads, batch.max_query_len, None if table.is_inference() else table._version)
    lengths, pages, meta = schedule_of(plan, name, make)
    descales = [
        schedule_of(plan, ("scale", x), partial(torch.full, (1,), x, dtype=torch.float32, device=query.device))
        for x in (of_query, of_cache)
    ]
    result, logs = module.flash_mla_with_kvcache(
        rearrange(quantized_query, "(b t) h d -> b t h d", b=batch.num_seqs),
        cache[:, :, None, : query.shape[2]],
        pages,
        lengths,
        rank,
        meta,
        softmax_scale=scale,
        causal=plan.causal,
        is_fp8_kvcache=True,
        use_legacy=True,
        descale_q=descales[0],
        descale_k=descales[1],
    )
    result, lse = fix_up(*_as_rows(result, logs, query.shape[0]), plan, options, by_lengths=True)
    scales = latent_scales(cache, of_cache, of_query)
    assert scales is not None  # it is over a quantized cache
    pool = cache.view(torch.uint8)[:, :, None, : query.shape[2]]
    recompute(result, query, pool, pool[..., :rank], plan, options, shared=True, quantization=quantization_of(scales))
    return result, lse


def selected(
    query: Float[Tensor, "t h d"], keys: Latents, plan: Plan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h {keys.latent_rank}"], Float[Tensor, "t h"]]:
    """Attend from each query to its own latents, which the block table lists one by one; see the module."""
    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.slots import slots_in_pool
    from fastattn.kernels.problem import with_positive_scale

    batch, table, rank = plan.batch, plan.batch.block_table, keys.latent_rank
    assert table is not None  # the path has checked it
    if 0 in (query.numel(), keys.cache.numel(), batch.num_seqs, batch.max_query_len, batch.max_seq_len, table.shape[1]):
        return empty_output(query, rank, plan, options)
    rows, scale = with_positive_scale(query[: batch.num_seqs], options.softmax_scale)
    result, _, logs = importlib.import_module(INTERFACE).flash_mla_sparse_fwd(
        rows,
        keys.cache[:, :, : query.shape[2]],
        slots_in_pool(batch, len(keys.cache), step=SELECTED_STEP)[:, None],
        scale,
        rank,
        topk_length=batch.seq_lens,
        use_legacy=True,
    )
    num_padding = query.shape[0] - batch.num_seqs
    if num_padding:
        result, logs = pad(result, (0, 0, 0, 0, 0, num_padding)), pad(logs, (0, 0, 0, num_padding))
    return fix_up(result, logs.T, plan, options)


def selected_packed(
    query: Float[Tensor, "t h d"], keys: PackedLatents, plan: Plan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h {keys.latent_rank}"], Float[Tensor, "t h"]]:
    """Attend from each query to its own packed latents, which the block table lists one by one; see the module.

    The schedule depends on sizes alone, so layers and steps of the same sizes share it.
    """
    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.slots import slots_in_pool
    from fastattn.kernels.problem import with_positive_scale

    batch, table, rank, num_slots = plan.batch, plan.batch.block_table, keys.latent_rank, len(keys.cache)
    assert table is not None  # the path has checked it
    if 0 in (query.numel(), keys.cache.numel(), batch.num_seqs, batch.max_query_len, batch.max_seq_len, table.shape[1]):
        return empty_output(query, rank, plan, options)
    rows, scale = with_positive_scale(query[: batch.num_seqs], options.softmax_scale)
    slots = slots_in_pool(batch, num_slots, step=SELECTED_STEP)
    page = gcd(num_slots, BLOCK_SIZE)  # tokens in its block: a slot has the same number in any
    module = importlib.import_module(INTERFACE)
    sizes = (batch.num_seqs, query.shape[1], slots.shape[1], page, str(query.device))
    result, logs = module.flash_mla_with_kvcache(
        rows[:, None],
        keys.cache.view(num_slots // page, page, 1, keys.cache.shape[2]),
        None,
        None,
        rank,
        schedule_of_sizes(("flash_mla of packed", *sizes), module.FlashMLASchedMeta),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots[:, None],
        use_legacy=True,
    )
    return fix_up(*_as_rows(result, logs, query.shape[0]), plan, options, by_lengths=True)


def _as_rows(
    result: Float[Tensor, "b t h r"], logs: Float[Tensor, "b h t"], num_tokens: int
) -> tuple[Float[Tensor, "{num_tokens} h r"], Float[Tensor, "h {num_tokens}"]]:
    """Return outputs as query rows, with padding rows after them."""
    out, lse = rearrange(result, "b t h r -> (b t) h r"), rearrange(logs, "b h t -> h (b t)")
    num_padding = num_tokens - len(out)
    if num_padding:
        out, lse = pad(out, (0, 0, 0, 0, 0, num_padding)), pad(lse, (0, num_padding))
    return out, lse


@cache
def _cannot_load() -> str | None:
    """Return why FlashMLA, or its half for Hopper, can't be loaded; None once it is."""
    reason = cannot_import("flash_mla", PACKAGE, "has_legacy")  # DeepSeek's own package lacks it
    reason = reason or cannot_import(INTERFACE, PACKAGE, *FUNCTIONS)
    if reason is not None:
        return reason
    if not importlib.import_module("flash_mla").has_legacy():
        return f"the package {PACKAGE} has no kernels for Hopper: it was built without its legacy half"
    return None
