"""Pairwise combinations: batches that together contain every pair of values of any two options, or ways to call.

A kernel that is right with a window, and right with sinks, may lose the sinks under a window, where it takes another
code path. Options drawn one at a time do not show this. `covering` chooses a few dozen batches in which each value of
each choice occurs with each value of every other one.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twinattn.kit import landmarks
from twinattn.kit.example import PATHS, SCALES_OF, SELECTED, Example
from twinattn.kit.kernel import Kernel, Shape

CAUSAL_WINDOWS = ((-1, -1), (4, 0), (0, 0), (70, 0))
WINDOWS = ((-1, -1), (4, 0), (0, 0), (70, -1), (4, 2), (-1, 2))  # the right side counts only without a causal mask
LAYOUTS = (0, 2, 3, 4)  # layouts of `memory.laid_out`
LENS: dict[str, landmarks.Lens] = {  # lengths of sequences, by kind
    "decodes": ((1, 33), (1, 20), (1, 64)),
    "chunks": ((5, 5), (1, 17), (9, 40), (1, 33)),
    "odd": ((5, 2), (0, 7), (2, 0), (3, 30)),
    "split": ((1, 700), (1, 9), (1, 2500)),
    "tiles": ((70, 130),),
}


def choices(kernel: Kernel) -> dict[str, tuple[Any, ...]]:
    """Return the choices of a kernel's caller, with the values of each, the plain one first.

    Options have their names. The others are `shape` (0 or 1, an index into the `few_shapes` that the kernel claims),
    `padding_rows`, and how the kernel is called: `return_lse`, `out`, `layout`, `poison`, `num_keys` of an `Example`.
    """
    path, claimed = kernel.path, lambda name: name not in kernel.claims.not_claimed
    windows = WINDOWS if kernel.takes("causal") else CAUSAL_WINDOWS
    known: dict[str, tuple[Any, ...]] = {
        "causal": (True, False),
        "window_size": windows[1:] if path == "sliding_window" else windows,
        "softmax_scale": (None, 0.3, -0.3),
        "softcap": (0.0, 2.0),
        "alibi_slopes": (None, True),
        "sinks": (None, True, "large"),
        "batch_invariant": (None, True),
        "return_lse": (True, False),
        "out": (False, True),
    }
    if path in (*SELECTED, "interval"):  # each query has its own list or interval of keys
        known.pop("causal"), known.pop("window_size")
    of = {name: values for name, values in known.items() if kernel.takes(name)}
    if "scales" in PATHS[path].words:
        of["scales"] = ((1.0, 1.0), (0.5, 0.25))
        of["scales_of"] = tuple(x for x in SCALES_OF if claimed(f"scales per {x.rstrip('s').removesuffix('e')}"))
        of["format"] = ("", "e5m2") if claimed("format") else ("",)
    if PATHS[path].differentiates:
        for name in ("return_lse", "out", "batch_invariant"):  # a backward takes the output itself
            of.pop(name, None)
        if kernel.takes("return_lse") or kernel.takes("grad_lse"):
            of["grad_lse"] = (None, True)
    if claimed("padding") and kernel.knows_query_lens:
        of["padding_rows"] = (0, 2)
    if claimed("strides"):
        of["layout"] = LAYOUTS
    regions = [name for name in ("tail", "blocks") if PATHS[path].pools and claimed(name)]
    if path in ("chunked_prefill", "sliding_window") and claimed("outside the window"):
        regions += ["window"] * kernel.takes("window_size")
    of["poison"] = (None, *regions)
    if {"batch", "plan"} & set(kernel.parameters):
        of["num_keys"] = (None, 1, 10**6)  # a wrong number changes no output
    of["shape"] = tuple(range(len(kernel.claims.few_shapes)))
    return {name: values for name, values in of.items() if len(values) > 1}


def said(kernel: Kernel, chosen: Mapping[str, Any]) -> tuple[dict[str, Any], Shape, int]:
    """Translate choices into the options of a batch that are not plain, its shape and its rows of padding."""
    plain = {name: values[0] for name, values in choices(kernel).items()}
    options = {name: value for name, value in chosen.items() if value != plain[name]}
    if kernel.path == "sliding_window":
        options["window_size"] = chosen["window_size"]
    shape, padding = kernel.claims.few_shapes[options.pop("shape", 0)], options.pop("padding_rows", 0)
    return options, shape, padding


def every_pair(kernel: Kernel) -> list[Example]:
    """Return batches that together have every pair of two choices, those with most new pairs first."""
    kinds = {name: lens for name, lens in LENS.items() if name != "odd" or landmarks.sees_nothing(kernel)}
    if kernel.claims.max_query_len == 1:
        kinds = {name: lens for name, lens in kinds.items() if name in ("decodes", "split")}
    batches = []
    for case in covering({"lens": tuple(kinds)} | choices(kernel)):
        lens = kinds[case.pop("lens")]
        options, shape, padding = said(kernel, case)
        batches.append(replace(landmarks.example(kernel, lens, shape, **options), padding_rows=padding))
    return batches


def covering(of: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Choose cases with one value per choice, so that each pair of values of two choices occurs in some case.

    Each case begins with the first pair that is not covered yet; every other choice then takes the value that covers
    the most new pairs with those already taken.
    """
    left = {
        frozenset(((one, x), (other, y))): None  # a dict, as it keeps its order
        for one, other in itertools.combinations(of, 2)
        for x, y in itertools.product(range(len(of[one])), range(len(of[other])))
    }
    cases: list[dict[str, Any]] = []
    while left:
        taken = dict(next(iter(left)))
        for name in sorted(of, key=lambda name: -len(of[name])):
            if name not in taken:
                new = [
                    sum(frozenset(((name, x), pair)) in left for pair in taken.items()) for x in range(len(of[name]))
                ]
                taken[name] = new.index(max(new))
        for pair in itertools.combinations(taken.items(), 2):
            left.pop(frozenset(pair), None)
        cases.append({name: of[name][taken[name]] for name in of})
    return cases
