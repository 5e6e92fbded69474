"""`bigsgan evaluate`: quality metrics of a run's generator, measured by all ranks together."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bigsgan.config import Recipe, load_recipe
from bigsgan.config.data import Data
from bigsgan.config.metrics import FeatureNetwork, Metric, check_targets, parse_metric, perceptual_network
from bigsgan.config.reconstruction import PerceptualNetwork
from bigsgan.config.run_directory import RECIPE_FILE, RECORDS_FILE
from bigsgan.config.sections import LARGEST_INT
from bigsgan.data import build_dataset
from bigsgan.data.codecs import build_codec
from bigsgan.data.conditions import Conditions, conditions_of, picked
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch
from bigsgan.errors import UserError, counted, shown
from bigsgan.images.size import Size
from bigsgan.inference.columns import open_conditions
from bigsgan.inference.mappings import set_guidance
from bigsgan.inference.sheets import Sampler
from bigsgan.inference.trained import TrainedNetwork, open_trained, set_steps
from bigsgan.metrics import Features, Measured, Replica, open_features
from bigsgan.metrics.features import no_features
from bigsgan.metrics.path_length import path_length
from bigsgan.metrics.real_cache import directory
from bigsgan.metrics.reference import Reference
from bigsgan.models.precision import compute_in_float32
from bigsgan.runtime import comm, memory
from bigsgan.runtime.ending import on_launched_ranks
from bigsgan.runtime.tf32 import tf32
from bigsgan.training.measuring import evaluations, keep_records, measured, open_lpips, records
from bigsgan.training.rank_consistency import open_compared, open_same_reference
from bigsgan.training.sampling import (
    check_batch,
    check_guidance,
    check_truncation,
    generator_inputs,
    sampling_mode,
    smaller_batch,
)
from bigsgan.training.sampling import shown as decoded


class Options(NamedTuple):
    """What to measure."""

    run: Path  # run directory
    nimg: int | None  # checkpoint to use; None for the newest
    live: bool  # use the live weights instead of the EMA
    width: float | None  # relative width of the EMA, which is computed from snapshots; None for the checkpoint's EMA
    metrics: Sequence[Metric]
    features: FeatureNetwork  # feature network of the metrics
    lpips: PerceptualNetwork | None  # network of the metric of this name; None for that of the run's recipe
    batch: int  # images at a time
    seed: int  # seed of the latents
    truncation: float | None  # threshold of the latents, or psi of styles
    guidance: float | None  # factor on the distance of w from its mean over the classes; None for 1
    steps: int | None  # from noise to an image, by flow matching; None for the recipe's
    overrides: Sequence[str]  # changes to `data` of the run's recipe
    reference: Path | None  # file to compare with instead of the data; None for the data
    json: bool  # print the records as JSON


def main(options: Options) -> int:
    """Measure, print, keep the records in the run directory, and return the exit status. Every rank calls this."""

    def work() -> None:
        with memory.naming_remedy(f"with {counted(options.batch, 'image')} at a time", smaller_batch(options.batch)):
            _evaluate(options)

    return on_launched_ranks(work)


def _evaluate(options: Options) -> None:
    _check(options)
    device = comm.device()
    trained = open_trained(options.run, "generator", options.live, options.nimg, device, options.width, comm)
    set_steps(trained, options.steps, options.guidance)
    compute_in_float32(trained.network)
    recipe = _with_data(trained, options).model_copy(update={"generator": trained.recipe.generator})
    _check_run(recipe, options)
    metrics = [parse_metric(m.use, "--metrics", recipe.metrics) if m.use else m for m in options.metrics]
    needed = any(metric.needs_features for metric in metrics)
    features = open_features(options.features, recipe.data, directory()) if needed else no_features()
    features.lpips = open_lpips(options.metrics, recipe, options.lpips)
    if needed and comm.rank() == 0 and (unread := options.features.unread(recipe.data.kind)):
        print(f"no effect with features {features.name}: --{', --'.join(unread)}", file=sys.stderr)
    reals, data, about_reference = _reals(recipe, options.reference, features.width)
    if reals.images is not None and options.reference is None:
        conditions = conditions_of(data, reals.images)
    else:
        conditions = open_conditions(options.run, recipe.data)
    of_images = [metric for metric in metrics if metric.kind != "ppl"]
    with tqdm(disable=None if comm.rank() == 0 else True, bar_format="{desc}", leave=False) as bar:
        tell = bar.set_description_str
        sides = evaluations(of_images, recipe, features, reals, data, options.batch, tell, conditions)
        sampler = Sampler(trained, options.seed, options.batch, conditions)
        set_guidance(trained.network, options.guidance)
        sampler.prepare(options.truncation)
        threshold = None if recipe.generator.truncates_w else options.truncation
        replica, seed = Replica(comm.rank(), comm.world_size()), options.seed
        network, show = trained.network, partial(decoded, trained.recipe, trained.infer)
        found = measured(sides, recipe, network, show, seed, replica, truncation=threshold) if of_images else []
        found += [
            _path_length(trained, conditions, features, m, options, bar) for m in options.metrics if m.kind == "ppl"
        ]
    if comm.rank() == 0:
        about = {
            "nimg": trained.nimg,
            "weights": "live" if options.live else "ema",
            **({} if options.width is None else {"ema_width": options.width}),
            "seed": options.seed,
            "truncation": options.truncation,
            **({} if options.guidance is None else {"guidance": options.guidance}),
            **({} if options.steps is None else {"steps": options.steps}),
            "precision": "fp32",
            "batch": options.batch,
            **about_reference,
        }
        lines = records(found, features, {"by": "evaluate", **about})
        _print(lines, options)
        keep_records(options.run, lines)


def _check(options: Options) -> None:
    check_batch(options.batch)
    if not 0 <= options.seed <= LARGEST_INT:
        raise UserError("--seed", options.seed, f"must be 0 to {LARGEST_INT}", "give a number in this range")
    for override in options.overrides:
        if not override.startswith("data."):
            problem = "must be a key that only changes where the data is read from"
            raise UserError("argument", override, problem, "give only keys such as data.root")


def _reals(recipe: Recipe, reference: Path | None, width: int) -> tuple[Reference, Data, dict[str, str]]:
    """The reference to compare with, the section that describes it, and what records say about a file."""
    if reference is None:
        return Reference(open_compared(build_dataset, recipe.data)), recipe.data, {}
    reals, about = open_same_reference(reference, recipe.data, width, "--reference")
    return reals, recipe.data.model_copy(update={"root": str(reference)}), about


def _check_run(recipe: Recipe, options: Options) -> None:
    """Refuse options that the run's generator or data does not support."""
    if options.truncation is not None:
        if recipe.translates:
            raise UserError("--truncation", None, "needs a generator from latents", "remove the option")
        check_truncation(recipe, options.truncation)
    if options.guidance is not None:
        check_guidance(recipe, options.guidance)
    if options.reference is None and recipe.data.kind == "latents":
        remedy, detail = "add --reference with statistics of the images", "the data holds their latents"
        raise UserError("--reference", None, "must be given with data.kind=latents", remedy, detail)
    if options.reference is not None and recipe.translates:
        raise UserError("--reference", None, "needs a generator from latents", "remove the option")
    check_targets(options.metrics, "--metrics", recipe, options.lpips or perceptual_network(recipe))
    for metric in options.metrics:
        if metric.kind == "ppl" and not recipe.generator.has_styles:
            problem = f"needs a generator with styles, and {recipe.generator.family} has none"
            raise UserError("--metrics", metric.name, problem, "remove it")


