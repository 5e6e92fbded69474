"""CAT (arXiv 2605.26449, "Cross-scale aligned supervision for training GANs"): images judged at several sizes.

G is GAT's with shifts: heads after equal shares of its blocks add up to an image a level, from coarse to fine, all as
large as the sample. D judges each at a size of its own, the last as it is and each coarser one at half the side. Tokens
of all sizes travel together and share the weights, but attend to those of their own size only, so that each logit is of
one image. The loss that keeps the coarser images near the last is ``objective.consistency``.

What the paper leaves open is chosen as docs/how-to/latents.md tells.

Shapes: N samples, L levels, T tokens, W features, C channels, H x W pixels, Z numbers in a latent. T_i are the patches
of level i, and S = sum of 1 + T_i.
Carry of the generator: (x (N, T, W), w (N, W), images (N, levels so far * C, H, W)), of which images come with the
first head; of the discriminator: (images (N, L * C, H, W), labels (N,)), then (x (N, S, W), labels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bigsgan.config.families.cat import CATDiscriminator, CATGenerator
from bigsgan.images.size import Size
from bigsgan.models import gat
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.transformer import Attention, Linear, Positions, patches_of

_STD = 0.02
"""Of class tokens."""


class Scales(nn.Module):
    """Patches of all levels as tokens with positions, each level at its size and behind a class token of its own."""

    def __init__(self, config: CATDiscriminator, size: Size, channels: int) -> None:
        super().__init__()
        self.patch, self.sizes = config.patch, config.sizes_of(size)
        self.linear = Linear(channels * config.patch**2, config.width, config.bf16)
        self.positions = Positions(config.width, size.over(config.patch))
        self.tokens = nn.Parameter(torch.empty(config.levels, config.width))
        self.levels = nn.Parameter(torch.empty(config.levels, config.width))

    def initialize(self, generators: Generators) -> None:
        """Draw the class tokens, and what all tokens of a level have in common."""
        draw_normal(self.tokens, generators("tokens"), _STD)
        draw_normal(self.levels, generators("levels"), _STD)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L * C, H, W), (N,) -> (N, S, W), (N,)."""
        of_levels = zip(images.unflatten(1, (len(self.sizes), -1)).unbind(1), self.sizes, strict=True)
        patches = [patches_of(shrunk(image, size), self.patch) for image, size in of_levels]
        lengths, x = [each.shape[1] for each in patches], self.linear(torch.cat(patches, dim=1))
        table, whole, parts = self.positions.table.to(self.tokens.dtype), self.positions.size, []
        for i, tokens in enumerate(x.split(lengths, dim=1)):
            tokens = tokens + (corner(table, whole, self.sizes[i].over(self.patch)) + self.levels[i])
            parts += [(self.tokens[i] + self.levels[i]).expand(x.shape[0], 1, -1), tokens]
        return torch.cat(parts, dim=1), labels


def shrunk(images: Tensor, size: Size) -> Tensor:
    """Bilinear interpolation to sides 2^k times smaller, at the centres of pixels: (N, C, H, W) -> (N, C, *size).

    Of each square of pixels that is the mean of the middle four, without a filter before it.
    """
    factor = images.shape[-1] // size.width
    if factor == 1:
        return images
    squares = images.unflatten(3, (size.width, factor)).unflatten(
        2, (size.height, factor)
    )  # (N, C, h, factor, w, factor)
    middle = slice(factor // 2 - 1, factor // 2 + 1)
    return squares[:, :, :, middle, :, middle].mean(dim=(3, 5))


def corner(table: Tensor, whole: Size, size: Size) -> Tensor:
    """A table's entries of the first rows and columns: (P, F) of ``whole`` patches -> (h * w, F) of ``size``, h x w."""
    return table.unflatten(0, tuple(whole))[: size.height, : size.width].flatten(0, 1)


class ScaleWiseAttention(Attention):
    """Attention of the tokens of each level to one another."""

    def __init__(self, config: CATDiscriminator, sizes: Sequence[Size]) -> None:
        super().__init__(config.width, config.heads, sizes, config.bf16, class_tokens=True)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within each level: (N, A, S, E) each -> (N, A, S, E)."""
        lengths = [1 + size.num_pixels for size in self.sizes]
        of_levels = zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True)
        return torch.cat([self.mixed(*level) for level in of_levels], dim=2)


class DiscriminatorHead(gat.DiscriminatorHead):
    """GAT's, on the class token of each level; a teacher's features are predicted from the last level's tokens."""

    def __init__(self, config: CATDiscriminator, sizes: Sequence[Size], num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.places = [sum(1 + size.num_pixels for size in sizes[:i]) for i in range(len(sizes))]

    def predict(self, x: Tensor, labels: Tensor) -> Tensor:
        """A teacher's features of the last level's class token and patches: (N, S, W), (N,) -> (N, 1 + T, width)."""
        return super().predict(x[:, self.places[-1] :], labels)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, S, W), (N,) -> logits (N, L), float32 whatever the network's type."""
        return (self.logits(torch.stack([x[:, place] for place in self.places], dim=1), labels),)


def generator_layers(config: CATGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, L * image channels, H, W)."""
    return gat.generator_layers(config, size, image_channels, num_classes, shift=config.shift)


def discriminator_layers(
    config: CATDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, L * image channels, H, W), labels (N,) -> logits (N, L)."""
    sizes = [each.over(config.patch) for each in config.sizes_of(size)]
    layers: list[nn.Module] = [Scales(config, size, image_channels)]
    layers += [gat.DiscriminatorBlock(config, ScaleWiseAttention(config, sizes)) for _ in range(config.depth)]
    return [*layers, DiscriminatorHead(config, sizes, num_classes)]
