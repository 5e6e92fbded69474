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
from bigsgan.models.dual import has_tangent
from bigsgan.models.gat import DiscriminatorBlock, EqualizedPair, Modulation, flat_generator
from bigsgan.models.layers import Generators, full
from bigsgan.models.plain import Embedding
from bigsgan.models.transformer import (
    Attention,
    Linear,
    Positions,
    RMSNorm,
    SwiGLU,
    images_of,
    normalized,
    patches_of,
)

_STD = 0.02
"""Of embeddings and of class tokens."""


class GeneratorBlock(nn.Module):
    """Attention and a perceptron, each between scale, shift and gate that w gives; the first begins with positions."""

    def __init__(self, config: CATGenerator, side: int, is_first: bool) -> None:
        super().__init__()
        self.positions = Positions(config.width, side) if is_first else None
        self.modulation = Modulation(config.width, 6 if config.shift else 4, config.bf16)
        self.attention = Attention(config.width, config.heads, side, config.bf16)
        self.perceptron = SwiGLU(config.width, config.bf16)

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        """(N, W) of the first block, (N, T, W), (N, W), images -> (N, T, W), (N, W), images."""
        if self.positions is not None:
            (w,) = carry
            images: tuple[Tensor, ...] = ()
            x = self.positions.table.to(self.modulation.linear.weight.dtype).expand(w.shape[0], -1, -1)
        else:
            x, w, *rest = carry
            images = tuple(rest)
        scale, gate, scale_after, gate_after, *shifts = self.modulation(w)
        shift, shift_after = shifts or (None, None)
        x = x + gate * self.attention(modulated(x, scale, shift))
        x = x + gate_after * self.perceptron(modulated(x, scale_after, shift_after))
        return x, w, *images


class Head(nn.Module):
    """What a level adds to the image before it."""

    def __init__(self, config: CATGenerator, side: int, channels: int, is_last: bool) -> None:
        super().__init__()
        self.patch, self.side, self.channels, self.is_last = config.patch, side, channels, is_last
        self.modulation = Modulation(config.width, 2 if config.shift else 1, config.bf16)
        self.linear = Linear(config.width, config.patch**2 * channels, config.bf16)

    def forward(self, x: Tensor, w: Tensor, *images: Tensor) -> tuple[Tensor, ...]:
        """(N, T, W), (N, W), (N, l * C, H, W) but at the first level -> the same with one image more; at last it alone.

        Images are float32 whatever the network's type, not bounded.
        """
        tokens = self.linear(modulated(x, *self.modulation(w)))
        image = full(images_of(tokens, self.patch, self.side))
        made = torch.cat([*images, images[0][:, -self.channels :] + image], dim=1) if images else image
        return (made,) if self.is_last else (x, w, made)


