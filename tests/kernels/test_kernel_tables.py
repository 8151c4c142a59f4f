"""The tables of which kernel runs are what the chooser chooses, on machines that need not be here."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastattn.kernels import Problem, native, order, triton
from fastattn.kernels.flash import fa2, fa3, fa4, flash_mla

ROOT = Path(__file__).parent.parent.parent
PROMPTS = Problem(
    operation="attend",
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    keys="pages",
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    value_head_size=128,
    block_size=16,
    max_query_len=8192,
    max_seq_len=8192,
    num_seqs=2,
    window=(-1, 0),
    num_tokens=2 * 8192,
    even=True,
)
OVER_ROWS = PROMPTS._replace(keys="rows", block_size=None)
DECODES = PROMPTS._replace(max_query_len=1, num_seqs=64, num_tokens=64)
COLUMNS = {
    "prompts, no pages": OVER_ROWS,
    "windows, no pages": OVER_ROWS._replace(window=(1023, 0)),
    "prompts over pages": PROMPTS,
    "decodes": DECODES,
    "latents": DECODES._replace(
        keys="latents", num_heads=128, num_kv_heads=1, head_size=576, value_head_size=512, block_size=64, uniform=True
    ),
    "drafted trees": DECODES._replace(tree=True, window=(-1, -1), max_query_len=16, num_tokens=64 * 16),
}
MACHINES = {  # what the table calls them: compute capabilities, and the packages for them
    "a CPU, float32, with a C compiler": ([], ()),
    "NVIDIA from Ampere on, but for Hopper": ([(8, 0), (8, 9), (10, 0), (12, 0)], ()),
    "NVIDIA from Ampere on, but for Hopper, `flash-attn` alone": ([(8, 0), (8, 9), (10, 0), (12, 0)], ("fa2",)),
    "Hopper, with `flash-attn` or without": ([(9, 0)], ("fa2",)),
    "Hopper, all packages": ([(9, 0)], ("fa2", "fa3", "fa4", "flash_mla")),
    "Blackwell (B200), `flash-attn` and `flash-attn-4`": ([(10, 0)], ("fa2", "fa4")),
}


def table() -> dict[str, dict[str, str]]:
    """Read the table of the page on kernels: of each machine the kernel in each column."""
    return read(ROOT / "docs/paths/kernels.md", "machine, and packages")


def read(page: Path, first: str) -> dict[str, dict[str, str]]:
    """Read the table of a page whose first title begins so: the cells of each row, by their titles."""
    (found,) = re.findall(rf"^\| {first}.*?\n\n", page.read_text(), re.MULTILINE | re.DOTALL)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found.strip().splitlines()]
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


def have(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: tuple[str, ...]) -> None:
    """Pretend that there is a GPU, and some packages."""

    def unless_there(name):
        return lambda *asked, **options: None if name in packages else f"there is no {name}"

    for module in (triton, fa4, fa3, flash_mla, fa2):
        monkeypatch.setattr(module, "capability", lambda device: capability)
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: capability)
    for module, asks in (
        (fa2, "cannot_import"),
        (fa4, "cannot_import"),
        (fa3, "_cannot_load"),
        (flash_mla, "_cannot_load"),
    ):
        monkeypatch.setattr(module, asks, unless_there(module.KERNEL.name))
    for module in (fa2, fa3):
        monkeypatch.setattr(module, "_refusal", lambda *asked, **options: None)


def test_the_table_has_these_machines_and_columns():
    assert [*table()] == [*MACHINES]
    assert all([*cells] == [*COLUMNS] for cells in table().values())


def chosen(problems: dict[str, Problem]) -> dict[str, str]:
    return {column: order.choose(problem).name for column, problem in problems.items()}


@pytest.mark.parametrize("name", [name for name, (capabilities, _) in MACHINES.items() if capabilities])
def test_it_is_what_is_chosen_on_a_gpu(name, monkeypatch, forget_choices):
    capabilities, packages = MACHINES[name]
    for capability in capabilities:
        have(monkeypatch, capability, packages)
        forget_choices()
        assert chosen(COLUMNS) == table()[name], capability


def test_it_is_what_is_chosen_on_a_cpu(monkeypatch, forget_choices):
    monkeypatch.setattr(native, "library", lambda: mock.sentinel.library)
    forget_choices()
    on_cpu = dict(device=torch.device("cpu"), dtype=torch.float32)
    problems = {column: problem._replace(**on_cpu) for column, problem in COLUMNS.items()}
    assert chosen(problems) == table()["a CPU, float32, with a C compiler"]


# --- the README's, of the five paths that come first ---

NAMES = {
    "cpu": "ATen's FlashAttention",
    "native": "C",
    "triton": "Triton",
    "fa4": "FlashAttention-4",
    "torch": "PyTorch",
}
PATHS = {  # prompts and decodes, or a write of either
    "paged KV cache: writes": [PROMPTS._replace(operation="write")],
    "chunked prefill": [PROMPTS, DECODES],
    "sliding window": [x._replace(window=(1023, 0)) for x in (PROMPTS, DECODES)],
    "local": [PROMPTS, DECODES],
    "differential": [x._replace(operation="differential") for x in (PROMPTS, DECODES)],
}
READERS = {  # what the README calls them: compute capabilities and packages
    "a CPU": [],
    "an NVIDIA GPU": [((major, 0), ()) for major in (8, 9, 10, 12)],
    "Hopper or Blackwell with `flash-attn-4`": [((9, 0), ("fa4",)), ((10, 0), ("fa4",))],
}


@pytest.mark.parametrize("reader", READERS)
def test_what_computes_the_first_five_paths(reader, monkeypatch, forget_choices):
    shown = read(ROOT / "README.md", r"path \| a CPU")
    assert [*shown] == [*PATHS] and all([*cells] == [*READERS] for cells in shown.values())
    monkeypatch.setattr(native, "library", lambda: mock.sentinel.library)
    on_cpu = dict(device=torch.device("cpu"), dtype=torch.float32)
    for gpu in READERS[reader] or [None]:
        if gpu:
            have(monkeypatch, *gpu)
        forget_choices()
        for path, problems in PATHS.items():
            names = [order.choose(x if gpu else x._replace(**on_cpu)).name for x in problems]
            assert "; ".join(NAMES[name] for name in names) == shown[path][reader], gpu
