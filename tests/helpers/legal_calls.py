"""A legal call of every public function that both packages have, each with its arguments by name: small, and new ones.

`legal_calls(package)` has a function for each that makes the arguments, so that a call may write to them.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from refattn import quantized
from refattn.batch import Batch
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.ranks import Shard
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import Accepted
from tests.helpers.bad_input import ints
from tests.helpers.batches import build
from tests.helpers.twin_files import public_names
from tests.table import PATHS, SMALL, SMALLER

MODULES = (
    *(
        "cascade",
        "chunked_prefill",
        "compressed",
        "context_parallel",
        "varlen",
        "differential",
        "interval",
        "kv_cache",
        "local",
    ),
    *(
        "merge",
        "metadata",
        "mla",
        "quantized",
        "recurrent",
        "replay",
        "sliding_window",
        "sparse",
        "speculative",
        "state_cache",
    ),
)
OVER_NUMBERS = [name for name in PATHS if PATHS[name].keys in ("rows", "pages") and name != "interval"]
REQUESTS = dict(query_lens=[2, 1], seq_lens=[7, 20], block_tables=[[1, 2], [1, 3, 4, 5, 6]])
POOL = dict(num_blocks=5, block_size=4, num_kv_heads=2, head_size=8)
PAGES = dict(block_size=4, window_size=(3, 0))
MASK = dict(causal=True)
RINGS = dict(num_slots=3, ring_size=4, num_key_heads=2, num_value_heads=4, value_head_size=5, key_head_size=6)


def public_functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """List the public functions of the modules that both packages have, by `module.name`."""
    for module in MODULES:
        path = importlib.import_module(f"{package}.{module}")
        for name in public_names(package, module):
            if inspect.isfunction(getattr(path, name)):
                yield f"{module}.{name}", getattr(path, name)


def legal_calls(package: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what makes the arguments of a legal call of each public function, by `module.name`."""
    path = SimpleNamespace(package=package, **{name: importlib.import_module(f"{package}.{name}") for name in MODULES})
    return {**_attention(path), **_memory(path), **_metadata(path), **_states(path), **_trees(path)}


def _batch(**options: Any) -> dict[str, Any]:
    return dict(batch=build(SMALL).batch, **options)


def _call(query: torch.Tensor, plan: Any, width: int = 8, **more: Any) -> dict[str, Any]:
    out = torch.empty(*query.shape[:2], width)
    return dict(query=query, plan=plan, options=AttentionOptions(softmax_scale=0.3), return_lse=True, out=out, **more)


