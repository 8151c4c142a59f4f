"""A first engine: a whole server of one file, from the prompts to the tokens, over the paths of `refattn`.

    generate                  until no request is left
      step
        schedule              which requests compute how many tokens: decodes first, then prompts in chunks
        forward               the model, once over the new tokens of all of them
          rms_norm, rotate    and in each layer:
          kv_cache.write      new keys and values go to their slots in the pool
          attention           each new token sees the tokens of its own request
        sample                the next token of each request that has no more tokens to compute

It serves models of the family of Llama, such as SmolLM2: `python -m twinattn.course.first_engine "Why do cats purr?"`.
To serve with the fast twin, change the import. Prefix caches, speculation, CUDA graphs, windows, latents and states are
in `twinattn.engine`, which is this loop, grown up; `docs/request.md` follows a request through both.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import linear, silu

from refattn import chunked_prefill, kv_cache, metadata  # or: from fastattn import chunked_prefill, kv_cache, metadata

# --- the model: what is around attention ---


def rms_norm(x: Float[Tensor, "t n"], weight: Float[Tensor, "n"], eps: float) -> Float[Tensor, "t n"]:
    """Scale each row to a root mean square of 1, then each element by its weight.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Float[Tensor, "t h d"], positions: Int64[Tensor, "t"], base: float) -> Float[Tensor, "t h d"]:
    """Rotate each head by its token's position, so that a product of query and key depends on their distance alone.

    Elements i and i + d / 2 are a point in the plane, and turn by `position * base ** (-2 i / d)`.

    Source: Su et al. 2021, "RoFormer", with the pairs of Llama's checkpoints for transformers.
    """
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    steps = base ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angles = positions[:, None, None] * steps  # [t, 1, d / 2]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def sample(logits: Float[Tensor, "v"]) -> int:
    """Return the most likely token; `twinattn.engine.sampling` also draws, by temperature, top-k and top-p."""
    return int(logits.argmax())


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query, key, value -> output


class Llama:
    """The layers of a Llama, with the weights of a model that transformers has loaded.

    Args:
        model: the model of transformers.
        norm: `rms_norm`, or a function of the same signature.
        rotary: `rotate`, or a function of the same signature.
    """

    def __init__(self, model: Any, norm: Callable[..., Tensor] = rms_norm, rotary: Callable[..., Tensor] = rotate):
        self.config, self.norm, self.rotary = model.config, norm, rotary
        if model.config.model_type != "llama" or model.config.rope_parameters["rope_type"] != "default":
            raise ValueError(f"model: expected a Llama with plain rotary positions, got {type(model).__name__}")
        self.weights = {name.removeprefix("model."): weight.detach() for name, weight in model.state_dict().items()}
        self.layers = [
            {name.removeprefix(start): weight for name, weight in self.weights.items() if name.startswith(start)}
            for start in (f"layers.{layer}." for layer in range(model.config.num_hidden_layers))
        ]

    def forward(
        self, tokens: Int64[Tensor, "t"], positions: Int64[Tensor, "t"], rows: Int64[Tensor, "b"], attend: Attend
    ) -> Float[Tensor, "b v"]:
        """Run the model over the new tokens of all requests, one after the other.

        Args:
            tokens: the new tokens.
            positions: of each in its own request.
            rows: the tokens whose logits are wanted.
            attend: writes the keys and values of a layer, and attends: the only place where tokens meet.

        Returns:
            The logits of what follows each of these tokens.
        """
        config, weights = self.config, self.weights
        base, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
        x = weights["embed_tokens.weight"][tokens]
        for layer, own in enumerate(self.layers):
            y = self.norm(x, own["input_layernorm.weight"], eps)
            query, key, value = (
                rearrange(linear(y, own[f"self_attn.{name}_proj.weight"]), "t (h d) -> t h d", d=config.head_dim)
                for name in "qkv"
            )
            query, key = (self.rotary(heads, positions, base) for heads in (query, key))
            out = rearrange(attend(layer, query, key, value), "t h d -> t (h d)")
            x = x + linear(out, own["self_attn.o_proj.weight"])
            y = self.norm(x, own["post_attention_layernorm.weight"], eps)
            y = silu(linear(y, own["mlp.gate_proj.weight"])) * linear(y, own["mlp.up_proj.weight"])
            x = x + linear(y, own["mlp.down_proj.weight"])
        return linear(self.norm(x[rows], weights["norm.weight"], eps), weights["lm_head.weight"])


# --- the server: requests, blocks, steps ---


