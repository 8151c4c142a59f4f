"""The slots that are shown on the site are those of the engine's pool: its logic runs in V8, for random requests."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from refattn import state_cache
from twinattn.engine import SamplingParams
from twinattn.engine.request import Request
from twinattn.engine.scheduler import Scheduler
from twinattn.engine.state_pool import StatePool

EXPLORER = Path(__file__).parent.parent.parent / "docs/explorer"


@pytest.fixture(scope="module")
def evaluate():
    with MiniRacer() as racer:  # unclosed, it would wait for its engine for ever
        racer.eval((EXPLORER / "state.js").read_text())

        def call(expression: str, *given: Any) -> Any:
            return json.loads(racer.eval(f"JSON.stringify(((given) => {expression})({json.dumps(given)}))"))

        yield call


def draw(seed: int) -> dict[str, int]:
    """Draw requests: no kept states or many, chunks of one token, blocks of one, prefixes that end anywhere."""
    rng = random.Random(seed)
    drafts, prompt, output, second = (
        rng.choice([0, 0, 1, 2, 4]),
        rng.randint(1, 40),
        rng.randint(1, 20),
        rng.randint(1, 40),
    )
    return dict(
        prompt=prompt,
        output=output,
        budget=rng.choice([1, 2, 3, 7, 9, 64]),
        block=rng.choice([1, 2, 4, 4, 5, 16]),
        drafts=drafts,
        accepted=rng.randint(0, drafts),
        kept=rng.choice([0, 1, 2, 3, 8]),
        shared=rng.randint(0, min(second, prompt + output)),
        second=second,
        step=0,
    )


class Replay:
    """The real scheduler with the real pool, driven as `Engine.step` drives it; tokens are known before."""

    def __init__(self, settings: dict[str, int]) -> None:
        self.settings, block = settings, settings["block"]
        self.pool = StatePool(1, settings["kept"], block_size=block, decode_len=1 + settings["drafts"])
        self.scheduler = Scheduler(
            200, block, max_num_batched_tokens=settings["budget"], max_num_seqs=1, states=self.pool
        )
        self.steps: list[dict[str, Any]] = []

    def tokens(self, name: str, count: int) -> list[int]:
        return [i if i < self.settings["shared"] else i + 1000 * ord(name) for i in range(count)]

    def begin(self, name: str, prompt: int) -> Request:
        self.name = name
        request = Request(self.tokens(name, prompt), prompt, SamplingParams())
        self.scheduler.waiting.append(request)
        return request

    def prefill(self, request: Request) -> None:
        """Compute a prompt; its last chunk has a token after it."""
        while request.num_computed_tokens < request.prompt_len:
            self.step(request)

    def step(self, request: Request, *, drafts: int = 0, accepted: int = 0) -> None:
        ((_, count),) = self.scheduler.schedule().items()
        if drafts:
            count += drafts
            assert self.scheduler.allocate(request, count)
        first, slots = request.num_computed_tokens, self.pool.slots[request]
        said = dict(name=self.name, first=first, count=count, reads=slots.start, writes=list(slots.targets))
        keeps = slots.checkpoint
        said["keeps"] = keeps and {"slot": keeps[1], "after": (keeps[0] + 1) * self.settings["block"]}
        new = count - drafts + accepted
        if first + new >= request.prompt_len:
            request.tokens = self.tokens(self.name, first + new + 1)
        self.scheduler._advance(request, new)
        self.pool.settle(request)
        if keeps and said["keeps"]["after"] > first + new:
            said["keeps"]["isLost"] = True
        said |= dict(computed=request.num_computed_tokens, state=self.pool.slots[request].start, free=self.pool.free)
        self.steps.append(said | dict(kept=sorted(self.pool.kept.values())))


def test_every_step_is_that_of_the_pool(evaluate):
    """What is read, written, kept, given back and free after each step, and where the second request begins."""
    seen = dict.fromkeys(("hits", "partial", "lost", "rejected"), 0)
    for seed in range(120):
        settings = draw(seed)
        trace, replay = evaluate("states.play(given[0])", settings), Replay(settings)
        assert trace["settings"] == settings, "legal settings are taken as they are"
        a = replay.begin("a", settings["prompt"])
        replay.prefill(a)
        while len(a.tokens) < settings["prompt"] + settings["output"]:
            drafts = min(settings["drafts"], settings["prompt"] + settings["output"] - len(a.tokens) - 1)
            accepted = min(settings["accepted"], drafts)
            replay.step(a, drafts=drafts, accepted=accepted)
            seen["rejected"] += drafts > accepted
        replay.scheduler.finish(a, "length")
        b = replay.begin("b", settings["second"])
        of_keys = len(replay.scheduler.pool.find(b.tokens[:-1]))
        replay.prefill(b)
        shown = [{name: step[name] for name in replay.steps[0]} for step in trace["steps"]]
        for step in shown:
            step["kept"] = sorted(each["slot"] for each in step["kept"])
        assert shown == replay.steps
        first = replay.steps[trace["ofB"]]
        assert trace["hit"] == dict(keys=of_keys * settings["block"], state=first["first"]) and first["name"] == "b"
        assert trace["numSlots"] == replay.pool.num_slots
        seen["hits"] += first["first"] > 0
        seen["partial"] += 0 < first["first"] < of_keys * settings["block"]
        seen["lost"] += any(step["keeps"] and "isLost" in step["keeps"] for step in shown)
    assert min(seen.values()) > 5, seen


def test_bytes_are_those_of_the_pools(evaluate):
    sizes = evaluate("states.SIZES")
    pool = state_cache.allocate(1, sizes["valueHeads"], sizes["valueSize"], sizes["keySize"])
    found = evaluate("states.bytes(given[0])", 48)
    assert found["state"] == pool.nbytes == 2 * 2**20
    assert found["keys"] == 48 * 2 * 8 * 128 * 2 and evaluate("states.bytes(4096)")["state"] == found["state"]
    assert evaluate("states.bytes(given[0])", 512)["keys"] == found["state"], "what the page says"


def test_settings_are_in_the_address(evaluate):
    for seed in range(20):
        settings = draw(seed)
        assert evaluate("states.fromHash(states.toHash(given[0]))", settings) == settings
    assert (
        evaluate("states.toHash(states.fromHash('#prompt=1e9&drafts=-1&nonsense&step=x'))")
        == "prompt=64&drafts=0&accepted=0"
    )
    for page in ("state.md", "index.md"):
        for hash_ in re.findall(r"explorer/state\.md#([^)\s]+)\)", (EXPLORER / page).read_text()):
            assert evaluate("states.toHash(states.fromHash(given[0]))", hash_) == hash_, (
                "a link has no more than it needs"
            )


def test_the_answers_of_the_page_are_right(evaluate):
    def play(hash_: str) -> tuple[dict[str, Any], dict[str, Any]]:
        trace = evaluate("states.play(states.fromHash(given[0]))", hash_)
        return trace, trace["steps"][trace["settings"]["step"]]

    trace, step = play("step=0")
    assert sum(step["isPrompt"] and step["name"] == "a" for step in trace["steps"]) == 3
    assert (step["keeps"]["after"], step["computed"]) == (8, 9)
    _, step = play("step=3")
    assert (step["drafts"], step["accepted"], len(step["writes"]), step["writes"].index(step["state"])) == (2, 1, 3, 1)
    _, step = play("accepted=0&step=3")
    assert step["keeps"]["isLost"] and step["keeps"]["after"] == 24 and step["first"] + step["count"] == 25
    trace, step = play("step=7")
    assert trace["hit"] == {"keys": 12, "state": 8} and trace["ofB"] == 7 and step["first"] == 8
    assert play("budget=4&kept=8")[0]["hit"] == {"keys": 12, "state": 12}
    trace, step = play("budget=64&step=5")
    assert trace["hit"] == {"keys": 12, "state": 0} and trace["ofB"] == 5
    assert [each["after"] for each in trace["steps"][0]["kept"]] == [20]
    trace, step = play("kept=0&step=7")
    assert trace["hit"] == {"keys": 12, "state": 0} and step["name"] == "b"
    assert sum(step["count"] for step in trace["steps"] if step["name"] == "b") == 20
