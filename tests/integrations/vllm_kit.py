"""The kit over our backend as vLLM constructs it: configuration, layer, write, metadata builder and call are vLLM's.

Not a part of `make test`: `make vllm-test` runs it on a CPU, `make vllm-gpu-test` on a GPU. What the kit finds in
vLLM's own backends: `twinattn prove --all-installed --adapter vllm- --device cuda`.
"""

import pytest
import torch

from twinattn.kit.check import check
from twinattn.kit.finding import FAILED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "fewest"), [("vllm-fastattn", 45), ("vllm-fastattn-fp8", 40)])
def test_the_kit_finds_nothing(name, fewest):
    report = check(name, device=DEVICE)
    assert not [(x.property, x.detail) for x in report.findings if x.outcome in FAILED]
    assert sum(x.outcome == "honoured" for x in report.findings) >= fewest
