"""Composition root of a training run: plan -> engines -> step -> loop."""

from __future__ import annotations

import functools
import logging
import os
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bigsgan import checkpoint, shipped
from bigsgan.adversarial import AdversarialStep, InputSource, LatentSource, SampleDraws, build_source
from bigsgan.adversarial.extras import build_extras
from bigsgan.adversarial.step import Sources
from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.config.run_directory import RECIPE_FILE, write_recipe
from bigsgan.data import RealImages, Slice, build_dataset, build_training_dataset, readable_images
from bigsgan.data.datasets import ImageDataset
from bigsgan.draws import Draws
from bigsgan.engines import Engine, MicroBatch
from bigsgan.engines.build import build_executor
from bigsgan.engines.compiling import seconds_compiling
from bigsgan.engines.executor import Executor
from bigsgan.engines.phases import update_phases
from bigsgan.errors import UserError
from bigsgan.metrics.features import RECIPE, check_features
from bigsgan.models.build import build_network
from bigsgan.monitor import NOTICE, RankLog, Reporter, Statistics, check_wandb, open_rank_log
from bigsgan.runtime import comm, memory, roll_call
from bigsgan.runtime.ending import exit_status
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.runtime.locking import hold
from bigsgan.training.alike import check_plans, open_alike, refuse_other_codec
from bigsgan.training.ema import ShardedEMA
from bigsgan.training.initial_weights import freeze_first_layers, load_imported_ema, load_initial_weights
from bigsgan.training.loop import Run, training_loop
from bigsgan.training.measuring import Measuring
from bigsgan.training.power import AVERAGE
from bigsgan.training.recovery import Recovery
from bigsgan.training.sampling import STANDING_BATCHES, SampleGrid, has_standing_statistics, latent_grid, pair_grid
from bigsgan.training.snapshots import Snapshots, remove_abandoned
from bigsgan.training.start import Start, find_start
from bigsgan.training.state import Counters, EMAState, EngineState
from bigsgan.training.stopping import LAUNCHER_ENDED, StopRequests
from bigsgan.training.watchdog import Watchdog

DATA = "data"
"""Key of a manifest's layout with the fingerprint of the data set."""

NUM_SHOWN, REAL_COLUMNS, NUM_PAIRS = 100, 10, 18

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


