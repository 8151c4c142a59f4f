"""Next tokens: their random numbers, the line they are drawn on, and that both twins draw the same ones."""

import math
import os

import pytest
import torch

from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.steps import record
from twinattn.engine import fast_sampling as twin
from twinattn.engine import sampling as reference
from twinattn.engine.kernels import sampling as triton_sampling
from twinattn.engine.kernels import torch_sampling
from twinattn.engine.sampling import SamplingParams, choose, sample, settings_of, uniforms

SMALLEST_STEP = 2.0**-53
NEXT_TO_ONE = 1 - SMALLEST_STEP
CLOSE = 1e-12  # how near to a boundary sums of another order may fall on its other side


# --- random numbers ---


def splitmix64(state):
    """Return the output after a state, in Python's ints."""
    x = (state + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_the_generator_is_splitmix64():
    """The first three numbers after the seed 1234567, as the generator's own test program prints them."""
    state = 1234567
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(state + i * 0x9E3779B97F4A7C15) for i in range(3)] == known


def test_random_numbers_are_those_of_plain_ints():
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**64 + 5, -(2**70) + 3, 12345]
    pairs = [(seed, place) for seed in seeds for place in (0, 1, 2, 77, 2**31, 2**40)]
    expected = [
        (splitmix64((splitmix64(seed % 2**64) + place * 0x9E3779B97F4A7C15) % 2**64) >> 11) * SMALLEST_STEP
        for seed, place in pairs
    ]
    found = uniforms(*zip(*pairs, strict=True))
    assert found.dtype == torch.float64
    assert found.tolist() == expected
    assert uniforms([], []).shape == (0,)
    assert uniforms([5], [0]).tolist() == uniforms([5 - 2**64], [0]).tolist()


def test_random_numbers_are_uniform_and_neighbours_independent():
    """Of 100 seeds and 200 places: how many fall into each of 10 bins, and of pairs of neighbours into each of 100."""
    seeds, places = torch.meshgrid(torch.arange(-50, 50), torch.arange(200), indexing="ij")
    drawn = uniforms(seeds.flatten().tolist(), places.flatten().tolist()).view(100, 200)
    assert drawn.min() >= 0 and drawn.max() < 1
    assert len(drawn.unique()) == drawn.numel()
    assert chi_square((drawn * 10).long().flatten(), torch.full((10,), 0.1)) < 5
    for first, second in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        cells = (first * 10).long() * 10 + (second * 10).long()
        assert chi_square(cells.flatten(), torch.full((100,), 0.01)) < 5


def chi_square(drawn, shares):
    """Return by how many standard deviations the counts are further from their shares than chance has them."""
    counts, expected = drawn.bincount(minlength=len(shares)), shares * len(drawn)
    freedom = len(shares) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# --- what is drawn ---


# Those that compute on the device, and those that may be asked for hundreds of rows: the interpreter takes minutes.
ON_CPU = os.environ["TWINATTN_TEST_DEVICE"] == "cpu"
ALL = ["reference", "torch", "triton"] if ON_CPU else ["reference", "triton"]
FAST = ["reference", "torch"] if ON_CPU else ["reference", "triton"]


