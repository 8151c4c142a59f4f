"""What both twins take and return besides tensors: batches, plans, options, scales, groups. Computes no attention."""

from refattn.interface.batch import Batch, Part, Prefix
from refattn.interface.keys import AnyKeys, Keys, Latents, PackedLatents, Pages, Pairs, QuantizedPages, Rows
from refattn.interface.options import AttentionOptions
from refattn.interface.parallel import DistributedGroup, Group, Shard, simulate_ranks
from refattn.interface.plan import (
    CascadePlan,
    ContextChunk,
    ContextParallelPlan,
    Intervals,
    Needs,
    Plan,
    PrefillPlan,
)
from refattn.interface.scales import Fp8Scales, Int8Scales
from refattn.interface.states import RecurrentOptions, StateMap, StatePlan
from refattn.interface.trees import Accepted, AttentionPlan, DraftStep, TreePlan, Trees

__all__ = [
    "Accepted",
    "AnyKeys",
    "AttentionOptions",
    "AttentionPlan",
    "Batch",
    "CascadePlan",
    "ContextChunk",
    "ContextParallelPlan",
    "DistributedGroup",
    "DraftStep",
    "Fp8Scales",
    "Group",
    "Int8Scales",
    "Intervals",
    "Keys",
    "Latents",
    "Needs",
    "PackedLatents",
    "Pages",
    "Pairs",
    "Part",
    "Plan",
    "PrefillPlan",
    "Prefix",
    "QuantizedPages",
    "RecurrentOptions",
    "Rows",
    "Shard",
    "StateMap",
    "StatePlan",
    "TreePlan",
    "Trees",
    "simulate_ranks",
]
