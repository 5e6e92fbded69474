"""BigGAN-deep's sections of a recipe. Its channels follow BigGAN's tables, which each network reads in its own way.

Brock et al. 2019, appendix B, tables 7 to 9: G's blocks have the same multipliers as BigGAN's. D's first entry is the
output of a convolution on the image, and each further one that of a step of blocks. 16 and 32 are BigGAN's tables too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import Depth, GeneratorSection, NetworkSection, bottom_of
from bigsgan.config.families.biggan import (
    BIGGAN_DISCRIMINATOR,
    BIGGAN_GENERATOR,
    NormSection,
    biggan_discriminator_resolutions,
    check_attention,
    check_resolution,
)
from bigsgan.config.sections import Section, Width
from bigsgan.errors import UserError
from bigsgan.images.size import Size

BOTTLENECK = 4
"""A block's outer channels divided by its inner ones."""


class DeepSection(Section):
    """The size of a network."""

    channels: Width = 128
    """Width: layers have multiples of it."""
    depth: Depth = 2
    """Blocks for each change of resolution, one of which makes it."""
    attention: list[int] = Field(default=[])
    """Resolutions (shorter sides) of feature maps that self-attention follows."""


class BigGANDeepGenerator(DeepSection, NormSection, GeneratorSection):
    """BigGAN-deep's generator: the whole latent goes to every block (Brock et al. 2019, arXiv 1809.11096)."""

    family: Literal["biggan_deep"] = "biggan_deep"
    latent_size: Width = 128
    embedding_size: Width = 128
    """Size of the class embedding."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        check_resolution("BigGAN-deep", BIGGAN_GENERATOR, data)
        multipliers = BIGGAN_GENERATOR[data.network_size.nominal]
        bottom = bottom_of(data.network_size).shorter
        check_attention("generator", self.attention, [bottom << (i + 1) for i in range(len(multipliers) - 1)])
        _check_bottleneck("generator", self.channels, min(multipliers[:-1]))


class BigGANDeepDiscriminator(DeepSection, NetworkSection):
    """BigGAN-deep's projection discriminator (Brock et al. 2019, arXiv 1809.11096)."""

    family: Literal["biggan_deep"] = "biggan_deep"

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        check_resolution("BigGAN-deep", BIGGAN_DISCRIMINATOR, data)
        check_attention("discriminator", self.attention, deep_discriminator_resolutions(data.network_size))
        _check_bottleneck("discriminator", self.channels, min(BIGGAN_DISCRIMINATOR[data.network_size.nominal][1:]))


def deep_discriminator_resolutions(size: Size) -> list[int]:
    """Shorter side of the feature map after each of D's steps."""
    return biggan_discriminator_resolutions(size)[:-1]


def _check_bottleneck(network: str, channels: int, narrowest: int) -> None:
    if channels * narrowest < BOTTLENECK:
        field, least = f"{network}.channels", -(-BOTTLENECK // narrowest)
        detail = f"a block's bottleneck has {BOTTLENECK} times fewer channels"
        raise UserError(field, channels, f"must be at least {least}", f"set {field}={least} or more", detail)
