"""Caches for later calls: the memo of a plan, which all layers of a step share, and bound writes into pools.

The memo holds the calls that `fastattn.dispatch` has bound in the first layer, and what kernels derive from a plan
alone, such as schedules. It never changes an output.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastattn.kernels.memory import addresses, is_without_memory
from refattn.entries import CompressedPlan
from refattn.modes import has_tangents
from refattn.options import PER_HEAD, AttentionOptions
from refattn.plan import ContextParallelPlan, Plan, PrefillPlan
from refattn.rings import ReplayPlan
from refattn.states import StatePlan
from refattn.trees import AttentionPlan

ALIGNMENT = 16  # bytes
MAX_WRITES = 1024  # bound writes; one more clears all
numbers_of = attrgetter(*(one.name for one in fields(AttentionOptions) if one.name not in PER_HEAD))
per_head_of = attrgetter(*PER_HEAD)  # tensors; a cache key has their layouts

Key = tuple[object, ...]
Run = Callable[..., tuple[Tensor, Tensor]]
AnyPlan = AttentionPlan | PrefillPlan | ContextParallelPlan | StatePlan | ReplayPlan | CompressedPlan


# --- the memo of a plan ---


@dataclass(frozen=True, slots=True)
class Bound:
    """A call of attention that is checked and prepared.

    Attributes:
        kernel: the name of the kernel that was chosen.
        run: computes the call with the tensors of another layer, called as the operation of the kernel.
    """

    kernel: str
    run: Run


@dataclass
class Memo:
    """The cache of one plan, shared by the layers of a step.

    Attributes:
        bound: bound calls, by their cache keys.
        launches: replays of our launches other than attention, by their cache keys.
        schedules: schedules of packages, each with the versions of the lengths that it was made from.
        cu_seqlens_k: where the keys of each sequence begin in rows.
        cpu_schedule: the schedule of the CPU kernel.
        expanded: plans over dequantized pages, by stream or capture.
        after: for intervals that extend a causal mask, the position after each query row.
        parts: for such intervals, the plan of the causal mask and that of the later keys, by stream or capture.
        pages: on a CPU, the plan over rows as one over pages of one row each, by the number of rows.
    """

    bound: dict[Key, Bound] = field(default_factory=dict)
    launches: dict[Key, Callable[..., None]] = field(default_factory=dict)
    schedules: dict[Key, tuple[tuple[int, ...], Any]] = field(default_factory=dict)
    cu_seqlens_k: Tensor | None = None
    cpu_schedule: Any = None
    expanded: dict[Hashable, Plan] = field(default_factory=dict)
    after: Tensor | None = None
    parts: dict[Hashable, tuple[Plan, Plan]] = field(default_factory=dict)
    pages: dict[int, Plan] = field(default_factory=dict)


def memo_of(plan: AnyPlan) -> Memo:
    """Return the memo of a plan. It is not a field: a plan made by `dataclasses.replace` begins with an empty one."""
    attributes = vars(plan)
    memo: Memo | None = attributes.get("memo")
    return attributes.setdefault("memo", Memo()) if memo is None else memo  # atomic: threads may share a plan


def launch_once(
    plan: AnyPlan,
    key: Key | None,
    tensors: tuple[Tensor | float | None, ...],
    launch: Callable[[], Callable[..., None]],
) -> None:
    """Launch, or replay an earlier launch with the same key on `tensors`.

    Args:
        plan: its memo stores the replay.
        key: from `key_of_launch`; None stores nothing.
        tensors: the arguments of the replay.
        launch: makes the first launch, and returns its replay.
    """
    launches = memo_of(plan).launches
    replay = None if key is None else launches.get(key)
    if replay is not None:
        replay(*tensors)
        return
    replay = launch()
    if key is not None:
        launches[key] = replay


# --- cache keys ---


def key_of_launch(
    name: Hashable, tensors: tuple[Tensor | float | None, ...], options: AttentionOptions | None = None
) -> Key | None:
    """Return the cache key of a launch; None if it is not replayed, as a tensor is not aligned or not its memory.

    Args:
        name: the name of the launch, and all else that it depends on besides the plan.
        tensors: the tensors that differ between layers, and scales.
        options: those of an attention layer.
    """
    bits, layouts = layouts_of(tensors if options is None else (*tensors, *per_head_of(options)))
    if bits % ALIGNMENT or layouts is None:
        return None
    return (name, None if options is None else numbers_of(options), layouts)


def key_of_write(
    forced: str | None, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Key | None:
    """Return the cache key of a write into pools; None if it is not replayed.

    It is not replayed where `fastattn.dispatch.key_of` returns None, nor, on a CPU, while gradients are recorded, as a
    pool may be a view of a tensor that has one.
    """
    if not (type(key) is type(value) is type(key_cache) is type(value_cache) is type(slot_mapping) is Tensor):
        return None
    if slot_mapping.is_cpu and torch.is_grad_enabled():
        return None
    if slot_mapping.is_cuda and slot_mapping.device.index != torch.cuda.current_device() or has_tangents():
        return None
    try:
        bits, layouts = layouts_of((key, value, key_cache, value_cache))
        if bits % ALIGNMENT or layouts is None:
            return None
        return (forced, slot_mapping.dtype, slot_mapping.device, slot_mapping.shape, slot_mapping.stride(), layouts)
    except RuntimeError:  # as in `fastattn.dispatch.key_of`
        return None


def layouts_of(values: Iterable[object]) -> tuple[int, Key | None]:
    """Return the bits of all addresses of tensors, and the entry of each value in a cache key.

    The entries are None if a value has another type, or a tensor is not what its memory holds.

    Scales and lambda differ between layers, so the entry of a positive number is its type alone. But 1 is an entry by
    itself, as it is the only scale of a pool that is not quantized.
    """
    bits = 0
    layouts: list[object] = []
    for x in values:
        kind = type(x)
        if x is None or kind is type or kind is torch.dtype:
            layouts.append(x)
        elif isinstance(x, float) and kind is float and 0.0 < x < inf and x != 1.0:
            layouts.append(float)
        elif kind is float or kind is int or kind is bool:
            layouts.append((kind, x))
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            if x.is_neg() or (not address and is_without_memory(x)):
                return bits, None
            bits |= address
            layouts.append((x.dtype, x.device, x.shape, x.stride(), x.requires_grad and torch.is_grad_enabled()))
            if x.ndim == 0 and x.is_cpu:  # lambda, which is checked there
                layouts.append(isfinite(x.item()))
        else:
            return bits, None
    return bits, tuple(layouts)


# --- writes, which have no plan ---

_writes: dict[Key, tuple[Callable[..., None], tuple[int, ...]]] = {}


def bound_write(
    key: Key | None, tokens: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor]
) -> Callable[..., None] | None:
    """Return the replay of a bound write; None if it was not bound, or its tensors may overlap.

    Addresses are not in a cache key, and a write is refused if its tokens lie in a pool, or both pools are one.
    """
    bound = None if key is None else _writes.get(key)
    if bound is None:
        return None
    write, (*token_sizes, pool_size, value_pool_size) = bound
    pool, value_pool = (x.data_ptr() for x in pools)
    if pool == value_pool:
        return None
    for token, size in zip(tokens, token_sizes, strict=True):
        begin = token.data_ptr()
        end = begin + size
        if (begin < pool + pool_size and pool < end) or (begin < value_pool + value_pool_size and value_pool < end):
            return None
    return write


def bind_write(key: Key | None, write: Callable[..., None] | None, tensors: Iterable[Tensor]) -> None:
    """Store the replay of a write under its cache key.

    Args:
        key: from `key_of_write`; None stores nothing.
        write: the replay; None stores nothing.
        tensors: both tokens and both pools; their sizes in bytes are stored, to find overlaps.
    """
    if key is None or write is None:
        return
    if len(_writes) >= MAX_WRITES:
        _writes.clear()
    _writes[key] = write, tuple(end - begin for begin, end in map(addresses, tensors))


def forget_writes() -> None:
    """Clear all bound writes."""
    _writes.clear()
