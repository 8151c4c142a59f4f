"""Checks of what an engine is made of, before anything is loaded or allocated."""

import inspect
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from refattn.checks import check_flag, describe
from twinattn.engine.cost_model import Machine
from twinattn.engine.kv_cache_dtype import PACKED_ROWS, check_kernel
from twinattn.engine.layers import Layer
from twinattn.engine.speculation import Drafter, DraftModel

PATHS = ("kv_cache", "metadata")  # that every twin has


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Check sizes, by their names.

    Raises:
        ValueError: naming the first that is not an int of at least 1.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")


def check_module(model: Any) -> None:
    """Check that a model is one of transformers, with its weights in memory.

    Raises:
        ValueError: naming it.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "get_text_config"):
        given = type(model).__name__ if isinstance(model, torch.nn.Module) else describe(model)
        raise ValueError(f"model: expected a causal LM of transformers, got {given}")
    away = [name for name, weight in model.named_parameters() if weight.is_meta]
    if away:
        raise ValueError(f"model: expected weights in memory, got {away[0]} on the device meta, which holds none")


def check_parts(
    *,
    tokenizer: Any,
    twin: Any,
    machine: Machine | None,
    runner: Any,
    speculation: Drafter | None,
    **flags: bool,
) -> None:
    """Check what an engine works with besides its model; arguments as in `Engine`.

    Raises:
        ValueError: naming the argument that is of another type.
    """
    if tokenizer is not None and (isinstance(tokenizer, str | bytes | type) or not hasattr(tokenizer, "decode")):
        raise ValueError(f"tokenizer: expected a tokenizer of transformers, or None, got {describe(tokenizer)}")
    if not _is_twin(twin):
        raise ValueError(f"twin: expected the package refattn or fastattn, got {describe(twin)}")
    if machine is not None and not isinstance(machine, Machine):
        raise ValueError(f"machine: expected a Machine, or None, got {describe(machine)}")
    if runner is not None and (isinstance(runner, type) or not callable(getattr(runner, "run", None))):
        raise ValueError(f"runner: expected an object with a `run`, such as CudaGraphs(), or None, got {runner!r}")
    if speculation is not None:
        check_drafter(speculation)
    for name, flag in flags.items():
        check_flag(name, flag)


def check_drafter(drafter: Any) -> None:
    """Check that an object can be asked for drafts.

    Raises:
        ValueError: if it is a class, lacks an attribute of `Drafter`, has one that is no int of at least 1, or has a
            `propose` that takes other arguments.
    """
    sizes = "max_drafts", "max_branches"
    missing = [name for name in (*sizes, "propose") if not hasattr(drafter, name)]
    if isinstance(drafter, type) or missing:
        lacks = f", which lacks {', '.join(missing)}" if missing else ", a class, not an object"
        raise ValueError(f"speculation: expected a Drafter, such as NGram(), or None, got {drafter!r}{lacks}")
    for name in sizes:
        size = getattr(drafter, name)
        if type(size) is not int or size < 1:
            raise ValueError(f"speculation: expected {name} to be an int of at least 1, got {size!r}")
    try:
        inspect.signature(drafter.propose).bind([], depth=1, nodes=1, branches=1)
    except TypeError as error:
        raise ValueError(
            f"speculation: expected propose(tokens, *, depth, nodes, branches), got {drafter.propose!r}: {error}"
        ) from error


def check_speculation(speculation: Drafter | None, layers: Sequence[Layer], has_states: bool, vocab_size: int) -> None:
    """Check that a model takes the drafts that an engine makes.

    Args:
        speculation: as in `Engine`.
        layers: of the model.
        has_states: whether other layers keep a state.
        vocab_size: tokens that the model knows.

    Raises:
        ValueError: for branches where they cannot be, or a draft model of other tokens.
    """
    if speculation is None:
        return
    without = [layer for layer in layers if not layer.takes_trees]
    if speculation.max_branches > 1 and without:
        raise ValueError(
            f"speculation: expected max_branches=1, as {without[0]} has no plan for trees, "
            f"got {speculation.max_branches}"
        )
    if speculation.max_branches > 1 and has_states:
        raise ValueError(
            "speculation: expected max_branches=1 with layers that keep a state, as a state follows one token, "
            f"got {speculation.max_branches}"
        )
    if isinstance(speculation, DraftModel) and speculation.engine.vocab_size != vocab_size:
        raise ValueError(
            f"speculation: expected a draft model of the same {vocab_size} tokens, got one of "
            f"{speculation.engine.vocab_size}"
        )


def check_autocast(model: Any) -> None:
    """Check that no code changes the types of a model's keys and values, which are stored in the model's own type.

    Raises:
        NotImplementedError: under `torch.autocast` for the model's device.
    """
    if torch.is_autocast_enabled(model.device.type):
        raise NotImplementedError(
            f"torch.autocast: the engine runs a model in its own type, {str(model.dtype).removeprefix('torch.')}; "
            "leave autocast for it, or convert the model"
        )


def check_device(device: str) -> None:
    """Check that the device exists, before minutes are spent on loading.

    Raises:
        ValueError: if it does not.
    """
    count = torch.cuda.device_count()
    found = ["cpu", *["cuda"] * (count > 0), *(f"cuda:{i}" for i in range(count))]
    if device not in found:
        raise ValueError(f"device: expected one of {', '.join(found)}, got {device!r}")


def _is_twin(twin: Any) -> bool:
    """Return whether an object has the paths that every twin has, as attributes or as modules of its name."""

    def has(path: str) -> bool:
        if hasattr(twin, path) or not isinstance(twin, ModuleType):
            return hasattr(twin, path)
        try:
            return find_spec(f"{twin.__name__}.{path}") is not None
        except ModuleNotFoundError:  # in a module that is no package
            return False

    return all(has(path) for path in PATHS)


def check_out_of_memory(error: RuntimeError) -> None:
    """Raise an error of an allocation again, unless it says that there is too little memory."""
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):  # so it is said on a CPU
        raise error


def check_cache(
    kv_cache_dtype: str, calibration: Any, calculate_kv_scales: bool, twin: Any, device: torch.device
) -> None:
    """Check what is to be kept in the pools, and where its scales come from; arguments as in `Engine`.

    Raises:
        ValueError: naming the argument that does not go with the others.
        NotImplementedError: if the twin has no kernel for it on the device.
    """
    if not isinstance(kv_cache_dtype, str):
        raise ValueError(f'kv_cache_dtype: expected "auto" or another name of a type, got {kv_cache_dtype!r}')
    has_fixed_scales = kv_cache_dtype.startswith("fp8") and kv_cache_dtype != PACKED_ROWS
    if calculate_kv_scales and (calibration is not None or not has_fixed_scales):
        given = "a calibration" if calibration is not None else f"kv_cache_dtype={kv_cache_dtype!r}"
        raise ValueError(
            "calculate_kv_scales: expected False but for fp8 without a calibration, as other scales are given or "
            f"come with each key, got True and {given}"
        )
    if calibration is not None and kv_cache_dtype == "auto":
        raise ValueError('calibration: expected None, as pools of kv_cache_dtype="auto" have no scales, got some')
    if calibration is not None and kv_cache_dtype == "int4":
        raise ValueError("calibration: expected None, as a write finds the scales of int4, got some")
    if calibration is not None and kv_cache_dtype == PACKED_ROWS:
        raise ValueError(f"calibration: expected None, as a write finds the scales of {PACKED_ROWS}'s rows, got some")
    check_kernel(kv_cache_dtype, getattr(twin, "__name__", ""), device)
