"""The kit over our backend as SGLang constructs it: pools, layer, write, batch and call are SGLang's.

Not a part of `make test`: `make sglang-test PYTHON=python3` runs it by a Python that has SGLang. What the kit finds in
a backend of SGLang's own: `twinattn prove sglang-torch_native`.
"""

import pytest
import torch

from twinattn.integrations.sglang import NAME, FastAttentionBackend, register
from twinattn.kit import properties
from twinattn.kit.adapters import kernel_of
from twinattn.kit.check import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL, FEWEST = "sglang-fastattn", 45
NOT_CLAIMED = {"lse", "without lse", "autocast", "nan without weight"}  # the adapter turns these down, called
SHARES = 4  # tests, each with a part of the properties


@pytest.mark.parametrize("share", range(SHARES))
def test_the_kit_finds_nothing(share):
    claimed = _claimed()[share::SHARES]
    found = {x.property: (x.outcome, x.detail) for x in check(KERNEL, device=DEVICE, only=claimed).findings}
    assert list(found) == claimed
    allowed = {"honoured": set(claimed), "not claimed": NOT_CLAIMED}
    assert {what: why for what, why in found.items() if what not in allowed.get(why[0], ())} == {}


def test_what_the_kit_asks():
    assert len(_claimed()) >= FEWEST


def test_sglang_takes_the_name():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    register()
    assert ATTENTION_BACKENDS[NAME] is FastAttentionBackend and NAME in ATTENTION_BACKEND_CHOICES


def _claimed():
    kernel = kernel_of(KERNEL)
    return [one.name for one in properties.of_path(kernel.path) if one.not_asked(kernel, DEVICE) is None]
