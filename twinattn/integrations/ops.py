"""The paths as operators of PyTorch, so that `torch.compile` takes a model that calls them as one graph.

A function here has the name of its path and the arguments of that path's `attention`, without `out`, because
`torch.compile` reuses memory by itself. The operator calls the path, with its checks and its errors; the compiler only
sees an opaque name and a rule for the shape of the result.

An operator takes tensors, numbers, and lists of them. So plans and options are flattened, and rebuilt inside:

    plan      `tables`, its tensors, and `sizes`, its whole numbers, after the number of its type; -1 stands for None
    levels    plan after plan in the same two lists, and then the batch of the cascade; trees and chunks likewise
    states    those of a plan of states are `state_tables` and `state_sizes`; its operators write to `out`
    options   an argument each
    scales    `scales`, the tensors, and `scale_numbers`, where 0 stands for none; `scale_format` is None for int8. No
              tensor and no number where there are no scales

The plan is made outside the graph, once per step, and the same graph accepts the next step's plan with other lengths.
What a compiler sees of a plan it compiles for: its type, which tables it has, sizes of 0 and 1. Of `prepare(plan)` it
sees a number, by which the operator finds the plan: one graph for all of them. A plan that is not prepared counts
against the compiler's limit of graphs, and a warning says so before that is reached.

Of lists, the operator remembers the last plans that it put together, by their tensors: a step's later layers get the
same one, with its memo (`fastattn.kernels.replay`), and replay what the first one worked out. A tensor that was written
since is not the same. There are no gradients: PyTorch raises an error if one is requested.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, get_args, get_origin
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch._guards import CompileContext, CompileId

from fastattn import cascade as cascade_path
from fastattn import chunked_prefill as chunked_prefill_path
from fastattn import differential as differential_path
from fastattn import kv_cache as kv_cache_path
from fastattn import local as local_path
from fastattn import merge as merge_path
from fastattn import mla as mla_path
from fastattn import quantized as quantized_path
from fastattn import recurrent as recurrent_path
from fastattn import sliding_window as sliding_window_path
from fastattn import speculative as speculative_path
from fastattn import varlen as varlen_path
from fastattn.kernels import problem
from refattn import scales
from refattn.batch import Batch
from refattn.checks import tensors_of
from refattn.options import PER_HEAD, AttentionOptions, RecurrentOptions
from refattn.plan import CascadePlan, ContextChunk, Plan, PrefillPlan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan
from refattn.trees import TreePlan, Trees

PLANS = (Plan, CascadePlan, TreePlan, PrefillPlan)  # a list of sizes begins with an index into these
TABLES = tensors_of(Plan)  # fields of a plan, beside its batch
SIZES = {one.name: one.type for one in fields(Plan) if one.init and one.name not in ("batch", *TABLES)}
OF_BATCH = 3, 4  # tensors and whole numbers of a `Batch`
REMEMBERED = 16  # plans: a step has one for each kind of layer

Answer = Tensor | tuple[Tensor, Tensor]
AnyPlan = Plan | CascadePlan | TreePlan | PrefillPlan
Lists = tuple[list[Tensor | None], list[int]]


# --- plans, for a graph ---


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan as a compiled graph takes it; from `prepare`.

    Attributes:
        plan: any plan, which the graph does not look into.
        number: by which the operators find it, int64 on the CPU.
    """

    plan: AnyPlan | StatePlan
    number: Tensor


_prepared: WeakValueDictionary[int, PreparedPlan] = WeakValueDictionary()
_numbers = count(1)


def prepare(plan: AnyPlan | StatePlan) -> PreparedPlan:
    """Return a plan for which no graph is compiled anew, whatever its type, its tables and its lengths.

    Call it outside the graph, once per step, and hold on to what it returns while graphs run. The operators read the
    plan's tables when they run; a graph that writes to those itself has to take the plan as it is.

    Args:
        plan: of any path that has an operator.

    Raises:
        ValueError: if it is none.
    """
    if type(plan) is not StatePlan:
        _check_type(plan)
    number = next(_numbers)
    prepared = PreparedPlan(plan, torch.tensor(number, device="cpu"))
    _prepared[number] = prepared
    return prepared


