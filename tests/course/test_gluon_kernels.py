"""The interpreter of Gluon on small kernels: what the language means, what is refused, and what an error leaves."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastattn.kernels.triton import hopper, launch, prompts_hopper
from twinattn.course.gluon.interpret import Interpreted, hopper_on_a_cpu
from twinattn.course.gluon.values import FUNCTIONS, KernelError, Value, address_of, load, value_of

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not launch.INTERPRETED, reason="the interpreter of Gluon runs kernels on a CPU"),
]

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
BARRIERS = gl.constexpr(mbarrier.MBarrierLayout())
functions = SimpleNamespace(**FUNCTIONS)


def numbers(*each, dtype=torch.int32):
    return Value(torch.tensor(each, dtype=dtype))


# --- numbers ---


def test_operators_have_the_types_of_triton():
    """Half precision is divided in float32, reductions are of 32 bits, and a number may stand on the left."""
    halves, bytes_ = numbers(1.0, 3.0, dtype=torch.float16), numbers(100, 100, dtype=torch.int8)
    assert (halves / 3.0).data.dtype == (halves / halves).data.dtype == (halves % 2.0).data.dtype == torch.float32
    assert (halves * 3.0).data.dtype == (halves + 1).data.dtype == torch.float16
    assert functions.max(halves, 0).data.dtype == torch.float32
    assert functions.sum(bytes_, 0).data.item() == 200
    three = value_of(3)
    turned = 7 // three, -7 // three, 7 % three, -7 % three, 1 << three, 5 ^ three
    assert [int(x) for x in turned] == [2, -2, 1, -1, 8, 6]
    assert (~(numbers(1, 5) < 3)).data.tolist() == [False, True]
    assert functions.maximum(numbers(1, 1), Value(torch.tensor([torch.nan, 2.0]))).data.tolist() == [1.0, 2.0]
    with pytest.raises(KernelError, match="integers"):
        halves // 2
    with pytest.raises(TypeError):
        range(halves[0])


def test_addresses_move_by_integers():
    memory = address_of(torch.arange(8.0))
    at = numbers(0, 1)
    assert load(2 + memory + at).data.tolist() == load(memory + 3 + (at - 1)).data.tolist() == [2, 3]
    assert load(memory + at, mask=at < 1, other=value_of(9)).data.tolist() == [0, 9]
    for wrong in (lambda: memory * 2, lambda: memory + 1.0, lambda: memory + memory, lambda: 8 - memory):
        with pytest.raises(KernelError, match="addresses move by integers"):
            wrong()


# --- a kernel and its arguments ---


@gluon.jit
def plus(x, MORE: gl.constexpr = 3):
    return x + MORE


@gluon.jit
def count(out, n, flag, SIZE: gl.constexpr, NAME: gl.constexpr):
    total = 0
    for i in range(n - 1, -1, -2):
        total += i
    gl.store(out, total)
    gl.store(out + 1, plus(total))
    if flag:
        gl.store(out + 2, SIZE)
    if NAME == "there":
        gl.store(out + 3, 1)
    for i in range(n.to(gl.int64), n + 1):
        gl.store(out + 4, (i << 40 >> 40).to(gl.int32))


def test_arguments_are_numbers_and_constants():
    """Also a number that is 1, by name, and in a range of which one bound has 64 bits; constants are Python's."""
    out = torch.zeros(5, dtype=torch.int32)
    kernel = Interpreted(count)
    kernel[(1,)](out, 6, True, SIZE=64, NAME="there", num_warps=4)
    assert out.tolist() == [9, 12, 64, 1, 6]
    out.zero_()
    kernel[(1, 1)](out, 1, False, 32, "away")
    assert out.tolist() == [0, 3, 0, 0, 1]
    assert kernel.launched == ["count 1", "count 1"]


def test_a_function_sees_names_around_it_as_they_are(monkeypatch):
    """Those of a function that contains it; and of a module now, not those that an earlier kernel has seen."""
    more = gl.constexpr(5)

    @gluon.jit
    def store(out, *, times: gl.constexpr = 2):
        gl.store(out, plus(more * times))

    out = torch.zeros(1, dtype=torch.int32)
    Interpreted(store)[(1,)](out)
    assert out.item() == 13

    @gluon.jit
    def minus(x, LESS: gl.constexpr = 3):
        return x - LESS

    monkeypatch.setitem(globals(), "plus", minus)
    Interpreted(store)[(1,)](out)
    assert out.item() == 7


# --- shared memory, copies and products ---


