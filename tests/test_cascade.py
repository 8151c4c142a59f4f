"""Cascade attention: shared prefixes attended once, level by level."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from batches import Case, assert_same_masks, build, masks_by_hand, read_masks
from hypothesis import given
from hypothesis import strategies as st
from kernels_present import each_kernel
from tolerance import assert_matches_reference, assert_twins_agree
from torch.nn import functional

import fastattn.cascade
import fastattn.chunked_prefill
import refattn.cascade
import refattn.chunked_prefill
import refattn.metadata
from fastattn.kernels import cpu, triton_attention
from refattn.batch import Batch, Level, Prefix

each_twin = pytest.mark.parametrize("twin", [refattn.cascade, fastattn.cascade], ids=["ref", "fast"])

# Each with its prefixes: sequences first to last - 1 share their first `end` keys.
SHARED = {
    "one-prefix": (Case("c", ((1, 70), (1, 49), (1, 66), (1, 130)), heads=(8, 2)), [(0, 4, 48)]),
    "tree": (
        Case("c", ((1, 80), (1, 66), (1, 35), (1, 7), (1, 60), (1, 90)), heads=(6, 3)),
        [(0, 3, 32), (0, 2, 64), (4, 6, 48)],
    ),
    "three-levels": (
        Case("c", ((1, 70), (1, 65), (1, 52), (1, 40), (1, 17)), heads=(4, 1)),
        [(0, 5, 16), (0, 4, 32), (0, 2, 64)],
    ),
    "prefills-and-decodes": (
        Case("c", ((20, 90), (1, 65), (7, 71), (33, 33), (5, 64)), heads=(4, 4), padding_rows=3),
        [(0, 3, 64)],
    ),
    "ends-at-the-first-query": (Case("c", ((16, 48), (1, 33), (4, 36)), heads=(4, 2)), [(0, 3, 32)]),
    "silent-and-empty": (
        Case("c", ((0, 50), (1, 40), (0, 0), (0, 70), (2, 66), (5, 2)), heads=(4, 2), padding_rows=1),
        [(0, 2, 32), (3, 5, 64)],
    ),
    "odd-blocks": (Case("c", ((1, 80), (3, 60), (9, 58), (1, 49)), block_size=24), [(0, 4, 48)]),
    "heads-first": (Case("c", ((1, 40), (2, 50), (1, 33)), layout="HND", heads=(6, 2)), [(0, 3, 32)]),
    "narrow-values": (Case("c", ((1, 40), (2, 50)), head_size=96, value_head_size=64), [(0, 2, 32)]),
    "group-of-one": (Case("c", ((1, 40), (2, 50)), heads=(2, 2)), [(0, 1, 32), (1, 2, 48)]),
    "nobody-shares": (Case("c", ((1, 40), (2, 50)), heads=(2, 1)), []),
    "many-rows-short-prefix": (Case("c", tuple((3, 19 + i) for i in range(12)), heads=(4, 2)), [(0, 12, 16)]),
}
OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.3),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "sinks": dict(sinks=True),
    "window": dict(window_size=(40, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "everything": dict(softmax_scale=0.2, softcap=5.0, alibi_slopes=True, sinks=True),
    "everything-in-a-window": dict(softmax_scale=0.2, softcap=5.0, alibi_slopes=True, sinks=True, window_size=(50, 3)),
}
WINDOWS = [(0, 0), (5, 0), (40, 0), (47, -1), (60, 3), (-1, 0)]
each_sharing = pytest.mark.parametrize("sharing", SHARED.values(), ids=SHARED)


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch whose sequences share blocks, as tensors and as what a scheduler knows of it."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]
    requests: tuple[list[int], list[int], list[list[int]]]  # query lengths, sequence lengths, block tables
    prefixes: list[Prefix]
    block_size: int

    def levels(self, twin, device: str = "cpu") -> list[Level]:
        return twin.make_levels(*self.requests, self.prefixes, block_size=self.block_size, device=device)


def share(query, key_cache, value_cache, batch, prefixes) -> Step:
    """Give the members of each prefix the blocks of its first sequence, and put NaN into those that nobody has then."""
    block_size, table = key_cache.shape[1], batch.block_table.clone()
    before = set(used_blocks(batch, block_size))
    for first, last, end in prefixes:
        table[first:last, : end // block_size] = table[first, : end // block_size].clone()
    batch = dataclasses.replace(batch, block_table=table)
    for block in before - set(used_blocks(batch, block_size)):
        key_cache[block], value_cache[block] = float("nan"), float("nan")
    requests = batch.query_lens.tolist(), batch.seq_lens.tolist(), table.tolist()
    return Step((query, key_cache, value_cache, batch), requests, [Prefix(*p) for p in prefixes], block_size)


def used_blocks(batch, block_size) -> list[int]:
    rows = zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True)
    return [block for blocks, seq_len in rows for block in blocks[: -(-seq_len // block_size)]]


def lay_out(sharing, **options) -> Step:
    case, prefixes = sharing
    return share(*build(case, **options).tensors, prefixes)


def per_head(options: dict, heads: int, device: str) -> dict:
    """Fill in the options that have one number a head."""
    filled = dict(options)
    if "alibi_slopes" in options:
        filled["alibi_slopes"] = torch.tensor([2.0 ** -(i + 1) for i in range(heads)], device=device)
    if "sinks" in options:
        filled["sinks"] = torch.linspace(-2.0, 3.0, heads, device=device)
    return filled


# --- the mask, read out ---


@each_twin
@each_sharing
def test_every_query_sees_the_keys_up_to_its_position_once(twin, sharing, device):
    case = dataclasses.replace(sharing[0], head_size=64, value_head_size=64)

    def attention(*tensors, **options):
        step = share(*tensors, sharing[1])
        return twin.attention(*step.tensors, levels=step.levels(twin, device), **options)

    assert_same_masks(read_masks(attention, case, device=device), masks_by_hand(case, lambda i, j: j <= i))


@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", ["tree", "three-levels", "prefills-and-decodes", "silent-and-empty"])
def test_windows_stand_at_absolute_positions(twin, window, name, device):
    """The sequences of a group have other lengths, so each sees other keys of what they share."""
    case, prefixes = SHARED[name]

    def attention(*tensors, **options):
        step = share(*tensors, prefixes)
        levels = step.levels(twin, device)
        return twin.attention(*step.tensors, levels=levels, window_size=window, **options)

    masks = read_masks(attention, case, device=device)
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i and (window[0] < 0 or i - window[0] <= j)))


# --- arithmetic that shares no code with the reference ---


@each_sharing
def test_reference_equals_torch_sdpa_with_a_mask(sharing, device):
    """Softcap aside, which sdpa has not: scale, ALiBi and a window in one explicit bias, over keys read by hand."""
    step = lay_out(sharing, device=device, dtype=torch.float64)
    query, key_cache, value_cache, batch = step.tensors
    h, p = query.shape[1], key_cache.shape[1]
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(h)], dtype=torch.float64, device=device)
    options = dict(levels=step.levels(refattn.cascade, device), window_size=(50, 0), softmax_scale=0.3)
    out = refattn.cascade.attention(*step.tensors, **options, alibi_slopes=slopes)
    row = 0
    for query_len, seq_len, blocks in zip(*step.requests, strict=True):
        key, value = (
            torch.stack([cache[blocks[j // p], j % p] for j in range(seq_len)], dim=1) if seq_len else None
            for cache in (key_cache, value_cache)
        )  # [hk, s, d]
        for i in range(query_len):
            position = seq_len - query_len + i
            distance = position - torch.arange(seq_len, device=device)
            bias = (-slopes[:, None, None] * distance).masked_fill((distance < 0) | (distance > 50), -torch.inf)
            mine = out[row + i]
            if position < 0:
                assert not mine.any()
                continue
            expected = functional.scaled_dot_product_attention(
                query[row + i][:, None], key, value, attn_mask=bias, scale=0.3, enable_gqa=True
            )
            torch.testing.assert_close(mine, expected[:, 0], rtol=1e-12, atol=1e-12)
        row += query_len
    assert not out[row:].any()


@each_sharing
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_split_equals_whole(sharing, options, device):
    """With levels and without: the same answer and the same LSE, so every sink is counted once."""
    step = lay_out(sharing, device=device, dtype=torch.float64)
    options = per_head(options, step.tensors[0].shape[1], device)
    split = refattn.cascade.attention(
        *step.tensors, levels=step.levels(refattn.cascade, device), **options, return_lse=True
    )
    whole = refattn.chunked_prefill.attention(*step.tensors, **options, return_lse=True)
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- the twin against the reference ---


@each_kernel
@each_sharing
@pytest.mark.parametrize("options", ["plain", "everything-in-a-window"])
def test_twins_agree(sharing, options, kernel, device):
    step = lay_out(sharing, device=device, dtype=kernel.dtypes[0])
    options = per_head(OPTIONS[options], step.tensors[0].shape[1], device)
    levels = step.levels(fastattn.cascade, device)
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "cascade", *step.tensors, levels=levels, **options)


@each_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_twins_agree_in_every_type(options, kernel, device):
    for dtype in kernel.dtypes:
        step = lay_out(SHARED["tree"], device=device, dtype=dtype)
        options = per_head(options, step.tensors[0].shape[1], device)
        levels = step.levels(fastattn.cascade, device)
        with kernel.asked_for():
            kernel.check(assert_twins_agree, "cascade", *step.tensors, levels=levels, **options)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Case, list[tuple[int, int, int]]]:
    """Draw groups of sequences with a common prefix, some of them with a longer one inside."""
    p = draw(st.sampled_from((1, 16, 24)))
    lens, prefixes = [], []
    for _ in range(draw(st.integers(1, 3))):
        blocks, members, first = draw(st.integers(0, 3)), draw(st.integers(1, 4)), len(lens)
        inner = draw(st.integers(0, 2)) if blocks and members > 2 else 0
        for i in range(members):
            query_len = draw(st.integers(0, 20))
            shared = blocks + (inner if i < 2 else 0)
            lens.append((query_len, shared * p + query_len + draw(st.integers(0, 30))))
        if blocks:
            prefixes.append((first, first + members, blocks * p))
        if inner:
            prefixes.append((first, first + 2, (blocks + inner) * p))
    hk = draw(st.integers(1, 3))
    heads = (hk * draw(st.integers(1, 4)), hk)
    layout, padding = draw(st.sampled_from(("NHD", "HND"))), draw(st.integers(0, 3))
    return Case("drawn", tuple(lens), heads=heads, block_size=p, layout=layout, padding_rows=padding), prefixes


@given(sharing=steps(), options=st.sampled_from(list(OPTIONS)), seed=st.integers(0, 2**16))
def test_twins_agree_on_drawn_batches(sharing, options, seed, device):
    step = lay_out(sharing, device=device, seed=seed)
    options = per_head(OPTIONS[options], step.tensors[0].shape[1], device)
    assert_twins_agree("cascade", *step.tensors, levels=step.levels(fastattn.cascade, device), **options)


@each_kernel
def test_a_long_prefix_and_a_short_suffix(kernel, device):
    """3072 and 64 tokens: an LSE of another base than the merge's shows where one part outweighs the other."""
    sharing = Case("c", ((1, 3136), (1, 3100)), heads=(2, 1)), [(0, 2, 3072)]
    step = lay_out(sharing, device=device, dtype=kernel.dtypes[0])

    def assert_equals_no_cascade():
        levels = step.levels(fastattn.cascade, device)
        out, lse = fastattn.cascade.attention(*step.tensors, levels=levels, return_lse=True)
        assert_matches_reference(out, lse, refattn.chunked_prefill.attention, *step.tensors)

    with kernel.asked_for():
        kernel.check(assert_equals_no_cascade)


