"""The terms of a game's losses, one file each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.adversarial.terms.adaptive_augmentation import AdaptiveProbability
from bigsgan.adversarial.terms.adversarial import OfDiscriminator, OfGenerator
from bigsgan.adversarial.terms.centering import centering
from bigsgan.adversarial.terms.codebook_averages import AveragedCodebook
from bigsgan.adversarial.terms.consistency import consistency
from bigsgan.adversarial.terms.cycle import cycle_terms
from bigsgan.adversarial.terms.feature_matching import FeatureMatching
from bigsgan.adversarial.terms.flow import velocity_error
from bigsgan.adversarial.terms.gradient_norm import FiniteDifference, GradientNorm
from bigsgan.adversarial.terms.gradient_normalization import GradientNormalization
from bigsgan.adversarial.terms.gradient_penalty import GradientPenalty
from bigsgan.adversarial.terms.judged import LOGITS_ALONE, JudgedOutputs, mean_of
from bigsgan.adversarial.terms.kmeans import Begin, KMeansStart, codes_of, set_codes, set_learned_codes
from bigsgan.adversarial.terms.latents import CodebookTerm, CodeEntropy, divergence
from bigsgan.adversarial.terms.lecam import LeCam
from bigsgan.adversarial.terms.losses import LOSSES, over_maps
from bigsgan.adversarial.terms.outputs import OutputLoss, OutputTerm, output_loss
from bigsgan.adversarial.terms.own import OfMeans, Own
from bigsgan.adversarial.terms.path_length import PathLengthPenalty
from bigsgan.adversarial.terms.perceptual import PerceptualDistance, build_features
from bigsgan.adversarial.terms.reconstruction import reconstruction_terms
from bigsgan.adversarial.terms.teacher import PREDICTED, TeacherDistance, build_teacher
from bigsgan.adversarial.terms.term import (
    FEATURES,
    GRADIENTS,
    IMAGES,
    LOGITS,
    FunctionTerm,
    InnerTerm,
    Sum,
    Term,
    due,
    image_gradient,
    images_read,
    inner_term,
    judged_of,
    targets_of,
)
from bigsgan.adversarial.terms.transport import TransportCost
from bigsgan.checkpoint import SharedState
from bigsgan.config import Recipe
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.families.base import judged_outputs
from bigsgan.config.objective import Objective, OwnLoss
from bigsgan.config.reconstruction import Codebook
from bigsgan.models.augment import AdaptiveAugment
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics

__all__ = [
    "FEATURES",
    "GRADIENTS",
    "IMAGES",
    "LOGITS",
    "LOGITS_ALONE",
    "PREDICTED",
    "FiniteDifference",
    "FunctionTerm",
    "GradientNorm",
    "GradientNormalization",
    "InnerTerm",
    "JudgedOutputs",
    "KMeansStart",
    "OutputLoss",
    "Own",
    "Sum",
    "Term",
    "Termed",
    "build_terms",
    "codebook_terms",
    "codes_of",
    "due",
    "gradient_terms",
    "image_gradient",
    "images_read",
    "inner_term",
    "judged_of",
    "output_loss",
    "set_codes",
    "set_learned_codes",
    "stateless_terms",
    "states",
    "targets_of",
]


class Termed(NamedTuple):
    """What terms with state or a program need of a rank."""

    statistics: Statistics
    device: torch.device
    sum_over_ranks: Sum
    # The same over the ranks that hold the same layers of G, and of D; by default all ranks.
    sum_over_generator: Sum | None = None
    sum_over_discriminator: Sum | None = None
    augmentation: Tensor | None = None  # probability of D's augmentations, (1,), if this rank holds it
    predicts: bool = False  # whether this rank's layers of D predict a teacher's features
    map_sizes: Callable[[], Sequence[int]] = tuple  # see ``over_maps``
    output_sizes: Callable[[], Sequence[int]] = tuple  # see ``JudgedOutputs``
    sees_images: bool = False  # whether this rank has D's first layers, where G's images arrive
    codebook: Tensor | None = None  # codes (K, Z), if this rank holds them; of use where they follow averages
    begin_codes: Begin = lambda uses, codes, taken: None  # sets codes that learn by their gradients
    place: tuple[int, int] = (0, 1)  # this rank's number, and the number of all ranks

    @classmethod
    def of(cls, discriminator: LayerStack, statistics: Statistics, total: Sum, *of_networks: Sum) -> Termed:
        """Return what a rank with these layers of D has; ``of_networks`` sum over G's and D's ranks, if given."""
        p = next((layer.p for layer in discriminator.modules() if isinstance(layer, AdaptiveAugment)), None)
        last = next(reversed([*discriminator.layers.values()]), None)
        of_g, of_d = of_networks or (None, None)
        return cls(
            statistics,
            statistics.device,
            total,
            of_g,
            of_d,
            augmentation=p,
            predicts=discriminator.predicts,
            map_sizes=lambda: getattr(last, "map_sizes", ()),
            output_sizes=lambda: getattr(last, "output_sizes", ()),
            sees_images=int(next(iter(discriminator.layers), 1)) <= 0,  # a rank without layers of D has none
        )


def build_terms(recipe: Recipe, objective: Objective, rank: Termed, own: Own) -> list[Term]:
    """Return the terms of a game, in the order in which they are added up: the same on all ranks.

    Args:
        recipe: The run's recipe.
        objective: The recipe's, in which each finite difference has a step.
        rank: What this rank has.
        own: The loss and the terms that the recipe names.

    Raises:
        UserError: The teacher, or the network of a perceptual distance, cannot be read or does not fit.
    """
    device, section, found = rank.device, recipe.augmentation, list[Term]()
    loss = over_maps(own.loss, rank.map_sizes)
    for term in own.terms:
        if isinstance(term.value, OfMeans):
            own_sum = rank.sum_over_generator if term.of_outputs else rank.sum_over_discriminator
            term.value.sum_over_replicas = own_sum or rank.sum_over_ranks
    if section and section.target is not None:
        found.append(AdaptiveProbability(section, recipe.batch, device, rank.augmentation, rank.sum_over_ranks))
    judged = JudgedOutputs(judged_outputs(recipe.discriminator), rank.output_sizes)
    if recipe.has_discriminator:
        found += [OfDiscriminator(loss, judged), OfGenerator(loss, judged)]
    if objective.consistency:
        value = partial(consistency, recipe.generator.images_per_sample)
        found.append(FunctionTerm("consistency", "generator", objective.consistency.weight, ("images",), value))
    found += reconstruction_terms(objective)
    if objective.transport:
        found.append(TransportCost(objective.transport))
    if objective.flow:
        reads = ("images", "real_images", "times")
        found.append(OutputTerm("flow", "generator", objective.flow.weight, reads, velocity_error))
    if objective.perceptual:
        features = build_features(recipe, device) if rank.sees_images else None
        found.append(PerceptualDistance(objective.perceptual, features))
    if objective.kl:
        found.append(OutputTerm("kl", "generator", objective.kl, ("moments",), divergence))
    if objective.codebook:
        found += codebook_terms(recipe, objective.codebook, rank)
    found += cycle_terms(objective, [recipe.data.input_channels, recipe.data.image_channels])
    found += own.terms
    if objective.feature_matching:
        found.append(FeatureMatching(objective.feature_matching))
    if objective.lecam:
        found.append(LeCam(objective.lecam, device, rank.sum_over_ranks))
    if objective.centering:
        found.append(FunctionTerm("centering", "discriminator", objective.centering, LOGITS, centering))
    if matching := objective.distribution_matching:
        found.append(FunctionTerm("denoising", "discriminator", matching.denoising, ("fake_denoising",), mean_of))
        found.append(FunctionTerm("matching", "generator", matching.weight, ("fake_matching",), mean_of))
    if objective.teacher:
        found.append(TeacherDistance(objective.teacher, build_teacher(recipe, device) if rank.predicts else None))
    found += gradient_terms(objective)
    if normalize := objective.adversarial.normalize:
        total = rank.sum_over_generator or rank.sum_over_ranks
        found.append(GradientNormalization(normalize, rank.statistics, device, rank.sum_over_ranks, total))
    if objective.path_length:
        sums = rank.sum_over_ranks, rank.sum_over_generator
        found.append(PathLengthPenalty(objective.path_length, rank.statistics, device, *sums))
    return found


def codebook_terms(recipe: Recipe, section: Codebook, rank: Termed) -> list[Term]:
    """Return the terms of a codebook."""
    total, generator = rank.sum_over_generator or rank.sum_over_ranks, recipe.generator
    found: list[Term] = [CodebookTerm(section, generator, total)]
    begin = rank.begin_codes
    if isinstance(generator, AutoencoderGenerator):
        if generator.bottleneck.ema:
            sums = total, rank.sum_over_ranks
            averaged = AveragedCodebook(section, generator, rank.codebook, sums, rank.place, rank.device)
            found, begin = [averaged], averaged.begin_anew
        if generator.bottleneck.kmeans_steps:
            found.append(KMeansStart(generator, begin, rank.sum_over_ranks, rank.place, rank.device))
    if section.entropy:
        value = OfMeans(CodeEntropy(section.entropy.diversity))
        value.sum_over_replicas = total
        weight = section.weight * section.entropy.weight
        found.append(OutputTerm("entropy", "generator", weight, ("entropies", "shares"), value))
    return found


def states(terms: Iterable[Term]) -> dict[str, SharedState]:
    """Return the terms that belong to a run's state, by the names of their entries."""
    return {term.entry: term for term in terms if isinstance(term, SharedState)}


