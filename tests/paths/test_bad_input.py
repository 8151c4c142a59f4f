"""Bad input: an error that names the argument, what was expected and what came; the same of both twins.

One table for each kind of call, a row for each way to call it wrong: the argument, what is wrong with it, the bad value
(or a function that makes it of the good one), and the error. After each refusal every tensor that was passed has to
hold the bits that it held before.

What tables hold is refused by the plan of a step, an option by the options of a layer, and the rest by the call itself.
"""

import dataclasses
import importlib
import inspect
import math
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from refattn import checks_of_calls, checks_of_steps, checks_of_writes
from refattn.batch import Batch, Prefix, check_block_table, check_lengths
from refattn.checks import check
from refattn.keys import Pages, Pairs, Rows
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan
from tests.helpers.bad_input import MOST, PREFIXES, REQUESTS_BAD, bits, ints, tensors_in
from tests.helpers.batches import build
from tests.helpers.legal_calls import legal_calls
from tests.table import PATHS, SMALL, SMALLER, function_of
from twinattn.kit.call import OPTIONS as OPTION_NAMES

each_twin = pytest.mark.parametrize("package", ["refattn", "fastattn"], ids=["ref", "fast"])
pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NAN, INF = math.nan, math.inf


def change(**fields):
    """Make another batch of a good one."""
    return lambda batch: dataclasses.replace(batch, **fields)


def entry(sequence: int, column: int, block: int):
    """Put another block into the table of a batch."""

    def put(batch: Batch) -> Batch:
        table = batch.block_table.clone()
        table[sequence, column] = block
        return dataclasses.replace(batch, block_table=table)

    return put


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


# --- good arguments, by call ---


def of_attention(path: str) -> dict:
    """Make arguments of a path's plan and of its attention, all in one."""
    inputs = build(SMALL)
    arguments = PATHS[path].tensors(inputs) | dict(batch=inputs.batch) | SMALLER.get(path, {})
    if path != "varlen":
        arguments["block_size"] = SMALL.block_size
    if path == "cascade":  # 4 keys are shared
        table = inputs.batch.block_table.clone()
        table[1, 0], table[0, 1] = table[0, 0], table[1, 1]
        arguments["batch"] = dataclasses.replace(inputs.batch, seq_lens=ints(7, 20), block_table=table, max_seq_len=20)
        arguments["prefixes"] = [Prefix(0, 2, 4)]
    return arguments


def of_plan(path: str) -> dict:
    """Make the arguments of a path's plan."""
    arguments, taken = of_attention(path), inspect.signature(function_of("refattn", f"{path}.plan")).parameters
    return {name: value for name, value in arguments.items() if name in taken}


HELD = ("varlen", "chunked_prefill", "sliding_window", "local", "cascade", "differential")  # the paths of `BAD`
PAGED = HELD[1:]
METADATA = (
    *("make_batch", "positions", "slot_mapping", "order_decodes_first", "split_decodes_and_prefills"),
    "update_block_table",
)
BESIDES = (
    *("kv_cache.allocate", "kv_cache.write", "kv_cache.gather", "kv_cache.copy_blocks", "kv_cache.swap_blocks"),
    *("merge.merge", "merge.add_sinks", "cascade.find_prefixes", "differential.write", "differential.compute_lambda"),
    *("differential.interleave_halves", "differential.pools", "differential.allocate"),
)


LEGAL = legal_calls("refattn")
CALLS = {
    **{f"{path}.plan": lambda path=path: of_plan(path) for path in HELD},
    **{f"{path}.attention": lambda path=path: of_attention(path) for path in HELD},
    **{f"metadata.{name}": LEGAL[f"metadata.{name}"] for name in METADATA},
    "metadata.advance": lambda: dict(batch=build(SMALL).batch, slots=torch.zeros(4).long(), block_size=4),
    **{call: LEGAL[call] for call in BESIDES},
}

# --- bad ones ---


def numbers(argument: str, heads: str, query: str) -> list:
    """List the ways in which a number per head can be wrong, where an error calls the heads and the query so."""
    return [
        (argument, what, bad, f"{argument}: {message}")
        for what, bad, message in (
            ("a list", [0.0] * 4, f"expected floating point [{heads}], got list"),
            ("an array", np.zeros(4), f"expected floating point [{heads}], got numpy.ndarray"),
            ("a number", 0.5, f"expected floating point [{heads}], got 0.5"),
            ("ints", torch.zeros(4, dtype=torch.int64), f"expected floating point [{heads}], got int64 [4]"),
            ("too many", torch.zeros(5), "expected floating point [h=4], got float32 [5]"),
            ("a column", torch.zeros(4, 1), f"expected floating point [{heads}], got float32 [4, 1]"),
            ("NaN", torch.tensor([0.0, NAN, 0.0, 0.0]), "expected finite numbers, got [0.0, nan, 0.0, 0.0]"),
            ("inf", torch.tensor([0.0, 0.0, 0.0, -INF]), "expected finite numbers, got [0.0, 0.0, 0.0, -inf]"),
            ("elsewhere", torch.zeros(4, device="meta"), f"expected cpu, where {query} is, got meta"),
        )
    ]


WINDOW = f"expected (left, right), two ints, each at least -1 (no limit) and at most {MOST}, got "
WINDOWS = [
    ("an int", 3, WINDOW + "3"),
    ("one side", (3,), WINDOW + "(3,)"),
    ("three sides", (3, 0, 0), WINDOW + "(3, 0, 0)"),
    ("a fraction", (1.5, 0), WINDOW + "(1.5, 0)"),
    ("a list", [3, 0], WINDOW + "[3, 0]"),
    ("a string", "30", WINDOW + "'30'"),
    ("None", None, WINDOW + "None"),
    ("no left side", (None, 0), WINDOW + "(None, 0)"),
    ("a bool", (True, 0), WINDOW + "(True, 0)"),
    ("below -1, left", (-2, 0), WINDOW + "(-2, 0)"),
    ("below -1, right", (3, -2), WINDOW + "(3, -2)"),
    ("no int32", (2**31, 0), WINDOW + "(2147483648, 0)"),
]
FLAGS = [
    ("a string", "no", "expected True or False, got 'no'"),
    ("an int", 1, "expected True or False, got 1"),
    ("None", None, "expected True or False, got None"),
]
FINITE = [
    ("NaN", NAN, "expected a finite number{}, got nan"),
    ("inf", INF, "expected a finite number{}, got inf"),
    ("minus inf", -INF, "expected a finite number{}, got -inf"),
    ("a string", "0.5", "expected a finite number{}, got '0.5'"),
    ("a bool", True, "expected a finite number{}, got True"),
    ("a tensor", torch.tensor(0.5), "expected a finite number{}, got float32 []"),
    ("too large", 10**400, f"expected a finite number{{}}, got {10**400}"),
]


def rows(argument: str, table: list, *format_with: str) -> list:
    """Make rows of a table for one argument."""
    return [
        (argument, what, bad, f"{argument}: " + (message.format(*format_with) if format_with else message))
        for what, bad, message in table
    ]


