"""Moving data through the paged cache is bit-exact, and touches nothing that it was not told to."""

import importlib
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
import fastattn.chunked_prefill
import fastattn.kv_cache
import fastattn.sparse
import fastattn.speculative
import refattn.chunked_prefill
import refattn.kv_cache
import refattn.speculative
from refattn.metadata import make_batch, slot_mapping
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import Accepted
from tests.helpers.batches import Case, build
from tests.helpers.kernels_present import PRESENT
from tests.helpers.stored import bits

each_twin = pytest.mark.parametrize("twin", [refattn.kv_cache, fastattn.kv_cache], ids=["ref", "fast"])
each_layout = pytest.mark.parametrize("layout", ["NHD", "HND"])
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def poisoned_pool(twin, layout, device, *, n=5, p=4, hk=2, d=8, dv=6, dtype=torch.float32):
    key_cache, value_cache = twin.allocate(n, p, hk, d, value_head_size=dv, layout=layout, dtype=dtype, device=device)
    key_cache.fill_(torch.nan)
    value_cache.fill_(torch.nan)
    return key_cache, value_cache


@pytest.mark.covers("B48")
@each_twin
def test_layouts_differ_in_memory_and_not_in_index(twin, device):
    tokens_first, _ = twin.allocate(3, 4, 2, 8, device=device)
    heads_first, _ = twin.allocate(3, 4, 2, 8, layout="HND", device=device)
    assert tokens_first.shape == heads_first.shape == (3, 4, 2, 8)
    assert tokens_first.stride() == (64, 16, 8, 1)
    assert heads_first.stride() == (64, 8, 32, 1)
    assert not tokens_first.any() and not heads_first.any()


@pytest.mark.covers("A4", "B53")
@each_twin
@each_layout
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_write_puts_each_token_in_its_slot(twin, layout, dtype, device):
    key_cache, value_cache = twin.allocate(5, 4, 2, 8, value_head_size=6, layout=layout, dtype=dtype, device=device)
    key = torch.randint(1, 100, (4, 2, 8), device=device).to(dtype)
    value = torch.randint(1, 100, (4, 2, 6), device=device).to(dtype)
    twin.write(key, value, key_cache, value_cache, torch.tensor([17, -1, 0, 6], device=device))
    for rows, cache in ((key, key_cache), (value, value_cache)):
        expected = torch.zeros(cache.shape, device=device).to(dtype)
        expected[4, 1], expected[0, 0], expected[1, 2] = rows[0], rows[2], rows[3]
        assert torch.equal(bits(cache), bits(expected))


@pytest.mark.covers("A4")
@each_twin
@each_layout
def test_padding_does_not_write_the_last_slot(twin, layout, device):
    """A slot of -1 taken as a Python index is the last slot of the pool."""
    key_cache, value_cache = poisoned_pool(twin, layout, device)
    key, value = torch.ones(3, 2, 8, device=device), torch.ones(3, 2, 6, device=device)
    twin.write(key, value, key_cache, value_cache, torch.tensor([-1, -1, -1], device=device))
    assert key_cache.isnan().all() and value_cache.isnan().all()


@each_twin
def test_write_reads_strided_tokens(twin, device):
    """Keys and values as they come out of one fused projection."""
    key_cache, value_cache = poisoned_pool(twin, "NHD", device, dv=8)
    fused = torch.randn(3, 6, 8, device=device)
    twin.write(fused[:, 2:4], fused[:, 4:], key_cache, value_cache, torch.tensor([0, 5, 9], device=device))
    assert torch.equal(key_cache[1, 1], fused[1, 2:4])
    assert torch.equal(value_cache[2, 1], fused[2, 4:])


@each_twin
@each_layout
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("seq_len", [0, 1, 16, 17, 48, 50])
def test_gather_reads_a_sequence_back(twin, layout, block_size, seq_len, device):
    inputs = build(Case("", ((0, 9), (0, seq_len)), block_size=block_size, layout=layout), device=device)
    got = twin.gather(inputs.key_cache, inputs.batch.block_table[1], seq_len)
    assert torch.equal(got, inputs.keys[1])