def _with_data(trained: TrainedNetwork, options: Options) -> Recipe:
    """The run's recipe with the data in another place; G's outputs are decoded as in the run.

    ``data.codec`` of another kind describes the images to compare with. If it has the run's kind, it may only change
    the autoencoder's path.
    """
    recipe = trained.recipe
    changed = load_recipe(options.run / RECIPE_FILE, list(options.overrides))
    fixed = [
        "resolution",
        "image_channels",
        "range",
        "num_classes",
        "condition_size",
        "multi_label",
        "missing_labels",
        "paired",
        "joins_domains",
        "input_channels",
    ]
    if changed.data.codec.kind == recipe.data.codec.kind:
        fixed += [f"codec.{key}" for key in type(changed.data.codec).model_fields if key != "path"]
        data = recipe.data.model_copy(update={"codec": changed.data.codec})
        trained.recipe = recipe.model_copy(update={"data": data})
    for key in fixed:
        wanted, given = (attrgetter(key)(each.data) for each in (recipe, changed))
        if isinstance(wanted, Size):
            wanted, given = wanted.value, given.value
        if wanted != given:
            problem = f"must be {'unset' if wanted is None else shown(wanted)}, as in the run"
            if key in ("paired", "joins_domains"):
                key, given, problem = "kind", changed.data.kind, f"must hold samples as {recipe.data.kind} does"
            raise UserError(f"data.{key}", given, problem, "remove it")
    return changed


def _path_length(
    trained: TrainedNetwork, conditions: Conditions, features: Features, metric: Metric, options: Options, bar: tqdm
) -> Measured:
    recipe, device, draws, start = trained.recipe, comm.device(), Draws(options.seed), time.perf_counter()

    def inputs(first: int, num: int) -> MicroBatch:
        labels = picked(conditions, draws.integers("metrics/path/label", (0,), first, num, len(conditions)))
        return generator_inputs(recipe, draws, "metrics/path", first, labels, None, device)

    features.network.to(device)
    network, decode = trained.network, build_codec(recipe.data, device).decode
    with tf32(False), sampling_mode(network, "running"):
        value = path_length(network, decode, inputs, features, metric.num, options.batch, bar.set_description_str)
    return Measured(metric, {metric.name: value}, 0, metric.num, time.perf_counter() - start)


def _print(lines: Sequence[dict[str, Any]], options: Options) -> None:
    if options.json:
        print(json.dumps(lines, indent=2))
        return
    for line in lines:
        values = {name: value for name, value in line.items() if name.startswith(line["metric"])}
        for name, value in values.items():
            print(f"{name:<24}{'not finite' if value is None else f'{value:.5g}'}")
    first = lines[0]
    of = [
        f"features of {n['features']} ({n['features_sha256']}), resizer {n['resizer']}; "
        for n in lines
        if "features" in n
    ]
    width = "" if options.width is None else f" of width {options.width:g}"
    print(
        f"{first['weights']} weights{width} at {first['nimg']} images; {''.join(of[:1])}"
        f"full records in {options.run / RECORDS_FILE}"
    )
