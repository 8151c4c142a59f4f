"""Everything but attention itself (merging, the cache, tables) in plain torch, on any device.

A kernel like any other, and what those in torch (`cpu`, `plain`) share: they merge their own parts by it.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int32, Int64, Shaped, UInt8
from torch import Tensor

from fastattn.kernels.kernel import Kernel
from fastattn.kernels.problem import Problem, as_integers, places
from refattn.interface import Accepted, Batch, Trees
from refattn.interface.packed import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE, packed_parts
from refattn.interface.values import rows_with_slots
from refattn.interface.writes import check_slot_numbers


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None: torch computes nearly all of these everywhere."""
    if problem.operation in (*OF_STATES, "score_index", "sample") and problem.device.type in ("cuda", "meta"):
        return "reads the lengths on the host, for which a GPU would have to wait"
    return None


FUNCTIONS = (
    "merge",
    "add_sinks",
    "write",
    "write_packed",
    "read_packed",
    "copy_blocks",
    "compact",
    "slot_mapping",
    "trim",
    "cut_chunks",
    "draw_trees",
)
OF_SELECTION = ("write_index", "read_index", "score_index", "select", "selected_slots", "plan_selected")
OF_STATES = ("recurrent", "convolve")
KERNEL = Kernel(
    "torch",
    unsupported_reason,
    attends=(),
    functions={name: f"{__name__}:{name}" for name in FUNCTIONS}
    | {name: f"fastattn.kernels.torch_selection:{name}" for name in OF_SELECTION}
    | {name: f"fastattn.kernels.torch_recurrent:{name}" for name in OF_STATES}
    | {"sample": "fastattn.kernels.torch_sampling:sample"},
)


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine partial answers in one pass over their outputs; see `fastattn.merge.merge`."""
    lse = lses[0]
    for part_lse in lses[1:]:
        lse = _log_add_exp(lse, part_lse)
    total: Tensor | None = None
    for part_out, part_lse in zip(outs, lses, strict=True):
        # The output of a part that saw nothing may hold anything, NaN too, and 0 * NaN is NaN.
        part = part_out * torch.exp(part_lse - lse)[..., None]
        part.masked_fill_((part_lse == -torch.inf)[..., None], 0.0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(outs[0].dtype), lse


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of answers that were computed without them; see `fastattn.merge.add_sinks`."""
    sinks = sinks.to(lse.dtype)
    share = torch.exp(sinks - lse).add_(1.0).reciprocal_()[..., None]  # exp(lse) / (exp(lse) + exp(sink))
    out = (out * share).masked_fill_((lse == -torch.inf)[..., None], 0.0).to(out.dtype)
    return out, _log_add_exp(lse, sinks.expand_as(lse))


