"""Our Triton kernels: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from batches import Case, build, each_case
from tolerance import assert_matches_reference, assert_twins_agree

import fastattn
import refattn.chunked_prefill
from test_chunked_prefill import OPTIONS, per_head


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_case
def test_paged(case, options, device):
    inputs = build(case, device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(options, case, device))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_case
def test_dense(case, options, device):
    inputs = build(case, device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("dense", *inputs.rows, **per_head(options, case, device))
