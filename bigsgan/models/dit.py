"""DiT (Peebles and Xie 2023, arXiv 2212.09748), as both networks of adversarial flow models (arXiv 2511.22475).

G maps an image of noise to an image in one pass, and D judges by a class token. With ``times`` G maps an image with
noise, (1 - t) * image + t * noise, to its estimate of the image: what it reads, minus t times the velocity that it
predicts (Lipman et al. 2023, arXiv 2210.02747).

Shapes: N samples, T tokens, W features, C channels, H x W' pixels. The carry of both networks: (x (N, T, W), c (N, W)),
behind which G's with ``times`` has what it reads (N, C, H, W') and the times (N, 1, 1, 1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.dit import DiTDiscriminator, DiTGenerator, DiTNetwork
from bigsgan.config.families.noisy import NoisyDiscriminator
from bigsgan.images.size import Size
from bigsgan.models import plain
from bigsgan.models.dual import has_tangent
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.precision import full
from bigsgan.models.recomputing import last_sum
from bigsgan.models.transformer import Block, Linear, Modulation, Positions, SelfAttention, images_of, patches_of

_EPSILON = 1e-6
_STD = 0.02
"""Of embeddings and of the class token."""
NUM_FREQUENCIES = 128
"""Of the embedding of times."""
_MODULATION_GAIN = 0.0
"""Blocks begin as the identity, and G's images, or velocities, as 0."""
_HEAD_GAIN = 0.0


class Perceptron(nn.Module):
    """Two linear maps with a GELU, approximated by tanh, of 4 times the features between: (N, T, W) -> (N, T, W)."""

    approximate = "tanh"

    def __init__(self, width: int, bf16: bool, hidden: int | None = None) -> None:
        super().__init__()
        self.expand = Linear(width, hidden or 4 * width, bf16)
        self.contract = Linear(hidden or 4 * width, width, bf16)

    def forward(self, x: Tensor) -> Tensor:
        """Map."""
        return self.contract(F.gelu(self.expand(x), approximate=self.approximate))