def main(plan: RunPlan, requests: StopRequests, allowed: Collection[str] = (), stopped_status: int = 0) -> int:
    """Train, and return the process's exit status. Every rank calls this.

    It is 0 where the run is complete, 2 after the message of a UserError, and 1 where a launcher's end stopped it.

    Args:
        plan: The run's.
        requests: To stop. They may end the process at once until the ranks have joined.
        allowed: Keys of the recipe that may differ from a checkpoint's, though they change its meaning.
        stopped_status: What to return where a signal stopped the run before its end.
    """

    def work() -> int:
        with requests.listening(), memory.naming_remedy(*_memory_remedy(plan)):
            with roll_call.taken():
                comm.initialize(comm.PATIENCE_HOURS * 3600)  # the watchdog is not as patient
            requests.joined()
            stopped_by = _run(plan, allowed, requests)
            requests.end_undisturbed()
        comm.leave()
        return {None: 0, LAUNCHER_ENDED: 1}.get(stopped_by, stopped_status)

    status = exit_status(work)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
        try:
            stream.flush()
        except OSError:  # what it holds would fail again when Python ends, and replace the status by 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def _run(plan: RunPlan, allowed: Collection[str], requests: StopRequests) -> str | None:
    """Train, and return what stopped the run before it was complete, the same on all ranks, or None."""
    check_plans(plan)
    recipe, out = plan.recipe, Path(plan.recipe.out)
    if recipe.metrics:  # before anything is written
        check_features(recipe.metrics.features, recipe.data, RECIPE)
    if "wandb" in recipe.monitor:
        _on_rank_zero(check_wandb)
    rank_log = open_rank_log(out / "logs", comm.rank(), lambda text: print(text, file=sys.stderr))
    choose_kernels(recipe.deterministic)
    with _alone_in(out):
        return _train(plan, allowed, requests, out, rank_log)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keep other jobs from training in a run directory; a collective.

    Raises:
        UserError: One does already.
    """
    remedy = "wait until that job has ended, or end it, or give another `out`"
    release = _on_rank_zero(lambda: hold(out / ".lock", "out", str(out), remedy))
    try:
        yield
    finally:
        if release is not None:
            release()


def _on_rank_zero(work: Callable[[], _Result]) -> _Result | None:
    """Do something on rank 0 alone, and return its result there; a UserError is raised on all ranks. A collective."""
    refused, result = None, None
    if comm.rank() == 0:
        try:
            result = work()
        except UserError as error:
            refused = error
    if refused := comm.from_rank_zero(refused):
        raise refused
    return result


def _train(plan: RunPlan, allowed: Collection[str], requests: StopRequests, out: Path, rank_log: RankLog) -> str | None:
    recipe, rank = plan.recipe, comm.rank()
    start = find_start(plan, out, allowed)
    if start.nimg >= recipe.total_nimg:
        if rank == 0:
            print(f"{out} is complete at {start.nimg} images; raise total_nimg to continue")
        return None
    rank_log.phase = "build"
    _log.info("%d ranks on %s; recipe:\n%s", comm.world_size(), comm.device(), recipe.to_yaml())
    run = build_run(plan, out, start, rank_log)
    if rank == 0:  # not before the recipe has proved to fit the data and the checkpoint
        write_recipe(recipe, out, plan.engines)
    rank_log.write = run.reporter.message
    board = partial(
        comm.open_board, comm.from_rank_zero(uuid.uuid4().hex)
    )  # a launcher may keep its store for a restart
    watchdog = Watchdog(rank, comm.world_size(), recipe.hang_timeout_seconds, rank_log, board, seconds_compiling)
    try:
        with watchdog.watching():
            complete = training_loop(run, requests)
    finally:
        run.close()
    stopped_by = None if complete else _stopped_by(requests)
    run.reporter.message(_stopping_line(stopped_by, run.counters.nimg) if stopped_by else _closing_lines(out, run))
    return stopped_by


def build_run(plan: RunPlan, out: Path, start: Start, rank_log: RankLog) -> Run:
    """Put a run together, and restore what it begins from. Every rank calls this.

    Raises:
        UserError: The data, the checkpoint or this machine do not fit the plan.
    """
    recipe, device, rank = plan.recipe, comm.device(), comm.rank()
    shown = open_alike(build_dataset, recipe.data)
    dataset = build_training_dataset(recipe.data) if recipe.data.crop_from else shown
    executor, layout = _build_executor(plan, start)
    engines = executor.engines
    if rank == 0:  # which writes manifests
        layout[DATA] = shown.fingerprint()._asdict()
    ema = ShardedEMA(engines["generator"], recipe.ema.power.widths if recipe.ema.power else ())
    if start.initial is not None:
        load_imported_ema(recipe, start.initial, engines["generator"], ema)
    statistics, counters = Statistics(device), _imported_counters(start, recipe)
    sums = comm.sum_over_ranks, engines["generator"].sum_over_replicas
    extras = build_extras(recipe, engines["discriminator"].network, statistics, device, *sums)
    averages = EMAState(engines["generator"], ema)
    entries = {**_entries(plan, engines, averages, counters), **extras.entries()}
    if start.found is not None:
        refuse_other_codec(start.found.layout.get(DATA), recipe.data)
        _restore(start.found, entries, layout, recipe)
    slices, draws = _slices(plan, rank), Draws(recipe.seed)
    reals = _build_reals(plan, "discriminator", slices["discriminator"], dataset, draws, counters)
    sample_draws = SampleDraws(draws, device)
    source, standing = _build_source(plan, slices, sample_draws, dataset, counters)
    sources = Sources(reals, source, sample_draws, slices)
    phases = functools.partial(update_phases, plan)
    step = AdversarialStep(executor, phases, plan.objective, sources, statistics, extras)
    rank_log.detail = lambda: executor.doing
    reporter = Reporter(out, rank, recipe.total_nimg, counters.nimg, recipe.monitor, recipe.model_dump())
    _report_start(reporter, start, counters.nimg)
    checkpoints, sampling_batch = out / "checkpoints", slices["generator"]["generator"].num_samples
    return Run(
        recipe=recipe,
        out=out,
        reals=reals,
        source=source,
        step=step,
        ema=ema,
        grid=_build_grid(recipe, shown, reporter, counters.nimg),
        sampling_batch=sampling_batch,
        standing=standing,
        counters=counters,
        entries=entries,
        layout=layout,
        saver=checkpoint.Saver(checkpoints, comm, recipe.checkpoints, rank_log.moved),
        recovery=Recovery(step, reals, source, counters, entries, checkpoints, recipe.max_rollbacks, rank_log.moved),
        statistics=statistics,
        reporter=reporter,
        rank_log=rank_log,
        measuring=Measuring(plan, out, shown, sampling_batch, rank_log) if recipe.metrics else None,
        snapshots=_build_snapshots(recipe, out, averages, layout, counters, rank_log),
    )


def _build_snapshots(
    recipe: Recipe, out: Path, averages: EMAState, layout: dict[str, Any], counters: Counters, rank_log: RankLog
) -> Snapshots | None:
    """What saves snapshots of the power function averages; those of a future that is not to be are removed."""
    remove_abandoned(out, counters.nimg)
    return Snapshots(out, recipe, averages, layout, rank_log.moved) if recipe.ema.power else None


def _imported_counters(start: Start, recipe: Recipe) -> Counters:
    """Counters of a run that begins: at 0, or at the images that imported networks had seen."""
    d_steps = recipe.objective.d_steps
    if start.initial is None or not start.initial.own:
        return Counters(d_steps)
    nimg = start.initial.checkpoint.nimg
    update = nimg // recipe.batch
    return Counters(d_steps, update, nimg, position=update * recipe.batch * d_steps)


def _build_executor(plan: RunPlan, start: Start) -> tuple[Executor, dict[str, Any]]:
    """Both engines, with what they begin with but their own checkpoint, and how they lie on the ranks."""
    recipe = plan.recipe
    executor = build_executor(plan, _kept_divisions(plan, start))
    engines = executor.engines
    if start.initial is not None:
        load_initial_weights(recipe, start.initial, engines)
    if recipe.init_from:
        freeze_first_layers(recipe, engines["discriminator"], recipe.init_from.freeze_discriminator)
    layout: dict[str, Any] = {"world_size": plan.world_size}
    for network, engine in plan.engines.items():
        layout[f"{network}.stage"] = engine.file.stage
        layout[f"{network}.offload"] = engine.file.offload_optimizer
        layout[f"{network}.precision"] = engine.file.precision
        layout[f"{network}.pipeline_stages"] = engine.placement.num_stages
        layout[f"{network}.division"] = engines[network].division
        if plan.is_split:
            layout[f"{network}.ranks"] = len(engine.placement.ranks)
    return executor, layout


def _kept_divisions(plan: RunPlan, start: Start) -> dict[str, list[int]]:
    """Return the checkpoint's partitions of networks with unchanged stages: a new measurement could differ."""
    found = {} if start.found is None else start.found.divisions
    return {n: bounds for n, bounds in found.items() if len(bounds) - 1 == plan.placement(n).num_stages}


