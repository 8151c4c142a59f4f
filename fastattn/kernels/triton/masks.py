"""Who may see whom, in a kernel: each mask is a NamedTuple that carries its own functions.

    look(mask, queries, tile, TILE)              the run of keys that some row of a tile sees, and data for later
    all_visible(mask, tile, run, sight)          which keys of a run every row sees, so that no mask is needed
    step(mask, tile, sight, start, is_key, TILE)     which keys of a step are read: those that some row sees
    visible(mask, tile, step, TILE)              which row sees which key of a step, [rows, keys]; if tiles have few
                                                 rows, [keys, rows]

A kernel calls them in this order, `mask.look(mask, ...)` for example. The masks are those of `refattn.masks`: a window
(a causal mask is one), an interval of keys for each query row, and a tree at the end of a sequence.

Source: as `refattn.masks`; ancestor masks of trees: Miao et al. 2024, "SpecInfer".
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from refattn.plan import Plan
from refattn.trees import TreePlan

# Triton's interpreter finds a function only if it is defined above its caller.


class Run(NamedTuple):
    """A run of keys of one sequence, which a program goes through in steps.

    Attributes:
        first: the first key that some row sees; earlier slots may hold NaN or belong to another sequence.
        begin: where the first step begins.
        end: past the last key that some row sees.
    """

    first: Any
    begin: Any
    end: Any


class Step(NamedTuple):
    """A step of keys under a mask.

    Attributes:
        is_key: [keys], whether a key is read.
        positions: [keys], their positions; that of a node of a tree is by its depth.
        seen: [rows, keys], which row sees which key, if the mask finds it before keys are read; else anything.
    """

    is_key: Any
    positions: Any
    seen: Any


# --- where steps begin ---


@triton.jit
@no_type_check
def keys_before(queries, tile, TILE):
    """Return how many keys of a sequence are missing before its table, if steps are placed by position, else 0."""
    before = 0
    if TILE.BY_POSITION:
        before = tl.load(queries.first_keys + tile.sequence)
    return before


@triton.jit
@no_type_check
def first_step(queries, tile, first, TILE):
    """Return where the step with the key `first` begins: at a multiple of its size, counted as in `keys_before`.

    By position, it may begin before the first key of the table: at `-keys_before` or later.
    """
    before = keys_before(queries, tile, TILE)
    return (first + before) // TILE.KEYS * TILE.KEYS - before


# --- a window around each row: a causal mask is the window (-1, 0) ---


class Window(NamedTuple):
    """Row `i` sees the keys from `i - left` to `i + right`; a side without its flag has no limit."""

    look: Any
    all_visible: Any
    step: Any
    visible: Any
    left: Any
    right: Any
    LEFT: Any
    RIGHT: Any


@triton.jit
@no_type_check
def visible_keys(first_position, last_position, seq_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Bound the keys that rows between two positions see: the first one, and the one past the last.

    The positions may be tensors, one pair per sequence. A side of a window is clamped to existing keys before it is
    added to a position: both may be nearly 2**31.
    """
    first = first_position * 0
    end = seq_len
    if RIGHT:
        end = last_position + 1 + tl.minimum(right, seq_len - 1 - last_position)
    if LEFT:
        first = tl.maximum(first_position, 0)
        first -= tl.minimum(left, first)
    return first, end


@triton.jit
@no_type_check
def look_in_window(mask, queries, tile, TILE):
    """Bound the keys that some row of a tile sees."""
    first, end = visible_keys(
        tile.first_position, tile.last_position, tile.seq_len, mask.left, mask.right, mask.LEFT, mask.RIGHT
    )
    begin = first
    if mask.LEFT:  # without a left side it is 0
        begin = first_step(queries, tile, first, TILE)
    return Run(first, begin, end)


@triton.jit
@no_type_check
def all_visible_in_window(mask, tile, run, sight):
    """Bound the keys of a run that every row of a tile sees; sides are clamped as in `visible_keys`."""
    first, end = run.begin, run.end
    if mask.RIGHT:
        end = tile.first_position + 1 + tl.minimum(mask.right, run.end - 1 - tile.first_position)
    if mask.LEFT:
        last_position = tl.maximum(tile.last_position, 0)
        first = tl.maximum(run.begin, last_position - tl.minimum(mask.left, last_position))
    return first, end


