"""Puts a training run together: engines, data, the step, and the parts around them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigsgan import checkpoint
from bigsgan.adversarial import AdversarialStep, SampleDraws
from bigsgan.adversarial.image_pool import build_image_pool
from bigsgan.adversarial.stale_images import build_stale_images
from bigsgan.adversarial.step import Sources
from bigsgan.adversarial.terms import KMeansStart, Own, Term, Termed, build_terms, codes_of, set_learned_codes, states
from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.config.class_names import with_class_names
from bigsgan.data import Slice, build_dataset, build_training_dataset, readable_samples
from bigsgan.data.conditions import Conditions, keep_labels, some_conditions
from bigsgan.data.datasets import ImageDataset, images_of_classes
from bigsgan.data.latents import check_images
from bigsgan.draws import Draws
from bigsgan.engines import Engine
from bigsgan.engines.build import build_executor, on_this_machine
from bigsgan.engines.executor import Executor
from bigsgan.engines.exposing import parameter_at
from bigsgan.engines.frozen import frozen_layout
from bigsgan.engines.parameter_groups import described
from bigsgan.models.build import network_on_meta
from bigsgan.models.outside_check import check_outside
from bigsgan.monitor import NOTICE, RankLog, Reporter, Statistics
from bigsgan.runtime import comm, launched
from bigsgan.runtime.collective_errors import by_each, for_rank_zero
from bigsgan.training.ema import ShardedEMA
from bigsgan.training.initial_weights import (
    check_freezing,
    check_initial_weights,
    freeze_first_layers,
    load_imported_ema,
    load_initial_weights,
)
from bigsgan.training.loop import Run
from bigsgan.training.measuring import Measuring
from bigsgan.training.power import AVERAGE
from bigsgan.training.rank_consistency import checked_frozen, open_compared, refuse_other_codec
from bigsgan.training.reading import batch_slices, build_reals, build_sources
from bigsgan.training.recovery import Recovery
from bigsgan.training.reports import REPORTS, Reports
from bigsgan.training.returning import begin, drop_measurements
from bigsgan.training.sampling import (
    GRID_ROWS,
    SampleGrid,
    column_classes,
    latent_grid,
    translation_grid,
)
from bigsgan.training.snapshots import Snapshots, remove_abandoned
from bigsgan.training.start import Start
from bigsgan.training.state import Counters, EMAState, EngineState

DATA = "data"
"""Key of a manifest's layout with the fingerprint of the data set."""

KEPT_IMAGES = "kept_images"
"""Name of the entry of images for D's next update, where updates overlap."""

IMAGE_POOL = "image_pool"
"""Name of the entry of images of earlier updates that D sees again."""

NUM_SHOWN, REAL_COLUMNS, NUM_PAIRS = 100, 10, 18

_log = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """What a run reads besides its checkpoint, opened and checked."""

    shown: ImageDataset
    dataset: ImageDataset  # to train on: ``shown``, or crops of its images
    conditions: Conditions  # what samples are conditioned on
    frozen: dict[str, str]  # digests of the files of frozen networks
    own: Own  # loss and terms from outside
    measuring: Measuring | None


def open_inputs(plan: RunPlan, out: Path, start: Start, rank_log: RankLog) -> Inputs:
    """Open what a run reads, and check that it fits the recipe, the checkpoint and other weights. A collective.

    A dry run does this too, so that it accepts what a start does.

    Raises:
        UserError: Something cannot be read, or does not fit.
    """
    recipe = plan.recipe
    sharing, forward_mode = launched.local_size(os.environ), [n for n in NETWORKS if plan.differentiates_forward(n)]
    hooked = [n for n in NETWORKS if plan.engines[n].file.stage == 3]
    shared = [n for n in hooked if plan.placement(n).num_replicas > 1]
    gathered = [n for n in NETWORKS if n in shared or frozen_layout(plan, n).num_ranks > 1]
    repeated = [] if plan.keeps_generator_graphs else ["generator"]
    about = plan.world_size, sharing, comm.rank() == 0, forward_mode, gathered, hooked, repeated
    for line in by_each(comm, lambda: check_outside(recipe, *about)):
        _log.log(NOTICE, "%s", line)
    own = by_each(comm, lambda: Own.of(recipe, comm.device()))
    if start.initial is not None:
        check_initial_weights(recipe, start.initial)
    check_freezing(recipe)
    for line in described(recipe):
        _log.log(NOTICE, "%s", line)
    shown = open_compared(build_dataset, recipe.data)
    dataset = _training_dataset(recipe, shown)
    conditions = by_each(comm, lambda: some_conditions(recipe.data, shown))
    frozen = checked_frozen(recipe, start.found.layout if start.found else {})
    if start.found is not None:
        refuse_other_codec(start.found.layout.get(DATA), recipe.data)
    batch = batch_slices(plan, comm.rank())["generator"]["generator"].num_samples
    measuring = Measuring(plan, out, shown, conditions, batch, rank_log) if recipe.metrics else None
    return Inputs(shown, dataset, conditions, frozen, own, measuring)


