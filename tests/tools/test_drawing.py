"""Drawings say what the paths compute, as text and as pictures that can be read."""

import subprocess
import sys
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn import masks
from refattn.metadata import make_batch
from tests.helpers.batches import ragged_cases
from twinattn.course import drawing
from twinattn.course.drawing.__main__ import main
from twinattn.course.drawing.figure import COLOURS, INK, LINE_WIDTH, SHARED_COLOUR, UNIT, text_colour
from twinattn.kit import build

each_example = pytest.mark.parametrize("name", drawing.EXAMPLES)


def filled(drawn: drawing.Drawing) -> int:
    """Count the cells that are filled, in all panels."""
    grids = [panel for line in drawn.lines for panel in line if isinstance(panel, drawing.Grid)]
    return sum(cell.kind == "filled" for grid in grids for row in grid.cells for cell in row)


# --- as text ---


def test_a_mask_as_text():
    drawn = drawing.mask(masks.causal(2, 5), rows=["sky", "blue"], title="a")
    assert drawn.text() == "a\nsky    1 1 1 1 .\nblue   1 1 1 1 1"


def test_the_example_of_the_module_is_true():
    example = drawing.__doc__.split(".text())\n")[1].splitlines()[:2]
    assert drawing.mask(masks.causal(2, 5)).text().splitlines() == [line.strip() for line in example]


@each_example
def test_every_example_as_text(name):
    text = drawing.example(name).text()
    assert max(map(len, text.splitlines())) <= 80
    assert TEXTS.get(name, text) == text


TEXTS = {
    "window": """\
a
       [  9  ] 2
sky    . 1 1 1 .
blue   . . 1 1 1

b
       [--4--] [ 7 ]
like   . . . . 1 1 1

c
          [ 1 ]
Name      1 . .
three     1 1 .
colours   1 1 1

4 of 5 blocks are read; crossed out: 4""",
    "cascade": """\
            [  5  ] [  0  ] [  9  ] 2 [  4  ] [ 7 ] [ 1 ]
a sky       # # # # # # # # 1 1 1 1 .
a blue      # # # # # # # # 1 1 1 1 1
b like      # # # # # # # #           1 1 1 1 1 1 1
c Name      # # # # # # # #                         1 . .
c three     # # # # # # # #                         1 1 .
c colours   # # # # # # # #                         1 1 1

23 keys are read instead of 39: blocks 5, 0 only once""",
    "table": """\
block table
a   9 2
b   4 7
c   1 .

pool
block 0   .       .       .       .
block 1   Name    three   colours .
block 2   blue    .       .       .
block 3   .       .       .       .
block 4   Why     do      cats    purr
block 5   .       .       .       .
block 6   .       .       .       .
block 7   ?       They    like    .
block 8   .       .       .       .
block 9   Why     is      the     sky""",
    "merge": """\
block 4, LSE 2.55
Why    0.10 ####
do     0.08 ###
cats   0.70 ############################
purr   0.12 #####

block 7, LSE 2.06
?      0.63 #########################
They   0.21 ########
like   0.16 ######

merged: 0.62 of block 4 + 0.38 of block 7
Why    0.07 ###
do     0.05 ##
cats   0.44 #################
purr   0.07 ###
?      0.24 ##########
They   0.08 ###
like   0.06 ##""",
}


def test_the_worked_example_of_local_attention():
    """Query lengths 4, 10, 5 and sequence lengths 6, 17, 9 in chunks of 4."""
    drawn = drawing.example("local", drawing.Settings(chunk=4, block_size=2, lens=[(4, 6), (10, 17), (5, 9)]))
    above, below = drawn.lines
    assert [len(panel.cells) for panel in below] == [2, 2, 1, 4, 4, 1, 4, 1]
    assert [len(panel.columns) for panel in below] == [4, 2, 4, 4, 4, 1, 4, 1]
    assert [span.cell.text for panel in below for span in panel.spans] == [
        str(block) for block in (0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 14, 15, 16)
    ]
    assert "    [0] [1] | [2]\n2   1 1 1 . | . .\n3   1 1 1 1 | . .\n4   . . . . | 1 ." in drawn.text()
    assert filled(drawing.Drawing([above])) == filled(drawing.Drawing([below])), "chunks and virtual sequences differ"


