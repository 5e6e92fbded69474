"""Perceptual path length: the change of an image's features for a small change of its style.

Shapes: n samples, S styles of W numbers each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.engines.base import MicroBatch
from bigsgan.images.codec import byte_range
from bigsgan.images.wide import viewable
from bigsgan.metrics.features import Features
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm

EPSILON = 1e-4
TRIMMED = 0.01
"""Share of the shortest paths, and of the longest ones, that do not count."""

_PAIRS = 8
"""Pairs of images compared at a time."""

LARGEST_RESOLUTION = 256
"""Larger images are averaged down to this resolution, at which the published feature network was trained."""


def path_length(
    network: LayerStack,
    decode: Callable[[Tensor], Tensor],
    inputs: Callable[[int, int], MicroBatch],
    features: Features,
    num: int,
    batch: int,
    tell: Callable[[str], None],
) -> float:
    """Mean squared distance of features over EPSILON^2, at the ends of paths between styles. A collective.

    Karras et al. 2020 (arXiv 1912.04958), section 3, which compares in the features of a VGG network that was fitted to
    human judgement (LPIPS); with other networks the number has another scale.

    Args:
        network: A generator whose first layer makes styles, on the device, whole on every rank, in evaluation mode, and
            in float32: half precision does not see such small differences.
        decode: Makes images (n, C, H, W) in [-1, 1] of what the generator makes.
        inputs: Returns latents, labels and seeds, given the first sample's number and the number of samples.
        features: The network to compare with, on the device.
        num: Number of paths, over all ranks.
        batch: Images at a time.
        tell: Called with texts about progress.
    """
    mapping, synthesis = network.part(0, 1), network.part(1, len(network.layers))
    distances, step = [], max(batch // 2, 1)
    for first in range(comm.rank() * step, num, step * comm.world_size()):
        tell(f"path {first} of {num}")
        n = min(step, num - first)
        latents, labels, seeds = inputs(2 * first, 2 * n)
        labels, seeds = (torch.cat([each[:n], each[:n]]) for each in (labels, seeds))  # a path keeps label and noise
        with torch.no_grad():
            styles, _ = mapping.fold(latents, labels, seeds)  # (2n, S, W)
            ends = torch.cat([styles[:n], torch.lerp(styles[:n], styles[n:], EPSILON)])
            images = _comparable(viewable(decode(synthesis(ends, seeds))))
            pairs = zip(*(end.split(_PAIRS) for end in images.split(n)), strict=True)
            distances += [_distances(features, a, b) for a, b in pairs]
    gathered = comm.gather_objects(torch.cat(distances) if distances else torch.empty(0, dtype=torch.float64))
    return float(comm.from_rank_zero(None if gathered is None else trimmed_mean(torch.cat(gathered))))


def _distances(features: Features, a: Tensor, b: Tensor) -> Tensor:
    """Squared distances over EPSILON^2 between images (n, C, H, W) of two ends: (n,) on the host."""
    look = features.look_for_paths or (lambda images: features.look(images).features)
    seen = [look(images).flatten(1).float() for images in (a, b)]  # millions of numbers an image, in LPIPS
    return (seen[0] - seen[1]).square().sum(1).double().cpu() / EPSILON**2


def trimmed_mean(distances: Tensor) -> float:
    """Mean of distances (n,) without the shares TRIMMED of the shortest and of the longest."""
    low = torch.quantile(distances, TRIMMED, interpolation="lower")
    high = torch.quantile(distances, 1 - TRIMMED, interpolation="higher")
    return float(distances[(distances >= low) & (distances <= high)].mean())


def _comparable(images: Tensor) -> Tensor:
    """Images from [-1, 1] as 0 to 255, not rounded, because differences are small."""
    factor = max(min(images.shape[2:]) // LARGEST_RESOLUTION, 1)
    return byte_range(F.avg_pool2d(images.float(), factor) if factor > 1 else images)