@gluon.jit
def copy_at(tiles, out, row, column):
    place = gl.allocate_shared_memory(gl.float16, [16, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS).index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 16 * 64 * 2)
    tma.async_copy_global_to_shared(tiles, [row, column], full, place)
    mbarrier.wait(full, 0)
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, TILE))[:, None]
    gl.store(out + rows * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, TILE))[None, :], place.load(TILE))


@pytest.mark.parametrize(("row", "column"), [(2, 0), (10, 16), (-4, -8), (30, 0)])
def test_a_tile_at_a_border_is_filled_with_zeros(row, column):
    """All of its bytes are counted, also those of zeros."""
    matrix, out = torch.randn(20, 72).half(), torch.full((16, 64), torch.nan).half()
    Interpreted(copy_at)[(1,)](TensorDescriptor.from_tensor(matrix, [16, 64], SHARED.value), out, row, column)
    padded = torch.nn.functional.pad(matrix, (64, 64, 64, 64))
    expected = padded[64 + row :, 64 + column :][:16, :64]
    assert torch.equal(out, torch.nn.functional.pad(expected, (0, 64 - expected.shape[1], 0, 16 - expected.shape[0])))


@gluon.jit
def two_groups(source, out, COMMIT: gl.constexpr, LEFT: gl.constexpr):
    place = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    at = gl.arange(0, 128, layout=LINE)
    for i in gl.static_range(2):
        async_copy.async_copy_global_to_shared(place.index(i), source + i * 128 + at)
        if COMMIT:
            async_copy.commit_group()
    async_copy.wait_group(LEFT)
    gl.store(out + at, place.index(0).load(LINE))
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out + 128 + at, place.index(1).load(LINE))


@pytest.mark.parametrize(
    ("commit", "left", "right"), [(True, 1, True), (True, 0, True), (True, 2, False), (False, 0, False)]
)
def test_a_wait_for_copies_counts_groups(commit, left, right):
    """What is in no group is not waited for."""
    source, found = torch.arange(256.0), []
    for seed in range(8):
        out = torch.zeros(256)
        Interpreted(two_groups, seed)[(1,)](source, out, commit, left)
        assert torch.equal(out[128:], source[128:])
        found.append(torch.equal(out, source))
    assert all(found) is right


@gluon.jit
def multiply(a, b, out, LEFT: gl.constexpr, FENCE: gl.constexpr):
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))[:, None]
    at = rows * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, TILE))[None, :]
    place = gl.allocate_shared_memory(gl.float16, [1, 2, 64, 64], SHARED)
    place.index(0).index(1).store(gl.load(b + at))
    if FENCE:
        fence_async_shared()
    left = gl.convert_layout(gl.load(a + at), gl.DotOperandLayout(0, PRODUCTS, 2))
    nothing = gl.zeros([64, 64], gl.float32, PRODUCTS)
    once = warpgroup_mma(left, place.index(0).index(1), nothing, use_acc=False, is_async=True)
    twice = warpgroup_mma(left, place.index(0).index(1), once, is_async=True)
    found = warpgroup_mma_wait(LEFT, deps=[twice])
    gl.store(out + at, gl.convert_layout(found, TILE))
    warpgroup_mma_wait(0, deps=[twice])


@pytest.mark.parametrize(
    ("left", "fence", "says"),
    [(0, True, None), (1, True, "before it is waited for"), (5, True, "before it is waited for"), (0, False, "fence")],
)
def test_products_in_registers_are_waited_for(left, fence, says):
    """In every order, however early a product is done; a slot of a slot has its own writes and fences."""
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    for seed in range(6):
        out = torch.zeros(64, 64)
        if says is None:
            Interpreted(multiply, seed)[(1,)](a, b, out, left, fence)
            torch.testing.assert_close(out, 2 * a.float() @ b.float(), rtol=1e-5, atol=1e-4)
        else:
            with pytest.raises(KernelError, match=says):
                Interpreted(multiply, seed)[(1,)](a, b, out, left, fence)


