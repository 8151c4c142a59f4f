"""Launch our GPU kernels on a GPU that is not there: `python tests/compile_kernels.py 9.0` says what each one takes.

Triton is told of a GPU whose launches do nothing. So everything up to the launch runs as it would: the choice of its
shape, the compiler, and ptxas. Values are never computed.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastattn.kernels import Options, Subtraction, machine
from fastattn.metadata import make_batch

SHARED_MEMORY = {(8, 9): 101376, (9, 0): 232448}  # bytes that a program may have


class Launcher:
    """What Triton makes of a compiled kernel, and calls to launch it."""

    def __init__(self, source, metadata):
        name = f"{source.fn.__module__}.{source.fn.__name__}"
        self.about = {"kernel": name, "threads": 32 * metadata.num_warps}
        Utils.launcher = self

    def __call__(self, *args, **kwargs):
        sys.stdout.write(json.dumps(self.about) + "\n")


class Utils:
    launcher = None

    def load_binary(self, name, binary, shared, device):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        self.launcher.about["registers"] = registers
        return 1, 1, registers, 0, 1024  # module, function, registers, bytes of spills, most threads

    def get_device_properties(self, device):
        return {"max_shared_mem": machine.shared_memory(device), "max_num_regs": 65536, "warpSize": 32}


class Driver:
    """A GPU of some compute capability."""

    utils = Utils()
    launcher_cls = Launcher

    def __init__(self, capability):
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def launch_all(capability):
    machine.capability = lambda device: capability
    machine.num_multiprocessors = lambda device: 100
    machine.shared_memory = lambda device: SHARED_MEMORY[capability]
    driver.set_active(Driver(capability))

    from fastattn.kernels import (
        triton_adapt,
        triton_attention,
        triton_cache,
        triton_differential,
        triton_merge,
        triton_tables,
    )

    def batch(query_len, seq_len=1024, num_seqs=2):
        tables = [list(range(seq_len // 16))] * num_seqs
        return make_batch([query_len] * num_seqs, [seq_len] * num_seqs, tables)

    def pool(heads, head_size, dtype):
        return torch.zeros(64, 16, heads, head_size, dtype=dtype)

    half = torch.bfloat16
    query, cache = torch.zeros(64, 32, 128, dtype=half), pool(8, 128, half)  # first a cascade of 64 decodes
    prefix, own = make_batch([64], [8192], [[0] * 512]), batch(1, 256, num_seqs=64)
    triton_attention.attend_levels(query, cache, cache, [(prefix, Options(causal=False)), (own, Options())])
    for dtype, head_size, query_len in ((half, 64, 1), (half, 64, 512), (half, 256, 512), (torch.float32, 256, 512)):
        query = torch.zeros(2 * query_len, 8, head_size, dtype=dtype)
        cache = pool(2, head_size, dtype)
        triton_attention.attend(query, cache, cache, batch(query_len), Options())
    query, cache = torch.zeros(128, 8, 128, dtype=half), pool(2, 128, half)
    for options in (
        Options(batch_invariant=True),
        Options(window_size=(100, 0), softcap=5.0, alibi_slopes=torch.ones(8), sinks=torch.ones(8)),
    ):
        triton_attention.attend(query, cache, cache, batch(64), options)
    at = torch.arange(128, dtype=torch.int32)
    triton_attention.attend(query, cache, cache, batch(64), Options(positions=at), chunk_size=128)
    mask = torch.ones(128, 64, dtype=torch.bool)
    triton_attention.attend(query, cache, cache, batch(64), Options(), last_mask=mask)
    triton_attention.repair(query, query, cache, cache, batch(64), Options())

    lambda_full, weight = torch.tensor(0.5), torch.ones(128)
    not_causal = Options(causal=False, sinks=torch.ones(64))
    many = Options(softcap=5.0, window_size=(100, 0), positions=torch.arange(8192, dtype=torch.int32))
    for query_len, options in ((1, Options()), (4096, Options()), (4096, many), (4096, not_causal)):
        query = torch.zeros(2 * query_len, 64, 64, dtype=half)
        cache = torch.zeros(2, 2, 64, 16, 16, 64, dtype=half)
        subtraction = Subtraction(lambda_full, weight, 1e-5, 0.2)
        triton_differential.attend(query, cache, batch(query_len, 4096), options, subtraction)

    cache, tokens = pool(2, 128, half), torch.zeros(5, 2, 128, dtype=half)
    triton_cache.write(tokens, tokens, cache, cache, torch.arange(5))
    triton_cache.copy_blocks(cache, torch.tensor([[0, 1], [2, 3]]))
    triton_cache.repage(cache, batch(64), block_size=128)
    for options in (Options(), Options(sinks=torch.ones(8))):
        triton_adapt.adapt(torch.zeros(128, 8, 64, dtype=half), torch.zeros(8, 128), batch(64), options)
    triton_merge.merge_states([torch.zeros(5, 8, 128, dtype=half)] * 3, [torch.zeros(5, 8)] * 3)
    triton_tables.slot_mapping(batch(1), 2, block_size=16)
    triton_tables.cut_chunks(batch(64), 128, block_size=16, num_chunks=2, columns=8)
    triton_tables.trim(batch(64), 100, block_size=16, columns=12)


if __name__ == "__main__":
    launch_all(tuple(int(number) for number in sys.argv[1].split(".")))
