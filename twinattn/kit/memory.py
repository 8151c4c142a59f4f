"""Properties of memory: strides, offsets, `out=`, and memory that may not be read or written."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from twinattn.kit import landmarks, packed
from twinattn.kit.draws import draw_example, plain
from twinattn.kit.example import PATHS, Arguments, Example, poison
from twinattn.kit.hold import ask, hold
from twinattn.kit.kernel import LARGE, Kernel, untouched
from twinattn.kit.property import ATTENDS, Broken, Check, Draw, NotClaimedError, Property, outputs_alone

PER_HEAD = ("alibi_slopes", "sinks", "norm_weight", "lambda_full")  # their strides are asked of by `option_strides`
SIDE_BY_SIDE = ("first_visible", "last_visible")  # tables of a plan: kernels read them in place


def poisoned(name: str) -> Check:
    """Return a check that poison in a part of the hidden memory does not change the outputs."""

    def check(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
        arguments = example.tensors(dtype, device)
        hold(example, arguments, ask(kernel, example, poison(example, arguments, name)))

    return check


def strides(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with tensors in one of the layouts, and a block table that is a view of a larger one."""
    arguments, layout = example.tensors(dtype, device), example.options.get("layout", 1)
    arguments = expanded(arguments, layout) if layout in landmarks.EXPANDED else laid_out(arguments, layout)
    if "states" in arguments:
        arguments["states"] = with_gap(arguments["states"]) if example.seed % 2 else outside_in(arguments["states"])
        for word in ("log_decay", "beta"):  # [t, hv], as they come from a projection of all heads
            arguments[word] = arguments[word].transpose(0, 1).contiguous().transpose(0, 1)
    table = arguments["batch"].block_table if "batch" in arguments else None
    if table is not None:  # the first columns of a larger table, as in a server
        table = torch.cat([table, torch.full_like(table, -1)], dim=1)[:, : table.shape[1]]
        arguments["batch"] = replace(arguments["batch"], block_table=table)
    if "lses" in arguments:  # each part has another layout, in some batches the first has none
        ways, first = (with_gap, outside_in, torch.clone), example.seed
        arguments["lses"] = [x.T.contiguous().T if (i + first) % 2 == 0 else x for i, x in enumerate(arguments["lses"])]
        arguments["outs"] = [ways[(i + first) % 3](x) for i, x in enumerate(arguments["outs"])]
    hold(example, arguments, ask(kernel, example, arguments))


def laid_out(arguments: Arguments, layout: int) -> Arguments:
    """Return the arguments with another memory layout, one of `landmarks.LAYOUTS`.

    Args:
        arguments: of a call.
        layout: 0: unchanged; 1: heads outside tokens; 2: a gap after each row, or page of latents; 3: heads outside
            tokens for queries and keys only; 4: heads outside tokens for values only, queries are a view of a fused
            projection; 5: pages of keys and of values alternate in one pool.
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
            is_of_latents = word == "cache" and arguments[word].ndim == 3  # latents have no heads
            changed[word] = with_gap(arguments[word]) if is_of_latents else way(arguments[word])
    pools = [arguments[word] for word in ("key_cache", "value_cache") if word in arguments]
    if layout == 5 and pools and pools[0].shape == pools[1].shape:
        both = torch.stack(pools, dim=1)
        changed |= dict(key_cache=both[:, 0], value_cache=both[:, 1])
    return changed


def expanded(arguments: Arguments, layout: int) -> Arguments:
    """Return the arguments with inputs that repeat numbers with a stride of 0, one of `landmarks.EXPANDED`.

    Args:
        arguments: of a call.
        layout: 6: the keys of a head are those of all, and a query row; 7: the values of a head, and its queries; 8: an
            element of a query or of a value is all of it.
    """
    ways = {
        "query": (_over(0), _over(-2), _over(-1)),
        "key": (_over(-2), None, None),
        "value": (None, _over(-2), _over(-1)),
        "scores": (_over(0), None, _over(0)),
        "grad_out": (_over(0), _over(-2), _over(-1)),
    }
    changed = dict(arguments)
    for word in ("query", "key", "value", "key_cache", "value_cache", "scores", "grad_out"):
        is_pool, way = word.endswith("_cache"), ways[word.removesuffix("_cache")][layout - landmarks.EXPANDED[0]]
        is_written = is_pool and "slot_mapping" in arguments
        if word in arguments and way is not None and not is_written:
            changed[word] = way(arguments[word])
    return changed


def _over(dim: int) -> Callable[[Tensor], Tensor]:
    """Return a function that repeats the first elements of a dimension, with a stride of 0."""
    return lambda x: x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x)


def outside_in(x: Tensor) -> Tensor:
    """Return a view of the same shape with heads outside tokens in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def with_gap(x: Tensor) -> Tensor:
    """Return a view with a gap after each group of the last two dimensions: a row, a page of latents, a state."""
    return torch.cat([x, torch.full_like(x, 0.5)], dim=-2 if x.ndim != 3 else 1).narrow(
        -2 if x.ndim != 3 else 1, 0, x.shape[-2]
    )


