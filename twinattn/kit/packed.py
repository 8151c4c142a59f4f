"""Packed latents: rows of bytes that test each part of the format, and poison for bytes that no query may see.

    fp8 (e4m3)         scales                    rotary key
    -448 .. 448        one per 128               bfloat16, not quantized

The parts of a row are drawn directly, not written by the reference: a kernel may find any quantized value under any
scale.
"""

import torch
from torch import Tensor

from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE, packed_parts, packed_size

KINDS = ("mixed", "apart", "largest", "rotary")
LARGEST = torch.finfo(PACKED_FORMAT).max
NAN = 0xFF  # a byte that is NaN in fp8, and repeated also as a float32 scale and in bfloat16
NAN_CODE = 0x7F  # a byte that is NaN in fp8 alone
POISON = (NAN, 0x7E, 0x44)  # NaN; huge: 448 times a scale of 8e37; finite: 3 times a scale of 785
SPARE = 8  # unused bytes after each row, in some pools: their strides stay multiples of 4
SIZES = {"apart": (1.0, 2.0**-100, 0.0, 2.0**-9), "rotary": (2.0**-6, 2.0**-5, 2.0**-8, 2.0**-7)}  # groups in turn


def pool(latents: Tensor, latent_rank: int, kind: str, seed: int) -> Tensor:
    """Lay latents and rotary keys out in packed rows, `[n, p, bytes]`.

    Args:
        latents: numbers of about 1, `[n, p, r + rope]`.
        latent_rank: elements of a latent.
        kind: "mixed": scales differ between the groups of a token and between tokens, and no byte is NaN in any
            type, so that a misread row gives a finite output; "apart": quantized values up to 448, and groups that
            are tiny compared with others, or zeros; "largest": every quantized value is 448, -448, or a zero of either
            sign; "rotary": the rotary keys decide the scores; "exact": the latents are exact in fp8, with a scale of 1.
        seed: of the scales.
    """
    generator = torch.Generator().manual_seed(seed)
    n, p, size = latents.shape
    groups = latents[..., :latent_rank].float().unflatten(-1, (-1, LATENT_GROUP))
    rope_key = latents[..., latent_rank:].to(torch.bfloat16) * (3 if kind == "rotary" else 1)
    turn = (torch.randint(0, 4, (n, p, 1), generator=generator) + torch.arange(groups.shape[2])) % 4
    sizes = torch.tensor(SIZES.get(kind, (0.25, 0.5, 1.0, 2.0)))[turn]
    scales = sizes * (0.5 + torch.rand(sizes.shape, generator=generator) / 2)
    if kind == "largest":
        groups = torch.tensor([1.0, -1.0, 0.0, -0.0])[torch.randint(0, 4, groups.shape, generator=generator)]
    if kind in ("apart", "largest"):  # the largest value of a group is the largest of the format
        largest = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE)
        groups, scales = groups / largest * LARGEST, scales / LARGEST
        groups = groups.masked_fill(sizes[..., None] == 0, 0.0)
    if kind == "exact":
        scales = torch.ones_like(scales)
    if kind == "mixed":
        scales = (scales.view(torch.int32) & 0x7FBF3F3F).view(torch.float32)
        rope_key = (rope_key.view(torch.int16) & ~0x40).view(torch.bfloat16)
    rows = torch.zeros(n, p, packed_size(latent_rank, size - latent_rank), dtype=torch.uint8)
    quantized, its_scales, rotary = packed_parts(rows, latent_rank, size - latent_rank)
    quantized.copy_(groups.clamp(-LARGEST, LARGEST).to(PACKED_FORMAT).view(torch.uint8).flatten(-2))
    its_scales.copy_(scales.clamp(min=SMALLEST_SCALE))
    rotary.copy_(rope_key)
    return rows


def poisoned(rows: Tensor) -> Tensor:
    """Return poison in the shape of rows `[slots, c]`, another kind in each."""
    turn = torch.arange(len(rows)) % len(POISON)
    return torch.tensor(POISON, dtype=torch.uint8)[turn][:, None].expand(rows.shape).to(rows.device)


def wider(cache: Tensor, spare: int) -> Tensor:
    """Return a pool with `spare` unused bytes at the end of each row."""
    return torch.nn.functional.pad(cache, (0, spare), value=NAN)


def with_gaps(cache: Tensor, spare: int) -> Tensor:
    """Return a view of a pool with `spare` unused bytes after each row, and unused rows after each page."""
    n, p, c = cache.shape
    memory = torch.full((n, 2 * p, c + spare), NAN, dtype=torch.uint8, device=cache.device)
    view = memory[:, :p, :c]
    view.copy_(cache)
    return view
