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
        params, token = SamplingParams(max_tokens=min(2, num_tokens), stop_token_ids=()), 0
        for lengths in lengths_of_prompts(num_tokens, engine.max_num_batched_tokens, engine.max_num_seqs):
            # Each has a token of its own, so that none finds keys of another.
            prompts = [[i % engine.vocab_size] * length for i, length in enumerate(lengths, token)]
            requests, token = engine.generate(prompts, params), token + len(prompts)
            failed = [request.error for request in requests if request.error is not None]
            if failed:
                raise RuntimeError(f"warm_up: {len(failed)} of {len(requests)} requests failed: {failed[0]}")
        if isinstance(engine.runner, AsyncRunner):
            engine.runner.warm_up(engine, num_tokens)
    finally:
        engine.scheduler.undo([], None, counted)
    gc.collect()
    gc.freeze()


def lengths_of_prompts(num_tokens: int, most_tokens: int, most_seqs: int) -> list[list[int]]:
    """Return the lengths of prompts that are answered together, for each kernel that steps with prompts may take.

    Over a quantized cache this depends on how many query rows see a key: many with prompts alone, few with a prompt
    beside many decodes.

    Args:
        num_tokens: of the longest sequence.
        most_tokens: of a step.
        most_seqs: in a step.
    """
    length, count = max(1, num_tokens - 1), most_tokens // num_tokens + 2
    return [[1] + [length] * min(count, most_seqs), [1] * (most_seqs - 1) + [length]]
