"""The one chooser: which kernel computes an operation. Paths call the functions here, and never a kernel directly.

A kernel is an object (`fastattn.kernels.kernel`), the `KERNEL` of its module, with

    computes(problem)               whether it has a function for it at all
    unsupported_reason(problem)     why it cannot compute a problem, or None

and with a table of its functions, one for each operation. All attention is one function, whatever stores the keys and
whoever may see whom; a kernel says which storages it takes, under which of them drafted trees, or all levels at once:

    attend(query, keys, plan, options, out)                         attend under a plan to `Keys`
    differential(query, cache, plan, options, subtraction, out)     attend to pairs of keys and values, and subtract
    merge(outs, lses)                                               combine partial answers
    add_sinks(out, lse, sinks)                                      give sinks their share of an answer
    write(key, value, key_cache, value_cache, slot_mapping)         write new tokens into the pool
    write_quantized(key, value, key_cache, value_cache, slot_mapping, scales)    write them as codes
    write_packed(latent, rope_key, cache, slot_mapping)             write latents as codes, in rows of bytes
    read_packed(rows, latent_rank, rope_size, dtype)                read such rows as numbers
    copy_blocks(cache, pairs)                                       copy blocks inside a pool
    compact(cache, batch, trees, accepted, block_size)              move accepted nodes to the front of their trees
    slot_mapping(batch, num_tokens, *, block_size)                  where each new token is written
    trim(batch, left, *, block_size, columns)                       lengths and tables of a window
    cut_chunks(batch, chunk_size, *, block_size, num_chunks, columns)    lengths and tables of virtual sequences
    draw_trees(batch, trees, num_tokens)                            depths, ancestors and positions of nodes
    write_index(key, index_cache, slot_mapping)                     write index keys into their pool
    score_index(query, weights, index_cache, plan)                  score the keys that queries may see
    select(scores, topk)                                            the positions of the best
    selected_slots(batch, positions, *, block_size)                 where selected keys are
    plan_selected(batch, positions, *, block_size)                  lengths and tables of a sequence for each query
    recurrent(query, key, value, log_decay, beta, states, plan, options, out)    fold new tokens into states
    convolve(inputs, weight, states, plan, bias, silu, out)         mix tokens with the inputs before them

A kernel may record how to replay a call of attention at less CPU overhead; see `fastattn.kernels.replay`.

Attention returns `(out [t, h, dv], lse [t, h])` with the conventions of the project: natural log, float32 (float64 for
float64), 0 and `-inf` for a fully masked query. A kernel with other conventions is adapted in its own file. `out`, if
not None, is contiguous memory that the answer may be written to, and no part of an input; a kernel may also return
another tensor.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache, partial, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Float32, Int32, Int64, Shaped, UInt8
from torch import Tensor

from fastattn.kernels.device import num_multiprocessors
from fastattn.kernels.kernel import OWN_NORM, PAGES, QUANTIZED, Kernel
from fastattn.kernels.memory import in_memory
from fastattn.kernels.problem import (
    Problem,
    Subtraction,
    asked_of,
    attention_problem,
    compute_dtype,
    cu_seqlens_k_of,
    stored_types,
)
from fastattn.kernels.replay import (
    RETURN_LSE,
    Key,
    Recorder,
    Replay,
    forget_writes,
    key_of,
    key_of_write,
    memo_of,
    recording,
    remember_write,
    write_of,
)
from refattn.batch import Batch
from refattn.keys import AnyKeys, Keys, Pages, Pairs, QuantizedPages
from refattn.modes import refuse_gradients, without_autocast
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan
from refattn.trees import Accepted, AttentionPlan, TreePlan, Trees

P = ParamSpec("P")
T = TypeVar("T")

MODULES = {
    "native": "fastattn.kernels.native",
    "cpu": "fastattn.kernels.cpu",
    "torch": "fastattn.kernels.torch_ops",
    "plain": "fastattn.kernels.torch_ops.attention",
    "triton": "fastattn.kernels.triton",
    "fa4": "fastattn.kernels.flash.fa4",
    "fa3": "fastattn.kernels.flash.fa3",
    "flash_mla": "fastattn.kernels.flash.flash_mla",
    "fa2": "fastattn.kernels.flash.fa2",
    "torch_flash": "fastattn.kernels.flash.torch_flash",
}
NAMES = tuple(MODULES)
NO_BACKWARD = "fastattn has no backward pass; use refattn, which has, or torch.no_grad()"

_asked_for: ContextVar[str | None] = ContextVar("asked_for", default=None)


# --- which kernel ---


def priorities(problem: Problem) -> tuple[str, ...]:
    """Order the kernels from the one to take first to the last resort; those that cannot compute a problem are skipped.

    On a CPU our C goes first, which is for decodes: 16 of 4096 keys take it half the time of the kernel `cpu`, which
    copies keys out of their pages. Devices that are neither a CPU nor of CUDA or ROCm get plain PyTorch: right, and
    slow.

    On a GPU two kinds of kernel compete. Ours splits the keys of a sequence over multiprocessors (SMs); the others give
    a tile of queries to one SM, with all its keys. With few tiles most of the card stays idle; with few rows a tile is
    mostly padding. And where there is little to compute it is the host that takes time, half as much for a prefill of
    ours as for one of flash-attn-4.

    FlashAttention-3 lays the query heads of a group side by side: with 16 drafted tokens for each of 64 sequences of
    8192 keys it takes 0.51 ms, ours 0.52, flash-attn-4 0.67. From pages of its own tile it loads faster. It could split
    keys, too, but drops a split whose scores are NaN, so it is not asked to: with few queries it goes first only where
    there are tiles for most SMs, of about as many keys each.

    Over rows with a window flash-attn-4 (4.0.0b36) is the last resort: it hung an NVIDIA H200 within some hundred calls
    of 16384 queries and a window of 1024, twice. Over pages it never did.

    Over latents FlashMLA is fastest where there are many heads: 64 decodes of 128 heads over 8192 keys take it 270 us
    and ours 351; FlashAttention-3 took 287. With 16 heads ours is: 158, 166 and 150 us; and 128 of 16 heads over 2048
    keys 83, 93 and 79 us. Codes of latents are read by ours alone, unless a call lets FlashMLA round queries and
    weights: 64 decodes of 128 heads over 8192 keys then take it 231 us.

    Of selected latents FlashMLA splits none: 16 queries of 128 heads over 2048 each take it 59 us and ours 64, 64 of
    them 80 and 140, 8 of them 57 and 39 (9621fe0, 2026-11-23). Of packed ones it splits them: one query takes it 26 us
    and ours 22, 8 of them 36 and 49.

    Over codes ours turns them into numbers in registers, for each tile of queries anew. Where a key meets many queries,
    they are expanded into memory once, for a kernel of numbers; flash-attn-4 comes first, as it splits no keys and so
    shows NaN in any. FlashAttention-3 is not asked for its own product of codes: it rounds the weights to fp8, too,
    before they meet the values, which costs more than the one tolerance lets pass.

    A tree after thousands of keys is a chunk to all but its last keys: FlashAttention-3 reads the keys before it,
    without a mask, and ours its few nodes, in one launch that takes in the answer of the other: 64 trees of 16 nodes
    after 8192 keys take 0.52 ms so and 0.58 by ours alone, 8 of 64 nodes 0.15 and 0.19.
    FlashMLA and FlashAttention-3 do the same over latents: 64 trees of 4 nodes and 16 heads take 0.20, 0.20 and by ours
    alone 0.45 ms, 32 of 8 nodes and 128 heads 1.08, 1.07 and 3.21.

    Source: docs/results, measured on an NVIDIA H200 (tests/tools/test_numbers.py compares them). When ours is taken for
    a prompt: against flash-attn-4, over prompts and chunks of 64 to 2048 tokens (aa92ef7, 2026-11-22). What ours takes
    for its few operations alone, flash-attn-4 would compute up to 1.6 times as fast: in 13 us less at most.
    """
    if problem.device.type == "cpu":
        return "native", "cpu", "torch", "triton"
    if problem.device.type != "cuda":
        return ("plain",) if problem.is_attention else ("torch",)
    if not problem.is_attention:
        return "triton", "torch"
    if problem.keys == "quantized":
        pays_to_expand = _rows_per_key(problem) >= ROWS_TO_EXPAND and not _pays_to_split(problem)
        return ("fa4", "fa3", "triton") if pays_to_expand else ("triton",)
    if problem.keys == "packed":
        return ("triton", "flash_mla") if problem.num_seqs == 1 else ("flash_mla", "triton")
    if problem.keys == "latents":
        if problem.block_size == 1 and problem.max_query_len == 1:  # selected latents: FlashMLA does not split them
            full = problem.num_seqs * problem.num_heads >= 64 * SELECTED_FULL * num_multiprocessors(problem.device)
            return ("flash_mla", "triton", "fa3") if full else ("triton", "flash_mla", "fa3")
        if _rows(problem) <= 16:
            return "triton", "flash_mla", "fa3"
        return ("flash_mla", "fa3", "triton") if _fills_sms(problem) else ("flash_mla", "triton", "fa3")
    if problem.tree:
        return ("fa3", "triton") if _rows(problem) > 16 and _fills_sms(problem) else ("triton", "fa3")
    if problem.keys == "rows" and problem.window[0] >= 0:
        return "fa2", "torch_flash", "triton", "fa4"
    if _pays_to_split(problem):
        return "triton", "fa4", "fa3", "fa2", "torch_flash"
    if problem.keys == "pages" and problem.window == (-1, 0) and _rows(problem) <= 64:
        return (*(("fa3", "triton") if _fills_sms(problem) else ("triton", "fa3")), "fa4", "fa2", "torch_flash")
    if problem.keys == "pages" and problem.window == (-1, 0) and problem.block_size == FA3_PAGE:
        return "fa3", "fa4", "fa2", "torch_flash", "triton"
    return "fa4", "fa3", "fa2", "torch_flash", "triton"


FA3_PAGE = 128  # tokens in a page, of which prompts go to FlashAttention-3 first (a147b27, 2026-11-22, H200)
ROWS_TO_EXPAND = 512  # that meet a key, on average, from which on its codes become numbers in memory; an estimate
FULL = 0.8  # tiles for each multiprocessor, from which on FlashAttention-3 itself splits no keys
SELECTED_FULL = 0.24  # tiles of 64 heads for each multiprocessor, from which on FlashMLA goes first
FEW_OPERATIONS = 8e9  # of all products, at most, so that they are over before the host has launched others


def _pays_to_split(problem: Problem) -> bool:
    """Return whether splitting the keys pays, or the choice must not depend on the batch; `priorities` says why."""
    rows = _rows(problem)
    if problem.batch_invariant or rows <= 16:
        return True
    scores = problem.num_seqs * problem.num_heads * problem.max_query_len * problem.max_seq_len
    if 2 * scores * (problem.head_size + problem.value_head_size) <= FEW_OPERATIONS:
        return True
    tiles = problem.num_seqs * problem.num_kv_heads * -(-rows // 128)
    room = 2 if rows <= 64 else 2.5  # multiprocessors for each tile, from which on splitting the keys pays
    return tiles * room <= num_multiprocessors(problem.device)


def _fills_sms(problem: Problem) -> bool:
    """Return whether a kernel that splits no keys keeps most multiprocessors at work, each for about as long."""
    rows = 64 if problem.keys == "latents" else 128  # of its tiles
    tiles = problem.num_seqs * problem.num_kv_heads * -(-_rows(problem) // rows)
    return problem.even and tiles >= FULL * num_multiprocessors(problem.device)


def _rows(problem: Problem) -> int:
    """Return the most rows of the products with one key head of a sequence."""
    return problem.max_query_len * (problem.num_heads // problem.num_kv_heads)


def _rows_per_key(problem: Problem) -> float:
    """Return how many rows meet a key, at most on average: less than all, if most of the keys are outside a window."""
    left, right = problem.window
    visible = problem.max_seq_len if min(left, right) < 0 else min(problem.max_seq_len, left + 1 + right)
    rows = problem.num_tokens * (problem.num_heads // problem.num_kv_heads) / max(1, problem.num_seqs)
    return rows * visible / max(1, problem.max_seq_len)


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Ask for one kernel inside a `with` block; a problem that it cannot compute raises, nothing takes its place.

    It is asked for the operations that it has: a FlashAttention package has none that writes a cache or makes a table,
    and those are chosen as usual.

    Args:
        name: one of `fastattn.kernels.NAMES`.

    Raises:
        ValueError: if there is no kernel of that name.
    """
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    token = _asked_for.set(name)
    try:
        yield
    finally:
        _asked_for.reset(token)


