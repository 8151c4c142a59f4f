"""Attention over four-bit pages on the CPU: the kernel over pages, which reads them a KV chunk at a time.

int4     hadamard(query) . turned key = query . key         the query is turned once, the output is turned back once
nvfp4    the keys and the values are what they stand for
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from fastattn.kernels.cpu.dequantize import QuantizedPool
from fastattn.kernels.cpu.quantized import attend_to_pools
from fastattn.kernels.problem import compute_dtype
from fastattn.kernels.torch_ops.four_bits import numbers_of_int4, numbers_of_nvfp4, turn
from refattn.four_bits import Int4Pages, Int4Scales, Nvfp4Pages
from refattn.options import AttentionOptions
from refattn.trees import AttentionPlan


@dataclass(frozen=True, eq=False)
class FourBitPool(QuantizedPool):
    """A pool of two elements per byte, and the scales of its rows or groups.

    Attributes:
        scale: the scale of each row, or those of its groups.
        number: the number that all scales of groups are multiplied by.
    """

    scale: Shaped[Tensor, "n p hk *groups"] | None = None
    number: float = 1.0

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantized pool."""
        return torch.Size((*self.pool.shape[:3], 2 * self.pool.shape[3]))

    def read(self, blocks: Int32[Tensor, "m"], out: Float[Tensor, "m p hk d"]) -> Float[Tensor, "m p hk d"]:
        """Gather and dequantize some blocks into `out`, and return it; int4 stays turned."""
        quantized = self.pool.index_select(0, blocks)
        assert self.scale is not None
        if self.scale.ndim == 3:
            numbers_of_int4(quantized, self.scale.index_select(0, blocks), out)
        else:
            scale = self.scale.view(torch.uint8).index_select(0, blocks).view(self.scale.dtype)
            numbers_of_nvfp4(quantized, scale, self.number, out)
        return out


def attention(
    query: Float[Tensor, "t h d"], keys: Int4Pages | Nvfp4Pages, plan: AttentionPlan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h {keys.value_head_size}"], Float[Tensor, "t h"]]:
    """Attend over four-bit pages; see `fastattn.dispatch`."""
    compute, scales = compute_dtype(query.dtype), keys.scales
    of_keys, of_values = (1.0, 1.0) if isinstance(scales, Int4Scales) else (scales.of_keys, scales.of_values)
    key = FourBitPool(keys.key_cache, compute, scales.key, of_keys)
    value = FourBitPool(keys.value_cache, compute, scales.value, of_values)
    is_turned = isinstance(keys, Int4Pages)
    wide = turn(query.to(compute)) if is_turned else query.to(compute)
    out, lse = attend_to_pools(wide, key, value, plan, options)
    return (turn(out) if is_turned else out).to(query.dtype), lse
