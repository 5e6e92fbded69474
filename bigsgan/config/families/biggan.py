"""BigGAN's sections of a recipe, and its tables."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from bigsgan.config.families.base import GeneratorSection, NetworkSection
from bigsgan.config.sections import Data, Width
from bigsgan.errors import UserError

# Output channels of each block in units of ``channels``, coarse to fine for G (the first entry is the first
# block's input) and fine to coarse for D. Brock et al. 2019, appendix B; 16 is ours.
BIGGAN_GENERATOR = {
    16: (4, 4, 4),
    32: (4, 4, 4, 4),
    64: (16, 16, 8, 4, 2),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
    512: (16, 16, 8, 8, 4, 2, 1, 1),
}
BIGGAN_DISCRIMINATOR = {
    16: (4, 4, 4),
    32: (4, 4, 4, 4),
    64: (1, 2, 4, 8, 16),
    128: (1, 2, 4, 8, 16, 16),
    256: (1, 2, 4, 8, 8, 16, 16),
    512: (1, 1, 2, 4, 8, 8, 16, 16),
}


class BigGANGenerator(GeneratorSection):
    """BigGAN's generator (Brock et al. 2019, arXiv 1809.11096)."""

    family: Literal["biggan"] = "biggan"
    channels: Width = 96
    latent_size: Width = 120
    """Numbers in a latent; with ``hierarchical`` they are cut into equal chunks, one for the input and each block."""
    embedding_size: Width = 128
    """Size of the class embedding that all blocks share."""
    hierarchical: bool = True
    attention: list[int] = Field(default=[])
    """Resolutions of feature maps that self-attention follows."""

    def check(self, data: Data) -> None:
        """Raise UserError where the section does not fit the data."""
        _check_resolution(data.resolution)
        blocks = len(BIGGAN_GENERATOR[data.resolution]) - 1
        if self.hierarchical and self.latent_size % (blocks + 1):
            nearest = max(1, round(self.latent_size / (blocks + 1))) * (blocks + 1)
            raise UserError(
                "generator.latent_size",
                self.latent_size,
                f"does not divide into {blocks + 1} chunks (the input and {blocks} blocks)",
                f"set generator.latent_size={nearest} or generator.hierarchical=false",
            )
        _check_attention("generator", self.attention, [4 * 2 ** (i + 1) for i in range(blocks)])


class BigGANDiscriminator(NetworkSection):
    """BigGAN's projection discriminator (Brock et al. 2019; Miyato and Koyama 2018, arXiv 1802.05637)."""

    family: Literal["biggan"] = "biggan"
    channels: Width = 96
    attention: list[int] = Field(default=[])

    def check(self, data: Data) -> None:
        """Raise UserError where the section does not fit the data."""
        _check_resolution(data.resolution)
        _check_attention("discriminator", self.attention, biggan_discriminator_resolutions(data.resolution))


def biggan_discriminator_resolutions(resolution: int) -> list[int]:
    """Resolution of the feature map after each of D's blocks."""
    blocks = len(BIGGAN_DISCRIMINATOR[resolution])
    halvings = 2 if resolution <= 32 else blocks - 1
    return [resolution >> min(i + 1, halvings) for i in range(blocks)]


def _check_resolution(resolution: int) -> None:
    if resolution not in BIGGAN_GENERATOR:
        known = sorted(BIGGAN_GENERATOR)
        nearest = min(known, key=lambda r: abs(math.log(r / resolution)))
        raise UserError("data.resolution", resolution, f"is none of BigGAN's {known}", f"set data.resolution={nearest}")


def _check_attention(network: str, attention: list[int], available: list[int]) -> None:
    for resolution in attention:
        if resolution not in available:
            raise UserError(
                f"{network}.attention",
                attention,
                f"names a feature map of {resolution}, which there is not",
                f"choose from {sorted(set(available))}, or [] for none",
            )
    if len(set(attention)) != len(attention):
        raise UserError(f"{network}.attention", attention, "names a resolution twice", "name each once")