@dataclass(eq=False)
class Request:
    """A prompt, its output so far, and where its keys are.

    tokens    prompt ............ | output ......
    computed  ---------------->|                     their keys are in the pool, in `blocks`
                                pending              what is left to compute: 1 while it decodes
    """

    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the output."""
        return self.prompt + self.output

    @property
    def pending(self) -> int:
        """Tokens without keys in the pool."""
        return len(self.prompt) + len(self.output) - self.computed


class FirstEngine:
    """Requests, a pool of blocks for each layer, and a loop of steps.

    Args:
        model: a Llama of transformers.
        num_blocks: of each pool.
        block_size: tokens in a block.
        max_num_batched_tokens: in a step; more of a prompt wait for the next step.
    """

    def __init__(self, model: Any, *, num_blocks: int = 256, block_size: int = 16, max_num_batched_tokens: int = 64):
        self.model = Llama(model)
        config, end = model.config, model.generation_config.eos_token_id
        self.ends = set(end if isinstance(end, list) else [end])
        sizes = num_blocks, block_size, config.num_key_value_heads, config.head_dim
        where = dict(dtype=model.dtype, device=model.device)
        self.pools = [kv_cache.allocate(*sizes, **where) for _ in range(config.num_hidden_layers)]
        self.block_size, self.max_num_batched_tokens, self.device = block_size, max_num_batched_tokens, model.device
        self.capacity = num_blocks * block_size
        self.free = list(range(num_blocks))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the most likely tokens after each prompt, up to `max_tokens` or the end.

        Raises:
            ValueError: if a prompt is empty, or may need more tokens than the pool has.
        """
        for prompt in prompts:
            if not 0 < len(prompt) <= self.capacity - max_tokens:
                raise ValueError(
                    f"prompts: expected 1 to {self.capacity - max_tokens} tokens in each, got {len(prompt)}"
                )
        requests = [Request(prompt, max_tokens) for prompt in prompts]
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()
        return [request.output for request in requests]

    def step(self) -> None:
        """Choose tokens, run the model over them once, and append the next token of each request that is ready."""
        scheduled = self.schedule()
        query_lens = [count for _, count in scheduled]
        seq_lens = [request.computed + count for request, count in scheduled]
        tables = [request.blocks for request, _ in scheduled]
        batch = metadata.make_batch(query_lens, seq_lens, tables, device=self.device)
        num_tokens, size = sum(query_lens), self.block_size
        positions = metadata.positions(batch, num_tokens)
        slots = metadata.slot_mapping(batch, num_tokens, block_size=size)
        plan = chunked_prefill.plan(batch, block_size=size)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key_cache, value_cache = self.pools[layer]
            kv_cache.write(key, value, key_cache, value_cache, slots)
            out = chunked_prefill.attention(query, key_cache, value_cache, plan)
            assert isinstance(out, Tensor)  # without its log-sum-exps
            return out

        tokens = [token for r, count in scheduled for token in r.tokens[r.computed : r.computed + count]]
        last = [end - 1 for end in accumulate(query_lens)]  # the last new token of each request
        ids, rows = torch.tensor(tokens, device=self.device), torch.tensor(last, device=self.device)
        with torch.no_grad():
            logits = self.model.forward(ids, positions, rows, attend)
        for (request, count), row in zip(scheduled, logits, strict=True):
            request.computed += count
            if request.pending == 0:  # else its prompt goes on in the next step
                self.append(request, sample(row))

    def schedule(self) -> list[tuple[Request, int]]:
        """Return requests and how many tokens each computes: decodes first, then prompts, as far as both budgets reach.

        If there are no blocks for the next token of a request, the newest request gives up its own and waits again: it
        will compute its tokens once more.
        """
        scheduled: dict[Request, int] = {}
        left = self.max_num_batched_tokens
        for request in sorted(self.running, key=lambda request: request.pending > 1):
            count = min(request.pending, left)
            while count and request in self.running and not self.allocate(request, count):
                newest = self.running[-1]
                left += scheduled.pop(newest, 0)
                self.preempt(newest)
            if count and request in self.running:
                scheduled[request] = count
                left -= count
        while self.waiting and left:
            request = self.waiting[0]
            count = min(request.pending, left)
            if not self.allocate(request, count):
                break
            self.running.append(self.waiting.popleft())
            scheduled[request] = count
            left -= count
        return list(scheduled.items())

    def allocate(self, request: Request, count: int) -> bool:
        """Take the blocks that `count` more tokens need; without enough free ones take none, and return False."""
        needed = -(-(request.computed + count) // self.block_size) - len(request.blocks)
        if needed > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(needed)]
        return True

    def release(self, request: Request) -> None:
        """Return the blocks of a request."""
        self.running.remove(request)
        self.free += request.blocks
        request.blocks = []

    def preempt(self, request: Request) -> None:
        """Let a request wait again, first of all, with nothing computed."""
        self.release(request)
        request.computed = 0
        self.waiting.appendleft(request)

    def append(self, request: Request, token: int) -> None:
        """Append a token to the output of a request, and end the request if it was the last one."""
        request.output.append(token)
        if token in self.ends or len(request.output) == request.max_tokens:
            self.release(request)


def main(prompts: Sequence[str]) -> None:
    """Answer some prompts with SmolLM2, and show what it says."""
    from twinattn.engine.demo_model import load, model_file
    from twinattn.progress import Progress

    engine = None
    with Progress(lambda: f"{sum(len(r.output) for r in engine.running)} tokens" if engine else "loading the model"):
        model, tokenizer = load(model_file())
        engine = FirstEngine(model)
        chats = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in prompts
        ]
        outputs = engine.generate(chats, max_tokens=40)
    for prompt, output in zip(prompts, outputs, strict=True):
        sys.stdout.write(f"{prompt}\n    {tokenizer.decode(output, skip_special_tokens=True)}\n")


if __name__ == "__main__":
    main(sys.argv[1:] or ["Why is the sky blue?", "Why do cats purr?"])
