"""The command: `python -m refattn.drawing NAME` prints a drawing as text and writes it as an image."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refattn.drawing.examples import EXAMPLES, Settings, example


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a drawing, and write it as an image.

    Args:
        arguments: of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog="python -m refattn.drawing", description="Draw what a path computes.")
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("--window", type=int, default=Settings.window, help="tokens in a sliding window")
    parser.add_argument("--chunk", type=int, default=Settings.chunk, help="tokens in a chunk of local attention")
    parser.add_argument("--block-size", type=int, default=Settings.block_size, help="tokens in a block")
    parser.add_argument(
        "--lens", type=_pair, nargs="+", metavar="Q,S", help="new tokens and all tokens of each sequence"
    )
    parser.add_argument("--output", type=Path, help="a PNG or an SVG; NAME.png by default, - for none")
    options = parser.parse_args(arguments)
    output = options.output or Path(f"{options.name}.png")
    try:
        drawing = example(options.name, Settings(options.window, options.chunk, options.block_size, options.lens))
        if str(output) != "-":
            drawing.save(output)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(drawing.text() + "\n")


def _pair(text: str) -> tuple[int, int]:
    query_len, seq_len = map(int, text.split(","))
    return query_len, seq_len


if __name__ == "__main__":
    main()
