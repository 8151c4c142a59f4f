"""Put a page of wrong addresses at the root of gh-pages, beside the versions that mike keeps there.

Pages shows the 404.html at the root alone, whatever is asked; those of the versions are never seen. `make docs-version`
runs this after mike, which makes the rest of the root: the redirection of index.html, .nojekyll and versions.json.

    python docs/pages_root.py --push stable      links lead to that version, or alias, if the address names none
"""

import argparse
import contextlib
import json
from urllib.parse import urlsplit

import address
from finding import at_root
from mike import git_utils

BRANCH = "gh-pages"


def main() -> None:
    """Commit the page, if it is another than the one there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shown", help="a version, or an alias")
    parser.add_argument("--push", action="store_true", help="push the branch")
    parser.add_argument("--remote", default="origin")
    asked = parser.parse_args()
    versions = json.loads(git_utils.read_file(BRANCH, "versions.json"))
    names = [name for version in versions for name in (version["version"], *version["aliases"])]
    page = git_utils.read_file(BRANCH, f"{asked.shown}/404.html").decode()
    root = urlsplit(address.site(address.repository())).path
    content = at_root(page, names, asked.shown, root)
    said = "The page of wrong addresses leads to the versions"
    with contextlib.suppress(git_utils.GitEmptyCommit), git_utils.Commit(BRANCH, said) as commit:
        commit.add_file(git_utils.FileInfo("404.html", content))
    if asked.push:
        git_utils.push_branch(asked.remote, BRANCH)


if __name__ == "__main__":
    main()
