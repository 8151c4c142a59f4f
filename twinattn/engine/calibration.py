"""Calibration: how large the keys and values of a model become, so that a quantized cache gets scales that fit.

    amax[h, c]         the largest |x| that any token of the prompts has in KV head h and channel c
    scale of fp8       max over c of amax[h, c] / largest number         one per head, of keys and of values
    scale of int8      amax[h, c] / 127                                  of values; a key has its own
    of latents in fp8  largest amax / largest number                     one, of latents and of rotary keys

A number past the largest that was seen saturates, so the prompts should be like what the model will be asked.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

import refattn
from twinattn.engine import models
from twinattn.engine.arguments import check_module
from twinattn.engine.engine import Engine
from twinattn.engine.layer_pools import LayerPools
from twinattn.engine.request import tokenize
from twinattn.engine.sampling import SamplingParams
from twinattn.engine.storages import CalibrationStats

BLOCK_SIZE = 16


def calibrate(
    model: Any,
    prompts: Iterable[str | Iterable[int]],
    *,
    tokenizer: Any = None,
    twin: Any = refattn,
    trust_model: bool = False,
) -> list[CalibrationStats]:
    """Run prompts through a model, and return how large the keys and values of each layer become.

        calibration = calibrate(model, prompts)
        server = Engine(model, num_blocks=512, kv_cache_dtype="int8", calibration=calibration)

    One calibration is good for every format with scales that are fixed, for either twin, and for every engine of the
    model.

    Args:
        model: as in `Engine`; its attention is an engine's from now on.
        prompts: token ids, or text if there is a tokenizer.
        tokenizer: makes tokens of text.
        twin: the package that computes.
        trust_model: as in `Engine`.

    Returns:
        The largest magnitudes of each layer, those of latents and rotary keys where it has no keys and values. A layer
        that reads the pool of another has those of the other.

    Raises:
        ValueError: if there are no prompts, one of them is in error, or keys or values are not finite; or as `Engine`.

    Source: calibration by the largest magnitude, as in Wu et al. 2020, "Integer Quantization for Deep Learning
        Inference: Principles and Empirical Evaluation".
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: expected a list of prompts, got {prompts!r}")
    tokens = [tokenize(prompt, tokenizer) for prompt in prompts]
    if not tokens:
        raise ValueError("prompts: expected at least one, got none")
    check_module(model)
    models.check_model(model, trust_model)
    chunk_size = getattr(model.config.get_text_config(), "attention_chunk_size", None) or 0
    block_size = gcd(BLOCK_SIZE, chunk_size)  # a chunk is whole blocks, where there are chunks
    num_blocks = max(1, -(-max(map(len, tokens)) // block_size))
    engine = Engine(model, num_blocks=num_blocks, block_size=block_size, twin=twin, trust_model=trust_model)
    with _watched(engine.layer_pools) as largest:
        requests = engine.generate(tokens, SamplingParams(max_tokens=1))
    for i, request in enumerate(requests):
        if request.error is not None:
            raise ValueError(f"prompts[{i}]: expected one that the model can read, got {request.error}")
    found = [CalibrationStats(*(x.cpu() for x in largest[owner])) for owner in engine.owners]
    for i, amax in enumerate(found):
        if not all(x.isfinite().all() for x in amax):
            raise ValueError(f"model: expected finite keys and values, got others in layer {i}")
    return found


@contextmanager
def _watched(pools: LayerPools) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Remember the largest keys and values of each layer, `[hk, d]`, by its place in the pools."""
    largest: dict[int, tuple[Tensor, Tensor]] = {}
    attend = pools.attend

    def attend_and_look(
        module: Any,
        query: Float[Tensor, "1 h t d"],
        key: Float[Tensor, "1 hk t dk"],
        value: Float[Tensor, "1 hk t dv"],
        **options: Any,
    ) -> Float[Tensor, "1 t h dout"]:
        index = pools.places[module.layer_idx]
        here = tuple(reduce(x.float().abs(), "1 hk t d -> hk d", "max") for x in (key, value))
        before = largest.get(index, here)
        largest[index] = torch.maximum(before[0], here[0]), torch.maximum(before[1], here[1])
        return attend(module, query, key, value, **options)

    pools.attend = attend_and_look  # type: ignore[method-assign]
    try:
        yield largest
    finally:
        del pools.attend  # or the pools would hold themselves, and their memory