def test_a_cascade_shows_every_level():
    """Blocks 7 and 3 are shared by three sequences, block 5 by two of them."""
    tables = [[7, 3, 5, 9], [7, 3, 5, 2, 8], [7, 3, 4], [6, 1]]
    drawn = drawing.cascade(make_batch([1, 1, 1, 1], [14, 17, 10, 6], tables), block_size=4)
    lines = drawn.text().splitlines()
    assert lines[1].startswith("a 13   # # # # # # # # # # # # 1 1")
    assert lines[3].startswith("c 9    # # # # # # # #         ")
    assert drawn.note == "27 keys are read instead of 47: blocks 7, 3, 5 only once"


def test_a_batch_that_shares_nothing_says_so():
    batch = make_batch([1, 1], [4, 4], [[0], [1]])
    assert drawing.cascade(batch, block_size=4).note == "nothing is shared"


def test_every_example_in_blocks_of_one_token():
    """The three requests then need more blocks than the pool of ten has."""
    settings = drawing.Settings(block_size=1)
    assert all(drawing.example(name, settings).text() for name in drawing.EXAMPLES)
    assert "block 14   colours\n" in drawing.example("table", settings).text() + "\n"


def test_a_pool_that_lacks_blocks_of_the_table_is_refused():
    with pytest.raises(ValueError, match="num_blocks: expected at least 10, got 9"):
        drawing.block_table(make_batch([1], [5], [[9, 2]]), block_size=4, num_blocks=9)


def test_chunks_of_a_context_take_the_same_number_of_tokens_of_every_sequence():
    drawn = drawing.context_chunks(make_batch([2, 1], [6, 2], [[3, 1], [0]]), block_size=4, workspace=5)
    assert [(panel.title, list(panel.columns)) for panel in drawn.lines[0]] == [
        ("chunk 0", ["0", "1", "0"]),
        ("chunk 1", ["2", "3"]),
        ("new tokens", ["4", "5", "1"]),
    ]
    assert drawn.text().splitlines()[:4] == ["chunk 0", "a 4   1 1", "a 5   1 1", "b 1       1"]
    assert drawn.note == "at most 3 tokens of context at a time, in 2 chunks"


def test_the_shares_of_a_merge_are_those_of_one_softmax():
    scores = torch.randn(9, generator=torch.Generator().manual_seed(0))
    drawn = drawing.merge(scores.split([4, 2, 3]))
    assert drawn.lines[1][0].values == pytest.approx(scores.softmax(0).tolist(), rel=1e-5)
    assert [bars.title.split(",")[0] for bars in drawn.lines[0]] == ["part 1", "part 2", "part 3"]
    assert [bars.groups[0] for bars in drawn.lines[0]] == [3, 4, 5], "parts of one request, in the colours of others"


def test_a_request_alone_has_the_name_and_the_colour_that_it_has_among_others():
    alone = drawing.block_table(make_batch([1], [7], [[4, 7]]), block_size=4, names="b")
    among = drawing.block_table(make_batch([1, 1], [1, 7], [[0], [4, 7]]), block_size=4)
    assert alone.lines[0][0].rows == ["b"]
    assert alone.lines[0][0].cells[0] == among.lines[0][0].cells[1]
    assert alone.lines[0][1].cells[4] == among.lines[0][1].cells[4]


def test_a_block_that_is_cut_off_is_crossed_out_and_named():
    drawn = drawing.window(make_batch([1], [3], [[5, 6, 7]]), (0, 0), block_size=1)
    assert drawn.text().splitlines()[1:3] == ["    × × 7", "2   . . 1"]
    assert drawn.note == "1 of 3 blocks are read; crossed out: 5, 6"
    assert drawing.window(make_batch([1], [3], [[5]]), (0, 0), block_size=4).note == "1 of 1 blocks are read"


def test_a_memory_hierarchy_names_its_levels_and_what_they_hold():
    drawn = drawing.memory({"registers": ["scores"], "HBM": ["query", "key"]})
    lines = drawn.text().splitlines()
    assert lines[:2] == ["registers   scores", "HBM         query  key"]
    assert drawn.note == "every level is larger than the one above it, and slower"


