"""FlashAttention-3: over ragged rows and over pages of any size on Hopper, from its own package or from vLLM's wheel.

From vLLM, only the library `_vllm_fa3_C.abi3.so` is needed. It is searched in the installed package, which is not
imported, and in every folder on the path.

Over rows, and over pages whose size is a multiple of its tile, the kernel loads whole tiles of keys and values and
gives values past a sequence's end a weight of 0; NaN that results from it is recomputed. From other pages it loads row
by row, and fills with zeros past the end.

Over latents its second query `q_v` is multiplied with the values: a score is `q . k + q_v . v`, with rotary keys of 64
elements as keys and the latents as values. The pool is read in place, as two views of its rows.

Windows are supported for decodes only. With more queries, the library in vLLM 0.33.0 hides too few keys before a window
of some hundred tokens: of 640 queries with a window of 356, row 384 sees 384 keys (NVIDIA H200, head size 128).

The keys of a sequence are not split over SMs. With splits, the library merges by log-sum-exps and drops a split whose
scores are NaN, so that a NaN which a query sees would be lost.

For a sequence that ends with a drafted tree it reads the keys before the tree, which every node sees. A quantized cache
is dequantized into pages first, as its own product of fp8 values rounds the weights to fp8, too.

Source: Shah et al. 2024, "FlashAttention-3".
"""

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.device import cannot_import, capability, on_gpu
from fastattn.kernels.flash import NO_FP8, NO_POSITIONS, NOT_ALIGNED, cannot_expand, cannot_extend, side_by_side
from fastattn.kernels.kernel import LATENTS, LEVELS, PAGES, PLAN, QUANTIZED, TREE, Kernel, options_of
from fastattn.kernels.problem import Problem, cu_seqlens_k_of, expanded, window_within_reach
from fastattn.kernels.schedule import schedule_of
from refattn.batch import Batch
from refattn.four_bits import Int4Pages
from refattn.keys import Keys, Latents, Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan, TreePlan

INTERFACE = "flash_attn_interface"  # the module of FlashAttention's own package for Hopper
FUNCTIONS = ("flash_attn_varlen_func", "flash_attn_with_kvcache")  # functions of that module
LIBRARY = "_vllm_fa3_C"  # vLLM's: `_vllm_fa3_C.abi3.so`, and the namespace of its operators
LARGEST_HEAD = 256
UNEQUAL_HEADS = ((64, 128), (64, 256), (192, 128))  # sizes of keys and of values that it has kernels for
LATENT = (64, 512)  # sizes of rotary keys and of latents that it has kernels for
SMALLEST_TILE = 64  # keys: smaller pages are never loaded as whole tiles
SPLITS = 1  # no split of a sequence's keys: with several, FA3 silently drops a split whose scores are NaN

