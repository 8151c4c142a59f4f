"""A workload: one call of a path as plain numbers, which define its tensors and its expected output (`oracle`).

    {"path": "chunked_prefill", "lens": [[1, 5], [3, 70]], "window": [4, 0], "table": "every-other"}

is a batch of a decode and a chunk under a window, with every other column of a larger table as block table. Missing
fields have the defaults of `Workload`. The search draws such values, and the rows of the benchmark are workloads, too.
"""

import json
from dataclasses import asdict, dataclass, fields
from random import Random
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**31 - 1

ATTENTION = (
    "varlen",
    "chunked_prefill",
    "sliding_window",
    "local",
    "cascade",
    "speculative",
    "differential",
    "quantized",
    "mla",
    "mla_prefill",
    "context_parallel",
    "interval",
    "sparse",
    "compressed",
    "recurrent",
    "replay",
)
STATES = ("recurrent", "replay")  # paths of layers that keep a state
MOVES = ("kv_cache", "metadata", "state_cache")  # paths that move data or make tables: compared bit for bit
PATHS = (*ATTENTION, "merge", *MOVES)

PLANS = {  # the plans that a path's attention takes
    "quantized": ("chunked_prefill", "sliding_window", "local", "cascade", "speculative", "interval"),
    "mla": ("chunked_prefill", "speculative", "interval"),
}
OPERATIONS = {
    "kv_cache": (
        "write",
        "write_differential",
        "write_latents",
        "write_quantized",
        "copy_blocks",
        "swap_blocks",
        "compact",
        "gather",
    ),
    "metadata": ("positions", "slot_mapping", "advance", "block_table_from_slots", "ranks", "trees", "accept"),
    "sparse": ("attention", "latent_attention", "scores", "select", "slots", "write_index"),
    "compressed": ("all", "selected", "compress"),
    "recurrent": ("attention", "attention", "convolve"),
    "state_cache": ("copy", "accepted_slots"),
}
EXACT = ("select", "slots", "write_index")  # operations of `sparse` that are compared bit for bit
STORED = ("numbers", "e4m3", "e5m2", "int8", "int8-keys", "int4", "nvfp4")
FOUR_BITS = ("int4", "nvfp4")  # pools of two elements per byte
POOLS = ("NHD", "HND", "padded", "every-other", "offset", "expanded")
ROWS = ("plain", "padded", "every-other", "offset", "heads-last", "expanded", "expanded-size")
TABLES = ("plain", "tight", "every-other", "transposed")
OUTS = ("new", "contiguous", "padded", "every-other")
POISON = ("mixed", "nan", "finite", "none")
NANS = ("", "key", "value")
INTERVALS = ("any", "spans", "prefix")
SLOTS = ("one", "drafts", "checkpoints", "both")


