"""Checks of functions that move data or make tables: bit for bit, and nothing else may be written."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from refattn.four_bits import Int4Scales, Nvfp4Scales
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import Accepted
from twinattn.kit.four_bits import E2M1, GROUP, in_bytes, with_zero_points
from twinattn.kit.search import made
from twinattn.kit.search.exact import MovedWronglyError, expect, run_and_compare
from twinattn.kit.search.inputs import FP8, LAMBDA, SPARE, Modules, block_table, make_batch, slots_of, tables
from twinattn.kit.search.tensors import laid, moved
from twinattn.kit.workload import FOUR_BITS, Workload

__all__ = ["LAMBDA", "MovedWronglyError", "check"]


def check(work: Workload, modules: Modules, device: str) -> None:
    """Make a call that moves data or makes a table, and compare all memory.

    Raises:
        MovedWronglyError: saying what is off.
    """
    functions: dict[str, Callable[[Workload, Modules, str], None]] = dict(
        write=_write,
        write_differential=_write_differential,
        write_latents=_write_latents,
        write_quantized=_write_four_bits if work.stored in FOUR_BITS else _write_quantized,
        copy_blocks=_copy,
        swap_blocks=_copy,
        compact=_compact,
        gather=_gather,
        positions=made.positions,
        slot_mapping=made.slot_mapping,
        advance=made.advance,
        block_table_from_slots=made.from_slots,
        ranks=made.ranks,
        trees=made.trees,
        accept=made.accept,
        write_index=_write_index,
        select=made.select,
        slots=made.slots_of_selected,
        copy=_copy_states,
        accepted_slots=made.accepted_slots,
    )
    functions[work.operation](work, modules, device)


def _dtype(work: Workload) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, work.dtype)
    return dtype


def _generator(work: Workload) -> torch.Generator:
    return torch.Generator().manual_seed(work.seed)


def _pool_kind(work: Workload) -> str:
    return "NHD" if work.pool == "expanded" else work.pool  # the heads of an expanded pool are aliases


def _rows_kind(work: Workload) -> str:
    return work.rows


def _new_slots(work: Workload) -> tuple[Tensor, int]:
    """Return the slots of each sequence's last tokens, as in a step, with -1 for padding, and the size of the pool."""
    owned, num_blocks = tables(work)
    slots = []
    for blocks, (q, s) in zip(owned, work.lens, strict=True):
        own = slots_of(work, blocks, s)[max(0, s - q) :]
        slots += [torch.full((max(0, q - s),), -1), own]
    slots.append(torch.full((work.padding_rows,), -1))
    mapping = torch.cat(slots).long()
    if work.table == "every-other":
        wide = torch.full((2 * len(mapping),), 1 << 40)
        wide[::2] = mapping
        mapping = wide[::2]
    return mapping, num_blocks


