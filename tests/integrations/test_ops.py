"""Every path as an operator: the same answers and errors, `opcheck`, and one graph under `torch.compile`."""

import dataclasses
import inspect
import random
import shutil
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import cpu_vec_isa

from fastattn import (
    cascade,
    chunked_prefill,
    differential,
    kv_cache,
    local,
    merge,
    metadata,
    mla,
    quantized,
    recurrent,
    sliding_window,
    speculative,
    varlen,
)
from refattn.batch import Batch, Prefix
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan
from refattn.trees import Trees
from twinattn.integrations import ops, plan_lists
from twinattn.integrations.plan_lists import lists_of_plan, same_plan
from twinattn.kit import HARMLESS, Case, build

BATCH = build(Case("mixed", ((4, 20), (1, 33), (10, 17)), heads=(4, 2), head_size=16, padding_rows=1), poison=HARMLESS)
P = 16  # tokens in a block
OPTIONS = AttentionOptions(
    softmax_scale=0.3, softcap=4.0, alibi_slopes=torch.rand(4), sinks=torch.randn(4), batch_invariant=True
)
# The function of a path that each operator is, where it is not `attention` of the path of the same name.
OTHERS = {
    "mla_prefill": mla.prefill,
    "merge": merge.merge,
    "add_sinks": merge.add_sinks,
    "write": kv_cache.write,
    "write_differential": differential.write,
    "write_latents": mla.write,
    "write_quantized": quantized.write,
    "convolve": recurrent.convolve,
}
PREPARED = (*plan_lists.PLANS, StatePlan)
POOLS = {"recurrent": 5, "convolve": 2}  # the argument that is changed besides


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def shared_batch():
    """Make a batch of two decodes that share their first two blocks, and of a prompt of its own."""
    return metadata.make_batch([1, 1, 3], [40, 45, 3], [[0, 1, 2], [0, 1, 3], [4]])