def flatten(plan: AnyPlan) -> Lists:
    """Return the tables and the sizes of a plan, as the operators in `torch.ops.fastattn` take them.

    For `torch.export`, which takes tensors and whole numbers. The order is that of this module's docstring; plans of
    one kind with the same tables have lists of the same length.

    Args:
        plan: of any path that has an operator.

    Raises:
        ValueError: if it is none.
    """
    return _plan_lists(plan)


# --- the paths ---


def varlen(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan | PreparedPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; the operator of `fastattn.varlen.attention`."""
    return _attend("varlen", (query, key, value), plan, options, return_lse)


def _over_pages(name: str) -> Callable[..., Answer]:
    """Return the function of a path over pages of keys and values."""

    def attention(
        query: Float[Tensor, "t h d"],
        key_cache: Float[Tensor, "n p hk d"],
        value_cache: Float[Tensor, "n p hk dv"],
        plan: Plan | CascadePlan | TreePlan | PreparedPlan,
        options: AttentionOptions = AttentionOptions(),
        *,
        return_lse: bool = False,
    ) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
        return _attend(name, (query, key_cache, value_cache), plan, options, return_lse)

    attention.__name__ = attention.__qualname__ = name
    attention.__doc__ = f"Attend over pages; the operator of `fastattn.{name}.attention`."
    return attention


chunked_prefill = _over_pages("chunked_prefill")
sliding_window = _over_pages("sliding_window")
local = _over_pages("local")
cascade = _over_pages("cascade")
speculative = _over_pages("speculative")


def differential(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "2 2 *pages pairs d"],
    plan: Plan | PreparedPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    lambda_full: Float[Tensor, ""],
    lambda_init: float,
    norm_weight: Float[Tensor, "2*d"] | None = None,
    norm_eps: float = 1e-5,
    norm: None = None,
    return_lse: bool = False,
    scales: Fp8Scales | None = None,
) -> Float[Tensor, "t h d"] | tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend twice and subtract; the operator of `fastattn.differential.attention`.

    Raises:
        NotImplementedError: for a norm of its own, as an operator takes no function.
    """
    if norm is not None:
        raise NotImplementedError(
            "norm: an operator takes no function; norm_weight has the norm by the root mean square"
        )
    more = (lambda_full, lambda_init, norm_weight, norm_eps, *_scales_lists(scales))
    return _attend("differential", (query, cache), plan, options, return_lse, *more)


def mla(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "n p c"],
    plan: Plan | TreePlan | PreparedPlan,
    options: AttentionOptions,
    *,
    latent_rank: int,
    cache_scale: float = 1.0,
    query_scale: float | None = None,
    fp8_weights: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "t h {latent_rank}"] | tuple[Float[Tensor, "t h {latent_rank}"], Float[Tensor, "t h"]]:
    """Attend from absorbed queries to latents; the operator of `fastattn.mla.attention`."""
    more = (latent_rank, cache_scale, query_scale, fp8_weights)
    return _attend("mla", (query, cache), plan, options, return_lse, *more)


def mla_prefill(
    query: Float[Tensor, "t h d"],
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: Shaped[Tensor, "n p c"],
    plan: PrefillPlan | PreparedPlan,
    options: AttentionOptions,
    *,
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    cache_scale: float = 1.0,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from new tokens to themselves and to their context; the operator of `fastattn.mla.prefill`."""
    tensors, more = (query, latent, rope_key, cache), (key_projection, value_projection, cache_scale)
    return _attend("mla_prefill", tensors, plan, options, return_lse, *more)


def quantized(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: Plan | CascadePlan | TreePlan | PreparedPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    scales: Fp8Scales | Int8Scales,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages of quantized values; the operator of `fastattn.quantized.attention`."""
    return _attend("quantized", (query, key_cache, value_cache), plan, options, return_lse, *_scales_lists(scales))


def recurrent(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan | PreparedPlan,
    options: RecurrentOptions = RecurrentOptions(),
) -> Float[Tensor, "t hv dv"]:
    """Fold tokens into states, in place; the operator of `fastattn.recurrent.attention`."""
    out = value.new_empty(value.shape)
    tokens = query, key, value, log_decay, beta
    _fold("recurrent", (*tokens, states, out), plan, options.scale, options.delta)
    return out


def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan | PreparedPlan,
    *,
    bias: Float[Tensor, "c"] | None = None,
    silu: bool = True,
) -> Float[Tensor, "t c"]:
    """Mix tokens with the inputs before them; the operator of `fastattn.recurrent.convolve`."""
    out = inputs.new_empty(inputs.shape)
    _fold("convolve", (inputs, weight, states, out), plan, bias, silu)
    return out


