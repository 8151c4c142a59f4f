"""The pools of all layers: where keys and states are, and what each layer of the model does with its own in a pass.

    attend        an attention writes its keys and values, and attends over all
    select        an indexer writes its index keys, and selects the keys that its queries see
    compress      a compressor writes its rows and entries, and selects the entries that its queries see
    recurrence    a layer that keeps a state reads and writes its slots

A layer with a window or with chunks has a smaller pool (`WindowPool`) if no step can need all of its blocks: a block is
freed as soon as no later token can see it. A layer that keeps a state has no keys at all, and slots in a `StatePool`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from einops import reduce
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from refattn.batch import Batch
from refattn.entries import CompressedPlan
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.steps import to_device
from refattn.trees import Accepted, Trees
from twinattn.engine import arguments, models
from twinattn.engine.cache_kinds import BLOCK, CacheKind
from twinattn.engine.compressed_storage import CompressedStorage
from twinattn.engine.index_modules import IndexTokens
from twinattn.engine.kv_cache_dtype import KEY_RANGE, VALUE_RANGE
from twinattn.engine.layers import Layer, Parts
from twinattn.engine.ring_pool import FEW, RING_SIZE, RingPool
from twinattn.engine.state_layers import Recurrence, StateLayer, StateParts, StatePools
from twinattn.engine.state_pool import StatePool
from twinattn.engine.storages import CalibrationStats, SelectedLatentStorage
from twinattn.engine.twin import Twin
from twinattn.engine.window_pool import WindowPool


@dataclass(frozen=True)
class Step:
    """A step, as all layers of a model see it.

    Attributes:
        batch: the lengths and blocks of its requests.
        slot_mappings: where the new tokens go, in the pool of each kind of layer.
        plans: the plans of each kind of layer, with the query rows of each.
        states: the plans of all layers that keep a state, with their query rows.
        positions: of the new tokens, for layers that scale by them.
    """

    batch: Batch
    slot_mappings: dict[Layer, Int64[Tensor, "t"]]
    plans: dict[Layer, Parts]
    states: StateParts = ()
    positions: Int64[Tensor, "t"] | None = None


class Cache(NamedTuple):
    """A pool of a layer that owns it.

    Attributes:
        kind: what it holds, and what of it has to be there for a request to go on.
        layer: the layer; of two layers that are equal, each has pools of its own.
        pool: by blocks or by slots.
    """

    kind: CacheKind
    layer: Layer | StateLayer
    pool: Tensor


@lru_cache(maxsize=64, typed=True)
def _plain_options(scale: float, softcap: float, batch_invariant: bool) -> AttentionOptions:
    """Make the options of a layer without tensors once: they are checked each time that they are made."""
    return AttentionOptions(scale, softcap, batch_invariant=batch_invariant)


class LayerPools:
    """The pools of a model's layers.

    Attributes:
        layers: those with attention; their scales may be set in a pass.
        owners: for each of them, the one whose pool it reads: itself, or an earlier one.
        places: where each is among them, by its index in the model.
        caches: the pool of each.
        window_pools: the blocks of those with a smaller pool, one for all equal ones.
        state_layers: the layers that keep a state, by their index in the model.
        state_caches: their pools, by the same index.
        calculates_scales: whether a pass sets the scales of fp8 by its keys and values.

    Args:
        model: the model.
        twin: the package that computes.
        layers: those with attention.
        state_layers: those that keep a state.
        num_blocks: blocks of all requests.
        block_size: tokens in a block.
        limits: `max_num_batched_tokens` and `max_num_seqs` of the engine.
        batch_invariant: whether no bit of a row may depend on what else is in the batch.

    Raises:
        torch.OutOfMemoryError: if a GPU has no room for the pools.
    """

    def __init__(
        self,
        model: Any,
        twin: Twin,
        layers: list[Layer],
        state_layers: dict[int, StateLayer],
        *,
        num_blocks: int,
        block_size: int,
        limits: Mapping[str, int],
        batch_invariant: bool,
    ) -> None:
        config = model.config.get_text_config()
        self.layers, self.state_layers = layers, state_layers
        self.owners = models.owners_of(config)
        self.places = {index: place for place, index in enumerate(models.attention_layers(config))}
        self.calculates_scales = False
        self._twin, self._block_size, self._batch_invariant = twin, block_size, batch_invariant
        self._where = dict(dtype=model.dtype, device=model.device)
        self._attended: list[int] = []  # the layers whose attention this pass has computed
        self._folded: list[int] = []  # and those whose states
        self._chosen: dict[int, Tensor | None] = {}  # and the entries that were selected for layers to attend to
        pool_blocks = {layer: layer.pool_blocks(num_blocks, block_size, **limits) for layer in layers}
        self.window_pools = {
            layer: WindowPool(count, num_blocks, window_size=(layer.mask.reach - 1, 0), block_size=block_size)
            for layer, count in pool_blocks.items()
            if count < num_blocks
        }
        self.caches: list[Any] = []
        self.state_caches: dict[int, StatePools] = {}
        try:
            for owner, layer in zip(self.owners, layers, strict=True):
                own = owner == len(self.caches)
                blocks = pool_blocks[layer], block_size
                self.caches.append(layer.storage.allocate(twin, *blocks, **self._where) if own else self.caches[owner])
        except RuntimeError as error:
            arguments.check_out_of_memory(error)
            owning = [layers[owner] for owner in sorted({*self.owners})]
            size = sum(block_size * pool_blocks[x] * x.storage.bytes_per_token(model.dtype) for x in owning)
            raise torch.OutOfMemoryError(
                f"num_blocks: expected a pool that fits into the memory of {model.device}, got {num_blocks} blocks of "
                f"{block_size} tokens, which are {size / 2**30:.3g} GiB. {error}"
            ) from error

    def allocate_states(
        self,
        most: int,
        num_kept: int | None,
        ring_size: int | None,
        *,
        block_size: int,
        decode_len: int,
        ahead: bool,
    ) -> StatePool | None:
        """Allocate the pools of the layers that keep a state, and return their slots; None without such layers.

        Args:
            most: requests that run at once.
            num_kept: states that are kept besides, as in `Engine`.
            ring_size: inputs that are replayed instead of states that are written; 0 for none, None for the default.
            block_size: tokens in a block.
            decode_len: the most new tokens of a decode.
            ahead: whether steps are launched before the one before is read.

        Raises:
            ValueError: if `num_kept` or `ring_size` is not an int of at least 0, or the model keeps no states.
            torch.OutOfMemoryError: if a GPU has no room for them.
        """
        for name, size in (("num_kept_states", num_kept), ("state_ring_size", ring_size)):
            if size is not None and (type(size) is not int or size < 0):
                raise ValueError(f"{name}: expected None or an int of at least 0, got {size!r}")
            if size is not None and not self.state_layers:
                raise ValueError(f"{name}: expected None without layers that keep a state, got {size}")
        if not self.state_layers:
            return None
        kept, sizes = most if num_kept is None else num_kept, dict(block_size=block_size, decode_len=decode_len)
        few, size = 0, ring_size
        if size is None:
            few, size = FEW, max(RING_SIZE, decode_len) if most > FEW and self._replays_inputs else 0
        rings = RingPool(most, kept, ring_size=size, few=few, ahead=ahead, **sizes) if size else None
        slots = StatePool(most, kept, ahead=ahead, rings=rings, **sizes)
        try:
            for index, layer in self.state_layers.items():
                self.state_caches[index] = layer.allocate(self._twin, slots, **self._where)
        except RuntimeError as error:
            arguments.check_out_of_memory(error)
            size = sum(layer.bytes_per_slot(self._where["dtype"]) for layer in self.state_layers.values())
            raise torch.OutOfMemoryError(
                f"max_num_seqs: expected states that fit into the memory of {self._where['device']}, got "
                f"{slots.num_slots} slots of {size / 2**20:.3g} MiB. {error}"
            ) from error
        return slots

    @property
    def _replays_inputs(self) -> bool:
        """Whether states are read and inputs pushed unless the engine is asked for something else: where it is faster.

        That was measured on a GPU, by our kernels.
        """
        return self._where["device"].type == "cuda" and getattr(self._twin.package, "__name__", None) == "fastattn"

    @property
    def all_caches(self) -> list[Cache]:
        """All that the engine keeps of its requests on the device, without layers that read the pool of another one."""
        found = []
        for i, (owner, layer) in enumerate(zip(self.owners, self.layers, strict=True)):
            pools = _pools_of(self.caches[i]) if owner == i else ()
            found += [Cache(kind, layer, pool) for kind, pool in zip(layer.kinds(len(pools)), pools, strict=True)]
        for index, state_layer in self.state_layers.items():
            found += [Cache(kind, state_layer, pool) for kind, pool in self.state_caches[index].by_kind]
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all pools, scales included, as the tensors have them."""
        tensors = [cache.pool for cache in self.all_caches]
        tensors += [x for layer in self.layers for x in layer.fixed_scales]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    def begin_pass(self) -> None:
        """Forget which layers have computed something."""
        self._attended.clear()
        self._folded.clear()
        self._chosen.clear()

    def end_pass(self) -> None:
        """Check that each layer has computed once what it has to in a pass.

        Raises:
            ValueError: naming those that have.
        """
        if sorted(self._attended) != sorted(self.places):
            raise ValueError(
                f"model: expected every one of {len(self.layers)} layers to attend once, got layers {self._attended}"
            )
        if sorted(self._folded) != sorted(self.state_layers):
            raise ValueError(
                f"model: expected every one of the layers {[*self.state_layers]} to change its state once, got layers "
                f"{self._folded}"
            )

    def attend(
        self,
        module: Any,
        query: Float[Tensor, "1 h t d"],
        key: Float[Tensor, "1 hk t dk"],
        value: Float[Tensor, "1 hk t dv"],
        *,
        step: Step,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Float[Tensor, "h"] | None = None,
        alibi_slopes: Float[Tensor, "h"] | None = None,
        indices: Int32[Tensor, "1 t k"] | None = None,
        **others: Any,
    ) -> Float[Tensor, "1 t h dout"]:
        """Compute the attention of a layer: write its keys and values into its pool, and attend on its path.

        Each layer checks its own sizes.

        Args:
            module: the layer's attention in the model.
            query: of all new tokens; transformers has the heads in front, and a batch of one.
            key: of all new tokens; of a latent layer their latents, as one head.
            value: of all new tokens; of a latent layer their rotary keys, as one head.
            step: the batch and the plans of the step.
            scaling: the softmax scale.
            sliding_window: how many tokens each one sees, itself included; None for all.
            softcap: bound on the scores.
            s_aux: the sinks.
            alibi_slopes: one per query head; None for no ALiBi.
            indices: from `select`, of this layer or an earlier one; None where all keys are seen.
            others: other arguments that transformers passes, of those in `models.HARMLESS`.

        Returns:
            The outputs in the layout of transformers.

        Raises:
            ValueError: for an unknown option, or a window other than the layer's.
        """
        models.check_options(others)
        index: Any = self.places[module.layer_idx]
        self._attended.append(module.layer_idx)
        if self.calculates_scales and self.owners[index] == index:
            self._calculate_scales(index, key, value)
        layer = self.layers[index]
        if (sliding_window or 0) != layer.mask.window:
            raise ValueError(
                f"sliding_window: expected {layer.mask.window or None} in layer {module.layer_idx}, {layer}, "
                f"got {sliding_window}"
            )
        scale = module.scaling if scaling is None else scaling
        if alibi_slopes is None and s_aux is None:
            options = _plain_options(scale, softcap or 0.0, self._batch_invariant)
        else:
            options = AttentionOptions(scale, softcap or 0.0, alibi_slopes, s_aux, self._batch_invariant)
        tokens: list[Tensor | None] = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]  # [t, h, d]
        if self.owners[index] != index:  # its keys are those of an earlier layer, which has written them
            tokens[1:] = [None, None]
        slots, plan = step.slot_mappings[layer], step.plans[layer]
        positions = self._chosen.get(module.layer_idx) if indices is None else indices[0]
        out = layer.attend(self._twin, module, *tokens, self.caches[index], slots, plan, options, positions)
        return out.unsqueeze(0).contiguous()  # [1, t, h, d], as transformers' own: some models view it

    def _calculate_scales(self, index: int, key: Float[Tensor, "1 hk t dk"], value: Float[Tensor, "1 hk t dv"]) -> None:
        """Set the scales of a layer, and of those that read its pool, by the new keys and values.

        NaN and infinity do not count: they are the fault of one request, which ends in an error.
        """
        sizes = (x.float().abs().nan_to_num(nan=0.0, posinf=0.0) for x in (key, value))
        amax = CalibrationStats(*(reduce(x, "1 hk t d -> hk d", "max") for x in sizes))
        for i, owner in enumerate(self.owners):
            if owner == index:
                ranges = KEY_RANGE, VALUE_RANGE
                self.layers[i] = self.layers[i].calibrated(self._twin, amax, self._where["device"], ranges)

    def select(self, module: Any, tokens: IndexTokens, *, step: Step) -> Int32[Tensor, "t k"]:
        """Write the index keys of a layer into its pool, and select the keys that its queries are to see.

        Args:
            module: the layer's indexer in the model.
            tokens: what the indexer makes of the new tokens.
            step: the batch and the plans of the step.

        Returns:
            Positions, -1 past the last, for `attend`.
        """
        index: Any = self.places[module.layer_idx]
        layer = self.layers[index]
        ((_, plan),) = step.plans[layer]  # they are not planned in parts
        assert isinstance(layer.storage, SelectedLatentStorage) and isinstance(plan, Plan)
        return layer.storage.select(self._twin, tokens, self.caches[index], step.slot_mappings[layer], plan)

    def compress(
        self,
        module: Any,
        layer_idx: int,
        hidden_states: Float[Tensor, "1 t width"],
        query_latent: Float[Tensor, "1 t r"],
        position_ids: Int64[Tensor, "1 t"],
        *,
        step: Step,
    ) -> None:
        """Write the new rows of a layer and the entries that they complete, and note which entries its queries see.

        Args:
            module: the layer's compressor in the model.
            layer_idx: the layer.
            hidden_states: of the new tokens.
            query_latent: the latents that the layer makes its queries of.
            position_ids: of the new tokens.
            step: the batch and the plans of the step.
        """
        index: Any = self.places[layer_idx]
        layer = self.layers[index]
        ((_, plan),) = step.plans[layer]  # they are not planned in parts
        assert isinstance(layer.storage, CompressedStorage) and isinstance(plan, CompressedPlan)
        tokens = hidden_states, query_latent, position_ids
        slots = step.slot_mappings[layer]
        self._chosen[layer_idx] = layer.storage.compress(self._twin, module, *tokens, self.caches[index], slots, plan)

    def recurrence(self, module: Any, step: Step, **others: Any) -> Recurrence:
        """Return what a layer that keeps a state computes with in a step.

        Args:
            module: the layer's module in the model.
            step: the plans of the step.
            others: other arguments that transformers passes, of those in `models.HARMLESS`.

        Raises:
            ValueError: for an unknown option.
        """
        models.check_options(others)
        self._folded.append(module.layer_idx)
        return Recurrence(self._twin, self.state_caches[module.layer_idx], step.states)

    def copy_blocks(self, copies: Mapping[WindowPool | None, Sequence[tuple[int, int]]]) -> None:
        """Copy blocks in the pools of all layers that own one, before a step writes to the copies.

        Args:
            copies: of each window pool, and under None of the full one: pairs of a block and its copy.
        """
        for layer in dict.fromkeys(self.layers):
            pairs = torch.tensor(copies[self.window_pools.get(layer)])
            self._twin.kv_cache.copy_blocks(self._pools_of(layer), to_device(pairs, self._where["device"]))

    def _pools_of(self, layer: Layer) -> list[Tensor]:
        """Return the pools of all layers that are equal to one: whatever lies in its blocks."""
        return [cache.pool for cache in self.all_caches if cache.kind.unit == BLOCK and cache.layer == layer]

    def compact(self, batch: Batch, trees: Trees, accepted: Accepted) -> None:
        """Move the keys of accepted drafts to where the next step looks for them; of chains they are there already.

        Args:
            batch: the lengths and blocks of the requests, on the device.
            trees: their new tokens, on the host.
            accepted: those that were accepted, on the host.
        """
        node = torch.arange(trees.max_len)
        if bool(((accepted.nodes < 0) | (accepted.nodes == node)).all()):
            return
        here = Trees(trees.parents.to(batch.device), trees.lens.to(batch.device))
        there = Accepted(*(tensor.to(batch.device) for tensor in accepted))
        for layer in dict.fromkeys(self.layers):
            pool = self.window_pools.get(layer)
            where = batch if pool is None else pool.translate_batch(batch)
            self._twin.speculative.compact(self._pools_of(layer), where, here, there, block_size=self._block_size)


def _pools_of(cache: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the pools of a layer, by blocks: keys and values, scales besides, one of latents, or the four of pairs."""
    if isinstance(cache, tuple):
        return cache
    return (cache,) if cache.ndim == 3 else tuple(pool for half in cache for pool in half)
