"""Networks that read the feature maps of a frozen program: heads that judge them, and a ViT that decodes one.

The discriminator is a projected one (Sauer et al. 2021, arXiv 2111.01007) as in StyleGAN-T (Sauer et al. 2023, arXiv
2301.09515), and the generator a representation autoencoder (Zheng et al. 2025, arXiv 2510.11690). No engine holds a
program, nor does a checkpoint.

Shapes: N samples, K maps, P pixels of a map, C channels, H x W pixels of an image, T tokens, F features. The carry of
D: (map (N, C, h, w) of each head to come..., logits (N, P) of those before), and of G after its program:
(x (N, T, F),).
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bigsgan.config.families.features import FeaturesDiscriminator, FeaturesGenerator, FeaturesNetwork
from bigsgan.data.perceptual import Features, open_maps
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import noise
from bigsgan.models.batch_norm import AffineBatchNorm
from bigsgan.models.dit import Perceptron
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.layers import SpectralLayer, TwiceDifferentiable
from bigsgan.models.precision import full
from bigsgan.models.transformer import Block, Linear, Positions, SelfAttention, images_of

_SLOPE, _EPSILON = 0.2, 1e-6
_STD = 0.02
"""Of the decoder's own token. That of zeros in the public code would begin with the gradient of a norm of zeros."""
_OPENED: dict[tuple[object, ...], Features | None] = {}
"""Programs that layers have opened: layers are built again and again on the meta device."""


class _File(NamedTuple):
    """What tells programs apart."""

    network: str
    path: str
    changed: int | None  # nanoseconds at which the file was changed; None if there is none
    maps: str
    size: Size

    @classmethod
    def of(cls, section: FeaturesNetwork, size: Size) -> _File:
        """Look at the file of a section."""
        path = Path(section.path)
        changed = path.stat().st_mtime_ns if path.exists() else None
        return cls(section.network, section.path, changed, str(section.maps), size)


class FrozenMaps(TwiceDifferentiable):
    """The feature maps that a frozen program makes of images. It has neither parameters nor buffers.

    On the meta device the maps of a program that is not there, or does not run there, have the shapes that the section
    says.
    """

    def __init__(self, section: FeaturesNetwork, size: Size) -> None:
        super().__init__()
        self.section, self.size = section, size
        self._file = _File.of(section, size)  # a run needs it no more once it is open

    @torch.compiler.disable
    def forward(self, images: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C, H, W) in [-1, 1], ... -> maps (N, C_i, h_i, w_i), float32."""
        features = self.program(images.device)
        if features is None:
            linked = images.float().mean(dim=(1, 2, 3)).view(-1, 1, 1, 1)
            return tuple(linked.expand(-1, *each).contiguous() for each in self.section.maps)
        # torch's fast attention has no second derivatives.
        with sdpa_kernel(SDPBackend.MATH) if self.exact else nullcontext():
            return tuple(each.float() for each in features.made(images))

    @property
    def frozen_program(self) -> list[Tensor] | None:
        """The program's parameters and buffers, on the meta device; None if it is not there, or does not run there."""
        features = self.program(torch.device("meta"))
        return None if features is None else features.tensors

    def program(self, device: torch.device) -> Features | None:
        """The program on a device; None on the meta device if it is not there, or does not run there."""
        key = (*self._file, device)
        try:
            if device.type == "meta" and self._file.changed is None:
                return None
            if key not in _OPENED:
                _OPENED[key] = open_maps(self.section, self.size, device)
            return _OPENED[key]
        except UserError as error:
            if device.type != "meta" or not error.problem.startswith("fails at"):
                raise
            _OPENED[key] = None
            return None


class RingConvolution(SpectralLayer):
    """Convolution along the pixels of a map, whose end is followed by its beginning: (N, C_in, P) -> (N, C_out, P)."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, bias: bool) -> None:
        super().__init__((out_channels, in_channels, kernel), bias)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, in the weight's type."""
        x, around = x.to(self.weight.dtype), self.kernel // 2
        x = F.pad(x, (around, around), mode="circular") if around else x
        return F.conv1d(x, self.normalized_weight(), self.bias)


