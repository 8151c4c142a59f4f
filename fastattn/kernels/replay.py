"""Replay: what the first layer of a step computes about its plan, the later layers repeat.

Layers of a step call with the same plan, and with tensors that differ in little but their addresses. So the first call
is checked, a kernel is chosen, and its launches are prepared; and the memo of the plan stores how to replay it. A call
with the same cache key is replayed: checks, choice and launches would come out the same.

    in the cache key       the storage, the kernel asked for, types, shapes, strides, devices, numbers of the options,
                           and whether a gradient is wanted, which no kernel has
    not in the cache key   the contents of tensors, the numbers of scales, and addresses, as long as they are multiples
                           of 16 bytes
    fixed by the plan      lengths, tables, masks, levels, trees

A memo holds, too, what kernels derive from a plan alone, such as schedules. It never changes an output: without it each
layer computes the same, with more CPU overhead. A captured CUDA graph replays launches, and has no use for a memo.

Every attention operation of `fastattn.kernels.dispatch` takes part. `mla.prefill` and `context_parallel.attention`
combine several of them; they are checked as a whole, and no part of them is replayed.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastattn.kernels.memory import is_without_memory
from refattn.keys import AnyKeys, Pages, QuantizedPages, Rows
from refattn.modes import has_tangents, is_autocast_enabled
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, ContextParallelPlan, Plan, PrefillPlan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan, TreePlan

ALIGNMENT = 16  # bytes
RETURN_LSE = 1  # the place in a key of whether log-sum-exps are wanted
MAX_WRITES = 1024  # writes that are remembered; with one more, all are forgotten
PER_HEAD = ("alibi_slopes", "sinks")  # the options that are tensors, of which a key has the layout
_numbers_of = attrgetter(*(one.name for one in fields(AttentionOptions) if one.name not in PER_HEAD))

Key = tuple[object, ...]
Replay = Callable[..., tuple[Tensor, Tensor]]
AnyPlan = AttentionPlan | PrefillPlan | ContextParallelPlan


# --- the memo of a plan ---


@dataclass
class Memo:
    """What is stored with one plan, for later layers.

    Attributes:
        replays: how to replay calls, by their cache keys.
        launches: how to replay our launches around those of other packages, by their cache keys.
        schedules: how a package divides the work; each with the versions of the lengths that it was made from.
        cu_seqlens_k: where the keys of each sequence begin in rows.
        cpu_schedule: how the CPU kernel divides the work.
        expanded: the plans over the pages into which quantised values are expanded, by stream or capture.
        after: of intervals that extend a causal mask, the position after that of each query row.
        parts: of such intervals, the plan of the causal mask, and that of the keys after each query, likewise.
        pages: on a CPU, the plan over rows as one over pages of one row each, by the number of rows.
    """

    replays: dict[Key, Replay] = field(default_factory=dict)
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
    plan: Plan, key: Key | None, tensors: tuple[Tensor | float | None, ...], launch: Callable[[], Callable[..., None]]
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


# --- what a kernel records of a call ---


@dataclass
class Recorder:
    """Where a kernel stores how to replay the call that is under way.

    Attributes:
        return_lse: later calls want the log-sum-exps, too; else the tensor in their place may hold anything.
        replay: called as the operation of the kernel, with other tensors; None to call the operation itself.
    """

    return_lse: bool
    replay: Replay | None = None


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """Return the recorder of the call that is under way; None if it will not be replayed."""
    return _recorder.get()


@contextmanager
def recording(into: Recorder | None) -> Iterator[None]:
    """Let a kernel record a call."""
    token = _recorder.set(into)
    try:
        yield
    finally:
        _recorder.reset(token)


# --- cache keys ---


def key_of(
    asked_for: str | None,
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    more: dict[str, Any],
) -> Key | None:
    """Return the cache key of a call of attention; None if it is not to be replayed. No argument was checked before.

    A call is not replayed if an argument is not of its very type or has no strides, if a tensor is not what its memory
    holds (`fastattn.kernels.memory`), or begins elsewhere than at a multiple of 16 bytes, as its launches would differ,
    if the GPU is not the current one, under autocast, which has to be switched off, and in forward-mode gradients.

    Args:
        asked_for: the kernel asked for by `use_kernel`.
        query: query rows of all sequences.
        keys: where the keys are.
        plan: the lengths, the tables, and who may see whom.
        options: those of the layer.
        out: where the outputs go; None for new memory.
        return_lse: the log-sum-exps are wanted, too.
        more: the arguments that only differential attention has.
    """
    storage = type(keys)
    others: tuple[object, ...] = ()
    if isinstance(keys, (Pages, Rows)):
        key, value = keys
    elif isinstance(keys, QuantizedPages):
        key, value, scales = keys
        others = (scales,)
    else:  # one pool of both
        key = value = keys[0]
        others = keys[1:]
    if not (type(query) is type(key) is type(value) is Tensor):
        return None
    kind = type(plan)
    if kind is not Plan and kind is not TreePlan and kind is not CascadePlan:
        return None
    if type(options) is not AttentionOptions or (return_lse is not True and return_lse is not False):
        return None
    if out is not None and type(out) is not Tensor:
        return None
    device = query.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return None
    if is_autocast_enabled(device) or has_tangents():
        return None
    try:
        at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (at_query and at_key and at_value) and any(map(is_without_memory, (query, key, value))):
            return None
        if query.is_neg() or key.is_neg() or (value is not key and value.is_neg()):
            return None
        address = at_query | at_key | at_value
        layouts: Key | None = ()
        if others or more or out is not None or options.alibi_slopes is not None or options.sinks is not None:
            given: list[object] = [out, options.alibi_slopes, options.sinks]
            for x in (*others, *more.values()):
                is_scales = type(x) is Fp8Scales or type(x) is Int8Scales
                given += (type(x), *vars(x).values()) if is_scales else (x,)
            bits, layouts = _layouts(given)
            address |= bits
        if address % ALIGNMENT or layouts is None:
            return None
        return (
            asked_for,
            return_lse,
            (storage, device, query.dtype, query.shape, query.stride()),
            (key.device, key.dtype, key.shape, key.stride()),
            (value.device, value.dtype, value.shape, value.stride()),
            _numbers_of(options),
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
            layouts,
        )
    except RuntimeError:  # of a sparse or nested tensor, which has no strides
        return None


def key_of_launch(name: str, tensors: tuple[Tensor | None, ...], options: AttentionOptions) -> Key | None:
    """Return the cache key of a launch in an adapter; None if a tensor is not aligned, so that it is not replayed."""
    bits, layouts = _layouts((*tensors, options.alibi_slopes, options.sinks))
    if bits % ALIGNMENT or layouts is None:
        return None
    return (name, _numbers_of(options), layouts)


def key_of_write(
    asked_for: str | None, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Key | None:
    """Return the cache key of a write into pools; None if it is not to be replayed.

    It is not where `key_of` returns None. On a CPU, where a replay checks the slots, it is not where gradients are
    recorded either, as a pool may be a view of a tensor that has one.
    """
    if not (type(key) is type(value) is type(key_cache) is type(value_cache) is type(slot_mapping) is Tensor):
        return None
    if slot_mapping.is_cpu and torch.is_grad_enabled():
        return None
    if slot_mapping.is_cuda and slot_mapping.device.index != torch.cuda.current_device() or has_tangents():
        return None
    try:
        bits, layouts = _layouts((key, value, key_cache, value_cache))
        if bits % ALIGNMENT or layouts is None:
            return None
        return (asked_for, slot_mapping.dtype, slot_mapping.device, slot_mapping.shape, slot_mapping.stride(), layouts)
    except RuntimeError:  # as in `key_of`
        return None


def _layouts(values: Iterable[object]) -> tuple[int, Key | None]:
    """Return the bits of the addresses of tensors, and what a cache key has of each value; None for an unknown type.

    It is None, too, where a tensor is not what its memory holds.

    Scales differ from layer to layer, and so does lambda: of a positive number there is its type only. But 1 stands for
    itself, as it is the only scale of a pool that is not quantised.
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


