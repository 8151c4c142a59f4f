"""A call described by plain numbers: enough to decide which kernels can compute it, and which one is fastest."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import rms_norm

from fastattn.kernels.replay import memo_of
from refattn.batch import Batch
from refattn.checks import check_normed
from refattn.entries import CompressedPlan
from refattn.four_bits import Int4Pages, Nvfp4Pages
from refattn.keys import Keys, Latents, PackedLatents, Pages, QuantizedPages, Rows
from refattn.modes import refuse_gradients
from refattn.options import AttentionOptions
from refattn.packed_latents import PACKED_FORMAT, packed_size
from refattn.plan import Plan
from refattn.scales import FP8_FORMATS, Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan, TreePlan

FAR = 2**30  # tokens: the sum with a smaller position fits into 32 bits
EVEN = 1.25  # longest sequence over the average, at most, for sequences of about equal length
EXPANDED_BLOCK = 128  # tokens in a block of dequantized values: the page size that FlashAttention loads fastest
MOST_APART = 2**12  # a scale over a smaller one with which values in 8 bits remain exact or nearly so in float16
MOST_EXPANDED_BYTES = 2**29  # bytes of dequantized keys and values that a call may allocate


class Problem(NamedTuple):
    """One operation, described by the sizes of its tensors; it holds no tensor, and none is read for it.

    Attributes:
        operation: one of the operations that `fastattn.dispatch` lists; "attend" for attention.
        device: where the tensors are.
        dtype: the type of the queries, or of the tensors that are moved.
        keys: the storage of the keys, one of `STORAGES`.
        levels: cascade levels in one call.
        tree: the mask is that of drafted trees.
        num_heads: query heads, `h`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a query and a key, `d`.
        value_head_size: elements of a value, `dv`.
        block_size: tokens in a block of the cache; None without a cache.
        max_query_len: the most new tokens that a sequence has.
        max_seq_len: the most keys that a sequence has.
        num_seqs: sequences of the plan.
        window: `(left, right)` in tokens, -1 for no limit; a causal mask is a right side of 0.
        positions: query rows have positions of their own, and a mask or ALiBi depends on them.
        softcap: scores are capped.
        alibi: there are ALiBi slopes.
        alibi_sqrt: ALiBi slopes multiply the square root of the distance.
        num_tokens: query rows, padding included.
        sinks: there are sinks.
        batch_invariant: no bit of a row may depend on the rest of the batch.
        aligned: all heads are contiguous and begin at multiples of 16 bytes; only those of queries count where keys and
            values are quantized. Rows of packed latents have no gaps, either.
        num_pairs: pairs of source and destination of `copy_blocks`.
        contiguous_blocks: each block that is copied is contiguous.
        num_dims: dimensions of a pool whose tokens are moved.
        uniform: the host knows that every sequence has `max_query_len` new tokens.
        stored: the types of keys and values in a quantized cache; None in any other.
        rounds_query: queries are rounded as keys are.
        fp8_weights: over fp8 latents, softmax weights may be rounded to fp8, too.
        even: the host knows that all sequences have about the same number of keys.
        intervals: each query row has its own interval of visible keys.
        extends_causal: each interval has all keys up to its query, and may have later ones.
        far_scales: the scales of two quantized pools are too far apart for products of one scale.
        per_channel: of a recurrent layer, each key channel has a decay of its own.
        per_draft: a state is kept after each token of the step.
        asks: the fields of options, plan, storage and scales that are set, from `asked_of`.
    """

    operation: str
    device: torch.device
    dtype: torch.dtype
    keys: str = ""
    levels: int = 1
    tree: bool = False
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    value_head_size: int = 0
    block_size: int | None = None
    max_query_len: int = 0
    max_seq_len: int = 0
    num_seqs: int = 0
    window: tuple[int, int] = (-1, -1)
    positions: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    batch_invariant: bool = False
    aligned: bool = True
    num_pairs: int = 0
    contiguous_blocks: bool = True
    num_dims: int = 0
    uniform: bool = False
    stored: tuple[torch.dtype, torch.dtype] | None = None
    rounds_query: bool = False
    alibi_sqrt: bool = False
    num_tokens: int = 0
    even: bool = False
    intervals: bool = False
    fp8_weights: bool = False
    extends_causal: bool = False
    far_scales: bool = False
    per_channel: bool = False
    per_draft: bool = False
    asks: frozenset[str] = frozenset()

    @property
    def is_attention(self) -> bool:
        """Whether the operation computes attention; others move data, merge, or make tables."""
        return self.num_heads > 0

    @property
    def what(self) -> str:
        """The operation, in words."""
        if self.operation == "differential":
            return "differential attention"
        if self.operation == "attend_compressed":
            return "attention to a window and to entries in one launch"
        if self.operation != "attend":
            return f"the operation {self.operation}"
        under = " under drafted trees" if self.tree else " in several levels" if self.levels > 1 else ""
        return f"attention to {NAMES.get(self.keys, self.keys)}{under}"


NAMES = {"quantized": "quantized pages", "int4": "int4 pages", "nvfp4": "nvfp4 pages", "packed": "packed latents"}
STORAGES = {
    Rows: "rows",
    Pages: "pages",
    QuantizedPages: "quantized",
    Int4Pages: "int4",
    Nvfp4Pages: "nvfp4",
    Latents: "latents",
    PackedLatents: "packed",
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which queries of some type are computed, and which log-sum-exps have.

    Queries may be fp8, which `torch.promote_types` does not support.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


TYPED_BY = {"merge": "lses", "add_sinks": "lse", "flush": "ring"}  # the argument that says its type, if not the first


def problem_of(operation: str, arguments: Mapping[str, Any]) -> Problem:
    """Describe an operation other than attention, by its arguments in order."""
    first = next(iter(arguments.values()))
    typed = arguments.get(TYPED_BY.get(operation, ""), first)
    first, typed = (x[0] if isinstance(x, list | tuple) else x for x in (first, typed))
    dtype = typed.dtype if isinstance(typed, Tensor) else torch.int32  # tables
    problem = Problem(operation, first.device, arguments.get("dtype", dtype), asks=asked_of(*arguments.values()))
    if operation == "write_quantized":
        return problem._replace(stored=stored_types(arguments["scales"], arguments["value_cache"]))
    if operation == "copy_blocks":
        last = sum(stride * (size - 1) for stride, size in zip(first.stride()[1:], first.shape[1:], strict=True))
        is_contiguous = last == first.shape[1:].numel() - 1
        return problem._replace(num_pairs=len(arguments["pairs"]), contiguous_blocks=is_contiguous)
    if operation == "compact":
        return problem._replace(num_dims=first.ndim)
    if operation in ("recurrent", "replay"):
        problem = problem._replace(head_size=first.shape[-1], value_head_size=arguments["value"].shape[-1])
    if operation == "recurrent":
        plan = arguments["plan"]
        return problem._replace(
            num_tokens=len(first),
            num_seqs=plan.batch.num_seqs,
            max_query_len=plan.batch.max_query_len,
            per_channel=arguments["log_decay"].ndim == 3,
            per_draft=plan.per_draft,
        )
    if operation == "flush":
        return problem._replace(head_size=first.shape[-1], value_head_size=first.shape[-2])
    return problem


def attention_problem(query: Tensor, keys: Keys, plan: AttentionPlan, options: AttentionOptions) -> Problem:
    """Describe a call of attention, by the last level of a cascade; `[t, h, d]` queries."""
    scales: Fp8Scales | Int8Scales | None = None
    if isinstance(keys, PackedLatents):
        key = value = keys.cache[:, :, None]
    elif isinstance(keys, Latents):
        key = keys.cache[:, :, None, : query.shape[2]]
        value = key[..., : keys.latent_rank]
        scales = latent_scales(keys.cache, keys.cache_scale, keys.query_scale)
    elif isinstance(keys, QuantizedPages):
        key, value, scales = keys
    else:
        key, value = keys[:2]
    is_expanded = isinstance(keys, QuantizedPages | Int4Pages)  # before a kernel that asks for alignment reads them
    levels = plan.levels
    own = plan.own
    batch = own.batch
    num_seqs = batch.num_seqs
    return Problem(
        operation="attend",
        device=query.device,
        dtype=query.dtype,
        keys=STORAGES[type(keys)],
        levels=len(levels),
        tree=isinstance(plan, TreePlan),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[-2],
        head_size=query.shape[2],
        value_head_size=keys.value_head_size,
        block_size=own.block_size,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_seqs=num_seqs,
        window=own.window,
        positions=uses_positions(own, options),
        softcap=options.softcap > 0,
        alibi=options.alibi_slopes is not None,
        alibi_sqrt=options.alibi_sqrt,
        sinks=options.sinks is not None,
        batch_invariant=options.batch_invariant,
        aligned=query.device.type != "cuda"
        or all(map(has_aligned_heads, (query,) if is_expanded else (query, key, value)))
        and (not isinstance(keys, PackedLatents) or has_packed_rows(keys, query.shape[2])),
        uniform=_is_uniform(batch) and query.shape[0] >= num_seqs * batch.max_query_len,
        stored=_stored_in(keys, scales, value),
        rounds_query=scales is not None and (isinstance(scales, Int8Scales) or scales.query is not None),
        num_tokens=query.shape[0],
        even=batch.num_keys is not None and EVEN * batch.num_keys >= batch.max_seq_len * num_seqs,
        intervals=any(level.own.first_visible is not None for level in levels),
        fp8_weights=isinstance(keys, Latents) and keys.fp8_weights,
        extends_causal=own.extends_causal,
        asks=asked_of(keys, plan, options),
    )


def compressed_problem(
    query: Tensor, window: Latents, entries: Latents, plan: CompressedPlan, options: AttentionOptions
) -> Problem:
    """Describe attention to a window and to entries as one call: as attention to the window, with what both have."""
    problem = attention_problem(query, window, plan.window, options)
    of_entries = attention_problem(query, entries, plan.entries, options)
    is_stored = problem.stored is not None or of_entries.stored is not None
    stored = (window.cache.dtype, entries.cache.dtype) if is_stored else None
    scales = window.cache_scale, entries.cache_scale
    return problem._replace(
        operation="attend_compressed",
        stored=stored,
        far_scales=is_stored and min(scales) * MOST_APART < max(scales),
        aligned=query.device.type != "cuda" or all(map(has_rows_at_16, (query, window.cache, entries.cache))),
        asks=asked_of(window, entries, plan, options),
    )


_ASKS = "asks"  # attribute of a plan: caches its set fields, which are the same in every layer


def asked_of(*arguments: object) -> frozenset[str]:
    """Return the names of the fields of options, plans, storages and scales that are set, as `Plan.causal`.

    A field is set if it has no default, or not its default. Fields of values in fields count, too.
    """
    asks: frozenset[str] = frozenset()
    for argument in arguments:
        asks |= _asked_of(argument)
    return asks


def _asked_of(argument: object) -> frozenset[str]:
    kind: Any = type(argument)
    defaults = _defaults(kind)
    if defaults is None:
        return asked_of(*argument) if isinstance(argument, tuple) else frozenset()
    is_plan = "batch" in defaults
    if is_plan and _ASKS in vars(argument):
        found: frozenset[str] = vars(argument)[_ASKS]
        return found
    asks: set[str] = set()
    for name, (full_name, default) in defaults.items():
        value = getattr(argument, name)
        if value is default or (not isinstance(value, Tensor) and value == default):
            continue
        asks.add(full_name)
        its_kind: Any = type(value)
        if isinstance(value, tuple) or _defaults(its_kind) is not None:
            asks |= _asked_of(value)
    if is_plan:
        vars(argument)[_ASKS] = frozenset(asks)
    return frozenset(asks)


@cache
def _defaults(kind: Any) -> dict[str, tuple[str, object]] | None:
    """Return the full name and the default (or `MISSING`) of each field of a dataclass or named tuple; else None.

    Fields that a dataclass derives from others (`init=False`) are left out.
    """
    its_name = kind.__name__
    if is_dataclass(kind):
        return {x.name: (f"{its_name}.{x.name}", x.default) for x in fields(kind) if x.init}
    names: tuple[str, ...] | None = getattr(kind, "_fields", None)
    if names is None:
        return None
    defaults = getattr(kind, "_field_defaults", {})
    return {name: (f"{its_name}.{name}", defaults.get(name, MISSING)) for name in names}


def _stored_in(
    keys: Keys, scales: Fp8Scales | Int8Scales | None, value: Tensor
) -> tuple[torch.dtype, torch.dtype] | None:
    if isinstance(keys, PackedLatents):
        return PACKED_FORMAT, PACKED_FORMAT
    return None if scales is None else stored_types(scales, value)


def has_packed_rows(keys: PackedLatents, head_size: int) -> bool:
    """Return whether each packed row begins where the one before it ends; `head_size` is that of queries."""
    size, (block, row, _) = packed_size(keys.latent_rank, head_size - keys.latent_rank), keys.cache.stride()
    return keys.cache.shape[2] == size == row and block == keys.cache.shape[1] * size


def expanded(problem: Problem) -> Problem:
    """Describe attention over a quantized cache after it is dequantized to the type of the queries."""
    aligned = problem.aligned or problem.rounds_query  # rounded queries are a new tensor
    numbers = problem._replace(
        keys="pages", block_size=EXPANDED_BLOCK, stored=None, rounds_query=False, aligned=aligned
    )
    return numbers._replace(extends_causal=False)  # later keys would be read from the quantized pages


def stored_types(scales: Fp8Scales | Int8Scales, value: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of keys and values in a quantized cache, which may be kept as bytes."""
    return (scales.format, scales.format) if isinstance(scales, Fp8Scales) else (torch.int8, value.dtype)


