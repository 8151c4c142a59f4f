"""The backend for vLLM over doubles of vLLM's classes: tables to plans, pools to views, options to answers.

`make vllm-test` runs the same backend inside vLLM (`vllm_engine.py`).
"""

import dataclasses
import pickle
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from refattn import chunked_prefill, metadata, quantized, varlen
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales
from tests.helpers import vllm_doubles
from tests.helpers.tolerance import assert_matches_reference
from tests.helpers.vllm_layers import (
    DV,
    NOPE,
    ROPE,
    H,
    R,
    common_metadata,
    forward,
    latent_layer,
    update,
    vllm_layer,
    vllm_pool,
)
from twinattn.integrations.vllm_warm_up import steps_with_prompts
from twinattn.kit import HARMLESS, Case, build, plan_and_attend

CASE = Case("mixed", ((4, 20), (1, 33), (10, 17), (0, 0)), heads=(4, 2), head_size=32, padding_rows=3)
SOFTCAP_AND_SINKS = dict(logits_soft_cap=5.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
VARIANTS = {
    "plain": ({}, {}),
    "window": (dict(sliding_window=7), dict(window_size=(6, 0))),
    "softcap-sinks": (SOFTCAP_AND_SINKS, dict(softcap=5.0, sinks=SOFTCAP_AND_SINKS["sinks"])),
    "alibi-sqrt": (
        dict(alibi_slopes=[0.5, 0.25, 0.1, 0.0], use_alibi_sqrt=True),
        dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]), alibi_sqrt=True),
    ),
    "alibi": (dict(alibi_slopes=[0.5, 0.25, 0.1, 0.0]), dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]))),
}


@pytest.fixture
def backend(monkeypatch):
    return vllm_doubles.install(monkeypatch)


def make_builder(backend, device, block_size=16, config=None):
    spec, device = SimpleNamespace(block_size=block_size), torch.device(device)
    return backend.FastAttentionMetadataBuilder(spec, ["0"], config, device)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_gives_what_the_reference_gives(backend, variant, layout, device):
    of_vllm, of_ours = VARIANTS[variant]
    of_vllm = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in of_vllm.items()}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = build(CASE, device=device, dtype=dtype, poison=HARMLESS)
    step = make_builder(backend, device).build(0, common_metadata(inputs.batch, len(inputs.query)))
    with torch.device(device):  # as vLLM makes its layers
        layer = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2, **of_vllm)
    output = torch.full_like(inputs.query, 7.0)
    nothing = torch.nn.Module()
    answer = forward(layer, nothing, inputs.query, None, None, vllm_pool(inputs, layout), step, output)
    assert answer is output and (output[-CASE.padding_rows :] == 7.0).all(), "padding is not written"
    rows = slice(0, inputs.batch.num_tokens)
    of_ours = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in of_ours.items()}
    lse = plan_and_attend(chunked_prefill, *inputs.tensors, softmax_scale=0.2, **of_ours, return_lse=True)[1]
    assert_matches_reference(
        output[rows],
        lse[rows],
        partial(plan_and_attend, chunked_prefill),
        inputs.query[rows],
        *inputs.tensors[1:],
        softmax_scale=0.2,
        **of_ours,
    )
    assert list(step.plans) == [of_vllm.get("sliding_window")]
    assert step.plan(of_vllm.get("sliding_window")) is step.plan(of_vllm.get("sliding_window"))


def fp8_pool(inputs, layout, kind):
    """Lay keys and values side by side as vLLM does, as bytes; what no query may see holds any bytes, NaN, too."""
    pool = vllm_pool(inputs, layout).float()
    return pool.clamp(-3e4, 3e4).to(kind).view(torch.uint8)


