"""Pack the weights of a model for the matrix products of a CPU: `Engine(pack(model), ...)`.

A step of decodes multiplies a few rows with every weight of the model, and takes most of its time for that. How fast it
is depends on how the weights lie in memory:

    torch.nn.Linear    [out, in], as in a checkpoint; each product lays out what it reads anew
    packed             in blocks of oneDNN, which is a part of torch; laid out once

The numbers are the same, their sums are rounded in another order. The weights that were there stay: a packed model
takes the memory of its linear layers twice.

Source: oneDNN, "Understanding Memory Formats"; torch packs so itself when `torch.compile` freezes a model.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from refattn.checks import describe


def pack(model: Any) -> Any:
    """Pack the weights of a model's linear layers, in place.

    A layer is packed if it is an `nn.Linear` of float32 with the `forward` of its class. A weight that is replaced, or
    written to, is packed anew when the layer is next called; but a write through `weight.data` leaves no trace, so call
    `pack` again after one. The model's own code runs where gradients are recorded, under autocast and `torch.compile`,
    and where a layer has been moved to another device or type.

    Args:
        model: a model on a CPU, in evaluation mode.

    Returns:
        The same model. `unpack` gives it its own code back, and frees the memory.

    Raises:
        NotImplementedError: if torch has no oneDNN, or it is switched off.
        ValueError: if the model is no module, is in training mode, or has no such layer.
    """
    if not can_pack():
        raise NotImplementedError("pack: expected torch with oneDNN, and torch.backends.mkldnn.enabled to be True")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {describe(model)}")
    if model.training:
        raise ValueError("model: expected one in evaluation mode, got one in training; call model.eval() first")
    unpack(model)
    linears = [x for x in model.modules() if type(x) is nn.Linear and "forward" not in vars(x) and _can_pack(x)]
    if not linears:
        raise ValueError(f"model: expected linear layers of float32 on a CPU, got none in {type(model).__name__}")
    for linear in linears:
        vars(linear)["forward"] = _Packed(linear)
    return model


def can_pack() -> bool:
    """Return whether this torch has the products that packed weights are for."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def unpack(model: Any) -> Any:
    """Restore a model's own code, in place, and return the model."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Packed):
            del module.forward
    return model


def _can_pack(linear: nn.Linear) -> bool:
    weight = linear._parameters.get("weight")
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.is_inference():
        return False
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() > 0


class _Packed:
    """The `forward` of a linear layer in place of its class's, which it calls where packed weights are of no use."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self._packed: Tensor | None = None
        self._made_of: tuple[int, int] | None = None  # the weight that is packed: its address and its version

    def __call__(self, x: Tensor) -> Tensor:
        linear, weight = self.linear, self.linear._parameters.get("weight")
        if weight is None or not _can_multiply(x) or (self._find(weight) != self._made_of and not self._pack()):
            return type(linear).forward(linear, x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, linear.bias, "none", [], "")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Packed":
        """Return the `forward` of the copy of the layer, which packs its own weight."""
        return _Packed(copy.deepcopy(self.linear, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave what is packed out of a pickle."""
        return _Packed, (self.linear,)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _pack(self) -> bool:
        """Pack the weight as it is now; return whether it can be."""
        self._packed, self._made_of = None, None
        if not _can_pack(self.linear):
            return False
        weight = self.linear.weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._made_of = self._find(weight)
        return True

    @staticmethod
    def _find(weight: Tensor) -> tuple[int, int]:
        return weight.data_ptr(), -1 if weight.is_inference() else weight._version


def _can_multiply(x: Tensor) -> bool:
    """Return whether some rows may be multiplied with packed weights, and no other product is asked for."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and x.dtype == torch.float32 and bool(torch.backends.mkldnn.enabled)
