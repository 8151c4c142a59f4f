"""Which steps share a CUDA graph: those of one shape, which has room for each of them, and padding for the rest."""

from typing import NamedTuple

from twinattn.engine.decode_rows import DecodeRows
from twinattn.engine.engine import Engine
from twinattn.engine.request import StepTokens

FEWEST_TOKENS = 1024  # that a graph has room for, in each sequence


class Shape(NamedTuple):
    """The capacity of a captured graph.

    Attributes:
        rows: requests.
        columns: blocks of each.
        tokens: new tokens of all requests together.
        queries: new tokens of each, at most.
        trees: whether drafts are more than chains.
    """

    rows: int
    columns: int
    tokens: int
    queries: int
    trees: bool = False


def shape_of_decode(engine: Engine, rows: DecodeRows) -> Shape:
    """Return the room for a decode."""
    count = rounded_up(len(rows.requests))
    return Shape(count, columns_for(engine, int(rows.seq_lens.max())), count, 1)


def shape_of(engine: Engine, tokens: StepTokens) -> Shape:
    """Return the room for a step that is no decode: it has several tokens of a request, or not all have logits."""
    queries = max(2, _power_of_2(max(tokens.query_lens)))
    if engine.state_layers and 1 < max(tokens.query_lens) <= engine.decode_len:
        queries = min(queries, engine.decode_len)  # a step without prefills has no plan for them
    unit = max(1, _power_of_2(len(tokens.input_ids)) // 16)
    num_tokens = -(-len(tokens.input_ids) // unit) * unit
    rows = rounded_up(len(tokens.query_lens))
    return Shape(rows, columns_for(engine, max(tokens.seq_lens)), num_tokens, queries, trees=tokens.parents is not None)


def columns_for(engine: Engine, num_tokens: int) -> int:
    """Return how many blocks of a sequence a step has room for."""
    return _power_of_2(-(-max(num_tokens, FEWEST_TOKENS) // engine.block_size))


def rounded_up(count: int) -> int:
    """Return with how many rows a step of `count` requests is captured: a power of two, or at most 1/8 more, by 8."""
    unit = max(8, _power_of_2(count) // 16)
    return _power_of_2(count) if count <= 8 else -(-count // unit) * unit


def doublings(number: int) -> list[int]:
    """Return a number, its half, the half of that and so on, down to 1."""
    return [number >> shift for shift in range(number.bit_length())]


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
