"""CycleGAN's sections of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from bigsgan.config.families.pix2pix import Pix2PixDiscriminator, Pix2PixGenerator

_Norm = Literal["instance", "none"]


class CycleGANGenerator(Pix2PixGenerator):
    """Two of pix2pix's generators, which translate between two domains (Zhu et al. 2017, arXiv 1703.10593).

    Both are one network with one optimizer, as in the public PyTorch project. They compute what they make once more, so
    that the network is one layer.
    """

    paired: ClassVar[bool] = False
    joins_domains: ClassVar[bool] = True
    has_statistics: ClassVar[bool] = False
    reads: ClassVar[str] = "images"
    family: Literal["cyclegan"] = "cyclegan"  # type: ignore[assignment]
    architecture: Literal["unet", "resnet"] = "resnet"
    """U-Net, or the paper's network of residual blocks."""
    norm: _Norm = "instance"
    """Norm of the layers."""
    dropout: bool = False
    """As in ``pix2pix``."""

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether features are dropped."""
        return self.dropout

    @property
    def outputs(self) -> list[str]:
        """Names of what it returns after the images: both images made again, and both that it need not change."""
        return ["again", "same"]


class CycleGANDiscriminator(Pix2PixDiscriminator):
    """Two PatchGANs, each for the images of one domain (Zhu et al. 2017, arXiv 1703.10593)."""

    paired: ClassVar[bool] = False
    joins_domains: ClassVar[bool] = True
    has_statistics: ClassVar[bool] = False
    family: Literal["cyclegan"] = "cyclegan"  # type: ignore[assignment]
    norm: _Norm = "instance"
    """Norm of the layers."""
