"""Packed latents: the bytes that are written, what every kernel reads of them under every plan, and what is refused."""

import math
import re
import struct
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

import fastattn.cascade
import fastattn.interval
import fastattn.kv_cache
import fastattn.mla
import fastattn.sliding_window
import fastattn.sparse
import fastattn.speculative
import refattn.cascade
import refattn.interval
import refattn.mla
import refattn.sliding_window
import refattn.sparse
import refattn.speculative
from fastattn.kernels import order
from refattn.batch import Prefix
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.packed_latents import packed_size
from tests.helpers.batches import Case, masks_by_hand
from tests.helpers.kernels_present import PRESENT_FOR_LATENTS
from tests.helpers.latents import OPTIONS, Latents, Sizes, filled, prefill
from tests.helpers.stored import E4M3, decoded
from tests.helpers.tolerance import assert_matches_reference
from twinattn.kit.tolerance import on_cpu

RANK, ROPE = 256, 8  # two groups
SIZES = Sizes(RANK, ROPE, 16, 24, 0)
SCALE = 24**-0.5
SPARE = 8  # unused bytes of a row
BYTES = packed_size(RANK, ROPE) + SPARE
MIXED = Case("mixed", ((4, 6), (1, 33), (10, 21), (0, 9), (5, 5)), heads=(4, 1), padding_rows=2)
KERNELS = [kernel for kernel in PRESENT_FOR_LATENTS if kernel.name in ("cpu", "triton")]
READERS = [
    pytest.param(refattn, nullcontext, id="ref"),
    *(pytest.param(fastattn, kernel.forced, id=kernel.name) for kernel in KERNELS),
]
each_reader = pytest.mark.parametrize(("package", "forced"), READERS)
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
each_twin = pytest.mark.parametrize("twin", [refattn.mla, fastattn.mla], ids=["ref", "fast"])
WRITERS = ["torch", *(kernel.name for kernel in KERNELS if kernel.name == "triton")]
NAN, ZERO = 0xFF, 0  # bytes: NaN as a quantized value, as a scale and as a number


