"""Prompts that a server of vLLM computes before it serves, so that their kernels are compiled by then.

Decodes are computed early, as vLLM captures them. A step with prompts comes when requests wait for it, and over a
quantized cache its kernel depends on how many rows see a key:

    few long prompts                 dequantized into memory, and a package's outputs are looked at near their ends
    many of 512 tokens               likewise, but every output is checked, which is less work then
    a prompt beside many decodes     dequantized in registers

Each is a compilation of its own, of one to three seconds.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from refattn.batch import Batch

# The longest prompts, of any group of heads, with fewer tiles than `fastattn.kernels.triton.attention` takes near ends.
MIDDLE = 512

_log = logging.getLogger(__name__)


def steps_with_prompts(most_tokens: int, most_seqs: int, longest: int) -> list[list[int]]:
    """Return the new tokens of each sequence in some steps, one for each kernel that prompts may take.

    Args:
        most_tokens: of a step.
        most_seqs: in a step.
        longest: tokens of a sequence, at most.
    """
    longest = max(1, min(longest, most_tokens))
    middle = min(MIDDLE, longest)
    decodes = max(0, min(most_seqs, most_tokens) - 1)
    few, many = (max(1, min(most_seqs, most_tokens // length)) for length in (longest, middle))
    steps = [[longest] * few, [middle] * many, [1] * decodes + [min(longest, most_tokens - decodes)]]
    return [step for i, step in enumerate(steps) if step not in steps[:i]]


def warm_up(
    layers: Iterable[Any], make_step: Callable[[Batch, int], Any], steps: Iterable[list[int]], dtype: torch.dtype
) -> None:
    """Attend in each kind of layer as in some steps; every table names block 0, and answers are discarded.

    Where a step fails, for lack of memory or for any other reason, its kernels are compiled when it comes, and what is
    wrong is said then: a server starts without them, too.

    Args:
        layers: vLLM's layers, with their attention `impl` and their pool `kv_cache`.
        make_step: makes the metadata from lengths, and the number of tokens.
        steps: the new tokens of each sequence.
        dtype: of the queries.
    """
    try:
        kinds = {_kind_of(layer): layer for layer in layers if layer.kv_cache.numel()}
        for layer, lens in ((layer, lens) for layer in kinds.values() for lens in steps):
            pool, impl = layer.kv_cache, layer.impl
            ends = torch.tensor([0, *lens], device=pool.device).cumsum(0, dtype=torch.int32)
            blocks = torch.zeros(len(lens), -(-max(lens) // pool.shape[2]), dtype=torch.int32, device=pool.device)
            batch = Batch(ends, ends.diff(), blocks, max_query_len=max(lens), max_seq_len=max(lens))
            query = torch.zeros(sum(lens), impl.num_heads, impl.head_size, dtype=dtype, device=pool.device)
            nothing = query[:0]
            impl.forward(layer, query, nothing, nothing, pool, make_step(batch, sum(lens)), torch.empty_like(query))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        _log.warning(
            "kernels of prompts are compiled when the first requests come: %s: %s", type(error).__name__, error
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # vLLM measures what it captures


def _kind_of(layer: Any) -> tuple[object, ...]:
    """Return the properties of a layer that its kernels are compiled for."""
    impl, pool = layer.impl, layer.kv_cache
    options = impl.sliding_window, impl.softcap > 0, impl.alibi_slopes is None, impl.sinks is None
    return impl.num_heads, impl.kv_cache_dtype, pool.shape[1:], pool.stride(), *options
