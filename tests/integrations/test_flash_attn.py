"""FlashAttention's functions over both twins, against a formula written out, and under the name of the package."""

import inspect
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest
import torch
from packaging.version import Version

from fastattn.kernels.device import cannot_import
from twinattn.integrations import bert_padding, flash_attn

# As published with flash-attn 2.8.
COMMON = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
PACKED = f"{COMMON}, deterministic=False, return_attn_probs=False"
SIGNATURES = {
    "flash_attn_qkvpacked_func": f"qkv, {PACKED}",
    "flash_attn_kvpacked_func": f"q, kv, {PACKED}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {PACKED}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {PACKED}",
    "flash_attn_func": f"q, k, v, {COMMON}, deterministic=False, return_attn_probs=False",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, deterministic=False, return_attn_probs=False, "
    "block_table=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


@pytest.fixture(params=["fastattn", "refattn"], autouse=True)
def twin(request, monkeypatch):
    monkeypatch.setattr(flash_attn, "_twin", flash_attn.TWINS[request.param])
    return request.param


def draw(*shape, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def by_hand(q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, leftpad=0):
    """Compute one sequence in float64, with the mask as FlashAttention's docstring has it."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    j = torch.arange(len(k), device=q.device)
    i = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    sees = (j >= leftpad) & ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    scores = scores.masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~sees, 0.0)
    return torch.einsum("hts,shd->thd", weights, v), lse


def assert_close_pair(out, lse, expected):
    for one, other in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6)


@dataclass
class Cached:
    """A call over a cache."""

    queries: int
    new: int
    how: dict
    rows: tuple = (0, 1, 2)
    leftpad: tuple = (0, 0, 0)
    pages: bool = False


CACHED = {
    "decode": Cached(1, 1, dict(causal=True)),
    "rows-of-the-cache": Cached(4, 4, dict(causal=True, window_size=(6, 0), softcap=3.0, slopes=True), (4, 0, 2)),
    "more-queries-than-new": Cached(3, 2, dict(softmax_scale=0.3), (4, 0, 2), (1, 7, 0)),
    "left-padding": Cached(3, 3, dict(causal=True, window_size=(5, -1), slopes=True), leftpad=(1, 20, 0)),
    "window-on-both-sides": Cached(2, 0, dict(window_size=(4, 2), softmax_scale=-0.2)),
    "pages": Cached(5, 5, dict(causal=True, window_size=(20, 0)), pages=True),
}


def paged(rows, table, p):
    """Lay rows `[b, s, ...]` out in pages of `p`, at the places of a table, with NaN in all others."""
    pool = torch.full((int(table.max()) + 2, p, *rows.shape[2:]), torch.nan, device=rows.device)
    for row, blocks in zip(rows, table.tolist(), strict=True):
        for column, block in enumerate(block for block in blocks if block >= 0):
            part = row[column * p : (column + 1) * p]
            pool[block, : len(part)] = part
    return pool


@pytest.mark.parametrize("name", CACHED)
def test_over_a_cache(name, device, shapes_unchecked):
    case, lens, p = CACHED[name], [5, 20, 30], 8
    q, k, v = (draw(3, n, h, 16, device=device) for n, h in ((case.queries, 6), (case.new, 2), (case.new, 2)))
    held = [draw(5, 37, 2, 16, device=device) + x for x in (0, 1)]
    how = dict(case.how)
    slopes = torch.rand(6, device=device) if how.pop("slopes", False) else None
    table = torch.tensor([[5, 1, 0, 7, 8], [3, 9, 2, 6, 12], [11, 4, 10, 13, 14]], dtype=torch.int32, device=device)
    caches = [paged(x[:3], table, p) for x in held] if case.pages else [x.clone() for x in held]
    before = [x.clone() for x in caches]
    where = dict(block_table=table) if case.pages else {}
    if case.rows != (0, 1, 2):
        where["cache_batch_idx"] = torch.tensor(case.rows, dtype=torch.int32, device=device)
    if any(case.leftpad):
        where["cache_leftpad"] = torch.tensor(case.leftpad, dtype=torch.int32, device=device)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        *((k, v) if case.new else (None, None)),
        cache_seqlens=torch.tensor(lens, dtype=torch.int32, device=device),
        **where,
        **how,
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    for i, (row, length) in enumerate(zip(case.rows, lens, strict=True)):
        keys, values = (torch.cat([x[row, :length], new[i]]) for x, new in zip(held, (k, v), strict=True))
        window, scale = how.get("window_size", (-1, -1)), how.get("softmax_scale")
        mask = (how.get("causal", False), window, scale, how.get("softcap", 0.0), slopes, case.leftpad[i])
        assert_close_pair(out[i], lse[i], by_hand(q[i], keys, values, *mask))
        for cache, old, x, new in zip(caches, before, held, (k, v), strict=True):
            if case.pages:
                written = paged(torch.cat([x[row, :length], new[i]])[None], table[i : i + 1], p)
                used = table[i, : -(-(length + case.new) // p)].long()
                assert torch.equal(
                    cache[used].flatten(0, 1)[: length + case.new], written[used].flatten(0, 1)[: length + case.new]
                )
            else:
                expected = old[row].clone()
                expected[length : length + case.new] = new[i]
                assert torch.equal(cache[row], expected)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_rotary_positions(causal, interleaved, shapes_unchecked):
    """A rotation is a product of complex numbers; without a mask all queries stand at the first new position."""
    lens, half, longest = torch.tensor([3, 7], dtype=torch.int32), 4, 12
    angles = torch.rand(longest, half) * 6
    q, k, v = draw(2, 3, 2, 10), draw(2, 3, 1, 10), draw(2, 3, 1, 10)
    caches = [draw(2, longest, 1, 10), draw(2, longest, 1, 10) + 1]
    old = [x.clone() for x in caches]

    def turn(x, position):
        head, rest = x[:, : 2 * half], x[:, 2 * half :]
        pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(half), angles[position])
        pairs = torch.view_as_real(turned)
        return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), rest], -1)

    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, angles.cos(), angles.sin(), lens, causal=causal, rotary_interleaved=interleaved
    )
    for i, length in enumerate(lens.tolist()):
        keys = torch.stack([turn(k[i, j], length + j) for j in range(3)])
        torch.testing.assert_close(caches[0][i, length : length + 3], keys, rtol=1e-5, atol=1e-6)
        queries = torch.stack([turn(q[i, j], length + (j if causal else 0)) for j in range(3)])
        rows = torch.cat([old[0][i, :length], keys]), torch.cat([old[1][i, :length], v[i]])
        torch.testing.assert_close(out[i].double(), by_hand(queries, *rows, causal)[0], rtol=1e-5, atol=1e-6)


RAGGED = ([3, 0, 4, 2], [5, 4, 2, 0])  # new tokens and all tokens: more queries than keys, and none, too


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_ragged(pages, device, shapes_unchecked):
    query_lens, seq_lens = RAGGED
    starts, ends = (torch.tensor([0, *x], device=device).cumsum(0, dtype=torch.int32) for x in (query_lens, seq_lens))
    q, k, v = (draw(n, h, 16, device=device) for n, h in ((9, 6), (11, 2), (11, 2)))
    table = torch.tensor([[5, 1], [3, -1], [2, -1], [-1, -1]], dtype=torch.int32, device=device)
    tensors, where = (k, v), {}
    if pages:
        rows = [torch.nn.utils.rnn.pad_sequence(x.split(seq_lens), batch_first=True) for x in (k, v)]
        tensors, where = [paged(x, table, 4) for x in rows], dict(block_table=table)
    how = dict(causal=True, window_size=(2, -1), softcap=4.0)
    lengths = (starts, ends, max(query_lens), max(seq_lens))
    out, lse, probabilities = flash_attn.flash_attn_varlen_func(
        q, *tensors, *lengths, **how, **where, return_attn_probs=True
    )
    assert lse.shape == (6, 9) and probabilities.numel() == 0
    for i in range(4):
        mine, keys = slice(*starts[i : i + 2].tolist()), slice(*ends[i : i + 2].tolist())
        assert_close_pair(out[mine], lse[:, mine], by_hand(q[mine], k[keys], v[keys], True, (2, -1), None, 4.0))
    assert (out[3:5] == 0).all() and (lse[:, 3:5] == -torch.inf).all(), "queries before the first key see nothing"
    alone = flash_attn.flash_attn_varlen_func(q, *tensors, *lengths, **how, **where)
    assert torch.equal(alone, out)


def test_sequences_of_one_length():
    q, k, v = draw(2, 3, 4, 16), draw(2, 5, 2, 16), draw(2, 5, 2, 16)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for i in range(2):
        assert_close_pair(out[i], lse[i], by_hand(q[i], k[i], v[i], True))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True), out)


def test_tensors_in_one_are_those_beside_each_other():
    """As the last dimensions but two of one projection, in rows of one length and of several."""
    qkv = draw(2, 5, 3, 4, 16)
    how = dict(causal=True, window_size=(2, 0), softcap=3.0, softmax_scale=0.2, return_attn_probs=True)
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), **how)
    ends, rows = torch.tensor([0, 5, 10], dtype=torch.int32), qkv.flatten(0, 1)
    expected_rows = flash_attn.flash_attn_varlen_func(*rows.unbind(1), ends, ends, 5, 5, **how)
    for one, other in (
        (flash_attn.flash_attn_qkvpacked_func(qkv, **how), expected),
        (flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **how), expected),
        (flash_attn.flash_attn_varlen_qkvpacked_func(rows, ends, 5, **how), expected_rows),
        (flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], ends, ends, 5, 5, **how), expected_rows),
    ):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_the_whole_cache_and_an_int():
    q, caches = draw(2, 1, 4, 16), (draw(2, 9, 2, 16), draw(2, 9, 2, 16) + 1)
    whole = flash_attn.flash_attn_with_kvcache(q, *caches)
    assert torch.equal(whole, flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=9))
    torch.testing.assert_close(whole[1].double(), by_hand(q[1], caches[0][1], caches[1][1])[0], rtol=1e-5, atol=1e-6)


def test_one_split_is_an_answer_that_does_not_depend_on_the_batch(twin, monkeypatch):
    attention, seen = flash_attn._twin.interval.attention, []

    def record(query, key_cache, value_cache, plan, options, **others):
        seen.append(options.batch_invariant)
        return attention(query, key_cache, value_cache, plan, options, **others)

    monkeypatch.setattr(flash_attn._twin.interval, "attention", record)
    q, caches = draw(2, 1, 4, 16), (draw(2, 9, 2, 16), draw(2, 9, 2, 16) + 1)
    both, alone = (flash_attn.flash_attn_with_kvcache(q[i:], *(x[i:] for x in caches), num_splits=1) for i in (0, 1))
    assert torch.equal(both[1:], alone) and seen == [True, True]
    flash_attn.flash_attn_with_kvcache(q, *caches, num_splits=4)
    assert seen[2:] == [False]


def test_what_is_refused_is_named_and_nothing_is_written(shapes_unchecked):
    q, new, cache = draw(2, 1, 4, 16), draw(2, 1, 2, 16), draw(2, 9, 2, 16)
    before = cache.clone()

    def refused(error, message, *arguments, q=q, **options):
        with pytest.raises(error, match=message):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, *arguments, **options)
        assert torch.equal(cache, before)

    table = torch.zeros(2, 1, dtype=torch.int32)
    wide = torch.zeros(9, 9)
    refused(ValueError, "cache_seqlens: expected 0..8 tokens", new, new, cache_seqlens=9)
    refused(ValueError, "cache_seqlens: expected one beside", new, new)
    refused(ValueError, "v: expected one beside", new, cache_seqlens=1)
    refused(ValueError, "query: expected a number of heads", new, new, cache_seqlens=1, q=draw(2, 1, 3, 16))
    refused(ValueError, "rotary_cos: expected None without new keys", rotary_cos=wide)
    refused(ValueError, "rotary_cos: expected at least 9 pos", new, new, wide, wide, cache_seqlens=1)
    refused(ValueError, "rotary_sin: expected one beside", new, new, wide, cache_seqlens=1)
    refused(ValueError, "cache_batch_idx: expected None", cache_batch_idx=table[:, 0], block_table=table)
    refused(NotImplementedError, "cache_leftpad", cache_leftpad=table[:, 0], block_table=table)
    refused(NotImplementedError, "alibi_slopes: expected one per head", alibi_slopes=torch.ones(2, 4))
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.flash_attn_func(q, cache, cache, dropout_p=0.1)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected keys from row 0"):
        ends = torch.tensor([1, 3], dtype=torch.int32)
        flash_attn.flash_attn_varlen_func(draw(2, 4, 16), *(2 * [draw(3, 2, 16)]), ends - 1, ends, 2, 2)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("of more sequences", ((4, 3, 2, 16), (4, 3, 2, 16)), "k: expected float32 [b=2, sk, hk, d=16], got"),
        (
            "of the same tokens in others",
            ((3, 4, 2, 16), (3, 4, 2, 16)),
            "k: expected float32 [b=2, sk, hk, d=16], got",
        ),
        ("values of others", ((2, 6, 2, 16), (4, 3, 2, 16)), "v: expected float32 [b=2, sk=6, hk=2, dv], got"),
        ("of other heads", ((2, 3, 2, 8), (2, 3, 2, 16)), "k: expected float32 [b=2, sk, hk, d=16], got"),
        ("values of other heads", ((2, 3, 2, 16), (2, 3, 4, 16)), "v: expected float32 [b=2, sk=3, hk=2, dv], got"),
    ],
)
def test_keys_are_those_of_the_sequences_of_the_queries(name, shapes, message, shapes_unchecked):
    """Side by side in rows, those of other sequences would be as many."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        flash_attn.flash_attn_func(draw(2, 3, 4, 16), *(draw(*shape) for shape in shapes))


def legal_arguments(name):
    """Return the arguments of a call of each function, but for options whose truth is all that counts."""
    ends = torch.tensor([0, 3, 6], dtype=torch.int32)
    tokens = dict(q=draw(2, 3, 4, 16), k=draw(2, 3, 2, 16), v=draw(2, 3, 2, 16))
    how = dict(softmax_scale=0.2, causal=True, window_size=(2, 0), softcap=0.5, alibi_slopes=torch.rand(4))
    if name == "flash_attn_with_kvcache":
        caches = dict(k_cache=draw(2, 9, 2, 16), v_cache=draw(2, 9, 2, 16), cache_seqlens=ends[1:] - 3, num_splits=1)
        rotary = dict(rotary_cos=draw(9, 4), rotary_sin=draw(9, 4), cache_batch_idx=torch.tensor([1, 0]).int())
        return tokens | how | caches | rotary | dict(cache_leftpad=torch.tensor([0, 1]).int())
    if "varlen" in name:
        tokens = {name: x.flatten(0, 1) for name, x in tokens.items()}
        tokens |= dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=3, max_seqlen_k=3)
    return tokens | how | dict(dropout_p=0.0)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_an_argument_of_another_type_is_refused_by_its_name(name, twin, shapes_unchecked):
    function, legal = getattr(flash_attn, name), legal_arguments(name)
    if twin == "refattn":  # before any check has an error to name
        function(**legal)
    optional = {x.name for x in inspect.signature(function).parameters.values() if x.default is None}
    for argument, value in legal.items():
        for wrong in (None, object(), "nowhere", [], 0.5, torch.zeros(1, 1, dtype=torch.complex64)):
            if (wrong is None and argument in optional) or (wrong == 0.5 and argument in ("softmax_scale", "softcap")):
                continue
            error = NotImplementedError if argument == "dropout_p" and wrong == 0.5 else ValueError
            if argument == "alibi_slopes" and isinstance(wrong, torch.Tensor):
                error = NotImplementedError
            with pytest.raises(error, match=rf"^{argument}: "):
                function(**legal | {argument: wrong})
        if isinstance(value, torch.Tensor) and argument != "q":
            with pytest.raises(ValueError, match=rf"^{argument}: expected cpu"):
                function(**legal | {argument: value.to("meta")})


def test_gradients_are_those_of_the_reference_or_refused(twin):
    q, k, v = (draw(1, 3, 2, 8).requires_grad_() for _ in range(3))
    if twin == "fastattn":
        with pytest.raises(NotImplementedError, match="no backward"):
            flash_attn.flash_attn_func(q, k, v)
        return
    flash_attn.flash_attn_func(q, k, v, causal=True).sum().backward()
    ours = [x.grad.clone() for x in (q, k, v)]
    expected = torch.autograd.grad(by_hand(q[0], k[0], v[0], True)[0].sum(), (q, k, v))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_signatures_are_those_that_are_published():
    for name, published in SIGNATURES.items():
        ours = inspect.signature(getattr(flash_attn, name)).parameters.values()
        given = ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in ours)
        assert given == published, name


