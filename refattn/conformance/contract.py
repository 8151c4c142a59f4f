"""The contract of a kernel, property by property: what it promises, and on which batches that is checked.

A property draws a batch and calls the kernel. It returns nothing, or raises `Broken` with what was seen and expected.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from refattn.conformance import combinations, gradients, landmarks, packed
from refattn.conformance.example import PACKED, PATHS, SELECTED, Answers, Arguments, Example, expected, poison
from refattn.conformance.kernel import LARGE, Kernel, Shape, device_of, untouched
from refattn.conformance.landmarks import Landmarks
from refattn.conformance.readout import one_hot_values
from refattn.conformance.tolerance import FLOAT32_ROUNDINGS, assert_close, on_cpu
from refattn.keys import read_packed

Draw = st.DrawFn
Check = Callable[[Kernel, Example, torch.dtype, str], None]
LOUD = 100.0  # factor on the queries, at which exp(score) overflows
FAR_BLOCK, MOST_ELEMENTS = 2**16, 2**26  # where the blocks of a large pool begin, if it is no larger than this
LSE_OF_ZEROS = 2e-4  # the error of a log-sum-exp where all products are 0, in any type: ATen's is 5e-5
FAR_BOUND = 4096  # keys: an upper bound as of a server, which gives that of the model
LOW = 60.0  # added to keys and taken from queries: all scores are then far below -10,000


class Broken(AssertionError):
    """A property that does not hold: what was seen, and where."""


class RefusedError(Exception):
    """The kernel raised NotImplementedError: it says itself that it does not compute this."""


class NotClaimedError(RefusedError):
    """The kernel returns nothing that this could be asked of."""


class CrashedError(BaseException):
    """The device does not answer any more: nothing else can be tried in this process."""


@dataclass(frozen=True)
class Property:
    """One thing that a kernel promises.

    Attributes:
        name: in a word or two.
        promise: in a sentence.
        draw: draws a batch for a kernel.
        check: calls the kernel on it, and raises `Broken`.
        needs: what the kernel must take, for this to be asked.
        paths: where it is asked; everywhere if empty.
        examples: the most batches that are drawn; as many as are asked for if None.
        cuda: whether it is asked of CUDA only.
        landmarks: batches that are tried after those that are drawn, which are smaller.
        check_landmark: the check of these, if it is another.
        layer: of those that keep a state, the one that it is about.
    """

    name: str
    promise: str
    draw: Callable[[Draw, Kernel], Example]
    check: Check
    needs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    examples: int | None = None
    cuda: bool = False
    landmarks: Landmarks = landmarks.none
    check_landmark: Check | None = None
    layer: str = ""

    @property
    def compares_lse(self) -> bool:
        """Whether it compares the log-sum-exp too, where there is one."""
        return self.check not in OUTPUTS_ALONE

    @property
    def draws_other_lengths(self) -> bool:
        """Whether a sequence has no new token in it, or several, whatever a kernel claims."""
        return self.draw in (without_tokens, of_entries_unused, of_several_chunks) or self.check is cut

    def not_asked(self, kernel: Kernel, device: str) -> str | None:
        """Return why this is not asked of a kernel, or None if it is."""
        if self.name in kernel.claims.not_claimed:
            return kernel.claims.not_claimed[self.name]
        if self.name == "gaps" and "strides" in kernel.claims.not_claimed:  # they are between the rows of a view
            return kernel.claims.not_claimed["strides"]
        for option in self.needs:
            if not kernel.takes(option):
                return f"has no parameter {option}"
        if self.cuda and not device.startswith("cuda"):
            return "is of CUDA"
        is_step = PATHS[kernel.path].attends or bool(PATHS[kernel.path].in_place)
        if self.name == "padding" and is_step and not kernel.knows_query_lens:
            return "has no parameter that says which rows are padding"
        if self.draws_other_lengths and kernel.claims.max_query_len == 1:
            return "every sequence has one token"
        if self.layer and self.layer not in kernel.claims.layers:
            return f"claims layers={kernel.claims.layers}, and not {self.layer!r}"
        return None


# --- batches ---


def draw_example(
    draw: Draw,
    kernel: Kernel,
    lens: Any = None,
    *,
    options: Arguments | None = None,
    shapes: list[Shape] | None = None,
    **more: Any,
) -> Example:
    """Draw a batch that a kernel claims, of a few shapes or of those given, with options that its path must have."""
    claims, path = kernel.claims, kernel.path
    heads, (head_size, value_head_size), block_size = draw(st.sampled_from(shapes or claims.few_shapes))
    options = dict(options or {})
    pairs = list(draw(sequences(kernel) if lens is None else lens))
    if path == "sliding_window" and "window_size" not in options:
        options["window_size"] = (draw(st.integers(0, 20)), 0)
    if path == "local":
        options["chunk_size"] = block_size * draw(st.integers(1, 2))
    if path == "cascade":
        shared = options["shared"] = draw_prefixes(draw, kernel, len(pairs))
        prefixes = ((0, len(pairs), shared),) if isinstance(shared, int) else shared
        deepest = [max([0, *(n for first, last, n in prefixes if first <= i < last)]) for i in range(len(pairs))]
        pairs = [(q, max(q, s) + n * block_size) for n, (q, s) in zip(deepest, pairs, strict=True)]
    if path == "interval" and "seen" not in options:
        options["seen"] = draw(st.sampled_from(("spans", "prefix", "drawn")))
    if path in (*SELECTED, "select") and "topk" not in options:
        options["topk"] = draw(st.sampled_from((8, 1, 16)))
    if path == "merge":
        options["parts"] = draw(st.sampled_from(claims.parts))
    if path == "recurrent":
        if claims.layers[0] != "gdn":
            options.setdefault("layer", claims.layers[0])
        if not kernel.knows_beginnings:
            pairs = [(q, max(s, q + 1)) for q, s in pairs]
    return Example(
        path,
        tuple(pairs),
        heads,
        head_size,
        0 if value_head_size == head_size else value_head_size,
        block_size,
        options=options,
        seed=draw(st.integers(0, 3)),
        **more,
    )


def draw_prefixes(draw: Draw, kernel: Kernel, count: int) -> int | tuple[tuple[int, int, int], ...]:
    """Draw how many blocks all sequences share; of a kernel that takes prefixes those of some, one inside another."""
    if count < 2 or not kernel.takes("prefixes") or draw(st.booleans()):
        return draw(st.integers(0, 2))
    first = draw(st.integers(0, count - 2))
    last = draw(st.integers(first + 2, count))
    blocks = draw(st.integers(1, 2))
    inner = draw(st.integers(first, last - 2))
    nested = ((inner, min(inner + 2, last), blocks + 1),) if draw(st.booleans()) else ()
    return ((first, last, blocks), *nested)


def sequences(kernel: Kernel, *, longest: int = 50, most: int = 3) -> Any:
    """Return a strategy for lengths: decodes, whole prompts, and chunks of them; as often of several as of one."""
    queries = min(8 if kernel.path == "speculative" else 12, kernel.claims.max_query_len or 12)
    short = kernel.claims.max_query_len is not None or kernel.path == "speculative"
    return _sequences(queries, max(1, kernel.claims.min_seq_len), longest, most, short)


@functools.cache  # making the strategy takes longer than drawing from it
def _sequences(queries: int, least: int, longest: int, most: int, short: bool) -> Any:
    """Return the strategy, of prompts too if it is not for `short` queries alone."""
    decodes = st.tuples(st.just(1), st.integers(least, longest))
    chunks = st.tuples(st.integers(1, queries), st.integers(0, longest - queries)).map(
        lambda pair: (pair[0], max(least, pair[0] + pair[1]))
    )
    prompts = st.integers(least, longest).map(lambda s: (s, s))
    kinds = (decodes, chunks) if short else (decodes, chunks, prompts)
    return st.one_of(*(st.tuples(*[st.one_of(*kinds)] * count) for count in range(1, most + 1)))


def plain(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch without options."""
    return draw_example(draw, kernel)


