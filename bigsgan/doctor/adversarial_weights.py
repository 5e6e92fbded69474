"""The reference's weights of the adversarial loss, written out with plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bigsgan.config.adversarial_weight import Adversarial, Normalize


def adversarial_weights(section: Adversarial, nimg: int, network: Any, parts: Sequence[Any]) -> list[Tensor | float]:
    """Return the weight of each micro-batch, given its parts: the adversarial loss, terms of images, and what else."""
    share = 1 - (section.from_nimg + section.ramp_nimg - nimg) / (section.ramp_nimg + 1)
    weight = section.weight * min(1.0, max(0.0, share))
    if section.adaptive is None:
        return [weight] * len(parts)
    ending = section.adaptive.parameter
    (last,) = (parameter for name, parameter in network.named_parameters() if f".{name}".endswith(f".{ending}"))
    grads: Any = [[torch.autograd.grad(each, last, retain_graph=True)[0] for each in part[:2]] for part in parts]
    if section.adaptive.over == "batch":
        grads = [[sum(each) / len(parts) for each in zip(*grads, strict=True)]] * len(parts)
    ratios = (rest.norm() / (adversarial.norm() + 1e-4) for adversarial, rest in grads)
    return [weight * ratio.clamp(max=section.adaptive.largest) for ratio in ratios]


def normalized(
    section: Normalize, mean_square: Any, weights: Sequence[Any], parts: Sequence[Any], images: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | float]]:
    """Return the moved average, and weights divided by its root, given each micro-batch's loss and images (n, ...)."""
    squares = [
        len(x) * torch.autograd.grad(len(x) * part[0], x, retain_graph=True)[0].flatten(1).norm(dim=1).pow(2).mean()
        for part, x in zip(parts, images, strict=True)
    ]
    size = images[0][0].numel() * sum(squares) / sum(map(len, images))
    mean_square = section.decay * mean_square + (1 - section.decay) * size
    return mean_square, [weight / (mean_square.sqrt() + 1e-8) for weight in weights]
