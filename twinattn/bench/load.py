"""Many requests at once: tokens per second, time to the first token, and time between tokens.

The load is that of nano-vllm's own benchmark: 256 requests, 100 to 1024 tokens in and as many out, all there at the
start, over a model of the sizes of Qwen3-0.6B, or of Qwen3-8B, with random weights. nano-vllm
(github.com/GeeeekExplorer/nano-vllm) runs beside it from a folder with its source, and vLLM with the attention backends
that are named (`load_vllm`), each in a process of its own.

Or over one of the sizes of Qwen3-Next-80B-A3B, three of four layers of which keep a state: dense, with as many weights
as a token meets there. It is served once for each size of the rings that are asked for (`Engine.state_ring_size`).

    tokens per second        all tokens of all answers, over the time until the last one
    time to first token      of each request, from the start
    time between tokens      of each request and each pair of its tokens: what a reader sees
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import fastattn
from refattn.checks import check_file, check_folder, check_int, check_number, check_sizes
from twinattn.bench.measure import circumstances, machine
from twinattn.engine import CudaGraphs, Engine, SamplingParams, fuse, profile
from twinattn.engine.profile import Profile, draw_timeline, times_table

SIZES = dict(  # Qwen3-0.6B's
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
)
NEXT_SIZES = dict(  # Qwen3-Next-80B-A3B's, without experts; its 10 and the shared one have 5632 hidden units together
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_experts=0,
    max_position_embeddings=40960,
)
MODELS = {
    "qwen3-0.6b": SIZES,
    "qwen3-8b": SIZES
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "qwen3-next": NEXT_SIZES,
}
CACHES = ("auto", "fp8_e4m3", "int4")
SHARED_CACHES = ("auto", "fp8_e4m3")  # names that this engine, vLLM and SGLang share
RINGS = (0, 16)  # for layers that keep a state: the inputs that a ring has room for
NUM_REQUESTS, FEWEST, MOST, LARGEST_TOKEN = 256, 100, 1024, 10000  # as in nano-vllm's bench.py
BUDGET = 16384  # tokens in a step, nano-vllm's default
ROUNDS = 2  # the first one may have something left to compile


class LoadError(RuntimeError):
    """A server could not serve the load; the message says why."""


@dataclass
class Round:
    """One round of requests.

    Attributes:
        server: who served it.
        temperature: of all requests.
        number: 0 for the first.
        tokens: how many were generated.
        seconds: how long it took, from the first request to the last token.
        first: time to first token, in seconds: median and 99th percentile; None if it was not taken.
        between: time between tokens, likewise.
    """

    server: str
    temperature: float
    number: int
    tokens: int
    seconds: float
    first: tuple[float, float] | None
    between: tuple[float, float] | None

    @classmethod
    def of(
        cls, server: str, temperature: float, number: int, start: float, stamps: Sequence[Sequence[float]]
    ) -> "Round":
        """Sum up when each token of each request came."""
        first = [its[0] - start for its in stamps]
        between = [later - earlier for its in stamps for earlier, later in zip(its, its[1:], strict=False)]
        end = max(its[-1] for its in stamps)
        return cls(
            server,
            temperature,
            number,
            sum(map(len, stamps)),
            end - start,
            _median_and_99(first),
            _median_and_99(between),
        )

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Round":
        """Return a round from its JSON."""
        return cls(**record | {name: tuple(record[name]) for name in ("first", "between") if record[name]})

    @property
    def tokens_per_second(self) -> float:
        """How many tokens came in a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Load:
    """Prompts, and how many tokens to generate for each.

    Attributes:
        prompts: the prompts.
        max_tokens: tokens of each answer; no token ends one.
    """

    prompts: list[list[int]] = field(repr=False)
    max_tokens: list[int]

    @classmethod
    def draw(cls, seed: int, num_requests: int = NUM_REQUESTS, most: int = MOST) -> "Load":
        """Draw a load, the same one for the same seed."""
        random = Random(seed)
        fewest = min(FEWEST, most)
        prompts = [
            [random.randint(0, LARGEST_TOKEN) for _ in range(random.randint(fewest, most))] for _ in range(num_requests)
        ]
        return cls(prompts, [random.randint(fewest, most) for _ in range(num_requests)])


