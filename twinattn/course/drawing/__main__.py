"""The command: `twinattn draw NAME` prints a drawing as text, and writes it as an image where asked to."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refattn.checks import check_file
from twinattn.course.drawing.examples import EXAMPLES, USES, Settings, example

HELP = {
    "window": "tokens in a sliding window",
    "chunk": "tokens in a chunk of local attention",
    "block_size": "tokens in a block",
    "lens": "new tokens and all tokens of each sequence",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a drawing, and write it as an image if there is an `--output`.

    Args:
        arguments: of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog="twinattn draw", description="Draw what a path computes.", allow_abbrev=False)
    parser.add_argument(
        "name", nargs="?", choices=EXAMPLES, metavar="NAME", help=f"of a drawing: {', '.join(EXAMPLES)}"
    )
    for name, explanation in HELP.items():
        of = ", ".join(example for example, names in USES.items() if name in names)
        kind = dict(type=_lens, nargs="+", metavar="Q,S") if name == "lens" else dict(type=int)
        parser.add_argument(_option(name), default=argparse.SUPPRESS, help=f"{explanation}; of {of}", **kind)
    parser.add_argument("--output", type=Path, help="a PNG or SVG file to write, too")
    options, unknown = parser.parse_known_args(arguments)
    if options.name is None:
        parser.error(f"expected a NAME: {', '.join(EXAMPLES)}")
    chosen = {name: value for name, value in vars(options).items() if name in HELP}
    unused = [*unknown, *(_option(name) for name in chosen if name not in USES[options.name])]
    if unused:
        choices = ", ".join([*map(_option, USES[options.name]), "--output"])
        parser.error(f"{unused[0]} is no option of {options.name}: expected one of {choices}")
    try:
        check_file("output", options.output)
        drawing = example(options.name, Settings(**chosen))
        if options.output:
            drawing.save(options.output)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    sys.stdout.write(drawing.text() + "\n")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _lens(text: str) -> tuple[int, int]:
    try:
        query_len, seq_len = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected two numbers, as in 4,6, got {text!r}") from error
    return query_len, seq_len


if __name__ == "__main__":
    main()