def test_a_difference_may_go_below_zero():
    bars = drawing.difference(torch.zeros(2), torch.tensor([0.0, 5.0]), 0.6).lines[0][2]
    assert bars.values == pytest.approx([0.5 - 0.6 / (1 + torch.e**5), 0.5 - 0.6 / (1 + torch.e**-5)], rel=1e-4)
    assert "-0.10 \n" in drawing.Drawing([[bars]]).text() + "\n"


def test_quantized_values_keep_shares_or_even_steps():
    """By hand: the steps of int8 are 127ths of the largest number, those of e4m3 eighths of a power of two."""
    key, fp8_values, _, int8_values = drawing.quantized_key(torch.tensor([127.0, 0.4, 17.0])).lines[0][0].cells
    assert [cell.text for cell in key] == ["127", "0.4", "17"]
    assert [cell.text for cell in int8_values] == ["127", "0*", "17"]
    assert [cell.kind for cell in int8_values] == ["outlined", "filled", "outlined"]
    assert fp8_values[2].text == f"{60 * 127 / 448:.3g}"  # 17 * 448 / 127 = 59.97, and 8-bit values there are 4 apart
    assert {cell.kind for cell in key} == {"outlined"}


@settings(max_examples=15)  # each of them is a picture
@given(case=ragged_cases(), left=st.integers(0, 50))
def test_any_batch_can_be_drawn(case, left):
    """Also sequences without queries or keys, with more queries than keys, and garbage in the table."""
    batch, p = build(case).batch, case.block_size
    seen = {
        "causal": sum(int(masks.causal(q, s).sum()) for q, s in case.lens),
        "window": sum(int(masks.visible_keys(q, s, causal=True, window_size=(left, 0)).sum()) for q, s in case.lens),
        "chunk": sum(int(masks.chunk(q, s, 2 * p).sum()) for q, s in case.lens),
    }
    assert filled(drawing.sequences(batch)) == filled(drawing.ragged(batch)) == seen["causal"]
    assert filled(drawing.cascade(batch, block_size=p)) == seen["causal"]
    assert filled(drawing.window(batch, (left, 0), block_size=p)) == seen["window"]
    assert filled(drawing.virtual_batches(batch, 2 * p, block_size=p)) == 2 * seen["chunk"]
    if all(q <= s for q, s in case.lens):  # a prefill over latents has every new token among the keys
        assert filled(drawing.context_chunks(batch, block_size=p, workspace=3 * len(case.lens))) == seen["causal"]
    drawings = [
        drawing.step(batch),
        drawing.block_table(batch, block_size=p),
        drawing.window(batch, (3, 0), block_size=p),
    ]
    assert all(drawn.text() for drawn in drawings)


# --- as a picture ---


@each_example
def test_every_letter_of_a_picture_is_inside_it(name):
    figure = drawing.example(name).figure()
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    for text in figure.axes[0].texts:
        box = text.get_window_extent()
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, f"{text.get_text()!r} is cut off at {box}"


@each_example
def test_no_upright_letters_of_a_picture_overlap(name):
    figure = drawing.example(name).figure()
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts if not text.get_rotation()]
    for (one, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), f"{one!r} and {other!r} overlap"


@pytest.mark.parametrize(
    "lens", [[(1, 200)], [(300, 1)], [(0, 0)], [(2, 3)] * 40], ids=["wide", "tall", "empty", "many"]
)
def test_odd_batches_make_pictures(lens, tmp_path):
    drawn = drawing.example("causal", drawing.Settings(lens=lens))
    drawn.save(tmp_path / "odd.svg")
    assert (tmp_path / "odd.svg").read_text().startswith("<?xml")


def test_many_panels_go_on_in_the_next_line():
    figure = drawing.example("local", drawing.Settings(lens=[(30, 60)] * 3)).figure()
    assert figure.get_size_inches()[0] <= (LINE_WIDTH + 25) * UNIT


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_the_same_file_every_time(kind, tmp_path):
    for name in ("one", "two"):
        drawing.example("local").save(tmp_path / f"{name}.{kind}")
    one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert one.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_notebook_shows_a_drawing_as_a_picture():
    assert "<svg" in drawing.mask(masks.causal(3, 3))._repr_svg_()


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2: 1 to 21, and 4.5 for small letters."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_ink_can_be_read_on_light_and_dark_pages():
    assert contrast(INK, "#ffffff") > 4
    assert contrast(INK, "#0d1117") > 4


