"""Layers that keep a state: one token folded into it, drafts rolled back, and the last inputs replayed."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from twinattn.course.exercises.exercise import Exercise, Trial, draw


def fold(
    state: Float[Tensor, "dv dk"], key: Float[Tensor, "dk"], value: Float[Tensor, "dv"], decay: float, beta: float
) -> Float[Tensor, "dv dk"]:
    """Return the state of a head after one token, by the gated delta rule."""
    state = decay * state
    return state + beta * torch.outer(value - state @ key, key)


def _fold_trials() -> Iterator[Trial]:
    one = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([0.0, 1.0]), torch.tensor([8.0, 8.0])
    yield Trial("the worked example", dict(zip(("state", "key", "value"), one, strict=True), decay=0.5, beta=1.0))
    for says, decay, beta in (
        ("five values, three keys", 0.7, 0.4),
        ("a gate that forgets everything", 0.0, 0.5),
        ("a token that writes nothing", 0.9, 0.0),
    ):
        key = normalize(draw(3, seed=2), dim=0)
        yield Trial(says, dict(state=draw(5, 3), key=key, value=draw(5, seed=1), decay=decay, beta=beta))


FOLD = Exercise(
    "fold",
    fold,
    _fold_trials,
    {
        "the value is added whole; the delta rule writes its difference to what the state answers to the key": (
            lambda state, key, value, decay, beta: decay * state + beta * torch.outer(value, key)
        ),
        "the state fades first, and then answers to the key": (
            lambda state, key, value, decay, beta: decay * state + beta * torch.outer(value - state @ key, key)
        ),
        "the outer product is transposed: rows are the elements of the value, columns those of the key": (
            lambda state, key, value, decay, beta: (
                decay * state + beta * torch.outer(key, value - decay * (state @ key))
            )
        ),
        "only the old state fades; what this token writes is added whole": (
            lambda state, key, value, decay, beta: (
                decay * (state + beta * torch.outer(value - decay * (state @ key), key))
            )
        ),
        "beta is of the whole difference, and not of the value alone": (
            lambda state, key, value, decay, beta: (
                decay * state + torch.outer(beta * value - decay * (state @ key), key)
            )
        ),
        "what is written fades from the next token on; here it has faded already": (
            lambda state, key, value, decay, beta: decay * (state + beta * torch.outer(value - state @ key, key))
        ),
    },
    (
        "What does the state answer to the key, once it has faded? A product of a matrix and a vector.",
        "What is written is an outer product: row i is the key times element i of what is missing of the value.",
    ),
    in_page=True,
)


def rollback(slots: list[list[int]], accepted: list[int]) -> list[int]:
    """Return the slot of each request's state after a step with drafts."""
    return [row[count - 1] if row[0] >= 0 else -1 for row, count in zip(slots, accepted, strict=True)]


def _rollback_trials() -> Iterator[Trial]:
    yield Trial("the worked example", dict(slots=[[4, 2, 7], [0, 1, 3]], accepted=[2, 1]))
    yield Trial("all drafts of one, none of another", dict(slots=[[4, 2, 7], [0, 1, 3]], accepted=[3, 1]))
    yield Trial("a row of padding between two", dict(slots=[[5, 6], [-1, 9], [8, 1]], accepted=[2, 2, 1]))
    yield Trial("no drafts", dict(slots=[[3], [-1]], accepted=[1, 0]))
    yield Trial("no requests", dict(slots=[], accepted=[]))


ROLLBACK = Exercise(
    "rollback",
    rollback,
    _rollback_trials,
    {
        "this is the state with all drafts in it, the rejected ones too": (
            lambda slots, accepted: [row[-1] if row[0] >= 0 else -1 for row in slots]
        ),
        "this is the state before any draft, and the accepted ones are lost": lambda slots, accepted: [
            row[0] for row in slots
        ],
        "column 0 is after the first token, so `count` tokens end in column `count - 1`": (
            lambda slots, accepted: [
                row[min(count, len(row) - 1)] if row[0] >= 0 else -1 for row, count in zip(slots, accepted, strict=True)
            ]
        ),
        "a row that begins with -1 is padding, whatever else it holds": lambda slots, accepted: [
            row[count - 1] for row, count in zip(slots, accepted, strict=True)
        ],
    },
    (
        "Nothing can be taken out of a state. Which of those kept has all of the accepted tokens in it, and no other?",
        "The state after token i is in column i, and the first accepted token is token 0.",
    ),
    in_page=True,
)


