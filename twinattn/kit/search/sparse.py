"""Selected keys: attention over lists of keys, the scores for their selection, and an oracle for each."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from refattn.options import AttentionOptions
from twinattn.kit.oracle import Answer, Sight, attend, sight
from twinattn.kit.search.inputs import (
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
from twinattn.kit.search.paths import drawn_latents
from twinattn.kit.search.tensors import laid
from twinattn.kit.workload import Workload

LARGEST_E4M3 = 0x7E  # the bits of the largest number of e4m3; the next one is NaN


def call(work: Workload, generator: torch.Generator) -> Call:
    """Make the tensors of a call that attends to selected keys, or that scores keys."""
    return _scores(work, generator) if work.operation == "scores" else _attention(work, generator)


def selected(work: Workload) -> list[list[int]]:
    """Return the list of positions of each query row: any of its sequence, some twice, some -1."""
    chosen, rows = Random(f"{work.seed}/selected"), []
    for q, s in work.lens:
        for _ in range(q):
            count = chosen.choice((0, min(s, work.topk), chosen.randint(0, min(s, work.topk))))
            row = chosen.sample(range(s), count)
            if row and work.seed % 3 == 0:
                row[-1] = row[0]
            row += [-1] * (work.topk - count)
            if work.seed % 2:
                chosen.shuffle(row)
            rows.append(row)
    return rows


def _attention(work: Workload, generator: torch.Generator) -> Call:
    owned, num_blocks = tables(work)
    p, hk, options, positions = work.block_size, work.heads[1], drawn_options(work, generator), selected(work)
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    owners = [i for i, (q, _) in enumerate(work.lens) for _ in range(q)]
    lists = [slots[i][[j for j in row if j >= 0]] for i, row in zip(owners, positions, strict=True)]
    hidden = torch.ones(num_blocks * p, dtype=torch.bool)
    for own in lists:
        hidden[own] = False
    table = torch.tensor(positions, dtype=torch.int32).view(-1, work.topk)
    garbage = torch.full((work.padding_rows, work.topk), 1_000_000, dtype=torch.int32)
    tensors: dict[str, Any] = dict(query=drawn_query(work, generator, work.head_size), options=options)
    tensors |= dict(batch=make_batch(work, block_table(work, owned)), positions=torch.cat([table, garbage]))
    query = tensors["query"]
    latents = work.operation == "latent_attention"
    if latents:
        tensors["cache"], read_latents = drawn_latents(work, generator, num_blocks, hidden)
        pools: tuple[str, ...] = ("cache",)
    else:
        pools = ("key_cache", "value_cache")
        for kind, (name, size) in enumerate(zip(pools, (work.head_size, work.value_size), strict=True)):
            tensors[name] = laid(drawn_pool(work, generator, num_blocks, hk, size, hidden, kind), work.pool)

    def read(own: Tensor) -> tuple[Tensor, Tensor]:
        if latents:
            key = read_latents(own)[:, None]
            return key, key[..., : work.value_size]
        key, value = (tensors[name][own // p, own % p] for name in pools)
        return key, value

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        path, given = modules("sparse"), AttentionOptions(**tensors["options"])
        if latents:
            more |= dict(latent_rank=work.value_size)
            more |= {} if work.stored == "numbers" else dict(cache_scale=work.cache_scale)
        function = path.latent_attention if latents else path.attention
        return function(tensors["query"], *(tensors[name] for name in pools), plan, given, **more)

    def expected() -> Answer:
        t, h = query.shape[:2]
        out = torch.zeros(t, h, work.value_size, dtype=torch.float64)
        lse = torch.full((t, h), -torch.inf, dtype=torch.float64)
        scale = options.get("softmax_scale")
        for row, own in enumerate(lists):
            seen = Sight(torch.ones(1, len(own), dtype=torch.bool), torch.zeros(1, len(own)))
            answer = attend(
                query[row : row + 1],
                *read(own),
                seen,
                scale=query.shape[2] ** -0.5 if scale is None else scale,
                softcap=options.get("softcap", 0.0),
                sinks=options.get("sinks"),
            )
            out[row], lse[row] = answer.out[0], answer.lse[0]
        return Answer(out, lse, torch.zeros(t, dtype=torch.bool))

    return Call(
        tensors,
        ("query", *(pools if work.stored == "numbers" else ())),
        lambda modules, tensors: modules("sparse").plan(tensors["batch"], positions=tensors["positions"], block_size=p),
        run,
        expected,
        (*query.shape[:2], work.value_size),
    )


def index_keys(work: Workload, generator: torch.Generator, num_blocks: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a pool of index keys, and return it and its dequantized keys by slot, in float64.

    A block of a pool of bytes has the quantized values of all its tokens, and then a scale for each token.
    """
    p, size = work.block_size, index_size(work)
    if work.stored == "numbers":
        pool = drawn_pool(work, generator, num_blocks, 1, size, hidden, 0)[:, :, 0]
        return pool, pool.flatten(0, 1).double()
    quantized = torch.randint(0, LARGEST_E4M3 + 1, (num_blocks * p, size), generator=generator, dtype=torch.uint8)
    quantized += 128 * torch.randint(0, 2, quantized.shape, generator=generator, dtype=torch.uint8)
    scales = 0.001 + 0.01 * torch.rand(num_blocks * p, generator=generator)
    harm = work.poison in ("mixed", "nan")
    quantized[hidden], scales[hidden] = (0x7F, torch.nan) if harm else (0x50, 1e4)
    pages = torch.cat([quantized.view(num_blocks, -1), scales.view(torch.uint8).view(num_blocks, -1)], 1)
    return pages.view(num_blocks, p, size + 4), quantized.view(torch.float8_e4m3fn).double() * scales.double()[:, None]