def modulated(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Normalize (N, T, W), scale by 1 + (N, 1, W), and add a shift (N, 1, W) if there is one."""
    scaled = normalized(x) * (1 + scale)
    return scaled if shift is None else scaled + shift


class Scales(nn.Module):
    """Patches of all levels as tokens with positions, each level at its size and behind a class token of its own."""

    def __init__(self, config: CATDiscriminator, side: int, channels: int) -> None:
        super().__init__()
        self.patch, self.sides = config.patch, config.sides(side)
        self.linear = Linear(channels * config.patch**2, config.width, config.bf16)
        self.positions = Positions(config.width, side // config.patch)
        self.tokens = nn.Parameter(torch.empty(config.levels, config.width))
        self.levels = nn.Parameter(torch.empty(config.levels, config.width))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the class tokens, and what all tokens of a level have in common."""
        for name, parameter in (("tokens", self.tokens), ("levels", self.levels)):
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(drawn.normal_(0, _STD, generator=generators(name)))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L * C, H, W), (N,) -> (N, S, W), (N,)."""
        of_levels = zip(images.unflatten(1, (len(self.sides), -1)).unbind(1), self.sides, strict=True)
        patches = [patches_of(shrunk(image, side), self.patch) for image, side in of_levels]
        lengths, x = [each.shape[1] for each in patches], self.linear(torch.cat(patches, dim=1))
        table, parts = self.positions.table.to(self.tokens.dtype), []
        for i, tokens in enumerate(x.split(lengths, dim=1)):
            tokens = tokens + (corner(table, self.sides[i] // self.patch) + self.levels[i])
            parts += [(self.tokens[i] + self.levels[i]).expand(x.shape[0], 1, -1), tokens]
        return torch.cat(parts, dim=1), labels


def shrunk(images: Tensor, side: int) -> Tensor:
    """Bilinear interpolation to a side 2^k times smaller, at the centres of pixels: (N, C, H, H) -> (N, C, side, side).

    Of each square of pixels that is the mean of the middle four, without a filter before it.
    """
    factor = images.shape[-1] // side
    if factor == 1:
        return images
    squares = images.unflatten(3, (side, factor)).unflatten(2, (side, factor))  # (N, C, side, factor, side, factor)
    middle = slice(factor // 2 - 1, factor // 2 + 1)
    return squares[:, :, :, middle, :, middle].mean(dim=(3, 5))


def corner(table: Tensor, side: int) -> Tensor:
    """A table's entries of the first rows and columns: (..., P, F) of a square of patches -> (..., side^2, F)."""
    whole = round(table.shape[-2] ** 0.5)
    return table.unflatten(-2, (whole, whole))[..., :side, :side, :].flatten(-3, -2)


class ScaleWiseAttention(Attention):
    """Attention of the tokens of each level to one another."""

    def __init__(self, config: CATDiscriminator, sides: Sequence[int]) -> None:
        super().__init__(config.width, config.heads, sides[-1], config.bf16)
        self.sides = list(sides)

    def forward(self, x: Tensor) -> Tensor:
        """(N, S, W) -> (N, S, W)."""
        n, num, width = x.shape
        query, key, value = self.qkv(x).view(n, num, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (N, A, S, E) each
        query, key = self.query_norm(query), self.key_norm(key)
        lengths = [1 + side**2 for side in self.sides]
        of_levels = zip(self.sides, *(each.split(lengths, dim=2) for each in (query, key, value)), strict=True)
        dual = has_tangent(x)
        mixed = [self.mixed(q, k, v, corner(self.rotation, side), dual) for side, q, k, v in of_levels]
        return self.out(torch.cat(mixed, dim=2).transpose(1, 2).reshape(n, num, width))


class DiscriminatorHead(nn.Module):
    """Each class token's projection on the class (Miyato and Koyama 2018, arXiv 1802.05637), or a linear map."""

    def __init__(self, config: CATDiscriminator, sides: Sequence[int], num_classes: int) -> None:
        super().__init__()
        size = config.embedding_size
        self.places = [sum(1 + side**2 for side in sides[:i]) for i in range(len(sides))]
        self.norm = RMSNorm(config.width)
        self.linear = Linear(config.width, size if num_classes else 1, config.bf16)
        self.embedding = Embedding(num_classes, size, _STD) if num_classes else None
        self.mapping = EqualizedPair(size, size, config.bf16) if num_classes else None

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, S, W), (N,) -> logits (N, L), float32 whatever the network's type."""
        features = full(self.linear(self.norm(torch.stack([x[:, place] for place in self.places], dim=1))))
        if self.embedding is None or self.mapping is None:
            return (features.squeeze(2),)
        return ((features * full(self.mapping(self.embedding(labels)))[:, None]).sum(dim=2),)


def generator_layers(config: CATGenerator, resolution: int, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, L * image channels, resolution, resolution)."""
    return flat_generator(config, resolution, image_channels, num_classes, GeneratorBlock, Head)


def discriminator_layers(
    config: CATDiscriminator, resolution: int, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, L * image channels, resolution, resolution), labels (N,) -> logits (N, L)."""
    sides = [side // config.patch for side in config.sides(resolution)]
    layers: list[nn.Module] = [Scales(config, resolution, image_channels)]
    layers += [DiscriminatorBlock(config, ScaleWiseAttention(config, sides)) for _ in range(config.depth)]
    return [*layers, DiscriminatorHead(config, sides, num_classes)]