@pytest.mark.parametrize("size", [1, 2**11, 2**13], ids=str)
def test_shared_keys_go_through_a_buffer_of_any_size(size, monkeypatch):
    """The CPU kernel gathers what every query sees some blocks at a time; the last of them may be half full."""
    monkeypatch.setattr(cpu, "BUFFER", size)
    step = lay_out(SHARED["tree"])
    assert_twins_agree("cascade", *step.tensors, levels=step.levels(fastattn.cascade))
    inputs = build(Case("c", ((5, 77), (3, 40), (40, 97)), heads=(4, 2)))
    assert_twins_agree("chunked_prefill", *inputs.tensors, causal=False)


@pytest.mark.parametrize("splits", [(1, 4), (2, 7), (3, 3)], ids=str)
@pytest.mark.parametrize("options", ["sinks", "everything-in-a-window"])
def test_levels_with_more_splits_than_their_number(splits, options, monkeypatch, device):
    """A long sequence may get more splits than the tuning's number: the next level's parts lie past all of them."""
    choose = triton_attention.tune
    chosen = dict(splits=splits[0], most_splits=splits[1], block_n=16)
    monkeypatch.setattr(triton_attention, "tune", lambda *arguments: choose(*arguments)._replace(**chosen))
    step = lay_out((Case("c", ((1, 150), (2, 113), (1, 97)), heads=(2, 1)), [(0, 3, 48), (0, 2, 96)]), device=device)
    levels = step.levels(fastattn.cascade, device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("cascade", *step.tensors, levels=levels, **per_head(OPTIONS[options], 2, device))


@each_kernel
def test_caches_and_queries_with_padded_strides(kernel, device):
    step = lay_out(SHARED["three-levels"], device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = step.tensors
    query = functional.pad(query, (0, 8, 0, 1))[:, :-1, :-8]
    key_cache = functional.pad(key_cache, (0, 8, 0, 2, 0, 1))[:, :-1, :-2, :-8]
    value_cache = functional.pad(value_cache, (0, 16, 0, 1))[:, :, :-1, :-16]
    levels = step.levels(fastattn.cascade, device)
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "cascade", query, key_cache, value_cache, batch, levels=levels)


@each_twin
@pytest.mark.parametrize("sink", [40.0, -40.0], ids=["far-above-every-score", "far-below"])
def test_a_sink_is_counted_once(twin, sink, device):
    step = lay_out(SHARED["three-levels"], device=device)
    sinks = torch.full((4,), sink, device=device)
    levels = step.levels(twin, device)
    out, lse = twin.attention(*step.tensors, levels=levels, sinks=sinks, return_lse=True)
    assert_matches_reference(out, lse, refattn.chunked_prefill.attention, *step.tensors, sinks=sinks)


@each_twin
def test_padding_rows_have_no_sink(twin, device):
    step = lay_out(SHARED["prefills-and-decodes"], device=device)
    sinks = torch.zeros(4, device=device)
    out, lse = twin.attention(*step.tensors, levels=step.levels(twin, device), sinks=sinks, return_lse=True)
    assert not out[-3:].any() and (lse[-3:] == -torch.inf).all()


@each_kernel
def test_levels_that_are_advanced_in_place_are_read_again(kernel, device):
    """As in a CUDA graph: the next step has longer sequences in the same tensors, and the same prefixes."""
    step = lay_out((Case("c", ((1, 70), (1, 49), (2, 66)), heads=(4, 2)), [(0, 3, 32)]), device=device)
    query, key_cache, value_cache, batch = (
        x.to(kernel.dtypes[0]) if x is not step.tensors[3] else x for x in step.tensors
    )
    levels = step.levels(fastattn.cascade, device)
    batch.seq_lens.sub_(1)
    levels[-1].batch.seq_lens.sub_(1)
    for _ in range(2):
        with kernel.asked_for():
            kernel.check(assert_twins_agree, "cascade", query, key_cache, value_cache, batch, levels=levels)
        batch.seq_lens.add_(1)
        levels[-1].batch.seq_lens.add_(1)


@each_kernel
@pytest.mark.parametrize("window", [(3, 0), (40, -1), (88, 0), (89, 0), (5000, -1), (-1, 7)], ids=str)
def test_twins_agree_on_a_window(window, kernel, device):
    """The first hides all that is shared, the fourth nothing: the longest sequence has 90 tokens."""
    step = lay_out(SHARED["tree"], device=device, dtype=kernel.dtypes[0])
    levels = step.levels(fastattn.cascade, device)
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "cascade", *step.tensors, levels=levels, window_size=window)


