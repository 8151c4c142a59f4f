"""Selected keys: the pool of index keys, scores, the selection with its ties, and attention to what was selected."""

import math
import os
import struct
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn.kernels
import fastattn.quantized
import fastattn.sparse
import refattn.chunked_prefill
import refattn.interval
import refattn.mla
import refattn.sparse
from fastattn.kernels import order
from fastattn.kernels.replay import memo_of
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Intervals, Plan
from refattn.scales import Fp8Scales
from tests.helpers.batches import GARBAGE, HARMLESS, POISON, Case, build
from tests.helpers.kernels_present import PRESENT, PRESENT_FOR_LATENTS, each_kernel
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.stored import decoded
from tests.helpers.tolerance import assert_close, assert_matches_reference

TWINS = [refattn.sparse, fastattn.sparse]
each_twin = pytest.mark.parametrize("twin", TWINS, ids=["ref", "fast"])
KERNELS = ["torch", *(kernel.name for kernel in PRESENT if kernel.name == "triton")]
each_selector = pytest.mark.parametrize("kernel", KERNELS)
SCORERS = KERNELS if os.environ["TWINATTN_TEST_DEVICE"] == "cpu" else KERNELS[1:]  # a GPU would wait for plain torch
QUERY_TYPES = [torch.float32, torch.float16, torch.float8_e4m3fn]
if os.environ["TWINATTN_TEST_DEVICE"] != "cpu":  # the interpreter has none
    QUERY_TYPES.append(torch.bfloat16)
each_scorer = pytest.mark.parametrize("kernel", SCORERS)
I32 = partial(torch.tensor, dtype=torch.int32)
D = 16  # elements of an index key here: few, so that scores of quantized values are exact

CASE = Case("three", ((4, 70), (1, 9), (7, 30), (3, 2), (0, 4)), heads=(4, 2), block_size=8, padding_rows=2)


