"""Our own Triton kernels, for what FlashAttention does less well: short queries over any pages, all options, tables."""

import os

import torch

from fastattn.kernels.device import cannot_import, cannot_interpret, capability, is_rocm
from fastattn.kernels.kernel import (
    ALL_OPTIONS,
    ENTRIES,
    LATENTS,
    LEVELS,
    PACKED,
    PAGES,
    PLAN,
    QUANTIZED,
    STATES,
    TREE,
    Kernel,
)
from fastattn.kernels.problem import Problem

LARGEST_HEAD = 256
LARGEST_LATENT = 512
LARGEST_ROPE = 128
MAX_PAIRS = 1024  # copies of blocks that one program can hold


def is_interpreted(device: torch.device) -> bool:
    """Return whether kernels run in Triton's interpreter on a device."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def unsupported_device(device: torch.device) -> str | None:
    """Return why these kernels do not run on a device, or None."""
    interpreted = is_interpreted(device)
    if device.type != "cuda" and not interpreted:
        return f"computes on CUDA, the tensors are on {device.type} (TRITON_INTERPRET=1 runs it on the CPU)"
    if not interpreted and not is_rocm() and capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    return None


def float_types(device: torch.device) -> list[torch.dtype]:
    """Return the dtypes in which these kernels compute on a device."""
    types = [torch.float16, torch.float32, torch.bfloat16]
    if is_interpreted(device):
        types.remove(torch.bfloat16)  # the interpreter multiplies matrices of it wrongly
    return types


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem, or None."""
    interpreted = is_interpreted(problem.device)
    wrong_device = unsupported_device(problem.device)
    if wrong_device:
        return wrong_device
    if problem.operation == "differential" and problem.positions:
        return "subtracts the answers of query rows that are the last of their sequences, at no other positions"
    if problem.operation == "differential" and problem.intervals:
        return "subtracts under causal masks and windows, and under no interval of keys for each query"
    if problem.operation == "merge" and problem.dtype != torch.float32:
        return f"merges by log-sum-exps in float32, not {problem.dtype}"
    if problem.operation == "copy_blocks" and not problem.contiguous_blocks:
        return "copies blocks whose elements lie side by side, without gaps"
    if problem.operation == "copy_blocks" and problem.num_pairs > MAX_PAIRS:
        return f"copies at most {MAX_PAIRS} blocks at once, not {problem.num_pairs}"
    if problem.operation == "compact" and problem.num_dims > 4:
        return "moves tokens of pools of at most four dimensions"
    if problem.operation == "score_index" and interpreted and problem.dtype == torch.bfloat16:
        return "computes torch.float16 and torch.float32 in the interpreter, not torch.bfloat16"
    if problem.operation in ("write_index", "score_index", "compress") and problem.dtype == torch.float64:
        return "computes in float32, and rounds float64 to it"
    types = float_types(problem.device)
    over_states = problem.operation in ("recurrent", "convolve", "replay", "flush")
    if (problem.is_attention or over_states) and problem.dtype not in types:
        return f"computes {', '.join(map(str, types))}, not {problem.dtype}"
    if problem.stored is not None and torch.float64 in problem.stored and problem.is_attention:
        return "multiplies values of up to 32 bits, not those of float64"
    rope = problem.head_size - problem.value_head_size
    if problem.keys in ("latents", "packed"):
        if problem.value_head_size > LARGEST_LATENT or rope > LARGEST_ROPE:
            sizes = f"{problem.value_head_size} and {rope}"
            return f"latents of up to {LARGEST_LATENT} and rotary keys of up to {LARGEST_ROPE} elements, not {sizes}"
    elif max(problem.head_size, problem.value_head_size) > LARGEST_HEAD:
        return f"head sizes up to {LARGEST_HEAD}, not {problem.head_size} and {problem.value_head_size}"
    cannot = cannot_import("triton", "triton", "jit") or (cannot_interpret() if interpreted else None)
    if cannot is None and problem.operation == "attend_compressed":
        from fastattn.kernels.triton.compressed_hopper import unsupported_reason as not_in_one_launch

        return not_in_one_launch(problem)
    return cannot


KERNEL = Kernel(
    "triton",
    unsupported_reason,
    attends=("rows", "pages", "quantized", "int4", "latents", "packed"),
    trees=("pages", "quantized", "int4", "latents", "packed"),
    levels=("pages", "quantized", "int4"),
    knows=ALL_OPTIONS | PLAN | LEVELS | TREE | PAGES | QUANTIZED | LATENTS | PACKED | STATES | ENTRIES,
    functions={  # Triton is imported when a kernel is first called: it is not there on every machine
        "attend": f"{__name__}.attention:attend_to_keys",
        "bind_attend": f"{__name__}.attention:bind_attend",
        "attend_compressed": f"{__name__}.compressed_hopper:attend_compressed",
        "differential": f"{__name__}.differential:differential",
        "bind_differential": f"{__name__}.differential:bind_differential",
        "merge": f"{__name__}.merge:merge",
        "write": f"{__name__}.cache:write",
        "write_quantized": f"{__name__}.cache:write_quantized",
        "write_packed": f"{__name__}.cache:write_packed",
        "write_int4": f"{__name__}.turned_rows:write_int4",
        "copy_blocks": f"{__name__}.cache:copy_blocks",
        "compact": f"{__name__}.cache:compact",
        "slot_mapping": f"{__name__}.metadata:slot_mapping",
        "trim": f"{__name__}.metadata:trim",
        "cut_chunks": f"{__name__}.metadata:cut_chunks",
        "draw_trees": f"{__name__}.metadata:draw_trees",
        "write_index": f"{__name__}.index_keys:write_index",
        "score_index": f"{__name__}.index_keys:score_index",
        "select": f"{__name__}.sparse:select",
        "selected_slots": f"{__name__}.sparse:selected_slots",
        "plan_selected": f"{__name__}.sparse:plan_selected",
        "recurrent": f"{__name__}.recurrent:recurrent",
        "convolve": f"{__name__}.convolution:convolve",
        "replay": f"{__name__}.replay:replay",
        "flush": f"{__name__}.replay:flush",
        "compress": f"{__name__}.compressed:compress",
    },
)
