"""The exhibits of the museum: for each bug a few lines that have it, run beside the right ones.

Most are drawn alike. Each value gets a number of its own, one-hot, and each query weighs the keys that it sees alike:
what comes out says which values reached which query, and how much each counts. That is the mask that a kernel really
has, whatever it was meant to be. The bugs are planted mistakes of the conformance kit, the broken code of a puzzle, or
a few lines here. The right answer is the reference's.
"""

import itertools
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from refattn import (
    chunked_prefill,
    compressed,
    context_parallel,
    interval,
    kv_cache,
    masks,
    merge,
    recurrent,
    replay,
    sparse,
    speculative,
)
from refattn.attention import attend
from refattn.batch import Batch
from refattn.entries import CompressedPlan
from refattn.metadata import make_batch
from refattn.options import RecurrentOptions
from refattn.ranks import Shard
from refattn.rings import Ring
from twinattn.course.exercises.functions.visibility import virtual_batches
from twinattn.course.exercises.puzzles import PUZZLES
from twinattn.engine.window_pool import WindowPool
from twinattn.kit import states
from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes import differential as of_differential
from twinattn.kit.mistakes import empty, hidden, pages, selection, softmax
from twinattn.kit.mistakes import masks as of_masks
from twinattn.kit.mistakes import merge as of_merge
from twinattn.kit.mistakes import states as of_states
from twinattn.kit.mistakes.formula import Attention, as_contiguous
from twinattn.kit.reference import expected

PUZZLE_FILES = sorted((Path(__file__).parent.parent / "notebooks/exercises/puzzles").glob("[0-9]*.py"))
Cells = list[list[float]] | list[list[str]]


@dataclass(frozen=True)
class Picture:
    """What is right and what the bug draws: rows of cells, under columns that have names.

    Attributes:
        rows: their names.
        columns: runs of columns, each with its name.
        right: the cells that are right, weights from 0 to 1 or texts.
        wrong: those of the bug.
    """

    rows: list[str]
    columns: list[tuple[str, int]]
    right: Cells
    wrong: Cells


@dataclass(frozen=True)
class Exhibit:
    """A bug of docs/proof/bugs.md.

    Attributes:
        part: the heading that it stands under there.
        issue: a number in its row.
        title: in plain words.
        says: what to see in the picture.
        draw: makes the picture.
        puzzle: the name of the puzzle of it, if there is one.
    """

    part: str
    issue: str
    title: str
    says: str
    draw: Callable[[], Picture]
    puzzle: str

    @property
    def name(self) -> str:
        """The name of its picture."""
        return self.draw.__name__


EXHIBITS: list[Exhibit] = []


def exhibit(part: str, issue: str, title: str, *, puzzle: str = "") -> Callable[[Callable[[], Picture]], Any]:
    """Enter a function that draws an exhibit; its docstring says what to see."""

    def enter(draw: Callable[[], Picture]) -> Callable[[], Picture]:
        EXHIBITS.append(Exhibit(part, issue, title, " ".join((draw.__doc__ or "").split()), draw, puzzle))
        return draw

    return enter


# --- how masks are read out ---


def alike(example: Example) -> Arguments:
    """Return arguments under which a query weighs all that it sees alike, and the value of each slot is one-hot."""
    arguments = example.tensors(torch.float32)
    slots = math.prod(arguments["value_cache"].shape[:2])
    values = torch.eye(slots).reshape(*arguments["value_cache"].shape[:2], 1, slots)
    return arguments | dict(query=torch.zeros_like(arguments["query"]), value_cache=values)


def seen(
    kind: type[Attention],
    *lens: tuple[int, int],
    path: str = "chunked_prefill",
    variant: Any = None,
    change: Mapping[str, Any] | None = None,
    block_size: int = 4,
    seed: int = 0,
    weights: bool = False,
    **options: Any,
) -> Picture:
    """Draw which slots of the pool reach which query under a mistake, sequence by sequence, and then other memory.

    Args:
        kind: the mistake.
        lens: `(query_len, seq_len)` of each sequence.
        path: of the example.
        variant: of the mistake.
        change: arguments in the place of those of the example.
        block_size: tokens in a block.
        seed: of the example.
        weights: whether to draw how much each counts, and not only whether it does.
        options: of the example.
    """
    example = Example(path, lens=lens, heads=(1, 1), head_size=8, block_size=block_size, options=options, seed=seed)
    arguments = alike(example) | dict(change or {})
    right = expected(example, arguments)[0]["out"][: example.num_tokens, 0]
    wrong = kind(example, arguments, variant).answers()["out"][: example.num_tokens, 0]
    return by_sequence(example, arguments["batch"], right, wrong, weights)


