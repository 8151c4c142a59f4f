"""Where are the keys: slots, blocks, 8-bit values, the share of a rank, and a prefix to go on after."""

from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from refattn import kv_cache, metadata
from twinattn.course.exercises.exercise import Exercise, Function, Trial, draw
from twinattn.engine.cache_kinds import WINDOWS, Extent

# Three requests in one step: a is at the last chunk of its prompt, b is generating, c is at the start of its prompt.
THREE: dict[str, list[Any]] = dict(query_lens=[2, 1, 3], seq_lens=[5, 7, 3], block_tables=[[9, 2], [4, 7], [1]])


def slot(position: int, blocks: list[int], block_size: int) -> int:
    """Return the slot of a token."""
    return blocks[position // block_size] * block_size + position % block_size


def _slot_trials() -> Iterator[Trial]:
    yield Trial("token 5, blocks [9, 2] of 4 slots", dict(position=5, blocks=[9, 2], block_size=4))
    yield Trial("the first token", dict(position=0, blocks=[9, 2], block_size=4))
    yield Trial("the last token of a block", dict(position=3, blocks=[9, 2], block_size=4))
    yield Trial("the first token of the second block", dict(position=4, blocks=[9, 2], block_size=4))
    yield Trial("blocks of 16", dict(position=33, blocks=[7, 0, 5], block_size=16))
    yield Trial("blocks of one token", dict(position=2, blocks=[7, 0, 5], block_size=1))


SLOT = Exercise(
    "slot",
    slot,
    _slot_trials,
    {
        "the block of a token is blocks[position // block_size], and not always the first": (
            lambda position, blocks, block_size: blocks[0] * block_size + position % block_size
        ),
        "the blocks of a sequence are not side by side in the pool: look up the one that the token is in": (
            lambda position, blocks, block_size: blocks[0] * block_size + position
        ),
        "a block is block_size slots long, so block b begins at slot b * block_size": (
            lambda position, blocks, block_size: blocks[position // block_size] + position % block_size
        ),
        "the position alone is the slot only if the sequence owns the first blocks of the pool; look in blocks": (
            lambda position, blocks, block_size: position
        ),
    },
    (
        "In which of its blocks is the token, and in which row? `divmod(position, block_size)` says both.",
        "Block b begins at slot b * block_size; the row comes on top.",
    ),
    in_page=True,
)


def _own_block(position: int, blocks: list[int], users: list[int], free: list[int], block_size: int) -> None:
    place = position // block_size
    if place < len(blocks) and users[blocks[place]] == 1:
        return
    _replace_block(place, blocks, users, free)


def _replace_block(
    place: int, blocks: list[int], users: list[int], free: list[int], *, counts: int = 1, at: int = 0
) -> None:
    """Take the block at a place of `free`, and count its users; and one less of the block that it replaces."""
    if place < len(blocks):
        users[blocks[place]] -= counts
    blocks[place : place + 1] = [free.pop(at)]
    users[blocks[place]] = 1


def _own_block_trials() -> Iterator[Trial]:
    def arguments(position: int, blocks: list[int], several: dict[int, int], free: list[int], **size: int) -> Any:
        users = [several.get(block, int(block in blocks)) for block in range(10)]
        return dict(position=position, blocks=blocks, users=users, free=free, block_size=4) | size

    yield Trial("a block that two sequences have", arguments(6, [9, 2], {9: 2, 2: 2}, [5, 7]))
    yield Trial("the last user of a block", arguments(6, [9, 2], {9: 2}, [5, 7]))
    yield Trial("a block of three, and three free ones", arguments(1, [4], {4: 3}, [8, 0, 6]))
    yield Trial("the first token of a new block", arguments(8, [9, 2], {9: 2, 2: 2}, [5, 7]))
    yield Trial("the first block of a sequence", arguments(0, [], {}, [3]))
    yield Trial("blocks of two", arguments(5, [1, 0, 2], {1: 2, 0: 2, 2: 2}, [7, 3], block_size=2))


OWN_BLOCK = Exercise(
    "own_block",
    _own_block,
    _own_block_trials,
    {
        "a block that only this sequence has is its own already: nothing is to be copied": (
            lambda position, blocks, users, free, block_size: _replace_block(
                position // block_size, blocks, users, free
            )
        ),
        "the block that was left has one user less: it would never be free again": (
            lambda position, blocks, users, free, block_size: (
                None
                if position // block_size < len(blocks) and users[blocks[position // block_size]] == 1
                else _replace_block(position // block_size, blocks, users, free, counts=0)
            )
        ),
        "the next free block is the first of the list, and this is the last": (
            lambda position, blocks, users, free, block_size: (
                None
                if position // block_size < len(blocks) and users[blocks[position // block_size]] == 1
                else _replace_block(position // block_size, blocks, users, free, at=-1)
            )
        ),
        "others still write into the shared block: the sequence has to leave it before it writes": (
            lambda position, blocks, users, free, block_size: (
                None
                if position // block_size < len(blocks)
                else _replace_block(position // block_size, blocks, users, free)
            )
        ),
    },
    (
        "`position // block_size` is the place of the block in `blocks`; it may be one past the last.",
        "Count both: one user less of the block that the sequence leaves, and one of the block that it takes.",
    ),
    changes=("blocks", "users", "free"),
    in_page=True,
)


def _go_on(in_window: list[bool], has_state: list[bool], window: int, block_size: int, *, longest: bool = True) -> int:
    counts = range(len(has_state), 0, -1) if longest else range(1, len(has_state) + 1)
    for count in counts:
        first = WINDOWS.first_block(count * block_size, Extent(window), block_size)
        if has_state[count - 1] and all(in_window[first:count]):
            return count
    return 0


def _go_on_trials() -> Iterator[Trial]:
    def arguments(in_window: str, has_state: str, window: int, block_size: int = 4) -> Any:
        there = ([letter == "1" for letter in blocks] for blocks in (in_window, has_state))
        return dict(zip(("in_window", "has_state"), there, strict=True), window=window, block_size=block_size)

    yield Trial("blocks 1 and 2 of the window, and the state after block 1", arguments("011", "010", 5))
    yield Trial("all blocks, and states after two of them", arguments("1111", "1010", 6))
    yield Trial("a window over two blocks, the first of which is gone", arguments("1101", "1101", 6))
    yield Trial("a window that begins with a block", arguments("0011", "0011", 5))
    yield Trial("only states after blocks whose window is gone", arguments("001", "110", 3))
    yield Trial("a window of the next token alone", arguments("000", "011", 1))
    yield Trial("no block", arguments("", "", 4))
    yield Trial("blocks of two", arguments("01111", "01010", 6, 2))


GO_ON = Exercise(
    "go_on",
    _go_on,
    _go_on_trials,
    {
        "a state after fewer tokens is not the state after all of them: it has to be kept at exactly that end": (
            lambda in_window, has_state, window, block_size: _go_on(
                in_window, [any(has_state[: i + 1]) for i in range(len(has_state))], window, block_size
            )
        ),
        "blocks before the window may be gone: no later token sees them": (
            lambda in_window, has_state, window, block_size: _go_on(in_window, has_state, 0, block_size)
        ),
        "the next token is itself in its window, so it sees one token less before it": (
            lambda in_window, has_state, window, block_size: _go_on(in_window, has_state, window + 1, block_size)
        ),
        "the longest prefix saves most": (
            lambda in_window, has_state, window, block_size: _go_on(
                in_window, has_state, window, block_size, longest=False
            )
        ),
        "the window reaches back over several blocks, not only the last": (
            lambda in_window, has_state, window, block_size: _go_on(in_window, has_state, min(window, 2), block_size)
        ),
        "the blocks of the window have to be there, too": (
            lambda in_window, has_state, window, block_size: _go_on(in_window, has_state, 1, block_size)
        ),
    },
    (
        "Try the whole prefix first, then one block less.",
        "After `count` blocks the next token is at `count * block_size`. Which is the first token that it sees?",
    ),
    level=2,
    minutes=10,
    in_page=True,
)


def _slot_mapping(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> Any:
    batch = metadata.make_batch(query_lens, seq_lens, block_tables)
    return metadata.slot_mapping(batch, sum(query_lens), block_size=block_size).tolist()


def _slot_mapping_trials() -> Iterator[Trial]:
    two = {name: each[:2] for name, each in THREE.items()}
    yield Trial("the worked example", dict(**two, block_size=4))
    yield Trial("three requests, one at the start of its prompt", dict(**THREE, block_size=4))
    yield Trial(
        "a request without new tokens, and blocks of 2",
        dict(query_lens=[1, 0, 2], seq_lens=[3, 4, 4], block_tables=[[6, 1], [0, 3], [5, 2]], block_size=2),
    )


SLOT_MAPPING = Exercise(
    "slot_mapping",
    _slot_mapping,
    _slot_mapping_trials,
    {
        "the new tokens are the last ones of a sequence; these are the slots of its first ones": (
            lambda query_lens, seq_lens, block_tables, block_size: _slot_mapping(
                query_lens, query_lens, block_tables, block_size
            )
        ),
        "these are the slots of all tokens; only the new ones are written": (
            lambda query_lens, seq_lens, block_tables, block_size: _slot_mapping(
                seq_lens, seq_lens, block_tables, block_size
            )
        ),
        "each position is one too high: the last token stands at seq_len - 1": (
            lambda query_lens, seq_lens, block_tables, block_size: [
                slot(position, [*blocks, -1], block_size)
                for q, s, blocks in zip(query_lens, seq_lens, block_tables, strict=True)
                for position in range(s - q + 1, s + 1)
            ]
        ),
    },
    (
        "The new tokens of a sequence stand at the positions from seq_len - query_len to before seq_len.",
        "Exercise 1 turns each position into a slot.",
    ),
    in_page=True,
)


def _write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    kv_cache.write(key, value, key_cache, value_cache, slot_mapping)


def _write_rows(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    rearrange(cache, "n p hk d -> (n p) hk d")[slots] = new


def _write_to_last(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    _write_rows(key_cache, key, slot_mapping)
    _write_rows(value_cache, value, slot_mapping)


def _write_trials() -> Iterator[Trial]:
    def arguments(slots: list[int], heads: int = 1, sizes: tuple[int, int] = (2, 2)) -> dict[str, Any]:
        t = len(slots)
        key, value = (draw(t, heads, size, seed=i).round(decimals=1) for i, size in enumerate(sizes))
        pools = kv_cache.allocate(3, 4, heads, sizes[0], value_head_size=sizes[1])
        return dict(
            key=key, value=value, key_cache=pools[0], value_cache=pools[1], slot_mapping=torch.tensor(slots).long()
        )

    yield Trial("one token, to slot 9", arguments([9]))
    yield Trial("three tokens, in any order", arguments([9, 0, 7]))
    yield Trial("a row of padding", arguments([3, -1]))
    yield Trial("two heads, values smaller than keys", arguments([4, 1, -1, 11], heads=2, sizes=(4, 3)))
    yield Trial("no token", arguments([]))


WRITE = Exercise(
    "write",
    _write,
    _write_trials,
    {
        "Python counts -1 from the end, so padding went to the last slot of the pool": _write_to_last,
        "the values were not written": lambda value, value_cache, **rest: _write(
            value=value[:0].new_zeros(value.shape), value_cache=value_cache, **rest
        ),
        "block and row are the other way round: slot // p is the block, slot % p the row": (
            lambda key, value, key_cache, value_cache, slot_mapping: [
                cache.__setitem__((slot % cache.shape[1], slot // cache.shape[1]), new)
                for cache, rows in ((key_cache, key), (value_cache, value))
                for slot, new in zip(slot_mapping.tolist(), rows, strict=True)
                if slot >= 0
            ]
        ),
        "nothing was written: does it change key_cache and value_cache themselves, or copies?": (
            lambda **arguments: None
        ),
    },
    (
        "Loop over the tokens and their slots: `for token, slot in enumerate(slot_mapping)`.",
        "`divmod(slot, block_size)` is the block and the row; the block size is len(key_cache[0]).",
    ),
    changes=("key_cache", "value_cache"),
    in_page=True,
)


def _gather(cache: Tensor, blocks: Tensor, seq_len: int) -> Tensor:
    return kv_cache.gather(cache, blocks, seq_len)


def _gather_trials() -> Iterator[Trial]:
    cache = torch.arange(10 * 4, dtype=torch.float32).reshape(10, 4, 1, 1)  # each token is the number of its slot
    table = torch.tensor([9, 2, -1], dtype=torch.int32)
    yield Trial("5 tokens in the blocks 9 and 2; each token is the number of its slot", _of_cache(cache, table, 5))
    yield Trial("all 8 tokens", _of_cache(cache, table, 8))
    yield Trial("fewer tokens than a block", _of_cache(cache, table, 3))
    yield Trial("garbage after the last block", _of_cache(cache, torch.tensor([0, 999999, -1]).int(), 4))
    yield Trial("no token", _of_cache(cache, table, 0))
    poison = torch.full((10, 4, 2, 3), torch.nan)
    poison[[4, 1]] = draw(2, 4, 2, 3)
    yield Trial("two heads, in a pool of NaN", _of_cache(poison, torch.tensor([4, 1, 7]).int(), 7))


def _of_cache(cache: Tensor, blocks: Tensor, seq_len: int) -> dict[str, Any]:
    return dict(cache=cache, blocks=blocks, seq_len=seq_len)


GATHER = Exercise(
    "gather",
    _gather,
    _gather_trials,
    {
        "these are the first slots of the pool; the block table says which blocks are the sequence's": (
            lambda cache, blocks, seq_len: rearrange(cache, "n p hk d -> (n p) hk d")[:seq_len]
        ),
        "these are whole blocks; the last one is only partly filled, so stop at seq_len tokens": (
            lambda cache, blocks, seq_len: rearrange(
                cache[blocks[: ceil(seq_len / cache.shape[1])].long()], "m p hk d -> (m p) hk d"
            )
        ),
        "the blocks are in the order of their numbers; their order in the table is the order of the tokens": (
            lambda cache, blocks, seq_len: _gather(
                cache, blocks[: ceil(seq_len / cache.shape[1])].sort().values, seq_len
            )
        ),
    },
    (
        "How many blocks hold seq_len tokens? Look at no entry of `blocks` after those.",
        "Token j is in block blocks[j // block_size], in row j % block_size; a block is len(cache[0]) tokens long.",
    ),
    in_page=True,
)


def _quantize(x: Tensor, *, largest: int = 127, rounding: Function = torch.round) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / largest
    scale = scale.masked_fill(scale == 0, 1.0)
    return rounding(x.float() / scale[..., None]).clamp(-128, 127).to(torch.int8), scale


def _quantize_by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max() / 127
    return torch.round(x / scale).to(torch.int8), scale.expand(x.shape[:2])


def _quantize_trials() -> Iterator[Trial]:
    yield Trial("the worked example", dict(x=torch.tensor([[[0.5, -2.0, 1.0]]])))
    yield Trial("2 tokens, 2 heads, of very different sizes", dict(
        x=draw(2, 2, 5) * torch.tensor([[[1.0], [100.0]], [[0.01], [3.0]]])))  # fmt: skip
    yield Trial("a row of zeros", dict(x=torch.zeros(1, 1, 3)))


QUANTIZE = Exercise(
    "quantize",
    _quantize,
    _quantize_trials,
    {
        "a cast cuts off what is after the point; round first": lambda x: _quantize(x, rounding=torch.trunc),
        "one scale for the whole tensor; each token and head has its own": _quantize_by_tensor,
        "the largest value is 127, so the scale is the largest number / 127": lambda x: _quantize(x, largest=128),
    },
    (
        "The scale of a row is its largest absolute value / 127: `x.abs().amax(-1)`.",
        "Where the scale is 0, take 1, or 0 / 0 makes NaN.",
    ),
    parts=("quantized", "scale"),
)


def local_len(seq_len: int, rank: int, num_ranks: int, interleave: int) -> int:
    """Return how many tokens of a sequence a rank has."""
    return sum(j // interleave % num_ranks == rank for j in range(seq_len))


def _local_len_trials() -> Iterator[Trial]:
    for seq_len, rank, num_ranks, interleave in (
        (7, 0, 2, 2), (7, 1, 2, 2), (8, 1, 2, 2), (5, 2, 4, 1), (2, 3, 4, 1), (0, 0, 2, 16), (100, 1, 3, 16),
        (9, 0, 1, 4),
    ):  # fmt: skip
        says = f"rank {rank} of {num_ranks}, {seq_len} tokens in runs of {interleave}"
        yield Trial(says, dict(seq_len=seq_len, rank=rank, num_ranks=num_ranks, interleave=interleave))


LOCAL_LEN = Exercise(
    "local_len",
    local_len,
    _local_len_trials,
    {
        "tokens are dealt out in runs, and the last run may be cut short": (
            lambda seq_len, rank, num_ranks, interleave: ceil(seq_len / num_ranks)
        ),
        "these are contiguous shares; runs of `interleave` tokens go round the ranks": (
            lambda seq_len, rank, num_ranks, interleave: len(
                range(seq_len)[rank * ceil(seq_len / num_ranks) :][: ceil(seq_len / num_ranks)]
            )
        ),
        "only whole rounds were counted: what is left over goes to the first ranks": (
            lambda seq_len, rank, num_ranks, interleave: seq_len // (num_ranks * interleave) * interleave
        ),
    },
    (
        "Token j is in run j // interleave, and run k is on rank k % num_ranks.",
        "Whole rounds give `interleave` tokens each; of the last one, a rank has between 0 and `interleave`.",
    ),
    in_page=True,
)
