"""The profile of an engine's steps: every moment of a step is in one phase, and watching changes no answer."""

import itertools
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.console import Console

import twinattn.engine.profile
from tests.helpers.engines import PROMPTS, make_engine, outputs
from tests.helpers.tiny_models import make_llama
from twinattn.engine import NGram
from twinattn.engine.profile import MOST_SHOWN, PHASES, Profile, StepTimes, draw, some, times_table

WHOLE = ["scheduling", "tables", "copies", "tables", "forward", "sampling", "bookkeeping"]


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes on by one second whenever it is read."""
    monkeypatch.setattr(twinattn.engine.profile, "time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__))


@pytest.mark.parametrize("speculation", [None, NGram(max_drafts=3)], ids=["plain", "drafts"])
def test_every_step_is_split_into_phases_without_a_gap(llama, seconds, speculation):
    expected = outputs(make_engine(llama), PROMPTS)
    engine = make_engine(llama, "fastattn", max_num_batched_tokens=24, speculation=speculation)
    profile = Profile(engine)
    assert outputs(engine, PROMPTS) == expected
    engine.step()  # nothing to do: no step
    assert len(profile.steps) == engine.counters.steps > 4
    for step in profile.steps:
        phases, starts, ends = zip(*step.spans, strict=True)
        assert list(phases) == WHOLE
        assert starts == (0, *ends[:-1]) and ends == tuple(range(1, len(WHOLE) + 1))
        assert step.seconds == sum(map(step.seconds_of, PHASES)) == len(WHOLE)
        assert step.seconds_of("tables") == 2
    assert sum(step.num_tokens for step in profile.steps) == engine.counters.computed_tokens
    assert sum(step.num_chunks for step in profile.steps) == engine.counters.chunks


def test_a_pass_that_is_repeated_for_each_request_is_in_the_profile(llama, seconds):
    def refuse(module, arguments):
        if (arguments[0] == 66).any():
            raise RuntimeError("no such row")

    llama.get_input_embeddings().register_forward_pre_hook(refuse)
    engine = make_engine(llama)
    profile = Profile(engine)
    bad, good = engine.generate([[66, 2], [4, 5]])
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    first, second = profile.steps[:2]
    assert [name for name, *_ in first.spans] == [*WHOLE[:5], *WHOLE[1:5], *WHOLE[1:]]
    assert first.seconds == len(first.spans) and [name for name, *_ in second.spans] == WHOLE


def test_a_step_that_is_undone_is_none(llama, monkeypatch):
    engine = make_engine(llama)
    profile = Profile(engine)
    request = engine.add(PROMPTS[1])
    schedule = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert not profile.steps
    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    engine.step()
    assert [step.num_tokens for step in profile.steps] == [request.prompt_len]


def made(num_chunks, *milliseconds):
    ends = list(itertools.accumulate((ms / 1e3 for ms in milliseconds), initial=0.0))
    return StepTimes(0.0, list(zip(PHASES, ends, ends[1:], strict=False)), num_tokens=5, num_chunks=num_chunks)


def test_the_table_has_medians_and_shares():
    steps = [made(0, 1, 2, 1, 4, 1, 1), made(0, 3, 2, 1, 4, 5, 5), made(0, 2, 2, 1, 4, 0.5, 0.5), made(2, *[5] * 6)]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(times_table(steps, "a title"))
    lines = [[cell.strip() for cell in line.split("│")[1:-2]] for line in capture.get().splitlines() if "│" in line]
    assert lines == [
        ["scheduling", "2.00 ms", "20.0%", "5.00 ms", "16.7%"],
        ["tables", "2.00 ms", "20.0%", "5.00 ms", "16.7%"],
        ["copies", "1.00 ms", "10.0%", "5.00 ms", "16.7%"],
        ["forward", "4.00 ms", "40.0%", "5.00 ms", "16.7%"],
        ["sampling", "1.00 ms", "10.0%", "5.00 ms", "16.7%"],
        ["bookkeeping", "1.00 ms", "10.0%", "5.00 ms", "16.7%"],
        ["step", "10.00 ms", "", "30.00 ms", ""],
    ]
    with console.capture() as capture:
        console.print(times_table(steps[-1:]))
    assert "0 decodes" in capture.get() and "1 with prompts" in capture.get()


def test_a_picture_has_steps_of_both_kinds(tmp_path):
    prompts, decodes = [made(1, *[5] * 6) for _ in range(9)], [made(0, *[1] * 6) for _ in range(9)]
    shown = some([*prompts, *decodes])
    assert [step.num_chunks for step in shown] == [1] * (MOST_SHOWN // 2) + [0] * (MOST_SHOWN // 2)
    assert some(prompts[:3]) == prompts[:3] and some(decodes) == decodes[:MOST_SHOWN]
    assert some([*prompts, *decodes[:1]])[-1] is decodes[0]
    draw({"one": [*prompts, *decodes], "two": decodes}, tmp_path / "steps.svg")
    picture = ElementTree.parse(tmp_path / "steps.svg")
    colours = {x.get("style") for x in picture.iter("{http://www.w3.org/2000/svg}path") if x.get("style")}
    assert all(any(colour in style for style in colours) for colour in twinattn.engine.profile.COLOURS)
    with pytest.raises(ValueError, match="runs: expected some with steps, got two without"):
        draw({"one": decodes, "two": []}, tmp_path / "steps.svg")
