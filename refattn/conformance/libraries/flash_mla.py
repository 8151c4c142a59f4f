"""FlashMLA: DeepSeek's latent attention, its half for Hopper, in the package `sgl-flash-mla`."""

from functools import partial

from einops import rearrange
from torch import Tensor

from refattn.conformance.libraries import Call, missing, of_rectangle, output_of
from refattn.interface import Batch


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
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    schedule, _ = get_mla_metadata()
    call = partial(
        flash_mla_with_kvcache,
        rearrange(query, "(b t) h d -> b t h d", b=batch.num_seqs),
        cache[:, :, None, : query.shape[-1]],
        batch.block_table,
        batch.seq_lens,
        latent_rank,
        schedule,
        softmax_scale=softmax_scale,
        causal=True,
        use_legacy=True,
    )
    return of_rectangle(call) if return_lse else output_of(call)
