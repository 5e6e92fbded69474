"""GAT (arXiv 2509.24935, "Scalable GANs with transformers"): transformers that make and judge images at several levels.

G adds up what heads after equal shares of its blocks make: an image a level, from coarse to fine, of which the last is
the sample. D judges all of them, stacked along the channels, the coarser under the more noise.

The published generator also embeds the patches of an input that it multiplies by 0, which is left out here. In place of
its running means of w by class, which each rank has for itself, means are computed where samples are truncated.

Shapes: N samples, L levels, T tokens, W features, C channels, H x W pixels, Z numbers in a latent, E in an embedding.
Carry of the generator: (x (N, T, W), w (N, W), images (N, levels so far * C, H, W)), of which images come with the
first head; of the discriminator: (images (N, L * C, H, W), labels (N,), seeds (N,)), then (x (N, 1 + T, W), labels).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.cat import CATDiscriminator
from bigsgan.config.families.gat import GATDiscriminator
from bigsgan.config.families.transformers import TransformerGenerator, TransformerNetwork
from bigsgan.config.objective import Teacher
from bigsgan.images.size import Size
from bigsgan.models import noise
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.plain import Embedding
from bigsgan.models.precision import full
from bigsgan.models.recomputing import last_sum
from bigsgan.models.transformer import (
    Attention,
    Block,
    LayerScale,
    Linear,
    Modulation,
    Positions,
    RMSNorm,
    SwiGLU,
    images_of,
    normalized,
    patches_of,
)

_STD = 0.02
"""Of embeddings and of the class token."""
_MAPPING_RATE = 0.01
"""Learning rate of mapping layers, relative to the others'."""
_MODULATION_GAIN = 0.1
_LAYER_SCALE = 0.1
_MOMENT_EPSILON = 1e-8
_NOISE_STREAM, _MEAN_STREAM = 0x6A700, 0x6A701
_MEAN_LATENTS = 256
"""That the mean of a class is over."""
_MOST_ROWS = 4_096
"""That the mapping layers compute at a time for means, unless a latent has more classes."""


class EqualizedPair(nn.Module):
    """Two linear layers that learn slowly, with a SiLU between: (..., F_in) -> (..., F_out)."""

    def __init__(self, in_features: int, out_features: int, bf16: bool) -> None:
        super().__init__()
        self.first = Linear(in_features, out_features, bf16, multiplier=_MAPPING_RATE)
        self.second = Linear(out_features, out_features, bf16, multiplier=_MAPPING_RATE)

    def forward(self, x: Tensor) -> Tensor:
        """Map."""
        return self.second(F.silu(self.first(x)))


