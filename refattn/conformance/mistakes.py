"""Known mistakes: the formula once more, in steps, and classes that get one step wrong.

A kernel that gives the same answer as one of them, on the same inputs, has probably made the same mistake. The report
then shows the docstring of that class. `Attention` itself is right; it shares no code with the reference.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refattn.conformance.example import Answers, Arguments, Example

SPLITS = (16, 32, 64, 128, 256, 512)  # tokens that a kernel may take at a time
INFINITY = math.inf


class Formula:
    """The base of all mistakes. `variants` are unknown numbers that a mistake depends on; all of them are tried."""

    variants: Sequence[Any] = (None,)
    paths: tuple[str, ...] = ()

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        """Take the inputs of a call, on the CPU."""
        self.example, self.arguments, self.variant = example, arguments, variant

    def answers(self) -> Answers:
        """Compute the answers."""
        raise NotImplementedError


class Attention(Formula):
    """Attention over pages, rows or latents, one sequence at a time."""

    paths: tuple[str, ...] = (
        *("dense", "chunked_prefill", "sliding_window", "local", "cascade", "mla", "quantized", "speculative"),
    )

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        """Take the inputs of a call, on the CPU."""
        super().__init__(example, arguments, variant)
        a = arguments
        self.query = a["query"].double()
        self.batch = a["batch"]
        self.lens = example.lens
        self.causal, self.window = a.get("causal", True), tuple(a.get("window_size", (-1, -1)))
        self.chunk = a.get("chunk_size", 0)
        scale = a.get("softmax_scale")
        self.scale = example.head_size**-0.5 if scale is None else scale
        self.softcap, self.slopes, self.sinks = a.get("softcap", 0.0), a.get("alibi_slopes"), a.get("sinks")
        self.key_pool, self.value_pool = self._pools()

    def _pools(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as rows of all slots `[slots, hk, d]`."""
        a = self.arguments
        if "cache" in a:  # latents
            rows = a["cache"].double().flatten(0, 1)[:, None]
            return rows[..., : self.example.head_size], rows[..., : a["latent_rank"]]
        if "key" in a:
            return a["key"].double(), a["value"].double()
        key, value = (a[name].to(torch.float64).flatten(0, 1) for name in ("key_cache", "value_cache"))
        if "scales" in a:
            return self._dequantize(key, value)
        return key, value

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply codes with their scales."""
        return key * self.arguments["scales"].key, value * self.arguments["scales"].value

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
        q, s = self.lens[i]
        j = self._keys(i)
        pos = self._positions(q, s, i)[:, None]
        key, value = self._load(i, j)
        scores = self._scores(query, self._grouped(key), pos, j[None])
        visible = self._visible(pos, j[None], s, q)
        if "trees" in self.arguments:
            visible = self._in_tree(visible, self.example.masks()[i])
        return self._softmax(scores, visible, self._grouped(value))

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        """Return who may see whom where the queries are nodes of a tree; more keys may be loaded than there are."""
        s = mask.shape[1]
        return torch.cat([visible[:, :s] & mask, visible[:, s:]], dim=-1)

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        """Return where the queries stand."""
        if "trees" in self.arguments:
            parents = self.example.parents(q)
            depths: list[int] = []
            for parent in parents:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
            self.depths = torch.tensor(depths)
        return torch.arange(s - q, s)

    def _keys(self, i: int) -> Tensor:
        """Return which keys are loaded."""
        return torch.arange(self.lens[i][1])

    def _load(self, i: int, j: Tensor) -> tuple[Tensor, Tensor]:
        """Load keys and values."""
        slots = self._slots(i, j).clamp(0, len(self.key_pool) - 1)
        return self.key_pool[slots], self.value_pool[slots]

    def _slots(self, i: int, j: Tensor) -> Tensor:
        """Return where the keys lie."""
        if self.batch.block_table is None:
            return sum(s for _, s in self.lens[:i]) + j
        p = self.example.block_size
        return self._blocks(i, j // p) * p + j % p

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        """Look blocks up."""
        return self.batch.block_table[i].long()[column.clamp(max=self.batch.block_table.shape[1] - 1)]

    def _grouped(self, x: Tensor) -> Tensor:
        """Give each query head its key head, `[n, h, d]`."""
        return x.repeat_interleave(self.query.shape[1] // x.shape[1], dim=1)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        """Return who may see whom, `[t, n]`."""
        left, right = self.window
        seen = (j < s) & (j >= 0)
        if self.causal:
            seen = seen & (j <= pos)
        if left >= 0:
            seen = seen & (j >= pos - left)
        if right >= 0 and not self.causal:
            seen = seen & (j <= pos + right)
        if self.chunk:
            seen = seen & (j // self.chunk == pos // self.chunk)
        return seen.expand(len(pos), j.shape[1])

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        """Return the scores, `[h, t, n]`."""
        scores = self.scale * torch.einsum("thd,nhd->htn", query, key)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return scores

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        """Return how far a key is from a query; of a tree, by depth."""
        if "trees" not in self.arguments:
            return (pos - j).abs()
        first = int(pos[0])
        at = j.clone()
        inside = (j >= first) & (j < first + len(self.depths))
        at[inside] = first + self.depths[(j[inside] - first).long()]
        return (first + self.depths[:, None] - at).abs()

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and LSE of all keys."""
        masked = self._hide(scores, visible)
        peak = self._peak(masked)
        weights = self._exp(masked - peak)
        total = weights.sum(-1, keepdim=True) + self._of_sinks(peak)
        out = self._product(weights, value, visible) / self._divisor(total, weights).transpose(0, 1)
        empty = ~(total > 0) & ~total.isnan()
        out = out.masked_fill(empty.transpose(0, 1), 0.0)
        lse = torch.where(empty, -INFINITY, total.log() + peak)
        return self._of_empty(out, self._log(lse, total, peak)[..., 0].T, visible, value)

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Hide scores."""
        return scores.masked_fill(~visible, -INFINITY)

    def _peak(self, masked: Tensor) -> Tensor:
        """Return what is subtracted before the exponential."""
        top = masked.amax(-1, keepdim=True) if masked.shape[-1] else masked.new_full((*masked.shape[:2], 1), -INFINITY)
        if self.sinks is not None:
            top = torch.maximum(top, self.sinks.double()[:, None, None])
        return top.masked_fill(top == -INFINITY, 0.0)

    def _exp(self, x: Tensor) -> Tensor:
        """Return the exponential."""
        return x.exp()

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        """Return what the sinks add to the sum."""
        return 0.0 if self.sinks is None else (self.sinks.double()[:, None, None] - peak).exp()

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Return the weighted sum of values; those that nobody sees stay out."""
        value = value.masked_fill(~visible.any(0)[:, None, None], 0.0)
        return torch.einsum("htn,nhd->thd", weights, value)

    def _divisor(self, total: Tensor, weights: Tensor) -> Tensor:
        """Return what the sum is divided by."""
        return total

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        """Return the log-sum-exp."""
        return lse

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return what rows answer that see nothing."""
        return out, lse

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Hand over."""
        return out, lse


