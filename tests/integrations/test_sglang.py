"""The backend for SGLang gives what the reference gives, over SGLang's tables, and refuses the rest by name."""

import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import refattn.quantized
from fastattn.kernels.order import use_kernel
from fastattn.kernels.triton import is_interpreted
from refattn import chunked_prefill
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales
from tests.helpers import sglang_doubles as doubles
from tests.helpers.sglang_doubles import AttentionType, Mode
from twinattn.kit.tolerance import assert_close

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 16, 24
EXTEND = (3, 1, 9), (3, 6, 20)  # a prompt, a decode beside it, and a chunk behind its prefix
DECODE = (1, 1, 1), (1, 6, 33)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def module(monkeypatch):
    yield doubles.install(monkeypatch)
    sys.modules.pop("twinattn.integrations.sglang", None)


class Served:
    """A pool, a table of slots, a backend, and a step of some requests.

    Their new tokens are still to be written.
    """

    def __init__(self, module, lens, *, page=4, mode=None, dtype=torch.float32, columns=48):
        torch.manual_seed(0)
        (query_lens, seq_lens), self.page = lens, page
        counts = [-(-n // page) for n in seq_lens]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.pool = doubles.Pool((sum(counts) + 1) * page, KV_HEADS, SIZE, VALUE_SIZE, dtype)
        table = torch.zeros(len(counts) + 5, columns, dtype=torch.int32)
        at = torch.tensor([5, 2, 3])[: len(counts)]
        slots = [torch.tensor([block * page + i for block in blocks for i in range(page)]) for blocks in self.tables]
        for row, its in zip(at, slots, strict=True):
            table[row, : len(its)] = its
        requests = SimpleNamespace(req_to_token=table)
        self.runner = dict(page_size=page, token_to_kv_pool=self.pool, req_to_token_pool=requests)
        self.backend = module.FastAttentionBackend(SimpleNamespace(**self.runner))
        self.batch = make_batch(query_lens, seq_lens, self.tables)
        tokens = [(torch.randn(n, KV_HEADS, SIZE), torch.randn(n, KV_HEADS, VALUE_SIZE)) for n in seq_lens]
        firsts = [n - m for n, m in zip(seq_lens, query_lens, strict=True)]
        for (key, value), its, first in zip(tokens, slots, firsts, strict=True):
            self.pool.set_kv_buffer(None, doubles.KVWriteLoc(its[:first]), key[:first], value[:first], 0.5, 2.0)
            if dtype == torch.float32:
                self.pool.set_kv_buffer(None, doubles.KVWriteLoc(its[:first]), key[:first], value[:first])
        self.new = [torch.cat([one[i][first:] for one, first in zip(tokens, firsts, strict=True)]) for i in (0, 1)]
        new = [its[first:n] for its, first, n in zip(slots, firsts, seq_lens, strict=True)]
        self.query = torch.randn(sum(query_lens), HEADS, SIZE)
        lengths = torch.tensor(seq_lens)
        self.step = SimpleNamespace(
            forward_mode=mode or (Mode.DECODE if lens is DECODE else Mode.EXTEND),
            spec_info=None,
            encoder_lens_cpu=None,
            req_pool_indices=at,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            out_cache_loc=torch.cat(new),
            extend_seq_lens=torch.tensor(query_lens, dtype=torch.int32),
            extend_seq_lens_cpu=list(query_lens),
        )

    def attend(self, *, rows=None, sinks=None, save=True, **layer):
        """Run a layer as SGLang does; return its outputs by heads."""
        made = doubles.layer(HEADS, KV_HEADS, SIZE, VALUE_SIZE, **layer)
        self.backend.init_forward_metadata(self.step)
        forward = self.backend.forward_decode if self.step.forward_mode.is_decode() else self.backend.forward_extend
        query = self.query if rows is None else rows
        more = {} if sinks is None else dict(sinks=sinks)
        out = forward(query.flatten(1), *self.new, made, self.step, save_kv_cache=save, **more)
        assert out.shape == (len(query), HEADS * VALUE_SIZE)
        return out.view(-1, HEADS, VALUE_SIZE)

    def expected(self, options=AttentionOptions(), *, scales=None, **mask):
        """Return what the reference computes over the tokens in the pool."""
        pools = [x.unflatten(0, (-1, self.page)) for x in (self.pool.key, self.pool.value)]
        plan = chunked_prefill.plan(self.batch, block_size=self.page, **mask)
        if scales is None:
            return chunked_prefill.attention(self.query, *pools, plan, options)
        return refattn.quantized.attention(self.query, *pools, plan, options, scales=scales)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("lens", [EXTEND, DECODE], ids=["extend", "decode"])
def test_a_layer_writes_its_tokens_and_attends(module, lens, page):
    served = Served(module, lens, page=page)
    out = served.attend()
    assert torch.equal(served.pool.key[served.step.out_cache_loc], served.new[0])
    assert torch.equal(served.pool.value[served.step.out_cache_loc], served.new[1])
    assert_close(out, served.expected(), served.expected(), name="out")


@pytest.mark.parametrize(
    ("layer", "options", "mask"),
    [
        (dict(sliding_window_size=2), {}, dict(window_size=(2, 0))),
        (dict(sliding_window_size=None), {}, {}),
        (dict(logit_cap=5.0), dict(softcap=5.0), {}),
        (dict(scaling=0.1), dict(softmax_scale=0.1), {}),
        (dict(attn_type=AttentionType.DECODER_BIDIRECTIONAL), {}, dict(causal=False)),
        (dict(attn_type=AttentionType.ENCODER_ONLY), {}, dict(causal=False)),
        (dict(attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=2), {}, dict(causal=False, window_size=(2, 2))),
        (
            dict(attn_type=AttentionType.DECODER_BIDIRECTIONAL, sliding_window_size=3),
            {},
            dict(causal=False, window_size=(3, 3)),
        ),
        (dict(use_irope=True), {}, {}),
        (dict(logit_cap=None), {}, {}),
    ],
    ids=["window", "no-window", "softcap", "scale", "bidirectional", "encoder"]
    + ["encoder-window", "bidirectional-window", "irope-without-chunks", "no-cap"],
)
@pytest.mark.parametrize("lens", [EXTEND, DECODE], ids=["extend", "decode"])
def test_options_of_a_layer(module, lens, layer, options, mask):
    served = Served(module, lens)
    out, expected = served.attend(**layer), served.expected(AttentionOptions(**options), **mask)
    assert_close(out, expected, expected, name="out")
    if lens is EXTEND and (options or mask):
        assert (out - served.expected()).abs().max() > 1e-3, "the option changes the answer"


@pytest.mark.parametrize("lens", [EXTEND, DECODE], ids=["extend", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_and_keys_that_are_in_the_pool(module, dtype, lens):
    served, sinks = Served(module, lens), torch.linspace(-1, 1, HEADS, dtype=dtype)
    served.attend()
    served.new = [None, None]
    out, expected = served.attend(sinks=sinks), served.expected(AttentionOptions(sinks=sinks))
    assert_close(out, expected, expected, name="out")


@pytest.mark.parametrize("lens", [EXTEND, DECODE], ids=["extend", "decode"])
def test_what_is_not_to_be_saved_is_not(module, lens):
    served = Served(module, lens)
    before = served.pool.key.clone()
    served.attend(save=False)
    assert torch.equal(served.pool.key.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", [(0.5, 2.0), (None, None)], ids=["scaled", "not"])
def test_a_pool_in_fp8(module, scales, dtype):
    served = Served(module, EXTEND, dtype=dtype)
    key, value = scales
    of_write = [None if x is None else torch.tensor(x) for x in scales]
    out = served.attend(k_scale=of_write[0], v_scale=of_write[1], k_scale_float=key, v_scale_float=value)
    expected = served.expected(scales=Fp8Scales(key or 1.0, value or 1.0, format=dtype))
    assert_close(out, expected, expected, name="out")
    for pool, new, scale in zip((served.pool.key, served.pool.value), served.new, scales, strict=True):
        assert torch.equal(pool[served.step.out_cache_loc].float(), (new / (scale or 1.0)).to(dtype).float())


def test_scales_of_a_layer_are_not_those_of_a_pool_in_full_precision(module):
    served = Served(module, EXTEND)
    out = served.attend(k_scale=torch.tensor(0.5), v_scale=torch.tensor(2.0), k_scale_float=0.5, v_scale_float=2.0)
    assert torch.equal(served.pool.key[served.step.out_cache_loc], served.new[0])
    assert_close(out, served.expected(), served.expected(), name="out")


def test_arguments_that_ask_for_nothing_are_taken(module):
    served = Served(module, EXTEND)
    expected = served.attend()
    made = doubles.layer(HEADS, KV_HEADS, SIZE, VALUE_SIZE)
    query = served.query.flatten(1)
    out = served.backend.forward_extend(query, *served.new, made, served.step, return_lse=False, score_mod=None)
    assert torch.equal(out, expected.flatten(1))


@pytest.mark.parametrize(
    ("lens", "replayed"), [(EXTEND, False), (DECODE, False), (DECODE, True)], ids=["extend", "decode", "replay"]
)
def test_a_step_does_not_wait_for_the_device(module, lens, replayed):
    """The longest sequence is that of the lengths on the host, which the backend asks SGLang for."""

    class Unread(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return function(*args, **kwargs or {})

    served = Served(module, lens)
    served.step.seq_lens_cpu = SimpleNamespace(max=lambda: max(lens[1]))
    served.backend.init_cuda_graph_state(8, 8)
    with Unread():
        served.backend.init_forward_metadata(served.step)
        if replayed:
            served.backend.init_forward_metadata_out_graph(served.step)
    assert served.backend.needs_cpu_seq_lens
    batch, longest = served.backend.forward_metadata.batch, 48 if replayed else max(lens[1])
    assert (batch.max_query_len, batch.max_seq_len, batch.num_tokens) == (max(lens[0]), longest, sum(lens[0]))


def test_padding_rows_are_zero(module):
    served = Served(module, EXTEND)
    rows = torch.cat([served.query, torch.full_like(served.query[:3], torch.nan)])
    out = served.attend(rows=rows)
    assert_close(out[:-3], served.expected(), served.expected(), name="out")
    assert not out[-3:].any()


def test_a_mask_is_planned_once_a_step(module):
    served = Served(module, EXTEND)
    served.backend.init_forward_metadata(served.step)
    step = served.backend.forward_metadata
    first = step.plan(True, -1)
    assert first is step.plan(True, None) is not step.plan(True, 3)
    assert step.plan(False, 3) is step.plan(False, 3) is not step.plan(True, 3)
    assert step.plan(True, -1) is first, "it stays, as layers with and without a window take turns"


@pytest.mark.parametrize("lens", [EXTEND, DECODE], ids=["extend", "decode"])
def test_a_step_without_requests_has_padding_alone(module, lens):
    served = Served(module, lens)
    step = served.step
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu"):
        setattr(step, name, getattr(step, name)[:0])
    assert not served.attend().any()


def test_an_idle_step_has_no_plan(module):
    served = Served(module, EXTEND)
    served.backend.init_forward_metadata(served.step)
    served.step.forward_mode = Mode.IDLE
    served.backend.init_forward_metadata(served.step)
    assert served.backend.forward_metadata is None


def test_sglang_knows_the_name(module):
    module.register()
    module.register()
    assert {"fastattn": module.FastAttentionBackend} == doubles.REGISTRY and set(doubles.CHOICES) == {"fastattn"}


def test_the_name_of_another_backend_is_taken_if_asked_for(module, monkeypatch):
    """SGLang serves GPT-OSS under names of a list of its own alone."""
    monkeypatch.setenv("FASTATTN_REPLACES_TRITON", "1")
    module.register()
    assert dict.fromkeys(("fastattn", "triton"), module.FastAttentionBackend) == doubles.REGISTRY


def test_a_server_is_started_with_the_name(module, monkeypatch, tmp_path, capsys):
    """SGLang parses its arguments before it asks for plugins."""
    (tmp_path / "launch_server.py").write_text("import sys; print(__name__, sys.argv[1:])")
    sys.modules["sglang"].__path__ = [str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["-m", "--attention-backend", "fastattn"])
    runpy.run_module("twinattn.integrations.sglang_server", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out == "__main__ ['--attention-backend', 'fastattn']\n"
    assert doubles.CHOICES == ["fastattn"]


def test_a_backend_for_layers_with_a_state_takes_the_pools_from_here(module):
    served = Served(module, EXTEND)
    assert served.backend.token_to_kv_pool is served.pool
    assert served.backend.req_to_token_pool is served.runner["req_to_token_pool"]


def test_processes_of_sglang_find_the_backend(module):
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert points == {"fastattn": f"{module.__name__}:{module.register.__name__}"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(spec_info=object()), "forward_mode: expected a decode or an extend without drafts"),
        (dict(encoder_lens_cpu=[0, 3, 0]), "encoder_lens: expected none"),
        (dict(forward_mode=SimpleNamespace(is_idle=bool, is_decode=bool, is_extend=bool)), "forward_mode: expected"),
    ],
    ids=["drafts", "encoder", "another-mode"],
)
def test_steps_that_are_refused(module, changes, says):
    served = Served(module, EXTEND)
    vars(served.step).update(changes)
    with pytest.raises(NotImplementedError, match=says):
        served.backend.init_forward_metadata(served.step)


def test_slots_that_are_translated_are_refused(module):
    """SGLang gives each backend its translator; that of a plain pool translates nothing."""
    served = Served(module, EXTEND)
    served.backend.kv_index_translator = SimpleNamespace(needs_read_translate=False)
    served.attend()
    runner = served.runner | dict(kv_index_translator=SimpleNamespace(needs_read_translate=True))
    behind_a_wrapper = module.FastAttentionBackend(SimpleNamespace(**runner))
    with pytest.raises(NotImplementedError, match="kv_index_translator: expected none that translates"):
        behind_a_wrapper.init_forward_metadata(served.step)


def test_layers_with_chunks_of_keys_are_refused(module):
    served = Served(module, EXTEND)
    served.backend = module.FastAttentionBackend(SimpleNamespace(**served.runner, attention_chunk_size=8))
    served.attend()
    with pytest.raises(NotImplementedError, match="use_irope: expected False, as chunks of 8 keys"):
        served.attend(use_irope=True)


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "beside-states"])
@pytest.mark.parametrize(
    "name",
    ["swa_kv_pool", "kv_lora_rank", "k_scale_buffer", "full_to_hisparse_device_index_mapping", "shard_spec"],
)
def test_pools_that_are_refused(module, name, inner):
    with pytest.raises(NotImplementedError, match="token_to_kv_pool: expected one pool of keys and values"):
        _with_pool(module, inner, {name: 1})


def test_a_pool_of_two_is_refused(module):
    """As SGLang's is if layers with a window have their own."""
    with pytest.raises(NotImplementedError, match="window have another: serve with --disable-hybrid-swa-memory"):
        _with_pool(module, False, dict(full_kv_pool=SimpleNamespace(), swa_kv_pool=SimpleNamespace()))


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "beside-states"])
def test_layouts_of_a_pool(module, inner):
    _with_pool(module, inner, dict(kv_cache_layout="nhd", k_scale_buffer=None))
    with pytest.raises(NotImplementedError, match="kv_cache_layout: expected 'nhd', got 'hnd'"):
        _with_pool(module, inner, dict(kv_cache_layout="hnd"))


def _with_pool(module, inner, members):
    pool = SimpleNamespace(**members)
    runner = Served(module, EXTEND).runner
    return module.FastAttentionBackend(
        SimpleNamespace(**runner | dict(token_to_kv_pool=SimpleNamespace(full_kv_pool=pool) if inner else pool))
    )


@pytest.mark.parametrize("lens", [EXTEND, DECODE], ids=["extend", "decode"])
def test_requests_of_padding(module, lens):
    """Data parallelism adds requests: row 0 of the table, no new tokens in an extend, one in a decode."""
    served = Served(module, lens)
    expected_rows, step = len(served.query), served.step
    fill = served.backend.get_cuda_graph_seq_len_fill_value()
    assert fill == served.backend.get_cpu_graph_seq_len_fill_value()
    step.req_pool_indices = torch.cat([step.req_pool_indices, torch.zeros(2, dtype=torch.int64)])
    step.seq_lens = step.seq_lens_cpu = torch.cat([step.seq_lens, torch.full((2,), fill)])
    step.extend_seq_lens = torch.cat([step.extend_seq_lens, torch.zeros(2, dtype=torch.int32)])
    step.extend_seq_lens_cpu = [*step.extend_seq_lens_cpu, 0, 0]
    step.out_cache_loc = torch.cat([step.out_cache_loc, torch.zeros(2, dtype=torch.int64)])
    served.new = [torch.cat([x, torch.zeros_like(x[:2])]) for x in served.new]
    out = served.attend(rows=torch.cat([served.query, torch.ones_like(served.query[:2])]))
    assert_close(out[:expected_rows], served.expected(), served.expected(), name="out")
    assert not out[expected_rows:].any()


@pytest.mark.parametrize(
    ("layer", "more", "says"),
    [
        (dict(is_cross_attention=True), {}, "cross: True"),
        (dict(attn_type="encoder"), {}, "attention of encoder"),
        (dict(logit_cap=1.0, logit_capping_method="clip"), {}, "none capped but by tanh"),
        (dict(xai_temperature_len=8), {}, "none scaled by position"),
        ({}, dict(k_rope=torch.zeros(1)), "k_rope: not an argument"),
        ({}, dict(return_lse=True), "return_lse: not an argument"),
    ],
)
def test_layers_that_are_refused_write_nothing(module, layer, more, says):
    served = Served(module, EXTEND)
    before = served.pool.key.clone()
    served.backend.init_forward_metadata(served.step)
    made = doubles.layer(HEADS, KV_HEADS, SIZE, VALUE_SIZE, **layer)
    with pytest.raises(NotImplementedError, match=says):
        served.backend.forward_extend(served.query.flatten(1), *served.new, made, served.step, **more)
    assert torch.equal(served.pool.key.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("size", [5, 3], ids=["with-padding", "full"])
@pytest.mark.parametrize("window", [-1, 2])
def test_a_captured_decode_reads_what_is_filled_in(module, window, size):
    """SGLang captures a step of padding, and replays it after the backend has described another of as many requests."""
    served, lengths = Served(module, DECODE), torch.tensor(DECODE[1])
    backend, made = served.backend, doubles.layer(HEADS, KV_HEADS, SIZE, VALUE_SIZE, sliding_window_size=window)
    backend.init_cuda_graph_state(8, 8)

    def describe(order, **more):
        ones, rows = torch.ones(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        ones[: len(order)], rows[: len(order)] = lengths[order], served.step.req_pool_indices[order]
        step = SimpleNamespace(
            forward_mode=Mode.DECODE, spec_info=None, req_pool_indices=rows, seq_lens=ones, seq_lens_cpu=ones
        )
        backend.init_forward_metadata_out_graph(step, **more)
        return backend.forward_metadata

    captured = describe([], in_capture=True)
    plan, memory = captured.plan(True, window), captured.batch.block_table.data_ptr()
    for order in ([0, 1, 2], [2, 0], [1, 2, 0]):
        assert describe(order) is captured and captured.plan(True, window) is plan
        assert captured.batch.block_table.data_ptr() == memory
        count = len(order)
        slots = torch.cat([served.step.out_cache_loc[order], torch.zeros(size - count, dtype=torch.int64)])
        query, key, value = (
            torch.cat([x[order], torch.ones(size - count, *x.shape[1:])]) for x in (served.query, *served.new)
        )
        out = backend.forward_decode(query.flatten(1), key, value, made, SimpleNamespace(out_cache_loc=slots))
        if count == 3:
            expected = served.expected(**({} if window < 0 else dict(window_size=(window, 0))))
        assert_close(out.view(-1, HEADS, VALUE_SIZE)[:count], expected[order], expected[order], name="out")


@pytest.mark.skipif(not is_interpreted(torch.device("cpu")), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("page", "layer", "options", "mask"),
    [
        (1, dict(sliding_window_size=7), {}, dict(window_size=(7, 0))),
        (4, dict(logit_cap=5.0), dict(softcap=5.0), {}),
        (16, {}, {}, {}),
    ],
    ids=["window", "softcap", "neither"],
)
def test_a_captured_decode_is_repeated_launch_by_launch(module, monkeypatch, page, layer, options, mask):
    """As a graph does: nothing but memory differs from the step that was captured, of padding alone."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    from tests.helpers.launches import Recording, record_launches

    record_launches(monkeypatch)
    lens = (1, 1, 1), (20, 6, 11)
    served, rows = Served(module, lens, page=page, mode=Mode.DECODE, columns=512), 4
    backend, made = served.backend, doubles.layer(HEADS, KV_HEADS, SIZE, VALUE_SIZE, **layer)
    served.pool.key[:page] = served.pool.value[:page] = 0.0  # SGLang's pools begin with zeros
    backend.init_cuda_graph_state(8, 8)
    zeros, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
    names = dict(req_pool_indices=zeros, out_cache_loc=zeros.clone(), seq_lens=ones, seq_lens_cpu=ones.clone())
    buffers = SimpleNamespace(forward_mode=Mode.DECODE, spec_info=None, **names)
    query, *new = (torch.zeros(rows, *x.shape[1:]) for x in (served.query, *served.new))
    answers = []
    with use_kernel("triton"):
        backend.init_forward_metadata_out_graph(buffers, in_capture=True)
        for _ in range(2):  # SGLang runs a step twice before it captures it
            backend.forward_decode(query.flatten(1), *new, made, buffers)
        recording = Recording()
        with recording:
            out = backend.forward_decode(query.flatten(1), *new, made, buffers)
        assert recording.launches
        for order in ([0], [2, 1], [1, 0, 2]):
            for buffer, filled in zip((query, *new), (served.query, *served.new), strict=True):
                buffer.zero_()[: len(order)] = filled[order]
            for name, padding in names.items():
                padding.fill_("seq_lens" in name)[: len(order)] = getattr(served.step, name)[order]
            backend.init_forward_metadata_out_graph(buffers)
            recording.replay()
            answers.append((order, out[: len(order)].clone()))
    assert torch.equal(served.pool.key[served.step.out_cache_loc], served.new[0])
    expected = served.expected(AttentionOptions(**options), **mask)
    for order, answer in answers:
        assert_close(answer.view(-1, HEADS, VALUE_SIZE), expected[order], expected[order], name="out")


def test_graphs_of_each_size_have_the_same_memory(module):
    served = Served(module, DECODE, columns=50)
    served.backend.init_cuda_graph_state(8, 8)
    made = []
    for count in (2, 3):
        step = SimpleNamespace(**vars(served.step))
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
            setattr(step, name, getattr(step, name)[:count])
        served.backend.init_forward_metadata_out_graph(step)
        made.append(served.backend.forward_metadata)
    first, second = (one.batch for one in made)
    assert made[0] is not made[1] and (first.num_seqs, second.num_seqs) == (2, 3)
    assert first.block_table.data_ptr() == second.block_table.data_ptr()
    longest = served.runner["req_to_token_pool"].req_to_token.shape[1]
    assert first.max_seq_len == longest and first.block_table.shape[1] == -(-longest // served.page)


def test_memory_that_is_allocated_anew_is_that_of_later_graphs(module):
    """SGLang captures all steps again where ranks join."""
    served, made = Served(module, DECODE), []
    for _ in range(2):
        served.backend.init_cuda_graph_state(3, 3)
        served.backend.init_forward_metadata_out_graph(served.step)
        made.append(served.backend.forward_metadata.batch)
    assert made[0].block_table.data_ptr() != made[1].block_table.data_ptr()
    assert torch.equal(made[1].seq_lens, torch.tensor(DECODE[1], dtype=torch.int32))
    assert torch.equal(made[1].cu_seqlens_q, torch.arange(4, dtype=torch.int32))


def test_graphs_of_steps_with_prompts_are_refused(module):
    served = Served(module, EXTEND)
    served.backend.init_cuda_graph_state(8, 8)
    with pytest.raises(NotImplementedError, match="serve with --cuda-graph-backend-prefill breakable or disabled"):
        served.backend.init_forward_metadata_out_graph(served.step)


def test_graphs_of_drafts_are_refused(module):
    served = Served(module, DECODE)
    served.backend.init_cuda_graph_state(8, 24)
    served.step.spec_info = object()
    with pytest.raises(NotImplementedError, match="expected a decode or an extend without drafts"):
        served.backend.init_forward_metadata_out_graph(served.step)
