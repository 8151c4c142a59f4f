"""Small calls in which kernels that the kit let pass differ from the reference; each line says by how much."""

import importlib
import sys
from math import inf
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from refattn import cascade, chunked_prefill, interval, mla, quantized, recurrent, sparse, speculative, varlen
from refattn.batch import Prefix
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales

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
    """A query of zeros over 3 keys in bfloat16: log(3) = 1.0986, and 1.0986 rounds to 1.1016."""
    made = pages([1], [3], [[0]], dtype=torch.bfloat16)
    made[0][0].zero_()
    return _chunked("lse_in_type_of_query", made, lse=True)


def blocks_before_the_context_shared():
    """Two prompts have block 0 in common, and then go on in blocks 1 and 2."""
    return _chunked("blocks_before_the_context_shared", pages([1, 1], [40, 40], [[0, 1, 3], [0, 2, 4]]))


def largest_before_the_scale():
    """Scale -1 and products 0 and 100: the right weights are 1 and 0, and exp(100) is infinite in float32."""
    query, key, value = torch.zeros(1, 1, D), torch.zeros(2, 1, D), numbers(2, 1, D)
    query[0, 0, 0], key[1, 0, 0] = 10.0, 10.0
    batch = make_batch([1], [2])
    right = varlen.attention(query, key, value, varlen.plan(batch), AttentionOptions(softmax_scale=-1.0))
    name = "largest_before_the_scale"
    came = of("varlen", name)(query, key, value, batch.cu_seqlens_q, batch.seq_lens, softmax_scale=-1.0)
    return largest((came, right))


def query_padded_to_the_row():
    """A pool of latents whose rows have 8 elements after the key, which hold NaN: 0 * NaN is NaN."""
    batch, cache = make_batch([1], [2], [[0]]), numbers(2, 16, 96 + 8)
    cache[..., 96:] = torch.nan
    query, options = numbers(1, 4, 96), AttentionOptions(softmax_scale=0.1)
    right = mla.attention(query, cache, mla.plan(batch, block_size=16), options, latent_rank=64)
    lens = dict(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_table=batch.block_table)
    came = of("mla", "query_padded_to_the_row")(query, cache, **lens, latent_rank=64, softmax_scale=0.1)
    return largest((came, right))


def _quantized(name, scales, heads=1, **options):
    batch = make_batch([1], [3], [[0]])
    query, (k, v) = numbers(1, heads, D), (numbers(2, 16, heads, D).to(torch.float8_e4m3fn) for _ in range(2))
    plan = quantized.plan(batch, block_size=16)
    right = quantized.attention(query, k, v, plan, AttentionOptions(**options), scales=scales)
    lens = dict(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_table=batch.block_table)
    return largest((of("quantized", name)(query, k, v, **lens, scales=scales, **options), right))