def build_run(plan: RunPlan, out: Path, start: Start, rank_log: RankLog) -> Run:
    """Put a run together, and load the checkpoint or weights that it begins from. Every rank calls this.

    Raises:
        UserError: The data, the checkpoint or this machine do not fit the plan.
    """
    plan, device, rank = on_this_machine(plan), comm.device(), comm.rank()
    recipe, slices, draws = plan.recipe, batch_slices(plan, rank), Draws(plan.recipe.seed)
    shown, dataset, conditions, frozen, own, measuring = open_inputs(plan, out, start, rank_log)
    names = comm.from_rank_zero(list(shown.class_names))  # equal data has equal names, but for others' code
    recipe = recipe.model_copy(update={"data": with_class_names(recipe.data, names)})
    saver = checkpoint.Saver(out / "checkpoints", comm, recipe.checkpoints, rank_log.moved)
    executor, layout = _build_executor(plan, start)
    engines = executor.engines
    layout |= frozen | ({DATA: shown.fingerprint()._asdict()} if rank == 0 else {})  # rank 0 writes manifests
    ema = ShardedEMA(engines["generator"], recipe.ema.widths)
    if start.initial is not None:
        load_imported_ema(recipe, start.initial, engines["generator"], ema)
    statistics, sample_draws = Statistics(device), SampleDraws(draws, device)
    counters = _imported_counters(start, recipe)
    kept = _images_for_later(plan, slices, sample_draws)
    terms, augmentation = _build_terms(plan, start, engines, statistics, own)
    ema_state, reports = EMAState(engines["generator"], ema), Reports(statistics)
    entries = _entries(plan, engines, ema_state, counters)
    entries |= states(terms) | kept
    if start.found is not None:
        _restore(start.found, {**entries, REPORTS: reports}, layout, recipe)
    network, holds = recipe.networks[-1], rank in plan.placement("generator").ranks
    infer = engines["generator"].infer_everywhere if holds else None
    reals = build_reals(plan, network, slices[network], dataset, draws, device, counters.start)
    source, standing = build_sources(plan, slices, sample_draws, dataset, conditions, counters, infer)
    sources = Sources(reals, source, sample_draws, slices, kept.get(KEPT_IMAGES), kept.get(IMAGE_POOL))
    step = AdversarialStep(executor, plan, sources, statistics, terms, augmentation)
    rank_log.follow(executor)
    saver.left.update(start.left.values())
    reporter = _build_reporter(recipe, out, start, counters.nimg, conditions)
    return Run(
        recipe=recipe,
        out=out,
        reals=reals,
        source=source,
        step=step,
        ema=ema,
        grid=_build_grid(recipe, shown, conditions, reporter, None if start.found else counters.nimg),
        sampling_batch=slices["generator"]["generator"].num_samples,
        standing=standing,
        counters=counters,
        entries=entries,
        layout=layout,
        saver=saver,
        recovery=Recovery(
            step, reals, source, counters, {**entries, REPORTS: reports}, saver, recipe.max_rollbacks, rank_log.moved
        ),
        statistics=statistics,
        reports=reports,
        reporter=reporter,
        rank_log=rank_log,
        measuring=measuring,
        snapshots=_build_snapshots(recipe, out, ema_state, layout, counters, rank_log),
    )