# --- who may see whom ---


class CausalTopLeft(Attention):
    """The causal mask is aligned top-left: query i is at position i instead of seq_len - query_len + i."""

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return torch.arange(q)


class CausalPadded(Attention):
    """Queries are aligned to the longest sequence of the batch (max_seq_len), not to their own seq_len."""

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return torch.arange(q) + max(s for _, s in self.lens) - q


class CausalMaxQuery(Attention):
    """Queries are at seq_len - max_query_len + i: the batch's longest query length instead of their own."""

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return torch.arange(q) + s - max(q for q, _ in self.lens)


class CausalSeesNext(Attention):
    """The causal mask shows one key too many: j <= i + 1 instead of j <= i."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) | (super()._visible(pos + 1, j, s, q) & (j == pos + 1))


class CausalHidesItself(Attention):
    """The causal mask hides a query's own key: j < i instead of j <= i."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j != pos)


class CausalIgnored(Attention):
    """There is no causal mask: each query sees later keys too."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        later = (j > pos) & (j < s) & self.causal
        return super()._visible(pos, j, s, q) | later


class CausalAlways(Attention):
    """causal=False is ignored: later keys are hidden."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen = super()._visible(pos, j, s, q)
        return seen & (j <= pos) if self.window[1] < 0 else seen


class WindowOneTooMany(Attention):
    """The window shows one key too many: a window (left, right) shows the left keys before a query and itself."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        left, right = self.window
        self.window = (left + 1 if left >= 0 else left, right)
        seen = super()._visible(pos, j, s, q)
        self.window = (left, right)
        return seen


class WindowOneTooFew(Attention):
    """The window shows one key too few: left is used as the size of the window, itself included."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        hidden = (j == pos - self.window[0]) if self.window[0] >= 0 else torch.zeros(1, 1, dtype=torch.bool)
        return super()._visible(pos, j, s, q) & ~hidden


class WindowIgnored(Attention):
    """The window is ignored: a query sees keys before it."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        self.window, window = (-1, self.window[1]), self.window
        seen = super()._visible(pos, j, s, q)
        self.window = window
        return seen


class WindowOfSequence(Attention):
    """The window counts back from the end of the sequence, not from each query."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        self.window, window = (-1, self.window[1]), self.window
        seen = super()._visible(pos, j, s, q)
        self.window = window
        return seen & (j >= s - 1 - window[0]) if window[0] >= 0 else seen


class WindowOfFirstQuery(Attention):
    """The window counts back from the first query of the sequence, for all of its queries."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        self.window, window = (-1, self.window[1]), self.window
        seen = super()._visible(pos, j, s, q)
        self.window = window
        return seen & (j >= pos[:1] - window[0]) if window[0] >= 0 else seen


class WindowTopLeft(Attention):
    """The window is aligned top-left: it lies around row i, not around position seq_len - query_len + i."""

    variants: Sequence[Any] = ("left side", "both sides")

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        window, row = self.window, pos - (s - q)
        left, right = window
        is_both = self.variant == "both sides" and not self.causal and right >= 0
        self.window = (-1, -1 if is_both else right)
        seen = super()._visible(pos, j, s, q)
        self.window = window
        seen = seen & (j <= row + right) if is_both else seen
        return seen & (j >= row - left) if left >= 0 else seen


class WindowRightIgnored(Attention):
    """The right side of the window is ignored: all later keys are seen."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        self.window, window = (self.window[0], -1), self.window
        seen = super()._visible(pos, j, s, q)
        self.window = window
        return seen


