"""What the fast twin adds to `refattn.serving.Engine`: steps replayed as CUDA graphs, and a thread for a server."""

from fastattn.serving.cuda_graphs import CudaGraphs

__all__ = ["CudaGraphs"]