def write_of(
    key: Key | None, tokens: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor]
) -> Callable[..., None] | None:
    """Return what replays a write, with other tensors; None if it was not remembered, or memory may be shared.

    The addresses are in no cache key, and a write is refused if its tokens lie in a pool, or two pools are one.
    """
    remembered = None if key is None else _writes.get(key)
    if remembered is None:
        return None
    write, (*token_sizes, pool_size, value_pool_size) = remembered
    pool, value_pool = (x.data_ptr() for x in pools)
    if pool == value_pool:
        return None
    for token, size in zip(tokens, token_sizes, strict=True):
        begin = token.data_ptr()
        end = begin + size
        if (begin < pool + pool_size and pool < end) or (begin < value_pool + value_pool_size and value_pool < end):
            return None
    return write


def remember_write(key: Key, write: Callable[..., None], sizes: tuple[int, ...]) -> None:
    """Remember how to replay a write: types, shapes, strides and devices, and a launch without its tensors.

    Args:
        key: from `key_of_write`.
        write: what replays it.
        sizes: of the memory of both tokens and both pools, from their first byte to their last.
    """
    if len(_writes) >= MAX_WRITES:
        _writes.clear()
    _writes[key] = write, sizes


def forget_writes() -> None:
    """Forget all writes."""
    _writes.clear()
