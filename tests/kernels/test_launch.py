"""What is compiled for a launch, and what a replay launches: whose tensors, on which GPU, as the driver reads it."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from fastattn import chunked_prefill, dispatch, recurrent
from fastattn.metadata import make_batch, split_decodes_and_prefills

launch = pytest.importorskip("fastattn.kernels.triton.launch", reason="needs Triton")
replay = pytest.importorskip("fastattn.kernels.triton.replay", reason="needs Triton")

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
        self.current.context = 7000  # the context of GPU 1, in the thread of the tests

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


# --- what is compiled ---


class Of(NamedTuple):
    """An argument of a kernel."""

    function: Any
    left: Any
    width: Any
    table: Any


class Kernel:
    """A kernel that is never run: `scale` and `of` are given, `SIZE` is a constant."""

    arg_names = ("of", "scale", "SIZE")
    do_not_specialize = ("left", "table")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "SIZE") for name in arg_names)
    constexprs = (2,)
    is_gluon = staticmethod(lambda: False)


@pytest.fixture
def compiled_as(monkeypatch):
    """Compile nothing, and note for what it was to be: the types, the constants, and what is a multiple of 16."""
    noted = []

    def note(source, options):
        noted.append(source[1:])
        return {(1, 1, 1): lambda *arguments: None}

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "ASTSource", lambda *source: source)
    monkeypatch.setattr(launch.triton, "compile", note)
    return noted


def make(kernel=Kernel, scale=0.5, size=64, function=len, left=3, width=3, table=None):
    table = torch.zeros(8)[1:] if table is None else table
    of = Of(launch.tl.constexpr(function), left, width, table)
    return launch.Launch(kernel, (1,), {"scale": scale}, dict(of=of, SIZE=size), {})


def test_a_field_that_changes_from_step_to_step_leads_to_no_other_compilation(compiled_as):
    memory = torch.zeros(64)
    for left in (0, 1, 3, 16, -1):
        for first in (0, 1):
            make(left=left, table=memory[first:])
    assert len(compiled_as) == 1
    signature, constants, attributes = compiled_as[0]
    assert signature == {"of": Of("constexpr", "i32", "i32", "*fp32"), "scale": "fp32", "SIZE": "constexpr"}
    assert constants == {(0, 0): len, (2,): 64} and not attributes


@pytest.mark.parametrize(
    "change",
    [
        dict(width=1),
        dict(width=16),
        dict(width=2**31),
        dict(size=32),
        dict(function=max),
        dict(table=torch.zeros(8, dtype=torch.int32)),
    ],
    ids=["one", "a-multiple", "64-bits", "a-constant", "a-function", "a-type"],
)
def test_what_the_compiler_knows_of_an_argument_is_compiled_once(compiled_as, change):
    for given in ({}, change, {}, change):
        make(**given)
    assert len(compiled_as) == 2 and compiled_as[0] != compiled_as[1]


def test_a_multiple_of_16_is_known_as_one_and_1_is_a_constant(compiled_as):
    for width in (0, 16, 48, 1):
        make(width=width)
    assert [attributes for *_, attributes in compiled_as] == [{(0, 2): [["tt.divisibility", 16]]}, {}]
    assert compiled_as[1][1][(0, 2)] == 1


def test_a_scale_of_1_is_no_constant_of_the_kernel(compiled_as):
    """The next layer has another one, and the same launch."""
    for scale in (1, 1.0, 16, 0.25):
        make(scale=scale)
    assert len(compiled_as) == 1 and compiled_as[0][0]["scale"] == "fp32"


def test_an_argument_that_changes_is_not_given_as_another_one_too(compiled_as):
    """It would be unclear which of the two the first launch takes."""
    with pytest.raises(AssertionError, match=r"arguments that change and do not: \['scale'\]"):
        launch.Launch(Kernel, (1,), {"scale": 0.5}, dict(of=None, scale=1.0, SIZE=64), {})


# --- which GPU ---


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


@pytest.mark.parametrize(
    "kernel",
    ["recurrent:_tokens", "chunks:_within", "chunks:_repair", "chunks:_chunks", "chunks_hopper:_fold"]
    + ["convolution:_convolve", "convolution:_keep_inputs"]
    + ["replay:_share", "replay:_decode", "replay:_step", "replay:_flush"],
)
def test_where_a_part_of_a_step_begins_leads_to_no_other_compilation(kernel):
    """Prompts come after decodes: their tables are parts of the step's, and begin at any of its numbers."""
    module, name = kernel.split(":")
    function = getattr(import_module(f"fastattn.kernels.triton.{module}"), f"{name}_kernel")
    is_interpreted = not hasattr(function, "do_not_specialize")
    changing = function.kwargs["do_not_specialize"] if is_interpreted else function.do_not_specialize
    known, of_others = set(), set()
    for decodes in range(1, 20):
        query_lens, rows = [1] * decodes + [20, 20], torch.arange((decodes + 2) * 7, dtype=torch.int32).view(-1, 7)
        batch = make_batch(query_lens, [9] * decodes + [20, 30])
        _, prompts = split_decodes_and_prefills(batch, query_lens, decode_len=1)
        flags = torch.ones(decodes + 2, dtype=torch.bool)[decodes:]
        kept = torch.where(torch.tensor([True, False]), rows[decodes:, 4:5], -1)
        more = dict(has_initial_state=flags, checkpoint_indices=kept, block_size=16)
        plan = recurrent.plan(prompts.batch, state_indices=rows[decodes:, 2], **more)
        cursors, targets = torch.zeros(len(rows) * 7, dtype=torch.int32)[decodes:], rows[decodes:, 6]
        of_rings = replay.Cursors(cursors, flags, targets, 1, 1, 7, SIZE=4, DRAFTS=False)
        tables = replay.tables_of(plan, 40)
        known.add(launch._known([("tables", tables), ("cursors", of_rings)], frozenset(changing)))
        anywhere = dict.fromkeys(("cu_seqlens_q", "seq_lens", "num_accepted", "checkpoints"), rows.flatten()[decodes:])
        counts = [x for x in tables._fields if x.startswith(("num_", "table_", "column_", "checkpoint_"))]
        others = tables._replace(**dict.fromkeys(counts, decodes) | anywhere)
        of_others.add(launch._known([("tables", others)], frozenset(changing)))
    assert len(known) == len(of_others) == 1
