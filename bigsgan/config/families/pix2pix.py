"""pix2pix's sections of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from bigsgan.config.data import Data
from bigsgan.config.families.base import Depth, NetworkSection
from bigsgan.config.sections import Width
from bigsgan.errors import UserError

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
    """Residual blocks of ``resnet``; CycleGAN has 9 from 256 pixels on, and 6 below."""
    norm: Norm = "batch"
    """Norm of the layers; only convolutions before an instance norm have a bias."""
    dropout: bool = True
    """In training, drop half the features of a U-Net's coarsest enlarging layers, or inside each residual block.

    This takes the place of a latent.
    """

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        if self.architecture == "unet":
            pix2pix_levels(data.side)
        elif data.side < 8 or data.side % 4:
            problem = "must be a multiple of 4 of at least 8 with architecture=resnet"
            remedy = f"set data.resolution={max(8, data.side // 4 * 4)}"
            raise UserError("data.resolution", data.side, problem, remedy)


class Pix2PixDiscriminator(NetworkSection):
    """PatchGAN: a logit for each patch, or pixel, of an input and an image (Isola et al. 2017, section 3.2.2)."""

    paired: ClassVar[bool] = True
    family: Literal["pix2pix"] = "pix2pix"
    architecture: Literal["patches", "pixels"] = "patches"
    """A logit for each patch, or for each pixel."""
    channels: Width = 64
    """Channels of the finest feature map; coarser ones have up to eight times as many."""
    depth: Depth = 3
    """Halvings with ``patches``: 3 give patches of 70 x 70 pixels."""
    norm: Norm = "batch"
    """Norm of the layers; only convolutions before an instance norm have a bias."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        if self.architecture == "patches" and data.side >> self.depth < 3:
            most = max(1, (data.side // 3).bit_length() - 1)
            problem = f"must be at most {most} with images of {data.side} pixels"
            raise UserError("discriminator.depth", self.depth, problem, f"set discriminator.depth={most} or less")


def pix2pix_levels(resolution: int) -> int:
    """Return the number of halvings of the U-Net: down to one pixel, or eight halvings.

    Raises:
        UserError: The resolution cannot be halved so often.
    """
    levels = min(MOST_LEVELS, (resolution & -resolution).bit_length() - 1)
    if resolution < 8 or resolution >> levels > 8 or levels < 3:
        nearest = max(8, 1 << (resolution.bit_length() - 1))
        problem, detail = "must be 1 to 8 times a power of two from 8 to 256", "the U-Net halves it that often"
        raise UserError("data.resolution", resolution, problem, f"set data.resolution={nearest}", detail)
    return levels