def latent_scales(cache: Tensor, cache_scale: float, query_scale: float | None = None) -> Fp8Scales | None:
    """Return the scales of a pool of latents: one number for keys and for values; None if it is not quantized."""
    return Fp8Scales(cache_scale, cache_scale, query_scale, cache.dtype) if cache.dtype in FP8_FORMATS else None


def uses_positions(plan: Plan, options: AttentionOptions) -> bool:
    """Return whether the output depends on `plan.positions`: not if all queries see all keys, without ALiBi."""
    return plan.positions is not None and (plan.window != (-1, -1) or options.alibi_slopes is not None)


def window_within_reach(plan: Plan) -> tuple[int, int]:
    """Return the window of a plan, -1 for no limit, its sides clamped to more than any distance of a query and a key.

    Packages add a side to a position in 32 bits. Only for plans whose queries are the last of their tokens.
    """
    left, right = plan.window
    reach = min(plan.batch.max_seq_len + plan.batch.max_query_len + 1, FAR)
    return min(left, reach), min(right, reach)


def _is_uniform(batch: Batch) -> bool:
    """Return whether the host knows, from their sum and maximum, that all sequences have equally many new tokens."""
    return batch.num_tokens is not None and batch.num_tokens == batch.num_seqs * batch.max_query_len