def calls():
    """Yield operator, positional arguments and keyword arguments; what an operator writes to is made anew."""
    query, key_cache, value_cache, batch = BATCH.tensors
    pages = (query, key_cache, value_cache)
    slots = metadata.slot_mapping(batch, len(query), block_size=P)
    tokens = (draw(len(query), 2, 16), draw(len(query), 2, 16))
    yield "varlen", (*BATCH.rows[:3], varlen.plan(batch), OPTIONS), {}
    yield "varlen", (*(x.double() for x in BATCH.rows[:3]), varlen.plan(batch, causal=False)), {}
    yield "chunked_prefill", (*pages, chunked_prefill.plan(batch, block_size=P), OPTIONS), {}
    yield "sliding_window", (*pages, sliding_window.plan(batch, window_size=(7, 0), block_size=P), OPTIONS), {}
    yield "local", (*pages, local.plan(batch, chunk_size=P, block_size=P)), {}
    levels = cascade.plan(shared_batch(), prefixes=[Prefix(0, 2, 32)], block_size=P, window_size=(40, 0))
    yield "cascade", (draw(5, 4, 16), key_cache, value_cache, levels, OPTIONS), {}
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, -1, 0, 2]], dtype=torch.int32)
    trees = Trees(parents, torch.tensor([4, 3, 4], dtype=torch.int32))
    drafts = metadata.make_batch([4, 3, 4], [20, 33, 17], [[0, 1], [2, 3, 4], [5, 6]])
    for given in (trees, None):
        tree_plan = speculative.plan(drafts, block_size=P, trees=given)
        yield "speculative", (draw(11, 4, 16), key_cache, value_cache, tree_plan, OPTIONS), {}
    pairs = draw(2, 2, *key_cache.shape[:2], 1, 16)
    subtraction = dict(lambda_full=torch.tensor(0.4), lambda_init=0.2, norm_weight=draw(32), norm_eps=1e-3)
    yield "differential", (query, pairs, differential.plan(batch, block_size=P)), subtraction
    rows = differential.split_halves(*BATCH.rows[1:3])
    yield "differential", (query, rows, varlen.plan(batch), OPTIONS), subtraction
    of_pairs = dict(scales=Fp8Scales(torch.rand(2) + 0.1, 0.5))
    eight_bit = (pairs * 4).to(torch.float8_e4m3fn).view(torch.uint8)
    yield "differential", (query, eight_bit, differential.plan(batch, block_size=P)), subtraction | of_pairs
    latents, scale = draw(key_cache.shape[0], P, 24), AttentionOptions(softmax_scale=0.2)
    yield "mla", (draw(len(query), 4, 24), latents, mla.plan(batch, block_size=P), scale), dict(latent_rank=20)
    prefill_plan = mla.plan_prefill(batch, block_size=P, workspace=24)
    projections = dict(key_projection=draw(4, 12, 20), value_projection=draw(4, 10, 20))
    new = (draw(len(query), 4, 16), draw(len(query), 20), draw(len(query), 4))
    yield "mla_prefill", (*new, latents, prefill_plan, scale), projections
    quantized_latents, its_scale = latents.to(torch.float8_e5m2), dict(cache_scale=0.5)
    absorbed = (draw(len(query), 4, 24), quantized_latents, mla.plan(batch, block_size=P), scale)
    yield "mla", absorbed, dict(latent_rank=20) | its_scale
    in_trees = (draw(11, 4, 24), latents, speculative.plan(drafts, block_size=P, trees=trees), scale)
    yield "mla", in_trees, dict(latent_rank=20)
    yield "mla_prefill", (*new, quantized_latents, prefill_plan, scale), projections | its_scale
    for scales, caches in quantized_caches(key_cache.shape[0]):
        quantized.write(*tokens, *caches, slots, scales=scales)
        plan = quantized.plan(batch, block_size=P)
        yield "quantized", (query, *caches, plan, AttentionOptions(softcap=3.0)), dict(scales=scales)
        if isinstance(scales, Fp8Scales):  # they cross by themselves, whatever the plan
            continue
        yield "quantized", (draw(5, 4, 16), *caches, levels, OPTIONS), dict(scales=scales)
        tree_plan = speculative.plan(drafts, block_size=P, trees=trees)
        yield "quantized", (draw(11, 4, 16), *caches, tree_plan, OPTIONS), dict(scales=scales)
    in_8_bits = dict(scales=Fp8Scales(0.5, 0.25, 0.75, torch.float8_e5m2))
    caches = [(4 * x).to(torch.float8_e5m2).view(torch.uint8) for x in (key_cache, value_cache)]
    yield "quantized", (query.to(torch.float8_e5m2), *caches, quantized.plan(batch, block_size=P)), in_8_bits
    for scales, caches in quantized_caches(key_cache.shape[0]):
        yield "write_quantized", (*tokens, *caches, slots), dict(scales=scales)
    yield "merge", ([draw(5, 4, 16), draw(5, 4, 16) + 1], [draw(5, 4), draw(5, 4) + 1]), {}
    yield "merge", ([draw(5, 4, 16)], [draw(5, 4)]), {}
    yield "add_sinks", (draw(5, 4, 16), draw(5, 4), draw(4)), {}
    yield "write", (*tokens, key_cache.clone(), value_cache.clone(), slots), {}
    yield "write_differential", (*tokens, pairs.clone(), slots), {}
    yield "write_differential", (*tokens, eight_bit.clone(), slots), of_pairs
    yield "write_latents", (*new[1:], latents.clone(), slots), {}
    yield "write_latents", (*new[1:], quantized_latents.clone(), slots), its_scale
    lens, slots = metadata.make_batch([2, 1], [5, 9]), torch.tensor([[3, 0, 1], [2, -1, -1]], dtype=torch.int32)
    kept = dict(checkpoint_indices=torch.tensor([[4, -1, -1], [-1] * 3], dtype=torch.int32), block_size=4)
    drafts = recurrent.plan(lens, state_indices=slots, num_accepted=torch.tensor([3, 1], dtype=torch.int32), **kept)
    folded = recurrent.plan(lens, state_indices=slots[:, 0])
    decays = -draw(4, 4, 8).abs()
    tokens = (draw(4, 2, 8), draw(4, 2, 8), draw(4, 4, 6))
    yield "recurrent", (*tokens, decays, draw(4, 4), draw(5, 4, 6, 8), drafts), {}
    plain = RecurrentOptions(0.5, delta=False)
    yield "recurrent", (*tokens, decays[..., 0], draw(4, 4), draw(5, 4, 6, 8), folded, plain), {}
    yield "convolve", (draw(4, 5), draw(5, 4), draw(5, 3, 5), drafts), dict(bias=draw(5), silu=False)


