"""The choice of a kernel, what each refuses, and the adapters of those that only a GPU has, over doubles of them."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from unittest import mock

import pytest
import torch
from batches import Case, build
from einops import einsum, repeat
from kernels_present import PRESENT, Kernel, has_to_compute
from test_chunked_prefill import per_head
from tolerance import assert_matches_reference, assert_twins_agree

import fastattn
import fastattn.chunked_prefill
import fastattn.differential
import refattn.chunked_prefill
import refattn.dense
import refattn.differential
from fastattn import kernels
from fastattn.kernels import Options, Problem, cpu, fa2, fa4, torch_flash, triton

ON_GPU = Problem(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    value_head_size=64,
    block_size=None,
    max_query_len=100,
    max_seq_len=200,
    num_seqs=2,
)


@pytest.fixture
def hopper(monkeypatch):
    """Let there be a Hopper with all packages, for what only asks."""
    for module in (triton, fa4, fa2, torch_flash):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
        monkeypatch.setattr(module, "cannot_import", lambda name, package: None, raising=False)
    monkeypatch.setattr(triton, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(fa2, "_refusal", lambda *asked: None)


# --- the choice ---


def of_kernels(monkeypatch, **described):
    """Let these be the kernels: each of a reason or None, whether it suits, and functions besides `paged`."""
    modules = {}
    for name, (reason, suits, *functions) in described.items():
        modules[name] = ModuleType(f"kernels.{name}")
        answers = dict(supports=reason, suits=suits)
        vars(modules[name]).update({key: lambda problem, answer=answer: answer for key, answer in answers.items()})
        vars(modules[name]).update(dict.fromkeys(functions))
    monkeypatch.setattr(kernels, "NAMES", tuple(described))
    monkeypatch.setattr(kernels, "_load", modules.__getitem__)


def test_a_kernel_is_asked_for_inside_its_block_only(monkeypatch):
    of_kernels(monkeypatch, a=(None, True), b=(None, True))

    def asked():
        return kernels.choose(ON_GPU).__name__

    assert asked() == "kernels.a"
    with fastattn.use_kernel("b"):
        assert asked() == "kernels.b"
        with fastattn.use_kernel("a"):
            assert asked() == "kernels.a"
        assert asked() == "kernels.b"
        with pytest.raises(KeyError), fastattn.use_kernel("a"):
            raise KeyError
        assert asked() == "kernels.b"
        with pytest.raises(ValueError, match="name: expected one of a, b, got 'c'"), fastattn.use_kernel("c"):
            pass
        assert asked() == "kernels.b"
    assert asked() == "kernels.a"


@pytest.mark.parametrize(
    ("described", "function", "chosen"),
    [
        (dict(a=("no", True), b=(None, True), c=(None, True)), None, "b"),
        (dict(a=(None, False), b=("no", True), c=(None, True)), None, "c"),
        (dict(a=("no", True), b=(None, False), c=(None, False)), None, "b"),
        (dict(a=(None, True), b=(None, True, "fused")), "fused", "b"),
        (dict(a=(None, True), b=(None, False, "fused")), "fused", "b"),
        (dict(a=(None, True), b=("no", True, "fused")), "fused", "a"),
        (dict(a=(None, False), b=(None, True), c=("no", True, "fused")), "fused", "b"),
        (dict(a=(None, False), b=(None, False)), "fused", "a"),
    ],
    ids=[
        *("first-that-suits", "suits-goes-first", "last-resort", "function-goes-first", "function-that-does-not-suit"),
        *("function-refused", "then-one-that-suits", "last-resort-without-the-function"),
    ],
)
def test_which_kernel_is_chosen(described, function, chosen, monkeypatch):
    of_kernels(monkeypatch, **described)
    assert kernels.choose(ON_GPU, function=function).__name__ == f"kernels.{chosen}"


def test_nobody_can(monkeypatch):
    of_kernels(monkeypatch, a=("has no time", True), b=("has no mind", True))
    with pytest.raises(NotImplementedError, match="no kernel computes this: a: has no time; b: has no mind"):
        kernels.choose(ON_GPU)
    assert kernels.explain(ON_GPU).splitlines()[:2] == ["a: has no time", "b: has no mind"]
    with fastattn.use_kernel("b"), pytest.raises(NotImplementedError, match="this: b: has no mind$"):
        kernels.choose(ON_GPU)


def in_pairs(lens, device, dtype=torch.float32):
    """Lay out queries and a cache of two halves."""
    case = Case("pairs", lens, heads=(8, 4), head_size=24, padding_rows=2)
    inputs = build(case, device=device, dtype=dtype)
    halves = [torch.stack([x[:, :, half::2] for x in (inputs.key_cache, inputs.value_cache)]) for half in (0, 1)]
    return case, (inputs.query, torch.stack(halves), inputs.batch)


@pytest.mark.parametrize(
    "given", [dict(), dict(softcap=3.0, window_size=(9, 0), alibi_slopes=True, sinks=True)], ids=len
)
def test_differential_by_a_kernel_that_has_only_attention(given, monkeypatch):
    """By four calls: each half of the heads with its own slopes and sinks, over the values of both halves."""
    case, arguments = in_pairs(((5, 30), (1, 40), (3, 2)), "cpu")
    only_attention = ModuleType("only_attention")
    vars(only_attention).update({name: getattr(cpu, name) for name in ("supports", "suits", "dense", "paged")})
    monkeypatch.setattr(kernels, "_load", lambda name: only_attention)
    options = dict(lambda_full=torch.tensor(0.35), lambda_init=0.2, norm_weight=torch.linspace(0.5, 2.0, 48))
    assert_twins_agree("differential", *arguments, **options, **per_head(given, case, "cpu"))


# --- the differential kernel of ours ---


@pytest.mark.parametrize("splits", [1, 3, 20])
@pytest.mark.parametrize("given", ["sinks", "window-and-slopes"])
def test_a_split_differential_of_an_odd_head_size(splits, given, device, monkeypatch):
    """Parts of more splits than are merged at a time, some without keys, and columns that no value has."""
    from fastattn.kernels import triton_differential

    tuning = triton_differential.Tuning(16, 16, 4, 2, splits, splits)
    monkeypatch.setattr(triton_differential, "tune", lambda *asked: tuning)
    case, (query, cache, batch) = in_pairs(((3, 70), (1, 331), (0, 5), (3, 2)), device)
    arguments = query, cache, with_strided_table(batch)
    options = dict(sinks=True) if given == "sinks" else dict(causal=False, window_size=(40, 3), alibi_slopes=True)
    learned = dict(lambda_full=torch.tensor(0.35, device=device), lambda_init=0.2)
    weight = torch.linspace(0.5, 2.0, 96, device=device)[::2]  # with a stride
    with fastattn.use_kernel("triton"):
        out, lse = fastattn.differential.attention(
            *arguments, **learned, norm_weight=weight, **per_head(options, case, device), return_lse=True
        )
    reference = refattn.differential.attention
    assert_matches_reference(
        out, lse, reference, *arguments, **learned, norm_weight=weight, **per_head(options, case, device)
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_differential_reads_nothing_that_nobody_may_see(splits, device, monkeypatch):
    from fastattn.kernels import triton_differential

    monkeypatch.setattr(
        triton_differential, "tune", lambda *asked: triton_differential.Tuning(16, 16, 4, 2, splits, splits)
    )
    _, (query, cache, batch) = in_pairs(((2, 70), (1, 41)), device)
    subtraction = kernels.Subtraction(torch.tensor(0.35, device=device), None, 1e-5, 0.8)
    answers = []
    for what in (0.0, torch.nan):
        pools = cache.nan_to_num(what)
        table = batch.block_table.clone()
        for blocks, first, end in zip(table, (60, 32), (70, 41), strict=True):
            for j in (*range(first), *range(end, -(-end // 16) * 16)):
                pools[:, :, blocks[j // 16], j % 16] = what
            blocks[: first // 16] = -1
        hidden = replace(batch, block_table=table)
        with fastattn.use_kernel("triton"):
            answers.append(kernels.differential(query, pools, hidden, Options(window_size=(8, 0)), subtraction))
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)
    assert torch.isfinite(answers[0][0]).all()


def test_differential_at_any_positions(device):
    """One position further, and a window that shows one key more to the left and one less to the right."""
    _, (query, cache, batch) = in_pairs(((4, 70), (40, 41)), device)
    subtraction = kernels.Subtraction(torch.tensor(0.35, device=device), None, 1e-5, 0.8)
    positions = torch.tensor([*range(66, 70), *range(1, 41), 0, 0], dtype=torch.int32, device=device)
    slopes = torch.linspace(0.1, 0.8, 8, device=device)
    there = Options(causal=False, window_size=(9, 2), alibi_slopes=slopes)
    with fastattn.use_kernel("triton"):
        expected = kernels.differential(query, cache, batch, there, subtraction)
        given = kernels.differential(query, cache, batch, replace(there, positions=positions), subtraction)
        plain = replace(there, alibi_slopes=None)
        elsewhere = replace(plain, positions=positions + 1, window_size=(10, 1))
        moved = kernels.differential(query, cache, batch, elsewhere, subtraction)
        unmoved = kernels.differential(query, cache, batch, plain, subtraction)
    for one, other in ((expected, given), (unmoved, moved)):
        torch.testing.assert_close(one, other)


# --- what they refuse ---


ASKED = {
    "plain": {},
    "not-causal": dict(causal=False),
    "window": dict(window_size=(9, 0)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "softcap": dict(softcap=5.0),
    "alibi": dict(alibi_slopes=torch.ones(4)),
    "alibi-both-ways": dict(causal=False, alibi_slopes=torch.ones(4)),
    "sinks": dict(sinks=torch.ones(4)),
    "invariant": dict(batch_invariant=True),
    "positions": dict(positions=torch.zeros(200, dtype=torch.int32)),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["triton", "fa4", "fa2", "torch_flash"])
def test_each_kernel_refuses_nothing_that_it_has_to_compute(name):
    module = kernels._load(name)
    computed = 0
    for options in (Options(**asked) for asked in ASKED.values()):
        for size, value_size in ((64, 64), (96, 96), (128, 128), (256, 256), (96, 64), (40, 40)):
            for block_size, query_len in ((None, 100), (None, 1), (16, 100), (16, 1), (256, 1), (256, 9)):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    problem = replace(
                        ON_GPU,
                        dtype=dtype,
                        head_size=size,
                        value_head_size=value_size,
                        block_size=block_size,
                        max_query_len=query_len,
                        options=options,
                    )
                    has_to = has_to_compute(name, problem)
                    computed += has_to
                    reason = module.supports(problem)
                    assert not has_to or reason is None, f"{name} refuses {problem}: {reason}"
                    assert reason is None or len(reason) > 20
    assert computed > 100, "it has to compute hardly anything"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("other", [fa4, fa2, torch_flash], ids=lambda module: module.__name__.rpartition(".")[2])
def test_flash_attention_refuses_what_it_would_answer_wrongly(other):
    assert other.supports(ON_GPU) is None
    assert "positions" in other.supports(replace(ON_GPU, options=Options(positions=torch.zeros(3, dtype=torch.int32))))
    assert "side by side" in other.supports(replace(ON_GPU, aligned=False))
    assert "float32" in other.supports(replace(ON_GPU, dtype=torch.float32))
    assert "cpu" in other.supports(replace(ON_GPU, device=torch.device("cpu")))


@pytest.mark.parametrize(
    ("aligned", "make"),
    [
        (True, lambda x: x),
        (True, lambda x: x[1:, 1:]),
        (True, lambda x: x.transpose(0, 1)),
        (True, lambda x: x[..., 8:]),
        (True, lambda x: x[:1].expand(3, -1, -1)),
        (False, lambda x: x[..., 4:]),
        (False, lambda x: x[..., ::2]),
        (False, lambda x: x.transpose(1, 2)),
        (False, lambda x: torch.zeros(3, 4, 36, dtype=torch.bfloat16)[..., :32]),
    ],
    ids=[
        *("whole", "later-rows", "heads-first", "16-bytes-further", "expanded", "8-bytes-further", "every-second"),
        *("heads-inside", "rows-of-72-bytes"),
    ],
)
def test_heads_that_can_be_loaded_16_bytes_at_a_time(aligned, make):
    assert kernels._is_aligned(make(torch.zeros(3, 4, 32, dtype=torch.bfloat16))) == aligned


def test_a_refusal_of_what_a_kernel_has_to_compute_fails(monkeypatch):
    inputs = build(Case("c", ((2, 6),)))

    def ask(**options):
        with fastattn.use_kernel("cpu"):
            fastattn.chunked_prefill.attention(*inputs.tensors, **options)

    kernel = Kernel("cpu", (torch.float32,))
    kernel.check(ask)
    monkeypatch.setattr(cpu, "supports", lambda problem: "it would rather not compute today")
    with pytest.raises(AssertionError, match="cpu has to compute this: .*rather not"):
        kernel.check(ask)
    monkeypatch.setattr("kernels_present.has_to_compute", lambda name, problem: False)
    kernel.check(ask)
    monkeypatch.setattr(cpu, "supports", lambda problem: "no")
    with pytest.raises(AssertionError, match="without a reason"):
        kernel.check(ask)
    with pytest.raises(AssertionError, match="no kernel has been asked"):
        kernel.check(mock.Mock(side_effect=NotImplementedError("cpu: a path may not refuse what kernels compute")))
    assert {kernel.name for kernel in PRESENT} & {"cpu", "triton"}


# --- adapters, with doubles of what they call ---

TILE = 64  # keys that a double loads at a time


@dataclass
class Double:
    """FlashAttention: whole tiles of keys, a weight of 0 for those that are hidden, and its own word for nothing.

    Attributes:
        nothing: its log-sum-exp where a query sees nothing, or NaN.
        zeros_past_end: it loads zeros past the end of a sequence.
    """

    nothing: float
    zeros_past_end: bool

    def attend(self, query, keys, values, seq_len, window, scale, softcap, slopes=None, *, drops_rows=False):
        """Attend from the rows of one sequence to `seq_len` of its keys, which come in whole tiles."""
        assert scale > 0, "it masks before it scales"
        if self.zeros_past_end:
            keys, values = keys.clone(), values.clone()
            keys[seq_len:], values[seq_len:] = 0.0, 0.0
        group = query.shape[1] // keys.shape[1]
        k, v = (repeat(x.float(), "s hk d -> s (hk g) d", g=group) for x in (keys, values))
        scores = einsum(query.float(), k, "t h d, s h d -> h t s") * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(seq_len - len(query), seq_len)[:, None]
        j = torch.arange(len(keys))[None, :]
        if slopes is not None:
            assert slopes.dtype == torch.float32
            bias = slopes[:, None, None] * (j if drops_rows else -(i - j).abs())
            scores = scores + bias
        left, right = window
        hidden = j >= seq_len
        hidden = hidden | ((left >= 0) & (j < i - left)) | ((right >= 0) & (j > i + right))
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
        out = einsum(weights, v, "h t s, s h dv -> t h dv").to(query.dtype)
        out[lse.T.isneginf()] = torch.nan
        return out, torch.where(torch.isfinite(lse), lse, self.nothing)

    def over(self, query, starts, tiles_of, lengths, window, *how, **besides):
        """Attend in each sequence; rows of none hold anything."""
        out = torch.full((*query.shape[:2], tiles_of(0)[1].shape[-1]), torch.nan, dtype=query.dtype)
        lse = torch.full((query.shape[1], len(query)), torch.nan)
        for i, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if first < last:
                answer = self.attend(query[first:last], *tiles_of(i), lengths[i], window, *how, **besides)
                out[first:last], lse[:, first:last] = answer
        return out, lse


def tiles_of_rows(key, value, ends):
    """Tiles of rows that lie one after the other: past a sequence's end are the rows of the next, or nothing."""

    def tiles(i):
        first, length = ends[i], -(-(ends[i + 1] - ends[i]) // TILE) * TILE
        rows = [x[first : first + length] for x in (key, value)]
        return [torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])]) for x in rows]

    return tiles


