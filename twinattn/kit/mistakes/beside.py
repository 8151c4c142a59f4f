"""Mistakes with two options at once: one of them is lost if the other one is used.

A kernel with its own code path for windows, or for masks that are not causal, may lack an option there.
"""

from collections.abc import Callable
from typing import Any

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.where import given, not_causal


def _lose_scale(of: Attention) -> None:
    of.scale = of.example.head_size**-0.5


def _lose_softcap(of: Attention) -> None:
    of.softcap = 0.0


def _lose_alibi(of: Attention) -> None:
    of.slopes = None


def _lose_sinks(of: Attention) -> None:
    of.sinks = None


def _lose_window(of: Attention) -> None:
    of.mask = of.mask._replace(left=-1, right=-1)


# Option -> its loss in words, and the function that loses it.
LOST: dict[str, tuple[str, Callable[[Attention], None]]] = {
    "Alibi": ("ALiBi is left out", _lose_alibi),
    "Sinks": ("The sinks are left out", _lose_sinks),
    "Softcap": ("The softcap is left out", _lose_softcap),
    "Scale": ("The given scale is ignored", _lose_scale),
    "Window": ("The window is ignored", _lose_window),
}
# Condition -> the option that it needs, or ""; the condition in words; and whether a call meets it.
WHERE: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "UnderAWindow": ("Window", "where there is a window", lambda of: of.mask.left >= 0 or of.mask.right >= 0),
    "WithoutCausal": ("", "where the mask is not causal", lambda of: not of.mask.causal),
    "BesideAlibi": ("Alibi", "where there are ALiBi slopes", lambda of: of.slopes is not None),
    "BesideSinks": ("Sinks", "where there are sinks", lambda of: of.sinks is not None),
    "BesideASoftcap": ("Softcap", "where there is a softcap", lambda of: bool(of.softcap)),
    "BesideAScale": ("Scale", "where a scale is given", lambda of: of.arguments.get("softmax_scale") is not None),
}
OPTIONS = {
    "Alibi": "alibi_slopes",
    "Sinks": "sinks",
    "Softcap": "softcap",
    "Scale": "softmax_scale",
    "Window": "window_size",
}


class Beside(Attention, is_base=True):
    """A base: an option is lost if another one is used."""

    lose: Callable[[Attention], None]
    is_there: Callable[[Any], bool]

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        if type(self).is_there(self):
            type(self).lose(self)


for lost, (what, lose) in LOST.items():
    for where, (other, in_words, is_there) in WHERE.items():
        if lost != other:
            shows = given(OPTIONS[lost]) & (given(OPTIONS[other]) if other else not_causal)
            body = dict(__doc__=f"{what} {in_words}.", __module__=__name__, where=shows)
            type(f"{lost}Lost{where}", (Beside,), body | dict(lose=staticmethod(lose), is_there=staticmethod(is_there)))
