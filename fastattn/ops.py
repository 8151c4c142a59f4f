"""The paths as operators of PyTorch, so that `torch.compile` takes a model that calls them as one graph.

A function here has the name of its path and the arguments of that path's `attention`, without `out`, because
`torch.compile` reuses memory by itself. The operator calls the path, with its checks and its errors; the compiler only
sees an opaque name and a rule for the shape of the result.

An operator takes tensors, numbers, and lists of them. So plans and options are flattened, and rebuilt inside:

    plan      `tables`, its tensors, and `sizes`, its whole numbers, in the order of its fields; -1 stands for None
    levels    the batch of a cascade, and then plan after plan in the same two lists; trees and chunks likewise
    options   an argument each
    scales    `scales`, the tensors, and `scale_numbers`, where 0 stands for none; `scale_format` is None for int8. No
              tensor and no number where there are no scales

The plan is made outside the graph, once per step, and the same graph accepts the next step's plan with other lengths.
The memo of a plan (`fastattn.kernels.replay`) is not passed on, so nothing is replayed, and on a CPU the tables are
checked in every layer. There are no gradients: PyTorch raises an error if one is requested.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from fastattn import cascade as cascade_path
from fastattn import chunked_prefill as chunked_prefill_path
from fastattn import dense as dense_path
from fastattn import differential as differential_path
from fastattn import kv_cache as kv_cache_path
from fastattn import local as local_path
from fastattn import merge as merge_path
from fastattn import mla as mla_path
from fastattn import quantized as quantized_path
from fastattn import sliding_window as sliding_window_path
from fastattn import speculative as speculative_path
from refattn.interface import (
    AttentionOptions,
    Batch,
    CascadePlan,
    ContextChunk,
    Fp8Scales,
    Int8Scales,
    Plan,
    PrefillPlan,
    TreePlan,
    Trees,
    checks,
)

PAGES = "Tensor query, Tensor key_cache, Tensor value_cache"
PLAN = "Tensor?[] tables, SymInt[] sizes"
OPTIONS = (
    "float? softmax_scale, float softcap, Tensor? alibi_slopes, Tensor? sinks, bool batch_invariant, bool alibi_sqrt"
)
SCALES = "Tensor?[] scales, float[] scale_numbers, ScalarType? scale_format"
ANSWER = "(Tensor, Tensor)"

Lists = tuple[list[Tensor | None], list[int]]
Answer = Tensor | tuple[Tensor, Tensor]


# --- the paths ---


def dense(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; the operator of `fastattn.dense.attention`."""
    answer = torch.ops.fastattn.dense(query, key, value, *_plan_lists(plan), *_options_list(options))
    return _with_lse(answer, return_lse)