def by_sequence(example: Example, batch: Batch, right: Tensor, wrong: Tensor, weights: bool = False) -> Picture:
    """Order the slots of the pool by sequence and position; what is left and reaches a query comes last."""
    assert batch.block_table is not None
    p, order, columns = example.block_size, [], []
    for name, (_, s), blocks in zip("abcdef", example.lens, batch.block_table.tolist(), strict=False):
        slots = [slot for j in range(s) if (slot := blocks[j // p] * p + j % p) not in order]
        order += slots
        columns += [(name, len(slots))] * bool(slots)
    other = [slot for slot in range(right.shape[1]) if slot not in order and wrong[:, slot].nan_to_num(0).any()]
    columns += [("others", len(other))] * bool(other)
    rows = newest(example.lens)
    cells = (shares(x[:, order + other], weights) for x in (right, wrong))
    return Picture(rows, columns, *cells)


def newest(lens: Sequence[tuple[int, int]]) -> list[str]:
    """Name the new tokens of each sequence by their positions; there are none before the first."""
    return [
        f"{name}{i}" if i >= 0 else name for name, (q, s) in zip("abcdef", lens, strict=False) for i in range(s - q, s)
    ]


def shares(x: Tensor, weights: bool = False) -> list[list[float]]:
    """Return weights as cells: how much, or whether they are there at all."""
    return x.tolist() if weights else x.ne(0).double().masked_fill(x.isnan(), torch.nan).tolist()


def of_rules(rows: list[str], columns: list[tuple[str, int]], right: Tensor, wrong: Tensor) -> Picture:
    """Run one kernel under two masks, and draw what reaches which query."""
    cells = []
    for mask in (right, wrong):
        t, s = mask.shape
        out, _ = attend(torch.zeros(t, 1, 8), torch.zeros(s, 1, 8), torch.eye(s)[:, None], mask)
        cells.append(shares(out[:, 0]))
    return Picture(rows, columns, *cells)


def texts(rows: list[str], right: Sequence[Sequence[Any]], wrong: Sequence[Sequence[Any]], *columns: str) -> Picture:
    """Draw numbers and names, right and wrong."""
    titles = [(name, 1) for name in columns] or [("", len(right[0]))]
    return Picture(rows, titles, *([[text(x) for x in row] for row in cells] for cells in (right, wrong)))


def text(x: Any) -> str:
    """Write a number with two digits after the point."""
    if not isinstance(x, float):
        return str(x).replace("-", "−")
    return f"{x:.2f}".replace("-", "−") if math.isfinite(x) else {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[str(x)]


def broken(puzzle: str) -> Callable[..., Any]:
    """Return the broken function of a puzzle."""
    (file,) = (file for file in PUZZLE_FILES if file.stem[3:] == puzzle)
    return runpy.run_path(str(file))["broken"]


def right_of(puzzle: str) -> Callable[..., Any]:
    """Return what the broken function of a puzzle should be."""
    return next(each.reference for each in PUZZLES if each.name == puzzle)


# --- merging ---


@exhibit("Merging", "27491", "NaN out of nothing", puzzle="empty_parts")
def nan_out_of_nothing() -> Picture:
    """Query 1 sees no key in either part. The naive merge subtracts −∞ from −∞."""
    lses = torch.tensor([[0.0, -torch.inf, 1.0], [1.0, -torch.inf, 0.0]])
    outs = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]])
    cells = (run(outs, lses)[0].tolist() for run in (right_of("empty_parts"), broken("empty_parts")))
    return texts(["output"], *([row] for row in cells), "query 0", "query 1", "query 2")


@exhibit("Merging", "15492", "An empty part that counts")
def an_empty_part_that_counts() -> Picture:
    """Part A saw three keys, part B none. What B gets in the merge depends on the LSE that its kernel returns for
    nothing: as 0 it counts like one key, as infinity it spoils the rest.
    """
    example = Example("chunked_prefill", lens=((1, 3), (1, 0)), heads=(1, 1), head_size=8)
    arguments = alike(example)
    outs = torch.eye(2)[:, None, None]  # one-hot values of A and B, so that their shares come out
    cells = []
    for given in (-math.inf, 0.0, math.inf):
        lse = empty.EmptyLse(example, arguments, given).answers()["lse"]
        weights, _ = of_merge.MergeGarbageTimesZero(example, {})._merged(outs.double(), lse[:, None])
        cells.append(weights[0, 0].tolist())
    return texts(["LSE 0", "LSE ∞"], [cells[0]] * 2, cells[1:], "share of A", "of B")


@exhibit("Merging", "52796", "Two logarithms", puzzle="log_base")
def two_logarithms() -> Picture:
    """Ten keys that count alike, eight in a prefix and two in a suffix. A log-sum-exp of base 2, merged as a natural
    one, gives the long prefix too much.
    """
    prefix, suffix = torch.eye(10).split([8, 2])
    cells = ([run(prefix, suffix).tolist()] for run in (right_of("log_base"), broken("log_base")))
    return Picture(["query"], [("prefix", 8), ("suffix", 2)], *cells)


@exhibit("Merging", "42642", "The other tensor's strides")
def the_other_tensors_strides() -> Picture:
    """Rows of the suffix stand two apart in memory, since it was padded. Read with the prefix's strides, every second
    row is padding, and the rest belongs to another query.
    """
    prefix = torch.zeros(4, 1, 8)
    memory = torch.eye(8)  # each row of memory is one-hot
    suffix = memory.view(4, 2, 8)[:, :1]
    lse = torch.zeros(4, 1)
    cells = []
    for read in (suffix, memory.as_strided(prefix.shape, prefix.stride())):
        out, _ = merge.merge([prefix, read], [lse - torch.inf, lse])
        cells.append(shares(out[:, 0]))
    return Picture([f"query {i}" for i in range(4)], [("memory of the suffix", 8)], *cells)


@exhibit("Merging", "831", "A sink that overflows")
def a_sink_that_overflows() -> Picture:
    """A sink takes weight from all keys. Added without subtracting the maximum, exp(sink) is too much, and overflows
    once the sink is large: a query returns NaN where it should return almost nothing.
    """
    example = Example("chunked_prefill", lens=((1, 2),), heads=(1, 1), head_size=8)
    cells: list[list[list[float]]] = [[], []]
    for sink in (0.0, 5.0, 800.0):
        arguments = alike(example) | dict(sinks=torch.tensor([sink]))
        both = expected(example, arguments)[0], softmax.SinksNotShifted(example, arguments).answers()
        for rows, answers in zip(cells, both, strict=True):
            out = float(answers["out"].sum())
            rows.append([out if math.isfinite(float(answers["lse"])) else math.nan])
    return texts([f"sink {sink}" for sink in (0, 5, 800)], *cells, "weight of the keys")


@exhibit("Merging", "12227", "A sink in every split", puzzle="sink_per_split")
def a_sink_in_every_split() -> Picture:
    """Eight equal scores and one sink as large. Counted once, each of the nine has a ninth; counted in each of four
    splits, the sink takes a third.
    """
    cells = []
    for run in (right_of("sink_per_split"), broken("sink_per_split")):
        keys = [float(run(torch.zeros(8), one, torch.tensor(0.0), 4)) for one in torch.eye(8)]
        cells.append([[*keys, 1 - sum(keys)]])
    return Picture(["query"], [("keys", 8), ("sink", 1)], *cells)


# --- ragged batches ---


class RowsAreSequences(Attention, is_base=True):
    """Row i of the queries is taken for the newest token of sequence i."""

    def answers(self) -> dict[str, Tensor]:
        """Attend from each row over the keys of the sequence of its number; rows after the last stay 0."""
        query, lens = self.query, self.lens
        out = torch.zeros(len(query), 1, self.value_pool.shape[-1], dtype=torch.float64)
        self.lens = tuple((1, s) for _, s in lens)
        for i in range(min(len(query), len(lens))):
            out[i] = self._sequence(i, query[i : i + 1])[0][0]
        return {"out": out}


@exhibit("Ragged batches", "1537", "Requests that say nothing", puzzle="silent_rows")
def requests_that_say_nothing() -> Picture:
    """Of four requests, only b and d have a new token. The step looks like one of decodes, so row 0 is taken for
    request a, and row 1 for b: each reads the conversation of another.
    """
    assert broken("silent_rows")([0, 1, 0, 1]) == [0, 1]
    return seen(RowsAreSequences, (0, 3), (1, 4), (0, 2), (1, 5))


@exhibit("Ragged batches", "2470", "A sequence without keys")
def a_sequence_without_keys() -> Picture:
    """Request b has no key yet. Its row is never written, so the output is what was in memory before: here NaN."""
    return seen(empty.EmptyUnwritten, (1, 4), (1, 0), (2, 3))


@exhibit("Ragged batches", "895", "A window cut to the number of keys")
def a_window_cut_to_the_number_of_keys() -> Picture:
    """Six queries, three keys, and a window as wide as can be. Cut to the number of keys, it no longer reaches the
    keys from the first queries, which stand three tokens before the first key.
    """

    class Cut(Attention, is_base=True):
        def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
            return self.mask._replace(right=min(self.mask.right, s)).visible(pos, j, s)

    return seen(Cut, (6, 3), causal=False, window_size=(-1, 100))


@exhibit("Ragged batches", "4450", "Hidden keys that outbid real ones")
def hidden_keys_that_outbid_real_ones() -> Picture:
    """Hidden keys get a score of −10000, which is meant to be lower than any. All real scores here are −20000, so
    each query looks at nothing but the future.
    """
    example = Example("chunked_prefill", lens=((4, 6),), heads=(1, 1), head_size=8, options=dict(softmax_scale=1.0))
    arguments = alike(example)
    arguments |= dict(query=torch.full_like(arguments["query"], -50.0))
    arguments |= dict(key_cache=torch.full_like(arguments["key_cache"], 50.0))
    right = expected(example, arguments)[0]["out"][:, 0]
    wrong = hidden.FiniteSentinel(example, arguments, -1e4).answers()["out"][:, 0]
    return by_sequence(example, arguments["batch"], right, wrong)


@exhibit("Ragged batches", "1025", "A cap that unmasks", puzzle="softcap_order")
def a_cap_that_unmasks() -> Picture:
    """The cap comes after the mask, and tanh(−∞) is −1: hidden keys are capped to a score of −1, and count."""
    visible = masks.causal(4, 6)
    cells = (
        run(torch.zeros(4, 6), visible, 1.0).tolist() for run in (right_of("softcap_order"), broken("softcap_order"))
    )
    return Picture([f"query {i}" for i in range(2, 6)], [("keys", 6)], *cells)


# --- drafts and captured steps ---


@exhibit("Drafts and captured steps", "15360", "Accepted drafts that stay where they are")
def accepted_drafts_that_stay() -> Picture:
    """Five tokens were drafted; the first, the third and the fifth are accepted. The next step reads three slots after
    the context. Unless the accepted ones move up, it reads a rejected one, and not the last.
    """
    trees = speculative.make_trees([[-1, 0, 0, 2, 2]])
    batch = make_batch([5], [9], [[2, 0, 1]])
    drafts = torch.tensor([7, 8, 9, 10, 11])
    accepted = speculative.accept(batch, trees, drafts, torch.tensor([9, 0, 11, 0, 0]))
    assert accepted.nodes[0, :3].tolist() == [0, 2, 4]
    cells = []
    for moves in (True, False):
        values = torch.eye(12).view(3, 4, 1, 12).clone()
        if moves:
            speculative.compact([values], batch, trees, accepted, block_size=4)
        rows = kv_cache.gather(values, torch.tensor([2, 0, 1], dtype=torch.int32), 7)[:, 0]
        out, _ = attend(torch.zeros(1, 1, 8), torch.zeros(7, 1, 8), rows[:, None], masks.full(1, 7))
        order = [8, 9, 10, 11, 0, 1, 2, 3, 4]  # the slots of tokens 0 to 8
        cells.append(shares(out[:, 0, order]))
    return Picture(["next query"], [("context", 4), ("drafts", 5)], *cells)


@exhibit("Drafts and captured steps", "51848", "A step for one token each, given several")
def a_step_for_one_token_each() -> Picture:
    """Request a verifies three drafts, b decodes. A step that was made for one token per request takes row 1 for b,
    and rows 2 and 3 for no request.
    """
    return seen(RowsAreSequences, (3, 6), (1, 4))


class LengthsOfTheCapture(Attention, is_base=True):
    """The lengths are those of the step that was captured, `variant`."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.lens = tuple((q, s) for (q, _), s in zip(self.lens, variant, strict=True))


@exhibit("Drafts and captured steps", "19106", "Lengths of the day of the capture")
def lengths_of_the_capture() -> Picture:
    """A step was captured when the requests had 4 and 2 tokens, and is replayed when they have 7 and 5. It goes on
    with the old lengths, and no query sees later tokens.
    """
    return seen(LengthsOfTheCapture, (1, 7), (1, 5), variant=(4, 2))


@exhibit("Drafts and captured steps", "32902", "A block taken for a slot", puzzle="block_or_slot")
def a_block_taken_for_a_slot() -> Picture:
    """An entry of the block table is used as a slot, without multiplying it by the block size: request a reads four
    tokens in a row from near the beginning of the pool, whatever request they belong to.
    """
    return seen(pages.BlockForSlot, (1, 6), (1, 7), seed=3)


# --- pages ---


@exhibit("Pages", "43810", "Padding that writes", puzzle="padding")
def padding_that_writes() -> Picture:
    """Two new tokens and two rows of padding, whose slot is −1. In Python that is the last slot of the pool, which
    belongs to a request.
    """
    slots = [2, 5, -1, -1]
    pool, new = torch.zeros(8, 4), torch.eye(4)
    cells = (run(pool, new, slots).T.tolist() for run in (right_of("padding"), broken("padding")))
    return Picture(["token", "token", "padding", "padding"], [("slots of the pool", 8)], *cells)


@exhibit("Pages", "42494", "The rest of the last block")
def the_rest_of_the_last_block() -> Picture:
    """Request a has 6 tokens, and b 5, in blocks of 4. The last block of each is read to its end: what was left there
    by others counts.
    """
    return seen(of_masks.PastTheEnd, (2, 6), (1, 5))


@exhibit("Pages", "3106", "Shorter than a block")
def shorter_than_a_block() -> Picture:
    """For very short sequences another kernel is chosen, and that one does not know pages: it reads the pool from its
    beginning.
    """

    class IgnoredIfShort(pages.TableIgnored, is_base=True):
        def _blocks(self, i: int, column: Tensor) -> Tensor:
            short = self.lens[i][1] < self.example.block_size
            return super()._blocks(i, column) if short else Attention._blocks(self, i, column)

    return seen(IgnoredIfShort, (1, 7), (2, 3), seed=2)


@exhibit("Pages", "17362", "Blocks copied in the wrong layout")
def blocks_copied_in_the_wrong_layout() -> Picture:
    """A pool of four blocks, each with its keys and its values; block 1 is copied to block 3. Taken for a pool of all
    keys and then all values, two other pieces of memory are copied, over the values of block 1 and of block 3.
    """
    names = [f"{kind}{block}" for block in range(4) for kind in "KV"]
    cells = []
    for shape in ((4, 2), (2, 4)):
        memory = torch.arange(8)
        pool = memory.view(shape)
        caches = [pool[:, 0], pool[:, 1]] if shape == (4, 2) else [pool[0], pool[1]]
        kv_cache.copy_blocks([cache[:, None] for cache in caches], torch.tensor([[1, 3]]))
        cells.append([[names[i] for i in memory.tolist()]])
    return texts(["memory"], *cells, *names)


@exhibit("Pages", "50427", "Offsets that do not fit into 32 bits")
def offsets_of_32_bits() -> Picture:
    """Where a block of 16 tokens with 8 heads of 128 begins, in elements. From block 131072 on, the product no longer
    fits into 32 bits: it becomes negative, then the place of another block.
    """
    blocks = [131071, 131072, 262145]
    begins = (torch.tensor(blocks, dtype=kind) * (16 * 8 * 128) for kind in (torch.int64, torch.int32))
    cells = ([[f"{element:,}".replace("-", "−")] for element in each.tolist()] for each in begins)
    return texts([f"block {block}" for block in blocks], *cells, "begins at")


# --- quantized caches ---


@exhibit("Quantized caches", "54035", "Tiles that round differently")
def tiles_that_round_differently() -> Picture:
    """The weights of a tile of keys are rounded to fp8, relative to the largest score so far. A decode takes tiles of
    two keys here, and a prefill of four: other roundings, and another answer to the same question.
    """
    scores, values = torch.tensor([0.0, 0.9, 1.7, 2.4]), torch.tensor([4.0, -3.0, 2.0, -1.0])

    def attended(size: int) -> list[str]:
        top, total, out = -math.inf, 0.0, 0.0
        for tile, value in zip(scores.split(size), values.split(size), strict=True):
            new = max(top, float(tile.max()))
            weights = (tile - new).exp()
            keep = math.exp(top - new)
            rounded = weights.to(torch.float8_e4m3fn).float()
            out = out * keep + float((rounded * value).sum())
            total, top = total * keep + float(weights.sum()), new
        return [f"{out / total:.4f}".replace("-", "−")]

    return texts(["decode", "prefill"], [attended(4)] * 2, [attended(2), attended(4)], "output")


@exhibit("Quantized caches", "42580", "One scale for two", puzzle="one_scale")
def one_scale_for_two() -> Picture:
    """Values are multiplied by the scale of the keys. With scales of 1 it does not show."""
    quantized = torch.tensor([[40], [80]], dtype=torch.int8)
    cells: list[list[list[float]]] = [[], []]
    for key_scale, value_scale in ((1.0, 1.0), (0.5, 0.01)):
        for rows, run in zip(cells, (right_of("one_scale"), broken("one_scale")), strict=True):
            rows.append([float(run(torch.zeros(1), quantized, quantized, key_scale, value_scale))])
    return texts(["scales 1, 1", "scales 0.5, 0.01"], *cells, "output")


@exhibit("Quantized caches", "37785", "Scales of the wrong request")
def scales_of_the_wrong_request() -> Picture:
    """Local attention cuts requests into virtual sequences: here a into two, b into none, c into three. Each should
    have the scale of its request; instead, number i has scale i.
    """
    lens = ((5, 7), (0, 6), (9, 10))
    pieces = [virtual_batches([q], [s], [list(range(3))], 4, 4)[0] for q, s in lens]
    owners = [name for name, parts in zip("abc", pieces, strict=True) for _ in parts]
    by_number = ["abc"[i] if i < len(lens) else "none" for i in range(len(owners))]
    titles = [f"of {owner}" for owner in owners]
    return texts(["scale of"], [owners], [by_number], *titles)


@exhibit("Quantized caches", "49716", "Scales in padded pages")
def scales_in_padded_pages() -> Picture:
    """Four scales per block, and two elements of padding behind them. Read as if there were none, block 1 begins in
    the padding of block 0.
    """
    memory = torch.arange(18)
    names = [f"{block}.{i}" if i < 4 else "pad" for block in range(3) for i in range(6)]
    padded = memory.view(3, 6)[:, :4]
    cells = ([[names[i] for i in row] for row in x.tolist()] for x in (padded, as_contiguous(padded)))
    return texts([f"block {i}" for i in range(3)], *cells, *[f"row {i}" for i in range(4)])


@exhibit("Quantized caches", "51091", "A guest that overwrites")
def a_guest_that_overwrites() -> Picture:
    """Layer 2 reads the keys of layer 0 and has none of its own. If it writes, both read what it wrote."""
    cells = []
    for writers in ([0], [0, 2]):
        pools = kv_cache.allocate(1, 4, 1, 1)
        for layer in writers:
            rows = torch.full((3, 1, 1), float(layer))
            kv_cache.write(rows, rows, *pools, torch.tensor([0, 1, 2]))
        cells.append([[f"layer {x:.0f}" for x in pools[0][0, :3, 0, 0].tolist()]])
    return texts(["keys of"], *cells, "token 0", "token 1", "token 2")


# --- windows ---


@exhibit("Windows", "3385", "A window that is one too wide", puzzle="window")
def a_window_that_is_one_too_wide() -> Picture:
    """A window of 3 tokens: a query and two before it. The bug counts three before it."""
    cells = (run(3, 7, 3) for run in (right_of("window"), broken("window")))
    return of_rules([f"query {i}" for i in range(4, 7)], [("keys", 7)], *cells)


@exhibit("Windows", "3385", "A window that shows nothing")
def a_window_that_shows_nothing() -> Picture:
    """A window of one token: each query sees itself. Off by one on the other side, no query sees anything."""
    return seen(of_masks.WindowOneTooFew, (3, 5), path="sliding_window", window_size=(0, 0))


class FirstTileOfAnotherWindow(Attention, is_base=True):
    """The tiles of keys are those of a layer whose window shows `variant` tokens before a query; tiles hold 2."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j >= (pos[:1] - self.variant) // 2 * 2)


@exhibit("Windows", "54374", "One schedule for two windows")
def one_schedule_for_two_windows() -> Picture:
    """A layer with a window of 6 takes the schedule of one with a window of 2, which begins at a later tile of keys."""
    return seen(FirstTileOfAnotherWindow, (3, 9), path="sliding_window", variant=1, window_size=(5, 0))


@exhibit("Windows", "16267", "A block looked up as a slot")
def a_block_looked_up_as_a_slot() -> Picture:
    """Blocks 1, 4 and 5 of the full pool lie at 0, 1 and 2 of the window pool. The map of slots, asked for block
    numbers, answers with the places of other tokens, or with none.
    """
    pool = WindowPool(3, 8, window_size=(8, 0), block_size=4)
    pool.hold("a", 10, 10, [1, 4, 5])
    table = make_batch([1], [10], [[1, 4, 5]])
    right = pool.translate_batch(table).block_table
    wrong = pool.translate_slots(torch.tensor([1, 4, 5]))
    assert right is not None
    return texts(["in the window pool"], right.tolist(), [wrong.tolist()], "block 1", "block 4", "block 5")


@exhibit("Windows", "42273", "Freed blocks are read")
def freed_blocks_are_read() -> Picture:
    """Block 0 fell out of the window and was freed; its next owner left NaN there. The table still names it, the
    kernel multiplies it by a weight of 0, and 0 times NaN is NaN.
    """
    example = Example(
        "sliding_window", lens=((2, 10),), heads=(1, 1), head_size=8, block_size=4, options=dict(window_size=(3, 0))
    )
    arguments = alike(example)
    values = arguments["value_cache"].clone()
    values[int(arguments["batch"].block_table[0, 0])] = torch.nan
    arguments |= dict(value_cache=values)
    right = expected(example, arguments)[0]["out"][:, 0]
    wrong = hidden.HiddenTimesNan(example, arguments).answers()["out"][:, 0]
    return by_sequence(example, arguments["batch"], right, wrong)


class SpanOfACausalWindow(Attention, is_base=True):
    """A tile of two queries reads as many keys as its window shows before it, and its own."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        first = pos[:1] + (pos - pos[:1]) // 2 * 2
        return super()._visible(pos, j, s, q) & (j < first + 2)


@exhibit("Windows", "4972", "A window without its other side")
def a_window_without_its_other_side() -> Picture:
    """No causal mask, and a window of two tokens to the left: each query sees all later keys. A tile of two queries
    reads as many keys as under a causal mask, and never reaches the later ones.
    """
    return seen(SpanOfACausalWindow, (4, 9), path="sliding_window", causal=False, window_size=(2, -1))


# --- local chunks ---


@exhibit("Local chunks", "16209", "The last chunk", puzzle="chunk_ends")
def the_last_chunk() -> Picture:
    """Nine tokens in chunks of four. The chunk that is not full is left out, and its query sees nothing."""
    rules = []
    for run in (right_of("chunk_ends"), broken("chunk_ends")):
        mask, row = torch.zeros(5, 9, dtype=torch.bool), 0
        for chunk, (q, s) in enumerate(run(5, 9, 4), start=1):
            mask[row : row + q, 4 * chunk : 4 * chunk + s] = masks.causal(q, s)
            row += q
        rules.append(mask)
    return of_rules([f"query {i}" for i in range(4, 9)], [("keys", 9)], *rules)


@exhibit("Local chunks", "49980", "More pieces than requests")
def more_pieces_than_requests() -> Picture:
    """One request, cut into three virtual sequences, and room for as many as there are requests: all but the first are
    left out.
    """

    class OnePiecePerRequest(Attention, is_base=True):
        def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
            first = pos[0] // self.mask.chunk
            return super()._visible(pos, j, s, q) & (pos // self.mask.chunk < first + len(self.lens))

    return seen(OnePiecePerRequest, (7, 10), path="local", chunk_size=4)


@exhibit("Local chunks", "32902", "Slots taken for blocks")
def slots_taken_for_blocks() -> Picture:
    """A table of slots, of which every fourth is the beginning of a block. Unless it is divided by the block size, it
    names blocks that the pool of four does not have.
    """
    blocks = [2, 1, 3]
    slots = torch.tensor([block * 4 + row for block in blocks for row in range(4)])[::4]
    return texts(["block table"], [(slots // 4).tolist()], [slots.tolist()], "chunk 0", "chunk 1", "chunk 2")


# --- intervals and selected keys ---


def intervals(right: tuple[Tensor, Tensor], wrong: tuple[Tensor, Tensor], *lens: tuple[int, int]) -> Picture:
    """Run one kernel over two intervals of keys for each query."""
    example = Example("interval", lens=lens, heads=(1, 1), head_size=8, block_size=4)
    arguments = alike(example)
    given = (arguments | dict(first_visible=first, last_visible=last) for first, last in (right, wrong))
    cells = [expected(example, each)[0]["out"][:, 0] for each in given]
    return by_sequence(example, arguments["batch"], *cells)


@exhibit("Intervals and selected keys", "47217", "An image longer than the window")
def an_image_longer_than_the_window() -> Picture:
    """Tokens 2 to 7 are an image, whose tokens see one another; the window shows three tokens before. The image is
    longer than that, is dropped, and its tokens no longer see those after them.
    """
    batch = make_batch([10], [10], [[0, 1, 2]])
    spans = torch.tensor([[[2, 7]]], dtype=torch.int32)
    right = interval.image_spans(batch, spans, 10, window_size=(3, -1))
    return intervals(right, interval.causal(batch, 10, window_size=(3, -1)), (10, 10))


@exhibit("Intervals and selected keys", "50539", "An OR where an AND belongs", puzzle="span_or_window")
def an_or_where_an_and_belongs() -> Picture:
    """Tokens 2 to 7 are an image. The model means: causal or in the image, and in the window. With the OR outside, the
    image is seen whole, window or not.
    """
    batch = make_batch([10], [10], [[0, 1, 2]])
    spans = torch.tensor([[[2, 7]]], dtype=torch.int32)
    both = (interval.image_spans(batch, spans, 10, window_size=(2, -1), whole_spans=whole) for whole in (False, True))
    return intervals(*both, (10, 10))


class TilesOfACausalMask(Attention, is_base=True):
    """The tiles of keys of two queries end where a causal mask would end them; tiles hold two keys."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        last = pos // 2 * 2 + 1  # the last query of the tile
        return super()._visible(pos, j, s, q) & (j // 2 <= last // 2)


@exhibit("Intervals and selected keys", "30974", "Keys that are never loaded")
def keys_that_are_never_loaded() -> Picture:
    """The mask shows the whole image, tokens 2 to 7. But tiles of keys after a query are skipped, as under a causal
    mask, before the mask is asked.
    """
    batch = make_batch([10], [10], [[0, 1, 2]])
    spans = torch.tensor([[[2, 7]]], dtype=torch.int32)
    first, last = interval.image_spans(batch, spans, 10)
    change = dict(first_visible=first, last_visible=last)
    return seen(TilesOfACausalMask, (10, 10), path="interval", change=change)


def selected(choices: Sequence[Tensor], num_keys: int) -> list[list[float]]:
    """Draw which keys were selected for each query."""
    return [[float(j in row.tolist()) for j in range(num_keys)] for row in choices]


@exhibit("Intervals and selected keys", "30645", "Too many ties", puzzle="tied_scores")
def too_many_ties() -> Picture:
    """Eight keys have the same score, and four are wanted. There is room for fewer ties, so none is taken, and the
    list holds −1 four times. Who follows a −1 reads the first key.
    """
    example = Example("sparse", lens=((1, 8),), heads=(1, 1), head_size=8, block_size=4, options=dict(topk=4))
    arguments = alike(example)
    positions = sparse.select(torch.zeros(1, 8), 4)
    right = expected(example, arguments | dict(positions=positions))[0]["out"][:, 0]
    lost = arguments | dict(positions=torch.full_like(positions, -1))
    wrong = selection.MinusOneFollowed(example, lost).answers()["out"][:, 0]
    return by_sequence(example, arguments["batch"], right, wrong)


@exhibit("Intervals and selected keys", "31115", "Ties that fall differently")
def ties_that_fall_differently() -> Picture:
    """Two ranks select three of eight keys from the same scores, with ties. Unless ties have an order, each takes
    others.
    """
    row = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]])
    low = sparse.select(row, 3)[0]
    high = selection.TiesToHigher(Example("select"), dict(scores=row, topk=3)).answers()["out"][0]
    return Picture(["rank 0", "rank 1"], [("keys", 8)], selected([low, low], 8), selected([low, high], 8))


