"""What the fast twin adds to `refattn.serving.Engine`: next tokens, CUDA graphs of steps, a thread for a server."""

from fastattn.serving.cuda_graphs import CudaGraphs
from fastattn.serving.sampling import sample

__all__ = ["CudaGraphs", "sample"]
