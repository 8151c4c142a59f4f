"""Bind once, run often: the way from a path to a kernel.

The first attention call under a plan is bound: its arguments are checked, a kernel is chosen
(`fastattn.kernels.order`), and the prepared launch is stored with the plan. The layers of a step differ in little but
the addresses of their tensors, so a later layer finds the bound call by its cache key and runs it:

    in the cache key       the storage, the forced kernel, types, shapes, strides, devices, scalar options,
                           and whether a gradient is required, which no kernel computes
    not in the cache key   the contents of tensors, the values of scales, and addresses, if they are multiples
                           of 16 bytes
    fixed by the plan      lengths, tables, masks, levels, trees

Binding never changes an output; it saves CPU overhead. A captured CUDA graph replays launches without it. `mla.prefill`
and `context_parallel.attention` combine several calls; they are checked as a whole, and their calls are not bound.

Every other operation of a kernel is called by `run(operation, ...)`. The operations and their arguments:

    attend           query, keys, plan, options, out                        attend under a plan to `Keys`
    differential     query, cache, plan, options, subtraction, out          differential attention
    attend_compressed    query, window, entries, plan, options, out         attend to a window and to entries
    merge            outs, lses                                             combine partial outputs
    add_sinks        out, lse, sinks                                        add sinks to an output
    write            key, value, key_cache, value_cache, slot_mapping       write new tokens into the pool
    write_quantized  ... and scales                                         quantize and write them
    write_packed     latent, rope_key, cache, slot_mapping                  write latents into packed rows
    read_packed      rows, latent_rank, rope_size, dtype                    dequantize such rows
    copy_blocks      cache, pairs                                           copy blocks inside a pool
    compact          cache, batch, trees, accepted, block_size              move accepted nodes to the front of trees
    slot_mapping     batch, num_tokens, block_size                          the slot of each new token
    trim             batch, left, block_size, columns                       lengths and tables of a window
    cut_chunks       batch, chunk_size, block_size, num_chunks, columns     lengths and tables of virtual sequences
    draw_trees       batch, trees, num_tokens                               depths, ancestors, positions of nodes
    write_index      key, index_cache, slot_mapping                         write index keys into their pool
    read_index       index_cache, slots                                     read index keys
    score_index      query, weights, index_cache, plan                      score the visible keys
    select           scores, topk                                           the positions of the best keys
    selected_slots   batch, positions, block_size                           the slots of selected keys
    plan_selected    batch, positions, block_size                           a sequence for each query row
    recurrent        query, key, value, log_decay, beta, states, plan, options, out    fold new tokens into states
    convolve         inputs, weight, states, plan, bias, silu, out          causal convolution per channel
    replay           ... states, ring, plan, options, out                   rebuild states, and fold new tokens in
    flush            states, ring, plan                                     fold rings into checkpoints
    compress         row_cache, bias, plan                                  entries from the rows of their tokens

Attention returns `(out [t, h, dv], lse [t, h])` with the conventions of the project: natural log, float32 (float64 for
float64), 0 and `-inf` for a fully masked query. A kernel with other conventions is adapted in its own file. `out`, if
not None, is contiguous memory that overlaps no input; the kernel may write its output there or return another tensor. A
kernel may have `bind_attend`, which also takes `return_lse` and also returns a function with the arguments of `attend`
that computes the same call with the tensors of another layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fastattn.kernels import order
from fastattn.kernels.kernel import OWN_NORM, PAGES, QUANTIZED, Kernel, find
from fastattn.kernels.memory import addresses, in_memory, is_without_memory
from fastattn.kernels.pairs import in_pages, subtraction_of
from fastattn.kernels.problem import Problem, attention_problem, compute_dtype, problem_of
from fastattn.kernels.replay import ALIGNMENT, Bound, Key, forget_writes, layouts_of, memo_of, numbers_of, per_head_of
from refattn.checks_of_calls import check_plan
from refattn.keys import AnyKeys, Keys, Pages, Pairs, QuantizedPages, Rows
from refattn.modes import AUTOCAST_DEVICES, has_tangents, is_autocast_enabled, refuse_gradients
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan
from refattn.scales import Scales
from refattn.trees import AttentionPlan, TreePlan

NO_BACKWARD = "fastattn has no backward pass; use refattn, which has, or torch.no_grad()"


def attend(
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    kind: type | None = None,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend: run the call that the plan has bound for such arguments, else check the call and bind it.

    A bound call needs no checks: all that they depend on is in the cache key or fixed by the plan.

    Args:
        query: query rows of all sequences, `[t, h, d]`.
        keys: the storage of the keys.
        plan: the lengths, the tables and the mask.
        options: the layer's options.
        out: where to write the outputs; a new tensor if None.
        return_lse: also return the log-sum-exps.
        kind: the type of the path's plans; None for any.
        more: further arguments of differential attention.

    Raises:
        ValueError: as `keys.check` does.
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    if kind is not None and type(plan) is not kind:
        check_plan(plan, kind)
    key = key_of(order.forced.get(), query, keys, plan, options, out, return_lse, more)
    memo = None if key is None else vars(plan).get("memo")
    bound = None if memo is None else memo.bound.get(key)
    if bound is not None:
        try:
            if out is None and not more:  # most calls: `**` costs half a microsecond on the CPU
                answer, lse = bound.run(query, keys, plan, options, None)
            elif out is None:
                answer, lse = bound.run(query, keys, plan, options, None, **more)
            else:
                memory = _memory(out, query, *keys, *per_head_of(options), *more.values())
                answer, lse = _into(out, *bound.run(query, keys, plan, options, memory, **more))
            return (answer, lse) if return_lse else answer
        except torch.OutOfMemoryError:
            pass  # computed again as a first call, whose error gives advice
    keys.check(query, plan, options, out, return_lse, **more)
    answer, lse = compute(query, keys, plan, options, out, key, return_lse, **more)
    return (answer, lse) if return_lse else answer


def compute(
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None = None,
    key: Key | None = None,
    return_lse: bool = True,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Attend with checked arguments; return the outputs and their log-sum-exps.

    Args:
        query: query rows of all sequences, `[t, h, d]`.
        keys: the storage of the keys.
        plan: the lengths, the tables and the mask.
        options: the layer's options.
        out: where to write the outputs; a new tensor if None.
        key: from `key_of`, to bind the call under this key; None to bind nothing.
        return_lse: whether later calls with this key return the log-sum-exps.
        more: as in `attend`.
    """
    given = _read(query=query, keys=keys, plan=plan, options=options, out=out, **more)
    query, keys, plan, options, out, *_ = given.values()
    more = {name: given[name] for name in more}
    with launching(query.device):
        memory = _memory(out, query, *keys, *per_head_of(options), *more.values())
        again = None if key is None else return_lse
        if isinstance(keys, Pairs):
            answer, lse, bound = _with_subtraction(query, keys, plan, options, memory, again, **more)
        else:
            answer, lse, bound = _by_a_kernel(query, keys, plan, options, memory, again)
        if key is not None:
            memo_of(plan).bound[key] = bound
        return _into(out, answer, lse)


