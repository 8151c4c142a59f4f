"""`twinattn doctor`: which kernels this machine can run, what each computes, and why it does not compute the rest."""

import json
import sys
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastattn.kernels.device import package_version
from fastattn.kernels.native.compiler import library
from fastattn.kernels.order import NAMES, choose, priorities, unsupported_reason
from fastattn.kernels.problem import Problem

Notes = dict[str, int]  # the reasons of a table, each with its number

NONE = "none"
WIDE = 70  # console width needed for packages and versions
PACKAGES = {
    "native": "a C compiler",
    "cpu": "torch",
    "torch": "torch",
    "triton": "triton",
    "fa4": "flash-attn-4",
    "fa3": "flash-attn-3",
    "flash_mla": "sgl-flash-mla",
    "flash_qla": "flash-qla",
    "fa2": "flash-attn",
    "torch_flash": "torch",
}


def run(console: Console | None = None) -> None:
    """Print a table of the kernels, and per device (the CPU and each kind of GPU) a table of what they compute.

    A cell has the number of a reason; each reason is printed once, below its table.

    Args:
        console: where to print; standard output if None.
    """
    console = console or Console()
    devices = _devices()
    problems = {device: _problems(device) for device in devices}

    for device in devices:
        console.print(_in_short(device, problems[device]), highlight=False)
    is_wide = console.width >= WIDE
    table = Table(title="Kernels")
    table.add_column("kernel", no_wrap=True)
    for column in (*("package", "version") * is_wide, *map(_describe, devices)):
        table.add_column(column)
    notes: Notes = {}
    for name in NAMES:
        states = [_state(name, problems[device], notes) for device in devices]
        of_package = (PACKAGES[name], _version(PACKAGES[name]) or "not installed") if is_wide else ()
        table.add_row(name, *of_package, *states)
    console.print(table)
    _print_notes(console, notes)

    for device in devices:
        here = [name for name in NAMES if is_wide and None in _reasons(name, problems[device])]
        notes = {}
        console.print(_features(device, here, problems[device], notes))
        _print_notes(console, notes)


def _print_notes(console: Console, notes: Notes) -> None:
    """Print each reason with its number."""
    for reason, number in notes.items():
        console.print(f"({number}) {reason}", style="dim", highlight=False)
    console.print()


def _note(notes: Notes, reason: str) -> str:
    """Return the number of a reason as a table shows it; a new reason gets the next number."""
    return f"({notes.setdefault(reason, len(notes) + 1)})"


def _in_short(device: torch.device, problems: dict[str, Problem]) -> str:
    """Return the kernels that compute prompts and decodes on a device, and the problems that no kernel computes."""
    taken = {feature: _taken(problem) for feature, problem in problems.items()}
    usual, decode = next(iter(taken.values())), taken["decode"]
    first = f"{_describe(device)}: prompts are computed by {usual}, decodes by {decode}."
    missing = [feature for feature, name in taken.items() if name == NONE]
    return f"{first} Everything below runs." if not missing else f"{first} Not computed: {', '.join(missing)}."


def as_dict() -> dict[str, Any]:
    """Return the report as a dict: versions, and per device and problem the chosen kernel and all reasons."""
    versions = {package: _version(package) for package in dict.fromkeys(PACKAGES.values())}
    devices = {}
    for device in _devices():
        problems = _problems(device)
        devices[_describe(device)] = {
            feature: {
                "taken": next(
                    (name for name in priorities(problem) if unsupported_reason(name, problem) is None), None
                ),
                "reasons": {name: unsupported_reason(name, problem) for name in NAMES},
            }
            for feature, problem in problems.items()
        }
    return {"versions": versions, "devices": devices}


def _version(package: str) -> str | None:
    """Return the version of a package, or None; for the C compiler "found" if it compiled the library, or None."""
    if package != PACKAGES["native"]:
        return package_version(package)
    return "found" if isinstance(library(), CDLL) else None


def _devices() -> list[torch.device]:
    """Return the CPU, and the first GPU of each kind."""
    first_of_kind: dict[str, int] = {}
    for i in range(torch.cuda.device_count()):
        first_of_kind.setdefault(torch.cuda.get_device_name(i), i)
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in first_of_kind.values())]


def _features(device: torch.device, here: list[str], problems: dict[str, Problem], notes: Notes) -> Table:
    """Return the table of features by kernels: the chosen one, others that can, and the notes on the rest."""
    table = Table(title=f"What runs on {_describe(device)}")
    table.add_column("problem")
    for name in here:
        table.add_column(name)
    table.add_column("taken")
    for feature, problem in problems.items():
        table.add_row(feature, *(_cell(name, problem, notes) for name in here), _taken(problem))
    table.caption = "–: it has no such function" if here else None
    return table


