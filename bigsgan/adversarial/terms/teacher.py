"""A teacher: a frozen network whose features of real images D learns to predict from its own tokens.

The teacher is a program with DINOv2's interface. No engine contains it; a checkpoint only has its digest. GAT (arXiv
2509.24935) uses one, and so does unofficial code of CAT. Its images are moved in the same way as D's.

Shapes: n images of a micro-batch, C channels of R pixels a side, R' pixels a side for the teacher, Z features,
P = H * H patches of the teacher, T patches of D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.adversarial.terms.term import Term
from bigsgan.config import Recipe
from bigsgan.config import objective as sections
from bigsgan.data import LabelledImages, ShownImages
from bigsgan.data.autoencoders import naming_program
from bigsgan.data.frozen import load_frozen, refuse_moving
from bigsgan.errors import UserError
from bigsgan.models.diff_augment import moved_as
from bigsgan.models.precision import full
from bigsgan.monitor import Statistics

PATH = "objective.teacher.path"
PREDICTED = ("predicted", "class_tokens", "patch_tokens")
"""What the term reads: D's predictions, and the features that they are of."""
_NAMES = ("x_norm_clstoken", "x_norm_patchtokens")
"""Names of DINOv2's features: class token and patch tokens."""
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colours, in [0, 1]."""
_TRIED = (2, 3)
"""Numbers of images with which a program is tried: it must accept any number."""
_REMEDY = "give a program that makes (n, width) class tokens and (n, P, width) patch tokens of images (n, 3, R, R)"


class Teacher:
    """Callable that returns features of real images.

    Attributes:
        device: The program's device.
        tensors: The program's parameters and buffers.
    """

    def __init__(
        self, program: nn.Module, section: sections.Teacher, device: torch.device, policy: list[str], side: int
    ) -> None:
        """Take a frozen program.

        Args:
            program: Turns images (n, 3, R', R') into class tokens (n, Z) and patch tokens (n, P, Z).
            section: The recipe's section about the teacher.
            device: The program's device.
            policy: The policy of D's DiffAugment; only operations that move images apply.
            side: Pixels a side of an image as D sees it; DiffAugment counts in these pixels.
        """
        self.device = device
        self._program, self._section, self._policy, self._side = program, section, policy, side
        self.tensors = [*program.parameters(), *program.buffers()]
        self._dtype = next((t.dtype for t in self.tensors if t.is_floating_point()), torch.float32)
        self._mean, self._std = (torch.tensor(numbers, device=device).view(1, 3, 1, 1) for numbers in (_MEAN, _STD))

    @torch.no_grad()
    def __call__(self, batch: LabelledImages, *seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return class tokens (n, Z) and patch tokens (n, P, Z), float32, of real images, moved by D's seeds (n,)."""
        assert isinstance(batch, ShownImages), "data for a teacher has pixels"
        return self.features(self.prepared(batch.pixels, *seeds))

    def prepared(self, images: Tensor, *seeds: Tensor) -> Tensor:
        """Normalize images (n, C, R, R) in [-1, 1], and move them as D's are: (n, 3, R', R') for the program."""
        images = ((images.expand(-1, 3, -1, -1) + 1) / 2 - self._mean) / self._std
        size = (self._section.resolution, self._section.resolution)
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bicubic", align_corners=False)
        for seed in seeds:
            images = moved_as(images, seed, self._policy, self._side)
        return images.to(self._dtype)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Run the program on prepared images.

        Raises:
            UserError: The program fails, or makes tokens of other shapes.
        """
        section, shown = self._section, f"images {tuple(images.shape)}"
        # The profiling executor would change the arithmetic from one call to the next.
        with naming_program(section.path, PATH, shown, _REMEDY), torch.jit.optimized_execution(False):
            found: Any = self._program(images)
        tokens = tuple(found.get(name) for name in _NAMES) if isinstance(found, dict) else found
        if not (isinstance(tokens, list | tuple) and len(tokens) == 2 and all(isinstance(t, Tensor) for t in tokens)):
            problem = f"must make two tensors, in a tuple or named {' and '.join(_NAMES)}"
            raise UserError(PATH, section.path, problem, _REMEDY)
        whole, patches = tokens
        n, num = len(images), patches.shape[1] if patches.dim() == 3 else 0
        if (
            whole.shape != (n, section.width)
            or patches.shape != (n, num, section.width)
            or not num
            or math.isqrt(num) ** 2 != num
        ):
            problem = f"must make tokens ({n}, {section.width}) and ({n}, P, {section.width}) with P a square"
            detail = f"it makes {tuple(whole.shape)} and {tuple(patches.shape)}; objective.teacher.width is their width"
            raise UserError(PATH, section.path, problem, _REMEDY, detail)
        return full(whole), full(patches)


class TeacherDistance(Term):
    """weight * (1 - cosine at the class token + the mean of 1 - cosine at patches), on real images only."""

    def __init__(self, section: sections.Teacher, teacher: Teacher | None) -> None:
        """Take the teacher, which only a rank with D's last layer needs."""
        super().__init__("teacher", "discriminator", PREDICTED, factor=section.weight)
        self.targets, self.statistics = teacher, ("teacher/class", "teacher/patch")

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Return the distance of what D predicts of the features to the teacher's."""
        found = distances(*(read[name] for name in PREDICTED))
        for name, value in zip(self.statistics, found, strict=True):
            statistics.add(name, value, len(read[PREDICTED[0]]))
        return self.factor * (found[0] + found[1])


def distances(predicted: Tensor, whole: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - cosine at class tokens and at patch tokens, means over samples and patches.

    Args:
        predicted: D's predictions (n, 1 + T, Z), the class token first.
        whole: The teacher's class tokens (n, Z).
        patches: The teacher's patch tokens (n, P, Z), resized (bicubic) unless P is T.
    """
    num = predicted.shape[1] - 1
    if patches.shape[1] != num:
        grid = patches.mT.unflatten(2, (math.isqrt(patches.shape[1]), -1))  # (n, Z, H, H)
        size = (math.isqrt(num), math.isqrt(num))
        patches = F.interpolate(grid, size, mode="bicubic", align_corners=False).flatten(2).mT
    of_class = 1 - F.cosine_similarity(predicted[:, 0], whole, dim=-1)
    return of_class.mean(), (1 - F.cosine_similarity(predicted[:, 1:], patches, dim=-1)).mean()


def build_teacher(recipe: Recipe, device: torch.device) -> Teacher | None:
    """Load the recipe's teacher, if there is one, and try it with a few images.

    Raises:
        UserError: The program cannot be read, fails, or makes tokens of other shapes.
    """
    section = recipe.objective.teacher
    if section is None:
        return None
    program = load_frozen(Path(section.path), PATH, device)
    policy = recipe.augmentation.policy if recipe.augmentation and recipe.augmentation.kind == "diffaugment" else []
    teacher = Teacher(program, section, device, list(policy), recipe.data.network_size.height)
    with torch.no_grad():
        for num in _TRIED:
            grey = torch.zeros(num, 3, *recipe.data.resolution, device=device)
            teacher.features(teacher.prepared(grey))
    refuse_moving(teacher.tensors, lambda: teacher.features(teacher.prepared(grey + 0.5)), PATH, section.path)
    return teacher
