"""What the package says of itself on an index and no static table can: its links, and the README without relative ones.

Hatchling runs it when a wheel or an sdist is built, and when the package is installed from a checkout.
"""

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackageMetadata(MetadataHookInterface):
    """Fills in `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both in the `project` table."""
        root = Path(self.root)
        sys.path.insert(0, str(root / "docs"))
        try:
            import address
        finally:
            sys.path.pop(0)
        here = address.repository(root)
        text = (root / "README.md").read_text(encoding="utf-8")
        shown = address.without_relative_links(text, here, address.ref_of(metadata["version"]))
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
        metadata["urls"] = address.urls(here)
