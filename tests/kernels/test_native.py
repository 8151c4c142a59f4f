"""Our own C for the CPU, where tests of paths do not look: all vectors, splits, a changed table, no compiler."""

import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastattn
import refattn
from fastattn import chunked_prefill
from fastattn.kernels import native, order
from fastattn.kernels.native import attention, compiler
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from tests.helpers.batches import build, plan_and_attend
from tests.helpers.tolerance import assert_twins_agree
from twinattn.kit import Case

COMPILED = not isinstance(compiler.library(), str)
needs_compiler = pytest.mark.skipif(not COMPILED, reason="there is no C compiler")
VECTORS = {"AVX-512": "-march=skylake-avx512", "AVX2": "-march=haswell", "SSE2": "-march=x86-64"}
DECODES = Case("decodes", ((1, 1100), (3, 70), (0, 9), (1, 0), (2, 1), (1, 1024)), heads=(12, 2), padding_rows=2)


def vectors_here() -> list[str]:
    """Return for which of the vectors this processor can run what is compiled."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    has = {"AVX-512": "avx512bw", "AVX2": "avx2", "SSE2": "sse2"}
    return [name for name, flag in has.items() if f" {flag}" in flags]


@pytest.fixture(scope="module", params=vectors_here())
def compiled(request, tmp_path_factory):
    """Compile for the vectors of this processor, and for those of older ones; return their place, and the library."""
    flags = tuple("-Og" if flag == "-O3" else flag for flag in compiler.FLAGS)  # -Og compiles in a third of the time
    with (
        mock.patch.object(compiler, "FOR_THIS_PROCESSOR", (VECTORS[request.param],)),
        mock.patch.object(compiler, "FLAGS", flags),
    ):
        cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        made = compiler._compile(cc, compiler._openmp(), tmp_path_factory.mktemp("compiled"))
    return [*VECTORS].index(request.param), ctypes.CDLL(str(made))


# --- what it computes ---


@needs_compiler
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (12, 4), (12, 3), (5, 1)], ids=str)
def test_each_width_of_vectors_and_each_number_of_rows(compiled, heads, monkeypatch):
    """Each type meets each size under each of the vectors, and with each number of rows under one of them."""
    number, library = compiled
    monkeypatch.setattr(attention, "library", lambda: library)
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        size = (64, 80, 20)[(number + heads[0] + i) % 3]
        case = Case("sizes", DECODES.lens, heads=heads, head_size=size, padding_rows=2)
        with fastattn.use_kernel("native"):
            assert_twins_agree("chunked_prefill", *build(case, dtype=dtype).tensors)


@needs_compiler
@pytest.mark.parametrize("heads", [(2, 2), (8, 4), (6, 2), (20, 4)], ids=str)
def test_pairs_of_each_width_of_vectors_and_each_number_of_rows(compiled, heads, monkeypatch):
    """Rows of both halves meet in one tile; values of 20 elements end inside a vector. The options change with all."""
    number, library = compiled
    monkeypatch.setattr(attention, "library", lambda: library)
    weights = dict(lambda_full=torch.tensor(0.35), lambda_init=0.2)
    for i, (dtype, size) in enumerate(((torch.float32, 64), (torch.bfloat16, 20), (torch.float16, 80))):
        inputs = build(Case("pairs", DECODES.lens, heads=heads, head_size=size, padding_rows=2), dtype=dtype)
        pools = inputs.key_cache, inputs.value_cache
        cache = torch.stack([torch.stack([pool[:, :, half::2] for pool in pools]) for half in (0, 1)])
        options = dict(window_size=(1050, 0), sinks=torch.linspace(-2, 3, heads[0]))
        options = options if (number + heads[0] // 2 + i) % 2 else {}
        with fastattn.use_kernel("native"):
            assert_twins_agree("differential", inputs.query, cache, inputs.batch, **weights, **options)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_are_rounded_as_torch_rounds(dtype):
    """One key per sequence, so the output is its value, through float32 and back; every number of 16 bits."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    pool = numbers.view(-1, 1, 1, 16).contiguous()
    count = len(pool)
    batch = make_batch([1] * count, [1] * count, [[i] for i in range(count)])
    plan = chunked_prefill.plan(batch, block_size=1)
    with fastattn.use_kernel("native"):
        out = chunked_prefill.attention(torch.zeros(count, 1, 16, dtype=dtype), torch.zeros_like(pool), pool, plan)
    assert torch.equal(out.flatten().isnan(), numbers.isnan())
    assert torch.equal(out.flatten()[~numbers.isnan()], numbers[~numbers.isnan()])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_are_rounded_to_even(dtype):
    """Two keys of equal weight, whose values are neighbours in float16 and bfloat16: each mean is a tie."""
    even = torch.tensor([1.0, 2.0**-20, 3.0, 60000.0, 2.0**-24, 0.0], dtype=dtype).view(torch.int16)
    first = torch.cat((even, even + 1)).view(dtype)
    second = (first.view(torch.int16) + 1).view(dtype)
    pool = torch.stack((first, second)).view(1, 2, 1, -1).contiguous()
    plan = chunked_prefill.plan(make_batch([1], [2], [[0]]), block_size=2)
    with fastattn.use_kernel("native"):
        out = chunked_prefill.attention(torch.zeros(1, 1, 12, dtype=dtype), torch.zeros_like(pool), pool, plan)
    assert torch.equal(out.flatten(), ((first.double() + second.double()) / 2).float().to(dtype))


