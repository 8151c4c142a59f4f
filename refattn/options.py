"""What a layer fixes: one definition for every path and every kernel."""

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
        score = score - alibi_slopes[h] * |i - j|                        if alibi_slopes; its root with alibi_sqrt
        the mask hides what may not be seen, then softmax over the keys  and the sink, if sinks

    Attributes:
        softmax_scale: factor on the dot products, any finite number; `d ** -0.5` if None.
        softcap: bound on the scores, in units of the scaled score; 0 for no bound.
        alibi_slopes: one slope per query head, `[h]`, of any floating type: the bias is computed in the compute type.
        sinks: one extra logit per query head, `[h]`, in the denominator only: it has no value.
        batch_invariant: return bit-identical rows, whatever else is in the batch. The reference then attends with
            one query at a time, to copies of the keys that it sees: so its bits do not depend either on how many tokens
            its sequence has in the batch. This does not hold in a cascade, whose parts merge as sequences share keys;
            nor, for the number of tokens, in `context_parallel`, which merges context and new tokens.
        alibi_sqrt: let ALiBi grow with the square root of the distance, `-slope * |i - j| ** 0.5`.

    Raises:
        ValueError: naming the option, what was expected and what came.

    Source: softcap: Gemma Team 2024, "Gemma 2"; ALiBi: Press et al. 2022, "Train Short, Test Long"; sinks: OpenAI 2025,
        gpt-oss.
    """

    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Float[Tensor, "h"] | None = None
    sinks: Float[Tensor, "h"] | None = None
    batch_invariant: bool = False
    alibi_sqrt: bool = False
    has_per_head = False  # no field, as it follows from them: whether `per_head` has any; every call looks at it

    def __post_init__(self) -> None:
        """Check every option by itself; a path checks them against its tensors."""
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
        """The options with one number per query head, by name: those that are given."""
        return {name: x for name in PER_HEAD if (x := getattr(self, name)) is not None}

    def with_per_head(self, change: Callable[[Tensor], Tensor]) -> "AttentionOptions":
        """Return the options with other numbers per head; the same ones if none has any."""
        if not self.has_per_head:
            return self
        changed: dict[str, Any] = {name: change(x) for name, x in self.per_head.items()}
        return replace(self, **changed)

    def of_heads(self, heads: slice) -> "AttentionOptions":
        """Return the options of some of the heads."""
        return self.with_per_head(lambda x: x[heads].contiguous())

    def without_sinks(self) -> "AttentionOptions":
        """Return the options without sinks, for a part of the keys: they count once."""
        return self if self.sinks is None else replace(self, sinks=None)


PER_HEAD = tensors_of(AttentionOptions)


@dataclass(frozen=True, eq=False)
class RecurrentOptions:
    """The options of a layer that keeps a state.

    Attributes:
        scale: factor on the queries, any finite number; `dk ** -0.5` if None.
        delta: write the difference to what the state already answers to a key (the delta rule), instead of the value.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """

    scale: float | None = None
    delta: bool = True

    def __post_init__(self) -> None:
        """Check every option."""
        if self.scale is not None:
            check_number("scale", self.scale)
        check_flag("delta", self.delta)
