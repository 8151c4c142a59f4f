"""A server in one file: 26 functions of the exercises, put together; the others are for other models.

It is `first_engine`, served by a learner: the layers of its `Llama`, and a step that runs it once for all requests,
over some tokens of prompts, one of each output, and guesses of what may follow. How a layer computes its attention is
its `way`, and each layer may have another:

    head, heads, paged     one head at a time; all heads; all sequences           4 gather 5 6 7 8
    cascade                what all requests share, once                          16 17
    split, online, triton  a decode in splits, tile by tile, in a kernel          9 10 11 23
    latent, ranks          as latents (GQA is a special case); on two ranks       9 20 22
    window, chunk, sinks   other masks, other models                              12 13 14 15 18
    int8                   keys and values of eight bits                          19

Every step asks 1 slot, 2 slot_mapping and 3 write where its tokens go, 21 tree_mask who sees whom among guesses, and
31 sample for the next token; 29 rms_norm and 30 rotate are the rest of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from twinattn.course.exercises.exercise import Function
from twinattn.course.first_engine import Llama

EXACT = ("head", "heads", "paged", "cascade", "split", "online", "triton", "latent", "ranks")  # one answer, many ways
OTHERS = ("window", "chunk", "sinks")  # other masks, so other answers
WINDOW, CHUNK, RANKS, INTERLEAVE = 24, 32, 2, 4


@dataclass(eq=False)
class Request:
    """A prompt, its answer so far, and where its keys are."""

    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys are in the pool
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.output


@dataclass
class Step:
    """One call of the model: new tokens of each request, where they go, and for each layer how it attends."""

    server: "Server"
    query_lens: list[int]
    seq_lens: list[int]
    tables: list[list[int]]
    slots: Tensor
    trees: list[list[int]]  # the parents of guesses, one list per request

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values, and attend to all of them: [t, h, d]."""
        f, way, pools = self.server.f, self.server.ways[layer], self.server.pools[layer]
        if way == "int8":  # what comes back from a quantized pool
            key, value = (quantized * scale[..., None] for quantized, scale in map(f["quantize"], (key, value)))
        f["write"](key, value, *pools, self.slots)
        if any(self.trees):
            return torch.cat([self._tree(i, rows, *pools) for i, rows in self._sequences(query)])
        if way in ("paged", "sinks", "cascade", "int8") or (way == "chunk" and max(self.query_lens) == 1):
            out, lse = self._all_at_once(way, query, *pools)
            return f["add_sinks"](out, lse, self.server.sinks)[0] if way == "sinks" else out
        if way in ("split", "online", "triton", "latent", "ranks") and max(self.query_lens) > 1:
            way = "heads"  # these are for decodes
        return torch.cat([getattr(self, f"_{way}")(i, rows, *pools) for i, rows in self._sequences(query)])

    def _sequences(self, query: Tensor) -> Iterator[tuple[int, Tensor]]:
        return enumerate(query.split(self.query_lens))

    def _keys(self, i: int, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        gather, blocks = self.server.f["gather"], torch.tensor(self.tables[i], dtype=torch.int32)
        return gather(key_cache, blocks, self.seq_lens[i]), gather(value_cache, blocks, self.seq_lens[i])

    def _mask(self, i: int) -> Tensor:
        mask: Tensor = self.server.f["causal_mask"](self.query_lens[i], self.seq_lens[i])
        return mask

    def _all_at_once(self, way: str, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        f, size = self.server.f, key_cache.shape[1]
        query_lens, seq_lens, tables = self.query_lens, self.seq_lens, self.tables
        if way == "chunk":
            query_lens, seq_lens, tables = f["virtual_batches"](query_lens, seq_lens, tables, CHUNK, size)
        width = max(map(len, tables))
        table = torch.tensor([[*blocks, *[-1] * (width - len(blocks))] for blocks in tables], dtype=torch.int32)
        lens = [torch.tensor(each, dtype=torch.int32) for each in ([0, *accumulate(query_lens)], seq_lens)]
        prefix = f["shared_prefix"](query_lens, seq_lens, tables, size) if way == "cascade" and len(tables) > 1 else 0
        if prefix:
            table[1:, : prefix // size] = -1  # they are not needed twice
            return f["cascade"](query, key_cache, value_cache, *lens, table, prefix)
        return f["paged_attention"](query, key_cache, value_cache, *lens, table)

    def _heads(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        out: Tensor = self.server.f["attend_heads"](query, *self._keys(i, *pools), self._mask(i))[0]
        return out

    def _head(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        key, value = self._whole_heads(i, query, *pools)
        attend, mask = self.server.f["attend"], self._mask(i)
        return torch.stack([attend(query[:, h], key[:, h], value[:, h], mask)[0] for h in range(query.shape[1])], 1)

    def _whole_heads(self, i: int, query: Tensor, *pools: Tensor) -> Iterator[Tensor]:
        """Return keys and values with as many heads as the query."""
        return (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in self._keys(i, *pools))

    def _split(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        outs, lses = self.server.f["split_kv"](query[0], *self._whole_heads(i, query, *pools), 3)
        return self._merged([out[None] for out in outs], [lse[None] for lse in lses])

    def _merged(self, outs: list[Tensor], lses: list[Tensor]) -> Tensor:
        out: Tensor = self.server.f["merge"](outs, lses)[0]
        return out

    def _online(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        key, value = self._whole_heads(i, query, *pools)
        scores = torch.einsum("hd,shd->hs", query[0], key) * query.shape[2] ** -0.5
        size = pools[0].shape[1]
        heads = [zip(scores[h].split(size), value[:, h].split(size), strict=True) for h in range(query.shape[1])]
        return torch.stack([self.server.f["online_softmax"](tiles)[0] for tiles in heads])[None]

    def _triton(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        key, value = (x.contiguous() for x in self._whole_heads(i, query, *pools))
        out: Tensor = self.server.f["triton_decode"](query[0].contiguous(), key, value)
        return out[None]

    def _latent(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        """Use the latent as keys and values of all KV heads; the matrices of a head only pick out its own."""
        key, value = self._keys(i, *pools)
        hk, d = key.shape[1:]
        latent = torch.cat([key.flatten(1), value.flatten(1)], 1)
        picks = torch.eye(2 * hk * d).reshape(2, hk, d, 2 * hk * d).repeat_interleave(query.shape[1] // hk, 1)
        none = latent[:, :0]  # no rotary part: the keys are rotated already
        out: Tensor = self.server.f["mla_decode"](query[0], latent, none, *picks, d**-0.5)
        return out[None]

    def _ranks(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        """Attend on each rank to its own keys, as if the others were elsewhere."""
        f, (key, value) = self.server.f, self._keys(i, *pools)
        parts = []
        for rank in range(RANKS):
            index = torch.arange(f["local_len"](self.seq_lens[i], rank, RANKS, INTERLEAVE))
            own = index // INTERLEAVE * RANKS * INTERLEAVE + rank * INTERLEAVE + index % INTERLEAVE
            parts.append(f["attend_heads"](query, key[own], value[own], torch.ones(1, len(own), dtype=torch.bool)))
        return self._merged(*map(list, zip(*parts, strict=True)))

    def _window(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        f, sizes = self.server.f, (self.query_lens[i], self.seq_lens[i])
        _, left, blocks = f["trim_window"](*sizes, self.tables[i], pools[0].shape[1], WINDOW)
        key, value = (f["gather"](cache, torch.tensor(blocks, dtype=torch.int32), left) for cache in pools)
        out: Tensor = f["attend_heads"](query, key, value, f["window_mask"](sizes[0], left, window=WINDOW))[0]
        return out

    def _chunk(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        f, mask = self.server.f, self.server.f["chunk_mask"](self.query_lens[i], self.seq_lens[i], chunk_size=CHUNK)
        out: Tensor = f["attend_heads"](query, *self._keys(i, *pools), mask)[0]
        return out

    def _tree(self, i: int, query: Tensor, *pools: Tensor) -> Tensor:
        """Show each guess the context, its ancestors and itself."""
        mask = self._mask(i)
        if self.trees[i]:
            mask[:, -len(query) :] = self.server.f["tree_mask"](self.trees[i])
        out: Tensor = self.server.f["attend_heads"](query, *self._keys(i, *pools), mask)[0]
        return out


class Server:
    """Requests, a pool of blocks for each layer, and a loop of steps."""

    def __init__(
        self,
        model: Any,
        functions: Mapping[str, Function],
        *,
        ways: Sequence[str],
        num_blocks: int = 64,
        block_size: int = 16,
        budget: int = 48,
        guesses: bool = False,
    ) -> None:
        """Make the pools.

        Args:
            model: a Llama of transformers, whose weights are served.
            functions: those of the exercises, by name.
            ways: how the layers attend, one after the other and round again.
            num_blocks: of each pool.
            block_size: tokens in a block.
            budget: tokens in a step; decodes go first.
            guesses: whether to guess tokens, and to verify a tree of them in each step.
        """
        config = model.config
        self.model = Llama(model, functions["rms_norm"], functions["rotate"])
        self.f, self.budget, self.guesses = functions, budget, guesses
        self.ways = [ways[layer % len(ways)] for layer in range(config.num_hidden_layers)]
        sizes = num_blocks, block_size, config.num_key_value_heads, config.head_dim
        self.pools = [tuple(torch.zeros(2, *sizes)) for _ in self.ways]
        end = model.generation_config.eos_token_id
        self.ends = set(end if isinstance(end, list) else [end])
        self.sinks = torch.linspace(-2.0, 2.0, config.num_attention_heads)
        self.free, self.cached = list(range(num_blocks)), dict[tuple[int, ...], int]()
        self.running: list[Request] = []

    def serve(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Answer some prompts: the most likely tokens of each."""
        requests = [Request(prompt, max_tokens) for prompt in prompts]
        self.running = list(requests)
        while self.running:
            self.step()
        return [request.output for request in requests]

    @torch.no_grad()
    def step(self) -> None:
        """Choose tokens, run the model over them once, and append the next token of each request that is ready."""
        chosen, left = [], self.budget
        for request in sorted(self.running, key=lambda request: not request.output):  # decodes go first
            if not request.blocks:
                self._find_cached(request)
            pending = len(request.tokens) - request.computed
            drafts = self._guess(request) if self.guesses and pending == 1 and request.output else []
            if min(pending, left) > 0:
                chosen.append((request, min(pending, left), drafts))
                left -= min(pending, left) + len(drafts)
        size = self.pools[0][0].shape[1]
        for request, count, drafts in chosen:
            while len(request.blocks) * size < request.computed + count + len(drafts):
                request.blocks.append(self.free.pop())
        query_lens = [count + len(drafts) for _, count, drafts in chosen]
        seq_lens = [request.computed + q for (request, *_), q in zip(chosen, query_lens, strict=True)]
        tables = [request.blocks[: -(-s // size)] for (request, *_), s in zip(chosen, seq_lens, strict=True)]
        if max(query_lens) == 1:
            slots = [self.f["slot"](s - 1, blocks, size) for s, blocks in zip(seq_lens, tables, strict=True)]
        else:
            slots = self.f["slot_mapping"](query_lens, seq_lens, tables, size)
        trees = [[-1, *range(len(drafts) - 1), 0] if drafts else [] for _, _, drafts in chosen]
        step = Step(self, query_lens, seq_lens, tables, torch.tensor(slots), trees)
        tokens = [r.tokens[r.computed :][:count] + drafts for r, count, drafts in chosen]
        positions = [self._positions(r, q, tree) for (r, *_), q, tree in zip(chosen, query_lens, trees, strict=True)]
        ids, places = (torch.tensor(sum(each, [])) for each in (tokens, positions))
        logits = self.model.forward(ids, places, torch.arange(len(ids)), step.attend)
        for (request, count, drafts), rows in zip(chosen, logits.split(query_lens), strict=True):
            self._take(request, count, drafts, [self.f["sample"](row, 0.0, 1.0, 0.0) for row in rows])

    def _positions(self, request: Request, count: int, tree: list[int]) -> list[int]:
        depths = [*range(count - 1), 1] if tree else range(count)  # the last guess is a sibling of the first
        return [request.computed + depth for depth in depths]

    def _find_cached(self, request: Request) -> None:
        """Take the blocks of an earlier prompt with the same first tokens; at least one token is left to compute."""
        size = self.pools[0][0].shape[1]
        for end in range(size, len(request.prompt), size):
            block = self.cached.get(tuple(request.prompt[:end]))
            if block is None:
                break
            request.blocks.append(block)
            request.computed = end

    def _guess(self, request: Request) -> list[int]:
        """Guess what followed the newest token the last time: two tokens, and in place of the first the one before."""
        tokens = request.tokens
        earlier = [i for i in range(len(tokens) - 3, -1, -1) if tokens[i] == tokens[-1]]
        return [tokens[earlier[0] + 1], tokens[earlier[0] + 2], tokens[earlier[-1] + 1]] if earlier else []

    def _take(self, request: Request, count: int, drafts: list[int], chosen: list[int]) -> None:
        """Take what the model chose; of guesses, those that are what it chose after the one before."""
        size = self.pools[0][0].shape[1]
        request.computed += count
        for end in range(size, min(request.computed, len(request.prompt)) + 1, size):
            self.cached.setdefault(tuple(request.prompt[:end]), request.blocks[end // size - 1])
        if request.computed < len(request.tokens):
            return  # its prompt goes on in the next step
        row = count - 1
        request.output.append(chosen[row])
        for place, draft in enumerate(drafts[:-1], count):
            if draft != chosen[row]:
                break
            row = place  # its key is where it should be
            request.computed += 1
            request.output.append(chosen[row])
        if drafts and row == count - 1 and drafts[-1] == chosen[row]:
            request.output.append(chosen[-1])  # the sibling: its key is computed again, in its place
        ends = [place for place, token in enumerate(request.output, 1) if token in self.ends]
        del request.output[min([request.max_tokens, *ends]) :]
        if ends or len(request.output) == request.max_tokens:
            self.running.remove(request)
