"""The names of servers that docs/reference/servers.md has in its tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/reference/servers.md"
GONE = re.compile(r"\((?:V0|until removed)[^)]*\)|`[^`]*` \(V0\)")


def names_of(page: str, server: str) -> set[str]:
    """Return the words in code of the columns of a server, without those that the page calls gone."""
    names: set[str] = set()
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = [line.strip("|").split(" | ") for line in table.splitlines()]
        columns = [i for i, title in enumerate(head) if title.strip().startswith(f"{server}")]
        if "`" in table and head[0].strip() == "here":
            cells = [GONE.sub("", row[i]) for i in columns for row in [head, *rows]]
            names |= {word for cell in cells for code in re.findall(r"`([^`]*)`", cell) for word in words_of(code)}
    return names


def words_of(code: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w+", code)
