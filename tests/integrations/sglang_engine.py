"""Engines of SGLang with the backend: as near to float32 as transformers, chunked prefill, prefixes, the same tokens.

    make sglang-test PYTHON=python3                       all, with the kit; by a Python that has SGLang
    make sglang-test PYTHON=python3 ARGS="-k gemma2"      some

Not a part of `make test`. It runs on a CPU in float32, and where there is a GPU there, in bfloat16. Scheduler, radix
cache, model runner and models are SGLang's. Models are small, random and made on the spot. Packages that only a GPU
needs are empty where they are missing (tests/helpers/sglang_without_gpu), so that on a CPU SGLang's layers run their
own code in PyTorch.
"""

import dataclasses
import functools
import json
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers import sglang_jobs, vllm_models
from tests.helpers.sglang_jobs import BUDGET, DEVICE, TOKENS, Job
from tests.helpers.vllm_models import WINDOW
from tests.helpers.vllm_served import wait_for
from twinattn.kit.tolerance import WIDER, allowed, distance

DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"
AT_ONCE = 4 if DEVICE == "cuda" else 1  # engines
LLAMA = Job("llama", "fastattn", 1, DTYPE)
QWEN3 = Job("qwen3", "fastattn", 16, DTYPE)
JOBS = [
    LLAMA,
    QWEN3,
    Job("gemma2", "fastattn", 16, DTYPE),
    Job("gemma3_tied", "fastattn", 1, DTYPE),
    # SGLang makes parts of this model in bfloat16, whatever is asked for, and asks for a backend it knows.
    Job("gpt_oss", "triton", 16, "bfloat16", replaced=True),
]
if DEVICE == "cuda":
    JOBS += [dataclasses.replace(job, graphs="all") for job in JOBS]
    JOBS += [dataclasses.replace(QWEN3, graphs="decodes")]
MIXED = dataclasses.replace(QWEN3, mixed=True)
STOCK = Job("llama", "torch_native", 1, DTYPE)
OF_DECODES = dataclasses.replace(LLAMA, of_prompts="torch_native")
OF_PROMPTS = dataclasses.replace(STOCK, of_prompts="fastattn")
LAYERS = {  # the windows of SGLang's layers, which do not count the token itself, their softcap, and whether with sinks
    "llama": {(-1, 0.0, False)},
    "qwen3": {(-1, 0.0, False)},
    "gemma2": {(-1, 2.0, False), (WINDOW - 1, 2.0, False)},
    "gemma3_tied": {(-1, 0.0, False), (WINDOW - 1, 0.0, False)},
    "gpt_oss": {(-1, 0.0, True), (WINDOW - 1, 0.0, True)},
}
MISTAKES = [
    (vllm_models.drop_first_key, "llama"),
    (vllm_models.set_window, "gemma2"),
    (vllm_models.drop_softcap, "gemma2"),
    (vllm_models.set_window, "gemma3_tied"),
    (vllm_models.set_window, "gpt_oss"),
    (vllm_models.drop_sinks, "gpt_oss"),
]

pytestmark = pytest.mark.timeout(600)  # a test waits for its engine
prompts_of = functools.cache(vllm_models.prompts)


