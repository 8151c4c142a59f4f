"""Where the keys are: a type for each storage, with the tensors that hold keys and values, and what reads them.

    Rows              one key after the other, without a cache       dense, encoders, new tokens among themselves
    Pages             blocks of a pool, by a block table             chunked prefill, windows, local, cascades, trees
    QuantizedPages    the same in 8 bits, and scales                 quantized
    Latents           a pool of vectors that are key and value       mla
    Pairs             pools for both heads of each pair              differential

Who may see whom is the plan's to say: every storage is read under every plan over rows, or over pages.
"""

from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from refattn.interface.scales import Fp8Scales, Int8Scales


class Rows(NamedTuple):
    """Keys and values of all sequences, one after the other.

    Attributes:
        key: the keys.
        value: the values that belong to them.
    """

    key: Float[Tensor, "s hk d"]
    value: Float[Tensor, "s hk dv"]

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return self.value.shape[-1]


class Pages(NamedTuple):
    """Keys and values in the blocks of a pool.

    Attributes:
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
    """

    key_cache: Float[Tensor, "n p hk d"]
    value_cache: Float[Tensor, "n p hk dv"]

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return self.value_cache.shape[-1]


class QuantizedPages(NamedTuple):
    """Quantised keys and values in the blocks of a pool: a number is `scale * code`.

    Attributes:
        key_cache: the pool of keys: fp8, as its own type or as bytes, or int8.
        value_cache: the pool of values, of the same type; or numbers, if there is no scale of int8 values.
        scales: what codes are multiplied with, and whether queries are rounded as keys are.
    """

    key_cache: Shaped[Tensor, "n p hk d"]
    value_cache: Shaped[Tensor, "n p hk dv"]
    scales: Fp8Scales | Int8Scales

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return self.value_cache.shape[-1]


class Latents(NamedTuple):
    """Latents with their rotary keys: one key head for all query heads, whose value is the latent.

    Attributes:
        cache: the pool; a row is a latent, its rotary key, and what is never read. Numbers, or codes of fp8.
        latent_rank: elements of a latent, `r`.
        cache_scale: what codes are multiplied with; 1 for numbers.
    """

    cache: Shaped[Tensor, "n p c"]
    latent_rank: int
    cache_scale: float = 1.0

    @property
    def value_head_size(self) -> int:
        """Elements of a value: the latent."""
        return self.latent_rank


class Pairs(NamedTuple):
    """Both heads of each pair of differential attention, in halves: two pools of keys, and two of values.

    Attributes:
        cache: `[half, key or value, n, p, hk/2, d]`, or `[half, key or value, s, hk/2, d]` in rows.
        scales: those of an fp8 cache, in the order of interleaved pairs; None for numbers.
    """

    cache: Shaped[Tensor, "2 2 *pages pairs d"]
    scales: Fp8Scales | None = None

    def of_halves(self, half: int, other: int) -> "Rows | Pages | QuantizedPages":
        """Return the keys of one half with the values of one half."""
        key, value = self.cache[half, 0], self.cache[other, 1]
        if self.scales is not None:
            return QuantizedPages(key, value, self.scales.of_halves(half, other))
        return Rows(key, value) if key.ndim == 3 else Pages(key, value)


Keys = Rows | Pages | QuantizedPages | Latents
AnyKeys = Keys | Pairs