def chunked_prefill(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; the operator of `fastattn.chunked_prefill.attention`."""
    pages = (query, key_cache, value_cache)
    answer = torch.ops.fastattn.chunked_prefill(*pages, *_plan_lists(plan), *_options_list(options))
    return _with_lse(answer, return_lse)


def sliding_window(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over the pages of a window; the operator of `fastattn.sliding_window.attention`."""
    pages = (query, key_cache, value_cache)
    answer = torch.ops.fastattn.sliding_window(*pages, *_plan_lists(plan), *_options_list(options))
    return _with_lse(answer, return_lse)


def local(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over the pages of chunks; the operator of `fastattn.local.attention`."""
    pages = (query, key_cache, value_cache)
    answer = torch.ops.fastattn.local(*pages, *_plan_lists(plan), *_options_list(options))
    return _with_lse(answer, return_lse)


def cascade(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: CascadePlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend level by level; the operator of `fastattn.cascade.attention`."""
    pages = (query, key_cache, value_cache)
    answer = torch.ops.fastattn.cascade(*pages, *_cascade_lists(plan), *_options_list(options))
    return _with_lse(answer, return_lse)


def speculative(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan | TreePlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from drafted tokens to their ancestors; the operator of `fastattn.speculative.attention`."""
    pages = (query, key_cache, value_cache)
    answer = torch.ops.fastattn.speculative(*pages, *_tree_lists(plan), *_options_list(options))
    return _with_lse(answer, return_lse)


def differential(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "2 2 *pages pairs d"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    lambda_full: Float[Tensor, ""],
    lambda_init: float,
    norm_weight: Float[Tensor, "2*d"] | None = None,
    norm_eps: float = 1e-5,
    return_lse: bool = False,
    scales: Fp8Scales | None = None,
) -> Float[Tensor, "t h d"] | tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend twice and subtract; the operator of `fastattn.differential.attention`."""
    more = (lambda_full, lambda_init, norm_weight, norm_eps, *_scales_lists(scales))
    call = torch.ops.fastattn.differential
    return _with_lse(call(query, cache, *_plan_lists(plan), *_options_list(options), *more), return_lse)


def mla(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: Plan | TreePlan,
    options: AttentionOptions,
    *,
    latent_rank: int,
    cache_scale: float = 1.0,
    return_lse: bool = False,
) -> Float[Tensor, "t h {latent_rank}"] | tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend from absorbed queries to latents; the operator of `fastattn.mla.attention`."""
    crossing = (*_tree_lists(plan), *_options_list(options), latent_rank, cache_scale)
    return _with_lse(torch.ops.fastattn.mla(query, cache, *crossing), return_lse)


def mla_prefill(
    query: Float[Tensor, "t h d"],
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: Float[Tensor, "n p c"],
    plan: PrefillPlan,
    options: AttentionOptions,
    *,
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    cache_scale: float = 1.0,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from new tokens to themselves and to their context; the operator of `fastattn.mla.prefill`."""
    tokens, projections = (query, latent, rope_key, cache), (key_projection, value_projection)
    lists = _join(([], [plan.block_size, _or_minus_one(plan.blocks)]), _plan_lists(plan.own))
    for chunk in plan.chunks:
        lists = _join(lists, _plan_lists(chunk.plan), ([chunk.slots], []))
    crossing = (*lists, *_options_list(options), *projections, cache_scale)
    return _with_lse(torch.ops.fastattn.mla_prefill(*tokens, *crossing), return_lse)


def quantized(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: Plan | CascadePlan | TreePlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    scales: Fp8Scales | Int8Scales,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages of codes; the operator of `fastattn.quantized.attention`."""
    pages = (query, key_cache, value_cache)
    of_plan = _cascade_lists(plan) if isinstance(plan, CascadePlan) else _tree_lists(plan)
    lists = _join(([], [int(isinstance(plan, CascadePlan))]), of_plan)
    crossing = (*lists, *_options_list(options), *_scales_lists(scales))
    return _with_lse(torch.ops.fastattn.quantized(*pages, *crossing), return_lse)


# --- what goes with them ---


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine partial answers; the operator of `fastattn.merge.merge`."""
    answer: tuple[Tensor, Tensor] = torch.ops.fastattn.merge(outs, lses)
    return answer


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of an answer; the operator of `fastattn.merge.add_sinks`."""
    answer: tuple[Tensor, Tensor] = torch.ops.fastattn.add_sinks(out, lse, sinks)
    return answer


def write(
    key: Shaped[Tensor, "rows hk d"],
    value: Shaped[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write new tokens into the pool; the operator of `fastattn.kv_cache.write`."""
    torch.ops.fastattn.write(key, value, key_cache, value_cache, slot_mapping)


def write_differential(
    key: Shaped[Tensor, "rows hk d"],
    value: Shaped[Tensor, "rows hk d"],
    cache: Shaped[Tensor, "2 2 n p pairs d"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    scales: Fp8Scales | None = None,
) -> None:
    """Write pairs of heads into the pool; the operator of `fastattn.differential.write`."""
    torch.ops.fastattn.write_differential(key, value, cache, slot_mapping, *_scales_lists(scales))


def write_latents(
    latent: Shaped[Tensor, "rows r"],
    rope_key: Shaped[Tensor, "rows rope"],
    cache: Shaped[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    cache_scale: float = 1.0,
) -> None:
    """Write latents and rotary keys into the pool; the operator of `fastattn.mla.write`."""
    torch.ops.fastattn.write_latents(latent, rope_key, cache, slot_mapping, cache_scale)


def write_quantized(
    key: Float[Tensor, "rows hk d"],
    value: Float[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantise new tokens and write them into the pool; the operator of `fastattn.quantized.write`."""
    tensors, numbers, kind = _scales_lists(scales)
    token_scales = None
    if isinstance(scales, Int8Scales):  # written to, so an argument of its own
        token_scales, tensors = tensors[0], [None, *tensors[1:]]
    tokens = (key, value, key_cache, value_cache, slot_mapping)
    torch.ops.fastattn.write_quantized(*tokens, token_scales, tensors, numbers, kind)


# --- plans, options and scales, taken apart and put together ---


def _with_lse(answer: tuple[Tensor, Tensor], return_lse: bool) -> Answer:
    return answer if return_lse else answer[0]


def _or_minus_one(number: int | None) -> int:
    return -1 if number is None else number


def _or_none(number: int) -> int | None:
    return None if number == -1 else number


def _join(*parts: Lists) -> Lists:
    return [x for tables, _ in parts for x in tables], [x for _, sizes in parts for x in sizes]


def _batch_lists(batch: Batch) -> Lists:
    tables = [batch.cu_seqlens_q, batch.seq_lens, batch.block_table]
    guesses = [_or_minus_one(batch.num_keys), _or_minus_one(batch.num_tokens)]
    return tables, [batch.max_query_len, batch.max_seq_len, *guesses]


def _plan_lists(plan: Plan) -> Lists:
    tables: list[Tensor | None] = [plan.first_keys, plan.positions, plan.sequences]
    left, right = plan.window_size
    return _join(_batch_lists(plan.batch), (tables, [_or_minus_one(plan.block_size), int(plan.causal), left, right]))


def _cascade_lists(plan: CascadePlan) -> Lists:
    return _join(_batch_lists(plan.batch), *map(_plan_lists, plan.levels))


def _tree_lists(plan: Plan | TreePlan) -> Lists:
    if isinstance(plan, Plan):
        return _plan_lists(plan)
    trees: list[Tensor | None] = [plan.trees.parents, plan.trees.lens, plan.depths, plan.ancestors]
    return _join(_plan_lists(plan.whole), _plan_lists(plan.prefix), (trees, []))


def _batch(tables: Iterator[Tensor | None], sizes: Iterator[int]) -> Batch:
    cu_seqlens_q, seq_lens, block_table = islice(tables, 3)
    assert cu_seqlens_q is not None and seq_lens is not None
    max_query_len, max_seq_len, num_keys, num_tokens = islice(sizes, 4)
    guesses = (_or_none(num_keys), _or_none(num_tokens))
    return Batch(cu_seqlens_q, seq_lens, block_table, max_query_len, max_seq_len, *guesses)


def _plan(tables: Iterator[Tensor | None], sizes: Iterator[int]) -> Plan:
    batch = _batch(tables, sizes)
    block_size, causal, left, right = islice(sizes, 4)
    return Plan(batch, _or_none(block_size), bool(causal), (left, right), *islice(tables, 3))


def _cascade_plan(tables: Iterator[Tensor | None], sizes: Iterator[int]) -> CascadePlan:
    batch, levels = _batch(tables, sizes), []
    for first in sizes:
        levels.append(_plan(tables, _with_first(first, sizes)))
    return CascadePlan(batch, tuple(levels))


def _tree_plan(tables: Iterator[Tensor | None], sizes: Iterator[int]) -> Plan | TreePlan:
    whole = _plan(tables, sizes)
    for first in sizes:  # nothing more of a plan without trees
        prefix = _plan(tables, _with_first(first, sizes))
        parents, lens, depths, ancestors = tables
        assert parents is not None and lens is not None and depths is not None and ancestors is not None
        return TreePlan(whole, prefix, Trees(parents, lens), depths, ancestors)
    return whole


def _prefill_plan(tables: Iterator[Tensor | None], sizes: Iterator[int]) -> PrefillPlan:
    block_size, blocks = islice(sizes, 2)
    own, chunks = _plan(tables, sizes), []
    for first in sizes:
        plan = _plan(tables, _with_first(first, sizes))
        (slots,) = islice(tables, 1)
        assert slots is not None
        chunks.append(ContextChunk(plan, slots))
    return PrefillPlan(own, tuple(chunks), block_size, _or_none(blocks))


def _with_first(first: int, others: Iterator[int]) -> Iterator[int]:
    yield first
    yield from others


def _options_list(
    options: AttentionOptions,
) -> tuple[float | None, float, Tensor | None, Tensor | None, bool, bool]:
    biases = (options.alibi_slopes, options.sinks)
    return options.softmax_scale, options.softcap, *biases, options.batch_invariant, options.alibi_sqrt


def _scales_lists(
    scales: Fp8Scales | Int8Scales | None,
) -> tuple[list[Tensor | None], list[float], torch.dtype | None]:
    if scales is None:
        return [], [], None
    if isinstance(scales, Int8Scales):
        return [scales.key, scales.value], [], None
    parts = (scales.key, scales.value, scales.query)
    tensors = [x if isinstance(x, Tensor) else None for x in parts]
    return tensors, [0.0 if x is None or isinstance(x, Tensor) else x for x in parts], scales.format


def _scales(tensors: list[Tensor | None], numbers: list[float], kind: torch.dtype | None) -> Any:
    if not tensors:
        return None
    if kind is None:
        token_scales, channel_scales = tensors
        assert token_scales is not None
        return Int8Scales(token_scales, channel_scales)
    key, value, query = (number or tensor for tensor, number in zip(tensors, numbers, strict=True))
    assert key is not None and value is not None
    return Fp8Scales(key, value, query, kind)


# --- the operators ---


def _define(
    name: str,
    arguments: str,
    compute: Callable[..., Any],
    shape: Callable[..., Any],
    *,
    returns: str = ANSWER,
    writes_to: Sequence[str] = (),
) -> None:
    schema = f"({arguments}) -> {returns}"
    operator = torch.library.custom_op(f"fastattn::{name}", compute, mutates_args=writes_to, schema=schema)
    operator.register_fake(shape)


def _answer_like(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return memory of the shape and type of an answer, for the compiler, which fills in nothing."""
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(*query.shape[:2], width, dtype=checks.type_of_outputs(query, None))
    return out, query.new_empty(query.shape[:2], dtype=kind)


def _define_path(
    name: str, tensors: str, attention: Callable[..., Any], read: Callable[..., Any], width: Callable[..., int]
) -> None:
    """Define the operator of a path that takes `tensors`, a plan and options, and no more."""
    count = tensors.count("Tensor")

    def compute(*arguments: Any) -> Any:
        tables, sizes, *options = arguments[count:]
        plan = read(iter(tables), iter(sizes))
        return attention(*arguments[:count], plan, AttentionOptions(*options), return_lse=True)

    def shape(*arguments: Any) -> Any:
        return _answer_like(arguments[0], width(*arguments[:count]))

    _define(name, f"{tensors}, {PLAN}, {OPTIONS}", compute, shape)


def _value_width(query: Tensor, key: Tensor, value: Tensor) -> int:
    return value.shape[-1]


_define_path("dense", "Tensor query, Tensor key, Tensor value", dense_path.attention, _plan, _value_width)
_define_path("chunked_prefill", PAGES, chunked_prefill_path.attention, _plan, _value_width)
_define_path("sliding_window", PAGES, sliding_window_path.attention, _plan, _value_width)
_define_path("local", PAGES, local_path.attention, _plan, _value_width)
_define_path("speculative", PAGES, speculative_path.attention, _tree_plan, _value_width)
_define_path("cascade", PAGES, cascade_path.attention, _cascade_plan, _value_width)


def _differential(
    query: Tensor, cache: Tensor, tables: list[Tensor | None], sizes: list[int], *options_and_more: Any
) -> Any:
    *options, lambda_full, lambda_init, norm_weight, norm_eps, tensors, numbers, kind = options_and_more
    return differential_path.attention(
        query,
        cache,
        _plan(iter(tables), iter(sizes)),
        AttentionOptions(*options),
        lambda_full=lambda_full,
        lambda_init=lambda_init,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        return_lse=True,
        scales=_scales(tensors, numbers, kind),
    )


_define(
    "differential",
    f"Tensor query, Tensor cache, {PLAN}, {OPTIONS}, "
    f"Tensor lambda_full, float lambda_init, Tensor? norm_weight, float norm_eps, {SCALES}",
    _differential,
    lambda query, *others: _answer_like(query, query.shape[-1]),
)


def _mla(query: Tensor, cache: Tensor, tables: list[Tensor | None], sizes: list[int], *options_and_more: Any) -> Any:
    *options, latent_rank, cache_scale = options_and_more
    plan, of_cache = _tree_plan(iter(tables), iter(sizes)), dict(latent_rank=latent_rank, cache_scale=cache_scale)
    return mla_path.attention(query, cache, plan, AttentionOptions(*options), **of_cache, return_lse=True)


_define(
    "mla",
    f"Tensor query, Tensor cache, {PLAN}, {OPTIONS}, SymInt latent_rank, float cache_scale",
    _mla,
    lambda query, *others: _answer_like(query, others[-2]),
)


def _mla_prefill(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    cache: Tensor,
    tables: list[Tensor | None],
    sizes: list[int],
    *options_and_more: Any,
) -> Any:
    *options, key_projection, value_projection, cache_scale = options_and_more
    return mla_path.prefill(
        query,
        latent,
        rope_key,
        cache,
        _prefill_plan(iter(tables), iter(sizes)),
        AttentionOptions(*options),
        key_projection=key_projection,
        value_projection=value_projection,
        cache_scale=cache_scale,
        return_lse=True,
    )


_define(
    "mla_prefill",
    f"Tensor query, Tensor latent, Tensor rope_key, Tensor cache, {PLAN}, {OPTIONS}, "
    "Tensor key_projection, Tensor value_projection, float cache_scale",
    _mla_prefill,
    lambda query, *others: _answer_like(query, others[-2].shape[1]),
)


def _quantized(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: list[Tensor | None],
    sizes: list[int],
    *options_and_scales: Any,
) -> Any:
    *options, tensors, numbers, kind = options_and_scales
    is_cascade, *others = sizes
    make_plan = _cascade_plan if is_cascade else _tree_plan
    return quantized_path.attention(
        query,
        key_cache,
        value_cache,
        make_plan(iter(tables), iter(others)),
        AttentionOptions(*options),
        scales=_scales(tensors, numbers, kind),
        return_lse=True,
    )


_define(
    "quantized",
    f"{PAGES}, {PLAN}, {OPTIONS}, {SCALES}",
    _quantized,
    lambda query, key_cache, value_cache, *others: _answer_like(query, value_cache.shape[-1]),
)


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = merge_path.merge(outs, lses)
    return out, lse.clone() if lse is lses[0] else lse  # an operator returns memory of its own


_define("merge", "Tensor[] outs, Tensor[] lses", _merge, lambda outs, lses: (outs[0].clone(), lses[0].clone()))
_define(
    "add_sinks",
    "Tensor out, Tensor lse, Tensor sinks",
    merge_path.add_sinks,
    lambda out, lse, sinks: (out.clone(), lse.clone()),
)

TOKENS = "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping"


def _nothing(*arguments: Any) -> None:
    """Return what a write does."""


_define("write", TOKENS, kv_cache_path.write, _nothing, returns="()", writes_to=("key_cache", "value_cache"))
_define(
    "write_differential",
    f"Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping, {SCALES}",
    lambda *tokens_and_scales: differential_path.write(
        *tokens_and_scales[:-3], scales=_scales(*tokens_and_scales[-3:])
    ),
    _nothing,
    returns="()",
    writes_to=("cache",),
)
_define(
    "write_latents",
    "Tensor latent, Tensor rope_key, Tensor(a!) cache, Tensor slot_mapping, float cache_scale",
    lambda *tokens_and_scale: mla_path.write(*tokens_and_scale[:-1], cache_scale=tokens_and_scale[-1]),
    _nothing,
    returns="()",
    writes_to=("cache",),
)


def _write_quantized(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    token_scales: Tensor | None,
    tensors: list[Tensor | None],
    numbers: list[float],
    kind: torch.dtype | None,
) -> None:
    tensors = tensors if token_scales is None else [token_scales, *tensors[1:]]
    scales = _scales(tensors, numbers, kind)
    quantized_path.write(key, value, key_cache, value_cache, slot_mapping, scales=scales)


_define(
    "write_quantized",
    f"{TOKENS}, Tensor(c!)? token_scales, {SCALES}",
    _write_quantized,
    _nothing,
    returns="()",
    writes_to=("key_cache", "value_cache", "token_scales"),
)
