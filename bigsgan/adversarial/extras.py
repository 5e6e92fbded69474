"""Optional parts of training with state: augmentation, regularization, a teacher, stale images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.adversarial.augmentation import AdaptiveProbability
from bigsgan.adversarial.losses import AdversarialLoss
from bigsgan.adversarial.path_length import PathLengthPenalty
from bigsgan.adversarial.stale_images import StaleImages
from bigsgan.adversarial.teacher import Teacher, build_teacher
from bigsgan.adversarial.terms import Term, adversarial_loss, build_terms
from bigsgan.adversarial.watchers import LogitAnchors, LogitWatcher, Sum
from bigsgan.config import Recipe
from bigsgan.models.augment import AdaptiveAugment
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics


class Extras(NamedTuple):
    """Parts of the step that a recipe may ask for."""

    augmented: bool = False  # whether D augments its images
    seeded: bool = False  # whether D reads seeds, for augmentation or noise of its own
    images_per_sample: int = 1  # number of images of a sample that G makes and D judges
    augmentation: Tensor | None = None  # probability of D's augmentations, (1,), if this rank holds it
    adaptive: AdaptiveProbability | None = None  # steers that probability by D's logits
    anchors: LogitAnchors | None = None  # moving averages of D's logits, for LeCam's regularization of D
    path_length: PathLengthPenalty | None = None  # path length regularization of G
    teacher: Teacher | None = None  # computes features of real images, if this rank has D's last layer
    stale_images: StaleImages | None = None  # images for D's next update, where updates overlap
    loss: AdversarialLoss | None = None  # the loss on logits, if it comes from outside
    terms: tuple[Term, ...] = ()  # further parts of both losses

    @property
    def watchers(self) -> list[LogitWatcher]:
        """The objects that observe D's logits."""
        return [watcher for watcher in (self.adaptive, self.anchors) if watcher is not None]

    def entries(self) -> dict[str, AdaptiveProbability | LogitAnchors | PathLengthPenalty | StaleImages]:
        """Return the parts that belong to a run's state, by name."""
        named = {
            "augmentation": self.adaptive, "anchors": self.anchors, "path_length": self.path_length,
            "kept_images": self.stale_images,  # the name that checkpoints have
        }  # fmt: skip
        return {name: entry for name, entry in named.items() if entry is not None}


def build_extras(
    recipe: Recipe,
    discriminator: LayerStack,
    statistics: Statistics,
    device: torch.device,
    sum_over_ranks: Sum,
    of_generator: Sum | None = None,
    stale_images: StaleImages | None = None,
) -> Extras:
    """Build the parts that the recipe asks for.

    Args:
        recipe: The run's recipe.
        discriminator: This rank's layers of D.
        statistics: Collects penalties.
        device: This rank's device.
        sum_over_ranks: Sums a vector on the device elementwise over the ranks; the identity on one rank.
        of_generator: The same over the ranks that hold G; defaults to all ranks.
        stale_images: The buffer of G's images, where updates overlap.

    Raises:
        UserError: The teacher, or a loss or term from outside, cannot be read or does not fit.
    """
    section, objective = recipe.augmentation, recipe.objective
    p = next((layer.p for layer in discriminator.modules() if isinstance(layer, AdaptiveAugment)), None)
    adaptive = anchors = path_length = None
    if section and section.target is not None:
        adaptive = AdaptiveProbability(section, recipe.batch, device, p, sum_over_ranks)
    if objective.lecam:
        anchors = LogitAnchors(objective.lecam, device, sum_over_ranks)
    if objective.path_length:
        path_length = PathLengthPenalty(objective.path_length, statistics, device, sum_over_ranks, of_generator)
    seeded, num = recipe.discriminator_reads_seeds, recipe.generator.images_per_sample
    teacher = build_teacher(recipe, device) if discriminator.predicts else None
    loss, terms = adversarial_loss(recipe, device), build_terms(recipe, device)
    return Extras(
        section is not None, seeded, num, p, adaptive, anchors, path_length, teacher, stale_images, loss, terms
    )