def has_aligned_heads(x: Tensor) -> bool:
    """Return whether all heads of a tensor are contiguous and begin at multiples of 16 bytes."""
    *strides, last = x.stride()
    bits = x.data_ptr()
    for stride in strides:
        bits |= stride * x.element_size()
    return last == 1 and bits % 16 == 0


def has_rows_at_16(x: Tensor) -> bool:
    """Return whether all rows are contiguous and at multiples of 16 elements: what the compiler knows of a stride.

    It copies 16 bytes at a time only where it knows that they are aligned; of a stride of 8 elements it knows nothing.
    """
    *strides, last = x.stride()
    return last == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)


def as_bytes(x: Tensor) -> Tensor:
    """View elements of one byte as uint8, so that any operation that moves bytes moves fp8.

    torch has no `index_copy_` for fp8, and a GPU older than the format cannot compute with it.
    """
    return x.view(torch.uint8) if x.element_size() == 1 else x


def as_integers(x: Tensor) -> Tensor:
    """View elements as integers of their size, so that operations of torch move them bit for bit.

    With deterministic algorithms a GPU writes rows of float16 and bfloat16 by way of float32, which changes the bits of
    a NaN; and it does not write fp8.
    """
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def cu_seqlens_k_of(plan: Plan) -> Int32[Tensor, "_"]:
    """Return where the keys of each sequence begin in rows: from the memo of the plan, or summed from the lengths.

    The plans of `varlen` and `mla` sum them once, so that no layer launches the sum.
    """
    starts = memo_of(plan).cu_seqlens_k
    return plan.batch.cu_seqlens_k if starts is None else starts