def _write(work: Workload, modules: Modules, device: str) -> None:
    slots, num_blocks = _new_slots(work)
    g, p, hk, dtype = _generator(work), work.block_size, work.heads[1], _dtype(work)
    tensors: dict[str, Any] = dict(slots=slots)
    for name, size in (("key", work.head_size), ("value", work.value_size)):
        tensors[name] = laid(torch.randn(len(slots), hk, size, generator=g).to(dtype), _rows_kind(work))
        pool = torch.randn(num_blocks, p, hk, size, generator=g).to(dtype)
        tensors[f"{name}_cache"] = laid(pool, _pool_kind(work))

    def change(tensors: dict[str, Any]) -> None:
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                for name in ("key", "value"):
                    tensors[f"{name}_cache"][slot // p, slot % p] = tensors[name][token]

    names = ("key", "value", "key_cache", "value_cache", "slots")
    run_and_compare(lambda there: modules("kv_cache").write(*(there[name] for name in names)), tensors, change, device)


def _write_differential(work: Workload, modules: Modules, device: str) -> None:
    slots, num_blocks = _new_slots(work)
    g, p, pairs, d, dtype = _generator(work), work.block_size, work.heads[1], work.head_size, _dtype(work)
    cache = torch.randn(2, 2, num_blocks, p, pairs, d, generator=g).to(dtype)
    if work.pool == "HND":
        cache = cache.transpose(3, 4).contiguous().transpose(3, 4)
    elif work.pool in ("every-other", "offset"):
        cache = laid(cache, work.pool)
    tensors: dict[str, Any] = dict(slots=slots, cache=cache)
    for name in ("key", "value"):
        tensors[name] = laid(torch.randn(len(slots), 2 * pairs, d, generator=g).to(dtype), _rows_kind(work))

    def change(tensors: dict[str, Any]) -> None:
        for token, slot in enumerate(slots.tolist()):
            for half in (0, 1) if slot >= 0 else ():
                for kind, name in enumerate(("key", "value")):
                    tensors["cache"][half, kind, slot // p, slot % p] = tensors[name][token, half::2]

    names = ("key", "value", "cache", "slots")
    run_and_compare(
        lambda there: modules("differential").write(*(there[name] for name in names)), tensors, change, device
    )


def _to_fp8(x: Tensor, scale: Tensor | float, kind: torch.dtype) -> Tensor:
    largest = torch.finfo(kind).max
    return (x.float() / torch.as_tensor(scale, dtype=torch.float32)).clamp(-largest, largest).to(kind)


def _write_latents(work: Workload, modules: Modules, device: str) -> None:
    slots, num_blocks = _new_slots(work)
    g, p, rank, rope = _generator(work), work.block_size, work.head_size, 8 * (1 + work.seed % 3)
    kind = FP8.get(work.stored, _dtype(work))
    scale = work.cache_scale if work.stored in FP8 else 1.0
    pool = torch.randn(num_blocks, p, rank + rope + SPARE, generator=g).to(kind)
    tensors: dict[str, Any] = dict(
        slots=slots, cache=laid(pool, work.pool) if work.pool in ("every-other", "offset") else pool
    )
    for name, size in (("latent", rank), ("rope_key", rope)):
        rows = torch.randn(len(slots), 1, size, generator=g).to(_dtype(work))
        tensors[name] = laid(rows, _rows_kind(work))[:, 0]

    def change(tensors: dict[str, Any]) -> None:
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                row = torch.cat([tensors["latent"][token], tensors["rope_key"][token]])
                row = _to_fp8(row, scale, kind) if work.stored in FP8 else row
                target = tensors["cache"][slot // p, slot % p, : rank + rope]
                target.view(torch.uint8 if kind.itemsize == 1 else kind).copy_(
                    row.view(torch.uint8 if kind.itemsize == 1 else kind)
                )

    names = ("latent", "rope_key", "cache", "slots")
    run_and_compare(
        lambda there: modules("mla").write(*(there[name] for name in names), cache_scale=scale), tensors, change, device
    )


def _write_quantized(work: Workload, modules: Modules, device: str) -> None:
    slots, num_blocks = _new_slots(work)
    g, p, hk, dtype = _generator(work), work.block_size, work.heads[1], _dtype(work)
    kind = FP8.get(work.stored, torch.int8)
    kinds = (kind, dtype if work.stored == "int8-keys" else kind)
    tensors: dict[str, Any] = dict(slots=slots)
    for (name, size), stored in zip((("key", work.head_size), ("value", work.value_size)), kinds, strict=True):
        rows = 3 * torch.randn(len(slots), hk, size, generator=g)
        if work.nan_at == "" and work.seed % 5 == 0 and len(slots):
            rows[work.seed % len(slots)] = (0.0, 1e5, -3e38)[work.seed % 3]
        tensors[name] = laid(rows.to(dtype), _rows_kind(work))
        pool = torch.randint(0, 100, (num_blocks, p, hk, size), generator=g)
        pool = pool.to(stored) if stored not in FP8.values() else pool.to(torch.uint8).view(stored)
        tensors[f"{name}_cache"] = laid(pool, _pool_kind(work))
    scales: Fp8Scales | Int8Scales
    if work.stored in FP8:

        def scale() -> float | Tensor:
            numbers = 0.2 + torch.rand((1,) if work.scales == "number" else (hk,), generator=g)
            return float(numbers) if work.scales == "number" else numbers

        scales = Fp8Scales(scale(), scale(), format=kind)
    else:
        of_value = None if work.stored == "int8-keys" else 0.01 + 0.05 * torch.rand(hk, work.value_size, generator=g)
        scales = Int8Scales(torch.full((num_blocks, p, hk), 7.0), of_value)
    tensors["scales"] = scales

    def to_int8(x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)

    def change(tensors: dict[str, Any]) -> None:
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            at = slot // p, slot % p
            for name, of_scale in (("key", scales.key), ("value", scales.value)):
                row, cache = tensors[name][token], tensors[f"{name}_cache"]
                if isinstance(scales, Fp8Scales) and of_scale is not None:
                    per_head = of_scale[:, None] if isinstance(of_scale, Tensor) else of_scale
                    cache.view(torch.uint8)[at] = _to_fp8(row, per_head, kind).view(torch.uint8)
                elif name == "key":
                    of_row = row.float().abs().amax(-1, keepdim=True) / torch.tensor([127.0])
                    of_row[of_row == 0] = 1.0
                    cache[at] = to_int8(row, of_row)
                    tensors["scales"].key[at] = of_row[:, 0]
                elif of_scale is None:
                    cache[at] = row
                else:
                    cache[at] = to_int8(row, torch.as_tensor(of_scale))

    names = ("key", "value", "key_cache", "value_cache", "slots")
    run_and_compare(
        lambda there: modules("quantized").write(*(there[name] for name in names), scales=there["scales"]),
        tensors,
        change,
        device,
    )


def _write_four_bits(work: Workload, modules: Modules, device: str) -> None:
    """Write rows of four bits; every byte and every scale is that of the definition, computed in float32."""
    slots, num_blocks = _new_slots(work)
    g, p, hk, is_int4 = _generator(work), work.block_size, work.heads[1], work.stored == "int4"
    tensors, scales = dict[str, Any](slots=slots), []
    for name, size in (("key", work.head_size), ("value", work.value_size)):
        rows = 3 * torch.randn(len(slots), hk, size, generator=g)
        if work.seed % 5 == 0 and len(slots):  # an infinite scale of int4 is any NaN
            rows[work.seed % len(slots)] = (0.0, 6e4, -1e-5 if is_int4 else -3e38)[work.seed % 3]
        tensors[name] = laid(rows.to(_dtype(work)), _rows_kind(work))
        pool = torch.randint(0, 256, (num_blocks, p, hk, size // 2), generator=g).to(torch.uint8)
        tensors[f"{name}_cache"] = laid(pool, _pool_kind(work))
        scale = torch.rand(num_blocks, p, hk, 1 if is_int4 else size // GROUP, generator=g) + 0.5
        scales.append(laid(scale if is_int4 else scale.to(FP8["e4m3"]), _pool_kind(work)))
    numbers = (0.02 + torch.rand(2, generator=g)).tolist()
    of_keys, of_values = scales
    tensors["scales"] = (
        Int4Scales(of_keys[..., 0], of_values[..., 0]) if is_int4 else Nvfp4Scales(of_keys, of_values, *numbers)
    )

    def change(tensors: dict[str, Any]) -> None:
        held = tensors["scales"]
        for name, scale, number in (("key", held.key, numbers[0]), ("value", held.value, numbers[1])):
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    row, at = tensors[name][token].float(), (slot // p, slot % p)
                    elements, its_scale = _to_int4(row) if is_int4 else _to_nvfp4(row, number)
                    tensors[f"{name}_cache"][at] = in_bytes(elements)
                    scale.view(its_scale.dtype)[at] = its_scale

    names = ("key", "value", "key_cache", "value_cache", "slots")
    run_and_compare(
        lambda there: modules("quantized").write(*(there[name] for name in names), scales=there["scales"]),
        tensors,
        change,
        device,
    )


def _to_int4(row: Tensor) -> tuple[Tensor, Tensor]:
    """Turn float32 rows `[hk, d]` by sums and differences of pairs, and quantize them; return elements and scales."""
    step, block = 1, row.shape[-1] & -row.shape[-1]
    while step < block:
        one, other = row.unflatten(-1, (-1, 2, step)).unbind(-2)
        row, step = torch.stack([one + other, one - other], -2).flatten(-3), 2 * step
    row = row * block**-0.5
    low, high = row.amin(-1).clamp(max=0), row.amax(-1).clamp(min=0)
    scale = ((high - low) / torch.tensor([15.0])).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round().clamp(0, 15)
    scale = with_zero_points(scale, zero)
    elements = ((row / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
    return elements.to(torch.int32), scale


def _to_nvfp4(row: Tensor, number: float) -> tuple[Tensor, Tensor]:
    """Quantize float32 rows `[hk, d]`; return elements, by their distance from each number, and the bytes of scales."""
    of_all = torch.tensor(number, dtype=torch.float32)
    groups, levels = row.unflatten(-1, (-1, GROUP)), torch.tensor(E2M1)
    scale = (groups.abs().amax(-1) / (6.0 * of_all)).clamp(max=448).to(FP8["e4m3"])
    quotient = groups / (scale.float() * of_all)[..., None]
    sizes = quotient.abs().nan_to_num(0.0).clamp(max=6.0).double()
    distances = (sizes[..., None] - levels.double()).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)  # two at a tie: the even one
    elements = torch.where(is_nearest, 10 - torch.arange(8) % 2, 0).argmax(-1)
    return (elements + 8 * quotient.nan_to_num(0.0).signbit()).flatten(-2).int(), scale.view(torch.uint8)


def _copy(work: Workload, modules: Modules, device: str) -> None:
    """Copy blocks within pools, or between pools, of any type, also quantized."""
    _, num_blocks = tables(work)
    g, shuffle, p, hk = _generator(work), Random(work.seed), work.block_size, work.heads[1]
    kinds: dict[str, torch.dtype] = {**FP8, "int8": torch.int8, "int8-keys": torch.int8}
    kind = (kinds | dict.fromkeys(FOUR_BITS, torch.uint8)).get(work.stored, _dtype(work))

    def pool(blocks: int) -> Tensor:
        numbers = torch.randint(0, 100, (blocks, p, hk, work.head_size), generator=g)
        quantized = numbers.to(torch.uint8).view(kind) if kind.itemsize == 1 else numbers.to(kind)
        return laid(quantized, _pool_kind(work))

    swapped = work.operation == "swap_blocks"
    sources = [pool(num_blocks) for _ in range(1 + work.seed % 3)]
    targets = [pool(num_blocks + 2) for _ in sources] if swapped else sources
    count = shuffle.randint(0, min(num_blocks, 5))
    to = shuffle.sample(range(num_blocks), count)
    pairs = torch.tensor([[shuffle.randrange(num_blocks), block] for block in to], dtype=torch.int64).view(-1, 2)
    tensors: dict[str, Any] = dict(sources=sources, pairs=pairs)
    if swapped:
        tensors["targets"] = targets

    def call(there: dict[str, Any]) -> None:
        path = modules("kv_cache")
        if swapped:
            path.swap_blocks(there["sources"], there["targets"], there["pairs"])
        else:
            path.copy_blocks(there["sources"], there["pairs"])

    def change(tensors: dict[str, Any]) -> None:
        for source, target in zip(tensors["sources"], tensors.get("targets", tensors["sources"]), strict=True):
            as_bytes = torch.uint8 if kind.itemsize == 1 else kind
            before = source.view(as_bytes).clone()
            for block, destination in pairs.tolist():
                target.view(as_bytes)[destination] = before[block]

    on_host = ((), ("sources", "pairs"), ("targets", "pairs"))[work.seed % 3] if swapped else ()
    run_and_compare(call, tensors, change, device, on_host)


def _copy_states(work: Workload, modules: Modules, device: str) -> None:
    """Copy states of all layers to other slots: some to several slots, and some that are overwritten themselves."""
    g, shuffle, count = _generator(work), Random(work.seed), 4 + len(work.lens)
    state = getattr(torch, work.state_dtype)
    shapes = [(work.heads[0], min(work.value_size, 16), min(work.head_size, 16)), (work.seed % 4, work.head_size)]
    pools = [laid(torch.randn(count, *shape, generator=g).to(state), _pool_kind(work)) for shape in shapes]
    to = shuffle.sample(range(count), shuffle.randint(0, count))
    pairs = torch.tensor([[shuffle.randrange(count), slot] for slot in to], dtype=torch.int64).view(-1, 2)

    def change(tensors: dict[str, Any]) -> None:
        for pool in tensors["pools"]:
            before = pool.clone()
            for slot, destination in pairs.tolist():
                pool[destination] = before[slot]

    on_host = () if work.seed % 2 else ("pairs",)
    tensors: dict[str, Any] = dict(pools=pools, pairs=pairs)
    run_and_compare(
        lambda there: modules("state_cache").copy(there["pools"], there["pairs"]), tensors, change, device, on_host
    )


def _write_index(work: Workload, modules: Modules, device: str) -> None:
    slots, num_blocks = _new_slots(work)
    g, p, size = _generator(work), work.block_size, min(256, -(-work.head_size // 4) * 4)
    rows = torch.randn(len(slots), 1, size, generator=g) * 10.0 ** (work.seed % 7 - 3)
    key = laid(rows.to(_dtype(work)), _rows_kind(work))[:, 0]
    quantized = work.stored != "numbers"
    if quantized:
        pool = torch.randint(0, 256, (num_blocks, p, size + 4), generator=g).to(torch.uint8)
    else:
        pool = torch.randn(num_blocks, p, size, generator=g).to(_dtype(work))
    tensors: dict[str, Any] = dict(key=key, pool=pool, slots=slots)

    def change(tensors: dict[str, Any]) -> None:
        for token, slot in enumerate(slots.tolist()):
            block, row, numbers = slot // p, slot % p, tensors["key"][token]
            if slot >= 0 and quantized:
                largest = numbers.float().abs().max().clamp(min=1e-4)
                scale = largest / torch.tensor(448.0)
                page = tensors["pool"][block].view(-1)
                page[row * size : (row + 1) * size] = _to_fp8(numbers, scale, FP8["e4m3"]).view(torch.uint8)
                page[p * size + 4 * row : p * size + 4 * row + 4] = scale.view(1).view(torch.uint8)
            elif slot >= 0:
                tensors["pool"][block, row] = numbers

    names = ("key", "pool", "slots")
    run_and_compare(lambda there: modules("sparse").write(*(there[name] for name in names)), tensors, change, device)


def _accepted(work: Workload) -> Accepted:
    """Return a random accepted branch of each tree."""
    chosen, nodes, lens = Random(work.seed), [], []
    width = max(work.nodes(i) for i in range(len(work.lens)))
    for i in range(len(work.lens)):
        parents, path = work.parents(i), []
        node = chosen.randrange(len(parents)) if parents else -1
        while node >= 0:
            path.append(node)
            node = parents[node]
        nodes.append(path[::-1] + [-1] * (width - len(path)))
        lens.append(len(path))
    shape = (len(nodes), width)
    return Accepted(
        torch.tensor(nodes, dtype=torch.int32).view(shape),
        torch.tensor(lens, dtype=torch.int32),
        torch.zeros(len(lens), dtype=torch.int64),
    )


def _compact(work: Workload, modules: Modules, device: str) -> None:
    work = replace(work, trees=work.trees or "deep")
    owned, num_blocks = tables(work)
    g, p, hk = _generator(work), work.block_size, work.heads[1]
    pools = [
        laid(torch.randn(num_blocks, p, hk, work.head_size, generator=g).to(_dtype(work)), _pool_kind(work))
        for _ in range(2)
    ]
    accepted = _accepted(work)
    batch = make_batch(work, block_table(work, owned))
    parents = [work.parents(i) for i in range(len(work.lens))]

    def call(there: dict[str, Any]) -> None:
        trees = modules("speculative").make_trees(parents, device=device)
        own = Accepted(*(x.to(device) for x in accepted))
        modules("speculative").compact(there["pools"], moved(batch, device), trees, own, block_size=p)

    def change(tensors: dict[str, Any]) -> None:
        for i, (blocks, (_, s)) in enumerate(zip(owned, work.lens, strict=True)):
            slots, first = slots_of(work, blocks, s), s - work.nodes(i)
            taken = accepted.nodes[i, : int(accepted.lens[i])].tolist()
            for pool in tensors["pools"]:
                rows = [pool[slots[first + node] // p, slots[first + node] % p].clone() for node in taken]
                for k, row in enumerate(rows):
                    pool[slots[first + k] // p, slots[first + k] % p] = row

    run_and_compare(call, dict(pools=pools), change, device)


def _gather(work: Workload, modules: Modules, device: str) -> None:
    owned, num_blocks = tables(work)
    pool = torch.randn(num_blocks, work.block_size, work.heads[1], work.head_size, generator=_generator(work))
    cache, table = laid(pool.to(_dtype(work)), work.pool), block_table(work, owned)
    there, blocks = moved(cache, device), moved(table, device)
    for i, (_, s) in enumerate(work.lens):
        slots = slots_of(work, owned[i], s)
        came = modules("kv_cache").gather(there, blocks[i], s)
        expect(f"sequence {i}", came, cache[slots // work.block_size, slots % work.block_size])