def _entries(
    plan: RunPlan, engines: Mapping[str, Engine], averages: EMAState, counters: Counters
) -> dict[str, checkpoint.StateEntry]:
    """The state that every run has, by name."""

    def state(network: str, engine: Engine) -> EngineState:
        first = plan.placement(network).ranks.start
        return EngineState(engine, partial(comm.from_rank, first)) if plan.is_split else EngineState(engine)

    return {
        **{network: state(network, engine) for network, engine in engines.items()},
        AVERAGE: averages,
        "counters": counters,
    }


def _restore(
    found: checkpoint.Checkpoint, entries: dict[str, checkpoint.StateEntry], layout: dict[str, Any], recipe: Recipe
) -> None:
    with torch.device("meta"):
        networks = {network: build_network(recipe, network) for network in NETWORKS}
    checkpoint.restore(found, entries, comm, networks={**networks, AVERAGE: networks["generator"]})
    saved, given = dict(found.layout), dict(layout)
    before, now = saved.pop(DATA, None), given.pop(DATA, {})
    if isinstance(before, dict) and (changed := [key for key in now if before.get(key) != now[key]]):
        _log.log(NOTICE, "Resuming with other data than the checkpoint's: it differs in %s", ", ".join(changed))
    if changes := checkpoint.differences(saved, given):
        _log.log(NOTICE, "Resuming with another layout:\n  %s", "\n  ".join(changes))


def _report_start(reporter: Reporter, start: Start, nimg: int) -> None:
    if start.found is not None:
        reporter.message(f"Resuming from {start.found.path} ({nimg} images)")
    if start.initial is not None:
        reporter.message(f"beginning with the weights of {start.initial.checkpoint.path}")


def _build_grid(recipe: Recipe, dataset: ImageDataset, reporter: Reporter, nimg: int) -> SampleGrid:
    """What sample grids show; a grid of real images is shown at once, unless they stand beside the samples."""
    num = NUM_PAIRS if recipe.data.paired else NUM_SHOWN
    images = _on_rank_zero(lambda: readable_images(dataset, recipe.data, num, comm.device()))
    images = torch.empty(0) if images is None else images
    if recipe.data.paired:  # one rank reads, as all have to show the same
        images = comm.from_rank_zero(images)
        if not len(images):
            raise UserError("data.root", recipe.data.root, "contains no readable pairs", "repair its images")
        return pair_grid(recipe, images, comm.device())
    if len(images):
        reporter.images("samples/real", images, REAL_COLUMNS, nimg)
    return latent_grid(recipe, comm.device(), images if len(images) > 1 else None)