# Other arguments of vLLM's operator: new keys to append, rotary embedding, scales of fp8, the second query of latents
# (set by `mla`), a schedule (set over pages), context parallelism. Sinks (`s_aux`) would have to be bfloat16, of at
# most 64 heads: the adapter adds them instead.
UNUSED: dict[str, Any] = dict.fromkeys(
    (
        *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k"),
        *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
        *("scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"),
        *("cu_seqlens_k", "seqused_k", "page_table"),  # a call sets the first, or the others
    )
) | dict(is_rotary_interleaved=True, sm_margin=0, cp_world_size=1, cp_rank=0)


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel can't compute a problem, or None."""
    if problem.keys in ("quantized", "int4"):
        return unsupported_reason(expanded(problem)) or cannot_expand(problem)
    if problem.device.type != "cuda":
        return f"computes on CUDA, the tensors are on {problem.device.type}"
    major, minor = capability(problem.device)
    if (major, minor) != (9, 0):
        return f"needs a GPU of compute capability 9.0, not {major}.{minor}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, not {problem.dtype}"
    if problem.stored is not None:
        return NO_FP8
    sizes = (problem.head_size, problem.value_head_size)
    over_latents = problem.keys == "latents"
    if over_latents:
        sizes = (sizes[0] - sizes[1], sizes[1])
        if sizes != LATENT:
            return f"latents of {LATENT[1]} elements and rotary keys of {LATENT[0]}, not {sizes[1]} and {sizes[0]}"
    elif sizes[0] != sizes[1] and sizes not in UNEQUAL_HEADS:
        pairs = ", ".join(f"{d} and {dv}" for d, dv in UNEQUAL_HEADS)
        return f"one head size for keys and values, or {pairs}, not {sizes[0]} and {sizes[1]}"
    if sizes[0] > LARGEST_HEAD or sizes[0] % 8:
        return f"head sizes that are multiples of 8 up to {LARGEST_HEAD}, not {sizes[0]}"
    if problem.alibi:
        return "has no ALiBi: take fa2 or triton"
    if problem.tree and problem.positions:
        return "reads the keys before a tree without a mask, not those of a window"
    if problem.window[0] >= 0 and problem.max_query_len > 1:
        return "shows keys before the window where a tile of queries reaches over more than a tile of keys: take fa4"
    if problem.positions:
        return NO_POSITIONS
    if problem.intervals and (without := cannot_extend(problem)) is not None:
        return without
    if problem.batch_invariant:
        return "its tiles follow the longest query of the batch, and the bits of its answers with them: take triton"
    if not problem.aligned:
        return NOT_ALIGNED
    return _cannot_load() or _refusal(*sizes, problem.dtype, problem.device, latents=over_latents)


