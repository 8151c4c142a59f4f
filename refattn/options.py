"""The options of a layer: one definition for every path and every kernel."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from refattn.checks import check_flag, check_number, check_per_head, tensors_of


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The options of a layer's attention.

    For the score of a query at position `i` and a key at position `j`, in this order:

        score = softmax_scale * query . key
        score = softcap * tanh(score / softcap)                          if softcap
        score = score - alibi_slopes[h] * |i - j|                        if alibi_slopes; sqrt(|i - j|) with alibi_sqrt
        hidden keys are masked, then softmax over the keys               and the sink, if sinks

    Attributes:
        softmax_scale: factor on the dot products, any finite number; `d ** -0.5` if None.
        softcap: bound on the scores, in units of the scaled score; 0 for no bound.
        alibi_slopes: one slope per query head, `[h]`, of any floating point type; the bias is computed in the compute
            type.
        sinks: one extra logit per query head, `[h]`, in the denominator of the softmax only.
        batch_invariant: return bit-identical rows, whatever else is in the batch. The reference then attends one query
            at a time, over copies of its visible keys, so a row does not depend on the number of tokens that its
            sequence has in the batch either. Neither holds in a cascade, whose partial outputs depend on which
            sequences share keys; `context_parallel`, which merges context and new tokens, does not guarantee the
            second.
        alibi_sqrt: use the square root of the distance in ALiBi, `-slope * |i - j| ** 0.5`.

    Raises:
        ValueError: naming the option, what was expected and what was given.

    Source: softcap: Gemma Team 2024, "Gemma 2"; ALiBi: Press et al. 2022, "Train Short, Test Long"; sinks: OpenAI 2025,
        gpt-oss.
    """

    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Float[Tensor, "h"] | None = None
    sinks: Float[Tensor, "h"] | None = None
    batch_invariant: bool = False
    alibi_sqrt: bool = False
    has_per_head = False  # whether `per_head` is not empty; derived, so not a field, and read in every call

    def __post_init__(self) -> None:
        """Check each option alone; a path checks them against its tensors."""
        if self.softmax_scale is not None:
            check_number("softmax_scale", self.softmax_scale)
        check_number("softcap", self.softcap, at_least=0.0)
        for name, x in self.per_head.items():
            check_per_head(name, x)
            object.__setattr__(self, "has_per_head", True)
        check_flag("batch_invariant", self.batch_invariant)
        check_flag("alibi_sqrt", self.alibi_sqrt)
        if self.alibi_sqrt and self.alibi_slopes is None:
            raise ValueError("alibi_sqrt: expected alibi_slopes with it, got none")

    @property
    def per_head(self) -> dict[str, Tensor]:
        """The given options with one element per query head, by name."""
        return {name: x for name in PER_HEAD if (x := getattr(self, name)) is not None}

    def with_per_head(self, change: Callable[[Tensor], Tensor]) -> "AttentionOptions":
        """Return the options with `change` applied to those per head."""
        if not self.has_per_head:
            return self
        changed: dict[str, Any] = {name: change(x) for name, x in self.per_head.items()}
        return replace(self, **changed)

    def of_heads(self, heads: slice) -> "AttentionOptions":
        """Return the options of a slice of the heads."""
        return self.with_per_head(lambda x: x[heads].contiguous())

    def without_sinks(self) -> "AttentionOptions":
        """Return the options without sinks, for partial outputs: sinks count once."""
        return self if self.sinks is None else replace(self, sinks=None)


PER_HEAD = tensors_of(AttentionOptions)


@dataclass(frozen=True, eq=False)
class RecurrentOptions:
    """The options of a recurrent layer.

    Attributes:
        scale: factor on the queries, any finite number; `dk ** -0.5` if None.
        delta: write the difference between the value and what the state returns for the key (the delta rule), instead
            of the value.

    Raises:
        ValueError: naming the option, what was expected and what was given.
    """

    scale: float | None = None
    delta: bool = True

    def __post_init__(self) -> None:
        """Check every option."""
        if self.scale is not None:
            check_number("scale", self.scale)
        check_flag("delta", self.delta)
