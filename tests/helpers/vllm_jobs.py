"""vLLM's engines, each in a process of its own: what they answer, and their log-probabilities.

    python -m tests.helpers.vllm_jobs JOB.json      one engine; its answers go into JOB.json.out

vLLM keeps its choice of backend for as long as a process lives, and an engine needs half a minute to begin, most of it
imports and compilations. So several run at once, on every GPU that is there: the models are small.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.helpers import plugin_folders, vllm_models, vllm_one_card

ROOT = Path(__file__).parents[2]
GROUP = "vllm.general_plugins"
TOKENS = 32  # that each prompt is answered with
BUDGET, SEQUENCES = 256, 12  # limits of a step, so that long prompts are cut into chunks and run beside decodes
SECONDS = 300  # for a process
OWN = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_USE_DEEP_GEMM="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    # Collectives by NCCL alone, which any two GPUs have: no symmetric memory, and no multicast over NVLink.
    VLLM_ALLREDUCE_USE_SYMM_MEM="0",
    VLLM_ALLREDUCE_USE_FLASHINFER="0",
    VLLM_USE_NCCL_SYMM_MEM="0",
    VLLM_USE_DIRECT_DCP_A2A="0",
    VLLM_USE_DIRECT_DCP_Q_GATHER="0",
    VLLM_USE_DIRECT_DCP_KV_GATHER="0",
    NCCL_NVLS_ENABLE="0",
    TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
    NVSHMEM_DISABLE_NVLS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
SIZES = [1, 2, 4, 8, SEQUENCES]  # of captured steps: nine requests run in a graph of twelve
MODES: dict[str, dict[str, Any]] = {
    "eager": dict(enforce_eager=True),
    "piecewise": dict(compilation_config=dict(mode=0, cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=SIZES)),
    "full": dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=SIZES)),
    "compiled": dict(compilation_config=dict(cudagraph_capture_sizes=SIZES)),  # vLLM's default: inductor, both graphs
}
GRAPHS = dict(eager="NONE", piecewise="PIECEWISE", full="FULL_DECODE_ONLY", compiled="FULL_AND_PIECEWISE")


@dataclasses.dataclass(frozen=True)
class Job:
    """An engine to run.

    Attributes:
        model: a name of `vllm_models.MODELS`.
        backend: vLLM's name of an attention backend.
        mode: how steps are launched, a name of `MODES`.
        cache: the type of the cache.
        dtype: that of the model.
        ranks: processes, by tensor parallelism, each on a GPU.
        stages: processes, by pipeline parallelism, each on a GPU with its share of the layers.
        context_ranks: of these, how many share the keys of a sequence.
        interleave: tokens that lie together on a rank.
        one_card: whether all ranks are on one GPU, and talk by gloo.
    """

    model: str
    backend: str
    mode: str = "eager"
    cache: str = "auto"
    dtype: str = "bfloat16"
    ranks: int = 1
    stages: int = 1
    context_ranks: int = 1
    interleave: int = 1
    one_card: bool = False

    @property
    def gpus(self) -> int:
        """How many GPUs it needs."""
        return 1 if self.one_card else self.ranks * self.stages


class Engines:
    """Runs jobs in processes, some at a time, and keeps what they answer."""

    def __init__(self, folder: Path, devices: Iterable[int], at_once: int) -> None:
        """Prepare a folder, and start nothing.

        Args:
            folder: for models, jobs and logs.
            devices: the GPUs.
            at_once: processes that run at a time.
        """
        self.folder = folder
        self.devices, self._slots = list(devices), SimpleQueue[int]()
        for i in range(at_once):
            self._slots.put(self.devices[i % len(self.devices)])
        self._pool = ThreadPoolExecutor(at_once)
        self._models: dict[str, Path] = {}
        self._answers: dict[Job, Future[dict[str, Any]]] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._plugins = plugin_folders.declared(folder, GROUP)
        self._one_card = plugin_folders.write(folder / "one_card", GROUP, dict(one_card=vllm_one_card.PLUGIN))

    def start(self, jobs: Iterable[Job]) -> None:
        """Start jobs, those over several GPUs last."""
        for job in sorted(set(jobs), key=lambda job: job.gpus):
            self.model(job.model)
            if job not in self._answers:
                self._answers[job] = self._pool.submit(self._run, job)

    def answer(self, job: Job) -> dict[str, Any]:
        """Return what a job answered, when it is done.

        Raises:
            AssertionError: with the end of its log, if it did not answer.
        """
        self.start([job])
        return self._answers[job].result()

    def model(self, name: str) -> Path:
        """Return the folder of a model, which is made when it is first asked for."""
        if name not in self._models:
            self._models[name] = vllm_models.save(name, self.folder)
        return self._models[name]

    def environment(self, devices: Sequence[int], places: Sequence[Path] = ()) -> dict[str, str]:
        """Return variables with which a process sees some GPUs, this package's plugin, and other places of modules."""
        path = [self._plugins, ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *places]
        return dict(
            PYTHONPATH=os.pathsep.join(map(str, filter(None, path))),
            CUDA_VISIBLE_DEVICES=",".join(map(str, devices)),
            VLLM_CACHE_ROOT=str(self.folder / "cache"),
        )

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            _end(process)

    def _run(self, job: Job) -> dict[str, Any]:
        device = self._slots.get()
        try:
            seen = self.devices[: job.gpus] if job.gpus > 1 else [device]
            name = "-".join(str(value) for value in dataclasses.astuple(job))
            path, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
            path.write_text(json.dumps(dataclasses.asdict(job) | dict(path=str(self._models[job.model]))))
            own = OWN | self.environment(seen, [self._one_card] * job.one_card)
            if job.mode == "piecewise":
                own["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"  # graphs in pieces without torch.compile
            began = time.monotonic()
            with log.open("wb") as file:
                command = [sys.executable, "-m", "tests.helpers.vllm_jobs", str(path)]
                process = subprocess.Popen(
                    command, cwd=ROOT, env=os.environ | own, stdout=file, stderr=file, start_new_session=True
                )
                self._processes.add(process)
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    file.write(f"\nended after {SECONDS} seconds\n".encode())
                finally:
                    _end(process)
                    self._processes.discard(process)
            out = path.with_suffix(".json.out")
            assert out.exists(), f"{job} did not answer:\n{_telling(log.read_text(errors='replace'))}"
            return json.loads(out.read_text()) | dict(took=round(time.monotonic() - began, 1))
        finally:
            self._slots.put(device)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _telling(log: str) -> str:
    """Return the first lines of a log that name different errors, each with those before it, and the log's end."""
    lines = log.splitlines()
    named = {found.group(): i for i, line in reversed([*enumerate(lines)]) if (found := re.search(r"\w*Error.*", line))}
    told = sorted({j for i in sorted(named.values())[:8] for j in range(max(0, i - 12), i + 1)})
    return "\n".join([*(lines[j] for j in told), "...", log[-4000:]])


# In the process of an engine


def main(path: Path) -> None:
    """Run a job, and write what the engine answers."""
    given = json.loads(path.read_text())
    folder, job = given.pop("path"), Job(**given)
    from vllm import LLM

    arguments: dict[str, Any] = dict(
        model=folder,
        attention_backend=job.backend,
        kv_cache_dtype=job.cache,
        tensor_parallel_size=job.ranks,
        pipeline_parallel_size=job.stages,
        skip_tokenizer_init=True,
        dtype=job.dtype,
        seed=0,
        max_model_len=1024,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.05,  # of the whole card, since others run beside it
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )
    if job.ranks * job.stages > 1:
        arguments |= dict(disable_custom_all_reduce=True, distributed_executor_backend="mp")
    if job.context_ranks > 1:
        arguments |= dict(decode_context_parallel_size=job.context_ranks, cp_kv_cache_interleave_size=job.interleave)
    engine = LLM(**arguments | MODES[job.mode])
    layers, graphs = engine.collective_rpc(_watch)[0]
    report = dict(
        job=dataclasses.asdict(job),
        layers=layers,
        graphs=graphs,
        rounds=[_answer(engine, job.model, scores=scores) for scores in (True, False)],
    )
    path.with_suffix(".json.out").write_text(json.dumps(report))


def _watch(worker: Any) -> tuple[list[str], str]:
    """Return a worker's kinds of attention and of graphs, and let it count the calls of its layers' attention."""
    config = worker.model_runner.vllm_config.compilation_config
    kinds = {type(layer.impl) for layer in config.static_forward_context.values() if hasattr(layer, "impl")}
    worker.attention_calls = calls = [0]

    def counting(function: Any) -> Any:
        def count(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            return function(*given, **named)

        return count

    for kind in kinds:
        for name in ("forward", "forward_mqa", "forward_mha"):
            if name in vars(kind):
                setattr(kind, name, counting(getattr(kind, name)))
    return sorted(kind.__name__ for kind in kinds), config.cudagraph_mode.name


def _calls(worker: Any) -> int:
    """Return how often a worker has called attention by Python: a captured step does not."""
    return worker.attention_calls[0]


def _answer(engine: Any, model: str, *, scores: bool) -> dict[str, Any]:
    """Answer all prompts greedily: tokens, their log-probabilities, and those of the prompts' own tokens if asked for.

    vLLM computes a prompt anew whose log-probabilities are asked for; without, prefixes are found in the cache.
    """
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if scores else None,
    )
    before, asked = (
        engine.collective_rpc(_calls)[0],
        [dict(prompt_token_ids=prompt) for prompt in vllm_models.prompts(model)],
    )
    answers = engine.generate(asked, greedy, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    found: dict[str, Any] = dict(
        tokens=[list(output.token_ids) for output in outputs],
        chosen=[
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ],
        cached=sum(answer.num_cached_tokens or 0 for answer in answers),
        calls=engine.collective_rpc(_calls)[0] - before,
    )
    if scores:
        found["scores"] = [
            [step[token].logprob for token, step in zip(x.prompt_token_ids[1:], x.prompt_logprobs[1:], strict=True)]
            for x in answers
        ]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