def of_any_shape(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch without options, of any shape."""
    return draw_example(draw, kernel, shapes=kernel.claims.shapes)


def with_options(*names: str) -> Callable[[Draw, Kernel], Example]:
    """Return what draws batches with these options, each with a number that changes the answer."""

    def drawn(draw: Draw, kernel: Kernel) -> Example:
        numbers = {
            "softmax_scale": st.sampled_from((0.3, 1.0, 0.0, -0.3)),
            "softcap": st.sampled_from((1.0, 5.0)),
            "alibi_slopes": st.just(True),
            "sinks": st.just(True),
            "causal": st.just(False),
            "window_size": st.tuples(st.integers(0, 20), st.just(0)),
            "scales": st.sampled_from(((0.5, 0.25), (2.0, 1.0), (1.0, 0.5))),
        }
        chosen = {name: draw(numbers[name]) for name in names if name == "scales" or kernel.takes(name)}
        if len(names) > 1:  # a mixture: the cap and the scale at numbers at which a wrong order shows
            chosen = {name: value for name, value in chosen.items() if name != "softmax_scale"} | (
                {"softmax_scale": 0.3} if "softmax_scale" in chosen else {}
            )
        return draw_example(draw, kernel, options=chosen)

    return drawn


def of_rows(kind: str) -> Callable[[Draw, Kernel], Example]:
    """Return what draws packed latents of a kind."""
    return lambda draw, kernel: draw_example(draw, kernel, options={"rows": kind})


def in_combination(draw: Draw, kernel: Kernel) -> Example:
    """Draw any of the options that a kernel takes, and how it is called."""
    chosen = {name: draw(st.sampled_from(values)) for name, values in combinations.choices(kernel).items()}
    options, shape, padding = combinations.said(kernel, chosen)
    return draw_example(draw, kernel, options=options, shapes=[shape], padding_rows=padding)


def windowed(draw: Draw, kernel: Kernel) -> Example:
    """Draw a window, on the left and, where a mask need not be causal, on both sides."""
    left = draw(st.integers(0, 20))
    right = draw(st.sampled_from((None, 4, 1, 9, 0))) if kernel.takes("causal") else None
    options = {"window_size": (left, 0)} if right is None else {"window_size": (left, right), "causal": False}
    return draw_example(draw, kernel, options=options)


def of_several_sequences(draw: Draw, kernel: Kernel) -> Example:
    """Draw three or four sequences, of which some share a prefix."""
    one = sequences(kernel, most=1).map(lambda pairs: pairs[0])
    return draw_example(draw, kernel, st.lists(one, min_size=3, max_size=4))


def scales_of(several: str) -> Callable[[Draw, Kernel], Example]:
    """Return what draws a scale for each of the "heads", or for each of them and of the "sequences"."""

    def drawn(draw: Draw, kernel: Kernel) -> Example:
        shapes = [shape for shape in kernel.claims.shapes if shape[0][1] > 1] if several == "heads" else None
        return draw_example(draw, kernel, options={"scales_of": several}, shapes=shapes)

    return drawn


def with_option(name: str, *values: Any) -> Callable[[Draw, Kernel], Example]:
    """Return what draws batches with an option of the path that is no parameter of a kernel."""
    return lambda draw, kernel: draw_example(draw, kernel, options={name: draw(st.sampled_from(values))})


def of_two_sizes(draw: Draw, kernel: Kernel) -> Example:
    """Draw keys that are larger or smaller than values."""
    heads, _, block_size = draw(st.sampled_from(kernel.claims.few_shapes))
    sizes = draw(st.sampled_from(((64, 32), (32, 64))))
    return draw_example(draw, kernel, shapes=[(heads, sizes, block_size)])


def listed_twice(draw: Draw, kernel: Kernel) -> Example:
    """Draw lists in which some keys are twice, or more often."""
    return draw_example(draw, kernel, options={"topk": draw(st.sampled_from((8, 3, 16))), "twice": True})


def large_trees(draw: Draw, kernel: Kernel) -> Example:
    """Draw trees with more nodes than a word has bits."""
    nodes = st.integers(33, 80)
    return draw_example(draw, kernel, st.lists(nodes.map(lambda n: (n, n + 9)), min_size=1, max_size=2))


def growing_trees(draw: Draw, kernel: Kernel) -> Example:
    """Draw trees of which the query rows are the last nodes alone."""
    growing = draw(st.sampled_from((4, 9, 1)))
    lens = st.tuples(st.integers(1, 6), st.integers(growing, growing + 20)).map(lambda x: (x[0], sum(x)))
    return draw_example(draw, kernel, st.lists(lens, min_size=1, max_size=3), options={"growing": growing})


def hidden_behind(draw: Draw, kernel: Kernel) -> Example:
    """Draw decodes and chunks with keys that a window or a chunk hides from all queries."""
    queries = min(4, kernel.claims.max_query_len or 4)
    pairs = st.lists(st.tuples(st.integers(1, queries), st.integers(30, 60)), min_size=1, max_size=2)
    options = {} if kernel.path == "local" else {"window_size": (draw(st.integers(0, 12)), 0)}
    return draw_example(draw, kernel, pairs, options=options)


def odd_lengths(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences without queries, without keys, and with more queries than keys."""
    pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=3)
    odd = draw(st.sampled_from(((0, 3), (2, 0), (3, 1))))
    most = kernel.claims.max_query_len or 6

    least = 0 if kernel.knows_query_lens else 1  # where each sequence has one query, none has no query

    def insert(drawn: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(max(least, min(q, most)), s) for q, s in [*drawn[:1], odd, *drawn[1:]]]

    return draw_example(draw, kernel, pairs.map(insert))


def many_keys(draw: Draw, kernel: Kernel) -> Example:
    """Draw decodes over many keys, which kernels split, with sinks where there are some."""
    pairs = st.lists(st.tuples(st.just(1), st.sampled_from((300, 513, 1100))), min_size=1, max_size=2)
    options: Arguments = {"window_size": (700, 0)} if kernel.path == "sliding_window" else {}
    if kernel.path in SELECTED:
        options["topk"] = draw(st.sampled_from((300, 150, 64)))
    return draw_example(draw, kernel, pairs, options=options)


def sinks_over_many_keys(draw: Draw, kernel: Kernel) -> Example:
    """Draw sinks: over few keys, and over many, which kernels split."""
    pairs = st.one_of(
        sequences(kernel), st.lists(st.tuples(st.just(1), st.sampled_from((300, 700))), min_size=1, max_size=1)
    )
    options: Arguments = {"sinks": True} | ({"window_size": (700, 0)} if kernel.path == "sliding_window" else {})
    return draw_example(draw, kernel, pairs, options=options)


def of_any_layout(draw: Draw, kernel: Kernel) -> Example:
    """Draw how tensors lie in memory."""
    return draw_example(draw, kernel, options={"layout": draw(st.sampled_from(landmarks.LAYOUTS))})


def padded(draw: Draw, kernel: Kernel) -> Example:
    """Draw rows after the last sequence."""
    return draw_example(draw, kernel, padding_rows=draw(st.integers(1, 3)))


def loudly(draw: Draw, kernel: Kernel) -> Example:
    """Draw sinks, too, which may be far above and below all scores."""
    sinks = draw(st.sampled_from((None, True, "large"))) if kernel.takes("sinks") else None
    return draw_example(draw, kernel, options={} if sinks is None else {"sinks": sinks})


