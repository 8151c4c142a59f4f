"""FlashAttention's functions over either twin: code that calls them runs unchanged, on a CPU too.

    from twinattn.integrations import flash_attn

    flash_attn.install()  # before the code that imports flash_attn
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

Or import the functions from here. Signatures, shapes and semantics are those of flash-attn 2.8:

    function                    layout of q            keys                                       path
    flash_attn_func             [b, s, h, d]           rows, as many for each sequence            varlen
    flash_attn_varlen_func      [t, h, d]              rows, or pages under a block table         varlen, sliding window
    flash_attn_with_kvcache     [b, s, h, d]           a row of the cache per sequence, or pages  sliding window,
                                                                                                  intervals
    flash_attn_..packed_func    as the first two, with queries, keys and values in one tensor, or the last two

After `install()`, `flash_attn.bert_padding` is `twinattn.integrations.bert_padding`; other modules of the package are
not found.

A cache of one row per sequence `[b, s, hk, d]` is a pool with one page per sequence. Each call makes its plan anew, as
the signatures have no place for one; code that may be changed is faster with the paths themselves.

Different from the package: float32 and any page size are taken, there is no backward pass (with the reference there
is), the LSE of a query that sees no key is always `-inf`, and under a causal mask with ALiBi it is that of the formula
in the package's documentation.

Source: the public interface of Dao et al., `flash_attn/flash_attn_interface.py`, version 2.8.
"""

import sys
from importlib.util import find_spec
from operator import index
from typing import Any, NoReturn

import torch
from einops import rearrange
from jaxtyping import Float, Int32
from torch import Tensor

import fastattn.interval
import fastattn.kv_cache
import fastattn.metadata
import fastattn.sliding_window
import fastattn.varlen
import refattn.interval
import refattn.kv_cache
import refattn.metadata
import refattn.sliding_window
import refattn.varlen
from refattn.batch import Batch
from refattn.checks import check, check_flag, check_int, check_number, describe, same_device
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from twinattn.integrations import bert_padding

TWINS: dict[str, Any] = {"refattn": refattn, "fastattn": fastattn}
MODULES = ("flash_attn", "flash_attn.flash_attn_interface")  # the names that `install` takes
FUNCTIONS = (  # all that the package has on its first level
    *("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"),
    *("flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"),
)
Window = tuple[int, int] | list[int]

__version__ = "2.8.0+twinattn"  # the version whose signatures these are, for code that checks it
__path__: list[str] = []  # so that the modules of the package that are not here are looked for, and not found

_twin = fastattn


def __getattr__(name: str) -> NoReturn:
    """Refuse what the package may have, and this has not."""
    raise AttributeError(
        f"flash_attn: expected one of {', '.join(FUNCTIONS)}, which {__name__} has, got {name!r}; for others install "
        "the package flash-attn, and do not call install()"
    )


def install(twin: str = "fastattn") -> None:
    """Make `import flash_attn` find this module, for the rest of the process; a second call may change the twin.

    Args:
        twin: which twin computes, "fastattn" or "refattn"; also for the functions of this module.

    Raises:
        ValueError: if there is no twin of that name.
        RuntimeError: if there is another module of that name: flash-attn itself is never hidden.
    """
    global _twin
    if twin not in TWINS:
        raise ValueError(f"twin: expected one of {', '.join(TWINS)}, got {twin!r}")
    here = sys.modules[__name__]
    if sys.modules.get(MODULES[0]) is not here and find_spec(MODULES[0]) is not None:
        raise RuntimeError(
            "flash_attn: expected no module of that name, got one that is installed; import the functions from "
            f"{__name__} instead"
        )
    _twin = TWINS[twin]
    sys.modules.update(dict.fromkeys(MODULES, here), **{f"{MODULES[0]}.bert_padding": bert_padding})
    vars(here)["flash_attn_interface"] = here


