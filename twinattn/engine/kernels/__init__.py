"""Kernels of a layer and of the sampler, in Triton and in plain PyTorch: what an engine launches besides attention."""
