"""Ranks of vLLM that are processes on one GPU, where NCCL refuses to connect them: they talk by gloo, over the CPU.

Nothing of attention, of its metadata or of its kernels differs from ranks on a GPU each. What differs is how ranks add
up and gather, and that no step is captured in a CUDA graph. vLLM calls `register` in every process, as a plugin: an
entry point that `vllm_jobs.Engines` writes for such engines alone.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

PLUGIN = f"{__name__}:register"


class OverGloo:
    """What vLLM's layers ask of a communicator, for tensors of any device and type.

    Each collective sends bytes alone, and adds in the order of the ranks, in float32: all ranks have the same sums.
    """

    device_group: Any  # a process group of the backend gloo
    world_size: int
    rank_in_group: int

    def from_all(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of one shape, in rank order."""
        sent = tensor.contiguous().flatten().view(torch.uint8).cpu()  # waits for the stream that computes it
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        torch.distributed.all_gather(received, sent, group=self.device_group)
        return [x.to(tensor.device).view(tensor.dtype).view(tensor.shape) for x in received]

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all ranks, concatenated along a dimension."""
        return torch.cat(self.from_all(input_), dim)

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum over all ranks, as a new tensor."""
        kind = torch.float32 if input_.is_floating_point() and input_.itemsize < 4 else input_.dtype
        return torch.stack([x.to(kind) for x in self.from_all(input_)]).sum(0).to(input_.dtype)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's chunk, along a dimension, of the sum over all ranks."""
        assert input_.shape[dim] % self.world_size == 0, (tuple(input_.shape), dim, self.world_size)
        return self.all_reduce(input_).chunk(self.world_size, dim)[self.rank_in_group].contiguous()


def make_communicator(**given: Any) -> Any:
    """Return a communicator of vLLM's whose sums are those of `OverGloo`; vLLM calls it by name, for each group."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    made = type("OneCardCommunicator", (OverGloo, DeviceCommunicatorBase), {})(**given)
    backend = torch.distributed.get_backend(made.device_group)
    assert backend == "gloo", f"{made.unique_name}: expected a group of gloo, got {backend}"
    say(f"rank {made.rank_in_group} of {made.world_size} in {made.unique_name}, on {made.device}")
    return made


def register() -> None:
    """Make vLLM put all ranks on the one visible GPU, connect them by gloo, and call `make_communicator`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.dist_backend = "gloo"
    platform.get_device_communicator_cls = classmethod(lambda cls: f"{__name__}.{make_communicator.__name__}")
    if platform.device_name == "cuda":  # as `--device-ids 0,0`, which vLLM's command line refuses
        EngineArgs._resolve_device_ids = lambda args: [one_gpu()] * args.tensor_parallel_size
    say(f"registered in process {os.getpid()}")


def one_gpu() -> int:
    """Return the number of the GPU that this process sees.

    Raises:
        ValueError: if it sees several, or none.
    """
    (name,) = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return int(name)


def say(what: str) -> None:
    """Write a line into the log of an engine."""
    sys.stderr.write(f"one card: {what}\n")
