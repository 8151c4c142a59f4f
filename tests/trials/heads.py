"""Calls to time: prompts with keys of 192 and values of 128, and prompts over caches of 8 bits, by our own kernels.

`CASES` has a function per call. It draws the inputs and returns the call and a check of its result, which says how far
a sample of the outputs is from the right ones, or None. The first of each kind are rows of the benchmark; the others
are chunks after a long context, short prompts, ragged batches, and calls near the limits of the rules that choose.
"""

from collections.abc import Callable
from functools import partial

import torch

from twinattn.bench.contender import twin
from twinattn.bench.work import Attention, Inputs, WrongAnswerError, latent_prefill, workload

Case = tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], Callable[[tuple[torch.Tensor, torch.Tensor]], str | None]]

RAGGED = ((1000, 1000), (3001, 5003), (1, 700), (257, 257), (130, 4100))
WIDE = dict(heads=(16, 16), head_size=192, value_head_size=128, path="varlen")


def poison(inputs: Inputs) -> None:
    """Write NaN into the places of blocks that no sequence has; of int8 keys into their scales."""
    table, block_size = inputs.batch.block_table, inputs.key_cache.shape[1]
    assert table is not None
    for blocks, (_, seq_len) in zip(table.tolist(), inputs.work.lens, strict=True):
        past = seq_len % block_size
        if not past:
            continue
        last = blocks[seq_len // block_size]
        for pool in (inputs.key_cache, inputs.value_cache):
            pool[last, past:] = 0x7F if pool.itemsize == 1 else torch.nan  # NaN in fp8
        if inputs.work.stored == "int8":
            inputs.scales.key[last, past:] = torch.nan


def case(work: Attention, kernel: str = "triton", device: str = "cuda") -> Case:
    """Draw the inputs of a workload; return the call by a kernel, and the check of its result."""
    inputs = work.draw(torch.device(device), torch.bfloat16 if device == "cuda" else torch.float16, 0)
    poison(inputs)
    judge = work.judge(inputs)
    call = partial(twin(kernel=kernel).prepare(inputs), return_lse=True)

    def check(result: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        out, lse = result
        try:
            judge(out.clone(), lse)
        except WrongAnswerError as error:
            return str(error)
        return None

    return call, check


def _over_8_bits(lens: tuple[tuple[int, int], ...], stored: str) -> Attention:
    return workload(lens, path="quantized", stored=stored)


def _works() -> dict[str, Attention]:
    """Name the workloads."""
    chunks = ((512, 16384 + 512),) * 4
    works = {
        "mla/prefill-2x8192-of-8192": latent_prefill(((8192, 8192),) * 2),
        "mla/prefill-2x1024-of-33792": latent_prefill(((1024, 32768 + 1024),) * 2),
        "mla/chunk-4x512-of-16896": latent_prefill(chunks),
        "mla/prefill-1x768": latent_prefill(((768, 768),)),  # 96 tiles: tuned for 64 rows, it would be split
        "mla/prefill-16x512": latent_prefill(((512, 512),) * 16),
        "mla/ragged": latent_prefill(RAGGED),
        "varlen/prefill-2x8192-heads-192-128": workload(((8192, 8192),) * 2, **WIDE),
        "varlen/chunk-4x512-of-16896-heads-192-128": workload(chunks, **WIDE),
    }
    for stored, name in (("e4m3", "fp8"), ("int8", "int8")):
        works |= {
            f"quantized/prefill-2x8192-{name}": _over_8_bits(((8192, 8192),) * 2, stored),
            f"quantized/chunk-4x512-of-16896-{name}": _over_8_bits(chunks, stored),
            f"quantized/prefill-16x512-{name}": _over_8_bits(((512, 512),) * 16, stored),
            f"quantized/chunk-16x128-of-4224-{name}": _over_8_bits(((128, 4096 + 128),) * 16, stored),  # at the limit
            f"quantized/ragged-{name}": _over_8_bits(RAGGED, stored),
        }
    return works


CASES: dict[str, Callable[[], Case]] = {name: partial(case, work) for name, work in _works().items()}
# What goes first without these kernels: PyTorch's FlashAttention-2, with values padded to the size of keys.
for _name in ("mla/prefill-2x8192-of-8192", "varlen/prefill-2x8192-heads-192-128"):
    CASES[f"{_name}-by-torch_flash"] = partial(case, _works()[_name], "torch_flash")