@exhibit("Intervals and selected keys", "1454", "A selection that became a window")
def a_selection_that_became_a_window() -> Picture:
    """Three keys are selected for each query. The sum over heads comes out as zeros, all scores tie, and the last ones
    win: a window, which forgets the beginning.
    """
    scores = torch.tensor([[5.0, 1, 0, 4, 2, 1, 0, 3], [4.0, 0, 5, 1, 1, 0, 2, 3], [1.0, 5, 2, 0, 4, 0, 0, 1]])
    scores = scores.masked_fill(~masks.causal(3, 8), -torch.inf)
    right = sparse.select(scores, 3)
    zeros = dict(scores=scores.clamp(max=0), topk=3)
    wrong = selection.TiesToHigher(Example("select"), zeros).answers()["out"]
    return Picture([f"query {i}" for i in (5, 6, 7)], [("keys", 8)], selected(right, 8), selected(wrong, 8))


# --- compressed keys ---


def after_a_hit(overlap: bool) -> CompressedPlan:
    """Plan eight new tokens after a prefix of eight that was found: entries of four tokens, a window of four."""
    batch, table = make_batch([8], [16], [[0, 1, 2, 3]]), torch.tensor([[0]], dtype=torch.int32)
    sizes = dict(window_size=(3, 0), entry_table=table, block_size=4, entry_block_size=4)
    return compressed.plan(batch, ratio=4, overlap=overlap, **sizes)