def choose(problem: Problem) -> Kernel:
    """Choose the kernel for a problem: the one asked for, else the first in the order of `priorities` that can.

    Args:
        problem: what is to be computed.

    Returns:
        The kernel.

    Raises:
        NotImplementedError: if no kernel can, or the one asked for can't, with the reasons.
    """
    return _choose(problem, _asked_for.get())


@lru_cache(maxsize=4096)
def _choose(problem: Problem, asked: str | None) -> Kernel:
    names = priorities(problem)
    if asked is not None and _load(asked).computes(problem):
        names = (asked,)
    reasons = {}
    for name in names:
        reasons[name] = unsupported_reason(name, problem)
        if reasons[name] is None:
            return _load(name)
    why_not = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"no kernel computes {problem.what}: {why_not}")


def unsupported_reason(name: str, problem: Problem) -> str | None:
    """Return why a kernel cannot compute a problem, or None."""
    kernel = _load(name)
    if not kernel.computes(problem):
        return f"does not compute {problem.what}"
    unknown, reason = kernel.unknown(problem), kernel.unsupported_reason(problem)
    return f"does not know {unknown}" if reason is None and unknown is not None else reason


def refuse_unknown(what: str, knows: frozenset[str], *arguments: object) -> None:
    """Refuse what is computed by several operations, if a plan or keys ask for more than it knows.

    Raises:
        NotImplementedError: naming a field that does.
    """
    unknown = min(asked_of(*arguments) - knows, default=None)
    if unknown is not None:
        raise NotImplementedError(f"no kernel computes {what}: it does not know {unknown}")


