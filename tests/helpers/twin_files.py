"""The files of both packages: which are twins, and which of these are paths."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REFERENCE_ONLY = {"attention", "keys", "masks", "interface"}
FAST_ONLY = {"kernels", "doctor"}
BESIDES = {"kv_cache", "merge", "metadata", "state_cache"}  # twins that are no paths, but go with them
OVER_STATES = {"recurrent"}  # paths without keys to attend to: they have no blocks, and no softmax to return the sum of


def parts(package: str) -> set[str]:
    """List the files and the folders of a package."""
    inside = (ROOT / package).iterdir()
    return {
        path.stem
        for path in inside
        if (path.suffix == ".py" and path.stem != "__init__") or (path.is_dir() and any(path.glob("*.py")))
    }


TWINS = sorted(parts("refattn") - REFERENCE_ONLY)
PATHS = sorted(set(TWINS) - BESIDES - OVER_STATES)
