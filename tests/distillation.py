"""A game with outputs of D beside its logits: distribution matching distillation.

It is that of DMD2 (Yin et al. 2024, arXiv 2405.14867).
D holds the fake score, whose features a head judges, and the frozen teacher. Both predict velocities of noisy images.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from bigsgan.doctor.reference import Reference
from bigsgan.models import noise

NAMES = ("guidance", "denoising", "matching")
"""What recipes name of this module."""


class Noisy(nn.Module):
    """Images -> noisy images, and features of them by the first layers of fake score and teacher."""

    def __init__(self, channels, num_classes, width):
        super().__init__()
        self.embedding, self.time = nn.Embedding(num_classes, width), nn.Linear(1, width)
        self.first, self.teacher = (nn.Conv2d(channels, width, 3, padding=1) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, images, labels, seeds):
        """(N, C, R, R), (N,), (N,) -> features, the teacher's, images, noisy images, noise, (N, 1, 1, 1) times."""
        times = noise.uniform(seeds, 0, (1, 1, 1)).to(images.dtype)
        drawn = noise.normal(seeds, 1, tuple(images.shape[1:])).to(images.dtype)
        noisy = (1 - times) * images + times * drawn
        condition = (self.embedding(labels) + self.time(times.flatten(1)))[:, :, None, None]
        return F.silu(self.first(noisy) + condition), F.silu(self.teacher(noisy)), images, noisy, drawn, times


class Scores(nn.Module):
    """Features -> a logit, the fake score's error for the image, and a loss with the gradient that matches scores."""

    def __init__(self, channels, width):
        super().__init__()
        self.head = nn.Linear(width, 1)
        self.fake, self.teacher = (nn.Conv2d(width, channels, 3, padding=1) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, features, of_teacher, images, noisy, drawn, times):
        """... -> (N, 1), (N,), (N, C, R, R)."""
        velocity = self.fake(features)
        denoising = (velocity - (drawn - images)).square().mean(dim=(1, 2, 3))
        with torch.no_grad():
            real = noisy - times * self.teacher(of_teacher)
            off = (images - real).abs().mean(dim=(1, 2, 3), keepdim=True)
            target = images - (real.neg() + noisy - times * velocity) / off
        return self.head(features.mean(dim=(2, 3))), denoising, (images - target).square() / 2


def guidance(image_channels, num_classes, width: int = 4):
    """Two layers."""
    return [partial(Noisy, image_channels, num_classes, width), partial(Scores, image_channels, width)]


def denoising(fake_denoising):
    """The fake score's loss, for D."""
    return fake_denoising.mean()


def matching(fake_matching):
    """For G."""
    return fake_matching.mean()


DISTILLATION = [
    'discriminator={family: "tests.distillation:guidance", seeds: true, outputs: [denoising, matching]}',
    "objective={loss: non_saturating, d_steps: 2, adversarial: {weight: 0.5}, r1: {weight: 0.1, every: 2}, terms:"
    " [{use: 'tests.distillation:denoising', network: discriminator, weight: 3},"
    " {use: 'tests.distillation:matching', weight: 0.7}]}",
]
"""Overrides of the tiny recipe."""


class DistillationReference(Reference):
    """The reference of ``DISTILLATION``."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.penalty = lambda d_step, real, fake: 3 * self.judged[1].sum() / len(self.judged[1])
        self.output_terms = lambda *update: 0.7 * self.judged[2].sum() / self.judged[2].numel()

    def _judged(self, *inputs, moving=False):
        """The logits; D's other outputs of the same images are kept."""
        found = super()._judged(*inputs, moving=moving)
        self.judged = found[:, 0], found[:, 1], found[:, 2:]
        return found[:, 0]
