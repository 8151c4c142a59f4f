"""Attention in plain PyTorch, for devices that no other kernel knows: right on any of them, and fast on none.

One sequence after the other, a tile of queries at a time: the keys that some row of the tile sees are gathered, and two
matrix products and a softmax answer it. So memory grows linearly with the keys. What goes with attention (merging, the
cache, tables) is beside it.

Source: the formula of `refattn.attention`, which is tested against this.
"""

from collections.abc import Callable

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from fastattn.kernels.kernel import ALL_OPTIONS, LATENTS, LEVELS, PAGES, PLAN, TREE, Kernel
from fastattn.kernels.problem import Problem, cu_seqlens_k_of, uses_positions
from fastattn.kernels.torch_ops.merge import add_sinks
from refattn.keys import Keys, Latents, Pages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan, TreePlan

TILE = 256  # queries at a time

# Reads some keys of a sequence, and their values: its number and their places.
Read = Callable[[int, Int64[Tensor, "keys"]], tuple[Tensor, Tensor]]


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None."""
    if problem.device.type == "cuda":
        return "is for devices that have no kernel of their own"
    if problem.device.type == "meta":
        return "reads the lengths, and a tensor on meta has no elements"
    if problem.stored is not None:
        return "reads numbers, not codes"
    if problem.batch_invariant:
        return "computes by matrix products, whose bits depend on their sizes"
    return None


KERNEL = Kernel(
    "plain",
    unsupported_reason,
    attends=("rows", "pages", "latents"),
    trees=("pages", "latents"),
    knows=ALL_OPTIONS | PLAN | LEVELS | TREE | PAGES | LATENTS,
    functions={"attend": f"{__name__}:attend"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows, pages or latents in one level; see `fastattn.dispatch`."""
    (level,) = plan.levels
    if isinstance(keys, Rows):
        read = _from_rows(keys, level.whole)
    elif isinstance(keys, Latents):
        pages = keys.cache[:, :, None, : query.shape[2]]
        read = _from_pages(pages, pages[..., : keys.latent_rank], level.whole)
    else:
        assert isinstance(keys, Pages)  # it takes no other storage
        read = _from_pages(*keys, level.whole)
    tree = plan if isinstance(plan, TreePlan) else None
    return _attend(query, read, keys.value_head_size, level.whole, options, tree=tree)


def _from_rows(rows: Rows, plan: Plan) -> Read:
    """Return what reads keys and values where the rows of a sequence begin."""
    starts = cu_seqlens_k_of(plan).tolist()

    def read(sequence: int, places: Int64[Tensor, "keys"]) -> tuple[Tensor, Tensor]:
        return rows.key[starts[sequence] + places], rows.value[starts[sequence] + places]

    return read


def _from_pages(key_cache: Tensor, value_cache: Tensor, plan: Plan) -> Read:
    """Return what reads keys and values by the block table."""
    table, block_size = plan.batch.block_table, key_cache.shape[1]
    assert table is not None  # the path has checked it

    def read(sequence: int, places: Int64[Tensor, "keys"]) -> tuple[Tensor, Tensor]:
        blocks, rows = table[sequence, places // block_size].long(), places % block_size
        return key_cache[blocks, rows], value_cache[blocks, rows]

    return read


def _attend(
    query: Float[Tensor, "t h d"],
    read: Read,
    value_head_size: int,
    plan: Plan,
    options: AttentionOptions,
    *,
    tree: TreePlan | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend sequence by sequence, and tile by tile."""
    compute = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(*query.shape[:2], value_head_size, dtype=compute)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=compute)
    starts, seq_lens = plan.batch.cu_seqlens_q.tolist(), plan.batch.seq_lens.tolist()
    count = 0 if query.shape[1] == 0 else len(seq_lens)
    for sequence in range(count):
        for first in range(starts[sequence], starts[sequence + 1], TILE):
            rows = torch.arange(first, min(first + TILE, starts[sequence + 1]), device=query.device)
            distance, visible = _mask(rows, sequence, starts[sequence + 1], seq_lens[sequence], plan, options, tree)
            places = visible.any(0).nonzero()[:, 0]  # what no row sees is not read: it may be NaN, or no block at all
            if len(places):
                key, value = (x.to(compute) for x in read(sequence, places))
                some = distance[:, places], visible[:, places]
                out[rows], lse[rows] = _rectangle(query[rows].to(compute), key, value, *some, options)
    if options.sinks is not None:
        used = starts[-1]
        out[:used], lse[:used] = add_sinks(out[:used], lse[:used], options.sinks)
    return out.to(query.dtype), lse


def _mask(
    rows: Int64[Tensor, "rows"],
    sequence: int,
    end_row: int,
    seq_len: int,
    plan: Plan,
    options: AttentionOptions,
    tree: TreePlan | None,
) -> tuple[Int64[Tensor, "rows keys"], Bool[Tensor, "rows keys"]]:
    """Return how far each row of a sequence is from each key, and whether it sees it."""
    keys = torch.arange(seq_len, device=rows.device)
    positions = seq_len - end_row + rows
    if plan.positions is not None and uses_positions(plan, options):
        positions = plan.positions[rows].long()
        if plan.first_keys is not None:
            positions = positions - plan.first_keys[sequence]
    if tree is None:
        distance = positions[:, None] - keys
        visible = torch.ones_like(distance, dtype=torch.bool)
    else:
        tree_len = int(tree.trees.lens[sequence])
        before = seq_len - tree_len
        places = torch.cat([keys[:before], before + tree.depths[sequence, :tree_len].long()])
        distance = positions[:, None] - places
        node = torch.arange(tree_len, device=rows.device)
        words = tree.ancestors[sequence, rows - end_row + tree_len][:, node // 64]
        visible = torch.ones_like(distance, dtype=torch.bool)
        visible[:, before:] = (words >> node % 64) & 1 != 0
    left, right = plan.window
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    if plan.first_visible is not None and plan.last_visible is not None:
        first_key = 0 if plan.first_keys is None else plan.first_keys[sequence].long()
        first, last = (x[rows].long()[:, None] - first_key for x in (plan.first_visible, plan.last_visible))
        visible = visible & (first <= keys) & (keys <= last)
    return distance, visible


def _rectangle(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    distance: Int[Tensor, "t s"],
    visible: Bool[Tensor, "t s"],
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from some queries to some keys of a sequence, without sinks."""
    group = query.shape[1] // key.shape[1]
    scale = query.shape[2] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    key, value = (repeat(x, "s hk d -> s (hk g) d", g=group) for x in (key, value))
    scores = einsum(query * scale, key, "t h d, s h d -> h t s")
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        far = distance.abs().to(scores.dtype)
        far = far.sqrt() if options.alibi_sqrt else far
        scores = scores - rearrange(options.alibi_slopes.to(scores.dtype), "h -> h 1 1") * far
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0.0)
    return einsum(weights, value, "h t s, s h dv -> t h dv"), lse.T
