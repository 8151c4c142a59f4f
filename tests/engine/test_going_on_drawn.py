"""Lives of requests that go on with the same bits: by both twins, over more layers, and what servers got wrong.

`test_going_on.py` has one way at a time. Here requests are drawn that begin alike, and wait, are preempted, become
several samples, take drafts and move to another engine, in any order.
"""

from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.engines import SYSTEM, assert_nothing_is_held
from tests.helpers.going_on import (
    FAMILIES,
    GREEDY,
    MORE_FAMILIES,
    WARM,
    WAYS,
    family_of,
    moved,
    preempt,
    run,
)
from tests.helpers.planted_caches import MISTAKES, plant
from tests.helpers.state_engines import assert_all_free
from twinattn.engine import SamplingParams
from twinattn.engine.cache_kinds import SLOT

TAILS = st.lists(st.integers(40, 42), min_size=1, max_size=3)
HAPPENS = ["step", "step", "step", "add", "preempt", "move", "move back"]
SOME_LIVES = settings(max_examples=settings.default.max_examples // 4, phases=[Phase.generate])  # none is made smaller
FEWER_LIVES = settings(SOME_LIVES, max_examples=max(1, settings.default.max_examples // 12))
LIKE_PAGES = ("differential", "latents", "int8", "fp8", "nvfp4")  # other storages, in pools as they have others
LIKE_OTHERS = ("states in attention", "states, by steps")  # their caches are those of other families
FAST = (
    "windows",
    "selected keys",
    "compressed keys",
    "chunks",
    "differential",
    "int8",
    "fp8",
    "int4",
    "nvfp4",
)  # no bit depends on a chunk


@pytest.fixture(scope="module")
def family():
    """Families, each made once for a twin."""
    made = {}

    def of(name, twin="refattn"):
        if (name, twin) not in made:
            made[name, twin] = family_of(name, twin)
        return made[name, twin]

    return of


# --- more layers, and the fast twin ---


@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_other_layers_go_on_with_the_same_bits(family, name):
    for way in WAYS:
        way(family(name))


@pytest.mark.parametrize("name", FAST)
def test_the_fast_twin_goes_on_with_the_same_bits(family, name):
    for way in WAYS:
        way(family(name, "fastattn"))


# --- lives that are drawn ---


@dataclass
class Known:
    """Drafts what a request is known to say, with a wrong token now and then."""

    family: object
    max_drafts: int = 3
    max_branches: int = 1

    def propose(self, tokens, *, depth, nodes, branches):
        for (prompt, _), answer in self.family.answers.items():
            whole = [*prompt, *answer]
            if whole[: len(tokens)] == tokens:
                drafts = whole[len(tokens) :][: min(depth, nodes)]
                return [(token + (i == len(tokens) % 4)) % 97 for i, token in enumerate(drafts)]
        return None


@dataclass(frozen=True)
class Life:
    """What happens to some requests.

    Attributes:
        requests: the prompt, and how its tokens are chosen.
        sizes: of both engines.
        drafts: whether there are drafts.
        events: what happens, one after the other; requests that were not added are added at the end.
    """

    requests: list[tuple[list[int], SamplingParams]]
    sizes: dict
    drafts: bool
    events: list


@st.composite
def lives(draw):
    """Draw requests that share beginnings, few blocks for them, and what happens."""
    requests = []
    for _ in range(draw(st.integers(2, 4))):
        prompt = [*SYSTEM[: draw(st.sampled_from([13, 12, 9, 8, 4, 0]))], *draw(TAILS)]
        sampling = replace(draw(st.sampled_from([GREEDY, WARM])), max_tokens=draw(st.integers(1, 6)))
        n = 1 if sampling.temperature == 0 else draw(st.integers(1, 2))
        requests.append((prompt, replace(sampling, n=n)))
    sizes = dict(
        num_blocks=draw(st.integers(6, 12)),
        max_num_batched_tokens=draw(st.integers(3, 12)),
        max_num_seqs=draw(st.integers(2, 3)),
        num_kept_states=draw(st.integers(0, 4)),
    )
    events = ["add", *draw(st.lists(st.sampled_from(HAPPENS), min_size=6, max_size=20))]
    return Life(requests, sizes, draw(st.booleans()), events)


def live(family, life):
    """Run all drawn events, and compare the outputs of the requests."""
    expected = [
        family.alone(prompt, sampling.of_sample(i)) for prompt, sampling in life.requests for i in range(sampling.n)
    ]
    sizes = dict(life.sizes)
    if all(kind.unit != SLOT for kind in family.kinds):
        del sizes["num_kept_states"]
    drafts = dict(speculation=Known(family)) if life.drafts else {}
    engines, waiting, samples = [family.engine(**sizes, **drafts) for _ in range(2)], [*life.requests], []
    for event in [*life.events, *["add"] * len(waiting)]:
        if event == "add" and waiting:
            samples += engines[0].add(*waiting.pop(0)).samples
        elif event == "step":
            for engine in engines:
                engine.step()
        elif event == "preempt":
            preempt(engines[0])
        elif event.startswith("move"):
            here, there = engines if event == "move" else engines[::-1]
            movable = [i for i, request in enumerate(samples) if can_move(here, request, there)]
            for i in movable[:1]:
                samples[i] = moved(here, samples[i], there)
    for engine in engines:
        run(engine)
        assert_nothing_is_held(engine)
        if engine.scheduler.states is not None:
            assert_all_free(engine)
    assert [request.output_ids for request in samples] == expected


def can_move(here, request, there):
    """Return whether a request runs here and has a part computed, and there is room for all of it there."""
    position = request.num_computed_tokens
    if request not in here.running or request.unforked or not position or len(there.running) >= there.max_num_seqs:
        return False
    room = [len(there.pool.free), *(len(pool.free) for pool in there.window_pools.values())]
    return there.scheduler.blocks_for(len(request.tokens)) <= min(room)


@pytest.mark.parametrize("name", [x for x in (*FAMILIES, *MORE_FAMILIES) if x not in LIKE_OTHERS])
def test_whatever_happens_no_bit_changes(family, name):
    @(FEWER_LIVES if name in LIKE_PAGES else SOME_LIVES)
    @given(lives())
    def lived(life):
        live(family(name), life)

    lived()


@pytest.mark.parametrize("name", FAST)
def test_whatever_happens_no_bit_of_the_fast_twin_changes(family, name):
    @FEWER_LIVES
    @given(lives())
    def lived(life):
        live(family(name, "fastattn"), life)

    lived()


# --- mistakes of servers ---


@pytest.mark.lets_a_pass_fail
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_of_a_server_is_seen(family, mistake, monkeypatch):
    mistake.way(family(mistake.family))
    plant(mistake, monkeypatch)
    with pytest.raises(AssertionError):
        mistake.way(family(mistake.family))