# --- what goes with them ---


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine partial outputs; the operator of `fastattn.merge.merge`."""
    answer: tuple[Tensor, Tensor] = torch.ops.fastattn.merge(outs, lses)
    return answer


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of an output; the operator of `fastattn.merge.add_sinks`."""
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
    """Quantize new tokens and write them into the pool; the operator of `fastattn.quantized.write`."""
    tensors, numbers, kind = _scales_lists(scales)
    token_scales = None
    if isinstance(scales, Int8Scales):  # written to, so an argument of its own
        token_scales, tensors = tensors[0], [None, *tensors[1:]]
    tokens = (key, value, key_cache, value_cache, slot_mapping)
    torch.ops.fastattn.write_quantized(*tokens, token_scales, tensors, numbers, kind)


def _attend(
    name: str,
    tensors: Sequence[Tensor],
    plan: AnyPlan | PreparedPlan,
    options: AttentionOptions,
    return_lse: bool,
    *more: Any,
) -> Any:
    """Call the operator of a path, with its plan and its options taken apart."""
    given = (getattr(options, name) for name in OPTIONS)
    if isinstance(plan, PreparedPlan):
        answer = getattr(torch.ops.fastattn, name + BY_NUMBER)(*tensors, plan.number, *given, *more)
    else:
        answer = getattr(torch.ops.fastattn, name)(*tensors, *_plan_lists(plan), *given, *more)
    return answer if return_lse else answer[0]


def _fold(name: str, tensors: Sequence[Tensor], plan: StatePlan | PreparedPlan, *more: Any) -> None:
    """Call the operator of a path over states, with its plan taken apart."""
    if isinstance(plan, PreparedPlan):
        getattr(torch.ops.fastattn, name + BY_NUMBER)(*tensors, plan.number, *more)
    else:
        getattr(torch.ops.fastattn, name)(*tensors, *_state_lists(plan), *more)


# --- plans and scales, taken apart and put together ---


def _plan_lists(plan: AnyPlan) -> Lists:
    """Return the tables and the sizes of a plan: first those of the plans in it, then its own.

    Raises:
        ValueError: if it is none.
    """
    _check_type(plan)
    plans: Sequence[Any] = [plan]
    own: Lists = ([], [])
    if isinstance(plan, CascadePlan):
        plans, own = plan.levels, _batch_lists(plan.batch)
    elif isinstance(plan, TreePlan):
        plans, own = (plan.whole, plan.prefix), ([plan.trees.parents, plan.trees.lens, plan.depths, plan.ancestors], [])
    elif isinstance(plan, PrefillPlan):
        plans = [plan.own, *(chunk.plan for chunk in plan.chunks)]
        own = [chunk.slots for chunk in plan.chunks], [plan.block_size, _or_minus_one(plan.blocks)]
    tables: list[Tensor | None] = []
    sizes = [PLANS.index(type(plan))]
    for x in plans:
        batch_tables, batch_sizes = _batch_lists(x.batch)
        tables += [*batch_tables, *(getattr(x, name) for name in TABLES)]
        sizes += [*batch_sizes, *(size for name in SIZES for size in _sizes_of(getattr(x, name)))]
    return tables + own[0], sizes + own[1]


def _check_type(plan: object) -> None:
    if type(plan) not in PLANS:
        raise ValueError(f"plan: expected a plan of the path, got {type(plan).__name__}")


