"""Latent attention: one pool for keys and values, two ways to the same answer, and transformers' own layers."""

import gc
import importlib
import math
import re
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

import fastattn.mla
import refattn.mla
import refattn.varlen
from refattn.batch import Batch
from refattn.metadata import make_batch, slot_mapping
from refattn.options import AttentionOptions
from tests.helpers.batches import CASES, HARMLESS, POISON, Case, masks_by_hand, of_batches, ragged_cases
from tests.helpers.kernels_present import HALVES, PRESENT, PRESENT_FOR_LATENTS
from tests.helpers.latents import (
    NOPE,
    OPTIONS,
    RANK,
    REAL,
    ROPE,
    SCALE,
    SMALL,
    SPARE,
    VALUE,
    Latents,
    Sizes,
    assert_latents_seen,
    attend,
    by_reference,
    filled,
    prefill,
)
from tests.helpers.tolerance import assert_matches_reference

FEW = ("mixed", "odd-blocks", "one-token-in-last-block")  # these get every option and size of a chunk
PREFILLS = [case for case in CASES if all(q <= s for q, s in case.lens)]  # all new tokens are in their sequences
REAL_CASES = [
    Case("decodes", ((1, 5), (1, 33), (1, 0), (1, 16), (1, 700), (1, 64)), heads=(16, 1), block_size=64),
    Case("many-heads", ((1, 4097), (1, 65)), heads=(128, 1), block_size=64),
    Case("drafts", ((3, 70), (3, 3), (3, 200), (3, 1)), heads=(20, 1), block_size=64, padding_rows=2),
    Case("prompts", ((40, 130), (40, 40)), heads=(4, 1), block_size=64),
    Case("ragged", ((4, 60), (1, 33), (20, 20), (0, 5), (2, 0)), heads=(5, 1), block_size=16, padding_rows=2),
    Case("large-blocks", ((4, 60), (1, 233), (70, 90)), heads=(16, 1), block_size=128),
]
REAL_OPTIONS = ("plain", "negative-scale", "softcap", "sinks")
ON_GPU = [kernel for kernel in PRESENT_FOR_LATENTS if kernel.name != "cpu" and not kernel.is_interpreted]


def twins_to_agree():
    """List what each kernel is held to: small latents where it has them, and those of DeepSeek's size."""
    for kernel in PRESENT_FOR_LATENTS:
        if kernel.name in ("cpu", "triton"):
            for case in CASES:
                many = case.name in FEW and (not kernel.is_interpreted or case.name == FEW[0])
                for name in OPTIONS if many else ["plain"]:
                    if many or not kernel.is_interpreted or max(s for _, s in case.lens) <= 128:
                        yield pytest.param(kernel, SMALL, case, OPTIONS[name], id=f"{kernel.name}-{case}-{name}")
        if kernel in ON_GPU:
            for case in REAL_CASES:
                for name in REAL_OPTIONS if case.name in ("drafts", "ragged") else ["plain"]:
                    yield pytest.param(kernel, REAL, case, OPTIONS[name], id=f"{kernel.name}-real-{case}-{name}")


MLA_KERNELS = [kernel for kernel in PRESENT_FOR_LATENTS if kernel.name in ("cpu", "triton")]
each_twin = pytest.mark.parametrize("twin", [refattn.mla, fastattn.mla], ids=["ref", "fast"])


# --- the mask, read out ---


@pytest.mark.core
@pytest.mark.covers("D154")
@each_twin
@pytest.mark.parametrize("case", [case for case in CASES if max(s for _, s in case.lens) <= 128], ids=str)
def test_every_query_sees_the_latents_up_to_its_position(twin, case, device):
    assert_latents_seen(
        partial(attend, twin, softmax_scale=1.0), case, masks_by_hand(case, lambda i, j: j <= i), device
    )


# --- memory that no query may see ---