def _attention(path: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    def of(name: str, width: int = 8, **more: Any) -> Callable[[], dict[str, Any]]:
        """Return the function that builds the arguments of a path in `tests/table.py`."""

        def made() -> dict[str, Any]:
            inputs = build(SMALL)
            tensors = PATHS[name].tensors(inputs)
            plan = PATHS[name].made_plan(
                path.package, inputs.batch, SMALL.block_size if name != "varlen" else 0, **SMALLER.get(name, {})
            )
            return _call(plan=plan, width=width, **tensors | more)

        return made

    def ranks() -> dict[str, Any]:
        query, key_cache, value_cache, batch = build(SMALL).tensors
        plan = path.context_parallel.plan(batch, shard=Shard(0, 1), block_size=4)
        tokens = dict(key=query[:, :2], value=query[:, :2], key_cache=key_cache, value_cache=value_cache)
        return _call(query, plan, group=Alone(), scales=None, **tokens)

    def latent_sparse() -> dict[str, Any]:
        query, key_cache, _, batch = build(SMALL).tensors
        plan = path.sparse.plan(batch, positions=ints(0, 3, 19)[:, None], block_size=4)
        return _call(query, plan, 6, cache=key_cache[:, :, 0], latent_rank=6, cache_scale=1.0)

    def selected() -> dict[str, Any]:
        return _batch(positions=ints(0, 3, 19)[:, None], block_size=4)

    def entries() -> dict[str, Any]:
        return dict(plan=PATHS["compressed"].made_plan(path.package, build(SMALL).batch, SMALL.block_size))

    def scores() -> dict[str, Any]:
        query, key_cache, _, batch = build(SMALL).tensors
        plan = path.chunked_prefill.plan(batch, block_size=4)
        return dict(query=query, weights=torch.randn(3, 4), index_cache=key_cache[:, :, 0], plan=plan)

    return {
        **{f"{name}.attention": of(name) for name in OVER_NUMBERS},
        "differential.attention": of("differential", scales=None, norm_weight=torch.ones(16), norm_eps=1e-6, norm=None),
        "mla.attention": of("mla", 6, cache_scale=1.0, query_scale=None, fp8_weights=False),
        "mla.prefill": of("mla-prefill", 4, cache_scale=1.0),
        "quantized.attention": of("quantized-fp8"),
        "context_parallel.attention": ranks,
        "compressed.attention": lambda: of("compressed")() | dict(cache_scale=1.0, entry_scale=1.0),
        "compressed.plan": lambda: (
            PATHS["compressed"].plan_arguments(path.package, build(SMALL).batch, SMALL.block_size)
            | _batch(overlap=True)
        ),
        "compressed.compress": lambda: entries() | dict(row_cache=torch.randn(10, 4, 12), bias=torch.randn(4, 6)),
        "compressed.candidates": lambda: dict(scores=torch.randn(3, 7), size=2, topk=2),
        "compressed.select_entries": lambda: entries() | dict(positions=ints(0, -1, 4)[:, None]),
        "sparse.latent_attention": latent_sparse,
        "sparse.scores": scores,
        "sparse.select": lambda: dict(scores=torch.randn(3, 20), topk=2),
        "sparse.slots": selected,
        "sparse.plan": selected,
        "varlen.plan": lambda: _batch(**MASK, window_size=(3, 0)),
        "chunked_prefill.plan": lambda: _batch(**MASK, **PAGES),
        "sliding_window.plan": lambda: _batch(**MASK, **PAGES),
        "differential.plan": lambda: _batch(**MASK, **PAGES),
        "quantized.plan": lambda: _batch(**MASK, **PAGES),
        "local.plan": lambda: _batch(chunk_size=8, **PAGES),
        "cascade.plan": lambda: _batch(prefixes=[], **PAGES),
        "mla.plan": lambda: _batch(block_size=4),
        "mla.plan_prefill": lambda: _batch(block_size=4, workspace=40, max_context_len=20),
        "context_parallel.plan": lambda: _batch(shard=Shard(0, 2), **MASK, **PAGES),
        "interval.plan": lambda: _batch(first_visible=ints(0, 0, 3), last_visible=ints(3, 4, 19), block_size=4),
        "interval.causal": lambda: _batch(num_tokens=4, window_size=(3, 0)),
        "interval.image_spans": lambda: _batch(
            spans=ints(0, 3, -1, -1).reshape(2, 1, 2), num_tokens=4, window_size=(3, 0), whole_spans=True
        ),
        "interval.prefix_lm": lambda: _batch(prefix_lens=ints(2, 0), num_tokens=4),
        "interval.diffusion_blocks": lambda: _batch(num_tokens=4, diffusion_block=4),
        "cascade.find_prefixes": lambda: dict(**REQUESTS, block_size=4),
        "merge.merge": lambda: dict(outs=list(torch.randn(2, 3, 4, 8)), lses=list(torch.randn(2, 3, 4))),
        "merge.add_sinks": lambda: dict(out=torch.randn(3, 4, 8), lse=torch.randn(3, 4), sinks=torch.zeros(4)),
        "mla.absorb": lambda: dict(query=torch.randn(3, 4, 8), key_projection=torch.randn(4, 6, 6)),
        "mla.project": lambda: dict(latent=torch.randn(3, 4, 6), value_projection=torch.randn(4, 5, 6)),
        "differential.interleave_halves": lambda: dict(heads=torch.randn(3, 4, 8)),
        "differential.split_halves": lambda: dict(key=torch.randn(3, 4, 8), value=torch.randn(3, 4, 8)),
        "differential.compute_lambda": lambda: dict(
            **{f"lambda_{name}": torch.ones(8) for name in ("q1", "k1", "q2", "k2")}, lambda_init=0.2
        ),
    }


class Alone:
    """The group of a rank that has no others."""

    rank, size = 0, 1

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return part

    def reduce_scatter(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return part


def _memory(path: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    place = dict(dtype=torch.float16, device="cpu")

    def write(**changed: Any) -> dict[str, Any]:
        (key, value), pools = torch.randn(2, 3, 2, 8), torch.randn(2, 5, 4, 2, 8)
        tokens = dict(key=key, value=value, key_cache=pools[0], value_cache=pools[1])
        return tokens | dict(slot_mapping=torch.tensor([7, -1, 0])) | changed

    def write_int8() -> dict[str, Any]:
        key_cache, value_cache, scales = path.quantized.allocate_int8(**POOL)
        return write(key_cache=key_cache, value_cache=value_cache, scales=Int8Scales(scales, torch.ones(2, 8)))

    def write_pairs() -> dict[str, Any]:
        tokens = dict(key=torch.randn(2, 4, 8), value=torch.randn(2, 4, 8), cache=torch.randn(2, 2, 5, 4, 2, 8))
        return dict(**tokens, slot_mapping=torch.tensor([1, 2]), scales=None)

    def write_latents() -> dict[str, Any]:
        tokens = dict(latent=torch.randn(2, 6), rope_key=torch.randn(2, 2), cache=torch.randn(5, 4, 8))
        return dict(**tokens, slot_mapping=torch.tensor([1, 2]), cache_scale=1.0)

    def write_index() -> dict[str, Any]:
        return dict(key=torch.randn(2, 8), index_cache=torch.randn(5, 4, 8), slot_mapping=torch.tensor([1, 2]))

    more = dict(value_head_size=4, layout="HND")
    return {
        "kv_cache.allocate": lambda: dict(**POOL, **more, **place),
        "differential.allocate": lambda: dict(**POOL, **place),
        "quantized.allocate_int4": lambda: dict(**POOL, **more, device="cpu"),
        "quantized.allocate_nvfp4": lambda: dict(
            **POOL | dict(head_size=16), **more | dict(value_head_size=32), of_keys=0.5, of_values=0.25, device="cpu"
        ),
        "quantized.allocate_int8": lambda: dict(**POOL, **more, value_dtype=torch.float16, device="cpu"),
        "mla.allocate": lambda: dict(num_blocks=5, block_size=4, latent_rank=6, rope_size=2, **place),
        "sparse.allocate": lambda: dict(num_blocks=5, block_size=4, index_size=8, **place),
        "state_cache.allocate": lambda: dict(
            num_slots=3, num_value_heads=2, value_head_size=4, key_head_size=6, **place
        ),
        "state_cache.allocate_inputs": lambda: dict(num_slots=3, width=4, num_channels=6, **place),
        "replay.allocate": lambda: dict(**RINGS, per_channel=True, **place),
        "replay.allocate_cursors": lambda: dict(num_slots=3, device="cpu"),
        "kv_cache.write": write,
        "quantized.write": write_int8,
        "differential.write": write_pairs,
        "mla.write": write_latents,
        "sparse.write": write_index,
        "kv_cache.gather": lambda: dict(cache=torch.randn(5, 4, 2, 8), blocks=ints(4, 0), seq_len=7),
        "sparse.read": lambda: dict(index_cache=torch.randn(5, 4, 8), slots=torch.tensor([3, 19])),
        "sparse.by_token": lambda: dict(name="pool", pool=torch.randn(5, 4, 8)),
        "differential.pools": lambda: dict(cache=torch.randn(2, 2, 5, 4, 2, 8)),
        "kv_cache.copy_blocks": lambda: dict(caches=list(torch.randn(2, 5, 4)), pairs=torch.tensor([[0, 4]])),
        "state_cache.copy": lambda: dict(pools=list(torch.randn(2, 5, 4)), pairs=torch.tensor([[0, 4]])),
        "kv_cache.swap_blocks": lambda: dict(
            sources=[torch.randn(5, 4)], destinations=[torch.randn(3, 4)], pairs=torch.tensor([[4, 2]])
        ),
        "quantized.value_scales": lambda: dict(values=list(torch.randn(2, 3, 2, 8))),
    }


def _metadata(path: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    def refill() -> dict[str, Any]:
        buffers = path.metadata.make_buffers(4, columns=8, max_query_len=2, max_seq_len=32)
        return dict(buffers=buffers, batch=build(SMALL).batch)

    def advance() -> dict[str, Any]:
        batch = path.metadata.make_batch([1, 1], [5, 19], [[1, 2], [3, 4, 5, 6, 7]])
        inputs = {name: torch.zeros(2, dtype=torch.int64) for name in ("input_ids", "input_positions")}
        return dict(batch=batch, slots=torch.zeros(2, dtype=torch.int64), block_size=4, **inputs) | dict(
            sampled_ids=torch.tensor([5, 6])
        )

    return {
        "metadata.make_batch": lambda: dict(**REQUESTS, device="cpu"),
        "metadata.positions": lambda: _batch(num_tokens=4),
        "metadata.slot_mapping": lambda: _batch(num_tokens=4, block_size=4, window=8),
        "context_parallel.slot_mapping": lambda: _batch(num_tokens=4, shard=Shard(0, 2), block_size=4),
        "context_parallel.own_positions": lambda: dict(length=7, shard=Shard(0, 2)),
        "context_parallel.local_lens": lambda: dict(lens=ints(7, 3), shard=Shard(0, 2)),
        "metadata.order_decodes_first": lambda: dict(query_lens=[2, 1], decode_len=1),
        "metadata.split_decodes_and_prefills": lambda: _batch(query_lens=[2, 1], decode_len=1, seq_lens=[5, 20]),
        "metadata.advance": advance,
        "metadata.update_block_table": lambda: _batch(block_table=ints(1, 2)[:, None]),
        "metadata.make_cross_batch": lambda: _batch(encoder_lens=[3, 4], block_tables=[[1], [2]]),
        "metadata.split_encoder": lambda: _batch(encoder_lens=[0, 4], block_size=4),
        "metadata.turn_prefills_into_decodes": _batch,
        "metadata.block_table_from_slots": lambda: dict(
            token_slots=torch.arange(16).view(2, 8),
            requests=torch.tensor([1, 0]),
            seq_lens=ints(5, 8),
            block_size=4,
            columns=2,
        ),
        "metadata.make_buffers": lambda: dict(num_seqs=4, columns=8, max_query_len=2, max_seq_len=32, device="cpu"),
        "metadata.refill": refill,
    }


def _states(path: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    def batch() -> Batch:
        made: Batch = path.metadata.make_batch([2, 1], [5, 20])
        return made

    def plan() -> Any:
        return path.recurrent.plan(batch(), state_indices=ints(2, 0))

    def tokens() -> dict[str, Any]:
        vectors = dict(key=torch.randn(3, 2, 6), value=torch.randn(3, 4, 5))
        return dict(**vectors, log_decay=-torch.rand(3, 4), beta=torch.rand(3, 4))

    def attention() -> dict[str, Any]:
        step = dict(query=torch.randn(3, 2, 6), **tokens(), states=torch.randn(3, 4, 5, 6), plan=plan())
        return dict(**step, options=RecurrentOptions(), out=torch.empty(3, 4, 5))

    def convolve() -> dict[str, Any]:
        step = dict(inputs=torch.randn(3, 6), weight=torch.randn(6, 4), states=torch.randn(3, 3, 6), plan=plan())
        return dict(**step, bias=torch.randn(6), silu=True, out=torch.empty(3, 6))

    def state_map() -> dict[str, Any]:
        return dict(**tokens(), plan=plan(), options=RecurrentOptions())

    def replay_plan(**more: Any) -> dict[str, Any]:
        tables = dict(state_indices=ints(2, 0), cursors=ints(1, 9, 3), ring_size=4)
        return dict(batch=batch(), **tables, has_initial_state=torch.tensor([True, True]), **more)

    def replay() -> dict[str, Any]:
        pools = dict(states=torch.randn(3, 4, 5, 6), ring=path.replay.allocate(**RINGS))
        step = dict(query=torch.randn(3, 2, 6), **tokens(), **pools, plan=path.replay.plan(**replay_plan()))
        return dict(**step, options=RecurrentOptions(), out=torch.empty(3, 4, 5))

    def flush() -> dict[str, Any]:
        pools = dict(states=[torch.randn(4, 4, 5, 6)], rings=[path.replay.allocate(**RINGS | dict(num_slots=4))])
        return dict(**pools, cursors=ints(1, 2, 0, 0), state_indices=ints(1, 0), target_indices=ints(2, 3))

    def advance() -> dict[str, Any]:
        plan = path.replay.plan(**replay_plan(drafts=True))
        return dict(cursors=plan.cursors, plan=plan, num_accepted=ints(1, 0))

    drafts = dict(state_indices=ints(1, 2, 0, 4).view(2, 2), num_accepted=ints(1, 2))
    checkpoints = dict(checkpoint_indices=torch.full((2, 5), -1, dtype=torch.int32), block_size=4)
    return {
        "recurrent.plan": lambda: dict(
            batch=batch(), **drafts, has_initial_state=torch.tensor([True, True]), **checkpoints
        ),
        "recurrent.attention": attention,
        "context_parallel.recurrent_attention": lambda: attention() | dict(group=Alone()),
        "recurrent.convolve": convolve,
        "context_parallel.recurrent_convolve": lambda: convolve() | dict(group=Alone()),
        "recurrent.state_map": state_map,
        "recurrent.compose": lambda: dict(maps=[path.recurrent.state_map(**state_map())]),
        "state_cache.accepted_slots": lambda: dict(drafts),
        "replay.plan": lambda: replay_plan(flush=torch.tensor([True, False]), drafts=False, target_indices=ints(1, -1)),
        "replay.attention": replay,
        "replay.flush": flush,
        "replay.advance": advance,
    }


def _trees(path: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    def forest(**more: Any) -> dict[str, Any]:
        trees = path.speculative.make_trees([[-1, 0], [-1]])
        return _batch(trees=trees, **more)

    def decodes() -> Batch:
        made: Batch = path.metadata.make_batch([1, 1], [5, 19], [[1, 2, 8], [3, 4, 5, 6, 7, 9]])
        return made

    def sampled() -> dict[str, Any]:
        chances = dict(target_probs=torch.full((3, 4), 0.25), draft_probs=torch.full((3, 4), 0.25))
        return forest(drafts=torch.tensor([1, 2, 3]), uniforms=torch.rand(3), **chances)

    accepted = Accepted(ints(0, 1, 0, -1).view(2, 2), ints(2, 1), torch.tensor([1, 2]))
    return {
        "speculative.make_trees": lambda: dict(parents=[[-1, 0], [-1]], device="cpu"),
        "speculative.parents_from_mask": lambda: dict(visible=torch.eye(3, dtype=torch.bool)),
        "speculative.positions": lambda: forest(num_tokens=4),
        "speculative.plan": lambda: forest(**MASK, **PAGES),
        "speculative.plan_drafts": lambda: dict(batch=decodes(), num_steps=2, num_branches=2, **PAGES),
        "speculative.accept": lambda: forest(drafts=torch.tensor([1, 2, 3]), chosen=torch.tensor([2, 3, 1])),
        "speculative.accept_sampled": sampled,
        "speculative.compact": lambda: forest(caches=[torch.randn(10, 4, 8)], accepted=accepted, block_size=4),
        "speculative.accepted_batch": lambda: forest(lens=ints(2, 1)),
    }


def legal_types() -> list[Any]:
    """Return an instance of each type that checks what it is made of."""
    calls = legal_calls("refattn")

    def made(module: str, name: str = "plan") -> Any:
        return getattr(importlib.import_module(f"refattn.{module}"), name)(**calls[f"{module}.{name}"]())

    interval, trees = made("interval"), made("speculative")
    scales = quantized.allocate_int8(**POOL)[2]
    return [
        *(
            interval,
            interval.batch,
            made("cascade"),
            made("recurrent"),
            made("replay"),
            made("compressed"),
            trees,
            trees.trees,
            Shard(0, 2),
        ),
        *(AttentionOptions(0.3, 2.0, torch.rand(4), torch.rand(4)), RecurrentOptions(0.3)),
        *(Fp8Scales(0.5, 0.25), Int8Scales(scales, torch.ones(2, 8))),
        *(quantized.allocate_int4(**POOL)[2], quantized.allocate_nvfp4(**POOL | dict(head_size=16))[2]),
    ]
