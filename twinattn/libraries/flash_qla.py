"""FlashQLA: Qwen's gated delta rule for prompts, the package `flash-qla`, whose kernels are in TileLang.

It takes heads of 128, with a decay per head. It knows no slots: the states of a step lie one after the other. Decays
have to be more than 0, and a scale of 0 is taken for the default.

Every call returns the outputs `[t, hv, dv]` and the states after the step `[b, hv, dv, dk]`, in float32.
"""

from functools import partial

from torch import Tensor

from twinattn.libraries import Call, missing


def available() -> str | None:
    """Return why it cannot be used."""
    return missing("flash_qla")


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    before: Tensor | None,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
) -> Call:
    """Prepare `chunk_gated_delta_rule`, whose tables belong to a tensor of lengths: its first call waits for the GPU.

    Args:
        query: `[t, h, dk]`.
        key: `[t, h, dk]`.
        value: `[t, hv, dv]`.
        log_decay: `[t, hv]`.
        beta: `[t, hv]`.
        before: the states before the step, `[b, hv, dv, dk]`; zeros if None.
        cu_seqlens_q: where sequences begin, `[b + 1]`.
        scale: `dk ** -0.5` if None.
    """
    from flash_qla import chunk_gated_delta_rule

    call = partial(
        chunk_gated_delta_rule,
        *(x[None] for x in (query, key, value, log_decay, beta)),
        scale=scale,
        initial_state=before,
        output_final_state=True,
        cu_seqlens=cu_seqlens_q.long(),
        state_v_first=True,
    )

    def in_rows() -> tuple[Tensor, Tensor]:
        out, after = call()
        return out[0], after

    return in_rows
