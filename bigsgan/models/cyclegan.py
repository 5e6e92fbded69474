"""CycleGAN (Zhu, Park, Isola and Efros 2017, "Unpaired image-to-image translation", arXiv 1703.10593).

A sample is an image of the first domain, A, and one of the second, B, joined along the channels.

Shapes: N samples, A and B channels of the images of each domain, H x W pixels, P patches of both together. The carry of
the discriminator is (h of A, h of B).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bigsgan.config.families.cyclegan import CycleGANDiscriminator, CycleGANGenerator
from bigsgan.images.size import Size
from bigsgan.models import pix2pix

_APART = 2**16
"""Between the seeds of the passes of a sample, each of which drops other features."""


class Translator(nn.Module):
    """One of pix2pix's generators."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, images: Tensor, labels: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        """Images of one domain (N, C, H, W) in [-1, 1], (N,), (N,) -> of the other; dropout alone reads seeds."""
        carry: tuple[Any, ...] = (images, labels, seeds)
        for layer in self.layers:
            carry = layer(*carry)
        image: Tensor = carry[0]
        return image


class Translations(nn.Module):
    """Both generators: there, back again, and what each makes of images that are in its domain already.

    Attributes:
        makes_same: Whether it makes the latter.
    """

    makes_same = True

    def __init__(self, to_b: Translator, to_a: Translator, channels: tuple[int, int]) -> None:
        super().__init__()
        self.to_b, self.to_a, self.channels = to_b, to_a, channels

    def forward(self, images: Tensor, labels: Tensor, *seeds: Tensor) -> tuple[Tensor, ...]:
        """(N, A + B, H, W) in [-1, 1], (N,), [(N,)] -> translations into A and into B; of them back; of A and B.

        All are (N, A + B, H, W). In evaluation mode the first alone, of which another call makes the second.
        """
        a, b = images.split(self.channels, dim=1)

        def into_both(from_b: Tensor, from_a: Tensor, first: int) -> tuple[Tensor, Tensor]:
            """Translate two images into A and into B, by draws of their own."""
            # Without dropout no layer reads seeds.
            to_a, to_b = (seeds[0] + _APART * (first + i) if seeds else labels for i in range(2))
            return self.to_a(from_b, labels, to_a), self.to_b(from_a, labels, to_b)

        made_a, made_b = into_both(b, a, 0)
        found = [(made_a, made_b)]
        if self.training:
            found.append(into_both(made_b, made_a, 2))
            found += [into_both(a, b, 4)] if self.makes_same else []
        return tuple(torch.cat(each, dim=1) for each in found)


class Both(nn.Module):
    """The same layer of both discriminators.

    Attributes:
        map_sizes: Numbers of patches of both discriminators, as of the last forward pass of the last layer.
    """

    map_sizes: tuple[int, ...] = ()

    def __init__(self, of_a: nn.Module, of_b: nn.Module) -> None:
        super().__init__()
        self.of_a, self.of_b = of_a, of_b

    def forward(self, of_a: Tensor, of_b: Tensor) -> tuple[Tensor, ...]:
        """Feature maps (N, C, H, W) of both -> those of the next layer."""
        return *self.of_a(of_a), *self.of_b(of_b)


class DiscriminatorInput(Both):
    """Gives each discriminator the images of its domain."""

    def __init__(self, of_a: nn.Module, of_b: nn.Module, channels: tuple[int, int]) -> None:
        super().__init__(of_a, of_b)
        self.channels = channels

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """(N, A + B, H, W), (N,) -> two feature maps (N, C, H', W')."""
        a, b = images.split(self.channels, dim=1)
        return *self.of_a(a, labels), *self.of_b(b, labels)


class DiscriminatorHead(Both):
    """Joins the logits of both, which the loss takes apart."""

    def forward(self, of_a: Tensor, of_b: Tensor) -> tuple[Tensor]:
        """Two feature maps (N, C, H, W) -> logits (N, P), float32 whatever the network's type."""
        logits = super().forward(of_a, of_b)
        self.map_sizes = tuple(each.shape[1] for each in logits)
        return (torch.cat(logits, dim=1),)


def generator_layers(
    config: CycleGANGenerator, size: Size, image_channels: int, input_channels: int
) -> list[nn.Module]:
    """One layer: images (N, image channels, H, W), labels (N,), [seeds (N,)] -> three times images.

    ``image_channels`` are those of both domains together, ``input_channels`` those of A.
    """
    channels = (input_channels, image_channels - input_channels)
    to_b, to_a = (Translator(pix2pix.generator_layers(config, size, *to)) for to in (channels[::-1], channels))
    return [Translations(to_b, to_a, channels)]


def discriminator_layers(
    config: CycleGANDiscriminator, size: Size, image_channels: int, input_channels: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> (N, P)."""
    channels = (input_channels, image_channels - input_channels)
    (*of_a, last_a), (*of_b, last_b) = (pix2pix.discriminator_layers(config, size, each, 0) for each in channels)
    first, *layers = zip(of_a, of_b, strict=True)
    return [DiscriminatorInput(*first, channels), *(Both(*each) for each in layers), DiscriminatorHead(last_a, last_b)]