def with_a_new_ring(rows: Tensor, first: int, fill: float = 0.0) -> Tensor:
    """Return the rows in its own ring that a new request reads after a prefix hit: those of the prefix are missing."""
    return torch.cat([torch.full_like(rows[:first], fill), rows[first:]])


@exhibit("Compressed keys", "1417", "A window without its prefix")
def a_window_without_its_prefix() -> Picture:
    """A prefix of eight tokens is found, and its two entries are there. The window of four is a ring of the request,
    which is new: the first queries see nothing in it but themselves, and zeros.
    """
    plan, keys, query = after_a_hit(overlap=False), torch.eye(20), torch.zeros(8, 1, 20)
    entries = torch.eye(20)[16:].view(1, 4, 20)
    right, wrong = (
        compressed.attention(query, x.view(4, 4, 20), entries, plan)[:4, 0]
        for x in (keys[:16], with_a_new_ring(keys[:16], 8))
    )
    columns = [*range(5, 12), 16, 17]
    rows = [f"query {i}" for i in range(8, 12)]
    return Picture(rows, [("tokens 5–11", 7), ("entries", 2)], right[:, columns].tolist(), wrong[:, columns].tolist())


@exhibit("Compressed keys", "1769", "An entry without the tokens before")
def an_entry_without_the_tokens_before() -> Picture:
    """Each entry is made of four tokens and of the four before. After a prefix of eight tokens entry 2 needs tokens 4
    to 7, whose rows were in a ring of another request. Entry 3 is right again.
    """
    plan, values, gates = after_a_hit(overlap=True), torch.eye(16).repeat(1, 2), torch.zeros(16, 32)
    right, wrong = (
        compressed.compress(torch.cat([values, x], 1).view(4, 4, 64), plan)[:2]
        for x in (gates, with_a_new_ring(gates, 8, -torch.inf))
    )
    rows = ["entry 2", "entry 3"]
    return Picture(rows, [("tokens", 16)], right.tolist(), wrong.tolist())