@triton.jit
@no_type_check
def step_in_window(mask, tile, sight, start, is_key, TILE):
    """Read every key of a step of the run."""
    j = start + tl.arange(0, TILE.KEYS)
    return Step(is_key, j, j)


@triton.jit
@no_type_check
def step_in_windows_apart(mask, tile, sight, start, is_key, TILE):
    """Read the keys of a step in the window of some row: between rows far apart are keys that no row sees."""
    KEYS_AXIS: tl.constexpr = TILE.KEYS_AXIS
    j = start + tl.arange(0, TILE.KEYS)
    distance = tl.expand_dims(tile.positions, KEYS_AXIS) - tl.expand_dims(j, 1 - KEYS_AXIS)
    near = (distance >= -mask.right) & (distance <= mask.left) & tl.expand_dims(tile.is_row, KEYS_AXIS)
    return Step(is_key & (tl.max(near.to(tl.int32), 1 - KEYS_AXIS) > 0), j, j)


@triton.jit
@no_type_check
def visible_in_window(mask, tile, step, TILE):
    """Compare positions."""
    KEYS_AXIS: tl.constexpr = TILE.KEYS_AXIS
    distance = tl.expand_dims(tile.positions, KEYS_AXIS) - tl.expand_dims(step.positions, 1 - KEYS_AXIS)
    visible = tl.expand_dims(step.is_key, 1 - KEYS_AXIS)
    if mask.RIGHT:
        visible = visible & (distance >= -mask.right)
    if mask.LEFT:
        visible = visible & (distance <= mask.left)
    return visible


# --- an interval of keys for each query row ---


class Intervals(NamedTuple):
    """Row `i` sees the keys from `first_visible[i]` to `last_visible[i]`, both included, and there is no other mask."""

    look: Any
    all_visible: Any
    step: Any
    visible: Any
    left: Any  # no sides, as there is no window
    right: Any
    LEFT: Any
    RIGHT: Any
    first_visible: Any  # [t], positions
    last_visible: Any


class IntervalSight(NamedTuple):
    """The run of a tile, and the first and the last key that each of its rows sees."""

    first: Any
    begin: Any
    end: Any
    first_of_rows: Any
    last_of_rows: Any


@triton.jit
@no_type_check
def look_at_intervals(mask, queries, tile, TILE):
    """Find the interval of each row, and bound the keys that some row sees.

    Positions are counted from the first key of the sequence. A row that sees nothing has a last key before its first
    one, and does not count in the bounds. Positions are clamped before they are subtracted: both may be nearly 2**31.
    """
    begin = 0
    if queries.first_keys is not None:
        begin = tl.load(queries.first_keys + tile.sequence)
    first = tl.maximum(tl.load(mask.first_visible + tile.tokens, mask=tile.is_row, other=0), begin) - begin
    first = tl.minimum(first, tile.seq_len)  # clamped, as steps are added to it
    last = tl.load(mask.last_visible + tile.tokens, mask=tile.is_row, other=-1)
    last = tl.where(last < begin, -1, tl.minimum(tl.maximum(last, begin) - begin, tile.seq_len - 1))
    sees = tile.is_row & (first <= last)
    first_key = tl.min(tl.where(sees, first, tile.seq_len), 0)
    end = tl.max(tl.where(sees, last, -1), 0) + 1
    return IntervalSight(first_key, first_step(queries, tile, first_key, TILE), end, first, last)


@triton.jit
@no_type_check
def all_visible_in_intervals(mask, tile, run, sight):
    """Bound the keys of a run that lie in the interval of every row."""
    first = tl.max(tl.where(tile.is_row, sight.first_of_rows, 0), 0)
    end = tl.minimum(run.end, tl.min(tl.where(tile.is_row, sight.last_of_rows, run.end), 0) + 1)
    return first, end


@triton.jit
@no_type_check
def step_in_intervals(mask, tile, sight, start, is_key, TILE):
    """Read the keys of a step that lie in the interval of some row."""
    tl.static_assert(TILE.KEYS_AXIS == 1)
    j = start + tl.arange(0, TILE.KEYS)
    seen = (sight.first_of_rows[:, None] <= j[None, :]) & (j[None, :] <= sight.last_of_rows[:, None])
    is_key &= tl.max((seen & tile.is_row[:, None]).to(tl.int32), 0) > 0
    return Step(is_key, j, seen)


