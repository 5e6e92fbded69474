"""How near images are to their targets: PSNR, SSIM and LPIPS of each image, and their means over the images.

Shapes: n images (n, C, H, W), 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bigsgan.config.metrics import SSIM_WINDOW, Metric
from bigsgan.metrics.lpips import Lpips
from bigsgan.runtime import comm

_PEAK = 255
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
_GAUSSIAN = [math.exp(-((i - SSIM_WINDOW // 2) ** 2) / (2 * 1.5**2)) for i in range(SSIM_WINDOW)]


def psnr(images: Tensor, targets: Tensor) -> Tensor:
    """10 log10(255^2 / mean squared difference over all pixels and channels): (n,) float64, in decibels.

    Equal images count as if one value differed by one level, because one infinite ratio would hide all others.
    """
    squares = (images.double() - targets.double()).square().flatten(1)
    return 10 * (_PEAK**2 * squares.shape[1] / squares.sum(1).clamp(min=1)).log10()


def ssim(images: Tensor, targets: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) of each channel, averaged over channels and pixels: (n,) float64.

    The pixels are those around which the window lies within the image.
    """
    pairs = zip(images.double(), targets.double(), strict=True)  # one by one, which needs little memory
    return torch.stack([_similarity(x, y) for x, y in pairs])


def _similarity(x: Tensor, y: Tensor) -> Tensor:
    mean_x, mean_y, xx, yy, xy = _window_means(torch.stack([x, y, x * x, y * y, x * y]))
    squares, product = mean_x.square() + mean_y.square(), mean_x * mean_y
    luminance = (2 * product + _C1) / (squares + _C1)
    return (luminance * (2 * (xy - product) + _C2) / (xx + yy - squares + _C2)).mean()


def _window_means(images: Tensor) -> Tensor:
    """Means of images (..., H, W) under the Gaussian window: (..., H - 10, W - 10)."""
    for dim in (-2, -1):
        size = images.shape[dim] - SSIM_WINDOW + 1
        total = images.narrow(dim, 0, size) * 0
        for i, weight in enumerate(_GAUSSIAN):  # on a CPU a sixth of the time of a convolution of float64
            total.add_(images.narrow(dim, i, size), alpha=weight / sum(_GAUSSIAN))
        images = total
    return images


_OF = {"psnr": psnr, "ssim": ssim}


class MeanFidelity:
    """The mean over the images at positions below the metric's number, of which each rank sees some.

    Attributes:
        metric: The metric.
        about: What it depends on, for records.
    """

    def __init__(self, metric: Metric, lpips: Lpips | None) -> None:
        """Begin without images; ``lpips`` is that of the metric of this name."""
        self.metric, self.about = metric, lpips.about if lpips and metric.kind == "lpips" else {}
        self._value: Callable[[Tensor, Tensor], Tensor] = _OF.get(metric.kind) or lpips  # type: ignore[assignment]
        self._sums = torch.zeros(2, dtype=torch.float64)  # of the values, and the number of images

    def add(self, images: Tensor, targets: Tensor, positions: Tensor) -> None:
        """Count images and their targets, both uint8, of these positions (n,) in the set."""
        inside = positions < self.metric.num
        if inside.any():
            values = self._value(images[inside], targets[inside])
            self._sums += torch.tensor([float(values.sum()), len(values)], dtype=torch.float64)

    def values(self) -> dict[str, float]:
        """Return the mean by the metric's name. A collective."""
        total, num = comm.sum_over_ranks(self._sums.to(comm.device())).tolist()
        return {self.metric.name: total / num}
