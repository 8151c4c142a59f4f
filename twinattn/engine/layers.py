"""A layer of a model is a mask over a storage: who may see whom, and where the keys are.

    mask       Causal, Window, Chunk, Entries                       plans a step
    storage    PagedStorage, QuantizedStorage, PairedStorage,
               LatentStorage, SelectedLatentStorage (`storages`),
               SharedStorage, CompressedStorage                     allocates a pool, writes, attends, selects keys

Every mask goes with every storage, but for keys that are selected, which are causal, and for entries, which have a
storage of their own. Equal layers share one plan per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from refattn.batch import Batch, Part
from refattn.entries import CompressedPlan
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import Trees
from twinattn.engine.cache_kinds import PAGES, WINDOWS, CacheKind, Extent
from twinattn.engine.compressed_storage import CompressedStorage, SharedStorage
from twinattn.engine.storages import (
    AnyPlan,
    CalibrationStats,
    LatentStorage,
    PagedStorage,
    Ranges,
    SelectedLatentStorage,
    Storage,
)
from twinattn.engine.twin import Twin

WORKSPACE = 16384  # context tokens whose keys and values are made at a time: 1.25 GiB in DeepSeek-V3's sizes, bfloat16
Lens = Sequence[tuple[int, int]]  # per request: new tokens, all tokens
Parts = tuple[tuple[slice, AnyPlan], ...]  # per part of a step: its query rows and their plan


@dataclass(frozen=True)
class Causal:
    """A query sees all tokens up to its own."""

    window: ClassVar[int] = 0  # what the model passes as `sliding_window`
    reach: ClassVar[int] = 0  # most tokens that a query sees, itself included; 0 for all
    takes_trees: ClassVar[bool] = True  # whether there is a plan of it for drafted trees
    splits_decodes: ClassVar[bool] = False  # whether decodes are planned apart from prefills

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> Plan:
        """Plan a step over all blocks."""
        return twin.chunked_prefill.plan(batch, block_size=block_size)


@dataclass(frozen=True)
class Window:
    """A query sees the last `window` tokens, its own included.

    Raises:
        ValueError: if there are none.
    """

    takes_trees: ClassVar[bool] = True
    splits_decodes: ClassVar[bool] = False
    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"model: expected a sliding_window of at least 1 token in such layers, got {self.window}")

    @property
    def reach(self) -> int:
        """Most tokens that a query sees."""
        return self.window

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> Plan:
        """Plan a step over trimmed tables."""
        return twin.sliding_window.plan(batch, window_size=(self.window - 1, 0), block_size=block_size)


@dataclass(frozen=True)
class Chunk:
    """A query sees the tokens of its own chunk of `reach` tokens, up to its own.

    Decodes are planned apart: a plan has as many virtual sequences for each request as its longest prefill needs, and
    its kernel is one for many query rows.
    """

    window: ClassVar[int] = 0
    takes_trees: ClassVar[bool] = False
    splits_decodes: ClassVar[bool] = True
    reach: int

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> Plan:
        """Plan a step over virtual sequences."""
        return twin.local.plan(batch, chunk_size=self.reach, block_size=block_size)


@dataclass(frozen=True)
class Entries:
    """A query sees the last `window` tokens, its own included, and complete entries of all tokens before.

    Attributes:
        window: tokens that a query sees as they are.
        ratio: tokens of an entry.
        overlap: whether entries overlap.
    """

    reach: ClassVar[int] = 0
    takes_trees: ClassVar[bool] = False
    splits_decodes: ClassVar[bool] = False
    window: int
    ratio: int
    overlap: bool

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> CompressedPlan:
        """Plan a step over both pools, with the entries of a block in the block of the same number."""
        plan: CompressedPlan = twin.compressed.plan(
            batch,
            ratio=self.ratio,
            overlap=self.overlap,
            window_size=(self.window - 1, 0),
            entry_table=batch.block_table,
            block_size=block_size,
            entry_block_size=block_size // self.ratio,
        )
        return plan


Mask = Causal | Window | Chunk | Entries
AnyStorage = Storage | SharedStorage


@dataclass(frozen=True)
class Layer:
    """A mask over a storage.

    Attributes:
        mask: who may see whom.
        storage: where the keys are.
    """

    mask: Mask
    storage: AnyStorage

    def __str__(self) -> str:
        return f"{type(self.mask).__name__} over {self.storage.kind}"

    @property
    def takes_cascades(self) -> bool:
        """Whether the plan of a step may be a cascade, which shows all tokens."""
        return not self.mask.reach and self.storage.takes_cascades

    @property
    def takes_trees(self) -> bool:
        """Whether it has a plan for drafted trees; all layers take chains."""
        return self.mask.takes_trees and self.storage.takes_trees

    @property
    def expands_prefills(self) -> bool:
        """Whether prefills compute keys and values from latents, where they can be told from decodes."""
        return isinstance(self.storage, LatentStorage) and self.storage.expands_prefills and not self.mask.reach

    @property
    def splits_decodes(self) -> bool:
        """Whether a step's decodes are planned apart from its prefills, and so have to come first in it."""
        return self.mask.splits_decodes or self.expands_prefills

    @property
    def fixed_scales(self) -> list[Tensor]:
        """The scales that do not lie in the pool, where there are tensors of them."""
        return [x for x in vars(self.storage).values() if isinstance(x, Tensor)]

    @property
    def extent(self) -> Extent:
        """What its caches depend on."""
        if isinstance(self.mask, Entries):
            return Extent(self.mask.window, self.mask.ratio, self.mask.overlap)
        return Extent(self.mask.reach)

    def kinds(self, num_pools: int) -> Sequence[CacheKind]:
        """Return the kind of cache in each of its pools, in order."""
        if isinstance(self.storage, SelectedLatentStorage | CompressedStorage):
            return self.storage.kinds[:num_pools]
        return [WINDOWS if self.mask.reach else PAGES] * num_pools

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None = None
    ) -> "Layer":
        """Return this layer, which is quantized, with scales on a device by the largest magnitudes."""
        assert not isinstance(self.storage, PagedStorage)  # unquantized pages have no scales
        return replace(self, storage=self.storage.calibrated(twin, amax, device, ranges))

    def pool_blocks(self, num_blocks: int, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Return how many blocks the layer's pool needs, where the sequences of a server have `num_blocks`.

        With fewer than those, the layer has a `WindowPool` of its own, which holds what the tokens of any step see and
        are themselves: `q` new tokens see the `reach - 1` before them. So many tokens in a row touch at most
        `(reach - 1 + q + 2 * block_size - 2) / block_size` blocks, and a step has at most `max_num_batched_tokens` of
        them, of at most `max_num_seqs` sequences.
        """
        if not self.mask.reach:
            return num_blocks
        seen = min(max_num_seqs, num_blocks) * (self.mask.reach - 1 + 2 * block_size - 2)
        return min(num_blocks, (seen + max_num_batched_tokens) // block_size)

    def plan(self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1) -> Parts:
        """Plan a step, for all layers that are equal to this one.

        Args:
            twin: the package that computes.
            batch: the lengths and blocks of the step.
            block_size: tokens in a block.
            lens: the new tokens and all tokens of each request, decodes before prefills; None where only the device
                knows.
            decode_len: most new tokens of a decode, its drafts included.
        """
        query_lens = [query_len for query_len, _ in lens or ()]
        parts: Sequence[Part] = [Part(batch, slice(None))]
        if self.splits_decodes and query_lens and min(query_lens) <= decode_len < max(query_lens):
            parts = twin.metadata.split_decodes_and_prefills(batch, query_lens, decode_len=decode_len)
        longest = max((seq_len - query_len for query_len, seq_len in lens or () if query_len > decode_len), default=0)

        def plan_part(part: Batch) -> AnyPlan:
            if lens is None or not self.expands_prefills or part.max_query_len <= decode_len:
                return self.mask.plan(twin, part, block_size)
            sizes = dict(block_size=block_size, workspace=max(WORKSPACE, part.num_seqs), max_context_len=longest)
            return twin.mla.plan_prefill(part, **sizes)

        return tuple((part.tokens, plan_part(part.batch)) for part in parts)

    def plan_trees(self, twin: Twin, batch: Batch, trees: Trees, block_size: int) -> Parts:
        """Plan a step whose new tokens are drafted trees, those of a prompt as a chain."""
        window_size = (self.mask.reach - 1, 0) if self.mask.reach else (-1, -1)
        plan = twin.speculative.plan(batch, block_size=block_size, trees=trees, window_size=window_size)
        return ((slice(None), plan),)

    def plan_spans(
        self, twin: Twin, batch: Batch, spans: Int32[Tensor, "b n 2"], num_tokens: int, block_size: int
    ) -> Parts:
        """Plan a step in which the tokens of a span see one another, as far as the mask looks back.

        Args:
            twin: the package that computes.
            batch: the lengths and blocks of the step; of a window pool, where a block that no query sees is -1.
            spans: the first and the last token of each, by sequence; -1 for none.
            num_tokens: query rows.
            block_size: tokens in a block.
        """
        assert batch.block_table is not None  # the engine's pools are in pages
        window_size = (self.mask.reach - 1, -1) if self.mask.reach else (-1, -1)
        seen = twin.interval.image_spans(batch, spans, num_tokens, window_size=window_size)
        some = replace(batch, block_table=batch.block_table.clamp(min=0))  # any block: no key of it is seen
        first = seen.first_visible if self.mask.reach else None
        ends = dict(first_visible=first, last_visible=seen.last_visible)
        return ((slice(None), twin.interval.plan(some, **ends, block_size=block_size)),)

    def attend(
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk dk"] | None,
        value: Float[Tensor, "t hk dv"] | None,
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        parts: Parts,
        options: AttentionOptions,
        positions: Int32[Tensor, "t k"] | None = None,
    ) -> Float[Tensor, "t h dout"]:
        """Write the new keys and values into the pool, if they are the layer's own and not None, and attend over it.

        Of latents, `key` is the latent and `value` the rotary key, each as one head. Where keys are selected, those at
        `positions` are seen.

        Raises:
            ValueError: for positions in a layer that selects no keys.
        """
        selects = isinstance(self.storage, SelectedLatentStorage | CompressedStorage)
        if positions is not None and not selects:
            raise ValueError(f"indices: expected none in a layer that sees all keys, {self}, got some")
        all_tokens = (query, key, value, positions) if selects else (query, key, value)
        if key is not None and value is not None:
            self.storage.write(twin, key, value, cache, slot_mapping)
        if len(parts) == 1:
            return self.storage.attend(twin, module, all_tokens, cache, parts[0][1], options)
        outs = []
        for rows, plan in parts:
            tokens = [None if x is None else x[rows] for x in all_tokens]
            outs.append(self.storage.attend(twin, module, tokens, cache, plan, options))
        return torch.cat(outs)
