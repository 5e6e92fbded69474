"""BigGAN's sections of a recipe, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import (
    BOTTOM,
    Depth,
    GeneratorSection,
    NetworkSection,
    bottom_of,
    check_doubled,
    nearest_doubled,
    unfit_size,
)
from bigsgan.config.families.blocks import BlockSection, check_groups
from bigsgan.config.sections import PositiveFloat, PositiveInt, Section, Width
from bigsgan.errors import UserError
from bigsgan.images.size import Size

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


class ScaledSection(BlockSection):
    """The size of a network, and the variant of its convolutions."""

    channels: Width = 96
    """Width: layers have multiples of it."""
    width: Annotated[float, Field(gt=0, le=64)] = 1.0
    """Factor of all channels; unless 1, they are rounded to multiples of 8."""
    depth: Depth = 1
    """Blocks for each change of resolution; those after the first keep resolution and channels."""
    attention: list[int] = Field(default=[])
    """Resolutions (shorter sides) of feature maps that self-attention follows."""

    def widths(self, multipliers: Sequence[int]) -> list[int]:
        """Return the channels of feature maps, given their multiples of ``channels``."""
        widths = [self.channels * m for m in multipliers]
        return widths if self.width == 1 else [max(8, 8 * round(self.width * w / 8)) for w in widths]


class NormSection(Section):
    """The epsilons of G's batch norm."""

    normalizes_batch: ClassVar[bool] = True
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance by the blocks' batch norm (``BN_eps`` of BigGAN-PyTorch)."""
    output_norm_eps: PositiveFloat = 1e-5
    """The same in the last batch norm; always 1e-5 in BigGAN-PyTorch."""


class BigGANGenerator(ScaledSection, NormSection, GeneratorSection):
    """BigGAN's generator (Brock et al. 2019, arXiv 1809.11096)."""

    family: Literal["biggan"] = "biggan"
    latent_size: Width = 120
    """Numbers in a latent."""
    embedding_size: Width = 128
    """Size of the class embedding."""
    hierarchical: bool = True
    """Give the input and each block its own chunk of the latent."""
    shared_embedding: bool = True
    """Batch norm's gains and biases are linear in one embedding; otherwise each has its own."""
    multiples: Annotated[list[PositiveInt], Field(max_length=16)] | None = None
    """Channels of the feature maps from 4x4 on, divided by ``channels``; by default as published. StudioGAN has [16, 8,
    4, 2, 1] at 64x64."""

    def steps(self, resolution: int) -> list[int]:
        """Return the channels of the feature maps from 4x4 on, by a square's resolution. Others have as many."""
        return self.widths(self.multiples or BIGGAN_GENERATOR[resolution])

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        check_resolution("BigGAN", BIGGAN_GENERATOR, data)
        size = data.network_size
        blocks = len(BIGGAN_GENERATOR[size.nominal]) - 1
        if self.multiples is not None and len(self.multiples) != blocks + 1:
            problem, detail = f"must have {blocks + 1} numbers", f"from {bottom_of(size)} to {size}"
            raise UserError("generator.multiples", self.multiples, problem, "change it, or set null", detail)
        if self.hierarchical and not self.shared_embedding:
            problem, detail = "must be false with shared_embedding=false", "chunks are appended to the shared embedding"
            raise UserError("generator.hierarchical", True, problem, "set generator.hierarchical=false", detail)
        if self.hierarchical and self.latent_size % (blocks + 1):
            nearest = max(1, round(self.latent_size / (blocks + 1))) * (blocks + 1)
            problem = f"must be a multiple of {blocks + 1}"
            remedy = f"set generator.latent_size={nearest} or generator.hierarchical=false"
            detail = f"it is split into chunks for the input and {blocks} blocks"
            raise UserError("generator.latent_size", self.latent_size, problem, remedy, detail)
        check_attention("generator", self.attention, [bottom_of(size).shorter << (i + 1) for i in range(blocks)])
        check_groups("generator", self, self.steps(size.nominal))


class BigGANDiscriminator(ScaledSection, NetworkSection):
    """BigGAN's projection discriminator (Brock et al. 2019; Miyato and Koyama 2018, arXiv 1802.05637)."""

    family: Literal["biggan"] = "biggan"
    rectified_shortcut: bool = False
    """Begin a block's shortcut behind its first ReLU, as StudioGAN does."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        check_resolution("BigGAN", BIGGAN_DISCRIMINATOR, data)
        check_attention("discriminator", self.attention, biggan_discriminator_resolutions(data.network_size))
        check_groups("discriminator", self, self.widths(BIGGAN_DISCRIMINATOR[data.network_size.nominal]))


def biggan_discriminator_resolutions(size: Size) -> list[int]:
    """Shorter side of the feature map after each of D's blocks."""
    blocks = len(BIGGAN_DISCRIMINATOR[size.nominal])
    halvings = 2 if size.nominal <= 32 else blocks - 1
    return [size.shorter >> min(i + 1, halvings) for i in range(blocks)]


def check_resolution(family: str, known: Mapping[int, object], data: Data) -> None:
    """Raise UserError if a family has no table for the size of its images."""
    size = data.network_size
    if size.nominal not in known:
        share = min(1.0, max(known) / size.shorter)  # of an image that is too large
        nearest = nearest_doubled(Size(*(max(min(known), round(side * share)) for side in size)))
        bound = ("at least", min(known)) if size.nominal < min(known) else ("less than", 2 * max(known))
        raise unfit_size(data, *bound, family, nearest)
    if (nearest := nearest_doubled(size)).nominal not in known:  # which is just too large
        nearest = nearest_doubled(Size(*(round(side / 2) for side in nearest)))
        raise unfit_size(data, "a multiple of", size.nominal // BOTTOM, family, nearest)
    check_doubled(data, family)


def check_attention(network: str, attention: list[int], available: list[int]) -> None:
    """Raise UserError if attention names a feature map that the network does not have, or one twice."""
    for resolution in attention:
        if resolution not in available:
            problem = f"must be resolutions of feature maps, {sorted(set(available))}"
            raise UserError(f"{network}.attention", attention, problem, "choose from these, or [] for none")
    if len(set(attention)) != len(attention):
        raise UserError(f"{network}.attention", attention, "must name each resolution once", "remove the second")