# --- cascade ---


@exhibit("Cascade", "11635", "A prefix that reaches too far", puzzle="prefix_reach")
def a_prefix_that_reaches_too_far() -> Picture:
    """The same prompt of eight tokens twice, four of them new. The shared level has no causal mask, since all of it is
    before every query. If it takes in the new tokens, they see the future.
    """
    arguments = ([4, 4], [8, 8], [[5, 0], [5, 0]], 4)
    rules = []
    for run in (right_of("prefix_reach"), broken("prefix_reach")):
        shared = run(*arguments)
        rules.append(masks.causal(4, 8) | (torch.arange(8) < shared))
    return of_rules([f"query {i}" for i in range(4, 8)], [("keys", 8)], *rules)


class FirstBlocksOfTheFirst(Attention, is_base=True):
    """The first block of every sequence is read from that of the first sequence."""

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return torch.where(column < 1, super()._blocks(0, column), super()._blocks(i, column))


@exhibit("Cascade", "23485", "Equal, but not the same")
def equal_but_not_the_same() -> Picture:
    """Requests a and b begin with the same tokens, in blocks of their own. A cascade that compares contents reads the
    first block of a for both: right as long as a is there.
    """
    return seen(FirstBlocksOfTheFirst, (1, 6), (1, 7))


# --- differential ---


