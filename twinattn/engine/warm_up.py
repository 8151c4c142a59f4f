"""The work that the first steps of an engine would do else, done before the first request."""

import gc
from typing import TYPE_CHECKING

from twinattn.engine.runner import AsyncRunner
from twinattn.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from twinattn.engine.engine import Engine


def warm_up(engine: "Engine", num_tokens: int) -> None:
    """Compile kernels and capture decodes by serving prompts whose answers are discarded.

    Arguments and errors are those of `Engine.warm_up`.
    """
    if type(num_tokens) is not int or num_tokens < 1:
        raise ValueError(f"num_tokens: expected an int of at least 1, got {num_tokens!r}")
    if engine.running or engine.waiting:
        raise ValueError(f"warm_up: expected no requests, got {len(engine.running) + len(engine.waiting)}")
    num_tokens = int(min(num_tokens, engine.max_request_tokens))
    counted = vars(engine.counters).copy()
    try:
        length, count = max(1, num_tokens - 1), engine.max_num_batched_tokens // num_tokens + 2
        prompts = [[i % engine.vocab_size] * length for i in range(min(count, engine.max_num_seqs))]
        requests = engine.generate([[0], *prompts], SamplingParams(max_tokens=min(2, num_tokens), stop_token_ids=()))
        failed = [request.error for request in requests if request.error is not None]
        if failed:
            raise RuntimeError(f"warm_up: {len(failed)} of {len(requests)} requests failed: {failed[0]}")
        if isinstance(engine.runner, AsyncRunner):
            engine.runner.warm_up(engine, num_tokens)
    finally:
        engine.scheduler.undo([], None, counted)
    gc.collect()
    gc.freeze()
