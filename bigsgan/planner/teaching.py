"""What frozen networks cost: a teacher, with the heads of D that predict its features, and a perceptual distance.

Shapes: n samples of a segment, T patches of D, P of the teacher, Z features of its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bigsgan.adversarial.terms.perceptual import PerceptualDistance, build_features
from bigsgan.adversarial.terms.teacher import build_teacher, distances
from bigsgan.adversarial.terms.term import image_gradient
from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.families.features import FeaturesNetwork
from bigsgan.config.families.transformers import TransformerNetwork
from bigsgan.data import ShownImages
from bigsgan.errors import UserError
from bigsgan.models import dual
from bigsgan.models.build import network_on_meta
from bigsgan.models.network import frozen_programs
from bigsgan.monitor import Statistics
from bigsgan.planner.census import Census

_log = logging.getLogger(__name__)

_META = torch.device("meta")
PROGRAMS = ("teacher", "perceptual")
"""Sections of the recipe's objective with a frozen program."""
_SAMPLES = 2
"""Of the smaller of two traces."""


class Program(NamedTuple):
    """A frozen program, traced on the meta device."""

    held: int  # bytes of its parameters and buffers
    # operations for one image, a multiplication and an addition as two: of a teacher's forward pass, or of a distance
    # with its gradient
    flop: int
    # most bytes that it needs for ``_SAMPLES`` images and for twice as many, from their pixels to its tokens, or to the
    # gradient
    peaks: tuple[int, int]
    patches: int = 0  # that a teacher's tokens are of

    def peak(self, num_samples: int) -> int:
        """The same for so many images."""
        first, second = self.peaks
        return first + (second - first) * (num_samples - _SAMPLES) // _SAMPLES


def trace_program(recipe: Recipe, name: str) -> Program | None:
    """Trace the recipe's teacher, or the network of its ``perceptual`` distance, on the meta device.

    Returns:
        None where there is none, one of its files is not there, or a program needs a real device: see ``left_out``.

    Raises:
        UserError: A file is of another kind, or a program makes something else.
    """
    section = getattr(recipe.objective, name)
    if section is None or _absent(section):
        return None
    try:
        return {"teacher": _traced, "perceptual": _traced_distance}[name](recipe)
    except UserError as error:
        if not error.problem.startswith("fails at"):  # ``naming_program``; training refuses the others too
            raise
        _log.info("the program of objective.%s is not counted: %s", name, error)
        return None


def _traced(recipe: Recipe) -> Program:
    teacher = build_teacher(recipe, _META)
    assert teacher is not None, "the recipe has one"
    patches = 0

    def compute(images: Tensor, seeds: Tensor) -> None:
        nonlocal patches
        batch = ShownImages(seeds, seeds)  # of which the pixels alone are read
        batch.pixels = images
        patches = teacher(batch, seeds)[1].shape[1]

    found = _at_two_sizes(recipe, recipe.data.image_channels, teacher.tensors, compute)
    return found._replace(patches=patches)


def _traced_distance(recipe: Recipe) -> Program:
    features, section = build_features(recipe, _META), recipe.objective.perceptual
    assert section is not None, "the recipe has one"
    term, statistics = PerceptualDistance(section, features), Statistics(_META)
    statistics.declare(*term.statistics)

    def compute(images: Tensor, seeds: Tensor) -> None:
        image_gradient([term], {"images": images, "real_images": images}, statistics)

    return _at_two_sizes(recipe, recipe.data.channels, features.tensors if features else (), compute)


def _at_two_sizes(
    recipe: Recipe, channels: int, tensors: Sequence[Tensor], compute: Callable[[Tensor, Tensor], None]
) -> Program:
    """Count what is computed of images (n, C, H, W) and seeds (n,); ``tensors`` are there before."""
    flop, peaks = 0, []
    for num in (_SAMPLES, 2 * _SAMPLES):
        images = torch.empty(num, channels, *recipe.data.resolution, device=_META)
        seeds, census = torch.empty(num, dtype=torch.int64, device=_META), Census()
        census.ignore([images, seeds, *tensors])
        with FlopCounterMode(display=False) as counter, census:
            compute(images, seeds)
        flop = counter.get_total_flops() // num
        peaks.append(census.take().peak)
    return Program(sum(tensor.nbytes for tensor in tensors), flop, (peaks[0], peaks[1]))


def _absent(section: Any) -> str:
    """Return the first file of a section that does not exist; empty if all do."""
    files = [section.path, getattr(section, "heads", None)]
    return next((file for file in files if file and not Path(file).exists()), "")


def left_out(recipe: Recipe, is_counted: bool, name: str) -> str:
    """Return a line that says why a program is not counted; empty if it is, or if there is none."""
    section = getattr(recipe.objective, name)
    if section is None or is_counted:
        return ""
    return _not_counted(name, _absent(section))


def programs_left_out(recipe: Recipe) -> list[str]:
    """Return a line for each network that begins with a frozen program which is not counted."""
    found = []
    for network in NETWORKS:
        section = getattr(recipe, network)
        if isinstance(section, FeaturesNetwork) and None in frozen_programs(network_on_meta(recipe, network)):
            found.append(_not_counted(network, _absent(section)))
    return found


def _not_counted(name: str, absent: str) -> str:
    reason = f"there is no {absent!r}" if absent else "it does not run on torch's meta device"
    return f"{name}: neither operations nor memory of its program are counted, as {reason}"


def empty_targets(recipe: Recipe, program: Program | None, num_samples: int) -> tuple[Tensor, Tensor]:
    """Class tokens (n, Z) and patch tokens (n, P, Z) of a recipe's teacher; without its program, P is taken for T."""
    section, network = recipe.objective.teacher, recipe.discriminator
    assert section is not None, "D predicts a teacher's features"
    assert isinstance(network, TransformerNetwork), "it predicts from tokens"
    patches = program.patches if program else recipe.data.network_size.over(network.patch).num_pixels
    whole, parts = (num_samples, section.width), (num_samples, patches, section.width)
    return torch.empty(whole, device=_META), torch.empty(parts, device=_META)


class Predicting(nn.Module):
    """D's last layer in training, with the distance of what it predicts to a teacher's features."""

    def __init__(self, layer: nn.Module, num: int, empty_targets: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Wrap a layer, as it is or in a ``DualLayer``. It predicts of the first ``num`` samples."""
        super().__init__()
        self.layer, self.num, self.empty_targets = layer, num, empty_targets

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        """What the layer returns, and the distance ()."""
        head: Any = self.layer
        plain = carry
        if isinstance(head, dual.DualLayer):
            head, plain = head.layer, dual.from_flat(carry).carry
        predicted = head.predict(*(entry[: self.num] for entry in plain))
        outputs = self.layer(*carry)
        of_class, of_patches = distances(predicted, *self.empty_targets(len(predicted)))
        return *outputs, of_class + of_patches