def run(
    console: Console,
    *,
    temperatures: Sequence[float] = (0.0, 0.6),
    model: str = "qwen3-0.6b",
    rings: Sequence[int] = (),
    kv_cache_dtype: str = "auto",
    rounds: int = ROUNDS,
    nano_vllm: Path | None = None,
    vllm: Sequence[str] = (),
    sglang: Sequence[str] = (),
    graphs: str = "full",
    results: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Serve the load with this engine, nano-vllm, vLLM and SGLang, print the figures, and write them.

    Args:
        console: where to print.
        temperatures: rounds with each.
        model: whose sizes, a name of `MODELS`.
        rings: the sizes of rings to serve it with, of a model with layers that keep a state; `RINGS` if there are none.
        kv_cache_dtype: what the pools of all servers hold, a name of `CACHES`; scales of fp8 are 1, int4 is ours.
        rounds: how many with each temperature.
        nano_vllm: the folder with nano-vllm's source; None to leave it out.
        vllm: attention backends of vLLM, by its names; none to leave it out.
        sglang: attention backends of SGLang, by its names; none to leave it out.
        graphs: CUDA graphs of both: "full", or "default" for their own choice.
        results: a JSON file to write.
        picture: a file to draw some steps into.

    Raises:
        ValueError: naming the argument, if a temperature is none, a file cannot be written, or there is no CUDA device.
        ModuleNotFoundError: if there is no matplotlib to draw with.
        LoadError: if a request or another server fails.
    """
    from twinattn.bench.load_vllm import GRAPHS  # here, as that module imports this one

    if not temperatures:
        raise ValueError("temperatures: expected at least one, got none")
    for one in temperatures:
        check_number("temperature", one, at_least=0)
    known_names = dict(model=(model, MODELS), graphs=(graphs, GRAPHS), kv_cache_dtype=(kv_cache_dtype, CACHES))
    for name, (chosen, known) in known_names.items():
        if chosen not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {chosen!r}")
    check_sizes(rounds=rounds)
    has_states = check_model(model, rings, kv_cache_dtype, nano_vllm, dict(vllm=vllm, sglang=sglang))
    check_folder("results", None if results is None else results.parent)
    if results is not None and results.is_dir():
        raise ValueError(f"results: expected a file, got the folder {str(results)!r}")
    check_file("picture", picture)
    if picture is not None:
        profile.check_file(picture, "picture")
    if nano_vllm is not None and not nano_vllm.is_dir():
        raise ValueError(f"nano_vllm: expected a folder, got {str(nano_vllm)!r}")
    if not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device, which the load is made for, got none")
    sizes, done = MODELS[model], list[Round]()
    head = {"machine": machine(torch.device("cuda")), **circumstances(), "model": model}
    head |= {"kv_cache_dtype": kv_cache_dtype, "graphs": graphs if vllm or sglang else None}

    def show(served: list[Round]) -> None:
        """Print and write what was served so far: a server that fails leaves the figures of the others."""
        done.extend(served)
        console.print(table(done))
        if results is not None:
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(head | {"rounds": [asdict(one) for one in done]}, indent=1) + "\n")

    for found in served_beside(sizes, temperatures, rounds, graphs, kv_cache_dtype, nano_vllm, vllm, sglang):
        show(found)
    of_this = make_model(sizes, torch.device("cuda"), torch.bfloat16)
    for ring in (rings or RINGS) if has_states else (None,):
        engine = make_engine(of_this, ring=ring, kv_cache_dtype=kv_cache_dtype)
        found, head["warm_up_seconds"] = serve_rounds(console, engine, name_of(ring), temperatures, rounds, picture)
        del engine
        show(found)
        gc.unfreeze()  # the engine, so that its pools make room for those of the next one
        gc.collect()


def served_beside(
    sizes: dict[str, Any],
    temperatures: Sequence[float],
    rounds: int,
    graphs: str,
    kv_cache_dtype: str,
    nano_vllm: Path | None,
    vllm: Sequence[str],
    sglang: Sequence[str],
) -> Iterator[list[Round]]:
    """Yield the rounds of each other server, as `run` is asked for them."""
    from twinattn.bench.load_sglang import of_sglang  # here, as these modules import this one
    from twinattn.bench.load_vllm import of_vllm

    if nano_vllm is not None:
        yield of_nano_vllm(nano_vllm, sizes, temperatures, rounds)
    for of_server, backends in ((of_vllm, vllm), (of_sglang, sglang)):
        for backend in backends:
            yield of_server(backend, sizes, temperatures, rounds=rounds, graphs=graphs, kv_cache_dtype=kv_cache_dtype)


def serve_rounds(
    console: Console, engine: Engine, name: str, temperatures: Sequence[float], rounds: int, picture: Path | None
) -> tuple[list[Round], float]:
    """Serve all rounds with an engine, and one more with a profile; return them, and the time that it warmed up.

    Args:
        console: where to print.
        engine: it has served nothing yet.
        name: what tables call it.
        temperatures: rounds with each.
        rounds: how many.
        picture: a file to draw some steps into.
    """
    start = time.perf_counter()
    engine.warm_up(2 * MOST)
    warm_up = time.perf_counter() - start
    found = [
        serve(engine, given, temperature, number, name)
        for temperature, number, given in rounds_of(temperatures, rounds)
    ]
    profiled = Profile(engine)
    serve(engine, Load.draw(rounds * len(temperatures)), temperatures[-1], rounds)
    console.print(times_table(profiled.steps, f"a round more, with a profile: {name}"))
    if picture is not None and profiled.gpu is not None:
        draw_timeline(profiled.steps, profiled.gpu.spans(), picture)
    return found, warm_up


def check_model(
    model: str, rings: Sequence[int], kv_cache_dtype: str, nano_vllm: Path | None, beside: dict[str, Sequence[str]]
) -> bool:
    """Check which model is to be served and how, and return whether it has layers that keep a state.

    Raises:
        ValueError: naming the argument.
    """
    has_states = model == "qwen3-next"
    if rings and not has_states:
        raise ValueError(f"rings: expected none, as {model} has no layers that keep a state, got {list(rings)}")
    for ring in rings:
        check_int("ring", ring)
    if nano_vllm is not None and (has_states or kv_cache_dtype != "auto"):
        what = model if has_states else f"a cache of {kv_cache_dtype}"
        raise ValueError(f"nano_vllm: expected None, as it does not serve {what}, got {str(nano_vllm)!r}")
    for name, backends in beside.items():
        if backends and has_states:
            raise ValueError(f"{name}: expected no backend, as {model} is not served beside it here, got {[*backends]}")
        if backends and kv_cache_dtype not in SHARED_CACHES:
            what = f"it has no cache of {kv_cache_dtype} in this engine's format"
            raise ValueError(f"{name}: expected no backend, as {what}, got {[*backends]}")
    return has_states


def name_of(ring: int | None) -> str:
    """Return what a table calls this engine, with a ring of some size; None for a model without states."""
    return "this engine" + ("" if ring is None else f", ring of {ring}" if ring else ", no ring")


def make_model(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model with random weights, of Qwen3-Next where sizes are of its layers that keep a state."""
    torch.manual_seed(0)
    has_states = any(name.startswith("linear_") for name in sizes)
    config = transformers.Qwen3NextConfig(**sizes) if has_states else transformers.Qwen3Config(**sizes)
    with device:  # where 8 billion weights are drawn in a second
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_engine(
    model: Any,
    *,
    num_seqs: int = NUM_REQUESTS,
    budget: int = BUDGET,
    ring: int | None = None,
    kv_cache_dtype: str = "auto",
) -> Engine:
    """Make the engine that serves a model fastest: fused layers, where they can be, and captured decodes.

    Args:
        model: the model.
        num_seqs: requests that run at once.
        budget: tokens of a step.
        ring: inputs in a ring of layers that keep a state; None for a model without.
        kv_cache_dtype: what the pools hold.
    """
    on_gpu = model.device.type == "cuda"
    runner = CudaGraphs() if on_gpu else None
    can_fuse = on_gpu and ring is None  # layers that keep a state are of no family that is fused
    block_size = 16 if ring is None else 64  # states are kept at ends of blocks, which are ends of chunks, too
    return Engine(
        fuse(model) if can_fuse else model,
        num_blocks=num_seqs * 2 * MOST // block_size,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        twin=fastattn,
        runner=runner,
        state_ring_size=ring,
        kv_cache_dtype=kv_cache_dtype,
    )


def serve(engine: Engine, load: Load, temperature: float, number: int, server: str = "this engine") -> Round:
    """Serve a load with this project's engine."""
    start = time.perf_counter()
    requests = [
        engine.add(prompt, SamplingParams(count, temperature, seed=seed, stop_token_ids=()))
        for seed, (prompt, count) in enumerate(zip(load.prompts, load.max_tokens, strict=True))
    ]
    stamps: dict[Any, list[float]] = {request: [] for request in requests}
    while engine.running or engine.waiting:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            stamps[event.request].append(now)
    failed = [request.error for request in requests if request.error is not None]
    if failed:
        raise LoadError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return Round.of(server, temperature, number, start, list(stamps.values()))


def in_a_process(
    name: str, module: str, sizes: dict[str, Any], job: dict[str, Any], environment: dict[str, str]
) -> list[Round]:
    """Serve the load with a server in a process of its own, and return the rounds that it writes.

    Args:
        name: of the server.
        module: it is run with the job, as JSON, and the file to write.
        sizes: of a Qwen3 model, whose configuration goes into the folder `job["folder"]`.
        job: what it is to serve.
        environment: further variables of the process.

    Raises:
        LoadError: if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.Qwen3Config(**sizes, dtype="bfloat16", architectures=["Qwen3ForCausalLM"])
        config.save_pretrained(folder)
        results = Path(folder, "rounds.json")
        command = [sys.executable, "-m", module, json.dumps(dict(folder=folder) | job), str(results)]
        done = subprocess.run(command, stdout=sys.stderr, env=os.environ | environment, check=False)
        if done.returncode or not results.exists():
            raise LoadError(f"{name} ended with exit code {done.returncode}; its last words are above")
        return [Round.read(one) for one in json.loads(results.read_text())]


def of_nano_vllm(folder: Path, sizes: dict[str, Any], temperatures: Sequence[float], rounds: int) -> list[Round]:
    """Serve the load with nano-vllm, in a process of its own."""
    with tempfile.TemporaryDirectory() as model:
        transformers.Qwen3Config(**sizes, dtype="bfloat16").save_pretrained(model)
        given = [str(folder), model, str(rounds), *map(str, temperatures)]
        command = [sys.executable, "-m", "twinattn.bench.load", *given]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    if done.returncode:
        raise LoadError(f"nano-vllm ended with exit code {done.returncode}; its last words are above")
    return [Round.read(one) for one in json.loads(done.stdout.splitlines()[-1])]


def _serve_with_nano_vllm(folder: str, model: str, rounds: int, temperatures: Sequence[float]) -> list[Round]:
    """Serve the load with nano-vllm, in this process: random weights, no tokenizer, no end token."""
    sys.path.insert(0, folder)
    from types import SimpleNamespace

    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda tokens: "")
    transformers.AutoTokenizer.from_pretrained = classmethod(lambda *args, **kwargs: tokenizer)
    import nanovllm  # type: ignore[import-not-found]  # its source in a folder; no index has it
    from nanovllm.engine import model_runner as runner  # type: ignore[import-not-found]

    def randomize(network: torch.nn.Module, _path: str) -> None:
        for weight in network.parameters():
            torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else torch.nn.init.ones_(weight)

    runner.load_model = randomize
    llm = nanovllm.LLM(model, max_model_len=4096, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=BUDGET)
    params = nanovllm.SamplingParams
    llm.generate([[1, 2, 3]], params(max_tokens=16), use_tqdm=False)
    done = []
    for temperature, number, load in rounds_of(temperatures, rounds):
        start = time.perf_counter()
        for prompt, count in zip(load.prompts, load.max_tokens, strict=True):  # it has no greedy choice
            llm.add_request(prompt, params(temperature=max(temperature, 0.01), ignore_eos=True, max_tokens=count))
        sequences = list(llm.scheduler.waiting)
        stamps: list[list[float]] = [[] for _ in sequences]
        while not llm.is_finished():
            llm.step()
            now = time.perf_counter()
            for sequence, its in zip(sequences, stamps, strict=True):
                if sequence.num_completion_tokens > len(its):
                    its.append(now)
        done.append(Round.of("nano-vllm", temperature, number, start, stamps))
    return done


def rounds_of(temperatures: Sequence[float], rounds: int) -> Iterator[tuple[float, int, Load]]:
    """Yield all rounds; each has other prompts, so that none is found in the cache."""
    for i, (temperature, number) in enumerate(product(temperatures, range(rounds))):
        yield temperature, number, Load.draw(i)


def table(rounds: Sequence[Round]) -> Table:
    """Return the figures of some rounds as a table."""
    shown = Table(title=f"{NUM_REQUESTS} requests at once, {FEWEST} to {MOST} tokens in and out")
    for column in ("server", "temperature", "round", "tokens/s", "seconds", "first token", "99 %", "between", "99 %"):
        shown.add_column(column, justify="left" if column == "server" else "right")
    for one in rounds:
        times = [f"{value * 1e3:.1f} ms" for pair in (one.first, one.between) for value in pair or ()]
        speed = f"{one.tokens_per_second:.0f}"
        shown.add_row(one.server, str(one.temperature), str(one.number + 1), speed, f"{one.seconds:.2f}", *times)
    return shown


def _median_and_99(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return median(values), quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    source, config, number, *words = sys.argv[1:]
    found = _serve_with_nano_vllm(source, config, int(number), [float(word) for word in words])
    sys.stdout.write(json.dumps([asdict(one) for one in found]) + "\n")