def gradient_terms(objective: Objective) -> list[Term]:
    """Return R1, R2 and the gradient penalty, those that are given."""
    kinds = {"exact": GradientNorm, "finite_difference": FiniteDifference}
    found: list[Term] = [kinds[section.form](name, section) for name, section in objective.gradient_norms.items()]
    return [*found, GradientPenalty(objective.gradient_penalty)] if objective.gradient_penalty else found


def stateless_terms(objective: Objective, judged: JudgedOutputs = LOGITS_ALONE) -> list[Term]:
    """Return the terms that read what D computes, without those with state or from outside, as a trace needs them."""
    loss = LOSSES["hinge" if isinstance(objective.loss, OwnLoss) else objective.loss]
    found: list[Term] = [OfDiscriminator(loss, judged), OfGenerator(loss, judged)]
    for name in judged.names:  # any function of it takes the same passes
        found.append(FunctionTerm(name, "discriminator", 1.0, (f"fake_{name}",), _mean_of_squares))
    found += [FeatureMatching(objective.feature_matching)] if objective.feature_matching else []
    found += [TeacherDistance(objective.teacher, None)] if objective.teacher else []
    for section in objective.terms:  # any function of the same gradients takes the same passes
        reads = tuple(f"{name}_gradients" for name in section.differentiates)
        if reads:
            found.append(FunctionTerm(section.label, "discriminator", 1.0, reads, _mean_of_squares, section.every))
    return found + gradient_terms(objective)


def _mean_of_squares(**read: Tensor) -> Tensor:
    return torch.stack([each.square().mean() for each in read.values()]).sum()
