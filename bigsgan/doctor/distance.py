"""The reference's distances of G's images from targets, and of D's predictions from a teacher's features."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.adversarial.terms.perceptual import build_features
from bigsgan.config import Recipe


class Distance:
    """Callable that returns the weighted sum of a recipe's distances of images to targets (n, C, H, W)."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._objective, self._features = recipe.objective, build_features(recipe, device)

    def __call__(self, images: torch.Tensor, targets: torch.Tensor) -> Any:
        """Return the sum, a scalar with a graph to the images; 0 without distances."""
        section = self._objective
        if not section.of_targets:  # other micro-batches, or images of several levels, have other shapes than targets
            return 0
        error, total = images - targets, images.new_zeros(())
        if section.l1:
            total = total + section.l1 * F.l1_loss(images, targets)
        if section.l2:
            total = total + section.l2 * (error**2).mean()
        if near := section.huber:
            linear = near.delta * (error.abs() - near.delta / 2)
            total = total + near.weight * torch.where(error.abs() < near.delta, error**2 / 2, linear).mean()
        if section.perceptual:
            total = total + section.perceptual.weight * self._perceptual(images, targets)
        return total

    def _perceptual(self, images: torch.Tensor, targets: torch.Tensor) -> Any:
        features: Any = self._features
        pairs = [*zip(features(images), features(targets), strict=True)]
        total: Any = 0
        for (ours, theirs), head in zip(pairs, features.heads or [1.0] * len(pairs), strict=True):
            ours, theirs = F.normalize(ours, dim=1, eps=1e-10), F.normalize(theirs.detach(), dim=1, eps=1e-10)
            total = total + (head * (ours - theirs) ** 2).flatten(1).sum(1).mean() / ours[0, 0].numel()
        return total


def distance_to_teacher(recipe: Recipe, network: Any, teacher: Any, shown: Any, x: Tensor, *y: Tensor) -> Tensor:
    """Return how far what D's heads compute of the full image's tokens is from the teacher's features of this image."""
    d: Any = recipe.discriminator
    side, h = recipe.data.network_size.height // d.patch, (torch.cat([x] * d.images_per_sample, dim=1), *y)
    *others, last = network.layers.values()
    for layer in others:
        h = layer(*h)
    head = last.teacher
    ours = F.linear(h[0][:, -1 - side**2 :], head.first.weight, head.first.bias)
    for layer in (head.second, head.third):
        ours = F.linear(ours * ours.sigmoid(), layer.weight, layer.bias)
    with torch.no_grad():
        of_class, of_patches = teacher(shown, *y[1:])
    own = math.isqrt(of_patches.shape[1])
    if side != own:
        grid = F.interpolate(of_patches.mT.reshape(len(x), -1, own, own), (side, side), mode="bicubic")
        of_patches = grid.flatten(2).mT
    theirs = torch.cat([of_class[:, None], of_patches], dim=1)
    cosines = (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))
    section: Any = recipe.objective.teacher
    return section.weight * (2 - cosines[:, 0].mean() - cosines[:, 1:].mean())
