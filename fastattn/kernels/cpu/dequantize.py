"""Quantized pools: blocks are dequantized as attention gathers them, a KV chunk at a time.

torch converts fp8 to float32 one element at a time. Here the bits of a quantized value are moved into a float16
instead, which can represent every fp8 number and whose conversion is vectorized:

    e5m2    s eeeee mm           ->  s eeeee mm 00000000       the upper half of a float16
    e4m3    s eeee mmm           ->  s 0 eeee mmm 0000000      its exponent is 8 too small: 1 / 256 of the number

The caller multiplies the factor of 256 into the query or the output. NaN of e4m3 has other bits and is set separately.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int8, Int32, Shaped
from torch import Tensor

from refattn.packed_latents import LATENT_GROUP, packed_parts


@dataclass(frozen=True, eq=False)
class QuantizedPool:
    """A quantized pool, or one of another floating point type, that is converted when it is read.

    Attributes:
        pool: fp8, int8 or floating point; any strides.
        dtype: the type that is read: float32 or float64.
        scale: the scale of each token and head; None for none.
    """

    pool: Shaped[Tensor, "n p hk d"]
    dtype: torch.dtype
    scale: Float32[Tensor, "n p hk"] | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the pool."""
        return self.pool.shape

    @property
    def factor(self) -> float:
        """The factor that is missing in values as they are read."""
        return 256.0 if self.pool.dtype == torch.float8_e4m3fn else 1.0

    def read(self, blocks: Int32[Tensor, "m"], out: Float[Tensor, "m p hk d"]) -> Float[Tensor, "m p hk d"]:
        """Gather and convert some blocks into `out`, and return it."""
        if self.pool.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            quantized = self.pool.view(torch.int8).index_select(0, blocks)
            _from_fp8(quantized, self.pool.dtype, out)
        else:
            out.copy_(self.pool.index_select(0, blocks))
        return out if self.scale is None else out.mul_(self.scale.index_select(0, blocks)[..., None])


@dataclass(frozen=True, eq=False)
class PackedRows(QuantizedPool):
    """A pool of packed latents, of one head, dequantized when it is read: latents, then their rotary keys.

    Attributes:
        latent_rank: elements of a latent.
        rope_size: elements of a rotary key.
    """

    latent_rank: int = 0
    rope_size: int = 0

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantized pool."""
        return torch.Size((*self.pool.shape[:3], self.latent_rank + self.rope_size))

    @property
    def factor(self) -> float:
        """The factor that is missing in values as they are read: none."""
        return 1.0

    def read(self, blocks: Int32[Tensor, "m"], out: Float[Tensor, "m p hk d"]) -> Float[Tensor, "m p hk d"]:
        """Gather and convert some blocks into `out`, and return it."""
        quantized, scales, rope_key = packed_parts(self.pool.index_select(0, blocks), self.latent_rank, self.rope_size)
        latents = out[..., : self.latent_rank]
        _from_fp8(quantized.contiguous().view(torch.int8), torch.float8_e4m3fn, latents)
        latents.unflatten(-1, (-1, LATENT_GROUP)).mul_(scales.mul(256.0)[..., None])
        out[..., self.latent_rank :] = rope_key
        return out


def _from_fp8(quantized: Int8[Tensor, "m p hk d"], kind: torch.dtype, out: Float[Tensor, "m p hk d"]) -> None:
    is_e4m3 = kind == torch.float8_e4m3fn
    bits = quantized.to(torch.int16).bitwise_left_shift_(7 if is_e4m3 else 8)
    if is_e4m3:
        bits.bitwise_and_(-1 - 2**14)  # a copy of the sign, left by the shift
    out.copy_(bits.view(torch.float16))
    if is_e4m3:
        magnitudes = quantized.bitwise_and_(127)
        if magnitudes.numel() and magnitudes.max() == 127:
            out.masked_fill_(magnitudes == 127, torch.nan)
