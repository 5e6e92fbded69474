"""Power function averages: their equations, and the names under which they are saved.

Karras et al. 2024, arXiv 2312.02696, section 3.1: the average of exponent gamma at t is the mean of the weights at
tau, weighted by tau^gamma. This file imports no torch, because not every reader of snapshots needs it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

AVERAGE = "average"
"""The EMA's entry in snapshots of it, and in checkpoints of all versions."""
SNAPSHOTS = "ema_snapshots"
"""Directory in the run directory where training/snapshots.py writes."""
BEGUN = "power.begun_nimg"
"""A number in the EMA's entry: images seen before the first update of the power function averages."""
_POWER = "power_"


def power_decay(width: float, nimg: int, batch: int) -> float:
    """Return the share of the old average that is kept by an update on the last ``batch`` of ``nimg`` images.

    beta(t) = (1 - 1/t)^(gamma + 1) (Karras et al. 2024, arXiv 2312.02696, equation 2) with t in batches. Written in
    images it also holds where the batch changes. The first update makes a copy, so there is no warm-up.
    """
    return (1 - batch / nimg) ** (power_exponent(width) + 1)


def power_exponent(width: float) -> float:
    """Return gamma of the profile t^gamma whose standard deviation is ``width`` of its length, sigma_rel.

    The largest root of (gamma + 2)^2 (gamma + 3) = (gamma + 1) / sigma_rel^2 (equation 3 there).
    """
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def power_kind(width: float) -> str:
    """Return the kind under which the values of a power function average are saved."""
    return f"{_POWER}{width!r}"


def saved_widths(kinds: Iterable[str]) -> set[float]:
    """Return the widths of the power function averages among kinds of values.

    Raises:
        ValueError: One of them is not a number.
    """
    return {float(kind.removeprefix(_POWER)) for kind in kinds if kind.startswith(_POWER)}
