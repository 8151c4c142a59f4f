"""The properties of layers that keep a state, and their checks."""

from dataclasses import replace

import torch

from twinattn.kit import landmarks
from twinattn.kit.checks import everything
from twinattn.kit.corners import unless_refused
from twinattn.kit.draws import (
    of_entries_unused,
    of_several_chunks,
    of_two_sizes,
    over_states,
    padded,
    per_channel,
    plain,
    without_tokens,
)
from twinattn.kit.example import Example
from twinattn.kit.hold import ask, hold
from twinattn.kit.kernel import Kernel
from twinattn.kit.property import OTHER_LENGTHS, Broken, Property
from twinattn.kit.reference import expected
from twinattn.kit.tolerance import assert_close

LONGEST_TILE = 256  # tokens that a kernel takes at a time


def free_slots(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into slots that no sequence may read: free ones, and those of new sequences."""
    arguments = example.tensors(dtype, device)
    used = {slot for (q, _), slot in zip(example.lens, arguments["state_indices"].tolist(), strict=True) if q}
    known = arguments["has_initial_state"].tolist()
    read = {slot for slot, has_state in zip(arguments["state_indices"].tolist(), known, strict=True) if has_state}
    states = arguments["states"] = arguments["states"].clone()
    hidden = [slot for slot in range(len(states)) if slot not in read & used]
    states[hidden] = torch.nan
    answers = ask(kernel, example, arguments)
    wide, low = expected(example, arguments)
    written = sorted(used)
    for slot in set(range(len(states))) - used:
        if not answers["states"][slot].isnan().all():
            raise Broken(f"states: slot {slot} was written, which no sequence of the step has")
    for name, rows in (("out", slice(None)), ("states", written)):
        try:
            assert_close(answers[name].cpu()[rows], wide[name][rows], low[name][rows], name=name)
        except AssertionError as error:
            raise Broken(f"with NaN in free slots, {error}") from None


def of_narrow_states(kernel: Kernel) -> list[Example]:
    """Return runs of more tokens than a chunk, over pools of 16 bits."""
    if kernel.claims.max_query_len == 1:
        return []
    lens = ((150, 200), (70, 70)), ((300, 303), (2, 9))
    return [
        landmarks.example(kernel, pairs, states=kind) for pairs, kind in zip(lens, ("bfloat16", "float16"), strict=True)
    ]


def out_of_states(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Pass memory for the output, a view of a larger tensor: it is written, and nothing around it."""
    arguments = example.tensors(dtype, device)
    t, hv, dv = arguments["value"].shape
    memory = torch.full((t + 2, 2 * hv, dv), 7.0, dtype=dtype, device=device)
    view = memory[1:-1, :hv]
    answers = ask(kernel, example, arguments, out=view)
    hold(example, arguments, answers | dict(out=view))
    if not (memory[:, hv:] == 7).all() or not (memory[[0, -1]] == 7).all():
        raise Broken("out: memory around the given one was written")
    if t and answers["out"].data_ptr() != view.data_ptr():
        raise Broken("out: the output that is returned is not the memory that was given")


def cut(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare two steps, the second over the last token of each sequence, with one step over all tokens."""
    arguments = example.tensors(dtype, device)
    rows = [range(q) for q, _ in example.lens]
    starts = arguments["batch"].cu_seqlens_q.tolist()
    states, outs = arguments["states"], torch.empty_like(arguments["value"])
    for part, lens in (
        ([list(x)[:-1] for x in rows], [(q - 1, s - 1) for q, s in example.lens]),
        ([list(x)[-1:] for x in rows], [(1, s) for _, s in example.lens]),
    ):
        step = replace(example, lens=tuple(lens))
        tables = step.tensors(dtype, device)
        at = torch.tensor([starts[i] + x for i, some in enumerate(part) for x in some], dtype=torch.int64)
        at = at.to(outs.device)
        tokens = {name: arguments[name][at] for name in ("query", "key", "value", "log_decay", "beta")}
        same = {name: arguments[name] for name in ("state_indices", "scale", "delta") if name in arguments}
        has_state = tables["has_initial_state"]
        answers = ask(kernel, step, tables | tokens | same | dict(states=states, has_initial_state=has_state))
        states, outs[at] = answers["states"], answers["out"]
    try:
        hold(example, arguments, dict(out=outs, states=states))
    except Broken as error:
        raise Broken(f"computed in two steps, {error}") from None


def nan_before(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into the last value of the first sequence: it reaches no other sequence, and no token long before.

    The token itself has to be NaN, even if `beta` is 0. Tokens of the same tile may be NaN, too: a chunked kernel
    multiplies the NaN by weights of 0.
    """
    arguments = example.tensors(dtype, device)
    lengths = [q for q, _ in example.lens]
    i = next((i for i, q in enumerate(lengths) if q), None)
    if i is None:
        return
    first, last = sum(lengths[:i]), sum(lengths[: i + 1]) - 1
    value = arguments["value"] = arguments["value"].clone()
    value[last] = torch.nan
    if example.seed % 2:
        arguments["beta"][last] = 0.0
    out = ask(kernel, example, arguments)["out"].detach().cpu()
    may_be = torch.zeros(len(out), dtype=torch.bool)
    may_be[max(first, last + 1 - LONGEST_TILE) : last + 1] = True
    spoilt = (out.isnan().flatten(1).any(-1) & ~may_be).nonzero()
    if len(spoilt):
        where = "before the tile" if spoilt[0] < last else "after the sequence"
        raise Broken(f"out: NaN in row {int(spoilt[0])}, {where} that has it")
    if not out[last].isnan().any():
        raise Broken(f"out: a number in row {last}, the token whose value is NaN")


OTHER_LENGTHS.add(cut)


PROPERTIES = (
    Property(
        "free slots",
        "Unused slots, and those of new sequences, may hold anything; unused slots are not written.",
        plain,
        free_slots,
        paths=("recurrent",),
    ),
    Property(
        "padding slot",
        "A sequence with a negative slot returns 0, and changes no state.",
        over_states(padding=True),
        everything,
        paths=("recurrent",),
    ),
    Property(
        "padding", "Rows after the last sequence are 0 and change nothing.", padded, everything, paths=("recurrent",)
    ),
    Property(
        "beginnings",
        "has_initial_state alone says which sequences have a state, whatever their lengths.",
        over_states(beginnings="other"),
        everything,
        ("has_initial_state",),
        ("recurrent",),
        landmarks=landmarks.each(beginnings=("other",)),
    ),
    Property(
        "no tokens",
        "A sequence without new tokens keeps its state, and changes no other, whatever slot it has.",
        without_tokens,
        everything,
        paths=("recurrent",),
    ),
    Property(
        "entries unused",
        "The entries of a sequence without new tokens may be anything: no index is followed.",
        of_entries_unused,
        everything,
        paths=("recurrent",),
    ),
    Property(
        "drafts",
        "The state after each token is kept in its slot, and a step begins after the last accepted one.",
        over_states(drafts=True),
        everything,
        ("num_accepted",),
        ("recurrent",),
    ),
    Property(
        "steps",
        "A sequence that is computed in two steps has the same outputs and state.",
        plain,
        cut,
        paths=("recurrent",),
    ),
    Property(
        "chunks",
        "A prompt of several chunks of 64 tokens has the same outputs and state as token by token.",
        of_several_chunks,
        everything,
        paths=("recurrent",),
        examples=3,
        landmarks=landmarks.long_steps,
    ),
    Property(
        "sizes",
        "Keys and values may have different sizes.",
        of_two_sizes,
        everything,
        paths=("recurrent",),
        landmarks=landmarks.of_two_sizes,
    ),
    Property(
        "decay per channel",
        "Each key channel may have a decay of its own.",
        per_channel,
        everything,
        paths=("recurrent",),
        layer="kda",
    ),
    Property(
        "strong decays",
        "Decays may be as strong as e^-60, with weak ones beside them.",
        over_states(decays="strong"),
        everything,
        paths=("recurrent",),
    ),
    Property(
        "state types",
        "A pool of states may be of 16 bits: a state is computed in float32 in a step, and rounded as it is written.",
        over_states(states=["bfloat16", "float16"]),
        unless_refused(everything),
        paths=("recurrent",),
        examples=6,
        landmarks=of_narrow_states,
    ),
    Property(
        "out",
        "out= is written whole, also a view, and is what is returned.",
        plain,
        out_of_states,
        ("out",),
        ("recurrent",),
        examples=6,
    ),
    Property(
        "forgets",
        "A decay of 0, whose logarithm is -inf, forgets everything before the token: no NaN from -inf minus -inf.",
        over_states(decays="forget"),
        everything,
        paths=("recurrent",),
    ),
    Property(
        "without delta",
        "delta=False writes the value itself.",
        over_states(delta=False),
        everything,
        ("delta",),
        ("recurrent",),
    ),
    Property(
        "read scale",
        "Any finite scale is used, also 0 and negative ones.",
        over_states(scale=[0.3, 1.0, 0.0, -0.3]),
        everything,
        ("scale",),
        ("recurrent",),
        landmarks=landmarks.each(scale=(0.3, 1.0, 0.0, -0.3)),
    ),
    Property(
        "nan before",
        "A NaN reaches no other sequence, and no token more than a tile of 256 before its own.",
        plain,
        nan_before,
        paths=("recurrent",),
        landmarks=landmarks.both(landmarks.of_two_tiles, landmarks.some),
    ),
)
