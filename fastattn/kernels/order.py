"""Choose the kernel for a problem by a table of rules, each with the measurement that it rests on.

The first rule whose condition holds decides. It lists kernels from the first choice to the last resort; a kernel that
cannot compute the problem is skipped, and `explain(problem)` gives the reason.

On a GPU two kinds of kernel compete. Ours splits the keys of a sequence over SMs; the others give a tile of queries
with all its keys to one SM. With few tiles most SMs are idle; with few rows a tile is mostly padding. Small calls are
bound by launch overhead on the CPU, which is half as large for a prefill of ours as for one of flash-attn-4.

A measurement is a row of a committed result file (tests/tools/test_numbers.py compares the times), or has its day and
commit. All are on an NVIDIA H200 unless a CPU is named. Without one, a rule says "not measured".
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from fastattn.kernels.device import capability, num_sms
from fastattn.kernels.kernel import Kernel
from fastattn.kernels.problem import Problem, asked_of

MODULES = {  # the module of each kernel: its `KERNEL`, or the name after the colon
    "native": "fastattn.kernels.native",
    "cpu": "fastattn.kernels.cpu",
    "torch": "fastattn.kernels.torch_ops",
    "triton": "fastattn.kernels.triton",
    "fa4": "fastattn.kernels.flash.fa4",
    "fa3": "fastattn.kernels.flash.fa3",
    "flash_mla": "fastattn.kernels.flash.flash_mla",
    "flash_qla": "fastattn.kernels.flash.flash_qla",
    "fa2": "fastattn.kernels.flash.fa2",
    "torch_flash": "fastattn.kernels.flash.fa2:TORCH_FLASH",
}
NAMES = tuple(MODULES)

FA3_PAGE = 128  # tokens in a page; prompts over such pages go to FlashAttention-3 first
ROWS_TO_EXPAND = 512  # query rows per key, on average, from which the cache is dequantized into memory; an estimate
FULL = 0.8  # tiles per SM from which FlashAttention-3's own heuristic splits no keys
SELECTED_FULL = 0.24  # tiles of 64 heads per SM from which FlashMLA goes first
LONG_PROMPT = 512  # new tokens of a sequence from which FlashQLA goes first; an estimate
UNDIVIDED = 8192  # new tokens of one sequence up to which ours is faster than FlashQLA; measured at this length alone
FEW_OPERATIONS = 8e9  # FLOPs up to which a call is bound by launch overhead

forced: ContextVar[str | None] = ContextVar("forced", default=None)


# --- the table ---


class Rule(NamedTuple):
    """A row of the table: where its condition holds, these kernels are tried in this order.

    Attributes:
        name: the case, in words.
        holds: the condition on a problem, checked if no earlier rule holds.
        kernels: from the first choice to the last resort.
        measured: what the order rests on: a result file and its rows, or "not measured" and the reason.
    """

    name: str
    holds: Callable[[Problem], bool]
    kernels: tuple[str, ...]
    measured: str


H200 = "docs/results/cuda-nvidia-h200.json"
XEON = "docs/results/cpu-intel-xeon.json"

RULES = (
    Rule(
        "a CPU",
        lambda problem: problem.device.type == "cpu",
        ("native", "cpu", "torch", "triton"),
        f"""{XEON}, chunked_prefill/decode-16x4096: our C, which is for decodes, takes half the time of the kernel
        `cpu`, which copies keys out of their pages. Triton's interpreter is for tests.""",
    ),
    Rule(
        "a device that is neither a CPU nor of CUDA or ROCm",
        lambda problem: problem.device.type != "cuda",
        ("torch",),
        "not measured: there is one kernel, which has no attention",
    ),
    Rule(
        "one prompt of a recurrent layer, of bfloat16 and not very long",
        lambda problem: _is_one_prompt_of_states(problem),
        ("triton", "flash_qla", "torch"),
        f"""{H200}, recurrent/prefill-8192-1x32-heads: FlashQLA divides the sequence, and is slower; see the next
        rule""",
    ),
    Rule(
        "prompts of recurrent layers",
        lambda problem: problem.operation == "recurrent" and problem.max_query_len >= LONG_PROMPT,
        ("flash_qla", "triton", "torch"),
        f"""{H200}, recurrent/prefill-*: 1 x 32768 tokens take 693 us by FlashQLA and 1135 by ours, 8 x 1024 take 204
        and 247, and 1 x 8192 take 346 and 296 (38564ec, 2026-11-29)""",
    ),
    Rule(
        "merges, writes and tables",
        lambda problem: not problem.is_attention,
        ("triton", "torch"),
        "not measured: one launch of ours replaces several of PyTorch",
    ),
    Rule(
        "quantized pages, where a key meets many queries",
        lambda p: p.keys in ("quantized", "int4") and _rows_per_key(p) >= ROWS_TO_EXPAND and not _pays_to_split(p),
        ("fa4", "fa3", "triton"),
        f"""{H200}, quantized/prefill-2x8192-fp8: the cache is dequantized into memory once, for a kernel that reads
        unquantized pages. flash-attn-4 comes first: it splits no keys, so NaN in any key reaches the output.
        FlashAttention-3's own product of fp8 values is not used: it rounds the weights to fp8, too, and its error
        exceeds the tolerance.""",
    ),
    Rule(
        "quantized pages",
        lambda problem: problem.keys == "quantized",
        ("triton",),
        f"""{H200}, quantized/decode-64x8192-fp8: ours dequantizes in registers, once per tile of
        queries.""",
    ),
    Rule(
        "packed latents of one sequence",
        lambda problem: problem.keys == "packed" and problem.num_seqs == 1,
        ("triton", "flash_mla"),
        f"""{H200}, sparse/decode-*-packed: FlashMLA splits the keys of packed latents: one query takes ours 21 us, and
        its kernel 18 behind a launch that finds the slots; 8 of them take it 36 and ours 48.""",
    ),
    Rule(
        "packed latents",
        lambda problem: problem.keys == "packed",
        ("flash_mla", "triton"),
        f"{H200}, sparse/decode-*-packed: as above, with 8 queries",
    ),
    Rule(
        "selected latents of many queries",
        lambda p: _are_selected(p) and p.num_seqs * p.num_heads >= 64 * SELECTED_FULL * num_sms(p.device),
        ("flash_mla", "triton", "fa3"),
        """not measured in a result file: FlashMLA does not split the keys. 16 queries of 128 heads over 2048 keys each
        take it 59 us and ours 64, 64 of them 80 and 140, 8 of them 57 and 39 (9621fe0, 2026-11-23).""",
    ),
    Rule(
        "selected latents",
        lambda problem: _are_selected(problem),
        ("triton", "flash_mla", "fa3"),
        "not measured in a result file: as above, with 8 queries (9621fe0, 2026-11-23)",
    ),
    Rule(
        "latents under a tile of rows",
        lambda problem: problem.keys == "latents" and _rows(problem) <= 16,
        ("triton", "flash_mla", "fa3"),
        f"""{H200}, mla/decode-64x8192-heads-16: FlashMLA, FlashAttention-3 and ours take 151, 222 and 148 us, and for
        128 decodes of 16 heads over 2048 keys 82, 85 and 87 us; ours later takes 80 (trial at e70cef1, 2026-11-29).""",
    ),
    Rule(
        "latents under many rows of each of many sequences, of about as many keys each",
        lambda problem: problem.keys == "latents" and _fills_sms(problem),
        ("flash_mla", "fa3", "triton"),
        f"""{H200}, mla/decode-64x8192-heads-128: 64 decodes of 128 heads over 8192 keys take it 259 us and ours 304;
        FlashAttention-3 took 276. Only ours reads quantized latents, unless a call lets FlashMLA round queries and
        weights: 64 decodes of 128 heads over 8192 keys then take it 226 us. For a tree both attend to the keys before
        it, and ours to its nodes: 64 trees of 4 nodes and 16 heads take 0.20, 0.25 and by ours alone 0.43 ms, 32 of
        8 nodes and 128 heads 1.06, 1.05 and 2.28.""",
    ),
    Rule(
        "latents",
        lambda problem: problem.keys == "latents",
        ("flash_mla", "triton", "fa3"),
        f"{H200}, mla/decode-1x131072-heads-128: FlashAttention-3 runs with one split, so it comes last",
    ),
    Rule(
        "a tree after many keys of each of many sequences",
        lambda problem: problem.tree and _rows(problem) > 16 and _fills_sms(problem),
        ("fa3", "triton"),
        f"""{H200}, speculative/tree-64x8192-drafts-16: only the nodes of a tree need its mask. FlashAttention-3 attends
        to the keys before it, without a mask, and ours to its few nodes, in one launch that merges with the output of
        the other: 64 trees of 16 nodes after 8192 keys take 0.51 ms so and 0.52 by ours alone, 8 of 64 nodes 0.14 and
        0.19.""",
    ),
    Rule(
        "trees",
        lambda problem: problem.tree,
        ("triton", "fa3"),
        f"{H200}, speculative/tree-1x8192-drafts-64: FlashAttention-3 runs with one split",
    ),
    Rule(
        "a window over rows on Hopper",
        lambda problem: problem.keys == "rows" and problem.window[0] >= 0 and _suits_roles(problem),
        ("triton", "fa2", "torch_flash", "fa4"),
        """not measured in a result file: in a trial (docs/results/tried) 16384 queries and a window of 1024 over rows
        take ours 555 us and FlashAttention-3 622 (d8086a3, 2026-11-29); over pages flash-attn takes 1072""",
    ),
    Rule(
        "a window over rows",
        lambda problem: problem.keys == "rows" and problem.window[0] >= 0,
        ("fa2", "torch_flash", "triton", "fa4"),
        """not measured: flash-attn-4 (4.0.0b36) is the last resort, as it hung an H200 within some hundred calls of
        16384 queries and a window of 1024, twice. Over pages it never did.""",
    ),
    Rule(
        "few rows, few operations or few tiles; or no bit may depend on the batch",
        lambda problem: _pays_to_split(problem),
        ("triton", "fa4", "fa3", "fa2", "torch_flash"),
        f"""{H200}, chunked_prefill/decode-*: ours splits the keys. The limits for prompts were measured against
        flash-attn-4, over prompts and chunks of 64 to 2048 tokens (aa92ef7, 2026-11-22). For calls that ours takes for
        their few operations alone, flash-attn-4 would be up to 1.6 times as fast: 13 us less at most (aa92ef7).""",
    ),
    Rule(
        "up to 64 causal rows over pages, of each of many sequences, of about as many keys each",
        lambda problem: _is_causal_over_pages(problem) and _rows(problem) <= 64 and _fills_sms(problem),
        ("fa3", "triton", "fa4", "fa2", "torch_flash"),
        f"""{H200}, chunked_prefill/decode-64x8208-tokens-16: FlashAttention-3 packs the query heads of a group into
        rows. With 16 drafted tokens for each of 64 sequences of 8192 keys it takes 0.50 ms, ours 0.50, flash-attn-4
        0.64. It runs with one split, as it drops a split whose scores are NaN. So with few queries it goes first only
        where there are tiles for most SMs, of about equally many keys each.""",
    ),
    Rule(
        "up to 64 causal rows over pages",
        lambda problem: _is_causal_over_pages(problem) and _rows(problem) <= 64,
        ("triton", "fa3", "fa4", "fa2", "torch_flash"),
        f"{H200}, chunked_prefill/decode-64x8208-tokens-16: as above; ours, as it splits the keys",
    ),
    Rule(
        "causal chunks over pages of FlashAttention-3's own tile",
        lambda problem: _is_causal_over_pages(problem) and problem.block_size == FA3_PAGE,
        ("fa3", "fa4", "fa2", "torch_flash", "triton"),
        f"""{H200}, chunked_prefill/prefill-2x8192-blocks-128: FlashAttention-3 loads such pages faster than others. It
        is 1 % ahead of flash-attn-4.""",
    ),
    Rule(
        "prompts of heads of 64 and 128 on Hopper",
        lambda problem: _suits_roles(problem),
        ("fa4", "fa3", "triton", "fa2", "torch_flash"),
        f"""{H200}, varlen/prefill-2x8192: FlashAttention-2 takes 3132 us; ours, warp-specialized here, 1901, and
        FlashAttention-4 1851 (38564ec, 2026-11-29). Over pages of 16 tokens ours is up to 2 % ahead, or 7 % behind""",
    ),
    Rule(
        "prompts of keys of 192 and values of 128 on Hopper",
        lambda problem: _rows(problem) > 128 and _suits_roles(problem, (192, 128)),
        ("fa4", "fa3", "triton", "fa2", "torch_flash"),
        f"""{H200}, mla/prefill-*: ours is warp-specialized here. 2 x 8192 prompts over latents take it 1282 us, and by
        FlashAttention-4 1248 (38564ec, 2026-11-29), where ours took 2775 (54821ec). FlashAttention-2 would pad values
        to the size of keys.""",
    ),
    Rule(
        "anything else on a GPU",
        lambda problem: True,
        ("fa4", "fa3", "fa2", "torch_flash", "triton"),
        f"{H200}, varlen/prefill-2x8192 and chunked_prefill/prefill-2x8192",
    ),
)


