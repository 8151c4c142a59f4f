"""FlashMLA: DeepSeek's latent attention, its half for Hopper, in the package `sgl-flash-mla`."""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from refattn.batch import Batch
from twinattn.libraries import Call, missing, of_rectangle, output_of

STEP = 128  # slots of a list, of which its kernels take a multiple
V4_ROW = 448, 576  # values in e4m3 of a key of DeepSeek-V4, and the bytes of a key without its scales


def available() -> str | None:
    """Return why it cannot be used."""
    return missing("flash_mla")


def prepare(
    query: Tensor,
    cache: Tensor,
    batch: Batch,
    latent_rank: int,
    softmax_scale: float,
    return_lse: bool = False,
) -> Call:
    """Prepare `flash_mla_with_kvcache`, for as many queries of each sequence; its first call shares out the work."""
    from flash_mla import get_mla_metadata

    schedule, _ = get_mla_metadata()
    call = _prepare(query, cache, batch, latent_rank, schedule, softmax_scale=softmax_scale)
    return of_rectangle(call) if return_lse else output_of(call)


def prepare_fp8(
    query: Tensor, cache: Tensor, batch: Batch, latent_rank: int, softmax_scale: float, *, cache_scale: float
) -> Call:
    """Prepare it over latents in fp8, of queries in fp8 as well; the work is shared out before the first call."""
    from flash_mla.flash_mla_interface import FlashMLASchedMeta, get_mla_decoding_metadata

    schedule, rows = FlashMLASchedMeta(), len(query) // batch.num_seqs * query.shape[1]
    schedule.tile_scheduler_metadata, schedule.num_splits = get_mla_decoding_metadata(
        batch.seq_lens, rows, 1, query.shape[1], True, None, use_legacy=True
    )
    scales = (torch.full((1,), x, dtype=torch.float32, device=query.device) for x in (1.0, cache_scale))
    descale_q, descale_k = scales
    quantized = dict(is_fp8_kvcache=True, descale_q=descale_q, descale_k=descale_k)
    call = _prepare(query, cache, batch, latent_rank, schedule, softmax_scale=softmax_scale, **quantized)
    return output_of(call)


def prepare_selected(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    latent_rank: int,
    softmax_scale: float,
    return_lse: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Call:
    """Prepare its kernel for sparse prefills: of each query the slots of the latents that it sees, `[t, k]`.

    Lists get -1 up to a multiple of 128, of which it has to have them. It takes heads of 576 or of 512 elements, whose
    first 512 are the value. Its log-sum-exp is without sinks.
    """
    from flash_mla.flash_mla_interface import flash_mla_sparse_fwd

    rows = cache.flatten(0, 1)[:, None, : query.shape[-1]]
    slots = pad(slots.int(), (0, -slots.shape[1] % STEP), value=-1)[:, None]
    options: dict[str, Any] = {} if sinks is None else dict(attn_sink=sinks.float())
    call = partial(flash_mla_sparse_fwd, query, rows, slots, softmax_scale, latent_rank, use_legacy=True, **options)
    if not return_lse:
        return output_of(call)

    def both() -> tuple[Tensor, Tensor]:
        out, _, lse = call()
        return out, lse if sinks is None else torch.logaddexp(lse, sinks.float())

    return both


def prepare_packed(
    query: Tensor, cache: Tensor, slots: Tensor, latent_rank: int, softmax_scale: float, return_lse: bool = False
) -> Call:
    """Prepare its kernel for sparse decodes, over rows of 656 bytes; its first call shares out the work.

    Lists get -1 up to a multiple of 128, of which it has to have them.

    Raises:
        NotImplementedError: if there is something between the rows of a page.
    """
    from flash_mla import get_mla_metadata
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache

    if cache.stride(1) != cache.shape[2]:
        raise NotImplementedError("reads rows that follow one another without a gap")
    schedule, _ = get_mla_metadata()
    call = partial(
        flash_mla_with_kvcache,
        query[:, None],
        cache[:, :, None],
        None,
        None,
        latent_rank,
        schedule,
        softmax_scale=softmax_scale,
        is_fp8_kvcache=True,
        indices=pad(slots.int(), (0, -slots.shape[1] % STEP), value=-1)[:, None],
        use_legacy=True,
    )
    return of_rectangle(call) if return_lse else output_of(call)


def pack_keys(pool: Tensor) -> Tensor:
    """Return a pool of keys in e4m3 `[n, p, 512]` as it keeps those of DeepSeek-V4 `[n, p, 1, 584]`, with scales of 1.

    A block has the rows of its tokens, each of 448 values in e4m3 and 64 in bfloat16, and then 8 bytes for each token:
    7 scales, of 64 values each, as exponents of 2, and one that is not read. Blocks begin at multiples of 576 bytes.
    """
    (n, p, _), (nope, row) = pool.shape, V4_ROW
    pages = torch.zeros(n, -(-p * (row + 8) // row) * row, dtype=torch.uint8, device=pool.device)
    rows = pages[:, : p * row].unflatten(1, (p, row))
    rows[..., :nope] = pool[..., :nope].view(torch.uint8)
    rows[..., nope:] = pool[..., nope:].to(torch.bfloat16).view(torch.uint8)
    pages[:, p * row : p * (row + 8)] = 127  # 2**0
    return pages[:, : p * (row + 8)].unflatten(1, (p, row + 8))[:, :, None]


def prepare_two_pools(
    query: Tensor, pools: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor], softmax_scale: float, sinks: Tensor
) -> Call:
    """Prepare its kernel for decodes of DeepSeek-V4, from two pools with a list of slots in each, under one softmax.

    The first call shares out the work. Lists get -1 up to a multiple of 128, of which it has to have them.

    Args:
        query: `[t, h, 512]`, of 64 or 128 heads.
        pools: of keys and of entries, from `pack_keys`.
        slots: `[t, k]` in each of them, -1 for none.
        softmax_scale: the factor of the scores.
        sinks: `[h]`.
    """
    from flash_mla import get_mla_metadata
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache

    schedule, _ = get_mla_metadata()
    indices, others = (pad(x.int(), (0, -x.shape[1] % STEP), value=-1)[:, None] for x in slots)
    call = partial(
        flash_mla_with_kvcache,
        query[:, None],
        pools[0],
        None,
        None,
        query.shape[-1],
        schedule,
        softmax_scale=softmax_scale,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=sinks.float(),
        extra_k_cache=pools[1],
        extra_indices_in_kvcache=others,
        use_legacy=True,
    )
    return output_of(call)


def _prepare(query: Tensor, cache: Tensor, batch: Batch, latent_rank: int, schedule: Any, **options: Any) -> Call:
    """Prepare its half for Hopper under a causal mask, with the work shared out by `schedule`."""
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache

    return partial(
        flash_mla_with_kvcache,
        rearrange(query, "(b t) h d -> b t h d", b=batch.num_seqs),
        cache[:, :, None, : query.shape[-1]],
        batch.block_table,
        batch.seq_lens,
        latent_rank,
        schedule,
        causal=True,
        use_legacy=True,
        **options,
    )
