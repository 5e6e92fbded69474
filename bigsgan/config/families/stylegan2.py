"""StyleGAN2's sections of a recipe, and its table of channels."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import BOTTOM, GeneratorSection, NetworkSection, check_doubled
from bigsgan.config.sections import PositiveFloat, PositiveInt, Share, Width
from bigsgan.errors import UserError, counted

Depth0 = Annotated[int, Field(ge=0, le=64)]
Tap = Annotated[float, Field(allow_inf_nan=False, ge=-(2**16), le=2**16)]


def stylegan2_sizes(resolution: int) -> list[int]:
    """Return the resolutions of a square's feature maps, from 4x4 up."""
    return [BOTTOM << i for i in range((resolution // BOTTOM).bit_length())]


class _StyleGAN2(NetworkSection):
    """Keys of both networks (Karras et al. 2020, arXiv 1912.04958 and 2006.06676)."""

    without_half = "half_resolutions=0"
    family: Literal["stylegan2"] = "stylegan2"
    channel_base: PositiveInt = 32_768
    """Channels times resolution; as published 32768, and half of it at 256."""
    channel_max: Width = 512
    """Largest number of channels of a feature map."""
    mapping_lr_multiplier: PositiveFloat = 0.01
    """Relative learning rate of the mapping network."""
    conv_clamp: PositiveFloat | None = 256.0
    """Clamp activations to plus or minus this, as fp16 needs."""
    half_resolutions: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of highest resolutions, above 4x4, in half precision, whatever the weights' type; 4 as published."""
    half_type: Literal["bf16", "fp16"] = "bf16"
    """Type of these resolutions; as published fp16, without a loss scale."""
    filter: list[Tap] = Field(default=[1.0, 3.0, 3.0, 1.0], min_length=1, max_length=16)
    """Taps of the filter that resamples feature maps and images, normalized to a sum of 1."""

    @property
    def computes_in(self) -> str | None:
        """The half type of the highest resolutions, if any are computed in it."""
        return self.half_type if self.half_resolutions else None

    def channels(self, resolution: int) -> dict[int, int]:
        """Return the channels by the resolution of a square's feature map, from 4x4 up. Others have as many."""
        return {size: min(self.channel_base // size, self.channel_max) for size in stylegan2_sizes(resolution)}

    def is_half(self, size: int, resolution: int) -> bool:
        """Return whether the block at ``size`` is computed in half precision in a network for ``resolution``."""
        return size > BOTTOM and size << self.half_resolutions > resolution

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        network = self.network
        check_doubled(data, "StyleGAN2")
        resolution = data.network_size.nominal
        if self.channel_base < resolution:
            field, problem = f"{network}.channel_base", f"must be at least {resolution}, the resolution"
            raise UserError(field, self.channel_base, problem, f"set {field}={resolution} or more")
        if sum(self.filter) <= 0:
            field = f"{network}.filter"
            raise UserError(field, self.filter, "must have a sum above 0", f"remove it, or set {field}=[1,3,3,1]")


class StyleGAN2Generator(_StyleGAN2, GeneratorSection):
    """StyleGAN2's generator: mapping network and synthesis network."""

    draws: ClassVar[bool] = True
    has_styles: ClassVar[bool] = True
    truncates_w: ClassVar[bool] = True
    latent_size: Width = 512
    mapping_layers: Depth0 = 8
    """Layers of the mapping network. With 0, w is the normalized latent."""
    relu: list[Literal["mapping", "blocks"]] = Field(default=[])
    """Parts with ReLU instead of leaky ReLU."""
    noise: bool = True
    """Add noise with a learned strength."""
    architecture: Literal["skip", "orig", "resnet"] = "skip"
    """The image is a sum over the resolutions (``skip``, as published), or the last one, with residual blocks
    (``resnet``) or none."""
    w_size: Width = 512
    """Numbers in w, the mapping network's output."""
    w_avg_beta: Share = 0.995
    """Share of w's moving average that an update keeps; 0.998 in StyleGAN3."""
    style_mixing: Share = 0.9
    """Share of training images whose finer layers take the w of a second latent."""

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data, or if latents are to be styles and cannot be."""
        super().check(data)
        if not self.mapping_layers and data.condition_width:
            remedy = "set generator.mapping_layers=1 or more, or data.num_classes=0"
            raise UserError("generator.mapping_layers", 0, "must be at least 1 with classes", remedy)
        if not self.mapping_layers and self.latent_size != self.w_size:
            problem = f"must be generator.latent_size ({self.latent_size}) with generator.mapping_layers=0"
            raise UserError("generator.w_size", self.w_size, problem, f"set generator.w_size={self.latent_size}")


class StyleGAN2Discriminator(_StyleGAN2):
    """StyleGAN2's discriminator, with a projection of the mapped label if there are classes."""

    of_classes = ("mapping_layers", "mapping_lr_multiplier", "projection_size")
    architecture: Literal["resnet", "orig", "skip"] = "resnet"
    """Residual connections, none (``orig``, published for CIFAR-10), or the image in each block (``skip``)."""
    mapping_layers: Depth0 = 8
    """Layers of the label's mapping network. With 0, D projects on the label's normalized embedding."""
    projection_size: Width | None = None
    """Features that D projects on the mapped label; by default the channels at 4x4."""
    relu: list[Literal["mapping", "blocks", "head"]] = Field(default=[])
    """Parts with ReLU instead of leaky ReLU."""
    mbstd_group: PositiveInt | None = 4
    """Consecutive images that share a minibatch deviation; null takes the whole batch."""
    mbstd_channels: Annotated[int, Field(ge=0, le=64)] = 1
    """Feature maps with the deviation; 0 leaves it out."""

    @property
    def compares_images(self) -> bool:
        """Whether there is a minibatch deviation."""
        return self.mbstd_channels > 0 and self.mbstd_group != 1

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        super().check(data)
        bottom = self.channels(data.network_size.nominal)[BOTTOM]
        if self.mbstd_channels and bottom % self.mbstd_channels:
            problem = f"must divide the {bottom} channels at {BOTTOM}x{BOTTOM}"
            remedy = f"set discriminator.mbstd_channels={math.gcd(bottom, self.mbstd_channels)}"
            raise UserError("discriminator.mbstd_channels", self.mbstd_channels, problem, remedy)

    def check_micro_batch(self, size: int, num_parts: int = 1) -> None:
        """Raise UserError if ``size`` images do not divide into groups, or if a group would span micro-batches."""
        field = "discriminator.mbstd_group"
        if self.mbstd_channels and self.mbstd_group is None and num_parts > 1:
            problem = "must be given, got null"
            detail = f"null needs the whole batch at once, which is split into {num_parts} micro-batches"
            remedy = f"set {field}={math.gcd(size, 4)}, or train on one rank without accumulation"
            raise UserError(field, None, problem, remedy, detail)
        if self.mbstd_channels and self.mbstd_group is not None and size % self.mbstd_group:
            problem = f"must divide the {counted(size, 'image')} of a micro-batch on one rank"
            remedy = f"set {field}={math.gcd(size, self.mbstd_group)}, or change batch or accumulation"
            raise UserError(field, self.mbstd_group, problem, remedy)
