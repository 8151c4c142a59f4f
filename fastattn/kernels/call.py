"""The name of a call: what a plan keeps it under, to make it again.

Layers of a step call with the same plan, and with tensors that differ in little but where they are. All that the checks
of a call look at is in its name, and all that the choice of its kernel and its launches depend on:

    in the name        the operation, the kernel asked for, types, shapes, strides, devices, numbers of the options,
                       and whether a gradient is wanted, which no kernel has
    not in the name    what is in the tensors, and where each begins, as long as that is a multiple of 16 bytes
    fixed by the plan  lengths, tables, masks

A call of the same name is as good as the first one was, and is computed alike.
"""

from types import NoneType

import torch
from torch import Tensor

from refattn.interface import AttentionOptions, CascadePlan, Fp8Scales, Int8Scales, Plan, TreePlan
from refattn.interface.ambient import is_autocast_enabled

ALIGNMENT = 16  # bytes

Name = tuple[str, bool, *tuple[object, ...]] | None


def name_of_call(
    operation: str,
    asked_for: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan | CascadePlan | TreePlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    scales: Fp8Scales | Int8Scales | None,
) -> Name:
    """Return the name of a call, which begins with the operation and `return_lse`; None if it is not to be kept.

    A call is not kept if an argument is not of its very type or has no strides, if a tensor begins elsewhere than at a
    multiple of 16 bytes, as its launches would differ, if the GPU is not the current one, and under autocast, which has
    to be switched off. No argument was checked before.
    """
    if not (type(query) is type(key) is type(value) is Tensor and type(plan) is Plan):
        return None
    if type(options) is not AttentionOptions or (return_lse is not True and return_lse is not False):
        return None
    if type(scales) not in (NoneType, Fp8Scales, Int8Scales) or type(out) not in (NoneType, Tensor):
        return None
    device = query.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return None
    if is_autocast_enabled(device):
        return None
    try:
        address = query.data_ptr() | key.data_ptr() | value.data_ptr()
        others: tuple[object, ...] = ()
        if scales is not None or out is not None or options.alibi_slopes is not None or options.sinks is not None:
            given = () if scales is None else (type(scales), *vars(scales).values())
            bits, others = _layouts((out, options.alibi_slopes, options.sinks, *given))
            address |= bits
        if address % ALIGNMENT:
            return None
        return (
            *(operation, return_lse, asked_for, device),
            *(query.dtype, query.shape, query.stride()),
            *(key.dtype, key.shape, key.stride(), key.device),
            *(value.dtype, value.shape, value.stride(), value.device),
            *(options.softmax_scale, options.softcap, options.batch_invariant, options.alibi_sqrt),
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
            others,
        )
    except RuntimeError:  # of a sparse or nested tensor, which has no strides
        return None


def name_of_write(
    asked_for: str | None, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[object, ...] | None:
    """Return the name of a write into pools; None if what makes it again is not to be kept.

    It is not on a CPU, where the slots are checked each time, nor where `name_of_call` returns None.
    """
    if not (type(key) is type(value) is type(key_cache) is type(value_cache) is type(slot_mapping) is Tensor):
        return None
    if slot_mapping.is_cpu or (slot_mapping.is_cuda and slot_mapping.device.index != torch.cuda.current_device()):
        return None
    try:
        bits, layouts = _layouts((key, value, key_cache, value_cache))
        if bits % ALIGNMENT:
            return None
        return (asked_for, slot_mapping.dtype, slot_mapping.device, slot_mapping.shape, slot_mapping.stride(), layouts)
    except RuntimeError:  # as in `name_of_call`
        return None


def _layouts(values: tuple[object, ...]) -> tuple[int, tuple[object, ...]]:
    """Return the bits of where tensors begin, and what they are like; of a number only that it is one."""
    bits = 0
    layouts: list[object] = []
    for x in values:
        if isinstance(x, (int, float)):
            layouts.append(float)
        elif x is not None and isinstance(x, Tensor):
            bits |= x.data_ptr()
            layouts.append((x.dtype, x.device, x.shape, x.stride(), x.requires_grad and torch.is_grad_enabled()))
        else:
            layouts.append(x)
    return bits, tuple(layouts)