@pytest.mark.covers("A3")
@each_twin
@each_layout
def test_copied_blocks(twin, layout, device):
    """A chain: 0 to 1 and 1 to 2 reads block 1 before it is overwritten."""
    caches = [torch.randn_like(cache) for cache in poisoned_pool(twin, layout, device)]
    before = [cache.clone() for cache in caches]
    twin.copy_blocks(caches, torch.tensor([[0, 1], [1, 2]], device=device))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[0, 1, 2, 3, 4]], old[[0, 0, 1, 3, 4]])


@pytest.mark.covers("A1")
@each_twin
@pytest.mark.parametrize("blocks_first", [True, False], ids=["n-2-p-h-d", "2-n-p-h-d"])
def test_pools_of_keys_and_values_in_one_tensor(twin, blocks_first, device):
    pool = torch.randn(*((4, 2) if blocks_first else (2, 4)), 3, 2, 8, device=device)
    before = pool.clone()
    twin.copy_blocks([pool] if blocks_first else pool.unbind(0), torch.tensor([[3, 0]], device=device))
    copied, left = (pool[0], pool[1:]) if blocks_first else (pool[:, 0], pool[:, 1:])
    source, rest = (before[3], before[1:]) if blocks_first else (before[:, 3], before[:, 1:])
    assert torch.equal(copied, source) and torch.equal(left, rest)
    host = torch.zeros_like(before).cpu()
    there, here = ([x] if blocks_first else x.unbind(0) for x in (host, before))
    twin.swap_blocks(here, there, torch.tensor([[1, 2], [3, 0]]))
    moved, stays = (host[[2, 0]], host[[1, 3]]) if blocks_first else (host[:, [2, 0]], host[:, [1, 3]])
    assert torch.equal(moved, (before[[1, 3]] if blocks_first else before[:, [1, 3]]).cpu()) and not stays.any()


@pytest.mark.covers("A2")
@each_twin
@pytest.mark.parametrize(("here", "there"), [("HND", "NHD"), ("NHD", "HND")])
def test_a_block_moves_to_a_pool_with_another_layout_by_its_indices(twin, here, there, device):
    """As many heads as rows: copied as they lie in memory, heads would become rows without an error."""
    sources, destinations = (twin.allocate(3, 4, 4, 8, layout=layout, device=device) for layout in (here, there))
    for cache in sources:
        cache.copy_(torch.randn(cache.shape))
    twin.swap_blocks(sources, destinations, torch.tensor([[2, 0], [0, 1]]))
    for source, destination in zip(sources, destinations, strict=True):
        assert source.stride() != destination.stride() and torch.equal(destination[[0, 1]], source[[2, 0]])


