"""The call of a workload: its tensors, its plan, and the oracle's output."""

import torch

from twinattn.kit.search import compressed, recurrent, replay, sparse
from twinattn.kit.search.inputs import Call
from twinattn.kit.search.paths import attention_call
from twinattn.kit.workload import Workload


def lay_out(work: Workload, layer: int = 0) -> Call:
    """Make the tensors of a workload.

    Args:
        work: a workload of a path of attention, or of `merge`.
        layer: another layer has other values in the same blocks and slots, so that the plan can be reused.
    """
    makers = dict(compressed=compressed.call, recurrent=recurrent.call, replay=replay.call, sparse=sparse.call)
    return makers.get(work.path, attention_call)(work, torch.Generator().manual_seed(31 * work.seed + layer))
