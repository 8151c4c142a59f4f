"""Count the bytes that PyTorch operations pass to one another: what eager code writes to memory and reads back.

scores = query @ key.T      reads query and key, writes scores
weights = scores.exp()      reads scores, writes weights
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation takes or returns, while it is entered.

    What happens inside of an operation is not counted, so a fused kernel counts as its arguments and its result. Nor is
    it known which of the bytes a cache of the processor had at hand.

        >>> with Traffic() as traffic:
        ...     answer = torch.ones(256, 256) + torch.ones(256, 256)
        >>> traffic.bytes  # two written, both read, and the sum written
        1310720

    Attributes:
        bytes: counted so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its tensors, unless it only looks at one in another shape."""
        answer = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, answer)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return answer