@each_kernel
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e4], ids=str)
def test_keys_before_every_window_may_hold_anything(junk, kernel, device):
    """A shared key that is before the window of each query, and own keys that are."""
    case, prefixes = Case("c", ((1, 90), (3, 73), (1, 70)), heads=(4, 2)), [(0, 3, 32), (1, 3, 64)]
    step = lay_out((case, prefixes), device=device, dtype=kernel.dtypes[0])
    levels = step.levels(fastattn.cascade, device)
    query, key_cache, value_cache, batch = step.tensors
    left = 30

    def call():
        return fastattn.cascade.attention(
            query, key_cache, value_cache, batch, levels=levels, window_size=(left, 0), return_lse=True
        )

    def assert_unchanged():
        before = call()
        seen: dict[tuple[int, int], bool] = {}
        for (query_len, seq_len), blocks in zip(case.lens, batch.block_table.tolist(), strict=True):
            for j in range(seq_len):
                place = blocks[j // case.block_size], j % case.block_size
                seen[place] = seen.get(place, False) or j >= seq_len - query_len - left
        for place, is_seen in seen.items():
            if not is_seen:
                key_cache[place], value_cache[place] = junk, junk
        assert not all(seen.values())
        assert all(torch.equal(*pair) for pair in zip(before, call(), strict=True))
        assert_twins_agree("cascade", *step.tensors, levels=levels, window_size=(left, 0))

    with kernel.asked_for():
        kernel.check(assert_unchanged)


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({}, None),
        (dict(softcap=2.0, window_size=(89, 0)), None),
        (dict(window_size=(88, 0)), [79, 65, 34, 6, 59, 89]),
        (dict(alibi_slopes=True), [79, 65, 34, 6, 59, 89]),
    ],
    ids=["plain", "a-window-of-all", "window", "alibi"],
)
def test_a_kernel_is_told_positions_where_they_matter(options, positions, monkeypatch, device):
    """They cost some launches and leave fewer kernels, so a level without a need for them comes without."""
    step, asked = lay_out(SHARED["tree"], device=device), []
    levels = step.levels(fastattn.cascade, device)

    def listen(query, key_cache, value_cache, work):
        asked.extend(options for _, options in work)
        return kernels_levels(query, key_cache, value_cache, work)

    kernels_levels = fastattn.kernels.levels
    monkeypatch.setattr(fastattn.kernels, "levels", listen)
    fastattn.cascade.attention(*step.tensors, levels=levels, **per_head(options, 6, device))
    *shared, own = asked
    firsts = ([0] * 6, [32, 32, 32, 0, 48, 48])
    for level, first_keys in zip(shared, firsts, strict=True):
        assert not level.causal and level.sinks is None
        if positions is None:
            assert level.positions is None and level.window == (-1, -1)
        else:
            assert level.positions.dtype == torch.int32
            assert level.positions.tolist() == [p - first for p, first in zip(positions, first_keys, strict=True)]
    assert own.positions is None and own.causal


