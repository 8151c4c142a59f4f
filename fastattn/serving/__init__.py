"""What the fast twin adds to `refattn.serving.Engine`: CUDA graphs, fused layers, packed weights, sampling, threads."""

from fastattn.serving.cuda_graphs import CudaGraphs
from fastattn.serving.fused import fuse, unfuse
from fastattn.serving.packed_weights import pack, unpack
from fastattn.serving.sampling import sample

__all__ = ["CudaGraphs", "fuse", "pack", "sample", "unfuse", "unpack"]
