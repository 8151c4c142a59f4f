"""Time the kernel of notebook 10 on a GPU, from one program to many, beside the kernel of `fastattn`.

    python notebooks/kernel_times.py

writes notebooks/10_kernel.json, which the notebook shows. The kernel is the notebook's own: its functions are read from
its cells and compiled. A time is written only for an answer that is that of `refattn`. The work is what a GPU has of a
long request where it has one KV head, so that reading keys and values is nearly all there is to do; the bound is how
long that takes at the rate of reading that the card reached in the same run.
"""

import ast
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

import fastattn.chunked_prefill
from refattn import kv_cache, metadata
from refattn.attention import attend
from refattn.masks import full
from refattn.merge import merge
from twinattn.bench import measure
from twinattn.kit import tolerance

NOTEBOOK = Path(__file__).with_name("10_kernel.ipynb")
RESULT = Path(__file__).with_name("10_kernel.json")
KEYS, BLOCK, SIZE = 131072, 16, 128  # one request with one head
DTYPE = torch.float32  # as in the notebook
DEVICE = "cuda"
PROGRAMS = (1, 4, 16, 64, 256, 1024)


def main() -> None:
    """Measure, and write the file."""
    device = torch.device(DEVICE)
    torch.manual_seed(0)
    query = torch.randn(1, 1, SIZE).to(DTYPE)
    key, value = torch.randn(2, KEYS, 1, SIZE).to(DTYPE)
    blocks = torch.randperm(KEYS // BLOCK).tolist()
    prompt = metadata.make_batch([KEYS], [KEYS], [blocks])
    pools = kv_cache.allocate(len(blocks), BLOCK, 1, SIZE, dtype=DTYPE)
    kv_cache.write(key, value, *pools, metadata.slot_mapping(prompt, KEYS, block_size=BLOCK))
    batch = metadata.make_batch([1], [KEYS], [blocks], device=device)
    q = query.to(device)
    bytes_read = 2 * key.nbytes
    # The same pools again and again would come out of the cache.
    sets = [tuple(pool.to(device) for pool in pools) for _ in range(measure.input_sets(device, bytes_read))]

    low = attend(query, key, value, full(1, KEYS))
    exact = attend(*(x.double() for x in (query, key, value)), full(1, KEYS))
    kernels = kernels_of(NOTEBOOK)
    rows = []
    for programs in PROGRAMS:
        outs = torch.empty(programs, 1, 1, SIZE, device=device)
        lses = torch.empty(programs, 1, 1, device=device)

        def launch(
            pools: tuple[torch.Tensor, ...],
            programs: int = programs,
            outs: torch.Tensor = outs,
            lses: torch.Tensor = lses,
        ) -> None:
            arguments = (q, *pools, batch.block_table, outs, lses, KEYS)
            kernels.decode_in_parts[programs,](*arguments, RUN=KEYS // programs, P=BLOCK, D=SIZE)

        launch(sets[0])
        out, lse = merge(outs.unbind(), lses.unbind())
        for came, expected, plain in zip((out.to(DTYPE), lse), exact, low, strict=True):
            tolerance.assert_close(came.cpu(), expected, plain)
        rows.append({"programs": programs, "seconds": seconds(launch, sets)})

    plan = fastattn.chunked_prefill.plan(batch, block_size=BLOCK)
    with fastattn.use_kernel("triton"):
        out = fastattn.chunked_prefill.attention(q, *sets[0], plan)
        tolerance.assert_close(out.cpu(), exact[0], low[0])
        ours = seconds(lambda pools: fastattn.chunked_prefill.attention(q, *pools, plan), sets)
    bound = measure.ceilings(device, DTYPE, quick=False).seconds(reads=bytes_read, writes=0)
    about = {"machine": measure.machine(device), **measure.circumstances(), "keys": KEYS, "head_size": SIZE}
    about["dtype"] = str(DTYPE).removeprefix("torch.")
    RESULT.write_text(json.dumps({**about, "rows": rows, "fastattn": ours, "bound": bound}, indent=1) + "\n")


def seconds(call: Callable[..., object], sets: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Return the median time of a call on the GPU, replayed in a CUDA graph, over each of some pools."""
    calls = [partial(call, pools) for pools in sets]
    return measure.summarize(measure.on_gpu(calls, clock="graph", milliseconds=200)).median


def kernels_of(notebook: Path) -> ModuleType:
    """Make a module of the functions of a notebook that Triton compiles, in their order."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if "install" not in cell["metadata"].get("tags", ())]  # that is no Python
    sources = ["import triton\nimport triton.language as tl\n"]
    for source in ("".join(cell["source"]) for cell in cells):
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                sources.append("\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]))
    file = Path(tempfile.mkdtemp()) / "kernels_of_the_notebook.py"  # Triton reads the source of what it compiles
    file.write_text("\n\n\n".join(sources) + "\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
