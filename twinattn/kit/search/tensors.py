"""How tensors of a workload lie in memory: layouts of pools and rows, copies with their strides, and moves."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from refattn.four_bits import Int4Scales, Nvfp4Scales
from refattn.scales import Int8Scales


def laid(x: Tensor, kind: str) -> Tensor:
    """Return a copy of a tensor in some layout, mostly a view of a larger tensor of NaN or other poison."""
    if kind in ("plain", "NHD", "new"):
        return x.contiguous()
    if kind in ("HND", "heads-last"):
        a, b = (1, 2) if x.ndim == 4 else (0, 1)
        return x.transpose(a, b).contiguous().transpose(a, b)
    if kind == "offset":
        flat = unwritten((x.numel() + 1,), x.dtype)
        flat[1:].copy_(x.flatten())
        return flat[1:].view(x.shape)
    if kind == "expanded":
        dim = 2 if x.ndim == 4 else 1
        return x.narrow(dim, 0, min(1, x.shape[dim])).expand(x.shape)
    if kind == "expanded-size":
        return x[..., :1].expand(x.shape)
    if kind == "every-other":
        wide = unwritten((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2].copy_(x)
        return wide[..., ::2]
    larger = [
        size + more for size, more in zip(x.shape, ((0, 1, 1, 8) if x.ndim == 4 else (1, 1, 8))[-x.ndim :], strict=True)
    ]
    wide = unwritten(larger, x.dtype)
    view = wide[tuple(slice(size) for size in x.shape)]
    view.copy_(x)
    return view


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory that nothing has written: NaN, which a byte of 0x7F is in fp8, and large whole numbers."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(tuple(shape), torch.nan, dtype=dtype)
    return (
        torch.full(tuple(shape), 0x7F, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.full(tuple(shape), 1 << 20, dtype=dtype)
    )


def moved(x: Any, device: str) -> Any:
    """Move tensors, and those in lists, dicts and dataclasses, to a device, with the memory around them."""
    if isinstance(x, Tensor):
        if device == "cpu":
            return x
        flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x) if f.init})
    if type(x) is dict:
        return {name: moved(value, device) for name, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(moved(y, device) for y in x)
    return x


def copied(x: Any) -> Any:
    """Copy tensors with the memory around them."""
    if isinstance(x, Tensor):
        flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
        return flat.as_strided(x.shape, x.stride(), x.storage_offset())
    if isinstance(x, dict):
        return {name: copied(y) for name, y in x.items()}
    if isinstance(x, list):
        return [copied(y) for y in x]
    if isinstance(x, Int8Scales):
        return replace(x, key=copied(x.key))
    if isinstance(x, Int4Scales | Nvfp4Scales):
        return replace(x, key=copied(x.key), value=copied(x.value))
    return x


def memory(x: Any) -> dict[int, Tensor]:
    """Return the bytes of all storages of the tensors in an argument, by address."""
    if isinstance(x, Tensor):
        storage = x.untyped_storage()
        return (
            {storage.data_ptr(): torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)}
            if len(storage)
            else {}
        )
    if is_dataclass(x) and not isinstance(x, type):
        return memory([getattr(x, f.name) for f in fields(x)])
    if isinstance(x, dict):
        return memory(list(x.values()))
    pieces: dict[int, Tensor] = {}
    for y in x if isinstance(x, list | tuple) else ():
        pieces |= memory(y)
    return pieces
