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
    problems = {device: _problems(device) for device in devices}

    table = Table(title="Kernels")
    for column in ("kernel", "package", "version", *map(_describe, devices)):
        table.add_column(column)
    for name, module in loaded.items():
        states = [_state(module, problems[device]) for device in devices]
        table.add_row(name, PACKAGES[name], package_version(PACKAGES[name]) or "not installed", *states)
    console.print(table)

    for device in devices:
        here = {name: module for name, module in loaded.items() if None in _reasons(module, problems[device])}
        console.print(_features(device, here, problems[device]))


def _features(device: torch.device, here: dict[str, ModuleType], problems: dict[str, Problem]) -> Table:
    """Make the table of features by kernels: the one that is taken, those that can too, and the reasons of the rest."""
    table = Table(title=f"What runs on {_describe(device)}")
    table.add_column("problem")
    for name in here:
        table.add_column(name, overflow="fold")
    table.add_column("taken")
    for feature, problem in problems.items():
        try:
            taken = kernels.choose(problem).__name__.rpartition(".")[2]
        except NotImplementedError:
            taken = "none"
        table.add_row(feature, *(_cell(module, problem) for module in here.values()), taken)
    return table


def _cell(module: ModuleType, problem: Problem) -> Text:
    """Say whether a kernel computes a problem, or does so where there are no pages, or why not."""
    if module.supports(problem) is None:
        return Text("yes", style="green")
    reason = module.supports(replace(problem, block_size=None))
    return Text("over rows only", style="yellow") if reason is None else Text(reason, style="dim")


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


def _problems(device: torch.device) -> dict[str, Problem]:
    """Describe the usual problem first, then others that differ in one property."""
    usual = _usual(device)
    per_head = torch.ones(usual.num_heads)  # nobody reads it
    problems = {
        "prefill, pages of 16": usual,
        "prefill, pages of 256": replace(usual, block_size=256),
        "prefill, no pages": replace(usual, block_size=None),
        "decode": replace(usual, max_query_len=1),
        "decode, pages of 256": replace(usual, max_query_len=1, block_size=256),
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


def _state(module: ModuleType, problems: dict[str, Problem]) -> Text:
    """Say whether a kernel runs, by the usual problem; where it computes others only, what keeps it from that one."""
    first, *others = _reasons(module, problems)
    if first is None:
        return Text("runs", style="green")
    return Text(f"in part: {first}", style="yellow") if None in others else Text(f"no: {first}", style="dim")


def _reasons(module: ModuleType, problems: dict[str, Problem]) -> list[str | None]:
    """Say of each problem why a kernel can't compute it, or None."""
    return [module.supports(problem) for problem in problems.values()]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return f"{device}, {torch.cuda.get_device_name(device)}"
