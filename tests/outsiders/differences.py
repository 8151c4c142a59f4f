"""Small calls in which kernels that the kit let pass differ from the reference; each line says by how much."""

import importlib
import sys
from math import inf
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from refattn import cascade, chunked_prefill, dense, kv_cache, merge, mla, quantized, sparse  # noqa: E402
from refattn.interface import AttentionOptions, Fp8Scales, Prefix  # noqa: E402
from refattn.metadata import make_batch  # noqa: E402

D = 64
_ROWS = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    """Draw numbers."""
    return torch.randn(shape, generator=_ROWS)


def of(path: str, name: str):
    """Return a wrong kernel."""
    return getattr(importlib.import_module(f"wrong_{path}"), name)


def pages(query_lens, seq_lens, tables, blocks=8, block_size=16, dtype=torch.float32):
    """Make a batch over pages: the tensors, the batch, and what a kernel takes of it."""
    batch = make_batch(query_lens, seq_lens, tables)
    tensors = [numbers(n, *rest, 1, D).to(dtype) for n, rest in ((sum(query_lens), ()), *[(blocks, (block_size,))] * 2)]
    lens = dict(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_table=batch.block_table)
    return tensors, batch, lens


def largest(*pairs) -> str:
    """Return the largest differences between answers."""
    return ", ".join(f"{(a.double() - b.double()).abs().nan_to_num(inf).max().item():.2g}" for a, b in pairs)


def prefix_of_everyone():
    """Three sequences, of which the first two share block 0; the third has block 3."""
    (q, k, v), batch, lens = pages([1, 1, 1], [20, 20, 20], [[0, 1], [0, 2], [3, 4]])
    prefixes = [Prefix(0, 2, 16)]
    right = cascade.attention(q, k, v, cascade.plan(batch, prefixes=prefixes, block_size=16))
    return largest((of("cascade", "prefix_of_everyone")(q, k, v, **lens, prefixes=prefixes), right))


def keys_between_prefixes_lost():
    """Three sequences share block 0, and the first two of them block 1 as well: a prefix inside another."""
    (q, k, v), batch, lens = pages([1, 1, 1], [40, 40, 40], [[0, 1, 2], [0, 1, 3], [0, 4, 5]])
    prefixes = [Prefix(0, 3, 16), Prefix(0, 2, 32)]
    right = cascade.attention(q, k, v, cascade.plan(batch, prefixes=prefixes, block_size=16))
    return largest((of("cascade", "keys_between_prefixes_lost")(q, k, v, **lens, prefixes=prefixes), right))


def _chunked(name, made, plan=None, options=None, lse=False, **more):
    (q, k, v), batch, lens = made
    plan, options = plan or {}, options or {}
    planned = chunked_prefill.plan(batch, block_size=k.shape[1], **plan)
    right = chunked_prefill.attention(q, k, v, planned, AttentionOptions(**options), return_lse=lse)
    came = of("chunked_prefill", name)(q, k, v, **lens, **plan, **options, **({"return_lse": True} if lse else {}))
    return largest(*zip(came, right, strict=True)) if lse else largest((came, right))


def alibi_without_abs():
    """Two queries, two keys, no causal mask: query 0 sees key 1, whose bias is -slope, and here +slope."""
    return _chunked(
        "alibi_without_abs", pages([2], [2], [[0]]), dict(causal=False), dict(alibi_slopes=torch.tensor([1.0]))
    )


def slot_in_int16():
    """A pool of 2049 blocks of 16: slot 32768 of the last block becomes -32768."""
    return _chunked("slot_in_int16", pages([1], [2], [[2048]], blocks=2049))


def value_by_strides_of_key():
    """A pool of keys with heads outside tokens (HND), and one of values with tokens outside heads (NHD)."""
    (q, _, v), batch, lens = pages([1], [2], [[0]])
    q, v = q.expand(-1, 2, -1), numbers(8, 16, 2, D)
    k = numbers(8, 2, 16, D).transpose(1, 2)
    return _chunked("value_by_strides_of_key", ((q, k, v), batch, lens))


def sequence_in_uint8():
    """257 sequences of one token: the last one reads the block of the first."""
    tables = [[block] for block in range(257)]
    return _chunked("sequence_in_uint8", pages([1] * 257, [1] * 257, tables, blocks=257))


def alibi_from_window():
    """A window of 2 keys and a slope of 1: the output is right, and the log-sum-exp is 1 too large."""
    plan, options = dict(window_size=(1, 0)), dict(alibi_slopes=torch.tensor([1.0]))
    return _chunked("alibi_from_window", pages([1], [3], [[0]]), plan, options, lse=True)


def right_side_beats_causal():
    """A causal call with a window of (1, 1): query 0 of 2 does not see key 1."""
    return _chunked("right_side_beats_causal", pages([2], [2], [[0]]), dict(causal=True, window_size=(1, 1)))


def lse_in_type_of_query():
    """A query of zeros over 5 keys in bfloat16: log(5) = 1.6094, and 1.6094 rounds to 1.6094 +- 0.004."""
    made = pages([1], [5], [[0]], dtype=torch.bfloat16)
    made[0][0].zero_()
    return _chunked("lse_in_type_of_query", made, lse=True)


def blocks_before_the_context_shared():
    """Two prompts have block 0 in common, and then go on in blocks 1 and 2."""
    return _chunked("blocks_before_the_context_shared", pages([1, 1], [40, 40], [[0, 1, 3], [0, 2, 4]]))


if __name__ == "__main__":
    for name, call in list(globals().items()):
        if (
            callable(call)
            and getattr(call, "__module__", "") == "__main__"
            and f"def {name}("
            in "".join(
                (Path(__file__).parent / file).read_text()
                for file in map(str, Path(__file__).parent.glob("wrong_*.py"))
            )
        ):
            Console().print(f"{name}: {call()}    {call.__doc__}", highlight=False)