OPTIONS = [  # options of a layer
    *rows("softmax_scale", FINITE, ""),
    *rows("softcap", FINITE, " of at least 0"),
    ("softcap", "negative", -0.5, "softcap: expected a finite number of at least 0, got -0.5"),
    ("softcap", "None", None, "softcap: expected a finite number of at least 0, got None"),
    *rows("batch_invariant", FLAGS),
    *numbers("alibi_slopes", "h", "query"),
    *numbers("sinks", "h", "query"),
    ("options", "None", None, "options: expected AttentionOptions, got None"),
    ("options", "a dict", {}, "options: expected AttentionOptions, got dict"),
    ("options", "the class", AttentionOptions, "options: expected AttentionOptions, got type"),
    (
        "options",
        "of other heads",
        AttentionOptions(sinks=torch.zeros(3)),
        "sinks: expected floating point [h=4], got float32 [3]",
    ),
]
RESULT = [  # what is to be returned, and where it goes
    *rows("return_lse", FLAGS),
    ("out", "a list", [], "out: expected float32 [t=3, h=4, dv=8], got list"),
    ("out", "halves", torch.zeros(3, 4, 8).half(), "out: expected float32 [t=3, h=4, dv=8], got float16 [3, 4, 8]"),
    ("out", "doubles", torch.zeros(3, 4, 8).double(), "out: expected float32 [t=3, h=4, dv=8], got float64 [3, 4, 8]"),
    ("out", "a row too few", torch.zeros(2, 4, 8), "out: expected float32 [t=3, h=4, dv=8], got float32 [2, 4, 8]"),
    ("out", "a row too many", torch.zeros(4, 4, 8), "out: expected float32 [t=3, h=4, dv=8], got float32 [4, 4, 8]"),
    ("out", "fewer heads", torch.zeros(3, 2, 8), "out: expected float32 [t=3, h=4, dv=8], got float32 [3, 2, 8]"),
    ("out", "narrower", torch.zeros(3, 4, 7), "out: expected float32 [t=3, h=4, dv=8], got float32 [3, 4, 7]"),
    ("out", "heads in one", torch.zeros(3, 32), "out: expected float32 [t=3, h=4, dv=8], got float32 [3, 32]"),
    (
        "out",
        "one row for all",
        torch.zeros(1, 4, 8).expand(3, 4, 8),
        "out: expected memory for each element, got strides of (0, 8, 1)",
    ),
    (
        "out",
        "rows that overlap",
        torch.zeros(3 * 32).as_strided((3, 4, 8), (16, 8, 1)),
        "out: expected memory for each element, got strides of (16, 8, 1)",
    ),
    ("out", "elsewhere", torch.zeros(3, 4, 8, device="meta"), "out: expected cpu, where query is, got meta"),
]
A_BATCH = [
    ("batch", "a dict", {}, "batch: expected a Batch, got dict"),
    ("batch", "None", None, "batch: expected a Batch, got None"),
]
QUERY = [
    ("query", "a list", [[[0.0]]], "query: expected [t, h, d], got list"),
    ("query", "None", None, "query: expected [t, h, d], got None"),
    ("query", "an array", np.zeros((3, 4, 8)), "query: expected [t, h, d], got numpy.ndarray"),
    ("query", "one row", lambda x: x[0], "query: expected [t, h, d], got float32 [4, 8]"),
    (
        "query",
        "ints",
        Tensor.long,
        "query: expected a floating point type (bfloat16, float16, float32 or float64), got int64 [3, 4, 8]",
    ),
    (
        "query",
        "no heads",
        lambda x: x[:, :0],
        "query: expected at least one head, of a size of at least 1, got float32 [3, 0, 8]",
    ),
    (
        "query",
        "sparse",
        Tensor.to_sparse,
        "query: expected [t, h, d], got float32 [3, 4, 8] in the layout torch.sparse",
    ),
    (
        "query",
        "nested",
        lambda x: torch.nested.nested_tensor([x, x]),
        "query: expected [t, h, d], got float32 in a nested tensor",
    ),
    (
        "query",
        "jagged",
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        "query: expected [t, h, d], got float32 in a nested tensor",
    ),
    (
        "query",
        "no head size",
        lambda x: x[..., :0],
        "query: expected at least one head, of a size of at least 1, got float32 [3, 4, 0]",
    ),
]
LENGTHS = [  # contents of a batch: read on a CPU
    (
        "batch",
        "a negative length",
        change(seq_lens=ints(5, -20)),
        "seq_lens: expected lengths of at least 0, got [5, -20]",
    ),
    (
        "batch",
        "a small max_query_len",
        change(max_query_len=1),
        "max_query_len: expected at least 2, the longest, got 1",
    ),
    ("batch", "a small max_seq_len", change(max_seq_len=19), "max_seq_len: expected at least 20, the longest, got 19"),
    *(
        (
            "batch",
            f"{rows} tokens",
            change(num_tokens=rows),
            f"num_tokens: expected 3, the query rows of the batch, got {rows}",
        )
        for rows in (2, 4)
    ),
]


STARTS = [
    ("batch", what, change(cu_seqlens_q=ints(*bad)), f"cu_seqlens_q: expected to rise from 0, got {[*bad]}")
    for what, bad in (
        ("rows from 1", (1, 2, 3)),
        ("rows from -1", (-1, 2, 3)),
        ("rows that fall", (0, 3, 2)),
        ("rows that fall by more than an int32", (0, MOST, -MOST - 1)),
    )
]
TOO_FEW_ROWS = (
    "query",
    "too few rows",
    lambda x: x[:2],
    "query: expected at least 3 rows, where cu_seqlens_q ends, got t=2",
)
COLUMNS = [
    (
        "batch",
        "no table",
        change(block_table=None),
        "block_table: expected int32 [b, m], got None: this path reads a paged cache",
    ),
    (
        "batch",
        "a column too few",
        lambda batch: dataclasses.replace(batch, block_table=batch.block_table[:, :4]),
        "block_table: expected at least 5 columns for the 20 keys of sequence 1 in blocks of 4, got 4",
    ),
    (
        "batch",
        "as many keys as an int32 counts",
        change(seq_lens=ints(5, MOST), max_seq_len=MOST),
        f"block_table: expected at least {2**29} columns for the {MOST} keys of sequence 1 in blocks of 4, got 7",
    ),
]


NO_BLOCK = (
    "batch",
    "block -1",
    entry(1, 4, -1),
    "block_table: expected entries of at least 0 for the blocks that sequence 1 uses, got -1 in column 4",
)
POOLS = [
    ("key_cache", "None", None, "key_cache: expected float32 [n, p, hk, d=8], got None"),
    ("key_cache", "a list", [], "key_cache: expected float32 [n, p, hk, d=8], got list"),
    ("key_cache", "a pair", (1, 2), "key_cache: expected float32 [n, p, hk, d=8], got tuple"),
    ("key_cache", "halves", Tensor.half, "key_cache: expected float32 [n, p, hk, d=8], got float16 [10, 4, 2, 8]"),
    ("key_cache", "one block", lambda x: x[0], "key_cache: expected float32 [n, p, hk, d=8], got float32 [4, 2, 8]"),
    (
        "key_cache",
        "narrower",
        lambda x: x[..., :6],
        "key_cache: expected float32 [n, p, hk, d=8], got float32 [10, 4, 2",
    ),
    ("query", "three heads", lambda x: x[:, :3], "query: expected a number of heads that hk=2 divides, got h=3"),
    ("key_cache", "no heads", lambda x: x[:, :, :0], "value_cache: expected float32 [n=10, p=4, hk=0, dv], got"),
    ("key_cache", "no rows", lambda x: x[:, :0], "value_cache: expected float32 [n=10, p=0, hk=2, dv], got float32"),
    ("key_cache", "elsewhere", meta, "key_cache: expected cpu, where query is, got meta"),
    ("value_cache", "None", None, "value_cache: expected float32 [n=10, p=4, hk=2, dv], got None"),
    ("value_cache", "fewer blocks", lambda x: x[1:], "value_cache: expected float32 [n=10, p=4, hk=2, dv], got"),
    ("value_cache", "no head size", lambda x: x[..., :0], "value_cache: expected a head size of at least 1, got"),
    ("value_cache", "elsewhere", meta, "value_cache: expected cpu, where query is, got meta"),
]


def elsewhere(plan):
    """Move a plan to another device."""
    if isinstance(plan, CascadePlan):
        return CascadePlan(elsewhere_batch(plan.batch), tuple(map(elsewhere, plan.levels)))
    tensors = {name: getattr(plan, name) for name in ("first_keys", "positions", "sequences")}
    moved = {name: None if tensor is None else meta(tensor) for name, tensor in tensors.items()}
    return dataclasses.replace(plan, batch=elsewhere_batch(plan.batch), **moved)


def elsewhere_batch(batch: Batch) -> Batch:
    tensors = {name: getattr(batch, name) for name in ("cu_seqlens_q", "seq_lens", "block_table")}
    return dataclasses.replace(batch, **{name: meta(x) for name, x in tensors.items() if x is not None})


def in_blocks(block_size: int):
    """Make a plan of the same batch for other blocks."""

    def put(plan):
        if isinstance(plan, CascadePlan):
            return CascadePlan(plan.batch, tuple(map(put, plan.levels)))
        return dataclasses.replace(plan, block_size=block_size)

    return put


def in_rows(plan: Plan) -> Plan:
    return Plan(plan.batch)


ELSEWHERE = ("plan", "elsewhere", elsewhere, "seq_lens: expected cpu, where query is, got meta")
A_PLAN = [
    ("plan", "None", None, "plan: expected a Plan, got None"),
    ("plan", "a batch", lambda plan: plan.batch, "plan: expected a Plan, got refattn.batch.Batch"),
    (
        "plan",
        "a cascade",
        lambda plan: CascadePlan(plan.batch, (Plan(plan.batch, 4),)) if plan.block_size else EMPTY_CASCADE,
        "plan: expected a Plan, got refattn.plan.CascadePlan",
    ),
    ("plan", "the class", Plan, "plan: expected a Plan, got type"),
]
ANY_PLAN = "plan: expected a Plan, a CascadePlan or a TreePlan, got "
NO_PLAN = [
    ("plan", "None", None, f"{ANY_PLAN}None"),
    ("plan", "a batch", lambda plan: plan.batch, f"{ANY_PLAN}refattn.batch.Batch"),
    ("plan", "the class", Plan, f"{ANY_PLAN}type"),
]
NOTHING = Batch(ints(0), ints(), ints()[:, None], 0, 0)
EMPTY_CASCADE = CascadePlan(NOTHING, (Plan(NOTHING, 4),))


