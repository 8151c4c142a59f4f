"""Launch our GPU kernels on a GPU that is not there: `python -m tests.helpers.compile_kernels sm_90`.

Every launch of every kernel takes two minutes for a GPU. With `--largest`, of attention with more than 16 rows in a
tile only what needs most memory is compiled, heads of 256 elements and more; and of decodes, trees and pairs some.

Triton sees a GPU whose launches do nothing. So everything up to the launch runs as it would: the choice of its
shape and the compiler, up to where it knows how much shared memory a program takes. Decodes are compiled to the end, as
their registers decide how many programs run at once. Values are never computed, and nothing is kept on disk.
"""

import json
import os
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from triton import knobs
from triton._C.libtriton import passes
from triton.backends.amd import compiler as amd
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver

from fastattn import recurrent as twin
from fastattn import speculative
from fastattn.kernels import device as devices
from fastattn.kernels.problem import Subtraction
from fastattn.metadata import make_batch
from refattn.four_bits import Int4Pages, Int4Scales
from refattn.keys import Latents, PackedLatents
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers import machine_code


class Gpu(NamedTuple):
    """A GPU as Triton knows it, its compute capability, and the bytes of shared memory that a program may have.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 163, 227 and 99 KiB; LDS of a
    workgroup: AMD, "CDNA 3 ISA" (64 KiB) and "CDNA 4 ISA" (160 KiB).
    """

    target: GPUTarget
    capability: tuple[int, int]
    shared_memory: int


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), (8, 0), 163 * 1024),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), (9, 0), 227 * 1024),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), (10, 0), 227 * 1024),
    "sm_120": Gpu(GPUTarget("cuda", 120, 32), (12, 0), 99 * 1024),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), (0, 0), 64 * 1024),
    "gfx950": Gpu(GPUTarget("hip", "gfx950", 64), (0, 0), 160 * 1024),
}


class Done(Exception):
    """The compiler knows what it was asked for."""


class Translator:
    """Triton's module of LLVM, which ends a compilation where MLIR becomes LLVM's own code, unless it is to go on."""

    to_the_end = False

    def __init__(self, llvm):
        self.llvm = llvm

    def __getattr__(self, name):
        return getattr(self.llvm, name)

    def to_module(self, *arguments):
        if not Translator.to_the_end:
            raise Done
        return self.llvm.to_module(*arguments)


@contextmanager
def to_the_end():
    """Compile what is launched here to the end, and count its registers."""
    Translator.to_the_end = True
    yield
    Translator.to_the_end = False


AFTER_LAYOUT = {
    passes.common: ("add_canonicalizer", "add_cse", "add_symbol_dce"),
    passes.convert: ("add_nvvm_to_llvm",),
    nvidia.nvidia.passes.ttnvgpuir: ("add_nvgpu_to_llvm", "add_warp_specialize_to_llvm"),
}


@contextmanager
def unfinished():
    """Leave out what tidies the code up, and what comes behind the last pass that lays out memory."""
    with ExitStack() as stack:
        for kind, names in AFTER_LAYOUT.items():
            stack.enter_context(mock.patch.multiple(kind, **dict.fromkeys(names, lambda *_: None)))
        yield


def cut_short(backend=None, stages=None, options=None, language=None, capability=None):
    """Stop the compiler where shared memory is laid out; a hook of Triton's."""
    if backend is None:
        return "", ""
    whole = stages["llir"]

    def lay_out(module, metadata):
        try:
            with nullcontext() if Translator.to_the_end else unfinished():
                return whole(module, metadata)
        except Done:
            metadata.update(shared=module.get_int_attr("ttg.shared"), name="")
            metadata["tmem_size"] = module.get_int_attr("ttg.tensor_memory_size")
            for kind in ("global", "profile"):
                metadata |= {f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1}
            return ""

    stages["llir"] = lay_out
    for name in ("ptx", "cubin", "amdgcn", "hsaco"):
        if name in stages:
            stages[name] = after_llvm(stages[name], b"" if name in ("cubin", "hsaco") else "")


def after_llvm(stage, nothing):
    """Pass on nothing where nothing comes."""
    return lambda code, metadata: stage(code, metadata) if code else nothing


def name_of(source, at):
    """Return the name of an argument of a kernel, or of one of its fields."""
    kind, name = source.signature[source.fn.arg_names[at[0]]], source.fn.arg_names[at[0]]
    for place in at[1:]:
        name += f".{kind._fields[place]}" if hasattr(kind, "_fields") else f"[{place}]"
        kind = kind[place]
    return name