@triton.jit
@no_type_check
def visible_if_seen(mask, tile, step, TILE):
    """Return the mask of a step, which `step` has computed."""
    return step.is_key[None, :] & step.seen


# --- a tree at the end of a sequence ---


class Tree(NamedTuple):
    """A row, a node of a tree, sees its ancestors, itself, and all keys before the tree, in a window by depth."""

    look: Any
    all_visible: Any
    step: Any
    visible: Any
    left: Any
    right: Any  # no such side
    LEFT: Any
    RIGHT: Any
    tree_lens: Any
    depths: Any  # [b, w]
    ancestors: Any  # [b, w, WORDS], a bit for each node
    tree_width: Any
    WORDS: Any
    DEPTHS: Any  # whether positions of nodes count: in a window, and with slopes
    NODES: Any  # whether the keys before the tree are left to another kernel


class TreeSight(NamedTuple):
    """The run of a tile, the place of the tree in its sequence, and where its depths and masks are."""

    first: Any
    begin: Any
    end: Any
    tree_start: Any
    depths: Any  # pointer to the depths of this tree
    ancestors: Any  # [rows], pointers to the mask of each row
    words: Any  # [rows], the only word of each mask; anything if there are several


@triton.jit
@no_type_check
def _either(a, b):
    return a | b


@triton.jit
@no_type_check
def _see_nodes(sight, is_row, first_node, WORDS: tl.constexpr):
    """Return which of 64 keys each row sees, a bit for each: nodes by its ancestor mask, and all keys before the tree.

    `first_node` is the place of the first key in the tree, negative before it. A mask of one word is loaded once for
    all steps. Of a longer mask 64 keys need two words, which are shifted into one that begins at the first key. A load
    for each row and key would go through shared memory.
    """
    first_bit = tl.maximum(first_node, 0)
    shift = (first_bit % 64).to(tl.uint64)
    if WORDS == 1:
        words = sight.words.to(tl.uint64, bitcast=True) >> shift
    else:
        at = first_bit // 64
        low = tl.load(sight.ancestors + at, mask=is_row & (at < WORDS), other=0).to(tl.uint64, bitcast=True)
        high = tl.load(sight.ancestors + at + 1, mask=is_row & (at + 1 < WORDS), other=0).to(tl.uint64, bitcast=True)
        words = (low >> shift) | ((high << (63 - shift)) << 1)  # a shift by 64 is undefined
    before = tl.minimum(tl.maximum(-first_node, 0), 64).to(tl.uint64)  # how many of the keys come before the tree
    half, others = before // 2, before - before // 2
    ones = tl.full([1], 0xFFFFFFFFFFFFFFFF, tl.uint64) >> (32 - half) >> (32 - others)
    return ((words << half) << others) | ones


@triton.jit
@no_type_check
def look_at_tree(mask, queries, tile, TILE):
    """Find the tree of a sequence and the ancestors of its rows, and bound the keys that some row may see."""
    first, end = visible_keys(
        tile.first_position, tile.last_position, tile.seq_len, mask.left, mask.right, mask.LEFT, mask.RIGHT
    )
    tree_len = tl.load(mask.tree_lens + tile.sequence)
    tree_start = tile.seq_len - tree_len
    tree = tile.sequence.to(tl.int64) * mask.tree_width
    ancestors = mask.ancestors + (tree + tree_len - tile.query_len + tile.queries) * mask.WORDS
    begin = first
    if mask.LEFT:  # without a left side it is 0
        begin = first_step(queries, tile, first, TILE)
    if mask.NODES:
        first = tl.maximum(first, tree_start)
        begin = first  # steps need not be aligned here
    words = 0
    if mask.WORDS == 1:
        words = tl.load(ancestors, mask=tile.is_row, other=0)
    return TreeSight(first, begin, end, tree_start, mask.depths + tree, ancestors, words)


@triton.jit
@no_type_check
def all_visible_in_tree(mask, tile, run, sight):
    """Bound the keys before a tree that every row sees."""
    first, end = all_visible_in_window(mask, tile, run, sight)
    return first, tl.minimum(end, sight.tree_start)


