"""The call of each path of attention: its tensors, its plan, and the output of the oracle."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from refattn.four_bits import FourBitScales, Int4Scales, Nvfp4Scales
from refattn.options import AttentionOptions
from refattn.ranks import Shard, simulate_ranks
from refattn.scales import Fp8Scales, Int8Scales
from twinattn.kit.cases import poisoned
from twinattn.kit.four_bits import GROUP, int4_numbers, nvfp4_numbers, with_zero_points
from twinattn.kit.oracle import Answer
from twinattn.kit.search.inputs import (
    FP8,
    LAMBDA,
    LAMBDA_INIT,
    NORM_EPS,
    SPARE,
    Call,
    Modules,
    _poison,
    answer_of,
    block_table,
    drawn_hidden,
    drawn_options,
    drawn_pool,
    drawn_query,
    make_batch,
    planning,
    slots_of,
    tables,
)
from twinattn.kit.search.tensors import laid, unwritten
from twinattn.kit.workload import FOUR_BITS, Workload


def _rows(work: Workload, generator: torch.Generator) -> Call:
    """Keys in rows, one sequence after the other."""
    edges = torch.tensor([0, *(s for _, s in work.lens)]).cumsum(0).tolist()
    slots = [torch.arange(first, last) for first, last in zip(edges, edges[1:], strict=False)]
    num_rows = edges[-1] + work.padding_rows
    hidden, one = drawn_hidden(work, num_rows, slots), replace(work, block_size=1)
    kind = {"NHD": "plain", "HND": "heads-last"}.get(work.pool, work.pool)
    hk, batch, options = work.heads[1], make_batch(work, None), drawn_options(work, generator)
    key, value = (
        laid(drawn_pool(one, generator, num_rows, hk, size, hidden, i)[:, 0], kind)
        for i, size in enumerate((work.head_size, work.value_size))
    )
    query = drawn_query(work, generator, work.head_size)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        rows = (tensors[name] for name in ("query", "key", "value"))
        return modules("varlen").attention(*rows, plan, AttentionOptions(**tensors["options"]), **more)

    return Call(
        dict(query=query, key=key, value=value, batch=batch, options=options),
        ("query", "key", "value"),
        lambda modules, tensors: planning(work, modules, tensors["batch"])(),
        run,
        lambda: answer_of(work, query, options, lambda i: (key[slots[i]], value[slots[i]]), work.value_size),
        (*query.shape[:2], work.value_size),
    )


def _pages(work: Workload, generator: torch.Generator) -> Call:
    """Keys and values in pages, unquantized or quantized."""
    owned, num_blocks = tables(work)
    p, hk, options = work.block_size, work.heads[1], drawn_options(work, generator)
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    hidden = drawn_hidden(work, num_blocks * p, slots)
    tensors: dict[str, Any] = dict(query=drawn_query(work, generator, work.head_size), options=options)
    tensors["batch"] = make_batch(work, block_table(work, owned))
    sizes = work.head_size, work.value_size
    query = tensors["query"]
    more: tuple[str, ...] = ("key_cache", "value_cache")
    if work.stored == "numbers":
        for kind, (name, size) in enumerate(zip(more, sizes, strict=True)):
            tensors[name] = laid(drawn_pool(work, generator, num_blocks, hk, size, hidden, kind), work.pool)
    else:
        tensors |= _quantized(work, generator, num_blocks, hidden)
        more = ("value_cache",) if work.stored == "int8-keys" else ()  # quantized pools cannot be cast

    def read(i: int) -> tuple[Tensor, Tensor]:
        if work.stored != "numbers":
            return _dequantized(work, tensors, slots[i], i)
        key, value = (tensors[name][slots[i] // p, slots[i] % p] for name in ("key_cache", "value_cache"))
        return key, value

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        rows = (tensors[name] for name in ("query", "key_cache", "value_cache"))
        if "scales" in tensors:
            more["scales"] = tensors["scales"]
        return modules(work.path).attention(*rows, plan, AttentionOptions(**tensors["options"]), **more)

    def expected() -> Answer:
        rounded = query if work.stored == "numbers" else _rounded_queries(work, query, tensors["scales"])
        return answer_of(work, rounded, options, read, work.value_size)

    return Call(
        tensors,
        ("query", *more),
        lambda modules, tensors: planning(work, modules, tensors["batch"])(),
        run,
        expected,
        (*query.shape[:2], work.value_size),
    )


def _quantized(work: Workload, generator: torch.Generator, num_blocks: int, hidden: Tensor) -> dict[str, Any]:
    """Draw quantized pools and their scales; hidden slots hold NaN or large numbers, or have such scales."""
    if work.stored in FOUR_BITS:
        return _four_bits(work, generator, num_blocks, hidden)
    p, hk, b = work.block_size, work.heads[1], len(work.lens)
    rows, sizes = num_blocks * p, (work.head_size, work.value_size)
    harm = work.poison in ("mixed", "nan")

    def pool(quantized: Tensor, kind: torch.dtype) -> Tensor:
        return laid(quantized.view(kind).view(num_blocks, p, hk, quantized.shape[-1]), work.pool)

    if work.stored in FP8:
        kind = FP8[work.stored]
        bytes_of = []
        for size in sizes:
            quantized = (2 * torch.randn(rows, hk, size, generator=generator)).to(kind).view(torch.uint8)
            quantized[hidden] = 0x7F if harm else 0x50
            bytes_of.append(quantized)
        stored = torch.uint8 if work.seed % 4 == 3 else kind

        def scale() -> float | Tensor:
            shape = {"number": (1,), "heads": (hk,), "sequences": (b, hk)}[work.scales]
            numbers = 0.2 + torch.rand(shape, generator=generator)
            return float(numbers) if work.scales == "number" else numbers

        scales: Fp8Scales | Int8Scales = Fp8Scales(scale(), scale(), scale() if work.query_scale else None, kind)
        key, value = (pool(quantized, stored) for quantized in bytes_of)
        return dict(key_cache=key, value_cache=value, scales=scales)
    key, value = (torch.randint(-127, 128, (rows, hk, size), generator=generator).to(torch.int8) for size in sizes)
    of_key = 0.005 + 0.02 * torch.rand(rows, hk, generator=generator)
    of_key[hidden] = torch.nan if harm else 1e4
    of_value = None
    if work.stored == "int8":
        of_value = 0.005 + 0.02 * torch.rand(hk, work.value_size, generator=generator)
        values = pool(value, torch.int8)
    else:
        values = laid(drawn_pool(work, generator, num_blocks, hk, work.value_size, hidden, 1), work.pool)
    by_token = laid(of_key.view(num_blocks, p, hk), "heads-last" if work.pool == "HND" else "plain")
    if work.pool == "HND":
        by_token = of_key.view(num_blocks, p, hk).transpose(1, 2).contiguous().transpose(1, 2)
    return dict(key_cache=pool(key, torch.int8), value_cache=values, scales=Int8Scales(by_token, of_value))


def _four_bits(work: Workload, generator: torch.Generator, num_blocks: int, hidden: Tensor) -> dict[str, Any]:
    """Draw pools of two elements per byte, and scales that differ by up to 8 times; hidden ones are NaN or 256."""
    p, hk, tensors, scales = work.block_size, work.heads[1], dict[str, Any](), []
    hidden_scale = torch.nan if work.poison in ("mixed", "nan") else 256.0
    for name, size in (("key_cache", work.head_size), ("value_cache", work.value_size)):
        pairs = torch.randint(0, 256, (num_blocks * p, hk, size // 2), generator=generator).to(torch.uint8)
        groups = 1 if work.stored == "int4" else size // GROUP
        scale = 2.0 ** (3 * torch.rand(num_blocks * p, hk, groups, generator=generator) - 4)
        zeros = torch.randint(0, 16, scale.shape, generator=generator)
        scale = with_zero_points(scale, zeros) if work.stored == "int4" else scale
        scale[hidden] = hidden_scale
        scale = scale if work.stored == "int4" else scale.to(torch.float8_e4m3fn)
        tensors[name], scale = (laid(x.view(num_blocks, p, *x.shape[1:]), work.pool) for x in (pairs, scale))
        scales.append(scale)
    if work.stored == "int4":
        return tensors | dict(scales=Int4Scales(*(scale[..., 0] for scale in scales)))
    of_keys, of_values = (0.2 + torch.rand(2, generator=generator)).tolist()
    return tensors | dict(scales=Nvfp4Scales(scales[0], scales[1], of_keys, of_values))


def _of_sequence(scale: Any, i: int) -> Tensor:
    """Return the scale of a sequence, one number or one per KV head."""
    numbers = torch.as_tensor(scale, dtype=torch.float32).double()
    numbers = numbers[i] if numbers.ndim == 2 else numbers
    return numbers[:, None] if numbers.ndim else numbers


def _dequantized(work: Workload, tensors: dict[str, Any], slots: Tensor, i: int) -> tuple[Tensor, Tensor]:
    scales, at = tensors["scales"], (slots // work.block_size, slots % work.block_size)
    pools = tensors["key_cache"], tensors["value_cache"]
    if isinstance(scales, Fp8Scales):
        key, value = (pool.view(torch.uint8)[at].view(scales.format).double() for pool in pools)
        return key * _of_sequence(scales.key, i), value * _of_sequence(scales.value, i)
    if isinstance(scales, Int4Scales):
        return int4_numbers(pools[0][at], scales.key[at]), int4_numbers(pools[1][at], scales.value[at])
    if isinstance(scales, Nvfp4Scales):
        key = nvfp4_numbers(pools[0][at], scales.key[at], scales.of_keys)
        return key, nvfp4_numbers(pools[1][at], scales.value[at], scales.of_values)
    key, value = (pool[at].double() for pool in pools)
    key = key * scales.key[at].double()[..., None]
    return key, value if scales.value is None else value * scales.value.double()


def _rounded_queries(work: Workload, query: Tensor, scales: Fp8Scales | Int8Scales | FourBitScales) -> Tensor:
    """Round queries in float32 as the path does: to int8 by their largest element, to fp8 under a scale, or not."""
    if isinstance(scales, Int8Scales):
        scale = query.float().abs().amax(-1, keepdim=True) / torch.tensor([127.0])
        scale[scale == 0] = 1.0
        return (query.float() / scale).round().clamp(-127, 127).double() * scale.double()
    if not isinstance(scales, Fp8Scales) or scales.query is None:
        return query.double()
    rounded, row, group = query.double(), 0, query.shape[1] // work.heads[1]
    for i, (q, _) in enumerate(work.lens):
        scale = _of_sequence(scales.query, i).float()
        scale = scale.repeat_interleave(group, 0) if scale.ndim else scale
        largest = torch.finfo(scales.format).max
        quantized = (query[row : row + q].float() / scale).clamp(-largest, largest).to(scales.format)
        rounded[row : row + q] = quantized.double() * scale.double()
        row += q
    return rounded


def _pairs(work: Workload, generator: torch.Generator) -> Call:
    """Differential attention: pairs of heads, and a pool with a half for each member of the pairs."""
    owned, num_blocks = tables(work)
    p, d, (h, hk), options = work.block_size, work.head_size, work.heads, drawn_options(work, generator)
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    hidden = drawn_hidden(work, num_blocks * p, slots)
    pools = [drawn_pool(work, generator, num_blocks, hk // 2, d, hidden, kind % 2) for kind in range(4)]
    cache = torch.stack(pools).view(2, 2, num_blocks, p, hk // 2, d)
    if work.pool in ("HND", "expanded"):
        cache = cache.transpose(3, 4).contiguous().transpose(3, 4)
    elif work.pool not in ("NHD", "padded"):
        cache = laid(cache, work.pool)
    query, batch = drawn_query(work, generator, d), make_batch(work, block_table(work, owned))
    weight = None if work.seed % 3 == 0 else torch.linspace(0.5, 1.5, 2 * d).to(query.dtype)
    tensors: dict[str, Any] = dict(query=query, cache=cache, batch=batch, options=options, weight=weight)
    tensors["lam"] = torch.tensor(LAMBDA)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        return modules("differential").attention(
            tensors["query"],
            tensors["cache"],
            plan,
            AttentionOptions(**tensors["options"]),
            lambda_full=tensors["lam"],
            lambda_init=LAMBDA_INIT,
            norm_weight=tensors["weight"],
            norm_eps=NORM_EPS,
            **more,
        )

    def expected() -> Answer:
        answers = []
        for half in (0, 1):
            of_half = {name: x[half::2].contiguous() if isinstance(x, Tensor) else x for name, x in options.items()}

            def read(i: int, half: int = half) -> tuple[Tensor, Tensor]:
                at = slots[i] // p, slots[i] % p
                return cache[half, 0][at], torch.cat([cache[0, 1][at], cache[1, 1][at]], -1)

            answers.append(answer_of(work, query[:, half::2], of_half, read, 2 * d))
        one, other = answers
        difference = one.out - float(tensors["lam"]) * other.out
        normed = difference / (difference.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
        normed = (1 - LAMBDA_INIT) * normed * (1.0 if weight is None else weight.double())
        out = normed.view(len(query), h // 2, 2, d).flatten(1, 2)
        return Answer(out, torch.stack([one.lse, other.lse], -1).flatten(1, 2), one.free | other.free)

    return Call(
        tensors,
        ("query", "cache", "weight"),
        lambda modules, tensors: modules("differential").plan(
            tensors["batch"], block_size=p, causal=work.causal, window_size=work.window
        ),
        run,
        expected,
        tuple(query.shape),
    )


def drawn_latents(
    work: Workload, generator: torch.Generator, num_blocks: int, hidden: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Draw a pool of latents with unused columns, and return it and a function that reads slots for the oracle."""
    d, p = work.head_size, work.block_size
    numbers = drawn_pool(replace(work, dtype="float32"), generator, num_blocks, 1, d + SPARE, hidden, 0)[:, :, 0]
    numbers[..., d:] = torch.nan if work.poison in ("nan", "mixed") else 7.0
    cache = numbers.to(getattr(torch, work.dtype) if work.stored == "numbers" else FP8[work.stored])
    if work.stored == "e4m3":  # casts of infinity differ between devices
        cache = torch.where(numbers.isfinite(), numbers.clamp(-448, 448), torch.nan).to(FP8["e4m3"])
    if work.pool == "padded":
        wide = unwritten((num_blocks, p + 1, d + SPARE + 5), cache.dtype)
        wide[:, :p, : d + SPARE].copy_(cache)
        cache = wide[:, :p, : d + SPARE]
    elif work.pool in ("every-other", "offset"):
        cache = laid(cache, work.pool)
    scale = 1.0 if work.stored == "numbers" else work.cache_scale
    return cache, lambda slots: cache[slots // p, slots % p][:, :d].double() * scale


def _latents(work: Workload, generator: torch.Generator) -> Call:
    """Absorbed queries over latents."""
    owned, num_blocks = tables(work)
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    hidden, rank = drawn_hidden(work, num_blocks * work.block_size, slots), work.value_size
    cache, read = drawn_latents(work, generator, num_blocks, hidden)
    query, options = drawn_query(work, generator, work.head_size), drawn_options(work, generator)
    tensors = dict(query=query, cache=cache, batch=make_batch(work, block_table(work, owned)), options=options)
    scale = 1.0 if work.stored == "numbers" else work.cache_scale

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        return modules("mla").attention(
            tensors["query"],
            tensors["cache"],
            plan,
            AttentionOptions(**tensors["options"]),
            latent_rank=rank,
            cache_scale=scale,
            **more,
        )

    def read_both(i: int) -> tuple[Tensor, Tensor]:
        key = read(slots[i])[:, None]
        return key, key[..., :rank]

    return Call(
        tensors,
        ("query", "cache") if work.stored == "numbers" else ("query",),
        lambda modules, tensors: planning(work, modules, tensors["batch"])(),
        run,
        lambda: answer_of(work, query, options, read_both, rank),
        (*query.shape[:2], rank),
    )


def _prefill(work: Workload, generator: torch.Generator) -> Call:
    """New tokens over keys that are expanded from latents: their own, and those of the context."""
    owned, num_blocks = tables(work)
    rank, d = work.value_size, work.head_size
    rope, (nope, dv) = work.rope_size, work.made_sizes
    h, dtype, options = work.heads[0], getattr(torch, work.dtype), drawn_options(work, generator)
    contexts = [slots_of(work, blocks, s)[: s - q] for blocks, (q, s) in zip(owned, work.lens, strict=True)]
    hidden = torch.ones(num_blocks * work.block_size, dtype=torch.bool)
    for (q, _), own in zip(work.lens, contexts, strict=True):
        if q:
            hidden[own] = False
    cache, read = drawn_latents(work, generator, num_blocks, hidden)
    query = drawn_query(replace(work, head_size=nope + rope), generator, nope + rope)
    new = torch.randn(len(query), d, generator=generator)
    new[len(query) - work.padding_rows :] = poisoned(work.padding_rows, 1, d, _poison(work))[:, 0]
    new = new.to(dtype)
    to_key, to_value = (
        (1.4 * rank**-0.5 * torch.randn(h, size, rank, generator=generator)).to(dtype) for size in (nope, dv)
    )
    tensors: dict[str, Any] = dict(query=query, cache=cache, options=options, to_key=to_key, to_value=to_value)
    tensors |= dict(latent=new[:, :rank], rope_key=new[:, rank:], batch=make_batch(work, block_table(work, owned)))
    scale = 1.0 if work.stored == "numbers" else work.cache_scale

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        return modules("mla").prefill(
            *(tensors[name] for name in ("query", "latent", "rope_key", "cache")),
            plan,
            AttentionOptions(**tensors["options"]),
            key_projection=tensors["to_key"],
            value_projection=tensors["to_value"],
            cache_scale=scale,
            **more,
        )

    def as_read(rows: Tensor) -> Tensor:
        """Round new latents as later steps read them, so that outputs do not depend on the chunks of a prompt."""
        if work.stored == "numbers":
            return rows.double()
        kind, of_code = cache.dtype, torch.tensor(scale, dtype=torch.float32)
        largest = torch.finfo(kind).max
        return (rows.float() / of_code).clamp(-largest, largest).to(kind).double() * scale

    def make(i: int) -> tuple[Tensor, Tensor]:
        row = sum(q for q, _ in work.lens[:i])
        q, s = work.lens[i]
        latents = torch.cat([read(contexts[i]), as_read(new[row : row + q])])
        key = torch.einsum("sr,hnr->shn", latents[:, :rank], to_key.double())
        shared = latents[:, rank:][:, None].expand(s, h, rope)
        return torch.cat([key, shared], -1), torch.einsum("sr,hvr->shv", latents[:, :rank], to_value.double())

    return Call(
        tensors,
        ("query", "latent", "rope_key", "to_key", "to_value", *(("cache",) if work.stored == "numbers" else ())),
        lambda modules, tensors: modules("mla").plan_prefill(
            tensors["batch"], block_size=work.block_size, workspace=work.workspace * len(work.lens)
        ),
        run,
        lambda: answer_of(work, query, options, make, dv),
        (*query.shape[:2], dv),
    )


def _ranks(work: Workload, generator: torch.Generator) -> Call:
    """Context parallelism: each rank has its own pool with a share of every context, and the path runs on all ranks."""
    (h, hk), dtype, p, options = work.heads, getattr(torch, work.dtype), work.block_size, drawn_options(work, generator)
    sizes, t = (work.head_size, work.value_size), sum(q for q, _ in work.lens)
    query = drawn_query(work, generator, work.head_size)
    whole = [[torch.randn(s, hk, size, generator=generator).to(dtype) for size in sizes] for _, s in work.lens]
    new = []
    for kind, size in enumerate(sizes):
        rows = [pair[kind][s - q :] for pair, (q, s) in zip(whole, work.lens, strict=True)]
        padding = poisoned(len(query) - t, hk, size, _poison(work)).to(dtype)
        new.append(
            laid(
                torch.cat([*rows, padding]),
                work.rows if work.rows != "expanded" and work.rows != "expanded-size" else "plain",
            )
        )
    ranks: list[dict[str, Any]] = []
    for rank in range(work.ranks):
        shares = [[j for j in range(s - q) if j // work.interleave % work.ranks == rank] for q, s in work.lens]
        owned, num_blocks = tables(work, [len(share) + p for share in shares], salt=rank)
        pools = []
        for kind, size in enumerate(sizes):
            pool = poisoned(num_blocks * p, hk, size, _poison(work), first=kind).to(dtype)
            for i, share in enumerate(shares):
                pool[slots_of(work, owned[i], len(share))] = whole[i][kind][share]
            pools.append(laid(pool.view(num_blocks, p, hk, size), "NHD" if work.pool == "expanded" else work.pool))
        table = block_table(work, owned, salt=rank)
        batch = replace(make_batch(work, table), max_seq_len=max(s for _, s in work.lens) + work.more_keys)
        ranks.append(dict(key_cache=pools[0], value_cache=pools[1], batch=batch))
    tensors: dict[str, Any] = dict(query=query, key=new[0], value=new[1], options=options)
    tensors |= {f"{name}{rank}": x for rank, own in enumerate(ranks) for name, x in own.items()}
    pools_of = tuple(f"{name}{rank}" for rank in range(work.ranks) for name in ("key_cache", "value_cache"))

    def shard(rank: int) -> Shard:
        return Shard(rank, work.ranks, work.interleave)

    def plan(modules: Modules, tensors: dict[str, Any]) -> list[Any]:
        path = modules("context_parallel")
        return [
            path.plan(tensors[f"batch{rank}"], shard=shard(rank), block_size=p, window_size=work.window)
            for rank in range(work.ranks)
        ]

    def run(modules: Modules, plans: list[Any], tensors: dict[str, Any], **more: Any) -> Any:
        def on_rank(group: Any) -> Any:
            heads = slice(group.rank * h // group.size, (group.rank + 1) * h // group.size)
            own: dict[str, Any] = {
                name: x[heads] if isinstance(x, Tensor) else x for name, x in tensors["options"].items()
            }
            mine = {**more, "out": more["out"][:, heads]} if "out" in more else more
            return modules("context_parallel").attention(
                tensors["query"][:, heads],
                tensors["key"],
                tensors["value"],
                tensors[f"key_cache{group.rank}"],
                tensors[f"value_cache{group.rank}"],
                plans[group.rank],
                AttentionOptions(**own),
                group=group,
                **mine,
            )

        answers = simulate_ranks(work.ranks, on_rank)
        if "out" in more:
            return more["out"]
        if not more.get("return_lse"):
            return torch.cat(answers, 1)
        outs, lses = zip(*answers, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    return Call(
        tensors,
        ("query", "key", "value", *pools_of),
        plan,
        run,
        lambda: answer_of(work, query, options, lambda i: (whole[i][0], whole[i][1]), work.value_size),
        (*query.shape[:2], work.value_size),
    )


def _partials(work: Workload, generator: torch.Generator) -> Call:
    """Partial outputs to merge; the output of an empty part is garbage."""
    t, h, dv = sum(q for q, _ in work.lens) + work.padding_rows, work.heads[0], work.value_size
    outs, lses = [], []
    for part in range(work.parts):
        out, lse = (
            torch.randn(t, h, dv, generator=generator),
            torch.randn(t, h, generator=generator) * (2, 2, 60)[work.seed % 3] + 3 * (part % 2),
        )
        empty = torch.rand(t, h, generator=generator) < (0.9 if work.seed % 5 == 0 else 0.4)
        lse[empty] = -torch.inf
        out[empty] = poisoned(int(empty.sum()), 1, dv, _poison(work))[:, 0]
        outs.append(laid(out.to(getattr(torch, work.dtype)), work.rows))
        lses.append(lse)
    options = drawn_options(work, generator)
    tensors: dict[str, Any] = dict(outs=outs, lses=lses, options=options)

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        out, lse = modules("merge").merge(tensors["outs"], tensors["lses"])
        if "sinks" in tensors["options"]:
            out, lse = modules("merge").add_sinks(out, lse, tensors["options"]["sinks"])
        return (out, lse) if more.get("return_lse") else out

    def expected() -> Answer:
        weights = torch.stack(lses).double()  # [parts, t, h]
        sinks = options["sinks"].double().expand(1, t, h) if "sinks" in options else weights[:0]
        every = torch.cat([weights, sinks])
        top = every.amax(0)
        top = torch.where(top == -torch.inf, 0.0, top)
        total = torch.exp(every - top).sum(0)
        out = torch.zeros(t, h, dv, dtype=torch.float64)
        for part_out, weight in zip(outs, torch.exp(weights - top), strict=True):
            out += torch.where(weight[..., None] > 0, part_out.double() * weight[..., None], 0.0)
        out = torch.where(total[..., None] > 0, out / total[..., None], 0.0)
        return Answer(out, top + total.log(), torch.zeros(t, dtype=torch.bool))

    return Call(tensors, ("outs",), lambda modules, tensors: None, run, expected, (t, h, dv))


def attention_call(work: Workload, generator: torch.Generator) -> Call:
    """Make the call of a workload of attention, or of `merge`."""
    makers = dict(
        varlen=_rows, differential=_pairs, mla=_latents, mla_prefill=_prefill, context_parallel=_ranks, merge=_partials
    )
    return makers.get(work.path, _pages)(work, generator)
