"""Schedules: pure functions of the number of images seen."""

from __future__ import annotations

import math

from bigsgan.config.sections import Average, Optimizer


def learning_rate(section: Optimizer, nimg: int, total_nimg: int) -> float:
    """Learning rate of the update that begins at ``nimg`` images.

    Rises linearly to ``lr`` over ``warmup_nimg``, then follows ``decay`` down to ``final_lr`` at ``total_nimg``.
    """
    if nimg < section.warmup_nimg:
        return section.lr * (nimg + 1) / section.warmup_nimg
    if section.decay == "constant":
        return section.lr
    progress = min(1.0, (nimg - section.warmup_nimg) / (total_nimg - section.warmup_nimg))
    left = 1 - progress if section.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return section.final_lr + (section.lr - section.final_lr) * left


def average_decay(section: Average, batch: int, nimg: int) -> float:
    """Share of the old average that an update to ``nimg`` images keeps: 0 makes a copy.

    0.5 ** (batch / half_life), the half-life shortened to ``ramp * nimg`` (Karras et al. 2020, arXiv 2006.06676).
    """
    if nimg <= section.start_nimg:
        return 0.0
    half_life = float(section.half_life_nimg)
    if section.ramp is not None:
        half_life = min(half_life, section.ramp * nimg)
    return 0.5 ** (batch / half_life)


def is_due(interval_nimg: int, nimg: int, batch: int) -> bool:
    """Whether the update that ended at ``nimg`` images passed a multiple of the interval."""
    return nimg // interval_nimg > (nimg - batch) // interval_nimg
