"""Mistakes in reading packed latents: quantized values, a scale for each 128 of them, and rotary keys in 16 bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.mistakes.formula import GROUP, Attention

PATHS = ("packed_latents", "packed_mla")
SCALE, ROPE = 4, 2  # bytes of a scale, and of an element of a rotary key


class FirstScaleForAll(Attention):
    """All groups of a latent are multiplied with the scale of its first group."""

    paths: tuple[str, ...] = PATHS

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        scales = super()._group_scales(rows, rank)
        return scales[:, :1].expand_as(scales)


class ScaleOfAnotherGroup(Attention):
    """A group is multiplied with the scale of the group after it, or before it."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = (-1, 1)

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        return super()._group_scales(rows, rank).roll(self.variant, 1)


class ScalesOfFirstRow(Attention):
    """All tokens of a page are multiplied with the scales of its first row."""

    paths: tuple[str, ...] = PATHS

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        scales, p = super()._group_scales(rows, rank), self.example.block_size
        return scales[torch.arange(len(rows)) // p * p]


class ScalesOfSixteenBits(Attention):
    """Scales have 16 bits: rounded or truncated to bfloat16, or read as numbers of 2 bytes."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = ("rounded", "cut", "halves")

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        groups = rank // GROUP
        halves = self._as_type(rows, rank, rank + groups * SCALE, torch.bfloat16)
        if self.variant == "rounded":
            return super()._group_scales(rows, rank).bfloat16().double()
        return halves[:, 1::2] if self.variant == "cut" else halves[:, :groups]


class GroupScalesIgnored(Attention):
    """The scales of quantized values are ignored."""

    paths: tuple[str, ...] = PATHS

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        return torch.ones_like(super()._group_scales(rows, rank))


class GroupScalesInverted(Attention):
    """Quantized values are divided by the scales of their groups."""

    paths: tuple[str, ...] = PATHS

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        return 1 / super()._group_scales(rows, rank)


class GroupScalesArePowersOfTwo(Attention):
    """A scale is a power of two: only its exponent is read, rounded down or up."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = (torch.floor, torch.ceil)

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        return torch.exp2(self.variant(super()._group_scales(rows, rank).log2()))


class SmallScalesAreZero(Attention):
    """A scale below 2^-14, the smallest normal number of float16, is taken for 0."""

    paths: tuple[str, ...] = PATHS

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        scales = super()._group_scales(rows, rank)
        return scales.masked_fill(scales.abs() < 2.0**-14, 0.0)


class GroupsOfAnotherSize(Attention):
    """A scale is used for 32, 64 or 256 elements, not for 128."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = (64, 256, 32)

    def _group_of(self, rank: int) -> Tensor:
        return (torch.arange(rank) // self.variant).clamp(max=rank // GROUP - 1)


class ScalesInterleaved(Attention):
    """Element i has scale i % groups instead of i // 128."""

    paths: tuple[str, ...] = PATHS

    def _group_of(self, rank: int) -> Tensor:
        return torch.arange(rank) % (rank // GROUP)


class CodesOfAnotherFormat(Attention):
    """Latents are read in another format: e5m2, the e4m3 of older AMD GPUs (half as large), or int8."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8)

    def _quantized_latents(self, rows: Tensor, rank: int) -> Tensor:
        return self._as_type(rows, 0, rank, self.variant)


class LargestCodesClipped(Attention):
    """Quantized values are clipped to 240, the largest number of the e4m3 of older AMD GPUs, not to 448."""

    paths: tuple[str, ...] = PATHS

    def _quantized_latents(self, rows: Tensor, rank: int) -> Tensor:
        return super()._quantized_latents(rows, rank).clamp(-240, 240)


class RotaryScaled(Attention):
    """The rotary key is multiplied with the scale of a group, the last one or the first, like a quantized value."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = (-1, 0)

    def _rotary_keys(self, rows: Tensor, rank: int) -> Tensor:
        return super()._rotary_keys(rows, rank) * self._group_scales(rows, rank)[:, self.variant, None]


class RotaryRounded(Attention):
    """The rotary key is rounded to fp8, with or without a scale."""

    paths: tuple[str, ...] = PATHS
    variants: Sequence[Any] = (False, True)

    def _rotary_keys(self, rows: Tensor, rank: int) -> Tensor:
        keys = super()._rotary_keys(rows, rank)
        scales = keys.abs().amax(1, keepdim=True) / 448 if self.variant else torch.ones_like(keys[:, :1])
        quantized = (keys / scales.masked_fill(scales == 0, 1.0)).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return quantized.double() * scales


class RotaryAsFloat16(Attention):
    """The bits of a rotary key are read as float16 instead of bfloat16."""

    paths: tuple[str, ...] = PATHS

    def _rotary_keys(self, rows: Tensor, rank: int) -> Tensor:
        begin = rank + rank // GROUP * SCALE
        return self._as_type(rows, begin, begin + ROPE * self._rope_size(rank), torch.float16)


class Misread(Attention, is_base=True):
    """A base: other bytes are read for each row; scores may overflow float32."""

    paths: tuple[str, ...] = PATHS

    def _unpacked(self, rows: Tensor, rank: int) -> Tensor:
        return super()._unpacked(self._bytes(rows, rank), rank)

    def _bytes(self, rows: Tensor, rank: int) -> Tensor:
        """Return the bytes that are read for each row."""
        raise NotImplementedError

    def _products(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._products(query, key).float().double()


class RowsTooShort(Misread):
    """Rows are read as shorter ones: one byte per element (576 of 656), or without scales."""

    variants: Sequence[Any] = (1, ROPE)  # bytes of an element of a rotary key

    def _bytes(self, rows: Tensor, rank: int) -> Tensor:
        size, whole = rank + self.variant * self._rope_size(rank), rows.shape[1]
        memory = torch.cat([rows.flatten(), rows.new_zeros(whole)])
        return memory.as_strided(rows.shape, (size, 1))


class ScaleBesideItsGroup(Misread):
    """A row is read as groups of 128 values, each followed by its scale, instead of all values, then all scales."""

    def _bytes(self, rows: Tensor, rank: int) -> Tensor:
        groups = rank // GROUP
        end = groups * (GROUP + SCALE)
        both = rows[:, :end].unflatten(1, (groups, GROUP + SCALE))
        return torch.cat([both[..., :GROUP].flatten(1), both[..., GROUP:].flatten(1), rows[:, end:]], 1)


class PartsInAnotherOrder(Misread):
    """The parts of a row are read in another order: the rotary key before the scales, or scales before values."""

    variants: Sequence[Any] = ("rotary key first", "scales first")

    def _bytes(self, rows: Tensor, rank: int) -> Tensor:
        scales, rope = rank // GROUP * SCALE, ROPE * self._rope_size(rank)
        if self.variant == "scales first":
            scale, quantized, rotary = rows[:, : scales + rank + rope].split((scales, rank, rope), 1)
        else:
            quantized, rotary, scale = rows[:, : rank + rope + scales].split((rank, rope, scales), 1)
        return torch.cat([quantized, scale, rotary], 1)
