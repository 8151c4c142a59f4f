"""The kernels that compute, in folders by backend, and the one chooser between them (`order`)."""

from fastattn.kernels.order import NAMES, choose, explain, use_kernel
from fastattn.kernels.problem import Problem, attention_problem

__all__ = ["NAMES", "Problem", "attention_problem", "choose", "explain", "use_kernel"]