@pytest.mark.covers("A2")
@each_twin
def test_swapped_out_and_in_again(twin, device):
    caches = [torch.randn_like(cache) for cache in poisoned_pool(twin, "NHD", device)]
    before = [cache.clone() for cache in caches]
    host = [torch.full((7, *cache.shape[1:]), torch.nan) for cache in caches]
    twin.swap_blocks(caches, host, torch.tensor([[4, 0], [2, 6]]))
    assert host[0][1:6].isnan().all()
    for cache in caches:
        cache[[2, 4]] = torch.nan
    twin.swap_blocks(host, caches, torch.tensor([[0, 1], [6, 2]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[0, 1, 2, 3]], old[[0, 4, 2, 3]]) and cache[4].isnan().all()


@given(data=st.data(), layout=st.sampled_from(["NHD", "HND"]), block_size=st.sampled_from([1, 3, 16]))
def test_twins_write_the_same_bits(data, layout, block_size, device):
    n = data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(0, n * block_size - 1), unique=True, max_size=20))
    padding = data.draw(st.lists(st.integers(0, len(slots)), max_size=3))
    for place in padding:
        slots.insert(place, -1)
    key, value = torch.randn(len(slots), 2, 8, device=device), torch.randn(len(slots), 2, 6, device=device)
    pools = []
    for twin in (refattn.kv_cache, fastattn.kv_cache):
        pools.append(poisoned_pool(twin, layout, device, n=n, p=block_size))
        twin.write(key, value, *pools[-1], torch.tensor(slots, dtype=torch.int64, device=device))
    for ours, theirs in zip(*pools, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_no_pool_has_blocks_without_rows(twin):
    tokens, pool = torch.zeros(2, 2, 8), torch.zeros(5, 0, 2, 8)
    with pytest.raises(ValueError, match="block_size: expected a positive int, got 0"):
        twin.write(tokens, tokens, pool, pool.clone(), torch.tensor([0, -1]))


@each_twin
@pytest.mark.parametrize(
    ("tokens", "slots", "num_blocks", "message"),
    [
        ([0], [0], 500, None),
        ([599], [0], 500, "slot_mapping: expected each slot once, got slot 0"),
        ([599], [3], 500, "slot_mapping: expected each slot once, got slot 3"),
        ([599], [-1], 500, None),
        ([0, 1, 598, 599], [-1] * 4, 500, None),
        ([597, 598, 599], [3, -1, 39_999], 10_000, "slot_mapping: expected each slot once, got slot 3"),
        ([597, 598, 599], [-1, -1, 39_999], 10_000, None),
        ([599], [2000], 500, "slot_mapping: expected slots in 0..1999, or -1 for padding, got 2000"),
        ([0], [-2], 500, "slot_mapping: expected slots in 0..1999, or -1 for padding, got -2"),
    ],
)
def test_slots_of_many_tokens_are_checked(twin, tokens, slots, num_blocks, message):
    """Some tokens of 600, each in the slot of its own number, go elsewhere; a pool may be much larger than a step."""
    all_slots = torch.arange(600)
    all_slots[tokens] = torch.tensor(slots)
    keys, pool = torch.ones(600, 1, 1), torch.zeros(num_blocks, 4, 1, 1)
    with nullcontext() if message is None else pytest.raises(ValueError, match=re.escape(message)):
        twin.write(keys, keys, pool, pool.clone(), all_slots)
    assert pool.any() == (message is None)


@pytest.mark.parametrize("twin", [refattn.kv_cache, fastattn.kv_cache], ids=["ref", "fast"])
@torch.no_grad()
def test_slots_that_have_passed_are_checked_again_once_they_are_written_to(twin):
    """Also where the twin replays a write."""
    key_cache, value_cache = twin.allocate(4, 4, 2, 8)
    tokens, slots = torch.randn(3, 2, 8), torch.tensor([0, 5, 7])
    twin.write(tokens, tokens, key_cache, value_cache, slots)
    small, _ = twin.allocate(1, 4, 2, 8)
    with pytest.raises(ValueError, match="slot_mapping: expected slots in 0..3"):
        twin.write(tokens, tokens, small, small.clone(), slots)
    slots[0] = 16
    before = key_cache.clone()
    with pytest.raises(ValueError, match="slot_mapping: expected slots in 0..15"):
        twin.write(tokens, tokens, key_cache, value_cache, slots)
    slots[0] = 7
    with pytest.raises(ValueError, match="slot_mapping: expected each slot once, got slot 7"):
        twin.write(tokens, tokens, key_cache, value_cache, slots)
    assert torch.equal(key_cache, before)


def every_write(package: str, kind: str, device: str):
    """Return a path's write of keys and values into an empty cache, the sizes of the tokens, and all that it fills."""
    path = importlib.import_module(f"{package}.{kind.partition('-')[0]}")
    if kind == "kv_cache":
        caches = path.allocate(3, 4, 2, 8, value_head_size=6, device=device)
        return partial(_call, path.write, caches, {}), ((2, 8), (2, 6)), caches
    if kind == "differential":
        cache = path.allocate(3, 4, 2, 8, device=device)
        return partial(_call, path.write, (cache,), {}), ((2, 8), (2, 8)), path.pools(cache)
    if kind.startswith("mla"):
        dtype = torch.float8_e4m3fn if kind == "mla-fp8" else torch.float32
        cache = path.allocate(3, 4, 8, 6, dtype=dtype, device=device)
        scale = dict(cache_scale=0.5) if kind == "mla-fp8" else {}
        return partial(_call, path.write, (cache,), scale), ((8,), (6,)), [cache]
    if kind == "quantized-fp8":
        allocate = importlib.import_module(f"{package}.kv_cache").allocate
        caches = allocate(3, 4, 2, 8, value_head_size=6, dtype=torch.float8_e4m3fn, device=device)
        return partial(_call, path.write, caches, dict(scales=Fp8Scales(0.5, 0.25))), ((2, 8), (2, 6)), caches
    *caches, key_scales = path.allocate_int8(3, 4, 2, 8, value_head_size=6, device=device)
    key_scales.zero_()
    scales = Int8Scales(key_scales, torch.full((2, 6), 0.25, device=device))
    return partial(_call, path.write, caches, dict(scales=scales)), ((2, 8), (2, 6)), [*caches, key_scales]


def _call(write, caches, options, key, value, slots):
    write(key, value, *caches, slots, **options)


WRITES = ("kv_cache", "differential", "mla", "mla-fp8", "quantized-fp8", "quantized-int8")


@pytest.mark.covers("B54")
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("package", ["refattn", "fastattn", *(one.name for one in PRESENT if one.name == "triton")])
def test_rows_after_the_last_slot_are_padding(package, kind, device):
    """A server pads keys and values to a size that was captured, and knows by the slots how many are real."""
    slots = torch.tensor([6, 1, -1, 9], device=device)
    forced = fastattn.use_kernel("triton") if package == "triton" else nullcontext()
    package = "fastattn" if package == "triton" else package
    with forced:
        padded, sizes, filled = every_write(package, kind, device)
        key, value = (torch.rand(7, *size, device=device) + 1 for size in sizes)
        key[4:], value[4:] = torch.nan, torch.nan
        padded(key, value, slots)
        exact, _, expected = every_write(package, kind, device)
        exact(key[:4], value[:4], slots)
    for pool, cut in zip(filled, expected, strict=True):
        assert torch.equal(bits(pool), bits(cut))
        written = pool.flatten(0, 1).float().flatten(1).any(-1).nonzero()[:, 0]
        assert written.tolist() == [1, 6, 9]


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_more_slots_than_rows_or_rows_that_differ_are_named(package, kind):
    write, sizes, filled = every_write(package, kind, "cpu")
    key, value = (torch.ones(3, *size) for size in sizes)
    with pytest.raises(ValueError, match=r"slot_mapping: expected int64 \[t=3\], got int64 \[4\]"):
        write(key, value, torch.arange(4))
    with pytest.raises(ValueError, match="(value|rope_key): expected .*t=3.*, got float32 .2"):
        write(key, value[:2], torch.arange(1))
    assert not any(pool.float().any() for pool in filled)


def pools_of_layers(order: str, device: str, *, dtype, n=6, layers=3, p=4, hk=2, d=16):
    """Return a pool whose blocks hold all layers, in the order of its name, and the views of each layer."""
    sizes = {"n": n, "layers": layers, "2": 2, "p": p, "hk": hk, "d": d}
    pool = torch.zeros(*(sizes[name] for name in order.split("-")), dtype=dtype, device=device)
    by_layer = rearrange(pool, f"{order.replace('-', ' ').replace('2', 'two')} -> layers two n p hk d")
    return pool, [tuple(layer) for layer in by_layer]


@pytest.mark.covers("B49")
@pytest.mark.parametrize("kernel", [None, *PRESENT], ids=lambda kernel: kernel.name if kernel else "ref")
@pytest.mark.parametrize("order", ["n-layers-2-p-hk-d", "n-hk-layers-2-p-d", "n-2-layers-hk-p-d"])
def test_layers_inside_of_a_block(kernel, order, device):
    """One pool for all layers, so that a block moves with one copy: each layer has a strided view of it."""
    dtype = kernel.dtypes[0] if kernel else torch.float32
    twin, path = (
        (fastattn.kv_cache, fastattn.chunked_prefill) if kernel else (refattn.kv_cache, refattn.chunked_prefill)
    )

    def check():
        pool, layers = pools_of_layers(order, device, dtype=dtype)
        pool.fill_(torch.nan)
        batch = make_batch([7], [7], [[4, 1]], device=device)
        slots = slot_mapping(batch, 7, block_size=4)
        query, *tokens = (torch.randn(7, h, 16, device=device).to(dtype) for h in (4, *[2] * 6))
        pairs = list(zip(tokens[::2], tokens[1::2], strict=True))
        for pair, views in zip(pairs, layers, strict=True):
            twin.write(*pair, *views, slots)
        answers = []
        for table in ([4, 1], [0, 5]):
            plan = path.plan(make_batch([7], [7], [table], device=device), block_size=4)
            answers.append([path.attention(query, *views, plan) for views in layers])
            twin.copy_blocks([pool], torch.tensor([[4, 0], [1, 5]]))  # all layers at once
        for i, pair in enumerate(pairs):
            alone = twin.allocate(6, 4, 2, 16, dtype=dtype, device=device)
            twin.write(*pair, *alone, slots)
            expected = path.attention(query, *alone, path.plan(batch, block_size=4))
            assert expected.isfinite().all()
            for answer in answers:
                torch.testing.assert_close(answer[i], expected)

    if kernel is None:
        check()
        return
    with kernel.forced():
        kernel.check(check)


FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
POOLS = {
    "NHD": lambda shape: torch.zeros(shape, dtype=torch.uint8),
    "HND": lambda shape: torch.zeros(shape, dtype=torch.uint8).transpose(1, 2).contiguous().transpose(1, 2),
    "in-a-larger-pool": lambda shape: torch.zeros(shape[0], 2, *shape[1:], dtype=torch.uint8)[:, 1],
    "with-gaps": lambda shape: torch.zeros(*shape[:-1], shape[-1] + 3, dtype=torch.uint8)[..., : shape[-1]],
    "elements-apart": lambda shape: torch.zeros(*shape[:-1], 2 * shape[-1], dtype=torch.uint8)[..., ::2],
    "elements-first": lambda shape: torch.zeros(shape[-1], *shape[:-1], dtype=torch.uint8).movedim(0, -1),
}


def quantized(layout: str, shape: tuple[int, ...], kind: torch.dtype, device: str) -> torch.Tensor:
    """Make a pool of fp8 in some layout, of any quantized values, those of NaN included."""
    strided = POOLS[layout](shape)
    pool = torch.empty_strided(strided.shape, strided.stride(), dtype=torch.uint8, device=device)
    return pool.copy_(torch.randint(256, shape)).view(kind)


def on_host(quantized: torch.Tensor) -> torch.Tensor:
    """Return a quantized pool as bytes on the host: the pool itself, if it is there."""
    return quantized.view(torch.uint8).cpu()


@each_twin
@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("layout", POOLS)
def test_fp8_values_move_as_any_other_elements_do(twin, layout, kind, device):
    """Written, gathered, copied, swapped out to the host and back, moved in a tree: bit by bit, NaN included."""
    shape = (6, 4, 2, 8)
    pools = [quantized(layout, shape, kind, device) for _ in range(2)]
    expected = [on_host(pool).clone() for pool in pools]

    tokens = [quantized("NHD", (3, 2, 8), kind, device) for _ in pools]
    twin.write(*tokens, *pools, torch.tensor([21, -1, 2], device=device))
    for rows, new in zip(expected, tokens, strict=True):
        rows[5, 1], rows[0, 2] = on_host(new)[0], on_host(new)[2]
    assert all(torch.equal(on_host(pool), rows) for pool, rows in zip(pools, expected, strict=True))

    for pool, rows in zip(pools, expected, strict=True):
        gathered = twin.gather(pool, torch.tensor([5, 0], dtype=torch.int32, device=device), 6)
        assert gathered.dtype == kind and torch.equal(on_host(gathered), torch.cat([rows[5], rows[0, :2]]))

    pairs = torch.tensor([[0, 1], [1, 2], [5, 0]])
    twin.copy_blocks(pools, pairs)
    for rows in expected:
        rows[pairs[:, 1]] = rows[pairs[:, 0]]
    assert all(torch.equal(on_host(pool), rows) for pool, rows in zip(pools, expected, strict=True))

    host = [torch.zeros(3, *shape[1:], dtype=torch.uint8, pin_memory=device == "cuda").view(kind) for _ in pools]
    twin.swap_blocks(pools, host, torch.tensor([[4, 2], [1, 0]]))
    assert all(torch.equal(on_host(out)[[2, 0]], rows[[4, 1]]) for out, rows in zip(host, expected, strict=True))
    twin.swap_blocks(host, pools, torch.tensor([[2, 3], [0, 5]]))
    for rows in expected:
        rows[[3, 5]] = rows[[4, 1]]
    assert all(torch.equal(on_host(pool), rows) for pool, rows in zip(pools, expected, strict=True))

    trees = importlib.import_module(f"{twin.__name__.partition('.')[0]}.speculative")
    batch = make_batch([3], [6], [[4, 2]], device=device)
    drafted = trees.make_trees([(-1, 0, 0)], device=device)
    accepted = Accepted(
        torch.tensor([[0, 2, -1]], dtype=torch.int32, device=device),
        torch.tensor([2], dtype=torch.int32, device=device),
        torch.tensor([7], device=device),
    )
    trees.compact(pools, batch, drafted, accepted, block_size=4)
    for rows in expected:
        rows[2, 0] = rows[2, 1]  # from position 5 to position 4
    assert all(torch.equal(on_host(pool), rows) for pool, rows in zip(pools, expected, strict=True))


@each_twin
@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(6, 4, 20), (6, 2, 4, 2, 8), (2, 2, 6, 4, 1, 8), (6,)], ids=str)
def test_pools_of_fp8_of_any_shape_are_copied_and_swapped(twin, shape, kind, device):
    """Of latents, with keys beside values, of pairs of heads; blocks side by side or not."""
    for buffer in (
        quantized("NHD", shape, kind, device),
        quantized("NHD", (2, *shape), kind, device).movedim(0, -1)[..., 1],
    ):
        pools = list(buffer.flatten(0, 1).unbind()) if len(shape) == 6 else [buffer]
        expected = [on_host(pool).clone() for pool in pools]
        twin.copy_blocks(pools, torch.tensor([[3, 5], [5, 0]]))
        host = [torch.zeros(pool[:2].shape, dtype=torch.uint8).view(kind) for pool in pools]
        twin.swap_blocks(pools, host, torch.tensor([[0, 1], [5, 0]]))
        twin.swap_blocks(host, pools, torch.tensor([[1, 2]]))
        for pool, out, rows in zip(pools, host, expected, strict=True):
            assert torch.equal(on_host(out), rows[[3, 5]])
            rows[[5, 0, 2]] = rows[[3, 5, 5]]
            assert torch.equal(on_host(pool), rows)