def first_scale_for_all_heads():
    """Two KV heads under scales of 1 and 2."""
    scales = Fp8Scales(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    return _quantized("first_scale_for_all_heads", scales, heads=2)


def scale_after_the_cap():
    """A scale of 2 for the keys and a softcap of 1: scores are at most 1, and here 2."""
    return _quantized("scale_after_the_cap", Fp8Scales(2.0, 1.0), softcap=1.0)


def sink_scaled_like_a_key():
    """A scale of 2 for the keys and a sink of 1."""
    return _quantized("sink_scaled_like_a_key", Fp8Scales(2.0, 1.0), sinks=torch.tensor([1.0]))


def fresh_state_cleared_first():
    """A sequence without new tokens and without a state: its slot, which is left alone, becomes 0."""
    batch, states = make_batch([0], [0]), numbers(1, 1, D, D)
    tokens = [numbers(0, 1, D) for _ in range(3)] + [numbers(0, 1)] * 2
    slots, begins = torch.tensor([0], dtype=torch.int32), torch.tensor([False])
    kept, cleared = states.clone(), states.clone()
    recurrent.attention(*tokens, kept, recurrent.plan(batch, state_indices=slots, has_initial_state=begins))
    of("recurrent", "fresh_state_cleared_first")(*tokens, cleared, slots, begins, batch.cu_seqlens_q)
    return f"{largest((kept, states))} by the reference, {largest((cleared, states))} by the kernel"


def listed_twice_counts_once():
    """A query whose list is 0, 0, 1: key 0 has the weight of two keys."""
    (q, k, v), batch, lens = pages([1], [2], [[0]])
    positions = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    right = sparse.attention(q, k, v, sparse.plan(batch, positions=positions, block_size=16))
    return largest((of("sparse", "listed_twice_counts_once")(q, k, v, **lens, positions=positions), right))


def _tree(name, parents, seq_len, plan=None, options=None):
    n, plan, options = len(parents), plan or {}, options or {}
    (q, k, v), batch, lens = pages([n], [seq_len], [list(range(-(-seq_len // 16)))])
    trees = speculative.make_trees([parents])
    planned = speculative.plan(batch, block_size=16, trees=trees, **plan)
    right = speculative.attention(q, k, v, planned, AttentionOptions(**options))
    return largest((of("speculative", name)(q, k, v, **lens, trees=trees, **plan, **options), right))


def ancestors_in_32_bits():
    """A tree of 33 roots: node 32 sees itself, and here node 0, too."""
    return _tree("ancestors_in_32_bits", [-1] * 33, 33)


def window_by_slot():
    """One token of context and two roots, which are both at position 1, under a window of (1, 0)."""
    return _tree("window_by_slot", [-1, -1], 3, dict(window_size=(1, 0)))


def alibi_by_slot():
    """One token of context and two roots: the second is 1 from the context, and here 2."""
    return _tree("alibi_by_slot", [-1, -1], 3, {}, dict(alibi_slopes=torch.tensor([1.0])))


def alibi_lost_under_a_window():
    """A window of 2 keys and a slope of 1."""
    plan, options = dict(window_size=(1, 0)), dict(alibi_slopes=torch.tensor([1.0]))
    return _chunked("alibi_lost_under_a_window", pages([1], [3], [[0]]), plan, options)


def sink_lost_under_a_window():
    """A window of 2 keys and a sink of 1."""
    plan, options = dict(window_size=(1, 0)), dict(sinks=torch.tensor([1.0]))
    return _chunked("sink_lost_under_a_window", pages([1], [3], [[0]]), plan, options)


def cap_lost_without_causal():
    """Two queries, two keys, no causal mask, and a softcap of 0.1."""
    return _chunked("cap_lost_without_causal", pages([2], [2], [[0]]), dict(causal=False), dict(softcap=0.1))


def window_lost_in_the_shared_level():
    """Two sequences share block 0, and a window of 2 keys shows none of it."""
    (q, k, v), batch, lens = pages([1, 1], [20, 20], [[0, 1], [0, 2]])
    more = dict(prefixes=[Prefix(0, 2, 16)], window_size=(1, 0))
    right = cascade.attention(q, k, v, cascade.plan(batch, **more, block_size=16))
    return largest((of("cascade", "window_lost_in_the_shared_level")(q, k, v, **lens, **more), right))


def alibi_from_the_last_visible_key():
    """A query at position 2 that sees keys 0 and 1, under a slope of 1: the log-sum-exp is 1 too large."""
    (q, k, v), batch, lens = pages([1], [3], [[0]])
    ends = dict(first_visible=torch.tensor([0], dtype=torch.int32), last_visible=torch.tensor([1], dtype=torch.int32))
    options = dict(alibi_slopes=torch.tensor([1.0]))
    plan = interval.plan(batch, **ends, block_size=16)
    right = interval.attention(q, k, v, plan, AttentionOptions(**options), return_lse=True)
    kernel = of("interval", "alibi_from_the_last_visible_key")
    came = kernel(q, k, v, **lens, **ends, **options, return_lse=True)
    return largest(*zip(came, right, strict=True))


def lse_gradient_lost_under_a_window():
    """The gradient of the log-sum-exp alone, under a window of 2 keys, by the query."""
    query, key, value = numbers(1, 1, D).requires_grad_(), numbers(3, 1, D), numbers(3, 1, D)
    batch = make_batch([1], [3])
    _, lse = varlen.attention(query, key, value, varlen.plan(batch, window_size=(1, 0)), return_lse=True)
    (right,) = torch.autograd.grad(lse.sum(), query)
    kernel = of("varlen_backward", "lse_gradient_lost_under_a_window")
    out, lse = kernel(query, key, value, batch.cu_seqlens_q, batch.seq_lens, window_size=(1, 0), return_lse=True)
    (came,) = torch.autograd.grad(lse.sum() + 0.0 * out.sum(), query)
    return largest((came, right))


SHOWN = [
    name
    for name, call in globals().items()
    if getattr(call, "__module__", "") == __name__
    and name not in ("numbers", "of", "pages", "largest")
    and name[0] != "_"
]


if __name__ == "__main__":
    console = Console(soft_wrap=True, highlight=False)
    for name in SHOWN:
        call = globals()[name]
        console.print(f"{name}: {call()}    {call.__doc__}")
