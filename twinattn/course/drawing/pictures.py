"""One function per idea: masks, batches, block tables, windows, chunks, cascades, schedules, merged weights, quantized
values.

The only modules of paths that these drawings call are `sliding_window`, `local`, `mla`, `context_parallel` and
`quantized`, each in one place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import ascii_lowercase

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refattn import context_parallel, kv_cache, local, masks, mla, quantized, sliding_window
from refattn.batch import Batch, check_block_table
from refattn.ranks import Shard
from refattn.scales import Fp8Scales, Int8Scales
from twinattn.course.drawing.drawing import Drawing
from twinattn.course.drawing.figure import cell_width
from twinattn.course.drawing.panels import SHARED, Bars, Cell, Grid, Span

Rule = Callable[[int, int], Bool[Tensor, "t s"]]  # returns the mask of a sequence from its query_len and seq_len
Words = Sequence[Sequence[str]]  # the tokens of each sequence
FIRST_OF_PARTS = 3  # the colour of what is no request: the three requests of the notebooks have the first three


# --- masks ---


def mask(
    visible: Bool[Tensor, "t s"],
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    title: str = "",
    group: int = 0,
) -> Drawing:
    """Draw one mask: one row per query, one column per key, filled where the query sees the key.

    Args:
        visible: the mask, true where query `t` sees key `s`.
        rows: labels of the queries; numbers if None.
        columns: labels of the keys; no labels if None.
        title: the line above.
        group: selects the colour.
    """
    t, _ = visible.shape
    return Drawing([[Grid(_mask_cells(visible, group), rows or _numbers(t), columns or (), title=title)]])


def side_by_side(**drawings: Drawing) -> Drawing:
    """Draw the panels of several drawings next to each other; the names of the arguments are their titles."""
    return Drawing(
        [[replace(panel, title=name) for name, each in drawings.items() for line in each.lines for panel in line]]
    )


def memory(levels: Mapping[str, Sequence[str]]) -> Drawing:
    """Draw a memory hierarchy: one row per level, with what a kernel keeps there.

    Args:
        levels: the names of what each level holds, the smallest and fastest level first.
    """
    width = cell_width(name for names in levels.values() for name in names)
    groups = [FIRST_OF_PARTS + i for i in range(len(levels) - 1)] + [SHARED]
    cells = [
        [Cell("filled", name, group) for name in names] for group, names in zip(groups, levels.values(), strict=True)
    ]
    note = "every level is larger than the one above it, and slower"
    return Drawing([[Grid(cells, list(levels), width=width)]], note=note)


def sequences(batch: Batch, rule: Rule = masks.causal, *, words: Words | None = None) -> Drawing:
    """Draw the mask of each sequence of a batch.

    Args:
        batch: the lengths.
        rule: returns the mask of a sequence from its two lengths: `masks.causal`, `partial(masks.chunk, chunk_size=4)`.
        words: the tokens of each sequence; numbers if None.
    """
    return Drawing([[_mask_grid(seq, rule) for seq in _host_sequences(batch, words)]])


def ragged(batch: Batch, rule: Rule = masks.causal, *, words: Words | None = None) -> Drawing:
    """Draw all sequences in one mask, query rows by key rows: each is a block on the diagonal.

    Args:
        batch: the lengths.
        rule: returns the mask of a sequence from its two lengths.
        words: the tokens of each sequence; numbers if None.
    """
    seqs = _host_sequences(batch, words)
    return Drawing([[_diagonal_grid(seqs, [seq.words for seq in seqs], rule)]])


# --- batches ---


def step(batch: Batch, *, words: Words | None = None) -> Drawing:
    """Draw the tokens of a batch: each sequence with its context outlined, and below them the flattened query rows.

    Args:
        batch: the lengths.
        words: the tokens of each sequence; numbers if None.
    """
    seqs = _host_sequences(batch, words)
    width = cell_width(word for seq in seqs for word in seq.words)
    longest = max((seq.seq_len for seq in seqs), default=0)
    cells = [
        [
            Cell("filled" if j >= seq.seq_len - seq.query_len else "outlined", seq.words[j], seq.group)
            for j in range(seq.seq_len)
        ]
        + [Cell()] * (longest - seq.seq_len)
        for seq in seqs
    ]
    tokens = Grid(cells, [seq.name for seq in seqs], title="sequences", width=width)
    row = [Cell("filled", word, seq.group) for seq in seqs for word in seq.query_words]
    return Drawing([[tokens], [Grid([row], [" "], title="query rows", width=width)]])


def block_table(
    batch: Batch,
    *,
    block_size: int,
    num_blocks: int | None = None,
    words: Words | None = None,
    names: str = ascii_lowercase,
) -> Drawing:
    """Draw the block table of a batch, and the pool with the tokens in it.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        num_blocks: blocks in the pool, `n`; as many as the table needs if None.
        words: the tokens of each sequence; numbers if None.
        names: a letter for each sequence, which selects its colour: "b" draws request b alone as it is among others.

    Raises:
        ValueError: if the table names a block that the pool does not have.
    """
    seqs = _host_sequences(batch, words, block_size, names)
    columns = max((len(seq.blocks) for seq in seqs), default=0)
    table = [
        [Cell("filled", str(block), seq.group) for block in seq.blocks]
        + [Cell("outlined")] * (columns - len(seq.blocks))
        for seq in seqs
    ]
    num_needed = max((block for seq in seqs for block in seq.blocks), default=-1) + 1
    if num_blocks is not None and num_blocks < num_needed:
        raise ValueError(f"num_blocks: expected at least {num_needed}, got {num_blocks}")
    pool = [[Cell("outlined")] * block_size for _ in range(num_needed if num_blocks is None else num_blocks)]
    for seq in seqs:
        for j, word in enumerate(seq.words):
            pool[seq.blocks[j // block_size]][j % block_size] = Cell("filled", word, seq.group)
    width = cell_width(word for seq in seqs for word in seq.words)
    table_grid = Grid(table, [seq.name for seq in seqs], title="block table")
    pool_grid = Grid(pool, [f"block {block}" for block in range(len(pool))], title="pool", width=width)
    return Drawing([[table_grid, pool_grid]])


def window(batch: Batch, window_size: tuple[int, int], *, block_size: int, words: Words | None = None) -> Drawing:
    """Draw a sliding window over each sequence, the blocks above its keys; those that are cut off are crossed out.

    Args:
        batch: the lengths and the block table.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit; a query sees no later keys.
        block_size: tokens in a block, `p`.
        words: the tokens of each sequence; numbers if None.
    """
    plan = sliding_window.plan(batch, window_size=window_size, block_size=block_size)
    assert plan.first_keys is not None
    num_trimmed = (plan.first_keys // block_size).tolist()  # blocks cut off in front
    rule = partial(masks.visible_keys, causal=True, window_size=window_size)
    seqs = _host_sequences(batch, words, block_size)
    panels = [
        _mask_grid(seq, rule, block_size=block_size, num_trimmed=number)
        for seq, number in zip(seqs, num_trimmed, strict=True)
    ]
    blocks = [span.cell for panel in panels for span in panel.spans]
    num_read = sum(cell.kind == "filled" for cell in blocks)
    unread = [cell.text for cell in blocks if cell.kind == "gone"]
    crossed_out = f"; crossed out: {', '.join(unread)}" if unread else ""
    return Drawing([panels], note=f"{num_read} of {len(blocks)} blocks are read{crossed_out}")


def virtual_batches(batch: Batch, chunk_size: int, *, block_size: int, words: Words | None = None) -> Drawing:
    """Draw local attention twice: the chunks of the sequences of a batch, and the virtual sequences made of them.

    Args:
        batch: the lengths and the block table.
        chunk_size: tokens in a chunk, a multiple of the block size.
        block_size: tokens in a block, `p`.
        words: the tokens of each sequence; numbers if None.
    """
    seqs = _host_sequences(batch, words, block_size)
    virtual = local.plan(batch, chunk_size=chunk_size, block_size=block_size).batch
    lens = iter(zip(virtual.query_lens.tolist(), virtual.seq_lens.tolist(), strict=True))
    below: list[Grid] = []
    for seq in seqs:
        end = seq.seq_len - seq.query_len
        while end < seq.seq_len:
            query_len, seq_len = next(lens)
            end += query_len
            name = f"virtual {len(below)} of {seq.name}"
            piece = seq.part(end - seq_len, end, query_len=query_len, name=name, block_size=block_size)
            below.append(_mask_grid(piece, masks.causal, block_size=block_size))
    rule = partial(masks.chunk, chunk_size=chunk_size)
    above = [_mask_grid(seq, rule, block_size=block_size, chunk_size=chunk_size) for seq in seqs]
    return Drawing([above, below], note=f"chunks of {chunk_size} above, the virtual sequences below")


def cascade(batch: Batch, *, block_size: int, words: Words | None = None) -> Drawing:
    """Draw every block of a batch once, under all query rows that see it: the shared ones stand out.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        words: the tokens of each sequence; numbers if None.
    """
    seqs = _host_sequences(batch, words, block_size)
    readers_of: dict[int, list[_HostSequence]] = {}
    for seq in seqs:
        for block in seq.blocks:
            readers_of.setdefault(block, []).append(seq)

    cells: list[list[Cell]] = [[] for seq in seqs for _ in range(seq.query_len)]
    columns: list[str] = []
    spans = []
    for block, readers in readers_of.items():
        group = readers[0].group if len(readers) == 1 else SHARED
        first_keys = [seq.blocks.index(block) * block_size for seq in readers]  # the position of its first key in each
        length = max(min(block_size, seq.seq_len - first) for seq, first in zip(readers, first_keys, strict=True))
        spans.append(Span(len(columns), len(columns) + length, Cell("filled", str(block), group)))
        columns += readers[0].words[first_keys[0] : first_keys[0] + length]
        row = 0
        for seq in seqs:
            for position in range(seq.seq_len - seq.query_len, seq.seq_len):
                if seq in readers:
                    first = first_keys[readers.index(seq)]
                    kinds = ["filled" if first + j <= position else "outlined" for j in range(length)]
                    cells[row] += [Cell(kind, group=group) for kind in kinds]
                else:
                    cells[row] += [Cell()] * length
                row += 1
    num_keys = sum(seq.seq_len for seq in seqs)
    shared = ", ".join(str(block) for block, readers in readers_of.items() if len(readers) > 1)
    note = (
        f"{len(columns)} keys are read instead of {num_keys}: blocks {shared} only once"
        if shared
        else "nothing is shared"
    )
    return Drawing([[Grid(cells, _query_labels(seqs), columns, spans)]], note=note)


def context_chunks(batch: Batch, *, block_size: int, workspace: int, words: Words | None = None) -> Drawing:
    """Draw the prefill of latent attention: a mask for each chunk of the contexts, and one for the new tokens.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        workspace: the most tokens of the contexts whose keys and values are made at a time.
        words: the tokens of each sequence; numbers if None.
    """
    seqs = _host_sequences(batch, words)
    plan = mla.plan_prefill(batch, block_size=block_size, workspace=workspace)
    panels: list[Grid] = []
    for chunk in plan.chunks:
        assert chunk.plan.first_keys is not None
        starts, counts = chunk.plan.first_keys.tolist(), chunk.plan.batch.seq_lens.tolist()
        read = [seq.words[start : start + count] for seq, start, count in zip(seqs, starts, counts, strict=True)]
        if any(read):
            panels.append(_diagonal_grid(seqs, read, masks.full, f"chunk {len(panels)}"))
    most = max((len(panel.columns) for panel in panels), default=0)
    own = _diagonal_grid(seqs, [seq.query_words for seq in seqs], masks.causal, "new tokens")
    return Drawing([[*panels, own]], note=f"at most {most} tokens of context at a time, in {len(panels)} chunks")


def ranks(batch: Batch, num_ranks: int, *, interleave: int = 1, words: Words | None = None) -> Drawing:
    """Draw who has which keys in context parallelism: those of a rank in its colour, its number above them.

    Args:
        batch: the lengths.
        num_ranks: ranks that share each context.
        interleave: neighbouring tokens on the same rank.
        words: the tokens of each sequence; numbers if None.
    """
    grids = []
    for seq in _host_sequences(batch, words):
        num_context = max(0, seq.seq_len - seq.query_len)
        shares = [
            context_parallel.own_positions(num_context, Shard(i, num_ranks, interleave)) for i in range(num_ranks)
        ]
        owner = {j: rank for rank, share in enumerate(shares) for j in share.tolist()}
        visible = masks.causal(seq.query_len, seq.seq_len).tolist()
        cells = [
            [Cell("filled" if seen else "outlined", group=owner.get(j, num_ranks)) for j, seen in enumerate(row)]
            for row in visible
        ]
        spans = [Span(j, j + 1, Cell("filled", str(rank), rank)) for j, rank in sorted(owner.items())]
        grids.append(Grid(cells, seq.query_words, seq.words, spans, title=seq.name))
    return Drawing([grids], note="above each key of a context: the rank that has it; every rank has the new tokens")


def schedule(
    steps: Sequence[Mapping[str, int]], *, budget: int, num_cached: Mapping[str, int] | None = None
) -> Drawing:
    """Draw what an engine computes in each step: the tokens of each request, in the order of the mapping.

    Args:
        steps: for each step, the number of new tokens of each request, by its name.
        budget: the largest number of tokens in a step.
        num_cached: the tokens of a request that were in the pool before the first step drawn; 0 if it is not named.
    """
    names = sorted({name for each in steps for name in each})
    num_computed = dict.fromkeys(names, 0) | dict(num_cached or {})
    cells = []
    for each in steps:
        row = []
        for name, num_new in each.items():
            row += [Cell("filled", f"{name}{num_computed[name] + i}", names.index(name)) for i in range(num_new)]
            num_computed[name] += num_new
        cells.append([*row, *[Cell("outlined")] * (budget - len(row))])
    return Drawing([[Grid(cells, [f"step {i}" for i in range(len(steps))], width=1.5)]])


# --- weights ---


def merge(
    parts: Sequence[Float[Tensor, "_"]], *, words: Words | None = None, names: Sequence[str] | None = None
) -> Drawing:
    """Draw how partial outputs of one query merge: the weights within each part, and the weights of the whole.

    Args:
        parts: the scores of the keys of each part.
        words: the keys of each part; numbers if None.
        names: of the parts; part 1, part 2 and so on if None.
    """
    lses = torch.stack([scores.logsumexp(0) for scores in parts])
    shares = (lses - lses.logsumexp(0)).exp().tolist()
    labels = [_numbers(len(scores)) for scores in parts] if words is None else words
    titles = [f"part {i + 1}" for i in range(len(parts))] if names is None else names
    alone = [
        Bars(
            labels[i],
            scores.softmax(0).tolist(),
            [FIRST_OF_PARTS + i] * len(scores),
            f"{titles[i]}, LSE {float(lses[i]):.2f}",
        )
        for i, scores in enumerate(parts)
    ]
    weights = [share * weight for share, bars in zip(shares, alone, strict=True) for weight in bars.values]
    groups = [group for bars in alone for group in bars.groups]
    title = "merged: " + " + ".join(f"{share:.2f} of {name}" for share, name in zip(shares, titles, strict=True))
    return Drawing([alone, [Bars([word for part in labels for word in part], weights, groups, title)]])


def difference(
    first: Float[Tensor, "s"], second: Float[Tensor, "s"], factor: float, *, words: Sequence[str] | None = None
) -> Drawing:
    """Draw the weights of two softmaxes, and of their difference: `first - factor * second`.

    Args:
        first: the scores of one query in the first softmax.
        second: its scores in the second.
        factor: the factor of the second softmax, lambda.
        words: the keys; numbers if None.
    """
    labels = _numbers(len(first)) if words is None else words
    one, two = first.softmax(0), second.softmax(0)
    weights_by_title = {"first": one, "second": two, f"first - {factor:g} second": one - factor * two}
    return Drawing(
        [
            [
                Bars(labels, weights.tolist(), [FIRST_OF_PARTS + i] * len(labels), title)
                for i, (title, weights) in enumerate(weights_by_title.items())
            ]
        ]
    )


def quantized_key(key: Float[Tensor, "d"], *, words: Sequence[str] | None = None) -> Drawing:
    """Draw a key, and what its 8-bit values stand for, in each format; a star: off by 4 % or more.

    Each format has the scale by which the largest number becomes its largest value, as after a calibration.

    Args:
        key: the numbers of a key, not all of them 0.
        words: labels of the channels; numbers if None.
    """
    rows = {"the key": key}
    for name, kind in (("fp8, e4m3", torch.float8_e4m3fn), ("fp8, e5m2", torch.float8_e5m2)):
        scale = float(key.abs().max()) / torch.finfo(kind).max
        rows[name] = _written(
            key, kv_cache.allocate(1, 1, 1, len(key), dtype=kind), Fp8Scales(scale, scale, format=kind)
        )
    key_cache, value_cache, scales = quantized.allocate_int8(1, 1, 1, len(key))
    rows["int8"] = _written(key, (key_cache, value_cache), Int8Scales(scales, torch.ones(1, len(key))))
    cells = [
        [
            Cell("filled", f"{x:.3g}*", FIRST_OF_PARTS)
            if abs(x - exact) >= 0.04 * abs(exact)
            else Cell("outlined", f"{x:.3g}", FIRST_OF_PARTS)
            for x, exact in zip(numbers.tolist(), key.tolist(), strict=True)
        ]
        for numbers in rows.values()
    ]
    labels = _numbers(len(key)) if words is None else words
    width = cell_width(cell.text for row in cells for cell in row)
    return Drawing([[Grid(cells, list(rows), labels, width=width)]], note="*: off by 4 % or more")


def _written(
    key: Float[Tensor, "d"], pools: tuple[Tensor, Tensor], scales: Fp8Scales | Int8Scales
) -> Float[Tensor, "d"]:
    """Write one key into a pool of one slot, and return its dequantized values."""
    quantized.write(key[None, None], key[None, None], *pools, torch.tensor([0]), scales=scales)
    return pools[0][0, 0, 0].float() * (scales.key if isinstance(scales, Fp8Scales) else scales.key[0, 0, 0])


# --- shared by the drawings ---


@dataclass(frozen=True, eq=False)
class _HostSequence:
    """One sequence of a batch, as Python numbers and words."""

    name: str
    group: int
    query_len: int
    seq_len: int
    words: Sequence[str]
    blocks: Sequence[int] = field(default_factory=list)

    @property
    def query_words(self) -> list[str]:
        num_missing = max(0, self.query_len - self.seq_len)  # queries before the first key
        return [*["-"] * num_missing, *self.words[max(0, self.seq_len - self.query_len) :]]

    def part(self, start: int, stop: int, *, query_len: int, name: str, block_size: int) -> "_HostSequence":
        """Return the keys from `start` to before `stop`, the last of which belong to queries."""
        blocks = self.blocks[start // block_size : -(-stop // block_size)] if stop > start else []
        return _HostSequence(name, self.group, query_len, stop - start, self.words[start:stop], blocks)


def _host_sequences(
    batch: Batch, words: Words | None, block_size: int | None = None, names: str = ascii_lowercase
) -> list[_HostSequence]:
    """Return the sequences of a batch; without their blocks if there is no block size."""
    tables: list[list[int]] = [[]] * batch.num_seqs
    if block_size is not None:
        tables = check_block_table(batch, block_size=block_size).tolist()
    return [
        _HostSequence(
            names[i % len(names)],
            ascii_lowercase.index(names[i % len(names)]),
            query_len,
            seq_len,
            _numbers(seq_len) if words is None else words[i],
            tables[i][: -(-seq_len // block_size)] if block_size is not None else [],
        )
        for i, (query_len, seq_len) in enumerate(zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True))
    ]


def _mask_grid(
    seq: _HostSequence,
    rule: Rule,
    *,
    block_size: int | None = None,
    num_trimmed: int = 0,
    chunk_size: int | None = None,
) -> Grid:
    """Draw the mask of a sequence, its blocks above it, the first `num_trimmed` of them crossed out."""
    spans = []
    if block_size is not None:
        for i, block in enumerate(seq.blocks):
            cell = Cell("gone" if i < num_trimmed else "filled", str(block), seq.group)
            spans.append(Span(i * block_size, min((i + 1) * block_size, seq.seq_len), cell))
    cuts = range(chunk_size, seq.seq_len, chunk_size) if chunk_size else ()
    cells = _mask_cells(rule(seq.query_len, seq.seq_len), seq.group)
    return Grid(cells, seq.query_words, seq.words, spans, cuts, seq.name)


def _diagonal_grid(seqs: Sequence[_HostSequence], keys: Words, rule: Rule, title: str = "") -> Grid:
    """Draw the masks of all sequences over some keys of each in one grid, blocks on its diagonal."""
    num_keys, before, cells = sum(map(len, keys)), 0, []
    for seq, own in zip(seqs, keys, strict=True):
        for row in _mask_cells(rule(seq.query_len, len(own)), seq.group):
            cells.append([*[Cell()] * before, *row, *[Cell()] * (num_keys - before - len(own))])
        before += len(own)
    return Grid(cells, _query_labels(seqs), [word for own in keys for word in own], title=title)


def _mask_cells(visible: Bool[Tensor, "t s"], group: int) -> list[list[Cell]]:
    return [[Cell("filled" if seen else "outlined", group=group) for seen in row] for row in visible.tolist()]


def _query_labels(seqs: Sequence[_HostSequence]) -> list[str]:
    return [f"{seq.name} {word}" for seq in seqs for word in seq.query_words]


def _numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]
