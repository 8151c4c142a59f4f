"""The kernels that this machine can run, as test parameters, and what each of them has to be able to do."""

import importlib.util
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

import fastattn
from fastattn.kernels import order
from fastattn.kernels.native.compiler import library
from fastattn.kernels.problem import Problem, expanded
from tests.helpers.tolerance import assert_twins_agree

HALVES = (torch.bfloat16, torch.float16)


def has_to_compute(name: str, problem: Problem) -> bool:
    """Whether a kernel may not refuse a problem, on a machine where it is present.

    What FlashAttention does not have is named here one by one; our own kernels compute all that they are tested with.
    """
    if name in ("cpu", "triton"):
        return name == "cpu" or problem.keys != "nvfp4"
    if name == "native":
        return has_to_attend_natively(problem)
    if problem.keys in ("int4", "nvfp4"):
        return False
    if problem.keys == "latents":
        return has_to_attend_to_latents(name, problem)
    if problem.keys == "quantized":
        if problem.stored[1] not in (problem.stored[0], problem.dtype):
            return False
        problem = expanded(problem)
    over_pages = problem.block_size is not None
    sizes = {problem.head_size, problem.value_head_size}
    if problem.dtype not in HALVES or problem.positions or problem.intervals or not problem.aligned:
        return False
    can_be_padded = len(sizes) == 1 or (not over_pages and problem.value_head_size < problem.head_size)
    if name == "fa4":
        sees_later_keys = problem.window[1] != 0
        wrong_there = over_pages and 64 < problem.head_size <= 96 and sees_later_keys
        sizes_fit = all(size % 16 == 0 and size <= 256 for size in sizes)
        return sizes_fit and not wrong_there and not problem.alibi and not problem.batch_invariant
    if name == "fa3":
        sizes_fit = len(sizes) == 1 and sizes <= {64, 96, 128, 192, 256}
        is_window_of_many = problem.window[0] >= 0 and problem.max_query_len > 1
        return sizes_fit and not problem.alibi and not problem.batch_invariant and not is_window_of_many
    if name == "fa2":  # builds have these head sizes, and some have more
        pages_fit = not over_pages or (problem.block_size % 256 == 0 and problem.max_query_len <= 1)
        return problem.head_size in (64, 128, 256) and can_be_padded and pages_fit
    assert name == "torch_flash"
    size_fits = problem.head_size % 8 == 0 and problem.head_size <= 256 and can_be_padded
    return size_fits and not over_pages and not problem.softcap and not problem.alibi


def has_to_attend_natively(problem: Problem) -> bool:
    """Whether our C may not refuse a problem: decodes, and few rows beside, over pages and latents of 8 to 32 bits."""
    if (
        problem.keys not in ("pages", "quantized", "latents")
        or problem.levels > 1
        or problem.tree
        or problem.dtype == torch.float64
    ):
        return False
    if problem.positions or problem.intervals or problem.batch_invariant:
        return False
    return problem.max_query_len * problem.num_heads <= 16 * problem.num_kv_heads


def has_to_attend_to_latents(name: str, problem: Problem) -> bool:
    """Whether a FlashAttention or FlashMLA may not refuse latents: those of DeepSeek's size, and no option but few."""
    if problem.dtype not in HALVES or not problem.aligned or problem.stored is not None:
        return False
    if problem.positions or problem.intervals:
        return False
    if (problem.head_size, problem.value_head_size) != (576, 512) or problem.alibi or problem.batch_invariant:
        return False
    if name == "flash_mla":
        return problem.block_size == 64 and problem.uniform and not problem.softcap
    is_window_of_many = problem.window[0] >= 0 and problem.max_query_len > 1
    return name == "fa3" and not is_window_of_many


@dataclass(frozen=True)
class Kernel:
    """A kernel by name, and the types that it is tested in."""

    name: str
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        """Return its name, which is its part of a test id."""
        return self.name

    @property
    def recomputed(self) -> bool:
        """Whether it multiplies whole tiles, unseen keys by 0, and ours repairs what NaN has spoilt there."""
        return self.name in ("fa2", "fa3", "fa4", "flash_mla")

    @property
    def is_interpreted(self) -> bool:
        """Whether it runs in Triton's interpreter, where it takes a thousand times as long."""
        return self.name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"

    def forced(self) -> AbstractContextManager[None]:
        """Ask for this kernel inside a `with` block."""
        return fastattn.use_kernel(self.name)

    def check(self, assertion, *arguments, **options) -> None:
        """Run an assertion; what is refused must say who refuses and why, and be nothing that it has to compute."""
        refused: list[Problem] = []
        choose = order.choose
        if self.is_interpreted and assertion is assert_twins_agree:
            options["again"] = False  # what a path does without `return_lse` shows by the other kernel

        def note_refusals(problem):
            try:
                return choose(problem)
            except NotImplementedError:
                refused.append(problem)
                raise

        with mock.patch.object(order, "choose", note_refusals):
            try:
                assertion(*arguments, **options)
            except NotImplementedError as error:
                assert refused, f"no kernel has been asked, and yet: {error}"
                assert not has_to_compute(self.name, refused[-1]), f"{self.name} has to compute this: {error}"
                _, _, reason = str(error).partition(f"{self.name}: ")
                assert len(reason) > 20, f"a refusal without a reason: {error}"


def _is_installed(module: str) -> bool:
    """Whether a module can be found; one that is found and does not import is a failure that tests have to see."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _present(device: str) -> list[Kernel]:
    if device == "cpu":
        ours = [Kernel("cpu", (torch.float32, torch.bfloat16, torch.float16))]
        if not isinstance(library(), str):  # there is a C compiler
            ours.append(Kernel("native", (torch.float32, torch.bfloat16)))  # float16: test_native
        if _is_installed("triton"):  # its interpreter runs the others here; its `tl.dot` is wrong for bfloat16
            from tests.helpers import interpreted

            interpreted.quicken()
            ours.append(Kernel("triton", (torch.float16,)))
        return ours
    present = [Kernel("torch_flash", HALVES), Kernel("triton", (*HALVES, torch.float32))]
    if _is_installed("flash_attn.flash_attn_interface"):
        present.insert(0, Kernel("fa2", HALVES))
    fa3 = ("flash_attn_interface", "_vllm_fa3_C", "vllm.vllm_flash_attn")
    if torch.cuda.get_device_capability(device) == (9, 0) and any(map(_is_installed, fa3)):
        present.insert(0, Kernel("fa3", HALVES))
    if _is_installed("flash_attn.cute") and torch.cuda.get_device_capability(device)[0] in (9, 10, 11):
        present.insert(0, Kernel("fa4", HALVES))
    return present


def _present_for_latents(device: str) -> list[Kernel]:
    """List the kernels that attend to latents; FlashMLA does nothing else."""
    present = [kernel for kernel in PRESENT if kernel.name in ("cpu", "triton", "fa3")]
    is_hopper = device == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if is_hopper and _is_installed("flash_mla"):
        present.insert(0, Kernel("flash_mla", HALVES))
    return present


PRESENT = _present(os.environ["TWINATTN_TEST_DEVICE"])
PRESENT_FOR_LATENTS = _present_for_latents(os.environ["TWINATTN_TEST_DEVICE"])
each_kernel = pytest.mark.parametrize("kernel", PRESENT, ids=lambda kernel: kernel.name)
