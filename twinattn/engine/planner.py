"""How a step is planned: its tokens are copied to the device, and each kind of layer gets a plan.

Windows are planned by `sliding_window`, chunks by `local`, all else by `chunked_prefill`, or by `cascade` in a step
whose requests share so many blocks that it is worth reading them once (`cost_model`).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from refattn.batch import Batch, Prefix
from refattn.trees import Trees
from twinattn.engine.block_pool import Span
from twinattn.engine.cost_model import Machine, worthwhile_prefixes
from twinattn.engine.layer_pools import LayerPools, Step
from twinattn.engine.layers import Lens
from twinattn.engine.request import Request, StepTokens, fill_in
from twinattn.engine.state_layers import StateParts, plan_states
from twinattn.engine.state_pool import StatePool
from twinattn.engine.twin import Twin


class DeviceTokens(NamedTuple):
    """The new tokens of a step, on the device.

    Attributes:
        batch: the lengths and blocks of the requests.
        input_ids: the new tokens of all requests, padding included.
        logits_rows: the query rows whose logits are wanted.
        trees: the new tokens of all requests as trees; None if all drafts are chains.
        lens: the new tokens and all tokens of each request; None if there is padding, or only the device knows.
        states: the plans of all layers that keep a state.
    """

    batch: Batch
    input_ids: Int64[Tensor, "t"] | Int32[Tensor, "t"]
    logits_rows: Int64[Tensor, "rows"]
    trees: Trees | None = None
    lens: Lens | None = None
    states: StateParts = ()


class StepPlanner:
    """Makes the inputs of a model, with a plan for all equal layers among them.

    Attributes:
        decode_len: the most new tokens of a decode: one, and the chain of its drafts.

    Args:
        model: the model.
        twin: the package that computes.
        pools: of the model's layers.
        states: the slots of layers that keep a state; None without such layers.
        block_size: tokens in a block.
        decode_len: as above.
    """

    def __init__(
        self, model: Any, twin: Twin, pools: LayerPools, states: StatePool | None, *, block_size: int, decode_len: int
    ) -> None:
        self._model, self._twin, self._pools, self._states = model, twin, pools, states
        self._block_size, self.decode_len = block_size, decode_len

    def in_order(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """Bring the requests of a step into the order of its rows.

        Where a layer plans decodes apart they come before prefills: each kind is one slice of query rows then.
        """
        if not self._pools.state_layers and not any(layer.splits_decodes for layer in self._pools.layers):
            return scheduled
        requests, counts = list(scheduled), list(scheduled.values())
        order = self._twin.metadata.order_decodes_first(counts, decode_len=self.decode_len)
        return {requests[i]: counts[i] for i in order}

    def copy(self, tokens: StepTokens) -> DeviceTokens:
        """Copy the new tokens of a step to the device."""
        device, trees = self._model.device, None
        lens = tokens.query_lens, tokens.seq_lens
        batch = self._twin.metadata.make_batch(*lens, tokens.block_tables, device=device)
        if tokens.parents is not None:
            trees = self._twin.speculative.make_trees(tokens.parents, device=device)
        input_ids, rows = (_on_device(numbers, device) for numbers in (tokens.input_ids, tokens.logits_rows))
        if tokens.chosen is not None:
            input_ids = fill_in(input_ids, tokens.chosen)
        states: StateParts = ()
        if self._states is not None:
            slots = [self._states.slots_of(request, tokens.chosen is not None) for request in tokens.requests]
            pools = list(self._pools.state_caches.values())
            states = plan_states(self._twin, batch, slots, tokens.query_lens, self._states, pools)
        return DeviceTokens(batch, input_ids, rows, trees, list(zip(*lens, strict=True)), states)

    def inputs_of(self, tokens: DeviceTokens, prefixes: Sequence[Prefix] = ()) -> dict[str, Any]:
        """Make the inputs of the model from tensors, without waiting for the device: a graph may capture it.

        Args:
            tokens: the new tokens, from `copy` or a runner.
            prefixes: the shared keys that a cascade reads once.
        """
        num_tokens = len(tokens.input_ids)
        if tokens.trees is None:
            positions = self._twin.metadata.positions(tokens.batch, num_tokens)
        else:
            positions = self._twin.speculative.positions(tokens.batch, tokens.trees, num_tokens)
        step = self.plan(tokens.batch, num_tokens, prefixes, tokens.lens, tokens.trees)
        return dict(
            input_ids=tokens.input_ids[None],
            position_ids=positions[None],
            logits_to_keep=tokens.logits_rows,
            step=replace(step, states=tokens.states, positions=positions),
        )

    def plan(
        self,
        batch: Batch,
        num_tokens: int,
        prefixes: Sequence[Prefix] = (),
        lens: Lens | None = None,
        trees: Trees | None = None,
    ) -> Step:
        """Plan a step, without waiting for the device.

        Args:
            batch: the lengths and blocks of the requests.
            num_tokens: query rows, padding included.
            prefixes: the shared keys that a cascade reads once.
            lens: as in `DeviceTokens`.
            trees: likewise.
        """
        slots = self._twin.metadata.slot_mapping(batch, num_tokens, block_size=self._block_size)
        step = Step(batch, {}, {})
        for layer in dict.fromkeys(self._pools.layers):
            pool = self._pools.window_pools.get(layer)
            step.slot_mappings[layer] = slots if pool is None else pool.translate_slots(slots)
            where = batch if pool is None else pool.translate_batch(batch)
            if trees is None:
                step.plans[layer] = layer.plan(self._twin, where, self._block_size, lens, self.decode_len)
            else:
                step.plans[layer] = layer.plan_trees(self._twin, where, trees, self._block_size)
        if prefixes:
            cascade = self._twin.cascade.plan(batch, prefixes=prefixes, block_size=self._block_size)
            step.plans.update({layer: ((slice(None), cascade),) for layer in step.plans if layer.takes_cascades})
        return step

    def plan_spans(self, step: Step, num_tokens: int, spans: Sequence[Sequence[Span]]) -> Step:
        """Plan a step anew whose requests have spans.

        Args:
            step: from `plan`.
            num_tokens: query rows.
            spans: of each request.
        """
        most = max(map(len, spans))
        rows = [[*its_spans, *[(-1, -1)] * (most - len(its_spans))] for its_spans in spans]
        device = step.batch.device
        table = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        plans = {}
        for layer in step.plans:
            pool = self._pools.window_pools.get(layer)
            where = step.batch if pool is None else pool.translate_batch(step.batch)
            plans[layer] = layer.plan_spans(self._twin, where, table, num_tokens, self._block_size)
        return replace(step, plans=plans)

    def find_prefixes(self, tokens: StepTokens, machine: Machine) -> list[Prefix]:
        """Return the shared prefixes of a step for which a cascade is worth it on a machine."""
        lens = tokens.query_lens, tokens.seq_lens
        layer = next((layer for layer in self._pools.layers if layer.takes_cascades), None)
        if layer is None or tokens.parents is not None or tokens.spans is not None:
            return []
        if layer.expands_prefills and max(tokens.query_lens, default=0) > self.decode_len:
            return []  # a prefill that computes keys and values reads its context once anyway
        full, dtype = layer.storage, self._model.dtype
        found = self._twin.cascade.find_prefixes(*lens, tokens.block_tables, block_size=self._block_size)
        return worthwhile_prefixes(
            *lens,
            found,
            num_heads=self._model.config.get_text_config().num_attention_heads,
            num_kv_heads=full.num_kv_heads,
            head_size=full.head_size,
            element_size=ceil(full.bytes_per_token(dtype) / (2 * full.num_kv_heads * full.head_size)),
            machine=machine,
        )


def _on_device(numbers: Sequence[int], device: torch.device) -> Int64[Tensor, "n"]:
    """Copy numbers to the device, without waiting for what it computes."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
