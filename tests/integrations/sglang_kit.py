"""The kit over our backend as SGLang constructs it: pools, layer, write, batch and call are SGLang's.

Not a part of `make test`: `make sglang-test PYTHON=python3` runs it by a Python that has SGLang. What the kit finds in
a backend of SGLang's own: `twinattn prove sglang-torch_native`.
"""

import pytest
import torch

from refattn import chunked_prefill
from refattn.metadata import make_batch
from twinattn.integrations.sglang import NAME, FastAttentionBackend, register
from twinattn.kit import properties
from twinattn.kit.adapters import kernel_of
from twinattn.kit.check import check
from twinattn.kit.tolerance import assert_close
from twinattn.libraries import sglang_backends

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


def test_a_step_runs_under_the_translator_that_a_server_binds():
    """SGLang gives each backend one; that of a plain pool translates nothing."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.runtime_context import get_parallel

    made, batch = [], make_batch([1, 3], [5, 7], [[1, 2], [3, 4]], device=DEVICE)
    query, key, value = (torch.randn(shape, device=DEVICE) for shape in ((4, 4, 16), (5, 4, 2, 16), (5, 4, 2, 16)))
    with pytest.MonkeyPatch.context() as patch:
        make = sglang_backends._make
        patch.setattr(sglang_backends, "_make", lambda *given: made.append(make(*given)) or made[0])
        call = sglang_backends.prepare(query, key, value, batch, backend=NAME)
    table, pool = made[0].req_to_token_pool.req_to_token, made[0].token_to_kv_pool
    translator = KVIndexTranslator(
        req_to_token=table, token_to_kv_pool_allocator=None, token_to_kv_pool=pool, page_size=4, device=DEVICE
    )
    translator.bind_and_verify_backends(made)
    assert made[0].kv_index_translator is translator
    expected = chunked_prefill.attention(query, key, value, chunked_prefill.plan(batch, block_size=4))
    with get_parallel().override(attn_dcp_size=1):
        assert_close(call(), expected, expected, name="out")
    with get_parallel().override(attn_dcp_size=2), pytest.raises(NotImplementedError, match="kv_index_translator"):
        call()


def _claimed():
    kernel = kernel_of(KERNEL)
    return [one.name for one in properties.of_path(kernel.path) if one.not_asked(kernel, DEVICE) is None]
