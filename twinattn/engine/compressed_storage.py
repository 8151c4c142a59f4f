"""Where DeepSeek-V4 keeps its keys: those of a window, rows, and the entries that are computed from them.

SharedStorage        keys that are their values, of one head
CompressedStorage    and entries beside them, in the same blocks
"""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from refattn.entries import CompressedPlan
from refattn.options import AttentionOptions
from twinattn.engine import compressed_modules
from twinattn.engine.cache_kinds import ENTRIES, ROWS, WINDOWS, CacheKind
from twinattn.engine.storages import AnyPlan, CalibrationStats, Ranges, Tokens, largest_numbers
from twinattn.engine.twin import Twin


@dataclass(frozen=True)
class SharedStorage:
    """Keys that are their values, of one head for all query heads.

    Attributes:
        head_size: elements of a key.
        dtype: of the pool of keys, and of that of entries: fp8; None for the type of the model.
        cache_scale: of keys in fp8: 1, or if it is calibrated, what makes the largest of them the largest number of the
            format. No plan depends on it. Entries are normed, and have a scale of 1.
    """

    kind: ClassVar[str] = "SharedKeys"
    takes_cascades: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = False
    num_kv_heads: ClassVar[int] = 1
    head_size: int
    dtype: torch.dtype | None = field(default=None, kw_only=True)
    cache_scale: float = field(default=1.0, compare=False, kw_only=True)

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None
    ) -> "SharedStorage":
        """Return this storage with a scale by the largest key."""
        largest = float(amax.key.max())
        return replace(self, cache_scale=largest / (ranges or largest_numbers(self.dtype))[0] or 1.0)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pool of a model of a type."""
        return self.head_size * (self.dtype or dtype).itemsize

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Allocate a pool of `num_blocks` x `block_size` tokens."""
        return (torch.zeros(*blocks, self.head_size, dtype=self.dtype or dtype, device=device),)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Write new keys into their pool."""
        twin.mla.write(key[:, 0], key[:, 0, :0], cache[0], slot_mapping, cache_scale=self.cache_scale)

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h d"]:
        """Attend over the pool under a plan."""
        sizes = dict(latent_rank=self.head_size, cache_scale=self.cache_scale)
        return twin.mla.attention(tokens[0], cache[0], plan, options, **sizes)


@dataclass(frozen=True)
class CompressedStorage(SharedStorage):
    """Keys of a window, and entries of `ratio` tokens beside them, with the rows that entries are computed from.

    All pools have the blocks of the tokens: a block of them has the keys and rows of its tokens, and their entries. So
    whatever happens to a block happens to all, and nothing is kept outside of blocks. Keys before the window and rows
    of entries that are complete are not freed.

    Attributes:
        ratio: tokens of an entry, which divides the block size.
        overlap: whether entries overlap.
        topk: entries that a query sees, at most; 0 for all.
        index_size: elements of an index key; 0 without an indexer.
        kinds: what its pools hold; the last two are those of the indexer.
    """

    kind: ClassVar[str] = "CompressedKeys"
    kinds: ClassVar[tuple[CacheKind, ...]] = (
        WINDOWS,
        ROWS,
        ENTRIES,
        ROWS,
        ENTRIES,
    )
    ratio: int = field(kw_only=True)
    overlap: bool = field(kw_only=True)
    topk: int = field(kw_only=True)
    index_size: int = field(kw_only=True)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pools of a model of a type, its part of an entry included, rounded up."""
        of_rows = 2 * (1 + self.overlap) * (self.head_size + self.index_size)
        of_both = (of_rows + self.index_size / self.ratio) * dtype.itemsize
        return ceil((1 + 1 / self.ratio) * super().bytes_per_token(dtype) + of_both)

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Allocate the pools of keys, of rows and entries, and of rows and entries of index keys if there are any.

        Raises:
            ValueError: if the ratio does not divide the block size.
        """
        num_blocks, block_size = blocks
        if block_size % self.ratio:
            raise ValueError(
                f"block_size: expected a multiple of {self.ratio}, the tokens of an entry, got {block_size}"
            )
        pools = list(super().allocate(twin, *blocks, dtype=dtype, device=device))
        for size in (self.head_size, self.index_size) if self.index_size else (self.head_size,):
            width = 2 * (1 + self.overlap) * size
            for shape in ((num_blocks, block_size, width), (num_blocks, block_size // self.ratio, size)):
                pools.append(torch.zeros(shape, dtype=dtype, device=device))
        pools[2] = pools[2].to(self.dtype or dtype)  # rows, and what an indexer scores, are not quantized
        return tuple(pools)

    def compress(
        self,
        twin: Twin,
        module: Any,
        hidden_states: Float[Tensor, "1 t width"],
        query_latent: Float[Tensor, "1 t r"],
        position_ids: Int64[Tensor, "1 t"],
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: CompressedPlan,
    ) -> Int32[Tensor, "t k"] | None:
        """Write new rows and the entries that they complete; return the entries that each query sees, None for all."""
        self._write_entries(twin, module, hidden_states, cache[1], cache[2], slot_mapping, plan)
        if not self.index_size:
            return None
        indexer = module.indexer
        self._write_entries(twin, indexer, hidden_states, cache[3], cache[4], slot_mapping, plan)
        query, weights = compressed_modules.index_queries(indexer, hidden_states, query_latent, position_ids)
        scores = twin.sparse.scores(query, weights, cache[4], plan.entries)
        return twin.sparse.select(scores, max(1, min(self.topk, scores.shape[1])))

    def _write_entries(
        self,
        twin: Twin,
        module: Any,
        hidden_states: Float[Tensor, "1 t width"],
        rows: Float[Tensor, "n p c"],
        entries: Float[Tensor, "n p2 d"],
        slot_mapping: Int64[Tensor, "t"],
        plan: CompressedPlan,
    ) -> None:
        """Write the rows of new tokens, and the entries that they complete."""
        twin.mla.write(*compressed_modules.rows_of(module, hidden_states), rows, slot_mapping)
        new = twin.compressed.compress(rows, plan, bias=module.position_bias)
        new = compressed_modules.finish(module, new, plan.positions)
        twin.mla.write(new, new[:, :0], entries, plan.slots)

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h d"]:
        """Attend over the window and the entries under a plan."""
        query, _, _, positions = tokens
        assert isinstance(plan, CompressedPlan)
        if positions is not None:
            plan = twin.compressed.select_entries(plan, positions)
        return twin.compressed.attention(query, cache[0], cache[2], plan, options, cache_scale=self.cache_scale)