def name_of(job):
    """Return the name of a case."""
    return job.model + f"-graphs-of-{job.graphs}" * (job.graphs != "none")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return where models, jobs and logs are."""
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def model(folder):
    """Return a function that makes a model when it is first asked for, and returns its folder."""
    return functools.cache(lambda name: vllm_models.save(name, folder))


@pytest.fixture(scope="session")
def answer(request, folder, model):
    """Start the engines of all selected tests, some at a time; return a function of a job that returns its answer."""
    with ThreadPoolExecutor(AT_ONCE) as pool:

        @functools.cache
        def start(job):
            model(job.model)
            return pool.submit(sglang_jobs.run, folder, job)

        for item in request.session.items:
            if hasattr(item, "callspec") and "job" in item.callspec.params:
                start(item.callspec.params["job"])
        yield lambda job: start(job).result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def by_transformers(model):
    """Return a function of a model, a type and a text that returns its log-probabilities by transformers."""

    @functools.cache
    def scorer(name, dtype):
        return vllm_models.scorer(model(name), DEVICE, dtype=dtype)

    return functools.cache(lambda name, dtype, text: scorer(name, dtype)(list(text)))


def found_and_expected(its, name, score):
    """Return the log-probabilities of all tokens of an answer, its own and those that `score` finds for its texts."""
    found, expected = [], []
    for turn in its["rounds"]:
        for i, prompt in enumerate(prompts_of(name)):
            tokens = turn["tokens"][i]
            after = prompt[1:] + tokens if "scores" in turn else tokens
            rows = score((*prompt, *tokens[:-1]))[-len(after) :]
            expected.append(rows.gather(1, torch.tensor(after)[:, None])[:, 0])
            found.append(torch.tensor([*(turn["scores"][i] if "scores" in turn else []), *turn["chosen"][i]]))
    return torch.cat(found), torch.cat(expected)


def limits(job, its, by_transformers):
    """Return how far an answer of a job is from a wider type, and how far it may be: twice as far as transformers."""
    dtype = getattr(torch, job.dtype)
    found, wide = found_and_expected(its, job.model, lambda text: by_transformers(job.model, WIDER[dtype], text))
    _, low = found_and_expected(its, job.model, lambda text: by_transformers(job.model, dtype, text))
    return distance(found, wide), allowed(wide, low, dtype)


def check_steps(seen, graphs):
    """Prompts came in chunks, and several requests ran in a step; decodes were captured if asked for."""
    steps = [values for what, *values in seen if what == "step"]
    lengths = [(new, have) for counts, totals in steps for new, have in zip(counts, totals, strict=True)]
    assert max(sum(counts) for counts, _ in steps) <= BUDGET < max(map(len, prompts_of("llama")))
    replays = [values[0] for what, *values in seen if what == "replay"]
    eager = [len(counts) for counts, _ in steps if set(counts) == {1}]
    assert max(replays if graphs else eager) > 4, "decodes run together"
    assert bool(replays) is graphs
    assert any(len(counts) > 1 and max(counts) > 1 for counts, _ in steps), "so do prompts"
    assert any(1 < new < have for new, have in lengths), "a chunk has keys before it"


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_answers_are_as_near_to_float32_as_transformers(answer, by_transformers, job):
    its = answer(job)
    error, limit = limits(job, its, by_transformers)
    assert error.rms <= limit.rms and error.max <= limit.max, (error, limit)
    first, again = its["rounds"]
    assert not first["cached"] and again["cached"] > sum(map(len, prompts_of(job.model))) / 2, "prefixes are found"
    assert len(set(map(tuple, first["tokens"]))) > len(prompts_of(job.model)) / 2, "prompts have answers of their own"
    assert {tuple(kind[:3]) for what, *kind in its["seen"] if what == "layer"} == LAYERS[job.model]
    assert {kind[3] for what, *kind in its["seen"] if what == "layer"} == {DEVICE}
    check_steps(its["seen"], job.graphs != "none")


def gap(job, its, by_transformers):
    """Return how much likelier another token was than one of an answer, at most, by a wider type."""
    gaps = []
    for turn in its["rounds"]:
        for prompt, tokens in zip(prompts_of(job.model), turn["tokens"], strict=True):
            assert len(tokens) == TOKENS
            rows = by_transformers(job.model, WIDER[getattr(torch, job.dtype)], (*prompt, *tokens[:-1]))[-TOKENS:]
            gaps.append(rows.max(1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(gaps).max()


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_each_token_is_as_likely_as_any_but_for_rounding(answer, by_transformers, job):
    its = answer(job)
    assert gap(job, its, by_transformers) <= 2 * limits(job, its, by_transformers)[1].max


@pytest.mark.parametrize("job", [MIXED], ids=["qwen3"])
def test_prompts_beside_decodes_and_requests_that_are_sent_back(answer, by_transformers, job):
    its, other = answer(job), answer(QWEN3)
    steps = [list(zip(*values, strict=True)) for what, *values in its["seen"] if what == "step"]
    assert sum(any(new > 1 for new, _ in step) and any(1 == new < have for new, have in step) for step in steps) > 8
    assert "#retracted_reqs: 1" in its["log"]
    assert gap(job, its, by_transformers) <= 2 * limits(QWEN3, other, by_transformers)[1].max
    if DEVICE == "cpu":
        assert [turn["tokens"] for turn in its["rounds"]] == [turn["tokens"] for turn in other["rounds"]]


def test_the_same_tokens_as_torch_native(answer, by_transformers):
    """On a GPU in bfloat16, where two tokens nearly tie, each backend may find the other; then the texts part."""
    mine, its = answer(LLAMA), answer(STOCK)
    assert not its["seen"], "our backend had no part in it"
    limit = 2 * limits(LLAMA, mine, by_transformers)[1].max
    for turn, other in zip(mine["rounds"], its["rounds"], strict=True):
        for prompt, tokens, others in zip(prompts_of("llama"), turn["tokens"], other["tokens"], strict=True):
            at = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if len(set(pair)) > 1), None)
            if at is not None:
                row = by_transformers("llama", torch.float32, (*prompt, *tokens[:at]))[-1]
                assert DEVICE == "cuda" and (row[tokens[at]] - row[others[at]]).abs() <= limit


@pytest.mark.parametrize("job", [OF_DECODES, OF_PROMPTS], ids=["decodes", "prompts"])
def test_another_backend_has_the_other_steps(answer, by_transformers, job):
    its = answer(job)
    lengths = {new for what, *values in its["seen"] if what == "step" for new in values[0]}
    assert lengths == {1} if job is OF_DECODES else max(lengths) > 1
    assert gap(job, its, by_transformers) <= 2 * limits(job, its, by_transformers)[1].max


@pytest.mark.parametrize(("mistake", "name"), MISTAKES, ids=lambda x: getattr(x, "__name__", x))
def test_a_mistake_would_show(answer, model, by_transformers, mistake, name):
    """With one key more in a window, say, an answer would be further from a wider type than it may be.

    It would be as far as transformers with that mistake, less its own rounding errors.
    """
    job = next(job for job in JOBS if job.model == name)
    its, wide = answer(job), WIDER[getattr(torch, job.dtype)]
    mistaken = functools.cache(vllm_models.scorer(model(name), DEVICE, mistake, wide))
    _, expected = found_and_expected(its, name, lambda text: by_transformers(name, wide, text))
    _, off = found_and_expected(its, name, lambda text: mistaken(text))
    error, limit = limits(job, its, by_transformers)
    mistake = distance(off, expected)
    assert mistake.rms - error.rms > limit.rms or mistake.max - error.max > limit.max


def test_the_server_gives_the_same_tokens(answer, folder, model):
    """`twinattn.integrations.sglang_server`, asked over HTTP for all prompts at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    given = sglang_jobs.arguments(model("qwen3"), QWEN3)
    command = [sys.executable, "-m", "twinattn.integrations.sglang_server", "--port", str(port), *in_words(given)]

    def ask(prompt):
        asked = dict(input_ids=prompt, sampling_params=dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True))
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as told:
            return json.load(told)["output_ids"]

    with sglang_jobs.running(command, log, folder, QWEN3) as server:
        wait_for(server, f"{url}/health", log)
        with ThreadPoolExecutor(len(prompts_of("qwen3"))) as pool:
            answers = list(pool.map(ask, prompts_of("qwen3")))
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as told:
            assert json.load(told)["attention_backend"] == "fastattn"
    if DEVICE == "cpu":
        assert answers == answer(QWEN3)["rounds"][1]["tokens"]
    assert all(len(tokens) == TOKENS for tokens in answers) and len(set(map(tuple, answers))) > len(answers) / 2


def in_words(given):
    """Return the arguments of an engine as those of a command."""
    words = []
    for name, value in given.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
