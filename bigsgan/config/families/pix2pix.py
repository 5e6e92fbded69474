"""pix2pix's sections of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from bigsgan.config.families.base import Depth, NetworkSection
from bigsgan.config.sections import Data, Width
from bigsgan.errors import UserError

MOST_LEVELS = 8


class Pix2PixGenerator(NetworkSection):
    """U-Net that translates an image (Isola et al. 2017, arXiv 1611.07004)."""

    draws: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    family: Literal["pix2pix"] = "pix2pix"
    channels: Width = 64
    """Of the finest feature map; coarser ones have up to eight times as many."""
    norm: Literal["batch", "instance"] = "batch"
    dropout: bool = True
    """Drop half the features of the coarsest enlarging layers, which stands in for a latent."""

    def check(self, data: Data) -> None:
        """Raise UserError where the section does not fit the data."""
        pix2pix_levels(data.resolution)


class Pix2PixDiscriminator(NetworkSection):
    """PatchGAN: a logit for each patch of an input and an image (Isola et al. 2017, section 3.2.2)."""

    paired: ClassVar[bool] = True
    family: Literal["pix2pix"] = "pix2pix"
    channels: Width = 64
    """Of the finest feature map; coarser ones have up to eight times as many."""
    depth: Depth = 3
    """Halvings: 3 give patches of 70 x 70 pixels."""
    norm: Literal["batch", "instance"] = "batch"

    def check(self, data: Data) -> None:
        """Raise UserError where the section does not fit the data."""
        if data.resolution >> self.depth < 3:
            most = max(1, (data.resolution // 3).bit_length() - 1)
            problem = f"leaves no patch of an image of {data.resolution} pixels"
            raise UserError("discriminator.depth", self.depth, problem, f"set discriminator.depth={most} or less")


def pix2pix_levels(resolution: int) -> int:
    """Halvings of the U-Net: down to one pixel, or eight.

    Raises:
        UserError: The resolution cannot be halved so often.
    """
    levels = min(MOST_LEVELS, (resolution & -resolution).bit_length() - 1)
    if resolution < 8 or resolution >> levels > 8 or levels < 3:
        nearest = max(8, 1 << (resolution.bit_length() - 1))
        problem = "cannot be halved often enough for a U-Net"
        raise UserError("data.resolution", resolution, problem, f"set data.resolution={nearest}")
    return levels