def quantized_caches(num_blocks):
    """Yield scales, and pools to write to, of each kind of quantized cache."""
    key, value, token_scales = quantized.allocate_int8(num_blocks, P, 2, 16)
    yield Int8Scales(token_scales, torch.rand(2, 16) + 0.1), (key, value)
    for scales in (Fp8Scales(0.5, 0.25, 0.75), Fp8Scales(torch.rand(2) + 0.1, 0.5)):
        yield scales, tuple(torch.zeros(num_blocks, P, 2, 16, dtype=torch.uint8) for _ in range(2))


CALLS = [pytest.param(*call, id=f"{call[0]}-{i}") for i, call in enumerate(calls())]
FIRST = {call.values[0]: call.values[1] for call in reversed(CALLS)}  # the first call of each operator

PLANNED = sorted({call.values[0] for call in CALLS if any(type(x) in PREPARED for x in call.values[1])})


def path_of(name):
    return OTHERS.get(name) or import_module(f"fastattn.{name}").attention


def memory(values):
    """Copy arguments, with the tensors in them, so that two calls may write."""

    def copy(x):
        if isinstance(x, torch.Tensor):
            return x.clone()
        if isinstance(x, Int8Scales):
            return dataclasses.replace(x, key=x.key.clone())
        return x

    return {name: copy(x) for name, x in values.items()} if isinstance(values, dict) else tuple(map(copy, values))


def written(arguments, keywords):
    """Return the tensors that a write may have changed."""
    scales = keywords.get("scales")
    return [*arguments, *([scales.key] if isinstance(scales, Int8Scales) else [])]


@pytest.mark.parametrize(("name", "arguments", "keywords"), CALLS)
def test_an_operator_is_its_path(name, arguments, keywords):
    ours, theirs = (memory(arguments), memory(keywords)), (memory(arguments), memory(keywords))
    both = dict(return_lse=True) if "return_lse" in inspect.signature(path_of(name)).parameters else {}
    answer = getattr(ops, name)(*ours[0], **ours[1], **both)
    expected = path_of(name)(*theirs[0], **theirs[1], **both)
    if name in POOLS:
        answer, expected = ([out, call[0][POOLS[name]]] for out, call in ((answer, ours), (expected, theirs)))
    elif name.startswith("write"):
        assert answer is None
        answer, expected = ([x for x in written(*call) if isinstance(x, torch.Tensor)] for call in (ours, theirs))
    else:
        alone = getattr(ops, name)(*ours[0], **ours[1])
        assert torch.equal(alone[0] if name in ("merge", "add_sinks") else alone, answer[0])
    assert len(answer) == len(expected) >= 2
    assert all(torch.equal(one, other) for one, other in zip(answer, expected, strict=True))
    if "plan" in inspect.signature(path_of(name)).parameters:
        prepared = [ops.prepare(x) if type(x) in PREPARED else x for x in memory(arguments)]
        answer = getattr(ops, name)(*prepared, **memory(keywords), **both)
        answer = [answer, prepared[POOLS[name]]] if name in POOLS else answer
        assert all(torch.equal(one, other) for one, other in zip(answer, expected, strict=True))


def flattened(name, arguments, keywords, monkeypatch, suffix=""):
    """Return the operator that a function calls, and what with, before it writes."""
    operator, seen = getattr(torch.ops.fastattn, name + suffix), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.fastattn, name + suffix, lambda *flat: seen.append(memory(flat)) or operator(*flat))
        getattr(ops, name)(*memory(arguments), **memory(keywords))
    return operator, seen[0]


