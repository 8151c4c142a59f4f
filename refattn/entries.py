"""Compressed keys: the plan of a step (`CompressedPlan`), and the checks of calls.

A sequence of tokens has a second sequence beside it, that of its entries, one for each `ratio` tokens that are
complete. It is a batch of its own, so what works for tokens works for entries: lengths, a block table, slots, a plan.

    ratio 4       tokens    0 1 2 3 4 5 6 7 8 9 | 10 11 12        10 in the cache, 3 new ones
                  entries   0       1           | 2               2 in the cache, 1 new one, of tokens 8 to 11
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from refattn.batch import Batch, check_batch, check_block_table, check_lengths
from refattn.checks import check, check_flag, check_query, check_sizes, check_window, describe, same_device
from refattn.keys import Pages
from refattn.modes import refuse_gradients
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import FP8_FORMATS, ROUNDING, check_cache_scale


@dataclass(frozen=True, eq=False)
class CompressedPlan:
    """The entries that a step completes, and the two sets of keys that its queries see: a window, and entries.

    Attributes:
        batch: the lengths, and the block table of the pools with one row per token: keys of the window, and the rows
            from which entries are computed.
        block_size: tokens in a block of these pools.
        ratio: tokens of an entry.
        overlap: whether an entry is also computed from the `ratio` tokens before its own.
        window: the plan over the keys of the window.
        entries: the plan over the entries. Its query rows are those of `batch`; if each sees all entries that are
            complete at its position, an interval; if `selected`, one sequence per query row, in blocks of one entry.
        new: the new entries as a batch: as many query rows per sequence as entries become complete in this step, and
            the block table of the entries.
        entry_block_size: entries in a block.
        slots: the slot of each new entry in the pool of entries; -1 for padding rows.
        positions: the position of the first of its own tokens, for its rotation; 0 for padding rows.
        selected: whether `entries` has selected entries.
        row_blocks: the minimum number of blocks of the pool of rows; None if the tables are on a device.

    On a CPU the tables are checked here, once.

    Raises:
        ValueError: naming the argument that does not fit.
    """

    batch: Batch
    block_size: int
    ratio: int
    overlap: bool
    window: Plan
    entries: Plan
    new: Batch
    entry_block_size: int
    slots: Int64[Tensor, "_"]
    positions: Int64[Tensor, "_"]
    selected: bool = False
    row_blocks: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments, and the contents of the tables where they are on the host."""
        check_sizes(block_size=self.block_size, ratio=self.ratio, entry_block_size=self.entry_block_size)
        check_flag("overlap", self.overlap)
        check_flag("selected", self.selected)
        check_batch(self.batch)
        check_batch(self.new, name="new")
        for name in ("window", "entries"):
            if not isinstance(getattr(self, name), Plan) or getattr(self, name).block_size is None:
                raise ValueError(f"{name}: expected a Plan over pages, got {describe(getattr(self, name))}")
        check(slots=(self.slots, "int64 e"), positions=(self.positions, "int64 e"))
        check(seq_lens=(self.batch.seq_lens, "int32 b"), new_seq_lens=(self.new.seq_lens, "int32 b"))
        same_device(seq_lens=self.batch.seq_lens, slots=self.slots, positions=self.positions)
        object.__setattr__(self, "row_blocks", _check_row_blocks(self))