def of_pool(pool: str) -> list:
    """List the plans that do not fit a pool, by its name, and what their batches may ask of it."""
    return [
        (
            "plan",
            "of larger blocks",
            in_blocks(8),
            f"{pool}: expected blocks of 8 tokens, as in the plan, got p=4",
        ),
        (
            "batch",
            "block n",
            entry(1, 4, 10),
            f"{pool}: expected at least 11 blocks, as the block table leads to block 10, got n=10",
        ),
    ]


IN_ROWS = (
    "plan",
    "over rows",
    in_rows,
    "plan: expected one over pages, with a block size, got one over rows, from varlen.plan",
)
OF_EVERY_PATH = [*QUERY, TOO_FEW_ROWS, *OPTIONS, *RESULT, ELSEWHERE]
OF_ONE_PLAN = [*OF_EVERY_PATH, *A_PLAN]
OF_PAGES = [*OF_ONE_PLAN, *of_pool("key_cache"), IN_ROWS, *POOLS]
OF_EVERY_PLAN = [*A_BATCH, *LENGTHS, *STARTS, *rows("causal", FLAGS), *rows("window_size", WINDOWS)]


def level(i: int, **fields):
    """Change the batch, or another field, of one level."""

    def put(plan: CascadePlan) -> CascadePlan:
        changed = {name: fields[name] for name in fields if name in ("first_keys", "block_size", "positions")}
        of_batch = {name: value for name, value in fields.items() if name not in changed}
        batch = dataclasses.replace(plan.levels[i].batch, **of_batch)
        one = dataclasses.replace(plan.levels[i], batch=batch, **changed)
        return CascadePlan(plan.batch, tuple(one if j == i else other for j, other in enumerate(plan.levels)))

    return put


def in_groups(*edges: int):
    """Give the first level other groups, without keys."""
    b = len(edges) - 1
    nothing = torch.zeros(b, dtype=torch.int32)
    batch = Batch(ints(*edges), nothing, nothing[:, None], 3, 4)
    return lambda plan: CascadePlan(plan.batch, (Plan(batch, 4), *plan.levels[1:]))