def flash_attn_func(
    q: Float[Tensor, "b sq h d"],
    k: Float[Tensor, "b sk hk d"],
    v: Float[Tensor, "b sk hk dv"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend from sequences of one length to keys of one length.

    Arguments, results and errors are those of `flash_attn_varlen_func`, the LSE `[b, h, sq]`.
    """
    sizes = check(q=(q, "b sq h d"), k=(k, "q: b sk hk d"), v=(v, "q: b sk hk dv"))
    b, sq, sk = sizes["b"], sizes["sq"], sizes["sk"]
    edges = torch.arange(b + 1, dtype=torch.int32, device=q.device)
    out, lse, probabilities = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        edges * sq,
        edges * sk,
        sq,
        sk,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs=True,
    )
    out = rearrange(out, "(b sq) h dv -> b sq h dv", b=b)
    return (out, rearrange(lse, "h (b sq) -> b h sq", b=b), probabilities) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Float[Tensor, "t h d"],
    k: Float[Tensor, "*rows hk d"],
    v: Float[Tensor, "*rows hk dv"],
    cu_seqlens_q: Int32[Tensor, "_"],
    cu_seqlens_k: Int32[Tensor, "_"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Int32[Tensor, "b m"] | None = None,
) -> Any:
    """Attend in each sequence from its query rows to its keys.

    Args:
        q: query rows of all sequences, one after the other.
        k: key rows likewise; with a block table the pool of keys, `[n, p, hk, d]`.
        v: the values that belong to them.
        cu_seqlens_q: where the query rows of each sequence begin; the last entry is where they all end.
        cu_seqlens_k: likewise of the keys; with a block table only their differences count.
        max_seqlen_q: at least the largest number of query rows of a sequence.
        max_seqlen_k: at least the largest number of keys of a sequence.
        dropout_p: 0.
        softmax_scale: of the scores; `d ** -0.5` if None.
        causal: hide later keys, the last query aligned to the last key.
        window_size: `(left, right)` in tokens around a query's own position, both inclusive, -1 for no limit.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: one per head, `[h]`.
        deterministic: of the backward pass; without effect.
        return_attn_probs: return the LSE `[h, t]`, too, and an empty tensor in the place of probabilities.
        block_table: the blocks of each sequence.

    Returns:
        The outputs `[t, h, dv]`; 0 where a query sees no key.

    Raises:
        ValueError: naming the argument that does not fit; contents are read on a CPU only.
        NotImplementedError: for dropout, for slopes per sequence, and for what no kernel of the twin computes.
    """
    rows = "s" if block_table is None else "n p"
    check(q=(q, "t h d"), k=(k, f"q: {rows} hk d"), v=(v, f"q: {rows} hk dv"))
    check_number("dropout_p", dropout_p)
    if dropout_p:
        raise NotImplementedError(f"dropout_p: expected 0, as neither twin computes dropout, got {dropout_p}")
    check(q=(q, "t h d"), cu_seqlens_q=(cu_seqlens_q, "int32 b+1"), cu_seqlens_k=(cu_seqlens_k, "int32 b+1"))
    if block_table is None and cu_seqlens_k.is_cpu and cu_seqlens_k[:1].any():
        raise ValueError(f"cu_seqlens_k: expected keys from row 0 on, got {int(cu_seqlens_k[0])}")
    longest = [_length(name, x) for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))]
    batch = Batch(cu_seqlens_q.contiguous(), cu_seqlens_k.diff(), block_table, *longest)
    options = _options(softmax_scale, softcap, alibi_slopes)
    window = _window(window_size)
    path: Any
    if block_table is None:
        path, plan = _twin.varlen, _twin.varlen.plan(batch, causal=causal, window_size=window)
    else:
        path, plan = _twin.sliding_window, _plan_over_pages(batch, k, causal, window)
    out, lse = path.attention(q, k, v, plan, options, return_lse=True)
    return (out, lse.T, q.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Float[Tensor, "b s 3 h d"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_func`, from queries, keys and values in one tensor."""
    check(qkv=(qkv, "b s 3 h d"))
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *how)


def flash_attn_kvpacked_func(
    q: Float[Tensor, "b sq h d"],
    kv: Float[Tensor, "b sk 2 hk d"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_func`, to keys and values in one tensor."""
    check(kv=(kv, "b sk 2 hk d"))
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *how)


def flash_attn_varlen_qkvpacked_func(
    qkv: Float[Tensor, "t 3 h d"],
    cu_seqlens: Int32[Tensor, "_"],
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_varlen_func`, from queries, keys and values in one tensor."""
    check(qkv=(qkv, "t 3 h d"))
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *how)


def flash_attn_varlen_kvpacked_func(
    q: Float[Tensor, "t h d"],
    kv: Float[Tensor, "s 2 hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],
    cu_seqlens_k: Int32[Tensor, "_"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_varlen_func`, to keys and values in one tensor."""
    check(kv=(kv, "s 2 hk d"))
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *how)


def flash_attn_with_kvcache(
    q: Float[Tensor, "b sq h d"],
    k_cache: Float[Tensor, "n p hk d"],
    v_cache: Float[Tensor, "n p hk dv"],
    k: Float[Tensor, "b new hk d"] | None = None,
    v: Float[Tensor, "b new hk dv"] | None = None,
    rotary_cos: Float[Tensor, "positions half"] | None = None,
    rotary_sin: Float[Tensor, "positions half"] | None = None,
    cache_seqlens: int | Int32[Tensor, "b"] | None = None,
    cache_batch_idx: Int32[Tensor, "b"] | None = None,
    cache_leftpad: Int32[Tensor, "b"] | None = None,
    block_table: Int32[Tensor, "b m"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Float[Tensor, "..."] | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values to a cache, in place, and attend to it.

    Args:
        q: as many queries for each sequence, the last of its tokens.
        k_cache: a row of the cache per sequence, `n` rows of `p` tokens; with a block table, `n` blocks of `p` tokens.
        v_cache: likewise.
        k: new keys, written after those that are there; None if all are there.
        v: new values.
        rotary_cos: cosines by position, with which new keys and queries are rotated: the first `2 * half` elements of
            a head. Without a causal mask and a window, all queries of a sequence stand at its first new position.
        rotary_sin: sines by position.
        cache_seqlens: tokens of each sequence that are in the cache before; the whole of it if None.
        cache_batch_idx: the row of the cache of each sequence; 0, 1, 2, ... if None.
        cache_leftpad: tokens at the beginning of each row of the cache that are padding.
        block_table: the blocks of each sequence.
        softmax_scale: of the scores; `d ** -0.5` if None.
        causal: hide later keys, the last query aligned to the last key.
        window_size: `(left, right)` in tokens around a query's own position, both inclusive, -1 for no limit.
        softcap: bound on the scores; 0 for none.
        rotary_interleaved: elements 0 and 1, 2 and 3 are rotated together, not 0 and `half`, 1 and `half + 1`.
        alibi_slopes: one per head, `[h]`.
        num_splits: 1 asks for an answer that does not depend on the rest of the batch; else without effect.
        return_softmax_lse: return the LSE `[b, h, sq]`, too.

    Returns:
        The outputs `[b, sq, h, dv]`; 0 where a query sees no key.

    Raises:
        ValueError: naming the argument that does not fit; contents are read on a CPU only. Nothing is written then.
        NotImplementedError: for slopes per sequence, padding under a block table, and what no kernel computes.
    """
    sizes = check(q=(q, "b sq h d"), k_cache=(k_cache, "q: n p hk d"), v_cache=(v_cache, "q: n p hk dv"))
    b, sq, p = sizes["b"], sizes["sq"], sizes["p"]
    check_int("num_splits", num_splits)
    check_flag("causal", causal)
    given = dict(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens)
    given |= dict(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    same_device(q=q, **tensors)
    pages = _table(b, k_cache, cache_batch_idx, cache_leftpad, block_table)
    longest = pages.shape[1] * p
    before = _cached(b, cache_seqlens, longest, q.device)
    num_new = 0
    if k is not None:
        if v is None or cache_seqlens is None:
            name = "v" if v is None else "cache_seqlens"
            raise ValueError(f"{name}: expected one beside the new keys k, got None")
        num_new = check(sizes, k=(k, "b new hk d", q.dtype), v=(v, "b new hk dv", q.dtype))["new"]
    elif v is not None or rotary_cos is not None:
        name = "v" if v is not None else "rotary_cos"
        raise ValueError(
            f"{name}: expected None without new keys k, got {describe(v if v is not None else rotary_cos)}"
        )
    if before.is_cpu and b and not 0 <= int(before.min()) <= int(before.max()) <= longest - num_new:
        raise ValueError(
            f"cache_seqlens: expected 0..{longest - num_new} tokens in a cache for {longest}, before {num_new} new "
            f"ones, got {before.tolist()}"
        )
    number = torch.arange(b + 1, dtype=torch.int32, device=q.device)
    batch = Batch(number * sq, before + num_new, pages, sq, longest, num_tokens=b * sq)
    window = _window(window_size)
    plan = _plan_over_pages(batch, k_cache, causal, window, cache_leftpad)
    options = _options(softmax_scale, softcap, alibi_slopes, batch_invariant=num_splits == 1)
    Pages(k_cache, v_cache).check(q.flatten(0, 1), plan, options, None, True)  # before anything is written
    if k is not None and v is not None:
        if rotary_cos is not None:
            _check_rotary(rotary_cos, rotary_sin, longest, q)
            assert rotary_sin is not None
            moves = (causal and sq > 1) or any(0 <= side < longest for side in window)
            tables = rotary_cos, rotary_sin, rotary_interleaved
            q = _rotate(q, before, *tables, moves=moves)
            k = _rotate(k, before, *tables)
        new = Batch(number * num_new, before + num_new, pages, num_new, longest, num_tokens=b * num_new)
        slots = _twin.metadata.slot_mapping(new, b * num_new, block_size=p)
        _twin.kv_cache.write(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
    out, lse = _twin.interval.attention(q.flatten(0, 1), k_cache, v_cache, plan, options, return_lse=True)
    out = rearrange(out, "(b sq) h dv -> b sq h dv", b=b)
    return (out, rearrange(lse, "(b sq) h -> b h sq", b=b)) if return_softmax_lse else out


# --- from their arguments to ours ---


def _options(
    softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None, *, batch_invariant: bool = False
) -> AttentionOptions:
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.ndim != 1:
        raise NotImplementedError(
            f"alibi_slopes: expected one per head [h], as in both twins, got {describe(alibi_slopes)}"
        )
    return AttentionOptions(softmax_scale, softcap, alibi_slopes, batch_invariant=batch_invariant)


def _window(window_size: Window) -> tuple[int, int]:
    try:
        left, right = map(index, window_size)
    except (TypeError, ValueError):
        raise ValueError(f"window_size: expected (left, right), two ints, got {window_size!r}") from None
    return max(left, -1), max(right, -1)  # theirs is unlimited for any number below 0


def _length(name: str, length: int | Tensor) -> int:
    """Return a length as a Python int: some callers have it in a tensor."""
    try:
        return index(length)
    except TypeError:
        raise ValueError(f"{name}: expected an int, got {describe(length)}") from None


def _table(
    b: int,
    k_cache: Tensor,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> Int32[Tensor, "b m"]:
    """Return the block table; without pages, that of a pool with one page per sequence."""
    if block_table is None:
        rows = torch.arange(b, dtype=torch.int32, device=k_cache.device) if cache_batch_idx is None else cache_batch_idx
        check(dict(b=b), cache_batch_idx=(rows, "int32 b"))
        return rows[:, None]
    if cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: expected None beside a block table, got a tensor")
    if cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad: expected None beside a block table, as in flash-attn, got a tensor")
    return block_table


def _cached(b: int, cache_seqlens: int | Tensor | None, longest: int, device: torch.device) -> Int32[Tensor, "b"]:
    """Return how many tokens of each sequence are in the cache."""
    if isinstance(cache_seqlens, Tensor):
        check(dict(b=b), cache_seqlens=(cache_seqlens, "int32 b"))
        return cache_seqlens.contiguous()
    if cache_seqlens is not None:
        check_int("cache_seqlens", cache_seqlens)
    return torch.full((b,), longest if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=device)


def _plan_over_pages(
    batch: Batch, k_cache: Tensor, causal: bool, window: tuple[int, int], leftpad: Tensor | None = None
) -> Plan:
    """Plan over pages; with padding on the left, by the interval of keys that each query sees."""
    p = check(k_cache=(k_cache, "n p hk d"))["p"]
    plan: Plan
    if leftpad is None:
        plan = _twin.sliding_window.plan(batch, window_size=window, block_size=p, causal=causal)
        return plan
    check(dict(b=batch.num_seqs), cache_leftpad=(leftpad, "int32 b"))
    left, right = window[0], 0 if causal else window[1]
    step = torch.arange(batch.max_query_len, dtype=torch.int32, device=batch.device)
    position = (batch.context_lens[:, None] + step).flatten()
    padding, ends = (x.repeat_interleave(batch.max_query_len) for x in (leftpad, batch.seq_lens - 1))
    plan = _twin.interval.plan(
        batch,
        first_visible=padding if left < 0 else padding.maximum(position - left),
        last_visible=ends if right < 0 else ends.minimum(position + right),
        block_size=p,
    )
    return plan


# --- rotary positions ---


def _check_rotary(cos: Tensor, sin: Tensor | None, longest: int, q: Tensor) -> None:
    sizes = check(rotary_cos=(cos, "positions half", q.dtype))
    rows, half = sizes["positions"], sizes["half"]
    if sin is None:
        raise ValueError("rotary_sin: expected one beside rotary_cos, got None")
    check(sizes, rotary_sin=(sin, "positions half", q.dtype))
    if rows < longest or 2 * half > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: expected at least {longest} positions, as the cache has, of at most {q.shape[-1] // 2} "
            f"cosines, got {describe(cos)}"
        )


def _rotate(
    x: Float[Tensor, "b s h d"],
    first: Int32[Tensor, "b"],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    *,
    moves: bool = True,
) -> Float[Tensor, "b s h d"]:
    """Rotate the first elements of each head by the position of its token, from `first` on if it moves."""
    step = torch.arange(x.shape[1], device=x.device)
    position = first.long()[:, None] + (step if moves else torch.zeros_like(step))  # [b, s]
    position = position.clamp(max=len(cos) - 1)  # more queries than new keys may stand past the cache
    compute = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[position].to(compute)[:, :, None] for table in (cos, sin))  # [b, s, 1, half]
    rotated, rest = x[..., : 2 * c.shape[-1]].to(compute), x[..., 2 * c.shape[-1] :]
    pairs = "b s h (half two) -> two b s h half" if interleaved else "b s h (two half) -> two b s h half"
    one, other = rearrange(rotated, pairs, two=2)
    turned = torch.stack([one * c - other * s, other * c + one * s])
    back = rearrange(turned, " -> ".join(reversed(pairs.split(" -> "))))
    return torch.cat([back.to(x.dtype), rest], dim=-1)
