"""What the fast twin adds to a server: decodes replayed as CUDA graphs, for `refattn.serving.Engine`."""

from fastattn.serving.cuda_graphs import CudaGraphs

__all__ = ["CudaGraphs"]
