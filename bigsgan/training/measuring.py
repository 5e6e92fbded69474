"""Measures samples with the metrics of a recipe or of a command, and records the results."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan.config import Recipe, RunPlan
from bigsgan.config.data import DIRECTIONS, Data
from bigsgan.config.metrics import OUTSIDE, Metric, perceptual_network
from bigsgan.config.reconstruction import PerceptualNetwork
from bigsgan.config.run_directory import RECORDS_FILE
from bigsgan.data.conditions import Conditions
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.loader import CorruptImages, read_batches
from bigsgan.data.pairs import TwoDomains
from bigsgan.data.perceptual import Fields
from bigsgan.draws import Draws
from bigsgan.engines import Engine, MicroBatch
from bigsgan.errors import UserError
from bigsgan.images.codec import decode
from bigsgan.metrics import Evaluation, Features, Generate, Made, Measured, Replica, open_features
from bigsgan.metrics.features import RECIPE, no_features
from bigsgan.metrics.fidelity import Lpips
from bigsgan.metrics.real_cache import directory
from bigsgan.metrics.reals import order_of_images
from bigsgan.metrics.reference import Reference
from bigsgan.models.network import LayerStack
from bigsgan.models.quantizers import Quantizer
from bigsgan.monitor import RankLog
from bigsgan.runtime import comm
from bigsgan.runtime.paths import writing
from bigsgan.training.ema import ShardedEMA
from bigsgan.training.rank_consistency import open_same_reference
from bigsgan.training.sampling import (
    FORWARD,
    Infer,
    generator_inputs,
    making,
    sampling_mode,
    shown,
    stand_statistics,
    translation_inputs,
)
from bigsgan.training.schedules import is_due

_log = logging.getLogger(__name__)


class Measuring:
    """Measures the EMA's samples while a run trains, on the ranks that hold the generator.

    Attributes:
        has_outside: Whether some metric is of the user's own code.
    """

    def __init__(
        self, plan: RunPlan, out: Path, dataset: ImageDataset, conditions: Conditions, batch: int, rank_log: RankLog
    ) -> None:
        """Open the feature network for a run whose recipe asks for metrics. Every rank calls this.

        Samples are of ``conditions``, and ``batch`` are made at a time: no more than a micro-batch, for which there is
        memory. ``rank_log`` is told the progress of a measurement, which the watchdog reads.

        Raises:
            UserError: The feature network or the reference cannot be read, or does not fit the metrics or the data.
        """
        section, data = plan.recipe.metrics, plan.recipe.data
        assert section is not None
        self._recipe, self._out, self._rank_log = plan.recipe, out, rank_log
        needed = section.needs_features
        features = open_features(section.features, data, directory(), RECIPE) if needed else no_features()
        features.lpips = open_lpips(section.asked, plan.recipe)
        self._features = features
        reference = None if section.reference is None else Path(section.reference)
        reals = Reference(dataset)
        self.has_outside = any(metric.kind == OUTSIDE for metric in section.asked)
        self._about: dict[str, str] = {}
        if reference is not None:
            reals, self._about = open_same_reference(reference, data, features.width, "metrics.reference")
            data = data.model_copy(update={"root": str(reference)})
        self._evaluations = evaluations(
            section.asked, plan.recipe, features, reals, data, batch, self._tell, conditions
        )
        self._precision, self._batch = plan.engines["generator"].file.precision, batch
        place, rank = plan.placement("generator"), comm.rank()
        self._replica = Replica(place.replica(rank), place.num_replicas, place.stage(rank), place.num_stages)

    def is_due(self, nimg: int) -> bool:
        """Return whether to measure after the update that ended at ``nimg`` images."""
        section = self._recipe.metrics
        return section is not None and is_due(section.every_nimg, nimg, self._recipe.batch)

    def __call__(
        self,
        generator: Engine,
        ema: ShardedEMA,
        standing: Sequence[MicroBatch],
        nimg: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Return values by name, or None if ``stopped`` returned True; rank 0 records them in the run directory.

        A collective of the generator's ranks. ``standing`` are inputs for standing statistics, ``nimg`` the images
        seen so far.
        """
        recipe, network = self._recipe, generator.network
        infer = making(recipe, generator.infer_everywhere)
        self._tell("standing statistics")
        with ema.swapped():
            stand_statistics(network, infer, standing)
            show = partial(shown, recipe, infer)
            found = measured(self._evaluations, recipe, network, show, recipe.seed, self._replica, stopped)
        if not found:
            return None
        if comm.rank() == 0:
            about = {"by": "train", "nimg": nimg, "weights": "ema", "seed": recipe.seed, "truncation": None}
            about |= {"precision": self._precision, "batch": self._batch, **self._about}
            try:
                keep_records(self._out, records(found, self._features, about))
            except UserError as error:
                _log.warning("%s; training continues", error)
        values = {f"metrics/{name}": value for each in found for name, value in each.values.items()}
        return {**values, "metrics/seconds": sum({each.direction: each.seconds for each in found}.values())}

    def _tell(self, text: str) -> None:
        self._rank_log.phase = f"metrics: {text}"


