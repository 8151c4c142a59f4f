"""Call the compiled attention over pages: the addresses, strides and sizes of a call, in one structure."""

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_void_p

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fastattn.kernels.native.compiler import library
from fastattn.kernels.problem import Subtraction, latent_scales
from fastattn.kernels.replay import Run
from fastattn.kernels.torch_ops.quantized import fold_scales
from refattn.keys import Latents, Pages, QuantizedPages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import FP8_FORMATS, Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan

SPLIT = 1024  # keys of a split, as in attention.c
TYPES = {  # the numbers of the types in attention.c
    dtype: number
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, *FP8_FORMATS, torch.int8))
}


class Call(ctypes.Structure):
    """The arguments of `attend` in attention.c, where they are explained."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "first_rows", "seq_lens", "table")),
        *((name, c_void_p) for name in ("key_scale", "slopes", "sinks", "out", "lse")),
        *((name, c_int64) for name in ("rows", "seqs", "heads", "kv_heads", "size", "value_size")),
        *((name, c_int64) for name in ("blocks", "block_size", "columns")),
        ("query_strides", c_int64 * 3),
        ("key_strides", c_int64 * 4),
        ("value_strides", c_int64 * 4),
        ("scale_strides", c_int64 * 3),
        ("table_strides", c_int64 * 2),
        *((name, c_int64) for name in ("left", "right", "splits", "threads", "halves", "apart")),
        *((name, c_int32) for name in ("query_type", "key_type", "value_type", "out_type", "sqrt_distance")),
        ("scale", c_float),
        ("softcap", c_float),
        ("failure", c_int32),
    ]


def attend(
    query: Float[Tensor, "t h d"],
    keys: Pages | QuantizedPages | Latents,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages and over latents; see `fastattn.dispatch`."""
    answer, lse, _ = bind_attend(query, keys, plan, options, out, True)
    return answer, lse


