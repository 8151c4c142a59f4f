"""What is stored for later calls: with a plan, what its first layer found out and bound; and writes into pools.

Layers of a step call with the same plan. So its memo holds what `fastattn.dispatch` has bound, and what kernels derive
from a plan alone, such as schedules. It never changes an output.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastattn.kernels.memory import addresses, is_without_memory
from refattn.modes import has_tangents
from refattn.options import PER_HEAD, AttentionOptions
from refattn.plan import ContextParallelPlan, Plan, PrefillPlan
from refattn.states import StatePlan
from refattn.trees import AttentionPlan

ALIGNMENT = 16  # bytes
MAX_WRITES = 1024  # writes that are bound; with one more, all are forgotten
numbers_of = attrgetter(*(one.name for one in fields(AttentionOptions) if one.name not in PER_HEAD))
per_head_of = attrgetter(*PER_HEAD)  # tensors, whose layout is in a key

Key = tuple[object, ...]
Run = Callable[..., tuple[Tensor, Tensor]]
AnyPlan = AttentionPlan | PrefillPlan | ContextParallelPlan | StatePlan


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
    """What is stored with one plan, for later layers.

    Attributes:
        bound: calls that are bound, by their cache keys.
        launches: how to replay launches of ours that are no attention, by their cache keys.
        schedules: how a package divides the work; each with the versions of the lengths that it was made from.
        cu_seqlens_k: where the keys of each sequence begin in rows.
        cpu_schedule: how the CPU kernel divides the work.
        expanded: the plans over the pages into which quantized values are expanded, by stream or capture.
        after: of intervals that extend a causal mask, the position after that of each query row.
        parts: of such intervals, the plan of the causal mask, and that of the keys after each query, likewise.
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
    """Return the memo of a plan, which is no field of it: a plan made by `dataclasses.replace` begins without one."""
    attributes = vars(plan)
    memo: Memo | None = attributes.get("memo")
    return attributes.setdefault("memo", Memo()) if memo is None else memo  # atomic: threads may share a plan


def launch_once(
    plan: AnyPlan,
    key: Key | None,
    tensors: tuple[Tensor | float | None, ...],
    launch: Callable[[], Callable[..., None]],
) -> None:
    """Launch; with `tensors` by the replay of an earlier launch with the same key, if there was one.

    Args:
        plan: whose memo stores the replay.
        key: from `key_of_launch`; None stores nothing.
        tensors: the arguments of the replay.
        launch: launches without a replay, and returns one.
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
    name: Hashable, tensors: tuple[Tensor | None, ...], options: AttentionOptions | None = None
) -> Key | None:
    """Return the cache key of a launch; None if a tensor is not aligned, so that it is not replayed.

    Args:
        name: of the launch, with all else that it depends on beside the plan.
        tensors: those that differ from layer to layer.
        options: those of an attention layer.
    """
    bits, layouts = layouts_of(tensors if options is None else (*tensors, *per_head_of(options)))
    if bits % ALIGNMENT or layouts is None:
        return None
    return (name, None if options is None else numbers_of(options), layouts)


def key_of_write(
    forced: str | None, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Key | None:
    """Return the cache key of a write into pools; None if it is not to be replayed.

    It is not where `fastattn.dispatch.key_of` returns None. On a CPU, where a replay checks the slots, it is not where
    gradients are recorded either, as a pool may be a view of a tensor that has one.
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
    """Return the bits of the addresses of tensors, and what a cache key has of each value; None for an unknown type.

    It is None, too, where a tensor is not what its memory holds.

    Scales differ from layer to layer, and so does lambda: of a positive number there is its type only. But 1 stands for
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


# --- writes, of which no plan knows ---

_writes: dict[Key, tuple[Callable[..., None], tuple[int, ...]]] = {}


def bound_write(
    key: Key | None, tokens: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor]
) -> Callable[..., None] | None:
    """Return what makes a write again, with other tensors; None if it was not bound, or memory may be shared.

    The addresses are in no cache key, and a write is refused if its tokens lie in a pool, or two pools are one.
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
    """Bind a write: types, shapes, strides and devices, and a launch without its tensors.

    Args:
        key: from `key_of_write`; None binds nothing.
        write: what makes it again; None binds nothing.
        tensors: both tokens and both pools; the memory of each is known from its first byte to its last.
    """
    if key is None or write is None:
        return
    if len(_writes) >= MAX_WRITES:
        _writes.clear()
    _writes[key] = write, tuple(end - begin for begin, end in map(addresses, tensors))


def forget_writes() -> None:
    """Forget all writes."""
    _writes.clear()