@each_twin
@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_no_bit_depends_on_what_no_query_may_see(twin, case, device):
    """Blocks and slots of others, unused columns, rows of padding."""
    answers = []
    for poison in (POISON, HARMLESS):
        given = Latents(case, device=device, poison=poison)
        absorbed = attend(twin, given.absorbed, given.cache, given.batch, softmax_scale=SCALE)
        made = prefill(
            twin,
            *(given.query, given.new, given.cache),
            **given.projections,
            batch=given.batch,
            workspace=40 * given.batch.num_seqs,
            softmax_scale=SCALE,
        )
        answers.append([*absorbed, *made])
    for poisonous, harmless in zip(*answers, strict=True):
        assert torch.equal(poisonous, harmless)


# --- the reference against arithmetic that is not its own ---


@pytest.mark.covers("D155")
@pytest.mark.parametrize(
    ("case", "workspace"),
    [(case, size) for case in PREFILLS for size in (1, 5, 40, 10**6) if case.name in FEW or size > 5],
    ids=str,
)
def test_both_ways_give_one_answer_at_every_size_of_a_chunk(case, workspace):
    given = Latents(case, dtype=torch.float64)
    options = filled(OPTIONS["everything"], case.heads[0], "cpu")
    latent, lse = attend(refattn.mla, given.absorbed, given.cache, given.batch, **options)
    whole = refattn.mla.project(latent, given.projections["value_projection"])
    workspace = workspace * given.batch.num_seqs if case.name != "decode-long" else workspace + 1000
    tensors = given.query, given.new, given.cache, *given.projections.values(), given.batch
    made, made_lse = prefill(refattn.mla, *tensors, workspace=workspace, **options)
    torch.testing.assert_close(made, whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(made_lse, lse, rtol=1e-11, atol=1e-11)


@each_twin
def test_chunks_are_planned_for_the_longest_context(twin):
    """A prompt without a context has none, and a bound that is too large makes empty ones only."""
    batch = make_batch([3, 2], [3, 8], [[0], [1, 2]])
    sizes = dict(block_size=4, workspace=4)
    exact, wide = (twin.plan_prefill(batch, **sizes, max_context_len=length) for length in (6, 9))
    assert len(twin.plan_prefill(batch, **sizes).chunks) == len(exact.chunks) == 3
    assert [chunk.plan.batch.seq_lens.tolist() for chunk in wide.chunks] == [[0, 2], [0, 2], [0, 2], [0, 0], [0, 0]]
    assert twin.plan_prefill(make_batch([3], [3], [[0]]), **sizes).chunks == ()


@pytest.mark.core
@pytest.mark.covers("D157")
@each_twin
def test_chunks_are_read_from_the_slots_of_their_tokens(twin):
    """Six tokens of context in blocks 5 and 2, two at a time, after a prompt that has none."""
    plan = twin.plan_prefill(make_batch([3, 2], [3, 8], [[0], [5, 2]]), block_size=4, workspace=4)
    assert [chunk.slots[:2].tolist() for chunk in plan.chunks] == [[20, 21], [22, 23], [8, 9]]


@pytest.mark.core
@pytest.mark.covers("D158")
def test_a_prefill_is_attention_over_the_keys_and_values_that_it_makes():
    case = Case("c", ((3, 9), (1, 17), (5, 5)), heads=(3, 1), block_size=4)
    given = Latents(case, dtype=torch.float64)
    to_key, to_value = given.projections.values()
    keys, values = [], []
    for tokens in given.keys:
        latent, rope = tokens[:, :RANK], tokens[:, RANK:]
        keys.append(torch.stack([torch.cat([latent @ head.T, rope], -1) for head in to_key], 1))
        values.append(torch.stack([latent @ head.T for head in to_value], 1))
    options = AttentionOptions(softmax_scale=SCALE)
    expected = refattn.varlen.attention(
        given.query, torch.cat(keys), torch.cat(values), refattn.varlen.plan(given.batch), options
    )
    tensors = given.query, given.new, given.cache, to_key, to_value, given.batch
    made, _ = prefill(refattn.mla, *tensors, workspace=12, softmax_scale=SCALE)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


SIZES = dict(
    vocab_size=31,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROPE,
    qk_nope_head_dim=NOPE,
    v_head_dim=VALUE,
    max_position_embeddings=256,
    initializer_range=0.3,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    mscale=1.0,
    mscale_all_dim=0.7,
    original_max_position_embeddings=64,
    beta_fast=32,
    beta_slow=1,
)
DEEPSEEK = {
    "v2": DeepseekV2Config(**SIZES, q_lora_rank=None, first_k_dense_replace=2),
    "v3": DeepseekV3Config(**SIZES, q_lora_rank=20, first_k_dense_replace=2),
    "v3-yarn": DeepseekV3Config(**SIZES, q_lora_rank=20, first_k_dense_replace=2, rope_parameters=YARN),
}


@pytest.mark.core
@pytest.mark.covers("D155")
@each_twin
@pytest.mark.parametrize("config", DEEPSEEK.values(), ids=DEEPSEEK)
def test_equals_the_layers_of_deepseek(twin, config):
    """Of transformers: their keys, values and latents are noted, and their answers are ours, either way."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    layer, noted = model.model.layers[1].self_attn, {}

    class Noted:
        """A cache that keeps nothing: it notes the latents and the rotary keys of a layer."""

        def __init__(self):
            self.latents = {}

        def update(self, latent, rope_key, layer_idx, **others):
            self.latents[layer_idx] = latent, rope_key
            return latent, rope_key

        def __getattr__(self, name):
            raise AttributeError(name)

    code = importlib.import_module(type(layer).__module__)
    eager = code.eager_attention_forward

    def note(module, query, key, value, mask, **options):
        answer = eager(module, query, key, value, mask, **options)
        if module is layer:
            noted.update(query=query, out=answer[0], scaling=options["scaling"])
        return answer

    cache, length = Noted(), 23
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(code, "eager_attention_forward", note)
        ids = torch.randint(31, (1, length), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(length)[None]
        hidden = model.model.embed_tokens(ids)
        rope = model.model.rotary_emb(hidden, positions)
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for block in model.model.layers:
            hidden = block(hidden, attention_mask=mask, position_embeddings=rope, past_key_values=cache)
    latent, rope_key = (x[0, 0] for x in cache.latents[1])
    weights = layer.kv_b_proj.weight.detach().view(4, NOPE + VALUE, RANK)
    projections = dict(key_projection=weights[:, :NOPE], value_projection=weights[:, NOPE:])
    pool = torch.full((8, 4, RANK + ROPE), math.nan, dtype=torch.float64)
    table = [[6, 0, 3, 7, 1, 4]]
    twin.write(latent, rope_key, pool, slot_mapping(make_batch([length], [length], table), length, block_size=4))
    query, new = rearrange(noted["query"], "1 h t d -> t h d"), slice(14, length)
    batch = make_batch([9], [length], table)
    options = dict(softmax_scale=noted["scaling"])
    absorbed, _ = attend(twin, twin.absorb(query[new], projections["key_projection"]), pool, batch, **options)
    expected = noted["out"][0, new]
    close = dict(rtol=1e-4, atol=2e-6)  # its softmax is in float32
    torch.testing.assert_close(twin.project(absorbed, projections["value_projection"]), expected, **close)
    tokens = torch.cat([latent, rope_key], -1)[new]
    made, _ = prefill(twin, query[new], tokens, pool, **projections, batch=batch, workspace=5, **options)
    torch.testing.assert_close(made, expected, **close)


# --- the twin against the reference ---


@pytest.mark.covers("D127", "D154", "D155", "D222")
@pytest.mark.parametrize(("kernel", "sizes", "case", "options"), list(twins_to_agree()))
def test_twins_agree(kernel, sizes, case, options, device):
    given = Latents(case, device=device, dtype=kernel.dtypes[0], sizes=sizes)
    options = filled(options, case.heads[0], device)
    arguments = given.absorbed, given.cache, given.batch
    rank = dict(latent_rank=sizes.rank)

    def hold():
        out, lse = attend(fastattn.mla, *arguments, **rank, **options)
        assert_matches_reference(out, lse, by_reference(attend, **rank), *arguments, **options)
        memory = torch.full_like(out, math.nan)
        assert attend(fastattn.mla, *arguments, **rank, return_lse=False, out=memory, **options) is memory
        assert torch.equal(memory, out)

    with kernel.forced():
        kernel.check(hold)


# --- local chunks ---

LOCAL = Case("local", ((4, 70), (1, 33), (40, 40), (0, 9), (50, 130), (1, 97)), heads=(4, 1), padding_rows=2)
LOCAL_PLANS = {
    "chunks": (dict(chunk_size=32), lambda i, j: j <= i and i // 32 == j // 32),
    "window": (dict(chunk_size=48, window_size=(9, 0)), lambda i, j: i - 9 <= j <= i and i // 48 == j // 48),
}
each_local = pytest.mark.parametrize(("chunks", "sees"), LOCAL_PLANS.values(), ids=LOCAL_PLANS)


def over_chunks(package: str, chunks: dict) -> SimpleNamespace:
    """Return `mla.attention` with the plan of `local`."""
    local, path = (importlib.import_module(f"{package}.{name}") for name in ("local", "mla"))
    return SimpleNamespace(plan=partial(local.plan, **chunks), attention=path.attention)


@pytest.mark.core
@pytest.mark.covers("D190")
@each_local
@pytest.mark.parametrize("quantized", [None, torch.float8_e4m3fn], ids=["numbers", "e4m3"])
@pytest.mark.parametrize("kernel", PRESENT_FOR_LATENTS, ids=lambda kernel: kernel.name)
def test_twins_agree_over_chunks(kernel, quantized, chunks, sees, device):
    sizes = (SMALL if kernel.name in ("cpu", "triton") else REAL)._replace(spare=8)
    given = Latents(replace(LOCAL, block_size=16), device=device, dtype=kernel.dtypes[0], sizes=sizes)
    cache = given.cache if quantized is None else given.cache.to(quantized)
    of_cache = dict(latent_rank=sizes.rank, cache_scale=1.0 if quantized is None else 0.7)
    fast, reference = (over_chunks(package, chunks) for package in ("fastattn", "refattn"))
    options = filled(OPTIONS["sinks"] | OPTIONS["softcap"], 4, device)

    def hold():
        out, lse = attend(fast, given.absorbed, cache, given.batch, **of_cache, **options)
        by_hand = partial(attend, reference, **of_cache)
        assert_matches_reference(out, lse, by_hand, given.absorbed, cache, given.batch, **options)

    with kernel.forced():
        kernel.check(hold)


@pytest.mark.parametrize("kernel", PRESENT_FOR_LATENTS, ids=lambda kernel: kernel.name)
def test_nan_that_a_query_sees_comes_out(kernel, device):
    """In a query, and in a latent that all queries of a sequence see.

    FlashMLA and FlashAttention-3 leave a split whose scores are NaN out of the sum: theirs are the keys of one page.
    """
    longer = 60 if kernel.recomputed else 100
    case = Case("nan", ((2, 20), (2, longer)), heads=(3, 1), block_size=64)
    given = Latents(case, device=device, dtype=kernel.dtypes[0], sizes=SMALL if device == "cpu" else REAL)
    query, batch = given.absorbed, given.batch
    query[0, 1] = math.nan
    given.cache[batch.block_table[1, 0], 35] = math.nan
    with kernel.forced():
        out, lse = attend(
            fastattn.mla, query, given.cache, batch, latent_rank=query.shape[2] - given.rope, **filled({}, 3, device)
        )
    expected = torch.zeros(4, 3, dtype=torch.bool)
    expected[0, 1] = expected[2:] = True
    assert torch.equal(lse.isnan().cpu(), expected)
    assert torch.equal(out.isnan().cpu(), expected[..., None].expand_as(out))


NO_GPU = [pytest.param(None, marks=pytest.mark.skip(reason="a CPU captures no graph"), id="none")]


@pytest.mark.parametrize("kernel", ON_GPU or NO_GPU, ids=lambda kernel: kernel.name)
def test_a_graph_stays_right_when_its_sequences_grow(kernel, device):
    """Captured twice with one plan, and the first graph is never replayed: each makes what depends on the lengths."""
    case = Case("graph", ((1, 900), (1, 300), (1, 2100)), heads=(16, 1), block_size=64)
    given = Latents(case, device=device, dtype=kernel.dtypes[0], sizes=REAL, poison=HARMLESS)
    lengths = given.batch.seq_lens.clone()
    given.batch.seq_lens.copy_(torch.tensor([5, 70, 1]))
    plan = fastattn.mla.plan(given.batch, block_size=64)
    options = AttentionOptions(softmax_scale=SCALE)
    call = (given.absorbed, given.cache, plan, options)
    graphs, answers = [torch.cuda.CUDAGraph() for _ in range(2)], []
    with kernel.forced():
        fastattn.mla.attention(*call, latent_rank=REAL.rank)
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.graph(graph):
                first = fastattn.mla.attention(*call, latent_rank=REAL.rank, return_lse=True)
                answers.append((first, fastattn.mla.attention(*call, latent_rank=REAL.rank, return_lse=True)))
        given.batch.seq_lens.copy_(lengths)
        graphs[1].replay()
        again = fastattn.mla.attention(*call, latent_rank=REAL.rank, return_lse=True)
    reference = by_reference(attend, latent_rank=REAL.rank)
    for out, lse in (*answers[1], again):
        assert_matches_reference(out, lse, reference, given.absorbed, given.cache, given.batch, softmax_scale=SCALE)


@pytest.mark.covers("D157", "D158", "E172")
@pytest.mark.parametrize(
    ("kernel", "case", "options", "workspace"),
    [
        pytest.param(kernel, case, options, workspace, id=f"{kernel.name}-{case}-{name}-{workspace}")
        for kernel in PRESENT
        if kernel.name == "cpu" or kernel in ON_GPU
        for case in PREFILLS
        for i, (name, options) in enumerate(OPTIONS.items())
        for workspace in (7, 10**6)
        # Each of the few has an option with one workspace, and the next of them with the other.
        if (case.name in FEW and (i + FEW.index(case.name)) % 2 == (workspace > 7))
        or (name == "plain" and workspace > 7)
    ],
)
def test_prefills_agree(kernel, case, options, workspace, device):
    if kernel.dtypes[0] in HALVES:  # what rounding a key does to a single score is chance: many, for a fair comparison
        case = replace(case, heads=(64, 1))
    given = Latents(case, device=device, dtype=kernel.dtypes[0])
    options = filled(options, case.heads[0], device)
    arguments = given.query, given.new, given.cache, *given.projections.values(), given.batch
    fixed = dict(workspace=workspace * given.batch.num_seqs)

    def hold():
        out, lse = prefill(fastattn.mla, *arguments, **fixed, **options)
        assert_matches_reference(out, lse, by_reference(prefill, **fixed), *arguments, **options)
        memory = torch.full_like(out, math.nan)
        assert prefill(fastattn.mla, *arguments, **fixed, return_lse=False, out=memory, **options) is memory
        assert torch.equal(memory, out)

    with kernel.forced():
        kernel.check(hold)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside of it and are alive, and the most that were at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(answer):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in given | self.alive:
                if self.now + storage.nbytes() > self.most:
                    gc.collect()  # Triton's interpreter leaves circles behind
                self.now += storage.nbytes()
                self.alive.add(storage._cdata)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return answer

    def free(self, storage, size):
        self.now -= size
        self.alive.discard(storage)


@pytest.mark.parametrize("kernel", MLA_KERNELS, ids=lambda kernel: kernel.name)
def test_the_memory_of_a_prefill_does_not_grow_with_its_context(kernel, device):
    """Many chunks take as much as two: keys and values of one at a time, and what is merged so far."""
    sizes, most = Sizes(rank=64, rope=8, nope=32, value=32), []
    new = 4 if kernel.is_interpreted else 32
    gc.collect()
    gc.freeze()  # what there is already is no garbage that `LiveBytes` would have to look for, time and again
    for chunks in (2, 6) if kernel.is_interpreted else (2, 16):
        case = Case("long", ((new, new + 16 * chunks),), heads=(4, 1), block_size=16)
        given = Latents(case, dtype=kernel.dtypes[0], device=device, sizes=sizes)
        longest = 16 * chunks  # so that the device need not synchronize
        plan = fastattn.mla.plan_prefill(given.batch, block_size=16, workspace=16, max_context_len=longest)
        assert len(plan.chunks) == chunks
        tensors = given.query, *given.new.split([sizes.rank, sizes.rope], dim=1), given.cache
        options = AttentionOptions(softmax_scale=SCALE)
        projections = given.projections
        with kernel.forced():
            fastattn.mla.prefill(*tensors, plan, options, **projections)
            with LiveBytes() as live:
                fastattn.mla.prefill(*tensors, plan, options, **projections)
        most.append(live.most)
    assert most[0] > 0
    assert most[1] <= most[0] * 1.05 + 1024, most


@pytest.mark.parametrize("kernel", [k for k in MLA_KERNELS if not k.is_interpreted], ids=lambda kernel: kernel.name)
def test_a_hundred_chunks_lose_no_digits(kernel, device):
    """One token of the context in each: an output that were rounded to 16 bits at each merge would drift."""
    dtype = kernel.dtypes[-1] if device == "cpu" else torch.bfloat16
    case = Case("drift", ((2, 102),), heads=(2, 1), block_size=16)
    given = Latents(case, dtype=dtype, device=device)
    tensors = given.query, given.new, given.cache, *given.projections.values(), given.batch
    with kernel.forced():
        one, one_lse = prefill(fastattn.mla, *tensors, workspace=10**6, softmax_scale=SCALE)
        many, many_lse = prefill(fastattn.mla, *tensors, workspace=1, softmax_scale=SCALE)
    torch.testing.assert_close(many_lse, one_lse, rtol=0, atol=1e-4)
    torch.testing.assert_close(many, one, rtol=0, atol=8 * torch.finfo(dtype).eps * float(one.abs().max()))


@pytest.mark.core
@pytest.mark.covers("E171")
@pytest.mark.parametrize("kernel", [kernel for kernel in PRESENT if not kernel.is_interpreted], ids=lambda x: x.name)
def test_prefills_of_deepseeks_size_agree(kernel, device):
    """Keys of 192 and values of 128 elements, which FlashAttention has kernels for."""
    case = Case("real", ((20, 150), (1, 70), (30, 30)), heads=(2, 1), padding_rows=2)
    given = Latents(case, device=device, dtype=kernel.dtypes[0], sizes=REAL)
    arguments = given.query, given.new, given.cache, *given.projections.values(), given.batch
    options = dict(softmax_scale=192**-0.5)

    def hold():
        answer = prefill(fastattn.mla, *arguments, workspace=200, **options)
        assert_matches_reference(*answer, by_reference(prefill, workspace=200), *arguments, **options)

    with kernel.forced():
        kernel.check(hold)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [pytest.param(kernel, dtype, id=f"{kernel.name}-{dtype}") for kernel in MLA_KERNELS for dtype in kernel.dtypes],
)
def test_absorb_and_project_agree_in_every_type(kernel, dtype, device):
    given = Latents(Case("types", ((4, 60), (1, 33), (20, 20)), heads=(4, 1)), device=device, dtype=dtype)
    key_projection, value_projection = given.projections.values()
    with kernel.forced():
        for function, tensors in (
            ("absorb", (given.query, key_projection)),
            ("project", (given.absorbed[..., :RANK], value_projection)),
        ):
            reference, twin = (getattr(module, function)(*tensors) for module in (refattn.mla, fastattn.mla))
            torch.testing.assert_close(twin, reference)


def test_a_batch_invariant_prefill_may_have_no_sequences():
    """Each sequence is read in one part, and there is none: two rows of padding."""
    plan = refattn.mla.plan_prefill(make_batch([], [], []), block_size=4, workspace=4)
    options = AttentionOptions(softmax_scale=0.5, batch_invariant=True)
    projections = dict(key_projection=torch.ones(1, 3, 4), value_projection=torch.ones(1, 3, 4))
    tokens = torch.ones(2, 1, 5), torch.ones(2, 4), torch.ones(2, 2), torch.ones(1, 4, 6)
    out, lse = refattn.mla.prefill(*tokens, plan, options, **projections, return_lse=True)
    assert out.tolist() == [[[0.0] * 3]] * 2 and lse.tolist() == [[-torch.inf]] * 2


@pytest.mark.core
@pytest.mark.covers("E172")
@of_batches
@given(case=ragged_cases(), workspace=st.integers(1, 300))
def test_both_twins_make_the_same_chunks(case, workspace):
    lens = tuple((min(q, s), s) for q, s in case.lens)
    given = Latents(replace(case, lens=lens))
    workspace = max(workspace, len(lens))
    plans = [
        twin.plan_prefill(given.batch, block_size=case.block_size, workspace=workspace)
        for twin in (refattn.mla, fastattn.mla)
    ]
    assert len(plans[0].chunks) == len(plans[1].chunks)
    assert (plans[0].block_size, plans[0].blocks) == (plans[1].block_size, plans[1].blocks)
    read = [0] * len(lens)
    for one, other in zip(plans[0].chunks, plans[1].chunks, strict=True):
        assert torch.equal(one.slots, other.slots) and len(one.slots) <= workspace
        read = [sum(pair) for pair in zip(read, one.plan.batch.seq_lens.tolist(), strict=True)]
    assert read == [s - q for q, s in lens], "every token of a context is in one chunk"
    pairs = [(plans[0].own, plans[1].own)]
    pairs += [(one.plan, other.plan) for one, other in zip(plans[0].chunks, plans[1].chunks, strict=True)]
    for one, other in pairs:
        for name in ("cu_seqlens_q", "seq_lens"):
            assert torch.equal(getattr(one.batch, name), getattr(other.batch, name))
        assert (one.batch.max_query_len, one.batch.max_seq_len) == (other.batch.max_query_len, other.batch.max_seq_len)
        assert torch.equal(one.first_keys, other.first_keys)
        assert one.causal == (one.positions is None) and one.causal == (other.positions is None)
        assert one.causal or torch.equal(one.positions, other.positions)
        assert (one.causal, one.window_size, one.block_size) == (other.causal, other.window_size, other.block_size)


# --- writing ---


@pytest.mark.core
@pytest.mark.covers("D153")
@each_twin
def test_latents_and_rotary_keys_lie_side_by_side(twin, device):
    cache = torch.full((5, 4, RANK + ROPE + SPARE), math.nan, device=device)
    before = cache.clone()
    latent, rope_key = torch.randn(3, RANK, device=device), torch.randn(3, ROPE, device=device)
    twin.write(latent, rope_key, cache, torch.tensor([17, -1, 2], device=device))
    for token, (block, row) in ((0, (4, 1)), (2, (0, 2))):
        assert torch.equal(cache[block, row, : RANK + ROPE], torch.cat([latent[token], rope_key[token]]))
        cache[block, row, : RANK + ROPE] = math.nan
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0)), "something else was written"


@each_twin
def test_a_pool_has_no_values(twin):
    pool = twin.allocate(3, 16, RANK, ROPE, dtype=torch.float16)
    assert pool.shape == (3, 16, RANK + ROPE) and pool.dtype == torch.float16 and not pool.any()


# --- bad input ---


CASE = Case("small", ((2, 5), (1, 20)), heads=(4, 1))
BAD_ATTENTION = {
    "softmax_scale: expected a number": dict(softmax_scale=None),
    "latent_rank: expected a positive int": dict(latent_rank=0),
    "latent_rank: expected at most the query's head size of 40, got 41": dict(latent_rank=41),
    "cache: expected rows of at least r + rope = 40 elements, got c=39": dict(cache=lambda x: x[..., :39]),
    "cache: expected float32 [n, p, c], got float32": dict(cache=lambda x: x[:, :, None]),
    "cache: expected blocks of 16 tokens, as in the plan, got p=8": dict(cache=lambda x: x[:, :8]),
    "query: expected at least 3 rows": dict(query=lambda x: x[:2]),
    "out: expected float32 [t=3, h=4, dv=32]": dict(out=torch.zeros(3, 4, 40)),
    "sinks: expected floating point [h=4]": dict(sinks=torch.zeros(3)),
}
BAD_PREFILL = {
    "softmax_scale: expected a number": dict(softmax_scale=None),
    "latent: expected float32 [t=3, r]": dict(latent=lambda x: x[:2]),
    "rope_key: expected float32 [t=3, rope]": dict(rope_key=lambda x: x.double()),
    "key_projection: expected float32 [h=4, nope=16, r=32]": dict(key_projection=lambda x: x[:, :15]),
    "value_projection: expected float32 [h=4, dv, r=32]": dict(value_projection=lambda x: x[..., :31]),
    "cache: expected rows of at least r + rope = 40": dict(cache=lambda x: x[..., :39]),
    "cache: expected at least": dict(cache=lambda x: x[:2]),
    "out: expected float32 [t=3, h=4, dv=24]": dict(out=torch.zeros(3, 4, 32)),
    "plan: expected a PrefillPlan": dict(plan=None),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "changes"), BAD_ATTENTION.items(), ids=BAD_ATTENTION)
def test_bad_input_of_attention_is_named(twin, message, changes):
    given = Latents(CASE, poison=HARMLESS)
    arguments = dict(query=given.absorbed, cache=given.cache, latent_rank=RANK, softmax_scale=SCALE)
    arguments |= {name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}
    options = AttentionOptions(
        **{name: arguments.pop(name) for name in ("softmax_scale", "sinks") if name in arguments}
    )
    plan = twin.plan(given.batch, block_size=16)
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.attention(plan=plan, options=options, **arguments)


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "changes"), BAD_PREFILL.items(), ids=BAD_PREFILL)
def test_bad_input_of_a_prefill_is_named(twin, message, changes):
    given = Latents(CASE, poison=HARMLESS)
    arguments = dict(
        query=given.query,
        latent=given.new[:, :RANK],
        rope_key=given.new[:, RANK:],
        cache=given.cache,
        plan=twin.plan_prefill(given.batch, block_size=16, workspace=8),
        softmax_scale=SCALE,
        **given.projections,
    )
    arguments |= {name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}
    options = AttentionOptions(softmax_scale=arguments.pop("softmax_scale"))
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.prefill(options=options, **arguments)


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bad_plan_or_write_is_named_and_nothing_is_written(twin):
    batch = Latents(CASE).batch
    for message, arguments in {
        "workspace: expected a token for each of 2 sequences, got 1": dict(workspace=1),
        "workspace: expected a positive int": dict(workspace=0),
        "max_context_len: expected at least 19, the longest context, got 18": dict(workspace=9, max_context_len=18),
        "max_context_len: expected a Python int": dict(workspace=9, max_context_len=4.0),
        "block_size: expected a positive int": dict(block_size=0),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.plan_prefill(batch, **(dict(block_size=16, workspace=8) | arguments))
    short = Batch(
        torch.tensor([0, 3], dtype=torch.int32), *[torch.tensor(x, dtype=torch.int32) for x in ([2], [[1]])], 3, 3
    )
    with pytest.raises(ValueError, match=re.escape("seq_lens: expected the new tokens in them, [3], got [2]")):
        twin.plan_prefill(short, block_size=16, workspace=8)
    cache, latent, rope_key = torch.zeros(2, 4, RANK + ROPE), torch.ones(2, RANK), torch.ones(2, ROPE)
    good = torch.tensor([1, 2])
    for message, arguments in {
        "cache: expected rows of at least r + rope = 40": (latent, rope_key, cache[..., :39], good),
        "rope_key: expected float32 [t=2, rope]": (latent, rope_key[:1], cache, good),
        "slot_mapping: expected slots in 0..7": (latent, rope_key, cache, torch.tensor([1, 8])),
        "slot_mapping: expected each slot once": (latent, rope_key, cache, torch.tensor([1, 1])),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.write(*arguments)
        assert not cache.any()
    with pytest.raises(ValueError, match=re.escape("key_projection: expected float32 [h=4, nope, r]")):
        twin.absorb(torch.zeros(2, 4, 24), torch.zeros(3, 16, 32))
    with pytest.raises(ValueError, match=re.escape("value_projection: expected float32 [h=4, dv, r=32]")):
        twin.project(torch.zeros(2, 4, 32), torch.zeros(4, 24, 31))
