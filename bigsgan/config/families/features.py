"""Sections of networks that read the features of a frozen program."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import NetworkSection
from bigsgan.config.families.transformers import TransformerBlocks
from bigsgan.config.sections import NaturalFloat, PathText, PositiveInt, Width
from bigsgan.errors import UserError
from bigsgan.images.size import Size


class FeaturesNetwork(NetworkSection):
    """Keys of both networks: a frozen program, and the feature maps that it makes of an image."""

    has_tangents: ClassVar[bool] = False
    path: PathText
    """A frozen program (.pt2, or of torch.jit.save) from images (n, 3, H, W) in [-1, 1] to a tuple of feature maps (n,
    C, h, w). It computes in float32."""
    maps: list[Annotated[list[Width], Field(min_length=3, max_length=3)]] = Field(min_length=1, max_length=64)
    """Channels, height and width of each map, such as ``[[384, 28, 28], [384, 28, 28]]``."""

    def check(self, data: Data) -> None:
        """Raise UserError if the program cannot read the data's images, or they come with labels."""
        name, what = self.network, f"{self.network}.family={self.family}"
        if data.codec.kind != "pixels":
            detail = "its program reads images"
            raise UserError("data.codec.kind", data.codec.kind, f"must be pixels with {what}", "remove it", detail)
        if data.joins_domains:
            problem, detail = "must be a family for images of two domains", "its program reads one image"
            raise UserError(f"{name}.family", self.family, problem, f"set {name}.family=cyclegan", detail)
        if data.channels not in (1, 3):
            problem, detail = f"must be 1 or 3 with {what}", "its program looks at colours"
            raise UserError("data.image_channels", data.channels, problem, f"choose another {name}.family", detail)
        if data.condition_width:
            key = "num_classes" if data.num_classes else "condition_size"
            problem, detail = f"must be 0 with {what}", "it reads no labels"
            raise UserError(f"data.{key}", getattr(data, key), problem, f"set data.{key}=0", detail)


class FeaturesGenerator(TransformerBlocks, FeaturesNetwork):
    """Makes images again from a frozen program's map of them: a representation autoencoder, whose decoder is a ViT.

    (Zheng et al. 2025, arXiv 2510.11690.) The pixels of the only map are tokens; behind them each block has a norm and
    attention, and a norm and a perceptron.
    """

    network: ClassVar[str] = "generator"
    reads: ClassVar[str] = "images"
    of_classes: ClassVar[tuple[str, ...]] = ()
    family: Literal["features"] = "features"
    hidden: Width = 3072
    """Features inside a block's perceptron."""
    noise: NaturalFloat = 0.8
    """Largest deviation of normal noise on the map in training; each image's is drawn uniformly from 0 on."""

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether noise is added."""
        return self.noise > 0

    def check(self, data: Data) -> None:
        """Raise UserError as for both networks, or if pixels of the map do not stand for square patches."""
        super().check(data)
        size, (_, height, width) = data.network_size, self.maps[0]
        if len(self.maps) > 1:
            raise UserError("generator.maps", self.maps, "must have one map", "give a program that makes one")
        if size != Size(height, width).times(size.height // height):
            problem = f"must have a pixel for each patch of images of {size}, a square"
            raise UserError("generator.maps", self.maps, problem, "give another program, or data.resolution")


class FeaturesDiscriminator(FeaturesNetwork):
    """Judges a frozen program's feature maps by small heads (Sauer et al. 2023, arXiv 2301.09515, section 3.2).

    Each map has a head, which reads its pixels row by row and gives each a logit.
    """

    family: Literal["features"] = "features"
    kernel: PositiveInt = 9
    """Odd size of the second convolution of a head, along the rows of a map."""
    norm: Literal["instance", "batch"] = "instance"
    """Norm in the heads, over the pixels of an image or of the batch."""

    def check(self, data: Data) -> None:
        """Raise UserError as for both networks, or if the kernel is even or longer than a map."""
        super().check(data)
        most = min(height * width for _, height, width in self.maps)
        if self.kernel % 2 == 0 or self.kernel > most:
            problem = f"must be odd and at most {most}, the pixels of the smallest map"
            remedy = f"set discriminator.kernel={(min(self.kernel, most) - 1) // 2 * 2 + 1}"
            raise UserError("discriminator.kernel", self.kernel, problem, remedy)
