"""Batches in a quantized pool, and quantized values as the numbers that they stand for, by arithmetic of its own."""

import importlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from refattn.four_bits import Int4Scales, Nvfp4Scales
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import HARMLESS, POISON, build
from tests.helpers.tolerance import assert_twins_agree
from tests.table import PLANS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FOUR_BITS = ("int4", "nvfp4")
KINDS = {"e4m3": E4M3, "e5m2": E5M2, "int8": torch.int8, "int8-half": torch.float16}  # the last: int8 keys only


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@lru_cache
def decoded(kind: torch.dtype) -> torch.Tensor:
    """Return the numbers of all 256 quantized values, from what the formats say: sign, exponent, mantissa."""
    exponent_bits, mantissa_bits = (4, 3) if kind == E4M3 else (5, 2)
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    numbers = []
    for code in range(256):
        exponent, mantissa = divmod(code % 128, steps)
        number = (
            mantissa / steps * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / steps) * 2.0 ** (exponent - bias)
        )
        if kind == E4M3 and code % 128 == 127:
            number = math.nan
        if kind == E5M2 and exponent == 31:
            number = math.nan if mantissa else math.inf
        numbers.append(math.copysign(number, -1.0 if code >= 128 else 1.0))
    return torch.tensor(numbers, dtype=torch.float64)


def nearest(x: float, kind: torch.dtype) -> int:
    """Return the quantized value of a finite number: the nearest, the even one of two, at most the largest."""
    numbers = decoded(kind)
    half = 128 if math.copysign(1.0, x) < 0 else 0
    distances = (numbers[half : half + 128] - x).abs().nan_to_num(math.inf, posinf=math.inf)
    best = (distances == distances.min()).nonzero()[:, 0].tolist()
    return half + next((code for code in best if code % 2 == 0), best[0])


