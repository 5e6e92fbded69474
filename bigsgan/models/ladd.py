"""D of latent adversarial diffusion distillation (LADD, Sauer et al. 2024, arXiv 2403.12015).

A DiT that reads times, the teacher, gets images with noise, (1 - t) x + t z. Heads judge the tokens behind some of its
blocks. It stays as it is, unless it learns too.

Shapes: N samples, T = h * w tokens, W features, C channels, H x W' pixels, K heads. The carry:
(x (N, T, W), c (N, W)), and behind the first head logits (N, heads so far).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.ladd import LADDDiscriminator
from bigsgan.images.size import Size
from bigsgan.models import noise, plain
from bigsgan.models.dit import DiTBlock, Tokens
from bigsgan.models.dual import has_tangent
from bigsgan.models.frozen import freeze_all
from bigsgan.models.noisy import AddedNoise
from bigsgan.models.precision import full

_SLOPE, _MOST_GROUPS, _KERNEL = 0.2, 32, 4


def _shares(mean: float, deviation: float, seeds: Tensor) -> Tensor:
    return torch.sigmoid(mean + deviation * noise.normal(seeds, 0, (1, 1, 1)))


class NoisyTokens(Tokens):
    """The teacher's first layer."""

    def __init__(self, config: LADDDiscriminator, size: Size, channels: int, num_classes: int) -> None:
        super().__init__(config, size, channels, num_classes, with_token=False)
        self._noise = AddedNoise(config, partial(_shares, config.time_mean, config.time_deviation))

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Images (N, C, H, W'), labels (N,) or (N, K), seeds (N,) -> (N, T, W), (N, W)."""
        noisy, times = self._noise(full(images), seeds)
        x, c, *_ = super().forward(noisy, labels, times.flatten())
        return x, c


class Head(nn.Module):
    """Two convolutions with a norm and leaky ReLU between them, and the mean over pixels: (N, T, W) -> (N, 1)."""

    def __init__(self, width: int, grid: Size) -> None:
        super().__init__()
        self.grid, inside = grid, width // 2
        most = _MOST_GROUPS if inside > _MOST_GROUPS else max(inside // 4, 1)
        groups = next(num for num in range(most, 0, -1) if inside % num == 0)
        # The deviations of torch's uniform ones, which the public code has.
        self.first = plain.Conv2d(width, inside, _KERNEL, (3 * width * _KERNEL**2) ** -0.5, stride=2, padding=1)
        self.norm = nn.GroupNorm(groups, inside)
        self.last = plain.Conv2d(inside, 1, 1, (3 * inside) ** -0.5, stride=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        """Judge; logits are float32 whatever the network's type."""
        h = self.first(x.mT.unflatten(2, tuple(self.grid)))
        if has_tangent(h):  # torch 2.11 takes no other order there
            h = h.clone(memory_format=torch.contiguous_format)
        return full(self.last(F.leaky_relu(self.norm(h), _SLOPE))).mean(dim=(2, 3))


class JudgedBlock(DiTBlock):
    """A block of the teacher with a head; behind the last the teacher is not computed."""

    def __init__(self, config: LADDDiscriminator, grid: Size, is_last: bool) -> None:
        super().__init__(config)
        if not config.trains_teacher:
            freeze_all(self)
        self.head, self.is_last = Head(config.width, grid), is_last

    def forward(self, x: Tensor, c: Tensor, *logits: Tensor) -> tuple[Tensor, ...]:
        """Its carry -> the same; the last leaves logits (N, K) alone."""
        x, gate, branch = self.addends(x, c)
        x = x + gate * branch
        found = torch.cat([*logits, self.head(x)], dim=1)
        return (found,) if self.is_last else (x, c, found)


def discriminator_layers(
    config: LADDDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, C, H, W'), labels, seeds (N,) -> logits (N, K)."""
    judged, grid = config.judged_blocks, size.over(config.patch)
    layers: list[nn.Module] = [NoisyTokens(config, size, image_channels, num_classes)]
    layers += [
        JudgedBlock(config, grid, number == judged[-1]) if number in judged else DiTBlock(config)
        for number in range(judged[-1] + 1)
    ]
    if not config.trains_teacher:
        for layer in layers:
            if not isinstance(layer, JudgedBlock):
                freeze_all(layer)
    return layers
