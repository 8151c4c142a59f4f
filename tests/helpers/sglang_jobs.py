"""SGLang's engines, each in a process of its own: what they answer, with log-probabilities, and what the backend saw.

    python -m tests.helpers.sglang_jobs JOB.json      one engine; its answers go into JOB.json.out

SGLang spawns a process for its scheduler, which imports this module anew: there, `watch` lets our backend note each
step and each kind of layer in JOB.json.seen.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import torch

from tests.helpers import plugin_folders, vllm_models

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 16  # that each prompt is answered with
BUDGET, REQUESTS = 128, 12  # limits of a step, so that long prompts are cut into chunks, and some requests wait
SECONDS = 280  # for a process
OWN = dict(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1",
    **({} if DEVICE == "cuda" else dict(SGLANG_USE_CPU_ENGINE="1")),
)
GRAPHS: dict[str, dict[str, Any]] = {
    "none": dict(disable_cuda_graph=True),
    "decodes": dict(cuda_graph_backend_prefill="disabled", cuda_graph_max_bs_decode=REQUESTS),
    "all": dict(cuda_graph_max_bs_decode=REQUESTS),  # SGLang's default: of prompts, what lies between the attentions
}
# SGLang's own kernels for the experts of GPT-OSS: else it takes a package `triton_kernels`, whatever its version.
EXPERTS = dict(moe_runner_backend="triton")


@dataclasses.dataclass(frozen=True)
class Job:
    """An engine to run.

    Attributes:
        model: a name of `vllm_models.MODELS`.
        backend: SGLang's name of an attention backend.
        page_size: slots in a page.
        dtype: that of the model.
        replaced: whether our backend has that name, in place of SGLang's own.
        graphs: what is captured as CUDA graphs, a name of `GRAPHS`.
        mixed: whether prompts run in one step with decodes, which SGLang does where no log-probabilities are asked
            for; and requests are sent back to the queue again and again, as if the pool were full.
        of_prompts: the backend of steps with prompts, if another one than that of decodes.
    """

    model: str
    backend: str
    page_size: int = 1
    dtype: str = "float32"
    replaced: bool = False
    graphs: str = "none"
    mixed: bool = False
    of_prompts: str = ""


def arguments(folder: Path, job: Job) -> dict[str, Any]:
    """Return the arguments of SGLang for an engine, or a server, as its `ServerArgs` names them."""
    return dict(
        model_path=str(folder),
        **_backends(job),
        page_size=job.page_size,
        dtype=job.dtype,
        device=DEVICE,
        **GRAPHS[job.graphs],
        **(EXPERTS if job.model == "gpt_oss" and DEVICE == "cuda" else {}),
        enable_mixed_chunk=job.mixed,
        disable_hybrid_swa_memory=True,  # layers with windows share the pool of the others
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        chunked_prefill_size=BUDGET,
        max_running_requests=REQUESTS,
        max_total_tokens=1 << 14,
        context_length=1024,
        mem_fraction_static=0.5,
        random_seed=0,
        log_level="info",
    )


def _backends(job: Job) -> dict[str, str]:
    if not job.of_prompts:
        return dict(attention_backend=job.backend)
    return dict(prefill_attention_backend=job.of_prompts, decode_attention_backend=job.backend)


def running(command: list[str], log: Path, folder: Path, job: Job) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a command that finds this package, and in which SGLang finds its plugin."""
    plugins = plugin_folders.declared(folder, "sglang.srt.plugins")
    path = [plugins, ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = OWN | dict(PYTHONPATH=os.pathsep.join(map(str, filter(None, path))))
    own |= dict(FASTATTN_REPLACES_TRITON="1") if job.replaced else {}
    own |= dict(SGLANG_TEST_RETRACT="1") if job.mixed else {}
    return plugin_folders.running(command, log, cwd=ROOT, env=os.environ | own)


def run(folder: Path, job: Job) -> dict[str, Any]:
    """Run a job in a process of its own, and return what it answered.

    Raises:
        AssertionError: with the end of its log, if it did not answer.
    """
    path = folder / f"{'-'.join(map(str, dataclasses.astuple(job)))}.json"
    path.write_text(json.dumps(dataclasses.asdict(job)))
    command = [sys.executable, "-m", "tests.helpers.sglang_jobs", str(path)]
    with running(command, path.with_suffix(".log"), folder, job) as process, contextlib.suppress(TimeoutExpired):
        process.wait(SECONDS)
    out = path.with_suffix(".json.out")
    assert out.exists(), f"{job} did not answer:\n{path.with_suffix('.log').read_text(errors='replace')[-8000:]}"
    seen = path.with_suffix(".json.seen")
    lines = seen.read_text().splitlines() if seen.exists() else []
    log = path.with_suffix(".log").read_text(errors="replace")
    return json.loads(out.read_text()) | dict(seen=[json.loads(line) for line in lines], log=log)


# In the process of an engine


def main(path: Path) -> None:
    """Run a job, and write what the engine answers."""
    import sglang

    job = Job(**json.loads(path.read_text()))
    engine = sglang.Engine(**arguments(path.parent / job.model, job))
    answer = _tokens if job.mixed else _answer
    rounds = [answer(engine, job.model, scores) for scores in (True, False)]
    path.with_suffix(".json.out").write_text(json.dumps(dict(rounds=rounds)))
    engine.shutdown()


def _answer(engine: Any, model: str, scores: bool) -> dict[str, Any]:
    """Answer all prompts greedily: tokens, their log-probabilities, and those of the prompts' own tokens if asked for.

    SGLang computes a prompt anew whose log-probabilities are asked for; without, prefixes are found in the cache.
    """
    answers = engine.generate(
        input_ids=vllm_models.prompts(model),
        sampling_params=dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=0 if scores else -1,
    )
    told = [answer["meta_info"] for answer in answers]
    found: dict[str, Any] = dict(
        tokens=[answer["output_ids"] for answer in answers],
        chosen=[[row[0] for row in one["output_token_logprobs"]] for one in told],
        cached=sum(one["cached_tokens"] for one in told),
    )
    if scores:
        found["scores"] = [[row[0] for row in one["input_token_logprobs"][1:]] for one in told]
    return found


def _tokens(engine: Any, model: str, scores: bool) -> dict[str, Any]:
    """Answer all prompts greedily, with tokens alone."""
    greedy = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    answers = engine.generate(input_ids=vllm_models.prompts(model), sampling_params=greedy)
    return dict(tokens=[answer["output_ids"] for answer in answers])


def watch(path: Path) -> None:
    """Let our backend write what it sees: the lengths of each step, each replay, and once each kind of layer."""
    from twinattn.integrations.sglang import FastAttentionBackend

    begin, attend, kinds = FastAttentionBackend.init_forward_metadata, FastAttentionBackend.forward_extend, set()
    replay = FastAttentionBackend.init_forward_metadata_out_graph

    def note(what: str, *values: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps([what, *values]) + "\n")

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        begin(self, forward_batch)
        if self.forward_metadata is not None:
            batch = self.forward_metadata.batch
            note("step", batch.query_lens.tolist(), batch.seq_lens.tolist())

    def init_forward_metadata_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        replay(self, forward_batch, in_capture)
        if not in_capture:
            note("replay", len(forward_batch.seq_lens))

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        kind = layer.sliding_window_size, layer.logit_cap, more.get("sinks") is not None, str(q.device.type)
        if kind not in kinds:
            kinds.add(kind)
            note("layer", *kind)
        return attend(self, q, k, v, layer, forward_batch, save_kv_cache, **more)

    FastAttentionBackend.init_forward_metadata = init_forward_metadata
    FastAttentionBackend.init_forward_metadata_out_graph = init_forward_metadata_out_graph
    FastAttentionBackend.forward_extend = forward_extend


if __name__ == "__mp_main__":
    watch(Path(sys.argv[1]).with_suffix(".json.seen"))
if __name__ == "__main__":
    main(Path(sys.argv[1]))
