"""Call a kernel, and hold what it returns to the reference, by the one tolerance."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from refattn.keys import read_packed
from twinattn.kit import gradients
from twinattn.kit.bits import bits_of
from twinattn.kit.example import PACKED, PATHS, Answers, Arguments, Example, expected
from twinattn.kit.kernel import Kernel, device_of
from twinattn.kit.property import Broken, CrashedError, RefusedError
from twinattn.kit.tolerance import FLOAT32_ROUNDINGS, assert_close, on_cpu

MOST_COMPARED = 2**22  # elements of a tensor that is looked at after a call
LOUD = 100.0  # factor on the queries, at which exp(score) overflows


def ask(kernel: Kernel, example: Example, arguments: Arguments, **more: Any) -> Answers:
    """Call the kernel, and turn what it raises into what it means; look at what came in, and at what it returns."""
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
    """Turn what a kernel raises into what it means.

    Raises:
        RefusedError: if it says that it does not compute this.
        CrashedError: if its device does not answer any more.
        Broken: if it is something else.
    """
    try:
        yield
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except (Exception, SystemExit) as error:  # a stranger's kernel raises what it likes
        says = (str(error).strip().splitlines() or [""])[0]
        if any(text in str(error) for text in kernel.claims.refusals):
            raise RefusedError(says) from error
        if not _answers_still(arguments):
            raise CrashedError(f"{type(error).__name__}: {says}") from error
        raise Broken(f"raised {type(error).__name__}: {says}") from error


def inputs_of(example: Example, arguments: Arguments, more: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a call may not change, each with its name: all but those that it is to write."""
    path, memory = PATHS[example.path], more.get("out")
    written = path.in_place or (() if path.attends else tuple(name for name, _ in path.pools))
    for name, x in named_tensors({name: x for name, x in arguments.items() if name not in written}):
        if memory is None or x.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            yield name, x


def named_tensors(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in what a call gets, each with its name."""
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
    """Copy the bytes of a tensor, in which NaN is equal to itself."""
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
    """Return whether the device of a call still computes: some errors of CUDA spoil a process, others only a call."""
    try:
        return float(torch.ones(2, device=device_of(arguments)).sum()) == 2.0
    except Exception:  # noqa: BLE001  whatever it is, the device did not answer
        return False


def hold(
    example: Example, arguments: Arguments, answers: Answers, *, only: Iterable[str] = (), is_loud: bool = False
) -> None:
    """Hold the answers of a kernel to those of the reference, by the one tolerance; a write to the bit.

    A query whose scores are in the hundreds has an LSE of that size, and each weight is off by the rounding of a score.
    In float32 a score of more than 256 products, as over latents, has more roundings than the tolerance counts.
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
            came = came.float()  # in float64 it is no more exact: the numbers that it is of were rounded
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
    """Hold a log-sum-exp to the tolerance; over packed latents, from them or from latents rounded as the queries are.

    A quantized value times its scale has more bits than 16. So has the reference formula rounded it, but then the
    products, too, and where a query sees one key the second error may undo the first.
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
    """Return how large a score can be: what is rounded on the way to a log-sum-exp, which may itself be near 0.

    No product of a query with a key is larger than that of their lengths. Quantized values of keys are rounded to 16
    bits by some
    kernels: that is counted as so many roundings of float32.
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
    if "scales" in arguments:
        scale = arguments["scales"].key
        factor = float(scale.max()) if isinstance(scale, Tensor) else scale
        kind = arguments["scales"].format
        keys = keys.view(kind) if keys.dtype == torch.uint8 else keys
        if query.dtype != torch.float32:
            factor *= torch.finfo(query.dtype).eps / torch.finfo(torch.float32).eps / FLOAT32_ROUNDINGS / size**0.5
    if not query.numel() or not keys.numel():
        return 0.0
    longest = [float(x.float().norm(dim=-1).nan_to_num(0.0, 0.0, 0.0).max()) for x in (query, keys)]
    scale = arguments.get("softmax_scale")
    score = abs(size**-0.5 if scale is None else scale) * longest[0] * longest[1] * factor
    return max(score, float(arguments["sinks"].abs().max()) if arguments.get("sinks") is not None else 0.0)


def hold_gradients(example: Example, arguments: Arguments, answers: Answers, *, is_loud: bool = False) -> None:
    """Hold gradients to those of the reference, each in the type of what it is of."""
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
                gradients.assert_close(name, *limits, largest_score=score + lse_roundings(arguments))
        except AssertionError as error:
            raise Broken(str(error)) from None


def lse_roundings(arguments: Arguments) -> float:
    """Return how many roundings of a weight come from its log-sum-exp, as a part of those that are allowed anyway.

    A weight of a backward is `exp(score - lse)`. An LSE of float32 is off by a rounding of its own size, and the weight
    by as much of itself.
    """
    _, lse = gradients.forward(arguments)
    return float(lse.abs().nan_to_num(0.0, 0.0, 0.0).amax()) / FLOAT32_ROUNDINGS if lse.numel() else 0.0


def hold_selection(arguments: Arguments, came: Tensor, want: Tensor) -> None:
    """Hold selected positions to those of the rule, in any order: the best scores, of equal ones the first."""
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
