"""What a user's script does with a run between its updates: save it, make samples, and measure them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bigsgan import plugins
from bigsgan.config import RunPlan
from bigsgan.config.metrics import DEFAULT_NUM, FeatureNetwork, Metrics, check_targets, perceptual_network
from bigsgan.config.sections import LARGEST_INT
from bigsgan.config.signature import typed
from bigsgan.data import build_dataset
from bigsgan.data.conditions import checked_vectors, some_conditions
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.runtime import comm, division
from bigsgan.training.loop import Run, finish_snapshots, save
from bigsgan.training.measuring import Measuring
from bigsgan.training.rank_consistency import open_compared
from bigsgan.training.sampling import (
    LARGEST_NUM,
    column_labels,
    generator_inputs,
    making,
    sample,
    shown,
    stand_statistics,
)


def saved(run: Run) -> Path:
    """Save a checkpoint; see ``Trainer.save``."""
    finish_snapshots(run, must=False)  # as where a checkpoint is due
    if error := save(run, must=True):
        raise error
    path = run.saver.path(run.counters.nimg)
    if run.saver.lost:
        raise UserError(str(path), None, f"cannot be saved: {run.saver.lost}", "resume the run from an earlier one")
    return path


@typed
def sampled(
    run: Run, num: int, seed: int, classes: Sequence[int] | None, live: bool, conditions: Tensor | None = None
) -> Tensor:
    """Make images; see ``Trainer.sample``."""
    recipe, generator = run.recipe, run.step.generator
    most = max(recipe.data.num_classes, 1)
    if recipe.translates:
        raise UserError("sample", None, "needs a generator from latents", "use `bigsgan sample --input`")
    for field, value, low, high in (("num", num, 1, LARGEST_NUM), ("seed", seed, 0, LARGEST_INT)):
        if not low <= value <= high:
            raise UserError(field, value, f"must be {low} to {high}", "give a number in this range")
    for label in classes or ():
        if not 0 <= label < most:
            raise UserError("classes", label, f"must be 0 to {most - 1}", "give numbers of the data's classes")
    if not generator.is_held:
        return torch.empty(0)
    columns = _columns(run, classes, conditions)
    infer, statistics = making(recipe, generator.infer_everywhere), recipe.sample_statistics
    show = shown(recipe, infer)
    run.rank_log.phase = "samples"

    def images(places: Tensor) -> Tensor:
        first, labels = int(places[0]), columns[places % len(columns)]
        inputs = generator_inputs(recipe, Draws(seed), "sample", first, labels, None, comm.device())
        return sample(generator.network, show, inputs, run.sampling_batch, statistics)

    batches = torch.arange(num).split(run.sampling_batch)  # tokens of all samples may not fit into memory
    if live:
        return torch.cat(list(map(images, batches)))
    with run.ema.swapped():
        stand_statistics(generator.network, infer, run.standing)
        return torch.cat(list(map(images, batches)))


def _columns(run: Run, classes: Sequence[int] | None, conditions: Tensor | None) -> Tensor:
    """Return the labels that samples have in turn."""
    data = run.recipe.data
    if not data.has_vectors:
        if conditions is not None:
            raise UserError("conditions", None, "needs a run whose labels are vectors", "give classes")
        return torch.tensor(classes or range(max(data.num_classes, 1)))
    if classes is not None:
        raise UserError("classes", list(classes), "must be None where labels are vectors", "give conditions")
    if conditions is None:
        return column_labels(data, run.grid.conditions)
    return torch.from_numpy(checked_vectors(data, np.asarray(conditions.detach().cpu()), "conditions", None))


@typed
def evaluated(
    run: Run, plan: RunPlan, metrics: Sequence[str], features: FeatureNetwork | None = None
) -> dict[str, float]:
    """Measure the EMA's samples; see ``Trainer.evaluate``."""
    own, recipe = run.recipe.metrics, run.recipe
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    if not names:
        raise UserError("metrics.names", None, "must have at least one name", "name a metric such as fid10k")
    plugins.give(names)
    arguments = {name: each for name, each in (own.arguments if own else {}).items() if name in names}
    section = Metrics(
        names=names,
        every_nimg=recipe.total_nimg,
        reference=own.reference if own else None,
        features=features or (own.features if own else FeatureNetwork()),
        arguments=arguments,
        lpips=own.lpips if own else None,
        num=own.num if own else DEFAULT_NUM,
    )
    asked = recipe.model_copy(update={"metrics": section})
    check_targets(section.asked, "metrics.names", asked, perceptual_network(asked))
    plan = dataclasses.replace(plan, recipe=asked)
    dataset = open_compared(build_dataset, recipe.data)
    conditions = some_conditions(recipe.data, dataset)
    measuring = Measuring(plan, run.out, dataset, conditions, run.sampling_batch, run.rank_log)
    values = None
    if run.step.generator.is_held:
        with division.within_part():
            values = measuring(run.step.generator, run.ema, run.standing, run.counters.nimg)
    found: dict[str, float] = comm.from_rank_zero(values)
    return found