@pytest.mark.parametrize("colour", [*COLOURS, SHARED_COLOUR])
def test_letters_on_colours_can_be_read(colour):
    ink = {"white": "#ffffff", "black": "#000000"}[text_colour(colour)]
    assert contrast(ink, colour) > 4.5


# --- the command ---


@each_example
def test_the_command_prints_and_writes(name, tmp_path, capsys):
    output = tmp_path / f"{name}.svg"
    main([name, "--output", str(output)])
    assert drawing.example(name).text() in capsys.readouterr().out
    assert output.read_text() == drawing.example(name)._repr_svg_()


def test_the_command_writes_nothing_that_was_not_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["window", "--window", "2"])
    assert not list(tmp_path.iterdir())
    assert "like   . . . . . 1 1" in capsys.readouterr().out


OTHER_SETTINGS = {"window": 2, "chunk": 2, "block_size": 2, "lens": [(4, 6), (10, 17)]}
OTHER_ARGUMENTS = {
    "window": ["--window", "2"],
    "chunk": ["--chunk", "2"],
    "block_size": ["--block-size", "2"],
    "lens": ["--lens", "4,6", "10,17"],
}


@each_example
@pytest.mark.parametrize("option", OTHER_SETTINGS)
def test_an_option_changes_the_drawing_or_is_refused(name, option, capsys):
    changes = {option: OTHER_SETTINGS[option]} | ({"block_size": 2} if option == "chunk" else {})
    same = drawing.example(name, drawing.Settings(**changes | {option: getattr(drawing.Settings, option)}))
    changed = drawing.example(name, drawing.Settings(**changes))
    assert (changed.text() != same.text()) == (option in drawing.USES[name])
    arguments = [
        name,
        *OTHER_ARGUMENTS[option],
        *(["--block-size", "2"] if (name, option) == ("local", "chunk") else []),
    ]
    if option in drawing.USES[name]:
        main(arguments)
        assert changed.text() in capsys.readouterr().out
        return
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert f"{OTHER_ARGUMENTS[option][0]} is no option of {name}: expected one of" in error
    assert all(f"--{each.replace('_', '-')}" in error.split("expected")[1] for each in drawing.USES[name])


BAD_COMMANDS = {
    "no-such-drawing": (["circle"], "invalid choice: 'circle'"),
    "a-chunk-of-broken-blocks": (["local", "--chunk", "6"], "chunk_size: expected a multiple of block_size=4, got 6"),
    "no-such-option": (
        ["window", "--mask", "slding"],
        "--mask is no option of window: expected one of --window, --block",
    ),
    "half-an-option": (
        ["window", "--win", "3"],
        "--win is no option of window: expected one of --window, --block-size",
    ),
    "lens-without-a-comma": (["causal", "--lens", "4"], "expected two numbers, as in 4,6, got '4'"),
    "a-window-of-no-tokens": (["window", "--window", "0"], "window: expected at least 1, got 0"),
    "a-chunk-of-no-tokens": (["pictures", "--chunk", "0"], "chunk: expected at least 1, got 0"),
    "a-block-of-no-tokens": (["table", "--block-size", "0"], "block_size: expected at least 1, got 0"),
    "a-negative-length": (["causal", "--lens", "1,-4"], "seq_lens: expected lengths of at least 0"),
    "a-kind-of-file-that-is-none": (
        ["causal", "--output", "causal.txt"],
        "path: expected a .png or an .svg, got causal.txt",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_a_bad_command_is_explained(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_example_is_named():
    with pytest.raises(ValueError, match="name: expected one of pictures, causal, .*, got 'circle'"):
        drawing.example("circle")


def test_text_needs_no_matplotlib():
    """Refattn runs with torch, einops and jaxtyping alone."""
    hide = "import sys; sys.modules['matplotlib'] = None"
    program = f"{hide}; from twinattn.course.drawing.__main__ import main; main(['local'])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "virtual 3 of c" in run.stdout
