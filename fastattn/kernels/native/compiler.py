"""Compile `attention.c` with the C compiler of the machine, once, and load it: a few seconds, at the first call.

The library is stored in the user's cache, under a hash of the source, the compiler, the processor and PyTorch's OpenMP,
with which it shares its threads. Without a compiler the kernel `native` is refused, with the reason.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("attention.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-Wno-psabi")
FOR_THIS_PROCESSOR = ("-march=native", "-mcpu=native", "")  # tried in turn: x86, Arm, no tuning
COMPILERS = ("cc", "gcc", "clang")
TIME_LIMIT = 120.0  # seconds


class CannotCompileError(Exception):
    """The reason why there is no library."""


@cache
def library() -> ctypes.CDLL | str:
    """Return the compiled library, or the reason why there is none."""
    try:
        return ctypes.CDLL(str(_compiled()))
    except (CannotCompileError, OSError) as error:
        return str(error)


def _compiled() -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "", *COMPILERS))), None)
    if compiler is None:
        raise CannotCompileError(f"found no C compiler ({', '.join(COMPILERS)})")
    openmp = _openmp()
    made_from = (SOURCE.read_text(), FLAGS, _run(compiler, "--version"), _processor(), str(openmp))
    name = f"attention-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}.so"
    folder = _cache_folder()
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as room:
            made = _compile(compiler, openmp, Path(room))
            os.replace(made, folder / name)  # another process may do the same now
    return folder / name


def _compile(compiler: str, openmp: Path | None, room: Path) -> Path:
    """Compile, for this processor if the compiler can, and with threads if it links to PyTorch's OpenMP."""
    compiled, made = room / "attention.o", room / "attention.so"
    error = ""
    for threads in (openmp, None) if openmp else (None,):
        with_threads = (["-Xclang", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]) if threads else []
        linked = [str(threads)] if threads else []
        linked += [] if sys.platform == "darwin" else ["-Wl,-z,defs"]  # another compiler's OpenMP has other functions
        for processor in FOR_THIS_PROCESSOR:
            flags = [flag for flag in (*FLAGS, processor, *with_threads) if flag]
            try:
                _run(compiler, *flags, "-c", str(SOURCE), "-o", str(compiled))
                _run(compiler, "-shared", str(compiled), *linked, "-lm", "-o", str(made))
                return made
            except CannotCompileError as reason:
                error = str(reason)
    raise CannotCompileError(error)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
    except subprocess.CalledProcessError as error:
        first = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise CannotCompileError(f"{Path(command[0]).name} failed: {first}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompileError(f"{Path(command[0]).name} did not run: {error}") from error
    return done.stdout


def _openmp() -> Path | None:
    """Return the OpenMP library that PyTorch ships and has loaded: two in one process would compete for its cores."""
    folder = Path(torch.__file__).parent
    found = [
        path
        for where in (folder / "lib", folder.with_name("torch.libs"))
        for path in sorted(where.glob("lib*omp*"))
        if path.name.startswith(("libgomp", "libomp", "libiomp"))
    ]
    return found[0] if found else None


def _processor() -> str:
    """Describe the processor: machines may share a home folder, and so the cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _cache_folder() -> Path:
    where = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastattn"
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise CannotCompileError(f"cannot write to {where}: {error.strerror}") from error
    return where
