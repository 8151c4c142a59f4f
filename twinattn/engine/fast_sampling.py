"""Draw the next tokens of all requests at once; the twin of `twinattn.engine.sampling`."""

from importlib import import_module
from types import ModuleType

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fastattn.dispatch import launch
from twinattn.engine.sampling import check_sample


def sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, "b"],
    top_p: Float[Tensor, "b"] | None,
    uniform: Float[Tensor, "b"],
) -> Int64[Tensor, "b"]:
    """Draw a token from each row of logits, with one random number in [0, 1) each.

    Arguments, results and errors are those of `twinattn.engine.sampling.sample`. On a GPU nothing waits for the device,
    and a graph may capture it; the same token comes out unless the random number, or the nucleus, is within 1e-12 of a
    token's end on the line. Rows without top-p cost less with `top_p=None` than with ones, for its launches.
    """
    check_sample(logits)
    tensors = dict(logits=logits, temperature=temperature, top_p=top_p, uniform=uniform)
    tokens: Tensor = launch(kernels_for(logits.device).sample, **tensors)
    return tokens


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module that draws on a device: in Triton on a GPU, elsewhere in plain PyTorch."""
    name = "sampling" if device.type == "cuda" else "torch_sampling"
    return import_module(f"twinattn.engine.kernels.{name}")
