"""Mistakes in reading latents."""

import math

from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.where import given


class RotaryDropped(Attention):
    """The rotary part of the keys is left out of the scores."""

    paths: tuple[str, ...] = ("mla", "sparse_latents", "packed_latents", "packed_mla")

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        rank = self.arguments["latent_rank"]
        return super()._scores(query[..., :rank], key[..., :rank], pos, j)


class RotaryOnly(Attention):
    """Only the rotary part of the keys is in the scores."""

    paths: tuple[str, ...] = ("mla", "sparse_latents", "packed_latents", "packed_mla")

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        rank = self.arguments["latent_rank"]
        return super()._scores(query[..., rank:], key[..., rank:], pos, j)


class CacheScaleIgnored(Attention):
    """The scale of a pool of latents in fp8 is ignored."""

    paths: tuple[str, ...] = ("mla", "sparse_latents")
    where = given("cache_scale")

    def _pools(self) -> tuple[Tensor, Tensor]:
        scale = self.arguments["cache_scale"]
        key, value = super()._pools()
        return key / scale, value / scale


class RankFixed(Attention):
    """The size of values is fixed, whatever the rank is: further elements are 0, or not written."""

    paths: tuple[str, ...] = ("mla", "sparse_latents")
    variants = ((64, 0.0), (64, math.nan))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: tuple[int, float]) -> bool:
        """Return whether the rank is larger."""
        return bool(arguments["latent_rank"] > variant[0])

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out[: self.example.num_tokens, :, self.variant[0] :] = self.variant[1]
        return out, lse


class ValuesFromTheEnd(Attention):
    """Values are the last elements of a latent row, rotary part included, not the first."""

    paths: tuple[str, ...] = ("mla", "sparse_latents", "packed_latents", "packed_mla")

    def _pools(self) -> tuple[Tensor, Tensor]:
        key, value = super()._pools()
        return key, key[..., -value.shape[-1] :]
