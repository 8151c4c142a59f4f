"""The drawings of the site and of the command line: one example per idea, mostly with the same three requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from refattn import masks
from refattn.batch import Batch
from refattn.metadata import make_batch
from twinattn.course.drawing import pictures
from twinattn.course.drawing.drawing import Drawing

# Three requests in one step: a is at the last chunk of its prompt, b is generating, c is at the start of its prompt.
WORDS = [text.split() for text in ("Why is the sky blue", "Why do cats purr ? They like", "Name three colours")]
LENS = ((2, 5), (1, 7), (3, 3))  # query_len and seq_len of each
TABLES = ((9, 2), (4, 7), (1,))
NUM_BLOCKS = 10  # in the pool, or more if the blocks are so small that the requests need more
SCORES = (0.3, 0.0, 2.2, 0.4, 1.6, 0.5, 0.2)  # scores of b's newest query over its keys, made up
KEY = (0.02, 0.31, -0.75, 1.1, 0.09, -0.4, 6.0, 0.55)  # made up, with one large number, as real keys have
SYSTEM_WORDS = ["You", "are", "a", "kind", "and", "patient", "museum", "guide"]  # a prompt that all three may share
SYSTEM_BLOCKS = (5, 0)


@dataclass(frozen=True)
class Settings:
    """What an example can be drawn for.

    Attributes:
        window: tokens in a sliding window.
        chunk: tokens in a chunk of local attention.
        block_size: tokens in a block.
        lens: query length and length of each sequence; None for the three requests.

    Raises:
        ValueError: if a size is not positive.
    """

    window: int = 3
    chunk: int = 4
    block_size: int = 4
    lens: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        for name, size in (("window", self.window), ("chunk", self.chunk), ("block_size", self.block_size)):
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")

    def batch(self, system_words: Sequence[str] = ()) -> tuple[Batch, pictures.Words | None]:
        """Return the batch, and the words of its sequences, if they have any, which begin with a shared prompt."""
        lens = self.lens or [(q, s + len(system_words)) for q, s in LENS]
        words = None if self.lens else [[*system_words, *each] for each in WORDS]
        if self.lens is None and self.block_size == 4:
            tables = [[*SYSTEM_BLOCKS[: len(system_words) // 4], *blocks] for blocks in TABLES]
        else:
            num_shared = min((s - q for q, s in lens), default=0) // self.block_size if system_words else 0
            free_blocks = count(num_shared)
            num_own = [-(-s // self.block_size) - num_shared for _, s in lens]
            tables = [[*range(num_shared), *(next(free_blocks) for _ in range(number))] for number in num_own]
        return make_batch([q for q, _ in lens], [s for _, s in lens], tables), words


def example(name: str, settings: Settings | None = None) -> Drawing:
    """Draw one of `EXAMPLES`.

    Args:
        name: a key of `EXAMPLES`.
        settings: what to draw it for; the defaults if None.

    Raises:
        ValueError: if there is no drawing of that name, or the settings do not fit each other.
    """
    if name not in EXAMPLES:
        raise ValueError(f"name: expected one of {', '.join(EXAMPLES)}, got {name!r}")
    return EXAMPLES[name](settings or Settings())


def _masks(settings: Settings) -> Drawing:
    rules = {
        "everything": masks.full(8, 8),
        "causal": masks.causal(8, 8),
        f"window of {settings.window}": masks.window(8, 8, (settings.window - 1, 0)),
        f"chunks of {settings.chunk}": masks.chunk(8, 8, settings.chunk),
    }
    return pictures.side_by_side(
        **{name: pictures.mask(visible, group=i) for i, (name, visible) in enumerate(rules.items())}
    )


def _causal(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return pictures.sequences(batch, words=words)


def _window(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return pictures.window(batch, (settings.window - 1, 0), block_size=settings.block_size, words=words)


def _local(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return pictures.virtual_batches(batch, settings.chunk, block_size=settings.block_size, words=words)


def _cascade(settings: Settings) -> Drawing:
    batch, words = settings.batch(SYSTEM_WORDS)
    return pictures.cascade(batch, block_size=settings.block_size, words=words)


def _merge(settings: Settings) -> Drawing:
    scores = torch.tensor(SCORES)
    block_size = settings.block_size
    words = [WORDS[1][i : i + block_size] for i in range(0, 7, block_size)]
    names = [f"block {block}" for block in TABLES[1]] if block_size == 4 else None  # those of request b
    return pictures.merge(scores.split(block_size), words=words, names=names)


def _block_table(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    num_owned = sum(-(-s // settings.block_size) for s in batch.seq_lens.tolist())
    num_blocks = max(NUM_BLOCKS, num_owned) if words else None
    return pictures.block_table(batch, block_size=settings.block_size, num_blocks=num_blocks, words=words)


def _step(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return pictures.step(batch, words=words)


def _varlen(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return pictures.ragged(batch, words=words)


def _differential(settings: Settings) -> Drawing:
    first = torch.tensor([0.3, 0.0, 2.2, 0.4, 0.1, 0.5, 0.2])
    second = torch.tensor([0.4, 0.0, 0.0, 0.5, 0.1, 0.6, 0.2])
    return pictures.difference(first, second, 0.6, words=WORDS[1])


def _context_chunks(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    longest = max(batch.context_lens.tolist(), default=0)
    workspace = max(1, batch.num_seqs * -(-longest // 3))  # three chunks
    return pictures.context_chunks(batch, block_size=settings.block_size, workspace=workspace, words=words)


def _ranks(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return pictures.ranks(batch, 2, interleave=2, words=words)


def _quantized(settings: Settings) -> Drawing:
    return pictures.quantized_key(torch.tensor(KEY))


def _engine(settings: Settings) -> Drawing:
    num_pending, budget, steps = {"a": 9, "b": 5, "c": 7}, 6, []
    for _ in range(7):
        num_scheduled: dict[str, int] = {}
        for name in sorted(num_pending, key=lambda name: num_pending[name] > 1):  # decodes first
            num_new = min(num_pending[name], budget - sum(num_scheduled.values()))
            if num_new:
                num_scheduled[name] = num_new
                num_pending[name] = max(1, num_pending[name] - num_new)  # after its prompt, one token per step
        steps.append(num_scheduled)
    return pictures.schedule(steps, budget=budget)


EXAMPLES: dict[str, Callable[[Settings], Drawing]] = {
    "pictures": _masks,
    "causal": _causal,
    "window": _window,
    "local": _local,
    "cascade": _cascade,
    "merge": _merge,
    "table": _block_table,
    "batch": _step,
    "varlen": _varlen,
    "differential": _differential,
    "mla": _context_chunks,
    "context_parallel": _ranks,
    "quantized": _quantized,
    "engine": _engine,
}

USES: dict[str, tuple[str, ...]] = {  # the settings that each example takes
    "pictures": ("window", "chunk"),
    "causal": ("lens",),
    "window": ("window", "block_size", "lens"),
    "local": ("chunk", "block_size", "lens"),
    "cascade": ("block_size", "lens"),
    "merge": ("block_size",),
    "table": ("block_size", "lens"),
    "batch": ("lens",),
    "varlen": ("lens",),
    "differential": (),
    "mla": ("lens",),
    "context_parallel": ("lens",),
    "quantized": (),
    "engine": (),
}
