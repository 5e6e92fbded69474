"""DiT's sections of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from bigsgan.config.data import Data
from bigsgan.config.families.base import GeneratorSection, TimedGenerator
from bigsgan.config.families.transformers import TransformerNetwork
from bigsgan.config.sections import PositiveFloat
from bigsgan.errors import UserError

SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "M": (16, 1024, 16), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
"""Depth, width and heads of the published sizes: S, B, L and XL of DiT, and M of adversarial flow models."""


class DiTNetwork(TransformerNetwork):
    """Keys of both networks, diffusion transformers (Peebles and Xie 2023, arXiv 2212.09748).

    They are conditioned by their norms. G makes an image of noise in one pass, as in adversarial flow models (Lin et
    al. 2025, arXiv 2511.22475), unless it reads times.
    """

    of_classes: ClassVar[tuple[str, ...]] = ()
    sizes = SIZES
    size: Literal["S", "B", "M", "L", "XL"] | None = None
    """Published depth, width and heads: 12x384x6, 12x768x12, 16x1024x16, 24x1024x16 or 28x1152x16."""


class DiTGenerator(DiTNetwork, TimedGenerator, GeneratorSection):
    """Maps noise of an image's shape to an image; with times, an image with noise to its estimate of the image."""

    family: Literal["dit"] = "dit"
    time_scale: PositiveFloat = 1000.0
    """Factor of times before their sinusoidal embedding; 1 in SiT."""

    def check(self, data: Data) -> None:
        """Raise UserError as for both networks, or if latents do not have the shape of images."""
        super().check(data)
        needed = data.channels * data.network_size.num_pixels
        if self.latent_size != needed:
            problem = f"must be {needed}, the numbers of an image as networks see it"
            raise UserError("generator.latent_size", self.latent_size, problem, f"set generator.latent_size={needed}")


class DiTDiscriminator(DiTNetwork):
    """Judges by a class token before the patches."""

    family: Literal["dit"] = "dit"
    times: bool = False
    """Embed time 0 with the labels, so that D may begin with a generator's weights (``init_from.backbone``)."""
