"""What a replay launches: with whose tensors, on which GPU, and laid out as the driver of CUDA reads it."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fastattn import chunked_prefill, dispatch
from fastattn.metadata import make_batch

launch = pytest.importorskip("fastattn.kernels.triton.launch", reason="needs Triton")

SIGNATURE = {
    "query": "*bf16",
    "out": "*fp32",
    "sinks": "constexpr",
    "scale": "fp32",
    "table": "*i32",
    "strides": ("i32", "constexpr", "i64"),
    "left": "i32",
    "BLOCK": "constexpr",
}
ARGUMENTS = (None, None, None, None, torch.arange(4), (7, 1, 2**40), -1, 64)
CHANGING = [(0,), (1,), (2,), (3,)]  # places of query, out, sinks, scale
SIZES = [8, 8, 4, 8, 4, 8, 4, 8, 8]


class Driver:
    """A driver of CUDA that notes what it is asked to launch."""

    def __init__(self, sizes=SIZES, status=0):
        self.sizes, self.status, self.launched = sizes, status, []
        self.current = threading.local()  # the context of each thread
        self.current.context = 7000  # of GPU 1, in the thread of the tests

    def cuCtxGetCurrent(self, context):
        context._obj.value = getattr(self.current, "context", None)
        return 0

    def cuCtxSetCurrent(self, context):
        self.current.context = context.value
        return 0

    def cuDeviceGet(self, number, device):
        number._obj.value = 40 + device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, number):
        context._obj.value = 7000 if number.value == 41 else None
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value >= len(self.sizes) or getattr(self.current, "context", None) != 7000:
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        if getattr(self.current, "context", None) != 7000:
            return 201
        config = config._obj
        read = [
            ctypes.string_at(pointer, size) for pointer, size in zip(list(pointers), self.sizes, strict=True)
        ]  # as it is now: the next launch writes into the same places
        attributes = [(config.attributes[i].id, config.attributes[i].value[0]) for i in range(config.num_attributes)]
        shape = (list(config.grid), list(config.block), config.shared_memory, config.stream, attributes)
        self.launched.append((function.value, shape, read))
        return self.status


def compiled(**changes):
    metadata = dict(num_warps=4, num_ctas=1, shared=5000, launch_pdl=False, launch_cooperative_grid=False)
    metadata |= dict(global_scratch_size=0, profile_scratch_size=0) | changes
    source = SimpleNamespace(signature=SIGNATURE)
    return SimpleNamespace(metadata=SimpleNamespace(**metadata), src=source, function=123)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(launch, "_cuda", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 90 + device, raising=False)
    return driver


def of(kernel, tensors):
    return launch.PackedLaunch.of(kernel, (3, 2, 1), ARGUMENTS, CHANGING, tensors)


def test_arguments_are_laid_out_as_the_driver_reads_them(driver):
    query, out = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)
    packed = of(compiled(), (query, out, None, 0.5))
    packed(query, out, None, 0.5)
    other = out.clone()
    packed(query, other, None, 0.25)

    def read(out, scale):
        numbers = [query.data_ptr(), out.data_ptr(), scale, ARGUMENTS[4].data_ptr(), 7, 2**40, -1, 0, 0]
        kinds = ["q", "q", "f", "q", "i", "q", "i", "q", "q"]
        c_types = dict(q=ctypes.c_int64, f=ctypes.c_float, i=ctypes.c_int32)
        return [bytes(c_types[kind](number)) for kind, number in zip(kinds, numbers, strict=True)]

    shape = ([3, 2, 1], [128, 1, 1], 5000, 91, [])
    assert driver.launched == [(123, shape, read(out, 0.5)), (123, shape, read(other, 0.25))]


def test_a_launch_may_begin_before_the_one_before_it_ends(driver):
    packed = of(compiled(launch_pdl=True), (torch.zeros(2), torch.zeros(2), None, 1.0))
    packed(torch.zeros(2), torch.zeros(2), None, 1.0)
    assert driver.launched[0][1][-1] == [(6, 1)]


@pytest.mark.parametrize(
    "change",
    [dict(global_scratch_size=8), dict(profile_scratch_size=8), dict(launch_cooperative_grid=True), dict(num_ctas=2)],
    ids=lambda change: next(iter(change)),
)
def test_what_else_a_kernel_needs_is_left_to_triton(driver, change):
    assert of(compiled(**change), (torch.zeros(2), torch.zeros(2), None, 1.0)) is None


@pytest.mark.parametrize(
    "sizes", [SIZES[:-1], [*SIZES, 8], [*SIZES[:2], 8, *SIZES[3:]]], ids=["fewer", "more", "wider"]
)
def test_parameters_that_triton_lays_out_otherwise_are_left_to_triton(driver, sizes):
    driver.sizes = sizes
    assert of(compiled(), (torch.zeros(2), torch.zeros(2), None, 1.0)) is None


def test_without_a_driver_triton_launches(monkeypatch):
    monkeypatch.setattr(launch, "_cuda", lambda: None)
    assert of(compiled(), (torch.zeros(2), torch.zeros(2), None, 1.0)) is None


def test_an_empty_grid_is_left_to_triton(driver):
    """It launches nothing; the driver would refuse it."""
    tensors = (torch.zeros(2), torch.zeros(2), None, 1.0)
    assert launch.PackedLaunch.of(compiled(), (3, 0, 1), ARGUMENTS, CHANGING, tensors) is None


def test_an_error_of_the_driver_is_raised(driver):
    packed = of(compiled(), (torch.zeros(2), torch.zeros(2), None, 1.0))
    driver.status = 700
    with pytest.raises(RuntimeError, match="error 700"):
        packed(torch.zeros(2), torch.zeros(2), None, 1.0)


@pytest.mark.parametrize("packed_first", [True, False])
def test_a_thread_without_a_context_launches(driver, packed_first):
    """A new thread has none until it calls the CUDA runtime, which a replay need not do."""
    tensors = (torch.zeros(2), torch.zeros(2), None, 1.0)
    packed = of(compiled(), tensors) if packed_first else None

    def run(_):
        its = packed or of(compiled(), tensors)
        its(*tensors)
        its(*tensors)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, range(3))) == [None] * 3
    assert len(driver.launched) == 6


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_goes_to_the_gpu_of_its_tensors(monkeypatch, current):
    entered = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", entered)
    function, noted = mock.Mock(return_value="answer"), dict(two=2, three=3)
    tensor = SimpleNamespace(device=torch.device("cuda", 1))
    for first in (tensor, [tensor]):
        entered.reset_mock()
        assert dispatch.launch(function, one=first, **noted) == "answer"
        function.assert_called_with(one=first, **noted)
        assert [call.args for call in entered.call_args_list] == ([(tensor.device,)] if current == 0 else [])


def test_tensors_on_a_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    answers = []
    for device in ("cuda:0", "cuda:1"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            query, key, value = (torch.randn(shape).half() for shape in ((3, 4, 64), (8, 16, 2, 64), (8, 16, 2, 64)))
        batch = make_batch([1, 2], [50, 40], [[3, 1, 5, 7], [2, 0, 4]], device=device)
        plan = chunked_prefill.plan(batch, block_size=16)
        on_device = (query.to(device), key.to(device), value.to(device))
        for _ in range(2):  # launched by Triton, and replayed by the driver
            out = chunked_prefill.attention(*on_device, plan)
            assert out.device == torch.device(device)
            answers.append(out.cpu())
    assert all(torch.equal(answers[0], answer) for answer in answers[1:])