def test_positions_are_found_without_asking_the_device():
    """Tensors without contents are enough, so nothing waits for them."""
    step = lay_out(SHARED["prefills-and-decodes"])
    level = step.levels(fastattn.cascade)[0]
    unknown = Level(
        dataclasses.replace(
            level.batch,
            cu_seqlens_q=level.batch.cu_seqlens_q.to("meta"),
            seq_lens=level.batch.seq_lens.to("meta"),
            block_table=None,
        ),
        level.first_keys.to("meta"),
    )
    rows = len(step.tensors[0])
    assert fastattn.cascade._positions_in(unknown, torch.zeros(rows, dtype=torch.int64, device="meta")).shape == (rows,)


def test_a_window_without_a_shared_level(device):
    step = lay_out(SHARED["nobody-shares"], device=device)
    assert_twins_agree("cascade", *step.tensors, levels=step.levels(fastattn.cascade, device), window_size=(20, 0))


# --- who shares what ---

DRAWING = ([1, 1, 1, 1], [13, 18, 11, 7], [[7, 3, 5, 9], [7, 3, 5, 2, 8], [7, 3, 4], [6, 1]])


@each_twin
def test_the_prefixes_of_the_drawing(twin):
    assert twin.find_prefixes(*DRAWING, block_size=4) == [Prefix(0, 3, 8), Prefix(0, 2, 12)]


