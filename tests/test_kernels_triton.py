"""Our Triton kernels, interpreted on a CPU and compiled on a GPU: what the paths' own tests do not reach."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from batches import Case, assert_same_masks, build, each_case, masks_by_hand, ragged_cases, read_masks
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chunked_prefill import OPTIONS, WINDOWS, per_head
from test_sliding_window import evict
from tolerance import assert_close, assert_twins_agree

import fastattn
import fastattn.chunked_prefill
import fastattn.kv_cache
import refattn.attention
import refattn.kv_cache
import refattn.masks
import refattn.merge
from fastattn.kernels import Options, Problem, fa2, fa4, machine, torch_flash, triton, triton_attention, triton_cache
from fastattn.kernels.triton_adapt import adapt
from fastattn.kernels.triton_attention import attend
from fastattn.kernels.triton_merge import merge_states
from fastattn.kernels.triton_run import SCRATCH_BYTES, shrink

MIXED = Case("mixed", ((4, 6), (1, 90), (10, 17), (0, 9), (20, 50), (5, 2)), heads=(6, 2), padding_rows=3)

LONG = Case("long", ((70, 80), (0, 4), (1, 33), (5, 2)), heads=(4, 2), padding_rows=3)


def launched_as(**changes):
    """Change what is chosen for a launch."""
    chosen = triton_attention.tune
    return mock.patch.object(triton_attention, "tune", lambda *arguments: chosen(*arguments)._replace(**changes))


# --- when it is taken ---


@pytest.mark.parametrize(
    ("taken", "lens", "heads", "options"),
    [
        (True, ((1, 8192),) * 64, (32, 8), Options()),
        (True, ((4096, 8192),) * 8, (32, 8), Options(batch_invariant=True)),
        (True, ((256, 256),) * 32, (9, 3), Options()),
        (False, ((512, 512),) * 16, (32, 8), Options()),
        (True, ((8, 32768),) * 8, (32, 8), Options()),
        (False, ((8, 32768),) * 9, (32, 8), Options()),
        (True, ((512, 8704),), (9, 3), Options()),
        (False, ((512, 8704),), (32, 8), Options()),
        (False, ((8192, 8192),) * 2, (32, 8), Options()),
    ],
    ids=[
        *("decodes", "invariant", "short-prompts", "longer-prompts", "few-small-tiles", "more-small-tiles"),
        *("few-tiles", "more-tiles", "long-prompts"),
    ],
)
def test_it_is_taken_where_it_answers_first(taken, lens, heads, options, monkeypatch):
    monkeypatch.setattr(triton, "num_multiprocessors", lambda device: 132)
    problem = Problem(
        torch.device("cuda"),
        torch.bfloat16,
        *heads,
        *(128, 128) if heads == (32, 8) else (64, 64),
        block_size=16,
        max_query_len=max(q for q, _ in lens),
        max_seq_len=max(s for _, s in lens),
        num_seqs=len(lens),
        options=options,
    )
    assert triton.suits(problem) == taken
    for other in (fa4, fa2, torch_flash):
        assert other.suits(problem) != taken


# --- attention ---


@each_case
def test_pages(case, device):
    inputs = build(case, device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(OPTIONS["everything"], case, device))


@each_case
def test_rows(case, device):
    inputs = build(case, device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("dense", *inputs.rows)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_over_balanced_splits(options, device):
    inputs = build(MIXED, device=device, dtype=torch.float16)
    with fastattn.use_kernel("triton"), launched_as(splits=1, most_splits=3, block_n=16):
        assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(options, MIXED, device))


@pytest.mark.parametrize("splits", [(1, 1), (2, 2), (20, 20), (1, 2), (1, 20), (3, 20)], ids=str)
def test_any_number_of_splits(splits, device):
    """As many for each sequence, or up to as many for a long one."""
    case = Case("few-rows", ((2, 6), (1, 170), (3, 17), (0, 9), (5, 2)), heads=(2, 2), padding_rows=3)
    inputs = build(case, device=device)
    with fastattn.use_kernel("triton"), launched_as(splits=splits[0], most_splits=splits[1], block_n=16):
        assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(OPTIONS["sinks"], case, device))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale, device):
    inputs = build(MIXED, device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("chunked_prefill", *inputs.tensors, softmax_scale=scale)


@pytest.mark.parametrize("launch", [dict(block_m=64), dict(block_m=128, num_warps=8), dict(block_n=128)], ids=str)
@pytest.mark.parametrize("case", [MIXED, LONG], ids=str)
def test_any_tile(launch, case, device):
    inputs = build(case, device=device)
    with fastattn.use_kernel("triton"), launched_as(**launch):
        assert_twins_agree("chunked_prefill", *inputs.tensors)


SHARED_MEMORY = {"H200": 232448, "A100": 166912, "RTX 4090": 101376}  # bytes that a program may have


@pytest.mark.parametrize("card", SHARED_MEMORY)
@pytest.mark.parametrize("row_bytes", [128, 256, 512, 1024], ids=lambda size: f"rows-of-{size}")
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_a_launch_fits_into_the_shared_memory(card, row_bytes, block_m):
    """A step of keys and its values, for each one in flight, beside the tile."""
    chosen = triton_attention._tune(block_m, row_bytes, 64, 4096, 132)
    room = SHARED_MEMORY[card]
    fitted = shrink(chosen, row_bytes, 2 * row_bytes, room)

    def needed(tuning):
        return (tuning.block_m + 2 * tuning.block_n * tuning.num_stages) * row_bytes

    assert needed(fitted) <= room
    if fitted != chosen:
        one_more = fitted._replace(num_stages=fitted.num_stages + 1)
        assert needed(one_more) > room - SCRATCH_BYTES, "shrunk further than needed"
    if card == "H200" and block_m * row_bytes <= 64 * 1024:
        assert fitted == chosen, "what was measured there is another launch"


def test_the_shared_memory_is_the_cards(monkeypatch):
    cards = {0: SimpleNamespace(shared_memory_per_block_optin=232448), 1: SimpleNamespace()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    machine.shared_memory.cache_clear()
    assert machine.shared_memory(torch.device("cuda", 0)) == 232448
    assert machine.shared_memory(torch.device("cuda", 1)) == 49152, "what every card has"
    machine.shared_memory.cache_clear()


@pytest.mark.parametrize("room", [20_000, 70_000], ids=str)
def test_a_card_with_little_shared_memory(room, device):
    case = Case("c", ((1, 70), (40, 90)), heads=(4, 2))
    inputs = build(case, device=device)

    launched = []

    def fit(tuning, device, *, row_bytes, key_bytes):
        launched.append(shrink(tuning, row_bytes, key_bytes, room))
        assert launched[-1] != tuning, "the card has room for all of it"
        return launched[-1]

    with fastattn.use_kernel("triton"), mock.patch.object(triton_attention, "fit", fit), launched_as(block_m=64):
        assert_twins_agree("chunked_prefill", *inputs.tensors)
    assert launched


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_window_shows_exactly_its_keys(window, causal, device):
    case = Case("mixed", ((4, 6), (1, 64), (10, 17), (5, 2)), heads=(2, 1), padding_rows=2)
    left, right = window

    def sees(i, j):
        return (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)

    with fastattn.use_kernel("triton"), launched_as(splits=1, most_splits=3, block_n=16):
        masks = read_masks(fastattn.chunked_prefill.attention, case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 8192])
def test_a_chunk_shows_exactly_its_keys(chunk_size, device):
    case = Case("mixed", ((4, 6), (1, 64), (10, 17), (20, 40), (1, 63)), heads=(2, 1), padding_rows=2)

    def attention(query, key_cache, value_cache, batch, *, return_lse):
        return attend(query, key_cache, value_cache, batch, Options(), chunk_size=chunk_size)

    with launched_as(splits=1, most_splits=3, block_n=16):
        masks = read_masks(attention, case, device=device)
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i and i // chunk_size == j // chunk_size))


@pytest.mark.parametrize("launch", [{}, dict(block_m=64), dict(splits=3, most_splits=3, block_n=16)], ids=str)
@pytest.mark.parametrize(
    ("window_size", "causal"),
    [((-1, -1), False), ((21, -1), False), ((-1, -1), True)],
    ids=["plain", "window", "causal"],
)
def test_a_mask_over_the_last_keys_hides_exactly_those(launch, window_size, causal, device):
    """Drafts that do not see their siblings; the mask is wider than some sequences, and strided."""
    case = Case("drafts", ((8, 70), (8, 8), (1, 33), (0, 5), (5, 90), (3, 2)), heads=(4, 2), padding_rows=2)
    generator = torch.Generator().manual_seed(1)
    last = torch.rand(27, 16, generator=generator)[:, ::2] < 0.5
    row_of = {case.lens[i]: sum(q for q, _ in case.lens[:i]) for i in range(len(case.lens))}

    def attention(query, key_cache, value_cache, batch, *, return_lse):
        options = Options(causal=causal, window_size=window_size)
        return attend(query, key_cache, value_cache, batch, options, last_mask=last.to(device))

    with launched_as(**launch):
        masks = read_masks(attention, case, device=device)
    expected = []
    for q, s in case.lens:
        mask = torch.zeros(q, s, dtype=torch.bool)
        for i in range(q):
            for j in range(s):
                position = s - q + i
                sees = (window_size[0] < 0 or j >= position - window_size[0]) and (not causal or j <= position)
                mask[i, j] = sees and (j < s - 8 or bool(last[row_of[q, s] + i, j - (s - 8)]))
        expected.append(mask)
    assert_same_masks(masks, expected)


@settings(max_examples=6)
@given(case=ragged_cases(), options=st.sampled_from(list(OPTIONS)), seed=st.integers(0, 2**16))
def test_drawn_batches(case, options, seed, device):
    inputs = build(case, device=device, seed=seed)
    with fastattn.use_kernel("triton"):
        assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(OPTIONS[options], case, device))


def test_a_sink_far_above_every_score_takes_all(device):
    inputs = build(MIXED, device=device)
    for most_splits in (1, 3):
        with fastattn.use_kernel("triton"), launched_as(splits=1, most_splits=most_splits, block_n=16):
            assert_twins_agree("chunked_prefill", *inputs.tensors, sinks=torch.full((6,), 1e4, device=device))


INVARIANT = {
    "plain": Options(batch_invariant=True),
    "window": Options(batch_invariant=True, window_size=(70, 0)),
    "sinks": Options(batch_invariant=True, sinks=torch.linspace(-2.0, 3.0, 4), softcap=5.0),
    "slopes": Options(batch_invariant=True, alibi_slopes=torch.linspace(0.01, 0.5, 4)),
    "slopes-and-softcap": Options(batch_invariant=True, alibi_slopes=torch.linspace(0.01, 0.5, 4), softcap=5.0),
}
each_invariant = pytest.mark.parametrize("options", INVARIANT.values(), ids=INVARIANT)


def on(device, options):
    """Give the options with their tensors on a device."""
    tensors = {name: getattr(options, name) for name in ("alibi_slopes", "sinks")}
    return replace(options, **{name: x.to(device) for name, x in tensors.items() if x is not None})


def attend_alone(inputs, options, rows, seq_len, sequence, device):
    """Answer some query rows as the last tokens of a sequence of `seq_len` tokens, with nobody else in the batch."""
    first, last = rows
    batch = refattn.batch.Batch(
        torch.tensor([0, last - first], dtype=torch.int32, device=device),
        torch.tensor([seq_len], dtype=torch.int32, device=device),
        inputs.batch.block_table[sequence : sequence + 1],
        last - first,
        seq_len,
    )
    return attend(inputs.query[first:last], inputs.key_cache, inputs.value_cache, batch, on(device, options))


@each_invariant
@pytest.mark.parametrize("run", [128, 512], ids=lambda run: f"runs-of-{run}")
def test_rows_do_not_change_with_the_company(options, run, device):
    """Alone, a sequence has other tiles and fewer splits than beside a long one."""
    case = Case("company", ((1, 300), (1, 600), (30, 100), (1, 140), (4, 44)), heads=(4, 2))
    inputs = build(case, device=device)
    with mock.patch.object(triton_attention, "INVARIANT_RUN", run):
        together, lse_together = attend(*inputs.tensors, on(device, options))
        row = 0
        for i, (q, s) in enumerate(case.lens):
            out, lse = attend_alone(inputs, options, (row, row + q), s, i, device)
            assert torch.equal(out, together[row : row + q]) and torch.equal(lse, lse_together[row : row + q]), i
            row += q


@each_invariant
@pytest.mark.parametrize("sizes", [[5, 7], [1] * 12], ids=["two-chunks", "one-by-one"])
def test_rows_do_not_change_with_the_chunk_they_come_in(options, sizes, device):
    """The window of the first rows begins in another run of keys than that of the last ones."""
    inputs = build(Case("chunk", ((12, 330), (3, 2)), heads=(4, 2)), device=device)
    with mock.patch.object(triton_attention, "INVARIANT_RUN", 128):
        expected, expected_lse = attend(*inputs.tensors, on(device, options))
        row = 0
        for size in sizes:
            out, lse = attend_alone(inputs, options, (row, row + size), 318 + row + size, 0, device)
            assert torch.equal(out, expected[row : row + size]), f"rows from {row}"
            assert torch.equal(lse, expected_lse[row : row + size]), f"rows from {row}"
            row += size


@each_invariant
def test_what_does_not_change_is_right(options, device):
    inputs = build(LONG, device=device)
    with fastattn.use_kernel("triton"), mock.patch.object(triton_attention, "INVARIANT_RUN", 64):
        assert_twins_agree("chunked_prefill", *inputs.tensors, **vars(on(device, options)))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["shared-keys", "fixed-runs"])
def test_what_is_more_than_a_step_before_the_window_is_not_read(batch_invariant, device):
    """There it is NaN. A fixed run of keys begins at key 0, what is read of it does not."""
    inputs = build(Case("evicted", ((1, 300), (4, 600)), heads=(4, 2)), device=device)
    options = Options(window_size=(70, 0), batch_invariant=batch_invariant)
    out, lse = attend(*inputs.tensors, options)
    gone = evict(inputs, 70 + 128, block_size=16)
    out_without, lse_without = attend(inputs.query, gone.key_cache, gone.value_cache, inputs.batch, options)
    assert torch.isfinite(out).all()
    assert torch.equal(out, out_without) and torch.equal(lse, lse_without)


def test_a_batch_of_padding_rows_only(device):
    inputs = build(Case("padding", ((0, 5), (0, 0)), padding_rows=4), device=device)
    out, lse = attend(*inputs.tensors, Options(sinks=torch.zeros(4, device=device)))
    assert not out.any() and (lse == -torch.inf).all()


GOOD = Problem(
    device=torch.device("cpu"),
    dtype=torch.float16,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    value_head_size=64,
    block_size=16,
    max_query_len=1,
    max_seq_len=9,
    num_seqs=2,
)


def test_what_is_refused_says_why(device):
    good = replace(GOOD, device=torch.device(device))
    assert triton.supports(good) is None
    assert "float64" in triton.supports(replace(good, dtype=torch.float64))
    assert "576" in triton.supports(replace(good, head_size=576))
    assert "meta" in triton.supports(replace(good, device=torch.device("meta")))


@pytest.mark.parametrize(
    ("versions", "works"),
    [
        ({"triton": "3.6.0", "numpy": "2.3.5"}, True),
        ({"triton": "3.6.0", "numpy": "2.4.0"}, False),
        ({"triton": "3.6.0+git1", "numpy": "3.0"}, False),
        ({"triton": "3.7.1", "numpy": "2.5.5"}, True),
    ],
    ids=str,
)
def test_an_interpreter_that_fails_with_this_numpy_is_refused(monkeypatch, versions, works):
    monkeypatch.setattr(machine, "package_version", versions.get)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    machine.cannot_interpret.cache_clear()
    reason = triton.supports(GOOD)
    machine.cannot_interpret.cache_clear()
    assert (reason is None) == works
    assert works or "install numpy<2.4" in reason


# --- the cache ---


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_write_moves_every_bit(layout, dtype, device):
    shape = dict(value_head_size=6, layout=layout, dtype=dtype, device=device)
    ours, theirs = refattn.kv_cache.allocate(5, 3, 3, 8, **shape), refattn.kv_cache.allocate(5, 3, 3, 8, **shape)
    fused = torch.randint(-9, 9, (40, 3, 14), device=device).to(dtype)
    slots = torch.full((40,), -1, device=device)
    slots[::3] = torch.randperm(15, device=device)[:14]
    triton_cache.write(fused[..., :8], fused[..., 8:], *ours, slots)
    refattn.kv_cache.write(fused[..., :8], fused[..., 8:], *theirs, slots)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    "pairs",
    [[[0, 4]], [[0, 1], [1, 2], [2, 0]], [[3, 5], [3, 6], [4, 3]], [], [[i, i + 33] for i in range(33)]],
    ids=str,
)
@pytest.mark.parametrize("layout", ["NHD", "HND", "in-a-larger-pool"])
def test_a_block_may_be_source_and_destination(pairs, layout, device):
    pool = torch.randn(70, 2, 5, 3, 24, device=device)
    pool = pool[:, 1] if layout == "in-a-larger-pool" else pool[:, 0].clone()
    pool = pool.transpose(1, 2) if layout == "HND" else pool
    pairs = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    expected = pool.clone()
    refattn.kv_cache.copy_blocks([expected], pairs)
    triton_cache.copy_blocks(pool, pairs)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("num_pairs", [3, triton_cache.MAX_PAIRS + 1], ids=str)
@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "with-gaps"])
def test_copies_take_the_kernel_where_it_can(num_pairs, gaps, device, monkeypatch):
    """More copies than a program holds, and blocks with something of others between, go by way of a buffer."""
    monkeypatch.setattr(fastattn.kv_cache, "runs_triton", lambda device: True)
    pool = torch.randn(2 * num_pairs, 2, 8, device=device)[..., : 5 if gaps else 8]
    pairs = torch.randperm(2 * num_pairs, device=device).view(num_pairs, 2)
    expected = pool.clone()
    refattn.kv_cache.copy_blocks([expected], pairs)
    with mock.patch.object(triton_cache, "copy_blocks", wraps=triton_cache.copy_blocks) as kernel:
        fastattn.kv_cache.copy_blocks([pool], pairs)
    assert torch.equal(pool, expected)
    assert kernel.call_count == (num_pairs == 3 and not gaps)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_repage_copies_all_tokens_in_order(layout, dtype, device):
    case = Case("c", ((0, 9), (0, 0), (0, 130), (0, 32)), heads=(3, 3), head_size=24, block_size=24, layout=layout)
    inputs = build(case, device=device, dtype=dtype)
    pool, table = triton_cache.repage(inputs.key_cache, inputs.batch, block_size=32)
    for keys, blocks, (_, seq_len) in zip(inputs.keys, table, case.lens, strict=True):
        used = pool[blocks[: -(-seq_len // 32)].long()].flatten(0, 1)
        assert torch.equal(used[:seq_len], keys) and not used[seq_len:].any()


# --- merging ---


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merge_states(num_parts, dtype, device):
    outs = [torch.randn(4, 7, 24, device=device, dtype=dtype).transpose(0, 1) for _ in range(num_parts)]
    lses = [torch.randn(7, 4, device=device) * 5 for _ in range(num_parts)]
    for part in range(num_parts):
        lses[part][part % 2], outs[part][part % 2] = -torch.inf, torch.nan
        lses[part][4], outs[part][4] = -torch.inf, torch.inf
    wide_outs = [out.double() for out in outs]
    ref, ref_lse = refattn.merge.merge(wide_outs, [lse.double() for lse in lses])
    low, low_lse = refattn.merge.merge(outs, lses)
    out, lse = merge_states(outs, lses)
    assert_close(out, ref, low, name="out")
    assert_close(lse, ref_lse, low_lse, name="lse")


def test_adapt_sets_empty_and_padding_rows_right(device):
    out = torch.randn(40, 3, 24, device=device)
    lse = torch.randn(3, 40, device=device)
    out[36:], lse[:, 36:] = torch.nan, torch.nan  # padding
    lse[1, 5], lse[2, 35] = torch.inf, -torch.inf
    batch = refattn.batch.Batch(
        torch.tensor([0, 30, 36], dtype=torch.int32, device=device),
        torch.tensor([30, 36], dtype=torch.int32, device=device),
        None,
        30,
        36,
    )
    for sinks in (None, torch.tensor([-1.0, 2.0, 300.0], device=device)):
        expected, expected_lse = out.double(), lse.T.double()
        saw_nothing = expected_lse.isinf() | expected_lse.isnan()
        expected[saw_nothing], expected_lse[saw_nothing] = 0.0, -torch.inf
        if sinks is not None:
            expected[:36], expected_lse[:36] = refattn.merge.add_sinks(expected[:36], expected_lse[:36], sinks.double())
        got, got_lse = adapt(out.clone(), lse.clone(), batch, sinks)
        assert_close(got, expected, expected.float())
        assert_close(got_lse, expected_lse, expected_lse.float(), name="lse")


def test_adapt_finds_the_sequences_without_keys(device):
    """Where a kernel adds the sinks itself, their rows have a log-sum-exp, and whatever was in memory for values."""
    query_lens = [3, 0, 40, 2, *[1] * 70, 5]
    seq_lens = [3, 0, 0, 2, *[i % 2 for i in range(70)], 0]
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    batch = refattn.batch.Batch(starts, torch.tensor(seq_lens, dtype=torch.int32, device=device), None, 40, 3)
    empty = torch.tensor(seq_lens).repeat_interleave(torch.tensor(query_lens)) == 0
    out = torch.randn(len(empty) + 9, 2, 24, device=device)
    lse = torch.randn(2, len(out), device=device)
    expected, expected_lse = out.clone(), lse.T.clone()
    expected[: len(empty)][empty], expected[len(empty) :], expected_lse[len(empty) :] = 0.0, 0.0, -torch.inf
    out[: len(empty)][empty], out[len(empty) :], lse[:, len(empty) :] = torch.nan, torch.nan, torch.nan
    got, got_lse = adapt(out, lse, batch, has_sinks=True)
    assert torch.equal(got, expected) and torch.equal(got_lse, expected_lse)
