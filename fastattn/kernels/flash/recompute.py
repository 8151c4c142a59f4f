"""Complete outputs of other kernels: recompute NaN from hidden memory, and add nodes of trees and later keys.

Source: the kernel of `fastattn.kernels.triton.attention`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fastattn.kernels.replay import Key, key_of_launch, launch_once
from fastattn.kernels.triton.attention import launch_attend
from fastattn.kernels.triton.launch import can_overlap
from fastattn.kernels.triton.merge import Out, repair, rest
from fastattn.kernels.triton.quantized import UNQUANTIZED, Quantization
from fastattn.kernels.triton.queries import has_scale_above_0, layer_args
from fastattn.kernels.triton.tuning import (
    LATENT_16,
    LATENT_64,
    LaunchConfig,
    bytes_of_a_program,
    fit,
    pad,
    spare_stages,
    step_for,
)
from refattn.keys import Latents
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import TreePlan


def recompute(
    out: Float[Tensor, "t h dv"],
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Shaped[Tensor, "n p hk d"],
    value: Float[Tensor, "s hk dv"] | Shaped[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    *,
    shared: bool = False,
    quantization: Quantization = UNQUANTIZED,
    adapted: bool = True,
) -> None:
    """Recompute, in place, output rows that are NaN because another kernel multiplied memory that no query sees.

    A kernel that loads whole tiles gives a weight of 0 to values past a sequence's end, before a window, or of the
    next sequence: harmless while they are finite, but 0 times NaN is NaN. The log-sum-exp is not affected, as the
    scores of such keys are masked. A NaN that a query may see comes out again.

    It costs a launch that reads the outputs which a tile of at most `LARGEST_TILE` rows and keys can have spoilt:
    those of the last queries of a sequence, in a window also of the first ones, of all queries without a causal mask.

    Args:
        out: the outputs, contiguous.
        query: query rows of all sequences.
        key: the pool of keys if it has four dimensions, else the key rows of all sequences.
        value: the pool of values, or the value rows.
        plan: the lengths, the block table for pages, and the mask.
        options: the layer's options; `out` has the sinks already.
        shared: values are the first elements of their keys; see `launch_attend`.
        quantization: how the pools are quantized, if they are: fp8 values are seen as bytes, and their scales are
            numbers.
        adapted: `fastattn.kernels.flash.fixup.fix_up` was launched just before, so this launch may begin early. After a
            package's own launch it must not, as that may end before the launch which precedes it.

    Source: the module.
    """
    if 0 in (*query.shape[:2], plan.batch.num_seqs):
        return
    row_bytes, key_bytes = bytes_of_a_program(query, key, value, shared)
    tensors = query, key, value

    def launch() -> Callable[..., None]:
        tuning = LATENT_16 if shared else LaunchConfig(64, step_for(64, row_bytes), 4, 3, 1, 1)
        room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1)
        tuning = fit(tuning, query.device, **room)
        overlap = adapted and can_overlap(query.device)
        split = repair(overlap=overlap)
        return launch_attend(
            *tensors, plan, options, tuning, Out(out, None), split, shared=shared, quantization=quantization
        ).replay

    cache_key = _key_of_launch(f"recompute {quantization.kind} {adapted}", (*tensors, out), options, shared=shared)
    launch_once(plan, cache_key, (*tensors, out, None, *layer_args(query, options, quantization).values()), launch)


def recompute_latents(
    out: Float[Tensor, "t h r"],
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: Plan,
    options: AttentionOptions,
    latent_rank: int,
) -> None:
    """Recompute outputs over latents; see `recompute` and `fastattn.mla.attention`.

    Source: the module.
    """
    pages = cache[:, :, None, : query.shape[2]]
    recompute(out, query, pages, pages[..., :latent_rank], plan, options, shared=True)


def attend_to_nodes(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "n p hk d"],
    value: Float[Tensor, "n p hk dv"],
    plan: TreePlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"],
    prefix_lse: Float[Tensor, "h t"],
    *,
    shared: bool = False,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to the nodes of trees, and merge with the output of another kernel over the keys before them.

    One launch over few keys, in place; it adds the sinks.

    Args:
        query: query rows of all sequences.
        key: the pool of keys.
        value: the pool of values.
        plan: the trees.
        options: the layer's options.
        out: the outputs over the keys before the trees, contiguous, changed in place. Padding rows may hold anything,
            and so may rows whose tree has no key before it.
        prefix_lse: their log-sum-exps, natural log; infinite, of either sign, for NaN.
        shared: values are the first elements of their keys; see `launch_attend`.

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: the module.
    """
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    if not plan.trees.max_len:  # all rows are padding
        return out.zero_(), lse.fill_(-torch.inf)
    row_bytes, key_bytes = bytes_of_a_program(query, key, value, shared)
    rows = plan.whole.batch.max_query_len * (query.shape[1] // key.shape[-2])
    tensors = query, key, value

    def launch() -> Callable[..., None]:
        if shared:
            tuning = LATENT_16 if rows <= 16 else LATENT_64
        else:
            tuning = LaunchConfig(16 if rows <= 16 else 64, step_for(32, row_bytes), 4, 2, 1, 1)
        tuning = tuning._replace(block_n=max(16, min(tuning.block_n, pad(plan.trees.max_len))))
        spare = min(0, spare_stages(query, shared, UNQUANTIZED, tuning.block_m))
        room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1, spare=spare)
        tuning = fit(tuning, query.device, **room)
        split = rest(prefix_lse, nodes=True)
        return launch_attend(
            *tensors, plan.whole, options, tuning, Out(out, lse), split, shared=shared, tree=plan
        ).replay

    cache_key = _key_of_launch("nodes", (*tensors, out, prefix_lse), options, shared=shared)
    launch_once(plan.whole, cache_key, (*tensors, out, lse, *layer_args(query, options).values(), prefix_lse), launch)
    return out, lse


