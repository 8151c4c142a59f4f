"""Metadata of a step: positions, slots, the next step in place, and sorting and splitting decodes and prefills."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, LENS, ODD_LENS, Drawn, batch_of, padding_of, rows_of
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special, Without
from twinattn.kit.operations.tiles import BLOCKS, of_lengths, of_size

NUMBERS = (torch.float32,)  # one type is enough: no input is floating point
FIELDS = ("cu_seqlens_q", "seq_lens", "block_table", "max_query_len", "max_seq_len")
FAR = 2**28  # a block whose slots need more than 32 bits
MANY = (tuple((1, 3) for _ in range(65600)),)


def field_of(x: Any, name: str) -> Any:
    """Return a field of a batch: an attribute, or an item of a dict."""
    return x[name] if isinstance(x, Mapping) else getattr(x, name)


def draw_step(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw a ragged batch, its block table, and rows of padding."""
    drawn = Drawn(case, dtype)
    a, p = drawn.lengths(case["lens"]), case["block_size"]
    table, past, _ = drawn.table([s for _, s in case["lens"]], p, case["first_block"])
    if not case["columns"]:  # as in a server's profile run, before it has a cache
        table, past = dict(block_table=table["block_table"][:, :0]), {}
    a |= table | dict(num_tokens=int(a["cu_seqlens_q"][-1]) + case["padding"], block_size=p, window=case["window"])
    return Inputs(a, past)


def positions_of(a: Arguments, compute: torch.dtype, *, top_left: bool = False) -> dict[str, Tensor]:
    """Return the position of each query row."""
    out = torch.zeros(a["num_tokens"], dtype=torch.int64)
    for q0, q1, s in rows_of(a):
        out[q0:q1] = torch.arange(q1 - q0) + (0 if top_left else s - (q1 - q0))
    return dict(out=out)


def slots_of_step(a: Arguments, compute: torch.dtype, form: str = "right") -> dict[str, Tensor]:
    """Return the slot of each query row."""
    out, place = torch.full((a["num_tokens"],), -1, dtype=torch.int64), positions_of(a, compute)["out"]
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        for row in range(q0, q1) if a["block_table"].shape[1] else ():
            at = int(place[row]) if form != "from 0" else row - q0
            if at >= 0 and (a["window"] is None or at >= s - a["window"]):
                block, rest = divmod(at, a["block_size"])
                slot = int(a["block_table"][i, block]) * a["block_size"] + rest
                out[row] = (slot + 2**31) % 2**32 - 2**31 if form == "int32" else slot
    if form == "padding 0":
        out[int(a["cu_seqlens_q"][-1]) :] = 0
    return dict(out=out)


SIZES: dict[str, tuple[Any, ...]] = dict(
    lens=LENS, block_size=(4, 1, 16, 3), padding=(0, 3), first_block=(0,), window=(None, 1, 3, 20), columns=(True,)
)
PAST_TILES = of_lengths() | dict(padding=of_size("padding"), block_size=of_size("block_size", BLOCKS))
EMPTY = Special("empty", "Sequences may have no query, no key, or more queries than keys.", dict(lens=ODD_LENS))
PADDING = Special("padding", "Rows after the last sequence are padding.", dict(padding=(1, 5)))
FAR_POSITIONS = Special(
    "far positions",
    "A position may need more than 24 bits, which float32 does not hold.",
    dict(lens=(((1, 2**24 + 2), (3, 2**28 + 5)),), block_size=(2**24,)),
)

POSITIONS = Operation(
    name="positions",
    function="positions",
    signature="`cu_seqlens_q`, `seq_lens` and the like, `num_tokens`; it returns `[t]`, 0 in rows of padding",
    draw=draw_step,
    oracle=positions_of,
    sizes=SIZES | dict(window=(None,)),
    dimensions=PAST_TILES,
    specials=(
        EMPTY,
        PADDING,
        FAR_POSITIONS,
        Special("many", "There may be more sequences than 16 bits count.", dict(lens=MANY), once=True),
    ),
    derived=BATCH,
    exact=frozenset({"out"}),
    dtypes=NUMBERS,
    mistakes=(
        Mistake(
            "positions-in-float32",
            "Positions are computed in float32, and rounded past 2^24.",
            lambda a, c: dict(out=positions_of(a, c)["out"].float().long()),
        ),
        Mistake(
            "positions-from-0", "The first new token is at position 0.", lambda a, c: positions_of(a, c, top_left=True)
        ),
    ),
)

