"""The files of both packages: which are twins, and which of these are paths."""

from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SHARED = {  # computes no attention: both twins import it; of `keys`, the fast twin takes the storages alone
    *("batch", "plan", "trees", "states", "ranks", "options", "keys", "scales", "packed_latents", "index_keys"),
    *("checks", "checks_of_calls", "checks_of_steps", "checks_of_writes", "overlap", "modes"),
}
REFERENCE_ONLY = {"attention", "masks", "rounding"} | SHARED
FAST_ONLY = {"kernels", "dispatch", "doctor"}
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


def shared_types() -> dict[str, type]:
    """Return the classes that both twins share, by name."""
    modules = [import_module(f"refattn.{name}") for name in sorted(SHARED)]
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }


TWINS = sorted(parts("refattn") - REFERENCE_ONLY)
PATHS = sorted(set(TWINS) - BESIDES - OVER_STATES)
