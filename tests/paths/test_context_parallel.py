"""Keys of a sequence on several ranks: the answer is that of one machine, however they are dealt out."""

import re
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import pytest
import torch

import fastattn.context_parallel
import refattn.context_parallel
import refattn.recurrent
from refattn import chunked_prefill, metadata
from refattn.options import RecurrentOptions
from refattn.ranks import DistributedGroup, Group, Shard, simulate_ranks
from refattn.scales import Fp8Scales
from tests.helpers.bad_input import MOST
from tests.helpers.batches import Case, build, masks_by_hand
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair, every_pair_on_cpu
from tests.helpers.ranks import CASES, CUTS, attend_on_all, convolve_part, draw_channels, fold_on_all
from tests.helpers.states import draw, draw_states, ints, lengths
from tests.helpers.stored import KINDS, Stored, rounded_by_hand, store
from tests.helpers.tolerance import assert_matches_reference
from tests.table import LEFT, RIGHT, rule
from twinattn.kit import PathSpec, plan_and_attend

PACKAGES = {"refattn": refattn.context_parallel, "fastattn": fastattn.context_parallel}


@dataclass(frozen=True)
class OverRanks(PathSpec):
    """A path whose batch is dealt out to simulated ranks, and whose answer is put together again."""

    num_ranks: int = 2

    def __str__(self) -> str:
        return f"{self.num_ranks}-ranks-{super().__str__()}"

    def call(self, package, *tensors, **options):
        return attend_on_all(package, self.num_ranks, *tensors, **{**self.arguments, **options})


