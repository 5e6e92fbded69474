"""D of distribution matching distillation (DMD2, Yin et al. 2024, arXiv 2405.14867).

It holds two DiTs that read times. The fake score learns to tell the generator's images from those with noise,
(1 - t) x + t z, and a head judges its features. The teacher, which stays as it is, estimates what images of the data
would be. The difference of the two estimates tells the generator where the data is denser than its images.

Shapes: N samples, T tokens, W features, C channels, H x W' pixels, M = N, or 2 * N with guidance. The carry of the fake
score: (x (N, T, W), c (N, W), images (N, C, H, W'), labels, seeds (N,)), and of the teacher behind it:
(judged (N, 2), the fake score's estimates (N, C, H, W'), images, seeds, y (M, T, W), d (M, W)).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigsgan.config.families.dmd2 import DMD2Discriminator
from bigsgan.images.size import Size
from bigsgan.models import noise, plain
from bigsgan.models.dit import DiTBlock, Image, Tokens, standardized
from bigsgan.models.frozen import freeze_all
from bigsgan.models.noisy import AddedNoise
from bigsgan.models.precision import full

_LEAST = 1e-6
"""Distance of an image to the teacher's estimate below which the step no longer grows."""


def _shares(seeds: Tensor) -> Tensor:
    return noise.uniform(seeds, 0, (1, 1, 1))


class NoisyTokens(Tokens):
    """The first layer of the fake score."""

    def __init__(self, config: DMD2Discriminator, size: Size, channels: int, num_classes: int) -> None:
        super().__init__(config, size, channels, num_classes, with_token=False)
        self._noise = AddedNoise(config, _shares)

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Images (N, C, H, W'), labels (N,) or (N, K), seeds (N,) -> its carry."""
        noisy, times = self._noise(full(images), seeds)
        x, c, *_ = super().forward(noisy, labels, times.flatten())
        return x, c, full(images), labels, seeds


class FakeScore(Image):
    """The last layer of the fake score: a logit of its features, and the mean squared error of its velocity."""

    def __init__(self, config: DMD2Discriminator, size: Size, channels: int) -> None:
        super().__init__(config, size, channels)
        self._noise = AddedNoise(config, _shares)
        self.head = plain.Linear(config.width, 1, std=(3 * config.width) ** -0.5, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, c: Tensor, images: Tensor, labels: Tensor, seeds: Tensor
    ) -> tuple[Tensor, ...]:
        """Its carry -> (N, 2) of both, its estimates of the images (N, C, H, W'), images, labels, seeds."""
        noisy, times = self._noise(images, seeds)
        (estimates,) = super().forward(x, c, noisy, times)
        errors = ((estimates - images) / times).square().mean(dim=(1, 2, 3))
        logits = full(self.head(standardized(x).mean(dim=1)))
        return torch.cat([logits, errors[:, None]], dim=1), estimates, images, labels, seeds


class Teacher(nn.Module):
    """A layer of the teacher. It computes where a gradient at the images is asked for."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = freeze_all(real)

    def forward(
        self, judged: Tensor, estimates: Tensor, images: Tensor, seeds: Tensor, *y: Tensor
    ) -> tuple[Tensor, ...]:
        """The teacher's carry -> the same."""
        if images.requires_grad:
            with torch.no_grad():
                y = self.real(*y)
        return judged, estimates, images, seeds, *y


class TeacherTokens(Teacher):
    """Its first layer. With guidance there are as many images without labels behind those that have them."""

    def __init__(self, config: DMD2Discriminator, size: Size, channels: int, num_classes: int) -> None:
        super().__init__(Tokens(config, size, channels, num_classes, with_token=False))
        self._noise, self._guided = AddedNoise(config, _shares), config.guidance != 1
        self._num_classes = num_classes

    @torch.no_grad()
    def _tokens(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        noisy, times = self._noise(images, seeds)
        x, c, *_ = self.real(noisy, labels, times.flatten())
        if not self._guided:
            return x, c
        null = torch.zeros(len(labels), self._num_classes, device=labels.device)
        _, other, *_ = self.real(noisy, null, times.flatten())
        return x.repeat(2, 1, 1), torch.cat([c, other])

    def forward(  # type: ignore[override]
        self, judged: Tensor, estimates: Tensor, images: Tensor, labels: Tensor, seeds: Tensor
    ) -> tuple[Tensor, ...]:
        """What the fake score leaves -> the teacher's carry."""
        return judged, estimates, images, seeds, *self._tokens(images, labels, seeds)


class Matching(Teacher):
    """Its last layer, and half the mean square of the step to its estimate, whose gradient at the images is DMD's.

    Attributes:
        output_sizes: Numbers of an image behind its logit.
    """

    output_sizes = (1, 1)

    def __init__(self, config: DMD2Discriminator, size: Size, channels: int) -> None:
        super().__init__(Image(config, size, channels))
        self._noise, self._guidance = AddedNoise(config, _shares), config.guidance

    @torch.no_grad()
    def _estimates(self, images: Tensor, seeds: Tensor, y: Tensor, d: Tensor) -> Tensor:
        noisy, times = self._noise(images, seeds)
        copies = len(y) // len(images)
        (found,) = self.real(y, d, noisy.repeat(copies, 1, 1, 1), times.repeat(copies, 1, 1, 1))
        if copies == 1:
            return found
        labelled, other = found.chunk(2)
        return other.lerp(labelled, self._guidance)

    def forward(self, judged: Tensor, estimates: Tensor, images: Tensor, seeds: Tensor, *y: Tensor) -> tuple[Tensor]:
        """The teacher's carry -> (N, 3) float32: the logit, the fake score's error, and that loss, or 0."""
        loss = torch.zeros_like(judged[:, 0])
        if images.requires_grad:
            real = self._estimates(images, seeds, *y)
            with torch.no_grad():
                step = (estimates - real) / (images - real).abs().mean(dim=(1, 2, 3), keepdim=True).clamp(min=_LEAST)
                target = images - step
            loss = (images - target).square().mean(dim=(1, 2, 3)) / 2
        return (torch.cat([judged, loss[:, None]], dim=1),)


def discriminator_layers(
    config: DMD2Discriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, C, H, W'), labels, seeds (N,) -> (N, 3): see ``Matching``."""
    shape = config, size, image_channels
    fake, real = ([DiTBlock(config) for _ in range(config.depth)] for _ in range(2))
    scores = [NoisyTokens(*shape, num_classes), *fake, FakeScore(*shape)]
    return [*scores, TeacherTokens(*shape, num_classes), *map(Teacher, real), Matching(*shape)]
