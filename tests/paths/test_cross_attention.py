"""Cross attention over pages: encoders of different lengths, in pages of their own or before the decoder's tokens."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import fastattn.chunked_prefill
import fastattn.kv_cache
import fastattn.metadata
import fastattn.quantized
import refattn.kv_cache
import refattn.metadata
from refattn import chunked_prefill, quantized, varlen
from tests.helpers.batches import Case, build, plan_and_attend
from tests.helpers.kernels_present import each_kernel
from tests.helpers.stored import E4M3, E5M2, store
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree
from twinattn.kit import assert_same_masks, read_masks

TWINS = {"refattn": refattn.metadata, "fastattn": fastattn.metadata}
each_twin = pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
# Query rows and encoder tokens of each request: prompts and decodes together, one request without an encoder.
CASE = Case("encoders", ((3, 40), (1, 17), (1, 0), (5, 64), (0, 9), (2, 1)), heads=(4, 2), padding_rows=2)
DECODER_LENS = [7, 30, 12, 5, 4, 2]  # tokens of the decoders, which cross attention does not see


def cross_batch(twin, inputs):
    """Make the batch of the decoders' step, and from it that of cross attention over the pages of a case."""
    b = inputs.batch
    tables = [
        blocks[: -(-s // CASE.block_size)] for blocks, (_, s) in zip(b.block_table.tolist(), CASE.lens, strict=True)
    ]
    step = twin.make_batch([q for q, _ in CASE.lens], DECODER_LENS, [[0] * 2 for _ in DECODER_LENS], device=b.device)
    return twin.make_cross_batch(step, [s for _, s in CASE.lens], tables)


@pytest.mark.covers("A37")
@each_twin
def test_the_batch_has_the_decoders_queries_and_the_encoders_keys(twin, device):
    inputs = build(CASE, device=device)
    batch = cross_batch(twin, inputs)
    assert batch.query_lens.tolist() == [q for q, _ in CASE.lens]
    assert batch.seq_lens.tolist() == [s for _, s in CASE.lens]
    assert (batch.max_seq_len, batch.max_query_len, batch.num_keys, batch.num_tokens) == (64, 5, 131, 12)
    assert batch.block_table.tolist() == [
        (blocks[: -(-s // CASE.block_size)] + [-1] * 4)[:4]
        for blocks, (_, s) in zip(inputs.batch.block_table.tolist(), CASE.lens, strict=True)
    ]
    rows = twin.make_cross_batch(twin.make_batch([1, 2], [9, 9], device=device), [4, 0])
    assert rows.block_table is None and rows.seq_lens.tolist() == [4, 0]


@pytest.mark.covers("A6", "A37", "D123")
@each_twin
def test_encoder_tokens_are_written_to_pages_of_their_own(twin, device):
    """Once, with the slots of the encoder's own batch: of 3 and of 5 tokens, of blocks of 4."""
    tables = [[6], [2, 9]]
    slots = twin.slot_mapping(twin.make_batch([3, 5], [3, 5], tables, device=device), 8, block_size=4)
    assert slots.tolist() == [24, 25, 26, 8, 9, 10, 11, 36]
    path = refattn.kv_cache if twin is refattn.metadata else fastattn.kv_cache
    tokens = torch.randn(2, 8, 2, 16, device=device)
    pools = path.allocate(10, 4, 2, 16, device=device)
    path.write(*tokens, *pools, slots)
    for written, pool in zip(tokens, pools, strict=True):
        expected = torch.zeros(40, 2, 16, device=device)
        expected[slots] = written
        assert torch.equal(pool.flatten(0, 1), expected)


@pytest.mark.covers("A32", "B50")
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_every_query_sees_its_whole_encoder(package, device):
    path = chunked_prefill if package == "refattn" else fastattn.chunked_prefill

    def call(query, key_cache, value_cache, batch, **options):
        whole = cross_batch(TWINS[package], inputs)
        return plan_and_attend(path, query, key_cache, value_cache, whole, causal=False, **options)

    inputs = build(CASE, device=device)
    masks = read_masks(call, CASE, device=device)
    assert_same_masks(masks, [torch.ones(q, s, dtype=torch.bool) for q, s in CASE.lens])


def test_pages_change_nothing(device):
    """The same encoders in rows and in pages: the reference answers alike, and as torch's own attention does."""
    inputs = build(CASE, dtype=torch.float64, device=device)
    out, lse = plan_and_attend(
        chunked_prefill, *inputs.tensors[:3], cross_batch(refattn.metadata, inputs), causal=False, return_lse=True
    )
    assert torch.equal(out, plan_and_attend(varlen, *inputs.rows, causal=False))
    for (q0, q1), key, value, (_, s) in zip(
        inputs.batch.query_rows(), inputs.keys, inputs.values, CASE.lens, strict=True
    ):
        if not s:
            assert (out[q0:q1] == 0).all() and (lse[q0:q1] == -torch.inf).all()
        elif q1 > q0:
            query, key, value = (x.transpose(0, 1) for x in (inputs.query[q0:q1], key, value))
            expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            torch.testing.assert_close(out[q0:q1], expected.transpose(0, 1), rtol=1e-11, atol=1e-12)


@pytest.mark.covers("A32")
@each_kernel
@pytest.mark.parametrize("options", [{}, dict(softcap=2.0)], ids=["plain", "softcap"])
def test_twins_agree(kernel, options, device):
    inputs = build(CASE, dtype=kernel.dtypes[0], device=device)
    batch = cross_batch(fastattn.metadata, inputs)
    with kernel.forced():
        kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors[:3], batch, causal=False, **options)


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("options", [{}, dict(softcap=2.0)], ids=["plain", "softcap"])
def test_twins_agree_over_quantized_values(kind, options, device):
    """The pages of an encoder hold quantized values as any others do, under scales for each encoder."""
    stored = store(CASE, kind, dtype=torch.float32 if device == "cpu" else torch.float16, device=device)
    batch = cross_batch(fastattn.metadata, stored)
    pools = [x.view(torch.uint8) if x.dtype in (E4M3, E5M2) else x for x in (stored.key_cache, stored.value_cache)]
    options = options | dict(causal=False, scales=stored.scales)
    out, lse = plan_and_attend(fastattn.quantized, stored.query, *pools, batch, **options, return_lse=True)
    assert_matches_reference(out, lse, partial(plan_and_attend, quantized), stored.query, *pools, batch, **options)


# --- the encoder's tokens before the decoder's, in one row ---


ROWS = Case("rows", ((2, 37), (1, 50), (3, 5), (1, 16)), heads=(4, 2))
ENCODER_LENS = [32, 16, 0, 16]


@pytest.mark.covers("D125")
@each_twin
def test_encoder_tokens_before_those_of_the_decoder(twin, device):
    """What each half reads, out of one row, is what it reads of pages of its own."""
    inputs = build(ROWS, device=device)
    cross, own = twin.split_encoder(inputs.batch, ENCODER_LENS, block_size=16)
    assert cross.seq_lens.tolist() == ENCODER_LENS
    assert own.seq_lens.tolist() == [s - e for (_, s), e in zip(ROWS.lens, ENCODER_LENS, strict=True)]
    assert (cross.max_seq_len, own.max_seq_len) == (32, 50)
    query, *pools = inputs.tensors[:3]
    for batch, part, causal in ((cross, lambda x, e: x[:e], False), (own, lambda x, e: x[e:], True)):
        rows = [
            torch.cat([part(x, e) for x, e in zip(kind, ENCODER_LENS, strict=True)])
            for kind in (inputs.keys, inputs.values)
        ]
        expected = plan_and_attend(varlen, query, *rows, batch, causal=causal)
        assert torch.equal(plan_and_attend(chunked_prefill, query, *pools, batch, causal=causal), expected)


def test_twins_split_alike(device):
    inputs = build(ROWS, device=device)
    parts = [twin.split_encoder(inputs.batch, ENCODER_LENS, block_size=16) for twin in TWINS.values()]
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one.seq_lens, other.seq_lens)
        used = torch.arange(one.block_table.shape[1], device=device) < -(-one.seq_lens[:, None] // 16)
        assert torch.equal(one.block_table[used], other.block_table[:, : used.shape[1]][used])
        for name in ("max_seq_len", "max_query_len", "num_keys", "num_tokens"):
            assert getattr(one, name) == getattr(other, name)


@each_twin
def test_bad_lengths_are_named(twin):
    batch = twin.make_batch([1, 1], [20, 40], [[0, 1], [2, 3, 4]])
    for lens, message in (
        ([16], "encoder_lens: expected 2, one per sequence, got 1"),
        ([16, 20], "encoder_lens: expected multiples of the block size 16, got 20"),
        ([32, 16], "encoder_lens: expected at most the 20 tokens of sequence 0, got 32"),
        ([-16, 16], "encoder_lens: expected a Python int of at least 0, got -16"),
    ):
        with pytest.raises(ValueError, match=message):
            twin.split_encoder(batch, lens, block_size=16)
    with pytest.raises(ValueError, match="encoder_lens: expected 2, one per sequence, got 1"):
        twin.make_cross_batch(batch, [16], [[0]])


@each_twin
def test_a_wrong_number_of_keys_changes_no_batch(twin):
    """`Batch` says of it that it costs time; it may be less than the encoders have."""
    batch = twin.make_batch([1, 1], [20, 40], [[0, 1], [2, 3, 4]])
    right = twin.split_encoder(batch, [16, 32], block_size=16)
    for num_keys, left in ((0, 0), (48, 0), (60, 12), (10**12, 10**12 - 48)):
        cross, own = twin.split_encoder(replace(batch, num_keys=num_keys), [16, 32], block_size=16)
        assert own.num_keys == left and cross.num_keys == 48
        for one, other in zip((cross, own), right, strict=True):
            assert torch.equal(one.seq_lens, other.seq_lens) and torch.equal(one.block_table, other.block_table)
