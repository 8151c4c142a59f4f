"""Layers: every mask over every storage, by either twin, against the formula in float64."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from refattn.options import AttentionOptions
from twinattn.engine.layers import Causal, Chunk, Layer, Window
from twinattn.engine.storages import CalibrationStats, LatentStorage, PagedStorage, PairedStorage, QuantizedStorage
from twinattn.engine.twin import Twin

FP8, INT8 = torch.float8_e4m3fn, torch.int8
H, HK, D = 8, 4, 8  # four KV heads, so that the order of interleaved pairs is not that of the model
RANK, ROPE, NOPE, DV = 16, 8, 12, 6
BLOCK = 4
LENS = [(1, 21), (1, 6), (7, 19), (9, 9)]  # new tokens, and all: decodes, a later chunk of a prompt, a first one
TABLES = [[9, 2, 7, 0, 11, 4], [3, 13], [1, 15, 5, 8, 12], [6, 10, 14]]
MASKS = {"causal": Causal(), "window": Window(5), "chunk": Chunk(8)}
STORAGES = {
    "pages": PagedStorage(HK, D),
    "fp8": QuantizedStorage(HK, D, FP8),
    "int8": QuantizedStorage(HK, D, INT8),
    "pairs": PairedStorage(HK, D),
    "pairs in fp8": PairedStorage(HK, D, FP8),
    "latents": LatentStorage(RANK, ROPE),
    "latents, batch-invariant": LatentStorage(RANK, ROPE, batch_invariant=True),
    "latents in fp8": LatentStorage(RANK, ROPE, dtype=FP8),
    "latents, packed": LatentStorage(256, ROPE, dtype=torch.uint8),  # a scale for each half of a latent
}
SCALE = 0.3


def draw_tokens(storage):
    """Return the queries, keys and values of all tokens of each sequence, and the module of a layer."""
    torch.manual_seed(0)
    sizes = [(H, D), (HK, D), (HK, D)]
    module = SimpleNamespace(**{f"lambda_{x}{i}": torch.randn(D) / 4 for x in "qk" for i in (1, 2)}, lambda_init=0.4)
    module.groupnorm = SimpleNamespace(weight=torch.rand(2 * D) + 0.5, eps=1e-5)
    if isinstance(storage, LatentStorage):
        sizes = [(H, NOPE + ROPE), (1, storage.latent_rank), (1, ROPE)]
        module.kv_b_proj = nn.Linear(storage.latent_rank, H * (NOPE + DV), bias=False)
    spread = torch.logspace(-1, 1, HK)[:, None]  # so that heads under the scale of another are seen
    tokens = [[torch.randn(seq_len, *size) for size in sizes] for _, seq_len in LENS]
    if not isinstance(storage, LatentStorage):
        tokens = [[query, key * spread, value * spread] for query, key, value in tokens]
    return tokens, module


def seen(mask, query_len, seq_len):
    """Return who sees whom, `[t, s]`."""
    i, j = torch.arange(seq_len - query_len, seq_len)[:, None], torch.arange(seq_len)
    visible = j <= i
    if isinstance(mask, Window):
        return visible & (j > i - mask.window)
    return visible & (j // 8 == i // 8) if isinstance(mask, Chunk) else visible


def softmax_times(query, key, value, visible):
    """Attend in float64; keys and values have a head for each query head, or one for a group."""
    key, value = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("thd,shd->hts", query.double() * SCALE, key).masked_fill(~visible, -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value)


def rounded(x, scale, dtype):
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(dtype).float() * scale


def by_row(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def by_hand(layer, module, query, key, value, visible):
    """Return the output of the last tokens of a sequence, over keys and values that are rounded as its pool does."""
    storage = layer.storage
    if isinstance(storage, LatentStorage):
        latent, rope_key = (x if storage.dtype != FP8 else rounded(x, storage.cache_scale, FP8) for x in (key, value))
        if storage.dtype == torch.uint8:
            halves = latent.unflatten(-1, (2, 128))
            latent = rounded(halves, halves.abs().amax(-1, keepdim=True) / 448, FP8).flatten(-2)
            rope_key = rope_key.bfloat16().float()
        weight = module.kv_b_proj.weight.detach().cpu().unflatten(0, (H, -1))
        made = torch.einsum("hmr,sr->shm", weight.double(), latent[:, 0].double())
        key = torch.cat([made[..., :NOPE], rope_key.double().expand(-1, H, -1)], -1)
        return softmax_times(query, key, made[..., NOPE:], visible)
    if getattr(storage, "dtype", None) == INT8:
        return softmax_times(by_row(query), by_row(key), value, visible)
    if getattr(storage, "dtype", None) == FP8:
        key, value = (rounded(x, x_scale(storage, name), FP8) for name, x in (("key", key), ("value", value)))
    if not isinstance(storage, PairedStorage):
        return softmax_times(query, key, value, visible)
    first, second = slice(None, HK // 2), slice(HK // 2, None)  # first heads of all pairs, then their second heads
    both = torch.cat([value[:, first], value[:, second]], -1)
    one = softmax_times(query[:, : H // 2], key[:, first], both, visible)
    other = softmax_times(query[:, H // 2 :], key[:, second], both, visible)
    product = [(getattr(module, f"lambda_q{i}") * getattr(module, f"lambda_k{i}")).sum().exp() for i in (1, 2)]
    difference = one - (product[0] - product[1] + module.lambda_init) * other
    normed = difference / (difference.square().mean(-1, keepdim=True) + module.groupnorm.eps).sqrt()
    out = (1 - module.lambda_init) * normed * module.groupnorm.weight
    return out.flatten(1).unflatten(1, (H, D))


def x_scale(storage, name):
    """Return the scale of each head in the order of the model, `[hk, 1]`."""
    scale = getattr(storage, f"{name}_scale")
    if isinstance(scale, float):
        return torch.full((HK, 1), scale)
    return (scale[[0, 2, 1, 3]] if isinstance(storage, PairedStorage) else scale).cpu()[:, None]


def attended(layer, twin, device, tokens, module, *, as_trees=False):
    """Write the contexts, attend over them in a step of their own, and return what the new tokens of `LENS` get."""
    twin, device = Twin(importlib.import_module(twin)), torch.device(device)
    module = to_device(module, device)
    cache = layer.storage.allocate(twin, 16, BLOCK, dtype=torch.float32, device=device)
    options = AttentionOptions(SCALE, batch_invariant=getattr(layer.storage, "batch_invariant", False))
    contexts = [(seq_len - query_len, seq_len - query_len) for query_len, seq_len in LENS]
    for lens in (contexts, LENS):
        batch = twin.metadata.make_batch(*zip(*lens, strict=True), TABLES, device=device)
        slots = twin.metadata.slot_mapping(batch, sum(new for new, _ in lens), block_size=BLOCK)
        rows = [[x[seq_len - new : seq_len] for x in xs] for (new, seq_len), xs in zip(lens, tokens, strict=True)]
        rows = [torch.cat(x).to(device) for x in zip(*rows, strict=True)]
        if as_trees and lens is LENS:
            trees = twin.speculative.make_trees([list(range(-1, new - 1)) for new, _ in lens], device=device)
            parts = layer.plan_trees(twin, batch, trees, BLOCK)
        else:
            ordered = lens if lens is LENS else None  # an empty context is no request of a step
            parts = layer.plan(twin, batch, BLOCK, ordered)
        with torch.no_grad():
            out = layer.attend(twin, module, *rows, cache, slots, parts, options)
    return out.cpu(), parts


def to_device(module, device):
    moved = {name: x.to(device) if isinstance(x, torch.Tensor | nn.Module) else x for name, x in vars(module).items()}
    moved["groupnorm"] = SimpleNamespace(weight=module.groupnorm.weight.to(device), eps=module.groupnorm.eps)
    return SimpleNamespace(**moved)


def expected_of(layer, tokens, module):
    outs = []
    for (new, seq_len), (query, key, value) in zip(LENS, tokens, strict=True):
        outs.append(by_hand(layer, module, query[-new:], key, value, seen(layer.mask, new, seq_len)))
    return torch.cat(outs)


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_goes_with_every_storage(mask, storage, twin, device):
    layer = Layer(MASKS[mask], STORAGES[storage])
    tokens, module = draw_tokens(layer.storage)
    out, parts = attended(layer, twin, device, tokens, module)
    torch.testing.assert_close(out.double(), expected_of(layer, tokens, module).double(), rtol=2e-5, atol=2e-5)
    splits = mask == "chunk" or (mask == "causal" and storage in ("latents", "latents in fp8", "latents, packed"))
    assert layer.splits_decodes == splits and len(parts) == 1 + splits
    if layer.takes_trees:
        chain, _ = attended(layer, twin, device, tokens, module, as_trees=True)
        torch.testing.assert_close(chain, out, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
@pytest.mark.parametrize("storage", ["fp8", "pairs in fp8", "latents in fp8"])
def test_scales_by_the_largest_numbers_reach_every_head(storage, twin, device):
    layer = Layer(Causal(), STORAGES[storage])
    tokens, module = draw_tokens(layer.storage)
    amax = CalibrationStats(*(torch.cat(x).abs().amax(0) for x in list(zip(*tokens, strict=True))[1:]))
    layer = layer.calibrated(Twin(importlib.import_module(twin)), amax, torch.device(device))
    assert layer == Layer(Causal(), STORAGES[storage]), "no plan depends on scales"
    out, _ = attended(layer, twin, device, tokens, module)
    if storage == "latents in fp8":
        scales = dict(cache_scale=max(float(x.max()) for x in amax) / 448)
    else:
        order = [0, 2, 1, 3] if storage == "pairs in fp8" else [0, 1, 2, 3]
        scales = {f"{name}_scale": x.amax(-1)[order] / 448 for name, x in amax._asdict().items()}
    by_hand = replace(layer, storage=replace(layer.storage, **scales))
    torch.testing.assert_close(out.double(), expected_of(by_hand, tokens, module).double(), rtol=2e-5, atol=2e-5)


def test_what_a_layer_takes_is_what_its_mask_and_its_storage_take():
    flags = {
        (mask, storage): (layer.takes_cascades, layer.takes_trees)
        for mask in MASKS
        for storage in ("pages", "int8", "pairs", "latents")
        for layer in [Layer(MASKS[mask], STORAGES[storage])]
    }
    storages = ("pages", "int8", "pairs", "latents")
    assert [pair for pair, (cascades, _) in flags.items() if cascades] == [("causal", storage) for storage in storages]
    with_trees = [(mask, storage) for mask in ("causal", "window") for storage in storages]
    assert [pair for pair, (_, trees) in flags.items() if trees] == with_trees
    assert str(Layer(Window(5), PairedStorage(HK, D))) == "Window over Pairs"


def test_layers_are_equal_by_mask_and_storage():
    layer = Layer(Window(5), PagedStorage(HK, D))
    assert layer == Layer(Window(5), PagedStorage(HK, D)) and hash(layer) == hash(Layer(Window(5), PagedStorage(HK, D)))
    others = [
        replace(layer, mask=Window(6)),
        replace(layer, mask=Chunk(5)),
        replace(layer, storage=PairedStorage(HK, D)),
    ]
    assert layer not in others
