"""A ladder on a laptop: each rung is held to the formula in Triton's interpreter, and its launches are listed.

The interpreter runs the programs of a launch one after the other, in NumPy. It shows what a kernel computes and how
many programs it has, and nothing about time. Batches are small, and of float32, as it multiplies matrices of bfloat16
wrongly. A file of the reader's own is held to the formula in the same way.

Warps with roles are written in Gluon, which `twinattn.course.gluon` runs in some drawn orders, on a batch of float16.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from refattn.modes import computing_in
from twinattn.course.batches import Batch, Latents, Pages, States
from twinattn.course.ladder import Rung, call_of, lacking, rungs
from twinattn.kit import tolerance

SMALL: dict[str, tuple[Batch, ...]] = {  # by ladder; a rung takes the first that has what it needs
    "decode": (Pages(((1, 5), (1, 600), (1, 40)), heads=4, kv_heads=2, size=32),),
    "prefill": (Pages(((40, 150), (1, 5), (70, 70)), rows=True, heads=4, kv_heads=2, size=32),),
    "latents": (Latents(((1, 5), (1, 300)), heads=20, rank=64, rope=16, nope=24, value_size=40, block_size=16),),
    "states": (
        States(((70, 70), (3, 9), (1, 1)), heads=4, key_heads=2, size=32),
        States(((1, 2),) * 6, heads=4, key_heads=2, size=32, ring=4),
    ),
}

ON_HOPPER = {"prefill": Pages(((130, 300), (1, 5), (70, 140)), rows=True, heads=4, kv_heads=2, size=64)}  # in float16
ORDERS = 3  # in which warps with roles run on a CPU


def is_on() -> bool:
    """Return whether Triton is there and interprets; it does if it is imported here for the first time."""
    if "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        import triton
    except ModuleNotFoundError:
        return False
    return bool(triton.knobs.runtime.interpret)


def inputs_of(batch: Batch, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the inputs of a batch in float32 or another type; a pool of fp8 stays as it is."""
    torch.manual_seed(0)
    made = batch.make_inputs(device)
    return {x: y.to(dtype) if torch.is_tensor(y) and y.dtype == torch.bfloat16 else y for x, y in made.items()}


def run(name: str, tell: Callable[[str], None], device: torch.device, file: Path | None = None) -> bool:
    """Hold the rungs of a ladder to the formula, or a file of the reader's own; return whether all are right.

    Args:
        name: the ladder.
        tell: called with a line of text for each rung.
        device: where they run.
        file: a file with a function `attention`, in place of the rungs.
    """
    reference, *above = rungs(name)
    how = ", in Triton's interpreter; at the end each kernel and its programs" if is_on() else ""
    tell("\n".join([f"\nHeld to rung 0 on small batches of float32{how}:", *map(_sizes, SMALL[name])]))
    all_right = True
    for rung in above if file is None else [Rung(len(above) + 1, file.stem, file.name, file)]:
        needed = rung.missing(device)
        batches = SMALL[name] if needed is None else ()
        in_gluon = needed is not None and name in ON_HOPPER and is_on() and device.type == "cpu" and file is None
        if in_gluon:
            batches = (ON_HOPPER[name],)
        for batch in batches:
            inputs = inputs_of(batch, device, torch.float16 if in_gluon else torch.float32)
            needed = lacking(rung, inputs)
            if needed is None:
                break
        if needed is not None:
            all_right &= file is None  # a file of the reader's is there to be tried
            tell(f"{rung.number:2} {rung.title:65} not run: it needs {needed}")
            continue
        began = time.monotonic()
        try:
            launched = (check_orders if in_gluon else check)(reference, rung, batch, inputs)
        except AssertionError as error:
            all_right = False
            tell(f"{rung.number:2} {rung.title:65} WRONG: {error}")
            continue
        programs = f"   {'; '.join(launched)}" if launched else ""
        tell(f"{rung.number:2} {rung.title:65} right, {time.monotonic() - began:4.1f} s{programs}")
    return all_right


def _sizes(batch: Batch) -> str:
    """Write the sizes of a batch: a reader predicts the programs of a launch from them."""
    others = (f"{name} {size}" for name, size in asdict(batch).items() if name not in ("lens", "rows"))
    lens = ", ".join(f"{queries} of {keys}" for queries, keys in batch.lens)
    return f"   new tokens of all: {lens}; {', '.join(others)}"


def check(reference: Rung, rung: Rung, batch: Batch, inputs: dict[str, Any]) -> list[str]:
    """Hold a rung to the formula on a batch; return its launches, as the interpreter had them.

    Args:
        reference: the formula.
        rung: the rung, or a file of the reader's.
        batch: the batch.
        inputs: its inputs.

    Raises:
        AssertionError: if its output is wrong, or no tensor.
    """
    dtype = inputs["query"].dtype
    wide = {x: y.double() if torch.is_tensor(y) and y.dtype == dtype else y for x, y in inputs.items()}
    wider, same, call = (call_of(one, batch, x) for one, x in ((reference, wide), (reference, inputs), (rung, inputs)))
    goes_on = batch.changes and "cursors" not in inputs  # a second step reads the states that the first one left
    for _ in range(2 if goes_on else 1):
        with computing_in(dtype):
            low = same()
        with _launches() as launched:
            out = call()
        assert isinstance(out, torch.Tensor), f"out: expected a tensor, got {type(out).__name__}"
        tolerance.assert_close(out, wider(), low)
    return launched


def check_orders(reference: Rung, rung: Rung, batch: Batch, inputs: dict[str, Any]) -> list[str]:
    """Check a rung that launches kernels in Gluon, as `check`, in several orders of its warpgroups."""
    from twinattn.course.gluon.interpret import hopper_on_a_cpu

    for seed in range(ORDERS):
        with hopper_on_a_cpu(seed) as kernels:
            check(reference, rung, batch, inputs)
        assert any(kernel.launched for kernel in kernels), "no kernel for Hopper was launched"
    return [f"{one} in Gluon, in {ORDERS} orders" for kernel in kernels for one in kernel.launched]


def check_own(own: Path, results: Path | None, can_run: bool) -> None:
    """Check a file of the reader's, and that no times of it are asked for.

    Raises:
        ValueError: naming what does not fit.
    """
    if results is not None:
        raise ValueError(f"json: expected none with --file, of which nothing is measured, got {results}")
    if not own.is_file():
        raise ValueError(f"file: expected a rung, got {own}, which is not there")
    if own.suffix != ".py":
        raise ValueError(f"file: expected a rung, a file of Python, got {own}")
    if not can_run:
        raise ValueError("file: expected a GPU, or Triton with TRITON_INTERPRET=1, got neither")
    if not callable(getattr(Rung(0, own.stem, own.name, own).load(), "attention", None)):
        raise ValueError(f"file: expected a rung with a function attention, got {own}, which has none")


@contextmanager
def _launches() -> Iterator[list[str]]:
    """List the launches of a call: the name of each kernel, and its programs."""
    launched: list[str] = []
    if not is_on():
        yield launched
        return
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def listed(self: Any, *args: Any, **kwargs: Any) -> Any:
        grid = [self.grid] if isinstance(self.grid, int) else [] if callable(self.grid) else list(self.grid)
        launched.append(f"{self.fn.__name__} {' x '.join(map(str, grid))}".strip())
        return run(self, *args, **kwargs)

    GridExecutor.__call__ = listed
    try:
        yield launched
    finally:
        GridExecutor.__call__ = run
