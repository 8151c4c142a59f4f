"""Serve requests with either twin: an engine with continuous batching, and its parts."""

from refattn.serving.block_pool import BlockPool
from refattn.serving.calibration import calibrate
from refattn.serving.cost_model import CPU, H200, Machine
from refattn.serving.engine import Engine, Step
from refattn.serving.layers import Amax
from refattn.serving.request import Draft, Event, Prompt, Request, StepTokens
from refattn.serving.sampling import SamplingParams, sample
from refattn.serving.scheduler import Counters, Scheduler
from refattn.serving.speculation import DraftModel, NGram
from refattn.serving.state_pool import StatePool
from refattn.serving.window_pool import WindowPool

__all__ = [
    "CPU",
    "H200",
    "Amax",
    "BlockPool",
    "Counters",
    "Draft",
    "DraftModel",
    "Engine",
    "Event",
    "Machine",
    "NGram",
    "Prompt",
    "Request",
    "SamplingParams",
    "Scheduler",
    "StatePool",
    "Step",
    "StepTokens",
    "WindowPool",
    "calibrate",
    "sample",
]