def rule_of(problem: Problem) -> Rule:
    """Return the first rule whose condition holds."""
    return next(rule for rule in RULES if rule.holds(problem))


def priorities(problem: Problem) -> tuple[str, ...]:
    """Return the kernels to try, from the first choice to the last resort."""
    return rule_of(problem).kernels


def _suits_roles(problem: Problem, *sizes: tuple[int, int]) -> bool:
    """Return whether our warp-specialized kernel, `fastattn.kernels.triton.prompts_hopper`, computes many tiles.

    `sizes` are those of a key and of a value that count: both 64 or both 128, if there are none.
    """
    found = problem.head_size, problem.value_head_size
    plain = not (problem.softcap or problem.alibi or problem.positions or problem.intervals or problem.levels > 1)
    suits = found in (sizes or ((64, 64), (128, 128)))
    return capability(problem.device) == (9, 0) and suits and plain and problem.aligned


def _is_one_prompt_of_states(problem: Problem) -> bool:
    """Return whether a recurrent layer is called for one prompt that FlashQLA would divide without a gain."""
    is_one = problem.operation == "recurrent" and problem.num_seqs == 1 and problem.dtype == torch.bfloat16
    return is_one and LONG_PROMPT <= problem.max_query_len <= UNDIVIDED


def _are_selected(problem: Problem) -> bool:
    """Return whether each query attends to latents that were selected for it."""
    return problem.keys == "latents" and problem.block_size == 1 and problem.max_query_len == 1


