"""Continuous batching over the fast twin: `refattn.engine`, which computes nothing itself, over `fastattn`."""

from refattn import engine
from refattn.engine import BlockAllocator, Counters, Event, Prefix, Request, Sampling, paged_attention, sample

__all__ = [
    "BlockAllocator",
    "Counters",
    "Engine",
    "Event",
    "Prefix",
    "Request",
    "Sampling",
    "paged_attention",
    "sample",
]


class Engine(engine.Engine):
    """Serves requests on a model whose attention `fastattn` computes; see `refattn.engine.Engine`.

    Scheduling is plain Python, once a step and not once a layer, and the model takes a hundred times as long. So
    nothing is done differently here.
    """

    package = "fastattn"
