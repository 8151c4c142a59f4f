"""Attention in steps that share no code with the reference: a mistake overrides one of them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinattn.kit import oracle
from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.where import Where, anywhere, causal, has

SPLITS = (16, 32, 64, 128, 256, 512)  # tokens that a kernel may take at a time
INFINITY = math.inf
GROUP = 128  # elements of a packed latent under one scale


KNOWN: list[type["Formula"]] = []  # all mistakes, in the order of their definition


class Mask(NamedTuple):
    """The parameters of a mask; a mistake replaces one of them.

    Attributes:
        causal: later keys are hidden.
        left: keys that a window shows before a query, -1 for all.
        right: keys that it shows after a query, -1 for all.
        chunk: tokens in a chunk of local attention, 0 for none.
    """

    causal: bool
    left: int
    right: int
    chunk: int

    def visible(self, pos: Tensor, j: Tensor, s: int) -> Tensor:
        """Return whether queries at `pos` `[t, 1]` see keys `j` `[1, n]` of a sequence of `s` keys, `[t, n]`."""
        seen = (j < s) & (j >= 0)
        if self.causal:
            seen = seen & (j <= pos)
        if self.left >= 0:
            seen = seen & (j >= pos - self.left)
        if self.right >= 0 and not self.causal:
            seen = seen & (j <= pos + self.right)
        if self.chunk:
            seen = seen & (j // self.chunk == pos // self.chunk)
        return seen.expand(len(pos), j.shape[1])


class Formula:
    """The base of all mistakes.

    `variants` are the values of a mistake's parameter, such as a tile size; all of them are tried. `past` lists the
    kinds of large batches in which it shows: those of many "sequences", or many "rows" of queries or keys. A mistake
    shows only in calls with the option `option`, and for which `where` holds.
    """

    variants: Sequence[Any] = (None,)
    past: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    option: str = ""
    where: Where = anywhere

    def __init_subclass__(cls, is_base: bool = False) -> None:
        """Add a mistake, but not a base, to `KNOWN`."""
        super().__init_subclass__()
        if not is_base:
            KNOWN.append(cls)

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        """Take the inputs of a call, on the CPU."""
        self.example, self.arguments, self.variant = example, arguments, variant

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return False if the mistake certainly does not change the outputs of a call, so they need not be computed."""
        return (not cls.option or has(arguments, cls.option)) and cls.where(example, arguments)

    def answers(self) -> Answers:
        """Compute the outputs."""
        raise NotImplementedError