class WindowRightZero(Attention):
    """The right side of the window is taken as 0: no later key is seen."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j <= pos)


class WindowOfBlocks(Attention):
    """The window is rounded to whole blocks: it begins at the block that holds its first key."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        self.window, window = (-1, self.window[1]), self.window
        seen = super()._visible(pos, j, s, q)
        self.window = window
        p = self.example.block_size
        return seen & (j // p * p + p - 1 >= pos - window[0]) if window[0] >= 0 else seen


class ChunkIgnored(Attention):
    """Chunks are ignored: a query sees the keys of earlier chunks."""

    paths: tuple[str, ...] = ("local",)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        self.chunk, chunk = 0, self.chunk
        seen = super()._visible(pos, j, s, q)
        self.chunk = chunk
        return seen


class ChunkAsWindow(ChunkIgnored):
    """A chunk is treated as a sliding window of that many tokens."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j > pos - self.chunk)


class ChunkFromFirstQuery(ChunkIgnored):
    """Chunks are counted from the first new token, not from the beginning of the sequence."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        first = s - q
        same = (pos - first).div(self.chunk, rounding_mode="floor") == (j - first).div(
            self.chunk, rounding_mode="floor"
        )
        return super()._visible(pos, j, s, q) & same


class ChunkOneLate(ChunkIgnored):
    """Chunks end one token late: (i - 1) // chunk instead of i // chunk."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (
            (pos - 1).clamp(min=0) // self.chunk == (j - 1).clamp(min=0) // self.chunk
        )


class ChunkOneEarly(ChunkIgnored):
    """Chunks end one token early: (i + 1) // chunk instead of i // chunk."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & ((pos + 1) // self.chunk == (j + 1) // self.chunk)


class ChunkOfLastQuery(ChunkIgnored):
    """All queries of a sequence get the chunk of its last one."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j >= (s - 1) // self.chunk * self.chunk)


class FirstKeyDropped(Attention):
    """The first key of each sequence is never seen."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j > 0)


class LastKeyDropped(Attention):
    """The last key of each sequence is never seen: seq_len - 1 keys are read."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j < s - 1)


class NewTokensUnseen(Attention):
    """Only the context is seen: seq_lens is used as the length without the new tokens."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j < s - q)


class PastTheEnd(Attention):
    """Keys past a sequence's end are seen: the last block is read as if it were full."""

    def _keys(self, i: int) -> Tensor:
        p = self.example.block_size
        return torch.arange(-(-self.lens[i][1] // p) * p)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) | (j >= s)


class EverybodyLongest(Attention):
    """All sequences are treated as if they were as long as the longest: max_seq_len instead of seq_lens."""

    def _keys(self, i: int) -> Tensor:
        return torch.arange(max(s for _, s in self.lens))

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) | (j >= s)


class LengthsOfNeighbour(Attention):
    """seq_lens is read one sequence off: each sequence has the length of the one before."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        lengths = [s for _, s in self.lens]
        self.lens = tuple((q, lengths[max(i - 1, 0)]) for i, (q, _) in enumerate(self.lens))


# --- where the keys are ---


class TableIgnored(Attention):
    """The block table is ignored: blocks are read in the order in which they lie in the pool."""

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return column


class TableOfFirst(Attention):
    """Every sequence reads the first row of the block table."""

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return super()._blocks(0, column)


class TableOneColumnLate(Attention):
    """The block table is read one column late."""

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return super()._blocks(i, column + 1)


class TableWithoutPadding(Attention):
    """Rows of the block table are assumed to be as wide as the longest sequence needs, whatever the stride is."""

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        p = self.example.block_size
        columns = -(-max(s for _, s in self.lens) // p)
        flat = self.batch.block_table.flatten().long()
        return flat[(i * columns + column).clamp(max=len(flat) - 1)]


class BlockForSlot(Attention):
    """An entry of the block table is used as the slot of a token: it is not multiplied by the block size."""

    def _slots(self, i: int, j: Tensor) -> Tensor:
        p = self.example.block_size
        return self._blocks(i, j // p) + j % p


class LastBlockDropped(Attention):
    """Only whole blocks are read: seq_len // block_size, not rounded up."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        p = self.example.block_size
        return super()._visible(pos, j, s, q) & (j < s // p * p)


class FirstBlockOnly(Attention):
    """Only the first block of the table is followed: later keys come from the same block again."""

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return super()._blocks(i, column * 0)


class ValuesAreKeys(Attention):
    """Values are read from the pool of keys."""

    def _pools(self) -> tuple[Tensor, Tensor]:
        key, value = super()._pools()
        return (key, key) if key.shape == value.shape else (key, value)


class ValuesInOrder(Attention):
    """The block table is followed for keys, not for values."""

    def _load(self, i: int, j: Tensor) -> tuple[Tensor, Tensor]:
        return super()._load(i, j)[0], self.value_pool[j.clamp(max=len(self.value_pool) - 1)]


class HeadsBeforeTokens(Attention):
    """Pages are read as [n, hk, p, d], where they are [n, p, hk, d]."""

    def _pools(self) -> tuple[Tensor, Tensor]:
        p = self.example.block_size
        key, value = (
            x.unflatten(0, (-1, p)).flatten(1, 2).unflatten(1, (x.shape[1], p)).transpose(1, 2).flatten(0, 1)
            for x in super()._pools()
        )
        return key, value


class StridesAssumed(Attention):
    """A tensor is assumed to be contiguous: its strides are ignored."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        words = variant or ("query", "key", "value", "key_cache", "value_cache", "cache")
        flat = {word: _as_contiguous(arguments[word]) for word in words if word in arguments}
        super().__init__(example, {**arguments, **flat}, variant)

    variants: Sequence[Any] = (
        None,
        ("query",),
        ("key_cache", "value_cache", "key", "value", "cache"),
        ("key_cache",),
        ("value_cache",),
    )


class LastStrideAssumed(Attention):
    """The elements of a row are assumed to be contiguous: the last stride is ignored."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        words = variant or ("query", "key", "value", "key_cache", "value_cache", "cache")
        flat = {
            word: _with_strides(arguments[word], (*arguments[word].stride()[:-1], 1))
            for word in words
            if word in arguments
        }
        super().__init__(example, {**arguments, **flat}, variant)

    variants: Sequence[Any] = StridesAssumed.variants


# --- heads ---


class GroupsInterleaved(Attention):
    """Query head h reads key head h % hk, where it is h // (heads / key heads)."""

    def _grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.query.shape[1] // x.shape[1], 1)


class FirstKeyHead(Attention):
    """All query heads read key head 0."""

    def _grouped(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, self.query.shape[1], -1)


# --- scores ---


class ScaleMissing(Attention):
    """Scores are not scaled."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = 1.0


class ScaleFixed(Attention):
    """The given scale is ignored: it is always head_size ** -0.5."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = example.head_size**-0.5


class ScaleOfValue(Attention):
    """The scale is computed from the head size of the values."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = (example.value_head_size or example.head_size) ** -0.5


class ScaleTwice(Attention):
    """Scores are scaled twice."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = self.scale**2


class ScaleZeroIsDefault(Attention):
    """A scale of 0 is treated as no scale (`scale or default`)."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = self.scale or example.head_size**-0.5


class ScaleNegativePeak(Attention):
    """The maximum is taken before the scale: under a negative scale it is the smallest score, and exp overflows."""

    def _peak(self, masked: Tensor) -> Tensor:
        if self.scale >= 0:
            return super()._peak(masked)
        low = masked.masked_fill(masked == -INFINITY, INFINITY).amin(-1, keepdim=True)
        return low.masked_fill(low == INFINITY, 0.0)

    def _exp(self, x: Tensor) -> Tensor:
        return x.float().exp().double()


class SoftcapIgnored(Attention):
    """The softcap is ignored."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.softcap = 0.0


class SoftcapUnmasks(Attention):
    """The softcap comes after the mask: tanh(-inf) * cap = -cap, so hidden keys are seen again."""

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        self.softcap, cap = 0.0, self.softcap
        scores = super()._scores(query, key, pos, j)
        self.softcap = cap
        return scores

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        masked = super()._hide(scores, visible)
        return self.softcap * torch.tanh(masked / self.softcap) if self.softcap else masked

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return (
            torch.einsum("htn,nhd->thd", weights, value) if self.softcap else super()._product(weights, value, visible)
        )


class SoftcapUnscaled(Attention):
    """The softcap bounds the products before they are scaled."""

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        products = torch.einsum("thd,nhd->htn", query, key)
        if self.softcap:
            products = self.softcap * torch.tanh(products / self.softcap)
        scores = self.scale * products
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return scores


class SoftcapWithoutFactor(Attention):
    """The factor of the softcap is missing: tanh(score / cap), not times cap."""

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        scores = self.scale * torch.einsum("thd,nhd->htn", query, key)
        if self.softcap:
            scores = torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return scores


class AlibiIgnored(Attention):
    """The ALiBi slopes are ignored."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.slopes = None


class AlibiAdded(Attention):
    """The ALiBi bias has the wrong sign: far keys are preferred."""

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return -super()._distance(pos, j)


class AlibiRelative(Attention):
    """The ALiBi bias is slope * j, without the query's position: right inside one softmax, but the LSE is off."""

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return -j.expand(len(pos), -1)


class AlibiTopLeft(Attention):
    """The ALiBi bias uses row i as the query's position, not seq_len - query_len + i."""

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return (pos - pos[:1] - j).abs()


class AlibiScaled(Attention):
    """The ALiBi bias is added before the scale, which shrinks it."""

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return super()._distance(pos, j) * self.scale


class AlibiUnderCap(Attention):
    """The ALiBi bias is added before the softcap, which bounds it."""

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        scores = self.scale * torch.einsum("thd,nhd->htn", query, key)
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores


# --- softmax ---


class NoMaximum(Attention):
    """The maximum is not subtracted before exp: large scores overflow."""

    def _peak(self, masked: Tensor) -> Tensor:
        return super()._peak(masked) * 0

    def _exp(self, x: Tensor) -> Tensor:
        return x.float().exp().double()


class NotNormalized(Attention):
    """The weighted sum is not divided by the sum of the weights."""

    def _divisor(self, total: Tensor, weights: Tensor) -> Tensor:
        return torch.ones_like(total)


class NotNormalizedByTile(Attention):
    """The sum of the weights is that of the last tile of keys only."""

    variants: Sequence[Any] = SPLITS

    def _divisor(self, total: Tensor, weights: Tensor) -> Tensor:
        n = weights.shape[-1]
        return weights[..., (n - 1) // self.variant * self.variant :].sum(-1, keepdim=True) if n else total


class NotRescaled(Attention):
    """The accumulator is not rescaled when a later tile brings a larger maximum."""

    variants: Sequence[Any] = tuple((size, is_sum) for size in SPLITS for is_sum in (False, True))

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        size, rescales_sum = self.variant
        masked = self._hide(scores, visible)
        peak = masked.new_full((*masked.shape[:2], 1), -INFINITY)
        acc: Tensor | float = 0.0
        total = self._of_sinks(torch.zeros_like(peak)) * torch.zeros_like(peak)
        value = value.masked_fill(~visible.any(0)[:, None, None], 0.0)
        for tile, rows in zip(masked.split(size, dim=-1), value.split(size), strict=True):
            new = torch.maximum(peak, tile.amax(-1, keepdim=True)) if tile.shape[-1] else peak
            base = new.masked_fill(new == -INFINITY, 0.0)
            weights = (tile - base).exp()
            if rescales_sum:
                total = total * (peak - base).exp()
            acc = acc + torch.einsum("htn,nhd->thd", weights, rows)
            total = total + weights.sum(-1, keepdim=True)
            peak = new
        base = peak.masked_fill(peak == -INFINITY, 0.0)
        total = total + self._of_sinks(base)
        out = (acc / total.transpose(0, 1)).masked_fill((total == 0).transpose(0, 1), 0.0)
        return out, (total.log() + base)[..., 0].T


# --- sinks ---


class SinksIgnored(Attention):
    """The sinks are ignored."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None


class SinksOfEverySplit(Attention):
    """The sink is counted in every split of the keys, not once."""

    variants: Sequence[Any] = SPLITS

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return super()._of_sinks(peak) * self.count

    def _keys(self, i: int) -> Tensor:
        self.count = max(1, -(-self.lens[i][1] // self.variant))
        return super()._keys(i)


class SinksTwice(Attention):
    """The sink is counted twice."""

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return 2 * super()._of_sinks(peak)


class SinksScaled(Attention):
    """The sink is multiplied by softmax_scale, as if it were a product."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None if self.sinks is None else self.sinks * self.scale


class SinksNotInLse(Attention):
    """The sink is in the output, not in the log-sum-exp."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return (total - self._of_sinks(peak)).log() + peak


class SinksOfFirstHead(Attention):
    """All heads have the sink of head 0."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None if self.sinks is None else self.sinks[:1].expand(self.query.shape[1])


class SinksNotShifted(Attention):
    """The maximum is not subtracted from the sink: exp(sink) beside exp(score - max)."""

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return 0.0 if self.sinks is None else self.sinks.double()[:, None, None].exp() + 0 * peak


# --- log-sum-exp ---


class LseBaseTwo(Attention):
    """The log-sum-exp has base 2 instead of e (it lacks a factor of ln 2)."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse / math.log(2)


class LseOfBaseTwoScores(Attention):
    """The log-sum-exp is multiplied by ln 2 one time too many."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse * math.log(2)


class LseTransposed(Attention):
    """The log-sum-exp lies in memory as [h, t] where [t, h] is expected."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.T.reshape(lse.shape)


class LseWithoutMaximum(Attention):
    """The log-sum-exp lacks the maximum that was subtracted."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return total.log()


class LseIsMaximum(Attention):
    """The largest score is returned instead of the log-sum-exp."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return peak


class LseIsSum(Attention):
    """The sum of the weights is returned instead of its logarithm."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return total


class LseOfLastTile(Attention):
    """The log-sum-exp is that of the last split of the keys only."""

    variants: Sequence[Any] = SPLITS

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = super()._softmax(scores, visible, value)
        first = max(0, visible.shape[-1] - 1) // self.variant * self.variant
        return out, super()._softmax(scores[..., first:], visible[:, first:], value[first:])[1]


# --- rows that see nothing ---


class EmptyIsNan(Attention):
    """A query that sees no key returns NaN: 0 / 0."""

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        nothing = ~visible.any(-1)
        return out.masked_fill(nothing[:, None, None], torch.nan), lse.masked_fill(nothing[:, None], self.variant)

    variants: Sequence[Any] = (-INFINITY, INFINITY, torch.nan, 0.0)


class EmptyIsMean(Attention):
    """A query that sees no key returns the mean of all values: a softmax over equal scores."""

    variants: Sequence[Any] = ("sequence",)

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        nothing = ~visible.any(-1)
        if len(value) and nothing.any():
            out = torch.where(nothing[:, None, None], value.mean(0), out)
        return out, lse


class EmptyLse(Attention):
    """A query that sees no key returns an LSE that is not -inf, which a merge then counts."""

    variants: Sequence[Any] = (0.0, INFINITY, -1e30, -1e9, -1e4, -1e5, -3.4028234663852886e38)

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.masked_fill(~visible.any(-1)[:, None], self.variant)


class EmptyUnwritten(Attention):
    """Rows of a sequence without keys are not written: they hold what was in memory before."""

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (out, lse) if visible.shape[-1] else (out * torch.nan, lse * torch.nan)


# --- splits ---


class Split(Attention):
    """A base: keys in splits of `variant`, merged."""

    variants: Sequence[Any] = SPLITS

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        sizes = range(0, max(1, visible.shape[-1]), self.variant)
        parts = [
            super(Split, self)._softmax(
                scores[..., n : n + self.variant], visible[:, n : n + self.variant], value[n : n + self.variant]
            )
            for n in sizes
        ]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return self._merged(outs, lses)

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the parts, `[parts, t, h, dv]` and `[parts, t, h]`."""
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp().masked_fill(lses == -INFINITY, 0.0)
        return (weights[..., None] * outs).sum(0), lse


class SplitsAveraged(Split):
    """The answers of the splits of the keys are averaged, not weighted by their log-sum-exp."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), lses.logsumexp(0)


class SplitsAdded(Split):
    """The answers of the splits of the keys are added up, not weighted."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.sum(0), lses.logsumexp(0)


class LastSplitDropped(Split):
    """The last split of the keys is left out of the merge."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs[:-1], lses[:-1]) if len(outs) > 1 else super()._merged(outs, lses)


class SplitsMergedBaseTwo(Split):
    """Splits with a natural log-sum-exp are merged as if it had base 2, or the other way round."""

    variants: Sequence[Any] = tuple((size, factor) for size in SPLITS for factor in (math.log(2), 1 / math.log(2)))

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant[0])
        self.factor = variant[1]

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * self.factor)
        return out, lse / self.factor if len(outs) > 1 else lses[0]


# --- memory that nobody may see ---


class HiddenTimesNan(Attention):
    """Values that a window or a chunk hides are multiplied by a weight of 0: NaN there reaches the output."""

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return torch.einsum("htn,nhd->thd", weights, value)


class ZeroTimesNan(PastTheEnd):
    """Values past a sequence's end are multiplied by a weight of 0: NaN and infinity there reach the output as NaN."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return Attention._visible(self, pos, j, s, q)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return torch.einsum("htn,nhd->thd", weights, value)


class MaskAdded(PastTheEnd):
    """The mask is added to the scores: a NaN or infinite key past a sequence's end makes a score of NaN."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return Attention._visible(self, pos, j, s, q)

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores + torch.zeros_like(scores).masked_fill(~visible, -INFINITY)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return torch.einsum("htn,nhd->thd", weights, value)


class WholePoolTimesNan(Attention):
    """Every block of the pool is multiplied by a weight of 0: NaN in blocks of no sequence reaches the output."""

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return super()._product(weights, value, visible) + 0 * self._grouped(self.value_pool.sum(0, keepdim=True))


class FiniteSentinel(Attention):
    """Hidden scores become a finite number: hidden keys get weight where all visible scores are lower."""

    variants: Sequence[Any] = (-1e4, -65504.0, -1e9, -1e30)

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, self.variant)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return torch.einsum("htn,nhd->thd", weights, value)


class PaddingComputed(Attention):
    """Rows after the last sequence are computed as if they belonged to it."""

    def answers(self) -> Answers:
        """Compute the answers."""
        answers = super().answers()
        rows = self.query[self.example.num_tokens :]
        if len(rows):
            q, s = self.lens[-1]
            self.lens = (*self.lens[:-1], (len(rows), s))
            out, lse = self._sequence(len(self.lens) - 1, rows)
            answers["out"][self.example.num_tokens :], answers["lse"][self.example.num_tokens :] = out, lse
        return answers


class PaddingUnwritten(Attention):
    """Rows after the last sequence are not written: they hold what was in memory before."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out[self.example.num_tokens :] = torch.nan
        lse[self.example.num_tokens :] = self.variant
        return out, lse

    variants: Sequence[Any] = (torch.nan, -INFINITY, 0.0)


class NanHidden(Attention):
    """NaN is turned into a number, so that a broken model looks like a working one."""

    variants: Sequence[Any] = (0.0,)

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.nan_to_num(self.variant), lse


class NanKeySkipped(Attention):
    """A key whose score is NaN is left out of the sum, as if no query saw it."""

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        return super()._hide(scores, visible).nan_to_num(-INFINITY, posinf=INFINITY, neginf=-INFINITY)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return super()._product(weights, value.nan_to_num(0.0), visible)


# --- cascade ---


class PrefixTwice(Attention):
    """The shared keys are counted twice: in their own level, and in each sequence."""

    paths: tuple[str, ...] = ("cascade",)

    def _keys(self, i: int) -> Tensor:
        prefixes = self.arguments.get("prefixes") or []
        end = prefixes[0].end if prefixes else 0
        return torch.cat([torch.arange(end), super()._keys(i)])


class PrefixDropped(Attention):
    """The shared keys are left out: each sequence sees only its own."""

    paths: tuple[str, ...] = ("cascade",)

    def _keys(self, i: int) -> Tensor:
        prefixes = self.arguments.get("prefixes") or []
        return torch.arange(prefixes[0].end if prefixes else 0, self.lens[i][1])


class OwnKeysDropped(Attention):
    """Only the shared keys are seen."""

    paths: tuple[str, ...] = ("cascade",)

    def _keys(self, i: int) -> Tensor:
        prefixes = self.arguments.get("prefixes") or []
        return torch.arange(prefixes[0].end) if prefixes else super()._keys(i)


class Levels(Split):
    """A base: shared keys and own keys, merged."""

    variants: Sequence[Any] = (None,)
    paths: tuple[str, ...] = ("cascade",)

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        prefixes = self.arguments.get("prefixes") or []
        end = prefixes[0].end if prefixes else 0
        if not end:
            return Attention._softmax(self, scores, visible, value)
        cuts = [(0, end), (end, visible.shape[-1])]
        sinks = self.sinks
        parts = []
        for first, last in cuts:
            self.sinks = sinks if first else None
            parts.append(Attention._softmax(self, scores[..., first:last], visible[:, first:last], value[first:last]))
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return self._merged(outs, lses)


class LevelsAveraged(Levels):
    """The answers over shared and own keys are averaged, not weighted by their log-sum-exp."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), lses.logsumexp(0)


class LevelsMergedBaseTwo(Levels):
    """The answers over shared and own keys are merged with a log-sum-exp of the wrong base."""

    variants: Sequence[Any] = (math.log(2), 1 / math.log(2))

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * self.variant)
        return out, lse / self.variant


