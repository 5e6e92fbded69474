"""Tiny teachers with DINOv2's interface."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, export, save


class TinyTeacher(nn.Module):
    """Patches of 7 pixels through a linear map and tanh; the class token is a map of their mean."""

    def __init__(self, width: int = 6, patch: int = 7) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(5)
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.whole = nn.Linear(width, width)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=drawn)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(n, 3, R, R) -> (n, width), (n, P, width)."""
        tokens = torch.tanh(self.patches(images)).flatten(2).transpose(1, 2)
        return {"x_norm_clstoken": self.whole(tokens.mean(dim=1)), "x_norm_patchtokens": tokens}


class Unnamed(nn.Module):
    """The same in a tuple."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 3, R, R) -> (n, width), (n, P, width)."""
        found = self.teacher(images)
        return found["x_norm_clstoken"], found["x_norm_patchtokens"]


def write_teacher(path: Path, width: int = 6, resolution: int = 28) -> list[str]:
    """Write a teacher to a .pt or .pt2 file; return the override of a recipe that names it."""
    teacher = TinyTeacher(width).eval()
    if path.suffix == ".pt2":
        example = (torch.zeros(3, 3, resolution, resolution),)
        save(export(teacher, example, dynamic_shapes=({0: Dim("n")},)), path)
    else:
        torch.jit.save(torch.jit.trace(Unnamed(teacher), torch.zeros(2, 3, resolution, resolution)), str(path))
    return [f"objective.teacher={{path: {path}, resolution: {resolution}, width: {width}, hidden: 10}}"]