def _is_causal_over_pages(problem: Problem) -> bool:
    return problem.keys == "pages" and problem.window == (-1, 0)


def _pays_to_split(problem: Problem) -> bool:
    """Return whether splitting the keys pays, or the choice must not depend on the batch."""
    rows = _rows(problem)
    if problem.batch_invariant or rows <= 16:
        return True
    scores = problem.num_seqs * problem.num_heads * problem.max_query_len * problem.max_seq_len
    if 2 * scores * (problem.head_size + problem.value_head_size) <= FEW_OPERATIONS:
        return True
    tiles = problem.num_seqs * problem.num_kv_heads * -(-rows // 128)
    room = 2 if rows <= 64 else 2.5  # SMs per tile from which splitting the keys pays
    return tiles * room <= num_sms(problem.device)


def _fills_sms(problem: Problem) -> bool:
    """Return whether a kernel without splits keeps most SMs busy, each for about the same time."""
    rows = 64 if problem.keys == "latents" else 128  # rows of a tile
    tiles = problem.num_seqs * problem.num_kv_heads * -(-_rows(problem) // rows)
    return problem.even and tiles >= FULL * num_sms(problem.device)


def _rows(problem: Problem) -> int:
    """Return the largest number of query rows of a sequence per KV head."""
    return problem.max_query_len * (problem.num_heads // problem.num_kv_heads)


def _rows_per_key(problem: Problem) -> float:
    """Bound the average number of query rows that see a key; a window lowers it."""
    left, right = problem.window
    visible = problem.max_seq_len if min(left, right) < 0 else min(problem.max_seq_len, left + 1 + right)
    rows = problem.num_tokens * (problem.num_heads // problem.num_kv_heads) / max(1, problem.num_seqs)
    return rows * visible / max(1, problem.max_seq_len)


# --- the chooser ---


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Force one kernel inside a `with` block; a problem that it cannot compute raises, without a fallback.

    Only operations that the kernel has are forced. A FlashAttention package, for example, writes no cache and makes no
    tables; the kernels for these are chosen as usual.

    Args:
        name: one of `fastattn.kernels.NAMES`.

    Raises:
        ValueError: if there is no kernel of that name.
    """
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    token = forced.set(name)
    try:
        yield
    finally:
        forced.reset(token)


def choose(problem: Problem) -> Kernel:
    """Choose the kernel for a problem: the forced one, else the first of `priorities` that can compute it.

    Args:
        problem: what is to be computed.

    Returns:
        The kernel.

    Raises:
        NotImplementedError: if no kernel can, or the forced one can't, with the reasons.
    """
    return _choose(problem, forced.get())


@lru_cache(maxsize=4096)
def _choose(problem: Problem, asked: str | None) -> Kernel:
    names = priorities(problem)
    if asked is not None and load(asked).computes(problem):
        names = (asked,)
    reasons = {}
    for name in names:
        reasons[name] = unsupported_reason(name, problem)
        if reasons[name] is None:
            return load(name)
    why_not = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if problem.is_attention and problem.device.type not in ("cpu", "cuda"):
        why_not += f"; on {problem.device.type} take refattn, which is plain PyTorch"
    raise NotImplementedError(f"no kernel computes {problem.what}: {why_not}")


@lru_cache(maxsize=4096)
def choose_fused(problem: Problem, asked: str | None) -> Kernel | None:
    """Return the kernel for what is else several calls of attention, "differential" or "attend_compressed".

    None if no kernel can, or the forced one attends to such keys, and has no such function.
    """
    if asked is not None and problem.keys in load(asked).attends and problem.operation not in load(asked).functions:
        return None
    try:
        return _choose(problem, asked)
    except NotImplementedError:
        return None


def unsupported_reason(name: str, problem: Problem) -> str | None:
    """Return why a kernel cannot compute a problem, or None."""
    kernel = load(name)
    if not kernel.computes(problem):
        return f"does not compute {problem.what}"
    unknown, reason = kernel.unknown(problem), kernel.unsupported_reason(problem)
    return f"does not know {unknown}" if reason is None and unknown is not None else reason


def refuse_unknown(what: str, knows: frozenset[str], *arguments: object) -> None:
    """Refuse arguments of a computation in several operations that set a field which it does not support.

    Raises:
        NotImplementedError: naming such a field.
    """
    unknown = min(asked_of(*arguments) - knows, default=None)
    if unknown is not None:
        raise NotImplementedError(f"no kernel computes {what}: it does not know {unknown}")


def explain(problem: Problem) -> str:
    """Return the kernel that would compute a problem, why each other one cannot, and the rule that orders them.

    Args:
        problem: what is to be computed.
    """
    rule = rule_of(problem)
    lines = [f"{name}: {unsupported_reason(name, problem) or 'can'}" for name in NAMES]
    lines.append(f"order: {', '.join(rule.kernels)}, by the rule for {rule.name}")
    try:
        lines.append(f"chosen: {choose(problem).name}")
    except NotImplementedError as error:
        lines.append(str(error))
    return "\n".join(lines)


def forget() -> None:
    """Clear the cached choices; a plan keeps its own bound calls."""
    _choose.cache_clear()
    choose_fused.cache_clear()


@cache
def load(name: str) -> Kernel:
    """Return a kernel by its name."""
    module, _, what = MODULES[name].partition(":")
    kernel: Kernel = getattr(importlib.import_module(module), what or "KERNEL")
    return kernel