# --- trees ---


class TreeIgnored(Attention):
    """The tree is ignored: a node sees all nodes before it, siblings among them."""

    paths: tuple[str, ...] = ("speculative",)

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        return visible


class BranchHidden(Attention):
    """A node sees no ancestor but those before the tree: its own branch is hidden, but for itself."""

    paths: tuple[str, ...] = ("speculative",)

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        q, s = mask.shape
        return visible & torch.cat([mask[:, : s - q], torch.eye(q, dtype=torch.bool)], dim=-1)


# --- latents ---


class RotaryDropped(Attention):
    """The rotary part of the keys is left out of the scores."""

    paths: tuple[str, ...] = ("mla",)

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        rank = self.arguments["latent_rank"]
        return super()._scores(query[..., :rank], key[..., :rank], pos, j)


class RotaryOnly(Attention):
    """Only the rotary part of the keys is in the scores."""

    paths: tuple[str, ...] = ("mla",)

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        rank = self.arguments["latent_rank"]
        return super()._scores(query[..., rank:], key[..., rank:], pos, j)


class ValuesFromTheEnd(Attention):
    """Values are the last elements of a latent row, rotary part included, not the first."""

    paths: tuple[str, ...] = ("mla",)

    def _pools(self) -> tuple[Tensor, Tensor]:
        key, value = super()._pools()
        return key, key[..., -value.shape[-1] :]


