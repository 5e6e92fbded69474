"""Schedules: pure functions of the number of images seen."""

from __future__ import annotations

import math

from bigsgan.adversarial import Scheduled
from bigsgan.config import Recipe
from bigsgan.config.augmentation import Augmentation
from bigsgan.config.objective import Penalty, Transport
from bigsgan.config.sections import EMA, Optimizer
from bigsgan.engines import Rates


def scheduled(recipe: Recipe, nimg: int) -> Scheduled:
    """Return the scheduled numbers of the update that begins at ``nimg`` images."""
    total_nimg, objective = recipe.total_nimg, recipe.objective
    weights = {
        name: penalty_weight(section, nimg, total_nimg)
        for name, section in objective.scheduled.items()
        if section.final_weight is not None
    }

    def rates(network: str) -> Rates:
        section = getattr(recipe.optimizer, network)
        lr = learning_rate(section, nimg, total_nimg)
        own_width = getattr(recipe, network).own_width
        if section.reference_width and own_width:
            lr *= section.reference_width / own_width
        factors = tuple(group.lr_multiplier * (not group.is_frozen(nimg)) for group in section.groups)
        return Rates(lr, beta2(section, nimg, total_nimg), factors)

    p = augmentation_probability(recipe.augmentation, nimg) if recipe.augmentation else None
    adversarial, learns = objective.adversarial.factor(nimg), nimg >= objective.discriminator_from_nimg
    return Scheduled(rates("generator"), rates("discriminator"), weights, adversarial, learns, p)


def learning_rate(section: Optimizer, nimg: int, total_nimg: int) -> float:
    """Return the learning rate of the update that begins at ``nimg`` images.

    Rises linearly to ``lr`` over ``warmup_nimg``, and follows ``decay`` from ``decay_from_nimg``, by default the end of
    the warm-up, down to ``final_lr`` at ``decay_nimg``.
    """
    if nimg < section.warmup_nimg:
        return section.lr * (nimg + 1) / section.warmup_nimg
    if section.decay == "constant":
        return section.lr
    return section.final_lr + (section.lr - section.final_lr) * _left(section, nimg, total_nimg)


def beta2(section: Optimizer, nimg: int, total_nimg: int) -> float | None:
    """Return Adam's second decay rate for the update that begins at ``nimg`` images; None if it never changes.

    Follows ``decay`` from ``betas[1]`` where the learning rate begins to fall to ``final_beta2`` at ``decay_nimg``.
    """
    if section.final_beta2 is None:
        return None
    return section.final_beta2 + (section.betas[1] - section.final_beta2) * _left(section, nimg, total_nimg)


def penalty_weight(section: Penalty | Transport, nimg: int, total_nimg: int) -> float:
    """Return a penalty's weight in the update that begins at ``nimg``: ``final_weight`` from ``decay_nimg`` on."""
    if section.final_weight is None:
        return section.weight
    return cosine(section.weight, section.final_weight, nimg, section.decay_nimg or total_nimg)


def augmentation_probability(section: Augmentation, nimg: int) -> float | None:
    """Return ADA's p in the update that begins at ``nimg``: ``final_p`` from ``ramp_nimg`` on; None if unscheduled."""
    return None if section.final_p is None else cosine(section.p, section.final_p, nimg, section.ramp_nimg)


def ema_decay(section: EMA, batch: int, nimg: int) -> float:
    """Return the share of the old EMA that an update to ``nimg`` images keeps: 0 makes a copy.

    0.5 ** (batch / half_life), with a half-life at most ``ramp * nimg`` (Karras et al. 2020, arXiv 2006.06676), which
    grows from 0 over ``warmup_nimg``, at the images seen before the update (Huang et al. 2024, arXiv 2501.05441).
    """
    if nimg <= section.start_nimg:
        return 0.0
    half_life = float(section.half_life_nimg)
    if section.warmup_nimg:
        half_life = cosine(0.0, half_life, nimg - batch, section.warmup_nimg)
    if section.ramp is not None:
        half_life = min(half_life, section.ramp * nimg)
    return 0.5 ** (batch / half_life) if half_life > 0 else 0.0


def cosine(start: float, end: float, nimg: int, over_nimg: int) -> float:
    """Return a number that goes from ``start`` to ``end`` over ``over_nimg`` images along a cosine, and stays there."""
    return end + (start - end) * _half_cosine(min(1.0, nimg / over_nimg))


def is_due(interval_nimg: int, nimg: int, batch: int) -> bool:
    """Return whether the update that ended at ``nimg`` images passed a multiple of the interval."""
    return nimg // interval_nimg > (nimg - batch) // interval_nimg


def _left(section: Optimizer, nimg: int, total_nimg: int) -> float:
    """Return the share of the schedule that is left: 1 until the decay begins, 0 at the end."""
    begin, end = section.decays_from, section.decay_nimg or total_nimg
    progress = min(1.0, max(0, nimg - begin) / (end - begin))
    return 1 - progress if section.decay == "linear" else _half_cosine(progress)


def _half_cosine(progress: float) -> float:
    """Return half a period of a cosine: 1 at progress 0, 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))
