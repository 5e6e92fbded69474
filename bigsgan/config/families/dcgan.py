"""DCGAN's sections of a recipe."""

from __future__ import annotations

from typing import Literal

from bigsgan.config.data import Data
from bigsgan.config.families.base import GeneratorSection, NetworkSection, check_doubled
from bigsgan.config.families.blocks import BlockSection, check_groups
from bigsgan.config.sections import Width


class _DCGAN(BlockSection, NetworkSection):
    """Keys of both networks (Radford, Metz and Chintala 2016, arXiv 1511.06434)."""

    family: Literal["dcgan"] = "dcgan"
    channels: Width = 64
    """Channels of the finest feature map; each coarser one has twice as many."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        check_doubled(data, "DCGAN")
        check_groups(self.network, self, [self.channels])


class DCGANGenerator(_DCGAN, GeneratorSection):
    """DCGAN's generator."""

    of_classes = ("embedding_size",)
    normalizes_batch = True
    latent_size: Width = 100
    embedding_size: Width = 32
    """Size of the class embedding."""


class DCGANDiscriminator(_DCGAN):
    """DCGAN's discriminator, with a projection head if there are classes."""

    norm: Literal["batch", "spectral", "none"] = "batch"
    """Batch norm as published, spectral norm (Miyato et al. 2018, arXiv 1802.05957), or neither."""
