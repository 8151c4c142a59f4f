"""Find vacuous tests: run a user's own check against kernels with known mistakes, and list those that it lets pass.

    def check(attention):                            # your test: takes a kernel, and fails if it is wrong
        q, k, v, cu_seqlens = ...
        torch.testing.assert_close(attention(q, k, v, cu_seqlens, cu_seqlens), expected, atol=1e-1, rtol=0)

    print(vacuous(check, "varlen"))                   # the mistakes that it lets pass, each with a batch that shows it

The kernels have the mistakes by which the kit names a failure (`mistakes`). They compute in float64, and round once.
Those of `varlen_backward` have right outputs, and gradients with a mistake.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.kit import gradients, landmarks, mistakes
from twinattn.kit.example import PATHS, Answers, Arguments, Example, poison
from twinattn.kit.kernel import BadKernelError, Kernel
from twinattn.kit.tolerance import on_cpu

ORDER = ("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table")  # positional arguments after the tensors
PLANTED = ("varlen", "varlen_backward", "chunked_prefill", "sliding_window", "local", "quantized")  # paths
CANNOT_BE_MADE = (IndexError, RuntimeError, ValueError, KeyError, TypeError, AssertionError)
ALONE: Arguments = {"softmax_scale": 0.3, "softcap": 2.0, "alibi_slopes": True, "sinks": True}
OPTIONS: tuple[Arguments, ...] = (
    {},
    *({name: value} for name, value in ALONE.items()),
    {"causal": False},
    {"window_size": (5, 0)},
    {"window_size": (3, 2), "causal": False},
    {"window_size": (3, 2), "causal": True},
    {"sinks": "large"},
    {"sinks": True, "softcap": 2.0, "alibi_slopes": True, "softmax_scale": 0.3},
    *({name: value, **mask} for name, value in ALONE.items() for mask in ({"window_size": (5, 0)}, {"causal": False})),
)
BATCHES = (
    ((3, 20), (1, 33), (2, 40)),
    ((5, 5), (1, 17), (4, 30)),
    ((5, 2), (0, 0), (2, 0), (3, 30)),
    ((0, 7), (1, 9), (0, 3), (1, 40)),
    ((20, 70), (1, 130)),
    ((131, 131), (1, 600)),
)
LARGE: tuple[landmarks.Lens, ...] = (
    tuple((1, 1 + 7 * i % 37) for i in range(landmarks.PAST_8_BITS)),
    ((1, landmarks.PAST_16_BITS), (1, 20)),
    ((landmarks.PAST_16_BITS, 5), (3, 20)),
)
Check = Callable[[Callable[..., Any]], object]


@dataclass(frozen=True)
class Missed:
    """A mistake that a check lets pass.

    Attributes:
        name: of the mistake.
        says: what is wrong, in a sentence.
        forms: how many of its forms pass (a mistake may have a parameter, such as the size of a tile).
        of: how many forms it has.
        shown_by: a batch on which the kernel with the mistake is wrong.
    """

    name: str
    says: str
    forms: int
    of: int
    shown_by: str


@dataclass(frozen=True)
class Vacuity:
    """The result of running a check against known mistakes.

    Attributes:
        path: the path that the kernels compute.
        caught: names of the mistakes that fail the check in all their forms.
        missed: the mistakes that pass it.
    """

    path: str
    caught: tuple[str, ...] = ()
    missed: tuple[Missed, ...] = field(default=())

    @property
    def title(self) -> str:
        """A sentence with the number of mistakes that pass."""
        return f"{len(self.missed)} of {len(self.caught) + len(self.missed)} mistakes in {self.path} pass this check"

    def __str__(self) -> str:
        lines = [self.title]
        width = max((len(x.name) for x in self.missed), default=0)
        for x in self.missed:
            forms = f" ({x.forms} of {x.of} forms)" if x.of > 1 else ""
            lines += [f"  {x.name:{width}}  {x.says}{forms}", f"  {'':{width}}  shown by {x.shown_by}"]
        return "\n".join(lines)


def vacuous(
    check: Check, path: str, *, like: Callable[..., Any] | None = None, tell: Callable[[str], None] | None = None
) -> Vacuity:
    """Run a check against kernels with known mistakes, each of which it should fail.

    Args:
        check: takes a kernel, and raises or returns False if its outputs are wrong.
        path: the path that the kernel computes, one of `PLANTED`.
        like: your kernel. The kernels with mistakes take its parameters; a mistake in another parameter, such as
            `softcap`, is not counted. If None, they take all arguments of the path by name, and the tensors and
            `ORDER` also by position.
        tell: called with how far it is, before each mistake.

    Returns:
        The mistakes that were caught, and those that were missed.

    Raises:
        ValueError: if the check fails for a right kernel, too; or for an unknown path.
    """
    if path not in PLANTED:
        raise ValueError(f"path: expected one of {', '.join(PLANTED)}, got {path!r}")
    kernel = Kernel("like", path, like or _of_all_words(path))
    right = mistakes.without_mistake(path)
    try:
        passes = _passes(check, _planted(kernel, right))
    except Exception as error:
        raise ValueError(f"check: it fails for a right kernel, too: {type(error).__name__}: {error}") from error
    if not passes:
        raise ValueError("check: it returns False for a right kernel, too")
    batches = [(*batch, right.answers(*batch)) for batch in _batches(kernel)]
    forms: dict[str, list[tuple[mistakes.Mistake, str]]] = {}  # per name: the mistakes that pass, and the others as ""
    invisible: set[str] = set()  # names of mistakes in parameters or outputs that such a kernel does not have
    known_mistakes = list(mistakes.of_path(path))
    for i, mistake in enumerate(known_mistakes):
        if tell is not None:
            tell(f"{i} of {len(known_mistakes)} kernels with a mistake; now {mistake.name}")
        if mistake.is_of_forward or mistake.name in invisible:  # a test of outputs finds mistakes of the forward
            continue
        passed = False
        with suppress(Exception):  # a failing check may raise anything
            passed = _passes(check, _planted(kernel, mistake))
        known = forms.get(mistake.name, [(mistake, "")])[-1][1]  # a batch that shows another form of it
        ordered = sorted(batches, key=lambda batch: repr(batch[0]) != known) if known else batches
        shown_by = _shown_by(mistake, ordered, kernel) if passed else ""
        if shown_by or not passed:
            forms.setdefault(mistake.name, []).append((mistake, shown_by))
        elif mistake.name not in forms:  # the first form of a mistake shows on most batches
            invisible.add(mistake.name)
    missed = []
    for name, tried in forms.items():
        through = [(mistake, shown_by) for mistake, shown_by in tried if shown_by]
        if through:
            mistake, shown_by = through[0]
            missed.append(Missed(name, mistake.says, len(through), len(tried), shown_by))
    names = {x.name for x in missed}
    return Vacuity(path, tuple(name for name in forms if name not in names), tuple(missed))


def _passes(check: Check, kernel: Callable[..., Any]) -> bool:
    return check(kernel) is not False


def _shown_by(mistake: mistakes.Mistake, batches: list[tuple[Example, Arguments, Answers]], kernel: Kernel) -> str:
    """Return the first batch on which a mistake changes an output that the kernel returns; "" if there is none."""
    for example, arguments, right in batches:
        if not mistakes.shows_in(mistake, landmarks.is_large(example)) or not mistake.may_show(example, arguments):
            continue
        with suppress(*CANNOT_BE_MADE):
            given = mistake.answers(example, arguments)
            for name, x in right.items():
                if name == "lse" and not kernel.takes("return_lse"):
                    continue
                if x.shape != given[name].shape or not torch.allclose(given[name].to(x), x, 1e-3, 1e-4, equal_nan=True):
                    return repr(example)
    return ""


def _batches(kernel: Kernel) -> Iterator[tuple[Example, Arguments]]:
    """Yield batches for a kernel: plain ones first, then those with options, and with poison."""
    claims, path = kernel.claims, PATHS[kernel.path]
    shape = claims.heads[-1], claims.head_sizes[0], claims.block_sizes[0]
    taken = [x for x in OPTIONS if all(kernel.takes(name) for name in x if name not in ALONE)]
    options = [{name: value for name, value in x.items() if kernel.takes(name)} for x in taken]
    options += [{"scales_of": of} for of in ("heads", "sequences") if kernel.path == "quantized"]
    if path.differentiates and kernel.takes("return_lse"):
        options += [{"grad_lse": True, **x} for x in options]
    for i, option in enumerate(options):
        for lens in BATCHES[:3] if option else BATCHES:
            example = landmarks.example(kernel, lens, shape, **option)
            if option not in options[:i]:
                yield example, example.tensors(torch.float32)
    example = landmarks.example(kernel, BATCHES[0], shape)
    yield example, example.tensors(torch.bfloat16)
    for option in ({"first_block": 2**16}, {"forked": True}) if path.pools else ():
        example = landmarks.example(kernel, ((1, 33), (1, 40), (1, 33)), shape, **option)
        first = {name: x for name, x in option.items() if name == "first_block"}
        yield example, example.tensors(torch.float32) | first
    for region in ("tail", "blocks", "table", "window", "gaps") if path.pools else ("gaps",):
        option = {"window_size": (5, 0)} if region == "window" else {}
        if all(kernel.takes(name) for name in option):
            example = landmarks.example(kernel, BATCHES[0], shape, **option)
            yield example, poison(example, example.tensors(torch.float32), region)
    for rows in (300, 2):
        example = replace(landmarks.example(kernel, BATCHES[0], shape), padding_rows=rows)
        yield example, poison(example, example.tensors(torch.float32), "padding")
    for changed in (_every_other, _heads_first):
        arguments = example.tensors(torch.float32)
        numbers = [name for name in path.words[:3] if arguments[name].itemsize > 1]  # no quantized values
        yield example, arguments | {name: changed(arguments[name]) for name in numbers}
    arguments = example.tensors(torch.float32)
    yield example, arguments | {path.words[1]: _heads_first(arguments[path.words[1]])}
    for many in () if path.differentiates else LARGE:
        example = landmarks.example(kernel, many, (claims.heads[0], *shape[1:]))  # the fewest heads, of 2**16 keys
        yield example, example.tensors(torch.float32)
    if path.differentiates:
        arguments = example.tensors(torch.float32)
        rows = arguments["grad_out"]
        for view in (_heads_first(rows), rows.mT.contiguous().mT, rows[:, :1].expand_as(rows)):
            yield example, arguments | {"grad_out": view}


def _every_other(x: Tensor) -> Tensor:
    """Return a view with a gap after each element."""
    return torch.stack([x, x + 1], dim=-1)[..., 0]


def _heads_first(x: Tensor) -> Tensor:
    """Return a view with heads outside tokens in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _of_all_words(path: str) -> Callable[..., Any]:
    """Return a function with all arguments of a path as parameters; it is never called."""
    path = "varlen" if path == "varlen_backward" else path  # its gradients come from autograd
    words = Kernel("any", path, lambda: None).words()
    first = [*PATHS[path].words, *(word for word in ORDER if word in words)]
    rest = [word for word in words if word not in (*first, "plan", "options")]
    positional, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

    def any_kernel(**named: Any) -> Any:
        raise NotImplementedError("has a signature only")

    any_kernel.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what `inspect` reads of a function
        [inspect.Parameter(name, positional, default=None) for name in first]
        + [inspect.Parameter(name, by_name, default=None) for name in rest]
    )
    return any_kernel


