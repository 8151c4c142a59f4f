"""Call a kernel, and compare what it returns with the reference, within the one tolerance."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from refattn.keys import read_packed
from twinattn.kit import gradients
from twinattn.kit.bits import bits_of
from twinattn.kit.example import PACKED, PATHS, Answers, Arguments, Example
from twinattn.kit.kernel import Kernel, NoMemoryError, device_of
from twinattn.kit.property import Broken, CrashedError, RefusedError
from twinattn.kit.reference import expected
from twinattn.kit.tolerance import FLOAT32_ROUNDINGS, assert_close, on_cpu

MOST_COMPARED = 2**22  # elements: larger inputs are not compared with their values before the call
LOUD = 100.0  # factor on the queries, at which exp(score) overflows


def ask(kernel: Kernel, example: Example, arguments: Arguments, **more: Any) -> Answers:
    """Call the kernel, and return its outputs, after a check that inputs are unchanged and shapes are right.

    Raises:
        RefusedError: if the kernel does not compute this.
        CrashedError: if its device no longer works.
        Broken: if it raises anything else, changes an input, or returns another shape.
    """
    before = {name: (x, _bits(x)) for name, x in inputs_of(example, arguments, more) if x.numel() <= MOST_COMPARED}
    with raised(kernel, arguments):
        answers = kernel(example, arguments, **more)
    for name, (x, bits) in before.items():
        if not torch.equal(_bits(x), bits):
            at = int((_bits(x) != bits).nonzero()[0]) // x.itemsize
            where = [int(i) for i in torch.unravel_index(torch.tensor(at), x.shape)] if x.ndim else []
            raise Broken(f"{name}: changed at {where}: a call may change nothing but its output")
    check_shape(example, arguments, answers)
    return answers


@contextmanager
def raised(kernel: Kernel, arguments: Arguments) -> Iterator[None]:
    """Translate what a kernel raises.

    Raises:
        RefusedError: for NotImplementedError, and for errors that the kernel claims as refusals.
        CrashedError: if its device no longer works.
        Broken: for any other error.
    """
    try:
        yield
    except NoMemoryError:
        raise
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except (Exception, SystemExit) as error:  # another author's kernel may raise anything
        says = (str(error).strip().splitlines() or [""])[0]
        if any(text in str(error) for text in kernel.claims.refusals):
            raise RefusedError(says) from error
        if not _answers_still(arguments):
            raise CrashedError(f"{type(error).__name__}: {says}") from error
        raise Broken(f"raised {type(error).__name__}: {says}") from error


def inputs_of(example: Example, arguments: Arguments, more: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each input that a call may not change: all but those that it writes."""
    path, memory = PATHS[example.path], more.get("out")
    written = path.in_place or (() if path.attends else tuple(name for name, _ in path.pools))
    for name, x in named_tensors({name: x for name, x in arguments.items() if name not in written}):
        if memory is None or x.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            yield name, x