KERNEL = Kernel(
    "fa3",
    unsupported_reason,
    attends=("rows", "pages", "quantized", "int4", "latents"),
    trees=("pages", "latents"),
    knows=options_of("softmax_scale", "softcap", "sinks") | PLAN | LEVELS | TREE | PAGES | QUANTIZED | LATENTS,
    functions={"attend": f"{__name__}:attend"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows, pages or latents, or to quantized values, which are dequantized first; see `fastattn.dispatch`.

    For a tree it attends to the keys before it, and a launch of ours to its nodes.
    """
    (level,) = plan.levels
    if level.own.extends_causal:
        from fastattn.kernels.flash.interval import attend_up_to_and_after

        return attend_up_to_and_after(attend, query, keys, level.own, options, out)
    if isinstance(keys, Latents):
        if isinstance(plan, TreePlan):
            from fastattn.kernels.flash.recompute import attend_to_latent_tree

            return attend_to_latent_tree(mla, query, keys, plan, options)
        return mla(query, keys.cache, level.own, options, keys.latent_rank, out)
    if isinstance(keys, QuantizedPages | Int4Pages):
        from fastattn.kernels.triton.expand import attend_dequantized

        return attend_dequantized(paged, query, keys, level.own, options, out)
    if isinstance(keys, Rows):
        return varlen(query, *keys, level.own, options, out)
    assert isinstance(keys, Pages)  # it takes no other storage
    if isinstance(plan, TreePlan):
        return tree(query, *keys, plan, options, out)
    return paged(query, *keys, level.own, options, out)


def varlen(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; see `fastattn.dispatch`."""
    return _attend(query, key, value, plan, options, dict(cu_seqlens_k=cu_seqlens_k_of(plan)), loads_tiles=True)


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; see `fastattn.dispatch`."""
    table = plan.batch.block_table
    assert table is not None  # the path has checked it
    where = dict(seqused_k=plan.batch.seq_lens, page_table=side_by_side(table))
    loads_tiles = key_cache.shape[1] >= SMALLEST_TILE
    return _attend(query, key_cache, value_cache, plan, options, where, loads_tiles=loads_tiles)


def tree(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: TreePlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages that end with a tree: this library to the keys before it, without a mask, and ours to the rest.

    See `fastattn.dispatch`.
    """
    from fastattn.kernels.flash.recompute import attend_to_nodes, recompute

    table = plan.prefix.batch.block_table
    assert table is not None  # the path has checked it
    num_tokens, num_heads = query.shape[:2]
    if _is_empty(query, key_cache, plan.prefix):  # no keys before the trees
        answer = query.new_zeros(num_tokens, num_heads, value_cache.shape[-1])
        nothing = query.new_full((num_heads, num_tokens), -torch.inf, dtype=torch.float32)
        return attend_to_nodes(query, key_cache, value_cache, plan, options, answer, nothing)
    where = dict(seqused_k=plan.prefix.batch.seq_lens, page_table=side_by_side(table))
    answer, lse = _forward(query, key_cache, value_cache, plan.prefix, options, where)
    if key_cache.shape[1] >= SMALLEST_TILE:
        recompute(answer, query, key_cache, value_cache, plan.prefix, options, adapted=False)
    return attend_to_nodes(query, key_cache, value_cache, plan, options, answer, lse.contiguous())


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

    table = plan.batch.block_table
    assert table is not None  # the path has checked it
    if _is_empty(query, cache, plan):
        return empty_output(query, latent_rank, plan, options)
    where = dict(seqused_k=plan.batch.seq_lens, page_table=side_by_side(table))
    pages = cache[:, :, None, : query.shape[2]]
    parts = (query[..., latent_rank:], pages[..., latent_rank:], pages[..., :latent_rank])
    out, lse = fix_up(*_forward(*parts, plan, options, where, query[..., :latent_rank]), plan, options)
    if cache.shape[1] >= SMALLEST_TILE:
        recompute_latents(out, query, cache, plan, options, latent_rank)
    return out, lse


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    where: dict[str, Tensor],
    *,
    loads_tiles: bool,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.recompute import recompute

    if _is_empty(query, key, plan):
        return empty_output(query, value.shape[-1], plan, options)
    out, lse = _forward(query, key, value, plan, options, where)
    out, lse = fix_up(out, lse, plan, options)
    if loads_tiles or plan.window[0] >= 0:  # it may read before a window, too, from any page
        recompute(out, query, key, value, plan, options)
    return out, lse


def _is_empty(query: Tensor, key: Tensor, plan: Plan) -> bool:
    """Return whether there is no sequence, query row, key or block."""
    batch = plan.batch
    columns = 1 if batch.block_table is None or plan.block_size is None else batch.block_table.shape[1]
    return 0 in (query.numel(), key.numel(), batch.num_seqs, batch.max_query_len, batch.max_seq_len, columns)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    where: dict[str, Tensor],
    value_query: Tensor | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "h t"]]:
    """Call the installed library, without sinks.

    Args:
        query: query rows of all sequences.
        key: rows or pages.
        value: rows or pages.
        plan: the lengths, and the mask.
        options: the layer's options.
        where: `cu_seqlens_k`, or `seqused_k` and `page_table`.
        value_query: over latents, the part of each query that is multiplied with the values; `options` has the scale.

    Returns:
        The outputs, and the log-sum-exps with heads first: natural log, `-inf` where a query sees nothing.
    """
    batch, window = plan.batch, window_within_reach(plan)
    scale = query.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    if scale <= 0:  # it masks scores, and takes their maximum, before it scales them
        factor, scale = (-1, -scale) if scale else (0, 1.0)
        query, value_query = query * factor, None if value_query is None else value_query * factor
    asked = dict(max_seqlen_q=batch.max_query_len, softmax_scale=scale, softcap=options.softcap, num_splits=SPLITS)
    if _has_interface():
        out, lse, *_ = _call_interface(query, key, value, plan, where, asked, value_query)
    else:
        # The operator has no defaults, and its argument names are fixed.
        out, lse, *_ = getattr(torch.ops, LIBRARY).fwd(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_k=batch.max_seq_len,
            is_causal=plan.causal,
            window_size_left=window[0],
            window_size_right=window[1],
            **(UNUSED | where | dict(q_v=value_query, scheduler_metadata=_schedule(query, key, value, plan, options))),
            **asked,
        )
    return out, lse