def _taken(problem: Problem) -> str:
    """Return the kernel chosen for a problem; levels that no kernel takes in one call are computed level by level."""
    try:
        return choose(problem).name
    except NotImplementedError:
        return NONE if problem.levels == 1 else f"{_taken(problem._replace(levels=1))}, level by level"


def _cell(name: str, problem: Problem, notes: Notes) -> Text:
    """Return the cell of a kernel and a problem: yes, over rows only, or the number of the reason why not."""
    reason = unsupported_reason(name, problem)
    if reason is None:
        return Text("yes", style="green")
    if problem.keys == "pages" and problem.levels == 1 and not problem.tree:
        of_rows = problem._replace(keys="rows", block_size=None)
        over_rows = unsupported_reason(name, of_rows)
        if over_rows is None:
            return Text("over rows only", style="yellow")
        if _has_none(reason) and not _has_none(over_rows):
            reason = over_rows  # the reason over rows is more specific
    return Text("–" if _has_none(reason) else f"no {_note(notes, reason)}", style="dim")


def _has_none(reason: str) -> bool:
    """Return whether the reason is only that the kernel has no such function."""
    return reason.startswith("does not compute ")


def _usual(device: torch.device) -> Problem:
    """Return a typical problem: a chunk of a prompt over pages of 16 tokens, with the heads of an 8B model."""
    return Problem(
        operation="attend",
        device=device,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        keys="pages",
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        value_head_size=128,
        block_size=16,
        max_query_len=512,
        max_seq_len=4096,
        num_seqs=4,
        window=(-1, 0),
        num_tokens=4 * 512,
    )


def _problems(device: torch.device) -> dict[str, Problem]:
    """Return the typical problem first, then variants that differ in one property, then other operations."""
    usual = _usual(device)
    problems = {
        "prefill, pages of 16": usual,
        "prefill, pages of 256": usual._replace(block_size=256),
        "prefill, no pages": usual._replace(keys="rows", block_size=None),
        "decode": usual._replace(max_query_len=1),
        "decode, pages of 256": usual._replace(max_query_len=1, block_size=256),
        "head size 64": usual._replace(head_size=64, value_head_size=64),
        "head size 256": usual._replace(head_size=256, value_head_size=256),
        "keys of 192, values of 128": usual._replace(head_size=192),
        "all levels of a cascade in one call": usual._replace(levels=2),
        "differential": usual._replace(operation="differential"),
        "latents": usual._replace(
            keys="latents",
            num_heads=128,
            num_kv_heads=1,
            head_size=512 + 64,
            value_head_size=512,
            block_size=64,
            max_query_len=1,
            uniform=True,
        ),
    }
    quantized = usual._replace(keys="quantized", stored=(torch.float8_e4m3fn, torch.float8_e4m3fn))
    problems |= {
        "prefill, fp8 values": quantized,
        "decode, fp8 values": quantized._replace(max_query_len=1, num_tokens=4),
        "prefill, int8 values": quantized._replace(stored=(torch.int8, torch.int8), rounds_query=True),
        "latents, fp8 values": problems["latents"]._replace(stored=quantized.stored),
        "drafted trees": usual._replace(tree=True, window=(-1, -1), max_query_len=16, num_tokens=64),
        "latents, drafted trees": problems["latents"]._replace(
            tree=True, window=(-1, -1), max_query_len=16, num_tokens=64
        ),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        problems[str(dtype).removeprefix("torch.")] = usual._replace(dtype=dtype)
    problems |= {
        "not causal": usual._replace(window=(-1, -1)),
        "window": usual._replace(window=(1023, 0)),
        "softcap": usual._replace(softcap=True),
        "ALiBi": usual._replace(alibi=True),
        "sinks": usual._replace(sinks=True),
        "batch invariant": usual._replace(batch_invariant=True),
    }
    for operation in ("merge", "add_sinks", "write", "copy_blocks", "slot_mapping", "trim", "cut_chunks"):
        problems[operation] = Problem(operation, device, torch.float32)
    return problems


def _state(name: str, problems: dict[str, Problem], notes: Notes) -> Text:
    """Return whether a kernel runs the typical problem; if it computes only others, why not that one."""
    first, *others = _reasons(name, problems)
    if first is None:
        return Text("runs", style="green")
    if None in others:
        return Text(f"in part {_note(notes, first)}", style="yellow")
    of_its_own = [reason for reason in others if reason is not None and not _has_none(reason)]
    reason = of_its_own[0] if _has_none(first) and of_its_own else first
    return Text(f"no {_note(notes, reason)}", style="dim")


def _reasons(name: str, problems: dict[str, Problem]) -> list[str | None]:
    """Return, per problem, the reason why a kernel can't compute it, or None."""
    return [unsupported_reason(name, problem) for problem in problems.values()]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return f"{device}, {torch.cuda.get_device_name(device)}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(as_dict(), indent=1) + "\n")