class Mapping(nn.Module):
    """Latent and label -> w.

    Attributes:
        truncation_psi: How far w goes from its mean over the latents of its class; 1 for all the way.
        guidance: How far w goes from its mean over the classes of its latent; 1 for all the way.
    """

    def __init__(self, config: TransformerGenerator, num_classes: int) -> None:
        super().__init__()
        self.truncation_psi, self.guidance, self.latent_size = 1.0, 1.0, config.latent_size
        self.embedding = Embedding(num_classes, config.embedding_size, _STD) if num_classes else None
        features = config.latent_size + (config.embedding_size if num_classes else 0)
        self.layers = EqualizedPair(features, config.width, config.bf16)

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, Z), (N,) int64 -> (N, W)."""
        w = self._of(latents, labels)
        if self.truncation_psi != 1:
            w = self.means_of_classes(labels).lerp(w, self.truncation_psi)
        if self.guidance != 1 and self.embedding is not None:
            w = self._means_of_latents(latents, len(self.embedding.weight)).lerp(w, self.guidance)
        return (w,)

    def means_of_classes(self, labels: Tensor) -> Tensor:
        """Of w over the same latents, computed once for each class there is: (N,) -> (N, W)."""
        seeds = torch.arange(_MEAN_LATENTS, device=labels.device)
        drawn = noise.normal(seeds, _MEAN_STREAM, (self.latent_size,)).to(self.layers.first.weight.dtype)
        classes, places = labels.unique(dim=0, return_inverse=True)
        means = []
        for some in classes.split(_MOST_ROWS // _MEAN_LATENTS):
            w = self._of(drawn.repeat(len(some), 1), some.repeat_interleave(_MEAN_LATENTS, dim=0))
            means.append(w.view(len(some), _MEAN_LATENTS, -1).mean(dim=1))
        return torch.cat(means)[places]

    def _means_of_latents(self, latents: Tensor, num_classes: int) -> Tensor:
        """Of w over the classes: (N, Z) -> (N, W)."""
        classes, means = torch.arange(num_classes, device=latents.device), []
        for some in latents.split(max(_MOST_ROWS // num_classes, 1)):
            w = self._of(some.repeat_interleave(num_classes, dim=0), classes.repeat(len(some)))
            means.append(w.view(len(some), num_classes, -1).mean(dim=1))
        return torch.cat(means)

    def _of(self, latents: Tensor, labels: Tensor) -> Tensor:
        parts = [normalized(latents, _MOMENT_EPSILON)]
        if self.embedding is not None:
            parts.insert(0, normalized(full(self.embedding(labels)), _MOMENT_EPSILON).to(latents.dtype))
        return self.layers(torch.cat(parts, dim=1))


class GeneratorBlock(Block):
    """Attention and a perceptron, each between a scale and a gate that w gives; the first begins with positions.

    With ``shift``, as CAT has it, w gives what is added behind a scale, too.
    """

    def __init__(self, config: TransformerGenerator, size: Size, is_first: bool, shift: bool) -> None:
        super().__init__()
        self.positions = Positions(config.width, size) if is_first else None
        self.modulation = Modulation(config.width, 6 if shift else 4, config.bf16, _MODULATION_GAIN)
        self.attention = Attention(config.width, config.heads, [size], config.bf16)
        self.perceptron = SwiGLU(config.width, config.bf16)

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        """(N, W) of the first block, (N, T, W), (N, W), images -> (N, T, W), (N, W), images."""
        if self.positions is not None:
            table = self.positions.table.to(self.modulation.linear.weight.dtype)
            carry = (table.expand(carry[0].shape[0], -1, -1), *carry)
        x, w, *images = carry
        scale, gate, scale_after, gate_after, *shifts = self.modulation(w)
        x = x + gate * self.attention(modulated(x, scale, *shifts[:1]))
        return last_sum(x, gate_after, self.perceptron(modulated(x, scale_after, *shifts[1:]))), w, *images


class Head(nn.Module):
    """What a level adds to the image before it."""

    def __init__(self, config: TransformerGenerator, size: Size, channels: int, is_last: bool, shift: bool) -> None:
        super().__init__()
        self.patch, self.size, self.channels, self.is_last = config.patch, size, channels, is_last
        self.modulation = Modulation(config.width, 2 if shift else 1, config.bf16, _MODULATION_GAIN)
        self.linear = Linear(config.width, config.patch**2 * channels, config.bf16)

    def forward(self, x: Tensor, w: Tensor, *images: Tensor) -> tuple[Tensor, ...]:
        """(N, T, W), (N, W), (N, l * C, H, W) but at the first level -> the same with one image more; at last it alone.

        Images are float32 whatever the network's type, not bounded.
        """
        image = full(images_of(self.linear(modulated(x, *self.modulation(w))), self.patch, self.size))
        made = torch.cat([*images, images[0][:, -self.channels :] + image], dim=1) if images else image
        return (made,) if self.is_last else (x, w, made)


def modulated(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Normalize (N, T, W), scale by 1 + (N, 1, W), and add a shift (N, 1, W) if there is one."""
    scaled = normalized(x) * (1 + scale)
    return scaled if shift is None else scaled + shift


class LevelNoise(nn.Module):
    """Noise of each level, (1 - t_i) x + t_i e_i with t_i = 1 - min_info^(1 - i / (L - 1)) + noise_floor.

    The noise of a coarser level is that of the next finer one, shrunk as its image is, and more.
    """

    def __init__(self, config: GATDiscriminator) -> None:
        super().__init__()
        self.shares = config.shares_of_noise()

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L * C, H, W), (N,), (N,) int64 -> (N, L * C, H, W), (N,)."""
        levels = images.unflatten(1, (len(self.shares), -1))
        drawn = noise.normal(seeds, _NOISE_STREAM, tuple(levels.shape[1:])).to(images.dtype)
        noisy: list[Tensor] = []
        before, added = 0.0, torch.zeros_like(drawn[:, 0])
        for i in reversed(range(len(self.shares))):
            share = self.shares[i]
            kept = (1 - share) / (1 - before)
            added = kept * added + math.sqrt(share**2 - (kept * before) ** 2) * drawn[:, i]
            noisy.insert(0, (1 - share) * levels[:, i] + added)
            before = share
        return torch.cat(noisy, dim=1), labels


class Tokens(nn.Module):
    """Patches of all levels as tokens with positions, behind a class token."""

    def __init__(self, config: GATDiscriminator, size: Size, channels: int) -> None:
        super().__init__()
        self.patch = config.patch
        self.linear = Linear(channels * config.patch**2, config.width, config.bf16)
        self.positions = Positions(config.width, size)
        self.token = nn.Parameter(torch.empty(config.width))

    def initialize(self, generators: Generators) -> None:
        """Draw the class token."""
        draw_normal(self.token, generators("token"), _STD)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L * C, H, W), (N,) -> (N, 1 + T, W), (N,)."""
        x = self.linear(patches_of(images, self.patch)) + self.positions.table.to(self.token.dtype)
        return torch.cat([self.token.expand(x.shape[0], 1, -1), x], dim=1), labels