Left = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the output, the checkpoint, and the ring


def replay(
    checkpoint: Float[Tensor, "dv dk"],
    decays: Float[Tensor, "m"],
    keys: Float[Tensor, "m dk"],
    written: Float[Tensor, "m dv"],
    query: Float[Tensor, "dk"],
    key: Float[Tensor, "dk"],
    value: Float[Tensor, "dv"],
    decay: float,
    beta: float,
    room: int,
) -> Left:
    """Return the output of one more token, and the checkpoint and the ring after it."""
    return _replay(**locals())


def _replay(
    checkpoint: Tensor,
    decays: Tensor,
    keys: Tensor,
    written: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: float,
    beta: float,
    room: int,
    *,
    fades: bool = True,
    pushes_value: bool = False,
    reads_first: bool = False,
    empties: bool = True,
    is_late: bool = False,
) -> Left:
    """Compute a step, or what people write instead."""
    state = checkpoint
    for old_decay, old_key, old_row in zip(decays, keys, written, strict=True):
        state = (old_decay if fades else 1.0) * state + torch.outer(old_row, old_key)
    state, is_full = decay * state, len(keys) + (not is_late) >= room
    row = beta * (value - state @ key)
    before, state = state, state + torch.outer(row, key)
    decays = torch.cat([decays, torch.as_tensor([decay]).to(decays)])
    keys, written = torch.cat([keys, key[None]]), torch.cat([written, (value if pushes_value else row)[None]])
    if is_full:
        checkpoint = state
    if is_full and empties:
        decays, keys, written = decays[:0], keys[:0], written[:0]
    return (before if reads_first else state) @ query, checkpoint, decays, keys, written


def _replay_trials() -> Iterator[Trial]:
    for says, held, room, decay, beta in (
        ("two tokens in the ring, and room for four", 2, 4, 0.5, 1.0),
        ("an empty ring", 0, 4, 0.7, 0.4),
        ("the token fills the ring", 3, 4, 0.9, 0.6),
        ("room for one token", 0, 1, 0.7, 0.4),
        ("a gate that forgets everything", 2, 8, 0.0, 0.5),
        ("a token that writes nothing", 2, 8, 0.9, 0.0),
    ):
        keys = normalize(draw(held + 1, 3, seed=2), dim=1)
        ring = dict(decays=draw(held, seed=3).sigmoid(), keys=keys[:held], written=draw(held, 2, seed=4))
        token = dict(query=draw(3, seed=5), key=keys[held], value=draw(2, seed=6), decay=decay, beta=beta)
        yield Trial(says, dict(checkpoint=draw(2, 3), **ring, **token, room=room))


REPLAY = Exercise(
    "replay",
    replay,
    _replay_trials,
    {
        "the state fades with each token in the ring, too": partial(_replay, fades=False),
        "the ring keeps what a token wrote, beta times the difference; here it is the value": (
            partial(_replay, pushes_value=True)
        ),
        "a token sees itself: the query reads after it was written": partial(_replay, reads_first=True),
        "the ring has to be empty once its tokens are in the checkpoint, or they count twice": (
            partial(_replay, empties=False)
        ),
        "the checkpoint moves with the token that fills the ring, and not with the next one": (
            partial(_replay, is_late=True)
        ),
    },
    (
        "Rebuild the state first: what did each token in the ring do to it? Its row is known.",
        "Then it is `fold`, from exercise 26, with what it writes kept. Move the checkpoint last.",
    ),
    parts=("out", "checkpoint", "decays", "keys", "written"),
    level=2,
    minutes=10,
)