def _build_terms(
    plan: RunPlan, start: Start, engines: Mapping[str, Engine], statistics: Statistics, own: Own
) -> tuple[list[Term], torch.Tensor | None]:
    """Build the terms of the losses; return the probability of D's augmentations too, if this rank holds it."""
    sums = [engine.sum_over_replicas for engine in engines.values()]
    if "discriminator" in engines:
        ours = Termed.of(engines["discriminator"].network, statistics, comm.sum_over_ranks, *sums)
    else:
        makes = comm.rank() in plan.placement("generator").output_ranks()
        ours = Termed(statistics, comm.device(), comm.sum_over_ranks, sums[0], sees_images=makes)
    generator, place = engines["generator"], (comm.rank(), comm.world_size())
    begin = partial(set_learned_codes, generator)
    ours = ours._replace(codebook=codes_of(generator.network), begin_codes=begin, place=place)
    terms = build_terms(plan.recipe, plan.objective, ours, own)
    if start.initial is not None:  # whose codes stay
        terms = [term for term in terms if not isinstance(term, KMeansStart)]
    return terms, ours.augmentation


def _check_exposed(plan: RunPlan, generator: Engine) -> None:
    """Refuse an adaptive weight at a parameter that the stage which makes G's images does not hold."""
    section, place = plan.objective.adversarial.adaptive, plan.placement("generator")
    if section is not None and comm.rank() in place.output_ranks():
        parameter_at(generator.network, section.parameter, "G's last stage" if place.num_stages > 1 else "G")


def _images_for_later(plan: RunPlan, slices: Mapping[str, Mapping[str, Slice]], draws: SampleDraws) -> dict[str, Any]:
    """Build what keeps G's images for later steps of D, as the recipe asks for it, by the names of their entries."""
    part, rank, device = slices["discriminator"]["discriminator"], comm.rank(), comm.device()
    stale = build_stale_images(plan, rank, part, device)
    pool = build_image_pool(plan, rank, part, draws, device)
    return ({KEPT_IMAGES: stale} if stale else {}) | ({IMAGE_POOL: pool} if pool else {})


def _training_dataset(recipe: Recipe, shown: ImageDataset) -> ImageDataset:
    """Return the data set to train on: ``shown``, or crops of its images, or two domains in passes.

    A teacher needs the images of latents.
    """
    has_own = recipe.data.crop_from or recipe.data.joins_domains
    dataset = build_training_dataset(recipe.data) if has_own else shown
    if recipe.objective.teacher:
        check_images(dataset, recipe.data)  # before engines are built
    return dataset


def _build_snapshots(
    recipe: Recipe, out: Path, ema_state: EMAState, layout: dict[str, Any], counters: Counters, rank_log: RankLog
) -> Snapshots | None:
    """Remove snapshots that are newer than this start, and build what saves further ones, if the recipe asks for it."""
    remove_abandoned(out, counters.nimg)
    return Snapshots(out, recipe, ema_state, layout, rank_log.moved) if recipe.ema.power else None


def _imported_counters(start: Start, recipe: Recipe) -> Counters:
    """Return the counters of a new run: they begin at 0, or at the images that imported networks have seen."""
    d_steps = recipe.objective.d_steps
    if start.initial is None or not start.initial.own:
        return Counters(d_steps)
    nimg = start.nimg
    update = nimg // recipe.batch
    return Counters(d_steps, update, nimg, position=update * recipe.batch * d_steps)


def _build_executor(plan: RunPlan, start: Start) -> tuple[Executor, dict[str, Any]]:
    """Build both engines, load initial weights if there are any, and describe the layout."""
    recipe = plan.recipe
    executor = build_executor(plan, _kept_divisions(plan, start))
    engines = executor.engines
    by_each(comm, lambda: _check_exposed(plan, engines["generator"]))
    if start.initial is not None:
        load_initial_weights(recipe, start.initial, engines)
    if recipe.init_from and "discriminator" in engines:
        freeze_first_layers(engines["discriminator"], recipe.init_from.freeze_discriminator)
    layout: dict[str, Any] = {"world_size": plan.world_size}
    for network in engines:
        engine = plan.engines[network]
        layout[f"{network}.stage"] = engine.file.stage
        layout[f"{network}.offload"] = engine.file.offload_optimizer
        layout[f"{network}.precision"] = engine.file.precision
        layout[f"{network}.pipeline_stages"] = engine.placement.num_stages
        layout[f"{network}.division"] = engines[network].division
        if parts := plan.statistics_parts(network):
            layout[f"{network}.ranks_of_statistics"] = sorted(set(map(len, parts)))
        if plan.is_split:
            layout[f"{network}.ranks"] = len(engine.placement.ranks)
    return executor, layout