# --- quantised caches ---


class KeyScaleIgnored(Attention):
    """The scale of the keys is ignored."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value * self.arguments["scales"].value


class ValueScaleIgnored(Attention):
    """The scale of the values is ignored."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self.arguments["scales"].key, value


class ScalesSwapped(Attention):
    """Keys and values have each other's scale."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self.arguments["scales"].value, value * self.arguments["scales"].key


class KeyScaleForBoth(Attention):
    """Values are multiplied by the scale of the keys."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self.arguments["scales"].key, value * self.arguments["scales"].key


class ScalesInverted(Attention):
    """Codes are divided by their scales."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key / self.arguments["scales"].key, value / self.arguments["scales"].value


# --- differential ---


class Differential(Formula):
    """Two softmaxes over pairs of heads, subtracted and normalized."""

    paths: tuple[str, ...] = ("differential",)
    attention: type[Attention] = Attention

    def answers(self) -> Answers:
        """Attend twice, subtract, norm."""
        a, outs, lses = self.arguments, [], []
        values = [self._value_of(i) for i in (0, 1)]
        for half in (0, 1):
            its = {
                name: a[name] for name in a if name in ("batch", "causal", "window_size", "softmax_scale", "softcap")
            }
            its |= {name: a[name][half::2] for name in ("alibi_slopes", "sinks") if name in a}
            its |= dict(query=self._heads_of(a["query"], half), key_cache=a["cache"][half, 0])
            its |= dict(value_cache=torch.cat(values, dim=-1))
            answers = self.attention(self.example, its, self.variant).answers()
            outs.append(answers["out"])
            lses.append(answers["lse"])
        out = self._normed(self._difference(*outs))
        t = len(out)
        return {
            "out": self._joined(out).reshape(t, -1, self.example.head_size),
            "lse": torch.stack(lses, dim=-1).reshape(t, -1),
        }

    def _value_of(self, half: int) -> Tensor:
        """Return the values of one half of the pairs."""
        return self.arguments["cache"][half, 1]

    def _heads_of(self, query: Tensor, half: int) -> Tensor:
        """Return the first or the second head of each pair."""
        return query[:, half::2]

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        """Subtract."""
        return first - self.arguments["lambda_full"].double() * second

    def _normed(self, x: Tensor) -> Tensor:
        """Norm over both halves of the value."""
        a = self.arguments
        factor = a["norm_weight"].double() * (1 - a["lambda_init"])
        return factor * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a["norm_eps"])

    def _joined(self, x: Tensor) -> Tensor:
        """Cut a pair's output into its two heads."""
        return x