each_fp8 = pytest.mark.parametrize(
    ("name", "kind"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
    ids=["fp8", "fp8_e4m3", "fp8_e5m2"],
)


@pytest.mark.covers("B101")
@each_fp8
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_over_fp8_gives_what_the_reference_gives(backend, variant, layout, name, kind, device):
    of_vllm, of_ours = (
        {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        for options in VARIANTS[variant]
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = build(CASE, device=device, dtype=dtype, poison=HARMLESS)
    step = make_builder(backend, device).build(0, common_metadata(inputs.batch, len(inputs.query)))
    with torch.device(device):
        impl = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2, kv_cache_dtype=name, **of_vllm)
    output, pool = torch.full_like(inputs.query, 7.0), fp8_pool(inputs, layout, kind)
    forward(impl, vllm_layer(backend, device), inputs.query, None, None, pool, step, output)
    assert (output[-CASE.padding_rows :] == 7.0).all(), "padding is not written"
    rows = slice(0, inputs.batch.num_tokens)
    pools = [x.transpose(1, 2) for x in pool.split(32, dim=-1)]
    arguments = (inputs.query[rows], *pools, inputs.batch)
    options = dict(softmax_scale=0.2, **of_ours, scales=Fp8Scales(0.37, 2.3, format=kind))
    lse = plan_and_attend(quantized, *arguments, **options, return_lse=True)[1]
    assert_matches_reference(output[rows], lse, partial(plan_and_attend, quantized), *arguments, **options)


@each_fp8
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_new_tokens_are_written_quantized(backend, layout, name, kind, device):
    inputs = build(CASE, device=device, poison=HARMLESS)
    pool, layer = fp8_pool(inputs, layout, kind), vllm_layer(backend, device)
    impl, before = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2, kv_cache_dtype=name), pool.clone()
    key, value = (300 * torch.randn(6, 2, 32, device=device) for _ in range(2))
    slots = torch.tensor([17, -1, 3, 40], device=device)
    update(impl, layer, key, value, pool, slots)
    largest = torch.finfo(kind).max
    quantized_values = (
        torch.cat([key / layer._k_scale, value / layer._v_scale], dim=-1).clamp(-largest, largest).to(kind)
    )
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // 16, :, slot % 16] = quantized_values[token].view(torch.uint8)
    assert torch.equal(pool, before)


def test_scales_that_vllm_changes_later_are_those_of_the_next_step(backend):
    """It loads them after it has made the layers, or finds them in the first step, and writes them into its buffers."""
    layer, impl = vllm_layer(backend, "cpu", 1.0, 1.0), backend.FastAttentionImpl(4, 32, 0.2, 2, kv_cache_dtype="fp8")
    layer._k_scale.fill_(0.25)
    layer._v_scale = torch.tensor([0.5])
    scales = impl._scales(layer)
    assert scales.key.tolist() == [0.25, 0.25] and scales.value.tolist() == [0.5, 0.5] and scales.query is None


def test_padding_is_not_taken_for_tokens(backend, device):
    """Two sequences of 2 and 1 new tokens, padded to 4: as many as if both had 2."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = Case("padded", ((2, 20), (1, 33)), heads=(4, 2), head_size=32, padding_rows=1)
    inputs = build(case, device=device, dtype=dtype, poison=HARMLESS)
    layer, builder = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2), make_builder(backend, device)
    outputs = []
    for tokens in (3, 4):
        step = builder.build(0, common_metadata(inputs.batch, 4, num_actual_tokens=tokens))
        output, pool = torch.zeros_like(inputs.query), vllm_pool(inputs, "LBNHC")
        outputs.append(forward(layer, torch.nn.Module(), inputs.query, None, None, pool, step, output)[:3])
    assert step.batch.num_tokens is None
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_new_tokens_are_written(backend, layout, device):
    inputs = build(CASE, device=device, poison=HARMLESS)
    pool, layer = vllm_pool(inputs, layout), backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2)
    before = pool.clone()
    key, value = (torch.randn(6, 2, 32, device=device) for _ in range(2))
    slots = torch.tensor([17, -1, 3, 40], device=device)  # and two rows of padding that have none
    update(layer, torch.nn.Module(), key, value, pool, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // 16, :, slot % 16] = torch.cat([key[token], value[token]], dim=-1)
    assert torch.equal(pool, before)


def test_a_run_that_measures_memory_returns_zeros(backend):
    layer, output = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2), torch.ones(3, 4, 32)
    assert forward(layer, torch.nn.Module(), None, None, None, None, None, output) is output
    assert not output.any()


def test_nothing_is_read_or_copied_to_make_a_step(backend):
    """The plan has vLLM's own tables, so that a step costs no synchronisation and no copy."""
    inputs = build(CASE, poison=HARMLESS)
    common = common_metadata(inputs.batch, len(inputs.query))
    plan = make_builder(backend, "cpu").build(0, common).plan(5)
    assert plan.batch.block_table is common.block_table_tensor and plan.batch.seq_lens is common.seq_lens
    assert plan.batch.cu_seqlens_q is common.query_start_loc and plan.window_size == (4, 0) and plan.causal


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_it_registers_under_a_name_of_its_own(monkeypatch, on_cpu, asked):
    backend = vllm_doubles.install(monkeypatch, on_cpu=on_cpu)
    if asked:
        monkeypatch.setenv("FASTATTN_REPLACES_CPU_ATTN", "1")
    backend.register()
    backend.register()
    path = "twinattn.integrations.vllm.FastAttentionBackend"
    over_latents = "twinattn.integrations.vllm_mla.FastMLABackend"
    replaced = {"CPU_ATTN": path, "CPU_MLA": over_latents, "AMX_MLA": over_latents}
    assert backend.AttentionBackendEnum.__members__ == {"FASTATTN": path, "FASTATTN_MLA": over_latents} | (
        replaced if on_cpu and asked else {}
    )
    assert backend.FastAttentionBackend.get_name() == "FASTATTN"
    assert path == f"{backend.FastAttentionBackend.__module__}.{backend.FastAttentionBackend.__qualname__}"


@pytest.mark.parametrize("name", ["FASTATTN", "FASTATTN_MLA"])
def test_a_spawned_process_reads_a_name_before_it_loads_plugins(backend, name):
    """`vllm serve` spawns its engine, and pickles the configuration for it, with the name in it."""
    backend.register()
    sent = pickle.dumps(backend.AttentionBackendEnum(vllm_doubles.REGISTERED[name]))
    vllm_doubles.REGISTERED.clear()  # as in a process that begins
    assert pickle.loads(sent) == name and name in vllm_doubles.REGISTERED
    vllm_doubles.REGISTERED["OTHER"] = "a.path"
    other = pickle.loads(pickle.dumps(backend.AttentionBackendEnum("a.path")))
    assert (other.name, other.value) == ("OTHER", "a.path")


@pytest.mark.covers("B101")
def test_what_is_declared(backend):
    kind = backend.FastAttentionBackend
    assert kind.get_impl_cls() is backend.FastAttentionImpl
    assert kind.get_builder_cls() is backend.FastAttentionMetadataBuilder
    assert [size for size in (8, 60, 64, 96, 256, 264) if kind.supports_head_size(size)] == [8, 64, 96, 256]
    assert kind.supports_sink() and kind.supports_sliding_window() and kind.supports_batch_invariance()
    assert kind.supports_alibi_sqrt()
    assert not kind.forward_includes_kv_cache_update
    assert [name for name in ("auto", "fp8", "fp8_e5m2", "fp8_inc", "int8") if kind.supports_kv_cache_dtype(name)] == [
        *("auto", "fp8", "fp8_e5m2")
    ]
    assert [major for major in (7, 8, 9) if kind.supports_compute_capability(SimpleNamespace(major=major))] == [8, 9]


@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_of_an_encoder_sees_both_sides(backend, window):
    """It has no pool: keys and values are those of the call, and the window reaches as far after a token as before."""
    lens, spec = [5, 0, 9], vllm_doubles.EncoderOnlyAttentionSpec(block_size=16)
    batch = metadata.make_batch(lens, lens)
    builder = backend.FastAttentionMetadataBuilder(spec, ["0"], None, torch.device("cpu"))
    common = common_metadata(batch, 16, num_actual_tokens=14, causal=False)
    layer = backend.FastAttentionImpl(
        *(4, 32, 0.2), num_kv_heads=2, sliding_window=window, attn_type=vllm_doubles.AttentionType.ENCODER_ONLY
    )
    query, key, value = torch.randn(16, 4, 32), torch.randn(16, 2, 32), torch.randn(16, 2, 32)
    key[14:], value[14:] = torch.nan, torch.nan  # padding
    output = torch.full_like(query, 7.0)
    update(layer, torch.nn.Module(), key, value, torch.tensor([]), torch.full((16,), -1))
    forward(layer, torch.nn.Module(), query, key, value, torch.tensor([]), builder.build(0, common), output)
    assert (output[14:] == 7.0).all()
    reach = -1 if window is None else window - 1
    plan = varlen.plan(batch, causal=False, window_size=(reach, reach))
    expected = varlen.attention(query[:14], key[:14], value[:14], plan, AttentionOptions(softmax_scale=0.2))
    torch.testing.assert_close(output[:14], expected)
    with pytest.raises(NotImplementedError, match="causal: expected False, got True"):
        builder.build(0, common_metadata(batch, 16))


# --- CUDA graphs ---

LONGEST = 64
SERVES = SimpleNamespace(
    model_config=SimpleNamespace(max_model_len=LONGEST, dtype=torch.float32),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=160, max_num_seqs=4),
    compilation_config=SimpleNamespace(static_forward_context={}),
)