class Side(NamedTuple):
    """Metrics of a generator's images; of translations between two domains, those in one direction."""

    direction: str  # of `DIRECTIONS`
    sources: ImageDataset | None  # see `samples_of`
    evaluation: Evaluation


def evaluations(
    asked: Sequence[Metric],
    recipe: Recipe,
    features: Features,
    reals: Reference,
    data: Data,
    batch: int,
    tell: Callable[[str], None],
    conditions: Conditions,
) -> list[Side]:
    """Prepare metrics of images: of two domains, in each direction. See ``Evaluation``.

    Raises:
        UserError: A metric does not fit the network or the data.
    """
    sides = [(reals, reals.images, data)]
    if isinstance(reals.images, TwoDomains):
        other = reals.images.reversed  # each of the two has all images of its last domain, once
        sides = [(reals, other, data), (Reference(other), reals.images, other.data)]
    found = []
    for direction, (against, sources, own) in zip(DIRECTIONS, sides, strict=False):
        each = each_once(asked, recipe, sources)
        evaluation = Evaluation(each, features, against, own, batch, directory(), tell, conditions)
        found.append(Side(direction, sources, evaluation))
    return found


def measured(
    sides: Sequence[Side],
    recipe: Recipe,
    network: LayerStack,
    show: Callable[[str], Infer],
    seed: int,
    replica: Replica,
    stopped: Callable[[], bool] = lambda: False,
    truncation: float | None = None,
) -> list[Measured]:
    """Make samples and measure them; the result is empty if it was stopped. A collective, see ``Evaluation.measure``.

    ``show`` returns the function that makes the images of a direction. See ``samples_of`` for the rest.

    Raises:
        MetricError: A metric from outside failed.
    """
    found = list[Measured]()
    for direction, sources, evaluation in sides:
        source = samples_of(recipe, network, show(direction), sources, comm.device(), seed, truncation, direction)
        of_side = evaluation.measure(source, replica, stopped)
        if not of_side:
            return []
        found += [each.towards(direction) if len(sides) > 1 else each for each in of_side]
    return found


