"""Post-hoc EMA: averages a generator's weights with any width, from the snapshots of a run.

Karras et al. 2024, arXiv 2312.02696, section 3.2 and appendix C: a sum of the saved averages' profiles approximates
the wanted average's profile, in the least squares sense; the weights are combined with the same coefficients. A
profile is (gamma + 1) / t * (tau / t)^gamma on [0, t].
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint.tags import complete
from bigsgan.config import Recipe
from bigsgan.config.sections import LARGEST_WIDTH, SMALLEST_WIDTH
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack
from bigsgan.runtime.collective_errors import by_rank_zero
from bigsgan.training.power import AVERAGE, BEGUN, SNAPSHOTS, power_exponent, power_kind, saved_widths

_NOTED_ERROR = 0.02
"""Error of a profile, relative to its norm, above which a warning says that it is approximated badly."""

_log = logging.getLogger(__name__)


class Profile(NamedTuple):
    """Profile of an average over ``nimg`` images, with the standard deviation ``width * nimg``."""

    nimg: float
    width: float


def check_width(width: float) -> None:
    """Refuse a width that no average has.

    Raises:
        UserError: The width is out of range.
    """
    if not SMALLEST_WIDTH <= width <= LARGEST_WIDTH:
        problem = f"must be {SMALLEST_WIDTH} to {LARGEST_WIDTH}"
        raise UserError("--ema-width", width, problem, "give a relative width (sigma_rel) such as 0.07")


def combine(kept: Sequence[Profile], wanted: Profile) -> tuple[np.ndarray, float]:
    """Approximate the wanted profile by a sum of the saved ones, in the least squares sense.

    Return the sum's coefficients, float64, and the norm of the difference, divided by the norm of the wanted profile.
    """
    profiles = [*kept, wanted]
    nimg = np.array([profile.nimg for profile in profiles], dtype=np.float64)
    gammas = np.array([power_exponent(profile.width) for profile in profiles])
    products = _products(nimg, gammas)
    norms = np.sqrt(np.diag(products))
    cosines = products / np.outer(norms, norms)  # scaled alike, as early profiles are high and narrow
    gram, target = cosines[:-1, :-1], cosines[:-1, -1]
    solution = np.linalg.lstsq(gram, target, rcond=None)[0]
    error = 1 - 2 * solution @ target + solution @ gram @ solution
    return solution * norms[-1] / norms[:-1], math.sqrt(max(error, 0.0))


def _products(nimg: np.ndarray, gammas: np.ndarray) -> np.ndarray:
    """Integrals of products of profiles: (gamma_a + 1) (gamma_b + 1) / (gamma_a + gamma_b + 1) * s^gamma / t.

    t is the longer length, s the shorter one divided by t, and gamma the exponent of the longer profile.
    """
    later = nimg[:, None] >= nimg[None]
    longest, shortest = np.maximum.outer(nimg, nimg), np.minimum.outer(nimg, nimg)
    gamma = np.where(later, gammas[:, None], gammas[None])
    total = np.add.outer(gammas, gammas) + 1
    return np.outer(gammas + 1, gammas + 1) / total * (shortest / longest) ** gamma / longest


@torch.no_grad()
def reconstruct(
    run: Path, recipe: Recipe, width: float, nimg: int | None, ranks: checkpoint.ObjectCollectives | None = None
) -> tuple[int, LayerStack]:
    """Return a run's generator with its weights averaged up to a snapshot, and the images seen by then.

    Buffers are those of the snapshot, as for the EMA. Without ``nimg``, this takes the newest snapshot. Several
    ``ranks`` take the same snapshots and share the work of verifying them: a collective.

    Raises:
        UserError: The width is out of range, there is no such snapshot, or one cannot be read.
    """
    check_width(width)
    kept = _snapshots(run, nimg, ranks or checkpoint.SingleProcess())
    last = kept[-1]
    begun = last.manifest["numbers"][AVERAGE][BEGUN]
    profiles = [(found, each) for found in kept for each in sorted(saved_widths(found.manifest["kinds"][AVERAGE]))]
    wanted = Profile(last.nimg - begun, width)
    coefficients, error = combine([Profile(found.nimg - begun, each) for found, each in profiles], wanted)
    if error > _NOTED_ERROR:
        text = "%d snapshots approximate an EMA of width %g badly: their profile is %.0f %% off"
        _log.warning(text, len(kept), width, 100 * error)
    network = build_network(recipe, "generator")
    sums = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in network.named_parameters()}
    reader = None
    for (found, each), coefficient in zip(profiles, coefficients.tolist(), strict=True):
        if reader is None or reader.checkpoint is not found:
            reader = checkpoint.Reader(found)  # the previous one's files are closed with it
        saved = reader.entry(AVERAGE)
        for name, total in sums.items():
            values = torch.empty(total.numel())
            saved.read(power_kind(each), name, 0, values)
            total.add_(values, alpha=coefficient)
    for name, parameter in network.named_parameters():
        parameter.copy_(sums.pop(name).view(parameter.shape))
    saved.read_into(checkpoint.BUFFER, checkpoint.saved_buffers(network))
    return last.nimg, network


def _snapshots(run: Path, nimg: int | None, ranks: checkpoint.ObjectCollectives) -> list[checkpoint.Checkpoint]:
    """Return the intact snapshots up to ``nimg`` whose averages began together, oldest first."""
    found = by_rank_zero(
        ranks, lambda: [each for each in reversed(list(complete(run / SNAPSHOTS))) if _begun(each) is not None]
    )
    if not found:
        problem = "has no EMA snapshots, which --ema-width needs"
        raise UserError("--run", str(run), problem, "remove the option, or train with ema.power={snapshot_nimg: ...}")
    if nimg is not None and nimg not in (known := [each.nimg for each in found]):
        problem = "must be an EMA snapshot with --ema-width"
        raise UserError("--nimg", nimg, problem, f"choose from {', '.join(map(str, known))}")
    kept: list[checkpoint.Checkpoint] = []
    for each in found:
        if nimg is not None and each.nimg > nimg:
            continue
        if (damage := checkpoint.damage(each, ranks)) is None:
            kept.append(each)
        elif each.nimg == nimg:
            detail = "that snapshot is damaged"
            raise UserError("--nimg", nimg, "must be an intact EMA snapshot", "choose another", detail)
        else:
            _log.warning("skipping %s: %s", each.path, damage)
    if not kept:
        raise UserError("--run", str(run), "contains only damaged EMA snapshots", "restore an intact copy")
    return [each for each in kept if _begun(each) == _begun(kept[-1])]


def _begun(found: checkpoint.Checkpoint) -> int | None:
    """Images seen when a snapshot's averages began; None if it has no valid averages."""
    try:
        begun = found.manifest["numbers"][AVERAGE][BEGUN]
        widths = saved_widths(found.manifest["kinds"][AVERAGE])
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    fits = widths and all(SMALLEST_WIDTH <= width <= LARGEST_WIDTH for width in widths)
    return int(begun) if fits and 0 <= begun < found.nimg else None
