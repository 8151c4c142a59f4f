"""Every path, once: its plan and where its keys are, who may see whom, and what it must refuse.

    PATHS["local"](package, inputs, softcap=2.0)      plan a batch of `twinattn.kit.build`, and attend to it
    PATHS["local"].tensors(inputs)                    what a layer passes, by the names of `attention`
    PATHS["local"].attend(package, batch, tensors)    plan and attend with any tensors of those names
    rule(window_size=(3, 0))                          who sees whom under such arguments of a plan
    SPECS                                             five proofs for each of these plans: `test_every_path`

A path is a plan (who may see whom) over a storage (where the keys are). What any storage gives under any plan by each
kernel is in `test_composition`; what each kernel has to compute, in `helpers/kernels_present.py`.
`tests/tools/test_table.py` holds the table to the files of both packages, to the kit, the search and the benchmark: a
path that is added in one of them alone fails there.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from refattn.batch import Batch, Prefix
from refattn.four_bits import Int4Scales, Nvfp4Scales
from refattn.modes import without_autocast
from refattn.rounding import to_int4, to_nvfp4
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import Case, Paged, build, plan_and_attend
from tests.helpers.ranks import attend_on_all
from twinattn.kit import PathSpec

# --- who may see whom ---

LEFT, RIGHT, CHUNK = 19, 3, 48  # tokens before and after a query, in a chunk


def rule(
    *, causal: bool = True, window_size: tuple[int, int] = (-1, -1), chunk_size: int = 0, **_: Any
) -> Callable[[int, int], bool]:
    """Return whether a query at position `i` sees the key at `j`, by the arguments of a plan."""
    left, right = window_size

    def sees(i: int, j: int) -> bool:
        is_in_window = (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
        return is_in_window and (not causal or j <= i) and (not chunk_size or i // chunk_size == j // chunk_size)

    return sees


@dataclass(frozen=True)
class Step:
    """A batch that is planned: the module that plans it, the batch, tokens in a block, and query rows with padding."""

    path: Any
    batch: Batch
    block_size: int
    num_rows: int


def shared_prefix(step: Step) -> dict[str, Any]:
    """Share two blocks, as `share` lays them out."""
    first, last = sharing(step.batch, 2 * step.block_size)
    return dict(prefixes=[Prefix(first, last, 2 * step.block_size)] if first < last else [])


def sharing(batch: Batch, length: int) -> tuple[int, int]:
    """Return the longest run of neighbours with a context of that many tokens."""
    runs, begin = [(0, 0)], None
    for i, context in enumerate([*batch.context_lens.tolist(), -1]):
        if context >= length:
            begin = i if begin is None else begin
        elif begin is not None:
            runs.append((begin, i))
            begin = None
    return max(runs, key=lambda run: run[1] - run[0])


def share(batch: Batch, block_size: int) -> Batch:
    """Give all sequences the first two blocks of one sequence, as a shared prefix."""
    assert batch.block_table is not None
    (first, last), table = sharing(batch, 2 * block_size), batch.block_table.clone()
    table[first:last, :2] = table[first : first + 1, :2].clone()
    return replace(batch, block_table=table)


def chains(step: Step) -> dict[str, Any]:
    """Make a tree of the new tokens of each sequence, each after the one before it: they see what causal chunks see."""
    parents = [list(range(-1, length - 1)) for length in step.batch.query_lens.tolist()]
    return dict(trees=step.path.make_trees(parents, device=str(step.batch.device)))


def causal_intervals(step: Step) -> dict[str, Any]:
    """Return the intervals that show the same keys as a causal mask."""
    made: dict[str, Any] = step.path.causal(step.batch, step.num_rows)._asdict()
    return made


def contexts_in_chunks(step: Step) -> dict[str, Any]:
    """Leave room for two blocks and a half of each context at a time."""
    room = step.batch.num_seqs * step.block_size * 5 // 2
    return dict(workspace=room, max_context_len=step.batch.max_seq_len - 1)


def every_other(step: Step) -> dict[str, Any]:
    """Select for each query its own key and every other one before it, in the order of their distance."""
    lens = zip(step.batch.query_lens.tolist(), step.batch.seq_lens.tolist(), strict=True)
    seen = [list(range(position, -1, -2)) for q, s in lens for position in range(s - q, s)]
    rows = [row + [-1] * (64 - len(row)) for row in [*seen, *[[]] * (step.num_rows - len(seen))]]
    return dict(positions=torch.tensor(rows, dtype=torch.int32, device=step.batch.device).view(-1, 64))


def in_its_blocks(step: Step) -> dict[str, Any]:
    """Put the entries of a sequence into its blocks, one row for each."""
    return dict(entry_table=step.batch.block_table, entry_block_size=step.block_size)


# --- where the keys are ---


def in_rows(inputs: Paged) -> dict[str, Any]:
    """Keys and values of all sequences, one after another."""
    return dict(zip(("query", "key", "value"), inputs.rows, strict=False))


def in_pages(inputs: Paged) -> dict[str, Any]:
    """Pools of blocks."""
    return dict(query=inputs.query, key_cache=inputs.key_cache, value_cache=inputs.value_cache)


def pairs(key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """Put pools of interleaved pairs of heads into one pool of halves."""
    stack = without_autocast(torch.stack)  # torch's own refuses float16 under autocast on a CPU
    return stack([stack([pool[..., half::2, :] for pool in (key_cache, value_cache)]) for half in (0, 1)])


def in_pairs(inputs: Paged) -> dict[str, Any]:
    """Pools of both heads of each pair, and the weight of the second softmax."""
    weight = torch.tensor(0.35, dtype=torch.float32, device=inputs.query.device)
    cache = pairs(inputs.key_cache, inputs.value_cache)
    return dict(query=inputs.query, cache=cache, lambda_full=weight, lambda_init=0.2)


def in_rows_of_pairs(inputs: Paged) -> dict[str, Any]:
    """The same of keys and values that lie one after another."""
    _, key, value, _ = inputs.rows
    return in_pairs(inputs) | dict(cache=pairs(key, value))


def in_latents(inputs: Paged) -> dict[str, Any]:
    """Absorbed queries over the keys of the first head: three quarters latent, one quarter rotary."""
    return dict(query=inputs.query, cache=inputs.key_cache[:, :, 0], latent_rank=inputs.query.shape[-1] * 3 // 4)


def from_latents(inputs: Paged) -> dict[str, Any]:
    """New tokens as latents and rotary keys, the context in a pool, and the matrices that make keys and values."""
    query, d = inputs.query, inputs.query.shape[-1]
    rank, generator = d * 3 // 4, torch.Generator().manual_seed(0)
    made = torch.randn(query.shape[1], 2 * d, rank, generator=generator, dtype=torch.float32, device="cpu").to(query)
    tokens = dict(latent=query[:, 0, :rank], rope_key=query[:, 1, : d - rank], cache=inputs.key_cache[:, :, 0])
    matrices = dict(key_projection=made[:, :rank] / 7, value_projection=made[:, d : d + d // 2] / 7)
    return dict(query=query, **tokens, **matrices)


def in_two_pools(inputs: Paged) -> dict[str, Any]:
    """Keys of the window in the first head of the pool of keys, and entries in the last one, in the same blocks."""
    return dict(query=inputs.query, cache=inputs.key_cache[:, :, 0], entry_cache=inputs.key_cache[:, :, -1])


def in_fp8(inputs: Paged) -> dict[str, Any]:
    """Pools of fp8, under a scale each."""
    scales = Fp8Scales(0.5, 0.25)
    pools = zip(_tame_pools(inputs), (scales.key, scales.value), strict=True)
    key_cache, value_cache = ((pool / scale).to(scales.format) for pool, scale in pools)
    return dict(query=inputs.query, key_cache=key_cache, value_cache=value_cache, scales=scales)


def in_int8(inputs: Paged) -> dict[str, Any]:
    """Pools of int8, with a scale per key and one per element of a value."""
    pools = _tame_pools(inputs)
    sizes = pools[0].shape[:3], pools[1].shape[2:]
    scales = (torch.full(size, 0.1, dtype=torch.float32, device=pools[0].device) for size in sizes)
    key_cache, value_cache = ((pool / 0.1).round().to(torch.int8) for pool in pools)
    return dict(query=inputs.query, key_cache=key_cache, value_cache=value_cache, scales=Int8Scales(*scales))


def in_int4(inputs: Paged) -> dict[str, Any]:
    """Pools of int4, turned, with a scale and a zero point per key and per value."""
    pools, scales = zip(*map(to_int4, _tame_pools(inputs)), strict=True)
    return dict(query=inputs.query, key_cache=pools[0], value_cache=pools[1], scales=Int4Scales(*scales))


def in_nvfp4(inputs: Paged) -> dict[str, Any]:
    """Pools of nvfp4, with a scale per 16 elements and a number for all of them."""
    numbers = 0.5, 0.25
    pools, scales = zip(*map(to_nvfp4, _tame_pools(inputs), numbers), strict=True)
    return dict(query=inputs.query, key_cache=pools[0], value_cache=pools[1], scales=Nvfp4Scales(*scales, *numbers))


def _tame_pools(inputs: Paged) -> list[Tensor]:
    return [pool.nan_to_num(0, 0, 0).clamp(-9, 9) for pool in (inputs.key_cache, inputs.value_cache)]


STORAGES: dict[str, tuple[str, Callable[[Paged], dict[str, Any]]]] = {  # what attends to it, "" for the plan's own file
    "rows": ("varlen.attention", in_rows),
    "pages": ("", in_pages),
    "pairs": ("differential.attention", in_pairs),
    "rows of pairs": ("differential.attention", in_rows_of_pairs),
    "latents": ("mla.attention", in_latents),
    "made of latents": ("mla.prefill", from_latents),
    "selected latents": ("sparse.latent_attention", in_latents),
    "window and entries": ("compressed.attention", in_two_pools),
    "fp8": ("quantized.attention", in_fp8),
    "int8": ("quantized.attention", in_int8),
    "int4": ("quantized.attention", in_int4),
    "nvfp4": ("quantized.attention", in_nvfp4),
    "ranks": ("", in_pages),  # dealt out to two, by `attend_on_all`
}


# --- paths ---


@dataclass(frozen=True)
class Path:
    """A plan over a storage, in both packages: called with a package and a batch, it plans and attends.

    Attributes:
        plan: the function that plans, `file` for `file.plan`.
        keys: where the keys are, one of `STORAGES`.
        arguments: of the plan and of the layer, beside the batch and the block size.
        planned: more arguments of the plan, which depend on the batch.
        refuses: the error of a package ("" for both) for an option, where it does not take one that others take.
    """

    plan: str
    keys: str = "pages"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    planned: Callable[[Step], dict[str, Any]] = lambda step: {}
    refuses: Mapping[tuple[str, str], tuple[type[Exception], str]] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The file that plans, in both packages."""
        return self.plan.partition(".")[0]

    @property
    def attention(self) -> str:
        """The function that attends, as `file.function`."""
        return STORAGES[self.keys][0] or f"{self.file}.attention"

    def takes(self, argument: str) -> bool:
        """Return whether the plan takes an argument."""
        parameters = inspect.signature(function_of("refattn", self.plan)).parameters
        return argument in parameters and self.accepts("refattn", argument)

    def refusal(self, package: str, option: str) -> tuple[type[Exception], str] | None:
        """Return the error with which a package refuses an option; None if it takes it."""
        return self.refuses.get((package, option)) or self.refuses.get(("", option))

    def accepts(self, package: str, *options: str) -> bool:
        """Return whether a package takes all of some options."""
        return not any(self.refusal(package, option) for option in options)

    def tensors(self, inputs: Paged) -> dict[str, Any]:
        """Lay a batch out in the storage: what `attention` takes, by name, but for plan and options."""
        return STORAGES[self.keys][1](inputs)

    def batch(self, inputs: Paged) -> Batch:
        """Return the batch as the path has it: of a cascade, with blocks that are shared."""
        shares = self.planned is shared_prefix
        return share(inputs.batch, inputs.key_cache.shape[1]) if shares else inputs.batch

    def plan_arguments(self, package: str, batch: Batch, block_size: int, num_rows: int = 0) -> dict[str, Any]:
        """Return all arguments of the plan but the batch; 0 rows for those of the batch."""
        path = importlib.import_module(f"{package}.{self.file}")
        made = self.planned(Step(path, batch, block_size, num_rows or batch.num_tokens or 0))
        given = {name: x for name, x in self.arguments.items() if self.takes(name)}
        return given | made | (dict(block_size=block_size) if block_size else {})

    def made_plan(self, package: str, batch: Batch, block_size: int, **arguments: Any) -> Any:
        """Plan a step; `arguments` go before those of the table."""
        planned = self.plan_arguments(package, batch, block_size) | arguments
        return function_of(package, self.plan)(batch, **planned)

    def attend(
        self, package: str, batch: Batch, tensors: Mapping[str, Any], planned_by: str = "", **options: Any
    ) -> Any:
        """Plan a step and attend in one layer.

        Args:
            package: refattn or fastattn.
            batch: as `batch` returns it.
            tensors: those of a layer, by name.
            planned_by: the package that plans, if it is the other one.
            options: of the plan, of the layer and of the call, in any order; they go before those of the table.
        """
        if self.keys == "ranks":
            whole = (tensors[name] for name in ("query", "key_cache", "value_cache"))
            return attend_on_all(package, 2, *whole, batch, **{**self.arguments, **options})
        plan, attention = function_of(planned_by or package, self.plan), function_of(package, self.attention)
        pool = tensors.get("key_cache", tensors.get("cache"))
        block_size = 0 if pool is None or "rows" in self.keys else pool.shape[1] if pool.ndim == 3 else pool.shape[-3]
        planned = self.plan_arguments(package, batch, block_size, len(tensors["query"]))
        path = SimpleNamespace(plan=plan, attention=attention)
        return plan_and_attend(path, batch=batch, **{**tensors, **self.arguments, **planned, **options})

    def __call__(self, package: str, inputs: Paged, **options: Any) -> Any:
        """Lay a batch out, plan it and attend."""
        return self.attend(package, self.batch(inputs), self.tensors(inputs), **options)


