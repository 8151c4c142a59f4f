"""Kernels to check: a function is called with the arguments that its parameters name, and claims no more than these.

    def my_attention(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softmax_scale=None): ...

is called with exactly these. It has no parameter `softcap`, so softcaps are not tested, and the report says so.
"""

import importlib
import inspect
import itertools
import mmap
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from refattn.options import AttentionOptions, RecurrentOptions
from twinattn.kit import gradients
from twinattn.kit.example import PATHS, Answers, Arguments, Example
from twinattn.kit.names import unknown_words, wrong_names
from twinattn.kit.signature import parameters_of

OF_BATCH = ("cu_seqlens_q", "seq_lens", "block_table", "max_query_len", "max_seq_len", "query_lens", "context_lens")
QUERY_LENS = {"cu_seqlens_q", "query_lens", "context_lens", "batch", "plan"}  # each implies the query lengths
BEGINNINGS = {"has_initial_state", "seq_lens", "context_lens", "batch", "plan"}  # each implies which states are new
NEUTRAL = {
    "causal": True,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "alibi_sqrt": False,
    "sinks": None,
    "batch_invariant": False,
    "return_lse": False,
    "out": None,
    "prefixes": (),
    "common_prefix_len": 0,
    "num_accepted": None,
    "delta": True,
    "grad_lse": None,
    "deterministic": False,
    "cache_scale": 1.0,
    "query_scale": None,
}  # the value of an option that a batch does not set
OF_BLOCKS = dict.fromkeys(("checkpoint_indices", "block_size"), "states after each block are held by search")
BY_TESTS = "held by the tests of the path"
NOT_DRAWN = {  # options of a path, of an operation or of its plan that no batch sets, each with the reason
    "speculative": {"causal": "trees are causal, and what has none is chunked_prefill"},
    "differential": {
        "scales": "over fp8 pools each half is that of quantized",
        "norm": "it is any function of the caller's",
    },
    **dict.fromkeys(
        ("sparse", "sparse_latents"),
        dict.fromkeys(("alibi_slopes", "alibi_sqrt"), "selected keys have no positions"),
    ),
    "packed_latents": {
        "cache_scale": "packed latents have scales of their own",
        "alibi_slopes": "selected keys have no positions",
        "alibi_sqrt": "selected keys have no positions",
    },
    "mla": {"fp8_weights": "it allows a wider error, which has no reference"},
    "packed_mla": dict.fromkeys(("fp8_weights", "cache_scale", "query_scale"), "packed latents refuse it"),
    "varlen_backward": {"out": "memory that is given has no gradient"},
    "recurrent": OF_BLOCKS,
    "convolve": OF_BLOCKS,
    "state_map": OF_BLOCKS | {"scale": "it is of queries, and there are none"},
    "compress": {"window_size": "it is of attention, and entries are computed from rows alone"},
    "compressed": {"overlap": "it is of how entries are computed, and here they are given"}
    | dict.fromkeys(("alibi_sqrt", "batch_invariant"), BY_TESTS),
    "make_batch": {"device": "it is that of the check"},
    "mla_prefill": dict.fromkeys(("alibi_sqrt", "batch_invariant"), BY_TESTS),
    "int8_attention": dict.fromkeys(
        ("alibi_slopes", "alibi_sqrt", "batch_invariant"), "held over fp8 by the path quantized, and by search"
    ),
    **dict.fromkeys(
        ("int4_attention", "nvfp4_attention"),
        dict.fromkeys(("alibi_slopes", "alibi_sqrt", "batch_invariant"), BY_TESTS),
    ),
    "context_parallel": dict.fromkeys(
        ("causal", "softcap", "alibi_slopes", "alibi_sqrt", "batch_invariant", "scales", "out"), BY_TESTS
    ),
}
LARGE = 2**31  # elements: offsets beyond do not fit into 32 bits
HALVES = (torch.float32, torch.float16, torch.bfloat16)
Shape = tuple[tuple[int, int], tuple[int, int], int]  # heads, head sizes, block size