@pytest.mark.parametrize(("name", "arguments", "keywords"), CALLS)
def test_opcheck(name, arguments, keywords, monkeypatch):
    """PyTorch's own check: the schema says what is written to, and the compiler's rule gives the right shapes."""
    operator, flat = flattened(name, arguments, keywords, monkeypatch)
    over_fp8 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e5m2 for x in flat)
    checks = ("test_autograd_registration", "test_faketensor")
    checks = checks if over_fp8 else ("test_schema", *checks)  # test_schema multiplies arguments, torch no fp8
    if arguments is FIRST[name] and name not in PLANNED:  # those are traced by `test_one_graph_for_all_steps`
        checks += ("test_aot_dispatch_dynamic",)
    results = torch.library.opcheck(operator.default, flat, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"} and len(results) == len(checks)


@pytest.mark.parametrize("name", PLANNED)
def test_opcheck_of_prepared_plans(name, monkeypatch):
    _, arguments, keywords = next(call.values for call in CALLS if call.values[0] == name)
    prepared = [ops.prepare(x) if type(x) in PREPARED else x for x in arguments]
    operator, flat = flattened(name, prepared, keywords, monkeypatch, ops.BY_NUMBER)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(torch.library.opcheck(operator.default, flat, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.covers("D192")
@pytest.mark.parametrize(("name", "arguments", "keywords"), CALLS)
def test_one_graph(name, arguments, keywords, shapes_unchecked):
    torch._dynamo.reset()
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="aot_eager")
    ours, theirs = (memory(arguments), memory(keywords)), (memory(arguments), memory(keywords))
    answer, expected = compiled(*ours[0], **ours[1]), getattr(ops, name)(*theirs[0], **theirs[1])
    pairs = [(answer, expected)]
    if answer is None or name in POOLS:
        pairs += zip(written(*ours), written(*theirs), strict=True)
    for one, other in pairs:
        if isinstance(one, tuple):
            assert all(map(torch.equal, one, other))
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other)


# --- one graph, whatever the steps ---


def steps(name, count, seed=0):
    """Yield operator, tensors with a token dimension, and a function of the rest, of steps that have little in common.

    One sequence and several, decodes and chunks, chains and trees, windows that leave blocks behind and that do not.
    """
    draws = random.Random(seed)
    pools = (draw(40, 4, 2, 16), draw(40, 4, 2, 16) + 1)
    latents, scale = draw(40, 4, 24), AttentionOptions(softmax_scale=0.2)
    quantized_latents, its_scale = [torch.zeros(40, 4, 2, 16, dtype=torch.uint8)] * 2, dict(scales=Fp8Scales(0.5, 0.5))
    for _ in range(count):
        query_lens = [draws.choice([1, 1, 3]) for _ in range(draws.choice([1, 1, 2, 3]))]
        trees = None
        if name in ("speculative", "mla") and draws.random() < 0.5:
            trees = speculative.make_trees([[-1, *range(length - 1)] for length in query_lens])
        shared = draws.choice([0, 1, 2]) if len(query_lens) > 1 else 0
        seq_lens = [4 * shared + length + draws.choice([0, 1, 30]) for length in query_lens]
        blocks = draws.sample(range(2, 40), 35)
        tables = [[0, 1][:shared] + [blocks.pop() for _ in range(-(-s // 4) - shared)] for s in seq_lens]
        batch, t = metadata.make_batch(query_lens, seq_lens, tables), sum(query_lens)
        query, over = draw(t, 4, 16), dict(block_size=4)
        if name == "varlen":
            rows, plan = draw(2, sum(seq_lens), 2, 16), varlen.plan(metadata.make_batch(query_lens, seq_lens))
            yield name, (query, *rows), (plan,), {}
        elif name == "differential":
            subtraction = dict(lambda_full=torch.tensor(0.4), lambda_init=0.2)
            yield name, (query,), (draw(2, 2, 40, 4, 1, 16), differential.plan(batch, **over)), subtraction
        elif name == "mla":
            plan = speculative.plan(batch, trees=trees, **over)
            yield name, (draw(t, 4, 24),), (latents, plan, scale), dict(latent_rank=20)
        elif name == "mla_prefill":
            plan = mla.plan_prefill(batch, workspace=16, **over)
            made = dict(key_projection=draw(4, 12, 20), value_projection=draw(4, 10, 20))
            yield name, (query, draw(t, 20), draw(t, 4)), (latents, plan, scale), made
        elif name == "quantized":
            yield name, (query,), (*quantized_latents, quantized.plan(batch, **over)), its_scale
        elif name in ("recurrent", "convolve"):
            drafts = draws.choice([0, 2])  # slots beside the first, and where to begin among them
            slots = torch.tensor(draws.sample(range(9), 9), dtype=torch.int32)[: 3 * len(query_lens)].view(-1, 3)
            begun = dict(num_accepted=torch.ones(len(query_lens), dtype=torch.int32)) if drafts else {}
            plan = recurrent.plan(batch, state_indices=slots if drafts else slots[:, 0].contiguous(), **begun)
            if name == "convolve":
                yield name, (draw(t, 5),), (draw(5, 4), draw(9, 3, 5), plan), {}
            else:
                tokens = (draw(t, 2, 8), draw(t, 2, 8), draw(t, 4, 6), -draw(t, 4).abs(), draw(t, 4))
                yield name, tokens, (draw(9, 4, 6, 8), plan), {}
        else:
            window, prefixes = draws.choice([(-1, -1), (6, 0)]), [Prefix(0, len(query_lens), 4 * shared)]
            path, more = {
                "chunked_prefill": (chunked_prefill, {}),
                "sliding_window": (sliding_window, dict(window_size=(6, 0))),
                "local": (local, dict(chunk_size=8)),
                "cascade": (cascade, dict(prefixes=prefixes if shared else [])),
                "speculative": (speculative, dict(trees=trees, window_size=window)),
            }[name]
            plan = path.plan(batch, **more, **over)
            yield name, (query,), (*pools, plan), {}


@pytest.mark.parametrize("name", PLANNED)
@torch.no_grad()
def test_one_graph_for_all_steps(name, shapes_unchecked):
    """Of a prepared plan nothing is compiled for; with tokens marked as what changes, no step is compiled anew."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend=graphs)
    for _, tensors, others, keywords in steps(name, 12):
        for x in tensors:
            mark_unbacked(x, 0)
        prepared = [ops.prepare(x) if type(x) in PREPARED else x for x in memory(others)]
        answer, expected = (
            compiled(*tensors, *prepared, **keywords),
            getattr(ops, name)(*tensors, *others, **keywords),
        )
        assert torch.equal(answer, expected)
        if name in POOLS:
            assert torch.equal(prepared[-2], others[-2])
    assert graphs.frame_count == 1


@torch.no_grad()
def test_a_few_graphs_where_nothing_is_marked(shapes_unchecked):
    """The first number of tokens, any number, and one token: trees, chains and windows make no other."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(ops.speculative, fullgraph=True, backend=graphs)
    for _, tensors, (*pools, plan), _ in steps("speculative", 80):
        compiled(*tensors, *pools, ops.prepare(plan))
    assert 2 <= graphs.frame_count <= 3


@torch.no_grad()
def test_a_plan_that_is_not_prepared_is_warned_of_before_the_limit(shapes_unchecked):
    """PyTorch's own error names a guard. By then half of the graphs that it allows have come with a warning."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(ops.speculative, fullgraph=True, backend=graphs)
    many = steps("speculative", 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while graphs.frame_count < torch._dynamo.config.recompile_limit // 2:
            _, tensors, others, _ = next(many)
            compiled(*tensors, *others)
    with pytest.warns(UserWarning, match=r"ops\.speculative: .* graph 5 .* stops after 8.*ops\.prepare\(plan\)"):
        while graphs.frame_count == torch._dynamo.config.recompile_limit // 2:
            _, tensors, others, _ = next(many)
            compiled(*tensors, *others)


def test_a_prepared_plan_has_to_be_held():
    query, *pools, batch = BATCH.tensors
    plan = chunked_prefill.plan(batch, block_size=P)
    prepared, flat = ops.prepare(plan), (None, 0.0, None, None, False, False)
    number = prepared.number
    del prepared
    with pytest.raises(RuntimeError, match="plan: expected one that is held while its graph runs"):
        torch.ops.fastattn.chunked_prefill_by_number(query, *pools, number, *flat)
    with pytest.raises(ValueError, match="plan: expected a plan of the path, got Batch"):
        ops.prepare(batch)


class Exported(nn.Module):
    """A layer whose plan comes as tables and whole numbers."""

    def forward(self, query, key_cache, value_cache, tables, sizes):
        flat = (None, 5.0, None, None, False, False)  # the options, in the order of `AttentionOptions`
        out, _ = torch.ops.fastattn.chunked_prefill(query, key_cache, value_cache, tables, sizes, *flat)
        return out.flatten(1)


@torch.no_grad()
def test_a_module_is_exported_saved_loaded_and_runs_with_other_lengths(tmp_path):
    pools = (draw(40, 4, 2, 16), draw(40, 4, 2, 16) + 1)

    def inputs(query_lens, seq_lens, tables):
        plan = chunked_prefill.plan(metadata.make_batch(query_lens, seq_lens, tables), block_size=4)
        query = draw(sum(query_lens), 4, 16)
        return (query, *pools, *ops.flatten(plan)), chunked_prefill.attention(
            query, *pools, plan, AttentionOptions(softcap=5.0)
        )

    auto = torch.export.Dim.DYNAMIC
    flat, _ = inputs([3, 2], [5, 9], [[5, 1, 3], [2, 7, 4]])
    *_, tables, sizes = flat
    lengths = [1, 2, 3, 4]  # the batch's sizes; the block size and the mask stay
    dynamic = (
        {0: auto},
        None,
        None,
        [None if x is None else dict.fromkeys(range(x.ndim), auto) for x in tables],
        [auto if i in lengths else None for i in range(len(sizes))],
    )
    program = torch.export.export(Exported(), flat, dynamic_shapes=dynamic, strict=False)
    torch.export.save(program, tmp_path / "layer.pt2")
    module = torch.export.load(tmp_path / "layer.pt2").module()
    others = [([2, 4, 2], [2, 14, 30], [[5, -1], [1, 3, 2, 9], list(range(10, 18))])]
    for lens in others:
        tables = [[*blocks, *[-1] * (max(map(len, lens[2])) - len(blocks))] for blocks in lens[2]]
        flat, expected = inputs(*lens[:2], tables)
        assert torch.equal(module(*flat), expected.flatten(1))


class Layer(nn.Module):
    """A layer of a model over a paged cache: a window or all of it."""

    def __init__(self, window):
        super().__init__()
        self.attend = ops.chunked_prefill if window is None else ops.sliding_window
        self.options = AttentionOptions(softcap=5.0, sinks=draw(6))
        self.qkv, self.out = nn.Linear(48, 160), nn.Linear(96, 48)

    def forward(self, x, caches, plan, slots):
        query, key, value = (y.unflatten(-1, (-1, 16)) for y in self.qkv(x).split([96, 32, 32], -1))
        ops.write(key, value, *caches, slots)
        return x + self.out(self.attend(query, *caches, plan, self.options).flatten(1))


class Model(nn.Module):
    """Two layers, each with a cache and a plan of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(None), Layer(5)])

    def forward(self, x, caches, plans, slots):
        for layer, pools, plan in zip(self.layers, caches, plans, strict=True):
            x = layer(x, pools, plan, slots)
        return x


BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_model_is_one_graph_over_steps_of_other_lengths(backend, shapes_unchecked, monkeypatch, tmp_path):
    # Inductor's cache does not know for which vectors it compiled: after ATEN_CPU_CAPABILITY=avx2 it answers wrongly.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # It tries all vectors that the processor has, each by a program of its own, and that takes longer than the graphs.
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [cpu_vec_isa.VecAVX2()])
    monkeypatch.setattr(cpu_vec_isa.VecAVX2, "__bool__", lambda self: True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    ours, theirs = ([kv_cache.allocate(8, 4, 2, 16) for _ in range(2)] for _ in range(2))
    # In the third step the window leaves blocks behind, so its plan has tables that it did not have before.
    steps = [
        ([3, 1], [3, 6]),
        ([2, 2], [5, 8]),
        ([1, 1], [6, 9]),
        ([2, 3], [8, 12]),
        ([1, 1], [9, 13]),
        ([3, 2], [12, 15]),
    ]
    for i, (query_lens, seq_lens) in enumerate(steps[: 6 if backend == "aot_eager" else 2]):
        batch = metadata.make_batch(query_lens, seq_lens, [[5, 1, 0, 3], [2, 7, 4, 6]])
        slots = metadata.slot_mapping(batch, sum(query_lens), block_size=4)
        window = sliding_window.plan(batch, window_size=(4, 0), block_size=4)
        plans = [chunked_prefill.plan(batch, block_size=4), window]
        x = draw(sum(query_lens), 48)
        answer, expected = compiled(x, ours, plans, slots), model(x, theirs, plans, slots)
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)  # inductor may sum in another order
        if backend == "aot_eager":
            assert torch.equal(answer, expected)
            pools = (both for layer in zip(ours, theirs, strict=True) for both in zip(*layer, strict=True))
            assert all(torch.equal(one, other) for one, other in pools)
        if i == 3:
            before = graphs.frame_count
    if backend == "aot_eager":
        assert graphs.frame_count == before, "a step of other lengths was compiled anew"


def test_every_field_of_a_plan_crosses():
    """Fields cross by the types they are declared with; one that did not would be ignored by an operator."""
    batch = dataclasses.replace(BATCH.batch, num_keys=70)
    rows = batch.num_tokens
    plan = Plan(
        batch,
        P,
        False,
        (3, 2),
        first_keys=torch.tensor([0, 16, 32], dtype=torch.int32),
        positions=torch.arange(rows, dtype=torch.int32),
        sequences=torch.tensor([0, 0, 1], dtype=torch.int32),
    )
    ends = dict(first_visible=torch.zeros(rows).int(), last_visible=torch.full((rows,), 100).int())
    spans = dataclasses.replace(plan, window_size=(-1, -1), extends_causal=True, **ends)
    fields = [(kind, field.name) for kind in (Batch, Plan) for field in dataclasses.fields(kind) if field.init]
    for one, has_not in ((plan, (*ends, "extends_causal")), (spans, ("window_size",))):
        tables, sizes = lists_of_plan(one)
        again = plan_lists.plan_of_lists(tables, sizes)
        for kind, name in fields:
            if name in ("batch", *has_not):
                continue
            value, other = (getattr(x if kind is Plan else x.batch, name) for x in (one, again))
            default = next(f.default for f in dataclasses.fields(kind) if f.name == name)
            assert value is not default and value != default if not isinstance(value, torch.Tensor) else True, name
            assert value is other if isinstance(value, torch.Tensor) else value == other, name
        assert lists_of_plan(again)[1] == sizes


def test_later_layers_of_a_step_get_the_same_plan():
    """They replay what its first layer worked out; tables that were written since make another one."""
    plan = chunked_prefill.plan(metadata.make_batch([1, 2], [20, 30], [[0, 1], [2, 3]]), block_size=P)
    lists = lists_of_plan(plan)
    first = same_plan(*lists)
    assert same_plan(*lists_of_plan(plan)) is first
    plan.batch.seq_lens.sub_(1)
    later = same_plan(*lists)
    assert later is not first and later.batch.seq_lens.tolist() == [19, 29]
    with torch.inference_mode():
        fresh = chunked_prefill.plan(metadata.make_batch([1], [20], [[0, 1]]), block_size=P)
        assert same_plan(*lists_of_plan(fresh)) is not same_plan(*lists_of_plan(fresh))
    for _ in range(2 * plan_lists.REMEMBERED):
        same_plan(*lists_of_plan(chunked_prefill.plan(metadata.make_batch([1], [20], [[0, 1]]), block_size=P)))
    assert len(plan_lists._plans) == plan_lists.REMEMBERED


def test_errors_are_those_of_the_path(shapes_unchecked):
    query, key_cache, value_cache, batch = BATCH.tensors
    plan = chunked_prefill.plan(batch, block_size=P)
    with pytest.raises(ValueError, match=r"sinks: expected floating point \[h=4\]"):
        ops.chunked_prefill(query, key_cache, value_cache, plan, AttentionOptions(sinks=torch.zeros(3)))
    with pytest.raises(ValueError, match="plan: expected a plan of the path, got Batch"):
        ops.chunked_prefill(query, key_cache, value_cache, batch)
    with pytest.raises(ValueError, match="slot_mapping"):
        ops.write(draw(2, 2, 16), draw(2, 2, 16), key_cache, value_cache, torch.tensor([3, 3]))
    with pytest.raises(RuntimeError, match="no autograd|backward|autograd"):
        ops.chunked_prefill(query.clone().requires_grad_(), key_cache, value_cache, plan).sum().backward()


def test_every_path_has_an_operator():
    """But for those of a rank among others, which talk to those others."""
    functions = {name: value for name, value in vars(ops).items() if inspect.isfunction(value)}
    named = {name for name, value in functions.items() if value.__module__ == ops.__name__ and not name.startswith("_")}
    named -= {"prepare", "flatten"}  # helpers that make arguments
    assert named == {call.values[0] for call in CALLS}, "an operator is not tested"
    for name in named:
        takes = inspect.signature(path_of(name)).parameters
        assert [x for x in takes if x != "out" or name == "add_sinks"] == list(
            inspect.signature(getattr(ops, name)).parameters
        ), name


def test_an_operator_takes_every_option_of_a_layer():
    """An option that is no argument of an operator would be left out without a word."""
    assert [*ops.OPTIONS] == [one.name for one in dataclasses.fields(AttentionOptions)]