@each_twin
def test_the_levels_of_the_drawing(twin):
    levels = twin.make_levels(*DRAWING, [Prefix(0, 2, 12), Prefix(0, 3, 8)], block_size=4)
    assert [level.batch.cu_seqlens_q.tolist() for level in levels] == [[0, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [level.batch.seq_lens.tolist() for level in levels] == [[8, 0], [4, 0, 0], [1, 6, 3, 7]]
    assert [level.first_keys.tolist() for level in levels] == [[0, 0], [8, 8, 0], [12, 12, 8, 0]]
    tables = [level.batch.block_table.tolist() for level in levels]
    assert tables == [[[7, 3], [-1, -1]], [[5], [-1], [-1]], [[9, -1], [2, 8], [4, -1], [6, 1]]]


@each_twin
def test_equal_content_in_other_blocks_is_not_shared(twin):
    """The second request has the same tokens, computed again into blocks of its own."""
    assert twin.find_prefixes([1, 1], [9, 9], [[0, 1, 2], [3, 4, 5]], block_size=4) == []


@each_twin
def test_only_the_beginning_is_a_prefix(twin):
    assert twin.find_prefixes([1, 1], [13, 13], [[9, 1, 2, 3], [8, 1, 2, 4]], block_size=4) == []


@each_twin
@pytest.mark.parametrize(
    ("query_len", "end"), [(1, 8), (3, 8), (4, 8), (5, 4), (8, 4), (9, 0), (13, 0)], ids=lambda x: f"{x}"
)
def test_a_prefix_ends_before_the_first_query_of_everyone(twin, query_len, end):
    """12 keys in 3 blocks, all shared: a block counts only if all its keys lie before the longest chunk."""
    found = twin.find_prefixes([1, query_len], [13, 12], [[0, 1, 2, 3], [0, 1, 2]], block_size=4)
    assert found == ([Prefix(0, 2, end)] if end else [])


@each_twin
def test_sharing_requests_must_be_neighbours_and_sorting_makes_them(twin):
    tables = [[1, 2], [5, 6], [1, 3], [5, 7]]
    assert twin.find_prefixes([1] * 4, [6] * 4, tables, block_size=4) == []
    assert twin.find_prefixes([1] * 4, [6] * 4, sorted(tables), block_size=4) == [Prefix(0, 2, 4), Prefix(2, 4, 4)]


@each_twin
def test_no_request_and_one_request_share_nothing(twin):
    assert twin.find_prefixes([], [], [], block_size=4) == []
    assert twin.find_prefixes([1], [9], [[0, 1, 2]], block_size=4) == []


tables_drawn = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 1), min_size=4, max_size=4)), min_size=0, max_size=7
)