class Attention(Formula, is_base=True):
    """Attention over pages, rows or latents, one sequence at a time."""

    paths: tuple[str, ...] = (
        *("varlen", "chunked_prefill", "sliding_window", "local", "cascade", "mla", "quantized", "speculative"),
        *("interval", "sparse", "sparse_latents", "packed_latents", "packed_mla"),
    )

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        """Take the inputs of a call, on the CPU."""
        super().__init__(example, arguments, variant)
        a = arguments
        self.query = a["query"].double()
        self.batch = a["batch"]
        self.lens = example.lens
        self.first_rows = tuple(itertools.accumulate((q for q, _ in self.lens), initial=0))
        left, right = a.get("window_size", (-1, -1))
        if "trees" in a:  # the window counts along a branch, so it is in the mask of the tree
            self.window_of_tree, left = left, -1
        self.mask = Mask(causal(example, a), left, right, a.get("chunk_size", 0))
        scale = a.get("softmax_scale")
        self.scale = example.head_size**-0.5 if scale is None else scale
        self.softcap, self.slopes, self.sinks = a.get("softcap", 0.0), a.get("alibi_slopes"), a.get("sinks")
        self.key_pool, self.value_pool = self._pools()

    def _pools(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values by slot, `[slots, hk, d]`, in the type of the pools."""
        a = self.arguments
        if "cache" in a:  # latents
            rows = a["cache"].flatten(0, 1)
            scale = a.get("cache_scale", 1.0)
            rows = rows.double() * scale if scale != 1 else rows
            rows = (rows if rows.is_floating_point() else self._unpacked(rows, a["latent_rank"]))[:, None]
            return rows[..., : self.example.head_size], rows[..., : a["latent_rank"]]
        if "key" in a:
            return a["key"], a["value"]
        pools = [a[name].flatten(0, 1) for name in ("key_cache", "value_cache")]
        key, value = (x.view(a["scales"].format) if x.dtype == torch.uint8 else x for x in pools)
        return key, value

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply quantized keys and values of the current sequence by their scales."""
        return key * self._scale("key"), value * self._scale("value")

    def _scale(self, name: str) -> Tensor | float:
        """Return the scale of keys or values: a number, or one for each KV head of the sequence, `[hk, 1]`."""
        scale = getattr(self.arguments["scales"], name)
        if not isinstance(scale, Tensor):
            return float(scale)
        return (scale[self.sequence] if scale.ndim == 2 else scale).double()[:, None]

    def _unpacked(self, rows: Tensor, rank: int) -> Tensor:
        """Return packed latents dequantized: each value times the scale of its group, and rotary keys after them."""
        scales = self._group_scales(rows, rank)[:, self._group_of(rank)]
        numbers = torch.cat([self._quantized_latents(rows, rank) * scales, self._rotary_keys(rows, rank)], 1)
        return numbers.float().double()  # overflows as in float32

    def _quantized_latents(self, rows: Tensor, rank: int) -> Tensor:
        return self._as_type(rows, 0, rank, torch.float8_e4m3fn)

    def _group_scales(self, rows: Tensor, rank: int) -> Tensor:
        return self._as_type(rows, rank, rank + rank // GROUP * 4, torch.float32)

    def _group_of(self, rank: int) -> Tensor:
        """Return the group of each element of a latent."""
        return torch.arange(rank) // GROUP

    def _rotary_keys(self, rows: Tensor, rank: int) -> Tensor:
        begin = rank + rank // GROUP * 4
        return self._as_type(rows, begin, begin + 2 * self._rope_size(rank), torch.bfloat16)

    def _rope_size(self, rank: int) -> int:
        return self.example.head_size - rank

    def _as_type(self, rows: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Read some bytes of each row in a type."""
        return rows[:, begin:end].contiguous().view(dtype).double()

    def answers(self) -> Answers:
        """Attend in each sequence."""
        t, h = self.query.shape[:2]
        out = torch.zeros(t, h, self.value_pool.shape[-1], dtype=torch.float64)
        lse = torch.full((t, h), -INFINITY, dtype=torch.float64)
        row = 0
        for i, (q, _) in enumerate(self.lens):
            if q:
                out[row : row + q], lse[row : row + q] = self._sequence(i, self.query[row : row + q])
            row += q
        out, lse = self._finish(out, lse)
        return {"out": out, "lse": lse}

    def _sequence(self, i: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from the queries of a sequence."""
        (q, s), self.sequence = self.lens[i], i
        j = self._keys(i)
        pos = self._positions(q, s, i)[:, None]
        key, value = self._load(i, j)
        if "scales" in self.arguments:
            key, value = self._dequantize(key, value)
        scores = self._scores(query, self._grouped(key), pos, j[None])
        visible = self._visible(pos, j[None], s, q)
        if "trees" in self.arguments:
            visible = self._in_tree(visible, oracle.sight(self.example, i).visible)
        rows = slice(self.first_rows[i], self.first_rows[i] + q)
        if "first_visible" in self.arguments:
            first, last = (self.arguments[name][rows, None] for name in ("first_visible", "last_visible"))
            visible = visible & self._in_interval(first, last, j[None])
        if "positions" in self.arguments:
            counts = self._counts(self.arguments["positions"][rows], s)
            visible = visible & (counts > 0)
            scores = scores + counts.log().masked_fill(counts == 0, 0.0)  # a key that is listed twice counts twice
        return self._softmax(scores, visible, self._grouped(value))

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        """Return whether keys `j` `[1, n]` are in the intervals of the queries, `first` and `last` `[t, 1]`."""
        return (j >= first) & (j <= last)

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        """Return how often each of `s` keys is in the list of each query, `[t, s]`."""
        counts = torch.zeros(len(positions), s + 1, dtype=torch.float64)
        at = torch.where(positions < 0, s, positions).long()
        return counts.scatter_add_(1, at, torch.ones_like(at, dtype=torch.float64))[:, :s]

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        """Restrict a mask to the mask of a tree; `visible` may have more columns, if too many keys were loaded."""
        s = mask.shape[1]
        return torch.cat([visible[:, :s] & mask, visible[:, s:]], dim=-1)

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        """Return the positions of the queries."""
        return torch.arange(s - q, s)

    def _keys(self, i: int) -> Tensor:
        """Return the positions of the keys to load."""
        return torch.arange(self.lens[i][1])

    def _load(self, i: int, j: Tensor) -> tuple[Tensor, Tensor]:
        """Load keys and values in float64."""
        slots = self._slots(i, j).clamp(0, len(self.key_pool) - 1)
        return self.key_pool[slots].double(), self.value_pool[slots].double()

    def _slots(self, i: int, j: Tensor) -> Tensor:
        """Return the slots of keys."""
        if self.batch.block_table is None:
            return sum(s for _, s in self.lens[:i]) + j
        p = self.example.block_size
        return self._blocks(i, j // p) * p + j % p

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        """Look up columns of the block table."""
        return self.batch.block_table[i].long()[column.clamp(max=self.batch.block_table.shape[1] - 1)]

    def _grouped(self, x: Tensor) -> Tensor:
        """Repeat KV heads to one per query head, `[n, h, d]`."""
        group = self.query.shape[1] // x.shape[1]
        return x if group == 1 else x.repeat_interleave(group, dim=1)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        """Return the mask, `[t, n]`."""
        return self.mask.visible(pos, j, s)

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        """Return the scores, `[h, t, n]`."""
        scores = self.scale * self._products(query, key)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            distance = self._distance(pos, j)
            distance = distance.abs().sqrt() if self.arguments.get("alibi_sqrt") else distance
            scores = scores - self.slopes.double()[:, None, None] * distance
        return scores

    def _products(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the products of queries and keys, `[h, t, n]`."""
        return query.transpose(0, 1) @ key.permute(1, 2, 0)

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        """Return the distance of keys and queries; in a tree, by depth."""
        if "trees" not in self.arguments:
            return (pos - j).abs()
        depths: list[int] = []
        for parent in self.example.parents(self.sequence):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        of_nodes, first, at = torch.tensor(depths), self.lens[self.sequence][1] - len(depths), j.clone()
        inside = (j >= first) & (j < first + len(depths))
        at[inside] = first + of_nodes[(j[inside] - first).long()]
        return (first + of_nodes[len(depths) - len(pos) :, None] - at).abs()

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and LSE of all keys."""
        masked = self._hide(scores, visible)
        peak = self._peak(masked)
        weights = self._exp(masked - peak)
        total = weights.sum(-1, keepdim=True) + self._of_sinks(peak)
        out = self._product(weights, value, visible) / self._divisor(total, weights).transpose(0, 1)
        empty = total <= 0
        out = out.masked_fill(empty.transpose(0, 1), 0.0)
        lse = torch.where(empty, -INFINITY, total.log() + peak)
        return self._of_empty(out, self._log(lse, total, peak)[..., 0].T, visible, value)

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Set hidden scores to -inf."""
        return scores.masked_fill(~visible, -INFINITY)

    def _peak(self, masked: Tensor) -> Tensor:
        """Return the row maximum, which is subtracted before the exponential."""
        top = masked.amax(-1, keepdim=True) if masked.shape[-1] else masked.new_full((*masked.shape[:2], 1), -INFINITY)
        if self.sinks is not None:
            top = torch.maximum(top, self.sinks.double()[:, None, None])
        return top.masked_fill(top == -INFINITY, 0.0)

    def _exp(self, x: Tensor) -> Tensor:
        """Return the exponential."""
        return x.exp()

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        """Return the term of the sinks in the sum."""
        return 0.0 if self.sinks is None else (self.sinks.double()[:, None, None] - peak).exp()

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Return the weighted sum of values, without those that no query sees."""
        value = value.masked_fill(~visible.any(0)[:, None, None], 0.0)
        return self._weighted(weights, value)

    def _weighted(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the sums of values under the weights, `[t, h, d]`."""
        return (weights @ value.transpose(0, 1)).transpose(0, 1)

    def _divisor(self, total: Tensor, weights: Tensor) -> Tensor:
        """Return the divisor of the weighted sum."""
        return total

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        """Return the log-sum-exp."""
        return lse

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Fill in the output and LSE of fully masked rows."""
        return out, lse

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the output and LSE of the whole batch."""
        return out, lse


def as_contiguous(x: Tensor) -> Tensor:
    """Read the memory of a tensor as if it were contiguous."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return with_strides(x, tuple(strides))


def with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Read the memory of a tensor with other strides, or return the tensor if its memory is too small for them."""
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    if 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) > room:
        return x
    return x.as_strided(x.shape, strides)