@needs_compiler
def test_splits_merge():
    """More keys than one split has, at either side of its end, and a window that ends inside of one."""
    for seq_len in (attention.SPLIT - 1, attention.SPLIT, attention.SPLIT + 1, 3 * attention.SPLIT + 5):
        inputs = build(Case("splits", ((2, seq_len), (1, 3)), heads=(4, 2)))
        with fastattn.use_kernel("native"):
            assert_twins_agree("chunked_prefill", *inputs.tensors)
            assert_twins_agree("sliding_window", *inputs.tensors, window_size=(attention.SPLIT, 0))
            assert_twins_agree("chunked_prefill", *inputs.tensors, sinks=torch.tensor([-1e4, 0.0, 9.0, 90.0]))


@pytest.mark.covers("B58")
@needs_compiler
@pytest.mark.parametrize("kv_heads", [2, 6])  # one after the other, and in turns
@pytest.mark.parametrize("root", [False, True], ids=["alibi", "alibi-of-the-root"])
def test_alibi(root, kv_heads):
    inputs = build(Case("decodes", DECODES.lens, heads=(12, kv_heads), padding_rows=2))
    with fastattn.use_kernel("native"):
        assert_twins_agree(
            "chunked_prefill", *inputs.tensors, alibi_slopes=torch.linspace(0.01, 0.5, 12), alibi_sqrt=root
        )


@needs_compiler
def test_no_bit_depends_on_the_number_of_threads(monkeypatch):
    """Of 72 splits of a KV head, a work item has 6, 3, 2 and 1, which take turns."""
    inputs = build(Case("decodes of 6 KV heads", DECODES.lens, heads=(12, 6), padding_rows=2))
    answers = []
    for threads in (1, 4, 9, 18):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        with fastattn.use_kernel("native"):
            answers.append(plan_and_attend(chunked_prefill, *inputs.tensors))
            assert_twins_agree("chunked_prefill", *inputs.tensors)
            assert_twins_agree("sliding_window", *inputs.tensors, window_size=(70, 0))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@needs_compiler
def test_pools_with_other_strides_are_copied_tile_by_tile():
    """The copies of the next tile, of the next KV head in its turn, have room of their own."""
    inputs = build(Case("decodes", DECODES.lens, heads=(12, 6), padding_rows=2))
    query, *pools, batch = inputs.tensors
    pools = [pool.transpose(-1, -2).contiguous().transpose(-1, -2) for pool in pools]
    assert pools[0].stride(-1) != 1
    with fastattn.use_kernel("native"):
        assert_twins_agree("chunked_prefill", query, *pools, batch)


@needs_compiler
def test_threads_share_a_plan():
    inputs = build(DECODES)
    plan = chunked_prefill.plan(inputs.batch, block_size=inputs.key_cache.shape[1])
    layers = [torch.randn_like(inputs.query) for _ in range(8)]

    def run(query):
        return chunked_prefill.attention(query, inputs.key_cache, inputs.value_cache, plan)

    with fastattn.use_kernel("native"):
        expected = [run(query) for query in layers]
    with ThreadPoolExecutor(4) as threads:
        for answer, right in zip(threads.map(run, layers), expected, strict=True):
            assert torch.equal(answer, right)


@needs_compiler
def test_a_replay_takes_as_many_threads_as_there_are_now(monkeypatch):
    inputs = build(DECODES)
    plan, threads = chunked_prefill.plan(inputs.batch, block_size=inputs.key_cache.shape[1]), []
    launch = attention._launch
    monkeypatch.setattr(
        attention, "_launch", lambda call, *tensors: threads.append(call.threads) or launch(call, *tensors)
    )
    with fastattn.use_kernel("native"):
        for count in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
            chunked_prefill.attention(*inputs.tensors[:3], plan)
    assert threads == [1, 3]