@given(drawn=tables_drawn)
def test_find_prefixes_by_definition(drawn):
    """Each maximal run of neighbours with what all of them share, found by trying every run."""
    p, tables = 2, [[10 * j + block for j, block in enumerate(blocks)] for _, blocks in drawn]
    query_lens, seq_lens = [q for q, _ in drawn], [8] * len(drawn)

    def shared(first, last):
        count = 0
        while all(8 - q >= (count + 1) * p for q in query_lens[first:last]) and (
            len({table[count] for table in tables[first:last]}) == 1
        ):
            count += 1
        return count

    expected = []
    for first in range(len(drawn)):
        for last in range(first + 2, len(drawn) + 1):
            count = shared(first, last)
            grows_left = first > 0 and shared(first - 1, last) == count
            grows_right = last < len(drawn) and shared(first, last + 1) == count
            if count and not grows_left and not grows_right:
                expected.append(Prefix(first, last, count * p))
    expected.sort(key=lambda x: (x.first, -x.last, x.end))
    for twin in (refattn.cascade, fastattn.cascade):
        assert twin.find_prefixes(query_lens, seq_lens, tables, block_size=p) == expected


@given(sharing=steps())
def test_levels_hold_every_key_once_and_both_twins_make_the_same(sharing):
    step = lay_out(sharing)
    ours, theirs = step.levels(refattn.cascade), step.levels(fastattn.cascade)
    assert len(ours) == len(theirs)
    for level, other in zip(ours, theirs, strict=True):
        assert torch.equal(level.first_keys, other.first_keys)
        for field in ("cu_seqlens_q", "seq_lens", "block_table"):
            assert torch.equal(getattr(level.batch, field), getattr(other.batch, field)), field
        assert level.batch.max_query_len == other.batch.max_query_len
        assert level.batch.max_seq_len == other.batch.max_seq_len
    keys = sum(int(level.batch.seq_lens.sum()) for level in ours)
    saved = 0
    for first, last, end in step.prefixes:
        begin = max((p.end for p in step.prefixes if p.encloses(Prefix(first, last, end))), default=0)
        saved += (last - first - 1) * (end - begin)
    assert keys == sum(step.requests[1]) - saved


# --- whether it is worth it ---

SHAPE = dict(num_heads=32, num_kv_heads=8, head_size=128, element_size=2)


def decodes(count: int, shared: int, own: int) -> tuple[list[int], list[int], list[Prefix]]:
    return [1] * count, [shared + own] * count, [Prefix(0, count, shared)] if shared else []


@each_twin
@pytest.mark.parametrize(
    ("count", "shared", "own", "row"),
    [
        (64, 0, 8192, "chunked_prefill/decode-64x8192"),
        (1, 0, 8192, "chunked_prefill/decode-1x8192"),
        (1, 0, 131072, "chunked_prefill/decode-1x131072"),
        (8, 0, 8192, "chunked_prefill/decode-8x8192"),
        (256, 0, 1024, "chunked_prefill/decode-256x1024"),
        (64, 8192, 256, "cascade/decode-64-prefix-8192-own-256"),
    ],
)
def test_the_estimate_is_what_an_h200_took(twin, count, shared, own, row):
    """The fast twin in the committed results of the benchmark."""
    results = json.loads((Path(__file__).parent.parent / "docs/results/cuda-nvidia-h200.json").read_text())
    rows = {f"{one['path']}/{one['workload']}": one for run in results["runs"] for one in run["rows"]}
    estimate = twin.estimate_seconds(*decodes(count, shared, own), **SHAPE, machine=twin.H200)
    assert estimate == pytest.approx(rows[row]["contenders"][0]["median"], rel=0.2)


@each_twin
def test_the_estimate_by_hand(twin):
    """Two levels on a machine of 3 workers with tiles of 8 rows and 10 keys.

    Shared: 5 queries of 2 heads a key head are 10 rows, 2 tiles of rows; 40 keys are 4; with 2 key heads 16 tiles, 6
    waves. Own: each of the 5 queries has 1 tile of rows and, for 25 keys, 3 of keys; with 2 key heads 30, 10 waves.
    A tile reads 2 * 10 * 4 * 2 = 160 bytes and computes 4 * 8 * 10 * 4 = 1280 operations, on a third of the machine.
    """
    machine = twin.Machine(3, 1.0, 100.0, 7.0, 8, 10)
    shape = dict(num_heads=4, num_kv_heads=2, head_size=4, element_size=2)
    estimate = twin.estimate_seconds([1] * 5, [65] * 5, [Prefix(0, 5, 40)], **shape, machine=machine)
    assert estimate == pytest.approx(2 * 7 + (6 + 10) * 3 * max(160 / 1, 1280 / 100))
    bound_by_products = dataclasses.replace(machine, flops_per_second=4.0)
    estimate = twin.estimate_seconds([1] * 5, [65] * 5, [Prefix(0, 5, 40)], **shape, machine=bound_by_products)
    assert estimate == pytest.approx(2 * 7 + (6 + 10) * 3 * max(160 / 1, 1280 / 4))