@triton.jit
@no_type_check
def step_in_tree(mask, tile, sight, start, is_key, TILE):
    """Read the keys of a step that some row sees, of the nodes by the ancestors of each row."""
    tl.static_assert(TILE.KEYS <= 128 and TILE.KEYS_AXIS == 1)
    in_step = tl.arange(0, TILE.KEYS)
    j, first_node = start + in_step, start - sight.tree_start
    bits = _see_nodes(sight, tile.is_row, first_node, mask.WORDS)
    of_any = tl.reduce(tl.where(tile.is_row, bits, 0), 0, _either)
    offset = in_step.to(tl.uint64) % 64
    bits = bits[:, None]
    if TILE.KEYS > 64:
        later = _see_nodes(sight, tile.is_row, first_node + 64, mask.WORDS)
        later_of_any = tl.reduce(tl.where(tile.is_row, later, 0), 0, _either)
        bits = tl.where((in_step < 64)[None, :], bits, later[:, None])
        of_any = tl.where(in_step < 64, of_any, later_of_any)
    seen, by_any = (bits >> offset[None, :]) & 1 != 0, (of_any >> offset) & 1 != 0
    positions = j
    if mask.DEPTHS:
        in_tree = (j >= sight.tree_start) & is_key
        depth = tl.load(sight.depths + j - sight.tree_start, mask=in_tree, other=0)
        positions = tl.where(in_tree, sight.tree_start + depth, j)
    if mask.LEFT:
        seen &= tile.positions[:, None] - positions[None, :] <= mask.left
        by_any = tl.max((seen & tile.is_row[:, None]).to(tl.int32), 0) > 0
    return Step(is_key & by_any, positions, seen)


# --- phases ---


@triton.jit
@no_type_check
def phase_of_run(run, all_from, all_to, PHASE: tl.constexpr, TILE):
    """Bound the steps of a phase: in phase 1 of 3 every row of the tile sees every key, in 0 and 2 it may not.

    A single phase is the whole run.

    A branch in the loop would keep the products of one step from overlapping with the softmax of another.
    """
    begin, end = run.begin, run.end
    if TILE.PHASES == 3:
        full_from = begin + tl.cdiv(tl.maximum(all_from - begin, 0), TILE.KEYS) * TILE.KEYS
        full_to = begin + tl.maximum(all_to - begin, 0) // TILE.KEYS * TILE.KEYS
        if PHASE == 0:
            end = tl.minimum(full_from, run.end)
        elif PHASE == 1:
            begin, end = full_from, full_to
        else:
            begin = tl.maximum(full_from, full_to)
    return begin, end


# --- the mask of a plan ---

WINDOW = dict(
    look=tl.constexpr(look_in_window),
    all_visible=tl.constexpr(all_visible_in_window),
    step=tl.constexpr(step_in_window),
    visible=tl.constexpr(visible_in_window),
)
INTERVALS = dict(
    look=tl.constexpr(look_at_intervals),
    all_visible=tl.constexpr(all_visible_in_intervals),
    step=tl.constexpr(step_in_intervals),
    visible=tl.constexpr(visible_if_seen),
)
TREE = dict(
    look=tl.constexpr(look_at_tree),
    all_visible=tl.constexpr(all_visible_in_tree),
    step=tl.constexpr(step_in_tree),
    visible=tl.constexpr(visible_if_seen),
)


def mask_of(plan: Plan, tree: TreePlan | None = None, *, slopes: bool = False, nodes: bool = False) -> Any:
    """Return the mask of a plan as the kernel takes it.

    Args:
        plan: the plan of one level.
        tree: the trees at the end of the sequences, if it is their plan.
        slopes: whether there are ALiBi slopes, which need the depths of nodes.
        nodes: whether the keys before the trees are left to another kernel.
    """
    left, right = plan.window
    window: dict[str, Any] = dict(left=left, right=right, LEFT=tl.constexpr(left >= 0), RIGHT=tl.constexpr(right >= 0))
    if tree is not None:
        return Tree(
            **TREE,
            **window,
            tree_lens=tree.trees.lens,
            depths=tree.depths,
            ancestors=tree.ancestors,
            tree_width=tree.trees.max_len,
            WORDS=tl.constexpr(tree.trees.num_words),
            DEPTHS=tl.constexpr(left >= 0 or slopes),
            NODES=tl.constexpr(nodes),
        )
    if plan.first_visible is not None:
        return Intervals(**INTERVALS, **window, first_visible=plan.first_visible, last_visible=plan.last_visible)
    if plan.positions is not None and left >= 0 and right >= 0:
        return Window(**WINDOW | dict(step=tl.constexpr(step_in_windows_apart)), **window)
    return Window(**WINDOW, **window)
