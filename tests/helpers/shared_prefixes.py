"""Batches whose sequences share prefixes, as the first and the last sequence and the end of each."""

from tests.helpers.batches import Case

SHARED = {
    "one-prefix": (Case("c", ((1, 70), (1, 49), (1, 66), (1, 130)), heads=(8, 2)), [(0, 4, 48)]),
    "tree": (
        Case("c", ((1, 80), (1, 66), (1, 35), (1, 7), (1, 60), (1, 90)), heads=(4, 2)),
        [(0, 3, 32), (0, 2, 64), (4, 6, 48)],
    ),
    "three-levels": (
        Case("c", ((1, 70), (1, 65), (1, 52), (1, 40), (1, 17)), heads=(4, 1)),
        [(0, 5, 16), (0, 4, 32), (0, 2, 64)],
    ),
    "prefills-and-decodes": (
        Case("c", ((20, 90), (1, 65), (7, 71), (17, 17)), heads=(2, 2), padding_rows=3),
        [(0, 3, 64)],
    ),
    "ends-at-the-first-query": (Case("c", ((16, 48), (1, 33), (4, 36)), heads=(4, 2)), [(0, 3, 32)]),
    "silent-and-empty": (
        Case("c", ((0, 50), (1, 40), (0, 0), (0, 70), (2, 66), (5, 2)), heads=(4, 2), padding_rows=1),
        [(0, 2, 32), (3, 5, 64)],
    ),
    "odd-blocks": (Case("c", ((1, 80), (3, 60), (9, 58), (1, 49)), block_size=24), [(0, 4, 48)]),
    "heads-first": (Case("c", ((1, 40), (2, 50), (1, 33)), layout="HND", heads=(6, 2)), [(0, 3, 32)]),
    "narrow-values": (Case("c", ((1, 40), (2, 50)), head_size=96, value_head_size=64), [(0, 2, 32)]),
    "group-of-one": (Case("c", ((1, 40), (2, 50)), heads=(2, 2)), [(0, 1, 32), (1, 2, 48)]),
    "nothing-shared": (Case("c", ((1, 40), (2, 50)), heads=(2, 1)), []),
    "many-rows-short-prefix": (Case("c", tuple((3, 19 + i) for i in range(12)), heads=(4, 2)), [(0, 12, 16)]),
}
