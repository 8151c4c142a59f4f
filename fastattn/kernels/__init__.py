"""The kernels, in a folder per backend, and the function that chooses between them (`order`)."""

from fastattn.kernels.order import NAMES, choose, explain, use_kernel
from fastattn.kernels.problem import Problem, attention_problem

__all__ = ["NAMES", "Problem", "attention_problem", "choose", "explain", "use_kernel"]
