"""A contender of a row: what prepares a call that is timed; and our twins, called as a server calls them.

A contender prepares everything that a server has ready before a step (pages, tables, plans, compiled kernels) and
returns the call to be timed.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn.kernels import use_kernel
from refattn.options import AttentionOptions
from twinattn.bench import measure
from twinattn.bench.measure import Call
from twinattn.bench.work import LAMBDA, LAMBDA_INIT, NORM_EPS, Attention, Inputs, Judge, of_fp8_weights
from twinattn.kit.search.inputs import Modules, planning


@dataclass(frozen=True)
class Contender:
    """One way to compute a row.

    Attributes:
        name: as the report shows it.
        prepare: makes the call that is timed out of the inputs.
        rows: einops pattern that turns the answer into `[t, h, dv]`, outside of the time.
        lse: the call takes `return_lse=True`, and what it answers then is held to the rule too.
        judge: replaces the row's own judge, for a yardstick that computes something else over the same bytes.
    """

    name: str
    prepare: Callable[[Any], Call]
    rows: str | None = None
    lse: bool = False
    judge: Callable[[Any], Judge] | None = field(default=None, repr=False)


def twin(
    path: str = "", *, package: str = "fastattn", name: str | None = None, kernel: str | None = None, **planned: Any
) -> Contender:
    """A path of ours; it plans once per step, before the time is taken.

    Args:
        path: which; that of the work if empty.
        package: "fastattn" or "refattn".
        name: as the report shows it; the package, and the kernel if one is asked for, if None.
        kernel: ask for this kernel, to see whether the chosen one is the fastest.
        planned: arguments of the plan beside the batch and the block size, where the work does not say them.
    """

    def prepare_call(inputs: Inputs) -> Call:
        work = replace(inputs.work, path=path, plan_of="") if path else inputs.work
        call = _call(work, inputs, lambda name: importlib.import_module(f"{package}.{name}"), planned)
        return call if kernel is None else partial(call_with, kernel, call)

    return Contender(name or ", ".join(filter(None, (package, kernel))), prepare_call, lse=True)


def _call(work: Attention, inputs: Inputs, modules: Modules, planned: dict[str, Any]) -> Call:
    """Plan a step with the modules of a twin, and return the call of a layer."""
    if work.path == "mla_prefill":
        return _prefill_call(work, inputs, modules("mla"))
    tensors: tuple[Tensor, ...] = (inputs.query, inputs.key_cache, inputs.value_cache)
    more: dict[str, Any] = {}
    if work.path == "varlen":
        tensors = inputs.query, inputs.key, inputs.value
    elif work.path == "differential":
        tensors = inputs.query, halves(inputs)
        more = dict(lambda_full=tensors[1].new_tensor(LAMBDA, dtype=torch.float32), lambda_init=LAMBDA_INIT)
        more |= dict(norm_eps=NORM_EPS)
    elif work.path == "mla":
        tensors, more = tensors[:2], dict(latent_rank=work.value_size, cache_scale=inputs.scales or 1.0)
    elif work.path == "quantized":
        more = dict(scales=inputs.scales)
    plan = planning(work, modules, inputs.batch, **planned)()
    options = AttentionOptions(softmax_scale=work.softmax_scale)
    return partial(modules(work.path).attention, *tensors, plan, options, **more)


def _prefill_call(work: Attention, inputs: Inputs, mla: Any) -> Call:
    """Plan the prefill over latents: the new tokens, and the chunks of their context."""
    new, rank = inputs.new_rows()[:, 0], work.value_size
    plan = mla.plan_prefill(
        inputs.batch,
        block_size=work.block_size,
        workspace=work.workspace * len(work.lens),
        max_context_len=max(seq_len - query_len for query_len, seq_len in work.lens),
    )
    options = AttentionOptions(softmax_scale=work.query_size**-0.5)
    projections = dict(zip(("key_projection", "value_projection"), inputs.projections, strict=True))
    return partial(
        mla.prefill, inputs.query, new[:, :rank], new[:, rank:], inputs.key_cache, plan, options, **projections
    )


def over_plain_cache(contender: Contender) -> Contender:
    """Another contender, over a plain cache of what was quantized: twice the bytes."""
    return replace(
        contender,
        name=f"{contender.name}, plain cache",
        prepare=lambda inputs: contender.prepare(inputs.plain),
        judge=lambda inputs: inputs.plain.work.judge(inputs.plain),
    )


def as_chain(contender: Contender) -> Contender:
    """A yardstick for drafted trees: the same tokens as a chain, whose mask is causal, over the same bytes."""
    return replace(
        contender,
        name=f"a chain: {contender.name}",
        judge=lambda inputs: replace(inputs.work, trees="").judge(inputs),
    )


def plain_attention() -> Contender:
    """A yardstick for differential attention: one plain attention that reads the same bytes."""
    return replace(
        twin("chunked_prefill", name="plain attention, same bytes"),
        judge=lambda inputs: replace(inputs.work, path="chunked_prefill").judge(inputs),
    )


def call_with(kernel: str, call: Call, **options: Any) -> Any:
    """Make a call of ours with a kernel."""
    with use_kernel(kernel):
        return call(**options)


def layers(count: int, *, plan_in_each: bool = False) -> Contender:
    """A step of a model: a plan, and attention in each of its layers, over the same keys.

    On a GPU it fails if a layer launches a kernel that the plan launches too, as then a layer makes tables.

    Args:
        count: layers.
        plan_in_each: plan in each layer instead, as if there were no plan to keep.
    """

    def prepare_call(inputs: Inputs) -> Call:
        module = importlib.import_module(f"fastattn.{inputs.work.path}")
        make_plan = planning(inputs.work, lambda _: module, inputs.batch)
        attend = partial(module.attention, inputs.query, inputs.key_cache, inputs.value_cache)

        def call() -> Tensor:
            plan = make_plan()
            for i in range(count):
                out: Tensor = attend(make_plan() if plan_in_each and i else plan)
            return out

        if inputs.query.is_cuda and not plan_in_each:
            check_no_tables(make_plan, partial(attend, make_plan()))
        return call

    return Contender("fastattn, a plan in each layer" if plan_in_each else "fastattn", prepare_call)


def check_no_tables(make_plan: Call, attend: Call) -> None:
    """Check that attention launches none of the kernels that make a plan.

    Raises:
        RuntimeError: naming those that it launches, or where the plan launches none, so that nothing is shown.
    """
    planned, attended = measure.launches(make_plan), measure.launches(attend)
    if not planned or not attended:
        raise RuntimeError(f"expected kernels of a plan and of a layer, the profiler saw {planned} and {attended}")
    both = sorted(planned.keys() & attended.keys())
    if both:
        raise RuntimeError(f"expected no kernels of a plan in a layer, got {', '.join(both)}")


def twin_in_fp8() -> Contender:
    """Our path over latents in fp8, where queries and weights may be rounded; it rounds the queries itself."""

    def prepare_call(inputs: Inputs) -> Call:
        return partial(_call(inputs.work, inputs, partial(_path, "fastattn"), {}), query_scale=1.0, fp8_weights=True)

    return Contender("fastattn, queries and weights in fp8", prepare_call, judge=by_fp8_weights)


def _path(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


def by_fp8_weights(inputs: Inputs) -> Judge:
    """Hold an answer to twice the error of weights in fp8, whose largest is 1."""
    return inputs.work.judge(inputs, partial(of_fp8_weights, largest=1.0))


def halves(inputs: Inputs) -> Tensor:
    """Lay the pages out as differential attention has them: `[half, key or value, n, p, hk/2, d]`."""
    caches = inputs.key_cache, inputs.value_cache
    return torch.stack([torch.stack([cache[:, :, half::2] for cache in caches]) for half in (0, 1)])