def named_tensors(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor in an argument, and the tensor."""
    if isinstance(x, Tensor):
        yield name, x
    elif is_dataclass(x) and not isinstance(x, type):
        yield from named_tensors({of.name: vars(x)[of.name] for of in fields(x) if of.name in vars(x)}, name)
    elif isinstance(x, dict):
        for word, y in x.items():
            yield from named_tensors(y, word if name in ("", "batch") else f"{name}.{word}")
    elif isinstance(x, list | tuple):
        for i, y in enumerate(x):
            yield from named_tensors(y, f"{name}[{i}]")


def _bits(x: Tensor) -> Tensor:
    """Return a copy of the bytes of a tensor: there NaN is equal to itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def check_shape(example: Example, arguments: Arguments, answers: Answers) -> None:
    """Check that an output has a row for each query, a head for each of its heads, and the size of a value.

    Raises:
        Broken: naming the shape that is expected.
    """
    path = PATHS[example.path]
    if path.attends:
        expected_shape = (*arguments["query"].shape[:2], example.output_size)
    elif path.in_place or "outs" in arguments:
        expected_shape = (arguments["value"] if path.in_place else arguments["outs"][0]).shape
    else:
        return
    if answers["out"].shape != torch.Size(expected_shape):
        words = "tokens, heads, elements of a value"
        raise Broken(f"out: shape {list(answers['out'].shape)}, expected {list(expected_shape)}: {words}")


def _answers_still(arguments: Arguments) -> bool:
    """Return whether the device still computes: after some CUDA errors no later call of the process works."""
    try:
        return float(torch.ones(2, device=device_of(arguments)).sum()) == 2.0
    except Exception:  # noqa: BLE001  any error means that the device does not work
        return False


def hold(
    example: Example, arguments: Arguments, answers: Answers, *, only: Iterable[str] = (), is_loud: bool = False
) -> None:
    """Compare the outputs of a kernel with the reference, within the one tolerance; those of a write bit for bit.

    With scores in the hundreds (`is_loud`), the error of a weight grows by the rounding of its score. In float32, a
    score of more than 256 products, as over latents, has more roundings than the tolerance counts.

    Raises:
        Broken: naming the output that is off.
    """
    wide, low = expected(example, arguments)
    more_roundings = max(1.0, example.head_size**0.5 / FLOAT32_ROUNDINGS)
    if example.path == "select":
        return hold_selection(arguments, answers["out"].detach().cpu(), wide["out"])
    if PATHS[example.path].differentiates:
        return hold_gradients(example, arguments, answers, is_loud=is_loud)
    for name in wide:
        if name not in answers or (only and name not in only):
            continue
        came = answers[name].detach().cpu()
        want = wide[name]
        if name == "lse":
            if came.shape != want.shape:
                raise Broken(f"lse: shape {list(came.shape)}, expected {list(want.shape)}: one per query row and head")
            if came.dtype not in (torch.float32, torch.float64):
                raise Broken(f"lse: expected float32, got {str(came.dtype).removeprefix('torch.')}")
            came = came.float()  # one in float64 is no more exact: its scores were rounded
        if example.path == "kv_cache":
            different = (bits_of(came) != bits_of(want)).flatten(2).any(-1).nonzero()
            if len(different):
                block, row = different[0].tolist()
                raise Broken(f"{name}: {len(different)} slots differ; the first is row {row} of block {block}")
            continue
        if name == "out" and came.dtype != low[name].dtype:
            raise Broken(f"out: {str(came.dtype).removeprefix('torch.')}, expected the type of the query")
        try:
            score = more_roundings if came.dtype == torch.float32 else 1.0
            if is_loud and want.numel():
                score = max(score, float(wide["lse"].abs().nan_to_num(0.0, posinf=0.0).max()))
            if name == "lse":
                hold_lse(example, arguments, came, want, low[name])
            else:
                assert_close(came, want, low[name], name=name, largest_score=score if name == "out" else 1.0)
        except AssertionError as error:
            raise Broken(str(error)) from None


def hold_lse(example: Example, arguments: Arguments, came: Tensor, want: Tensor, low: Tensor) -> None:
    """Compare a log-sum-exp within the tolerance; over packed latents also with that of latents rounded to 16 bits.

    A dequantized value has more than 16 bits. The reference formula in 16 bits rounds it, and the products, too, and
    for a query that sees one key the second error may cancel the first.
    """
    rounded = score_size(example, arguments)
    try:
        assert_close(came, want, low, name="lse", rounded=rounded)
    except AssertionError:
        if example.path not in PACKED or arguments["query"].dtype == torch.float32:
            raise
        query, rank = arguments["query"], arguments["latent_rank"]
        latents = read_packed(arguments["cache"], rank, example.head_size - rank, query.dtype).to(query.dtype)
        of_rounded, _ = expected(example, arguments | dict(cache=latents))
        assert_close(came, of_rounded["lse"], low, name="lse", rounded=rounded)


def score_size(example: Example, arguments: Arguments) -> float:
    """Return a bound on the scores: the error of a log-sum-exp scales with them, even where it is near 0 itself.

    No product of a query with a key is larger than that of their norms. Some kernels round dequantized keys to 16 bits,
    which counts as so many roundings of float32.
    """
    if "lses" in arguments:
        finite = [x.nan_to_num(0.0, 0.0, 0.0).abs().max() for x in arguments["lses"] if x.numel()]
        return float(max(finite, default=0.0))
    arguments = on_cpu({name: x for name, x in arguments.items() if name != "batch"})
    query, size, factor = arguments["query"][: example.num_tokens], example.head_size, 1.0
    if example.path in PACKED:
        rank = arguments["latent_rank"]
        keys = read_packed(arguments["cache"], rank, size - rank, torch.float32)
    elif example.path == "differential":
        keys = arguments["cache"][:, 0]
    else:
        keys = next(arguments[name] for name in ("key", "key_cache", "cache") if name in arguments)[..., :size]
    if "cache_scale" in arguments:
        factor = arguments["cache_scale"]
    if "scales" in arguments:
        scale = arguments["scales"].key
        factor = float(scale.max()) if isinstance(scale, Tensor) else scale
        kind = arguments["scales"].format
        keys = keys.view(kind) if keys.dtype == torch.uint8 else keys
    if ("scales" in arguments or "cache_scale" in arguments) and query.dtype != torch.float32:
        factor *= torch.finfo(query.dtype).eps / torch.finfo(torch.float32).eps / FLOAT32_ROUNDINGS / size**0.5
    if not query.numel() or not keys.numel():
        return 0.0
    longest = [float(x.float().norm(dim=-1).nan_to_num(0.0, 0.0, 0.0).max()) for x in (query, keys)]
    scale = arguments.get("softmax_scale")
    score = abs(size**-0.5 if scale is None else scale) * longest[0] * longest[1] * factor
    return max(score, float(arguments["sinks"].abs().max()) if arguments.get("sinks") is not None else 0.0)


def hold_gradients(example: Example, arguments: Arguments, answers: Answers, *, is_loud: bool = False) -> None:
    """Compare gradients with those of the reference; each has the type of its input."""
    wide, low = expected(example, arguments)
    arguments = on_cpu(arguments)
    sizes, dtype = gradients.sizes(example, arguments), arguments["query"].dtype
    score = LOUD * example.head_size**0.5 if is_loud else 1.0
    for of, name in gradients.OF.items():
        if name not in answers or name not in wide:
            continue
        came = answers[name].detach().cpu()
        if came.dtype != arguments[of].dtype:
            raise Broken(f"{name}: {str(came.dtype).removeprefix('torch.')}, expected the type of what it is of")
        limits = came, wide[name], low[name], sizes[name], dtype
        try:
            try:
                gradients.assert_close(name, *limits, largest_score=score)
            except AssertionError:
                if dtype != torch.float32:
                    raise
                gradients.assert_close(name, *limits, largest_score=score + weight_roundings(example, arguments))
        except AssertionError as error:
            raise Broken(str(error)) from None


def weight_roundings(example: Example, arguments: Arguments) -> float:
    """Return the roundings that the weights of a backward have from the LSE, in units of `FLOAT32_ROUNDINGS`.

    Such a weight is `exp(score - lse)`: the absolute rounding errors of both are relative errors of the weight, which
    no sum of weights cancels, as that of a softmax does. An LSE has a rounding of its own size. A score is a sum in
    which roundings walk at random, and has one of the size of the norms of its query and key.
    """
    _, lse = gradients.forward(arguments)
    largest = float(lse.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if lse.numel() else 0.0
    return (largest + score_size(example, arguments)) / FLOAT32_ROUNDINGS


def hold_selection(arguments: Arguments, came: Tensor, want: Tensor) -> None:
    """Compare selected positions, in any order, with the rule: the highest scores, and among equal ones the first."""
    if came.shape != want.shape or came.is_floating_point():
        raise Broken(f"out: expected integers {list(want.shape)}, got {came.dtype} {list(came.shape)}")
    scores = arguments["scores"].cpu()
    for row, (ours, right) in enumerate(zip(came.tolist(), want.tolist(), strict=True)):
        got, should = [x for x in ours if x >= 0], [x for x in right if x >= 0]
        if sorted(got) == should and min(ours, default=-1) >= -1:
            continue
        where = f"row {row}: got positions {sorted(got)}, expected {should}"
        if len(set(got)) < len(got):
            raise Broken(f"{where}: a position is there twice")
        if max(got, default=-1) >= scores.shape[1] or any(scores[row, x] == -torch.inf for x in got):
            raise Broken(f"{where}: a position is selected that has no key")
        if len(got) != len(should):
            raise Broken(f"{where}: {len(got)} keys instead of {len(should)}; -1 is for what is left")
        same = sorted(scores[row, got].tolist()) == sorted(scores[row, should].tolist())
        raise Broken(f"{where}: {'of equal scores, not the lower positions' if same else 'not the highest scores'}")