def explain(problem: Problem) -> str:
    """Return which kernel would compute a problem, and of each other one why not: a line per kernel.

    Args:
        problem: what is to be computed.
    """
    lines = [f"{name}: {unsupported_reason(name, problem) or 'can'}" for name in NAMES]
    try:
        lines.append(f"chosen: {choose(problem).name}")
    except NotImplementedError as error:
        lines.append(str(error))
    return "\n".join(lines)


def forget() -> None:
    """Forget which kernels were chosen, and how to replay writes; a plan remembers its own calls."""
    _choose.cache_clear()
    _choose_differential.cache_clear()
    forget_writes()


@cache
def _load(name: str) -> Kernel:
    kernel: Kernel = importlib.import_module(MODULES[name]).KERNEL
    return kernel


# --- attention ---


def launches(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function launch on the GPU of its first argument, and say what helps where memory runs out.

    A launch goes to the current GPU, whichever one the tensors are on. It computes in the types that it is given, in
    autocast too, and its outputs have no history: a gradient is refused. It reads tensors by their addresses, so here
    they become what their memory holds, or are refused; see `fastattn.kernels.memory`.
    """
    names, computes = tuple(signature(function).parameters), without_autocast(function)

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        refuse_gradients(NO_BACKWARD, **dict(zip(names, arguments, strict=False)), **options)
        given: Any = [in_memory(name, argument) for name, argument in zip(names, arguments, strict=False)]
        more: Any = {name: in_memory(name, option) for name, option in options.items()}
        device = (given[0][0] if isinstance(given[0], list | tuple) else given[0]).device
        try:
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return computes(*given, **more)
            with torch.cuda.device(device):
                return computes(*given, **more)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "query: expected few enough rows for the memory that is left; take fewer at a time (an engine: "
                f"max_num_batched_tokens), or a smaller pool of keys and values (num_blocks). {error}"
            ) from error

    return call


def attend(
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend: replay the call if its plan remembers it, else check and compute it.

    Nothing that is checked differs in a replay, see `fastattn.kernels.replay`: bad arguments give another cache key.

    Args:
        query: query rows of all sequences, `[t, h, d]`.
        keys: where the keys are.
        plan: the lengths, the tables, and who may see whom.
        options: those of the layer.
        out: where the outputs go; new memory if None.
        return_lse: return the log-sum-exps, too.
        more: how the answers of pairs are subtracted.

    Raises:
        ValueError: as `keys.check` does.
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    cache_key = key_of(_asked_for.get(), query, keys, plan, options, out, return_lse, more)
    replay = None if cache_key is None else memo_of(plan).replays.get(cache_key)
    if replay is not None:
        try:
            if out is None and not more:  # most calls: `**` takes the CPU half a microsecond
                answer, lse = replay(query, keys, plan, options, None)
            elif out is None:
                answer, lse = replay(query, keys, plan, options, None, **more)
            else:
                memory = _memory(out, query, *keys, options.alibi_slopes, options.sinks, *more.values())
                answer, lse = _into(out, *replay(query, keys, plan, options, memory, **more))
            return (answer, lse) if return_lse else answer
        except torch.OutOfMemoryError:
            pass  # computed once more as a first call is, which says what helps
    keys.check(query, plan, options, out, return_lse, **more)
    answer, lse = compute(query, keys, plan, options, out, cache_key, **more)
    return (answer, lse) if return_lse else answer


@launches
def compute(
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None = None,
    cache_key: Key | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Attend to what has been checked; returns the outputs and their log-sum-exps.

    Args:
        query: as in `attend`, and what follows.
        keys: where the keys are.
        plan: the lengths, the tables, and who may see whom.
        options: those of the layer.
        out: where the outputs go; new memory if None.
        cache_key: from `key_of`, under which the plan will remember how to replay the call; None to remember nothing.
        more: as in `attend`.
    """
    asks = frozenset() if more.get("norm") is None else OWN_NORM
    call, adapt, can_record = _attention_fn(query, keys, plan, options, asks)
    into = None
    if cache_key is not None and can_record:
        into = Recorder(return_lse=cache_key[RETURN_LSE] is True)
    with recording(into):
        memory = _memory(out, query, *keys, options.alibi_slopes, options.sinks, *more.values())
        answer, lse = call(query, keys, plan, options, memory, **more)
    if cache_key is not None:
        memo_of(plan).replays[cache_key] = call if into is None or into.replay is None else adapt(into.replay)
    return _into(out, answer, lse)


def _attention_fn(
    query: Tensor,
    keys: AnyKeys,
    plan: AttentionPlan,
    options: AttentionOptions,
    asks: frozenset[str] = frozenset(),
) -> tuple[Replay, Callable[[Replay], Replay], bool]:
    """Return what computes a call, how to call what a kernel records of it, and whether that is all of the call.

    The levels of a cascade are one call where each has the same kernel, and it takes all of them. Otherwise a kernel is
    chosen for each, and the answers merge. Over codes a kernel that takes all of them goes first.
    """
    if isinstance(keys, Pairs):
        return _differential_fn(query, keys, plan, options, asks)
    problem = attention_problem(query, keys, plan, options)
    if len(plan.levels) == 1 or isinstance(keys, QuantizedPages):
        return choose(problem).attend, _as_it_is, True
    levels = [attention_problem(query, keys, *one) for one in _levels_of(plan, options)]
    kernels = [choose(level._replace(asks=problem.asks)) for level in levels]
    if len(set(kernels)) == 1 and kernels[0].computes(problem):
        return kernels[0].attend, _as_it_is, True
    attends = [kernel.attend for kernel in kernels]
    merge = choose(Problem("merge", query.device, compute_dtype(query.dtype))).merge

    def one_by_one(
        query: Tensor, keys: Keys, plan: AttentionPlan, options: AttentionOptions, _: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        work = zip(attends, _levels_of(plan, options), strict=True)
        parts = [attend(query, keys, *one, None) for attend, one in work]
        answer: tuple[Tensor, Tensor] = merge(*zip(*parts, strict=True))
        return answer

    return one_by_one, _as_it_is, False


def _as_it_is(function: Replay) -> Replay:
    return function


def _levels_of(plan: AttentionPlan, options: AttentionOptions) -> list[tuple[Plan | TreePlan, AttentionOptions]]:
    """Return each level with its options: sinks count once, in the last level, where every query is."""
    *shared, own = plan.levels
    return [*((level, options.without_sinks()) for level in shared), (own, options)]


# --- differential attention ---


def _differential_fn(
    query: Tensor, keys: Pairs, plan: AttentionPlan, options: AttentionOptions, asks: frozenset[str]
) -> tuple[Replay, Callable[[Replay], Replay], bool]:
    """Return as `_attention_fn` a kernel that subtracts, which reads every key and value once, where one can.

    Where none can, or one is asked for that cannot, it is four calls of attention, as always over an fp8 cache, under
    the levels of a cascade and under drafted trees.
    """
    refuse_unknown("differential attention", PAGES | QUANTIZED, keys)
    if keys.scales is None and isinstance(plan, Plan):
        pages, over_pages = _in_pages(keys.cache, plan)
        problem = attention_problem(query[:, ::2], Pages(pages[0, 0], pages[0, 1]), over_pages, options)
        kernel = _choose_differential(problem._replace(asks=problem.asks | asks), _asked_for.get())
        if kernel is not None:  # launches know one table, and rows have one per call
            return _of_kernel(kernel.differential), _of_kernel, over_pages is plan
    callers: list[list[Replay]] = []
    for half in (0, 1):
        queries, its_options = query[:, half::2], options.of_heads(slice(half, None, 2))
        pools = (keys.of_halves(half, other) for other in (0, 1))
        callers.append([_attention_fn(queries, its_pools, plan, its_options)[0] for its_pools in pools])
    return _with_subtraction(partial(_subtract, callers)), _as_it_is, False


def _with_subtraction(function: Replay) -> Replay:
    """Let a function that subtracts take how answers are subtracted as the path does."""

    def call(
        query: Tensor,
        keys: Pairs,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        *,
        lambda_full: Tensor,
        lambda_init: float,
        norm_weight: Tensor | None,
        norm_eps: float,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        subtraction = Subtraction(lambda_full, norm_weight, float(norm_eps), 1.0 - lambda_init, norm)
        answer, lse = function(query, keys, plan, options, subtraction, out)
        return answer if answer is out else answer.view(query.shape), lse

    return call


def _of_kernel(function: Replay) -> Replay:
    """Let the operation `differential` of a kernel, which is over pages, take what the path does."""
    return _with_subtraction(lambda query, keys, plan, *others: function(query, *_in_pages(keys.cache, plan), *others))


def _in_pages(cache: Tensor, plan: Plan) -> tuple[Tensor, Plan]:
    """Return rows, and a plan over them, as pages of one row each; pages as they are.

    On a CPU the memo stores that plan. On a device every call makes its table, so that a CUDA graph does, too.
    """
    if plan.block_size is not None:
        return cache, plan
    memo, num_rows = memo_of(plan), cache.shape[2]
    pages = memo.pages.get(num_rows)
    if pages is None:
        longest = min(plan.batch.max_seq_len, num_rows)
        columns = torch.arange(longest, dtype=torch.int32, device=plan.batch.device)
        batch = replace(plan.batch, block_table=cu_seqlens_k_of(plan)[:-1, None] + columns)
        pages = replace(plan, batch=batch, block_size=1)
        if plan.batch.device.type == "cpu":
            memo.pages[num_rows] = pages
    return cache[:, :, :, None], pages


def _subtract(
    callers: Sequence[Sequence[Replay]],
    query: Tensor,
    keys: Pairs,
    plan: AttentionPlan,
    options: AttentionOptions,
    subtraction: Subtraction,
    _: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute differential attention by four calls of attention: of each half of the queries, over values of both."""
    lse = query.new_empty(query.shape[:2], dtype=compute_dtype(query.dtype))
    answers: list[Tensor] = []
    for half in (0, 1):
        queries, its_options = query[:, half::2], options.of_heads(slice(half, None, 2))
        parts: list[Tensor] = []
        for other, call in enumerate(callers[half]):
            part, lse[:, half::2] = call(queries, keys.of_halves(half, other), plan, its_options, None)
            parts.append(part.to(lse.dtype))
        answers.append(torch.cat(parts, dim=-1))
    difference = answers[0] - subtraction.lambda_full.to(lse.dtype) * answers[1]
    return subtraction.finish(difference).to(query.dtype), lse


@lru_cache(maxsize=4096)
def _choose_differential(problem: Problem, asked: str | None) -> Kernel | None:
    """Return the kernel that subtracts by itself; None if none can, or one is asked for that has only attention."""
    if asked is not None and "pages" in _load(asked).attends and "differential" not in _load(asked).functions:
        return None
    try:
        return _choose(problem._replace(operation="differential"), asked)
    except NotImplementedError:
        return None


def _memory(out: Tensor | None, *read: object) -> Tensor | None:
    """Return where a kernel may write its answer: `out`, if that is contiguous and no part of what is read.

    A kernel may read an input after it has written some of the answer. This is asked in every call, as no cache key
    has addresses.
    """
    return out if out is not None and out.is_contiguous() and not _overlaps(out, read) else None


def _overlaps(out: Tensor, read: Iterable[object]) -> bool:
    """Return whether memory for an answer lies between the first and the last element of a tensor that is read.

    Of what is no tensor, scales have some, and anything else has none.
    """
    begin, end = _addresses(out)
    for x in read:
        if isinstance(x, Tensor):
            if x.data_ptr() < end and begin < _addresses(x)[1]:
                return True
        elif isinstance(x, Fp8Scales | Int8Scales) and _overlaps(out, vars(x).values()):
            return True
    return False


def _addresses(x: Tensor) -> tuple[int, int]:
    """Return where the first element of a tensor begins, and where its last one ends; no stride is negative."""
    elements = x.numel()
    if not x.is_contiguous() and elements:
        elements = 1 + sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    first = x.data_ptr()
    return first, first + elements * x.itemsize


def _into(out: Tensor | None, answer: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Bring an answer to where it was asked for, if it is not there."""
    if out is None or answer is out:
        return answer, lse
    return out.copy_(answer), lse


# --- what goes with it: partial answers, the cache, tables ---


@launches
def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine partial answers; arguments are those of `fastattn.merge.merge`."""
    return choose(Problem("merge", outs[0].device, lses[0].dtype)).merge(outs, lses)


@launches
def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of an answer; arguments are those of `fastattn.merge.add_sinks`."""
    return choose(Problem("add_sinks", out.device, lse.dtype)).add_sinks(out, lse, sinks)


def replay_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Key | None, bool]:
    """Replay a write of new tokens if one with its cache key is remembered; returns the key, and whether it was."""
    cache_key = key_of_write(_asked_for.get(), key, value, key_cache, value_cache, slot_mapping)
    replay = write_of(cache_key, (key, value), (key_cache, value_cache))
    if replay is not None:
        replay(key, value, key_cache, value_cache, slot_mapping)
    return cache_key, replay is not None


@launches
def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    cache_key: Key | None = None,
) -> None:
    """Write new tokens into the pool; arguments are those of `fastattn.kv_cache.write`, and a key of `replay_write`.

    A kernel returns a function that replays the write, or None.
    """
    replay = choose(Problem("write", key.device, key.dtype)).write(key, value, key_cache, value_cache, slot_mapping)
    if cache_key is not None and replay is not None:
        ends = map(_addresses, (key, value, key_cache, value_cache))
        remember_write(cache_key, replay, tuple(end - begin for begin, end in ends))


@launches
def write_quantized(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantise new tokens and write them into the pool; arguments are those of `fastattn.quantized.write`."""
    stored = stored_types(scales, value_cache)
    kernel = choose(Problem("write_quantized", key.device, key.dtype, stored=stored, asks=asked_of(scales)))
    kernel.write_quantized(key, value, key_cache, value_cache, slot_mapping, scales)


@launches
def write_packed(
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: UInt8[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write latents and rotary keys into packed rows; arguments are those of `fastattn.mla.write`."""
    kernel = choose(Problem("write_packed", latent.device, latent.dtype))
    kernel.write_packed(latent, rope_key, cache, slot_mapping)


def read_packed(
    rows: UInt8[Tensor, "*rows c"], latent_rank: int, rope_size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Read packed rows as numbers of a type; see `torch_ops.cache`."""
    kernel = choose(Problem("read_packed", rows.device, dtype))
    numbers: Tensor = kernel.read_packed(rows, latent_rank, rope_size, dtype)
    return numbers


def copy_blocks(caches: Sequence[Shaped[Tensor, "n ..."]], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy blocks inside pools, once there is a kernel for each; see `fastattn.kv_cache.copy_blocks`."""
    kernels = []
    for pool in caches:
        last = sum(stride * (size - 1) for stride, size in zip(pool.stride()[1:], pool.shape[1:], strict=True))
        problem = Problem("copy_blocks", pool.device, pool.dtype, num_pairs=len(pairs))
        kernels.append(choose(problem._replace(contiguous_blocks=last == pool.shape[1:].numel() - 1)))
    for kernel, pool in zip(kernels, caches, strict=True):
        launches(kernel.copy_blocks)(pool, pairs)


def compact(
    caches: Sequence[Shaped[Tensor, "n p ..."]], batch: Batch, trees: Trees, accepted: Accepted, *, block_size: int
) -> None:
    """Move accepted nodes inside pools, once there is a kernel for each; see `fastattn.speculative.compact`."""
    asks = asked_of(batch, trees, accepted)
    kernels = [choose(Problem("compact", x.device, x.dtype, num_dims=x.ndim, asks=asks)) for x in caches]
    for kernel, pool in zip(kernels, caches, strict=True):
        launches(kernel.compact)(pool, batch, trees, accepted, block_size)


@launches
def slot_mapping(batch: Batch, num_tokens: int, *, block_size: int) -> Int64[Tensor, "t"]:
    """Compute the slot of each new token; arguments are those of `fastattn.metadata.slot_mapping`."""
    kernel = choose(Problem("slot_mapping", batch.device, torch.int64, asks=asked_of(batch)))
    return kernel.slot_mapping(batch, num_tokens, block_size=block_size)


@launches
def trim(
    batch: Batch, left: int, *, block_size: int, columns: int
) -> tuple[Int32[Tensor, "b"], Int32[Tensor, "b"], Int32[Tensor, "b columns"]]:
    """Cut off the blocks that no query sees; returns the first keys, the lengths and the block table that are left."""
    kernel = choose(Problem("trim", batch.device, torch.int32, asks=asked_of(batch)))
    return kernel.trim(batch, left, block_size=block_size, columns=columns)


@launches
def cut_chunks(
    batch: Batch, chunk_size: int, *, block_size: int, num_chunks: int, columns: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "v"], Int32[Tensor, "v"], Int32[Tensor, "v columns"]]:
    """Cut sequences at the ends of chunks; returns query rows, first keys, lengths and tables of virtual sequences."""
    kernel = choose(Problem("cut_chunks", batch.device, torch.int32, asks=asked_of(batch)))
    return kernel.cut_chunks(batch, chunk_size, block_size=block_size, num_chunks=num_chunks, columns=columns)


@launches
def draw_trees(
    batch: Batch, trees: Trees, num_tokens: int
) -> tuple[Int32[Tensor, "b w"], Int64[Tensor, "b w words"], Int32[Tensor, "t"]]:
    """Find the depths and the ancestors of nodes, and the positions of query rows; see `speculative.plan`."""
    kernel = choose(Problem("draw_trees", batch.device, torch.int32, asks=asked_of(batch, trees)))
    return kernel.draw_trees(batch, trees, num_tokens)


# --- selected keys ---


@launches
def write_index(
    key: Float[Tensor, "t d"], index_cache: Shaped[Tensor, "n p c"], slot_mapping: Int64[Tensor, "t"]
) -> None:
    """Write index keys into their pool; arguments are those of `fastattn.sparse.write`."""
    choose(Problem("write_index", key.device, key.dtype)).write_index(key, index_cache, slot_mapping)


def read_index(index_cache: Shaped[Tensor, "n p c"], slots: Int64[Tensor, "s"]) -> Float[Tensor, "s d"]:
    """Read index keys; arguments are those of `fastattn.sparse.read`."""
    index_cache = in_memory("index_cache", index_cache)
    keys: Tensor = choose(Problem("read_index", index_cache.device, index_cache.dtype)).read_index(index_cache, slots)
    return keys


@launches
def score_index(
    query: Float[Tensor, "t h d"], weights: Float[Tensor, "t h"], index_cache: Shaped[Tensor, "n p c"], plan: Plan
) -> Float32[Tensor, "t s"]:
    """Score the keys that queries may see; arguments are those of `fastattn.sparse.scores`."""
    kernel = choose(Problem("score_index", query.device, query.dtype, asks=asked_of(plan)))
    scores: Tensor = kernel.score_index(query, weights, index_cache, plan)
    return scores


@launches
def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t k"]:
    """Select the keys with the highest scores; arguments are those of `fastattn.sparse.select`."""
    selected: Tensor = choose(Problem("select", scores.device, scores.dtype)).select(scores, topk)
    return selected


@launches
def selected_slots(batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int) -> Int32[Tensor, "t k"]:
    """Find the slots of selected keys; arguments are those of `fastattn.sparse.slots`."""
    kernel = choose(Problem("selected_slots", batch.device, torch.int32, asks=asked_of(batch)))
    slots: Tensor = kernel.selected_slots(batch, positions, block_size=block_size)
    return slots


@launches
def plan_selected(
    batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "t"], Int32[Tensor, "t k"], Int32[Tensor, "t"]]:
    """Make a sequence of each query row; returns query rows, lengths, the table, and whose row each of them is."""
    kernel = choose(Problem("plan_selected", batch.device, torch.int32, asks=asked_of(batch)))
    return kernel.plan_selected(batch, positions, block_size=block_size)


# --- layers that keep a state ---


@launches
def recurrent(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions,
    out: Float[Tensor, "t hv dv"] | None,
) -> Float[Tensor, "t hv dv"]:
    """Fold new tokens into states; arguments are those of `fastattn.recurrent.attention`."""
    problem = Problem(
        "recurrent",
        query.device,
        query.dtype,
        head_size=query.shape[-1],
        value_head_size=value.shape[-1],
        asks=asked_of(plan, options),
    )
    tensors = query, key, value, log_decay, beta, states
    memory = None if out is None or _overlaps(out, tensors) else out
    result: Tensor = choose(problem).recurrent(*tensors, plan, options, memory)
    return result if out is None or memory is out else out.copy_(result)


@launches
def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    bias: Float[Tensor, "c"] | None,
    silu: bool,
    out: Float[Tensor, "t c"] | None,
) -> Float[Tensor, "t c"]:
    """Mix tokens with the inputs before them; arguments are those of `fastattn.recurrent.convolve`."""
    memory = None if out is None or _overlaps(out, (inputs, weight, states, bias)) else out
    kernel = choose(Problem("convolve", inputs.device, inputs.dtype, asks=asked_of(plan)))
    result: Tensor = kernel.convolve(inputs, weight, states, plan, bias, silu, memory)
    return result if out is None or memory is out else out.copy_(result)
