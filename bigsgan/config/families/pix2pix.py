"""pix2pix's sections of a recipe."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from bigsgan.config.data import Data
from bigsgan.config.families.base import Depth, NetworkSection
from bigsgan.config.sections import Width
from bigsgan.errors import UserError
from bigsgan.images.size import Size

MOST_LEVELS = 8

Norm = Literal["batch", "instance", "none"]
"""Norm after a convolution. Only convolutions before an instance norm have a bias, as in the public PyTorch project."""


class Pix2PixGenerator(NetworkSection):
    """Translates an image: pix2pix's U-Net (Isola et al. 2017, arXiv 1611.07004), or a network of residual blocks.

    The latter is by Johnson et al. (2016, arXiv 1603.08155), in CycleGAN's form (Zhu et al. 2017, arXiv 1703.10593).
    """

    network: ClassVar[str] = "generator"
    draws: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    family: Literal["pix2pix"] = "pix2pix"
    architecture: Literal["unet", "resnet"] = "unet"
    """U-Net, or CycleGAN's network of residual blocks."""
    channels: Width = 64
    """Channels of the finest feature map; coarser ones have up to eight times as many."""
    num_blocks: Depth = 9
    """Residual blocks of ``resnet``; CycleGAN has 9 from 256 pixels on, else 6."""
    norm: Norm = "batch"
    """Norm of the layers."""
    dropout: bool = True
    """Drop half the features, in training, in a U-Net's coarsest enlarging layers or in each residual block, in place
    of a latent."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        if self.architecture == "unet":
            pix2pix_levels(data.network_size)
        elif data.network_size.shorter < 8 or not data.network_size.is_multiple_of(4):
            problem = "must be a multiple of 4 of at least 8 with architecture=resnet"
            nearest = Size(*(max(8, side // 4 * 4) for side in data.network_size))
            raise UserError("data.resolution", data.resolution.value, problem, f"set data.resolution={nearest.text}")

    def input_sides(self, data: Data) -> tuple[int, int]:
        """Sides that can be halved as often as those of the data, or twice, with pixels left to mirror."""
        if self.architecture == "resnet":
            return 4, 8
        multiple = 1 << pix2pix_levels(data.network_size)
        return multiple, multiple


class Pix2PixDiscriminator(NetworkSection):
    """PatchGAN: a logit for each patch, or pixel, of an input and an image (Isola et al. 2017, section 3.2.2)."""

    paired: ClassVar[bool] = True
    family: Literal["pix2pix"] = "pix2pix"
    architecture: Literal["patches", "pixels"] = "patches"
    """A logit for each patch, or for each pixel."""
    channels: Width = 64
    """Channels of the finest feature map; coarser ones have up to eight times as many."""
    depth: Depth = 3
    """Halvings with ``patches``: 3 give patches of 70x70 pixels."""
    norm: Norm = "batch"
    """Norm of the layers."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        size = data.network_size
        if self.architecture == "patches" and size.shorter >> self.depth < 3:
            most = max(1, (size.shorter // 3).bit_length() - 1)
            problem = f"must be at most {most} with images of {size}"
            raise UserError("discriminator.depth", self.depth, problem, f"set discriminator.depth={most} or less")


def pix2pix_levels(size: Size) -> int:
    """Return the number of halvings of the U-Net: down to a shorter side of one pixel, or eight halvings.

    Raises:
        UserError: The size cannot be halved so often.
    """
    levels = _halvings(size)
    if not _fits(size):
        most = max(1.0, size.shorter / (8 << MOST_LEVELS))
        within = Size(*(round(side / most) for side in size))
        near = [within.nearest_multiple_of(1 << halvings) for halvings in range(3, MOST_LEVELS + 1)]
        nearest = min(
            filter(_fits, near), key=lambda each: abs(each.height - size.height) + abs(each.width - size.width)
        )
        problem = "must be 1 to 8 times one power of two from 8 to 256"
        detail = "the U-Net halves both sides that often; the longer one may be more times it"
        raise UserError("data.resolution", size.value, problem, f"set data.resolution={nearest.text}", detail)
    return levels


def _halvings(size: Size) -> int:
    both = math.gcd(*size)
    return min(MOST_LEVELS, (both & -both).bit_length() - 1)


def _fits(size: Size) -> bool:
    halvings = _halvings(size)
    return halvings >= 3 and size.shorter >> halvings <= 8
