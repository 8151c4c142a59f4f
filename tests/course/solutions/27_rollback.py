"""27 · A state: drafts that were rejected."""


def rollback(slots: list[list[int]], accepted: list[int]) -> list[int]:
    """Return the slot of each request's state after a step with drafts.

    The step kept the state after token i of request r in slots[r][i]. The first accepted[r] tokens of it are kept, at
    least one. A row that begins with -1 is padding: its slot is -1, and accepted has any number for it.
    slots [[4, 2, 7], [0, 1, 3]], accepted [2, 1]: [2, 0].
    """
    states = []
    for row, count in zip(slots, accepted, strict=True):
        is_padding = row[0] < 0
        states.append(-1 if is_padding else row[count - 1])
    return states
