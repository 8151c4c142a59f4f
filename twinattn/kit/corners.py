"""Corner cases: more queries than keys with each option, unusual sizes of models, NaN under a weight of 0.

And side effects of a call: an output that overlaps the query, changes to the process.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinattn.kit import combinations, landmarks
from twinattn.kit.checks import at_landmarks, combined, everything
from twinattn.kit.draws import plain
from twinattn.kit.example import PACKED, PATHS, SELECTED, Arguments, Example
from twinattn.kit.hold import ask, hold
from twinattn.kit.kernel import Kernel
from twinattn.kit.landmarks import example
from twinattn.kit.process import left_alone, restored
from twinattn.kit.property import ATTENDS, Broken, Check, NotClaimedError, Property, RefusedError, outputs_alone
from twinattn.kit.sizes import CALLS

OVER_ROWS = tuple(name for name in ATTENDS if "latent_rank" not in PATHS[name].words)
IN_PAIRS = ("key", "value"), ("key_cache", "value_cache")  # names of keys and of their values
HIGH = 40.0  # an element of a key among zero keys: its weight is then 1, and all others are rounded to 0
MODEL_SIZES = ((192, 128), (64, 96), (512, 512), (112, 112), (32, 32))  # head sizes that are not in the default claims
MODEL_HEADS = ((128, 8), (71, 1), (64, 64))
HEADS_WITH_BIASES = ((112, 112), (128, 16))  # more than 64: BLOOM has slopes for 112
GROUPS, FEW_KV_HEADS, MANY_KV_HEADS, MOST_HEADS = range(1, 17), range(2, 9), range(9, 33), 128
HEAD_SIZES, ROTARY_SIZES, RANKS = range(16, 257, 8), range(8, 65, 8), range(16, 513, 8)
MODEL_BLOCK = 784  # tokens: a page of a hybrid model
SIZES_OF_WRITES = ((1, 2), (2, 1), (64, 192), (128, 64))
BEFORE_THE_FIRST = ((5, 2), (4, 1), (3, 3), (3, 2))  # lengths: the first queries have positions below 0
WINDOWS = ((-1, 0), (-1, 1), (-1, 2), (0, 0), (2, 1), (0, -1))
NUMBERS_OF_A_LAYER = dict(
    norm_weight=("signs", "none"), norm_eps=(1e-2, 1e-6), lambda_init=(0.8, 0.5, 0.0), lambda_full=(2.5, -3.1, 0.0)
)
MIXED = ("values", "keys", "keys by sequence")


# --- batches ---


def before_the_first(kernel: Kernel) -> list[Example]:
    """Return batches with more queries than keys, under each option, with a causal mask and without one."""
    if not landmarks.sees_nothing(kernel):
        return []
    of = {name: values for name, values in combinations.choices(kernel).items() if name not in CALLS}
    of.pop("causal", None)
    if kernel.takes("window_size"):
        of["window_size"] = (None, *(WINDOWS if kernel.takes("causal") else ((0, 0), (2, 0))))
    chosen: list[dict[str, Any]] = [{}]
    chosen += [{name: value} for name, (_, *others) in of.items() for value in others]
    if "alibi_slopes" in of and kernel.takes("alibi_sqrt"):
        chosen.append(dict(alibi_slopes="root"))
    masks: tuple[dict[str, Any], ...] = ({"causal": False}, {}) if kernel.takes("causal") else ({},)
    return [example(kernel, BEFORE_THE_FIRST, **options, **mask) for mask in masks for options in chosen]


def of_models(kernel: Kernel) -> list[Example]:
    """Return a small batch of each size of models that is not in the default claims, unless a kernel claims its own."""
    claims, usual = kernel.claims, kernel.usual
    heads, sizes, block_size = claims.shapes[0]
    shapes = []
    if claims.head_sizes == usual.head_sizes:
        can_differ = kernel.path != "differential"
        shapes += [(heads, pair, block_size) for pair in MODEL_SIZES if can_differ or pair[0] == pair[1]]
    if claims.heads == usual.heads:
        shapes += [
            (some, sizes, block_size) for some in MODEL_HEADS if kernel.path != "differential" or some[1] % 2 < 1
        ]
    batches = []
    if claims.heads == usual.heads:
        biases: dict[str, Any] = {x: True for x in ("alibi_slopes", "sinks") if kernel.takes(x)}
        some = [(pair, sizes, block_size) for pair in HEADS_WITH_BIASES if biases]
        batches += [example(kernel, ((2, 9), (1, 3)), shape, **biases) for shape in some]
    if claims.block_sizes == usual.block_sizes and PATHS[kernel.path].pools:
        batches.append(example(kernel, ((1, MODEL_BLOCK - 80), (2, MODEL_BLOCK + 9)), (heads, sizes, MODEL_BLOCK)))
    return [*batches, *(example(kernel, ((2, 9), (1, 3)), shape) for shape in shapes)]


def of_model_sizes(kernel: Kernel, type_number: int) -> list[Example]:
    """Return `of_models` for every type: a kernel may have an instance per type."""
    return of_models(kernel)


def of_other_sizes(kernel: Kernel, type_number: int) -> list[Example]:
    """Return small batches of sizes between those of models, other ones for each type, unless a kernel claims its own.

    Together they have each group of up to 16 heads, most numbers of 9 to 32 KV heads, in groups, and each head size of
    16 to 256 in steps of 8; of latents most numbers of heads up to 128.
    """
    claims, usual, chosen = kernel.claims, kernel.usual, random.Random(type_number)
    is_of_latents, unit = "latent_rank" in PATHS[kernel.path].words, 2 if kernel.path == "differential" else 1
    heads, sizes = list(claims.heads), list(claims.head_sizes)
    if claims.heads == usual.heads:
        few = [(chosen.choice(FEW_KV_HEADS), group) for group in GROUPS]
        many = [(n, chosen.randint(2, MOST_HEADS // n)) for n in chosen.sample(MANY_KV_HEADS, 15)]
        heads = [(unit * n * group, unit * n) for n, group in few + many]
        heads = [(h, 1) for h in chosen.sample(range(2, MOST_HEADS), 16)] if is_of_latents else heads
        chosen.shuffle(heads)  # any few of them are of all kinds
    if claims.head_sizes == usual.head_sizes and kernel.path not in PACKED:
        sizes = [(d, d) for d in chosen.sample(HEAD_SIZES, len(HEAD_SIZES))]
        if is_of_latents:
            sizes = [(r + chosen.choice(ROTARY_SIZES), r) for r in chosen.sample(RANKS, 16)]
    if (heads, sizes) == (list(claims.heads), list(claims.head_sizes)):
        return []
    count, p = max(len(heads), len(sizes)), claims.block_sizes[0]
    shapes = [(heads[i % len(heads)], sizes[i % len(sizes)], p) for i in range(count)]
    return [example(kernel, ((2, 9), (1, 3)), shape) for shape in shapes]


def of_writes(kernel: Kernel) -> list[Example]:
    """Return keys that are larger or smaller than values."""
    heads, _, block_size = kernel.claims.shapes[0]
    if kernel.claims.head_sizes != kernel.usual.head_sizes:
        return []
    return [example(kernel, ((3, 20), (1, 9)), (heads, pair, block_size)) for pair in SIZES_OF_WRITES]


def far_from_the_first(kernel: Kernel) -> list[Example]:
    """Return sequences of several tiles, some of them long enough to be split."""
    return [example(kernel, lens) for lens in (((1, 200), (2, 150)), ((1, landmarks.SPLIT[1]), (1, 70)), ((70, 330),))]


def of_layers(kernel: Kernel) -> list[Example]:
    """Return batches that change one number of a differential attention layer at a time."""
    numbers = dict(NUMBERS_OF_A_LAYER)
    parameter = kernel.parameters.get("norm_weight")
    if not kernel.claims.conventions and (parameter is None or parameter.default is not None):
        numbers["norm_weight"] = ("signs",)  # it is required
    return landmarks.each(**numbers)(kernel)


def of_mixed_scales(kernel: Kernel) -> list[Example]:
    """Return batches with scales of different shapes for keys and for values."""
    unclaimed = kernel.claims.not_claimed
    by_head, by_sequence = (f"scales per {x}" not in unclaimed for x in ("head", "sequence"))
    kinds = [x for x in MIXED if by_head and (by_sequence or x != MIXED[2])]
    heads = next((x for x in kernel.claims.heads if x[1] > 1), kernel.claims.heads[0])
    shape = heads, kernel.claims.head_sizes[0], kernel.claims.block_sizes[0]
    return [example(kernel, ((3, 20), (1, 33), (2, 40)), shape, scales_of=kind) for kind in kinds]


def of_overlaps(kernel: Kernel) -> list[Example]:
    """Return batches of one sequence and of several: no row may be written before all inputs have been read."""
    return [example(kernel, lens) for lens in (((3, 20), (1, 33), (4, 40)), ((5, 40),), ((1, 9), (1, 20)))]


def of_nothing(kernel: Kernel) -> list[Example]:
    """Return batches of no sequence, with rows of padding and with none, without and with memory for the output."""
    has_padding = kernel.knows_query_lens and "padding" not in kernel.claims.not_claimed
    outs: tuple[dict[str, Any], ...] = ({}, {"out": True}) if kernel.takes("out") else ({},)
    shape = max(kernel.claims.shapes[0], kernel.claims.shapes[-1])
    counts = (3, 0) if has_padding else (0,)
    return [replace(example(kernel, (), shape, **out), padding_rows=rows) for rows in counts for out in outs]


def repeated(kernel: Kernel) -> list[Example]:
    """Return long lists that contain some keys twice or more often."""
    return [example(kernel, ((1, 300), (3, 90)), topk=topk, twice=True) for topk in (65, 130, 700)]


# --- checks ---


def unless_refused(check: Check) -> Check:
    """Return a check for batches outside the default claims: a kernel may raise anything, but not be wrong."""

    def checked(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
        try:
            check(kernel, example, dtype, device)
        except Broken as error:
            if str(error).startswith(("raised ", "out: shape ")):
                raise RefusedError(str(error)) from None
            raise

    return checked


@outputs_alone
def process(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the state of the process before and after a call."""
    arguments = example.tensors(dtype, device)
    with restored():  # the first call may import, and compile
        ask(kernel, example, arguments)
    with left_alone():
        ask(kernel, example, arguments)