@dataclass(frozen=True)
class Claims:
    """The claims of a kernel in addition to its parameters; `claims` attaches them to a function.

    The properties `mask` and `answer` draw every combination of heads, head sizes and block sizes. The others draw two:
    the first of each, and the last of each.

    Attributes:
        dtypes: of queries, keys and values.
        heads: numbers of query heads and KV heads.
        head_sizes: of keys and values, in pairs.
        block_sizes: tokens in a block.
        max_query_len: the most queries of a sequence; 1 for a decode kernel.
        min_seq_len: the fewest keys of a sequence.
        parts: numbers of parts that a merge takes.
        causal: False for a kernel of encoders or of cross attention, whose queries see later keys in every call.
        layers: kinds of layers that keep a state, of `states.LAYERS`; most properties draw the first.
        not_claimed: names of properties, each with the reason, in the words of its documentation.
        refusals: substrings of error messages that mean a refusal, for a kernel that does not raise
            NotImplementedError.
        max_examples: the most batches per property, for a kernel that compiles for every shape.
        conventions: whether it claims the conventions that only our twins promise: no effect of autocast or of the
            default type of the process, the same bits for any number of tokens with batch_invariant, slopes and sinks
            of any type, selected positions in ascending order, fewer slots than rows. The default is True for our
            twins alone.
    """

    dtypes: tuple[torch.dtype, ...] = HALVES
    heads: tuple[tuple[int, int], ...] = (
        *((1, 1), (2, 1), (3, 3), (6, 2), (28, 4), (8, 2), (45, 9)),
        *((24, 2), (16, 2), (32, 2), (48, 1), (40, 40), (48, 8), (32, 16), (4, 2)),
    )
    head_sizes: tuple[tuple[int, int], ...] = (
        *((64, 64), (80, 80), (72, 72), (96, 96), (192, 192), (256, 256)),
        *((100, 100), (160, 160), (128, 128)),
    )
    block_sizes: tuple[int, ...] = (16, 1, 8, 3, 128, 48, 256, 32, 64)
    max_query_len: int | None = None
    min_seq_len: int = 0
    parts: tuple[int, ...] = (2, 3, 5)
    causal: bool = True
    layers: tuple[str, ...] = ("gdn",)
    not_claimed: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    max_examples: int | None = None
    conventions: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """Every combination of heads, head sizes and block sizes."""
        return list(itertools.product(self.heads, self.head_sizes, self.block_sizes))

    @property
    def few_shapes(self) -> list[Shape]:
        """The first combination and the last; few, as many kernels compile for each, with each option."""
        return list(dict.fromkeys((self.shapes[0], self.shapes[-1])))


OF_PATH = {
    **dict.fromkeys(
        ("mla", "sparse_latents"),
        Claims(
            heads=((1, 1), (4, 1), (7, 1), (128, 1), (16, 1)),
            head_sizes=((96, 64), (160, 128), (576, 512), (100, 72), (120, 88), (80, 64)),
            block_sizes=(16, 1, 8, 3, 48, 32, 64),
        ),
    ),
    **dict.fromkeys(
        ("packed_latents", "packed_mla"),
        Claims(
            heads=((1, 1), (4, 1), (7, 1), (128, 1), (16, 1)),
            head_sizes=((264, 256), (140, 128), (398, 384), (576, 512)),
            block_sizes=(16, 1, 3, 48, 32, 64),
        ),
    ),
    "differential": Claims(
        heads=((2, 2), (4, 2), (12, 4), (20, 4), (16, 2), (8, 4)),
        head_sizes=((64, 64), (80, 80), (72, 72), (100, 100), (256, 256), (128, 128)),
    ),
    "quantized": Claims(dtypes=(torch.float32, torch.bfloat16)),
    "select": Claims(dtypes=(torch.float32,), heads=((1, 1),), head_sizes=((64, 64),), block_sizes=(16,)),
    "recurrent": Claims(  # heads: of values first
        heads=((1, 1), (3, 3), (6, 2), (8, 1), (8, 2), (20, 4), (32, 2), (4, 2)),
        head_sizes=((64, 64), (256, 256), (72, 40), (128, 64)),
        block_sizes=(16,),
    ),
}  # default claims