def _slices(plan: RunPlan, rank: int) -> dict[str, dict[str, Slice]]:
    """What each network computes on this rank in the phase of each: ``slices[phase][network]``."""
    places = {network: plan.placement(network) for network in NETWORKS}
    batch, accumulation = plan.recipe.batch, plan.recipe.accumulation_of
    return {
        phase: {n: Slice(batch, accumulation(phase), p.replica(rank), p.num_replicas) for n, p in places.items()}
        for phase in NETWORKS
    }


def _build_reals(
    plan: RunPlan, network: str, slices: dict[str, Slice], dataset: ImageDataset, draws: Draws, counters: Counters
) -> RealImages:
    """Start to read this rank's shard of the data, on the ranks of the network's first stage."""
    recipe, part = plan.recipe, slices[network]
    return RealImages(
        dataset,
        recipe.data,
        draws,
        part,
        comm.device(),
        position=counters.position,
        skipped=counters.skipped,
        reads=plan.placement(network).stage(comm.rank()) == 0,
    )


def _build_source(
    plan: RunPlan, slices: dict[str, dict[str, Slice]], draws: SampleDraws, dataset: ImageDataset, counters: Counters
) -> tuple[InputSource, Sequence[MicroBatch]]:
    """Where the generator's inputs come from, and some of them for standing statistics."""
    recipe, d_phase, g_phase = plan.recipe, slices["discriminator"], slices["generator"]
    places = [plan.placement(network) for network in NETWORKS]
    own = None
    if recipe.inputs_from_data and places[0].input_ranks() != places[1].input_ranks():
        own = _build_reals(plan, "generator", d_phase, dataset, Draws(recipe.seed), counters)
    source, standing = build_source(recipe, draws, own), list[MicroBatch]()
    if not recipe.data.paired and has_standing_statistics(recipe):
        latents = LatentSource(draws, recipe.latent_size, recipe.data.num_classes, recipe.generator.draws)
        standing = [latents.phase("standing", (i,), g_phase["generator"])(0) for i in range(STANDING_BATCHES)]
    return source, standing


def _stopped_by(requests: StopRequests) -> str:
    """What asked the run to stop, which one rank alone may know; a signal before a launcher's end. A collective."""
    reasons = [reason for reason in comm.gather_objects(requests.reason) or [] if reason]
    chosen: str = comm.from_rank_zero(min(reasons, key=lambda reason: reason == LAUNCHER_ENDED, default=None))
    return chosen


def _stopping_line(reason: str, nimg: int) -> str:
    where = f"at {nimg} images, which are saved" if nimg else "before the first update"
    return f"stopped by {reason} {where}; the same command resumes"


def _closing_lines(out: Path, run: Run) -> str:
    nimg, board = run.counters.nimg, "tensorboard" in run.recipe.monitor
    return "\n".join(
        [
            f"done: {nimg} images",
            f"  samples      {out / 'samples'}",
            f"  checkpoint   {out / 'checkpoints' / f'{nimg:012d}'}",
            f"  TensorBoard  {out / 'tensorboard'}" if board else f"  reports      {out / 'metrics.jsonl'}",
            *([f"look at it:    tensorboard --logdir {out.parent}"] if board else []),
            f"continue:      {shipped.train_command()} --config {out / RECIPE_FILE} total_nimg={2 * nimg}",
        ]
    )


def _memory_remedy(plan: RunPlan) -> tuple[str, str]:
    """Say where memory ran out, and what to do about it."""
    sizes = ", ".join(f"{plan.engines[n].micro_batch_size} ({n})" for n in NETWORKS)
    staged = any(plan.placement(network).num_stages > 1 for network in NETWORKS)
    keeps = staged and plan.recipe.pipeline.generator_phase == "keep"
    return (
        f"on rank {comm.rank()} with {sizes} images a micro-batch",
        ("set pipeline.generator_phase=recompute; or set " if keeps else "set ")
        + " and ".join(f"engines.{n}.activation_checkpointing=true" for n in NETWORKS)
        + f"; or start a new `out` with more micro-batches (accumulation={2 * plan.recipe.accumulation}) or "
        + ("more pipeline stages" if staged else "a higher ZeRO stage (ds_configs/zero3.json)"),
    )
