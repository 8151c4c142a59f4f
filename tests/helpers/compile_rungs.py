"""Compile the rungs of a ladder on a GPU that is not there: `python -m tests.helpers.compile_rungs prefill sm_90`.

Each is called with the first timed batch of its ladder, whose sequences are shorter here. With a third argument, a
file, what the compiler says is written there; docs/results/ladder/compiled has what the page of a ladder shows.
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


def compiled(rung, batch, gpu):
    """Return the registers, spills and shared memory of the first kernel of a rung, as compiled."""
    module = rung.load()
    if hasattr(module, "missing"):
        module.missing = lambda device: None
    for name, attend in AS_ON_A_GPU.items():
        if hasattr(module, name):
            getattr(module, name).attention = attend
    said = io.StringIO()
    with redirect_stdout(said), to_the_end():
        ladder._call(rung, batch, batch.make_inputs(torch.device("cpu")))()
    about = json.loads(said.getvalue().splitlines()[0])
    registers, shared, warps = about["registers"], about["shared"], about["threads"] // 32
    found = {"registers": registers, "spills": about["spilled"], "shared_bytes": shared, "warps": warps}
    return found | {"programs_per_sm": ladder.programs_that_fit(registers, warps, shared, *SM[gpu])}


def attend_to_pages(query, key_cache, value_cache, plan, options):
    """Attend as `chunked_prefill` does where it finds a GPU."""
    from fastattn.kernels.triton.attention import attend_levels

    return attend_levels(query, key_cache, value_cache, [plan], options)[0]


def attend_to_latents(query, cache, plan, options, *, latent_rank, cache_scale=1.0):
    """Attend as `mla` does where it finds a GPU."""
    from fastattn.kernels.triton.attention import bind_attend

    return bind_attend(query, latents_of(cache, latent_rank, cache_scale), plan, options, None, False)[0]


AS_ON_A_GPU = {"chunked_prefill": attend_to_pages, "mla": attend_to_latents}  # paths that rungs call, by module


def shortened(batch):
    """Return a batch with shorter sequences."""
    return replace(batch, lens=tuple((min(queries, SHORT), min(keys, SHORT)) for queries, keys in batch.lens))


def compile_all(name, gpu):
    """Return the same of each rung with a kernel, by name."""
    pretend(GPUS[gpu])
    batch = shortened(next(iter(BATCHES[name].values())))
    return {rung.name: compiled(rung, batch, gpu) for rung in ladder.rungs(name) if not rung.synchronizes}


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
