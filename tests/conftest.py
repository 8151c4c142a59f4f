"""Shapes are checked, memory that was not written is NaN, and one option says which device everything runs on."""

import gc
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import FunctionType
from unittest import mock

import jaxtyping
import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("tests.helpers")

# The same draws on every machine. A longer search:
# `pytest --hypothesis-profile=search --timeout=0 -o faulthandler_timeout=0`.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("same")

LONG = (
    "test_changes.py",
    "test_compile.py",
    "test_demo.py",
    "test_docs.py",
    "test_notebooks.py",
)  # files with tests of 10 seconds and more
# The files of `make test`, the core: each path, storage, plan and kernel against float64, poison, bad input, gradients,
# what is bound and replayed, an engine, each integration, the README. Of other files it runs quick tests that prove a
# feature: those with `@pytest.mark.core`. `make test-rest` runs all others.
CORE = {
    "paths": (
        *("bad_input", "composition", "context_parallel", "cross_attention", "edges", "every_argument", "every_path"),
        *("gradients", "isolation", "kv_cache", "masks", "merge", "metadata", "options_on_every_path", "quantized"),
        *("shared_memory", "state_cache", "steps"),
    ),
    "kernels": ("asked", "kernels_triton", "launch", "memory", "native", "replay"),
    "engine": (
        *("arguments", "both_twins", "decodes_ahead", "detokenize", "engine", "engine_faults", "engine_spans"),
        *("going_on", "layers", "samples", "sampling", "speculation", "window_pool"),
    ),
    "integrations": ("each", "flash_attn", "vllm", "vllm_interface", "vllm_ranks"),
    "tools": ("cli", "readme", "table", "twins", "way_of_a_call"),
}
CORE_MARK = "pytest.mark.core"
CORE_SECONDS = 2.0  # the most CPU time of a core test
LONGER = {  # core tests with a limit of their own, and why
    "test_the_blocks_of_the_readme_print_what_it_shows": 12.0,  # the README checks a kernel, and finds its bug
    "test_other_calls_by_the_same_plan_are_answered_as_by_a_new_one": 8.0,  # each path, each option, in one plan
    "test_an_output_may_be_written_over_an_input": 6.0,  # the interpreter runs a cascade three times
    "test_a_thread_may_meet_a_schedule_half_made": 8.0,  # stops a thread at each line of a schedule
}
KERNELS_OF_TRANSFORMERS = "fla", "mamba_ssm", "causal_conv1d"  # it calls them, where they are installed
COLLECTED = pytest.StashKey[int]()
CASE = pytest.StashKey[int]()  # the number of a case among those of its test
CASES_PER_CHECK = 11
CHECKED_CALLS, CALLS_PER_CHECK = 500, 11  # in such a case: the first calls, and after them every eleventh


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the twins compute: cpu or cuda")
    parser.addoption(
        "--tier", choices=("core", "rest", "all"), default="all", help="which files, unless some are named"
    )
    parser.addoption("--every-gpu", action="store_true", help="compile every launch for every GPU that Triton knows")
    parser.addoption(
        "--results", help="JSON file to write the number of tests by outcome to, with date, versions and failures"
    )