SLOT_MAPPING = Operation(
    name="slot_mapping",
    function="slot_mapping",
    signature="`cu_seqlens_q`, `seq_lens`, `block_table` and the like, `num_tokens`, `block_size`, `window`; it "
    "returns `[t]`, -1 "
    "for padding and for positions below 0",
    draw=draw_step,
    oracle=slots_of_step,
    sizes=SIZES,
    dimensions=PAST_TILES | dict(window=of_size("window", 1025, lens=((2100, 2100), (3, 20)))),
    options=dict(window=None),
    specials=(
        EMPTY,
        PADDING,
        FAR_POSITIONS,
        Special("no cache", "Without a column of the block table no slot is written.", dict(columns=(False,))),
        Special("far blocks", "A slot may need more than 32 bits.", dict(first_block=(FAR,), block_size=(16, 64))),
        Special("many", "There may be more sequences than 16 bits count.", dict(lens=MANY), once=True),
    ),
    derived=BATCH,
    exact=frozenset({"out"}),
    dtypes=NUMBERS,
    mistakes=(
        Mistake(
            "slots-from-0",
            "New tokens are put at the beginning of their sequence.",
            lambda a, c: slots_of_step(a, c, "from 0"),
        ),
        Mistake("slots-in-32-bits", "A slot is computed in 32 bits.", lambda a, c: slots_of_step(a, c, "int32")),
        Mistake("padding-has-slot-0", "Rows of padding have slot 0.", lambda a, c: slots_of_step(a, c, "padding 0")),
    ),
)


# --- make_batch ---


