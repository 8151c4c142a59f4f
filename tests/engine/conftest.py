"""What all tests of the engine have in common.

Where a command names one of their files, this one is imported before pytest is configured. So fixtures import what they
need themselves: Triton, which models import, has to know by then whether it interprets.
"""

import inspect

import pytest


@pytest.fixture(autouse=True)
def no_pass_fails(request, caplog):
    """See that no pass fails unseen: its requests are computed again one by one, and their tokens are the right ones.

    A test that lets something fail says so by the mark `lets_a_pass_fail`, or asks for the log itself.
    """
    yield
    reads_the_log = "caplog" in inspect.signature(request.function).parameters
    if not reads_the_log and request.node.get_closest_marker("lets_a_pass_fail") is None:
        assert not [record.getMessage() for record in caplog.get_records("call") if record.exc_info]


@pytest.fixture(autouse=True, scope="module")
def in_one_thread(one_thread):
    """Models, too, which fixtures of a module make."""


@pytest.fixture
def steps_as_recordings(monkeypatch, device):
    """On a CPU, capture a step by running it, and replay it by running it again."""
    import twinattn.engine.cuda_graphs

    if device == "cpu":
        monkeypatch.setattr(twinattn.engine.cuda_graphs, "_record", lambda step, memory, name: step)


@pytest.fixture
def recorder(steps_as_recordings, monkeypatch):
    """A runner that records every step, small ones too."""
    import twinattn.engine.graph_shapes
    from twinattn.engine import CudaGraphs

    monkeypatch.setattr(twinattn.engine.graph_shapes, "FEWEST_TOKENS", 16)
    monkeypatch.setattr(CudaGraphs, "_is_worth_recording", lambda self, engine, shape: True)
    runner = CudaGraphs()
    runner.records = True
    return runner


@pytest.fixture
def on_tape(monkeypatch, device):
    """Capture all steps; on a CPU a graph is a tape, over which only what is in buffers changes."""
    import twinattn.engine.cuda_graphs
    import twinattn.engine.graph_shapes
    from tests.helpers.tape import tape_recorder
    from twinattn.engine import CudaGraphs

    if device == "cpu":
        monkeypatch.setattr(twinattn.engine.cuda_graphs, "_record", tape_recorder(monkeypatch))
    monkeypatch.setattr(CudaGraphs, "_is_worth_recording", lambda self, engine, shape: True)
    monkeypatch.setattr(twinattn.engine.graph_shapes, "FEWEST_TOKENS", 64)


@pytest.fixture
def captured(on_tape, device):
    """Make engines over layers with states whose steps are captured, all of them, and whose decodes are watched."""
    from tests.helpers import state_engines
    from tests.helpers.engines import Watched

    def make(model, **options):
        engine = state_engines.make_engine(model, "fastattn", runner=Watched(device), **options)
        run_model, engine.passes = engine.run_model, []  # launch by launch, or to capture
        engine.run_model = lambda inputs: engine.passes.append(inputs["step"].states) or run_model(inputs)
        return engine

    return make
