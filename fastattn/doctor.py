"""`fastattn doctor`: which kernels this machine can run, what each of them computes, and why not the rest."""

import importlib
from dataclasses import replace
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastattn import kernels
from fastattn.kernels import Options, Problem
from fastattn.kernels.machine import package_version

PACKAGES = {"cpu": "torch", "torch_flash": "torch", "fa2": "flash-attn", "fa4": "flash-attn-4", "triton": "triton"}


def run(console: Console | None = None) -> None:
    """Print a table of the kernels, and for each device a table of what they compute there.

    Args:
        console: where to print; standard output if None.
    """
    console = console or Console()
    loaded = {name: importlib.import_module(f"fastattn.kernels.{name}") for name in kernels.NAMES}
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    usual = {device: _usual(device) for device in devices}

    table = Table(title="Kernels")
    for column in ("kernel", "package", "version", *map(_describe, devices)):
        table.add_column(column)
    for name, module in loaded.items():
        states = [_state(module, usual[device]) for device in devices]
        table.add_row(name, PACKAGES[name], package_version(PACKAGES[name]) or "not installed", *states)
    console.print(table)

    for device in devices:
        here = {name: module for name, module in loaded.items() if _reason(module, usual[device]) is None}
        console.print(_features(device, here, usual[device]))


def _features(device: torch.device, here: dict[str, ModuleType], usual: Problem) -> Table:
    """Make the table of features by kernels: the one that is taken, those that can too, and the reasons of the rest."""
    table = Table(title=f"What runs on {_describe(device)}")
    table.add_column("problem")
    for name in here:
        table.add_column(name, overflow="fold")
    table.add_column("taken")
    for feature, problem in _problems(usual).items():
        reasons = [_reason(module, problem) for module in here.values()]
        try:
            taken = kernels.choose(problem).__name__.rpartition(".")[2]
        except NotImplementedError:
            taken = "none"
        cells = [Text("yes", style="green") if reason is None else Text(reason, style="dim") for reason in reasons]
        table.add_row(feature, *cells, taken)
    return table


def _usual(device: torch.device) -> Problem:
    """Describe a usual problem: a chunk of a prompt over pages of 16 tokens, with the heads of an 8B model."""
    return Problem(
        device=device,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        value_head_size=128,
        block_size=16,
        max_query_len=512,
        max_seq_len=4096,
        num_seqs=4,
    )


def _problems(usual: Problem) -> dict[str, Problem]:
    """Vary the usual problem, one property at a time."""
    per_head = torch.ones(usual.num_heads, device=usual.device)
    problems = {
        "prefill, pages of 16": usual,
        "prefill, pages of 256": replace(usual, block_size=256),
        "prefill, no pages": replace(usual, block_size=None),
        "decode": replace(usual, max_query_len=1),
        "head size 64": replace(usual, head_size=64, value_head_size=64),
        "head size 256": replace(usual, head_size=256, value_head_size=256),
        "keys of 192, values of 128": replace(usual, head_size=192),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        problems[str(dtype).removeprefix("torch.")] = replace(usual, dtype=dtype)
    for feature, options in {
        "not causal": Options(causal=False),
        "window": Options(window_size=(1023, 0)),
        "softcap": Options(softcap=30.0),
        "ALiBi": Options(alibi_slopes=per_head),
        "sinks": Options(sinks=per_head),
        "batch invariant": Options(batch_invariant=True),
    }.items():
        problems[feature] = replace(usual, options=options)
    return problems


def _state(module: ModuleType, problem: Problem) -> Text:
    reason = _reason(module, problem)
    return Text("runs", style="green") if reason is None else Text(f"no: {reason}", style="dim")


def _reason(module: ModuleType, problem: Problem) -> str | None:
    reason: str | None = module.supports(problem)
    return reason


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return f"{device}, {torch.cuda.get_device_name(device)}"