def last_stride(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with tensors that are not contiguous in their last dimension, tables of blocks and slots included."""
    arguments = example.tensors(dtype, device)
    for word, x in arguments.items():
        if isinstance(x, list) and x and isinstance(x[0], Tensor):
            arguments[word] = [every_other(y) for y in x]
        elif isinstance(x, Tensor) and word not in (*PER_HEAD, *SIDE_BY_SIDE, *PATHS[example.path].in_place):
            arguments[word] = every_other(x)
    if "trees" in arguments:
        trees = arguments["trees"]
        arguments["trees"] = replace(trees, parents=every_other(trees.parents))
    if "batch" in arguments and arguments["batch"].block_table is not None:
        batch = arguments["batch"]
        arguments["batch"] = replace(batch, block_table=every_other(batch.block_table))
    hold(example, arguments, ask(kernel, example, arguments))


def every_other(x: Tensor) -> Tensor:
    """Return a view with a gap after each element; packed rows stay contiguous."""
    return x if x.dtype == torch.uint8 else torch.stack([x, torch.ones_like(x)], dim=-1)[..., 0]


def option_strides(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with per-head options that are views: every other element of a larger tensor; one number expanded."""
    for lay_out in (every_other, _one_for_all):
        arguments = example.tensors(dtype, device)
        for name in ("alibi_slopes", "sinks", "norm_weight", "scale"):
            if isinstance(arguments.get(name), Tensor):
                arguments[name] = lay_out(arguments[name])
        if "scales" in arguments:
            scales = arguments["scales"]
            tensors = {name: x for name, x in scales.by_name().items() if isinstance(x, Tensor)}
            arguments["scales"] = replace(scales, **{name: lay_out(x) for name, x in tensors.items()})
        hold(example, arguments, ask(kernel, example, arguments))


def _one_for_all(x: Tensor) -> Tensor:
    """Return the first number expanded to all heads."""
    return x.flatten()[:1].expand(x.numel()).view(x.shape) if x.ndim == 1 else x[:1, :1].expand_as(x)


def far_rows(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with rows of tokens that span more than 2^31 elements, in memory that is mostly never written."""
    arguments = example.tensors(dtype, device)
    for word in ("query", "key", "value", "scores", "grad_out"):
        if word in arguments:
            x = arguments[word]
            stride = (LARGE // max(1, len(x) - 1) // 4096 + 2) * 4096
            memory = untouched(stride * max(0, len(x) - 1) + x[:1].numel() + 1, x.dtype, device)
            arguments[word] = memory.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)
    hold(example, arguments, ask(kernel, example, arguments))
    kernel.calls.clear()


def far_blocks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare over the last blocks of a large pool, in memory that is mostly never written."""
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
    kernel.calls[-1] = arguments | {"first_block": first}, answers  # known mistakes are tried on the small pool
    hold(example, arguments, answers)


def offsets(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare over a pool of more than 2^31 elements, in memory that is mostly never written."""
    arguments = example.tensors(dtype, device)
    if device != "cpu" and not PATHS[example.path].attends:
        raise NotClaimedError("is asked on a CPU only, as a pool that is written is copied before")
    (first, before), *_ = pools = PATHS[example.path].pools or (("states", 0),)
    n = max(2, arguments[first].shape[before])
    stride = (LARGE // (n - 1) // 4096 + 2) * 4096  # keeps pages aligned
    pages = [math.prod(arguments[word].shape[before + 1 :]) for word, _ in pools]
    room = stride * (n - 1) + sum(max(2**18, page) for page in pages)
    outer = math.prod(arguments[first].shape[:before])
    memory = untouched(room + outer * max(pages), arguments[first].dtype, device)
    begin = 0
    for word, _ in pools:
        pool = arguments[word]
        shape, page = pool.shape[before + 1 :], math.prod(pool.shape[before + 1 :])
        outside = [size * page for size in _strides_of(pool.shape[:before])]  # contiguous
        view = memory[begin:].as_strided(pool.shape, (*outside, stride, *_strides_of(shape)))
        view.copy_(pool)
        arguments[word] = view
        begin += max(2**18, page)
    hold(example, arguments, ask(kernel, example, arguments))
    kernel.calls.clear()


def _strides_of(shape: torch.Size) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


@outputs_alone
def writes(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Call the kernel: `ask` compares its inputs, tables and options included, before and after."""
    ask(kernel, example, example.tensors(dtype, device))


@outputs_alone
def out_memory(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Pass a slice of a larger tensor for the output: it is written, and nothing around it."""
    arguments = example.tensors(dtype, device)
    t, (h, _), dv = example.num_tokens, example.heads, example.value_size
    memory = torch.full((t + 2, h, dv), 7.0, dtype=dtype, device=device)
    answers = ask(kernel, example, arguments, out=memory[1:-1])
    if not (memory[0] == 7).all() or not (memory[-1] == 7).all():
        raise Broken("out: memory before or after the given one was written")
    hold(example, arguments, answers | dict(out=memory[1:-1]), only=("out",))
    if answers["out"].data_ptr() != memory[1:-1].data_ptr():
        raise Broken("out: the output that is returned is not the memory that was given")


@outputs_alone
def strided_out(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Pass a strided view for the output: heads outside tokens, or a gap after each row, or after each element."""
    arguments = example.tensors(dtype, device)
    t, (h, _), dv = example.num_tokens, example.heads, example.output_size
    memory = torch.full((h, t, dv) if example.seed % 2 else (t, 2 * h, dv), 7.0, dtype=dtype, device=device)
    view = memory.transpose(0, 1) if example.seed % 2 else memory[:, :h]
    answers = ask(kernel, example, arguments, out=view)
    hold(example, arguments, answers | dict(out=view), only=("out",))
    if not example.seed % 2 and not (memory[:, h:] == 7).all():
        raise Broken("out: memory between the rows of the given one was written")
    if "last stride" not in kernel.claims.not_claimed:
        memory = torch.full((t, h, dv, 2), 7.0, dtype=dtype, device=device)
        answers = ask(kernel, example, arguments, out=memory[..., 0])
        hold(example, arguments, answers | dict(out=memory[..., 0]), only=("out",))
        if not (memory[..., 1] == 7).all():
            raise Broken("out: memory between the elements of the given one was written")


@outputs_alone
def out_over_query(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Pass the query as memory for the output: it is overwritten after it has been read."""
    if example.output_size != example.head_size:
        raise NotClaimedError("has outputs of another size than queries")
    arguments = example.tensors(dtype, device)
    shared = arguments["query"].clone()
    answers = ask(kernel, example, arguments | dict(query=shared), out=shared)
    kernel.calls[-1] = arguments, kernel.calls[-1][1]
    try:
        hold(example, arguments, answers | dict(out=shared), only=("out",))
    except Broken as error:
        raise Broken(f"with the memory of the query for the output, {error}") from None


def of_heads(draw: Draw, kernel: Kernel) -> Example:
    """Draw a batch with all options that have one number per head."""
    options: Arguments = {name: True for name in ("alibi_slopes", "sinks") if kernel.takes(name)}
    if kernel.path == "quantized":
        options["scales_of"] = draw(st.sampled_from(("heads", "sequences")))
    return draw_example(draw, kernel, options=options)


PROPERTIES = (
    Property(
        "strides of options",
        "Slopes, sinks, scales and weights of heads may be views with any strides.",
        of_heads,
        option_strides,
        paths=ATTENDS,
        examples=6,
    ),
    Property(
        "far rows",
        "Rows of queries, keys and values may lie more than 2^31 elements apart.",
        plain,
        far_rows,
        paths=(*ATTENDS, "select", "kv_cache", "recurrent"),
        examples=2,
    ),
    Property(
        "out over the query",
        "out= may be the memory of the query: it is written once the query has been read.",
        plain,
        out_over_query,
        ("out",),
        ATTENDS,
        landmarks=landmarks.some,
    ),
)
