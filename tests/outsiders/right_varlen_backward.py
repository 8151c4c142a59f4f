"""Kernels over rows whose gradients are right."""

from wrong_varlen_backward import _differentiable


def softmax_per_sequence(
    query, key, value, cu_seqlens_q, seq_lens, softcap=0.0, window_size=(-1, -1), return_lse=False
):
    """One plain softmax per sequence, differentiated by autograd."""

    def cap(x):
        return softcap * (x / softcap).tanh() if softcap else x

    out, lse = _differentiable(query, key, value, cu_seqlens_q, seq_lens, cap, window=window_size)
    return (out, lse) if return_lse else out