def of_pairs(kind: type[of_differential.Differential]) -> Picture:
    """Draw the output of a pair of heads."""
    example = Example("differential", lens=((1, 3),), heads=(2, 2), head_size=2, block_size=4, seed=1)
    arguments = example.tensors(torch.float32)
    cells = (
        x["out"].reshape(1, 4).tolist() for x in (expected(example, arguments)[0], kind(example, arguments).answers())
    )
    return texts(["output"], *cells, "head 0", "", "head 1", "")


@exhibit("Differential", "34083", "The norm before the difference")
def the_norm_before_the_difference() -> Picture:
    """Two softmaxes are subtracted, and then normalised. Normalised first, the output is another."""
    return of_pairs(of_differential.NormBeforeDifference)


@exhibit("Differential", "34083", "A norm for each half")
def a_norm_for_each_half() -> Picture:
    """The norm is over both heads of a pair at once; here each head has its own."""
    return of_pairs(of_differential.NormOfEachHalf)


# --- layers that keep a state ---


def folded(
    kind: type[of_states.State],
    lens: Sequence[tuple[int, int]],
    slots: Sequence[int] | Sequence[Sequence[int]],
    num_slots: int,
    *,
    of_slots: bool = False,
    **changed: Any,
) -> Picture:
    """Fold tokens whose values are one-hot into states that are, too, and draw what reached the outputs, or the slots.

    Nothing fades and nothing is taken back, so a state is the sum of what it was and of all values since.
    """
    t = sum(q for q, _ in lens)
    ends = [0, *itertools.accumulate(q for q, _ in lens)]
    numbers = [torch.tensor(x, dtype=torch.int32) for x in (ends, [s for _, s in lens])]
    arguments = dict(
        query=torch.ones(t, 1, 1),
        key=torch.ones(t, 1, 1),
        value=torch.eye(t + num_slots)[:t, None],
        log_decay=torch.zeros(t, 1),
        beta=torch.ones(t, 1),
        states=torch.eye(t + num_slots)[t:, None, :, None].clone(),
        batch=Batch(*numbers, None, max(q for q, _ in lens), max(s for _, s in lens)),
        state_indices=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=torch.tensor([s > q for q, s in lens]),
        scale=1.0,
        delta=False,
    )
    arguments |= changed
    columns = [(name, q) for name, (q, _) in zip("abcdef", lens, strict=False) if q] + [
        ("in the slots before", num_slots)
    ]
    cells = []
    for answers in (states.fold(arguments), kind(Example("recurrent"), arguments).answers()):
        read = answers["states"][:, 0, :, 0] if of_slots else answers["out"][:, 0]
        cells.append(shares(read, weights=False))
    return Picture([f"slot {i}" for i in range(num_slots)] if of_slots else newest(lens), columns, *cells)


@exhibit("Layers that keep a state", "57720", "What the slot held before")
def what_the_slot_held_before() -> Picture:
    """Request b begins, with a prompt of one token, in a slot of another request. Its output holds what was there."""
    return folded(of_states.StateOfTheOneBefore, [(1, 4), (1, 1)], [2, 0], 3)