def test_the_package_is_not_hidden(twin, monkeypatch):
    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    with pytest.raises(RuntimeError, match="flash_attn: expected no module of that name, got one that is installed"):
        flash_attn.install(twin)
    assert sys.modules["flash_attn"] is package


def test_it_takes_the_name_of_the_package(twin):
    if cannot_import("flash_attn", "flash-attn") is None:
        return  # there it does not
    with pytest.raises(ValueError, match="twin: expected one of refattn, fastattn"):
        flash_attn.install("flash")
    with mock.patch.dict(sys.modules):
        flash_attn.install(twin)
        assert flash_attn._twin is flash_attn.TWINS[twin]
        from flash_attn import flash_attn_varlen_func
        from flash_attn.flash_attn_interface import flash_attn_func

        assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
        assert flash_attn_func is flash_attn.flash_attn_func
        flash_attn.install()
        assert flash_attn._twin is flash_attn.TWINS["fastattn"]
        assert sys.modules["flash_attn"].flash_attn_interface is flash_attn
        why = cannot_import("flash_attn", "flash-attn", "flash_attn_func")
        assert "twinattn.integrations.flash_attn has taken its name" in why, why  # else fa2 would call itself


def test_code_that_looks_for_the_package_finds_all_of_its_first_level(twin):
    if cannot_import("flash_attn", "flash-attn") is None:
        return  # there it is the package
    with mock.patch.dict(sys.modules):
        flash_attn.install(twin)
        import flash_attn as found
        from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input

        assert Version(found.__version__) >= Version("2.8") and found.__version__.endswith("twinattn")
        assert set(SIGNATURES) == set(flash_attn.FUNCTIONS) and all(hasattr(found, name) for name in SIGNATURES)
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
            assert find_spec(name) is not None
        for name in ("flash_attn.layers", "flash_attn.cute"):
            assert find_spec(name) is None
        assert not hasattr(found, "flash_attn_gpu")
        with pytest.raises(AttributeError, match=r"^flash_attn: expected one of .*, got 'flash_attn_gpu'; .* install"):
            _ = found.flash_attn_gpu
        for function in (index_first_axis, index_put_first_axis, pad_input, unpad_input):
            assert function is getattr(bert_padding, function.__name__)