@dataclass(frozen=True, repr=False)
class Workload:
    """One call of a path, as plain numbers that define all tensors.

    Attributes:
        path: one of `PATHS`.
        lens: `(query_len, seq_len)` of each sequence.
        heads: query heads and KV heads; in differential attention a pair of heads counts as two.
        head_size: elements of a query and a key; for latents the rank plus the rotary part.
        value_head_size: elements of a value; for latents the rank. 0: as `head_size`.
        block_size: tokens in a block.
        padding_rows: query rows after the last sequence.
        seed: of all numbers, and of the order of the blocks.
        dtype: of queries.
        operation: the function to call, where a path has several (`OPERATIONS`).
        pool: how the pools lie in memory, one of `POOLS`.
        rows: how queries lie in memory, one of `ROWS`.
        table: how the block table lies in memory, one of `TABLES`.
        out: where the output goes, one of `OUTS`.
        poison: the kind of values in memory that no query may see, one of `POISON`.
        nan_at: a NaN that queries do see, in a key or in a value.
        says_num_tokens: whether the batch contains the number of its query rows.
        says_num_keys: whether it contains the number of its keys.
        more_queries: how much larger than necessary its `max_query_len` is.
        more_keys: how much larger than necessary its `max_seq_len` is.
        causal: of the plan.
        window: of the plan.
        chunk_blocks: blocks in a chunk of local attention.
        prefixes: `(first, last, blocks)` that sequences share, outer ones first.
        trees: of drafts: "" for chains; else "bushy", "star", "deep", or "rooted", which does not depend on the seed.
        growing: nodes of each tree before those of the query rows.
        plan_of: the path of the plan, where a path takes several kinds (`PLANS`).
        stored: the format of the pools, one of `STORED`.
        scales: of fp8: "number", "heads" or "sequences".
        query_scale: whether queries are rounded to fp8, too.
        cache_scale: of quantized latents.
        workspace: tokens of context at a time, for each sequence.
        ranks: that share each sequence.
        interleave: tokens of a run on one rank.
        parts: the number of partial outputs to merge.
        intervals: the keys that queries see: any intervals, spans as of images, or a prefix; one of `INTERVALS`.
        topk: keys, or entries, that are selected for a query, at most.
        ratio: tokens of an entry.
        overlap: whether an entry is also computed from the tokens before its own.
        slots: of states: one per sequence, one per draft, one per block that ends, or both; one of `SLOTS`. Of replayed
            inputs "drafts" is a step of drafts, and with blocks the plan asks for some checkpoints.
        ring: inputs that a ring has room for.
        state_dtype: of the states.
        delta: whether a layer with states has the delta rule.
        per_channel: whether it has a decay per key channel.
        softmax_scale: None for the default.
        softcap: 0 for none.
        alibi: type of the slopes; "" for none.
        alibi_sqrt: whether ALiBi uses the square root of the distance.
        sinks: "" for none, "small", "large" (above all scores) or "mixed".
        batch_invariant: the same bits whatever else is in the batch.
    """

    path: str
    lens: tuple[tuple[int, int], ...] = ((1, 1),)
    heads: tuple[int, int] = (1, 1)
    head_size: int = 64
    value_head_size: int = 0
    block_size: int = 16
    padding_rows: int = 0
    seed: int = 0
    dtype: str = "float32"
    operation: str = ""
    pool: str = "NHD"
    rows: str = "plain"
    table: str = "plain"
    out: str = "new"
    poison: str = "none"
    nan_at: str = ""
    says_num_tokens: bool = True
    says_num_keys: bool = True
    more_queries: int = 0
    more_keys: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    chunk_blocks: int = 1
    prefixes: tuple[tuple[int, int, int], ...] = ()
    trees: str = ""
    growing: int = 0
    plan_of: str = ""
    stored: str = "numbers"
    scales: str = "number"
    query_scale: bool = False
    cache_scale: float = 1.0
    workspace: int = 64
    ranks: int = 2
    interleave: int = 1
    parts: int = 2
    intervals: str = "any"
    topk: int = 8
    ratio: int = 4
    overlap: bool = False
    slots: str = "one"
    ring: int = 8
    state_dtype: str = "float32"
    delta: bool = True
    per_channel: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    alibi_sqrt: bool = False
    sinks: str = ""
    batch_invariant: bool = False

    def __repr__(self) -> str:
        return self._as_code(self.path, "path")

    def _as_code(self, first: str, *left_out: str) -> str:
        """Write it as code: one argument, the lengths, and fields that differ from their defaults, except some."""
        said = {of.name: getattr(self, of.name) for of in fields(self) if of.name not in left_out}
        default = {of.name: of.default for of in fields(self)}
        shown = [f"{name}={value!r}" for name, value in said.items() if name == "lens" or value != default[name]]
        return f"{type(self).__name__}({', '.join([repr(first), *shown])})"

    @property
    def is_exact(self) -> bool:
        """Whether it moves data or makes tables, and is compared bit for bit."""
        return self.path in MOVES or (self.path == "sparse" and self.operation in EXACT)

    @property
    def plan_path(self) -> str:
        """The path of its plan."""
        return self.plan_of or self.path

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_head_size or self.head_size

    @property
    def made_sizes(self) -> tuple[int, int]:
        """Elements of a key, without its rotary part, and of a value that are expanded from a latent."""
        return (128, 128) if self.value_size == 512 else (16, 24)

    @property
    def rope_size(self) -> int:
        """Elements of a latent's key that are rotary."""
        return self.head_size - self.value_size

    @property
    def query_size(self) -> int:
        """Elements of a query."""
        return self.made_sizes[0] + self.rope_size if self.path == "mla_prefill" else self.head_size

    @property
    def output_size(self) -> int:
        """Elements of an output."""
        return self.made_sizes[1] if self.path == "mla_prefill" else self.value_size

    @property
    def chunk(self) -> int:
        """Tokens in a chunk of local attention; 0 for none."""
        return self.chunk_blocks * self.block_size if self.plan_path == "local" else 0

    @property
    def num_tokens(self) -> int:
        """Query rows of all sequences."""
        return sum(q for q, _ in self.lens)

    @property
    def sizes(self) -> str:
        """The head sizes and types: most kernels are compiled once for each."""
        return f"{self.head_size}/{self.value_size} {self.dtype} {self.stored}"

    @property
    def has_trees(self) -> bool:
        """Whether its sequences end with drafted trees."""
        return bool(self.trees) and (
            self.plan_path == "speculative" or self.operation in ("compact", "trees", "accept")
        )

    def nodes(self, i: int) -> int:
        """Return how many nodes the tree of a sequence has: its query rows are the last of them."""
        q, s = self.lens[i]
        return min(q + self.growing, s)

    def parents(self, i: int) -> list[int]:
        """Return the node that each node of a tree follows, -1 for a root."""
        chosen, count = Random(f"{self.seed}/{i}"), self.nodes(i)
        if self.trees == "rooted":
            return [-1, *map(Random(i).randrange, range(1, count))]
        one_root = self.operation in ("compact", "accept")
        least = 0 if one_root else -1
        if self.trees == "star":
            return [-1 if node == 0 else 0 for node in range(count)]
        if self.trees == "deep":
            return [
                node - 1 if chosen.random() < 0.9 else chosen.randint(min(least, node - 1), node - 1)
                for node in range(count)
            ]
        return [-1 if node == 0 else chosen.randint(least, node - 1) for node in range(count)]

    def span(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the first and the last key that each query of a sequence may see, `[t]` each, by position.

        A query sees all keys in between, and none if the first is after the last. Trees are treated as chains.
        """
        q, s = self.lens[i]
        if self.plan_path == "interval":
            first, last = torch.tensor(self.interval_rows(i), dtype=torch.int64).view(q, 2).unbind(1)
            return first.clamp(min=0), last.clamp(max=s - 1)
        at = torch.arange(s - q, s)
        left, right = self.window
        first = torch.zeros_like(at) if left < 0 else at - left
        last = torch.full_like(at, s - 1) if right < 0 else at + right
        if self.causal:
            last = torch.minimum(last, at)
        if self.chunk:
            begin = at.div(self.chunk, rounding_mode="floor") * self.chunk
            first, last = torch.maximum(first, begin), torch.minimum(last, begin + self.chunk - 1)
        return first.clamp(min=0), last.clamp(max=s - 1)

    def interval_rows(self, i: int) -> list[tuple[int, int]]:
        """Return the first and the last key that each query of a sequence sees, before they are clamped."""
        (q, s), chosen = self.lens[i], Random(f"{self.seed}/intervals/{i}")
        if self.intervals == "any":
            return [
                (
                    chosen.choice((-LARGEST - 1, -3, 0, chosen.randint(0, s), chosen.randint(0, s), LARGEST)),
                    chosen.choice((s - 1, s - 1, chosen.randint(-1, s - 1), chosen.randint(-1, s - 1), -LARGEST - 1)),
                )
                for _ in range(q)
            ]
        ends = sorted(chosen.sample(range(s), min(s, 4)))
        spans = (
            [(0, ends[0])] if self.intervals == "prefix" and ends else list(zip(ends[::2], ends[1::2], strict=False))
        )
        rows = []
        for at in range(s - q, s):  # a query sees all earlier keys, itself, and the whole of its span
            reaches = [last for first, last in spans if first <= at <= last or self.intervals == "prefix"]
            rows.append((0, max([at, *reaches])))
        return rows

    def as_line(self) -> str:
        """Write the fields that differ from their defaults as one line of JSON."""
        return json.dumps({name: value for name, value in asdict(self).items() if value != DEFAULTS.get(name)})


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Workload) if field.name != "path"}


def workload_of(line: str) -> Workload:
    """Parse a line that `Workload.as_line` wrote.

    Raises:
        ValueError: if it is not a workload.
    """
    try:
        values = json.loads(line)
        lists = {
            name: tuple(tuple(x) if isinstance(x, list) else x for x in value)
            for name, value in values.items()
            if isinstance(value, list)
        }
        work = Workload(**{**values, **lists})
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"replay: expected a workload as JSON, got {line!r}: {error}") from None
    if work.path not in PATHS:
        raise ValueError(f"replay: expected a path of {', '.join(PATHS)}, got {work.path!r}")
    return work