def buffers_of_decodes(rows, columns, device):
    """Make vLLM's metadata for a decode to capture: one token per row, over its first block."""
    batch = metadata.make_batch([1] * rows, [1] * rows, [[0] * columns] * rows, device=device)
    return common_metadata(batch, rows)


def fill(common, batch):
    """Write a step into vLLM's buffers; rows without a request have no token."""
    used, columns = batch.num_seqs, common.block_table_tensor.shape[1]
    common.query_start_loc.copy_(torch.arange(len(common.query_start_loc)).clamp(max=used))
    common.seq_lens.zero_()[:used] = batch.seq_lens
    common.block_table_tensor[:used] = batch.block_table[:, :columns]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_decode_attends_to_what_its_replay_finds(backend, variant, device):
    """Of other lengths, up to the longest, and with fewer requests: by a graph on a GPU, launch by launch on a CPU."""
    of_vllm, of_ours = (
        {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        for options in VARIANTS[variant]
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    common = buffers_of_decodes(4, LONGEST // 16, device)
    step = make_builder(backend, device, config=SERVES).build_for_cudagraph_capture(common)
    assert (step.batch.max_query_len, step.batch.max_seq_len, step.num_actual_tokens) == (1, LONGEST, 4)
    assert step.batch.seq_lens is common.seq_lens and step.batch.block_table is common.block_table_tensor
    with torch.device(device):
        layer = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2, **of_vllm)
    cases = [Case("some", ((1, 64), (1, 1), (1, 33)), heads=(4, 2), head_size=32, padding_rows=1)]
    cases += [Case("one", ((1, 50),), heads=(4, 2), head_size=32, padding_rows=3)]
    steps = [build(case, device=device, dtype=dtype, poison=HARMLESS) for case in cases]
    pools = [vllm_pool(inputs, "LBNHC") for inputs in steps]
    pool = torch.full_like(max(pools, key=len), torch.nan)
    query, output = torch.zeros_like(steps[0].query), torch.zeros_like(steps[0].query)
    launch = partial(forward, layer, torch.nn.Module(), query, None, None, pool, step, output)
    if device != "cpu":
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        launch = graph.replay
    for inputs, mine in zip(steps, pools, strict=True):
        fill(common, inputs.batch)
        query.copy_(inputs.query)
        pool[: len(mine)] = mine
        step.plans.clear()  # a plan on a CPU is of the tables that it was made of
        launch()
        out = output[: inputs.batch.num_tokens].clone()
        arguments = inputs.query[: len(out)], *inputs.tensors[1:]
        attend, options = partial(plan_and_attend, chunked_prefill), dict(softmax_scale=0.2, **of_ours)
        lse = attend(*arguments, **options, return_lse=True)[1]
        assert_matches_reference(out, lse, attend, *arguments, **options)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_prompts_are_computed_once_before_the_first_capture(backend, kv_cache_dtype, monkeypatch):
    """In one layer of each kind, over block 0; no pool is changed."""
    seen, layers = [], {}
    for name, window in (("0", None), ("1", None), ("2", 7)):
        layers[name] = vllm_layer(backend, "cpu")
        layers[name].impl = backend.FastAttentionImpl(4, 32, 0.2, 2, None, window, kv_cache_dtype)
        layers[name].kv_cache = torch.ones(3, 2, 16, 64).to(torch.uint8 if kv_cache_dtype != "auto" else torch.float32)
    monkeypatch.setitem(SERVES.compilation_config.static_forward_context, "elsewhere", None)
    for name, layer in layers.items():
        monkeypatch.setitem(SERVES.compilation_config.static_forward_context, name, layer)
    attend = backend.FastAttentionImpl.forward

    def note(impl, layer, query, key, value, pool, step, output):
        attend(impl, layer, query, key, value, pool, step, output)
        assert output.isfinite().all() and step.batch.max_seq_len == step.batch.max_query_len
        seen.append((impl.sliding_window, step.batch.cu_seqlens_q.diff().tolist()))

    monkeypatch.setattr(backend.FastAttentionImpl, "forward", note)
    names, device = [*layers, "of another rank"], torch.device("cpu")
    builder = backend.FastAttentionMetadataBuilder(SimpleNamespace(block_size=16), names, SERVES, device)
    common = buffers_of_decodes(3, 4, "cpu")
    builder.build_for_cudagraph_capture(common)
    assert not seen, "a CPU compiles nothing"
    builder.is_warm = False
    for _ in range(2):
        builder.build_for_cudagraph_capture(common)
    steps = [[64, 64], [1, 1, 1, 64]]
    assert seen == [(window, step) for window in (None, 7) for step in steps]
    assert all((layer.kv_cache == 1).all() for layer in layers.values())


def test_a_server_starts_without_prompts_that_cannot_be_computed(backend, monkeypatch, caplog):
    layer = vllm_layer(backend, "cpu")
    layer.impl = backend.FastAttentionImpl(4, 32, 0.2, 2, None, None, "auto")
    layer.kv_cache = torch.ones(3, 2, 16, 64)
    monkeypatch.setitem(SERVES.compilation_config.static_forward_context, "0", layer)
    builder = backend.FastAttentionMetadataBuilder(SimpleNamespace(block_size=16), ["0"], SERVES, torch.device("cpu"))
    builder.is_warm = False
    with monkeypatch.context() as patch:
        patch.setattr(layer.impl, "forward", lambda *_: torch.zeros(1) @ torch.zeros(2, 2))
        assert builder.build_for_cudagraph_capture(buffers_of_decodes(3, 4, "cpu")).batch.num_seqs
    assert "kernels of prompts are compiled when the first requests come: RuntimeError" in caplog.text
    assert builder.is_warm


def test_which_prompts_are_computed_before_the_first_request():
    assert steps_with_prompts(16384, 256, 4096) == [[4096] * 4, [512] * 32, [1] * 255 + [4096]]
    assert steps_with_prompts(2048, 1024, 100000) == [[2048], [512] * 4, [1] * 1023 + [1025]]
    assert steps_with_prompts(8, 8, 8) == [[8], [1] * 8]
    assert steps_with_prompts(64, 1, 1) == [[1]]


@pytest.mark.covers("B225")
def test_which_steps_can_be_captured(backend, over_latents):
    support, single = backend.AttentionCGSupport, backend.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    ask = backend.FastAttentionMetadataBuilder.get_cudagraph_support
    assert ask(SERVES, SimpleNamespace(block_size=16)) is single
    assert ask(SERVES, vllm_doubles.EncoderOnlyAttentionSpec(block_size=16)) is support.NEVER
    builder = over_latents.FastMLAMetadataBuilder(SimpleNamespace(block_size=16), ["0"], SERVES, "cpu")
    common = buffers_of_decodes(3, 4, "cpu")
    step = builder.build_for_cudagraph_capture(common)
    assert builder._cudagraph_support is single and (step.num_decodes, step.num_prefills) == (3, 0)
    assert step.decode.plan.batch.max_seq_len == LONGEST and step.decode.plan.batch.max_query_len == 1
    assert step.decode.plan.batch.seq_lens.data_ptr() == common.seq_lens.data_ptr(), "a replay finds its own"


# --- latents ---


@pytest.fixture
def over_latents(monkeypatch):
    return vllm_doubles.install_over_latents(monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("lens", [((1, 20), (1, 1), (10, 37), (4, 4), (2, 30)), ((1, 20),), ((9, 20),)])
def test_a_layer_over_latents_is_the_formula(over_latents, lens):
    """New latents are written; decodes attend absorbed and prefills do not: both as keys and values made of latents."""
    torch.manual_seed(0)
    queries, lengths = zip(*lens, strict=True)
    counts = [-(-s // 16) for s in lengths]
    blocks = iter(torch.randperm(sum(counts) + 2).tolist())
    tables = [[next(blocks) for _ in range(n)] for n in counts]
    batch = metadata.make_batch(queries, lengths, [row + [-1] * (max(counts) - len(row)) for row in tables])
    layer, (key_projection, value_projection) = latent_layer(over_latents)
    latents, pool, t = [torch.randn(s, R + ROPE) for s in lengths], torch.full((sum(counts) + 2, 16, R + ROPE), 3.0), 0
    slots = [
        torch.tensor([row[j // 16] * 16 + j % 16 for j in range(s)]) for row, s in zip(tables, lengths, strict=True)
    ]
    flat, new = pool.view(-1, R + ROPE), torch.cat([x[s - q :] for x, (q, s) in zip(latents, lens, strict=True)])
    for x, at, (q, s) in zip(latents, slots, lens, strict=True):
        flat[at[: s - q]] = x[: s - q]
    where = torch.cat([at[s - q :] for at, (q, s) in zip(slots, lens, strict=True)])
    written = dict(kv_c_normed=new[:, :R], k_pe=new[:, None, R:], kv_cache=pool, slot_mapping=where)
    vllm_doubles.call(layer, "MLAAttentionImpl.do_kv_cache_update", **written, kv_cache_dtype="auto")
    query, output = torch.randn(sum(queries), H, NOPE + ROPE), torch.zeros(sum(queries), H * DV)
    builder = over_latents.FastMLAMetadataBuilder(SimpleNamespace(block_size=16), ["0"], None, torch.device("cpu"))
    step = builder.build(0, common_metadata(batch, len(query), seq_lens_cpu_upper_bound=batch.seq_lens))
    t = step.num_decode_tokens
    if step.num_prefills:
        tensors = dict(kv_c_normed=new[t:, :R], k_pe=new[t:, None, R:], kv_c_and_k_pe_cache=pool, output=output[t:])
        vllm_doubles.call(layer, "MLAAttentionImpl.forward_mha", q=query[t:], attn_metadata=step, **tensors)
    if step.num_decodes:
        absorbed = torch.einsum("thn,hnr->thr", query[:t, :, :NOPE], key_projection)
        given = dict(q=(absorbed, query[:t, :, NOPE:]), kv_c_and_k_pe_cache=pool, attn_metadata=step)
        answer, lse = vllm_doubles.call(layer, "MLAAttentionImpl.forward_mqa", **given)
        output[:t] = torch.einsum("thr,hvr->thv", answer, value_projection).flatten(1)
        assert lse is None
    row = 0
    for x, (q, s) in zip(latents, lens, strict=True):
        made = torch.einsum("sr,hnr->hsn", x[:, :R], key_projection)
        key = torch.cat([made, x[:, R:].expand(H, -1, -1)], -1)
        value = torch.einsum("sr,hvr->hsv", x[:, :R], value_projection)
        mask = torch.ones(q, s, dtype=torch.bool).tril(s - q)
        mine = query[row : row + q].transpose(0, 1)
        expected = scaled_dot_product_attention(mine, key, value, attn_mask=mask, scale=0.3).transpose(0, 1).flatten(1)
        torch.testing.assert_close(output[row : row + q], expected, rtol=1e-4, atol=1e-5)
        row += q
    assert (step.num_decodes, step.num_prefills) == (sum(q == 1 for q in queries), sum(q > 1 for q in queries))


def test_what_layers_over_latents_do_not_compute_is_refused(over_latents):
    for name, given in (("sliding_window", 5), ("indexer", object()), ("alibi_slopes", [1.0])):
        with pytest.raises(NotImplementedError, match=f"{name}: expected none over latents"):
            latent_layer(over_latents, **{name: given})
    with pytest.raises(NotImplementedError, match="kv_cache_dtype: expected one of auto, .*, got fp8"):
        latent_layer(over_latents, kv_cache_dtype="fp8")
    builder = over_latents.FastMLAMetadataBuilder(SimpleNamespace(block_size=16), ["0"], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="causal: expected True, got False"):
        builder.build(0, common_metadata(build(CASE, poison=HARMLESS).batch, 3, causal=False))
    layer, _ = latent_layer(over_latents)
    with pytest.raises(NotImplementedError, match="output_scale: expected none"):
        vllm_doubles.call(layer, "MLAAttentionImpl.forward_mha", output=torch.ones(3, 30), output_scale=torch.ones(1))
    assert not layer.fused_output_quant_supported("fp8"), "or vLLM reads its own backends' fields in our metadata"
    kind = over_latents.FastMLABackend
    assert kind.is_mla() and [size for size in (320, 570, 576, 640) if kind.supports_head_size(size)] == [320, 576]


def test_what_is_not_declared_is_refused(backend):
    inputs = build(CASE, poison=HARMLESS)
    builder, layer = make_builder(backend, "cpu"), backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2)
    with pytest.raises(NotImplementedError, match="causal: expected True, got False"):
        builder.build(0, common_metadata(inputs.batch, 3, causal=False))
    with pytest.raises(NotImplementedError, match="attn_type: expected decoder or encoder_only, got encoder"):
        backend.FastAttentionImpl(4, 32, 0.2, attn_type=vllm_doubles.AttentionType.ENCODER)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype: expected one of auto, .*, got fp8_ds_mla"):
        backend.FastAttentionImpl(4, 32, 0.2, kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(NotImplementedError, match="chunk_lookback: expected -1, got 1"):
        backend.FastAttentionImpl(4, 32, 0.2, chunk_lookback=1)
    assert backend.FastAttentionImpl(4, 32, 0.2, chunk_lookback=-1, sinks=None, use_alibi_sqrt=False)
    with pytest.raises(NotImplementedError, match="output_scale: expected none"):
        forward(layer, torch.nn.Module(), None, None, None, None, None, torch.ones(3), output_scale=torch.ones(1))


@pytest.mark.parametrize("name", vllm_doubles.NOT_DECLARED)
def test_metadata_that_would_be_ignored_is_refused(backend, name):
    inputs, builder = build(CASE, poison=HARMLESS), make_builder(backend, "cpu")
    with pytest.raises(NotImplementedError, match=f"^{name}: expected none, got "):
        builder.build(0, common_metadata(inputs.batch, 3, **{name: vllm_doubles.NOT_DECLARED[name]}))
    hints = dict(is_prefilling=torch.tensor([True]), req_idx=np.array([0]), positions=torch.tensor([0]))
    builder.build(0, common_metadata(inputs.batch, 3, mm_req_doc_ranges={}, **hints))


def test_a_field_of_a_later_vllm_is_refused_until_it_is_known(backend):
    """What it stands for is not known here."""
    later = dataclasses.make_dataclass(
        "Later", [("tree_mask", object, None)], bases=(vllm_doubles.CommonAttentionMetadata,)
    )
    common = common_metadata(build(CASE, poison=HARMLESS).batch, 3)
    values = {x.name: getattr(common, x.name) for x in dataclasses.fields(common)}
    make_builder(backend, "cpu").build(0, later(**values))
    with pytest.raises(NotImplementedError, match="tree_mask: expected none, got Tensor"):
        make_builder(backend, "cpu").build(0, later(**values, tree_mask=torch.ones(2)))


def test_lengths_of_numpy(backend):
    """Chunked attention, of Llama 4, makes the step's virtual batches with NumPy."""
    inputs = build(CASE, poison=HARMLESS)
    lengths = dict(max_query_len=np.int32(10), max_seq_len=np.int64(33))
    batch = make_builder(backend, "cpu").build(0, common_metadata(inputs.batch, 3, **lengths)).batch
    assert (type(batch.max_query_len), batch.max_query_len, type(batch.max_seq_len)) == (int, 10, int)


def test_scales_per_head_are_refused(backend):
    layer = vllm_layer(backend, "cpu")
    layer._v_scale = torch.ones(2)
    impl = backend.FastAttentionImpl(4, 32, 0.2, num_kv_heads=2, kv_cache_dtype="fp8")
    with pytest.raises(NotImplementedError, match=r"_v_scale: expected one number for the layer, got \[2\]"):
        impl._scales(layer)


def test_batch_invariance_is_vllms_variable(backend, monkeypatch):
    monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", True)
    assert backend.FastAttentionImpl(4, 32, 0.2).options.batch_invariant