def function_of(package: str, name: str) -> Any:
    """Return a function of a package by `file.function`; `file` alone is its plan."""
    file, _, function = name.partition(".")
    return getattr(importlib.import_module(f"{package}.{file}"), function or "plan")


NO_POSITIONS = {("", "alibi_slopes"): (ValueError, "alibi_slopes: expected None, as selected keys have no positions")}
TREES = {("", "causal"): (ValueError, "causal: expected True with trees")}
SCALED = dict(softmax_scale=0.1)  # latents have no default
PATHS = {
    "varlen": Path("varlen", "rows"),
    "chunked_prefill": Path("chunked_prefill"),
    "sliding_window": Path("sliding_window", arguments=dict(window_size=(20, 0))),
    "local": Path("local", arguments=dict(chunk_size=32)),
    "cascade": Path("cascade", planned=shared_prefix),
    "interval": Path("interval", planned=causal_intervals),
    "differential": Path("differential", "pairs"),
    "mla": Path("mla", "latents", SCALED),
    "mla-trees": Path("speculative", "latents", SCALED, chains, TREES),
    "mla-prefill": Path("mla.plan_prefill", "made of latents", SCALED, contexts_in_chunks),
    "quantized-fp8": Path("quantized", "fp8"),
    "quantized-int8": Path("quantized", "int8"),
    "quantized-int4": Path("quantized", "int4"),
    "quantized-nvfp4": Path("quantized", "nvfp4"),
    "speculative": Path("speculative", planned=chains, refuses=TREES),
    "context_parallel": Path(
        *("context_parallel", "ranks", dict(interleave=1)),
        refuses={("fastattn", "alibi_sqrt"): (NotImplementedError, "no kernel computes the root of the distance")},
    ),
    "sparse": Path("sparse", planned=every_other, refuses=NO_POSITIONS),
    "compressed": Path(
        *("compressed", "window and entries", dict(ratio=4, window_size=(20, 0)), in_its_blocks),
        refuses={("", "alibi_slopes"): (ValueError, "alibi_slopes: expected None, as an entry has no position")},
    ),
    "sparse-latents": Path("sparse", "selected latents", SCALED, every_other, NO_POSITIONS),
}
COMPOSED = {  # plans over other storages, as layers of a server have them: `helpers/layers.py`
    **{name: PATHS[name] for name in ("varlen", "chunked_prefill", "sliding_window", "local", "cascade")},
    "tree": PATHS["speculative"],
    "latents": PATHS["mla"],
    "tree of latents": PATHS["mla-trees"],
    "fp8 latents": PATHS["mla"],
    "differential": PATHS["differential"],
    "differential rows": Path("varlen", "rows of pairs"),
    "fp8 differential": PATHS["differential"],
    "e4m3": PATHS["quantized-fp8"],
    "int8": PATHS["quantized-int8"],
    "int4": PATHS["quantized-int4"],
    "int8 cascade": Path("cascade", "int8", planned=shared_prefix),
    "int8 tree": Path("speculative", "int8", planned=chains, refuses=TREES),
}
LENS = ((3, 40), (1, 70), (20, 52))  # all three share 32 keys in the cascade
CASE = Case("three", LENS, heads=(4, 2), padding_rows=2)
each_path = pytest.mark.parametrize("path", PATHS)
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"])


