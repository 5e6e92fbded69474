"""Tiny programs for perceptual distances, and VGG-16 of random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, export, save


class Detached(nn.Module):
    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [images.detach()]


class TinyFeatures(nn.Module):
    """Two maps, of ``width`` and 6 channels and a half and a quarter of the side; or the first of them."""

    def __init__(self, width: int = 4, num_maps: int = 2) -> None:
        super().__init__()
        self.num_maps = num_maps
        drawn = torch.Generator().manual_seed(7)
        self.first, self.second = nn.Conv2d(3, width, 4, 2, 1), nn.Conv2d(width, 6, 4, 2, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=drawn)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(n, 3, R, R) -> (n, width, R / 2, R / 2), (n, 6, R / 4, R / 4)."""
        first = torch.tanh(self.first(images))
        return (first, torch.tanh(self.second(first)))[: self.num_maps]


def write_program(path: Path, side: int = 16, width: int = 4, num_maps: int = 2) -> Path:
    """Write ``TinyFeatures`` to a .pt or .pt2 file."""
    program = TinyFeatures(width, num_maps).eval()
    if path.suffix == ".pt2":
        save(export(program, (torch.zeros(3, 3, side, side),), dynamic_shapes=({0: Dim("n")},)), path)
    else:
        torch.jit.save(torch.jit.trace(program, torch.zeros(2, 3, side, side)), str(path))
    return path


CONVOLUTIONS = {1: [(0, 3, 64), (2, 64, 64)], 2: [(5, 64, 128), (7, 128, 128)]}
CONVOLUTIONS |= {3: [(10, 128, 256), (12, 256, 256), (14, 256, 256)]}
CONVOLUTIONS |= {4: [(17, 256, 512), (19, 512, 512), (21, 512, 512)], 5: [(i, 512, 512) for i in (24, 26, 28)]}
"""Of each part of VGG-16: numbers in torchvision's ``features``, and channels before and after."""


def random_vgg() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of LPIPS' VGG-16 without its heads, and the heads, by LPIPS' names."""
    drawn, vgg, heads = torch.Generator().manual_seed(3), {}, {}
    for part, convolutions in CONVOLUTIONS.items():
        for number, before, after in convolutions:
            scale = (2 / (9 * before)) ** 0.5
            weight = torch.randn(after, before, 3, 3, generator=drawn) * scale
            vgg[f"net.slice{part}.{number}.weight"] = weight
            vgg[f"net.slice{part}.{number}.bias"] = 0.1 * torch.randn(after, generator=drawn)
        heads[f"lin{part - 1}.model.1.weight"] = torch.rand(1, after, 1, 1, generator=drawn)
    return vgg, heads


def as_torchvision(vgg: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by torchvision's names, beside a classifier."""
    found = {f"features.{name.split('.', 2)[2]}": value for name, value in vgg.items()}
    return {**found, "classifier.0.weight": torch.zeros(2, 2)}
