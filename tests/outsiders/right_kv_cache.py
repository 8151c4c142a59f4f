"""Writes into the pool that are right."""


def gathered_back_to_front(key, value, key_cache, value_cache, slot_mapping):
    """One indexed write of the tokens that have a slot, in the reverse order."""
    token = (slot_mapping >= 0).nonzero().flatten().flip(0)
    block, row = slot_mapping[token] // key_cache.shape[1], slot_mapping[token] % key_cache.shape[1]
    key_cache[block, row], value_cache[block, row] = key[token], value[token]
