"""Writes into the pool that are wrong."""


def padding_wraps(key, value, key_cache, value_cache, slot_mapping):
    """A slot of -1 is an index like any other: the last row of the pool is overwritten."""
    p, t = key_cache.shape[1], len(slot_mapping)
    for x, cache in ((key, key_cache), (value, value_cache)):
        cache[slot_mapping // p, slot_mapping % p] = x[:t]


def written_into_a_copy(key, value, key_cache, value_cache, slot_mapping):
    """The pool is seen as rows by `reshape`, which copies a pool with heads outside tokens: nothing is written."""
    is_token = slot_mapping >= 0
    for x, cache in ((key, key_cache), (value, value_cache)):
        rows = cache.reshape(-1, *cache.shape[2:])
        rows[slot_mapping[is_token]] = x[: len(slot_mapping)][is_token]
