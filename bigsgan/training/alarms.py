"""Detects failures in a run's reports: one network wins, gradients explode, modes collapse, or a penalty is far off."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from bigsgan.config import NETWORKS

DIVERSITY = "diversity/ema"

_SURE, _IN_A_ROW = 0.99, 5
"""Share of logits with the correct sign from which G learns nothing more from D, in so many reports in a row."""

_BLIND = 0.02
"""Share of logits with the correct sign below which D has lost, in as many reports."""

_OFF, _CHECKS = 0.2, 3
"""Relative error of a finite difference's squared slopes, in so many consecutive reports that have a check."""

_MEMORY, _LEAST_KNOWN = 50, 5
_EXPLODES, _VANISHES = 100.0, 1e-4
"""Gradient norm relative to the median of earlier reports."""

_SPIKES = 3.0
"""Largest singular value relative to the median of earlier reports; see Brock et al. 2019, section 4."""

_COLLAPSED = 0.15
"""Mean distance between samples of a class, relative to real images, below which they have become alike; or have stayed
so for _MEMORY reports. One image per class gave 0.12 on the digits."""

_SURE_REPORTS, _BLIND_REPORTS, _OFF_REPORTS = "sure", "blind", "off."
"""Names in the saved state."""


class Alarms:
    """Compares each report with earlier ones, and raises alarms."""

    def __init__(self) -> None:
        self._history: dict[str, deque[float]] = {}
        self._sure = self._blind = 0
        self._off = Counter[str]()

    def examine(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return alarms by name, each with an observation and a remedy; none for a healthy report."""
        found = self._signs(metrics)
        for network in NETWORKS:
            found.update(self._gradients(metrics, network))
            found.update(self._spectral_norm(metrics, network))
        for name in ("r1", "r2"):
            found.update(self._slopes(metrics, name))
        if DIVERSITY in metrics:
            found.update(self._diversity(metrics[DIVERSITY]))
        return found

    def numbers(self) -> dict[str, float]:
        """Return what later examinations depend on."""
        found: dict[str, float] = {_SURE_REPORTS: self._sure, _BLIND_REPORTS: self._blind}
        found |= {f"{_OFF_REPORTS}{name}": num for name, num in self._off.items()}
        return found | {
            f"{name}.{i}": value for name, values in self._history.items() for i, value in enumerate(values)
        }

    def load(self, numbers: Mapping[str, float]) -> None:
        """Restore what ``numbers`` returned."""
        for name, number in numbers.items():
            if name == _SURE_REPORTS:
                self._sure = int(number)
            elif name == _BLIND_REPORTS:
                self._blind = int(number)
            elif name.startswith(_OFF_REPORTS):
                self._off[name.removeprefix(_OFF_REPORTS)] = int(number)
            else:  # in their order
                self._history.setdefault(name.rpartition(".")[0], deque(maxlen=_MEMORY)).append(number)

    def _signs(self, metrics: Mapping[str, float]) -> dict[str, str]:
        rates = [metrics[name] for name in ("accuracy/real", "accuracy/fake") if name in metrics]
        self._sure = self._sure + 1 if rates and min(rates) >= _SURE else 0
        self._blind = self._blind + 1 if rates and max(rates) <= _BLIND else 0
        found = {}
        if self._sure >= _IN_A_ROW:
            help_ = "add or raise objective.r1.weight, augment, or lower optimizer.discriminator.lr"
            seen = f"the discriminator has classified {min(rates):.1%} of all images correctly in {self._sure} reports"
            found["discriminator_wins"] = f"{seen}: {help_}"
        if self._blind >= _IN_A_ROW:
            seen = f"the discriminator has misclassified nearly all images in {self._blind} reports"
            found["discriminator_lost"] = f"{seen}: raise optimizer.discriminator.lr or objective.d_steps"
        return found

    def _gradients(self, metrics: Mapping[str, float], network: str) -> dict[str, str]:
        name = f"grad_norm/{network}"
        if metrics.get(name) == 0 and not self._history.get(name):
            return {}  # it does not learn yet
        ratio = self._ratio(name, metrics.get(name))
        if ratio is None or _VANISHES < ratio < _EXPLODES:
            return {}
        what, help_ = "explode", f"lower optimizer.{network}.lr, or set a clip_norm"
        if ratio < _EXPLODES:  # which no clipping changes
            what, help_ = "vanish", "lower the learning rates, or add or raise objective.r1.weight"
        seen = f"the norm of the {network}'s gradients is {ratio:.3g} times its usual one"
        return {f"gradients_{what}/{network}": f"{seen}: {help_}"}

    def _diversity(self, value: float) -> dict[str, str]:
        """Compare samples with real images. Some generators begin with equal images, as DiT does, and take a while."""
        reported = self._history.setdefault(DIVERSITY, deque(maxlen=_MEMORY))
        reported.append(value)
        begins = len(reported) < _MEMORY and not any(each >= _COLLAPSED for each in reported)
        if begins or not value < _COLLAPSED:
            return {}
        seen = f"samples of the EMA differ {value:.2f} times as much as real images"
        return {"low_diversity": f"{seen}: the generator has collapsed; resume from an older checkpoint"}

    def _spectral_norm(self, metrics: Mapping[str, float], network: str) -> dict[str, str]:
        name = f"spectral_norm/{network}"
        ratio = self._ratio(name, metrics.get(name))
        if ratio is None or ratio < _SPIKES:
            return {}
        seen = f"the largest singular value of the {network}'s weights is {ratio:.3g} times its usual one"
        return {f"spectral_norm_spikes/{network}": f"{seen}, which precedes collapse: lower optimizer.{network}.lr"}

    def _slopes(self, metrics: Mapping[str, float], name: str) -> dict[str, str]:
        """Compare a finite difference's slopes with exact ones along the same directions, leaving out chance.

        ``penalty/r1`` and ``penalty/r1_exact`` differ in the directions too: by sqrt(2 / n) of the mean over n images.
        """
        estimate, exact = metrics.get(f"slope/{name}"), metrics.get(f"slope/{name}_exact")
        if estimate is None or exact is None:
            return {}
        self._off[name] = self._off[name] + 1 if abs(estimate - exact) > _OFF * exact else 0
        if self._off[name] < _CHECKS:
            return {}
        ratio = estimate / max(exact, 1e-30)
        seen = f"{name}'s finite differences square to {ratio:.3g} of the exact slopes, in {self._off[name]} checks"
        field = f"objective.{name}"
        return {
            f"penalty_is_off/{name}": f"{seen}: set {field}.antithetic=true, try a larger {field}.sigma if D computes "
            f"in a half type and a smaller one if not, or set {field}.form=exact"
        }

    def _ratio(self, name: str, value: float | None) -> float | None:
        """Return a value divided by the median of earlier ones; None until there are enough."""
        if value is None:
            return None
        before = self._history.setdefault(name, deque(maxlen=_MEMORY))
        ratio = value / max(statistics.median(before), 1e-30) if len(before) >= _LEAST_KNOWN else None
        before.append(value)
        return ratio


def diversity(samples: Tensor, columns: int, reals: Tensor) -> float:
    """Return the mean distance between the images of a column, divided by that between real images.

    Args:
        samples: (n, C, H, W) row by row; image i belongs to column i % columns.
        columns: Columns of the grid.
        reals: (m, C, H, W).
    """
    within = torch.stack([_mean_distance(samples[column::columns]) for column in range(columns)])
    return float(within.mean() / _mean_distance(reals).clamp(min=1e-12))


def _mean_distance(images: Tensor) -> Tensor:
    return torch.pdist(images.flatten(1).float()).mean()