def forked(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences of several blocks that begin with blocks of others, as after a fork of a prompt."""
    shape = draw(st.sampled_from(kernel.claims.few_shapes))
    most = min(6 if kernel.path == "speculative" else 12, kernel.claims.max_query_len or 12)
    longest = 5 * shape[2]
    lens = st.lists(st.tuples(st.integers(1, most), st.integers(shape[2], longest)), min_size=2, max_size=4)
    return draw_example(draw, kernel, lens, shapes=[shape], options={"forked": True})


def in_far_blocks(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch whose blocks have large numbers, in a pool of as many as a test can have."""
    drawn = draw_example(draw, kernel, options={"first_block": FAR_BLOCK})
    of_block = drawn.block_size * drawn.heads[1] * max(drawn.head_size, drawn.value_size)
    first = min(FAR_BLOCK, MOST_ELEMENTS // of_block)
    return replace(drawn, options={**drawn.options, "first_block": first})


def empty_parts(draw: Draw, kernel: Kernel) -> Example:
    """Draw parts in which some queries saw nothing, with garbage in the place of an output."""
    garbage = draw(st.sampled_from((0.0, 1e4, float("nan"))))
    return draw_example(draw, kernel, options={"empty": True, "garbage": garbage})


# --- checks ---


def ask(kernel: Kernel, example: Example, arguments: Arguments, **more: Any) -> Answers:
    """Call the kernel, and turn what it raises into what it means."""
    try:
        return kernel(example, arguments, **more)
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except Exception as error:  # a stranger's kernel raises what it likes
        says = (str(error).strip().splitlines() or [""])[0]
        if any(text in str(error) for text in kernel.claims.refusals):
            raise RefusedError(says) from error
        if not _answers_still(arguments):
            raise CrashedError(f"{type(error).__name__}: {says}") from error
        raise Broken(f"raised {type(error).__name__}: {says}") from error


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
    rows = None if example.path in ("merge", "kv_cache") else example.num_tokens
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
        if example.path == "kv_cache":
            different = (came != want).flatten(2).any(-1).nonzero()
            if len(different):
                block, row = different[0].tolist()
                raise Broken(f"{name}: {len(different)} slots differ; the first is row {row} of block {block}")
            continue
        if name == "out" and came.dtype != low[name].dtype:
            raise Broken(f"out: {str(came.dtype).removeprefix('torch.')}, expected the type of the query")
        if rows is not None and came.shape[:1] != want.shape[:1]:
            raise Broken(f"{name}: {came.shape[0]} rows, expected {want.shape[0]}")
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

    A code times its scale has more bits than 16. So has the reference formula rounded it, but then the products, too,
    and where a query sees one key the second error may undo the first.
    """
    try:
        assert_close(came, want, low, name="lse")
    except AssertionError:
        if example.path not in PACKED or arguments["query"].dtype == torch.float32:
            raise
        query, rank = arguments["query"], arguments["latent_rank"]
        latents = read_packed(arguments["cache"], rank, example.head_size - rank, query.dtype).to(query.dtype)
        rounded, _ = expected(example, arguments | dict(cache=latents))
        assert_close(came, rounded["lse"], low, name="lse")


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
        try:
            gradients.assert_close(name, came, wide[name], low[name], sizes[name], dtype, largest_score=score)
        except AssertionError as error:
            raise Broken(str(error)) from None


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


def of_equal_scores(draw: Draw, kernel: Kernel) -> Example:
    """Draw scores that are all equal, or on a plateau: which are taken is up to the rule alone."""
    kind = draw(st.sampled_from(("zeros", "plateau", "negative")))
    return draw_example(draw, kernel, options={"kind": kind})


def fewer_than_asked_for(draw: Draw, kernel: Kernel) -> Example:
    """Draw queries that see fewer keys than are to be selected."""
    return draw_example(draw, kernel, options={"topk": 64, "kind": draw(st.sampled_from(("drawn", "negative")))})


def alone(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Select for each query by itself, for all in another order, and for all again: the same keys."""
    arguments = example.tensors(dtype, device)
    scores = arguments["scores"]
    whole = ask(kernel, example, arguments)["out"]
    flipped = ask(kernel, example, arguments | dict(scores=scores.flip(0)))["out"].flip(0)
    again = ask(kernel, example, arguments)["out"]
    for row in range(len(scores)):
        one = ask(kernel, example, arguments | dict(scores=scores[row : row + 1]))["out"][0]
        for name, other in (("alone", one), ("in another order", flipped[row]), ("when asked again", again[row])):
            if sorted(other.tolist()) != sorted(whole[row].tolist()):
                raise Broken(f"row {row}: other keys are selected {name}")


def answer(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the output, or what was written, with the reference."""
    arguments = example.tensors(dtype, device)
    answers = ask(kernel, example, arguments)
    hold(example, arguments, answers, only=() if example.path in ("kv_cache", "recurrent") else ("out",))


def lse(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the log-sum-exp alone."""
    arguments = example.tensors(dtype, device)
    answers = ask(kernel, example, arguments)
    if "lse" not in answers and kernel.takes("return_lse"):
        raise Broken("there is no lse, though the kernel takes return_lse=True")
    if "lse" not in answers:
        raise NotClaimedError("returns no log-sum-exp")
    hold(example, arguments, answers, only=("lse",))
    if "query" in arguments:
        counted(kernel, example, arguments)


def counted(kernel: Kernel, example: Example, arguments: Arguments) -> None:
    """Compare the log-sum-exp of queries of 0 with that of float32, in any type: all products are 0, and exact.

    Without options it is the logarithm of how many keys a query sees.
    """
    arguments = arguments | dict(query=torch.zeros_like(arguments["query"]))
    came = ask(kernel, example, arguments)["lse"].detach().cpu().double()
    want = expected(example, arguments)[0]["lse"].double()
    off = (came - want).abs().masked_fill(came == want, 0.0)  # which are infinite, or the same
    if not (off <= LSE_OF_ZEROS).all():
        row, head = (~(off <= LSE_OF_ZEROS)).nonzero()[0].tolist()
        raise Broken(
            f"lse: {came[row, head]:.5f} in row {row}, head {head}, expected {want[row, head]:.5f}: "
            "queries are 0, so it is exact in float32, whatever their type"
        )


def everything(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the output and the log-sum-exp with the reference."""
    arguments = example.tensors(dtype, device)
    hold(example, arguments, ask(kernel, example, arguments))


def loud(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare where scores are in the hundreds, and in float32 where all of them are far below -10,000."""
    arguments = example.tensors(dtype, device)
    if example.path == "merge":
        arguments["lses"] = [x * 60 for x in arguments["lses"]]
    else:
        arguments["query"] = arguments["query"] * LOUD
    hold(example, arguments, ask(kernel, example, arguments), is_loud=True)
    keys = [word for word in ("key", "key_cache") if word in arguments]
    if dtype == torch.float32 and keys and example.path in READ_OUT:
        low = example.tensors(dtype, device)
        low["query"], low[keys[0]] = low["query"] - LOW, low[keys[0]] + LOW
        hold(example, low, ask(kernel, example, low), is_loud=True)


def scaled(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare everything, where scores are in the hundreds, too: the largest product is not the largest score."""
    everything(kernel, example, dtype, device)
    if example.path in LOUDLY:
        loud(kernel, example, dtype, device)


def mask(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Read the mask out: with zero queries and one-hot values the output is the mask, divided by its row count."""
    seen = seen_masks(kernel, example, dtype, device)
    row = 0
    for i, (want, share, weights) in enumerate(zip(example.masks(), example.shares(), seen, strict=True)):
        got = weights != 0  # NaN is
        for head in range(weights.shape[1]):
            wrong = (got[:, head, : want.shape[1]] != want).nonzero()
            if len(wrong):
                t, s = wrong[0].tolist()
                should = "" if want[t, s] else "not "
                raise Broken(f"sequence {i}, head {head}: query row {t} should {should}see key {s}")
            if got[:, head, want.shape[1] :].any():
                raise Broken(f"sequence {i}, head {head}: weight on a key that does not exist")
        off = (weights[..., : want.shape[1]] - share[:, None]).abs().max() if weights.numel() else torch.tensor(0.0)
        if not off <= 4 * torch.finfo(dtype).eps:
            raise Broken(f"sequence {i}: the visible keys do not weigh alike, though all their scores are 0")
        row += len(want)


def glance(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Look whether each query sees its keys, all at once: with zero queries the output is the mean of their values.

    Those are 1 and -1, so that a key more or less among n moves every element by about 1/n.
    """
    generator = torch.Generator().manual_seed(example.seed)
    values = [
        torch.randint(0, 2, (s, example.heads[1], example.value_size), generator=generator).float() * 2 - 1
        for _, s in example.lens
    ]
    for first, last, end in example.shared_prefixes() if example.path == "cascade" else ():
        for value in values[first + 1 : last]:
            value[:end] = values[first][:end]
    arguments = example.tensors(dtype, device, values=values)
    out = ask(kernel, example, arguments | dict(query=torch.zeros_like(arguments["query"])))["out"].detach().cpu()
    if out.shape[0] != example.num_tokens + example.padding_rows:
        raise Broken(f"out: {out.shape[0]} rows, expected {example.num_tokens + example.padding_rows}")
    row, group = 0, example.heads[0] // example.heads[1]
    for i, (shares, value) in enumerate(zip(example.shares(), values, strict=True)):
        value = value[:, :1] if "latent_rank" in arguments else value  # where all heads share one latent
        want = torch.einsum("ts,shd->thd", shares, value.double()).repeat_interleave(group, dim=1)
        off = (out[row : row + len(shares)].double() - want).abs().amax(-1)
        allowed = torch.finfo(dtype).eps * want.abs().amax(-1) + 16 * torch.finfo(torch.float32).eps
        wrong = (~(off <= allowed)).nonzero()
        if len(wrong):
            t, head = wrong[0].tolist()
            raise Broken(
                f"sequence {i}, head {head}: query row {t} does not return the mean of the keys that it may see"
            )
        row += len(shares)


def at_landmarks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Look at the mask where the output shows it and no option changes weights, and compare everything."""
    if example.path in READ_OUT and not {"alibi_slopes", "sinks"} & set(example.options):
        glance(kernel, example, dtype, device)
    everything(kernel, example, dtype, device)


def outputs_at_landmarks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Do so without the log-sum-exp."""
    glance(kernel, example, dtype, device)
    answer(kernel, example, dtype, device)


def seen_masks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Read out of the output which weights each query of each sequence gave to the keys, `[t, h, columns]`."""
    width = example.value_size
    rows, pieces = example.num_tokens, []
    for first in range(0, max(1, max(s for _, s in example.lens)), width):
        out = ask(kernel, example, one_hot(example, dtype, device, first))["out"].detach().float().cpu()
        if out.shape[:1] != (rows + example.padding_rows,):
            raise Broken(f"out: shape {list(out.shape)}, expected {rows} rows")
        pieces.append(out[:rows])
    return list(torch.cat(pieces, dim=-1).split([q for q, _ in example.lens]))


def one_hot(example: Example, dtype: torch.dtype, device: str, first: int = 0) -> Arguments:
    """Make the arguments with zero queries, and values that name their keys, from some key on."""
    arguments = example.tensors(dtype, device, values=one_hot_values(example, first))
    return arguments | dict(query=torch.zeros_like(arguments["query"]))


def every_part(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Look whether each of many parts counts: of alike log-sum-exps and outputs of 1 and -1 the merge is the mean."""
    arguments, generator = example.tensors(dtype, device), torch.Generator().manual_seed(example.seed)
    shape = arguments["outs"][0].shape
    signs = [torch.randint(0, 2, shape, generator=generator) * 2 - 1 for _ in arguments["outs"]]
    outs, lses = [x.to(arguments["outs"][0]) for x in signs], [torch.zeros_like(x) for x in arguments["lses"]]
    came = ask(kernel, example, dict(outs=outs, lses=lses))["out"].detach().cpu().double()
    want = torch.stack(signs).double().mean(0)
    allowed = torch.finfo(dtype).eps * want.abs() + len(signs) * torch.finfo(torch.float32).eps
    if came.shape != want.shape or not ((came - want).abs() <= allowed).all():
        raise Broken(f"out: not the mean of {len(signs)} parts with the same log-sum-exp")


def combined(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare everything that is returned, of a call as the options of the example say."""
    said = example.options.get
    arguments = example.tensors(dtype, device)
    region = said("poison")
    given = poison(example, arguments, region) if region else arguments
    more: dict[str, Any] = {"return_lse": False} if said("return_lse") is False else {}
    if said("out"):
        h, dv = example.heads[0], example.output_size
        more["out"] = torch.full((len(arguments["query"]), h, dv), 7.0, dtype=dtype, device=device)
    answers = ask(kernel, example, laid_out(given, said("layout", 0)), **more)
    hold(example, arguments, answers, only=() if said("return_lse") is not False else ("out",))
    if said("out"):
        hold(example, arguments, dict(out=more["out"]))


def poisoned(name: str) -> Check:
    """Return a check of answers over poison in a part of the memory that nobody may see: they are those without it."""

    def check(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
        arguments = example.tensors(dtype, device)
        hold(example, arguments, ask(kernel, example, poison(example, arguments, name)))

    return check


def strides(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare over views: one of the layouts, and a block table that is a part of a larger one."""
    arguments = laid_out(example.tensors(dtype, device), example.options.get("layout", 1))
    if "states" in arguments:
        arguments["states"] = with_gap(arguments["states"]) if example.seed % 2 else outside_in(arguments["states"])
        for word in ("log_decay", "beta"):  # [t, hv], as they come from a projection of all heads
            arguments[word] = arguments[word].transpose(0, 1).contiguous().transpose(0, 1)
    table = arguments["batch"].block_table if "batch" in arguments else None
    if table is not None:  # the beginning of each row of a larger one, as servers have it
        table = torch.cat([table, torch.full_like(table, -1)], dim=1)[:, : table.shape[1]]
        arguments["batch"] = replace(arguments["batch"], block_table=table)
    if "lses" in arguments:
        arguments["lses"] = [x.T.contiguous().T for x in arguments["lses"]]
        arguments["outs"] = [with_gap(x) for x in arguments["outs"]]
    hold(example, arguments, ask(kernel, example, arguments))


def laid_out(arguments: Arguments, layout: int) -> Arguments:
    """Return arguments whose tensors lie in memory in another way, one of `landmarks.LAYOUTS`.

    Args:
        arguments: of a call.
        layout: 0: as they are; 1: heads outside tokens; 2: a gap after each row or page, and each head; 3: keys and
            queries have heads outside tokens, and values not; 4: values have, and queries are cut out of a fused
            projection; 5: pages of keys and of values lie in turn in one pool.
    """
    ways: dict[str, tuple[Callable[[Tensor], Tensor] | None, ...]] = {
        "query": (outside_in, with_gap, outside_in, with_gap, None),
        "key": (outside_in, with_gap, outside_in, None, None),
        "value": (outside_in, with_gap, None, outside_in, None),
    }
    changed = dict(arguments)
    for word in ("query", "key", "value", "key_cache", "value_cache", "cache"):
        way = ways[{"cache": "key"}.get(word, word.removesuffix("_cache"))][layout - 1] if layout else None
        if layout and word in arguments and arguments[word].dtype == torch.uint8:
            changed[word] = packed.with_gaps(arguments[word], packed.SPARE * (layout % 2))
        elif word in arguments and way is not None:
            is_of_latents = word == "cache" and arguments[word].ndim == 3  # which have no heads
            changed[word] = with_gap(arguments[word]) if is_of_latents else way(arguments[word])
    pools = [arguments[word] for word in ("key_cache", "value_cache") if word in arguments]
    if layout == 5 and pools and pools[0].shape == pools[1].shape:
        both = torch.stack(pools, dim=1)
        changed |= dict(key_cache=both[:, 0], value_cache=both[:, 1])
    return changed


def outside_in(x: Tensor) -> Tensor:
    """Lay a tensor out with heads outside tokens, seen through a view of the same shape."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def with_gap(x: Tensor) -> Tensor:
    """Lay a tensor out with a gap after each of its rows or pages, and after each head."""
    return torch.cat([x, torch.full_like(x, 0.5)], dim=-2 if x.ndim != 3 else 1).narrow(
        -2 if x.ndim != 3 else 1, 0, x.shape[-2]
    )


def last_stride(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare over tensors whose elements do not lie side by side."""
    arguments = example.tensors(dtype, device)
    for word in ("query", "key", "value", "key_cache", "value_cache", "cache", "scores", "grad_out"):
        if word in arguments and arguments[word].dtype != torch.uint8:  # the bytes of a row lie side by side
            x = arguments[word]
            arguments[word] = torch.stack([x, torch.full_like(x, 0.5)], dim=-1)[..., 0]
    hold(example, arguments, ask(kernel, example, arguments))


def without_lse(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare an output that comes alone with the reference."""
    arguments = example.tensors(dtype, device)
    hold(example, arguments, ask(kernel, example, arguments, return_lse=False), only=("out",))


def upper_bounds(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with a longest query and a longest sequence that are longer than any of the batch."""
    arguments = example.tensors(dtype, device)
    batch = arguments["batch"]
    more = 0 if kernel.claims.max_query_len == 1 else 3
    columns = example.block_size if batch.block_table is None else batch.block_table.shape[1] * example.block_size
    most = max(batch.max_seq_len, min(columns, batch.max_seq_len + example.block_size))
    batch = replace(batch, max_query_len=batch.max_query_len + more, max_seq_len=most)
    hold(example, arguments, ask(kernel, example, arguments | dict(batch=batch)))


def far_bounds(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with upper bounds, and a block table, of a server that gives those of its model."""
    arguments = example.tensors(dtype, device)
    batch, most = arguments["batch"], FAR_BOUND
    if batch.block_table is not None:
        more = torch.full_like(batch.block_table[:, :1], -1).expand(-1, -(-most // example.block_size))
        batch = replace(batch, block_table=torch.cat([batch.block_table, more], dim=1))
    longest = 1 if kernel.claims.max_query_len == 1 else kernel.claims.max_query_len or most // 8
    batch = replace(batch, max_query_len=max(batch.max_query_len, longest), max_seq_len=max(batch.max_seq_len, most))
    hold(example, arguments, ask(kernel, example, arguments | dict(batch=batch)))


def far_blocks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare over a large pool, in memory that is hardly touched: the blocks of the batch are its last ones."""
    arguments = example.tensors(dtype, device)
    first, given = example.options["first_block"], dict(arguments)
    for word, before in PATHS[example.path].pools:
        pool = arguments[word]
        shape = [size + first * (i == before) for i, size in enumerate(pool.shape)]
        given[word] = untouched(math.prod(shape), pool.dtype, device).view(shape)
        given[word].narrow(before, first, pool.shape[before]).copy_(pool)
    batch = arguments["batch"]
    given["batch"] = replace(batch, block_table=batch.block_table + first)
    answers = ask(kernel, example, given)
    kernel.calls[-1] = arguments | {"first_block": first}, answers  # a known mistake need not read all of that memory
    hold(example, arguments, answers)


def offsets(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare over pages that lie more than 2^31 elements apart, in memory that is hardly touched."""
    arguments = example.tensors(dtype, device)
    if device != "cpu" and not PATHS[example.path].attends:
        raise NotClaimedError("is asked on a CPU only, as a pool that is written is copied before")
    (first, before), *_ = pools = PATHS[example.path].pools or (("states", 0),)
    n = arguments[first].shape[before]
    stride = (LARGE // (n - 1) // 4096 + 2) * 4096  # pages begin where a kernel may load 16 bytes at once
    memory = untouched(stride * n, arguments[first].dtype, device)
    begin = 0
    for word, _ in pools:
        pool = arguments[word]
        view = memory[begin:].as_strided(pool.shape, (stride, *pool.stride()[1:]))
        view.copy_(pool)
        arguments[word] = view
        begin += 2**18
    hold(example, arguments, ask(kernel, example, arguments))
    kernel.calls.clear()


def decode_is_prefill(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the last query of each sequence, alone, with the same query among the others."""
    arguments = example.tensors(dtype, device)
    whole = ask(kernel, example, arguments)
    last = torch.tensor([q for q, _ in example.lens]).cumsum(0) - 1
    alone = replace(example, lens=tuple((1, s) for _, s in example.lens))
    batch = alone.tensors(dtype, device)["batch"]
    if arguments["batch"].block_table is not None:
        batch = replace(batch, block_table=arguments["batch"].block_table)
    of_last = arguments | dict(query=arguments["query"][last.to(arguments["query"].device)], batch=batch)
    decoded = ask(kernel, alone, of_last)
    wide, low = expected(alone, of_last)
    for name in decoded:
        rows = whole[name].cpu()[last]
        error = (wide[name] - low[name]).abs().max()
        allowed = 4 * error + 64 * torch.finfo(dtype).eps * wide[name].abs().max()
        if not (rows - decoded[name].cpu()).abs().max() <= allowed:
            raise Broken(f"{name}: the last query of a sequence gets another answer alone than among the others")


def invariance(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare each sequence alone with the same one among others, to the bit."""
    example = replace(example, options={**example.options, "batch_invariant": True})
    arguments = example.tensors(dtype, device)
    whole = ask(kernel, example, arguments)
    row = 0
    for i, (q, s) in enumerate(example.lens):
        alone = replace(example, lens=((q, s),))
        batch = alone.tensors(dtype, device)["batch"]
        mine = arguments | dict(query=arguments["query"][row : row + q])
        if arguments["batch"].block_table is not None:
            batch = replace(batch, block_table=arguments["batch"].block_table[i : i + 1])
        else:
            first = sum(s for _, s in example.lens[:i])
            mine |= {word: arguments[word][first : first + s] for word in ("key", "value")}
        answers = ask(kernel, alone, mine | dict(batch=batch))
        for name, came in answers.items():
            if not torch.equal(came, whole[name][row : row + q]):
                raise Broken(f"{name}: sequence {i} gets other bits alone than among the others")
        row += q


def again(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare a second call, after one over other and more sequences, with the reference."""
    other = replace(example, lens=(*example.lens, *((q, s + 7) for q, s in example.lens)), seed=example.seed + 1)
    arguments = example.tensors(dtype, device)
    ask(kernel, example, arguments)
    ask(kernel, other, other.tensors(dtype, device))
    answers = ask(kernel, example, arguments)
    try:
        hold(example, arguments, answers)
    except Broken as error:
        raise Broken(f"in the second call, {error}") from None
    before = {name: x.clone() for name, x in answers.items()}
    ask(kernel, example, arguments | again_with(arguments))
    for name, x in before.items():
        if not torch.equal(x.nan_to_num(7.0), answers[name].nan_to_num(7.0)):
            raise Broken(f"{name}: a later call wrote into what an earlier one had returned")
    if PATHS[example.path].attends:
        in_the_same_memory(kernel, example, arguments)


def in_the_same_memory(kernel: Kernel, example: Example, arguments: Arguments) -> None:
    """Compare a call whose tensors have other numbers in the memory of the call before, as those of a server have."""
    for word in ("query", "key", "value", *(pool for pool, _ in PATHS[example.path].pools)):
        if word in arguments and arguments[word].itemsize > 1:
            arguments[word].neg_().add_(0.25)
    batch = arguments["batch"]
    if batch.block_table is not None and example.path != "cascade":  # whose sequences share blocks
        pool, before = PATHS[example.path].pools[0]
        batch.block_table.neg_().add_(arguments[pool].shape[before] - 1)
    answers = ask(kernel, example, arguments)
    del kernel.calls[:-1]  # whose numbers are others now
    try:
        hold(example, arguments, answers)
    except Broken as error:
        raise Broken(f"with other numbers in the same memory, {error}") from None


def again_with(arguments: Arguments) -> Arguments:
    """Return other numbers for a call of the same sizes."""
    if "query" in arguments:
        return {"query": -arguments["query"]}
    if "scores" in arguments:
        return {"scores": arguments["scores"].flip(0)}
    words = [word for word in ("key", "value") if word in arguments]
    return {word: -arguments[word] for word in words} or {"outs": [-x for x in arguments["outs"]]}


def nan(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN where queries may see it: into the first key, or value, of the first sequence.

    Queries of the same sequence that do not see it may answer anything: it is in their tile.
    """
    arguments = example.tensors(dtype, device)
    words = [word for word in ("value_cache", "key_cache", "value", "key", "cache") if word in arguments]
    word = words[example.seed % min(2, len(words))]
    x = arguments[word] = arguments[word].clone()
    if word in ("key", "value"):
        x[0] = torch.nan
    else:
        not_a_number = packed.NAN if x.dtype == torch.uint8 else torch.nan
        x[arguments["batch"].block_table[0, 0].long(), 0] = not_a_number
    out = ask(kernel, example, arguments)["out"].cpu()
    wide, low = expected(example, arguments)
    with_first = {0, *(i for first, last, _ in example.shared_prefixes() if first == 0 for i in range(last))}
    row = 0
    for i, ((q, _), visible) in enumerate(zip(example.lens, example.masks(), strict=True)):
        rows = slice(row, row + q)
        row += q
        if i in with_first:
            hidden = (visible[:, :1, None] & ~out[rows].isnan()).nonzero()
            if len(hidden):
                t, head, _ = hidden[0].tolist()
                raise Broken(f"out: a number in row {t} of sequence {i}, head {head}, which sees a NaN in {word}")
        else:
            try:
                assert_close(*(x[rows] for x in (out, wide["out"], low["out"])), name=f"out of sequence {i}")
            except AssertionError as error:
                raise Broken(f"with a NaN in sequence 0, {error}") from None


def writes(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare what came in before and after: a call changes its output alone."""
    arguments = example.tensors(dtype, device)
    inputs = ["key", "value", "slot_mapping"]
    if example.path != "kv_cache":
        inputs += ["query", "key_cache", "value_cache", "cache", "outs", "lses", "scores", "grad_out", "grad_lse"]
    before = {word: _copied(arguments[word]) for word in inputs if word in arguments}
    ask(kernel, example, arguments)
    for word, old in before.items():
        news = arguments[word] if isinstance(old, list) else [arguments[word]]
        for x, y in zip(news, old if isinstance(old, list) else [old], strict=True):
            if not torch.equal(x.float(), y.float()):
                raise Broken(f"{word}: changed at {(x.float() != y.float()).nonzero()[0].tolist()}")


def _copied(x: Any) -> Any:
    return [y.clone() for y in x] if isinstance(x, list) else x.clone()


def out_memory(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Give memory for the output, in the middle of a larger piece: it is written, and nothing around it."""
    arguments = example.tensors(dtype, device)
    t, (h, _), dv = example.num_tokens, example.heads, example.value_size
    memory = torch.full((t + 2, h, dv), 7.0, dtype=dtype, device=device)
    answers = ask(kernel, example, arguments, out=memory[1:-1])
    if not (memory[0] == 7).all() or not (memory[-1] == 7).all():
        raise Broken("out: memory before or after the given one was written")
    hold(example, arguments, answers | dict(out=memory[1:-1]), only=("out",))
    if answers["out"].data_ptr() != memory[1:-1].data_ptr():
        raise Broken("out: the output that is returned is not the memory that was given")


def strided_out(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Ask for the output in memory with strides: heads outside tokens, or a gap after each row."""
    arguments = example.tensors(dtype, device)
    t, (h, _), dv = example.num_tokens, example.heads, example.output_size
    memory = torch.full((h, t, dv) if example.seed % 2 else (t, 2 * h, dv), 7.0, dtype=dtype, device=device)
    view = memory.transpose(0, 1) if example.seed % 2 else memory[:, :h]
    answers = ask(kernel, example, arguments, out=view)
    hold(example, arguments, answers | dict(out=view), only=("out",))
    if not example.seed % 2 and not (memory[:, h:] == 7).all():
        raise Broken("out: memory between the rows of the given one was written")


def graph(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Capture a CUDA graph with one key per query, and replay it with as many as the batch has."""
    arguments = example.tensors(dtype, device)
    batch = arguments["batch"]
    long = batch.seq_lens.clone()
    arguments = arguments | dict(batch=replace(batch, seq_lens=batch.query_lens.contiguous()))
    ask(kernel, example, arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            kernel.function(**kernel.asked(example, arguments))
        torch.cuda.current_stream().wait_stream(stream)
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording):
            answers = kernel.named(kernel.function(**kernel.asked(example, arguments)))
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except Exception as error:  # a stranger's kernel raises what it likes
        raise CrashedError(f"cannot be captured: {(str(error).splitlines() or [''])[0]}") from error
    arguments["batch"].seq_lens.copy_(long)
    recording.replay()
    torch.cuda.synchronize()
    kernel.calls.append((arguments, answers))
    try:
        hold(example, arguments, answers)
    except Broken as error:
        raise Broken(f"captured short and replayed long, {error}") from None


# --- layers that keep a state ---


def over_states(**options: Any) -> Callable[[Draw, Kernel], Example]:
    """Return what draws a step with these options; a list is a choice."""

    def drawn(draw: Draw, kernel: Kernel) -> Example:
        chosen = {name: draw(st.sampled_from(x)) if isinstance(x, list) else x for name, x in options.items()}
        return draw_example(draw, kernel, options=chosen)

    return drawn


def per_channel(draw: Draw, kernel: Kernel) -> Example:
    """Draw decays per key channel, weak and strong ones, and such that forget everything if that is claimed."""
    kinds = ("weak", "strong", *(() if "forgets" in kernel.claims.not_claimed else ("forget",)))
    return draw_example(draw, kernel, options={"layer": "kda", "decays": draw(st.sampled_from(kinds))})


def without_tokens(draw: Draw, kernel: Kernel) -> Example:
    """Draw sequences without new tokens among others: decodes, and some that kernels compute by chunks.

    The next token of one with 9 before it would be in the middle of a chunk.
    """
    pairs = st.lists(st.tuples(st.sampled_from((1, 37, 5, 0)), st.integers(40, 50)), min_size=1, max_size=3)
    idle = draw(st.sampled_from((((0, 9), (0, 0)), ((0, 0),), ((0, 9),))))  # with a state, and without one
    options: dict[str, Any] = {"stale": True} if draw(st.booleans()) else {}
    if {"gdn", "kda"} <= {*kernel.claims.layers} and draw(st.booleans()):
        options["layer"] = "kda"
    return draw_example(draw, kernel, pairs.map(lambda drawn: [drawn[0], *idle, *drawn[1:]]), options=options)


def of_entries_unused(draw: Draw, kernel: Kernel) -> Example:
    """Draw such sequences with entries that are no slots, and with drafts, counts that are no columns."""
    example = without_tokens(draw, kernel)
    drafts = {"drafts": True} if kernel.takes("num_accepted") and draw(st.booleans()) else {}
    return replace(example, options={**example.options, "stale": "anything", **drafts})


def of_several_chunks(draw: Draw, kernel: Kernel) -> Example:
    """Draw lengths that fill chunks of 64 tokens, one less and one more, with and without a state before."""
    return draw_example(
        draw, kernel, st.sampled_from((((64, 64), (65, 130)), ((63, 70), (1, 9), (128, 128)), ((150, 200),)))
    )


def free_slots(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into slots that nobody may read: free ones, and those of sequences that begin."""
    arguments = example.tensors(dtype, device)
    used = {slot for (q, _), slot in zip(example.lens, arguments["state_indices"].tolist(), strict=True) if q}
    known = arguments["has_initial_state"].tolist()
    read = {slot for slot, has_state in zip(arguments["state_indices"].tolist(), known, strict=True) if has_state}
    states = arguments["states"] = arguments["states"].clone()
    hidden = [slot for slot in range(len(states)) if slot not in read & used]
    states[hidden] = torch.nan
    answers = ask(kernel, example, arguments)
    wide, low = expected(example, arguments)
    written = sorted(used)
    for slot in set(range(len(states))) - used:
        if not answers["states"][slot].isnan().all():
            raise Broken(f"states: slot {slot} was written, which no sequence of the step has")
    for name, rows in (("out", slice(None)), ("states", written)):
        try:
            assert_close(answers[name].cpu()[rows], wide[name][rows], low[name][rows], name=name)
        except AssertionError as error:
            raise Broken(f"with NaN in free slots, {error}") from None


def cut(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the last token of each sequence, in a step of its own, with the same token among the others."""
    arguments = example.tensors(dtype, device)
    rows = [range(q) for q, _ in example.lens]
    starts = arguments["batch"].cu_seqlens_q.tolist()
    states, outs = arguments["states"], torch.empty_like(arguments["value"])
    for part, lens in (
        ([list(x)[:-1] for x in rows], [(q - 1, s - 1) for q, s in example.lens]),
        ([list(x)[-1:] for x in rows], [(1, s) for _, s in example.lens]),
    ):
        step = replace(example, lens=tuple(lens))
        tables = step.tensors(dtype, device)
        at = torch.tensor([starts[i] + x for i, some in enumerate(part) for x in some], dtype=torch.int64)
        at = at.to(outs.device)
        tokens = {name: arguments[name][at] for name in ("query", "key", "value", "log_decay", "beta")}
        same = {name: arguments[name] for name in ("state_indices", "scale", "delta") if name in arguments}
        has_state = tables["has_initial_state"]
        answers = ask(kernel, step, tables | tokens | same | dict(states=states, has_initial_state=has_state))
        states, outs[at] = answers["states"], answers["out"]
    try:
        hold(example, arguments, dict(out=outs, states=states))
    except Broken as error:
        raise Broken(f"computed in two steps, {error}") from None


def nan_before(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into the last value of each sequence: the tokens before it are numbers, and it is not."""
    arguments = example.tensors(dtype, device)
    last = torch.tensor([q for q, _ in example.lens]).cumsum(0) - 1
    value = arguments["value"] = arguments["value"].clone()
    value[last] = torch.nan
    out = ask(kernel, example, arguments)["out"].cpu()
    is_last = torch.zeros(len(out), dtype=torch.bool)
    is_last[last] = True
    if out[~is_last].isnan().any():
        row = int((out.isnan().flatten(1).any(-1) & ~is_last).nonzero()[0])
        raise Broken(f"out: NaN in row {row}, before the token that has it")
    if not out[is_last].isnan().flatten(1).any(-1).all():
        raise Broken("out: a number in the row of a token whose value is NaN")


OUTPUTS_ALONE = (mask, answer, outputs_at_landmarks, nan, writes, out_memory, strided_out, without_lse, alone)
ATTENDS = tuple(path.name for path in PATHS.values() if path.attends)
LOUDLY = (*(name for name in ATTENDS if name != "differential"), "merge")  # whose norm magnifies rounding
READ_OUT = tuple(name for name in ATTENDS if name not in ("differential", "quantized"))  # whose output is the mask
PAGED = tuple(path.name for path in PATHS.values() if path.pools and path.attends)
MIXTURE = ("softmax_scale", "softcap", "alibi_slopes", "sinks")


def all_together(kernel: Kernel) -> list[Example]:
    """Return the landmarks of all options that a kernel takes, and batches in which any two choices meet."""
    numbers = dict(softmax_scale=0.3, softcap=5.0, alibi_slopes=True, sinks=True)
    at_once = landmarks.long(**{name: x for name, x in numbers.items() if kernel.takes(name)})(kernel)
    return at_once + combinations.every_pair(kernel)


PROPERTIES = (
    Property(
        "mask",
        "Each query sees exactly the keys that it may see, all alike.",
        of_any_shape,
        mask,
        paths=READ_OUT,
        landmarks=landmarks.every_shape,
    ),
    Property(
        "answer",
        "The output is that of the formula, within twice the error of its own type.",
        of_any_shape,
        answer,
        landmarks=landmarks.every_shape,
    ),
    Property(
        "not causal",
        "causal=False shows every key of the sequence.",
        with_options("causal"),
        mask,
        ("causal",),
        ("dense", "chunked_prefill"),
        landmarks=landmarks.long(causal=False),
        check_landmark=outputs_at_landmarks,
    ),
    Property(
        "window",
        "A window (left, right) shows left + 1 + right keys, both ends included.",
        windowed,
        mask,
        ("window_size",),
        ("dense", "chunked_prefill", "sliding_window", "cascade", "speculative"),
        landmarks=landmarks.long(window_size=(90, 0)),
        check_landmark=outputs_at_landmarks,
    ),
    Property(
        "lse",
        "The log-sum-exp is over all visible scores: natural log, float32, [t, h].",
        plain,
        lse,
        paths=(*ATTENDS, "merge"),
    ),
    Property(
        "not causal",
        "causal=False shows every key of the sequence.",
        with_options("causal"),
        everything,
        ("causal",),
        ("differential", "quantized"),
        landmarks=landmarks.long(causal=False),
    ),
    Property(
        "window",
        "A window (left, right) shows left + 1 + right keys, both ends included.",
        windowed,
        everything,
        ("window_size",),
        ("differential", "quantized"),
        landmarks=landmarks.long(window_size=(90, 0)),
    ),
    Property(
        "prefixes",
        "A prefix may be that of some sequences only, and another may lie inside it.",
        of_several_sequences,
        everything,
        ("prefixes",),
        ("cascade",),
        landmarks=landmarks.of_prefixes,
    ),
    Property(
        "large trees",
        "A tree may have more nodes than a word has bits.",
        large_trees,
        everything,
        paths=("speculative",),
        examples=2,
        landmarks=landmarks.of_large_trees,
        check_landmark=at_landmarks,
    ),
    Property(
        "growing trees",
        "The query rows may be the last nodes of a tree, and not all of them.",
        growing_trees,
        everything,
        paths=("speculative",),
    ),
    Property("listed twice", "A key that is listed twice counts twice.", listed_twice, everything, paths=SELECTED),
    Property(
        "empty rows",
        "A query without a visible key returns 0 with an LSE of -inf; sequences may have no query.",
        odd_lengths,
        everything,
        paths=tuple(name for name in ATTENDS if name != "speculative"),  # whose trees are among their keys
        landmarks=landmarks.without_queries,
    ),
    Property(
        "upper bounds",
        "max_query_len and max_seq_len may be larger than any length of the batch.",
        plain,
        upper_bounds,
        paths=tuple(name for name in landmarks.KNOWN if name not in ("cascade", "speculative")),
        landmarks=landmarks.some,
        check_landmark=far_bounds,
    ),
    Property(
        "edges",
        "Keys may fill a tile or a block exactly, or be one more or less.",
        plain,
        at_landmarks,
        paths=landmarks.KNOWN,
        examples=0,
        landmarks=landmarks.edges,
    ),
    Property(
        "many sequences",
        "A batch may have many sequences, each of another length.",
        plain,
        at_landmarks,
        paths=(*landmarks.KNOWN, *landmarks.CROWDED),
        examples=0,
        landmarks=landmarks.many_sequences,
    ),
    Property(
        "many slots",
        "A pool may have more slots than 16 bits count.",
        plain,
        everything,
        paths=("kv_cache",),
        examples=0,
        landmarks=landmarks.many_slots,
    ),
    Property(
        "many queries",
        "Sequences may have several tiles of queries.",
        plain,
        at_landmarks,
        paths=landmarks.KNOWN,
        examples=0,
        landmarks=landmarks.many_queries,
    ),
    Property(
        "empty parts", "A part in which a query sees no key has no weight.", empty_parts, everything, paths=("merge",)
    ),
    Property(
        "many parts",
        "Each of many parts counts.",
        plain,
        every_part,
        paths=("merge",),
        examples=0,
        landmarks=landmarks.many_parts,
    ),
    Property(
        "many keys",
        "Partial answers over split keys merge correctly.",
        many_keys,
        everything,
        paths=ATTENDS,
        examples=4,
        landmarks=landmarks.very_long,
        check_landmark=at_landmarks,
    ),
    Property(
        "16 bits",
        "A step may have more rows of queries than 16 bits can count, and a sequence more keys.",
        plain,
        everything,
        paths=tuple(name for name in landmarks.KNOWN if name not in ("differential",)),
        examples=0,
        landmarks=landmarks.past_16_bits,
    ),
    Property(
        "range",
        "Scores in the hundreds do not overflow, nor do sinks.",
        loudly,
        loud,
        paths=LOUDLY,
    ),
    Property("blocks", "Blocks that belong to no sequence may hold anything.", plain, poisoned("blocks"), paths=PAGED),
    Property("tail", "Slots past a sequence's end may hold anything.", plain, poisoned("tail"), paths=PAGED),
    Property(
        "outside the window",
        "Keys that no query sees may hold anything.",
        hidden_behind,
        poisoned("window"),
        ("window_size",),
        ("chunked_prefill", "sliding_window"),
    ),
    Property(
        "outside the interval",
        "Keys that no query sees may hold anything, those between two intervals, too.",
        plain,
        poisoned("window"),
        paths=("interval",),
    ),
    Property(
        "not selected", "Keys that no query selected may hold anything.", plain, poisoned("window"), paths=SELECTED
    ),
    Property(
        "many scores",
        "A query may have more scores than 16 bits count.",
        plain,
        answer,
        paths=("select",),
        examples=0,
        landmarks=landmarks.many_scores,
    ),
    Property(
        "ties",
        "Of equal scores, those at lower positions are selected; 0 and -0 are equal.",
        of_equal_scores,
        answer,
        paths=("select",),
    ),
    Property(
        "few keys",
        "Where fewer keys are visible than asked for, all of them are selected, and -1 stands for the rest.",
        fewer_than_asked_for,
        answer,
        paths=("select",),
    ),
    Property(
        "alone",
        "The selection of a query depends on its scores alone, every time.",
        of_equal_scores,
        alone,
        paths=("select",),
    ),
    Property(
        "outside the chunk",
        "Keys that no query sees may hold anything.",
        hidden_behind,
        poisoned("window"),
        paths=("local",),
    ),
    Property("table", "Entries past a sequence's last block are never used.", plain, poisoned("table"), paths=PAGED),
    Property(
        "padding",
        "Rows after the last sequence are 0 and change no other row, be they a few or several tiles.",
        padded,
        poisoned("padding"),
        paths=ATTENDS,
        landmarks=landmarks.padded,
    ),
    Property("padding", "A token with slot -1 is not written.", padded, answer, paths=("kv_cache",)),
    Property("holes", "A slot of -1 may be anywhere.", with_option("holes", True), answer, paths=("kv_cache",)),
    Property(
        "strides",
        "Tensors may be views: other layouts, gaps between rows and pages.",
        of_any_layout,
        strides,
        landmarks=landmarks.of_layouts,
    ),
    Property(
        "without lse",
        "Without return_lse the output is the same.",
        plain,
        without_lse,
        ("return_lse",),
        ATTENDS,
        examples=2,
        landmarks=landmarks.long(),
    ),
    Property(
        "gaps",
        "Between the rows of a tensor there may be anything, and so there may in a row of latents after its key.",
        plain,
        poisoned("gaps"),
        paths=(*ATTENDS, "kv_cache", "recurrent"),
    ),
    Property(
        "last stride",
        "The last dimension need not be contiguous.",
        plain,
        last_stride,
        paths=(*ATTENDS, "kv_cache", "select"),
    ),
    Property(
        "offsets",
        "Offsets beyond 32 bits reach the right page.",
        plain,
        offsets,
        paths=(*(name for name in PAGED if name not in ("differential",)), "kv_cache", "recurrent"),
        examples=2,
    ),
    Property(
        "far blocks",
        "Blocks may have any number, and slots: 16 bits are not enough.",
        in_far_blocks,
        far_blocks,
        paths=tuple(name for name in PAGED if name not in ("differential",)),
        examples=2,
    ),
    Property(
        "shared blocks",
        "Sequences may have their first blocks in common, few of them or all, and go on in others.",
        forked,
        everything,
        paths=tuple(name for name in PAGED if name not in ("cascade", "differential")),
    ),
    Property(
        "scale",
        "Any finite softmax_scale is used, also 0 and negative ones.",
        with_options("softmax_scale"),
        scaled,
        ("softmax_scale",),
        ATTENDS,
        landmarks=landmarks.long(softmax_scale=0.3),
        check_landmark=everything,
    ),
    Property(
        "softcap",
        "The cap bounds scaled scores, before the mask.",
        with_options("softcap"),
        everything,
        ("softcap",),
        ATTENDS,
        landmarks=landmarks.long(softcap=5.0),
    ),
    Property(
        "alibi",
        "ALiBi is -slope * |distance|, after the scale.",
        with_options("alibi_slopes"),
        everything,
        ("alibi_slopes",),
        ATTENDS,
        landmarks=landmarks.long(alibi_slopes=True),
    ),
    Property(
        "sinks",
        "A sink is one more logit in the denominator, counted once.",
        sinks_over_many_keys,
        everything,
        ("sinks",),
        ATTENDS,
        landmarks=landmarks.of_sinks,
    ),
    Property(
        "together",
        "All options can be combined, any two of them, with any layout and however the kernel is called.",
        in_combination,
        combined,
        paths=ATTENDS,
        landmarks=all_together,
    ),
    Property(
        "scales",
        "Keys and values have separate scales.",
        with_options("scales"),
        everything,
        paths=("quantized",),
        landmarks=landmarks.long(scales=(0.5, 0.25)),
    ),
    Property(
        "format",
        "Codes may be e5m2, too.",
        with_option("format", "e5m2"),
        everything,
        paths=("quantized",),
    ),
    Property(
        "scales per head",
        "Each KV head may have a scale of its own.",
        scales_of("heads"),
        everything,
        paths=("quantized",),
    ),
    Property(
        "scales per sequence",
        "Each sequence may have scales of its own, one for each KV head.",
        scales_of("sequences"),
        everything,
        paths=("quantized",),
    ),
    Property(
        "decode is prefill",
        "The last query gets the same answer alone and with the queries before it.",
        plain,
        decode_is_prefill,
        paths=("chunked_prefill", "sliding_window", "local", "mla", "packed_mla", "quantized"),
    ),
    Property(
        "batch invariance",
        "batch_invariant=True: the same bits, whatever else is in the batch.",
        plain,
        invariance,
        ("batch_invariant",),
        ("dense", "chunked_prefill", "sliding_window", "local", "mla", "packed_mla"),
    ),
    Property(
        "free slots",
        "Slots of nobody, and of sequences that begin, may hold anything; the first are not written.",
        plain,
        free_slots,
        paths=("recurrent",),
    ),
    Property(
        "padding slot",
        "A sequence with a negative slot returns 0, and changes no state.",
        over_states(padding=True),
        everything,
        paths=("recurrent",),
    ),
    Property(
        "padding", "Rows after the last sequence are 0 and change nothing.", padded, everything, paths=("recurrent",)
    ),
    Property(
        "no tokens",
        "A sequence without new tokens keeps its state, and changes no other, whatever slot it has.",
        without_tokens,
        everything,
        paths=("recurrent",),
    ),
    Property(
        "entries unused",
        "The entries of a sequence without new tokens may be anything: no index is followed.",
        of_entries_unused,
        everything,
        paths=("recurrent",),
    ),
    Property(
        "drafts",
        "The state after each token is kept in its slot, and a step begins after the last accepted one.",
        over_states(drafts=True),
        everything,
        ("num_accepted",),
        ("recurrent",),
    ),
    Property(
        "steps",
        "A sequence that is computed in two steps has the same outputs and state.",
        plain,
        cut,
        paths=("recurrent",),
    ),
    Property(
        "chunks",
        "A prompt of several chunks of 64 tokens has the same outputs and state as token by token.",
        of_several_chunks,
        everything,
        paths=("recurrent",),
        examples=3,
    ),
    Property(
        "sizes",
        "Keys and values may have different sizes.",
        of_two_sizes,
        everything,
        paths=("recurrent",),
    ),
    Property(
        "decay per channel",
        "Each key channel may have a decay of its own.",
        per_channel,
        everything,
        paths=("recurrent",),
        layer="kda",
    ),
    Property(
        "strong decays",
        "Decays may be as strong as e^-60, with weak ones beside them.",
        over_states(decays="strong"),
        everything,
        paths=("recurrent",),
    ),
    Property(
        "forgets",
        "A decay of 0, whose logarithm is -inf, forgets everything before the token: no NaN from -inf minus -inf.",
        over_states(decays="forget"),
        everything,
        paths=("recurrent",),
    ),
    Property(
        "without delta",
        "delta=False writes the value itself.",
        over_states(delta=False),
        everything,
        ("delta",),
        ("recurrent",),
    ),
    Property(
        "read scale",
        "Any finite scale is used, also 0 and negative ones.",
        over_states(scale=[0.3, 1.0, 0.0, -0.3]),
        everything,
        ("scale",),
        ("recurrent",),
    ),
    Property(
        "nan before",
        "A NaN reaches no token before its own.",
        plain,
        nan_before,
        paths=("recurrent",),
    ),
    Property(
        "group scales",
        "Each 128 elements of a packed latent have a scale of their own, which may be tiny; zeros stay zeros.",
        of_rows("apart"),
        answer,
        paths=PACKED,
    ),
    Property(
        "largest codes",
        "A code may be the largest, 448 or -448, or a zero of either sign.",
        of_rows("largest"),
        answer,
        paths=PACKED,
    ),
    Property(
        "rotary keys",
        "Rotary keys are numbers of 16 bits, with no scale and no rounding.",
        of_rows("rotary"),
        answer,
        paths=PACKED,
    ),
    Property("again", "A call does not affect later calls.", plain, again),
    Property("nan", "A NaN reaches exactly the queries that see it.", plain, nan, paths=READ_OUT),
    Property("writes", "Inputs are not modified.", plain, writes),
    Property(
        "out", "out= is filled and returned; memory around it is not touched.", plain, out_memory, ("out",), ATTENDS
    ),
    Property("out strides", "out= may be a view with any strides.", plain, strided_out, ("out",), ATTENDS),
    Property(
        "graph",
        "A CUDA graph captured with short sequences is right for long ones.",
        plain,
        graph,
        paths=("chunked_prefill", "sliding_window", "local", "mla"),
        examples=3,
        cuda=True,
    ),
)


def of_path(path: str) -> list[Property]:
    """List the properties of a path, in the order in which they are asked."""
    if path not in PATHS:
        from refattn.conformance import operations  # its checks raise what is here

        return operations.of_operation(operations.OPERATIONS[path])  # type: ignore[return-value]  # they have what a search asks of a property
    if PATHS[path].differentiates:
        from refattn.conformance import backward  # its properties are made of what is here

        return list(backward.PROPERTIES)
    return [x for x in PROPERTIES if not x.paths or path in x.paths]