SMALL = Case("small", ((2, 5), (1, 20)), heads=(4, 2), head_size=8, block_size=4)  # in a pool of 10 blocks
SMALLER = {"sliding_window": dict(window_size=(3, 0)), "local": dict(chunk_size=8)}  # what fits it, of `PATHS`


def lay_out(path: str, device: str, padding_rows: int = 2) -> Paged:
    """Lay the case out; 8-bit values on a CPU, as their kernels for a GPU have types of their own to be tested in."""
    return build(replace(CASE, padding_rows=padding_rows), device="cpu" if path.startswith("quantized") else device)


# --- five proofs ---

BAD_OPTIONS = {
    "softmax_scale: expected a finite number": dict(softmax_scale=float("nan")),
    "softcap: expected a finite number of at least 0": dict(softcap=-1.0),
    "sinks: expected floating point [h=4]": dict(sinks=torch.zeros(3)),
    "alibi_slopes: expected floating point [h], got int32 [4]": dict(alibi_slopes=torch.zeros(4, dtype=torch.int32)),
    "batch_invariant: expected True or False": dict(batch_invariant=1),
    "return_lse: expected True or False": dict(return_lse=None),
    "out: expected float32 [t=3, h=4, dv=64]": dict(out=torch.zeros(2, 4, 64)),
    "window_size: expected (left, right)": dict(window_size=(-2, 0)),
}
BAD_BLOCK = {"block_size: expected a positive int": dict(block_size=0)}
BAD_PAGES = BAD_BLOCK | {"key_cache: expected blocks": dict(block_size=32)}
BAD_CHUNKS = {
    "key_cache: expected blocks": dict(block_size=24),
    "chunk_size: expected a multiple of block_size=16, got 24": dict(chunk_size=24),
}
BAD_PREFIXES = {
    "prefixes[0]: expected sequences in 0..2, got 0..3": dict(prefixes=[Prefix(0, 3, 16)]),
    "prefixes[0]: expected to end before the first query": dict(prefixes=[Prefix(0, 2, 16)]),
}
REFUSED = {  # by each path, each with what the error says, over two sequences in blocks of 16
    "varlen": BAD_OPTIONS,
    "chunked_prefill": BAD_OPTIONS | BAD_PAGES,
    "sliding_window": BAD_OPTIONS | BAD_PAGES,
    "local": BAD_OPTIONS | BAD_BLOCK | BAD_CHUNKS,
    "cascade": BAD_OPTIONS | BAD_PAGES | BAD_PREFIXES,
}


