"""The recipe's ``metrics`` section, and the names of metrics: ``fid50k`` is the FID of 50,000 images."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from bigsgan.config.sections import PathText, PositiveInt, Section
from bigsgan.errors import UserError

KINDS = {
    "fid": "Frechet inception distance",
    "cfid": "Frechet inception distance within each class, averaged over the classes",
    "kid": "kernel inception distance",
    "is": "inception score",
    "pr": "precision and recall",
    "dc": "density and coverage",
    "labels": "divergences between the histograms of recognized classes",
    "ppl": "perceptual path length",
}
"""All metrics, by the letters that their names begin with."""

ENDINGS = {
    "is": ("", "_std"),
    "pr": ("_precision", "_recall"),
    "dc": ("_density", "_coverage"),
    "labels": ("_kl", "_js"),
}
"""Endings of the names of a metric's values; others have one value, of the metric's name."""

LEAST_IMAGES, MOST_IMAGES = 10, 10**8

_NAME = re.compile(rf"({'|'.join(KINDS)})([0-9]{{1,9}})(k?)")


@dataclass(frozen=True)
class Metric:
    """One metric over a number of samples."""

    name: str  # as the user wrote it
    kind: str  # a key of `KINDS`
    num: int  # number of samples; for `ppl`, of pairs of samples


def parse_metric(name: str, field: str) -> Metric:
    """Read a metric's name, such as fid50k, kid1000 or is5k; ``field`` is the key or option that gave it.

    Raises:
        UserError: It is not the name of a metric.
    """
    found = _NAME.fullmatch(name.strip().lower())
    if found is None:
        known = ", ".join(KINDS)
        problem = f"must be one of {known} and a number of images"
        raise UserError(field, name, problem, "write a name such as fid50k")
    num = int(found[2]) * (1000 if found[3] else 1)
    if not LEAST_IMAGES <= num <= MOST_IMAGES:
        problem = f"must have {LEAST_IMAGES} to {MOST_IMAGES} images"
        raise UserError(field, name, problem, "give a number such as 50k")
    return Metric(found[0], found[1], num)


class FeatureNetwork(Section):
    """The network that computes the features of images."""

    network: PathText = "auto"
    """``inception`` (as published for FID), ``digits`` (a classifier that is trained on the spot), ``torchvision:NAME``
    or the path of a TorchScript file. ``auto`` is ``digits`` for the digits and ``inception`` for other data."""
    weights: PathText | None = None
    """File with the weights of ``inception`` or ``torchvision:NAME``; by default in the usual cache."""
    resizer: Literal["tensorflow", "antialiased"] = "tensorflow"
    """How images are resized to ``inception``'s 299 pixels: bilinear as in the original graph, or bicubic with
    antialiasing as in clean-fid (Parmar et al. 2022, arXiv 2104.11222)."""


class Metrics(Section):
    """Which metrics of the EMA's samples are measured during training, and when."""

    names: Annotated[list[str], Field(min_length=1)]
    """Names of metrics, such as fid10k, kid10k, is10k, pr10k, dc10k, labels10k."""
    every_nimg: PositiveInt
    """Images between two measurements. The end of the run is measured too."""
    reference: PathText | None = None
    """An ``.npz`` file of images or of their statistics to compare with instead of the data, as of
    ``bigsgan evaluate --reference``. ``data.kind=latents`` needs it."""
    features: FeatureNetwork = FeatureNetwork()

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if parse_metric(name, "metrics.names").kind == "ppl":
                remedy = "remove it, and measure it on a checkpoint: `bigsgan evaluate --metrics ppl10k`"
                raise UserError("metrics.names", name, "is not available during training", remedy)
        return names

    @property
    def asked(self) -> list[Metric]:
        """The metrics, parsed."""
        return [parse_metric(name, "metrics.names") for name in self.names]