def draw_requests(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw the lengths and blocks of some requests, as a scheduler has them."""
    drawn, lens = Drawn(case, dtype), case["lens"]
    counts = [-(-s // case["block_size"]) + int(drawn.whole(0, 2, 1)) for _, s in lens]
    tables = [drawn.whole(0, case["blocks"], count).tolist() for count in counts]
    return Inputs(
        dict(
            query_lens=[q for q, _ in lens],
            seq_lens=[s for _, s in lens],
            block_tables=tables if case["block_tables"] else None,
        )
    )


def made(a: Arguments, compute: torch.dtype, fill: int = -1) -> Answers:
    """Return the fields of the batch."""
    tables = a["block_tables"] or []
    columns = max((len(x) for x in tables), default=0)
    rows = [[*x, *[fill] * (columns - len(x))] for x in tables]
    no_table = a["block_tables"] is None
    return dict(
        cu_seqlens_q=torch.tensor([0, *accumulate(a["query_lens"])], dtype=torch.int32),
        seq_lens=torch.tensor(a["seq_lens"], dtype=torch.int32),
        block_table=None if no_table else torch.tensor(rows, dtype=torch.int32).reshape(len(rows), columns),
        max_query_len=max(a["query_lens"], default=0),
        max_seq_len=max(a["seq_lens"], default=0),
    )


MAKE_BATCH = Operation(
    name="make_batch",
    function="make_batch",
    signature="`query_lens`, `seq_lens`, `block_tables`: lists; it returns an object, or a dict, with "
    "`cu_seqlens_q`, `seq_lens`, "
    "`block_table` (-1 past a last block), `max_query_len`, `max_seq_len`",
    draw=draw_requests,
    oracle=made,
    sizes=dict(lens=LENS, block_size=(4, 1, 16), blocks=(100, 2**31 - 1), block_tables=(True,)),
    without=dict(block_tables=Without(False, ("block_tables",))),
    dimensions=of_lengths() | dict(block_size=of_size("block_size", BLOCKS)),
    specials=(
        Special("empty", "There may be no request, and requests without tokens.", dict(lens=ODD_LENS)),
        Special(
            "large",
            "Lengths, and their sums, may need 31 bits.",
            dict(lens=(((2**24 + 1, 2**24 + 3), (3, 2**30 + 1), (2**30 + 1, 2**31 - 1)),), block_size=(2**24,)),
        ),
        Special("many", "There may be more requests than 16 bits count.", dict(lens=MANY), once=True),
    ),
    outputs=FIELDS,
    exact=frozenset(FIELDS),
    seen=lambda came, a: {name: field_of(came, name) for name in FIELDS},
    dtypes=NUMBERS,
    mistakes=(
        Mistake("table-filled-with-0", "Unused entries of the table are 0, a valid block.", lambda a, c: made(a, c, 0)),
    ),
)


# --- the next step ---

STEP = ("slots", "input_positions")  # overwritten by the next step


def draw_advance(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw a step with blocks for the next one, too, and the inputs of the model."""
    drawn, lens, p = Drawn(case, dtype), case["lens"], case["block_size"]
    lens = tuple((min(q, 1), s) for q, s in lens) if case["sampled_ids"] else lens
    a = drawn.lengths(lens)
    table, past, _ = drawn.table([s + 2 * q for q, s in lens], p)
    a |= table | dict(max_seq_len=a["max_seq_len"] + 2 * a["max_query_len"])  # an upper bound, as the batch grows
    a |= dict(num_tokens=int(a["cu_seqlens_q"][-1]) + case["padding"], block_size=p, window=None)
    a["slots"] = slots_of_step(a, dtype)["out"]
    a["input_positions"] = positions_of(a, dtype)["out"] if case["input_positions"] else None
    a["sampled_ids"] = drawn.whole(0, 2**31, len(lens)) if case["sampled_ids"] else None
    a["input_ids"] = drawn.whole(0, 2**31, a["num_tokens"]) if case["sampled_ids"] else None
    stale = {name: torch.ones_like(a[name], dtype=torch.bool) for name in STEP if a[name] is not None}
    for name in stale:
        padding = padding_of(a, a[name])
        a[name] = torch.where(padding, drawn.whole(2, 1000, len(padding)), a[name])
    return Inputs(a, past | stale)


def advanced(a: Arguments, compute: torch.dtype, form: str = "right") -> dict[str, Any]:
    """Return the tensors of the step after the call."""
    query_lens = a["cu_seqlens_q"].diff()
    grown = a["seq_lens"] + (torch.ones_like(query_lens) if form == "padding grows" else query_lens)
    longer = {**a, "seq_lens": grown}
    found: dict[str, Any] = dict(
        seq_lens=grown, slots=slots_of_step(a if form == "slots of before" else longer, compute)["out"]
    )
    if a["input_positions"] is not None:
        found["input_positions"] = positions_of(longer, compute)["out"]
    if a["sampled_ids"] is not None:
        found["input_ids"] = a["input_ids"].clone()
        for (q0, q1, _), token in zip(rows_of(a), a["sampled_ids"].tolist(), strict=True):
            found["input_ids"][q0:q1] = token
    return found


ADVANCE = Operation(
    name="advance",
    function="advance",
    signature="`cu_seqlens_q`, `block_table` and the like, `block_size`; changed in place: `seq_lens`, `slots` "
    "`[t]`, and, where "
    "it takes them, `input_positions` `[t]`, and `input_ids` `[t]` by `sampled_ids` `[b]`",
    draw=draw_advance,
    oracle=advanced,
    sizes=dict(
        lens=LENS, block_size=(4, 1, 16, 3), padding=(0, 3), input_positions=(False, True), sampled_ids=(False, True)
    ),
    dimensions=PAST_TILES,
    options=dict(input_positions=False, sampled_ids=False),
    specials=(
        Special(
            "idle",
            "A sequence without new tokens does not grow.",
            dict(lens=(((0, 4), (1, 2)), ((1, 1), (0, 0), (2, 9)))),
        ),
        Special("empty", "There may be no sequence.", dict(lens=((),))),
        PADDING,
    ),
    derived=BATCH,
    outputs=(),
    changes=("seq_lens", "slots", "input_positions", "input_ids"),
    exact=frozenset({"seq_lens", "slots", "input_positions", "input_ids"}),
    strided=("slots", "input_positions", "input_ids", "sampled_ids"),
    dtypes=NUMBERS,
    mistakes=(
        Mistake(
            "slots-not-advanced",
            "The slots are those of the step before.",
            lambda a, c: advanced(a, c, "slots of before"),
        ),
        Mistake(
            "idle-sequences-grow",
            "A sequence without new tokens grows, too.",
            lambda a, c: advanced(a, c, "padding grows"),
        ),
    ),
)


# --- decodes and prefills ---


def draw_order(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw the numbers of new tokens of some requests."""
    lens = Drawn(case, dtype).whole(0, 5, case["requests"]).tolist()
    return Inputs(dict(query_lens=lens, decode_len=case["decode_len"]))


def ordered(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return the decodes, then the prefills, each in their order."""
    lens, most = list(enumerate(a["query_lens"])), a["decode_len"] - (form == "below")
    decodes, prefills = ([i for i, x in lens if (x <= most) == first] for first in (True, False))
    return dict(out=(*decodes, *(prefills[::-1] if form == "reversed" else prefills)))


ORDER = Operation(
    name="order_decodes_first",
    function="order_decodes_first",
    signature="`query_lens`: a list, `decode_len`; it returns a list of requests, decodes (at most so many "
    "tokens) first, each kind in its order",
    draw=draw_order,
    oracle=ordered,
    sizes=dict(requests=(4, 1, 9, 30), decode_len=(1, 3, 0)),
    without=dict(decode_len=Without(1, ("decode_len",))),
    dimensions=dict(requests=of_size("requests")),
    specials=(Special("empty", "There may be no request.", dict(requests=(0,))),),
    exact=frozenset({"out"}),
    seen=lambda came, a: dict(out=tuple(came.tolist() if isinstance(came, Tensor) else came)),
    dtypes=NUMBERS,
    mistakes=(
        Mistake(
            "decode-len-excluded",
            "A request with exactly `decode_len` tokens is a prefill.",
            lambda a, c: ordered(a, c, "below"),
        ),
        Mistake("prefills-reversed", "Prefills come in the opposite order.", lambda a, c: ordered(a, c, "reversed")),
    ),
)


def draw_split(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw a batch with decodes before prefills, or after them."""
    drawn, most = Drawn(case, dtype), case["decode_len"]
    decodes = [(1 + i % most, 3 + 2 * i) for i in range(case["decodes"])]
    prefills = [(most + 1 + i, most + 4 + 3 * i) for i in range(case["prefills"])]
    lens = (*decodes, *prefills) if case["decodes_first"] else (*prefills, *decodes)
    a = drawn.lengths(lens)
    a |= drawn.table([s for _, s in lens], 4)[0] | dict(query_lens=[q for q, _ in lens], decode_len=most)
    return Inputs(a | dict(seq_lens=[s for _, s in lens]))


def parted(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return the tables of the decodes and of the prefills, and their rows."""
    found: Answers = {}
    for name, is_decode in (("decodes", True), ("prefills", False)):
        own = [i for i, q in enumerate(a["query_lens"]) if (q <= a["decode_len"]) == is_decode]
        lens = [a["query_lens"][i] for i in own]
        first = int(a["cu_seqlens_q"][own[0]]) if own else 0
        ends = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        found[f"{name}.cu_seqlens_q"] = ends + (first if form == "not rebased" else 0)
        found[f"{name}.seq_lens"] = torch.tensor([a["seq_lens"][i] for i in own], dtype=torch.int32)
        found[f"{name}.block_table"] = a["block_table"][own]
        found[f"{name}.maxima"] = True
        found[f"{name}.rows"] = torch.arange(first, first + sum(lens)) if own else torch.arange(0)
    return found


def seen_parts(came: Any, a: Arguments) -> Answers:
    """Return the tables of two parts, each a pair of a batch and a slice of rows."""
    found: Answers = {}
    for name, (batch, tokens) in zip(("decodes", "prefills"), came, strict=True):
        found |= {f"{name}.{x}": field_of(batch, x) for x in FIELDS[:3]}
        lens = dict(max_query_len=field_of(batch, "cu_seqlens_q").diff(), max_seq_len=field_of(batch, "seq_lens"))
        found[f"{name}.maxima"] = all(field_of(batch, x) >= max(y.tolist(), default=0) for x, y in lens.items())
        found[f"{name}.rows"] = torch.arange(int(a["cu_seqlens_q"][-1]))[tokens]
    return found


SPLIT = Operation(
    name="split_decodes_and_prefills",
    function="split_decodes_and_prefills",
    signature="`cu_seqlens_q`, `block_table` and the like, `query_lens`, `seq_lens`: lists, `decode_len`; it "
    "returns two pairs "
    "(batch, slice of the query rows), the batch with these tables and maxima",
    draw=draw_split,
    oracle=parted,
    sizes=dict(decodes=(2, 1, 3), prefills=(2, 1, 3), decode_len=(1, 3), decodes_first=(True, False)),
    without=dict(decode_len=Without(1, ("decode_len",))),
    dimensions=dict(
        decodes=of_size("decodes", 513), prefills=of_size("prefills", 129), decode_len=of_size("decode_len", 513)
    ),
    specials=(
        Special("one kind", "There may be no decodes, or no prefills.", dict(decodes=(0, 2), prefills=(0,))),
        Special("prefills alone", "There may be no decode.", dict(decodes=(0,))),
    ),
    derived={"batch": lambda a: batch_of({**a, "seq_lens": torch.tensor(a["seq_lens"], dtype=torch.int32)})},
    exact=frozenset(f"{part}.{x}" for part in ("decodes", "prefills") for x in (*FIELDS[:3], "rows")),
    seen=seen_parts,
    dtypes=NUMBERS,
    mistakes=(
        Mistake(
            "rows-not-rebased",
            "The rows of the second part do not begin with 0.",
            lambda a, c: parted(a, c, "not rebased"),
        ),
    ),
)

OPERATIONS = (MAKE_BATCH, POSITIONS, SLOT_MAPPING, ADVANCE, ORDER, SPLIT)