class NotSubtracted(Differential):
    """The second softmax is not subtracted."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first


class LambdaIgnored(Differential):
    """The second softmax is subtracted whole, without lambda."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first - second


class LambdaAdded(Differential):
    """The second softmax is added, not subtracted."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first + self.arguments["lambda_full"].double() * second


class LambdaInitForLambda(Differential):
    """lambda_init is used as lambda_full."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first - self.arguments["lambda_init"] * second


class NormBeforeDifference(Differential):
    """The norm comes before the subtraction."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = (super(NormBeforeDifference, self)._normed(x) for x in (first, second))
        return first - self.arguments["lambda_full"].double() * second

    def _normed(self, x: Tensor) -> Tensor:
        return x


class NotNormed(Differential):
    """The difference is not normalized."""

    def _normed(self, x: Tensor) -> Tensor:
        return self.arguments["norm_weight"].double() * (1 - self.arguments["lambda_init"]) * x


class NormOfEachHalf(Differential):
    """The norm is over each head by itself, not over both halves of the value."""

    def _normed(self, x: Tensor) -> Tensor:
        a = self.arguments
        halves = x.unflatten(-1, (2, -1))
        normed = halves * torch.rsqrt(halves.square().mean(-1, keepdim=True) + a["norm_eps"])
        return normed.flatten(-2) * a["norm_weight"].double() * (1 - a["lambda_init"])


class FactorMissing(Differential):
    """The factor 1 - lambda_init is missing."""

    def _normed(self, x: Tensor) -> Tensor:
        return super()._normed(x) / (1 - self.arguments["lambda_init"])


class NormWeightIgnored(Differential):
    """The weight of the norm is ignored."""

    def _normed(self, x: Tensor) -> Tensor:
        return super()._normed(x) / self.arguments["norm_weight"].double()


class PairsAreHalves(Differential):
    """Pairs are formed of heads i and i + h/2 instead of heads 2i and 2i + 1."""

    def _heads_of(self, query: Tensor, half: int) -> Tensor:
        return query.chunk(2, dim=1)[half]


class ValueOfFirstHalf(Differential):
    """Both halves of the value are those of the first head."""

    def _value_of(self, half: int) -> Tensor:
        return self.arguments["cache"][0, 1]


# --- merge ---


class Merge(Formula):
    """The merge of partial answers."""

    paths: tuple[str, ...] = ("merge",)

    def answers(self) -> Answers:
        """Merge."""
        outs = torch.stack([x.double() for x in self.arguments["outs"]])
        lses = torch.stack([x.double() for x in self.arguments["lses"]])
        out, lse = self._merged(outs, lses)
        return {"out": out, "lse": lse}

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Merge parts, `[parts, t, h, dv]`."""
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp()
        parts = (weights[..., None] * outs).masked_fill((lses == -INFINITY)[..., None], 0.0)
        return parts.sum(0), lse


