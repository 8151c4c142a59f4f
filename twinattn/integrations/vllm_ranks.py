"""Ranks of vLLM that share the keys of a sequence (decode context parallelism), for both of its backends.

    tokens     0 1 2 3 4 5 6 7       `--decode-context-parallel-size 2 --cp-kv-cache-interleave-size 2`
    rank       0 0 1 1 0 0 1 1

vLLM distributes the tokens, and gives each rank its own block tables and slots. It does not do so in layers with a
window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank

from refattn.plan import Plan
from refattn.ranks import Group, Shard


@dataclass
class LatentDecodes:
    """The decodes of a step over latents.

    Attributes:
        plan: their plan, over the latents of this rank.
        seq_lens: how many latents of each this rank has, `[b]`; vLLM reads it where ranks share them.
    """

    plan: Plan
    seq_lens: Tensor


def shard_of(kv_cache_spec: Any, vllm_config: Any) -> Shard | None:
    """Return this rank's share of each sequence whose keys a group of layers keeps; None if it has them all."""
    size, rank = get_dcp_world_size_and_rank(getattr(kv_cache_spec, "dcp_sharded", False))
    if size == 1:
        return None
    return Shard(rank, size, vllm_config.parallel_config.cp_kv_cache_interleave_size)


def refuse_over_ranks(layer: Any, **given: Any) -> None:
    """Refuse what is not computed where ranks share the keys of a sequence.

    vLLM says so in the attributes of a layer, before it is made.

    Args:
        layer: the attention of a layer.
        given: what it refuses over several ranks, by vLLM's names.

    Raises:
        NotImplementedError: for one of these, and for prompts that are split over ranks.
        RuntimeError: if the ranks cannot add up partial outputs.
    """
    if getattr(layer, "pcp_world_size", 1) > 1:
        raise NotImplementedError(f"pcp_world_size: expected 1, got {layer.pcp_world_size}; prompts are not split here")
    if getattr(layer, "dcp_world_size", 1) == 1:
        return
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"{name}: expected none over {layer.dcp_world_size} ranks, got {value!r}")
    check_reduce_scatter(get_dcp_group())


def check_reduce_scatter(group: Any) -> None:
    """Check that vLLM's ranks can add up partial outputs.

    On a GPU, vLLM calls NCCL itself. If it has no NCCL, or one that lacks a function that it looks up, its log has an
    error at most: all-reduce and all-gather go through torch, but a reduce-scatter returns uninitialised memory.

    Args:
        group: vLLM's group of the ranks that share the keys of a sequence.

    Raises:
        RuntimeError: if its communicator is disabled.
    """
    nccl = getattr(group.device_communicator, "pynccl_comm", None)  # a CPU's communicator has none
    if nccl is not None and nccl.disabled:
        raise RuntimeError(
            "reduce_scatter: expected vLLM's NCCL communicator, got one that is disabled, whose sums over ranks are "
            "uninitialised memory; install the torch that this vLLM requires, whose NCCL it loads, or set "
            "VLLM_NCCL_SO_PATH to a later NCCL, and do not set VLLM_DISABLE_PYNCCL"
        )


class Ranks:
    """vLLM's ranks that share the keys of a sequence, as `refattn.ranks.Group` has them."""

    def __init__(self) -> None:
        """Read vLLM's group."""
        self._ranks = get_dcp_group()
        self.rank: int = self._ranks.rank_in_group
        self.size: int = self._ranks.world_size

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the tensors of all ranks, concatenated along a dimension in rank order."""
        return self._ranks.all_gather(part.contiguous(), dim)

    def reduce_scatter(self, part: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk, along a dimension, of the sum over all ranks."""
        return self._ranks.reduce_scatter(part.contiguous(), dim)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def merge_over_ranks(part: Tensor, lse: Tensor, ranks: Group) -> tuple[Tensor, Tensor]:
    """Merge the partial outputs of ranks, each of all heads over its own keys.

    Args:
        part: partial outputs of this rank, `[t, h of all ranks, d]`.
        lse: their natural log-sum-exps, `[t, h of all ranks]`; -inf where the rank has no key.
        ranks: the ranks.

    Returns:
        The merged outputs of the rank's own heads, `[t, h, d]` in float32, and their log-sum-exps `[t, h]`:
        NaN and -inf where no rank has a key.
    """
    total = ranks.all_gather(lse[None], dim=0).logsumexp(0)
    weight = (lse - total).exp()  # NaN where no rank has a key; a merge ignores such a part
    own = ranks.reduce_scatter(part.float() * weight[..., None], dim=1)
    return own, total.chunk(ranks.size, dim=1)[ranks.rank].contiguous()