class DiTBlock(Block):
    """Attention and a perceptron, each between a shift, a scale and a gate that the condition gives (adaLN-Zero)."""

    def __init__(self, config: DiTNetwork) -> None:
        super().__init__()
        self.modulation = Modulation(config.width, 6, config.bf16, _MODULATION_GAIN)
        self.attention = SelfAttention(config.width, config.heads, config.bf16)
        self.perceptron = Perceptron(config.width, config.bf16)

    def forward(self, x: Tensor, c: Tensor, *read: Tensor) -> tuple[Tensor, ...]:
        """(N, T, W), (N, W) -> the same."""
        return last_sum(*self.addends(x, c)), c, *read

    def addends(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x behind attention, and a gate and a branch whose product is to be added."""
        shift, scale, gate, shift_after, scale_after, gate_after = self.modulation(c)
        x = x + gate * self.attention(modulated(x, shift, scale))
        return x, gate_after, self.perceptron(modulated(x, shift_after, scale_after))


def standardized(x: Tensor) -> Tensor:
    """Subtract the mean of the features and divide by their deviation, in float32 at least: (..., W) -> (..., W).

    With a tangent it is written out: torch's (2.14) gives a wrong gradient of its tangent.
    """
    if not has_tangent(x):
        return F.layer_norm(full(x), x.shape[-1:], eps=_EPSILON)
    centred = full(x) - full(x).mean(dim=-1, keepdim=True)
    return centred * (centred.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt()


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Standardize (N, T, W), scale by 1 + (N, 1, W) and add (N, 1, W)."""
    return standardized(x) * (1 + scale) + shift


class TimeEmbedding(nn.Module):
    """Cosines and sines of times, and a perceptron: (N,) in [0, 1] -> (N, W).

    Frequencies fall from ``scale`` to nearly ``scale`` / 10,000 (Peebles and Xie 2023, arXiv 2212.09748).
    """

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.expand = plain.Linear(2 * NUM_FREQUENCIES, width, _STD)
        self.contract = plain.Linear(width, width, _STD)

    def forward(self, times: Tensor) -> Tensor:
        """Embed."""
        # In float64, as another rounding of an angle of 1,000 in compiled code would be seen.
        places = torch.arange(NUM_FREQUENCIES, dtype=torch.float64, device=times.device)
        frequencies = self.scale * torch.exp(-math.log(10_000) / NUM_FREQUENCIES * places)
        angles = times.float()[:, None] * frequencies.float()
        return self.contract(F.silu(self.expand(torch.cat([angles.cos(), angles.sin()], dim=1))))


class Tokens(nn.Module):
    """Patches with positions, behind a class token in D, and the condition of a label, and maybe of a time.

    Attributes:
        token: The class token (W,); None in G.
        times: The embedding of times, if G reads them; in D of 0.
    """

    def __init__(
        self,
        config: DiTGenerator | DiTDiscriminator | NoisyDiscriminator,
        size: Size,
        channels: int,
        num_classes: int,
        with_token: bool,
    ) -> None:
        super().__init__()
        self.patch, self.shape = config.patch, (channels, *size)
        self.linear = Linear(channels * config.patch**2, config.width, config.bf16)
        self.positions = Positions(config.width, size.over(config.patch))
        self.embedding = plain.Embedding(max(num_classes, 1), config.width, _STD)
        self.token = nn.Parameter(torch.empty(config.width)) if with_token else None
        scale = 1.0 if isinstance(config, DiTDiscriminator) else config.time_scale  # which of time 0 is without effect
        self.times = TimeEmbedding(config.width, scale) if config.times else None

    def initialize(self, generators: Generators) -> None:
        """Draw the class token."""
        if self.token is not None:
            draw_normal(self.token, generators("token"), _STD)

    def forward(self, images: Tensor, labels: Tensor, times: Tensor | None = None) -> tuple[Tensor, ...]:
        """Noise (N, C * H * W') or images (N, C, H, W'), labels (N,), maybe times (N,) in (0, 1] -> the carry."""
        images = images.view(-1, *self.shape)
        x = self.linear(patches_of(images, self.patch)) + self.positions.table.to(self.linear.weight.dtype)
        if self.token is not None:
            x = torch.cat([self.token.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
        if self.times is None:
            return x, self.embedding(labels)
        if self.token is not None:
            return x, self.embedding(labels) + self.times(torch.zeros_like(images[:, 0, 0, 0]))
        assert times is not None, "G reads times"
        return x, self.embedding(labels) + self.times(times), images, times[:, None, None, None]


class Image(nn.Module):
    """The last layer of G: tokens -> an image."""

    def __init__(self, config: DiTNetwork, size: Size, channels: int) -> None:
        super().__init__()
        self.patch, self.size = config.patch, size.over(config.patch)
        self.modulation = Modulation(config.width, 2, config.bf16, _MODULATION_GAIN)
        self.linear = Linear(config.width, config.patch**2 * channels, config.bf16, gain=_HEAD_GAIN)

    def forward(self, x: Tensor, c: Tensor, *read: Tensor) -> tuple[Tensor]:
        """(N, T, W), (N, W) -> images (N, C, H, W'), float32 whatever the network's type, not bounded."""
        made = full(images_of(self.linear(modulated(x, *self.modulation(c))), self.patch, self.size))
        if not read:
            return (made,)
        images, times = read
        return (images - times * made,)


class Logit(nn.Module):
    """The last layer of D: the class token -> a logit."""

    def __init__(self, config: DiTDiscriminator) -> None:
        super().__init__()
        self.linear = plain.Linear(config.width, 1, std=(3 * config.width) ** -0.5, bias=False)

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor]:
        """(N, T, W), (N, W) -> logits (N,), float32 whatever the network's type."""
        return (full(self.linear(standardized(x[:, 0]))).squeeze(1),)


def generator_layers(config: DiTGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, C * H * W'), labels (N,) -> images (N, C, H, W')."""
    tokens = Tokens(config, size, image_channels, num_classes, with_token=False)
    return [tokens, *(DiTBlock(config) for _ in range(config.depth)), Image(config, size, image_channels)]


def discriminator_layers(
    config: DiTDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, C, H, W'), labels (N,) -> logits (N,)."""
    tokens = Tokens(config, size, image_channels, num_classes, with_token=True)
    return [tokens, *(DiTBlock(config) for _ in range(config.depth)), Logit(config)]
