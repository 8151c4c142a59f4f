"""What must be there to go on at position p: that the table of `twinattn.engine.cache_kinds` says it, and no more.

A request goes on after a prefix of another one, after it was preempted, as one of several samples, with drafts, and in
other pools, to which nothing was moved but what the table says. Each logit, each block and each state that a later
request may find has the bits that it has where the request is computed alone.
"""

import pytest

from tests.helpers.going_on import FAMILIES, PROMPT, WAYS, family_of, in_other_pools
from twinattn.engine.cache_kinds import BLOCK, DRAFTS, ENTRIES, INDEX_KEYS, KINDS, PAGES, ROWS, WINDOWS, Extent


@pytest.fixture(scope="module")
def family():
    """Families, each made once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = family_of(name)
        return made[name]

    return of


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_request_goes_on_with_the_same_bits(family, way, name):
    way(family(name))


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_that_the_table_has_can_be_left_out(family, name):
    one = family(name)
    one.alone(PROMPT)
    for kind in one.kinds:
        with pytest.raises(AssertionError):
            in_other_pools(one, leave_out=[kind])


def test_every_cache_of_an_engine_is_of_a_kind_of_the_table(family):
    """And each kind is the cache of some layer of these tests, but for drafts, which have none."""
    found = set()
    for name in FAMILIES:
        pools = family(name).engine().layer_pools
        sizes = {cache.pool.untyped_storage().data_ptr(): cache.pool.untyped_storage() for cache in pools.all_caches}
        assert pools.nbytes == sum(storage.nbytes() for storage in sizes.values())
        found |= {cache.kind for cache in pools.all_caches}
    assert found == set(KINDS) - {DRAFTS}


@pytest.mark.parametrize("extent", [Extent(), Extent(1), Extent(5), Extent(6, 2, True), Extent(3, 4)], ids=str)
def test_the_first_token_that_is_needed_is_the_first_that_a_later_one_sees(extent):
    """By the rules of masks and entries, token by token."""
    window, ratio, overlap = extent
    for position in range(30):
        later = range(position, position + 20)
        seen = [j for j in range(position) if any(not window or t - j < window for t in later)]
        assert WINDOWS.begin(position, extent) == min(seen, default=position)
        entries = [e for e in range(20) if (e + 1) * ratio > position]  # they are not complete
        of_entries = [range(max(0, e - overlap) * ratio, (e + 1) * ratio) for e in entries]
        rows = [j for j in range(position) if any(j in tokens for tokens in of_entries)]
        assert ROWS.begin(position, extent) == min(rows, default=position)
        assert all(kind.begin(position, extent) == 0 for kind in (PAGES, INDEX_KEYS, ENTRIES))
    assert [kind.begin is None for kind in KINDS] == [kind.unit != BLOCK for kind in KINDS]