class EmptyStoresBack(of_states.State, is_base=True):
    """A sequence without tokens loads its state at the beginning and stores it at the end, as every sequence does."""

    def answers(self) -> dict[str, Tensor]:
        """Fold all, and then store the states of those without tokens."""
        answers, ends = super().answers(), self.arguments["batch"].cu_seqlens_q.tolist()
        for i, slot in enumerate(self.arguments["state_indices"].tolist()):
            if ends[i] == ends[i + 1]:
                answers["states"][slot] = self.arguments["states"][slot]
        return answers


@exhibit("Layers that keep a state", "37728", "A sequence that says nothing and stores")
def a_sequence_that_says_nothing_and_stores() -> Picture:
    """Request b has finished and has no token; its entry still names slot 1, which is now that of a. It stores what it
    loaded, and what a wrote is lost.
    """
    return folded(EmptyStoresBack, [(2, 5), (0, 4)], [1, 1], 3, of_slots=True)


@exhibit("Layers that keep a state", "13278", "Padding in a live slot")
def padding_in_a_live_slot() -> Picture:
    """Request b is padding, with slot −1. Clamped to 0, it writes into the state of a."""
    return folded(of_states.PaddingIsSlotZero, [(1, 4), (2, 2)], [0, -1], 2, of_slots=True)


@exhibit("Layers that keep a state", "34874", "Slots of the day of the capture")
def slots_of_the_capture() -> Picture:
    """A step was captured for the slots 0 and 1, and is replayed for 2 and 0. It goes on with the old ones."""

    class Captured(of_states.State, is_base=True):
        def _slots(self, slots: list[int]) -> list[int]:
            return [{2: 0, 0: 1}[slot] for slot in slots]

    return folded(Captured, [(1, 3), (1, 5)], [2, 0], 3, of_slots=True)


@exhibit("Layers that keep a state", "49036", "Rejected drafts that stay", puzzle="draft_stayed")
def rejected_drafts_that_stay() -> Picture:
    """The step before drafted three tokens and kept a state after each; one was accepted. The next token should go on
    from the first state, and goes on from the last.
    """

    class AfterAllDrafts(of_states.State, is_base=True):
        def _begin(self, slots: Sequence[int], accepted: int, has_state: bool) -> Tensor:
            return super()._begin(slots, 3, has_state)

    after = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 1, 1]])  # the drafts in the states of the slots
    initial = torch.cat([torch.zeros(3, 1), after], dim=1)[:, None, :, None]
    accepted = torch.tensor([1], dtype=torch.int32)
    drawn = folded(AfterAllDrafts, [(1, 9)], [[0, 1, 2]], 3, states=initial, num_accepted=accepted)
    return replace(drawn, columns=[("a", 1), ("drafts", 3)], rows=["next"])


@exhibit("Layers that keep a state", "6681", "A prefix without its state", puzzle="kept_states")
def a_prefix_without_its_state() -> Picture:
    """The keys of a prefix are in the cache, so its tokens are skipped. The state after them was not kept, and the
    layers that have one begin from nothing.
    """
    drawn = folded(of_states.StateForgotten, [(3, 11)], [0], 1)
    return replace(drawn, columns=[("a", 3), ("the prefix", 1)])


@exhibit("Layers that keep a state", "389", "A gate of zero")
def a_gate_of_zero() -> Picture:
    """Token 2 forgets all before it: its gate is 0, and the logarithm of that −∞. Where the gates between two tokens
    come from a difference of sums of logarithms, −∞ minus −∞ is NaN.
    """
    gates = torch.tensor([1.0, 0.5, 0.0, 0.5])
    sums = gates.log().cumsum(0)
    wrong = (sums[:, None] - sums).exp()
    right, state = [], torch.zeros(4)
    for i, gate in enumerate(gates):
        state = gate * state + torch.eye(4)[i]
        right.append(state.tolist())
    cells = (
        [[x if j <= i else "" for j, x in enumerate(row)] for i, row in enumerate(each)]
        for each in (right, wrong.tolist())
    )
    return texts([f"token {i}" for i in range(4)], *cells, *[f"of {i}" for i in range(4)])


@exhibit("Layers that keep a state", "28695", "The fold that was not the step")
def the_fold_that_was_not_the_step() -> Picture:
    """A slot keeps a state and the last four inputs. When they are folded in all at once, each times the decays after
    it, the sum is the same on paper, and in its last digits another one than that of the steps whose outputs were read.
    The next fold begins from it, and over a long answer the differences add up.
    """

    def at_once(states: Tensor, ring: Ring) -> Tensor:
        sums = ring.log_decay[0].cumsum(0)
        left = (sums[-1] - sums).exp()[:, :, None]
        added = torch.einsum("lhv,lhk->hvk", left * ring.written[0], ring.key[0])
        return states[0] * sums[-1].exp()[:, None, None] + added

    found: list[list[list[str]]] = []
    for is_step in (True, False):
        states, ring = torch.zeros(1, 1, 4, 4), replay.allocate(1, 5, 1, 1, 4, 4)
        cursors, slots = replay.allocate_cursors(1), torch.tensor([0], dtype=torch.int32)
        elements, generator = list[list[str]](), torch.Generator().manual_seed(4)
        for token in range(16):
            query, key, value = torch.randn(3, 1, 1, 4, generator=generator)
            gates = -0.3 * torch.rand(1, 1, generator=generator), torch.rand(1, 1, generator=generator)
            tables = dict(state_indices=slots, cursors=cursors, ring_size=5, drafts=True)
            plan = replay.plan(make_batch([1], [token + 1]), **tables)
            replay.attention(query, normalize(key, dim=-1), value, *gates, states, ring, plan)
            replay.advance(cursors, plan, torch.tensor([1], dtype=torch.int32))
            if cursors[0] == 4:
                if is_step:
                    replay.flush([states], [ring], cursors, slots)
                else:
                    states[0] = at_once(states, Ring(*(x[:, :4] for x in ring)))
                    cursors.zero_()
                elements.append([f"{float(states[0, 0, 0, 1]):.9f}".replace("-", "−")])
        found.append(elements)
    return texts([f"after {4 * i + 4} tokens" for i in range(4)], *found, "an element of the state")


@exhibit("Layers that keep a state", "38398", "The benchmark that never moved its cursor")
def the_benchmark_that_never_moved_its_cursor() -> Picture:
    """A ring has room for four inputs. A decode reads those that are in it, and every fourth one writes the state. A
    benchmark that calls the kernel again and again with a cursor of 0 times the cheapest decode of the four alone.
    """
    found: list[list[list[str]]] = []
    for moves in (True, False):
        states, ring = torch.zeros(1, 1, 2, 2), replay.allocate(1, 4, 1, 1, 2, 2)
        cursors, calls = replay.allocate_cursors(1), list[list[str]]()
        for _ in range(5):
            before, held = states.clone(), int(cursors[0])
            slots = torch.tensor([0], dtype=torch.int32)
            plan = replay.plan(make_batch([1], [9]), state_indices=slots, cursors=cursors, ring_size=4)
            tokens = *torch.ones(3, 1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1)
            replay.attention(*tokens, states, ring, plan, RecurrentOptions(delta=False))
            calls.append([str(held), "no" if torch.equal(states, before) else "yes"])
            if moves:
                replay.advance(cursors, plan)
        found.append(calls)
    return texts([f"call {i + 1}" for i in range(5)], *found, "inputs read", "state written")