LEVELS = [
    ("plan", "None", None, "plan: expected a CascadePlan, got None"),
    ("plan", "a batch", lambda x: x.batch, "plan: expected a CascadePlan, got refattn.batch.Batch"),
    ("plan", "one level", lambda x: x.levels[0], "plan: expected a CascadePlan, got refattn.plan.Plan"),
    ("plan", "levels alone", lambda x: [*x.levels], "plan: expected a CascadePlan, got list"),
    (
        "plan",
        "without the first level",
        lambda x: CascadePlan(x.batch, x.levels[1:]),
        "levels[0].first_keys: expected 0 for sequence 0, as the levels before hold so many of its keys, got 4",
    ),
    ("plan", "int64 keys", level(0, first_keys=torch.tensor([0])), "first_keys: expected int32 [b=1], got int64 [1]"),
    (
        "plan",
        "too few columns",
        level(0, block_table=ints()[None]),
        "block_table: expected at least 1 columns for the 4 keys of sequence 0 in blocks of 4, got 0",
    ),
    (
        "plan",
        "no levels",
        lambda x: CascadePlan(x.batch, ()),
        "levels: expected at least one, the keys not shared, got none",
    ),
    ("plan", "no list", lambda x: CascadePlan(x.batch, None), "levels: expected a list of plans, got None"),
    ("plan", "no batch", lambda x: CascadePlan(None, x.levels), "batch: expected a Batch, got None"),
    (
        "plan",
        "batches",
        lambda x: CascadePlan(x.batch, tuple(one.batch for one in x.levels)),
        "levels[0]: expected a Plan over pages, got refattn.batch.Batch",
    ),
    (
        "plan",
        "rows",
        lambda x: CascadePlan(x.batch, (Plan(x.batch), x.levels[1])),
        "levels[0]: expected a Plan over pages, got one over rows",
    ),
    ("plan", "other blocks", level(1, block_size=8), "levels[1]: expected blocks of 4 tokens, got 8"),
    ("plan", "a list of keys", level(0, first_keys=[0]), "first_keys: expected int32 [b=1], got list"),
    (
        "plan",
        "keys elsewhere",
        level(0, first_keys=meta(ints(0))),
        "first_keys: expected cpu, where seq_lens is, got",
    ),
    (
        "plan",
        "a level elsewhere",
        lambda x: CascadePlan(x.batch, (elsewhere(x.levels[0]), x.levels[1])),
        "levels[0]: expected cpu, where seq_lens is, got meta",
    ),
    ("plan", "no table", level(0, block_table=None), "block_table: expected int32 [b, m], got None"),
    (
        "plan",
        "a level from row 1",
        level(0, cu_seqlens_q=ints(2, 3)),
        "cu_seqlens_q: expected to rise from 0, got [2, 3]",
    ),
    ("plan", "a level that falls", in_groups(0, 3, 2, 3), "cu_seqlens_q: expected to rise from 0, got [0, 3, 2, 3]"),
    *(
        (
            "plan",
            what,
            in_groups(*edges),
            f"levels[0]: expected groups of the sequences at query rows [0, 2, 3], got {[*edges]}",
        )
        for what, edges in (
            ("a level that ends early", (0, 2)),
            ("a level that ends late", (0, 2, 3, 3, 4)),
            ("a level that cuts a sequence", (0, 1, 3)),
        )
    ),
    (
        "plan",
        "the last level in groups",
        lambda x: CascadePlan(x.batch, x.levels[:1]),
        "levels[0]: expected groups of the sequences at query rows [0, 2, 3], got [0, 3]",
    ),
    (
        "plan",
        "a negative length",
        level(0, seq_lens=ints(-4)),
        "seq_lens: expected lengths of at least 0, got [-4]",
    ),
    (
        "plan",
        "a small max_query_len",
        level(0, max_query_len=2),
        "max_query_len: expected at least 3, the longest, got 2",
    ),
    (
        "plan",
        "a small max_seq_len",
        level(1, max_seq_len=15),
        "max_seq_len: expected at least 16, the longest, got 15",
    ),
    (
        "plan",
        "block n",
        level(0, block_table=ints(10)[None]),
        "key_cache: expected at least 11 blocks, as the block table leads to block 10, got n=10",
    ),
    (
        "plan",
        "block -1",
        level(0, block_table=ints(-1)[None]),
        "block_table: expected entries of at least 0 for the blocks that sequence 0 uses, got -1 in column 0",
    ),
    (
        "plan",
        "a level too late",
        level(0, first_keys=ints(4)),
        "levels[0].first_keys: expected 0 for sequence 0, as the levels before hold so many of its keys, got 4",
    ),
    (
        "plan",
        "keys that two levels have",
        level(1, first_keys=ints(4, 0)),
        "levels[1].first_keys: expected 4 for sequence 1, as the levels before hold so many of its keys, got 0",
    ),
    (
        "plan",
        "keys that no level has",
        level(1, seq_lens=ints(3, 15)),
        "levels: expected the 20 keys of sequence 1, got 19",
    ),
    (
        "plan",
        "a level that reaches into the queries",
        level(0, seq_lens=ints(6), block_table=ints(1, 2)[None], max_seq_len=6),
        "levels[0]: expected to end before the first query of each sequence, at 5 of sequence 0, got 6 keys",
    ),
    (
        "plan",
        "too few positions",
        level(0, positions=ints(5, 6)),
        "positions: expected at least 3, one for each query row of the batch, got 2",
    ),
    (
        "plan",
        "positions in a list",
        level(0, positions=[5, 6, 19]),
        "positions: expected int32 [t], got list",
    ),
]
BLOCKS_BAD = [
    (
        "block_tables",
        "a tensor",
        torch.ones(2, 5),
        "block_tables: expected a list of lists of blocks, got float32 [2, 5]",
    ),
    ("block_tables", "a row too few", [[1, 2]], "block_tables: expected 2 rows, one per sequence, got 1"),
    ("block_tables", "blocks, no rows", [1, 2], "block_tables[0]: expected a list of blocks, got 1"),
    ("block_tables", "a fraction", [[0.5, 2], []], "block_tables[0]: expected int32 blocks, got 0.5"),
    ("block_tables", "None", [[1, 2], [1, None]], "block_tables[1]: expected int32 blocks, got None"),
    ("block_tables", "a string", [[1, 2], ["3"]], "block_tables[1]: expected int32 blocks, got '3'"),
    ("block_tables", "no int32", [[1, 2], [2**31]], f"block_tables[1]: expected int32 blocks, got {2**31}"),
    ("block_tables", "nested", [[1, 2], [[3]]], "block_tables[1]: expected int32 blocks, got list"),
    (
        "block_tables",
        "below int32",
        [[-(2**31), -(2**31) - 1], []],
        f"block_tables[0]: expected int32 blocks, got {-(2**31) - 1}",
    ),
    ("block_tables", "past int32", [[MOST, 2**31], []], f"block_tables[0]: expected int32 blocks, got {2**31}"),
]
A_BLOCK_SIZE = [
    ("block_size", "zero", 0, "block_size: expected a positive int, got 0"),
    ("block_size", "a fraction", 4.0, "block_size: expected a positive int, got 4.0"),
    ("block_size", "a bool", True, "block_size: expected a positive int, got True"),
    ("block_size", "None", None, "block_size: expected a positive int, got None"),
    ("block_size", "more than an int32 counts", 2**31, f"block_size: expected at most {MOST}, got {2**31}"),
]
A_DEVICE = [("device", "no name of one", "nowhere", "device: expected a torch.device or its name, got 'nowhere'")]
ROWS = [
    ("num_tokens", "a row too few", 2, "num_tokens: expected at least 3, the query rows of the batch, got 2"),
    ("num_tokens", "negative", -1, "num_tokens: expected a Python int of at least 0, got -1"),
    ("num_tokens", "a fraction", 4.0, "num_tokens: expected a Python int of at least 0, got 4.0"),
]
POOL_SIZES = [
    ("num_blocks", "zero", 0, "num_blocks: expected a positive int, got 0"),
    ("head_size", "a fraction", 8.0, "head_size: expected a positive int, got 8.0"),
    ("dtype", "a name", "float32", "dtype: expected a torch.dtype, got 'float32'"),
    *A_DEVICE,
]
PAIRS_OF = "query: expected pairs of heads, in a number that"
SLOTS = "slot_mapping: expected slots in 0..19, or -1 for padding, got "
BAD = {
    "varlen.plan": [
        *OF_EVERY_PLAN,
        (
            "batch",
            "more keys than an int32 counts",
            change(seq_lens=ints(5, MOST), max_seq_len=MOST),
            f"seq_lens: expected at most {MOST} keys together, got {MOST + 5}",
        ),
    ],
    "chunked_prefill.plan": [*OF_EVERY_PLAN, *COLUMNS, NO_BLOCK, *A_BLOCK_SIZE],
    "sliding_window.plan": [*OF_EVERY_PLAN, *COLUMNS, NO_BLOCK, *A_BLOCK_SIZE],
    "local.plan": [
        *OF_EVERY_PLAN,
        *COLUMNS,
        (*NO_BLOCK[:3], NO_BLOCK[3].partition("sequence")[0]),  # the plan's sequences are chunks
        *A_BLOCK_SIZE,
        ("chunk_size", "of broken blocks", 6, "chunk_size: expected a multiple of block_size=4, got 6"),
        ("chunk_size", "half a block", 2, "chunk_size: expected a multiple of block_size=4, got 2"),
        ("chunk_size", "negative", -4, "chunk_size: expected a positive int, got -4"),
        ("chunk_size", "a fraction", 8.0, "chunk_size: expected a positive int, got 8.0"),
        ("chunk_size", "zero", 0, "chunk_size: expected a positive int, got 0"),
        ("chunk_size", "None", None, "chunk_size: expected a positive int, got None"),
        ("chunk_size", "a string", "8", "chunk_size: expected a positive int, got '8'"),
    ],
    "cascade.plan": [
        *OF_EVERY_PLAN,
        *COLUMNS,
        NO_BLOCK,
        *A_BLOCK_SIZE,
        *PREFIXES,
        (
            "prefixes",
            "of no such sequence",
            [Prefix(0, 3, 4)],
            "prefixes[0]: expected sequences in 0..2, got 0..3",
        ),
        (
            "prefixes",
            "of no sequence",
            [Prefix(1, 1, 4)],
            "prefixes[0]: expected sequences in 0..2, got 1..1",
        ),
        (
            "prefixes",
            "a broken block",
            [Prefix(0, 2, 6)],
            "prefixes[0]: expected a multiple of the block size 4, got 6 keys",
        ),
        ("prefixes", "no keys", [Prefix(0, 2, 0)], "prefixes[0]: expected a multiple of the block size 4, got 0 keys"),
        (
            "prefixes",
            "up to a query",
            [Prefix(0, 2, 8)],
            "prefixes[0]: expected to end before the first query of each sequence, at 5 of sequence 0, got 8 keys",
        ),
        (
            "batch",
            "other blocks",
            entry(1, 0, 9),
            "prefixes[0]: expected sequences 0 and 1 to share 4 keys by block",
        ),
        (
            "prefixes",
            "twice",
            [Prefix(0, 2, 4), Prefix(0, 2, 4)],
            "prefixes[1]: expected to be apart from Prefix(first=0, last=2, end=4) or nested with it, got",
        ),
    ],
    "differential.plan": [*OF_EVERY_PLAN, *COLUMNS, NO_BLOCK, *A_BLOCK_SIZE],
    "varlen.attention": [
        *OF_ONE_PLAN,
        (
            "plan",
            "over pages",
            lambda plan: Plan(dataclasses.replace(plan.batch, block_table=torch.zeros(2, 5).int()), 4),
            "plan: expected one over rows, from varlen.plan, got blocks of 4 tokens",
        ),
        ("key", "a list", [], "key: expected float32 [s, hk, d=8], got list"),
        ("key", "None", None, "key: expected float32 [s, hk, d=8], got None"),
        ("key", "elsewhere", meta, "key: expected cpu, where query is, got meta"),
        ("value", "None", None, "value: expected float32 [s=25, hk=2, dv], got None"),
        ("value", "no head size", lambda x: x[..., :0], "value: expected a head size of at least 1, got"),
        (
            "value",
            "a row too few",
            lambda x: x[:24],
            "value: expected float32 [s=25, hk=2, dv], got float32 [24, 2, 8]",
        ),
        ("value", "elsewhere", meta, "value: expected cpu, where query is, got meta"),
        (
            "batch",
            "more keys than rows",
            change(seq_lens=ints(5, 21), max_seq_len=21),
            "key: expected at least the 26 rows that seq_lens adds up to, got 25",
        ),
        (
            "batch",
            "as many keys as an int32 counts",
            change(seq_lens=ints(0, MOST), max_seq_len=MOST),
            f"key: expected at least the {MOST} rows that seq_lens adds up to, got 25",
        ),
    ],
    "chunked_prefill.attention": OF_PAGES,
    "sliding_window.attention": OF_PAGES,
    "local.attention": OF_PAGES,
    "cascade.attention": [*OF_EVERY_PATH, *of_pool("key_cache"), *POOLS, *LEVELS],
    "differential.attention": [
        *OF_EVERY_PATH,
        *NO_PLAN,
        *of_pool("cache"),
        ("plan", "over rows", in_rows, "cache: expected float32 [2, 2, s, hk/2, d=8], got float32 [2, 2, 10, 4, 1, 8]"),
        *(
            ("cache", what, bad, f"cache: expected float32 [2, 2, n, p, hk/2, d=8], got {got}")
            for what, bad, got in (
                ("None", None, "None"),
                ("a list", [], "list"),
                ("a half", lambda x: x[0], "float32 [2, 10, 4, 1, 8]"),
                ("one half of two", lambda x: x[:1], "float32 [1, 2, 10, 4, 1, 8]"),
                ("halves", Tensor.half, "float16 [2, 2, 10, 4, 1, 8]"),
                ("narrower", lambda x: x[..., :6], "float32 [2, 2, 10, 4, 1, 6]"),
            )
        ),
        ("query", "three heads", lambda x: x[:, :3], f"{PAIRS_OF} hk/2=1 divides, got h=3"),
        ("cache", "three pairs", lambda x: x.repeat(1, 1, 1, 1, 3, 1), f"{PAIRS_OF} hk/2=3 divides, got h=4"),
        ("lambda_full", "one a head", torch.zeros(4), "lambda_full: expected [], got float32 [4]"),
        ("norm_weight", "of one half", torch.ones(8), "norm_weight: expected [2 * d=16], got float32 [8]"),
        ("cache", "elsewhere", meta, "cache: expected cpu, where query is, got meta"),
        ("lambda_full", "a number", 0.3, "lambda_full: expected [], got 0.3"),
        ("lambda_full", "an int", torch.tensor(1), "lambda_full: expected a floating point type, got int64 []"),
        ("lambda_full", "NaN", torch.tensor(NAN), "lambda_full: expected a finite number, got nan"),
        ("lambda_full", "inf", torch.tensor(INF), "lambda_full: expected a finite number, got inf"),
        ("lambda_full", "elsewhere", meta, "lambda_full: expected cpu, where query is, got meta"),
        *rows("lambda_init", FINITE, ""),
        *rows("norm_eps", FINITE, " above 0"),
        ("norm_eps", "zero", 0.0, "norm_eps: expected a finite number above 0, got 0.0"),
        ("norm_weight", "a list", [1.0] * 16, "norm_weight: expected [2 * d=16], got list"),
        ("norm", "a number", 1.0, "norm: expected a function of the differences, got 1.0"),
        ("norm_weight", "ints", ints(*range(16)), "norm_weight: expected a floating point type, got int32 [16]"),
    ],
    "metadata.make_batch": [*REQUESTS_BAD, *BLOCKS_BAD, *A_DEVICE],
    "metadata.positions": [*A_BATCH, *LENGTHS, *STARTS, *ROWS],
    "metadata.slot_mapping": [
        *A_BATCH,
        *LENGTHS,
        *STARTS,
        *ROWS,
        *COLUMNS[1:],  # without a table there is no cache
        *A_BLOCK_SIZE,
        (
            "batch",
            "block -1",
            entry(1, 4, -1),
            "block_table: expected entries of at least 0 for the new tokens of sequence 1, got -1 in column 4",
        ),
        ("window", "more than an int32 counts", 2**31, f"window: expected at most {MOST}, got {2**31}"),
    ],
    "metadata.order_decodes_first": [
        ("query_lens", "fractions", [2.0, 1.0], "query_lens: expected Python ints, got 2.0"),
        ("query_lens", "negative", [2, -1], "query_lens: expected lengths of at least 0, got [2, -1]"),
        ("query_lens", "a tensor", ints(2, 1), "query_lens: expected a list of lengths, got int32 [2]"),
        ("decode_len", "a fraction", 1.5, "decode_len: expected a Python int of at least 0, got 1.5"),
    ],
    "metadata.split_decodes_and_prefills": [
        *A_BATCH,
        *LENGTHS,
        *STARTS,
        ("query_lens", "too few", [2], "query_lens: expected 2 lengths, one per sequence, got 1"),
        ("query_lens", "others", [1, 2], "query_lens: expected [2, 1], as in the batch, got [1, 2]"),
        ("query_lens", "fractions", [2.0, 1.0], "query_lens: expected Python ints, got 2.0"),
        ("query_lens", "a tensor", ints(2, 1), "query_lens: expected a list of lengths, got int32 [2]"),
        ("decode_len", "a fraction", 1.5, "decode_len: expected a Python int of at least 0, got 1.5"),
    ],
    "metadata.advance": [
        *A_BATCH,
        *LENGTHS,
        *STARTS,
        *A_BLOCK_SIZE,
        ("slots", "a list", [0] * 4, "slots: expected int64 [t], got list"),
        ("slots", "int32", Tensor.int, "slots: expected int64 [t], got int32 [4]"),
        ("slots", "too few", lambda x: x[:2], "slots: expected int64 [t], at least 3 query rows, got int64 [2]"),
        ("slots", "elsewhere", meta, "slots: expected cpu, where seq_lens is, got meta"),
        (
            "batch",
            "no room for one more",
            lambda batch: dataclasses.replace(batch, block_table=batch.block_table[:, :5]),
            "block_table: expected at least 6 columns for the 21 keys of sequence 1 in blocks of 4, got 5",
        ),
        (
            "batch",
            "block -1",
            entry(1, 5, -1),
            "block_table: expected entries of at least 0 for the new tokens of sequence 1, got -1 in column 5",
        ),
    ],
    "metadata.update_block_table": [
        *A_BATCH,
        ("block_table", "a list", [[1], [2]], "block_table: expected int32 [b=2, m], got list"),
        ("block_table", "int64", Tensor.long, "block_table: expected int32 [b=2, m], got int64 [2, 1]"),
        ("block_table", "elsewhere", meta, "block_table: expected cpu, where seq_lens is, got meta"),
    ],
    "kv_cache.allocate": [
        *POOL_SIZES,
        *A_BLOCK_SIZE,
        ("layout", "None", None, 'layout: expected "NHD" or "HND", got None'),
        ("layout", "another", "DHN", """layout: expected "NHD" or "HND", got 'DHN'"""),
    ],
    "kv_cache.write": [
        ("key", "a list", [], "key: expected float32 [t, hk=2, d=8], got list"),
        ("key", "elsewhere", meta, "value: expected meta, where key is, got cpu"),
        ("key", "halves", Tensor.half, "key: expected float32 [t, hk=2, d=8], got float16 [3, 2, 8]"),
        ("value", "None", None, "value: expected float32 [t=3, hk=2, dv=8], got None"),
        ("value", "a row too few", lambda x: x[:2], "value: expected float32 [t=3, hk=2, dv=8], got float32 [2, 2, 8]"),
        ("value", "elsewhere", meta, "value: expected cpu, where key is, got meta"),
        ("key_cache", "None", None, "key_cache: expected [n, p, hk, d], got None"),
        ("key_cache", "one block", lambda x: x[0], "key_cache: expected [n, p, hk, d], got float32 [4, 2, 8]"),
        ("key_cache", "elsewhere", meta, "key_cache: expected cpu, where key is, got meta"),
        ("value_cache", "a list", [], "value_cache: expected [n=5, p=4, hk=2, dv], got list"),
        ("value_cache", "fewer blocks", lambda x: x[:3], "value_cache: expected [n=5, p=4, hk=2, dv], got float32 [3,"),
        *(
            (name, what, shared, f"{name}: expected memory for each element, got strides of {strides}")
            for name in ("key_cache", "value_cache")
            for what, shared, strides in (
                ("expanded", lambda x: x[:1].expand_as(x), (0, 16, 8, 1)),
                ("overlapping", lambda x: x.as_strided(x.shape, (32, 16, 8, 1)), (32, 16, 8, 1)),
            )
        ),
        ("slot_mapping", "a list", [0, 1, 2], "slot_mapping: expected int64 [t=3], got list"),
        ("slot_mapping", "elsewhere", meta, "slot_mapping: expected cpu, where key is, got meta"),
        ("slot_mapping", "int32", Tensor.int, "slot_mapping: expected int64 [t=3], got int32 [3]"),
        ("slot_mapping", "too many", torch.arange(4), "slot_mapping: expected int64 [t=3], got int64 [4]"),
        ("slot_mapping", "slot n * p", torch.tensor([0, 1, 20]), SLOTS + "20"),
        ("slot_mapping", "slot -2", torch.tensor([0, -2, 1]), SLOTS + "-2"),
        (
            "slot_mapping",
            "twice",
            torch.tensor([7, 0, 7]),
            "slot_mapping: expected each slot once, got slot 7 for several tokens",
        ),
    ],
    "kv_cache.gather": [
        ("cache", "a list", [], "cache: expected [n, p, hk, d], got list"),
        ("cache", "one block", lambda x: x[0], "cache: expected [n, p, hk, d], got float32 [4, 2, 8]"),
        ("blocks", "a list", [4, 0], "blocks: expected int32 [m], got list"),
        ("blocks", "int64", Tensor.long, "blocks: expected int32 [m], got int64 [2]"),
        ("blocks", "elsewhere", meta, "blocks: expected cpu, where cache is, got meta"),
        ("blocks", "block n", ints(5, 0), "blocks: expected entries in 0..4, got [5, 0]"),
        ("blocks", "block -1", ints(4, -1), "blocks: expected entries in 0..4, got [4, -1]"),
        ("seq_len", "a fraction", 7.0, "seq_len: expected 0..8 for 2 blocks, got 7.0"),
        ("seq_len", "one too many", 9, "seq_len: expected 0..8 for 2 blocks, got 9"),
        ("seq_len", "negative", -1, "seq_len: expected 0..8 for 2 blocks, got -1"),
    ],
    "kv_cache.copy_blocks": [
        ("caches", "one tensor", lambda x: x[0], "caches: expected a list of caches, got float32 [5, 4]"),
        ("caches", "lists", [[], []], "caches[0]: expected a cache [n, ...], got list"),
        (
            "caches",
            "expanded",
            lambda x: [x[0], x[1][:1].expand(5, 4)],
            "caches[1]: expected memory for each element, got strides of (0, 1)",
        ),
        ("pairs", "a list", [[0, 4]], "pairs: expected int64 [k, 2], got list"),
        ("pairs", "from block n", torch.tensor([[5, 0]]), "pairs: expected blocks in 0..4, got [5]"),
        ("pairs", "to block n", torch.tensor([[0, 5]]), "pairs: expected blocks in 0..4, got [5]"),
        ("pairs", "from block -1", torch.tensor([[-1, 0]]), "pairs: expected blocks in 0..4, got [-1]"),
        ("pairs", "to block -1", torch.tensor([[0, -1]]), "pairs: expected blocks in 0..4, got [-1]"),
        ("pairs", "to one twice", torch.tensor([[0, 1], [2, 1]]), "pairs: expected each destination once, got [1, 1]"),
        ("pairs", "one pair", torch.tensor([0, 1]), "pairs: expected int64 [k, 2], got int64 [2]"),
        ("pairs", "int32", torch.tensor([[0, 1]]).int(), "pairs: expected int64 [k, 2], got int32 [1, 2]"),
    ],
    "kv_cache.swap_blocks": [
        ("sources", "one tensor", lambda x: x[0], "sources: expected a list of caches, got float32 [5, 4]"),
        ("destinations", "None", None, "destinations: expected a list of caches, got None"),
        ("destinations", "none", [], "destinations: expected 1 caches, as in sources, got 0"),
        (
            "destinations",
            "of another type",
            lambda x: [x[0].double()],
            "destinations[0]: expected blocks as in float32 [5, 4], got float64 [3, 4]",
        ),
        (
            "destinations",
            "of other blocks",
            lambda x: [x[0][:, :3]],
            "destinations[0]: expected blocks as in float32 [5, 4], got float32 [3, 3]",
        ),
        (
            "destinations",
            "expanded",
            lambda x: [x[0][:, :1].expand(3, 4)],
            "destinations[0]: expected memory for each element, got strides of (4, 0)",
        ),
        ("pairs", "to block n", torch.tensor([[4, 3]]), "pairs: expected blocks in 0..2, got [3]"),
    ],
    "merge.merge": [
        (
            "outs",
            "one tensor",
            torch.stack,
            "outs: expected a list of tensors, one for each part, got float32 [2, 3, 4,",
        ),
        ("outs", "None", None, "outs: expected a list of tensors, one for each part, got None"),
        ("outs", "lists", [[], []], "outs[0]: expected [t, h, dv], got list"),
        (
            "outs",
            "ints",
            lambda x: [y.int() for y in x],
            "outs[0]: expected a floating point type, got int32 [3, 4, 8]",
        ),
        ("outs", "elsewhere", lambda x: [x[0], meta(x[1])], "outs[1]: expected cpu, where outs[0] is, got meta"),
        (
            "lses",
            "one tensor",
            torch.stack,
            "lses: expected a list of tensors, one for each part, got float32 [2, 3, 4]",
        ),
        ("lses", "None", [None, None], "lses[0]: expected [t=3, h=4], got None"),
        ("outs", "none", [], "lses: expected one for each output, and at least one"),
        ("lses", "too few", lambda x: x[:1], "lses: expected one for each output"),
        (
            "outs",
            "fewer rows",
            lambda x: [x[0], x[1][:1]],
            "outs[1]: expected float32 [t=3, h=4, dv=8], got float32 [1,",
        ),
        ("lses", "heads first", lambda x: [y.T for y in x], "lses[0]: expected float32 [t=3, h=4], got float32 [4, 3]"),
        ("lses", "halves", lambda x: [y.half() for y in x], "lses[0]: expected float32 or float64, got float16"),
        ("lses", "elsewhere", lambda x: [x[0], meta(x[1])], "lses[1]: expected cpu, where outs[0] is, got meta"),
    ],
    "merge.add_sinks": [
        ("out", "a list", [], "out: expected [t, h, dv], got list"),
        ("lse", "None", None, "lse: expected [t=3, h=4], got None"),
        ("lse", "halves", Tensor.half, "lse: expected float32 or float64, got float16 [3, 4]"),
        ("out", "without heads", lambda x: x[..., 0], "out: expected [t, h, dv], got float32 [3, 4]"),
        *numbers("sinks", "h=4", "out"),
        ("sinks", "None", None, "sinks: expected floating point [h=4], got None"),
    ],
    "cascade.find_prefixes": [
        *REQUESTS_BAD,
        *BLOCKS_BAD,
        *A_BLOCK_SIZE,
        ("block_tables", "no tables", None, "block_tables: expected a list of lists of blocks, got None"),
    ],
    "differential.write": [
        ("key", "a list", [], "key: expected float32 [t, hk=4, d=8], got list"),
        ("value", "None", None, "value: expected float32 [t, hk=4, d=8], got None"),
        ("key", "three heads", lambda x: x[:, :3], "key: expected float32 [t, hk=4, d=8], got float32 [2, 3, 8]"),
        ("key", "halves", Tensor.half, "key: expected float32 [t, hk=4, d=8], got float16 [2, 4, 8]"),
        ("value", "one half", lambda x: x[:, ::2], "value: expected float32 [t, hk=4, d=8], got float32 [2, 2, 8]"),
        ("cache", "one of two", lambda x: x[0], "cache: expected [2, 2, n, p, hk/2, d], got float32 [2, 5, 4, 2, 8]"),
        ("slot_mapping", "twice", torch.tensor([3, 3]), "slot_mapping: expected each slot once, got slot 3"),
        ("value", "a row too few", lambda x: x[:1], "value: expected float32 [t=2, hk=2, dv=8], got float32 [1, 2, 8]"),
        ("cache", "None", None, "cache: expected [2, 2, n, p, hk/2, d], got None"),
        (
            "cache",
            "one half",
            lambda x: x[:1].expand_as(x),
            "cache: expected memory for each element, got strides of (0,",
        ),
        ("slot_mapping", "None", None, "slot_mapping: expected int64 [t=2], got None"),
        ("slot_mapping", "slot n * p", torch.tensor([0, 20]), SLOTS + "20"),
    ],
    "differential.compute_lambda": [
        ("lambda_q1", "a list", [1.0], "lambda_q1: expected [d], got list"),
        ("lambda_k1", "longer", torch.ones(9), "lambda_k1: expected float32 [d=8], got float32 [9]"),
        ("lambda_q2", "another type", Tensor.half, "lambda_q2: expected float32 [d=8], got float16 [8]"),
        ("lambda_k2", "elsewhere", meta, "lambda_k2: expected cpu, where lambda_q1 is, got meta"),
        *rows("lambda_init", FINITE, ""),
    ],
    "differential.interleave_halves": [
        ("heads", "a list", [], "heads: expected [t, h, d], got list"),
        ("heads", "an odd number", lambda x: x[:, :3], "heads: expected an even number of heads, got h=3"),
    ],
    "differential.pools": [
        ("cache", "None", None, "cache: expected [2, 2, n, p, hk/2, d], got None"),
        ("cache", "a half", lambda x: x[0], "cache: expected [2, 2, n, p, hk/2, d], got float32 [2, 5, 4, 2, 8]"),
    ],
    "differential.allocate": [*POOL_SIZES, *A_BLOCK_SIZE],
}