def lay_out(case=CASE, *, dtype=torch.uint8, seed=0, poison=POISON, device="cpu", size=D):
    """Return index queries, weights, a pool with poison where no query looks, the batch, and the keys by sequence."""
    torch.manual_seed(seed)
    inputs = build(case, seed=seed, device=device)
    batch, p = inputs.batch, case.block_size
    t = len(inputs.query)
    pool = refattn.sparse.allocate(len(inputs.key_cache), p, index_size=size, dtype=dtype)
    table, keys = batch.block_table.cpu(), []
    if dtype == torch.uint8:
        pool.copy_(
            (torch.tensor(poison).float().repeat(-(-pool.numel() // 4)).view(torch.uint8))[: pool.numel()].view_as(pool)
        )
        pool[:, :, 0] = 0x7F  # NaN, as a quantized value
    else:
        pool.copy_(torch.tensor(poison).repeat(pool.numel())[: pool.numel()].view_as(pool))
    for i, (_, s) in enumerate(case.lens):
        key = torch.randn(s, size).to(torch.float32 if dtype == torch.uint8 else dtype)
        slots = torch.tensor([int(table[i, j // p]) * p + j % p for j in range(s)], dtype=torch.int64)
        refattn.sparse.write(key, pool, slots)
        keys.append(key)
    query, weights = torch.randn(t, 3, size), torch.randn(t, 3)
    return query.to(device), weights.to(device), pool.to(device), batch, keys


def plan_of(batch, case=CASE, **more):
    return refattn.chunked_prefill.plan(batch, block_size=case.block_size, **more)


# --- the pool of index keys ---


@pytest.mark.core
@pytest.mark.covers("F195")
@each_twin
def test_the_quantized_values_of_a_block_come_first_and_then_its_scales(twin):
    """Byte by byte, as vLLM and DeepGEMM read them."""
    torch.manual_seed(0)
    pool, key = twin.allocate(3, 4, index_size=8), torch.randn(3, 8)
    key[2] = 0.0
    twin.write(key, pool, torch.tensor([6, -1, 9]))
    assert pool.shape == (3, 4, 12) and pool.dtype == torch.uint8
    pages = pool.flatten(1)
    for token, block, row in ((0, 1, 2), (2, 2, 1)):
        (scale,) = struct.unpack("<f", bytes(pages[block, 32 + 4 * row : 36 + 4 * row].tolist()))
        assert scale == pytest.approx(max(1e-4, float(key[token].abs().max())) / 448, rel=1e-6)
        numbers = decoded(torch.float8_e4m3fn)[pages[block, 8 * row : 8 * row + 8].long()] * scale
        largest = float(key[token].abs().max())
        torch.testing.assert_close(numbers.float(), key[token], rtol=1 / 16, atol=largest / 448 / 2 * 2**-5)
        assert float(numbers.abs().max()) == pytest.approx(largest, rel=1e-6)
        assert torch.equal(twin.read(pool, torch.tensor([block * 4 + row]))[0], numbers.float())
    untouched = pages.clone()
    untouched[1, 16:24] = untouched[1, 40:44] = untouched[2, 8:16] = untouched[2, 36:40] = 0
    assert not untouched.any()


@pytest.mark.core
@pytest.mark.covers("F195")
@each_selector
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16], ids=str)
def test_both_packages_write_the_same_bytes(kernel, dtype, device):
    torch.manual_seed(1)
    key = torch.randn(70, 20).mul(torch.logspace(-6, 4, 70)[:, None])
    key[3, 4], key[5, 1], key[6] = math.nan, math.inf, -0.0
    key = key if dtype == torch.uint8 else key.to(dtype)
    slots = torch.randperm(96)[:70]
    slots[::9] = -1
    pools = [refattn.sparse.allocate(12, 8, index_size=20, dtype=dtype, device=on) for on in ("cpu", device)]
    refattn.sparse.write(key, pools[0], slots)
    wide = key.new_zeros(70, 41)
    wide[:, 1::2] = key  # any strides
    with order.use_kernel(kernel):
        fastattn.sparse.write(wide.to(device)[:, 1::2], pools[1], slots.to(device))
    ours, theirs = (pool.view(torch.uint8).flatten(1) for pool in (pools[0], pools[1].cpu()))
    if dtype == torch.uint8:  # a NaN of a scale, and of a code, may have any sign
        scales = [x[:, 160:].contiguous().view(torch.float32) for x in (ours, theirs)]
        assert torch.equal(*(x.nan_to_num(7.0) for x in scales))
        ours, theirs = (x[:, :160] for x in (ours, theirs))
        ours, theirs = (torch.where((x & 0x7F) == 0x7F, 0x7F, x) for x in (ours, theirs))
    assert torch.equal(ours, theirs)


# --- scores ---


@pytest.mark.covers("F196")
@each_twin
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_scores_are_the_formula_in_float64(twin, dtype):
    query, weights, pool, batch, keys = lay_out(dtype=dtype)
    scores = twin.scores(query, weights, pool, plan_of(batch))
    row, table = 0, batch.block_table
    assert scores.shape == (17, 70) and scores.dtype == torch.float32
    for i, (q, s) in enumerate(CASE.lens):
        for r in range(q):
            position = s - q + r
            for j in range(70):
                got = float(scores[row + r, j])
                if j > position or j >= s:
                    assert got == -math.inf
                    continue
                key = keys[i][j].double()
                if dtype == torch.uint8:
                    key = refattn.sparse.read(pool, torch.tensor([int(table[i, j // 8]) * 8 + j % 8]))[0].double()
                products = query[row + r].double() @ key
                want = sum(float(w) * max(0.0, float(x)) for w, x in zip(weights[row + r], products, strict=True))
                assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
        row += q
    assert (scores[row:] == -math.inf).all()


@pytest.mark.covers("F196")
@each_scorer
@pytest.mark.parametrize("query_dtype", QUERY_TYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=str)
def test_scores_agree_and_need_nothing_that_no_query_sees(kernel, query_dtype, dtype, device):
    """Blocks of others, slots after the last key, entries after the last block: NaN and garbage change no bit."""
    answers = []
    for poison in (HARMLESS, POISON):
        query, weights, pool, batch, _ = lay_out(dtype=dtype, poison=poison, device=device)
        query = query.to(query_dtype)
        plan = plan_of(batch)
        with order.use_kernel(kernel):
            answers.append(fastattn.sparse.scores(query, weights, pool, plan))
    assert torch.equal(*answers)
    expected = refattn.sparse.scores(query, weights, pool, plan)
    assert torch.equal(expected.isinf(), answers[0].isinf())
    torch.testing.assert_close(answers[0], expected, rtol=1e-4, atol=2e-4)


@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
def test_queries_become_float16_and_their_weights_take_the_power_of_two(device):
    """What bfloat16 holds and float16 does not is divided out; in float32 here, which the interpreter has."""
    from fastattn.kernels.triton import index_keys as triton_sparse

    torch.manual_seed(0)
    query = (torch.randn(4, 3, 20) * torch.tensor([1.0, 1e-30, 1e30, 300.0])[:, None, None]).bfloat16().float()
    query[0, 1], query[3, 2, 5], query[3, 0, 7] = 0.0, math.inf, math.nan
    weights = torch.randn(4, 6)[:, ::2].half()
    halves, of_halves = triton_sparse._in_float16(query.to(device)[..., :19], weights.to(device))
    assert halves.dtype == torch.float16 and of_halves.dtype == torch.float32 and halves.shape == (4, 3, 19)
    power = of_halves.cpu() / weights.float()
    assert torch.equal(power.frexp().mantissa, torch.full((4, 3), 0.5)) and power[0, 1] == 1.0
    again = halves.cpu().double() * power.double()[..., None]
    largest = query[..., :19].abs().amax(-1, keepdim=True).double()
    finite = largest.isfinite().expand_as(again)
    assert ((again - query[..., :19]).abs() <= largest * 2**-25)[finite].all()
    assert halves[3, 2, 5] == math.inf and halves[3, 0, 7].isnan()
    assert (halves.cpu().abs().amax(-1)[finite[..., 0]] < 2).all()


MASKS = {
    "window": lambda batch: plan_of(batch, window_size=(9, 0)),
    "all": lambda batch: plan_of(batch, causal=False),
    "intervals": lambda batch: refattn.interval.plan(
        batch,
        **Intervals(
            torch.arange(17, dtype=torch.int32, device=batch.device) % 5,
            I32([60, 3, -1, 69, 8, 29, 2, 2, 20, 21, 0, 29, 1, 0, -5, 40, 9]).to(batch.device),
        )._asdict(),
        block_size=8,
    ),
}


@pytest.mark.core
@pytest.mark.covers("F196")
@each_scorer
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_scores_under_other_masks(kernel, mask, device):
    query, weights, pool, batch, _ = lay_out(device=device)
    with order.use_kernel(kernel):
        scores = fastattn.sparse.scores(query, weights, pool, mask(batch))
    torch.testing.assert_close(scores, refattn.sparse.scores(query, weights, pool, mask(batch)), rtol=1e-4, atol=2e-4)


@pytest.mark.core
@pytest.mark.covers("F196")
@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
@pytest.mark.parametrize(
    ("lens", "mask", "page"),
    every_pair_on_cpu([CASE.lens, ((1, 70), (0, 9), (1, 33), (1, 1), (1, 0))], [None, (9, 0)], [8, 32]),
    ids=str,
)
def test_a_program_scores_several_steps_of_keys(lens, mask, page, monkeypatch, device):
    """As with long contexts: steps without visible keys before and after those that are scored, and fewer at the end.

    A step has keys of several blocks, or of one.
    """
    from fastattn.kernels.triton import index_keys as triton_sparse

    monkeypatch.setattr(triton_sparse, "BLOCK_N", 16)
    monkeypatch.setattr(triton_sparse, "STEPS", 3)
    monkeypatch.setattr(triton_sparse, "sms_of", lambda device: 1)
    case, answers = Case("steps", lens, heads=(4, 2), block_size=page, padding_rows=2), []
    for poison in (HARMLESS, POISON):
        query, weights, pool, batch, _ = lay_out(case, poison=poison, device=device)
        query = query.half() if page == 32 else query  # this one multiplies quantized values in pairs
        plan = plan_of(batch, case, window_size=mask) if mask else plan_of(batch, case)
        with order.use_kernel("triton"):
            answers.append(fastattn.sparse.scores(query, weights, pool, plan))
    assert torch.equal(*answers)
    expected = refattn.sparse.scores(query, weights, pool, plan)
    assert torch.equal(expected.isinf(), answers[0].isinf())
    torch.testing.assert_close(answers[0], expected, rtol=1e-4, atol=2e-4)


@each_scorer
def test_no_bit_of_a_score_depends_on_the_rest_of_the_batch(kernel, device):
    query, weights, pool, batch, _ = lay_out(device=device)
    alone = make_batch([7], [30], [batch.block_table[2].tolist()], device=device)
    with order.use_kernel(kernel):
        whole = fastattn.sparse.scores(query, weights, pool, plan_of(batch))
        row = fastattn.sparse.scores(query[5:12], weights[5:12], pool, plan_of(alone))
        one = make_batch([1], [30], [batch.block_table[2].tolist()], device=device)
        last = fastattn.sparse.scores(query[11:12], weights[11:12], pool, plan_of(one))
    assert torch.equal(row, whole[5:12, :30])
    assert torch.equal(last, whole[11:12, :30])


def test_scores_and_selection_are_those_of_transformers():
    """`DeepseekV32Indexer`, with its own norms and rotations, in float32."""
    pytest.importorskip("transformers.models.deepseek_v32")
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, apply_rotary_pos_emb

    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=24, q_lora_rank=12, qk_rope_head_dim=8, index_n_heads=4, index_head_dim=16, index_topk=6
    )
    indexer = DeepseekV32Indexer(config, 0).eval()
    hidden, residual = torch.randn(1, 20, 24), torch.randn(1, 20, 12)
    angles = torch.rand(1, 20, 4).repeat(1, 1, 2) * 6
    rotation = (angles.cos(), angles.sin())
    causal = torch.ones(20, 20, dtype=torch.bool).tril()[None]
    theirs = indexer(hidden, residual, rotation, causal, None)[0]

    with torch.no_grad():
        query = indexer.wq_b(residual).view(1, 20, 4, 16)
        key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
        turned = apply_rotary_pos_emb(query[..., :8], key[..., :8], *rotation, unsqueeze_dim=2)
        query, key = (torch.cat([one, x[..., 8:]], -1) for one, x in zip(turned, (query, key), strict=True))
        weights = indexer.weights_proj(hidden) * 4**-0.5 * 16**-0.5
    batch = make_batch([20], [20], [[1, 0, 2]])
    pool = refattn.sparse.allocate(3, 8, index_size=16, dtype=torch.float32)
    refattn.sparse.write(key[0, :, 0], pool, torch.tensor([*range(8, 16), *range(8), *range(16, 20)]))
    for twin in TWINS:
        scores = twin.scores(query[0], weights[0], pool, plan_of(batch))
        selected = twin.select(scores, 6)
        for row in range(20):
            ours = [j for j in selected[row].tolist() if j >= 0]
            assert len(ours) == min(6, row + 1)
            if row >= 6 and (scores[row, : row + 1] == 0).sum() < 2:  # no ties, where any choice is theirs
                assert ours == sorted(theirs[row].tolist())
    assert not torch.allclose(scores[19, :6], torch.zeros(6))


@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
def test_a_layer_replays_the_scores_of_another_under_the_same_plan(device):
    batch = make_batch([1, 2], [30, 70], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], device=device)
    plan = Plan(batch, 16)
    for layer, stored in enumerate([torch.float32, torch.float32, torch.uint8, torch.uint8]):
        g = torch.Generator().manual_seed(layer)
        query, weights = torch.randn(3, 4, 8, generator=g).to(device), torch.randn(3, 4, generator=g).to(device)
        index = torch.zeros(10, 16, 8 if stored.is_floating_point else 12, dtype=stored, device=device)
        with order.use_kernel("triton"):
            fastattn.sparse.write(torch.randn(160, 8, generator=g).to(device), index, torch.arange(160, device=device))
            scores, alone = (fastattn.sparse.scores(query, weights, index, own) for own in (plan, replace(plan)))
        assert torch.equal(scores, alone)
        assert len(memo_of(plan).launches) == 1 + layer // 2


# --- the selection ---


def by_hand(numbers, topk):
    """Take the best one after the other, each time the first of the highest."""
    left = {j: x for j, x in enumerate(numbers) if x != -math.inf}
    taken = []
    while left and len(taken) < topk:
        highest = next((j for j, x in left.items() if math.isnan(x)), None)
        if highest is None:
            highest = next(j for j, x in left.items() if x == max(left.values()))
        taken.append(highest)
        del left[highest]
    return sorted(taken) + [-1] * (topk - len(taken))


def plateaus():
    """Scores with many ties: sums of ReLUs that are exactly 0, of either sign, and few distinct numbers."""
    torch.manual_seed(0)
    rows = torch.randn(9, 90).sub(1.0).relu()  # most are 0
    rows[1] = 0.0
    rows[2] = torch.where(torch.rand(90) > 0.5, -0.0, 0.0)
    rows[3, 40:] = -math.inf
    rows[4, ::7] = math.nan
    rows[5] = torch.randint(-2, 3, (90,)).float()
    rows[6] = -math.inf
    rows[7, 11], rows[7, 50] = math.inf, -torch.finfo(torch.float32).max
    rows[8] = -rows[0]
    return rows


@pytest.mark.core
@pytest.mark.covers("F197")
@each_twin
@pytest.mark.parametrize("topk", [1, 6, 33, 120])
def test_equal_scores_go_to_the_lower_position(twin, topk):
    scores = plateaus()
    expected = [by_hand(row, topk) for row in scores.tolist()]
    assert twin.select(scores, topk).tolist() == expected
    assert expected[1] == (list(range(topk)) if topk <= 90 else [*range(90), *[-1] * 30])  # a plateau is a prefix


@pytest.mark.core
@pytest.mark.covers("F197")
@each_selector
@given(data=st.data())
def test_drawn_scores_are_selected_as_by_hand(kernel, data, device):
    numbers = data.draw(st.lists(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1e-45, 2.0, 2.0000002]), min_size=1))
    topk = data.draw(st.integers(1, 12))
    scores = torch.tensor([numbers, numbers[::-1]])
    with order.use_kernel(kernel):
        selected = fastattn.sparse.select(scores.to(device), topk)
    assert selected.tolist() == [by_hand(row, topk) for row in scores.tolist()]


@pytest.mark.core
@pytest.mark.covers("F197")
@each_selector
def test_a_long_row_more_ties_than_a_step_holds_and_any_strides(kernel, device):
    torch.manual_seed(0)
    scores = torch.randn(3, 5003).sub(1.5).relu()
    scores[1] = 0.0
    scores[2] = torch.randn(5003) * 1e-30
    spread = scores.new_full((5003, 7), math.nan)
    spread[:, ::3] = scores.T
    for topk in (1, 1024, 3000):
        expected = refattn.sparse.select(scores, topk)
        with order.use_kernel(kernel):
            assert torch.equal(fastattn.sparse.select(spread.to(device)[:, ::3].T, topk).cpu(), expected)
            whole = fastattn.sparse.select(scores.to(device), topk).cpu()
            assert torch.equal(whole, expected)
            for row in (2, 0):  # a row alone, and in another place
                assert torch.equal(fastattn.sparse.select(scores[row : row + 1].to(device), topk).cpu()[0], whole[row])
            assert torch.equal(fastattn.sparse.select(scores.flip(0).to(device), topk).cpu(), whole.flip(0))


def in_splits(length):
    """Scores over many splits of 32: plateaus across them, at their borders, and whole splits without a key."""
    torch.manual_seed(0)
    rows = torch.randn(8, length).sub(1.0).relu()  # most are 0
    rows[1, ::3] = -0.0
    rows[2] = 3.5
    rows[3, 40:-17] = -math.inf
    rows[4] = torch.randn(length) * 1e-40  # denormal
    rows[4, 63:65], rows[4, 200:201] = math.nan, math.inf
    rows[5] = -math.inf
    rows[6] = -torch.arange(length).float()
    rows[7, : length // 2] = math.nan
    return rows


@pytest.fixture
def short_splits(monkeypatch):
    """Rows of more than 64 scores are long ones, filtered by 32; nothing that is read is left from before."""
    from fastattn.kernels.triton import sparse as triton_sparse

    sizes = dict(SHORT=64, SHORT_OF_MANY=64, EVERY=4, MOST_SAMPLED=64, SPARE=0, FILTER_BLOCK=32, CANDIDATE_BLOCK=64)
    for name, value in (sizes | dict(CANDIDATE_COLUMNS=8)).items():
        monkeypatch.setattr(triton_sparse, name, value)
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: torch.full(shape, -7, **more))
    return triton_sparse


@pytest.mark.core
@pytest.mark.covers("F197")
@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
@pytest.mark.parametrize(
    ("length", "topk", "bits", "most"), [(317, 193, 5, 64), (193, 8, 5, 64), (300, 64, 8, 3), (70, 80, 5, 64)]
)
def test_long_rows_are_selected_from_by_their_candidates(length, topk, bits, most, short_splits, monkeypatch, device):
    for name, value in (("BITS", bits), ("MOST_SPLITS", most), ("MOST_FILTERED", 7 * length)):  # 7 rows, and then one
        monkeypatch.setattr(short_splits, name, value)
    rows = in_splits(length)
    scores = torch.full((length, 17), math.nan)[:, ::2][:, :8].T.copy_(rows)  # any strides
    with order.use_kernel("triton"):
        selected = fastattn.sparse.select(scores.to(device), topk).cpu()
    assert torch.equal(selected, refattn.sparse.select(rows, topk))


@pytest.mark.core
@pytest.mark.covers("F197")
@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
def test_a_sample_that_misleads_costs_time_alone(short_splits, monkeypatch, device):
    """Where too few scores are candidates, or too many for their room, the row itself is read."""
    by_position, pivot = torch.arange(300.0, device=device)[None], torch.zeros(1, device=device)
    sampled, made = [], []
    for rank in range(1, 65):
        short_splits._sample_kernel[(1,)](
            by_position, pivot, by_position.stride(), 300, rank, SAMPLE=64, SPARE=-1, BITS=5, OVERLAP=False
        )
        sampled.append(int(pivot))
    assert len(set(sampled)) == 64
    torch.manual_seed(0)
    rows = torch.randn(4, 300)
    rows[0, sampled] += 100.0
    rows[1, sampled] -= 100.0
    rows[2] = 0.0
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: made.append(empty(*shape, **more)) or made[-1])
    for topk in (40, 2):
        made.clear()
        with order.use_kernel("triton"):
            selected = fastattn.sparse.select(rows.to(device), topk).cpu()
        assert torch.equal(selected, refattn.sparse.select(rows, topk))
        (counts,) = (x.sum(1).tolist() for x in made if x.ndim == 3)  # candidates, and those above the pivot
        if topk == 40:
            assert counts[0][0] < topk, "and there are more keys"
        else:
            room = made[-1].shape[1]
            assert room < 300 and counts[1][0] > room and counts[1][1] > topk
            assert counts[2] == [300, 0], "a plateau, of which the first are taken"
            assert topk < counts[3][1] and counts[3][0] <= room


@each_selector
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_select_from(kernel, shape, device):
    with order.use_kernel(kernel):
        selected = fastattn.sparse.select(torch.zeros(*shape, device=device), 4)
    assert selected.shape == (shape[0], 4) and (selected == -1).all()


# --- slots and plans ---


def drawn_positions(case=CASE, k=12, seed=0):
    """Draw what each query is to see, in any order, with -1 anywhere; of queries and of padding."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for q, s in case.lens:
        for _ in range(q):
            row = torch.full((k,), -1, dtype=torch.int32)
            count = int(torch.randint(0, min(s, k) + 1, (1,), generator=random))
            at = torch.randperm(k, generator=random)[:count]
            row[at] = torch.randperm(s, generator=random)[:count].int()
            rows.append(row)
    return torch.stack([*rows, *[torch.full((k,), 99, dtype=torch.int32)] * case.padding_rows])


@pytest.mark.core
@pytest.mark.covers("F198")
@each_twin
def test_slots_and_the_plan_that_they_are(twin, device):
    batch = build(CASE, device=device).batch
    positions = drawn_positions().to(device)
    slots = twin.slots(batch, positions, block_size=8).tolist()
    plan = twin.plan(batch, positions=positions, block_size=8)
    assert (plan.block_size, plan.window, plan.batch.max_query_len, plan.batch.max_seq_len) == (1, (-1, -1), 1, 12)
    row, sequences = 0, []
    table, lens = plan.batch.block_table.tolist(), plan.batch.seq_lens.tolist()
    for i, (q, _) in enumerate(CASE.lens):
        for _ in range(q):
            wanted = [-1 if j < 0 else int(batch.block_table[i, j // 8]) * 8 + j % 8 for j in positions[row].tolist()]
            assert slots[row] == wanted
            seen = [slot for slot in wanted if slot >= 0]  # moved together, in their order
            assert table[row][: len(seen)] == seen and lens[row] == len(seen)
            sequences.append(i)
            row += 1
    assert slots[row:] == [[-1] * 12] * 2
    assert plan.batch.cu_seqlens_q.tolist()[: row + 1] == list(range(row + 1))
    assert set(plan.batch.cu_seqlens_q.tolist()[row:]) == {row}
    assert plan.sequences.tolist()[:row] == sequences


@pytest.mark.core
@pytest.mark.covers("F198")
@each_selector
@pytest.mark.parametrize("lens", [CASE.lens, ((0, 0), (0, 6), *[(1, 9)] * 3, (0, 0), (2, 19), (1, 0))])
def test_each_kernel_makes_the_plan_that_the_reference_makes(kernel, lens, monkeypatch, device):
    """From any strides, some sequences and keys at a time, with rows of padding and sequences without a query."""
    if kernel == "triton":
        from fastattn.kernels.triton import sparse as triton_sparse

        monkeypatch.setattr(triton_sparse, "BLOCK_SEQS", 2)
        monkeypatch.setattr(triton_sparse, "BLOCK_KEYS", 4)
    case = Case("many", lens, heads=(4, 2), block_size=8, padding_rows=2)
    batch, positions = build(case, device=device).batch, drawn_positions(case, k=11)
    table = torch.full((batch.num_seqs, 2 * batch.block_table.shape[1]), GARBAGE[0], dtype=torch.int32, device=device)
    table[:, ::2] = batch.block_table
    batch = replace(batch, block_table=table[:, ::2])
    spread = torch.full((len(positions), 22), 5, dtype=torch.int32)
    spread[:, ::2] = positions
    used, sequences = int(batch.cu_seqlens_q[-1]), [i for i, (q, _) in enumerate(lens) for _ in range(q)]
    expected = refattn.sparse.plan(batch, positions=positions.to(device), block_size=8).batch
    with order.use_kernel(kernel):
        plan = fastattn.sparse.plan(batch, positions=spread.to(device)[:, ::2], block_size=8)
        slots = fastattn.sparse.slots(batch, spread.to(device)[:, ::2], block_size=8)
    assert slots.tolist() == refattn.sparse.slots(batch, positions.to(device), block_size=8).tolist()
    assert plan.sequences.tolist() == [*sequences, len(lens) - 1, len(lens) - 1] and plan.sequences.dtype == torch.int32
    assert plan.batch.cu_seqlens_q.tolist() == [*range(used + 1), used, used]
    assert plan.batch.seq_lens.tolist() == [*expected.seq_lens.tolist(), 0, 0]
    table, width = plan.batch.block_table, expected.block_table.shape[1]
    assert torch.equal(table[:used, :width].cpu(), expected.block_table.clamp(min=0).cpu())
    assert table.shape == (used + 2, 11) and not table[:, width:].any() and not table[used:].any()


@each_selector
def test_without_sequences_or_blocks_no_key_is_found(kernel, device):
    for batch in (make_batch([], [], [], device=device), make_batch([1], [0], [[]], device=device)):
        for shape in ((2, 3), (2, 0), (1, 0)):
            positions = torch.full(shape, -1, dtype=torch.int32, device=device)
            with order.use_kernel(kernel):
                plan = fastattn.sparse.plan(batch, positions=positions, block_size=8).batch
                assert torch.equal(fastattn.sparse.slots(batch, positions, block_size=8), positions)
            assert plan.block_table.shape == shape and not plan.block_table.any() and not plan.seq_lens.any()
            used = batch.num_seqs
            assert plan.cu_seqlens_q.tolist() == [min(row, used) for row in range(shape[0] + 1)]


@each_selector
def test_a_position_that_a_sequence_does_not_have_is_followed_by_no_query(kernel, monkeypatch, device):
    """On a device nothing is read; there it is none."""
    batch = build(CASE, device=device).batch
    monkeypatch.setattr(fastattn.sparse, "check_selected", lambda batch, positions, block_size: batch.block_table)
    positions = drawn_positions()
    positions[4] = I32([3, 9, 2**31 - 1, -7, 8, -(2**31), *[-1] * 6])  # positions among 9 keys
    with order.use_kernel(kernel):
        slots = fastattn.sparse.slots(batch, positions.to(device), block_size=8)[4].tolist()
        plan = fastattn.sparse.plan(batch, positions=positions.to(device), block_size=8).batch
    assert [slot >= 0 for slot in slots[:6]] == [True, False, False, False, True, False]
    assert plan.block_table[4].tolist() == [slots[0], slots[4], *[0] * 10] and int(plan.seq_lens[4]) == 2


# --- attention ---


def attended_by_hand(query, keys, values, positions, *, scale, sinks=None):
    """Softmax over the listed keys of each row, in float64; one that is listed twice counts twice."""
    out = torch.zeros(*query.shape[:2], values[0].shape[-1], dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    row, group = 0, query.shape[1] // keys[0].shape[1]
    for key, value, (q, _) in zip(keys, values, CASE.lens, strict=True):
        for r in range(row, row + q):
            seen = [j for j in positions[r].tolist() if j >= 0]
            for head in range(query.shape[1]):
                terms = [
                    math.exp(float(query[r, head].double() @ key[j, head // group].double()) * scale) for j in seen
                ]
                total = sum(terms) + (0.0 if sinks is None else math.exp(float(sinks[head])))
                for weight, j in zip(terms, seen, strict=True):
                    out[r, head] += weight / total * value[j, head // group].double()
                if total:
                    lse[r, head] = math.log(total)
        row += q
    return out, lse


@pytest.mark.core
@pytest.mark.covers("F199")
@each_twin
def test_attention_over_pages_is_the_formula(twin):
    inputs = build(CASE, dtype=torch.float64)
    positions = drawn_positions()
    positions[0] = I32([5, 5, -1, 60, 5, *[-1] * 7])  # twice and thrice: counted so
    sinks = torch.linspace(-1, 1, 4)
    plan = twin.plan(inputs.batch, positions=positions, block_size=8)
    for options in ({}, dict(sinks=sinks)):
        given = AttentionOptions(softmax_scale=0.3, **options)
        out, lse = twin.attention(*inputs.tensors[:3], plan, given, return_lse=True)
        expected = attended_by_hand(inputs.query, inputs.keys, inputs.values, positions, scale=0.3, **options)
        torch.testing.assert_close(out, expected[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(lse, expected[1], rtol=1e-9, atol=1e-11)


def hold(kernel, device, latents, batch_invariant=False):
    """Hold a kernel to the reference over pages or latents, with poison in every key that was not selected."""
    answers, expected = [], []
    rank = 48
    for poison in (HARMLESS, POISON):
        inputs = build(CASE, dtype=kernel.dtypes[0], poison=poison, device=device)
        positions = drawn_positions().to(device)
        plan, twin_plan = (twin.plan(inputs.batch, positions=positions, block_size=8) for twin in TWINS)
        seen = {
            slot
            for row, length in zip(plan.batch.block_table.tolist(), plan.batch.seq_lens.tolist(), strict=True)
            for slot in row[:length]
        }
        for pool in (inputs.key_cache, inputs.value_cache):
            flat = pool.flatten(0, 1)
            for at, slot in enumerate(x for x in range(len(flat)) if x not in seen):
                flat[slot] = poison[at % len(poison)]
        garbage = torch.tensor(GARBAGE, dtype=torch.int32, device=device).repeat(6)
        for i, length in enumerate(twin_plan.batch.seq_lens.tolist()):
            twin_plan.batch.block_table[i, length:] = garbage[: 12 - length]
        options = AttentionOptions(
            softmax_scale=0.2, sinks=torch.randn(4, device=device) * 0, batch_invariant=batch_invariant
        )
        more = dict(latent_rank=rank, return_lse=True) if latents else dict(return_lse=True)
        pools = [inputs.key_cache[:, :, 0]] if latents else [inputs.key_cache, inputs.value_cache]
        name = "latent_attention" if latents else "attention"
        answers.append(getattr(fastattn.sparse, name)(inputs.query, *pools, twin_plan, options, **more))

        def reference(*tensors, more=more, name=name, return_lse=True):
            return getattr(refattn.sparse, name)(*tensors, **more)

        tensors = (inputs.query, *pools, plan, options)  # moved to the CPU together
        assert_matches_reference(*answers[-1], reference, *tensors)
        expected.append(reference(*tensors))
    for one, other in (expected,) if kernel.recomputed else (answers, expected):  # by another kernel: other bits
        assert all(map(torch.equal, one, other))


@pytest.mark.covers("F199")
@each_kernel
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_each_kernel_attends_to_selected_pages_and_to_nothing_else(kernel, batch_invariant, device):
    with kernel.forced():
        kernel.check(hold, kernel, device, False, batch_invariant)


@pytest.mark.core
@pytest.mark.covers("F199")
@pytest.mark.parametrize("kernel", PRESENT_FOR_LATENTS, ids=lambda kernel: kernel.name)
def test_each_kernel_attends_to_selected_latents_and_to_nothing_else(kernel, device):
    with kernel.forced():
        kernel.check(hold, kernel, device, True)


@pytest.mark.core
@pytest.mark.covers("F199")
@each_twin
def test_with_fewer_visible_keys_than_topk_it_is_dense_attention(twin, device):
    query, weights, pool, batch, _ = lay_out(device=device)
    inputs = build(CASE, device=device)
    dense = plan_of(batch)
    selected = twin.select(twin.scores(query, weights, pool, dense), 70)
    plan = twin.plan(batch, positions=selected, block_size=8)
    options = AttentionOptions(softmax_scale=0.3)
    for ours, theirs in (
        (
            twin.attention(*inputs.tensors[:3], plan, options),
            refattn.chunked_prefill.attention(*inputs.tensors[:3], dense, options),
        ),
        (
            twin.latent_attention(inputs.query, inputs.key_cache[:, :, 0], plan, options, latent_rank=48),
            refattn.mla.attention(inputs.query, inputs.key_cache[:, :, 0], dense, options, latent_rank=48),
        ),
    ):
        assert_close(ours, theirs, theirs)


@pytest.mark.core
@pytest.mark.covers("F199")
@each_twin
def test_the_plan_reads_quantized_values_under_the_scales_of_each_sequence(twin, device):
    """What a plan of another path says of its sequences, this one does too."""
    module = refattn.quantized if twin is refattn.sparse else fastattn.quantized
    inputs = build(CASE, poison=HARMLESS, device=device)
    quantized_values = [x.to(torch.float8_e4m3fn) for x in (inputs.key_cache, inputs.value_cache)]
    numbers = torch.rand(5, 2, device=device) + 0.5
    positions = drawn_positions().to(device)
    plan = twin.plan(inputs.batch, positions=positions, block_size=8)
    pools = [twin.by_token("pool", x.view(torch.uint8)).view(torch.float8_e4m3fn) for x in quantized_values]
    out = module.attention(inputs.query, *pools, plan, scales=Fp8Scales(numbers, 0.5))
    keys, values = (
        [
            torch.stack([pool[int(inputs.batch.block_table[i, j // 8]), j % 8].float().cpu() for j in range(s)])
            for i, (_, s) in enumerate(CASE.lens)
        ]
        for pool in quantized_values
    )
    keys = [key * numbers[i, :, None].cpu() for i, key in enumerate(keys)]
    expected, _ = attended_by_hand(inputs.query.cpu(), keys, [v * 0.5 for v in values], positions.cpu(), scale=64**-0.5)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-3, atol=1e-3)


def test_a_pool_whose_tokens_do_not_follow_one_another_is_refused_by_name():
    """The reference reads it; the twin would have to copy the pool."""
    inputs = build(Case("heads-first", ((2, 20),), heads=(4, 2), block_size=8, layout="HND"))
    positions = I32([[0, 5, 19], [3, -1, 2]])
    plan = refattn.sparse.plan(inputs.batch, positions=positions, block_size=8)
    out = refattn.sparse.attention(*inputs.tensors[:3], plan)
    rows = [x.contiguous() for x in (inputs.key_cache, inputs.value_cache)]
    torch.testing.assert_close(fastattn.sparse.attention(inputs.query, *rows, plan), out, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="key_cache: a pool is read token by token"):
        fastattn.sparse.attention(*inputs.tensors[:3], plan)


# --- bad input ---


def bad_scores(**changes):
    query, weights, pool, batch, _ = lay_out()
    return dict(query=query, weights=weights, index_cache=pool, plan=plan_of(batch)) | changes


BAD = {
    "allocate": (
        lambda twin: twin.allocate(2, 4, index_size=6),
        "index_size: expected a multiple of 4 in bytes, got 6",
    ),
    "no-block": (lambda twin: twin.allocate(0, 4), "num_blocks: expected a positive int"),
    "write-size": (
        lambda twin: twin.write(torch.zeros(2, 5), twin.allocate(2, 4, index_size=8), torch.tensor([0, 1])),
        r"key: expected \[t, d=8\], got float32 \[2, 5\]",
    ),
    "write-type": (
        lambda twin: twin.write(
            torch.zeros(1, 8), twin.allocate(2, 4, index_size=8, dtype=torch.float16), torch.tensor([0])
        ),
        "key: expected torch.float16",
    ),
    "write-past-the-pool": (
        lambda twin: twin.write(torch.zeros(1, 8), twin.allocate(2, 4, index_size=8), torch.tensor([8])),
        "slot_mapping: expected slots in 0..7",
    ),
    "write-twice": (
        lambda twin: twin.write(torch.zeros(2, 8), twin.allocate(2, 4, index_size=8), torch.tensor([3, 3])),
        "slot_mapping: expected each slot once, got slot 3",
    ),
    "bytes-apart": (
        lambda twin: twin.write(torch.zeros(1, 8), twin.allocate(2, 4, index_size=12)[:, :, :12], torch.tensor([0])),
        "index_cache: expected the bytes of a block side by side",
    ),
    "query-size": (
        lambda twin: twin.scores(**bad_scores(query=torch.zeros(17, 3, 8))),
        r"query: expected \[t=17, h=3, d=16\]",
    ),
    "weights": (lambda twin: twin.scores(**bad_scores(weights=torch.zeros(17, 2))), r"weights: expected \[t=17, h=3\]"),
    "e5m2": (
        lambda twin: twin.scores(**bad_scores(query=torch.zeros(17, 3, 16).to(torch.float8_e5m2))),
        "query: expected 16- or 32-bit values, or torch.float8_e4m3fn",
    ),
    "too-few-rows": (
        lambda twin: twin.scores(**bad_scores(query=torch.zeros(14, 3, 16), weights=torch.zeros(14, 3))),
        "query: expected at least 15 rows",
    ),
    "another-block-size": (
        lambda twin: twin.scores(**bad_scores(index_cache=twin.allocate(99, 16, index_size=16))),
        "index_cache: expected blocks of 8 tokens",
    ),
    "too-few-blocks": (
        lambda twin: twin.scores(**bad_scores(index_cache=twin.allocate(2, 8, index_size=16))),
        "index_cache: expected at least",
    ),
    "scores": (lambda twin: twin.select(torch.zeros(2, 3).double(), 1), r"scores: expected float32 \[t, s\]"),
    "topk": (lambda twin: twin.select(torch.zeros(2, 3), 0), "topk: expected a positive int"),
    "positions": (
        lambda twin: twin.plan(build(CASE).batch, positions=torch.zeros(15, 2), block_size=8),
        r"positions: expected int32 \[t, k\]",
    ),
    "past-the-sequence": (
        lambda twin: twin.plan(build(CASE).batch, positions=torch.full((15, 2), 9, dtype=torch.int32), block_size=8),
        "positions: expected 0..8, or -1 for none, of query row 4, got 9",
    ),
    "below": (
        lambda twin: twin.slots(build(CASE).batch, torch.full((15, 2), -2, dtype=torch.int32), block_size=8),
        "positions: expected 0..69, or -1 for none, of query row 0, got -2",
    ),
    "too-few": (
        lambda twin: twin.plan(build(CASE).batch, positions=torch.zeros(14, 2).int(), block_size=8),
        "positions: expected at least 15 rows",
    ),
    "no-pool": (lambda twin: twin.by_token("cache", torch.zeros(3, 4)), "cache: expected a pool of blocks of tokens"),
}


@pytest.mark.core
@pytest.mark.covers("F198")
@each_twin
@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(twin, call, message, shapes_unchecked):
    with pytest.raises(ValueError, match=message):
        call(twin)


def test_a_bad_write_changes_nothing():
    for twin in TWINS:
        pool = twin.allocate(2, 4, index_size=8)
        with pytest.raises(ValueError, match="each slot once"):
            twin.write(torch.ones(3, 8), pool, torch.tensor([0, 2, 2]))
        assert not pool.any()


@each_twin
def test_a_gradient_does_not_get_lost_in_quantized_values(twin):
    """Scores of numbers have one in the reference; what is rounded, and the twin, refuse it."""
    key = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="gradient|backward"):
        twin.write(key, twin.allocate(2, 4, index_size=8), torch.arange(3))
    query, weights, pool, batch, _ = lay_out(dtype=torch.float32)
    query.requires_grad_()
    if twin is fastattn.sparse:
        with pytest.raises(NotImplementedError, match="backward"):
            twin.scores(query, weights, pool, plan_of(batch))
        return
    scores = twin.scores(query, weights, pool, plan_of(batch))
    scores[scores > -math.inf].sum().backward()
    assert query.grad[:15].abs().sum() > 0 and query.grad.isfinite().all() and not query.grad[15:].any()
