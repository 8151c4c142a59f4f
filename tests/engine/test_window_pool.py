"""The blocks of window layers, in a pool of their own."""

import importlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import refattn.kv_cache
import refattn.metadata
import refattn.sliding_window
from tests.helpers.batches import STALE, plan_and_attend
from twinattn.engine.window_pool import WindowPool


def test_the_pool_of_the_docstring():
    pool = WindowPool(3, 10, window_size=(3, 0), block_size=2)
    blocks = [9, 2, 4, 7]
    seen = []
    for query_len, seq_len in ((4, 4), (1, 5), (1, 6), (1, 7)):
        pool.hold("a", query_len, seq_len, blocks)
        seen.append([pool.window_block[block] for block in blocks])
    assert len(set(seen[0][:2])) == 2 and seen[0][2:] == [-1, -1]
    assert seen[1][:2] == seen[0][:2] and seen[1][3] == -1
    assert seen[3] == [-1, *seen[1][1:3], seen[0][0]], "the block that came back is used again"


@pytest.mark.covers("D140")
@pytest.mark.parametrize("block_size", [1, 2, 16, 24])
def test_locations_are_translated_and_not_block_ids(block_size, device):
    """A slot of the full pool is a slot of the window pool, whatever the block size (S#16267)."""
    pool = WindowPool(3, 50, window_size=(2 * block_size, 0), block_size=block_size)
    pool.hold("a", 1, 1, [0])
    pool.hold("b", block_size + 1, block_size + 1, [7, 49])
    of = {block: pool.window_block[block] for block in (0, 7, 49)}
    assert sorted(of.values()) == [0, 1, 2]
    last = block_size - 1
    slots = [0, 7 * block_size + last, 49 * block_size, -1, 3 * block_size, 49 * block_size + last]
    expected = [of[0] * block_size, of[7] * block_size + last, of[49] * block_size, -1, -1, of[49] * block_size + last]
    assert pool.translate_slots(torch.tensor(slots, device=device)).tolist() == expected
    tables = [[0, 1_000_000, -1, 50], [7, 49, 3]]
    translated = pool.translate_batch(refattn.metadata.make_batch([1, 1], [1, 2 * block_size], tables, device=device))
    assert translated.block_table.tolist() == [[of[0], -1, -1, -1], [of[7], of[49], -1, -1]]
    assert translated.block_table.dtype == torch.int32


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_small_pool_serves_long_sequences(block_size, device):
    """Prompts in chunks, then decodes, with a window pool much smaller than the full pool (S#24617).

    A block that comes back is filled with NaN, one that is handed out with 1e4. The oracle has all keys, in plain rows.
    """
    left, chunk, lengths = 19, 10, {"a": 75, "b": 64, "c": 31}
    generator = torch.Generator().manual_seed(0)
    tokens = {
        name: torch.randn(3, length, 2, 8, generator=generator).to(device) for name, length in lengths.items()
    }  # queries, keys, values
    needed = {name: -(-length // block_size) for name, length in lengths.items()}
    free = list(range(sum(needed.values()) + 5))
    random.Random(0).shuffle(free)
    blocks = {name: [free.pop() for _ in range(count)] for name, count in needed.items()}
    num_full_blocks = sum(needed.values()) + 5
    num_blocks = len(lengths) * (-(-(left + chunk + block_size - 1) // block_size))
    pool = WindowPool(num_blocks, num_full_blocks, window_size=(left, 0), block_size=block_size)
    caches = refattn.kv_cache.allocate(num_blocks, block_size, 2, 8, device=device)
    for cache in caches:
        cache.fill_(float("nan"))

    done = dict.fromkeys(lengths, 0)
    while done:
        step = {name: min(chunk if done[name] < 40 else 1, lengths[name] - done[name]) for name in done}
        for name, count in step.items():
            before = set(pool.free)
            pool.hold(name, count, done[name] + count, blocks[name])
            for cache in caches:
                cache[list(set(pool.free) - before)] = float("nan")
                cache[list(before - set(pool.free))] = STALE
        assert not {pool.window_block[b] for held in pool.held.values() for b in held} & set(pool.free)
        seq_lens = [done[name] + count for name, count in step.items()]
        batch = refattn.metadata.make_batch(list(step.values()), seq_lens, [blocks[n] for n in step], device=device)
        slots = refattn.metadata.slot_mapping(batch, sum(step.values()), block_size=block_size)
        query, key, value = (
            torch.cat([tokens[name][kind, done[name] : done[name] + count] for name, count in step.items()])
            for kind in range(3)
        )
        refattn.kv_cache.write(key, value, *caches, pool.translate_slots(slots))
        out = plan_and_attend(
            refattn.sliding_window, query, *caches, pool.translate_batch(batch), window_size=(left, 0)
        )
        row = 0
        for name, count in step.items():
            _, keys, values = tokens[name]
            for position in range(done[name], done[name] + count):
                rows = slice(max(0, position - left), position + 1)
                expected = functional.scaled_dot_product_attention(
                    query[row].unsqueeze(1), keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
                )
                torch.testing.assert_close(out[row], expected.squeeze(1), rtol=1e-5, atol=1e-5)
                row += 1
            done[name] += count
            if done[name] == lengths[name]:
                del done[name]
                pool.release(name)
    assert sorted(pool.free) == list(range(num_blocks)), "all blocks came back"
    assert num_blocks < num_full_blocks or block_size == 16


@pytest.mark.covers("D133")
@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
def test_local_chunks_over_a_translated_table(twin, device):
    """A chunk is no longer than a window, so layers with chunks of 8 live in a pool for windows of 8."""
    path, block_size, chunk_size = importlib.import_module(f"{twin}.local"), 2, 8
    query, key, value = torch.randn(3, 30, 2, 8, device=device)
    small, full = (refattn.kv_cache.allocate(n, block_size, 2, 8, device=device) for n in (9, 15))
    pool = WindowPool(9, 15, window_size=(chunk_size - 1, 0), block_size=block_size)
    blocks, done = [*range(15)][::-1], 0  # not in the order in which the small pool gives its own
    for count in (10, 5, *[1] * 9, 6):
        before = set(pool.free)
        pool.hold("a", count, done + count, blocks)
        for cache in small:
            cache[list(set(pool.free) - before)] = float("nan")
        batch = refattn.metadata.make_batch([count], [done + count], [blocks], device=device)
        slots = refattn.metadata.slot_mapping(batch, count, block_size=block_size)
        new = slice(done, done + count)
        refattn.kv_cache.write(key[new], value[new], *full, slots)
        refattn.kv_cache.write(key[new], value[new], *small, pool.translate_slots(slots))
        sizes = dict(chunk_size=chunk_size)
        expected = plan_and_attend(path, query[new], *full, batch, **sizes)
        assert torch.equal(plan_and_attend(path, query[new], *small, pool.translate_batch(batch), **sizes), expected)
        done += count
    assert done == len(query) and len(pool.free) > 0


def test_a_shared_prefix_stays_until_its_last_reader_has_passed():
    pool = WindowPool(6, 20, window_size=(3, 0), block_size=2)
    pool.hold("a", 4, 4, [5, 6])
    pool.hold("b", 2, 6, [5, 6, 8])  # shares the first two blocks of "a"
    shared = [pool.window_block[5], pool.window_block[6]]
    pool.hold("a", 5, 9, [5, 6, 9, 10, 11])
    pool.hold("a", 1, 10, [5, 6, 9, 10, 11])  # "a" is past both now
    assert [pool.window_block[5], pool.window_block[6]] == shared
    pool.release("b")
    assert [pool.window_block[5], pool.window_block[6]] == [-1, -1]
    with pytest.raises(ValueError, match="blocks: expected block 5 in the window pool, with older tokens"):
        pool.hold("c", 1, 5, [5, 6, 14])
    assert "c" not in pool.held


def test_a_pool_that_is_full_says_so():
    pool = WindowPool(3, 20, window_size=(3, 0), block_size=2)
    pool.hold("a", 4, 4, [5, 6])
    before = list(pool.window_block)
    with pytest.raises(ValueError, match="blocks: expected at most 1 new ones, as many as are free, got 2"):
        pool.hold("b", 4, 4, [7, 8])
    assert list(pool.window_block) == before
    pool.release("a")
    pool.release("a")  # nothing is given back twice
    pool.release("unknown")
    assert sorted(pool.free) == [0, 1, 2]
    pool.hold("b", 4, 4, [7, 8])


@given(
    left=st.integers(-1, 9),
    block_size=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 7)), max_size=25),
)
def test_no_block_is_lost_over_drawn_steps(left, block_size, steps):
    """No block belongs to two, and none is lost."""
    pool = WindowPool(60, 90, window_size=(left, 0), block_size=block_size)
    blocks = {name: list(range(30 * i, 30 * i + 30)) for i, name in enumerate("abc")}
    seq_lens = dict.fromkeys("abc", 0)
    for name, count in steps:
        if count == 0 or seq_lens[name] + count > 20:
            pool.release(name)
        else:
            pool.hold(name, count, seq_lens[name] + count, blocks[name])
        seq_lens[name] = 0 if count == 0 or seq_lens[name] + count > 20 else seq_lens[name] + count
        taken = [block for block in pool.window_block if block >= 0]
        assert sorted(taken + pool.free) == list(range(60))
        slots = torch.arange(-1, 90 * block_size)
        expected = [
            -1
            if slot < 0 or pool.window_block[slot // block_size] < 0
            else pool.window_block[slot // block_size] * block_size + slot % block_size
            for slot in slots.tolist()
        ]
        assert pool.translate_slots(slots).tolist() == expected


def test_what_came_back_can_be_shared_until_it_is_used_again():
    """Three blocks of 2 tokens and a window of 4: a token at position 6 sees those from 3 on."""
    pool = WindowPool(3, 20, window_size=(3, 0), block_size=2)
    pool.hold("a", 6, 6, [5, 6, 7])
    where = [pool.window_block[block] for block in (5, 6, 7)]
    assert pool.usable([5, 6, 7]) == 3, "held by another sequence"
    pool.release("a")
    assert [pool.window_block[block] for block in (5, 6, 7)] == [-1, -1, -1]
    assert [pool.usable([5, 6, 7][:count]) for count in range(4)] == [0, 1, 2, 3]
    pool.hold("b", 2, 2, [8])  # takes the block that came back first
    assert pool.window_block[8] == where[0]
    assert pool.usable([5, 6, 7]) == 3, "no query at position 6 sees the first one"
    assert pool.usable([5, 6]) == pool.usable([5]) == 0, "but at position 4 and at 2"
    pool.share("c", [5, 6, 7])
    assert [pool.window_block[block] for block in (5, 6, 7)] == [-1, *where[1:]]
    assert pool.free == [] and pool.held["c"] == {6, 7}
    pool.share("d", [5, 6, 7])
    pool.release("d")
    assert pool.free == [], "still held by the other"
    pool.trim("c", 7, [5, 6, 7])
    assert pool.held["c"] == {7} and pool.usable([5, 6, 7]) == 3, "given back, but not used again"
    pool.hold("b", 1, 3, [8, 6])  # the full pool has handed its block 6 to others: other tokens
    assert pool.window_block[6] == where[1] and pool.usable([8, 6]) == 2
    pool.reset()
    assert pool.free == [0, 1, 2] and not pool.held and pool.usable([5, 6, 7]) == 0


@pytest.mark.parametrize("left", [-1, 0])
def test_what_can_be_shared_without_a_window_or_under_one_of_one_token(left):
    pool = WindowPool(3, 20, window_size=(left, 0), block_size=2)
    pool.hold("a", 4, 4, [5, 6])
    pool.trim("a", 4, [5, 6])
    assert len(pool.free) == (1 if left < 0 else 3), "under a window of one token the next sees itself only"
    pool.release("a")
    pool.hold("b", 4, 4, [8, 9])
    pool.hold("c", 2, 2, [10])
    assert pool.usable([5, 6]) == (0 if left < 0 else 2)


def test_the_map_on_a_device_is_one_tensor(device):
    """A recorded graph reads it where it was when it was recorded."""
    pool = WindowPool(3, 20, window_size=(3, 0), block_size=2)
    first = pool.refresh(torch.empty(0, device=device).device)
    assert first.tolist() == [-1] * 20
    pool.hold("a", 4, 4, [5, 6])
    assert pool.refresh(first.device) is first
    assert first.tolist() == list(pool.window_block)
    pool.release("a")
    pool.translate_slots(torch.zeros(1, dtype=torch.int64, device=first.device))
    assert first.tolist() == [-1] * 20


BAD_HOLDS = {
    "no-new-tokens": ("query_len: expected 1..4", (0, 4, [5, 6])),
    "more-new-tokens-than-tokens": ("query_len: expected 1..4", (5, 4, [5, 6])),
    "too-few-blocks": ("blocks: expected 3 for 5 tokens, got 2", (1, 5, [5, 6])),
    "a-block-outside": (r"blocks: expected entries in 0..9, got 10", (4, 4, [5, 10])),
    "block--1": (r"blocks: expected entries in 0..9, got -1", (4, 4, [5, -1])),
    "a-fraction-of-a-block": (r"blocks: expected entries in 0..9, got 6.0", (4, 4, [5, 6.0])),
    "a-tensor-of-blocks": (r"blocks: expected a list of blocks, got int64 \[2\]", (4, 4, torch.tensor([5, 6]))),
    "no-blocks": ("blocks: expected a list of blocks, got None", (4, 4, None)),
    "a-fraction-of-new-tokens": ("query_len: expected 1..4, .* got 1.0", (1.0, 4, [5, 6])),
    "no-number-of-new-tokens": ("query_len: expected 1..4, .* got None", (None, 4, [5, 6])),
    "a-fraction-of-tokens": ("seq_len: expected a Python int of at least 0, got 4.0", (4, 4.0, [5, 6])),
    "a-negative-length": ("seq_len: expected a Python int of at least 0, got -4", (1, -4, [5, 6])),
}


@pytest.mark.parametrize(("message", "arguments"), BAD_HOLDS.values(), ids=BAD_HOLDS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bad_hold_is_named_and_takes_nothing(message, arguments):
    pool = WindowPool(4, 10, window_size=(3, 0), block_size=2)
    with pytest.raises(ValueError, match=message):
        pool.hold("a", *arguments)
    assert len(pool.free) == 4 and not pool.held


BAD_POOLS = {
    "no-blocks": ("num_blocks: expected a positive int, got 0", dict(num_blocks=0)),
    "no-full-blocks": ("num_full_blocks: expected a positive int, got -1", dict(num_full_blocks=-1)),
    "a-fraction-of-a-token": ("block_size: expected a positive int, got 2.0", dict(block_size=2.0)),
    "an-int-for-a-window": (r"window_size: expected \(left, right\), .* got 3", dict(window_size=3)),
    "a-window-below--1": (r"window_size: expected \(left, right\), .* got \(-2, 0\)", dict(window_size=(-2, 0))),
}


@pytest.mark.parametrize(("message", "bad"), BAD_POOLS.values(), ids=BAD_POOLS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bad_pool_is_named(message, bad):
    with pytest.raises(ValueError, match=message):
        WindowPool(**{**dict(num_blocks=4, num_full_blocks=10, window_size=(3, 0), block_size=2), **bad})


BAD_SLOTS = {
    "a-list": (r"slot_mapping: expected int64 \[t\], got list", [0, 1]),
    "int32": (r"slot_mapping: expected int64 \[t\], got int32 \[2\]", torch.tensor([0, 1]).int()),
    "a-column": (r"slot_mapping: expected int64 \[t\], got int64 \[2, 1\]", torch.tensor([[0], [1]])),
    "slot-n*p": ("slot_mapping: expected slots in 0..19, or -1 for padding, got 20", torch.tensor([0, 20])),
    "slot--2": ("slot_mapping: expected slots in 0..19, or -1 for padding, got -2", torch.tensor([-2, 0])),
}


@pytest.mark.parametrize(("message", "slots"), BAD_SLOTS.values(), ids=BAD_SLOTS)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_slots_are_named(message, slots):
    pool = WindowPool(4, 10, window_size=(3, 0), block_size=2)
    with pytest.raises(ValueError, match=message):
        pool.translate_slots(slots)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_batch_without_a_table_or_none_at_all_is_named():
    pool = WindowPool(4, 10, window_size=(3, 0), block_size=2)
    with pytest.raises(ValueError, match=r"block_table: expected int32 \[b, m\], got None"):
        pool.translate_batch(refattn.metadata.make_batch([1], [1]))
    with pytest.raises(ValueError, match="batch: expected a Batch, got None"):
        pool.translate_batch(None)


def test_slots_on_a_device_are_not_read():
    pool = WindowPool(4, 10, window_size=(3, 0), block_size=2)
    assert pool.translate_slots(torch.empty(5, dtype=torch.int64, device="meta")).shape == (5,)
