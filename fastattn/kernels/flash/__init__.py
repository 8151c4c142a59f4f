"""FlashAttention, from the packages and libraries that ship it, adapted to the conventions of the project."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastattn.kernels.problem import EXPANDED_BLOCK, MOST_EXPANDED_BYTES, Problem

NO_FP8 = "reads latents in the type of the query, and no fp8 values: take triton"
NO_POSITIONS = "takes the query rows for the last ones of their sequences, at no other positions: take triton"
NO_INTERVALS = "has causal masks and windows, and no interval of keys for each query: take triton"
NOT_ALIGNED = "loads 16 bytes at a time, from heads that begin at multiples of that, elements side by side: take triton"


def cannot_expand(problem: Problem) -> str | None:
    """Return why a cache should not be dequantized into memory (`kernels.triton.expand`), or None.

    The bound takes all sequences to be as long as the longest, as the host knows no other length.
    """
    quantized, values = problem.stored or (torch.uint8, torch.uint8)  # int4 has bytes of both
    if values not in (quantized, problem.dtype):
        return f"reads values of the type of the keys or of the queries, {problem.dtype}, not {values}"
    columns = -(-problem.max_seq_len // EXPANDED_BLOCK)
    elements = problem.num_seqs * columns * EXPANDED_BLOCK * problem.num_kv_heads
    size = elements * (problem.head_size + problem.value_head_size) * problem.dtype.itemsize
    if size > MOST_EXPANDED_BYTES:
        return f"dequantizes all pages, at most {MOST_EXPANDED_BYTES >> 20} MiB of them, not {size >> 20}"
    return None


def cannot_extend(problem: Problem) -> str | None:
    """Return why intervals cannot be computed as a causal mask and later keys (`kernels.flash.interval`), or None."""
    if not problem.extends_causal:
        return NO_INTERVALS
    if problem.keys not in ("rows", "pages"):
        return f"has no intervals over {problem.keys}, only over rows and pages: take triton"
    return None


def side_by_side(x: Tensor) -> Tensor:
    """Return lengths or a block table with a last stride of 1, which packages require even of a single element.

    `contiguous` would not copy: torch ignores the stride of a dimension of one element.
    """
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def one_head_size(problem: Problem) -> str | None:
    """Return why a kernel with one head size can't take keys and values of two; None if values can be padded."""
    head_size, value_head_size = problem.head_size, problem.value_head_size
    if head_size == value_head_size or (value_head_size < head_size and problem.block_size is None):
        return None
    sizes = f"not {head_size} and {value_head_size}"
    if problem.block_size is not None:
        return f"one head size for keys and values over pages, which are not copied to be padded, {sizes}"
    return f"one head size for keys and values, or smaller values, which are padded with zeros, {sizes}"


def pad_values(value: Tensor, head_size: int) -> Tensor:
    """Pad values with zeros to the head size of the keys; the caller cuts the output to size."""
    return value if value.shape[-1] == head_size else pad(value, (0, head_size - value.shape[-1]))
