"""`twinattn serve`: the engine behind HTTP, with the API that OpenAI's clients speak. It is to learn from.

    POST /v1/completions         a text, or its tokens, goes on; with "stream" as server-sent events
    POST /v1/chat/completions    messages are answered, by the model's own chat template; likewise
    GET  /v1/models              the one model
    GET  /metrics                time to first token, inter-token latency, prefix cache, preemptions, blocks, queue
    GET  /health                 200 while the engine's thread runs

An error is a sentence, `{"error": {"message": ...}}`: 400 for bad input, and for what this server does not compute, as
nothing is ignored that would change an answer; 404 for another model; 429 if the queue is full. If a client hangs up,
its request ends.

Source: the OpenAI API's reference of completions and chat completions; metrics are named after those of vLLM.
"""

import importlib
import logging
from pathlib import Path
from typing import Any

import torch
import uvicorn

from twinattn.engine import CudaGraphs, Engine, fuse
from twinattn.engine.arguments import check_device
from twinattn.engine.demo import TWINS
from twinattn.engine.demo_model import MODEL, load, model_file
from twinattn.engine.kv_cache_dtype import check_kernel, check_name
from twinattn.engine.server.api import Api
from twinattn.engine.server.folder import load_folder

logger = logging.getLogger(__name__)


def run(
    folder: Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    twin: str = "fastattn",
    device: str = "cpu",
    num_blocks: int = 256,
    block_size: int = 16,
    max_num_batched_tokens: int = 256,
    max_num_seqs: int = 64,
    kv_cache_dtype: str = "auto",
    max_waiting: int = 256,
    log_steps: bool = False,
) -> None:
    """Load a model and serve it, until Ctrl-C.

    Args:
        folder: a folder with a causal LM of transformers and its tokenizer; None for the demo's model.
        host: the address to listen at.
        port: the port; 0 for a free one, which the log names.
        twin: "refattn" or "fastattn".
        device: where to run.
        num_blocks: blocks in the pool, as in `twinattn.engine.Engine`; few, and requests are preempted.
        block_size: tokens in a block.
        max_num_batched_tokens: most tokens in a step.
        max_num_seqs: most requests that run at once.
        kv_cache_dtype: what the pools hold, as in `twinattn.engine.Engine`. Nothing is calibrated: fp8 has scales of 1,
            and of int8 only the keys are quantized.
        max_waiting: most requests that wait; more get 429.
        log_steps: log a line per step.

    Raises:
        twinattn.engine.demo_model.MissingModelError: if the demo's model is not installed.
        ValueError: naming the argument, if there is no such model, twin, device or type of cache, a folder's model
            cannot be loaded whole, or a size is wrong or does not fit into memory.
        NotImplementedError: if the engine does not serve the model, or does not over such a cache.
    """
    if twin not in TWINS:
        raise ValueError(f"twin: expected {' or '.join(TWINS)}, got {twin!r}")
    check_device(device)
    check_name(kv_cache_dtype)
    check_kernel(kv_cache_dtype, twin, torch.device(device))
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for name in ("twinattn", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)
    model, tokenizer = load(model_file()) if folder is None else load_folder(folder)
    on_gpu = twin == "fastattn" and torch.device(device).type == "cuda"
    if on_gpu:
        model = fuse_if_known(model.to(device))
    try:
        engine = Engine(
            model.to(device),
            tokenizer=tokenizer,
            twin=importlib.import_module(twin),
            runner=CudaGraphs() if on_gpu else None,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=kv_cache_dtype,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(str(error)) from error
    if on_gpu:
        engine.warm_up()
    api = Api(engine, MODEL if folder is None else folder.resolve().name, max_waiting=max_waiting, log_steps=log_steps)
    blocks = f"{num_blocks} blocks of {block_size} tokens{'' if kv_cache_dtype == 'auto' else f' in {kv_cache_dtype}'}"
    logger.info("%s over %s, with %s; this is no production server", api.name, twin, blocks)
    uvicorn.run(api.app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=3)


def fuse_if_known(model: Any) -> Any:
    """Fuse the layers of a model, in place, or log why they stay the model's own code."""
    try:
        return fuse(model.eval())
    except (NotImplementedError, ValueError) as error:
        logger.info("layers are not fused: %s", error)
        return model