def index_size(work: Workload) -> int:
    """Return the elements of an index key: a multiple of 4, as the scales in a pool of bytes are aligned."""
    return min(256, -(-work.head_size // 4) * 4)


def _scores(work: Workload, generator: torch.Generator) -> Call:
    owned, num_blocks = tables(work)
    slots = [slots_of(work, blocks, s) for blocks, (_, s) in zip(owned, work.lens, strict=True)]
    pool, numbers = index_keys(work, generator, num_blocks, drawn_hidden(work, num_blocks * work.block_size, slots))
    query = drawn_query(work, generator, index_size(work))
    if work.query_scale:  # quantized values, whose scales are in the weights
        query = laid(query.float().nan_to_num(0.0).clamp(-448, 448).to(torch.float8_e4m3fn), "plain")
    weights = torch.randn(query.shape[:2], generator=generator)
    tensors: dict[str, Any] = dict(query=query, weights=weights, pool=pool)
    tensors["batch"] = batch = make_batch(work, block_table(work, owned))

    def run(modules: Modules, plan: Any, tensors: dict[str, Any], **more: Any) -> Any:
        scores = modules("sparse").scores(*(tensors[name] for name in ("query", "weights", "pool")), plan)
        return (scores, scores.new_zeros(len(scores), 1)) if more.get("return_lse") else scores  # scores have no LSE

    def expected() -> Answer:
        scores, row = torch.full((len(query), batch.max_seq_len), -torch.inf, dtype=torch.float64), 0
        for i, (q, s) in enumerate(work.lens):
            for r in range(row, row + q):
                products = numbers[slots[i]] @ query[r].double().T  # [s, h]
                scores[r, :s] = (products.clamp(min=0) * weights[r].double()).sum(1)
            scores[row : row + q, :s].masked_fill_(~sight(work, i).visible, -torch.inf)
            row += q
        lse = torch.zeros(len(scores), 1, dtype=torch.float64)
        return Answer(scores, lse, torch.zeros(len(scores), dtype=torch.bool))

    numbers_of = ("pool",) if work.stored == "numbers" else ()
    return Call(
        tensors,
        (*(() if work.query_scale else ("query",)), *numbers_of),
        lambda modules, tensors: modules("chunked_prefill").plan(
            tensors["batch"], block_size=work.block_size, causal=work.causal, window_size=work.window
        ),
        run,
        expected,
        takes_out=False,
    )
