"""The properties of the gradients of a `varlen` kernel.

A kernel is differentiated by autograd, as its users do, for random gradients of its output and of its log-sum-exp
(`gradients`). Most batches and checks are those of `draws`, `checks` and `memory`.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from twinattn.kit import checks, corners, draws, gradients, landmarks, memory, options, sizes
from twinattn.kit.checks import everything
from twinattn.kit.draws import draw_example, plain, with_options
from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.hold import ask, hold
from twinattn.kit.kernel import Kernel
from twinattn.kit.memory import with_gap
from twinattn.kit.property import Broken, Draw, NotClaimedError, Property, RefusedError
from twinattn.kit.reference import expected
from twinattn.kit.tolerance import on_cpu

REPEATS = 4  # calls that have to return the same bits with deterministic=True


# --- batches ---


def of_log_sum_exps(draw: Draw, kernel: Kernel) -> Example:
    """Draw gradients of the log-sum-exps, also for fully masked rows; sometimes with sinks or a softcap."""
    options: Arguments = {"grad_lse": True}
    for name, value in (("sinks", True), ("softcap", 2.0)):
        if kernel.takes(name) and draw(st.booleans()):
            options[name] = value
    return replace(draw(st.sampled_from((plain, draws.odd_lengths)))(draw, kernel), options=options)


def with_sinks(draw: Draw, kernel: Kernel) -> Example:
    """Draw sinks over few keys and over many, and with fully masked rows."""
    drawn = draw(st.sampled_from((draws.sinks_over_many_keys, draws.odd_lengths)))(draw, kernel)
    return replace(drawn, options={"sinks": True})


def some_queries(draw: Draw, kernel: Kernel) -> Example:
    """Draw a few sequences with several queries each, over which keys and values add up."""
    pairs = st.lists(st.tuples(st.integers(3, 9), st.integers(9, 40)), min_size=1, max_size=3)
    return draw_example(draw, kernel, pairs)


# --- checks ---


def mask(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Read the mask out of each gradient: all scores are 0, and one-hot rows show which pairs contribute.

    With zero queries and one-hot gradients, `dv` is the mask itself, each row divided by its count. With one-hot keys,
    or one-hot queries over zero keys, `dq` and `dk` may be anything where a query sees a key, and are 0 elsewhere.
    """
    clean = example.tensors(dtype, device)
    most_queries, most_keys = (max((pair[i] for pair in example.lens), default=0) for i in (0, 1))
    nothing = dict(query=torch.zeros_like(clean["query"]))
    for first in range(0, max(1, most_queries), example.value_size):
        rows = _one_hot(clean["grad_out"], [q for q, _ in example.lens], first)
        _compare_masks(example, "dv", ask(kernel, example, clean | nothing | dict(grad_out=rows)), first)
    for first in range(0, max(1, most_keys), example.head_size):
        keys = _one_hot(clean["key"], [s for _, s in example.lens], first)
        _compare_masks(example, "dq", ask(kernel, example, clean | nothing | dict(key=keys)), first)
    for first in range(0, max(1, most_queries), example.head_size):
        rows = _one_hot(clean["query"], [q for q, _ in example.lens], first)
        given = dict(query=rows, key=torch.zeros_like(clean["key"]))
        _compare_masks(example, "dk", ask(kernel, example, clean | given), first)


def _one_hot(like: Tensor, lengths: list[int], first: int) -> Tensor:
    """Return one-hot rows of each sequence: element `j` is 1 in row `first + j`."""
    size = like.shape[-1]
    rows = torch.zeros_like(like)
    named = torch.arange(first, first + size)
    of = [(torch.arange(n)[:, None] == named)[:, None] for n in lengths]
    if of and sum(lengths):
        rows[: sum(lengths)] = torch.cat(of).to(like)
    return rows


def _compare_masks(example: Example, name: str, answers: Answers, first: int) -> None:
    """Compare the nonzero elements of a gradient, `[rows, heads, columns]`, with the mask of each sequence."""
    row, found = 0, answers[name].detach().cpu()
    of_keys = name != "dq"
    for i, ((q, s), visible) in enumerate(zip(example.lens, example.masks(), strict=True)):
        want = visible.T if of_keys else visible  # [rows of the gradient, one-hot columns]
        mine = found[row : row + (s if of_keys else q)]
        row += s if of_keys else q
        want = want[:, first : first + mine.shape[-1]]
        got = mine[..., : want.shape[1]] != 0  # true for NaN
        hidden = got & ~want[:, None]
        missing = (~got & want[:, None]) if name == "dv" else torch.zeros_like(got)
        for wrong, should in ((hidden, "should not"), (missing, "should")):
            if wrong.any():
                r, head, column = wrong.nonzero()[0].tolist()
                query, key = (first + column, r) if of_keys else (r, first + column)
                raise Broken(f"{name}: sequence {i}, head {head}: query row {query} {should} have a part in key {key}")
        if mine[..., want.shape[1] :].any():
            raise Broken(f"{name}: sequence {i}: a part of a row that does not exist")