def forgotten(source):
    """Name the constants that Triton 3.6 forgets behind an `if`, as no tuple around theirs has one of its own."""
    paths = list(source.constants)

    def has_own(tuple_at):
        return any(at[:-1] == tuple_at for at in paths)

    return [name_of(source, at) for at in paths if not all(has_own(at[:end]) for end in range(1, len(at) - 1))]


class Launcher:
    """What Triton makes of a compiled kernel, and calls to launch it."""

    def __init__(self, source, metadata):
        name = f"{source.fn.__module__}.{source.fn.__name__}"
        fixed = {name_of(source, at): value for at, value in source.constants.items()}
        tile = {
            x: fixed[x]
            for x in ("BLOCK_M", "TILE.ROWS", "TILE.KEYS", "keys.HEAD_SIZE", "mask.WORDS", "keys.KIND")
            if x in fixed
        }
        self.about = {"kernel": name, "threads": metadata.num_warps * Driver.gpu.target.warp_size, "tile": tile}
        self.about |= {"shared": metadata.shared, "room": Driver.gpu.shared_memory}
        self.about["forgotten"] = forgotten(source)
        self.about["early"] = getattr(metadata, "launch_pdl", False)
        self.about["columns"] = getattr(metadata, "tmem_size", None) or 0
        Utils.launcher = self

    def __call__(self, *args, **kwargs):
        sys.stdout.write(json.dumps(self.about) + "\n")


class Utils:
    launcher = None

    def load_binary(self, name, binary, shared, device):
        if binary:
            self.launcher.about |= (
                machine_code.usage_on_amd(binary) if Driver.gpu.target.backend == "hip" else machine_code.usage(binary)
            )
            if "_hopper." in self.launcher.about["kernel"]:
                code = machine_code.disassemble(binary)
                loops = machine_code.loops_of_products(code)
                self.launcher.about["in_flight"] = [machine_code.touched_in_flight(loop) for loop in loops]
                self.launcher.about["waits"] = any("ACQBULK" in line for line in code)  # for the launch before
        return 1, 1, 0, 0, 1024  # module, function, registers, bytes of spills, most threads

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**30, "max_num_regs": 65536, "warpSize": Driver.gpu.target.warp_size}


class Driver:
    """The driver of a GPU that is not there."""

    gpu: Gpu
    utils = Utils()
    launcher_cls = Launcher

    def get_current_target(self):
        return Driver.gpu.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def pretend(gpu):
    """Make Triton and our kernels take a GPU for present that is not."""
    Driver.gpu = gpu
    devices.is_rocm = lambda: gpu.target.backend == "hip"
    devices.capability = lambda device: gpu.capability
    devices.num_sms = lambda device: 100
    devices.shared_memory = lambda device: gpu.shared_memory
    nvidia.llvm, amd.llvm = Translator(nvidia.llvm), Translator(amd.llvm)
    knobs.runtime.add_stages_inspection_hook = cut_short
    knobs.compilation.disable_line_info = True  # only a debugger reads it
    driver.set_active(Driver())


