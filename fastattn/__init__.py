"""Fast twins of `refattn`: the same names and signatures, computed by FlashAttention and our own kernels."""

from fastattn.kernels import explain, use_kernel

__all__ = ["explain", "use_kernel"]