@pytest.fixture(params=ALL)
def draw(request, monkeypatch, device):
    """Return the function `sample` of the reference, or of the twin by one of its kernels, over small blocks."""
    if request.param == "reference":
        return sample

    def draw_by_kernel(*tensors):
        return twin.sample(*(None if x is None else x.to(device) for x in tensors)).cpu()

    monkeypatch.setattr(torch_sampling, "BLOCK", 16)
    if request.param == "triton":
        monkeypatch.setattr("twinattn.engine.kernels.sampling.BLOCK", 64)
        monkeypatch.setattr(twin, "kernels_for", lambda _: triton_sampling)
    return draw_by_kernel


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("draw", FAST, indirect=True)
@pytest.mark.parametrize(
    ("temperature", "top_p", "shares"),
    [
        (1.0, None, [0.2, 0.5, 0.0, 0.3]),
        (1.0, 0.5, [0.0, 1.0, 0.0, 0.0]),
        (1.0, 0.51, [0.0, 0.625, 0.0, 0.375]),
        (0.5, 1.0, [0.04 / 0.38, 0.25 / 0.38, 0.0, 0.09 / 0.38]),
        (0.0, 0.3, [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_tokens_are_drawn_by_their_probability(draw, temperature, top_p, shares):
    n = 1000
    logits = torch.tensor([[0.2, 0.5, 0.0, 0.3]], dtype=torch.float64).log().expand(n, 4)
    ones = torch.ones(n, dtype=torch.float64)
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    drawn = draw(logits, temperature * ones, None if top_p is None else top_p * ones, uniform)
    assert drawn.tolist() == drawn.sort().values.tolist(), "a line in the order of the ids"
    assert (drawn.bincount(minlength=4) / n).tolist() == pytest.approx(shares, abs=2 / n)


@pytest.mark.parametrize("draw", FAST, indirect=True)
def test_the_distribution_over_many_seeds(draw):
    n = 1000
    logits = torch.tensor([1.0, -2.0, 0.5, 0.0, 2.0, -torch.inf, 0.5])
    shares = (logits.double() / 0.7).softmax(-1)
    uniform = uniforms(range(n), [3] * n)
    ones = torch.ones(n, dtype=torch.float64)
    drawn = draw(logits.expand(n, 7), 0.7 * ones, None, uniform)
    possible = shares > 0
    assert chi_square((possible.cumsum(0) - 1)[drawn], shares[possible]) < 5 and possible[drawn].all()
    nucleus = [0, 4]  # 0.67 and 0.16 of all
    drawn = draw(logits.expand(n, 7), 0.7 * ones, 0.8 * ones, uniform)
    assert set(drawn.tolist()) == set(nucleus)
    assert chi_square((drawn == 4).long(), shares[nucleus] / shares[nucleus].sum()) < 5


def test_the_ends_of_what_can_be_drawn(draw):
    """The smallest and the largest random number, temperatures that divide to infinity, and tokens that cannot come."""
    logits = torch.tensor([-torch.inf, -1e30, 1e30, 0.9e30, -torch.inf]).repeat(5, 1)
    temperature = column(1.0, 1.0, 1e-310, 1e300, 1e300)
    uniform = column(0.0, NEXT_TO_ONE, NEXT_TO_ONE, NEXT_TO_ONE, 0.0)
    assert draw(logits, temperature, None, uniform).tolist() == [2, 2, 2, 3, 1]
    top_p = column(1.0, 1e-9, 0.5, 0.5, 0.3)
    assert draw(logits, temperature, top_p, uniform).tolist() == [2, 2, 2, 3, 2]


def test_of_equal_tokens_the_nucleus_has_those_with_lower_ids(draw):
    """Of ten equal ones the first three reach 0.3; 0.0 and -0.0 are equal; and the second 1.0 is not needed."""
    logits = torch.zeros(5, 200)
    logits[:, 10:] = -torch.inf
    logits[1, :10:2] *= -1.0
    logits[2] = logits[2].roll(60)  # across the blocks
    logits[3, 7] = 9.0
    logits[4, :3] = torch.tensor([1.0, 1.0, 2.0])
    logits[4, 3:] = -torch.inf
    uniform, top_p = column(NEXT_TO_ONE, NEXT_TO_ONE, NEXT_TO_ONE, 0.0, 0.5), column(0.3, 0.3, 0.5, 0.5, 0.7)
    assert draw(logits, torch.ones(5), top_p, uniform).tolist() == [2, 2, 64, 7, 2]


def test_rows_without_a_token(draw):
    logits = torch.zeros(8, 150)
    logits[0::4, 149] = torch.nan
    logits[1::4, 100] = torch.inf
    logits[2::4] = -torch.inf
    logits[3::4, 140] = -torch.inf
    logits[3::4, 70] = 5.0
    temperature = column(*[0.0] * 4, *[0.01] * 4)
    for top_p in (None, torch.full((8,), 0.5)):
        assert draw(logits, temperature, top_p, torch.full((8,), 0.5)).tolist() == [-1, -1, -1, 70] * 2


def test_the_first_of_the_largest_logits_is_the_greedy_token(draw):
    logits = torch.zeros(3, 300, dtype=torch.float16)
    logits[0, [75, 201]] = 1.0
    logits[1, [17, 299]] = 1.0
    logits[2, 299] = 1.0
    assert draw(logits, torch.zeros(3), None, torch.zeros(3)).tolist() == [75, 17, 299]
    assert draw(logits[:0], torch.zeros(0), None, torch.zeros(0)).tolist() == []


def test_an_empty_vocabulary_is_an_error(draw):
    with pytest.raises(ValueError, match=r"logits: expected a vocabulary of at least one token, got \[2, 0\]"):
        draw(torch.zeros(2, 0), torch.ones(2), None, torch.zeros(2))


# --- the twin, and one row among others ---


def rows_of(dtype, v, seed):
    """Make rows with ties, `-inf`, faults, extreme temperatures and random numbers, and what they are drawn with."""
    b, chance = 12, torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(b, v, generator=chance)
    logits[::3] = logits[::3].round()  # ties
    logits[0] -= 30  # none above 0
    is_masked = torch.rand(b, v, generator=chance) < 0.5
    is_masked[:, 0] = False
    logits[1::4] = logits[1::4].masked_fill(is_masked[1::4], -torch.inf)
    logits[6, -1], logits[10, 0], logits[7] = torch.nan, torch.inf, -torch.inf
    temperature = column(0.6, 1.0, 0.0, 1e-9, 1e9, 2.5).repeat(2)
    uniform = torch.rand(b, generator=chance, dtype=torch.float64)
    uniform[4], uniform[5], uniform[11] = 0.0, NEXT_TO_ONE, NEXT_TO_ONE
    top_p = column(0.9, 1.0, 0.3, 0.999, 0.2, 0.7, 0.5, 0.5, 1e-6, 0.8, 0.5, 1.0)
    return logits.to(dtype), temperature, top_p, uniform


@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "top-p"])
@pytest.mark.parametrize(
    ("dtype", "v"),
    [(torch.float32, 130), (torch.float16, 250), (torch.float64, 7), (torch.float32, 1)],
    ids=["float32-130", "float16-250", "float64-7", "float32-1"],
)
def test_the_twins_draw_the_same_tokens(draw, dtype, v, cuts):
    """Or, at the end of the line, that of a number which is very near: other sums are rounded otherwise."""
    logits, temperature, top_p, uniform = rows_of(dtype, v, seed=v)
    logits = torch.stack([logits, logits.flip(0)], dim=-1)[..., 0]  # with strides
    top_p = top_p if cuts else None
    found = draw(logits, temperature, top_p, uniform)
    low = sample(logits, temperature, top_p, (uniform - CLOSE).clamp(min=0))
    high = sample(logits, temperature, top_p, (uniform + CLOSE).clamp(max=NEXT_TO_ONE))
    assert ((low <= found) & (found <= high)).all()
    assert (found == sample(logits, temperature, top_p, uniform))[uniform < NEXT_TO_ONE].all()


@pytest.mark.parametrize("draw", FAST, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_the_batch(draw, dtype):
    """No bit of its sums does: the random numbers are the ends of the tokens on the line, and their neighbours."""
    logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(5)).to(dtype)
    weights = (logits[2].double() - logits[2].max().double()).div(0.7).exp()
    ends = weights.cumsum(0)[:-1] / weights.sum()
    uniform = torch.cat([ends, ends.nextafter(torch.zeros(1).double()), ends.nextafter(torch.ones(1).double())])
    ones = torch.ones(len(uniform), dtype=torch.float64)
    for top_ps in (None, column(1.0, 0.5, 0.9, 0.2, 1.0)):
        together = draw(logits[2].expand(len(uniform), -1), 0.7 * ones, None if top_ps is None else 0.9 * ones, uniform)
        for row in range(0, len(uniform), 97):
            among = draw(logits, column(0.0, 2.0, 0.7, 1.0, 0.3), top_ps, uniform[row].expand(5))
            assert among[2] == together[row]


@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "top-p"])
def test_a_recorded_draw_follows_its_buffers(cuts, device):
    """A graph that waits for nothing: rows turn from greedy ones to drawn ones and back, and from sound to faulty."""
    steps = [rows_of(torch.float32, 130, seed) for seed in (1, 2)]
    steps.append(tuple(x.flip(0) for x in steps[0]))
    buffers = [x.to(device) for x in steps[0]]
    if not cuts:
        buffers[2] = None
    replay = record(lambda: twin.sample(*buffers), device)
    for step in steps:
        for buffer, x in zip(buffers, step, strict=True):
            if buffer is not None:
                buffer.copy_(x)
        logits, temperature, top_p, uniform = step
        expected = sample(logits, temperature, top_p if cuts else None, uniform)
        assert (replay().cpu() == expected)[uniform < NEXT_TO_ONE].all()


