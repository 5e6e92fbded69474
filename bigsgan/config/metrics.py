"""The recipe's ``metrics`` section, and the names of metrics: ``fid50k`` is the FID of 50,000 images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from bigsgan import plugins
from bigsgan.config.data import DIGITS, DIRECTIONS
from bigsgan.config.reconstruction import PerceptualNetwork
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
    "psnr": "peak signal-to-noise ratio of images and their targets",
    "ssim": "structural similarity of images and their targets",
    "lpips": "perceptual distance of images and their targets",
    "codebook": "share of an autoencoder's codes that its latents use, and their perplexity",
    "ppl": "perceptual path length",
}
"""All metrics, by the letters that their names begin with."""

ENDINGS = {
    "is": ("", "_std"),
    "pr": ("_precision", "_recall"),
    "dc": ("_density", "_coverage"),
    "labels": ("_kl", "_js"),
    "codebook": ("_use", "_perplexity"),
}
"""Endings of the names of a metric's values; others have one value, of the metric's name."""

FIDELITIES = ("psnr", "ssim", "lpips")
"""Metrics that compare each image with its target."""
SSIM_WINDOW = 11
"""Pixels a side of the window of ``ssim``."""

LEAST_IMAGES, MOST_IMAGES = 10, 10**8
DEFAULT_NUM = 10_000
"""Samples of a metric from outside."""

RECORD_KEYS = (
    "metric", "direction", "by", "nimg", "weights", "ema_width", "seed", "truncation", "guidance", "steps",
    "precision", "batch", "reference", "reference_sha256", "num_real", "num_fake", "features", "features_sha256",
    "resizer", "lpips", "lpips_sha256", "use", "seconds", "time",
)  # fmt: skip
"""Keys of a record of evaluations.jsonl, besides the values."""

_NAME = re.compile(rf"({'|'.join(KINDS)})([0-9]{{1,9}})(k?)")


OUTSIDE = "outside"
"""Kind of metrics of the user's own code."""


@dataclass(frozen=True)
class Metric:
    """One metric over a number of samples."""

    name: str  # as the user wrote it; of one from outside the last part, which names its values
    kind: str  # a key of `KINDS`, or `OUTSIDE`
    num: int  # number of samples; for `ppl`, of pairs of samples
    use: str = ""  # of one from outside: its whole name
    arguments: Mapping[str, Any] = field(default_factory=dict)  # and its arguments

    @property
    def needs_features(self) -> bool:
        """Whether it compares features."""
        return self.kind not in (OUTSIDE, "codebook", *FIDELITIES)


def parse_metric(name: str, field: str, section: Metrics | None = None) -> Metric:
    """Read a metric's name, such as fid50k, kid1000 or is5k, or that of one from outside.

    Args:
        name: The name.
        field: The key or option that gave it.
        section: The section that has arguments and the number of samples of metrics from outside.

    Raises:
        UserError: It is not the name of a metric.
    """
    found = _NAME.fullmatch(name.strip().lower())
    if found is None and (plugins.is_name(name) or name in plugins.names("metrics")):
        num, arguments = (DEFAULT_NUM, {}) if section is None else (section.num, section.arguments.get(name, {}))
        return Metric(re.split("[.:]", name)[-1], OUTSIDE, num, name, arguments)
    if found is None:
        known = ", ".join(KINDS)
        problem = f"must be one of {known} and a number of images, or {plugins.FORM}"
        raise UserError(field, name, problem, "write a name such as fid50k")
    num = int(found[2]) * (1000 if found[3] else 1)
    if not LEAST_IMAGES <= num <= MOST_IMAGES:
        problem = f"must have {LEAST_IMAGES} to {MOST_IMAGES} images"
        raise UserError(field, name, problem, "give a number such as 50k")
    return Metric(found[0], found[1], num)


class FeatureNetwork(Section):
    """The network that computes the features of images."""

    network: PathText = "auto"
    """``inception`` as published for FID, ``digits`` (a classifier trained on the spot), ``torchvision:NAME`` or a
    TorchScript file. ``auto`` is ``digits`` for the digits, else ``inception``."""
    weights: PathText | None = None
    """Weights of ``inception`` or ``torchvision:NAME``; by default in the usual cache."""
    resizer: Literal["tensorflow", "antialiased"] = "tensorflow"
    """Resizing to ``inception``'s 299 pixels: bilinear as in the original graph, or bicubic and antialiased as in
    clean-fid (Parmar et al. 2022, arXiv 2104.11222)."""

    def resolved(self, kind: str) -> str:
        """Return the network for a kind of data, which ``auto`` depends on."""
        return self.network if self.network != "auto" else "digits" if kind in DIGITS else "inception"

    def unread(self, kind: str) -> list[str]:
        """Return the keys that differ from their defaults, and which the network for a kind of data does not read."""
        name = self.resolved(kind)
        reads = {"weights": name == "inception" or name.startswith("torchvision:"), "resizer": name == "inception"}
        return self.changed("", [key for key, is_read in reads.items() if not is_read])


