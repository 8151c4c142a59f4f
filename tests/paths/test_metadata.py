"""From requests to a batch: positions, slots, parts, the next step."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn.metadata
import refattn.metadata
from tests.helpers.batches import CASES, build, each_case, ragged_cases

each_twin = pytest.mark.parametrize("twin", [refattn.metadata, fastattn.metadata], ids=["ref", "fast"])


@pytest.mark.covers("A35", "A45")
@each_twin
def test_the_example_of_the_docstring(twin, device):
    batch = twin.make_batch([2, 1], [5, 7], [[9, 2], [4, 7]], device=device)
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3]
    assert batch.seq_lens.tolist() == [5, 7]
    assert batch.block_table.tolist() == [[9, 2], [4, 7]]
    assert (batch.max_query_len, batch.max_seq_len) == (2, 7)
    assert (batch.num_tokens, batch.num_keys) == (3, 12)
    assert batch.context_lens.tolist() == [3, 6]
    assert twin.positions(batch, 4).tolist() == [3, 4, 6, 0]
    assert twin.slot_mapping(batch, 4, block_size=4).tolist() == [39, 8, 30, -1]


@each_twin
def test_rows_of_different_length_are_filled_up(twin, device):
    batch = twin.make_batch([0, 1, 1], [0, 9, 3], [[], [5, 6, 7], [1]], device=device)
    assert batch.block_table.tolist() == [[-1, -1, -1], [5, 6, 7], [1, -1, -1]]


@each_twin
def test_no_requests_and_no_cache(twin, device):
    batch = twin.make_batch([], [], device=device)
    assert batch.num_seqs == 0 and batch.block_table is None and batch.cu_seqlens_q.tolist() == [0]
    assert twin.positions(batch, 2).tolist() == [0, 0]
    empty = twin.make_batch([], [], [], device=device)
    assert twin.slot_mapping(empty, 2, block_size=4).tolist() == [-1, -1]


@pytest.mark.covers("A42")
@each_twin
@pytest.mark.parametrize("blocks", [None, [[], []]], ids=["no-table", "no-columns"])
def test_tokens_before_there_is_a_cache_have_no_slots(twin, blocks, device):
    """In the run that finds out how much memory is left for a cache there are no blocks, and nothing is written."""
    batch = twin.make_batch([3, 1], [3, 9], blocks, device=device)
    assert twin.slot_mapping(batch, 5, block_size=4).tolist() == [-1] * 5
    assert twin.slot_mapping(batch, 5, block_size=4, window=2).tolist() == [-1] * 5
    assert twin.positions(batch, 5).tolist() == [0, 1, 2, 8, 0]


@pytest.mark.covers("A38")
@each_twin
@each_case
def test_slots_lead_back_to_the_keys(twin, case, device):
    """What the slot mapping says of a new token is where the pool has its key."""
    inputs = build(case, device=device)
    t = inputs.query.shape[0]
    slots, positions = twin.slot_mapping(inputs.batch, t, block_size=case.block_size), twin.positions(inputs.batch, t)
    row = 0
    for i, (q, s) in enumerate(case.lens):
        for j in range(s - q, s):
            assert int(positions[row]) == j
            if j < 0:
                assert int(slots[row]) == -1
            else:
                block, offset = divmod(int(slots[row]), case.block_size)
                assert torch.equal(inputs.key_cache[block, offset], inputs.keys[i][j])
            row += 1
    assert (slots[row:] == -1).all() and not positions[row:].any()


@pytest.mark.covers("A38")
@given(case=ragged_cases(), seed=st.integers(0, 999))
def test_twins_give_the_same_tables(case, seed, device):
    inputs = build(case, seed=seed, device=device)
    t = inputs.query.shape[0]
    for name, options in (("positions", {}), ("slot_mapping", dict(block_size=case.block_size))):
        ref, fast = (getattr(twin, name)(inputs.batch, t, **options) for twin in (refattn.metadata, fastattn.metadata))
        assert ref.dtype == fast.dtype == torch.int64 and torch.equal(ref, fast)


@pytest.mark.covers("A24", "B63", "B65", "B66")
@each_twin
@pytest.mark.parametrize(
    ("query_lens", "decode_len", "decodes", "prefills"),
    [
        ([1, 1, 5, 3], 1, [0, 1], [2, 3]),
        ([5, 3, 1, 1], 1, [2, 3], [0, 1]),
        ([1, 1], 1, [0, 1], []),
        ([4, 2], 1, [], [0, 1]),
        ([1, 4, 2, 9], 4, [0, 1, 2], [3]),
        ([0, 1, 7], 1, [0, 1], [2]),
        ([], 1, [], []),
    ],
    ids=["decodes-first", "prefills-first", "only-decodes", "only-prefills", "verification", "silent", "nothing"],
)
def test_split(twin, query_lens, decode_len, decodes, prefills, device):
    seq_lens = [length + 10 for length in query_lens]
    batch = twin.make_batch(query_lens, seq_lens, [[i] * 2 for i in range(len(seq_lens))], device=device)
    rows = [0]
    for length in query_lens:
        rows.append(rows[-1] + length)
    for part, members in zip(
        twin.split_decodes_and_prefills(batch, query_lens, decode_len=decode_len), (decodes, prefills), strict=True
    ):
        assert part.batch.seq_lens.tolist() == [seq_lens[i] for i in members]
        assert part.batch.query_lens.tolist() == [query_lens[i] for i in members]
        assert part.batch.cu_seqlens_q[0] == 0
        assert part.batch.block_table.tolist() == [[i] * 2 for i in members]
        assert part.batch.max_query_len == max((query_lens[i] for i in members), default=0)
        assert part.batch.num_tokens == sum(query_lens[i] for i in members)
        assert list(range(len(query_lens) and rows[-1]))[part.tokens] == [
            row for i in members for row in range(rows[i], rows[i + 1])
        ]


@pytest.mark.covers("B185")
@each_twin
@pytest.mark.parametrize(
    ("query_lens", "decode_len", "order"),
    [
        ([9, 1, 3, 1], 1, [1, 3, 0, 2]),
        ([9, 1, 3, 1], 3, [1, 2, 3, 0]),
        ([9, 1, 4, 1], 3, [1, 3, 0, 2]),
        ([1, 0, 1], 1, [0, 1, 2]),
        ([2, 5], 1, [0, 1]),
        ([2, 0, 1], 0, [1, 0, 2]),
        ([], 1, []),
    ],
    ids=str,
)
def test_decodes_come_first_and_all_else_keeps_its_order(twin, query_lens, decode_len, order):
    """So that the step can be split: drafts count as tokens of a decode."""
    assert twin.order_decodes_first(query_lens, decode_len=decode_len) == order
    lens = [query_lens[i] for i in order]
    decodes, prefills = twin.split_decodes_and_prefills(twin.make_batch(lens, lens), lens, decode_len=decode_len)
    assert all(length <= decode_len for length in decodes.batch.query_lens.tolist())
    assert all(length > decode_len for length in prefills.batch.query_lens.tolist())


@pytest.mark.covers("A36", "B66")
@each_twin
def test_parts_have_their_own_maxima(twin, device):
    """Of decodes beside a long prompt a kernel is asked for their own keys, where the host knows how many there are."""
    batch = twin.make_batch([1, 1, 90], [20, 33, 700], [[0] * 3, [1] * 3, [2] * 44], device=device)
    parts = twin.split_decodes_and_prefills(batch, [1, 1, 90], seq_lens=[20, 33, 700])
    assert [(part.batch.max_seq_len, part.batch.num_keys) for part in parts] == [(33, 53), (700, 700)]
    parts = twin.split_decodes_and_prefills(batch, [1, 1, 90])
    assert [part.batch.max_seq_len for part in parts] == [700, 700]
    with pytest.raises(ValueError, match=r"seq_lens: expected 3 lengths, one per sequence, got 2"):
        twin.split_decodes_and_prefills(batch, [1, 1, 90], seq_lens=[20, 33])
    if device == "cpu":
        with pytest.raises(ValueError, match=r"seq_lens: expected \[20, 33, 700\], as in the batch"):
            twin.split_decodes_and_prefills(batch, [1, 1, 90], seq_lens=[20, 34, 700])


@given(lens=st.lists(st.integers(0, 6), max_size=6), decode_len=st.integers(1, 3))
def test_each_part_has_all_of_its_kind_or_the_batch_is_refused(lens, decode_len):
    batch, split = refattn.metadata.make_batch(lens, lens), refattn.metadata.split_decodes_and_prefills
    is_decode = [length <= decode_len for length in lens]
    if is_decode not in (sorted(is_decode), sorted(is_decode, reverse=True)):
        with pytest.raises(ValueError, match=r"query_lens: expected all decodes"):
            split(batch, lens, decode_len=decode_len)
        return
    owners = [i for i, length in enumerate(lens) for _ in range(length)]  # the sequence of each query row
    for kind, part in zip((True, False), split(batch, lens, decode_len=decode_len), strict=True):
        members = [i for i, decodes in enumerate(is_decode) if decodes == kind]
        assert part.batch.seq_lens.tolist() == [lens[i] for i in members]
        assert owners[part.tokens] == [i for i in owners if i in members]


@pytest.mark.covers("A46")
@each_twin
def test_advance_goes_one_step_in_place(twin, device):
    """Decodes, a verification of two tokens, and a padding sequence that must stay as it is."""
    batch = twin.make_batch([1, 2, 0, 1], [3, 6, 0, 8], [[7, 1], [3, 4], [], [5, 6, 0]], device=device)
    slots = twin.slot_mapping(batch, 5, block_size=4)
    assert slots.tolist() == [30, 16, 17, 27, -1]
    kept = batch.seq_lens.data_ptr(), slots.data_ptr()
    longer = twin.advance(batch, slots, block_size=4)
    assert longer.seq_lens.tolist() == batch.seq_lens.tolist() == [4, 8, 0, 9]
    assert slots.tolist() == [31, 18, 19, 0, -1]
    assert (longer.seq_lens.data_ptr(), slots.data_ptr()) == kept
    assert longer.max_seq_len == 10 and longer.max_query_len == 2


@each_twin
def test_advance_past_the_table_changes_nothing(twin):
    batch = twin.make_batch([1, 1], [3, 4], [[7], [3]])
    slots = twin.slot_mapping(batch, 2, block_size=4)
    with pytest.raises(ValueError, match="block_table: expected at least 2 columns for the 5 keys of sequence 1"):
        twin.advance(batch, slots, block_size=4)
    assert batch.seq_lens.tolist() == [3, 4] and slots.tolist() == [30, 15]


@pytest.mark.covers("B67")
@each_twin
def test_the_table_of_another_group(twin, device):
    batch = twin.make_batch([1, 2], [5, 6], [[0, 1], [2, 3]], device=device)
    table = torch.tensor([[9, 8], [7, 6]], dtype=torch.int32, device=device)
    other = twin.update_block_table(batch, table)
    assert other.block_table is table and other.seq_lens is batch.seq_lens
    assert twin.slot_mapping(other, 3, block_size=4).tolist() == [32, 24, 25]
    assert twin.slot_mapping(batch, 3, block_size=4).tolist() == [4, 12, 13]


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_decodes_behind_a_prefill_are_named(twin):
    with pytest.raises(ValueError, match=r"expected all decodes \(at most 1 tokens\)"):
        twin.split_decodes_and_prefills(twin.make_batch([1, 2, 1], [1, 2, 1]), [1, 2, 1])


def apart(*numbers):
    """Return some numbers with others between them in memory."""
    return torch.tensor([[number, 9] for number in numbers], dtype=torch.int32)[:, 0]


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_batch_that_cannot_be_is_named():
    """What its types cannot say; `test_every_argument` has values of other types."""
    batch = refattn.metadata.make_batch([1, 1], [1, 9], [[0], [1]])
    for changes, message in (
        (dict(seq_lens=batch.seq_lens[:1]), "cu_seqlens_q: expected int32 [b + 1=2]"),
        (dict(seq_lens=apart(1, 9)), "seq_lens: expected its entries side by side, got a stride of 2"),
        (dict(cu_seqlens_q=apart(0, 1, 2)), "cu_seqlens_q: expected its entries side by side, got a stride of 2"),
        (dict(max_query_len=-1), "max_query_len: expected a Python int of at least 0, got -1"),
        (dict(max_query_len=True), "max_query_len: expected a Python int of at least 0, got True"),
        (dict(max_seq_len=2**31), "max_seq_len: expected at most 2147483647, got 2147483648"),
        (dict(num_tokens=-1), "num_tokens: expected a Python int of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            replace(batch, **changes)


def test_cases_are_what_their_names_say():
    """The list of batches keeps its awkward members."""
    lens = [pair for case in CASES for pair in case.lens]
    assert {(1, 1), (1, 4097), (113, 203), (239, 1), (0, 5), (5, 0)} <= set(lens)
    assert {case.block_size for case in CASES} >= {16, 24, 64}
    assert {case.heads[0] // case.heads[1] for case in CASES} >= {1, 2, 4}
    assert {case.head_size for case in CASES} >= {64, 96, 256}