def takes(call: str, argument: str) -> bool:
    taken = inspect.signature(function_of("refattn", call)).parameters
    return argument in taken or (call.endswith(".attention") and argument in ("batch", *OPTION_NAMES))


def perform(package: str, call: str, arguments: dict):
    """Call a function; attention is planned first, and takes a plan or options in the place of its own."""
    module, _, name = call.partition(".")
    if name != "attention":
        return function_of(package, call)(**arguments)
    path, arguments = importlib.import_module(f"{package}.{module}"), dict(arguments)
    planned = {name: arguments.pop(name) for name in inspect.signature(path.plan).parameters if name in arguments}
    fixed = {name: arguments.pop(name) for name in OPTION_NAMES if name in arguments}
    made = {"plan": path.plan(**planned), "options": AttentionOptions(**fixed)}
    for name in made.keys() & arguments.keys():
        other = arguments.pop(name)
        made[name] = other(made[name]) if callable(other) and not isinstance(other, type) else other
    return path.attention(**arguments, **made)


TABLE = [(call, *row) for call, rows_of_call in BAD.items() for row in rows_of_call if takes(call, row[0])]


def fault_of_refusal(package: str, call: str, arguments: dict, message: str) -> str:
    """Return what is wrong with how a bad call is refused: nothing if the error begins so, and nothing is written."""
    tensors = tensors_in(list(arguments.values()))
    before = bits(tensors)
    try:
        perform(package, call, arguments)
    except ValueError as error:
        if not str(error).startswith(message):
            return f"expected {message!r}, got {str(error)!r}"
    except Exception as error:  # noqa: BLE001  # whatever it is, the other rows are tried, too
        return f"expected a ValueError, got {error!r}"
    else:
        return "not refused"
    return "" if bits(tensors) == before else "refused, and something was written"


