"""One step of a server as a moving picture: requests, their row of queries, their pages, the mask, and a merge.

    python -m twinattn.course.drawing.animation docs/assets/step.svg

writes an SVG animated by CSS, so that it plays wherever images are shown, without a script. All positions are computed
by the library itself: rows from the batch, pages from the slots, cells from the mask, bars from the merge.
"""

import sys
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from string import ascii_lowercase

import torch

from refattn import masks
from refattn.merge import merge
from refattn.metadata import make_batch, slot_mapping
from twinattn.course.drawing.examples import LENS, NUM_BLOCKS, SCORES, TABLES, WORDS
from twinattn.course.drawing.figure import COLOURS, INK, text_colour

BLOCK_SIZE = 4
SECONDS = 3.5  # seconds per scene
TURN = 0.2  # the share of a scene in which its parts move
WIDTH, HEIGHT = 680, 250
TOKEN = 40  # width of a token, in pixels
LEFT, TOP, ROW = 56, 64, 30  # where the first token stands, and the height of a row
CAPTIONS = (
    "Three requests in one step: outlined tokens are cached, filled ones are new.",
    "The new tokens form one row of queries: cu_seqlens_q = {starts}.",
    "Where are the keys? In pages of a pool, wherever there was room. Slots written: {slots}.",
    "Who may see whom? Each row is a new token and sees the filled keys of its own request.",
    "How do partial outputs combine? One softmax over each block of b, for “like” ...",
    "... merged by their log-sum-exp: {shares}. Equal to one softmax over all.",
)

State = tuple[float, float, float, float]  # where a part of the picture is in a scene: x, y, its height, its opacity


def animation() -> str:
    """Return the SVG."""
    batch = make_batch([query_len for query_len, _ in LENS], [seq_len for _, seq_len in LENS], TABLES)
    slots = slot_mapping(batch, sum(q for q, _ in LENS), block_size=BLOCK_SIZE).tolist()
    starts = batch.cu_seqlens_q.tolist()
    scores = torch.tensor(SCORES).split(BLOCK_SIZE)  # the scores of b's newest query, block by block
    alone = [part.softmax(0) for part in scores]
    ones = [torch.ones(1, 1, 1) for _ in scores]
    lses = [part.logsumexp(0).reshape(1, 1) for part in scores]
    _, lse = merge(ones, lses)
    shares = [float((part - lse).exp()) for part in lses]
    said = dict(
        starts=starts,
        slots=" | ".join(" ".join(map(str, slots[a:b])) for a, b in zip(starts, starts[1:], strict=False)),
        shares=" + ".join(f"{share:.2f} of block {block}" for share, block in zip(shares, TABLES[1], strict=True)),
    )
    parts = [_caption(scene, text.format(**said)) for scene, text in enumerate(CAPTIONS)]
    parts += [_pool(), *_mask_cells(), *_names()]
    parts += _bars([weight for part in alone for weight in part.tolist()], shares)
    parts += _tokens(starts)
    style = f"text{{font:12px system-ui,sans-serif;fill:{INK}}}.m{{text-anchor:middle}}.e{{text-anchor:end}}"
    still = "@media (prefers-reduced-motion:reduce){g{animation-play-state:paused!important}}"
    moves = "".join(rule for rule, _ in parts)
    shapes = "".join(shape for _, shape in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f"<title>One step of a server, in six scenes</title><style>{style}{moves}{still}</style>{shapes}</svg>\n"
    )


# --- parts of the picture, each with its states in the scenes ---


