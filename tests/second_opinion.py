"""Run a sample of mutmut's mutants of the reference, and the tests of each file: a second opinion on our own list.

tests/tools/mutations.py is a list of mutations written by hand. A general tool, mutmut, changes each constant,
operator and argument of a file. Of those, a sample is drawn by a seed, and each is planted into a copy of the tree, as
tests/mutants.py does it. The tests of its file run first, then those of all paths, until one fails.

    pip install mutmut==3.8.1
    PYTHONPATH=. python tests/second_opinion.py --drawn 30 --output survivors.json [refattn/merge.py ...]

What is in the file of `--output` is not run again. Verdicts on survivors are written into it by hand.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests import mutants

TESTS = {  # the files of refattn, and those of tests/paths that are about them
    "attention": ("varlen", "masks", "chunked_prefill"),
    "masks": ("masks", "sliding_window", "interval", "local", "speculative"),
    "merge": ("merge", "cascade"),
    "varlen": ("varlen", "cross_attention"),
    "chunked_prefill": ("chunked_prefill",),
    "sliding_window": ("sliding_window",),
    "kv_cache": ("kv_cache",),
    "mla": ("mla", "packed_latents", "quantized_latents"),
    "cascade": ("cascade",),
    "speculative": ("speculative",),
    "quantized": ("quantized",),
}
DECORATOR = "@without_autocast"  # mutmut leaves decorated functions out, `attend` and `merge` among them
OF_ALL_PATHS = "every_path", "edges", "options_on_every_path", "bad_input"  # run if those of the file pass


class Mutant(NamedTuple):
    """A change of one expression.

    Attributes:
        name: the file, and its number among all mutants of it.
        function: the function or class at module level it is in; empty outside of all.
        old: the expression, as it stands.
        new: what stands in its place.
        text: the whole file, changed.
    """

    name: str
    function: str
    old: str
    new: str
    text: str


def mutants_of(file: str) -> list[Mutant]:
    """List all mutants that mutmut makes of a file."""
    libcst = import_module("libcst")
    with tempfile.TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)  # mutmut reads its settings there
        Path("setup.cfg").write_text("[mutmut]\nsource_paths=.\n")
        try:
            made = import_module("mutmut.mutation.file_mutation").create_mutations
            source = (mutants.ROOT / file).read_text()
            module, changes, *_ = made(file, source.replace(f"\n{DECORATOR}\n", f"\n# {DECORATOR}\n"))
        finally:
            os.chdir(here)

    def code(node: Any) -> str:
        return " ".join(libcst.Module([]).code_for_node(node).split())

    found = []
    for i, change in enumerate(changes):
        inside = change.contained_by_top_level_function
        text = module.deep_replace(change.original_node, change.mutated_node).code
        text = text.replace(f"\n# {DECORATOR}\n", f"\n{DECORATOR}\n")
        function = "" if inside is None else inside.name.value
        found.append(Mutant(f"{file}#{i}", function, code(change.original_node), code(change.mutated_node), text))
    return found


def run(mutant: Mutant, tests: Sequence[str], tree: Path, seconds: float) -> dict[str, Any]:
    """Plant a mutant, run the tests until one fails or the time is over, and return what came of it."""
    file = tree / mutant.name.partition("#")[0]
    source = file.read_text()
    file.write_text(mutant.text)
    now = next(mutants.TIMES)
    os.utime(file, (now, now))
    results = tree.with_suffix(".jsonl")
    results.write_text("")
    stages = [[f"tests/paths/test_{name}.py" for name in names] for names in (tests, OF_ALL_PATHS)]
    start = time.monotonic()
    process = os.fork()
    if process == 0:
        mutants.run_tests(tree, stages, results, mutants.How(1, seconds), until_one_fails=True)
    is_late = False
    while os.waitpid(process, os.WNOHANG)[0] == 0:
        time.sleep(0.05)
        if time.monotonic() - start > seconds and not is_late:
            is_late = True
            os.killpg(process, signal.SIGKILL)
    file.write_text(source)
    notes = [json.loads(line) for line in results.read_text().splitlines()]
    failed = [what for kind, what in notes if kind == "failed"]
    mutants.HITS.update(failed)
    status = next((what for kind, what in notes if kind == "ended"), None)
    verdict = "caught" if failed or status not in (None, 0) else "timed out" if is_late else "survived"
    by = failed[0] if failed else "import"
    change = {"function": mutant.function, "old": mutant.old, "new": mutant.new}
    outcome = {"verdict": verdict, **({"by": by} if verdict == "caught" else change)}
    return outcome | {"seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Draw, run and write what came of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=[f"refattn/{name}.py" for name in TESTS])
    parser.add_argument("--drawn", type=int, default=30, help="mutants per file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most that the tests of a mutant take")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in mutants.LOADED:
        if find_spec(name.partition(".")[0]):
            __import__(name)
    found = mutants.circumstances("cpu") | {"tool": "mutmut 3.8.1", "seed": options.seed, "files": {}}
    if options.output.exists():
        found |= json.loads(options.output.read_text())
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        mutants.copy_tree(tree)
        for file in options.files:
            made = mutants_of(file)
            drawn = random.Random(f"{options.seed} {file}").sample(made, min(options.drawn, len(made)))
            entry = found["files"].setdefault(file, {"made": len(made), "mutants": {}})
            for mutant in drawn:
                if mutant.name in entry["mutants"]:
                    continue
                outcome = run(mutant, TESTS[Path(file).stem], tree, options.seconds)
                entry["mutants"][mutant.name] = outcome
                options.output.write_text(json.dumps(found, indent=1) + "\n")
                if outcome["verdict"] != "caught":
                    sys.stdout.write(f"{mutant.name} {outcome}\n")
            counts = Counter(one["verdict"] for one in entry["mutants"].values())
            if not counts["survived"]:  # is it the tests that fail, whatever is planted?
                unbroken = Mutant(file, "", "", "", (tree / file).read_text())
                assert run(unbroken, TESTS[Path(file).stem], tree, math.inf)["verdict"] == "survived", file
            sys.stdout.write(f"{file}: {len(made)} made, {dict(counts)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
