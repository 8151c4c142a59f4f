"""33 · Copy on write."""


def own_block(position: int, blocks: list[int], users: list[int], free: list[int], block_size: int) -> None:
    """Make a sequence the only user of the block that its token at `position` goes into; change the lists in place.

    `blocks` are those of the sequence, `users[b]` counts the sequences that have block b, and `free` lists the free
    blocks, the next one to take first. If others have the block, too, take a free one instead of it; the server copies
    the keys. If the token is the first one of a new block, take a free one for it. Otherwise change nothing.
    position 6, blocks [9, 2], users[2] = 2, free [5, 7], block_size 4: blocks are [9, 5], free is [7], users[2] and
    users[5] are 1.
    """
    raise NotImplementedError
