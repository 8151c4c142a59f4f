"""What both twins take and return beside tensors: batches, plans, options, scales. Nothing here computes attention."""

from refattn.interface.batch import Batch, Part, Prefix
from refattn.interface.options import AttentionOptions
from refattn.interface.plan import CascadePlan, ContextChunk, Needs, Plan, PrefillPlan
from refattn.interface.scales import Fp8Scales, Int8Scales
from refattn.interface.trees import Accepted, TreePlan, Trees

__all__ = [
    "Accepted",
    "AttentionOptions",
    "Batch",
    "CascadePlan",
    "ContextChunk",
    "Fp8Scales",
    "Int8Scales",
    "Needs",
    "Part",
    "Plan",
    "PrefillPlan",
    "Prefix",
    "TreePlan",
    "Trees",
]
