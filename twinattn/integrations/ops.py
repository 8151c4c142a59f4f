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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any
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
from refattn.options import PER_HEAD, AttentionOptions, RecurrentOptions
from refattn.plan import CascadePlan, Plan, PrefillPlan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan
from refattn.trees import TreePlan
from twinattn.integrations.plan_lists import (
    AnyPlan,
    Lists,
    check_type,
    lists_of_plan,
    lists_of_scales,
    lists_of_states,
    same_plan,
    scales_of_lists,
    states_of_lists,
)

Answer = Tensor | tuple[Tensor, Tensor]


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
        check_type(plan)
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
    return lists_of_plan(plan)


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
    more = (lambda_full, lambda_init, norm_weight, norm_eps, *lists_of_scales(scales))
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
    return _attend("quantized", (query, key_cache, value_cache), plan, options, return_lse, *lists_of_scales(scales))


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
    torch.ops.fastattn.write_differential(key, value, cache, slot_mapping, *lists_of_scales(scales))


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
    tensors, numbers, kind = lists_of_scales(scales)
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
        answer = getattr(torch.ops.fastattn, name)(*tensors, *lists_of_plan(plan), *given, *more)
    return answer if return_lse else answer[0]


def _fold(name: str, tensors: Sequence[Tensor], plan: StatePlan | PreparedPlan, *more: Any) -> None:
    """Call the operator of a path over states, with its plan taken apart."""
    if isinstance(plan, PreparedPlan):
        getattr(torch.ops.fastattn, name + BY_NUMBER)(*tensors, plan.number, *more)
    else:
        getattr(torch.ops.fastattn, name)(*tensors, *lists_of_states(plan), *more)


# --- what the operators call ---


def _plan_of(number: Tensor) -> AnyPlan | StatePlan:
    """Return the plan that was prepared under a number.

    Raises:
        RuntimeError: if it has been freed.
    """
    prepared = _prepared.get(int(number))
    if prepared is None:
        raise RuntimeError("plan: expected one that is held while its graph runs, got one that was let go")
    return prepared.plan


def _recurrent(plan: StatePlan, scale: float | None, delta: bool, **tensors: Tensor) -> None:
    recurrent_path.attention(**tensors, plan=plan, options=RecurrentOptions(scale, delta))


def _convolve(**arguments: Any) -> None:
    recurrent_path.convolve(**arguments)


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
            named["plan"] = same_plan(named.pop("tables"), named.pop("sizes"))
        elif "state_tables" in named:
            named["plan"] = states_of_lists(named.pop("state_tables"), named.pop("state_sizes"))
        if "softcap" in named:
            named["options"] = AttentionOptions(**{option: named.pop(option) for option in OPTIONS})
            named["return_lse"] = True
        if "scale_format" in named:
            scales, token_scales = named["scales"], named.pop("token_scales", None)
            scales = scales if token_scales is None else [token_scales, *scales[1:]]
            named["scales"] = scales_of_lists(scales, named.pop("scale_numbers"), named.pop("scale_format"))
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
