"""What both twins take and return beside tensors: batches, plans, options. Nothing here computes attention."""

from refattn.interface.batch import Batch, Part, Prefix
from refattn.interface.options import AttentionOptions
from refattn.interface.plan import CascadePlan, ContextChunk, Needs, Plan, PrefillPlan

__all__ = [
    "AttentionOptions",
    "Batch",
    "CascadePlan",
    "ContextChunk",
    "Needs",
    "Part",
    "Plan",
    "PrefillPlan",
    "Prefix",
]
