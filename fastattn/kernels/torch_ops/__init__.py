"""Plain torch, on any device: operations beside attention (merging, the cache, tables), but no attention."""

from fastattn.kernels.kernel import ENTRIES, PLAN, QUANTIZED, STATES, TREES, Kernel
from fastattn.kernels.problem import Problem


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None: nearly all operations run on any device."""
    if problem.operation in ("recurrent", "convolve", "replay", "flush", "score_index") and problem.device.type in (
        "cuda",
        "meta",
    ):
        return "reads the lengths on the host, for which a GPU would have to wait"
    return None


FUNCTIONS = {
    "merge": ("merge", "add_sinks"),
    "cache": ("write", "write_packed", "read_packed", "copy_blocks", "compact"),
    "four_bits": ("write_int4", "write_nvfp4"),
    "metadata": ("slot_mapping", "trim", "cut_chunks", "draw_trees"),
    "sparse": ("write_index", "read_index", "score_index", "select", "selected_slots", "plan_selected"),
    "recurrent": ("recurrent", "convolve"),
    "replay": ("replay", "flush"),
    "compressed": ("compress",),
}
KERNEL = Kernel(
    "torch",
    unsupported_reason,
    attends=(),
    knows=PLAN | TREES | QUANTIZED | STATES | ENTRIES,
    functions={name: f"{__name__}.{module}:{name}" for module, names in FUNCTIONS.items() for name in names},
)