class Metrics(Section):
    """Which metrics of the EMA's samples are measured during training, and when."""

    names: Annotated[list[str], Field(min_length=1)]
    """[Metrics](metrics.md), such as fid10k, or of your code, such as ``mypackage.metrics:Sharpness``."""
    every_nimg: PositiveInt
    """Images between two measurements; the run's end is measured too."""
    reference: PathText | None = None
    """``.npz`` file of images or statistics to compare with instead of the data; ``data.kind: latents`` needs it."""
    features: FeatureNetwork = FeatureNetwork()
    lpips: PerceptualNetwork | None = None
    """Network of ``lpips``: ``path`` and ``heads`` as in ``objective.perceptual``, whose network is the default."""
    num: Annotated[int, Field(ge=LEAST_IMAGES, le=MOST_IMAGES)] = DEFAULT_NUM
    """Samples, and real images, for metrics of your code."""
    arguments: dict[str, dict[str, Any]] = Field(default={})
    """Arguments of metrics of your code, by their names in ``names``."""

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if parse_metric(name, "metrics.names").kind == "ppl":
                remedy = "remove it, and measure it on a checkpoint: `bigsgan evaluate --metrics ppl10k`"
                raise UserError("metrics.names", name, "is not available during training", remedy)
        return names

    @model_validator(mode="after")
    def _check_outside(self) -> Metrics:
        outside = [metric for metric in self.asked if metric.kind == OUTSIDE]
        if unknown := self.arguments.keys() - {metric.use for metric in outside}:
            problem, remedy = "must be a name of your own code in metrics.names", "add it there, or remove this"
            raise UserError("metrics.arguments", min(unknown), problem, remedy)
        check_distinct(self.asked, "metrics.names")
        return self

    @property
    def needs_features(self) -> bool:
        """Whether some metric compares features."""
        return any(metric.needs_features for metric in self.asked)

    @property
    def asked(self) -> list[Metric]:
        """The metrics, parsed."""
        return [parse_metric(name, "metrics.names", self) for name in self.names]


def _listed(given: Any, info: ValidationInfo) -> Any:
    """Let a list of names be short for metrics that are measured with each checkpoint."""
    return {"names": given, "every_nimg": info.data.get("checkpoint_nimg")} if isinstance(given, list) else given


MaybeMetrics = Annotated[Metrics | None, BeforeValidator(_listed)]


def value_names(metrics: Sequence[Metric], joins_domains: bool) -> list[str]:
    """Return the names of the metrics' values: of two domains, those of each direction."""
    names = [f"{metric.name}{ending}" for metric in metrics for ending in ENDINGS.get(metric.kind, ("",))]
    return [f"{name}_{direction}" for name in names for direction in DIRECTIONS] if joins_domains else names


def distinct(names: Sequence[str]) -> list[str]:
    """Return names of metrics without those that name a metric again."""
    found = dict[str, str]()
    for name in names:
        own = name.strip().lower()
        found.setdefault(own if _NAME.fullmatch(own) else name, name)
    return list(found.values())


def check_distinct(metrics: Sequence[Metric], field: str) -> None:
    """Refuse metrics that are named twice, or whose values have another's name or that of another key of a record.

    Raises:
        UserError: Two have, or one has.
    """
    named: dict[str, str] = {}
    for metric in metrics:
        if metric.kind == OUTSIDE and metric.name in RECORD_KEYS:
            problem, remedy = "has the name of another key of evaluations.jsonl", "give it another name in its module"
            raise UserError(field, metric.use, problem, remedy, metric.name)
        if named.get(metric.name) == metric.use:
            raise UserError(field, metric.use or metric.name, "is named twice", "remove the second")
        if named.setdefault(metric.name, metric.use) != metric.use:
            problem, detail = (
                f"has values of the same name as those of {named[metric.name] or metric.name}",
                f"metrics/{metric.name}",
            )
            remedy = "give code of your own another name in its module"
            raise UserError(field, metric.use or metric.name, problem, remedy, detail)


def perceptual_network(recipe: Any) -> PerceptualNetwork | None:
    """Return the network of ``lpips`` that a recipe names, if it does."""
    return (recipe.metrics.lpips if recipe.metrics else None) or recipe.objective.perceptual  # type: ignore[no-any-return]


def check_targets(metrics: Sequence[Metric], field: str, recipe: Any, lpips: PerceptualNetwork | None) -> None:
    """Refuse metrics of images and their targets where there are none, and those of codes.

    Args:
        metrics: The metrics.
        field: The key or option that gave them.
        recipe: The generator's recipe.
        lpips: The network of ``lpips``, if one is given.

    Raises:
        UserError: The generator's images have no targets or are too small, it has no codes, or a network is missing.
    """
    for metric in metrics:
        if metric.kind in FIDELITIES and (not recipe.translates or recipe.data.joins_domains):
            detail = "unpaired images have no targets" if recipe.translates else "samples from latents have no targets"
            raise UserError(field, metric.name, "needs pairs of images, or generator.reads=images", "remove it", detail)
        if metric.kind == "ssim" and recipe.data.resolution.shorter < SSIM_WINDOW:
            problem, detail = f"needs images of at least {SSIM_WINDOW} pixels", f"they have {recipe.data.resolution}"
            raise UserError(field, metric.name, problem, "use psnr instead", detail)
        if metric.kind == "lpips" and lpips is None:
            where = "--lpips" if field == "--metrics" else "metrics.lpips.path"
            raise UserError(field, metric.name, "needs the network whose features it compares", f"give {where}")
        if metric.kind == "codebook" and not recipe.generator.num_codes:
            detail = "its bottleneck.kind is vq or fsq"
            raise UserError(field, metric.name, "needs an autoencoder with codes", "remove it", detail)