def _schedule(query: Tensor, key: Tensor, value: Tensor, plan: Plan, options: AttentionOptions) -> Tensor | None:
    """Return the schedule of vLLM's library for a step over pages; None where each call makes its own.

    A call counts finished tiles in it, and resets the count at the end.
    """
    library = getattr(torch.ops, LIBRARY)
    if plan.block_size is None or not hasattr(library, "get_scheduler_metadata"):
        return None
    batch, has_softcap, window = plan.batch, options.softcap > 0, window_within_reach(plan)
    sizes = dict(num_heads=query.shape[1], num_heads_k=key.shape[-2], headdim=query.shape[2], headdim_v=value.shape[-1])

    def make() -> Tensor:
        schedule: Tensor = library.get_scheduler_metadata(
            batch_size=batch.num_seqs,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            qkv_dtype=query.dtype,
            seqused_k=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            page_size=plan.block_size,
            max_seqlen_k_new=0,
            is_causal=plan.causal,
            window_size_left=window[0],
            window_size_right=window[1],
            has_softcap=has_softcap,
            num_splits=SPLITS,
            pack_gqa=None,
            sm_margin=0,
            **sizes,
            **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k")),
        )
        return schedule

    return schedule_of(plan, ("fa3", query.dtype, has_softcap, *sizes.values()), make)


def _call_interface(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    where: dict[str, Tensor],
    asked: dict[str, Any],
    value_query: Tensor | None,
) -> Any:
    """Call FlashAttention's own package; over pages its `max_seqlen_k` is `m * p`."""
    module, batch = importlib.import_module(INTERFACE), plan.batch
    window = window_within_reach(plan)
    asked = asked | dict(cu_seqlens_q=batch.cu_seqlens_q, causal=plan.causal, window_size=window, qv=value_query)
    if "page_table" in where:
        seqused_k, page_table = where["seqused_k"], where["page_table"]
        return module.flash_attn_with_kvcache(
            query, key, value, cache_seqlens=seqused_k, page_table=page_table, return_softmax_lse=True, **asked
        )
    return module.flash_attn_varlen_func(
        query, key, value, max_seqlen_k=batch.max_seq_len, return_attn_probs=True, **where, **asked
    )  # it calls the LSE attention probabilities


def _has_interface() -> bool:
    return cannot_import(INTERFACE, "flash_attn_3", *FUNCTIONS) is None


@cache
def _cannot_load() -> str | None:
    """Return why there is no FlashAttention-3 here, or None once one is loaded."""
    if _has_interface() or hasattr(getattr(torch.ops, LIBRARY), "fwd"):  # vLLM itself may have loaded it
        return None
    missing = cannot_import(INTERFACE, "flash_attn_3", *FUNCTIONS)
    library = _find_library()
    if library is None:
        return f"{missing}; and there is no {LIBRARY}.abi3.so on the path or in the package vllm"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"{missing}; and {library} can't be loaded: {error}"
    return None


def _find_library() -> Path | None:
    """Return where vLLM's library is: in the package, which is not imported, or in a folder on the path."""
    vllm = importlib.util.find_spec("vllm")
    for folder in (vllm and vllm.submodule_search_locations) or ():
        library = Path(folder, "vllm_flash_attn", f"{LIBRARY}.abi3.so")
        if library.is_file():
            return library
    alone = importlib.util.find_spec(LIBRARY)  # its name is that of a module
    return Path(alone.origin) if alone and alone.origin else None


@cache
def _refusal(
    head_size: int, value_head_size: int, dtype: torch.dtype, device: torch.device, *, latents: bool = False
) -> str | None:
    """Return why the build refuses a tiny call, or None: not every build has every head size."""
    query, value = (torch.zeros(1, 1, size, dtype=dtype, device=device) for size in (head_size, value_head_size))
    ends = torch.arange(2, dtype=torch.int32, device=device)
    table = ends[None, :1] if latents else None
    batch = Batch(ends, ends[1:], table, max_query_len=1, max_seq_len=1)
    try:
        with on_gpu(device):  # on another GPU the launch fails, and the failure is cached
            if table is None:
                _forward(query, query, value, Plan(batch), AttentionOptions(), dict(cu_seqlens_k=ends))
            else:
                where = dict(seqused_k=batch.seq_lens, page_table=table)
                _forward(query, query[None], value[None], Plan(batch, 1), AttentionOptions(), where, value)
    except RuntimeError as error:
        return f"this build refuses head sizes {head_size} and {value_head_size}, {dtype}: {str(error).splitlines()[0]}"
    return None
