"""What the fast twin adds to `refattn.serving.Engine`: CUDA graphs, fused layers, and a thread for a server."""

from fastattn.serving.cuda_graphs import CudaGraphs
from fastattn.serving.fused import fuse, unfuse

__all__ = ["CudaGraphs", "fuse", "unfuse"]
