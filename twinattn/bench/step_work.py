"""What a step does beside attention, as works of a row: it writes new tokens into the pool, and makes its tables."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from refattn.batch import Batch
from twinattn.bench.work import Judge, WrongAnswerError


@dataclass(frozen=True)
class CacheWrite:
    """New tokens written into the pool at shuffled slots.

    Attributes:
        num_tokens: tokens to write.
        num_kv_heads: KV heads.
        head_size: elements of a key and of a value.
        block_size: tokens in a block.
    """

    num_tokens: int
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    def flops(self) -> int:
        """Count none."""
        return 0

    def reads(self, itemsize: int) -> int:
        """Count each new key and value once."""
        return 2 * itemsize * self.num_tokens * self.num_kv_heads * self.head_size

    def writes(self, itemsize: int) -> int:
        """Count them once more, in the pool."""
        return self.reads(itemsize)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Tokens":
        """Draw tokens, an empty pool twice their size, and a slot for each."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.num_tokens, self.num_kv_heads, self.head_size)
        key, value = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(2))
        pool = key.new_zeros(2 * self.num_tokens // self.block_size, self.block_size, *shape[1:])
        slots = torch.randperm(2 * self.num_tokens, generator=generator, device=device)[: self.num_tokens]
        return Tokens(key, value, pool, pool.clone(), slots)

    def judge(self, inputs: "Tokens") -> Judge:
        """Expect each token at its slot, bit by bit, and zeros everywhere else."""

        def judge(_: Any) -> None:
            for name, rows, pool in (
                ("key_cache", inputs.key, inputs.key_cache),
                ("value_cache", inputs.value, inputs.value_cache),
            ):
                flat = rearrange(pool, "n p hk d -> (n p) hk d")
                expected = torch.zeros_like(flat).index_copy_(0, inputs.slots, rows)
                wrong = int((flat != expected).sum())
                pool.zero_()  # the next one has to write it again
                if wrong:
                    raise WrongAnswerError(f"{name}: {wrong} elements differ")

        return judge


class QuantizedWrite(CacheWrite):
    """The same into a pool of fp8, each head under a scale of its own."""

    def writes(self, itemsize: int) -> int:
        """Count a byte for each element in the pool."""
        return self.reads(1)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Tokens":
        """Draw tokens, an empty quantized pool twice their size, and a slot for each."""
        key, value, *pools, slots = super().draw(device, dtype, seed)
        key_cache, value_cache = (pool.to(torch.uint8) for pool in pools)
        return Tokens(key, value, key_cache, value_cache, slots)

    def scales(self, device: torch.device) -> tuple[Float[Tensor, "hk"], Float[Tensor, "hk"]]:
        """Return the scales of keys and of values, by head."""
        by_head = torch.linspace(0.3, 1.7, self.num_kv_heads, device=device)
        return by_head, by_head.flip(0).contiguous()

    def judge(self, inputs: "Tokens") -> Judge:
        """Expect the quantized value of each token at its slot, bit by bit, and zeros everywhere else."""
        scales = self.scales(inputs.key.device)
        quantized = [
            (x.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
            for x, scale in zip((inputs.key, inputs.value), scales, strict=True)
        ]
        return super().judge(inputs._replace(key=quantized[0], value=quantized[1]))


class Tokens(NamedTuple):
    """The inputs of a cache write."""

    key: Float[Tensor, "t hk d"]
    value: Float[Tensor, "t hk d"]
    key_cache: Shaped[Tensor, "n p hk d"]
    value_cache: Shaped[Tensor, "n p hk d"]
    slots: Int64[Tensor, "t"]


@dataclass(frozen=True)
class Decodes:
    """The tables of a step of decodes of random lengths, without any keys.

    Attributes:
        num_seqs: sequences, each with one new token.
        longest: the most tokens of a sequence.
        chunk: tokens in a chunk of local attention.
        block_size: tokens in a block.
    """

    num_seqs: int
    longest: int
    chunk: int
    block_size: int = 16

    def flops(self) -> int:
        """Count none."""
        return 0

    def reads(self, itemsize: int) -> int:
        """Count both lengths and one block of each sequence."""
        return 4 * self.num_seqs * 3

    def writes(self, itemsize: int) -> int:
        """Count two lengths of each sequence, or one slot in 64 bits."""
        return 4 * self.num_seqs * 2

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Step":
        """Draw lengths and a block table."""
        generator = torch.Generator().manual_seed(seed)
        b, columns = self.num_seqs, self.longest // self.block_size
        batch = Batch(
            cu_seqlens_q=torch.arange(b + 1, dtype=torch.int32, device=device),
            seq_lens=torch.randint(1, self.longest + 1, (b,), generator=generator).int().to(device),
            block_table=torch.randperm(b * columns, generator=generator).int().view(b, columns).to(device),
            max_query_len=1,
            max_seq_len=self.longest,
        )
        return Step(self, batch)


class Step(NamedTuple):
    """The inputs of the tables of a step."""

    work: Decodes
    batch: Batch

    @property
    def sequences(self) -> list[tuple[int, list[int]]]:
        """The length and the blocks of each sequence."""
        assert self.batch.block_table is not None
        return list(zip(self.batch.seq_lens.tolist(), self.batch.block_table.tolist(), strict=True))


class VirtualBatches(Decodes):
    """The virtual batches of local attention: for a decode the chunk that its token is in."""

    def reads(self, itemsize: int) -> int:
        """Count the blocks of a chunk of each sequence besides."""
        return super().reads(itemsize) + self._blocks()

    def writes(self, itemsize: int) -> int:
        """Count them in the new table too."""
        return super().writes(itemsize) + self._blocks()

    def _blocks(self) -> int:
        return 4 * self.num_seqs * self.chunk // self.block_size

    def judge(self, inputs: Step) -> Judge:
        """Expect one virtual sequence with a query for each sequence, over the blocks of its last chunk."""

        def judge(virtual: Batch) -> None:
            asking = virtual.query_lens.tolist()
            answers = [sequence for i, sequence in enumerate(Step(self, virtual).sequences) if asking[i]]
            for (seq_len, blocks), (num_keys, kept) in zip(inputs.sequences, answers, strict=True):
                begin = (seq_len - 1) // self.chunk * self.chunk
                expected = blocks[begin // self.block_size : (seq_len - 1) // self.block_size + 1]
                if num_keys != seq_len - begin or kept[: len(expected)] != expected:
                    raise WrongAnswerError(f"a sequence of {seq_len} tokens: {num_keys} keys, blocks {kept}")

        return judge


class Slots(Decodes):
    """The slots that the new tokens are written to."""

    def judge(self, inputs: Step) -> Judge:
        """Expect the row of the last token in its sequence's last block."""

        def judge(slots: Tensor) -> None:
            for (seq_len, blocks), slot in zip(inputs.sequences, slots.tolist(), strict=True):
                block, row = divmod(seq_len - 1, self.block_size)
                if slot != blocks[block] * self.block_size + row:
                    raise WrongAnswerError(f"slot {slot} for token {seq_len - 1} in blocks {blocks}")

        return judge
