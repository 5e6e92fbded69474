"""The Inception network of FID: torchvision's, with the pooling of the TensorFlow graph that the weights come from.

Shapes: n images (n, 3, H, W).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import inception as published

RESOLUTION = 299
NUM_CLASSES = 1008
DIGEST = "6726825d"
NAMES = [f"pt_inception-2015-12-05-{DIGEST}.pth", f"weights-inception-2015-12-05-{DIGEST}.pth"]
"""Names of the published weights' files in torch.hub's cache."""
URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{NAMES[0]}"


class Inception(published.Inception3):
    """Inception v3 as of 2015-12-05: 2048 features, and logits of 1008 classes without the last layer's bias.

    Szegedy et al. 2016 (arXiv 1512.00567). The inception score is published without that bias.
    """

    def __init__(self) -> None:
        blocks = [
            published.BasicConv2d, _BlockA, published.InceptionB, _BlockC, published.InceptionD, _BlockE,
            published.InceptionAux,
        ]  # fmt: skip
        super().__init__(NUM_CLASSES, aux_logits=False, inception_blocks=blocks, init_weights=False)
        self.Mixed_7c = _LastBlockE(2048)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 2048) and logits (n, 1008) of images (n, 3, 299, 299), 0 to 255."""
        features: list[Tensor] = []
        with self.fc.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0])):
            super().forward((images - 128) / 128)
        return features[0], F.linear(features[0], self.fc.weight)


def resized(images: Tensor, resizer: str) -> Tensor:
    """Bring images, 0 to 255, to 299 pixels a side: float32 (n, C, 299, 299).

    Args:
        images: float32 (n, C, H, W).
        resizer: ``tensorflow`` interpolates between the two nearest pixels, by their upper left corners, whatever the
            reduction; ``antialiased`` is bicubic, widens with the reduction, as in Pillow, and clamps to 0 to 255, as
            in clean-fid (Parmar et al. 2022, arXiv 2104.11222).
    """
    if resizer == "antialiased":
        size = RESOLUTION, RESOLUTION
        return F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 255)
    return _sampled(_sampled(images, 2), 3)


def _sampled(images: Tensor, dim: int) -> Tensor:
    size = images.shape[dim]
    positions = torch.arange(RESOLUTION, device=images.device, dtype=torch.float32) * (size / RESOLUTION)
    lower = positions.long().clamp(max=size - 1)
    upper = (lower + 1).clamp(max=size - 1)
    share = (positions - lower).view([-1 if axis == dim else 1 for axis in range(images.dim())])
    return torch.lerp(images.index_select(dim, lower), images.index_select(dim, upper), share)


def _mean_inside(x: Tensor) -> Tensor:
    """3x3 mean without the padding."""
    return F.avg_pool2d(x, kernel_size=3, stride=1, padding=1, count_include_pad=False)


class _BlockA(published.InceptionA):
    def _forward(self, x: Tensor) -> list[Tensor]:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return [self.branch1x1(x), five, three, self.branch_pool(_mean_inside(x))]


class _BlockC(published.InceptionC):
    def _forward(self, x: Tensor) -> list[Tensor]:
        once = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = x
        for i in range(1, 6):
            twice = getattr(self, f"branch7x7dbl_{i}")(twice)
        return [self.branch1x1(x), once, twice, self.branch_pool(_mean_inside(x))]


class _BlockE(published.InceptionE):
    def _forward(self, x: Tensor) -> list[Tensor]:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        return [
            self.branch1x1(x),
            torch.cat([self.branch3x3_2a(single), self.branch3x3_2b(single)], 1),
            torch.cat([self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double)], 1),
            self.branch_pool(self._pooled(x)),
        ]

    def _pooled(self, x: Tensor) -> Tensor:
        return _mean_inside(x)


class _LastBlockE(_BlockE):
    def _pooled(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, kernel_size=3, stride=1, padding=1)
