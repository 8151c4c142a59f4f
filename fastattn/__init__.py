"""Fast twins of `refattn`: the same names and signatures, computed by FlashAttention and by our own Triton kernels."""

from fastattn.kernels import explain, use_kernel

__all__ = ["explain", "use_kernel"]
