"""The error of keys and values of 8 and of 4 bits, Gaussian ones and those of SmolLM2: `twinattn quantization`.

The error of a tensor is the root mean square of the change, divided by that of the numbers, as attention would read
them. It is computed for each layer; the mean over the layers and the worst layer are reported.
"""

import json
from pathlib import Path

import torch
from einops import rearrange
from rich.console import Console
from torch import Tensor

from fastattn import quantized
from refattn.checks import check_folder
from refattn.rounding import from_int4, from_nvfp4
from refattn.scales import Fp8Scales, Int8Scales
from twinattn.bench.measure import circumstances, machine
from twinattn.engine import Engine, SamplingParams
from twinattn.engine.demo_model import load, model_file
from twinattn.engine.demo_prompts import DIARY
from twinattn.engine.kv_cache_dtype import FOUR_BITS, KV_CACHE_DTYPES
from twinattn.progress import Progress

FORMATS = (*KV_CACHE_DTYPES, *FOUR_BITS)
BLOCK_SIZE = 16


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return the errors by data, by format, and by tensor."""
    generator = torch.Generator().manual_seed(0)
    gaussian = [tuple(torch.randn(2, 1024, 8, 128, generator=generator))]
    return {"gaussian": errors_of(gaussian), "smollm2": errors_of(of_smollm2())}


def of_smollm2() -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values that SmolLM2 computes for the longest prompt of the demo, layer by layer."""
    model, tokenizer = load(model_file())
    messages = [{"role": "user", "content": DIARY}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    num_blocks = -(-len(prompt) // BLOCK_SIZE) + 1
    engine = Engine(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=len(prompt))
    seen: list[tuple[Tensor, Tensor]] = []
    request = engine.add(prompt, SamplingParams(max_tokens=2))
    engine.step()
    for key_cache, value_cache in engine.caches:
        rows = (rearrange(cache[request.blocks], "m p hk d -> (m p) hk d") for cache in (key_cache, value_cache))
        key, value = (x[: len(prompt)].clone() for x in rows)
        seen.append((key, value))
    return seen


def errors_of(layers: list[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Return for each format the relative error of keys and of values, as a mean over layers and of the worst one."""
    found = {}
    for name in FORMATS:
        by_layer = torch.tensor([[float(error) for error in _errors(key, value, name)] for key, value in layers])
        mean, worst = by_layer.mean(0).tolist(), by_layer.amax(0).tolist()
        found[name] = dict(key=mean[0], value=mean[1], worst_key=worst[0], worst_value=worst[1])
    return found


def _errors(key: Tensor, value: Tensor, name: str) -> tuple[Tensor, Tensor]:
    blocks, rows = -(-len(key) // BLOCK_SIZE), slice(0, len(key))
    read = _read_in_four_bits if name in FOUR_BITS else _read_in_eight_bits
    pairs = zip(read(key, value, name, blocks), (key, value), strict=True)
    off = ((x.flatten(0, 1)[rows] - y).square().mean().sqrt() / y.square().mean().sqrt() for x, y in pairs)
    return next(off), next(off)


def _read_in_eight_bits(key: Tensor, value: Tensor, name: str, blocks: int) -> tuple[Tensor, Tensor]:
    """Write keys and values into pools of 8 bits, and return the pools as attention reads them."""
    kind, sizes = KV_CACHE_DTYPES[name], (blocks, BLOCK_SIZE, *key.shape[1:])
    scales: Fp8Scales | Int8Scales
    by: tuple[Tensor | float, Tensor | float]
    if kind == torch.int8:
        key_cache, value_cache, of_keys = quantized.allocate_int8(*sizes)
        of_values = quantized.value_scales([value])
        scales, by = Int8Scales(of_keys, of_values), (of_keys[..., None], of_values)
    else:
        key_cache, value_cache = torch.zeros(2, *sizes).to(kind)
        scales, by = Fp8Scales(1.0, 1.0, format=kind), (1.0, 1.0)
    quantized.write(key, value, key_cache, value_cache, torch.arange(len(key)), scales=scales)
    return key_cache.float() * by[0], value_cache.float() * by[1]


def _read_in_four_bits(key: Tensor, value: Tensor, name: str, blocks: int) -> tuple[Tensor, Tensor]:
    """Write keys and values into pools of 4 bits, and return the pools as attention reads them, int4 turned back."""
    sizes = blocks, BLOCK_SIZE, *key.shape[1:]
    if name == "int4":
        key_cache, value_cache, of_rows = quantized.allocate_int4(*sizes)
        quantized.write(key, value, key_cache, value_cache, torch.arange(len(key)), scales=of_rows)
        turned = (key_cache, of_rows.key), (value_cache, of_rows.value)
        read = [from_int4(pool, scale, torch.float32) for pool, scale in turned]
    else:
        key_cache, value_cache, of_groups = quantized.allocate_nvfp4(*sizes)
        quantized.write(key, value, key_cache, value_cache, torch.arange(len(key)), scales=of_groups)
        pools = (key_cache, of_groups.key, of_groups.of_keys), (value_cache, of_groups.value, of_groups.of_values)
        read = [from_nvfp4(pool, scale, number, torch.float32) for pool, scale, number in pools]
    return read[0], read[1]


def run(out: Path) -> None:
    """Measure, and write `error.json` into a folder: the errors, and when, where and with what they were measured."""
    check_folder("out", out)
    with Progress(lambda: "Gaussian keys and values, and those of a model"):
        found = measure()
    head = circumstances() | {"machine": machine(torch.device("cpu"))}
    out.mkdir(parents=True, exist_ok=True)
    (out / "error.json").write_text(json.dumps(head | {"errors": found}, indent=1) + "\n")
    console = Console(soft_wrap=True)
    for data, formats in found.items():
        for name, errors in formats.items():
            numbers = "".join(f"  {tensor} {error:.3%}" for tensor, error in errors.items())
            console.print(f"{data:9} {name:9}{numbers}", highlight=False)
