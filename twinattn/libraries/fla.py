"""Flash Linear Attention: the package `fla-core`. It knows no slots: the states of a step lie one after the other.

Where FlashQLA is installed, it computes prompts of "gdn" by that. Here its own kernels are called.

Every call returns the outputs `[t, hv, dv]` and the states after the step `[b, hv, dv, dk]`.
"""

import importlib
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twinattn.libraries import Call, missing

MODULES = {"gdn": "gated_delta_rule", "kda": "kda", "mamba2": "simple_gla"}  # modules of `fla.ops`, by layer
FUNCTIONS = {
    ("gdn", "chunk"): "chunk_gated_delta_rule",
    ("gdn", "recurrent"): "fused_recurrent_gated_delta_rule",
    ("kda", "chunk"): "chunk_kda",
    ("kda", "recurrent"): "fused_recurrent_kda",
    ("mamba2", "chunk"): "chunk_simple_gla",
    ("mamba2", "recurrent"): "fused_recurrent_simple_gla",
}
NAIVE = {
    ("gdn", "chunk"): "naive_chunk_gated_delta_rule",
    ("gdn", "recurrent"): "naive_recurrent_gated_delta_rule",
    ("kda", "recurrent"): "naive_recurrent_kda",
    ("mamba2", "chunk"): "naive_chunk_simple_gla",
    ("mamba2", "recurrent"): "naive_recurrent_simple_gla",
}


def available() -> str | None:
    """Return why it cannot be used."""
    return missing("fla.ops")


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    before: Tensor | None,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    *,
    layer: str = "gdn",
    form: str = "chunk",
) -> Call:
    """Prepare one of its kernels.

    Args:
        query: `[t, h, dk]`.
        key: `[t, h, dk]`.
        value: `[t, hv, dv]`.
        log_decay: `[t, hv]`, of "kda" `[t, hv, dk]`.
        beta: `[t, hv]`; what writes whole values has none, so that values are multiplied with it.
        before: the states before the step, `[b, hv, dv, dk]`; zeros if None.
        cu_seqlens_q: where sequences begin, `[b + 1]`.
        scale: `dk ** -0.5` if None.
        layer: "gdn", "kda" or "mamba2".
        form: "chunk" for prompts, or "recurrent", token by token.
    """
    os.environ["FLA_FLASH_QLA"] = "0"
    function = getattr(importlib.import_module(f"fla.ops.{MODULES[layer]}"), FUNCTIONS[layer, form])
    call = partial(
        function,
        **_tokens(query, key, value, log_decay, beta, layer),
        scale=scale,
        initial_state=before,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens_q.long(),
    )

    def in_rows() -> tuple[Tensor, Tensor]:
        out, after = call()
        return out[0], after

    return in_rows


def prepare_naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    before: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    *,
    layer: str = "gdn",
    form: str = "recurrent",
) -> Call:
    """Prepare its functions in PyTorch, which run on a CPU, for one sequence after the other; as `prepare`."""
    module = importlib.import_module(f"fla.ops.{MODULES[layer]}.naive")
    function, ends = getattr(module, NAIVE[layer, form]), cu_seqlens_q.tolist()

    def call() -> tuple[Tensor, Tensor]:
        outs, after = [], []
        for i, (begin, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            q, k, v, g, b = (x[begin:end] for x in (query, key, value, log_decay, beta))
            state = before[i : i + 1].mT.contiguous()  # FLA keeps states as [dk, dv]
            options: dict[str, Any] = dict(scale=scale, initial_state=state, output_final_state=True)
            out, state = function(**_tokens(q, k, v, g, b, layer), **options)
            outs.append(out[0])
            after.append(state[0].mT)
        return torch.cat(outs), torch.stack(after)

    return call


def _tokens(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, layer: str
) -> dict[str, Tensor]:
    """Name the tokens of all sequences as it does, in one row."""
    if layer == "mamba2":
        value = value * beta[..., None].to(value.dtype)
    named = dict(q=query, k=key, v=value, g=log_decay) | ({} if layer == "mamba2" else dict(beta=beta))
    return {name: x[None] for name, x in named.items()}
