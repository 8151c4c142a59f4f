"""What the fast twin adds to `refattn.serving.Engine`: CUDA graphs, fused layers, sampling, a thread for a server."""

from fastattn.serving.cuda_graphs import CudaGraphs
from fastattn.serving.fused import fuse, unfuse
from fastattn.serving.sampling import sample

__all__ = ["CudaGraphs", "fuse", "sample", "unfuse"]