def run(operation: str, **arguments: Any) -> Any:
    """Run an operation other than attention by the first kernel that can: `run("merge", outs=outs, lses=lses)`.

    Args:
        operation: one of those listed above.
        arguments: its arguments, in order.

    Raises:
        NotImplementedError: if a gradient is required, or no kernel computes the operation, with the reason of each.
    """
    return launch(getattr(order.choose(problem_of(operation, arguments)), operation), **arguments)


def run_in_each(operation: str, pools: Sequence[Tensor], **arguments: Any) -> None:
    """Run an operation in several pools, after a kernel is found for every one."""
    run_each(operation, [{"cache": pool, **arguments} for pool in pools])


def run_each(operation: str, calls: Sequence[dict[str, Any]]) -> None:
    """Run several calls of an operation, after a kernel is found for every one.

    Raises:
        NotImplementedError: as `run` does, before anything is computed if there is no kernel for one of them.
    """
    kernels = [order.choose(problem_of(operation, call)) for call in calls]
    for kernel, call in zip(kernels, calls, strict=True):
        launch(getattr(kernel, operation), **call)


def launch(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of a kernel with tensors that it can read by address, on the GPU of the first one.

    Raises:
        NotImplementedError: if a gradient is required.
        ValueError: naming a tensor without memory.
    """
    given = _read(**arguments)
    first = next(iter(given.values()))
    with launching((first[0] if isinstance(first, list | tuple) else first).device):
        return function(**given)


def forget() -> None:
    """Clear the caches of chosen kernels and bound writes; bound attention calls are stored with their plans."""
    order.forget()
    forget_writes()


# --- around a launch ---


def _read(**arguments: Any) -> dict[str, Any]:
    """Raise if a gradient is required, and return the arguments with lazy views resolved in memory."""
    refuse_gradients(NO_BACKWARD, **arguments)
    return {name: in_memory(name, argument) for name, argument in arguments.items()}


@contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Disable autocast, set the device, and add advice to out-of-memory errors.

    Kernels launch on the current GPU, whichever GPU the tensors are on.
    """
    with ExitStack() as around:
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                around.enter_context(torch.autocast(kind, enabled=False))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            around.enter_context(torch.cuda.device(device))
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "query: expected few enough rows for the memory that is left; take fewer at a time (an engine: "
                f"max_num_batched_tokens), or a smaller pool of keys and values (num_blocks). {error}"
            ) from error


