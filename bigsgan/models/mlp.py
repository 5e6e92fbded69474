"""Fully connected networks, the smallest baselines (Goodfellow et al. 2014, "Generative adversarial nets").

Shapes: N samples, F features, Z numbers in a latent. Carry of the generator: (h (N, F),); of the discriminator:
(h, labels (N,)).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.mlp import MLPDiscriminator, MLPGenerator
from bigsgan.images.size import Size
from bigsgan.models.plain import Embedding, LatentWithClass, Linear
from bigsgan.models.precision import full

_SLOPE = 0.2


class GeneratorInput(nn.Module):
    """Latent and label -> the first hidden layer."""

    def __init__(self, latent_size: int, num_classes: int, embedding_size: int, width: int) -> None:
        super().__init__()
        self.input = LatentWithClass(latent_size, num_classes, embedding_size)
        self.linear = _hidden(self.input.features, width)

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, Z), (N,) int64 -> (N, F)."""
        return (F.leaky_relu(self.linear(self.input(latents, labels)), _SLOPE),)


class GeneratorBlock(nn.Module):
    """Linear map and leaky ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = _hidden(width, width)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, F) -> (N, F)."""
        return (F.leaky_relu(self.linear(h), _SLOPE),)


class GeneratorOutput(nn.Module):
    """Features -> image."""

    def __init__(self, width: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape
        self.linear = Linear(width, math.prod(shape), 1 / math.sqrt(width))

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, F) -> (N, C, H, W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(full(self.linear(h))).view(-1, *self.shape),)


class DiscriminatorBlock(nn.Module):
    """Flattening, linear map and leaky ReLU."""

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.linear = _hidden(in_features, width)

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, ...), (N,) -> (N, F), (N,)."""
        return F.leaky_relu(self.linear(h.flatten(1)), _SLOPE), labels


class DiscriminatorHead(nn.Module):
    """Features and label -> logit (Miyato and Koyama 2018, equation 4)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.linear = Linear(width, 1, 1 / math.sqrt(width))
        self.embedding = Embedding(num_classes, width, 1 / math.sqrt(width)) if num_classes else None

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, F), (N,) -> logits (N,), float32 whatever the network's type."""
        logits = self.linear(h).squeeze(1)
        if self.embedding is not None:
            logits = logits + (self.embedding(labels) * h).sum(dim=1)
        return (full(logits),)


def _hidden(in_features: int, out_features: int) -> Linear:
    """Make a map that keeps the variance from layer to layer (He et al. 2015, arXiv 1502.01852, equation 15)."""
    return Linear(in_features, out_features, math.sqrt(2 / ((1 + _SLOPE**2) * in_features)))


def generator_layers(config: MLPGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, image channels, H, W)."""
    layers: list[nn.Module] = [GeneratorInput(config.latent_size, num_classes, config.embedding_size, config.width)]
    layers += [GeneratorBlock(config.width) for _ in range(config.depth - 1)]
    return [*layers, GeneratorOutput(config.width, (image_channels, *size))]


def discriminator_layers(
    config: MLPDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> logits (N,)."""
    sizes = [image_channels * size.num_pixels, *[config.width] * config.depth]
    layers: list[nn.Module] = [DiscriminatorBlock(sizes[i], sizes[i + 1]) for i in range(config.depth)]
    return [*layers, DiscriminatorHead(config.width, num_classes)]