WORTH_IT = {
    "long-prefix-many-requests": (decodes(64, 8192, 256), True),
    "bench-row": (decodes(16, 4096, 64), True),
    "one-request": (decodes(1, 8192, 256), False),
    "short-prefix": (decodes(4, 16, 1000), False),
    "nothing-shared": (decodes(16, 0, 4096), False),
}


@each_twin
@pytest.mark.parametrize("machine", ["H200", "CPU"])
@pytest.mark.parametrize(("requests", "worth_it"), WORTH_IT.values(), ids=WORTH_IT)
def test_should_use_cascade(twin, machine, requests, worth_it):
    assert twin.should_use_cascade(*requests, **SHAPE, machine=getattr(twin, machine)) is worth_it


@each_twin
def test_two_requests_fill_waves_that_were_empty_anyway(twin):
    """On a large machine a cascade of two short requests saves reads that cost no time, and costs a launch."""
    assert not twin.should_use_cascade(*decodes(2, 256, 16), **SHAPE, machine=twin.H200)
    small = dataclasses.replace(twin.H200, workers=1, bytes_per_second=4.2e12 / 132)
    assert twin.should_use_cascade(*decodes(2, 256, 16), **SHAPE, machine=small)


@each_twin
def test_a_block_shared_by_chance_is_left_out(twin):
    query_lens, seq_lens, (root,) = decodes(64, 8192, 256)
    chance = Prefix(10, 12, 8192 + 16)
    kept = twin.worthwhile_prefixes(query_lens, seq_lens, [chance, root], **SHAPE, machine=twin.H200)
    assert kept == [root]


@each_twin
def test_what_a_prefix_saves_does_not_count_what_another_saves_already(twin):
    """The block shared by chance reaches further than the second prefix, and saves almost nothing beyond the root."""
    root, chance, second = Prefix(0, 64, 8192), Prefix(10, 12, 8192 + 16), Prefix(64, 66, 8000)
    query_lens, seq_lens, _ = decodes(66, 8192, 256)
    kept = twin.worthwhile_prefixes(query_lens, seq_lens, [root, chance, second], **SHAPE, machine=twin.H200)
    assert kept == [root, second]


@each_twin
def test_prefixes_that_pay_for_a_level_together_are_kept(twin):
    """16 groups of 4: none of them saves as much as a launch costs, and all of them share one."""
    groups = [Prefix(4 * i, 4 * i + 4, 512) for i in range(16)]
    query_lens, seq_lens, _ = decodes(64, 0, 1024)
    assert not twin.should_use_cascade(query_lens, seq_lens, groups[:1], **SHAPE, machine=twin.H200)
    kept = twin.worthwhile_prefixes(query_lens, seq_lens, groups, **SHAPE, machine=twin.H200)
    assert sorted(kept) == groups


@each_twin
def test_a_short_root_over_long_groups_is_left_out(twin):
    """16 tokens that everyone shares are not worth a level above two groups that share 4096."""
    root, groups = Prefix(0, 32, 16), [Prefix(0, 16, 4096), Prefix(16, 32, 4096)]
    query_lens, seq_lens, _ = decodes(32, 4096, 64)
    kept = twin.worthwhile_prefixes(query_lens, seq_lens, [root, *groups], **SHAPE, machine=twin.H200)
    assert sorted(kept) == groups


@given(sharing=steps(), machine=st.sampled_from(["H200", "CPU"]))
def test_both_twins_estimate_alike(sharing, machine):
    step = lay_out(sharing)
    arguments = *step.requests[:2], step.prefixes
    ours, theirs = getattr(refattn.cascade, machine), getattr(fastattn.cascade, machine)
    assert ours == theirs
    for name in ("estimate_seconds", "should_use_cascade", "worthwhile_prefixes"):
        one, other = (
            getattr(twin, name)(*arguments, **SHAPE, machine=ours) for twin in (refattn.cascade, fastattn.cascade)
        )
        assert one == (pytest.approx(other) if isinstance(other, float) else other), name


# --- bad input ---

BAD_PREFIXES = {
    "reaches-into-the-queries": (
        [(0, 2, 48)],
        r"prefixes\[0\]: expected to end before the first query of each sequence, at 40 of sequence 1, got 48 keys",
    ),
    "no-multiple-of-the-block-size": ([(0, 2, 40)], r"prefixes\[0\]: expected a multiple of the block size 16, got 40"),
    "no-keys": ([(0, 2, 0)], r"prefixes\[0\]: expected a multiple of the block size 16, got 0 keys"),
    "other-blocks": ([(0, 2, 16), (1, 3, 16)], r"prefixes\[1\]: expected sequences 1 and 2 to share 16 keys by block"),
    "outside-the-batch": ([(1, 4, 16)], r"prefixes\[0\]: expected sequences in 0\.\.3, got 1\.\.4"),
    "empty-group": ([(1, 1, 16)], r"prefixes\[0\]: expected sequences in 0\.\.3, got 1\.\.1"),
    "twice": ([(0, 2, 16), (0, 2, 16)], r"prefixes\[1\]: expected to be apart from .* or nested"),
}


