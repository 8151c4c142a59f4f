"""Whether the weights of a model are those of the step before: what was computed from others may not be used any more.

Cached keys and values, states, scales and captured graphs are all computed from the weights, and outlive a step.
Training goes on, an adapter is merged, a checkpoint is loaded: then the engine has to begin anew.

    a weight is written to       its `_version` grows: `load_state_dict`, an optimizer, `add_` under `no_grad`
    a weight is replaced         other objects are there, or their memory is elsewhere: `module.weight = ..`, `to`
    `weight.data` is written to  leaves no trace, and neither does a switch in the model's own code: `Engine.forget`

Versions are compared in every step (22 us for 311 weights), all else in the first step after a request was added.
Buffers that a checkpoint has are weights, too; others are not, as a model's own code may change them.
"""

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

version_of = attrgetter("_version")


class Weights:
    """The weights of a model, as they were when it was last looked at.

    Attributes:
        is_trusted: False after `Engine.forget`: weights have changed without a trace.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.remember()

    def remember(self) -> None:
        """Take the weights as they are now."""
        modules = list(self.model.modules())
        self._dicts = [x for module in modules for x in (module._parameters, module._modules)]
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        weights = [x for module in modules for x in _weights_of(module)]
        self._versioned = [x for x in weights if not x.is_inference()]  # other tensors have no version
        self._versions = sum(map(version_of, self._versioned))
        self._placed = [x for x in weights if type(x) in (Tensor, Parameter)]  # others may have no address
        self._addresses = list(map(Tensor.data_ptr, self._placed))
        self.is_trusted = True

    def were_written(self) -> bool:
        """Return whether a weight was written to."""
        return sum(map(version_of, self._versioned)) != self._versions

    def were_moved(self) -> bool:
        """Return whether a weight or a module was replaced, or a weight is elsewhere in memory."""
        values = list(chain.from_iterable(map(dict.values, self._dicts)))
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return True
        return list(map(Tensor.data_ptr, self._placed)) != self._addresses


def _weights_of(module: Any) -> list[Tensor]:
    """Return the parameters of a module, and those buffers that are in its checkpoint."""
    names = module._buffers.keys() - module._non_persistent_buffers_set
    return [x for x in (*module._parameters.values(), *map(module._buffers.get, names)) if x is not None]
