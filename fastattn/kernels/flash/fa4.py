"""The package `flash-attn-4`: FlashAttention for Hopper and Blackwell, over ragged rows and pages of any size.

On Hopper it does not split keys, so it suits long queries. Pages of 128 tokens (`d` up to 128) load fastest; with many
queries it pays to copy smaller pages into such pages first. A quantized cache is dequantized into them, too.

It loads whole tiles and gives values past a sequence's end a weight of 0; NaN that results from it is recomputed. For
queries that see no key it reads the table before its first entry, so its tables have room there.

Source: Zadouri et al. 2026, "FlashAttention-4"; Shah et al. 2024, "FlashAttention-3".
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn.kernels.device import cannot_import, capability
from fastattn.kernels.flash import NO_POSITIONS, NOT_ALIGNED, cannot_expand, cannot_extend, side_by_side
from fastattn.kernels.kernel import LEVELS, PAGES, PLAN, QUANTIZED, Kernel, options_of
from fastattn.kernels.problem import Problem, cu_seqlens_k_of, expanded, has_aligned_heads, window_within_reach
from refattn.four_bits import Int4Pages
from refattn.keys import Keys, Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan

LARGEST_HEAD = {9: 256, 10: 128, 11: 128}  # by compute capability
FAST_BLOCK = 128  # tokens in a page that loads fastest
SMALLEST_TILE = 64  # keys that it loads at a time, at least
QUERY_ROWS = 6144  # rows per KV head and sequence, on average, from which a copy of the pages pays
MOST_COPIED_BYTES = 2**29  # bytes of copied keys and values that a call may allocate


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel can't compute a problem, or None."""
    if problem.keys in ("quantized", "int4"):
        return unsupported_reason(expanded(problem)) or cannot_expand(problem)
    if problem.device.type != "cuda":
        return f"computes on CUDA, the tensors are on {problem.device.type}"
    major, minor = capability(problem.device)
    if major not in LARGEST_HEAD:
        return f"needs a GPU of compute capability 9, 10 or 11, not {major}.{minor}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, not {problem.dtype}"
    sizes = (problem.head_size, problem.value_head_size)
    multiple = 8 if problem.block_size is None else 16
    largest = LARGEST_HEAD[major]
    if max(sizes) > largest or any(size % multiple for size in sizes):
        where = "rows" if problem.block_size is None else "pages"
        return (
            f"head sizes over {where} that are multiples of {multiple} up to {largest}, not {sizes[0]} and {sizes[1]}"
        )
    if sizes[0] != sizes[1] and min(sizes) < 32:
        return f"reads memory that is not its own with head sizes of {sizes[0]} and {sizes[1]}"
    if problem.block_size is not None and max(sizes) > 128 and sizes != (256, 256):
        return f"reads memory that is not its own over pages with head sizes of {sizes[0]} and {sizes[1]}"
    if problem.block_size is not None and 64 < sizes[0] <= 96 and problem.window[1] != 0:
        return f"answers wrongly over pages with head size {sizes[0]} where later keys are visible"
    if problem.alibi:
        return "has no ALiBi: take fa2 or triton"
    if problem.batch_invariant:
        return "whether it copies pages, and so its tiles, depends on the batch: take triton"
    if problem.positions:
        return NO_POSITIONS
    if problem.intervals and (without := cannot_extend(problem)) is not None:
        return without
    if not problem.aligned:
        return NOT_ALIGNED
    return cannot_import("flash_attn.cute.interface", "flash-attn-4", "_flash_attn_fwd")