@each_twin
@pytest.mark.parametrize(("prefixes", "message"), BAD_PREFIXES.values(), ids=BAD_PREFIXES)
def test_bad_prefixes_are_named(twin, prefixes, message):
    requests = [1, 5, 1], [60, 45, 60], [[1, 2, 3, 4], [1, 2, 3], [5, 6, 7, 8]]
    with pytest.raises(ValueError, match=message):
        twin.make_levels(*requests, [Prefix(*p) for p in prefixes], block_size=16)


@each_twin
def test_prefixes_that_overlap_are_named(twin):
    requests = [1] * 3, [60] * 3, [[1, 2, 3, 4]] * 3
    with pytest.raises(ValueError, match=r"prefixes\[1\]: expected to be apart"):
        twin.make_levels(*requests, [Prefix(0, 2, 16), Prefix(1, 3, 32)], block_size=16)


def other(level: Level, **tensors) -> Level:
    """Change tensors of a level."""
    first_keys = tensors.pop("first_keys", level.first_keys)
    return Level(dataclasses.replace(level.batch, **tensors), first_keys)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_LEVELS = {
    "none": (lambda levels: [], "levels: expected at least one"),
    "of-the-step-before": (
        lambda levels: [levels[0], other(levels[1], seq_lens=levels[1].batch.seq_lens - 1)],
        "levels: expected the 70 keys of sequence 0, got 69",
    ),
    "a-level-is-missing": (lambda levels: levels[1:], r"levels\[0\]\.first_keys: expected 0 for sequence 0.* got 48"),
    "the-last-is-missing": (lambda levels: levels[:1], r"levels\[0\]: expected groups of the sequences"),
    "of-another-batch": (
        lambda levels: [other(levels[0], cu_seqlens_q=ints(0, 5)), levels[1]],
        r"levels\[0\]: expected groups of the sequences at query rows \[0, 1, 2, 3, 4\], got \[0, 5\]",
    ),
    "reaches-into-the-queries": (
        lambda levels: [
            other(levels[0], seq_lens=ints(64), max_seq_len=64, block_table=ints(*range(4))[None]),
            other(levels[1], first_keys=levels[1].first_keys + 16, seq_lens=ints(6, 1, 2, 66)),
        ],
        r"levels\[0\]: expected to end before the first query of each sequence, at 48 of sequence 1, got 64 keys",
    ),
    "a-key-twice": (
        lambda levels: [levels[0], other(levels[1], first_keys=levels[1].first_keys - 16)],
        r"levels\[1\]\.first_keys: expected 48 for sequence 0",
    ),
    "first-keys-of-another-type": (
        lambda levels: [Level(levels[0].batch, levels[0].first_keys.long()), levels[1]],
        r"levels\[0\]\.first_keys: expected int32 \[b=1\], got int64 \[1\]",
    ),
    "no-block-table": (
        lambda levels: [other(levels[0], block_table=None), levels[1]],
        r"levels\[0\]: expected a batch with a block table",
    ),
    "too-few-blocks": (
        lambda levels: [other(levels[0], block_table=levels[0].batch.block_table[:, :2]), levels[1]],
        r"levels\[0\]: expected blocks for 48 keys, got 2 columns",
    ),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("change", "message"), BAD_LEVELS.values(), ids=BAD_LEVELS)
def test_bad_levels_are_named(twin, change, message):
    step = lay_out(SHARED["one-prefix"])
    with pytest.raises(ValueError, match=message):
        twin.attention(*step.tensors, levels=change(step.levels(twin)))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_tensors_and_options_are_named(twin):
    step = lay_out(SHARED["one-prefix"])
    query, key_cache, value_cache, batch = step.tensors
    levels = step.levels(twin)
    with pytest.raises(ValueError, match="key_cache: expected float32"):
        twin.attention(query, key_cache.half(), value_cache, batch, levels=levels)
    with pytest.raises(ValueError, match="softcap: expected"):
        twin.attention(*step.tensors, levels=levels, softcap=-1.0)
    with pytest.raises(ValueError, match=r"sinks: expected floating point \[h=8\]"):
        twin.attention(*step.tensors, levels=levels, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="block_size: expected a positive int, got 0"):
        twin.find_prefixes([1], [1], [[0]], block_size=0)
    with pytest.raises(ValueError, match="block_tables: expected 1 rows"):
        twin.find_prefixes([1], [1], [], block_size=16)
    with pytest.raises(ValueError, match="num_heads: expected a positive int"):
        twin.should_use_cascade([1], [1], [], **{**SHAPE, "num_heads": 0}, machine=twin.CPU)
