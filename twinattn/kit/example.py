"""An example: one batch of a path as plain numbers, which print as a line of code, shrink, and define all tensors.

    Example("chunked_prefill", lens=((1, 5), (3, 20)), heads=(4, 2), options={"window_size": (3, 0)})

The tensors are a dict by the names of the parameters of the path's `plan`, `AttentionOptions` and `attention`.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from refattn.batch import Batch, Prefix
from refattn.scales import Fp8Scales
from refattn.speculative import make_trees
from twinattn.kit import beside, gradients, packed
from twinattn.kit import states as of_states
from twinattn.kit.cases import HARMLESS, build, poisoned
from twinattn.kit.oracle import sight
from twinattn.kit.tolerance import on_cpu
from twinattn.kit.workload import LARGEST, Workload

IN_MODULE = {
    "select": "sparse",
    "sparse_latents": "sparse",
    "packed_latents": "sparse",
    "packed_mla": "mla",
    "varlen_backward": "varlen",
}  # paths in a module of another name
Arguments = dict[str, Any]
Answers = dict[str, Tensor]
SHOWN = ("lens", "heads", "head_size", "value_head_size", "block_size", "padding_rows", "options", "seed")
SELECTED = ("sparse", "sparse_latents", "packed_latents")  # paths whose queries have lists of keys
PACKED = ("packed_latents", "packed_mla")  # paths over packed latents
LAMBDAS, LAMBDA_INIT = (0.3, -0.4, 1.5), 0.2  # differential attention: neither 0, nor alike
ROWS_OF_NUMBERS = ("query", "key", "value", "key_cache", "value_cache", "cache", "states")
GAP = 16  # elements after each row, so that rows stay aligned to 16 bytes
SCALES = (1.7123, 0.2611)  # for fp8 keys and values: neither 1, nor alike, nor exact in 16 bits
CHAINS = 5  # the seed of trees that are chains
OF_A_LAYER = ("norm_eps", "lambda_init", "lambda_full", "norm_weight")  # numbers of differential attention
SCALES_OF = ("", "heads", "sequences")  # whether there is one scale, or several
HOLES = ("first", "middle", "last")  # where the entries of a list are -1
FAR_SLOPES = (1.3e-5, 3.1e-5, 0.7e-5)  # keys tens of thousands of tokens away still have weight
SIGNED_SLOPES = (-0.1137, 3.1701, 0.0, -0.0013, -2.0417)  # far keys are preferred, or hidden by all but large scores
KINDS_OF_SLOPES = {"far": FAR_SLOPES, "signs": SIGNED_SLOPES}
SLOPES = (0.0041, 0.2431, 0.6029, 0.0007, 0.0397)  # no powers of two; with the small ones thousands of keys have weight
LATENT_SCALE = 0.0713  # the scale of fp8 latents
TYPES_OF_OPTIONS = ("bfloat16", "float16", "float64")  # types of slopes and sinks other than float32
QUERY_SCALE = 0.0213  # the quantized values of a query of about 1 are then about 50
CALLED = (
    "return_lse",
    "out",
    "layout",
    "poison",
    "forked",
    "first_block",
    "nan_at",
    "num_keys",
)  # options of the call, not of the path


@dataclass(frozen=True, repr=False)
class Example(Workload):
    """A workload with the arguments of its path as `options`.

    Attributes:
        options: by name. All paths: those of the plan and of `AttentionOptions`. `sinks`: True, "large" (in some heads
            alone) or the name of their type; `alibi_slopes`: True, "far" (so small that keys far away have weight),
            "signs" (of either sign, 0, large), "root" (for `alibi_sqrt`) or the name of their type; the numbers are
            then made. `cascade`: `shared`: blocks that all sequences share, or `(first, last, blocks)` of each prefix,
            outer ones first. `merge`: `parts`; `empty`: whether some rows are; `lse_dtype`: "float64" for large
            log-sum-exps in that type. `quantized`: `scales` of both pools;
            `scales_of`: "heads", "sequences" or one of `corners.MIXED`; `format`: "e5m2" instead of e4m3; `bytes`:
            whether the pools are uint8; `query_scale`: whether there is one. `interval`: `seen`: "spans", "prefix" or
            "drawn". `sparse`, `sparse_latents`, `packed_latents`: `topk`: the most keys of a query; `twice`: whether a
            key may be listed several times; `full`: whether all lists have as many keys as possible; `holes`: where
            the entries are -1, one of `HOLES`. `mla`, `sparse_latents`: `stored`: the type of an fp8 pool;
            `query_scale`: whether queries are rounded, too. `packed_latents`, `packed_mla`: `rows`, one of
            `packed.KINDS`. `select`: `topk`, and the `kind` of the scores. `kv_cache`: `holes`: whether some slots are
            -1; `slots`: "run", "backwards" or "anywhere". `speculative`: `growing`: nodes of each tree before those of
            the query rows. `recurrent`: those of `states.tensors`. `varlen_backward`: `grad_lse`: whether there is a
            gradient of the log-sum-exp. `CALLED`, how a check calls a kernel: `return_lse`, `out`, `layout`, `poison`;
            `num_keys`: how many the batch says there are, right or wrong; `first_block`: the first block of the batch
            in a large pool; `forked`: whether sequences begin with blocks of others; `nan_at`: where among the keys of
            a sequence the NaN is, from 0 to 1.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set the fields of the mask from the options."""
        said = self.options.get
        mask = dict(causal=said("causal", True), window=tuple(said("window_size", (-1, -1))))
        mask |= dict(chunk_blocks=said("chunk_size", 0) // self.block_size, trees="drawn", growing=said("growing", 0))
        for name, value in mask.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        default = Example(self.path)
        shown = [f"{name}={getattr(self, name)!r}" for name in SHOWN if getattr(self, name) != getattr(default, name)]
        return f"Example({', '.join([repr(self.path), *shown])})"

    def masks(self) -> list[Tensor]:
        """Return the mask of each sequence, `[t, s]`."""
        if self.path in SELECTED:
            return [
                torch.stack([torch.isin(torch.arange(s), row) for row in rows]) if q else torch.zeros(0, s).bool()
                for (q, s), rows in zip(self.lens, self.selected(), strict=True)
            ]
        return [sight(self, i).visible for i in range(len(self.lens))]

    def shares(self) -> list[Tensor]:
        """Return the weights of each sequence if all scores are equal, `[t, s]`."""
        counts = [mask.double() for mask in self.masks()]
        if self.path in SELECTED:
            for count, rows in zip(counts, self.selected(), strict=True):
                for of_query, listed in zip(count, rows, strict=True):
                    of_query.copy_(torch.bincount(listed[listed >= 0].long(), minlength=len(of_query)))
        return [count / count.sum(-1, keepdim=True).clamp(min=1) for count in counts]

    def shared_prefixes(self) -> list[Prefix]:
        """Return the shared prefixes of `cascade`, cut to the keys before the queries of their sequences."""
        shared, found = self.options.get("shared", 0), list[Prefix]()
        for first, last, blocks in ((0, len(self.lens), shared),) if isinstance(shared, int) else shared:
            members = self.lens[first:last]
            context = min((max(0, s - q) for q, s in members), default=0)
            prefix = Prefix(first, first + len(members), min(blocks, context // self.block_size) * self.block_size)
            around = [other for other in found if other.first < prefix.last and prefix.first < other.last]
            if len(members) > 1 and prefix.end and all(other.encloses(prefix) for other in around):
                found.append(prefix)
        return found

    def span(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the first and the last key that each query of a sequence may see; for `interval` by `seen`."""
        if self.path != "interval":
            return super().span(i)
        q, s = self.lens[i]
        at, drawn = torch.arange(s - q, s), random.Random(1000 * self.seed + s)
        kind = self.options.get("seen", "drawn")
        if kind == "prefix":
            prefix = drawn.randint(0, s)
            return torch.zeros_like(at), torch.where((at >= 0) & (at < prefix), prefix - 1, at)
        if kind == "spans":
            begin = drawn.randint(0, max(0, s - 1))
            end = min(s - 1, begin + drawn.randint(0, 30))
            inside = (at >= begin) & (at <= end)
            return (at - 9).clamp(min=0), torch.where(inside, end, at)
        first = torch.tensor([drawn.randint(-2, s + 1) for _ in range(q)], dtype=torch.int64)
        last = torch.tensor([drawn.randint(x - 2, max(x - 2, s - 1)) for x in first.tolist()], dtype=torch.int64)
        first[3::4] = -LARGEST - 1  # no lower bound
        last[5::8] = -LARGEST - 1  # an empty interval
        return first, last.clamp(max=s - 1)

    def selected(self) -> list[Tensor]:
        """Draw the list of positions of each query, with -1 anywhere: `[t, k]` per sequence."""
        drawn, topk, lists = random.Random(self.seed), self.options.get("topk", 8), []
        twice, full = self.options.get("twice", False), self.options.get("full", False)
        holes = self.options.get("holes")
        for q, s in self.lens:
            rows = []
            for _ in range(q):
                count = min(s, topk) if full else drawn.randint(0, min(s, topk))
                row = drawn.sample(range(s), count) + [-1] * (topk - count)
                if twice and count:
                    row[count:] = [drawn.choice((-1, row[0], row[count - 1])) for _ in row[count:]]
                drawn.shuffle(row)
                if holes:
                    keys = drawn.sample(range(s), min(s, topk // 4))
                    first = {"first": 0, "middle": len(keys) // 2, "last": len(keys)}[holes]
                    row = [*keys[:first], *[-1] * (topk - len(keys)), *keys[first:]]
                rows.append(row)
            lists.append(torch.tensor(rows, dtype=torch.int32).reshape(q, topk))
        return lists

    def parents(self, i: int) -> list[int]:
        """Return the parent of each node in the tree of a sequence; it depends on the number of nodes and the seed.

        With an odd seed most nodes follow the one before, which makes deep trees; with an even seed trees are bushy,
        and with the seed `CHAINS` they are chains.
        """
        if self.seed == CHAINS:
            return list(range(-1, self.nodes(i) - 1))
        nodes = self.nodes(i)
        chosen = random.Random(1000 * self.seed + nodes)
        drawn = [chosen.randint(-1, node - 1) for node in range(nodes)]
        deep = self.seed % 2 and nodes > 1
        return [node - 1 if deep and chosen.random() < 0.9 else parent for node, parent in enumerate(drawn)]

    def tensors(self, dtype: torch.dtype, device: str = "cpu", **changed: Any) -> Arguments:
        """Return the arguments of the path; memory that no query may see holds harmless numbers.

        Args:
            dtype: of queries, keys and values.
            device: of all tensors.
            changed: `values`, a list of tensors `[s, hk, dv]`, and `query`, instead of random numbers.
        """
        arguments = moved(PATHS[self.path].build(self, dtype, changed), device)
        if "num_keys" in self.options and "batch" in arguments:
            arguments["batch"] = replace(arguments["batch"], num_keys=self.options["num_keys"])
        return arguments


@dataclass(frozen=True)
class Path:
    """The interface of a path.

    Attributes:
        name: of its file in both packages, except for those in `IN_MODULE`.
        function: the name of its function.
        words: the tensors that it takes, by name.
        planned: the arguments of its plan, except the batch and the block size.
        pools: its paged tensors, each with the number of dimensions before the blocks.
        build: makes the arguments of an example.
        options: fields of `AttentionOptions` that it takes, or of `RecurrentOptions` if it changes states.
        in_place: tensors that a call changes; they are outputs, too.
        differentiates: whether its outputs are gradients.
    """

    name: str
    words: tuple[str, ...]
    build: Callable[[Example, torch.dtype, Mapping[str, Any]], Arguments]
    function: str = "attention"
    planned: tuple[str, ...] = ()
    pools: tuple[tuple[str, int], ...] = ()
    options: tuple[str, ...] = ("softmax_scale", "softcap", "alibi_slopes", "alibi_sqrt", "sinks", "batch_invariant")
    in_place: tuple[str, ...] = ()
    differentiates: bool = False

    @property
    def module(self) -> ModuleType:
        """The reference."""
        return import_module(f"refattn.{IN_MODULE.get(self.name, self.name)}")

    @property
    def attends(self) -> bool:
        """Whether it is attention, not a merge, write, selection, recurrent step or gradient."""
        return self.function in ("attention", "latent_attention") and not self.in_place and not self.differentiates


def moved(arguments: Arguments, device: str) -> Arguments:
    """Move all tensors of some arguments to a device."""
    return arguments if device == "cpu" else on_cpu(arguments, device)


# --- memory that no query may see ---


def region(example: Example, name: str, arguments: Arguments) -> Tensor:
    """Return a mask `[n, p]` of slots of the pool that no query may see.

    Args:
        example: the batch.
        name: "blocks": those of no sequence; "tail": slots past a sequence's end in its last block; "window": keys of
            a sequence that none of its queries may see.
        arguments: with the batch and the pools.
    """
    pool, before = PATHS[example.path].pools[0]
    sizes = arguments[pool].shape[before : before + 2]
    table, p = arguments["batch"].block_table.cpu(), example.block_size
    owned, seen, held = (torch.zeros(sizes[0] * sizes[1], dtype=torch.bool) for _ in range(3))
    for (_, s), row, mask in zip(example.lens, table, example.masks(), strict=True):
        j = torch.arange(-(-s // p) * p)
        slots = row[j // p].long() * p + j % p
        owned[slots] = True
        held[slots[:s]] = True
        seen[slots[:s][mask.any(0)]] = True
    chosen = {"blocks": ~owned, "tail": owned & ~held, "window": held & ~seen}[name]
    return rearrange(chosen, "(n p) -> n p", p=p)


def poison(example: Example, arguments: Arguments, name: str) -> Arguments:
    """Return the arguments with NaN, infinities and huge numbers in a part of the memory that no query may see.

    Args:
        example: the batch.
        arguments: of its path; not modified.
        name: of a `region`; "table": entries past a sequence's last block; "padding": rows of queries, keys, values
            and output gradients after the last sequence; "gaps": memory between the rows of a tensor, and the unused
            end of a row of latents.
    """
    changed = dict(arguments)
    if name == "gaps":
        for word in ROWS_OF_NUMBERS:
            if word in changed:
                is_packed = changed[word].dtype == torch.uint8
                changed[word] = packed.wider(changed[word], GAP) if is_packed else _with_gaps(changed[word])
        if "cache" in changed and "latent_rank" in changed and changed["cache"].is_floating_point():
            changed["cache"][..., example.head_size :] = torch.nan
    elif name == "table":
        changed["batch"] = replace(arguments["batch"], block_table=_table(example, arguments["batch"], (-1, 1_000_000)))
    elif name == "padding":
        for word in ("query", "key", "value", "grad_out"):
            if word in changed and example.padding_rows:
                rows = changed[word] = changed[word].clone()
                shape = (example.padding_rows, *rows.shape[1:])
                rows[-example.padding_rows :] = poisoned(*shape, first=word == "value").to(rows)
    else:
        chosen = region(example, name, arguments)
        for kind, (word, before) in enumerate(PATHS[example.path].pools):
            pool = changed[word] = changed[word].clone()
            views = pool.flatten(0, before - 1) if before else pool[None]
            for view in views:
                rows = view[chosen.to(view.device)]  # [slots, ...]
                if len(rows):
                    heads = rows[0].numel() // rows.shape[-1]
                    numbers = poisoned(len(rows), heads, rows.shape[-1], first=kind)
                    numbers = packed.poisoned(rows) if rows.dtype == torch.uint8 else numbers
                    view[chosen.to(view.device)] = numbers.to(view).reshape(rows.shape)
    return changed


def _with_gaps(x: Tensor) -> Tensor:
    """Return a view of the same values with NaN after each row."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + GAP), torch.nan, device=x.device).to(x.dtype)
    wide[..., :-GAP] = x
    return wide[..., :-GAP]


# --- how the arguments of each path are made ---


def _paged(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    """Lay the batch out in a shuffled pool; spare entries of the table name a block that no sequence owns."""
    drawn = build(example, dtype=dtype, seed=example.seed, poison=HARMLESS, values=changed.get("values"))
    batch = replace(drawn.batch, num_tokens=example.num_tokens)
    options = _options(example)
    if example.path == "speculative":
        options["trees"] = make_trees(list(map(example.parents, range(len(example.lens)))))
    if example.path == "interval":
        spans = [example.span(i) for i in range(len(example.lens))]
        padding = torch.zeros(example.padding_rows)  # any value would do
        options.pop("seen", None)
        for i, name in enumerate(("first_visible", "last_visible")):
            options[name] = torch.cat([*(ends[i] for ends in spans), padding]).int()
    options.pop("growing", None)
    if example.path == "sparse":
        options["positions"] = _positions(example, options)
    if example.path == "cascade":
        batch, options = _sharing(example, batch, options)
    batch = replace(batch, block_table=_table(example, batch, _unowned(drawn.key_cache, example, batch)))
    batch = _forked(example, batch)
    query = changed.get("query", drawn.query)
    return dict(query=query, key_cache=drawn.key_cache, value_cache=drawn.value_cache, batch=batch, **options)


def _positions(example: Example, options: Arguments) -> Tensor:
    """Return the positions that were selected for each query row; rows of padding have none."""
    topk, *_ = (options.pop(name, default) for name, default in dict(topk=8, twice=False, full=False, holes="").items())
    return torch.cat([*example.selected(), torch.full((example.padding_rows, topk), -1, dtype=torch.int32)])


def _varlen(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    drawn = build(example, dtype=dtype, seed=example.seed, poison=HARMLESS, values=changed.get("values"))
    query, key, value, batch = drawn.rows
    batch = replace(batch, block_table=None)
    return dict(query=changed.get("query", query), key=key, value=value, batch=batch, **_options(example))


def _with_gradients(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    """Draw a batch of `varlen`, and the gradients of what it returns."""
    arguments = _varlen(example, dtype, changed)
    arguments.pop("grad_lse", None)
    return arguments | gradients.tensors(example, example.options, dtype)


def _latents(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    """Put latents into the pool, with some unused columns after them."""
    rank = example.value_size
    case = replace(example, heads=(example.heads[0], 1), value_head_size=0)
    keys = changed.get("values")
    if keys is not None:  # a latent is both key and value
        keys = [torch.nn.functional.pad(x[:, :1].float(), (0, example.head_size - rank)) for x in keys]
    drawn = build(case, dtype=dtype, seed=example.seed, poison=HARMLESS, keys=keys)
    cache = torch.cat([drawn.key_cache[:, :, 0], torch.full_like(drawn.key_cache[:, :, 0, :8], 0.5)], dim=-1)
    options = {"softmax_scale": 0.1, **_options(example)}
    if example.path in PACKED:
        kind = options.pop("rows", "mixed") if keys is None else "exact"
        cache = packed.pool(drawn.key_cache[:, :, 0], rank, kind, example.seed)
    if options.pop("query_scale", False):
        options["query_scale"] = QUERY_SCALE
    if options.get("stored"):
        options["cache_scale"] = LATENT_SCALE
        cache = (cache.float() / LATENT_SCALE).to(getattr(torch, options.pop("stored")))
    batch = replace(drawn.batch, block_table=_table(example, drawn.batch, _unowned(cache, example, drawn.batch)))
    batch = _forked(example, batch)
    if example.path in SELECTED:
        options["positions"] = _positions(example, options)
    return dict(query=changed.get("query", drawn.query), cache=cache, batch=batch, latent_rank=rank, **options)


def _pairs(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    """Lay the heads out as differential attention has them: `[half, key or value, n, p, hk/2, d]`."""
    arguments = _paged(example, dtype, changed)
    caches = arguments.pop("key_cache"), arguments.pop("value_cache")
    cache = torch.stack([torch.stack([pool[:, :, half::2] for pool in caches]) for half in (0, 1)])
    weight = torch.linspace(0.5, 1.5, 2 * example.head_size, dtype=torch.float32).to(dtype)
    said = example.options.get
    weights = {"": weight, "signs": weight * (torch.arange(len(weight)) % 3 - 1), "none": None}
    layer = dict(
        lambda_full=torch.tensor(said("lambda_full", LAMBDAS[example.seed % 3]), dtype=torch.float32),
        lambda_init=said("lambda_init", LAMBDA_INIT),
        norm_weight=weights[said("norm_weight", "")],
        norm_eps=said("norm_eps", 1e-5),
    )
    return {"query": arguments.pop("query"), "cache": cache, **arguments, **layer}


def _fp8(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    """Quantize the pools, with one scale for keys and one for values, or with one per head or per sequence and head."""
    arguments = _paged(example, dtype, changed)
    key, value = arguments.pop("scales", SCALES)
    kind = torch.float8_e5m2 if arguments.pop("format", "") == "e5m2" else torch.float8_e4m3fn
    query = QUERY_SCALE if arguments.pop("query_scale", False) else None
    as_bytes = arguments.pop("bytes", False)
    for name, scale in (("key_cache", key), ("value_cache", value)):
        arguments[name] = (arguments[name].float() / scale).to(kind)
        arguments[name] = arguments[name].view(torch.uint8) if as_bytes else arguments[name]
    several = {"heads": example.heads[1:], "sequences": (len(example.lens), example.heads[1])}
    of = arguments.pop("scales_of", "")
    if of in ("values", "keys", "keys by sequence"):  # scales of keys and values have different shapes
        by_head = 0.7371 + 0.2713 * torch.arange(example.heads[1], dtype=torch.float32)
        by_sequence = 0.6113 + 0.1931 * torch.arange(len(example.lens) * example.heads[1], dtype=torch.float32)
        by_sequence = by_sequence.view(-1, example.heads[1])
        forms = {"values": (key, value * by_head), "keys": (key * by_head, value)}
        forms["keys by sequence"] = key * by_sequence, value * by_head
        return arguments | dict(scales=Fp8Scales(*forms[of], query, kind))
    shape = several.get(of)
    if shape is None:
        return arguments | dict(scales=Fp8Scales(key, value, query, kind))
    factors = (0.7371 + 0.2713 * torch.arange(math.prod(shape), dtype=torch.float32) % 1.2477).view(shape)
    of_queries = None if query is None else query * factors
    return arguments | dict(scales=Fp8Scales(key * factors, value * factors.flip(-1), of_queries, kind))


def _states(example: Example, dtype: torch.dtype, changed: Mapping[str, Any]) -> Arguments:
    """Draw tokens, and states in the slots of a pool."""
    return of_states.tensors(example, example.options, dtype)


def _options(example: Example) -> Arguments:
    """Return the options, with tensors for those that have one number per head."""
    h = example.heads[0]
    options = {name: value for name, value in example.options.items() if name not in (*CALLED, *OF_A_LAYER)}
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    if slopes:
        numbers = torch.tensor(KINDS_OF_SLOPES.get(slopes, SLOPES), dtype=torch.float32)
        options["alibi_slopes"] = numbers[(torch.arange(h) + example.seed) % len(numbers)]
        if slopes == "root":
            options["alibi_sqrt"] = True
    if sinks:
        options["sinks"] = (
            torch.linspace(-1.13, 3.07, h, dtype=torch.float32) if h > 1 else torch.tensor([1.07], dtype=torch.float32)
        )
    for name, kind in (("alibi_slopes", slopes), ("sinks", sinks)):
        if kind in TYPES_OF_OPTIONS:
            options[name] = options[name].to(getattr(torch, kind))
    if sinks == "large":
        options["sinks"] = torch.tensor([0.5, 120.0, -120.0])[torch.arange(h) % 3]  # exp(120) is infinite
    return options


def _sharing(example: Example, batch: Batch, options: Arguments) -> tuple[Batch, Arguments]:
    """Replace the first blocks of the sequences of each prefix by those of the first sequence."""
    options.pop("shared", None)
    assert batch.block_table is not None
    table, prefixes = batch.block_table.clone(), example.shared_prefixes()
    for first, last, end in prefixes:
        table[first:last, : end // example.block_size] = table[first, : end // example.block_size]
    return replace(batch, block_table=table), options | dict(prefixes=prefixes)


def _forked(example: Example, batch: Batch) -> Batch:
    """Replace the first full blocks of sequences, some or all, by those of earlier ones, as after a fork."""
    if not example.options.get("forked"):
        return batch
    assert batch.block_table is not None
    table, drawn = batch.block_table.clone(), random.Random(example.seed)
    full = [s // example.block_size for _, s in example.lens]
    for i in range(1, len(full)):
        other = drawn.choice((i - 1, drawn.randrange(i)))
        most = min(full[i], full[other])
        shared = drawn.choice((most, min(most, 1), drawn.randint(0, most)))
        table[i, :shared] = table[other, :shared]
    return replace(batch, block_table=table)


def _unowned(pool: Tensor, example: Example, batch: Batch) -> tuple[int, ...]:
    """Return a block of the pool that no sequence has."""
    assert batch.block_table is not None
    used = {
        block
        for (_, s), row in zip(example.lens, batch.block_table.tolist(), strict=True)
        for block in row[: -(-s // example.block_size)]
    }
    return (min(set(range(len(pool))) - used),)


def _table(example: Example, batch: Batch, spare: tuple[int, ...]) -> Tensor:
    """Return the block table with other entries past each sequence's last block."""
    assert batch.block_table is not None
    table = batch.block_table.clone()
    for i, (_, s) in enumerate(example.lens):
        past = table[i, -(-s // example.block_size) :]
        past.copy_(torch.tensor(spare, dtype=torch.int32)[torch.arange(len(past)) % len(spare)])
    return table


POOLS = (("key_cache", 0), ("value_cache", 0))
ROWS_AND_PAGES = ("query", "key_cache", "value_cache")
PATHS = {
    path.name: path
    for path in (
        Path("varlen", ("query", "key", "value"), _varlen, planned=("causal", "window_size")),
        Path(
            "varlen_backward",
            ("query", "key", "value", "grad_out", "grad_lse"),
            _with_gradients,
            planned=("causal", "window_size"),
            differentiates=True,
        ),
        Path("chunked_prefill", ROWS_AND_PAGES, _paged, planned=("causal", "window_size"), pools=POOLS),
        Path("sliding_window", ROWS_AND_PAGES, _paged, planned=("causal", "window_size"), pools=POOLS),
        Path("local", ROWS_AND_PAGES, _paged, planned=("chunk_size", "window_size"), pools=POOLS),
        Path("cascade", ROWS_AND_PAGES, _paged, planned=("prefixes", "window_size"), pools=POOLS),
        Path("interval", ROWS_AND_PAGES, _paged, planned=("first_visible", "last_visible"), pools=POOLS),
        Path(
            "sparse",
            ROWS_AND_PAGES,
            _paged,
            planned=("positions",),
            pools=POOLS,
            options=("softmax_scale", "softcap", "sinks", "batch_invariant"),
        ),
        *(
            Path(
                name,
                ("query", "cache", "latent_rank"),
                _latents,
                function="latent_attention",
                planned=("positions",),
                pools=(("cache", 0),),
                options=("softmax_scale", "softcap", "sinks", "batch_invariant"),
            )
            for name in ("sparse_latents", "packed_latents")
        ),
        Path("select", ("scores", "topk"), beside.scores, function="select", options=()),
        Path("speculative", ROWS_AND_PAGES, _paged, planned=("trees", "window_size"), pools=POOLS),
        Path(
            "differential",
            ("query", "cache", "lambda_full", "lambda_init", "norm_weight", "norm_eps"),
            _pairs,
            planned=("causal", "window_size"),
            pools=(("cache", 2),),
        ),
        Path("mla", ("query", "cache", "latent_rank"), _latents, pools=(("cache", 0),)),
        Path("packed_mla", ("query", "cache", "latent_rank"), _latents, pools=(("cache", 0),)),
        Path("quantized", (*ROWS_AND_PAGES, "scales"), _fp8, planned=("causal", "window_size"), pools=POOLS),
        Path("merge", ("outs", "lses"), beside.partials, function="merge", options=()),
        Path(
            "kv_cache",
            ("key", "value", "key_cache", "value_cache", "slot_mapping"),
            beside.new_tokens,
            function="write",
            pools=POOLS,
            options=(),
        ),
        Path(
            "recurrent",
            of_states.TOKENS,
            _states,
            planned=of_states.TABLES,
            options=("scale", "delta"),
            in_place=("states",),
        ),
    )
}
