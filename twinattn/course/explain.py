"""`twinattn explain --source CALL`: the Triton kernel that a call launches, as the compiler sees it.

The call is prepared as always, up to its first launch, with the sizes of an NVIDIA H200; then `twinattn.course.folded`
folds the kernel for its arguments. Nothing is computed, and no GPU is needed.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch

from fastattn.kernels.triton import attention, tuning
from fastattn.kernels.triton.launch import CHANGING
from refattn.keys import Keys, Latents, Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.steps import make_batch
from refattn.trees import AttentionPlan
from twinattn.course.calls import CALLS, HEADS, KV_HEADS, SIZE
from twinattn.course.folded import Kernel, fold_kernel

SMS, SHARED_MEMORY = 132, 227 * 1024  # an NVIDIA H200


class Call(NamedTuple):
    """The arguments of a call of attention."""

    query: torch.Tensor
    keys: Keys
    plan: AttentionPlan
    options: AttentionOptions


class FirstLaunch(NamedTuple):
    """What a call launches first: the kernel, the grid, and the arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


def call_of(name: str) -> Call:
    """Return the call of a name.

    Raises:
        ValueError: if there is none.
    """
    if name not in CALLS:
        raise ValueError(f"--source: expected one of {', '.join(CALLS)}, got {name}")
    half, is_prompt = torch.bfloat16, name in ("prefill", "window", "rows", "interval")
    num_seqs, query_len, seq_len, block_size = (2, 8192, 8192, 128) if is_prompt else (64, 1, 8192, 16)
    if name == "split":
        num_seqs, seq_len = 1, 131072
    tables = [[0] * (seq_len // block_size)] * num_seqs  # every block is block 0: nothing is computed
    batch = make_batch([query_len] * num_seqs, [seq_len] * num_seqs, tables)
    plan = Plan(batch, block_size, True, (4095, 0) if name == "window" else (-1, -1))
    options = AttentionOptions(softcap=30.0, sinks=torch.zeros(HEADS)) if name == "sinks" else AttentionOptions()
    kind = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(name, half)
    query = torch.zeros(num_seqs * query_len, HEADS, SIZE, dtype=half)
    key, value = torch.zeros(2, 2, block_size, KV_HEADS, SIZE, dtype=kind)
    keys: Keys = Pages(key, value)
    if name == "int8":
        keys = QuantizedPages(key, value, Int8Scales(torch.ones(2, block_size, KV_HEADS), torch.ones(KV_HEADS, SIZE)))
    elif name == "fp8":
        keys = QuantizedPages(key, value, Fp8Scales(0.5, 0.5))
    elif name == "mla":
        query, keys = query.new_zeros(num_seqs, 16, 576), Latents(query.new_zeros(2, block_size, 576), 512)
    elif name == "rows":
        rows = query.new_zeros(num_seqs * seq_len, KV_HEADS, SIZE)
        keys, plan = Rows(rows, rows), Plan(batch)
    elif name == "interval":
        last = torch.arange(seq_len, dtype=torch.int32).repeat(num_seqs)
        plan = Plan(batch, block_size, False, first_visible=last * 0, last_visible=last)
    return Call(query, keys, plan, options)


class _LaunchedError(Exception):
    """What would be launched."""


def launch_of(call: Call) -> FirstLaunch:
    """Return the first kernel that a call launches on an NVIDIA H200, with its arguments, without launching it."""

    def launch(kernel: Any, grid: Any, changing: Mapping[str, Any], arguments: Mapping[str, Any], options: Any) -> None:
        raise _LaunchedError(kernel, grid, changing, arguments)

    def fit(config: Any, device: Any, *, row_bytes: int, key_bytes: int, fewest_stages: int = 1, spare: int = 0) -> Any:
        return tuning.fit_shared_memory(config, row_bytes, key_bytes, SHARED_MEMORY, fewest_stages, spare)

    with ExitStack() as stack:
        for module, name, stand_in in (
            (attention, "Launch", launch),
            (attention, "fit", fit),
            (attention, "can_overlap", lambda device: True),
            (tuning, "sms_of", lambda device: SMS),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        try:
            attention.bind_attend(*call, None, False)
        except _LaunchedError as launched:
            kernel, grid, changing, given = launched.args
    arguments = {name: given[name] for name in kernel.arg_names}
    for path, value in changing.items():
        name, _, of = path.partition(".")
        arguments[name] = arguments[name]._replace(**{of: value})
    return FirstLaunch(kernel, grid, arguments)


def folded(name: str) -> Kernel:
    """Return the kernel of a call of some name, folded."""
    kernel, _, arguments = launch_of(call_of(name))
    return fold_kernel(kernel, arguments, frozenset(CHANGING))


def show(name: str) -> str:
    """Return the kernel of a call as the compiler sees it, as text.

    Raises:
        ValueError: if there is no such call.
    """
    kernel = folded(name)
    first = kernel.functions[0]
    whole = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(attention.attend.fn))))
    read: dict[str, list[str]] = {}
    for path in kernel.read:
        argument, _, of = path.partition(".")
        read.setdefault(argument, []).append(re.sub(r"\.(\d+)", r"[\1]", of))
    lines = [
        f"{name}: {CALLS[name]}; bfloat16, on an NVIDIA H200",
        f"{first.name} has {first.num_lines} lines of {len(whole.splitlines())}, "
        f"and reads {len(kernel.read)} of {kernel.num_fields} fields of its arguments:",
        *(
            line
            for argument, fields in read.items()
            for line in textwrap.wrap(f"  {argument:<8} {', '.join(fields)}", 110, subsequent_indent=" " * 11)
        ),
        "The storage, the mask and the split carry these functions; one of a single line is put in where it is called:",
        *(f"  {path:<18} {function.fn.__name__}" for path, function in kernel.called.items()),
    ]
    return "\n".join([*(f"# {line}" for line in lines), *(f"\n\n{each.source()}" for each in kernel.functions)])