def _kept_divisions(plan: RunPlan, start: Start) -> dict[str, list[int]]:
    """Return the checkpoint's partitions of networks with unchanged stages: a new measurement could differ."""
    found = {} if start.found is None else start.found.divisions
    return {n: bounds for n, bounds in found.items() if len(bounds) - 1 == plan.placement(n).num_stages}


def _entries(
    plan: RunPlan, engines: Mapping[str, Engine], ema_state: EMAState, counters: Counters
) -> dict[str, checkpoint.StateEntry]:
    """Return the entries of state that every run has, by name."""

    def state(network: str, engine: Engine) -> EngineState:
        first = plan.placement(network).ranks.start
        return EngineState(engine, partial(comm.from_rank, first)) if plan.is_split else EngineState(engine)

    return {
        **{network: state(network, engine) for network, engine in engines.items()},
        AVERAGE: ema_state,
        "counters": counters,
    }


def _restore(
    found: checkpoint.Checkpoint, entries: dict[str, checkpoint.StateEntry], layout: dict[str, Any], recipe: Recipe
) -> None:
    networks = {network: network_on_meta(recipe, network) for network in recipe.networks}
    checkpoint.restore(found, entries, comm, networks={**networks, AVERAGE: networks["generator"]})
    saved, given = dict(found.layout), dict(layout)
    before, now = saved.pop(DATA, None), given.pop(DATA, {})
    if isinstance(before, dict) and (changed := [key for key in now if before.get(key) != now[key]]):
        _log.log(NOTICE, "Resuming with other data than the checkpoint's: it differs in %s", ", ".join(changed))
    if changes := checkpoint.differences(saved, given):
        _log.log(NOTICE, "Resuming with another layout:\n  %s", "\n  ".join(changes))


def _build_reporter(recipe: Recipe, out: Path, start: Start, nimg: int, conditions: Conditions) -> Reporter:
    """Open the run's reports, without those that it leaves if it goes back, and say how it begins; keep some labels."""
    for_rank_zero(comm, lambda: begin(out, start))
    for_rank_zero(comm, lambda: drop_measurements(out, nimg))
    for_rank_zero(comm, lambda: keep_labels(out, conditions))
    reporter = Reporter(out, comm.rank(), recipe.total_nimg, nimg, recipe.monitor, recipe.model_dump())
    if recipe.objective.schedule == "overlapped":
        reporter.message("objective.schedule=overlapped: each network learns from the other as it was an update ago")
    if start.found is not None:
        reporter.message(f"Resuming from {start.found.path} ({nimg} images)")
    if start.initial is not None:
        reporter.message(f"beginning with the weights of {start.initial.where}")
    return reporter


def _build_grid(
    recipe: Recipe, dataset: ImageDataset, conditions: Conditions, reporter: Reporter, nimg: int | None
) -> SampleGrid:
    """Return the inputs of sample grids.

    At the beginning of a run, at ``nimg`` images, report a grid of real images, unless each sample is shown beside one.
    """
    samples = for_rank_zero(comm, lambda: samples_to_show(recipe, dataset, comm.device()))
    if recipe.translates:  # rank 0 reads for all ranks, which have to translate the same images
        images, labels = comm.from_rank_zero(samples)
        return translation_grid(recipe, images, labels, comm.device())
    images = torch.empty(0) if samples is None else samples[0]
    if nimg is not None:
        _report_reals(recipe, dataset, images, reporter, nimg)
    return latent_grid(recipe, conditions, comm.device(), images if len(images) > 1 else None)


def _report_reals(recipe: Recipe, dataset: ImageDataset, images: torch.Tensor, reporter: Reporter, nimg: int) -> None:
    """Report real images in the arrangement of the samples, or ``images`` where only these tell their classes."""
    columns = column_classes(recipe.data.num_classes)
    found = for_rank_zero(comm, lambda: images_of_classes(dataset, recipe.data, columns, GRID_ROWS, comm.device()))
    if found is not None:
        reporter.images("samples/real", found, len(columns), nimg)
    elif len(images):
        reporter.images("samples/real", images, REAL_COLUMNS, nimg)


def samples_to_show(recipe: Recipe, dataset: ImageDataset, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the real images of sample grids, and their labels; warn of those that use a part of their range.

    Raises:
        UserError: None of them is readable, or an autoencoder cannot be read.
    """
    return readable_samples(dataset, recipe.data, NUM_PAIRS if recipe.translates else NUM_SHOWN, device)