def _log_add_exp(first: Float[Tensor, "t h"], second: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
    """Return `log(exp(first) + exp(second))`, with the same bits wherever in the tensors the numbers stand.

    `torch.logaddexp` and `torch.sigmoid` compute what is left after the last whole vector in another way.
    """
    gap = (first - second).abs_().masked_fill_(first == second, 0.0)  # two infinities have none
    return torch.maximum(first, second) + gap.neg_().exp_().log1p_()


def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> Callable[..., None] | None:
    """Write new tokens into the pool; see `fastattn.kv_cache.write`.

    Returns:
        On a CPU, a function that writes other tensors of the same types, shapes and strides, and checks their slots.
    """
    _write_rows(key, value, key_cache, value_cache, slot_mapping, bool((slot_mapping < 0).any()))
    return _write_again if slot_mapping.is_cpu else None


def _write_again(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write as an earlier call did with other tensors; what slots hold was checked for those alone."""
    has_padding = check_slot_numbers(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    _write_rows(*rows_with_slots(key, value, slot_mapping), key_cache, value_cache, slot_mapping, has_padding)


def _write_rows(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    has_padding: bool,
) -> None:
    if has_padding:
        real = slot_mapping >= 0
        key, value, slot_mapping = key[real], value[real], slot_mapping[real]
    for new, cache in ((key, key_cache), (value, value_cache)):
        if cache.element_size() < 4:
            new, cache = as_integers(new), as_integers(cache)
        block_size = cache.shape[1]
        if cache.stride(0) == block_size * cache.stride(1):  # slots are rows of a view
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new)
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = new


def write_packed(
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: UInt8[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write latents and rotary keys into packed rows, all at once; see `fastattn.mla.write`."""
    written = slot_mapping >= 0
    latent, rope_key, slot_mapping = latent[written], rope_key[written], slot_mapping[written]
    blocks, rows = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
    codes, scales, rotary = packed_parts(cache, latent.shape[1], rope_key.shape[1])
    groups, largest = latent.float().unflatten(1, (-1, LATENT_GROUP)), torch.finfo(PACKED_FORMAT).max
    scale = groups.abs().amax(-1)
    scale = (scale / torch.full_like(scale, largest)).clamp_(min=SMALLEST_SCALE)
    rounded = (groups / scale[..., None]).clamp_(-largest, largest).to(PACKED_FORMAT)
    codes[blocks, rows] = rounded.view(torch.uint8).flatten(1)
    scales[blocks, rows] = scale
    as_integers(rotary)[blocks, rows] = as_integers(rope_key.to(rotary.dtype))


def read_packed(
    rows: UInt8[Tensor, "*rows c"], latent_rank: int, rope_size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Read packed rows as numbers of a type, the latents before the rotary keys."""
    codes, scales, rotary = packed_parts(rows, latent_rank, rope_size)
    numbers = codes.view(PACKED_FORMAT).float().unflatten(-1, (-1, LATENT_GROUP)) * scales[..., None]
    return torch.cat([numbers.flatten(-2).to(dtype), rotary.to(dtype)], -1)


def copy_blocks(cache: Shaped[Tensor, "n ..."], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy blocks inside a pool; see `fastattn.kv_cache.copy_blocks`."""
    cache = as_integers(cache)
    blocks = cache.index_select(0, pairs[:, 0].to(cache.device))
    cache.index_copy_(0, pairs[:, 1].to(cache.device), blocks)


def compact(cache: Shaped[Tensor, "n p ..."], batch: Batch, trees: Trees, accepted: Accepted, block_size: int) -> None:
    """Move accepted nodes to the first slots of their trees; see `fastattn.speculative.compact`."""
    assert batch.block_table is not None  # the path has checked it
    cache = as_integers(cache)
    target = torch.arange(trees.max_len, device=batch.device)
    sequence, target = ((target < accepted.lens[:, None]) & (accepted.nodes != target)).nonzero(as_tuple=True)
    first = (batch.seq_lens - trees.lens)[sequence]
    sources, targets = first + accepted.nodes[sequence, target], first + target
    blocks = [batch.block_table[sequence, place // block_size].long() for place in (sources, targets)]
    cache[blocks[1], targets % block_size] = cache[blocks[0], sources % block_size]  # all are read before


def slot_mapping(batch: Batch, num_tokens: int, block_size: int) -> Int64[Tensor, "t"]:
    """Compute the slot of each new token; see `fastattn.metadata.slot_mapping`."""
    assert batch.block_table is not None  # the path has checked it
    sequence, place, padding = places(batch, num_tokens)
    nowhere = padding | (place < 0)
    place = place.masked_fill(nowhere, 0)
    block = batch.block_table[sequence, place // block_size].long()
    return (block * block_size + place % block_size).masked_fill(nowhere, -1)


def trim(
    batch: Batch, left: int, block_size: int, columns: int
) -> tuple[Int32[Tensor, "b"], Int32[Tensor, "b"], Int32[Tensor, "b columns"]]:
    """Cut off the blocks that no query sees; see `fastattn.sliding_window.plan`.

    Args:
        batch: the lengths and the block table.
        left: tokens that a query sees before itself.
        block_size: tokens in a block.
        columns: blocks that are left of a sequence, at most.

    Returns:
        The first key of each sequence that is left, its number of keys, and its blocks. Past its last block a row
        repeats the last column of the table: no key is there.
    """
    assert batch.block_table is not None  # the path has checked it
    # In 64 bits, as a window may begin before the smallest int32.
    cut = ((batch.context_lens.long() - left).clamp(min=0) // block_size).int()  # [b], in blocks
    used = rearrange(cut, "b -> b 1") + torch.arange(columns, device=batch.device)
    table = batch.block_table.gather(1, used.clamp(max=batch.block_table.shape[1] - 1))
    return cut * block_size, batch.seq_lens - cut * block_size, table


def cut_chunks(
    batch: Batch, chunk_size: int, block_size: int, num_chunks: int, columns: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "v"], Int32[Tensor, "v"], Int32[Tensor, "v columns"]]:
    """Cut each sequence into `num_chunks` virtual ones; see `fastattn.local.plan`.

    Args:
        batch: the lengths and the block table.
        chunk_size: tokens in a chunk.
        block_size: tokens in a block.
        num_chunks: virtual sequences of each sequence.
        columns: blocks of a virtual sequence.

    Returns:
        `cu_seqlens_q`, the first key, `seq_lens` and the block table of the virtual sequences.
    """
    assert batch.block_table is not None  # the path has checked it
    # In 64 bits, as a chunk may end past the largest int32.
    seq_lens, context_lens = (rearrange(x.long(), "b -> b 1") for x in (batch.seq_lens, batch.context_lens))
    number = context_lens // chunk_size + torch.arange(num_chunks, device=batch.device)
    begin = number * chunk_size  # [b, chunks], of each chunk; below 0 where there are more queries than keys
    end = torch.minimum(begin + chunk_size, seq_lens)
    first_key = begin.clamp(min=0)
    num_keys = (end - first_key).clamp(min=0) * (end > torch.maximum(begin, context_lens))  # none without a query
    rows_end = end + rearrange(batch.cu_seqlens_q[1:] - batch.seq_lens, "b -> b 1")  # query rows, left-over chunks too
    # Past its last block a row repeats the sequence's last column: no key is there.
    used = rearrange(first_key // block_size, "b chunks -> b chunks 1") + torch.arange(columns, device=batch.device)
    used = rearrange(used.clamp(max=batch.block_table.shape[1] - 1), "b chunks columns -> b (chunks columns)")
    return (
        torch.cat([batch.cu_seqlens_q[:1], rearrange(rows_end.int(), "b chunks -> (b chunks)")]),
        rearrange(first_key.int(), "b chunks -> (b chunks)"),
        rearrange(num_keys.int(), "b chunks -> (b chunks)"),
        rearrange(batch.block_table.gather(1, used), "b (chunks columns) -> (b chunks) columns", chunks=num_chunks),
    )


def draw_trees(
    batch: Batch, trees: Trees, num_tokens: int
) -> tuple[Int32[Tensor, "b w"], Int64[Tensor, "b w words"], Int32[Tensor, "t"]]:
    """Find who is above whom in each tree, and where its query rows stand; see `fastattn.speculative.plan`.

    Every node jumps up, twice as far each time, and takes along what those have found that it lands on.

    Args:
        batch: the lengths; the query rows of a sequence are the last nodes of its tree.
        trees: the trees.
        num_tokens: query rows, padding included.

    Returns:
        The depth of each node, the mask of what it sees, both 0 past a tree's last node, and the position of each query
        row, 0 for padding.
    """
    b, w = trees.parents.shape
    node = torch.arange(w, device=batch.device)
    is_node = node < trees.lens[:, None]  # [b, w]
    above = torch.minimum(trees.parents.long(), node - 1).where(is_node, -1)  # past the last node anything stands
    depth = (above >= 0).int()
    above = torch.where(above >= 0, above, node)  # a root stays where it is
    word = torch.arange(trees.num_words, device=batch.device)
    ancestors = torch.where(node[:, None] // 64 == word, torch.ones_like(word) << node[:, None] % 64, 0)
    ancestors = ancestors.where(is_node[..., None], 0)  # [b, w, words]
    for _ in range((w - 1).bit_length()):
        ancestors = ancestors | ancestors.gather(1, above[..., None].expand_as(ancestors))
        depth = depth + depth.gather(1, above)
        above = above.gather(1, above)
    if b == 0 or w == 0:
        return depth, ancestors, trees.lens.new_zeros(num_tokens)
    sequence, place, padding = places(batch, num_tokens)
    first = (batch.seq_lens - trees.lens)[sequence]
    mine = (place - first).masked_fill(padding, 0).clamp(0, w - 1)
    return depth, ancestors, (first + depth[sequence, mine]).int().masked_fill(padding, 0)
