"""Mistakes in intervals of keys, one for each query."""

import torch
from torch import Tensor

from twinattn.kit.mistakes.formula import Attention


class IntervalEndHidden(Attention):
    """An interval ends before its last key: j < last instead of j <= last."""

    paths: tuple[str, ...] = ("interval",)

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        return super()._in_interval(first, last, j) & (j != last)


class IntervalWraps(Attention):
    """`first - 1` is computed in int32 and wraps at the lowest number: such a query sees no key."""

    paths: tuple[str, ...] = ("interval",)

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        return super()._in_interval(first, last, j) & (first > torch.iinfo(torch.int32).min)


class IntervalOr(Attention):
    """An OR where an AND belongs: a key is visible after the first one, or before the last."""

    paths: tuple[str, ...] = ("interval",)

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        return (j >= first) | (j <= last)


class IntervalCausal(Attention):
    """The causal mask is applied in addition to the intervals: the later keys of a span are hidden."""

    paths: tuple[str, ...] = ("interval",)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j <= pos)


class IntervalOfFirstQuery(Attention):
    """All queries of a sequence see the interval of its first one."""

    paths: tuple[str, ...] = ("interval",)

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        return super()._in_interval(first[:1].expand_as(first), last[:1].expand_as(last), j)


class IntervalOfAll(Attention):
    """Queries that are computed together see what any of them sees, from the first key to the last."""

    paths: tuple[str, ...] = ("interval",)

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        sees = first <= last
        if not sees.any():
            return super()._in_interval(first, last, j)
        begin, end = first[sees].min(), last[sees].max()
        return super()._in_interval(begin.expand_as(first), end.expand_as(last), j)


class EmptyIntervalIgnored(Attention):
    """A query whose interval is empty sees all keys up to itself."""

    paths: tuple[str, ...] = ("interval",)

    def _in_interval(self, first: Tensor, last: Tensor, j: Tensor) -> Tensor:
        causal = j <= torch.arange(len(first))[:, None] + j.shape[1] - len(first)
        return torch.where(first <= last, super()._in_interval(first, last, j), causal)