def _planted(kernel: Kernel, mistake: mistakes.Mistake) -> Callable[..., Any]:
    """Return a kernel with a mistake and the parameters of another kernel."""
    signature = inspect.Signature([*kernel.parameters.values()])

    def planted(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        example, arguments = _read(kernel.path, {name: x for name, x in given.items() if x is not None})
        if PATHS[kernel.path].differentiates:
            out, lse = _with_gradients(example, arguments, mistake)
        else:
            query, found = arguments["query"], _answers(example, arguments, mistake)
            out, lse = found["out"].to(query), found["lse"].to(query.device, torch.float32)
        if given.get("out") is not None:
            out = given["out"].copy_(out)
        return (out, lse) if given.get("return_lse") else out

    return planted


def _answers(example: Example, arguments: Arguments, mistake: mistakes.Mistake) -> Answers:
    """Return the outputs with a mistake, or the right ones where the mistake does not apply."""
    arguments = on_cpu(arguments)
    with suppress(*CANNOT_BE_MADE):
        return mistake.answers(example, arguments)
    return mistakes.without_mistake(example.path).answers(example, arguments)


def _with_gradients(example: Example, arguments: Arguments, mistake: mistakes.Mistake) -> tuple[Tensor, Tensor]:
    """Return the right output and log-sum-exp, with a mistake in their gradients."""
    names = [name for name in gradients.OF if isinstance(arguments.get(name), Tensor)]

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return gradients.forward(arguments | dict(zip(names, tensors, strict=True)))

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> Any:
            detached = {name: arguments[name].detach() for name in names}
            grads = dict(zip(("grad_out", "grad_lse"), given, strict=True))
            found = _answers(example, arguments | detached | grads, mistake)
            return tuple(found[gradients.OF[name]].to(arguments[name]) for name in names)

    answer: tuple[Tensor, Tensor] = Planted.apply(*(arguments[name] for name in names))
    return answer


def _read(path: str, given: Arguments) -> tuple[Example, Arguments]:
    """Turn the arguments of a call into an example and the arguments of its path.

    Raises:
        BadKernelError: if they do not contain the lengths.
    """
    words = PATHS[path]
    batch = given.get("batch") or _batch(given)
    queries, seqs = (x.tolist() for x in (batch.query_lens, batch.seq_lens))
    query, key = (given[name] for name in words.words[:2])
    value = given[words.words[2]]
    sizes = query.shape[-1], 0 if value.shape[-1] == query.shape[-1] else value.shape[-1]
    options = {name: given[name] for name in words.planned if name in given}
    padding = len(query) - sum(queries)
    lens = tuple(zip(queries, seqs, strict=True))
    heads = query.shape[1], key.shape[-2]
    block_size = key.shape[1] if words.pools else 16
    example = Example(path, lens, heads, *sizes, block_size, padding, options=options)
    known = (*words.words, *words.planned, *words.options)
    return example, {name: x for name, x in given.items() if name in known} | {"batch": batch}


def _batch(given: Arguments) -> Batch:
    """Make a batch from the arguments of a call."""
    lengths: dict[str, Tensor] = {name: given[name].detach().cpu() for name in ORDER if name in given}
    seq_lens = lengths.get("seq_lens")
    if seq_lens is None and "cu_seqlens_k" in lengths:
        seq_lens = lengths["cu_seqlens_k"].diff()
    starts = lengths.get("cu_seqlens_q")
    if seq_lens is not None and starts is None:  # a decode
        starts = torch.arange(len(seq_lens) + 1)
    if seq_lens is None and starts is not None:
        seq_lens = starts.diff()  # whole prompts
    if seq_lens is None or starts is None:
        raise BadKernelError("a call has to say its lengths: cu_seqlens_q, and cu_seqlens_k or seq_lens; or batch")
    longest = int(starts.diff().max()) if len(seq_lens) else 0
    table = lengths.get("block_table")
    return Batch(starts.int(), seq_lens.int(), table, longest, int(seq_lens.max()) if len(seq_lens) else 0)


def find_check(where: str) -> Check:
    """Return the function that `file.py::name` or `package.module:name` names.

    Raises:
        BadKernelError: if there is none.
    """
    file, _, name = where.partition("::") if "::" in where else where.partition(":")
    try:
        if "::" in where:
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(file)
    except (ImportError, OSError, AssertionError) as error:
        raise BadKernelError(f"{file} cannot be loaded: {error}") from error
    if not callable(getattr(module, name, None)):
        raise BadKernelError(f"{file} has no function {name!r}")
    found: Check = getattr(module, name)
    return found