def _tokens(starts: Sequence[int]) -> list[tuple[str, str]]:
    """Move every token: from its request to the row of queries, to its slot, to its column, below its bar."""
    first_columns = [0, *accumulate(seq_len for _, seq_len in LENS)]
    parts = []
    for request, ((query_len, seq_len), blocks) in enumerate(zip(LENS, TABLES, strict=True)):
        for position, word in enumerate(WORDS[request]):
            is_new = position >= seq_len - query_len
            at_home = (LEFT + TOKEN * position, TOP + ROW * request, 1.0, 1.0)
            row = starts[request] + position - (seq_len - query_len)
            in_row = (LEFT + TOKEN * row, TOP + 4.2 * ROW, 1.0, 1.0) if is_new else (*at_home[:3], 0.35)
            in_pool = (*_place(blocks[position // BLOCK_SIZE], position % BLOCK_SIZE), 1.0, 1.0)
            column = (LEFT + TOKEN * (first_columns[request] + position) * 0.99, TOP - 24, 1.0, 1.0)
            below = (*_below_bar(position), 1.0, 1.0) if request == 1 else (*column[:3], 0.0)
            fill = COLOURS[request]
            style = f'fill="{fill}"' if is_new else f'fill="none" stroke="{fill}" stroke-width="1.5"'
            ink = text_colour(fill) if is_new else INK
            text = f"fill:{ink};font-size:{9 if len(word) > 6 else 10}px"
            shape = (
                f'<rect x="1" y="1" width="{TOKEN - 3}" height="22" rx="2" {style}/>'
                f'<text class="m" x="{TOKEN / 2 - 0.5}" y="16" style="{text}">{escape(word)}</text>'
            )
            name = f"t{request}_{position}"
            parts.append(_moving(name, [at_home, in_row, in_pool, column, below, below], shape))
    return parts


def _names() -> list[tuple[str, str]]:
    """Name the requests beside their tokens."""
    return [
        _moving(
            f"n{i}",
            _only(0, 1, state=(LEFT - 12, TOP + ROW * i + 16, 1.0, 1.0)),
            f'<text class="e" style="font-weight:bold">{ascii_lowercase[i]}</text>',
        )
        for i in range(len(LENS))
    ]


def _pool() -> tuple[str, str]:
    """Draw the slots of the pool, with the numbers of their blocks."""
    shapes = []
    for block in range(NUM_BLOCKS):
        x, y = _place(block, 0)
        shapes.append(f'<text class="e" x="{x - 3}" y="{y + 16}" style="font-size:10px">{block}</text>')
        shapes += [
            f'<rect x="{x + 38 * row + 1}" y="{y + 1}" width="{TOKEN - 3}" height="22" rx="2" fill="none" '
            f'stroke="{INK}" stroke-opacity=".4"/>'
            for row in range(BLOCK_SIZE)
        ]
    return _moving("pool", _only(2), "".join(shapes))


def _mask_cells() -> list[tuple[str, str]]:
    """Draw the mask of each request on the diagonal of all queries and keys."""
    shapes = []
    row = column = 0
    for request, (query_len, seq_len) in enumerate(LENS):
        words = WORDS[request][seq_len - query_len :]
        for word, visible in zip(words, masks.causal(query_len, seq_len).tolist(), strict=True):
            y = TOP + 8 + 26 * row
            shapes.append(f'<text class="e" x="{LEFT - 5}" y="{y + 15}" style="font-size:10px">{escape(word)}</text>')
            for j, seen in enumerate(visible):
                style = f'fill="{COLOURS[request]}"' if seen else f'fill="none" stroke="{INK}" stroke-opacity=".5"'
                x = LEFT + TOKEN * (column + j) * 0.99
                shapes.append(f'<rect x="{x + 1:g}" y="{y}" width="{TOKEN - 3}" height="22" rx="2" {style}/>')
            row += 1
        column += seq_len
    return [_moving("mask", _only(3), "".join(shapes))]


def _bars(weights: Sequence[float], shares: Sequence[float]) -> list[tuple[str, str]]:
    """Draw the weights of the keys of b, within their blocks, and then in the whole."""
    parts = []
    for position, weight in enumerate(weights):
        x, y = _below_bar(position)
        whole = weight * shares[position // BLOCK_SIZE]
        away = (x, y, 0.001, 0.0)
        states = [away] * 4 + [(x, y, 110 * weight, 1.0), (x, y, 110 * whole, 1.0)]
        bar = f'<rect x="6" y="-1" width="{TOKEN - 13}" height="1" fill="{COLOURS[1]}"/>'
        parts.append(_moving(f"b{position}", states, bar))
        for scene, value in ((4, weight), (5, whole)):
            above = (x + TOKEN / 2, y - 110 * value - 5, 1.0, 1.0)
            number = f'<text class="m" style="font-size:10px">{value:.2f}</text>'
            parts.append(_moving(f"w{position}_{scene}", _only(scene, state=above), number))
    return parts


def _caption(scene: int, text: str) -> tuple[str, str]:
    """Show what is said in a scene; the captions change at once, for two at a time cannot be read."""
    shape = f'<text style="font-size:13px">{escape(text)}</text>'
    rule, shape = _moving(f"c{scene}", _only(scene, state=(8, 18, 1.0, 1.0)), shape)
    return f"{rule}#c{scene}{{animation-timing-function:step-end}}", shape


# --- places and movements ---


def _place(block: int, row: int) -> tuple[float, float]:
    """Return where a slot of the pool is drawn: four blocks in a line."""
    return 16 + (block % 4) * 170 + 38 * row, TOP + 8 + 44 * (block // 4)


def _below_bar(position: int) -> tuple[float, float]:
    """Return where a token of b stands below its bar, its blocks apart."""
    return LEFT + 90 + TOKEN * position + 40 * (position // BLOCK_SIZE), TOP + 138


def _only(*scenes: int, state: State = (0.0, 0.0, 1.0, 1.0)) -> list[State]:
    """Return the states of a part that is seen in some scenes only."""
    return [state if scene in scenes else (*state[:3], 0.0) for scene in range(len(CAPTIONS))]


def _moving(name: str, states: Sequence[State], shape: str) -> tuple[str, str]:
    """Return the rule by which a part moves from scene to scene, and the part."""

    def css(state: State) -> str:
        x, y, height, opacity = state
        size = "" if height == 1.0 else f" scale(1,{height:.4g})"
        return f"{{transform:translate({x:.5g}px,{y:.5g}px){size};opacity:{opacity:g}}}"

    count = len(states)
    frames = f"0%{css(states[-1])}" + "".join(
        f"{100 * (scene + TURN) / count:.4g}%,{100 * (scene + 1) / count:.4g}%{css(state)}"
        for scene, state in enumerate(states)
    )
    begins = -SECONDS * TURN  # where the first scene stands still
    rule = f"@keyframes {name}{{{frames}}}#{name}{{animation:{name} {SECONDS * count:g}s {begins:g}s infinite}}"
    return f"{rule}#{name}{css(states[0])}", f'<g id="{name}">{shape}</g>'


def main() -> None:
    """Write the file that the command line names."""
    Path(sys.argv[1]).write_text(animation())


if __name__ == "__main__":
    main()