def claims(**limits: Any) -> Callable[[Callable], Callable]:
    """Declare claims of a kernel that differ from the defaults of its path: `@claims(block_sizes=(256,))`."""

    def decorate(function: Callable) -> Callable:
        function.__claims__ = limits  # type: ignore[attr-defined]
        return function

    return decorate


TWINS = ("refattn", "fastattn")  # packages whose functions claim the conventions


class BadKernelError(Exception):
    """A function that the kit cannot call, with the reason."""


class NoMemoryError(Exception):
    """The kit has no memory for a batch, which is no fault of the kernel."""


def named_parameters(function: Callable[..., Any], name: str, words: Sequence[str]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a kernel by name.

    Raises:
        BadKernelError: if it names none.
    """
    try:
        return parameters_of(function)
    except ValueError as error:
        raise BadKernelError(
            f"{name} {error}\nArguments are passed by name: {', '.join(words)}.\n"
            "A function of a few lines with these names can call yours in any other way."
        ) from error


def notes_on(kernel: Any) -> tuple[str, ...]:
    """Return a sentence for each optional parameter that a path has no argument for, which keeps its default."""
    unknown, known = unknown_words(kernel.parameters, kernel.words()), NOT_DRAWN.get(kernel.path, {})
    return tuple(
        f"the parameter {name} is not drawn: {known[name]}"
        if name in known
        else f"the parameter {name} is none of this path's{hint}"
        for name, hint in unknown.items()
    )


def as_arguments(values: Mapping[str, Any], shown: Collection[str]) -> str:
    """Return the numbers among the arguments of a call as code, except those that are shown elsewhere."""
    numbers = {name: x for name, x in values.items() if isinstance(x, int | float | str) and name not in shown}
    return ", ".join(f"{name}={x!r}" for name, x in numbers.items())


@dataclass
class Kernel:
    """A function that computes a path, and how the kit calls it.

    Attributes:
        name: for the report, and for `twinattn prove`.
        path: which path it computes.
        function: is called with the arguments that its parameters name.
        plan: the plan of the same package, for functions that take `plan`; that of the reference if None.
        without_lse: whether its log-sum-exp is ignored, because it is known to be wrong, or not claimed.
        limits: claims that replace those of the function.
        calls: the calls of the current example, each with its outputs, for the search for a mistake.
    """

    name: str
    path: str
    function: Callable[..., Any]
    plan: Callable[..., Any] | None = None
    without_lse: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    calls: list[tuple[Arguments, Answers]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Check that the path is known, and that it has an argument for every required parameter."""
        if self.path not in PATHS:
            raise BadKernelError(f"path: expected one of {', '.join(PATHS)}, got {self.path!r}")
        words = self.words()
        self.parameters = named_parameters(self.function, self.name, words)
        if wrong := wrong_names(self.name, self.path, self.parameters, words):
            raise BadKernelError(wrong)
        limits = getattr(self.function, "__claims__", {})
        is_step = PATHS[self.path].attends or PATHS[self.path].in_place
        if is_step and not QUERY_LENS & set(self.parameters):
            limits = {"max_query_len": 1} | limits  # without query lengths this is a decode
        if "plan" in self.parameters:
            limits = {"layers": ("gdn", "kda")} | limits  # it has the path's own signature
        if str(getattr(self.function, "__module__", "")).partition(".")[0] in TWINS:
            limits = {"conventions": True} | limits
        self.claims = Claims(
            **{**{f.name: getattr(self.usual, f.name) for f in fields(Claims)}, **limits, **self.limits}
        )

    @property
    def usual(self) -> Claims:
        """The default claims of its path."""
        return OF_PATH.get(self.path, Claims())

    def words(self) -> list[str]:
        """List the names that a parameter may have."""
        path = PATHS[self.path]
        if not path.attends and not path.in_place and not path.differentiates:
            return [*path.words, "block_size"] if path.function == "write" else [*path.words]
        of_batch = [word for word in OF_BATCH if path.pools or word != "block_table"]
        words = [*path.words, "batch", *of_batch, *path.planned, *path.options, "plan", "options", "out"]
        words += [] if path.in_place else ["return_lse"]
        extra = {"varlen": ["cu_seqlens_k"], "cascade": ["common_prefix_len"], "sparse": ["slots"]}
        extra["sparse_latents"] = extra["packed_latents"] = ["slots", "cache_scale"]
        extra["mla"] = extra["packed_mla"] = ["cache_scale", "query_scale"]
        extra["varlen_backward"] = ["cu_seqlens_k", "lse", "deterministic"]
        return [*words, *extra.get(self.path, ()), *(["block_size"] if path.pools else [])]

    def takes(self, option: str) -> bool:
        """Return whether the kernel takes an argument: an option, `window_size`, `return_lse`, `out`."""
        path = PATHS[self.path]
        by_plan = option in path.planned and "plan" in self.parameters
        by_options = option in path.options and "options" in self.parameters
        return (option in self.parameters and option in self.words()) or by_plan or by_options

    def as_claimed(self, example: Example) -> Example:
        """Return a batch without a causal mask, if the kernel claims none."""
        if self.claims.causal or "causal" not in PATHS[self.path].planned or "causal" in example.options:
            return example
        return replace(example, options={**example.options, "causal": False})

    def lacking(self, example: Example) -> str:
        """Return the parameters that it does not have and whose default matters, each with what it is held to."""
        known = dict(softmax_scale=f"{example.head_size} ** -0.5", causal="True", delta="True")
        words = [name for name in known if name in self.words() and not self.takes(name)]
        if self.claims.max_query_len == 1 and "causal" in words:
            words.remove("causal")  # the only query is at the last key
        return ", ".join(f"{name} ({known[name]} is expected)" for name in words if name not in example.options)

    @property
    def knows_query_lens(self) -> bool:
        """Whether a parameter implies the query lengths; otherwise each sequence has one query, as in a decode."""
        return bool(QUERY_LENS & set(self.parameters))

    @property
    def knows_beginnings(self) -> bool:
        """Whether a parameter implies which sequences are new; otherwise each has a state, as in a decode."""
        return bool(BEGINNINGS & set(self.parameters))

    def __call__(self, example: Example, arguments: Arguments, **more: Any) -> Answers:
        """Call the function with the arguments that it names, and return its outputs by name.

        Args:
            example: the batch.
            arguments: of the path.
            more: `out`, `return_lse`; for gradients `wanted`, the inputs to differentiate with respect to.
        """
        path = PATHS[self.path]
        if path.differentiates:
            answers = self._differentiated(example, arguments, **more)
            self.calls.append((arguments, answers))
            return answers
        given = arguments  # as they were before the call
        if path.function == "write":
            pools = {name: preserving_clone(arguments[name]) for name in ("key_cache", "value_cache")}
            arguments = {**arguments, **pools}
        states = {name: preserving_clone(arguments[name]) for name in path.in_place}
        arguments = {**arguments, **states}
        with filled_memory():
            came = self.function(**self.asked(example, {**arguments, **more}))
            synchronize(arguments)
        answers = pools if path.function == "write" else {**self.named(came), **states}
        if "out" in more:  # the kernel has written it, and the reference would, too
            kept = {name: preserving_clone(x) for name, x in answers.items()}
            self.calls.append((given | {"out": preserving_clone(more["out"])}, kept))
        else:
            self.calls.append((given, answers))
        return answers

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients itself; others are differentiated by autograd."""
        return "grad_out" in self.parameters

    def _differentiated(self, example: Example, arguments: Arguments, wanted: tuple[str, ...] = ()) -> Answers:
        """Return the gradients of a kernel by name: those of autograd, or its own if it is a backward."""
        arguments = {**arguments, "return_lse": "grad_lse" in arguments}
        with filled_memory():
            if self.is_backward:
                if "grad_lse" in arguments and "grad_lse" not in self.parameters:
                    raise gradients.NoGradientError("has no parameter grad_lse")
                out, lse = gradients.forward({name: x for name, x in arguments.items() if name != "return_lse"})
                came = self.function(**self.asked(example, {**arguments, "out": out, "lse": lse}))
                answers = self._gradients(came)
            else:
                answers = gradients.differentiate(
                    lambda given: self.function(**self.asked(example, given)), arguments, wanted
                )
            synchronize(arguments)
        return answers

    def _gradients(self, came: Any) -> Answers:
        """Return the gradients of a backward by name."""
        if isinstance(came, tuple | list) and len(came) in (3, 4) and all(isinstance(x, Tensor) for x in came):
            return dict(zip(gradients.OF.values(), came, strict=False))
        raise TypeError(f"expected (dq, dk, dv), or (dq, dk, dv, dsinks), got {type(came).__name__}")

    def named(self, came: Any) -> Answers:
        """Return the outputs of the function by name."""
        if isinstance(came, Tensor):
            return {"out": came}
        if isinstance(came, tuple | list) and len(came) >= 2 and all(isinstance(x, Tensor) for x in came[:2]):
            return {"out": came[0]} if self.without_lse else {"out": came[0], "lse": came[1]}
        if came is None and "out" in self.parameters:
            raise TypeError("expected the output, got None: return the memory that came as out=")
        raise TypeError(f"expected an output, or an output and its log-sum-exp, got {type(came).__name__}")

    def asked(self, example: Example, arguments: Arguments) -> Arguments:
        """Return an argument for each parameter, made from those of the path; missing options are neutral."""
        path, words, asked = PATHS[self.path], self.words(), dict[str, Any]()
        for name, parameter in self.parameters.items():
            if name in arguments:
                asked[name] = arguments[name]
            elif name == "return_lse":
                asked[name] = True
            elif name == "plan":
                asked[name] = self._plan(example, arguments)
            elif name == "options":
                make = RecurrentOptions if path.in_place else AttentionOptions
                asked[name] = make(**{x: arguments[x] for x in path.options if x in arguments})
            elif name == "slots":
                at = arguments["positions"], example.block_size
                asked[name] = PATHS["sparse"].module.slots(arguments["batch"], at[0], block_size=at[1])
            elif name == "block_size":
                asked[name] = example.block_size
            elif name == "cu_seqlens_k" or (name in OF_BATCH and "batch" in arguments):
                asked[name] = getattr(arguments["batch"], name)
            elif name == "common_prefix_len":
                everybody = (0, arguments["batch"].num_seqs)
                ends = [end for first, last, end in arguments.get("prefixes", ()) if (first, last) == everybody]
                asked[name] = max(ends, default=0)
            elif name in NEUTRAL and name in words and (parameter.default is not None or name == "causal"):
                asked[name] = NEUTRAL[
                    name
                ]  # passed explicitly, as the defaults of kernels differ; a default of None is neutral, too
            elif name == "softmax_scale" and parameter.default is not None:
                asked[name] = example.head_size**-0.5
        return asked

    def _plan(self, example: Example, arguments: Arguments) -> Any:
        make = self.plan or PATHS[self.path].module.plan
        takes = inspect.signature(make).parameters
        planned = {name: arguments[name] for name in takes if name in arguments and name != "batch"}
        if "block_size" in takes and not PATHS[self.path].in_place:
            planned["block_size"] = example.block_size
        return make(arguments["batch"], **planned)


def device_of(arguments: Arguments) -> torch.device:
    """Return the device of a call; a merge has its tensors in lists."""
    firsts = (x[0] if isinstance(x, list) and x else x for x in arguments.values())
    return next(x.device for x in firsts if isinstance(x, Tensor))


def synchronize(arguments: Arguments) -> None:
    """Wait for the device of a call, so that an asynchronous error is raised in this call."""
    device, accelerator = device_of(arguments), torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        torch.accelerator.synchronize(device)


def check_device(device: str) -> None:
    """Check that a device is available and computes.

    Raises:
        BadKernelError: if not, with the available devices.
    """
    if device == "cpu":
        return
    try:
        torch.ones(2, device=device).sum().item()
    except Exception as error:  # a backend may raise anything
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if accelerator is not None else 0
        there = ["cpu", *(f"{accelerator.type}:{i}" if i else accelerator.type for i in range(count) if accelerator)]
        says = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise BadKernelError(
            f"device: expected one that computes here ({', '.join(there)}), got {device!r}: {says}"
        ) from error


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill the memory of `torch.empty` with NaN, so that elements that a kernel does not write are NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import Inductor, for seconds
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def preserving_clone(x: Tensor) -> Tensor:
    """Clone a tensor with its strides, also where it has gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    if span > LARGE:  # most of this memory is never written
        return untouched(span, x.dtype, str(x.device)).as_strided(x.shape, x.stride()).copy_(x)
    memory = x.as_strided((span,), (1,)).clone()
    return memory.as_strided(x.shape, x.stride())


def untouched(elements: int, dtype: torch.dtype, device: str) -> Tensor:
    """Allocate memory without writing it: on a CPU the pages that are never written take no RAM.

    Raises:
        NoMemoryError: if the machine has no room for it.
    """
    size = elements * dtype.itemsize
    try:
        if device != "cpu":
            return torch.zeros(elements, dtype=dtype, device=device)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
    except (OSError, torch.OutOfMemoryError) as error:
        raise NoMemoryError(f"not drawn: this machine has no {size / 1e9:.0f} GB for a pool") from error


def find(target: str | Callable[..., Any] | ModuleType, path: str | None = None) -> Kernel:
    """Find a kernel: a function, a module of a path, or a name, `package.module:function` or `package.module`.

    Args:
        target: the function or module, or its name.
        path: which path it computes; may be left out for a module that has a path's name.

    Raises:
        BadKernelError: if there is none, or it cannot be called; it says why.
    """
    name, found = resolve(target)
    if isinstance(found, ModuleType):
        path = path or found.__name__.rpartition(".")[2]
        if path not in PATHS:
            raise BadKernelError(f"{name}: {_which_path()}")
        function_name = PATHS[path].function
        if not hasattr(found, function_name):
            raise BadKernelError(f"{name} has no function {function_name!r}")
        return Kernel(name, path, getattr(found, function_name), getattr(found, "plan", None))
    if path is None:
        raise BadKernelError(f"{name}: {_which_path()}")
    return Kernel(name, path, found)


def _which_path() -> str:
    """Return the message that asks for a path, and lists them all."""
    from twinattn.kit.operations import OPERATIONS  # its kernels import this file

    listed = f"one of {', '.join(PATHS)}; or, beside attention, {', '.join(OPERATIONS)}"
    usual = "varlen for attention over rows, chunked_prefill over pages, decodes included"
    return f"say which path it computes, with --path: {usual}; {listed}"


def resolve(target: str | Callable[..., Any] | ModuleType) -> tuple[str, Any]:
    """Return the name of a target, `package.module:function` or `file.py:function`, and its function or module.

    Raises:
        BadKernelError: if there is none, or it is neither.
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if not isinstance(target, str) and not isinstance(target, ModuleType):
        name = f"{target.__module__}:{getattr(target, '__qualname__', name)}"
    if isinstance(target, str):
        of_file = re.fullmatch(r"(.+\.py)(?::([\w.]+))?", target)
        module_name, _, function = target.partition(":")
        if of_file:
            module_name, function = of_file[1], of_file[2] or ""
        try:
            target = _module_of(Path(module_name)) if of_file else importlib.import_module(module_name)
        except (ImportError, FileNotFoundError) as error:
            raise BadKernelError(f"{module_name} cannot be imported: {error}") from error
        for part in filter(None, function.split(".")):
            if not hasattr(target, part):
                raise BadKernelError(f"{module_name} has no {function}")
            target = getattr(target, part)
    if not isinstance(target, ModuleType) and not callable(target):
        raise BadKernelError(f"{name}: expected a function, got {type(target).__name__}")
    return name, target


def _module_of(file: Path) -> ModuleType:
    """Import a file; it can import files beside it, as when Python runs it."""
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    folder, name = str(file.resolve().parent), file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(file.resolve()):
        raise ImportError(f"there is another module {name} already; rename the file")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
