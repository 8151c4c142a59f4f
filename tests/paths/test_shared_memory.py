"""Memory that two arguments of a call share: computed right, or refused by name before anything is written."""

import re
from importlib import import_module

import pytest
import torch
from einops import rearrange

from refattn.overlap import check_apart
from refattn.scales import Int8Scales
from tests.helpers.legal_calls import legal_calls
from tests.table import each_package, function_of

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def assert_refused(package, call, message, memory, **changed):
    """Hold a call with some changed arguments to its error, and what it would have written to its bits."""
    before = memory.clone()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        function_of(package, call)(**legal_calls(package)[call]() | changed)
    assert torch.equal(memory, before)


# --- views of one buffer ---


@pytest.mark.parametrize("shapes", [((5, 4), (5, 4)), ((5, 4), (3, 2, 2)), ((2, 3), (20,))], ids=str)
def test_views_share_memory_if_an_element_of_one_is_in_the_other(shapes):
    """Against the elements themselves, at every distance, of views with gaps."""
    buffer = torch.arange(100)
    for gap in (1, 2, 3):
        for begin in range(40):
            views = [
                buffer.as_strided(shape, [x * gap for x in torch.empty(shape).stride()], at)
                for shape, at in zip(shapes, (20, begin), strict=True)
            ]
            views[0] = views[0].t() if views[0].ndim == 2 else views[0]
            shared = set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
            try:
                check_apart({"one": views[0]}, {"other": views[1]})
            except ValueError as error:
                assert (
                    shared and str(error) == "other: expected memory of its own, got some of one, which is written to"
                )
            else:
                assert not shared


# --- lists of pools ---


@each_package
@pytest.mark.parametrize(("call", "name"), [("kv_cache.copy_blocks", "caches"), ("state_cache.copy", "pools")])
def test_pools_of_one_copy_share_no_memory(package, call, name):
    """Twice in a list, as layers that share a pool, the second copy would read what the first has written."""
    buffer, pairs = torch.arange(24.0).clone(), torch.tensor([[0, 1], [1, 2]])
    pool = buffer[:20].view(5, 4)
    for others in ([pool], [pool.view(5, 2, 2)], [buffer[2:22].view(5, 4)], [torch.zeros(5, 1), pool[:, 3:]]):
        last = len(others)
        message = f"{name}[{last}]: expected memory of its own, got some of {name}[0]; list each pool once"
        assert_refused(package, call, message, buffer, **{name: [pool, *others], "pairs": pairs})


@each_package
@pytest.mark.parametrize("order", ["n layers two p hk d", "n hk layers two p d"])
def test_layers_of_one_pool_lie_between_each_other_and_share_none(package, order):
    """All views in one copy move blocks as the pool that they are views of does."""
    path = import_module(f"{package}.kv_cache")
    pool = torch.arange(4 * 3 * 2 * 2 * 2 * 3.0).view(4, *((3, 2, 2, 2, 3) if "n layers" in order else (2, 3, 2, 2, 3)))
    layers = rearrange(pool, f"{order} -> layers two n p hk d")
    expected, pairs = pool[[0, 0, 1, 2]], torch.tensor([[0, 1], [1, 2], [2, 3]])
    path.copy_blocks([cache for layer in layers for cache in layer], pairs)
    assert torch.equal(pool, expected)


@each_package
def test_a_swap_goes_to_no_pool_that_another_comes_from(package):
    """Within one pool it is a copy; two that change places would read what was written."""
    swap, buffer = function_of(package, "kv_cache.swap_blocks"), torch.arange(40.0).clone()
    one, other = buffer.view(2, 5, 4)
    pairs = torch.tensor([[0, 1], [1, 2]])
    swap([one, other], [one, other], pairs)
    assert one[:, 0].tolist() == [0, 0, 4, 12, 16] and other[:, 0].tolist() == [20, 20, 24, 32, 36]
    for sources, destinations, message in (
        (
            [one, other],
            [other, one],
            "destinations[0]: expected memory that sources[1] has no part of, as it is copied",
        ),
        ([one, one], [other, other], "destinations[1]: expected memory of its own, got some of destinations[0]"),
    ):
        changed = dict(sources=sources, destinations=destinations, pairs=pairs)
        assert_refused(package, "kv_cache.swap_blocks", message, buffer, **changed)
    swap([one, one], [other, torch.zeros(5, 4)], pairs)  # to read a pool twice is no harm