class DiscriminatorBlock(Block):
    """Attention and a perceptron, whose small beginnings learned scales set (Touvron et al. 2021, arXiv 2103.17239)."""

    def __init__(self, config: TransformerNetwork, attention: Attention) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.width), RMSNorm(config.width)
        self.attention = attention
        self.perceptron = SwiGLU(config.width, config.bf16)
        self.scale1, self.scale2 = (LayerScale(config.width, _LAYER_SCALE, is_last) for is_last in (False, True))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N, T, W) of any kind, (N,) -> the same."""
        x = self.scale1(x, self.attention(self.norm1(x)))
        return self.scale2(x, self.perceptron(self.norm2(x))), labels


class TeacherHead(nn.Module):
    """What tokens tell of a teacher's features: three linear layers with a SiLU between."""

    def __init__(self, config: TransformerNetwork, teacher: Teacher) -> None:
        super().__init__()
        self.first = Linear(config.width, teacher.hidden, config.bf16)
        self.second = Linear(teacher.hidden, teacher.hidden, config.bf16)
        self.third = Linear(teacher.hidden, teacher.width, config.bf16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1 + T, W) -> (N, 1 + T, width of the teacher), float32 whatever the network's type."""
        return full(self.third(F.silu(self.second(F.silu(self.first(x))))))


class DiscriminatorHead(nn.Module):
    """The class token's projection on the class (Miyato and Koyama 2018, arXiv 1802.05637), or a linear map.

    Attributes:
        teacher: Beside it, what predicts a teacher's features from the class token and the patches.
    """

    teacher: TeacherHead | None

    def __init__(self, config: GATDiscriminator | CATDiscriminator, num_classes: int) -> None:
        super().__init__()
        size = config.embedding_size
        self.norm = RMSNorm(config.width)
        self.linear = Linear(config.width, size if num_classes else 1, config.bf16)
        self.embedding = Embedding(num_classes, size, _STD) if num_classes else None
        self.mapping = EqualizedPair(size, size, config.bf16) if num_classes else None
        self.teacher = None

    def predict(self, x: Tensor, labels: Tensor) -> Tensor:
        """A teacher's features of the class token and of patches: (N, 1 + T, W), (N,) -> (N, 1 + T, its width)."""
        assert self.teacher is not None, "D has heads for a teacher's features"
        return self.teacher(x)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, 1 + T, W), (N,) -> logits (N,), float32 whatever the network's type."""
        return (self.logits(x[:, :1], labels).squeeze(1),)

    def logits(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Class tokens (N, L, W), (N,) -> (N, L)."""
        features = full(self.linear(self.norm(tokens)))
        if self.embedding is None or self.mapping is None:
            return features.squeeze(2)
        return (features * full(self.mapping(self.embedding(labels)))[:, None]).sum(dim=2)


def generator_layers(
    config: TransformerGenerator, size: Size, image_channels: int, num_classes: int, shift: bool = False
) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, L * image channels, H, W).

    A mapping, blocks, and a head behind each level's equal share of them; with ``shift``, those of a CAT.
    """
    patches, between = size.over(config.patch), config.depth // config.levels
    layers: list[nn.Module] = [Mapping(config, num_classes)]
    for i in range(config.depth):
        layers.append(GeneratorBlock(config, patches, i == 0, shift))
        if (i + 1) % between == 0:
            layers.append(Head(config, patches, image_channels, i == config.depth - 1, shift))
    return layers


def discriminator_layers(
    config: GATDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, L * image channels, H, W), labels, seeds (N,) -> logits (N,)."""
    patches = size.over(config.patch)
    layers: list[nn.Module] = [LevelNoise(config), Tokens(config, patches, config.levels * image_channels)]
    for _ in range(config.depth):
        attention = Attention(config.width, config.heads, [patches], config.bf16, class_tokens=True)
        layers.append(DiscriminatorBlock(config, attention))
    return [*layers, DiscriminatorHead(config, num_classes)]