@outputs_alone
def nan_without_weight(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into the first value that a sequence's last query sees, and all weight on the last: the output is NaN.

    Many kernels skip parts whose weight is 0, so only those that claim the conventions are checked.
    """
    if not kernel.claims.conventions:
        raise NotClaimedError("claims nothing about NaN whose weight is 0 by rounding: @claims(conventions=True)")
    arguments = example.tensors(dtype, device)
    words = next(words for words in IN_PAIRS if words[0] in arguments)
    arguments["query"] = torch.ones_like(arguments["query"])
    key = arguments[words[0]] = torch.zeros_like(arguments[words[0]])
    value = arguments[words[1]] = arguments[words[1]].clone()
    row, first, rows = 0, 0, list[int]()
    for i, ((q, s), mask) in enumerate(zip(example.lens, example.masks(), strict=True)):
        row, first = row + q, first + s
        seen = mask[-1].nonzero().flatten().tolist() if q else []
        if len(seen) < 2:
            continue
        rows.append(row - 1)
        for x, j, number in ((key, seen[-1], HIGH), (value, seen[0], torch.nan)):
            at: Any = first - s + j
            if words[0] == "key_cache":
                block = int(arguments["batch"].block_table[i, j // example.block_size])
                at = block, j % example.block_size
            x[at] = torch.full_like(x[at].float(), number).to(x.dtype)
    out = ask(kernel, example, arguments)["out"].detach().cpu()
    hidden = [row for row in rows if not out[row].isnan().all()]
    if hidden:
        raise Broken(f"out: a number in row {hidden[0]}, which sees a NaN in a value whose weight is 0 by rounding")


@outputs_alone
def out_beside_query(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Pass memory for the output that begins a row or a head before or after the query, or overlaps keys or values.

    Keys and values only if the conventions are claimed: a kernel without memory of its own could not compute this.
    """
    for name, arguments, given, out in overlaps(example, dtype, device, in_keys=kernel.claims.conventions):
        answers = ask(kernel, example, given, out=out)
        kernel.calls[-1] = arguments, kernel.calls[-1][1]
        try:
            hold(example, arguments, answers | dict(out=out), only=("out",))
        except Broken as error:
            raise Broken(f"with an output that {name}, {error}") from None


def overlaps(
    example: Example, dtype: torch.dtype, device: str, *, in_keys: bool
) -> Iterator[tuple[str, Arguments, Arguments, Tensor]]:
    """Yield ways in which an output overlaps an input: words, the arguments as they were and as given, the output."""
    arguments = example.tensors(dtype, device)
    query, size = arguments["query"], example.output_size
    shape = (*query.shape[:2], size)
    if size == example.head_size and query.numel():
        room = query[0].numel()
        for words, shift in (("a row before", -room), ("a row after", room), ("a head after", size)):
            memory = query.new_zeros(query.numel() + 2 * room)
            rows, out = memory[room:-room].view_as(query), memory[room + shift :][: query.numel()].view_as(query)
            yield f"begins {words} the query", arguments, arguments | dict(query=rows.copy_(query)), out
    for word in ("key", "value", "key_cache", "value_cache", "cache") if in_keys else ():
        x = arguments.get(word)
        if x is not None and x.dtype == dtype and x.numel() >= math.prod(shape):
            mine = x.clone(memory_format=torch.contiguous_format)
            out = mine.flatten()[-math.prod(shape) :].view(shape)
            yield f"lies in {word}", arguments, arguments | {word: mine}, out


PROPERTIES = (
    Property(
        "process",
        "A call leaves the process as it was: random numbers, default type, threads, and how numbers are computed.",
        plain,
        process,
        examples=2,
    ),
    Property(
        "more queries than keys",
        "Queries may have positions below 0: with each option, with a causal mask and without one.",
        plain,
        everything,
        paths=tuple(x for x in OVER_ROWS if x not in (*SELECTED, "cascade", "speculative", "interval")),
        examples=0,
        landmarks=before_the_first,
    ),
    Property(
        "sizes of models",
        "Heads of 32, 112 and 512 elements, values of another size than keys, 128 heads, pages of 784, if taken.",
        plain,
        unless_refused(at_landmarks),
        paths=OVER_ROWS,
        examples=0,
        landmarks=of_models,
        in_type=of_model_sizes,
    ),
    Property(
        "other sizes",
        "Any number of KV heads, any group of heads and any head size that is a multiple of 8, if taken.",
        plain,
        unless_refused(everything),
        paths=(*ATTENDS, "merge", "kv_cache"),
        examples=0,
        landmarks=lambda kernel: of_other_sizes(kernel, 0),
        in_type=of_other_sizes,
    ),
    Property(
        "no sequences",
        "A batch may have no sequence, and rows of padding alone, if taken: they are 0 also in memory that is given.",
        plain,
        unless_refused(combined),
        paths=ATTENDS,
        examples=0,
        landmarks=of_nothing,
    ),
    Property(
        "sizes",
        "Keys and values may have different sizes.",
        plain,
        unless_refused(everything),
        paths=("kv_cache",),
        examples=0,
        landmarks=of_writes,
    ),
    Property(
        "nan without weight",
        "A NaN in a value shows even where its weight is 0 by rounding.",
        plain,
        nan_without_weight,
        paths=tuple(x for x in OVER_ROWS if {"key", "key_cache"} & {*PATHS[x].words}),
        examples=0,
        landmarks=far_from_the_first,
    ),
    Property(
        "out beside the query",
        "out= may begin a row before the query or after it, and by the conventions overlap any input: it comes last.",
        plain,
        out_beside_query,
        ("out",),
        ATTENDS,
        examples=0,
        landmarks=of_overlaps,
    ),
    Property(
        "numbers of a layer",
        "lambda, lambda_init, norm_eps and the weights of the norm may be any numbers; there may be no weights.",
        plain,
        everything,
        paths=("differential",),
        examples=0,
        landmarks=of_layers,
    ),
    Property(
        "scales mixed",
        "One of the scales of keys and of values may be a number, and the other one per head, or per sequence.",
        plain,
        everything,
        paths=("quantized",),
        examples=0,
        landmarks=of_mixed_scales,
    ),
)
