"""Compile the rungs of a ladder on a GPU that is not there: `python -m tests.helpers.compile_rungs prefill sm_90`.

Each is called with the first timed batch that has its arguments, whose sequences are shorter here. With a third
argument, a file, what the compiler says is written there; docs/results/ladder/compiled has what the page of a ladder
shows.
"""

import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
import triton

from refattn.keys import latents_of
from tests.helpers.compile_kernels import GPUS, pretend, to_the_end
from twinattn.bench.measure import circumstances
from twinattn.course import ladder
from twinattn.course.batches import BATCHES

SHORT = 2048  # keys of a sequence, at most: nothing is computed, but memory is allocated
# Shared memory and threads of an SM: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SM = {"sm_90": (228 * 1024, 2048)}


def compiled(rung, batch, inputs, gpu):
    """Return the registers, spills and shared memory of a rung's kernel, the first one by name, as compiled."""
    module = rung.load()
    if hasattr(module, "missing"):
        module.missing = lambda device: None
    for name, attend in AS_ON_A_GPU.items():
        if hasattr(module, name):
            getattr(module, name).attention = attend
    said = io.StringIO()
    with redirect_stdout(said), to_the_end():
        ladder.call_of(rung, batch, inputs)()
    launched = (json.loads(line) for line in said.getvalue().splitlines())
    about = min(launched, key=lambda one: one["kernel"].rpartition(".")[2])
    registers, shared, warps = about["registers"], about["shared"], about["threads"] // 32
    spills = about["spilled"] // 4  # in words, as Triton's driver counts them
    found = {"registers": registers, "spills": spills, "shared_bytes": shared, "warps": warps}
    return found | {"programs_per_sm": ladder.programs_that_fit(registers, warps, shared, *SM[gpu])}


def attend_to_pages(query, key_cache, value_cache, plan, options):
    """Attend as `chunked_prefill` does where it finds a GPU."""
    from fastattn.kernels.triton.attention import attend_levels

    return attend_levels(query, key_cache, value_cache, [plan], options)[0]


def attend_to_latents(query, cache, plan, options, *, latent_rank, cache_scale=1.0):
    """Attend as `mla` does where it finds a GPU."""
    from fastattn.kernels.triton.attention import bind_attend

    return bind_attend(query, latents_of(cache, latent_rank, cache_scale), plan, options, None, False)[0]


def fold(*tensors_and_plan):
    """Fold tokens into states as `recurrent` does where it finds a GPU."""
    from fastattn.kernels.triton.recurrent import recurrent

    return recurrent(*tensors_and_plan, None)


def fold_replayed(*tensors_and_plan):
    """Fold tokens into states as `replay` does where it finds a GPU."""
    from fastattn.kernels.triton.replay import replay

    return replay(*tensors_and_plan, None)


AS_ON_A_GPU = {  # paths that rungs call, by module
    "chunked_prefill": attend_to_pages,
    "mla": attend_to_latents,
    "recurrent": fold,
    "replay": fold_replayed,
}


def shortened(batch):
    """Return a batch with shorter sequences."""
    return replace(batch, lens=tuple((min(queries, SHORT), min(keys, SHORT)) for queries, keys in batch.lens))


def compile_all(name, gpu):
    """Return the same of each rung with a kernel, by name: for the first batch that has its arguments."""
    pretend(GPUS[gpu])
    found, waiting = {}, [rung for rung in ladder.rungs(name) if not rung.synchronizes]
    for batch in map(shortened, BATCHES[name].values()):
        inputs = batch.make_inputs(torch.device("cpu"))
        found |= {rung.name: compiled(rung, batch, inputs, gpu) for rung in waiting if not ladder.lacking(rung, inputs)}
        waiting = [rung for rung in waiting if rung.name not in found]
        if not waiting:
            break
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as nowhere:
        os.environ["TRITON_CACHE_DIR"] = nowhere
        name, gpu, *results = sys.argv[1:]
        found = {"ladder": name, "gpu": gpu, "date": circumstances()["date"]}
        found |= {"versions": {"triton": triton.__version__}, "rungs": compile_all(name, gpu)}
        text = json.dumps(found, indent=1) + "\n"
        if results:
            Path(results[0]).write_text(text)
        sys.stdout.write(text)