KERNEL = Kernel(
    "fa4",
    unsupported_reason,
    attends=("rows", "pages", "quantized", "int4"),
    knows=options_of("softmax_scale", "softcap", "sinks") | PLAN | LEVELS | PAGES | QUANTIZED,
    functions={"attend": f"{__name__}:attend"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows, to pages, or to quantized pages, which are dequantized first; see `fastattn.dispatch`."""
    (level,) = plan.levels
    if level.own.extends_causal:
        from fastattn.kernels.flash.interval import attend_up_to_and_after

        return attend_up_to_and_after(attend, query, keys, level.own, options, out)
    if isinstance(keys, QuantizedPages | Int4Pages):
        from fastattn.kernels.triton.expand import attend_dequantized

        return attend_dequantized(paged, query, keys, level.own, options, out)
    if isinstance(keys, Rows):
        return varlen(query, *keys, level.own, options, out)
    assert isinstance(keys, Pages)  # the only other storage that it takes
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
    return _attend(query, key, value, plan, options, out, cu_seqlens_k=cu_seqlens_k_of(plan))


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; see `fastattn.dispatch`."""
    batch, table = plan.batch, plan.batch.block_table
    assert table is not None  # the path has checked it
    copied = _should_copy(query, key_cache, value_cache, plan)
    if copied:
        from fastattn.kernels.triton.expand import repage

        key_cache, table = repage(key_cache, batch, block_size=FAST_BLOCK)
        value_cache, _ = repage(value_cache, batch, block_size=FAST_BLOCK)
    if key_cache.shape[1] >= SMALLEST_TILE:  # pages of a tile are looked up before any check
        table = with_room_before(table, min(batch.max_query_len, query.shape[0]))
    where = dict(seqused_k=side_by_side(batch.seq_lens), page_table=side_by_side(table))
    return _attend(query, key_cache, value_cache, plan, options, out, tails_are_zero=copied, **where)


def with_room_before(table: Int32[Tensor, "b m"], max_query_len: int) -> Int32[Tensor, "b m"]:
    """Copy a block table into memory with room before it, so that entries there may be read.

    Where `q` queries have `s < q` keys, the first tile of queries ends before the first key, and the kernel begins with
    the page of tile `ceil((m + s - q) / n) - 1 < 0` for tiles of `m` rows and `n` keys. For the first sequence this is
    memory before the table, which may not be allocated: an illegal access. The page that it finds has no weight.

    Args:
        table: the block table.
        max_query_len: the largest number of queries of a sequence.
    """
    room = -(-max_query_len // SMALLEST_TILE)
    memory = table.new_empty(room + table.numel())
    memory[room:].view_as(table).copy_(table)
    return memory[room:].view_as(table)


def _should_copy(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Plan) -> bool:
    """Return whether to copy the pages into larger ones first: if there are many queries per key, and no window."""
    batch = plan.batch
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, value_head_size = value_cache.shape[-2:]
    if key_cache.shape[1] >= FAST_BLOCK or max(head_size, value_head_size) > 128:
        return False
    if not batch.num_seqs or plan.window[0] >= 0:
        return False
    rows = num_tokens * num_heads // num_kv_heads // batch.num_seqs
    copied = batch.num_seqs * batch.max_seq_len * num_kv_heads * (head_size + value_head_size) * query.element_size()
    return rows >= QUERY_ROWS and copied <= MOST_COPIED_BYTES


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    out: Tensor | None,
    *,
    tails_are_zero: bool = False,
    **where: Tensor | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    # The function below the public one, which prepares for a backward pass and takes 20 us on the CPU.
    from flash_attn.cute.interface import _flash_attn_fwd

    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.recompute import recompute
    from fastattn.kernels.problem import with_positive_scale

    batch = plan.batch
    if 0 in (query.shape[0], key.shape[0], batch.num_seqs):
        return empty_output(query, value.shape[-1], plan, options)
    left, right = window_within_reach(plan)
    signed, scale = with_positive_scale(query, options.softmax_scale)  # it masks before it scales
    result, lse, *_ = _flash_attn_fwd(
        signed,
        key,
        value,
        cu_seqlens_q=side_by_side(batch.cu_seqlens_q),
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=scale,
        causal=plan.causal,
        window_size_left=None if left < 0 else left,
        window_size_right=None if right < 0 else right,
        softcap=options.softcap,
        return_lse=True,
        out=out if out is not None and has_aligned_heads(out) else None,  # it stores 16 bytes at a time
        **where,
    )
    result, lse = fix_up(result, lse, plan, options)
    if not tails_are_zero:
        recompute(result, query, key, value, plan, options)
    return result, lse