def tiles_of_pages(key, value, table, lengths):
    """Whole pages; the table leads nowhere past them."""
    assert table.stride(-1) == 1

    def tiles(i):
        blocks = table[i, : -(-lengths[i] // key.shape[1])].long()
        return [x[blocks].flatten(0, 1) for x in (key, value)]

    return tiles


def install_fa4(monkeypatch):
    double = Double(-torch.inf, zeros_past_end=False)

    def forward(
        q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size_left,
        window_size_right, softcap, return_lse, cu_seqlens_k=None, seqused_k=None, page_table=None,
    ):  # fmt: skip
        assert return_lse
        assert causal == (window_size_right == 0)
        window = [-1 if side is None else side for side in (window_size_left, window_size_right)]
        lengths = (cu_seqlens_k.diff() if page_table is None else seqused_k).tolist()
        tiles = (
            tiles_of_rows(k, v, cu_seqlens_k.tolist())
            if page_table is None
            else tiles_of_pages(k, v, page_table, lengths)
        )
        out, lse = double.over(q, cu_seqlens_q.tolist(), tiles, lengths, window, softmax_scale, softcap)
        return out, lse, None, None

    package, cute, interface = (ModuleType(f"flash_attn{name}") for name in ("", ".cute", ".cute.interface"))
    package.__path__ = cute.__path__ = []
    interface._flash_attn_fwd = forward
    for module in (package, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fa4


def flash2(query, key, value, starts, ends, longest, scale, causal, window, softcap=0.0, slopes=None):
    """FlashAttention-2 over rows, with what it makes of a window and of ALiBi."""
    double = Double(torch.inf, zeros_past_end=True)
    left, right = (-1 if side >= longest else side for side in window)
    right = 0 if causal else right
    is_causal = left < 0 and right == 0
    if left < 0 <= right:
        left = longest
    if left >= 0 > right:
        right = longest
    starts, ends = starts.tolist(), ends.tolist()
    lengths = [last - first for first, last in zip(ends[:-1], ends[1:], strict=True)]
    tiles = tiles_of_rows(key, value, ends)
    return double.over(query, starts, tiles, lengths, (left, right), scale, softcap, slopes, drops_rows=is_causal)


def install_fa2(monkeypatch):
    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap,
        alibi_slopes, return_attn_probs,
    ):  # fmt: skip
        assert return_attn_probs
        assert max_seqlen_q > 1, "it would take row i for sequence i"
        out, lse = flash2(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, softmax_scale, causal, window_size, softcap, alibi_slopes
        )
        return out, lse, None

    def with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, window_size, softcap, alibi_slopes,
        num_splits, return_softmax_lse,
    ):  # fmt: skip
        assert return_softmax_lse
        assert q.shape[:2] == (len(cache_seqlens), 1)
        double, lengths = Double(torch.inf, zeros_past_end=True), cache_seqlens.tolist()
        tiles = tiles_of_pages(k_cache, v_cache, block_table, lengths)
        starts = list(range(len(q) + 1))
        how = (window_size, softmax_scale, softcap, alibi_slopes)
        out, lse = double.over(q.flatten(0, 1), starts, tiles, lengths, *how)
        return out[:, None], lse.T[..., None]

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.flash_attn_with_kvcache = varlen, with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return fa2


def install_torch_flash(monkeypatch):
    def forward(
        q, k, v, starts, ends, max_q, max_k, dropout, causal, probs, *, scale, window_size_left, window_size_right
    ):
        assert max_q > 1
        assert not dropout
        window = window_size_left, window_size_right
        return *flash2(q, k, v, starts, ends, max_k, scale, causal, window), None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    return torch_flash


CALLED = {
    "plain": {},
    "no-scale": dict(softmax_scale=0.0),
    "negative-scale": dict(softmax_scale=-0.3),
    "not-causal": dict(causal=False),
    "window": dict(window_size=(9, 0)),
    "wide-window": dict(window_size=(5000, 0)),
    "right-window": dict(causal=False, window_size=(-1, 3)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "alibi-both-ways": dict(causal=False, alibi_slopes=True),
    "alibi-in-a-window": dict(causal=False, window_size=(-1, 3), alibi_slopes=True),
    "sinks": dict(sinks=True),
}
ADAPTERS = {"fa4": install_fa4, "fa2": install_fa2, "torch_flash": install_torch_flash}
RAGGED = Case("ragged", ((4, 6), (1, 70), (10, 17), (0, 9), (5, 2), (3, 0), (33, 40)), heads=(4, 2), padding_rows=3)


def with_strided_table(batch):
    """Give the table as every second column of another."""
    table = torch.stack([batch.block_table, torch.full_like(batch.block_table, -1)], dim=2)[:, :, 0]
    assert table.stride(1) == 2
    return replace(batch, block_table=table)


def poison(inputs):
    """Put NaN and inf into what no query sees: the padding rows, and the slots past each sequence's end."""
    inputs.query[len(inputs.query) - 3 :] = torch.nan
    for blocks, keys in zip(inputs.batch.block_table, inputs.keys, strict=True):
        for place in range(len(keys), -(-len(keys) // inputs.key_cache.shape[1]) * inputs.key_cache.shape[1]):
            block = blocks[place // inputs.key_cache.shape[1]]
            inputs.key_cache[block, place % inputs.key_cache.shape[1]] = torch.inf
            inputs.value_cache[block, place % inputs.key_cache.shape[1]] = torch.nan


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize(
    ("name", "over", "options"),
    [
        (name, over, options)
        for name, over in (
            ("fa4", "rows"),
            ("fa4", "pages"),
            ("fa2", "rows"),
            ("fa2", "pages"),
            ("torch_flash", "rows"),
        )
        for options in CALLED
        if not ("alibi" in options and name != "fa2") and not (options == "softcap" and name == "torch_flash")
    ],
)
def test_what_an_adapter_asks_and_what_it_answers(name, over, options, monkeypatch):
    kernel = ADAPTERS[name](monkeypatch)
    case = RAGGED
    if over == "pages" and name == "fa2":
        lens = tuple((min(q, 1), s) for q, s in RAGGED.lens)
        case = replace(RAGGED, lens=lens, block_size=256)
    inputs = build(case, dtype=torch.float16)
    poison(inputs)
    if options == "plain":
        inputs = replace(inputs, batch=with_strided_table(inputs.batch))
    options = per_head(CALLED[options], case, "cpu")
    if over == "rows":
        out, lse = kernel.dense(*inputs.rows, Options(**options))
        assert_matches_reference(out, lse, refattn.dense.attention, *inputs.rows, **options)
    else:
        out, lse = kernel.paged(*inputs.tensors, Options(**options))
        assert_matches_reference(out, lse, refattn.chunked_prefill.attention, *inputs.tensors, **options)


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize("sink", [89.0, 200.0, 1e4, -1e4])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_sink_far_from_the_scores(name, sink, monkeypatch):
    kernel = ADAPTERS[name](monkeypatch)
    inputs = build(RAGGED, dtype=torch.float16)
    sinks = torch.tensor([sink, 0.0, sink, -sink])
    out, lse = kernel.dense(*inputs.rows, Options(sinks=sinks))
    assert_matches_reference(out, lse, refattn.dense.attention, *inputs.rows, sinks=sinks)


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_of_one_sequence_is_its_own(name, where, monkeypatch):
    """The rows of the next sequence are in the same tile, and no row of the one with NaN answers a number."""
    kernel = ADAPTERS[name](monkeypatch)
    case = Case("c", ((20, 20), (3, 3), (30, 41)), heads=(2, 1))
    query, key, value, batch = build(case, dtype=torch.float16).rows
    expected, expected_lse = kernel.dense(query, key, value, batch, Options(causal=False))
    (key if where == "key" else value)[20] = torch.nan
    out, lse = kernel.dense(query, key, value, batch, Options(causal=False))
    others = torch.tensor([not 20 <= row < 23 for row in range(53)])
    torch.testing.assert_close(out[others], expected[others], rtol=2e-3, atol=1e-3)
    assert torch.equal(lse[others], expected_lse[others])
    assert out[20:23].isnan().all()
    assert lse[20:23].isnan().all() == (where == "key")


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
def test_pages_that_were_copied_need_no_repair(monkeypatch):
    """The copy has zeros past the end of a sequence."""
    from fastattn.kernels import triton_attention

    install_fa4(monkeypatch)
    monkeypatch.setattr(fa4, "QUERY_ROWS", 0)
    inputs = build(RAGGED, dtype=torch.float16)
    poison(inputs)
    with mock.patch.object(triton_attention, "repair") as repair:
        out, lse = fa4.paged(*inputs.tensors, Options())
    assert not repair.called
    assert_matches_reference(out, lse, refattn.chunked_prefill.attention, *inputs.tensors)
