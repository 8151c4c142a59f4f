"""Make docs/proof/coverage.md: every feature of the backends that the project started from, and the tests that hold it.

The rows are in docs/proof/coverage.toml. Which tests prove a row is said where the tests are, by
`@pytest.mark.covers("A16")`.
"""

import ast
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "docs/proof/coverage.toml"
PAGE = ROOT / "docs/proof/coverage.md"
STATES = {
    "done": "computed, and proven by the tests named",
    "refused": "refused by name, with the reason",
    "open": "not there yet",
    "outside": "out of scope, with the reason",
}
HEAD = """\
# Coverage

> **The idea.** The project began with five attention backends of servers; what came later has a part of its own. Each
> feature that was found in them is a row here: done, with the tests that prove it; refused by name or out of scope,
> with the reason; or open. A test is named here if it fails once the feature is broken: `make mutants` breaks each on
> purpose, by the edits in [mutations.py](../../tests/tools/mutations.py), in the reference and in the twin. A test
> fails if a row loses its last test, or an edit no longer finds its line.

"""


class Row(NamedTuple):
    """One feature of a backend: in what state it is here, and why if it is not done."""

    id: str
    feature: str
    state: str
    reason: str


class Backend(NamedTuple):
    """A backend of a server, and its features."""

    name: str
    rows: list[Row]


def backends() -> list[Backend]:
    """Read the rows."""
    read = tomllib.loads(ROWS.read_text())
    return [
        Backend(
            backend["name"],
            [
                Row(row["id"], row["feature"], row.get("state", "done"), row.get("reason", ""))
                for row in backend["rows"]
            ],
        )
        for backend in read["backend"]
    ]


def covering_tests() -> dict[str, list[str]]:
    """Find the tests of each row, as `file::name`, by the marks in the code: nothing is imported."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
                    for row in decorator.args:
                        name = f"{file.relative_to(ROOT).as_posix()}::{node.name}"
                        found.setdefault(ast.literal_eval(row), []).append(name)
    return found


def page() -> str:
    """Write the page."""
    tests, parts = covering_tests(), [HEAD]
    counts = {state: sum(row.state == state for one in backends() for row in one.rows) for state in STATES}
    parts.append("| | rows | |\n|---|--:|---|\n")
    parts += [f"| {state} | {count} | {STATES[state]} |\n" for state, count in counts.items() if count]
    for backend in backends():
        parts.append(f"\n## {backend.name}\n\n| row | feature | state | tests |\n|---|---|---|---|\n")
        for row in backend.rows:
            state = f"{row.state}: {row.reason}" if row.reason else row.state
            links = ", ".join(_link(test) for test in tests.get(row.id, []))
            parts.append(f"| {row.id} | {row.feature} | {state} | {links} |\n")
    return "".join(parts)


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[`{name}`](../../{file})"


def main() -> None:
    """Write the page to its file."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