def places(batch: Batch, num_tokens: int) -> tuple[Int64[Tensor, "t"], Int64[Tensor, "t"], Shaped[Tensor, "t"]]:
    """Return the sequence of each query row, its position in it, and whether the row is padding."""
    rows = torch.arange(num_tokens, device=batch.device)
    sequence = torch.searchsorted(batch.cu_seqlens_q[1:], rows, right=True).clamp(max=max(batch.num_seqs - 1, 0))
    if batch.num_seqs == 0:
        return rows, rows, torch.ones_like(rows, dtype=torch.bool)
    place = rows + (batch.seq_lens - batch.cu_seqlens_q[1:])[sequence]
    return sequence, place, rows >= batch.cu_seqlens_q[-1]


class Subtraction(NamedTuple):
    """How the two outputs of a pair become one: `factor * norm(first - lambda_full * second)`.

    Attributes:
        lambda_full: weight of the second output.
        norm_weight: learned factors of the norm; None where it has none.
        norm_eps: keeps the norm of zeros at zero.
        factor: factor of the normed difference.
        norm: replaces RMSNorm; None for RMSNorm.
    """

    lambda_full: Float[Tensor, ""]
    norm_weight: Float[Tensor, "dv"] | None
    norm_eps: float
    factor: float
    norm: Callable[[Tensor], Tensor] | None = None

    def finish(self, difference: Float[Tensor, "t half_h dv"]) -> Float[Tensor, "t half_h dv"]:
        """Norm a difference.

        Raises:
            ValueError: if `norm` does not return as many numbers as it gets.
            NotImplementedError: if what `norm` returns requires a gradient.
        """
        if self.norm is not None:
            normed = check_normed(self.norm(difference), difference)
            refuse_gradients("fastattn has no backward pass; use refattn, which has, or torch.no_grad()", norm=normed)
            return normed.to(difference.dtype).mul(self.factor)
        weight = None if self.norm_weight is None else self.norm_weight.to(difference.dtype)
        return rms_norm(difference, difference.shape[-1:], weight, self.norm_eps).mul(self.factor)


def with_positive_scale(query: Tensor, softmax_scale: float | None) -> tuple[Tensor, float]:
    """Return a query and a positive scale that give the same scores to the bit, also for NaN and infinity."""
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
