"""The load of many requests inside SGLang, with an attention backend of its own or with ours.

Each backend has a process. SGLang's scheduler is a process of its own behind it, which tells of a request at its end
unless it streams, and streaming takes a share of the speed: so a round has no times of single tokens. Weights are
SGLang's dummy ones.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinattn.bench.load import BUDGET, MOST, NUM_REQUESTS, LoadError, Round, in_a_process, rounds_of

GRAPHS: dict[str, dict[str, Any]] = {
    "full": dict(cuda_graph_backend_prefill="disabled"),  # decodes whole
    "default": {},  # as SGLang chooses: decodes whole, of prompts what lies between the attentions
}
PAGE_SIZE = 16  # tokens
ENVIRONMENT = dict(
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1",  # the version in use stands in the results
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)


def of_sglang(
    backend: str,
    sizes: dict[str, Any],
    temperatures: Sequence[float],
    *,
    rounds: int,
    graphs: str = "full",
    kv_cache_dtype: str = "auto",
) -> list[Round]:
    """Serve the load with SGLang, in a process of its own.

    Args:
        backend: SGLang's name of it: triton, fastattn ...
        sizes: of a Qwen3 model.
        temperatures: rounds with each.
        rounds: how many of each.
        graphs: which CUDA graphs, a name of `GRAPHS`.
        kv_cache_dtype: what its cache holds, by SGLang's name.

    Raises:
        LoadError: if SGLang does not serve it.
    """
    job = dict(backend=backend, temperatures=[*temperatures], rounds=rounds, graphs=graphs)
    job |= dict(kv_cache_dtype=kv_cache_dtype)
    return in_a_process(f"SGLang with {backend}", "twinattn.bench.load_sglang", sizes, job, ENVIRONMENT)


def _serve(
    folder: str, backend: str, temperatures: Sequence[float], rounds: int, graphs: str, kv_cache_dtype: str
) -> list[Round]:
    """Serve the load in this process and in those that SGLang starts."""
    import sglang

    from twinattn.integrations.sglang import NAME, register

    if backend == NAME:
        register()
    engine = sglang.Engine(
        model_path=folder,
        attention_backend=backend,
        load_format="dummy",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        page_size=PAGE_SIZE,
        context_length=4 * MOST,
        max_running_requests=NUM_REQUESTS,
        chunked_prefill_size=BUDGET,
        cuda_graph_max_bs_decode=NUM_REQUESTS,
        mem_fraction_static=0.8,
        **GRAPHS[graphs],
    )
    fixed, found = dict(ignore_eos=True), []
    engine.generate(input_ids=[[1, 2, 3]], sampling_params=dict(temperature=0, max_new_tokens=16, **fixed))
    for temperature, number, load in rounds_of(temperatures, rounds):
        params = [dict(temperature=temperature, max_new_tokens=count, **fixed) for count in load.max_tokens]
        start = time.perf_counter()
        answers = engine.generate(input_ids=load.prompts, sampling_params=params)
        seconds = time.perf_counter() - start
        tokens = sum(len(answer["output_ids"]) for answer in answers)
        found.append(Round(f"SGLang, {backend}", temperature, number, tokens, seconds, None, None))
        if tokens != sum(load.max_tokens):
            raise LoadError(f"expected {sum(load.max_tokens)} tokens, got {tokens}")
    engine.shutdown()
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps([asdict(one) for one in _serve(**json.loads(sys.argv[1]))]))
