"""From `attention` to the launch: through how many files and functions of ours a call goes. The limits only go down.

A reader who follows a call opens these files in this order; what is bound in the first call is not done again later.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fastattn
import fastattn.chunked_prefill
import refattn.sliding_window
from refattn import metadata

ROOT = Path(__file__).parent.parent.parent
OURS = tuple(str(ROOT / package) for package in ("refattn", "fastattn"))
LIMITS = {  # (functions called, files they are in) in the first call of a plan, and in later ones
    "triton": ((138, 18), (11, 6)),
    "native": ((99, 13), (7, 4)),
    "cpu": ((149, 17), (34, 10)),
}
REFERENCE = (106, 13)  # frames and files, for a window over two sequences


class Way:
    """Counts the functions of ours that are called until Triton launches, or until the end."""

    def __init__(self) -> None:
        self.functions, self.files, self.has_launched = 0, [], False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.has_launched:
            return
        file = frame.f_code.co_filename
        self.has_launched = "/triton/runtime/" in file
        is_comprehension = frame.f_code.co_name.startswith("<")
        if file.startswith(OURS) and not is_comprehension:
            self.functions += 1
            self.files += [file] if file not in self.files else []

    def counted(self, call: Any) -> tuple[int, int]:
        """Return how many functions a call went through, and in how many files they are."""
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self.functions, len(self.files)


def decodes() -> tuple[list[torch.Tensor], Any]:
    query, pools = torch.randn(2, 4, 64), torch.randn(2, 8, 16, 2, 64)
    return [query, *pools], metadata.make_batch([1, 1], [40, 70], [[1, 2, 3], [4, 5, 6, 7, 0]])


def within(got: tuple[int, int], limit: tuple[int, int]) -> bool:
    return got[0] <= limit[0] and got[1] <= limit[1]


@pytest.mark.parametrize("kernel", LIMITS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_call_goes_through_few_files(kernel, device):
    if device != "cpu" or (reasons := fastattn_reason(kernel)):
        pytest.skip(f"{kernel}: {reasons if device == 'cpu' else 'launches of a GPU are replayed elsewhere'}")
    path, (tensors, batch) = fastattn.chunked_prefill, decodes()
    with fastattn.use_kernel(kernel):
        path.attention(*tensors, path.plan(batch, block_size=16))  # the first in the process imports and chooses
        plan = path.plan(batch, block_size=16)
        first, later = (Way().counted(lambda: path.attention(*tensors, plan)) for _ in range(2))
    assert within(first, LIMITS[kernel][0]), f"first call: {first} functions and files, at most {LIMITS[kernel][0]}"
    assert within(later, LIMITS[kernel][1]), f"later call: {later} functions and files, at most {LIMITS[kernel][1]}"


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_reference_of_a_window_goes_through_few_files():
    path, (tensors, batch) = refattn.sliding_window, decodes()
    plan = path.plan(batch, block_size=16, window_size=(20, 0))
    got = Way().counted(lambda: path.attention(*tensors, plan))
    assert within(got, REFERENCE), f"{got} functions and files, at most {REFERENCE}"


def fastattn_reason(kernel: str) -> str | None:
    """Return why a kernel does not run here, or None."""
    query, pools = torch.zeros(1, 2, 64), torch.zeros(2, 2, 16, 1, 64)
    plan = fastattn.chunked_prefill.plan(metadata.make_batch([1], [3], [[1]]), block_size=16)
    with fastattn.use_kernel(kernel):
        try:
            fastattn.chunked_prefill.attention(query, *pools, plan)
        except NotImplementedError as error:
            return str(error)
    return None