def laid_out(case=MIXED, *, dtype=torch.float32, device="cpu", poison=NAN, sizes=SIZES, block_size=None):
    """Return a case with its pool packed, and all bytes that no query may see poisoned."""
    case = case if block_size is None else replace(case, block_size=block_size)
    given = Latents(case, dtype=dtype, sizes=sizes)
    rank, rope = sizes.rank, sizes.rope
    n, p = given.cache.shape[:2]
    pool = torch.full((n, p, packed_size(rank, rope) + SPARE), poison, dtype=torch.uint8)
    table, lens = given.batch.block_table, [len(x) for x in given.keys]
    slots = torch.cat([table[i, torch.arange(s) // p].long() * p + torch.arange(s) % p for i, s in enumerate(lens)])
    keys = torch.cat(given.keys).float()
    refattn.mla.write(keys[:, :rank], keys[:, rank:], pool, slots)
    given.packed, given.batch = pool.to(device), on_cpu(given.batch, device)
    given.rows = pool.view(n * p, -1)[slots].split(lens)  # one per sequence, in order
    return given


def by_hand(rows, rank, rope):
    """Read packed rows by the format alone, in float64."""
    latents = decoded(E4M3)[rows[:, :rank].long()]
    tail = [struct.unpack_from(f"<{rank // 128}f", bytes(row.tolist()), rank) for row in rows]
    scales = torch.tensor(tail, dtype=torch.float64).view(len(rows), -1).repeat_interleave(128, 1)
    begin = rank + rank // 32
    shorts = [struct.unpack_from(f"<{rope}H", bytes(row.tolist()), begin) for row in rows]
    floats = [[struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in row] for row in shorts]
    return torch.cat([latents * scales, torch.tensor(floats, dtype=torch.float64).view(len(rows), -1)], 1)


def attend(twin, query, cache, batch, *, plan=None, latent_rank=RANK, return_lse=True, out=None, **options):
    plan = twin.plan(batch, block_size=cache.shape[1]) if plan is None else plan
    asked = dict(latent_rank=latent_rank, return_lse=return_lse, out=out)
    return twin.attention(query, cache, plan, AttentionOptions(**options), **asked)


# --- the bytes ---


@pytest.mark.core
@pytest.mark.covers("F214")
@each_twin
def test_a_row_has_quantized_values_then_scales_then_the_rotary_key(twin):
    """Byte by byte, as vLLM writes them and FlashMLA reads them: 656 bytes with DeepSeek's sizes."""
    torch.manual_seed(0)
    pool = twin.allocate(3, 4, 512, 64, dtype=torch.uint8)
    assert pool.shape == (3, 4, 656) and pool.dtype == torch.uint8 and not pool.any()
    latent, rope_key = torch.randn(3, 512), torch.randn(3, 64)
    latent[2, 128:256] = 0.0
    latent[0, 256:384] *= 1e-3
    twin.write(latent, rope_key, pool, torch.tensor([6, -1, 9]))
    for token, (block, row) in ((0, (1, 2)), (2, (2, 1))):
        stored = bytes(pool[block, row].tolist())
        scales = struct.unpack_from("<4f", stored, 512)
        largest = latent[token].view(4, 128).abs().amax(1)
        expected = [float(x) / 448 if x else 2.0**-126 for x in largest]
        assert scales == pytest.approx(expected, rel=1e-6)
        numbers = by_hand(pool[block, row][None], 512, 64)[0]
        steps = largest.repeat_interleave(128) / 448 / 2 * 2**-5
        off = (numbers[:512] - latent[token]).abs()
        assert (off <= torch.maximum(latent[token].abs() / 16, steps)).all()
        assert torch.equal(numbers[512:].float(), rope_key[token].bfloat16().float())
    assert not pool[2, 1, 128:256].any(), "zeros are quantized values of zero"
    pool[1, 2] = pool[2, 1] = 0
    assert not pool.any()


@pytest.mark.core
@pytest.mark.covers("F214")
@pytest.mark.parametrize("kernel", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_both_packages_write_the_same_bytes(kernel, dtype, device):
    """Numbers of all sizes, NaN and infinity; any strides; neither padding nor spare bytes are touched."""
    torch.manual_seed(1)
    smallest = -30 if dtype == torch.bfloat16 else -42  # the interpreter reads no denormal numbers of bfloat16
    tokens = (torch.randn(40, RANK + ROPE) * torch.logspace(smallest, 4, 40)[:, None]).to(dtype)
    tokens[3, 4], tokens[5, 130], tokens[6], tokens[7, RANK + 1] = math.nan, math.inf, -0.0, math.inf
    slots = torch.randperm(48)[:40]
    slots[::9] = -1
    room = torch.full((6, 9, BYTES), 0x55, dtype=torch.uint8)
    pools = [room.clone()[:, 1:], room.clone().to(device)[:, 1:]]
    refattn.mla.write(tokens[:, :RANK], tokens[:, RANK:], pools[0], slots)
    apart = tokens.new_zeros(40, 2 * (RANK + ROPE) + 1)
    apart[:, 1::2] = tokens
    given = apart.to(device)[:, 1::2]
    with order.use_kernel(kernel):
        fastattn.mla.write(given[:, :RANK], given[:, RANK:], pools[1], slots.to(device))
    ours, theirs = (pool.cpu() for pool in pools)
    for row, group in ((3, slice(128)), (5, slice(128, RANK))):  # their bits are those of any NaN
        slot = slots[row].item()
        assert slot >= 0
        a, b = (by_hand(pool[slot // 8, slot % 8][None], RANK, ROPE) for pool in (ours, theirs))
        for numbers in (a[0], b[0]):
            assert numbers[group].isnan().all() and numbers.isnan().sum() == 128
        ours[slot // 8, slot % 8, group] = theirs[slot // 8, slot % 8, group]
        scale = RANK + 4 * (group.start is not None)
        ours[slot // 8, slot % 8, scale : scale + 4] = theirs[slot // 8, slot % 8, scale : scale + 4]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kernel", WRITERS)
def test_blocks_are_copied_as_bytes(kernel, device):
    """Those of a fork, and those that are swapped out and in again; whatever the bytes are as numbers."""
    pool = torch.randint(256, (6, 8, BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    given, host = pool.to(device), torch.zeros(2, 8, BYTES, dtype=torch.uint8)
    fork, out, back = (torch.tensor(x, device=device) for x in ([[4, 1]], [[0, 1], [3, 0]], [[1, 5], [0, 2]]))
    with order.use_kernel(kernel):
        fastattn.kv_cache.copy_blocks([given], fork)
        fastattn.kv_cache.swap_blocks([given], [host], out)
        fastattn.kv_cache.swap_blocks([host], [given], back)
    assert torch.equal(given.cpu(), pool[[0, 4, 3, 3, 4, 0]])


# --- the formula, and memory that no query may see ---


@pytest.mark.core
@pytest.mark.covers("F214")
@each_reader
def test_formula(package, forced, device):
    """Softmax in float64 over rows that are read by hand."""
    given = laid_out(device=device)
    with forced():
        out, lse = attend(package.mla, given.absorbed.to(device), given.packed, given.batch, softmax_scale=SCALE)
    row = 0
    for (q, _), rows, mask in zip(MIXED.lens, given.rows, masks_by_hand(MIXED, lambda i, j: j <= i), strict=True):
        key = by_hand(rows, RANK, ROPE)
        for head in range(4):
            weights = (given.absorbed[row : row + q, head].double() @ key.T * SCALE).exp() * mask
            total = weights.sum(-1)
            expected = weights @ key[:, :RANK] / total[:, None]
            torch.testing.assert_close(out[row : row + q, head].cpu().double(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[row : row + q, head].cpu().double(), total.log(), rtol=1e-5, atol=1e-5)
        row += q
    assert not out[row:].any() and (lse[row:] == -math.inf).all()


def positions_of(case, k=12, device="cpu"):
    """Draw what each query is to see: any keys of its sequence, in any order, with -1 between them."""
    torch.manual_seed(3)
    rows = torch.full((sum(q for q, _ in case.lens) + case.padding_rows, k), -1, dtype=torch.int32)
    row = 0
    for q, s in case.lens:
        for _ in range(q):
            some = torch.randperm(s)[: k - 3]
            rows[row, torch.randperm(k)[: len(some)]] = some.int()
            row += 1
    return rows.to(device)


@pytest.mark.covers("F214")
@each_reader
def test_no_bit_depends_on_what_no_query_may_see(package, forced, device):
    """Blocks of others, rows past the end, spare bytes, and under a selection every row that is not in it."""
    positions, answers = positions_of(MIXED, device=device), []
    for poison in (NAN, ZERO):
        given = laid_out(device=device, poison=poison)
        plan = package.sparse.plan(given.batch, positions=positions, block_size=16)
        seen = package.sparse.slots(given.batch, positions, block_size=16).cpu().flatten().unique()
        chosen = given.packed.clone()
        unseen = torch.ones(chosen.shape[0] * 16, dtype=torch.bool)
        unseen[seen[seen >= 0].long()] = False
        chosen.view(-1, BYTES)[unseen.to(device)] = poison
        options = AttentionOptions(softmax_scale=SCALE)
        asked = dict(latent_rank=RANK, return_lse=True)
        with forced():
            whole = attend(package.mla, given.absorbed.to(device), given.packed, given.batch, softmax_scale=SCALE)
            some = package.sparse.latent_attention(given.absorbed.to(device), chosen, plan, options, **asked)
        answers.append((*whole, *some))
    for poisonous, harmless in zip(*answers, strict=True):
        assert torch.equal(poisonous, harmless) and not poisonous.isnan().any()


# --- the twins, under every plan ---


def hold(given, plan_of, device, *, latent_rank=RANK, **options):
    """Hold the twin to the reference over the same bytes, by the one tolerance; and replayed, and into memory."""

    def by_reference(query, cache, batch, **asked):
        return attend(refattn.mla, query, cache, batch, plan=plan_of(refattn, batch), latent_rank=latent_rank, **asked)

    query = given.absorbed.to(device)
    plan, fixed = plan_of(fastattn, given.batch), dict(latent_rank=latent_rank, **options)
    out, lse = attend(fastattn.mla, query, given.packed, given.batch, plan=plan, **fixed)
    assert_matches_reference(out, lse, by_reference, query, given.packed, given.batch, **options)
    memory = torch.full_like(out, math.nan)
    again = attend(fastattn.mla, query, given.packed.clone(), given.batch, plan=plan, out=memory, **fixed)
    assert again[0] is memory and torch.equal(memory, out) and torch.equal(again[1], lse)


PARENTS = [(-1, 0, 0, 1), (-1,), (-1, 0, 0, 1, 2, 2, 3, -1, 7, 8), (), (-1, 0, -1, 2, 0)]


def under(package, batch, name):
    """Plan what a name says, over the batch that `MIXED` is."""
    pages = dict(block_size=16)
    if name == "window":
        return package.sliding_window.plan(batch, window_size=(6, 0), **pages)
    if name == "tree":
        trees = refattn.speculative.make_trees(PARENTS, device=batch.device)
        return package.speculative.plan(batch, trees=trees, **pages)
    if name == "intervals":
        t = int(batch.cu_seqlens_q[-1]) + MIXED.padding_rows
        ends = package.interval.diffusion_blocks(batch, t, diffusion_block=3)
        last = ends.last_visible.minimum(torch.tensor(4, dtype=torch.int32, device=batch.device))
        return package.interval.plan(batch, first_visible=ends.first_visible, last_visible=last, **pages)
    return package.mla.plan(batch, **pages)


@pytest.mark.core
@pytest.mark.covers("F214")
@each_kernel
@pytest.mark.parametrize("name", ["window", "tree", "intervals"])
def test_twins_agree_under_every_plan(kernel, name, device):
    given = laid_out(dtype=kernel.dtypes[0], device=device)
    with kernel.forced():
        hold(given, partial(under, name=name), device, softmax_scale=SCALE)


@each_kernel
@pytest.mark.parametrize("options", ["negative-scale", "invariant", "everything"])
def test_twins_agree_with_options(kernel, options, device):
    given = laid_out(dtype=kernel.dtypes[-1], device=device)
    with kernel.forced():
        hold(given, partial(under, name="chunk"), device, **filled(OPTIONS[options], 4, device))


def test_levels_merge(device):
    """A prefix that all share, and what is each sequence's own: one kernel for each, and a merge."""
    case = Case("levels", ((1, 20), (2, 19)), heads=(4, 1), block_size=16)
    given = laid_out(case, device=device)
    given.batch.block_table[1, 0] = given.batch.block_table[0, 0]

    def plan_of(package, batch):
        return package.cascade.plan(batch, prefixes=[Prefix(0, 2, 16)], block_size=16)

    hold(given, plan_of, device, softmax_scale=SCALE)


@each_kernel
def test_rows_of_deepseek_are_selected_from(kernel, device):
    """656 bytes, 16 heads, lists with -1 and a slot twice; the pool as it is, in pages of any size."""
    case = Case("selected", ((1, 70), (2, 33), (1, 1)), heads=(16, 1), block_size=24, padding_rows=1)
    given = laid_out(case, dtype=kernel.dtypes[0], device=device, sizes=Sizes(512, 64, 16, 24, 0))
    pool = given.packed[..., :656].contiguous()
    positions = positions_of(case, 20, device)
    positions[0, :2] = positions[0].max()

    def by(package, query, cache, batch, **asked):
        plan = package.sparse.plan(batch, positions=positions.to(batch.device), block_size=24)
        options = AttentionOptions(softmax_scale=SCALE)
        return package.sparse.latent_attention(query, cache, plan, options, latent_rank=512, **asked)

    query = given.absorbed.to(device)
    with kernel.forced():
        out, lse = by(fastattn, query, pool, given.batch, return_lse=True)
    assert_matches_reference(out, lse, partial(by, refattn), query, pool, given.batch)


@pytest.mark.parametrize(
    ("twin", "invariant"),
    [(refattn.mla, False), (refattn.mla, True), (fastattn.mla, False)],  # the twin has no invariant prefill
    ids=["ref", "ref-invariant", "fast"],
)
def test_a_prefill_reads_what_later_steps_read(twin, invariant):
    """Its new tokens are packed, too: the same answer as of absorbed queries over the pool, up to rounding."""
    given = laid_out(dtype=torch.float64)
    options = dict(softmax_scale=SCALE, batch_invariant=invariant)
    arguments = given.query, given.new, given.packed, *given.projections.values(), given.batch
    made, lse = prefill(twin, *arguments, workspace=12, **options)
    out, of_pool = attend(twin, given.absorbed, given.packed, given.batch, **options)
    whole = twin.project(out, given.projections["value_projection"])
    used = int(given.batch.cu_seqlens_q[-1])
    # A query of float64 reads float32 scales and bfloat16 rotary keys exactly; the twin reads a pool in float32.
    torch.testing.assert_close(made[:used], whole[:used], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:used], of_pool[:used], rtol=1e-5, atol=1e-6)


# --- what is refused ---


def small():
    batch = make_batch([1], [3], [[0]])
    return dict(query=torch.zeros(1, 2, 136), cache=torch.zeros(2, 4, 148, dtype=torch.uint8), batch=batch)


BAD = {
    "cache: expected packed rows of at least 148 bytes": dict(cache=torch.zeros(2, 4, 144, dtype=torch.uint8)),
    "cache: expected packed rows whose bytes lie side by side": dict(
        cache=torch.zeros(2, 4, 149, dtype=torch.uint8)[..., 1:]
    ),
    "cache: expected uint8 [n, p, c], got uint8 [2, 148]": dict(cache=torch.zeros(2, 148, dtype=torch.uint8)),
    "latent_rank: expected a multiple of 128": dict(latent_rank=130),
    "rope_size: expected an even number": dict(query=torch.zeros(1, 2, 131)),
    "latent_rank: expected less than the query's head size": dict(query=torch.zeros(1, 2, 128)),
    "cache_scale: expected 1 for a cache of uint8": dict(cache_scale=0.5),
    "query_scale: expected none for packed latents": dict(query_scale=0.5),
    "fp8_weights: expected none for packed latents": dict(fp8_weights=True),
    "softmax_scale: expected a number": dict(softmax_scale=None),
}


@each_twin
@pytest.mark.parametrize(("message", "changes"), BAD.items(), ids=BAD)
def test_what_does_not_fit_is_named(twin, message, changes):
    given = small() | dict(latent_rank=128, softmax_scale=0.1) | changes
    batch, options = given.pop("batch"), AttentionOptions(softmax_scale=given.pop("softmax_scale"))
    with pytest.raises(ValueError, match=re.escape(message)):
        twin.attention(given.pop("query"), given.pop("cache"), twin.plan(batch, block_size=4), options, **given)


@each_twin
def test_a_write_that_does_not_fit_writes_nothing(twin):
    pool = torch.full((2, 4, 148), 7, dtype=torch.uint8)
    latent, rope_key, slots = torch.ones(2, 128), torch.ones(2, 8), torch.tensor([0, 1])
    for message, changes in {
        "latent: expected a floating point type": dict(latent=latent.long()),
        "rope_key: expected float32": dict(rope_key=rope_key.half()),
        "latent_rank: expected a multiple of 128": dict(latent=torch.ones(2, 96)),
        "at least 148 bytes": dict(cache=pool[..., :144]),
        "slot_mapping: expected slots in 0..7": dict(slot_mapping=torch.tensor([0, 8])),
        "slot_mapping: expected each slot once": dict(slot_mapping=torch.tensor([1, 1])),
        "cache_scale: expected 1": dict(cache_scale=2.0),
    }.items():
        given = dict(latent=latent, rope_key=rope_key, cache=pool, slot_mapping=slots) | changes
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.write(**given)
    with pytest.raises(ValueError, match="latent_rank: expected a multiple of 128"):
        twin.allocate(2, 4, 96, 8, dtype=torch.uint8)
    assert (pool == 7).all()
