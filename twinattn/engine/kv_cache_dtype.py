"""What the pools hold by the engine's `kv_cache_dtype`: the storage of each layer, and its scales by a calibration."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from refattn.checks import check, describe
from refattn.packed_latents import packed_size
from twinattn.engine.compressed_storage import SharedStorage
from twinattn.engine.layers import AnyStorage, Layer
from twinattn.engine.storages import (
    CalibrationStats,
    FourBitStorage,
    LatentStorage,
    PagedStorage,
    PairedStorage,
    QuantizedStorage,
)
from twinattn.engine.twin import Twin

KV_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
FOUR_BITS = {"int4": 2, "nvfp4": 16}  # keys and values of 4 bits, and what has to divide the size of a head
PACKED_ROWS = "fp8_ds_mla"  # bytes per latent: quantized values, a scale for each 128 of them, and a rotary key
NAMES = ("auto", *KV_CACHE_DTYPES, *FOUR_BITS, PACKED_ROWS)
IN_WORDS = {  # kinds of storages whose name is no word
    "SelectedLatents": "latents",
    "SharedKeys": "shared keys and values (DeepSeek-V4)",
    "CompressedKeys": "compressed keys (DeepSeek-V4)",
}
KEY_RANGE, VALUE_RANGE = 200.0, 100.0  # what the largest numbers of a first step become in fp8, as in vLLM


def check_name(kv_cache_dtype: str) -> None:
    """Check that an engine knows a type of cache.

    Raises:
        ValueError: if it does not.
    """
    if kv_cache_dtype not in NAMES:
        raise ValueError(f"kv_cache_dtype: expected {', '.join(NAMES)}, got {kv_cache_dtype!r}")


def check_kernel(kv_cache_dtype: str, package: str, device: torch.device) -> None:
    """Check that a package has a kernel which attends to a type of cache on a device.

    Raises:
        NotImplementedError: if it has none.
    """
    if (kv_cache_dtype, package) == ("nvfp4", "fastattn") and device.type != "cpu":
        raise NotImplementedError(
            f"kv_cache_dtype: fastattn attends to nvfp4 on a CPU alone, not on {device.type}; int4 has a kernel there"
        )


def quantize(layers: Sequence[Layer], kv_cache_dtype: str) -> list[Layer]:
    """Return layers with pools of a type: those given for "auto", else quantized ones.

    Raises:
        ValueError: if there is no such type, or no packed rows of a layer's sizes.
        NotImplementedError: if a storage has no such type.
    """
    check_name(kv_cache_dtype)
    if kv_cache_dtype == "auto":
        return list(layers)
    if kv_cache_dtype == PACKED_ROWS:
        return [replace(layer, storage=_pack(layer.storage)) for layer in layers]
    if kv_cache_dtype in FOUR_BITS:
        return [replace(layer, storage=_in_four_bits(layer.storage, kv_cache_dtype)) for layer in layers]
    return [replace(layer, storage=_quantize(layer.storage, KV_CACHE_DTYPES[kv_cache_dtype])) for layer in layers]


def _quantize(storage: AnyStorage, dtype: torch.dtype) -> AnyStorage:
    if isinstance(storage, PagedStorage | QuantizedStorage):
        return QuantizedStorage(storage.num_kv_heads, storage.head_size, dtype)
    if dtype == torch.int8:
        others = f", {PACKED_ROWS}" if isinstance(storage, LatentStorage) else ""
        raise NotImplementedError(
            f"kv_cache_dtype: the engine keeps no {_in_words(storage)} in a pool of int8, only of auto, fp8_e4m3, "
            f"fp8_e5m2{others}"
        )
    assert isinstance(storage, PairedStorage | LatentStorage | SharedStorage)
    return replace(storage, dtype=dtype)


def _in_four_bits(storage: AnyStorage, kind: str) -> AnyStorage:
    if not isinstance(storage, PagedStorage):
        raise NotImplementedError(f"kv_cache_dtype: the engine keeps no {_in_words(storage)} in a pool of {kind}")
    divisor = FOUR_BITS[kind]
    if storage.head_size % divisor:
        raise ValueError(
            f"kv_cache_dtype: expected another than {kind} for this model, whose heads have {storage.head_size} "
            f"elements, no multiple of {divisor}"
        )
    return FourBitStorage(storage.num_kv_heads, storage.head_size, kind)


def _pack(storage: AnyStorage) -> AnyStorage:
    if not isinstance(storage, LatentStorage):
        raise NotImplementedError(
            f"kv_cache_dtype: the engine keeps no {_in_words(storage)} in the packed rows of {PACKED_ROWS}, "
            "only latents (MLA)"
        )
    try:
        packed_size(storage.latent_rank, storage.rope_size)
    except ValueError as error:
        raise ValueError(f"kv_cache_dtype: expected another than {PACKED_ROWS} for this model; {error}") from None
    return replace(storage, dtype=torch.uint8)


def _in_words(storage: AnyStorage) -> str:
    """Return the name of a storage in an error message."""
    return IN_WORDS.get(storage.kind, storage.kind.lower())


def set_scales(
    layers: Sequence[Layer],
    calibration: Sequence[CalibrationStats],
    twin: Twin,
    owners: Sequence[int],
    device: torch.device,
) -> list[Layer]:
    """Return quantized layers with the scales that a calibration asks for.

    Args:
        layers: from `quantize`.
        calibration: from `calibrate`, one for each layer.
        twin: the package that computes.
        owners: of each layer the one whose pool it reads, and so whose scales it has.
        device: where the scales are to be.

    Raises:
        ValueError: if the calibration is not that of these layers.
    """
    if not isinstance(calibration, Sequence) or len(calibration) != len(layers):
        number = len(calibration) if isinstance(calibration, Sequence) else type(calibration).__name__
        raise ValueError(f"calibration: expected CalibrationStats for each of {len(layers)} layers, got {number}")
    for i, (layer, amax) in enumerate(zip(layers, calibration, strict=True)):
        if not isinstance(amax, CalibrationStats):
            raise ValueError(f"calibration[{i}]: expected CalibrationStats, got {describe(amax)}")
        stored = layer.storage
        key_size = value_size = stored.num_kv_heads, stored.head_size
        if isinstance(stored, LatentStorage):
            key_size, value_size = (1, stored.latent_rank), (1, stored.rope_size)
        for name, largest, size in (("key", amax.key, key_size), ("value", amax.value, value_size)):
            check(dict(zip(("hk", "d"), size, strict=True)), **{f"calibration[{i}].{name}": (largest, "float32 hk d")})
            if not largest.is_cpu or not largest.isfinite().all() or (largest < 0).any():
                raise ValueError(f"calibration[{i}].{name}: expected finite magnitudes on the CPU, got others")
    return [layer.calibrated(twin, calibration[owner], device) for layer, owner in zip(layers, owners, strict=True)]
