"""Which kernels steps with prompts compile over fp8: `python -m tests.helpers.compilations fa3`, or `triton`.

The input is JSON, a list of steps, each with the new tokens and the keys of its sequences. For each step a line of JSON
names what is compiled that was not before, but for kernels that Triton itself launches. The GPU is that of
`tests.helpers.compile_kernels`, of compute capability 9.0 with the SMs of an H200, and nothing is compiled in fact.
Layers are those of Qwen3-0.6B. FlashAttention-3 is there, which compiles nothing, or it is not: then our own kernel
attends to dequantized pages.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fastattn.kernels import device as devices
from fastattn.kernels import order
from fastattn.kernels.flash import cannot_expand
from fastattn.kernels.problem import attention_problem
from refattn.batch import Batch
from refattn.keys import QuantizedPages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales

ROOT = Path(__file__).parent.parent.parent
H, HK, D, BLOCK_SIZE = 16, 8, 128, 16
NUM_SMS = 132
Step = list[tuple[int, int]]


def launched(steps: list[Step], *, fa3: bool) -> list[list[str]]:
    """Return the kernels that each step compiles, by a process of its own, where Triton compiles for a GPU."""
    command = [sys.executable, "-m", "tests.helpers.compilations", "fa3" if fa3 else "triton"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = dict(input=json.dumps(steps), capture_output=True, text=True, env=environment, cwd=ROOT)
    run = subprocess.run(command, check=False, **given)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def schedule(prompts: list[int], answers: list[int], budget: int, most_seqs: int) -> list[Step]:
    """Return the steps of a plain scheduler: decodes, and new requests in order while there is room."""
    waiting, running, steps = list(zip(prompts, answers, strict=True)), [], []
    while waiting or running:
        room, step = budget, []
        while waiting and len(running) < most_seqs:
            running.append([*waiting.pop(0), 0, 0])  # tokens of the prompt, of the answer; computed, generated
        for request in running:
            prompt, _, computed, generated = request
            count = min(prompt + generated - computed, room)
            room -= count
            request[2] += count
            request[3] += request[2] == prompt + generated
            if count:
                step.append((count, request[2]))
        running = [request for request in running if request[3] < request[1]]
        steps.append(step)
    return steps


class Compiled:
    """A compiled kernel, whose launch does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: None


def compile_steps(steps: list[Step], fa3: bool) -> None:
    """Attend in each step, and print what is compiled."""
    from tests.helpers import compile_kernels

    compile_kernels.pretend(compile_kernels.GPUS["sm_90"])
    devices.num_sms = order.num_sms = lambda device: NUM_SMS
    order.capability = devices.capability
    from fastattn.kernels.flash.fixup import fix_up
    from fastattn.kernels.flash.recompute import recompute
    from fastattn.kernels.triton import attention, expand, launch

    compiled: list[str] = []

    def note(source: Any, options: dict[str, Any]) -> Compiled:
        compiled.append(f"{source.fn.__name__} {sorted(map(str, source.constants.items()))} {options}")
        return Compiled()

    def fa3_paged(query: Any, key: Any, value: Any, plan: Plan, options: AttentionOptions, out: Any) -> Any:
        """Do what the kernel fa3 does around its package."""
        answer, lse = fix_up(torch.empty_like(query), torch.empty(H, len(query)), plan, options)
        recompute(answer, query, key, value, plan, options)
        return answer, lse

    pool = torch.zeros(4, HK, BLOCK_SIZE, 2 * D, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = Fp8Scales(*(torch.ones(1).expand(HK) for _ in range(2)), format=torch.float8_e4m3fn)
    keys, options = QuantizedPages(*pool.transpose(1, 2).split(D, -1), scales), AttentionOptions(D**-0.5)
    new_empty = torch.Tensor.new_empty

    def with_numbers(x: torch.Tensor, *size: Any, **kind: Any) -> torch.Tensor:
        """Make memory, a table with zeros, as no kernel writes it."""
        made = new_empty(x, *size, **kind)
        return made.zero_() if made.dtype == torch.int32 else made

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(launch.triton, "compile", note))
        patched.enter_context(mock.patch.object(expand, "_repage_kernel", mock.MagicMock()))
        patched.enter_context(mock.patch.object(torch.Tensor, "new_empty", with_numbers))
        for step in steps:
            before, (new, lens) = len(compiled), torch.tensor(step, dtype=torch.int32).T
            ends, longest = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int(), int(lens.max())
            table = torch.zeros(len(step), -(-longest // BLOCK_SIZE), dtype=torch.int32)
            plan = Plan(Batch(ends, lens.contiguous(), table, int(new.max()), longest), BLOCK_SIZE)
            query = torch.empty(int(ends[-1]), H, D, dtype=torch.bfloat16)
            problem = attention_problem(query, keys, plan, options)._replace(device=torch.device("cuda"))
            if fa3 and "fa3" in order.priorities(problem) and cannot_expand(problem) is None:
                expand.attend_dequantized(fa3_paged, query, keys, plan, options, None)
            else:
                attention.attend_to_keys(query, keys, plan, options, None)
            sys.stdout.write(json.dumps(compiled[before:]) + "\n")


if __name__ == "__main__":
    compile_steps(json.load(sys.stdin), sys.argv[1] == "fa3")