def made_bad(argument: str, bad, good):
    """Return the bad value of a row: itself, or what a function makes of the good one."""
    return bad(good) if callable(bad) and argument not in ("plan", "options") else bad


@pytest.mark.covers("B79")
@each_twin
@pytest.mark.parametrize("call", CALLS)
def test_bad_input_is_named_and_nothing_is_written(package, call):
    """In one test for all rows of a call, as there are two thousand; what fails is named by its row."""
    faults = {}
    for _, argument, what, bad, message in (row for row in TABLE if row[0] == call):
        arguments = CALLS[call]()
        arguments[argument] = made_bad(argument, bad, arguments.get(argument))
        if fault := fault_of_refusal(package, call, arguments, message):
            faults[argument, what] = fault
    assert not faults


KEEPING = ("varlen", "chunked_prefill", "sliding_window", "local")  # paths whose plans keep calls
AFTER_GOOD = [
    row
    for row in TABLE
    if row[0].removesuffix(".attention") in KEEPING
    and row[1] in ("options", *OPTION_NAMES, *inspect.signature(function_of("refattn", row[0])).parameters)
    and row[1] != "plan"
]


@pytest.mark.parametrize("call", sorted({row[0] for row in AFTER_GOOD}))
def test_bad_input_is_named_where_the_plan_keeps_a_good_call(call):
    """One plan for all rows: after each of them the good call is replayed, and answers as it did."""
    arguments, path = CALLS[call](), call.partition(".")[0]
    arguments["plan"] = function_of("fastattn", f"{path}.plan")(**of_plan(path))
    good, faults = perform("fastattn", call, arguments), {}
    for _, argument, what, bad, message in (row for row in AFTER_GOOD if row[0] == call):
        wrong = {**arguments, argument: made_bad(argument, bad, arguments.get(argument))}
        if fault := fault_of_refusal("fastattn", call, wrong, message):
            faults[argument, what] = fault
        with mock.patch("refattn.checks_of_calls.check_query", side_effect=AssertionError):  # a replay checks nothing
            assert torch.equal(perform("fastattn", call, arguments), good), (argument, what)
    assert not faults


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_a_path_refuses_a_plan_of_another_that_keeps_a_good_call(package):
    inputs = build(SMALL)
    cascade, chunks = (importlib.import_module(f"{package}.{name}") for name in ("cascade", "chunked_prefill"))
    plan = cascade.plan(inputs.batch, prefixes=(), block_size=4)
    cascade.attention(*inputs.tensors[:3], plan)
    with pytest.raises(ValueError, match=r"^plan: expected a Plan, got .*\.CascadePlan$"):
        chunks.attention(*inputs.tensors[:3], plan)