def attend_after(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Float[Tensor, "n p hk d"],
    value: Float[Tensor, "s hk dv"] | Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"],
    lse: Float[Tensor, "t h"],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to intervals of few keys, and merge with the output of another kernel over other keys.

    One launch. Tiles whose rows see none of these keys are left unchanged.

    Args:
        query: query rows of all sequences.
        key: the pool of keys if it has four dimensions, else the key rows of all sequences.
        value: the pool of values, or the value rows.
        plan: the intervals.
        options: the layer's options; `out` has the sinks already.
        out: the output, fixed up, contiguous, changed in place.
        lse: its log-sum-exps.

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: the module.
    """
    if 0 in (*query.shape[:2], plan.batch.num_seqs):
        return out, lse
    merged, by_head = lse.clone(memory_format=torch.contiguous_format), lse.T
    by_head = by_head if by_head.stride(1) == 1 else by_head.contiguous()
    row_bytes, key_bytes = bytes_of_a_program(query, key, value, False)
    tensors, options = (query, key, value), options.without_sinks()

    def launch() -> Callable[..., None]:
        tuning = fit(
            LaunchConfig(64, step_for(64, row_bytes), 4, 1, 1, 1),
            query.device,
            row_bytes=row_bytes,
            key_bytes=key_bytes,
        )
        return launch_attend(*tensors, plan, options, tuning, Out(out, merged), rest(by_head, nodes=False)).replay

    cache_key = _key_of_launch("after", (*tensors, out, by_head), options, shared=False)
    launch_once(plan, cache_key, (*tensors, out, merged, *layer_args(query, options).values(), by_head), launch)
    return out, merged


def attend_to_latent_nodes(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: TreePlan,
    options: AttentionOptions,
    latent_rank: int,
    answer: tuple[Float[Tensor, "t h r"], Float[Tensor, "t h"]],
) -> tuple[Float[Tensor, "t h r"], Float[Tensor, "t h"]]:
    """Attend to the latents of drafted nodes, and merge with another kernel's output over those before the trees.

    Source: the module.
    """
    pages, (out, lse) = cache[:, :, None, : query.shape[2]], answer
    return attend_to_nodes(query, pages, pages[..., :latent_rank], plan, options, out, lse.T.contiguous(), shared=True)


def attend_to_latent_tree(
    attend: Callable[..., tuple[Tensor, Tensor]],
    query: Float[Tensor, "t h d"],
    keys: Latents,
    plan: TreePlan,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h r"], Float[Tensor, "t h"]]:
    """Attend to latents before the trees by another kernel, `attend`, and by a launch of ours to the nodes.

    Source: the module.
    """
    before = attend(query, keys.cache, plan.prefix, options.without_sinks(), keys.latent_rank, None)
    return attend_to_latent_nodes(query, keys.cache, plan, options, keys.latent_rank, before)


def _key_of_launch(name: str, tensors: tuple[Tensor, ...], options: AttentionOptions, *, shared: bool) -> Key | None:
    """Return the cache key of a launch over another kernel's output; None if the scale changes the query."""
    return (
        key_of_launch(f"{name} of latents" if shared else name, tensors, options)
        if has_scale_above_0(options)
        else None
    )
