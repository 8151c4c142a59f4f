"""The kit over our backend as vLLM constructs it: configuration, layer, write, metadata builder and call are vLLM's.

Not a part of `make test`: `make vllm-test` runs it on a CPU, `make vllm-gpu-test` on a GPU. What the kit finds in
vLLM's own backends: `twinattn prove --all-installed --adapter vllm- --device cuda`.
"""

import pytest
import torch

from twinattn.kit import properties
from twinattn.kit.adapters import kernel_of
from twinattn.kit.check import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEWEST = {"vllm-fastattn": 48, "vllm-fastattn-fp8": 49}  # properties that the kit checks of each
# A layer of vLLM has one scale for all keys and one for all values, so batches with others cannot be handed to it.
SCALES = {
    *("scales per head", "scales per sequence", "scales mixed", "strides of options", "query scale"),
    "many sequences",
}
NOT_CLAIMED = {"lse", "autocast", "nan without weight"}  # the adapter turns these down when it is called
REFUSED = {"vllm-fastattn": set(), "vllm-fastattn-fp8": SCALES}
SHARES = 6  # tests per backend, each with a sixth of the properties: several run on one GPU at a time


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", FEWEST)
def test_the_kit_finds_nothing(name, share):
    claimed = _claimed(name)[share::SHARES]
    found = {x.property: (x.outcome, x.detail) for x in check(name, device=DEVICE, only=claimed).findings}
    assert list(found) == claimed
    allowed = {"honoured": set(claimed), "refused": REFUSED[name], "not claimed": NOT_CLAIMED}
    assert {what: why for what, why in found.items() if what not in allowed.get(why[0], ())} == {}


@pytest.mark.parametrize("name", FEWEST)
def test_what_the_kit_asks(name):
    assert len(_claimed(name)) >= FEWEST[name]


def _claimed(name):
    kernel = kernel_of(name)
    return [one.name for one in properties.of_path(kernel.path) if one.not_asked(kernel, DEVICE) is None]
