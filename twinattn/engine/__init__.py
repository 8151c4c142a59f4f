"""Serve requests with either twin: an engine with continuous batching, and its parts."""

from twinattn.engine.block_pool import BlockPool
from twinattn.engine.calibration import calibrate
from twinattn.engine.cost_model import CPU, H200, Machine
from twinattn.engine.cuda_graphs import CudaGraphs
from twinattn.engine.engine import Engine
from twinattn.engine.fused import fuse, unfuse
from twinattn.engine.layer_pools import Step
from twinattn.engine.packed_weights import pack, unpack
from twinattn.engine.request import Draft, Event, Prompt, Request, StepTokens
from twinattn.engine.sampling import SamplingParams, sample
from twinattn.engine.scheduler import Counters, Scheduler
from twinattn.engine.speculation import Drafter, DraftModel, NGram
from twinattn.engine.state_pool import StatePool
from twinattn.engine.storages import CalibrationStats
from twinattn.engine.window_pool import WindowPool

__all__ = [
    "CPU",
    "H200",
    "CalibrationStats",
    "BlockPool",
    "Counters",
    "CudaGraphs",
    "Draft",
    "DraftModel",
    "Drafter",
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
    "fuse",
    "pack",
    "sample",
    "unfuse",
    "unpack",
]