class MergeBaseTwo(Merge):
    """The log-sum-exps are treated as base 2: 2 ** lse instead of e ** lse."""

    variants: Sequence[Any] = ("everywhere", "in the weights")

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * math.log(2))
        if self.variant == "everywhere":
            return out, lse / math.log(2)
        top = lses.amax(0)
        return out, ((lses - top) * math.log(2)).exp().sum(0).log() + top


class MergeAverages(Merge):
    """The parts are averaged."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), super()._merged(outs, lses)[1]


class MergeSwapsWeights(Merge):
    """Each part has the weight of the other one."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs.flip(0), lses)[0], super()._merged(outs, lses)[1]


class MergeWeighsByLse(Merge):
    """The parts are weighted by their log-sum-exp itself, not by its exponential."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return (lses / lses.sum(0))[..., None].mul(outs).sum(0), super()._merged(outs, lses)[1]


class MergeNotNormalized(Merge):
    """The weighted parts are not divided by the sum of their weights."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        weights = (lses - lses.amax(0)).exp()
        return (weights[..., None] * outs).masked_fill((lses == -INFINITY)[..., None], 0.0).sum(0), lses.logsumexp(0)


class MergeEmptyIsNan(Merge):
    """Where a query sees no key in any part, -inf - -inf makes NaN."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses)
        nothing = lse == -INFINITY
        return out.masked_fill(nothing[..., None], torch.nan), lse.masked_fill(nothing, self.variant)

    variants: Sequence[Any] = (torch.nan, -INFINITY)


class MergeGarbageTimesZero(Merge):
    """The output of a part without visible keys is multiplied by 0: NaN in it reaches the output."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp().masked_fill(lses == -INFINITY, 0.0)
        return (weights[..., None] * outs).sum(0), lse


