"""The engine that is played on the site decides as refattn's scheduler: its logic runs in V8, over random traces."""

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from py_mini_racer import MiniRacer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.tiny_models import make_llama
from twinattn.bench.work import workload
from twinattn.engine import Engine, SamplingParams
from twinattn.engine.request import Request
from twinattn.engine.scheduler import Scheduler

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = [(ROOT / "docs/explorer" / name).read_text() for name in ("memory.js", "machines.js", "engine.js")]
TRACES = 300


@pytest.fixture(scope="module")
def evaluate():
    with MiniRacer() as racer:  # unclosed, it would wait for its engine for ever
        for script in SCRIPTS:
            racer.eval(script)

        def call(expression: str, *given: Any) -> Any:
            return json.loads(racer.eval(f"JSON.stringify(((given) => {expression})({json.dumps(given)}))"))

        yield call


def draw(seed: int) -> dict[str, Any]:
    """Draw a trace that a server dreads: small pools, budgets of one token, the same text at the same time."""
    rng = random.Random(seed)
    block = rng.choice([1, 2, 3, 4, 8])
    arrivals = rng.choice([[0], [0, 0, 5, 20], [0, 30, 31, 60, 90, 300]])
    prompts = rng.choice([[1, 2, 3], [4, 8, 9], [5, 12, 17, 24]])
    requests = [
        [rng.choice(arrivals), rng.choice(prompts), rng.choice([1, 2, 6, 13, 20]), rng.choice([0, 1, 1, 2])]
        for _ in range(rng.randint(1, 9))
    ]
    longest = max(prompt + output - 1 for _, prompt, output, _ in requests)
    return {
        "requests": requests,
        "shared": rng.choice([0, 4, 7, 8, 16, 30]),
        "blocks": -(-longest // block) + rng.choice([-1, 0, 0, 1, 1, 2, 3, 5]) or 1,
        "block": block,
        "budget": rng.choice([1, 2, 3, 5, 8, 16, 100]),
        "seqs": rng.choice([1, 2, 3, 12, 12]),
        "model": rng.choice(["Llama-3-8B", "SmolLM2-135M"]),
        "machine": rng.choice([0, 1]),
        "step": 0,
    }


@pytest.fixture(scope="module")
def played(evaluate) -> list[dict[str, Any]]:
    traces = []
    for seed in range(TRACES):
        settings = draw(seed)
        traces.append(evaluate("engine.play(given[0])", settings))
        assert traces[-1]["settings"] == settings, "legal settings are taken as they are"
    return traces


class Replay:
    """The real scheduler, driven as `Engine.step` drives it; instead of a model, tokens that are known before."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.scheduler = Scheduler(
            settings["blocks"],
            settings["block"],
            max_num_batched_tokens=settings["budget"],
            max_num_seqs=settings["seqs"],
        )
        self.requests = [
            Request([self.token(i, j) for j in range(prompt)], prompt, SamplingParams(max_tokens=output))
            for i, (_, prompt, output, _) in enumerate(settings["requests"])
        ]
        self.number = {request: i for i, request in enumerate(self.requests)}
        self.finished: list[int] = []

    def token(self, i: int, position: int) -> int:
        _, prompt, _, colour = self.settings["requests"][i]
        shares = colour > 0 and position < self.settings["shared"] and position < prompt
        return 1000 * (colour if shares else 100 + i) + position

    def step(self, arrived: list[int]) -> dict[str, Any]:
        """Do one step, and return what a step of engine.js says of it."""
        scheduler, number = self.scheduler, self.number
        scheduler.waiting.extend(self.requests[i] for i in arrived)
        ran = list(scheduler.running)
        scheduled = scheduler.schedule()
        scheduler.counters.key_reads += sum(request.num_computed_tokens + n for request, n in scheduled.items())
        said: dict[str, Any] = {
            "arrived": arrived,
            "scheduled": [
                {"i": number[request], "count": count, "first": request.num_computed_tokens}
                for request, count in scheduled.items()
            ],
            "started": [
                {"i": number[request], "tokens": request.num_computed_tokens}
                for request in scheduler.running
                if request not in ran
            ],
            "preempted": [number[request] for request in ran if request.status == "waiting"],
            "waiting": [number[request] for request in scheduler.waiting],
            "running": [{"i": number[request], "blocks": [*request.blocks]} for request in scheduler.running],
            "free": list(scheduler.pool.free),
            "cached": sorted(scheduler.pool.contents),
        }
        self.finished = []
        for request, count in scheduled.items():
            due = count >= request.num_pending
            scheduler.keep(request, count)
            if due:
                request.tokens.append(self.token(number[request], len(request.tokens)))
                if request.num_outputs == request.sampling.max_tokens:
                    scheduler.finish(request, "length")
                    self.finished.append(number[request])
        scheduler.counters.steps += 1
        return said | {"finished": self.finished}


def test_every_step_is_that_of_the_scheduler(played):
    """Who gets how many tokens, in which order, and which blocks; who waits, hits, is preempted and ends."""
    seen = dict.fromkeys(("cached_tokens", "preemptions", "chunks"), 0)
    for trace in played:
        replay, steps = Replay(trace["settings"]), trace["steps"]
        to_come = [request for request in trace["requests"] if not request["isRefused"]]
        for step in steps:
            arrived = [request for request in to_come if request["arrives"] <= step["start"]]
            to_come = [request for request in to_come if request not in arrived]
            arrived.sort(key=lambda request: request["arrives"])
            said = replay.step([request["i"] for request in arrived])
            shown = {name: step[name] for name in said}
            shown["cached"] = sorted(step["cached"])
            shown["scheduled"] = [{k: each[k] for k in ("i", "count", "first")} for each in step["scheduled"]]
            shown["started"] = [{k: each[k] for k in ("i", "tokens")} for each in step["started"]]
            assert shown == said
            assert step["counters"] == {name: getattr(replay.scheduler.counters, name) for name in step["counters"]}
        assert not (to_come or replay.scheduler.waiting or replay.scheduler.running), "everybody is done"
        for name in seen:
            seen[name] += vars(replay.scheduler.counters)[name]
    assert min(seen.values()) > TRACES / 2, f"the traces are too tame: {seen}"


def test_what_is_refused_is_what_the_engine_refuses(played):
    model = make_llama()
    traces = [trace for trace in played if {each["isRefused"] for each in trace["requests"]} == {True, False}][:6]
    for trace in traces:
        engine = Engine(model, num_blocks=trace["settings"]["blocks"], block_size=trace["settings"]["block"])
        for request in trace["requests"]:
            refused = pytest.raises(ValueError, match="expected to fit in the pool")
            with refused if request["isRefused"] else nullcontext():
                engine.add([1] * request["prompt"], SamplingParams(max_tokens=request["output"]))
    assert len(traces) == 6


@pytest.mark.parametrize("seed", [0, 1])
def test_the_loop_is_that_of_the_engine(evaluate, seed):
    """A model in the loop, whose tokens were not known before: the same counters, step for step."""
    settings = draw(seed) | {"blocks": 24, "block": 3, "seqs": 3, "budget": 7}
    settings["requests"] = [[0, *rest] for _, *rest in settings["requests"]]
    replay = Replay(settings)
    engine = Engine(make_llama(), num_blocks=24, block_size=3, max_num_seqs=3, max_num_batched_tokens=7)
    ids: dict[int, int] = {}  # the tokens of the page in those of the model
    for request in replay.requests:
        prompt = [ids.setdefault(token, len(ids)) for token in request.tokens]
        engine.add(prompt, SamplingParams(max_tokens=request.sampling.max_tokens, stop_token_ids=()))
    for step in evaluate("engine.play(given[0])", settings)["steps"]:
        engine.step()
        assert {name: getattr(engine.counters, name) for name in step["counters"]} == step["counters"]
    assert not (engine.waiting or engine.running)


# --- what it costs, and what users feel ---


def test_a_step_costs_what_the_benchmark_counts(evaluate, played):
    """Attention of all layers, as `twinattn bench` counts it, and matrices whose weights are read once for all rows."""
    for trace in played[:15]:
        model = evaluate("engine.sizes(given[0])", trace["settings"]["model"])
        machine = evaluate("machines[given[0]]", trace["settings"]["machine"])
        itemsize = {"float32": 4, "bfloat16": 2}[machine["dtype"]]
        for step in trace["steps"]:
            cost, lens = step["cost"], [(each["count"], each["first"] + each["count"]) for each in step["scheduled"]]
            heads = model["heads"], model["kv"]
            work = workload(tuple(lens), block_size=16, heads=heads, head_size=model["size"])
            rows = sum(count for count, _ in lens)
            queries = rows * model["heads"] * model["size"] * itemsize
            assert cost["rows"] == rows
            assert cost["attention"]["flops"] == model["layers"] * work.flops()
            assert cost["attention"]["bytes"] == model["layers"] * (work.reads(itemsize) - queries)
            assert cost["linear"]["bytes"] == model["parameters"] * itemsize
            assert cost["linear"]["flops"] == 2 * model["parameters"] * rows
            seconds = 0.0
            for part in (cost["linear"], cost["attention"]):
                times = {"memory": part["bytes"] / machine["read"], "computation": part["flops"] / machine["product"]}
                assert part["seconds"] == max(times.values()) == times[part["limit"]]
                seconds += part["seconds"]
            assert step["end"] - step["start"] == pytest.approx(seconds)
        shares = evaluate("engine.shares(given[0])", trace["steps"])
        assert sum(shares.values()) == pytest.approx(sum(step["seconds"] for step in trace["steps"]))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("SmolLM2-135M", dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, tie_word_embeddings=True)),
        ("Llama-3-8B", dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336)),
    ],
)
def test_the_parameters_are_those_of_the_model(evaluate, name, config):
    sizes = evaluate("engine.sizes(given[0])", name)
    config |= dict(num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv"], head_dim=sizes["size"])
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=sizes["layers"], **config))
    assert sizes["parameters"] == pytest.approx(sum(x.numel() for x in model.parameters()), rel=0.005)


def test_models_are_those_whose_layers_see_everything(evaluate):
    names = {*evaluate("engine.MODELS()")}
    assert names >= {"Llama-3-8B", "SmolLM2-135M", "Llama-2-7B"}
    assert not names & {"Gemma-2-9B", "Mixtral-8x7B", "DeepSeek-V3", "Mistral-7B-v0.1"}


def test_latency_and_throughput(evaluate, played):
    for trace in played[:20]:
        steps, requests = trace["steps"], trace["requests"]
        for step in steps[:: max(1, len(steps) // 3)]:
            count = 0
            for request in requests:
                due = [s["end"] for s in steps if any(e["i"] == request["i"] and e["isDue"] for e in s["scheduled"])]
                assert request["times"] == due
                due = [time for time in due if time <= step["end"]]
                count += len(due)
                gaps = torch.tensor(due, dtype=torch.float64).diff()
                found = evaluate("engine.latency(given[0], given[1])", request, step["end"])
                assert found["tokens"] == len(due)
                assert found["ttft"] == (due[0] - request["arrives"] if due else None)
                assert found["mean"] == (pytest.approx(float(gaps.mean())) if len(gaps) else None)
                assert found["worst"] == (pytest.approx(float(gaps.max())) if len(gaps) else None)
            begin = min(request["arrives"] for request in requests if not request["isRefused"])
            assert evaluate("engine.throughput(given[0], given[1])", requests, step["end"]) == pytest.approx(
                count / (step["end"] - begin)
            )


# --- settings ---


def test_an_address_holds_the_settings(evaluate, played):
    for trace in played[::10]:
        hash = evaluate("engine.toHash(given[0])", trace["settings"])
        assert re.fullmatch(r"[\w=&,;.-]*", hash), "readable, and whole when it is pasted"
        assert evaluate("engine.fromHash(given[0])", f"#{hash}") == trace["settings"]
    assert evaluate("engine.toHash(engine.legal({}))") == ""


def test_presets_and_links_are_addresses(evaluate):
    """What the page offers, and what pages and notebooks link to, is a state as the page writes it, with that step."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "README.md"]
    links = [link for page in pages for link in re.findall(r"explorer/engine\.md#([^)\s]+)\)", page.read_text())]
    presets = evaluate("Object.values(engine.PRESETS)")
    assert len(presets) > 5 and len(links) > 2
    for hash in [*links, *presets]:
        assert evaluate("engine.toHash(engine.fromHash(given[0]))", hash) == hash
        trace = evaluate("engine.play(engine.fromHash(given[0]))", hash)
        assert trace["settings"]["step"] < len(trace["steps"]) and not trace["isCut"]
        assert not any(request["isRefused"] for request in trace["requests"])


def test_the_answers_on_the_page(evaluate):
    """Every number that the page answers its own questions with is what the engine shows then, in this order."""

    def play(name: str, **changes: Any) -> dict[str, Any]:
        settings = evaluate("engine.fromHash(engine.PRESETS[given[0]])", name)
        trace = evaluate("engine.play(given[0])", settings | changes)
        until = trace["steps"][-1]["end"]
        trace["latency"] = [evaluate("engine.latency(given[0], given[1])", r, until) for r in trace["requests"]]
        trace["throughput"] = evaluate("engine.throughput(given[0], given[1])", trace["requests"], until)
        trace["shown"] = trace["steps"][settings["step"]]
        return trace

    page = (ROOT / "docs/explorer/engine.md").read_text()
    answers = page.split("<summary>Answers</summary>")[1].split("</details>")[0]

    whole, chunks = play("a long prompt stalls decodes"), play("the same in chunks")
    assert {len(each["shown"]["arrived"]) for each in (whole, chunks)} == {1}
    worst = [max(each["worst"] for each in trace["latency"][:3]) * 1e3 for trace in (whole, chunks)]
    ttft = [trace["latency"][3]["ttft"] * 1e3 for trace in (whole, chunks)]
    alone, together = play("one at a time"), play("batching pays")
    longest = [trace["shown"]["seconds"] * 1e3 for trace in (alone, together)]
    assert len({f"{each:.1f}" for each in longest}) == 1
    prefix = play("a shared prefix")
    b, c = (
        [each for each in step["started"] if each["i"] == i] for step, i in ((prefix["shown"], 1), (prefix["shown"], 2))
    )
    assert b[0]["tokens"] == 1024 and not c[0]["tokens"]
    requests = [[0, *rest] if i == 1 else [at, *rest] for i, (at, *rest) in enumerate(prefix["settings"]["requests"])]
    assert not play("a shared prefix", requests=requests, budget=4096)["steps"][0]["started"][1]["tokens"]
    preempted = play("preemption")
    assert preempted["shown"]["preempted"] == [2]
    assert sorted(i for step in preempted["steps"] for i in step["preempted"]) == [1, 2, 2]
    enough = next(n for n in range(12, 30) if not play("preemption", blocks=n)["steps"][-1]["counters"]["preemptions"])
    keys = play("keys beside weights")["shown"]
    assert len({block for each in keys["running"] for block in each["blocks"]}) == 44
    expected = [
        f"{worst[0]:.0f}", "512", f"{worst[1]:.1f}", f"{ttft[0]:.0f}", f"{ttft[1]:.0f}", "512",
        f"{longest[0]:.2f}", f"{alone['throughput']:.0f}", f"{together['throughput']:,.0f}",
        "1024", str(1100 - b[0]["tokens"]), "1100", str(enough), "12",
        f"{keys['cost']['attention']['seconds'] * 1e3:.2f}", f"{keys['seconds'] * 1e3:.2f}", "8192",
    ]  # fmt: skip
    assert re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", answers) == expected


@pytest.mark.parametrize(
    "hash",
    ["", "#", "requests=", "requests=1,2;x", "requests=-5,0,9999,7&block=0&blocks=1e9", "budget=0&seqs=99",
     "model=none&machine=7&step=-3", "unknown=3", "%73eqs=2"],
)  # fmt: skip
def test_nonsense_in_an_address_becomes_legal_settings(evaluate, hash):
    settings = evaluate("engine.play(engine.fromHash(given[0]))", hash)["settings"]
    assert evaluate("engine.legal(given[0])", settings) == settings
    assert all(numbers and len(numbers) == 4 for numbers in settings["requests"])
    assert settings["budget"] >= 1 and settings["seqs"] <= 12 and settings["blocks"] <= 512


def test_a_trace_that_never_ends_is_cut(evaluate):
    trace = evaluate("engine.play(given[0])", {"requests": [[0, 5000, 3, 0]], "budget": 1, "blocks": 512})
    assert trace["isCut"] and len(trace["steps"]) == 1000
    empty = evaluate("engine.play(given[0])", {"requests": []})
    assert empty["steps"] == [] and not empty["isCut"]