# --- going on at position p ---


@exhibit("Going on at position p", "38031", "Index keys that stayed behind")
def index_keys_that_stayed_behind() -> Picture:
    """A request comes back from host memory with the keys of its eight tokens, and without their index keys. Those of
    another request are in its blocks, and the query selects three keys by them.
    """
    plan = chunked_prefill.plan(make_batch([1], [8], [[0, 1]]), block_size=4)
    own, of_another = [5.0, 1, 0, 4, 2, 1, 0, 3], [0.0, 3, 1, 0, 5, 0, 4, 1]
    right, wrong = (
        sparse.select(sparse.scores(torch.ones(1, 1, 1), torch.ones(1, 1), torch.tensor(x).view(2, 4, 1), plan), 3)
        for x in (own, of_another)
    )
    return Picture(["query 7"], [("keys", 8)], selected(right, 8), selected(wrong, 8))


@exhibit("Going on at position p", "51094", "A token that counts twice")
def a_token_that_counts_twice() -> Picture:
    """All of a prompt of eight tokens is found, and its last token is computed once more, for its logits. The state was
    kept after eight tokens, and not after seven: it has that token already.
    """
    tokens = (*torch.ones(2, 8, 1, 1), torch.eye(8)[:, None], torch.zeros(8, 1), torch.ones(8, 1))
    pool, slots = torch.zeros(1, 1, 8, 1), torch.zeros(1, dtype=torch.int32)

    def fold(first: int) -> list[list[float]]:
        plan = recurrent.plan(make_batch([8 - first], [8]), state_indices=slots)
        options = RecurrentOptions(scale=0.5, delta=False)  # half a cell for each
        return shares(recurrent.attention(*(x[first:] for x in tokens), pool, plan, options)[-1:, 0], weights=True)

    return Picture(["token 7"], [("tokens", 8)], fold(0), fold(7))


# --- CUDA graphs ---


@exhibit("CUDA graphs, and who else is in the batch", "45323", "A plan that was frozen", puzzle="frozen_splits")
def a_plan_that_was_frozen() -> Picture:
    """A step was captured with 4 keys in two splits of two, and is replayed with 9. The splits still hold two keys."""
    rules = []
    for run in (right_of("frozen_splits"), broken("frozen_splits")):
        splits = run(4, 9, 2)
        rules.append(torch.tensor([[any(first <= j < last for first, last in splits) for j in range(9)]]))
    return of_rules(["query"], [("keys", 9)], *rules)


@exhibit("CUDA graphs, and who else is in the batch", "38436", "Padding that overwrites the first slot")
def padding_that_overwrites_the_first_slot() -> Picture:
    """A step of three rows is replayed with two requests. The slot of the third is −1; clamped to 0, it overwrites the
    first token of another request.
    """
    slots = torch.tensor([6, 3, -1])
    cells = []
    for given in (slots, slots.clamp(min=0)):
        pools = kv_cache.allocate(2, 4, 1, 3)
        kv_cache.write(*[torch.eye(3)[:, None]] * 2, *pools, given)
        cells.append(shares(pools[0].flatten(0, 1)[:, 0].T))
    return Picture(["token", "token", "padding"], [("slots of the pool", 8)], *cells)


@exhibit("CUDA graphs, and who else is in the batch", "2424", "Who else is in the batch")
def who_else_is_in_the_batch() -> Picture:
    """The same request, alone and beside a long one, which changes into how many splits all keys are cut. Sums of
    floats depend on their order: the last digit is another.
    """

    def summed(size: int) -> list[str]:
        parts = []
        for part in (torch.arange(1, 13, dtype=torch.float32) / 10).split(size):
            parts.append(torch.zeros(()))
            for x in part:
                parts[-1] = parts[-1] + x
        total = torch.zeros(())
        for part in parts:
            total = total + part
        return [f"{float(total):.7f}"]

    return texts(["alone", "beside a long one"], [summed(12)] * 2, [summed(12), summed(4)], "sum")


# --- context parallelism ---


@exhibit("Context parallelism", "38416", "An empty share with an LSE of 0")
def an_empty_share() -> Picture:
    """Two tokens on three ranks. The third has none of them, returns an LSE of 0, and counts like a key with a score
    of 0: the others get less than all.
    """
    shares_of = [context_parallel.own_positions(2, Shard(rank, 3)) for rank in range(3)]
    cells = []
    for nothing in (-math.inf, 0.0):
        outs, lses = [], []
        for own in shares_of:
            out, lse = attend(
                torch.zeros(1, 1, 8), torch.zeros(len(own), 1, 8), torch.eye(2)[own][:, None], masks.full(1, len(own))
            )
            outs.append(out)
            lses.append(lse if len(own) else torch.full_like(lse, nothing))
        cells.append([[f"{x:.0%}" for x in merge.merge(outs, lses)[0][0, 0].tolist()]])
    return texts(["weight of"], *cells, "key 0", "key 1")


@exhibit("Context parallelism", "26696", "Runs of one, and runs of a block")
def runs_of_one_and_runs_of_a_block() -> Picture:
    """Two ranks have runs of four tokens in turn. A rank that takes its tokens for every second one gives its keys
    wrong positions, and the causal mask hides and shows others.
    """
    rules = [masks.causal(4, 16), torch.zeros(4, 16, dtype=torch.bool)]
    for rank in range(2):
        true, taken = (context_parallel.own_positions(16, Shard(rank, 2, run)) for run in (4, 1))
        rules[1][:, true] = taken[: len(true)] <= torch.arange(12, 16)[:, None]
    return of_rules([f"query {i}" for i in range(12, 16)], [("keys", 16)], *rules)


@exhibit("Context parallelism", "47181", "A difference of lengths", puzzle="rank_lengths")
def a_difference_of_lengths() -> Picture:
    """Five tokens of context and three new ones, in turn on two ranks. How many of the new ones a rank has depends on
    where the context ends.
    """
    cells = (
        [[run(context_len=5, new_len=3, rank=rank, num_ranks=2, interleave=1)] for rank in (0, 1)]
        for run in (right_of("rank_lengths"), broken("rank_lengths"))
    )
    return texts(["rank 0", "rank 1"], *cells, "new tokens")


# --- cross attention ---


@exhibit("Cross attention", "25045", "Encoders of other lengths")
def encoders_of_other_lengths() -> Picture:
    """Each request sees its own encoder: five tokens, none, and three. With the longest length for all, b and c read
    what is behind the end of theirs.
    """
    return seen(of_masks.EverybodyLongest, (2, 5), (1, 0), (1, 3), causal=False)