class MergeLseIsMaximum(Merge):
    """The LSE of the merge is the largest of the parts."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs, lses)[0], lses.amax(0)


class MergeLseAdds(Merge):
    """The LSE of the merge is the sum of those of the parts."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs, lses)[0], lses.sum(0)


class MergeOverflows(Merge):
    """The maximum is not subtracted before exp: large log-sum-exps overflow."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        weights = lses.float().exp().double()
        total = weights.sum(0)
        return (weights[..., None] * outs).sum(0) / total[..., None], total.log()


class MergeTwoParts(Merge):
    """Parts after the second are left out."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs[:2], lses[:2])


class MergeStridesAssumed(Merge):
    """The log-sum-exps are assumed to be contiguous: their strides are ignored."""

    def answers(self) -> Answers:
        """Compute the answers."""
        self.arguments = self.arguments | dict(lses=[_as_contiguous(x) for x in self.arguments["lses"]])
        return super().answers()


# --- writes ---


class Write(Formula):
    """The write of new tokens."""

    paths: tuple[str, ...] = ("kv_cache",)

    def answers(self) -> Answers:
        """Write."""
        a = self.arguments
        pools = {name: a[name].clone() for name in ("key_cache", "value_cache")}
        for token, slot in enumerate(a["slot_mapping"].tolist()):
            self._put(pools, token, slot)
        return pools

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        """Write one token."""
        if slot >= 0:
            self._store(pools, token, *divmod(slot, self.example.block_size))

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        """Store one token."""
        pools["key_cache"][block, row] = self.arguments["key"][token]
        pools["value_cache"][block, row] = self.arguments["value"][token]


class PaddingWritesLast(Write):
    """A slot of -1 is used as an index from the end: padding overwrites the last slot of the pool."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        super()._put(pools, token, slot if slot >= 0 else pools["key_cache"].shape[0] * self.example.block_size - 1)


class PaddingWritesFirst(Write):
    """A slot of -1 is clamped to 0: padding overwrites the first slot of the pool."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        super()._put(pools, token, max(slot, 0))


class KeysForValues(Write):
    """Keys are written into both pools."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row] = self.arguments["key"][token]
        pools["value_cache"][block, row] = self.arguments["key"][token]


class PoolsSwapped(Write):
    """Keys are written into the pool of values, and values into that of keys."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row] = self.arguments["value"][token]
        pools["value_cache"][block, row] = self.arguments["key"][token]


class ValuesUnwritten(Write):
    """Values are not written."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row] = self.arguments["key"][token]


class SlotOneLate(Write):
    """Tokens are written one slot late."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        slots = pools["key_cache"].shape[0] * self.example.block_size
        super()._put(pools, token, min(slot + 1, slots - 1) if slot >= 0 else slot)


class LastTokenUnwritten(Write):
    """The last token is not written."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        if token < self.example.num_tokens - 1:
            super()._put(pools, token, slot)


class FirstHeadOnly(Write):
    """Only the first key head is written."""

    def _store(self, pools: Answers, token: int, block: int, row: int) -> None:
        pools["key_cache"][block, row, 0] = self.arguments["key"][token, 0]
        pools["value_cache"][block, row, 0] = self.arguments["value"][token, 0]


class RowForBlock(Write):
    """Block and row are swapped: slot % n and slot // n, with the number of blocks instead of the block size."""

    def _put(self, pools: Answers, token: int, slot: int) -> None:
        n = pools["key_cache"].shape[0]
        if slot >= 0 and slot // n < self.example.block_size:
            self._store(pools, token, slot % n, slot // n)


# --- how they are found ---


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Attributes:
        name: in lower case, with hyphens.
        says: what is wrong, in a sentence.
        formula: what computes it.
        variant: of the numbers that the formula depends on.
    """

    name: str
    says: str
    formula: type[Formula]
    variant: Any = None

    def answers(self, example: Example, arguments: Arguments) -> Answers:
        """Return what a kernel with this mistake answers."""
        return self.formula(example, arguments, self.variant).answers()


def _as_contiguous(x: Tensor) -> Tensor:
    """Read the memory of a tensor as if it were contiguous."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return _with_strides(x, tuple(strides))


def _with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Read the memory of a tensor with other strides; it ends where it ends."""
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    if 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) > room:
        return x
    return x.as_strided(x.shape, strides)


BASES = (Formula, Attention, Split, Levels, Differential, Merge, Write)


def of_path(path: str) -> Iterator[Mistake]:
    """Yield the known mistakes of a path."""
    for kind in list(globals().values()):  # in the order of this file
        if not isinstance(kind, type) or not issubclass(kind, Formula) or kind in BASES:
            continue
        if path in kind.paths:
            yield from _variants(kind, kind)
        elif path == "differential" and "chunked_prefill" in kind.paths:
            yield from _variants(kind, type(kind.__name__, (Differential,), dict(attention=kind)))


def without_mistake(path: str) -> Mistake:
    """Return the right formula of a path, as if it were a mistake."""
    formula = next(kind for kind in (Attention, Differential, Merge, Write) if path in kind.paths)
    return Mistake("none", "Nothing is wrong.", formula)


def _variants(kind: type[Formula], formula: type[Formula]) -> Iterator[Mistake]:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()
    says = " ".join((kind.__doc__ or "").split())
    for variant in kind.variants:
        yield Mistake(name, says, formula, variant)