def launch_all(gpu, largest):
    pretend(gpu)
    from fastattn.kernels.flash.fixup import fix_up
    from fastattn.kernels.flash.recompute import attend_after, attend_to_latent_nodes, attend_to_nodes, recompute
    from fastattn.kernels.flash.slots import slots_in_pool
    from fastattn.kernels.triton import (
        attention,
        cache,
        differential,
        four_bits,
        index_keys,
        merge,
        metadata,
        quantized,
        sparse,
        turned_rows,
    )
    from fastattn.kernels.triton.expand import repage, round_queries
    from fastattn.kernels.triton.quantized import quantize_query
    from twinattn.engine.kernels import fused_layers, sampling

    attend_levels = attention.attend_levels

    def attend_one(query, key, value, plan, options, **asked):
        attention.attend_levels(query, key, value, [plan], options, **asked)

    if largest:

        def attend_if_largest(query, key, value, levels, *options, tree=None, **asked):
            rows = levels[-1].batch.max_query_len * (query.shape[1] // key.shape[-2])
            if rows <= 16 or query.shape[2] >= 256:
                return attend_levels(query, key, value, levels, *options, tree=tree, **asked)
            return query, query, None

        attention.attend_levels = attend_if_largest
        # The same kernel for heads of 128 elements, and over latents with the tile of the trees below.
        recompute = attend_to_nodes = attend_to_latent_nodes = lambda *_: None

    def some(*cases, last=1):
        """Return all cases of a loop, or of the largest launches the last ones."""
        return cases[-last:] if largest else cases

    def batch(query_len, seq_len=1024, num_seqs=2):
        blocks = [list(range(seq_len // 16))] * num_seqs
        return make_batch([query_len] * num_seqs, [seq_len] * num_seqs, blocks)

    def plan(query_len, seq_len=1024, num_seqs=2, **asked):
        return Plan(batch(query_len, seq_len, num_seqs), 16, **asked)

    def pool(heads, head_size, dtype):
        return torch.zeros(64, 16, heads, head_size, dtype=dtype)

    half, plain = torch.bfloat16, AttentionOptions()
    query, keys = torch.zeros(64, 32, 128, dtype=half), pool(8, 128, half)  # first a cascade of 64 decodes
    prefix = Plan(make_batch([64], [8192], [[0] * 512]), 16, causal=False)
    with to_the_end():
        attention.attend_levels(query, keys, keys, [prefix, plan(1, 256, num_seqs=64)], plain)
        # Decodes, of products of 8 rows and of 16.
        for head_size, query_len in some((64, 1), (128, 1), (128, 4), (256, 1)):
            query, keys = torch.zeros(2 * query_len, 8, head_size, dtype=half), pool(2, head_size, half)
            attend_one(query, keys, keys, plan(query_len), plain)
        query, keys = torch.zeros(2, 8, 128, dtype=half), pool(2, 128, torch.uint8)
        attend_one(query, keys, quantized.in_pairs(keys), plan(1), plain, quantization=quantized.Quantization("e4m3"))
        query, keys, scales = torch.zeros(2, 8, 128, dtype=half), pool(2, 64, torch.uint8), torch.ones(64, 16, 2)
        of_int4 = four_bits.int4_quantization(Int4Scales(scales, scales))
        attend_one(query, keys, keys, plan(1), plain, quantization=of_int4)
        for dtype in some(half, torch.float16):  # two KV heads per program
            pages = Int4Pages(keys, keys.clone(), Int4Scales(scales, scales))
            attention.attend_to_keys(query.to(dtype), pages, plan(1), plain, None)
        query, keys = torch.zeros(2, 16, 512 + 64, dtype=half), pool(1, 512 + 64, half)
        attend_one(query, keys, keys[..., :512], plan(1), plain, shared=True)
        # Latents, a tile of 64 rows over pages of as many tokens.
        query, keys = torch.zeros(2, 128, 512 + 64, dtype=half), torch.zeros(16, 64, 1, 512 + 64, dtype=torch.uint8)
        decodes = Plan(make_batch([1] * 2, [1024] * 2, [list(range(16))] * 2), 64)
        of_latents = dict(shared=True, quantization=quantized.Quantization("e4m3", (1.0, 0.5, 0.5)))
        attend_one(query, keys, keys[..., :512], decodes, plain, **of_latents)
        packed = PackedLatents(torch.zeros(16, 64, 656, dtype=torch.uint8), 512)
        attention.attend_to_keys(query, packed, decodes, AttentionOptions(softmax_scale=0.1), None)
        # Prompts of more tiles than there are processors, by warps with roles: in pages, and in a window; keys of 192.
        if gpu.capability == (9, 0):
            query, keys = torch.zeros(2048, 32, 128, dtype=half), pool(8, 128, half)
            attend_levels(query, keys, keys, [plan(1024)], plain)
            rows = torch.zeros(2048, 8, 128, dtype=half)
            prompts = Plan(make_batch([1024] * 2, [1024] * 2), window_size=(100, 0))
            attend_levels(query, rows, rows, [prompts], AttentionOptions(sinks=torch.zeros(32)))
            query, values = torch.zeros(2048, 16, 192, dtype=half), torch.zeros(2048, 16, 128, dtype=half)
            attend_levels(query, query, values, [Plan(make_batch([1024] * 2, [1024] * 2))], plain)  # of latents
            launch_pairs_by_roles()
        # A tree of 64 nodes, whose mask has to stay in registers beside a tile of 128 rows.
        query, keys, table = torch.zeros(64, 32, 128, dtype=half), pool(8, 128, half), [list(range(512))]
        trees = speculative.make_trees([[-1, *range(63)]])
        drafts = speculative.plan(make_batch([64], [8192], table), block_size=16, trees=trees)
        attend_levels(query, keys, keys, [drafts.whole], plain, tree=drafts)
        ends = dict(causal=False, first_visible=torch.zeros(2).int(), last_visible=torch.ones(2).int())
        query, keys = torch.zeros(2, 8, 128, dtype=half), pool(2, 128, half)
        attend_one(query, keys, keys, plan(1, **ends), plain)  # a plan of intervals
    for dtype, head_size, query_len in some((half, 64, 512), (half, 256, 512), (torch.float32, 256, 512)):
        query = torch.zeros(2 * query_len, 8, head_size, dtype=dtype)
        keys = pool(2, head_size, dtype)
        attend_one(query, keys, keys, plan(query_len), plain)
    query, keys = torch.zeros(128, 8, 128, dtype=half), pool(2, 128, half)
    attend_one(query, keys, keys, plan(64), AttentionOptions(batch_invariant=True))
    all_of_them = AttentionOptions(softcap=5.0, alibi_slopes=torch.ones(8), sinks=torch.ones(8))
    attend_one(query, keys, keys, plan(64, window_size=(100, 0)), all_of_them)
    at, first_keys = torch.arange(128, dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32)
    attend_one(query, keys, keys, plan(64, positions=at), plain)
    somewhere = plan(64, causal=False, window_size=(100, -1), positions=at, first_keys=first_keys)
    attend_one(query, keys, keys, somewhere, all_of_them)  # a shared level of a cascade
    trimmed = plan(64, window_size=(100, 0), first_keys=first_keys)
    attend_one(query, keys, keys, trimmed, AttentionOptions(batch_invariant=True))  # steps are placed by position
    ends = dict(causal=False, first_visible=at, last_visible=at)
    for head_size in some(128, 256):
        of_rows, of_keys = torch.zeros(128, 8, head_size, dtype=half), pool(2, head_size, half)
        attend_one(of_rows, of_keys, of_keys, plan(64, **ends, first_keys=first_keys), all_of_them)
    after = AttentionOptions(softcap=5.0)
    attend_after(query, keys, keys, plan(64, **ends), after, query.clone(), torch.zeros(128, 8))
    recompute(query, query, keys, keys, plan(64), plain)
    of_keys, of_values = torch.ones(64, 16, 2), torch.ones(2, 128)
    invariant = AttentionOptions(batch_invariant=True)
    for query_len, options, held, value_dtype in (  # products of 16 rows, of 64 and of 128
        (1, plain, quantized.Quantization("e4m3"), torch.uint8),
        (512, plain, quantized.Quantization("e4m3"), torch.uint8),
        (1, plain, quantized.Quantization("e5m2"), torch.uint8),
        (1, plain, quantized.Quantization("int8", key=of_keys, value=of_values), torch.int8),
        (512, plain, quantized.Quantization("int8", key=of_keys, value=of_values), torch.int8),
        (64, invariant, quantized.Quantization("int8", key=of_keys), half),
        (512, plain, four_bits.int4_quantization(Int4Scales(of_keys, of_keys)), torch.uint8),
    ):
        query = torch.zeros(2 * query_len, 8, 128, dtype=half)
        quantized_keys = pool(2, 128, torch.int8 if held.kind == "int8" else torch.uint8)
        values = quantized.in_pairs(pool(2, 128, value_dtype))
        if held.kind == "int4":
            quantized_keys = values = pool(2, 64, torch.uint8)
        attend_one(query, quantized_keys, values, plan(query_len), options, quantization=held)
    held = quantized.Quantization("e4m3", key=torch.ones(2), value=torch.ones(2))
    query, quantized_keys = torch.zeros(64, 32, 128, dtype=half), pool(8, 128, torch.uint8)
    levels = [prefix, plan(1, 256, num_seqs=64)]
    attention.attend_levels(query, quantized_keys, quantized_keys, levels, plain, quantization=held)
    rounded = quantized.Quantization(
        "e4m3", query=torch.ones(2), key=torch.ones(2, 2), value=torch.ones(2), rounds_query=True
    )
    pages = torch.zeros(64, 16, 2, 256, dtype=torch.uint8)
    for kind in (half,) if largest else (half, torch.float32):
        query = torch.zeros(128, 8, 256, dtype=kind)
        attend_one(query, pages, pages, plan(64), all_of_them, quantization=rounded)
    for heads, kind in ((128, ""), (16, "e4m3")):  # over latents and quantized values of them, 64 rows and 16
        query, pages = torch.zeros(2, heads, 512 + 64, dtype=half), pool(1, 512 + 64, torch.uint8 if kind else half)
        value = quantized.in_pairs(pages[..., :512]) if heads == 16 else pages[..., :512]
        attend_one(
            query, pages, value, plan(1), plain, shared=True, quantization=quantized.Quantization(kind, (1.0, 0.5, 0.5))
        )
    for nodes, page in ((65, 16), (130, 128)):  # two words of a mask and three, with the widest steps
        trees = speculative.make_trees([[-1, *range(nodes - 1)]] * 2)
        of_pages = [list(range(1024 // page))] * 2
        drafts = speculative.plan(make_batch([nodes] * 2, [1024] * 2, of_pages), block_size=page, trees=trees)
        query, pages = torch.zeros(2 * nodes, 8, 64, dtype=half), torch.zeros(1024 // page, page, 2, 64, dtype=half)
        attention.attend_levels(query, pages, pages, [drafts.whole], plain, tree=drafts)
    query, pages = torch.zeros(80, 16, 512 + 64, dtype=half), pool(1, 512 + 64, half)  # a chunk over latents
    attend_one(query, pages, pages[..., :512], plan(40), plain, shared=True)
    by_the_root = AttentionOptions(alibi_slopes=torch.ones(8), alibi_sqrt=True)
    attend_one(torch.zeros(2, 8, 128, dtype=half), keys, keys, plan(1), by_the_root)
    drawn = (4, plain, (-1, -1)), (64, plain, (-1, -1)), (96, all_of_them, (100, 0))
    for nodes, tree_options, window_size in some(*drawn):
        trees = speculative.make_trees([[-1, *range(nodes - 1)]] * 2)
        drafts = speculative.plan(batch(nodes), block_size=16, trees=trees, window_size=window_size)
        query = torch.zeros(2 * nodes, 8, 128, dtype=half)
        attention.attend_levels(query, keys, keys, [drafts.whole], tree_options, tree=drafts)
        attend_to_nodes(query, keys, keys, drafts, tree_options, query, torch.zeros(8, 2 * nodes))
        quantization = quantized.Quantization("int8", key=of_keys) if nodes == 64 else quantized.Quantization("e4m3")
        quantized_keys = pool(2, 128, torch.int8 if nodes == 64 else torch.uint8)
        values = quantized.in_pairs(quantized_keys) if nodes == 4 else quantized_keys  # 16 rows
        attention.attend_levels(
            query, quantized_keys, values, [drafts.whole], tree_options, quantization=quantization, tree=drafts
        )
        heads, kinds = (4, ("e4m3", "")) if nodes == 4 else (16, ("",))  # over latents, 16 rows and 64
        query = torch.zeros(2 * nodes, heads, 512 + 64, dtype=half)
        for kind in kinds:
            pages = pool(1, 512 + 64, torch.uint8 if kind else half)
            value = quantized.in_pairs(pages[..., :512]) if kind else pages[..., :512]
            of_latents = dict(shared=True, quantization=quantized.Quantization(kind, (1.0, 0.5, 0.5)), tree=drafts)
            attention.attend_levels(query, pages, value, [drafts.whole], plain, **of_latents)
        numbers, before = pool(1, 512 + 64, half)[:, :, 0], (query[..., :512].clone(), torch.zeros(2 * nodes, heads))
        attend_to_latent_nodes(query, numbers, drafts, plain, 512, before)

    subtraction = Subtraction(torch.tensor(0.5), torch.ones(128), 1e-5, 0.2)
    for query_len, options, asked in some(
        (4096, plain, {}),
        (4096, AttentionOptions(sinks=torch.ones(64)), dict(causal=False)),
        (1, plain, {}),
        (4096, AttentionOptions(softcap=5.0), dict(window_size=(100, 0))),
        last=2,
    ):
        query = torch.zeros(2 * query_len, 64, 64, dtype=half)
        both = torch.zeros(2, 2, 64, 16, 16, 64, dtype=half)
        differential.differential(query, both, plan(query_len, 4096, **asked), options, subtraction)
    query, both = torch.zeros(128, 8, 8, dtype=torch.float32), torch.zeros(2, 2, 64, 16, 2, 8, dtype=torch.float32)
    differential.differential(query, both, plan(64), plain, subtraction)  # steps of narrow heads are no longer

    keys, tokens = pool(2, 128, half), torch.zeros(5, 2, 128, dtype=half)
    cache.write(tokens, tokens, keys, keys, torch.arange(5))
    cache.write(tokens, tokens[..., :0], keys, keys[..., :0], torch.arange(5))  # keys whose values are theirs
    for scales in (Fp8Scales(0.5, torch.ones(2)), Int8Scales(torch.ones(64, 16, 2), torch.ones(2, 128))):
        kind = scales.format if isinstance(scales, Fp8Scales) else torch.int8
        cache.write_quantized(tokens, tokens, pool(2, 128, kind), pool(2, 128, kind), torch.arange(5), scales)
        of_bytes = pool(2, 128, kind)
        no_values = Int8Scales(scales.key, torch.ones(2, 0)) if kind == torch.int8 else scales
        cache.write_quantized(tokens, tokens[..., :0], of_bytes, of_bytes[..., :0], torch.arange(5), no_values)
    half_bytes, scales = pool(2, 64, torch.uint8), torch.ones(64, 16, 2)
    turned_rows.write_int4(tokens, tokens, half_bytes, half_bytes, torch.arange(5), Int4Scales(scales, scales))
    cache.write_packed(torch.zeros(5, 512, dtype=half), torch.zeros(5, 64, dtype=half), packed.cache, torch.arange(5))
    slots_in_pool(batch(1), 1024, step=128)
    cache.copy_blocks(keys, torch.tensor([[0, 1], [2, 3]]))
    repage(keys, batch(64), block_size=128)
    for held, of_pool, of_query in (
        ("e4m3", None, None),
        ("e5m2", torch.ones(2, 2), torch.ones(2)),
        ("int8", of_keys, None),
    ):
        asked = dict(block_size=128, dtype=half, kind=held, scales=of_pool)
        repage(pool(2, 128, torch.int8 if held == "int8" else torch.uint8), batch(64), **asked)
        round_queries(query, plan(64), quantized.Quantization(held, query=of_query))
    for stored in some(torch.float8_e5m2, torch.float8_e4m3fn):
        quantize_query(query, 0.5, stored, stored)
        quantize_query(query, 0.5, stored, torch.float16)
    repage(pool(2, 128, torch.int8), batch(64), block_size=128, dtype=half, kind="int8", scales=of_values)
    accepted = speculative.accept(batch(96), trees, torch.zeros(192).long(), torch.zeros(192).long())
    cache.compact(keys, batch(96), trees, accepted, 16)
    for options in (plain, AttentionOptions(sinks=torch.ones(8))):
        fix_up(torch.zeros(128, 8, 64, dtype=half), torch.zeros(8, 128), plan(64), options)
        fix_up(torch.zeros(128, 8, 512, dtype=half), torch.zeros(8, 128), plan(64), options)
        fix_up(torch.zeros(128, 8, 512, dtype=half), torch.zeros(128, 8).T, plan(64), options)
    for by_lengths in (False, True):  # many tokens, of which a program looks at several hundred
        fix_up(torch.zeros(16384, 8, 64, dtype=half), torch.zeros(8, 16384), plan(64), plain, by_lengths=by_lengths)
    merge.merge([torch.zeros(5, 8, 128, dtype=half)] * 9, [torch.zeros(5, 8)] * 9)
    metadata.slot_mapping(batch(1), 2, block_size=16)
    metadata.cut_chunks(batch(64), 128, block_size=16, num_chunks=2, columns=8)
    metadata.trim(batch(64), 100, block_size=16, columns=12)
    metadata.draw_trees(batch(96), trees, 192)
    for held, kind in some((half, half), (torch.uint8, torch.float8_e4m3fn), (torch.uint8, half), last=2):
        index, size = torch.zeros(64, 16, 132 if held == torch.uint8 else 128, dtype=held), torch.zeros(3, 128)
        index_keys.write_index(size.to(half), index, torch.arange(3))
        of_heads = torch.zeros(2, 64, 128).to(kind), torch.zeros(2, 64)
        scores = index_keys.score_index(*of_heads, index, plan(1))
    index_keys.score_index(*of_heads, index, plan(1, causal=False, first_visible=at, last_visible=at))
    sparse.select(scores, 2048)
    sparse.select(torch.zeros(2, 131072), 2048)  # by their candidates
    for look_up in (sparse.plan_selected, sparse.selected_slots):
        look_up(batch(1), torch.zeros(2, 2048, dtype=torch.int32), block_size=16)
    settings = torch.ones(3, 2, dtype=torch.float64)
    for kind in some(torch.float64, torch.float32, half):
        sampling.sample(torch.zeros(2, 151936, dtype=kind), settings[0], settings[1], settings[2])
    launch_over_states(some)
    launch_over_rings(some)
    launch_over_entries(some)
    for hidden, num_heads, num_kv_heads, head_size in some((1024, 16, 8, 128), (8192, 64, 8, 96)):  # fused layers
        rows, of_hidden = torch.zeros(5, hidden, dtype=half), torch.zeros(hidden, dtype=half)
        of_head = torch.zeros(head_size, dtype=half)
        fused_layers.rms_norm(rows, of_hidden, 1e-6)
        fused_layers.rms_norm(rows, of_hidden, 1e-6, rows)
        qkv = torch.zeros(5, (num_heads + 2 * num_kv_heads) * head_size, dtype=half)
        positions = torch.zeros(2, 5, head_size, dtype=half)
        fused_layers.qk_norm_rope(qkv, num_heads, num_kv_heads, head_size, *positions)
        fused_layers.qk_norm_rope(qkv, num_heads, num_kv_heads, head_size, *positions, of_head, of_head, 1e-6)
        fused_layers.silu_mul(torch.zeros(5, 6 * hidden, dtype=half))


def launch_pairs_by_roles():
    """Launch prompts of differential attention by warps with roles: by rows, with sinks, and by tiles."""
    from fastattn.kernels.triton import differential

    lens, subtraction = [2048] * 2, Subtraction(torch.tensor(0.5), torch.ones(128), 1e-5, 0.2)
    query, sinks = torch.zeros(4096, 32, 64, dtype=torch.bfloat16), AttentionOptions(sinks=torch.zeros(32))
    for size, options, asked in (
        (16, AttentionOptions(), {}),
        (16, sinks, dict(causal=False)),
        (128, AttentionOptions(), {}),
    ):
        tables = [list(range(2048 // size))] * 2
        both = torch.zeros(2, 2, 2048 // size, size, 16, 64, dtype=torch.bfloat16)
        its_plan = Plan(make_batch(lens, lens, tables), size, **asked)
        differential.differential(query, both, its_plan, options, subtraction)


def launch_over_states(some):
    """Launch what layers with a state need: decodes, drafts with checkpoints, prompts by chunks, the convolution.

    And what FlashQLA needs beside its own kernels.
    """
    from fastattn.kernels.flash.states import gather_states, lengths_of, scatter_states
    from fastattn.kernels.triton import convolution, recurrent

    half, indices = torch.bfloat16, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    kept = dict(checkpoint_indices=torch.full((2, 64), -1, dtype=torch.int32), block_size=64)
    for dtype, head_size, query_len, drafts, per_channel, delta in some(
        (half, 128, 1, False, False, True),
        (half, 128, 2, True, True, True),
        (half, 128, 512, False, False, False),
        (half, 128, 512, False, True, True),
        (torch.float32, 256, 512, False, False, True),
        (torch.float32, 256, 512, False, True, True),
        (half, 128, 512, False, False, True),
        last=2,
    ):
        batch = make_batch([query_len] * 2, [1024] * 2)
        plan = twin.plan(batch, state_indices=indices if drafts else indices[:, 0], **kept)
        query = torch.zeros(2 * query_len, 4, head_size, dtype=dtype)
        value = torch.zeros(2 * query_len, 16, head_size, dtype=dtype)
        decay = torch.zeros(2 * query_len, 16, *([head_size] if per_channel else []))
        states, options = torch.zeros(8, 16, head_size, head_size), RecurrentOptions(delta=delta)
        recurrent.recurrent(
            query, query, value, decay, decay.view(2 * query_len, 16, -1)[..., 0], states, plan, options, None
        )
        inputs, weight = torch.zeros(2 * query_len, 512, dtype=dtype), torch.zeros(512, 4, dtype=dtype)
        convolution.convolve(inputs, weight, torch.zeros(8, 3, 512), plan, weight[:, 0], True, None)
        if not drafts and head_size == 128:
            before = gather_states(states, plan, 2 * query_len)
            scatter_states(before, states, value, plan)
            lengths_of(batch.cu_seqlens_q, 2 * query_len, chunk=64, part=1024)
    batch = make_batch([1] * 2, [1024] * 2)
    plan, query = twin.plan(batch, state_indices=indices[:, 0]), torch.zeros(2, 8, 128, dtype=half)
    with to_the_end():
        recurrent.recurrent(
            query,
            query,
            query,
            query[..., 0],
            query[..., 0],
            torch.zeros(8, 8, 128, 128),
            plan,
            RecurrentOptions(),
            None,
        )
        if devices.capability(None) == (9, 0):  # prompts by warps with roles, with one consumer and with two
            for num_seqs in 1, 8:
                query = torch.zeros(64 * num_seqs, 16, 128, dtype=half)
                gates, pool = torch.zeros(64 * num_seqs, 16), torch.zeros(num_seqs, 16, 128, 128)
                batch = make_batch([64] * num_seqs, [64] * num_seqs)
                plan = twin.plan(batch, state_indices=torch.arange(num_seqs, dtype=torch.int32))
                recurrent.recurrent(query, query, query, gates, gates, pool, plan, RecurrentOptions(), None)


def launch_over_rings(some):
    """Launch what layers that replay their inputs need: decodes that flush, drafts, a flush; decodes to the end."""
    from fastattn import replay as path
    from fastattn.kernels.triton import replay

    half, indices = torch.bfloat16, torch.tensor([1, 2], dtype=torch.int32)
    cursors, states = path.allocate_cursors(8), torch.zeros(8, 16, 128, 128)
    for query_len, drafts, per_channel, delta in some(
        (1, False, False, False), (3, True, True, True), (1, False, False, True), last=2
    ):
        batch, tokens = make_batch([query_len] * 2, [1024] * 2), 2 * query_len
        flush = None if drafts else torch.tensor([False, True])
        plan = path.plan(batch, state_indices=indices, cursors=cursors, ring_size=8, flush=flush, drafts=drafts)
        ring = path.allocate(8, 8, 4, 16, 128, 128, per_channel=per_channel, dtype=half)
        query, value = (torch.zeros(tokens, heads, 128, dtype=half) for heads in (4, 16))
        gates = torch.zeros(tokens, 16, *([128] if per_channel else [])), torch.zeros(tokens, 16)
        with nullcontext() if drafts else to_the_end():
            replay.replay(query, query, value, *gates, states, ring, plan, RecurrentOptions(delta=delta), None)
    replay.flush(states, ring, plan)


def launch_over_entries(some):
    """Launch what compressed keys need: entries with and without overlap, attention to keys without rotary parts.

    These are also fp8. On Hopper attention to both sets of keys is one launch: of decodes, whose keys are split, and of
    prompts.
    """
    from fastattn import compressed as path
    from fastattn.kernels.triton import attention, compressed, quantized
    from fastattn.kernels.triton.compressed_hopper import attend_compressed

    of_fp8 = quantized.Quantization("e4m3", (1.0, 0.5, 0.5))
    half, table = torch.bfloat16, torch.zeros(2, 64, dtype=torch.int32)
    for ratio, overlap, query_len in some((128, False, 512), (4, True, 1), last=2):
        batch = make_batch([query_len] * 2, [1024] * 2, [list(range(64))] * 2)
        sizes = dict(ratio=ratio, overlap=overlap, window_size=(127, 0), block_size=16, entry_block_size=16)
        plan = path.plan(batch, entry_table=table, **sizes)
        width = 1024 if overlap else 512
        rows, bias = torch.zeros(64, 16, 2 * width, dtype=half), torch.zeros(ratio, width)
        compressed.compress(rows, bias, plan)
        query, pool = torch.zeros(2 * query_len, 64, 512, dtype=half), torch.zeros(64, 16, 1, 512, dtype=half)
        options = AttentionOptions(softmax_scale=0.04)
        for its_plan in (plan.window, plan.entries):
            attention.attend_levels(query, pool, pool, [its_plan], options, shared=True)
            stored = torch.zeros(64, 16, 1, 512, dtype=torch.uint8)
            attention.attend_levels(query, stored, stored, [its_plan], options, shared=True, quantization=of_fp8)
        if devices.capability(None) == (9, 0):
            options = AttentionOptions(softmax_scale=0.04, sinks=torch.zeros(64))
            in_fp8 = stored[:, :, 0].view(torch.float8_e4m3fn)
            for keys, scale in ((pool[:, :, 0], 1.0), (in_fp8, 0.5)):
                both = Latents(keys, 512, scale), Latents(keys, 512, 1.0)
                with to_the_end():
                    attend_compressed(query, *both, plan, options, None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as nowhere:
        os.environ["TRITON_CACHE_DIR"] = nowhere
        launch_all(GPUS[sys.argv[1]], "--largest" in sys.argv)
