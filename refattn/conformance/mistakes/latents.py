"""Mistakes over latents, keys and values in one row."""

from torch import Tensor

from refattn.conformance.mistakes.formula import Attention


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


class ValuesFromTheEnd(Attention):
    """Values are the last elements of a latent row, rotary part included, not the first."""

    paths: tuple[str, ...] = ("mla", "sparse_latents", "packed_latents", "packed_mla")

    def _pools(self) -> tuple[Tensor, Tensor]:
        key, value = super()._pools()
        return key, key[..., -value.shape[-1] :]
