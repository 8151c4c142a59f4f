"""The requests of a decode as tensors on the host, and the next decode's from them, before any token has been read.

Three requests decode; the second one gets its last token in this decode, and the third fills a block of 4 with it:

    this decode       seq_lens  5 7 4      block_table  [[9 2] [4 7] [1 -]]      sources  -  -  -
    the next one      seq_lens  6 5        block_table  [[9 2] [1 3]]            sources  0  2

A row of the next decode is a row of this one, with one token and now and then a block more, so what is left for Python
to do is little: it has no loop over requests but for their states. `sources` says from which row of this decode its
token comes, which only the device knows yet; -1 is a token that the host knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from twinattn.engine.request import Request
from twinattn.engine.sampling import generators, settings_of, uniforms_at
from twinattn.engine.state_layers import Copies, is_plain, rows_of
from twinattn.engine.state_pool import Slots, StatePool


@dataclass(frozen=True)
class DecodeRows:
    """What a decode needs of its requests; one row each.

    Attributes:
        requests: the requests.
        seq_lens: their tokens, the new one included.
        block_table: their blocks, -1 after the last.
        input_ids: their new tokens; 0 if only the device knows it.
        sources: the row of the decode before that chooses the new token; -1 if the host knows it.
        settings: temperature, `top_p` and random number of the next token, as `sample` takes them.
        generators: the states of their random number generators.
        places: the number of the next token in each answer, from 0.
        slots: where their states are, as in `state_layers.rows_of`; no columns without layers that keep one.
        copies: what is copied before the decode.
    """

    requests: list[Request]
    seq_lens: Int32[Tensor, "b"]
    block_table: Int32[Tensor, "b m"]
    input_ids: Int32[Tensor, "b"]
    sources: Int32[Tensor, "b"]
    settings: Float64[Tensor, "3 b"]
    generators: Int64[Tensor, "b"]
    places: Int64[Tensor, "b"]
    slots: Int32[Tensor, "b columns"]
    copies: Copies

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        states: StatePool | None = None,
        before: Mapping[Request, int] | None = None,
    ) -> "DecodeRows":
        """Return the rows of requests whose last token is to be computed.

        Args:
            requests: the requests.
            states: where their states are; None without layers that keep one.
            before: of a decode that is launched ahead, the row of each request that gets its last token in the step
                before; None where all tokens are known.
        """
        columns = max(len(request.blocks) for request in requests)
        sources = [-1 if before is None else before.get(request, -1) for request in requests]
        unknown = [int(source >= 0) for source in sources]
        slots = [None if states is None else states.slots_of(request, before is not None) for request in requests]
        return cls(
            list(requests),
            _int32([len(request.tokens) + count for request, count in zip(requests, unknown, strict=True)]),
            _int32([request.blocks + [-1] * (columns - len(request.blocks)) for request in requests]),
            _int32([0 if count else request.tokens[-1] for request, count in zip(requests, unknown, strict=True)]),
            _int32(sources),
            settings_of(requests, unknown),
            generators([request.sampling.seed for request in requests]),
            torch.tensor([request.num_outputs for request in requests]) + torch.tensor(unknown),
            *_states_of(slots, states),
        )

    def next(self, rows: Sequence[int], *, block_size: int, states: StatePool | None = None) -> "DecodeRows":
        """Return the rows of the decode after this one, for some of its rows, in order.

        Args:
            rows: which ones go on.
            block_size: tokens in a block; each request has a block for its next token.
            states: where their states are, slots for that decode included; None without layers that keep one.
        """
        kept, requests = _int32(rows), [self.requests[row] for row in rows]
        last = self.seq_lens[kept]  # the place of the next token
        table = self.block_table[kept]
        column = last // block_size
        table = pad(table, (0, max(0, int(column.max()) + 1 - table.shape[1])), value=-1)
        for row in (last % block_size == 0).nonzero()[:, 0].tolist():  # their next token begins a block
            place = int(column[row])
            table[row, place] = requests[row].blocks[place]
        settings, generators, places = self.settings[:, kept], self.generators[kept], self.places[kept] + 1
        if settings[0].any():
            settings[2] = uniforms_at(generators, places)
        return DecodeRows(
            requests,
            last + 1,
            table,
            torch.zeros_like(kept),
            kept,
            settings,
            generators,
            places,
            *_states_of([None if states is None else states.slots[request].ahead for request in requests], states),
        )


def _states_of(slots: Sequence[Slots | None], states: StatePool | None) -> tuple[Int32[Tensor, "b columns"], Copies]:
    """Return the rows of states in a decode, and the copies before it."""
    if states is None:
        return torch.empty(len(slots), 0, dtype=torch.int32), Copies([], [])
    known = [one for one in slots if one is not None]
    assert len(known) == len(slots)  # every request that decodes, ahead or not, has a slot
    rows, copies = rows_of(known, [1] * len(known), states, plain=is_plain(states, len(known)))
    return _int32(rows), copies


def _int32(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
