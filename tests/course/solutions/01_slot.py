"""1 · The slot of a token."""


def slot(position: int, blocks: list[int], block_size: int) -> int:
    """Return the slot of the pool that holds the token at `position` of a sequence.

    The pool is cut into blocks of `block_size` slots; `blocks` are those of the sequence, in the order of its tokens.
    With blocks [9, 2] of 4 slots, token 5 is in row 1 of block 2, and its slot is 2 * 4 + 1 = 9.
    """
    return blocks[position // block_size] * block_size + position % block_size
