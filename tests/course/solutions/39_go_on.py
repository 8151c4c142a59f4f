"""39 · After how much of a prefix a hybrid can go on."""


def go_on(in_window: list[bool], has_state: list[bool], window: int, block_size: int) -> int:
    """Return after how many blocks of a cached prefix a request can go on; 0 if after none.

    The model has layers with all keys, whose blocks were all found; layers with a window, whose pool still has block i
    if `in_window[i]`; and layers with a state, of which a copy was kept at the end of block i if `has_state[i]`. A
    token sees the last `window` tokens, itself included. Return the most blocks after which the next token has all that
    it needs.
    in_window [False, True, True], has_state [False, True, False], window 5, block_size 4: 2, as the token at position 8
    sees tokens 4 to 8, and there is a state after 8 tokens. After all 12, there is none.
    """
    for count in range(len(has_state), 0, -1):
        first = max(0, count * block_size - window + 1) // block_size
        if has_state[count - 1] and all(in_window[first:count]):
            return count
    return 0