class HeadBlock(nn.Module):
    """Convolution, norm, leaky ReLU: (N, C, P) -> (N, C, P). The norm would take a bias of the convolution away."""

    def __init__(self, channels: int, kernel: int, norm: str) -> None:
        super().__init__()
        self.conv = RingConvolution(channels, channels, kernel, bias=False)
        self.norm: nn.Module = nn.GroupNorm(channels, channels, _EPSILON)
        if norm == "batch":
            self.norm = AffineBatchNorm(channels, _EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        return F.leaky_relu(self.norm(self.conv(x)[..., None]), _SLOPE).squeeze(3)


class Head(nn.Module):
    """A logit for each pixel of a map."""

    def __init__(self, channels: int, config: FeaturesDiscriminator, is_first: bool) -> None:
        super().__init__()
        self.first = HeadBlock(channels, 1, config.norm)
        self.second = HeadBlock(channels, config.kernel, config.norm)
        self.last = RingConvolution(channels, 1, 1, bias=True)
        self.is_first = is_first

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Own map, maps of later heads, and but for the first head logits (N, P) -> later maps, and more logits.

        Logits are float32 whatever the network's type.
        """
        x = self.first(h.flatten(2))
        logits = full(self.last((x + self.second(x)) * 0.5**0.5)).squeeze(1)
        if self.is_first:
            return *rest, logits
        *later, before = rest
        return *later, torch.cat([before, logits], dim=1)


def discriminator_layers(
    config: FeaturesDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, C, H, W), labels (N,) -> logits (N, P), those of all maps."""
    heads = [Head(channels, config, number == 0) for number, (channels, *_) in enumerate(config.maps)]
    return [FrozenMaps(config, size), *heads]


class Encoded(FrozenMaps):
    """The only map of images, which gets no gradient, with noise in training."""

    section: FeaturesGenerator

    @torch.compiler.disable
    def forward(self, images: Tensor, labels: Tensor, *seeds: Tensor) -> tuple[Tensor]:
        """Images (N, C, H, W) in [-1, 1], labels (N,), [seeds (N,)] -> (N, C, h, w), float32."""
        with torch.no_grad():
            (h,) = super().forward(images)
            if self.training and seeds:
                deviation = self.section.noise * noise.uniform(seeds[0], 0, (1, 1, 1))
                h = h + deviation * noise.normal(seeds[0], 1, tuple(h.shape[1:]))
            return (h,)


class ExactPerceptron(Perceptron):
    """With a GELU that is not approximated."""

    approximate = "none"


class DecoderInput(nn.Module):
    """Pixels of the map as tokens with positions, behind one more token."""

    def __init__(self, config: FeaturesGenerator) -> None:
        super().__init__()
        channels, height, width = config.maps[0]
        self.linear = Linear(channels, config.width, config.bf16)
        self.positions = Positions(config.width, Size(height, width))
        self.token = nn.Parameter(torch.empty(config.width))

    def initialize(self, generators: Generators) -> None:
        """Draw the token."""
        draw_normal(self.token, generators("token"), _STD)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, h, w) -> (N, 1 + h * w, F)."""
        x = self.linear(h.flatten(2).mT) + self.positions.table.to(self.token.dtype)
        return (torch.cat([self.token.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1),)


class DecoderBlock(Block):
    """Attention and a perceptron, each behind a norm (Dosovitskiy et al. 2021, arXiv 2010.11929)."""

    def __init__(self, config: FeaturesGenerator) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.width, _EPSILON) for _ in range(2))
        self.attention = SelfAttention(config.width, config.heads, config.bf16)
        self.perceptron = ExactPerceptron(config.width, config.bf16, config.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """(N, T, F) -> (N, T, F)."""
        x = x + self.attention(self.norm1(x))
        return (x + self.perceptron(self.norm2(x)),)


class DecoderOutput(nn.Module):
    """Tokens -> image."""

    def __init__(self, config: FeaturesGenerator, size: Size, image_channels: int) -> None:
        super().__init__()
        self.grid = Size(*config.maps[0][1:])
        self.patch = size.height // self.grid.height
        self.norm = nn.LayerNorm(config.width, _EPSILON)
        self.to_patches = Linear(config.width, self.patch**2 * image_channels, config.bf16)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """(N, 1 + h * w, F) -> images (N, C, H, W) of any range, float32 whatever the network's type."""
        return (full(images_of(self.to_patches(self.norm(x[:, 1:])), self.patch, self.grid)),)


def generator_layers(config: FeaturesGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: images (N, C, H, W), labels (N,), [seeds (N,)] -> images (N, C, H, W)."""
    blocks = [DecoderBlock(config) for _ in range(config.depth)]
    return [Encoded(config, size), DecoderInput(config), *blocks, DecoderOutput(config, size, image_channels)]