@each_package
def test_pools_of_accepted_nodes_share_no_memory(package):
    pool = torch.randn(10, 4, 8)
    message = "caches[1]: expected memory of its own, got some of caches[0]"
    assert_refused(package, "speculative.compact", message, pool, caches=[pool, pool[..., 2:]])


# --- tokens in the pool that they are written to ---


def shifted(pool, shape):
    """Return a view of a pool that begins after its first element."""
    return pool.flatten()[1 : 1 + torch.Size(shape).numel()].view(shape)


@each_package
@pytest.mark.parametrize(
    ("call", "pool", "name"),
    [
        ("kv_cache.write", "key_cache", "key"),
        ("kv_cache.write", "key_cache", "value"),
        ("kv_cache.write", "value_cache", "key"),
        ("kv_cache.write", "value_cache", "value"),
        ("kv_cache.write", "key_cache", "value_cache"),
        ("differential.write", "cache", "key"),
        ("differential.write", "cache", "value"),
        ("mla.write", "cache", "latent"),
        ("mla.write", "cache", "rope_key"),
        ("sparse.write", "index_cache", "key"),
        ("recurrent.attention", "states", "query"),
        ("recurrent.attention", "states", "key"),
        ("recurrent.attention", "states", "value"),
        ("recurrent.attention", "states", "log_decay"),
        ("recurrent.attention", "states", "beta"),
        ("recurrent.attention", "states", "out"),
        ("recurrent.convolve", "states", "inputs"),
        ("recurrent.convolve", "states", "weight"),
        ("recurrent.convolve", "states", "bias"),
        ("recurrent.convolve", "states", "out"),
    ],
)
def test_what_is_read_or_returned_lies_in_no_pool_that_is_written_to(package, call, pool, name):
    """Else what a kernel reads depends on what it has written before."""
    arguments = legal_calls(package)[call]()
    memory = torch.rand(2000)
    changed = {pool: memory[: arguments[pool].numel()].view(arguments[pool].shape)}
    changed[name] = shifted(memory, arguments[name].shape)
    message = f"{name}: expected memory of its own, got some of {pool}, which is written to"
    assert_refused(package, call, message, memory, **changed)


@each_package
@pytest.mark.parametrize("name", ["key", "value", "scales.key", "scales.value"])
def test_no_tensor_of_a_quantizing_write_lies_in_a_pool(package, name):
    arguments = legal_calls(package)["quantized.write"]()
    memory = torch.rand(100).view(torch.int8)
    arguments["key_cache"] = torch.zeros(5, 4, 2, 8, dtype=torch.int8)
    arguments["value_cache"] = memory[:320].view(5, 4, 2, 8)
    inside = memory.view(torch.float32)
    scales = vars(arguments["scales"])
    if name.startswith("scales"):
        part = name.removeprefix("scales.")
        arguments["scales"] = Int8Scales(**scales | {part: inside[: scales[part].numel()].view(scales[part].shape)})
    else:
        arguments[name] = inside[:48].view(3, 2, 8)
    message = f"{name}: expected memory of its own, got some of value_cache"
    assert_refused(package, "quantized.write", message, memory, **arguments)


def test_a_write_that_is_replayed_is_refused_likewise():
    """The second call with the same types, shapes and strides is checked no more, but for where its tensors lie."""
    write = function_of("fastattn", "kv_cache.write")
    buffers, pools = torch.rand(2, 1000), torch.zeros(2, 5, 4, 2, 8)
    slots = torch.tensor([7, -1, 0])
    tokens = [buffer[320:368].view(3, 2, 8) for buffer in buffers]
    with torch.no_grad():
        for _ in range(2):
            write(*tokens, *pools, slots)
        overlapped = buffers[0][:320].view(5, 4, 2, 8), buffers[0][352:672].view(5, 4, 2, 8)
        before = buffers.clone()
        for key_cache, value_cache, name in (
            (*overlapped, "key"),
            (*reversed(overlapped), "key"),
            (pools[0], buffers[1][336:656].view(5, 4, 2, 8), "value"),
            (pools[0], pools[0], "value_cache"),
        ):
            with pytest.raises(ValueError, match=f"^{name}: expected memory of its own, got some of"):
                write(*tokens, key_cache, value_cache, slots)
        assert torch.equal(buffers, before)


@each_package
def test_a_step_in_place_has_memory_for_each_tensor(package):
    memory = torch.zeros(2, dtype=torch.int64)
    message = "input_positions: expected memory of its own, got some of slots"
    assert_refused(package, "metadata.advance", message, memory, slots=memory, input_positions=memory)
