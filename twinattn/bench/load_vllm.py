"""The load of many requests inside vLLM, with an attention backend of its own or with ours.

Each backend has a process, as vLLM keeps its choice for as long as one lives; the engine is in that process, so that
times are taken where tokens come out of it, and no entry point of this package need be installed. Weights are vLLM's
dummy ones.
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
    "full": dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY")),  # decodes whole, no torch.compile
    "default": {},  # as vLLM chooses: layers compiled, decodes whole, other steps in pieces
}
ENVIRONMENT = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_USE_FLASHINFER_SAMPLER="0",  # the same sampler whether FlashInfer is installed or not
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)


def of_vllm(
    backend: str,
    sizes: dict[str, Any],
    temperatures: Sequence[float],
    *,
    rounds: int,
    graphs: str = "full",
    kv_cache_dtype: str = "auto",
) -> list[Round]:
    """Serve the load with vLLM, in a process of its own.

    Args:
        backend: vLLM's name of it: FLASH_ATTN, TRITON_ATTN, FASTATTN ...
        sizes: of a Qwen3 model.
        temperatures: rounds with each.
        rounds: how many of each.
        graphs: which CUDA graphs, a name of `GRAPHS`.
        kv_cache_dtype: what its cache holds, by vLLM's name.

    Raises:
        LoadError: if vLLM does not serve it.
    """
    job = dict(backend=backend, temperatures=[*temperatures], rounds=rounds, graphs=graphs)
    job |= dict(kv_cache_dtype=kv_cache_dtype)
    return in_a_process(f"vLLM with {backend}", "twinattn.bench.load_vllm", sizes, job, ENVIRONMENT)


def _serve(
    folder: str, backend: str, temperatures: Sequence[float], rounds: int, graphs: str, kv_cache_dtype: str
) -> list[Round]:
    """Serve the load in this process."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from twinattn.integrations.vllm import register

    register()
    llm = LLM(
        folder,
        attention_backend=backend,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=4 * MOST,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=BUDGET,
        gpu_memory_utilization=0.85,
        disable_log_stats=True,
        **GRAPHS[graphs],
    )
    engine, found = llm.llm_engine, []
    get_output = engine.engine_core.get_output
    stamps: dict[str, list[float]] = {}

    def stamped() -> Any:
        """Note when tokens come; the engine makes outputs of a request at its end alone, as `generate` has it."""
        outputs = get_output()
        now = time.perf_counter()
        for one in outputs.outputs:
            stamps.setdefault(one.request_id, []).extend([now] * len(one.new_token_ids))
        return outputs

    engine.engine_core.get_output = stamped
    fixed = dict(ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    llm.generate(dict(prompt_token_ids=[1, 2, 3]), SamplingParams(max_tokens=16, **fixed), use_tqdm=False)
    for temperature, number, load in rounds_of(temperatures, rounds):
        stamps.clear()
        start = time.perf_counter()
        for i, (prompt, count) in enumerate(zip(load.prompts, load.max_tokens, strict=True)):
            params = SamplingParams(temperature=temperature, max_tokens=count, **fixed)
            engine.add_request(f"{number}-{temperature}-{i}", dict(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            engine.step()
        found.append(Round.of(f"vLLM, {backend}", temperature, number, start, list(stamps.values())))
        if found[-1].tokens != sum(load.max_tokens):
            raise LoadError(f"expected {sum(load.max_tokens)} tokens, got {found[-1].tokens}")
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps([asdict(one) for one in _serve(**json.loads(sys.argv[1]))]))