SPECS = [
    OverRanks("context_parallel", rule(**arguments), arguments, num_ranks=num_ranks)
    for num_ranks, arguments in (
        (2, dict(interleave=1)),
        (4, dict(interleave=16)),
        (4, dict(interleave=3, window_size=(LEFT, 0))),
        (2, dict(interleave=2, causal=False)),
        (2, dict(interleave=3, window_size=(LEFT, RIGHT), causal=False)),
    )
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_package = pytest.mark.parametrize("package", PACKAGES)
each_pair = pytest.mark.parametrize(("package", "case", "spec"), every_pair_on_cpu(PACKAGES, CASES, SPECS), ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_shard = pytest.mark.parametrize("num_ranks, interleave", [(1, 1), (2, 1), (2, 16), (3, 2), (4, 5)])


# --- five proofs ---


@pytest.mark.covers("B87", "B181")
@each_pair
def test_mask(spec, case, package, device):
    spec.check_mask(package, case, device=device)


@each_pair
def test_poison(spec, case, package, device):
    dtype = torch.float16 if device == "cuda" else torch.float32
    with fastattn.use_kernel("triton" if device == "cuda" else "cpu"):
        spec.check_poison(package, case, device=device, dtype=dtype)


@pytest.mark.covers("B87")
@each_case
@each_spec
def test_formula(spec, case):
    spec.check_formula(case)


@pytest.mark.covers("B86", "B88", "B89", "B90", "B181")
@pytest.mark.parametrize(("kernel", "case", "spec"), every_pair_on_cpu(PRESENT, CASES, SPECS), ids=str)
def test_twins(spec, case, kernel, device):
    with kernel.forced():
        kernel.check(spec.check_twins, case, device=device, dtype=kernel.dtypes[0])


@pytest.mark.parametrize(
    "options",
    [dict(softcap=2.0, softmax_scale=0.3), dict(sinks=torch.linspace(-2.0, 3.0, 4)), dict(window_size=(5, 0))],
    ids=["softcap", "sinks", "window"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twins_with_options(options, dtype, device):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    SPECS[0].check_twins(CASES[0], device=device, dtype=dtype, **options)


@pytest.mark.covers("B220")
@pytest.mark.parametrize("planned_by", PACKAGES)
def test_a_plan_of_either_twin_serves_both(planned_by, monkeypatch, device):
    """The window of the context is in it, which the reference reads as positions and the twin as a window."""
    tensors = build(CASES[0], device=device).tensors
    for path in PACKAGES.values():
        monkeypatch.setattr(path, "plan", PACKAGES[planned_by].plan)
    options = dict(interleave=2, window_size=(LEFT, 0))
    answer = attend_on_all("fastattn", 2, *tensors, **options, return_lse=True)
    assert_matches_reference(*answer, partial(attend_on_all, "refattn", 2), *tensors, **options)


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(interleave=17), "shard: expected runs of at most block_size=16 tokens, got interleave=17"),
        (dict(interleave=0), "interleave: expected a positive int"),
        (dict(block_size=0), "block_size: expected a positive int"),
        (dict(block_size=8), "key_cache: expected blocks of 8 tokens"),
        (dict(window_size=(-2, 0)), "window_size: expected (left, right)"),
        (dict(causal=None), "causal: expected True or False, got None"),
        (dict(sinks=torch.zeros(3)), "sinks: expected floating point [h=2]"),
        (dict(out=torch.zeros(2, 4, 64)), "out: expected float32 [t=3, h=2, dv=64]"),
        (dict(return_lse=None), "return_lse: expected True or False"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_arguments(package, bad, message):
    inputs = build(Case("small", ((2, 5), (1, 20))))
    with pytest.raises(ValueError, match=re.escape(message)):
        attend_on_all(package, 2, *inputs.tensors, **{"interleave": 1, **bad})


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_group_that_is_not_that_of_the_plan_is_named(package):
    path = PACKAGES[package]
    batch = metadata.make_batch([1], [9], [[0, 1]])
    query, cache = torch.zeros(1, 2, 8), torch.zeros(2, 4, 2, 8)
    plan = path.plan(batch, shard=Shard(1, 2), block_size=4)
    rows = query, query, query, cache, cache
    for group, came in ((None, "None"), (simulate_ranks(2, lambda group: group)[0], "rank 0 of 2")):
        with pytest.raises(ValueError, match=f"group: expected rank 1 of 2, as in the plan, got {came}"):
            path.attention(*rows, plan, group=group)
    with pytest.raises(ValueError, match="plan: expected a ContextParallelPlan, got refattn.plan.Plan"):
        path.attention(*rows, plan.context, group=simulate_ranks(2, lambda group: group)[1])
    three, pool = torch.zeros(1, 3, 8), torch.zeros(2, 4, 3, 8)  # 6 heads in pairs, and a pair on two ranks
    with pytest.raises(ValueError, match="query: expected heads of each of 2 ranks that read whole KV heads of hk=3"):
        path.attention(three, three, three, pool, pool, plan, group=_Alone(1, 2))


@dataclass
class _Alone:
    """A group that must not be asked for anything."""

    rank: int
    size: int

    def all_gather(self, part, dim):
        raise AssertionError("asked before the arguments were checked")

    reduce_scatter = all_gather


@each_package
def test_more_new_tokens_than_keys_are_named(package):
    with pytest.raises(ValueError, match=r"seq_lens: expected the new tokens in them, \[5\], got \[2\]"):
        PACKAGES[package].plan(metadata.make_batch([5], [2], [[0]]), shard=Shard(0, 2), block_size=4)


# --- against the whole ---


@pytest.mark.covers("B86", "B89", "B221")
@pytest.mark.parametrize("kind", ["plain", "window", "alibi", "sinks", "everything"])
@each_shard
@each_package
def test_the_answer_is_that_of_one_machine(package, kind, num_ranks, interleave):
    """In float64, so that only a wrong mask, position or weight makes a difference."""
    case = replace(CASES[0], heads=(12, 3 if num_ranks == 3 else 1))
    options = {}
    if kind in ("window", "everything"):
        options["window_size"] = (LEFT, 0)
    if kind in ("alibi", "everything"):
        options["alibi_slopes"] = torch.linspace(0.1, 1.0, 12, dtype=torch.float64)
    if kind in ("sinks", "everything"):
        options["sinks"] = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64)
    tensors = build(case, dtype=torch.float64).tensors
    whole = plan_and_attend(chunked_prefill, *tensors, **options, return_lse=True)
    parts = attend_on_all(package, num_ranks, *tensors, interleave=interleave, **options, return_lse=True)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_the_twin_refuses_the_root_of_the_distance_by_name():
    slopes = dict(alibi_slopes=torch.ones(4), alibi_sqrt=True)
    with pytest.raises(NotImplementedError, match="no kernel computes the root of the distance"):
        attend_on_all("fastattn", 2, *build(CASES[0]).tensors, interleave=1, **slopes)


@each_package
def test_rows_do_not_change_with_the_rest_of_the_batch(package):
    case = Case("invariant", ((3, 40), (1, 7), (1, 90)), heads=(4, 2))
    alone = Case("alone", case.lens[:1], heads=(4, 2))
    inputs = build(case)
    few = build(alone, keys=inputs.keys[:1], values=inputs.values[:1])
    few.query[:] = inputs.query[:3]
    options = dict(interleave=1, batch_invariant=True, return_lse=True)
    many = attend_on_all(package, 2, *inputs.tensors, **options)
    for one, other in zip(attend_on_all(package, 2, *few.tensors, **options), many, strict=True):
        assert torch.equal(one, other[:3])


# --- quantized caches ---

CODED = Case("coded", ((4, 6), (1, 70), (10, 33), (9, 9), (1, 1), (1, 2)), heads=(4, 2), padding_rows=2)


def quantized_step(kind: str, *, dtype=torch.float64, device="cpu", **options) -> tuple[tuple, dict, Stored]:
    """Return what `attend_on_all` takes: new tokens as numbers, contexts as 8-bit values; and what these stand for."""
    stored = store(CODED, kind, dtype=dtype, device=device, **options)
    tensors = build(CODED, dtype=dtype, device=device).tensors
    quantized = dict(quantized=(stored.key_cache, stored.value_cache), scales=stored.scales)
    return (stored.query, *tensors[1:3], stored.batch), quantized, stored


def attended_by_hand(stored: Stored, sees, slopes=None) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, one head of one sequence at a time: rounded queries over the context, queries over the new tokens."""
    inputs, rounded = build(CODED, dtype=torch.float64), rounded_by_hand(stored)
    out = torch.zeros(*rounded.shape[:2], stored.value_cache.shape[3], dtype=torch.float64)
    lse, row = torch.full(rounded.shape[:2], -torch.inf, dtype=torch.float64), 0
    masks = masks_by_hand(CODED, sees)
    for i, ((q, s), mask) in enumerate(zip(CODED.lens, masks, strict=True)):
        rows = slice(row, row + q)
        distance = torch.tensor([[s - q + t - j for j in range(s)] for t in range(q)]).abs()
        for head in range(4):
            of_head = head // 2
            before = rounded[rows, head] @ stored.keys[i][: s - q, of_head].double().T
            new = stored.query[rows, head].double() @ inputs.keys[i][s - q :, of_head].T
            scores = torch.cat([before, new], 1) / 8
            scores = scores if slopes is None else scores - slopes[head] * distance
            values = torch.cat([stored.values[i][: s - q, of_head].double(), inputs.values[i][s - q :, of_head]])
            weights = scores.exp() * mask
            out[rows, head], lse[rows, head] = weights @ values / weights.sum(1, keepdim=True), weights.sum(1).log()
        row += q
    return out, lse


MASKED = {"causal": {}, "window": dict(window_size=(LEFT, 0)), "both-ways": dict(causal=False)}


@pytest.mark.covers("B182", "B220")
@pytest.mark.parametrize(
    ("dealt", "kind", "package"),
    every_pair_on_cpu(
        [(2, 1, "causal"), (4, 3, "causal"), (2, 16, "window"), (4, 3, "window"), (2, 1, "both-ways")], KINDS, PACKAGES
    ),
    ids=str,
)
def test_quantized_values_of_the_ranks_are_attended_to_by_hand(dealt, kind, package):
    num_ranks, interleave, masked = dealt
    tensors, quantized, stored = quantized_step(kind)
    arguments = MASKED[masked]
    parts = attend_on_all(
        package, num_ranks, *tensors, **quantized, interleave=interleave, **arguments, return_lse=True
    )
    for one, other in zip(parts, attended_by_hand(stored, rule(**arguments)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("per", ["number", "head"])
def test_distances_are_those_of_the_whole_over_quantized_values(per):
    slopes = torch.linspace(0.1, 1.0, 4, dtype=torch.float64)
    tensors, quantized, stored = quantized_step("e4m3", per=per, round_query=False)
    parts = attend_on_all("refattn", 2, *tensors, **quantized, interleave=3, alibi_slopes=slopes, return_lse=True)
    for one, other in zip(parts, attended_by_hand(stored, rule(), slopes), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.covers("B182")
@pytest.mark.parametrize(
    ("options", "kind", "kernel"), every_pair_on_cpu(["few-options", "more-options"], KINDS, PRESENT), ids=str
)
def test_twins_over_quantized_values(options, kind, kernel, device):
    tensors, quantized, _ = quantized_step(kind, dtype=kernel.dtypes[0], device=device)
    more = dict(softcap=2.0, softmax_scale=0.3, window_size=(LEFT, 0)) if options == "more-options" else {}
    options = dict(more, interleave=2, sinks=torch.linspace(-2.0, 3.0, 4, device=device), **quantized)

    def hold():
        answer = attend_on_all("fastattn", 2, *tensors, **options, return_lse=True)
        assert_matches_reference(*answer, partial(attend_on_all, "refattn", 2), *tensors, **options)

    with kernel.forced():
        kernel.check(hold)


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(scales=None), "key_cache: expected float32 [n, p, hk, d=64], got float8_e4m3fn"),
        (dict(scales=1.0), "scales: expected Fp8Scales or Int8Scales, got 1.0"),
        (dict(scales=Fp8Scales(torch.ones(3), 1.0)), "scales.key: expected a number or float32 [hk=2] or [b=6, hk=2]"),
        (
            dict(scales=Fp8Scales(1.0, 1.0, format=torch.float8_e5m2)),
            "key_cache: expected float8_e5m2 [n, p, hk, d=64]",
        ),
    ],
    ids=["none", "number", "heads", "format"],
)
def test_bad_scales_are_named(package, bad, message):
    tensors, quantized, _ = quantized_step("e4m3", dtype=torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        attend_on_all(package, 2, *tensors, **{**quantized, **bad}, interleave=1)


# --- who has what ---


@pytest.mark.covers("B84")
@each_package
@each_shard
def test_every_token_lies_on_one_rank(package, num_ranks, interleave):
    path = PACKAGES[package]
    for length in (0, 1, 5, 16, 33, 64):
        places = [path.own_positions(length, Shard(rank, num_ranks, interleave)).tolist() for rank in range(num_ranks)]
        assert sorted(sum(places, [])) == list(range(length))
        for rank, own in enumerate(places):
            # the formula of a position, from its place on the rank
            turn = num_ranks * interleave
            assert own == [k // interleave * turn + rank * interleave + k % interleave for k in range(len(own))]
            count = path.local_lens(torch.tensor([length], dtype=torch.int32), Shard(rank, num_ranks, interleave))
            assert count.tolist() == [len(own)]


@pytest.mark.covers("B84")
@each_package
def test_local_lengths_of_a_difference(package):
    """2 of 9 tokens are new: of the 7 before them rank 0 has 4, though it has 5 of 9 and of 2 it would have 1 or 2."""
    shard = Shard(0, 2, 2)
    whole, context, new = torch.tensor([9, 7, 2], dtype=torch.int32).split(1)
    local = PACKAGES[package].local_lens
    assert [int(local(x, shard)) for x in (whole, context, new)] == [5, 4, 2]


@pytest.mark.covers("B91")
@each_shard
def test_slots_lead_back_to_the_keys(num_ranks, interleave):
    """Tokens written by the slots of each rank, in steps, lie where its share of them is read."""
    block_size, lens = 16, [(5, 40), (1, 1), (33, 33), (2, 71)]
    tables = [[3, 9, 11, 4, 14], [2], [7, 1, 12], [0, 5, 13, 6, 8]]
    batch = metadata.make_batch(*zip(*lens, strict=True), tables)
    whole = metadata.make_batch([s for _, s in lens], [s for _, s in lens], tables)  # as if all tokens were new
    num_rows = sum(s for _, s in lens)
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks, interleave)
        slots, twins = (
            path.slot_mapping(whole, num_rows + 2, shard=shard, block_size=block_size) for path in PACKAGES.values()
        )
        assert torch.equal(slots, twins)
        rows = 0
        for (_, length), blocks in zip(lens, tables, strict=True):
            written = slots[rows : rows + length]
            own = refattn.context_parallel.own_positions(length, shard)
            expected = [blocks[k // block_size] * block_size + k % block_size for k in range(len(own))]
            assert written[own].tolist() == expected
            assert (written >= 0).sum() == len(own)
            rows += length
        assert slots[rows:].tolist() == [-1, -1]
        few = PACKAGES["fastattn"].slot_mapping(batch, 41, shard=shard, block_size=block_size)
        assert torch.equal(few, refattn.context_parallel.slot_mapping(batch, 41, shard=shard, block_size=block_size))
        assert few[:5].tolist() == slots[35:40].tolist()


@each_package
def test_a_table_too_narrow_for_the_new_tokens_is_named(package):
    batch = metadata.make_batch([1], [33], [[0]])
    with pytest.raises(ValueError, match="block_table: expected at least 2 columns for the 17 keys of sequence 0"):
        PACKAGES[package].slot_mapping(batch, 1, shard=Shard(0, 2), block_size=16)


@each_shard
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
@pytest.mark.parametrize("window_size", [(-1, -1), (LEFT, 0)], ids=str)
def test_twins_make_the_same_plans(num_ranks, interleave, window_size, causal, device):
    inputs = build(CASES[0], device=device)
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks, interleave)
        plans = [
            path.plan(inputs.batch, shard=shard, block_size=16, window_size=window_size, causal=causal)
            for path in PACKAGES.values()
        ]
        assert plans[0].own.causal is causal
        for one, other in zip(*([plan.context, plan.own] for plan in plans), strict=True):
            assert (one.window, one.block_size) == (other.window, other.block_size)
            assert one.batch.max_seq_len == other.batch.max_seq_len >= int(one.batch.seq_lens.max())
            for name in ("cu_seqlens_q", "seq_lens"):
                assert torch.equal(getattr(one.batch, name), getattr(other.batch, name))
            assert (one.positions is None) == (other.positions is None)
            assert one.positions is None or torch.equal(one.positions, other.positions)


@pytest.mark.covers("B85")
@each_package
@pytest.mark.parametrize(
    ("longest", "num_ranks", "interleave", "bound"),
    [(64, 2, 1, 32), (65, 2, 1, 33), (64, 4, 16, 16), (65, 4, 16, 32), (70, 3, 5, 25), (1, 8, 16, 1), (70, 1, 16, 70)],
)
def test_the_longest_share_of_a_rank(package, longest, num_ranks, interleave, bound):
    """Runs of a whole round go to every rank, so `ceil(L / (N * I)) * I`, and no more than there are; reading nothing.

    A kernel divides its work by it: a bound as long as the sequence is one, but a rank's share is never so long.
    """
    batch = metadata.make_batch([1, 1], [longest, min(3, longest)], [[*range(5)], [5]])
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    batches = [batch]
    if package == "fastattn":  # the reference reads lengths wherever they are
        batches.append(replace(batch, **{name: getattr(batch, name).to("meta") for name in names}))
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks, interleave)
        plans = [PACKAGES[package].plan(one, shard=shard, block_size=16) for one in batches]
        assert [plan.context.batch.max_seq_len for plan in plans] == [bound] * len(plans)
        assert int(PACKAGES[package].local_lens(batch.seq_lens, shard).max()) <= bound


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_what_is_no_length_of_a_rank_is_named(package):
    path, shard = PACKAGES[package], Shard(0, 2)
    ints = torch.tensor([3, 4], dtype=torch.int32)
    for lens, message in (
        (ints.float(), "lens: expected int32 [b], got float32 [2]"),
        (ints.long(), "lens: expected int32 [b], got int64 [2]"),
        ([3, 4], "lens: expected int32 [b], got list"),
        (ints - 4, "lens: expected lengths of at least 0, got [-1, 0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            path.local_lens(lens, shard)
    with pytest.raises(ValueError, match="shard: expected a Shard, got 0"):
        path.local_lens(ints, 0)
    for length in (-1, 2.0, 2**31):
        with pytest.raises(ValueError, match="length: expected "):
            path.own_positions(length, shard)


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_new_token_of_a_rank_has_a_block(package):
    """A block of -1 has a row whose slot would be -1, and a write takes that for padding."""
    path, shard = PACKAGES[package], Shard(1, 2)
    batch = metadata.make_batch([2], [16], [[3, -1]])  # rank 1 has 8 of 16, and of the new ones the last, at its row 7
    with pytest.raises(
        ValueError, match="block_table: expected entries of at least 0 for the new tokens of sequence 0"
    ):
        path.slot_mapping(batch, 2, shard=shard, block_size=4)
    assert path.slot_mapping(batch, 2, shard=Shard(0, 2), block_size=8).tolist() == [31, -1]


@pytest.mark.covers("B85")
@pytest.mark.parametrize("window_size", [(-1, -1), (LEFT, 0)], ids=str)
def test_the_twin_plans_without_asking_the_device(window_size):
    """Tensors without contents are enough, so nothing waits for them, and a CUDA graph captures it."""
    batch, shard, path = build(CASES[0]).batch, Shard(1, 2, 3), fastattn.context_parallel
    tables = ("cu_seqlens_q", "seq_lens", "block_table")
    unknown = replace(batch, **{name: getattr(batch, name).to("meta") for name in tables})
    plans = [path.plan(one, shard=shard, block_size=16, window_size=window_size) for one in (batch, unknown)]
    for known, shapes in zip(*([plan.context, plan.own] for plan in plans), strict=True):
        assert known.batch.max_seq_len == shapes.batch.max_seq_len
        assert known.batch.seq_lens.shape == shapes.batch.seq_lens.shape
        assert (known.positions is None) or known.positions.shape == shapes.positions.shape
    slots = path.slot_mapping(unknown, 20, shard=shard, block_size=16)
    assert slots.shape == (20,) and slots.is_meta
    with pytest.raises(ValueError, match="num_tokens: expected the number of query rows, which a window needs"):
        path.plan(replace(unknown, num_tokens=None), shard=shard, block_size=16, window_size=(3, 0))


# --- groups ---


@pytest.mark.covers("B86")
def test_simulated_ranks_exchange():
    def exchange(group):
        part = torch.arange(4.0) + 10 * group.rank
        return group.all_gather(part, dim=0).tolist(), group.reduce_scatter(part, dim=0).tolist()

    assert simulate_ranks(2, exchange) == [
        ([0, 1, 2, 3, 10, 11, 12, 13], [10, 12]),
        ([0, 1, 2, 3, 10, 11, 12, 13], [14, 16]),
    ]
    assert isinstance(simulate_ranks(1, lambda group: group)[0], Group)


@pytest.mark.timeout(20)
def test_a_rank_that_fails_ends_the_others():
    def fail_on_one(group):
        if group.rank == 1:
            raise KeyError("one")
        return group.all_gather(torch.zeros(1), dim=0)

    with pytest.raises(KeyError, match="one"):
        simulate_ranks(3, fail_on_one)
    with pytest.raises(RuntimeError, match="waits for ranks that are done"):
        simulate_ranks(2, lambda group: None if group.rank else group.all_gather(torch.zeros(1), dim=0))


def test_a_group_needs_torch_distributed():
    with pytest.raises(ValueError, match="process_group: expected torch.distributed to be initialised"):
        DistributedGroup()


# --- states ---


@pytest.mark.covers("R213")
@pytest.mark.parametrize(
    ("num_ranks", "package", "options", "per_channel"),
    every_pair(CUTS, PACKAGES, [RecurrentOptions(), RecurrentOptions(0.7, delta=False)], [False, True]),
    ids=str,
)
def test_any_cut_into_ranks_is_the_whole(num_ranks, package, options, per_channel):
    """In float64, with gates of 0 and saturated ones; free slots and those of sequences that begin hold NaN."""
    batch, step = lengths((20, 0, 9, 1), (3, 5, 0, 2)), draw(30, per_channel=per_channel).to(torch.float64)
    cuts = [*CUTS[num_ranks], [1] * num_ranks]
    states = torch.full((7, 4, 6, 8), torch.nan, dtype=torch.float64)
    states[[2, 1]] = draw_states(2).double()
    tables = dict(state_indices=ints([2, 1, 0, -1]), block_size=8)
    tables["checkpoint_indices"] = ints([[3, 4], [-1, -1], [5, -1], [6, 6]])
    whole = states.clone()
    plan = refattn.recurrent.plan(batch, **tables)
    expected = refattn.recurrent.attention(*step, whole, plan, options)
    out, pools = fold_on_all(package, num_ranks, step, states, batch, cuts, options, **tables)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    assert not out[29].any(), "padding"
    for pool in pools:
        torch.testing.assert_close(pool[[2, 1, 0]], whole[[2, 1, 0]], rtol=1e-10, atol=1e-11)
        assert torch.equal(pool[1], states[1]) and pool[6].isnan().all(), "no rank has a new token there"
    kept = torch.stack([pool[3:6] for pool in pools])  # by the rank with the last token of the block
    assert (kept.isfinite().flatten(2).all(-1).sum(0) == 1).all()
    torch.testing.assert_close(kept.nan_to_num().sum(0), whole[3:6], rtol=1e-10, atol=1e-11)


@pytest.mark.covers("R213")
@each_package
@pytest.mark.parametrize("num_ranks", CUTS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_any_cut_into_ranks_is_the_whole_convolution(package, num_ranks, width):
    """Ranks may have fewer tokens than are kept, or none; a part then begins with inputs of several ranks."""
    batch, (channels, weights, last) = lengths((20, 0, 9, 1), (3, 5, 0, 2)), draw_channels(30, width, torch.float64)
    cuts = [*CUTS[num_ranks], [1] * num_ranks]
    states = torch.full((7, width - 1, 5), torch.nan, dtype=torch.float64)
    states[[2, 1]] = last[:2]
    tables = dict(state_indices=ints([2, 1, 0, -1]), block_size=8)
    tables["checkpoint_indices"] = ints([[3, 4], [-1, -1], [5, -1], [6, 6]])
    whole = states.clone()
    plan = refattn.recurrent.plan(batch, **tables)
    expected = refattn.recurrent.convolve(channels.inputs, weights[0], whole, plan, bias=weights[1])
    shown = channels, states, batch, cuts, weights
    out, pools = fold_on_all(package, num_ranks, *shown, of_part=convolve_part, **tables)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    assert not out[29].any(), "padding"
    for pool in pools:
        assert torch.equal(pool[[2, 1, 0]], whole[[2, 1, 0]]) and torch.equal(pool[1], states[1])
        assert pool[6].isnan().all()
    if width > 1:
        kept = torch.stack([pool[3:6] for pool in pools])  # by the rank with the last token of the block
        assert (kept.isfinite().flatten(2).all(-1).sum(0) == 1).all()
        assert torch.equal(kept.nan_to_num().sum(0), whole[3:6])


@pytest.mark.covers("R202")
@each_package
@pytest.mark.parametrize("lens", [(3, 0, 2), (0, 0, 0), (0, 3, 0)], ids=str)
def test_the_slot_of_a_sequence_without_tokens_on_any_rank_may_be_anything(package, lens):
    """No index is followed there. The second rank has no token at all, and yet the states of the first one."""
    batch, cuts = lengths(lens, (7, 5, 7)), [[length, length] for length in lens]
    channels, weights, last = draw_channels(sum(lens))

    def compute(slots):
        options = dict(state_indices=ints(slots))
        folded = fold_on_all(package, 2, draw(sum(lens)), draw_states(4), batch, cuts, RecurrentOptions(), **options)
        shown = channels, last, batch, cuts, weights
        return *folded, *fold_on_all(package, 2, *shown, of_part=convolve_part, **options)

    out, pools, mixed, inputs = compute([3, 0, 1])
    for entry in (MOST, 4, -MOST - 1):
        slots = [slot if length else entry for slot, length in zip([3, 0, 1], lens, strict=True)]
        answers = compute(slots)
        assert torch.equal(answers[0], out) and torch.equal(answers[2], mixed)
        assert all(map(torch.equal, answers[1], pools)) and all(map(torch.equal, answers[3], inputs))


@each_package
def test_pools_that_are_wider_than_the_inputs_lose_nothing(package):
    """A slot in float32 beside inputs in 16 bits loses nothing on its way, past a rank without any token either."""
    channels, weights, last = draw_channels(2, dtype=torch.bfloat16)
    batch, tables = lengths([2], [4]), dict(state_indices=ints([1]))
    whole = last.float() + 2.0**-20
    shown = channels, whole.clone(), batch, [[1, 1, 2]], weights
    plan = refattn.recurrent.plan(batch, **tables)
    expected = refattn.recurrent.convolve(channels.inputs, weights[0], whole, plan, bias=weights[1])
    out, pools = fold_on_all(package, 3, *shown, of_part=convolve_part, **tables)
    torch.testing.assert_close(out, expected)
    assert all(torch.equal(pool, whole) for pool in pools)


@pytest.mark.covers("R213")
@each_package
def test_maps_compose_in_order(package):
    """Of three runs of tokens in any grouping, and not the other way around; of nothing it is the identity."""
    path = import_module(f"{package}.recurrent")
    step = draw(9).to(torch.float64)
    maps = []
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
        plan = path.plan(lengths([rows.stop - rows.start], [rows.start]), state_indices=ints([0]))
        maps.append(path.state_map(*step.rows(rows)[1:], plan))
    whole = path.state_map(*step[1:], path.plan(lengths([9], [0]), state_indices=ints([0])))
    first, second, third = maps
    for composed in (path.compose(maps), path.compose([first, path.compose([second, third])])):
        for one, other in zip(composed, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(path.compose(maps[::-1]).added, whole.added)
    nothing = path.plan(lengths((0, 9), (4, 0)), state_indices=ints([0, -1]))
    factor, added = path.state_map(*step[1:], nothing)
    assert torch.equal(factor, torch.eye(8, dtype=torch.float64).expand(2, 4, 8, 8)) and not added.any()
    before = draw_states(1).double()
    after = before.clone()
    path.attention(*step, after, path.plan(lengths([9], [4]), state_indices=ints([0])))
    torch.testing.assert_close(before @ whole.factor + whole.added, after, rtol=1e-10, atol=1e-11)


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_parts_of_a_step_that_cannot_be_are_named(package):
    path, recurrent = PACKAGES[package], import_module(f"{package}.recurrent")
    step, states = draw(2), draw_states(3)
    plan = recurrent.plan(lengths([2], [0]), state_indices=ints([1]))
    drafts = recurrent.plan(lengths([2], [0]), state_indices=ints([[1, 2]]))
    before, one = states.clone(), recurrent.state_map(*step[1:], plan)
    channels, (weight, _, _), last = draw_channels(2)
    taps, last_before = (channels.inputs, weight), last.clone()
    for message, call in (
        ("plan: expected one slot", lambda: path.recurrent_attention(*step, states, drafts, group=_Alone(0, 2))),
        ("group: expected ranks, got None", lambda: path.recurrent_attention(*step, states, plan, group=None)),
        ("plan: expected one slot", lambda: path.recurrent_convolve(*taps, last, drafts, group=_Alone(0, 2))),
        ("group: expected ranks, got None", lambda: path.recurrent_convolve(*taps, last, plan, group=None)),
        ("states: expected", lambda: path.recurrent_convolve(*taps, last[:, 1:], plan, group=_Alone(0, 2))),
        (
            "value: expected",
            lambda: path.recurrent_attention(*step[:2], step.beta, *step[3:], states, plan, group=None),
        ),
        ("plan: expected a StatePlan", lambda: recurrent.state_map(*step[1:], None)),
        ("options: expected RecurrentOptions", lambda: recurrent.state_map(*step[1:], plan, None)),
        ("key: expected at least 2 rows", lambda: recurrent.state_map(*step.rows(slice(1))[1:], plan)),
        ("maps: expected at least one StateMap", lambda: recurrent.compose([])),
        ("maps[1].added: expected", lambda: recurrent.compose([one, one._replace(added=one.factor)])),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert torch.equal(states, before) and torch.equal(last, last_before)