@pytest.mark.parametrize("call", CALLS)
def test_the_good_arguments_are_good(call):
    """Else a row of the table might be refused for another reason than the one that it is there for."""
    for package in ("refattn", "fastattn"):
        perform(package, call, CALLS[call]())


@each_twin
@pytest.mark.parametrize("call", CALLS)
def test_another_default_device_changes_nothing(package, call):
    """Nothing is made where a process makes its tensors, but where those are that were passed."""

    def do() -> str:
        return repr(perform(package, call, CALLS[call]()))

    torch.manual_seed(0)
    expected = do()
    torch.manual_seed(0)
    arguments = CALLS[call]()
    with torch.device("meta"):
        assert repr(perform(package, call, arguments)) == expected


def test_every_call_has_its_table():
    assert set(BAD) == set(CALLS)


# --- letters ---


def test_a_letter_has_one_size_in_all_tensors_of_a_declaration():
    query, key, lens = torch.zeros(3, 4, 8), torch.zeros(7, 2, 8, dtype=torch.float16), ints(5, 2)
    declared = dict(query=(query, "number t h d"), key=(key, "s hk d", torch.float16), lens=(lens, "int32 b or None"))
    assert check(**declared) == dict(t=3, h=4, d=8, s=7, hk=2, b=2)
    assert check(dict(b=2), two=(torch.zeros(3, 2), "b+1 2"), lens=(None, "int32 b or None")) == {
        "b": 2,
        "b + 1": 3,
        "2": 2,
    }
    for name, wrong, message in (
        ("key", (key, "query: s hk d"), "key: expected float32 [s, hk, d=8], got float16 [7, 2, 8]"),
        ("key", (key[..., :6], "s hk d"), "key: expected [s, hk, d=8], got float16 [7, 2, 6]"),
        ("key", (key[:, :1, :1], "s s hk"), "key: expected [s, s, hk], got float16 [7, 1, 1]"),
        (
            "query",
            (lens, "number b"),
            "query: expected a floating point type (bfloat16, float16, float32 or float64), got int32 [2]",
        ),
        ("lens", (lens, "int32 b 2"), "lens: expected int32 [b, 2], got int32 [2]"),
        ("lens", (lens.to("meta"), "int32 b"), "lens: expected cpu, where query is, got meta"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check(**declared | {name: wrong})


# --- boundaries ---


@each_twin
@pytest.mark.parametrize("path", PAGED)
@pytest.mark.parametrize(("block", "good"), [(-1, False), (0, True), (9, True), (10, False)])
def test_blocks_are_those_of_the_pool(package, path, block, good):
    arguments = of_attention(path)
    arguments["batch"] = entry(1, 4, block)(arguments["batch"])
    pool = "cache" if path == "differential" else "key_cache"
    if good:
        perform(package, f"{path}.attention", arguments)
    elif block < 0:
        with pytest.raises(
            ValueError, match=rf"block_table: expected entries of at least 0 .* got {block} in column 4$"
        ):
            perform(package, f"{path}.attention", arguments)
    else:
        with pytest.raises(ValueError, match=rf"^{pool}: expected at least {block + 1} blocks, .* got n=10$"):
            perform(package, f"{path}.attention", arguments)


@each_twin
@pytest.mark.parametrize(
    ("path", "option"),
    [("sliding_window", {"window_size": window}) for window in ((3, 0), (0, 0), (2, -1))]
    + [("local", {"chunk_size": chunk_size}) for chunk_size in (4, 8, 16)],
    ids=str,
)
@pytest.mark.parametrize("block", [-1, 10**6])
def test_blocks_before_what_is_seen_are_not_looked_at(package, path, option, block):
    """Sequence 1 decodes at position 19: those windows and chunks begin with the keys of its column 4."""
    arguments = {**of_attention(path), **option}
    for column in range(4):
        arguments["batch"] = entry(1, column, block)(arguments["batch"])
    perform(package, f"{path}.attention", arguments)


@each_twin
@pytest.mark.parametrize("path", HELD)
def test_maxima_and_rows_may_be_larger_than_needed(package, path):
    arguments = of_attention(path)
    arguments["batch"] = dataclasses.replace(arguments["batch"], max_query_len=3, max_seq_len=24)
    arguments["query"] = torch.cat([arguments["query"], arguments["query"][:1]])
    out = perform(package, f"{path}.attention", arguments)
    assert len(out) == 4 and not out[3].any()


@each_twin
def test_a_block_table_may_hold_any_int32_where_it_is_not_read(package):
    batch = function_of(package, "metadata.make_batch")([1], [4], [[3, -(2**31), MOST]])
    assert batch.block_table.tolist() == [[3, -(2**31), MOST]]


@each_twin
def test_a_plan_of_as_many_keys_as_an_int32_counts_is_made(package):
    """Its plan takes memory for its few rows, not for its keys."""
    batch = dataclasses.replace(build(SMALL).batch, seq_lens=ints(0, MOST), max_seq_len=MOST)
    plan = function_of(package, "varlen.plan")(batch)
    assert plan.needs == (3, MOST, 0)


@each_twin
@pytest.mark.parametrize("call", ["mla.plan", "mla.plan_prefill", "quantized.plan", "speculative.plan"])
@pytest.mark.parametrize("block_size", [None, 0, 4.0])
def test_a_plan_over_pages_has_a_block_size(package, call, block_size):
    """Without one it would be a plan over rows, which a layer refuses late, or not at all."""
    more = dict(workspace=9) if call == "mla.plan_prefill" else {}
    with pytest.raises(ValueError, match=f"block_size: expected a positive int, got {block_size}"):
        function_of(package, call)(build(SMALL).batch, block_size=block_size, **more)


def column(x: Tensor) -> Tensor:
    """Return the same numbers, every other one in memory."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]


@each_twin
def test_a_table_of_a_plan_lies_in_one_piece(package):
    """A kernel that copied it would read the same numbers after it is filled anew, or those of other sequences."""
    batch, interval = build(SMALL).batch, importlib.import_module(f"{package}.interval")
    speculative = importlib.import_module(f"{package}.speculative")
    rows = dict(first_visible=ints(0, 0, 0), last_visible=ints(3, 4, 19))
    tables = dict(first_keys=ints(0, 0), positions=ints(3, 4, 19), sequences=ints(0, 1)) | rows
    for name in tables:
        for device in ("cpu", "meta"):
            given = {other: x for other, x in tables.items() if name in rows and other in rows or other == name}
            given = {other: x.to(device) for other, x in given.items()}
            there = batch if device == "cpu" else elsewhere_batch(batch)
            Plan(there, 4, causal=False, **given)
            message = rf"^{name}: expected its entries side by side, got a stride of 2$"
            with pytest.raises(ValueError, match=message):
                Plan(there, 4, causal=False, **given | {name: column(given[name])})
            if name in rows:
                with pytest.raises(ValueError, match=message):
                    interval.plan(there, block_size=4, **given | {name: column(given[name])})
    alone = function_of(package, "metadata.make_batch")([1], [4], [[0]])
    Plan(alone, 4, sequences=column(ints(0)))  # a single column has no neighbour, and so no stride
    trees = speculative.make_trees([[-1, 0], [-1]])
    with pytest.raises(ValueError, match=r"^tree_lens: expected its entries side by side, got a stride of 2$"):
        dataclasses.replace(trees, lens=column(trees.lens))
    plan = speculative.plan(batch, block_size=4, trees=dataclasses.replace(trees, parents=column(trees.parents)))
    for name, strides in (("depths", r"\(4, 2\)"), ("ancestors", r"\(4, 2, 2\)")):
        message = rf"^{name}: expected its entries side by side, got strides of {strides}$"
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(plan, **{name: column(getattr(plan, name))})


# --- on a device ---


def test_the_checks_read_nothing_on_a_device():
    """Tensors without contents pass them, so nothing waits for a device."""

    def nowhere(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lengths = dict(dtype=torch.int32)
    whole = Batch(nowhere(3, **lengths), nowhere(2, **lengths), nowhere(2, 7, **lengths), 2, 20)
    shared = Batch(nowhere(2, **lengths), nowhere(1, **lengths), nowhere(1, 2, **lengths), 3, 8)
    starts, where = nowhere(1, **lengths), nowhere(3, **lengths)
    levels = (
        Plan(shared, 4, False, first_keys=starts, positions=where),
        Plan(whole, 4, first_keys=nowhere(2, **lengths)),
    )
    query, pool, per_head = nowhere(3, 4, 8), nowhere(10, 4, 2, 8), nowhere(4)
    slots = nowhere(3, dtype=torch.int64)
    options = AttentionOptions(alibi_slopes=per_head, sinks=per_head)
    in_rows, in_pages = Plan(whole), Plan(whole, 4, window_size=(3, 0))
    assert in_rows.needs is None and in_pages.needs is None
    Rows(nowhere(25, 2, 8), nowhere(25, 2, 8)).check(query, in_rows, options, query, True)
    for plan in (in_pages, CascadePlan(whole, levels)):
        Pages(pool, pool).check(query, plan, options, query, True)
    check_lengths(whole)
    check_block_table(whole, block_size=4)
    checks_of_steps.check_prefixes([Prefix(0, 2, 4)], whole, block_size=4)
    checks_of_steps.check_num_tokens(0, whole)
    checks_of_steps.check_split(whole, [2, 1], 1)
    checks_of_steps.check_advance(whole, slots, block_size=4)
    checks_of_writes.check_slots(nowhere(3, 2, 8), nowhere(3, 2, 8), pool, pool, slots)
    checks_of_writes.check_block_pairs([pool], [pool], nowhere(2, 2, dtype=torch.int64))
    checks_of_writes.check_gather(pool, nowhere(2, **lengths), 8)
    checks_of_calls.check_partials([query, query], [nowhere(3, 4)] * 2)
    checks_of_calls.check_sinks(query, nowhere(3, 4), per_head)
    cache, lambda_full = nowhere(2, 2, 10, 4, 1, 8), nowhere()
    lambdas = dict(lambda_full=lambda_full, lambda_init=0.2, norm_weight=nowhere(16), norm_eps=1e-5)
    Pairs(cache).check(query, in_pages, options, query, True, **lambdas)


def test_a_prefix_is_one_of_the_table_on_a_device_too():
    """The number of columns is known without reading any of them."""
    batch = elsewhere_batch(build(SMALL).batch)
    checks_of_steps.check_prefixes([Prefix(0, 2, 28)], batch, block_size=4)
    with pytest.raises(ValueError, match=r"^prefixes\[0\]: expected at most 28 keys, .* got 32$"):
        checks_of_steps.check_prefixes([Prefix(0, 2, 32)], batch, block_size=4)


# --- what has passed once ---


@each_twin
@pytest.mark.parametrize("path", HELD)
def test_a_batch_that_was_written_to_is_checked_again_by_its_next_plan(package, path):
    arguments, call = of_attention(path), f"{path}.attention"
    perform(package, call, arguments)
    batch = arguments["batch"]
    batch.cu_seqlens_q[0] = 1
    with pytest.raises(ValueError, match="cu_seqlens_q: expected to rise from 0"):
        perform(package, call, arguments)
    batch.cu_seqlens_q[0] = 0
    batch.seq_lens[0] = -1
    with pytest.raises(ValueError, match="seq_lens: expected lengths of at least 0"):
        perform(package, call, arguments)
    batch.seq_lens[0] = 7 if path == "cascade" else 5
    batch.seq_lens[1] = 10**6
    with pytest.raises(ValueError, match=r"(max_seq_len|block_table): expected at least (1000000|250000 columns)"):
        perform(package, call, arguments)
    batch.seq_lens[1] = 20
    perform(package, call, arguments)
    with torch.inference_mode():
        batch.cu_seqlens_q[1] = -1
    with pytest.raises(ValueError, match="cu_seqlens_q: expected to rise from 0"):
        perform(package, call, arguments)


@each_twin
@pytest.mark.parametrize("path", PAGED)
def test_a_plan_that_has_served_one_pool_is_checked_against_another(package, path):
    """A smaller pool, other blocks, fewer rows: what has passed has passed for those sizes only."""
    arguments, call = of_attention(path), f"{path}.attention"
    plan = function_of(package, f"{path}.plan")(**of_plan(path))
    arguments["plan"] = plan
    perform(package, call, arguments)
    pools = ["cache"] if path == "differential" else ["key_cache", "value_cache"]
    dim = 2 if path == "differential" else 0
    smaller = {name: arguments[name].narrow(dim, 0, 1) for name in pools}
    with pytest.raises(ValueError, match=rf"^{pools[0]}: expected at least \d+ blocks, .*, got n=1$"):
        perform(package, call, {**arguments, **smaller})
    halved = {name: arguments[name].narrow(dim + 1, 0, 2) for name in pools}
    with pytest.raises(ValueError, match=rf"^{pools[0]}: expected blocks of 4 tokens, as in the plan, got p=2$"):
        perform(package, call, {**arguments, **halved})
    if path != "cascade":  # a plan of cascades takes the prefixes in its blocks
        del arguments["plan"]
        with pytest.raises(ValueError, match="block_table: expected at least 10 columns .* in blocks of 2"):
            perform(
                package,
                call,
                {**arguments, **halved, "block_size": 2, **({"chunk_size": 8} if path == "local" else {})},
            )
        arguments["plan"] = plan
    with pytest.raises(ValueError, match="query: expected at least 3 rows, where cu_seqlens_q ends, got t=2"):
        perform(package, call, {**arguments, "query": arguments["query"][:2]})
    perform(package, call, arguments)


@each_twin
def test_a_window_that_has_passed_does_not_let_a_wider_one_pass(package):
    """Nor a chunk a larger one: they look at more of the table."""
    for path, narrow, wide in (
        ("sliding_window", dict(window_size=(3, 0)), dict(window_size=(4, 0))),
        ("local", dict(chunk_size=8), dict(chunk_size=12)),
    ):
        arguments, call = of_attention(path), f"{path}.attention"
        for block, message in (
            (99, "key_cache: expected at least 100 blocks, as the block table leads to block 99, got n=10"),
            (-1, r"block_table: expected entries of at least 0 .* got -1 in column 3"),
        ):
            arguments["batch"] = entry(1, 3, block)(arguments["batch"])
            perform(package, call, {**arguments, **narrow})
            with pytest.raises(ValueError, match=message):
                perform(package, call, {**arguments, **wide})


@each_twin
def test_levels_that_have_passed_are_checked_in_another_order_and_against_another_pool(package):
    arguments, call = of_attention("cascade"), "cascade.attention"
    arguments["plan"] = function_of(package, "cascade.plan")(**of_plan("cascade"))
    perform(package, call, arguments)
    with pytest.raises(ValueError, match="levels"):
        perform(package, call, {**arguments, "plan": lambda plan: CascadePlan(plan.batch, plan.levels[::-1])})
    with pytest.raises(ValueError, match=r"levels\[0\]\.first_keys: expected 0 for sequence 0"):
        perform(package, call, {**arguments, "plan": level(0, first_keys=ints(4))})
    with pytest.raises(ValueError, match="key_cache: expected at least 11 blocks"):
        perform(package, call, {**arguments, "plan": level(0, block_table=ints(10)[None])})
    perform(package, call, arguments)