def spec(path: str, **arguments: Any) -> PathSpec:
    """Return the spec of a path for some arguments of its plan: the mask that it promises."""
    paged = PATHS[path].keys != "rows"
    return PathSpec(path, rule(**arguments), arguments, paged=paged, bad_arguments=REFUSED[path])


SPECS = [  # paths over plain rows and pages; the proofs of other storages are in the files of their paths
    spec("chunked_prefill"),
    spec("chunked_prefill", window_size=(LEFT, 0)),
    spec("sliding_window", window_size=(LEFT, 0)),
    spec("sliding_window", window_size=(LEFT, RIGHT), causal=False),
    spec("local", chunk_size=CHUNK),
    spec("local", chunk_size=CHUNK, window_size=(LEFT, 0)),
    spec("varlen"),
    spec("varlen", causal=False),
    spec("cascade", prefixes=()),  # with shared prefixes: `test_cascade`
]

PLANS = {  # over pages of any numbers: what plans, and its arguments, from which `rule` follows
    "causal": ("quantized", {}),
    "all": ("quantized", dict(causal=False)),
    "window": ("sliding_window", dict(window_size=(LEFT, 0))),
    "untrimmed-window": ("quantized", dict(window_size=(LEFT, 0))),
    "local": ("local", dict(chunk_size=CHUNK)),
}

# Any two of lengths, heads, sizes, layouts and padding stand together in one of these cases.
ODD = [
    Case("padded", ((4, 6), (1, 70), (10, 17), (0, 9), (5, 2)), heads=(4, 1), padding_rows=2),
    Case("odd-blocks", ((7, 50), (1, 49), (33, 33)), (6, 3), head_size=96, value_head_size=64, block_size=24),
    Case("empty", ((0, 5), (5, 0), (0, 0), (2, 97)), (3, 3), value_head_size=128, layout="HND", padding_rows=1),
    Case("blocks-of-one", ((3, 51), (1, 1), (60, 60)), (2, 1), head_size=96, block_size=1, layout="HND"),
]