@needs_compiler
def test_a_table_that_changed_after_its_plan_is_an_error():
    inputs = build(Case("decodes", ((1, 20), (1, 9))))
    for change in (
        lambda batch: batch.block_table.fill_(10**6),
        lambda batch: batch.seq_lens.fill_(10**6),
        lambda batch: batch.seq_lens.fill_(-5),
        lambda batch: batch.cu_seqlens_q.sub_(1),
        lambda batch: batch.cu_seqlens_q.add_(1),
    ):
        inputs = build(Case("decodes", ((1, 20), (1, 9))))
        plan = chunked_prefill.plan(inputs.batch, block_size=inputs.key_cache.shape[1])
        change(inputs.batch)
        with fastattn.use_kernel("native"), pytest.raises(ValueError, match="plan: expected lengths and a block table"):
            chunked_prefill.attention(*inputs.tensors[:3], plan)


@needs_compiler
def test_scores_of_minus_infinity_alone_are_nan_as_in_the_reference():
    key = torch.full((1, 2, 1, 8), -torch.inf)
    batch = make_batch([1], [2], [[0]])
    for options in (AttentionOptions(), AttentionOptions(softmax_scale=0.5)):
        answers = []
        for twin in (refattn.chunked_prefill, chunked_prefill):
            plan = twin.plan(batch, block_size=2)
            answers.append(
                twin.attention(torch.ones(1, 1, 8), key, torch.ones(1, 2, 1, 8), plan, options, return_lse=True)
            )
        (expected, expected_lse), (out, lse) = answers
        assert expected.isnan().all() and out.isnan().all()
        assert torch.equal(lse, expected_lse)


# --- without it ---


@pytest.fixture
def found_nothing(monkeypatch, tmp_path, forget_choices):
    """Look for a compiler and a cache again, with what a test leaves of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.library.cache_clear()
    yield
    compiler.library.cache_clear()
    forget_choices()


def test_without_a_compiler_another_kernel_computes_and_this_one_says_why(monkeypatch, found_nothing):
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    inputs = build(DECODES)
    out = plan_and_attend(chunked_prefill, *inputs.tensors)
    with fastattn.use_kernel("cpu"):
        assert torch.equal(out, plan_and_attend(chunked_prefill, *inputs.tensors))
    with (
        fastattn.use_kernel("native"),
        pytest.raises(NotImplementedError, match=r"native: found no C compiler \(cc, gcc, clang\)"),
    ):
        plan_and_attend(chunked_prefill, *inputs.tensors)


def test_a_compiler_that_fails_is_a_reason(monkeypatch, found_nothing):
    def fails(command, **options):
        if "--version" in command:
            return mock.Mock(stdout="a compiler")
        raise subprocess.CalledProcessError(1, command, stderr="attention.c:1: no such luck\nmore")

    monkeypatch.setattr(compiler.shutil, "which", lambda _: "/usr/bin/cc")
    monkeypatch.setattr(compiler.subprocess, "run", fails)
    assert compiler.library() == "cc failed: attention.c:1: no such luck"


def test_a_cache_that_cannot_be_written_is_a_reason(monkeypatch, found_nothing, tmp_path):
    (tmp_path / "fastattn").write_text("a file where the folder would be")
    monkeypatch.setattr(compiler.shutil, "which", lambda _: "/usr/bin/cc")
    monkeypatch.setattr(compiler, "_run", lambda *_: "")
    assert compiler.library().startswith(f"cannot write to {tmp_path / 'fastattn'}: ")


@needs_compiler
def test_it_is_compiled_once(monkeypatch, found_nothing, tmp_path):
    source = tmp_path / "nothing.c"
    source.touch()
    monkeypatch.setattr(compiler, "SOURCE", source)
    assert not isinstance(compiler.library(), str)
    (made,) = (tmp_path / "fastattn").iterdir()
    compiler.library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", mock.Mock(side_effect=AssertionError("compiled again")))
    assert not isinstance(compiler.library(), str)
    assert [made] == list((tmp_path / "fastattn").iterdir())


def test_its_reasons(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: mock.sentinel.library)
    usual = order.Problem(
        operation="attend",
        device=torch.device("cpu"),
        dtype=torch.float32,
        keys="pages",
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        value_head_size=64,
        block_size=16,
        max_query_len=1,
        max_seq_len=100,
        num_seqs=3,
        window=(-1, 0),
        num_tokens=3,
    )
    reasons = {
        "computes on the CPU": dict(device=torch.device("cuda")),
        "computes in float32": dict(dtype=torch.float64),
        "at most 32 query rows": dict(max_query_len=9),
        "at most 16 query rows": dict(max_query_len=5, dtype=torch.bfloat16),
        "at no other positions|from no other positions": dict(positions=True),
        "no interval of keys": dict(intervals=True),
        "depends on the batch": dict(batch_invariant=True),
        "does not compute attention to rows": dict(keys="rows"),
        "does not compute attention to packed latents": dict(keys="packed"),
        "does not compute attention to pages under drafted trees": dict(tree=True),
        "does not compute attention to pages in several levels": dict(levels=2),
    }
    assert order.unsupported_reason("native", usual) is None
    for reason, change in reasons.items():
        assert re.search(reason, order.unsupported_reason("native", usual._replace(**change)))