# --- requests ---


class Asked:
    """A request with some tokens so far."""

    def __init__(self, count, **options):
        self.sampling, self.num_outputs = SamplingParams(**options), count


REQUESTS = [
    Asked(0),
    Asked(3, temperature=0.5, seed=7),
    Asked(8, temperature=2.0, top_p=0.25, seed=-1),
    Asked(3, seed=7),
]


def test_settings_are_known_before_the_logits():
    settings = settings_of(REQUESTS)
    assert settings.dtype == torch.float64 and settings.device.type == "cpu"
    assert settings[:2].tolist() == [[0, 0.5, 2, 0], [1, 1, 0.25, 1]]
    assert settings[2].tolist() == uniforms([0, 7, -1, 7], [0, 3, 8, 3]).tolist()
    ahead = settings_of(REQUESTS, [0, 1, 2, 0])
    assert ahead[2].tolist() == uniforms([0, 7, -1, 7], [0, 4, 10, 3]).tolist()
    assert settings_of([]).shape == (3, 0)
    assert settings_of(REQUESTS[:1]).tolist() == [[0], [1], [0]], "greedy rows alone need no random number"


@pytest.mark.parametrize("package", [reference, twin], ids=["refattn", "fastattn"])
def test_tokens_are_chosen_by_the_settings(package, device):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).to(device)
    logits[3, 2] = torch.nan
    temperature, top_p, uniform = settings_of(REQUESTS, [0, 1, 2, 0])
    expected = sample(logits.cpu(), temperature, top_p, uniform).tolist()
    assert choose(logits, REQUESTS, [0, 1, 2, 0], sample=package.sample) == [*expected[:3], None]


def test_without_top_p_nothing_is_cut():
    """A kernel needs launches of its own to find a nucleus, and the host knows that there is none to find."""
    asked = []

    def note(logits, temperature, top_p, uniform):
        asked.append(top_p)
        return sample(logits, temperature, top_p, uniform)

    choose(torch.zeros(2, 5), REQUESTS[:2], sample=note)
    choose(torch.zeros(2, 5), REQUESTS[1:3], sample=note)
    assert asked[0] is None and asked[1].tolist() == [1, 0.25]