def test_padding_is_left_out_and_put_back(shapes_unchecked):
    rows = draw(2, 4, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    tokens, indices, ends, longest, used = bert_padding.unpad_input(rows, mask, unused)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7] and torch.equal(tokens, rows.flatten(0, 1)[indices])
    assert (ends.tolist(), ends.dtype, longest, used.tolist()) == ([0, 3, 6], torch.int32, 3, [2, 3])
    padded = bert_padding.pad_input(tokens, indices, 2, 4)
    assert torch.equal(padded, rows * (mask + unused)[..., None])
    padded.sum().backward()
    assert torch.equal(rows.grad, (mask + unused)[..., None].expand(2, 4, 3).float())
    for message, call in (
        ("attention_mask: expected [b=2, s=4], got", lambda: bert_padding.unpad_input(rows, mask[:, :3])),
        ("hidden_states: expected [b, s, ...], got None", lambda: bert_padding.unpad_input(None, mask)),
        ("indices: expected int64 [t], got None", lambda: bert_padding.index_first_axis(rows, None)),
        ("indices: expected one for each of 6 rows", lambda: bert_padding.pad_input(tokens, indices[:5], 2, 4)),
        ("first_axis_dim: expected a number of rows", lambda: bert_padding.index_put_first_axis(tokens, indices, -1)),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()
