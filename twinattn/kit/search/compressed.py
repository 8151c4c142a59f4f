"""Compressed keys beside a window: two pools under one softmax, and entries from rows, with an oracle for each."""

from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from refattn.options import AttentionOptions
from twinattn.kit.oracle import Answer, Sight, attend, sight
from twinattn.kit.search.inputs import (
    FP8,
    Call,
    Modules,
    block_table,
    drawn_hidden,
    drawn_options,
    drawn_pool,
    drawn_query,
    make_batch,
    slots_of,
    tables,
)
from twinattn.kit.search.tensors import laid
from twinattn.kit.workload import Workload


def call(work: Workload, generator: torch.Generator) -> Call:
    """Make the tensors of a call that attends to a window and to entries, or that computes entries."""
    return _entries(work, generator) if work.operation == "compress" else _attention(work, generator)


def entry_lens(work: Workload) -> list[tuple[int, int]]:
    """Return how many entries of each sequence are complete before the step and after it."""
    return [(max(s - q, 0) // work.ratio, s // work.ratio) for q, s in work.lens]


def plan_arguments(work: Workload) -> tuple[dict[str, Any], list[list[int]], int]:
    """Draw the blocks of entries: return the arguments of a plan except the batch, these blocks, and their number."""
    owned, num_blocks = tables(work, [after for _, after in entry_lens(work)], salt=1)
    arguments = dict(ratio=work.ratio, overlap=work.overlap, window_size=work.window, block_size=work.block_size)
    return (
        arguments | dict(entry_table=block_table(work, owned, 1), entry_block_size=work.block_size),
        owned,
        num_blocks,
    )


def selected(work: Workload) -> list[list[int]]:
    """Return the entries of each query row: some of its sequence, complete for it or not, in any order."""
    chosen, rows = Random(f"{work.seed}/selected"), []
    for (q, _), (_, after) in zip(work.lens, entry_lens(work), strict=True):
        for _ in range(q):
            row = chosen.sample(range(after), chosen.randint(0, min(after, work.topk)))
            rows.append(row + [-1] * (work.topk - len(row)))
            if work.seed % 2:
                chosen.shuffle(rows[-1])
    return rows


def _attention(work: Workload, generator: torch.Generator) -> Call:
    owned, num_blocks = tables(work)
    arguments, entries_owned, num_entry_blocks = plan_arguments(work)
    options, size = drawn_options(work, generator), work.head_size
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    of_entries = [slots_of(work, own, n) for own, (_, n) in zip(entries_owned, entry_lens(work), strict=True)]
    lists, seen = selected(work), list[Tensor]()
    row = 0
    for (q, s), (_, after) in zip(work.lens, entry_lens(work), strict=True):
        complete = (torch.arange(s - q, s)[:, None] + 1).div(work.ratio, rounding_mode="floor")
        visible = torch.arange(after) < complete
        if work.operation == "selected":
            visible = torch.zeros(q, after, dtype=torch.bool)
            for i in range(q):
                visible[i, [entry for entry in lists[row + i] if entry >= 0]] = True
        seen.append(visible)
        row += q
    hidden_entries = torch.ones(num_entry_blocks * work.block_size, dtype=torch.bool)
    for own, visible in zip(of_entries, seen, strict=True):
        hidden_entries[own[visible.any(0)]] = False
    hidden = drawn_hidden(work, num_blocks * work.block_size, slots)
    tensors: dict[str, Any] = dict(query=drawn_query(work, generator, size), options=options)
    for kind, (name, count, mask) in enumerate(
        (("cache", num_blocks, hidden), ("entry_cache", num_entry_blocks, hidden_entries))
    ):
        tensors[name] = _pool(work, generator, count, mask, kind)
    garbage = torch.full((work.padding_rows, work.topk), 1_000_000, dtype=torch.int32)
    positions = torch.cat([torch.tensor(lists, dtype=torch.int32).view(-1, work.topk), garbage])
    tensors |= dict(batch=make_batch(work, block_table(work, owned)), arguments=arguments, positions=positions)
    query = tensors["query"]
    scales = {} if work.stored == "numbers" else dict(cache_scale=work.cache_scale, entry_scale=2.0)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        given = AttentionOptions(**tensors["options"])
        return modules("compressed").attention(
            tensors["query"], tensors["cache"], tensors["entry_cache"], plan, given, **scales, **more
        )

    def made(modules: Modules, tensors: dict[str, Any]) -> Any:
        path = modules("compressed")
        plan = path.plan(tensors["batch"], **tensors["arguments"])
        return path.select_entries(plan, tensors["positions"]) if work.operation == "selected" else plan

    def expected() -> Answer:
        t, h = query.shape[:2]
        out, lse = torch.zeros(t, h, size, dtype=torch.float64), torch.full((t, h), -torch.inf, dtype=torch.float64)
        free, first = torch.zeros(t, dtype=torch.bool), 0
        scale = options.get("softmax_scale")
        for i, (q, _) in enumerate(work.lens):
            rows, p = slice(first, first + q), work.block_size
            pools = (("cache", slots[i]), ("entry_cache", of_entries[i]))
            read = [tensors[name][own // p, own % p].double() for name, own in pools]
            factors = scales.get("cache_scale", 1.0), scales.get("entry_scale", 1.0)
            keys = torch.cat([x * factor for x, factor in zip(read, factors, strict=True)])[:, None]
            visible = torch.cat([sight(work, i).visible, seen[i]], 1)
            answer = attend(
                query[rows],
                keys,
                keys,
                Sight(visible, torch.zeros_like(visible, dtype=torch.int64)),
                scale=size**-0.5 if scale is None else scale,
                softcap=options.get("softcap", 0.0),
                sinks=options.get("sinks"),
            )
            out[rows], lse[rows], free[rows] = answer
            first += q
        return Answer(out, lse, free)

    numbers = ("query", *(("cache", "entry_cache") if work.stored == "numbers" else ()))
    return Call(tensors, numbers, made, run, expected, tuple(query.shape))


def _pool(work: Workload, generator: torch.Generator, num_blocks: int, hidden: Tensor, kind: int) -> Tensor:
    """Draw a pool `[n, p, d]`, unquantized or of fp8."""
    if work.stored == "numbers":
        return laid(drawn_pool(work, generator, num_blocks, 1, work.head_size, hidden, kind), work.pool)[:, :, 0]
    numbers = drawn_pool(replace(work, dtype="float32"), generator, num_blocks, 1, work.head_size, hidden, kind)
    if work.stored == "e4m3":  # casts of infinity differ between devices
        numbers = torch.where(numbers.isfinite(), numbers.clamp(-448, 448), torch.nan)
    return laid(numbers.to(FP8[work.stored]), work.pool)[:, :, 0]


def _entries(work: Workload, generator: torch.Generator) -> Call:
    owned, num_blocks = tables(work)
    arguments, entries_owned, _ = plan_arguments(work)
    size, ratio = work.head_size, work.ratio
    width = 2 * size if work.overlap else size
    hidden = torch.ones(num_blocks * work.block_size, dtype=torch.bool)
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    for own, (before, after) in zip(slots, entry_lens(work), strict=True):
        if after > before:
            hidden[own[max(before - work.overlap, 0) * ratio : after * ratio]] = False
    rows = laid(drawn_pool(work, generator, num_blocks, 1, 2 * width, hidden, 0), work.pool)[:, :, 0]
    bias = None if work.seed % 4 == 0 else torch.randn(ratio, width, generator=generator)
    tensors: dict[str, Any] = dict(row_cache=rows, bias=bias, arguments=arguments)
    tensors["batch"] = make_batch(work, block_table(work, owned))
    num_rows = min(work.num_tokens, (work.num_tokens + len(work.lens) * (ratio - 1)) // ratio)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        entries = modules("compressed").compress(tensors["row_cache"], plan, bias=tensors["bias"])
        if not work.says_num_tokens and not entries[num_rows:].any():  # on a GPU the plan has rows for as many as fit
            entries = entries[:num_rows]
        no_lse = entries.new_zeros(len(entries), 1, dtype=torch.promote_types(entries.dtype, torch.float32))
        return (entries, no_lse) if more.get("return_lse") else entries

    def expected() -> Answer:
        out, row = torch.zeros(num_rows, size, dtype=torch.float64), 0
        added = torch.zeros(ratio, width, dtype=torch.float64) if bias is None else bias.double()
        for own, (before, after) in zip(slots, entry_lens(work), strict=True):
            for entry in range(before, after):
                parts = []
                for w in range(max(entry - work.overlap, 0), entry + 1):
                    tokens = own[w * ratio : (w + 1) * ratio]
                    read = rows[tokens // work.block_size, tokens % work.block_size].double()
                    columns = slice(0, size) if w < entry else slice(width - size, width)
                    parts.append((read[:, :width][:, columns], (read[:, width:] + added)[:, columns]))
                value, gate = (torch.cat(x) for x in zip(*parts, strict=True))
                weight = (gate - gate.amax(0)).exp()
                out[row] = (weight * value).sum(0) / weight.sum(0)
                row += 1
        return Answer(out, torch.zeros(num_rows, 1, dtype=torch.float64), torch.zeros(num_rows, dtype=torch.bool))

    return Call(
        tensors,
        ("row_cache",),
        lambda modules, tensors: modules("compressed").plan(tensors["batch"], **tensors["arguments"]),
        run,
        expected,
        takes_out=False,
    )