def _plan_of(number: Tensor) -> AnyPlan | StatePlan:
    """Return the plan that was prepared under a number.

    Raises:
        RuntimeError: if it has been freed.
    """
    prepared = _prepared.get(int(number))
    if prepared is None:
        raise RuntimeError("plan: expected one that is held while its graph runs, got one that was let go")
    return prepared.plan


_plans: OrderedDict[tuple[object, ...], tuple[list[Any], AnyPlan]] = OrderedDict()


def _same_plan(tables: list[Any], sizes: list[int]) -> AnyPlan:
    """Return the plan of such lists: for the same tensors, unwritten since, the same one.

    The tensors are kept with it, so that no other can have their identity.
    """
    try:
        key = (*sizes, *[None if x is None else (id(x), x._version) for x in tables])
    except RuntimeError:  # tensors made in inference mode have no version
        return _plan(tables, sizes)
    found = _plans.pop(key, None)
    if found is None:
        found = list(tables), _plan(tables, sizes)
    _plans[key] = found  # the newest
    while len(_plans) > REMEMBERED:
        _plans.popitem(last=False)
    return found[1]


def _plan(tables: list[Any], sizes: list[int]) -> AnyPlan:
    """Return the plan of such lists."""
    kind, *sizes = sizes
    (of_batch, sizes_of_batch), plans = OF_BATCH, []
    of_plan = sizes_of_batch + sum(len(get_args(x)) if get_origin(x) is tuple else 1 for x in SIZES.values())
    for _ in range(len(sizes) // of_plan):
        batch, its_own = _batch(tables[:of_batch], sizes[:sizes_of_batch]), iter(sizes[sizes_of_batch:of_plan])
        its_sizes = {name: _from_sizes(its_kind, its_own) for name, its_kind in SIZES.items()}
        tables, sizes = tables[of_batch:], sizes[of_plan:]
        plans.append(Plan(batch, **its_sizes, **dict(zip(TABLES, tables, strict=False))))
        tables = tables[len(TABLES) :]
    if PLANS[kind] is CascadePlan:
        return CascadePlan(_batch(tables, sizes), tuple(plans))
    if PLANS[kind] is TreePlan:
        parents, lens, depths, ancestors = tables
        whole, prefix = plans
        return TreePlan(whole, prefix, Trees(parents, lens), depths, ancestors)
    if PLANS[kind] is PrefillPlan:
        own, *chunks = plans
        return PrefillPlan(own, tuple(map(ContextChunk, chunks, tables)), sizes[0], _or_none(sizes[1]))
    return plans[0]


def _state_lists(plan: StatePlan) -> Lists:
    """Return the tables and the sizes of a plan of states.

    Raises:
        ValueError: if it is none.
    """
    if type(plan) is not StatePlan:
        raise ValueError(f"plan: expected a StatePlan, from recurrent.plan, got {type(plan).__name__}")
    tables, sizes = _batch_lists(plan.batch)
    own = plan.state_indices, plan.has_initial_state, plan.num_accepted, plan.checkpoint_indices
    return [*tables, *own], [*sizes, _or_minus_one(plan.block_size)]


def _state_plan(tables: list[Any], sizes: list[int]) -> StatePlan:
    """Return the plan of states of such lists."""
    state_indices, has_initial_state, num_accepted, checkpoint_indices = tables[3:]
    kept = num_accepted, checkpoint_indices, _or_none(sizes[-1])
    return StatePlan(_batch(tables[:3], sizes[:-1]), state_indices, has_initial_state, *kept)


def _recurrent(plan: StatePlan, scale: float | None, delta: bool, **tensors: Tensor) -> None:
    recurrent_path.attention(**tensors, plan=plan, options=RecurrentOptions(scale, delta))


def _convolve(**arguments: Any) -> None:
    recurrent_path.convolve(**arguments)


def _batch_lists(batch: Batch) -> Lists:
    known = [_or_minus_one(batch.num_keys), _or_minus_one(batch.num_tokens)]
    return [batch.cu_seqlens_q, batch.seq_lens, batch.block_table], [batch.max_query_len, batch.max_seq_len, *known]


def _batch(tables: list[Any], sizes: list[int]) -> Batch:
    cu_seqlens_q, seq_lens, block_table = tables
    lengths, known = sizes[:2], map(_or_none, sizes[2:])
    return Batch(cu_seqlens_q, seq_lens, block_table, *lengths, *known)


def _sizes_of(value: int | bool | tuple[int, ...] | None) -> Sequence[int]:
    """Return a field of a plan that is no tensor as whole numbers."""
    return value if isinstance(value, tuple) else [int(value) if isinstance(value, bool) else _or_minus_one(value)]


def _from_sizes(kind: Any, sizes: Iterator[int]) -> Any:
    """Return a field of a plan, of the type that it is declared with, from the next of its whole numbers."""
    if get_origin(kind) is tuple:
        return tuple(next(sizes) for _ in get_args(kind))
    size = next(sizes)
    return bool(size) if kind is bool else size if kind is int else _or_none(size)


def _or_minus_one(number: int | None) -> int:
    return -1 if number is None else number


def _or_none(number: int) -> int | None:
    return None if number == -1 else number


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

PLAN = "Tensor?[] tables, SymInt[] sizes"
NUMBER, BY_NUMBER = "Tensor plan_number", "_by_number"  # in place of a plan, and what the operator is called then
KINDS: dict[Any, str] = {bool: "bool", float: "float", float | None: "float?"}
OPTIONS = {x.name: "Tensor?" if x.name in PER_HEAD else KINDS[x.type] for x in fields(AttentionOptions)}
PLANNED = ", ".join([PLAN, *(f"{kind} {name}" for name, kind in OPTIONS.items())])
SCALES = "Tensor?[] scales, float[] scale_numbers, ScalarType? scale_format"
STATES = "Tensor?[] state_tables, SymInt[] state_sizes"
PAGES = "Tensor query, Tensor key_cache, Tensor value_cache"
TOKENS = "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping"


def _like_value(query: Tensor, value: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    return _like(query, value.shape[-1])


def _like_pages(query: Tensor, value_cache: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    return _like(query, value_cache.shape[-1])


def _like(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return memory of the shapes and types of an output and its LSE, for the compiler, which fills in nothing."""
    out = query.new_empty(*query.shape[:2], width, dtype=scales.type_of_outputs(query, None))
    return out, query.new_empty(query.shape[:2], dtype=problem.compute_dtype(query.dtype))


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = merge_path.merge(outs, lses)
    return out, lse.clone() if lse is lses[0] else lse  # an operator returns memory of its own


# Per operator: the path's function, the arguments by their names there, and the rule for its result, if it has one.
OPERATORS: dict[str, tuple[Callable[..., Any], str, Callable[..., Any] | None]] = {
    "varlen": (varlen_path.attention, f"Tensor query, Tensor key, Tensor value, {PLANNED}", _like_value),
    "chunked_prefill": (chunked_prefill_path.attention, f"{PAGES}, {PLANNED}", _like_pages),
    "sliding_window": (sliding_window_path.attention, f"{PAGES}, {PLANNED}", _like_pages),
    "local": (local_path.attention, f"{PAGES}, {PLANNED}", _like_pages),
    "cascade": (cascade_path.attention, f"{PAGES}, {PLANNED}", _like_pages),
    "speculative": (speculative_path.attention, f"{PAGES}, {PLANNED}", _like_pages),
    "quantized": (quantized_path.attention, f"{PAGES}, {PLANNED}, {SCALES}", _like_pages),
    "differential": (
        differential_path.attention,
        f"Tensor query, Tensor cache, {PLANNED}, "
        f"Tensor lambda_full, float lambda_init, Tensor? norm_weight, float norm_eps, {SCALES}",
        lambda query, **others: _like(query, query.shape[-1]),
    ),
    "mla": (
        mla_path.attention,
        f"Tensor query, Tensor cache, {PLANNED}, SymInt latent_rank, float cache_scale, "
        "float? query_scale, bool fp8_weights",
        lambda query, latent_rank, **others: _like(query, latent_rank),
    ),
    "mla_prefill": (
        mla_path.prefill,
        f"Tensor query, Tensor latent, Tensor rope_key, Tensor cache, {PLANNED}, "
        "Tensor key_projection, Tensor value_projection, float cache_scale",
        lambda query, value_projection, **others: _like(query, value_projection.shape[1]),
    ),
    "merge": (_merge, "Tensor[] outs, Tensor[] lses", lambda outs, lses: (outs[0].clone(), lses[0].clone())),
    "add_sinks": (
        merge_path.add_sinks,
        "Tensor out, Tensor lse, Tensor sinks",
        lambda out, lse, sinks: (out.clone(), lse.clone()),
    ),
    "write": (kv_cache_path.write, TOKENS, None),
    "write_differential": (
        differential_path.write,
        f"Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping, {SCALES}",
        None,
    ),
    "write_latents": (
        mla_path.write,
        "Tensor latent, Tensor rope_key, Tensor(a!) cache, Tensor slot_mapping, float cache_scale",
        None,
    ),
    "write_quantized": (quantized_path.write, f"{TOKENS}, Tensor(c!)? token_scales, {SCALES}", None),
    "recurrent": (
        _recurrent,
        "Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor(a!) states, Tensor(b!) out, "
        f"{STATES}, float? scale, bool delta",
        None,
    ),
    "convolve": (
        _convolve,
        f"Tensor inputs, Tensor weight, Tensor(a!) states, Tensor(b!) out, {STATES}, Tensor? bias, bool silu",
        None,
    ),
}


def _define(name: str, path: Callable[..., Any], arguments: str, result: Callable[..., Any] | None) -> None:
    """Define an operator that calls a path, with what was taken apart put together."""
    names = [argument.split()[-1] for argument in arguments.split(", ")]

    def compute(*values: Any) -> Any:
        named = dict(zip(names, values, strict=True))
        if "plan_number" in named:
            named["plan"] = _plan_of(named.pop("plan_number"))
        elif "tables" in named:
            named["plan"] = _same_plan(named.pop("tables"), named.pop("sizes"))
        elif "state_tables" in named:
            named["plan"] = _state_plan(named.pop("state_tables"), named.pop("state_sizes"))
        if "softcap" in named:
            named["options"] = AttentionOptions(**{option: named.pop(option) for option in OPTIONS})
            named["return_lse"] = True
        if "scale_format" in named:
            scales, token_scales = named["scales"], named.pop("token_scales", None)
            scales = scales if token_scales is None else [token_scales, *scales[1:]]
            named["scales"] = _scales(scales, named.pop("scale_numbers"), named.pop("scale_format"))
        return path(**named)

    def fake(*values: Any) -> Any:
        graph = CompileContext.current_compile_id()
        if graph is not None and (PLAN in arguments or STATES in arguments):
            _warn_of_limit(name, graph)
        return None if result is None else result(**dict(zip(names, values, strict=True)))

    schema = f"({arguments}) -> {'()' if result is None else '(Tensor, Tensor)'}"
    written = [argument.split()[-1] for argument in arguments.split(", ") if "!" in argument]
    torch.library.custom_op(f"fastattn::{name}", compute, mutates_args=written, schema=schema).register_fake(fake)


def _warn_of_limit(name: str, graph: CompileId) -> None:
    """Warn where half of the graphs that the compiler makes of a function are made, and a plan is not prepared.

    At the limit PyTorch's error says which guard failed last, and not what to do.
    """
    made, most = (graph.frame_compile_id or 0) + 1, torch._dynamo.config.recompile_limit
    if made > most // 2:
        warnings.warn(
            f"ops.{name}: torch.compile has made graph {made} of a function, and stops after {most}. A plan "
            "that is not prepared has a graph for each type, each choice of tables, and sizes of 0 and 1; of "
            "ops.prepare(plan), made outside the graph, there is one for all",
            stacklevel=2,
        )


for _name, (_path, _arguments, _result) in OPERATORS.items():
    _define(_name, _path, _arguments, _result)
    for _lists in (PLAN, STATES):
        if _lists in _arguments:
            _define(_name + BY_NUMBER, _path, _arguments.replace(_lists, NUMBER), _result)