def pytest_configure(config):
    os.environ["TWINATTN_TEST_DEVICE"] = config.getoption("--device")  # for the lists of parameters
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or processes that compile would import torch again
    for package in KERNELS_OF_TRANSFORMERS:  # our oracle is its own formula, and not their products in tf32
        sys.modules.setdefault(package, None)
    torch.manual_seed(0)
    gc.disable()  # until all tests are collected: there is no garbage among them
    # Beartype draws which element of a list it checks. By a generator of its own: the kit watches that of Python.
    with mock.patch.object(random, "getrandbits", random.Random(0).getrandbits):
        import beartype  # noqa: F401
    # Annotated shapes are checked on every call, in the cases that are chosen below, except in Triton's own language.
    jaxtyping.jaxtyped = where_shapes_are(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(["refattn", "fastattn", "twinattn"], "beartype.beartype")
    jaxtyping.config.__class__ = ChecksOfSomeCalls
    jaxtyping.config.update("jaxtyping_disable", False)


class ChecksOfSomeCalls(type(jaxtyping.config)):
    """The switch that jaxtyping looks at in each call: a model's steps call the same functions thousands of times."""

    @property
    def jaxtyping_disable(self) -> bool:
        """Whether this call is not checked."""
        if self._is_off:
            return True
        self._calls += 1
        return self._calls > CHECKED_CALLS and self._calls % CALLS_PER_CHECK > 0

    @jaxtyping_disable.setter
    def jaxtyping_disable(self, value: bool) -> None:
        self._is_off, self._calls = value, 0


def where_shapes_are(jaxtyped):
    """Keep jaxtyping from functions without a shape: its checks of those take a quarter of the engine's time."""

    def decorator(**options):
        check = jaxtyped(**options)

        def decorate(function):
            has_shapes = any("[Tensor, " in str(kind) for kind in getattr(function, "__annotations__", {}).values())
            return check(function) if has_shapes or not isinstance(function, FunctionType) else function

        return decorate

    return decorator


def is_core(file: Path) -> bool:
    """Return whether all tests of a file are of the core."""
    return file.stem.removeprefix("test_") in CORE.get(file.parent.name, ())


def has_core(file: Path) -> bool:
    """Return whether some tests of a file are of the core."""
    return is_core(file) or CORE_MARK in file.read_text()


def is_tier_asked(config) -> bool:
    """Return whether a tier decides what runs, and not the files that the command line names."""
    if config.getoption("--tier") == "all":
        return False
    given = [x for x in config.invocation_params.args if not x.startswith("-")]
    return not any(Path(x.partition("::")[0]).exists() for x in given)


def pytest_ignore_collect(collection_path, config):
    """Leave out files without a test of the tier, unless files are named."""
    if not is_tier_asked(config) or not collection_path.name.startswith("test_"):
        return None
    has_any = has_core(collection_path) if config.getoption("--tier") == "core" else not is_core(collection_path)
    return None if has_any else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Refuse a test of the core that takes the CPU too long: it belongs to the rest, or into smaller cases.

    In CI alone: on a slow or busy machine of a reader nothing is wrong.
    """
    began = time.process_time()
    result = yield
    seconds = time.process_time() - began
    most = LONGER.get(item.function.__name__, CORE_SECONDS)
    is_asked = "CI" in os.environ and item.config.getoption("--tier") == "core"
    is_asked &= item.config.getoption("--device") == "cpu"
    if is_asked and seconds > most:
        pytest.fail(f"{seconds:.1f} s of CPU in a test of the core, at most {most}", pytrace=False)
    return result


def pytest_collection_modifyitems(config, items):
    """Begin with what takes longest where pytest-xdist gives the tests out one by one, or one worker ends after all."""
    if is_tier_asked(config):
        wants_core = config.getoption("--tier") == "core"
        of_core = [is_core(item.path) or item.get_closest_marker("core") is not None for item in items]
        others = [item for item, is_it in zip(items, of_core, strict=True) if is_it != wants_core]
        items[:] = [item for item, is_it in zip(items, of_core, strict=True) if is_it == wants_core]
        config.hook.pytest_deselected(items=others)
    on_gpu = config.getoption("--device") != "cpu"
    is_limit_asked_for = config.getoption("timeout", None) is not None  # a mark would take its place
    cases = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        item.stash[CASE] = cases[test]
        cases[test] += 1
        compiles_all_it_draws = on_gpu and getattr(item.function, "is_hypothesis_test", False)
        if (item.path.name in LONG or compiles_all_it_draws) and not is_limit_asked_for:
            item.add_marker(pytest.mark.timeout(300))

    def takes_long(item):
        compiles = on_gpu and "fa4" in item.name  # flash-attn-4, for each shape
        return item.path.name in LONG, getattr(item.function, "is_hypothesis_test", False) or compiles

    if hasattr(config, "workerinput"):
        items.sort(key=takes_long, reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    node.config.stash[COLLECTED] = len(ids)  # every worker collects all


def pytest_collection_finish(session):
    session.config.stash[COLLECTED] = len(session.items)
    gc.freeze()  # torch, transformers and the tests stay, and garbage collection need not visit them again
    gc.enable()


def pytest_terminal_summary(terminalreporter, config):
    """Count the tests by outcome: all of them, by file, and those of each kernel by its name in their ids.

    Beside them are the seconds that each file's tests took, fixtures included.
    """
    if not config.getoption("--results") or hasattr(
        config, "workerinput"
    ):  # a worker of pytest-xdist has its share only
        return
    from fastattn import kernels
    from twinattn.bench import measure

    counts = {"all": {}, "by_file": {}, "by_kernel": {}, "not_passed": []}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if outcome in ("failed", "error"):
                counts["not_passed"].append(report.nodeid)
            file, _, rest = report.nodeid.partition("::")
            kernel = next((name for name in kernels.NAMES if name in rest.partition("[")[2].rstrip("]").split("-")), "")
            for group, name in (("all", ""), ("by_file", Path(file).name), ("by_kernel", kernel)):
                counted = counts[group].setdefault(name, {}) if group != "all" else counts["all"]
                counted[outcome] = counted.get(outcome, 0) + 1
    counts["by_kernel"].pop("", None)
    seconds = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):  # a fixture's report, too
            seconds[Path(report.nodeid.partition("::")[0]).name] += report.duration
    counts["seconds_by_file"] = {file: round(duration, 1) for file, duration in seconds.most_common()}
    device = torch.device(config.getoption("--device"))
    about = {**measure.circumstances(), "device": device.type, "machine": measure.machine(device)}
    about["collected"] = config.stash[COLLECTED]  # more than were run, where the run was ended early
    Path(config.getoption("--results")).write_text(json.dumps({**about, **counts}, indent=1) + "\n")


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """Fill `torch.empty` with NaN, so that what is read before it is written shows."""
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def forget_choices():
    """Forget the kernels chosen before each test: a choice is kept, and some tests change what it depends on.

    A test that does so after it has chosen calls what this gives.
    """

    def forget() -> None:
        for module in ("fastattn.kernels.order", "fastattn.dispatch"):
            if module in sys.modules:
                sys.modules[module].forget()

    forget()
    yield forget
    forget()


@pytest.fixture(autouse=True)
def shapes_checked_in_some_cases(request):
    """Check annotated shapes in the first case of each test and in every eleventh, as it takes a third of all time.

    A wrong annotation shows in any call, and every test has a case with these checks: of some of its calls.
    """
    jaxtyping.config.update("jaxtyping_disable", request.node.stash[CASE] % CASES_PER_CHECK > 0)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def one_thread():
    """Threads cost more than they bring at the sizes of tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device")


@pytest.fixture
def shapes_unchecked():
    """Switch the shape annotations off, to see the errors that a user sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