def samples_of(
    recipe: Recipe,
    network: LayerStack,
    make: Infer,
    dataset: ImageDataset | None,
    device: torch.device,
    seed: int,
    truncation: float | None = None,
    direction: str = FORWARD,
) -> Generate:
    """Return the function that makes a generator's samples for metrics, from latents or from the data set's inputs.

    ``network`` is this rank's part of the generator, with standing statistics if it needs them. ``make`` makes the
    images from inputs. ``truncation`` is the threshold of the latents. Of two domains, ``dataset`` has that of the
    images to be translated last, where ``direction`` begins.
    """
    num = 0 if dataset is None else len(dataset)
    order = order_of_images(num if recipe.translates else 0)
    draws, corrupt = Draws(seed), CorruptImages(recipe.data, num, comm.rank())
    quantizers = [module for module in network.modules() if isinstance(module, Quantizer)]  # one, if any

    def inputs(first: int, labels: Tensor) -> tuple[MicroBatch, Tensor | None]:
        if not recipe.translates or dataset is None:
            return generator_inputs(recipe, draws, "metrics", first, labels, truncation, device), None
        indices = [int(order[(first + i) % num]) for i in range(len(labels))]
        (read,) = read_batches(dataset, recipe.data.model_copy(update={"num_workers": 0}), iter([indices]), False)
        corrupt.count(read)
        seeds = draws.seeds("metrics/seed", (0,), first, len(labels))
        images = read.images.to(device)
        # An image to be made again is its own target.
        targets = None if recipe.data.joins_domains else images[:, -recipe.data.image_channels :]
        if recipe.data.joins_domains and direction == FORWARD:
            images = images.roll(recipe.data.input_channels, dims=1)
        return translation_inputs(recipe, decode(images), read.labels, seeds, device), targets

    def generate(first: int, labels: Tensor) -> Made:
        read, targets = inputs(first, labels)
        with sampling_mode(network, recipe.sample_statistics):
            for each in quantizers:
                each.watched = True
            made = make(read, False)
        codes = None
        for each in quantizers:
            codes, each.numbers, each.watched = each.numbers, None, False
        return Made(made, targets, codes, recipe.generator.num_codes)

    return generate


def open_lpips(metrics: Sequence[Metric], recipe: Recipe, given: PerceptualNetwork | None = None) -> Lpips | None:
    """Load the network of ``lpips`` if some metric needs it: that which ``--lpips`` has given, or the recipe's.

    Raises:
        UserError: It cannot be read, or does not fit the images.
    """
    if not any(metric.kind == "lpips" for metric in metrics):
        return None
    network = given or perceptual_network(recipe)
    assert network is not None, "the metrics' check asks for it"
    own = recipe.metrics is not None and network is recipe.metrics.lpips
    section = "metrics.lpips" if own else "objective.perceptual"
    fields = Fields("--lpips", "--lpips") if given else Fields(f"{section}.path", f"{section}.heads")
    return Lpips(network, recipe.data.resolution, fields)


def each_once(metrics: Sequence[Metric], recipe: Recipe, dataset: ImageDataset | None) -> list[Metric]:
    """Let a generator from images make each of the data's images at most once; ``dataset`` is None for latents."""
    num = len(dataset) if recipe.translates and dataset is not None else None
    return [metric if num is None else replace(metric, num=min(metric.num, num)) for metric in metrics]


def records(found: Sequence[Measured], features: Features, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one record for each metric, fit for JSON: its value and everything that it depends on.

    ``about`` describes the samples: checkpoint, weights, seed, truncation, precision, images at a time.
    """
    return [
        {
            "metric": each.metric.name,
            **({"direction": each.direction} if each.direction else {}),
            **{name: value if math.isfinite(value) else None for name, value in each.values.items()},
            **about,
            "num_real": each.num_real,
            "num_fake": each.num_fake,
            **(_of_features(features) if each.metric.needs_features else {}),
            **each.about,
            **({"use": each.metric.use} if each.metric.kind == OUTSIDE else {}),
            "seconds": round(each.seconds, 2),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        for each in found
    ]


def _of_features(features: Features) -> dict[str, str]:
    found = {"features": features.name, "features_sha256": features.hash, "resizer": features.resizer}
    return found | ({"channels": features.channels} if features.channels else {})


def keep_records(run: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a run directory's ``evaluations.jsonl``; one rank calls this.

    Raises:
        UserError: The file cannot be written.
    """
    path = run / RECORDS_FILE
    with writing(path), path.open("a+", encoding="utf-8") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() not in ("", "\n"):  # a kill left half a line
            file.write("\n")
        file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