def of_log_sum_exp(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the gradients of a loss over outputs and log-sum-exps, and of one over log-sum-exps alone."""
    arguments = example.tensors(dtype, device)
    for given in (arguments, arguments | dict(grad_out=torch.zeros_like(arguments["grad_out"]))):
        try:
            answers = ask(kernel, example, given)
        except RefusedError as error:
            if isinstance(error.__cause__, gradients.NoGradientError):
                raise NotClaimedError(str(error)) from error
            raise
        hold(example, given, answers)


def combined(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare gradients of a call with options; an LSE that has a gradient without them must have one with them."""
    try:
        checks.combined(kernel, example, dtype, device)
    except RefusedError as error:
        if not isinstance(error.__cause__, gradients.NoGradientError):
            raise
        plain = replace(example, options={"grad_lse": True})
        ask(kernel, plain, plain.tensors(dtype, device))
        arguments = example.tensors(dtype, device)
        answers = ask(kernel, example, {name: x for name, x in arguments.items() if name != "grad_lse"})
        kernel.calls[-1] = arguments, answers
        hold(example, arguments, answers)


def strides_of_grad(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with gradients of the output that are expanded, as those of a sum are, transposed, or other views."""
    arguments = example.tensors(dtype, device)
    given = arguments["grad_out"]
    views = dict(
        expanded=given[:1, :1, :1].expand_as(given),
        expanded_over_heads=given[:, :1].expand_as(given),
        transposed=given.transpose(0, 1).contiguous().transpose(0, 1),
        with_a_gap=with_gap(given),
        by_columns=given.transpose(1, 2).contiguous().transpose(1, 2),
    )
    for name, view in views.items():
        try:
            changed = arguments | dict(grad_out=view)
            hold(example, changed, ask(kernel, example, changed))
        except Broken as error:
            raise Broken(
                f"with a gradient of the output that is {name.replace('_', ' ')}, {error}"
            ) from error.__cause__


def one_at_a_time(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the gradient of each input where no other input requires one."""
    if kernel.is_backward:
        raise NotClaimedError("is a backward itself")
    arguments = example.tensors(dtype, device)
    for name in ("query", "key", "value"):
        answers = ask(kernel, example, arguments, wanted=(name,))
        try:
            hold(example, arguments, answers)
        except Broken as error:
            raise Broken(f"where {name} alone requires a gradient, {error}") from None


def of_slopes(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the gradient of the slopes of ALiBi, which a model may learn."""
    if kernel.is_backward:
        raise NotClaimedError("is a backward itself, which returns no gradient of slopes")
    arguments = example.tensors(dtype, device)
    if "alibi_slopes" not in arguments:  # a batch that has been made smaller
        return
    try:
        came = ask(kernel, example, arguments, wanted=("alibi_slopes",))["dslopes"].detach().cpu()
    except RefusedError as error:
        raise NotClaimedError(f"has no gradient of alibi_slopes: {error}") from error
    finally:
        kernel.calls.clear()  # known mistakes have no gradient of slopes
    arguments = on_cpu(arguments)
    (wide, low), sizes = gradients.expected(arguments, ("alibi_slopes",)), gradients.sizes(example, arguments)
    if not came.any() and wide["dslopes"].any():
        raise Broken("dslopes: all zeros, or none: the slopes require a gradient, and get none")
    try:
        gradients.assert_close("dslopes", came, wide["dslopes"], low["dslopes"], sizes["dslopes"], dtype)
    except AssertionError as error:
        raise Broken(str(error)) from None


def deterministic(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the bits of repeated calls."""
    arguments = example.tensors(dtype, device) | dict(deterministic=True)
    first = ask(kernel, example, arguments)
    for _ in range(REPEATS - 1):
        for name, came in ask(kernel, example, arguments).items():
            if not torch.equal(came, first[name]):
                raise Broken(f"{name}: the same call gives other bits, with deterministic=True")


def invariance(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the gradients of each sequence alone with those among others, to the bit."""
    example = replace(example, options={**example.options, "batch_invariant": True})
    arguments = example.tensors(dtype, device)
    whole = ask(kernel, example, arguments)
    row = first = 0
    for i, (q, s) in enumerate(example.lens):
        alone = replace(example, lens=((q, s),))
        rows, keys = slice(row, row + q), slice(first, first + s)
        row, first = rows.stop, keys.stop
        mine = arguments | dict(batch=alone.tensors(dtype, device)["batch"])
        mine |= {name: arguments[name][rows] for name in ("query", "grad_out")}
        mine |= {name: arguments[name][keys] for name in ("key", "value")}
        for name, came in ask(kernel, alone, mine).items():
            if not torch.equal(came, whole[name][rows if name == "dq" else keys]):
                raise Broken(f"{name}: sequence {i} gets other bits alone than among the others")


def nan(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into the gradient of the first query's output: it reaches that query and its keys, no other sequence."""
    arguments = example.tensors(dtype, device)
    wide, low = expected(example, arguments)
    sizes = gradients.sizes(example, on_cpu(arguments))
    first, (q, s) = next(((i, pair) for i, pair in enumerate(example.lens) if pair[0]), (0, (0, 0)))
    row = 0  # the first query of all
    spoilt = arguments["grad_out"].clone()
    spoilt[row : row + 1] = torch.nan
    answers = {name: x.detach().cpu() for name, x in ask(kernel, example, arguments | dict(grad_out=spoilt)).items()}
    begin = sum(length for _, length in example.lens[:first])
    seen = example.masks()[first][0].nonzero()[:, 0] if q else torch.zeros(0, dtype=torch.int64)
    if len(seen):
        for name, rows in (("dq", torch.tensor([row])), ("dv", begin + seen)):
            if not answers[name][rows].isnan().flatten(1).any(-1).all():
                raise Broken(f"{name}: a number, though the gradient of the output that it depends on is NaN")
    for name, others in (("dq", [(0, 0), (q, None)]), ("dk", [(0, begin), (begin + s, None)])):
        for name_ in ("dk", "dv") if name == "dk" else ("dq",):
            for some in others:
                part = slice(*some)
                try:
                    came, want, rounded = (x[name_][part] for x in (answers, wide, low))
                    gradients.assert_close(name_, came, want, rounded, sizes[name_], dtype)
                except AssertionError as error:
                    raise Broken(f"with a NaN in another sequence, {error}") from None


PROPERTIES = (
    Property(
        "call",
        "It can be called, and its output differentiated.",
        plain,
        checks.call,
        examples=0,
        landmarks=landmarks.one_small,
    ),
    Property("writes", "Inputs are not modified, nor the gradients that come in.", plain, memory.writes),
    Property(
        "mask",
        "A query has a part in the gradients of exactly those keys that it sees.",
        draws.of_any_shape,
        mask,
    ),
    Property(
        "gradients",
        "dq, dk and dv are those of the formula, within twice the error of its own type; a group of heads adds up.",
        draws.of_any_shape,
        everything,
        landmarks=landmarks.every_shape,
    ),
    Property(
        "not causal",
        "causal=False: the same.",
        with_options("causal"),
        mask,
        ("causal",),
        landmarks=landmarks.long(causal=False),
        check_landmark=everything,
    ),
    Property(
        "window",
        "A window (left, right) hides the same keys from the gradients as from the output.",
        draws.windowed,
        mask,
        ("window_size",),
        landmarks=landmarks.both(landmarks.long(window_size=(90, 0)), landmarks.of_right_sides),
        check_landmark=everything,
    ),
    Property(
        "far windows",
        "A side of a window may be any number up to 2^31 - 1, which some callers give for no limit, or -1.",
        draws.windowed,
        everything,
        ("window_size",),
        landmarks=landmarks.of_far_windows,
        examples=2,
    ),
    Property(
        "lse gradient",
        "A gradient of the log-sum-exp is used: it adds to the gradient of each score.",
        of_log_sum_exps,
        of_log_sum_exp,
        landmarks=landmarks.long(grad_lse=True),
    ),
    Property(
        "empty rows",
        "A query without a visible key has zero gradients, and adds nothing to those of others.",
        draws.odd_lengths,
        everything,
        landmarks=landmarks.without_queries,
    ),
    Property(
        "upper bounds",
        "max_query_len and max_seq_len may be larger than any length of the batch.",
        plain,
        checks.upper_bounds,
    ),
    Property(
        "edges",
        "Keys may fill a tile exactly, or be one more or less.",
        plain,
        everything,
        examples=0,
        landmarks=landmarks.edges,
    ),
    Property(
        "many sequences",
        "A batch may have many sequences, each of another length.",
        plain,
        everything,
        examples=0,
        landmarks=landmarks.many_sequences,
    ),
    Property(
        "many queries",
        "The gradients of a key add up over several tiles of queries.",
        plain,
        everything,
        examples=0,
        landmarks=landmarks.many_queries,
    ),
    Property(
        "many keys",
        "The gradient of a query adds up over several tiles of keys.",
        draws.many_keys,
        everything,
        examples=4,
        landmarks=landmarks.very_long,
    ),
    Property("range", "Scores in the hundreds do not overflow.", plain, checks.loud),
    Property(
        "padding",
        "Rows after the last sequence, and the gradients of their outputs, may hold anything: their gradients are 0.",
        draws.padded,
        memory.poisoned("padding"),
    ),
    Property(
        "strides",
        "Queries, keys and values may be views, each with a layout of its own, and with gaps between rows.",
        draws.of_any_layout,
        memory.strides,
        landmarks=landmarks.of_layouts,
    ),
    Property(
        "far rows",
        "Rows of queries, keys, values and gradients may lie more than 2^31 elements apart.",
        plain,
        memory.far_rows,
        examples=2,
    ),
    Property("last stride", "The last dimension need not be contiguous.", plain, memory.last_stride),
    Property(
        "strides of the gradient",
        "The gradient of the output may be expanded, as that of a sum is, transposed, or any other view.",
        plain,
        strides_of_grad,
        landmarks=landmarks.some,
    ),
    Property(
        "scale",
        "Any finite softmax_scale is used, also 0 and negative ones.",
        with_options("softmax_scale"),
        everything,
        ("softmax_scale",),
        landmarks=landmarks.both(landmarks.each(softmax_scale=draws.SCALES), landmarks.long(softmax_scale=0.3)),
    ),
    Property(
        "softcap",
        "The gradient of each score has the derivative of the cap as a factor.",
        with_options("softcap"),
        everything,
        ("softcap",),
        landmarks=landmarks.both(landmarks.each(softcap=draws.CAPS), landmarks.long(softcap=5.0)),
    ),
    Property(
        "alibi",
        "Weights are computed again with their ALiBi biases.",
        with_options("alibi_slopes"),
        everything,
        ("alibi_slopes",),
        landmarks=landmarks.long(alibi_slopes=True),
    ),
    Property(
        "sinks",
        "Sinks count in the weights, and have a gradient: minus the sink's weight times delta, summed over all rows.",
        with_sinks,
        everything,
        ("sinks",),
        landmarks=landmarks.of_sinks,
    ),
    Property(
        "slopes gradient",
        "Slopes of ALiBi have a gradient: minus the distance times that of each score, summed over all pairs.",
        with_options("alibi_slopes"),
        of_slopes,
        ("alibi_slopes",),
        examples=6,
        landmarks=landmarks.each(alibi_slopes=(True,)),
    ),
    Property(
        "together",
        "All options can be combined, any two of them, with any layout, and with a gradient of the log-sum-exp.",
        draws.in_combination,
        combined,
        landmarks=options.all_together,
    ),
    Property(
        "more queries than keys",
        "Queries may have positions below 0: with each option, with a causal mask and without one.",
        plain,
        everything,
        examples=0,
        landmarks=corners.before_the_first,
    ),
    Property(
        "sizes of models",
        "Heads of 32, 112 and 512 elements, values of another size than keys, 128 heads, if taken.",
        plain,
        corners.unless_refused(everything),
        examples=0,
        landmarks=corners.of_models,
        in_type=corners.of_model_sizes,
    ),
    Property(
        "other sizes",
        "Any number of KV heads, any group of heads and any head size that is a multiple of 8, if taken.",
        plain,
        corners.unless_refused(everything),
        examples=0,
        landmarks=lambda kernel: corners.of_other_sizes(kernel, 0),
        in_type=corners.of_other_sizes,
    ),
    Property(
        "process",
        "A call leaves the process as it was: random numbers, default type, threads, and how numbers are computed.",
        plain,
        corners.process,
        examples=2,
    ),
    Property(
        "options at shapes",
        "Each option holds at every number of heads and every head size.",
        plain,
        combined,
        examples=0,
        landmarks=lambda kernel: sizes.at_every_shape(kernel, 0),
        in_type=sizes.at_every_shape,
    ),
    Property(
        "one at a time",
        "A gradient is the same where no other input requires one.",
        some_queries,
        one_at_a_time,
        examples=4,
    ),
    Property(
        "deterministic",
        "deterministic=True: the same bits in every call.",
        some_queries,
        deterministic,
        ("deterministic",),
        examples=4,
        landmarks=landmarks.long(),
    ),
    Property(
        "batch invariance",
        "batch_invariant=True: the same bits, whatever else is in the batch.",
        plain,
        invariance,
        ("batch_invariant",),
        examples=8,
    ),
    Property("again", "A call does not affect later calls.", plain, checks.again),
    Property(
        "nan",
        "A NaN in the gradient of an output reaches its query and the values that it sees, and no other sequence.",
        plain,
        nan,
    ),
)
