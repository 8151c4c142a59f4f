"""A model behind vLLM's own server, `vllm serve`: asked over HTTP, as users ask it."""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SECONDS = 240  # until it answers
Ask = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@contextmanager
def served(folder: Path, log: Path, *arguments: str, **environment: str) -> Iterator[Ask]:
    """Serve a model, and end the server.

    Args:
        folder: the model; it needs no tokenizer.
        log: where the server writes what it says.
        arguments: more of the command.
        environment: variables of the server and of the processes that it starts.

    Yields:
        A function that asks for prompts, all at once, and how many tokens each is to be answered with, greedily; it
        returns these.

    Raises:
        AssertionError: with the end of the log, if the server does not begin, or does not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *_server_of(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "it", "--skip-tokenizer-init"]
    own = dict(VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as said:
        server = subprocess.Popen(
            [*command, *arguments],
            env=os.environ | own | environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(server, f"{url}/health", log)

        def ask(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(lambda prompt: _answer(url, list(prompt), count, log), prompts))

        yield ask
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _server_of(folder: Path) -> list[str]:
    """Return the module that serves a model, and how the model is named to it.

    The wheel for CPUs is a package of another name, whose command `vllm` looks for the version of the package `vllm`.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ["vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return ["vllm.entrypoints.cli.main", "serve", str(folder)]


def wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server says that it is well."""
    end = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise AssertionError(f"it did not begin:\n{log.read_text()[-3000:]}")


def _answer(url: str, prompt: list[int], count: int, log: Path) -> list[int]:
    """Ask for one prompt, and return the tokens of its answer."""
    asked: dict[str, Any] = dict(model="it", prompt=prompt, max_tokens=count, temperature=0, ignore_eos=True)
    asked |= dict(return_token_ids=True)
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            (choice,) = json.load(answer)["choices"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()[-1000:]}\n{log.read_text()[-2000:]}") from None
    tokens: list[int] = choice["token_ids"]
    return tokens
