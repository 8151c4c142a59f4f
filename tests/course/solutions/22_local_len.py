"""22 · Context parallel: the keys that a rank has."""


def local_len(seq_len: int, rank: int, num_ranks: int, interleave: int) -> int:
    """Return how many tokens of a sequence lie on a rank.

    Tokens are dealt out in runs of `interleave`: the first run to rank 0, the next to rank 1, and round again.
    seq_len 7, 2 ranks, interleave 2: rank 0 has the tokens 0 1 4 5, so 4, and rank 1 has 2 3 6, so 3.
    """
    rounds, rest = divmod(seq_len, num_ranks * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)