def bind_attend(
    query: Float[Tensor, "t h d"],
    keys: Pages | QuantizedPages | Latents,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
    _: bool,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"], Run]:
    """Attend, and return the replay."""
    (level,) = plan.levels
    own = level.own
    key_cache, value_cache, scales = _pools(query, keys)
    if scales is None:
        call = _describe(query, key_cache, value_cache, own, options)
        has_own = options.alibi_slopes is not None or options.sinks is not None  # tensors of a layer, by address
        again = attend if has_own else Again(call).run
        return *_launch(call, query, key_cache, value_cache, out), again
    scaled_query, after = fold_scales(query, scales, own, query.shape[1] // key_cache.shape[2])
    of_keys: Tensor | None = None
    if isinstance(scales, Int8Scales):
        of_keys = scales.key
    else:
        key_cache, value_cache = key_cache.view(scales.format), value_cache.view(scales.format)
    call = _describe(scaled_query, key_cache, value_cache, own, options, of_keys)
    answer, lse = _launch(call, scaled_query, key_cache, value_cache, None)
    return answer.mul_(after).to(query.dtype), lse, attend


def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    subtraction: Subtraction,
    _: Float[Tensor, "t h d"] | None,
) -> tuple[Float[Tensor, "t half_h 2*d"], Float[Tensor, "t h"]]:
    """Attend twice over pages and subtract; see `fastattn.dispatch`. Every key and value is read once."""
    key_cache, value_cache = cache[0]
    call = _describe(query, key_cache, value_cache, plan, options)
    call.halves, call.apart, call.out_type = 2, cache.stride(0), TYPES[torch.float32]
    num_rows, num_heads, head_size = query.shape
    out = query.new_empty(num_rows, num_heads, 2 * head_size, dtype=torch.float32)
    answers, lse = _launch(call, query, key_cache, value_cache, out)
    first, second = answers[:, ::2], answers[:, 1::2]
    return subtraction.finish(first - subtraction.lambda_full.float() * second).to(query.dtype), lse


def _pools(
    query: Float[Tensor, "t h d"], keys: Pages | QuantizedPages | Latents
) -> tuple[Shaped[Tensor, "n p hk d"], Shaped[Tensor, "n p hk dv"], Fp8Scales | Int8Scales | None]:
    """Return the pools of keys and values, and their scales; latents are one KV head, whose values begin its keys."""
    if isinstance(keys, QuantizedPages):
        return keys
    if isinstance(keys, Pages):
        return *keys, None
    key_cache = keys.cache[:, :, None, : query.shape[2]]
    scales = latent_scales(keys.cache, keys.cache_scale, keys.query_scale)
    return key_cache, key_cache[..., : keys.latent_rank], scales


def _describe(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    key_scale: Float[Tensor, "n p hk"] | None = None,
) -> Call:
    """Describe a call, without the addresses that differ from layer to layer."""
    batch, table = plan.batch, plan.batch.block_table
    assert table is not None
    longest = min(batch.max_seq_len, table.shape[1] * key_cache.shape[1])
    slopes, sinks = (None if x is None else x.float().contiguous() for x in (options.alibi_slopes, options.sinks))
    call = Call(
        first_rows=batch.cu_seqlens_q.data_ptr(),
        seq_lens=batch.seq_lens.data_ptr(),
        table=table.data_ptr(),
        key_scale=None if key_scale is None else key_scale.data_ptr(),
        slopes=None if slopes is None else slopes.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        rows=query.shape[0],
        seqs=batch.num_seqs,
        heads=query.shape[1],
        kv_heads=key_cache.shape[2],
        size=query.shape[2],
        value_size=value_cache.shape[3],
        blocks=key_cache.shape[0],
        block_size=key_cache.shape[1],
        columns=table.shape[1],
        query_strides=query.stride(),
        key_strides=key_cache.stride(),
        value_strides=value_cache.stride(),
        scale_strides=(0, 0, 0) if key_scale is None else key_scale.stride(),
        table_strides=table.stride(),
        left=plan.window[0],
        right=plan.window[1],
        splits=-(-longest // SPLIT),
        threads=torch.get_num_threads(),
        halves=1,
        query_type=TYPES[query.dtype],
        key_type=TYPES[key_cache.dtype],
        value_type=TYPES[value_cache.dtype],
        out_type=TYPES[query.dtype],
        sqrt_distance=options.alibi_sqrt,
        scale=query.shape[2] ** -0.5 if options.softmax_scale is None else options.softmax_scale,
        softcap=options.softcap,
    )
    call.alive = (slopes, sinks)  # the call holds their addresses
    return call


def _launch(
    call: Call,
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p *_"],
    value_cache: Shaped[Tensor, "n p *_"],
    out: Float[Tensor, "t h out_size"] | None,
) -> tuple[Float[Tensor, "t h out_size"], Float[Tensor, "t h"]]:
    """Call the library with the tensors of a layer."""
    num_rows, num_heads = query.shape[:2]
    if out is None:
        out = query.new_empty((num_rows, num_heads, call.value_size))
    lse = query.new_empty((num_rows, num_heads), dtype=torch.float32)
    call.query, call.key, call.value = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
    call.out, call.lse = out.data_ptr(), lse.data_ptr()
    attend_in_c = library()
    assert not isinstance(attend_in_c, str)
    attend_in_c.attend(byref(call))
    if call.failure:
        raise _error(call.failure)
    return out, lse


def _error(failure: int) -> Exception:
    if failure == 1:
        return ValueError(
            "plan: expected lengths and a block table as they were planned, got others: they changed after that"
        )
    return MemoryError("query: expected few enough rows for the memory that is left")


class Again:
    """A described call, to be made again with the tensors of a later layer."""

    def __init__(self, call: Call) -> None:
        self._described = bytes(call)

    def run(
        self, query: Tensor, keys: Pages | Latents, plan: AttentionPlan, options: AttentionOptions, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend as `attend` does; latents begin where their pool does, as keys and as values."""
        call = Call.from_buffer_copy(self._described)  # threads may share a plan
        call.threads = torch.get_num_threads()
        key_cache, value_cache = keys if isinstance(keys, Pages) else (keys.cache, keys.cache)
        return _launch(call, query, key_cache, value_cache, out)
