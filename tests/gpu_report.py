"""Everything that a machine can say of this repository in one file: `make gpu-report`, on a GPU that we do not have.

    doctor       the kernels that run there, and why the others do not
    tests        all tests with --device cuda, by outcome and by kernel
    search       random batches of every path and kernel against an oracle
    bench        every path measured against its peers
    kit          the kernels of installed packages, property by property

The file can be attached to an issue; in docs/results/reports the site shows it. It names the GPU, the versions and the
commit, and no user, host or path. It is written after each part, so what ends early has lost nothing; a part that fails
is in it with its exit status and its last lines. `--only doctor bench` makes some parts, `--quick` small ones, in which
no number means anything.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAST = 40  # lines of a part that failed
PYTHON = [sys.executable, "-m"]


def parts(device: str, seconds: float, jobs: int, *, quick: bool) -> dict[str, tuple[str, ...]]:
    """Return the command of each part; `{out}` in it is the file, of the benchmark the folder, that it writes."""
    few = ("tests/paths/test_merge.py",) if quick else ("-n", str(jobs), "--dist", "worksteal")
    search = ("--paths", "merge", "--workloads", "20") if quick else ("--seconds", str(seconds))
    rows = ("--quick", "--rows", "metadata") if quick else ()
    kit = ("--examples", "2", "--adapter", "fastattn.merge") if quick else ()
    return {
        "doctor": ("fastattn.doctor", "{out}"),
        "tests": ("pytest", "-q", "--device", device, "--results", "{out}", *few),
        "search": ("twinattn", "search", "--device", device, "--results", "{out}", *search),
        "bench": ("twinattn", "bench", "--device", device, "--out", "{out}", *rows),
        "kit": ("twinattn.kit", "--all-installed", "--device", device, "--out", "{out}", *kit),
    }


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"), help="the file (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts: doctor, tests, search, bench, kit")
    parser.add_argument("--seconds", type=float, default=60.0, help="to search for each path (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=8, help="tests at a time (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=3.0, help="for a part, at most (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small parts: to see that it works")
    asked = parser.parse_args()
    commands = parts(asked.device, asked.seconds, asked.jobs, quick=asked.quick)
    unknown = [name for name in asked.only or () if name not in commands]
    if unknown:
        parser.error(f"--only: expected some of {', '.join(commands)}, got {unknown[0]}")
    chosen = {name: command for name, command in commands.items() if asked.only is None or name in asked.only}
    made = assemble(about(asked.device, quick=asked.quick), chosen, asked.out, limit=3600 * asked.hours)
    failed = [name for name, part in made["parts"].items() if part["exit_status"] != 0]
    say(f"{asked.out} has {', '.join(made['parts'])}{'; of these failed ' * bool(failed)}{', '.join(failed)}")


def about(device: str, *, quick: bool) -> dict[str, Any]:
    """Return when, on what and with which versions a report is made.

    Raises:
        ValueError: if there is no such device.
    """
    import torch

    from twinattn.bench import measure

    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that torch finds, got {device!r}")
    machine = measure.machine(torch.device(device))
    return {**measure.circumstances(), "device": device.partition(":")[0], "machine": machine, "quick": quick}


def assemble(head: dict[str, Any], commands: dict[str, tuple[str, ...]], out: Path, *, limit: float) -> dict[str, Any]:
    """Run a command for each part, and write the file after each.

    Args:
        head: of the file.
        commands: arguments of `python -m`; `{out}` in one is where it writes.
        out: the file.
        limit: seconds for a part, after which it is ended.
    """
    report: dict[str, Any] = {**head, "parts": {}}
    for name, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / (name if name == "bench" else f"{name}.json")
            words = [word.format(out=file) for word in command]
            say(f"{name}: python -m {' '.join(command)}")
            start = time.monotonic()
            with (Path(folder) / "printed.txt").open("w+") as printed:
                options = dict(cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
                try:
                    status = subprocess.run([*PYTHON, *words], timeout=limit, check=False, **options).returncode
                except subprocess.TimeoutExpired:
                    status = None
                printed.seek(0)
                lines = printed.read().splitlines()
            part = {"command": " ".join(command), "exit_status": status, "seconds": round(time.monotonic() - start, 1)}
            part["found"] = read(file)
            if status != 0:
                part["last_lines"] = [anonymous(line, folder) for line in lines[-LAST:]]
        report["parts"][name] = part
        out.write_text(json.dumps(report, indent=1) + "\n")
        say(f"{name}: {'over time' if status is None else f'exit {status}'} after {part['seconds']:.0f} s")
    return report


def read(file: Path) -> Any:
    """Return what a part has written, None where it has written nothing."""
    file = next(iter(sorted(file.glob("*.json"))), file) if file.is_dir() else file
    return json.loads(file.read_text()) if file.is_file() else None


def anonymous(line: str, folder: str) -> str:
    """Leave out of a line where things are on the reporter's machine."""
    for place, name in ((folder, "OUT"), (str(ROOT), "."), (sys.prefix, "ENV"), (str(Path.home()), "~")):
        line = line.replace(place, name)
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def say(text: str) -> None:
    """Print what is done now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
