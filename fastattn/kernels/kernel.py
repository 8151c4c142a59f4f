"""A kernel, for the chooser: its name, the reason if it cannot compute a problem, and a table of its functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from fastattn.kernels.problem import Problem, Subtraction
from refattn.batch import Batch
from refattn.entries import CompressedPlan
from refattn.four_bits import Int4Pages, Int4Scales, Nvfp4Pages, Nvfp4Scales
from refattn.keys import Latents, PackedLatents, Pages, Pairs, QuantizedPages, Rows
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import CascadePlan, Plan
from refattn.rings import ReplayPlan, Ring
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan
from refattn.trees import Accepted, TreePlan, Trees


def fields_of(kind: type, *names: str) -> frozenset[str]:
    """Return the full names of fields of options, a plan, a storage or scales, as in `knows` and `Problem.asks`."""
    return frozenset(f"{kind.__name__}.{name}" for name in names)


# Fields that several kernels support. They are listed one by one: a new field is in no set, and refused.
# A kernel that computes a new field adds it to its own `knows`. Added here, it would count as known to all kernels.
BATCH = fields_of(
    Batch, *("cu_seqlens_q", "seq_lens", "block_table", "max_query_len", "max_seq_len", "num_keys", "num_tokens")
)
PLAN = BATCH | fields_of(
    Plan,
    *("batch", "block_size", "causal", "window_size", "first_keys", "positions", "sequences"),
    *("first_visible", "last_visible", "extends_causal"),
)
LEVELS = fields_of(CascadePlan, "batch", "levels")
TREES = fields_of(Trees, "parents", "lens") | fields_of(Accepted, "nodes", "lens", "next_tokens")
TREE = TREES | fields_of(TreePlan, "whole", "prefix", "trees", "depths", "ancestors")
PAGES = (
    fields_of(Rows, "key", "value") | fields_of(Pages, "key_cache", "value_cache") | fields_of(Pairs, "cache", "scales")
)
QUANTIZED = (
    fields_of(QuantizedPages, "key_cache", "value_cache", "scales")
    | fields_of(Fp8Scales, "key", "value", "query", "format")
    | fields_of(Int8Scales, "key", "value")
    | fields_of(Int4Pages, "key_cache", "value_cache", "scales")
    | fields_of(Int4Scales, "key", "value")
    | fields_of(Nvfp4Pages, "key_cache", "value_cache", "scales")
    | fields_of(Nvfp4Scales, "key", "value", "of_keys", "of_values")
)
OWN_NORM = fields_of(Subtraction, "norm")
LATENTS = fields_of(Latents, "cache", "latent_rank", "cache_scale", "query_scale", "fp8_weights")
PACKED = fields_of(PackedLatents, "cache", "latent_rank")
STATES = (
    BATCH
    | fields_of(StatePlan, "batch", "state_indices", "has_initial_state", "num_accepted", "checkpoint_indices")
    | fields_of(StatePlan, "block_size")
    | fields_of(RecurrentOptions, "scale", "delta")
    | fields_of(ReplayPlan, "slots", "cursors", "ring_size", "flush", "drafts", "target_indices")
    | fields_of(Ring, "key", "written", "log_decay")
)

ENTRIES = PLAN | fields_of(
    CompressedPlan,
    *("batch", "block_size", "ratio", "overlap", "window", "entries", "new", "entry_block_size"),
    *("slots", "positions", "selected"),
)


def options_of(*names: str) -> frozenset[str]:
    """Return the full names of options of attention."""
    return fields_of(AttentionOptions, *names)


ALL_OPTIONS = options_of("softmax_scale", "softcap", "alibi_slopes", "alibi_sqrt", "sinks", "batch_invariant")


@dataclass(eq=False)
class Kernel:
    """A kernel. Its functions are called as attributes, `kernel.attend(...)`; see `fastattn.dispatch`.

    Attributes:
        name: its name for `use_kernel`.
        unsupported_reason: returns why it cannot compute a problem, or None.
        attends: the storages of keys that its function `attend` takes, by their names in `problem.STORAGES`.
        trees: the storages that it takes under drafted trees.
        levels: the storages for which it computes all levels of a cascade in one call.
        functions: where each function is, `"module:function"`; the module is imported at the first use.
        knows: the fields of options, plans, storages and scales that it computes, or that `unsupported_reason` refuses.
            Any other is refused, unless it is at its default.
    """

    name: str
    unsupported_reason: Callable[[Problem], str | None]
    attends: tuple[str, ...]
    functions: Mapping[str, str]
    knows: frozenset[str]
    trees: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()

    def computes(self, problem: Problem) -> bool:
        """Return whether it has a function for the operation, storage and mask of a problem, whatever its sizes."""
        if problem.operation != "attend":
            return problem.operation in self.functions
        return problem.keys in (self.trees if problem.tree else self.levels if problem.levels > 1 else self.attends)

    def unknown(self, problem: Problem) -> str | None:
        """Return a field that a problem sets and that the kernel does not support, or None."""
        return min(problem.asks - self.knows, default=None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function of the table."""
        where = self.__dict__.get("functions", {}).get(name)
        if where is None:
            raise AttributeError(f"a kernel has no function {name}")
        module, function = find(where)
        return getattr(module, function)


@cache
def find(where: str) -> tuple[ModuleType, str]:
    """Import the module of a function of a kernel, and return it with the name of the function."""
    module, _, function = where.partition(":")
    return import_module(module), function