@gluon.jit
def mistaken(out, WHAT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    mbarrier.init(barriers.index(0), count=1)
    place = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ones = gl.full([128], 1.0, gl.float32, LINE)
    if WHAT == "parity":
        mbarrier.wait(barriers.index(0), 3)
    elif WHAT == "init":
        mbarrier.wait(barriers.index(1), 1)
    elif WHAT == "place":
        mbarrier.arrive(barriers.index(gl.program_id(0) - 1))
    elif WHAT == "shape":
        async_copy.async_copy_global_to_shared(place, out + gl.arange(0, 128, layout=LINE))
        async_copy.commit_group()
        async_copy.wait_group(0)
    elif WHAT == "type":
        place.index(0).store(ones.to(gl.float16))
    elif WHAT == "missing":
        mbarrier.expect(barriers.index(0), 64)
        mbarrier.wait(barriers.index(0), 0)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("parity", "parity 3, which is neither 0 nor 1"),
        ("init", "before `mbarrier.init`"),
        ("place", "barrier -1 of 2"),
        ("shape", r"\[128\] in torch.float32 is written to \[2, 128\]"),
        ("type", "in torch.float16 is written to"),
        ("missing", "of whose 1 arrivals 0 are missing, and 64 bytes, in mistaken"),
    ],
)
def test_what_hardware_or_the_compiler_refuses(what, says):
    with pytest.raises(KernelError, match=says):
        Interpreted(mistaken)[(1,)](torch.zeros(128), what)


@gluon.jit
def meet(NUMBER: gl.constexpr):
    x = gl.zeros([128], gl.int32, LINE)
    TEXT: gl.constexpr = "bar.sync 8, 256; mov.b32 $0, $1;" if NUMBER == 256 else "bar.sync 8, 384; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_in_turns(OTHER: gl.constexpr):
    gl.warp_specialize([(meet, (256,)), (meet, (OTHER,))], [4], [24])


def test_a_named_barrier_has_one_number_of_threads():
    Interpreted(meet_in_turns)[(1,)](256)
    with pytest.raises(KernelError, match="named barrier 8 expects"):
        Interpreted(meet_in_turns)[(1,)](384)


# --- launches ---


@gluon.jit
def wait_for_it(barrier):
    mbarrier.wait(barrier, 0)


@gluon.jit
def copy_and_wait(source, at, place, barrier):
    async_copy.async_copy_global_to_shared(place, source + at + gl.arange(0, 128, layout=LINE))
    async_copy.mbarrier_arrive(barrier, increment_count=False)
    mbarrier.wait(barrier, 0)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def go_on(source, place, barrier):
    while gl.num_programs(0) > 0:
        gl.debug_barrier()


@gluon.jit
def launched(source, at, LAST: gl.constexpr):
    place = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS).index(0)
    mbarrier.init(barrier, count=129 if LAST == "deadlock" else 128)
    if LAST == "endless":
        gl.warp_specialize([(wait_for_it, (barrier,)), (go_on, (source, place, barrier))], [4], [24])
    else:
        gl.warp_specialize([(wait_for_it, (barrier,)), (copy_and_wait, (source, at, place, barrier))], [4], [24])
    gl.store(source + gl.arange(0, 128, layout=LINE), place.load(LINE) + 1)


def others():
    """Return the threads that an interpreter has started."""
    return [one for one in threading.enumerate() if "_live" in one.name]


@pytest.mark.parametrize(
    ("at", "last", "says"), [(0, "deadlock", "deadlock: "), (1000, "copy", "addresses 1000 to 1127")]
)
def test_an_error_leaves_no_thread(at, last, says):
    """Also one of a copy, which no warpgroup executes; and the next launch is right."""
    memory = torch.zeros(128)
    for seed in range(6):
        with pytest.raises(KernelError, match=says):
            Interpreted(launched, seed)[(8,)](memory, at, last)
        assert not others()
    Interpreted(launched)[(1,)](memory, 0, "right")
    assert torch.equal(memory, torch.ones(128))


def test_an_interrupt_leaves_no_thread():
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            Interpreted(launched)[(8,)](torch.zeros(128), 0, "endless")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert not others()


@torch.inference_mode()
def test_launches_of_several_threads():
    """One runs at a time, also in inference mode, which is a thread's own."""
    kernel, memory = Interpreted(launched), [torch.zeros(128) for _ in range(4)]

    def start(x):
        with torch.inference_mode():
            kernel[(1,)](x, 0, "right")

    threads = [threading.Thread(target=start, args=(x,)) for x in memory]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    assert all(torch.equal(x, torch.ones(128)) for x in memory) and kernel.seed == len(memory)


def test_the_kernels_for_hopper_are_themselves_again_after_an_error():
    before = hopper.is_there, prompts_hopper.is_there, prompts_hopper._attend_kernel
    with pytest.raises(ZeroDivisionError), hopper_on_a_cpu():
        assert prompts_hopper._attend_kernel is not before[2] and prompts_hopper.is_there("cpu")
        raise ZeroDivisionError
    assert before == (hopper.is_there, prompts_hopper.is_there, prompts_hopper._attend_kernel)
