"""Kinds of layers: what each allocates, writes, plans and attends, on the paths of whichever twin computes.

A layer is known by its path and by what its plan takes, so layers that are equal share one plan per step.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refattn.interface import AttentionOptions, Batch, CascadePlan, Part, Plan


class Twin:
    """The package that computes, by its modules: each is imported by name when it is first needed.

    Args:
        package: `refattn`, `fastattn`, or anything with modules of those names.
    """

    def __init__(self, package: Any) -> None:
        self.package = package

    def __getattr__(self, module: str) -> Any:
        """Return a module of the package."""
        found = getattr(self.package, module, None) or importlib.import_module(f"{self.package.__name__}.{module}")
        setattr(self, module, found)
        return found


@dataclass(frozen=True)
class Layer:
    """A layer that attends to all tokens before it, over the paged cache.

    Attributes:
        num_kv_heads: key heads, `hk`.
        head_size: elements of a key and of a value, `d`.
    """

    num_kv_heads: int
    head_size: int

    @property
    def window(self) -> int:
        """Tokens that a query sees, itself included; 0 for all."""
        return 0

    def pool_blocks(self, num_blocks: int, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Return how many blocks the layer's pool needs, where the sequences of a server have `num_blocks`.

        With fewer than those, the layer has a `WindowPool` of its own.
        """
        return num_blocks

    def allocate(
        self, twin: Twin, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the layer's pool."""
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_size)
        return twin.kv_cache.allocate(*sizes, dtype=dtype, device=device)

    def plan(self, twin: Twin, batch: Batch, block_size: int, query_lens: Sequence[int] | None = None) -> Plan:
        """Plan a step, for all layers that are equal to this one.

        Args:
            twin: the package that computes.
            batch: the lengths and blocks of the step.
            block_size: tokens in a block.
            query_lens: the new tokens of each request, decodes before prefills; None where only the device knows.
        """
        plan: Plan = twin.chunked_prefill.plan(batch, block_size=block_size)
        return plan

    def attend(
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"],
        value: Float[Tensor, "t hk dv"],
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: Plan | CascadePlan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h dv"]:
        """Write the new keys and values into the pool, and attend over it."""
        twin.kv_cache.write(key, value, *cache, slot_mapping)
        path = twin.cascade if isinstance(plan, CascadePlan) else twin.chunked_prefill
        out: Tensor = path.attention(query, *cache, plan, options)
        return out


@dataclass(frozen=True)
class WindowLayer(Layer):
    """A layer whose tokens see the last few only.

    Attributes:
        window: tokens that a query sees, itself included.
    """

    window: int = 0

    def __post_init__(self) -> None:
        """Check the window.

        Raises:
            ValueError: if there is none.
        """
        if self.window < 1:
            raise ValueError(f"model: expected a sliding_window of at least 1 token in such layers, got {self.window}")

    def pool_blocks(self, num_blocks: int, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Return how many blocks hold what the tokens of any step see and are themselves.

        `q` new tokens see the `window - 1` before them. So many tokens in a row touch at most
        `(window - 1 + q + 2 * block_size - 2) / block_size` blocks, and a step has at most `max_num_batched_tokens` of
        them, of at most `max_num_seqs` sequences.
        """
        seen = min(max_num_seqs, num_blocks) * (self.window - 1 + 2 * block_size - 2)
        return min(num_blocks, (seen + max_num_batched_tokens) // block_size)

    def plan(self, twin: Twin, batch: Batch, block_size: int, query_lens: Sequence[int] | None = None) -> Plan:
        """Plan a step over trimmed tables."""
        plan: Plan = twin.sliding_window.plan(batch, window_size=(self.window - 1, 0), block_size=block_size)
        return plan


class LocalPlan(NamedTuple):
    """The plans of a step's decodes and of its prefills, and the query rows of each."""

    parts: tuple[tuple[slice, Plan], ...]


@dataclass(frozen=True)
class LocalLayer(Layer):
    """A layer whose tokens see their own chunk only.

    The decodes of a step and its prefills are planned apart: a plan has as many virtual sequences for each request as
    its longest prefill needs, and its kernel is one for many query rows.

    Attributes:
        chunk_size: tokens in a chunk.
    """

    chunk_size: int = 0

    def plan(  # type: ignore[override]  # attended by this class alone
        self, twin: Twin, batch: Batch, block_size: int, query_lens: Sequence[int] | None = None
    ) -> LocalPlan:
        """Plan a step over virtual sequences."""
        parts = [Part(batch, slice(None))]
        if query_lens is not None and 1 in query_lens and max(query_lens) > 1:
            parts = twin.metadata.split_decodes_and_prefills(batch, query_lens)
        sizes = dict(chunk_size=self.chunk_size, block_size=block_size)
        return LocalPlan(tuple((part.tokens, twin.local.plan(part.batch, **sizes)) for part in parts))

    def attend(  # type: ignore[override]
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"],
        value: Float[Tensor, "t hk dv"],
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: LocalPlan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h dv"]:
        """Write the new keys and values into the pool, and attend over it, decodes and prefills apart."""
        twin.kv_cache.write(key, value, *cache, slot_mapping)
        outs = [twin.local.attention(query[tokens], *cache, part, options) for tokens, part in plan.parts]
        return torch.cat(outs)


@dataclass(frozen=True)
class DifferentialLayer(Layer):
    """A layer of DiffLlama: two softmaxes, one subtracted, and a norm; its heads come in halves there."""

    def allocate(
        self, twin: Twin, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the layer's pool of pairs."""
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_size)
        return twin.differential.allocate(*sizes, dtype=dtype, device=device)

    def plan(self, twin: Twin, batch: Batch, block_size: int, query_lens: Sequence[int] | None = None) -> Plan:
        """Plan a step over all tokens."""
        plan: Plan = twin.differential.plan(batch, block_size=block_size)
        return plan

    def attend(
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"],
        value: Float[Tensor, "t hk d"],
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: Plan | CascadePlan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h d"]:
        """Write the new pairs into the pool, and attend over it; the answer ends with the layer's norm."""
        path = twin.differential
        query, key, value = (path.interleave_halves(x) for x in (query, key, value))
        path.write(key, value, cache, slot_mapping)
        vectors = (module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2)
        out: Tensor = path.attention(
            query,
            cache,
            plan,
            options,
            lambda_full=path.compute_lambda(*vectors, lambda_init=module.lambda_init),
            lambda_init=module.lambda_init,
            norm_weight=module.groupnorm.weight,
            norm_eps=module.groupnorm.eps,
        )
        return out


LAYERS: dict[str, type[Layer]] = {  # by their names in transformers
    "full_attention": Layer,
    "sliding_attention": WindowLayer,
    "chunked_attention": LocalLayer,
    "differential_attention": DifferentialLayer,
}
