"""What SmolLM2 loses by a quantized cache: perplexity and KL divergence of the demo's prompts.

`twinattn quantization-quality` measures it.

The model reads each prompt once, and every query attends to keys and values out of the cache, its own token's too. The
KL divergence is that of the next token's distribution from the one over an unquantized cache, a mean over positions.
Rows "turned" turn keys and values by a Hadamard matrix first; "not turned" is int4 without its turn.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import fastattn
from fastattn.kernels.torch_ops import four_bits
from refattn.checks import check_folder
from refattn.options import AttentionOptions
from twinattn.bench.measure import circumstances, machine
from twinattn.engine import Engine, SamplingParams, calibrate
from twinattn.engine.demo_work import BLOCK_SIZE, prepare
from twinattn.engine.request import Request, StepTokens

ROWS = {  # the kv_cache_dtype, whether scales are calibrated, and the turn, if it is not that of the format
    "unquantized": ("auto", False, ""),
    "fp8_e4m3": ("fp8_e4m3", False, ""),
    "int8": ("int8", True, ""),
    "int8 keys": ("int8", False, ""),
    "int8 keys, turned": ("int8", False, "turned"),
    "int4, not turned": ("int4", False, "not turned"),
    "int4": ("int4", False, ""),
    "nvfp4": ("nvfp4", False, ""),
    "nvfp4, turned": ("nvfp4", False, "turned"),
}


def turned(storage: Any) -> Any:
    """Return a storage of an engine with everything turned by a Hadamard matrix: the same, but for rounding."""
    kind: Any = type(storage)
    return _turned_kind(kind)(**vars(storage))


@cache
def _turned_kind(kind: Any) -> Any:
    class Turned(kind):
        """Keys and values are turned before they are written, queries and outputs in attention."""

        def write(self, twin: Any, key: Tensor, value: Tensor, cache: Any, slot_mapping: Tensor) -> None:
            """Turn new tokens and write them."""
            kind.write(self, twin, four_bits.turn(key), four_bits.turn(value), cache, slot_mapping)

        def attend(
            self, twin: Any, module: Any, tokens: Any, cache: Any, plan: Any, options: AttentionOptions
        ) -> Float[Tensor, "t h d"]:
            """Turn the queries, attend, and turn the output back."""
            out = kind.attend(self, twin, module, (four_bits.turn(tokens[0]), *tokens[1:]), cache, plan, options)
            return four_bits.turn(out)

    return Turned


@contextmanager
def without_turns(name: str) -> Iterator[None]:
    """Leave the turn out of int4 inside a `with` block, if the row says so."""
    if name != "not turned":
        yield
        return
    with mock.patch.object(four_bits, "turned_size", lambda size: 1):
        yield


@torch.no_grad()
def logits_of(engine: Engine, prompts: list[list[int]]) -> list[Float[Tensor, "_ vocabulary"]]:
    """Return the logits of each prompt, read out of the cache of an engine, of every position but the last."""
    found = []
    for prompt in prompts:
        blocks = list(range(-(-len(prompt) // BLOCK_SIZE)))
        request = Request(prompt, len(prompt), SamplingParams(max_tokens=1), blocks=blocks)
        inputs = engine.make_inputs(StepTokens.of({request: len(prompt)}))
        inputs["logits_to_keep"] = torch.arange(len(prompt) - 1)
        found.append(engine.run_model(inputs).float())
    return found


def measure(console: Console) -> dict[str, Any]:
    """Return perplexity, KL divergence and the share of equal first choices of each row, and the tokens counted."""
    work = prepare(console, None, 1, "cpu")
    calibration = calibrate(work.model, work.to_calibrate, twin=fastattn)
    exact: list[Tensor] = []
    rows: dict[str, dict[str, float]] = {}
    for name, (kind, is_calibrated, turn) in ROWS.items():
        given = calibration if is_calibrated else None
        with without_turns(turn):
            engine = replace(work, kv_cache_dtype=kind, calibration=given).engine("fastattn")
            if turn == "turned":
                pools = engine.layer_pools
                pools.layers[:] = [replace(layer, storage=turned(layer.storage)) for layer in pools.layers]
            found = [log_softmax(logits, -1) for logits in logits_of(engine, work.prompts)]
        exact = exact or found
        pairs = list(zip(found, exact, work.prompts, strict=True))
        losses = torch.cat([cross_entropy(x, torch.tensor(p[1:]), reduction="none") for x, _, p in pairs])
        off = torch.cat([kl_div(x, y, reduction="none", log_target=True).sum(-1) for x, y, _ in pairs])
        same = torch.cat([x.argmax(-1) == y.argmax(-1) for x, y, _ in pairs])
        rows[name] = dict(
            perplexity=float(losses.mean().exp()), kl=float(off.mean()), same_choice=float(same.float().mean())
        )
        numbers = "".join(f"  {key} {x:.4g}" for key, x in rows[name].items())
        console.print(f"{name:18}{numbers}", highlight=False)
    return dict(tokens=sum(len(prompt) - 1 for prompt in work.prompts), rows=rows)


def run(out: Path) -> None:
    """Measure, and write `quality.json` into a folder: the rows, and when, where and with what they were measured."""
    check_folder("out", out)
    found = measure(Console(soft_wrap=True))
    head = circumstances() | {"machine": machine(torch.device("cpu"))}
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.json").write_text(json.dumps(head | found, indent=1) + "\n")
