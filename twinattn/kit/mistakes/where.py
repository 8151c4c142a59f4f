"""Conditions on a call without which a mistake certainly does not show, so its outputs need not be computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from twinattn.kit.example import Arguments, Example

MASKED = ("first_visible", "positions")  # arguments that define the mask


@dataclass(frozen=True)
class Where:
    """A condition on a call; `&` of two is the condition that both hold."""

    holds: Callable[[Example, Arguments], bool]

    def __call__(self, example: Example, arguments: Arguments) -> bool:
        """Return whether the condition holds for a call."""
        return self.holds(example, arguments)

    def __and__(self, other: "Where") -> "Where":
        """Return the condition that both hold."""
        return Where(lambda example, arguments: self(example, arguments) and other(example, arguments))


@Where
def anywhere(example: Example, arguments: Arguments) -> bool:
    """Return True."""
    return True


# --- options ---


def has(arguments: Arguments, option: str) -> bool:
    """Return whether an option is given, and not neutral."""
    given = arguments.get(option)
    if isinstance(given, Tensor):
        return True
    return given not in (None, (-1, -1)) and (option == "softmax_scale" or given != 0.0)


def given(option: str) -> Where:
    """Return the condition that an option is given."""
    return Where(lambda example, arguments: has(arguments, option))


@Where
def causal(example: Example, arguments: Arguments) -> bool:
    """Return whether later keys are hidden."""
    return bool(arguments.get("causal", not any(name in arguments for name in MASKED)))


@Where
def not_causal(example: Example, arguments: Arguments) -> bool:
    """Return whether later keys are seen."""
    return not causal(example, arguments)


@Where
def of_another_scale(example: Example, arguments: Arguments) -> bool:
    """Return whether the scale is not that of the head size of the values."""
    return example.value_size != example.head_size or has(arguments, "softmax_scale")


@Where
def under_a_scale_below_0(example: Example, arguments: Arguments) -> bool:
    """Return whether the scale is negative."""
    return (arguments.get("softmax_scale") or 0.0) < 0


# --- lengths ---


@Where
def several_queries(example: Example, arguments: Arguments) -> bool:
    """Return whether a sequence has more than one query."""
    return any(q > 1 for q, _ in example.lens)


@Where
def with_context(example: Example, arguments: Arguments) -> bool:
    """Return whether a sequence has different numbers of keys and queries."""
    return any(q and q != s for q, s in example.lens)


@Where
def of_unlike_queries(example: Example, arguments: Arguments) -> bool:
    """Return whether sequences have different numbers of queries."""
    return len({q for q, _ in example.lens}) > 1


@Where
def of_unlike_lengths(example: Example, arguments: Arguments) -> bool:
    """Return whether sequences have different numbers of keys."""
    return len({s for _, s in example.lens}) > 1


@Where
def with_blind_queries(example: Example, arguments: Arguments) -> bool:
    """Return False if every query certainly sees a key."""
    return any(q > s for q, s in example.lens) or any(name in arguments for name in MASKED)


@Where
def padded(example: Example, arguments: Arguments) -> bool:
    """Return whether there are rows after the last sequence."""
    return len(arguments["query"]) > example.num_tokens


# --- heads ---


@Where
def in_groups(example: Example, arguments: Arguments) -> bool:
    """Return whether there are several KV heads, with several query heads each."""
    return example.heads[0] > example.heads[1] > 1


@Where
def in_odd_groups(example: Example, arguments: Arguments) -> bool:
    """Return whether the heads of a group are not a power of two; over latents all heads are one group."""
    h, hk = example.heads
    return any(group & (group - 1) for group in (h, h // max(hk, 1)))


@Where
def of_several_kv_heads(example: Example, arguments: Arguments) -> bool:
    """Return whether there is more than one KV head."""
    return example.heads[1] > 1


# --- memory ---


@Where
def in_pages(example: Example, arguments: Arguments) -> bool:
    """Return whether keys are in pages."""
    return arguments["batch"].block_table is not None


@Where
def in_several_blocks(example: Example, arguments: Arguments) -> bool:
    """Return whether a sequence has a second block."""
    return in_pages(example, arguments) and any(s > example.block_size for _, s in example.lens)


@Where
def by_several_tables(example: Example, arguments: Arguments) -> bool:
    """Return whether the block table has a second row."""
    return in_pages(example, arguments) and len(example.lens) > 1


@Where
def after_a_fork(example: Example, arguments: Arguments) -> bool:
    """Return whether two sequences have the same first block."""
    table = arguments["batch"].block_table
    if table is None or not table.numel():
        return False
    firsts = table[:, 0].tolist()
    return len(set(firsts)) < len(firsts)


def _rows(arguments: Arguments) -> list[Tensor]:
    """Return the tensors of queries, keys and values."""
    words = ("query", "key", "value", "key_cache", "value_cache", "cache")
    return [arguments[word] for word in words if word in arguments]


@Where
def with_gaps(example: Example, arguments: Arguments) -> bool:
    """Return whether a tensor is not contiguous; in differential attention the queries of half of the heads are not."""
    return example.path == "differential" or any(not x.is_contiguous() for x in _rows(arguments))


@Where
def with_gaps_in_rows(example: Example, arguments: Arguments) -> bool:
    """Return whether the elements of some row are not contiguous."""
    return any(x.stride(-1) != 1 for x in _rows(arguments))


@Where
def with_gaps_between_rows(example: Example, arguments: Arguments) -> bool:
    """Return whether there is a gap between rows of keys."""
    return any(x.stride(-2) > example.head_size for x in _rows(arguments)[1:])


@Where
def in_unlike_layouts(example: Example, arguments: Arguments) -> bool:
    """Return whether keys and values have different strides."""
    words = ("key", "value") if "key" in arguments else ("key_cache", "value_cache")
    return not all(word in arguments for word in words) or len({arguments[word].stride() for word in words}) > 1


@Where
def with_nan(example: Example, arguments: Arguments) -> bool:
    """Return whether there may be a NaN or an infinity in a query, a key or a value."""
    return any(x.itemsize == 1 or not x.isfinite().all() for x in _rows(arguments))


@Where
def rounded(example: Example, arguments: Arguments) -> bool:
    """Return whether queries are not float32, the type of a log-sum-exp."""
    return bool(arguments["query"].itemsize != 4)


@Where
def written_into_a_view(example: Example, arguments: Arguments) -> bool:
    """Return whether `out` is given, and not contiguous."""
    out: Any = arguments.get("out")
    return out is not None and not out.is_contiguous()


# --- trees and prefixes ---


@Where
def with_prefixes(example: Example, arguments: Arguments) -> bool:
    """Return whether sequences share a prefix."""
    return bool(arguments.get("prefixes"))


@Where
def of_growing_trees(example: Example, arguments: Arguments) -> bool:
    """Return whether a tree has nodes before those of the query rows."""
    return any(example.nodes(i) > q for i, (q, _) in enumerate(example.lens))


def most_nodes(example: Example) -> int:
    """Return how many nodes the largest tree has."""
    return max(map(example.nodes, range(len(example.lens))), default=0)