def _check_row_blocks(plan: CompressedPlan) -> int | None:
    """Check on a CPU that the rows of new entries have blocks, and return the minimum number of blocks of the pool."""
    table = check_block_table(plan.batch, block_size=plan.block_size)
    if not table.is_cpu:
        return None
    check_lengths(plan.new)
    columns = torch.arange(table.shape[1], device=table.device)
    first_entries = plan.new.seq_lens - plan.new.query_lens - (1 if plan.overlap else 0)
    begins, ends = first_entries.clamp(min=0).long() * plan.ratio, plan.new.seq_lens.long() * plan.ratio
    used = (columns >= (begins // plan.block_size)[:, None]) & (columns < -(-ends // plan.block_size)[:, None])
    used &= (plan.new.query_lens > 0)[:, None]
    wrong = used & (table < 0)
    if wrong.any():
        i, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: expected entries of at least 0 for the blocks of the rows from which sequence {i} computes "
            f"entries, got {int(table[i, column])} in column {column}"
        )
    return int(table.masked_fill(~used, -1).max()) + 1 if table.numel() else 0


def most_entries(num_tokens: int, num_seqs: int, ratio: int) -> int:
    """Return the most entries that some new tokens of some sequences complete: rows that are enough for any lengths."""
    return min(num_tokens, (num_tokens + num_seqs * (ratio - 1)) // ratio)


def check_compressed_plan(
    batch: Batch,
    *,
    ratio: int,
    overlap: bool,
    window_size: tuple[int, int],
    entry_table: Int32[Tensor, "b m"],
    block_size: int,
    entry_block_size: int,
) -> None:
    """Check the arguments of `compressed.plan`.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_sizes(ratio=ratio, block_size=block_size, entry_block_size=entry_block_size)
    check_flag("overlap", overlap)
    check_window(window_size)
    check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    check(seq_lens=(batch.seq_lens, "int32 b"), entry_table=(entry_table, "int32 b m"))
    if not entry_table.is_cpu or not batch.num_seqs:
        return
    lens = batch.seq_lens.long() // ratio
    i, blocks = int(lens.argmax()), -(-lens // entry_block_size)
    if blocks[i] > entry_table.shape[1]:
        raise ValueError(
            f"entry_table: expected at least {int(blocks[i])} columns for the {int(lens[i])} entries of sequence {i} "
            f"in blocks of {entry_block_size}, got {entry_table.shape[1]}"
        )
    columns = torch.arange(entry_table.shape[1], device=entry_table.device)
    wrong = (columns < blocks[:, None]) & (entry_table < 0)
    if wrong.any():
        i, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"entry_table: expected blocks of at least 0 for the entries of sequence {i}, got "
            f"{int(entry_table[i, column])} in column {column}"
        )


def check_is_compressed(plan: CompressedPlan, *, selected: bool | None = None) -> None:
    """Check the type of a plan, and that it has no selected entries if `selected` is False.

    Raises:
        ValueError: if it is another one.
    """
    if not isinstance(plan, CompressedPlan):
        raise ValueError(f"plan: expected a CompressedPlan, got {describe(plan)}")
    if selected is False and plan.selected:
        raise ValueError("plan: expected one from plan, with all entries, got one with selected entries")


def check_candidates(scores: Tensor, *, size: int, topk: int) -> None:
    """Check the arguments of `compressed.candidates`: scores `[t, s]`, and two positive numbers.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check(scores=(scores, "float32 t s"))
    check_sizes(size=size, topk=topk)


def check_compress(row_cache: Tensor, plan: CompressedPlan, bias: Tensor | None) -> tuple[int, int]:
    """Check the arguments of `compressed.compress`.

    Returns:
        The elements of a value, and of an entry.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_is_compressed(plan)
    sizes = check(row_cache=(row_cache, "number n p c"))
    parts, what = (4, "two halves of a value and two of its gate") if plan.overlap else (2, "a value and its gate")
    if not sizes["c"] or sizes["c"] % parts:
        raise ValueError(f"row_cache: expected rows of {what}, a multiple of {parts} elements, got c={sizes['c']}")
    if sizes["p"] != plan.block_size:
        raise ValueError(f"row_cache: expected blocks of {plan.block_size} tokens, as in the plan, got p={sizes['p']}")
    if plan.row_blocks is not None and plan.row_blocks > sizes["n"]:
        raise ValueError(
            f"row_cache: expected at least {plan.row_blocks} blocks, as the block table leads to block "
            f"{plan.row_blocks - 1}, got n={sizes['n']}"
        )
    same_device(row_cache=row_cache, seq_lens=plan.batch.seq_lens)
    width = sizes["c"] // 2
    if bias is not None:
        check({"ratio": plan.ratio, "c": width}, bias=(bias, "float ratio c"))
        same_device(row_cache=row_cache, bias=bias)
    return width, width // 2 if plan.overlap else width


def check_entries(entry_cache: Tensor, plan: CompressedPlan) -> None:
    """Check a pool of entries and its blocks against a plan.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_is_compressed(plan)
    sizes = check(entry_cache=(entry_cache, "n p d"))
    if sizes["p"] != plan.entry_block_size:
        raise ValueError(
            f"entry_cache: expected blocks of {plan.entry_block_size} entries, as in the plan, got p={sizes['p']}"
        )


def check_compressed(
    query: Tensor,
    cache: Tensor,
    entry_cache: Tensor,
    plan: CompressedPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    cache_scale: float,
    entry_scale: float,
) -> None:
    """Check the arguments of `compressed.attention`: queries, keys of the window and entries of one size.

    Each pool has the type of the query, or holds fp8 values under a scale. `entry_cache` is the pool as its plan has
    it, in blocks of one entry if these are selected.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    size = check_query(query)[2]
    for name, pool, its_plan, scale in (
        ("cache", cache, plan.window, cache_scale),
        ("entry_cache", entry_cache, plan.entries, entry_scale),
    ):
        holds_fp8 = isinstance(pool, Tensor) and pool.dtype in FP8_FORMATS
        check({"d": size}, **{name: (pool, "n p d", None if holds_fp8 else query.dtype)})
        check_cache_scale(pool, scale, name=name.replace("entry_cache", "entry") + "_scale")
        if holds_fp8:
            refuse_gradients(ROUNDING, **{name: pool})
        keys = Pages(pool[:, :, None], pool[:, :, None])
        keys.check(query, its_plan, options, out, return_lse, pool=name, types=(pool.dtype, pool.dtype))
    if options.alibi_slopes is not None:
        raise ValueError("alibi_slopes: expected None, as an entry has no position of its own, got slopes")