def nearest_of(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the quantized values of many finite numbers, each as `nearest` has it."""
    distances = (decoded(kind)[:128] - x.double().abs()[..., None]).abs().nan_to_num(math.inf, posinf=math.inf)
    best = distances == distances.amin(-1, keepdim=True)
    is_even = torch.arange(128) % 2 == 0
    return (2 * best + (best & is_even)).to(torch.uint8).argmax(-1) + 128 * x.signbit()


def numbers_of(quantized: torch.Tensor) -> torch.Tensor:
    """Return dequantized values, before any scale, in float64."""
    if quantized.dtype in (E4M3, E5M2):
        return decoded(quantized.dtype)[quantized.contiguous().view(torch.uint8).long()]
    return quantized.double()


@dataclass
class Stored:
    """A case in a quantized pool, with garbage where no query may look, and what its sequences read, in float64."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: object
    scales: Fp8Scales | Int8Scales | Int4Scales | Nvfp4Scales
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def tensors(self):
        return self.query, self.key_cache, self.value_cache, self.batch

    @property
    def in_bytes(self):
        """The tensors, fp8 as bytes, which a cast of the test leaves alone."""
        pools = [x.view(torch.uint8) if x.dtype in (E4M3, E5M2) else x for x in (self.key_cache, self.value_cache)]
        return self.query, *pools, self.batch


def in_scales(*shape: int, seed: int) -> torch.Tensor:
    """Draw scales that all differ, none of them 1."""
    numbers = torch.linspace(0.31, 1.87, math.prod(shape)) + 0.013 * seed
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return numbers[order].reshape(shape)


def store(
    case,
    kind,
    *,
    dtype=torch.float32,
    seed=0,
    poison=POISON,
    per="sequence",
    round_query=True,
    spread=False,
    device="cpu",
):
    """Lay a case out in 8 or 4 bits; `per`: scales of fp8 per sequence, per head, or one number."""
    inputs = build(case, dtype=torch.float32, seed=seed, poison=poison)
    n, p, hk, d = inputs.key_cache.shape
    dv, b, lengths, table = inputs.value_cache.shape[3], len(case.lens), inputs.batch.seq_lens, inputs.batch.block_table
    slots = [[int(table[i, j // p]) * p + j % p for j in range(s)] for i, (_, s) in enumerate(case.lens)]
    owned = torch.zeros(n * p, dtype=torch.bool)
    owned[[slot for some in slots for slot in some]] = True
    garbage = ~owned.view(n, p, 1)
    harmless = poison is HARMLESS
    if kind in FOUR_BITS:
        pools, scales, numbers = in_four_bits(inputs, garbage, kind, harmless=harmless)
        keys, values = ([rows.flatten(0, 1)[some] for some in slots] for rows in numbers)
    elif kind in ("e4m3", "e5m2"):
        pools = [x.to(KINDS[kind]) for x in (inputs.key_cache, inputs.value_cache)]  # 1e4 and inf: NaN or inf
        shape = {"sequence": (b, hk), "head": (hk,), "number": ()}[per]
        numbers = [in_scales(*shape, seed=i) for i in range(3)]
        key_scale, value_scale, query_scale = numbers if shape else map(float, (0.7, 1.3, 0.4))
        scales = Fp8Scales(key_scale, value_scale, query_scale if round_query else None, KINDS[kind])
        by_sequence = [torch.as_tensor(x).double().expand(b, hk)[..., None] for x in (key_scale, value_scale)]
        of_key, of_value = ([x[i] for i in range(b)] for x in by_sequence)
    else:
        # Garbage of int8 is a number like any other; of its scales, NaN and infinity.
        pools = [
            torch.where(garbage[..., None], 1.0 if harmless else 119.0, (x * 37).nan_to_num())
            .round()
            .clamp(-127, 127)
            .to(torch.int8)
            for x in (inputs.key_cache, inputs.value_cache)
        ]
        if kind == "int8-half":
            pools[1] = inputs.value_cache.half()
        key_scale = torch.where(garbage, inputs.key_cache[..., 0], in_scales(n, p, hk, seed=3) / 37)
        value_scale = in_scales(hk, dv, seed=4) / 37 if kind == "int8" else None
        scales = Int8Scales(key_scale, value_scale)
        of_key = [key_scale.double().reshape(n * p, hk, 1)[some] for some in slots]
        of_value = [torch.ones(()) if value_scale is None else value_scale.double()] * b
    if kind not in FOUR_BITS:
        keys, values = (
            [numbers_of(pool.flatten(0, 1)[some]) * scale for some, scale in zip(slots, of_them, strict=True)]
            for pool, of_them in ((pools[0], of_key), (pools[1], of_value))
        )
    pools = [x.to(device) for x in pools]
    scales = replace(scales, **{name: x.to(device) for name, x in vars(scales).items() if isinstance(x, torch.Tensor)})
    if spread:
        pools = [apart(x) for x in pools]
        if kind in FOUR_BITS:
            scales = replace(scales, key=apart(scales.key), value=apart(scales.value))
        if isinstance(scales, Int8Scales):
            scales = Int8Scales(apart(scales.key), None if scales.value is None else apart(scales.value))
    assert lengths.tolist() == [len(some) for some in slots]
    batch = build(case, dtype=torch.float32, seed=seed, device=device).batch
    return Stored(inputs.query.to(device, dtype), *pools, batch, scales, keys, values)


def in_four_bits(inputs, garbage, kind, *, harmless=True):
    """Return pools of random bytes, scales of all sizes, and the numbers of both pools by hand, `[n, p, hk, d]`.

    The scales of garbage are those of the poison: NaN, infinity and 1e4.
    """
    generator = torch.Generator().manual_seed(7)
    pools, scales, numbers = [], [], []
    for number, cache in ((0.75, inputs.key_cache), (1.25, inputs.value_cache)):
        *rows, d = cache.shape
        pairs = torch.randint(256, (*rows, d // 2), dtype=torch.uint8, generator=generator)
        pools.append(torch.where(garbage[..., None], 17 if harmless else 119, pairs).to(torch.uint8))
        if kind == "int4":
            drawn = torch.rand(rows, generator=generator).mul(0.2).add(0.02)
            scale = torch.where(garbage, cache[..., 0], drawn)
        else:
            drawn = torch.rand(*rows, d // 16, generator=generator).mul(0.5).add(0.1)
            scale = torch.where(garbage[..., None], cache[..., ::16], drawn).to(E4M3)
        scales.append(scale)
        numbers.append(numbers_in_four_bits(pairs, scale, number))
    return pools, Int4Scales(*scales) if kind == "int4" else Nvfp4Scales(*scales, 0.75, 1.25), numbers


def numbers_in_four_bits(pairs: torch.Tensor, scale: torch.Tensor, number: float = 1.0) -> torch.Tensor:
    """Dequantize rows of bytes by hand, in float64: int4 under scales of float32, turned back, or nvfp4."""
    quantized = torch.stack([pairs % 16, pairs // 16], dim=-1).flatten(-2)
    if scale.dtype == torch.float32:
        zero = (scale.view(torch.int32) % 16)[..., None]
        return (scale.double()[..., None] * (quantized.int() - zero)) @ hadamard_by_hand(quantized.shape[-1])
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    groups = decoded(E4M3)[scale.view(torch.uint8).long()].repeat_interleave(16, -1)
    return torch.cat([sizes, -sizes])[quantized.long()] * groups * float(np.float32(number))


@lru_cache
def hadamard_by_hand(size: int) -> torch.Tensor:
    """Return the matrix in float64, element by element: blocks of a power of two, signs by common bits."""
    block = math.gcd(size, 2**20)
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float64) / math.sqrt(block)] * (size // block))


def apart(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with room after every dimension but the last, so that no stride is a product of sizes."""
    room = (
        torch.full([size + 1 + i for i, size in enumerate(x.shape)], 119, dtype=torch.uint8, device=x.device)
        .to(torch.float32)
        .to(x.dtype)
    )
    view = room[tuple(slice(size) for size in x.shape)]
    view.copy_(x)
    return view


def over_quantized(package: str, path: str) -> ModuleType:
    """Return `quantized.attention` with the plan of a path."""
    mixed = ModuleType(f"{package}.{path}")
    mixed.plan = importlib.import_module(f"{package}.{path}").plan
    mixed.attention = importlib.import_module(f"{package}.quantized").attention
    return mixed


def path_of(package: str, plan: str = "causal") -> tuple[ModuleType, dict]:
    """Return `quantized.attention` with the plan of some path, and the arguments of that."""
    name, arguments = PLANS[plan]
    return over_quantized(package, name), arguments


def assert_twins_agree_over_quantized(
    stored: Stored, plan: str = "causal", *, again: bool = True, **options: Any
) -> None:
    """Hold the twin to the reference over the same bytes."""
    name, arguments = PLANS[plan]
    of_both = partial(over_quantized, path=name)
    assert_twins_agree(of_both, *stored.in_bytes, again=again, **arguments, **options, scales=stored.scales)


def in_8_bits(key_cache: torch.Tensor, value_cache: torch.Tensor, kind: str) -> tuple:
    """Return pools whose quantized values are 0, 1 or poison, under scales other than 1, and their scales."""
    if kind in ("e4m3", "e5m2"):
        return (
            key_cache.to(KINDS[kind]),
            (value_cache * 4).to(KINDS[kind]),
            Fp8Scales(0.7, 0.25, format=KINDS[kind]),
        )
    keys, values = ((x * 64).nan_to_num(119.0).clamp(-127, 127).to(torch.int8) for x in (key_cache, value_cache))
    of_values = torch.full(value_cache.shape[2:], 1 / 64, device=values.device) if kind == "int8" else None
    scales = Int8Scales(key_cache[..., 0].contiguous(), of_values)
    return keys, values if kind == "int8" else value_cache.half(), scales


def rounded_by_hand(stored: Stored) -> torch.Tensor:
    """Round queries as the scales say, one number at a time, in float64."""
    scales, query = stored.scales, stored.query
    group = query.shape[1] // stored.key_cache.shape[2]
    result, row = query.double().clone(), 0
    for i, query_len in enumerate(stored.batch.query_lens.tolist()):
        for t in range(row, row + query_len):
            for head in range(query.shape[1]):
                x = query[t, head].float().numpy()
                if isinstance(scales, Int4Scales | Nvfp4Scales):
                    continue
                if isinstance(scales, Int8Scales):
                    scale = np.float32(np.abs(x).max() / np.float32(127))
                    quantized = np.clip(np.rint(x / scale), -127, 127)
                elif scales.query is None:
                    continue
                else:
                    numbers = (
                        torch.as_tensor(scales.query).expand(i + 1, stored.key_cache.shape[2])
                        if torch.as_tensor(scales.query).ndim < 2
                        else scales.query
                    )
                    scale = np.float32(numbers[i, head // group])
                    quantized = decoded(scales.format)[nearest_of(torch.from_numpy(x / scale), scales.format)].numpy()
                result[t, head] = torch.from_numpy(quantized.astype(np.float64) * np.float64(scale))
        row += query_len
    return result


def attended_by_hand(stored: Stored, masks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax in float64 over the dequantized values, one head of one sequence at a time."""
    query = rounded_by_hand(stored)
    h, group = query.shape[1], query.shape[1] // stored.key_cache.shape[2]
    out = torch.zeros(len(query), h, stored.values[0].shape[-1], dtype=torch.float64)
    lse = torch.full((len(query), h), -math.inf, dtype=torch.float64)
    row = 0
    for key, value, mask in zip(stored.keys, stored.values, masks, strict=True):
        q = len(mask)
        for head in range(h):
            weights = (query[row : row + q, head] @ key[:, head // group].T * query.shape[2] ** -0.5).exp() * mask
            total = weights.sum(-1)
            out[row : row + q, head] = weights @ value[:, head // group].double() / total.clamp(min=1e-300)[:, None]
            lse[row : row + q, head] = total.log()
        row += q
    return out, lse
