"""What the fast twin adds to a server: steps replayed as CUDA graphs, for `refattn.serving.Engine`."""

from fastattn.serving.cuda_graphs import CudaGraphs

__all__ = ["CudaGraphs"]