def memory_for(out: Tensor | None, *read: object) -> Tensor | None:
    """Return where a kernel may write its output: `out`, if it overlaps no input."""
    return None if out is None or _overlaps(out, read) else out


def _memory(out: Tensor | None, *read: object) -> Tensor | None:
    """Return where a kernel may write its output: `out`, if it is contiguous and overlaps no input.

    A kernel may read an input after it has written some of the output. This is checked in every call, as cache keys
    have no addresses.
    """
    return out if out is not None and out.is_contiguous() and not _overlaps(out, read) else None


def _overlaps(out: Tensor, read: Iterable[object]) -> bool:
    """Return whether the memory for an output overlaps the address range of an input.

    Inputs are tensors and scales, whose tensors count; others are skipped.
    """
    begin, end = addresses(out)
    for x in read:
        if isinstance(x, Tensor):
            if x.data_ptr() < end and begin < addresses(x)[1]:
                return True
        elif isinstance(x, Scales) and _overlaps(out, vars(x).values()):
            return True
    return False


def _into(out: Tensor | None, answer: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Copy an output to `out` if it is not there."""
    if out is None or answer is out:
        return answer, lse
    return out.copy_(answer), lse


# --- which kernels ---


def _by_a_kernel(
    query: Tensor,
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool | None,
) -> tuple[Tensor, Tensor, Bound]:
    """Attend, and return the bound call; with `return_lse` None, without a kernel's own binding.

    The levels of a cascade are one call if the same kernel is chosen for each and it supports several levels. Otherwise
    each level uses its own kernel, and the outputs merge. For quantized pages, a kernel that supports all levels in one
    call is chosen first.
    """
    problem = attention_problem(query, keys, plan, options)
    if problem.levels == 1 or isinstance(keys, QuantizedPages):
        return _bind(order.choose(problem), "attend", query, keys, plan, options, out, return_lse=return_lse)
    levels = [attention_problem(query, keys, *one) for one in _levels_of(plan, options)]
    kernels = [order.choose(level._replace(asks=problem.asks)) for level in levels]
    if len(set(kernels)) == 1 and kernels[0].computes(problem):
        return _bind(kernels[0], "attend", query, keys, plan, options, out, return_lse=return_lse)
    attends = [kernel.attend for kernel in kernels]
    merge = order.choose(Problem("merge", query.device, compute_dtype(query.dtype))).merge

    def one_by_one(
        query: Tensor, keys: Keys, plan: AttentionPlan, options: AttentionOptions, _: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        work = zip(attends, _levels_of(plan, options), strict=True)
        parts = [attend(query, keys, *one, None) for attend, one in work]
        answer: tuple[Tensor, Tensor] = merge(*zip(*parts, strict=True))
        return answer

    return *one_by_one(query, keys, plan, options, out), Bound(", ".join(one.name for one in kernels), one_by_one)


def _bind(kernel: Kernel, operation: str, *arguments: Any, return_lse: bool | None) -> tuple[Tensor, Tensor, Bound]:
    """Compute attention by a kernel; return the outputs and the bound call for other tensors."""
    where = None if return_lse is None else kernel.functions.get(f"bind_{operation}")
    if where is None:
        module, name = find(kernel.functions[operation])
        again = getattr(module, name)
        return *again(*arguments), Bound(kernel.name, again)
    module, name = find(where)
    answer, lse, again = getattr(module, name)(*arguments, return_lse)
    return answer, lse, Bound(kernel.name, again)


def _levels_of(plan: AttentionPlan, options: AttentionOptions) -> list[tuple[Plan | TreePlan, AttentionOptions]]:
    """Return each level with its options: sinks count once, in the last level, which has every query."""
    *shared, own = plan.levels
    return [*((level, options.without_sinks()) for level in shared), (own, options)]


def _with_subtraction(
    query: Tensor,
    keys: Pairs,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool | None,
    **more: Any,
) -> tuple[Tensor, Tensor, Bound]:
    """Attend by a kernel that fuses the subtraction and reads every key and value once, if one can.

    Otherwise use four calls of attention: always for an fp8 cache, cascades and draft trees, and if the forced kernel
    cannot.
    """
    order.refuse_unknown("differential attention", PAGES | QUANTIZED, keys)
    if keys.scales is None and isinstance(plan, Plan):
        pages, over_pages = in_pages(keys.cache, plan)
        problem = attention_problem(query[:, ::2], Pages(pages[0, 0], pages[0, 1]), over_pages, options)
        asks = problem.asks if more.get("norm") is None else problem.asks | OWN_NORM
        kernel = order.choose_fused(problem._replace(operation="differential", asks=asks), order.forced.get())
        if kernel is not None:  # a bound launch has one table, but rows get a new one per call
            arguments = query, pages, over_pages, options, subtraction_of(**more), out
            again = return_lse if over_pages is plan else None
            answer, lse, bound = _bind(kernel, "differential", *arguments, return_lse=again)
            subtract = bound.run

            def of_kernel(
                query: Tensor,
                keys: Pairs,
                plan: Plan,
                options: AttentionOptions,
                out: Tensor | None,
                **more: Any,
            ) -> tuple[Tensor, Tensor]:
                arguments = query, *in_pages(keys.cache, plan), options, subtraction_of(**more), out
                answer, lse = subtract(*arguments)
                return answer if answer is out else answer.view(query.shape), lse

            return answer if answer is out else answer.view(query.shape), lse, Bound(bound.kernel, of_kernel)

    def by_four_calls(
        query: Tensor, keys: Pairs, plan: AttentionPlan, options: AttentionOptions, _: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend with each half of the queries to the values of both halves."""
        subtraction, compute = subtraction_of(**more), compute_dtype(query.dtype)
        lse = query.new_empty(query.shape[:2], dtype=compute)
        answers: list[Tensor] = []
        for half in (0, 1):
            queries, its_options = query[:, half::2], options.of_heads(slice(half, None, 2))
            parts: list[Tensor] = []
            for other in (0, 1):
                values = keys.of_halves(half, other)
                bound = calls.get((half, other))
                if bound is None:
                    part, lse[:, half::2], bound = _by_a_kernel(queries, values, plan, its_options, None, None)
                    calls[half, other] = bound
                else:
                    part, lse[:, half::2] = bound.run(queries, values, plan, its_options, None)
                parts.append(part.to(compute))
            answers.append(torch.cat(parts, dim=-1))
        difference = answers[0] - subtraction.lambda_full.to(compute) * answers[1]
        return subtraction.finish(difference).to(query.dtype).view(query.shape), lse

    calls: dict[tuple[int, int], Bound] = {}
    answer, lse = by_four_calls(query, keys, plan, options, out, **more)
    return answer, lse, Bound(calls[0, 0].kernel, by_four_calls)


# --- the cache key of a call ---


def key_of(
    forced: str | None,
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    more: dict[str, Any],
) -> Key | None:
    """Return the cache key of an attention call; None if it must not be bound. The arguments are not checked yet.

    A call is not bound if an argument is of a subclass or has no strides, if a tensor is a lazy view or has no memory
    (`fastattn.kernels.memory`), if an address is not a multiple of 16 bytes, as launches would differ, if the GPU is
    not the current one, under autocast, and under forward-mode differentiation.

    Args:
        forced: the kernel forced by `use_kernel`.
        query: query rows of all sequences.
        keys: the storage of the keys.
        plan: the lengths, the tables and the mask.
        options: the layer's options.
        out: where to write the outputs; None for a new tensor.
        return_lse: whether the log-sum-exps are returned.
        more: further arguments of differential attention.
    """
    storage = type(keys)
    others: tuple[object, ...] = ()
    if isinstance(keys, (Pages, Rows)):
        key, value = keys
    elif isinstance(keys, QuantizedPages):
        key, value, scales = keys
        others = (scales,)
    else:  # one pool of keys and values
        key = value = keys[0]
        others = keys[1:]
    if not (type(query) is type(key) is type(value) is Tensor):
        return None
    kind = type(plan)
    if kind is not Plan and kind is not TreePlan and kind is not CascadePlan:
        return None
    if type(options) is not AttentionOptions or (return_lse is not True and return_lse is not False):
        return None
    if out is not None and type(out) is not Tensor:
        return None
    device = query.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return None
    if is_autocast_enabled(device) or has_tangents():
        return None
    try:
        at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (at_query and at_key and at_value) and any(map(is_without_memory, (query, key, value))):
            return None
        if query.is_neg() or key.is_neg() or (value is not key and value.is_neg()):
            return None
        address = at_query | at_key | at_value
        layouts: Key | None = ()
        if others or more or out is not None or options.has_per_head:
            given: list[object] = [out, *per_head_of(options)]
            for x in (*others, *more.values()):
                is_scales = type(x).__base__ is Scales  # not of a subclass, which may have more fields
                given += (type(x), *vars(x).values()) if is_scales else (x,)
            bits, layouts = layouts_of(given)
            address |= bits
        if address % ALIGNMENT or layouts is None:
            return None
        return (
            forced,
            return_lse,
            (storage, device, query.dtype, query.shape, query.stride()),
            (key.device, key.dtype, key.shape, key.stride()),
            (value.device, value.dtype, value.shape, value.stride()),
            numbers_of(options),
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
            layouts,
        )
    except RuntimeError:  # a sparse or nested tensor has no strides
        return None