class PutByWayOfFloat32(TorchDispatchMode):
    """Puts rows somewhere as a GPU does with deterministic algorithms: a NaN of 16 bits comes out with other bits."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        *args, last = args
        puts = function in (torch.ops.aten.index_put_.default, torch.ops.aten.index_copy_.default)
        if puts and last.is_floating_point() and last.itemsize == 2:
            other = torch.full_like(last, 0x7FFF, dtype=torch.int16).view(last.dtype)
            last = torch.where(last.isnan(), other, last)
        return function(*args, last, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_plain_torch_moves_keeps_its_bits(dtype):
    """Written, copied, swapped and compacted, and as index keys; both layouts."""
    tokens = torch.arange(0x7F81, 0x7F81 + 2 * 2 * 8, dtype=torch.int16).view(dtype).view(2, 2, 8).clone()
    tokens[0, 0] = -0.0
    drafts = make_batch([3], [6], [[4, 2]]), fastattn.speculative.make_trees([(-1, 0, 0)])
    accepted = Accepted(*(torch.tensor(x, dtype=torch.int32) for x in ([[0, 2, -1]], [2])), torch.tensor([7]))
    ints = partial(torch.tensor, dtype=torch.int64)
    for layout in ("NHD", "HND"):
        pools = fastattn.kv_cache.allocate(6, 4, 2, 8, layout=layout, dtype=dtype)
        host = [torch.zeros_like(pool) for pool in pools]
        index = fastattn.sparse.allocate(2, 4, index_size=8, dtype=dtype)
        with PutByWayOfFloat32(), fastattn.use_kernel("torch"):
            fastattn.kv_cache.write(tokens, tokens, *pools, ints([11, 9]))
            fastattn.sparse.write(tokens[1], index, ints([3, 4]))
            fastattn.kv_cache.copy_blocks(pools, ints([[2, 1]]))
            fastattn.kv_cache.swap_blocks(pools, host, ints([[1, 0]]))
            fastattn.speculative.compact(pools, *drafts, accepted, block_size=4)
        for pool, out in zip(pools, host, strict=True):
            assert all(torch.equal(bits(x), bits(tokens[0])) for x in (pool[2, 3], pool[1, 3], out[0, 3]))
            assert torch.equal(bits(pool[2, 0]), bits(tokens[1]))
        assert torch.equal(bits(index[0, 3]), bits(tokens[1, 0])) and torch.equal(bits(index[1, 0]), bits(tokens[1, 1]))
