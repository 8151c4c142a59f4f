"""The kit over our backend as SGLang constructs it: pools, layer, write, batch and call are SGLang's.

Not a part of `make test`: `make sglang-test PYTHON=python3` runs it by a Python that has SGLang. What the kit finds in
a backend of SGLang's own: `twinattn prove sglang-torch_native`.
"""

import copy
from types import SimpleNamespace

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


def test_a_decode_is_captured_and_replayed_over_the_buffers_of_sglang():
    """SGLang fills and pads them; on a GPU by a CUDA graph, on a CPU by calls over the same memory."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    size, batch = 4, make_batch([1, 1, 1], [5, 7, 2], [[1, 2], [3, 4], [5, 0]], device=DEVICE)
    query, key, value = (torch.randn(shape, device=DEVICE) for shape in ((3, 4, 16), (6, 4, 2, 16), (6, 4, 2, 16)))
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_make", "_layer", "_step"):
            patch.setattr(sglang_backends, name, _noted(made, name, getattr(sglang_backends, name)))
        sglang_backends.prepare(query, key, value, batch, backend=NAME)
    backend, layer, step = made["_make"], made["_layer"], made["_step"]
    fill = backend.get_cuda_graph_seq_len_fill_value()
    registry = build_decode_registry(
        device=torch.device(DEVICE),
        max_bs=size,
        max_num_token=size,
        seq_len_fill_value=fill,
        cache_loc_dtype=torch.int64,
        share_pool=False,
    )
    names = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc")
    buffers = SimpleNamespace(mamba_track_indices=None, **{name: registry.get_slot(name).buffer for name in names})

    def describe(step, **more):
        sizes = dict(bs=size, raw_bs=step.batch_size, num_tokens=size, seq_len_fill_value=fill)
        none = dict(global_num_tokens_cpu=None, is_encoder_decoder=False)
        view = build_replay_fb_view(step, buffers, capture_forward_mode=ForwardMode.DECODE, **sizes, **none)
        backend.init_forward_metadata_out_graph(view, **more)
        return view

    backend.init_cuda_graph_state(size, size)
    rows, view = torch.zeros(size, 4 * 16, device=DEVICE), describe(step, in_capture=True)
    out = torch.empty_like(rows)

    def run():
        out.copy_(backend.forward(rows, None, None, layer, view, save_kv_cache=False))

    if DEVICE == "cuda":
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    expected = chunked_prefill.attention(query, key, value, chunked_prefill.plan(batch, block_size=4))
    for chosen in ([1], [0, 1, 2], [2, 0]):
        part, count = copy.copy(step), len(chosen)
        for name in ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            setattr(part, name, getattr(step, name)[chosen])
        part.batch_size, rows[:count] = count, query[chosen].flatten(1)
        sizes = dict(raw_bs=count, padded_bs=size, raw_num_tokens=count, padded_num_tokens=size)
        registry.fill_from(part, **sizes)
        describe(part)
        run()
        assert_close(out[:count].view(count, 4, 16), expected[chosen], expected[chosen], name="out")


def _noted(made, name, make):
    """Return a function that also keeps what it makes."""

    def noted(*given):
        made[name] = make(*given)
        return made[name]

    return noted


def _claimed():
    kernel = kernel_of(KERNEL)
    return [one.name for one in properties.of_path(kernel.path) if one.not_asked(kernel, DEVICE) is None]
